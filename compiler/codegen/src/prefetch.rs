//! Fetches what an epilogue reads before the register tile's sum is made.
//!
//! An epilogue touches a few lines in each of many rows, which no hardware prefetcher follows, right after a long loop that the
//! processor can't look past. The loop takes thousands of cycles and hardly uses memory, so the lines are asked for before it. Results do
//! not depend on it.

use crate::context::CodegenContext;
use crate::error::CodegenError;
use crate::ir;
use melior::IrRewriter;
use melior::ir::attribute::{BoolAttribute, IntegerAttribute};
use melior::ir::block::BlockArgument;
use melior::ir::block::BlockLike;
use melior::ir::operation::{OperationBuilder, OperationLike, OperationResult};
use melior::ir::r#type::IntegerType;
use melior::ir::{BlockRef, Identifier, Module, OperationRef, Type, Value, ValueLike};
use model::kernel::Kernel;
use model::operands::Operand;

const STEP: &str = "prefetch";
const LINE_BYTES: i64 = 64;

/// Adds prefetches for the loads of operands that follow a loop over k in the same block. Runs after vectors became
/// one-dimensional.
pub fn epilogue_operands(context: &CodegenContext, kernel: &Kernel, module: &Module) -> Result<(), CodegenError> {
    let Some(function) = ir::function(module) else { return Ok(()) };
    let fail = |e: melior::Error| CodegenError::new(&kernel.name, STEP, e.to_string());
    let operands = kernel.operands();
    let mut blocks: Vec<BlockRef> = Vec::new();
    for steps in ir::operations(function).into_iter().filter(|op| sums_in_registers(*op)) {
        let block = steps.block().expect("an operation in a function is in a block");
        // The first block of k only: it is the first loop of its tile.
        if blocks.contains(&block) {
            continue;
        }
        blocks.push(block);
        for load in loads_after(steps) {
            prefetch(context, steps, load, element_bytes(&operands, load)).map_err(fail)?;
        }
    }
    Ok(())
}

/// Whether this is a loop whose only results are vectors.
fn sums_in_registers(op: OperationRef) -> bool {
    let is_vector = |r: OperationResult| r.r#type().to_string().starts_with("vector");
    ir::name(op) == "scf.for" && op.result_count() > 0 && op.results().all(is_vector)
}

/// Loads of the function's operands after `steps` in its block.
fn loads_after<'c, 'a>(steps: OperationRef<'c, 'a>) -> Vec<OperationRef<'c, 'a>> {
    let mut loads = Vec::new();
    let mut next = steps.next_in_block();
    while let Some(op) = next {
        // A memref that is a block's argument is the function's: loops carry none.
        if ir::name(op) == "vector.load" && op.operand(0).is_ok_and(|memref| memref.is_block_argument()) {
            loads.push(op);
        }
        next = op.next_in_block();
    }
    loads
}

/// Bytes of the elements that `load` loads once its operand has its type: see [`crate::elements`].
fn element_bytes(operands: &[Operand], load: OperationRef) -> i64 {
    let argument = load.operand(0).ok().and_then(|memref| BlockArgument::try_from(memref).ok());
    let operand = argument.and_then(|argument| operands.get(argument.argument_number()));
    operand.map_or(4, |operand| operand.elem.bytes() as i64)
}

/// Prefetches every line of `load` before `steps`, if its indices can be known there.
fn prefetch<'c>(
    context: &'c CodegenContext,
    steps: OperationRef<'c, '_>,
    load: OperationRef<'c, '_>,
    element_bytes: i64,
) -> Result<(), melior::Error> {
    let block = steps.block().expect("an operation in a function is in a block");
    let rewriter = IrRewriter::new(&context.mlir);
    for index in load.operands().skip(1) {
        let Ok(definition) = OperationResult::try_from(index).map(|r| r.owner()) else { continue };
        if definition.block() != Some(block) || definition.is_before_in_block(steps) {
            continue;
        }
        let known = |value: Value| OperationResult::try_from(value).map_or(true, |r| r.owner().block() != Some(block));
        if ir::name(definition) != "affine.apply" || !definition.operands().all(known) {
            return Ok(());
        }
        rewriter.as_rewriter_base().move_op_before(definition, steps);
    }
    for lane in (0..f32_lanes(load.result(0)?.r#type())).step_by((LINE_BYTES / element_bytes) as usize) {
        prefetch_line(context, steps, load, lane)?;
    }
    Ok(())
}

/// Elements of a one-dimensional vector of f32; 0 if it is something else.
fn f32_lanes(vector: Type) -> i64 {
    let text = vector.to_string();
    text.strip_prefix("vector<").and_then(|t| t.strip_suffix("xf32>")).and_then(|lanes| lanes.parse().ok()).unwrap_or(0)
}

fn prefetch_line<'c>(
    context: &'c CodegenContext,
    steps: OperationRef<'c, '_>,
    load: OperationRef<'c, '_>,
    lane: i64,
) -> Result<(), melior::Error> {
    let (mlir, location) = (&context.mlir, load.location());
    let block = steps.block().expect("an operation in a function is in a block");
    let name = |name| Identifier::new(mlir, name);
    let mut operands = load.operands().collect::<Vec<_>>();
    let column = operands.pop().expect("a load has an index");
    let at = OperationBuilder::new("arith.constant", location)
        .add_attributes(&[(name("value"), IntegerAttribute::new(Type::index(mlir), lane).into())])
        .add_results(&[Type::index(mlir)])
        .build()?;
    let at = block.insert_operation_before(steps, at);
    let column = OperationBuilder::new("arith.addi", location)
        .add_operands(&[column, at.result(0)?.into()])
        .add_results(&[Type::index(mlir)])
        .build()?;
    let column = block.insert_operation_before(steps, column);
    operands.push(column.result(0)?.into());
    let locality = IntegerAttribute::new(IntegerType::new(mlir, 32).into(), 3);
    let prefetch = OperationBuilder::new("memref.prefetch", location)
        .add_operands(&operands)
        .add_attributes(&[
            (name("isWrite"), BoolAttribute::new(mlir, false).into()),
            (name("localityHint"), locality.into()),
            (name("isDataCache"), BoolAttribute::new(mlir, true).into()),
        ])
        .build()?;
    block.insert_operation_before(steps, prefetch);
    Ok(())
}
