//! What a target has not, of what a spec asks for.

use crate::target::Target;
use dsl::diag::Diagnostic;
use dsl::spec::{Products, Spec};

/// Most elements of a head of attention on a GPU: its gradient keeps four tiles of eight rows, and two of scores, in the 48 KiB of shared
/// memory that a block has without asking.
pub const HEAD_MAX: u32 = 376;

/// `P0242`: a head is too large for a GPU; `P0243`, a lint: products in tf32 on a CPU, which has only f32.
pub fn check(spec: &Spec, target: Target) -> Vec<Diagnostic> {
    let mut found = Vec::new();
    match target {
        Target::Cpu(_) => found.extend(no_tf32(spec)),
        Target::Cuda(_) | Target::Emulated => found.extend(large_heads(spec, target)),
    }
    found
}

fn no_tf32(spec: &Spec) -> Option<Diagnostic> {
    let products = &spec.pipeline.products;
    (products.value == Products::Tf32).then(|| {
        Diagnostic::lint("P0243", products.span.clone(), "a CPU has no tf32: matrix products are in f32")
            .here("without effect on this target")
            .help("choose a GPU with `--target`, or remove it")
    })
}

fn large_heads(spec: &Spec, target: Target) -> Option<Diagnostic> {
    let model = spec.model.as_ref()?;
    let size = model.width.value / model.heads.value;
    (size > HEAD_MAX).then(|| {
        let heads = (1..=model.width.value)
            .find(|heads| model.width.value.is_multiple_of(*heads) && model.width.value / heads <= HEAD_MAX);
        let message =
            format!("a head of attention has {size} elements, and {} takes at most {HEAD_MAX}", target.name());
        Diagnostic::error("P0242", model.heads.span.clone(), message)
            .and_at(model.width.span.clone(), "the elements of all heads")
            .help(format!("use at least {} heads, or `--target cpu`", heads.unwrap_or(model.width.value)))
    })
}
