//! Corrections for delayed gradients, over many compiled updates on a quadratic: against the formulas of their papers in f64,
//! and at the limits of stability.

use crate::harness::{Data, Runnable, assert_close, runnable};
use crate::optimizers::{SGD, corrected};
use artifact::optimizer::HYPER_LEN;
use model::kernel::{CorrectionKind, KernelOp, OptimizerKind, Sink, UpdateRule, Writes};

/// Weights that descend the quadratic with these curvatures, element by element, with gradients some updates late.
struct Descent<'a> {
    kernel: Runnable,
    curvature: &'a [f64],
    /// The weights, a prediction of them where the rule has one, then the states.
    parameter: Vec<Vec<f32>>,
    /// What the forward pass read before each update that is still to be seen; the first is seen next.
    before: Vec<Vec<f32>>,
    /// Which of `parameter` the forward pass reads.
    read: usize,
}

impl<'a> Descent<'a> {
    fn new(rule: UpdateRule, curvature: &'a [f64], start: f32, delay: usize) -> Self {
        let len = curvature.len();
        let kernel = Runnable::new(KernelOp::Update { len: len as u64, rule }, runnable()[0]);
        let states = rule.states().into_iter().map(|_| vec![0.0; len]);
        let weights = vec![vec![start; len]; 1 + usize::from(rule.predicts())];
        let parameter: Vec<Vec<f32>> = weights.into_iter().chain(states).collect();
        let read = usize::from(rule.predicts());
        Descent { kernel, curvature, before: vec![parameter[0].clone(); delay + 1], parameter, read }
    }

    fn update(&mut self, hyper: &[f32]) -> &[f32] {
        let gradient = self.before[0].iter().zip(self.curvature).map(|(w, c)| w * *c as f32).collect();
        self.update_by(gradient, hyper)
    }

    fn update_by(&mut self, gradient: Vec<f32>, hyper: &[f32]) -> &[f32] {
        let lists = [&[gradient], &self.parameter[..], &[hyper.to_vec()]].concat();
        let after = self.kernel.call(&lists.into_iter().map(Data::F32).collect::<Vec<_>>());
        for (p, after) in self.parameter.iter_mut().zip(&after[1..]) {
            *p = after.f32().to_vec();
        }
        self.before.remove(0);
        self.before.push(self.parameter[self.read].clone());
        &self.parameter[0]
    }
}

/// SGD without decay and with a prediction so many updates ahead.
fn predicting(momentum: f64, lr: f64, ahead: f64) -> [f32; HYPER_LEN] {
    let mut h = sgd(momentum, lr, [0.0; 2]);
    h[14] = ahead as f32;
    h
}

/// SGD without decay: its momentum, the learning rate, and what the correction gives.
fn sgd(momentum: f64, lr: f64, correction: [f64; 2]) -> [f32; HYPER_LEN] {
    let mut h = [0.0; HYPER_LEN];
    (h[0], h[6], h[7]) = (momentum, lr, 1.0);
    h[12..14].copy_from_slice(&correction);
    h.map(|x| x as f32)
}

const FEEDBACK: UpdateRule = corrected(OptimizerKind::Sgd, CorrectionKind::ErrorFeedback);
const PREDICTION: UpdateRule = corrected(OptimizerKind::Sgd, CorrectionKind::Prediction);
const CURVATURE: [f64; 5] = [0.3, 1.0, 0.05, 0.7, 0.01];

/// Fifty updates from 1; `reference` gives the weight with this curvature after each.
fn follows(
    rule: UpdateRule,
    delay: usize,
    hyper: impl Fn(usize) -> [f32; HYPER_LEN],
    reference: impl Fn(f64) -> Vec<f64>,
) {
    let mut descent = Descent::new(rule, &CURVATURE, 1.0, delay);
    let expected: Vec<Vec<f64>> = CURVATURE.iter().map(|&c| reference(c)).collect();
    for k in 0..50 {
        let expected: Vec<f64> = expected.iter().map(|e| e[k]).collect();
        let (found, what) = (descent.update(&hyper(k)), format!("{rule:?}, delay {delay}, update {k}"));
        assert_close(&what, found, &expected, 3e-6);
    }
}

/// x(t+1) = x(t) - u(t-tau) - lambda tau (u(t-tau) - u(t-tau-1)), with fewer than tau at the start.
#[test]
fn error_feedback_follows_its_formula() {
    let (lr, lambda) = (0.1, 0.8);
    for delay in [0, 1, 2, 5] {
        let tau = |k: usize| k.min(delay) as f64;
        follows(
            FEEDBACK,
            delay,
            |k| sgd(0.0, lr, [lambda * tau(k), 0.0]),
            |c| {
                let (mut x, mut last) = (vec![1.0], 0.0);
                for k in 0..50 {
                    let u = lr * c * x[k - k.min(delay)];
                    x.push(x[k] - u - lambda * tau(k) * (u - last));
                    last = u;
                }
                x.split_off(1)
            },
        );
    }
}

/// The gradient is that of w - tau u some updates before, u the last step then.
#[test]
fn a_prediction_follows_its_formula() {
    let (lr, momentum) = (0.1, 0.5);
    for (delay, tau) in [(0, 0.75), (1, 1.0), (2, 1.5), (5, 5.0)] {
        follows(
            PREDICTION,
            delay,
            |_| predicting(momentum, lr, tau),
            |c| {
                let (mut x, mut velocity, mut ahead) = (vec![1.0], 0.0, vec![1.0]);
                for k in 0..50 {
                    velocity = momentum * velocity + c * ahead[k - k.min(delay)];
                    x.push(x[k] - lr * velocity);
                    ahead.push(x[k + 1] - tau * lr * velocity);
                }
                x.split_off(1)
            },
        );
    }
}

/// w(t+1) = w(t) - lr (g + lambda g² (w(t) - w(t-tau))), g that of w(t-tau): the gradient's own kernel moves it on.
#[test]
fn delay_compensation_follows_its_formula() {
    let (lr, lambda) = (0.2, 1.5);
    let rule = UpdateRule { writes: Writes::Next, ..corrected(OptimizerKind::Sgd, CorrectionKind::DelayCompensation) };
    let width = CURVATURE.len();
    let sink = Sink::Update { rule, accumulated: false };
    let kernel = Runnable::new(KernelOp::BiasGrad { rows: 1, width: width as u32, sink }, runnable()[0]);
    for delay in [0, 1, 4] {
        let (mut past, mut momentum) = (vec![vec![1.0f32; width]], vec![0.0f32; width]);
        let mut reference = vec![vec![1.0f64; width]];
        for k in 0..50 {
            let (now, seen) = (past[k].clone(), past[k - k.min(delay)].clone());
            let gradient = seen.iter().zip(CURVATURE).map(|(w, c)| w * c as f32).collect();
            let hyper = sgd(0.0, lr, [lambda, 0.0]).to_vec();
            let operands = [gradient, hyper, now, seen].map(Data::F32).into_iter();
            let after = kernel.call(&operands.chain([Data::unset(width), Data::F32(momentum)]).collect::<Vec<_>>());
            past.push(after[4].f32().to_vec());
            momentum = after[5].f32().to_vec();
            let next = CURVATURE.iter().enumerate().map(|(i, c)| {
                let (w, seen) = (reference[k][i], reference[k - k.min(delay)][i]);
                let g = c * seen;
                w - lr * (g + lambda * g * g * (w - seen))
            });
            reference.push(next.collect());
            assert_close(&format!("delay {delay}, update {k}"), &past[k + 1], &reference[k + 1], 3e-6);
        }
    }
}

/// w(t+1) = w(t) + d(t) - lr (1 - c) g with d(t) = c (w(t) - w(t-1)), where the gradient g is that of w + d some updates before.
/// The compiled weights are w + d.
#[test]
fn nesterov_follows_its_formula() {
    let (lr, c) = (0.3, 0.9);
    let rule = corrected(OptimizerKind::Sgd, CorrectionKind::Nesterov);
    for delay in [0, 1, 4] {
        follows(
            rule,
            delay,
            |_| sgd(0.0, lr, [c, 1.0 - c]),
            |curvature| {
                let (mut w, mut before, mut ahead) = (1.0, 1.0, vec![1.0]);
                for k in 0..50 {
                    let g = curvature * ahead[k - k.min(delay)];
                    let next = w + c * (w - before) - lr * (1.0 - c) * g;
                    (before, w) = (w, next);
                    ahead.push(w + c * (w - before));
                }
                ahead.split_off(1)
            },
        );
    }
}

/// PipeMare's own model of a discrepancy: the gradient is (c + p) w_f - p w_b, with w_f the weights some updates before and w_b = w - F d,
/// the copy that the backward pass reads, where d is the running average of the weights' changes.
#[test]
fn the_copy_behind_follows_its_formula() {
    let (lr, pull, keep) = (0.2, 0.5, 0.6);
    let rule = corrected(OptimizerKind::Sgd, CorrectionKind::Discrepancy);
    for drift in [1, 3] {
        let mut hyper = sgd(0.0, lr, [keep, 1.0 - keep]);
        hyper[14] = drift as f32;
        let mut descent = Descent::new(rule, &CURVATURE, 1.0, drift);
        *descent.parameter.last_mut().expect("states") = vec![1.0; CURVATURE.len()];
        let start = [1.0, 1.0, 0.0];
        let mut reference: Vec<Vec<[f64; 3]>> = CURVATURE.iter().map(|_| vec![start]).collect();
        for k in 0..50 {
            let behind = descent.parameter.last().expect("states").clone();
            let seen = &descent.before[0];
            let both = seen.iter().zip(&behind).zip(CURVATURE);
            let gradient = both.map(|((f, b), c)| (c + pull) as f32 * f - pull as f32 * b).collect();
            descent.update_by(gradient, &hyper);
            for (past, c) in reference.iter_mut().zip(CURVATURE) {
                let [w, behind, d] = past[k];
                let next = w - lr * ((c + pull) * past[k - k.min(drift)][0] - pull * behind);
                let d = keep * d + (1.0 - keep) * (next - w);
                past.push([next, next - drift as f64 * d, d]);
            }
            for (found, which) in [(&descent.parameter[0], 0), (descent.parameter.last().expect("states"), 1)] {
                let expected: Vec<f64> = reference.iter().map(|past| past[k + 1][which]).collect();
                assert_close(&format!("drift {drift}, update {k}, {which}"), found, &expected, 3e-6);
            }
        }
    }
}

/// Whether weights with these values of lr times curvature grow when the gradient is averaged: the second half of a run is compared with the
/// first, in the size of the largest weight.
fn grows(rule: UpdateRule, beta: f64, delay: usize, curvature: &[f64], updates: usize) -> Vec<bool> {
    let mut descent = Descent::new(rule, curvature, 1e-3, delay);
    let mut largest = vec![[0.0f32; 2]; curvature.len()];
    for k in 0..updates {
        // SGD's velocity, times 1 - beta, is the running average.
        let hyper = match rule.correction {
            Some(CorrectionKind::ErrorFeedback) => sgd(beta, 1.0 - beta, [delay.min(k) as f64, 0.0]),
            _ => predicting(beta, 1.0 - beta, delay as f64),
        };
        let weights = descent.update(&hyper);
        let half = usize::from(k >= updates / 2);
        for (l, w) in largest.iter_mut().zip(weights) {
            // NaN is more than everything.
            l[half] = if w.abs() <= l[half] { l[half] } else { w.abs() };
        }
    }
    largest.iter().map(|[first, second]| !(second <= first)).collect()
}

/// The largest stable lr h of gradient descent with an averaged gradient, within 1 %: synchronous, one update late, and one
/// update late with error feedback. A forward pass that reads weights one step ahead has the same limits as error feedback: the
/// characteristic polynomials are the same, (1 - z) (z² - beta z) = (1 - beta) lr h (2 z - 1).
#[test]
fn the_limits_of_stability_are_the_tables() {
    let golden = (5f64.sqrt() - 1.0) / 2.0;
    for (beta, updates, limits) in [
        (0.0, 2000, [2.0, 1.0, golden]),
        (0.5, 3000, [6.0, 1.0, 1.0]),
        (0.9, 8000, [38.0, 1.0, 2.7016]),
        (0.95, 16000, [78.0, 1.0, 4.0]),
        (0.99, 40000, [398.0, 1.0, 9.51]),
    ] {
        let [sync, late, ahead] = limits;
        for ((rule, delay), limit) in
            [((SGD, 0), sync), ((SGD, 1), late), ((FEEDBACK, 1), ahead), ((PREDICTION, 1), ahead)]
        {
            let curvature = [0.5, 0.9, 0.99, 1.01, 1.1].map(|part| part * limit);
            let found = grows(rule, beta, delay, &curvature, updates);
            assert_eq!(found, [false, false, false, true, true], "beta {beta}, delay {delay}, {rule:?}");
        }
    }
}
