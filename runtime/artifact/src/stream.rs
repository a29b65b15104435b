//! The instruction stream of a rank.
//!
//! # Meaning
//!
//! A rank runs `prologue` once, then `period` as often as the run needs. Every repetition handles
//! `microbatches` more micro-batches and makes `updates` more optimizer updates. An instruction names its
//! micro-batch relative to the repetition: in repetition `n` (the prologue counts as repetition 0)
//! `mb` stands for the absolute micro-batch `mb + n * microbatches`, and for what is performed once an update ([`Op::by_update`]) the
//! absolute update is `mb + n * updates`.
//!
//! A *segment* is what runs between two drains: micro-batches `0..M`, `M = segment updates * K`. An instruction whose
//! absolute micro-batch is `>= M` (or whose absolute update is `>=` the segment's updates) is skipped: this one rule makes the epilogue (the last repetitions, with the forward
//! passes that have nothing left to do skipped), so the epilogue is derived and not stored, and one text is proved for a run
//! of any length.
//!
//! The next segment starts again from the prologue; micro-batches are numbered from 0 within each segment (the runtime
//! adds the segment's base where it reads data).
//!
//! # Transfers
//!
//! `RECV_*` *posts* a receive: it claims its slot of the receive ring (waiting until that slot is free is an error that `verify` excludes:
//! the slot's last user comes earlier in the same stream) and returns. The wait is at the first use, by `F` or
//! `B`/`I` of the same stage and micro-batch. `SEND_*` offers the slot that the compute
//! instruction filled and returns; the compute instruction that fills the same slot again waits until it was taken. A transfer completes only when both sides are there
//! (no buffering besides the slots), in FIFO order per (sender stage, receiver stage, direction).
//!
//! # Rings
//!
//! Slot of micro-batch `m` in a ring of `n` slots: `m mod n`. Each stage has these rings (0 slots = it has none):
//!
//! | ring | claimed | released |
//! |---|---|---|
//! | `stash` (saved activations) | start of F(m) | end of B(m) (W(m) when split) |
//! | `recv_f` (input; on the first stage the token ids, claimed by F) | RECV_F(m) | end of B(m) (W(m) when split): the backward pass reads it |
//! | `send_f` (output) | start of F(m) | SEND_F(m) taken |
//! | `recv_b` (output gradient) | RECV_B(m) | end of B(m) (W(m) when split) |
//! | `send_b` (input gradient) | start of B(m) or I(m) | SEND_B(m) taken |
//!
//! # Versions of the weights
//!
//! Version `v` of a stage's weights is what its first `v` updates have made, counted over the whole run; version 0 is where training
//! starts. Update `u` reads version `u` and makes version `u + 1`. The weights are a ring too, by version: version `v` is in slot
//! `v mod n` of `weights`. Kernels begin to write `u + 1` in the last weight gradient of update `u` (where the update is fused into
//! it), and it can be read when `U` is done. With one slot an update is in place.
//!
//! The program's [`Policy`] says which version F and B (or I) of a micro-batch `m` read; W reads none. "Newest" is the last one whose U is
//! done when the instruction runs:
//!
//! | policy | F reads | B (I) reads | slots |
//! |---|---|---|---|
//! | `current` | the newest | the newest | 1 |
//! | `recomputed` | the newest | the newest, and runs the forward pass again with it: its activations are of that version | 1 |
//! | `stash` | the newest | what F of `m` read | as many as the stream needs |
//! | `double_buffer` | `max(0, m div K - 1)` | the same | 2 |
//! | `predicted` | the newest, moved on along its last update | the newest | 1, and the moved copy where there is drift |
//!
//! `m div K` counts over the whole run here: a drain changes nothing that `double_buffer` reads.
//!
//! # Several stages a rank
//!
//! Neighbouring stages on one rank *hand over*: there is no transfer between them and no send ring. The receive ring of the reader is
//! the only buffer: F of the stage before writes its output straight into `recv_f` of the next stage, and B (I) of the stage after writes its
//! input gradient straight into `recv_b` of the stage before. So `recv_f` is then claimed at the start of F(m) of the stage before,
//! `recv_b` at the start of B(m) (I(m)) of the next stage; both are released as in the table. The stream's order is all that there is to wait for.
//!
//! # Tied tables
//!
//! In a *tied* program the last stage's head multiplies by the table that the first stage embeds tokens with. An update of the table
//! takes the sum of both ends' gradients, each accumulated apart. Ends on different ranks each hold a copy of the table and *exchange*
//! their accumulators before every update (the plan's action REDUCE_GRAD): `RECV_G` posts a receive into a buffer beside the accumulator,
//! which the update before is done with; `SEND_G` offers the accumulator; `U` of an end waits until both transfers are done, and
//! adds the two. Both copies then make the same update from the same sum, so they stay equal bit for bit. Ends on one rank
//! share the table: one U makes its update, and between the `U`s of both ends comes nothing but other `U`s.
//!
//! # The norm of all gradients
//!
//! In a program with a *global norm* an update scales its gradients by a factor of the norm of all stages' gradients. The sum of their
//! squares goes up the stages and comes back: `N` adds the squares of its stage's gradients, parameter by parameter, to the sum that
//! the stage before has sent (`SEND_N`, `RECV_N`); after the last stage's `N` it is the total, which goes down again (`SEND_T`,
//! `RECV_T`). `T` is where it has come, on every stage but the last; it computes nothing. So the total is one sum in the order of the model's
//! parameters, on any number of stages the same to the bit. `U` comes after all of these and reads it; as sums are sent from where they are, it also waits
//! until they were taken. A tied table's gradient counts once, on its first end, whose `N` adds both ends' gradients as `U` does elsewhere.
//! Between stages that hand over the sum stays in place.
//!
//! # Copies
//!
//! A program may hold several copies of the model's stages, each a pipeline of its own with its share of the micro-batches: of
//! `S` stages a copy, stage `c S + i` is copy `c` of stage `i`. Micro-batches and updates are numbered within each copy. An update takes the
//! gradients of all copies: they must be exchanged before it, which no instruction here does. So such programs are analysed and not run.

use crate::ids::StageId;
use serde::{Deserialize, Serialize};

/// What an instruction does. See the module's text for when each one blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Op {
    /// Forward of one micro-batch.
    F,
    /// Full backward (input and weight gradients) of one micro-batch.
    B(Accumulation),
    /// Input gradient only.
    I,
    /// Weight gradient only.
    W(Accumulation),
    /// Optimizer update; `mb` is the update's index. What is fused into the last weight gradient is
    /// done there; U raises the version and runs what is left.
    U,
    /// Offer the output of F to the next stage.
    SendF,
    /// Post a receive for the input of F from the previous stage.
    RecvF,
    /// Offer the input gradient to the previous stage.
    SendB,
    /// Post a receive for the output gradient from the next stage.
    RecvB,
    /// Offer the accumulated gradient of the tied table to its other end; `mb` is the update's index.
    SendG,
    /// Post a receive for the gradient of the tied table's other end; `mb` is the update's index.
    RecvG,
    /// Add the squares of the stage's gradients to the sum of the stages before; `mb` is the update's index, as of the next five.
    N,
    /// Offer the sum to the next stage.
    SendN,
    /// Post a receive for the sum of the stages before.
    RecvN,
    /// The sum of all stages is there.
    T,
    /// Offer it to the stage before.
    SendT,
    /// Post a receive for it.
    RecvT,
}

impl Op {
    /// Whether it is performed once an update, and `mb` is the update's index.
    pub fn by_update(self) -> bool {
        match self {
            Op::F | Op::B(_) | Op::I | Op::W(_) | Op::SendF | Op::RecvF | Op::SendB | Op::RecvB => false,
            Op::U | Op::SendG | Op::RecvG | Op::N | Op::SendN | Op::RecvN | Op::T | Op::SendT | Op::RecvT => true,
        }
    }

    /// Whether it is one side of a transfer.
    pub fn transfers(self) -> bool {
        match self {
            Op::F | Op::B(_) | Op::I | Op::W(_) | Op::U | Op::N | Op::T => false,
            Op::SendF | Op::RecvF | Op::SendB | Op::RecvB | Op::SendG | Op::RecvG => true,
            Op::SendN | Op::RecvN | Op::SendT | Op::RecvT => true,
        }
    }
}

/// Where a weight gradient stands among those of its update.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Accumulation {
    /// The first of its update: the accumulator is overwritten.
    pub first: bool,
    /// The last of its update: the fused optimizer update runs in the weight-gradient kernels.
    pub last: bool,
}

/// One instruction; `mb` is relative to the repetition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Instr {
    pub op: Op,
    pub stage: StageId,
    pub mb: u32,
}

/// A rank's instructions. See the module's text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stream {
    pub prologue: Vec<Instr>,
    pub period: Vec<Instr>,
    /// Micro-batches per repetition of the period.
    pub microbatches: u32,
    /// Updates per repetition of the period.
    pub updates: u32,
}

impl Stream {
    /// By how much an instruction's `mb` grows from one repetition to the next.
    pub fn step(&self, op: Op) -> u32 {
        if op.by_update() { self.updates } else { self.microbatches }
    }

    /// The instructions of a segment of `updates` updates, with absolute micro-batches (absolute updates for U).
    /// Lazy: a run of any length costs no memory.
    pub fn segment(&self, updates: u64) -> impl Iterator<Item = (Op, StageId, u64)> + '_ {
        let per_repetition = u64::from(self.updates.max(1));
        let repetitions = updates.div_ceil(per_repetition);
        let limit = updates * (u64::from(self.microbatches) / per_repetition);
        let prologue = self.prologue.iter().map(|i| (i, 0));
        let period = (0..repetitions).flat_map(move |n| self.period.iter().map(move |i| (i, n)));
        prologue.chain(period).filter_map(move |(i, n)| {
            let end = if i.op.by_update() { updates } else { limit };
            let at = u64::from(i.mb) + n * u64::from(self.step(i.op));
            (at < end).then_some((i.op, i.stage, at))
        })
    }
}

/// Which version of the weights a micro-batch's passes read. See the module's text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Policy {
    #[default]
    Current,
    Recomputed,
    Stash,
    DoubleBuffer,
    Predicted,
}

/// Slots of each ring of one stage. See the module's tables.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RingSizes {
    /// Versions of the weights, at least 1.
    pub weights: u32,
    pub stash: u32,
    pub recv_f: u32,
    pub send_f: u32,
    pub recv_b: u32,
    pub send_b: u32,
}

/// The streams of all ranks with what `verify` needs beside them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Program {
    /// By rank.
    pub streams: Vec<Stream>,
    /// By stage: the rank that holds it.
    pub rank_of_stage: Vec<crate::ids::RankId>,
    /// By stage.
    pub rings: Vec<RingSizes>,
    /// Micro-batches per update (K), of one copy.
    pub accumulate: u32,
    pub policy: Policy,
    /// Copies of the model's stages.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub copies: u32,
    /// Whether the head multiplies by the token embedding's table.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub tied: bool,
    /// Whether updates read the norm of all stages' gradients.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub global_norm: bool,
}

fn one() -> u32 {
    1
}

fn is_one(copies: &u32) -> bool {
    *copies == 1
}

impl Program {
    /// Instructions of all streams.
    pub fn instructions(&self) -> usize {
        self.streams.iter().map(|s| s.prologue.len() + s.period.len()).sum()
    }

    /// Stages of one copy of the model.
    pub fn stages_of_copy(&self) -> usize {
        self.rank_of_stage.len() / self.copies.max(1) as usize
    }

    /// The stage that `stage` has its input from; none on the first stage of a copy.
    pub fn before(&self, stage: usize) -> Option<usize> {
        stage.checked_sub(1).filter(|_| stage % self.stages_of_copy().max(1) > 0)
    }

    /// The stage that has its input from `stage`; none on the last stage of a copy.
    pub fn after(&self, stage: usize) -> Option<usize> {
        let next = stage + 1;
        (next < self.rank_of_stage.len() && next % self.stages_of_copy().max(1) > 0).then_some(next)
    }

    /// Whether `stage` and the one after it exist and lie on the same rank: they hand over (see the module's text).
    pub fn hands_over(&self, stage: usize) -> bool {
        let same = |next: usize| self.rank_of_stage.get(stage) == self.rank_of_stage.get(next);
        self.after(stage).is_some_and(same)
    }

    /// The two stages that a tied table lies between; none where one stage holds both ends. Several copies of the model are analysed
    /// without what their copies exchange, this too.
    pub fn tied_ends(&self) -> Option<[usize; 2]> {
        let last = self.rank_of_stage.len().checked_sub(1)?;
        (self.tied && self.copies == 1 && last > 0).then_some([0, last])
    }

    /// The stage that `stage` exchanges gradients with: the other end of the tied table, on another rank.
    pub fn partner(&self, stage: usize) -> Option<usize> {
        let [first, last] = self.tied_ends()?;
        let other = if stage == first { last } else { first };
        let apart = self.rank_of_stage[first] != self.rank_of_stage[last];
        (apart && (stage == first || stage == last)).then_some(other)
    }

    /// Whether the sum of squares of all gradients is exchanged. Several copies of the model are analysed without it, as above.
    pub fn norms(&self) -> bool {
        self.global_norm && self.copies == 1
    }

    /// The border over which `stage` receives activations and sends gradients, named by its lower stage. None on the
    /// first stage, and where the stage before is on the same rank.
    pub fn border_before(&self, stage: usize) -> Option<usize> {
        self.before(stage).filter(|before| !self.hands_over(*before))
    }

    /// The border over which `stage` sends activations and receives gradients, named by its lower stage. None on the
    /// last stage, and where the next stage is on the same rank.
    pub fn border_after(&self, stage: usize) -> Option<usize> {
        (self.after(stage).is_some() && !self.hands_over(stage)).then_some(stage)
    }
}
