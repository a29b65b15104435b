//! Random streams and broken streams: the verifier against the interpreter. (Random specs: see `sweep`.)

use crate::interpreter::{Random, interpret};
use crate::make::{async_1f1b, gpipe, num, one_f_one_b, op, repeat, schedule, step, warmup, zb_h};
use artifact::ids::{RankId, StageId};
use artifact::stream::{Accumulation, Instr, Op, Policy, Program, RingSizes, Stream};
use artifact::verify::{Violation, verify};
use dsl::schedule::{Action, Backward, BinaryOp, Update};
use plan::Shape;
use plan::steady::steady;
use plan::time::{Costs, run};

/// A random flush: every rank interleaves F and B at random, posts and sends at random places, with random slots.
fn random_streams(random: &mut Random) -> Program {
    let ranks = 2 + random.below(3) as usize;
    let k = 1 + random.below(4) as u32;
    let mut streams = Vec::new();
    let mut rings = Vec::new();
    for s in 0..ranks {
        let at = |op, mb| Instr { op, stage: StageId(s as u32), mb };
        let (mut f, mut b) = (0, 0);
        let mut list = Vec::new();
        while b < k {
            if f < k && (f == b || random.below(2) == 0) {
                list.push(at(Op::F, f));
                f += 1;
            } else {
                list.push(at(Op::B(Accumulation { first: b == 0, last: b + 1 == k }), b));
                b += 1;
            }
        }
        for mb in 0..k {
            let mut insert = |before: bool, op: Op, of: fn(Op) -> bool| {
                let place = list.iter().position(|i| of(i.op) && i.mb == mb).expect("both are there");
                let same = |i: &Instr| i.op == op && i.mb + 1 == mb;
                let after = list.iter().position(same).map_or(0, |p| p + 1);
                let place = if before {
                    after + random.below((place + 1).saturating_sub(after).max(1) as u64) as usize
                } else {
                    after.max(place + 1) + usize::from(random.below(3) == 0 && after.max(place + 1) < list.len())
                };
                list.insert(place, at(op, mb));
            };
            if s > 0 {
                insert(true, Op::RecvF, |o| o == Op::F);
                insert(false, Op::SendB, |o| matches!(o, Op::B(_)));
            }
            if s + 1 < ranks {
                insert(true, Op::RecvB, |o| matches!(o, Op::B(_)));
                insert(false, Op::SendF, |o| o == Op::F);
            }
        }
        list.push(at(Op::U, 0));
        streams.push(Stream { prologue: Vec::new(), period: list, microbatches: k, updates: 1 });
        let mut slots = || 1 + random.below(4) as u32;
        rings.push(RingSizes {
            weights: 1,
            stash: k,
            recv_f: k.max(slots()),
            send_f: slots(),
            recv_b: k.max(slots()),
            send_b: slots(),
        });
    }
    Program {
        streams,
        rank_of_stage: (0..ranks as u32).map(RankId).collect(),
        rings,
        accumulate: k,
        policy: Policy::Current,
        copies: 1,
        tied: false,
        global_norm: false,
    }
}

/// The verifier accepts what runs, and says "deadlock" of what gets stuck: both ways.
#[test]
fn verdicts_on_random_streams_are_those_of_the_interpreter() {
    let mut random = Random(11);
    let (mut sound, mut stuck) = (0, 0);
    for _ in 0..4000 {
        let program = random_streams(&mut random);
        let runs: Vec<_> = (1..=3).map(|updates| interpret(&program, updates, &mut random).map(|_| ())).collect();
        match verify(&program) {
            Ok(()) => {
                assert!(runs.iter().all(Result::is_ok), "{runs:?} {program:?}");
                sound += 1;
            }
            Err(violations) => {
                assert!(runs.iter().any(Result::is_err), "{violations:?} {program:?}");
                if matches!(violations[..], [Violation::Deadlock(_)]) {
                    assert!(runs.contains(&Err("stuck".into())), "{runs:?} {violations:?} {program:?}");
                    stuck += 1;
                }
            }
        }
    }
    assert!(sound > 200 && stuck > 200, "{sound} sound, {stuck} stuck");
}

fn good_programs() -> Vec<Program> {
    let mut programs = Vec::new();
    for schedule in [gpipe(), one_f_one_b(), async_1f1b(), zb_h(1, Update::Flush), zb_h(1, Update::Local)] {
        for (ranks, accumulate) in [(2, 1), (3, 2), (4, 3)] {
            programs.push(plan::expand(&schedule, Shape::new(ranks, accumulate)).unwrap());
        }
    }
    for (name, ranks, accumulate) in [
        ("interleaved_1f1b", 1, 2),
        ("interleaved_1f1b", 2, 4),
        ("looped_bfs", 2, 3),
        ("looped_bfs", 3, 2),
        ("interleaved_zb", 2, 2),
        ("zb_v", 1, 2),
        ("zb_v", 2, 3),
        ("zb_v", 3, 4),
    ] {
        let schedule = dsl::library::schedule(name).unwrap();
        programs.push(plan::expand(&schedule, Shape::new(ranks, accumulate)).unwrap());
    }
    // Sums of squares that are exchanged, or stay in place; ends of a tied table on ranks that are neighbours, or not, or on one.
    for (name, ranks, accumulate) in [
        ("one_f_one_b", 2, 2),
        ("one_f_one_b", 3, 2),
        ("gpipe", 2, 1),
        ("zb_h1", 3, 3),
        ("looped_bfs", 2, 3),
        ("zb_v", 2, 3),
    ] {
        let schedule = dsl::library::schedule(name).unwrap();
        for (tied, global_norm) in [(true, false), (false, true), (true, true)] {
            let shape = Shape { tied, global_norm, ..Shape::new(ranks, accumulate) };
            programs.push(plan::expand(&schedule, shape).unwrap());
        }
    }
    programs
}

/// Sections of all ranks, to change one.
fn sections(program: &mut Program) -> Vec<&mut Vec<Instr>> {
    program.streams.iter_mut().flat_map(|s| [&mut s.prologue, &mut s.period]).collect()
}

#[test]
fn every_missing_or_doubled_instruction_is_caught() {
    for good in good_programs() {
        for section in 0..2 * good.streams.len() {
            let length = sections(&mut good.clone())[section].len();
            for at in 0..length {
                let mut missing = good.clone();
                sections(&mut missing)[section].remove(at);
                assert!(verify(&missing).is_err());
                let mut doubled = good.clone();
                let again = sections(&mut doubled)[section][at];
                sections(&mut doubled)[section].push(again);
                assert!(verify(&doubled).is_err());
                let mut renumbered = good.clone();
                sections(&mut renumbered)[section][at].mb += 1;
                assert!(verify(&renumbered).is_err());
            }
        }
    }
}

#[test]
fn every_wrong_mark_is_caught() {
    for good in good_programs() {
        for section in 0..2 * good.streams.len() {
            let length = sections(&mut good.clone())[section].len();
            for at in 0..length {
                for mark in 0..2 {
                    let mut wrong = good.clone();
                    let flip = |a: &mut Accumulation| if mark == 0 { a.first ^= true } else { a.last ^= true };
                    match &mut sections(&mut wrong)[section][at].op {
                        Op::B(a) | Op::W(a) => flip(a),
                        _ => continue,
                    }
                    let found = verify(&wrong).unwrap_err();
                    assert!(matches!(found[0], Violation::Accumulation { .. }), "{found:?}");
                }
            }
        }
    }
}

/// Every ring has exactly the slots that its posts use: with one less, a slot is taken.
#[test]
fn every_ring_one_short_is_caught() {
    for good in good_programs() {
        for s in 0..good.rings.len() {
            let fields: [fn(&mut RingSizes) -> &mut u32; 5] =
                [|r| &mut r.stash, |r| &mut r.recv_f, |r| &mut r.send_f, |r| &mut r.recv_b, |r| &mut r.send_b];
            for field in fields {
                let mut short = good.clone();
                let slots = field(&mut short.rings[s]);
                if *slots == 0 {
                    continue;
                }
                *slots -= 1;
                let found = verify(&short).unwrap_err();
                assert!(matches!(found[0], Violation::Ring { .. }), "{found:?}");
            }
        }
    }
}

/// A swapped pair is refused, or harmless: then it runs.
#[test]
fn swapped_pairs_are_caught_or_run() {
    let mut random = Random(3);
    let (mut caught, mut harmless) = (0, 0);
    for good in good_programs() {
        for section in 0..2 * good.streams.len() {
            let length = sections(&mut good.clone())[section].len();
            for at in 1..length {
                let mut swapped = good.clone();
                sections(&mut swapped)[section].swap(at - 1, at);
                if verify(&swapped).is_ok() {
                    harmless += 1;
                    for updates in [1, 2, 5, 9] {
                        interpret(&swapped, updates, &mut random).unwrap_or_else(|e| panic!("{e}: {swapped:?}"));
                    }
                } else {
                    caught += 1;
                    let runs = (1..=9).map(|updates| interpret(&swapped, updates, &mut random));
                    assert!(runs.into_iter().any(|run| run.is_err()), "{:?} {swapped:?}", verify(&swapped));
                }
            }
        }
    }
    assert!(caught > 100 && harmless > 100, "{caught} caught, {harmless} harmless");
}

/// A sum's place is not free before its last reader's update, and a tied table's norm needs both ends' gradients, also on one rank.
#[test]
fn sums_that_come_too_early_are_caught() {
    let of = |name: &str, ranks: u32, tied: bool| {
        let schedule = dsl::library::schedule(name).unwrap();
        plan::expand(&schedule, Shape { tied, global_norm: true, ..Shape::new(ranks, 3) }).unwrap()
    };
    let mut wrong = Vec::new();
    for ranks in [2, 3] {
        for op in [Op::RecvN, Op::RecvT] {
            // The next update's receive is posted right before an update, the first one's at the start.
            let mut program = of("gpipe", ranks, false);
            for stream in program.streams.iter_mut().filter(|stream| stream.period.iter().any(|i| i.op == op)) {
                let at = stream.period.iter().position(|i| i.op == op).unwrap();
                let post = stream.period.remove(at);
                stream.prologue.push(post);
                let update = stream.period.iter().position(|i| i.op == Op::U).unwrap();
                stream.period.insert(update, Instr { mb: 1, ..post });
            }
            wrong.push(program);
        }
    }
    // The other end's last gradient is made between the sums of both.
    let mut program = of("zb_v", 2, true);
    let [first, last] = program.tied_ends().unwrap().map(|s| StageId(s as u32));
    let period = &mut program.streams[0].period;
    let gradient = period.iter().rposition(|i| i.stage == last && matches!(i.op, Op::B(_) | Op::W(_))).unwrap();
    let gradient = period.remove(gradient);
    let sum = period.iter().position(|i| i.stage == first && i.op == Op::N).unwrap();
    period.insert(sum + 1, gradient);
    wrong.push(program);
    let mut random = Random(17);
    for program in wrong {
        let found = verify(&program).unwrap_err();
        assert!(matches!(found[0], Violation::Exchange { .. }), "{found:?}");
        assert!((1..=3).any(|updates| interpret(&program, updates, &mut random).is_err()), "{program:?}");
    }
}

/// Arbitrary data: an answer, in bounded time.
#[test]
fn arbitrary_programs_get_an_answer() {
    let mut random = Random(5);
    let wild = |random: &mut Random| match random.below(6) {
        0 => u32::MAX,
        1 => random.next() as u32,
        _ => random.below(4) as u32,
    };
    for _ in 0..20_000 {
        let instr = |random: &mut Random| {
            let a = Accumulation { first: random.below(2) == 0, last: random.below(2) == 0 };
            let computes = [Op::F, Op::B(a), Op::I, Op::W(a), Op::U];
            let transfers = [Op::SendF, Op::RecvF, Op::SendB, Op::RecvB, Op::SendG, Op::RecvG];
            let norms = [Op::N, Op::SendN, Op::RecvN, Op::T, Op::SendT, Op::RecvT];
            let ops = [&computes[..], &transfers, &norms].concat();
            Instr {
                op: ops[random.below(ops.len() as u64) as usize],
                stage: StageId(wild(random) % 5),
                mb: wild(random),
            }
        };
        let list = |random: &mut Random| (0..random.below(8)).map(|_| instr(random)).collect::<Vec<_>>();
        let streams = (0..random.below(4))
            .map(|_| Stream {
                prologue: list(&mut random),
                period: list(&mut random),
                microbatches: wild(&mut random),
                updates: wild(&mut random),
            })
            .collect();
        let rank_of_stage = (0..random.below(4)).map(|_| RankId(wild(&mut random) % 5)).collect();
        let rings =
            (0..random.below(4)).map(|_| RingSizes { stash: wild(&mut random), ..Default::default() }).collect();
        let (accumulate, copies) = (wild(&mut random), wild(&mut random));
        let (tied, global_norm, policy) = (random.one_in(2), random.one_in(2), Policy::Stash);
        let program = Program { streams, rank_of_stage, rings, accumulate, policy, copies, tied, global_norm };
        let _ = verify(&program);
    }
    // One wild number in a sound program.
    for good in good_programs() {
        for _ in 0..300 {
            let mut program = good.clone();
            let s = random.below(good.streams.len() as u64) as usize;
            match random.below(5) {
                0 => program.rings[s].send_f = wild(&mut random),
                1 => program.streams[s].microbatches = wild(&mut random),
                2 => program.accumulate = wild(&mut random),
                3 => program.rank_of_stage[s] = RankId(wild(&mut random)),
                _ => {
                    let at = random.below(good.streams[s].period.len() as u64) as usize;
                    program.streams[s].period[at].mb = wild(&mut random);
                }
            }
            let _ = verify(&program);
        }
    }
}

/// The steady period is what long runs grow by, with random costs.
#[test]
fn the_period_is_what_long_runs_grow_by() {
    let mut random = Random(9);
    for program in good_programs() {
        let stages = program.rank_of_stage.len();
        for _ in 0..10 {
            let mut costs = Costs::uniform(stages, 0, 0, 0, random.below(30));
            for stage in &mut costs.stages {
                stage.f_ns = random.below(50);
                stage.i_ns = random.below(50);
                stage.w_ns = random.below(50);
                stage.u_ns = random.below(5);
            }
            let steady = steady(&program, &costs).unwrap();
            assert!(steady.exact);
            let updates = u64::from(program.streams[0].updates);
            let makespan =
                |repetitions| run(&program, &costs, repetitions * updates).iter().map(|t| t.end_ns).max().unwrap();
            let (from, to) = (200, 200 + 60 * steady.repetitions);
            assert_eq!(makespan(to) - makespan(from), 60 * steady.total_ns, "{costs:?}");
        }
    }
}

/// Costs that differ by little take many repetitions to settle; the steady state is exact all the same.
#[test]
fn nearly_even_stages_have_an_exact_period() {
    let program = plan::expand(&async_1f1b(), Shape::new(6, 4)).unwrap();
    let mut costs = Costs::uniform(6, 1_000_000, 1_000_000, 1_000_000, 0);
    costs.stages[4].f_ns += 1;
    let steady = steady(&program, &costs).unwrap();
    assert_eq!((steady.total_ns, steady.repetitions, steady.exact), (4 * 3_000_001, 1, true));
}

/// Rank 0 runs far ahead, so what its slots hold up shows only repetitions later: verdicts are still those of long
/// runs.
#[test]
fn deadlocks_that_show_late_are_found() {
    let mut random = Random(13);
    let (mut sound, mut stuck) = (0, 0);
    for ahead in 1..8 {
        let far = op(BinaryOp::Mul, num(ahead), crate::make::after());
        let order = vec![warmup(far, vec![step(Action::F)]), repeat(vec![step(Action::F), step(Action::B)])];
        let schedule = schedule("far", Backward::Whole, Update::Local, order);
        let lean = Shape { receive_extra: 0, send_slots: 9, ..Shape::new(2, 1) };
        let roomy = plan::expand(&schedule, lean).unwrap();
        for (send_f, send_b) in (1..8).flat_map(|f| (1..8).map(move |b| (f, b))) {
            let mut program = roomy.clone();
            (program.rings[0].send_f, program.rings[1].send_b) = (send_f, send_b);
            let run = interpret(&program, 40, &mut random).map(|_| ());
            match verify(&program) {
                Ok(()) => {
                    assert_eq!(run, Ok(()), "{ahead} ahead, {send_f} and {send_b} slots");
                    sound += 1;
                }
                Err(found) => {
                    assert!(matches!(found[..], [Violation::Deadlock(_)]), "{found:?}");
                    assert_eq!(run, Err("stuck".into()), "{ahead} ahead, {send_f} and {send_b} slots");
                    stuck += 1;
                }
            }
        }
    }
    assert!(sound > 50 && stuck > 10, "{sound} sound, {stuck} stuck");
}
