//! Memory: what `check` prints is what the runtime allocates.

use crate::harness::Project;
use serde_json::Value;

const SPEC: &str = "
model gpt { layers = 3, width = 40, heads = 4, context = 23, vocab = 256 }
machine { ranks = 3 }
pipeline { schedule = async_1f1b, microbatch = 2, accumulate = 2 }
optimizer = adamw { lr = 1e-3 }
";

fn checked(project: &Project, sets: &[&str]) -> Value {
    let args: Vec<&str> = ["check", "spec.pace", "--format", "json"].iter().chain(sets).copied().collect();
    serde_json::from_str(&project.output(&args)).expect("JSON")
}

#[test]
fn the_arena_has_the_size_that_check_prints() {
    let project = Project::new(SPEC);
    for sets in [&[][..], &["--set", "pipeline.accumulate=1"], &["--set", "pipeline.schedule=gpipe"]] {
        let report = checked(&project, sets);
        let trained = project.train("spec.pace", 4, sets);
        for (rank, computed) in report["ranks"].as_array().unwrap().iter().enumerate() {
            let total = computed["memory"]["total"].as_u64();
            assert_eq!(trained.summary["ranks"][rank]["allocated_bytes"].as_u64(), total, "rank {rank} {sets:?}");
            let parts = computed["memory"].as_object().unwrap().iter().filter(|(k, _)| *k != "total");
            assert_eq!(Some(parts.map(|(_, v)| v.as_u64().unwrap()).sum()), total, "the parts add up");
        }
        let drift = |s: &Value| s["drift"]["max"].as_u64();
        for (stage, proved) in report["stages"].as_array().unwrap().iter().enumerate() {
            assert_eq!(trained.summary["stages"][stage]["drift_max_seen"].as_u64(), drift(proved), "{sets:?}");
        }
    }
}

/// Every policy, with one and with several micro-batches an update, fused and not, and two optimizers: the arena has the printed size, weights
/// take their bytes for each version that is kept, and what the run counts is what was proved.
#[test]
fn versions_of_the_weights_are_counted_to_the_byte() {
    let project = Project::new(SPEC);
    let once: Vec<u64> = weights(&checked(&project, &[]));
    for (schedule, accumulate, more, versions) in [
        ("pipedream", 1, "pipeline.fuse=on", [3, 2, 1]),
        ("pipedream", 2, "pipeline.fuse=off", [2, 2, 1]),
        ("pipedream", 1, "optimizer=sgd { lr = 0.1 }", [3, 2, 1]),
        ("pipedream_2bw", 2, "pipeline.fuse=on", [2, 2, 2]),
        ("pipedream_2bw", 3, "pipeline.fuse=off", [2, 2, 2]),
        ("pipedream_2bw", 2, "pipeline.boundary=every 2 updates", [2, 2, 2]),
        ("pipedream", 1, "pipeline.boundary=every 2 updates", [3, 2, 1]),
        // A prediction beside the weights, where there is drift.
        ("async_1f1b", 1, "staleness.weights=predict", [2, 2, 1]),
        ("async_1f1b", 2, "staleness.weights=predict(tau = 0.5)", [2, 2, 1]),
    ] {
        let (k, s) = (format!("pipeline.accumulate={accumulate}"), format!("pipeline.schedule={schedule}"));
        let sets = ["--set", &k, "--set", &s, "--set", more];
        let report = checked(&project, &sets);
        let wanted: Vec<u64> = once.iter().zip(versions).map(|(bytes, n)| bytes * n).collect();
        assert_eq!(weights(&report), wanted, "{sets:?}");
        let trained = project.train("spec.pace", 4, &sets);
        for (i, rank) in report["ranks"].as_array().unwrap().iter().enumerate() {
            assert_eq!(trained.summary["ranks"][i]["allocated_bytes"], rank["memory"]["total"], "rank {i} {sets:?}");
            let (seen, proved) = (&trained.summary["stages"][i], &report["stages"][i]);
            assert_eq!(seen["drift_max_seen"], proved["drift"]["max"], "{sets:?}");
            assert_eq!(seen["delay_max_seen"], proved["delay"]["max"], "{sets:?}");
        }
    }
}

/// Two accumulators of a tied table on every placement, and a receive buffer where its ends are on different ranks.
#[test]
fn a_tied_table_is_counted_to_the_byte() {
    let project = Project::new(SPEC);
    let table = 4 * 256 * 40;
    for (schedule, ranks, more, ends) in [
        ("async_1f1b", 1, "pipeline.accumulate=1", vec![2]),
        ("one_f_one_b", 3, "pipeline.accumulate=1", vec![1, 0, 1]),
        ("one_f_one_b", 2, "pipeline.fuse=off", vec![1, 1]),
        ("zb_h1", 3, "optimizer=muon { clip = per_tensor(1) }", vec![1, 0, 1]),
        ("zb_v", 2, "model.layers=4", vec![2, 0]),
    ] {
        let (s, p) = (format!("pipeline.schedule={schedule}"), format!("machine.ranks={ranks}"));
        let sets = ["--set", "model.tied=on", "--set", &s, "--set", &p, "--set", more];
        let report = checked(&project, &sets);
        let own = checked(&project, &[&["--set", "model.tied=off"], &sets[2..]].concat());
        let trained = project.train("spec.pace", 4, &sets);
        let apart = ranks > 1 && ends[0] == 1;
        for (rank, end) in ends.iter().enumerate() {
            let part = |report: &Value, part: &str| report["ranks"][rank]["memory"][part].as_u64().unwrap();
            let total = &report["ranks"][rank]["memory"]["total"];
            assert_eq!(trained.summary["ranks"][rank]["allocated_bytes"], *total, "rank {rank} {sets:?}");
            let received = part(&report, "communication") - part(&own, "communication");
            assert_eq!(received, if apart { end * table } else { 0 }, "rank {rank} {sets:?}");
            // Where everything is accumulated anyway, the head's accumulator is one of the table's.
            let gradients = if part(&own, "gradients") == 0 { end * table } else { part(&own, "gradients") };
            assert_eq!(part(&report, "gradients"), gradients, "rank {rank} {sets:?}");
            // The head has no weight of its own beside the table.
            let weights = part(&own, "weights") - part(&report, "weights");
            assert_eq!(weights, if *end == 2 { table } else { 0 }, "rank {rank} {sets:?}");
        }
    }
}

/// Two words on each stage of its own, one where the sum and the total are one, none where the sum stays in place.
#[test]
fn a_global_norm_is_counted_to_the_byte() {
    let project = Project::new(SPEC);
    let clip = |norm: &str| format!("optimizer=adamw {{ clip = {norm}(1) }}");
    for (schedule, ranks, words) in [
        ("gpipe", 1, vec![1]),
        ("one_f_one_b", 3, vec![2, 2, 1]),
        // Stages 0 and 3, and 1 and 2, which hand over.
        ("zb_v", 2, vec![3, 2]),
    ] {
        let (s, p) = (format!("pipeline.schedule={schedule}"), format!("machine.ranks={ranks}"));
        let with = |norm: &str| {
            let optimizer = clip(norm);
            let sets = ["--set", &optimizer, "--set", &s, "--set", &p, "--set", "model.layers=4"];
            let trained = project.train("spec.pace", 4, &sets).summary;
            (checked(&project, &sets), trained)
        };
        let ((report, trained), (own, _)) = (with("global"), with("per_tensor"));
        for (rank, words) in words.into_iter().enumerate() {
            let part = |report: &Value, part: &str| report["ranks"][rank]["memory"][part].as_u64().unwrap();
            assert_eq!(trained["ranks"][rank]["allocated_bytes"], report["ranks"][rank]["memory"]["total"]);
            assert_eq!(part(&report, "workspace") - part(&own, "workspace"), 64 * words, "{schedule}, rank {rank}");
            assert_eq!(part(&report, "communication"), part(&own, "communication"), "{schedule}, rank {rank}");
        }
    }
}

/// Optimizers whose updates have temporaries, states of other sizes, and norms over a stage.
#[test]
fn updates_of_many_calls_stay_in_the_arena() {
    let project = Project::new(SPEC);
    for (optimizer, schedule, weights) in [
        ("muon { clip = per_stage(1) }", "async_1f1b", "current"),
        ("soap { frequency = 2, max_dim = 120, clip = per_stage(1) }", "async_1f1b", "double_buffer"),
        ("muon { group head = adan }", "async_1f1b", "predict"),
        (
            "normuon { clip = per_tensor(0.5), group \"*.mlp.*.weight\" = mars, group head = lion }",
            "pipedream",
            "stash",
        ),
    ] {
        let (optimizer, schedule) = (format!("optimizer={optimizer}"), format!("pipeline.schedule={schedule}"));
        let weights = format!("staleness.weights={weights}");
        let sets = ["--set", &optimizer, "--set", &schedule, "--set", &weights];
        let report = checked(&project, &sets);
        let trained = project.train("spec.pace", 4, &sets);
        for (rank, computed) in report["ranks"].as_array().unwrap().iter().enumerate() {
            let total = computed["memory"]["total"].as_u64();
            assert_eq!(trained.summary["ranks"][rank]["allocated_bytes"].as_u64(), total, "rank {rank} {optimizer}");
        }
    }
}

/// bf16: what passes read of the weights, their f32 with the optimizer's states, activations and what is sent, each to the byte; and runs.
#[test]
fn bf16_is_counted_to_the_byte() {
    let project = Project::new(SPEC);
    let bf16 = ["--set", "model.dtype=bf16"];
    let alone = ["--set", "machine.ranks=1", "--set", "pipeline.schedule=gpipe", "--set", "pipeline.accumulate=1"];
    let report = checked(&project, &[&bf16[..], &alone].concat());
    let (width, context, vocab) = (40, 23, 256);
    let align = |bytes: u64| bytes.next_multiple_of(64);
    // Elements by parameter: what products read, and the rest.
    let products = [[3, 1, 4, 4].map(|n| n * width * width); 3].concat();
    let products: Vec<u64> = products.into_iter().chain([width * vocab]).collect();
    let block = [[1, 1, 3, 1, 1, 1, 4, 1].map(|n| n * width); 3].concat();
    let rest: Vec<u64> = block.into_iter().chain([vocab * width, context * width, width, width]).collect();
    let bytes = |list: &[u64], each: u64| list.iter().map(|n| align(each * n)).sum::<u64>();
    let memory = &report["ranks"][0]["memory"];
    assert_eq!(memory["weights"], bytes(&products, 2) + bytes(&rest, 4));
    assert_eq!(memory["optimizer"], bytes(&products, 4) + 2 * (bytes(&products, 4) + bytes(&rest, 4)));
    let (rows, heads) = (2 * context, 4);
    let block =
        5 * align(2 * rows * width) + align(6 * rows * width) + 2 * align(8 * rows * width) + 4 * align(4 * rows);
    let block = block + align(4 * rows * heads);
    let head = align(2 * rows * width) + 2 * align(4 * rows) + align(2 * rows * vocab);
    // The version that F saw, and the block's output that the head reads.
    assert_eq!(memory["stash"], 64 + 3 * block + align(2 * rows * width) + head);
    for more in [
        &["--set", "pipeline.accumulate=1"][..],
        &["--set", "pipeline.schedule=pipedream_2bw", "--set", "pipeline.recompute=full"],
        &["--set", "pipeline.schedule=zb_h1", "--set", "pipeline.fuse=off"],
    ] {
        let sets = [&bf16[..], more].concat();
        let (report, wide) = (checked(&project, &sets), checked(&project, more));
        let trained = project.train("spec.pace", 4, &sets);
        for (i, rank) in report["ranks"].as_array().unwrap().iter().enumerate() {
            assert_eq!(trained.summary["ranks"][i]["allocated_bytes"], rank["memory"]["total"], "rank {i} {sets:?}");
            let communication = |report: &Value| report["ranks"][i]["memory"]["communication"].as_u64().unwrap();
            // 46 rows of 40: 7360 and 3680 bytes, which take whole lines.
            assert_eq!(communication(&report) * align(7360), communication(&wide) * align(3680), "rank {i} {sets:?}");
        }
    }
}

fn weights(report: &Value) -> Vec<u64> {
    report["ranks"].as_array().unwrap().iter().map(|r| r["memory"]["weights"].as_u64().unwrap()).collect()
}

#[test]
fn one_micro_batch_an_update_needs_no_gradient_buffer() {
    let project = Project::new(SPEC);
    for (sets, none) in [
        (&["--set", "pipeline.accumulate=1"][..], true),
        (&["--set", "pipeline.accumulate=1", "--set", "pipeline.fuse=off"], false),
        (&[], false),
    ] {
        let report = checked(&project, sets);
        for rank in report["ranks"].as_array().unwrap() {
            assert_eq!(rank["memory"]["gradients"] == 0, none, "{sets:?}");
        }
    }
}

/// 1F1B holds as many micro-batches as ranks lie behind, however many an update has.
#[test]
fn peak_memory_of_1f1b_does_not_depend_on_the_micro_batches() {
    let project = Project::new(SPEC);
    let total = |accumulate: u32, schedule: &str| {
        let (k, s) = (format!("pipeline.accumulate={accumulate}"), format!("pipeline.schedule={schedule}"));
        let report = checked(&project, &["--set", &k, "--set", &s]);
        report["ranks"].as_array().unwrap().iter().map(|r| r["memory"]["total"].as_u64().unwrap()).max()
    };
    assert_eq!(total(8, "one_f_one_b"), total(32, "one_f_one_b"));
    assert_eq!(total(8, "async_1f1b"), total(32, "async_1f1b"));
    assert!(total(8, "gpipe") < total(32, "gpipe"));
}
