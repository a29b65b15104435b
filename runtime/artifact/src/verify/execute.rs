//! Abstract execution: what can run when a transfer completes only once both sides are there.
//!
//! # Meaning
//!
//! Ranks perform their instructions in order. `SEND` and `RECV` never wait: they make an offer and a post; the k-th
//! offer of a channel (one direction between two neighbouring stages) and its k-th post make the k-th transfer. `F`
//! waits until its input's transfer is there and, on a send ring of n slots, until the output of micro-batch `m - n`
//! was taken (its transfer is made); `B` and `I` likewise with gradients. What else waits for which transfers, [`channel`] says. Between stages that hand over there is no transfer and nothing to wait for. Waiting never withdraws anything, so what can
//! run does not depend on the order in which ranks are tried: there is one largest set of instructions that can be
//! performed, under any timing.
//!
//! # Deadlock freedom for runs of any length
//!
//! Let X(n) be how far every rank comes when none may go beyond repetition n. When X(n + 1) is X(n) with every rank one
//! repetition further, and the send rings' waits are all in force by then, then the same instructions can be
//! performed again from there, with every number shifted: X grows by one repetition for ever, and nothing is ever
//! stuck. A run that ends (or drains at a boundary) skips instructions, which takes waits away and adds none.
//!
//! Where there is no prologue, no instruction of the period reaches into a later repetition, and X(1) is all of the
//! first, one repetition is enough: every transfer of it is made, so the next one begins as the first did.

use super::index::{Index, Kind, Places};
use crate::channel::{self, Wait, Waits, side};
use crate::ids::{RankId, StageId};
use crate::stream::{Instr, Op, Program, Stream};
use crate::work;
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
    /// A send slot, still held by micro-batch (update) `holder`, whose receive `rank` has not posted.
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

/// Both ends of a [`channel::Channel`]. Its k-th offer and its k-th post are known from the streams: counting is enough.
#[derive(Clone, Copy, Debug)]
struct Counted<'a> {
    ends: channel::Channel,
    /// Offered and posted so far, those that were skipped included.
    offers: u64,
    posts: u64,
    sends: Index<'a>,
    receives: Index<'a>,
}

impl Counted<'_> {
    fn has_made(&self, number: u64) -> bool {
        number < self.offers.min(self.posts)
    }
}

impl Event {
    /// What a rank whose stream this is performs at `cursor`.
    fn at(stream: &Stream, rank: usize, cursor: Cursor, instr: &Instr) -> Event {
        let Cursor { section, position } = cursor;
        let step = stream.step(instr.op);
        Event {
            rank: RankId(rank as u32),
            op: instr.op,
            stage: instr.stage,
            mb: u64::from(instr.mb) + section.saturating_sub(1) * u64::from(step),
            section,
            position: position as u32,
        }
    }
}

/// How far a rank is: its next instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cursor {
    pub section: u64,
    pub position: usize,
}

/// So many instructions that a rank performs one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Burst {
    pub rank: u32,
    pub count: u32,
}

/// One repetition of all ranks in an order that respects all waits: repeated for ever from where it starts, it is the
/// run from there on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Window {
    /// By rank: its first instruction.
    pub starts: Vec<Cursor>,
    /// Of each rank, as many instructions in all as its period has.
    pub bursts: Vec<Burst>,
}

impl Window {
    /// Performs the window's repetition `turn`, counted from its start.
    pub fn perform(&self, program: &Program, turn: u64, mut perform: impl FnMut(&Event)) {
        let mut cursors: Vec<Cursor> =
            self.starts.iter().map(|start| Cursor { section: start.section + turn, ..*start }).collect();
        for burst in &self.bursts {
            let rank = burst.rank as usize;
            let (stream, cursor) = (&program.streams[rank], &mut cursors[rank]);
            work::visit(burst.count as usize);
            for _ in 0..burst.count {
                perform(&Event::at(stream, rank, *cursor, &stream.period[cursor.position]));
                cursor.position += 1;
                if cursor.position == stream.period.len() {
                    *cursor = Cursor { section: cursor.section + 1, position: 0 };
                }
            }
        }
    }
}

/// A program being performed. It must pass `verify`'s checks up to those of transfers.
#[derive(Clone, Debug)]
pub struct Execution<'a> {
    program: &'a Program,
    /// First micro-batch and first update that are skipped.
    end: (u64, u64),
    cursors: Vec<Cursor>,
    /// By rank: the transfer that its next instruction was found to wait for, by channel and number.
    blocked: Vec<Option<(usize, u64)>>,
    channels: Vec<Counted<'a>>,
    /// By stage.
    waits: Vec<Waits>,
    /// Instructions performed or skipped so far.
    steps: u64,
    /// In which order since [`Execution::mark`].
    bursts: Vec<Burst>,
}

impl<'a> Execution<'a> {
    /// `places` are those of `program`.
    pub fn new(program: &'a Program, places: &'a Places, extent: Extent) -> Self {
        let end = match extent {
            Extent::Unbounded => (u64::MAX, u64::MAX),
            Extent::Updates(updates) => (updates.saturating_mul(u64::from(program.accumulate)), updates),
        };
        let counted = |ends: channel::Channel| Counted {
            ends,
            offers: 0,
            posts: 0,
            sends: places.of(ends.from, Kind::of(ends.freight.send())),
            receives: places.of(ends.to, Kind::of(ends.freight.receive())),
        };
        Execution {
            program,
            end,
            cursors: vec![Cursor { section: 0, position: 0 }; program.streams.len()],
            blocked: vec![None; program.streams.len()],
            channels: channel::channels(program).into_iter().map(counted).collect(),
            waits: Waits::of(program),
            steps: 0,
            bursts: Vec::new(),
        }
    }

    /// Instructions performed or skipped so far: the work done.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Performs all that can be performed without going beyond section `last` (see [`Event::section`]), in an order
    /// that respects all waits.
    pub fn run(&mut self, last: u64, mut perform: impl FnMut(&Event)) {
        loop {
            let before = self.steps;
            for rank in 0..self.cursors.len() {
                self.advance(rank, last, &mut perform);
            }
            // A rank that could not go on was looked at too.
            work::visit((self.steps - before) as usize + self.cursors.len());
            if self.steps == before {
                return;
            }
        }
    }

    /// Performs what one rank can perform.
    fn advance(&mut self, rank: usize, last: u64, perform: &mut impl FnMut(&Event)) {
        if self.blocked[rank].is_some_and(|(channel, number)| !self.channels[channel].has_made(number)) {
            return;
        }
        self.blocked[rank] = None;
        let before = self.steps;
        let stream = &self.program.streams[rank];
        let Cursor { mut section, mut position } = self.cursors[rank];
        'sections: while section <= last {
            let list = section_of(stream, section);
            while let Some(instr) = list.get(position) {
                let event = Event::at(stream, rank, Cursor { section, position }, instr);
                let skipped = self.skipped(&event);
                if !skipped {
                    self.blocked[rank] = self.waits_for(&event).map(|(wait, number)| (wait.channel(), number));
                    if self.blocked[rank].is_some() {
                        break 'sections;
                    }
                }
                self.count(&event);
                if !skipped {
                    perform(&event);
                }
                self.steps += 1;
                position += 1;
            }
            if section == last {
                break;
            }
            (section, position) = (section + 1, 0);
        }
        self.cursors[rank] = Cursor { section, position };
        if self.steps > before {
            self.bursts.push(Burst { rank: rank as u32, count: (self.steps - before) as u32 });
        }
    }

    /// Forgets the order so far. By rank: the next instruction.
    fn mark(&mut self) -> Vec<Cursor> {
        self.bursts.clear();
        let next = |(stream, cursor): (&Stream, &Cursor)| match section_of(stream, cursor.section).len() {
            length if cursor.position == length => Cursor { section: cursor.section + 1, position: 0 },
            _ => *cursor,
        };
        self.program.streams.iter().zip(&self.cursors).map(next).collect()
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
        while cursor.position == section_of(stream, cursor.section).len() {
            if cursor.section >= last {
                return None;
            }
            *cursor = Cursor { section: cursor.section + 1, position: 0 };
        }
        if cursor.section > last {
            return None;
        }
        Some(Event::at(stream, rank, *cursor, &section_of(stream, cursor.section)[cursor.position]))
    }

    fn skipped(&self, event: &Event) -> bool {
        event.mb >= if event.op.by_update() { self.end.1 } else { self.end.0 }
    }

    /// Why the instruction can't be performed now.
    fn cause(&self, event: &Event) -> Option<Cause> {
        let (wait, _) = self.waits_for(event)?;
        let rank = |stage: usize| self.program.rank_of_stage[stage];
        let ends = self.channels[wait.channel()].ends;
        Some(match wait.arrives {
            true => Cause::Transfer { rank: rank(ends.from) },
            false => Cause::Slot { rank: rank(ends.to), holder: event.mb - u64::from(wait.back) },
        })
    }

    /// The first transfer that the instruction waits for in vain, and its number on its channel.
    fn waits_for(&self, event: &Event) -> Option<(Wait, u64)> {
        self.waits[event.stage.index()].before(event.op).iter().find_map(|wait| {
            let channel = &self.channels[wait.channel()];
            let mb = wait.of(event.mb)?;
            let number = if wait.arrives { channel.receives.number(mb) } else { channel.sends.number(mb) };
            (!channel.has_made(number)).then_some((*wait, number))
        })
    }

    /// Counts an offer or a post. What a run's end skips is skipped on both sides.
    fn count(&mut self, event: &Event) {
        match side(self.program, event.op, event.stage.index()) {
            Some((channel, true)) => self.channels[channel].offers += 1,
            Some((channel, false)) => self.channels[channel].posts += 1,
            None => {}
        }
    }
}

fn section_of(stream: &Stream, section: u64) -> &[Instr] {
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
/// The window that repeats.
///
/// # Errors
/// The cycle of waiting ranks, or that the proof was not found.
pub fn deadlock_free(program: &Program, places: &Places) -> Result<Window, Stuck> {
    let mut execution = Execution::new(program, places, Extent::Unbounded);
    let size: usize = program.streams.iter().map(|s| s.prologue.len() + s.period.len()).sum();
    let steps_max = (1 << 20) + 64 * size as u64;
    let mut previous = Vec::new();
    for last in 0.. {
        let before = execution.steps();
        let starts = execution.mark();
        execution.run(last, |_| ());
        if let Some(cycle) = cycle(&execution.waiting(last)) {
            return Err(Stuck::Cycle(cycle));
        }
        let lags = execution.lags(last);
        let slowest = lags.iter().map(|(sections, _)| *sections).max().unwrap_or(0);
        // Without a prologue no operation has a lead: coverage says so.
        let complete = last == 1 && slowest == 0 && program.streams.iter().all(|s| s.prologue.is_empty());
        if complete || lags == previous && last > slowest + in_force(program, slowest) {
            return Ok(Window { starts, bursts: std::mem::take(&mut execution.bursts) });
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
        let lead = stream.period.iter().filter(|i| !i.op.by_update()).map(|i| u64::from(i.mb) / step).max();
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
