//! Tables of actions: what is read, what is refused and where, what is written.

use crate::make::{async_1f1b, gpipe, one_f_one_b};
use dsl::diag::Diagnostic;
use dsl::schedule::{Schedule, Update};
use plan::table::{Content, Dialect, read, write};
use plan::time::Costs;
use plan::{Shape, Subject, analyse};
use proptest::prelude::*;

/// `CODE message` of each finding, with what its labels cover.
fn shown(text: &str, found: &[Diagnostic]) -> String {
    let label = |d: &Diagnostic| -> String {
        let covered: Vec<&str> = d.labels.iter().map(|l| &text[l.span.clone()]).collect();
        format!("{} {} [{}]", d.code, d.message, covered.join(" | "))
    };
    found.iter().map(label).collect::<Vec<_>>().join("\n")
}

/// What reading and planning say.
fn findings(text: &str, dialect: Option<Dialect>) -> Vec<Diagnostic> {
    let (table, mut found) = read(text, dialect);
    if let Some(table) = table {
        found.extend(table.program().err().unwrap_or_default());
    }
    found
}

fn refusal(text: &str) -> String {
    let found = findings(text, None);
    assert!(found.iter().any(Diagnostic::is_error), "{text}");
    shown(text, &found)
}

fn program(text: &str) -> artifact::stream::Program {
    let (table, found) = read(text, None);
    assert!(!found.iter().any(Diagnostic::is_error), "{}", shown(text, &found));
    table.expect("no error").program().expect("sound")
}

#[test]
fn every_page_s_example_gives_its_code_alone() {
    // A spec beside the table, and with that tested with the command line.
    for code in dsl::codes().filter(|c| c.starts_with("P06") && *c != "P0611") {
        let page = dsl::explain(code).unwrap();
        let example = page.split("```csv\n").nth(1).and_then(|rest| rest.split("```").next()).expect(code);
        let found = findings(example, None);
        assert!(!found.is_empty() && found.iter().all(|d| d.code == code), "{code}: {}", shown(example, &found));
        assert!(found.iter().all(|d| d.help.is_some()), "{code}");
    }
}

#[test]
fn faults_name_row_and_column() {
    let tables = [
        "",
        "0F0,0B0\n\n1F0,1B0\n",
        "0F0,0B0\r\n 1F0x ,1B0\r\n",
        "0F0,0G0,0f0,F0,0F,0UNSHARD3,99999999999F0,0F4294967295,(0F1;0B0,(0F1;0F2)OVERLAP_F_B,(0F1;0B0)OVERLAP\n",
        "0F0,0B0,0B0,0I0\n",
        "0F0,0B0,0I0,0W0\n",
        "0F0,0F1,0B0,0I1\n",
        "0F0,0F1,0B0,0W1\n",
        "0F0,0B0\n2F0,2B0\n",
        "0F0,0B0\n,,\n",
        "0F0,0F1,0B0,0B1\n1F0,1B0\n",
        "0F1,0B1\n",
        "0F0,0I0,0W0,0W1,0I1,0F1\n",
        "0F0,(0B1;0F1)OVERLAP_F_B,0B0\n",
        "0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n",
        "0F0,0SEND_F0,0RECV_B0,0B0,0SEND_B0\n1RECV_F0,1F0,1SEND_F0,1B0,1SEND_B0\n",
        "0SEND_F0,0F0,0B0,0RECV_B0\n1F0,1RECV_F0,1SEND_B0,1B0\n",
        "0UNSHARD,0F0,0B0\n1F0,1B0\n",
        "0F0,0B0,0U0,0F1,0B1\n",
        "0F0,0F1,0B0,0U0,0B1,0U1\n1F0,1F1,1B0,1B1,1U0\n",
        "0F0,0U0,0B0,0F1,0B1,0U1\n",
        "0F0,0B0,0F1,0B1,0U0,0U1\n",
    ];
    let all: Vec<String> = tables.iter().map(|text| format!("{text:?}\n{}\n", refusal(text))).collect();
    insta::assert_snapshot!(all.join("\n"));
}

#[test]
fn a_deadlock_shows_the_cells_that_wait() {
    let text = "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n";
    let found = findings(text, None);
    assert_eq!((found.len(), found[0].code), (1, "P0310"));
    let covered: Vec<&str> = found[0].labels.iter().map(|l| &text[l.span.clone()]).collect();
    assert_eq!(covered, ["0B0", "1F1"]);
    assert!(found[0].labels[1].text.contains("row 2, column 2"), "{:?}", found[0].labels);
    assert!(found[0].notes.iter().any(|n| n.contains("waits for the gradient of micro-batch 0 from rank 1")));
}

#[test]
fn dialects() {
    let old = "0F0,0F1,0BW0,0B1,0W1\n";
    let new = "0F0,0F1,0B0,0I1,0W1\n";
    assert!(refusal(old).contains("P0602 row 1, column 3"), "{}", refusal(old));
    let (table, found) = read(old, Some(Dialect::Old));
    assert_eq!(found, []);
    assert_eq!(table.unwrap().program(), Ok(program(new)));
    assert_eq!(findings(new, Some(Dialect::Old))[0].code, "P0602");
    assert_eq!(findings(old, Some(Dialect::New))[0].code, "P0602");
    let both = "0F0,0B0,0W0\n";
    assert_eq!(findings(both, None)[0].code, "P0602");
    assert_eq!(findings(both, Some(Dialect::Old)), []);
    assert_eq!(findings(both, Some(Dialect::New))[0].code, "P0603");
}

/// Line ends, blanks, quotes, spaces and a byte-order mark change nothing; an overlapped pair is its two actions; B
/// beside I and W is run as both.
#[test]
fn forms_of_one_table() {
    let plain = program("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n");
    for text in [
        "0F0,0F1,,,0B0,,0B1\r\n,1F0,1B0,1F1,1B1\r\n",
        "\u{feff}0F0, 0F1 ,\"0B0\",0B1\n1F0,1B0,1F1,1B1",
        "0F0,0F1,0B0,0B1\n1F0,(1B0;1F1)OVERLAP_F_B,1B1\n",
    ] {
        assert_eq!(program(text), plain, "{text:?}");
    }
    assert_eq!(program("0F0,0B0,0F1,0I1,0W1\n"), program("0F0,0I0,0W0,0F1,0I1,0W1\n"));
}

/// Micro-batches in any order: the rings hold what is in flight, and transfers follow the sender.
#[test]
fn other_orders_of_micro_batches() {
    let text = "0F2,0F0,0F1,0B1,0B2,0B0\n1F2,1F0,1F1,1B1,1B2,1B0\n";
    let made = program(text);
    assert_eq!(made.rings[0].stash, 3);
    let swapped = program("0F1,0F0,0B0,0B1\n1F1,1F0,1B0,1B1\n");
    let (facts, _) = analyse(&swapped, &Subject::new(&gpipe(), Shape::new(2, 2)), &Costs::unit(2));
    assert!(facts.proofs.iter().all(|p| p.holds));
}

/// A table of a library schedule means the schedule: the same streams to the last receive.
#[test]
fn what_is_written_is_read_back() {
    let library = dsl::library::names().into_iter().filter_map(dsl::library::schedule);
    let mut seen = 0;
    for schedule in library.filter(|s| s.update == Update::Flush && s.place.copies() == 1) {
        for (ranks, k) in [(1, 1), (1, 5), (2, 1), (2, 3), (2, 4), (4, 8), (5, 2), (8, 32)] {
            // Some orders need a multiple of the ranks, or one more rank.
            let Ok(expanded) = plan::expand(&schedule, Shape::new(ranks, k)) else { continue };
            seen += 1;
            assert_eq!(program(&write(&expanded, Content::ComputeOnly, 1)), expanded, "{} {ranks} {k}", schedule.name);
            let comms = write(&expanded, Content::ComputeComms, 1);
            assert_eq!(write(&program(&comms), Content::ComputeComms, 1), comms);
            assert_eq!(facts(&program(&comms), &schedule, k), facts(&expanded, &schedule, k));
        }
    }
    assert!(seen > 40, "{seen}");
}

/// Several stages on a rank: neighbours hand over, in this order and without sends.
#[test]
fn several_stages_on_a_rank() {
    let vee = "0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n";
    let made = program(vee);
    assert_eq!(made.rank_of_stage.iter().map(|r| r.0).collect::<Vec<_>>(), [0, 1, 1, 0]);
    assert!(refusal("1F0,0F0,1B0,0B0\n").starts_with("P0606 row 1, column 1: 1F0 comes before 0F0"));
    assert!(refusal("0F0,1F0,0B0,1B0\n").starts_with("P0606 row 1, column 3: 0B0 comes before 1B0"));
    assert!(refusal("0F0,0SEND_F0,1RECV_F0,1F0,1B0,0B0\n").contains("0SEND_F0 has no other side"));
    let updates = "0F0,3F0,3B0,3U0,0B0,0U0,0F1,3F1,3B1,0B1,3U1,0U1\n1F0,2F0,2B0,1B0,1U0,2U0,1F1,2F1,2B1,2U1,1B1,1U1\n";
    assert_eq!((program(updates).accumulate, program(updates).streams[0].updates), (1, 2));
}

type Found = (Vec<(u64, u64)>, Vec<u64>);

/// Drift and delay by stage, work by rank.
fn facts(program: &artifact::stream::Program, schedule: &Schedule, k: u32) -> Found {
    let ranks = program.streams.len();
    let (facts, _) = analyse(program, &Subject::new(schedule, Shape::new(ranks as u32, k)), &Costs::unit(ranks));
    assert!(facts.proofs.iter().all(|p| p.holds), "{:?}", facts.proofs);
    let stages = facts.stages.iter().map(|s| (s.drift.max, s.delay.max)).collect();
    (stages, facts.ranks.iter().map(|r| r.busy_ns / u64::from(program.streams[0].microbatches)).collect())
}

/// With `U` cells the drift of an asynchronous schedule comes back, in both formats.
#[test]
fn asynchronous_tables_have_the_drift_of_their_schedule() {
    for (ranks, k, updates) in [(2, 1, 6), (4, 1, 12), (4, 3, 5), (3, 4, 3)] {
        let expanded = plan::expand(&async_1f1b(), Shape::new(ranks, k)).unwrap();
        let there = facts(&expanded, &async_1f1b(), k);
        for content in [Content::ComputeOnly, Content::ComputeComms] {
            let text = write(&expanded, content, updates);
            let back = program(&text);
            assert_eq!((back.accumulate, u64::from(back.streams[0].updates)), (k, updates));
            assert_eq!(facts(&back, &async_1f1b(), k), there, "{text}");
            assert_eq!(write(&back, content, updates), text);
        }
    }
}

/// The files that PyTorch's loader accepted (`scripts/torch_csv.py`) are written again byte for byte.
#[test]
fn files_that_pytorch_accepts() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/torch");
    let mut seen = 0;
    for file in std::fs::read_dir(folder).unwrap() {
        let path = file.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        let Some((stem, format)) = name.strip_suffix(".csv").and_then(|n| n.rsplit_once('.')) else { continue };
        if stem.starts_with("pytorch-") {
            continue;
        }
        let (schedule, shape) = stem.rsplit_once('_').expect("SCHEDULE_RANKSxMICROBATCHES");
        let (ranks, k) = shape.split_once('x').expect("RANKSxMICROBATCHES");
        let (ranks, k): (u32, u32) = (ranks.parse().unwrap(), k.parse().unwrap());
        let content = if format == "comms" { Content::ComputeComms } else { Content::ComputeOnly };
        let expanded = plan::expand(&dsl::library::schedule(schedule).unwrap(), Shape::new(ranks, k)).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(write(&expanded, content, (12 / u64::from(k)).max(2)), text, "{name}");
        program(&text);
        seen += 1;
    }
    assert!(seen >= 28, "{seen}");
}

/// PyTorch's own schedules, as it writes them (`scripts/torch_csv.py --dump`): both formats are sound and compute the
/// same.
#[test]
fn tables_that_pytorch_writes() {
    let read_file = |name: &str| {
        let path = format!("{}/../../tests/torch/pytorch-{name}.csv", env!("CARGO_MANIFEST_DIR"));
        std::fs::read_to_string(path).unwrap()
    };
    for name in ["interleaved-1f1b", "interleaved-zb", "looped-bfs", "zbv", "dualpipev"] {
        let (compute, comms) = (read_file(&format!("{name}.compute")), read_file(&format!("{name}.comms")));
        let lints: Vec<&str> = read(&compute, None).1.iter().map(|d| d.code).collect();
        let expected: &[&str] = match name {
            "dualpipev" => &["P0620"],
            // Its backward passes run in descending order.
            "looped-bfs" => &["P0622"],
            _ => &[],
        };
        assert_eq!(lints, expected, "{name}");
        let (compute, comms) = (program(&compute), program(&comms));
        assert_eq!(write(&compute, Content::ComputeOnly, 1), write(&comms, Content::ComputeOnly, 1), "{name}");
        assert_eq!(facts(&compute, &gpipe(), 6), facts(&comms, &gpipe(), 6), "{name}");
    }
}

const PIECES: [&str; 24] = [
    "0",
    "1",
    "2",
    "F",
    "B",
    "I",
    "W",
    "U",
    "BW",
    ",",
    ",",
    "\n",
    "\r\n",
    "SEND_F",
    "RECV_F",
    "SEND_B",
    "RECV_B",
    "(",
    ";",
    ")OVERLAP_F_B",
    "UNSHARD",
    " ",
    "\"",
    "é",
];

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever the text: no panic, and places that lie in it.
    #[test]
    fn any_text(pieces in prop::collection::vec(prop::sample::select(&PIECES[..]), 0..60)) {
        let text = pieces.concat();
        for diagnostic in findings(&text, None) {
            prop_assert!(diagnostic.labels.iter().all(|l| text.get(l.span.clone()).is_some()), "{diagnostic:?}");
        }
    }

    /// A sound table with two cells exchanged, removed or doubled is read, refused or deadlocks: never an internal error.
    #[test]
    fn edited_tables(
        comms in any::<bool>(),
        asynchronous in any::<bool>(),
        several in any::<bool>(),
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(), 0..4_u8), 1..4),
    ) {
        let schedule = if asynchronous { async_1f1b() } else { one_f_one_b() };
        let schedule = if several { dsl::library::schedule("interleaved_1f1b").unwrap() } else { schedule };
        let expanded = plan::expand(&schedule, Shape::new(3, if several { 3 } else { 2 })).unwrap();
        let content = if comms { Content::ComputeComms } else { Content::ComputeOnly };
        let mut rows: Vec<Vec<String>> = write(&expanded, content, 3)
            .lines()
            .map(|line| line.split(',').map(String::from).collect())
            .collect();
        for (a, b, kind) in edits {
            let row = a.index(rows.len());
            let (i, j) = (a.index(rows[row].len()), b.index(rows[row].len()));
            match kind {
                0 => drop(rows[row].remove(i)),
                1 => { let cell = rows[row][i].clone(); rows[row].insert(j, cell); }
                _ => rows[row].swap(i, j),
            }
        }
        let text = rows.iter().map(|row| row.join(",") + "\n").collect::<String>();
        let found = findings(&text, None);
        prop_assert!(found.iter().all(|d| d.code != "P0399"), "{text}{}", shown(&text, &found));
    }
}
