//! A schedule as data: a cost-independent program per rank.
//!
//! # Meaning
//!
//! Each rank s of P runs `order` over M micro-batches: with `flush every accumulate` M = K and the program is run once per update, all
//! updates at its end; with `update local every accumulate` M is the run's length and each stage updates right after its K-th, 2K-th, … backward
//! pass. Each action kind (F, B or I, W) has its own counter on each rank; a step performs the
//! counter's next micro-batch, and a step whose micro-batches are used up is skipped.
//!
//! * `warmup c { … }`: the body `max(0, c)` times.
//! * `repeat { … }`: the body until no step without a `when` has a micro-batch left; `n` counts the rounds from 0.
//! * `drain { … }`: the body until every step has none left.
//! * `when cond`: the step is performed only in rounds where the condition holds.

use crate::diag::Span;

#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    pub name: String,
    pub place: Place,
    pub backward: Backward,
    pub update: Update,
    pub order: Vec<Phase>,
    pub span: Span,
    /// True when it comes from the library: spans then point into that file's source.
    pub library: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Stage i on rank i.
    Linear,
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
    Repeat,
    Drain,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    pub action: Action,
    pub when: Option<Cond>,
    pub span: Span,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    F,
    B,
    I,
    W,
}

/// Integer expressions over P (ranks), s (this rank), M (micro-batches; absent with `update local`), K (accumulate), n (the round).
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
