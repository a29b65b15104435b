//! Replays the instruction streams with measured kernel times, every rank as if it had a core of its own: the bubble on this
//! machine's kernels, also when ranks outnumber cores. Transfers take no time.

use crate::observe::StageTimes;
use artifact::ids::StageId;
use artifact::stream::{Accumulation, Op, Program};

/// By rank: 1 - work/period in steady state, 0..1. The period is what an update more costs, taken between two long runs.
pub fn bubbles(program: &Program, times: &[StageTimes]) -> Vec<f64> {
    // Long enough that the pipeline is full: each rank's warm-up is shorter than its stages' stash.
    let fill = program.rings.iter().map(|r| r.stash / program.accumulate + 1).sum::<u32>();
    let (short, long) = (u64::from(2 * fill), u64::from(4 * fill));
    let (a, b) = (replay(program, times, short), replay(program, times, long));
    let period = b.end_ns.saturating_sub(a.end_ns);
    let bubble = |(a, b): (&u64, &u64)| if period == 0 { 0.0 } else { 1.0 - (b - a) as f64 / period as f64 };
    a.work_ns.iter().zip(&b.work_ns).map(bubble).collect()
}

/// A finished replay.
struct Replay {
    work_ns: Vec<u64>,
    end_ns: u64,
}

/// Both sides of a border's transfers, by micro-batch: when each was ready.
#[derive(Clone, Default)]
struct Border {
    offered: Vec<Option<u64>>,
    posted: Vec<Option<u64>>,
}

impl Border {
    /// When the transfer is done; none when a side is not known yet.
    fn done(&self, mb: u64) -> Option<u64> {
        let at = |times: &[Option<u64>]| times.get(mb as usize).copied().flatten();
        Some(at(&self.offered)?.max(at(&self.posted)?))
    }
}

fn set(times: &mut Vec<Option<u64>>, mb: u64, ns: u64) {
    let i = mb as usize;
    if times.len() <= i {
        times.resize(i + 1, None);
    }
    times[i] = Some(ns);
}

/// The state of a replay: what has happened, and when.
struct State<'a> {
    program: &'a Program,
    times: &'a [StageTimes],
    forward: Vec<Border>,
    backward: Vec<Border>,
    /// Between the ends of a tied table, by update: from the first stage, and from the last.
    exchange: [Border; 2],
}

fn replay(program: &Program, times: &[StageTimes], updates: u64) -> Replay {
    let borders = vec![Border::default(); times.len().saturating_sub(1)];
    let mut state = State { program, times, forward: borders.clone(), backward: borders, exchange: Default::default() };
    let mut streams: Vec<_> = program.streams.iter().map(|s| s.segment(updates).peekable()).collect();
    let mut now_ns = vec![0; streams.len()];
    let mut work_ns = vec![0; streams.len()];
    loop {
        let mut moved = false;
        for (rank, stream) in streams.iter_mut().enumerate() {
            while let Some(&(op, stage, at)) = stream.peek() {
                let Some(ready) = state.ready(op, stage, at) else { break };
                let cost = state.cost(op, stage);
                now_ns[rank] = ready.max(now_ns[rank]) + cost;
                work_ns[rank] += cost;
                state.transfer(op, stage, at, now_ns[rank]);
                stream.next();
                moved = true;
            }
        }
        // All streams are at their end, or (which verification excludes) stuck.
        if !moved {
            return Replay { work_ns, end_ns: now_ns.into_iter().max().unwrap_or(0) };
        }
    }
}

impl State<'_> {
    /// When what an instruction waits for has happened; none when that is not known yet.
    fn ready(&self, op: Op, stage: StageId, mb: u64) -> Option<u64> {
        let s = stage.index();
        let rings = &self.program.rings[s];
        let taken = |border: &Border, slots: u32| match mb.checked_sub(u64::from(slots)) {
            Some(previous) => border.done(previous),
            None => Some(0),
        };
        let (before, after) = (self.program.border_before(s), self.program.border_after(s));
        match op {
            Op::F => {
                let input = before.map_or(Some(0), |b| self.forward[b].done(mb))?;
                Some(input.max(after.map_or(Some(0), |b| taken(&self.forward[b], rings.send_f))?))
            }
            Op::B(_) | Op::I => {
                let input = after.map_or(Some(0), |b| self.backward[b].done(mb))?;
                Some(input.max(before.map_or(Some(0), |b| taken(&self.backward[b], rings.send_b))?))
            }
            Op::U if self.program.partner(s).is_some() => {
                let [first, last] = &self.exchange;
                Some(first.done(mb)?.max(last.done(mb)?))
            }
            _ => Some(0),
        }
    }

    fn transfer(&mut self, op: Op, stage: StageId, mb: u64, now_ns: u64) {
        let s = stage.index();
        match op {
            Op::SendF => set(&mut self.forward[s].offered, mb, now_ns),
            Op::RecvF => set(&mut self.forward[s - 1].posted, mb, now_ns),
            Op::SendB => set(&mut self.backward[s - 1].offered, mb, now_ns),
            Op::RecvB => set(&mut self.backward[s].posted, mb, now_ns),
            Op::SendG => set(&mut self.exchange[usize::from(s > 0)].offered, mb, now_ns),
            Op::RecvG => set(&mut self.exchange[usize::from(s == 0)].posted, mb, now_ns),
            _ => {}
        }
    }

    fn cost(&self, op: Op, stage: StageId) -> u64 {
        let t = &self.times[stage.index()];
        // With accumulate = 1 every backward pass is the last; with none measured, the other kind stands in.
        let either = |a: Accumulation, plain: u64, last: u64| match (a.last, plain, last) {
            (true, plain, 0) => plain,
            (true, _, last) => last,
            (false, 0, last) => last,
            (false, plain, _) => plain,
        };
        match op {
            Op::F => t.f_ns,
            Op::B(a) => either(a, t.b_ns, t.b_last_ns),
            Op::I => t.i_ns,
            Op::W(a) => either(a, t.w_ns, t.w_last_ns),
            Op::U => t.u_ns,
            _ => 0,
        }
    }
}
