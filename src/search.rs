//! `schedule = search(…)`: the order that is found takes the schedule's place, and goes the way of every other.

use crate::driver::{self, Analysed};
use crate::report::{bytes, percent};
use dsl::diag::Diagnostic;
use dsl::schedule::{Place, Update};
use dsl::spec::{At, Limits as Bytes, Partition, Search, Spec};
use model::target::Target;
use plan::Shape;
use plan::search::{Effort, Figures, Found, Limits, Request, Unreachable};
use serde::Serialize;
use std::fmt::Write;

/// Finds an order for the costs of `spec` and within the limits of `search`, and analyses it.
pub fn analyse(
    mut spec: Spec,
    search: &Search,
    profile: Option<&str>,
    target: Target,
    found: &mut Vec<Diagnostic>,
) -> Option<Analysed> {
    let result = {
        let request = Request {
            shape: Shape::of(&spec),
            places: places(&spec, search),
            limits: limits(&spec, search),
            costs: &|program| driver::costs_of(&spec, profile, program, &mut Vec::new()).map(|(costs, _)| costs),
            memory: &|program| driver::memory_of(&spec, profile, program, target),
            boundary: spec.pipeline.boundary.as_ref().map(|b| b.value),
            own_policies: spec.staleness.weights.span.is_empty(),
            effort: Effort::default(),
        };
        plan::search::search(&request)
    };
    let result = result.map_err(|wrong| found.push(unreachable(&spec, search, profile, &wrong))).ok()?;
    let best = result.best.clone();
    if let Some(own) = best.schedule.weights {
        spec.staleness.weights.value = own;
    }
    spec.schedule = best.schedule;
    let from = found.len();
    let proved = artifact::verify::prove(&best.program).expect("what a search gives is verified");
    let mut analysed = driver::analyse_program(spec, best.shape, profile, (best.program, proved), target, found)?;
    for diagnostic in found[from..].iter_mut().filter(|d| matches!(d.code, "P0311" | "P0312" | "P0313")) {
        diagnostic.help = Some("loosen the limits of the search, or this bound".into());
    }
    analysed.search = Some(result);
    Some(analysed)
}

/// Those that the search and the partition leave.
fn places(spec: &Spec, search: &Search) -> Vec<Place> {
    match (&search.place, &spec.pipeline.partition.value) {
        (Some(place), _) => vec![place.value],
        (None, Partition::Explicit(_)) => vec![Place::Linear],
        (None, Partition::Balanced) => vec![Place::Linear, Place::Wave],
    }
}

/// The limits of the search, and the bounds of the spec where they are tighter.
pub fn limits(spec: &Spec, search: &Search) -> Limits {
    let ranks = u64::from(spec.machine.ranks.value);
    let times = search.times_milli.as_ref().map(|times| times.value.saturating_mul(ranks));
    let in_flight = search.in_flight.as_ref().map(|count| u64::from(count.value) * 1000);
    let stale = search.drift.is_some() || search.delay.is_some();
    let most = |asked: &Option<At<u64>>, bound: &Option<At<u64>>| {
        let asked = asked.as_ref().map_or(if stale { u64::MAX } else { 0 }, |at| at.value);
        bound.as_ref().map_or(asked, |at| at.value.min(asked))
    };
    Limits {
        kept_milli: times.into_iter().chain(in_flight).min(),
        bytes: tightest(spec, search),
        drift: most(&search.drift, &spec.staleness.drift),
        delay: most(&search.delay, &spec.staleness.delay),
    }
}

/// By rank, the smallest of all bounds on memory.
fn tightest(spec: &Spec, search: &Search) -> Option<Bytes> {
    let bounds = driver::bounds(spec);
    let all: Vec<&Bytes> = search.memory.iter().chain(&bounds.require).chain(&bounds.machine).collect();
    let of = |rank| all.iter().map(|limits| limits.of(rank)).min_by_key(|at| at.value).cloned();
    Bytes::new((0..spec.machine.ranks.value as usize).filter_map(of).collect())
}

/// `P0501`, with the smallest limit that can be kept.
fn unreachable(spec: &Spec, search: &Search, profile: Option<&str>, wrong: &Unreachable) -> Diagnostic {
    let limits = limits(spec, search);
    let error = |span: &dsl::diag::Span, message: &str| Diagnostic::error("P0501", span.clone(), message);
    match wrong {
        Unreachable::Kept { least_milli } => {
            let span = search.times_milli.as_ref().map_or(&search.span, |at| &at.span);
            let times = *least_milli as f64 / 1000.0 / f64::from(spec.machine.ranks.value);
            // Rounded up: as a limit it holds.
            let times = (times * 1000.0).ceil() / 1000.0;
            error(span, "no order keeps less than one micro-batch a rank")
                .note(format!("`1x` is one micro-batch for each of {} ranks", spec.machine.ranks.value))
                .help(format!("the smallest limit is `memory <= {times}x`"))
        }
        Unreachable::Bytes { least } => {
            let bytes_of = limits.bytes.as_ref();
            let over = least.iter().enumerate().filter_map(|(rank, needed)| {
                let limit = bytes_of?.of(rank);
                (*needed > limit.value).then_some((*needed - limit.value, rank, *needed, limit))
            });
            let Some((_, rank, needed, limit)) = over.max_by_key(|(excess, ..)| *excess) else {
                return error(&search.span, "no order is within these limits").help("loosen them");
            };
            error(&limit.span, "no order needs as little memory")
                .here(format!("{} on rank {rank}", bytes(limit.value)))
                .note(format!("one micro-batch at a time, rank {rank} needs {needed} bytes"))
                .help(format!("the smallest limit of rank {rank} is `{needed} B`; else use a smaller micro-batch"))
        }
        Unreachable::Place => {
            // What is wrong with costs or partition says so itself.
            let mut found = Vec::new();
            let least = plan::search::least(places(spec, search)[0], Shape::of(spec));
            let known = least.and_then(|program| driver::costs_of(spec, profile, &program, &mut found));
            let message = match known {
                Some(_) => "no order is within the limits of the search",
                None => "the model can't be cut into the stages of this placement",
            };
            found
                .into_iter()
                .next()
                .unwrap_or_else(|| error(&search.span, message).help("loosen them, or leave out `place`"))
        }
    }
}

/// The limits of the search that a sound plan of another schedule is not within, as a diagnostic.
pub fn exceeded(spec: &Spec, search: &Search, analysed: &Analysed) -> Option<Diagnostic> {
    let chunks = analysed.program.rank_of_stage.len() as u32 / spec.machine.ranks.value.max(1);
    let memory = || analysed.memory().map(|memory| memory.iter().map(|m| m.total).collect());
    let boundary = spec.pipeline.boundary.as_ref().map(|b| b.value);
    let elsewhere = search.place.as_ref().is_some_and(|place| place.value != analysed.spec.schedule.place);
    let reason = match elsewhere {
        true => plan::search::ELSEWHERE.to_owned(),
        false => limits(spec, search).exceeded(&analysed.program, chunks, boundary, &|_| memory())?,
    };
    Some(Diagnostic::error("P0501", search.span.clone(), reason).help("loosen the limits of the search"))
}

/// What `check` says about a search, for programs.
#[derive(Serialize)]
pub struct Json {
    schedule: String,
    stages_per_rank: u32,
    bubble: f64,
    bubble_span: f64,
    span_us: f64,
    /// No order on the same placement has a shorter span.
    span_bound_us: Option<f64>,
    library: Vec<JsonLibrary>,
}

#[derive(Serialize)]
struct JsonLibrary {
    schedule: String,
    bubble: Option<f64>,
    bubble_span: Option<f64>,
    /// Why it is not within the limits.
    reason: Option<String>,
}

impl Json {
    pub fn new(found: &Found) -> Json {
        let of = |(name, figures): &(String, Result<Figures, String>)| JsonLibrary {
            schedule: name.clone(),
            bubble: figures.as_ref().ok().map(|f| f.bubble),
            bubble_span: figures.as_ref().ok().map(|f| f.bubble_span),
            reason: figures.as_ref().err().cloned(),
        };
        let figures = &found.best.figures;
        Json {
            schedule: found.best.name.clone(),
            stages_per_rank: figures.chunks,
            bubble: figures.bubble,
            bubble_span: figures.bubble_span,
            span_us: figures.span_ns as f64 / 1000.0,
            span_bound_us: found.bound_ns.map(|ns| ns as f64 / 1000.0),
            library: found.library.iter().map(of).collect(),
        }
    }
}

/// What `check` says about a search.
pub fn text(found: &Found) -> String {
    let best = &found.best;
    let mut out = format!("search: {}, {}\n", describe(best), figures(&best.figures, best.schedule.update));
    if let Some(bound_ns) = found.bound_ns.filter(|bound| *bound > 0) {
        let over = best.figures.span_ns as f64 / bound_ns as f64 - 1.0;
        let _ = match over > 0.0 {
            true => writeln!(
                out,
                "  no order on these stages has a span below {} us: at most {:.2} % less",
                bound_ns / 1000,
                over * 100.0
            ),
            false => writeln!(out, "  no order on these stages has a shorter span"),
        };
    }
    let _ = writeln!(out, "  no worse than the library's schedules within the limits:");
    let mut fits: Vec<(&String, &Figures)> =
        found.library.iter().filter_map(|(name, f)| Some((name, f.as_ref().ok()?))).collect();
    fits.sort_by(|a, b| a.1.bubble.total_cmp(&b.1.bubble));
    for (name, f) in &fits {
        let _ = writeln!(
            out,
            "    {name}: {}",
            figures(f, dsl::library::schedule(name).map_or(Update::Flush, |s| s.update))
        );
    }
    if fits.is_empty() {
        out.push_str("    (none is within them)\n");
    }
    for (name, reason) in found.library.iter().filter_map(|(name, f)| Some((name, f.as_ref().err()?))) {
        let _ = writeln!(out, "    {name} is not: {reason}");
    }
    out
}

fn describe(best: &plan::search::Candidate) -> String {
    let stages = match best.schedule.place {
        Place::Linear => "one stage a rank".to_owned(),
        Place::Wave => "two stages a rank, there and back".to_owned(),
        Place::Bidirectional => "two copies of each stage".to_owned(),
        Place::Loop(_) => format!("{} stages a rank", best.figures.chunks),
    };
    if best.name == "search" { format!("an order of its own, {stages}") } else { format!("{}, {stages}", best.name) }
}

fn figures(f: &Figures, update: Update) -> String {
    let span = match update {
        Update::Flush => format!(", {} by its longest span of {} us", percent(f.bubble_span), f.span_ns / 1000),
        Update::Local => String::new(),
    };
    format!("bubble {}{span}, {} micro-batches kept", percent(f.bubble), f.kept)
}
