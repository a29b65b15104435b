//! How many receive slots keep senders from waiting.
//!
//! # Meaning
//!
//! A rank with several stages may come to a micro-batch long after its input was sent, because it works on another stage
//! first. If its receive ring is full by then, the sender waits, and the schedule is slower than its order says. So
//! rings are made as large as they must be for no sender to wait when F, I and W take equal times and transfers none: the
//! order then runs as if there were no limits. It is a choice of size alone; that streams are sound is proved whatever
//! the sizes are.

use crate::line::{Item, Line, forward, input_gradient, weight_gradient};
use artifact::stream::{Op, Program};
use artifact::work;

/// When each micro-batch is done with, by stage and micro-batch.
struct Times {
    microbatches: usize,
    forward: Vec<u64>,
    backward: Vec<u64>,
    release: Vec<u64>,
}

/// Not reached: ranks wait for each other for ever.
const NEVER: u64 = u64::MAX;

/// Enlarges the receive rings of one flush.
pub(crate) fn enlarge(program: &mut Program, lines: &[Line]) {
    let times = Times::new(program, lines);
    for s in 0..program.rank_of_stage.len() {
        if program.border_before(s).is_some() {
            let needed = slots(times.of(&times.forward, s - 1), times.of(&times.release, s));
            program.rings[s].recv_f = program.rings[s].recv_f.max(needed);
        }
        if program.border_after(s).is_some() {
            let needed = slots(times.of(&times.backward, s + 1), times.of(&times.release, s));
            program.rings[s].recv_b = program.rings[s].recv_b.max(needed);
        }
    }
}

/// Slots with which a micro-batch that arrives finds the one before it in its slot released.
fn slots(arrivals: &[u64], releases: &[u64]) -> u32 {
    let mut most = 0;
    let mut released = 0;
    for (mb, arrival) in arrivals.iter().enumerate().take_while(|(_, arrival)| **arrival != NEVER) {
        while releases.get(released).is_some_and(|at| at <= arrival) {
            released += 1;
        }
        most = most.max((mb + 1).saturating_sub(released));
    }
    most as u32
}

impl Times {
    /// Performs the lines with unlimited buffers.
    fn new(program: &Program, lines: &[Line]) -> Self {
        let stages = program.rank_of_stage.len();
        let microbatches = lines.first().map_or(0, |line| line.microbatches as usize);
        let empty = || vec![NEVER; stages * microbatches];
        let mut times = Times { microbatches, forward: empty(), backward: empty(), release: empty() };
        let (mut next, mut now) = (vec![0; lines.len()], vec![0; lines.len()]);
        loop {
            let mut moved = false;
            for (rank, line) in lines.iter().enumerate() {
                let begin = next[rank];
                for item in &line.period[begin..] {
                    let Some(end) = times.end(program, item, now[rank]) else { break };
                    now[rank] = end;
                    next[rank] += 1;
                }
                // The one that it stops at too.
                work::visit(next[rank] - begin + 1);
                moved |= next[rank] > begin;
            }
            if !moved {
                return times;
            }
        }
    }

    /// Performs an instruction on a rank that is free at `now`; its end. None where its input is not there.
    fn end(&mut self, program: &Program, item: &Item, now: u64) -> Option<u64> {
        let (s, at) = (item.stage as usize, item.stage as usize * self.microbatches + item.mb as usize);
        let input = match item.op {
            Op::F if program.before(s).is_some() => self.forward[at - self.microbatches],
            Op::B(_) | Op::I if program.after(s).is_some() => self.backward[at + self.microbatches],
            _ => 0,
        };
        if input == NEVER {
            return None;
        }
        let cost = match item.op {
            Op::B(_) => 2,
            Op::U | Op::N | Op::T | Op::SendG => return Some(now),
            _ => 1,
        };
        let end = input.max(now) + cost;
        for (of, list) in [
            (forward(item.op), &mut self.forward),
            (input_gradient(item.op), &mut self.backward),
            (weight_gradient(item.op), &mut self.release),
        ] {
            if of {
                list[at] = end;
            }
        }
        Some(end)
    }

    fn of<'a>(&self, list: &'a [u64], stage: usize) -> &'a [u64] {
        &list[stage * self.microbatches..(stage + 1) * self.microbatches]
    }
}
