//! A schedule's order program performed on one rank.
//!
//! # Meaning
//!
//! See [`dsl::schedule`] for what phases mean. With a flush the program is finite. With local updates the run has no
//! known length: the first `repeat` (or `drain`) that always has something to do never ends, and what comes before it
//! is finite. Its conditions repeat from some round on ([`crate::expr`]), so the sequence of its actions does too, and
//! so many rounds as give every action kind the same number of micro-batches are the steady state.
//!
//! Nothing here runs for ever, whatever the expressions: actions have a budget, and rounds that do nothing are counted.

use crate::Shape;
use crate::expr::{self, Cycle, Fault, Scope};
use artifact::work;
use dsl::diag::{Diagnostic, Span};
use dsl::schedule::{Action, Backward, Expr, Phase, PhaseKind, Place, Schedule, Sequence, Step};

/// Most actions of all ranks that are expanded.
pub const ACTIONS_MAX: u64 = 1 << 22;

/// Most rounds in a row that do nothing.
const IDLE_ROUNDS_MAX: u64 = 1 << 16;

/// One action, and the step of the schedule that it comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Act {
    pub action: Action,
    /// Which of the rank's stages.
    pub chunk: u32,
    pub mb: u64,
    /// Index of the phase, index of the step in it.
    pub origin: (u32, u32),
}

/// A warm-up that found fewer micro-batches than it asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShortWarmup {
    pub span: Span,
    pub rank: u32,
    pub asked: i64,
    pub performed: u64,
}

/// What one rank does in a run without end.
pub struct Unbounded<'a> {
    walk: Walk<'a>,
    phase: &'a Phase,
    phase_index: u32,
    round: i64,
    /// Rounds of a steady turn.
    rounds: i64,
    /// Micro-batches of a steady turn.
    pub turn: u64,
}

/// Performs the order of `rank` for `microbatches` micro-batches, which must be all.
///
/// # Errors
/// Diagnostics of the first fault.
pub fn finite(
    schedule: &Schedule,
    shape: &Shape,
    rank: u32,
    microbatches: u64,
    budget: &mut u64,
) -> Result<Vec<Act>, Diagnostic> {
    let copies = u64::from(schedule.place.copies());
    if microbatches % copies > 0 {
        let message = format!("{microbatches} micro-batches do not divide into {copies} directions");
        return Err(fault(schedule, "P0309", &schedule.span, message)
            .note("every copy of the model takes as many micro-batches as the other")
            .help(format!("use an accumulate that is a multiple of {copies}")));
    }
    let mut walk = Walk::new(schedule, shape, rank, Some(microbatches))?;
    let microbatches = microbatches / copies;
    walk.budget = *budget;
    for (index, phase) in (0..).zip(&schedule.order) {
        walk.phase(phase, index, microbatches)?;
    }
    walk.complete(microbatches)?;
    *budget = walk.budget;
    work::visit(walk.acts.len());
    Ok(walk.acts)
}

/// The first warm-up of `rank` that finds fewer micro-batches than it asks for. No more is performed than it takes to
/// know. None too where the order has a fault.
pub fn short_warmup(schedule: &Schedule, shape: &Shape, rank: u32, microbatches: u64) -> Option<ShortWarmup> {
    let last = schedule.order.iter().rposition(|phase| matches!(phase.kind, PhaseKind::Warmup(_)))?;
    let mut walk = Walk::new(schedule, shape, rank, Some(microbatches)).ok()?;
    walk.budget = ACTIONS_MAX;
    let short =
        (0..).zip(&schedule.order[..=last]).find_map(|(index, phase)| walk.phase(phase, index, microbatches).ok()?);
    work::visit(walk.acts.len());
    short
}

/// Performs the order of `rank` up to its steady state.
///
/// # Errors
/// The first fault.
pub fn unbounded<'a>(
    schedule: &'a Schedule,
    shape: &Shape,
    rank: u32,
    budget: u64,
) -> Result<Unbounded<'a>, Diagnostic> {
    let mut walk = Walk::new(schedule, shape, rank, None)?;
    walk.budget = budget;
    for (index, phase) in schedule.order.iter().enumerate() {
        let index = index as u32;
        match &phase.kind {
            PhaseKind::Warmup(count) | PhaseKind::Counted(count) => {
                walk.warmup(phase, index, count)?;
            }
            PhaseKind::Repeat => {
                walk.must_run(phase)?;
                return steady(walk, phase, index);
            }
            PhaseKind::Block(_) => {
                return Err(fault(
                    schedule,
                    "P0306",
                    &phase.span,
                    "a block ends, but with `update local` the run does not",
                )
                .help("use `flush every accumulate`"));
            }
            PhaseKind::Drain if phase.body.is_empty() => {}
            PhaseKind::Drain => return steady(walk, phase, index),
        }
    }
    Err(fault(schedule, "P0306", &schedule.span, "the order ends, but with `update local` the run does not")
        .note("with `update local` the order is performed once for the whole run, whatever its length")
        .help("put the steady state in `repeat { … }`"))
}

fn steady<'a>(mut walk: Walk<'a>, phase: &'a Phase, phase_index: u32) -> Result<Unbounded<'a>, Diagnostic> {
    let mut cycle = Cycle::CONSTANT;
    for step in &phase.body {
        if let Some(cond) = &step.when {
            let found = expr::cycle(cond, &walk.scope).and_then(|found| cycle.and(found));
            cycle = found.map_err(|f| walk.expression(f, &step.span))?;
        }
    }
    for round in 0..cycle.from {
        walk.round(phase, phase_index, round)?;
    }
    let mut trial = walk.clone();
    for round in cycle.from..cycle.from + cycle.period {
        trial.round(phase, phase_index, round)?;
    }
    let gained: Vec<(Action, u64)> = walk.kinds().iter().map(|a| (*a, trial.taken(*a) - walk.taken(*a))).collect();
    let turn = gained[0].1;
    if turn == 0 || gained.iter().any(|(_, count)| *count != turn) {
        let counts: Vec<String> = gained.iter().map(|(a, count)| format!("{count} {}", name(*a))).collect();
        let rounds =
            if cycle.period == 1 { "each round runs".into() } else { format!("every {} rounds run", cycle.period) };
        return Err(fault(walk.schedule, "P0306", &phase.span, "this never comes to a steady state")
            .here(format!("{rounds} {}", counts.join(" and ")))
            .note(format!("on rank {}; in a run without end each micro-batch needs one of each", walk.scope.rank))
            .help(format!("run {} equally often", list(walk.kinds()))));
    }
    Ok(Unbounded { walk, phase, phase_index, round: cycle.from, rounds: cycle.period, turn })
}

impl Unbounded<'_> {
    /// The actions before the steady state, and those of the next `turns` turns of it.
    ///
    /// # Errors
    /// When that is too much.
    pub fn take(mut self, turns: u64) -> Result<(Vec<Act>, Vec<Act>, u64), Diagnostic> {
        let begin = self.walk.acts.len();
        for _ in 0..turns {
            for _ in 0..self.rounds {
                self.walk.round(self.phase, self.phase_index, self.round)?;
                self.round += 1;
            }
        }
        work::visit(self.walk.acts.len());
        let period = self.walk.acts.split_off(begin);
        Ok((self.walk.acts, period, self.walk.budget))
    }

    /// Whether the end of a run may differ from its steady state with the used-up steps skipped: what the conditions
    /// left over is then done by later phases.
    pub fn may_end_otherwise(&self) -> bool {
        self.phase.kind == PhaseKind::Repeat && self.phase.body.iter().any(|step| step.when.is_some())
    }

    /// The phase that never ends.
    pub fn span(&self) -> &Span {
        &self.phase.span
    }
}

#[derive(Clone)]
struct Walk<'a> {
    schedule: &'a Schedule,
    scope: Scope,
    /// Micro-batches of each stage.
    limit: Option<u64>,
    /// By action: micro-batches of a group and whether chunks descend, where there is a sequence.
    sequences: [Option<(u64, bool)>; 4],
    /// Done so far of F, B, I, W, by chunk.
    done: Vec<[u64; 4]>,
    /// The same of all chunks.
    taken: [u64; 4],
    /// By chunk and action: the chunk of this rank that hands the action its input.
    handed_over: Vec<[Option<u32>; 4]>,
    acts: Vec<Act>,
    budget: u64,
}

impl<'a> Walk<'a> {
    fn new(schedule: &'a Schedule, shape: &Shape, rank: u32, limit: Option<u64>) -> Result<Self, Diagnostic> {
        let chunks = schedule.place.chunks(shape.chunks).max(1);
        let each = limit.map(|limit| limit / u64::from(schedule.place.copies()));
        let flush = schedule.update == dsl::schedule::Update::Flush;
        let scope = Scope {
            ranks: i64::from(shape.ranks),
            rank: i64::from(rank),
            microbatches: limit.filter(|_| flush).and_then(|m| i64::try_from(m).ok()),
            accumulate: i64::from(shape.accumulate),
            chunks: i64::from(chunks),
            round: None,
        };
        let done = vec![[0; 4]; chunks as usize];
        let handed_over = (0..chunks).map(|chunk| handed_over(schedule.place, &scope, chunk)).collect();
        let (sequences, taken, acts) = ([None; 4], [0; 4], Vec::new());
        let mut walk = Walk { schedule, scope, limit: each, sequences, done, taken, handed_over, acts, budget: 0 };
        for sequence in &schedule.sequences {
            let size = walk.group(sequence)?;
            walk.sequences[sequence.action as usize] = Some((size, sequence.descending));
        }
        Ok(walk)
    }

    /// The micro-batches of a sequence's group.
    fn group(&self, sequence: &Sequence) -> Result<u64, Diagnostic> {
        let size = expr::value(&sequence.groups, &self.scope).map_err(|f| self.expression(f, &sequence.span))?;
        let all = self.limit.and_then(|m| i64::try_from(m).ok()).unwrap_or(size);
        if size > 0 && all % size == 0 {
            return Ok(size.unsigned_abs());
        }
        if size <= 0 {
            return Err(fault(self.schedule, "P0309", &sequence.span, format!("a group has {size} micro-batches"))
                .here(format!("on rank {}", self.scope.rank))
                .help("make the size at least 1, for example `groups(max(1, …))`"));
        }
        let message = format!("{all} micro-batches do not divide into groups of {size}");
        let help = match self.group_sizes_that_divide(sequence, all) {
            (None, Some(above)) => format!("the nearest accumulate that does is {above}"),
            (Some(below), Some(above)) => format!("the nearest accumulate that do are {below} and {above}"),
            _ => "use another accumulate, or another size".into(),
        };
        let rounds = (all / self.scope.ranks.max(1)).max(1);
        let mut found = fault(self.schedule, "P0309", &sequence.span, message)
            .here(format!("{all} is not a multiple of {size}"))
            .note("every group takes its micro-batches through all of a rank's stages");
        if all % rounds == 0 && all / rounds != size {
            let rule = "groups(M / max(1, M / P))";
            found = found.note(format!(
                "by PyTorch's rule, `{rule}`, there are {rounds} groups of {} (interleaved_1f1b_torch)",
                all / rounds
            ));
        }
        Err(found.help(help))
    }

    /// The nearest numbers of micro-batches, below and above, that the group's size divides.
    fn group_sizes_that_divide(&self, sequence: &Sequence, all: i64) -> (Option<i64>, Option<i64>) {
        let divides = |m: &i64| {
            let scope = Scope { microbatches: Some(*m), accumulate: *m, ..self.scope };
            expr::value(&sequence.groups, &scope).is_ok_and(|size| size > 0 && m % size == 0)
        };
        let reach = 4 * (self.scope.ranks + 1);
        ((1..all).rev().take(reach as usize).find(divides), (all + 1..=all + reach).find(divides))
    }

    fn kinds(&self) -> &'static [Action] {
        match self.schedule.backward {
            Backward::Whole => &[Action::F, Action::B],
            Backward::Split => &[Action::F, Action::I, Action::W],
        }
    }

    fn done(&self, action: Action, chunk: u32) -> u64 {
        self.done[chunk as usize][action as usize]
    }

    /// Done so far on all chunks.
    fn taken(&self, action: Action) -> u64 {
        self.taken[action as usize]
    }

    /// Whether the step has a micro-batch left.
    fn left(&self, step: &Step) -> bool {
        let Some(limit) = self.limit else { return true };
        match step.chunk {
            Some(chunk) => self.done(step.action, chunk) < limit,
            None => self.taken(step.action) < limit * self.done.len() as u64,
        }
    }

    /// The chunk that the step does next.
    fn chunk(&self, step: &Step) -> u32 {
        let chunks = self.done.len() as u64;
        match (step.chunk, self.sequences[step.action as usize]) {
            (Some(chunk), _) => chunk,
            (None, None) => 0,
            (None, Some((size, descending))) => {
                let at = self.taken(step.action) % (size * chunks) / size;
                (if descending { chunks - 1 - at } else { at }) as u32
            }
        }
    }

    /// One phase of a finite run, and whether it is a warm-up that found too few micro-batches.
    fn phase(&mut self, phase: &Phase, index: u32, microbatches: u64) -> Result<Option<ShortWarmup>, Diagnostic> {
        match &phase.kind {
            PhaseKind::Warmup(count) => {
                let (asked, performed) = self.warmup(phase, index, count)?;
                let (span, rank) = (phase.span.clone(), self.scope.rank as u32);
                let short = ShortWarmup { span, rank, asked, performed };
                return Ok((performed < asked.max(0) as u64).then_some(short));
            }
            PhaseKind::Counted(count) => {
                self.warmup(phase, index, count)?;
            }
            PhaseKind::Repeat => {
                self.must_run(phase)?;
                let mut round = 0;
                while phase.body.iter().any(|step| step.when.is_none() && self.left(step)) {
                    self.round(phase, index, round)?;
                    round += 1;
                }
            }
            PhaseKind::Drain => self.drain(phase, index)?,
            PhaseKind::Block(interval) => self.block(phase, index, interval, microbatches)?,
        }
        Ok(None)
    }

    /// Rounds asked for and performed; the rest found nothing left.
    fn warmup(&mut self, phase: &Phase, index: u32, count: &Expr) -> Result<(i64, u64), Diagnostic> {
        let asked = expr::value(count, &self.scope).map_err(|f| self.expression(f, &phase.span))?;
        let (mut performed, mut idle) = (0, 0);
        for round in 0..asked.max(0) {
            if !phase.body.iter().any(|step| self.left(step)) {
                break;
            }
            idle = if self.round(phase, index, round)? { 0 } else { idle + 1 };
            self.progress(phase, idle)?;
            performed += 1;
        }
        Ok((asked, performed))
    }

    fn drain(&mut self, phase: &Phase, index: u32) -> Result<(), Diagnostic> {
        let (mut round, mut idle) = (0, 0);
        while phase.body.iter().any(|step| self.left(step)) {
            idle = if self.round(phase, index, round)? { 0 } else { idle + 1 };
            self.progress(phase, idle)?;
            round += 1;
        }
        Ok(())
    }

    /// Everything that the block's steps have left, in the order of time.
    fn block(&mut self, phase: &Phase, index: u32, interval: &Expr, microbatches: u64) -> Result<(), Diagnostic> {
        let starts = crate::block::starts(phase, interval, &self.scope).map_err(|(found, step)| match found {
            Some(found) => self.expression(found, step),
            None => fault(self.schedule, "P0303", step, "the interval of a block is at least 1")
                .here(format!("on rank {}", self.scope.rank))
                .help("write the units of time from one micro-batch to the next, for example `block every 6`"),
        })?;
        let mut due = Vec::new();
        for (number, (step, start)) in phase.body.iter().zip(&starts.steps).enumerate() {
            let done = match step.chunk {
                Some(chunk) => self.done(step.action, chunk),
                None => self.taken(step.action),
            };
            let all = if step.chunk.is_some() { microbatches } else { microbatches * self.done.len() as u64 };
            due.extend((done..all).map(|m| (start.saturating_add(starts.interval.saturating_mul(m as i64)), number)));
        }
        due.sort_unstable();
        for (_, number) in due {
            let step = &phase.body[number];
            if self.left(step) {
                self.perform(step, (index, number as u32))?;
            }
        }
        Ok(())
    }

    fn progress(&self, phase: &Phase, idle: u64) -> Result<(), Diagnostic> {
        if idle < IDLE_ROUNDS_MAX {
            return Ok(());
        }
        Err(fault(self.schedule, "P0304", &phase.span, "this makes no progress")
            .here(format!("{idle} rounds in a row performed nothing on rank {}", self.scope.rank))
            .help("make its conditions hold sooner, or leave `when` out"))
    }

    fn must_run(&self, phase: &Phase) -> Result<(), Diagnostic> {
        if phase.body.iter().any(|step| step.when.is_none()) {
            return Ok(());
        }
        Err(fault(self.schedule, "P0234", &phase.span, "this `repeat` runs no round")
            .here("every step has a `when`")
            .note("`repeat` ends when no step without a `when` has a micro-batch left: here that is at once")
            .help("use `drain { … }`, or give one step no `when`"))
    }

    /// One round of a phase; whether it performed anything.
    fn round(&mut self, phase: &Phase, index: u32, round: i64) -> Result<bool, Diagnostic> {
        let scope = Scope { round: Some(round), ..self.scope };
        let before = self.acts.len();
        for (number, step) in phase.body.iter().enumerate() {
            let due = match &step.when {
                Some(cond) => expr::holds(cond, &scope).map_err(|f| self.expression(f, &step.span))?,
                None => true,
            };
            if due && self.left(step) {
                self.perform(step, (index, number as u32))?;
            }
        }
        let moved = self.acts.len() > before;
        if !moved {
            // Rounds that do nothing cost as much as an action, so that many phases of them end too.
            self.spend(&phase.span)?;
        }
        Ok(moved)
    }

    fn perform(&mut self, step: &Step, origin: (u32, u32)) -> Result<(), Diagnostic> {
        let action = step.action;
        let needs = match (action, self.schedule.backward) {
            (Action::F, _) => None,
            (Action::B, Backward::Whole) | (Action::I, Backward::Split) => Some(Action::F),
            (Action::W, Backward::Split) => Some(Action::I),
            _ => return Err(self.wrong_kind(step)),
        };
        let chunk = self.chunk(step);
        let mb = self.done(action, chunk);
        let handed = self.handed_over[chunk as usize][action as usize].map(|other| (action, other));
        let needs = needs.map(|action| (action, chunk)).into_iter().chain(handed);
        let missing = { needs }.find(|(needed, of)| self.done(*needed, *of) <= mb);
        if let Some((needed, other)) = missing {
            let of = |action, chunk: u32| match self.done.len() {
                1 => String::from(name(action)),
                _ => format!("{}{chunk}", name(action)),
            };
            let (now, before) = (of(action, chunk), of(needed, other));
            return Err(fault(self.schedule, "P0301", &step.span, format!("{now} comes before its {before}"))
                .here(format!(
                    "on rank {} this runs {now} of micro-batch {mb}, whose {before} has not run",
                    self.scope.rank
                ))
                .note(format!("so far the rank ran {} {before} and {mb} {now}", self.done(needed, other)))
                .help(format!("run {before} first, for example in `warmup`")));
        }
        self.spend(&step.span)?;
        self.done[chunk as usize][action as usize] += 1;
        self.taken[action as usize] += 1;
        self.acts.push(Act { action, chunk, mb, origin });
        Ok(())
    }

    fn spend(&mut self, span: &Span) -> Result<(), Diagnostic> {
        self.budget = self.budget.checked_sub(1).ok_or_else(|| too_large(self.schedule, span))?;
        Ok(())
    }

    fn wrong_kind(&self, step: &Step) -> Diagnostic {
        let (kind, written) = match self.schedule.backward {
            Backward::Whole => ("whole", "B"),
            Backward::Split => ("split", "I and W"),
        };
        fault(
            self.schedule,
            "P0231",
            &step.span,
            format!("{} does not exist with `backward {kind}`", name(step.action)),
        )
        .here(format!("the backward pass is {written}"))
        .help(match self.schedule.backward {
            Backward::Whole => "write `backward split`, or run B",
            Backward::Split => "write `backward whole`, or run I and W",
        })
    }

    fn complete(&self, microbatches: u64) -> Result<(), Diagnostic> {
        let missing: Vec<String> = self
            .kinds()
            .iter()
            .flat_map(|action| (0..self.done.len() as u32).map(move |chunk| (*action, chunk)))
            .filter(|(action, chunk)| self.done(*action, *chunk) < microbatches)
            .map(|(action, chunk)| {
                let of = if self.done.len() > 1 { chunk.to_string() } else { String::new() };
                format!("{} of {}{of}", microbatches - self.done(action, chunk), name(action))
            })
            .collect();
        if missing.is_empty() {
            return Ok(());
        }
        let names = missing.join(" and ");
        Err(fault(self.schedule, "P0302", &self.schedule.span, "the order leaves micro-batches out")
            .here(format!("on rank {}: {names} never run, of {microbatches} micro-batches", self.scope.rank))
            .help(format!("end with `drain {{ … }}` of {}", list(self.kinds()))))
    }

    fn expression(&self, fault_found: Fault, span: &Span) -> Diagnostic {
        let with = |code, message: &str| fault(self.schedule, code, span, message);
        let rank = format!("on rank {}", self.scope.rank);
        match fault_found {
            Fault::DivisionByZero => with("P0303", "this divides by zero")
                .here(rank)
                .help("keep the divisor from zero, for example `max(1, …)`"),
            Fault::Overflow => with("P0303", "this is larger than any number of micro-batches")
                .here(rank)
                .help("use numbers below 2^63 in every step of the computation"),
            Fault::NoRound => with("P0303", "`n` has no value here")
                .here("n counts the rounds of a phase")
                .help("use n in a `when` only"),
            Fault::NoLength => with("P0303", "`M` has no value here")
                .here("the run has no known length")
                .note("with `update local` the order is performed once for the whole run, whatever its length")
                .help("use K, the micro-batches of one update"),
            Fault::NotPeriodic => with("P0307", "this condition never comes to a steady state")
                .note("in a run without end a condition must repeat after finitely many rounds")
                .help("compare sums, and multiples or quotients by constants, of n"),
        }
    }
}

/// By action: the chunk on the same rank that is the stage before (for F) or after (for B and I) this one, if that is there.
fn handed_over(place: Place, scope: &Scope, chunk: u32) -> [Option<u32>; 4] {
    let (rank, ranks) = (scope.rank as u32, scope.ranks as u32);
    let stage = place.stage(chunk, rank, ranks);
    // Stages of one copy of the model.
    let copy = ranks * scope.chunks as u32 / place.copies();
    let here = |from: Option<u32>| {
        let (home, other) = place.home(from.filter(|s| s / copy == stage / copy)?, ranks);
        (home == rank && scope.chunks > 1).then_some(other)
    };
    let (before, after) = (here(stage.checked_sub(1)), here(Some(stage + 1)));
    let mut by_action = [None; 4];
    (by_action[Action::F as usize], by_action[Action::B as usize]) = (before, after);
    by_action[Action::I as usize] = after;
    by_action
}

/// Refuses what would not be expanded in reasonable time and memory.
pub fn too_large(schedule: &Schedule, span: &Span) -> Diagnostic {
    fault(schedule, "P0305", span, format!("the schedule has more than {ACTIONS_MAX} actions"))
        .note("one repetition on all ranks is written out and proved, action by action")
        .help("use fewer ranks, a smaller accumulate, or a shorter warm-up")
}

/// An error at a place in the schedule.
pub fn fault(schedule: &Schedule, code: &'static str, span: &Span, message: impl Into<String>) -> Diagnostic {
    let mut diagnostic = Diagnostic::error(code, span.clone(), message);
    diagnostic.labels[0].library = schedule.library.then(|| schedule.name.clone());
    diagnostic
}

/// The letter of an action.
pub fn name(action: Action) -> &'static str {
    match action {
        Action::F => "F",
        Action::B => "B",
        Action::I => "I",
        Action::W => "W",
    }
}

fn list(actions: &[Action]) -> String {
    let names: Vec<&str> = actions.iter().map(|a| name(*a)).collect();
    match names.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} and {last}", rest.join(", ")),
        _ => names.concat(),
    }
}
