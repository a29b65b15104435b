//! Where in its rank's stream each micro-batch of one operation is performed, for a run of any length.
//!
//! # Meaning
//!
//! The period repeats with step `d` (micro-batches a repetition; updates for `U` and what belongs to one). Its instruction for value `q` stands
//! for `q, q + d, q + 2d, …`. Every value is performed exactly once when
//!
//! * the period has exactly one instruction for each residue modulo `d`, and
//! * the prologue has exactly the values of each residue below the period's `q`: `q mod d, …, q - d`.
//!
//! `q div d` of a residue is its *lead*: so many of its values come in the prologue. From then on the place of value
//! `m + d` is that of `m`, one repetition later. A relation between places of two operations (at a fixed distance of their
//! values) is therefore the same for every value from the larger of both leads on, and checking one value of each
//! residue beyond them proves it for all. The leads of an operation sum up to its instructions in the prologue, so such
//! a proof takes time linear in the stream.
//!
//! # Layout
//!
//! [`Places`] holds all operations of all stages in a few arrays, filled in two passes over the streams: value
//! `residue + turn d` of an operation is named by its residue and its turn, and found without a search.

use super::Violation;
use crate::channel::performs;
use crate::ids::StageId;
use crate::stream::{Instr, Op, Program, Stream};
use crate::work;
use std::collections::HashSet;

/// What an instruction does, whatever its accumulation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    F,
    B,
    I,
    W,
    U,
    SendF,
    RecvF,
    SendB,
    RecvB,
    SendG,
    RecvG,
    N,
    SendN,
    RecvN,
    T,
    SendT,
    RecvT,
}

impl Kind {
    /// In the order of their numbers.
    pub const ALL: [Kind; 17] = [
        Kind::F,
        Kind::B,
        Kind::I,
        Kind::W,
        Kind::U,
        Kind::SendF,
        Kind::RecvF,
        Kind::SendB,
        Kind::RecvB,
        Kind::SendG,
        Kind::RecvG,
        Kind::N,
        Kind::SendN,
        Kind::RecvN,
        Kind::T,
        Kind::SendT,
        Kind::RecvT,
    ];

    pub fn of(op: Op) -> Self {
        match op {
            Op::F => Kind::F,
            Op::B(_) => Kind::B,
            Op::I => Kind::I,
            Op::W(_) => Kind::W,
            Op::U => Kind::U,
            Op::SendF => Kind::SendF,
            Op::RecvF => Kind::RecvF,
            Op::SendB => Kind::SendB,
            Op::RecvB => Kind::RecvB,
            Op::SendG => Kind::SendG,
            Op::RecvG => Kind::RecvG,
            Op::N => Kind::N,
            Op::SendN => Kind::SendN,
            Op::RecvN => Kind::RecvN,
            Op::T => Kind::T,
            Op::SendT => Kind::SendT,
            Op::RecvT => Kind::RecvT,
        }
    }

    /// As [`Op::by_update`].
    pub fn by_update(self) -> bool {
        use Kind::{N, RecvG, RecvN, RecvT, SendG, SendN, SendT, T, U};
        matches!(self, U | SendG | RecvG | N | SendN | RecvN | T | SendT | RecvT)
    }

    /// As diagnostics and grids write it.
    pub fn name(self) -> &'static str {
        match self {
            Kind::F => "F",
            Kind::B => "B",
            Kind::I => "I",
            Kind::W => "W",
            Kind::U => "U",
            Kind::SendF => "SEND_F",
            Kind::RecvF => "RECV_F",
            Kind::SendB => "SEND_B",
            Kind::RecvB => "RECV_B",
            Kind::SendG => "SEND_G",
            Kind::RecvG => "RECV_G",
            Kind::N => "N",
            Kind::SendN => "SEND_N",
            Kind::RecvN => "RECV_N",
            Kind::T => "T",
            Kind::SendT => "SEND_T",
            Kind::RecvT => "RECV_T",
        }
    }
}

/// A place in a rank's run; the order is that of execution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct At {
    /// 0 is the prologue; repetition `n` of the period is `n + 1`.
    pub section: u64,
    /// Index of the instruction in the prologue or the period.
    pub position: u32,
}

/// Counts some instructions of a stage before a place in its rank's run.
#[derive(Clone, Debug, Default)]
pub struct Count {
    /// Their positions in the prologue and the period, ascending.
    pub prologue: Vec<u32>,
    pub period: Vec<u32>,
}

impl Count {
    /// How many come before `at`.
    pub fn before(&self, at: At) -> u64 {
        let before = |positions: &[u32]| positions.partition_point(|p| *p < at.position) as u64;
        match at.section.checked_sub(1) {
            None => before(&self.prologue),
            Some(n) => self.prologue.len() as u64 + n * self.period.len() as u64 + before(&self.period),
        }
    }
}

/// An instruction in its section.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    value: u32,
    position: u32,
    /// How many of the same operation and stage come before it in the section.
    number: u32,
}

/// No instruction: a section is shorter.
const NONE: Entry = Entry { value: u32::MAX, position: u32::MAX, number: u32::MAX };

/// Where one operation of one stage is performed. See the module's text.
#[derive(Clone, Copy, Debug)]
pub struct Index<'a> {
    step: u64,
    /// By residue.
    period: &'a [Entry],
    /// By residue: where its turns begin in `prologue`, and their end. Empty where there is no prologue.
    leads: &'a [u32],
    prologue: &'a [Entry],
}

impl Index<'_> {
    /// Values a repetition.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Residue and turn of value `m`.
    fn split(&self, m: u64) -> (usize, u64) {
        if m < self.step { (m as usize, 0) } else { ((m % self.step) as usize, m / self.step) }
    }

    /// Where value `m` is performed.
    pub fn at(&self, m: u64) -> At {
        let (residue, turn) = self.split(m);
        self.place(residue, turn)
    }

    /// Where value `residue + turn * step` is performed.
    pub fn place(&self, residue: usize, turn: u64) -> At {
        match turn.checked_sub(self.turns(residue)) {
            Some(later) => At { section: later + 1, position: self.period[residue].position },
            None => At { section: 0, position: self.early(residue, turn).position },
        }
    }

    /// How many of the operation come before value `m` in the run.
    pub fn number(&self, m: u64) -> u64 {
        let (residue, turn) = self.split(m);
        match turn.checked_sub(self.turns(residue)) {
            Some(later) => self.prologue.len() as u64 + later * self.step + u64::from(self.period[residue].number),
            None => u64::from(self.early(residue, turn).number),
        }
    }

    /// Positions in the prologue and in the period, ascending.
    pub fn positions(&self) -> (Vec<u32>, Vec<u32>) {
        let ascending = |entries: &[Entry]| {
            let mut positions: Vec<u32> = entries.iter().map(|entry| entry.position).collect();
            positions.sort_unstable();
            positions
        };
        (ascending(self.prologue), ascending(self.period))
    }

    fn early(&self, residue: usize, turn: u64) -> Entry {
        self.prologue[self.leads[residue] as usize + turn as usize]
    }

    /// How many values of `m`'s residue the prologue performs.
    pub fn lead(&self, m: u64) -> u64 {
        self.turns(self.split(m).0)
    }

    /// How many values of the residue the prologue performs.
    pub(super) fn turns(&self, residue: usize) -> u64 {
        if self.leads.is_empty() { 0 } else { u64::from(self.leads[residue + 1] - self.leads[residue]) }
    }

    /// The first value, of those that stand for all, that is not performed before `other` performs the value so much larger:
    /// none is if there is none among them.
    pub fn first_not_before(&self, other: &Index, distance: u64) -> Option<u64> {
        let (rest, carried) = other.split(distance);
        if self.leads.is_empty() && other.leads.is_empty() {
            // What a later repetition performs is later.
            work::visit(self.period.len());
            let later = if carried == 0 { &other.period[rest..] } else { &[] };
            return self.period.iter().zip(later).position(|(a, b)| a.position >= b.position).map(|m| m as u64);
        }
        (0..self.period.len()).find_map(|residue| {
            let over = residue + rest >= self.period.len();
            let (later, more) = if over { (residue + rest - self.period.len(), 1) } else { (residue + rest, 0) };
            let last = self.turns(residue).max(other.turns(later));
            work::visit(last as usize + 1);
            let wrong = |turn: &u64| self.place(residue, *turn) >= other.place(later, turn + carried + more);
            (0..=last).find(wrong).map(|turn| residue as u64 + turn * self.step)
        })
    }
}

/// Operations of one stage in the arrays of [`Places`].
#[derive(Clone, Copy, Debug, Default)]
struct Range {
    period: u32,
    prologue: u32,
    /// Where the leads begin; with no prologue there are none.
    leads: u32,
    /// Instructions in the period and in the prologue.
    counts: (u32, u32),
}

/// Where all operations of all stages are performed. See the module's text.
#[derive(Clone, Debug)]
pub struct Places {
    /// By stage, then by kind.
    ranges: Vec<Range>,
    period: Vec<Entry>,
    leads: Vec<u32>,
    prologue: Vec<Entry>,
}

/// What is wrong with one operation of a stage.
type Faults = Vec<Option<String>>;

impl Places {
    /// Finds the places of every instruction, proving coverage. Shape and placement must hold.
    ///
    /// # Errors
    /// [`Violation::Coverage`], the first of each stage.
    pub fn new(program: &Program) -> Result<Self, Vec<Violation>> {
        let mut places = Places::counted(program);
        let mut faults = vec![None; places.ranges.len()];
        places.fill_periods(program, &mut faults);
        places.fill_prologues(program, &mut faults);
        let stages = program.rank_of_stage.len();
        let found: Vec<Violation> = (0..stages).filter_map(|s| places.uncovered(program, s, &mut faults)).collect();
        if found.is_empty() { Ok(places) } else { Err(found) }
    }

    /// Instructions in all sections.
    pub fn len(&self) -> usize {
        self.period.len() + self.prologue.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn counted(program: &Program) -> Self {
        // Here, and once each when the two kinds of sections are filled.
        work::visit(2 * program.instructions());
        let mut ranges = vec![Range::default(); program.rank_of_stage.len() * Kind::ALL.len()];
        for stream in &program.streams {
            stream.period.iter().for_each(|i| ranges[slot(i)].counts.0 += 1);
            stream.prologue.iter().for_each(|i| ranges[slot(i)].counts.1 += 1);
        }
        let (mut period, mut prologue) = (0, 0);
        for range in &mut ranges {
            (range.period, range.prologue) = (period, prologue);
            period += range.counts.0;
            prologue += range.counts.1;
        }
        Places {
            ranges,
            period: vec![NONE; period as usize],
            leads: Vec::new(),
            prologue: vec![NONE; prologue as usize],
        }
    }

    fn fill_periods(&mut self, program: &Program, faults: &mut Faults) {
        let mut numbers = vec![0; self.ranges.len()];
        for stream in &program.streams {
            for (position, i) in (0..).zip(&stream.period) {
                let at = slot(i);
                let (range, step) = (self.ranges[at], stream.step(i.op));
                if range.counts.0 != step {
                    // Found wanting in the end.
                    continue;
                }
                let residue = if i.mb < step { i.mb } else { i.mb % step };
                let entry = &mut self.period[(range.period + residue) as usize];
                if *entry != NONE && faults[at].is_none() {
                    faults[at] = Some(format!("{} or a repetition of it is performed twice", i.mb));
                }
                *entry = Entry { value: i.mb, position, number: numbers[at] };
                numbers[at] += 1;
            }
        }
    }

    /// Entries of residues whose operations are all in the period, as often as that repeats.
    fn complete(&self, at: usize, step: u32, faults: &Faults) -> Option<&[Entry]> {
        let Range { period, counts, .. } = self.ranges[at];
        (counts.0 == step && faults[at].is_none()).then(|| &self.period[period as usize..(period + counts.0) as usize])
    }

    fn fill_prologues(&mut self, program: &Program, faults: &mut Faults) {
        for (at, kind) in (0..self.ranges.len()).zip(Kind::ALL.iter().cycle()) {
            let stream = &program.streams[program.rank_of_stage[at / Kind::ALL.len()].index()];
            let step = if kind.by_update() { stream.updates } else { stream.microbatches };
            let Some(entries) = self.complete(at, step, faults) else { continue };
            let due: u128 = entries.iter().map(|entry| u128::from(entry.value / step)).sum();
            let count = self.ranges[at].counts.1;
            if due == 0 && count == 0 {
                continue;
            }
            if due != u128::from(count) {
                let twice = performed_twice(stream, at, |residue| entries[residue].value, step);
                faults[at] = Some(twice.unwrap_or_else(|| format!("the prologue has {count} of {due}")));
                continue;
            }
            let mut begin = 0;
            let mut leads = vec![0];
            leads.extend(entries.iter().map(|entry| {
                begin += entry.value / step;
                begin
            }));
            self.ranges[at].leads = self.leads.len() as u32;
            self.leads.append(&mut leads);
        }
        let mut numbers = vec![0; self.ranges.len()];
        for stream in &program.streams {
            for (position, i) in (0..).zip(&stream.prologue) {
                let (at, step) = (slot(i), stream.step(i.op));
                let Some(entries) = self.complete(at, step, faults) else { continue };
                let (residue, turn) = (i.mb % step, i.mb / step);
                let twice = || Some(format!("{} is performed twice", i.mb));
                if i.mb >= entries[residue as usize].value {
                    faults[at] = twice();
                    continue;
                }
                let range = self.ranges[at];
                let first = self.leads[(range.leads + residue) as usize];
                let entry = &mut self.prologue[(range.prologue + first + turn) as usize];
                if *entry != NONE {
                    faults[at] = twice();
                }
                *entry = Entry { value: i.mb, position, number: numbers[at] };
                numbers[at] += 1;
            }
        }
    }

    /// The first operation of a stage that is not performed as often as it should be.
    fn uncovered(&self, program: &Program, s: usize, faults: &mut Faults) -> Option<Violation> {
        let stage = StageId(s as u32);
        let violation = |op, what| Violation::Coverage { stage, op, what };
        if self.splits(s) && self.has(s, Kind::B) {
            return Some(violation(Kind::B, "the backward pass is both whole and split".into()));
        }
        let stream = &program.streams[program.rank_of_stage[s].index()];
        required(program, s, self.splits(s)).find_map(|op| {
            let at = s * Kind::ALL.len() + op as usize;
            let step = if op.by_update() { stream.updates } else { stream.microbatches };
            let count = self.ranges[at].counts.0;
            if count != step {
                return Some(violation(op, format!("the period has {count} of {step}")));
            }
            faults[at].take().map(|what| violation(op, what))
        })
    }

    fn has(&self, s: usize, kind: Kind) -> bool {
        self.ranges[s * Kind::ALL.len() + kind as usize].counts != (0, 0)
    }

    /// Whether the stage's backward pass is made of I and W.
    pub fn splits(&self, s: usize) -> bool {
        self.has(s, Kind::I) || self.has(s, Kind::W)
    }

    /// Where `kind` is performed on a stage that performs it.
    pub fn of(&self, s: usize, kind: Kind) -> Index<'_> {
        let Range { period, prologue, leads, counts } = self.ranges[s * Kind::ALL.len() + kind as usize];
        let part = |begin: u32, length: u32| begin as usize..(begin + length) as usize;
        Index {
            step: u64::from(counts.0),
            period: &self.period[part(period, counts.0)],
            leads: if counts.1 == 0 { &[] } else { &self.leads[part(leads, counts.0 + 1)] },
            prologue: &self.prologue[part(prologue, counts.1)],
        }
    }
}

fn slot(i: &Instr) -> usize {
    i.stage.index() * Kind::ALL.len() + Kind::of(i.op) as usize
}

/// What stage `s` performs, whose backward pass is split or not.
fn required(program: &Program, s: usize, split: bool) -> impl Iterator<Item = Kind> + '_ {
    let last = program.after(s).is_none();
    let wanted = move |kind: &Kind| match kind {
        Kind::F | Kind::U => true,
        Kind::B => !split,
        Kind::I | Kind::W => split,
        Kind::N => program.norms(),
        Kind::T => program.norms() && !last,
        Kind::RecvF => performs(program, Op::RecvF, s),
        Kind::SendF => performs(program, Op::SendF, s),
        Kind::RecvB => performs(program, Op::RecvB, s),
        Kind::SendB => performs(program, Op::SendB, s),
        Kind::RecvG => performs(program, Op::RecvG, s),
        Kind::SendG => performs(program, Op::SendG, s),
        Kind::RecvN => performs(program, Op::RecvN, s),
        Kind::SendN => performs(program, Op::SendN, s),
        Kind::RecvT => performs(program, Op::RecvT, s),
        Kind::SendT => performs(program, Op::SendT, s),
    };
    Kind::ALL.into_iter().filter(wanted)
}

/// A value in the prologue that the period performs too, or that comes again in the prologue.
fn performed_twice(stream: &Stream, at: usize, period: impl Fn(usize) -> u32, step: u32) -> Option<String> {
    let mut seen = HashSet::new();
    let mut here = stream.prologue.iter().filter(|i| slot(i) == at);
    let twice = here.find(|i| i.mb >= period((i.mb % step) as usize) || !seen.insert(i.mb))?;
    Some(format!("{} is performed twice", twice.mb))
}
