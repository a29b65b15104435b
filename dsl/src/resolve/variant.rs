//! Keys of `model` with which it differs from the reference GPT: but for `dtype` and `tied` it can be analysed then, not run.

use super::Context;
use super::section::{Keys, Section};
use crate::ast::{Value, ValueKind};
use crate::diag::Diagnostic;
use crate::spec::{At, Attention, Dtype, Mlp, Norm, Position, Recompute, Variant};

const GELU: Keys = Keys { block: "gelu", known: &["hidden"], later: &[] };
const SWIGLU: Keys = Keys { block: "swiglu", known: &["hidden"], later: &[] };
const HIDDEN_MAX: u64 = 1 << 20;

type Found = (Variant, Vec<At<&'static str>>);

/// `dtype`, if it is there.
pub(super) fn dtype(cx: &mut Context, section: &Section<'_>) -> Option<At<Dtype>> {
    let value = section.value(cx, "dtype")?;
    let word = cx.word(value, "dtype", &["f32", "bf16"], &["f16", "fp8"])?;
    let dtype = if word == "bf16" { Dtype::Bf16 } else { Dtype::F32 };
    Some(At { value: dtype, span: section.span_of("dtype", value) })
}

/// Reads the other keys that are there; what they are not is as in the reference GPT.
pub(super) fn variant(
    cx: &mut Context,
    section: &Section<'_>,
    width: Option<&At<u32>>,
    heads: Option<&At<u32>>,
) -> Option<Found> {
    let errors = |cx: &Context| cx.found.iter().filter(|d| d.is_error()).count();
    let before = errors(cx);
    let reference = Variant::reference(width.map_or(1, |w| w.value), heads.map_or(1, |h| h.value));
    let mut reader = Reader { cx, section, variant: reference, differing: Vec::new() };
    reader.tied();
    reader.shape();
    reader.sharing();
    let Reader { variant, differing, .. } = reader;
    divides(cx, section, heads, &variant);
    without_effect(cx, section, &variant);
    (errors(cx) == before).then_some((variant, differing))
}

struct Reader<'a, 's> {
    cx: &'a mut Context,
    section: &'a Section<'s>,
    variant: Variant,
    differing: Vec<At<&'static str>>,
}

impl Reader<'_, '_> {
    /// Reads a key with `read`, which changes the variant.
    fn key(&mut self, key: &'static str, read: impl FnOnce(&mut Context, &Value, &mut Variant) -> Option<()>) {
        let Some(value) = self.section.value(self.cx, key) else { return };
        // Each key has a field of its own, which is as in the reference GPT so far.
        let before = self.variant;
        if read(self.cx, value, &mut self.variant).is_some() && self.variant != before {
            self.differing.push(At { value: key, span: self.section.span_of(key, value) });
        }
    }

    fn switch(&mut self, key: &'static str, at: fn(&mut Variant) -> &mut bool) {
        self.key(key, |cx, value, variant| {
            *at(variant) = cx.switch(value, key)?.value;
            Some(())
        });
    }

    fn count(&mut self, key: &'static str, most: u64, at: fn(&mut Variant) -> &mut u32) {
        self.key(key, |cx, value, variant| {
            let least = u64::from(key != "zero");
            *at(variant) = cx.count32(value, key, least..=most)?.value;
            Some(())
        });
    }

    /// The one key here with which a model is run, too.
    fn tied(&mut self) {
        let value = self.section.value(self.cx, "tied");
        if let Some(tied) = value.and_then(|value| self.cx.switch(value, "tied")) {
            self.variant.tied = tied.value;
        }
    }

    fn shape(&mut self) {
        self.count("kv_heads", 4096, |v| &mut v.kv_heads);
        self.key("mlp", |cx, value, variant| {
            variant.mlp = mlp(cx, value, variant.mlp.hidden())?;
            Some(())
        });
        self.key("norm", |cx, value, variant| {
            let word = cx.word(value, "norm", &["layer", "rms"], &[])?;
            variant.norm = if word == "rms" { Norm::Rms } else { Norm::Layer };
            Some(())
        });
        self.key("position", |cx, value, variant| {
            let word = cx.word(value, "position", &["learned", "rotary"], &["alibi"])?;
            variant.position = if word == "rotary" { Position::Rotary } else { Position::Learned };
            Some(())
        });
        self.switch("bias", |v| &mut v.bias);
        self.key("attention", |cx, value, variant| {
            let word = cx.word(value, "attention", &["flash", "stored"], &[])?;
            variant.attention = if word == "stored" { Attention::Stored } else { Attention::Flash };
            Some(())
        });
        self.switch("dropout", |v| &mut v.dropout);
        self.key("recompute", |cx, value, variant| {
            variant.recompute = match cx.word(value, "recompute", &["none", "attention", "full"], &[])? {
                "attention" => Recompute::Attention,
                "full" => Recompute::Full,
                _ => Recompute::None,
            };
            Some(())
        });
    }

    fn sharing(&mut self) {
        self.count("tensor_parallel", 1024, |v| &mut v.tensor_parallel);
        self.switch("sequence_parallel", |v| &mut v.sequence_parallel);
        self.count("data_parallel", 65_536, |v| &mut v.data_parallel);
        self.count("zero", 3, |v| &mut v.zero);
    }
}

/// `gelu`, `gelu { hidden = 1024 }`, `swiglu { hidden = 11008 }`
fn mlp(cx: &mut Context, value: &Value, usual: u32) -> Option<Mlp> {
    let ValueKind::Record(Some(name), body) = &value.kind else {
        if value.kind == ValueKind::Word("swiglu".into()) {
            let found = Diagnostic::error("P0204", value.span.clone(), "`swiglu` has no `hidden`");
            cx.report(found.help("write e.g. `mlp = swiglu { hidden = 11008 }`"));
            return None;
        }
        cx.word(value, "mlp", &["gelu", "swiglu"], &["relu", "geglu", "moe"])?;
        return Some(Mlp::Gelu { hidden: usual });
    };
    let gated = match name.text.as_str() {
        "gelu" => false,
        "swiglu" => true,
        _ => {
            let word = Value { kind: ValueKind::Word(name.text.clone()), span: name.span.clone() };
            cx.word(&word, "mlp", &["gelu", "swiglu"], &["relu", "geglu", "moe"]);
            return None;
        }
    };
    let section = Section::new(cx, &name.text, &name.span, body, if gated { &SWIGLU } else { &GELU });
    let hidden = section.need(cx, "hidden", "hidden = 11008")?;
    let hidden = cx.count32(hidden, "hidden", 1..=HIDDEN_MAX)?.value;
    Some(if gated { Mlp::SwiGlu { hidden } } else { Mlp::Gelu { hidden } })
}

/// Heads are shared out evenly, among queries and among devices.
fn divides(cx: &mut Context, section: &Section<'_>, heads: Option<&At<u32>>, variant: &Variant) {
    let Some(heads) = heads else { return };
    let hidden = variant.mlp.hidden();
    let mut check = |key: &str, divisor: u32, number: u32, what: &str| {
        let Some(entry) = section.find(key).filter(|_| !number.is_multiple_of(divisor)) else { return };
        let message = format!("{number} {what} can't be split into {divisor} equal parts");
        let also = if key == "tensor_parallel" { [number, variant.kv_heads, hidden] } else { [number; 3] };
        let fits = (1..divisor).rev().find(|d| also.iter().all(|n| n.is_multiple_of(*d))).unwrap_or(1);
        let found = Diagnostic::error("P0214", entry.value.span.clone(), message);
        cx.report(found.help(format!("the nearest below that fits: `{key} = {fits}`")));
    };
    check("kv_heads", variant.kv_heads, heads.value, "heads");
    check("tensor_parallel", variant.tensor_parallel, variant.kv_heads, "heads of keys and values");
    check("tensor_parallel", variant.tensor_parallel, hidden, "columns of the MLP");
}

/// `P0240` for keys that change nothing beside the others.
fn without_effect(cx: &mut Context, section: &Section<'_>, variant: &Variant) {
    let score = variant.attention == Attention::Flash && variant.recompute == Recompute::Attention;
    for (key, idle, why, fix) in [
        ("zero", variant.zero > 0 && variant.data_parallel == 1, "there is one copy only", "add `data_parallel = 8`"),
        (
            "sequence_parallel",
            variant.sequence_parallel && variant.tensor_parallel == 1,
            "layers are not shared out",
            "add `tensor_parallel = 8`",
        ),
        ("recompute", score, "no scores are saved", "add `attention = stored`"),
    ] {
        let Some(entry) = section.find(key).filter(|_| idle) else { continue };
        let found = Diagnostic::lint("P0240", entry.key.span.clone(), format!("`{key}` has no effect: {why}"));
        cx.report(found.help(format!("{fix}, or remove `{key}`")));
    }
}
