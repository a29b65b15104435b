//! Abstract execution: what can run when a transfer completes only once both sides are there.
//!
//! # Meaning
//!
//! Ranks perform their instructions in order. `SEND` and `RECV` never wait: they make an offer and a post; the k-th
//! offer of a channel (one direction between two neighbouring stages) and its k-th post make the k-th transfer. `F`
//! waits until its input's transfer is there and, on a send ring of n slots, until the output of micro-batch `m - n`
//! was taken (its transfer is made); `B` and `I` likewise with gradients. Between stages that hand over there is no
//! transfer and nothing to wait for. Waiting never withdraws anything, so what can
//! run does not depend on the order in which ranks are tried: there is one largest set of instructions that can be
//! performed, under any timing.
//!
//! # Deadlock freedom for runs of any length
//!
//! Let X(n) be how far every rank comes when none may go beyond repetition n. When X(n + 1) is X(n) with every rank one
//! repetition further, and the send rings' waits are all in force by then, then the same instructions can be
//! performed again from there, with every number shifted: X grows by one repetition for ever, and nothing is ever
//! stuck. A run that ends (or drains at a boundary) skips instructions, which takes waits away and adds none.

use super::index::Kind;
use crate::ids::{RankId, StageId};
use crate::stream::{Instr, Op, Program, Stream};
use std::collections::HashMap;

/// An instruction performed by an [`Execution`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    pub rank: RankId,
    pub op: Op,
    pub stage: StageId,
    /// Absolute micro-batch; absolute update for `U`.
    pub mb: u64,
    /// 0 is the prologue; repetition `n` of the period is `n + 1`.
    pub section: u64,
    pub position: u32,
}

/// What a rank waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The input of this micro-batch, which `rank` sends.
    Transfer { rank: RankId },
    /// A send slot, still held by micro-batch `holder`, whose receive `rank` has not posted.
    Slot { rank: RankId, holder: u64 },
}

impl Cause {
    /// The rank that has to act.
    pub fn rank(self) -> RankId {
        match self {
            Cause::Transfer { rank } | Cause::Slot { rank, .. } => rank,
        }
    }
}

/// A rank that can't go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waiting {
    pub rank: RankId,
    pub op: Op,
    pub stage: StageId,
    pub mb: u64,
    pub cause: Cause,
}

/// How much of a program is performed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// It never ends.
    Unbounded,
    /// One segment of so many updates.
    Updates(u64),
}

/// Both ends of one channel.
#[derive(Clone, Debug, Default)]
struct Channel {
    offers: u64,
    posts: u64,
    /// Number of each offer and post that can still be asked for.
    offered: HashMap<u64, u64>,
    posted: HashMap<u64, u64>,
}

impl Channel {
    fn made(&self) -> u64 {
        self.offers.min(self.posts)
    }

    /// Whether the transfer that `numbers` knows for `mb` is made.
    fn is_made(&self, numbers: &HashMap<u64, u64>, mb: u64) -> bool {
        numbers.get(&mb).is_some_and(|number| *number < self.made())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cursor {
    section: u64,
    position: usize,
}

/// A program being performed. The stages' streams must pass `verify`'s checks of coverage and order.
#[derive(Clone, Debug)]
pub struct Execution<'a> {
    program: &'a Program,
    /// First micro-batch and first update that are skipped.
    end: (u64, u64),
    cursors: Vec<Cursor>,
    /// By lower stage: forward and backward between it and the next.
    channels: Vec<[Channel; 2]>,
    /// Instructions performed or skipped so far.
    steps: u64,
}

/// The channels that a compute instruction uses: input and output, as (lower stage, direction).
struct Ports {
    input: Option<(usize, usize)>,
    output: Option<(usize, usize)>,
    /// Slots of the output's send ring.
    slots: u64,
}

impl<'a> Execution<'a> {
    pub fn new(program: &'a Program, extent: Extent) -> Self {
        let end = match extent {
            Extent::Unbounded => (u64::MAX, u64::MAX),
            Extent::Updates(updates) => (updates.saturating_mul(u64::from(program.accumulate)), updates),
        };
        let stages = program.rank_of_stage.len();
        Execution {
            program,
            end,
            cursors: vec![Cursor { section: 0, position: 0 }; program.streams.len()],
            channels: vec![Default::default(); stages.saturating_sub(1)],
            steps: 0,
        }
    }

    /// Instructions performed or skipped so far: the work done.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Performs all that can be performed without going beyond section `last` (see [`Event::section`]), in an order
    /// that respects all waits.
    pub fn run(&mut self, last: u64, mut perform: impl FnMut(Event)) {
        loop {
            let before = self.steps;
            for rank in 0..self.cursors.len() {
                while let Some(event) = self.peek(rank, last) {
                    if !self.skipped(&event) {
                        if self.cause(&event).is_some() {
                            break;
                        }
                        self.perform(&event);
                        perform(event);
                    }
                    self.steps += 1;
                    self.cursors[rank].position += 1;
                }
            }
            if self.steps == before {
                return;
            }
        }
    }

    /// The ranks that wait though they may go on to section `last`.
    pub fn waiting(&mut self, last: u64) -> Vec<Waiting> {
        (0..self.cursors.len())
            .filter_map(|rank| {
                let event = self.peek(rank, last)?;
                let cause = self.cause(&event)?;
                Some(Waiting { rank: event.rank, op: event.op, stage: event.stage, mb: event.mb, cause })
            })
            .collect()
    }

    /// By rank: how many sections it is from the end of section `last`, and its place there.
    fn lags(&mut self, last: u64) -> Vec<(u64, usize)> {
        (0..self.cursors.len())
            .map(|rank| match self.peek(rank, last) {
                Some(_) => (last - self.cursors[rank].section, self.cursors[rank].position),
                None => (0, usize::MAX),
            })
            .collect()
    }

    /// The next instruction of a rank up to section `last`. Moves the cursor over the ends of sections.
    fn peek(&mut self, rank: usize, last: u64) -> Option<Event> {
        let stream = &self.program.streams[rank];
        let cursor = &mut self.cursors[rank];
        while cursor.position == section(stream, cursor.section).len() {
            if cursor.section >= last {
                return None;
            }
            *cursor = Cursor { section: cursor.section + 1, position: 0 };
        }
        if cursor.section > last {
            return None;
        }
        let instr = section(stream, cursor.section)[cursor.position];
        let step = if instr.op == Op::U { stream.updates } else { stream.microbatches };
        Some(Event {
            rank: RankId(rank as u32),
            op: instr.op,
            stage: instr.stage,
            mb: u64::from(instr.mb) + cursor.section.saturating_sub(1) * u64::from(step),
            section: cursor.section,
            position: cursor.position as u32,
        })
    }

    fn skipped(&self, event: &Event) -> bool {
        event.mb >= if event.op == Op::U { self.end.1 } else { self.end.0 }
    }

    fn ports(&self, op: Op, stage: StageId) -> Option<Ports> {
        let s = stage.index();
        let rings = &self.program.rings[s];
        let (before, after) = (self.program.border_before(s), self.program.border_after(s));
        match Kind::of(op) {
            Kind::F => Some(Ports {
                input: before.map(|c| (c, 0)),
                output: after.map(|c| (c, 0)),
                slots: u64::from(rings.send_f),
            }),
            Kind::B | Kind::I => Some(Ports {
                input: after.map(|c| (c, 1)),
                output: before.map(|c| (c, 1)),
                slots: u64::from(rings.send_b),
            }),
            _ => None,
        }
    }

    /// Why the instruction can't be performed now.
    fn cause(&self, event: &Event) -> Option<Cause> {
        let ports = self.ports(event.op, event.stage)?;
        if let Some((c, direction)) = ports.input {
            let channel = &self.channels[c][direction];
            if !channel.is_made(&channel.posted, event.mb) {
                let sender = if direction == 0 { c } else { c + 1 };
                return Some(Cause::Transfer { rank: self.program.rank_of_stage[sender] });
            }
        }
        let (c, direction) = ports.output?;
        let holder = event.mb.checked_sub(ports.slots)?;
        let channel = &self.channels[c][direction];
        let receiver = if direction == 0 { c + 1 } else { c };
        (!channel.is_made(&channel.offered, holder))
            .then(|| Cause::Slot { rank: self.program.rank_of_stage[receiver], holder })
    }

    fn perform(&mut self, event: &Event) {
        let s = event.stage.index();
        let numbered = |count: &mut u64, numbers: &mut HashMap<u64, u64>| {
            numbers.insert(event.mb, *count);
            *count += 1;
        };
        let channel = match event.op {
            Op::SendF => (s, 0),
            Op::RecvF => (s.wrapping_sub(1), 0),
            Op::SendB => (s.wrapping_sub(1), 1),
            Op::RecvB => (s, 1),
            _ => return self.forget(event),
        };
        let Some(channel) = self.channels.get_mut(channel.0).map(|c| &mut c[channel.1]) else { return };
        match event.op {
            Op::SendF | Op::SendB => numbered(&mut channel.offers, &mut channel.offered),
            _ => numbered(&mut channel.posts, &mut channel.posted),
        }
    }

    /// Drops numbers that no later instruction asks for.
    fn forget(&mut self, event: &Event) {
        let Some(ports) = self.ports(event.op, event.stage) else { return };
        if let Some((c, direction)) = ports.input {
            self.channels[c][direction].posted.remove(&event.mb);
        }
        if let (Some((c, direction)), Some(holder)) = (ports.output, event.mb.checked_sub(ports.slots)) {
            self.channels[c][direction].offered.remove(&holder);
        }
    }
}

fn section(stream: &Stream, section: u64) -> &[Instr] {
    if section == 0 { &stream.prologue } else { &stream.period }
}

/// Why a program is not known to be free of deadlocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stuck {
    /// Ranks that wait for each other, each for the next one, the last for the first.
    Cycle(Vec<Waiting>),
    /// No proof within the work that is allowed.
    Unproved,
}

/// Proves that no run of any length gets stuck. See the module's text. Work is linear in the program's size.
///
/// # Errors
/// The cycle of waiting ranks, or that the proof was not found.
pub fn deadlock_free(program: &Program) -> Result<(), Stuck> {
    let mut execution = Execution::new(program, Extent::Unbounded);
    let size: usize = program.streams.iter().map(|s| s.prologue.len() + s.period.len()).sum();
    let steps_max = (1 << 20) + 64 * size as u64;
    let mut previous = Vec::new();
    for last in 0.. {
        let before = execution.steps();
        execution.run(last, |_| ());
        if let Some(cycle) = cycle(&execution.waiting(last)) {
            return Err(Stuck::Cycle(cycle));
        }
        let lags = execution.lags(last);
        let slowest = lags.iter().map(|(sections, _)| *sections).max().unwrap_or(0);
        if lags == previous && last > slowest + in_force(program, slowest) {
            return Ok(());
        }
        previous = lags;
        if execution.steps() > steps_max || execution.steps() == before && last > 0 {
            return Err(Stuck::Unproved);
        }
    }
    unreachable!("the loop above returns")
}

/// The repetition from which on all waits for send slots are in force: there is a micro-batch as many before as the
/// ring has slots. Beyond `lead + slowest + 3` repetitions of slots, the holder's transfer was made in a section that
/// every rank has ended: a wait for it never holds anything up, in force or not.
fn in_force(program: &Program, slowest: u64) -> u64 {
    let of = |stage: usize| {
        let rings = &program.rings[stage];
        let stream = &program.streams[program.rank_of_stage[stage].index()];
        let step = u64::from(stream.microbatches.max(1));
        (u64::from(rings.send_f.max(rings.send_b)).div_ceil(step), stream, step)
    };
    let bounded = |stage: usize| {
        let (repetitions, stream, step) = of(stage);
        let lead = stream.period.iter().filter(|i| i.op != Op::U).map(|i| u64::from(i.mb) / step).max();
        repetitions.min(lead.unwrap_or(0) + slowest + 4) + 1
    };
    (0..program.rings.len()).map(bounded).max().unwrap_or(1)
}

/// A cycle among waiting ranks.
pub fn cycle(waiting: &[Waiting]) -> Option<Vec<Waiting>> {
    let of: HashMap<RankId, &Waiting> = waiting.iter().map(|w| (w.rank, w)).collect();
    let mut done = std::collections::HashSet::new();
    for start in waiting {
        let mut path: Vec<Waiting> = Vec::new();
        let mut next = of.get(&start.rank);
        while let Some(&&w) = next {
            if let Some(from) = path.iter().position(|p| p.rank == w.rank) {
                return Some(path.split_off(from));
            }
            if !done.insert(w.rank) {
                break;
            }
            path.push(w);
            next = of.get(&w.cause.rank());
        }
    }
    None
}
