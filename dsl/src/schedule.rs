//! A schedule as data: a cost-independent program per rank.
//!
//! # Meaning
//!
//! Each rank s of P runs `order` over M micro-batches: with `flush every accumulate` M = K and the program is run once per update, all
//! updates at its end; with `update local every accumulate` M is the run's length and each stage updates right after its K-th, 2K-th, … backward
//! pass. Each action kind (F, B or I, W) has its own counter on each rank; a step performs the
//! counter's next micro-batch, and a step whose micro-batches are used up is skipped.
//!
//! A rank may hold several stages, its *chunks* 0, 1, …, v - 1 in the order of the forward pass. Then either a step names its chunk
//! (`F1`), each with its own counter, or a `sequence` says which chunk and micro-batch the k-th action of a kind is:
//! `groups(g) chunks ascending` takes g micro-batches of chunk 0, the same of chunk 1, …, then the next g. So k is of group
//! `k div (g v)`, of chunk `(k mod g v) div g` (counted from the last one if descending), of micro-batch `group g + k mod g`; g divides M.
//!
//! * `warmup c { … }`: the body `max(0, c)` times.
//! * `repeat c { … }`: the same, where the count is the schedule's and not a warm-up.
//! * `repeat { … }`: the body until no step without a `when` has a micro-batch left; `n` counts the rounds from 0.
//! * `drain { … }`: the body until every step has none left.
//! * `block every t { … }`: every micro-batch of every step, in the order of time (at equal times in that of the steps). The
//!   micro-batch m of a step `F0 at e` is at e + t m. An action takes one unit (`B` two). A step without `at` comes after what it
//!   needs on its stage (F, or I for W): at the first time from its end that no step of the block takes, modulo t; at its end when
//!   there is none.
//! * `when cond`: the step is performed only in rounds where the condition holds.

use crate::diag::Span;
use crate::spec::Weights;

#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    pub name: String,
    pub place: Place,
    pub backward: Backward,
    pub update: Update,
    /// The policy that it is made for, if it says so.
    pub weights: Option<Weights>,
    /// At most one an action; empty where steps name their chunks or a rank has one.
    pub sequences: Vec<Sequence>,
    pub order: Vec<Phase>,
    pub span: Span,
    /// True when it comes from the library: spans then point into that file's source.
    pub library: bool,
}

impl Schedule {
    /// The count of the warm-up that more micro-batches in flight could lengthen to cover latency: of forward passes alone,
    /// first of a run without end on one stage a rank.
    pub fn latency_warmup(&self) -> Option<&Expr> {
        let first = self.order.first().filter(|_| self.update == Update::Local && self.place == Place::Linear)?;
        match (&first.kind, first.body.as_slice()) {
            (PhaseKind::Warmup(count), [step]) if step.action == Action::F && step.when.is_none() => Some(count),
            _ => None,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Stage i on rank i.
    Linear,
    /// Stage i on rank i mod P.
    Loop(Chunks),
    /// Stages 0 to P-1 on ranks 0 to P-1, the next P on the same ranks in reverse.
    Wave,
    /// Two copies of P stages: stage i on ranks i and P-1-i, each copy with half of the micro-batches. A rank's chunk 0 is
    /// the earlier of its two stages.
    Bidirectional,
}

/// Stages a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chunks {
    /// `v`: as `pipeline.chunks` says.
    Given,
    Fixed(u32),
}

impl Place {
    /// Stages a rank, where `pipeline.chunks` is `given`.
    pub fn chunks(self, given: u32) -> u32 {
        match self {
            Place::Linear => 1,
            Place::Loop(Chunks::Given) => given,
            Place::Loop(Chunks::Fixed(chunks)) => chunks,
            Place::Wave | Place::Bidirectional => 2,
        }
    }

    /// Copies of the model: each has its own stages and its share of the micro-batches.
    pub fn copies(self) -> u32 {
        if self == Place::Bidirectional { 2 } else { 1 }
    }

    /// The stage that a rank's chunk is, on `ranks` ranks.
    pub fn stage(self, chunk: u32, rank: u32, ranks: u32) -> u32 {
        match self {
            Place::Wave if chunk % 2 == 1 => (chunk + 1) * ranks - 1 - rank,
            Place::Bidirectional if (chunk == 1) != (2 * rank >= ranks) => 2 * ranks - 1 - rank,
            Place::Bidirectional => rank,
            _ => chunk * ranks + rank,
        }
    }

    /// The rank of a stage, and which of the rank's chunks it is.
    pub fn home(self, stage: u32, ranks: u32) -> (u32, u32) {
        let (chunk, at) = (stage / ranks, stage % ranks);
        if self == Place::Bidirectional {
            let rank = if chunk == 1 { ranks - 1 - at } else { at };
            return (rank, u32::from((chunk == 1) != (2 * rank >= ranks)));
        }
        (if self == Place::Wave && chunk % 2 == 1 { ranks - 1 - at } else { at }, chunk)
    }
}

/// `sequence F = groups(P) chunks ascending`
#[derive(Clone, Debug, PartialEq)]
pub struct Sequence {
    pub action: Action,
    /// Micro-batches of a group.
    pub groups: Expr,
    pub descending: bool,
    pub span: Span,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backward {
    /// B = I and W together.
    Whole,
    /// I and W apart.
    Split,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Update {
    /// `flush every accumulate`.
    Flush,
    /// `update local every accumulate`.
    Local,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Phase {
    pub kind: PhaseKind,
    pub body: Vec<Step>,
    pub span: Span,
}

#[derive(Clone, Debug, PartialEq)]
pub enum PhaseKind {
    Warmup(Expr),
    /// `repeat COUNT { … }`
    Counted(Expr),
    Repeat,
    Drain,
    /// `block every INTERVAL { … }`
    Block(Expr),
}

#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    pub action: Action,
    /// The chunk that the step names; none: what the action's sequence says, or the rank's only one.
    pub chunk: Option<u32>,
    pub when: Option<Cond>,
    /// In a block: when, in the first interval.
    pub at: Option<Expr>,
    pub span: Span,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    F,
    B,
    I,
    W,
}

/// Integer expressions over P (ranks), s (this rank), M (micro-batches; absent with `update local`), K (accumulate), v
/// (stages a rank), n (the round).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expr {
    Number(i64),
    Var(Var),
    Binary(BinaryOp, Box<Expr>, Box<Expr>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Var {
    P,
    S,
    M,
    K,
    V,
    N,
}

/// `Div` rounds towards minus infinity; dividing by zero is an error at evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BinaryOp {
    Add,
    Sub,
    Mul,
    Div,
    Min,
    Max,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cond {
    pub left: Expr,
    pub op: CmpOp,
    pub right: Expr,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CmpOp {
    Lt,
    Le,
    Eq,
    Ge,
    Gt,
}
