//! Initial weights: drawn by (seed, parameter name, element), so the partition doesn't matter.

use crate::draw::Draws;
use artifact::program::Init;

/// Writes a parameter's initial values.
pub fn fill(seed: u64, name: &str, init: Init, out: &mut [f32]) {
    match init {
        Init::Zeros => out.fill(0.0),
        Init::Ones => out.fill(1.0),
        Init::Normal { std } => {
            let draws = Draws::new(seed, name);
            for (e, x) in out.iter_mut().enumerate() {
                *x = (draws.normal(e as u64) * std) as f32;
            }
        }
    }
}
