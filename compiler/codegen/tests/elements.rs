//! Kernels of bf16: each is its f32 form on the widened operands, rounded once where it stores bf16; bit for bit. What the f32 forms
//! compute is tested elsewhere; two kernels are compared with f64 here, too.

use crate::harness::{Data, Runnable, random, runnable};
use artifact::bf16;
use model::graph::Elem;
use model::kernel::{Dtype, Epilogue, Form, KernelOp, MatMul, OptimizerKind, Sink, Table, UpdateRule, Writes};
use model::kernel_plan::plan_kernel_of;
use model::operands::{Access, Operand, operands, operands_of};
use model::target::CpuClass;

const ADAMW: UpdateRule = UpdateRule::plain(OptimizerKind::AdamW);
const SINKS: [Sink; 5] = [
    Sink::Store,
    Sink::Add,
    Sink::Update { rule: ADAMW, accumulated: false },
    Sink::Update { rule: ADAMW, accumulated: true },
    Sink::Update { rule: UpdateRule { writes: Writes::Next, ..ADAMW }, accumulated: true },
];

/// Values for an operand as the f32 kernel takes it; ids are below `ids`. Nothing is negative under a root or far from 1 in an exponent.
fn content(operand: &Operand, seed: u64, ids: u32) -> Data {
    let len = (operand.bytes / operand.elem.bytes()) as usize;
    let values = random(seed, len);
    match operand.elem {
        Elem::U32 => Data::U32(values.iter().map(|x| ((x + 1.0) / 2.0 * ids as f32) as u32 % ids).collect()),
        Elem::F64 => Data::F64(vec![f64::NAN; len]),
        Elem::F32 | Elem::Bf16 if operand.access == Access::Write => Data::unset(len),
        Elem::F32 | Elem::Bf16 => Data::F32(values.iter().map(|x| 0.5 + x / 2.0 + 1e-3).collect()),
    }
}

fn rounded(data: &Data) -> Data {
    Data::Bf16(data.f32().iter().map(|&x| bf16::round(x)).collect())
}

fn widened(data: &Data) -> Data {
    let Data::Bf16(bits) = data else { panic!("not bf16: {data:?}") };
    Data::F32(bits.iter().map(|&b| bf16::widen(b)).collect())
}

/// Runs both forms on the same numbers; gives all operands of the bf16 form afterwards.
fn compare(op: &KernelOp, ids: u32, cpu: CpuClass) -> Vec<Data> {
    let narrow = operands_of(op, Dtype::Bf16);
    let mut wide = operands(op);
    // The copy of a weight comes after the states, at the end or before the hyper-parameters.
    let copy =
        narrow.iter().position(|o| o.elem == Elem::Bf16 && wide.len() < narrow.len() && o.access == Access::Write);
    let (mut of_wide, mut of_narrow) = (Vec::new(), Vec::new());
    let mut at = 0;
    for (i, operand) in narrow.iter().enumerate() {
        if Some(i) == copy {
            of_narrow.push(Data::Bf16(vec![0x7FC0; (operand.bytes / 2) as usize]));
            continue;
        }
        // Signs vary where activations are.
        let mut data = content(&wide[at], i as u64 + 1, ids);
        if operand.elem == Elem::Bf16 {
            if operand.access != Access::Write {
                let signed = random(i as u64 + 1, data.f32().len());
                data = Data::F32(signed);
            }
            of_narrow.push(rounded(&data));
            of_wide.push(widened(&rounded(&data)));
        } else {
            of_narrow.push(data.clone());
            of_wide.push(data);
        }
        at += 1;
    }
    let after = Runnable::of(plan_kernel_of(op.clone(), Dtype::Bf16, cpu), cpu).call(&of_narrow);
    let mut expected = Runnable::new(op.clone(), cpu).call(&of_wide);
    if let Some(copy) = copy {
        let weight = wide.iter().position(|o| o.access != Access::Read).expect("an update writes the weight");
        expected.insert(copy, expected[weight].clone());
        wide.insert(copy, narrow[copy]);
    }
    for (i, (operand, (found, f32))) in narrow.iter().zip(after.iter().zip(&expected)).enumerate() {
        let expected = if operand.elem == Elem::Bf16 { rounded(f32) } else { f32.clone() };
        assert!(*found == expected, "operand {i} of {op:?} on {}: {found:?} instead of {expected:?}", cpu.name());
    }
    after
}

fn every_class(ops: &[KernelOp], ids: u32) {
    for cpu in runnable() {
        ops.iter().for_each(|op| _ = compare(op, ids, cpu));
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
    every_class(&ops, 1);
}

/// Half a unit in the last place of bf16, which has 8 bits, and what f32 sums may be off.
fn within_rounding(what: &str, found: &Data, exact: &[f64], of_sum: f64) {
    for (i, (found, exact)) in widened(found).f32().iter().zip(exact).enumerate() {
        let error = (f64::from(*found) - exact).abs();
        let half_unit = 2f64.powi(exact.abs().log2().floor() as i32 - 8);
        assert!(error <= half_unit + of_sum, "{what}[{i}]: {found} instead of {exact}");
    }
}

#[test]
fn results_are_within_half_a_unit_of_f64() {
    let (m, n, k, x) =
        (37, 61, 129, |data: &Data| -> Vec<f64> { widened(data).f32().iter().map(|&x| x.into()).collect() });
    for cpu in runnable() {
        let after = compare(&matmul((m, n, k), Form::NN, Epilogue::Store), 1, cpu);
        let (a, b) = (x(&after[0]), x(&after[1]));
        let [m, n, k] = [m, n, k].map(|d| d as usize);
        let c = |i: usize| (0..k).map(|p| a[i / n * k + p] * b[p * n + i % n]).sum();
        within_rounding("c", &after[2], &(0..m * n).map(c).collect::<Vec<f64>>(), 1e-5);
        let after = compare(&KernelOp::LayerNorm { rows: 7, width: 33 }, 1, cpu);
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
    every_class(&ops, 7);
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
    every_class(&ops, 2);
    every_class(&[KernelOp::Embed { sequences: 3, context: 5, width: 21, vocab: 7 }], 7);
}

#[test]
fn attention_in_bf16_is_rounded_once() {
    let mut ops = Vec::new();
    for (sequences, context, width, heads) in [(2, 5, 6, 3), (1, 33, 20, 2), (1, 1, 1, 1)] {
        ops.push(KernelOp::Attention { sequences, context, width, heads });
        ops.push(KernelOp::AttentionGrad { sequences, context, width, heads });
    }
    every_class(&ops, 1);
}
