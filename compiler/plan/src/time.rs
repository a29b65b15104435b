//! Instructions in time, under a cost model.
//!
//! # Meaning
//!
//! A rank performs its instructions one after another; `F`, `B`, `I`, `W` and `U` take their stage's costs, the others
//! no time. A transfer is made when both its sides are there; its content arrives one hop later, and the send slot is
//! free from then on. What is exchanged once an update is a transfer too: norms take a hop,
//! a tied table's gradient has a latency of its own. `N` and `T` take no time. So a receive that is posted in time costs the latency of one hop, as in the formulas of the
//! field.
//!
//! Times are integers in nanoseconds.

use artifact::channel::{Channel, Freight, Wait, Waits, channels, first_by_update, side};
use artifact::ids::{RankId, StageId};
use artifact::stream::{Op, Program};
use artifact::verify::execute::{Event, Execution, Extent, cycle};
use artifact::verify::index::Places;

/// What one stage's instructions take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StageCosts {
    pub f_ns: u64,
    /// Input gradient; B takes `i_ns + w_ns`.
    pub i_ns: u64,
    /// Weight gradient.
    pub w_ns: u64,
    /// What an update takes beside the weight gradients that it is fused into.
    pub u_ns: u64,
}

/// A cost model: by stage, and between neighbouring ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Costs {
    pub stages: Vec<StageCosts>,
    /// Latency of a transfer.
    pub hop_ns: u64,
    /// Latency of a transfer of a tied table's gradient.
    pub exchange_ns: u64,
}

impl Costs {
    /// Equal stages. An exchange takes a hop.
    pub fn uniform(stages: usize, f_ns: u64, i_ns: u64, w_ns: u64, hop_ns: u64) -> Self {
        Costs { stages: vec![StageCosts { f_ns, i_ns, w_ns, u_ns: 0 }; stages], hop_ns, exchange_ns: hop_ns }
    }

    /// F, I and W of one unit each.
    pub fn unit(stages: usize) -> Self {
        Costs::uniform(stages, 1, 1, 1, 0)
    }

    /// The costs that a spec gives; each list has one entry (for all stages) or one a stage.
    pub fn of_spec(costs: &dsl::spec::Costs, stages: usize) -> Self {
        let of = |list: &[u64], s: usize| list.get(s).or(list.last()).copied().unwrap_or(0);
        let stage = |s| {
            let [f_ns, i_ns, w_ns, u_ns] = [&costs.f_ns, &costs.i_ns, &costs.w_ns, &costs.u_ns].map(|list| of(list, s));
            StageCosts { f_ns, i_ns, w_ns, u_ns }
        };
        Costs { stages: (0..stages).map(stage).collect(), hop_ns: costs.hop_ns, exchange_ns: costs.hop_ns }
    }

    /// Each stage cut into equal parts, so that there are `stages`, a multiple of what there are.
    pub fn shared_out(&self, stages: usize) -> Self {
        let parts = (stages / self.stages.len().max(1)).max(1) as u64;
        // Rounded so that the parts add up.
        let part = |ns: u64, j: u64| (ns * (j + 1) / parts - ns * j / parts).max(1);
        let cut = |s: &StageCosts| {
            let s = *s;
            (0..parts).map(move |j| StageCosts {
                f_ns: part(s.f_ns, j),
                i_ns: part(s.i_ns, j),
                w_ns: part(s.w_ns, j),
                u_ns: s.u_ns / parts,
            })
        };
        Costs { stages: self.stages.iter().flat_map(cut).collect(), ..*self }
    }

    /// What an instruction of `stage` takes.
    pub fn of(&self, op: Op, stage: StageId) -> u64 {
        let Some(costs) = self.stages.get(stage.index()) else { return 0 };
        match op {
            Op::F => costs.f_ns,
            Op::B(_) => costs.i_ns.saturating_add(costs.w_ns),
            Op::I => costs.i_ns,
            Op::W(_) => costs.w_ns,
            Op::U => costs.u_ns,
            // Squares take no time, as elementwise steps of updates take none.
            Op::N | Op::T => 0,
            Op::SendF | Op::RecvF | Op::SendB | Op::RecvB | Op::SendG | Op::RecvG => 0,
            Op::SendN | Op::RecvN | Op::SendT | Op::RecvT => 0,
        }
    }

    /// Latency of what a channel carries; norms take a hop.
    pub fn latency_ns(&self, freight: Freight) -> u64 {
        if freight == Freight::Table { self.exchange_ns } else { self.hop_ns }
    }
}

/// A compute instruction and when it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timed {
    pub rank: RankId,
    pub stage: StageId,
    pub op: Op,
    /// Absolute micro-batch; absolute update for `U`.
    pub mb: u64,
    /// 0 is the prologue; repetition `n` of the period is `n + 1`.
    pub section: u64,
    pub start_ns: u64,
    pub end_ns: u64,
}

impl Timed {
    pub(crate) fn new(event: &Event, start_ns: u64, end_ns: u64) -> Self {
        let Event { rank, stage, op, mb, section, .. } = *event;
        Timed { rank, stage, op, mb, section, start_ns, end_ns }
    }

    /// Whether it is a send or a receive.
    pub(crate) fn transfers(&self) -> bool {
        self.op.transfers()
    }
}

/// When both sides of a channel's transfers were there, by micro-batch (by update, where gradients are exchanged).
#[derive(Clone, Debug, Default)]
struct Link {
    offers: Times,
    posts: Times,
}

/// Times by place.
#[derive(Clone, Debug, Default)]
struct Times {
    /// One more than each time in nanoseconds; 0 where there is none.
    after_ns: Vec<u64>,
}

impl Times {
    fn set(&mut self, place: usize, ns: u64) {
        if self.after_ns.len() <= place {
            self.after_ns.resize((place + 1).next_multiple_of(256), 0);
        }
        self.after_ns[place] = ns.saturating_add(1);
    }

    fn after_ns(&self, place: usize) -> u64 {
        self.after_ns.get(place).copied().unwrap_or(0)
    }
}

/// One side of a transfer that an instruction waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Side {
    channel: usize,
    posts: bool,
    mb: u64,
}

/// Gives events their times, in an order that respects all waits. What began before the first event ended at zero.
pub(crate) struct Clock<'a> {
    costs: &'a Costs,
    /// By rank: the end of its last instruction.
    pub free_ns: Vec<u64>,
    /// By channel.
    links: Vec<Link>,
    channels: Vec<Channel>,
    /// The first channel of a transfer an update.
    first_by_update: usize,
    /// By stage.
    waits: Vec<Waits>,
    program: &'a Program,
    /// The first micro-batch and the first update that anything is asked of.
    first: (u64, u64),
}

impl<'a> Clock<'a> {
    pub fn new(program: &'a Program, costs: &'a Costs, first: (u64, u64)) -> Self {
        let channels = channels(program);
        let links = vec![Link::default(); channels.len()];
        let waits = Waits::of(program);
        let (free_ns, first_by_update) = (vec![0; program.streams.len()], first_by_update(program));
        Clock { costs, free_ns, links, channels, first_by_update, waits, program, first }
    }

    fn exchanges(&self, channel: usize) -> bool {
        channel >= self.first_by_update
    }

    fn latency_ns(&self, channel: usize) -> u64 {
        if self.exchanges(channel) { self.costs.latency_ns(self.channels[channel].freight) } else { self.costs.hop_ns }
    }

    fn place(&self, channel: usize, number: u64) -> usize {
        (number - if self.exchanges(channel) { self.first.1 } else { self.first.0 }) as usize
    }

    /// The same side so many repetitions later.
    pub fn later(&self, side: Side, repetitions: u64) -> Side {
        let stream = &self.program.streams[0];
        let step = if self.exchanges(side.channel) { stream.updates } else { stream.microbatches };
        Side { mb: side.mb + repetitions * u64::from(step), ..side }
    }

    /// Start and end of the event.
    pub fn time(&mut self, event: &Event) -> (u64, u64) {
        let (rank, s) = (event.rank.index(), event.stage.index());
        let free = self.free_ns[rank];
        if let Some((channel, sends)) = side(self.program, event.op, s) {
            return self.there(channel, !sends, self.place(channel, event.mb), free);
        }
        let there = |wait: &Wait| {
            let made_ns = self.made_ns((wait.channel(), wait.of(event.mb)?));
            Some(if wait.arrives { made_ns.saturating_add(self.latency_ns(wait.channel())) } else { made_ns })
        };
        let ready = self.waits[s].before(event.op).iter().filter_map(there).max().unwrap_or(0);
        let start = free.max(ready);
        let end = start.saturating_add(self.costs.of(event.op, event.stage));
        self.free_ns[rank] = end;
        (start, end)
    }

    /// One side of a transfer is there at `ns`.
    fn there(&mut self, channel: usize, posts: bool, place: usize, ns: u64) -> (u64, u64) {
        let link = &mut self.links[channel];
        if posts { &mut link.posts } else { &mut link.offers }.set(place, ns);
        (ns, ns)
    }

    /// The transfers that the event waits for, by channel and micro-batch (update).
    fn waits(&self, event: &Event) -> impl Iterator<Item = (usize, u64)> {
        let waits = self.waits[event.stage.index()].before(event.op);
        let mb = event.mb;
        waits.iter().filter_map(move |wait| Some((wait.channel(), wait.of(mb)?)))
    }

    fn made_ns(&self, (channel, mb): (usize, u64)) -> u64 {
        let (link, place) = (&self.links[channel], self.place(channel, mb));
        link.offers.after_ns(place).max(link.posts.after_ns(place)).saturating_sub(1)
    }

    /// The sides of transfers that the event waits for and that were there before the first event.
    pub fn carried(&self, event: &Event) -> impl Iterator<Item = Side> {
        let sides = self.waits(event).flat_map(|(channel, mb)| [false, true].map(|posts| Side { channel, posts, mb }));
        sides.filter(|side| self.side_ns(*side).is_none())
    }

    /// When the side was there; none if that was before the first event.
    pub fn side_ns(&self, side: Side) -> Option<u64> {
        let link = &self.links[side.channel];
        let times = if side.posts { &link.posts } else { &link.offers };
        times.after_ns(self.place(side.channel, side.mb)).checked_sub(1)
    }
}

/// The compute instructions of one segment of `updates` updates, in an order that respects all waits.
pub fn run(program: &Program, costs: &Costs, updates: u64) -> Vec<Timed> {
    let mut timed = Vec::new();
    watch(program, &places(program), costs, updates, |t| timed.extend((!t.transfers()).then_some(*t)));
    timed
}

/// [`run`] with the transfers' sends and receives, which take no time.
pub(crate) fn run_all(program: &Program, costs: &Costs, updates: u64) -> Vec<Timed> {
    let mut timed = Vec::new();
    watch(program, &places(program), costs, updates, |t| timed.push(*t));
    timed
}

fn places(program: &Program) -> Places {
    Places::new(program).expect("what is timed is covered: `verify` says so")
}

/// Shows the instructions of one segment of `updates` updates, in an order that respects all waits.
pub(crate) fn watch(program: &Program, places: &Places, costs: &Costs, updates: u64, mut see: impl FnMut(&Timed)) {
    let mut clock = Clock::new(program, costs, (0, 0));
    let repetition = u64::from(program.streams.first().map_or(1, |s| s.updates).max(1));
    let last = updates.div_ceil(repetition);
    Execution::new(program, places, Extent::Updates(updates)).run(last, |event| {
        let (start_ns, end_ns) = clock.time(event);
        see(&Timed::new(event, start_ns, end_ns));
    });
}

/// Most instructions that are run to show a deadlock.
const STUCK_STEPS_MAX: u64 = 1 << 22;

/// The compute instructions that a program performs until ranks wait for each other; empty when they never do.
pub(crate) fn run_stuck(program: &Program, costs: &Costs) -> Vec<Timed> {
    let (places, mut timed) = (places(program), Vec::new());
    let mut clock = Clock::new(program, costs, (0, 0));
    let mut execution = Execution::new(program, &places, Extent::Unbounded);
    for last in 0.. {
        execution.run(last, |event| {
            let (start_ns, end_ns) = clock.time(event);
            timed.push(Timed::new(event, start_ns, end_ns));
        });
        if cycle(&execution.waiting(last)).is_some() {
            timed.retain(|t| !t.transfers());
            return timed;
        }
        if execution.steps() > STUCK_STEPS_MAX {
            return Vec::new();
        }
    }
    unreachable!("the loop above returns")
}
