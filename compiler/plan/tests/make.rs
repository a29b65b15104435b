//! Schedules built by hand.

use dsl::schedule::{
    Action, Backward, BinaryOp, CmpOp, Cond, Expr, Phase, PhaseKind, Place, Schedule, Step, Update, Var,
};

pub fn num(n: i64) -> Expr {
    Expr::Number(n)
}

pub fn var(v: Var) -> Expr {
    Expr::Var(v)
}

pub fn op(op: BinaryOp, left: Expr, right: Expr) -> Expr {
    Expr::Binary(op, Box::new(left), Box::new(right))
}

/// `P - 1 - s`.
pub fn after() -> Expr {
    op(BinaryOp::Sub, op(BinaryOp::Sub, var(Var::P), num(1)), var(Var::S))
}

pub fn step(action: Action) -> Step {
    Step { action, chunk: None, when: None, at: None, span: (action as usize * 10)..(action as usize * 10 + 1) }
}

pub fn when(action: Action, left: Expr, op: CmpOp, right: Expr) -> Step {
    Step { when: Some(Cond { left, op, right }), ..step(action) }
}

pub fn phase(kind: PhaseKind, body: Vec<Step>) -> Phase {
    Phase { kind, body, span: 100..110 }
}

pub fn warmup(count: Expr, body: Vec<Step>) -> Phase {
    phase(PhaseKind::Warmup(count), body)
}

pub fn repeat(body: Vec<Step>) -> Phase {
    phase(PhaseKind::Repeat, body)
}

pub fn drain(body: Vec<Step>) -> Phase {
    phase(PhaseKind::Drain, body)
}

pub fn schedule(name: &str, backward: Backward, update: Update, order: Vec<Phase>) -> Schedule {
    Schedule {
        name: name.into(),
        place: Place::Linear,
        backward,
        update,
        weights: None,
        sequences: Vec::new(),
        order,
        span: 0..200,
        library: false,
    }
}

pub fn gpipe() -> Schedule {
    use Action::{B, F};
    schedule("gpipe", Backward::Whole, Update::Flush, vec![repeat(vec![step(F)]), repeat(vec![step(B)])])
}

fn one_f_one_b_order() -> Vec<Phase> {
    use Action::{B, F};
    vec![warmup(after(), vec![step(F)]), repeat(vec![step(F), step(B)])]
}

pub fn one_f_one_b() -> Schedule {
    schedule("one_f_one_b", Backward::Whole, Update::Flush, one_f_one_b_order())
}

pub fn async_1f1b() -> Schedule {
    schedule("async_1f1b", Backward::Whole, Update::Local, one_f_one_b_order())
}

/// ZB-H1 (`k` = 1) and H2 (`k` = 2) as the zero-bubble paper's hand order: `k (P - 1 - s)` forwards, then F, I, with a
/// W in each round once `k (P - 1 - s) + n >= k (P - 1)`.
pub fn zb_h(k: i64, update: Update) -> Schedule {
    use Action::{F, I, W};
    let first = op(BinaryOp::Mul, num(k), after());
    let bound = op(BinaryOp::Mul, num(k), op(BinaryOp::Sub, var(Var::P), num(1)));
    let reached = op(BinaryOp::Add, first.clone(), var(Var::N));
    let rounds = repeat(vec![step(F), step(I), when(W, reached, CmpOp::Ge, bound)]);
    schedule("zb_h", Backward::Split, update, vec![warmup(first, vec![step(F)]), rounds, drain(vec![step(W)])])
}
