//! The order in which ranks enqueue transfers, for every schedule of the library.

use artifact::ids::StageId;
use artifact::stream::{Op, Program};
use runtime::device::order::{Order, Ring, Side, Step};
use std::collections::HashSet;

/// Updates of a segment.
const UPDATES: u64 = 9;

/// Programs of the library's schedules that can run, with their names; those that flush for a tied model and with a global norm, too.
fn programs() -> Vec<(String, Program)> {
    let mut found = Vec::new();
    for name in dsl::library::names() {
        let schedule = dsl::library::schedule(name).expect("a library schedule");
        for (ranks, accumulate) in [(2, 2), (2, 4), (4, 4), (4, 8), (8, 16)] {
            for (tied, global_norm) in [(false, false), (true, false), (false, true), (true, true)] {
                let shape = plan::Shape { tied, global_norm, ..plan::Shape::new(ranks, accumulate) };
                let Ok(program) = plan::expand(&schedule, shape) else { continue };
                if program.copies == 1 {
                    found.push((
                        format!("{name}, {ranks} ranks, accumulate {accumulate}, tied {tied}, norm {global_norm}"),
                        program,
                    ));
                }
            }
        }
    }
    assert!(found.len() > 50, "most schedules have most shapes: {}", found.len());
    found
}

/// A rank's exchanges of a segment, in order.
fn exchanges(program: &Program, rank: usize) -> Vec<Vec<Side>> {
    let limit = |by_update: bool| UPDATES * if by_update { 1 } else { u64::from(program.accumulate) };
    let (mut order, mut found) = (Order::new(program, &program.streams, rank), Vec::new());
    let (mut open, mut over) = (0, false);
    while !(over && open == 0) {
        match order.next().expect("a sound program never ends") {
            Step::Instruction(op, _, at) if Ring::of(op).is_some() && at < limit(op.by_update()) => open += 1,
            Step::Instruction(..) => {}
            Step::Exchange(sides) => {
                let sides: Vec<Side> = sides.into_iter().filter(|s| s.mb < limit(s.ring.by_update())).collect();
                open -= sides.len();
                if !sides.is_empty() {
                    found.push(sides);
                }
            }
            Step::Repetition(n) => over = n * u64::from(program.streams[rank].microbatches) >= limit(false),
        }
    }
    found
}

/// Borders are fewer.
const NORMS: usize = 1 << 32;

/// What a transfer is called at both ends: border, direction, micro-batch.
fn name(side: &Side) -> (usize, bool, u64) {
    let s = side.stage.index();
    match side.ring {
        Ring::RecvF => (s - 1, false, side.mb),
        Ring::SendF => (s, false, side.mb),
        Ring::RecvB => (s, true, side.mb),
        Ring::SendB => (s - 1, true, side.mb),
        // Beyond all borders: from the first stage, and to it.
        Ring::SendG => (usize::MAX, s > 0, side.mb),
        Ring::RecvG => (usize::MAX, s == 0, side.mb),
        // As those of the borders, told apart by the number.
        Ring::RecvN => (NORMS + s - 1, false, side.mb),
        Ring::SendN => (NORMS + s, false, side.mb),
        Ring::RecvT => (NORMS + s, true, side.mb),
        Ring::SendT => (NORMS + s - 1, true, side.mb),
    }
}

/// Runs queues of exchanges. A transfer is done when it is at the heads of both ends' queues; an exchange, when all of its are. True: all end.
fn ends(queues: &[Vec<Vec<Side>>]) -> bool {
    let (mut at, mut done) = (vec![0; queues.len()], HashSet::new());
    loop {
        let mut heads = HashSet::new();
        for side in queues.iter().zip(&at).flat_map(|(queue, &i)| queue.get(i).into_iter().flatten()) {
            // The second end that is there.
            if !heads.insert(name(side)) {
                done.insert(name(side));
            }
        }
        let mut moved = false;
        for (queue, i) in queues.iter().zip(&mut at) {
            if queue.get(*i).is_some_and(|sides| sides.iter().all(|side| done.contains(&name(side)))) {
                *i += 1;
                moved = true;
            }
        }
        if !moved {
            return queues.iter().zip(&at).all(|(queue, &i)| i == queue.len());
        }
    }
}

#[test]
fn transfers_that_block_each_other_never_deadlock() {
    for (what, program) in programs() {
        let queues: Vec<_> = (0..program.streams.len()).map(|rank| exchanges(&program, rank)).collect();
        assert!(ends(&queues), "{what}");
    }
}

/// What the order is good for: the instructions' own does deadlock.
#[test]
fn transfers_in_the_order_of_the_instructions_deadlock() {
    let naive = |program: &Program| -> Vec<Vec<Vec<Side>>> {
        let side = |(op, stage, mb): (Op, StageId, u64)| Some(vec![Side { stage, ring: Ring::of(op)?, mb }]);
        program.streams.iter().map(|s| s.segment(UPDATES).filter_map(side).collect()).collect()
    };
    let stuck: Vec<String> =
        programs().into_iter().filter(|(_, program)| !ends(&naive(program))).map(|(what, _)| what).collect();
    assert!(stuck.iter().any(|what| what.starts_with("one_f_one_b")), "{stuck:?}");
    assert!(stuck.iter().any(|what| what.starts_with("async_1f1b")), "{stuck:?}");
}

/// Transfers between two ranks in both directions that happen together are one group, and there are some.
#[test]
fn both_directions_between_two_ranks_are_grouped() {
    let schedule = dsl::library::schedule("one_f_one_b").expect("a library schedule");
    let program = plan::expand(&schedule, plan::Shape::new(2, 8)).expect("it has this shape");
    let both =
        |sides: &&Vec<Side>| sides.iter().any(|s| s.ring == Ring::SendF) && sides.iter().any(|s| s.ring == Ring::RecvB);
    let grouped = exchanges(&program, 0).iter().filter(both).count();
    assert!(grouped > 0, "of {} exchanges", exchanges(&program, 0).len());
}
