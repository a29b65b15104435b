//! When the steps of a block are, on one rank: see [`dsl::schedule`].

use crate::expr::{self, Fault, Scope};
use dsl::diag::Span;
use dsl::schedule::{Action, Expr, Phase, Step};

/// By step of the block: the time of its first micro-batch, in units.
pub(crate) struct Starts {
    pub interval: i64,
    pub steps: Vec<i64>,
}

/// Longest interval in which a free unit is looked for.
const INTERVAL_MAX: i64 = 1 << 16;

/// Evaluates the times, and finds those of steps that have none.
///
/// # Errors
/// An expression without a value, or none for an interval below 1; where.
pub(crate) fn starts<'a>(
    phase: &'a Phase,
    interval: &Expr,
    scope: &Scope,
) -> Result<Starts, (Option<Fault>, &'a Span)> {
    let interval = expr::value(interval, scope).map_err(|found| (Some(found), &phase.span))?;
    if interval < 1 {
        return Err((None, &phase.span));
    }
    let mut times: Vec<Option<i64>> = Vec::with_capacity(phase.body.len());
    for step in &phase.body {
        let time = step.at.as_ref().map(|at| expr::value(at, scope)).transpose();
        times.push(time.map_err(|found| (Some(found), &step.span))?);
    }
    let taken = |times: &[Option<i64>], unit: i64| {
        phase
            .body
            .iter()
            .zip(times)
            .any(|(step, time)| time.is_some_and(|time| unit.wrapping_sub(time).rem_euclid(interval) < units(step)))
    };
    // What a step needs comes before it in the block, or has a time of its own.
    while let Some(at) = (0..times.len()).find(|at| times[*at].is_none() && needed(phase, &times, *at).is_some()) {
        let from = needed(phase, &times, at).unwrap_or_default();
        let fits = |start: &i64| (0..units(&phase.body[at])).all(|unit| !taken(&times, start.saturating_add(unit)));
        let free = (from..from.saturating_add(interval.min(INTERVAL_MAX))).find(fits);
        times[at] = Some(free.unwrap_or(from));
    }
    // What it needs is not in the block: then it is there from the start.
    Ok(Starts { interval, steps: times.into_iter().map(Option::unwrap_or_default).collect() })
}

/// The end of what the step needs, where that has a time.
fn needed(phase: &Phase, times: &[Option<i64>], at: usize) -> Option<i64> {
    let step = &phase.body[at];
    let needs = match step.action {
        Action::F => return None,
        Action::B | Action::I => Action::F,
        Action::W => Action::I,
    };
    let of = phase.body.iter().zip(times).find(|(other, _)| other.action == needs && other.chunk == step.chunk);
    of.and_then(|(other, time)| time.map(|time| time.saturating_add(units(other))))
}

/// Units of time that an action takes.
fn units(step: &Step) -> i64 {
    if step.action == Action::B { 2 } else { 1 }
}
