//! From a kernel to an object file: the order of everything, in one function.
//!
//! The pass pipelines are in mlir-opt's notation; `paceline compile --emit linalg` prints a kernel with its strategy, which
//! `mlir-opt-22 --pass-pipeline=...` takes as it is.

use crate::context::CodegenContext;
use crate::error::CodegenError;
use crate::ffi::{LlvmContext, LlvmModule, TargetMachine};
use crate::kernels::{self, KernelSource};
use crate::{elements, entry, forward, object, prefetch, scratch};
use melior::ir::Module;
use model::kernel::Kernel;
use model::target::CpuClass;

/// Tiles, fuses, packs and vectorises, on tensors.
pub const STRATEGY: &str = "builtin.module(transform-interpreter,canonicalize,cse)";

/// The strategy's second part, where it has one.
pub const VECTORISE: &str =
    "builtin.module(canonicalize,cse,transform-interpreter{entry-point=vectorise},canonicalize,cse)";

/// Tensors become memory. What then is still allocated is static and stands at the function's entry: packing buffers and temporaries.
pub const BUFFERISE: &str = "builtin.module(canonicalize,cse,eliminate-empty-tensors,one-shot-bufferize,\
     func.func(buffer-hoisting,buffer-loop-hoisting),canonicalize,cse)";

/// Vectors of several dimensions become loops and one-dimensional vectors.
pub const LOWER: &str = "builtin.module(transform-interpreter{entry-point=lower},cse)";

/// Memory is then reached by loads and stores alone, so that operands can get the elements that they have.
pub const ADDRESS: &str = "builtin.module(func.func(convert-linalg-to-loops),func.func(expand-strided-metadata),memref-expand,\
     fold-memref-alias-ops,expand-strided-metadata,lower-affine,convert-vector-to-scf{full-unroll=1})";

/// What is left becomes the LLVM dialect, with one plain pointer per argument.
pub const TO_LLVM: &str = "builtin.module(convert-scf-to-cf,\
     convert-vector-to-llvm{enable-x86vector=0},convert-math-to-llvm,finalize-memref-to-llvm,\
     convert-func-to-llvm{use-bare-ptr-memref-call-conv=1},convert-arith-to-llvm,convert-index-to-llvm,convert-cf-to-llvm,\
     convert-ub-to-llvm,reconcile-unrealized-casts,cse)";

/// LLVM's own optimisations, in `opt`'s notation. Without fastmath flags none of them changes a bit of a result. Measured against
/// none but sroa and early-cse: cross-entropy and LayerNorm's gradient a tenth faster, matmuls and attention the same, compile time
/// twice as long (0.4 s for a matmul).
pub const OPTIMISE: &str = "default<O2>";

/// A compiled kernel: an ELF object that exports the kernel's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Object {
    pub kernel: String,
    pub bytes: Vec<u8>,
}

/// What LLVM is told about a CPU class.
pub fn target_machine(cpu: CpuClass) -> Result<TargetMachine, CodegenError> {
    TargetMachine::new(cpu.name(), "-prefer-256-bit").map_err(|e| CodegenError::new(cpu.name(), "target", e))
}

/// Compiles one kernel. The object uses exactly the kernel's scratch bytes, calls nothing, and has no writable data.
pub fn compile_kernel(context: &CodegenContext, kernel: &Kernel, cpu: CpuClass) -> Result<Object, CodegenError> {
    compile_source(context, kernel, kernels::source(kernel, cpu), cpu)
}

/// As [`compile_kernel`], from a given source.
pub fn compile_source(
    context: &CodegenContext,
    kernel: &Kernel,
    source: KernelSource,
    cpu: CpuClass,
) -> Result<Object, CodegenError> {
    let machine = target_machine(cpu)?;
    let llvm = LlvmContext::new();
    let module = optimised(context, &llvm, &machine, kernel, source)?;
    let bytes = module.emit_object(&machine).map_err(|e| CodegenError::new(&kernel.name, "emit", e))?;
    // Instruction selection reports here, and so does a stack frame that is too large.
    refuse_messages(&llvm, kernel, "emit")?;
    object::check(&kernel.name, &bytes)?;
    Ok(Object { kernel: kernel.name.clone(), bytes })
}

/// LLVM IR of one kernel as text, optimised.
pub fn llvm_text(context: &CodegenContext, kernel: &Kernel, cpu: CpuClass) -> Result<String, CodegenError> {
    let llvm = LlvmContext::new();
    Ok(optimised(context, &llvm, &target_machine(cpu)?, kernel, kernels::source(kernel, cpu))?.print())
}

/// The kernel with its strategy as one module, for mlir-opt.
pub fn module_text(source: &KernelSource) -> String {
    // Aliases (`#map = ...`) may stand only outside of the module.
    let (aliases, body): (Vec<_>, Vec<_>) = source.linalg.lines().partition(|line| line.starts_with('#'));
    let mut text = String::new();
    for alias in aliases {
        text += alias;
        text += "\n";
    }
    text += "module attributes {transform.with_named_sequence} {\n";
    text += &body.join("\n");
    text += "\n";
    text += &source.strategy;
    text + "}\n"
}

fn optimised<'l>(
    context: &CodegenContext,
    llvm: &'l LlvmContext,
    machine: &TargetMachine,
    kernel: &Kernel,
    source: KernelSource,
) -> Result<LlvmModule<'l>, CodegenError> {
    let lowered = to_llvm_dialect(context, kernel, &source)?;
    let module = llvm.translate(&lowered).ok_or_else(|| context.error(&kernel.name, "translate"))?;
    module.set_target(machine);
    module.run_passes(OPTIMISE, machine).map_err(|e| CodegenError::new(&kernel.name, "optimise", e))?;
    refuse_messages(llvm, kernel, "optimise")?;
    Ok(module)
}

fn to_llvm_dialect<'c>(
    context: &'c CodegenContext,
    kernel: &Kernel,
    source: &KernelSource,
) -> Result<Module<'c>, CodegenError> {
    let name = kernel.name.as_str();
    let mut module = context.parse(name, "parse", &module_text(source))?;
    context.run(name, "strategy", STRATEGY, &mut module)?;
    let in_two_parts = source.strategy.contains("@vectorise(");
    if in_two_parts {
        forward::tile_writes(context, name, &module)?;
        context.run(name, "vectorise", VECTORISE, &mut module)?;
    }
    context.run(name, "bufferise", BUFFERISE, &mut module)?;
    context.run(name, "lower", LOWER, &mut module)?;
    if in_two_parts {
        prefetch::epilogue_operands(context, kernel, &module)?;
    }
    entry::drop_strategy(context, &module);
    scratch::views(context, kernel, &module)?;
    context.run(name, "address", ADDRESS, &mut module)?;
    elements::narrow(context, kernel, &module)?;
    context.run(name, "to LLVM", TO_LLVM, &mut module)?;
    entry::wrap(context, kernel, &module)?;
    Ok(module)
}

fn refuse_messages(llvm: &LlvmContext, kernel: &Kernel, step: &'static str) -> Result<(), CodegenError> {
    let messages = llvm.take_messages();
    if messages.is_empty() { Ok(()) } else { Err(CodegenError::new(&kernel.name, step, messages)) }
}
