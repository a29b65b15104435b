//! Builds: invariants over many shapes, and bench-gpt's kernels and memory as snapshots.

use crate::programs::{flush, normed, on_ranks, tied};
use artifact::program::Memory;
use artifact::stream::Program;
use dsl::diag::Diagnostic;
use dsl::spec::{At, Cost, Dtype, Layer, Limits, Model, ParamKind, Partition, Products, Recompute, Selector};
use model::build::{Build, Input, build};
use model::cost::{costs, update_work};
use model::dims::{Dims, check_sizes};
use model::kernel::{OptimizerKind, UpdateRule};
use model::limits::{Bounds, check_memory};
use model::partition::partition;
use model::rules::{Clip, GroupRule, MuonScale, Rules};
use model::target::CpuClass;
use model::verify::verify;
use proptest::prelude::*;
use std::fmt::Write;

const BENCH: Dims =
    Dims { layers: 8, width: 256, heads: 8, context: 128, vocab: 256, microbatch: 4, dtype: Dtype::F32, tied: false };

fn cut(dims: &Dims, stages: u32) -> Vec<Vec<Layer>> {
    partition(dims, &At { value: Partition::Balanced, span: 0..0 }, stages).unwrap()
}

fn adamw() -> Rules {
    Rules::uniform(UpdateRule::plain(OptimizerKind::AdamW))
}

/// Muon for matrices, AdamW for the rest, clipped by the norm of a stage.
fn muon() -> Rules {
    for_matrices(OptimizerKind::Muon, Some(Clip::PerStage { max: 1.0 }))
}

/// The same, clipped by the norm of all stages.
fn clipped() -> Rules {
    for_matrices(OptimizerKind::Muon, Some(Clip::Global { max: 1.0 }))
}

/// AdamW for what is no matrix.
fn for_matrices(kind: OptimizerKind, clip: Option<Clip>) -> Rules {
    let group = |selectors, kind| GroupRule::new(selectors, UpdateRule::plain(kind), MuonScale::MatchAdamW);
    let kinds = [ParamKind::Embedding, ParamKind::Head, ParamKind::Vector].map(Selector::Kind);
    Rules::new(vec![group(kinds.to_vec(), OptimizerKind::AdamW)], group(Vec::new(), kind), clip)
}

fn built(dims: Dims, program: &Program, fuse: bool, cpu: CpuClass) -> Build {
    let partition = cut(&dims, program.rank_of_stage.len() as u32);
    let (rules, recompute) = (&adamw(), Recompute::None);
    build(&Input {
        dims,
        partition: &partition,
        fuse,
        rules,
        recompute,
        products: Products::F32,
        program,
        target: cpu.into(),
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn every_build_holds_its_invariants(
        (layers, head_width, heads, context, vocab) in (1u32..4, 1u32..9, 1u32..4, 1u32..20, 2u32..40),
        (microbatch, stages, k) in (1u32..4, 1u32..4, 1u32..4),
        (split, fuse, folded, v3, by_muon, bf16, is_tied) in any::<(bool, bool, bool, bool, bool, bool, bool)>(),
        is_normed in any::<bool>(),
    ) {
        let dtype = if bf16 { Dtype::Bf16 } else { Dtype::F32 };
        let dims = Dims { layers, width: head_width * heads, heads, context, vocab, microbatch, dtype, tied: is_tied };
        let stages = stages.min(layers + 2);
        let program = if folded {
            // Two ranks that take turns.
            let ranks: Vec<u32> = (0..stages).map(|s| s % 2).collect();
            on_ranks(&ranks, stages.min(2), k, split)
        } else {
            flush(stages, k, split)
        };
        let program = if is_tied { tied(program) } else { program };
        let program = if by_muon && is_normed { normed(program) } else { program };
        let cpu = if v3 { CpuClass::X86V3 } else { CpuClass::X86V4 };
        let partition = &cut(&dims, program.rank_of_stage.len() as u32);
        let rules = &if program.global_norm { clipped() } else if by_muon { muon() } else { adamw() };
        let build = build(&Input { dims, partition, fuse, rules, recompute: Recompute::None, products: Products::F32, program: &program, target: cpu.into() });
        prop_assert_eq!(verify(&build), Ok(()));
        let accumulates = !fuse || k > 1 || by_muon;
        prop_assert!(is_tied || build.memory.iter().all(|m| (m.gradients > 0) == accumulates));
        for (kernel, entry) in build.kernels.iter().zip(&build.entries) {
            prop_assert_eq!((&kernel.name, kernel.scratch_bytes), (&entry.name, entry.scratch_bytes));
        }
    }
}

/// A power of two up to `2^max`, or a neighbour of it.
fn about(max: u32) -> impl Strategy<Value = u32> {
    (0..=max, -1i64..=1).prop_map(move |(power, by)| ((1i64 << power) + by).clamp(1, 1 << max) as u32)
}

proptest! {
    /// Sizes up to the largest that the language takes: refused or built, without overflow.
    #[test]
    fn extreme_sizes_are_refused_or_built(
        (layers, heads, head_width, context) in (1u32..4, about(12), about(17), about(22)),
        (vocab, microbatch, k, slots) in (about(22), about(16), about(31), about(16)),
        (bound, by_muon) in any::<(u64, bool)>(),
    ) {
        let at = |value| At { value, span: 0..0 };
        let width = (heads * head_width.min((1 << 17) / heads)).max(1);
        let (layers, width, heads) = (at(layers), at(width), at(heads));
        let model = Model::reference([layers, width, heads, at(context), at(vocab)], 0..0);
        if check_sizes(&model, &at(microbatch)).is_empty() {
            let dims = Dims::new(&model, microbatch);
            let mut program = flush(2, 2, true);
            program.accumulate = k;
            for rings in &mut program.rings {
                (rings.stash, rings.recv_f, rings.recv_b) = (slots, slots, slots);
            }
            let partition = &cut(&dims, 2);
            prop_assert!(costs(&dims, partition, Recompute::None, &adamw()).f_ns.iter().all(|&ns| ns > 0));
            let rules = &if by_muon { muon() } else { adamw() };
            let (program, target, recompute) = (&program, CpuClass::X86V3.into(), Recompute::None);
            let input = Input { dims, partition, fuse: false, rules, recompute, products: Products::F32, program, target };
            let built = build(&input);
            let bounds = Bounds { machine: Limits::new(vec![At { value: bound, span: 0..0 }]), require: None };
            let refused = check_memory(&input, &built, &bounds, &(0..0));
            prop_assert!(refused.iter().all(|d| d.help.is_some()));
            if built.memory[0].total < 1 << 46 && built.memory[1].total < 1 << 46 {
                prop_assert_eq!(verify_sizes(&built), Ok(()));
            }
        }
    }
}

/// [`verify`] where slots are few enough to be listed.
fn verify_sizes(build: &Build) -> Result<(), String> {
    if build.stages.iter().all(|s| s.rings.stash < 64) { verify(build) } else { Ok(()) }
}

#[test]
fn a_damaged_build_is_found() {
    let program = flush(2, 2, false);
    let dims =
        Dims { layers: 2, width: 12, heads: 3, context: 5, vocab: 11, microbatch: 2, dtype: Dtype::F32, tied: false };
    let good = built(dims, &program, true, CpuClass::X86V4);
    assert_eq!(verify(&good), Ok(()));
    let damaged = |change: &dyn Fn(&mut Build)| {
        let mut build = good.clone();
        change(&mut build);
        verify(&build).unwrap_err()
    };
    let found = damaged(&|b| b.memory[1].stash += 64);
    assert!(found.contains("sum to"), "{found}");
    let found = damaged(&|b| b.stages[0].bodies.f[1].args[0].offset += 64);
    assert!(found.contains("overlap") || found.contains("overwritten"), "{found}");
    let found = damaged(&|b| b.stages[0].params[0].state[1] = b.stages[0].params[0].state[0]);
    assert!(found.contains("one buffer"), "{found}");
    let found = damaged(&|b| b.stages[1].bodies.b[2].reverse());
    assert!(found.contains("after its update") || found.contains("overwritten"), "{found}");
    let found = damaged(&|b| _ = b.stages[0].bodies.f[1].args.pop());
    assert!(found.contains("arguments"), "{found}");
}

#[test]
fn equal_layers_share_kernels() {
    let deep = Dims { layers: 16, ..BENCH };
    let program = flush(2, 8, false);
    let count = |dims| built(dims, &program, true, CpuClass::X86V4).kernels.len();
    assert_eq!(count(BENCH), count(deep));
}

#[test]
fn kernels_of_bench_gpt() {
    let build = built(BENCH, &flush(2, 8, false), true, CpuClass::X86V4);
    let mut text = String::new();
    for kernel in &build.kernels {
        let tiles = kernel.tiles.map_or_else(String::new, |t| {
            format!("mc {} nc {} kc {}, {}x{} by {}", t.mc, t.nc, t.kc, t.mr, t.nr, t.kr)
        });
        writeln!(text, "{:<46} {:>8}  {tiles}", kernel.name, kernel.scratch_bytes).unwrap();
    }
    insta::assert_snapshot!(text);
}

#[test]
fn memory_of_bench_gpt() {
    let mut text = String::new();
    for (name, program, fuse) in [
        ("1 rank, accumulate 8", flush(1, 8, false), true),
        ("2 ranks, accumulate 8", flush(2, 8, false), true),
        ("2 ranks, accumulate 8, split", flush(2, 8, true), true),
        ("2 ranks, accumulate 1", flush(2, 1, false), true),
        ("2 ranks, accumulate 1, fuse = off", flush(2, 1, false), false),
    ] {
        writeln!(text, "{name}").unwrap();
        let row = "   total  weights  optimizer  gradients     stash  communication  activations  workspace";
        writeln!(text, "{row}").unwrap();
        for m in &built(BENCH, &program, fuse, CpuClass::X86V4).memory {
            let Memory { total, weights, optimizer, gradients, stash, communication, activations, workspace } = m;
            writeln!(
                text,
                "{total:>8} {weights:>8} {optimizer:>10} {gradients:>10} {stash:>9} {communication:>14} {activations:>12} {workspace:>10}"
            )
            .unwrap();
        }
    }
    insta::assert_snapshot!(text);
}

#[test]
fn the_stash_is_as_documented() {
    // One block alone on its stage, in words: 16 RD + 4 R + R heads, less the input and the output (RD each, in rings).
    let (rows, width) = (512, 256);
    let build = built(Dims { layers: 2, ..BENCH }, &flush(4, 1, false), true, CpuClass::X86V4);
    let (version, words) = (64, 15 * rows * width + 4 * rows + 8 * rows);
    assert_eq!(build.memory[1].stash, 4 * words + version);
    let split = built(Dims { layers: 2, ..BENCH }, &flush(4, 1, true), true, CpuClass::X86V4);
    assert_eq!(split.memory[1].stash, 4 * (words + 10 * rows * width) + version);
}

/// With SOAP a matrix has AdamW's two states, and moments and a basis for each side that is rotated.
#[test]
fn soap_plans_its_workspace() {
    let dims =
        Dims { layers: 2, width: 40, heads: 4, context: 5, vocab: 50, microbatch: 1, dtype: Dtype::F32, tied: false };
    let program = &flush(1, 1, false);
    let (partition, recompute, target) = (&cut(&dims, 1), Recompute::None, CpuClass::X86V4.into());
    let of = |rules: &Rules| {
        build(&Input { dims, partition, fuse: true, rules, recompute, program, products: Products::F32, target })
    };
    let (adamw, soap) = (of(&adamw()), |max_dim| for_matrices(OptimizerKind::Soap { max_dim }, None));
    let squares = |sides: &[u64]| 4 * 2 * 2 * sides.iter().map(|side| side * side).sum::<u64>();
    // qkv, out, up and down of a block.
    for (max_dim, sides, work, kernels) in [
        (1000, &[40, 120, 40, 40, 40, 160, 160, 40][..], 164 * 160, 8),
        (120, &[40, 120, 40, 40, 40, 40], 124 * 120, 6),
        (39, &[], 0, 0),
    ] {
        let build = of(&soap(max_dim));
        assert_eq!(verify(&build), Ok(()));
        assert_eq!(build.memory[0].optimizer - adamw.memory[0].optimizer, squares(sides), "max_dim {max_dim}");
        // Of the MLP's matrices: two beside the accumulator, then what turns the longest side.
        let temporaries = if sides.is_empty() { 160 * 40 } else { work.max(2 * 160 * 40) };
        let least = adamw.memory[0].activations;
        assert_eq!(build.memory[0].activations, least.max(2 * 64 + 4 * temporaries), "max_dim {max_dim}");
        let turns = build.kernels.iter().filter(|k| k.name.starts_with("turn_"));
        assert_eq!(turns.count(), kernels, "max_dim {max_dim}");
    }
    let states = |max_dim, width| soap(max_dim).states(width);
    // A block's squares come to 92 widths squared, its matrices to 12.
    assert_eq!((states(1000, 40), states(39, 40), self::adamw().states(40)), ([2, 10, 2], [2, 2, 2], [2, 2, 2]));
    assert_eq!((muon().states(64), for_matrices(OptimizerKind::NorMuon, None).states(64)), ([2, 1, 2], [2, 1, 2]));
}

/// With Muon a matrix has one state, and the update's temporaries share memory with the passes'.
#[test]
fn muon_plans_its_workspace() {
    let dims =
        Dims { layers: 2, width: 40, heads: 4, context: 5, vocab: 50, microbatch: 1, dtype: Dtype::F32, tied: false };
    let program = &flush(1, 1, false);
    let (partition, cpu) = (&cut(&dims, 1), CpuClass::X86V4);
    let (recompute, target) = (Recompute::None, cpu.into());
    let of = |rules: &Rules| {
        build(&Input { dims, partition, fuse: true, rules, recompute, products: Products::F32, program, target })
    };
    let (adamw, muon) = (of(&adamw()), of(&muon()));
    assert_eq!(verify(&muon), Ok(()));
    let matrices: u64 = 2 * (3 + 1 + 4 + 4) * 40 * 40 * 4;
    assert_eq!(adamw.memory[0].optimizer - muon.memory[0].optimizer, matrices);
    // The MLP's matrices: X, A and B; the norm's sum is used up before. With so few tokens that is more than the passes need.
    assert_eq!(muon.memory[0].activations, 2 * 64 + 4 * (160 * 40 + 2 * 40 * 40));
    assert!(adamw.memory[0].activations < muon.memory[0].activations);
    // One micro-batch an update: only what is not fused is accumulated, and under clipping nothing is fused.
    assert_eq!((adamw.memory[0].gradients, muon.memory[0].gradients), (0, adamw.memory[0].weights));
    let params = &muon.stages[0].params;
    let why = |name: &str| params.iter().find(|p| p.name == name).expect("a parameter").unfused.clone();
    assert_eq!(why("head.weight").as_deref(), Some("clipping needs the norm of all of the stage's gradients"));
    assert_eq!(why("block.1.mlp.up.weight").as_deref(), Some("Muon multiplies the whole momentum with itself"));
    assert!(adamw.stages[0].params.iter().all(|p| p.unfused.is_none()) && adamw.stages[0].bodies.u.is_empty());
}

/// By hand: five times two products of the longer side and one of the smaller, for each matrix of a block; nothing is multiplied elsewhere.
#[test]
fn updates_take_their_products() {
    let dims = Dims { layers: 2, width: 40, heads: 4, context: 5, vocab: 9, microbatch: 1, ..BENCH };
    let products = |n: u64, d: u64| 5 * 2 * (2 * n * n * d + n * n * n);
    let block: u64 = [40, 120, 160, 160].map(|d| products(40, d)).iter().sum();
    let work = |layers: &[Layer], rules: &Rules| update_work(&dims, layers, rules);
    assert_eq!(work(&[Layer::Embed, Layer::Block(0)], &muon()), block);
    assert_eq!(work(&[Layer::Block(0), Layer::Block(1), Layer::Head], &muon()), 2 * block);
    assert_eq!(work(&[Layer::Block(0)], &adamw()), 0);
    let costs = costs(&dims, &cut(&dims, 2), Recompute::None, &muon());
    assert_eq!(costs.u_ns, [block / 100; 2]);
}

#[test]
fn costs_follow_the_work() {
    let costs = costs(&BENCH, &cut(&BENCH, 2), Recompute::None, &adamw());
    // 2 GFLOP forward for four blocks, at 100 GFLOP/s.
    insta::assert_debug_snapshot!(costs);
}

fn diagnose(text: &str) -> Vec<Diagnostic> {
    diagnose_with(text, "")
}

/// Diagnostics of a spec, run as a flush schedule, with the text of its profile.
fn diagnose_with(text: &str, profile: &str) -> Vec<Diagnostic> {
    let (spec, found) = dsl::load(text, &[]);
    let spec = spec.unwrap_or_else(|| panic!("{found:?}"));
    if let Some(At { value: Cost::Profile(name), span }) = &spec.machine.cost {
        let read = model::profile::parse(profile, spec.machine.ranks.value as usize, None);
        return vec![read.expect_err("its example is wrong").diagnostic(name, span)];
    }
    if let Some(refusal) = model::estimate::refusal(&spec) {
        return vec![refusal];
    }
    let model = spec.model.clone().expect("it has a model");
    let wrong = check_sizes(&model, &spec.pipeline.microbatch);
    if !wrong.is_empty() {
        return wrong;
    }
    let dims = Dims::new(&model, spec.pipeline.microbatch.value);
    let ranks = spec.machine.ranks.value;
    let partition = &partition(&dims, &spec.pipeline.partition, ranks).unwrap();
    let program = &flush(ranks, spec.pipeline.accumulate.value, false);
    let (fuse, rules, cpu) = (spec.pipeline.fuse.value, &Rules::of_spec(&spec, None), CpuClass::X86V4);
    let wrong = model::rules::check(&spec, rules, &model::rules::parameters(&dims));
    if !wrong.is_empty() {
        return wrong;
    }
    let recompute = spec.pipeline.recompute.value;
    let input = Input { dims, partition, fuse, rules, recompute, products: Products::F32, program, target: cpu.into() };
    let bounds = Bounds { machine: spec.machine.memory.clone(), require: spec.require.memory.clone() };
    check_memory(&input, &build(&input), &bounds, &model.span)
}

#[test]
fn the_pages_examples_give_their_codes() {
    let mut text = String::new();
    for code in dsl::codes().filter(|c| c.starts_with("P04")) {
        let page = dsl::explain(code).expect("listed");
        let (_, rest) = page.split_once("```pace\n").expect("a page has an example");
        let (example, _) = rest.split_once("```").expect("the example ends");
        let csv = page.split_once("```csv\n").and_then(|(_, rest)| rest.split_once("```")).map_or("", |(csv, _)| csv);
        let found = diagnose_with(example, csv);
        assert!(!found.is_empty() && found.iter().all(|d| d.code == code), "{code}: {found:?}");
        for d in found {
            let label = &d.labels[0];
            writeln!(text, "{code}: {}\n  at `{}`: {}", d.message, &example[label.span.clone()], label.text).unwrap();
            d.notes.iter().for_each(|n| writeln!(text, "  note: {n}").unwrap());
            writeln!(text, "  help: {}", d.help.expect("a help line")).unwrap();
        }
    }
    insta::assert_snapshot!(text);
}

#[test]
fn the_microbatch_in_the_help_is_the_largest_that_fits() {
    let text = |microbatch: u32| {
        format!(
            "model gpt {{ layers = 4, width = 64, heads = 4, context = 32, vocab = 64 }}\nmachine {{ ranks = 2 }}\n\
             pipeline {{ schedule = gpipe, microbatch = {microbatch}, accumulate = 4 }}\nrequire {{ memory <= 8 MiB }}\n"
        )
    };
    let found = diagnose(&text(64));
    let help = found[0].help.clone().unwrap();
    let largest: u32 = help.rsplit(' ').next().unwrap().parse().unwrap();
    assert!(largest > 0 && diagnose(&text(largest)).is_empty(), "{help}");
    assert_eq!(diagnose(&text(largest + 1))[0].code, "P0410");
}

/// Each rank is held to its own bound, and the rank that exceeds its own most is named.
#[test]
fn bounds_by_rank() {
    let text = |bounds: &str| {
        format!(
            "model gpt {{ layers = 4, width = 64, heads = 4, context = 32, vocab = 64 }}\nmachine {{ ranks = 2 }}\n\
             pipeline {{ schedule = gpipe, microbatch = 8, accumulate = 4 }}\nrequire {{ memory <= {bounds} }}\n"
        )
    };
    assert!(diagnose(&text("[1 GiB, 1 GiB]")).is_empty());
    let found = diagnose(&text("[1 GiB, 2 MiB]"));
    assert!(found[0].message.starts_with("rank 1 needs"), "{found:?}");
    assert!(!found[0].notes.iter().any(|n| n.starts_with("rank 0")), "{found:?}");
    let text = text("[3 MiB, 1 KiB]");
    let found = diagnose(&text);
    assert_eq!(&text[found[0].labels[0].span.clone()], "1 KiB");
    assert!(found[0].notes.iter().any(|n| n.starts_with("rank 0 needs") && n.ends_with("of 3 MiB")), "{found:?}");
    assert!(found[0].help.as_ref().is_some_and(|h| h.contains("on rank 1")), "{found:?}");
}
