//! The elementwise update against f64.

use crate::harness::{Data, assert_close, random, run, runnable};
use model::kernel::{KernelOp, OptimizerKind};

/// Hyper-parameters of AdamW at step 3.
pub fn adamw_hyper() -> Vec<f32> {
    let (b1, b2, eps, lr, decay, t) = (0.9f64, 0.95f64, 1e-8f64, 1e-3f64, 0.1f64, 3);
    [b1, 1.0 - b1, b2, 1.0 - b2, 1.0 / (1.0 - b2.powi(t)), eps, lr / (1.0 - b1.powi(t)), 1.0 - lr * decay]
        .map(|x| x as f32)
        .to_vec()
}

/// Hyper-parameters of SGD with momentum.
pub fn sgd_hyper() -> Vec<f32> {
    vec![0.9, 0.0, 0.0, 0.0, 0.0, 0.0, 0.05, 1.0 - 0.05 * 0.01]
}

/// A second-moment estimate must not be negative.
pub fn squares(seed: u64, len: usize) -> Vec<f32> {
    random(seed, len).iter().map(|x| x * x).collect()
}

#[test]
fn adamw_is_right_at_every_length() {
    for cpu in runnable() {
        for len in [1usize, 7, 16, 37, 64, 1000, 4099] {
            let (g, w, m, v) = (random(1, len), random(2, len), random(3, len), squares(4, len));
            let h = adamw_hyper();
            let data = [&g, &w, &m, &v, &h].map(|x| Data::F32(x.clone()));
            let after = run(KernelOp::Update { len: len as u64, optimizer: OptimizerKind::AdamW }, cpu, &data);
            let (mut ew, mut em, mut ev) = (vec![], vec![], vec![]);
            for i in 0..len {
                let [g, w, m, v] = [g[i], w[i], m[i], v[i]].map(f64::from);
                let h = h.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
                let m = h[0] * m + h[1] * g;
                let v = h[2] * v + h[3] * g * g;
                em.push(m);
                ev.push(v);
                ew.push(w * h[7] - h[6] * (m / ((v * h[4]).sqrt() + h[5])));
            }
            assert_close("w", after[1].f32(), &ew, 3e-7);
            assert_close("m", after[2].f32(), &em, 3e-7);
            assert_close("v", after[3].f32(), &ev, 3e-7);
        }
    }
}

#[test]
fn sgd_is_right_at_every_length() {
    for cpu in runnable() {
        for len in [3usize, 32, 133] {
            let (g, w, m) = (random(1, len), random(2, len), random(3, len));
            let h = sgd_hyper();
            let data = [&g, &w, &m, &h].map(|x| Data::F32(x.clone()));
            let after = run(KernelOp::Update { len: len as u64, optimizer: OptimizerKind::Sgd }, cpu, &data);
            let em = (0..len).map(|i| f64::from(h[0]) * f64::from(m[i]) + f64::from(g[i])).collect::<Vec<_>>();
            let ew = (0..len).map(|i| f64::from(w[i]) * f64::from(h[7]) - f64::from(h[6]) * em[i]).collect::<Vec<_>>();
            assert_close("w", after[1].f32(), &ew, 3e-7);
            assert_close("m", after[2].f32(), &em, 3e-7);
        }
    }
}

#[test]
fn nothing_is_contracted_or_reordered() {
    // The formulas in f32, one rounding per operation: the kernel must give these very bits.
    let len = 1003;
    let (g, w, m, v, h) = (random(1, len), random(2, len), random(3, len), squares(4, len), adamw_hyper());
    let data = [&g, &w, &m, &v, &h].map(|x| Data::F32(x.clone()));
    for cpu in runnable() {
        let after = run(KernelOp::Update { len: len as u64, optimizer: OptimizerKind::AdamW }, cpu, &data);
        for i in 0..len {
            let em = m[i] * h[0] + g[i] * h[1];
            let ev = v[i] * h[2] + g[i] * g[i] * h[3];
            let ew = w[i] * h[7] - em / ((ev * h[4]).sqrt() + h[5]) * h[6];
            let found = [1, 2, 3].map(|k| after[k].f32()[i].to_bits());
            assert_eq!(found, [ew, em, ev].map(f32::to_bits), "element {i}, {cpu:?}");
        }
    }
}
