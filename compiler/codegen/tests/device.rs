//! Device kernels beside what the other tests ask of every target: the bits of the CPU's, any order of threads, PTX.

use crate::harness::{Data, Runnable, bits, random, run, runnable, with_context};
use crate::optimizers::{self, ADAMW};
use codegen::cuda;
use emulated::Order;
use model::device::HEAD_MAX;
use model::kernel::{Epilogue, Form, Kernel, KernelOp, MatMul, OptimizerKind, Sink, Table, Tiles, UpdateRule};
use model::kernel_plan::plan_kernel;
use model::operands::{Access, operands};
use model::target::Chip;

const CHIP: Chip = Chip::Sm80;
const LARGE: Tiles = Tiles { mc: 128, nc: 128, kc: 48, mr: 8, nr: 8, kr: 8 };

/// Any content for a kernel's operands: small numbers for tokens, hyper-parameters of the optimizer.
fn content(op: &KernelOp, hyper: Option<UpdateRule>) -> Vec<Data> {
    let tokens = matches!(
        op,
        KernelOp::Embed { .. } | KernelOp::EmbedGrad { table: Table::Token, .. } | KernelOp::CrossEntropy { .. }
    );
    let mut data = Vec::new();
    for (i, operand) in operands(op).iter().enumerate() {
        let len = operand.bytes as usize / 4;
        data.push(match (operand.access, hyper) {
            _ if i == 0 && tokens => Data::U32((0..len as u32).map(|r| r * 7 % 5).collect()),
            (_, Some(rule)) if operand.bytes == 64 => Data::F32(optimizers::hyper(rule)),
            (Access::Write, _) => Data::unset(len),
            // Squares: an optimizer's second moments must not be negative.
            _ => Data::F32(random(i as u64, len).iter().map(|x| x * x).collect()),
        });
    }
    data
}

fn same_bits_as_the_cpu(op: KernelOp, hyper: Option<UpdateRule>) {
    let data = content(&op, hyper);
    let found = run(op.clone(), CHIP, &data);
    for cpu in runnable() {
        let expected = run(op.clone(), cpu, &data);
        let tokens = usize::from(matches!(found[0], Data::U32(_)));
        for (i, (found, expected)) in found.iter().zip(&expected).enumerate().skip(tokens) {
            assert_eq!(bits(found), bits(expected), "operand {i} of {op:?}, {cpu:?}");
        }
    }
}

#[test]
fn updates_have_the_bits_of_the_cpu() {
    for rule in optimizers::rules() {
        for len in [37, 132] {
            same_bits_as_the_cpu(KernelOp::Update { len, rule }, Some(rule));
        }
    }
}

#[test]
fn sums_in_order_have_the_bits_of_the_cpu() {
    let (rows, width, vocab) = (21, 37, 11);
    let sink = Sink::Update { rule: ADAMW, accumulated: true };
    same_bits_as_the_cpu(KernelOp::BiasGrad { rows, width, sink }, Some(ADAMW));
    same_bits_as_the_cpu(KernelOp::GainGrad { rows, width, sink: Sink::Add }, None);
    for table in [Table::Token, Table::Position] {
        let op = KernelOp::EmbedGrad { table, sequences: 3, context: 17, width, vocab, sink };
        same_bits_as_the_cpu(op, Some(ADAMW));
    }
}

#[test]
fn products_have_the_bits_of_the_cpu() {
    let accumulated = Sink::Update { rule: ADAMW, accumulated: true };
    let cases = [
        (Form::NN, Epilogue::BiasGelu, (37, 61, 129)),
        (Form::NT, Epilogue::GeluGrad, (64, 68, 40)),
        (Form::NN, Epilogue::BiasResidual, (70, 64, 1100)),
        (Form::TN, Epilogue::Gradient(Sink::Store), (5, 9, 33)),
        (Form::TN, Epilogue::Gradient(accumulated), (40, 72, 1030)),
    ];
    for (form, epilogue, (m, n, k)) in cases {
        let op = KernelOp::MatMul(MatMul { m, n, k, form, epilogue });
        same_bits_as_the_cpu(op, Some(ADAMW));
    }
}

/// The tiles of large products, on shapes that they don't divide, against the small tiles.
#[test]
fn large_tiles_have_the_bits_of_small_ones() {
    let cases = [(Form::NN, (130, 140, 100)), (Form::NT, (128, 129, 50)), (Form::TN, (131, 256, 64))];
    for (form, (m, n, k)) in cases {
        let op = KernelOp::MatMul(MatMul { m, n, k, form, epilogue: Epilogue::Store });
        let small = plan_kernel(op.clone(), CHIP);
        let in_tiles = |tiles| Kernel { tiles: Some(tiles), ..small.clone() };
        let data = content(&op, None);
        let large = Runnable::of(in_tiles(LARGE), CHIP).call(&data);
        let small = Runnable::of(in_tiles(Tiles { kc: LARGE.kc, ..small.tiles.expect("tiles") }), CHIP).call(&data);
        assert_eq!(bits(&large[2]), bits(&small[2]), "{form:?}");
    }
}

#[test]
fn no_order_of_threads_changes_a_bit() {
    let attention = KernelOp::AttentionGrad { sequences: 2, context: 40, width: 24, heads: 2 };
    let loss = KernelOp::CrossEntropy { rows: 5, vocab: 300, scale_bits: 1.0f32.to_bits() };
    for op in [attention, loss, KernelOp::LayerNorm { rows: 3, width: 600 }] {
        let mut kernel = Runnable::new(op.clone(), CHIP);
        let mut data = content(&op, None);
        if let KernelOp::CrossEntropy { .. } = op {
            data[2] = Data::F64(vec![f64::NAN]);
        }
        let first = kernel.call(&data);
        for order in [Order::Ascending, Order::Random(11), Order::Random(12)] {
            kernel.order = order;
            assert_eq!(kernel.call(&data), first, "{op:?}, {order:?}");
        }
    }
}

#[test]
fn heads_fit_up_to_the_size_that_the_diagnostic_names() {
    let kernel = |size| {
        let op = KernelOp::AttentionGrad { sequences: 1, context: 8, width: size, heads: 1 };
        cuda::device_kernel(&plan_kernel(op, CHIP))
    };
    assert!(kernel(HEAD_MAX).is_ok());
    assert!(kernel(HEAD_MAX + 1).is_err());
}

fn ptx(op: KernelOp, chip: Chip) -> String {
    ptx_of(&plan_kernel(op, chip), chip)
}

fn ptx_of(kernel: &Kernel, chip: Chip) -> String {
    let device = cuda::device_kernel(kernel).unwrap_or_else(|e| panic!("{e}"));
    let target = (chip.name(), cuda::features(chip));
    with_context(|c| cuda::assembly(c, &device.name, &device.module(), (target.0, &target.1)))
        .unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn every_chip_of_the_table_has_code() {
    for chip in Chip::ALL {
        let text = ptx(KernelOp::LayerNorm { rows: 3, width: 40 }, chip);
        let version = format!(".version {}.{}", chip.ptx_version() / 10, chip.ptx_version() % 10);
        assert!(text.contains(&version), "{chip:?}: {text}");
        assert!(text.contains(&format!(".target {}", chip.name())), "{chip:?}");
        assert!(text.contains(".visible .entry layernorm_3x40("), "{chip:?}");
    }
}

/// The assembler joins products and sums that don't say how they round; and a function from outside would have to be linked.
#[test]
fn every_operation_rounds_by_itself_and_nothing_is_called() {
    let matmul = |epilogue| KernelOp::MatMul(MatMul { m: 70, n: 65, k: 33, form: Form::TN, epilogue });
    let rule = UpdateRule::plain(OptimizerKind::Adan);
    let kernels = [
        KernelOp::Update { len: 100, rule },
        matmul(Epilogue::BiasGelu),
        matmul(Epilogue::Gradient(Sink::Update { rule, accumulated: true })),
        KernelOp::LayerNormGrad { rows: 4, width: 40, residual: true },
        KernelOp::Attention { sequences: 1, context: 40, width: 64, heads: 2 },
        KernelOp::CrossEntropy { rows: 4, vocab: 40, scale_bits: 0 },
    ];
    for op in kernels {
        let text = ptx(op.clone(), Chip::Sm90);
        for line in text.lines().map(str::trim) {
            let operation = line.split_whitespace().find(|word| !word.starts_with('@')).unwrap_or_default();
            let parts: Vec<_> = operation.split('.').collect();
            let arithmetic = matches!(parts[0], "add" | "sub" | "mul" | "fma" | "div" | "sqrt" | "mad");
            let float = parts.last().is_some_and(|ty| matches!(*ty, "f32" | "f64"));
            assert!(!(arithmetic && float) || parts[1] == "rn", "{op:?}: {line}");
            assert!(!line.starts_with(".extern") && !operation.starts_with("call"), "{op:?}: {line}");
            assert!(!operation.contains(".local"), "{op:?}: {line}");
        }
    }
}

#[test]
fn a_head_that_does_not_fit_is_a_sentence() {
    let op = KernelOp::AttentionGrad { sequences: 1, context: 8, width: 800, heads: 1 };
    let error = cuda::device_kernel(&plan_kernel(op, CHIP)).unwrap_err();
    assert!(error.message.contains("a head of 800 elements"), "{error}");
}
