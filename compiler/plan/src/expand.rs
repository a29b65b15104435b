//! From a schedule to instruction streams: the order performed on every rank, updates and transfers placed, rings
//! sized.
//!
//! # Where transfers go
//!
//! `SEND_F` follows its `F`, `SEND_B` its `B` (or `I`). A receive is posted as early as its slot is free: right after
//! the instruction that releases the slot's user before it, or at the stream's start. A receive ring has the slots that
//! the order itself needs (each input from its first use to the end of its backward pass) and [`Shape::receive_extra`]
//! more: with none, a transfer can begin only when its receiver is about to wait for it; with one (the default), it
//! runs while the receiver still computes. That costs each stage one boundary activation and one boundary gradient of
//! memory. Send rings have [`Shape::send_slots`] slots (one by default): a send waits for nothing but its receiver's
//! post, which is early.

use crate::Shape;
use crate::line::{Item, Line, forward, input_gradient, weight_gradient};
use crate::order::{self, ACTIONS_MAX, Act, fault};
use artifact::ids::{RankId, StageId};
use artifact::stream::{Instr, Op, Program, RingSizes, Stream};
use artifact::verify::{Violation, verify};
use dsl::diag::Diagnostic;
use dsl::schedule::{Action, Schedule, Update};

/// Expands `schedule` for `shape.ranks` ranks, one stage each, and proves the streams ([`artifact::verify`]).
///
/// # Errors
/// What is wrong with the schedule, at its place in the schedule's source.
pub fn expand(schedule: &Schedule, shape: Shape) -> Result<Program, Vec<Diagnostic>> {
    let program = streams(schedule, &shape).map_err(|d| vec![d])?;
    match verify(&program) {
        Ok(()) => Ok(program),
        Err(violations) => Err(violations.iter().map(|v| refused(schedule, &shape, &program, v)).collect()),
    }
}

/// The streams, not yet verified.
pub(crate) fn streams(schedule: &Schedule, shape: &Shape) -> Result<Program, Diagnostic> {
    let lines = lines(schedule, shape)?;
    let stages = lines.len();
    let rings: Vec<RingSizes> = lines.iter().enumerate().map(|(s, line)| rings(line, s, stages, shape)).collect();
    let streams =
        lines.iter().zip(&rings).enumerate().map(|(s, (line, rings))| stream(line, rings, s, stages)).collect();
    let rank_of_stage = (0..shape.ranks).map(RankId).collect();
    Ok(Program { streams, rank_of_stage, rings, accumulate: shape.accumulate })
}

/// By rank: what it computes.
pub(crate) fn lines(schedule: &Schedule, shape: &Shape) -> Result<Vec<Line>, Diagnostic> {
    let k = u64::from(shape.accumulate);
    if shape.ranks == 0 || k == 0 {
        return Err(fault(schedule, "P0305", &schedule.span, "there is nothing to run without ranks or micro-batches")
            .help("use at least one rank and accumulate at least 1"));
    }
    if u64::from(shape.ranks).saturating_mul(k) > ACTIONS_MAX {
        return Err(order::too_large(schedule, &schedule.span));
    }
    let mut budget = ACTIONS_MAX;
    match schedule.update {
        Update::Flush => (0..shape.ranks)
            .map(|rank| order::finite(schedule, shape, rank, k, &mut budget).map(|run| Line::flush(&run.acts, k)))
            .collect(),
        Update::Local => local(schedule, shape, budget),
    }
}

/// All ranks repeat with the same step: the smallest that fits their steady states and whole updates.
fn local(schedule: &Schedule, shape: &Shape, mut budget: u64) -> Result<Vec<Line>, Diagnostic> {
    let k = u64::from(shape.accumulate);
    let mut microbatches = k;
    for rank in 0..shape.ranks {
        let run = order::unbounded(schedule, shape, rank, budget)?;
        let common = expr_gcd(microbatches, run.turn);
        microbatches = microbatches / common * run.turn;
        if microbatches > ACTIONS_MAX {
            return Err(order::too_large(schedule, run.span()));
        }
    }
    let mut lines = Vec::new();
    for rank in 0..shape.ranks {
        let run = order::unbounded(schedule, shape, rank, budget)?;
        let (otherwise, turns, span) = (run.may_end_otherwise(), microbatches / run.turn, run.span().clone());
        let (prologue, period, left) = run.take(turns)?;
        budget = left;
        let line = Line::local(&prologue, &period, microbatches, k);
        if otherwise {
            ends_as_it_runs(schedule, shape, rank, &line, &span)?;
        }
        lines.push(line);
    }
    Ok(lines)
}

fn expr_gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { expr_gcd(b, a % b) }
}

/// A run that ends performs the period with used-up steps skipped; the order must say the same. Once a run is longer
/// than the prologue and all leads, its end only shifts with its length, so one more repetition proves it for all.
fn ends_as_it_runs(
    schedule: &Schedule,
    shape: &Shape,
    rank: u32,
    line: &Line,
    span: &dsl::diag::Span,
) -> Result<(), Diagnostic> {
    let furthest = line.prologue.iter().chain(&line.period).filter(|i| i.op != Op::U).map(|i| i.mb).max();
    let updates = (furthest.unwrap_or(0) / line.microbatches + 3) * line.updates;
    for n in 1..=updates {
        let limit = n * u64::from(shape.accumulate);
        let said = order::finite(schedule, shape, rank, limit, &mut ACTIONS_MAX.clone())?;
        let run = line.run(n.div_ceil(line.updates)).filter(|i| i.op != Op::U && i.mb < limit);
        let wrong = said.acts.iter().zip(run).find(|(act, item)| act.mb != item.mb || !same(act.action, item.op));
        if let Some((act, item)) = wrong {
            return Err(fault(
                schedule,
                "P0308",
                span,
                "a run's end is not the steady state with used-up steps skipped",
            )
            .here(format!(
                "with {limit} micro-batches rank {rank} runs {} {} where the steady state goes on with {} {}",
                order::name(act.action),
                act.mb,
                artifact::verify::index::Kind::of(item.op).name(),
                item.mb
            ))
            .note("the streams hold the steady state; a run ends by skipping the micro-batches that it does not have")
            .help("order the phases after this one as its rounds go on"));
        }
    }
    Ok(())
}

fn same(action: Action, op: Op) -> bool {
    matches!((action, op), (Action::F, Op::F) | (Action::B, Op::B(_)) | (Action::I, Op::I) | (Action::W, Op::W(_)))
}

fn rings(line: &Line, stage: usize, stages: usize, shape: &Shape) -> RingSizes {
    let (first, last) = (stage == 0, stage + 1 == stages);
    let stash = line.slots(forward, weight_gradient);
    // Within one flush no more than its micro-batches are ever received.
    let most = if line.flush { line.microbatches } else { u64::from(u32::MAX) };
    let with_extra = |slots: u32| u64::from(slots.saturating_add(shape.receive_extra)).min(most) as u32;
    RingSizes {
        stash,
        recv_f: if first { stash } else { with_extra(stash) },
        send_f: if last { 0 } else { shape.send_slots.max(1) },
        recv_b: if last { 0 } else { with_extra(line.slots(input_gradient, weight_gradient)) },
        send_b: if first { 0 } else { shape.send_slots.max(1) },
    }
}

/// Places the transfers. See the module's text.
fn stream(line: &Line, rings: &RingSizes, stage: usize, stages: usize) -> Stream {
    let (first, last) = (stage == 0, stage + 1 == stages);
    let stage_id = StageId(stage as u32);
    let instr = |op, mb: u64| Instr { op, stage: stage_id, mb: mb as u32 };
    let receives: Vec<(Op, u64)> =
        [(!first).then_some((Op::RecvF, rings.recv_f)), (!last).then_some((Op::RecvB, rings.recv_b))]
            .into_iter()
            .flatten()
            .map(|(op, slots)| (op, u64::from(slots)))
            .collect();
    let early: Vec<Instr> = receives.iter().flat_map(|(op, slots)| (0..*slots).map(|mb| instr(*op, mb))).collect();
    let place = |items: &[Item]| {
        let mut placed = Vec::with_capacity(items.len() * 3);
        for item in items {
            placed.push(instr(item.op, item.mb));
            if forward(item.op) && !last {
                placed.push(instr(Op::SendF, item.mb));
            }
            if input_gradient(item.op) && !first {
                placed.push(instr(Op::SendB, item.mb));
            }
            if weight_gradient(item.op) {
                let next = receives.iter().map(|(op, slots)| (*op, item.mb + slots));
                placed.extend(
                    next.filter(|(_, mb)| !line.flush || *mb < line.microbatches).map(|(op, mb)| instr(op, mb)),
                );
            }
        }
        placed
    };
    let (mut prologue, mut period) = (place(&line.prologue), place(&line.period));
    let start = if line.flush { &mut period } else { &mut prologue };
    start.splice(0..0, early);
    Stream { prologue, period, microbatches: line.microbatches as u32, updates: line.updates as u32 }
}

/// The diagnostic for a broken invariant: a deadlock is the order's fault, anything else is ours.
fn refused(schedule: &Schedule, shape: &Shape, program: &Program, violation: &Violation) -> Diagnostic {
    match violation {
        Violation::Deadlock(stuck) => crate::deadlock::explain(schedule, shape, program, stuck),
        other => fault(schedule, "P0399", &schedule.span, "the expanded schedule does not verify")
            .note(other.to_string())
            .help("this is an error in paceline itself: please report it with the schedule"),
    }
}

/// The step of the schedule that makes `rank` perform `action` on `mb`.
pub(crate) fn origin(
    schedule: &Schedule,
    shape: &Shape,
    rank: u32,
    action: Action,
    mb: u64,
) -> Option<dsl::diag::Span> {
    let k = u64::from(shape.accumulate);
    let (limit, mb) = match schedule.update {
        Update::Flush => (k, mb % k),
        Update::Local => ((mb / k).checked_add(1)?.checked_mul(k)?, mb),
    };
    let run = order::finite(schedule, shape, rank, limit, &mut ACTIONS_MAX.clone()).ok()?;
    let act: &Act = run.acts.iter().find(|act| act.action == action && act.mb == mb)?;
    let phase = schedule.order.get(act.origin.0 as usize)?;
    phase.body.get(act.origin.1 as usize).map(|step| step.span.clone())
}
