//! The device functions of each kernel, one module per family.

mod attention;
mod cross_entropy;
mod embed;
mod layernorm;
mod matmul;
mod matmul_stage;
mod matmul_sums;
mod matmul_tensor;
mod matmul_tiles;
mod part;
mod reduce;
mod sink;
mod update;

use super::DeviceKernel;
use super::code::{Buffer, Operands};
use model::kernel::{Kernel, KernelOp};

/// Writes a kernel, or says what its shapes lack.
pub fn write(kernel: &Kernel) -> Result<DeviceKernel, String> {
    Ok(match &kernel.op {
        KernelOp::Embed { .. } | KernelOp::EmbedGrad { .. } => embed::write(kernel),
        KernelOp::LayerNorm { .. } | KernelOp::LayerNormGrad { .. } => layernorm::write(kernel),
        KernelOp::GainGrad { .. } | KernelOp::BiasGrad { .. } => reduce::write(kernel),
        KernelOp::MatMul(_) => matmul::write(kernel),
        KernelOp::Attention { .. } | KernelOp::AttentionGrad { .. } => attention::write(kernel)?,
        KernelOp::CrossEntropy { .. } => cross_entropy::write(kernel),
        KernelOp::Update { .. } => update::write(kernel),
        KernelOp::Part(part) => part::write(kernel, *part),
    })
}

/// Threads of a block that works along `width` elements of a row.
fn row_threads(width: u64) -> u32 {
    if width <= 512 { 128 } else { 256 }
}

/// The kernel's scratch as f32, its last operand.
fn scratch(operands: &mut Operands, kernel: &Kernel) -> Buffer {
    operands.f32("scratch", &[kernel.scratch_bytes / 4])
}
