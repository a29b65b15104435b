//! What the analyses find out about a plan.

/// Facts about one rank. Times are under the cost model.
#[derive(Clone, Debug, PartialEq)]
pub struct RankFacts {
    /// Most micro-batches in flight at once: forward begun, backward not finished.
    pub in_flight_max: u32,
    /// 1 - work/period in steady state, 0..1.
    pub bubble: f64,
    /// Longest per-rank span based: 1 - work/span, over one period run alone with its prologue and drain.
    pub bubble_span: f64,
    /// 1 - work/makespan, by the global end.
    pub bubble_makespan: f64,
    pub busy_ns: u64,
    pub span_ns: u64,
}

/// Largest and mean of a staleness measure, in updates, in steady state (the largest over any run length).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Staleness {
    pub max: u64,
    pub mean: f64,
}

#[derive(Clone, Debug, PartialEq)]
pub struct StageFacts {
    pub drift: Staleness,
    pub delay: Staleness,
    /// The delay of all of an update's micro-batches, when they have one: that of the k-th update (from 0) is the smaller of k
    /// and this.
    pub delay_uniform: Option<u64>,
    pub versions_live: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proof {
    pub claim: String,
    pub holds: bool,
    /// How it was shown, in one sentence.
    pub by: String,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Facts {
    pub ranks: Vec<RankFacts>,
    pub stages: Vec<StageFacts>,
    /// Nanoseconds of one steady period.
    pub period_ns: u64,
    pub makespan_ns: u64,
    pub proofs: Vec<Proof>,
    /// Instructions visited by expansion, proof and analyses, each time again: see [`artifact::work`].
    pub work: u64,
}
