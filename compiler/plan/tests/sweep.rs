//! Random specifications against the interpreter: every figure that the analyses give is counted again by running the
//! plan, and what they refuse is seen to fail.
//!
//! `make sweep` runs ten thousand; the tests of every change some hundreds.

use crate::interpreter::{Durations, Observed, Random, interpret, simulate};
use crate::orders::{self, Wrong};
use crate::specs;
use artifact::stream::{Op, Policy, Program, RingSizes};
use dsl::diag::Diagnostic;
use dsl::schedule::{Action, PhaseKind, Place, Schedule, Update};
use dsl::spec::Spec;
use plan::facts::{Facts, Staleness};
use plan::time::Costs;
use plan::{Shape, Subject, analyse};
use std::collections::BTreeMap;

/// A specification whose plan is sound, with all that was found out about it.
#[derive(Clone)]
pub struct Case {
    pub spec: Spec,
    pub shape: Shape,
    pub program: Program,
    pub costs: Costs,
    pub facts: Facts,
    /// Codes of the bounds that are said to be missed.
    pub missed: Vec<&'static str>,
}

/// What became of a text.
pub enum Outcome {
    /// Refused by the language, or without a plan: why.
    Refused(Box<Spec>, Shape, Vec<Diagnostic>),
    Unread(&'static str),
    Planned(Box<Case>),
}

/// Slots beyond what a spec asks for, now and then.
fn shape(spec: &Spec, random: &mut Random) -> Shape {
    let shape = Shape::of(spec);
    // A tied table and a global norm need a flush.
    let flush = spec.schedule.update == Update::Flush;
    let (tied, global_norm) = ((flush || shape.ranks == 1) && random.one_in(3), flush && random.one_in(3));
    let shape = Shape { tied, global_norm, ..shape };
    if random.below(4) > 0 {
        return shape;
    }
    Shape { receive_extra: random.below(3) as u32, send_slots: 1 + random.below(2) as u32, ..shape }
}

pub fn outcome(text: &str, random: &mut Random) -> Outcome {
    let (spec, found) = dsl::load(text, &[]);
    let Some(spec) = spec else {
        let error = found.iter().find(|d| d.is_error()).expect("a text without a spec has an error");
        assert_ne!(error.code, "P0101", "the generator writes no syntax errors: {error:?}\n{text}");
        return Outcome::Unread(error.code);
    };
    let shape = shape(&spec, random);
    match plan::expand(&spec.schedule, shape) {
        Err(found) => Outcome::Refused(Box::new(spec), shape, found),
        Ok(program) => Outcome::Planned(Box::new(case(spec, shape, program))),
    }
}

fn case(spec: Spec, shape: Shape, program: Program) -> Case {
    let costs = match spec.machine.cost.as_ref().map(|cost| &cost.value) {
        Some(dsl::spec::Cost::Stages(costs)) => {
            let mut costs = Costs::of_spec(costs, program.stages_of_copy());
            costs.stages = costs.stages.repeat(program.copies as usize);
            costs.exchange_ns = costs.hop_ns * 3 / 2;
            costs
        }
        other => panic!("the generator writes costs by stage: {other:?}"),
    };
    let subject = Subject { shape, ..Subject::of(&spec) };
    let (facts, found) = analyse(&program, &subject, &costs);
    let missed = found.iter().filter(|d| d.is_error()).map(|d| d.code).collect();
    Case { shape, program, costs, facts, missed, spec }
}

/// Figures of a plan, counted.
#[derive(Clone, Debug)]
pub struct Counted {
    pub drift: Vec<Staleness>,
    pub delay: Vec<Staleness>,
    pub used: Vec<RingSizes>,
    pub in_flight: Vec<u32>,
    /// One repetition alone, under the costs.
    pub alone: Observed,
    /// Time of so many repetitions in steady state; none if it was not looked for, or not found.
    pub steady: Option<(u64, u64)>,
}

/// Updates after which everything has shown.
fn long(program: &Program) -> u64 {
    let furthest = program.streams.iter().flat_map(|s| &s.period).map(|i| i.mb).max().unwrap_or(0);
    u64::from(furthest / program.accumulate + 2 + 2 * program.streams[0].updates)
}

/// Largest and mean of the last `step`.
fn staleness(lists: &[Vec<u64>], step: usize) -> Vec<Staleness> {
    let of = |list: &Vec<u64>| Staleness {
        max: list.iter().copied().max().unwrap_or(0),
        mean: list[list.len() - step..].iter().sum::<u64>() as f64 / step as f64,
    };
    lists.iter().map(of).collect()
}

/// Runs of several lengths with random durations, and one under the costs.
pub fn count(case: &Case, random: &mut Random) -> Result<Counted, String> {
    let program = &case.program;
    let mut run = |updates| interpret(program, updates, random).map_err(|e| format!("{updates} updates: {e}"));
    for updates in 1..=3 {
        run(updates)?;
    }
    let observed = run(long(program))?;
    let step = program.streams[0].microbatches as usize;
    let (mut drift, mut delay) = (staleness(&observed.drift, step), staleness(&observed.delay, step));
    // A drain changes nothing that a double buffer reads.
    let cut = case.spec.pipeline.boundary.as_ref().filter(|_| program.policy != Policy::DoubleBuffer);
    if let Some(boundary) = cut {
        let segment = run(boundary.value)?;
        let all = (boundary.value * u64::from(program.accumulate)) as usize;
        (drift, delay) = (staleness(&segment.drift, all), staleness(&segment.delay, all));
    }
    let alone = timed(case, u64::from(program.streams[0].updates))?;
    Ok(Counted { drift, delay, used: observed.used, in_flight: observed.in_flight, alone, steady: None })
}

/// A run under the costs.
fn timed(case: &Case, updates: u64) -> Result<Observed, String> {
    let mut compute = |op, stage: usize| case.costs.of(op, artifact::ids::StageId(stage as u32));
    let durations = Durations {
        compute: &mut compute,
        hop: &mut |across| if across { case.costs.exchange_ns } else { case.costs.hop_ns },
    };
    simulate(&case.program, updates, durations)
}

/// Longest cycle of repetitions that is looked for.
const CYCLE_MAX: usize = 24;

/// The time of a repetition in steady state, from a run of `repetitions`: every stage's updates come to repeat.
pub fn steady(case: &Case, repetitions: u64) -> Result<Option<(u64, u64)>, String> {
    let program = &case.program;
    let updates = u64::from(program.streams[0].updates);
    let observed = timed(case, repetitions * updates)?;
    // The end of a run goes faster.
    let end = ((repetitions * updates).saturating_sub(long(program)) / updates) as usize;
    let at = |stage: usize, repetition: usize| observed.updated[stage][repetition * updates as usize];
    let stages = program.rank_of_stage.len();
    for cycle in 1..=CYCLE_MAX.min(end / 3) {
        let grows = |stage: usize, n: usize| at(stage, end - n) - at(stage, end - n - cycle);
        let total = grows(0, 1);
        if (0..stages).all(|s| (1..=2 * cycle.max(4)).all(|n| n + cycle > end || grows(s, n) == total)) {
            return Ok(Some((total, cycle as u64)));
        }
    }
    Ok(None)
}

/// No stage stashes more versions of its weights than its order needs: with one less the interpreter finds the loss.
fn one_version_short(case: &Case, random: &mut Random) -> Result<(), String> {
    let program = &case.program;
    for s in (0..program.rings.len()).filter(|s| program.policy == Policy::Stash && program.rings[*s].weights > 1) {
        let mut short = program.clone();
        short.rings[s].weights -= 1;
        if interpret(&short, long(program), random).is_ok() {
            return Err(format!("stage {s} keeps {} versions, and one less is enough", program.rings[s].weights));
        }
    }
    Ok(())
}

/// Whether the analyses say what was counted.
///
/// # Errors
/// The figure that differs.
pub fn compare(case: &Case, counted: &Counted) -> Result<(), String> {
    let differs = |what: &str, said: String, seen: String| Err(format!("{what}: said {said}, counted {seen}"));
    let same = |a: &Staleness, b: &Staleness| a.max == b.max && (a.mean - b.mean).abs() < 1e-9;
    if let Some(proof) = case.facts.proofs.iter().find(|p| !p.holds && case.missed.is_empty()) {
        return Err(format!("not proved: {}", proof.claim));
    }
    for (s, facts) in case.facts.stages.iter().enumerate() {
        if !same(&facts.drift, &counted.drift[s]) {
            return differs(
                &format!("drift of stage {s}"),
                format!("{:?}", facts.drift),
                format!("{:?}", counted.drift),
            );
        }
        if !same(&facts.delay, &counted.delay[s]) {
            return differs(
                &format!("delay of stage {s}"),
                format!("{:?}", facts.delay),
                format!("{:?}", counted.delay),
            );
        }
        let copies = match case.program.policy {
            Policy::Current | Policy::Recomputed => 1,
            Policy::DoubleBuffer => 2,
            // The fewest, see `one_version_short`.
            Policy::Stash | Policy::Predicted => case.program.rings[s].weights,
        };
        if facts.versions_live != copies {
            return differs("weight copies", facts.versions_live.to_string(), copies.to_string());
        }
        let (said, seen) = (&case.program.rings[s], &counted.used[s]);
        if !minimal(case, s, seen) {
            return differs(&format!("rings of stage {s}"), format!("{said:?}"), format!("{seen:?}"));
        }
    }
    ranks(case, counted)?;
    if case.facts.makespan_ns != counted.alone.makespan() {
        return differs("makespan", case.facts.makespan_ns.to_string(), counted.alone.makespan().to_string());
    }
    bounds(case, counted)
}

fn ranks(case: &Case, counted: &Counted) -> Result<(), String> {
    let near = |a: f64, b: f64| (a - b).abs() < 1e-9;
    let idle = |busy: u64, of: u64| if of == 0 { 0.0 } else { 1.0 - busy as f64 / of as f64 };
    let alone = &counted.alone;
    let longest = alone.span.iter().map(|(start, end)| end - start).max().unwrap_or(0);
    for (r, facts) in case.facts.ranks.iter().enumerate() {
        let (busy, (start, end)) = (alone.busy[r], alone.span[r]);
        let figures = [
            ("in flight", f64::from(facts.in_flight_max), f64::from(counted.in_flight[r])),
            ("busy", facts.busy_ns as f64, busy as f64),
            ("span", facts.span_ns as f64, (end - start) as f64),
            ("bubble of the span", facts.bubble_span, idle(busy, longest)),
            ("bubble of the makespan", facts.bubble_makespan, idle(busy, alone.makespan())),
        ];
        if let Some((what, said, seen)) = figures.into_iter().find(|(_, said, seen)| !near(*said, *seen)) {
            return Err(format!("{what} of rank {r}: said {said}, counted {seen}"));
        }
        if let Some((total, repetitions)) = counted.steady
            && (!near(facts.bubble, idle(busy * repetitions, total))
                || case.facts.period_ns != total.div_ceil(repetitions))
        {
            let said = (facts.bubble, case.facts.period_ns);
            return Err(format!("bubble of rank {r}: said {said:?}, counted {total} in {repetitions} repetitions"));
        }
    }
    Ok(())
}

/// Every slot is used at some time. Where a send ring has several slots, they only buy time; receives from another rank
/// may have more slots than are ever used where a rank has several stages (`buffers` and `posts` of the plan say why).
fn minimal(case: &Case, s: usize, seen: &RingSizes) -> bool {
    let (program, said) = (&case.program, &case.program.rings[s]);
    let several = program.rank_of_stage.len() > program.streams.len();
    let send = |said: u32, seen: u32| seen <= said && (said > 1 || seen == said);
    let receive = |border: Option<usize>, said: u32, seen: u32| {
        if several && border.is_some() { seen <= said } else { seen == said }
    };
    said.stash == seen.stash
        && send(said.send_f, seen.send_f)
        && send(said.send_b, seen.send_b)
        && receive(program.border_before(s), said.recv_f, seen.recv_f)
        && receive(program.border_after(s), said.recv_b, seen.recv_b)
}

/// Bounds are missed exactly where the run misses them.
fn bounds(case: &Case, counted: &Counted) -> Result<(), String> {
    let most = |list: &[Staleness]| list.iter().map(|s| s.max).max().unwrap_or(0);
    let staleness = &case.spec.staleness;
    let mut asked = vec![
        ("P0311", staleness.drift.as_ref().map(|b| most(&counted.drift) > b.value)),
        ("P0312", staleness.delay.as_ref().map(|b| most(&counted.delay) > b.value)),
    ];
    if let (Some((total, repetitions)), Some(bound)) = (counted.steady, &case.spec.require.bubble) {
        let idle = |busy: &u64| 1.0 - (busy * repetitions) as f64 / total as f64;
        let worst = counted.alone.busy.iter().map(idle).fold(0.0, f64::max);
        asked.push(("P0313", Some(worst > bound.value)));
    }
    for (code, missed) in asked {
        let said = case.missed.contains(&code);
        if missed.unwrap_or(false) != said {
            return Err(format!("{code}: said to be missed: {said}, counted: {missed:?}"));
        }
    }
    Ok(())
}

/// What the streams compute is what the order says, read independently; in runs of several lengths.
pub fn order(case: &Case) -> Result<(), String> {
    let k = u64::from(case.program.accumulate);
    for updates in [1, 2, long(&case.program)] {
        let lists = computed(&case.spec.schedule, &case.shape, updates)
            .map_err(|wrong| format!("the order can't be performed: {wrong:?}"))?;
        for (rank, (stream, list)) in case.program.streams.iter().zip(&lists).enumerate() {
            let acts = stream.segment(updates).filter_map(|(op, stage, mb)| Some((action(op)?, stage.0, mb)));
            if !acts.eq(list.iter().copied()) {
                return Err(format!("rank {rank} computes something else in {updates} updates of {k}: {list:?}"));
            }
        }
    }
    Ok(())
}

fn action(op: Op) -> Option<Action> {
    match op {
        Op::F => Some(Action::F),
        Op::B(_) => Some(Action::B),
        Op::I => Some(Action::I),
        Op::W(_) => Some(Action::W),
        _ => None,
    }
}

/// By rank: what it computes in a run of so many updates.
fn computed(schedule: &Schedule, shape: &Shape, updates: u64) -> Result<Vec<Vec<orders::Act>>, Wrong> {
    let k = u64::from(shape.accumulate);
    let of = |rank| match schedule.update {
        Update::Local => orders::perform(schedule, shape, rank, updates * k),
        Update::Flush => {
            let one = orders::perform(schedule, shape, rank, k)?;
            let k = k / u64::from(schedule.place.copies());
            let flush = |n: u64| one.iter().map(move |(action, stage, mb)| (*action, *stage, mb + n * k));
            Ok((0..updates).flat_map(flush).collect())
        }
    };
    (0..shape.ranks).map(of).collect()
}

/// Whether a refusal is right: the fault shows when the order is performed.
fn confirm(spec: &Spec, shape: &Shape, found: &Diagnostic, random: &mut Random) -> Result<(), String> {
    let schedule = &spec.schedule;
    let updates = 2 + u64::from(4 * shape.ranks / shape.accumulate.max(1)) * 2;
    let each: Vec<_> = (0..shape.ranks).map(|rank| performed(schedule, shape, rank, updates)).collect();
    let right = |wrong: Wrong| match each.iter().any(|list| list.as_ref() == Err(&wrong)) {
        true => Ok(()),
        false => Err(format!("{wrong:?} does not show: {each:?}")),
    };
    match found.code {
        "P0301" => right(Wrong::Before),
        "P0302" => right(Wrong::LeftOut),
        "P0303" => right(Wrong::Value),
        "P0304" => right(Wrong::Idle),
        "P0309" => right(Wrong::Groups),
        "P0306" | "P0308" => unsteady(schedule, shape),
        "P0314" if shape.ranks % 2 == 1 && schedule.place == Place::Bidirectional => Ok(()),
        "P0310" => deadlock(schedule, shape, updates, random),
        "P0340" => lost_version(schedule, shape, random),
        other => Err(format!("an unexpected code: {other}")),
    }
}

fn performed(schedule: &Schedule, shape: &Shape, rank: u32, updates: u64) -> Result<Vec<orders::Act>, Wrong> {
    let length = if schedule.update == Update::Flush { 1 } else { updates };
    orders::perform(schedule, shape, rank, length * u64::from(shape.accumulate))
}

/// A long run does not do what a longer one does, the missing micro-batches skipped; or keeps ever more in flight.
fn unsteady(schedule: &Schedule, shape: &Shape) -> Result<(), String> {
    let lengths = [1, 2, 3, 5, 8, 13, 21].map(|n| n * u64::from(shape.accumulate));
    let in_flight = |list: &[orders::Act]| {
        let ends = |action| matches!(action, Action::B | Action::W);
        let step = |now: &mut i64, act: &orders::Act| {
            *now += i64::from(act.0 == Action::F) - i64::from(ends(act.0));
            Some(*now)
        };
        list.iter().scan(0, step).max()
    };
    for rank in 0..shape.ranks {
        let Ok(longest) = orders::perform(schedule, shape, rank, 40 * u64::from(shape.accumulate)) else {
            return Ok(());
        };
        for length in lengths {
            let skipped = longest.iter().filter(|(_, _, mb)| *mb < length).copied();
            match orders::perform(schedule, shape, rank, length) {
                Ok(list) if list.iter().copied().eq(skipped) && in_flight(&list) <= in_flight(&longest) => {}
                _ => return Ok(()),
            }
        }
        let longer = orders::perform(schedule, shape, rank, 60 * u64::from(shape.accumulate));
        if longer.is_ok_and(|longer| in_flight(&longer) > in_flight(&longest)) {
            return Ok(());
        }
    }
    Err("runs of all lengths go on in the same way".into())
}

/// Ranks wait for each other: whatever the buffers, or with the plan's.
fn deadlock(schedule: &Schedule, shape: &Shape, updates: u64, random: &mut Random) -> Result<(), String> {
    let lists: Result<Vec<_>, _> = (0..shape.ranks).map(|rank| performed(schedule, shape, rank, updates)).collect();
    let lists = lists.map_err(|wrong| format!("the order can't be performed: {wrong:?}"))?;
    if !orders::ends(schedule, shape, &lists) {
        return Ok(());
    }
    let program = plan::expand::streams(schedule, shape).map_err(|d| d.message)?;
    let run = interpret(&program, updates.max(long(&program)), random);
    if run.as_ref().is_err_and(|e| e == "stuck") { Ok(()) } else { Err(format!("it runs: {:?}", run.err())) }
}

/// A pass finds another version of the weights than it should read.
fn lost_version(schedule: &Schedule, shape: &Shape, random: &mut Random) -> Result<(), String> {
    let program = plan::expand::streams(schedule, shape).map_err(|d| d.message)?;
    let run = interpret(&program, long(&program), random);
    let lost = run.as_ref().is_err_and(|e| e.contains("finds weights"));
    if lost { Ok(()) } else { Err(format!("every version is there: {:?}", run.err())) }
}

/// How many there were of what.
#[derive(Debug, Default)]
pub struct Tally(BTreeMap<String, u32>);

impl Tally {
    fn add(&mut self, what: &str) {
        *self.0.entry(what.into()).or_default() += 1;
    }

    pub fn of(&self, what: &str) -> u32 {
        self.0.get(what).copied().unwrap_or(0)
    }

    /// What is special about a valid spec.
    fn kinds(&mut self, case: &Case) {
        let (schedule, p) = (&case.spec.schedule, &case.program);
        let block = schedule.order.iter().any(|phase| matches!(phase.kind, PhaseKind::Block(_)));
        let flags = [
            ("synchronous", schedule.update == Update::Flush),
            ("asynchronous", schedule.update == Update::Local),
            ("split", schedule.backward == dsl::schedule::Backward::Split),
            ("several stages a rank", p.rank_of_stage.len() > p.streams.len()),
            ("three stages a rank", p.rank_of_stage.len() == 3 * p.streams.len()),
            ("wave", schedule.place == Place::Wave),
            ("two copies", p.copies > 1),
            ("block", block),
            ("boundary", case.spec.pipeline.boundary.is_some()),
            ("own schedule", !schedule.library),
            ("stale", case.facts.stages.iter().any(|s| s.drift.max > 0)),
            ("more delay than drift", case.facts.stages.iter().any(|s| s.delay.max > s.drift.max)),
            ("9 to 12 ranks", p.streams.len() > 8),
        ];
        flags.into_iter().filter(|(_, set)| *set).for_each(|(name, _)| self.add(&format!("valid, {name}")));
    }
}

/// Takes `specs` random texts through everything.
pub fn sweep(specs: u32, seed: u64) -> Tally {
    let mut random = Random(seed);
    let mut tally = Tally::default();
    for number in 0..specs {
        let text = specs::text(&mut random);
        let context = |e: String, text: &str| format!("spec {number} of seed {seed}: {e}\n{text}");
        match outcome(&text, &mut random) {
            Outcome::Unread(code) => tally.add(&format!("not read, {code}")),
            Outcome::Refused(spec, shape, found) => {
                tally.add(&format!("refused, {}", found[0].code));
                let confirmed = confirm(&spec, &shape, &found[0], &mut random);
                confirmed.unwrap_or_else(|e| panic!("{}", context(format!("{}: {e}", found[0].code), &text)));
            }
            Outcome::Planned(case) => {
                let checked = order(&case)
                    .and_then(|()| one_version_short(&case, &mut random))
                    .and_then(|()| examine(&case, &mut random));
                let settled = checked.unwrap_or_else(|e| panic!("{}", context(e, &text)));
                tally.add(if settled { "steady state seen" } else { "steady state not looked for" });
                match case.missed.first() {
                    Some(code) => tally.add(&format!("a bound missed, {code}")),
                    None => {
                        tally.add("valid");
                        tally.kinds(&case);
                    }
                }
            }
        }
    }
    tally
}

/// Counts and compares; whether the steady state was among it.
fn examine(case: &Case, random: &mut Random) -> Result<bool, String> {
    let mut counted = count(case, random)?;
    compare(case, &counted)?;
    let size: usize = case.program.streams.iter().map(|s| s.period.len()).sum();
    if size > 150 && random.below(4) > 0 && case.spec.require.bubble.is_none() {
        return Ok(false);
    }
    // A steady state that shows late looks like another one before.
    let mut last = Ok(false);
    for repetitions in [24, 48, 192, 768] {
        counted.steady = steady(case, repetitions)?;
        last = compare(case, &counted).map(|()| counted.steady.is_some());
        if last == Ok(true) {
            return last;
        }
    }
    last
}

fn accepted(specs: u32, seed: u64) {
    let tally = sweep(specs, seed);
    for (what, count) in &tally.0 {
        println!("{count:6}  {what}");
    }
    assert!(tally.of("valid") * 10 >= specs * 4, "less than 40 % are valid: {tally:?}");
    for kind in ["synchronous", "asynchronous", "split", "several stages a rank", "block", "boundary", "9 to 12 ranks"]
    {
        assert!(tally.of(&format!("valid, {kind}")) * 100 >= specs, "less than 1 % are valid and {kind}: {tally:?}");
    }
    for code in ["P0301", "P0306", "P0309", "P0310"] {
        assert!(tally.of(&format!("refused, {code}")) > 0, "none is refused with {code}: {tally:?}");
    }
}

#[test]
fn some_random_specs_run_as_analysed() {
    accepted(500, 2026);
}

/// The full number, by `make sweep`.
#[test]
#[ignore = "takes minutes: `make sweep`"]
fn ten_thousand_random_specs_run_as_analysed() {
    accepted(10_000, 1);
}
