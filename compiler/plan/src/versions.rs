//! Drift and delay, exactly and for runs of any length.
//!
//! # Meaning
//!
//! The version of a stage's weights is the number of updates made. With v(F), v(B) the versions that a micro-batch's
//! `F` and its `B` (or `I`) read, by the program's policy ([`artifact::verify::versions`]), its *drift* is v(B) - v(F): so many updates its backward pass crosses. Its *delay* is
//! the version that its update is applied to, minus v(F): update `u` is applied to version `u`. Both follow from the
//! order of one rank's stream alone, so no timing changes them.
//!
//! A backward pass that first runs the forward pass again, with the weights as they are, has no drift. The delay remains: its input,
//! and the gradient that it continues, were made with older weights.
//!
//! A run's first update has no version before it: under `double_buffer` its delay is 0, and 1 from then on.
//!
//! Beyond the prologue everything shifts by one repetition, so one micro-batch of each residue stands for all later
//! ones ([`artifact::verify::index`]): the maximum over the prologue's and one more of each residue is that of a run of
//! any length.

use crate::facts::Staleness;
use artifact::stream::{Policy, Program};
use artifact::verify::index::Places;
use artifact::verify::versions::Versions;
use artifact::verify::{StageIndex, Violation};
use artifact::work;

/// A micro-batch that shows a measure's maximum; the first such.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Witness {
    pub mb: u64,
    /// Version that its F reads.
    pub at_forward: u64,
    /// Version that its B (I) reads, or that its update is applied to.
    pub at_end: u64,
}

/// One measure of one stage.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measure {
    pub staleness: Staleness,
    pub witness: Witness,
}

/// Staleness of one stage.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StageVersions {
    pub drift: Measure,
    pub delay: Measure,
    /// See [`crate::facts::StageFacts::delay_uniform`].
    pub delay_uniform: Option<u64>,
}

/// By stage. With a `boundary`, runs consist of segments of so many updates: only their micro-batches count, and means
/// are over a segment.
///
/// # Errors
/// When coverage of the program does not hold; shape and placement must.
pub fn versions(program: &Program, boundary: Option<u64>) -> Result<Vec<StageVersions>, Violation> {
    let places = Places::new(program).map_err(|mut violations| violations.remove(0))?;
    Ok(versions_at(program, &places, boundary))
}

/// [`versions`] of a program whose places are known.
pub fn versions_at(program: &Program, places: &Places, boundary: Option<u64>) -> Vec<StageVersions> {
    let stages: Vec<StageIndex> =
        (0..program.rank_of_stage.len()).map(|s| StageIndex::new(program, places, s)).collect();
    // A drain changes nothing that a double buffer reads; its first update has no version before.
    let double = program.policy == Policy::DoubleBuffer;
    let boundary = boundary.filter(|_| !double);
    let of = |(index, reads): (&StageIndex, &Versions)| {
        let counter = Counter { index, reads, accumulate: program.accumulate.into(), first: u64::from(double) };
        let drift = counter.measure(boundary, |m| reads.activations(m), |m| reads.backward(m));
        let delay = counter.measure(boundary, |m| reads.forward(m), |m| (m / counter.accumulate) as i64);
        let delay_uniform = counter.uniform(delay.staleness.max);
        StageVersions { drift, delay, delay_uniform }
    };
    stages.iter().zip(&Versions::of(program, &stages)).map(of).collect()
}

struct Counter<'a> {
    index: &'a StageIndex<'a>,
    reads: &'a Versions<'a>,
    accumulate: u64,
    /// Repetitions that are not yet as all later ones, beyond the leads.
    first: u64,
}

impl Counter<'_> {
    /// `most`, the largest delay, if update k consists of micro-batches whose delays are all the smaller of k and it.
    fn uniform(&self, most: u64) -> Option<u64> {
        let (f, step, accumulate) = (&self.index.f, self.index.f.step(), self.accumulate);
        let as_said = |m: u64, steady: bool| {
            let update = m / accumulate;
            let delay = update.saturating_sub(self.reads.forward(m).max(0) as u64);
            // Every later micro-batch of the residue is as the steady one.
            delay == if steady { most } else { update.min(most) }
        };
        let all = (0..step).all(|residue| {
            // From update `most` on the delay must be all of it, so the steady one is looked for no earlier.
            let transient = f.lead(residue).max((most * accumulate).div_ceil(step));
            work::visit(transient as usize + 1);
            (0..=transient).all(|turn| as_said(residue + turn * step, turn == transient))
        });
        all.then_some(most)
    }

    /// Largest and mean of `end(m) - from(m)`, two versions.
    fn measure(&self, boundary: Option<u64>, from: impl Fn(u64) -> i64, end: impl Fn(u64) -> i64) -> Measure {
        let (f, step) = (&self.index.f, self.index.f.step());
        let limit = boundary.map_or(u64::MAX, |b| b.saturating_mul(self.accumulate));
        let mut worst: Option<Witness> = None;
        let (mut sum, mut count) = (0.0, 0u64);
        for residue in 0..step {
            let transient = f.lead(residue).max(self.index.input_gradient.lead(residue)) + self.first;
            for turn in 0..=transient {
                work::visit(1);
                let m = residue + turn * step;
                if m >= limit {
                    break;
                }
                // Before the first update there is nothing but where training starts.
                let [at_forward, at_end] = [from(m), end(m)].map(|v| v.max(0) as u64);
                let stale = at_end.saturating_sub(at_forward);
                let largest = worst.map_or(0, |w| w.at_end - w.at_forward);
                if worst.is_none_or(|w| stale > largest || stale == largest && m < w.mb) {
                    worst = Some(Witness { mb: m, at_forward, at_end: at_forward + stale });
                }
                // In steady state every later micro-batch of the residue is as this one.
                let weight = match (turn == transient, boundary) {
                    (true, None) => 1,
                    (true, Some(_)) => (limit - m).div_ceil(step),
                    (false, None) => 0,
                    (false, Some(_)) => 1,
                };
                sum += stale as f64 * weight as f64;
                count += weight;
            }
        }
        let witness = worst.unwrap_or(Witness { mb: 0, at_forward: 0, at_end: 0 });
        let staleness = Staleness { max: witness.at_end - witness.at_forward, mean: sum / count.max(1) as f64 };
        Measure { staleness, witness }
    }
}
