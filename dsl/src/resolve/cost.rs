//! `cost { F = 18522 us, I = 18086 us, W = 9337 us, hop = 601 us }`

use super::Context;
use super::section::{Keys, Section};
use crate::ast::{Entry, Value, ValueKind};
use crate::diag::Diagnostic;
use crate::spec::{At, Costs};

pub(super) const COST: Keys = Keys { block: "cost", known: &["F", "I", "W", "B", "hop"], later: &["U"] };

/// Times are uniform or a list with one for each stage.
pub(super) fn cost(cx: &mut Context, entry: &Entry, ranks: Option<&At<u32>>, chunks: u32) -> Option<At<Costs>> {
    let ValueKind::Record(None, body) = &entry.value.kind else {
        if entry.value.kind != ValueKind::Invalid {
            let found = Diagnostic::error("P0212", entry.value.span.clone(), "`cost` is a block");
            cx.report(found.help("write `cost { F = 2 ms, B = 4 ms, hop = 100 us }`"));
        }
        return None;
    };
    let section = Section::new(cx, "cost", &entry.key.span, body, &COST);
    let mut times = |key, least| section.value(cx, key).map(|value| list(cx, value, key, least, ranks, chunks));
    let (forward, whole) = (times("F", 1), times("B", 2));
    let (input, weight) = (times("I", 1), times("W", 1));
    let hop = section.value(cx, "hop").map(|value| cx.time_ns(value, "hop", 0));
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
            both_forms(cx, &section);
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
    let costs = Costs { f_ns: forward??, i_ns: input, w_ns: weight, hop_ns: hop.unwrap_or(Some(0))? };
    Some(At { value: costs, span: entry.key.span.start..entry.value.span.end })
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

fn list(
    cx: &mut Context,
    value: &Value,
    key: &str,
    least: u64,
    ranks: Option<&At<u32>>,
    chunks: u32,
) -> Option<Vec<u64>> {
    let ValueKind::List(items) = &value.kind else {
        return cx.time_ns(value, key, least).map(|t| vec![t]);
    };
    let times: Vec<Option<u64>> = items.iter().map(|item| cx.time_ns(item, key, least)).collect();
    if let Some(ranks) = ranks
        && times.len() != ranks.value as usize * chunks as usize
    {
        let message =
            format!("`{key}` has {} times for {} stages", times.len(), u64::from(ranks.value) * u64::from(chunks));
        let each = if chunks == 1 { "a stage a rank".into() } else { format!("{chunks} stages a rank") };
        let found = Diagnostic::error("P0217", value.span.clone(), message).and_at(ranks.span.clone(), each);
        cx.report(found.help("give one time for all stages, or a list with one for each"));
        return None;
    }
    times.into_iter().collect()
}
