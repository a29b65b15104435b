//! Whether the planned memory is within the spec's bounds.

use crate::build::{Build, Input, build};
use crate::dims::Dims;
use artifact::program::Memory;
use dsl::diag::{Diagnostic, Span};
use dsl::spec::At;

/// The bounds on a rank's memory that a spec may give, in bytes.
#[derive(Clone, Debug, Default)]
pub struct Bounds {
    /// `machine { memory = … }`
    pub machine: Option<At<u64>>,
    /// `require { memory <= … }`
    pub require: Option<At<u64>>,
}

/// Arenas above this are refused in any case: no machine has them, and offsets stay far from overflow.
const ARENA_MAX: u64 = 1 << 46;

/// Compares each bound with the rank that needs most. `P0410`: the `require` bound is exceeded; `P0411`: the machine's memory;
/// `P0412`: more than any machine has, reported at `model`.
pub fn check_memory(input: &Input, built: &Build, bounds: &Bounds, model: &Span) -> Vec<Diagnostic> {
    let Some((rank, memory)) = built.memory.iter().enumerate().max_by_key(|(i, m)| (m.total, usize::MAX - i)) else {
        return Vec::new();
    };
    if memory.total > ARENA_MAX {
        let message = format!("rank {rank} would need more than {}", bytes(ARENA_MAX));
        let error =
            Diagnostic::error("P0412", model.clone(), message).help("make the model or the micro-batch smaller");
        return vec![error];
    }
    let mut found = Vec::new();
    for (code, bound, what) in
        [("P0410", &bounds.require, "the required bound"), ("P0411", &bounds.machine, "the machine's memory")]
    {
        let Some(bound) = bound.as_ref().filter(|b| b.value < memory.total) else { continue };
        let message = format!("rank {rank} needs {}, and {what} is {}", bytes(memory.total), bytes(bound.value));
        let others = built.memory.iter().enumerate().filter(|(r, m)| *r != rank && m.total > bound.value);
        let mut error = Diagnostic::error(code, bound.span.clone(), message)
            .here(format!("exceeded by {}", bytes(memory.total - bound.value)))
            .note(breakdown(rank, memory));
        for (other, m) in others {
            error = error.note(format!("rank {other} needs {}", bytes(m.total)));
        }
        found.push(error.help(smallest_change(input, bound.value, memory.total)));
    }
    found
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
fn smallest_change(input: &Input, bound: u64, needed: u64) -> String {
    let fits = |input: &Input| build(input).memory.iter().all(|m| m.total <= bound);
    let with_microbatch = |n: u32| Input { dims: Dims { microbatch: n, ..input.dims }, ..*input };
    let fused = Input { fuse: true, ..*input };
    if !input.fuse && fits(&fused) {
        return "`fuse = on` fits: the last gradients then go straight into the update".into();
    }
    // Memory grows with the micro-batch, so the largest that fits is found by halving.
    let (mut low, mut high) = (0, input.dims.microbatch);
    while low + 1 < high {
        let middle = low + (high - low) / 2;
        if fits(&with_microbatch(middle)) { low = middle } else { high = middle }
    }
    if low > 0 {
        return format!("the largest micro-batch that fits is microbatch = {low}");
    }
    format!("no micro-batch fits; the smallest bound that holds is {}", bytes_up(needed))
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
