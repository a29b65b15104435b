//! What the interpreter counts.

use artifact::stream::RingSizes;

/// What a run showed.
#[derive(Clone, Debug, PartialEq)]
pub struct Observed {
    /// By stage and micro-batch.
    pub drift: Vec<Vec<u64>>,
    pub delay: Vec<Vec<u64>>,
    /// By stage: most slots of each ring that were taken at once.
    pub used: Vec<RingSizes>,
    /// By rank: most micro-batches between the start of F and the end of B (W), those of all its stages summed.
    pub in_flight: Vec<u32>,
    /// By rank: time spent computing, time of the first start and of the last end.
    pub busy: Vec<u64>,
    pub span: Vec<(u64, u64)>,
    /// By stage and update: when it was made.
    pub updated: Vec<Vec<u64>>,
}

impl Observed {
    pub fn makespan(&self) -> u64 {
        self.span.iter().map(|(_, end)| *end).max().unwrap_or(0)
    }
}
