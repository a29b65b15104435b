//! `cover_latency`: no bubble under `full`, the drift that the formula bounds, and what lies between.

use crate::make::{async_1f1b, one_f_one_b, zb_h};
use dsl::schedule::Update;
use dsl::spec::Cover;
use plan::cover::cover;
use plan::facts::Facts;
use plan::time::Costs;
use plan::{Shape, Subject, analyse, expand};

fn covered(share: u32, ranks: u32, accumulate: u32, costs: &Costs) -> Facts {
    let (schedule, shape) = (async_1f1b(), Shape::new(ranks, accumulate));
    let (schedule, shape) = cover(&schedule, shape, Cover { share }, costs).unwrap_or((schedule, shape));
    let program = expand(&schedule, shape).expect("more in flight is as sound");
    let (facts, found) = analyse(&program, &Subject::new(&schedule, shape), costs);
    assert!(found.is_empty(), "{found:?}");
    facts
}

fn bubble(facts: &Facts) -> f64 {
    facts.ranks.iter().map(|r| r.bubble).fold(0.0, f64::max)
}

#[test]
fn full_has_no_bubble_and_the_drift_of_the_formula() {
    for ranks in [2u32, 3, 4, 8, 13] {
        for accumulate in [1, 3, 8] {
            // Hops from a thirtieth of F and B to two and a half times as much.
            for hop in [1, 9, 15, 16, 30, 44, 75] {
                let costs = Costs::uniform(ranks as usize, 10, 12, 8, hop);
                let further = (2 * hop).div_ceil(30);
                let facts = covered(Cover::FULL, ranks, accumulate, &costs);
                assert_eq!(bubble(&facts), 0.0, "P {ranks}, K {accumulate}, hop {hop}");
                for (s, stage) in facts.stages.iter().enumerate() {
                    let w = u64::from(ranks) - 1 - s as u64;
                    let bound = ((1 + further) * w).div_ceil(u64::from(accumulate));
                    assert_eq!(stage.drift.max, bound, "P {ranks}, K {accumulate}, hop {hop}, stage {s}");
                    assert_eq!(u64::from(facts.ranks[s].in_flight_max), (1 + further) * w + 1);
                }
            }
        }
    }
}

#[test]
fn none_uses_the_share_of_the_formula() {
    for (ranks, hop) in [(2, 3), (4, 30), (8, 1), (8, 7)] {
        let costs = Costs::uniform(ranks as usize, 10, 12, 8, hop);
        let facts = covered(0, ranks, 8, &costs);
        let (p, t, c) = (f64::from(ranks), 30.0, hop as f64);
        let expected = 1.0 - p * t / (p * t + 2.0 * (p - 1.0) * c);
        assert!((bubble(&facts) - expected).abs() < 1e-12, "P {ranks}, hop {hop}: {} {expected}", bubble(&facts));
    }
}

#[test]
fn a_part_lies_between() {
    let costs = Costs::uniform(8, 10, 12, 8, 1);
    let of = |share| bubble(&covered(share, 8, 8, &costs));
    // Every second hop is covered: what is left is that of one hop there and back, over two micro-batches.
    let half = of(Cover::FULL / 2);
    assert!((half - (1.0 - 30.0 / 31.0)).abs() < 1e-12, "{half}");
    assert!(of(0) > half && half > of(Cover::FULL));
    let in_flight: Vec<u32> = covered(5000, 8, 8, &costs).ranks.iter().map(|r| r.in_flight_max).collect();
    assert_eq!(in_flight, [11, 10, 8, 7, 5, 4, 2, 1]);
}

#[test]
fn uneven_stages_are_covered_for_the_slowest() {
    let mut costs = Costs::uniform(5, 10, 12, 8, 20);
    costs.stages[2].f_ns = 25;
    let facts = covered(Cover::FULL, 5, 4, &costs);
    assert_eq!(facts.ranks[2].bubble, 0.0);
}

#[test]
fn only_runs_without_end_cover() {
    let costs = Costs::uniform(4, 10, 10, 10, 5);
    let full = Cover { share: Cover::FULL };
    for schedule in [one_f_one_b(), zb_h(1, Update::Flush)] {
        assert!(cover(&schedule, Shape::new(4, 8), full, &costs).is_none(), "{}", schedule.name);
    }
    assert!(cover(&zb_h(2, Update::Local), Shape::new(4, 8), full, &costs).is_some());
    assert!(cover(&async_1f1b(), Shape::new(4, 8), full, &Costs::unit(4)).is_none(), "hops cost nothing");
}
