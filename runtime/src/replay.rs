//! Replays the instruction streams with measured kernel times, every rank as if it had a core of its own: the bubble on this
//! machine's kernels, also when ranks outnumber cores. Transfers take no time.

use crate::observe::StageTimes;
use artifact::channel::{Waits, channels, side};
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

/// Both sides of a channel's transfers, by micro-batch (update): when each was ready.
#[derive(Clone, Default)]
struct Channel {
    offered: Vec<Option<u64>>,
    posted: Vec<Option<u64>>,
}

impl Channel {
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
    /// By channel.
    channels: Vec<Channel>,
    /// By stage.
    waits: Vec<Waits>,
}

fn replay(program: &Program, times: &[StageTimes], updates: u64) -> Replay {
    let channels = vec![Channel::default(); channels(program).len()];
    let mut state = State { program, times, channels, waits: Waits::of(program) };
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
        let mut ready = 0;
        for wait in self.waits[stage.index()].before(op) {
            if let Some(mb) = wait.of(mb) {
                ready = ready.max(self.channels[wait.channel()].done(mb)?);
            }
        }
        Some(ready)
    }

    fn transfer(&mut self, op: Op, stage: StageId, mb: u64, now_ns: u64) {
        let Some((channel, sends)) = side(self.program, op, stage.index()) else { return };
        let channel = &mut self.channels[channel];
        set(if sends { &mut channel.offered } else { &mut channel.posted }, mb, now_ns);
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
            Op::N => t.n_ns,
            _ => 0,
        }
    }
}
