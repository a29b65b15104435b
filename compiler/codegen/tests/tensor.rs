//! Matrix products on tensor cores, emulated, against f64 with the operands rounded as they are.

use crate::matmul::{EPILOGUES, FORMS, Shape, check, check_sinks_with, cut, matmul};
use crate::optimizers;
use model::kernel::{Dtype, Epilogue, Form, Kernel, KernelOp, Products, Tiles};
use model::kernel_plan::{plan_kernel, plan_kernel_of, plan_kernel_with};
use model::target::{Chip, CpuClass, Target};

const TARGET: Target = Target::Cuda(Chip::Sm80);
const TF32: (Dtype, Products) = (Dtype::F32, Products::Tf32);
const BF16: (Dtype, Products) = (Dtype::Bf16, Products::F32);

fn tf32(shape: Shape, form: Form, epilogue: Epilogue) -> Kernel {
    plan_kernel_with(KernelOp::MatMul(matmul(shape, form, epilogue)), Dtype::F32, Products::Tf32, TARGET)
}

#[test]
fn every_form_and_epilogue_is_right_in_tf32() {
    // No tile divides the first; the second is all wide accesses.
    for shape in [(37, 61, 29), (68, 72, 40)] {
        for (i, epilogue) in EPILOGUES.into_iter().enumerate() {
            check(tf32(shape, FORMS[i % 3], epilogue), TARGET);
            check(tf32(shape, FORMS[(i + 1) % 3], epilogue), TARGET);
        }
    }
}

#[test]
fn small_and_large_shapes_are_right_in_tf32() {
    for form in FORMS {
        for shape in [(1, 1, 1), (1, 70, 9), (70, 1, 9), (130, 66, 100)] {
            check(tf32(shape, form, Epilogue::Store), TARGET);
        }
    }
}

#[test]
fn large_tiles_and_blocks_of_k_are_right_in_tf32() {
    let large = Tiles { mc: 128, nc: 128, kc: 48, mr: 64, nr: 32, kr: 16 };
    for (form, shape) in FORMS.into_iter().zip([(130, 140, 100), (128, 129, 50), (131, 256, 64)]) {
        let kernel = Kernel { tiles: Some(large), ..tf32(shape, form, Epilogue::BiasResidual) };
        check(kernel, TARGET);
        check(cut(tf32(shape, form, Epilogue::Store), 24, TARGET), TARGET);
    }
}

#[test]
fn a_fused_update_has_the_bits_of_its_parts_in_tf32() {
    check_sinks_with(TF32, (37, 61, 41), None, TARGET, &optimizers::rules()[..2]);
    check_sinks_with(TF32, (66, 70, 50), Some(24), TARGET, &[optimizers::ADAMW]);
}

#[test]
fn a_cpu_multiplies_in_f32() {
    let op = KernelOp::MatMul(matmul((8, 8, 8), Form::NN, Epilogue::Store));
    let cpu = plan_kernel_with(op.clone(), Dtype::F32, Products::Tf32, CpuClass::X86V3);
    assert_eq!(cpu, plan_kernel(op, CpuClass::X86V3));
}

fn bf16(shape: Shape, form: Form, epilogue: Epilogue) -> Kernel {
    plan_kernel_of(KernelOp::MatMul(matmul(shape, form, epilogue)), Dtype::Bf16, TARGET)
}

#[test]
fn every_form_and_epilogue_is_right_in_bf16() {
    for shape in [(37, 61, 29), (72, 80, 40)] {
        for (i, epilogue) in EPILOGUES.into_iter().enumerate() {
            check(bf16(shape, FORMS[i % 3], epilogue), TARGET);
            check(bf16(shape, FORMS[(i + 1) % 3], epilogue), TARGET);
        }
    }
}

#[test]
fn small_and_large_shapes_are_right_in_bf16() {
    let large = Tiles { mc: 128, nc: 128, kc: 96, mr: 64, nr: 32, kr: 32 };
    for (form, shape) in FORMS.into_iter().zip([(130, 140, 100), (128, 129, 50), (131, 256, 200)]) {
        for shape in [(1, 1, 1), (1, 70, 9), (70, 1, 9)] {
            check(bf16(shape, form, Epilogue::Store), TARGET);
        }
        check(Kernel { tiles: Some(large), ..bf16(shape, form, Epilogue::BiasResidual) }, TARGET);
        check(cut(bf16(shape, form, Epilogue::Store), 40, TARGET), TARGET);
    }
}

#[test]
fn a_fused_update_has_the_bits_of_its_parts_in_bf16() {
    check_sinks_with(BF16, (37, 61, 41), None, TARGET, &optimizers::rules()[..2]);
    check_sinks_with(BF16, (66, 70, 50), Some(24), TARGET, &[optimizers::ADAMW]);
}
