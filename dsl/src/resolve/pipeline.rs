//! `pipeline`, `staleness`, `require`.

use super::model::given;
use super::section::{Keys, Section};
use super::{CHUNKS_MAX, Context, GRID_MAX, batch, correction, cover, not_yet, partition, search, weights};
use crate::ast::{Block, Entry, Relation, Value, ValueKind};
use crate::diag::Diagnostic;
use crate::schedule::{Backward, Chunks, Place, Schedule};
use crate::spec::{At, Model, Pipeline, Products, Recompute, Require, Staleness};
use crate::suggest::nearest;

pub(super) const PIPELINE: Keys = Keys {
    block: "pipeline",
    known: &[
        "partition",
        "schedule",
        "microbatch",
        "accumulate",
        "batch",
        "chunks",
        "boundary",
        "fuse",
        "recompute",
        "matmul",
        "cover_latency",
    ],
    later: &["interleave", "clip", "replicas"],
};

pub(super) const STALENESS: Keys =
    Keys { block: "staleness", known: &["weights", "drift", "delay", "correction"], later: &[] };

pub(super) const REQUIRE: Keys =
    Keys { block: "require", known: &["memory", "bubble"], later: &["drift", "delay", "throughput", "makespan"] };

/// Published schedules that the library has not yet.
const SCHEDULES_LATER: [&str; 1] = ["one_step_delay"];

/// What `pipeline` refers to outside its block.
pub(super) struct Outer<'a> {
    /// None: no model; `Some(None)`: one with errors.
    pub model: Option<Option<&'a Model>>,
    pub ranks: Option<&'a At<u32>>,
    /// Whether the machine has costs.
    pub costs: bool,
    /// Stages a rank, by [`chunks`].
    pub chunks: u32,
    /// Of the file.
    pub schedules: &'a [Schedule],
    /// Names of schedules of the file with errors.
    pub broken: &'a [&'a str],
}

/// Stages of the model for each rank, where the block can be read that far. Faults are reported by [`pipeline`].
pub(super) fn chunks(block: &Block, schedules: &[Schedule]) -> u32 {
    let find = |key: &str| block.body.entries.iter().find(|e| e.key.text == key).map(|e| &e.value.kind);
    let Some(ValueKind::Word(word)) = find("schedule") else { return 1 };
    let own = schedules.iter().find(|s| s.name == *word).map(|s| s.place);
    let Some(place) = own.or_else(|| crate::library::schedule(word).map(|s| s.place)) else { return 1 };
    let given = match find("chunks") {
        Some(ValueKind::Number(number)) => number.whole.and_then(|n| u32::try_from(n).ok()),
        _ => None,
    };
    place.chunks(given.filter(|n| (1..=CHUNKS_MAX).contains(n)).unwrap_or(CHUNKS_DEFAULT)) / place.copies()
}

/// Stages a rank with `place loop(v)`, unless the file says.
const CHUNKS_DEFAULT: u32 = 2;

pub(super) fn pipeline(cx: &mut Context, block: &Block, outer: &Outer<'_>) -> Option<(Pipeline, Schedule)> {
    let section = Section::new(cx, "pipeline", &block.keyword.span, &block.body, &PIPELINE);
    let schedule = section.need(cx, "schedule", "schedule = one_f_one_b");
    let searched = schedule.filter(|v| search::is_search(v));
    let search = searched.map(|v| search::search(cx, v, outer));
    let schedule = match &search {
        Some(search) => search.as_ref().map(search::stand_in),
        None => schedule.and_then(|v| find_schedule(cx, v, outer)),
    };
    let (microbatch, accumulate) = batch::sizes(cx, &section, outer.model.is_some());
    if let (Some(ranks), Some(accumulate)) = (outer.ranks, &accumulate) {
        grid(cx, ranks, outer.chunks, accumulate);
    }
    let chunks = section.value(cx, "chunks").map(|v| cx.count32(v, "chunks", 1..=u64::from(CHUNKS_MAX)));
    let chunks = given(chunks)?.unwrap_or(At { value: CHUNKS_DEFAULT, span: section.start.clone() });
    let partition = partition::partition(cx, &section, outer);
    let boundary = section.find("boundary").map(|entry| boundary(cx, entry));
    let fuse = section.value(cx, "fuse").map(|v| cx.switch(v, "fuse"));
    let fuse = given(fuse)?.unwrap_or(At { value: true, span: section.start.clone() });
    let recompute = recompute(cx, &section, schedule.as_ref().map(|(_, schedule)| schedule), search.is_some());
    let cover_latency = cover::cover_latency(cx, &section, schedule.as_ref().map(|(_, schedule)| schedule));
    let products = products(cx, &section);
    let (name, schedule) = schedule?;
    if let Some(entry) =
        section.find("chunks").filter(|_| search.is_none() && schedule.place != Place::Loop(Chunks::Given))
    {
        let message = format!("`{}` has its own number of stages a rank", name.value);
        let found = Diagnostic::lint("P0240", entry.key.span.clone(), message).here("never used");
        cx.report(found.help("remove it, or choose a schedule with `place loop(v)`, such as interleaved_1f1b"));
    }
    let (partition, microbatch, accumulate) = (partition?, microbatch?, accumulate?);
    let (boundary, cover_latency, recompute, products) = (given(boundary)?, cover_latency?, recompute?, products?);
    let pipeline = Pipeline {
        partition,
        schedule: name,
        microbatch,
        accumulate,
        chunks,
        boundary,
        fuse,
        cover_latency,
        recompute,
        products,
        search: search.flatten(),
    };
    Some((pipeline, schedule))
}

/// `recompute = full`, for a backward pass in one piece.
fn recompute(
    cx: &mut Context,
    section: &Section<'_>,
    schedule: Option<&Schedule>,
    searched: bool,
) -> Option<At<Recompute>> {
    let Some(value) = section.value(cx, "recompute") else {
        return Some(At { value: Recompute::None, span: section.start.clone() });
    };
    let recompute = match cx.word(value, "recompute", &["none", "attention", "full"], &[])? {
        "attention" => Recompute::Attention,
        "full" => Recompute::Full,
        _ => Recompute::None,
    };
    let recompute = At { value: recompute, span: value.span.clone() };
    if searched && recompute.value != Recompute::None {
        let instead = "name a schedule with `backward whole`, such as one_f_one_b: orders of the search's own split the backward pass";
        not_yet(cx, &recompute.span, "`recompute` under a search", instead);
        return None;
    }
    if let Some(found) = schedule.and_then(|schedule| recompute_of_split(schedule, &recompute)) {
        cx.report(found);
        return None;
    }
    Some(recompute)
}

/// `P0241`: a schedule whose backward pass is split leaves nothing to gain. Also for what takes the place of a spec's schedule.
pub fn recompute_of_split(schedule: &Schedule, recompute: &At<Recompute>) -> Option<Diagnostic> {
    if schedule.backward != Backward::Split || recompute.value == Recompute::None {
        return None;
    }
    let message = format!("`recompute` saves no memory under `{}`, which splits the backward pass", schedule.name);
    let found = Diagnostic::error("P0241", recompute.span.clone(), message);
    let found = found.note(
        "W reads what I computed again, so that lies in the stash until W, beside the gradients that I leaves for W: as much as without",
    );
    Some(found.help("use a schedule with `backward whole`, such as one_f_one_b, or leave `recompute` out"))
}

/// `matmul = tf32`
fn products(cx: &mut Context, section: &Section<'_>) -> Option<At<Products>> {
    let Some(value) = section.value(cx, "matmul") else {
        return Some(At { value: Products::F32, span: section.start.clone() });
    };
    let products = match cx.word(value, "matmul", &["f32", "tf32"], &[])? {
        "tf32" => Products::Tf32,
        _ => Products::F32,
    };
    Some(At { value: products, span: value.span.clone() })
}

/// The plan's size is bounded.
fn grid(cx: &mut Context, ranks: &At<u32>, chunks: u32, accumulate: &At<u32>) {
    let (p, k) = (u64::from(ranks.value) * u64::from(chunks), u64::from(accumulate.value));
    if p * k > GRID_MAX {
        let what = if chunks == 1 { "ranks" } else { "stages" };
        let message = format!("{p} {what} with {k} micro-batches an update are more than a plan can hold");
        let found = Diagnostic::error("P0208", accumulate.span.clone(), message);
        let found = found.and_at(ranks.span.clone(), "the ranks");
        cx.report(
            found.help(format!("{what} times accumulate is at most {GRID_MAX}: accumulate at most {}", GRID_MAX / p)),
        );
    }
}

fn find_schedule(cx: &mut Context, value: &Value, outer: &Outer<'_>) -> Option<(At<String>, Schedule)> {
    let word = match &value.kind {
        ValueKind::Word(word) => word,
        ValueKind::Call(name, _) if SCHEDULES_LATER.contains(&name.text.as_str()) => &name.text,
        ValueKind::Invalid => return None,
        other => {
            let message = format!("`schedule` is the name of a schedule, not {}", other.describe());
            let names = crate::suggest::either(&crate::library::names());
            cx.report(Diagnostic::error("P0207", value.span.clone(), message).help(format!("e.g. {names}")));
            return None;
        }
    };
    if outer.broken.contains(&word.as_str()) {
        return None;
    }
    let own = outer.schedules.iter().find(|s| s.name == *word).cloned();
    if let Some(schedule) = own.or_else(|| crate::library::schedule(word)) {
        return Some((At { value: word.clone(), span: value.span.clone() }, schedule));
    }
    let names: Vec<&str> = outer.schedules.iter().map(|s| s.name.as_str()).chain(crate::library::names()).collect();
    if SCHEDULES_LATER.contains(&word.as_str()) {
        let instead = format!("use {}, or write it as a `schedule` block", crate::suggest::either(&names));
        not_yet(cx, &value.span, &format!("the schedule `{word}`"), &instead);
        return None;
    }
    let found = Diagnostic::error("P0215", value.span.clone(), format!("there is no schedule `{word}`"));
    cx.report(match nearest(word, names.iter().copied()) {
        Some(meant) => found.help(format!("did you mean `{meant}`?")),
        None => found.help(format!(
            "use {}, or define it in this file: `schedule {word} {{ … }}`",
            crate::suggest::either(&names)
        )),
    });
    None
}

/// `boundary = every 100 updates`, `boundary every 100 updates`
fn boundary(cx: &mut Context, entry: &Entry) -> Option<At<u64>> {
    let (count, unit) = match &entry.value.kind {
        ValueKind::Every(count, unit) if !matches!(entry.relation, Relation::Compare(_)) => (count, unit),
        ValueKind::Invalid => return None,
        _ => {
            let span = entry.key.span.start..entry.value.span.end;
            let found = Diagnostic::error("P0212", span, "`boundary` says after how many updates the pipeline drains");
            cx.report(found.help("write `boundary = every 100 updates`"));
            return None;
        }
    };
    if !matches!(unit.text.as_str(), "update" | "updates") {
        let found =
            Diagnostic::error("P0205", unit.span.clone(), format!("a boundary is not counted in `{}`", unit.text));
        cx.report(found.help("count in `updates`"));
        return None;
    }
    let value = Value { kind: ValueKind::Number(count.clone()), span: entry.value.span.clone() };
    cx.count(&value, "boundary", 1..=u64::from(u32::MAX))
}

pub(super) fn staleness(cx: &mut Context, block: Option<&Block>, schedule: Option<&Schedule>) -> Option<Staleness> {
    let Some(block) = block else {
        return Some(Staleness {
            weights: weights::policy(cx, None, schedule, 0..0),
            drift: None,
            delay: None,
            correction: None,
        });
    };
    let section = Section::new(cx, "staleness", &block.keyword.span, &block.body, &STALENESS);
    let given_weights = section.value(cx, "weights").map(|v| weights::value(cx, v));
    let mut bound = |key| section.bound(cx, key).map(|v| cx.count(v, key, 0..=u64::from(u32::MAX)));
    let (drift, delay) = (bound("drift"), bound("delay"));
    let correction = section.value(cx, "correction").map(|v| correction::correction(cx, v));
    let weights = weights::policy(cx, given(given_weights)?, schedule, section.start.clone());
    Some(Staleness { weights, drift: given(drift)?, delay: given(delay)?, correction: given(correction)? })
}

pub(super) fn require(
    cx: &mut Context,
    block: Option<&Block>,
    has_model: bool,
    ranks: Option<&At<u32>>,
) -> Option<Require> {
    let Some(block) = block else { return Some(Require::default()) };
    let section = Section::new(cx, "require", &block.keyword.span, &block.body, &REQUIRE);
    let memory = section.bound(cx, "memory").map(|v| cx.limits(v, "memory", ranks));
    let bubble = section.bound(cx, "bubble").map(|v| cx.share(v, "bubble"));
    if let (Some(entry), false) = (section.find("memory"), has_model) {
        let found = Diagnostic::lint("P0240", entry.key.span.clone(), "without a `model` no memory is counted");
        let found = found.here("never checked");
        cx.report(found.help("add a `model` block, or remove this bound"));
    }
    Some(Require { memory: given(memory)?, bubble: given(bubble)? })
}
