//! Transfers between ranks: what one sends is what the other receives, in the same order.

use super::Violation;
use super::index::Kind;
use crate::ids::RankId;
use crate::stream::{Instr, Program};
use crate::work;

/// A transfer: its channel, and the micro-batch.
type Transfer = (u32, u32);

/// One side of an ordered pair of ranks: its transfers in the order of the stream.
#[derive(Clone, Debug, Default)]
struct Side {
    prologue: Vec<Transfer>,
    period: Vec<Transfer>,
}

impl Side {
    fn nth(&self, n: usize, step: u64) -> Option<(u32, u64)> {
        if let Some((channel, mb)) = self.prologue.get(n) {
            return Some((*channel, u64::from(*mb)));
        }
        let n = n - self.prologue.len();
        let turn = n.checked_div(self.period.len())?;
        let (channel, mb) = self.period[n % self.period.len()];
        Some((channel, u64::from(mb) + turn as u64 * step))
    }

    /// The first transfer in which two sides differ, for ever.
    fn differs(&self, other: &Side, step: u64) -> Option<usize> {
        work::visit(self.prologue.len() + self.period.len());
        if self.prologue == other.prologue && self.period == other.period {
            return None;
        }
        let length = self.prologue.len().max(other.prologue.len()) + self.period.len();
        let apart = |n: &usize| self.period.len() != other.period.len() || self.nth(*n, step) != other.nth(*n, step);
        (0..length).find(apart)
    }
}

/// An ordered pair of ranks with transfers.
struct Pair {
    sender: RankId,
    receiver: RankId,
    sent: Side,
    received: Side,
}

/// The channel of a transfer, numbered by its lower stage and its direction, and whether this is the sending side.
fn channel(i: &Instr) -> Option<(u32, bool)> {
    let s = i.stage.0;
    Some(match Kind::of(i.op) {
        Kind::SendF => (2 * s, true),
        Kind::RecvF => (2 * (s - 1), false),
        Kind::SendB => (2 * (s - 1) + 1, true),
        Kind::RecvB => (2 * s + 1, false),
        _ => return None,
    })
}

/// Pairs in ascending order, with space for their transfers, and by channel the number of its pair.
fn pairs(program: &Program) -> (Vec<Pair>, Vec<usize>) {
    let homes = &program.rank_of_stage;
    let channels = 2 * homes.len().saturating_sub(1);
    let ends = |channel: usize| {
        let (lower, upper) = (homes[channel / 2], homes[channel / 2 + 1]);
        if channel % 2 == 0 { (lower, upper) } else { (upper, lower) }
    };
    let mut all: Vec<_> = (0..channels).map(ends).collect();
    all.sort_unstable();
    all.dedup();
    let numbers: Vec<usize> = (0..channels).map(|c| all.partition_point(|pair| *pair < ends(c))).collect();
    let mut capacities = vec![0; all.len()];
    numbers.iter().for_each(|number| capacities[*number] += program.streams[0].microbatches as usize);
    let side = |capacity| Side { prologue: Vec::new(), period: Vec::with_capacity(capacity) };
    let pair = |((sender, receiver), capacity)| {
        let (sent, received) = (side(capacity), side(capacity));
        Pair { sender, receiver, sent, received }
    };
    (all.into_iter().zip(capacities).map(pair).collect(), numbers)
}

/// The pairs of ranks whose sequences differ. Placement must hold.
pub(super) fn check(program: &Program) -> Vec<Violation> {
    let (mut pairs, numbers) = pairs(program);
    work::visit(program.instructions());
    for stream in &program.streams {
        for (list, in_period) in [(&stream.prologue, false), (&stream.period, true)] {
            for i in list {
                let Some((channel, sends)) = channel(i) else { continue };
                let pair = &mut pairs[numbers[channel as usize]];
                let side = if sends { &mut pair.sent } else { &mut pair.received };
                let list = if in_period { &mut side.period } else { &mut side.prologue };
                list.push((channel, i.mb));
            }
        }
    }
    let step = u64::from(program.streams[0].microbatches);
    let violation = |pair: &Pair| {
        let number = pair.sent.differs(&pair.received, step)?;
        Some(Violation::Transfers { sender: pair.sender, receiver: pair.receiver, number })
    };
    pairs.iter().filter_map(violation).collect()
}
