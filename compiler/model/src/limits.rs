//! Whether the planned memory is within the spec's bounds, rank by rank.

use crate::build::{Build, Input, build};
use crate::dims::Dims;
use artifact::program::Memory;
use dsl::diag::{Diagnostic, Span};
use dsl::spec::Limits;

/// The bounds on a rank's memory that a spec may give.
#[derive(Clone, Debug, Default)]
pub struct Bounds {
    /// `machine { memory = … }`
    pub machine: Option<Limits>,
    /// `require { memory <= … }`
    pub require: Option<Limits>,
}

/// Arenas above this are refused in any case: no machine has them, and offsets stay far from overflow.
const ARENA_MAX: u64 = 1 << 46;

/// Compares each bound with the rank that exceeds its own most. `P0410`: the `require` bound is exceeded; `P0411`: the machine's memory;
/// `P0412`: more than any machine has, reported at `model`.
pub fn check_memory(input: &Input, built: &Build, bounds: &Bounds, model: &Span) -> Vec<Diagnostic> {
    check(&built.memory, bounds, model, &|limits| smallest_change(input, limits))
}

/// [`check_memory`] of any table; `change` says what would fit.
pub(crate) fn check(
    memory: &[Memory],
    bounds: &Bounds,
    model: &Span,
    change: &dyn Fn(&Limits) -> Option<String>,
) -> Vec<Diagnostic> {
    let largest = memory.iter().enumerate().max_by_key(|(i, m)| (m.total, usize::MAX - i));
    if let Some((rank, _)) = largest.filter(|(_, m)| m.total > ARENA_MAX) {
        let message = format!("rank {rank} would need more than {}", bytes(ARENA_MAX));
        let error =
            Diagnostic::error("P0412", model.clone(), message).help("make the model or the micro-batch smaller");
        return vec![error];
    }
    let required =
        bounds.require.as_ref().map(|limits| exceeded("P0410", limits, "the required bound", memory, change));
    let machine =
        bounds.machine.as_ref().map(|limits| exceeded("P0411", limits, "the machine's memory", memory, change));
    required.flatten().into_iter().chain(machine.flatten()).collect()
}

fn exceeded(
    code: &'static str,
    limits: &Limits,
    what: &str,
    memory: &[Memory],
    change: &dyn Fn(&Limits) -> Option<String>,
) -> Option<Diagnostic> {
    let excess = |(rank, m): &(usize, &Memory)| m.total.saturating_sub(limits.of(*rank).value);
    let over: Vec<(usize, &Memory)> = memory.iter().enumerate().filter(|of| excess(of) > 0).collect();
    let (rank, worst) = *over.iter().max_by_key(|of| (excess(of), usize::MAX - of.0))?;
    let bound = limits.of(rank);
    let message = format!("rank {rank} needs {}, and {what} is {}", bytes(worst.total), bytes(bound.value));
    let mut error = Diagnostic::error(code, bound.span.clone(), message)
        .here(format!("exceeded by {}", bytes(excess(&(rank, worst)))))
        .note(breakdown(rank, worst));
    for (other, m) in over.iter().filter(|(other, _)| *other != rank) {
        let own = if limits.by_rank() { format!(" of {}", bytes(limits.of(*other).value)) } else { String::new() };
        error = error.note(format!("rank {other} needs {}{own}", bytes(m.total)));
    }
    let of = if limits.by_rank() { format!(" on rank {rank}") } else { String::new() };
    let no = || format!("no micro-batch fits; the smallest bound that holds{of} is {}", bytes_up(worst.total));
    Some(error.help(change(limits).unwrap_or_else(no)))
}

fn breakdown(rank: usize, m: &Memory) -> String {
    let parts = [
        ("weights", m.weights),
        ("optimizer", m.optimizer),
        ("gradients", m.gradients),
        ("stash", m.stash),
        ("communication", m.communication),
        ("activations", m.activations),
        ("workspace", m.workspace),
    ];
    let list: Vec<String> = parts.into_iter().map(|(name, n)| format!("{name} {}", bytes(n))).collect();
    format!("rank {rank}: {}", list.join(", "))
}

/// The least change of one setting with which every rank fits.
fn smallest_change(input: &Input, limits: &Limits) -> Option<String> {
    let fits = |input: &Input| within(&build(input).memory, limits);
    if !input.fuse && fits(&Input { fuse: true, ..*input }) {
        return Some("`fuse = on` fits: the last gradients then go straight into the update".into());
    }
    let with_microbatch = |n: u32| Input { dims: Dims { microbatch: n, ..input.dims }, ..*input };
    largest_microbatch(input.dims.microbatch, &|n| fits(&with_microbatch(n)))
}

/// Whether every rank's memory is within its bound.
pub(crate) fn within(memory: &[Memory], limits: &Limits) -> bool {
    memory.iter().enumerate().all(|(rank, m)| m.total <= limits.of(rank).value)
}

/// Names the largest micro-batch below `now` that fits. Memory grows with it, so it is found by halving.
pub(crate) fn largest_microbatch(now: u32, fits: &dyn Fn(u32) -> bool) -> Option<String> {
    let (mut low, mut high) = (0, now);
    while low + 1 < high {
        let middle = low + (high - low) / 2;
        if fits(middle) { low = middle } else { high = middle }
    }
    (low > 0).then(|| format!("the largest micro-batch that fits is microbatch = {low}"))
}

/// Bytes with a binary unit and at most two decimals.
fn bytes(n: u64) -> String {
    match unit(n) {
        Some((size, name)) => format!("{} {name}", trimmed(n as f64 / size as f64)),
        None => format!("{n} B"),
    }
}

/// [`bytes`], rounded up: as a bound it holds.
fn bytes_up(n: u64) -> String {
    match unit(n) {
        Some((size, name)) => format!("{} {name}", trimmed((n as f64 / size as f64 * 100.0).ceil() / 100.0)),
        None => format!("{n} B"),
    }
}

fn unit(n: u64) -> Option<(u64, &'static str)> {
    [(1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")].into_iter().find(|(size, _)| n >= *size)
}

fn trimmed(x: f64) -> String {
    format!("{x:.2}").trim_end_matches('0').trim_end_matches('.').to_owned()
}
