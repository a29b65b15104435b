//! `cost { F = 18522 us, I = 18086 us, W = 9337 us, hop = 601 us }`, the same by layer, or `cost = profile("profile.csv")`.

use super::Context;
use super::section::{Keys, Section};
use crate::ast::{Argument, Body, Entry, Relation, Value, ValueKind};
use crate::diag::{Diagnostic, Span};
use crate::spec::{At, Cost, Costs, LayerCosts, Model, Times};

const TIMES: [&str; 4] = ["F", "I", "W", "B"];
const LAYERS: [&str; 3] = ["embed", "block", "head"];

pub(super) const COST: Keys =
    Keys { block: "cost", known: &["F", "I", "W", "B", "U", "hop", "embed", "block", "head"], later: &[] };
const LAYER: Keys = Keys { block: "layer", known: &TIMES, later: &[] };

/// How many times a list has, and why.
struct Length {
    count: u64,
    /// `stages`
    of: &'static str,
    span: Span,
    why: String,
}

/// Times are uniform or a list with one for each stage, or given by layer. `model`: none: the file has none; `Some(None)`: one with errors.
pub(super) fn cost(
    cx: &mut Context,
    entry: &Entry,
    ranks: Option<&At<u32>>,
    chunks: u32,
    model: Option<Option<&Model>>,
) -> Option<At<Cost>> {
    let stages = ranks.map(|ranks| Length {
        count: u64::from(ranks.value) * u64::from(chunks),
        of: "stages",
        span: ranks.span.clone(),
        why: if chunks == 1 { "a stage a rank".into() } else { format!("{chunks} stages a rank") },
    });
    let span = entry.key.span.start..entry.value.span.end;
    let value = match &entry.value.kind {
        ValueKind::Record(None, body) => record(cx, entry, body, stages.as_ref(), model),
        ValueKind::Call(name, arguments) if name.text == "profile" && entry.relation == Relation::Assign => {
            profile(cx, &entry.value.span, arguments)
        }
        ValueKind::Invalid => None,
        _ => {
            let found = Diagnostic::error("P0212", entry.value.span.clone(), "`cost` is a block or a profile");
            cx.report(
                found.help("write `cost { F = 2 ms, B = 4 ms, hop = 100 us }` or `cost = profile(\"profile.csv\")`"),
            );
            None
        }
    };
    Some(At { value: value?, span })
}

fn profile(cx: &mut Context, span: &Span, arguments: &[Argument]) -> Option<Cost> {
    match arguments {
        [Argument { name: None, value: Value { kind: ValueKind::Text(path), .. }, .. }] if !path.is_empty() => {
            Some(Cost::Profile(path.clone()))
        }
        _ => {
            let found = Diagnostic::error("P0212", span.clone(), "a profile is named by its file");
            cx.report(found.help("write `cost = profile(\"profile.csv\")`, from the folder of this file"));
            None
        }
    }
}

fn record(
    cx: &mut Context,
    entry: &Entry,
    body: &Body,
    stages: Option<&Length>,
    model: Option<Option<&Model>>,
) -> Option<Cost> {
    let section = Section::new(cx, "cost", &entry.key.span, body, &COST);
    let hop = section.value(cx, "hop").map(|value| cx.time_ns(value, "hop", 0));
    let update = section.value(cx, "U").map(|value| list(cx, value, "U", 0, stages));
    let update = update.unwrap_or(Some(Vec::new()));
    let by_layer = LAYERS.iter().find_map(|key| section.find(key));
    let by_stage = TIMES.iter().find_map(|key| section.find(key));
    match (by_layer, by_stage) {
        (Some(layer), Some(stage)) => {
            let found = Diagnostic::error("P0218", stage.key.span.clone(), "times of stages and times of layers");
            let found = found.and_at(layer.key.span.clone(), "a layer's times are given here");
            cx.report(found.help("give either: a stage takes the sum of its layers"));
            None
        }
        (Some(layer), None) => layers(cx, &section, &layer.key.span, (hop.unwrap_or(Some(0)), update), model),
        (None, _) => {
            let [f_ns, i_ns, w_ns] = times(cx, &section, 1, stages)?;
            Some(Cost::Stages(Costs { f_ns, i_ns, w_ns, hop_ns: hop.unwrap_or(Some(0))?, u_ns: update? }))
        }
    }
}

/// `embed { … } block { … } head { … }`
fn layers(
    cx: &mut Context,
    section: &Section<'_>,
    first: &Span,
    (hop_ns, u_ns): (Option<u64>, Option<Vec<u64>>),
    model: Option<Option<&Model>>,
) -> Option<Cost> {
    let Some(model) = model else {
        let found = Diagnostic::error("P0223", first.clone(), "there is no model whose layers could take this time");
        cx.report(found.help("add a `model` block, or give times of stages: `cost { F = 2 ms, B = 4 ms }`"));
        return None;
    };
    let blocks = model.map(|model| Length {
        count: model.layers.value.into(),
        of: "blocks",
        span: model.layers.span.clone(),
        why: "the blocks".into(),
    });
    let one = |span: Span| Length { count: 1, of: "layer", span, why: String::new() };
    let [embed, block, head] = LAYERS.map(|key| {
        let Some(entry) = section.find(key) else {
            section.missing(cx, key, &format!("{key} {{ F = 1 ms, B = 2 ms }}"));
            return None;
        };
        let ValueKind::Record(None, body) = &entry.value.kind else {
            if entry.value.kind != ValueKind::Invalid {
                let found = Diagnostic::error("P0212", entry.value.span.clone(), format!("`{key}` is a block"));
                cx.report(found.help(format!("write `{key} {{ F = 1 ms, B = 2 ms }}`")));
            }
            return None;
        };
        let inner = Section::new(cx, key, &entry.key.span, body, &LAYER);
        let alone = one(entry.key.span.clone());
        let length = if key == "block" { blocks.as_ref() } else { Some(&alone) };
        times(cx, &inner, 0, length)
    });
    let ([embed, block, head], hop_ns, u_ns) = ([embed?, block?, head?], hop_ns?, u_ns?);
    let count = block.iter().map(Vec::len).max().unwrap_or(1);
    let of = |lists: &[Vec<u64>; 3], i: usize| {
        let [f_ns, i_ns, w_ns] = [0, 1, 2].map(|part: usize| lists[part].get(i).or(lists[part].last()).copied());
        Some(Times { f_ns: f_ns?, i_ns: i_ns?, w_ns: w_ns? })
    };
    let blocks = (0..count).map(|i| of(&block, i)).collect::<Option<Vec<_>>>()?;
    Some(Cost::Layers(LayerCosts { embed: of(&embed, 0)?, blocks, head: of(&head, 0)?, hop_ns, u_ns }))
}

/// F, I and W, each one time or a list; `B` stands for I and W.
fn times(cx: &mut Context, section: &Section<'_>, least: u64, length: Option<&Length>) -> Option<[Vec<u64>; 3]> {
    let mut times = |key, least| section.value(cx, key).map(|value| list(cx, value, key, least, length));
    let (forward, whole) = (times("F", least), times("B", 2 * least));
    let (input, weight) = (times("I", least), times("W", least));
    if forward.is_none() {
        section.missing(cx, "F", "F = 2 ms");
    }
    let (input, weight) = match (whole, input, weight) {
        (Some(whole), None, None) => {
            let whole = whole?;
            (whole.iter().map(|b| b / 2).collect(), whole.iter().map(|b| b - b / 2).collect())
        }
        (None, Some(input), Some(weight)) => (input?, weight?),
        (Some(_), ..) => {
            both_forms(cx, section);
            return None;
        }
        (None, input, weight) => {
            let example = match (input, weight) {
                (Some(_), _) => ("W", "W = 1 ms"),
                (None, Some(_)) => ("I", "I = 2 ms"),
                (None, None) => ("B", "B = 4 ms`, or `I = 2 ms` and `W = 2 ms"),
            };
            section.missing(cx, example.0, example.1);
            return None;
        }
    };
    Some([forward??, input, weight])
}

/// B stands for I and W together.
fn both_forms(cx: &mut Context, section: &Section<'_>) {
    let at = |key| section.find(key).map(|e| e.key.span.clone());
    let whole = at("B").unwrap_or(section.head.clone());
    let part = at("I").or(at("W")).unwrap_or(section.head.clone());
    let found = Diagnostic::error("P0218", whole, "`B` is the time of `I` and `W` together");
    let found = found.and_at(part, "a part of it is given here");
    cx.report(found.help("give `B` alone (half is counted for each), or `I` and `W`"));
}

fn list(cx: &mut Context, value: &Value, key: &str, least: u64, length: Option<&Length>) -> Option<Vec<u64>> {
    let ValueKind::List(items) = &value.kind else {
        return cx.time_ns(value, key, least).map(|t| vec![t]);
    };
    let times: Vec<Option<u64>> = items.iter().map(|item| cx.time_ns(item, key, least)).collect();
    if let Some(length) = length
        && times.len() as u64 != length.count
    {
        let message = format!("`{key}` has {} times for {} {}", times.len(), length.count, length.of);
        let found =
            Diagnostic::error("P0217", value.span.clone(), message).and_at(length.span.clone(), length.why.clone());
        cx.report(found.help(format!("give one time for all {}, or a list with one for each", length.of)));
        return None;
    }
    times.into_iter().collect()
}
