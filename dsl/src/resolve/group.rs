//! `group [embedding, head] = adamw { … }` and `clip = per_stage(1.0)`: what stands in an optimizer's braces beside its own keys.

use super::optimizer::rule;
use super::section::assigned;
use super::{Context, twice};
use crate::ast::{Argument, Body, Entry, Name, Value, ValueKind};
use crate::diag::Diagnostic;
use crate::spec::{At, Clip, Group, LearningRate, MuonScale, Optimizer, ParamKind, Selector};
use crate::suggest::{either, nearest};

/// An optimizer's entries, by what they are.
pub(super) struct Parts<'a> {
    /// The optimizer with its own keys only.
    pub own: Value,
    pub groups: Vec<&'a Entry>,
    pub clip: Vec<&'a Entry>,
}

/// Takes groups and clipping out of an optimizer's braces.
pub(super) fn split(value: &Value) -> Parts<'_> {
    let ValueKind::Record(name, body) = &value.kind else {
        return Parts { own: value.clone(), groups: Vec::new(), clip: Vec::new() };
    };
    let of = |key: &'static str| body.entries.iter().filter(move |e| e.key.text == key);
    let own = body.entries.iter().filter(|e| !["group", "clip"].contains(&e.key.text.as_str()));
    let own = Body { entries: own.cloned().collect(), ..body.clone() };
    let own = Value { kind: ValueKind::Record(name.clone(), own), span: value.span.clone() };
    Parts { own, groups: of("group").collect(), clip: of("clip").collect() }
}

/// What a norm is taken over.
const CLIPS: [&str; 3] = ["per_tensor", "per_stage", "global"];

/// `clip = per_tensor(1.0)`
pub(super) fn clip(cx: &mut Context, entries: &[&Entry]) -> Option<Option<At<Clip>>> {
    let [first, more @ ..] = entries else { return Some(None) };
    more.iter().for_each(|entry| twice(cx, "clip", &entry.key.span, &first.key.span));
    let value = assigned(cx, first)?;
    let (name, arguments): (&Name, &[Argument]) = match &value.kind {
        ValueKind::Call(name, arguments) => (name, arguments),
        ValueKind::Invalid => return None,
        other => {
            let message = format!("`clip` is `per_tensor(…)`, `per_stage(…)` or `global(…)`, not {}", other.describe());
            let found = Diagnostic::error("P0207", value.span.clone(), message);
            cx.report(found.help("say what the norm is taken over, e.g. `clip = per_stage(1.0)`"));
            return None;
        }
    };
    if !CLIPS.contains(&name.text.as_str()) {
        let message = format!("`clip` can't be `{}`", name.text);
        let meant = nearest(&name.text, CLIPS).map(|meant| format!("did you mean `{meant}`?"));
        let help = meant.unwrap_or(format!("it is {}", either(&CLIPS)));
        cx.report(Diagnostic::error("P0210", name.span.clone(), message).help(help));
        return None;
    }
    let [Argument { name: None, value: max, .. }] = arguments else {
        let message = format!("`{}` takes one number, the largest norm", name.text);
        let found = Diagnostic::error("P0213", value.span.clone(), message);
        cx.report(found.help(format!("write `{}(1.0)`", name.text)));
        return None;
    };
    let max = cx.real(max, &name.text, "above 0, up to 1e9", |x| x > 0.0 && x <= 1e9)?.value;
    let bound = match name.text.as_str() {
        "per_stage" => Clip::PerStage { max },
        "global" => Clip::Global { max },
        _ => Clip::PerTensor { max },
    };
    Some(Some(At { value: bound, span: value.span.clone() }))
}

type Rule = (At<Optimizer>, At<LearningRate>);

/// The groups that are written, then those that the optimizer `main` implies.
pub(super) fn groups(cx: &mut Context, entries: &[&Entry], main: Option<&Rule>) -> Option<Vec<Group>> {
    // All are read, so that every fault is found.
    let written: Vec<Option<Group>> = entries.iter().map(|entry| group(cx, entry, main)).collect();
    let mut groups = written.into_iter().collect::<Option<Vec<Group>>>()?;
    let (optimizer, learning_rate) = main?;
    let left: &[ParamKind] = match optimizer.value {
        Optimizer::Muon { .. } | Optimizer::NorMuon { .. } | Optimizer::Soap { .. } => {
            &[ParamKind::Embedding, ParamKind::Head, ParamKind::Vector]
        }
        Optimizer::Mars { .. } => &[ParamKind::Vector],
        _ => return Some(groups),
    };
    let chosen = |kind: &ParamKind| groups.iter().flat_map(|g| &g.selectors).any(|s| s.value == Selector::Kind(*kind));
    let left: Vec<ParamKind> = left.iter().copied().filter(|kind| !chosen(kind)).collect();
    if own_scale(&optimizer.value) && !left.is_empty() {
        let names: Vec<&str> = left.iter().map(|&kind| word(kind)).collect();
        let found = Diagnostic::error("P0204", optimizer.span.clone(), "`muon` has no group for what is no matrix");
        let found = found.note("with `scale = original` its learning rate is not one for AdamW");
        let list = names.join(", ");
        cx.report(found.help(format!("add `group [{list}] = adamw {{ lr = 3e-4 }}`, or leave out `scale`")));
        return None;
    }
    if !left.is_empty() {
        let at = |kind| At { value: Selector::Kind(kind), span: optimizer.span.clone() };
        groups.push(Group {
            selectors: left.into_iter().map(at).collect(),
            optimizer: At { value: super::optimizer::ADAMW_DEFAULT, span: optimizer.span.clone() },
            learning_rate: learning_rate.clone(),
            implied: true,
        });
    }
    Some(groups)
}

/// Whether the size of a step is another than AdamW's at the same rate.
fn own_scale(optimizer: &Optimizer) -> bool {
    matches!(optimizer, Optimizer::Muon { scale: MuonScale::Original, .. })
}

fn group(cx: &mut Context, entry: &Entry, main: Option<&Rule>) -> Option<Group> {
    let selectors = selectors(cx, entry);
    let value = assigned(cx, entry)?;
    // Rates are shared by optimizers whose steps are equally long.
    let shares = main.filter(|(optimizer, _)| !own_scale(&optimizer.value)).map(|(_, rate)| rate);
    let (optimizer, learning_rate) = rule(cx, value, "group", shares)?;
    Some(Group { selectors: selectors?, optimizer, learning_rate, implied: false })
}

const KINDS: [(&str, ParamKind); 4] = [
    ("embedding", ParamKind::Embedding),
    ("head", ParamKind::Head),
    ("matrix", ParamKind::Matrix),
    ("vector", ParamKind::Vector),
];

fn word(kind: ParamKind) -> &'static str {
    KINDS.iter().find(|k| k.1 == kind).expect("every kind has a word").0
}

fn selectors(cx: &mut Context, entry: &Entry) -> Option<Vec<At<Selector>>> {
    let Some(written) = &entry.selector else {
        let message = "`group` does not say which parameters";
        let found = Diagnostic::error("P0212", entry.key.span.clone(), message);
        cx.report(found.help("write e.g. `group embedding = adamw { … }` or `group \"block.*.attn.*\" = …`"));
        return None;
    };
    let items = match &written.kind {
        ValueKind::List(items) if !items.is_empty() => &items[..],
        _ => std::slice::from_ref(written),
    };
    let found: Vec<Option<At<Selector>>> = items.iter().map(|item| selector(cx, item)).collect();
    found.into_iter().collect()
}

fn selector(cx: &mut Context, value: &Value) -> Option<At<Selector>> {
    let selector = match &value.kind {
        ValueKind::Text(pattern) => Selector::Pattern(pattern.clone()),
        ValueKind::Invalid => return None,
        _ => {
            let names = KINDS.map(|k| k.0);
            let found = cx.word(value, "group", &names, &[])?;
            Selector::Kind(KINDS.iter().find(|k| k.0 == found).expect("one of the words").1)
        }
    };
    Some(At { value: selector, span: value.span.clone() })
}
