//! `paceline verify BUNDLE`.

use crate::cli::BundleArg;
use crate::failure::Failure;

pub fn run(args: &BundleArg) -> Result<(), Failure> {
    let bundle = super::read_bundle(&args.bundle)?;
    let manifest = &bundle.manifest;
    println!(
        "{}: sound: {} stages on {} ranks, compiled for {} by LLVM {}; checksums, memory map and instruction streams verified",
        args.bundle.display(),
        manifest.stages.len(),
        manifest.memory.len(),
        manifest.cpu,
        manifest.llvm,
    );
    Ok(())
}
