//! Row-major products as libraries of the BLAS family are asked for them: column-major.
//!
//! A row-major matrix of r rows and c columns without gaps is, column by column, its transpose: c rows, r columns, and c elements from a column to
//! the next. So C = op(A) op(B) becomes C' = op(B)' op(A)': the library's first matrix is our B, its second our A, its rows are our columns. It needs
//! n rows and k columns first: our B as [k, n] is that, and as [n, k] it has to be turned. It needs k rows and m columns then: our A as [m, k] is
//! that, and as [k, m] it has to be turned. What we add to every row is added to every column there: a bias by the rows of C, as the library has it.

use artifact::product::{Form, Product};

/// Elements of a stored matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    F32,
    Bf16,
}

impl Element {
    pub fn bytes(self) -> usize {
        match self {
            Element::F32 => 4,
            Element::Bf16 => 2,
        }
    }
}

/// What operands in f32 may be rounded to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Compute {
    F32,
    Tf32,
}

/// A matrix as it is stored: column after column, `leading` elements from one to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Layout {
    pub element: Element,
    pub rows: u64,
    pub columns: u64,
    pub leading: u64,
}

/// Which of a kernel's operands the library's matrices are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Roles {
    pub a: usize,
    pub b: usize,
    /// f32, one for each row of C; added to the sums.
    pub bias: Option<usize>,
    /// Read where `beta` is 1, and written.
    pub c: usize,
}

/// C = op(A) op(B) + beta C (+ bias), in the library's letters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Descriptor {
    pub compute: Compute,
    /// Whether A and B are turned.
    pub turned: [bool; 2],
    pub a: Layout,
    pub b: Layout,
    pub c: Layout,
    pub beta: f32,
    pub roles: Roles,
}

impl Descriptor {
    pub fn new(product: &Product) -> Descriptor {
        use artifact::product::Elements;
        let [m, n, k] = [product.m, product.n, product.k].map(u64::from);
        let element = if product.elements == Elements::Bf16 { Element::Bf16 } else { Element::F32 };
        let result = if product.rounded { Element::Bf16 } else { Element::F32 };
        // Of row-major [rows, columns].
        let stored = |element, rows, columns| Layout { element, rows: columns, columns: rows, leading: columns };
        let ours_a = if product.form == Form::Tn { stored(element, k, m) } else { stored(element, m, k) };
        let ours_b = if product.form == Form::Nt { stored(element, n, k) } else { stored(element, k, n) };
        Descriptor {
            compute: if product.elements == Elements::Tf32 { Compute::Tf32 } else { Compute::F32 },
            turned: [product.form == Form::Nt, product.form == Form::Tn],
            a: ours_b,
            b: ours_a,
            c: stored(result, m, n),
            beta: if product.adds { 1.0 } else { 0.0 },
            roles: Roles { a: 1, b: 0, bias: product.bias.then_some(2), c: if product.bias { 3 } else { 2 } },
        }
    }
}
