//! The invariants of a build, checked on its result alone.
//!
//! A *lasting* buffer keeps its content from one body to another: parameters, states, accumulators, what the runtime reads or writes
//! (`StageIo`), and every argument that some body reads before it writes it (the stash). All others are temporaries.
//!
//! # Invariants
//!
//! 1. A call gives its kernel the arguments it takes: as many, each with exactly the bytes it touches.
//! 2. Every place is 64-byte aligned (a hyper-parameter vector 32) and ends within its rank's arena.
//! 3. Two lasting buffers of a rank do not overlap, in any slot.
//! 4. A temporary overlaps no lasting buffer.
//! 5. Within a body, a temporary is read as it was written last: no other write touched its bytes in between.
//! 6. Within a body, no call reads a weight, whichever version, or a state (but for U) after a call that updated it: a new version may take the
//!    place of the one that the body reads.
//! 7. Within a call, what is written overlaps no other argument. The newest version of a weight and the one after it are different slots
//!    of their ring, and so are weights and their prediction. Of weights with several versions an update writes the next one, all else reads that
//!    of its micro-batch or the newest; the two may be one slot where the kernel says so ([`shares`](crate::operands::Operand::shares)). Of weights with a prediction an update writes both, and nothing else does.
//! 8. The regions of a rank's memory sum to its total.
//! 9. No two kernels have the same operation and element type, or the same name.

use crate::arena::one;
use crate::build::Build;
use crate::kernel::Kernel;
use crate::operands::{Access, HYPER_BYTES};
use artifact::program::{Bodies, Call, Memory, Param, Place, Selector, Stage};
use std::collections::{BTreeSet, HashSet};
use std::ops::Range;

/// Checks every invariant of the module's text.
///
/// # Errors
/// A sentence about the first one that is broken: a fault of this crate.
pub fn verify(build: &Build) -> Result<(), String> {
    names(&build.kernels)?;
    for stage in &build.stages {
        let total = build.memory[stage.rank.index()].total;
        for (name, body) in bodies(&stage.bodies) {
            for (i, call) in body.iter().enumerate() {
                let at = |what: String| format!("stage {}, {name}, call {i}: {what}", stage.stage);
                arguments(&build.kernels, call, total).map_err(at)?;
            }
            let at = |what: String| format!("stage {}, {name}: {what}", stage.stage);
            weights_before_updates(&build.kernels, stage, body, name != "U").map_err(at)?;
        }
    }
    for (rank, memory) in build.memory.iter().enumerate() {
        regions(memory).map_err(|what| format!("rank {rank}: {what}"))?;
        let stages: Vec<&Stage> = build.stages.iter().filter(|s| s.rank.index() == rank).collect();
        overlaps(&build.kernels, &stages).map_err(|what| format!("rank {rank}: {what}"))?;
    }
    Ok(())
}

macro_rules! ensure {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err(format!($($message)+));
        }
    };
}

/// All bodies of a stage with their names; unused ones are empty.
pub fn bodies(bodies: &Bodies) -> Vec<(&'static str, &[Call])> {
    const B: [&str; 4] = ["B", "B(first)", "B(last)", "B(first, last)"];
    const W: [&str; 4] = ["W", "W(first)", "W(last)", "W(first, last)"];
    let mut list: Vec<(&str, &[Call])> = vec![("F", &bodies.f), ("I", &bodies.i), ("U", &bodies.u), ("N", &bodies.n)];
    list.extend(B.iter().zip(&bodies.b).map(|(&name, body)| (name, body.as_slice())));
    list.extend(W.iter().zip(&bodies.w).map(|(&name, body)| (name, body.as_slice())));
    list
}

fn names(kernels: &[Kernel]) -> Result<(), String> {
    let names: HashSet<&str> = kernels.iter().map(|k| k.name.as_str()).collect();
    let ops: HashSet<_> = kernels.iter().map(|k| (&k.op, k.dtype)).collect();
    ensure!(names.len() == kernels.len() && ops.len() == kernels.len(), "two kernels are equal or have one name");
    Ok(())
}

/// Arguments with what is done to each; scratch is written.
fn accesses<'a>(kernels: &[Kernel], call: &'a Call) -> Vec<(&'a Place, Access)> {
    let operands = kernels[call.kernel as usize].operands();
    let access = operands.into_iter().map(|o| o.access).chain([Access::Write]);
    call.args.iter().zip(access).collect()
}

fn arguments(kernels: &[Kernel], call: &Call, total: u64) -> Result<(), String> {
    let kernel = &kernels[call.kernel as usize];
    let name = &kernel.name;
    let ops = kernel.operands();
    let mut wanted: Vec<u64> = ops.iter().map(|o| o.bytes).collect();
    wanted.extend((kernel.scratch_bytes > 0).then_some(kernel.scratch_bytes));
    ensure!(call.args.len() == wanted.len(), "`{name}` gets {} arguments, not {}", call.args.len(), wanted.len());
    for (i, (place, bytes)) in call.args.iter().zip(wanted).enumerate() {
        ensure!(place.bytes == bytes, "`{name}` argument {i} has {} bytes, not {bytes}", place.bytes);
        let align = if bytes == HYPER_BYTES { HYPER_BYTES } else { 64 };
        ensure!(place.offset % align == 0 && place.stride % 64 == 0, "`{name}` argument {i} is not aligned");
        ensure!(place.slots > 0 && (place.slots == 1 || place.stride >= bytes), "`{name}` argument {i}: slots overlap");
        ensure!(slots(place).all(|s| s.end <= total), "`{name}` argument {i} ends outside the arena");
    }
    let list = accesses(kernels, call);
    for (i, (written, access)) in list.iter().enumerate() {
        let share = |j: usize| [i, j].iter().all(|&at| ops.get(at).is_some_and(|o| o.shares));
        let clash =
            |j: usize| j != i && !share(j) && !apart(written, list[j].0) && overlap(&range(written), &range(list[j].0));
        ensure!(!access.writes() || !(0..list.len()).any(clash), "`{name}` argument {i} overlaps another");
    }
    Ok(())
}

/// `states`: those too, since a correction may have the backward pass read one of them. U may come back to a state.
fn weights_before_updates(kernels: &[Kernel], stage: &Stage, body: &[Call], states: bool) -> Result<(), String> {
    let of = |p: &Param| -> Vec<Place> {
        let states = p.state.iter().filter(|_| states);
        states.chain([&p.weight]).chain(&p.copy).copied().collect()
    };
    let weights: HashSet<u64> = stage.params.iter().flat_map(of).map(|p| p.offset).collect();
    let mut updated = HashSet::new();
    for call in body {
        let all = accesses(kernels, call);
        for (place, access) in &all {
            ensure!(!updated.contains(&place.offset), "the weight at {} is used after its update", place.offset);
            let fits = match access {
                Access::Read => {
                    matches!(place.by, Selector::Seen | Selector::Newest | Selector::Here | Selector::Ahead)
                }
                Access::Write => matches!(place.by, Selector::Next | Selector::Ahead),
                Access::Update => place.by == Selector::Here,
            };
            let several = weights.contains(&place.offset) && place.slots > 1;
            ensure!(!several || fits, "the weight at {} is used by {:?}", place.offset, place.by);
        }
        updated.extend(all.iter().filter(|(p, a)| a.writes() && weights.contains(&p.offset)).map(|(p, _)| p.offset));
    }
    Ok(())
}

fn regions(m: &Memory) -> Result<(), String> {
    let sum = m.weights + m.optimizer + m.gradients + m.stash + m.activations + m.communication + m.workspace;
    ensure!(sum == m.total, "the regions sum to {sum}, not {}", m.total);
    Ok(())
}

/// Whether two arguments are different slots of one ring: the newest version of a weight and the one after it, or it and its prediction.
fn apart(a: &Place, b: &Place) -> bool {
    let pairs = [(Selector::Newest, Selector::Next), (Selector::Here, Selector::Ahead)];
    key(a) == key(b) && a.slots > 1 && pairs.iter().any(|&(x, y)| (a.by, b.by) == (x, y) || (a.by, b.by) == (y, x))
}

/// Bytes of the first slot.
fn range(place: &Place) -> Range<u64> {
    place.offset..place.offset + place.bytes
}

fn slots(place: &Place) -> impl Iterator<Item = Range<u64>> + '_ {
    (0..u64::from(place.slots)).map(|i| place.at(i)..place.at(i) + place.bytes)
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

type Key = (u64, u64, u64, u32);

fn key(p: &Place) -> Key {
    (p.offset, p.bytes, p.stride, p.slots)
}

fn overlaps(kernels: &[Kernel], stages: &[&Stage]) -> Result<(), String> {
    let declared: Vec<Key> = stages.iter().flat_map(|s| declared(s)).map(|p| key(&p)).collect();
    let mut lasting: BTreeSet<Key> = declared.iter().copied().collect();
    ensure!(lasting.len() == declared.len(), "two parameters or rings are one buffer");
    // Stages share their sums of squares: see `StageIo`.
    lasting.extend(stages.iter().flat_map(|s| [s.io.norm, s.io.total]).flatten().map(|p| key(&p)));
    // A hyper-parameter vector is a part of its buffer.
    let hyper: HashSet<u64> = stages
        .iter()
        .flat_map(|s| (0..s.io.hyper.bytes / HYPER_BYTES).map(|i| s.io.hyper.offset + i * HYPER_BYTES))
        .collect();
    let all: Vec<&[Call]> = stages.iter().flat_map(|s| bodies(&s.bodies)).map(|(_, body)| body).collect();
    for body in &all {
        let mut written = HashSet::new();
        for (place, access) in body.iter().flat_map(|c| accesses(kernels, c)) {
            if access.reads() && !written.contains(&key(place)) && !hyper.contains(&place.offset) {
                lasting.insert(key(place));
            }
            if access.writes() {
                written.insert(key(place));
            }
        }
    }
    let mut owned: Vec<Range<u64>> = Vec::new();
    for &(offset, bytes, stride, count) in &lasting {
        owned.extend(slots(&Place { stride, slots: count, ..one(offset, bytes) }));
    }
    owned.sort_by_key(|r| r.start);
    for pair in owned.windows(2) {
        ensure!(pair[0].end <= pair[1].start, "two lasting buffers share byte {}", pair[1].start);
    }
    all.iter().try_for_each(|body| temporaries(kernels, body, &lasting, &owned, &hyper))
}

/// Buffers that are lasting by what they are.
fn declared(stage: &Stage) -> Vec<Place> {
    let io = &stage.io;
    let optional = [io.tokens, io.targets, io.loss, io.recv_f, io.send_f, io.recv_b, io.send_b];
    let params = stage
        .params
        .iter()
        .flat_map(|p| p.state.iter().copied().chain([p.weight]).chain(p.copy).chain(p.gradient).chain(p.other_end));
    optional.into_iter().flatten().chain([io.hyper, io.version, io.version_seen]).chain(params).collect()
}

fn temporaries(
    kernels: &[Kernel],
    body: &[Call],
    lasting: &BTreeSet<Key>,
    owned: &[Range<u64>],
    hyper: &HashSet<u64>,
) -> Result<(), String> {
    let mut writes: Vec<&Place> = Vec::new();
    for (place, access) in body.iter().flat_map(|c| accesses(kernels, c)) {
        if lasting.contains(&key(place)) || hyper.contains(&place.offset) {
            continue;
        }
        let first = owned.partition_point(|o| o.end <= place.offset);
        let clear = owned.get(first).is_none_or(|o| !overlap(o, &range(place)));
        ensure!(clear, "the temporary at {} overlaps a lasting buffer", place.offset);
        if access.reads() {
            let last = writes.iter().rev().find(|w| overlap(&range(w), &range(place)));
            ensure!(last == Some(&place), "the temporary at {} was overwritten before it was read", place.offset);
        }
        if access.writes() {
            writes.push(place);
        }
    }
    Ok(())
}
