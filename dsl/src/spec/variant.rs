//! Models and hardware that are analysed and not run.

use crate::diag::Span;

/// How a model differs from the reference GPT, and how one rank's work is shared out among devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variant {
    pub dtype: Dtype,
    /// Heads of keys and values; each serves `heads / kv_heads` heads of queries.
    pub kv_heads: u32,
    pub mlp: Mlp,
    pub norm: Norm,
    pub position: Position,
    /// Biases in the linear layers of the blocks.
    pub bias: bool,
    /// The head multiplies by the token embedding.
    pub tied: bool,
    pub attention: Attention,
    pub dropout: bool,
    pub recompute: Recompute,
    /// Devices that share each layer.
    pub tensor_parallel: u32,
    /// What tensor parallelism leaves whole is cut by tokens.
    pub sequence_parallel: bool,
    /// Copies of the pipeline.
    pub data_parallel: u32,
    /// What the copies share: 0 nothing, 1 the optimizer's states, 2 the gradients too, 3 the weights too.
    pub zero: u32,
}

/// Of activations and of the weights that matrix products read. With `Bf16` the optimizer keeps weights in f32 beside its states, and
/// gradients of weights are f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    F32,
    Bf16,
}

/// What the operands of matrix products in f32 are rounded to before they are multiplied. Sums are f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Products {
    /// Nothing: they are multiplied as they are.
    F32,
    /// Ten bits of fraction, for tensor cores; f32 on devices without.
    Tf32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mlp {
    Gelu {
        hidden: u32,
    },
    /// silu(x G) * (x U), then D: three matrices.
    SwiGlu {
        hidden: u32,
    },
}

impl Mlp {
    pub fn hidden(&self) -> u32 {
        match *self {
            Mlp::Gelu { hidden } | Mlp::SwiGlu { hidden } => hidden,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norm {
    /// Gain and bias.
    Layer,
    /// Gain only.
    Rms,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Position {
    /// A table.
    Learned,
    /// No parameters.
    Rotary,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attention {
    /// The scores are never in memory.
    Flash,
    /// The scores are saved for the backward pass.
    Stored,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recompute {
    None,
    /// The scores of `Attention::Stored` are computed again.
    Attention,
    /// Each block keeps its input only.
    Full,
}

impl Variant {
    /// The reference GPT, on one device a rank.
    pub fn reference(width: u32, heads: u32) -> Variant {
        Variant {
            dtype: Dtype::F32,
            kv_heads: heads,
            mlp: Mlp::Gelu { hidden: width.saturating_mul(4) },
            norm: Norm::Layer,
            position: Position::Learned,
            bias: true,
            tied: false,
            attention: Attention::Flash,
            dropout: false,
            recompute: Recompute::None,
            tensor_parallel: 1,
            sequence_parallel: false,
            data_parallel: 1,
            zero: 0,
        }
    }
}

/// `device = h100 { memory = 80 GiB, flops = 400 TFLOP/s, link = 50 GB/s }`
#[derive(Clone, Debug, PartialEq)]
pub struct Device {
    pub name: String,
    pub memory_bytes: u64,
    /// What is reached, not the peak.
    pub flops_per_s: u64,
    /// From one rank to the next.
    pub link_bytes_per_s: u64,
    /// Of an empty transfer.
    pub latency_ns: u64,
    /// Place of the key and the value.
    pub span: Span,
}
