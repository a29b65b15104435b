//! The steady state of a run without end: how long a repetition takes, exactly.
//!
//! # Meaning
//!
//! The ranks' repetitions, in an order that respects all waits ([`Window`]), are timed one after the other. How a turn
//! goes depends on its *state* alone: when each rank is free, and when those transfers were there that the turn waits for
//! and that began before it. A state that is later by some time makes a turn that is later by that time. So when a
//! state is the one of `q` turns before, later by `t`, and so were as many states before it as the longest wait reaches
//! back in turns, every later one is: `q` repetitions take `t`, for ever, whatever they began with.
//!
//! Most schedules come to that in two or three turns. Those that do not, or whose ranks do not all come to the same
//! pace, are solved by [`cycles`].

mod cycles;

use crate::time::{Clock, Costs, Side, Timed};
use artifact::stream::{Program, Stream};
use artifact::verify::execute::Window;
use artifact::verify::prove;
use artifact::work;

/// Time of a repetition in the steady state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Steady {
    /// Time of `repetitions` repetitions, in lowest terms.
    pub total_ns: u64,
    /// At least 1.
    pub repetitions: u64,
    /// Whether the ratio is known to be the largest; else it is a lower bound.
    pub exact: bool,
    /// By rank: work in one repetition.
    pub busy_ns: Vec<u64>,
}

impl Steady {
    /// Time of one repetition, rounded up.
    pub fn period_ns(&self) -> u64 {
        self.total_ns.div_ceil(self.repetitions)
    }

    /// The largest bubble of a rank.
    pub fn worst(&self) -> f64 {
        (0..self.busy_ns.len()).map(|rank| self.bubble(rank)).fold(0.0, f64::max)
    }

    /// 1 - work/period of a rank.
    pub fn bubble(&self, rank: usize) -> f64 {
        let work = self.busy_ns[rank] as f64 * self.repetitions as f64;
        if self.total_ns == 0 { 0.0 } else { 1.0 - work / self.total_ns as f64 }
    }
}

/// Finds the steady state. None when the program does not verify.
pub fn steady(program: &Program, costs: &Costs) -> Option<Steady> {
    Pace::new(program, &prove(program).ok()?.window, costs).steady()
}

/// Most instructions that are timed, and turns however few they are.
const TIMED_MAX: u64 = 1 << 22;
const TURNS: std::ops::Range<u64> = 8..1024;
/// Times beyond this are left to [`cycles`], which computes in more bits.
const NS_MAX: u64 = 1 << 62;

/// Turns being timed.
pub(crate) struct Pace<'a> {
    program: &'a Program,
    window: &'a Window,
    costs: &'a Costs,
    clock: Clock<'a>,
    /// The first turn: so late that every micro-batch has one before it in each send slot.
    from: u64,
    turns: u64,
    /// What the first turn waits for that began before it.
    carried: Vec<Side>,
}

impl<'a> Pace<'a> {
    /// `window` is that of `program`.
    pub fn new(program: &'a Program, window: &'a Window, costs: &'a Costs) -> Self {
        let step = u64::from(program.streams[0].microbatches);
        let slots = program.rings.iter().map(|r| u64::from(r.send_f.max(r.send_b))).max().unwrap_or(0);
        let from = slots.div_ceil(step);
        let clock = Clock::new(program, costs, (from * step - slots, from * u64::from(program.streams[0].updates)));
        Pace { program, window, costs, clock, from, turns: 0, carried: Vec::new() }
    }

    /// Times the next turn and shows its instructions.
    pub fn turn(&mut self, mut see: impl FnMut(&Timed)) {
        let (clock, carried, first) = (&mut self.clock, &mut self.carried, self.turns == 0);
        self.window.perform(self.program, self.from + self.turns, |event| {
            if first {
                carried.extend(clock.carried(event));
            }
            let (start_ns, end_ns) = clock.time(event);
            see(&Timed::new(event, start_ns, end_ns));
        });
        self.turns += 1;
    }

    /// When each rank is free and the carried sides were there, at the beginning of the next turn; none if not all
    /// began in a turn.
    fn state(&self) -> Option<Vec<u64>> {
        if self.turns == 0 {
            return None;
        }
        let later = |side: &Side| self.clock.later(*side, self.turns);
        let sides = self.carried.iter().map(|side| self.clock.side_ns(later(side)));
        self.clock.free_ns.iter().map(|ns| Some(*ns)).chain(sides).collect()
    }

    /// The steady state, after turns or none.
    pub fn steady(mut self) -> Option<Steady> {
        let busy = |s: &Stream| s.period.iter().fold(0u64, |sum, i| sum.saturating_add(self.costs.of(i.op, i.stage)));
        let busy_ns = self.program.streams.iter().map(busy).collect();
        work::visit(self.program.streams.iter().map(|s| s.period.len()).sum());
        if let Some((total_ns, repetitions)) = self.settle() {
            return Some(Steady { total_ns, repetitions, exact: true, busy_ns });
        }
        let (total_ns, repetitions, exact) = cycles::slowest(self.program, self.costs)?;
        Some(Steady { total_ns, repetitions, exact, busy_ns })
    }

    /// Time of so many repetitions, once it is the same for ever.
    fn settle(&mut self) -> Option<(u64, u64)> {
        let size: usize = self.program.streams.iter().map(|s| s.period.len()).sum();
        let most = (TIMED_MAX / size.max(1) as u64).clamp(TURNS.start, TURNS.end);
        // States whose carried sides all began in a turn that was timed: the longest wait reaches back from the first.
        let (mut states, mut reach) = (Vec::new(), 0);
        loop {
            if let Some(state) = self.state() {
                if states.is_empty() {
                    reach = self.turns as usize;
                }
                if state.iter().any(|ns| *ns > NS_MAX) {
                    return None;
                }
                states.push(state);
                if let Some((total_ns, turns)) = repeats(&states, reach) {
                    return Some(lowest(total_ns, turns));
                }
            }
            if self.turns >= most {
                return None;
            }
            self.turn(|_| ());
        }
    }
}

/// How much later the last states are than those of how many turns before.
fn repeats(states: &[Vec<u64>], reach: usize) -> Option<(u64, u64)> {
    let last = states.len() - 1;
    (1..=last).find_map(|turns| {
        let later = states[last][0].checked_sub(states[last - turns][0])?;
        let same = |back: usize| {
            let earlier = states.get((last - back).checked_sub(turns)?)?;
            states[last - back].iter().zip(earlier).all(|(a, b)| a.checked_sub(*b) == Some(later)).then_some(())
        };
        (0..reach.min(last + 1)).all(|back| same(back).is_some()).then_some((later, turns as u64))
    })
}

/// The same ratio in lowest terms.
fn lowest(time: u64, turns: u64) -> (u64, u64) {
    let (mut a, mut b) = (time, turns);
    while b != 0 {
        (a, b) = (b, a % b);
    }
    (time / a.max(1), turns / a.max(1))
}
