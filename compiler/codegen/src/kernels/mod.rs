//! The source of each kernel: linalg on tensors, and the strategy that turns it into vectors and loops.
//!
//! One module per family. A module's `source` writes the text for one kernel; [`crate::pipeline`] compiles it. The rules:
//!
//! - the function takes one memref per operand, in the order of [`model::kernel`], without scratch; [`text::Func`] writes it;
//! - values live in tensors; whatever is written back goes through `materialize_in_destination`;
//! - no fastmath flags, and no operation that lowers to a libm call: [`math`] has our own exp, tanh and log;
//! - the strategy is text in the transform dialect: `@__transform_main` works on tensors, `@lower` after bufferisation.

pub mod attention;
pub mod attention_grad;
pub mod attention_tiles;
pub mod cross_entropy;
pub mod embed;
pub mod layernorm;
pub mod math;
pub mod matmul;
mod matmul_strategy;
pub mod nest;
pub mod part;
pub mod reduce;
pub mod rows;
pub mod sink;
pub mod strategy;
pub mod text;
pub mod turn;
pub mod update;

use model::kernel::{Kernel, KernelOp};
use model::target::CpuClass;

/// The text of one kernel.
pub struct KernelSource {
    /// Module-level text without `module {}`: a `func.func @<kernel.name>`; may use `#map` aliases that are declared before it.
    pub linalg: String,
    /// `transform.named_sequence @__transform_main` (tile, fuse, pad, vectorise on tensors) and `@lower` (after bufferisation). With
    /// `@vectorise` beside them, `@__transform_main` leaves that part to it, and [`crate::forward`] comes between.
    pub strategy: String,
}

/// Writes the source of a kernel.
pub fn source(kernel: &Kernel, cpu: CpuClass) -> KernelSource {
    match &kernel.op {
        KernelOp::Embed { .. } | KernelOp::EmbedGrad { .. } => embed::source(kernel, cpu),
        KernelOp::LayerNorm { .. } | KernelOp::LayerNormGrad { .. } => layernorm::source(kernel, cpu),
        KernelOp::GainGrad { .. } | KernelOp::BiasGrad { .. } => reduce::source(kernel, cpu),
        KernelOp::MatMul(_) => matmul::source(kernel),
        KernelOp::Attention { .. } | KernelOp::AttentionGrad { .. } => attention::source(kernel, cpu),
        KernelOp::CrossEntropy { .. } => cross_entropy::source(kernel, cpu),
        KernelOp::Update { .. } => update::source(kernel, cpu),
        KernelOp::Part(part) => part::source(&kernel.name, *part, cpu),
    }
}
