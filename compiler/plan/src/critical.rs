//! The critical path of a run: the chain of instructions that decides how long it takes.
//!
//! # Meaning
//!
//! An instruction starts when the last of what it waits for is there ([`crate::time`]): the end of the instruction before
//! it on its rank, its input one hop after the transfer was made, or its send slot, which is free once the transfer that
//! held it was made. From the instruction that ends last, the path goes back through whichever of these decided each
//! start. Where several did, the rank's own order is taken before a transfer, and the sender before the receiver.
//!
//! # Invariant
//!
//! A step starts when the step before it ends, plus one hop (the time of an exchange, for a tied table's gradient) where it waits for its input; the first step starts at zero.
//! So the times and hops of the path sum to the run's length, and a path's instruction or hop that takes longer makes the
//! run at least as much longer.

use crate::time::{Costs, Timed, run_all};
use artifact::channel::{self, Channel, Waits, channels};
use artifact::ids::StageId;
use artifact::stream::Program;
use artifact::verify::index::Kind;
use std::collections::HashMap;

/// What decided the start of an instruction of the path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Nothing: the path begins here.
    Nothing,
    /// The instruction before it on its rank.
    Rank,
    /// Its input, sent by the neighbour when the step before had computed it; arrives one hop later.
    Input,
    /// Its input, which waited for this rank to post the receive, after the step before; arrives one hop later.
    Post,
    /// Its send slot, which was held until the neighbour posted the receive, after the step before.
    Slot,
}

impl Wait {
    /// Whether the wait includes the latency of a transfer.
    pub fn hop(self) -> bool {
        matches!(self, Wait::Input | Wait::Post)
    }
}

/// An instruction of the path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Index into [`Trace::events`].
    pub event: usize,
    pub wait: Wait,
}

/// A run in time with its critical path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// The compute instructions, as [`crate::time::run`] gives them.
    pub events: Vec<Timed>,
    /// In the order of time.
    pub path: Vec<Step>,
}

/// Runs one segment of `updates` updates and finds its critical path. Work is linear in the number of instructions.
pub fn trace(program: &Program, costs: &Costs, updates: u64) -> Trace {
    let all = run_all(program, costs, updates);
    let path = Walk::new(program, costs, &all).path();
    // The places of compute instructions once the transfers are left out.
    let mut places = Vec::with_capacity(all.len());
    let mut events = Vec::new();
    for event in all {
        places.push(events.len());
        if !event.transfers() {
            events.push(event);
        }
    }
    Trace { events, path: path.into_iter().map(|s| Step { event: places[s.event], ..s }).collect() }
}

/// The walk back through a run; every cause stands before its effect in the list.
struct Walk<'a> {
    costs: &'a Costs,
    all: &'a [Timed],
    /// By instruction: the one before it on its rank.
    before: Vec<Option<usize>>,
    channels: Vec<Channel>,
    /// By stage.
    waits: Vec<Waits>,
    at: HashMap<(StageId, Kind, u64), usize>,
}

impl<'a> Walk<'a> {
    fn new(program: &'a Program, costs: &'a Costs, all: &'a [Timed]) -> Self {
        let mut last = vec![None; program.streams.len()];
        let mut at = HashMap::with_capacity(all.len());
        let mut before = Vec::with_capacity(all.len());
        for (i, event) in all.iter().enumerate() {
            before.push(last[event.rank.index()].replace(i));
            at.insert((event.stage, Kind::of(event.op), event.mb), i);
        }
        Walk { costs, all, before, channels: channels(program), waits: Waits::of(program), at }
    }

    /// Compute instructions only, in the order of time.
    fn path(&self) -> Vec<Step> {
        let mut path: Vec<Step> = Vec::new();
        let end_ns = self.all.iter().map(|e| e.end_ns).max().unwrap_or(0);
        let mut next = self.all.iter().position(|e| e.end_ns == end_ns && !e.transfers());
        while let Some(i) = next {
            let (wait, cause) = self.cause(i);
            // A transfer takes no time: what the path meets is the instruction before it.
            next = cause;
            while let Some(t) = next.filter(|t| self.all[*t].transfers()) {
                next = self.before[t];
            }
            let begins = next.is_none() && wait == Wait::Rank;
            path.push(Step { event: i, wait: if begins { Wait::Nothing } else { wait } });
        }
        path.reverse();
        path
    }

    fn cause(&self, i: usize) -> (Wait, Option<usize>) {
        let event = &self.all[i];
        let before = self.before[i];
        if event.start_ns == 0 && before.is_none() {
            return (Wait::Nothing, None);
        }
        if before.is_some_and(|b| self.all[b].end_ns == event.start_ns) {
            return (Wait::Rank, before);
        }
        let waits = self.waits[event.stage.index()].before(event.op);
        let decides = |wait: &channel::Wait| {
            let channel = self.channels[wait.channel()];
            let (send, receive) = self.sides(&channel, wait.of(event.mb)?)?;
            let (sent, posted) = (self.all[send].start_ns, self.all[receive].start_ns);
            let latency_ns = if wait.arrives { self.costs.latency_ns(channel.freight) } else { 0 };
            let decided = sent.max(posted).saturating_add(latency_ns) == event.start_ns;
            decided.then_some(match (wait.arrives, sent >= posted) {
                (true, true) => (Wait::Input, Some(send)),
                (true, false) => (Wait::Post, Some(receive)),
                (false, _) => (Wait::Slot, Some(if sent > posted { send } else { receive })),
            })
        };
        waits.iter().find_map(decides).expect("a start has a cause: the rank, an arrival or what has to be taken")
    }

    /// Where both sides of a micro-batch's transfer stand.
    fn sides(&self, channel: &Channel, mb: u64) -> Option<(usize, usize)> {
        let at = |stage: usize, op| self.at.get(&(StageId(stage as u32), Kind::of(op), mb)).copied();
        at(channel.from, channel.freight.send()).zip(at(channel.to, channel.freight.receive()))
    }
}
