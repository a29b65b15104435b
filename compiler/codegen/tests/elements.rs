//! Kernels of bf16: each is its f32 form on the widened operands, rounded once where it stores bf16; bit for bit. What the f32 forms
//! compute is tested elsewhere; two kernels are compared with f64 here, too.

use crate::harness::{Data, runnable};
use crate::narrow::compare;
use model::kernel::{Epilogue, Form, KernelOp, MatMul, OptimizerKind, Sink, Table, UpdateRule, Writes};

const ADAMW: UpdateRule = UpdateRule::plain(OptimizerKind::AdamW);
const SINKS: [Sink; 5] = [
    Sink::Store,
    Sink::Add,
    Sink::Update { rule: ADAMW, accumulated: false },
    Sink::Update { rule: ADAMW, accumulated: true },
    Sink::Update { rule: UpdateRule { writes: Writes::Next, ..ADAMW }, accumulated: true },
];

fn every_class(ops: &[KernelOp]) {
    for cpu in runnable() {
        ops.iter().for_each(|op| _ = compare(op, cpu));
    }
}

fn matmul((m, n, k): (u32, u32, u32), form: Form, epilogue: Epilogue) -> KernelOp {
    KernelOp::MatMul(MatMul { m, n, k, form, epilogue })
}

#[test]
fn products_in_bf16_are_the_products_of_what_bf16_stands_for() {
    let epilogues = [Epilogue::Store, Epilogue::Bias, Epilogue::BiasResidual, Epilogue::BiasGelu, Epilogue::GeluGrad];
    let mut ops = Vec::new();
    for (i, shape) in
        [(1, 1, 1), (37, 61, 129), (64, 96, 64), (5, 300, 2100), (130, 17, 8), (200, 33, 40)].into_iter().enumerate()
    {
        for (j, form) in [Form::NN, Form::NT, Form::TN].into_iter().enumerate() {
            ops.push(matmul(shape, form, epilogues[(i + j) % epilogues.len()]));
        }
    }
    every_class(&ops);
}

/// Half a unit in the last place of bf16, which has 8 bits, and what f32 sums may be off.
fn within_rounding(what: &str, found: &Data, exact: &[f64], of_sum: f64) {
    for (i, (found, exact)) in found.f32().iter().zip(exact).enumerate() {
        let error = (f64::from(*found) - exact).abs();
        let half_unit = 2f64.powi(exact.abs().log2().floor() as i32 - 8);
        assert!(error <= half_unit + of_sum, "{what}[{i}]: {found} instead of {exact}");
    }
}

#[test]
fn results_are_within_half_a_unit_of_f64() {
    let (m, n, k, x) = (37, 61, 129, |data: &Data| -> Vec<f64> { data.f32().iter().map(|&x| x.into()).collect() });
    for cpu in runnable() {
        let after = compare(&matmul((m, n, k), Form::NN, Epilogue::Store), cpu);
        let (a, b) = (x(&after[0]), x(&after[1]));
        let [m, n, k] = [m, n, k].map(|d| d as usize);
        let c = |i: usize| (0..k).map(|p| a[i / n * k + p] * b[p * n + i % n]).sum();
        within_rounding("c", &after[2], &(0..m * n).map(c).collect::<Vec<f64>>(), 1e-5);
        let after = compare(&KernelOp::LayerNorm { rows: 7, width: 33 }, cpu);
        let (gain, bias, mut y) = (after[1].f32(), after[2].f32(), Vec::new());
        for row in x(&after[0]).chunks(33) {
            let mean = row.iter().sum::<f64>() / 33.0;
            let deviation = (row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / 33.0 + 1e-5).sqrt();
            let at = |j: usize| (row[j] - mean) / deviation * f64::from(gain[j]) + f64::from(bias[j]);
            y.extend((0..33).map(at));
        }
        within_rounding("y", &after[3], &y, 1e-5);
    }
}

#[test]
fn gradients_of_weights_write_the_copy_beside_the_weight() {
    let mut ops = Vec::new();
    for sink in SINKS {
        ops.push(matmul((37, 21, 50), Form::TN, Epilogue::Gradient(sink)));
    }
    for sink in [SINKS[0], SINKS[3]] {
        ops.push(KernelOp::BiasGrad { rows: 23, width: 37, sink });
        ops.push(KernelOp::GainGrad { rows: 23, width: 37, sink });
        ops.push(KernelOp::EmbedGrad { table: Table::Token, sequences: 3, context: 5, width: 21, vocab: 7, sink });
        ops.push(KernelOp::EmbedGrad { table: Table::Position, sequences: 3, context: 5, width: 21, vocab: 0, sink });
    }
    ops.push(matmul((64, 64, 32), Form::TN, Epilogue::Gradient(SINKS[3])));
    for rule in [ADAMW, UpdateRule { writes: Writes::Next, ..ADAMW }, UpdateRule::plain(OptimizerKind::Muon)] {
        ops.push(KernelOp::Update { len: 101, rule });
    }
    every_class(&ops);
}

#[test]
fn rows_in_bf16_are_rounded_once() {
    let mut ops = Vec::new();
    for (rows, width) in [(1, 1), (7, 33), (19, 64)] {
        ops.push(KernelOp::LayerNorm { rows, width });
        ops.push(KernelOp::LayerNormGrad { rows, width, residual: false });
        ops.push(KernelOp::LayerNormGrad { rows, width, residual: true });
    }
    for (rows, vocab) in [(1, 2), (7, 50), (8, 64)] {
        ops.push(KernelOp::CrossEntropy { rows, vocab, scale_bits: 0.125f32.to_bits() });
    }
    every_class(&ops);
    every_class(&[KernelOp::Embed { sequences: 3, context: 5, width: 21, vocab: 7 }]);
}

#[test]
fn attention_in_bf16_is_rounded_once() {
    let mut ops = Vec::new();
    for (sequences, context, width, heads) in [(2, 5, 6, 3), (1, 33, 20, 2), (1, 1, 1, 1)] {
        ops.push(KernelOp::Attention { sequences, context, width, heads });
        ops.push(KernelOp::AttentionGrad { sequences, context, width, heads });
    }
    every_class(&ops);
}
