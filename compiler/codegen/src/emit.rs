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
    /// Linalg with its strategy. The parts between `// -----` lines can each be given to mlir-opt with the pipelines that stand above them.
    Linalg,
    /// Optimised LLVM IR.
    Llvm,
}

/// All kernels at one level.
pub fn emit(kernels: &[Kernel], cpu: CpuClass, level: Level) -> Result<String, CodegenError> {
    let context = CodegenContext::new()?;
    let mut text = match level {
        Level::Linalg => pipelines(),
        Level::Llvm => String::new(),
    };
    for kernel in kernels {
        text += &match level {
            Level::Linalg => {
                format!("// -----\n// {}\n{}", kernel.name, pipeline::module_text(&kernels::source(kernel, cpu)))
            }
            Level::Llvm => pipeline::llvm_text(&context, kernel, cpu)?,
        };
    }
    Ok(text)
}

/// Streams and bodies as a verified module of the `sched` dialect.
pub fn emit_sched(program: &Program, stages: &[Stage], kernels: &[Kernel]) -> Result<String, CodegenError> {
    sched::module(&CodegenContext::new()?, program, stages, kernels)
}

fn pipelines() -> String {
    let steps = [pipeline::STRATEGY, pipeline::BUFFERISE, pipeline::LOWER];
    steps.map(|step| format!("// mlir-opt-22 --pass-pipeline='{step}'\n")).concat()
}
