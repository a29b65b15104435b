//! `schedule = search(memory <= 2x, drift <= 1)`

use super::Context;
use super::pipeline::Outer;
use crate::ast::{Argument, Name, Number, Relation, Value, ValueKind};
use crate::diag::{Diagnostic, Span};
use crate::schedule::{Backward, CmpOp, Place, Schedule, Update};
use crate::spec::{At, Search};
use crate::suggest::{either, nearest};

const LIMITS: [&str; 5] = ["memory", "in_flight", "drift", "delay", "place"];
const FORM: &str = "write e.g. `schedule = search(memory <= 2x)`";
/// Most times 1F1B's activations.
const TIMES_MAX: f64 = 1000.0;

/// Whether the value asks for a search.
pub(super) fn is_search(value: &Value) -> bool {
    matches!(&value.kind, ValueKind::Call(name, _) | ValueKind::Record(Some(name), _) if name.text == "search")
        || value.kind == ValueKind::Word("search".into())
}

/// None if something is wrong; that is reported.
pub(super) fn search(cx: &mut Context, value: &Value, outer: &Outer<'_>) -> Option<Search> {
    let ValueKind::Call(name, arguments) = &value.kind else {
        let found = Diagnostic::error("P0212", value.span.clone(), "`search` takes limits");
        cx.report(found.help(FORM));
        return None;
    };
    let before = cx.found.len();
    if outer.model.is_none() && !outer.costs {
        let found = Diagnostic::error("P0236", name.span.clone(), "a search needs times");
        let found = found.here("nothing says what F, I and W take");
        cx.report(found.help("add `cost { F = …, I = …, W = …, hop = … }` to `machine`, or a `model`"));
    }
    let span = value.span.clone();
    let mut search =
        Search { times_milli: None, in_flight: None, memory: None, drift: None, delay: None, place: None, span };
    let mut seen: Vec<&Name> = Vec::new();
    for argument in arguments {
        if let Some(key) = key(cx, name, argument, &mut seen) {
            limit(cx, &mut search, key, argument, outer);
        }
    }
    (cx.found.len() == before).then_some(search)
}

/// The limit's name, once and with its sign.
fn key<'a>(cx: &mut Context, call: &Name, argument: &'a Argument, seen: &mut Vec<&'a Name>) -> Option<&'a str> {
    let Some(name) = &argument.name else {
        let found = Diagnostic::error("P0213", argument.value.span.clone(), "a limit of `search` has a name");
        cx.report(found.help(FORM));
        return None;
    };
    let key = name.text.as_str();
    if !LIMITS.contains(&key) {
        let found = Diagnostic::error("P0213", name.span.clone(), format!("`{}` has no limit `{key}`", call.text));
        cx.report(match nearest(key, LIMITS) {
            Some(meant) => found.help(format!("did you mean `{meant}`?")),
            None => found.help(format!("its limits are {}", either(&LIMITS).replace(" or ", " and "))),
        });
        return None;
    }
    if let Some(first) = seen.iter().find(|first| first.text == key) {
        super::twice(cx, key, &name.span, &first.span);
        return None;
    }
    seen.push(name);
    let right = match (key, argument.relation) {
        ("place", relation) => relation == Relation::Assign,
        (_, relation) => relation == Relation::Compare(CmpOp::Le),
    };
    if !right {
        let span = name.span.start..argument.value.span.end;
        let form = if key == "place" { "place = linear" } else { key };
        let what = if key == "place" { "`place` is given with `=`".into() } else { format!("`{key}` is a bound") };
        let found = Diagnostic::error("P0212", span, what);
        let form = if key == "place" { form.to_owned() } else { format!("{key} <= …") };
        cx.report(found.help(format!("write `{form}`")));
        return None;
    }
    Some(key)
}

/// Reads one limit. What is wrong with it is reported.
fn limit(cx: &mut Context, search: &mut Search, key: &str, argument: &Argument, outer: &Outer<'_>) {
    let value = &argument.value;
    match key {
        "memory" => match &value.kind {
            ValueKind::Number(number) if number.unit.as_ref().is_some_and(|unit| unit.text == "x") => {
                search.times_milli = times(cx, number, &value.span);
            }
            _ => {
                search.memory = cx.limits(value, "memory", outer.ranks);
                if outer.model.is_none() && search.memory.is_some() {
                    let found =
                        Diagnostic::error("P0236", value.span.clone(), "without a `model` no bytes are counted");
                    cx.report(found.help("write `memory <= 2x`, twice the activations of 1F1B, or `in_flight <= 16`"));
                }
            }
        },
        "in_flight" => search.in_flight = cx.count32(value, "in_flight", 1..=super::ACCUMULATE_MAX),
        "drift" => search.drift = cx.count(value, "drift", 0..=u64::from(u32::MAX)),
        "delay" => search.delay = cx.count(value, "delay", 0..=u64::from(u32::MAX)),
        _ => {
            let place = cx.word(value, "place", &["linear", "wave"], &["loop", "table"]);
            let place = place.map(|word| if word == "wave" { Place::Wave } else { Place::Linear });
            search.place = place.map(|value_of| At { value: value_of, span: value.span.clone() });
        }
    }
}

/// `2x`, in thousandths.
fn times(cx: &mut Context, number: &Number, span: &Span) -> Option<At<u64>> {
    if number.value > 0.0 && number.value <= TIMES_MAX {
        return Some(At { value: (number.value * 1000.0).round() as u64, span: span.clone() });
    }
    let found = Diagnostic::error("P0208", span.clone(), "`memory` is out of range");
    let found = found.here(format!("must be above 0x, up to {TIMES_MAX}x"));
    cx.report(found.help("`1x` is what 1F1B keeps on its first rank"));
    None
}

/// The name and the schedule that stand for what will be found.
pub(super) fn stand_in(search: &Search) -> (At<String>, Schedule) {
    let schedule = Schedule {
        name: "search".into(),
        place: search.place.as_ref().map_or(Place::Linear, |place| place.value),
        backward: Backward::Split,
        update: Update::Flush,
        weights: None,
        sequences: Vec::new(),
        order: Vec::new(),
        span: search.span.clone(),
        library: false,
    };
    (At { value: "search".into(), span: search.span.clone() }, schedule)
}
