//! In which order a rank enqueues what its instructions mean, when waits do not block the rank but its device.
//!
//! # Why an order is needed
//!
//! The streams are proved free of deadlock for transfers that each complete as soon as both ends are there. A device has one queue of
//! transfers, in which a transfer blocks all that come after it until its other end is at the head of the peer's queue: put there as the
//! instructions come, two ranks that both send first wait for ever.
//!
//! So every rank replays all streams, with a unit of time for each computation and none for a transfer, and enqueues its transfers
//! in the order in which they complete in that replay. The replay is the same on every rank, so all queues follow one order of
//! all transfers. The earliest transfer of that order which is not done is then always at the head of both its ends' queues, and all
//! that it needs was enqueued before it: something can always go on, whatever the real times are.
//!
//! Transfers of a rank that complete at the same instant do not depend on each other (a computation would lie between them, and that takes
//! time), so they form one *exchange*: a group whose transfers run together, the two directions between two ranks among them.
//!
//! The replay never ends; what is past the end of a segment is left out where it is enqueued. So a rank that learns late that a
//! segment ends early has the same order as one that knew it.

pub use crate::executor::Ring;
use artifact::ids::StageId;
use artifact::stream::{Op, Program, Stream};
use std::collections::VecDeque;

/// One end of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Side {
    pub stage: StageId,
    pub ring: Ring,
    /// The update, of a tied table.
    pub mb: u64,
}

/// What a rank enqueues next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// An instruction with its absolute micro-batch (update). Those of transfers only say that the slot is ready.
    Instruction(Op, StageId, u64),
    /// Transfers that run together. Their slots were ready before.
    Exchange(Vec<Side>),
    /// All instructions of the prologue, or of so many repetitions, have come.
    Repetition(u64),
}

/// A channel of a border in one direction: both ends' micro-batches that wait for the other end, in order.
#[derive(Clone, Debug, Default)]
struct Channel {
    offers: VecDeque<u64>,
    posts: VecDeque<u64>,
    /// Transfers done, and those begun by either side.
    done: u64,
    offered: u64,
    posted: u64,
}

/// A rank in the replay.
#[derive(Clone, Debug, Default)]
struct Replayed {
    /// When it comes to its next instruction.
    at: u64,
    /// Its next instruction: in the prologue (none), or in a repetition of the period.
    repetition: Option<u64>,
    index: usize,
}

/// See the module's text.
pub struct Order<'a> {
    program: &'a Program,
    streams: &'a [Stream],
    /// The rank whose steps are wanted.
    own: usize,
    now: u64,
    ranks: Vec<Replayed>,
    forward: Vec<Channel>,
    backward: Vec<Channel>,
    /// Between the ends of a tied table, the first and the last stage: from the first, and from the last.
    exchange: Vec<Channel>,
    /// By stage and ring, for each slot the number of transfers of its channel after which it is done.
    tickets: Vec<[Vec<u64>; 6]>,
    steps: VecDeque<Step>,
}

/// Units of time of a computation; transfers take none.
fn duration(op: Op) -> u64 {
    match op {
        Op::B(_) => 2,
        _ => 1,
    }
}

impl<'a> Order<'a> {
    /// The order of rank `own` when the ranks run `streams`, on the stages of `program`.
    pub fn new(program: &'a Program, streams: &'a [Stream], own: usize) -> Self {
        let borders = program.rank_of_stage.len().saturating_sub(1);
        let slots = |n: u32| vec![0; n as usize];
        let tickets = program.rings.iter().enumerate().map(|(s, r)| {
            let exchanges = u32::from(program.partner(s).is_some());
            [r.recv_f, r.send_f, r.recv_b, r.send_b, exchanges, exchanges].map(slots)
        });
        let exchanges = if program.partner(0).is_some() { 2 } else { 0 };
        Order {
            program,
            streams,
            own,
            now: 0,
            ranks: vec![Replayed::default(); streams.len()],
            forward: vec![Channel::default(); borders],
            backward: vec![Channel::default(); borders],
            exchange: vec![Channel::default(); exchanges],
            tickets: tickets.collect(),
            steps: VecDeque::new(),
        }
    }

    /// The rank's next step; none when the streams wait for each other for ever, which verification excludes.
    pub fn next(&mut self) -> Option<Step> {
        let mut idle = 0;
        while self.steps.is_empty() {
            // A rank without instructions has no steps, and the others never end.
            if self.streams[self.own].period.is_empty() || idle > 1 {
                return None;
            }
            idle = if self.advance() { 0 } else { idle + 1 };
        }
        self.steps.pop_front()
    }

    /// Goes through the present instant and on to the next. False: nothing happened, and nothing will.
    fn advance(&mut self) -> bool {
        let mut moved = false;
        for rank in 0..self.ranks.len() {
            if self.ranks[rank].at <= self.now {
                moved |= self.hand_over(rank);
            }
        }
        let exchange = self.complete(&mut moved);
        if !exchange.is_empty() {
            self.steps.push_back(Step::Exchange(exchange));
        }
        for rank in 0..self.ranks.len() {
            if self.ranks[rank].at <= self.now {
                moved |= self.compute(rank);
            }
        }
        let later = self.ranks.iter().map(|r| r.at).filter(|&at| at > self.now).min();
        self.now = later.unwrap_or(self.now);
        moved || later.is_some()
    }

    /// The instruction that a rank comes to, with its absolute micro-batch (update).
    fn instruction(&self, rank: usize) -> Option<(Op, StageId, u64)> {
        let (stream, at) = (&self.streams[rank], &self.ranks[rank]);
        let list = if at.repetition.is_some() { &stream.period } else { &stream.prologue };
        let i = list.get(at.index)?;
        let step = u64::from(stream.step(i.op));
        Some((i.op, i.stage, u64::from(i.mb) + at.repetition.unwrap_or(0) * step))
    }

    /// Passes an instruction.
    fn pass(&mut self, rank: usize, (op, stage, at): (Op, StageId, u64)) {
        self.ranks[rank].index += 1;
        if rank == self.own {
            self.steps.push_back(Step::Instruction(op, stage, at));
        }
    }

    /// Begins the next repetition at the end of one. False: the rank has no instructions.
    fn wrap(&mut self, rank: usize) -> bool {
        let done = self.ranks[rank].repetition.map_or(0, |n| n + 1);
        if self.streams[rank].period.is_empty() {
            return false;
        }
        self.ranks[rank].repetition = Some(done);
        self.ranks[rank].index = 0;
        if rank == self.own {
            self.steps.push_back(Step::Repetition(done));
        }
        true
    }

    /// Passes a rank's transfers up to its next computation: their slots wait for the other end.
    fn hand_over(&mut self, rank: usize) -> bool {
        let mut moved = false;
        loop {
            let Some((op, stage, mb)) = self.instruction(rank) else {
                if !self.wrap(rank) {
                    return moved;
                }
                continue;
            };
            let Some(ring) = Ring::of(op) else { return moved };
            let channel = self.channel(stage, ring);
            let (count, waiting) = if ring.sends() {
                (&mut channel.offered, &mut channel.offers)
            } else {
                (&mut channel.posted, &mut channel.posts)
            };
            *count += 1;
            waiting.push_back(mb);
            let ticket = *count;
            let slots = &mut self.tickets[stage.index()][ring as usize];
            let slot = mb as usize % slots.len().max(1);
            slots[slot] = ticket;
            self.pass(rank, (op, stage, mb));
            moved = true;
        }
    }

    /// Completes every transfer whose ends are both there; gives those of the wanted rank.
    fn complete(&mut self, moved: &mut bool) -> Vec<Side> {
        let mut own = Vec::new();
        let last = self.program.rank_of_stage.len() - 1;
        let borders = borders(&mut self.forward, &mut self.backward).chain(exchanges(&mut self.exchange, last));
        for (border, channel, rings) in borders {
            while let (Some(&offer), Some(&post)) = (channel.offers.front(), channel.posts.front()) {
                channel.offers.pop_front();
                channel.posts.pop_front();
                channel.done += 1;
                *moved = true;
                for (stage, ring, mb) in [(border + rings.0, rings.1, offer), (border + rings.2, rings.3, post)] {
                    if self.program.rank_of_stage[stage].index() == self.own {
                        own.push(Side { stage: StageId(stage as u32), ring, mb });
                    }
                }
            }
        }
        own
    }

    /// Starts a rank's next computation, if what it waits for has happened.
    fn compute(&mut self, rank: usize) -> bool {
        let Some((op, stage, mb)) = self.instruction(rank) else { return false };
        if Ring::of(op).is_some() {
            return false;
        }
        let rings: &[Ring] = match op {
            Op::F => &[Ring::RecvF, Ring::SendF],
            Op::B(_) | Op::I => &[Ring::RecvB, Ring::SendB],
            Op::U => &[Ring::RecvG, Ring::SendG],
            _ => &[],
        };
        if !rings.iter().all(|&ring| self.is_done(stage, ring, mb)) {
            return false;
        }
        self.ranks[rank].at = self.now + duration(op);
        self.pass(rank, (op, stage, mb));
        true
    }

    /// Whether the last transfer of a slot is done.
    fn is_done(&mut self, stage: StageId, ring: Ring, mb: u64) -> bool {
        let slots = &self.tickets[stage.index()][ring as usize];
        let Some(&ticket) = slots.get(mb as usize % slots.len().max(1)) else { return true };
        ticket == 0 || self.channel(stage, ring).done >= ticket
    }

    fn channel(&mut self, stage: StageId, ring: Ring) -> &mut Channel {
        let s = stage.index();
        match ring {
            Ring::RecvF => &mut self.forward[s - 1],
            Ring::SendF => &mut self.forward[s],
            Ring::RecvB => &mut self.backward[s],
            Ring::SendB => &mut self.backward[s - 1],
            Ring::SendG => &mut self.exchange[usize::from(s > 0)],
            Ring::RecvG => &mut self.exchange[usize::from(s == 0)],
        }
    }
}

/// A channel's ends: where the sender is beside the border, its ring, and the same of the receiver.
type Ends = (usize, Ring, usize, Ring);

fn borders<'c>(
    forward: &'c mut [Channel],
    backward: &'c mut [Channel],
) -> impl Iterator<Item = (usize, &'c mut Channel, Ends)> {
    let down = forward.iter_mut().enumerate().map(|(b, c)| (b, c, (0, Ring::SendF, 1, Ring::RecvF)));
    let up = backward.iter_mut().enumerate().map(|(b, c)| (b, c, (1, Ring::SendB, 0, Ring::RecvB)));
    down.chain(up)
}

/// The channels of a tied table, whose ends are counted from the first stage.
fn exchanges(channels: &mut [Channel], last: usize) -> impl Iterator<Item = (usize, &mut Channel, Ends)> {
    let ends = [(0, Ring::SendG, last, Ring::RecvG), (last, Ring::SendG, 0, Ring::RecvG)];
    channels.iter_mut().zip(ends).map(|(channel, ends)| (0, channel, ends))
}
