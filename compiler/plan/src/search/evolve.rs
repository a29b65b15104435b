//! Rules made better: some at random, then small changes to the best, on a few islands that know nothing of each other.

use super::draws::Draws;
use super::list::{Rules, list};
use super::problem::{Length, Order, Problem, Timer};

/// Most populations.
const ISLANDS_MAX: u64 = 4;
/// Fewest orders that are worth a population of their own.
const TRIES_MIN: u64 = 48;
/// Rules that a population keeps.
const KEPT: usize = 8;
/// Most orders that an island makes.
const TRIES_MAX: u64 = 2500;
/// Parts of a rank's work with rules of their own.
const PARTS: usize = 6;

/// Which of what is there comes first; 4 and more go before a W that is due.
const PREFERENCES: [[[u8; 2]; 2]; 11] = [
    [[4, 5], [6, 7]],
    [[4, 5], [7, 6]],
    [[4, 7], [5, 6]],
    [[4, 6], [5, 7]],
    [[4, 6], [7, 5]],
    [[1, 2], [6, 7]],
    [[1, 2], [7, 6]],
    [[1, 5], [6, 7]],
    [[1, 5], [7, 6]],
    [[1, 7], [5, 6]],
    [[5, 4], [6, 7]],
];

/// An order with the rules that it comes from.
struct Member {
    length: Length,
    rules: Vec<Rules>,
    order: Order,
}

/// The best orders of all islands, best first, within `budget` listed actions: none if that is less than one order.
pub fn evolve(problem: &Problem, budget: u64) -> Vec<(Length, Order)> {
    let tries = budget / cost(problem);
    let islands = (tries / TRIES_MIN).clamp(1, ISLANDS_MAX);
    let bound = problem.bound_ns();
    let mut all: Vec<Member> = Vec::new();
    for island in 0..islands {
        let tries = (tries / islands).min(TRIES_MAX);
        all.extend(populate(problem, Draws(7 + 1000 * island), tries).into_iter().take(2));
        if all.iter().any(|member| member.length.span_ns <= bound) {
            break;
        }
    }
    all.sort_by_key(|member| member.length);
    all.into_iter().map(|member| (member.length, member.order)).collect()
}

/// Of one order: for each action all ranks are looked at.
pub fn cost(problem: &Problem) -> u64 {
    (problem.size() * (1 + problem.ranks / 16)) as u64
}

/// A quarter of the tries is random, a quarter changes whole rules, the rest changes their parts.
fn populate(problem: &Problem, mut draws: Draws, tries: u64) -> Vec<Member> {
    let mut timer = Timer::new(problem);
    let mut members: Vec<Member> = Vec::new();
    for number in 0..tries {
        let rules = if number < tries / 4 || members.is_empty() {
            vec![random(problem, &mut draws)]
        } else {
            let parent = &members[draws.below(members.len())].rules;
            let parts = if number < tries / 2 { 1 } else { PARTS };
            let mut rules: Vec<Rules> = (0..parts).map(|part| parent[part * parent.len() / parts]).collect();
            (0..1 + draws.below(3)).for_each(|_| change(&mut rules, &mut draws));
            rules
        };
        let made = list(problem, &rules).and_then(|order| Some((timer.length(&order, u64::MAX)?, order)));
        let Some((length, order)) = made else { continue };
        let full = members.len() == KEPT;
        if members.iter().any(|member| member.length == length) || full && length >= members[KEPT - 1].length {
            continue;
        }
        members.truncate(KEPT - 1);
        let at = members.partition_point(|member| member.length < length);
        members.insert(at, Member { length, rules, order });
    }
    members
}

fn random(problem: &Problem, draws: &mut Draws) -> Rules {
    const HOPS: [u64; 8] = [0, 5, 10, 10, 15, 20, 40, 80];
    let sloping = problem.chunks == 1 && draws.below(4) > 0;
    Rules {
        lead: [1 + draws.below(30), 10 + draws.below(50)],
        lag: [if sloping { draws.below(31) } else { 0 }, draws.below(25) * 10, draws.below(12) * 10],
        tail: draws.below(problem.microbatches),
        late: [draws.below(11), draws.below(11)],
        prefer: PREFERENCES[draws.below(PREFERENCES.len())],
        room: 1 + draws.below(4),
        hop: HOPS[draws.below(HOPS.len())],
    }
}

/// Changes one thing, in one part or in all.
fn change(rules: &mut [Rules], draws: &mut Draws) {
    let part = (draws.below(3) > 0).then(|| draws.below(rules.len()));
    let (what, by, side) = (draws.below(10), draws.below(1 << 20), draws.below(2));
    let prefer = PREFERENCES[draws.below(PREFERENCES.len())];
    let near = |value: usize, reach: usize| (value + by % (2 * reach + 1)).saturating_sub(reach);
    for rules in rules.iter_mut().enumerate().filter(|(at, _)| part.is_none_or(|part| part == *at)).map(|(_, r)| r) {
        match what {
            0 => rules.lead[0] = near(rules.lead[0], 2).max(1),
            1 => rules.lead[1] = near(rules.lead[1], 10),
            2 => rules.lag[0] = near(rules.lag[0], 3),
            3 => rules.lag[1] = near(rules.lag[1], 30),
            4 => rules.lag[2] = near(rules.lag[2], 30),
            5 => rules.tail = near(rules.tail, 2),
            6 => rules.late[side] = near(rules.late[side], 2).min(10),
            7 => rules.prefer = prefer,
            8 => rules.hop = near(rules.hop as usize, 5) as u64,
            _ => rules.room = near(rules.room, 2),
        }
    }
}
