//! Bubbles of replayed streams against their closed forms.

use crate::toy::{Schedule, manifest, toy};
use runtime::observe::StageTimes;
use runtime::replay::bubbles;

fn times(ranks: usize) -> Vec<StageTimes> {
    vec![StageTimes { f_ns: 1000, b_ns: 2000, b_last_ns: 2000, ..StageTimes::default() }; ranks]
}

#[test]
fn gpipe_has_the_textbook_bubble_and_the_asynchronous_pipeline_none() {
    for (ranks, k) in [(1, 3), (2, 1), (4, 2), (4, 8)] {
        let gpipe = bubbles(&manifest(toy(Schedule::Gpipe, ranks, k)).program, &times(ranks));
        // (P - 1) / (K + P - 1)
        let expected = (ranks as f64 - 1.0) / (f64::from(k) + ranks as f64 - 1.0);
        assert!(gpipe.iter().all(|b| (b - expected).abs() < 1e-12), "{ranks} {k}: {gpipe:?} {expected}");
        let asynchronous = bubbles(&manifest(toy(Schedule::Async, ranks, k)).program, &times(ranks));
        assert!(asynchronous.iter().all(|b| b.abs() < 1e-12), "{ranks} {k}: {asynchronous:?}");
    }
}

#[test]
fn the_slowest_stage_sets_the_period() {
    let mut times = times(4);
    times[2] = StageTimes { f_ns: 2000, b_ns: 4000, b_last_ns: 4000, ..StageTimes::default() };
    let bubble = bubbles(&manifest(toy(Schedule::Async, 4, 4)).program, &times);
    assert!((bubble[0] - 0.5).abs() < 1e-12 && bubble[2].abs() < 1e-12, "{bubble:?}");
}
