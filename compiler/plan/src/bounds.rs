//! Bounds that a spec asks for: checked, and where one fails, shown on a micro-batch and solved.

use crate::Shape;
use crate::analyse::{Findings, Subject};
use crate::expand::{expand, origin, streams};
use crate::facts::Proof;
use crate::order::{self, ACTIONS_MAX};
use crate::steady::{Steady, steady};
use crate::time::run;
use crate::versions::{Measure, StageVersions, versions};
use dsl::diag::{Diagnostic, Label};
use dsl::schedule::{Action, Backward, Schedule, Update};
use dsl::spec::At;

/// Checks every bound; adds a proof for each, and a diagnostic for each that fails.
pub(crate) fn check(
    subject: &Subject,
    findings: &Findings,
    proofs: &mut Vec<Proof>,
    diagnostics: &mut Vec<Diagnostic>,
) {
    let measures: [(&Measured, Option<&At<u64>>); 2] =
        [(&DRIFT, subject.drift.as_ref()), (&DELAY, subject.delay.as_ref())];
    for (measured, bound) in measures {
        let (stage, worst) = measured.worst(&findings.versions);
        let asked = bound.map_or(worst.staleness.max, |b| b.value);
        let holds = worst.staleness.max <= asked;
        proofs.push(Proof {
            claim: format!("{} <= {asked} update{} on every stage", measured.name, plural(asked)),
            holds,
            by: format!(
                "the largest is {}, on stage {stage} for micro-batch {}, over the prologue and one micro-batch of each residue after it; a rank's order fixes it under any timing",
                worst.staleness.max, worst.witness.mb
            ),
        });
        if let Some(bound) = bound.filter(|_| !holds) {
            diagnostics.push(measured.failed(subject, bound, stage, &worst));
        }
    }
    if let Some(correction) = &subject.correction {
        crate::correction::check(correction, findings, proofs, diagnostics);
    }
    let prediction = subject.prediction.as_ref();
    diagnostics.extend(prediction.and_then(|span| crate::correction::check_prediction(span, findings)));
    if let Some(bound) = &subject.bubble {
        bubble(subject, findings, bound, proofs, diagnostics);
    }
}

/// A staleness measure and how it is spoken of.
struct Measured {
    name: &'static str,
    code: &'static str,
    of: fn(&StageVersions) -> Measure,
}

const DRIFT: Measured = Measured { name: "drift", code: "P0311", of: |v| v.drift };
const DELAY: Measured = Measured { name: "delay", code: "P0312", of: |v| v.delay };

impl Measured {
    /// The first stage with the largest value.
    fn worst(&self, stages: &[StageVersions]) -> (usize, Measure) {
        let measures: Vec<Measure> = stages.iter().map(self.of).collect();
        let most = measures.iter().map(|m| m.staleness.max).max().unwrap_or(0);
        let stage = measures.iter().position(|m| m.staleness.max == most).expect("a program has stages");
        (stage, measures[stage])
    }

    fn failed(&self, subject: &Subject, bound: &At<u64>, stage: usize, worst: &Measure) -> Diagnostic {
        let (schedule, witness) = (subject.schedule, worst.witness);
        let (max, asked) = (worst.staleness.max, bound.value);
        let split = schedule.backward == Backward::Split;
        let backward = if split { Action::I } else { Action::B };
        let message =
            format!("{} is {max} update{} with `{}`, more than {asked}", self.name, plural(max), schedule.name);
        let mut diagnostic = Diagnostic::error(self.code, bound.span.clone(), message)
            .here(format!("at most {asked} update{} asked", plural(asked)));
        let at = |action| origin(schedule, &subject.shape, stage as u32, action, witness.mb);
        let rank = schedule.place.home(stage as u32, subject.shape.ranks).0;
        let reads = format!("on rank {rank} this reads version {} for micro-batch {}", witness.at_forward, witness.mb);
        point(&mut diagnostic, schedule, at(Action::F), &reads);
        let (crossed, what) = (crossed(witness.at_forward, witness.at_end), order::name(backward));
        if self.code == DRIFT.code {
            point(&mut diagnostic, schedule, at(backward), &format!("and this version {}", witness.at_end));
            diagnostic.notes.push(format!(
                "micro-batch {} on stage {stage}: F reads version {} of the weights, {what} reads version {}: {crossed} between them",
                witness.mb, witness.at_forward, witness.at_end
            ));
        } else {
            diagnostic.notes.push(format!(
                "micro-batch {} on stage {stage}: F reads version {} of the weights, its gradient goes into update {}, applied to version {}: {crossed} between them",
                witness.mb, witness.at_forward, witness.at_end, witness.at_end
            ));
        }
        if let Some(ahead) = ahead(subject, stage as u32, backward, witness.mb) {
            diagnostic.notes.push(format!(
                "rank {rank} has run F of {ahead} later micro-batches by then: the order decides that, whatever the timing"
            ));
        }
        diagnostic.help(self.solve(subject, asked))
    }

    /// The help line: the smallest accumulate that satisfies the bound, found by expanding again.
    fn solve(&self, subject: &Subject, asked: u64) -> String {
        let (name, k) = (self.name, subject.shape.accumulate);
        let satisfied = |accumulate: u32| {
            let shape = Shape { accumulate, ..subject.shape };
            let program = streams(subject.schedule, &shape).ok()?;
            let stages = versions(&program, subject.boundary).ok()?;
            Some(self.worst(&stages).1.staleness.max <= asked)
        };
        let mut work = 0;
        let mut last = 0;
        for accumulate in 1..=most_accumulate(subject) {
            work += u64::from(accumulate) * u64::from(subject.shape.ranks);
            if work > ACTIONS_MAX / 4 {
                break;
            }
            last = accumulate;
            if satisfied(accumulate) == Some(true)
                && expand(subject.schedule, Shape { accumulate, ..subject.shape }).is_ok()
            {
                return format!("the smallest accumulate with {name} <= {asked} is {accumulate} (it is {k})");
            }
        }
        match subject.schedule.update {
            Update::Local => format!(
                "no accumulate up to {last} gives {name} <= {asked} with `{}`; a schedule with `flush every accumulate`, such as one_f_one_b, has {name} 0",
                subject.schedule.name
            ),
            Update::Flush => {
                format!("no accumulate up to {last} gives {name} <= {asked} with `{}`", subject.schedule.name)
            }
        }
    }
}

/// Where the search for an accumulate ends: beyond, staleness does not shrink with orders that keep a few rounds of all
/// ranks in flight.
fn most_accumulate(subject: &Subject) -> u32 {
    subject.shape.ranks.saturating_mul(4).max(subject.shape.accumulate.saturating_mul(2)).max(16)
}

/// Adds a place in the schedule's source.
fn point(diagnostic: &mut Diagnostic, schedule: &Schedule, span: Option<dsl::diag::Span>, text: &str) {
    if let Some(span) = span {
        let library = schedule.library.then(|| schedule.name.clone());
        diagnostic.labels.push(Label { span, text: text.into(), library });
    }
}

fn crossed(from: u64, to: u64) -> String {
    match to.saturating_sub(from) {
        0 => "no update lies".into(),
        1 => format!("update {from} lies"),
        2 => format!("updates {from} and {} lie", to - 1),
        _ => format!("updates {from} to {} lie", to - 1),
    }
}

fn plural(n: u64) -> &'static str {
    if n == 1 { "" } else { "s" }
}

/// How many micro-batches after `mb` have run F when the backward pass of `mb` runs.
fn ahead(subject: &Subject, stage: u32, backward: Action, mb: u64) -> Option<u64> {
    let rank = subject.schedule.place.home(stage, subject.shape.ranks).0;
    let line = crate::expand::lines(subject.schedule, &subject.shape).ok()?.into_iter().nth(rank as usize)?;
    let is_backward =
        |op| crate::line::input_gradient(op) && (backward == Action::B) == matches!(op, artifact::stream::Op::B(_));
    let mut begun = 0;
    for item in line.run(mb / line.microbatches + 1).filter(|item| item.stage == stage) {
        if crate::line::forward(item.op) {
            begun = item.mb;
        }
        if is_backward(item.op) && item.mb == mb {
            return Some(begun - mb).filter(|ahead| *ahead > 0);
        }
    }
    None
}

fn bubble(
    subject: &Subject,
    findings: &Findings,
    bound: &At<f64>,
    proofs: &mut Vec<Proof>,
    diagnostics: &mut Vec<Diagnostic>,
) {
    let steady = &findings.steady;
    let ranks = findings.program.streams.len();
    let worst = (0..ranks).max_by(|a, b| steady.bubble(*a).total_cmp(&steady.bubble(*b))).unwrap_or(0);
    let (found, asked) = (steady.bubble(worst), bound.value);
    let holds = found <= asked;
    let by = if steady.exact {
        "by the slowest cycle of waits under the cost model"
    } else {
        "by the slowest cycle of waits that was found under the cost model, perhaps not the slowest of all"
    };
    let period = steady.period_ns();
    proofs.push(Proof {
        claim: format!("bubble <= {} on every rank", percent(asked)),
        holds,
        by: format!("{by}: the largest is {}, on rank {worst}", percent(found)),
    });
    if holds {
        return;
    }
    let message =
        format!("the bubble is {} with `{}`, more than {}", percent(found), subject.schedule.name, percent(asked));
    let mut diagnostic = Diagnostic::error("P0313", bound.span.clone(), message)
        .here(format!("at most {} asked", percent(asked)))
        .note(format!("rank {worst} works {} of each period of {}", time(steady.busy_ns[worst]), time(period)));
    if let Some(note) = longest_wait(findings, worst) {
        diagnostic.notes.push(note);
    }
    let most = steady.busy_ns.iter().copied().max().unwrap_or(0);
    if steady.busy_ns[worst] < most && period > 0 {
        let floor = 1.0 - steady.busy_ns[worst] as f64 / most as f64;
        diagnostic.notes.push(format!(
            "the stages are uneven: the busiest rank works {}, so no order gives rank {worst} less than {}",
            time(most),
            percent(floor)
        ));
    }
    diagnostics.push(diagnostic.help(solve_bubble(subject, findings, asked)));
}

/// The longest time that the rank waits in one repetition alone.
fn longest_wait(findings: &Findings, rank: usize) -> Option<String> {
    let mut free = None;
    let mut longest: Option<(u64, &crate::time::Timed)> = None;
    let updates = u64::from(findings.program.streams[0].updates);
    let alone = run(findings.program, findings.costs, updates);
    for event in alone.iter().filter(|e| e.rank.index() == rank) {
        let gap = event.start_ns - free.unwrap_or(0);
        if gap > longest.map_or(0, |(gap, _)| gap) {
            longest = Some((gap, event));
        }
        free = Some(event.end_ns);
    }
    let (gap, event) = longest?;
    let op = artifact::verify::index::Kind::of(event.op).name();
    Some(format!("its longest wait, {}, is before {op} of micro-batch {}", time(gap), event.mb))
}

/// The help line: the smallest accumulate that satisfies the bound. More micro-batches between flushes never make the
/// bubble larger, so it is found by halving; the one found is what was computed.
fn solve_bubble(subject: &Subject, findings: &Findings, asked: f64) -> String {
    const EVEN: &str = "even out the stages with `partition`, or lower the latency between ranks";
    let k = subject.shape.accumulate;
    let busy = &findings.steady.busy_ns;
    let (least, most) = (busy.iter().min().copied().unwrap_or(0), busy.iter().max().copied().unwrap_or(0));
    if (least as f64) < (1.0 - asked) * most as f64 {
        // However many micro-batches there are, that rank waits for the busiest.
        return EVEN.into();
    }
    let at = |accumulate: u32| {
        let shape = Shape { accumulate, ..subject.shape };
        let program = streams(subject.schedule, &shape).ok()?;
        steady(&program, findings.costs)
    };
    let satisfied = |accumulate: u32| Some(at(accumulate)?.worst() <= asked);
    let flush = subject.schedule.update == Update::Flush;
    if !flush && at(k.saturating_mul(2)).is_none_or(|twice| twice.worst() >= findings.steady.worst()) {
        // Updates take no time of their own, so how many micro-batches there are for each changes nothing.
        return EVEN.into();
    }
    if flush && !reachable(subject.shape.ranks, k, asked, at) {
        return format!(
            "no accumulate gives a bubble <= {} with `{}`; a schedule with `update local`, such as async_1f1b, has no drain",
            percent(asked),
            subject.schedule.name
        );
    }
    let most = (ACTIONS_MAX / 256 / u64::from(subject.shape.ranks).max(1)) as u32;
    let (mut below, mut above) = (0, k.max(1));
    while satisfied(above) == Some(false) && above < most {
        (below, above) = (above, above.saturating_mul(2).min(most));
    }
    if satisfied(above) != Some(true) {
        return match subject.schedule.update {
            Update::Flush => format!(
                "no accumulate up to {above} gives a bubble <= {} with `{}`; a schedule with `update local`, such as async_1f1b, has no drain",
                percent(asked),
                subject.schedule.name
            ),
            Update::Local => EVEN.into(),
        };
    }
    let mut smallest = above;
    while above - below > 1 {
        let middle = below + (above - below) / 2;
        // Some schedules take no number of micro-batches but multiples of another.
        match (middle..above).find_map(|m| satisfied(m).map(|holds| (m, holds))) {
            Some((m, true)) => (above, smallest) = (middle, m),
            Some((m, false)) => below = m,
            None => above = middle,
        }
    }
    format!("the smallest accumulate with bubble <= {} is {smallest} (it is {k})", percent(asked))
}

/// Whether more micro-batches an update, `k` so far, can bring the bubble to `asked`. Beyond the ramps a flush takes a time for its
/// filling and draining, and one for each micro-batch, which two lengths tell: what is left of the bubble without the
/// former is its limit.
fn reachable(ranks: u32, k: u32, asked: f64, at: impl Fn(u32) -> Option<Steady>) -> bool {
    let short = k.saturating_mul(ranks.saturating_mul(2).div_ceil(k).max(1));
    let long = short.saturating_mul(2);
    let (Some(first), Some(second)) = (at(short), at(long)) else { return true };
    let time = |steady: &Steady| steady.total_ns as f64 / steady.repetitions as f64;
    let (first_ns, second_ns) = (time(&first), time(&second));
    let each_ns = (second_ns - first_ns) / f64::from(long - short);
    let ends_ns = first_ns - each_ns * f64::from(short);
    let least = first.busy_ns.iter().min().copied().unwrap_or(0) as f64 / f64::from(short);
    // With ends of some time, the limit is not reached but only come near to.
    let spare = least - (1.0 - asked) * each_ns;
    if ends_ns > first_ns * 1e-9 { spare > each_ns * 1e-9 } else { spare >= -each_ns * 1e-9 }
}

fn percent(fraction: f64) -> String {
    let text = format!("{:.2}", fraction * 100.0);
    format!("{} %", text.trim_end_matches('0').trim_end_matches('.'))
}

fn time(ns: u64) -> String {
    match ns {
        0..10_000 => format!("{ns} ns"),
        10_000..10_000_000 => format!("{:.1} us", ns as f64 / 1e3),
        10_000_000..10_000_000_000 => format!("{:.1} ms", ns as f64 / 1e6),
        _ => format!("{:.1} s", ns as f64 / 1e9),
    }
}

/// Lint for a flush that has fewer micro-batches than a rank's warm-up asks for.
pub(crate) fn short_warmup(subject: &Subject) -> Option<Diagnostic> {
    let (schedule, shape) = (subject.schedule, &subject.shape);
    if schedule.update == Update::Local {
        return None;
    }
    let microbatches = u64::from(shape.accumulate);
    let short = (0..shape.ranks).find_map(|rank| order::short_warmup(schedule, shape, rank, microbatches))?;
    let message = format!("accumulate = {} is less than the warm-up of `{}`", shape.accumulate, schedule.name);
    let mut lint = Diagnostic::lint("P0320", subject.accumulate.clone(), message)
        .here(format!("{} micro-batch{} an update", shape.accumulate, if shape.accumulate == 1 { "" } else { "es" }))
        .note("every forward pass runs before a backward pass on such a rank: correct, but it idles most of the time");
    let asks =
        format!("on rank {} this asks for {} forward passes, {} there are", short.rank, short.asked, short.performed);
    point(&mut lint, schedule, Some(short.span.clone()), &asks);
    Some(lint.help(format!("the smallest accumulate that fills the warm-up is {}", short.asked)))
}
