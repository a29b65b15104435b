//! Bits: what must be equal whatever the partition, the order or the fusion.

use crate::harness::Project;

/// Odd sizes; K of a weight gradient spans one panel or several, see `several_panels`.
const SPEC: &str = "
model gpt { layers = 4, width = 36, heads = 3, context = 21, vocab = 256 }
machine { ranks = 1 }
pipeline { schedule = gpipe, microbatch = 3, accumulate = 4 }
optimizer = adamw { lr = cosine(3e-3, warmup = 2, total = 12) }
";
const SPEC_OPTIMIZER: &str = "adamw { lr = cosine(3e-3, warmup = 2, total = 12) }";

fn losses(project: &Project, sets: &[&str]) -> Vec<u64> {
    let more: Vec<&str> = sets.iter().flat_map(|s| ["--set", s]).collect();
    project.train("spec.pace", 12, &more).losses.iter().map(|l| l.to_bits()).collect()
}

#[test]
fn synchronous_schedules_agree_on_every_number_of_ranks() {
    let project = Project::new(SPEC);
    let reference = losses(&project, &[]);
    for schedule in ["gpipe", "one_f_one_b", "zb_h1", "zb_h2"] {
        for ranks in [1, 2, 4] {
            let (schedule, ranks) = (format!("pipeline.schedule={schedule}"), format!("machine.ranks={ranks}"));
            assert_eq!(losses(&project, &[&schedule, &ranks]), reference, "{schedule} {ranks}");
        }
    }
}

/// Several stages a rank: transfers between ranks that share several borders, and stages that hand over.
#[test]
fn chunked_schedules_agree_with_gpipe() {
    let project = Project::new(SPEC);
    let reference = losses(&project, &["model.layers=8"]);
    let cases = [
        ("interleaved_1f1b", 2, 3),
        ("interleaved_1f1b", 4, 2),
        ("interleaved_1f1b_torch", 2, 2),
        ("looped_bfs", 1, 3),
        ("looped_bfs", 4, 2),
        ("interleaved_zb", 4, 2),
        ("zb_v", 1, 2),
        ("zb_v", 2, 2),
        ("zb_v", 4, 2),
        ("v_half", 4, 2),
        ("v_min", 4, 2),
        ("dualpipe_v", 2, 2),
    ];
    for (schedule, ranks, chunks) in cases {
        let sets = [
            "model.layers=8".into(),
            format!("pipeline.schedule={schedule}"),
            format!("machine.ranks={ranks}"),
            format!("pipeline.chunks={chunks}"),
        ];
        let sets: Vec<&str> = sets.iter().map(|s: &String| s.as_str()).collect();
        assert_eq!(losses(&project, &sets), reference, "{schedule}, {ranks} ranks of {chunks} stages");
    }
}

/// The table's ends on one stage, exchanged between ranks that are neighbours or not, and shared by two stages of a rank; fused or not.
#[test]
fn a_tied_table_has_the_same_bits_wherever_its_ends_are() {
    let project = Project::new(SPEC);
    let tied = "model.tied=on";
    let reference = losses(&project, &[tied]);
    assert_ne!(reference, losses(&project, &[]));
    for (schedule, ranks) in [
        ("gpipe", 2),
        ("one_f_one_b", 4),
        ("zb_h1", 4),
        ("zb_h2", 2),
        ("zb_v", 2),
        ("interleaved_1f1b", 2),
        ("async_1f1b", 1),
    ] {
        let (schedule, ranks) = (format!("pipeline.schedule={schedule}"), format!("machine.ranks={ranks}"));
        assert_eq!(losses(&project, &[tied, &schedule, &ranks]), reference, "{schedule} {ranks}");
    }
    let four = ["machine.ranks=4", "pipeline.schedule=one_f_one_b", "pipeline.fuse=off"];
    assert_eq!(losses(&project, &[&[tied], &four[..]].concat()), reference, "unfused");
    let mut seen = Vec::new();
    for optimizer in [
        "sgd { lr = 0.1, momentum = 0.9 }",
        "lion",
        "signum",
        "nadam",
        "adan",
        "mars",
        "muon { lr = 1e-2 }",
        "normuon { lr = 1e-2, clip = per_tensor(0.01) }",
        "adamw { lr = 1e-2, clip = global(0.1) }",
    ] {
        let optimizer = format!("optimizer={optimizer}");
        let with = |more: &[&str]| losses(&project, &[&[tied, "pipeline.accumulate=2", &optimizer], more].concat());
        let one = with(&[]);
        assert_eq!(with(&["machine.ranks=4", "pipeline.schedule=zb_h1"]), one, "{optimizer}");
        assert!(!seen.contains(&one), "{optimizer} trains like another optimizer");
        seen.push(one);
    }
}

/// One sum in the order of the parameters: on one stage, exchanged between ranks, in place between stages of a rank; a tied table counts once.
#[test]
fn a_global_norm_has_the_same_bits_on_every_placement() {
    let project = Project::new(SPEC);
    for tied in ["model.tied=off", "model.tied=on"] {
        let with = |clip: &str, more: &[&str]| {
            let optimizer = format!("optimizer=sgd {{ lr = 0.5, momentum = 0.9, clip = {clip} }}");
            losses(&project, &[&[tied, "pipeline.schedule=gpipe", &optimizer], more].concat())
        };
        let reference = with("global(0.5)", &[]);
        assert_ne!(reference, with("global(1e9)", &[]), "the norm is above the bound");
        assert_eq!(reference, with("per_stage(0.5)", &[]), "one stage has all");
        for (schedule, ranks) in
            [("one_f_one_b", 2), ("zb_h1", 4), ("zb_v", 2), ("interleaved_1f1b", 1), ("interleaved_1f1b", 2)]
        {
            let (schedule, ranks) = (format!("pipeline.schedule={schedule}"), format!("machine.ranks={ranks}"));
            assert_eq!(with("global(0.5)", &[&schedule, &ranks]), reference, "{tied} {schedule} {ranks}");
        }
    }
}

/// The file has the table once, whichever of its copies it is from.
#[test]
fn tied_weights_move_between_partitions() {
    let project = Project::new(&SPEC.replace("vocab = 256", "vocab = 256, tied = on"));
    let split = ["--set", "machine.ranks=4"];
    project.train("spec.pace", 3, &[&split[..], &["--save", "four.safetensors"]].concat());
    project.train("spec.pace", 3, &["--save", "one.safetensors"]);
    let bytes = |name: &str| std::fs::read(project.path(name)).expect("saved weights");
    assert_eq!(bytes("four.safetensors"), bytes("one.safetensors"));
    let again = |more: &[&str]| project.train("spec.pace", 3, &[&["--load", "four.safetensors"], more].concat()).losses;
    assert_eq!(again(&[]), again(&split));
}

#[test]
fn asynchronous_runs_repeat_to_the_bit() {
    let project = Project::new(SPEC);
    let sets = ["pipeline.schedule=async_1f1b", "machine.ranks=4", "pipeline.accumulate=1"];
    let first = losses(&project, &sets);
    assert_eq!(losses(&project, &sets), first);
    assert_ne!(first, losses(&project, &["pipeline.accumulate=1"]), "the schedule decides the bits");
}

#[test]
fn fused_and_unfused_updates_agree() {
    let project = Project::new(SPEC);
    for sets in [&[][..], &["pipeline.accumulate=1"], &["pipeline.schedule=async_1f1b", "machine.ranks=2"]] {
        let unfused: Vec<&str> = sets.iter().copied().chain(["pipeline.fuse=off"]).collect();
        assert_eq!(losses(&project, sets), losses(&project, &unfused), "{sets:?}");
    }
}

/// Out-of-place updates, fused and not; and what 2BW reads is fixed by the micro-batch, so neither cut nor drains change a bit.
#[test]
fn older_versions_have_the_same_bits_fused_unfused_and_cut_otherwise() {
    let project = Project::new(SPEC);
    let stash = ["pipeline.schedule=pipedream", "machine.ranks=4", "pipeline.accumulate=2"];
    let first = losses(&project, &stash);
    assert_eq!(losses(&project, &[&stash[..], &["pipeline.fuse=off"]].concat()), first);
    assert_ne!(losses(&project, &[&["pipeline.schedule=async_1f1b"], &stash[1..]].concat()), first);
    // One stage keeps one version: the update in place is that of a flush.
    let alone = losses(&project, &["pipeline.schedule=pipedream"]);
    assert_eq!(alone, losses(&project, &[]));
    let double = losses(&project, &["pipeline.schedule=pipedream_2bw"]);
    assert_ne!(double, alone);
    for more in ["machine.ranks=4", "pipeline.boundary=every 5 updates", "pipeline.fuse=off"] {
        assert_eq!(losses(&project, &["pipeline.schedule=pipedream_2bw", more]), double, "{more}");
    }
}

/// Gradients compensated for the weights' way: in the last one's kernel or before an update of many calls, over several panels, cut otherwise.
#[test]
fn compensated_gradients_have_the_same_bits_fused_unfused_and_cut_otherwise() {
    let project = Project::new(SPEC);
    let compensated = "staleness.correction=dc_asgd { lambda = 1e5 }";
    let stash = ["pipeline.schedule=pipedream", "machine.ranks=4", "pipeline.accumulate=2", compensated];
    let first = losses(&project, &stash);
    assert_eq!(losses(&project, &[&stash[..], &["pipeline.fuse=off"]].concat()), first);
    assert_ne!(losses(&project, &stash[..3]), first);
    let long = ["model.context=101", "pipeline.microbatch=11", "model.layers=2", "pipeline.accumulate=2"];
    let sets = [&long[..], &["pipeline.schedule=pipedream_2bw", compensated, "optimizer=muon { lr = 1e-2 }"]].concat();
    let first = losses(&project, &sets);
    assert_eq!(losses(&project, &[&sets[..], &["pipeline.fuse=off", "machine.ranks=2"]].concat()), first);
}

/// An update writes its prediction in whichever kernel it runs, and what is evaluated and saved are the weights themselves.
#[test]
fn predictions_have_the_same_bits_fused_and_unfused_and_are_not_evaluated() {
    let project = Project::new(SPEC);
    let held = crate::harness::licence();
    let sets: Vec<&str> = ["pipeline.schedule=async_1f1b", "machine.ranks=4", "pipeline.accumulate=2"].to_vec();
    for optimizer in [SPEC_OPTIMIZER, "muon { lr = 1e-2 }"] {
        let optimizer = format!("optimizer={optimizer}");
        let with = |more: &[&str]| losses(&project, &[&sets[..], &[&optimizer], more].concat());
        let predicted = with(&["staleness.weights=predict"]);
        assert_eq!(with(&["staleness.weights=predict", "pipeline.fuse=off"]), predicted, "{optimizer}");
        assert_ne!(with(&[]), predicted, "{optimizer}");
    }
    let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
    let held = ["--eval", held.to_str().unwrap()];
    let more = ["--set", "staleness.weights=predict", "--save", "predicted.safetensors"];
    let trained = project.train("spec.pace", 4, &[&sets[..], &held, &more].concat());
    let more = ["--load", "predicted.safetensors"];
    let loaded = project.train("spec.pace", 1, &[&sets[..], &held, &more].concat());
    assert_eq!(loaded.summary["eval_loss_first"], trained.summary["eval_loss_last"]);
}

#[test]
fn recomputation_changes_no_bit_of_a_synchronous_run() {
    let project = Project::new(SPEC);
    let reference = losses(&project, &[]);
    for (recompute, schedule, ranks) in [("full", "one_f_one_b", 2), ("full", "gpipe", 1), ("attention", "gpipe", 4)] {
        let sets = [
            format!("pipeline.recompute={recompute}"),
            format!("pipeline.schedule={schedule}"),
            format!("machine.ranks={ranks}"),
        ];
        let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
        assert_eq!(losses(&project, &sets), reference, "{sets:?}");
    }
}

/// 11 sequences of 101 tokens: the sum over tokens is longer than one K block.
#[test]
fn fused_and_unfused_updates_agree_over_several_panels() {
    let sets = ["model.context=101", "pipeline.microbatch=11", "model.layers=1", "pipeline.accumulate=2"];
    let project = Project::new(SPEC);
    let unfused: Vec<&str> = sets.iter().copied().chain(["pipeline.fuse=off"]).collect();
    assert_eq!(losses(&project, &sets), losses(&project, &unfused));
}

#[test]
fn weights_move_between_partitions() {
    let project = Project::new(SPEC);
    let split = ["--set", "machine.ranks=4"];
    project.train("spec.pace", 3, &[&split[..], &["--save", "four.safetensors"]].concat());
    project.train("spec.pace", 3, &["--save", "one.safetensors"]);
    let bytes = |name: &str| std::fs::read(project.path(name)).expect("saved weights");
    assert_eq!(bytes("four.safetensors"), bytes("one.safetensors"));
    let again = |more: &[&str]| {
        let args = [&["--load", "four.safetensors"], more].concat();
        project.train("spec.pace", 3, &args).losses
    };
    let on_one = again(&[]);
    assert_eq!(on_one, again(&split));
    assert_ne!(on_one, project.train("spec.pace", 3, &[]).losses, "the weights were loaded");
}

#[test]
fn evaluation_changes_no_bit() {
    let project = Project::new(SPEC);
    // Stages one a rank, and two with both a transfer and a hand-over.
    for (schedule, ranks) in
        [("pipeline.schedule=async_1f1b", "machine.ranks=4"), ("pipeline.schedule=zb_v", "machine.ranks=2")]
    {
        let sets = ["--set", "pipeline.boundary=every 4 updates", "--set", schedule, "--set", ranks];
        let without = project.train("spec.pace", 8, &sets).losses;
        let held = crate::harness::licence();
        let with = project.train("spec.pace", 8, &[&sets[..], &["--eval", held.to_str().unwrap()]].concat());
        assert_eq!(with.losses, without);
        assert!(with.summary["eval_loss_last"].as_f64() < with.summary["eval_loss_first"].as_f64());
    }
}

/// Updates that are several kernel calls. Clipping per stage is left out: other stages have other norms.
#[test]
fn updates_of_many_calls_agree_on_one_and_four_ranks() {
    let project = Project::new(SPEC);
    let mut seen = Vec::new();
    for optimizer in [
        "muon { lr = 1e-2, group \"block.*.attn.*\" = lion { lr = 1e-3 } }",
        "normuon { lr = 1e-2, clip = per_tensor(0.01) }",
        "mars",
        "soap { lr = 1e-2, frequency = 3, clip = per_tensor(0.1) }",
        "muon { lr = 1e-2, group vector = sgd { lr = 0.1 }, clip = global(0.1) }",
    ] {
        let optimizer = format!("optimizer={optimizer}");
        let with = |more: &[&str]| losses(&project, &[&["pipeline.schedule=one_f_one_b", &optimizer], more].concat());
        let one = with(&[]);
        assert_eq!(with(&["machine.ranks=4", "pipeline.schedule=zb_h1"]), one, "{optimizer}");
        assert!(one.last() < one.first(), "{optimizer} does not train");
        assert!(!seen.contains(&one), "{optimizer} trains like another optimizer");
        seen.push(one);
    }
}

/// The element-wise optimizers: the same bits on one rank, and on four with the update unfused.
#[test]
fn every_optimizer_agrees_on_one_and_four_ranks_and_unfused() {
    let project = Project::new(SPEC);
    let mut seen = Vec::new();
    for optimizer in ["lion", "signum", "nadam", "adan"] {
        let optimizer = format!("optimizer={optimizer}");
        let with = |more: &[&str]| losses(&project, &[&["pipeline.schedule=one_f_one_b", &optimizer], more].concat());
        let one = with(&[]);
        assert_eq!(with(&["machine.ranks=4", "pipeline.fuse=off"]), one, "{optimizer}");
        assert!(!seen.contains(&one), "{optimizer} trains like another optimizer");
        seen.push(one);
    }
}

/// Without delays the corrections for them change nothing, and looking ahead is the same on every number of ranks.
#[test]
fn corrections_agree_on_one_and_four_ranks_and_unfused() {
    let project = Project::new(&format!("{SPEC}staleness {{ correction = error_feedback }}"));
    let one_f_one_b = "pipeline.schedule=one_f_one_b";
    let plain = losses(&Project::new(SPEC), &[one_f_one_b]);
    for (correction, optimizer, same) in [
        ("error_feedback", SPEC_OPTIMIZER, true),
        ("pipemare { anneal = 6 }", SPEC_OPTIMIZER, true),
        ("nesterov { momentum = 0.9 }", "sgd { lr = 0.5 }", false),
        ("nesterov { momentum = 0.9, by_stage = on }", "nadam", false),
    ] {
        let (correction, optimizer) = (format!("staleness.correction={correction}"), format!("optimizer={optimizer}"));
        let with = |more: &[&str]| losses(&project, &[&[one_f_one_b, &correction, &optimizer], more].concat());
        let one = with(&[]);
        assert_eq!(with(&["machine.ranks=4", "pipeline.fuse=off"]), one, "{correction}");
        assert!(!same || one == plain, "{correction}");
    }
}
