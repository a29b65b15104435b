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
