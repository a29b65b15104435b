//! What people trip over in pipeline training, each case by its smallest input: an error, a lint, or nothing because it can't
//! happen here.
//!
//! Elsewhere: streams alone, such as an update before its last weight gradient, a receive ring that is a slot short and receive
//! buffers of every micro-batch (`compiler/plan/tests/field.rs`); outputs that meet the labels of another micro-batch
//! and losses that depend on the number of stages (`identity`, to the bit); losses divided wrongly (`golden`).

use crate::harness::{Project, licence};
use serde_json::Value;

/// Exit status and report of `check`, with overrides.
fn check(spec: &str, sets: &[&str]) -> (Option<i32>, Value) {
    let project = Project::new(spec);
    let mut args = vec!["check", "spec.pace", "--format", "json", "--cpu", "x86-64-v3"];
    sets.iter().for_each(|set| args.extend(["--set", set]));
    let (status, stdout, stderr) = project.outcome(&args);
    (status, serde_json::from_str(&stdout).unwrap_or_else(|e| panic!("{e}: {stdout}{stderr}")))
}

/// The codes of all diagnostics.
fn codes(report: &Value) -> Vec<String> {
    let all = report["diagnostics"].as_array().expect("a list");
    all.iter().map(|d| d["code"].as_str().expect("a code").to_owned()).collect()
}

fn accepted(spec: &str, lints: &[&str]) -> Value {
    let (status, report) = check(spec, &[]);
    assert_eq!((status, codes(&report)), (Some(0), lints.iter().map(|s| s.to_string()).collect()), "{spec}\n{report}");
    report
}

/// Refused with this code alone; the message and the help.
fn refused(spec: &str, code: &str) -> String {
    let (status, report) = check(spec, &[]);
    assert_eq!((status, codes(&report)), (Some(1), vec![code.to_owned()]), "{spec}\n{report}");
    let found = &report["diagnostics"][0];
    format!("{}\n{}", found["message"].as_str().unwrap_or(""), found["help"].as_str().unwrap_or(""))
}

fn schedule_only(ranks: u32, pipeline: &str) -> String {
    format!("machine {{ ranks = {ranks} }}\npipeline {{ {pipeline} }}\n")
}

fn gpt(layers: u32, ranks: u32, pipeline: &str) -> String {
    format!(
        "model gpt {{ layers = {layers}, width = 16, heads = 2, context = 8, vocab = 256 }}\n\
         machine {{ ranks = {ranks} }}\npipeline {{ microbatch = 1, {pipeline} }}\n"
    )
}

/// Bytes by rank of one kind.
fn memory(report: &Value, kind: &str) -> Vec<u64> {
    let ranks = report["ranks"].as_array().expect("ranks");
    ranks.iter().map(|rank| rank["memory"][kind].as_u64().expect("bytes")).collect()
}

/// Two ranks with two stages each both send first: sends wait for nobody, so nobody waits.
#[test]
fn both_ranks_send_first() {
    accepted(&schedule_only(2, "schedule = interleaved_1f1b, chunks = 2, accumulate = 4"), &[]);
}

/// A receive that is issued early blocks sends that are ready: not here, where it is posted; in a table that says so, a
/// lint.
#[test]
fn an_early_receive_blocks_ready_sends() {
    let report = accepted(&schedule_only(8, "schedule = interleaved_1f1b, chunks = 2, accumulate = 8"), &["P0320"]);
    assert_eq!(report["makespan_us"], 3.0 * (2.0 * 8.0 + 7.0));
    let table = "0F0,0SEND_F0,0F1,0RECV_B0,0SEND_F1,0B0,0RECV_B1,0B1\n\
                 1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n";
    let project = Project::new("");
    std::fs::write(project.path("t.csv"), table).expect("writable");
    let (status, _, stderr) = project.outcome(&["import", "t.csv"]);
    assert!(status == Some(0) && stderr.contains("lint[P0623]: row 1, column 4: 0RECV_B0"), "{stderr}");
}

/// The receiver runs F1 before it frees F0: one slot would deadlock, so a table gets the slots that it needs.
#[test]
fn a_table_gets_as_many_receive_slots_as_it_needs() {
    let table = "0F0,0SEND_F0,0F1,0SEND_F1,0F2,0SEND_F2,0RECV_B0,0B0,0RECV_B1,0B1,0RECV_B2,0B2\n\
                 1RECV_F0,1RECV_F1,1F0,1F1,1B0,1SEND_B0,1B1,1SEND_B1,1RECV_F2,1F2,1B2,1SEND_B2\n";
    let project = Project::new("");
    std::fs::write(project.path("t.csv"), table).expect("writable");
    project.output(&["import", "t.csv"]);
    // Rank 1 wants its third input before it gives a gradient back, and rank 0 a gradient before it makes that input.
    let stuck = table
        .replace(",0F2,0SEND_F2,0RECV_B0,0B0", ",0RECV_B0,0B0,0F2,0SEND_F2")
        .replace("1F0,1F1,1B0,1SEND_B0,1B1,1SEND_B1,1RECV_F2,1F2,", "1F0,1F1,1RECV_F2,1F2,1B0,1SEND_B0,1B1,1SEND_B1,");
    std::fs::write(project.path("t.csv"), stuck).expect("writable");
    let (status, _, stderr) = project.outcome(&["import", "t.csv"]);
    assert!(status == Some(1) && stderr.contains("error[P0310]"), "{stderr}");
}

/// Fewer micro-batches than ranks: a shorter warm-up and a lint; GPipe has none to shorten.
#[test]
fn fewer_microbatches_than_ranks() {
    accepted(&schedule_only(8, "schedule = one_f_one_b, accumulate = 1"), &["P0320"]);
    accepted(&schedule_only(8, "schedule = gpipe, accumulate = 1"), &[]);
}

/// Micro-batches that are no multiple of the ranks: by PyTorch's rule 10 are fine on 4 ranks and 9 are not, by
/// Megatron's neither.
#[test]
fn microbatches_that_groups_do_not_divide() {
    for (schedule, m, fits) in [
        ("interleaved_1f1b_torch", 10, true),
        ("interleaved_1f1b_torch", 9, false),
        ("interleaved_1f1b", 10, false),
        ("interleaved_1f1b", 9, false),
    ] {
        let spec = schedule_only(4, &format!("schedule = {schedule}, chunks = 2, accumulate = {m}"));
        if fits { drop(accepted(&spec, &[])) } else { drop(refused(&spec, "P0309")) }
    }
}

#[test]
fn a_batch_that_does_not_split_evenly() {
    let text = refused(&schedule_only(2, "schedule = gpipe, batch = 8, accumulate = 3"), "P0229");
    assert!(text.contains("a batch of 8 sequences does not divide into 3 micro-batches"), "{text}");
}

/// No layer is dropped, whatever does not divide: the parameters of all ranks are those of one.
#[test]
fn an_uneven_cut_drops_no_layer() {
    for (layers, ranks) in [(30, 4), (10, 3), (38, 8), (5, 4)] {
        let weights = |ranks| {
            let report = accepted(&gpt(layers, ranks, "schedule = gpipe, accumulate = 1"), &[]);
            let stages = report["stages"].as_array().expect("stages").len();
            (memory(&report, "weights").iter().sum::<u64>(), stages)
        };
        // Regions are rounded up to whole cache lines, once a rank.
        let (one, many) = (weights(1).0, weights(ranks).0);
        assert!(many >= one && many < one + 4096, "{layers} layers on {ranks} ranks: {many} bytes, {one} on one");
    }
    let text = refused(
        &gpt(30, 2, "schedule = gpipe, accumulate = 1, partition = [[embed, block 0..14], [block 14..28, head]]"),
        "P0220",
    );
    assert!(text.contains("28"), "{text}");
}

/// What a division leaves goes to the last stage, or leaves one empty: a lint, an error; `balanced` does neither.
#[test]
fn the_remainder_on_the_last_stage() {
    let stages: Vec<String> = (0..7).map(|s| format!("[block {}..{}]", s * 4, s * 4 + 4)).collect();
    let rest = format!("{}, [block 28..38, head]", stages.join(", ").replacen("[block", "[embed, block", 1));
    accepted(&gpt(38, 8, &format!("schedule = gpipe, accumulate = 1, partition = [{rest}]")), &["P0226"]);
    let empty = "[[embed, block 0..2], [block 2..4], [block 4, head], []]";
    let text = refused(&gpt(5, 4, &format!("schedule = gpipe, accumulate = 1, partition = {empty}")), "P0222");
    assert!(text.contains("no layers"), "{text}");
}

/// Cuts of one's own, with few blocks where the embedding is; each stage is counted as it is, not as the mean.
#[test]
fn uneven_stages_are_counted_one_by_one() {
    let partition = "[[embed, block 0], [block 1..3], [block 3..5], [block 5..8, head]]";
    let report = accepted(&gpt(8, 4, &format!("schedule = gpipe, accumulate = 2, partition = {partition}")), &[]);
    let weights = memory(&report, "weights");
    let stash = memory(&report, "stash");
    assert_eq!(weights[1], weights[2]);
    let block = weights[1] / 2;
    let table = |rows: u64| rows * 16 * 4;
    let near = |a: u64, b: u64| a.abs_diff(b) < 1024;
    assert!(near(weights[0], block + table(256 + 8)) && near(weights[3], 3 * block + table(256)), "{weights:?}");
    assert!(stash[3] > stash[1] && stash[1] > stash[0], "{stash:?}");
}

/// The loss of an update does not depend on how its sequences are divided over micro-batches, but for rounding; over
/// ranks not even for that (`identity`). So nothing is divided twice, or not at all.
#[test]
fn the_loss_does_not_depend_on_the_number_of_microbatches() {
    let losses = |pipeline: &str, ranks: u32| {
        let project = Project::new(&gpt(2, ranks, &pipeline.replace("microbatch = 1, ", "")));
        project.train("spec.pace", 5, &[]).losses
    };
    let reference = losses("schedule = gpipe, accumulate = 4", 1);
    assert_eq!(losses("schedule = gpipe, accumulate = 4", 2), reference);
    let project = Project::new(&gpt(2, 1, "schedule = gpipe, accumulate = 4"));
    let sets = ["--set", "pipeline.microbatch=4", "--set", "pipeline.accumulate=1"];
    let whole = project.train("spec.pace", 5, &sets).losses;
    assert_eq!(whole.len(), 5);
    for (whole, parts) in whole.iter().zip(&reference) {
        assert!((whole - parts).abs() < 1e-4 * parts, "{whole} {parts}");
    }
}

/// What a feature that is not here would break is refused, with a message that says which key it is.
#[test]
fn features_that_are_not_here_are_refused() {
    let licence = licence();
    let data = licence.to_str().expect("UTF-8");
    // Dropout that depends on the partition.
    let project = Project::new(&gpt(2, 2, "schedule = zb_h1, accumulate = 2").replace("vocab", "dropout = on, vocab"));
    project.output(&["check", "spec.pace"]);
    let (status, _, stderr) = project.outcome(&["run", "spec.pace", "--data", data, "--updates", "1"]);
    assert!(status == Some(1) && stderr.contains("error[P0420]") && stderr.contains("dropout"), "{stderr}");
    // The norm of all gradients must be there before the first update: a fused one is too early, and a norm of one stage
    // is another norm.
    let text = refused(&schedule_only(2, "schedule = gpipe, accumulate = 2, clip = 1.0"), "P0211");
    assert!(text.contains("`clip`") && text.contains("not supported yet"), "{text}");
}

/// Tied copies that drift apart, or are counted twice or lost when weight gradients are split off: the identity tests train them. What
/// would let them drift is refused, with the reason, and beside other schedules too.
#[test]
fn tied_copies_that_would_drift_apart_are_refused() {
    let tied = |schedule: &str| {
        gpt(2, 2, &format!("schedule = {schedule}, accumulate = 2")).replace("vocab", "tied = on, vocab")
    };
    for (schedule, why) in [
        ("async_1f1b", "read at different versions"),
        ("pipedream", "read at different versions"),
        ("pipedream_2bw", "would wait for the first stage's gradients"),
    ] {
        let text = refused(&tied(schedule), "P0343");
        assert!(text.contains(why) && text.contains("flush every accumulate"), "{text}");
    }
    let clipped = format!("{}optimizer = adamw {{ clip = per_stage(1) }}\n", tied("one_f_one_b"));
    let text = refused(&clipped, "P0344");
    assert!(text.contains("per_tensor"), "{text}");
    // One stage holds one table.
    let one = clipped.replace("ranks = 2", "ranks = 1").replace("one_f_one_b", "async_1f1b");
    Project::new(&one).output(&["check", "spec.pace"]);
    let project = Project::new(&tied("one_f_one_b"));
    let text = project.output(&["compare", "spec.pace"]);
    let after = text.split_once("not possible here").expect("some are").1;
    assert!(after.contains("async_1f1b") && after.contains("P0343: `tied = on` needs a flush"), "{text}");
    // A table that places its own transfers has no place for the exchange; one without has.
    for (content, expected) in [("--comms", Some("P0343")), ("", None)] {
        let own = Project::new(&gpt(2, 2, "schedule = one_f_one_b, accumulate = 2"));
        let mut export = vec!["export", "spec.pace", "--csv", "--output", "table.csv"];
        export.extend((!content.is_empty()).then_some(content));
        own.output(&export);
        std::fs::write(own.path("spec.pace"), tied("one_f_one_b")).expect("writable");
        let (status, _, stderr) = own.outcome(&["check", "spec.pace", "--table", "table.csv"]);
        assert_eq!(status, Some(i32::from(expected.is_some())), "{stderr}");
        assert!(expected.is_none_or(|code| stderr.contains(code)), "{stderr}");
    }
}

/// The norm is of all gradients of one update; which schedule is used decides, not the one that is written.
#[test]
fn a_global_norm_without_a_flush_is_refused() {
    let clip = "optimizer = adamw { clip = global(1) }\n";
    let of = |schedule: &str| gpt(2, 2, &format!("schedule = {schedule}, accumulate = 2")) + clip;
    let text = refused(&of("async_1f1b"), "P0345");
    assert!(text.contains("`clip = global` needs a flush") && text.contains("per_stage"), "{text}");
    let project = Project::new(&of("async_1f1b"));
    let (_, _, stderr) = project.outcome(&["check", "spec.pace"]);
    assert!(stderr.contains("clip = global(1) }") && stderr.contains("^^^^^^^^^"), "shown where it is: {stderr}");
    let text = project.output(&["compare", "spec.pace"]);
    let (before, after) = text.split_once("not possible here").expect("some are");
    assert!(before.contains("gpipe") && after.contains("P0345"), "{text}");
    // A table is used instead of the schedule, and has the sums placed in it unless it places transfers itself.
    for (more, expected) in [(&["--comms"][..], 1), (&[], 0)] {
        let own = Project::new(&gpt(2, 2, "schedule = one_f_one_b, accumulate = 2"));
        own.output(&[&["export", "spec.pace", "--csv", "--output", "table.csv"], more].concat());
        std::fs::write(own.path("spec.pace"), of("async_1f1b")).expect("writable");
        let (status, _, stderr) = own.outcome(&["check", "spec.pace", "--table", "table.csv"]);
        assert_eq!((status, stderr.contains("P0345")), (Some(expected), expected == 1), "{stderr}");
    }
}

/// Under V placement the first rank holds the embedding and the head.
#[test]
fn embedding_and_head_share_a_rank_under_v_placement() {
    let report = accepted(&gpt(16, 8, "schedule = zb_v, accumulate = 16"), &[]);
    let weights = memory(&report, "weights");
    // It holds one block beside them, the last one two.
    let tables = (2 * 256 + 8) * 16 * 4;
    assert!(weights[0] >= tables + weights[7] / 2, "{weights:?}");
}

/// 1F1B's peak does not grow with the micro-batches, nor do its receive slots.
#[test]
fn memory_does_not_grow_with_the_microbatches() {
    let of = |m: u32| {
        let report = accepted(&gpt(4, 4, &format!("schedule = one_f_one_b, accumulate = {m}")), &[]);
        (memory(&report, "total"), memory(&report, "communication"))
    };
    assert_eq!(of(8), of(32));
    assert_eq!(of(16), of(64));
}

#[test]
fn limits_differ_by_rank() {
    let spec = gpt(4, 4, "schedule = one_f_one_b, accumulate = 8");
    let report = accepted(&spec, &[]);
    let total = memory(&report, "total");
    let limits = |of: &[u64]| of.iter().map(|bytes| format!("{bytes} B")).collect::<Vec<_>>().join(", ");
    accepted(&format!("{spec}require {{ memory <= [{}] }}", limits(&total)), &[]);
    let less: Vec<u64> = total.iter().enumerate().map(|(rank, bytes)| bytes - u64::from(rank == 2)).collect();
    let text = refused(&format!("{spec}require {{ memory <= [{}] }}", limits(&less)), "P0410");
    assert!(text.contains("rank 2"), "{text}");
}

/// Weight gradients that are put off keep the gradients that they need, which recomputation does not save.
#[test]
fn recomputation_does_not_help_zero_bubble_to_fit() {
    let spec = "model gpt { layers = 32, width = 4096, heads = 32, context = 4096, vocab = 32000, dtype = bf16 }\n\
                machine { ranks = 8, device = h100 { memory = 2 TB, flops = 400 TFLOP/s, link = 50 GB/s } }\n\
                pipeline { schedule = one_f_one_b, microbatch = 1, accumulate = 32 }\n";
    let peak = |schedule: &str, recompute: &str| {
        let sets = [format!("pipeline.schedule={schedule}"), format!("model.recompute={recompute}")];
        let (status, report) = check(spec, &[&sets[0], &sets[1]]);
        assert_eq!(status, Some(0), "{report}");
        memory(&report, "total").into_iter().max().expect("ranks")
    };
    let (split, fits) = (peak("zb_h1", "full"), peak("one_f_one_b", "full"));
    assert!(split > fits, "{split} {fits}");
    let bound = format!("require.memory<={} B", (split + fits) / 2);
    for (schedule, status) in [("one_f_one_b", 0), ("zb_h1", 1)] {
        let sets = [&format!("pipeline.schedule={schedule}"), "model.recompute=full", &bound];
        assert_eq!(check(spec, &sets).0, Some(status), "{schedule}");
    }
}

/// Evaluation runs as many micro-batches as the held-out text has, whatever an update has.
#[test]
fn evaluation_does_not_depend_on_the_micro_batches_of_an_update() {
    let project = Project::new(&gpt(2, 2, "schedule = one_f_one_b, accumulate = 4"));
    // Room for three sequences of eight tokens and their targets: no multiple of four.
    std::fs::write(project.path("held.txt"), "What is held out, short.\n").expect("writable");
    let held = ["--eval", "held.txt"];
    let first =
        |sets: &[&str]| project.train("spec.pace", 2, &[&held[..], sets].concat()).summary["eval_loss_first"].as_f64();
    let four = first(&[]);
    assert!(four.is_some_and(|loss| loss > 0.0));
    assert_eq!(four, first(&["--set", "pipeline.accumulate=1"]));
}

/// Weights are saved by parameter: what four ranks saved goes on on one, two or three, to the bit.
#[test]
fn weights_of_four_stages_load_on_one_two_and_three() {
    let project = Project::new(&gpt(4, 4, "schedule = one_f_one_b, accumulate = 2"));
    project.train("spec.pace", 3, &["--save", "four.safetensors"]);
    let on = |ranks: u32| {
        let ranks = format!("machine.ranks={ranks}");
        project.train("spec.pace", 3, &["--load", "four.safetensors", "--set", &ranks]).losses
    };
    let four = on(4);
    for ranks in 1..=3 {
        assert_eq!(on(ranks), four, "{ranks} ranks");
    }
}

/// Numbers that have a unit must say which; there is no default.
#[test]
fn planner_inputs_without_units() {
    for spec in [
        "machine { ranks = 2, memory = 16 }\npipeline { schedule = gpipe, accumulate = 2 }\n",
        "machine { ranks = 2, cost { F = 10, B = 20 } }\npipeline { schedule = gpipe, accumulate = 2 }\n",
    ] {
        let (status, report) = check(spec, &[]);
        assert_eq!(status, Some(1));
        assert!(codes(&report).iter().all(|code| code == "P0206" || code == "P0205"), "{report}");
    }
}

/// A number of stages that the schedule does not ask for is not passed over in silence.
#[test]
fn chunks_that_the_schedule_ignores() {
    accepted(&schedule_only(4, "schedule = one_f_one_b, chunks = 3, accumulate = 8"), &["P0240"]);
    accepted(&schedule_only(4, "schedule = interleaved_1f1b, chunks = 3, accumulate = 8"), &[]);
}
