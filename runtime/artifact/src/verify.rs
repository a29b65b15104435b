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
//! 8. *Transfers*: for each ordered pair of ranks, the sequences of sends and of receives are equal.
//! 9. *Deadlock freedom*: see [`execute`].
//!
//! Each is proved for any run length from the text of the streams: see [`index`] for relations between micro-batches of
//! a stage; sequences that repeat with the same step are equal when they agree over both beginnings and one repetition;
//! marks are fixed in the text, so two repetitions show every neighbourhood that they occur in. A run that ends, or
//! drains at a boundary, skips the instructions of micro-batches (updates) from its end on: each of the relations is
//! between instructions that are then both there, or asks nothing of one that is not.
//!
//! The work is linear in the program's size (for deadlocks: bounded), whatever the data: loaded bundles are verified
//! again.

pub mod execute;
pub mod index;

use crate::ids::{RankId, StageId};
use crate::stream::{Instr, Op, Program, Stream};
use execute::Stuck;
use index::{Index, Kind, Listing};
use std::collections::{BTreeMap, HashSet};

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
    #[error("transfers: rank {sender} does not send to rank {receiver} what that receives, from transfer {number} on")]
    Transfers { sender: RankId, receiver: RankId, number: usize },
    #[error("deadlock: {}", describe(.0))]
    Deadlock(Stuck),
}

/// Checks every invariant of the module's text.
///
/// # Errors
/// What is broken, at most one for each stage (or pair of ranks) and invariant. Later invariants build on earlier ones:
/// the first that is broken ends the check.
pub fn verify(program: &Program) -> Result<(), Vec<Violation>> {
    let found = |violations: Vec<Violation>| if violations.is_empty() { Ok(()) } else { Err(violations) };
    shape(program).map_err(|what| vec![Violation::Shape(what)])?;
    found(placement(program))?;
    let listings = Listing::of(program);
    let (stages, faults): (Vec<_>, Vec<_>) =
        listings.iter().enumerate().map(|(s, listing)| StageIndex::new(program, listing, s)).partition(Result::is_ok);
    found(faults.into_iter().filter_map(Result::err).collect())?;
    let stages: Vec<StageIndex> = stages.into_iter().flatten().collect();
    found(stages.iter().filter_map(StageIndex::order).collect())?;
    found((1..stages.len()).filter_map(|s| handover(program, &stages[s - 1], &stages[s])).collect())?;
    found(stages.iter().filter_map(|s| s.updates(program.accumulate)).collect())?;
    found(listings.iter().filter_map(accumulation).collect())?;
    found((0..stages.len()).filter_map(|s| rings(program, &stages, s)).collect())?;
    found(transfers(program))?;
    execute::deadlock_free(program).map_err(|stuck| vec![Violation::Deadlock(stuck)])
}

fn shape(program: &Program) -> Result<(), String> {
    let (ranks, stages) = (program.streams.len(), program.rank_of_stage.len());
    if ranks == 0 || stages == 0 {
        return Err("there are no ranks or no stages".into());
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
    let last = program.rank_of_stage.len() - 1;
    let wrong = |rank: RankId, i: &Instr| {
        let op = Kind::of(i.op);
        let why = match (program.rank_of_stage.get(i.stage.index()), op) {
            (None, _) => "does not exist",
            (Some(home), _) if *home != rank => "lies on another rank",
            (_, Kind::RecvF | Kind::SendB) if i.stage.index() == 0 => "is the first",
            (_, Kind::SendF | Kind::RecvB) if i.stage.index() == last => "is the last",
            (_, Kind::RecvF | Kind::SendB) if program.border_before(i.stage.index()).is_none() => {
                "has the stage before on the same rank"
            }
            (_, Kind::SendF | Kind::RecvB) if program.border_after(i.stage.index()).is_none() => {
                "has the next stage on the same rank"
            }
            _ => return None,
        };
        Some(Violation::Placement { rank, stage: i.stage, op, why })
    };
    let first_wrong =
        |(rank, s): (usize, &Stream)| s.prologue.iter().chain(&s.period).find_map(|i| wrong(RankId(rank as u32), i));
    program.streams.iter().enumerate().filter_map(first_wrong).collect()
}

/// Where each operation of a stage is performed.
pub struct StageIndex {
    pub stage: StageId,
    pub f: Index,
    /// Where the input gradient is made: B, or I when split.
    pub input_gradient: Index,
    /// Where the weight gradient is made: B, or W when split.
    pub weight_gradient: Index,
    pub update: Index,
    split: bool,
    recv_f: Option<Index>,
    send_f: Option<Index>,
    recv_b: Option<Index>,
    send_b: Option<Index>,
}

impl StageIndex {
    /// Indexes stage `s`, proving coverage. Shape and placement must hold.
    ///
    /// # Errors
    /// [`Violation::Coverage`].
    pub fn new(program: &Program, listing: &Listing, s: usize) -> Result<Self, Violation> {
        let stage = StageId(s as u32);
        let stream = &program.streams[program.rank_of_stage[s].index()];
        let index = |op| {
            let step = if op == Kind::U { stream.updates } else { stream.microbatches };
            Index::new(listing, op, step).map_err(|what| Violation::Coverage { stage, op, what })
        };
        let when = |there: bool, op| there.then(|| index(op)).transpose();
        let mut here = listing.instructions();
        let split = here.clone().any(|i| matches!(i.op, Op::I | Op::W(_)));
        if split && here.any(|i| matches!(i.op, Op::B(_))) {
            let what = "the backward pass is both whole and split".into();
            return Err(Violation::Coverage { stage, op: Kind::B, what });
        }
        let (before, after) = (program.border_before(s).is_some(), program.border_after(s).is_some());
        Ok(StageIndex {
            stage,
            f: index(Kind::F)?,
            input_gradient: index(if split { Kind::I } else { Kind::B })?,
            weight_gradient: index(if split { Kind::W } else { Kind::B })?,
            update: index(Kind::U)?,
            split,
            recv_f: when(before, Kind::RecvF)?,
            send_f: when(after, Kind::SendF)?,
            recv_b: when(after, Kind::RecvB)?,
            send_b: when(before, Kind::SendB)?,
        })
    }

    /// What makes the input gradient.
    fn backward(&self) -> Kind {
        if self.split { Kind::I } else { Kind::B }
    }

    fn order(&self) -> Option<Violation> {
        let backward = self.backward();
        let named = |kind: Kind, index: &Option<Index>| index.clone().map(|i| (kind, i));
        let f = (Kind::F, &self.f);
        let b = (backward, &self.input_gradient);
        let mut pairs = vec![(f, b)];
        if self.split {
            pairs.push((b, (Kind::W, &self.weight_gradient)));
        }
        let others = [
            named(Kind::RecvF, &self.recv_f),
            named(Kind::SendF, &self.send_f),
            named(Kind::RecvB, &self.recv_b),
            named(Kind::SendB, &self.send_b),
        ];
        for (kind, index) in others.iter().flatten() {
            pairs.push(match kind {
                Kind::RecvF => ((*kind, index), f),
                Kind::SendF => (f, (*kind, index)),
                Kind::RecvB => ((*kind, index), b),
                _ => (b, (*kind, index)),
            });
        }
        pairs.into_iter().find_map(|((first, before), (then, after))| {
            let mb = before.witnesses(after, 0).find(|m| before.at(*m) >= after.at(*m))?;
            Some(Violation::Order { stage: self.stage, first, mb, then, later_mb: mb })
        })
    }

    fn updates(&self, accumulate: u32) -> Option<Violation> {
        let k = u64::from(accumulate);
        let (w, u) = (&self.weight_gradient, &self.update);
        // An update that the prologue makes has its weight gradients there too, or the first of them that has not is
        // found wrong: the leads of U cost no more turns than those of W.
        (0..w.step()).find_map(|residue| {
            let turns = w.lead(residue).max(w.lead(residue + k)).max(u.lead(residue / k)) + 2;
            let witnesses = (0..=turns).map(|turn| residue + turn * w.step());
            let wrong = |m: &u64| w.at(*m) >= u.at(m / k) || u.at(m / k) >= w.at(m + k);
            let mb = { witnesses }.find(wrong)?;
            Some(Violation::Update { stage: self.stage, mb, update: mb / k })
        })
    }
}

/// Order between neighbouring stages that hand over: both are in one stream.
fn handover(program: &Program, lower: &StageIndex, upper: &StageIndex) -> Option<Violation> {
    if !program.hands_over(lower.stage.index()) {
        return None;
    }
    let pairs = [
        ((lower, Kind::F, &lower.f), (Kind::F, &upper.f)),
        ((upper, upper.backward(), &upper.input_gradient), (lower.backward(), &lower.input_gradient)),
    ];
    pairs.into_iter().find_map(|((stage, first, before), (then, after))| {
        let mb = before.witnesses(after, 0).find(|m| before.at(*m) >= after.at(*m))?;
        Some(Violation::Order { stage: stage.stage, first, mb, then, later_mb: mb })
    })
}

fn rings(program: &Program, stages: &[StageIndex], s: usize) -> Option<Violation> {
    let (rings, stage) = (&program.rings[s], &stages[s]);
    let (f, b, w) = (&stage.f, &stage.input_gradient, &stage.weight_gradient);
    // What is handed over is claimed by the instruction that writes it.
    let input = s.checked_sub(1).filter(|_| stage.recv_f.is_none()).map_or(f, |before| &stages[before].f);
    let output_gradient = program.hands_over(s).then(|| &stages[s + 1].input_gradient);
    let checks = [
        ("stash", rings.stash, Some((f, w))),
        ("recv_f", rings.recv_f, Some((stage.recv_f.as_ref().unwrap_or(input), w))),
        ("send_f", rings.send_f, stage.send_f.as_ref().map(|send| (f, send))),
        ("recv_b", rings.recv_b, stage.recv_b.as_ref().or(output_gradient).map(|claim| (claim, w))),
        ("send_b", rings.send_b, stage.send_b.as_ref().map(|send| (b, send))),
    ];
    checks.into_iter().find_map(|(ring, slots, users)| {
        let (claim, release) = users?;
        let distance = u64::from(slots);
        let taken = |m: &u64| release.at(*m) >= claim.at(m + distance);
        let mb = if slots == 0 { Some(0) } else { release.witnesses(claim, distance).find(taken) };
        mb.map(|m| Violation::Ring { stage: stage.stage, ring, slots, mb: m + distance })
    })
}

/// Neighbouring weight gradients and updates of a stage: `first` exactly after an update (or at the start), `last`
/// exactly before one.
fn accumulation(listing: &Listing) -> Option<Violation> {
    let again = listing.period.iter().map(|(_, i)| *i);
    let mut fresh = true;
    let mut before: Option<(bool, u32)> = None; // Marked `last`, and which
    for i in listing.instructions().chain(again) {
        let stage = i.stage;
        let (update, mark) = match i.op {
            Op::U => (true, None),
            Op::B(a) | Op::W(a) => (false, Some(a)),
            _ => continue,
        };
        if let Some((last, mb)) = before.take()
            && last != update
        {
            return Some(Violation::Accumulation { stage, mb });
        }
        if let Some(a) = mark {
            if a.first != fresh {
                return Some(Violation::Accumulation { stage, mb: i.mb });
            }
            before = Some((a.last, i.mb));
        }
        fresh = update;
    }
    None
}

/// What goes over an ordered pair of ranks: lower stage of the channel, direction, micro-batch.
type Sequence = (Vec<(u32, bool, u64)>, Vec<(u32, bool, u64)>);

fn transfers(program: &Program) -> Vec<Violation> {
    let (mut sends, mut receives) = (BTreeMap::<_, Sequence>::new(), BTreeMap::<_, Sequence>::new());
    for (rank, stream) in program.streams.iter().enumerate() {
        let rank = RankId(rank as u32);
        for (in_period, i) in stream.prologue.iter().map(|i| (false, i)).chain(stream.period.iter().map(|i| (true, i)))
        {
            let s = i.stage.0;
            let (lower, forward, send) = match i.op {
                Op::SendF => (s, true, true),
                Op::RecvF => (s - 1, true, false),
                Op::SendB => (s - 1, false, true),
                Op::RecvB => (s, false, false),
                _ => continue,
            };
            let other = program.rank_of_stage[if lower == s { s + 1 } else { lower } as usize];
            let (side, pair) = if send { (&mut sends, (rank, other)) } else { (&mut receives, (other, rank)) };
            let (prologue, period) = side.entry(pair).or_default();
            let list = if in_period { period } else { prologue };
            list.push((lower, forward, u64::from(i.mb)));
        }
    }
    let step = u64::from(program.streams[0].microbatches);
    let empty = Sequence::default();
    let mut pairs: Vec<_> = sends.keys().chain(receives.keys()).copied().collect();
    pairs.sort_unstable();
    pairs.dedup();
    let differ = |pair: &(RankId, RankId)| {
        let (s, r) = (sends.get(pair).unwrap_or(&empty), receives.get(pair).unwrap_or(&empty));
        let length = s.0.len().max(r.0.len()) + s.1.len();
        (0..length).find(|n| s.1.len() != r.1.len() || nth(s, *n, step) != nth(r, *n, step))
    };
    pairs
        .iter()
        .filter_map(|pair| differ(pair).map(|number| Violation::Transfers { sender: pair.0, receiver: pair.1, number }))
        .collect()
}

fn nth((prologue, period): &Sequence, n: usize, step: u64) -> Option<(u32, bool, u64)> {
    if let Some(entry) = prologue.get(n) {
        return Some(*entry);
    }
    let n = n - prologue.len();
    let turn = n.checked_div(period.len())?;
    let (lower, forward, mb) = period[n % period.len()];
    Some((lower, forward, mb + turn as u64 * step))
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
