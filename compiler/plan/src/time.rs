//! Instructions in time, under a cost model.
//!
//! # Meaning
//!
//! A rank performs its instructions one after another; `F`, `B`, `I`, `W` and `U` take their stage's costs, the others
//! no time. A transfer is made when both its sides are there; its content arrives one hop later, and the send slot is
//! free from then on. So a receive that is posted in time costs the latency of one hop, as in the formulas of the
//! field.
//!
//! Times are integers in nanoseconds.

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
}

impl Costs {
    /// Equal stages.
    pub fn uniform(stages: usize, f_ns: u64, i_ns: u64, w_ns: u64, hop_ns: u64) -> Self {
        Costs { stages: vec![StageCosts { f_ns, i_ns, w_ns, u_ns: 0 }; stages], hop_ns }
    }

    /// F, I and W of one unit each.
    pub fn unit(stages: usize) -> Self {
        Costs::uniform(stages, 1, 1, 1, 0)
    }

    /// The costs that a spec gives; each list has one entry (for all stages) or one a stage.
    pub fn of_spec(costs: &dsl::spec::Costs, stages: usize) -> Self {
        let of = |list: &[u64], s: usize| list.get(s).or(list.last()).copied().unwrap_or(0);
        let stage =
            |s| StageCosts { f_ns: of(&costs.f_ns, s), i_ns: of(&costs.i_ns, s), w_ns: of(&costs.w_ns, s), u_ns: 0 };
        Costs { stages: (0..stages).map(stage).collect(), hop_ns: costs.hop_ns }
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
            Op::SendF | Op::RecvF | Op::SendB | Op::RecvB => 0,
        }
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

/// When both sides of a channel's transfers were there, by micro-batch.
#[derive(Clone, Debug, Default)]
struct Link {
    offers_ns: Vec<u64>,
    posts_ns: Vec<u64>,
}

impl Link {
    fn made_ns(&self, mb: u64) -> u64 {
        let at = |times: &[u64]| times.get(mb as usize).copied().unwrap_or_default();
        at(&self.offers_ns).max(at(&self.posts_ns))
    }
}

fn set(times_ns: &mut Vec<u64>, mb: u64, ns: u64) {
    let at = mb as usize;
    if times_ns.len() <= at {
        times_ns.resize(at + 1, 0);
    }
    times_ns[at] = ns;
}

/// Gives the events of an execution, in its order, their times.
struct Clock<'a> {
    program: &'a Program,
    costs: &'a Costs,
    free_ns: Vec<u64>,
    links: Vec<[Link; 2]>,
}

impl<'a> Clock<'a> {
    fn new(program: &'a Program, costs: &'a Costs) -> Self {
        let links = vec![Default::default(); program.rank_of_stage.len().saturating_sub(1)];
        Clock { program, costs, free_ns: vec![0; program.streams.len()], links }
    }

    /// Start and end of the event.
    fn time(&mut self, event: &Event) -> (u64, u64) {
        let (rank, s) = (event.rank.index(), event.stage.index());
        let free = self.free_ns[rank];
        match event.op {
            Op::SendF => set(&mut self.links[s][0].offers_ns, event.mb, free),
            Op::RecvF => set(&mut self.links[s - 1][0].posts_ns, event.mb, free),
            Op::SendB => set(&mut self.links[s - 1][1].offers_ns, event.mb, free),
            Op::RecvB => set(&mut self.links[s][1].posts_ns, event.mb, free),
            _ => {}
        }
        let start = self.ready_ns(event).max(free);
        let end = start.saturating_add(self.costs.of(event.op, event.stage));
        self.free_ns[rank] = end;
        (start, end)
    }

    /// When what the event waits for is there.
    fn ready_ns(&self, event: &Event) -> u64 {
        let s = event.stage.index();
        let rings = &self.program.rings[s];
        let (before, after) = (self.program.border_before(s), self.program.border_after(s));
        let (input, output, slots) = match event.op {
            Op::F => (before.map(|c| (c, 0)), after.map(|c| (c, 0)), rings.send_f),
            Op::B(_) | Op::I => (after.map(|c| (c, 1)), before.map(|c| (c, 1)), rings.send_b),
            _ => return 0,
        };
        let arrived = input.map(|(c, direction): (usize, usize)| {
            self.links[c][direction].made_ns(event.mb).saturating_add(self.costs.hop_ns)
        });
        let holder = event.mb.checked_sub(u64::from(slots));
        let taken =
            output.zip(holder).map(|((c, direction), mb): ((usize, usize), u64)| self.links[c][direction].made_ns(mb));
        arrived.max(taken).unwrap_or(0)
    }
}

/// The compute instructions of one segment of `updates` updates, in an order that respects all waits.
pub fn run(program: &Program, costs: &Costs, updates: u64) -> Vec<Timed> {
    watch(program, costs, updates, false)
}

/// [`run`] with the transfers' sends and receives, which take no time.
pub(crate) fn run_all(program: &Program, costs: &Costs, updates: u64) -> Vec<Timed> {
    watch(program, costs, updates, true)
}

fn watch(program: &Program, costs: &Costs, updates: u64, transfers: bool) -> Vec<Timed> {
    let mut watch = Watch { clock: Clock::new(program, costs), transfers, timed: Vec::new() };
    let repetition = u64::from(program.streams.first().map_or(1, |s| s.updates).max(1));
    let last = updates.div_ceil(repetition);
    let places = Places::new(program).expect("only sound programs are timed");
    Execution::new(program, &places, Extent::Updates(updates)).run(last, |event| watch.see(event));
    watch.timed
}

/// Most instructions that are run to show a deadlock.
const STUCK_STEPS_MAX: u64 = 1 << 22;

/// The compute instructions that a program performs until ranks wait for each other; empty when they never do.
pub(crate) fn run_stuck(program: &Program, costs: &Costs) -> Vec<Timed> {
    let mut watch = Watch { clock: Clock::new(program, costs), transfers: false, timed: Vec::new() };
    let places = Places::new(program).expect("what is stuck is covered");
    let mut execution = Execution::new(program, &places, Extent::Unbounded);
    for last in 0.. {
        execution.run(last, |event| watch.see(event));
        if cycle(&execution.waiting(last)).is_some() {
            return watch.timed;
        }
        if execution.steps() > STUCK_STEPS_MAX {
            return Vec::new();
        }
    }
    unreachable!("the loop above returns")
}

/// Notes the compute instructions, and on request the transfers.
struct Watch<'a> {
    clock: Clock<'a>,
    transfers: bool,
    timed: Vec<Timed>,
}

impl Watch<'_> {
    fn see(&mut self, event: Event) {
        let (start_ns, end_ns) = self.clock.time(&event);
        if self.transfers || !matches!(event.op, Op::SendF | Op::RecvF | Op::SendB | Op::RecvB) {
            let Event { rank, stage, op, mb, section, .. } = event;
            self.timed.push(Timed { rank, stage, op, mb, section, start_ns, end_ns });
        }
    }
}
