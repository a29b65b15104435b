//! Snapshots of instruction grids and streams.

use crate::make::{async_1f1b, gpipe, one_f_one_b, zb_h};
use dsl::schedule::{Schedule, Update};
use plan::Shape;
use plan::grid::grid;
use plan::time::Costs;

fn drawn(schedule: &Schedule, ranks: u32, accumulate: u32) -> String {
    let program = plan::expand(schedule, Shape::new(ranks, accumulate)).unwrap();
    grid(&program, &Costs::unit(ranks as usize))
}

#[test]
fn grids() {
    insta::assert_snapshot!("gpipe_p4_k4", drawn(&gpipe(), 4, 4));
    insta::assert_snapshot!("one_f_one_b_p4_k8", drawn(&one_f_one_b(), 4, 8));
    insta::assert_snapshot!("async_1f1b_p4_k1", drawn(&async_1f1b(), 4, 1));
    insta::assert_snapshot!("async_1f1b_p4_k4", drawn(&async_1f1b(), 4, 4));
    insta::assert_snapshot!("zb_h1_p4_k8", drawn(&zb_h(1, Update::Flush), 4, 8));
    insta::assert_snapshot!("zb_h1_local_p3_k4", drawn(&zb_h(1, Update::Local), 3, 4));
}

/// Under given costs a column is the smallest of them.
#[test]
fn grid_under_costs() {
    let program = plan::expand(&one_f_one_b(), Shape::new(3, 3)).unwrap();
    let mut costs = Costs::uniform(3, 100, 110, 90, 40);
    costs.stages[1].f_ns = 250;
    insta::assert_snapshot!(grid(&program, &costs));
}

/// The epilogue is the stream's end from the first repetition with skipped instructions on.
#[test]
fn epilogues() {
    let text = |schedule: &Schedule, rank, updates| {
        let program = plan::expand(schedule, Shape::new(3, 2)).unwrap();
        let end = plan::grid::epilogue(&program, artifact::ids::RankId(rank), updates);
        let words: Vec<String> =
            end.iter().map(|(op, _, mb)| format!("{}{mb}", artifact::verify::index::Kind::of(*op).name())).collect();
        words.join(" ")
    };
    assert_eq!(text(&async_1f1b(), 2, 2), "F2 B2 SEND_B2 F3 B3 SEND_B3 U1");
    // The receive of micro-batch 6 is the first that is skipped.
    let two_repetitions =
        "F3 SEND_F3 B2 SEND_B2 RECV_F5 RECV_B4 F4 SEND_F4 B3 SEND_B3 RECV_B5 U1 F5 SEND_F5 B4 SEND_B4 B5 SEND_B5 U2";
    assert_eq!(text(&async_1f1b(), 1, 3), two_repetitions);
    assert_eq!(text(&one_f_one_b(), 0, 3), "", "a flush ends by itself");
}

#[test]
fn streams() {
    let program = plan::expand(&async_1f1b(), Shape::new(3, 2)).unwrap();
    insta::assert_debug_snapshot!(program.rings);
    let lines: Vec<String> = program
        .streams
        .iter()
        .map(|s| {
            let text = |list: &[artifact::stream::Instr]| {
                let words: Vec<String> = list
                    .iter()
                    .map(|i| format!("{}{}", artifact::verify::index::Kind::of(i.op).name(), i.mb))
                    .collect();
                words.join(" ")
            };
            format!("{} | {}", text(&s.prologue), text(&s.period))
        })
        .collect();
    insta::assert_snapshot!(lines.join("\n"));
}
