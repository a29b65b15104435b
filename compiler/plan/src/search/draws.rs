//! Numbers that look random and are the same each time.

/// A source of them, from a seed.
pub struct Draws(pub u64);

impl Draws {
    /// From 0 to below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((u128::from(z ^ (z >> 31)) * n as u128) >> 64) as usize
    }

    /// Whether an event of so many in 2^20 happens; and how rare a draw is: 0 for every second, 20 at most, in binary digits.
    pub fn rarity(&mut self) -> f64 {
        20.0 - f64::from(u64::BITS - 1 - (self.below(1 << 20) as u64 + 1).leading_zeros())
    }
}
