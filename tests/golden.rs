//! Losses against PyTorch: the files in `golden/` were written by `scripts/golden.py`, which shares no code with the
//! product: synchronous training by autograd, asynchronous training by an event list and a backward pass of its own.

use crate::harness::Project;
use serde_json::Value;
use std::fmt::Write;

struct Golden(Value);

impl Golden {
    fn read(name: &str) -> Golden {
        let path = format!("{}/tests/golden/{name}.json", env!("CARGO_MANIFEST_DIR"));
        Golden(serde_json::from_str(&std::fs::read_to_string(path).expect("a golden file")).expect("JSON"))
    }

    /// The case as a spec.
    fn spec(&self, schedule: &str, ranks: u64) -> String {
        let mut text = String::new();
        let model = self.0["model"].as_object().expect("keys");
        let keys: Vec<String> = model.iter().map(|(key, value)| format!("{key} = {}", word(value))).collect();
        let _ = writeln!(text, "model gpt {{ {} }}\nmachine {{ ranks = {ranks} }}", keys.join(", "));
        let pipeline = &self.0["pipeline"];
        let partition = pipeline["partition"].as_str().unwrap_or("balanced");
        let boundary = pipeline.get("boundary").map(|n| format!(", boundary = every {n} updates")).unwrap_or_default();
        let _ = writeln!(
            text,
            "pipeline {{ schedule = {schedule}, partition = {partition}, microbatch = {}, accumulate = {}{boundary} }}",
            pipeline["microbatch"], pipeline["accumulate"]
        );
        let _ = writeln!(text, "optimizer = {}", self.optimizer());
        let mut staleness = String::new();
        if let Some((name, keys)) = self.correction() {
            let keys: Vec<String> = keys.iter().map(|(key, value)| format!("{key} = {}", word(value))).collect();
            let _ = writeln!(staleness, "correction = {name} {{ {} }}", keys.join(", "));
        }
        if let Some(weights) = self.0.get("weights") {
            let _ = writeln!(staleness, "weights = {}", weights.as_str().expect("a policy"));
        }
        text + &format!("staleness {{ {staleness} }}\n")
    }

    /// The correction's name and keys.
    fn correction(&self) -> Option<(&'static str, &serde_json::Map<String, Value>)> {
        let keys = |name| Some((name, self.0["optimizer"].get(name)?.as_object()?));
        ["error_feedback", "nesterov", "pipemare", "dc_asgd"].into_iter().find_map(keys)
    }

    fn optimizer(&self) -> String {
        let o = &self.0["optimizer"];
        let lr = match &o["lr"] {
            Value::Object(lr) => format!(
                "cosine({}, warmup = {}, total = {}, floor = {})",
                lr["peak"], lr["warmup"], lr["total"], lr["floor"]
            ),
            lr => lr.to_string(),
        };
        let mut text = format!("{} {{ lr = {lr}", o["kind"].as_str().expect("a name"));
        let betas: Vec<String> =
            ["beta1", "beta2", "beta3"].iter().filter_map(|beta| o.get(beta)).map(Value::to_string).collect();
        if !betas.is_empty() {
            let _ = write!(text, ", betas = ({})", betas.join(", "));
        }
        for key in ["momentum", "eps", "momentum_decay", "decay"] {
            if let Some(value) = o.get(key) {
                let _ = write!(text, ", {key} = {value}");
            }
        }
        if let Some(clip) = o.get("clip") {
            let _ = write!(text, ", clip = global({})", clip["global"]);
        }
        text + " }"
    }

    fn updates(&self) -> u64 {
        self.0["updates"].as_u64().expect("a number")
    }

    fn numbers(&self, key: &str) -> Vec<f64> {
        self.0[key].as_array().expect("a list").iter().map(|v| v.as_f64().expect("a number")).collect()
    }

    /// Fails where a loss is off by more than the file's tolerance, relative.
    fn compare(&self, losses: &[f64]) {
        let expected = self.numbers("losses");
        assert_eq!(losses.len(), expected.len());
        let tolerance = self.0["tolerance"].as_f64().expect("a number");
        for (update, (&got, &want)) in losses.iter().zip(&expected).enumerate() {
            assert!(((got - want) / want).abs() <= tolerance, "update {update}: {got}, and PyTorch has {want}");
        }
    }
}

/// As a spec writes it.
fn word(value: &Value) -> String {
    match value {
        Value::Bool(on) => if *on { "on" } else { "off" }.into(),
        other => other.to_string(),
    }
}

fn synchronous(name: &str) {
    let golden = Golden::read(name);
    let project = Project::new(&golden.spec("one_f_one_b", 1));
    golden.compare(&project.train("spec.pace", golden.updates(), &[]).losses);
}

#[test]
fn adamw_equals_pytorch() {
    synchronous("adamw");
}

#[test]
fn sgd_with_momentum_equals_pytorch() {
    synchronous("sgd");
}

#[test]
fn nadam_equals_pytorch() {
    synchronous("nadam");
}

#[test]
fn lion_follows_its_authors_formula() {
    synchronous("lion");
}

#[test]
fn signum_follows_its_authors_formula() {
    synchronous("signum");
}

#[test]
fn adan_follows_its_authors_formula() {
    synchronous("adan");
}

/// Width 45, context 19, three sequences: nothing that a tile divides; and a learning rate that changes.
#[test]
fn odd_shapes_equal_pytorch() {
    synchronous("odd");
}

/// The table learns from both its ends, on one rank and exchanged between two.
#[test]
fn a_tied_head_equals_pytorch() {
    let golden = Golden::read("tied");
    for (schedule, ranks) in [("gpipe", 1), ("zb_h1", 2)] {
        let project = Project::new(&golden.spec(schedule, ranks));
        golden.compare(&project.train("spec.pace", golden.updates(), &[]).losses);
    }
}

/// One norm of all stages' gradients, a tied table's counted once: on one rank, exchanged between ranks, and in place between a rank's stages.
#[test]
fn a_global_norm_equals_pytorch() {
    let golden = Golden::read("clipped");
    for (schedule, ranks) in [("gpipe", 1), ("one_f_one_b", 3), ("interleaved_1f1b", 1)] {
        let project = Project::new(&golden.spec(schedule, ranks));
        golden.compare(&project.train("spec.pace", golden.updates(), &[]).losses);
    }
}

fn asynchronous(name: &str) {
    let golden = Golden::read(name);
    let ranks = golden.0["pipeline"]["ranks"].as_u64().expect("a number");
    let project = Project::new(&golden.spec("async_1f1b", ranks));
    let trained = project.train("spec.pace", 20, &[]);
    golden.compare(&trained.losses);
    let drift: Vec<f64> =
        trained.summary["stages"].as_array().unwrap().iter().map(|s| s["drift_max_seen"].as_f64().unwrap()).collect();
    assert_eq!(drift, golden.numbers("drift_max"), "counted drift by stage");
    assert_eq!(trained.drift_max_seen as f64, drift[0]);
    let flush = golden.numbers("losses_flush_f64");
    let apart = trained.losses.iter().zip(&flush).map(|(a, b)| ((a - b) / b).abs()).fold(0.0, f64::max);
    assert!(apart > 20.0 * golden.0["tolerance"].as_f64().unwrap(), "no different from a flush schedule: {apart}");
}

#[test]
fn every_micro_batch_an_update_asynchronously() {
    asynchronous("async_k1");
}

#[test]
fn four_micro_batches_an_update_asynchronously() {
    asynchronous("async_k4");
}

#[test]
fn sgd_asynchronously() {
    asynchronous("async_sgd");
}

/// PipeDream and PipeDream-2BW against the emulator, which keeps every version that a stage has had.
fn by_policy(name: &str, schedule: &str, versions: [u64; 4], delays: [u64; 4]) {
    let golden = Golden::read(name);
    let project = Project::new(&golden.spec(schedule, 4));
    let report: Value = serde_json::from_str(&project.output(&["check", "spec.pace", "--format", "json"])).unwrap();
    let trained = project.train("spec.pace", golden.updates(), &[]);
    golden.compare(&trained.losses);
    for (s, proved) in report["stages"].as_array().unwrap().iter().enumerate() {
        let seen = &trained.summary["stages"][s];
        assert_eq!(proved["versions_live"], versions[s], "stage {s}");
        assert_eq!((&seen["drift_max_seen"], &proved["drift"]["max"]), (&0.into(), &0.into()), "stage {s}");
        assert_eq!((&seen["delay_max_seen"], &proved["delay"]["max"]), (&delays[s].into(), &delays[s].into()));
        let allocated = &trained.summary["ranks"][s]["allocated_bytes"];
        assert_eq!(allocated, &report["ranks"][s]["memory"]["total"]);
    }
}

#[test]
fn a_stash_equals_the_emulator() {
    by_policy("stash_k1", "pipedream", [4, 3, 2, 1], [3, 2, 1, 0]);
    by_policy("stash_k2", "pipedream", [3, 2, 2, 1], [2, 1, 1, 0]);
}

#[test]
fn a_double_buffer_equals_the_emulator() {
    by_policy("double_buffer_k3", "pipedream_2bw", [2; 4], [1; 4]);
    by_policy("double_buffer_k4", "pipedream_2bw", [2; 4], [1; 4]);
}

/// Gradients moved on to the weights as they are; no buffer is added.
#[test]
fn compensated_gradients_equal_the_emulator() {
    by_policy("stash_dc", "pipedream", [4, 3, 2, 1], [3, 2, 1, 0]);
    by_policy("double_buffer_dc", "pipedream_2bw", [2; 4], [1; 4]);
}

/// A drain changes nothing that a double buffer reads, so what its updates are corrected for goes on over drains.
#[test]
fn error_feedback_of_a_double_buffer_goes_on_over_drains() {
    by_policy("double_buffer_ef", "pipedream_2bw", [2; 4], [1; 4]);
}

/// Forward passes read a copy ahead, on the stages with drift; one copy more of their weights is all it takes.
fn predicted(name: &str, more: &[&str]) {
    let golden = Golden::read(name);
    let spec = golden.spec("async_1f1b", 4);
    let (project, once) = (Project::new(&spec), Project::new(&spec.replace("weights = ", "// ")));
    let report = |p: &Project, more: &[&str]| -> Value {
        let all = [&["check", "spec.pace", "--format", "json"], more].concat();
        serde_json::from_str(&p.output(&all)).expect("JSON")
    };
    let (once, report) = (report(&once, more), report(&project, more));
    let trained = project.train("spec.pace", golden.updates(), more);
    golden.compare(&trained.losses);
    for (s, wanted) in golden.numbers("drift_max").into_iter().enumerate() {
        let (seen, proved) = (&trained.summary["stages"][s], &report["stages"][s]);
        assert_eq!(seen["drift_max_seen"].as_f64(), Some(wanted), "stage {s}");
        assert_eq!(
            (&seen["drift_max_seen"], &seen["delay_max_seen"]),
            (&proved["drift"]["max"], &proved["delay"]["max"])
        );
        let copies = 1 + u64::from(wanted > 0.0);
        assert_eq!(proved["versions_live"], copies);
        let bytes = |report: &Value, of: &str| report["ranks"][s]["memory"][of].as_u64().expect("a number");
        assert_eq!(bytes(&report, "weights"), copies * bytes(&once, "weights"));
        assert_eq!(bytes(&report, "optimizer"), bytes(&once, "optimizer"));
        assert_eq!(trained.summary["ranks"][s]["allocated_bytes"], report["ranks"][s]["memory"]["total"]);
    }
}

#[test]
fn predicted_weights_equal_the_emulator() {
    predicted("predict_k1", &["--set", "pipeline.fuse=off"]);
    predicted("predict_k4", &[]);
}

#[test]
fn weights_predicted_over_a_given_time_equal_the_emulator() {
    predicted("predict_tau", &[]);
}

/// PACI that keeps no activations: the forward pass runs again with the weights as they are, so nothing drifts. Only the version's word is
/// stashed, and the delay remains.
#[test]
fn recomputed_activations_equal_the_emulator() {
    let golden = Golden::read("recompute_k1");
    let project = Project::new(&golden.spec("async_1f1b", 4).replace("pipeline {", "pipeline { recompute = full,"));
    let report: Value = serde_json::from_str(&project.output(&["check", "spec.pace", "--format", "json"])).unwrap();
    let trained = project.train("spec.pace", 20, &[]);
    golden.compare(&trained.losses);
    for s in 0..4 {
        let (seen, proved) = (&trained.summary["stages"][s], &report["stages"][s]);
        assert_eq!((&seen["drift_max_seen"], &proved["drift"]["max"]), (&0.into(), &0.into()));
        let delay = (3 - s as u64).into();
        assert_eq!((&seen["delay_max_seen"], &proved["delay"]["max"]), (&delay, &delay));
        let memory = &report["ranks"][s]["memory"];
        assert_eq!(trained.summary["ranks"][s]["allocated_bytes"], memory["total"]);
        assert_eq!(memory["stash"], 64 * (4 - s as u64));
    }
}

/// An asynchronous run whose updates are corrected for their delay, with so many buffers of the optimizer's beside each weight, by rank.
fn corrected(name: &str, states: [u64; 4]) {
    let golden = Golden::read(name);
    let project = Project::new(&golden.spec("async_1f1b", 4));
    let report = project.output(&["check", "spec.pace", "--format", "json"]);
    let report: Value = serde_json::from_str(&report).expect("JSON");
    for (rank, states) in report["ranks"].as_array().expect("ranks").iter().zip(states) {
        let bytes = |region: &str| rank["memory"][region].as_u64().expect("a number");
        assert_eq!(bytes("optimizer"), states * bytes("weights"), "{name}");
    }
    let trained = project.train("spec.pace", golden.updates(), &[]);
    golden.compare(&trained.losses);
    for stage in trained.summary["stages"].as_array().expect("stages") {
        assert_eq!(stage["delay_max_seen"], stage["delay_max_proved"], "{name}: counted and proved delay");
        assert!(stage["delay_max_seen"].is_u64());
    }
}

/// The delay of every stage is proved and uniform.
#[test]
fn error_feedback_equals_the_emulator() {
    corrected("async_ef", [3; 4]);
}

/// With four micro-batches an update the delay is mixed, and given.
#[test]
fn error_feedback_for_a_given_delay_equals_the_emulator() {
    corrected("async_ef_tau", [3; 4]);
}

#[test]
fn nesterov_equals_the_emulator() {
    corrected("async_nesterov", [2; 4]);
}

/// NAdam looks ahead by itself: no buffer is added.
#[test]
fn nesterov_by_stage_equals_the_emulator() {
    corrected("async_nesterov_stages", [2; 4]);
}

#[test]
fn learning_rates_by_delay_equal_the_emulator() {
    corrected("async_pipemare", [2; 4]);
}

/// The last stage has no drift, and no copy for its backward passes.
#[test]
fn backward_passes_with_weights_moved_back_equal_the_emulator() {
    corrected("async_pipemare_behind", [3, 3, 3, 1]);
}
