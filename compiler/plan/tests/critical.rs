//! The critical path: one by hand, and what holds for every path.

use crate::interpreter::Random;
use crate::make::{async_1f1b, gpipe, one_f_one_b, zb_h};
use artifact::stream::Program;
use artifact::verify::index::Kind;
use dsl::schedule::Update;
use plan::Shape;
use plan::critical::{Trace, Wait, trace};
use plan::time::{Costs, StageCosts, run};

fn words(trace: &Trace) -> String {
    let word = |step: &plan::critical::Step| {
        let event = &trace.events[step.event];
        format!("{}{}@{} {:?}", Kind::of(event.op).name(), event.mb, event.rank, step.wait)
    };
    trace.path.iter().map(word).collect::<Vec<_>>().join(", ")
}

/// Two ranks, two micro-batches: the second rank is never idle once it has begun; the first waits for gradients.
#[test]
fn a_path_by_hand() {
    let program = plan::expand(&one_f_one_b(), Shape::new(2, 2)).unwrap();
    let found = trace(&program, &Costs::uniform(2, 10, 10, 10, 3), 1);
    assert_eq!(
        words(&found),
        "F0@0 Nothing, F0@1 Input, B0@1 Rank, F1@1 Rank, B1@1 Rank, B1@0 Input",
        "F 10, hop 3, then 10 + 20 + 10 + 20 on rank 1, hop 3, B 20"
    );
    let last = found.events[found.path.last().unwrap().event];
    assert_eq!(last.end_ns, 10 + 3 + 60 + 3 + 20);
}

/// A sender whose only slot is held by a slow receiver waits for it.
#[test]
fn a_path_through_a_send_slot() {
    let shape = Shape { receive_extra: 0, ..Shape::new(2, 4) };
    let program = plan::expand(&async_1f1b(), shape).unwrap();
    let mut costs = Costs::uniform(2, 10, 5, 5, 0);
    costs.stages[1] = StageCosts { f_ns: 100, i_ns: 50, w_ns: 50, u_ns: 0 };
    let found = trace(&program, &costs, 4);
    let slow = found.path.iter().filter(|s| found.events[s.event].rank.0 == 1).count();
    assert!(slow * 10 > found.path.len() * 8, "{}", words(&found));
}

fn any(random: &mut Random) -> (Program, Costs, u64) {
    let mut schedules = vec![
        gpipe(),
        one_f_one_b(),
        async_1f1b(),
        zb_h(1, Update::Flush),
        zb_h(2, Update::Flush),
        zb_h(1, Update::Local),
    ];
    // Several stages a rank, some of them neighbours.
    schedules.extend(["interleaved_1f1b", "looped_bfs", "zb_v"].map(|name| dsl::library::schedule(name).unwrap()));
    loop {
        let schedule = &schedules[random.below(schedules.len() as u64) as usize];
        let (ranks, accumulate) = (1 + random.below(5) as u32, 1 + random.below(6) as u32);
        let (receive_extra, send_slots) = (random.below(3) as u32, 1 + random.below(2) as u32);
        let flush = schedule.update == Update::Flush;
        let (tied, global_norm) = (flush && random.one_in(3), flush && random.one_in(3));
        let shape = Shape { receive_extra, send_slots, tied, global_norm, ..Shape::new(ranks, accumulate) };
        let Ok(program) = plan::expand(schedule, shape) else { continue };
        let mut cost = || random.below(20);
        let stages = (0..program.rank_of_stage.len())
            .map(|_| StageCosts { f_ns: cost(), i_ns: cost(), w_ns: cost(), u_ns: cost() / 8 })
            .collect();
        let costs = Costs { stages, hop_ns: cost(), exchange_ns: cost() };
        return (program, costs, 1 + random.below(4));
    }
}

fn end_ns(program: &Program, costs: &Costs, updates: u64) -> u64 {
    run(program, costs, updates).iter().map(|e| e.end_ns).max().unwrap_or(0)
}

/// Steps touch, and their times and hops sum to the run's length. What is on the path counts: when a stage or the hop
/// takes longer, so does the run, by as much for each time that the path meets it.
#[test]
fn paths_decide_the_run() {
    let mut random = Random(11);
    let mut seen = std::collections::BTreeMap::new();
    for _ in 0..1500 {
        let (program, costs, updates) = any(&mut random);
        let found = trace(&program, &costs, updates);
        assert_eq!(found.events, run(&program, &costs, updates));
        let makespan = end_ns(&program, &costs, updates);
        let mut now = 0;
        for step in &found.path {
            let event = &found.events[step.event];
            // N of the first stage has no stage before: it waits for a tied table.
            let table = Kind::of(event.op) == Kind::U || Kind::of(event.op) == Kind::N && event.stage.index() == 0;
            let latency_ns = if table { costs.exchange_ns } else { costs.hop_ns };
            now += if step.wait.hop() { latency_ns } else { 0 };
            assert_eq!(event.start_ns, now, "{}", words(&found));
            now = event.end_ns;
            *seen.entry(format!("{:?}", step.wait)).or_insert(0) += 1;
        }
        assert_eq!(now, makespan, "{}", words(&found));
        let starts = found.path.iter().filter(|s| s.wait == Wait::Nothing).count();
        assert_eq!(starts, 1, "{}", words(&found));

        let hops = found.path.iter().filter(|s| s.wait.hop()).count() as u64;
        let slower = Costs { hop_ns: costs.hop_ns + 7, exchange_ns: costs.exchange_ns + 7, ..costs.clone() };
        assert!(end_ns(&program, &slower, updates) >= makespan + 7 * hops, "{}", words(&found));
        for stage in 0..costs.stages.len() {
            let on = |s: &&plan::critical::Step| {
                let event = &found.events[s.event];
                event.stage.index() == stage && Kind::of(event.op) == Kind::F
            };
            let met = found.path.iter().filter(on).count() as u64;
            let mut slower = costs.clone();
            slower.stages[stage].f_ns += 5;
            assert!(end_ns(&program, &slower, updates) >= makespan + 5 * met, "{}", words(&found));
        }
    }
    let all = ["Input", "Nothing", "Post", "Rank", "Slot"];
    assert!(all.iter().all(|w| seen.contains_key(*w)), "every kind of wait decides somewhere: {seen:?}");
}
