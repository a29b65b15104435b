//! Published and derived tables: staleness and schedules.

use crate::make::{async_1f1b, gpipe, one_f_one_b, zb_h};
use dsl::schedule::{Schedule, Update};
use plan::facts::Facts;
use plan::time::Costs;
use plan::{Shape, Subject, analyse};

fn facts_with(schedule: &Schedule, shape: Shape, costs: &Costs, boundary: Option<u64>) -> Facts {
    let program = plan::expand(schedule, shape).unwrap();
    let subject = Subject { boundary, ..Subject::new(schedule, shape) };
    let (facts, _) = analyse(&program, &subject, costs);
    assert!(facts.proofs.iter().all(|p| p.holds), "{:?}", facts.proofs);
    facts
}

fn facts(schedule: &Schedule, ranks: u32, accumulate: u32) -> Facts {
    facts_with(schedule, Shape::new(ranks, accumulate), &Costs::unit(ranks as usize), None)
}

fn drift_max(facts: &Facts) -> Vec<u64> {
    facts.stages.iter().map(|s| s.drift.max).collect()
}

/// The library's schedules are the ones that these tests build by hand.
#[test]
fn library_schedules_expand_to_the_same_streams() {
    let split = |k| Schedule { name: format!("zb_h{k}"), ..zb_h(k, Update::Flush) };
    for hand in [gpipe(), one_f_one_b(), async_1f1b(), split(1), split(2)] {
        let library = library(&hand.name);
        for (ranks, accumulate) in [(1, 1), (2, 3), (4, 4), (8, 3)] {
            let shape = Shape::new(ranks, accumulate);
            assert_eq!(plan::expand(&library, shape), plan::expand(&hand, shape), "{} {shape:?}", hand.name);
        }
    }
}

/// Worked cases, and the formulas: max ceil(w/K), mean w/K, drift = delay, versions if stashed ceil(w/K) + 1.
#[test]
fn drift_of_async_1f1b() {
    let table: [(u32, u32, &[u64]); 4] =
        [(4, 1, &[3, 2, 1, 0]), (4, 2, &[2, 1, 1, 0]), (4, 4, &[1, 1, 1, 0]), (8, 4, &[2, 2, 2, 1, 1, 1, 1, 0])];
    for (ranks, accumulate, expected) in table {
        assert_eq!(drift_max(&facts(&async_1f1b(), ranks, accumulate)), expected, "P={ranks} K={accumulate}");
    }
    for ranks in 1..=9 {
        for accumulate in 1..=10 {
            let facts = facts(&async_1f1b(), ranks, accumulate);
            for (s, stage) in facts.stages.iter().enumerate() {
                let w = u64::from(ranks) - 1 - s as u64;
                assert_eq!(stage.drift.max, w.div_ceil(u64::from(accumulate)));
                assert_eq!(stage.delay, stage.drift);
                let mean = w as f64 / f64::from(accumulate);
                assert!((stage.drift.mean - mean).abs() < 1e-12, "{} is not {mean}", stage.drift.mean);
                assert_eq!(stage.versions_live, 1);
                assert_eq!(facts.ranks[s].in_flight_max, ranks - s as u32);
            }
        }
    }
}

/// A drain every N micro-batches: the same maxima, smaller means, by the formula with a drain.
#[test]
fn drift_with_a_boundary() {
    let drained = |ranks, accumulate, updates| {
        let (shape, costs) = (Shape::new(ranks, accumulate), Costs::unit(ranks as usize));
        facts_with(&async_1f1b(), shape, &costs, Some(updates))
    };
    assert!((drained(4, 4, 2).stages[0].drift.mean - 0.375).abs() < 1e-12);
    assert_eq!(drift_max(&drained(4, 4, 1)), [0; 4], "nothing is ever late when every update drains");
    for (ranks, k, updates) in [(4u64, 4u64, 2u64), (5, 3, 4), (8, 1, 5), (6, 2, 100)] {
        let facts = drained(ranks as u32, k as u32, updates);
        let n = updates * k;
        for (s, stage) in facts.stages.iter().enumerate() {
            let w = ranks - 1 - s as u64;
            let drifts: Vec<u64> = (0..n).map(|m| m / k - m.saturating_sub(w) / k).collect();
            assert_eq!(stage.drift.max, *drifts.iter().max().unwrap());
            let mean = drifts.iter().sum::<u64>() as f64 / n as f64;
            assert!(
                (stage.drift.mean - mean).abs() < 1e-12,
                "P={ranks} K={k} N={updates}: {} {mean}",
                stage.drift.mean
            );
        }
    }
}

/// ZB-H1's order with local updates: W reads no weights, so its deferral is delay and not drift.
#[test]
fn deferred_weight_gradients_delay_without_drift() {
    let facts = facts(&zb_h(1, Update::Local), 8, 8);
    let last = &facts.stages[7];
    assert_eq!((last.drift.max, last.delay.max), (0, 1));
}

#[test]
fn flushes_have_no_staleness() {
    for schedule in [gpipe(), one_f_one_b(), zb_h(1, Update::Flush)] {
        for stage in facts(&schedule, 4, 8).stages {
            assert_eq!((stage.drift.max, stage.delay.max), (0, 0));
        }
    }
}

/// Published values, F = I = W = 1, no latency.
#[test]
fn exact_makespans_idle_and_peaks() {
    let check = |schedule: &Schedule, ranks: u32, m: u32, makespan: u64, idle: u64, peaks: &[u32]| {
        let facts = facts(schedule, ranks, m);
        assert_eq!(facts.makespan_ns, makespan);
        let peak: Vec<u32> = facts.ranks.iter().map(|r| r.in_flight_max).collect();
        assert_eq!(peak, peaks, "{}", schedule.name);
        for rank in &facts.ranks {
            assert_eq!(makespan - rank.busy_ns, idle);
            let expected = f64::from(ranks - 1) / f64::from(m + ranks - 1);
            assert!((rank.bubble_makespan - expected).abs() < 1e-12);
            assert!((rank.bubble - expected).abs() < 1e-12, "steady {} {expected}", rank.bubble);
        }
    };
    check(&gpipe(), 4, 8, 33, 9, &[8, 8, 8, 8]);
    check(&one_f_one_b(), 4, 8, 33, 9, &[4, 3, 2, 1]);
    check(&one_f_one_b(), 8, 16, 69, 21, &[8, 7, 6, 5, 4, 3, 2, 1]);
}

/// Published values with several stages a rank: times and peaks by chunk.
#[test]
fn exact_makespans_idle_and_peaks_of_chunked_schedules() {
    let check = |name: &str, ranks: u32, m: u32, makespan: u64, span: u64, peaks: &[u32]| {
        let schedule = library(name);
        let facts = facts_with(&schedule, Shape::new(ranks, m), &Costs::unit(2 * ranks as usize), None);
        assert_eq!(facts.makespan_ns, makespan, "{name}");
        assert_eq!(facts.ranks.iter().map(|r| r.span_ns).max(), Some(span), "{name}");
        let peak: Vec<u32> = facts.ranks.iter().map(|r| r.in_flight_max).collect();
        assert_eq!(peak, peaks, "{name}");
        for rank in &facts.ranks {
            assert_eq!(rank.busy_ns, u64::from(2 * m) * 3);
        }
    };
    check("interleaved_1f1b", 4, 8, 57, 57, &[11, 9, 7, 5]);
    check("interleaved_1f1b_torch", 4, 8, 57, 57, &[11, 9, 7, 5]);
    check("looped_bfs", 4, 8, 57, 57, &[16; 4]);
    check("interleaved_zb", 4, 8, 51, 51, &[8; 4]);
    check("zb_v", 4, 8, 51, 48, &[8; 4]);
}

/// Published: peaks of floor((P+2)/2) and floor((P+4)/3) micro-batches of two chunks; bubbles of a half and two thirds
/// of 1F1B's, and an overhead of a few units.
#[test]
fn controllable_memory() {
    for ranks in 1..=12 {
        let m = 3 * ranks;
        let run = |name: &str| {
            let schedule = library(name);
            facts_with(&schedule, Shape::new(ranks, m), &Costs::unit(2 * ranks as usize), None)
        };
        let (half, min) = (run("v_half"), run("v_min"));
        let peak = |facts: &Facts| facts.ranks.iter().map(|r| r.in_flight_max).max().unwrap();
        assert!(peak(&half) <= 2 * ((ranks + 2) / 2), "V-Half on {ranks}: {}", peak(&half));
        assert_eq!(peak(&min), 2 * ((ranks + 4) / 3), "V-Min on {ranks}");
        let one_f_one_b = 6 * (u64::from(ranks) - 1);
        let bubble = |facts: &Facts| facts.makespan_ns - 6 * u64::from(m);
        assert!(bubble(&half) <= one_f_one_b / 2 + 6, "V-Half on {ranks}: {}", bubble(&half));
        assert!(bubble(&min) <= 2 * one_f_one_b / 3 + 1, "V-Min on {ranks}: {}", bubble(&min));
    }
}

/// Published: 2P + 1 stage inputs on every rank (P + 1 with the stages of twice as many ranks folded).
#[test]
fn folded_dualpipe() {
    for ranks in 1..=8 {
        for m in [2 * ranks, 2 * ranks + 1, 4 * ranks] {
            let facts =
                facts_with(&library("dualpipe_v"), Shape::new(ranks, m), &Costs::unit(2 * ranks as usize), None);
            assert_eq!(facts.makespan_ns, u64::from(6 * m + ranks - 1));
            assert!(facts.ranks.iter().all(|r| r.in_flight_max == 2 * ranks + 1), "{ranks} ranks, {m}");
        }
    }
}

/// DualPipe: P + 1 micro-batches on every rank, and a bubble of (P/2 - 1)(F + I - W). The published (P/2 - 1)(F&B + B - 3W)
/// is more: there a gradient is sent at the end of a pair, with its W.
#[test]
fn dualpipe() {
    for ranks in [2, 4, 6, 8, 12] {
        for m in [2 * ranks, 2 * ranks + 2, 4 * ranks] {
            for (f, i, w) in [(1, 1, 1), (2, 2, 1), (3, 2, 2), (5, 4, 3)] {
                let costs = Costs::uniform(2 * ranks as usize, f, i, w, 0);
                let facts = facts_with(&library("dualpipe"), Shape::new(ranks, m), &costs, None);
                let idle = u64::from(ranks / 2 - 1) * (f + i - w);
                assert_eq!(facts.makespan_ns, u64::from(m) * (f + i + w) + idle, "{ranks} ranks, {m}, {f} {i} {w}");
                assert!(idle <= u64::from(ranks / 2 - 1) * (f + i + w + i + w - 3 * w));
                assert!(facts.ranks.iter().all(|r| r.in_flight_max == ranks + 1), "{ranks} ranks, {m}");
            }
        }
    }
}

/// Chimera: bubble (P - 2)/(2M + P - 2) where B takes as long as F; P/2 + 1 to P micro-batches.
#[test]
fn chimera() {
    for ranks in [2, 4, 6, 8, 12] {
        for m in [ranks, 2 * ranks, 5 * ranks] {
            let costs = Costs::uniform(2 * ranks as usize, 2, 1, 1, 0);
            let facts = facts_with(&library("chimera"), Shape::new(ranks, m), &costs, None);
            let bubble = f64::from(ranks - 2) / f64::from(2 * m + ranks - 2);
            for (r, rank) in facts.ranks.iter().enumerate() {
                assert!((rank.bubble_makespan - bubble).abs() < 1e-12, "{ranks} ranks, {m}: {}", rank.bubble_makespan);
                let inner = (r as u32).min(ranks - 1 - r as u32);
                assert_eq!(rank.in_flight_max, ranks / 2 + 1 + inner, "{ranks} ranks, {m}");
            }
        }
    }
}

/// The two copies are pipelines of their own: neither hands over to the other, though they meet on the last rank.
#[test]
fn copies_do_not_meet() {
    let program = plan::expand(&library("dualpipe"), Shape::new(4, 8)).unwrap();
    assert_eq!((program.copies, program.accumulate, program.stages_of_copy()), (2, 4, 4));
    let homes: Vec<u32> = program.rank_of_stage.iter().map(|rank| rank.0).collect();
    assert_eq!(homes, [0, 1, 2, 3, 3, 2, 1, 0]);
    assert_eq!((program.after(3), program.before(4), program.hands_over(3)), (None, None, false));
    let refused = |ranks, m| plan::expand(&library("dualpipe"), Shape::new(ranks, m)).unwrap_err()[0].code;
    assert_eq!((refused(3, 6), refused(4, 7)), ("P0314", "P0309"));
}

#[test]
fn peak_does_not_depend_on_the_number_of_microbatches() {
    let peaks = |m| facts(&one_f_one_b(), 8, m).ranks.iter().map(|r| r.in_flight_max).collect::<Vec<_>>();
    assert_eq!(peaks(8), peaks(32));
    let short: Vec<u32> = facts(&one_f_one_b(), 8, 3).ranks.iter().map(|r| r.in_flight_max).collect();
    assert_eq!(short, [3, 3, 3, 3, 3, 3, 2, 1], "min(M, P - s)");
}

/// A row of the zero-bubble paper: (P, M, F, I, W, hop) in microseconds, then the bubbles of 1F1B, H1, H2.
type Row = ((u32, u32), [u64; 4], [f64; 3]);

const ZERO_BUBBLE: [Row; 5] = [
    ((8, 24), [18522, 18086, 9337, 601], [0.2431, 0.1585, 0.1083]),
    ((8, 32), [18513, 18086, 9331, 626], [0.1985, 0.1242, 0.0837]),
    ((8, 64), [18546, 18097, 9321, 762], [0.1240, 0.0674, 0.0444]),
    ((8, 24), [29718, 29444, 19927, 527], [0.2347, 0.1323, 0.0698]),
    ((8, 64), [29935, 29621, 19388, 535], [0.1091, 0.0554, 0.0294]),
];

fn library(name: &str) -> Schedule {
    dsl::library::schedule(name).unwrap()
}

fn zero_bubble(schedule: &Schedule, row: &Row) -> Facts {
    let ((ranks, m), [f, i, w, hop], _) = *row;
    facts_with(schedule, Shape::new(ranks, m), &Costs::uniform(ranks as usize, f, i, w, hop), None)
}

#[test]
fn zero_bubble_paper() {
    let near = |found: f64, expected: f64, what: &str| {
        assert!((found - expected).abs() < 5.1e-5, "{what}: {found} {expected}")
    };
    for row in &ZERO_BUBBLE {
        let [f1, h1, h2] = row.2;
        near(zero_bubble(&library("one_f_one_b"), row).ranks[0].bubble_makespan, f1, "1F1B");
        near(zero_bubble(&library("zb_h1"), row).ranks[0].bubble_makespan, h1, "H1");
        near(zero_bubble(&library("zb_h2"), row).ranks[0].bubble_span, h2, "H2");
    }
    let span = |schedule: &Schedule, row: usize| {
        zero_bubble(schedule, &ZERO_BUBBLE[row]).ranks.iter().map(|r| r.span_ns).max().unwrap()
    };
    assert_eq!(span(&library("one_f_one_b"), 0), 1_456_749);
    assert_eq!(span(&library("zb_h1"), 0), 1_310_405);
    assert_eq!(span(&library("zb_h2"), 0), 1_236_632);
    assert_eq!(span(&library("one_f_one_b"), 3), 2_480_217);
    assert_eq!(span(&library("zb_h1"), 3), 2_187_537);
    assert_eq!(span(&library("zb_h2"), 3), 2_040_670);
}

/// In flight from F to W: P for H1 on every rank, 2P - 1 for H2.
#[test]
fn zero_bubble_peaks() {
    let peaks = |name| facts(&library(name), 4, 12).ranks.iter().map(|r| r.in_flight_max).collect::<Vec<_>>();
    assert_eq!(peaks("zb_h1"), [4; 4]);
    assert_eq!(peaks("zb_h2"), [7; 4]);
}

/// No bubble in steady state without latency; with latency c, utilisation P t / (P t + 2 (P - 1) c).
#[test]
fn bubble_of_async_1f1b() {
    for (ranks, accumulate) in [(1, 1), (2, 4), (4, 1), (4, 4), (8, 3)] {
        for rank in facts(&async_1f1b(), ranks, accumulate).ranks {
            assert_eq!(rank.bubble, 0.0);
        }
    }
    for (ranks, accumulate, hop) in [(8u32, 8u32, 100u64), (4, 2, 30), (4, 1, 999)] {
        let costs = Costs::uniform(ranks as usize, 1000, 1000, 1000, hop);
        let facts = facts_with(&async_1f1b(), Shape::new(ranks, accumulate), &costs, None);
        let (p, t, c) = (f64::from(ranks), 3000.0, hop as f64);
        let expected = 1.0 - p * t / (p * t + 2.0 * (p - 1.0) * c);
        for rank in &facts.ranks {
            assert!((rank.bubble - expected).abs() < 1e-9, "P={ranks} K={accumulate}: {} {expected}", rank.bubble);
        }
    }
}

/// The bottleneck stage sets the period, exactly, when stages are uneven.
#[test]
fn uneven_stages() {
    let mut costs = Costs::unit(4);
    costs.stages[2].f_ns = 3;
    costs.stages[2].w_ns = 4;
    let facts = facts_with(&async_1f1b(), Shape::new(4, 4), &costs, None);
    assert_eq!(facts.period_ns, 4 * 8);
    assert_eq!(facts.ranks[2].bubble, 0.0);
    assert!((facts.ranks[0].bubble - (1.0 - 3.0 / 8.0)).abs() < 1e-12);
}

/// A run's bubble: the fill and drain, (P-1)/(M+P-1) for M micro-batches in all.
#[test]
fn whole_runs() {
    let program = plan::expand(&async_1f1b(), Shape::new(4, 4)).unwrap();
    for updates in [1, 5, 50, 400] {
        let timed = plan::time::run(&program, &Costs::unit(4), updates);
        let makespan_ns = timed.iter().map(|t| t.end_ns).max().unwrap();
        assert_eq!(makespan_ns, 12 * updates + 9);
        for rank in 0..4 {
            let of_rank = timed.iter().filter(|t| t.rank.index() == rank);
            let busy_ns: u64 = of_rank.map(|t| t.end_ns - t.start_ns).sum();
            assert_eq!(busy_ns, 12 * updates);
            let m = 4.0 * updates as f64;
            assert!((1.0 - busy_ns as f64 / makespan_ns as f64 - 3.0 / (m + 3.0)).abs() < 1e-12);
        }
    }
}
