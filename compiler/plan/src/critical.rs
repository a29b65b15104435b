//! The critical path of a run: the chain of instructions that decides how long it takes.
//!
//! # Meaning
//!
//! An instruction starts when the last of what it waits for is there ([`crate::time`]): the end of the instruction before
//! it on its rank, its input one hop after the transfer was made, or its send slot, which is free once the transfer that
//! held it was made. From the instruction that ends last, the path goes back through whichever of these decided each
//! start. An update waits so for the gradients that it exchanges. Where several did, the rank's own order is taken before a transfer, and the sender before the receiver.
//!
//! # Invariant
//!
//! A step starts when the step before it ends, plus one hop (the time of an exchange, for an update) where it waits for its input; the first step starts at zero.
//! So the times and hops of the path sum to the run's length, and a path's instruction or hop that takes longer makes the
//! run at least as much longer.

use crate::time::{Costs, Timed, run_all};
use artifact::ids::StageId;
use artifact::stream::{Op, Program};
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

/// Two sides of a transfer, as (stage, kind): who sends and who receives.
type Sides = [(u32, Kind); 2];

/// The walk back through a run; every cause stands before its effect in the list.
struct Walk<'a> {
    program: &'a Program,
    costs: &'a Costs,
    all: &'a [Timed],
    /// By instruction: the one before it on its rank.
    before: Vec<Option<usize>>,
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
        Walk { program, costs, all, before, at }
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
        let (input, output, slots) = self.transfers(event);
        if let Some((send, receive)) = input.and_then(|sides| self.sides(sides, event.mb)) {
            let (sent, posted) = (self.all[send].start_ns, self.all[receive].start_ns);
            let latency_ns = if event.op == Op::U { self.costs.exchange_ns } else { self.costs.hop_ns };
            if sent.max(posted).saturating_add(latency_ns) == event.start_ns {
                return if sent >= posted { (Wait::Input, Some(send)) } else { (Wait::Post, Some(receive)) };
            }
        }
        let holder = output.zip(event.mb.checked_sub(slots)).and_then(|(sides, mb)| self.sides(sides, mb));
        let (send, receive) = holder.expect("a start has a cause: the rank, its input or its send slot");
        let later = if self.all[send].start_ns > self.all[receive].start_ns { send } else { receive };
        (Wait::Slot, Some(later))
    }

    /// The transfer that brings the instruction's input, the one that takes its output, and the slots of the latter.
    fn transfers(&self, event: &Timed) -> (Option<Sides>, Option<Sides>, u64) {
        let s = event.stage.0;
        let rings = &self.program.rings[event.stage.index()];
        let (before, after) = (self.program.border_before(s as usize), self.program.border_after(s as usize));
        let (before, after) = (before.is_some(), after.is_some());
        let forward = |from: u32| [(from, Kind::SendF), (from + 1, Kind::RecvF)];
        let backward = |from: u32| [(from, Kind::SendB), (from - 1, Kind::RecvB)];
        match Kind::of(event.op) {
            Kind::F => (before.then(|| forward(s - 1)), after.then(|| forward(s)), rings.send_f.into()),
            Kind::B | Kind::I => (after.then(|| backward(s + 1)), before.then(|| backward(s)), rings.send_b.into()),
            Kind::U => {
                let exchange = |from: u32, to: u32| [(from, Kind::SendG), (to, Kind::RecvG)];
                let partner = self.program.partner(s as usize).map(|other| other as u32);
                (partner.map(|other| exchange(other, s)), partner.map(|other| exchange(s, other)), 0)
            }
            _ => (None, None, 0),
        }
    }

    /// Where both sides of a micro-batch's transfer stand.
    fn sides(&self, sides: Sides, mb: u64) -> Option<(usize, usize)> {
        let [send, receive] = sides.map(|(stage, kind)| self.at.get(&(StageId(stage), kind, mb)).copied());
        send.zip(receive)
    }
}
