//! The channels of a program: which transfers there are, and which instructions wait for them.
//!
//! # Meaning
//!
//! A channel is one kind of transfer from one stage to another, whose k-th send and k-th receive make the k-th transfer. A compute
//! instruction waits for transfers of its own micro-batch (update) that *arrive*, and for earlier ones to be *taken*: those that
//! had the slot it writes to, and those of what the next post or write may overwrite.
//!
//! | instruction | arrives | is taken |
//! |---|---|---|
//! | F | its input | the output of so many micro-batches before as `send_f` has slots |
//! | B, I | its output gradient | the input gradient of so many micro-batches before as `send_b` has slots |
//! | N | the sum of the stages before; on the first end of a tied table, the other end's gradient | there, its own gradient |
//! | T | the total | |
//! | U | on the ends of a tied table, the other end's gradient | there, its own gradient; what N and T sent |
//!
//! Between stages that hand over, and where a program exchanges nothing, there is nothing to wait for.

use crate::stream::{Op, Program};

/// What a channel carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Freight {
    /// To the next stage.
    Activations,
    /// To the stage before.
    Gradients,
    /// To the next stage: the sum of squares so far.
    Norm,
    /// To the stage before: that of all stages.
    Total,
    /// Between the ends of a tied table.
    Table,
}

impl Freight {
    pub fn send(self) -> Op {
        match self {
            Freight::Activations => Op::SendF,
            Freight::Gradients => Op::SendB,
            Freight::Norm => Op::SendN,
            Freight::Total => Op::SendT,
            Freight::Table => Op::SendG,
        }
    }

    pub fn receive(self) -> Op {
        match self {
            Freight::Activations => Op::RecvF,
            Freight::Gradients => Op::RecvB,
            Freight::Norm => Op::RecvN,
            Freight::Total => Op::RecvT,
            Freight::Table => Op::RecvG,
        }
    }

    /// Whether there is one transfer an update, not one a micro-batch.
    pub fn by_update(self) -> bool {
        self.send().by_update()
    }
}

/// Transfers of one kind from one stage to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Channel {
    pub from: usize,
    pub to: usize,
    pub freight: Freight,
}

/// The channels of a program, in the order of their numbers. Borders between stages that hand over have theirs, and never use them.
pub fn channels(program: &Program) -> Vec<Channel> {
    let borders = borders(program);
    let of = |up, down| {
        (0..borders).flat_map(move |b| {
            [Channel { from: b, to: b + 1, freight: up }, Channel { from: b + 1, to: b, freight: down }]
        })
    };
    let mut all: Vec<Channel> = of(Freight::Activations, Freight::Gradients).collect();
    if program.norms() {
        all.extend(of(Freight::Norm, Freight::Total));
    }
    if let Some([first, last]) = program.tied_ends().filter(|ends| program.partner(ends[0]).is_some()) {
        let table = |from, to| Channel { from, to, freight: Freight::Table };
        all.extend([table(first, last), table(last, first)]);
    }
    all
}

fn borders(program: &Program) -> usize {
    program.rank_of_stage.len().saturating_sub(1)
}

/// Channels of micro-batches come first: the number of the first one that has a transfer an update.
pub fn first_by_update(program: &Program) -> usize {
    2 * borders(program)
}

/// The channel of a send or a receive of stage `s`, and whether this is the sending side. None for computations, and where a program has
/// no such transfers.
pub fn side(program: &Program, op: Op, s: usize) -> Option<(usize, bool)> {
    let norm = |border: usize| program.norms().then(|| first_by_update(program) + 2 * border);
    let table = |from: usize| {
        let norms = if program.norms() { 2 * borders(program) } else { 0 };
        first_by_update(program) + norms + usize::from(from > 0)
    };
    Some(match op {
        Op::SendF => (2 * s, true),
        Op::RecvF => (2 * s.checked_sub(1)?, false),
        Op::SendB => (2 * s.checked_sub(1)? + 1, true),
        Op::RecvB => (2 * s + 1, false),
        Op::SendN => (norm(s)?, true),
        Op::RecvN => (norm(s.checked_sub(1)?)?, false),
        Op::SendT => (norm(s.checked_sub(1)?)? + 1, true),
        Op::RecvT => (norm(s)? + 1, false),
        Op::SendG => (table(s), true),
        Op::RecvG => (table(program.partner(s)?), false),
        Op::F | Op::B(_) | Op::I | Op::W(_) | Op::N | Op::T | Op::U => return None,
    })
}

/// Whether stage `s` performs a send or a receive.
pub fn performs(program: &Program, op: Op, s: usize) -> bool {
    let (before, after) = (|| program.border_before(s).is_some(), || program.border_after(s).is_some());
    match op {
        Op::SendF | Op::RecvB => after(),
        Op::RecvF | Op::SendB => before(),
        Op::SendN | Op::RecvT => program.norms() && after(),
        Op::RecvN | Op::SendT => program.norms() && before(),
        Op::SendG | Op::RecvG => program.partner(s).is_some(),
        Op::F | Op::B(_) | Op::I | Op::W(_) | Op::N | Op::T | Op::U => false,
    }
}

/// A wait of an instruction for a transfer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wait {
    channel: u32,
    /// It is that of so many micro-batches (updates) before; of none where there are not so many.
    pub back: u32,
    /// Whether the instruction reads what arrives; else what was sent has to be taken.
    pub arrives: bool,
}

impl Wait {
    pub fn channel(&self) -> usize {
        self.channel as usize
    }

    /// The micro-batch (update) whose transfer an instruction of `mb` waits for.
    pub fn of(&self, mb: u64) -> Option<u64> {
        mb.checked_sub(self.back.into())
    }
}

/// Most waits of a stage: two of F, two of B, three of N, one of T, four of U.
const WAITS_MAX: usize = 12;

/// The waits of a stage's instructions. Every instruction asks: they lie together.
#[derive(Clone, Debug, Default)]
pub struct Waits {
    all: [Wait; WAITS_MAX],
    /// Where those of F, B, N, T and U end.
    ends: [u8; 5],
}

impl Waits {
    /// By stage.
    pub fn of(program: &Program) -> Vec<Waits> {
        (0..program.rank_of_stage.len()).map(|s| Waits::on(program, s)).collect()
    }

    /// Those of an instruction.
    pub fn before(&self, op: Op) -> &[Wait] {
        let [f, b, n, t, u] = self.ends.map(usize::from);
        match op {
            Op::F => &self.all[..f],
            Op::B(_) | Op::I => &self.all[f..b],
            Op::N => &self.all[b..n],
            Op::T => &self.all[n..t],
            Op::U => &self.all[t..u],
            _ => &[],
        }
    }

    fn on(program: &Program, s: usize) -> Waits {
        let rings = &program.rings[s];
        let wait = |op, back: u32, arrives| {
            let (channel, _) = side(program, op, s).filter(|_| performs(program, op, s))?;
            Some(Wait { channel: channel as u32, back, arrives })
        };
        let table = [wait(Op::RecvG, 0, true), wait(Op::SendG, 0, false)];
        let [theirs, own] = table.map(|wait| wait.filter(|_| s == 0));
        let lists: [&[Option<Wait>]; 5] = [
            &[wait(Op::RecvF, 0, true), wait(Op::SendF, rings.send_f, false)],
            &[wait(Op::RecvB, 0, true), wait(Op::SendB, rings.send_b, false)],
            &[wait(Op::RecvN, 0, true), theirs, own],
            &[wait(Op::RecvT, 0, true)],
            &[table[0], table[1], wait(Op::SendN, 0, false), wait(Op::SendT, 0, false)],
        ];
        let (mut waits, mut end) = (Waits::default(), 0);
        for (list, ends) in lists.iter().zip(&mut waits.ends) {
            for wait in list.iter().flatten() {
                waits.all[end] = *wait;
                end += 1;
            }
            *ends = end as u8;
        }
        waits
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::RankId;
    use crate::stream::{Policy, RingSizes};

    /// Every channel is that of its two ends, and of no other instruction.
    #[test]
    fn channels_and_sides_agree() {
        for ([norm, tied], homes) in
            [[false; 2], [true, false], [false, true], [true; 2]].into_iter().flat_map(|flags| {
                [vec![0], vec![0, 1], vec![0, 1, 2, 0], vec![0, 1, 1, 0], vec![0, 0, 1]].map(|h| (flags, h))
            })
        {
            let program = Program {
                streams: Vec::new(),
                rank_of_stage: homes.iter().copied().map(RankId).collect(),
                rings: vec![RingSizes::default(); homes.len()],
                accumulate: 1,
                policy: Policy::Current,
                copies: 1,
                tied,
                global_norm: norm,
            };
            let all = channels(&program);
            for (number, channel) in all.iter().enumerate() {
                assert_eq!(side(&program, channel.freight.send(), channel.from), Some((number, true)));
                assert_eq!(side(&program, channel.freight.receive(), channel.to), Some((number, false)));
            }
            let waits = Waits::of(&program);
            assert!(waits.iter().flat_map(|w| &w.all[..w.ends[4].into()]).all(|w| w.channel() < all.len()));
            let by_update = all.iter().position(|c| c.freight.by_update());
            assert_eq!(by_update.unwrap_or(all.len()), first_by_update(&program));
        }
    }
}
