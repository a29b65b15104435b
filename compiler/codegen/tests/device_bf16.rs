//! Device kernels of bf16 beside products: each is its f32 form on the widened operands, rounded once where it stores bf16; bit for bit.

use crate::narrow::compare;
use crate::optimizers::ADAMW;
use model::kernel::{KernelOp, Sink, Table, UpdateRule, Writes};
use model::target::Target;

fn check(op: &KernelOp) {
    compare(op, Target::Emulated);
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
