//! Bounds that fail: the diagnostic, its counterexample and its solution.

use crate::make::{async_1f1b, one_f_one_b, zb_h};
use dsl::diag::{Diagnostic, Severity};
use dsl::schedule::{Schedule, Update};
use dsl::spec::At;
use plan::time::Costs;
use plan::{Shape, Subject, analyse};

fn checked(schedule: &Schedule, shape: Shape, change: impl FnOnce(&mut Subject)) -> Vec<Diagnostic> {
    let program = plan::expand(schedule, shape).unwrap();
    let mut subject = Subject { accumulate: 300..301, ..Subject::new(schedule, shape) };
    change(&mut subject);
    let bounded = subject.drift.is_some() || subject.delay.is_some() || subject.bubble.is_some();
    let (facts, diagnostics) = analyse(&program, &subject, &Costs::unit(shape.ranks as usize));
    let failed = facts.proofs.iter().filter(|p| !p.holds).count();
    assert_eq!(failed, if bounded { diagnostics.iter().filter(|d| d.is_error()).count() } else { 0 });
    diagnostics
}

#[test]
fn drift_is_refused_with_a_counterexample() {
    let bound = At { value: 1, span: 400..410 };
    let found = checked(&async_1f1b(), Shape::new(8, 4), |s| s.drift = Some(bound.clone()));
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].code, "P0311");
    assert_eq!(found[0].help.as_deref(), Some("the smallest accumulate with drift <= 1 is 7 (it is 4)"));
    insta::assert_debug_snapshot!(found[0]);
    let delay = checked(&async_1f1b(), Shape::new(8, 4), |s| s.delay = Some(bound.clone()));
    assert_eq!(delay[0].help.as_deref(), Some("the smallest accumulate with delay <= 1 is 7 (it is 4)"));
    assert_eq!(checked(&async_1f1b(), Shape::new(8, 7), |s| s.drift = Some(bound.clone())), []);
}

#[test]
fn the_solved_accumulate_is_p_minus_1() {
    for ranks in 3..12 {
        let bound = At { value: 1, span: 0..1 };
        let found = checked(&async_1f1b(), Shape::new(ranks, 1), |s| s.drift = Some(bound.clone()));
        let expected = format!("the smallest accumulate with drift <= 1 is {} (it is 1)", ranks - 1);
        assert_eq!(found[0].help.as_ref(), Some(&expected));
    }
}

#[test]
fn no_accumulate_gives_an_asynchronous_order_no_drift() {
    let bound = At { value: 0, span: 0..1 };
    let found = checked(&async_1f1b(), Shape::new(4, 4), |s| s.drift = Some(bound.clone()));
    assert!(found[0].help.as_ref().unwrap().contains("flush every accumulate"), "{:?}", found[0].help);
    assert_eq!(checked(&one_f_one_b(), Shape::new(4, 4), |s| s.drift = Some(bound.clone())), []);
    assert_eq!(checked(&async_1f1b(), Shape::new(1, 4), |s| s.drift = Some(bound.clone())), []);
}

/// H1 with local updates: no drift on the last rank, but delay.
#[test]
fn delay_is_bounded_apart_from_drift() {
    let (drift, delay) = (At { value: 1, span: 0..1 }, At { value: 0, span: 20..30 });
    let schedule = zb_h(1, Update::Local);
    let found = checked(&schedule, Shape::new(2, 4), |s| {
        s.drift = Some(drift.clone());
        s.delay = Some(delay.clone());
    });
    assert_eq!(found.iter().map(|d| d.code).collect::<Vec<_>>(), ["P0312"]);
    insta::assert_debug_snapshot!(found[0]);
}

#[test]
fn bubble_is_refused_and_solved() {
    let bound = At { value: 0.1, span: 500..510 };
    let found = checked(&one_f_one_b(), Shape::new(4, 8), |s| s.bubble = Some(bound.clone()));
    assert_eq!(found[0].code, "P0313");
    // (P-1)/(M+P-1) <= 0.1 from M = 27 on.
    assert_eq!(found[0].help.as_deref(), Some("the smallest accumulate with bubble <= 10 % is 27 (it is 8)"));
    insta::assert_debug_snapshot!(found[0]);
    assert_eq!(checked(&one_f_one_b(), Shape::new(4, 27), |s| s.bubble = Some(bound.clone())), []);
}

#[test]
fn short_warmups_are_a_lint_and_gpipe_has_none() {
    let found = checked(&one_f_one_b(), Shape::new(8, 1), |_| ());
    assert_eq!(found.len(), 1);
    assert_eq!((found[0].code, found[0].severity), ("P0320", Severity::Lint));
    insta::assert_debug_snapshot!(found[0]);
    assert_eq!(checked(&crate::make::gpipe(), Shape::new(8, 1), |_| ()), []);
    assert_eq!(checked(&one_f_one_b(), Shape::new(8, 7), |_| ()), []);
}
