//! The levels of lowering as text, for `--emit`.

use crate::context::CodegenContext;
use crate::error::CodegenError;
use crate::{kernels, pipeline, sched};
use artifact::program::Stage;
use artifact::stream::Program;
use model::kernel::Kernel;
use model::target::CpuClass;

/// A level of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// Linalg with its strategy: what the compiler starts from. Each part between `// -----` lines can be given to mlir-opt with
    /// the pipelines that stand above it. (Before `vectorise` the compiler forwards padded tiles: see `forward.rs`.)
    Linalg,
    /// Optimised LLVM IR.
    Llvm,
}

/// All kernels at one level.
pub fn emit(kernels: &[Kernel], cpu: CpuClass, level: Level) -> Result<String, CodegenError> {
    let context = CodegenContext::new()?;
    let mut texts = Vec::new();
    for kernel in kernels {
        texts.push(match level {
            Level::Linalg => linalg_text(kernel, cpu),
            Level::Llvm => pipeline::llvm_text(&context, kernel, cpu)?,
        });
    }
    Ok(texts.join("\n"))
}

/// Streams and bodies as a verified module of the `sched` dialect.
pub fn emit_sched(program: &Program, stages: &[Stage], kernels: &[Kernel]) -> Result<String, CodegenError> {
    sched::module(&CodegenContext::new()?, program, stages, kernels)
}

fn linalg_text(kernel: &Kernel, cpu: CpuClass) -> String {
    let module = pipeline::module_text(&kernels::source(kernel, cpu));
    let vectorise = module.contains("@vectorise(").then_some(pipeline::VECTORISE);
    let steps = [Some(pipeline::STRATEGY), vectorise, Some(pipeline::BUFFERISE), Some(pipeline::LOWER)];
    let steps = steps.into_iter().flatten().map(|step| format!("// mlir-opt-22 --pass-pipeline='{step}'\n"));
    format!("// -----\n// {}\n{}{module}", kernel.name, steps.collect::<String>())
}
