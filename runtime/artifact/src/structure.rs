//! Structural invariants of a bundle: what the runtime relies on without looking again.
//!
//! # Invariants
//!
//! 1. *Counts agree*: one stage, ring set, image, proved drift, proved delay and correction (if any is made) for each
//!    stage; one stream, memory map and proved bubble for each rank; stage `i` is listed at `i`, on the rank that the program says.
//! 2. *Streams*: each repetition makes at least one update and `accumulate` micro-batches for each; an instruction's stage
//!    lives on the stream's rank.
//! 3. *Places*: 64-byte aligned, inside the arena of the rank, slots of a ring apart. An arena has at most 2^48 bytes, and no more workspace than bytes.
//! 4. *Sizes*: parameters, their state and accumulators are as large as their shape says, with a slot for each version of the weights that is
//!    kept (and one for a prediction); tokens, targets, activations and
//!    version words as the data's shape says; the two ends of a transfer are equally large; rings have the program's slots. Stages
//!    that hand over have no send buffers between them.
//! 5. *Owners*: no two lasting buffers of a rank (weights, optimizer state, accumulators, hyper-parameters, version words,
//!    transfer rings) share a byte, and a kernel argument lies inside one of them or outside all.
//! 6. *Calls*: a kernel exists in the stage's image, and gets the arguments and the scratch that it takes.
//! 7. *Images*: exports are known kernels, ascending, and start inside the code; on a GPU each has the functions that its kernel launches.
//! 8. *Launches*: kernels of a GPU launch something, those of a CPU nothing; blocks are whole warps of at most 1024 threads, grids not empty; elements are
//!    given for each operand.
//! 9. *Names*: parameter names are unique over all stages, but for the copy of a tied table at its other end, equal in shape and group. There
//!    is a group, and each parameter is in one that exists.
//! 10. *Tied tables*: the one that the first stage embeds with has a buffer for its other end's gradient; where that end is on another rank, the last
//!    stage has its copy with the same. No other parameter has one.
//! 11. *Products*: a kernel that is a matrix product is not empty, and its operands are at least as large as its shape says.
//! 12. *Tuning*: only on a GPU; of kernels that are products, ascending; the workspace is the end of a rank's arena, with no other place in it, and
//!     as large as the largest that its algorithms need.
//! 13. *Norms*: with a global norm each stage has a sum and a total; they are one on the last stage, and those of neighbours where stages hand
//!     over; otherwise none has.

use crate::bundle::{Bundle, BundleError, MANIFEST, image_name};
use crate::ids::RankId;
use crate::launches;
use crate::program::{Call, Correction, Group, HYPER_LEN, Manifest, Optimizer, Param, Place, Stage};
use crate::stream::Policy;
use crate::tuning;
use std::collections::HashSet;
use std::ops::Range;

/// More bytes than any arena has; sums of a few such are far from overflow.
const ARENA_BYTES_MAX: u64 = 1 << 48;

/// More slots than any ring has; keeps a damaged manifest from asking for absurd work.
const SLOTS_MAX: u32 = 1 << 16;

/// Name of a kernel argument in messages.
const ARGUMENT: &str = "a kernel argument";

/// A check's outcome; the text is the sentence's middle.
type Check = Result<(), String>;

macro_rules! ensure {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err(format!($($message)+));
        }
    };
}

/// Checks every invariant of the module's text.
///
/// # Errors
/// The first one that is broken.
pub fn check(bundle: &Bundle) -> Result<(), BundleError> {
    manifest(&bundle.manifest).map_err(|what| BundleError::Structure { file: MANIFEST.into(), what })?;
    for image in &bundle.images {
        let wrong = |what: String| BundleError::Structure { file: image_name(image.stage), what };
        exports(&bundle.manifest, &image.code, &image.exports).map_err(wrong)?;
        launches::entries(&bundle.manifest, image).map_err(wrong)?;
    }
    let what = |what| BundleError::Structure { file: MANIFEST.into(), what };
    if bundle.images.len() != bundle.manifest.stages.len() {
        return Err(what("it does not have one image for each stage".into()));
    }
    for (stage, image) in bundle.manifest.stages.iter().zip(&bundle.images) {
        let exported: HashSet<u32> = image.exports.iter().map(|e| e.0).collect();
        called(stage, &exported).map_err(what)?;
    }
    Ok(())
}

/// Invariants 1 to 6, and 8 to 13, as far as they don't concern the images.
///
/// # Errors
/// The first one that is broken.
pub fn manifest(m: &Manifest) -> Check {
    counts(m)?;
    streams(m)?;
    settings(m)?;
    for stage in &m.stages {
        let total = m.untuned_bytes(stage.rank.index());
        let name = |what: String| format!("in stage {}, {what}", stage.stage);
        places(stage, total).map_err(name)?;
        params(stage, m).map_err(name)?;
        io(m, stage).map_err(name)?;
        for call in stage.bodies.calls() {
            arguments(m, call).map_err(name)?;
            tuning::operands(m, call).map_err(name)?;
        }
    }
    launches::shapes(m)?;
    tuning::check(m)?;
    links(m)?;
    names(m)?;
    tied(m)?;
    norms(m)?;
    (0..m.memory.len()).try_for_each(|rank| owners(m, RankId(rank as u32)))
}

fn counts(m: &Manifest) -> Check {
    let (stages, ranks) = (m.stages.len(), m.memory.len());
    ensure!(stages > 0 && ranks > 0, "there is no stage or no rank");
    for (count, what) in [
        (m.program.rank_of_stage.len(), "ranks of stages"),
        (m.program.rings.len(), "ring sizes"),
        (m.proved.drift_max.len(), "proved drifts"),
        (m.proved.delay_max.len(), "proved delays"),
    ] {
        ensure!(count == stages, "there are {stages} stages and {count} {what}");
    }
    for (count, what) in [(m.program.streams.len(), "streams"), (m.proved.bubble.len(), "proved bubbles")] {
        ensure!(count == ranks, "there are {ranks} ranks and {count} {what}");
    }
    for (rank, memory) in m.memory.iter().enumerate() {
        let (total, workspace) = (memory.total, memory.workspace);
        ensure!(total <= ARENA_BYTES_MAX, "rank {rank} has an arena of {total} bytes, more than any");
        ensure!(workspace <= total, "{workspace} of the {total} bytes of rank {rank} are workspace");
    }
    for (i, stage) in m.stages.iter().enumerate() {
        ensure!(stage.stage.index() == i, "stage {} is listed at place {i}", stage.stage);
        ensure!(stage.rank.index() < ranks, "stage {i} is on rank {}, and there are {ranks} ranks", stage.rank);
        ensure!(m.program.rank_of_stage[i] == stage.rank, "stage {i} is on two ranks");
        ensure!(m.program.rings[i] == stage.rings, "stage {i} has two sets of ring sizes");
    }
    Ok(())
}

fn streams(m: &Manifest) -> Check {
    ensure!(m.program.copies == 1, "the program has {} copies of each stage; a bundle has one", m.program.copies);
    let k = m.program.accumulate;
    ensure!(k > 0, "accumulate is 0");
    for (rank, stream) in m.program.streams.iter().enumerate() {
        let whole = stream.updates > 0 && stream.updates.checked_mul(k) == Some(stream.microbatches);
        ensure!(
            whole,
            "rank {rank} repeats {} micro-batches for {} updates of {k}",
            stream.microbatches,
            stream.updates
        );
        for instr in stream.prologue.iter().chain(&stream.period) {
            let owner = m.program.rank_of_stage.get(instr.stage.index());
            ensure!(
                owner.is_some_and(|r| r.index() == rank),
                "rank {rank} has an instruction for stage {}, which is not its own",
                instr.stage
            );
        }
    }
    Ok(())
}

fn settings(m: &Manifest) -> Check {
    let d = m.data;
    ensure!(d.microbatch > 0 && d.context > 0 && d.vocab > 0, "the data's shape has a zero");
    ensure!(!m.groups.is_empty(), "there is no optimizer");
    let never = |g: &Group| matches!(g.optimizer, Optimizer::Soap { frequency: 0, .. });
    ensure!(!m.groups.iter().any(never), "bases that turn every 0 updates");
    ensure!(m.boundary != Some(0), "the boundary comes every 0 updates");
    ensure!(m.proved.bubble.iter().all(|b| b.is_finite()), "a proved bubble is not a number");
    let predicts = matches!(m.correction, Some(Correction::Prediction { .. }));
    ensure!(
        predicts == (m.program.policy == Policy::Predicted),
        "predictions are made and not read, or read and not made"
    );
    m.correction.as_ref().map_or(Ok(()), |c| correction(c, m.stages.len()))
}

fn correction(correction: &Correction, stages: usize) -> Check {
    for list in correction.by_stage() {
        ensure!(list.len() == stages, "there are {stages} stages and {} corrections of them", list.len());
        let fits = list.iter().all(|x| x.is_finite() && *x >= 0.0);
        ensure!(fits, "a stage is corrected by what is below 0 or not a number");
    }
    match correction {
        Correction::Prediction { .. } | Correction::DelayCompensation { .. } => {}
        Correction::ErrorFeedback { lambda, .. } => ensure!(lambda.is_finite(), "error feedback has no factor"),
        Correction::Nesterov { momentum } => {
            ensure!(momentum.iter().all(|c| *c < 1.0), "a momentum of 1 or more looks ahead without end");
        }
        Correction::PipeMare { anneal, discrepancy, .. } => {
            ensure!(*anneal != Some(0), "learning rates are annealed over 0 updates");
            let within = discrepancy.is_none_or(|d| d > 0.0 && d < 1.0);
            ensure!(within, "of a mean change nothing or all is kept");
        }
    }
    Ok(())
}

/// Every place of a stage with its name.
fn all_places(stage: &Stage) -> impl Iterator<Item = (&'static str, Place)> + '_ {
    let io = &stage.io;
    let optional = [
        ("the tokens", io.tokens),
        ("the targets", io.targets),
        ("the loss", io.loss),
        ("the received activations", io.recv_f),
        ("the activations to send", io.send_f),
        ("the received gradients", io.recv_b),
        ("the gradients to send", io.send_b),
        ("the sum of squares", io.norm),
        ("the total of squares", io.total),
        ("the hyper-parameters", Some(io.hyper)),
        ("the versions", Some(io.version)),
        ("the versions seen", Some(io.version_seen)),
    ];
    let params = stage.params.iter().flat_map(|p| {
        let states = p.state.iter().map(|&s| ("an optimizer state", s));
        let weights = [("a weight", p.weight)].into_iter().chain(p.copy.map(|c| ("a weight's copy", c)));
        let gradients = [p.gradient, p.other_end].into_iter().flatten();
        states.chain(weights).chain(gradients.map(|g| ("a gradient", g)))
    });
    let args = stage.bodies.calls().flat_map(|c| &c.args).map(|&a| (ARGUMENT, a));
    optional.into_iter().filter_map(|(name, p)| p.map(|p| (name, p))).chain(params).chain(args)
}

fn places(stage: &Stage, total: u64) -> Check {
    for (name, p) in all_places(stage) {
        let end = (|| {
            let last = u64::from(p.slots.checked_sub(1)?).checked_mul(p.stride)?;
            p.offset.checked_add(last)?.checked_add(p.bytes)
        })();
        ensure!(p.slots <= SLOTS_MAX, "{name} has {} slots", p.slots);
        ensure!(end.is_some_and(|e| e <= total), "{name} at byte {} ends outside the arena of {total} bytes", p.offset);
        // The second vector of hyper-parameters is an argument in the middle of its buffer.
        let align = if name == ARGUMENT { 4 * HYPER_LEN as u64 } else { 64 };
        ensure!(
            p.offset % align == 0 && p.stride % 64 == 0,
            "{name} at byte {} is not aligned to {align} bytes",
            p.offset
        );
        ensure!(p.slots == 1 || p.bytes <= p.stride, "the slots of {name} at byte {} overlap", p.offset);
    }
    Ok(())
}

fn params(stage: &Stage, m: &Manifest) -> Check {
    for p in &stage.params {
        let name = &p.name;
        let Some(group) = m.groups.get(p.group as usize) else {
            return Err(format!("`{name}` is in group {}, and there are {}", p.group, m.groups.len()));
        };
        let Some(bytes) = p.shape.iter().try_fold(4u64, |n, &d| n.checked_mul(d)) else {
            return Err(format!("`{name}` is too large"));
        };
        let rule = m.rule(group, stage.stage);
        let copies = stage.rings.weights + u32::from(rule.predicts());
        let states = rule.buffers(&p.shape);
        let count = states.len();
        ensure!(p.state.len() == count, "`{name}` has {} optimizer states instead of {count}", p.state.len());
        let versions = p.copy.unwrap_or(p.weight);
        ensure!(versions.slots == copies, "`{name}` has {} copies instead of {copies}", versions.slots);
        let copy = p.copy.is_none_or(|c| c.bytes == bytes / 2 && p.weight.slots == 1);
        ensure!(copy, "the copy of `{name}` is not half of the one weight that it is a copy of");
        let weights = [&p.weight].into_iter().chain(&p.gradient).chain(&p.other_end).map(|place| (place, bytes));
        let wanted = p.state.iter().zip(states.iter().map(|s| s.1.saturating_mul(4))).chain(weights);
        for (place, bytes) in wanted {
            let fits = (place.slots == 1 || *place == p.weight) && place.bytes == bytes;
            ensure!(fits, "a buffer of `{name}` has {} bytes, and its shape takes {bytes}", place.bytes);
        }
    }
    Ok(())
}

/// A buffer that the runtime uses: present exactly when `wanted`, with these bytes and (if given) slots.
fn buffer(name: &str, place: Option<Place>, wanted: bool, bytes: Option<u64>, slots: Option<u32>) -> Check {
    let Some(p) = place else {
        ensure!(!wanted, "{name} is missing");
        return Ok(());
    };
    ensure!(wanted, "{name} should not be there");
    ensure!(bytes.is_none_or(|b| b == p.bytes), "{name} has {} bytes", p.bytes);
    ensure!(slots.is_none_or(|s| s == p.slots), "{name} has {} slots, unlike its ring", p.slots);
    Ok(())
}

fn io(m: &Manifest, stage: &Stage) -> Check {
    let (io, rings) = (&stage.io, &stage.rings);
    let s = stage.stage.index();
    let (first, last) = (s == 0, s + 1 == m.stages.len());
    let (sends_b, sends_f) = (m.program.border_before(s).is_some(), m.program.border_after(s).is_some());
    let ids = u64::from(m.data.microbatch) * u64::from(m.data.context);
    let Some(id_bytes) = ids.checked_mul(4) else { return Err("a micro-batch is too large".into()) };
    buffer("the tokens", io.tokens, first, Some(id_bytes), Some(rings.recv_f))?;
    buffer("the targets", io.targets, last, Some(id_bytes), None)?;
    buffer("the loss", io.loss, last, Some(8), None)?;
    buffer("the received activations", io.recv_f, !first, None, Some(rings.recv_f))?;
    buffer("the activations to send", io.send_f, sends_f, None, Some(rings.send_f))?;
    buffer("the received gradients", io.recv_b, !last, None, Some(rings.recv_b))?;
    buffer("the gradients to send", io.send_b, sends_b, None, Some(rings.send_b))?;
    let hyper_bytes = m.groups.len() as u64 * 2 * 4 * HYPER_LEN as u64;
    buffer("the hyper-parameters", Some(io.hyper), true, Some(hyper_bytes), Some(1))?;
    buffer("the versions", Some(io.version), true, Some(8), Some(rings.weights))?;
    buffer("the versions seen", Some(io.version_seen), true, Some(8), Some(rings.stash))
}

/// The two ends of every transfer are equally large.
fn links(m: &Manifest) -> Check {
    let bytes = |p: Option<Place>| p.map(|p| p.bytes);
    let apart = |(a, _): &(&Stage, &Stage)| !m.program.hands_over(a.stage.index());
    for (a, b) in m.stages.iter().zip(m.stages.iter().skip(1)).filter(apart) {
        let forward = bytes(a.io.send_f) == bytes(b.io.recv_f);
        let backward = bytes(b.io.send_b) == bytes(a.io.recv_b);
        ensure!(forward && backward, "stages {} and {} exchange buffers of different sizes", a.stage, b.stage);
    }
    Ok(())
}

fn names(m: &Manifest) -> Check {
    let mut seen = HashSet::new();
    for p in m.stages.iter().flat_map(Stage::own_params) {
        ensure!(seen.insert(&p.name), "two parameters are called `{}`", p.name);
    }
    Ok(())
}

fn tied(m: &Manifest) -> Check {
    let tables: Vec<_> = m
        .stages
        .iter()
        .flat_map(|s| s.params.iter().map(move |p| (s, p)))
        .filter(|(_, p)| p.other_end.is_some())
        .collect();
    let holders: Vec<usize> = tables.iter().map(|(s, _)| s.stage.index()).collect();
    let wanted: Vec<usize> = match m.program.partner(0) {
        _ if !m.program.tied => Vec::new(),
        None => vec![0],
        Some(last) => vec![0, last],
    };
    ensure!(holders == wanted, "a tied table is on the stages {holders:?} instead of {wanted:?}");
    ensure!(tables.iter().all(|(_, p)| p.gradient.is_some()), "a tied table has no accumulator");
    let same = |a: &Param, b: &Param| (&a.name, &a.shape, a.group) == (&b.name, &b.shape, b.group);
    ensure!(tables.windows(2).all(|t| same(t[0].1, t[1].1)), "the copies of a tied table differ");
    Ok(())
}

fn arguments(m: &Manifest, call: &Call) -> Check {
    let Some(kernel) = m.kernels.get(call.kernel as usize) else {
        return Err(format!("kernel {} is called, and there are {}", call.kernel, m.kernels.len()));
    };
    let (args, name) = (call.args.len(), &kernel.name);
    ensure!(args == kernel.args as usize, "`{name}` is called with {args} arguments instead of {}", kernel.args);
    if kernel.scratch_bytes > 0 {
        let scratch = call.args.last().map_or(0, |p| p.bytes);
        ensure!(scratch >= kernel.scratch_bytes, "`{name}` gets {scratch} bytes of scratch, which is too little");
    }
    Ok(())
}

/// Bytes of every slot of a place.
fn slots(p: Place) -> impl Iterator<Item = Range<u64>> {
    (0..u64::from(p.slots)).map(move |i| p.offset + i * p.stride).map(move |at| at..at + p.bytes)
}

/// Buffers of a stage that keep their content from one instruction to the next.
fn lasting(stage: &Stage) -> impl Iterator<Item = Place> + '_ {
    let io = &stage.io;
    let rings = [io.tokens, io.recv_f, io.send_f, io.recv_b, io.send_b];
    let params = stage
        .params
        .iter()
        .flat_map(|p| p.state.iter().copied().chain([p.weight]).chain(p.copy).chain(p.gradient).chain(p.other_end));
    rings.into_iter().flatten().chain([io.hyper, io.version, io.version_seen]).chain(params)
}

/// Sums of squares that are no other stage's.
fn sums(m: &Manifest, rank: RankId) -> impl Iterator<Item = Place> + '_ {
    m.stages.iter().filter(move |stage| stage.rank == rank).flat_map(|stage| {
        let s = stage.stage.index();
        let shared = s > 0 && m.program.hands_over(s - 1);
        let own_total = m.program.border_after(s).is_some();
        stage.io.norm.filter(|_| !shared).into_iter().chain(stage.io.total.filter(|_| own_total))
    })
}

fn norms(m: &Manifest) -> Check {
    for (s, stage) in m.stages.iter().enumerate() {
        let io = &stage.io;
        let there = m.program.norms();
        buffer("the sum of squares", io.norm, there, Some(8), Some(1))?;
        buffer("the total of squares", io.total, there, Some(8), Some(1))?;
        let same = if s + 1 == m.stages.len() {
            io.norm == io.total
        } else {
            let next = &m.stages[s + 1].io;
            !m.program.hands_over(s) || (io.norm, io.total) == (next.norm, next.total)
        };
        ensure!(same, "stage {s} does not have the sums of squares that it shares");
    }
    Ok(())
}

fn owners(m: &Manifest, rank: RankId) -> Check {
    let stages = || m.stages.iter().filter(|s| s.rank == rank);
    let lasting = stages().flat_map(lasting).chain(sums(m, rank));
    let mut owned: Vec<Range<u64>> = lasting.flat_map(slots).filter(|r| !r.is_empty()).collect();
    owned.sort_unstable_by_key(|r| r.start);
    for pair in owned.windows(2) {
        ensure!(pair[0].end <= pair[1].start, "two buffers of rank {rank} share byte {} of its arena", pair[1].start);
    }
    // A transient buffer may not touch a lasting one; an argument may also lie inside one.
    let touching = |r: &Range<u64>| {
        let i = owned.partition_point(|o| o.end <= r.start);
        owned.get(i).filter(|o| o.start < r.end)
    };
    for stage in stages() {
        for place in [stage.io.targets, stage.io.loss].into_iter().flatten() {
            let clear = slots(place).all(|r| touching(&r).is_none());
            ensure!(clear, "the targets or the loss of stage {} lie in another buffer", stage.stage);
        }
        for arg in stage.bodies.calls().flat_map(|c| &c.args) {
            let inside = |r: Range<u64>| touching(&r).is_none_or(|o| o.start <= r.start && r.end <= o.end);
            ensure!(
                slots(*arg).all(inside),
                "a kernel argument of stage {} at byte {} covers part of another buffer",
                stage.stage,
                arg.offset
            );
        }
    }
    Ok(())
}

fn exports(m: &Manifest, code: &[u8], exports: &[(u32, u64)]) -> Check {
    ensure!(exports.windows(2).all(|w| w[0].0 < w[1].0), "its kernels are not in ascending order");
    for &(kernel, offset) in exports {
        ensure!((kernel as usize) < m.kernels.len(), "it exports kernel {kernel}, which the manifest doesn't know");
        ensure!(offset < code.len() as u64, "kernel {kernel} starts at byte {offset}, outside the code");
    }
    Ok(())
}

fn called(stage: &Stage, exported: &HashSet<u32>) -> Check {
    for call in stage.bodies.calls() {
        let k = call.kernel;
        ensure!(exported.contains(&k), "stage {} calls kernel {k}, which its image doesn't have", stage.stage);
    }
    Ok(())
}
