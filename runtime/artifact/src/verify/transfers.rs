//! Transfers between ranks: what one sends is what the other receives, in the same order.

use super::Violation;
use crate::channel::{channels, side};
use crate::ids::RankId;
use crate::stream::Program;
use crate::work;

/// A transfer: its channel, and the micro-batch (the update, where gradients of a tied table are exchanged).
type Transfer = (u32, u32);

/// One side of an ordered pair of ranks: its transfers in the order of the stream.
#[derive(Clone, Debug, Default)]
struct Side {
    prologue: Vec<Transfer>,
    period: Vec<Transfer>,
}

impl Side {
    fn nth(&self, n: usize, step: &impl Fn(u32) -> u64) -> Option<(u32, u64)> {
        if let Some((channel, mb)) = self.prologue.get(n) {
            return Some((*channel, u64::from(*mb)));
        }
        let n = n - self.prologue.len();
        let turn = n.checked_div(self.period.len())?;
        let (channel, mb) = self.period[n % self.period.len()];
        Some((channel, u64::from(mb) + turn as u64 * step(channel)))
    }

    /// The first transfer in which two sides differ, for ever.
    fn differs(&self, other: &Side, step: &impl Fn(u32) -> u64) -> Option<usize> {
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

/// Pairs in ascending order, with space for their transfers, and by channel the number of its pair.
fn pairs(program: &Program) -> (Vec<Pair>, Vec<usize>) {
    let homes = &program.rank_of_stage;
    let channels = channels(program);
    let ends = |channel: usize| (homes[channels[channel].from], homes[channels[channel].to]);
    let mut all: Vec<_> = (0..channels.len()).map(ends).collect();
    all.sort_unstable();
    all.dedup();
    let numbers: Vec<usize> = (0..channels.len()).map(|c| all.partition_point(|pair| *pair < ends(c))).collect();
    let mut capacities = vec![0; all.len()];
    for (channel, number) in numbers.iter().enumerate() {
        let stream = &program.streams[0];
        let by_update = channels[channel].freight.by_update();
        capacities[*number] += if by_update { stream.updates } else { stream.microbatches } as usize;
    }
    let empty = |capacity| Side { prologue: Vec::new(), period: Vec::with_capacity(capacity) };
    let pair = |((sender, receiver), capacity)| {
        let (sent, received) = (empty(capacity), empty(capacity));
        Pair { sender, receiver, sent, received }
    };
    (all.into_iter().zip(capacities).map(pair).collect(), numbers)
}

/// The pairs of ranks whose sequences differ. Placement must hold.
pub(super) fn check(program: &Program) -> Vec<Violation> {
    let (mut pairs, numbers) = pairs(program);
    let by_update: Vec<bool> = channels(program).iter().map(|c| c.freight.by_update()).collect();
    work::visit(program.instructions());
    for stream in &program.streams {
        for (list, in_period) in [(&stream.prologue, false), (&stream.period, true)] {
            for i in list {
                let Some((channel, sends)) = side(program, i.op, i.stage.index()) else { continue };
                let pair = &mut pairs[numbers[channel]];
                let side = if sends { &mut pair.sent } else { &mut pair.received };
                let list = if in_period { &mut side.period } else { &mut side.prologue };
                list.push((channel as u32, i.mb));
            }
        }
    }
    let (microbatches, updates) = (program.streams[0].microbatches, program.streams[0].updates);
    let step = |channel: u32| u64::from(if by_update[channel as usize] { updates } else { microbatches });
    let violation = |pair: &Pair| {
        let number = pair.sent.differs(&pair.received, &step)?;
        Some(Violation::Transfers { sender: pair.sender, receiver: pair.receiver, number })
    };
    pairs.iter().filter_map(violation).collect()
}
