//! bf16: the upper half of an f32.

/// The nearest bf16's bits, to even where two are equally near; NaN stays NaN, and what is beyond the largest becomes infinite.
pub fn round(x: f32) -> u16 {
    let bits = x.to_bits();
    if x.is_nan() {
        // Quiet: the payload's upper half might be that of an infinity.
        return (bits >> 16) as u16 | 0x40;
    }
    let even = (bits >> 16) & 1;
    ((bits + 0x7FFF + even) >> 16) as u16
}

/// The number of the given bits.
pub fn widen(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_to_the_nearest_and_then_to_even() {
        // One unit in the last place of numbers from 1 to 2.
        let unit = 2f32.powi(-7);
        for (x, rounded) in [
            (1.0, 1.0),
            (1.0 + 0.49 * unit, 1.0),
            (1.0 + 0.5 * unit, 1.0),
            (1.0 + 0.51 * unit, 1.0 + unit),
            (1.0 + 1.5 * unit, 1.0 + 2.0 * unit),
            (-1.0 - 1.5 * unit, -1.0 - 2.0 * unit),
            (-0.0, -0.0),
            (f32::MAX, f32::INFINITY),
            (f32::NEG_INFINITY, f32::NEG_INFINITY),
            (f32::from_bits(1), 0.0),
            (f32::from_bits(0x18000), f32::from_bits(0x20000)),
        ] {
            assert_eq!(widen(round(x)).to_bits(), f32::to_bits(rounded), "{x:e}");
        }
        for bits in [0x7F80_0001, 0xFFC0_0000, 0x7FFF_FFFF] {
            assert!(widen(round(f32::from_bits(bits))).is_nan(), "{bits:x}");
        }
    }

    #[test]
    fn every_bf16_is_kept() {
        for bits in (0..=u16::MAX).filter(|b| !widen(*b).is_nan()) {
            assert_eq!(round(widen(bits)), bits);
        }
    }
}
