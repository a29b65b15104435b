//! Runs of the toy pipeline against the emulator, to the bit.

use crate::toy::{self, Log, Place, Schedule, Toy, emulator, saved, toy};
use runtime::observe::UpdateRecord;
use runtime::{Observer, On, RunError, StopFlag};
use std::io;

const SEED: u64 = 7;

/// Runs a toy and compares all that can be seen with the emulator.
fn agrees(toy: Toy, updates: u64) {
    let place = Place::new();
    let mut options = place.options(updates);
    options.save = Some(place.path("w.safetensors"));
    let (summary, log) = toy::run(toy, &options);
    let expected = emulator::train(toy, updates, SEED);
    assert_eq!(log.losses(), expected.losses, "{toy:?}");
    assert_eq!(saved(&place.path("w.safetensors")), expected.weights, "{toy:?}");
    let drift: Vec<u64> = summary.stages.iter().map(|s| s.drift_max_seen).collect();
    assert_eq!(drift, expected.drift_max, "{toy:?}");
    let delay: Vec<u64> = summary.stages.iter().map(|s| s.delay_max_seen).collect();
    assert_eq!(delay, expected.drift_max, "delay is drift where W comes with its I: {toy:?}");
    assert_eq!(log.updates.last().unwrap().drift_max_seen, *expected.drift_max.iter().max().unwrap());
    assert_eq!((summary.updates, summary.stopped), (updates, false));
    let bytes = toy::manifest(toy).memory;
    assert!(summary.ranks.iter().zip(bytes).all(|(r, m)| r.allocated_bytes == m.total));
}

#[test]
fn gpipe_is_the_same_on_every_number_of_ranks() {
    for accumulate in [1, 3] {
        for ranks in [1, 2, 4] {
            agrees(toy(Schedule::Gpipe, ranks, accumulate), 9);
        }
    }
}

#[test]
fn asynchronous_runs_read_the_versions_that_the_formulas_say() {
    for accumulate in [1, 2, 3, 4] {
        for ranks in [1, 2, 4] {
            agrees(toy(Schedule::Async, ranks, accumulate), 9);
            agrees(toy(Schedule::AsyncSplit, ranks, accumulate), 9);
        }
    }
    let drift = |accumulate| emulator::train(toy(Schedule::Async, 4, accumulate), 9, SEED).drift_max;
    assert_eq!((drift(1), drift(2), drift(4)), (vec![3, 2, 1, 0], vec![2, 1, 1, 0], vec![1, 1, 1, 0]));
}

#[test]
fn staleness_changes_the_losses() {
    let losses = |schedule| emulator::train(toy(schedule, 4, 1), 9, SEED).losses;
    assert_ne!(losses(Schedule::Gpipe), losses(Schedule::Async));
}

#[test]
fn boundaries_drain_and_refill() {
    for boundary in [1, 2, 4, 20] {
        agrees(Toy { boundary: Some(boundary), ..toy(Schedule::Async, 4, 2) }, 9);
    }
}

#[test]
fn evaluation_measures_and_changes_no_bit() {
    let place = Place::new();
    let toy = Toy { boundary: Some(3), ..toy(Schedule::Async, 4, 2) };
    let mut options = place.options(8);
    options.eval = vec![place.path("text")];
    options.eval_sequences_max = Some(9);
    options.save = Some(place.path("w.safetensors"));
    let (summary, log) = toy::run(toy, &options);
    let expected = emulator::train(toy, 8, SEED);
    assert_eq!(log.losses(), expected.losses);
    assert_eq!(log.evaluations.iter().map(|e| e.updates).collect::<Vec<_>>(), [0, 3, 6, 8]);
    let mean_of = |weights: &[Vec<f32>]| {
        let starts = |mb: usize| std::array::from_fn(|row| (mb * toy::MICROBATCH + row) * toy::CONTEXT);
        let loss: f64 = (0..4).map(|mb| emulator::forward_pass(|l| &weights[l], starts(mb)).2).sum();
        loss / (4 * toy::ROWS) as f64
    };
    assert_eq!(summary.eval_loss_first, Some(mean_of(&emulator::initial_weights(SEED))));
    assert_eq!(summary.eval_loss_last, Some(mean_of(&expected.weights)));
    assert_eq!(log.evaluations[0].eval_tokens, 4 * toy::ROWS as u64);
}

/// Asks for an end when an update is seen.
struct StopAfter {
    update: u64,
    flag: StopFlag,
    log: Log,
}

impl Observer for StopAfter {
    fn update(&mut self, r: &UpdateRecord) -> io::Result<()> {
        if r.update == self.update {
            self.flag.request();
        }
        self.log.update(r)
    }
}

#[test]
fn a_stop_drains_as_if_the_run_had_been_that_short() {
    for (toy, update) in [
        (toy(Schedule::Gpipe, 4, 3), 5),
        (toy(Schedule::Async, 4, 3), 5),
        (toy(Schedule::Async, 4, 1), 0),
        (toy(Schedule::AsyncSplit, 2, 2), 7),
        (toy(Schedule::Async, 1, 2), 3),
        (Toy { boundary: Some(4), ..toy(Schedule::Async, 4, 2) }, 9),
    ] {
        let place = Place::new();
        let mut options = place.options(1_000_000);
        options.save = Some(place.path("w.safetensors"));
        let mut observer = StopAfter { update, flag: options.stop.clone(), log: Log::default() };
        let summary = toy::try_run(toy, &options, &mut observer).unwrap();
        assert!(summary.stopped && summary.updates > update && summary.updates < 1_000_000);
        let expected = emulator::train(toy, summary.updates, SEED);
        assert_eq!(observer.log.losses(), expected.losses, "{toy:?}");
        assert_eq!(saved(&place.path("w.safetensors")), expected.weights, "{toy:?}");
    }
}

#[test]
fn a_run_that_is_stopped_before_it_starts_trains_nothing() {
    let place = Place::new();
    let mut options = place.options(10);
    options.eval = vec![place.path("text")];
    options.save = Some(place.path("w.safetensors"));
    options.stop.request();
    let (summary, log) = toy::run(toy(Schedule::Async, 4, 2), &options);
    assert_eq!((summary.updates, summary.loss, summary.stopped), (0, None, true));
    assert!(log.updates.is_empty() && log.evaluations.is_empty());
    assert_eq!(saved(&place.path("w.safetensors")), emulator::initial_weights(SEED));
}

#[test]
fn a_failing_rank_stops_the_others_with_its_cause() {
    for (schedule, stage) in [(Schedule::Gpipe, 0), (Schedule::Async, 3), (Schedule::Async, 1), (Schedule::Async, 0)] {
        let place = Place::new();
        let manifest = toy::manifest(toy(schedule, 4, 2));
        let kernels = toy::failing_kernels(&manifest, stage);
        let error = runtime::run_on(&manifest, On::Threads(&kernels), &place.options(50), &mut ()).unwrap_err();
        assert_eq!(error.exit_status(), 3);
        assert_eq!(
            error.to_string(),
            format!(
                "rank {stage} failed in the backward pass of micro-batch 0 on stage {stage}, and the others were stopped: \
                 the kernel gave up"
            )
        );
    }
}

/// Can't write its second update.
struct FullDisk;

impl Observer for FullDisk {
    fn update(&mut self, r: &UpdateRecord) -> io::Result<()> {
        if r.update == 1 { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
    }
}

#[test]
fn a_record_that_can_not_be_kept_ends_the_run() {
    let place = Place::new();
    for ranks in [1, 4] {
        let error = toy::try_run(toy(Schedule::Async, ranks, 2), &place.options(1 << 20), &mut FullDisk).unwrap_err();
        assert!(matches!(error, RunError::Observer { .. }), "{error}");
    }
}

#[test]
fn divergence_is_an_error() {
    let place = Place::new();
    let mut manifest = toy::manifest(toy(Schedule::Async, 2, 1));
    manifest.groups[0].learning_rate = artifact::program::LearningRate::Constant { lr: 1e6 };
    let error = runtime::run_on(&manifest, On::Threads(&toy::kernels(&manifest)), &place.options(1 << 20), &mut ())
        .unwrap_err();
    assert!(matches!(error, RunError::Diverged { .. }), "{error}");
}
