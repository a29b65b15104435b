//! The toy pipeline on emulated devices: what streams, events, graphs and a blocking transport must not change, and what happens when a rank is
//! lost.

use crate::toy::{self, Log, Place, Schedule, Toy, emulator, saved, toy};
use artifact::ids::RankId;
use runtime::device::emulated::{Accident, Emulation, Injected, World};
use runtime::member::Member;
use runtime::store::Store;
use runtime::{On, RunError, RunOptions, StopFlag, Summary};
use std::sync::Arc;
use std::time::Duration;

const SEED: u64 = 7;

fn train(toy: Toy, emulation: Emulation, options: &RunOptions, log: &mut Log) -> Result<Summary, RunError> {
    let manifest = toy::manifest(toy);
    let world = World::new(&manifest, Arc::new(toy::kernels(&manifest)), emulation);
    runtime::run_on(&manifest, On::Devices(&world), options, log)
}

/// Trains under an interleaving and compares all that can be seen with the emulator of the formulas.
fn agrees(toy: Toy, updates: u64, emulation: Emulation) -> Summary {
    let (place, mut log) = (Place::new(), Log::default());
    let mut options = place.options(updates);
    options.save = Some(place.path("w.safetensors"));
    let summary = train(toy, emulation, &options, &mut log).unwrap_or_else(|e| panic!("{toy:?}, {emulation:?}: {e}"));
    let expected = emulator::train(toy, updates, SEED);
    assert_eq!(log.losses(), expected.losses, "{toy:?}, {emulation:?}");
    assert_eq!(saved(&place.path("w.safetensors")), expected.weights, "{toy:?}, {emulation:?}");
    let drift: Vec<u64> = summary.stages.iter().map(|s| s.drift_max_seen).collect();
    assert_eq!(drift, expected.drift_max, "{toy:?}");
    let untimed = summary.ranks.iter().all(|r| (r.busy_s, r.bubble_replayed, r.bubble_measured) == (None, None, None));
    assert!(
        untimed && summary.stages.iter().all(|s| s.times.is_none()),
        "nothing is said of times that nobody measured"
    );
    summary
}

#[test]
fn every_interleaving_gives_the_same_bits() {
    for schedule in [Schedule::Gpipe, Schedule::Async, Schedule::AsyncSplit] {
        for (ranks, accumulate) in [(1, 2), (2, 1), (4, 1), (4, 3)] {
            for seed in 0..3 {
                for graphs in [false, true] {
                    agrees(toy(schedule, ranks, accumulate), 9, Emulation { seed, graphs, injected: None });
                }
            }
        }
    }
}

#[test]
fn periods_are_captured_once_a_phase_and_launched_again() {
    let graphs = |toy, updates| agrees(toy, updates, Emulation::default()).devices.unwrap();
    for toy in [toy(Schedule::Async, 4, 1), toy(Schedule::Async, 4, 3), toy(Schedule::Gpipe, 4, 2)] {
        let (short, long) = (graphs(toy, 30), graphs(toy, 90));
        assert_eq!(short.enqueued + long.enqueued, 0, "{toy:?}: all parts are graphs");
        assert!(long.launched >= short.launched + 4 * 60, "{toy:?}: {short:?}, {long:?}");
        assert_eq!(long.graphs, short.graphs, "{toy:?}: no new graph in steady state");
    }
}

#[test]
fn boundaries_and_evaluations_change_no_bit() {
    let toy = Toy { boundary: Some(3), ..toy(Schedule::Async, 4, 2) };
    let (place, mut log) = (Place::new(), Log::default());
    let mut options = place.options(8);
    options.eval = vec![place.path("text")];
    options.eval_sequences_max = Some(9);
    train(toy, Emulation::default(), &options, &mut log).unwrap();
    let mut plain = Log::default();
    toy::try_run(toy, &options, &mut plain).unwrap();
    assert_eq!(log.losses(), plain.losses());
    let losses = |log: &Log| log.evaluations.iter().map(|e| (e.updates, e.eval_loss)).collect::<Vec<_>>();
    assert_eq!(losses(&log), losses(&plain));
}

/// Asks for an end when an update is seen.
struct StopAfter(u64, StopFlag, Log);

impl runtime::Observer for StopAfter {
    fn update(&mut self, r: &runtime::observe::UpdateRecord) -> std::io::Result<()> {
        if r.update == self.0 {
            self.1.request();
        }
        self.2.update(r)
    }
}

#[test]
fn a_stop_drains_as_if_the_run_had_been_that_short() {
    for (toy, update) in
        [(toy(Schedule::Async, 4, 3), 5), (toy(Schedule::Gpipe, 2, 2), 0), (toy(Schedule::Async, 1, 2), 3)]
    {
        let place = Place::new();
        let options = place.options(1_000_000);
        let manifest = toy::manifest(toy);
        let world = World::new(&manifest, Arc::new(toy::kernels(&manifest)), Emulation::default());
        let mut observer = StopAfter(update, options.stop.clone(), Log::default());
        let summary = runtime::run_on(&manifest, On::Devices(&world), &options, &mut observer).unwrap();
        assert!(summary.stopped && summary.updates > update && summary.updates < 1_000_000);
        assert_eq!(observer.2.losses(), emulator::train(toy, summary.updates, SEED).losses, "{toy:?}");
    }
}

/// What a run says in which something happens to a rank.
fn accident(schedule: Schedule, rank: u32, exchanges: u64, what: Accident, graphs: bool) -> String {
    let (place, mut log) = (Place::new(), Log::default());
    let mut options = place.options(1 << 20);
    options.device.deadline = Duration::from_secs(30);
    let injected = Some(Injected { rank: RankId(rank), exchanges, what });
    let error = train(toy(schedule, 4, 2), Emulation { seed: 5, graphs, injected }, &options, &mut log).unwrap_err();
    assert_eq!(error.exit_status(), 3);
    assert!(matches!(error, RunError::Waited(_)), "{error}");
    error.to_string()
}

#[test]
fn ranks_stop_when_a_peer_stalls_and_say_whom_they_waited_for() {
    for schedule in [Schedule::Gpipe, Schedule::Async] {
        for graphs in [false, true] {
            for (rank, exchanges) in [(0, 0), (1, 0), (2, 9), (3, 40)] {
                let said = accident(schedule, rank, exchanges, Accident::Stall, graphs);
                assert!(said.contains(" waited 30 s for rank "), "{said}");
                assert!(said.contains(" of micro-batch "), "{said}");
                assert!(said.contains(&format!("for rank {rank}: ")), "who stalled is named: {said}");
                assert!(!said.contains(&format!("rank {rank} wait")), "who stalled says nothing: {said}");
            }
        }
    }
}

#[test]
fn ranks_stop_when_a_peer_dies() {
    for graphs in [false, true] {
        for (rank, exchanges) in [(0, 3), (1, 0), (2, 9), (3, 40)] {
            let said = accident(Schedule::Async, rank, exchanges, Accident::Death, graphs);
            assert!(said.contains(&format!("rank {rank} is gone")), "{said}");
            assert!(said.contains("it waited for rank ") && said.contains(" of micro-batch "), "{said}");
        }
    }
}

/// Runs each rank as a process of its own would: a run with a store between them, of which only devices are shared. None: it died.
fn processes(toy: Toy, emulation: Emulation, updates: u64) -> Vec<Option<(Result<Summary, RunError>, Log, Place)>> {
    let manifest = toy::manifest(toy);
    let world = World::new(&manifest, Arc::new(toy::kernels(&manifest)), emulation);
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    std::thread::scope(|scope| {
        let start = |rank| {
            let (manifest, world) = (&manifest, &world);
            scope.spawn(move || {
                let (place, mut log) = (Place::new(), Log::default());
                let mut options = place.options(updates);
                options.eval = vec![place.path("text")];
                options.save = Some(place.path("w.safetensors"));
                // The clock moves whenever no process that has come waits for anything but a later one.
                options.device.deadline = Duration::from_secs(u64::MAX / 2);
                let store = Store::join("127.0.0.1", port, RankId(rank), Duration::from_secs(60)).unwrap();
                options.member = Some(Arc::new(Member { rank: RankId(rank), local: rank, store }));
                (runtime::run_on(manifest, On::Devices(world), &options, &mut log), log, place)
            })
        };
        let threads: Vec<_> = (0..manifest.memory.len() as u32).map(start).collect();
        threads.into_iter().map(|thread| thread.join().ok()).collect()
    })
}

#[test]
fn a_process_for_each_rank_gives_the_same_bits_and_one_reports() {
    let toy = Toy { boundary: Some(4), ..toy(Schedule::Async, 4, 2) };
    let expected = emulator::train(toy, 9, SEED);
    let mut runs = processes(toy, Emulation::default(), 9);
    let (last, log, place) = runs.pop().flatten().unwrap();
    let summary = last.unwrap();
    assert_eq!(log.losses(), expected.losses);
    assert_eq!(log.evaluations.len(), 4);
    assert_eq!(saved(&place.path("w.safetensors")), expected.weights, "weights of all processes");
    let drift: Vec<u64> = summary.stages.iter().map(|s| s.drift_max_seen).collect();
    assert_eq!((drift, summary.ranks.len()), (expected.drift_max, 4), "counts of all processes");
    assert!(summary.ranks.iter().all(|r| r.busy_s.is_none()) && summary.stages.iter().all(|s| s.times.is_none()));
    for (run, log, place) in runs.into_iter().map(Option::unwrap) {
        assert!(run.unwrap().updates == 9 && log.updates.is_empty() && log.evaluations.is_empty());
        assert!(!place.path("w.safetensors").exists());
    }
}

#[test]
fn a_process_that_dies_ends_the_others_with_its_name() {
    let injected = Some(Injected { rank: RankId(1), exchanges: 7, what: Accident::Death });
    let runs = processes(toy(Schedule::Async, 4, 2), Emulation { injected, ..Emulation::default() }, 1 << 20);
    for (rank, run) in runs.into_iter().enumerate().filter(|(rank, _)| *rank != 1) {
        let said = run.unwrap().0.unwrap_err().to_string();
        assert!(said.contains("rank 1 is gone"), "rank {rank}: {said}");
    }
}

#[test]
fn what_a_kernel_does_wrong_is_told_with_its_rank() {
    let (place, manifest) = (Place::new(), toy::manifest(toy(Schedule::Async, 4, 2)));
    let kernels = Arc::new(toy::failing_kernels(&manifest, 2));
    let world = World::new(&manifest, kernels, Emulation::default());
    let error = runtime::run_on(&manifest, On::Devices(&world), &place.options(50), &mut ()).unwrap_err();
    let said = error.to_string();
    assert!(said.starts_with("rank 2 failed in ") && said.ends_with("the kernel gave up"), "{said}");
}
