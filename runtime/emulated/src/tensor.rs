//! What tensor cores do: products of small matrices whose elements lie in the registers of a warp's lanes.
//!
//! # Where elements lie
//!
//! | matrix | lane | register |
//! |---|---|---|
//! | A, 16x8 of tf32 | row mod 8 * 4 + k mod 4 | row div 8 + 2 (k div 4) |
//! | B, 8x8 of tf32 | column * 4 + k mod 4 | k div 4 |
//! | A, 16x16 of bf16 | row mod 8 * 4 + k mod 8 div 2 | row div 8 + 2 (k div 8), half k mod 2 |
//! | B, 16x8 of bf16 | column * 4 + k mod 8 div 2 | k div 8, half k mod 2 |
//! | C and D, 16x8 of f32 | row mod 8 * 4 + column div 2 | 2 (row div 8) + column mod 2 |
//!
//! # Rounding
//!
//! Products are exact; they and the element of C are summed in f64, and the sum is rounded once. A GPU sums in an order and
//! with a width that NVIDIA does not document: its results differ from these in the last places of an f32.

/// What a lane gives: A's four registers, B's two, C's four.
pub const WORDS: usize = 10;
pub type Words = [u32; WORDS];

/// Where a register of B, and of C, stands in [`Words`].
const B: usize = 4;
const C: usize = 6;

/// f32 as tf32: rounded to ten bits of fraction, ties away from zero. The bits below are 0.
pub fn tf32(value: f32) -> u32 {
    let bits = value.to_bits();
    if value.is_finite() { bits.wrapping_add(0x1000) & !0x1fff } else { bits }
}

/// f32 as bf16: to nearest, ties to even; every NaN is one.
pub fn bf16(value: f32) -> u16 {
    if value.is_nan() { 0x7fff } else { artifact::bf16::round(value) }
}

/// A lane's four elements of D = A B + C, with A 16x8 and B 8x8 of tf32.
pub fn mma_tf32(lanes: &[Words], lane: usize) -> [u32; 4] {
    // The low bits of a register are not read.
    let value = |word: u32| f64::from(f32::from_bits(word & !0x1fff));
    mma(lanes, lane, 8, |row, column, k| {
        let a = lanes[row % 8 * 4 + k % 4][row / 8 + 2 * (k / 4)];
        let b = lanes[column * 4 + k % 4][B + k / 4];
        value(a) * value(b)
    })
}

/// A lane's four elements of D = A B + C, with A 16x16 and B 16x8 of bf16.
pub fn mma_bf16(lanes: &[Words], lane: usize) -> [u32; 4] {
    let value = |word: u32, k: usize| f64::from(f32::from_bits(if k % 2 == 0 { word << 16 } else { word & !0xffff }));
    mma(lanes, lane, 16, |row, column, k| {
        let a = lanes[row % 8 * 4 + k % 8 / 2][row / 8 + 2 * (k / 8)];
        let b = lanes[column * 4 + k % 8 / 2][B + k / 8];
        value(a, k) * value(b, k)
    })
}

fn mma(lanes: &[Words], lane: usize, steps: usize, product: impl Fn(usize, usize, usize) -> f64) -> [u32; 4] {
    std::array::from_fn(|i| {
        let (row, column) = (lane / 4 + i / 2 * 8, lane % 4 * 2 + i % 2);
        let c = f64::from(f32::from_bits(lanes[lane][C + i]));
        let sum = (0..steps).fold(c, |sum, k| sum + product(row, column, k));
        (sum as f32).to_bits()
    })
}

/// Bytes of a row of the matrices that [`ldmatrix`] loads: eight elements of 16 bits.
pub const ROW_BYTES: usize = 16;

/// A lane's elements of four 8x8 matrices of 16-bit elements, two of each; lane 8 j + r gives row r of matrix j. Where an element
/// lies: row * 4 + column div 2, half column mod 2; with `transposed` row and column change places.
pub fn ldmatrix(lanes: &[Words], lane: usize, transposed: bool) -> [u32; 4] {
    std::array::from_fn(|matrix| {
        let element = |half: usize| {
            let (row, column) = (lane / 4, lane % 4 * 2 + half);
            let (row, column) = if transposed { (column, row) } else { (row, column) };
            lanes[8 * matrix + row][column / 2] >> (16 * (column % 2)) & 0xffff
        };
        element(0) | element(1) << 16
    })
}

#[cfg(test)]
mod tests {
    use super::{bf16, tf32};

    #[test]
    fn bf16_has_one_nan() {
        assert_eq!([f32::NAN, -f32::NAN, f32::INFINITY, 1.0].map(bf16), [0x7fff, 0x7fff, 0x7f80, 0x3f80]);
    }

    #[test]
    fn tf32_rounds_to_nearest_and_ties_away_from_zero() {
        // Ten bits of fraction: neighbours of 1 are 2^-10 apart.
        let place = 2f32.powi(-10);
        for (value, rounded) in [
            (1.0, 1.0),
            (1.0 + 0.49 * place, 1.0),
            (1.0 + 0.5 * place, 1.0 + place),
            (1.0 + 1.5 * place, 1.0 + 2.0 * place),
            (-1.0 - 0.5 * place, -1.0 - place),
            (2.0 - 0.25 * place, 2.0),
            (f32::INFINITY, f32::INFINITY),
        ] {
            assert_eq!(f32::from_bits(tf32(value)), rounded, "{value}");
        }
        assert!(f32::from_bits(tf32(f32::NAN)).is_nan());
    }
}
