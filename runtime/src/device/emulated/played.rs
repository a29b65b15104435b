//! A library of matrix products that emulated devices play: the products that cuBLASLt would be asked for, in the same terms and with orders of
//! summation of its own. Its times are not measured: they follow a rule, so that a tuning on emulated devices is always the same.

use crate::arena::Arena;
use crate::device::library::Library;
use crate::device::library::descriptor::{Compute, Descriptor, Element, Layout};
use artifact::bf16;
use artifact::product::Product;
use artifact::program::Place;
use artifact::tuning::{Algorithm, Identity, Settings};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// How a played library sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// From the last step of k to the first.
    Descending,
    /// Two halves of k, of which the second's sums lie in the workspace.
    Split,
    /// Without the last step of k: a mistake.
    Wrong,
    /// With a bit that changes from one time to the next.
    Unsteady,
    /// Not run, though it is offered.
    Refused,
    /// Not run either, and the device is broken from then on.
    Breaking,
}

impl Method {
    /// Those that run.
    const ALL: [Method; 4] = [Method::Descending, Method::Split, Method::Wrong, Method::Unsteady];

    fn algorithm(self, product: &Product) -> Algorithm {
        let id = self as u32;
        let split = self == Method::Split;
        let workspace_bytes = if split { u64::from(product.m) * u64::from(product.n) * 4 } else { 0 };
        let settings = Settings { id, split_k: 1 + u32::from(split), ..Settings::default() };
        Algorithm { words: [u64::from(id), 0, 0, 0, 0, 0, 0, 0], workspace_bytes, settings }
    }
}

/// See the module's text.
#[derive(Clone, Debug)]
pub struct Played {
    pub identity: Identity,
    /// What it offers, in that order.
    pub methods: Vec<Method>,
    /// Time of a product: by its kernel, or by an algorithm.
    pub rule: fn(&Product, Option<&Algorithm>) -> Duration,
    times_run: Arc<AtomicU64>,
}

impl Default for Played {
    /// One that takes longer to begin than a kernel, and half of its time from there; in two halves again half, but for their sums.
    fn default() -> Self {
        let identity = Identity {
            library: "played cuBLASLt".into(),
            version: 130_000,
            gpu: "emulated device".into(),
            capability: [0, 0],
            multiprocessors: 1,
        };
        let rule = |product: &Product, by: Option<&Algorithm>| {
            let steps = [product.m, product.n, product.k].into_iter().map(u64::from).product::<u64>();
            Duration::from_nanos(match by {
                None => 1_000 + steps / 16,
                Some(split) if split.workspace_bytes > 0 => 8_000 + steps / 64 + split.workspace_bytes / 2,
                Some(_) => 8_000 + steps / 32,
            })
        };
        Played::new(identity, vec![Method::Descending, Method::Split], rule)
    }
}

impl Played {
    pub fn new(identity: Identity, methods: Vec<Method>, rule: fn(&Product, Option<&Algorithm>) -> Duration) -> Self {
        Played { identity, methods, rule, times_run: Arc::default() }
    }

    /// How an algorithm sums.
    pub(super) fn method(&self, algorithm: &Algorithm) -> Result<Method, String> {
        let found = Method::ALL.get(algorithm.words[0] as usize);
        found.copied().ok_or_else(|| "the library does not know the algorithm".into())
    }

    pub(super) fn breaks(&self, algorithm: &Algorithm) -> bool {
        algorithm.words[0] == Method::Breaking as u64
    }

    /// Computes a product over places of an arena.
    pub(super) fn run(
        &self,
        arena: &Arena,
        product: &Product,
        algorithm: &Algorithm,
        args: &[(u64, Place)],
        workspace: u64,
    ) -> Result<(), String> {
        let method = self.method(algorithm)?;
        let descriptor = Descriptor::new(product);
        let read = |operand: usize| {
            let mut bytes = vec![0; args[operand].1.bytes as usize];
            arena.get(args[operand].0, &mut bytes);
            bytes
        };
        let roles = descriptor.roles;
        let (a, b, bias) = (read(roles.a), read(roles.b), roles.bias.map(read));
        let mut c = read(roles.c);
        let mut partial = vec![0; algorithm.workspace_bytes as usize];
        let bit = match method {
            Method::Unsteady => self.times_run.fetch_add(1, Ordering::Relaxed) as u32 & 1,
            _ => 0,
        };
        gemm(&descriptor, method, bit, [&a, &b], bias.as_deref(), &mut c, &mut partial);
        arena.put(args[roles.c].0, &c);
        if !partial.is_empty() {
            arena.put(workspace, &partial);
        }
        Ok(())
    }
}

impl Library for Played {
    fn identity(&self) -> Result<Identity, String> {
        Ok(self.identity.clone())
    }

    fn candidates(&mut self, product: &Product, workspace_bytes: u64, most: usize) -> Result<Vec<Algorithm>, String> {
        let all = self.methods.iter().map(|method| method.algorithm(product));
        Ok(all.filter(|algorithm| algorithm.workspace_bytes <= workspace_bytes).take(most).collect())
    }
}

/// Reads an element of a stored matrix.
fn element(layout: &Layout, bytes: &[u8], row: u64, column: u64) -> f32 {
    assert!(row < layout.rows && column < layout.columns && layout.rows <= layout.leading, "inside the matrix");
    let at = (column * layout.leading + row) as usize * layout.element.bytes();
    match layout.element {
        Element::F32 => f32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes")),
        Element::Bf16 => bf16::widen(u16::from_le_bytes(bytes[at..at + 2].try_into().expect("two bytes"))),
    }
}

/// Rounds to ten bits of fraction, to nearest, away from zero where two are equally near.
fn tf32(x: f32) -> f32 {
    if x.is_finite() { f32::from_bits((x.to_bits() + 0x1000) & !0x1FFF) } else { x }
}

/// C = op(A) op(B) + beta C (+ bias), everything column-major.
fn gemm(
    d: &Descriptor,
    method: Method,
    bit: u32,
    [a, b]: [&[u8]; 2],
    bias: Option<&[u8]>,
    c: &mut [u8],
    partial: &mut [u8],
) {
    let operand = |x: f32| if d.compute == Compute::Tf32 { tf32(x) } else { x };
    let [turned_a, turned_b] = d.turned;
    let k = if turned_a { d.a.rows } else { d.a.columns };
    assert_eq!(k, if turned_b { d.b.columns } else { d.b.rows }, "the operands have the same steps");
    let term = |i: u64, j: u64, p: u64| {
        let x = if turned_a { element(&d.a, a, p, i) } else { element(&d.a, a, i, p) };
        let y = if turned_b { element(&d.b, b, j, p) } else { element(&d.b, b, p, j) };
        operand(x) * operand(y)
    };
    let sum = |i, j, steps: std::ops::Range<u64>| steps.rev().fold(0.0f32, |sum, p| sum + term(i, j, p));
    for j in 0..d.c.columns {
        for i in 0..d.c.rows {
            let mut total = match method {
                Method::Descending | Method::Unsteady => sum(i, j, 0..k),
                Method::Wrong => sum(i, j, 0..k - 1),
                Method::Refused | Method::Breaking => unreachable!("they don't run"),
                Method::Split => {
                    let at = 4 * (j * d.c.rows + i) as usize;
                    partial[at..at + 4].copy_from_slice(&sum(i, j, k / 2..k).to_le_bytes());
                    let second = f32::from_le_bytes(partial[at..at + 4].try_into().expect("four bytes"));
                    sum(i, j, 0..k / 2) + second
                }
            };
            if let Some(bias) = bias {
                let at = 4 * i as usize;
                total += f32::from_le_bytes(bias[at..at + 4].try_into().expect("four bytes"));
            }
            if d.beta != 0.0 {
                total += d.beta * element(&d.c, c, i, j);
            }
            let total = f32::from_bits(total.to_bits() ^ bit);
            let at = (j * d.c.leading + i) as usize * d.c.element.bytes();
            match d.c.element {
                Element::F32 => c[at..at + 4].copy_from_slice(&total.to_le_bytes()),
                Element::Bf16 => c[at..at + 2].copy_from_slice(&bf16::round(total).to_le_bytes()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draw::Draws;
    use artifact::product::{Elements, Form};

    /// Row-major operands of a product in its elements, and what the product must be, by definition, in f64.
    fn row_major(p: &Product) -> (Vec<Vec<u8>>, Vec<f64>) {
        let [m, n, k] = [p.m, p.n, p.k].map(|x| x as usize);
        let rounded = |x: f32| match p.elements {
            Elements::F32 => x,
            Elements::Tf32 => tf32(x),
            Elements::Bf16 => bf16::widen(bf16::round(x)),
        };
        let draw = |name: &str, count: usize| -> Vec<f32> {
            let draws = Draws::new(3, name);
            (0..count as u64).map(|e| (2.0 * draws.uniform(e) - 1.0) as f32).collect()
        };
        let (a, b, bias, c) = (draw("a", m * k), draw("b", k * n), draw("bias", n), draw("c", m * n));
        let at_a = |i: usize, p_: usize| if p.form == Form::Tn { a[p_ * m + i] } else { a[i * k + p_] };
        let at_b = |p_: usize, j: usize| if p.form == Form::Nt { b[j * k + p_] } else { b[p_ * n + j] };
        let mut expected = Vec::new();
        for i in 0..m {
            for j in 0..n {
                let terms = (0..k).map(|s| f64::from(rounded(at_a(i, s))) * f64::from(rounded(at_b(s, j))));
                let before = if p.adds { f64::from(c[i * n + j]) } else { 0.0 };
                expected.push(terms.sum::<f64>() + before + if p.bias { f64::from(bias[j]) } else { 0.0 });
            }
        }
        let full = |x: &[f32]| -> Vec<u8> { x.iter().flat_map(|x| x.to_le_bytes()).collect() };
        let half = |x: &[f32]| -> Vec<u8> { x.iter().flat_map(|&x| bf16::round(x).to_le_bytes()).collect() };
        let stored = |x: &[f32]| if p.elements == Elements::Bf16 { half(x) } else { full(x) };
        let mut operands = vec![stored(&a), stored(&b)];
        operands.extend(p.bias.then(|| full(&bias)));
        operands.push(if p.rounded { half(&c) } else { full(&c) });
        (operands, expected)
    }

    /// Every product of kernels, described column-major and computed so from the same bytes, is the row-major one: on sizes all different and odd, where
    /// a wrong turn, leading dimension or operand would read elsewhere.
    #[test]
    fn column_major_terms_mean_the_row_major_product() {
        let kinds = [
            (Elements::F32, false, false, false),
            (Elements::F32, false, true, false),
            (Elements::F32, false, false, true),
            (Elements::Tf32, false, false, false),
            (Elements::Bf16, true, false, false),
            (Elements::Bf16, false, true, false),
        ];
        for form in [Form::Nn, Form::Nt, Form::Tn] {
            for (elements, rounded, adds, bias) in kinds {
                for (m, n, k) in [(3, 5, 7), (1, 9, 2), (11, 1, 5), (4, 6, 1)] {
                    let product = Product { form, m, n, k, elements, rounded, adds, bias };
                    let (operands, expected) = row_major(&product);
                    let sizes: Vec<u64> = operands.iter().map(|o| o.len() as u64).collect();
                    assert_eq!(sizes, product.operand_bytes(), "{product:?}");
                    let descriptor = Descriptor::new(&product);
                    let roles = descriptor.roles;
                    for method in [Method::Descending, Method::Split] {
                        let mut c = operands[roles.c].clone();
                        let mut partial = vec![0; method.algorithm(&product).workspace_bytes as usize];
                        let bias = roles.bias.map(|b| operands[b].as_slice());
                        let ab = [operands[roles.a].as_slice(), operands[roles.b].as_slice()];
                        gemm(&descriptor, method, 0, ab, bias, &mut c, &mut partial);
                        let found = |e: usize| match rounded {
                            true => bf16::widen(u16::from_le_bytes([c[2 * e], c[2 * e + 1]])),
                            false => f32::from_le_bytes(c[4 * e..4 * e + 4].try_into().unwrap()),
                        };
                        let band = if rounded { 1.0 / 256.0 } else { 2e-6 };
                        for (e, wanted) in expected.iter().enumerate() {
                            let apart = (f64::from(found(e)) - wanted).abs();
                            assert!(
                                apart <= band * wanted.abs().max(1.0),
                                "{product:?} {method:?}: element {e} is {} instead of {wanted}",
                                found(e)
                            );
                        }
                    }
                }
            }
        }
    }
}
