//! `timeline` and `compare`: every action is there, with what was proved about it, and nothing is loaded from elsewhere.

use crate::harness::Project;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

const SYNCHRONOUS: &str = "machine { ranks = 2 }\npipeline { schedule = one_f_one_b, accumulate = 2 }\n";

const ASYNCHRONOUS: &str = "machine { ranks = 4, cost { F = 2 us, B = 4 us, hop = 1 us } }\n\
                            pipeline { schedule = async_1f1b, accumulate = 2 }\n";

const TRAINED: &str = "
model gpt { layers = 2, width = 16, heads = 2, context = 8, vocab = 64 }
machine { ranks = 2, cost { F = 1 us, B = 2 us } }
pipeline { schedule = one_f_one_b, microbatch = 2, accumulate = 4 }
optimizer = sgd { lr = 0.1 }
";

fn written(project: &Project, args: &[&str], name: &str) -> String {
    project.output(&[&["timeline", "spec.pace", "-o", name], args].concat());
    std::fs::read_to_string(project.path(name)).unwrap()
}

fn parsed(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {}", &text[..text.len().min(300)]))
}

/// The data element of a page.
fn scenes(page: &str) -> Vec<Value> {
    let (_, rest) = page.split_once("<script type=\"application/json\" id=\"data\">").expect("a page holds its data");
    let (data, _) = rest.split_once("</script>").expect("the element ends");
    parsed(data)["scenes"].as_array().expect("a list of scenes").clone()
}

fn list<'a>(value: &'a Value, key: &str) -> &'a Vec<Value> {
    value[key].as_array().unwrap_or_else(|| panic!("{key} is a list: {value}"))
}

/// Slices and instants of a trace, by process.
fn slices(trace: &Value) -> BTreeMap<u64, Vec<&Value>> {
    let mut found: BTreeMap<u64, Vec<&Value>> = BTreeMap::new();
    for event in list(trace, "traceEvents").iter().filter(|e| e["ph"] == "X" || e["ph"] == "i") {
        found.entry(event["pid"].as_u64().unwrap()).or_default().push(event);
    }
    found
}

#[test]
fn a_trace_has_every_action_of_every_rank() {
    let project = Project::new(SYNCHRONOUS);
    let trace = parsed(&written(&project, &["--updates", "2"], "t.json"));
    let found = slices(&trace);
    let names: BTreeSet<(u64, String)> =
        found[&1].iter().map(|e| (e["tid"].as_u64().unwrap(), e["name"].as_str().unwrap().to_owned())).collect();
    let mut expected = BTreeSet::new();
    for rank in 1..=2 {
        expected.extend((0..4).flat_map(|mb| ["F", "B"].map(|op| (rank, format!("{op}{mb}")))));
        expected.extend((0..2).map(|update| (rank, format!("U{update}"))));
    }
    assert_eq!(names, expected);
    assert_eq!(found[&1].len(), expected.len(), "each once");
    for rank in 1..=2 {
        let mut free = 0.0;
        for slice in found[&1].iter().filter(|e| e["tid"] == rank && e["ph"] == "X") {
            let (start, took) = (slice["ts"].as_f64().unwrap(), slice["dur"].as_f64().unwrap());
            assert!(start >= free && took > 0.0, "{slice}");
            free = start + took;
            for key in ["stage", "version", "slot", "micro-batch", "critical"] {
                assert!(slice["args"].get(key).is_some(), "{key}: {slice}");
            }
        }
    }
    let named = |what: &str| list(&trace, "traceEvents").iter().filter(|e| e["name"] == what).count();
    assert_eq!((named("process_name"), named("thread_name")), (1, 2));
    for event in list(&trace, "traceEvents") {
        assert!(event["pid"] != 0 && event["tid"] != 0, "viewers take 0 for something else: {event}");
        assert_eq!(event.get("tid").is_none(), event["ph"] == "C", "{event}");
    }
}

#[test]
fn a_trace_puts_two_schedules_side_by_side() {
    let project = Project::new(ASYNCHRONOUS);
    let trace = parsed(&written(&project, &["--with", "gpipe", "--updates", "3"], "t.json"));
    let found = slices(&trace);
    assert_eq!(found.keys().copied().collect::<Vec<_>>(), [1, 2]);
    assert_eq!(found[&1].len(), found[&2].len(), "the same work in another order");
}

#[test]
fn a_page_holds_what_the_trace_holds_and_loads_nothing() {
    let project = Project::new(ASYNCHRONOUS);
    let args = ["--with", "one_f_one_b", "--updates", "6"];
    let page = written(&project, &args, "t.html");
    for reference in [
        "http:",
        "https:",
        "src=",
        "href=",
        "url(",
        "@import",
        "import(",
        "fetch(",
        "XMLHttpRequest",
        "WebSocket",
        "<link",
        "<img",
        "<iframe",
    ] {
        assert!(!page.contains(reference), "{reference}: the page is whole in itself");
    }
    let trace = parsed(&written(&project, &args, "t.json"));
    let of_trace = slices(&trace);
    let scenes = scenes(&page);
    assert_eq!(scenes.len(), 2);
    for (scene, slices) in scenes.iter().zip(of_trace.values()) {
        let actions = list(scene, "actions");
        assert_eq!(actions.len(), slices.len());
        for (action, slice) in actions.iter().zip(slices) {
            let name = format!("{}{}", action["op"].as_str().unwrap(), action["mb"]);
            assert_eq!((slice["name"].as_str(), &slice["ts"]), (Some(name.as_str()), &action["start"]));
        }
        // The path ends with the run and begins at its start.
        let path: Vec<&Value> =
            list(scene, "path").iter().map(|s| &actions[s["action"].as_u64().unwrap() as usize]).collect();
        assert_eq!(path.first().unwrap()["start"], 0.0);
        assert_eq!(path.last().unwrap()["end"], scene["end"]);
    }
}

/// The versions on the page give the drift that was proved.
#[test]
fn versions_show_the_proved_drift() {
    for (spec, drifting) in [(ASYNCHRONOUS, true), (SYNCHRONOUS, false)] {
        let project = Project::new(spec);
        let scene = scenes(&written(&project, &["--updates", "12"], "t.html")).remove(0);
        let facts = parsed(&project.output(&["check", "spec.pace", "--format", "json"]));
        let mut forward = BTreeMap::new();
        let mut drift = vec![0; list(&facts, "stages").len()];
        for action in list(&scene, "actions") {
            let of = (action["stage"].as_u64().unwrap(), action["mb"].as_u64().unwrap());
            let version = action["version"].as_u64().unwrap();
            match action["op"].as_str().unwrap() {
                "F" => _ = forward.insert(of, version),
                "B" => drift[of.0 as usize] = drift[of.0 as usize].max(version - forward[&of]),
                _ => {}
            }
        }
        let proved: Vec<u64> = list(&facts, "stages").iter().map(|s| s["drift"]["max"].as_u64().unwrap()).collect();
        assert_eq!(drift, proved);
        assert_eq!(proved.iter().any(|d| *d > 0), drifting, "{proved:?}");
    }
}

/// Memory rises to what is allocated, and falls back to what is always held.
#[test]
fn memory_reaches_the_arena() {
    let project = Project::new(TRAINED);
    let scene = scenes(&written(&project, &[], "t.html")).remove(0);
    let facts = parsed(&project.output(&["check", "spec.pace", "--format", "json"]));
    for (lane, rank) in list(&scene, "lanes").iter().zip(list(&facts, "ranks")) {
        let curve = &lane["memory"];
        let values: Vec<u64> = list(curve, "points").iter().map(|p| p[1].as_u64().unwrap()).collect();
        let total = rank["memory"]["total"].as_u64().unwrap();
        let fixed = total - rank["memory"]["stash"].as_u64().unwrap();
        assert_eq!(curve["unit"], "bytes");
        assert_eq!(values.iter().max(), Some(&total));
        assert_eq!((values.iter().min(), values.last()), (Some(&fixed), Some(&fixed)));
    }
}

#[test]
fn names_in_a_page_are_text() {
    let project = Project::new(SYNCHRONOUS);
    std::fs::create_dir(project.path("x<")).unwrap();
    std::fs::copy(project.path("spec.pace"), project.path("x</script>&.pace")).unwrap();
    project.output(&["timeline", "x</script>&.pace", "-o", "t.html"]);
    let page = std::fs::read_to_string(project.path("t.html")).unwrap();
    assert_eq!(page.matches("</script>").count(), 2, "the data's and the script's own");
    assert_eq!(scenes(&page)[0]["file"], "x</script>&.pace");
    assert!(page.contains("<title>one_f_one_b: x&lt;/script&gt;&amp;.pace</title>"));
}

#[test]
fn pictures_that_cannot_be_are_refused() {
    let project = Project::new(ASYNCHRONOUS);
    for (args, status, piece) in [
        (&["-o", "t.png"][..], 2, "x.svg, x.html or x.json"),
        (&["-o", "html"], 2, "x.svg, x.html or x.json"),
        (&["-o", "t.HTML"], 2, "x.svg, x.html or x.json"),
        (&["-o", "t.svg", "--with", "gpipe"], 2, "--with"),
        (&["-o", "t.html", "--updates", "0"], 2, "--updates 0"),
        (&["-o", "t.html", "--updates", "99999999999"], 2, "--updates 99999999999"),
        (&["-o", "t.html", "--with", "zigzag"], 1, "zigzag"),
        (&["-o", "absent/t.html"], 3, "absent/t.html"),
    ] {
        let (code, _, stderr) = project.outcome(&[&["timeline", "spec.pace"], args].concat());
        assert_eq!(code, Some(status), "{args:?}: {stderr}");
        assert!(stderr.contains(piece), "{args:?}: {stderr}");
    }
}

/// A sound schedule that misses a bound is drawn, and refused all the same.
#[test]
fn a_missed_bound_is_on_the_page() {
    let project = Project::new(&format!("{ASYNCHRONOUS}staleness {{ drift <= 1 }}\n"));
    let (code, _, stderr) = project.outcome(&["timeline", "spec.pace", "-o", "t.html"]);
    assert_eq!(code, Some(1), "{stderr}");
    let scene = scenes(&std::fs::read_to_string(project.path("t.html")).unwrap()).remove(0);
    let beyond = list(&scene, "beyond");
    assert!(beyond.len() == 1 && beyond[0].as_str().unwrap().contains("drift"), "{beyond:?}");
}

fn rows(project: &Project) -> Vec<Value> {
    let (_, stdout, _) = project.outcome(&["compare", "spec.pace", "--format", "json"]);
    list(&parsed(&stdout), "schedules").clone()
}

/// Every library schedule has a row, and the row says what `check` says of that schedule.
#[test]
fn a_comparison_is_what_checks_say() {
    let project = Project::new(&format!("{TRAINED}staleness {{ delay <= 0 }}\n"));
    let rows = rows(&project);
    let names: BTreeSet<&str> = rows.iter().map(|r| r["schedule"].as_str().unwrap()).collect();
    assert_eq!(names, dsl::library::names().into_iter().collect());
    assert_eq!(rows.iter().filter(|r| r["given"] == true).count(), 1);
    for row in &rows {
        let set = format!("pipeline.schedule={}", row["schedule"].as_str().unwrap());
        let (code, stdout, _) = project.outcome(&["check", "spec.pace", "--format", "json", "--set", &set]);
        let facts = parsed(&stdout);
        assert_eq!(code == Some(0), row["verdict"] == "fits", "{row}");
        if row["verdict"] == "refused" {
            continue;
        }
        let ranks = list(&facts, "ranks");
        let most = |of: &dyn Fn(&Value) -> f64, list: &[Value]| list.iter().map(of).fold(0.0, f64::max);
        assert_eq!(row["bubble"].as_f64().unwrap(), most(&|r| r["bubble"].as_f64().unwrap(), ranks));
        assert_eq!(row["memory_bytes"].as_f64().unwrap(), most(&|r| r["memory"]["total"].as_f64().unwrap(), ranks));
        for (key, measure) in [("drift_max", "drift"), ("delay_max", "delay")] {
            let worst = most(&|s| s[measure]["max"].as_f64().unwrap(), list(&facts, "stages"));
            assert_eq!(row[key].as_f64().unwrap(), worst, "{row}");
        }
        if row["verdict"] == "exceeds" {
            let first = list(&facts, "diagnostics").iter().find(|d| d["severity"] == "error").unwrap();
            assert_eq!((&row["code"], &row["reason"]), (&first["code"], &first["message"]));
        }
    }
    let verdicts: Vec<&str> = rows.iter().map(|r| r["verdict"].as_str().unwrap()).collect();
    let beyond = verdicts.iter().position(|v| *v != "fits").expect("the asynchronous ones are late");
    assert!(verdicts[beyond..].iter().all(|v| *v != "fits"), "{verdicts:?}");
    let fitting: Vec<f64> = rows[..beyond].iter().map(|r| r["bubble"].as_f64().unwrap()).collect();
    assert!(fitting.is_sorted_by(|a, b| *a <= b + 1e-4), "{fitting:?}");
}

#[test]
fn a_comparison_has_the_files_own_schedule_and_says_when_nothing_fits() {
    let own = "schedule mine {
  place linear
  backward whole
  flush every accumulate
  order { repeat { F }
 repeat { B } }
}
\
               machine { ranks = 3 }
pipeline { schedule = mine, accumulate = 4 }
";
    let project = Project::new(own);
    let text = project.output(&["compare", "spec.pace"]);
    assert!(text.contains("within the bounds:\n") && text.contains("  mine * "), "{text}");
    let project = Project::new(&format!("{own}require {{ bubble <= 1 % }}\nstaleness {{ drift <= 0, delay <= 0 }}\n"));
    let (code, stdout, _) = project.outcome(&["compare", "spec.pace"]);
    assert_eq!(code, Some(1));
    assert!(!stdout.contains("within the bounds") && stdout.contains("beyond a bound:\n"), "{stdout}");
    let broken = Project::new("machine { ranks = 3 }\npipeline { schedule = mine, accumulate = 4 }\n");
    let (code, stdout, stderr) = broken.outcome(&["compare", "spec.pace"]);
    assert!(code == Some(1) && stdout.is_empty() && stderr.contains("P0215"), "{stdout}{stderr}");
}
