//! The stream verifier: what must hold of a program for runs of any length.
//!
//! # Invariants
//!
//! 1. *Shape*: there are ranks and stages; every stage lies on a rank that exists, and every rank has a stage;
//!    `accumulate` is at least 1; every rank's repetition makes the same number of updates, at least 1, of `accumulate`
//!    micro-batches each.
//! 2. *Placement*: an instruction's stage lies on the rank of its stream. Transfers exist exactly between neighbouring
//!    stages on different ranks: no `RECV_F` or `SEND_B` on the first stage, no `SEND_F` or `RECV_B` on the last, and none
//!    between stages that hand over.
//! 3. *Coverage*: each stage performs each micro-batch exactly once forward and once backward (`B`, or `I` and `W`),
//!    with one send and one receive on each side that has a neighbour on another rank, and each update exactly once.
//! 4. *Order*: on a stage and for each micro-batch, `RECV_F`, `F`, `SEND_F` come in this order, then `B` (`I`, then
//!    `W`) after `F` and after `RECV_B`, and `SEND_B` after `B` (`I`). Where stages hand over, `F` of the lower comes before
//!    `F` of the upper, and `B` (`I`) of the upper before that of the lower.
//! 5. *Updates*: update `u` comes after the weight gradients of all its micro-batches `uK .. uK + K` and before that of
//!    any later micro-batch.
//! 6. *Accumulation*: of an update's weight gradients the first performed is marked `first`, the last performed `last`,
//!    no other one.
//! 7. *Rings*: micro-batch `m` finds its slot `m mod n` free: the user of the slot before it, `m - n`, released it
//!    earlier in the same stream (stash, receive rings: a posted receive never waits, and what is handed over neither), or
//!    was offered earlier (send rings). A ring that has a user has a slot.
//! 8. *Versions*: F and B (`I`) of every micro-batch read a version of the weights that is made by then, and that no later
//!    version has begun to overwrite: see [`versions`]. There is more than one slot only where the policy reads older versions.
//! 9. *Tied tables*: both ends' passes of a micro-batch read the same version, and every update of the table takes both ends'
//!    gradients of its micro-batches, all of them and no other: see [`exchange`].
//! 10. *Norm*: every update reads the sum of squares of all stages' gradients of its micro-batches, each once: see [`norm`].
//! 11. *Transfers*: for each ordered pair of ranks, the sequences of sends and of receives are equal.
//! 12. *Deadlock freedom*: see [`execute`].
//!
//! Each is proved for any run length from the text of the streams: see [`index`] for relations between micro-batches of
//! a stage; sequences that repeat with the same step are equal when they agree over both beginnings and one repetition;
//! marks are fixed in the text, so two repetitions show every neighbourhood that they occur in. A run that ends, or
//! drains at a boundary, skips the instructions of micro-batches (updates) from its end on: each of the relations is
//! between instructions that are then both there, or asks nothing of one that is not.
//!
//! The work is linear in the program's size (for deadlocks: bounded), whatever the data: loaded bundles are verified
//! again.

mod exchange;
pub mod execute;
pub mod index;
mod norm;
mod stage;
mod transfers;
pub mod versions;

use crate::ids::{RankId, StageId};
use crate::stream::{Instr, Program, Stream};
use crate::work;
use execute::{Stuck, Window};
use index::{Kind, Places};
use std::collections::HashSet;
use versions::{Missing, Versions};

pub use stage::StageIndex;

/// A broken invariant, by the numbers of the module's text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    #[error("shape: {0}")]
    Shape(String),
    #[error("placement: rank {rank} performs {} of stage {stage}, which {why}", .op.name())]
    Placement { rank: RankId, stage: StageId, op: Kind, why: &'static str },
    #[error("coverage: {} on stage {stage}: {what}", .op.name())]
    Coverage { stage: StageId, op: Kind, what: String },
    #[error("order: stage {stage}: {} of {mb} does not come before {} of {later_mb}", .first.name(), .then.name())]
    Order { stage: StageId, first: Kind, mb: u64, then: Kind, later_mb: u64 },
    #[error(
        "update: stage {stage}: the weight gradient of micro-batch {mb} and update {update} are in the wrong order"
    )]
    Update { stage: StageId, mb: u64, update: u64 },
    #[error("accumulation: stage {stage}: the weight gradient of micro-batch {mb} is marked wrongly")]
    Accumulation { stage: StageId, mb: u32 },
    #[error("ring: stage {stage}: ring {ring} of {slots} slots: micro-batch {mb} finds its slot taken")]
    Ring { stage: StageId, ring: &'static str, slots: u32, mb: u64 },
    #[error(
        "versions: stage {stage}: {} of {} reads version {} of the weights, with {} made, {} begun and {slots} kept",
        .missing.op.name(), .missing.mb, .missing.version, .missing.made, .missing.begun
    )]
    Version { stage: StageId, slots: u32, missing: Missing },
    #[error(
        "tied table: {} of micro-batch {mb} reads version {} of the table on stage {}, and version {} on stage {}",
        .op.name(), .versions[0], .stages[0], .versions[1], .stages[1]
    )]
    Apart { stages: [StageId; 2], op: Kind, mb: u64, versions: [i64; 2] },
    #[error("update: stage {stage}: {} of update {update} {what}", .op.name())]
    Exchange { stage: StageId, op: Kind, update: u64, what: &'static str },
    #[error("transfers: rank {sender} does not send to rank {receiver} what that receives, from transfer {number} on")]
    Transfers { sender: RankId, receiver: RankId, number: usize },
    #[error("deadlock: {}", describe(.0))]
    Deadlock(Stuck),
}

/// Checks every invariant of the module's text.
///
/// # Errors
/// As [`prove`].
pub fn verify(program: &Program) -> Result<(), Vec<Violation>> {
    prove(program).map(|_| ())
}

/// What a proof found out about its program.
#[derive(Clone, Debug)]
pub struct Proved {
    pub places: Places,
    pub window: Window,
    /// Instructions visited to find it, and by what made the program where that is counted too: see [`work`].
    pub visited: u64,
}

/// Checks every invariant of the module's text.
///
/// # Errors
/// What is broken, at most one for each stage (or pair of ranks) and invariant. Later invariants build on earlier ones:
/// the first that is broken ends the check.
pub fn prove(program: &Program) -> Result<Proved, Vec<Violation>> {
    let (proved, visited) = work::counted(|| checked(program));
    proved.map(|(places, window)| Proved { places, window, visited })
}

fn checked(program: &Program) -> Result<(Places, Window), Vec<Violation>> {
    let found = |violations: Vec<Violation>| if violations.is_empty() { Ok(()) } else { Err(violations) };
    shape(program).map_err(|what| vec![Violation::Shape(what)])?;
    found(placement(program))?;
    let places = Places::new(program)?;
    let stages: Vec<StageIndex> =
        (0..program.rank_of_stage.len()).map(|s| StageIndex::new(program, &places, s)).collect();
    found(stages.iter().filter_map(StageIndex::order).collect())?;
    found((1..stages.len()).filter_map(|s| stage::handover(program, &stages[s - 1], &stages[s])).collect())?;
    found(stages.iter().filter_map(|s| s.updates(program.accumulate)).collect())?;
    found(stage::accumulation(program))?;
    found((0..stages.len()).filter_map(|s| stage::rings(program, &stages, s)).collect())?;
    let versions = Versions::of(program, &stages);
    found(versions::check(program, &versions))?;
    found(exchange::check(program, &stages, &versions).into_iter().collect())?;
    found(norm::check(program, &stages).into_iter().collect())?;
    found(transfers::check(program))?;
    let deadlock = |stuck| vec![Violation::Deadlock(stuck)];
    let window = execute::deadlock_free(program, &places).map_err(deadlock)?;
    Ok((places, window))
}

fn shape(program: &Program) -> Result<(), String> {
    let (ranks, stages) = (program.streams.len(), program.rank_of_stage.len());
    if ranks == 0 || stages == 0 {
        return Err("there are no ranks or no stages".into());
    }
    if program.copies == 0 || !stages.is_multiple_of(program.copies as usize) {
        return Err(format!("{} copies of the stages in {stages} stages", program.copies));
    }
    if program.rings.len() != stages {
        return Err(format!("{} sets of rings for {stages} stages", program.rings.len()));
    }
    if let Some(rank) = program.rank_of_stage.iter().find(|r| r.index() >= ranks) {
        return Err(format!("a stage lies on rank {rank} of {ranks}"));
    }
    let used: HashSet<usize> = program.rank_of_stage.iter().map(|r| r.index()).collect();
    if let Some(rank) = (0..ranks).find(|r| !used.contains(r)) {
        return Err(format!("rank {rank} has no stage"));
    }
    let (first, k) = (&program.streams[0], u64::from(program.accumulate));
    if k == 0 || first.updates == 0 || u64::from(first.microbatches) != k * u64::from(first.updates) {
        return Err(format!(
            "a repetition makes {} updates of {k} micro-batches from {} micro-batches",
            first.updates, first.microbatches
        ));
    }
    let same = |s: &Stream| (s.microbatches, s.updates) == (first.microbatches, first.updates);
    match program.streams.iter().position(|s| !same(s)) {
        Some(rank) => Err(format!("rank {rank} repeats with another step than rank 0")),
        None => Ok(()),
    }
}

fn placement(program: &Program) -> Vec<Violation> {
    let wrong = |rank: RankId, i: &Instr| {
        let op = Kind::of(i.op);
        let why = match (program.rank_of_stage.get(i.stage.index()), op) {
            (None, _) => "does not exist",
            (Some(home), _) if *home != rank => "lies on another rank",
            (_, Kind::RecvF | Kind::SendB) if program.before(i.stage.index()).is_none() => "is the first",
            (_, Kind::SendF | Kind::RecvB) if program.after(i.stage.index()).is_none() => "is the last",
            (_, Kind::RecvF | Kind::SendB) if program.border_before(i.stage.index()).is_none() => {
                "has the stage before on the same rank"
            }
            (_, Kind::SendF | Kind::RecvB) if program.border_after(i.stage.index()).is_none() => {
                "has the next stage on the same rank"
            }
            (_, Kind::SendG | Kind::RecvG) if program.partner(i.stage.index()).is_none() => {
                "has no end of a tied table on another rank"
            }
            (_, kind) => {
                return norm(program, i.stage.index(), kind).map(|why| Violation::Placement {
                    rank,
                    stage: i.stage,
                    op,
                    why,
                });
            }
        };
        Some(Violation::Placement { rank, stage: i.stage, op, why })
    };
    work::visit(program.instructions());
    let first_wrong =
        |(rank, s): (usize, &Stream)| s.prologue.iter().chain(&s.period).find_map(|i| wrong(RankId(rank as u32), i));
    program.streams.iter().enumerate().filter_map(first_wrong).collect()
}

/// Why a stage doesn't perform an instruction of the norm's exchange; none if it does, and for every other kind.
fn norm(program: &Program, s: usize, kind: Kind) -> Option<&'static str> {
    let (before, after) = match kind {
        Kind::N => (false, false),
        Kind::T | Kind::SendN | Kind::RecvT => (false, true),
        Kind::RecvN | Kind::SendT => (true, false),
        _ => return None,
    };
    if !program.norms() {
        return Some("has updates that need no norm");
    }
    if after && program.after(s).is_none() {
        return Some("is the last");
    }
    if before && program.before(s).is_none() {
        return Some("is the first");
    }
    let wrong =
        before && program.border_before(s).is_none() || after && kind != Kind::T && program.border_after(s).is_none();
    wrong.then_some("has the neighbour on the same rank")
}

fn describe(stuck: &Stuck) -> String {
    match stuck {
        Stuck::Unproved => "no proof was found that ranks do not wait for each other for ever".into(),
        Stuck::Cycle(cycle) => {
            let waits: Vec<String> = cycle
                .iter()
                .map(|w| {
                    let op = Kind::of(w.op).name();
                    format!("rank {} in {op} {} waits for rank {}", w.rank, w.mb, w.cause.rank())
                })
                .collect();
            waits.join(", ")
        }
    }
}
