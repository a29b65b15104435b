//! `model` and `machine`.

use super::section::{Keys, Section};
use super::{Context, RANKS_MAX, cost, device, variant};
use crate::ast::Block;
use crate::diag::Diagnostic;
use crate::spec::{At, Dtype, Machine, Model};
use crate::suggest::nearest;

pub(super) const MODEL: Keys = Keys {
    block: "model",
    known: &[
        "layers",
        "width",
        "heads",
        "context",
        "vocab",
        "dtype",
        "kv_heads",
        "mlp",
        "norm",
        "position",
        "bias",
        "tied",
        "attention",
        "dropout",
        "recompute",
        "tensor_parallel",
        "sequence_parallel",
        "data_parallel",
        "zero",
    ],
    later: &["experts", "context_parallel", "window"],
};

pub(super) const MACHINE: Keys =
    Keys { block: "machine", known: &["ranks", "device", "memory", "cost"], later: &["name", "cpu", "nodes"] };

pub(super) fn model(cx: &mut Context, block: &Block) -> Option<Model> {
    match &block.name {
        Some(name) if name.text == "gpt" => {}
        Some(name) => {
            let found = Diagnostic::error("P0210", name.span.clone(), format!("there is no model `{}`", name.text));
            cx.report(match nearest(&name.text, ["gpt"]) {
                Some(_) => found.help("did you mean `gpt`?"),
                None => found.help("the only model is `gpt`"),
            });
        }
        None => {
            let found = Diagnostic::error("P0212", block.keyword.span.clone(), "the model has no name");
            cx.report(found.help("write `model gpt { … }`"));
        }
    }
    let section = Section::new(cx, "model", &block.keyword.span, &block.body, &MODEL);
    let mut size = |key, example, max| {
        let value = section.need(cx, key, example)?;
        cx.count32(value, key, 1..=max)
    };
    let layers = size("layers", "layers = 8", 4096);
    let width = size("width", "width = 256", 1 << 17);
    let heads = size("heads", "heads = 8", 4096);
    let context = size("context", "context = 128", 1 << 22);
    let vocab = size("vocab", "vocab = 256", 1 << 22);
    if let (Some(width), Some(heads)) = (&width, &heads) {
        divides(cx, width, heads);
    }
    let dtype = section.find("dtype").map(|_| variant::dtype(cx, &section));
    let variant = variant::variant(cx, &section, width.as_ref(), heads.as_ref());
    let span = block.keyword.span.start..block.body.span.end;
    let dtype = given(dtype)?.unwrap_or(At { value: Dtype::F32, span: span.clone() });
    let (mut variant, analysis_only) = variant?;
    variant.dtype = dtype.value;
    Some(Model {
        layers: layers?,
        width: width?,
        heads: heads?,
        context: context?,
        vocab: vocab?,
        variant,
        analysis_only,
        dtype_span: dtype.span,
        span,
    })
}

/// Every head is equally wide.
fn divides(cx: &mut Context, width: &At<u32>, heads: &At<u32>) {
    if width.value.is_multiple_of(heads.value) {
        return;
    }
    let message = format!("a width of {} can't be split into {} equal heads", width.value, heads.value);
    let below = (1..heads.value).rev().find(|h| width.value.is_multiple_of(*h)).unwrap_or(1);
    let above = (heads.value..=width.value).find(|h| width.value.is_multiple_of(*h));
    let nearest = match above {
        Some(above) => format!("{below} or {above} heads"),
        None => format!("{below} heads"),
    };
    let wider = u64::from(width.value).next_multiple_of(u64::from(heads.value));
    let found = Diagnostic::error("P0214", heads.span.clone(), message).and_at(width.span.clone(), "the width");
    cx.report(found.help(format!("the nearest that fit: {nearest}, or a width of {wider}")));
}

pub(super) fn machine(cx: &mut Context, block: &Block, model: Option<Option<&Model>>, chunks: u32) -> Option<Machine> {
    let section = Section::new(cx, "machine", &block.keyword.span, &block.body, &MACHINE);
    let ranks = section.need(cx, "ranks", "ranks = 4").and_then(|v| cx.count32(v, "ranks", 1..=RANKS_MAX));
    let device = section.find("device").map(|entry| device::device(cx, entry));
    let memory = section.value(cx, "memory").map(|v| cx.limits(v, "memory", ranks.as_ref()));
    let cost = section.find("cost").map(|entry| cost::cost(cx, entry, ranks.as_ref(), chunks, model));
    let device = given(device)?.flatten();
    Some(Machine { ranks: ranks?, device, memory: given(memory)?, cost: given(cost)?, cost_of_ranks: false })
}

/// None if the value was given and is wrong.
pub(super) fn given<T>(value: Option<Option<T>>) -> Option<Option<T>> {
    match value {
        Some(None) => None,
        Some(found) => Some(found),
        None => Some(None),
    }
}
