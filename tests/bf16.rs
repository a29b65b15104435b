//! `dtype = bf16` through the command line: bits, what a run saves, and how far losses are from those of f32.

use crate::harness::Project;

/// Odd sizes, as in [`crate::identity`].
const SPEC: &str = "
model gpt { layers = 4, width = 36, heads = 3, context = 21, vocab = 256, dtype = bf16 }
machine { ranks = 1 }
pipeline { schedule = gpipe, microbatch = 3, accumulate = 4 }
optimizer = adamw { lr = cosine(3e-3, warmup = 2, total = 12) }
";

fn losses(project: &Project, updates: u64, sets: &[&str]) -> Vec<f64> {
    let more: Vec<&str> = sets.iter().flat_map(|s| ["--set", s]).collect();
    project.train("spec.pace", updates, &more).losses
}

/// Activations that are sent and ones that stay are rounded alike; fused or not, updates write the same weights and copies.
#[test]
fn synchronous_runs_have_the_same_bits_however_they_are_cut() {
    let project = Project::new(SPEC);
    let reference = losses(&project, 12, &[]);
    for sets in [
        &["pipeline.schedule=one_f_one_b", "machine.ranks=4"][..],
        &["pipeline.schedule=zb_h1", "machine.ranks=2", "pipeline.fuse=off"],
        &["pipeline.schedule=one_f_one_b", "machine.ranks=2", "pipeline.recompute=full"],
    ] {
        assert_eq!(losses(&project, 12, sets), reference, "{sets:?}");
    }
    assert_ne!(losses(&project, 12, &["model.dtype=f32"]), reference);
    let muon = ["optimizer=muon { lr = 1e-3, group head = lion { lr = 1e-4 } }"];
    let cut = ["pipeline.schedule=one_f_one_b", "machine.ranks=4"];
    assert_eq!(losses(&project, 8, &[&muon[..], &cut].concat()), losses(&project, 8, &muon));
}

/// Rings of copies beside one f32 weight.
#[test]
fn older_versions_are_those_of_the_copies() {
    let project = Project::new(SPEC);
    let stash = ["pipeline.schedule=pipedream", "machine.ranks=4", "pipeline.accumulate=2"];
    let first = losses(&project, 12, &stash);
    assert_eq!(losses(&project, 12, &[&stash[..], &["pipeline.fuse=off"]].concat()), first);
    let double = losses(&project, 12, &["pipeline.schedule=pipedream_2bw"]);
    assert_ne!(double, first);
    for more in ["machine.ranks=4", "pipeline.fuse=off"] {
        assert_eq!(losses(&project, 12, &["pipeline.schedule=pipedream_2bw", more]), double, "{more}");
    }
}

/// gpt-1f1b.pace, smaller, over 60 updates. The whole of it was measured for docs/language.md: the losses differed by 0.04 % at most.
#[test]
fn losses_are_near_those_of_f32() {
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/gpt-1f1b.pace");
    let project = Project::new(&std::fs::read_to_string(example).expect("the example is there"));
    let small = ["model.layers=4", "pipeline.accumulate=8", "machine.ranks=2"];
    let wide = losses(&project, 60, &small);
    let narrow = losses(&project, 60, &[&small[..], &["model.dtype=bf16"]].concat());
    let furthest = wide.iter().zip(&narrow).map(|(w, n)| (n / w - 1.0).abs()).fold(0.0, f64::max);
    assert!(wide[59] < wide[0] - 1.0, "the run learns: {wide:?}");
    assert!(furthest > 1e-6, "bf16 changes something");
    assert!(furthest < 0.003, "losses differ by {furthest}");
}

/// What is saved are the weights that the optimizer keeps, in f32; a run goes on from them whatever it computes in.
#[test]
fn a_run_saves_weights_of_f32() {
    let project = Project::new(SPEC);
    let saved = |sets: &[&str]| {
        let more: Vec<&str> = sets.iter().flat_map(|s| ["--set", s]).chain(["--save", "w.safetensors"]).collect();
        project.train("spec.pace", 3, &more);
        std::fs::read(project.path("w.safetensors")).expect("weights were saved")
    };
    let narrow = saved(&[]);
    assert!(saved(&["machine.ranks=2", "pipeline.schedule=one_f_one_b"]) == narrow, "the cut doesn't show");
    let wide = saved(&["model.dtype=f32"]);
    assert_eq!(narrow.len(), wide.len());
    let rounded = narrow[narrow.len() - 4 * 36 * 256..].chunks(4).filter(|w| w[..2] == [0, 0]).count();
    assert!(rounded < 100, "{rounded} of the head's weights are bf16");
    std::fs::write(project.path("start.safetensors"), &narrow).expect("writable");
    let from = ["--load", "start.safetensors"];
    let f32 = project.train("spec.pace", 1, &[&["--set", "model.dtype=f32"], &from[..]].concat()).losses[0];
    let bf16 = project.train("spec.pace", 1, &from).losses[0];
    assert!((f32 / bf16 - 1.0).abs() < 0.003, "{f32} {bf16}");
}
