//! Operands of bf16: every load becomes one of bf16 that is extended, every store one of what was rounded.
//!
//! Kernels are written and vectorised in f32, whatever their operands hold. Here, where all that is left of an operand is loads and
//! stores, the operands that hold bf16 get their type. What lies in scratch stays f32, and so does every value in a register: a
//! kernel that used an operand's memory for something else than its result would round it too often.
//!
//! A bf16 is the upper half of an f32. Extending is a shift; rounding is to nearest even, and done in integers: it is the same on every
//! processor, needs no function of a library, and NaN stays NaN.
//!
//! Stores of a vector's first lanes become loops over these. LLVM 22 makes of a masked store of 16-bit lanes, when it knows that
//! the mask has one lane, a store of 32 bits: it would write over what lies behind the operand.

use crate::context::CodegenContext;
use crate::error::CodegenError;
use crate::ffi::set_attribute;
use crate::ir;
use melior::IrRewriter;
use melior::ir::attribute::{DenseI64ArrayAttribute, IntegerAttribute, TypeAttribute};
use melior::ir::block::BlockLike;
use melior::ir::operation::{OperationBuilder, OperationLike, OperationResult};
use melior::ir::r#type::{FunctionType, IntegerType};
use melior::ir::{
    Attribute, Block, BlockRef, Identifier, Location, Module, OperationRef, Region, RegionLike, Type, Value, ValueLike,
};
use model::graph::Elem;
use model::kernel::Kernel;

const STEP: &str = "elements";

/// Gives the kernel's operands of bf16 their type. Runs when vectors have one dimension and no operand is read or written but by
/// loads and stores.
pub fn narrow(context: &CodegenContext, kernel: &Kernel, module: &Module) -> Result<(), CodegenError> {
    let fail = |message: String| CodegenError::new(&kernel.name, STEP, message);
    let operands = kernel.operands();
    if operands.iter().all(|o| o.elem != Elem::Bf16) {
        return Ok(());
    }
    let function = ir::function(module).ok_or_else(|| fail("the module has no function".into()))?;
    let entry = function.region(0).ok().and_then(|r| r.first_block());
    let entry = entry.ok_or_else(|| fail("the function has no body".into()))?;
    for (i, _) in operands.iter().enumerate().filter(|(_, o)| o.elem == Elem::Bf16) {
        let argument = entry.argument(i).map_err(|e| fail(e.to_string()))?;
        argument.set_type(halves(context, argument.r#type()).ok_or_else(|| fail("an operand is not f32".into()))?);
    }
    let inputs: Vec<Type> =
        (0..entry.argument_count()).filter_map(|i| Some(entry.argument(i).ok()?.r#type())).collect();
    let signature = FunctionType::new(&context.mlir, &inputs, &[]);
    set_attribute(function, "function_type", TypeAttribute::new(signature.into()).into());
    for op in ir::operations(function) {
        let Some(of) = op.operands().position(is_of_halves) else { continue };
        access(context, op, of).map_err(fail)?;
    }
    if module.as_operation().verify() { Ok(()) } else { Err(context.error(&kernel.name, STEP)) }
}

/// The type with the upper halves of f32 in place of these.
fn halves<'c>(context: &'c CodegenContext, ty: Type<'c>) -> Option<Type<'c>> {
    with_element(context, ty, "f32", "i16")
}

fn with_element<'c>(context: &'c CodegenContext, ty: Type<'c>, from: &str, to: &str) -> Option<Type<'c>> {
    let text = ty.to_string();
    text.contains(from).then(|| Type::parse(&context.mlir, &text.replacen(from, to, 1)))?
}

fn is_of_halves(value: Value) -> bool {
    let text = value.r#type().to_string();
    text.starts_with("memref<") && (text.contains("xi16") || text.starts_with("memref<i16"))
}

/// Adapts an operation whose operand `of` is memory of bf16.
fn access<'c>(context: &'c CodegenContext, op: OperationRef<'c, '_>, of: usize) -> Result<(), String> {
    let name = ir::name(op);
    match name.as_str() {
        "vector.load" | "memref.load" | "vector.maskedload" | "vector.transfer_read" => load(context, op),
        "vector.store" | "memref.store" => store(context, op),
        "vector.transfer_write" | "vector.maskedstore" => store_lanes(context, op),
        "memref.prefetch" | "memref.dim" => Ok(()),
        // What only finds an address has memory as its first result.
        "memref.reinterpret_cast" | "memref.cast" | "memref.subview" | "memref.extract_strided_metadata" if of == 0 => {
            let result = op.result(0).map_err(|e| e.to_string())?;
            result.set_type(halves(context, result.r#type()).ok_or("an address of something else")?);
            Ok(())
        }
        _ => Err(format!("an operand of bf16 is used by what neither loads nor stores: {op}")),
    }
}

/// Operations before another one.
struct Before<'c, 'a> {
    context: &'c CodegenContext,
    block: BlockRef<'c, 'a>,
    op: OperationRef<'c, 'a>,
    /// The type of the value in registers: f32, or a vector of it.
    ty: Type<'c>,
}

impl<'c, 'a> Before<'c, 'a> {
    fn new(context: &'c CodegenContext, op: OperationRef<'c, 'a>, ty: Type<'c>) -> Self {
        let block = op.block().expect("an operation in a function is in a block");
        Before { context, block, op, ty }
    }

    /// [`Before::ty`] with other elements.
    fn of(&self, element: &str) -> Result<Type<'c>, String> {
        with_element(self.context, self.ty, "f32", element).ok_or_else(|| format!("{} is not of f32", self.ty))
    }

    fn insert(&self, name: &str, operands: &[Value<'c, 'a>], ty: Type<'c>) -> Result<Value<'c, 'a>, String> {
        self.insert_with(name, operands, ty, &[])
    }

    fn insert_with(
        &self,
        name: &str,
        operands: &[Value<'c, 'a>],
        ty: Type<'c>,
        attributes: &[(Identifier<'c>, Attribute<'c>)],
    ) -> Result<Value<'c, 'a>, String> {
        let location: Location<'c> = self.op.location();
        let built = OperationBuilder::new(name, location)
            .add_operands(operands)
            .add_attributes(attributes)
            .add_results(&[ty])
            .build()
            .map_err(|e| e.to_string())?;
        let inserted = self.block.insert_operation_before(self.op, built);
        inserted.result(0).map(Value::from).map_err(|e| e.to_string())
    }

    /// A constant of 32-bit integers.
    fn bits(&self, value: u32) -> Result<Value<'c, 'a>, String> {
        let ty = self.of("i32")?;
        let text = if ty.to_string() == "i32" { format!("{value} : i32") } else { format!("dense<{value}> : {ty}") };
        let value = Attribute::parse(&self.context.mlir, &text).ok_or("a constant can't be written")?;
        let name = Identifier::new(&self.context.mlir, "value");
        self.insert_with("arith.constant", &[], ty, &[(name, value)])
    }

    /// The f32 of the given upper halves.
    fn extended(&self, halves: Value<'c, 'a>) -> Result<Value<'c, 'a>, String> {
        let wide = self.of("i32")?;
        let low = self.insert("arith.extui", &[halves], wide)?;
        let bits = self.insert("arith.shli", &[low, self.bits(16)?], wide)?;
        self.insert("arith.bitcast", &[bits], self.ty)
    }

    /// The upper halves of the nearest bf16.
    fn rounded(&self, value: Value<'c, 'a>) -> Result<Value<'c, 'a>, String> {
        let wide = self.of("i32")?;
        let (upper, one) = (self.bits(16)?, self.bits(1)?);
        let bits = self.insert("arith.bitcast", &[value], wide)?;
        let half = self.insert("arith.shrui", &[bits, upper], wide)?;
        let odd = self.insert("arith.andi", &[half, one], wide)?;
        let almost = self.insert("arith.addi", &[bits, self.bits(0x7FFF)?], wide)?;
        let nearest = self.insert("arith.addi", &[almost, odd], wide)?;
        // Quiet: the payload's upper half might be that of an infinity.
        let quiet = self.insert("arith.ori", &[bits, self.bits(0x40_0000)?], wide)?;
        let is_nan = self.unordered(value)?;
        let kept = self.insert("arith.select", &[is_nan, quiet, nearest], wide)?;
        let kept = self.insert("arith.shrui", &[kept, upper], wide)?;
        self.insert("arith.trunci", &[kept], self.of("i16")?)
    }

    fn index(&self, value: i64) -> Result<Value<'c, 'a>, String> {
        let (ty, name) = (Type::index(&self.context.mlir), Identifier::new(&self.context.mlir, "value"));
        self.insert_with("arith.constant", &[], ty, &[(name, IntegerAttribute::new(ty, value).into())])
    }

    /// How many of its first lanes a mask has.
    fn lanes_of_mask(&self, mask: Value<'c, 'a>) -> Result<Value<'c, 'a>, String> {
        let of = OperationResult::try_from(mask).map_err(|e| e.to_string())?.owner();
        let constant =
            of.attribute("mask_dim_sizes").ok().and_then(|sizes| DenseI64ArrayAttribute::try_from(sizes).ok());
        match (ir::name(of).as_str(), constant) {
            ("vector.create_mask", _) => of.operand(0).map_err(|e| e.to_string()),
            ("vector.constant_mask", Some(sizes)) => self.index(sizes.element(0).map_err(|e| e.to_string())?),
            _ => Err(format!("a mask that is not known to be of the first lanes: {of}")),
        }
    }

    /// A loop that stores the first `count` lanes of `value` from `memory` on: a memref and indices.
    fn each_lane(&self, count: Value<'c, 'a>, value: Value<'c, 'a>, memory: &[Value<'c, 'a>]) -> Result<(), String> {
        let (mlir, location): (_, Location<'c>) = (&self.context.mlir, self.op.location());
        let (index, bounds) = (Type::index(mlir), [self.index(0)?, count, self.index(1)?]);
        let fail = |e: melior::Error| e.to_string();
        let body = Block::new(&[(index, location)]);
        {
            let lane: Value = body.argument(0).map_err(fail)?.into();
            let dynamic = Attribute::parse(mlir, "array<i64: -9223372036854775808>").ok_or("an attribute is wrong")?;
            let element = OperationBuilder::new("vector.extract", location)
                .add_operands(&[value, lane])
                .add_attributes(&[(Identifier::new(mlir, "static_position"), dynamic)])
                .add_results(&[IntegerType::new(mlir, 16).into()])
                .build()
                .map_err(fail)?;
            let element = body.append_operation(element).result(0).map_err(fail)?;
            let mut operands = [&[element.into()], memory].concat();
            let column = operands.pop().expect("a memref has an index");
            let column =
                OperationBuilder::new("arith.addi", location).add_operands(&[column, lane]).add_results(&[index]);
            let column = body.append_operation(column.build().map_err(fail)?).result(0).map_err(fail)?;
            operands.push(column.into());
            let store = OperationBuilder::new("memref.store", location).add_operands(&operands);
            body.append_operation(store.build().map_err(fail)?);
            body.append_operation(OperationBuilder::new("scf.yield", location).build().map_err(fail)?);
        }
        let region = Region::new();
        region.append_block(body);
        let each = OperationBuilder::new("scf.for", location).add_operands(&bounds).add_regions([region]);
        self.block.insert_operation_before(self.op, each.build().map_err(fail)?);
        Ok(())
    }

    fn unordered(&self, value: Value<'c, 'a>) -> Result<Value<'c, 'a>, String> {
        let mlir = &self.context.mlir;
        // `uno` of the dialect's predicates.
        let predicate = Attribute::parse(mlir, "14 : i64").ok_or("a predicate can't be written")?;
        let attributes = [(Identifier::new(mlir, "predicate"), predicate)];
        self.insert_with("arith.cmpf", &[value, value], self.of("i1")?, &attributes)
    }
}

/// The attributes of a transfer between memory and a vector; none of other operations.
fn transfer<'c>(context: &'c CodegenContext, op: OperationRef<'c, '_>) -> Vec<(Identifier<'c>, Attribute<'c>)> {
    let named = |name| Some((Identifier::new(&context.mlir, name), op.attribute(name).ok()?));
    ["in_bounds", "permutation_map", "operandSegmentSizes"].into_iter().filter_map(named).collect()
}

fn load<'c>(context: &'c CodegenContext, op: OperationRef<'c, '_>) -> Result<(), String> {
    let result = op.result(0).map_err(|e| e.to_string())?;
    let before = Before::new(context, op, result.r#type());
    let mut operands: Vec<Value> = op.operands().collect();
    // What the lanes beside get. In our kernels that is a zero or an infinity, which rounding keeps.
    let instead =
        operands.iter().position(|o| ["f32", &before.ty.to_string()].contains(&o.r#type().to_string().as_str()));
    if let Some(i) = instead {
        operands[i] = Before::new(context, op, operands[i].r#type()).rounded(operands[i])?;
    }
    let loaded = before.insert_with(&ir::name(op), &operands, before.of("i16")?, &transfer(context, op))?;
    let value = before.extended(loaded)?;
    IrRewriter::new(&context.mlir).as_rewriter_base().replace_op_with_values(op, &[value]);
    Ok(())
}

fn store<'c>(context: &'c CodegenContext, op: OperationRef<'c, '_>) -> Result<(), String> {
    let mut operands: Vec<Value> = op.operands().collect();
    let before = Before::new(context, op, operands[0].r#type());
    operands[0] = before.rounded(operands[0])?;
    // The builder keeps a reference to it.
    let name = ir::name(op);
    let store = OperationBuilder::new(&name, op.location()).add_operands(&operands);
    before.block.insert_operation_before(op, store.build().map_err(|e| e.to_string())?);
    IrRewriter::new(&context.mlir).as_rewriter_base().erase_op(op);
    Ok(())
}

/// Stores the first lanes of a vector, as many as lie in memory or as the mask has, one by one.
fn store_lanes<'c>(context: &'c CodegenContext, op: OperationRef<'c, '_>) -> Result<(), String> {
    let operands: Vec<Value> = op.operands().collect();
    let last = operands.len() - 1;
    let masked = ir::name(op) == "vector.maskedstore";
    let (value, memory) = if masked { (operands[last], &operands[..last - 1]) } else { (operands[0], &operands[1..]) };
    let before = Before::new(context, op, value.r#type());
    let rounded = before.rounded(value)?;
    let count = if masked {
        before.lanes_of_mask(operands[last - 1])?
    } else {
        let row = before.index(memory.len() as i64 - 2)?;
        let size = before.insert("memref.dim", &[memory[0], row], Type::index(&context.mlir))?;
        before.insert("arith.subi", &[size, memory[memory.len() - 1]], Type::index(&context.mlir))?
    };
    let all = before.index(lanes(value.r#type())?)?;
    let count = before.insert("arith.minsi", &[count, all], Type::index(&context.mlir))?;
    before.each_lane(count, rounded, memory)?;
    IrRewriter::new(&context.mlir).as_rewriter_base().erase_op(op);
    Ok(())
}

/// Lanes of a vector of one dimension.
fn lanes(vector: Type) -> Result<i64, String> {
    let text = vector.to_string();
    let lanes = text.strip_prefix("vector<").and_then(|rest| rest.split_once('x')?.0.parse().ok());
    lanes.ok_or_else(|| format!("{text} is no vector of one dimension"))
}
