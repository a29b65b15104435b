//! Scratch bytes of each kernel, one function per operation: the single truth.
//!
//! Code generation lowers every kernel so that what it needs beside its operands is exactly this many bytes, and fails when it needs more.
//! Whoever changes a kernel's lowering in `compiler/codegen/src/kernels` changes its function here with it: these functions
//! belong to the lowering, they stand here because memory is planned without LLVM.
//!
//! Sizes may depend on the operation and its tiles only, and never on the sink of a weight gradient more than the
//! lowering forces it to. [`scratch_bytes`] rounds up to 64.

use crate::blocking::Blocking;
use crate::kernel::{KernelOp, MatMul, Tiles};
use crate::target::CpuClass;

/// Scratch of a kernel, a multiple of 64. `tiles` is there for matmuls.
pub fn scratch_bytes(op: &KernelOp, tiles: Option<&Tiles>, _cpu: CpuClass) -> u64 {
    let bytes = match op {
        KernelOp::MatMul(matmul) => matmul_bytes(matmul, tiles.expect("a matmul has tiles")),
        KernelOp::Embed { .. } => 0,
        KernelOp::EmbedGrad { .. } => 0,
        KernelOp::LayerNorm { .. } => 0,
        KernelOp::LayerNormGrad { .. } => 0,
        KernelOp::GainGrad { .. } => 0,
        KernelOp::BiasGrad { .. } => 0,
        KernelOp::Attention { .. } => 0,
        KernelOp::AttentionGrad { .. } => 0,
        KernelOp::CrossEntropy { .. } => 0,
        KernelOp::Update { .. } => 0,
    };
    bytes.next_multiple_of(64)
}

/// The packed panels of A and B, for all of k: see [`Blocking`]. The same for every epilogue.
fn matmul_bytes(matmul: &MatMul, tiles: &Tiles) -> u64 {
    Blocking::new(matmul, tiles).packed_bytes(tiles)
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
