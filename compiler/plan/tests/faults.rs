//! Schedules that are refused: every fault is a diagnostic, nothing panics or runs for ever.

use crate::make::{after, drain, num, op, phase, repeat, schedule, step, var, warmup, when};
use dsl::diag::Diagnostic;
use dsl::schedule::{Action, Backward, BinaryOp, CmpOp, Phase, PhaseKind, Schedule, Update, Var};
use plan::Shape;

use Action::{B, F, I, W};

fn whole(update: Update, order: Vec<Phase>) -> Schedule {
    schedule("mine", Backward::Whole, update, order)
}

fn refused(schedule: &Schedule, ranks: u32, accumulate: u32) -> Diagnostic {
    let mut found = plan::expand(schedule, Shape::new(ranks, accumulate)).unwrap_err();
    assert_eq!(found.len(), 1, "{found:?}");
    let found = found.remove(0);
    assert!(found.is_error() && found.help.is_some(), "{found:?}");
    found
}

fn code(schedule: &Schedule) -> &'static str {
    refused(schedule, 4, 4).code
}

#[test]
fn backward_before_forward() {
    let found = refused(&whole(Update::Flush, vec![repeat(vec![step(B), step(F)])]), 4, 4);
    assert_eq!(found.code, "P0301");
    insta::assert_debug_snapshot!(found);
    let split = schedule("mine", Backward::Split, Update::Flush, vec![repeat(vec![step(F), step(W), step(I)])]);
    assert_eq!(code(&split), "P0301");
}

#[test]
fn microbatches_left_out() {
    assert_eq!(code(&whole(Update::Flush, vec![repeat(vec![step(F)])])), "P0302");
    assert_eq!(code(&whole(Update::Flush, vec![warmup(num(-7), vec![step(F)])])), "P0302");
    let split = schedule("mine", Backward::Split, Update::Flush, vec![repeat(vec![step(F), step(I)])]);
    let found = refused(&split, 2, 3);
    assert_eq!(found.labels[0].text, "on rank 0: 3 of W never run, of 3 micro-batches");
}

#[test]
fn expressions_without_a_value() {
    let division = op(BinaryOp::Div, num(1), op(BinaryOp::Sub, var(Var::P), num(4)));
    let overflow = op(BinaryOp::Mul, num(i64::MAX), var(Var::P));
    for count in [division, overflow, var(Var::N)] {
        assert_eq!(
            code(&whole(Update::Flush, vec![warmup(count, vec![step(F)]), drain(vec![step(F), step(B)])])),
            "P0303"
        );
    }
    let length = vec![warmup(var(Var::M), vec![step(F)]), repeat(vec![step(F), step(B)])];
    assert_eq!(code(&whole(Update::Local, length)), "P0303");
}

#[test]
fn no_progress() {
    let never = || vec![when(F, num(1), CmpOp::Gt, num(2))];
    assert_eq!(code(&whole(Update::Flush, vec![drain(never())])), "P0304");
    assert_eq!(code(&whole(Update::Flush, vec![repeat(never())])), "P0234");
    assert_eq!(code(&whole(Update::Flush, vec![warmup(num(i64::MAX), never())])), "P0304");
    assert_eq!(code(&whole(Update::Local, vec![repeat(never())])), "P0234");
}

#[test]
fn too_large() {
    let simple = |update| whole(update, vec![repeat(vec![step(F), step(B)])]);
    assert_eq!(refused(&simple(Update::Flush), 4, u32::MAX).code, "P0305");
    assert_eq!(refused(&simple(Update::Local), u32::MAX, 1).code, "P0305");
    assert_eq!(refused(&simple(Update::Local), 0, 1).code, "P0305");
    assert_eq!(refused(&simple(Update::Flush), 1, 0).code, "P0305");
    let endless = vec![warmup(num(i64::MAX), vec![step(F)]), repeat(vec![step(F), step(B)])];
    assert_eq!(code(&whole(Update::Local, endless)), "P0305");
}

#[test]
fn no_steady_state() {
    assert_eq!(code(&whole(Update::Local, vec![repeat(vec![step(F)]), drain(vec![step(B)])])), "P0306");
    assert_eq!(code(&whole(Update::Local, vec![repeat(vec![step(F), step(F), step(B)])])), "P0306");
    assert_eq!(code(&whole(Update::Local, vec![warmup(after(), vec![step(F)])])), "P0306");
    assert_eq!(code(&whole(Update::Local, vec![])), "P0306");
    let n = || var(Var::N);
    let square = when(B, op(BinaryOp::Mul, n(), n()), CmpOp::Lt, num(100));
    assert_eq!(code(&whole(Update::Local, vec![repeat(vec![step(F), square])])), "P0307");
}

/// Weight gradients that a local schedule puts off are run at the end; the order of that end must be the steady
/// state's.
#[test]
fn an_end_that_differs() {
    let late = |action| when(action, var(Var::N), CmpOp::Ge, num(2));
    let rounds = || repeat(vec![step(F), late(I), late(W)]);
    let as_it_runs = vec![rounds(), drain(vec![step(I), step(W)])];
    let otherwise = vec![rounds(), drain(vec![step(I)]), drain(vec![step(W)])];
    let split = |order| schedule("mine", Backward::Split, Update::Local, order);
    plan::expand(&split(as_it_runs), Shape::new(1, 4)).unwrap();
    let found = refused(&split(otherwise), 1, 4);
    assert_eq!(found.code, "P0308");
    insta::assert_debug_snapshot!(found);
}

/// A long warm-up of rounds hides how a run ends: its last backward pass is left out once the run goes on to `repeat`.
#[test]
fn an_end_that_shows_late() {
    let always = when(B, var(Var::N), CmpOp::Ge, num(0));
    let order =
        vec![warmup(after(), vec![step(F)]), warmup(num(5), vec![step(F), step(B)]), repeat(vec![step(F), always])];
    assert_eq!(refused(&whole(Update::Local, order.clone()), 2, 1).code, "P0302");
    let ended = [order, vec![drain(vec![step(B)])]].concat();
    plan::expand(&whole(Update::Local, ended), Shape::new(2, 1)).unwrap();
}

#[test]
fn actions_of_the_other_backward() {
    assert_eq!(code(&whole(Update::Flush, vec![repeat(vec![step(F), step(I), step(W)])])), "P0231");
    assert_eq!(code(&schedule("mine", Backward::Split, Update::Flush, vec![repeat(vec![step(F), step(B)])])), "P0231");
}

/// The warm-up the wrong way round: early ranks run too few forward passes.
#[test]
fn deadlock_shows_the_cycle_and_the_grid() {
    let order = vec![warmup(var(Var::S), vec![step(F)]), repeat(vec![step(F), step(B)])];
    for update in [Update::Flush, Update::Local] {
        let found = refused(&whole(update, order.clone()), 3, 4);
        assert_eq!(found.code, "P0310");
        if update == Update::Flush {
            insta::assert_debug_snapshot!(found.labels);
            insta::assert_snapshot!(found.notes.join("\n"));
        }
    }
}

/// A phase after the one that never ends is not reached, and need not make sense.
#[test]
fn spans_point_into_the_library_when_the_schedule_does() {
    let mut library = whole(Update::Flush, vec![phase(PhaseKind::Repeat, vec![step(F)])]);
    library.library = true;
    assert_eq!(refused(&library, 2, 2).labels[0].library.as_deref(), Some("mine"));
}
