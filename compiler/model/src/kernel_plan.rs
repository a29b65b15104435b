//! The kernel plan: name, tiles and scratch of a kernel, decided from its operation and the CPU class, without LLVM.
//!
//! # Tiles
//!
//! A matmul keeps an `mr x nr` block of C in registers and walks k in steps of `kr`; `mc` rows of A and `nc` columns of B are packed
//! at a time (see [`crate::blocking`]). `nr` is a power of two (LLVM splits other widths badly), `mc` and `nc` are multiples of `mr` and
//! `nr`, `kc` of `kr`, and none exceeds the problem rounded up to whole tiles. Sums over k run per `kc` block, so tiles must not
//! depend on where a weight gradient goes: fused and unfused forms then give the same bits. They depend on m, n, k and the
//! target only.
//!
//! On a GPU a block of threads makes an `mc x nc` part of C, a thread (on tensor cores: a warp) `mr x nr` of it, and `kr` of k are staged in
//! shared memory at a time.
//! `kc` is the same on every target, and with it the bits of every sum over k.

use crate::kernel::{Dtype, Epilogue, Form, Kernel, KernelOp, MatMul, Products, Sink, Table, Tiles};
use crate::target::{CpuClass, Target};
use crate::workspace::scratch_bytes;

/// Decides a kernel of f32.
pub fn plan_kernel(op: KernelOp, target: impl Into<Target>) -> Kernel {
    plan_kernel_of(op, Dtype::F32, target)
}

/// Decides a kernel whose products of f32 are of nothing less.
pub fn plan_kernel_of(op: KernelOp, dtype: Dtype, target: impl Into<Target>) -> Kernel {
    plan_kernel_with(op, dtype, Products::F32, target)
}

/// Decides a kernel. Products of f32 stay so wherever the target has nothing else.
pub fn plan_kernel_with(op: KernelOp, dtype: Dtype, products: Products, target: impl Into<Target>) -> Kernel {
    let target = target.into();
    let (products, tiles) = match (&op, target) {
        (KernelOp::MatMul(matmul), Target::Cpu(cpu)) => (Products::F32, Some(tiles(matmul, cpu))),
        (KernelOp::MatMul(matmul), Target::Cuda(_) | Target::Emulated) => {
            let products = if dtype == Dtype::F32 { products } else { Products::F32 };
            (products, Some(block_tiles(matmul, dtype, products)))
        }
        _ => (Products::F32, None),
    };
    let suffix = match (dtype, products) {
        (Dtype::Bf16, _) => "_bf16",
        (Dtype::F32, Products::Tf32) => "_tf32",
        (Dtype::F32, Products::F32) => "",
    };
    let scratch_bytes = scratch_bytes(&op, tiles.as_ref(), target);
    Kernel { name: name(&op) + suffix, scratch_bytes, dtype, products, tiles, op }
}

/// Largest k that is summed in one block.
const KC_MAX: u32 = 1024;
/// Elements of a packed panel of A: a quarter of a 1 MiB L2 cache.
const A_PANEL_ELEMENTS: u32 = (256 << 10) / 4;
/// Elements of a packed panel of B: it lives in the last-level cache, a register tile's columns of it in L1 or L2.
const B_PANEL_ELEMENTS: u32 = (1 << 20) / 4;
/// Panels don't get smaller than this however long k is: packing must pay.
const MC_MIN: u32 = 64;
const NC_MIN: u32 = 256;
/// Steps of k that are unrolled.
const KR: u32 = 8;

/// Register tiles are measured on a Zen 4 core: 8x32 (16 accumulators) reaches 1.07 of MKL's speed on bench-gpt's shapes, 4x16 (8
/// accumulators) 1.0. Both divide the usual sizes, unlike 6x16, which fell to 0.65: every tile's size is unknown then.
fn tiles(matmul: &MatMul, cpu: CpuClass) -> Tiles {
    let lanes = cpu.lanes();
    let mr = match cpu {
        CpuClass::X86V4 => 8,
        CpuClass::X86V3 => 4,
    };
    let &MatMul { m, n, k, .. } = matmul;
    let mr = m.next_power_of_two().min(mr);
    let nr = if n > lanes { 2 * lanes } else { lanes };
    let (kr, kc) = (steps(k), summed_at_once(k));
    let mc = panel(m, mr, (A_PANEL_ELEMENTS / k).max(MC_MIN));
    let nc = panel(n, nr, (B_PANEL_ELEMENTS / k).max(NC_MIN));
    Tiles { mc, nc, kc, mr, nr, kr }
}

fn steps(k: u32) -> u32 {
    k.next_power_of_two().min(KR)
}

/// `kc`: equal blocks of at most [`KC_MAX`].
fn summed_at_once(k: u32) -> u32 {
    k.div_ceil(k.div_ceil(KC_MAX)).next_multiple_of(steps(k))
}

/// Large blocks do twice the work on each value that they stage; they are taken where they are enough to fill an A100, the smallest
/// of the chips with so many multiprocessors.
const LARGE_BLOCKS_MIN: u64 = 108;

/// A GPU's tiles: blocks of 256 threads; on tensor cores of eight warps, or four in small blocks.
fn block_tiles(matmul: &MatMul, dtype: Dtype, products: Products) -> Tiles {
    let &MatMul { m, n, k, .. } = matmul;
    let large = u64::from(m.div_ceil(128)) * u64::from(n.div_ceil(128)) >= LARGE_BLOCKS_MIN;
    let kc = summed_at_once(k);
    // Steps of k of 64 bytes on tensor cores.
    let kr = if dtype == Dtype::Bf16 { 32 } else { 16 };
    let tensor = dtype == Dtype::Bf16 || products == Products::Tf32;
    match (tensor, large) {
        (false, true) => Tiles { mc: 128, nc: 128, kc, mr: 8, nr: 8, kr: 8 },
        (false, false) => Tiles { mc: 64, nc: 64, kc, mr: 4, nr: 4, kr: 16 },
        (true, true) => Tiles { mc: 128, nc: 128, kc, mr: 64, nr: 32, kr },
        (true, false) => Tiles { mc: 64, nc: 64, kc, mr: 32, nr: 32, kr },
    }
}

/// Splits `size` into equal panels of at most `max` (at least one tile), in whole register tiles; into up to twice as many as needed
/// if they are then all equal, which spares the masks of a smaller last one.
fn panel(size: u32, tile: u32, max: u32) -> u32 {
    let max = (max / tile).max(1) * tile;
    let fewest = size.div_ceil(max);
    let even = (fewest..=2 * fewest).find(|panels| size.is_multiple_of(panels * tile));
    size.div_ceil(even.unwrap_or(fewest)).next_multiple_of(tile)
}

/// The exported symbol in f32: equal for equal operations only.
fn name(op: &KernelOp) -> String {
    match op {
        KernelOp::Embed { sequences, context, width, vocab } => {
            format!("embed_{sequences}x{context}x{width}_v{vocab}")
        }
        KernelOp::EmbedGrad { table, sequences, context, width, vocab, sink } => {
            let table = match table {
                Table::Token => format!("tok_v{vocab}"),
                Table::Position => "pos".to_owned(),
            };
            format!("embed_grad_{sequences}x{context}x{width}_{table}_{}", sink_name(*sink))
        }
        KernelOp::LayerNorm { rows, width } => format!("layernorm_{rows}x{width}"),
        KernelOp::LayerNormGrad { rows, width, residual } => {
            format!("layernorm_grad_{rows}x{width}{}", if *residual { "_residual" } else { "" })
        }
        KernelOp::GainGrad { rows, width, sink } => format!("gain_grad_{rows}x{width}_{}", sink_name(*sink)),
        KernelOp::BiasGrad { rows, width, sink } => format!("bias_grad_{rows}x{width}_{}", sink_name(*sink)),
        KernelOp::MatMul(matmul) => matmul_name(matmul),
        KernelOp::Attention { sequences, context, width, heads } => {
            format!("attention_{sequences}x{context}x{width}_h{heads}")
        }
        KernelOp::AttentionGrad { sequences, context, width, heads } => {
            format!("attention_grad_{sequences}x{context}x{width}_h{heads}")
        }
        KernelOp::CrossEntropy { rows, vocab, scale_bits } => format!("cross_entropy_{rows}x{vocab}_s{scale_bits:08x}"),
        KernelOp::Update { len, rule } => format!("update_{len}_{}", rule.name()),
        KernelOp::Part(part) => part.name(),
    }
}

fn matmul_name(matmul: &MatMul) -> String {
    let MatMul { m, n, k, form, epilogue } = matmul;
    let form = match form {
        Form::NN => "nn",
        Form::NT => "nt",
        Form::TN => "tn",
    };
    let epilogue = match epilogue {
        Epilogue::Store => String::new(),
        Epilogue::Bias => "_bias".into(),
        Epilogue::BiasResidual => "_bias_residual".into(),
        Epilogue::BiasGelu => "_bias_gelu".into(),
        Epilogue::GeluGrad => "_gelu_grad".into(),
        Epilogue::Blend { product_bits, other_bits } => format!("_blend_{product_bits:08x}_{other_bits:08x}"),
        Epilogue::Average => "_average".into(),
        Epilogue::Gradient(sink) => format!("_grad_{}", sink_name(*sink)),
    };
    format!("matmul_{form}_{m}x{n}x{k}{epilogue}")
}

fn sink_name(sink: Sink) -> String {
    match sink {
        Sink::Store => "store".into(),
        Sink::Add => "add".into(),
        Sink::Compensated { add } => if add { "compensated_add" } else { "compensated_store" }.into(),
        Sink::Update { rule, accumulated } => {
            format!("{}{}", rule.name(), if accumulated { "_acc" } else { "" })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiles_of(m: u32, n: u32, k: u32, cpu: CpuClass) -> Tiles {
        tiles(&MatMul { m, n, k, form: Form::NN, epilogue: Epilogue::Store }, cpu)
    }

    #[test]
    fn tiles_are_whole_register_tiles_and_never_larger_than_the_padded_problem() {
        for cpu in CpuClass::ALL {
            for (m, n, k) in [(1, 1, 1), (7, 33, 5), (512, 768, 256), (1024, 256, 512), (4096, 11, 5000), (15, 36, 12)]
            {
                let t = tiles_of(m, n, k, cpu);
                assert_eq!((t.mc % t.mr, t.nc % t.nr, t.kc % t.kr), (0, 0, 0), "{t:?}");
                assert!(t.mc < m + t.mr && t.nc < n + t.nr && t.kc < k + t.kr, "{m}x{n}x{k}: {t:?}");
                assert!(t.nr.is_power_of_two());
                assert!(t.kc <= KC_MAX + t.kr);
            }
        }
    }

    #[test]
    fn a_long_k_is_cut_into_equal_blocks() {
        assert_eq!(tiles_of(512, 256, 1024, CpuClass::X86V4).kc, 1024);
        assert_eq!(tiles_of(512, 256, 2100, CpuClass::X86V4).kc, 704);
    }
}
