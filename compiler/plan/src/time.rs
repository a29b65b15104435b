//! Instructions in time, under a cost model.
//!
//! # Meaning
//!
//! A rank performs its instructions one after another; `F`, `B`, `I`, `W` and `U` take their stage's costs, the others no time.
//! A transfer is made when both its sides are there; its content arrives one hop later, and the send slot is free from then on. So
//! a receive that is posted in time costs the latency of one hop, as in the formulas of the field.
//!
//! Times are integers in nanoseconds. The steady state is found exactly: every time is the largest of some earlier times plus
//! costs, so once the times of a window of repetitions, as long as any wait reaches back, are those of an earlier window plus a
//! constant, they are so for ever.

use artifact::ids::{RankId, StageId};
use artifact::stream::{Op, Program};
use artifact::verify::execute::{Event, Execution, Extent, cycle};

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

/// When one side of a transfer was there, and in which section.
#[derive(Clone, Copy, Debug, Default)]
struct Mark {
    ns: u64,
    section: u64,
}

/// Both sides of a channel's transfers, by micro-batch.
#[derive(Clone, Debug, Default)]
struct Link {
    offers: Vec<Mark>,
    posts: Vec<Mark>,
}

impl Link {
    fn made(&self, mb: u64) -> Mark {
        let at = |marks: &[Mark]| marks.get(mb as usize).copied().unwrap_or_default();
        let (offer, post) = (at(&self.offers), at(&self.posts));
        Mark { ns: offer.ns.max(post.ns), section: offer.section.min(post.section) }
    }
}

fn set(marks: &mut Vec<Mark>, mb: u64, mark: Mark) {
    let at = mb as usize;
    if marks.len() <= at {
        marks.resize(at + 1, Mark::default());
    }
    marks[at] = mark;
}

/// Gives the events of an execution, in its order, their times.
struct Clock<'a> {
    program: &'a Program,
    costs: &'a Costs,
    free_ns: Vec<u64>,
    links: Vec<[Link; 2]>,
    /// How many sections the waits reached back at most.
    reach: u64,
}

impl<'a> Clock<'a> {
    fn new(program: &'a Program, costs: &'a Costs) -> Self {
        let links = vec![Default::default(); program.rank_of_stage.len().saturating_sub(1)];
        Clock { program, costs, free_ns: vec![0; program.streams.len()], links, reach: 1 }
    }

    /// Start and end of the event.
    fn time(&mut self, event: &Event) -> (u64, u64) {
        let (rank, s) = (event.rank.index(), event.stage.index());
        let mark = Mark { ns: self.free_ns[rank], section: event.section };
        match event.op {
            Op::SendF => set(&mut self.links[s][0].offers, event.mb, mark),
            Op::RecvF => set(&mut self.links[s - 1][0].posts, event.mb, mark),
            Op::SendB => set(&mut self.links[s - 1][1].offers, event.mb, mark),
            Op::RecvB => set(&mut self.links[s][1].posts, event.mb, mark),
            _ => {}
        }
        let start = self.ready_ns(event).max(mark.ns);
        let end = start.saturating_add(self.costs.of(event.op, event.stage));
        self.free_ns[rank] = end;
        (start, end)
    }

    /// When what the event waits for is there.
    fn ready_ns(&mut self, event: &Event) -> u64 {
        let s = event.stage.index();
        let rings = &self.program.rings[s];
        let (before, after) = (s.checked_sub(1), (s < self.links.len()).then_some(s));
        let (input, output, slots) = match event.op {
            Op::F => (before.map(|c| (c, 0)), after.map(|c| (c, 0)), rings.send_f),
            Op::B(_) | Op::I => (after.map(|c| (c, 1)), before.map(|c| (c, 1)), rings.send_b),
            _ => return 0,
        };
        let mut ready = 0;
        if let Some((c, direction)) = input {
            let made = self.links[c][direction].made(event.mb);
            ready = made.ns.saturating_add(self.costs.hop_ns);
            self.reach = self.reach.max(event.section.saturating_sub(made.section));
        }
        if let (Some((c, direction)), Some(holder)) = (output, event.mb.checked_sub(u64::from(slots))) {
            let made = self.links[c][direction].made(holder);
            ready = ready.max(made.ns);
            self.reach = self.reach.max(event.section.saturating_sub(made.section));
        }
        ready
    }
}

/// The compute instructions of one segment of `updates` updates, in an order that respects all waits.
pub fn run(program: &Program, costs: &Costs, updates: u64) -> Vec<Timed> {
    let mut watch = Watch { clock: Clock::new(program, costs), timed: Vec::new() };
    let repetition = u64::from(program.streams.first().map_or(1, |s| s.updates).max(1));
    let last = updates.div_ceil(repetition);
    Execution::new(program, Extent::Updates(updates)).run(last, |event| watch.see(event));
    watch.timed
}

/// The compute instructions that a program performs until ranks wait for each other; empty when they never do.
pub(crate) fn run_stuck(program: &Program, costs: &Costs) -> Vec<Timed> {
    let mut watch = Watch { clock: Clock::new(program, costs), timed: Vec::new() };
    let mut execution = Execution::new(program, Extent::Unbounded);
    for last in 0.. {
        execution.run(last, |event| watch.see(event));
        if cycle(&execution.waiting(last)).is_some() {
            return watch.timed;
        }
        if execution.steps() > STEPS_MAX || last > STEPS_MAX {
            return Vec::new();
        }
    }
    unreachable!("the loop above returns")
}

/// Notes the compute instructions.
struct Watch<'a> {
    clock: Clock<'a>,
    timed: Vec<Timed>,
}

impl Watch<'_> {
    fn see(&mut self, event: Event) {
        let (start_ns, end_ns) = self.clock.time(&event);
        if !matches!(event.op, Op::SendF | Op::RecvF | Op::SendB | Op::RecvB) {
            let Event { rank, stage, op, mb, section, .. } = event;
            self.timed.push(Timed { rank, stage, op, mb, section, start_ns, end_ns });
        }
    }
}

/// The steady state of a run without end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Steady {
    /// Time of `repetitions` repetitions.
    pub total_ns: u64,
    pub repetitions: u64,
    /// Whether the times were shown to repeat; else they are a mean over the last half of a long run.
    pub exact: bool,
    /// By rank: work in one repetition.
    pub busy_ns: Vec<u64>,
}

impl Steady {
    /// Time of one repetition, rounded up.
    pub fn period_ns(&self) -> u64 {
        self.total_ns.div_ceil(self.repetitions)
    }

    /// 1 - work/period of a rank.
    pub fn bubble(&self, rank: usize) -> f64 {
        let work = self.busy_ns[rank] as f64 * self.repetitions as f64;
        if self.total_ns == 0 { 0.0 } else { 1.0 - work / self.total_ns as f64 }
    }
}

/// Most instructions that are run to find the steady state.
const STEPS_MAX: u64 = 1 << 22;
/// Most repetitions after which times are looked for that repeat.
const CYCLE_MAX: usize = 16;

/// Finds the steady state. See the module's text.
pub fn steady(program: &Program, costs: &Costs) -> Steady {
    let busy_ns = busy(program, costs);
    let mut execution = Execution::new(program, Extent::Unbounded);
    let mut clock = Clock::new(program, costs);
    let lengths: Vec<usize> = program.streams.iter().map(|s| s.period.len()).collect();
    let mut ends: Vec<Vec<u64>> = vec![Vec::new(); lengths.len()];
    for last in 0.. {
        let before = execution.steps();
        execution.run(last, |event| {
            let (_, end) = clock.time(&event);
            if event.section > 0 {
                ends[event.rank.index()].push(end);
            }
        });
        let done = ends.iter().zip(&lengths).map(|(ends, length)| ends.len() / length.max(&1)).min().unwrap_or(0);
        let record = Record { ends: &ends, lengths: &lengths, done };
        for cycle in 1..=CYCLE_MAX {
            if let Some(total_ns) = record.repeats(cycle, clock.reach as usize) {
                return Steady { total_ns, repetitions: cycle as u64, exact: true, busy_ns };
            }
        }
        // Ranks that wait for each other make no steps.
        let stuck = execution.steps() == before && last > 0;
        if stuck || execution.steps() > STEPS_MAX && done >= 2 || execution.steps() > 2 * STEPS_MAX {
            let half = (done / 2).max(1);
            let total_ns = record.end(0, done).saturating_sub(record.end(0, done - half.min(done)));
            return Steady { total_ns, repetitions: half as u64, exact: false, busy_ns };
        }
    }
    unreachable!("the loop above returns")
}

fn busy(program: &Program, costs: &Costs) -> Vec<u64> {
    let of =
        |s: &artifact::stream::Stream| s.period.iter().fold(0u64, |sum, i| sum.saturating_add(costs.of(i.op, i.stage)));
    program.streams.iter().map(of).collect()
}

/// End times by rank, repetition and position.
struct Record<'a> {
    ends: &'a [Vec<u64>],
    lengths: &'a [usize],
    /// Repetitions that all ranks have ended.
    done: usize,
}

impl Record<'_> {
    /// When `rank` ends repetition `n`, counted from 1.
    fn end(&self, rank: usize, n: usize) -> u64 {
        (n * self.lengths[rank]).checked_sub(1).map_or(0, |at| self.ends[rank][at])
    }

    /// The constant by which the last `reach + 1` repetitions are later than those `cycle` before.
    fn repeats(&self, cycle: usize, reach: usize) -> Option<u64> {
        let window = reach + 1;
        let from = self.done.checked_sub(window + cycle)?;
        let later = self.end(0, self.done) - self.end(0, self.done - cycle);
        let quick = (0..self.lengths.len()).all(|r| self.end(r, self.done) - self.end(r, self.done - cycle) == later);
        if !quick {
            return None;
        }
        let whole = self.ends.iter().zip(self.lengths).all(|(ends, length)| {
            let (first, second) = (from * length, (from + cycle) * length);
            let count = window * length;
            (0..count).all(|n| ends[second + n] - ends[first + n] == later)
        });
        whole.then_some(later)
    }
}
