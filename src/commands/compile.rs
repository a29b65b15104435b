//! `paceline compile FILE -o DIR`.

use crate::bundle;
use crate::cli::{Compile, Emit};
use crate::driver::{self, Analysed};
use crate::failure::Failure;
use crate::output;
use crate::report::bytes;
use model::build::Build;
use model::target::Target;
use std::path::Path;

pub fn run(args: &Compile) -> Result<(), Failure> {
    let (source, analysed) = driver::compilable(&args.spec)?;
    let build = analysed.build.as_ref().expect("what can be compiled was built");
    if let Some(level) = args.emit {
        return write_text(&emit(&analysed, build, level)?, args.output.as_deref());
    }
    let output = args
        .output
        .as_ref()
        .ok_or_else(|| Failure::Usage("compile needs -o DIR for the bundle, or --emit to print a level".to_owned()))?;
    let made = bundle::make(bundle::manifest(&source, &args.spec, &analysed), &analysed, args.ptxas.as_deref())?;
    runtime::bundle_dir::write(output, &made).map_err(|e| Failure::file("write", output, e))?;
    let code: usize = made.images.iter().map(|i| i.code.len()).sum();
    output::write(&format!(
        "{}: {} stages, {} kernels, {} of code for {}\n",
        output.display(),
        made.images.len(),
        made.manifest.kernels.len(),
        bytes(code as u64),
        made.manifest.cpu
    ))
}

fn emit(analysed: &Analysed, build: &Build, level: Emit) -> Result<String, Failure> {
    let kernels = &build.kernels;
    let text = match (level, analysed.target) {
        (Emit::Sched, _) => codegen::emit_sched(&analysed.program, &build.stages, kernels),
        (Emit::Linalg, Target::Cpu(cpu)) => codegen::emit(kernels, cpu, codegen::Level::Linalg),
        (Emit::Llvm, Target::Cpu(cpu)) => codegen::emit(kernels, cpu, codegen::Level::Llvm),
        (Emit::Llvm, Target::Cuda(chip)) => codegen::cuda::llvm_texts(kernels, chip),
        (Emit::Gpu, Target::Cuda(_) | Target::Emulated) => codegen::cuda::gpu_text(kernels),
        (Emit::Ptx, Target::Cuda(chip)) => bundle::device_code(kernels, chip, &|_, _| {})
            .map(|codes| codes.iter().filter_map(|code| code.ptx()).map(|ptx| format!("// -----\n{ptx}")).collect()),
        (Emit::Linalg, _) => return Err(no_level("--emit linalg", "cpu")),
        (Emit::Gpu | Emit::Ptx | Emit::Llvm, _) => return Err(no_level("what --emit names", "cuda:CHIP")),
    };
    text.map_err(|e| Failure::Outside(e.to_string()))
}

fn no_level(level: &str, target: &str) -> Failure {
    Failure::Usage(format!("{level} is a level of --target {target}"))
}

fn write_text(text: &str, output: Option<&Path>) -> Result<(), Failure> {
    match output {
        Some(path) => std::fs::write(path, text).map_err(|e| Failure::file("write", path, e)),
        None => output::write(text),
    }
}
