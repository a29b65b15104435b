//! Work of `check` is counted: instructions that its passes visit.

use dsl::spec::At;
use plan::facts::Facts;
use plan::time::Costs;
use plan::{Shape, Subject, analyse_proved, expand_proved};

/// Facts, instructions of the program, and what is visited for each.
fn work(name: &str, shape: Shape, change: impl FnOnce(&mut Subject)) -> (Facts, f64, f64) {
    let schedule = dsl::library::schedule(name).unwrap();
    let (program, proved) = expand_proved(&schedule, shape).unwrap();
    let mut subject = Subject::new(&schedule, shape);
    change(&mut subject);
    let costs = Costs::uniform(program.rank_of_stage.len(), 1000, 1000, 1000, 100);
    let facts = analyse_proved(&program, &proved, &subject, &costs).0;
    let size = program.instructions() as f64;
    let each = facts.work as f64 / size;
    (facts, size, each)
}

/// Visits of each instruction, at most: placing, indexing, relations, one execution, a few timed turns.
const VISITS_MAX: f64 = 24.0;

/// Linear in ranks x micro-batches: however many there are of either, each instruction is visited as often, to a tenth.
#[test]
fn visits_of_an_instruction_do_not_grow_with_the_program() {
    for name in
        ["gpipe", "one_f_one_b", "interleaved_1f1b", "looped_bfs", "zb_h1", "zb_h2", "zb_v", "v_half", "interleaved_zb"]
    {
        let mut visits = Vec::new();
        for (ranks, rounds) in [(4, 4), (4, 32), (8, 8), (16, 2), (16, 16), (32, 8)] {
            let (_, size, each) = work(name, Shape::new(ranks, ranks * rounds), |_| ());
            assert!(each <= VISITS_MAX, "{name}: {each} visits of {size} instructions, {ranks} ranks, {rounds} rounds");
            visits.push(each);
        }
        let (least, most) = visits.iter().fold((f64::MAX, 0.0), |(a, b), v| (v.min(a), v.max(b)));
        assert!(most <= 1.1 * least, "{name}: {visits:.1?}");
    }
}

/// What a run without end is analysed for is its period: drains however far apart are no more work.
#[test]
fn a_boundary_costs_nothing() {
    for (name, ranks, accumulate) in [("async_1f1b", 8, 4), ("async_1f1b", 16, 32), ("one_f_one_b", 8, 32)] {
        let of = |boundary| work(name, Shape::new(ranks, accumulate), |s| s.boundary = boundary).0.work;
        let without = of(None);
        for updates in [1, 100, 1_000_000, u64::MAX] {
            assert!(of(Some(updates)) <= without, "{name}: {updates} updates");
        }
    }
}

/// A bound that no accumulate meets is given up after a few lengths; one that is met is solved.
#[test]
fn bubbles_out_of_reach_are_not_searched_for() {
    let bound = |value| Some(At { value, span: 0..1 });
    for (name, ranks, accumulate) in
        [("one_f_one_b", 4, 8), ("gpipe", 16, 64), ("interleaved_1f1b", 8, 64), ("async_1f1b", 8, 4)]
    {
        let shape = Shape::new(ranks, accumulate);
        let free = work(name, shape, |_| ()).0.work;
        let (facts, ..) = work(name, shape, |s| s.bubble = bound(0.0));
        let longest = f64::from(accumulate.max(2 * ranks)) / f64::from(accumulate);
        assert!(facts.proofs.iter().any(|p| !p.holds), "{name}");
        assert!(facts.work as f64 <= free as f64 * (2.0 + 6.0 * longest), "{name}: {} beside {free}", facts.work);
    }
}
