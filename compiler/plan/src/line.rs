//! A rank's compute instructions, before transfers: a beginning and what repeats.

use crate::order::Act;
use artifact::stream::{Accumulation, Op};
use artifact::work;
use dsl::schedule::Action;
use std::collections::VecDeque;

/// One compute instruction, or a send of what all of them made. `mb` is the update for what is performed once an update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    pub op: Op,
    pub stage: u32,
    pub mb: u64,
}

/// What a rank computes; every repetition of `period` handles `microbatches` more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    pub prologue: Vec<Item>,
    pub period: Vec<Item>,
    pub microbatches: u64,
    pub updates: u64,
    /// Whether a repetition begins and ends by itself.
    pub flush: bool,
}

impl Line {
    /// One flush: all updates at its end. `stages` are the rank's, by chunk.
    pub fn flush(acts: &[Act], stages: &[u32], accumulate: u64) -> Line {
        work::visit(acts.len());
        let mut period: Vec<Item> = acts.iter().map(|act| item(act, stages[act.chunk as usize], accumulate)).collect();
        period.extend(stages.iter().map(|stage| Item { op: Op::U, stage: *stage, mb: 0 }));
        Line { prologue: Vec::new(), period, microbatches: accumulate, updates: 1, flush: true }
    }

    /// A run without end of one stage: an update right after the last weight gradient that it needs.
    pub fn local(prologue: &[Act], period: &[Act], stage: u32, microbatches: u64, accumulate: u64) -> Line {
        let place = |acts: &[Act]| {
            work::visit(acts.len());
            let mut items = Vec::with_capacity(acts.len() + acts.len() / accumulate as usize);
            for act in acts {
                let done = item(act, stage, accumulate);
                items.push(done);
                if let Op::B(a) | Op::W(a) = done.op
                    && a.last
                {
                    items.push(Item { op: Op::U, stage, mb: done.mb / accumulate });
                }
            }
            items
        };
        let (prologue, period) = (place(prologue), place(period));
        let mut line = Line { prologue, period, microbatches, updates: microbatches / accumulate, flush: false };
        line.shorten();
        line
    }

    /// Moves the repeating part as far to the front as it goes: what the prologue ends with may be the period's end
    /// already.
    fn shorten(&mut self) {
        let mut period = VecDeque::from(std::mem::take(&mut self.period));
        while let (Some(before), Some(last)) = (self.prologue.last(), period.back()) {
            let step = self.step(last.op);
            if (before.op, before.stage) != (last.op, last.stage) || before.mb + step != last.mb {
                break;
            }
            period.push_front(*before);
            period.pop_back();
            self.prologue.pop();
        }
        self.period = period.into();
    }

    fn step(&self, op: Op) -> u64 {
        if op.by_update() { self.updates } else { self.microbatches }
    }

    /// The instructions up to the end of so many repetitions, with absolute numbers.
    pub fn run(&self, repetitions: u64) -> impl Iterator<Item = Item> + '_ {
        let later = move |n: u64| self.period.iter().map(move |i| Item { mb: i.mb + n * self.step(i.op), ..*i });
        self.prologue.iter().copied().chain((0..repetitions).flat_map(later))
    }

    /// Repetitions after which everything that the first one began has ended.
    fn repetitions(&self) -> u64 {
        let lead = self.period.iter().filter(|i| !i.op.by_update()).map(|i| i.mb / self.microbatches).max();
        lead.unwrap_or(0) + 2
    }

    /// Finds the slots that rings of the line's stages need, into `needs` by stage; `hands_over` says which stages hand over to
    /// the next. A slot is taken by its claim and given back, in the same order of micro-batches, by the weight gradient.
    pub fn slots(&self, hands_over: impl Fn(usize) -> bool, needs: &mut [Needs]) {
        let mut released = vec![0; needs.len()];
        let repetitions = if self.flush { 1 } else { self.repetitions() };
        work::visit(self.prologue.len() + repetitions as usize * self.period.len());
        for i in self.run(repetitions).filter(|i| !i.op.by_update()) {
            let s = i.stage as usize;
            let taken = |stage: usize, most: &mut u32, released: &[u64]| {
                *most = (*most).max((i.mb + 1).saturating_sub(released[stage]) as u32);
            };
            if forward(i.op) {
                taken(s, &mut needs[s].stash, &released);
                if hands_over(s) {
                    taken(s + 1, &mut needs[s + 1].handed_f, &released);
                }
            }
            if input_gradient(i.op) {
                taken(s, &mut needs[s].gradient, &released);
                if s > 0 && hands_over(s - 1) {
                    taken(s - 1, &mut needs[s - 1].handed_b, &released);
                }
            }
            if weight_gradient(i.op) {
                released[s] = i.mb + 1;
            }
        }
    }
}

/// Slots that one stage's rings need, by what claims them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// F of the stage.
    pub stash: u32,
    /// B (I) of the stage.
    pub gradient: u32,
    /// F of the stage before, which hands over.
    pub handed_f: u32,
    /// B (I) of the next stage, to which this one hands over.
    pub handed_b: u32,
}

fn item(act: &Act, stage: u32, accumulate: u64) -> Item {
    let of_update = act.mb % accumulate;
    let accumulation = Accumulation { first: of_update == 0, last: of_update + 1 == accumulate };
    let op = match act.action {
        Action::F => Op::F,
        Action::B => Op::B(accumulation),
        Action::I => Op::I,
        Action::W => Op::W(accumulation),
    };
    Item { op, stage, mb: act.mb }
}

/// F.
pub fn forward(op: Op) -> bool {
    op == Op::F
}

/// B or I.
pub fn input_gradient(op: Op) -> bool {
    matches!(op, Op::B(_) | Op::I)
}

/// B or W.
pub fn weight_gradient(op: Op) -> bool {
    matches!(op, Op::B(_) | Op::W(_))
}
