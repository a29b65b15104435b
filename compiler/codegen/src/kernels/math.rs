//! exp, log and GELU as our own polynomials, so that no target calls a library and every target computes the same bits.
//!
//! The text stands in the region of a `linalg.generic`. Every operation is elementwise, so that a region vectorises as it is. NaN
//! goes in, NaN comes out.

use std::fmt::Write;

/// Elementwise operations in the making, each a line that defines one value.
pub struct Region {
    text: String,
    prefix: String,
    next: u32,
}

impl Region {
    /// Operations on f32, for the region of a `linalg.generic`. Values are named `%<prefix>0` and on.
    pub fn new(prefix: &str) -> Self {
        Self { text: String::new(), prefix: prefix.into(), next: 0 }
    }

    /// The lines so far.
    pub fn finish(self) -> String {
        self.text
    }

    /// A name that nothing has yet.
    pub fn fresh(&mut self) -> String {
        let name = format!("%{}{}", self.prefix, self.next);
        self.next += 1;
        name
    }

    /// A line of text that defines no value.
    pub fn line(&mut self, text: &str) {
        writeln!(self.text, "{text}").expect("writing to a String");
    }

    /// A value defined by `text`.
    pub fn op(&mut self, text: &str) -> String {
        let name = self.fresh();
        writeln!(self.text, "{name} = {text}").expect("writing to a String");
        name
    }

    pub fn constant(&mut self, value: f32) -> String {
        self.op(&format!("arith.constant {} : f32", float(value)))
    }

    fn integer(&mut self, value: i32) -> String {
        self.op(&format!("arith.constant {value} : i32"))
    }

    /// `name` is an operation of two f32 and one f32 result, such as `arith.mulf`.
    pub fn binary(&mut self, name: &str, a: &str, b: &str) -> String {
        self.op(&format!("{name} {a}, {b} : f32"))
    }

    pub fn add(&mut self, a: &str, b: &str) -> String {
        self.binary("arith.addf", a, b)
    }

    pub fn sub(&mut self, a: &str, b: &str) -> String {
        self.binary("arith.subf", a, b)
    }

    pub fn mul(&mut self, a: &str, b: &str) -> String {
        self.binary("arith.mulf", a, b)
    }

    pub fn div(&mut self, a: &str, b: &str) -> String {
        self.binary("arith.divf", a, b)
    }

    /// a*b + c with one rounding.
    pub fn fma(&mut self, a: &str, b: &str, c: &str) -> String {
        self.op(&format!("math.fma {a}, {b}, {c} : f32"))
    }

    /// `then` where `a <predicate> b` holds, else `otherwise`; the predicate is an ordered one of `arith.cmpf`.
    pub fn select(&mut self, predicate: &str, a: &str, b: &str, then: &str, otherwise: &str) -> String {
        let holds = self.op(&format!("arith.cmpf {predicate}, {a}, {b} : f32"));
        self.op(&format!("arith.select {holds}, {then}, {otherwise} : f32"))
    }

    fn integer_op(&mut self, name: &str, a: &str, b: &str) -> String {
        self.op(&format!("{name} {a}, {b} : i32"))
    }

    fn bits_of(&mut self, a: &str) -> String {
        self.op(&format!("arith.bitcast {a} : f32 to i32"))
    }

    fn float_of(&mut self, bits: &str) -> String {
        self.op(&format!("arith.bitcast {bits} : i32 to f32"))
    }

    fn horner(&mut self, x: &str, coefficients: &[f32]) -> String {
        let mut descending = coefficients.iter().rev();
        let mut sum = self.constant(*descending.next().expect("a polynomial has a coefficient"));
        for c in descending {
            let c = self.constant(*c);
            sum = self.fma(&sum, x, &c);
        }
        sum
    }
}

/// An f32 as MLIR reads it: the shortest decimals that give the same f32, or its bits where it is not finite.
pub fn float(value: f32) -> String {
    if !value.is_finite() {
        return format!("{:#010X}", value.to_bits()).replacen("0X", "0x", 1);
    }
    let text = format!("{value:e}");
    let (digits, exponent) = text.split_once('e').expect("the form of {:e}");
    let point = if digits.contains('.') { "" } else { ".0" };
    format!("{digits}{point}e{exponent}")
}

/// ln 2 in two parts; the first has 14 bits after the point, so that products with exponents are exact.
const LN2_HIGH: f32 = 0.693_115_23;
const LN2_LOW: f32 = 3.194_618_3e-5;
/// Adding it rounds to an integer, which is then in the low bits: 1.5 * 2^23.
const ROUND: f32 = 12_582_912.0;
/// (e^r - 1 - r) / r^2 for |r| <= ln 2 / 2, relative to e^r within 5e-11.
const EXP: [f32; 6] = [0.5, 0.166_666_67, 0.041_666_27, 0.008_333_268, 0.001_394_616_3, 1.991_661_7e-4];
/// (log(1+f) - f + f^2/2) / f^3 for 1+f in [sqrt(1/2), sqrt(2)], relative to log(1+f) within 6e-9.
const LOG: [f32; 8] =
    [0.333_333_3, -0.250_008_23, 0.200_012_27, -0.166_233_55, 0.142_017_68, -0.131_602_1, 0.127_615_15, -0.076_343_44];

/// e^x to 2 units in the last place for x in [-87.33, 88.37]; 0 below (-inf too), +inf above.
pub fn exp(r: &mut Region, x: &str) -> String {
    let (log2e, round) = (r.constant(std::f32::consts::LOG2_E), r.constant(ROUND));
    let (high, low) = (r.constant(-LN2_HIGH), r.constant(-LN2_LOW));
    let (max, min) = (r.constant(89.0), r.constant(-87.336_54));
    let (zero, one) = (r.constant(0.0), r.constant(1.0));
    let clamped = r.select("ogt", x, &max, &max, x);
    // x = k ln 2 + rest
    let shifted = r.fma(&clamped, &log2e, &round);
    let k = r.sub(&shifted, &round);
    let rest = r.fma(&k, &high, &clamped);
    let rest = r.fma(&k, &low, &rest);
    let p = r.horner(&rest, &EXP);
    let square = r.mul(&rest, &rest);
    let tail = r.fma(&square, &p, &rest);
    let e_rest = r.add(&tail, &one);
    // 2^k, from the low bits of `shifted`
    let (places, bias) = (r.integer(23), r.integer(0x3f80_0000));
    let bits = r.bits_of(&shifted);
    let bits = r.integer_op("arith.shli", &bits, &places);
    let bits = r.integer_op("arith.addi", &bits, &bias);
    let power = r.float_of(&bits);
    let y = r.mul(&e_rest, &power);
    r.select("olt", x, &min, &zero, &y)
}

/// log x for positive normal x, within 1e-7 of the result (absolute where the result is below 1).
pub fn log(r: &mut Region, x: &str) -> String {
    let (root_half, mantissa, places) = (r.integer(0x3f35_04f3), r.integer(0x007f_ffff), r.integer(23));
    let (high, low) = (r.constant(LN2_HIGH), r.constant(LN2_LOW));
    let (one, minus_half) = (r.constant(1.0), r.constant(-0.5));
    // x = 2^e (1 + f)
    let bits = r.bits_of(x);
    let above = r.integer_op("arith.subi", &bits, &root_half);
    let exponent = r.integer_op("arith.shrsi", &above, &places);
    let e = r.op(&format!("arith.sitofp {exponent} : i32 to f32"));
    let m = r.integer_op("arith.andi", &above, &mantissa);
    let m = r.integer_op("arith.addi", &m, &root_half);
    let m = r.float_of(&m);
    let f = r.sub(&m, &one);
    let p = r.horner(&f, &LOG);
    let square = r.mul(&f, &f);
    let cube = r.mul(&square, &f);
    let tail = r.mul(&cube, &p);
    let tail = r.fma(&e, &low, &tail);
    let tail = r.fma(&minus_half, &square, &tail);
    let log_m = r.add(&f, &tail);
    r.fma(&e, &high, &log_m)
}

/// sqrt(2/pi) and the cubic term of GELU's tanh form.
const GELU_SCALE: f32 = 0.797_884_6;
const GELU_CUBIC: f32 = 0.044_715;

/// GELU in the tanh form, x/2 (1 + tanh u) with u = sqrt(2/pi) (x + 0.044715 x^3), computed as x / (1 + exp(-2u)): equal, and
/// without the cancellation at negative x.
pub fn gelu(r: &mut Region, x: &str) -> String {
    let (_, denominator) = gelu_parts(r, x);
    r.div(x, &denominator)
}

/// The derivative of [`gelu`]: with s = 1 / (1 + exp(-2u)), s + x s (1 - s) 2 u'. 1 - s is taken as exp(-2u) s, which cancels nothing.
pub fn gelu_grad(r: &mut Region, x: &str) -> String {
    let (e, denominator) = gelu_parts(r, x);
    let one = r.constant(1.0);
    let s = r.div(&one, &denominator);
    let (slope, cubic) = (r.constant(2.0 * GELU_SCALE), r.constant(6.0 * GELU_SCALE * GELU_CUBIC));
    let square = r.mul(x, x);
    let twice_slope = r.fma(&square, &cubic, &slope);
    let rest = r.mul(&e, &s);
    let product = r.mul(&s, &rest);
    let moved = r.mul(x, &twice_slope);
    r.fma(&moved, &product, &s)
}

/// exp(-2u) and 1 + exp(-2u), finite: far to the left GELU is -0 and not NaN.
fn gelu_parts(r: &mut Region, x: &str) -> (String, String) {
    let (linear, cubic) = (r.constant(-2.0 * GELU_SCALE), r.constant(-2.0 * GELU_SCALE * GELU_CUBIC));
    let (one, max) = (r.constant(1.0), r.constant(88.0));
    let square = r.mul(x, x);
    let factor = r.fma(&square, &cubic, &linear);
    let exponent = r.mul(x, &factor);
    let exponent = r.select("ogt", &exponent, &max, &max, &exponent);
    let e = exp(r, &exponent);
    let denominator = r.add(&e, &one);
    (e, denominator)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_written_with_a_point() {
        assert_eq!(float(1.0), "1.0e0");
        assert_eq!(float(-3.194_618_3e-5), "-3.1946183e-5");
        assert_eq!(float(0.0), "0.0e0");
        assert_eq!(float(f32::NEG_INFINITY), "0xFF800000");
    }

    #[test]
    fn the_parts_of_ln_2_sum_to_it() {
        assert!((f64::from(LN2_HIGH) + f64::from(LN2_LOW) - std::f64::consts::LN_2).abs() < 2e-12);
        assert_eq!(LN2_HIGH * 16384.0, (LN2_HIGH * 16384.0).trunc());
    }
}
