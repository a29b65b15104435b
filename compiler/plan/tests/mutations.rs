//! Broken analyses: each small fault is brought into the facts or the plan of many random specs, and the interpreter must
//! catch it wherever it makes a difference.

use crate::interpreter::{Random, interpret};
use crate::specs;
use crate::sweep::{Case, Counted, Outcome, compare, count, order, outcome, steady};
use artifact::ids::StageId;
use artifact::stream::{Accumulation, Instr, Op, RingSizes, Stream};
use dsl::schedule::{BinaryOp, Expr, PhaseKind, Schedule};
use plan::facts::Staleness;
use plan::{Subject, analyse};

/// Brings its fault in; false where it makes no difference.
type Fault = fn(&mut Case, &mut Random) -> bool;

/// A fault is as good as caught when it was seen so often.
const SEEN: u32 = 8;

const FACTS: [(&str, Fault); 18] = [
    ("the largest drift is one too low", |case, _| any(case, |case, s| lower(&mut case.facts.stages[s].drift.max))),
    ("the largest drift is one too high", |case, _| any(case, |case, s| raise(&mut case.facts.stages[s].drift.max))),
    ("the largest delay is one too low", |case, _| any(case, |case, s| lower(&mut case.facts.stages[s].delay.max))),
    ("delay is counted to the backward pass, not to the update", |case, _| {
        any(case, |case, s| {
            let facts = &mut case.facts.stages[s];
            replace(&mut facts.delay, facts.drift)
        })
    }),
    ("drift is counted to the update, not to the backward pass", |case, _| {
        any(case, |case, s| {
            let facts = &mut case.facts.stages[s];
            replace(&mut facts.drift, facts.delay)
        })
    }),
    ("the version that F reads is looked up an instruction late", |case, _| {
        any(case, |case, s| {
            let late = late(case, s);
            replace(&mut case.facts.stages[s].drift, late)
        })
    }),
    ("means are over the first repetition, not the steady state", |case, _| {
        if case.spec.pipeline.boundary.is_some() {
            return false;
        }
        any(case, |case, s| {
            let mean = mean_of_the_first(case, s);
            replace(&mut case.facts.stages[s].drift.mean, mean)
        })
    }),
    ("a boundary is left out of account", |case, _| {
        if case.spec.pipeline.boundary.is_none() {
            return false;
        }
        let all = plan::versions::versions(&case.program, None).expect("the plan is sound");
        any(case, |case, s| replace(&mut case.facts.stages[s].drift, all[s].drift.staleness))
    }),
    ("what is in flight is counted to I, not to W", |case, _| {
        any_rank(case, |case, r| {
            let split = case.spec.schedule.backward == dsl::schedule::Backward::Split;
            let to_i = in_flight(&case.program.streams[r], |op| op == Op::I, |_| true);
            split && replace(&mut case.facts.ranks[r].in_flight_max, to_i)
        })
    }),
    ("what is in flight is counted on one stage of a rank", |case, _| {
        any_rank(case, |case, r| {
            let first = case.program.rank_of_stage.iter().position(|rank| rank.index() == r).unwrap_or(0);
            let ends = |op| matches!(op, Op::B(_) | Op::W(_));
            let of_one = in_flight(&case.program.streams[r], ends, |stage| stage.index() == first);
            replace(&mut case.facts.ranks[r].in_flight_max, of_one)
        })
    }),
    ("work leaves weight gradients out", |case, _| {
        let costs = case.costs.clone();
        any_rank(case, |case, r| {
            let i = |i: &Instr| costs.of(i.op, i.stage).saturating_sub(weight(i, &costs));
            let busy = case.program.streams[r].period.iter().map(i).sum();
            replace(&mut case.facts.ranks[r].busy_ns, busy)
        })
    }),
    ("the makespan leaves hops out", |case, _| {
        let costs = plan::time::Costs { hop_ns: 0, ..case.costs.clone() };
        let timed = plan::time::run(&case.program, &costs, u64::from(case.program.streams[0].updates));
        replace(&mut case.facts.makespan_ns, timed.iter().map(|t| t.end_ns).max().unwrap_or(0))
    }),
    ("the makespan leaves the exchange of a tied table out", |case, _| {
        let costs = plan::time::Costs { exchange_ns: 0, ..case.costs.clone() };
        let timed = plan::time::run(&case.program, &costs, u64::from(case.program.streams[0].updates));
        replace(&mut case.facts.makespan_ns, timed.iter().map(|t| t.end_ns).max().unwrap_or(0))
    }),
    ("the period leaves the exchange of a tied table out", |case, _| {
        let costs = plan::time::Costs { exchange_ns: 0, ..case.costs.clone() };
        let steady = plan::steady::steady(&case.program, &costs).expect("the plan is sound");
        replace(&mut case.facts.period_ns, steady.period_ns())
    }),
    ("the bubble of the span is over the global end", |case, _| {
        any_rank(case, |case, r| {
            let facts = &mut case.facts.ranks[r];
            replace(&mut facts.bubble_span, facts.bubble_makespan)
        })
    }),
    ("the period leaves hops out", |case, _| {
        let costs = plan::time::Costs { hop_ns: 0, ..case.costs.clone() };
        let steady = plan::steady::steady(&case.program, &costs).expect("the plan is sound");
        replace(&mut case.facts.period_ns, steady.period_ns())
    }),
    ("the bubble in steady state is that of one repetition alone", |case, _| {
        any_rank(case, |case, r| {
            let facts = &mut case.facts.ranks[r];
            let differs = (facts.bubble - facts.bubble_makespan).abs() > 1e-6;
            differs && replace(&mut facts.bubble, facts.bubble_makespan)
        })
    }),
    ("a bound that is missed is passed over", |case, _| case.missed.pop().is_some_and(|code| code != "P0313")),
];

const PLANS: [(&str, Fault); 23] = [
    ("the stash is one short", |case, random| short(case, random, |r| &mut r.stash)),
    ("the ring of inputs is one short", |case, random| short(case, random, |r| &mut r.recv_f)),
    ("the ring of output gradients is one short", |case, random| short(case, random, |r| &mut r.recv_b)),
    ("a send ring has no slot", |case, random| {
        let s = random.below(case.program.rings.len() as u64) as usize;
        replace(&mut case.program.rings[s].send_f, 0) | replace(&mut case.program.rings[s].send_b, 0)
    }),
    ("a stash slot too many", |case, _| {
        case.program.rings[0].stash += 1;
        true
    }),
    ("an update comes before its last weight gradient", |case, random| {
        moved(case, random, |op| op == Op::U, |op| matches!(op, Op::B(_) | Op::W(_)))
    }),
    ("an update is left out", |case, random| removed(case, random, |op| op == Op::U)),
    ("the first weight gradient adds to what is left", |case, random| marked(case, random, |a| &mut a.first)),
    ("the last weight gradient is not marked", |case, random| marked(case, random, |a| &mut a.last)),
    ("two sends to the same rank are swapped", |case, _| swapped_sends(case)),
    ("a post is missing", |case, random| removed(case, random, |op| matches!(op, Op::RecvF | Op::RecvB))),
    ("a send is missing", |case, random| removed(case, random, |op| matches!(op, Op::SendF | Op::SendB))),
    ("an update does not wait for the other end's gradient", |case, random| alone(case, random)),
    ("the sum that is exchanged lacks the last weight gradient", |case, random| {
        moved(case, random, |op| op == Op::SendG, |op| matches!(op, Op::B(_) | Op::W(_)))
    }),
    ("one end's gradient is not sent", |case, random| removed(case, random, |op| op == Op::SendG)),
    ("one end's gradient is not received", |case, random| removed(case, random, |op| op == Op::RecvG)),
    ("ends on one rank are updated one late", |case, _| late_end(case)),
    ("squares are added before the last weight gradient", |case, random| {
        moved(case, random, |op| op == Op::N, |op| matches!(op, Op::B(_) | Op::W(_)))
    }),
    ("an update comes before the total", |case, random| moved(case, random, |op| op == Op::U, |op| op == Op::T)),
    ("a total is sent before it is there", |case, random| moved(case, random, |op| op == Op::SendT, |op| op == Op::T)),
    ("a sum is sent before the stage has added", |case, random| {
        moved(case, random, |op| op == Op::SendN, |op| op == Op::N)
    }),
    ("a stage's squares are left out", |case, random| removed(case, random, |op| op == Op::N)),
    ("a total is not sent on", |case, random| removed(case, random, |op| op == Op::SendT)),
];

const ORDERS: [(&str, Fault); 5] = [
    ("a warm-up runs a round more", |case, _| reordered(case, |s| counts(s).any(|count| plus(count, 1)))),
    ("a warm-up runs a round less", |case, _| reordered(case, |s| counts(s).any(|count| plus(count, -1)))),
    ("groups are of another size", |case, _| {
        reordered(case, |s| s.sequences.iter_mut().any(|sequence| replace(&mut sequence.groups, Expr::Number(1))))
    }),
    ("conditions always hold", |case, _| {
        let none = |step: &mut dsl::schedule::Step| step.when.take().is_some();
        reordered(case, |s| s.order.iter_mut().flat_map(|phase| &mut phase.body).any(none))
    }),
    ("a block's interval is one longer", |case, _| {
        let interval = |phase: &mut dsl::schedule::Phase| match &mut phase.kind {
            PhaseKind::Block(interval) => plus(interval, 1),
            _ => false,
        };
        reordered(case, |s| s.order.iter_mut().any(interval))
    }),
];

fn lower(value: &mut u64) -> bool {
    replace(value, value.saturating_sub(1))
}

fn raise(value: &mut u64) -> bool {
    replace(value, *value + 1)
}

/// Whether that changed anything.
fn replace<T: PartialEq>(place: &mut T, with: T) -> bool {
    let changed = *place != with;
    *place = with;
    changed
}

/// The fault on the first stage where it makes a difference.
fn any(case: &mut Case, fault: impl Fn(&mut Case, usize) -> bool) -> bool {
    (0..case.facts.stages.len()).any(|s| fault(case, s))
}

fn any_rank(case: &mut Case, fault: impl Fn(&mut Case, usize) -> bool) -> bool {
    (0..case.facts.ranks.len()).any(|r| fault(case, r))
}

/// Drift with the version that the next F reads.
fn late(case: &Case, s: usize) -> Staleness {
    let stage = StageId(s as u32);
    let stream = &case.program.streams[case.program.rank_of_stage[s].index()];
    let updates = 3 * u64::from(stream.updates);
    let list: Vec<_> = stream.segment(updates).filter(|(_, of, _)| *of == stage).map(|(op, _, mb)| (op, mb)).collect();
    let version = |at: usize| list[..at].iter().filter(|(op, _)| *op == Op::U).count() as u64;
    let at = |of: fn(Op) -> bool, mb: u64| list.iter().position(|(op, m)| of(*op) && *m == mb);
    let drift = |mb| {
        let next = at(|op| op == Op::F, mb + 1)?;
        Some(version(at(|op| matches!(op, Op::B(_) | Op::I), mb)?).saturating_sub(version(next)))
    };
    let all = updates * u64::from(case.program.accumulate);
    Staleness { max: (0..all).filter_map(drift).max().unwrap_or(0), mean: case.facts.stages[s].drift.mean }
}

fn mean_of_the_first(case: &Case, s: usize) -> f64 {
    let step = u64::from(case.program.streams[0].microbatches);
    let boundary = u64::from(case.program.streams[0].updates);
    let stage = plan::versions::versions(&case.program, Some(boundary)).expect("the plan is sound");
    if step == 0 { 0.0 } else { stage[s].drift.staleness.mean }
}

/// Most in flight from F to the operation, of the stages.
fn in_flight(stream: &Stream, ends: fn(Op) -> bool, of: impl Fn(StageId) -> bool) -> u32 {
    let (mut now, mut most) = (0u32, 0);
    for i in stream.prologue.iter().chain(&stream.period).filter(|i| of(i.stage)) {
        match i.op {
            Op::F => now += 1,
            op if ends(op) => now = now.saturating_sub(1),
            _ => {}
        }
        most = most.max(now);
    }
    most
}

fn weight(i: &Instr, costs: &plan::time::Costs) -> u64 {
    if matches!(i.op, Op::B(_) | Op::W(_)) { costs.stages[i.stage.index()].w_ns } else { 0 }
}

/// A random stage's ring with a slot less.
fn short(case: &mut Case, random: &mut Random, ring: fn(&mut RingSizes) -> &mut u32) -> bool {
    let s = random.below(case.program.rings.len() as u64) as usize;
    let slots = ring(&mut case.program.rings[s]);
    replace(slots, slots.saturating_sub(1))
}

/// The sections of all ranks.
fn sections(case: &mut Case) -> Vec<&mut Vec<Instr>> {
    case.program.streams.iter_mut().flat_map(|s| [&mut s.prologue, &mut s.period]).collect()
}

/// A random section and a random place in it.
fn place(case: &mut Case, random: &mut Random, of: fn(Op) -> bool) -> Option<(usize, usize)> {
    let mut places = Vec::new();
    for (section, list) in sections(case).iter().enumerate() {
        places.extend(list.iter().enumerate().filter(|(_, i)| of(i.op)).map(|(at, _)| (section, at)));
    }
    (!places.is_empty()).then(|| places[random.below(places.len() as u64) as usize])
}

fn removed(case: &mut Case, random: &mut Random, of: fn(Op) -> bool) -> bool {
    let Some((section, at)) = place(case, random, of) else { return false };
    sections(case)[section].remove(at);
    true
}

/// Moves an instruction before the last of its stage that is `before`.
fn moved(case: &mut Case, random: &mut Random, of: fn(Op) -> bool, before: fn(Op) -> bool) -> bool {
    let Some((section, at)) = place(case, random, of) else { return false };
    let list = &mut *sections(case)[section];
    let instr = list[at];
    let Some(to) = list[..at].iter().rposition(|i| before(i.op) && i.stage == instr.stage) else { return false };
    list.remove(at);
    list.insert(to, instr);
    true
}

/// Both ends of a tied table exchange nothing: each updates with what it has.
fn alone(case: &mut Case, _: &mut Random) -> bool {
    let exchanges = |i: &Instr| matches!(i.op, Op::SendG | Op::RecvG);
    let lists = sections(case);
    let any = lists.iter().any(|list| list.iter().any(exchanges));
    lists.into_iter().for_each(|list| list.retain(|i| !exchanges(i)));
    any
}

/// Of ends on one rank the one that is updated last is so after the next repetition's first instruction.
fn late_end(case: &mut Case) -> bool {
    let Some(ends) = case.program.tied_ends().filter(|ends| case.program.partner(ends[0]).is_none()) else {
        return false;
    };
    let rank = case.program.rank_of_stage[ends[0]].index();
    let stream = &mut case.program.streams[rank];
    let update = |i: &Instr| i.op == Op::U && ends.contains(&i.stage.index());
    let Some(at) = stream.period.iter().rposition(update) else { return false };
    let after = stream.period.iter().position(|i| i.op == Op::F && ends.contains(&i.stage.index()));
    let late = stream.period.remove(at);
    stream.prologue = stream.period.clone();
    let step = [stream.microbatches, stream.updates];
    for i in &mut stream.period {
        i.mb += step[usize::from(i.op.by_update())];
    }
    stream.period.insert(after.map_or(0, |at| at + 1), late);
    true
}

fn marked(case: &mut Case, random: &mut Random, mark: fn(&mut Accumulation) -> &mut bool) -> bool {
    let Some((section, at)) = place(case, random, |op| matches!(op, Op::B(_) | Op::W(_))) else { return false };
    match &mut sections(case)[section][at].op {
        Op::B(a) | Op::W(a) => std::mem::take(mark(a)),
        _ => false,
    }
}

/// Two neighbouring sends of a rank, to the same rank.
fn swapped_sends(case: &mut Case) -> bool {
    let homes = case.program.rank_of_stage.clone();
    let to = |i: &Instr| match i.op {
        Op::SendF => Some(homes[i.stage.index() + 1]),
        Op::SendB => Some(homes[i.stage.index() - 1]),
        _ => None,
    };
    for list in sections(case) {
        let sends: Vec<usize> = (0..list.len()).filter(|at| to(&list[*at]).is_some()).collect();
        for pair in sends.windows(2) {
            if to(&list[pair[0]]) == to(&list[pair[1]]) && list[pair[0]] != list[pair[1]] {
                list.swap(pair[0], pair[1]);
                return true;
            }
        }
    }
    false
}

/// The expansion of another order in the place of the spec's.
fn reordered(case: &mut Case, change: impl Fn(&mut Schedule) -> bool) -> bool {
    let mut schedule = case.spec.schedule.clone();
    if !change(&mut schedule) {
        return false;
    }
    let Ok(program) = plan::expand(&schedule, case.shape) else { return false };
    let subject = Subject { shape: case.shape, ..Subject::of(&case.spec) };
    let (facts, found) = analyse(&program, &subject, &case.costs);
    case.missed = found.iter().filter(|d| d.is_error()).map(|d| d.code).collect();
    case.facts = facts;
    replace(&mut case.program, program)
}

fn counts(schedule: &mut Schedule) -> impl Iterator<Item = &mut Expr> {
    schedule.order.iter_mut().filter_map(|phase| match &mut phase.kind {
        PhaseKind::Warmup(count) | PhaseKind::Counted(count) => Some(count),
        _ => None,
    })
}

fn plus(expr: &mut Expr, n: i64) -> bool {
    *expr = Expr::Binary(BinaryOp::Add, Box::new(expr.clone()), Box::new(Expr::Number(n)));
    true
}

/// Everything is counted again, a steady state too.
fn counted(case: &Case, random: &mut Random) -> Result<Counted, String> {
    order(case)?;
    Ok(Counted { steady: steady(case, 48)?, ..count(case, random)? })
}

/// Every fault of the list, on random plans, until it has made a difference often enough.
fn each_is_caught(faults: &[(&str, Fault)], seed: u64) {
    let mut random = Random(seed);
    let mut made = vec![0; faults.len()];
    for _ in 0..4000 {
        if made.iter().all(|made| *made >= SEEN) {
            break;
        }
        let text = specs::text(&mut random);
        let Outcome::Planned(case) = outcome(&text, &mut random) else { continue };
        // A steady state that takes long to show would be a difference that the fault did not make.
        let right = counted(&case, &mut random).unwrap_or_else(|e| panic!("{e}\n{text}"));
        if right.steady.is_none() || compare(&case, &right).is_err() {
            continue;
        }
        for ((name, fault), made) in faults.iter().zip(&mut made).filter(|(_, made)| **made < SEEN) {
            let mut case = case.clone();
            if fault(&mut case, &mut random) {
                *made += 1;
                let compared = counted(&case, &mut random).and_then(|counted| compare(&case, &counted));
                assert!(compared.is_err(), "not caught: {name}\n{text}\n{:?}", case.program);
            }
        }
    }
    for ((name, _), made) in faults.iter().zip(&made) {
        println!("caught {made} times: {name}");
        assert!(*made >= SEEN, "brought in {made} times only: {name}");
    }
}

#[test]
fn faults_of_the_facts_are_caught() {
    each_is_caught(&FACTS, 41);
}

#[test]
fn faults_of_the_plan_are_caught() {
    each_is_caught(&PLANS, 43);
}

#[test]
fn faults_of_the_expansion_are_caught() {
    each_is_caught(&ORDERS, 47);
}

/// Without the proof of deadlock freedom the plan would go out, and get stuck.
#[test]
fn a_proof_that_is_skipped_is_caught() {
    let mut random = Random(53);
    let mut made = 0;
    while made < SEEN {
        let text = specs::text(&mut random);
        let Outcome::Refused(spec, shape, found) = outcome(&text, &mut random) else { continue };
        if found[0].code == "P0310" {
            made += 1;
            let program = plan::expand::streams(&spec.schedule, &shape).expect("only the proof failed");
            let stuck = (1..=40).map(|updates| interpret(&program, updates, &mut random));
            assert!(stuck.into_iter().any(|run| run.is_err_and(|e| e == "stuck")), "not caught: {text}");
        }
    }
}
