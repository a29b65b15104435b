//! The parts of updates that look at a whole tensor, against f64.

use crate::harness::{Data, assert_close, random, run, targets};
use crate::optimizers::squares;
use model::kernel::{Factor, KernelOp, UpdatePart};

const LENGTHS: [usize; 6] = [1, 7, 32, 63, 100, 4099];

/// The second operand starts as NaN where it must not be read.
fn sum(x: &[f32], before: Option<f64>, target: model::target::Target) -> f64 {
    let part = UpdatePart::SumSquares { len: x.len() as u64, add: before.is_some() };
    let data = [Data::F32(x.to_vec()), Data::F64(vec![before.unwrap_or(f64::NAN)])];
    run(KernelOp::Part(part), target, &data)[1].f64()[0]
}

#[test]
fn squares_are_summed_in_f64_and_alike_on_every_cpu() {
    for len in LENGTHS {
        let x = random(1, len);
        let exact: f64 = x.iter().map(|x| f64::from(*x).powi(2)).sum();
        let found: Vec<f64> = targets().into_iter().map(|target| sum(&x, None, target)).collect();
        assert!((found[0] / exact - 1.0).abs() < 1e-12, "{len}: {} instead of {exact}", found[0]);
        assert!(found.iter().all(|f| f.to_bits() == found[0].to_bits()), "{len}: {found:?}");
        let target = targets()[0];
        assert_eq!(sum(&x, Some(2.5), target), 2.5 + found[0], "{len}");
    }
    assert!(sum(&[1.0, f32::NAN], None, targets()[0]).is_nan());
}

fn scaled(x: &[f32], sum: f64, factor: Factor, target: model::target::Target) -> Vec<f32> {
    let part = KernelOp::Part(UpdatePart::Scale { len: x.len() as u64, factor });
    run(part, target, &[Data::F64(vec![sum]), Data::F32(x.to_vec())])[1].f32().to_vec()
}

#[test]
fn a_tensor_is_scaled_by_its_norm() {
    for target in targets() {
        for len in LENGTHS {
            let x = random(1, len);
            for (sum, factor, by) in [
                (6.25, Factor::Unit, 1.0 / (2.5 + 1e-7)),
                (0.0, Factor::Unit, 1e7),
                (6.25, Factor::To { target_bits: 3.0f64.to_bits() }, 3.0 / (2.5 + 1e-10)),
                (6.25, Factor::AtMost { max_bits: 0.5f64.to_bits() }, 0.2),
                (6.25, Factor::AtMost { max_bits: 2.5f64.to_bits() }, 1.0),
                (0.0, Factor::AtMost { max_bits: 0.5f64.to_bits() }, 1.0),
            ] {
                let expected: Vec<f32> = x.iter().map(|x| x * (by as f32)).collect();
                assert_eq!(scaled(&x, sum, factor, target), expected, "{factor:?} {sum} {len}");
            }
        }
        // A gradient that is not finite is not hidden.
        let found = scaled(&[1.0], f64::NAN, Factor::AtMost { max_bits: 1.0f64.to_bits() }, target);
        assert!(found[0].is_nan());
    }
}

#[test]
fn the_gradient_of_a_tied_table_is_both_ends() {
    for target in targets() {
        for len in LENGTHS {
            let (other, g) = (random(1, len), random(2, len));
            let part = KernelOp::Part(UpdatePart::Add { len: len as u64 });
            let after = run(part, target, &[Data::F32(other.clone()), Data::F32(g.clone())]);
            let both: Vec<f32> = g.iter().zip(&other).map(|(a, b)| a + b).collect();
            assert_eq!(after[1].f32(), both, "{len}");
            assert_eq!(after[0].f32(), other, "{len}");
        }
    }
}

#[test]
fn momentum_looks_ahead_and_a_correction_remembers() {
    let mut h = vec![0.0f32; artifact::optimizer::HYPER_LEN];
    (h[0], h[1], h[8]) = (0.95, 0.05, 0.475);
    for target in targets() {
        for len in LENGTHS {
            let (g, state) = (random(1, len), random(2, len));
            let data = [h.clone(), g.clone(), state.clone()].map(Data::F32);
            let wide = |i: usize| (f64::from(g[i]), f64::from(state[i]));
            let after = run(KernelOp::Part(UpdatePart::Momentum { len: len as u64 }), target, &data);
            let m: Vec<f64> = (0..len).map(wide).map(|(g, m)| 0.95 * m + 0.05 * g).collect();
            let ahead: Vec<f64> = (0..len).map(|i| wide(i).0 + 0.95 * (m[i] - wide(i).0)).collect();
            assert_close("m", after[2].f32(), &m, 3e-7);
            assert_close("look-ahead", after[1].f32(), &ahead, 3e-7);
            let after = run(KernelOp::Part(UpdatePart::Correct { len: len as u64 }), target, &data);
            let corrected: Vec<f64> = (0..len).map(wide).map(|(g, before)| g + 0.475 * (g - before)).collect();
            assert_close("corrected", after[1].f32(), &corrected, 3e-7);
            assert_eq!(after[2].f32(), g);
        }
    }
}

#[test]
fn moments_are_averaged_and_precondition() {
    let mut h = vec![0.0f32; artifact::optimizer::HYPER_LEN];
    h[..6].copy_from_slice(&[0.9, 0.1, 0.8, 0.2, 1.25, 1e-3]);
    for target in targets() {
        for len in LENGTHS {
            let (g, m, v) = (random(1, len), random(2, len), squares(3, len));
            let wide = |x: &[f32], i: usize| f64::from(x[i]);
            let data = [h.clone(), g.clone(), m.clone()].map(Data::F32);
            let after = run(KernelOp::Part(UpdatePart::Average { len: len as u64 }), target, &data);
            let average: Vec<f64> = (0..len).map(|i| 0.9 * wide(&m, i) + 0.1 * wide(&g, i)).collect();
            assert_close("average", after[2].f32(), &average, 3e-7);
            let [h, g, m, v] = [h.clone(), g, m, v].map(Data::F32);
            let data = [h, g.clone(), m.clone(), v.clone(), Data::unset(len)];
            let after = run(KernelOp::Part(UpdatePart::Precondition { len: len as u64 }), target, &data);
            let moment: Vec<f64> = (0..len).map(|i| 0.8 * wide(v.f32(), i) + 0.2 * wide(g.f32(), i).powi(2)).collect();
            let x: Vec<f64> = (0..len).map(|i| wide(m.f32(), i) / ((1.25 * moment[i]).sqrt() + 1e-3)).collect();
            assert_close("v", after[3].f32(), &moment, 3e-7);
            assert_close("x", after[4].f32(), &x, 1e-6);
        }
    }
}

#[test]
fn columns_are_divided_by_the_root_of_their_moment() {
    let mut h = vec![0.0f32; artifact::optimizer::HYPER_LEN];
    (h[2], h[3]) = (0.9, 0.1);
    for target in targets() {
        for (rows, width) in [(1, 1), (5, 3), (37, 61), (16, 8), (2, 200)] {
            let (x, v) = (random(1, rows * width), squares(2, width));
            let data = [h.clone(), x.clone(), v.clone()].map(Data::F32);
            let part = UpdatePart::Columns { rows: rows as u32, width: width as u32 };
            let after = run(KernelOp::Part(part), target, &data);
            let mean = |j: usize| (0..rows).map(|i| f64::from(x[i * width + j]).powi(2)).sum::<f64>() / rows as f64;
            let moment: Vec<f64> = (0..width).map(|j| 0.9 * f64::from(v[j]) + 0.1 * mean(j)).collect();
            let divided: Vec<f64> =
                (0..rows * width).map(|i| f64::from(x[i]) / (moment[i % width].sqrt() + 1e-10)).collect();
            assert_close("v", after[2].f32(), &moment, 1e-6);
            assert_close("x", after[1].f32(), &divided, 1e-6);
        }
    }
}
