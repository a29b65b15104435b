//! Kernels of bf16, called with f32 data, and compared with their f32 forms.

use crate::harness::{Data, Runnable, random};
use artifact::bf16;
use model::graph::Elem;
use model::kernel::{Dtype, KernelOp, Table};
use model::kernel_plan::{plan_kernel, plan_kernel_of};
use model::operands::{Access, Operand, operands, operands_of};
use model::target::Target;

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

/// Values for an operand as the f32 form takes it; ids are below `ids`. Signs vary where both forms have activations; nothing else is negative, which may
/// stand under a root.
fn content(operand: &Operand, seed: u64, ids: u32) -> Data {
    let len = (operand.bytes / operand.elem.bytes()) as usize;
    let values = random(seed, len);
    match (operand.elem, operand.access) {
        (Elem::U32, _) => Data::U32(values.iter().map(|x| ((x + 1.0) / 2.0 * ids as f32) as u32 % ids).collect()),
        (Elem::F64, _) => Data::F64(vec![f64::NAN; len]),
        (_, Access::Write) => Data::unset(len),
        (Elem::Bf16, _) => Data::F32(representable(Dtype::Bf16, values)),
        (Elem::F32, _) => Data::F32(values.iter().map(|x| 0.5 + x / 2.0 + 1e-3).collect()),
    }
}

/// How many ids the operation's rows may have.
fn ids(op: &KernelOp) -> u32 {
    match *op {
        KernelOp::Embed { vocab, .. }
        | KernelOp::EmbedGrad { table: Table::Token, vocab, .. }
        | KernelOp::CrossEntropy { vocab, .. } => vocab,
        _ => 1,
    }
}

/// Runs the bf16 form and the f32 form on the same numbers: each operand of the first afterwards, as it returns them, is that of the second,
/// rounded once where it is bf16, bit for bit.
pub fn compare(op: &KernelOp, target: impl Into<Target>) -> Vec<Data> {
    let target = target.into();
    let (narrow, wide) = (operands_of(op, Dtype::Bf16), operands(op));
    // An update in bf16 also writes a copy of its weight, which comes after the states.
    let copy = (narrow.len() > wide.len()).then(|| {
        let at = narrow.iter().rposition(|o| o.elem == Elem::Bf16 && o.access == Access::Write);
        at.expect("a copy")
    });
    let data: Vec<Data> = narrow.iter().enumerate().map(|(i, o)| content(o, i as u64 + 1, ids(op))).collect();
    let found = call(&Runnable::of(plan_kernel_of(op.clone(), Dtype::Bf16, target), target), &data);
    let given: Vec<_> = (0..data.len()).filter(|i| Some(*i) != copy).map(|i| data[i].clone()).collect();
    let mut expected = Runnable::of(plan_kernel(op.clone(), target), target).call(&given);
    if let Some(copy) = copy {
        let weight = wide.iter().position(|o| o.access != Access::Read).expect("an update writes its weight");
        expected.insert(copy, expected[weight].clone());
    }
    for (i, ((found, f32), operand)) in found.iter().zip(&expected).zip(&narrow).enumerate() {
        let expected = match (operand.elem, f32) {
            (Elem::Bf16, Data::F32(values)) => Data::F32(representable(Dtype::Bf16, values.clone())),
            _ => f32.clone(),
        };
        assert!(*found == expected, "operand {i} of {op:?} on {}: {found:?} instead of {expected:?}", target.name());
    }
    found
}
