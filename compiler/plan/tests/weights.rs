//! Versions of the weights: how many a policy keeps, what it makes of drift and delay, and what it refuses.

use crate::interpreter::{Random, interpret};
use crate::make::{async_1f1b, one_f_one_b};
use artifact::stream::{Instr, Op, Policy, Program};
use artifact::verify::{Violation, verify};
use plan::facts::Facts;
use plan::time::Costs;
use plan::{Shape, Subject, analyse};

fn shape(ranks: u32, accumulate: u32, policy: Policy) -> Shape {
    Shape { policy, ..Shape::new(ranks, accumulate) }
}

fn facts(shape: Shape) -> Facts {
    let schedule = async_1f1b();
    let program = plan::expand(&schedule, shape).unwrap();
    let (facts, found) = analyse(&program, &Subject::new(&schedule, shape), &Costs::unit(shape.ranks as usize));
    assert_eq!(found, []);
    assert!(facts.proofs.iter().all(|p| p.holds));
    facts
}

/// Four worked cases, and the formulas: ceil(w/K) + 1 versions, delay up to ceil(w/K) and w/K in the mean, no drift.
#[test]
fn a_stash_keeps_the_versions_of_the_table() {
    let table: [(u32, u32, &[u32]); 4] =
        [(4, 1, &[4, 3, 2, 1]), (4, 2, &[3, 2, 2, 1]), (4, 4, &[2, 2, 2, 1]), (8, 4, &[3, 3, 3, 2, 2, 2, 2, 1])];
    for (ranks, accumulate, expected) in table {
        let facts = facts(shape(ranks, accumulate, Policy::Stash));
        let live: Vec<u32> = facts.stages.iter().map(|s| s.versions_live).collect();
        assert_eq!(live, expected, "P={ranks} K={accumulate}");
    }
    for (ranks, accumulate) in (1..=9).flat_map(|p| (1..=10).map(move |k| (p, k))) {
        let facts = facts(shape(ranks, accumulate, Policy::Stash));
        for (s, stage) in facts.stages.iter().enumerate() {
            let w = ranks - 1 - s as u32;
            let late = w.div_ceil(accumulate);
            assert_eq!(stage.versions_live, late + 1);
            assert_eq!((stage.drift.max, stage.drift.mean), (0, 0.0));
            assert_eq!(stage.delay.max, u64::from(late));
            assert!((stage.delay.mean - f64::from(w) / f64::from(accumulate)).abs() < 1e-12);
        }
    }
}

/// A forward pass that is run again with the weights as they are: one version, no drift, and the delay of the first one.
#[test]
fn recomputed_activations_do_not_drift() {
    for (ranks, accumulate) in [(4, 1), (4, 2), (8, 4)] {
        let (again, once) =
            (facts(shape(ranks, accumulate, Policy::Recomputed)), facts(shape(ranks, accumulate, Policy::Current)));
        for (again, once) in again.stages.iter().zip(&once.stages) {
            assert_eq!((again.versions_live, again.drift.max, again.drift.mean), (1, 0, 0.0));
            assert_eq!(again.delay, once.delay);
        }
        let program = plan::expand(&async_1f1b(), shape(ranks, accumulate, Policy::Recomputed)).unwrap();
        let observed = interpret(&program, 12, &mut Random(5)).unwrap();
        assert!(observed.drift.iter().flatten().all(|d| *d == 0));
        assert_eq!(observed.delay[0].iter().max(), Some(&again.stages[0].delay.max));
    }
}

/// PipeDream-2BW: possible exactly when K >= P - 1; two versions, no drift, a delay of 1 on every stage.
#[test]
fn a_double_buffer_needs_as_many_microbatches_as_ranks_less_one() {
    for (ranks, accumulate) in (1..=9).flat_map(|p| (1..=10).map(move |k| (p, k))) {
        let shape = shape(ranks, accumulate, Policy::DoubleBuffer);
        if accumulate + 1 >= ranks {
            for stage in facts(shape).stages {
                assert_eq!((stage.versions_live, stage.drift.max), (2, 0));
                assert_eq!((stage.delay.max, stage.delay.mean), (1, 1.0));
            }
            continue;
        }
        let found = plan::expand(&async_1f1b(), shape).unwrap_err();
        assert_eq!(found[0].code, "P0340");
        let smallest = format!("the smallest accumulate for `double_buffer` is {} ", ranks - 1);
        assert!(found[0].help.as_deref().unwrap().starts_with(&smallest), "{found:?}");
    }
}

#[test]
fn a_double_buffer_that_is_too_small_is_shown_on_a_microbatch() {
    let schedule = dsl::library::schedule("pipedream_2bw").unwrap();
    insta::assert_debug_snapshot!(plan::expand(&schedule, shape(8, 4, Policy::DoubleBuffer)).unwrap_err());
}

/// A flush leaves nothing between F and B: one version, wherever it is stashed.
#[test]
fn a_stash_under_a_flush_is_one_version() {
    for name in dsl::library::names() {
        let schedule = dsl::library::schedule(name).unwrap();
        if schedule.update == dsl::schedule::Update::Flush {
            let program = plan::expand(&schedule, shape(4, 8, Policy::Stash)).unwrap();
            assert!(program.rings.iter().all(|r| r.weights == 1), "{name}");
        }
    }
}

/// Fewer forward passes ahead than 1F1B's, and more: versions follow the order, not a formula.
#[test]
fn versions_follow_the_order() {
    use crate::make::{num, repeat, schedule, step, warmup};
    use dsl::schedule::{Action, Backward, Update};
    for (ahead, versions) in [(0, 1), (1, 2), (4, 3), (9, 6)] {
        let (f, b) = (Action::F, Action::B);
        let order = vec![warmup(num(ahead), vec![step(f)]), repeat(vec![step(f), step(b)])];
        let schedule = schedule("far", Backward::Whole, Update::Local, order);
        let program = plan::expand(&schedule, shape(1, 2, Policy::Stash)).unwrap();
        assert_eq!(program.rings[0].weights, versions, "{ahead} ahead");
    }
}

/// With a split backward pass I reads the weights, and W's update overwrites: a W that comes later makes gradients later, and no
/// difference to the versions between F and I.
#[test]
fn a_late_weight_gradient_keeps_no_version() {
    use crate::make::{after, num, phase, schedule, step, var, warmup, when};
    use dsl::schedule::{Action, Backward, CmpOp, PhaseKind, Update, Var};
    let (f, i, w) = (Action::F, Action::I, Action::W);
    let body = vec![step(f), step(i), when(w, var(Var::N), CmpOp::Ge, num(2))];
    let order =
        vec![warmup(after(), vec![step(f)]), phase(PhaseKind::Repeat, body), phase(PhaseKind::Drain, vec![step(w)])];
    let schedule = schedule("late", Backward::Split, Update::Local, order);
    let shape = shape(3, 1, Policy::Stash);
    let program = plan::expand(&schedule, shape).unwrap();
    interpret(&program, 20, &mut Random(3)).unwrap();
    let (facts, _) = analyse(&program, &Subject::new(&schedule, shape), &Costs::unit(3));
    let found: Vec<_> = facts.stages.iter().map(|s| (s.versions_live, s.drift.max, s.delay.max)).collect();
    assert_eq!(found, [(3, 0, 4), (2, 0, 3), (1, 0, 2)]);
}

/// Which violation a change of the streams gives; the interpreter must find one too.
fn caught(program: &Program) -> Violation {
    let mut random = Random(1);
    assert!(interpret(program, 12, &mut random).is_err(), "the interpreter saw nothing wrong");
    verify(program).unwrap_err().remove(0)
}

#[test]
fn a_ring_one_short_is_caught() {
    for (accumulate, policy) in [(1, Policy::Stash), (2, Policy::Stash), (4, Policy::Stash), (4, Policy::DoubleBuffer)]
    {
        let program = plan::expand(&async_1f1b(), shape(4, accumulate, policy)).unwrap();
        let mut short = program.clone();
        short.rings[0].weights -= 1;
        let found = caught(&short);
        assert!(matches!(found, Violation::Version { stage, .. } if stage.0 == 0), "{found}");
    }
}

/// F before the update that it followed: it reads an older version, which is then to be kept for longer than there are slots.
#[test]
fn a_version_that_is_read_late_is_caught() {
    let mut program = plan::expand(&async_1f1b(), shape(4, 1, Policy::Stash)).unwrap();
    let stream = &mut program.streams[0];
    let at = stream.period.iter().position(|i| i.op == Op::U).unwrap();
    let before: Vec<Instr> = stream.period.drain(..at).collect();
    let next = |i: &Instr| Instr { mb: i.mb + 1, ..*i };
    stream.period.extend(before.iter().map(next));
    stream.prologue.extend(before);
    let f = stream.period.iter().position(|i| i.op == Op::F).unwrap();
    let update = stream.period.remove(0);
    stream.period.insert(f, update);
    let found = caught(&program);
    assert!(matches!(found, Violation::Version { stage, .. } if stage.0 == 0), "{found}");
}

/// A forward pass between the last weight gradient and its U would read weights that are being written.
#[test]
fn a_pass_during_an_update_is_caught() {
    let mut program = plan::expand(&one_f_one_b(), shape(1, 2, Policy::Current)).unwrap();
    let stream = &mut program.streams[0];
    // F0 B0 F1 B1 U: the next repetition's F0 moves before U.
    let (first, update) = (stream.period.remove(0), stream.period.pop().unwrap());
    stream.prologue.push(first);
    stream.period.push(Instr { mb: first.mb + 2, ..first });
    stream.period.push(update);
    program.rings[0].recv_f = 2;
    program.rings[0].stash = 2;
    assert!(matches!(caught(&program), Violation::Version { .. }));
}
