//! An order that is found: for given costs and within limits, no worse than any library schedule that is within them.
//!
//! # Meaning
//!
//! What is searched is one flush with a split backward pass, on each placement that is asked for ([`problem`]). Orders are made by rules
//! ([`list`]), the rules are changed at random and those that give short orders are kept ([`evolve`]), and the best order is changed action by
//! action ([`improve`]). All this is measured by a model of transfers without buffers; what comes out of it is made a program ([`frozen`]), verified, and
//! measured like any other schedule. Library schedules stand beside it as candidates, so the result is never worse; where
//! staleness is allowed, so do asynchronous 1F1B and as much covered latency as the limits leave.
//!
//! Work is counted in actions that are placed or timed, not in seconds: the same request gives the same order everywhere.

mod caps;
mod choose;
mod draws;
mod evolve;
mod frozen;
mod improve;
mod list;
mod problem;

use crate::Shape;
use crate::analyse::in_flight;
use crate::cover::cover;
use crate::expand::expand;
use crate::policy::policy;
use crate::steady::steady;
use crate::time::{Costs, run};
use crate::versions::versions;
use artifact::stream::{Policy, Program};
use dsl::schedule::{Place, Schedule, Update};
use dsl::spec::{Cover, Limits as Bytes, Recompute};
use problem::Problem;

/// Within what an order is searched.
#[derive(Clone, Debug, Default)]
pub struct Limits {
    /// Micro-batches that a rank keeps from their F to their W, in thousandths. On a rank of several stages each keeps its part
    /// of a micro-batch.
    pub kept_milli: Option<u64>,
    /// Of each rank.
    pub bytes: Option<Bytes>,
    /// Updates on every stage.
    pub drift: u64,
    pub delay: u64,
}

/// How much work is spent on each placement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Effort {
    /// Actions placed by rules.
    pub listed: u64,
    /// Actions timed while an order is changed.
    pub timed: u64,
}

impl Default for Effort {
    /// A few seconds on one core where it is used up: small schedules end sooner, and so does an order that no other can beat.
    fn default() -> Self {
        Effort { listed: 16_000_000, timed: 40_000_000 }
    }
}

/// What is asked.
pub struct Request<'a> {
    pub shape: Shape,
    /// Where stages may lie; [`Place::Linear`] or [`Place::Wave`]. Library schedules may lie otherwise, unless there is one only.
    pub places: Vec<Place>,
    pub limits: Limits,
    /// Of a program's stages; none where the model can't be cut so.
    pub costs: &'a dyn Fn(&Program) -> Option<Costs>,
    /// By rank; none where no bytes are counted.
    pub memory: &'a dyn Fn(&Program) -> Option<Vec<u64>>,
    /// Updates between two drains.
    pub boundary: Option<u64>,
    /// Whether a schedule that is made for a policy of its own may have it; else it is none of the candidates.
    pub own_policies: bool,
    pub effort: Effort,
}

/// What a candidate is measured by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Figures {
    /// 1 - work/period in steady state, of the rank that idles most.
    pub bubble: f64,
    /// Longest span of a rank, of one repetition alone.
    pub span_ns: u64,
    /// 1 - work/span, of the rank that works least.
    pub bubble_span: f64,
    pub period_ns: u64,
    /// Most that a rank keeps, in whole micro-batches' parts: each stage counts.
    pub kept: u32,
    /// Stages a rank.
    pub chunks: u32,
}

/// A schedule that could be it.
#[derive(Clone, Debug)]
pub struct Candidate {
    pub name: String,
    pub schedule: Schedule,
    pub shape: Shape,
    pub program: Program,
    pub figures: Figures,
}

/// What was found, and what it was held against.
#[derive(Clone, Debug)]
pub struct Found {
    pub best: Candidate,
    /// No order on the same placement has a shorter longest span; none for a run without end.
    pub bound_ns: Option<u64>,
    /// Library schedules: their figures, or why they are not within the limits.
    pub library: Vec<(String, Result<Figures, String>)>,
}

/// Limits that no order is within.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unreachable {
    /// Each rank must keep this many thousandths of a micro-batch.
    Kept { least_milli: u64 },
    /// The smallest bytes, by rank.
    Bytes { least: Vec<u64> },
    /// The costs are of no placement that may be searched.
    Place,
}

/// Why a schedule on another placement is none of those that were asked for.
pub const ELSEWHERE: &str = "its stages lie otherwise than the search asks";

/// Searches.
///
/// # Errors
/// When no order is within the limits.
pub fn search(request: &Request) -> Result<Found, Unreachable> {
    let mut library = Vec::new();
    let mut candidates = Vec::new();
    for name in dsl::library::names() {
        let schedule = dsl::library::schedule(name).expect("listed");
        if schedule.place.copies() > 1 {
            // It can't be run, and takes twice the weights.
            continue;
        }
        let of = request.given(name, schedule, request.shape);
        library.push((name.to_owned(), of.as_ref().map(|c| c.figures).map_err(Clone::clone)));
        candidates.extend(of);
    }
    candidates.extend(request.covered());
    let (mut bounds, mut wrong) = (Vec::new(), None);
    for place in &request.places {
        match caps::ordered(request, *place, &candidates) {
            Ok(Some((candidate, bound_ns))) => {
                let done = candidate.figures.bubble <= 0.0 && candidate.figures.span_ns <= bound_ns;
                bounds.push((*place, bound_ns));
                candidates.push(candidate);
                if done {
                    break;
                }
            }
            Ok(None) => wrong = wrong.or(Some(Unreachable::Place)),
            Err(unreachable) => wrong = wrong.or(Some(unreachable)),
        }
    }
    let Some(best) = choose::choose(candidates, &library) else { return Err(wrong.unwrap_or(Unreachable::Place)) };
    let flush = best.schedule.update == Update::Flush;
    let bound_ns = bounds.iter().find(|(place, _)| flush && *place == best.schedule.place).map(|(_, bound)| *bound);
    Ok(Found { best, bound_ns, library })
}

impl Request<'_> {
    /// A schedule as a candidate, or why it is none.
    fn given(&self, name: &str, schedule: Schedule, mut shape: Shape) -> Result<Candidate, String> {
        if let Some(own) = schedule.weights.filter(|own| policy(own, Recompute::None) != shape.policy) {
            if !self.own_policies {
                return Err(format!("it is made for `weights = {}`", own.name()));
            }
            shape.policy = policy(&own, Recompute::None);
        }
        let program = expand(&schedule, shape).map_err(|found| found[0].message.clone())?;
        self.candidate(name, schedule, shape, program)
    }

    fn candidate(&self, name: &str, schedule: Schedule, shape: Shape, program: Program) -> Result<Candidate, String> {
        let chunks = schedule.place.chunks(shape.chunks);
        if shape.policy == Policy::DoubleBuffer && schedule.update == Update::Flush {
            return Err("`weights = double_buffer` is for runs without end".into());
        }
        if let [only] = self.places[..]
            && only != schedule.place
        {
            return Err(ELSEWHERE.into());
        }
        let costs = (self.costs)(&program).ok_or(format!("the model can't be cut into {chunks} stages a rank"))?;
        if let Some(reason) = self.limits.exceeded(&program, chunks, self.boundary, self.memory) {
            return Err(reason);
        }
        let figures = measure(&program, &costs, chunks).ok_or("it comes to no steady state")?;
        Ok(Candidate { name: name.to_owned(), schedule, shape, program, figures })
    }

    /// Asynchronous 1F1B with latency covered, from little to all.
    fn covered(&self) -> Vec<Candidate> {
        const SHARES: u32 = 16;
        let schedule = dsl::library::schedule("async_1f1b").expect("the library has it");
        let stale = self.limits.drift > 0 && self.limits.delay > 0;
        let program = expand(&schedule, self.shape).ok().filter(|_| stale);
        let Some(costs) = program.and_then(|program| (self.costs)(&program)) else { return Vec::new() };
        let with = |share: u32| {
            let part = Cover { share: Cover::FULL * share / SHARES };
            let (schedule, shape) = cover(&schedule, self.shape, part, &costs)?;
            let name = format!("async_1f1b, {} % of latency covered", 100.0 * f64::from(share) / f64::from(SHARES));
            self.given(&name, schedule, shape).ok()
        };
        (1..=SHARES).filter_map(with).collect()
    }
}

/// Figures of a verified program. None without a steady state.
pub fn measure(program: &Program, costs: &Costs, chunks: u32) -> Option<Figures> {
    let steady = steady(program, costs)?;
    let ranks = program.streams.len();
    let mut spans = vec![(u64::MAX, 0); ranks];
    for event in run(program, costs, u64::from(program.streams[0].updates)) {
        let span = &mut spans[event.rank.index()];
        *span = (span.0.min(event.start_ns), span.1.max(event.end_ns));
    }
    let span_ns = spans.iter().map(|(start, end)| end.saturating_sub(*start)).max()?;
    let least = steady.busy_ns.iter().min().copied().unwrap_or(0);
    Some(Figures {
        bubble: (0..ranks).map(|rank| steady.bubble(rank)).fold(0.0, f64::max),
        span_ns,
        bubble_span: if span_ns == 0 { 0.0 } else { 1.0 - least as f64 / span_ns as f64 },
        period_ns: steady.period_ns(),
        kept: program.streams.iter().map(in_flight).max().unwrap_or(0),
        chunks,
    })
}

impl Limits {
    /// Most micro-batches that a rank of `chunks` stages keeps, each stage counted.
    fn cap(&self, chunks: u32) -> u64 {
        self.kept_milli.map_or(u64::MAX, |milli| milli.saturating_mul(u64::from(chunks)) / 1000)
    }

    /// The first limit that a verified program is not within, as a sentence.
    pub fn exceeded(
        &self,
        program: &Program,
        chunks: u32,
        boundary: Option<u64>,
        memory: &dyn Fn(&Program) -> Option<Vec<u64>>,
    ) -> Option<String> {
        let kept = program.streams.iter().map(in_flight).enumerate();
        let over = kept.filter(|(_, kept)| u64::from(*kept) > self.cap(chunks)).max_by_key(|(_, kept)| *kept);
        if let Some((rank, kept)) = over {
            let cap = self.cap(chunks);
            let parts = if chunks == 1 { "" } else { ", each of its stages counted" };
            return Some(format!("rank {rank} keeps {kept} micro-batches{parts}, and the search allows {cap}"));
        }
        let stages = versions(program, boundary).ok()?;
        let most = |of: fn(&crate::versions::StageVersions) -> u64| stages.iter().map(of).max().unwrap_or(0);
        let staleness = [
            ("drift", most(|s| s.drift.staleness.max), self.drift),
            ("delay", most(|s| s.delay.staleness.max), self.delay),
        ];
        if let Some((name, found, asked)) = staleness.into_iter().find(|(_, found, asked)| found > asked) {
            return Some(format!("{name} is {found}, and the search allows {asked}"));
        }
        let bytes = self.bytes.as_ref()?;
        let needed = memory(program)?;
        let over = needed.iter().enumerate().find(|(rank, needed)| **needed > bytes.of(*rank).value);
        over.map(|(rank, needed)| {
            format!("rank {rank} needs {needed} bytes, and the search allows {}", bytes.of(rank).value)
        })
    }
}

/// The placement's problem with every rank's cap at what the limits on micro-batches leave.
fn problem(request: &Request, place: Place) -> Result<Option<Problem>, Unreachable> {
    let chunks = place.chunks(request.shape.chunks);
    let all = u64::from(request.shape.accumulate) * u64::from(chunks);
    let cap = request.limits.cap(chunks).min(all);
    if cap < u64::from(chunks) {
        return Err(Unreachable::Kept { least_milli: 1000 });
    }
    let caps = vec![cap as usize; request.shape.ranks as usize];
    let costs = least(place, request.shape).and_then(|program| (request.costs)(&program));
    Ok(costs.map(|costs| Problem::new(place, &request.shape, &costs, caps)))
}

/// The program on a placement that keeps least: one micro-batch after the other.
pub fn least(place: Place, shape: Shape) -> Option<Program> {
    let costs = Costs::unit((shape.ranks * place.chunks(shape.chunks)) as usize);
    let problem = Problem::new(place, &shape, &costs, vec![usize::MAX; shape.ranks as usize]);
    frozen::program(&problem, &problem.one_by_one(), &shape)
}
