//! An order made better by small moves: one token of a rank to another place nearby, kept when the result is not longer, and
//! at first sometimes when it is (simulated annealing with numbers that are the same each time).

use super::draws::Draws;
use super::problem::{Kind, Length, Order, Problem, Timer, Token};

/// Furthest that a token moves.
const REACH: usize = 24;

/// How much longer an order may get at first, in shares of the shortest action.
const HEAT: f64 = 0.01;

/// The best order found within `budget` timed actions, and its length. None when `order` comes to a stop.
pub fn improve(problem: &Problem, order: Order, budget: u64) -> Option<(Length, Order)> {
    let mut timer = Timer::new(problem);
    let mut now = timer.length(&order, u64::MAX)?;
    let mut order = order;
    let mut best = (now, order.clone());
    let mut draws = Draws(1);
    let mut gaps = timer.gaps(&order);
    let bound = problem.bound_ns();
    // What the other spans add to the cost at least.
    let others = problem.least_ns();
    let heat = problem.times_ns.iter().flatten().copied().min().unwrap_or(0) as f64 * HEAT;
    while timer.work < budget && best.0.span_ns > bound {
        let rank = draws.below(problem.ranks);
        let Some((from, to)) = pick(&order[rank], &gaps[rank], &mut draws) else {
            timer.work += 1;
            continue;
        };
        shift(&mut order[rank], from, to);
        timer.work += order[rank].len() as u64 / 4;
        let left = budget.saturating_sub(timer.work) as f64 / budget as f64;
        let most = now.cost_ns(problem) + (heat * left * draws.rarity()) as u64;
        let length = sound(problem, rank, &order[rank]).then(|| timer.length(&order, most - others)).flatten();
        match length.filter(|length| length.cost_ns(problem) <= most) {
            Some(length) => {
                now = length;
                gaps = timer.gaps(&order);
                if now < best.0 {
                    best = (now, order.clone());
                }
            }
            None => shift(&mut order[rank], to, from),
        }
    }
    Some(best)
}

/// A token and its new place: most often one after a gap to before it.
fn pick(tokens: &[Token], gaps: &[usize], draws: &mut Draws) -> Option<(usize, usize)> {
    let reach = 1 + draws.below(REACH);
    let far = 1 + draws.below(reach);
    if !gaps.is_empty() && draws.below(2) == 0 {
        let to = gaps[draws.below(gaps.len())];
        let from = to + far;
        let weights = |at: &usize| tokens[*at].kind == Kind::W;
        let from = if draws.below(2) == 0 { (from..tokens.len()).find(weights)? } else { from };
        return (from < tokens.len()).then_some((from, to));
    }
    let from = draws.below(tokens.len());
    let to = if draws.below(2) == 0 { from + far } else { from.checked_sub(far)? };
    (to < tokens.len() && tokens[from] != tokens[to]).then_some((from, to))
}

fn shift(tokens: &mut [Token], from: usize, to: usize) {
    if from < to {
        tokens[from..=to].rotate_left(1);
    } else {
        tokens[to..=from].rotate_right(1);
    }
}

/// Whether every action of the rank comes after what it needs there, and no more is kept than may be.
fn sound(problem: &Problem, rank: usize, tokens: &[Token]) -> bool {
    let mut done = vec![[0usize; 3]; problem.chunks];
    let mut kept = 0usize;
    tokens.iter().all(|token| {
        let done = &mut done[usize::from(token.chunk)];
        done[token.kind as usize] += 1;
        match token.kind {
            Kind::F => kept += 1,
            Kind::I => {}
            Kind::W => kept = kept.saturating_sub(1),
        }
        done[0] >= done[1] && done[1] >= done[2] && kept <= problem.caps[rank]
    })
}
