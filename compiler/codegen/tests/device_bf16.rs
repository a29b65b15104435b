//! Device kernels of bf16 beside products: each is its f32 form on the widened operands, rounded once where it stores bf16; bit for bit.

use crate::harness::{Data, Runnable, random};
use crate::narrow::{self, representable};
use crate::optimizers::{self, ADAMW};
use artifact::optimizer::HYPER_LEN;
use model::graph::Elem;
use model::kernel::{Dtype, KernelOp, Sink, Table, UpdateRule, Writes};
use model::kernel_plan::{plan_kernel, plan_kernel_of};
use model::operands::{Access, Operand, operands, operands_of};
use model::target::Target;

/// Content that both forms can have. Ids are small; a parameter's states are squares, its hyper-parameters the optimizer's.
fn content(operand: &Operand, bf16: bool, seed: u64) -> Data {
    let len = (operand.bytes / operand.elem.bytes()) as usize;
    let values = random(seed, len);
    match (operand.elem, operand.access) {
        (Elem::U32, _) => Data::U32((0..len as u32).map(|i| i * 7 % 5).collect()),
        (Elem::F64, _) => Data::F64(vec![f64::NAN; len]),
        (_, Access::Write) => Data::unset(len),
        _ if operand.bytes == 4 * HYPER_LEN as u64 => Data::F32(optimizers::hyper(ADAMW)),
        _ if bf16 => Data::F32(representable(Dtype::Bf16, values)),
        _ => Data::F32(values.iter().map(|x| x * x + 0.01).collect()),
    }
}

/// Runs both forms and compares every operand afterwards.
fn check(op: &KernelOp) {
    let narrow = operands_of(op, Dtype::Bf16);
    let wide = operands(op);
    // An update in bf16 also writes a copy of its weight, which comes after the states.
    let copy = (narrow.len() > wide.len()).then(|| {
        let at = narrow.iter().rposition(|o| o.elem == Elem::Bf16 && o.access == Access::Write);
        at.expect("a copy")
    });
    let mut data = Vec::new();
    for (i, operand) in narrow.iter().enumerate() {
        data.push(content(operand, operand.elem == Elem::Bf16, i as u64 + 1));
    }
    let found =
        narrow::call(&Runnable::of(plan_kernel_of(op.clone(), Dtype::Bf16, Target::Emulated), Target::Emulated), &data);
    let given: Vec<_> = (0..data.len()).filter(|i| Some(*i) != copy).map(|i| data[i].clone()).collect();
    let mut expected = Runnable::of(plan_kernel(op.clone(), Target::Emulated), Target::Emulated).call(&given);
    if let Some(copy) = copy {
        let weight = wide.iter().position(|o| o.access != Access::Read).expect("an update writes its weight");
        expected.insert(copy, expected[weight].clone());
    }
    for (i, ((found, f32), operand)) in found.iter().zip(&expected).zip(&narrow).enumerate() {
        let expected = match (operand.elem, f32) {
            (Elem::Bf16, Data::F32(values)) => Data::F32(representable(Dtype::Bf16, values.clone())),
            _ => f32.clone(),
        };
        assert_eq!(*found, expected, "operand {i} of {op:?}");
    }
}

#[test]
fn rows_are_rounded_once() {
    for (rows, width) in [(1, 1), (7, 33), (3, 600)] {
        check(&KernelOp::LayerNorm { rows, width });
        check(&KernelOp::LayerNormGrad { rows, width, residual: false });
        check(&KernelOp::LayerNormGrad { rows, width, residual: true });
    }
    for (rows, vocab) in [(7, 50), (3, 300)] {
        check(&KernelOp::CrossEntropy { rows, vocab, scale_bits: 0.125f32.to_bits() });
    }
    check(&KernelOp::Embed { sequences: 3, context: 5, width: 21, vocab: 7 });
}

#[test]
fn attention_is_rounded_once() {
    for (sequences, context, width, heads) in [(2, 5, 6, 3), (1, 40, 20, 2)] {
        check(&KernelOp::Attention { sequences, context, width, heads });
        check(&KernelOp::AttentionGrad { sequences, context, width, heads });
    }
}

#[test]
fn gradients_are_f32_and_updates_write_the_copy() {
    for sink in [Sink::Store, Sink::Update { rule: ADAMW, accumulated: true }] {
        check(&KernelOp::BiasGrad { rows: 23, width: 37, sink });
        check(&KernelOp::GainGrad { rows: 23, width: 37, sink });
        check(&KernelOp::EmbedGrad { table: Table::Token, sequences: 3, context: 5, width: 21, vocab: 7, sink });
        check(&KernelOp::EmbedGrad { table: Table::Position, sequences: 3, context: 5, width: 21, vocab: 0, sink });
    }
    for rule in [ADAMW, UpdateRule { writes: Writes::Next, ..ADAMW }] {
        check(&KernelOp::Update { len: 101, rule });
        check(&KernelOp::Update { len: 132, rule });
    }
}
