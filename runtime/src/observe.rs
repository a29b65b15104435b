//! What a run tells while it goes on, and at its end.

use crate::device::pipeline::Usage;
use serde::{Deserialize, Serialize};
use std::io;

/// An update, made on all stages.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct UpdateRecord {
    /// 0-based.
    pub update: u64,
    /// Mean cross-entropy of the update's tokens, nats.
    pub loss: f64,
    /// Tokens trained on so far.
    pub tokens: u64,
    /// Since training began, evaluations included.
    pub elapsed_s: f64,
    /// Over the last updates (up to 32), evaluations excluded.
    pub tokens_per_s: f64,
    /// Largest drift counted so far, over all stages, in updates.
    pub drift_max_seen: u64,
}

/// A pass over the held-out data.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct EvaluationRecord {
    /// Updates made before it.
    pub updates: u64,
    /// Mean cross-entropy, nats a token.
    pub eval_loss: f64,
    pub eval_tokens: u64,
    pub eval_s: f64,
}

/// Known before the first update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Started {
    pub updates: u64,
    pub tokens_per_update: u64,
    pub train_tokens: u64,
    /// 0 when there is nothing held out.
    pub eval_tokens: u64,
    pub ranks: usize,
    /// Parameters, over all stages.
    pub parameters: u64,
}

/// A rank at the end of a run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RankSummary {
    /// Size of the arena as it was allocated.
    pub allocated_bytes: u64,
    /// Size that the memory plan computed.
    pub computed_bytes: u64,
    /// CPU time in kernels, training only; none on devices, whose times are not measured.
    pub busy_s: Option<f64>,
    /// Time blocked in waits for other ranks, training only.
    pub wait_s: f64,
    /// Bubble in steady state with the measured kernel times, 0..1: every rank as if it had a core; none on devices.
    pub bubble_replayed: Option<f64>,
    /// Bubble as it was, 0..1 (start and drains included); only when every rank has a core, and not on devices.
    pub bubble_measured: Option<f64>,
    /// Bubble in steady state that the compiler predicted, 0..1.
    pub bubble_predicted: f64,
}

/// A stage at the end of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StageSummary {
    pub drift_max_seen: u64,
    pub drift_max_proved: u64,
    pub delay_max_seen: u64,
    pub delay_max_proved: u64,
    /// Median CPU times of its kernel bodies; 0 for what the schedule doesn't have. None on devices.
    #[serde(flatten)]
    pub times: Option<StageTimes>,
}

/// Measured times of a stage's kernel bodies, nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageTimes {
    pub f_ns: u64,
    pub b_ns: u64,
    /// Backward with the fused update.
    pub b_last_ns: u64,
    pub i_ns: u64,
    pub w_ns: u64,
    pub w_last_ns: u64,
    pub u_ns: u64,
    /// Summing up squares for a global norm.
    pub n_ns: u64,
}

/// The end of a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    pub updates: u64,
    pub tokens: u64,
    pub elapsed_s: f64,
    /// Over the whole run, evaluations excluded.
    pub tokens_per_s: f64,
    /// Of the last update; none when there was no update.
    pub loss: Option<f64>,
    /// First and last evaluation, nats a token.
    pub eval_loss_first: Option<f64>,
    pub eval_loss_last: Option<f64>,
    /// Whether the run was asked to stop before its last update.
    pub stopped: bool,
    pub ranks: Vec<RankSummary>,
    pub stages: Vec<StageSummary>,
    /// How the ranks' devices were driven; none where threads call kernels.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub devices: Option<Usage>,
}

/// Takes a run's records. An error ends the run.
pub trait Observer {
    fn started(&mut self, _: &Started) -> io::Result<()> {
        Ok(())
    }
    fn update(&mut self, _: &UpdateRecord) -> io::Result<()> {
        Ok(())
    }
    fn evaluation(&mut self, _: &EvaluationRecord) -> io::Result<()> {
        Ok(())
    }
    fn finished(&mut self, _: &Summary) -> io::Result<()> {
        Ok(())
    }
}

/// Takes nothing.
impl Observer for () {}

/// All get every record, in order.
impl Observer for Vec<Box<dyn Observer + '_>> {
    fn started(&mut self, r: &Started) -> io::Result<()> {
        self.iter_mut().try_for_each(|o| o.started(r))
    }
    fn update(&mut self, r: &UpdateRecord) -> io::Result<()> {
        self.iter_mut().try_for_each(|o| o.update(r))
    }
    fn evaluation(&mut self, r: &EvaluationRecord) -> io::Result<()> {
        self.iter_mut().try_for_each(|o| o.evaluation(r))
    }
    fn finished(&mut self, r: &Summary) -> io::Result<()> {
        self.iter_mut().try_for_each(|o| o.finished(r))
    }
}
