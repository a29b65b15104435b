//! The unfused optimizer update: elementwise, four neighbours a thread where the length allows.

use super::sink::UpdateBuffers;
use crate::cuda::DeviceKernel;
use crate::cuda::code::{Operands, WIDE};
use model::kernel::{Dtype, Kernel, KernelOp};

const THREADS: u32 = 256;

pub fn write(kernel: &Kernel) -> DeviceKernel {
    let KernelOp::Update { len, rule } = kernel.op else { unreachable!("dispatched on the operation") };
    let group = if len.is_multiple_of(WIDE as u64) { WIDE } else { 1 };
    let mut operands = Operands::of(kernel);
    let gradient = operands.f32("g", &[len]);
    let update = UpdateBuffers::unfused(&mut operands, rule, &[len], kernel.dtype == Dtype::Bf16);
    let mut device = DeviceKernel::new(kernel);
    let blocks = len.div_ceil(u64::from(THREADS) * group as u64);
    device.launch([blocks, 1, 1], THREADS, &operands, |code| {
        update.load_hyper(code);
        let at = code.global_thread(THREADS);
        let at = code.times(&at, group as u64);
        let exists = code.below_const(&at, len);
        code.when(&exists, |code| {
            let gradients = code.load_group(&gradient, &[&at], group);
            update.apply(code, &[&at], &gradients);
        });
    });
    device
}
