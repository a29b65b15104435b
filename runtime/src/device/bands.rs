//! How far a device's results may be from the emulator's, and its losses from the CPU's.
//!
//! | | apart at most | because |
//! |---|---|---|
//! | numbers of a kernel | 1e-5 of the operand's largest | the operations are the emulator's: none is contracted or approximated |
//! | of one with tensor cores | 1e-4 of the largest | they add the products of a step in an order, and cut sums at a width, that are not documented; operands rounded in another way (5e-4 in tf32, 4e-3 in bf16) would show |
//! | each number that is stored as bf16 | one step between neighbours more | what is 1e-5 apart before it is rounded may be rounded to two neighbours |
//! | losses in f32 | 1e-3, relative | rows are summed in an order of the device's own |
//! | losses in tf32 | 3e-3 | the CPU's are of products in f32; the emulator's are 1.5e-4 away in a small training |
//! | losses in bf16 | 3e-3 | activations may be a step apart; the emulator's losses are 2.5e-4 away |

use artifact::bf16;
use artifact::program::{Elem, KernelEntry, Manifest};

/// Of the largest number of an operand.
const APART_MAX: f64 = 1e-5;
const TENSOR_CORES_APART_MAX: f64 = 1e-4;
/// Of a loss.
const LOSS_APART_MAX: f64 = 1e-3;
const ROUNDED_LOSS_APART_MAX: f64 = 3e-3;
/// Bits of a bf16's fraction.
const BF16_FRACTION_BITS: i32 = 7;

/// What a kernel's numbers may be apart, of the largest.
pub fn of_kernel(kernel: &KernelEntry) -> f64 {
    if kernel.tensor_cores { TENSOR_CORES_APART_MAX } else { APART_MAX }
}

/// What the losses of a training may be apart, relative.
pub fn of_losses(manifest: &Manifest) -> f64 {
    let rounded = manifest.kernels.iter().any(|kernel| kernel.tensor_cores);
    if rounded { ROUNDED_LOSS_APART_MAX } else { LOSS_APART_MAX }
}

/// How far two contents of an operand are apart: the largest difference by the largest number; of a bf16's, what is more than a step
/// between neighbours. Infinite where the sizes differ or a number is none.
pub fn distance(found: &[u8], expected: &[u8], elem: Elem) -> f64 {
    if found == expected {
        return 0.0;
    }
    if found.len() != expected.len() {
        return f64::INFINITY;
    }
    let (found, expected) = (numbers(found, elem), numbers(expected, elem));
    let largest = expected.iter().filter(|x| x.is_finite()).fold(0.0f64, |most, x| most.max(x.abs()));
    let apart = |(f, e): (&f64, &f64)| match (f - e).abs() {
        _ if f == e => 0.0,
        d if d.is_nan() => f64::INFINITY,
        d if elem == Elem::Bf16 => (d - step(f.abs().max(e.abs()))).max(0.0),
        d => d,
    };
    let most = found.iter().zip(&expected).map(apart).fold(0.0, f64::max);
    if most == 0.0 || most.is_infinite() { most } else { most / largest }
}

fn numbers(bytes: &[u8], elem: Elem) -> Vec<f64> {
    match elem {
        Elem::F32 => bytes.as_chunks().0.iter().map(|&b| f64::from(f32::from_le_bytes(b))).collect(),
        Elem::Bf16 => bytes.as_chunks().0.iter().map(|&b| f64::from(bf16::widen(u16::from_le_bytes(b)))).collect(),
        Elem::U32 => bytes.as_chunks().0.iter().map(|&b| f64::from(u32::from_le_bytes(b))).collect(),
        Elem::F64 => bytes.as_chunks().0.iter().map(|&b| f64::from_le_bytes(b)).collect(),
    }
}

/// Between neighbours in bf16 at a number, positive and finite.
fn step(x: f64) -> f64 {
    let exponent = (x as f32).to_bits() >> 23;
    libm::exp2(f64::from(exponent.max(1) as i32 - 127 - BF16_FRACTION_BITS))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn floats(numbers: &[f32]) -> Vec<u8> {
        numbers.iter().flat_map(|x| x.to_le_bytes()).collect()
    }

    fn halves(numbers: &[f32]) -> Vec<u8> {
        numbers.iter().flat_map(|&x| bf16::round(x).to_le_bytes()).collect()
    }

    #[test]
    fn distances_are_relative_to_the_largest_number() {
        let apart = |found: &[f32], expected: &[f32]| distance(&floats(found), &floats(expected), Elem::F32);
        let expected = [1.0, -4.0, 0.0];
        assert_eq!(apart(&expected, &expected), 0.0);
        assert_eq!(apart(&[1.0, -4.0, 0.5], &expected), 0.125);
        assert_eq!(apart(&[1.0, f32::NAN, 0.0], &expected), f64::INFINITY);
        assert_eq!(apart(&[1.0], &expected), f64::INFINITY);
        let infinite = [f32::INFINITY, 2.0, 1.0];
        assert_eq!(apart(&[f32::INFINITY, 2.0, 2.0], &infinite), 0.5);
        assert_eq!(apart(&[1.0, 2.0, 1.0], &infinite), f64::INFINITY);
        assert_eq!(distance(&3.0f64.to_le_bytes(), &2.0f64.to_le_bytes(), Elem::F64), 0.5);
        assert_eq!(distance(&3u32.to_le_bytes(), &2u32.to_le_bytes(), Elem::U32), 0.5);
    }

    #[test]
    fn neighbours_in_bf16_are_not_apart() {
        let apart = |found: &[f32], expected: &[f32]| distance(&halves(found), &halves(expected), Elem::Bf16);
        let place = 2f32.powi(-7);
        // On both sides of a power of two, where steps change.
        for (one, neighbour) in [(1.0, 1.0 + place), (1.0, 1.0 - place / 2.0), (-1.0, -1.0 - place), (3e-39, 3.1e-39)] {
            assert_ne!(halves(&[one]), halves(&[neighbour]));
            assert_eq!((apart(&[one], &[neighbour]), apart(&[neighbour], &[one])), (0.0, 0.0), "{one}");
        }
        assert_eq!(apart(&[1.0 + 3.0 * place, 4.0], &[1.0, 4.0]), f64::from(place) / 2.0);
        // A step of the largest number is far for a small one.
        assert!(apart(&[0.01, 4.0], &[0.02, 4.0]) > 2e-3);
        assert_eq!(apart(&[f32::NAN, 1.0], &[1.0, 1.0]), f64::INFINITY);
        assert_eq!(apart(&[f32::INFINITY], &[1.0]), f64::INFINITY);
    }

    #[test]
    fn tensor_cores_have_a_wider_band() {
        let kernel = |tensor_cores| KernelEntry { tensor_cores, ..KernelEntry::default() };
        assert!(of_kernel(&kernel(true)) > of_kernel(&kernel(false)));
    }
}
