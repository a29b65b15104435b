//! The facts about a plan, and the bounds that a spec asks for.

use crate::Shape;
use crate::bounds;
use crate::exchange;
use crate::expand;
use crate::facts::{Facts, Proof, RankFacts, StageFacts, Staleness};
use crate::norm;
use crate::policy::copies;
use crate::steady::{Pace, Steady};
use crate::time::{Costs, Timed, watch};
use crate::versions::{StageVersions, versions_at};
use artifact::stream::{Op, Policy, Program, Stream};
use artifact::verify::{Proved, Violation, prove};
use artifact::work;
use dsl::diag::{Diagnostic, Span};
use dsl::schedule::Schedule;
use dsl::spec::{At, Clip, Correction, Spec, Weights};

/// What a plan is held against.
#[derive(Clone, Debug)]
pub struct Subject<'a> {
    pub schedule: &'a Schedule,
    pub shape: Shape,
    /// Where `accumulate` was written.
    pub accumulate: Span,
    /// Updates between two drains.
    pub boundary: Option<u64>,
    pub drift: Option<At<u64>>,
    pub delay: Option<At<u64>>,
    /// How updates are corrected for their delay.
    pub correction: Option<At<Correction>>,
    /// Where weights are said to be predicted.
    pub prediction: Option<Span>,
    pub clip: Option<At<Clip>>,
    /// Fraction, 0..1, of every rank.
    pub bubble: Option<At<f64>>,
}

impl<'a> Subject<'a> {
    /// With no bounds.
    pub fn new(schedule: &'a Schedule, shape: Shape) -> Self {
        Subject {
            schedule,
            shape,
            accumulate: 0..0,
            boundary: None,
            drift: None,
            delay: None,
            correction: None,
            prediction: None,
            clip: None,
            bubble: None,
        }
    }

    /// What `spec` asks for.
    pub fn of(spec: &'a Spec) -> Self {
        let predicts = matches!(spec.staleness.weights.value, Weights::Predict { .. });
        Subject {
            schedule: &spec.schedule,
            shape: Shape::of(spec),
            accumulate: spec.pipeline.accumulate.span.clone(),
            boundary: spec.pipeline.boundary.as_ref().map(|b| b.value),
            drift: spec.staleness.drift.clone(),
            delay: spec.staleness.delay.clone(),
            correction: spec.staleness.correction.clone(),
            prediction: predicts.then(|| spec.staleness.weights.span.clone()),
            clip: spec.clip.clone(),
            bubble: spec.require.bubble.clone(),
        }
    }
}

/// Everything found out about a program, for the diagnostics of bounds.
pub(crate) struct Findings<'a> {
    pub program: &'a Program,
    pub costs: &'a Costs,
    pub versions: Vec<StageVersions>,
    pub steady: Steady,
    pub alone: Alone,
}

/// One repetition alone, with its prologue and drain.
pub(crate) struct Alone {
    /// By rank: the start of its first instruction and the end of its last.
    spans_ns: Vec<(u64, u64)>,
}

impl Alone {
    fn new(ranks: usize) -> Self {
        Alone { spans_ns: vec![(u64::MAX, 0); ranks] }
    }

    fn see(&mut self, timed: &Timed) {
        if !timed.transfers() {
            let (start, end) = &mut self.spans_ns[timed.rank.index()];
            (*start, *end) = ((*start).min(timed.start_ns), (*end).max(timed.end_ns));
        }
    }

    fn makespan_ns(&self) -> u64 {
        self.spans_ns.iter().map(|(_, end)| *end).max().unwrap_or(0)
    }
}

/// Finds the facts about `program`, the expansion of `subject`, under `costs`, and checks the bounds.
///
/// A program that does not verify has no facts: the lists are empty, the proof says why.
pub fn analyse(program: &Program, subject: &Subject, costs: &Costs) -> (Facts, Vec<Diagnostic>) {
    match prove(program) {
        Ok(proved) => analyse_proved(program, &proved, subject, costs),
        Err(violations) => refused(subject, program, &violations),
    }
}

/// [`analyse`] of a program whose proof is at hand.
pub fn analyse_proved(
    program: &Program,
    proved: &Proved,
    subject: &Subject,
    costs: &Costs,
) -> (Facts, Vec<Diagnostic>) {
    let ((facts, diagnostics), visited) = work::counted(|| found(program, proved, subject, costs));
    (Facts { work: proved.visited + visited, ..facts }, diagnostics)
}

/// The facts, but for the work.
fn found(program: &Program, proved: &Proved, subject: &Subject, costs: &Costs) -> (Facts, Vec<Diagnostic>) {
    let stale = || versions_at(program, &proved.places, subject.boundary);
    let (versions, (steady, alone)) = side_by_side(stale, || times(program, proved, costs));
    let findings = Findings { program, costs, versions, steady, alone };
    let mut proofs = structure(program);
    proofs.extend(same_updates(program));
    proofs.extend(exchange::proof(program));
    proofs.extend(norm::proof(program));
    let mut diagnostics = bounds::short_warmup(subject).into_iter().collect::<Vec<_>>();
    diagnostics.extend(exchange::clipped(subject, program));
    bounds::check(subject, &findings, &mut proofs, &mut diagnostics);
    let facts = Facts {
        ranks: ranks(&findings),
        stages: (0..findings.versions.len()).map(|s| stage(&findings, s)).collect(),
        period_ns: findings.steady.period_ns(),
        makespan_ns: findings.alone.makespan_ns(),
        proofs,
        work: 0,
    };
    (facts, diagnostics)
}

/// Two passes that need nothing of each other, on two threads; the work of both is counted on this one.
fn side_by_side<A: Send, B>(one: impl FnOnce() -> A + Send, other: impl FnOnce() -> B) -> (A, B) {
    std::thread::scope(|scope| {
        let one = scope.spawn(|| work::counted(one));
        let other = other();
        let (one, visited) = one.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        work::visit(visited as usize);
        (one, other)
    })
}

/// The steady state, and a repetition alone: without a prologue that is the first turn of the steady state's.
fn times(program: &Program, proved: &Proved, costs: &Costs) -> (Steady, Alone) {
    let mut alone = Alone::new(program.streams.len());
    let mut pace = Pace::new(program, &proved.window, costs);
    if program.streams.iter().all(|s| s.prologue.is_empty()) {
        pace.turn(|timed| alone.see(timed));
    } else {
        let updates = u64::from(program.streams[0].updates);
        watch(program, &proved.places, costs, updates, |timed| alone.see(timed));
    }
    (pace.steady().expect("a verified program has no cycle of waits"), alone)
}

fn refused(subject: &Subject, program: &Program, violations: &[Violation]) -> (Facts, Vec<Diagnostic>) {
    let by = violations.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
    let proof = Proof { claim: "the streams are sound".into(), holds: false, by };
    let facts =
        Facts { ranks: Vec::new(), stages: Vec::new(), period_ns: 0, makespan_ns: 0, proofs: vec![proof], work: 0 };
    let found = violations.iter().take(1).map(|v| expand::refused(subject.schedule, &subject.shape, program, v));
    (facts, found.collect())
}

fn structure(program: &Program) -> Vec<Proof> {
    let holds = |claim: &str, by: &str| Proof { claim: claim.into(), holds: true, by: by.into() };
    let step = program.streams[0].microbatches;
    vec![
        holds(
            "every stage runs each micro-batch forward and backward exactly once, and each update once, after the last weight gradient that it needs",
            &format!(
                "the period has one instruction for each residue modulo {step}, the prologue those below; order shown for one micro-batch of each residue beyond the prologue"
            ),
        ),
        holds(
            "every micro-batch finds its ring slot free",
            "the slot's user before it is released earlier in the same stream, for one micro-batch of each residue beyond the prologue",
        ),
        holds(weights_claim(program.policy), weights_by(program.policy)),
        holds(
            "what a rank sends is what its neighbour receives, in the same order",
            "the sequences agree over both prologues and one period, and repeat with the same step",
        ),
        holds(
            "no ranks wait for each other, for runs of any length",
            "executed with transfers that complete only when matched until every rank was one repetition further; fewer micro-batches wait for less",
        ),
    ]
}

/// What is proved about versions of the weights.
fn weights_claim(policy: Policy) -> &'static str {
    match policy {
        Policy::Current | Policy::Recomputed => {
            "every pass reads the weights between two updates, never while one is under way"
        }
        Policy::Stash => "every backward pass reads the version of the weights that its forward pass read",
        Policy::DoubleBuffer => {
            "the passes of update u's micro-batches read version u - 1 of the weights (the first ones version 0)"
        }
        Policy::Predicted => {
            "every forward pass reads the prediction from the last update, every backward pass the weights, between two updates"
        }
    }
}

fn weights_by(policy: Policy) -> &'static str {
    match policy {
        Policy::Current | Policy::Recomputed | Policy::Predicted => {
            "no last weight gradient has begun an update that is not made, for one micro-batch of each residue beyond the prologue"
        }
        Policy::Stash | Policy::DoubleBuffer => {
            "it is made by then, and the update that overwrites its slot has not begun, for one micro-batch of each residue beyond the prologue"
        }
    }
}

/// What the versions of several copies of the model rest on.
fn same_updates(program: &Program) -> Option<Proof> {
    (program.copies > 1).then(|| Proof {
        claim: "all copies of a stage make the same updates".into(),
        holds: true,
        by: "each takes as many micro-batches and updates at the flush; their gradients are exchanged there, which is counted as taking no time"
            .into(),
    })
}

fn ranks(findings: &Findings) -> Vec<RankFacts> {
    let Findings { program, steady, alone, .. } = findings;
    let count = program.streams.len();
    let spans: Vec<u64> = alone.spans_ns.iter().map(|(start, end)| end.saturating_sub(*start)).collect();
    let longest = spans.iter().copied().max().unwrap_or(0);
    let makespan = alone.makespan_ns();
    let idle = |busy: u64, of: u64| if of == 0 { 0.0 } else { 1.0 - busy as f64 / of as f64 };
    let fact = |r: usize| {
        let busy_ns = steady.busy_ns[r];
        RankFacts {
            in_flight_max: in_flight(&program.streams[r]),
            bubble: steady.bubble(r),
            bubble_span: idle(busy_ns, longest),
            bubble_makespan: idle(busy_ns, makespan),
            busy_ns,
            span_ns: spans[r],
        }
    };
    (0..count).map(fact).collect()
}

/// Most micro-batches between the start of F and the end of B (W) at once. The period begins as many as it ends, so its
/// first repetition shows the maximum; runs that end have no more.
pub(crate) fn in_flight(stream: &Stream) -> u32 {
    work::visit(stream.prologue.len() + stream.period.len());
    let (mut now, mut most) = (0u32, 0);
    for i in stream.prologue.iter().chain(&stream.period) {
        match i.op {
            Op::F => now += 1,
            Op::B(_) | Op::W(_) => now = now.saturating_sub(1),
            _ => {}
        }
        most = most.max(now);
    }
    most
}

fn stage(findings: &Findings, s: usize) -> StageFacts {
    let versions = &findings.versions[s];
    let (drift, delay): (Staleness, Staleness) = (versions.drift.staleness, versions.delay.staleness);
    let versions_live = copies(findings.program, s, drift.max > 0);
    StageFacts { drift, delay, delay_uniform: versions.delay_uniform, versions_live }
}
