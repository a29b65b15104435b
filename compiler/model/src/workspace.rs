//! Scratch bytes of each kernel, one function per operation: the single truth.
//!
//! Code generation lowers every kernel so that what it needs beside its operands is exactly this many bytes, and fails when it needs more.
//! Whoever changes a kernel's lowering in `compiler/codegen/src/kernels` changes its function here with it: these functions
//! belong to the lowering, they stand here because memory is planned without LLVM.
//!
//! Sizes may depend on the operation and its tiles only, and never on the sink of a weight gradient more than the
//! lowering forces it to. [`scratch_bytes`] rounds up to 64.
//!
//! After a change here `INSTA_UPDATE=always cargo test -p paceline-model builds` rewrites the snapshots of bench-gpt.

use crate::blocking::Blocking;
use crate::kernel::{KernelOp, MatMul, Table, Tiles};
use crate::target::{CpuClass, Target};

/// Scratch of a kernel, a multiple of 64. `tiles` is there for matmuls.
pub fn scratch_bytes(op: &KernelOp, tiles: Option<&Tiles>, target: impl Into<Target>) -> u64 {
    let bytes = match target.into() {
        Target::Cpu(cpu) => cpu_bytes(op, tiles, cpu),
        Target::Cuda(_) | Target::Emulated => device_bytes(op),
    };
    bytes.next_multiple_of(64)
}

/// What one launch of a kernel leaves to the next; everything else is in registers and shared memory.
fn device_bytes(op: &KernelOp) -> u64 {
    match *op {
        // Each row's loss.
        KernelOp::CrossEntropy { rows, .. } => buffers(&[rows.into()]),
        // Each row's sum of do * o, by head.
        KernelOp::AttentionGrad { sequences, context, heads, .. } => {
            buffers(&[[sequences, context, heads].map(u64::from).iter().product()])
        }
        _ => 0,
    }
}

fn cpu_bytes(op: &KernelOp, tiles: Option<&Tiles>, cpu: CpuClass) -> u64 {
    match op {
        KernelOp::MatMul(matmul) => matmul_bytes(matmul, tiles.expect("a matmul has tiles")),
        KernelOp::Embed { .. } => 0,
        KernelOp::EmbedGrad { table: Table::Token, sequences, context, width, vocab, .. } => {
            token_gradient_bytes(u64::from(*sequences) * u64::from(*context), (*width).into(), (*vocab).into())
        }
        KernelOp::EmbedGrad { table: Table::Position, context, width, .. } => {
            column_sum_bytes(u64::from(*context) * u64::from(*width), cpu)
        }
        KernelOp::LayerNorm { .. } => 0,
        KernelOp::LayerNormGrad { .. } => 0,
        KernelOp::GainGrad { width, .. } => column_sum_bytes((*width).into(), cpu),
        KernelOp::BiasGrad { width, .. } => column_sum_bytes((*width).into(), cpu),
        KernelOp::Attention { context, width, heads, .. } => {
            attention_bytes(AttentionTiles::new(*context, *width, *heads, cpu))
        }
        KernelOp::AttentionGrad { context, width, heads, .. } => {
            attention_gradient_bytes(AttentionTiles::new(*context, *width, *heads, cpu))
        }
        KernelOp::CrossEntropy { rows, .. } => buffers(&[(*rows).into()]),
        KernelOp::Update { .. } | KernelOp::Part(_) => 0,
    }
}

/// The packed panels of A and B, for all of k: see [`Blocking`]. The same for every epilogue.
fn matmul_bytes(matmul: &MatMul, tiles: &Tiles) -> u64 {
    Blocking::new(matmul, tiles).packed_bytes(tiles)
}

/// Bytes of buffers of so many f32 or i32, each at a multiple of 64.
fn buffers(lengths: &[u64]) -> u64 {
    lengths.iter().map(|n| (4 * n).next_multiple_of(64)).sum()
}

/// The sums, on their way to the sink; those of one vector stay in a register.
fn column_sum_bytes(width: u64, cpu: CpuClass) -> u64 {
    if width <= u64::from(cpu.lanes()) { 0 } else { buffers(&[width]) }
}

/// The lists of each token's rows (their heads, the links), and one row of the gradient.
fn token_gradient_bytes(rows: u64, width: u64, vocab: u64) -> u64 {
    buffers(&[vocab, rows, width])
}

/// A head's k, q and v; then of a block of queries: scores, logs of sums, inverse sums, outputs.
fn attention_bytes(t: AttentionTiles) -> u64 {
    let packed = t.context * t.head;
    buffers(&[packed, packed, packed, t.context * t.block, t.block, t.block, t.block * t.head])
}

/// A head's q, k, v, do and o across, q, k and do along, dk and dv, and its logs of sums; then of a block of queries: P, dS, D, dq.
fn attention_gradient_bytes(t: AttentionTiles) -> u64 {
    let packed = t.context * t.head;
    let scores = t.context * t.block;
    10 * buffers(&[packed]) + buffers(&[t.context, scores, scores, t.block, t.block * t.head])
}

/// How attention cuts one head's work: blocks of queries against blocks of keys, all padded to whole tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionTiles {
    /// Queries of a block, and keys of a tile: two vectors.
    pub block: u64,
    /// Rows of a register tile.
    pub rows: u64,
    /// Columns of a register tile over the head's elements: one or two vectors.
    pub columns: u64,
    /// The sequence length, padded.
    pub context: u64,
    /// The head size, padded.
    pub head: u64,
}

impl AttentionTiles {
    pub fn new(context: u32, width: u32, heads: u32, cpu: CpuClass) -> Self {
        let lanes = u64::from(cpu.lanes());
        let head = u64::from(width / heads);
        let columns = if head <= lanes { lanes } else { 2 * lanes };
        let rows = match cpu {
            CpuClass::X86V3 => 4,
            CpuClass::X86V4 => 8,
        };
        Self {
            block: 2 * lanes,
            rows,
            columns,
            context: u64::from(context).next_multiple_of(2 * lanes),
            head: head.next_multiple_of(columns),
        }
    }
}
