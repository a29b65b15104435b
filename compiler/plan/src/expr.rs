//! Values of a schedule's expressions, and what becomes of them in a run that never ends.
//!
//! # Meaning
//!
//! An expression over the round `n` is *eventually linear* when `f(n + period) = f(n) + rise` for all `n >= from`.
//! Sums, products with constants, quotients by constants, minima and maxima of such are such again, with numbers that
//! are computed here exactly; so a condition `f < g` repeats with a known period from a known round on, which is what
//! makes a schedule's steady state provable. What isn't eventually linear (`n * n`) is refused.

use dsl::schedule::{BinaryOp, CmpOp, Cond, Expr, Var};

/// Values of the variables on one rank.
#[derive(Clone, Copy, Debug)]
pub struct Scope {
    pub ranks: i64,
    pub rank: i64,
    /// None where a run has no known length.
    pub microbatches: Option<i64>,
    pub accumulate: i64,
    /// Stages a rank.
    pub chunks: i64,
    /// None outside of rounds.
    pub round: Option<i64>,
}

/// Why an expression has no value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    NoRound,
    NoLength,
    DivisionByZero,
    Overflow,
    /// Not eventually linear, or only after too many rounds.
    NotPeriodic,
}

/// Longest period and latest start of a condition's steady state, in rounds.
const ROUNDS_MAX: i64 = 1 << 16;

/// The value of `expr`.
///
/// # Errors
/// See [`Fault`].
pub fn value(expr: &Expr, scope: &Scope) -> Result<i64, Fault> {
    Ok(match expr {
        Expr::Number(number) => *number,
        Expr::Var(Var::P) => scope.ranks,
        Expr::Var(Var::S) => scope.rank,
        Expr::Var(Var::M) => scope.microbatches.ok_or(Fault::NoLength)?,
        Expr::Var(Var::K) => scope.accumulate,
        Expr::Var(Var::V) => scope.chunks,
        Expr::Var(Var::N) => scope.round.ok_or(Fault::NoRound)?,
        Expr::Binary(op, left, right) => apply(*op, value(left, scope)?, value(right, scope)?)?,
    })
}

fn apply(op: BinaryOp, left: i64, right: i64) -> Result<i64, Fault> {
    let result = match op {
        BinaryOp::Add => left.checked_add(right),
        BinaryOp::Sub => left.checked_sub(right),
        BinaryOp::Mul => left.checked_mul(right),
        BinaryOp::Div if right == 0 => return Err(Fault::DivisionByZero),
        BinaryOp::Div => left.checked_div(right).map(|q| {
            let exact = left.wrapping_rem(right) == 0;
            if !exact && (left < 0) != (right < 0) { q - 1 } else { q }
        }),
        BinaryOp::Min => Some(left.min(right)),
        BinaryOp::Max => Some(left.max(right)),
    };
    result.ok_or(Fault::Overflow)
}

/// Whether `cond` holds.
///
/// # Errors
/// See [`Fault`].
pub fn holds(cond: &Cond, scope: &Scope) -> Result<bool, Fault> {
    let (left, right) = (value(&cond.left, scope)?, value(&cond.right, scope)?);
    Ok(match cond.op {
        CmpOp::Lt => left < right,
        CmpOp::Le => left <= right,
        CmpOp::Eq => left == right,
        CmpOp::Ge => left >= right,
        CmpOp::Gt => left > right,
    })
}

/// From which round on a condition repeats, and with which period.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cycle {
    pub from: i64,
    pub period: i64,
}

impl Cycle {
    /// What repeats from the first round on.
    pub const CONSTANT: Cycle = Cycle { from: 0, period: 1 };

    /// When both repeat.
    ///
    /// # Errors
    /// [`Fault::NotPeriodic`] when that takes too many rounds.
    pub fn and(self, other: Cycle) -> Result<Cycle, Fault> {
        let period = self.period / gcd(self.period, other.period) * other.period;
        let from = self.from.max(other.from);
        if period > ROUNDS_MAX || from > ROUNDS_MAX { Err(Fault::NotPeriodic) } else { Ok(Cycle { from, period }) }
    }
}

/// The steady state of a condition.
///
/// # Errors
/// See [`Fault`].
pub fn cycle(cond: &Cond, scope: &Scope) -> Result<Cycle, Fault> {
    let (left, right) = (eventual(&cond.left, scope)?, eventual(&cond.right, scope)?);
    let (cycle, rise) = difference(&left, &right)?;
    if rise == 0 {
        return Ok(cycle);
    }
    settled(cycle, rise, |round| compare(&cond.left, &cond.right, scope, round)).map(|from| Cycle { from, period: 1 })
}

#[derive(Clone, Copy, Debug)]
struct Eventual {
    cycle: Cycle,
    rise: i64,
}

fn eventual(expr: &Expr, scope: &Scope) -> Result<Eventual, Fault> {
    let Expr::Binary(op, left, right) = expr else {
        let rise = i64::from(matches!(expr, Expr::Var(Var::N)));
        return Ok(Eventual { cycle: Cycle::CONSTANT, rise });
    };
    let (l, r) = (eventual(left, scope)?, eventual(right, scope)?);
    let both = l.cycle.and(r.cycle)?;
    let rise_of = |e: &Eventual| scaled(e.rise, both.period / e.cycle.period);
    let constant = |e: &Eventual| e.rise == 0 && e.cycle.period == 1;
    let at = |e: &Expr| value(e, &Scope { round: Some(both.from), ..*scope });
    Ok(match op {
        BinaryOp::Add => Eventual { cycle: both, rise: sum(rise_of(&l)?, rise_of(&r)?)? },
        BinaryOp::Sub => Eventual { cycle: both, rise: sum(rise_of(&l)?, scaled(rise_of(&r)?, -1)?)? },
        BinaryOp::Mul | BinaryOp::Div if l.rise == 0 && r.rise == 0 => Eventual { cycle: both, rise: 0 },
        BinaryOp::Mul if constant(&r) => Eventual { cycle: both, rise: scaled(l.rise, at(right)?)? },
        BinaryOp::Mul if constant(&l) => Eventual { cycle: both, rise: scaled(r.rise, at(left)?)? },
        BinaryOp::Div if constant(&r) => {
            let divisor = at(right)?;
            if divisor == 0 {
                return Err(Fault::DivisionByZero);
            }
            // After so many periods the numerator has risen by a multiple of the divisor.
            let periods = divisor.checked_abs().ok_or(Fault::Overflow)? / gcd(l.rise, divisor);
            let stretched = Cycle { from: both.from, period: scaled(both.period, periods)? }.and(Cycle::CONSTANT)?;
            Eventual { cycle: stretched, rise: scaled(l.rise, periods)? / divisor }
        }
        BinaryOp::Mul | BinaryOp::Div => return Err(Fault::NotPeriodic),
        BinaryOp::Min | BinaryOp::Max => {
            let (cycle, apart) = difference(&l, &r)?;
            let from = match apart {
                0 => cycle.from,
                _ => settled(cycle, apart, |round| compare(left, right, scope, round))?,
            };
            let left_wins = (apart < 0) == (*op == BinaryOp::Min);
            let rise = if left_wins { rise_of(&l)? } else { rise_of(&r)? };
            Eventual { cycle: Cycle { from, period: cycle.period }, rise }
        }
    })
}

/// The cycle and the rise of `left - right`.
fn difference(left: &Eventual, right: &Eventual) -> Result<(Cycle, i64), Fault> {
    let both = left.cycle.and(right.cycle)?;
    let rise = sum(
        scaled(left.rise, both.period / left.cycle.period)?,
        scaled(right.rise, -(both.period / right.cycle.period))?,
    )?;
    Ok((both, rise))
}

/// `left - right` in a round.
fn compare(left: &Expr, right: &Expr, scope: &Scope, round: i64) -> Result<i64, Fault> {
    let scope = Scope { round: Some(round), ..*scope };
    value(left, &scope)?.checked_sub(value(right, &scope)?).ok_or(Fault::Overflow)
}

/// The round from which on a difference that rises (or falls) has the sign of its rise for ever, and is not zero.
fn settled(cycle: Cycle, rise: i64, difference: impl Fn(i64) -> Result<i64, Fault>) -> Result<i64, Fault> {
    let mut from = cycle.from;
    for round in cycle.from..cycle.from + cycle.period {
        let start = difference(round)?;
        let ahead = if rise > 0 { start.checked_neg() } else { Some(start) }.ok_or(Fault::Overflow)?;
        if ahead >= 0 {
            let turns = ahead / rise.checked_abs().ok_or(Fault::Overflow)? + 1;
            from = from.max(sum(round, scaled(turns, cycle.period)?)?);
        }
    }
    if from > ROUNDS_MAX { Err(Fault::NotPeriodic) } else { Ok(from) }
}

fn sum(left: i64, right: i64) -> Result<i64, Fault> {
    left.checked_add(right).ok_or(Fault::Overflow)
}

fn scaled(left: i64, right: i64) -> Result<i64, Fault> {
    left.checked_mul(right).ok_or(Fault::Overflow)
}

/// The greatest common divisor, at least 1.
pub fn gcd(a: i64, b: i64) -> i64 {
    let (mut a, mut b) = (a.unsigned_abs(), b.unsigned_abs());
    while b != 0 {
        (a, b) = (b, a % b);
    }
    i64::try_from(a.max(1)).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(n: i64) -> Box<Expr> {
        Box::new(Expr::Number(n))
    }

    fn n() -> Box<Expr> {
        Box::new(Expr::Var(Var::N))
    }

    const SCOPE: Scope = Scope { ranks: 4, rank: 1, microbatches: None, accumulate: 2, chunks: 1, round: None };

    fn in_round(cond: &Cond, round: i64) -> bool {
        holds(cond, &Scope { round: Some(round), ..SCOPE }).unwrap()
    }

    /// A condition repeats as its cycle says, far beyond the rounds that the cycle was computed from.
    #[test]
    fn cycles_are_what_conditions_do() {
        let half = Expr::Binary(BinaryOp::Div, n(), number(2));
        let even = Expr::Binary(BinaryOp::Mul, Box::new(half.clone()), number(2));
        let third = Expr::Binary(BinaryOp::Div, Box::new(Expr::Binary(BinaryOp::Mul, n(), number(2))), number(-3));
        let capped = Expr::Binary(BinaryOp::Min, Box::new(half), number(11));
        let bound = |left: &Expr, op, right: Expr| Cond { left: left.clone(), op, right };
        let conditions = [
            bound(&even, CmpOp::Eq, *n()),
            bound(&n(), CmpOp::Ge, Expr::Number(7)),
            bound(&third, CmpOp::Lt, Expr::Number(-9)),
            bound(&capped, CmpOp::Eq, Expr::Number(11)),
            bound(&capped, CmpOp::Ge, Expr::Binary(BinaryOp::Sub, n(), number(20))),
            bound(&Expr::Binary(BinaryOp::Add, Box::new(third), n()), CmpOp::Gt, capped),
        ];
        for cond in conditions {
            let found = cycle(&cond, &SCOPE).unwrap();
            assert!(found.from < 100 && found.period < 20, "{found:?} for {cond:?}");
            for round in found.from..300 {
                assert_eq!(in_round(&cond, round), in_round(&cond, round + found.period), "{round} of {cond:?}");
            }
        }
    }

    #[test]
    fn squares_have_no_cycle_and_faults_are_values() {
        let square = Expr::Binary(BinaryOp::Mul, n(), n());
        let cond = Cond { left: square, op: CmpOp::Lt, right: Expr::Number(100) };
        assert_eq!(cycle(&cond, &SCOPE), Err(Fault::NotPeriodic));
        let huge = Expr::Binary(BinaryOp::Mul, number(i64::MAX), number(2));
        assert_eq!(value(&huge, &SCOPE), Err(Fault::Overflow));
        let lowest = Expr::Binary(BinaryOp::Div, number(i64::MIN), number(-1));
        assert_eq!(value(&lowest, &SCOPE), Err(Fault::Overflow));
        assert_eq!(value(&Expr::Binary(BinaryOp::Div, number(1), number(0)), &SCOPE), Err(Fault::DivisionByZero));
        assert_eq!(value(&Expr::Binary(BinaryOp::Div, number(-7), number(2)), &SCOPE), Ok(-4));
        assert_eq!(value(&n(), &SCOPE), Err(Fault::NoRound));
        assert_eq!(value(&Expr::Var(Var::M), &SCOPE), Err(Fault::NoLength));
    }
}
