//! What a page and a trace show, as data: actions with the weights' versions and slots, the critical path, memory.

use super::letter;
use crate::driver::Analysed;
use artifact::stream::{Op, Policy};
use dsl::diag::Diagnostic;
use plan::critical::{Trace, Wait, trace};
use plan::time::Timed;
use serde::Serialize;
use std::collections::HashMap;

/// One schedule in time. Times are microseconds from the run's start.
#[derive(Clone, Debug, Serialize)]
pub struct Scene {
    pub schedule: String,
    pub file: String,
    pub accumulate: u32,
    pub updates: u64,
    pub end: f64,
    /// Of the worst rank, in steady state, 0..1.
    pub bubble: f64,
    /// Largest of any stage, in updates.
    pub drift: u64,
    pub delay: u64,
    /// Bounds of the spec that the schedule misses, a sentence each.
    pub beyond: Vec<String>,
    pub lanes: Vec<Lane>,
    /// In an order that respects all waits.
    pub actions: Vec<Action>,
    pub path: Vec<Step>,
}

/// A rank.
#[derive(Clone, Debug, Serialize)]
pub struct Lane {
    pub stages: Vec<usize>,
    pub bubble: f64,
    pub memory: Curve,
}

/// Memory of a rank over time: what is always held, and the stash of the micro-batches in flight. Without a model, their
/// number.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Curve {
    pub unit: Unit,
    pub fixed: u64,
    /// What the rank has in all: the arena, or the most in flight.
    pub limit: u64,
    /// (time, in use from then on), the times ascending.
    pub points: Vec<(f64, u64)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    Bytes,
    Microbatches,
}

/// A compute instruction.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Action {
    pub rank: u32,
    pub stage: u32,
    /// F, B, I, W or U.
    pub op: &'static str,
    /// Micro-batch; the update for U.
    pub mb: u64,
    /// Of the stash; U has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slot: Option<u64>,
    /// Updates that the weights have had which F, B and I read and W adds a gradient for; for U, which it makes.
    pub version: u64,
    pub start: f64,
    pub end: f64,
}

/// An action of the critical path.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Step {
    pub action: usize,
    pub wait: &'static str,
}

impl Scene {
    /// Runs `updates` updates of an analysed spec; `found` are its diagnostics.
    pub fn new(file: &str, analysed: &Analysed, found: &[Diagnostic], updates: u64) -> Scene {
        let Trace { events, path } = trace(&analysed.program, &analysed.costs, updates);
        let facts = &analysed.facts;
        let lane = |rank: usize| Lane {
            stages: analysed.stages_of(rank),
            bubble: facts.ranks[rank].bubble,
            memory: curve(analysed, rank, &events),
        };
        Scene {
            schedule: analysed.spec.schedule.name.clone(),
            file: file.to_owned(),
            accumulate: analysed.program.accumulate,
            updates,
            end: us(events.iter().map(|e| e.end_ns).max().unwrap_or(0)),
            bubble: facts.ranks.iter().map(|r| r.bubble).fold(0.0, f64::max),
            drift: facts.stages.iter().map(|s| s.drift.max).max().unwrap_or(0),
            delay: facts.stages.iter().map(|s| s.delay.max).max().unwrap_or(0),
            beyond: found.iter().filter(|d| d.is_error()).map(|d| d.message.clone()).collect(),
            lanes: (0..analysed.program.streams.len()).map(lane).collect(),
            actions: actions(analysed, &events),
            path: path.iter().map(|s| Step { action: s.event, wait: wait(s.wait) }).collect(),
        }
    }
}

fn us(ns: u64) -> f64 {
    ns as f64 / 1000.0
}

fn wait(wait: Wait) -> &'static str {
    match wait {
        Wait::Nothing => "begins at once",
        Wait::Rank => "waits for its rank",
        Wait::Input => "waits for its input",
        Wait::Post => "waits for its input, whose receive was posted late",
        Wait::Slot => "waits for its send slot",
    }
}

fn actions(analysed: &Analysed, events: &[Timed]) -> Vec<Action> {
    // Updates made so far, by stage, and what F of each micro-batch read: a rank's events are in its order.
    let mut versions = vec![0; analysed.program.rank_of_stage.len()];
    let mut seen = HashMap::new();
    let k = u64::from(analysed.program.accumulate);
    let mut actions = Vec::with_capacity(events.len());
    for event in events {
        let Some(op) = letter(event.op) else { continue };
        let made = &mut versions[event.stage.index()];
        *made += u64::from(event.op == Op::U);
        let version = match (analysed.program.policy, event.op) {
            (_, Op::U) | (Policy::Current | Policy::Recomputed | Policy::Predicted, _) | (Policy::Stash, Op::F) => {
                *made
            }
            (Policy::Stash, _) => seen.get(&(event.stage, event.mb)).copied().unwrap_or(*made),
            (Policy::DoubleBuffer, _) => (event.mb / k).saturating_sub(1),
        };
        if event.op == Op::F {
            seen.insert((event.stage, event.mb), version);
        }
        let slots = u64::from(analysed.program.rings[event.stage.index()].stash.max(1));
        actions.push(Action {
            rank: event.rank.0,
            stage: event.stage.0,
            op,
            mb: event.mb,
            slot: (event.op != Op::U).then_some(event.mb % slots),
            version,
            start: us(event.start_ns),
            end: us(event.end_ns),
        });
    }
    actions
}

/// Bytes of one slot of each of the rank's stashes, by stage. They lie one after the other, each begins with the version that F
/// saw.
fn slot_bytes(analysed: &Analysed, rank: usize) -> Option<Vec<(usize, u64)>> {
    let build = analysed.build.as_ref()?;
    let stages = analysed.stages_of(rank);
    let begin = |stage: usize| build.stages[stage].io.version_seen.offset;
    let end = begin(*stages.first()?) + build.memory[rank].stash;
    let bytes = stages.iter().enumerate().map(|(i, &stage)| {
        let next = stages.get(i + 1).map_or(end, |s| begin(*s));
        (stage, (next - begin(stage)) / u64::from(build.stages[stage].io.version_seen.slots.max(1)))
    });
    Some(bytes.collect())
}

/// A micro-batch's slot is held from the start of F to the end of B or W.
fn curve(analysed: &Analysed, rank: usize, events: &[Timed]) -> Curve {
    let slots = slot_bytes(analysed, rank);
    let of = |stage: usize| slots.as_ref().map_or(1, |s| s.iter().find(|(at, _)| *at == stage).map_or(0, |(_, b)| *b));
    let (unit, fixed, limit) = match &analysed.build {
        Some(build) => (Unit::Bytes, build.memory[rank].total - build.memory[rank].stash, build.memory[rank].total),
        None => (Unit::Microbatches, 0, analysed.facts.ranks[rank].in_flight_max.into()),
    };
    let mut points = vec![(0, fixed)];
    let mut held = fixed;
    for event in events.iter().filter(|e| e.rank.index() == rank) {
        let ns = match event.op {
            Op::F => {
                held += of(event.stage.index());
                event.start_ns
            }
            Op::B(_) | Op::W(_) => {
                held -= of(event.stage.index());
                event.end_ns
            }
            _ => continue,
        };
        // Of what happens at one time, the last is what holds from then on.
        match points.last_mut().filter(|(at, _)| *at == ns) {
            Some(last) => last.1 = held,
            None => points.push((ns, held)),
        }
    }
    Curve { unit, fixed, limit, points: points.into_iter().map(|(ns, value)| (us(ns), value)).collect() }
}
