//! Latency covered by more micro-batches in flight.
//!
//! # Meaning
//!
//! With t the time of F and B on the slowest stage and c that of a hop, a rank s of P that begins P-1-s forward passes ahead waits: on the way
//! to a later rank and back lie 2c a hop, and its P-s micro-batches in flight fill only their own times. With
//! q = ceil(2c/t) more of them for each hop to the last rank, P-s + q(P-1-s) in all, every cycle of waits through k hops has
//! (k+1)t + 2kc of time and (1+q)k + 1 micro-batches, at most t each: no rank but for its own work waits. A part of it (`partial`)
//! begins that part of the further passes, rounded down on each rank.
//!
//! A receive must be posted one hop before its content is needed, so rings get ceil(c/t) slots beyond the order's need.

use crate::Shape;
use crate::time::Costs;
use dsl::schedule::{BinaryOp, Expr, PhaseKind, Schedule, Var};
use dsl::spec::Cover;

/// `schedule` with the part of its latency covered that `cover` says, and the shape that it is then expanded for. None where there
/// is nothing to cover or the schedule has no warm-up that could be longer.
pub fn cover(schedule: &Schedule, shape: Shape, cover: Cover, costs: &Costs) -> Option<(Schedule, Shape)> {
    let warmup = schedule.latency_warmup()?;
    let slowest = costs.stages.iter().map(|s| s.f_ns.saturating_add(s.i_ns).saturating_add(s.w_ns)).max()?.max(1);
    if cover.share == 0 || costs.hop_ns == 0 {
        return None;
    }
    let further = costs.hop_ns.saturating_mul(2).div_ceil(slowest);
    let all = i64::try_from(further.saturating_mul(u64::from(cover.share))).ok()?;
    let mut covered = schedule.clone();
    covered.order[0].kind = PhaseKind::Warmup(binary(BinaryOp::Add, warmup.clone(), part(all)));
    let slots = u32::try_from(costs.hop_ns.div_ceil(slowest)).ok()?;
    Some((covered, Shape { receive_extra: shape.receive_extra.max(slots), ..shape }))
}

/// `all * (P - 1 - s) / FULL`
fn part(all: i64) -> Expr {
    let last = binary(BinaryOp::Sub, Expr::Var(Var::P), Expr::Number(1));
    let hops = binary(BinaryOp::Sub, last, Expr::Var(Var::S));
    let times = binary(BinaryOp::Mul, Expr::Number(all), hops);
    binary(BinaryOp::Div, times, Expr::Number(i64::from(Cover::FULL)))
}

fn binary(op: BinaryOp, left: Expr, right: Expr) -> Expr {
    Expr::Binary(op, Box::new(left), Box::new(right))
}
