//! From a device kernel's text to LLVM IR, and from there to PTX, or to machine code of this CPU that the emulator runs.
//!
//! LLVM's NVPTX code generator ends the process where it meets what it can't select, so [`assembly`] belongs in a process of its own.

use super::instrument;
use crate::context::CodegenContext;
use crate::error::CodegenError;
use crate::ffi::{LlvmContext, LlvmModule, TargetMachine};
use crate::ir;
use melior::ir::RegionLike;
use melior::ir::block::BlockLike;
use melior::ir::operation::OperationLike;
use model::target::Chip;

/// The gpu dialect becomes NVVM, with one plain pointer per operand. No pass may bring in a call of a library.
pub const PIPELINE: &str = "builtin.module(gpu.module(canonicalize,cse,convert-scf-to-cf,\
     convert-gpu-to-nvvm{use-bare-ptr-memref-call-conv=1},canonicalize,cse,reconcile-unrealized-casts))";

/// LLVM's own optimisations. Without fastmath flags none of them changes a bit of a result.
const OPTIMISE: &str = "default<O3>";

/// What the emulator's machine code needs of the CPU: a fused multiply-add in one instruction.
const EMULATED_CPU: &str = "x86-64-v3";

/// LLVM's feature for a chip's PTX version.
pub fn features(chip: Chip) -> String {
    format!("+ptx{}", chip.ptx_version())
}

/// PTX of a module with one `gpu.module`, see [`super::DeviceKernel::module`]. `chip` and `features` as LLVM names them.
pub fn assembly(
    context: &CodegenContext,
    name: &str,
    module: &str,
    (chip, features): (&str, &str),
) -> Result<String, CodegenError> {
    let machine = TargetMachine::gpu(chip, features).map_err(|e| CodegenError::new(name, "target", e))?;
    let llvm = LlvmContext::new();
    let optimised = optimised(context, &llvm, &machine, name, module)?;
    let ptx = optimised.emit_assembly(&machine).map_err(|e| CodegenError::new(name, "emit", e))?;
    refuse_messages(&llvm, name, "emit")?;
    Ok(ptx)
}

/// The optimised LLVM IR that PTX is made from.
pub fn llvm_text(context: &CodegenContext, name: &str, module: &str, chip: Chip) -> Result<String, CodegenError> {
    let machine = TargetMachine::gpu(chip.name(), &features(chip)).map_err(|e| CodegenError::new(name, "target", e))?;
    let llvm = LlvmContext::new();
    Ok(optimised(context, &llvm, &machine, name, module)?.print())
}

/// The same LLVM IR as machine code of this CPU, each access of memory checked: an ELF object for the emulator.
pub fn emulated_object(
    context: &CodegenContext,
    name: &str,
    module: &str,
    chip: Chip,
) -> Result<Vec<u8>, CodegenError> {
    let fail = |step| move |message: String| CodegenError::new(name, step, message);
    let device = llvm_text(context, name, module, chip)?;
    let host = instrument::for_emulator(&device).map_err(fail("instrument"))?;
    let machine = TargetMachine::new(EMULATED_CPU, "").map_err(fail("target"))?;
    let llvm = LlvmContext::new();
    let module = llvm.parse(&host).map_err(fail("parse for the emulator"))?;
    module.set_target(&machine);
    let object = module.emit_object(&machine).map_err(fail("emit for the emulator"))?;
    refuse_messages(&llvm, name, "emit for the emulator")?;
    Ok(object)
}

fn optimised<'l>(
    context: &CodegenContext,
    llvm: &'l LlvmContext,
    machine: &TargetMachine,
    name: &str,
    text: &str,
) -> Result<LlvmModule<'l>, CodegenError> {
    let mut module = context.parse(name, "parse", text)?;
    context.run(name, "to NVVM", PIPELINE, &mut module)?;
    let device = ir::top_level(&module).into_iter().find(|op| ir::name(*op) == "gpu.module");
    let device = device.ok_or_else(|| CodegenError::new(name, "to NVVM", "there is no device module"))?;
    refuse_calls(name, device)?;
    let translated = llvm.translate_operation(device).ok_or_else(|| context.error(name, "translate"))?;
    translated.set_target(machine);
    translated.run_passes(OPTIMISE, machine).map_err(|e| CodegenError::new(name, "optimise", e))?;
    refuse_messages(llvm, name, "optimise")?;
    Ok(translated)
}

/// A function without a body is one of a device library: a kernel brings all its code with it.
fn refuse_calls(name: &str, device: melior::ir::OperationRef) -> Result<(), CodegenError> {
    for op in ir::operations(device) {
        let declared = op.region(0).ok().is_some_and(|r| r.first_block().is_none_or(|b| b.first_operation().is_none()));
        if ir::name(op) == "llvm.func" && declared {
            return Err(CodegenError::new(name, "to NVVM", format!("it calls a library: {op}")));
        }
    }
    Ok(())
}

fn refuse_messages(llvm: &LlvmContext, name: &str, step: &'static str) -> Result<(), CodegenError> {
    let messages = llvm.take_messages();
    if messages.is_empty() { Ok(()) } else { Err(CodegenError::new(name, step, messages)) }
}
