//! The whole gradient of a small odd GPT against finite differences, and equal for every cut, order and form of the update.

use crate::machine::{Machine, Random, Setting};
use crate::programs::{flush, normed, on_ranks, tied};
use artifact::program::Optimizer;
use artifact::stream::Program;
use dsl::spec::{At, Dtype, Layer, Partition, Products, Recompute};
use model::build::{Build, Input, build};
use model::dims::Dims;
use model::kernel::{OptimizerKind, UpdateRule};
use model::partition::partition;
use model::rules::{Clip, GroupRule, MuonScale, Rules};
use model::target::CpuClass;
use model::verify::verify;
use std::collections::HashMap;

const DIMS: Dims =
    Dims { layers: 2, width: 12, heads: 3, context: 5, vocab: 11, microbatch: 3, dtype: Dtype::F32, tied: false };

/// Weights large enough that every gradient matters, gains around 1.
fn weight(name: &str, element: u64) -> f64 {
    let seed = name.bytes().fold(element, |h, b| h.wrapping_mul(31).wrapping_add(b.into()));
    let u = Random(seed).uniform();
    if name.ends_with("gain") { 1.0 + 0.3 * u } else { 0.4 * u }
}

fn data(mb: u64) -> (Vec<f64>, Vec<f64>) {
    let rows = u64::from(DIMS.rows());
    let mut random = Random(1000 + mb);
    let mut ids = || (0..rows).map(|_| (random.next() % u64::from(DIMS.vocab)) as f64).collect();
    (ids(), ids())
}

const ADAMW: Optimizer = Optimizer::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, decay: 0.1 };
const SGD: Optimizer = Optimizer::Sgd { momentum: 0.9, decay: 0.1 };

fn setting<'a>(optimizer: Optimizer, weight: &'a dyn Fn(&str, u64) -> f64) -> Setting<'a> {
    Setting { data: &data, weight, optimizer, learning_rate: &|_| 1e-2 }
}

fn cut(stages: u32) -> Vec<Vec<Layer>> {
    partition(&DIMS, &At { value: Partition::Balanced, span: 0..0 }, stages).unwrap()
}

fn built(program: &Program, fuse: bool, optimizer: OptimizerKind) -> Build {
    built_of(Dtype::F32, program, fuse, optimizer)
}

fn built_of(dtype: Dtype, program: &Program, fuse: bool, optimizer: OptimizerKind) -> Build {
    let dims = Dims { dtype, tied: program.tied, ..DIMS };
    let partition = cut(program.rank_of_stage.len() as u32);
    let rest = GroupRule::new(Vec::new(), UpdateRule::plain(optimizer), MuonScale::MatchAdamW);
    let clip = program.global_norm.then_some(Clip::Global { max: 0.3 });
    let (rules, recompute) = (&Rules::new(Vec::new(), rest, clip), Recompute::None);
    let (partition, target) = (&partition, CpuClass::X86V4.into());
    let build = build(&Input { dims, partition, fuse, rules, recompute, products: Products::F32, program, target });
    verify(&build).unwrap();
    build
}

/// Mean loss of the first update's micro-batches under the given weights.
fn loss(build: &Build, program: &Program, weight: &dyn Fn(&str, u64) -> f64) -> f64 {
    let mut machine = Machine::new(build, program, setting(SGD, weight));
    machine.run(1);
    let tokens = f64::from(program.accumulate * DIMS.rows());
    machine.losses.values().sum::<f64>() / tokens
}

fn gradients(program: &Program) -> HashMap<String, Vec<f64>> {
    let build = built(program, false, OptimizerKind::Sgd);
    let mut machine = Machine::new(&build, program, setting(SGD, &weight));
    machine.run(1);
    machine.gradients()
}

#[test]
fn the_gradient_is_that_of_finite_differences() {
    by_differences(&flush(1, 2, false));
}

/// The table's gradient is the sum of both ends'.
#[test]
fn the_gradient_of_a_tied_table_is_that_of_finite_differences() {
    by_differences(&tied(flush(1, 2, false)));
}

fn by_differences(program: &Program) {
    let build = built(program, false, OptimizerKind::Sgd);
    let gradients = gradients(program);
    assert_eq!(gradients.len(), 2 + 2 * 12 + 3 - usize::from(program.tied));
    let mut random = Random(7);
    for (name, gradient) in &gradients {
        let largest = gradient.iter().fold(0.0f64, |a, g| a.max(g.abs()));
        assert!(largest > 1e-4, "{name}: a gradient of {largest} checks nothing");
        // Three elements, then all of them along a random direction.
        let mut directions: Vec<Vec<f64>> = Vec::new();
        for _ in 0..3 {
            let mut unit = vec![0.0; gradient.len()];
            unit[(random.next() % gradient.len() as u64) as usize] = 1.0;
            directions.push(unit);
        }
        directions.push(gradient.iter().map(|_| random.uniform()).collect());
        for direction in directions {
            let h = 1e-4;
            let moved = |by: f64| {
                let at = |n: &str, e: u64| weight(n, e) + if n == name { by * direction[e as usize] } else { 0.0 };
                loss(&build, program, &at)
            };
            let numeric = (moved(h) - moved(-h)) / (2.0 * h);
            let exact: f64 = gradient.iter().zip(&direction).map(|(g, d)| g * d).sum();
            // The loss's scale is an f32: 6e-8 relative.
            let error = (numeric - exact).abs();
            assert!(error < 2e-7 * (1.0 + exact.abs()), "{name}: {exact} by the derivative, {numeric} by differences");
        }
    }
}

/// Both ends sum apart, wherever they are, and both copies make the same updates: losses and weights do not depend on the cut.
#[test]
fn a_tied_table_is_updated_alike_on_every_cut() {
    let lion = Optimizer::Lion { beta1: 0.9, beta2: 0.99, decay: 0.1 };
    for (optimizer, dtype) in [(ADAMW, Dtype::F32), (SGD, Dtype::F32), (lion, Dtype::F32), (ADAMW, Dtype::Bf16)] {
        let trained = |program: Program| {
            let program = tied(program);
            let build = built_of(dtype, &program, true, optimizer.kind());
            let mut machine = Machine::new(&build, &program, setting(optimizer, &weight));
            machine.run(3);
            assert!(machine.copies_agree(), "{:?}", program.rank_of_stage);
            let mut losses: Vec<(u64, f64)> = machine.losses.clone().into_iter().collect();
            losses.sort_by_key(|(mb, _)| *mb);
            (losses, machine.weights())
        };
        let reference = trained(flush(1, 3, false));
        assert!(!reference.1.contains_key("head.weight") && reference.1["embed.tok"][0] != weight("embed.tok", 0));
        for program in [
            flush(2, 3, false),
            flush(3, 3, true),
            flush(4, 3, false),
            on_ranks(&[0, 1, 1, 0], 2, 3, false),
            on_ranks(&[0, 1, 1, 0], 2, 3, true),
            on_ranks(&[0, 0, 0], 1, 3, false),
        ] {
            let ranks = program.rank_of_stage.clone();
            assert!(trained(program) == reference, "{optimizer:?}, {dtype:?}, stages on {ranks:?}");
        }
    }
}

/// Every stage's update reads the sum of all stages' squares, wherever they are; a tied table's gradient is in it once.
#[test]
fn a_global_norm_scales_alike_on_every_cut() {
    for is_tied in [false, true] {
        let trained = |program: Program, clips: bool| {
            let program = if is_tied { tied(program) } else { program };
            let program = if clips { normed(program) } else { program };
            let build = built(&program, true, SGD.kind());
            let mut machine = Machine::new(&build, &program, setting(SGD, &weight));
            machine.run(3);
            machine.weights()
        };
        let reference = trained(flush(1, 3, false), true);
        assert!(reference != trained(flush(1, 3, false), false), "the norm is above the bound");
        for program in [
            flush(2, 3, false),
            flush(3, 3, true),
            flush(4, 3, false),
            on_ranks(&[0, 1, 1, 0], 2, 3, false),
            on_ranks(&[0, 1, 0, 1], 2, 3, true),
            on_ranks(&[0, 0, 1, 1], 2, 3, true),
            on_ranks(&[0, 0, 0], 1, 3, false),
        ] {
            let ranks = program.rank_of_stage.clone();
            assert!(trained(program, true) == reference, "tied: {is_tied}, stages on {ranks:?}");
        }
    }
}

/// Fusing takes an accumulator from every other parameter, and from none of the table's two ends.
#[test]
fn a_tied_table_always_has_two_accumulators() {
    let table = u64::from(4 * DIMS.vocab * DIMS.width).next_multiple_of(64);
    for (program, gradients, received) in [
        (flush(1, 1, false), vec![2 * table], 0),
        (flush(2, 1, false), vec![table, table], table),
        (flush(3, 1, false), vec![table, 0, table], table),
        (on_ranks(&[0, 1, 1, 0], 2, 1, false), vec![2 * table, 0], 0),
    ] {
        let program = tied(program);
        let of = |tied: bool| {
            let build = built(&Program { tied, ..program.clone() }, true, OptimizerKind::AdamW);
            build.memory.iter().map(|m| (m.gradients, m.communication)).unzip::<u64, u64, Vec<_>, Vec<_>>()
        };
        let (tied, own) = (of(true), of(false));
        assert_eq!(tied.0, gradients);
        assert!(own.0.iter().all(|bytes| *bytes == 0));
        let more: Vec<u64> = tied.1.iter().zip(&own.1).map(|(with, without)| with - without).collect();
        assert_eq!(more, gradients.iter().map(|g| if *g > 0 { received } else { 0 }).collect::<Vec<_>>());
        let build = built(&program, true, OptimizerKind::AdamW);
        let why: Vec<&str> = build.stages.iter().flat_map(|s| &s.params).filter_map(|p| p.unfused.as_deref()).collect();
        assert!(!why.is_empty() && why.iter().all(|why| why.contains("tied")), "{why:?}");
    }
}

#[test]
fn every_cut_and_order_gives_the_same_gradient() {
    let reference = gradients(&flush(1, 3, false));
    for program in [
        flush(2, 3, false),
        flush(3, 3, false),
        flush(4, 3, false),
        flush(1, 3, true),
        flush(3, 3, true),
        on_ranks(&[0, 1, 1, 0], 2, 3, false),
        on_ranks(&[0, 1, 1, 0], 2, 3, true),
    ] {
        assert!(gradients(&program) == reference, "{:?} stages differ", program.rank_of_stage);
    }
}

#[test]
fn a_fused_update_is_the_unfused_one() {
    let lion = Optimizer::Lion { beta1: 0.9, beta2: 0.99, decay: 0.1 };
    let adan = Optimizer::Adan { beta1: 0.98, beta2: 0.92, beta3: 0.99, eps: 1e-8, decay: 0.1 };
    for optimizer in [ADAMW, SGD, lion, adan] {
        let kind = optimizer.kind();
        for (stages, k, split) in [(1, 1, false), (2, 1, false), (2, 3, false), (2, 3, true), (3, 1, true)] {
            let program = flush(stages, k, split);
            let trained = |fuse: bool| {
                let build = built(&program, fuse, kind);
                assert_eq!(build.memory[0].gradients == 0, fuse && k == 1);
                let mut machine = Machine::new(&build, &program, setting(optimizer, &weight));
                machine.run(3);
                machine.weights()
            };
            let (fused, unfused) = (trained(true), trained(false));
            assert!(fused == unfused, "{optimizer:?}, {stages} stages, accumulate {k}, split {split}");
            assert!(fused["head.weight"].iter().all(|w| w.is_finite()));
            assert!(fused["block.0.ln1.gain"][0] != weight("block.0.ln1.gain", 0));
        }
    }
}

/// The interpreter doesn't round, so what bf16 changes is where things lie: the same gradients come of buffers half as large, products
/// read copies that follow the weights, and fused or not, the updates write them.
#[test]
fn in_bf16_it_is_the_same_computation() {
    for (stages, k, split) in [(1, 1, false), (2, 3, false), (3, 2, true)] {
        let program = flush(stages, k, split);
        let trained = |dtype: Dtype, fuse: bool| {
            let build = built_of(dtype, &program, fuse, ADAMW.kind());
            let copied = build.stages.iter().flat_map(|s| &s.params).filter(|p| p.copy.is_some()).count();
            // Four products a block, and the head.
            assert_eq!(copied, if dtype == Dtype::Bf16 { 9 } else { 0 });
            let mut machine = Machine::new(&build, &program, setting(ADAMW, &weight));
            machine.run(3);
            machine.weights()
        };
        let reference = trained(Dtype::F32, true);
        for fuse in [true, false] {
            assert!(trained(Dtype::Bf16, fuse) == reference, "{stages} stages, accumulate {k}, fuse {fuse}");
        }
    }
}
