//! Kernels: the unit of code generation. A kernel is decided here completely: operation, shapes, tiles, scratch bytes.
//! Code generation writes the linalg for it and must use exactly the scratch that is planned here.
//!
//! # Conventions
//!
//! All tensors are row-major. Each has f32 elements unless said otherwise, or unless it is of the kernel's element type,
//! [`Kernel::dtype`]: activations and their gradients (x, y, dy, dx, qkv, o, do, dqkv, logits, residuals) and A, B, pre, r and c of a product that is
//! no weight gradient, A and B of one that is. Parameters, mean, rstd, lse, gradients of parameters and all that an update
//! reads or writes are f32 in any case, but for the copy: an update of a weight that products read as bf16 (the sink of a product,
//! or [`KernelOp::Update`], of such a kernel) writes the new weight a second time, in bf16, after the states: out copy. Kernels compute in f32
//! and round once, to nearest even, where they store bf16.
//!
//! `rows` = tokens of a micro-batch (sequences x context). Operand order
//! is the order of the list beside each operation, inputs first, then what is updated in place (`inout`), then outputs;
//! scratch (bytes, 64-aligned) comes last when `scratch_bytes > 0`. Operands never overlap unless said.

/// See the module's conventions for operand order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum KernelOp {
    /// tokens u32[rows], tok [vocab, width], pos [context, width] -> x [rows, width]; rows = sequences*context.
    Embed { sequences: u32, context: u32, width: u32, vocab: u32 },
    /// Gradient of one embedding table. `Token`: tokens u32[rows], dx [rows, width]; `Position`: dx only (`vocab` is 0). Then the sink's operands.
    /// The gradient's row r is the sum over the rows that used it, ascending, from zero.
    EmbedGrad { table: Table, sequences: u32, context: u32, width: u32, vocab: u32, sink: Sink },
    /// x [rows, width], gain [width], bias [width] -> y [rows, width], mean [rows], rstd [rows]. eps 1e-5.
    LayerNorm { rows: u32, width: u32 },
    /// dy, x [rows, width], mean, rstd [rows], gain [width] (, residual [rows, width] when `residual`) -> dx [rows, width],
    /// dx = LayerNorm'(dy) (+ residual).
    LayerNormGrad { rows: u32, width: u32, residual: bool },
    /// dy, x [rows, width], mean, rstd [rows], then the gain's sink: d gain [j] = sum over rows of dy * (x - mean) * rstd, ascending.
    GainGrad { rows: u32, width: u32, sink: Sink },
    /// dy [rows, width], then the sink: column sums over rows, ascending.
    BiasGrad { rows: u32, width: u32, sink: Sink },
    /// See [`MatMul`].
    MatMul(MatMul),
    /// qkv [rows, 3*width] (q, k, v each [rows, heads, width/heads]) -> o [rows, width], lse [sequences, heads, context]
    /// (log of the sum of exp of scaled scores). Causal; scale 1/sqrt(width/heads).
    Attention { sequences: u32, context: u32, width: u32, heads: u32 },
    /// qkv [rows, 3*width], o [rows, width], lse, do [rows, width] -> dqkv [rows, 3*width].
    AttentionGrad { sequences: u32, context: u32, width: u32, heads: u32 },
    /// targets u32[rows], scale f32[1] is a constant of the kernel (`scale_bits`), logits inout [rows, vocab] -> loss f64[1].
    /// loss = sum over rows of -log softmax(logits)[target] (f64 sum, ascending); logits become (softmax - onehot) * scale.
    CrossEntropy { rows: u32, vocab: u32, scale_bits: u32 },
    /// Unfused update: g [len], then inout w (or w, out next) (, out predicted), states… (, out copy), then hyper f32[16] (read) last. See
    /// [`Sink::Update`].
    Update { len: u64, rule: UpdateRule },
    /// See [`UpdatePart`].
    Part(UpdatePart),
}

pub use crate::part::{Factor, Side, UpdatePart};
pub use dsl::spec::{Dtype, Products};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Table {
    Token,
    Position,
}

/// C = A B of the given form, then the epilogue. A is [m,k] (N) or [k,m] (T); B is [k,n] (N) or [n,k] (T).
/// Operands: A, B, then the epilogue's.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct MatMul {
    pub m: u32,
    pub n: u32,
    pub k: u32,
    pub form: Form,
    pub epilogue: Epilogue,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Form {
    NN,
    NT,
    TN,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Epilogue {
    /// -> c [m,n]
    Store,
    /// bias [n] -> c
    Bias,
    /// bias [n], r [m,n] -> c = AB + bias + r
    BiasResidual,
    /// bias [n] -> pre [m,n] = AB + bias, c = gelu(pre)
    BiasGelu,
    /// pre [m,n] -> c = AB * gelu'(pre)
    GeluGrad,
    /// r [m,n] -> c = product AB + other r; the factors are f32.
    Blend { product_bits: u32, other_bits: u32 },
    /// hyper, inout c [m,n] = h9 c + h10 AB
    Average,
    /// A weight gradient (form TN): the sink's operands.
    Gradient(Sink),
}

/// Where a parameter's gradient g goes. Sums in g run from zero per K block (see [`Tiles::kc`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Sink {
    /// -> acc = 0 + g (first of its update)
    Store,
    /// inout acc += g, K block by K block, ascending
    Add,
    /// As `Store`, or as `Add`, but of g + h12 g² (w - seen), g whole: operands hyper f32[16], w, seen, then acc (written, or updated).
    Compensated { add: bool },
    /// Fused update with (acc + g) when `accumulated`, else g: operands: (acc,) hyper f32[16], inout w, states… (, out copy). Where the rule
    /// writes [`Writes::Next`]: w (read), out next in the place of inout w, with the same bits.
    /// Where the rule predicts: out predicted after the weights. Where it compensates: g is as in `Compensated`, w is followed by seen, which
    /// may be where next is: each element is read before it is written. Formulas, states and hyper-parameters: [`artifact::optimizer`].
    Update { rule: UpdateRule, accumulated: bool },
}

pub use artifact::optimizer::{CorrectionKind, OptimizerKind, UpdateRule, Writes};

/// Cache and register tiles of a matmul.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tiles {
    pub mc: u32,
    pub nc: u32,
    pub kc: u32,
    pub mr: u32,
    pub nr: u32,
    pub kr: u32,
}

/// A kernel, decided. Two kernels with equal `op`, `dtype` and `products` on one target are the same kernel.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Kernel {
    /// Exported symbol, made from the operation and its shapes, e.g. `matmul_nn_512x768x256_bias`.
    pub name: String,
    pub op: KernelOp,
    /// See the module's conventions.
    pub dtype: Dtype,
    /// What operands in f32 of a product are rounded to; tf32 only on a GPU.
    pub products: Products,
    /// Matmuls only.
    pub tiles: Option<Tiles>,
    /// Multiple of 64.
    pub scratch_bytes: u64,
}

impl Kernel {
    /// Whether its products are those of tensor cores, where it is for a GPU.
    pub fn on_tensor_cores(&self) -> bool {
        matches!(self.op, KernelOp::MatMul(_)) && (self.dtype == Dtype::Bf16 || self.products == Products::Tf32)
    }
}
