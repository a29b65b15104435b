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
use artifact::channel::{Channel, Wait, Waits, channels, performs, side};
use artifact::ids::StageId;
use artifact::stream::{Op, Program, RingSizes, Stream};
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

/// A channel: both ends' micro-batches that wait for the other end, in order.
#[derive(Clone, Debug, Default)]
struct Queue {
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
    /// By their numbers: see [`artifact::channel`].
    channels: Vec<(Channel, Queue)>,
    /// By stage.
    waits: Vec<Waits>,
    /// By stage and ring, for each slot the number of transfers of its channel after which it is done.
    tickets: Vec<[Vec<u64>; Ring::ALL.len()]>,
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
        let tickets = program.rings.iter().enumerate().map(|(s, rings)| {
            Ring::ALL.map(|ring| vec![0; if performs(program, ring.op(), s) { slots(rings, ring) as usize } else { 0 }])
        });
        let channels = channels(program).into_iter().map(|channel| (channel, Queue::default()));
        Order {
            program,
            streams,
            own,
            now: 0,
            ranks: vec![Replayed::default(); streams.len()],
            channels: channels.collect(),
            waits: Waits::of(program),
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
            let (channel, sends) = side(self.program, op, stage.index()).expect("a ring is one of a channel");
            let channel = &mut self.channels[channel].1;
            let (count, waiting) = if sends {
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
        for (channel, queue) in &mut self.channels {
            while let (Some(&offer), Some(&post)) = (queue.offers.front(), queue.posts.front()) {
                queue.offers.pop_front();
                queue.posts.pop_front();
                queue.done += 1;
                *moved = true;
                let ends =
                    [(channel.from, channel.freight.send(), offer), (channel.to, channel.freight.receive(), post)];
                for (stage, op, mb) in ends {
                    if self.program.rank_of_stage[stage].index() == self.own {
                        let ring = Ring::of(op).expect("a transfer is one of a ring");
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
        if !self.waits[stage.index()].before(op).iter().all(|wait| self.is_done(wait, stage, mb)) {
            return false;
        }
        self.ranks[rank].at = self.now + duration(op);
        self.pass(rank, (op, stage, mb));
        true
    }

    /// Whether the last transfer of the slot of a wait is done.
    fn is_done(&self, wait: &Wait, stage: StageId, mb: u64) -> bool {
        let (channel, queue) = &self.channels[wait.channel()];
        let op = if wait.arrives { channel.freight.receive() } else { channel.freight.send() };
        let ring = Ring::of(op).expect("a transfer is one of a ring");
        let slots = &self.tickets[stage.index()][ring as usize];
        let ticket = slots[mb as usize % slots.len()];
        ticket == 0 || queue.done >= ticket
    }
}

/// Slots of a ring; what is exchanged once an update has one.
fn slots(rings: &RingSizes, ring: Ring) -> u32 {
    match ring {
        Ring::RecvF => rings.recv_f,
        Ring::SendF => rings.send_f,
        Ring::RecvB => rings.recv_b,
        Ring::SendB => rings.send_b,
        _ => 1,
    }
}
