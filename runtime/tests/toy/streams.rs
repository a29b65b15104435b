//! Streams of the toy's schedules, written down from their definitions.

use super::{Schedule, Toy};
use artifact::ids::StageId;
use artifact::stream::{Accumulation, Instr, Op, RingSizes, Stream};

pub fn stream(toy: Toy, rank: usize) -> Stream {
    let k = toy.accumulate;
    let ops = Ops { rank, ranks: toy.ranks, k, split: toy.schedule == Schedule::AsyncSplit };
    let (mut prologue, mut period) = (Vec::new(), Vec::new());
    if toy.schedule == Schedule::Gpipe {
        (0..k).for_each(|m| ops.forward(m, &mut period));
        (0..k).for_each(|m| ops.backward(m, &mut period));
    } else {
        let warmup = (toy.ranks - 1 - rank) as u32;
        (0..warmup).for_each(|m| ops.forward(m, &mut prologue));
        for m in 0..k {
            ops.forward(warmup + m, &mut period);
            ops.backward(m, &mut period);
        }
    }
    period.push(ops.instr(Op::U, 0));
    Stream { prologue, period, microbatches: k, updates: 1 }
}

pub fn rings(toy: Toy, rank: usize) -> RingSizes {
    let in_flight = match toy.schedule {
        Schedule::Gpipe => toy.accumulate,
        _ => (toy.ranks - rank) as u32,
    };
    let (first, last) = (rank == 0, rank + 1 == toy.ranks);
    let unless = |absent: bool, slots: u32| if absent { 0 } else { slots };
    RingSizes {
        weights: 1,
        stash: in_flight,
        recv_f: in_flight,
        send_f: unless(last, 1),
        recv_b: unless(last, 1),
        send_b: unless(first, 1),
    }
}

struct Ops {
    rank: usize,
    ranks: usize,
    k: u32,
    split: bool,
}

impl Ops {
    fn instr(&self, op: Op, mb: u32) -> Instr {
        Instr { op, stage: StageId(self.rank as u32), mb }
    }

    fn forward(&self, mb: u32, out: &mut Vec<Instr>) {
        if self.rank > 0 {
            out.push(self.instr(Op::RecvF, mb));
        }
        out.push(self.instr(Op::F, mb));
        if self.rank + 1 < self.ranks {
            out.push(self.instr(Op::SendF, mb));
        }
    }

    fn backward(&self, mb: u32, out: &mut Vec<Instr>) {
        let a = Accumulation { first: mb.is_multiple_of(self.k), last: mb % self.k == self.k - 1 };
        if self.rank + 1 < self.ranks {
            out.push(self.instr(Op::RecvB, mb));
        }
        out.push(self.instr(if self.split { Op::I } else { Op::B(a) }, mb));
        if self.rank > 0 {
            out.push(self.instr(Op::SendB, mb));
        }
        if self.split {
            out.push(self.instr(Op::W(a), mb));
        }
    }
}
