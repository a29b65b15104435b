//! An independent performer of order programs, written from the meaning in `dsl::schedule` alone: what each rank computes
//! in a run of a given length, and whether ranks with unlimited buffers wait for each other for ever.

use dsl::schedule::{
    Action, BinaryOp, Chunks, CmpOp, Cond, Expr, Phase, PhaseKind, Place, Schedule, Step, Update, Var,
};
use plan::Shape;

/// A computation: action, stage, micro-batch.
pub type Act = (Action, u32, u64);

/// Why an order can't be performed.
#[derive(Clone, Debug, PartialEq)]
pub enum Wrong {
    /// An expression has no value.
    Value,
    /// A group's size does not divide the micro-batches.
    Groups,
    /// An action comes before one on the same rank that it needs.
    Before,
    /// Micro-batches are left out at the end.
    LeftOut,
    /// A phase goes on without doing anything.
    Idle,
}

/// Rounds in a row that may do nothing.
const IDLE_MAX: u32 = 2000;

pub fn chunks(schedule: &Schedule, shape: &Shape) -> u32 {
    match schedule.place {
        Place::Linear => 1,
        Place::Wave | Place::Bidirectional => 2,
        Place::Loop(Chunks::Given) => shape.chunks,
        Place::Loop(Chunks::Fixed(v)) => v,
    }
}

/// The stage that a rank's chunk is.
pub fn stage(place: Place, chunk: u32, rank: u32, ranks: u32) -> u32 {
    match place {
        Place::Wave if chunk == 1 => 2 * ranks - 1 - rank,
        // The earlier stage of both copies comes first.
        Place::Bidirectional if 2 * rank < ranks => [rank, 2 * ranks - 1 - rank][chunk as usize],
        Place::Bidirectional => [2 * ranks - 1 - rank, rank][chunk as usize],
        _ => chunk * ranks + rank,
    }
}

struct Rank<'a> {
    schedule: &'a Schedule,
    ranks: i64,
    rank: i64,
    chunks: u32,
    accumulate: i64,
    /// Of an update, and of each copy of the model.
    all: u64,
    microbatches: u64,
    acts: Vec<Act>,
}

/// What `rank` computes, `microbatches` all through: one flush, or a whole run with local updates.
pub fn perform(schedule: &Schedule, shape: &Shape, rank: u32, microbatches: u64) -> Result<Vec<Act>, Wrong> {
    let copies = if schedule.place == Place::Bidirectional { 2 } else { 1 };
    if microbatches % copies > 0 {
        return Err(Wrong::Groups);
    }
    let mut on = Rank {
        schedule,
        ranks: shape.ranks.into(),
        rank: rank.into(),
        chunks: chunks(schedule, shape),
        accumulate: shape.accumulate.into(),
        all: microbatches,
        microbatches: microbatches / copies,
        acts: Vec::new(),
    };
    for sequence in &schedule.sequences {
        on.group(&sequence.groups)?;
    }
    for phase in &schedule.order {
        on.phase(phase)?;
    }
    let kinds = if schedule.backward == dsl::schedule::Backward::Split { 3 } else { 2 };
    let all = on.microbatches * u64::from(on.chunks) * kinds;
    if on.acts.len() as u64 == all { Ok(on.acts) } else { Err(Wrong::LeftOut) }
}

impl Rank<'_> {
    fn phase(&mut self, phase: &Phase) -> Result<(), Wrong> {
        let any = |on: &Self, of: fn(&&Step) -> bool| phase.body.iter().filter(of).any(|step| on.left(step));
        let rounds = match &phase.kind {
            PhaseKind::Warmup(count) | PhaseKind::Counted(count) => Some(self.value(count, None)?),
            PhaseKind::Repeat | PhaseKind::Drain => None,
            PhaseKind::Block(interval) => {
                let interval = self.value(interval, None)?;
                return self.block(phase, interval);
            }
        };
        let (mut n, mut idle) = (0, 0);
        loop {
            let goes_on = match (&phase.kind, rounds) {
                (_, Some(rounds)) => n < rounds && any(self, |_| true),
                (PhaseKind::Repeat, _) => any(self, |step| step.when.is_none()),
                _ => any(self, |_| true),
            };
            if !goes_on {
                return Ok(());
            }
            let before = self.acts.len();
            for step in &phase.body {
                let due = step.when.as_ref().map(|cond| self.holds(cond, n)).transpose()?;
                if due.unwrap_or(true) && self.left(step) {
                    self.act(step)?;
                }
            }
            idle = if self.acts.len() > before { 0 } else { idle + 1 };
            if idle > IDLE_MAX {
                return Err(Wrong::Idle);
            }
            n += 1;
        }
    }

    /// All that its steps have left, one after another by their times.
    fn block(&mut self, phase: &Phase, interval: i64) -> Result<(), Wrong> {
        if interval < 1 {
            return Err(Wrong::Value);
        }
        let units = |step: &Step| if step.action == Action::B { 2 } else { 1 };
        let mut starts: Vec<Option<i64>> = Vec::new();
        for step in &phase.body {
            starts.push(step.at.as_ref().map(|at| self.value(at, None)).transpose()?);
        }
        // A step without a time: first the backward passes, then the weight gradients, which need those.
        for wanted in [Action::B, Action::I, Action::W] {
            for at in 0..phase.body.len() {
                let step = &phase.body[at];
                if step.action != wanted || starts[at].is_some() {
                    continue;
                }
                let before = if wanted == Action::W { Action::I } else { Action::F };
                let needed = phase.body.iter().position(|s| s.action == before && s.chunk == step.chunk);
                let Some(from) = needed.and_then(|n| Some(starts[n]? + units(&phase.body[n]))) else {
                    starts[at] = Some(0);
                    continue;
                };
                let mut taken = vec![false; interval as usize];
                for (other, start) in phase.body.iter().zip(&starts) {
                    let Some(start) = start else { continue };
                    (0..units(other)).for_each(|unit| taken[(start + unit).rem_euclid(interval) as usize] = true);
                }
                let fits = |start: &i64| (0..units(step)).all(|u| !taken[(start + u).rem_euclid(interval) as usize]);
                starts[at] = Some((from..from + interval).find(fits).unwrap_or(from));
            }
        }
        let mut due = Vec::new();
        for (number, step) in phase.body.iter().enumerate() {
            let done = self.count(step.action, step.chunk);
            let all = self.microbatches * if step.chunk.is_some() { 1 } else { u64::from(self.chunks) };
            due.extend((done..all).map(|m| (starts[number].unwrap_or(0) + interval * m as i64, number)));
        }
        due.sort_unstable();
        for (_, number) in due {
            if self.left(&phase.body[number]) {
                self.act(&phase.body[number])?;
            }
        }
        Ok(())
    }

    /// Performed so far of an action, on one chunk or all.
    fn count(&self, action: Action, chunk: Option<u32>) -> u64 {
        let stage = chunk.map(|chunk| self.stage(chunk));
        self.acts.iter().filter(|(a, s, _)| *a == action && stage.is_none_or(|stage| stage == *s)).count() as u64
    }

    fn stage(&self, chunk: u32) -> u32 {
        stage(self.schedule.place, chunk, self.rank as u32, self.ranks as u32)
    }

    fn left(&self, step: &Step) -> bool {
        let of = if step.chunk.is_some() { 1 } else { u64::from(self.chunks) };
        self.count(step.action, step.chunk) < self.microbatches * of
    }

    fn act(&mut self, step: &Step) -> Result<(), Wrong> {
        let k = self.count(step.action, step.chunk);
        let sequence = self.schedule.sequences.iter().find(|s| s.action == step.action);
        let (chunk, mb) = match (step.chunk, sequence) {
            (Some(chunk), _) => (chunk, k),
            (None, None) => (0, k),
            (None, Some(sequence)) => {
                let (g, v) = (self.group(&sequence.groups)?, u64::from(self.chunks));
                let (group, chunk, within) = (k / (g * v), k % (g * v) / g, k % g);
                let chunk = if sequence.descending { v - 1 - chunk } else { chunk };
                (chunk as u32, group * g + within)
            }
        };
        let act = (step.action, self.stage(chunk), mb);
        if self.needs(act).iter().any(|needed| !self.acts.contains(needed)) {
            return Err(Wrong::Before);
        }
        self.acts.push(act);
        Ok(())
    }

    /// What must be done on the same rank before an action.
    fn needs(&self, (action, s, mb): Act) -> Vec<Act> {
        let here = |s: u32| (0..self.chunks).any(|chunk| self.stage(chunk) == s);
        // The second copy begins at stage P.
        let border = (self.schedule.place == Place::Bidirectional).then_some(self.ranks as u32);
        let mut needs = Vec::new();
        match action {
            Action::F => {}
            Action::B | Action::I => needs.push((Action::F, s, mb)),
            Action::W => needs.push((Action::I, s, mb)),
        }
        if action == Action::F && s > 0 && Some(s) != border && here(s - 1) {
            needs.push((action, s - 1, mb));
        }
        if matches!(action, Action::B | Action::I) && Some(s + 1) != border && here(s + 1) {
            needs.push((action, s + 1, mb));
        }
        needs
    }

    fn group(&self, size: &Expr) -> Result<u64, Wrong> {
        let size = self.value(size, None)?;
        let divides = size > 0 && (self.schedule.update == Update::Local || self.microbatches as i64 % size == 0);
        if divides { Ok(size as u64) } else { Err(Wrong::Groups) }
    }

    fn value(&self, expr: &Expr, round: Option<i64>) -> Result<i64, Wrong> {
        let flush = self.schedule.update == Update::Flush;
        match expr {
            Expr::Number(n) => Ok(*n),
            Expr::Var(Var::P) => Ok(self.ranks),
            Expr::Var(Var::S) => Ok(self.rank),
            Expr::Var(Var::V) => Ok(self.chunks.into()),
            Expr::Var(Var::K) => Ok(self.accumulate),
            Expr::Var(Var::M) if flush => Ok(self.all as i64),
            Expr::Var(Var::M) => Err(Wrong::Value),
            Expr::Var(Var::N) => round.ok_or(Wrong::Value),
            Expr::Binary(op, left, right) => {
                let (a, b) = (self.value(left, round)?, self.value(right, round)?);
                Ok(match op {
                    BinaryOp::Add => a + b,
                    BinaryOp::Sub => a - b,
                    BinaryOp::Mul => a * b,
                    BinaryOp::Div if b == 0 => return Err(Wrong::Value),
                    BinaryOp::Div => (a as f64 / b as f64).floor() as i64,
                    BinaryOp::Min => a.min(b),
                    BinaryOp::Max => a.max(b),
                })
            }
        }
    }

    fn holds(&self, cond: &Cond, round: i64) -> Result<bool, Wrong> {
        let (left, right) = (self.value(&cond.left, Some(round))?, self.value(&cond.right, Some(round))?);
        Ok(match cond.op {
            CmpOp::Lt => left < right,
            CmpOp::Le => left <= right,
            CmpOp::Eq => left == right,
            CmpOp::Ge => left >= right,
            CmpOp::Gt => left > right,
        })
    }
}

/// Whether ranks that perform these lists, with unlimited buffers, all come to their end.
pub fn ends(schedule: &Schedule, shape: &Shape, lists: &[Vec<Act>]) -> bool {
    let copies = if schedule.place == Place::Bidirectional { 2 } else { 1 };
    let stages = shape.ranks * chunks(schedule, shape) / copies;
    let mut done = std::collections::HashSet::new();
    let mut next = vec![0; lists.len()];
    loop {
        let before = done.len();
        for (list, next) in lists.iter().zip(&mut next) {
            while let Some(&(action, s, mb)) = list.get(*next) {
                let input = match action {
                    Action::F => (s % stages > 0).then(|| (action, s - 1, mb)),
                    Action::B | Action::I => (s % stages < stages - 1).then_some((action, s + 1, mb)),
                    Action::W => None,
                };
                if input.is_some_and(|input| !done.contains(&input)) {
                    break;
                }
                done.insert((action, s, mb));
                *next += 1;
            }
        }
        if done.len() == before {
            return next.iter().zip(lists).all(|(next, list)| *next == list.len());
        }
    }
}
