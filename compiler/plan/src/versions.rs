//! Drift and delay, exactly and for runs of any length.
//!
//! # Meaning
//!
//! The version of a stage's weights is the number of updates made. With v(F), v(B) the versions when a micro-batch's
//! `F` and its `B` (or `I`) run, its *drift* is v(B) - v(F): so many updates its backward pass crosses. Its *delay* is
//! the version that its update is applied to, minus v(F): update `u` is applied to version `u`. Both follow from the
//! order of one rank's stream alone, so no timing changes them.
//!
//! Beyond the prologue everything shifts by one repetition, so one micro-batch of each residue stands for all later
//! ones ([`artifact::verify::index`]): the maximum over the prologue's and one more of each residue is that of a run of
//! any length.

use crate::facts::Staleness;
use artifact::stream::Program;
use artifact::verify::index::{At, Places};
use artifact::verify::{StageIndex, Violation};

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
    let of = |s: usize| {
        let index = StageIndex::new(program, places, s);
        let counter = Counter::new(&index);
        let drift = counter.measure(boundary, |m| counter.version(index.input_gradient.at(m)));
        let delay = counter.measure(boundary, |m| m / u64::from(program.accumulate));
        let delay_uniform = counter.uniform(u64::from(program.accumulate), delay.staleness.max);
        StageVersions { drift, delay, delay_uniform }
    };
    (0..program.rank_of_stage.len()).map(of).collect()
}

/// Counts updates before a place in the stream.
struct Counter<'a> {
    index: &'a StageIndex<'a>,
    /// Positions of U in the prologue and the period, ascending.
    prologue: Vec<u32>,
    period: Vec<u32>,
}

impl<'a> Counter<'a> {
    fn new(index: &'a StageIndex<'a>) -> Self {
        let (prologue, period) = index.update.positions();
        Counter { index, prologue, period }
    }

    fn version(&self, at: At) -> u64 {
        let before = |positions: &[u32]| positions.partition_point(|p| *p < at.position) as u64;
        match at.section.checked_sub(1) {
            None => before(&self.prologue),
            Some(n) => self.prologue.len() as u64 + n * self.period.len() as u64 + before(&self.period),
        }
    }

    /// `most`, the largest delay, if update k consists of micro-batches whose delays are all the smaller of k and it.
    fn uniform(&self, accumulate: u64, most: u64) -> Option<u64> {
        let (f, step) = (&self.index.f, self.index.f.step());
        let as_said = |m: u64, steady: bool| {
            let update = m / accumulate;
            let delay = update.saturating_sub(self.version(f.at(m)));
            // Every later micro-batch of the residue is as the steady one.
            delay == if steady { most } else { update.min(most) }
        };
        let all = (0..step).all(|residue| {
            // From update `most` on the delay must be all of it, so the steady one is looked for no earlier.
            let transient = f.lead(residue).max((most * accumulate).div_ceil(step));
            (0..=transient).all(|turn| as_said(residue + turn * step, turn == transient))
        });
        all.then_some(most)
    }

    /// Largest and mean of `end(m) - version at F(m)`.
    fn measure(&self, boundary: Option<u64>, end: impl Fn(u64) -> u64) -> Measure {
        let (f, step) = (&self.index.f, self.index.f.step());
        let updates = (self.period.len() as u64).max(1);
        let limit = boundary.map_or(u64::MAX, |b| b.saturating_mul(step / updates));
        let mut worst: Option<Witness> = None;
        let (mut sum, mut count) = (0.0, 0u64);
        for residue in 0..step {
            let transient = f.lead(residue).max(self.index.input_gradient.lead(residue));
            for turn in 0..=transient {
                let m = residue + turn * step;
                if m >= limit {
                    break;
                }
                let (at_forward, at_end) = (self.version(f.at(m)), end(m));
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
