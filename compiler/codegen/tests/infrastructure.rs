//! What holds for every kernel: no more memory than planned, nothing from outside, equal bytes, errors with words.

use crate::harness::{Data, Runnable, random, runnable, with_context};
use crate::optimizers::{ADAMW, SGD, hyper, squares};
use artifact::ids::{RankId, StageId};
use artifact::program::{Bodies, Call, HYPER_LEN, Image, Place, Stage, StageIo};
use artifact::stream::{Accumulation, Instr, Op, Policy, Program, RingSizes, Stream};
use codegen::kernels::KernelSource;
use codegen::{CodegenError, Level, compile, compile_kernels, emit, emit_sched, pipeline};
use model::kernel::{Epilogue, Form, Kernel, KernelOp, MatMul, Sink, Table};
use model::kernel_plan::plan_kernel;
use model::target::CpuClass;
use proptest::prelude::*;

fn update(len: u64) -> Kernel {
    plan_kernel(KernelOp::Update { len, rule: ADAMW }, CpuClass::X86V3)
}

const EMPTY_STRATEGY: &str = "transform.named_sequence @__transform_main(%m: !transform.any_op) { transform.yield }
transform.named_sequence @lower(%m: !transform.any_op) { transform.yield }
";

/// Compiles a hand-written function `@kernel` with the given scratch.
fn compile_text(function: &str, scratch_bytes: u64) -> Result<pipeline::Object, CodegenError> {
    let kernel = Kernel { name: "kernel".into(), scratch_bytes, ..update(1) };
    let source = KernelSource { linalg: function.into(), strategy: EMPTY_STRATEGY.into() };
    with_context(|c| pipeline::compile_source(c, &kernel, source, CpuClass::X86V3))
}

const WITH_TEMPORARY: &str = "func.func @kernel(%x: memref<100xf32>) {
  %t = memref.alloc() : memref<100xf32>
  %i = arith.constant 3 : index
  %v = memref.load %x[%i] : memref<100xf32>
  memref.store %v, %t[%i] : memref<100xf32>
  %w = memref.load %t[%i] : memref<100xf32>
  memref.store %w, %x[%i] : memref<100xf32>
  return
}";

#[test]
fn scratch_other_than_planned_is_refused() {
    compile_text(WITH_TEMPORARY, 448).unwrap();
    let error = compile_text(WITH_TEMPORARY, 384).unwrap_err();
    assert_eq!(error.step, "scratch");
    assert!(error.message.contains("448 bytes are needed and 384 are planned"), "{error}");
    assert!(error.message.contains("memref.alloc"), "{error}");
    assert_eq!(compile_text(WITH_TEMPORARY, 512).unwrap_err().step, "scratch");
}

#[test]
fn an_allocation_of_unknown_size_is_refused() {
    let text = "func.func @kernel(%x: memref<1xindex>) {
  %c = arith.constant 0 : index
  %n = memref.load %x[%c] : memref<1xindex>
  %t = memref.alloc(%n) : memref<?xindex>
  memref.store %n, %t[%c] : memref<?xindex>
  %w = memref.load %t[%c] : memref<?xindex>
  memref.store %w, %x[%c] : memref<1xindex>
  return
}";
    let error = compile_text(text, 64).unwrap_err();
    assert!(error.message.contains("unknown size"), "{error}");
}

#[test]
fn a_copy_is_refused() {
    let text = "func.func @kernel(%x: memref<64xf32>, %y: memref<64xf32>) {
  memref.copy %x, %y : memref<64xf32> to memref<64xf32>
  return
}";
    assert!(compile_text(text, 0).unwrap_err().message.contains("memref.copy"));
    // One element needs no library.
    compile_text(&text.replace("64", "1"), 0).unwrap();
}

#[test]
fn a_library_call_is_refused() {
    let text = "func.func @kernel(%x: memref<1xf32>) {
  %c = arith.constant 0 : index
  %v = memref.load %x[%c] : memref<1xf32>
  %e = math.exp %v : f32
  memref.store %e, %x[%c] : memref<1xf32>
  return
}";
    let error = compile_text(text, 0).unwrap_err();
    assert!(error.message.contains("`expf`"), "{error}");
    let declared = "func.func private @elsewhere()\nfunc.func @kernel(%x: memref<1xf32>) {\n  call @elsewhere() : () -> ()\n  return\n}";
    assert!(compile_text(declared, 0).unwrap_err().message.contains("@elsewhere"));
}

#[test]
fn loops_do_not_become_library_calls() {
    let text = "func.func @kernel(%x: memref<4096xf32>, %y: memref<4096xf32>) {
  %zero = arith.constant 0 : index
  %one = arith.constant 1 : index
  %end = arith.constant 4096 : index
  scf.for %i = %zero to %end step %one {
    %v = memref.load %x[%i] : memref<4096xf32>
    memref.store %v, %y[%i] : memref<4096xf32>
  }
  return
}";
    compile_text(text, 0).unwrap();
}

#[test]
fn a_stack_frame_above_64_kib_is_refused() {
    let text = |elements: u32| {
        format!(
            "func.func @kernel(%x: memref<1xindex>) {{
  %c = arith.constant 0 : index
  %i = memref.load %x[%c] : memref<1xindex>
  %t = memref.alloca() : memref<{elements}xindex>
  memref.store %i, %t[%i] : memref<{elements}xindex>
  %w = memref.load %t[%c] : memref<{elements}xindex>
  memref.store %w, %x[%c] : memref<1xindex>
  return
}}"
        )
    };
    compile_text(&text(8000), 0).unwrap();
    let error = compile_text(&text(9000), 0).unwrap_err();
    assert!(error.message.contains("stack frame"), "{error}");
}

#[test]
fn errors_carry_mlirs_words() {
    let error =
        compile_text("func.func @kernel(%x: memref<1xf32>) { \"no.such\"() : () -> () return }", 0).unwrap_err();
    assert_eq!((error.subject.as_str(), error.step), ("kernel", "parse"));
    assert!(error.message.contains("unregistered dialect"), "{error}");
    assert!(error.message.contains("| func.func @kernel"), "the line is shown: {error}");
    assert!(error.to_string().contains("please report"), "{error}");
    let strategy = "transform.named_sequence @__transform_main(%m: !transform.any_op) {
  %f = transform.structured.match ops{[\"func.func\"]} in %m : (!transform.any_op) -> !transform.any_op
  transform.structured.vectorize %f : !transform.any_op
  transform.yield
}
transform.named_sequence @lower(%m: !transform.any_op) { transform.yield }
";
    let source = KernelSource { linalg: "func.func @kernel() { return }".into(), strategy: strategy.into() };
    let error = with_context(|c| pipeline::compile_source(c, &update(1), source, CpuClass::X86V3)).unwrap_err();
    assert_eq!(error.step, "strategy");
    assert!(!error.message.is_empty());
}

/// Sizes of a model.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    sequences: u32,
    context: u32,
    heads: u32,
    head_width: u32,
    vocab: u32,
}

/// One kernel of every kind, as a model of these sizes has them; weight gradients go to `sink`.
fn every_kind(sizes: Sizes, sink: Sink, cpu: CpuClass) -> Vec<Kernel> {
    let Sizes { sequences, context, heads, head_width, vocab } = sizes;
    let (rows, width) = (sequences * context, heads * head_width);
    let matmul = |m, n, k, form, epilogue| KernelOp::MatMul(MatMul { m, n, k, form, epilogue });
    let ops = [
        KernelOp::Embed { sequences, context, width, vocab },
        KernelOp::EmbedGrad { table: Table::Token, sequences, context, width, vocab, sink },
        KernelOp::EmbedGrad { table: Table::Position, sequences, context, width, vocab, sink },
        KernelOp::LayerNorm { rows, width },
        KernelOp::LayerNormGrad { rows, width, residual: true },
        KernelOp::GainGrad { rows, width, sink },
        KernelOp::BiasGrad { rows, width, sink },
        matmul(rows, 3 * width, width, Form::NN, Epilogue::Bias),
        matmul(rows, 4 * width, width, Form::NN, Epilogue::BiasGelu),
        matmul(rows, width, 4 * width, Form::NN, Epilogue::BiasResidual),
        matmul(rows, vocab, width, Form::NN, Epilogue::Store),
        matmul(rows, width, vocab, Form::NT, Epilogue::Store),
        matmul(rows, 4 * width, width, Form::NT, Epilogue::GeluGrad),
        matmul(width, 3 * width, rows, Form::TN, Epilogue::Gradient(sink)),
        matmul(width, vocab, rows, Form::TN, Epilogue::Gradient(sink)),
        KernelOp::Attention { sequences, context, width, heads },
        KernelOp::AttentionGrad { sequences, context, width, heads },
        KernelOp::CrossEntropy { rows, vocab, scale_bits: 0.25f32.to_bits() },
        KernelOp::Update { len: u64::from(width), rule: SGD },
    ];
    ops.map(|op| plan_kernel(op, cpu)).to_vec()
}

const FUSED: Sink = Sink::Update { rule: ADAMW, accumulated: true };

#[test]
fn every_kind_compiles_for_both_cpu_classes_to_the_same_bytes_each_time() {
    let sizes = Sizes { sequences: 2, context: 9, heads: 2, head_width: 10, vocab: 11 };
    for cpu in CpuClass::ALL {
        let kernels = every_kind(sizes, FUSED, cpu);
        let first = compile_kernels(&kernels, cpu, &|_, _| {}).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(first.len(), kernels.len());
        assert_eq!(first, compile_kernels(&kernels, cpu, &|_, _| {}).unwrap());
    }
}

proptest! {
    // A spec that passed the checks must compile: above all, its kernels must need the scratch that was planned.
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(cases()) })]
    #[test]
    fn every_kind_compiles_at_any_size(
        (sequences, context, heads, head_width, vocab) in (1u32..4, 1u32..70, 1u32..4, 1u32..40, 2u32..80),
        sink in prop_oneof![Just(Sink::Store), Just(Sink::Add), Just(FUSED)],
        cpu in prop_oneof![Just(CpuClass::X86V3), Just(CpuClass::X86V4)],
    ) {
        let kernels = every_kind(Sizes { sequences, context, heads, head_width, vocab }, sink, cpu);
        if let Err(error) = compile_kernels(&kernels, cpu, &|_, _| {}) {
            prop_assert!(false, "{cpu:?}: {error}");
        }
    }
}

/// More with `PROPTEST_CASES`.
fn cases() -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(3)
}

#[test]
fn cpu_classes_agree_bit_for_bit_on_an_elementwise_kernel() {
    let data = [random(1, 1001), random(2, 1001), random(3, 1001), squares(4, 1001), hyper(ADAMW)].map(Data::F32);
    let op = || KernelOp::Update { len: 1001, rule: ADAMW };
    let results = runnable().into_iter().map(|cpu| Runnable::new(op(), cpu).call(&data)).collect::<Vec<_>>();
    assert!(results.windows(2).all(|pair| pair[0] == pair[1]));
}

fn place(offset: u64, bytes: u64) -> Place {
    Place { offset, bytes, stride: 0, slots: 1, by: Default::default() }
}

/// A stage whose U calls the given kernels of `len` elements.
fn stage(id: u32, calls: &[(u32, u64)]) -> Stage {
    let call = |&(kernel, len): &(u32, u64)| {
        let mut args = (0..4).map(|i| place(i * 8192, 4 * len)).collect::<Vec<_>>();
        args.push(place(4 * 8192, 4 * HYPER_LEN as u64));
        Call { kernel, args }
    };
    Stage {
        stage: StageId(id),
        rank: RankId(id),
        rings: RingSizes::default(),
        params: Vec::new(),
        io: StageIo {
            tokens: None,
            targets: None,
            loss: None,
            recv_f: None,
            send_f: None,
            recv_b: None,
            send_b: None,
            norm: None,
            total: None,
            hyper: place(0, 64),
            version: place(64, 8),
            version_seen: place(128, 8),
        },
        bodies: Bodies { u: calls.iter().map(call).collect(), ..Bodies::default() },
    }
}

#[test]
fn an_image_holds_what_its_stage_calls() {
    let kernels = [update(37), update(64), update(1000)];
    let stages = [stage(0, &[(2, 1000), (0, 37), (2, 1000)]), stage(1, &[(1, 64)])];
    let seen = std::cell::RefCell::new(Vec::new());
    let images = compile(&kernels, &stages, CpuClass::X86V3, &|done, all| seen.borrow_mut().push((done, all))).unwrap();
    assert_eq!(*seen.borrow(), [(1, 3), (2, 3), (3, 3)]);
    let indices = |image: &Image| image.exports.iter().map(|e| e.0).collect::<Vec<_>>();
    assert_eq!((indices(&images[0]), indices(&images[1])), (vec![0, 2], vec![1]));
    assert_eq!(images, compile(&kernels, &stages, CpuClass::X86V3, &|_, _| {}).unwrap());
    let error = compile(&kernels, &[stage(0, &[(3, 64)])], CpuClass::X86V3, &|_, _| {}).unwrap_err();
    assert!(error.message.contains("no kernel 3"), "{error}");
}

#[test]
fn one_failure_is_the_error_of_the_whole() {
    let mut bad = update(64);
    bad.scratch_bytes = 64;
    let error = compile_kernels(&[update(37), bad, update(8)], CpuClass::X86V3, &|_, _| {}).unwrap_err();
    assert_eq!(error.step, "scratch");
}

#[test]
fn the_schedule_prints_as_a_verified_module() {
    let instr = |op, mb| Instr { op, stage: StageId(0), mb };
    let last = Accumulation { first: true, last: true };
    let stream = Stream {
        prologue: vec![instr(Op::F, 0), instr(Op::SendF, 0)],
        period: vec![instr(Op::RecvB, 0), instr(Op::B(last), 0), instr(Op::U, 0), instr(Op::F, 1)],
        microbatches: 1,
        updates: 1,
    };
    let program = Program {
        streams: vec![stream],
        rank_of_stage: vec![RankId(0)],
        rings: vec![RingSizes::default()],
        accumulate: 1,
        policy: Policy::Current,
        copies: 1,
        tied: false,
        global_norm: false,
    };
    insta::assert_snapshot!(emit_sched(&program, &[stage(0, &[(0, 37)])], &[update(37)]).unwrap());
}

#[test]
fn a_malformed_instruction_is_refused() {
    let parses = |text: &str| with_context(|c| c.parse("test", "parse", text).map(|_| ()));
    parses("\"sched.f\"() {stage = 0 : i32, mb = 0 : i32} : () -> ()").unwrap();
    for text in [
        "\"sched.f\"() {stage = 0 : i32} : () -> ()",
        "\"sched.f\"() {stage = \"0\", mb = 0 : i32} : () -> ()",
        "\"sched.b\"() {stage = 0 : i32, mb = 0 : i32} : () -> ()",
        "%0 = arith.constant 0 : i32 \"sched.call\"(%0) {kernel = @k} : (i32) -> ()",
        "\"sched.call\"() {kernel = \"k\"} : () -> ()",
        "\"sched.unknown\"() : () -> ()",
    ] {
        let error = parses(text).expect_err(text);
        assert!(!error.message.is_empty(), "{text}");
    }
}

#[test]
fn levels_print() {
    let kernels = [update(37)];
    let linalg = emit(&kernels, CpuClass::X86V3, Level::Linalg).unwrap();
    let (function, strategy) = linalg.split_once("transform.named_sequence @__transform_main").unwrap();
    assert!(strategy.contains("transform.named_sequence @lower"));
    insta::assert_snapshot!(function);
    let llvm = emit(&kernels, CpuClass::X86V3, Level::Llvm).unwrap();
    assert!(llvm.contains("@update_37_adamw(") && llvm.contains("fdiv <8 x float>"), "{llvm}");
    assert!(!llvm.contains("fast") && !llvm.contains("contract"), "{llvm}");
}
