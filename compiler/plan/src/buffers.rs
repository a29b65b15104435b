//! How many receive slots keep senders from waiting.
//!
//! # Meaning
//!
//! A rank with several stages may come to a micro-batch long after its input was sent, because it works on another stage
//! first. If its receive ring is full by then, the sender waits, and the schedule is slower than its order says. So
//! rings are made as large as they must be for no sender to wait when F, I and W take equal times and transfers none: the
//! order then runs as if there were no limits. It is a choice of size alone; that streams are sound is proved whatever
//! the sizes are.

use crate::line::{Line, forward, input_gradient, weight_gradient};
use artifact::stream::{Op, Program};

/// When each micro-batch is done with, by stage; none where ranks wait for each other for ever.
struct Times {
    forward: Vec<Vec<Option<u64>>>,
    backward: Vec<Vec<Option<u64>>>,
    release: Vec<Vec<Option<u64>>>,
}

/// Enlarges the receive rings of one flush.
pub(crate) fn enlarge(program: &mut Program, lines: &[Line]) {
    let times = run(program.rank_of_stage.len(), lines);
    for s in 0..program.rank_of_stage.len() {
        if program.border_before(s).is_some() {
            let needed = slots(&times.forward[s - 1], &times.release[s]);
            program.rings[s].recv_f = program.rings[s].recv_f.max(needed);
        }
        if program.border_after(s).is_some() {
            let needed = slots(&times.backward[s + 1], &times.release[s]);
            program.rings[s].recv_b = program.rings[s].recv_b.max(needed);
        }
    }
}

/// Slots with which a micro-batch that arrives finds the one before it in its slot released.
fn slots(arrivals: &[Option<u64>], releases: &[Option<u64>]) -> u32 {
    let mut most = 0;
    let mut released = 0;
    for (mb, arrival) in arrivals.iter().enumerate() {
        let Some(arrival) = arrival else { break };
        while releases.get(released).is_some_and(|at| at.is_some_and(|at| at <= *arrival)) {
            released += 1;
        }
        most = most.max((mb + 1).saturating_sub(released));
    }
    most as u32
}

/// Performs the lines with unlimited buffers.
fn run(stages: usize, lines: &[Line]) -> Times {
    let microbatches = lines.first().map_or(0, |line| line.microbatches as usize);
    let empty = || vec![vec![None; microbatches]; stages];
    let mut times = Times { forward: empty(), backward: empty(), release: empty() };
    let (mut next, mut now) = (vec![0; lines.len()], vec![0; lines.len()]);
    loop {
        let before = next.clone();
        for (rank, line) in lines.iter().enumerate() {
            while let Some(item) = line.period.get(next[rank]) {
                let (s, mb) = (item.stage as usize, item.mb as usize);
                let input = match item.op {
                    Op::F if s > 0 => times.forward[s - 1][mb],
                    Op::B(_) | Op::I if s + 1 < stages => times.backward[s + 1][mb],
                    _ => Some(0),
                };
                let Some(input) = input else { break };
                let cost = match item.op {
                    Op::B(_) => 2,
                    Op::U => 0,
                    _ => 1,
                };
                let end = input.max(now[rank]) + cost;
                now[rank] = end;
                next[rank] += 1;
                for (of, list) in [
                    (forward(item.op), &mut times.forward),
                    (input_gradient(item.op), &mut times.backward),
                    (weight_gradient(item.op), &mut times.release),
                ] {
                    if of {
                        list[s][mb] = Some(end);
                    }
                }
            }
        }
        if next == before {
            return times;
        }
    }
}
