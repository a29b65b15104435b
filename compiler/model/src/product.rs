//! Which kernels are matrix products and nothing else, so that a library of products could compute them.

use crate::kernel::{Dtype, Epilogue, Form, Kernel, KernelOp, Products, Sink};
use artifact::product::{self, Elements, Product};

/// What a kernel for a device computes, where a library can say the same without a further buffer: a stored product, one with a bias, one that is
/// added to an accumulator. Biases are f32, which libraries add to sums in f32 only: with bf16 they stay.
pub fn product(kernel: &Kernel) -> Option<Product> {
    let KernelOp::MatMul(matmul) = &kernel.op else { return None };
    let rounds = kernel.dtype == Dtype::Bf16;
    let (rounded, adds, bias) = match matmul.epilogue {
        Epilogue::Store => (rounds, false, false),
        Epilogue::Bias if !rounds => (false, false, true),
        Epilogue::Gradient(Sink::Store) => (false, false, false),
        Epilogue::Gradient(Sink::Add) => (false, true, false),
        _ => return None,
    };
    let form = match matmul.form {
        Form::NN => product::Form::Nn,
        Form::NT => product::Form::Nt,
        Form::TN => product::Form::Tn,
    };
    let elements = match (kernel.dtype, kernel.products) {
        (Dtype::Bf16, _) => Elements::Bf16,
        (Dtype::F32, Products::Tf32) => Elements::Tf32,
        (Dtype::F32, Products::F32) => Elements::F32,
    };
    let (m, n, k) = (matmul.m, matmul.n, matmul.k);
    Some(Product { form, m, n, k, elements, rounded, adds, bias })
}
