//! What the time of hops costs an asynchronous schedule, and what covering it would: beside what `check` finds.

use crate::cli::SpecArgs;
use crate::comparison::Figures;
use crate::driver::{self, Analysed};
use crate::failure::Failure;
use crate::render::Source;
use crate::report::{bytes, percent};
use dsl::spec::Cover;
use serde::Serialize;

/// The schedule with latency covered as the spec says, and in full.
#[derive(Debug, Serialize)]
pub struct Latency {
    pub hop_us: f64,
    /// Share of the latency that is covered, 0..1.
    pub covered: f64,
    pub uncovered_figures: Figures,
    /// Of the spec as it is, or of `cover_latency = full` where it covers none.
    pub covered_figures: Figures,
    /// Code and sentence of the first bound that covering exceeds.
    pub exceeded: Option<(&'static str, String)>,
}

/// Compares with and without. None where hops cost nothing or the schedule can't cover them.
pub fn compare(source: &Source, args: &SpecArgs, analysed: &Analysed) -> Result<Option<Latency>, Failure> {
    let (spec, hop_ns) = (&analysed.spec, analysed.costs.hop_ns);
    let share = spec.pipeline.cover_latency.value.share;
    if hop_ns == 0
        || args.table.is_some()
        || analysed.search.is_some()
        || spec.machine.ranks.value < 2
        || spec.schedule.latency_warmup().is_none()
    {
        return Ok(None);
    }
    let other = if share == 0 { "full" } else { "none" };
    let (alternative, found) = driver::analyse(source, &args.with_set(format!("pipeline.cover_latency={other}")))?;
    let figures = (Figures::new(analysed), alternative.as_ref().and_then(Figures::new));
    let (Some(here), Some(there)) = figures else { return Ok(None) };
    let (uncovered_figures, covered_figures) = if share == 0 { (here, there) } else { (there, here) };
    let error = found.into_iter().find(|d| share == 0 && d.is_error());
    Ok(Some(Latency {
        hop_us: hop_ns as f64 / 1000.0,
        covered: f64::from(share) / f64::from(Cover::FULL),
        uncovered_figures,
        covered_figures,
        exceeded: error.map(|d| (d.code, d.message)),
    }))
}

impl Latency {
    /// For the report.
    pub fn text(&self) -> String {
        let (from, to) = (&self.uncovered_figures, &self.covered_figures);
        let (lowers, raises) = match self.covered {
            0.0 => ("`cover_latency = full` would lower", "it would raise"),
            _ => ("`cover_latency` lowers", "it raises"),
        };
        let mut costs = vec![format!("micro-batches in flight from {} to {}", from.in_flight_max, to.in_flight_max)];
        if from.drift_max != to.drift_max {
            costs.push(format!("drift from {} to {}", from.drift_max, to.drift_max));
        }
        if let (Some(from), Some(to)) = (from.memory_bytes, to.memory_bytes) {
            costs.push(format!("memory from {} to {}", bytes(from), bytes(to)));
        }
        let (hop, bubbles) = (self.hop_us, [percent(from.bubble), percent(to.bubble)]);
        let mut text = format!(
            "latency: a hop takes {hop} us; {lowers} the bubble from {} to {}\n         {raises} {}\n",
            bubbles[0],
            bubbles[1],
            costs.join(", ")
        );
        if let Some((code, sentence)) = &self.exceeded {
            text.push_str(&format!("         and be refused, {code}: {sentence}\n"));
        }
        text
    }
}
