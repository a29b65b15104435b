//! Matrix products with every epilogue against f64, and the fused update against its parts, bit for bit.

use crate::harness::{Data, Runnable, assert_close, bits, random, runnable, targets};
use crate::narrow::{self, representable};
use crate::optimizers;
use model::kernel::{Dtype, Epilogue, Form, Kernel, KernelOp, MatMul, Products, Sink, UpdateRule};
use model::kernel_plan::{plan_kernel, plan_kernel_of, plan_kernel_with};
use model::target::Target;
use model::workspace::scratch_bytes;

pub const FORMS: [Form; 3] = [Form::NN, Form::NT, Form::TN];
pub const EPILOGUES: [Epilogue; 7] = [
    Epilogue::Store,
    Epilogue::Bias,
    Epilogue::BiasResidual,
    Epilogue::BiasGelu,
    Epilogue::GeluGrad,
    BLEND,
    Epilogue::Average,
];
/// 1.5 AB - 0.25 r
const BLEND: Epilogue = Epilogue::Blend { product_bits: 1.5f32.to_bits(), other_bits: (-0.25f32).to_bits() };

/// m, n, k of a product.
pub type Shape = (u32, u32, u32);

pub fn matmul((m, n, k): Shape, form: Form, epilogue: Epilogue) -> MatMul {
    MatMul { m, n, k, form, epilogue }
}

/// The kernel, with k cut in blocks of `kc` instead of the planned ones.
fn in_blocks(matmul: MatMul, kc: u32, target: Target) -> Kernel {
    cut(plan_kernel(KernelOp::MatMul(matmul), target), kc, target)
}

pub fn cut(mut kernel: Kernel, kc: u32, target: Target) -> Kernel {
    let tiles = kernel.tiles.as_mut().expect("a matmul has tiles");
    tiles.kc = kc;
    kernel.scratch_bytes = scratch_bytes(&kernel.op, Some(tiles), target);
    kernel
}

/// An operand as it is multiplied: of tf32 the nearest number with ten bits of fraction, the larger of two.
fn rounded(products: Products, x: f32) -> f64 {
    let x = f64::from(x);
    match products {
        Products::F32 => x,
        _ if x == 0.0 => x,
        Products::Tf32 => {
            let place = (x.abs().log2().floor() - 10.0).exp2();
            ((x.abs() / place + 0.5).floor() * place).copysign(x)
        }
    }
}

/// A B in f64.
fn product(matmul: &MatMul, products: Products, a: &[f32], b: &[f32]) -> Vec<f64> {
    let [m, n, k] = [matmul.m, matmul.n, matmul.k].map(|x| x as usize);
    let (a_row, a_step) = if matmul.form == Form::TN { (1, m) } else { (k, 1) };
    let (b_column, b_step) = if matmul.form == Form::NT { (k, 1) } else { (1, n) };
    let b: Vec<_> = b.iter().map(|x| rounded(products, *x)).collect();
    let mut c = vec![0.0; m * n];
    for i in 0..m {
        for p in 0..k {
            let left = rounded(products, a[i * a_row + p * a_step]);
            for j in 0..n {
                c[i * n + j] += left * b[j * b_column + p * b_step];
            }
        }
    }
    c
}

fn gelu(x: f64) -> f64 {
    x / 2.0 * (1.0 + gelu_tanh(x).0)
}

fn gelu_grad(x: f64) -> f64 {
    let (tanh, slope) = gelu_tanh(x);
    0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * slope
}

/// tanh u and du/dx.
fn gelu_tanh(x: f64) -> (f64, f64) {
    let scale = (2.0 / std::f64::consts::PI).sqrt();
    ((scale * (x + 0.044715 * x.powi(3))).tanh(), scale * (1.0 + 3.0 * 0.044715 * x * x))
}

/// Rounding of a sum of k products of values in -1 .. 1, with room.
fn tolerance(k: u32) -> f64 {
    5e-7 * f64::from(k).sqrt() + 5e-7
}

/// A and B.
fn factors(m: &MatMul) -> [Data; 2] {
    factors_of(m, Dtype::F32)
}

fn factors_of(m: &MatMul, dtype: Dtype) -> [Data; 2] {
    let both = [random(1, (m.m * m.k) as usize), random(2, (m.k * m.n) as usize)];
    both.map(|x| Data::F32(representable(dtype, x)))
}

/// Runs a forward or input-gradient kernel and compares all it writes.
pub fn check(kernel: Kernel, target: Target) {
    let KernelOp::MatMul(m) = kernel.op.clone() else { panic!("not a matmul") };
    let what = format!("{} on {}", kernel.name, target.name());
    let (len, n) = ((m.m * m.n) as usize, m.n as usize);
    let (bias, full) = (random(3, n), representable(kernel.dtype, random(4, len)));
    let mut data = factors_of(&m, kernel.dtype).to_vec();
    let ab = product(&m, kernel.products, data[0].f32(), data[1].f32());
    let biased = ab.iter().enumerate().map(|(i, x)| x + f64::from(bias[i % n])).collect::<Vec<_>>();
    let mut hyper = vec![0.0; artifact::optimizer::HYPER_LEN];
    (hyper[9], hyper[10]) = (0.75, 0.25);
    let inputs: &[&Vec<f32>] = match m.epilogue {
        Epilogue::Store | Epilogue::Gradient(_) => &[],
        Epilogue::Bias | Epilogue::BiasGelu => &[&bias],
        Epilogue::BiasResidual => &[&bias, &full],
        Epilogue::GeluGrad | Epilogue::Blend { .. } => &[&full],
        Epilogue::Average => &[&hyper],
    };
    data.extend(inputs.iter().map(|x| Data::F32((*x).clone())));
    let expected = match m.epilogue {
        Epilogue::Store | Epilogue::Gradient(_) => vec![ab],
        Epilogue::Bias => vec![biased],
        Epilogue::BiasResidual => vec![biased.iter().zip(&full).map(|(x, r)| x + f64::from(*r)).collect()],
        Epilogue::BiasGelu => vec![biased.clone(), biased.iter().map(|x| gelu(*x)).collect()],
        Epilogue::GeluGrad => vec![ab.iter().zip(&full).map(|(x, pre)| x * gelu_grad(f64::from(*pre))).collect()],
        Epilogue::Blend { .. } => vec![ab.iter().zip(&full).map(|(x, r)| 1.5 * x - 0.25 * f64::from(*r)).collect()],
        Epilogue::Average => vec![ab.iter().zip(&full).map(|(x, r)| 0.25 * x + 0.75 * f64::from(*r)).collect()],
    };
    match m.epilogue {
        Epilogue::Average => data.push(Data::F32(full)),
        _ => data.extend(expected.iter().map(|_| Data::unset(len))),
    }
    // What is stored is rounded to the nearest bf16.
    let rounding = if kernel.dtype == Dtype::Bf16 { 2f64.powi(-8) } else { 0.0 };
    let after = narrow::call(&Runnable::of(kernel, target), &data);
    for (found, expected) in after[after.len() - expected.len()..].iter().zip(&expected) {
        assert_close(&what, found.f32(), expected, tolerance(m.k) + rounding);
    }
}

#[test]
fn every_form_and_epilogue_is_right_on_a_shape_that_no_tile_divides() {
    for target in targets() {
        for form in FORMS {
            for epilogue in EPILOGUES {
                check(plan_kernel(KernelOp::MatMul(matmul((37, 61, 129), form, epilogue)), target), target);
            }
        }
    }
}

#[test]
fn every_form_is_right_whichever_loops_there_are() {
    // One tile; one loop each; partial tiles of known size; several panels of rows and columns.
    let shapes = [(1, 1, 1), (7, 33, 5), (1, 40, 9), (40, 1, 9), (5, 3, 100), (64, 32, 8), (300, 600, 40)];
    for (c, target) in targets().into_iter().enumerate() {
        for (i, shape) in shapes.into_iter().enumerate() {
            // The forms differ in how operands are packed; the classes only in the tiles.
            for form in if c == 0 { &FORMS[..] } else { &FORMS[i % 3..=i % 3] } {
                check(
                    plan_kernel(KernelOp::MatMul(matmul(shape, *form, EPILOGUES[i % EPILOGUES.len()])), target),
                    target,
                );
            }
        }
    }
}

#[test]
fn every_form_is_right_in_several_blocks_of_k() {
    for target in targets() {
        for (form, epilogue) in FORMS.into_iter().zip([Epilogue::BiasResidual, Epilogue::GeluGrad, Epilogue::Store]) {
            check(in_blocks(matmul((130, 70, 300), form, epilogue), 128, target), target);
        }
        check(plan_kernel(KernelOp::MatMul(matmul((9, 20, 2500), Form::NT, Epilogue::Store)), target), target);
        // A single tile: the blocks share the memory of their panels.
        check(in_blocks(matmul((1, 7, 100), Form::TN, Epilogue::Bias), 24, target), target);
    }
}

#[test]
fn panels_of_rows_and_columns_are_right() {
    for target in runnable() {
        // Tiles that stick out, and whole tiles in a smaller last panel.
        for (form, shape) in FORMS.into_iter().zip([(70, 150, 33), (40, 96, 20), (72, 32, 20)]) {
            let mut kernel = plan_kernel(KernelOp::MatMul(matmul(shape, form, Epilogue::Bias)), target);
            let tiles = kernel.tiles.as_mut().expect("a matmul has tiles");
            (tiles.mc, tiles.nc) = (4 * tiles.mr, 2 * tiles.nr);
            kernel.scratch_bytes = scratch_bytes(&kernel.op, Some(tiles), target);
            check(kernel, Target::Cpu(target));
        }
    }
}

#[test]
fn a_shape_of_the_benchmark_is_right() {
    for target in targets() {
        check(plan_kernel(KernelOp::MatMul(matmul((512, 768, 256), Form::NN, Epilogue::Bias)), target), target);
    }
}

/// All sinks of one weight gradient: right against f64, and the fused ones equal to the unfused ones in every bit.
fn check_sinks(shape: Shape, kc: Option<u32>, target: Target, rules: &[UpdateRule]) {
    check_sinks_with((Dtype::F32, Products::F32), shape, kc, target, rules);
}

pub fn check_sinks_with(
    (dtype, products): (Dtype, Products),
    shape: Shape,
    kc: Option<u32>,
    target: Target,
    rules: &[UpdateRule],
) {
    let len = (shape.0 * shape.1) as usize;
    let kernel = |sink| {
        let m = matmul(shape, Form::TN, Epilogue::Gradient(sink));
        let kernel = plan_kernel_with(KernelOp::MatMul(m), dtype, products, target);
        match kc {
            Some(kc) => cut(kernel, kc, target),
            None => kernel,
        }
    };
    let m = matmul(shape, Form::TN, Epilogue::Store);
    let factors = factors_of(&m, dtype).to_vec();
    let operands = |more: &[Data]| factors.iter().chain(more).cloned().collect::<Vec<_>>();
    let acc = random(4, len);
    let ab = product(&m, products, factors[0].f32(), factors[1].f32());
    let with_acc = ab.iter().zip(&acc).map(|(x, a)| x + f64::from(*a)).collect::<Vec<_>>();

    let stored = narrow::call(&Runnable::of(kernel(Sink::Store), target), &operands(&[Data::unset(len)])).remove(2);
    assert_close("stored", stored.f32(), &ab, tolerance(shape.2));
    let added = narrow::call(&Runnable::of(kernel(Sink::Add), target), &operands(&[Data::F32(acc.clone())])).remove(2);
    assert_close("added", added.f32(), &with_acc, tolerance(shape.2));

    for &rule in rules {
        let hyper = optimizers::hyper(rule);
        let before = optimizers::parameter(rule, len);
        let mut states = before.iter().cloned().map(Data::F32).collect::<Vec<_>>();
        // The copy of the weights.
        states.extend((dtype == Dtype::Bf16).then(|| Data::unset(len)));
        for (accumulated, gradient, exact) in [(false, &stored, &ab), (true, &added, &with_acc)] {
            let what = format!("{shape:?}, {rule:?}, accumulated {accumulated}, {}", target.name());
            let mut more = if accumulated { vec![Data::F32(acc.clone())] } else { Vec::new() };
            more.push(Data::F32(hyper.clone()));
            more.extend(states.clone());
            let fused = Runnable::of(kernel(Sink::Update { rule, accumulated }), target);
            let fused = narrow::call(&fused, &operands(&more));
            let fused = &fused[fused.len() - states.len()..];

            let mut unfused = vec![gradient.clone()];
            unfused.extend(states.clone());
            unfused.push(Data::F32(hyper.clone()));
            let update = plan_kernel_of(KernelOp::Update { len: len as u64, rule }, dtype, target);
            let unfused = narrow::call(&Runnable::of(update, target), &unfused);
            let expected = optimizers::updated(rule, &hyper, &before, exact);
            if dtype == Dtype::Bf16 {
                let weights = representable(dtype, fused[0].f32().to_vec());
                assert_eq!(fused.last().map(bits), Some(bits(&Data::F32(weights))), "{what}: the copy");
            }
            for (i, (fused, expected)) in fused.iter().zip(&expected).enumerate() {
                assert_eq!(bits(fused), bits(&unfused[i + 1]), "{what}: fused and unfused differ in state {i}");
                // v grows with the square of the gradient, and so does its error.
                assert_close(&what, fused.f32(), expected, 4.0 * tolerance(shape.2));
            }
        }
    }
}

#[test]
fn a_fused_update_has_the_bits_of_its_parts() {
    for target in targets() {
        check_sinks((37, 61, 129), None, target, &optimizers::rules());
    }
}

#[test]
fn a_fused_update_has_the_bits_of_its_parts_over_several_blocks_of_k() {
    for target in targets() {
        check_sinks((130, 70, 300), Some(128), target, &[optimizers::ADAMW]);
    }
}

#[test]
fn a_fused_update_has_the_bits_of_its_parts_on_a_single_element() {
    for target in targets() {
        check_sinks((1, 1, 1), None, target, &[optimizers::SGD]);
    }
}

/// The rule for sums: each block of k from zero, in fused multiply-adds ascending in k, then added to the accumulator.
#[test]
fn sums_follow_the_rule_bit_for_bit() {
    let (shape, kc) = ((9, 21, 50), 16);
    let m = matmul(shape, Form::TN, Epilogue::Gradient(Sink::Add));
    for target in targets() {
        let mut data = factors(&m).to_vec();
        let acc = random(4, (m.m * m.n) as usize);
        data.push(Data::F32(acc.clone()));
        let (a, b) = (data[0].f32(), data[1].f32());
        let mut expected = acc;
        for (at, sum) in expected.iter_mut().enumerate() {
            let (i, j) = (at / m.n as usize, at % m.n as usize);
            for start in (0..m.k as usize).step_by(kc as usize) {
                let mut block = 0f32;
                for p in start..(start + kc as usize).min(m.k as usize) {
                    block = a[p * m.m as usize + i].mul_add(b[p * m.n as usize + j], block);
                }
                *sum += block;
            }
        }
        let after = Runnable::of(in_blocks(m.clone(), kc, target), target).call(&data).remove(2);
        assert_eq!(bits(&after), bits(&Data::F32(expected)), "{}", target.name());
    }
}
