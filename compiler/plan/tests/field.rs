//! What people trip over in pipeline training, as far as it concerns the plan.

use crate::make::{async_1f1b, gpipe, num, one_f_one_b, op, repeat, schedule, step, warmup};
use artifact::verify::{Violation, execute::Stuck, verify};
use dsl::schedule::{Action, Backward, BinaryOp, Update};
use plan::time::Costs;
use plan::{Shape, Subject, analyse};

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
