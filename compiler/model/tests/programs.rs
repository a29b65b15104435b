//! Instruction streams written by hand: all forward passes of an update, then all backward passes, then the update.

use artifact::ids::{RankId, StageId};
use artifact::stream::{Accumulation, Instr, Op, Policy, Program, RingSizes, Stream};

/// `stages` stages on as many ranks, `k` micro-batches an update; with `split`, I and W apart, all W after all I.
pub fn flush(stages: u32, k: u32, split: bool) -> Program {
    on_ranks(&(0..stages).collect::<Vec<_>>(), stages, k, split)
}

/// [`flush`] with the rank of each stage given.
pub fn on_ranks(rank_of_stage: &[u32], ranks: u32, k: u32, split: bool) -> Program {
    let count = rank_of_stage.len() as u32;
    let stages_of = |rank: u32| (0..count).filter(move |&s| rank_of_stage[s as usize] == rank);
    let stream = |rank: u32| {
        let mut period = Vec::new();
        for stage in stages_of(rank) {
            (0..k).for_each(|mb| forward(&mut period, stage, count, mb));
        }
        for stage in stages_of(rank).collect::<Vec<_>>().into_iter().rev() {
            (0..k).for_each(|mb| backward(&mut period, stage, count, mb, k, split));
            if split {
                (0..k).for_each(|mb| push(&mut period, Op::W(accumulation(mb, k)), stage, mb));
            }
        }
        stages_of(rank).for_each(|stage| push(&mut period, Op::U, stage, 0));
        Stream { prologue: Vec::new(), period, microbatches: k, updates: 1 }
    };
    let mut program = Program {
        streams: (0..ranks).map(stream).collect(),
        rank_of_stage: rank_of_stage.iter().map(|&r| RankId(r)).collect(),
        rings: (0..count).map(|s| rings(s, count, k)).collect(),
        accumulate: k,
        policy: Policy::Current,
        copies: 1,
        tied: false,
        global_norm: false,
    };
    without_transfers_on_a_rank(&mut program);
    program
}

/// The same program of a model whose head is tied to the embedding: ends on different ranks exchange their gradients.
pub fn tied(program: Program) -> Program {
    let mut program = Program { tied: true, ..program };
    let exchanges: Vec<bool> = (0..program.rings.len()).map(|s| program.partner(s).is_some()).collect();
    for stream in &mut program.streams {
        let update = stream.period.iter().position(|i| i.op == Op::U).expect("a rank updates its stages");
        let here: Vec<u32> = stream.period[update..].iter().map(|i| i.stage.0).collect();
        for stage in here.into_iter().filter(|s| exchanges[*s as usize]) {
            let of = |op| Instr { op, stage: StageId(stage), mb: 0 };
            stream.period.splice(update..update, [of(Op::RecvG), of(Op::SendG)]);
        }
    }
    program
}

/// The same program where updates read the norm of all stages' gradients.
pub fn normed(program: Program) -> Program {
    let mut program = Program { global_norm: true, ..program };
    let stages = program.rings.len();
    let borders: Vec<[bool; 2]> =
        (0..stages).map(|s| [program.border_before(s).is_some(), program.border_after(s).is_some()]).collect();
    for stream in &mut program.streams {
        let update = stream.period.iter().position(|i| i.op == Op::U).expect("a rank updates its stages");
        let here: Vec<usize> = stream.period[update..].iter().map(|i| i.stage.index()).collect();
        let mut list = Vec::new();
        let mut add = |op: Op, s: usize, there: bool| list.extend(there.then_some((op, s)));
        for &s in &here {
            let [before, after] = borders[s];
            add(Op::RecvN, s, before);
            add(Op::N, s, true);
            add(Op::SendN, s, after);
            add(Op::SendT, s, before && s + 1 == stages);
        }
        for &s in here.iter().rev().filter(|s| **s + 1 < stages) {
            let [before, after] = borders[s];
            add(Op::RecvT, s, after);
            add(Op::T, s, true);
            add(Op::SendT, s, before);
        }
        let list: Vec<Instr> = list.into_iter().map(|(op, s)| Instr { op, stage: StageId(s as u32), mb: 0 }).collect();
        stream.period.splice(update..update, list);
    }
    program
}

/// Neighbours on one rank hand over.
fn without_transfers_on_a_rank(program: &mut Program) {
    let borders: Vec<(bool, bool)> = (0..program.rings.len())
        .map(|s| (program.border_before(s).is_some(), program.border_after(s).is_some()))
        .collect();
    for stream in &mut program.streams {
        stream.period.retain(|i| match i.op {
            Op::RecvF | Op::SendB => borders[i.stage.index()].0,
            Op::SendF | Op::RecvB => borders[i.stage.index()].1,
            _ => true,
        });
    }
    for (rings, (before, after)) in program.rings.iter_mut().zip(borders) {
        rings.send_f = if after { rings.send_f } else { 0 };
        rings.send_b = if before { rings.send_b } else { 0 };
    }
}

fn rings(stage: u32, count: u32, k: u32) -> RingSizes {
    let (first, last) = (stage == 0, stage + 1 == count);
    let unless = |absent: bool, slots: u32| if absent { 0 } else { slots };
    RingSizes {
        weights: 1,
        stash: k,
        recv_f: k,
        send_f: unless(last, 2),
        recv_b: unless(last, k),
        send_b: unless(first, 2),
    }
}

fn accumulation(mb: u32, k: u32) -> Accumulation {
    Accumulation { first: mb == 0, last: mb + 1 == k }
}

fn push(list: &mut Vec<Instr>, op: Op, stage: u32, mb: u32) {
    list.push(Instr { op, stage: StageId(stage), mb });
}

fn forward(list: &mut Vec<Instr>, stage: u32, count: u32, mb: u32) {
    if stage > 0 {
        push(list, Op::RecvF, stage, mb);
    }
    push(list, Op::F, stage, mb);
    if stage + 1 < count {
        push(list, Op::SendF, stage, mb);
    }
}

fn backward(list: &mut Vec<Instr>, stage: u32, count: u32, mb: u32, k: u32, split: bool) {
    if stage + 1 < count {
        push(list, Op::RecvB, stage, mb);
    }
    push(list, if split { Op::I } else { Op::B(accumulation(mb, k)) }, stage, mb);
    if stage > 0 {
        push(list, Op::SendB, stage, mb);
    }
}
