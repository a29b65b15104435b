//! Scratch: every allocation that is left becomes a view of one argument.
//!
//! The model planned the bytes; a kernel that would need other than the planned ones is refused, so that the memory
//! that was computed is the memory that is used.

use crate::context::CodegenContext;
use crate::error::CodegenError;
use crate::ffi::set_attribute;
use crate::ir;
use melior::IrRewriter;
use melior::ir::attribute::{IntegerAttribute, TypeAttribute};
use melior::ir::block::BlockLike;
use melior::ir::operation::{OperationBuilder, OperationLike};
use melior::ir::r#type::{DimSize, FunctionType, MemRefType};
use melior::ir::{
    Identifier, Location, Module, Operation, OperationRef, RegionLike, ShapedTypeLike, Type, Value, ValueLike,
};
use model::kernel::Kernel;

/// Every buffer starts at a multiple of this.
const ALIGN_BYTES: u64 = 64;

const STEP: &str = "scratch";

/// Replaces allocations by views, adds the scratch argument when there is any, and refuses what must not be there: dynamic
/// allocations, copies, and a total other than the kernel's.
pub fn views(context: &CodegenContext, kernel: &Kernel, module: &Module) -> Result<(), CodegenError> {
    let fail = |message: String| CodegenError::new(&kernel.name, STEP, message);
    let function = ir::function(module).ok_or_else(|| fail("the source has no function".into()))?;
    let mut allocations = Vec::new();
    let mut total = 0;
    for op in ir::operations(function) {
        match ir::name(op).as_str() {
            "memref.alloc" => {
                allocations.push((op, total));
                total += bytes(op).map_err(&fail)?.next_multiple_of(ALIGN_BYTES);
            }
            "memref.copy" if is_single_element(op) => copy_element(context, op).map_err(|e| fail(e.to_string()))?,
            "memref.copy" | "memref.dealloc" => {
                return Err(fail(format!("an operation that needs a library is left: {op}")));
            }
            _ => {}
        }
    }
    if total != kernel.scratch_bytes {
        let found = allocations.iter().map(|(op, _)| format!("\n  {op}")).collect::<String>();
        return Err(fail(format!("{total} bytes are needed and {} are planned:{found}", kernel.scratch_bytes)));
    }
    if total > 0 {
        let scratch = add_argument(context, function, total).ok_or_else(|| fail("the function has no body".into()))?;
        for (op, offset) in allocations {
            replace(context, op, scratch, offset).map_err(|e| fail(e.to_string()))?;
        }
    }
    Ok(())
}

/// Bytes of a static allocation.
fn bytes(op: OperationRef) -> Result<u64, String> {
    let dynamic = || format!("an allocation of unknown size is left: {op}");
    let result = op.result(0).map_err(|_| dynamic())?;
    let memref = MemRefType::try_from(result.r#type()).map_err(|_| dynamic())?;
    if !memref.has_static_shape() || op.operand_count() > 0 {
        return Err(dynamic());
    }
    let element = element_bytes(memref.element()).ok_or_else(dynamic)?;
    let mut bytes = element;
    for i in 0..memref.rank() {
        let Ok(DimSize::Static(dim)) = memref.dim_size(i) else { return Err(dynamic()) };
        bytes = bytes.checked_mul(dim).ok_or_else(dynamic)?;
    }
    Ok(bytes)
}

/// MLIR makes copies of slices of one element (heads of width 1) where larger ones are vectors.
fn is_single_element(copy: OperationRef) -> bool {
    let source = copy.operand(0).ok().and_then(|source| MemRefType::try_from(source.r#type()).ok());
    source.is_some_and(|m| (0..m.rank()).all(|i| m.dim_size(i) == Ok(DimSize::Static(1))))
}

/// A load and a store in place of a copy of one element.
fn copy_element<'c>(context: &'c CodegenContext, copy: OperationRef<'c, '_>) -> Result<(), melior::Error> {
    let (mlir, location) = (&context.mlir, copy.location());
    let block = copy.block().expect("an operation in a function is in a block");
    let (source, target) = (copy.operand(0)?, copy.operand(1)?);
    let memref = MemRefType::try_from(source.r#type())?;
    let zero = block.insert_operation_before(copy, index(context, 0, location)?).result(0)?;
    let zeros = vec![zero.into(); memref.rank()];
    let load = OperationBuilder::new("memref.load", location)
        .add_operands(&[&[source], &zeros[..]].concat())
        .add_results(&[memref.element()])
        .build()?;
    let value = block.insert_operation_before(copy, load).result(0)?;
    let store = OperationBuilder::new("memref.store", location)
        .add_operands(&[&[value.into(), target], &zeros[..]].concat())
        .build()?;
    block.insert_operation_before(copy, store);
    IrRewriter::new(mlir).as_rewriter_base().erase_op(copy);
    Ok(())
}

/// The constant `value`.
fn index<'c>(context: &'c CodegenContext, value: u64, location: Location<'c>) -> Result<Operation<'c>, melior::Error> {
    let ty = Type::index(&context.mlir);
    OperationBuilder::new("arith.constant", location)
        .add_attributes(&[(Identifier::new(&context.mlir, "value"), IntegerAttribute::new(ty, value as i64).into())])
        .add_results(&[ty])
        .build()
}

fn element_bytes(element: Type) -> Option<u64> {
    match element.to_string().as_str() {
        "i8" | "i1" => Some(1),
        "f32" | "i32" => Some(4),
        "f64" | "i64" | "index" => Some(8),
        _ => None,
    }
}

fn add_argument<'c, 'a>(
    context: &'c CodegenContext,
    function: OperationRef<'c, 'a>,
    bytes: u64,
) -> Option<Value<'c, 'a>> {
    let mlir = &context.mlir;
    let scratch = Type::parse(mlir, &format!("memref<{bytes}xi8>"))?;
    let block = function.region(0).ok()?.first_block()?;
    let value = block.add_argument(scratch, Location::unknown(mlir));
    let inputs = (0..block.argument_count()).filter_map(|i| Some(block.argument(i).ok()?.r#type())).collect::<Vec<_>>();
    let signature = FunctionType::new(mlir, &inputs, &[]);
    set_attribute(function, "function_type", TypeAttribute::new(signature.into()).into());
    Some(value)
}

fn replace<'c>(
    context: &'c CodegenContext,
    op: OperationRef<'c, '_>,
    scratch: Value<'c, '_>,
    offset: u64,
) -> Result<(), melior::Error> {
    let (mlir, location) = (&context.mlir, op.location());
    let block = op.block().expect("an operation in a function is in a block");
    let result = op.result(0)?;
    let at = block.insert_operation_before(op, index(context, offset, location)?);
    let view = OperationBuilder::new("memref.view", location)
        .add_operands(&[scratch, at.result(0)?.into()])
        .add_results(&[result.r#type()])
        .build()?;
    let view = block.insert_operation_before(op, view);
    let rewriter = IrRewriter::new(mlir);
    let rewriter = rewriter.as_rewriter_base();
    rewriter.replace_all_uses_with(result.into(), view.result(0)?.into());
    rewriter.erase_op(op);
    Ok(())
}
