//! Kernels of bf16, called with f32 data.

use crate::harness::{Data, Runnable};
use artifact::bf16;
use model::graph::Elem;
use model::kernel::Dtype;

/// Values that the element type has.
pub fn representable(dtype: Dtype, values: Vec<f32>) -> Vec<f32> {
    match dtype {
        Dtype::F32 => values,
        Dtype::Bf16 => values.into_iter().map(|x| bf16::widen(bf16::round(x))).collect(),
    }
}

/// Calls the kernel with what it takes in bf16 rounded, and gives all operands afterwards, those of bf16 widened.
pub fn call(kernel: &Runnable, data: &[Data]) -> Vec<Data> {
    let elems: Vec<_> = kernel.kernel.operands().iter().map(|o| o.elem).collect();
    assert_eq!(elems.len(), data.len(), "operands of {}", kernel.kernel.name);
    let narrow = |(data, elem): (&Data, &Elem)| match (data, elem) {
        (Data::F32(values), Elem::Bf16) => Data::Bf16(values.iter().map(|x| bf16::round(*x)).collect()),
        _ => data.clone(),
    };
    let widen = |data| match data {
        Data::Bf16(bits) => Data::F32(bits.into_iter().map(bf16::widen).collect()),
        data => data,
    };
    kernel.call(&data.iter().zip(&elems).map(narrow).collect::<Vec<_>>()).into_iter().map(widen).collect()
}
