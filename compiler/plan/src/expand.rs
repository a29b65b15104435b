//! From a schedule to instruction streams: the order performed on every rank, updates and transfers placed, rings
//! sized.
//!
//! # Where transfers go
//!
//! A send follows what makes it: `SEND_F` its `F`, `SEND_B` its `B` (or `I`). A receive is posted as early as its slot is free: right after
//! the instruction that releases the slot's user before it, or at the stream's start. A receive ring has the slots that
//! the order itself needs (each input from its first use to the end of its backward pass) and [`Shape::receive_extra`]
//! more: with none, a transfer can begin only when its receiver is about to wait for it; with one (the default), it
//! runs while the receiver still computes. That costs each stage one boundary activation and one boundary gradient of
//! memory. Send rings have [`Shape::send_slots`] slots (one by default): a send waits for nothing but its receiver's
//! post, which is early. What a rank receives from one other rank it posts in the order in which it is sent: see
//! [`crate::posts`]; with several stages a rank receive rings are larger, see [`crate::buffers`]. Neighbouring stages on one rank hand over: no transfer, and a ring as large as the order needs.

use crate::Shape;
use crate::line::{Item, Line, Needs, weight_gradient};
use crate::order::{self, ACTIONS_MAX, Act, fault};
use crate::posts::{self, Source};
use crate::{buffers, exchange, norm, policy};
use artifact::ids::{RankId, StageId};
use artifact::stream::{Instr, Op, Policy, Program, RingSizes, Stream};
use artifact::verify::{Proved, Violation, prove};
use artifact::work;
use dsl::diag::Diagnostic;
use dsl::schedule::{Action, Place, Schedule, Update};

/// Expands `schedule` for `shape.ranks` ranks and proves the streams ([`artifact::verify`]).
///
/// # Errors
/// What is wrong with the schedule, at its place in the schedule's source.
pub fn expand(schedule: &Schedule, shape: Shape) -> Result<Program, Vec<Diagnostic>> {
    expand_proved(schedule, shape).map(|(program, _)| program)
}

/// [`expand`], and what the proof found out.
///
/// # Errors
/// As [`expand`].
pub fn expand_proved(schedule: &Schedule, shape: Shape) -> Result<(Program, Proved), Vec<Diagnostic>> {
    let (proved, visited) = work::counted(|| {
        let program = streams(schedule, &shape).map_err(|d| vec![d])?;
        sound(schedule, &shape, program)
    });
    proved.map(|(program, proved)| (program, Proved { visited, ..proved }))
}

/// Puts the program of a table, read as `schedule`, under the policy of `shape`. Whether its model is tied was known when it was read.
///
/// # Errors
/// Why the policy is not possible.
pub fn keep_proved(
    schedule: &Schedule,
    shape: Shape,
    mut program: Program,
) -> Result<(Program, Proved), Vec<Diagnostic>> {
    policy::keep(&mut program, shape.policy);
    sound(schedule, &shape, program)
}

fn sound(schedule: &Schedule, shape: &Shape, program: Program) -> Result<(Program, Proved), Vec<Diagnostic>> {
    match prove(&program) {
        Ok(proved) => Ok((program, proved)),
        // The same on every stage is said once.
        Err(violations) => Err(violations.iter().take(1).map(|v| refused(schedule, shape, &program, v)).collect()),
    }
}

/// The streams, not yet verified: what [`expand`] refuses for a deadlock can be looked at.
///
/// # Errors
/// What is wrong with the order of a rank.
pub fn streams(schedule: &Schedule, shape: &Shape) -> Result<Program, Diagnostic> {
    let lines = lines(schedule, shape)?;
    Ok(assemble(lines, schedule.place, shape))
}

/// The streams of what ranks compute, not yet verified.
pub(crate) fn assemble(mut lines: Vec<Line>, place: Place, shape: &Shape) -> Program {
    let stages = shape.ranks * place.chunks(shape.chunks);
    let rank_of_stage = (0..stages).map(|s| RankId(place.home(s, shape.ranks).0)).collect();
    let copies = place.copies();
    let mut program = Program {
        streams: Vec::new(),
        rank_of_stage,
        rings: Vec::new(),
        accumulate: shape.accumulate / copies,
        policy: shape.policy,
        copies,
        tied: shape.tied,
        global_norm: shape.global_norm,
    };
    let needs = needs(&program, &lines);
    program.rings = (0..stages).map(|s| rings(&program, &needs, s, shape, &lines)).collect();
    program.streams = match lines.iter().all(|line| line.flush) {
        true => {
            exchange::place(&program, &mut lines);
            norm::place(&program, &mut lines);
            flushes(&mut program, &lines)
        }
        false => lines.iter().enumerate().map(|(s, line)| unbounded(&program, line, s as u32)).collect(),
    };
    policy::keep(&mut program, shape.policy);
    program
}

/// The streams of ranks that begin and end by themselves, transfers placed; receive rings are enlarged where need be.
pub(crate) fn flushes(program: &mut Program, lines: &[Line]) -> Vec<Stream> {
    if program.rank_of_stage.len() > lines.len() {
        buffers::enlarge(program, lines);
    }
    let sources = posts::place(program, lines);
    lines.iter().zip(sources).map(|(line, sources)| flush(program, line, sources)).collect()
}

/// The stages of a rank, by chunk.
pub(crate) fn stages_of(schedule: &Schedule, shape: &Shape, rank: u32) -> Vec<u32> {
    let chunks = schedule.place.chunks(shape.chunks);
    (0..chunks).map(|chunk| schedule.place.stage(chunk, rank, shape.ranks)).collect()
}

/// By rank: what it computes.
pub(crate) fn lines(schedule: &Schedule, shape: &Shape) -> Result<Vec<Line>, Diagnostic> {
    let k = u64::from(shape.accumulate);
    if shape.ranks == 0 || k == 0 {
        return Err(fault(schedule, "P0305", &schedule.span, "there is nothing to run without ranks or micro-batches")
            .help("use at least one rank and accumulate at least 1"));
    }
    let chunks = schedule.place.chunks(shape.chunks);
    if !shape.ranks.is_multiple_of(schedule.place.copies()) {
        let message = format!("{} ranks can't hold two copies of every stage", shape.ranks);
        return Err(fault(schedule, "P0314", &schedule.span, message)
            .note("stage i is on ranks i and P-1-i: on the middle one of an odd number of ranks both would be the same")
            .help(format!("use {} or {} ranks", (shape.ranks - 1).max(2), shape.ranks + 1)));
    }
    if u64::from(shape.ranks).saturating_mul(k).saturating_mul(u64::from(chunks)) > ACTIONS_MAX {
        return Err(order::too_large(schedule, &schedule.span));
    }
    let mut budget = ACTIONS_MAX;
    match schedule.update {
        Update::Flush => (0..shape.ranks)
            .map(|rank| {
                let acts = order::finite(schedule, shape, rank, k, &mut budget)?;
                let each = k / u64::from(schedule.place.copies());
                Ok(Line::flush(&acts, &stages_of(schedule, shape, rank), each))
            })
            .collect(),
        Update::Local if chunks != 1 => {
            Err(fault(schedule, "P0306", &schedule.span, "a run without end has one stage a rank")
                .help("use `flush every accumulate`, or `place linear`"))
        }
        Update::Local if shape.global_norm => Err(norm::unbounded(schedule)),
        Update::Local if shape.tied && shape.ranks > 1 => Err(exchange::unbounded(schedule, shape)),
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
        let furthest = prologue.iter().chain(&period).map(|act| act.mb).max().unwrap_or(0);
        let line = Line::local(&prologue, &period, rank, microbatches, k);
        if otherwise {
            ends_as_it_runs(schedule, shape, rank, &line, furthest, &span)?;
        }
        lines.push(line);
    }
    Ok(lines)
}

fn expr_gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { expr_gcd(b, a % b) }
}

/// A run that ends performs the period with used-up steps skipped; the order must say the same. Once a run is longer
/// than the phases before the steady state (`furthest` is their largest micro-batch, and that of a repetition), its end only
/// shifts with its length, so one more repetition proves it for all.
fn ends_as_it_runs(
    schedule: &Schedule,
    shape: &Shape,
    rank: u32,
    line: &Line,
    furthest: u64,
    span: &dsl::diag::Span,
) -> Result<(), Diagnostic> {
    let updates = (furthest / line.microbatches + 3) * line.updates;
    for n in 1..=updates {
        let limit = n * u64::from(shape.accumulate);
        let said = order::finite(schedule, shape, rank, limit, &mut ACTIONS_MAX.clone())?;
        let run = line.run(n.div_ceil(line.updates)).filter(|i| !i.op.by_update() && i.mb < limit);
        let wrong = said.iter().zip(run).find(|(act, item)| act.mb != item.mb || !same(act.action, item.op));
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

/// By stage: the slots that the ranks' orders need.
fn needs(program: &Program, lines: &[Line]) -> Vec<Needs> {
    let mut needs = vec![Needs::default(); program.rank_of_stage.len()];
    lines.iter().for_each(|line| line.slots(|stage| program.hands_over(stage), &mut needs));
    needs
}

fn rings(program: &Program, needs: &[Needs], s: u32, shape: &Shape, lines: &[Line]) -> RingSizes {
    let stage = s as usize;
    let line = &lines[program.rank_of_stage[stage].index()];
    let Needs { stash, gradient, handed_f, handed_b } = needs[stage];
    // Within one flush no more than its micro-batches are ever received.
    let most = if line.flush { line.microbatches } else { u64::from(u32::MAX) };
    let with_extra = |slots: u32| u64::from(slots.saturating_add(shape.receive_extra)).min(most) as u32;
    let (before, after) = (program.border_before(stage), program.border_after(stage));
    let send_slots = shape.send_slots.max(1);
    RingSizes {
        weights: 1,
        stash,
        recv_f: match program.before(stage) {
            None => stash,
            Some(_) if before.is_some() => with_extra(stash),
            Some(_) => handed_f,
        },
        send_f: after.map_or(0, |_| send_slots),
        recv_b: match after {
            Some(_) => with_extra(gradient),
            None if program.hands_over(stage) => handed_b,
            None => 0,
        },
        send_b: before.map_or(0, |_| send_slots),
    }
}

fn instr(op: Op, stage: u32, mb: u64) -> Instr {
    Instr { op, stage: StageId(stage), mb: mb as u32 }
}

/// The sends of what an instruction made.
pub(crate) fn sends(program: &Program, item: &Item) -> impl Iterator<Item = Op> {
    let stage = item.stage as usize;
    let before = || program.border_before(stage).is_some();
    let after = || program.border_after(stage).is_some();
    // After the last stage the sum is the total.
    let total = |op| op == Op::T || op == Op::N && program.after(stage).is_none();
    let (one, other) = match item.op {
        Op::F => (after().then_some(Op::SendF), None),
        Op::B(_) | Op::I => (before().then_some(Op::SendB), None),
        Op::N | Op::T => {
            let up = (item.op == Op::N && after()).then_some(Op::SendN);
            (up, (total(item.op) && before()).then_some(Op::SendT))
        }
        Op::SendG => (Some(Op::SendG), None),
        _ => (None, None),
    };
    let sends = [one, other];
    sends.into_iter().flatten()
}

/// An instruction and the sends of what it made.
fn with_sends(program: &Program, item: &Item) -> impl Iterator<Item = Instr> {
    let Item { op, stage, mb } = *item;
    let own = (!op.transfers()).then_some(op);
    own.into_iter().chain(sends(program, item)).map(move |op| instr(op, stage, mb))
}

/// A rank's flush with the receives that [`posts`] placed.
fn flush(program: &Program, line: &Line, mut sources: Vec<Source>) -> Stream {
    work::visit(line.period.len());
    let mut period = Vec::with_capacity(3 * line.period.len());
    let mut post = |period: &mut Vec<Instr>, position| {
        sources.iter_mut().for_each(|source| period.extend_from_slice(source.until(position)));
    };
    post(&mut period, 0);
    for (position, item) in (1..).zip(&line.period) {
        period.extend(with_sends(program, item));
        post(&mut period, position);
    }
    let (microbatches, updates) = (line.microbatches as u32, line.updates as u32);
    Stream { prologue: Vec::new(), period, microbatches, updates }
}

/// A rank's run without end, of one stage: its receives are posted in the order in which slots get free.
fn unbounded(program: &Program, line: &Line, stage: u32) -> Stream {
    let (rings, at) = (&program.rings[stage as usize], stage as usize);
    let receives: Vec<(Op, u64)> = [
        program.border_before(at).map(|_| (Op::RecvF, u64::from(rings.recv_f))),
        program.border_after(at).map(|_| (Op::RecvB, u64::from(rings.recv_b))),
    ]
    .into_iter()
    .flatten()
    .collect();
    let place = |items: &[Item]| {
        work::visit(items.len());
        let mut placed = Vec::with_capacity(items.len() * 3);
        for item in items {
            placed.extend(with_sends(program, item));
            if weight_gradient(item.op) {
                placed.extend(receives.iter().map(|(op, slots)| instr(*op, stage, item.mb + slots)));
            }
        }
        placed
    };
    let mut prologue: Vec<Instr> =
        receives.iter().flat_map(|(op, slots)| (0..*slots).map(|mb| instr(*op, stage, mb))).collect();
    prologue.extend(place(&line.prologue));
    let (microbatches, updates) = (line.microbatches as u32, line.updates as u32);
    Stream { prologue, period: place(&line.period), microbatches, updates }
}

/// The diagnostic for a broken invariant: a deadlock is the order's fault, a version that is not there the policy's, anything else is ours.
pub(crate) fn refused(schedule: &Schedule, shape: &Shape, program: &Program, violation: &Violation) -> Diagnostic {
    match violation {
        Violation::Deadlock(stuck) => crate::deadlock::explain(schedule, shape, program, stuck),
        Violation::Version { stage, missing, .. } if program.policy == Policy::DoubleBuffer => {
            policy::refused(schedule, shape, *stage, missing)
        }
        Violation::Apart { stages, op, mb, versions } => exchange::apart(*stages, *op, *mb, *versions),
        other => fault(schedule, "P0399", &schedule.span, "the expanded schedule does not verify")
            .note(other.to_string())
            .help("this is an error in paceline itself: please report it with the schedule"),
    }
}

/// The step of the schedule that performs `action` of `stage` on `mb`.
pub(crate) fn origin(
    schedule: &Schedule,
    shape: &Shape,
    stage: u32,
    action: Action,
    mb: u64,
) -> Option<dsl::diag::Span> {
    let k = u64::from(shape.accumulate);
    let (rank, chunk) = schedule.place.home(stage, shape.ranks);
    let (limit, mb) = match schedule.update {
        Update::Flush => (k, mb % (k / u64::from(schedule.place.copies())).max(1)),
        Update::Local => ((mb / k).checked_add(1)?.checked_mul(k)?, mb),
    };
    let acts = order::finite(schedule, shape, rank, limit, &mut ACTIONS_MAX.clone()).ok()?;
    let act: &Act = acts.iter().find(|act| act.action == action && act.chunk == chunk && act.mb == mb)?;
    let phase = schedule.order.get(act.origin.0 as usize)?;
    phase.body.get(act.origin.1 as usize).map(|step| step.span.clone())
}
