//! The subcommands: what they print, what they refuse, how they end.

use crate::harness::{Project, licence, paceline};

const SPEC: &str = "
model gpt { layers = 2, width = 16, heads = 2, context = 8, vocab = 256 }
machine { ranks = 2 }
pipeline { schedule = one_f_one_b, microbatch = 2, accumulate = 2 }
optimizer = sgd { lr = 0.1 }
";

/// The whole of a refusal, source and message side by side.
fn refusal(spec: &str) -> String {
    let project = Project::new(spec);
    let (status, stdout, stderr) = project.outcome(&["check", "spec.pace", "--cpu", "x86-64-v3"]);
    assert_eq!(status, Some(1), "{stderr}");
    format!("{}\n---- status 1 ----\n{stderr}{stdout}", spec.trim_start())
}

#[test]
fn too_much_drift_is_refused_with_a_counterexample() {
    insta::assert_snapshot!(refusal(
        "machine { ranks = 8 }\npipeline { schedule = async_1f1b, accumulate = 4 }\nstaleness { drift <= 1 }\n"
    ));
}

#[test]
fn several_faults_are_reported_at_once() {
    insta::assert_snapshot!(refusal(
        "model gpt { layers = 2, width = 10, heads = 3, contxt = 8 }\nmachine { ranks = 2, memory = 1 parsec }\n\
         pipeline { schedule = zigzag, accumulate = 0 }\n"
    ));
}

#[test]
fn too_much_memory_is_refused_with_the_breakdown() {
    insta::assert_snapshot!(refusal(&format!("{SPEC}require {{ memory <= 64 KiB }}\n")));
}

#[test]
fn the_report_for_people() {
    let project = Project::new(SPEC);
    insta::assert_snapshot!(project.output(&["check", "spec.pace", "--cpu", "x86-64-v3"]));
}

#[test]
fn the_report_for_programs() {
    let project = Project::new(SPEC);
    insta::assert_snapshot!(project.output(&["check", "spec.pace", "--cpu", "x86-64-v3", "--format", "json"]));
}

#[test]
fn the_grid() {
    let project = Project::new("machine { ranks = 4 }\npipeline { schedule = async_1f1b, accumulate = 4 }\n");
    insta::assert_snapshot!(project.output(&["plan", "spec.pace"]));
}

#[test]
fn the_picture_is_an_svg_with_every_action() {
    let project = Project::new("machine { ranks = 2 }\npipeline { schedule = one_f_one_b, accumulate = 2 }\n");
    project.output(&["timeline", "spec.pace", "-o", "t.svg", "--updates", "1"]);
    let svg = std::fs::read_to_string(project.path("t.svg")).unwrap();
    assert!(svg.starts_with("<svg"), "{svg}");
    assert_eq!(svg.matches("class=\"f\"").count(), 4 + 1, "four forwards and the legend");
}

#[test]
fn explain_prints_a_page_for_every_code() {
    for code in dsl::codes() {
        paceline().args(["explain", code]).assert().success();
    }
    paceline().args(["explain", "P9999"]).assert().code(2);
}

/// Each wrong request with its exit status and a piece of the sentence that says what to do.
#[test]
fn wrong_requests_end_with_one_sentence() {
    let project = Project::new(SPEC);
    std::fs::write(project.path("empty.txt"), "").unwrap();
    std::fs::write(project.path("latin.pace"), b"model gpt { \xff }").unwrap();
    std::fs::write(project.path("bare.pace"), "machine { ranks = 2 }\npipeline { schedule = gpipe, accumulate = 2 }\n")
        .unwrap();
    std::fs::create_dir(project.path("folder")).unwrap();
    let data = licence();
    let data = data.to_str().unwrap();
    let cases: [(&[&str], i32, &str); 14] = [
        (&["check", "absent.pace"], 3, "absent.pace"),
        (&["check", "latin.pace"], 3, "not UTF-8"),
        (&["check", "spec.pace", "--cpu", "z80"], 2, "x86-64-v3"),
        (&["timeline", "spec.pace", "-o", "t.png"], 2, "svg"),
        (&["compile", "spec.pace"], 2, "-o DIR"),
        (&["compile", "spec.pace", "-o", "b", "--target", "abacus"], 2, "cpu"),
        (&["compile", "bare.pace", "-o", "b"], 2, "model"),
        (&["inspect", "folder"], 3, "folder"),
        (&["verify", "absent"], 3, "absent"),
        (&["run", "spec.pace", "--data", data], 2, "--updates"),
        (&["run", "spec.pace", "--data", "absent.txt", "--updates", "1"], 3, "absent.txt"),
        (&["run", "spec.pace", "--data", "empty.txt", "--updates", "1"], 3, "token"),
        (&["run", "spec.pace", "--data", data, "--updates", "0"], 2, "1 to "),
        (&["run", "spec.pace", "--data", data, "--updates", "1", "--load", "absent.safetensors"], 3, "absent"),
    ];
    for (args, status, piece) in cases {
        let (code, _, stderr) = project.outcome(args);
        assert_eq!(code, Some(status), "{args:?}: {stderr}");
        assert!(stderr.starts_with("error: ") && stderr.contains(piece), "{args:?}: {stderr}");
        assert_eq!(stderr.trim_end().lines().count(), 1, "{args:?}: {stderr}");
    }
}

#[test]
fn a_bundle_runs_like_its_spec_and_is_the_same_bytes_each_time() {
    let project = Project::new(SPEC);
    let cpu = ["--cpu", "x86-64-v3"];
    project.output(&[&["compile", "spec.pace", "-o", "one"], &cpu[..]].concat());
    project.output(&[&["compile", "spec.pace", "-o", "two"], &cpu[..]].concat());
    let mut names: Vec<_> = std::fs::read_dir(project.path("one")).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert!(names.len() >= 4, "{names:?}");
    for name in &names {
        let read = |dir: &str| std::fs::read(project.path(dir).join(name)).unwrap();
        assert_eq!(read("one"), read("two"), "{name:?}");
    }
    assert!(project.output(&["verify", "one"]).contains("sound"));
    let inspected = project.output(&["inspect", "one"]);
    // Without the size of the code, which is LLVM's affair.
    let lines = inspected.lines().skip(1).take(9).map(|line| match line.strip_suffix(" KiB") {
        Some(row) => row.rsplit_once(' ').map_or(row, |(rest, _)| rest.trim_end()),
        None => line,
    });
    insta::assert_snapshot!(lines.collect::<Vec<_>>().join("\n"));
    project.output(&[&["compile", "spec.pace", "-o", "apart", "--set", "pipeline.fuse=off"], &cpu[..]].concat());
    let of = |bundle: &str, wanted: &[&str]| {
        let inspected = project.output(&["inspect", bundle]);
        let rows = inspected.lines().filter(|line| wanted.iter().any(|name| line.starts_with(name)));
        rows.map(str::to_owned).collect::<Vec<_>>()
    };
    let wanted = ["parameter", "embed.tok", "block.0.attn.qkv", "block.1.ln2.gain", "head.weight"];
    insta::assert_snapshot!([of("one", &wanted), of("apart", &wanted)].concat().join("\n"));
    assert_eq!(project.train("one", 5, &[]).losses, project.train("spec.pace", 5, &cpu).losses);
}

#[test]
fn a_damaged_bundle_is_refused() {
    let project = Project::new(SPEC);
    project.output(&["compile", "spec.pace", "-o", "b"]);
    for entry in std::fs::read_dir(project.path("b")).unwrap() {
        let path = entry.unwrap().path();
        let whole = std::fs::read(&path).unwrap();
        let mut flipped = whole.clone();
        flipped[whole.len() / 2] ^= 1;
        for (what, bytes) in [("altered", &flipped[..]), ("truncated", &whole[..whole.len() - 1])] {
            std::fs::write(&path, bytes).unwrap();
            let (code, _, stderr) = project.outcome(&["verify", "b"]);
            assert_eq!(code, Some(3), "{what} {path:?}: {stderr}");
            assert_eq!(stderr.trim_end().lines().count(), 1, "{stderr}");
        }
        std::fs::write(&path, whole).unwrap();
    }
    project.output(&["verify", "b"]);
}

/// `paceline … | head`: the reader is gone before everything is written.
#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let project = Project::new(SPEC);
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_paceline"))
        .current_dir(project.path("."))
        .args(["compile", "spec.pace", "--emit", "sched"])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("the program starts");
    drop(child.stdout.take());
    let out = child.wait_with_output().expect("the program ends");
    assert!(out.status.success() && out.stderr.is_empty(), "{}", String::from_utf8_lossy(&out.stderr));
}

#[test]
fn every_level_can_be_printed() {
    let project = Project::new(SPEC);
    for (level, piece) in [("sched", "sched.call"), ("linalg", "linalg.matmul"), ("llvm", "define")] {
        let text = project.output(&["compile", "spec.pace", "--emit", level]);
        assert!(text.contains(piece), "{level}: {}", &text[..text.len().min(500)]);
    }
}

#[test]
fn a_run_of_another_length_than_its_schedule_is_remarked_on() {
    let project = Project::new(&SPEC.replace("lr = 0.1", "lr = wsd(0.1, total = 3, decay = 0.5)"));
    let data = licence();
    let run = |more: &[&str]| {
        let args = [&["run", "spec.pace", "--data", data.to_str().unwrap()], more].concat();
        let (status, _, stderr) = project.outcome(&args);
        assert_eq!(status, Some(0), "{stderr}");
        stderr
    };
    let text = "lint: the learning-rate schedule is made for 3 updates and the run makes 2: the rate never comes down to its floor";
    assert!(run(&["--updates", "2"]).contains(text));
    assert!(!run(&[]).contains("lint"));
}

/// A model and a device that are not here: checked by formula, refused where code would be made.
#[test]
fn a_spec_for_analysis_only_is_checked_and_not_compiled() {
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/llama-7b.pace");
    let spec = std::fs::read_to_string(example).expect("the example is there");
    let project = Project::new(&spec);
    let report = |schedule: &str| -> serde_json::Value {
        let set = format!("pipeline.schedule={schedule}");
        let (_, stdout, _) = project.outcome(&["check", "spec.pace", "--format", "json", "--set", &set]);
        serde_json::from_str(&stdout).expect("JSON")
    };
    let (fits, too_much) = (report("one_f_one_b"), report("gpipe"));
    assert_eq!((&fits["ok"], &too_much["ok"]), (&true.into(), &false.into()));
    assert_eq!(too_much["diagnostics"][0]["code"], "P0411");
    assert_eq!(fits["analysis_only"], serde_json::json!(["mlp", "norm", "position", "bias", "device"]));
    // All ranks together hold 2 bytes for each of the 6.738 B parameters.
    let ranks = fits["ranks"].as_array().expect("ranks");
    let weights: u64 = ranks.iter().map(|r| r["memory"]["weights"].as_u64().expect("bytes")).sum();
    assert_eq!(weights, 2 * 6_738_415_616);
    let licence = licence();
    let run = ["run", "spec.pace", "--updates", "1", "--data", licence.to_str().expect("UTF-8")];
    for command in [&["compile", "spec.pace", "-o", "b"][..], &run] {
        let (status, _, stderr) = project.outcome(command);
        let keys = "`mlp`, `norm`, `position`, `bias`, `device` are for analysis only";
        assert!(status == Some(1) && stderr.contains("error[P0420]") && stderr.contains(keys), "{stderr}");
    }
}

/// A profile is looked for beside the spec, and its faults are told by row and column.
#[test]
fn costs_come_from_a_profile() {
    let project = Project::new(
        "machine { ranks = 2, cost = profile(\"p.csv\") }\npipeline { schedule = gpipe, accumulate = 1 }\n",
    );
    let (status, _, stderr) = project.outcome(&["check", "spec.pace"]);
    assert!(status == Some(3) && stderr.contains("p.csv"), "{stderr}");
    std::fs::write(project.path("p.csv"), "stage,f_us,i_us,w_us,hop_us\n0,10,20,30,5\n1,1,2,4,\n").expect("writable");
    let report: serde_json::Value =
        serde_json::from_str(&project.output(&["check", "spec.pace", "--format", "json"])).expect("JSON");
    assert_eq!((&report["makespan_us"], &report["ranks"][1]["busy_us"]), (&77.0.into(), &7.0.into()));
    std::fs::write(project.path("p.csv"), "stage,f_us,i_us,w_us\n0,10,20,30\n1,1,two,4\n").expect("writable");
    let (status, _, stderr) = project.outcome(&["check", "spec.pace"]);
    assert!(status == Some(1) && stderr.contains("p.csv, row 3, column i_us"), "{stderr}");
}

#[test]
fn what_latency_costs_and_what_covering_it_would() {
    let project = Project::new(
        "machine { ranks = 8, cost { F = 10 ms, B = 20 ms, hop = 1 ms } }\n\
         pipeline { schedule = async_1f1b, accumulate = 8 }\nstaleness { drift <= 1 }\n",
    );
    let latency = |args: &[&str]| {
        let (_, out, found) = project.outcome(&[&["check", "spec.pace"], args].concat());
        let at = out.find("latency:").unwrap_or(out.len());
        format!("{}{found}", &out[at..])
    };
    let loose = ["--set", "staleness.drift<=2", "--set"];
    insta::assert_snapshot!(
        [
            latency(&[]),
            latency(&[&loose[..], &["pipeline.cover_latency=full"]].concat()),
            latency(&[&loose[..], &["pipeline.cover_latency=partial(50 %)"]].concat()),
            latency(&["--set", "pipeline.cover_latency=full"]),
            latency(&["--set", "machine.cost.hop=0"]),
            latency(
                &[&loose[..], &["pipeline.schedule=gpipe"], &loose[2..], &["pipeline.cover_latency=full"]].concat()
            ),
        ]
        .join("\n----\n")
    );
    let json = project.output(&["check", "spec.pace", "--format", "json"]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["latency"]["covered_figures"]["bubble"], 0.0);
    assert_eq!(json["latency"]["uncovered_figures"]["drift_max"], 1);
    assert_eq!(json["latency"]["exceeded"][0], "P0311");
}

const TIMED: &str = "machine { ranks = 4, cost { F = 10 ms, I = 9 ms, W = 5 ms, hop = 500 us } }\n\
                     pipeline { schedule = search(memory <= 1x), accumulate = 8 }\n";

#[test]
fn a_search_is_reported_with_what_it_was_held_against() {
    let project = Project::new(TIMED);
    insta::assert_snapshot!(project.output(&["check", "spec.pace"]));
    let json = project.output(&["check", "spec.pace", "--format", "json"]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    let found = json["search"]["bubble"].as_f64().unwrap();
    assert!((found - json["ranks"][0]["bubble"].as_f64().unwrap()).abs() < 1e-12);
    let fits = json["search"]["library"].as_array().unwrap().iter().filter_map(|row| row["bubble"].as_f64());
    assert!(fits.clone().count() > 3 && fits.fold(1.0, f64::min) >= found);
}

/// The same order as a table gives the same figures.
#[test]
fn an_order_that_was_found_is_exported_and_drawn() {
    let project = Project::new(&TIMED.replace("1x", "1x, place = linear"));
    std::fs::write(project.path("order.csv"), project.output(&["export", "spec.pace", "--csv"])).unwrap();
    let json = |args: &[&str]| {
        let text = project.output(&[&["check", "spec.pace", "--format", "json"], args].concat());
        serde_json::from_str::<serde_json::Value>(&text).unwrap()["ranks"].clone()
    };
    assert_eq!(json(&[]), json(&["--table", "order.csv"]));
    project.output(&["timeline", "spec.pace", "-o", "t.svg"]);
    assert!(project.output(&["plan", "spec.pace"]).contains("W"));
}

#[test]
fn a_search_is_compared_within_its_limits() {
    let project = Project::new(&TIMED.replace("1x", "1x, place = linear"));
    insta::assert_snapshot!(project.output(&["compare", "spec.pace"]));
}

#[test]
fn limits_of_a_search_that_nothing_keeps_are_refused() {
    let bytes = SPEC.replace("one_f_one_b", "search(memory <= 64 KiB)");
    insta::assert_snapshot!([refusal(&TIMED.replace("1x", "0.1x")), refusal(&bytes)].join("\n"));
}

#[test]
fn a_search_keeps_within_the_bytes_of_its_model() {
    let spec = |schedule: &str| SPEC.replace("one_f_one_b", schedule).replace("accumulate = 2", "accumulate = 8");
    let total = |spec: &str| {
        let project = Project::new(spec);
        let json = project.output(&["check", "spec.pace", "--cpu", "x86-64-v3", "--format", "json"]);
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        let ranks = json["ranks"].as_array().unwrap().iter();
        ranks.map(|rank| rank["memory"]["total"].as_u64().unwrap()).max().unwrap()
    };
    let most = total(&spec("zb_h1"));
    for limit in [most, most - 1000] {
        assert!(total(&spec(&format!("search(memory <= {limit} B)"))) <= limit);
    }
}

/// Two copies of every stage: everything that is analysed, and a refusal where code would be made.
#[test]
fn two_copies_of_the_stages_are_checked_and_not_compiled() {
    let project = Project::new(
        &SPEC
            .replace("layers = 2", "layers = 4")
            .replace("ranks = 2", "ranks = 4")
            .replace("accumulate = 2", "accumulate = 8"),
    );
    let report = |schedule: &str| -> serde_json::Value {
        let set = format!("pipeline.schedule={schedule}");
        serde_json::from_str(&project.output(&["check", "spec.pace", "--format", "json", "--set", &set])).expect("JSON")
    };
    let weights = |report: &serde_json::Value| -> u64 {
        let ranks = report["ranks"].as_array().expect("ranks");
        ranks.iter().map(|r| r["memory"]["weights"].as_u64().expect("bytes")).sum()
    };
    let one = weights(&report("one_f_one_b"));
    for schedule in ["dualpipe", "chimera"] {
        let both = report(schedule);
        assert_eq!(
            (both["period"]["microbatches"].as_u64(), both["stages"].as_array().map(Vec::len)),
            (Some(8), Some(8))
        );
        assert!(weights(&both).abs_diff(2 * one) < 4096, "{} {one}", weights(&both));
        let set = format!("pipeline.schedule={schedule}");
        assert!(project.output(&["plan", "spec.pace", "--set", &set]).contains("rank 3"));
        project.output(&["timeline", "spec.pace", "-o", "t.html", "--set", &set]);
        for command in [&["compile", "spec.pace", "-o", "b"][..], &["export", "spec.pace", "--csv"]] {
            let (status, _, stderr) = project.outcome(&[command, &["--set", &set]].concat());
            let (expected, piece) = if command[0] == "compile" { (1, "error[P0422]") } else { (2, "two copies") };
            assert!(status == Some(expected) && stderr.contains(piece), "{stderr}");
        }
    }
    let compared = project.output(&["compare", "spec.pace"]);
    assert!(compared.contains("dualpipe ") && compared.contains("chimera "), "{compared}");
}
