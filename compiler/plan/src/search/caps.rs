//! A placement searched: what each rank may keep, then the order.

use super::evolve::{cost, evolve};
use super::frozen::{self, program};
use super::problem::{Length, Order, Problem, Timer};
use super::{Candidate, Effort, Request, Unreachable, improve::improve, problem};
use crate::Shape;
use dsl::schedule::Place;

/// Most times that caps are lowered because bytes are exceeded.
const ROUNDS_MAX: usize = 8;

/// Orders that are made to see how many bytes caps need.
const QUICK: u64 = 48;

/// The best order on a placement within the limits, and the bound of its span. None where the placement can't be.
pub fn ordered(
    request: &Request,
    place: Place,
    candidates: &[Candidate],
) -> Result<Option<(Candidate, u64)>, Unreachable> {
    let Some(mut problem) = problem(request, place)? else { return Ok(None) };
    within_bytes(request, &mut problem)?;
    let bound_ns = problem.bound_ns();
    for round in 0..ROUNDS_MAX {
        let effort = if round == 0 { request.effort } else { part(request.effort, 8) };
        let orders = orders(&problem, effort, candidates);
        let frozen = orders.iter().find_map(|(length, order)| freeze(request, &problem, order, *length));
        if let Some(candidate) = frozen {
            return Ok(Some((candidate, bound_ns)));
        }
        let least = problem.chunks;
        problem.caps.iter_mut().for_each(|cap| *cap = (*cap - 1).max(least));
    }
    let order = problem.one_by_one();
    let length = Timer::new(&problem).length(&order, u64::MAX);
    Ok(length.and_then(|length| freeze(request, &problem, &order, length)).map(|candidate| (candidate, bound_ns)))
}

fn part(effort: Effort, divisor: u64) -> Effort {
    Effort { listed: effort.listed / divisor, timed: effort.timed / divisor }
}

/// Orders within the caps, the best first: by rules, of candidates on the same placement, and the best of all changed.
fn orders(problem: &Problem, effort: Effort, candidates: &[Candidate]) -> Vec<(Length, Order)> {
    let mut orders = evolve(problem, effort.listed);
    let mut timer = Timer::new(problem);
    let same = candidates.iter().filter(|c| c.schedule.place == problem.place);
    let given = same
        .filter_map(|c| frozen::order(problem, &c.program))
        .filter(|order| problem.kept(order).iter().zip(&problem.caps).all(|(kept, cap)| kept <= cap));
    orders.extend(given.filter_map(|order| Some((timer.length(&order, u64::MAX)?, order))));
    orders.sort_by_key(|(length, _)| *length);
    if let Some((_, order)) = orders.first() {
        let better = improve(problem, order.clone(), effort.timed);
        orders.splice(0..0, better);
    }
    orders
}

/// The order as a candidate. Receives get more slots where they would be late otherwise.
fn freeze(request: &Request, problem: &Problem, order: &Order, length: Length) -> Option<Candidate> {
    let mut best: Option<Candidate> = None;
    for receive_extra in [1, 2, 4] {
        let shape = Shape { receive_extra, ..request.shape };
        let schedule = frozen::schedule(problem.place);
        let made = program(problem, order, &shape)
            .and_then(|program| request.candidate("search", schedule, shape, program).ok());
        let Some(made) = made else { break };
        let figures = |c: &Candidate| (c.figures.period_ns.max(c.figures.span_ns), c.figures.span_ns);
        if best.as_ref().is_none_or(|best| figures(&made) < figures(best)) {
            best = Some(made);
        }
        if best.as_ref().is_some_and(|best| figures(best).0 <= length.span_ns) {
            break;
        }
    }
    best
}

/// Lowers caps until a quick order within them needs no more bytes than there may be.
fn within_bytes(request: &Request, problem: &mut Problem) -> Result<(), Unreachable> {
    let Some(limits) = &request.limits.bytes else { return Ok(()) };
    let needed = |problem: &Problem, order: &Order| {
        program(problem, order, &request.shape).and_then(|program| (request.memory)(&program))
    };
    let one = problem.one_by_one();
    let Some(least) = needed(problem, &one) else { return Ok(()) };
    if least.iter().enumerate().any(|(rank, bytes)| *bytes > limits.of(rank).value) {
        return Err(Unreachable::Bytes { least });
    }
    for _ in 0..ROUNDS_MAX {
        let quick = (QUICK * cost(problem)).min(request.effort.listed / ROUNDS_MAX as u64);
        let order = evolve(problem, quick).into_iter().next().map_or_else(|| one.clone(), |(_, order)| order);
        let (Some(bytes), kept) = (needed(problem, &order), problem.kept(&order)) else { return Ok(()) };
        let mut fits = true;
        for rank in 0..problem.ranks {
            let limit = limits.of(rank).value;
            if bytes[rank] > limit {
                // Bytes grow about evenly with what is kept.
                let grown = (bytes[rank] - least[rank]).max(1) as u128;
                let more = (kept[rank] - problem.chunks) as u128 * u128::from(limit - least[rank]) / grown;
                problem.caps[rank] = (problem.chunks + more as usize).min(problem.caps[rank] - 1).max(problem.chunks);
                fits = false;
            }
        }
        if fits {
            return Ok(());
        }
    }
    Ok(())
}
