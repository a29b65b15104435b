//! The norm of all gradients: that each update reads the sum of all stages' squares, of that update's gradients and no other.
//!
//! # Meaning
//!
//! `N` of update `u` comes after the weight gradients of all its micro-batches, and the next update's come after `U`: it adds whole
//! sums. It comes after `RECV_N`, whose transfer it waits for, and before `SEND_N`, so what is sent is the sum up to this stage. Between stages that
//! hand over, the lower `N` comes before the upper: the sum stays in one place and grows in the order of the stages. The first end of a
//! tied table adds the other end's gradient in its `N`: where both are on one rank, after the other's weight gradients.
//!
//! On the last stage `N` makes the total, which `SEND_T` offers; elsewhere `T` is where it has come: after `RECV_T`, or where the next stage
//! hands over, after that one's `T` (`N`); before `SEND_T`. `U` comes after all of these, and waits until what was sent is taken.
//!
//! The places of both sums are free for the next update's when `U` is done: each `RECV_N` and `RECV_T` comes after `U` of the update
//! before, and so does each `N` that writes without having received, since its weight gradients do. Where a sum stays in place over
//! several stages of a rank, that holds of all their `U`s: the `N` of the lowest, or its `RECV_N`, comes after them.

use super::index::{Index, Kind};
use super::{StageIndex, Violation};
use crate::stream::Program;
use crate::work;

/// The invariant of the module's text.
pub(super) fn check(program: &Program, stages: &[StageIndex]) -> Option<Violation> {
    if !program.norms() {
        return None;
    }
    stages.iter().enumerate().find_map(|(s, stage)| on_stage(program, stages, s, stage))
}

fn on_stage(program: &Program, stages: &[StageIndex], s: usize, stage: &StageIndex) -> Option<Violation> {
    let norm = stage.once(Kind::N)?;
    let violation = |op, what| move |update| Violation::Exchange { stage: stage.stage, op, update, what };
    let early = "does not come after its last weight gradient";
    if let Some(update) = stage.first_before_gradients(&norm, program.accumulate) {
        return Some(violation(Kind::N, early)(update));
    }
    let apart = |ends: &[usize; 2]| program.partner(ends[0]).is_some();
    if let Some([_, last]) = program.tied_ends().filter(|ends| s == ends[0] && !apart(ends)) {
        let both = "does not come after the last weight gradient of the tied table's other end";
        if let Some(update) = stages[last].first_before_gradients(&norm, program.accumulate) {
            return Some(violation(Kind::N, both)(update));
        }
    }
    let order = |first: Kind, then: Kind| {
        let (before, after) = stage.once(first).zip(stage.once(then))?;
        Some(violation(then, "comes before what it waits for or sends")(before.first_not_before(&after, 0)?))
    };
    let pairs = [
        (Kind::RecvN, Kind::N),
        (Kind::N, Kind::SendN),
        (Kind::N, Kind::T),
        (Kind::RecvT, Kind::T),
        (Kind::T, Kind::SendT),
        (Kind::N, Kind::SendT),
        (Kind::SendN, Kind::U),
        (Kind::T, Kind::U),
        (Kind::N, Kind::U),
        (Kind::SendT, Kind::U),
    ];
    pairs.into_iter().find_map(|(first, then)| order(first, then)).or_else(|| in_place(program, stages, s))
}

/// Sums that stay in place: in the order of the stages, and done with before the next update's are written.
fn in_place(program: &Program, stages: &[StageIndex], s: usize) -> Option<Violation> {
    let stage = &stages[s];
    let wrong = |op, what| move |update| Violation::Exchange { stage: stage.stage, op, update, what };
    if program.hands_over(s) {
        let next = &stages[s + 1];
        let up = stage.once(Kind::N).zip(next.once(Kind::N));
        let up = up.and_then(|(lower, upper)| lower.first_not_before(&upper, 0));
        let down = next.once(Kind::T).or(next.once(Kind::N)).zip(stage.once(Kind::T));
        let down = down.and_then(|(upper, lower)| upper.first_not_before(&lower, 0));
        let found = up.map(wrong(Kind::N, "does not come before that of the next stage"));
        let found = found.or_else(|| down.map(wrong(Kind::T, "comes before the total")));
        if found.is_some() {
            return found;
        }
    }
    // The lowest of the stages with sums in one place claims that of the sum, the uppermost that of the total.
    let begins = s == 0 || !program.hands_over(s - 1);
    let ends = !program.hands_over(s);
    let early = |claim: Option<(Kind, Index)>, users: std::ops::RangeInclusive<usize>| {
        let (kind, claim) = claim?;
        work::visit(users.clone().count());
        let update = stages[users].iter().find_map(|user| user.update.first_not_before(&claim, 1))?;
        Some(wrong(kind, "comes before the update before is done with the sum")(update + 1))
    };
    let of = |kind| stage.once(kind).map(|index| (kind, index));
    let up = || s + (s..).take_while(|at| program.hands_over(*at)).count();
    let down = || s - (0..s).rev().take_while(|at| program.hands_over(*at)).count();
    let norm = begins.then(|| early(of(Kind::RecvN).or(of(Kind::N)), s..=up())).flatten();
    norm.or_else(|| ends.then(|| early(of(Kind::RecvT), down()..=s)).flatten())
}
