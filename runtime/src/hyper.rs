//! Hyper-parameters of an update, as its kernels read them: `artifact::optimizer` has formulas and layout.
//! Computed in f64 and rounded once.

use artifact::optimizer::{Correction, FIRST_TURNS, HYPER_CORRECTION, HYPER_KEPT, HYPER_LEN, Optimizer};
use artifact::program::LearningRate;

/// Learning rate of a 0-based update.
pub fn learning_rate(schedule: &LearningRate, update: u64) -> f64 {
    // What of the way from peak to floor is left, by the part of the fall that is over.
    let (peak, warmup, fall, floor, left): (f64, u64, (u64, u64), f64, fn(f64) -> f64) = match *schedule {
        LearningRate::Constant { lr } => return lr,
        LearningRate::Cosine { peak, warmup, total, floor } => {
            (peak, warmup, (warmup, total), floor, |part| (1.0 + libm::cos(std::f64::consts::PI * part)) / 2.0)
        }
        LearningRate::Linear { peak, warmup, total, floor } => {
            (peak, warmup, (warmup, total), floor, |part| 1.0 - part)
        }
        LearningRate::Wsd { peak, warmup, total, decay, floor } => {
            (peak, warmup, (total.saturating_sub(decay), total), floor, |part| 1.0 - part)
        }
    };
    if update < warmup {
        peak * (update + 1) as f64 / warmup as f64
    } else if update < fall.0 {
        peak
    } else if update >= fall.1 {
        floor
    } else {
        floor + (peak - floor) * left((update - fall.0) as f64 / (fall.1 - fall.0) as f64)
    }
}

/// What a correction gives to the hyper-parameters of one update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Terms {
    /// Times the learning rate.
    rate: f64,
    /// In place of the b1 of an optimizer that looks ahead by itself.
    momentum: Option<f64>,
    /// From [`HYPER_CORRECTION`] on.
    factors: [f64; 3],
}

impl Terms {
    /// Without a correction.
    pub const NONE: Terms = Terms { rate: 1.0, momentum: None, factors: [0.0; 3] };

    /// Of a 0-based update of the run, the `since_empty`-th (from 0) since gradients had no delay.
    pub fn of(correction: &Correction, stage: usize, since_empty: u64, update: u64) -> Self {
        match correction {
            Correction::ErrorFeedback { lambda, delay } => {
                Terms { factors: [lambda * delay[stage].min(since_empty as f64), 0.0, 0.0], ..Terms::NONE }
            }
            Correction::Nesterov { momentum } => {
                let c = momentum[stage];
                Terms { momentum: Some(c), factors: [c, 1.0 - c, 0.0], ..Terms::NONE }
            }
            Correction::DelayCompensation { lambda } => Terms { factors: [lambda[stage], 0.0, 0.0], ..Terms::NONE },
            Correction::Prediction { ahead } => Terms { factors: [0.0, 0.0, ahead[stage]], ..Terms::NONE },
            Correction::PipeMare { anneal, delay, discrepancy, drift } => {
                let left = anneal.map_or(0.0, |updates| 1.0 - (update as f64 / updates as f64).min(1.0));
                let rate = libm::pow(delay[stage].max(1.0), -left);
                let behind = drift[stage];
                let factors = discrepancy.filter(|_| behind > 0.0).map_or([0.0; 3], |discrepancy| {
                    let c = libm::pow(discrepancy, 1.0 / behind);
                    [c, 1.0 - c, behind]
                });
                Terms { rate, factors, ..Terms::NONE }
            }
        }
    }
}

/// The vectors of a 0-based update: for parameters with decay, then without.
pub fn vectors(optimizer: &Optimizer, schedule: &LearningRate, update: u64, terms: &Terms) -> [[f32; HYPER_LEN]; 2] {
    let lr = learning_rate(schedule, update) * terms.rate;
    let mut vector = [0.0; HYPER_LEN];
    vector[HYPER_KEPT] = 1.0;
    vector[HYPER_CORRECTION..][..3].copy_from_slice(&terms.factors);
    let optimizer = match *optimizer {
        Optimizer::NAdam { beta1, beta2, eps, momentum_decay, decay } => {
            Optimizer::NAdam { beta1: terms.momentum.unwrap_or(beta1), beta2, eps, momentum_decay, decay }
        }
        other => other,
    };
    let kept = constants(&optimizer, lr, update + 1, &mut vector);
    let without = vector.map(|x| x as f32);
    vector[HYPER_KEPT] = kept;
    [vector.map(|x| x as f32), without]
}

/// Fills in what the optimizer uses at update `step`, from 1; returns what remains of a weight that decays.
fn constants(optimizer: &Optimizer, lr: f64, step: u64, vector: &mut [f64; HYPER_LEN]) -> f64 {
    let correction = |beta: f64| 1.0 - libm::pow(beta, step as f64);
    let mut averages = |at: usize, beta: f64| (vector[at], vector[at + 1]) = (beta, 1.0 - beta);
    match *optimizer {
        Optimizer::AdamW { beta1, beta2, eps, decay } => {
            averages(0, beta1);
            averages(2, beta2);
            (vector[4], vector[5], vector[6]) = (1.0 / correction(beta2), eps, lr / correction(beta1));
            1.0 - lr * decay
        }
        Optimizer::Sgd { momentum, decay } => {
            (vector[0], vector[6]) = (momentum, lr);
            1.0 - lr * decay
        }
        Optimizer::Lion { beta1, beta2, decay } => {
            averages(0, beta1);
            averages(2, beta2);
            vector[6] = lr;
            1.0 - lr * decay
        }
        Optimizer::Signum { momentum, decay } => {
            averages(0, momentum);
            vector[6] = lr;
            1.0 - lr * decay
        }
        Optimizer::NAdam { beta1, beta2, eps, momentum_decay, decay } => {
            averages(0, beta1);
            averages(2, beta2);
            let (now, product, next) = nesterov(beta1, momentum_decay, step);
            (vector[4], vector[5]) = (1.0 / correction(beta2), eps);
            (vector[6], vector[8]) = (lr * next / (1.0 - product * next), lr * (1.0 - now) / (1.0 - product));
            1.0 - lr * decay
        }
        Optimizer::Muon { momentum, decay } => {
            averages(0, momentum);
            vector[6] = lr;
            1.0 - lr * decay
        }
        Optimizer::NorMuon { momentum, beta2, decay } => {
            averages(0, momentum);
            averages(2, beta2);
            vector[6] = lr;
            1.0 - lr * decay
        }
        Optimizer::Mars { beta1, beta2, eps, gamma, decay } => {
            averages(0, beta1);
            averages(2, beta2);
            (vector[4], vector[5], vector[6]) = (1.0 / correction(beta2), eps, lr / correction(beta1));
            vector[8] = gamma * beta1 / (1.0 - beta1);
            1.0 - lr * decay
        }
        Optimizer::Soap { beta1, beta2, eps, frequency, decay, .. } => {
            averages(9, beta2);
            let turns = if step == 1 { FIRST_TURNS } else { u32::from((step - 1).is_multiple_of(frequency)) };
            (vector[5], vector[11]) = (eps, turns.into());
            if step == 1 {
                (vector[4], vector[8]) = (1.0, 1.0);
                return 1.0;
            }
            let corrected = |beta: f64| 1.0 - libm::pow(beta, (step - 1) as f64);
            vector[..4].copy_from_slice(&[beta1, 1.0 - beta1, beta2, 1.0 - beta2]);
            (vector[4], vector[6]) = (1.0 / corrected(beta2), lr / corrected(beta1));
            1.0 - lr * decay
        }
        Optimizer::Adan { beta1, beta2, beta3, eps, decay } => {
            averages(0, beta1);
            averages(2, beta2);
            averages(9, beta3);
            vector[11] = if step == 1 { 0.0 } else { 1.0 };
            (vector[4], vector[5]) = (1.0 / correction(beta3), eps);
            (vector[6], vector[8]) = (lr / correction(beta1), lr * beta2 / correction(beta2));
            1.0 / (1.0 + lr * decay)
        }
    }
}

/// NAdam's c of update `step` (from 1), the product of all c up to it, and the c of the next update.
fn nesterov(beta: f64, momentum_decay: f64, step: u64) -> (f64, f64, f64) {
    let c = |t: u64| beta * (1.0 - 0.5 * libm::pow(0.96, t as f64 * momentum_decay));
    let mut product = 1.0;
    for t in 1..=step {
        product *= c(t);
        // No smaller product changes 1 minus it.
        if product < 1e-17 {
            break;
        }
    }
    (c(step), product, c(step + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cosine_rises_falls_and_stays() {
        let s = LearningRate::Cosine { peak: 1e-3, warmup: 4, total: 12, floor: 1e-4 };
        let at = |u| learning_rate(&s, u);
        assert_eq!(at(0), 0.25e-3);
        assert_eq!(at(3), 1e-3);
        assert_eq!(at(4), 1e-3);
        assert!((at(8) - 5.5e-4).abs() < 1e-12);
        assert_eq!((at(12), at(1000)), (1e-4, 1e-4));
    }

    #[test]
    fn a_line_falls_from_the_warm_up_or_at_the_end() {
        let linear = LearningRate::Linear { peak: 1.0, warmup: 2, total: 10, floor: 0.2 };
        let rates: Vec<f64> = [0, 1, 2, 6, 9, 10, 99].iter().map(|&u| learning_rate(&linear, u)).collect();
        for (found, expected) in rates.iter().zip([0.5, 1.0, 1.0, 0.6, 0.3, 0.2, 0.2]) {
            assert!((found - expected).abs() < 1e-12, "{rates:?}");
        }
        let wsd = LearningRate::Wsd { peak: 1.0, warmup: 2, total: 10, decay: 4, floor: 0.2 };
        let rates: Vec<f64> = [0, 1, 5, 6, 7, 9, 10, 99].iter().map(|&u| learning_rate(&wsd, u)).collect();
        for (found, expected) in rates.iter().zip([0.5, 1.0, 1.0, 1.0, 0.8, 0.4, 0.2, 0.2]) {
            assert!((found - expected).abs() < 1e-12, "{rates:?}");
        }
    }

    #[test]
    fn adamw_corrects_the_bias_of_the_first_step() {
        let optimizer = Optimizer::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, decay: 0.1 };
        let [with, without] = vectors(&optimizer, &LearningRate::Constant { lr: 0.01 }, 0, &Terms::NONE);
        assert_eq!(with[..6], [0.9, 0.1, 0.95, 0.05, 20.0, 1e-8f64].map(|x| x as f32));
        assert!((with[6] - 0.1).abs() < 1e-6);
        assert_eq!((with[7], without[7]), (0.999, 1.0));
    }

    /// PyTorch's documentation of NAdam, step by step.
    #[test]
    fn nadam_multiplies_its_momenta() {
        let (b1, psi, lr) = (0.9, 0.004, 0.5);
        let optimizer = Optimizer::NAdam { beta1: b1, beta2: 0.999, eps: 1e-8, momentum_decay: psi, decay: 0.1 };
        let momentum = |t: i32| b1 * (1.0 - 0.5 * 0.96f64.powf(f64::from(t) * psi));
        let mut product = 1.0;
        for t in 1..=2000 {
            product *= momentum(t);
            let [h, _] = vectors(&optimizer, &LearningRate::Constant { lr }, t as u64 - 1, &Terms::NONE);
            let along_m = lr * momentum(t + 1) / (1.0 - product * momentum(t + 1));
            let along_g = lr * (1.0 - momentum(t)) / (1.0 - product);
            assert!((f64::from(h[6]) / along_m - 1.0).abs() < 1e-7, "update {t}");
            assert!((f64::from(h[8]) / along_g - 1.0).abs() < 1e-7, "update {t}");
        }
    }

    #[test]
    fn mars_corrects_by_gamma_and_steps_as_adamw() {
        let at = |optimizer| vectors(&optimizer, &LearningRate::Constant { lr: 0.5 }, 3, &Terms::NONE)[0];
        let (beta1, beta2, eps, decay) = (0.95, 0.99, 1e-8, 0.1);
        let mut mars = at(Optimizer::Mars { beta1, beta2, eps, gamma: 0.025, decay });
        assert_eq!(mars[8], 0.475);
        mars[8] = 0.0;
        assert_eq!(mars, at(Optimizer::AdamW { beta1, beta2, eps, decay }));
    }

    #[test]
    fn soap_makes_its_bases_first_and_counts_from_there() {
        let (beta1, beta2, eps, frequency, decay) = (0.9, 0.95, 1e-8, 3, 0.1);
        let soap = Optimizer::Soap { beta1, beta2, eps, frequency, max_dim: 9, decay };
        let at = |optimizer, update| vectors(&optimizer, &LearningRate::Constant { lr: 0.5 }, update, &Terms::NONE);
        let averages = [0.95, 0.05].map(|x: f64| x as f32);
        let [first, _] = at(soap, 0);
        assert_eq!(first[..4], [0.0; 4]);
        assert_eq!((first[6], first[7], first[8], first[11]), (0.0, 1.0, 1.0, FIRST_TURNS as f32));
        assert_eq!(first[9..11], averages);
        for update in 1..9 {
            let [mut h, without] = at(soap, update);
            assert_eq!((h[8], h[11]), (0.0, f32::from(u8::from(update % 3 == 0))), "update {update}");
            assert_eq!((h[9..11].to_vec(), without[7]), (averages.to_vec(), 1.0));
            h[9..12].fill(0.0);
            assert_eq!(h, at(Optimizer::AdamW { beta1, beta2, eps, decay }, update - 1)[0]);
        }
    }

    #[test]
    fn adan_knows_of_no_change_at_first_and_decays_after_the_step() {
        let optimizer = Optimizer::Adan { beta1: 0.98, beta2: 0.92, beta3: 0.99, eps: 1e-8, decay: 0.1 };
        let at = |update| vectors(&optimizer, &LearningRate::Constant { lr: 0.5 }, update, &Terms::NONE);
        assert_eq!((at(0)[0][11], at(1)[0][11]), (0.0, 1.0));
        assert_eq!((at(0)[0][7], at(0)[1][7]), ((1.0 / 1.05f64) as f32, 1.0));
    }

    #[test]
    fn learning_rates_grow_to_the_schedule_s_where_gradients_are_late() {
        let delay = vec![4.0, 0.25];
        let correction =
            Correction::PipeMare { anneal: Some(100), drift: delay.clone(), delay, discrepancy: Some(0.25) };
        let rate = |stage, update| Terms::of(&correction, stage, 7, update).rate;
        for (update, expected) in [(0, 0.25), (50, 0.5), (100, 1.0), (1000, 1.0)] {
            assert!((rate(0, update) - expected).abs() < 1e-15, "update {update}");
            assert_eq!(rate(1, update), 1.0);
        }
        let [c, rest, behind] = Terms::of(&correction, 0, 7, 0).factors;
        assert!((c - 0.25f64.sqrt().sqrt()).abs() < 1e-15);
        assert_eq!((c + rest, behind), (1.0, 4.0));
    }

    #[test]
    fn feedback_is_for_as_many_updates_as_were_made() {
        let correction = Correction::ErrorFeedback { lambda: 0.5, delay: vec![3.0, 0.75] };
        let factor = |stage, since_empty| Terms::of(&correction, stage, since_empty, since_empty + 40).factors[0];
        assert_eq!([0, 1, 2, 3, 9].map(|update| factor(0, update)), [0.0, 0.5, 1.0, 1.5, 1.5]);
        assert_eq!([0, 1, 9].map(|update| factor(1, update)), [0.0, 0.375, 0.375]);
    }

    #[test]
    fn looking_ahead_takes_the_place_of_nadam_s_momentum() {
        let lr = LearningRate::Constant { lr: 0.5 };
        let nadam = |beta1| Optimizer::NAdam { beta1, beta2: 0.99, eps: 1e-8, momentum_decay: 0.004, decay: 0.1 };
        let correction = Correction::Nesterov { momentum: vec![0.95, 0.9] };
        let terms = Terms::of(&correction, 0, 0, 5);
        let [h, _] = vectors(&nadam(0.8), &lr, 5, &terms);
        assert_eq!(h[..12], vectors(&nadam(0.95), &lr, 5, &Terms::NONE)[0][..12]);
        assert_eq!(h[12..14], [0.95, 0.05].map(|x: f64| x as f32));
    }
}
