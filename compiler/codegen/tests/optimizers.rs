//! Every optimizer's update of one element in f64, and hyper-parameters and states to try it with.

use crate::harness::random;
use artifact::optimizer::HYPER_LEN;
use model::kernel::{CorrectionKind, OptimizerKind, UpdateRule};

pub const ADAMW: UpdateRule = UpdateRule::plain(OptimizerKind::AdamW);
pub const SGD: UpdateRule = UpdateRule::plain(OptimizerKind::Sgd);

/// Every optimizer, and every correction; one with an optimizer that decays after its step.
pub fn rules() -> Vec<UpdateRule> {
    let corrected = [
        corrected(OptimizerKind::Sgd, CorrectionKind::ErrorFeedback),
        corrected(OptimizerKind::Adan, CorrectionKind::ErrorFeedback),
        corrected(OptimizerKind::Sgd, CorrectionKind::Nesterov),
        corrected(OptimizerKind::Adan, CorrectionKind::Prediction),
        corrected(OptimizerKind::Muon, CorrectionKind::Prediction),
        corrected(OptimizerKind::Sgd, CorrectionKind::Discrepancy),
    ];
    OptimizerKind::STEPS.map(UpdateRule::plain).into_iter().chain(corrected).collect()
}

pub const fn corrected(kind: OptimizerKind, correction: CorrectionKind) -> UpdateRule {
    UpdateRule { correction: Some(correction), ..UpdateRule::plain(kind) }
}

/// A second-moment estimate must not be negative.
pub fn squares(seed: u64, len: usize) -> Vec<f32> {
    random(seed, len).iter().map(|x| x * x).collect()
}

/// Hyper-parameters of some update after the first (see `artifact::optimizer::HYPER_LEN`).
pub fn hyper(rule: UpdateRule) -> Vec<f32> {
    let mut h = [0.0f64; HYPER_LEN];
    let (lr, decay, step) = (1e-3f64, 0.1f64, 3);
    let average = |beta: f64| [beta, 1.0 - beta];
    let corrected = |beta: f64| 1.0 - beta.powi(step);
    h[7] = 1.0 - lr * decay;
    match rule.correction {
        Some(CorrectionKind::ErrorFeedback) => h[12] = 1.5,
        Some(CorrectionKind::Nesterov) => h[12..14].copy_from_slice(&average(0.95)),
        Some(CorrectionKind::Discrepancy) => {
            h[12..14].copy_from_slice(&average(0.8));
            h[14] = 2.5;
        }
        Some(CorrectionKind::Prediction) => h[14] = 2.5,
        Some(CorrectionKind::DelayCompensation) | None => {}
    }
    match rule.kind {
        OptimizerKind::Muon => h[6] = lr,
        OptimizerKind::AdamW => {
            h[..2].copy_from_slice(&average(0.9));
            h[2..4].copy_from_slice(&average(0.95));
            (h[4], h[5], h[6]) = (1.0 / corrected(0.95), 1e-8, lr / corrected(0.9));
        }
        OptimizerKind::Sgd => (h[0], h[6]) = (0.9, 0.05),
        OptimizerKind::Lion => {
            h[..2].copy_from_slice(&average(0.9));
            h[2..4].copy_from_slice(&average(0.99));
            h[6] = lr;
        }
        OptimizerKind::Signum => {
            h[..2].copy_from_slice(&average(0.9));
            h[6] = lr;
        }
        OptimizerKind::NAdam => {
            h[..2].copy_from_slice(&average(0.9));
            h[2..4].copy_from_slice(&average(0.999));
            (h[4], h[5], h[6], h[8]) = (1.0 / corrected(0.999), 1e-8, 0.6 * lr, 0.8 * lr);
        }
        OptimizerKind::Adan => {
            h[..2].copy_from_slice(&average(0.98));
            h[2..4].copy_from_slice(&average(0.92));
            h[9..11].copy_from_slice(&average(0.99));
            (h[4], h[5], h[6]) = (1.0 / corrected(0.99), 1e-8, lr / corrected(0.98));
            (h[7], h[8], h[11]) = (1.0 / (1.0 + lr * decay), lr * 0.92 / corrected(0.92), 1.0);
        }
        other => panic!("{other:?} has the step of another"),
    }
    h.map(|x| x as f32).to_vec()
}

/// A weight, a prediction of it where the rule has one, and its states.
pub fn parameter(rule: UpdateRule, len: usize) -> Vec<Vec<f32>> {
    let states = rule.states().into_iter().zip(12..);
    let states = states.map(|(name, seed)| if name == "v" { squares(seed, len) } else { random(seed, len) });
    let predicted = rule.predicts().then(|| random(10, len));
    [random(11, len)].into_iter().chain(predicted).chain(states).collect()
}

/// The update of one element; `cells`: the weight, a prediction of it where the rule has one, then the states.
pub fn update(rule: UpdateRule, h: &[f64], g: f64, cells: &mut [f64]) {
    let (w, states) = cells.split_first_mut().expect("a weight");
    let (predicted, states) = states.split_at_mut(usize::from(rule.predicts()));
    let (states, more) = states.split_at_mut(rule.kind.states().len());
    let step = step(rule.kind, h, g, states);
    let taken = match (rule.correction, &mut *more) {
        (None | Some(CorrectionKind::Prediction), []) | (Some(CorrectionKind::Discrepancy), _) => step,
        (Some(CorrectionKind::ErrorFeedback), [last]) => step + h[12] * (step - std::mem::replace(last, step)),
        (Some(CorrectionKind::Nesterov), [ahead]) => {
            *ahead = h[12] * *ahead + h[13] * step;
            h[13] * step + h[12] * *ahead
        }
        (other, _) => panic!("{other:?} has other states"),
    };
    let before = *w;
    *w = if rule.kind == OptimizerKind::Adan { (*w - taken) * h[7] } else { h[7] * *w - taken };
    if let [predicted] = predicted {
        *predicted = *w - h[14] * taken;
    }
    if let (Some(CorrectionKind::Discrepancy), [delta, behind]) = (rule.correction, more) {
        *delta = h[12] * *delta + h[13] * (*w - before);
        *behind = *w - h[14] * *delta;
    }
}

/// What the optimizer subtracts; updates its states.
fn step(kind: OptimizerKind, h: &[f64], g: f64, states: &mut [f64]) -> f64 {
    let sign = |x: f64| if x == 0.0 { 0.0 } else { x.signum() };
    match (kind, states) {
        (OptimizerKind::AdamW, [m, v]) => {
            *m = h[0] * *m + h[1] * g;
            *v = h[2] * *v + h[3] * g * g;
            h[6] * *m / ((*v * h[4]).sqrt() + h[5])
        }
        (OptimizerKind::Muon, []) => h[6] * g,
        (OptimizerKind::Sgd, [m]) => {
            *m = h[0] * *m + g;
            h[6] * *m
        }
        (OptimizerKind::Lion, [m]) => {
            let ahead = h[0] * *m + h[1] * g;
            *m = h[2] * *m + h[3] * g;
            h[6] * sign(ahead)
        }
        (OptimizerKind::Signum, [m]) => {
            *m = h[0] * *m + h[1] * g;
            h[6] * sign(*m)
        }
        (OptimizerKind::NAdam, [m, v]) => {
            *m = h[0] * *m + h[1] * g;
            *v = h[2] * *v + h[3] * g * g;
            (h[6] * *m + h[8] * g) / ((*v * h[4]).sqrt() + h[5])
        }
        (OptimizerKind::Adan, [m, diff, v, before]) => {
            let change = (g + *before) * h[11];
            *m = h[0] * *m + h[1] * g;
            *diff = h[2] * *diff + h[3] * change;
            *v = h[9] * *v + h[10] * (g + h[2] * change).powi(2);
            *before = -g;
            (h[6] * *m + h[8] * *diff) / ((*v * h[4]).sqrt() + h[5])
        }
        (other, _) => panic!("{other:?} has other states"),
    }
}

/// The weight and the states after an update with `gradient`, in f64.
pub fn updated(rule: UpdateRule, hyper: &[f32], before: &[Vec<f32>], gradient: &[f64]) -> Vec<Vec<f64>> {
    let h: Vec<f64> = hyper.iter().map(|x| f64::from(*x)).collect();
    let mut after = vec![Vec::new(); before.len()];
    for (i, &g) in gradient.iter().enumerate() {
        let mut cells: Vec<f64> = before.iter().map(|b| f64::from(b[i])).collect();
        update(rule, &h, g, &mut cells);
        after.iter_mut().zip(cells).for_each(|(a, cell)| a.push(cell));
    }
    after
}
