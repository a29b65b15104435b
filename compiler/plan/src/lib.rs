//! Schedules expanded to instruction streams, and what is proved about them. Pure: no I/O, no LLVM.
//!
//! [`expand`] performs a schedule's order on every rank and places updates and transfers; [`analyse`] finds drift,
//! delay, memory in flight and bubble, and checks the bounds that a spec asks for; [`grid`] draws; [`time`] gives every
//! instruction its time under a cost model.

mod analyse;
mod block;
mod bounds;
mod buffers;
mod correction;
pub mod cover;
pub mod critical;
mod deadlock;
mod exchange;
pub mod expand;
pub mod expr;
pub mod facts;
pub mod grid;
mod line;
mod norm;
mod order;
mod policy;
mod posts;
pub mod search;
pub mod steady;
pub mod table;
pub mod time;
pub mod versions;

use artifact::stream::Policy;

pub use analyse::{Subject, analyse, analyse_proved};
pub use expand::{expand, expand_proved, keep_proved};
pub use policy::policy;

/// What a schedule is expanded for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// P.
    pub ranks: u32,
    /// Stages a rank, where the schedule's placement leaves it open.
    pub chunks: u32,
    /// K, micro-batches per update.
    pub accumulate: u32,
    /// Slots of each receive ring beyond what the order needs.
    pub receive_extra: u32,
    /// Slots of each send ring, at least 1.
    pub send_slots: u32,
    /// Which versions of the weights are read.
    pub policy: Policy,
    /// Whether the head multiplies by the token embedding's table.
    pub tied: bool,
    /// Whether updates read the norm of all stages' gradients.
    pub global_norm: bool,
}

impl Shape {
    /// With one extra receive slot and one send slot, the weights as they are, no tied table and no global norm; two
    /// stages a rank where the schedule leaves it open.
    pub fn new(ranks: u32, accumulate: u32) -> Self {
        let policy = Policy::Current;
        let (tied, global_norm) = (false, false);
        Shape { ranks, chunks: 2, accumulate, receive_extra: 1, send_slots: 1, policy, tied, global_norm }
    }

    /// What `spec` says.
    pub fn of(spec: &dsl::spec::Spec) -> Self {
        let chunks = spec.pipeline.chunks.value;
        let policy = policy(&spec.staleness.weights.value, spec.pipeline.recompute.value);
        let tied = spec.model.as_ref().is_some_and(|model| model.variant.tied);
        let global_norm = spec.clip.as_ref().is_some_and(|clip| matches!(clip.value, dsl::spec::Clip::Global { .. }));
        Shape {
            chunks,
            policy,
            tied,
            global_norm,
            ..Shape::new(spec.machine.ranks.value, spec.pipeline.accumulate.value)
        }
    }
}
