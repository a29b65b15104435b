//! Forwards a padded register tile of a product to the epilogue that pads it again.
//!
//! Where a tile may stick out of the matrix, the strategy pads the product's tile and the epilogue's. Between them it cuts
//! the product to the part inside, only to pad that with zeros, and so every element would go through memory. Both operands of the
//! product are packed with zeros outside, so its lanes there are zero already: the padded tile is the product's tile.
//! In the same way the zeros that a product starts from, cut and padded with zeros, are a whole tile of zeros.
//!
//! A tile that is missed is no wrong result: it needs memory that was not planned, or a fill of unknown size that can't be vectorised,
//! and either is refused later.

use crate::context::CodegenContext;
use crate::error::CodegenError;
use crate::ir;
use melior::IrRewriter;
use melior::ir::attribute::DenseI64ArrayAttribute;
use melior::ir::block::BlockLike;
use melior::ir::operation::{OperationBuilder, OperationLike, OperationMutLike, OperationResult};
use melior::ir::{Module, OperationRef, RegionLike, Value, ValueLike};

const STEP: &str = "forward tiles";

/// Rewrites every padded tile of the module's function that is whole already.
pub fn tile_writes(context: &CodegenContext, subject: &str, module: &Module) -> Result<(), CodegenError> {
    let Some(function) = ir::function(module) else { return Ok(()) };
    let rewriter = IrRewriter::new(&context.mlir);
    let pads = ir::operations(function).into_iter().filter(|op| ir::name(*op) == "tensor.pad").collect::<Vec<_>>();
    for pad in pads {
        let tile = match whole_tile(pad) {
            Some(Tile::Product(tile)) => tile,
            Some(Tile::Zeros(fill)) => {
                zeros(pad, fill).map_err(|e| CodegenError::new(subject, STEP, e.to_string()))?.into()
            }
            None => continue,
        };
        rewriter.as_rewriter_base().replace_op_with_values(pad, &[tile]);
    }
    Ok(())
}

enum Tile<'c, 'a> {
    /// The product's tile, padded.
    Product(Value<'c, 'a>),
    /// The fill whose value is the padding's.
    Zeros(OperationRef<'c, 'a>),
}

/// What a pad gives, if that is known to exist as a whole tile.
fn whole_tile<'c, 'a>(pad: OperationRef<'c, 'a>) -> Option<Tile<'c, 'a>> {
    let padding = zero_padding(pad)?;
    let is_zeros = |op: OperationRef<'c, 'a>| ir::name(op) == "linalg.fill" && op.operand(0).ok() == Some(padding);
    let mut source = pad.operand(0).ok()?;
    let mut op = definition(source)?;
    if ir::name(op) == "tensor.insert_slice" {
        // Into zeros: what the slice does not cover is zero too.
        if !at_origin(op) || !is_zeros(definition(op.operand(1).ok()?)?) {
            return None;
        }
        source = op.operand(0).ok()?;
        op = definition(source)?;
    }
    if ir::name(op) == "tensor.extract_slice" {
        if !at_origin(op) {
            return None;
        }
        source = op.operand(0).ok()?;
        op = definition(source)?;
    }
    if is_zeros(op) {
        return Some(Tile::Zeros(op));
    }
    let is_product = ["scf.for", "linalg.matmul"].contains(&ir::name(op).as_str());
    (is_product && source.r#type() == pad.result(0).ok()?.r#type()).then_some(Tile::Product(source))
}

/// The value that a pad puts around its source, if it is the constant zero and nothing is packed with it.
fn zero_padding<'c, 'a>(pad: OperationRef<'c, 'a>) -> Option<Value<'c, 'a>> {
    let value = pad.region(0).ok()?.first_block()?.terminator()?.operand(0).ok()?;
    let constant = definition(value)?;
    let is_zero = constant.attribute("value").ok()?.to_string().starts_with("0.000000e+00");
    (is_zero && ir::name(constant) == "arith.constant" && !pad.has_attribute("nofold") && low_is_zero(pad))
        .then_some(value)
}

fn low_is_zero(pad: OperationRef) -> bool {
    all_zero(pad, "static_low")
}

/// Whether a slice begins at the first element.
fn at_origin(slice: OperationRef) -> bool {
    all_zero(slice, "static_offsets")
}

fn all_zero(op: OperationRef, attribute: &str) -> bool {
    let Ok(Ok(values)) = op.attribute(attribute).map(DenseI64ArrayAttribute::try_from) else { return false };
    (0..values.len()).all(|i| values.element(i) == Ok(0))
}

fn definition<'c, 'a>(value: Value<'c, 'a>) -> Option<OperationRef<'c, 'a>> {
    OperationResult::try_from(value).ok().map(|result| result.owner())
}

/// Inserts `fill` for a whole tile before `pad`.
fn zeros<'c, 'a>(
    pad: OperationRef<'c, 'a>,
    fill: OperationRef<'c, 'a>,
) -> Result<OperationResult<'c, 'a>, melior::Error> {
    let block = pad.block().expect("an operation in a function is in a block");
    let tile = pad.result(0)?.r#type();
    let empty = OperationBuilder::new("tensor.empty", pad.location()).add_results(&[tile]).build()?;
    let empty = block.insert_operation_before(pad, empty);
    let mut whole = (*fill).clone();
    whole.set_operand(1, empty.result(0)?.into());
    whole.result(0)?.set_type(tile);
    let whole = block.insert_operation_before(pad, whole);
    whole.result(0)
}
