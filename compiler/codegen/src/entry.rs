//! The function that the runtime calls, and what LLVM is told about it.

use crate::context::CodegenContext;
use crate::error::CodegenError;
use crate::ffi::set_attribute;
use crate::ir;
use melior::IrRewriter;
use melior::ir::block::BlockLike;
use melior::ir::operation::OperationLike;
use melior::ir::{Attribute, Module, RegionLike};
use model::kernel::Kernel;
use std::fmt::Write;

/// Largest stack frame of a kernel.
pub const FRAME_BYTES_MAX: u32 = 64 * 1024;

const STEP: &str = "entry";
const BODY: &str = "body";

/// Removes the transform sequences, whose work is done.
pub fn drop_strategy(context: &CodegenContext, module: &Module) {
    let rewriter = IrRewriter::new(&context.mlir);
    for op in ir::top_level(module) {
        if ir::name(op) == "transform.named_sequence" {
            rewriter.as_rewriter_base().erase_op(op);
        }
    }
}

/// Makes the function internal and adds the exported one, named as the kernel: it takes a pointer to an array of pointers and
/// passes them on.
pub fn wrap(context: &CodegenContext, kernel: &Kernel, module: &Module) -> Result<(), CodegenError> {
    let fail = |message: &str| CodegenError::new(&kernel.name, STEP, message);
    let parse = |text: &str| Attribute::parse(&context.mlir, text).ok_or_else(|| context.error(&kernel.name, STEP));
    let mut functions = ir::top_level(module).into_iter().filter(|op| ir::name(*op) == "llvm.func");
    let body = functions.next().ok_or_else(|| fail("there is no function"))?;
    if let Some(other) = functions.next() {
        return Err(fail(&format!("another function is defined or called: {other}")));
    }
    let arguments = body.region(0).ok().and_then(|r| r.first_block()).map_or(0, |b| b.argument_count());
    set_attribute(body, "sym_name", parse(&format!("\"{BODY}\""))?);
    set_attribute(body, "linkage", parse("#llvm.linkage<internal>")?);
    // Operands never overlap, but for those that may share a place: see the conventions of `model::kernel`.
    let operands = kernel.operands();
    let shares = |i: usize| operands.get(i).is_some_and(|operand| operand.shares);
    let attributes: Vec<&str> = (0..arguments).map(|i| if shares(i) { "{}" } else { "{llvm.noalias}" }).collect();
    set_attribute(body, "arg_attrs", parse(&format!("[{}]", attributes.join(", ")))?);
    set_attribute(body, "passthrough", parse(&passthrough())?);
    let wrapper = context.parse(&kernel.name, STEP, &wrapper_text(&kernel.name, arguments))?;
    let exported = ir::top_level(&wrapper).into_iter().find(|op| op.region_count() > 0 && !is_declaration(*op));
    let exported = exported.ok_or_else(|| fail("the wrapper has no function"))?;
    module.body().append_operation((*exported).clone());
    if module.as_operation().verify() { Ok(()) } else { Err(context.error(&kernel.name, STEP)) }
}

fn is_declaration(op: melior::ir::OperationRef) -> bool {
    op.region(0).ok().and_then(|r| r.first_block()).is_none()
}

/// LLVM may not turn loops into calls of memcpy or memset, and reports frames that are too large.
fn passthrough() -> String {
    format!("[\"nounwind\", \"no-builtins\", [\"warn-stack-size\", \"{FRAME_BYTES_MAX}\"]]")
}

fn wrapper_text(name: &str, arguments: usize) -> String {
    let types = vec!["!llvm.ptr"; arguments].join(", ");
    let mut text = format!(
        "llvm.func @{BODY}({types})\nllvm.func @{name}(%table: !llvm.ptr) attributes {{passthrough = {}}} {{\n",
        passthrough()
    );
    for i in 0..arguments {
        let _ =
            writeln!(text, "  %at{i} = llvm.getelementptr inbounds %table[{i}] : (!llvm.ptr) -> !llvm.ptr, !llvm.ptr");
        let _ = writeln!(text, "  %p{i} = llvm.load %at{i} : !llvm.ptr -> !llvm.ptr");
    }
    let values = (0..arguments).map(|i| format!("%p{i}")).collect::<Vec<_>>().join(", ");
    text + &format!("  llvm.call @{BODY}({values}) : ({types}) -> ()\n  llvm.return\n}}\n")
}
