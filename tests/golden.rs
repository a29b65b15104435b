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
        let model = &self.0["model"];
        let _ = writeln!(
            text,
            "model gpt {{ layers = {}, width = {}, heads = {}, context = {}, vocab = {} }}\nmachine {{ ranks = {ranks} }}",
            model["layers"], model["width"], model["heads"], model["context"], model["vocab"]
        );
        let pipeline = &self.0["pipeline"];
        let partition = pipeline["partition"].as_str().unwrap_or("balanced");
        let _ = writeln!(
            text,
            "pipeline {{ schedule = {schedule}, partition = {partition}, microbatch = {}, accumulate = {} }}",
            pipeline["microbatch"], pipeline["accumulate"]
        );
        let _ = writeln!(text, "optimizer = {}", self.optimizer());
        text
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
        match o["kind"].as_str() {
            Some("sgd") => format!("sgd {{ lr = {lr}, momentum = {}, decay = {} }}", o["momentum"], o["decay"]),
            _ => format!(
                "adamw {{ lr = {lr}, betas = ({}, {}), eps = {}, decay = {} }}",
                o["beta1"], o["beta2"], o["eps"], o["decay"]
            ),
        }
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

fn synchronous(name: &str) {
    let golden = Golden::read(name);
    let project = Project::new(&golden.spec("one_f_one_b", 1));
    golden.compare(&project.train("spec.pace", 20, &[]).losses);
}

#[test]
fn adamw_equals_pytorch() {
    synchronous("adamw");
}

#[test]
fn sgd_with_momentum_equals_pytorch() {
    synchronous("sgd");
}

/// Width 45, context 19, three sequences: nothing that a tile divides; and a learning rate that changes.
#[test]
fn odd_shapes_equal_pytorch() {
    synchronous("odd");
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
