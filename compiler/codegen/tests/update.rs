//! The elementwise update against f64.

use crate::harness::Runnable;
use crate::harness::{Data, assert_close, random, run, runnable};
use crate::optimizers::{ADAMW, SGD, hyper, parameter, rules, updated};
use model::kernel::{CorrectionKind, KernelOp, OptimizerKind, UpdateRule};

/// The operands of an update: gradient, weight and states, hyper-parameters.
fn operands(gradient: &[f32], parameter: &[Vec<f32>], hyper: &[f32]) -> Vec<Data> {
    let all = [gradient].into_iter().chain(parameter.iter().map(Vec::as_slice)).chain([hyper]);
    all.map(|x| Data::F32(x.to_vec())).collect()
}

#[test]
fn every_optimizer_is_right_at_every_length() {
    for cpu in runnable() {
        for rule in rules() {
            let lengths: &[usize] = if rule == ADAMW { &[1, 7, 16, 64, 1000, 4099] } else { &[37, 133] };
            for &len in lengths {
                let (g, h) = (random(1, len), hyper(rule));
                let before = parameter(rule, len);
                let wide: Vec<f64> = g.iter().map(|x| f64::from(*x)).collect();
                let expected = updated(rule, &h, &before, &wide);
                let after = run(KernelOp::Update { len: len as u64, rule }, cpu, &operands(&g, &before, &h));
                for (i, expected) in expected.iter().enumerate() {
                    assert_close(&format!("{rule:?} {i}"), after[i + 1].f32(), expected, 3e-7);
                }
            }
        }
    }
}

/// What a step by the sign does with zero, and that NaN stays to be seen.
#[test]
fn a_sign_is_zero_at_zero_and_nan_at_nan() {
    let (g, w) = ([0.0, -0.0, f32::NAN, 1e-30, -1e-30], [1.0f32; 5]);
    for (rule, cpu) in [OptimizerKind::Lion, OptimizerKind::Signum]
        .map(UpdateRule::plain)
        .into_iter()
        .zip(runnable().into_iter().cycle())
    {
        let mut h = hyper(rule);
        (h[6], h[7]) = (0.25, 1.0);
        let data = operands(&g, &[w.to_vec(), vec![0.0; 5]], &h);
        let after = run(KernelOp::Update { len: 5, rule }, cpu, &data);
        let w = after[1].f32();
        assert_eq!((w[0], w[1], w[3], w[4]), (1.0, 1.0, 0.75, 1.25), "{rule:?}");
        assert!(w[2].is_nan() && after[2].f32()[2].is_nan(), "{rule:?}");
    }
}

/// The first gradient has none before it, so nothing is known of its change, whatever the state holds.
#[test]
fn adan_starts_without_a_difference() {
    let len = 19;
    let rule = UpdateRule::plain(OptimizerKind::Adan);
    let (g, before) = (random(1, len), parameter(rule, len));
    let mut h = hyper(rule);
    h[11] = 0.0;
    for cpu in runnable() {
        let op = KernelOp::Update { len: len as u64, rule };
        let after = run(op, cpu, &operands(&g, &before, &h));
        for i in 0..len {
            assert_eq!(after[3].f32()[i].to_bits(), (before[2][i] * h[2]).to_bits(), "the old difference decayed");
            assert_eq!(after[5].f32()[i], -g[i], "the gradient is kept for the next update");
        }
    }
}

#[test]
fn nothing_is_contracted_or_reordered() {
    // The formulas in f32, one rounding per operation: the kernel must give these very bits.
    let (len, rule) = (1003, ADAMW);
    let (g, h, before) = (random(1, len), hyper(rule), parameter(rule, len));
    let [w, m, v] = &before[..] else { unreachable!("AdamW has two states") };
    for cpu in runnable() {
        let after = run(KernelOp::Update { len: len as u64, rule }, cpu, &operands(&g, &before, &h));
        for i in 0..len {
            let em = m[i] * h[0] + g[i] * h[1];
            let ev = v[i] * h[2] + g[i] * g[i] * h[3];
            let ew = w[i] * h[7] - em / ((ev * h[4]).sqrt() + h[5]) * h[6];
            let found = [1, 2, 3].map(|k| after[k].f32()[i].to_bits());
            assert_eq!(found, [ew, em, ev].map(f32::to_bits), "element {i}, {cpu:?}");
        }
    }
}

/// Whether the quadratic h w²/2 with `lr h = curvature` grows under the compiled update with the gradient `delay` updates old,
/// element by element. The second half of the run is compared with the first, in the size of the largest weight.
fn grows(rule: UpdateRule, beta: f64, delay: usize, curvature: &[f64], steps: usize) -> Vec<bool> {
    let len = curvature.len();
    let kernel = Runnable::new(KernelOp::Update { len: len as u64, rule }, runnable()[0]);
    let mut h = vec![0.0f32; artifact::optimizer::HYPER_LEN];
    // SGD's velocity, times 1 - beta, is the running average of the table.
    (h[0], h[6], h[7]) = (beta as f32, (1.0 - beta) as f32, 1.0);
    let mut parameter = vec![vec![1e-3f32; len]];
    parameter.extend(rule.states().iter().map(|_| vec![0.0; len]));
    let mut seen = vec![parameter[0].clone(); delay + 1];
    let mut largest = vec![[0.0f32; 2]; len];
    for k in 0..steps {
        h[12] = if rule.correction.is_some() { delay.min(k) as f32 } else { 0.0 };
        let g: Vec<f32> = seen[0].iter().zip(curvature).map(|(w, c)| w * *c as f32).collect();
        let after = kernel.call(&operands(&g, &parameter, &h));
        for (i, p) in parameter.iter_mut().enumerate() {
            *p = after[i + 1].f32().to_vec();
        }
        seen.remove(0);
        seen.push(parameter[0].clone());
        let half = usize::from(k >= steps / 2);
        for (l, w) in largest.iter_mut().zip(&parameter[0]) {
            // NaN is more than everything.
            l[half] = if w.abs() <= l[half] { l[half] } else { w.abs() };
        }
    }
    largest.iter().map(|[first, second]| !(second <= first)).collect()
}

/// The largest stable lr h of gradient descent with an averaged gradient, within 1 %: synchronous, one update late, and one
/// update late with error feedback.
#[test]
fn the_limits_of_stability_are_the_tables() {
    let corrected = UpdateRule { correction: Some(CorrectionKind::ErrorFeedback), ..SGD };
    let golden = (5f64.sqrt() - 1.0) / 2.0;
    for (beta, steps, limits) in [
        (0.0, 2000, [2.0, 1.0, golden]),
        (0.5, 3000, [6.0, 1.0, 1.0]),
        (0.9, 8000, [38.0, 1.0, 2.7016]),
        (0.95, 16000, [78.0, 1.0, 4.0]),
    ] {
        for ((rule, delay), limit) in [(SGD, 0), (SGD, 1), (corrected, 1)].into_iter().zip(limits) {
            let curvature = [0.5, 0.9, 0.99, 1.01, 1.1].map(|part| part * limit);
            let found = grows(rule, beta, delay, &curvature, steps);
            assert_eq!(found, [false, false, false, true, true], "beta {beta}, delay {delay}, {rule:?}");
        }
    }
}
