//! Schedules expanded to instruction streams, and what is proved about them. Pure: no I/O, no LLVM.
//!
//! [`expand`] performs a schedule's order on every rank and places updates and transfers; [`analyse`] finds drift,
//! delay, memory in flight and bubble, and checks the bounds that a spec asks for; [`grid`] draws; [`time`] gives every
//! instruction its time under a cost model.

mod analyse;
mod bounds;
pub mod critical;
mod deadlock;
pub mod expand;
pub mod expr;
pub mod facts;
pub mod grid;
mod line;
mod order;
pub mod steady;
pub mod time;
pub mod versions;

pub use analyse::{Replay, Subject, analyse, replay};
pub use expand::expand;

/// What a schedule is expanded for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// P; one stage a rank.
    pub ranks: u32,
    /// K, micro-batches per update.
    pub accumulate: u32,
    /// Slots of each receive ring beyond what the order needs.
    pub receive_extra: u32,
    /// Slots of each send ring, at least 1.
    pub send_slots: u32,
}

impl Shape {
    /// With one extra receive slot and one send slot.
    pub fn new(ranks: u32, accumulate: u32) -> Self {
        Shape { ranks, accumulate, receive_extra: 1, send_slots: 1 }
    }
}
