//! Library schedules on the builds made for them, against PyTorch's losses (tests/golden, by scripts/golden.py): plan, graph, derivative,
//! memory and calls together, with the interpreter in place of compiled kernels. What is left to compare is rounding.

use crate::machine::{Machine, Setting};
use artifact::program::{Correction, DataShape, Group, LearningRate, Manifest, Optimizer, Proved, Selector};
use artifact::stream::Program;
use dsl::spec::{At, Dtype, Partition, Products, Recompute, Weights};
use model::build::{Build, Input, build};
use model::dims::Dims;
use model::kernel::{OptimizerKind, UpdateRule};
use model::partition::partition;
use model::rules::Rules;
use model::target::CpuClass;
use model::verify::verify;
use serde_json::Value;

/// A golden file.
struct Golden {
    json: Value,
    dims: Dims,
    tokens: Vec<u8>,
}

impl Golden {
    fn read(name: &str) -> Golden {
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../../");
        let text = std::fs::read_to_string(format!("{root}tests/golden/{name}.json")).expect("a golden file");
        let json: Value = serde_json::from_str(&text).expect("JSON");
        let tokens = std::fs::read(format!("{root}{}", json["data"].as_str().unwrap())).expect("its data");
        let size = |key: &str| json["model"][key].as_u64().unwrap() as u32;
        let microbatch = json["pipeline"]["microbatch"].as_u64().unwrap() as u32;
        let [layers, width, heads, context, vocab] = ["layers", "width", "heads", "context", "vocab"].map(size);
        Golden {
            dims: Dims { layers, width, heads, context, vocab, microbatch, dtype: Dtype::F32, tied: false },
            json,
            tokens,
        }
    }

    fn accumulate(&self) -> u32 {
        self.json["pipeline"]["accumulate"].as_u64().unwrap() as u32
    }

    fn optimizer(&self) -> (Optimizer, OptimizerKind) {
        let number = |key: &str| self.json["optimizer"][key].as_f64().unwrap();
        let decay = number("decay");
        if self.json["optimizer"]["kind"] == "sgd" {
            return (Optimizer::Sgd { momentum: number("momentum"), decay }, OptimizerKind::Sgd);
        }
        let (beta1, beta2, eps) = (number("beta1"), number("beta2"), number("eps"));
        (Optimizer::AdamW { beta1, beta2, eps, decay }, OptimizerKind::AdamW)
    }

    fn learning_rate(&self, update: u64) -> f64 {
        let lr = &self.json["optimizer"]["lr"];
        let Some(peak) = lr["peak"].as_f64() else { return lr.as_f64().unwrap() };
        let [warmup, total, floor] = ["warmup", "total", "floor"].map(|key| lr[key].as_f64().unwrap());
        let u = update as f64;
        if u < warmup {
            return peak * (u + 1.0) / warmup;
        }
        let part = ((u - warmup) / (total - warmup)).min(1.0);
        floor + (peak - floor) * (1.0 + (std::f64::consts::PI * part).cos()) / 2.0
    }

    fn seed(&self) -> u64 {
        self.json["seed"].as_u64().unwrap()
    }

    /// Inputs and targets of a micro-batch.
    fn data(&self, mb: u64) -> (Vec<f64>, Vec<f64>) {
        let context = u64::from(self.dims.context);
        let sequences = (0..u64::from(self.dims.microbatch)).map(|row| mb * u64::from(self.dims.microbatch) + row);
        let start = |q: u64| draw(self.seed(), "data", q) % (self.tokens.len() as u64 - context);
        let starts: Vec<u64> = sequences.map(start).collect();
        let read = |shift: u64| {
            let tokens = starts.iter().flat_map(|s| (0..context).map(move |t| s + t + shift));
            tokens.map(|t| f64::from(self.tokens[t as usize])).collect()
        };
        (read(0), read(1))
    }

    fn weight(&self, name: &str, element: u64) -> f64 {
        let std = match name {
            _ if name.ends_with("gain") => return 1.0,
            _ if name.ends_with("bias") => return 0.0,
            _ if name.ends_with("attn.out.weight") || name.ends_with("mlp.down.weight") => {
                0.02 / f64::from(2 * self.dims.layers).sqrt()
            }
            _ => 0.02,
        };
        let uniform = |i: u64| (draw(self.seed(), name, i) >> 11) as f64 / (1u64 << 53) as f64;
        let (u1, u2) = (1.0 - uniform(2 * element), uniform(2 * element + 1));
        let normal = (-2.0 * u1.ln()).sqrt() * (2.0 * std::f64::consts::PI * u2).cos();
        f64::from((std * normal) as f32)
    }

    /// Mean loss of each of the first `updates` updates, and the largest drift of each stage.
    fn train(&self, schedule: &str, ranks: u32, updates: u64) -> (Vec<f64>, Vec<u64>) {
        self.train_again(schedule, ranks, updates, Recompute::None)
    }

    fn train_again(&self, schedule: &str, ranks: u32, updates: u64, recompute: Recompute) -> (Vec<f64>, Vec<u64>) {
        let program = program(schedule, ranks, self.accumulate(), recompute);
        let (optimizer, kind) = self.optimizer();
        let build = built_as(&self.dims, &program, kind, true, recompute);
        let setting = Setting {
            data: &|mb| self.data(mb),
            weight: &|name, element| self.weight(name, element),
            optimizer,
            learning_rate: &|update| self.learning_rate(update),
        };
        let mut machine = Machine::new(&build, &program, setting);
        machine.run(updates);
        let k = u64::from(self.accumulate());
        let tokens = f64::from(self.accumulate() * self.dims.rows());
        let mean = |u: u64| (u * k..(u + 1) * k).map(|mb| machine.losses[&mb]).sum::<f64>() / tokens;
        ((0..updates).map(mean).collect(), machine.drift_max)
    }

    /// Trains and compares with the losses under `key`.
    fn check(&self, key: &str, schedule: &str, ranks: u32, updates: u64) -> Vec<u64> {
        self.check_again(key, schedule, ranks, updates, Recompute::None)
    }

    fn check_again(&self, key: &str, schedule: &str, ranks: u32, updates: u64, recompute: Recompute) -> Vec<u64> {
        let (losses, drift) = self.train_again(schedule, ranks, updates, recompute);
        let wanted = self.json[key].as_array().unwrap().iter().map(|l| l.as_f64().unwrap());
        for (u, (loss, wanted)) in losses.iter().zip(wanted).enumerate() {
            // Both in f64; the file has nine digits, the loss's scale is an f32.
            let error = (loss / wanted - 1.0).abs();
            assert!(error < 2e-7, "{schedule} on {ranks} ranks, update {u}: {loss}, and PyTorch {wanted}");
        }
        drift
    }
}

fn splitmix(z: u64) -> u64 {
    let z = z.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

fn draw(seed: u64, name: &str, i: u64) -> u64 {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325, step);
    splitmix(splitmix(seed ^ hash).wrapping_add(i))
}

fn program(name: &str, ranks: u32, k: u32, recompute: Recompute) -> Program {
    let schedule = dsl::library::schedule(name).expect("a library schedule");
    // Three layers can be cut into five stages at most.
    let chunks = if ranks == 1 { 3 } else { 2 };
    let policy = plan::policy(&schedule.weights.unwrap_or(Weights::Current), recompute);
    plan::expand(&schedule, plan::Shape { chunks, policy, ..plan::Shape::new(ranks, k) }).expect("a sound schedule")
}

fn built_as(dims: &Dims, program: &Program, optimizer: OptimizerKind, fuse: bool, recompute: Recompute) -> Build {
    let stages = program.rank_of_stage.len() as u32;
    let partition = partition(dims, &At { value: Partition::Balanced, span: 0..0 }, stages).unwrap();
    let rules = &Rules::uniform(UpdateRule::plain(optimizer));
    let (partition, target) = (&partition, CpuClass::X86V4.into());
    let input = Input { dims: *dims, partition, fuse, rules, recompute, products: Products::F32, program, target };
    let build = build(&input);
    verify(&build).unwrap();
    build
}

/// Predictions and compensated gradients, fused and not, with every kind of update: calls and memory hold their invariants, and a selector that is off
/// is found. A stage whose gradients have no delay has the buffers of one without a correction.
#[test]
fn corrections_by_stale_weights_hold_the_invariants() {
    let dims = Golden::read("adamw").dims;
    let partition = partition(&dims, &At { value: Partition::Balanced, span: 0..0 }, 4).unwrap();
    let ahead = Correction::Prediction { ahead: vec![0.75, 0.5, 0.25, 0.0] };
    let some = Correction::DelayCompensation { lambda: vec![1.0, 1.0, 1.0, 0.0] };
    let all = Correction::DelayCompensation { lambda: vec![1.0; 4] };
    for (weights, correction, copies) in [
        (Weights::Predict { tau: None }, ahead, [2, 2, 2, 1]),
        (Weights::Stash, some, [2, 2, 2, 1]),
        (Weights::DoubleBuffer, all, [2; 4]),
    ] {
        let policy = plan::policy(&weights, Recompute::None);
        let schedule = dsl::library::schedule("async_1f1b").unwrap();
        let program = &plan::expand(&schedule, plan::Shape { policy, ..plan::Shape::new(4, 4) }).unwrap();
        for (optimizer, fuse) in [("adamw", true), ("adan", false), ("muon", true), ("soap", true)] {
            let text = format!(
                "machine {{ ranks = 4 }}\npipeline {{ schedule = async_1f1b, accumulate = 4 }}\noptimizer = {optimizer}"
            );
            let rules = &Rules::of_spec(&dsl::load(&text, &[]).0.expect("a spec"), Some(&correction));
            let (partition, target, recompute) = (&partition, CpuClass::X86V4.into(), Recompute::None);
            let input = Input { dims, partition, fuse, rules, recompute, products: Products::F32, program, target };
            let mut build = build(&input);
            assert_eq!(verify(&build), Ok(()), "{weights:?} {optimizer}");
            let slots = build.stages.iter().map(|s| s.params[0].weight.slots);
            assert!(slots.eq(copies), "{weights:?} {optimizer}");
            let reads = build.stages[0].bodies.f.iter_mut().flat_map(|call| &mut call.args);
            reads.filter(|arg| arg.slots == 2 && !arg.by.is_microbatch()).for_each(|arg| arg.by = Selector::Microbatch);
            assert!(verify(&build).is_err(), "{weights:?} {optimizer}");
        }
    }
}

#[test]
fn synchronous_training_is_pytorchs() {
    assert_eq!(Golden::read("odd").check("losses_f64", "one_f_one_b", 1, 10), [0]);
    assert_eq!(Golden::read("adamw").check("losses_f64", "one_f_one_b", 4, 3), [0; 4]);
    assert_eq!(Golden::read("adamw").check("losses_f64", "interleaved_1f1b", 2, 3), [0; 4]);
    assert_eq!(Golden::read("adamw").check("losses_f64", "zb_v", 2, 3), [0; 4]);
    assert_eq!(Golden::read("sgd").check("losses_f64", "gpipe", 2, 3), [0; 2]);
}

#[test]
fn asynchronous_training_is_the_emulators() {
    for (name, updates) in [("async_k1", 6), ("async_sgd", 6), ("async_k4", 3)] {
        let golden = Golden::read(name);
        let drift = golden.check("losses_f64", "async_1f1b", 4, updates);
        let wanted: Vec<u64> =
            golden.json["drift_max"].as_array().unwrap().iter().map(|d| d.as_u64().unwrap()).collect();
        assert_eq!(drift, wanted, "{name}");
        golden.check("losses_flush_f64", "gpipe", 1, 2);
    }
}

/// PipeDream and PipeDream-2BW against an emulator that keeps every version of each stage.
#[test]
fn older_versions_of_the_weights_are_the_emulators() {
    for (name, schedule, updates) in
        [("stash_k1", "pipedream", 6), ("stash_k2", "pipedream", 4), ("double_buffer_k3", "pipedream_2bw", 3)]
    {
        assert_eq!(Golden::read(name).check("losses_f64", schedule, 4, updates), [0; 4], "{name}");
    }
}

/// Each stage's backward pass runs its forward pass again with the weights as they are: no drift, and the emulator's losses.
#[test]
fn recomputed_activations_are_the_emulators() {
    let golden = Golden::read("recompute_k1");
    assert_eq!(golden.check_again("losses_f64", "async_1f1b", 4, 6, Recompute::Full), [0; 4]);
    assert_eq!(Golden::read("stash_k2").check_again("losses_f64", "pipedream", 4, 3, Recompute::Full), [0; 4]);
    // Attention reads no weights: computed again it is as it was.
    let (name, recompute) = ("async_k1", Recompute::Attention);
    assert_eq!(Golden::read(name).check_again("losses_f64", "async_1f1b", 4, 4, recompute), [3, 2, 1, 0]);
}

/// Where no update lies between, computing again gives the same bits.
#[test]
fn recomputation_changes_no_bit_of_a_synchronous_run() {
    let golden = Golden::read("odd");
    let reference = golden.train("gpipe", 1, 2).0;
    for recompute in [Recompute::Attention, Recompute::Full] {
        for (schedule, ranks) in [("gpipe", 1), ("one_f_one_b", 3), ("interleaved_1f1b_torch", 2), ("looped_bfs", 1)] {
            let (losses, drift) = golden.train_again(schedule, ranks, 2, recompute);
            assert_eq!(losses, reference, "{recompute:?}, {schedule} on {ranks} ranks");
            assert!(drift.iter().all(|d| *d == 0));
        }
    }
}

/// To the byte: what is kept from F to B is one word for the version, or attention's share less.
#[test]
fn what_is_computed_again_is_not_kept() {
    let golden = Golden::read("adamw");
    let built = |recompute| {
        let program = program("one_f_one_b", 4, golden.accumulate(), recompute);
        let build = built_as(&golden.dims, &program, OptimizerKind::AdamW, true, recompute);
        (program, build.memory)
    };
    let (program, none) = built(Recompute::None);
    let (rows, width, heads) =
        (u64::from(golden.dims.rows()), u64::from(golden.dims.width), u64::from(golden.dims.heads));
    let (attention, full) = (built(Recompute::Attention).1, built(Recompute::Full).1);
    for rank in 0..4 {
        let slots = u64::from(program.rings[rank].stash);
        assert_eq!(full[rank].stash, 64 * slots);
        // A block a rank.
        assert_eq!(none[rank].stash - attention[rank].stash, slots * 4 * rows * (width + heads));
        let others = |m: &artifact::program::Memory| (m.weights, m.optimizer, m.gradients, m.communication);
        assert_eq!(others(&full[rank]), others(&none[rank]));
    }
    assert!(full[0].total < none[0].total && attention[0].total < none[0].total);
}

/// What 2BW reads is fixed by the micro-batch: the losses are the same however the model is cut.
#[test]
fn a_double_buffer_gives_the_same_losses_on_any_number_of_ranks() {
    let golden = Golden::read("odd");
    let reference = golden.train("pipedream_2bw", 1, 3).0;
    for ranks in [2, 3] {
        assert_eq!(golden.train("pipedream_2bw", ranks, 3).0, reference, "{ranks} ranks");
    }
}

#[test]
fn a_bundle_of_it_is_well_formed() {
    let cases = [
        ("async_1f1b", 4, true),
        ("one_f_one_b", 2, false),
        ("gpipe", 1, true),
        ("interleaved_1f1b", 2, true),
        ("zb_v", 2, false),
        ("looped_bfs", 1, true),
        ("pipedream", 4, true),
        ("pipedream_2bw", 2, false),
    ];
    for (schedule, ranks, fuse) in cases {
        let golden = Golden::read("adamw");
        let recompute = if fuse { Recompute::Full } else { Recompute::None };
        let program = program(schedule, ranks, golden.accumulate(), recompute);
        let (optimizer, kind) = golden.optimizer();
        let build = built_as(&golden.dims, &program, kind, fuse, recompute);
        let Dims { microbatch, context, vocab, .. } = golden.dims;
        let (count, stages) = (ranks as usize, build.stages.len());
        let manifest = Manifest {
            source_name: String::new(),
            source: String::new(),
            cpu: CpuClass::X86V4.name().into(),
            llvm: String::new(),
            data: DataShape { microbatch, context, vocab },
            groups: vec![Group { optimizer, learning_rate: LearningRate::Constant { lr: 1e-3 } }],
            correction: None,
            boundary: None,
            program,
            stages: build.stages,
            memory: build.memory,
            kernels: build.entries,
            proved: Proved { drift_max: vec![0; stages], delay_max: vec![0; stages], bubble: vec![0.0; count] },
            tuning: None,
        };
        assert_eq!(artifact::structure::manifest(&manifest), Ok(()));
    }
}

#[test]
fn synchronous_schedules_give_the_same_losses_on_any_number_of_ranks() {
    let golden = Golden::read("odd");
    let reference = golden.train("gpipe", 1, 2).0;
    let linear = [("gpipe", 2), ("gpipe", 3), ("one_f_one_b", 1), ("one_f_one_b", 2), ("one_f_one_b", 3)];
    let split = [("zb_h1", 1), ("zb_h1", 2), ("zb_h2", 3)];
    // On one rank all stages hand over, on two none do but the wave's middle.
    let chunked = [
        ("interleaved_1f1b", 1),
        ("interleaved_1f1b_torch", 2),
        ("looped_bfs", 1),
        ("looped_bfs", 2),
        ("interleaved_zb", 1),
        ("zb_v", 1),
        ("zb_v", 2),
        ("v_half", 2),
        ("v_min", 2),
        ("dualpipe_v", 1),
    ];
    for (schedule, ranks) in linear.into_iter().chain(split).chain(chunked) {
        assert_eq!(golden.train(schedule, ranks, 2).0, reference, "{schedule} on {ranks} ranks");
    }
}
