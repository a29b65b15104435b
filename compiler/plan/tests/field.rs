//! What people trip over in pipeline training, as far as it concerns the plan. The others are in `tests/field.rs` of the
//! command line.

use crate::make::{async_1f1b, gpipe, num, one_f_one_b, op, repeat, schedule, step, warmup};
use artifact::verify::{Violation, execute::Stuck, verify};
use dsl::schedule::{Action, Backward, BinaryOp, Update};
use plan::time::Costs;
use plan::{Shape, Subject, analyse};

/// The receiver needs F 1 before it can free F 0's only slot.
#[test]
fn one_receive_slot_for_two_in_flight() {
    let mut program = plan::expand(&gpipe(), Shape::new(2, 3)).unwrap();
    program.rings[1].recv_f = 1;
    assert!(matches!(verify(&program).unwrap_err()[..], [Violation::Ring { ring: "recv_f", .. }]));
}

/// Receive buffers kept for every micro-batch; peak memory that grows with their number.
#[test]
fn rings_do_not_grow_with_the_microbatches() {
    let rings = |m| plan::expand(&one_f_one_b(), Shape::new(4, m)).unwrap().rings;
    assert_eq!(rings(8), rings(64));
    let slots: Vec<u32> = rings(16).iter().map(|r| r.recv_f).collect();
    assert_eq!(slots, [4, 4, 3, 2], "what is in flight, and one more where it comes from another rank");
}

/// The extra receive slot hides a hop; without it the plan is sound too, and slower.
#[test]
fn an_extra_receive_slot_buys_time_for_memory() {
    let with_extra = |receive_extra| {
        let shape = Shape { receive_extra, ..Shape::new(4, 8) };
        let program = plan::expand(&one_f_one_b(), shape).unwrap();
        let costs = Costs::uniform(4, 10, 10, 10, 3);
        let (facts, _) = analyse(&program, &Subject::new(&one_f_one_b(), shape), &costs);
        let slots: u32 = program.rings.iter().map(|r| r.recv_f + r.recv_b).sum();
        (facts.makespan_ns, slots)
    };
    let (lean, extra) = (with_extra(0), with_extra(1));
    assert!(lean.0 > extra.0, "{lean:?} {extra:?}");
    assert_eq!(extra.1 - lean.1, 6, "one slot in each direction at each of three cuts");
    assert_eq!(with_extra(9).0, extra.0, "more slots buy nothing");
}

/// 1F1B hangs when there are fewer micro-batches than ranks: here the warm-up is shorter.
#[test]
fn fewer_microbatches_than_ranks() {
    for m in 1..8 {
        for schedule in [one_f_one_b(), gpipe(), async_1f1b()] {
            plan::expand(&schedule, Shape::new(8, m)).unwrap();
        }
    }
}

/// Megatron takes groups of P, PyTorch as many equal groups as P fits in: 10 micro-batches on 4 ranks are refused by
/// one and taken by the other, 9 by neither.
#[test]
fn microbatches_that_are_no_multiple_of_the_ranks() {
    let refused = |name: &str, m| {
        let schedule = dsl::library::schedule(name).unwrap();
        let mut found = plan::expand(&schedule, Shape::new(4, m)).unwrap_err();
        assert_eq!((found.len(), found[0].code), (1, "P0309"));
        let found = found.remove(0);
        let source = dsl::library::source(found.labels[0].library.as_deref().unwrap()).unwrap();
        assert!(source[found.labels[0].span.clone()].starts_with("sequence F = groups("));
        (found.message, found.notes.join("; "), found.help.unwrap())
    };
    let (message, notes, help) = refused("interleaved_1f1b", 10);
    assert_eq!(message, "10 micro-batches do not divide into groups of 4");
    assert!(notes.contains("by PyTorch's rule, `groups(M / max(1, M / P))`, there are 2 groups of 5"), "{notes}");
    assert_eq!(help, "the nearest accumulate that do are 8 and 12");
    let (message, notes, _) = refused("interleaved_1f1b", 9);
    assert_eq!(message, "9 micro-batches do not divide into groups of 4");
    assert!(!notes.contains("PyTorch"), "{notes}");
    let (message, _, help) = refused("interleaved_1f1b_torch", 9);
    assert_eq!(message, "9 micro-batches do not divide into groups of 4");
    assert_eq!(help, "the nearest accumulate that do are 8 and 10");
    let torch = dsl::library::schedule("interleaved_1f1b_torch").unwrap();
    for m in [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15] {
        plan::expand(&torch, Shape::new(4, m)).unwrap();
    }
}

/// Interleaved stages on two ranks, whose sends wait for their receives: both ranks send first.
#[test]
fn interleaved_stages_with_rendezvous_sends() {
    for name in ["interleaved_1f1b", "looped_bfs", "interleaved_zb", "zb_v", "v_half", "v_min"] {
        let schedule = dsl::library::schedule(name).unwrap();
        for (ranks, m) in [(2, 4), (2, 2), (1, 3), (3, 6), (8, 8), (4, 16)] {
            let lean = Shape { receive_extra: 0, ..Shape::new(ranks, m) };
            for shape in [lean, Shape::new(ranks, m)] {
                plan::expand(&schedule, shape).unwrap_or_else(|e| panic!("{name} {shape:?}: {e:?}"));
            }
        }
    }
}

/// Fewer micro-batches than the warm-up of a schedule of two stages a rank: it runs, or says why not.
#[test]
fn fewer_microbatches_than_a_wave_holds() {
    for name in ["zb_v", "v_half", "v_min", "dualpipe_v", "looped_bfs", "interleaved_1f1b_torch"] {
        let schedule = dsl::library::schedule(name).unwrap();
        for m in 1..=8 {
            if let Err(found) = plan::expand(&schedule, Shape::new(4, m)) {
                panic!("{name}, {m}: {found:?}");
            }
        }
    }
}

/// A receive that is posted early holds up nobody: with 8 ranks of 2 stages the bubble is what the formula says.
#[test]
fn an_early_receive_holds_no_send_up() {
    let schedule = dsl::library::schedule("interleaved_1f1b").unwrap();
    let shape = Shape::new(8, 8);
    let program = plan::expand(&schedule, shape).unwrap();
    let (facts, _) = analyse(&program, &Subject::new(&schedule, shape), &Costs::unit(16));
    assert_eq!(facts.makespan_ns, 3 * (2 * 8 + 7));
}

/// Neighbours on one rank: no transfer, no send slot, one ring.
#[test]
fn stages_on_one_rank_hand_over() {
    let schedule = dsl::library::schedule("zb_v").unwrap();
    let program = plan::expand(&schedule, Shape::new(2, 4)).unwrap();
    let borders: Vec<bool> = (0..4).map(|s| program.hands_over(s)).collect();
    assert_eq!(borders, [false, true, false, false]);
    assert_eq!((program.rings[1].send_f, program.rings[2].send_b), (0, 0));
    assert!(program.rings[2].recv_f > 0 && program.rings[1].recv_b > 0);
    let transfers = |stage: u32| {
        use artifact::stream::Op::{RecvB, RecvF, SendB, SendF};
        let of = program.streams[1].period.iter().filter(|i| i.stage.0 == stage);
        of.filter(|i| matches!(i.op, RecvF | SendF | RecvB | SendB))
            .map(|i| i.op)
            .collect::<std::collections::HashSet<_>>()
    };
    use artifact::stream::Op;
    assert_eq!(transfers(1), [Op::RecvF, Op::SendB].into());
    assert_eq!(transfers(2), [Op::SendF, Op::RecvB].into());
    let mut late = program.clone();
    let period = &mut late.streams[1].period;
    let at = |period: &[artifact::stream::Instr], stage: u32| {
        period.iter().position(|i| i.op == Op::F && i.stage.0 == stage && i.mb == 0).unwrap()
    };
    let (lower, upper) = (at(period, 1), at(period, 2));
    period.swap(lower, upper);
    assert!(matches!(verify(&late).unwrap_err()[..], [Violation::Order { .. }, ..]));
}

/// An update before the last weight gradient breaks accumulation.
#[test]
fn an_update_comes_after_the_last_weight_gradient() {
    let mut program = plan::expand(&gpipe(), Shape::new(2, 2)).unwrap();
    let period = &mut program.streams[1].period;
    let update = period.pop().unwrap();
    let last = period.iter().rposition(|i| matches!(i.op, artifact::stream::Op::B(_))).unwrap();
    period.insert(last, update);
    assert!(matches!(verify(&program).unwrap_err()[..], [Violation::Update { .. }]));
}

/// Both ranks wait for the other's transfer before they make their own.
#[test]
fn both_wait_first() {
    use Action::{B, F};
    // Rank 0 wants its gradient after one forward pass, rank 1 runs two before it makes one.
    let uneven = op(BinaryOp::Mul, num(1), dsl::schedule::Expr::Var(dsl::schedule::Var::S));
    let order = vec![warmup(uneven, vec![step(F)]), repeat(vec![step(F), step(B)])];
    let found = plan::expand(&schedule("mine", Backward::Whole, Update::Local, order), Shape::new(2, 2)).unwrap_err();
    assert_eq!(found[0].code, "P0310");
    assert!(found[0].notes.iter().any(|n| n.contains("waits for the gradient of micro-batch 0 from rank 1")));
}

/// A send that comes too late for its slot: the sender waits for itself.
#[test]
fn a_send_after_its_slot_is_needed_again() {
    let mut program = plan::expand(&gpipe(), Shape::new(2, 3)).unwrap();
    let period = &mut program.streams[0].period;
    let send = period.iter().position(|i| i.op == artifact::stream::Op::SendF).unwrap();
    let instr = period.remove(send);
    period.insert(send + 1, instr);
    assert!(matches!(verify(&program).unwrap_err()[..], [Violation::Ring { ring: "send_f", .. }]));
}

/// Violations name what is broken.
#[test]
fn violations_are_sentences() {
    let mut program = plan::expand(&one_f_one_b(), Shape::new(2, 2)).unwrap();
    program.rings[1].stash = 0;
    let text: Vec<String> = verify(&program).unwrap_err().iter().map(ToString::to_string).collect();
    assert_eq!(text, ["ring: stage 1: ring stash of 0 slots: micro-batch 0 finds its slot taken"]);
    let unproved = Violation::Deadlock(Stuck::Unproved).to_string();
    assert_eq!(unproved, "deadlock: no proof was found that ranks do not wait for each other for ever");
}
