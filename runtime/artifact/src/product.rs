//! Matrix products that a library could compute in a kernel's place: what such a kernel means, and no more.

use serde::{Deserialize, Serialize};

/// Which operands are stored across.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Form {
    /// A is [m, k], B is [k, n].
    Nn,
    /// A is [m, k], B is [n, k].
    Nt,
    /// A is [k, m], B is [k, n].
    Tn,
}

/// Elements of an operand, and what those in f32 are rounded to before they are multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Elements {
    F32,
    /// f32, multiplied with ten bits of fraction.
    Tf32,
    Bf16,
}

impl Elements {
    /// Bytes of one.
    pub fn bytes(self) -> u64 {
        if self == Elements::Bf16 { 2 } else { 4 }
    }
}

/// C = A B, or C += A B, or C = A B + bias in every row; sums are f32. All row-major, without gaps. A kernel's operands: A, B (, bias f32 [n]), C.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Product {
    pub form: Form,
    pub m: u32,
    pub n: u32,
    pub k: u32,
    /// Of A and B.
    pub elements: Elements,
    /// C is bf16, rounded once, instead of f32.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub rounded: bool,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub adds: bool,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub bias: bool,
}

impl Product {
    /// Bytes of each operand, in order; those that no machine has are the largest number.
    pub fn operand_bytes(&self) -> Vec<u64> {
        let bytes =
            |rows: u32, columns: u32, element: u64| (u64::from(rows) * u64::from(columns)).saturating_mul(element);
        let of = self.elements.bytes();
        let mut all = vec![bytes(self.m, self.k, of), bytes(self.k, self.n, of)];
        all.extend(self.bias.then(|| bytes(1, self.n, 4)));
        all.push(bytes(self.m, self.n, if self.rounded { 2 } else { 4 }));
        all
    }
}
