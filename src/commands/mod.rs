//! One file per subcommand.

mod check;
mod compare;
#[cfg(feature = "codegen")]
mod compile;
mod explain;
mod export;
mod fmt;
mod gpu_check;
mod gpu_products;
mod import;
mod inspect;
mod plan;
mod run;
mod timeline;
mod tune;
mod verify;

use crate::cli::Command;
use crate::failure::Failure;
use artifact::bundle::Bundle;
use std::path::Path;

/// Runs one subcommand.
pub fn run(command: Command) -> Result<(), Failure> {
    match command {
        Command::Check(args) => check::run(&args),
        Command::Compare(args) => compare::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Timeline(args) => timeline::run(&args),
        Command::Compile(args) => compile(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Verify(args) => verify::run(&args),
        Command::Tune(args) => tune::run(&args),
        Command::Run(args) => run::run(&args),
        Command::Fmt(args) => fmt::run(&args),
        Command::Import(args) => import::run(&args),
        Command::Export(args) => export::run(&args),
        Command::Explain { code } => explain::run(&code),
        Command::GpuCheck(args) => gpu_check::run(&args),
        Command::GpuExpect(args) => gpu_check::expect(&args),
        #[cfg(feature = "codegen")]
        Command::DeviceCode => device_code(),
    }
}

/// Reads and verifies the bundle in a directory.
fn read_bundle(dir: &Path) -> Result<Bundle, Failure> {
    runtime::bundle_dir::read(dir).map_err(|e| Failure::Outside(format!("{}: {e}", dir.display())))
}

#[cfg(feature = "codegen")]
fn device_code() -> Result<(), Failure> {
    codegen::cuda::serve(&mut std::io::stdin().lock(), &mut std::io::stdout().lock())
        .map_err(|e| Failure::Outside(format!("device code: {e}")))
}

#[cfg(feature = "codegen")]
fn compile(args: &crate::cli::Compile) -> Result<(), Failure> {
    compile::run(args)
}

#[cfg(not(feature = "codegen"))]
fn compile(args: &crate::cli::Compile) -> Result<(), Failure> {
    crate::driver::compilable(&args.spec)?;
    Err(no_codegen())
}

/// What a build without LLVM answers to a request for code.
#[cfg(not(feature = "codegen"))]
pub fn no_codegen() -> Failure {
    Failure::Outside(
        "this paceline was built without code generation: build it with LLVM/MLIR 22 (`cargo build --release`), \
         or run a bundle that was compiled elsewhere"
            .to_owned(),
    )
}
