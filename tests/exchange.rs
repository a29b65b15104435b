//! `fmt`, `import` and `export` through the command line.

use crate::harness::Project;
use std::path::Path;

const SPEC: &str = "machine { ranks = 3 }\npipeline { schedule = one_f_one_b, accumulate = 4 }\n";

fn root(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name).display().to_string()
}

#[test]
fn fmt_writes_files_once_and_check_only_looks() {
    let project = Project::new("machine{ranks=3}// three\npipeline {\nschedule = gpipe, accumulate=4 }\n");
    let wanted =
        "machine { ranks = 3 }              // three\n\npipeline {\n  schedule   = gpipe\n  accumulate = 4\n}\n";
    let read = || std::fs::read_to_string(project.path("spec.pace")).unwrap();
    let before = read();
    let (status, stdout, _) = project.outcome(&["fmt", "--check", "spec.pace"]);
    assert_eq!((status, stdout.as_str()), (Some(1), "spec.pace is not in the canonical layout\n"));
    assert_eq!(read(), before);
    assert_eq!(project.output(&["fmt", "spec.pace"]), "");
    assert_eq!(read(), wanted);
    assert_eq!(project.output(&["fmt", "--check", "spec.pace"]), "");
    let files = std::fs::read_dir(project.path(".")).unwrap().count();
    assert_eq!(files, 1, "nothing is left beside the file");
}

#[test]
fn fmt_leaves_a_file_with_faults_alone() {
    let text = "machine{ranks=}";
    let project = Project::new(text);
    std::fs::write(project.path("good.pace"), "machine{ranks=1}").unwrap();
    let (status, _, stderr) = project.outcome(&["fmt", "spec.pace", "good.pace"]);
    assert!(status == Some(1) && stderr.contains("P0101"), "{stderr}");
    assert_eq!(std::fs::read_to_string(project.path("spec.pace")).unwrap(), text);
    assert_eq!(std::fs::read_to_string(project.path("good.pace")).unwrap(), "machine { ranks = 1 }\n");
}

/// The examples keep their meaning: the same report after formatting.
#[test]
fn formatted_examples_give_the_same_report() {
    for name in ["gpt-1f1b", "own-schedule", "schedule-only"] {
        let text = std::fs::read_to_string(root(&format!("examples/{name}.pace"))).unwrap();
        let project = Project::new(&text);
        let before = project.output(&["check", "spec.pace"]);
        project.output(&["fmt", "spec.pace"]);
        assert_eq!(project.output(&["check", "spec.pace"]), before, "{name}");
    }
}

#[test]
fn an_exported_table_gives_the_report_of_its_schedule() {
    let project = Project::new(SPEC);
    let check = project.output(&["check", "spec.pace"]);
    let facts = |report: &str| report.split_once("\n\n").map(|(_, facts)| facts.to_owned()).unwrap();
    for more in [&["--csv"][..], &["--csv", "--comms"]] {
        let mut args = vec!["export", "spec.pace", "-o", "one.csv"];
        args.extend(more);
        project.output(&args);
        assert_eq!(facts(&project.output(&["import", "one.csv"])), facts(&check));
        let json = project.output(&["import", "one.csv", "--format", "json"]);
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(json["ok"], true);
        let to_stdout = project.output(&[&["export", "spec.pace"], more].concat());
        assert_eq!(to_stdout, std::fs::read_to_string(project.path("one.csv")).unwrap());
    }
}

#[test]
fn a_table_with_a_spec_has_memory_and_bounds() {
    let model = "model gpt { layers = 2, width = 16, heads = 2, context = 8, vocab = 256 }\n";
    let machine = "machine { ranks = 2 }\npipeline { schedule = gpipe, microbatch = 2, accumulate = 1 }\n";
    let spec = format!("{model}{machine}staleness {{ drift <= 0 }}\nrequire {{ memory <= 1 MiB }}\n");
    let project = Project::new(&spec);
    let table = "0F0,0F1,0B0,0U0,0B1,0U1\n1F0,1B0,1U0,1F1,1B1,1U1\n";
    std::fs::write(project.path("async.csv"), table).unwrap();
    let args = ["import", "async.csv", "--spec", "spec.pace", "--cpu", "x86-64-v3"];
    let (status, stdout, stderr) = project.outcome(&args);
    assert_eq!(status, Some(1), "{stderr}");
    assert!(stderr.contains("drift is 1 update with `async`, more than 0"), "{stderr}");
    assert!(stderr.contains("change the order in the table, or the bound"), "{stderr}");
    let (_, wide, _) = project.outcome(&["check", "spec.pace", "--cpu", "x86-64-v3"]);
    assert!(stdout.contains("memory (bytes)") && wide.contains("memory (bytes)"), "{stdout}");
    let loose = [&args[..], &["--set", "staleness.drift<=1"]].concat();
    assert!(project.output(&loose).contains("proved   drift <= 1 update on every stage"));
    let (status, _, stderr) = project.outcome(&[&args[..], &["--set", "machine.ranks=1"]].concat());
    assert!(status == Some(1) && stderr.contains("P0611"), "{stderr}");
}

/// Memory too is that of the schedule, with several stages on a rank.
#[test]
fn a_table_needs_the_memory_of_its_schedule() {
    let model = "model gpt { layers = 4, width = 16, heads = 2, context = 8, vocab = 256 }\n";
    for schedule in ["one_f_one_b", "zb_h1", "interleaved_1f1b", "zb_v"] {
        let rest =
            format!("machine {{ ranks = 2 }}\npipeline {{ schedule = {schedule}, microbatch = 2, accumulate = 4 }}\n");
        let project = Project::new(&format!("{model}{rest}"));
        let check = project.output(&["check", "spec.pace", "--cpu", "x86-64-v3"]);
        project.output(&["export", "spec.pace", "--csv", "-o", "t.csv"]);
        let import = project.output(&["import", "t.csv", "--spec", "spec.pace", "--cpu", "x86-64-v3"]);
        let facts = |report: &str| report.split_once("\n\n").map(|(_, facts)| facts.to_owned()).unwrap();
        assert!(import.contains("memory (bytes)"));
        assert_eq!(facts(&import), facts(&check), "{schedule}");
    }
}

/// A table runs like the schedule that it was exported from, and PyTorch's own tables like GPipe: the same bits. An
/// asynchronous one has the drift that was proved.
#[test]
fn tables_run() {
    let spec = |ranks: u32, schedule: &str, accumulate: u32| {
        format!(
            "model gpt {{ layers = 4, width = 16, heads = 2, context = 8, vocab = 256 }}\nmachine {{ ranks = {ranks} }}\n\
             pipeline {{ schedule = {schedule}, microbatch = 2, accumulate = {accumulate} }}\noptimizer = sgd {{ lr = 0.1 }}\n"
        )
    };
    let project = Project::new(&spec(3, "gpipe", 6));
    let gpipe = project.train("spec.pace", 2, &[]).losses;
    for name in ["zbv.compute", "dualpipev.comms"] {
        let table = root(&format!("tests/torch/pytorch-{name}.csv"));
        assert_eq!(project.train("spec.pace", 2, &["--table", &table]).losses, gpipe, "{name}");
    }
    let project = Project::new(&spec(2, "async_1f1b", 1));
    project.output(&["export", "spec.pace", "--csv", "-o", "t.csv"]);
    let trained = project.train("spec.pace", 5, &["--table", "t.csv"]);
    assert_eq!(trained.losses, project.train("spec.pace", 5, &[]).losses);
    assert_eq!(trained.drift_max_seen, 1);
}

/// Refusals with their cells, side by side with the table.
#[test]
fn refused_tables() {
    let project = Project::new(SPEC);
    let tables = [
        "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n",
        "0F0,0F0,0B0\n1F0,1B0x\n",
        "0F0,0F1,0F1,0B0,0B1\n1F0,1B0,1B1,1F1\n",
        "0F0,0BW0\n",
    ];
    let mut shown = String::new();
    for table in tables {
        std::fs::write(project.path("t.csv"), table).unwrap();
        let (status, stdout, stderr) = project.outcome(&["import", "t.csv"]);
        assert_eq!((status, stdout.as_str()), (Some(1), ""), "{table}");
        shown += &format!("{table}----\n{stderr}\n====\n");
    }
    insta::assert_snapshot!(shown);
    assert!(project.output(&["import", "t.csv", "--dialect", "old"]).starts_with("t.csv: t on 1 ranks"));
}

#[test]
fn wrong_requests() {
    let project = Project::new(SPEC);
    assert_eq!(project.outcome(&["import", "none.csv"]).0, Some(3));
    assert_eq!(project.outcome(&["export", "spec.pace"]).0, Some(2), "the format is named");
    assert_eq!(project.outcome(&["fmt"]).0, Some(2));
    let (status, _, stderr) =
        project.outcome(&["export", "spec.pace", "--csv", "--set", "pipeline.schedule=async_1f1b"]);
    assert!(status == Some(0) && stderr.contains("PyTorch's loader refuses it"), "{stderr}");
}
