//! Runs blocks: which thread is next, and what it waits for.

use crate::checks::{Memory, Shared};
use crate::ffi::{Fiber, Stack, Stage};
use crate::map::Module;
use crate::tensor::{WORDS, Words};
use crate::{Fault, Launch, Order, WARP};

/// What a thread does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    Ready,
    /// It waits at a barrier, known by its place in the code.
    Barrier(u32),
    /// It waits for its warp, at a place in the code.
    Warp(u32),
    Ended,
}

/// The threads of the block that runs, as their fibers see it.
pub struct State<'m, 'a> {
    pub block: [u32; 3],
    /// The block's number in the grid.
    pub number: u32,
    pub current: usize,
    pub statuses: Vec<Status>,
    /// What each thread gave for its warp, and what the warps got last.
    pub given: Vec<Words>,
    pub delivered: Vec<Words>,
    pub memory: &'m mut Memory<'a>,
    pub shared: Shared,
    pub constants: std::ops::Range<usize>,
    /// Set by the thread that did wrong.
    pub wrong: Option<String>,
}

/// Runs one launch of a kernel.
///
/// # Errors
///
/// The first fault; operands are then in an unknown state.
pub fn launch(module: &Module, launch: &Launch, memory: &mut Memory, order: Order) -> Result<(), Fault> {
    let fault = |what: String| Fault { entry: launch.entry.into(), block: [0; 3], thread: None, what };
    let entry = module.entry(launch.entry).ok_or_else(|| fault("the module does not have it".into()))?;
    let threads = launch.threads as usize;
    if threads == 0 || !threads.is_multiple_of(WARP) {
        return Err(fault(format!("a block of {threads} threads is not whole warps")));
    }
    let table = memory.begin();
    let [x, y, z] = launch.grid;
    let mut blocks: Vec<_> = (0..z).flat_map(|z| (0..y).flat_map(move |y| (0..x).map(move |x| [x, y, z]))).collect();
    let mut chooser = Chooser::new(order);
    chooser.mix(&mut blocks);
    let mut stage = Stage::new(State {
        block: [0; 3],
        number: 0,
        current: 0,
        statuses: vec![Status::Ready; threads],
        given: vec![[0; WORDS]; threads],
        delivered: vec![[0; WORDS]; threads],
        memory,
        shared: Shared::new(module.shared()),
        constants: module.constants(),
        wrong: None,
    });
    let mut stacks: Vec<Stack> = Vec::new();
    for block in blocks {
        stage.with(|state| {
            state.block = block;
            state.number = (block[2] * y + block[1]) * x + block[0];
            state.statuses.fill(Status::Ready);
            state.shared.next_block();
        });
        let mut fibers: Vec<_> =
            (0..threads).map(|thread| stage.fiber(entry, &table, thread, stacks.pop().unwrap_or_default())).collect();
        let done = run(&mut stage, &mut fibers, &mut chooser);
        done.map_err(|(thread, what)| Fault { entry: launch.entry.into(), block, thread, what })?;
        stacks.extend(fibers.into_iter().filter_map(Fiber::into_stack));
    }
    Ok(())
}

type Wrong = (Option<usize>, String);

/// Runs a block to its end.
fn run(stage: &mut Stage, fibers: &mut [Fiber], chooser: &mut Chooser) -> Result<(), Wrong> {
    let mut turn: Vec<_> = (0..fibers.len()).collect();
    loop {
        chooser.mix(&mut turn);
        for &thread in &turn {
            if !stage.with(|state| {
                state.current = thread;
                state.statuses[thread] == Status::Ready
            }) {
                continue;
            }
            let ended = stage.resume(&mut fibers[thread]);
            stage.with(|state| {
                if ended {
                    state.statuses[thread] = Status::Ended;
                }
                state.wrong.take().map_or(Ok(()), |wrong| Err((Some(thread), wrong)))
            })?;
        }
        if stage.with(meet)? {
            return Ok(());
        }
    }
}

/// Lets those go on who have met; true when all threads have ended.
fn meet(state: &mut State) -> Result<bool, Wrong> {
    let mut met = false;
    let all = state.statuses.len();
    for first in (0..all).step_by(WARP) {
        let warp = first..first + WARP;
        let place = state.statuses[warp.clone()].iter().find_map(|s| matches!(s, Status::Warp(_)).then_some(*s));
        let Some(place) = place else { continue };
        if let Some(other) = warp.clone().find(|t| state.statuses[*t] != place) {
            let what = format!("the warp's lanes are not together: {place:?}, {:?}", state.statuses[other]);
            return Err((Some(other), what));
        }
        state.delivered[warp.clone()].copy_from_slice(&state.given[warp.clone()]);
        state.statuses[warp].fill(Status::Ready);
        met = true;
    }
    if met {
        return Ok(false);
    }
    let first = state.statuses[0];
    if let Some(other) = (0..all).find(|t| state.statuses[*t] != first) {
        let what = format!("thread 0 and this one are not at the same barrier: {first:?}, {:?}", state.statuses[other]);
        return Err((Some(other), what));
    }
    if first == Status::Ended {
        return Ok(true);
    }
    state.statuses.fill(Status::Ready);
    state.shared.next_epoch();
    Ok(false)
}

/// Puts things in the order that was asked for.
struct Chooser {
    state: Option<u64>,
}

impl Chooser {
    fn new(order: Order) -> Self {
        match order {
            Order::Ascending => Self { state: None },
            Order::Random(seed) => Self { state: Some(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1) },
        }
    }

    fn mix<T>(&mut self, items: &mut [T]) {
        let Some(state) = &mut self.state else { return };
        for last in (1..items.len()).rev() {
            *state ^= *state << 13;
            *state ^= *state >> 7;
            *state ^= *state << 17;
            items.swap(last, (*state % (last as u64 + 1)) as usize);
        }
    }
}
