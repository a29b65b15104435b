//! The elementwise update against f64.

use crate::harness::{Data, assert_close, random, run, targets};
use crate::optimizers::{ADAMW, hyper, parameter, rules, updated};
use model::kernel::{KernelOp, OptimizerKind, UpdateRule};

/// The operands of an update: gradient, weight and states, hyper-parameters.
fn operands(gradient: &[f32], parameter: &[Vec<f32>], hyper: &[f32]) -> Vec<Data> {
    let all = [gradient].into_iter().chain(parameter.iter().map(Vec::as_slice)).chain([hyper]);
    all.map(|x| Data::F32(x.to_vec())).collect()
}

#[test]
fn every_optimizer_is_right_at_every_length() {
    for target in targets() {
        for rule in rules() {
            let lengths: &[usize] = if rule == ADAMW { &[1, 7, 16, 64, 1000, 4099] } else { &[37, 133] };
            for &len in lengths {
                let (g, h) = (random(1, len), hyper(rule));
                let before = parameter(rule, len);
                let wide: Vec<f64> = g.iter().map(|x| f64::from(*x)).collect();
                let expected = updated(rule, &h, &before, &wide);
                let after = run(KernelOp::Update { len: len as u64, rule }, target, &operands(&g, &before, &h));
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
    for (rule, target) in [OptimizerKind::Lion, OptimizerKind::Signum]
        .map(UpdateRule::plain)
        .into_iter()
        .zip(targets().into_iter().cycle())
    {
        let mut h = hyper(rule);
        (h[6], h[7]) = (0.25, 1.0);
        let data = operands(&g, &[w.to_vec(), vec![0.0; 5]], &h);
        let after = run(KernelOp::Update { len: 5, rule }, target, &data);
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
    for target in targets() {
        let op = KernelOp::Update { len: len as u64, rule };
        let after = run(op, target, &operands(&g, &before, &h));
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
    for target in targets() {
        let after = run(KernelOp::Update { len: len as u64, rule }, target, &operands(&g, &before, &h));
        for i in 0..len {
            let em = m[i] * h[0] + g[i] * h[1];
            let ev = v[i] * h[2] + g[i] * g[i] * h[3];
            let ew = w[i] * h[7] - em / ((ev * h[4]).sqrt() + h[5]) * h[6];
            let found = [1, 2, 3].map(|k| after[k].f32()[i].to_bits());
            assert_eq!(found, [ew, em, ev].map(f32::to_bits), "element {i}, {target:?}");
        }
    }
}
