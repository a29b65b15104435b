//! Counter-based random numbers: a draw depends on (seed, stream name, index) and on nothing else, so that initial
//! weights and sampled data are the same for every partition, order and machine.

/// The finalizer of SplitMix64.
pub fn splitmix(z: u64) -> u64 {
    let z = z.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

fn fnv1a64(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |h, &b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
}

/// A named stream of random numbers.
#[derive(Clone, Copy, Debug)]
pub struct Draws {
    base: u64,
}

impl Draws {
    pub fn new(seed: u64, name: &str) -> Self {
        Draws { base: splitmix(seed ^ fnv1a64(name.as_bytes())) }
    }

    /// Draw `i`, uniform over all u64.
    pub fn at(self, i: u64) -> u64 {
        splitmix(self.base.wrapping_add(i))
    }

    /// Draw `i`, uniform in [0, 1).
    pub fn uniform(self, i: u64) -> f64 {
        const STEP: f64 = 1.0 / (1u64 << 53) as f64;
        (self.at(i) >> 11) as f64 * STEP
    }

    /// Element `e` of a standard normal sequence (Box-Muller; uses draws `2e` and `2e + 1`).
    pub fn normal(self, e: u64) -> f64 {
        let u1 = 1.0 - self.uniform(2 * e);
        let u2 = self.uniform(2 * e + 1);
        libm::sqrt(-2.0 * libm::log(u1)) * libm::cos(std::f64::consts::TAU * u2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn follows_the_published_generators() {
        // First output of SplitMix64 from state 0, and FNV-1a of "a".
        assert_eq!(splitmix(0), 0xE220_A839_7B1D_CDAF);
        assert_eq!(fnv1a64(b"a"), 0xaf63_dc4c_8601_ec8c);
    }

    #[test]
    fn normal_draws_have_the_moments_of_a_normal_distribution() {
        let (draws, n) = (Draws::new(7, "x"), 20_000);
        let values: Vec<f64> = (0..n).map(|e| draws.normal(e)).collect();
        let moment = |k: i32| values.iter().map(|v| v.powi(k)).sum::<f64>() / n as f64;
        assert!(moment(1).abs() < 0.03, "{}", moment(1));
        assert!((moment(2) - 1.0).abs() < 0.03, "{}", moment(2));
        assert!((moment(4) - 3.0).abs() < 0.3, "{}", moment(4));
    }
}
