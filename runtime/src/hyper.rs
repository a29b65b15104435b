//! Hyper-parameters of an update, as its kernels read them: `artifact::program::HYPER_LEN` has the layout.
//! Computed in f64 and rounded once.

use artifact::program::{HYPER_LEN, LearningRate, Optimizer};

/// Learning rate of a 0-based update.
pub fn learning_rate(schedule: &LearningRate, update: u64) -> f64 {
    match *schedule {
        LearningRate::Constant { lr } => lr,
        LearningRate::Cosine { peak, warmup, .. } if update < warmup => peak * (update + 1) as f64 / warmup as f64,
        LearningRate::Cosine { total, floor, .. } if update >= total => floor,
        LearningRate::Cosine { peak, warmup, total, floor } => {
            let part = (update - warmup) as f64 / (total - warmup) as f64;
            floor + (peak - floor) * (1.0 + libm::cos(std::f64::consts::PI * part)) / 2.0
        }
    }
}

/// The vectors of a 0-based update: for parameters with decay, then without.
pub fn vectors(optimizer: &Optimizer, schedule: &LearningRate, update: u64) -> [[f32; HYPER_LEN]; 2] {
    let lr = learning_rate(schedule, update);
    let t = (update + 1) as f64;
    let (mut vector, decay) = match *optimizer {
        Optimizer::AdamW { beta1, beta2, eps, decay } => {
            let correction = |beta: f64| 1.0 - libm::pow(beta, t);
            let (c1, c2) = (correction(beta1), correction(beta2));
            ([beta1, 1.0 - beta1, beta2, 1.0 - beta2, 1.0 / c2, eps, lr / c1, 1.0], decay)
        }
        Optimizer::Sgd { momentum, decay } => ([momentum, 0.0, 0.0, 0.0, 0.0, 0.0, lr, 1.0], decay),
    };
    let without = vector.map(|x| x as f32);
    vector[HYPER_LEN - 1] = 1.0 - lr * decay;
    [vector.map(|x| x as f32), without]
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
    fn adamw_corrects_the_bias_of_the_first_step() {
        let optimizer = Optimizer::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, decay: 0.1 };
        let [with, without] = vectors(&optimizer, &LearningRate::Constant { lr: 0.01 }, 0);
        assert_eq!(with[..6], [0.9, 0.1, 0.95, 0.05, 20.0, 1e-8f64].map(|x| x as f32));
        assert!((with[6] - 0.1).abs() < 1e-6);
        assert_eq!((with[7], without[7]), (0.999, 1.0));
    }
}
