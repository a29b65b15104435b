//! Schedules as tables of actions, in the CSV notation of PyTorch's `torch.distributed.pipelining`.
//!
//! # Meaning
//!
//! A row is a rank; its cells are performed from left to right. A cell is `<stage><ACTION><number>`, for example `1F0`:
//! stage 1, forward, micro-batch 0. `F` is the forward pass, `B` the whole backward pass, `I` and `W` its halves for
//! input and weights. A blank cell is an idle step: it only shows when something runs, so it is dropped here.
//!
//! A table with sends and receives (`compute_comms`) gives their order; in one without (`compute_only`) they are placed
//! as [`crate::expand`] does. A send names the sending stage, a receive the receiving one. `(0F7;1B3)OVERLAP_F_B` is
//! a forward and a backward pass that may overlap; here they run one after the other.
//!
//! PyTorch's tables are one update: all micro-batches, then the optimizer. Asynchronous schedules need one thing more,
//! an extension that PyTorch does not know: `<stage>U<update>` is an optimizer update of one stage. A table that has some
//! must place each one.
//!
//! The whole table is what repeats: the plan's period, without a prologue.
//!
//! # What is refused
//!
//! In the order of the checks: cells that are not understood to their last character ([`cell`]); a letter whose meaning
//! depends on PyTorch's version, unless the dialect is given ([`read`]); an action twice, on the wrong row, missing, or
//! before what it needs ([`check`]); sends and receives in different orders; ranks that wait for each other
//! ([`program`]).
//!
//! Faults name row and column, counted from 1.

mod cell;
mod check;
mod program;
mod read;
mod write;

pub use cell::{Action, Verb};
pub use read::read;
pub use write::{Content, is_flush, write};

use dsl::diag::Span;
use dsl::schedule::{Backward, Place, Schedule, Update};
use std::collections::HashMap;
use std::fmt;

/// What the letters of a table mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// `B` is the whole backward pass, `I` and `W` its halves (PyTorch from October 2024 on).
    New,
    /// `B` is the input gradient, `W` the weight gradient, `BW` the whole.
    Old,
}

/// A cell's place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spot {
    /// From 0: the rank.
    pub row: usize,
    /// From 0, blank cells counted.
    pub column: usize,
    pub span: Span,
}

impl fmt::Display for Spot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "row {}, column {}", self.row + 1, self.column + 1)
    }
}

/// An action and where it was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cell {
    pub action: Action,
    pub spot: Spot,
}

/// A checked table: every stage on one row, every action there once and after what it needs.
#[derive(Clone, Debug)]
pub struct Table {
    /// By rank: what it performs, in order.
    pub rows: Vec<Vec<Cell>>,
    /// By stage: the row that holds it.
    pub row_of_stage: Vec<usize>,
    /// M.
    pub microbatches: u32,
    /// Updates with a cell; none: one after all micro-batches.
    pub updates: Option<u32>,
    /// Whether sends and receives are in the table.
    pub comms: bool,
    /// Where each action is written.
    spots: HashMap<Action, Spot>,
}

impl Table {
    /// Micro-batches per update, K.
    pub fn accumulate(&self) -> u32 {
        self.microbatches / self.updates.unwrap_or(1)
    }

    /// A schedule that stands for the table: it has a name and properties, and no order program of its own.
    pub fn schedule(&self, name: &str) -> Schedule {
        let split = self.spots.keys().any(|action| action.verb == Verb::I);
        Schedule {
            name: name.to_owned(),
            place: Place::Linear,
            backward: if split { Backward::Split } else { Backward::Whole },
            update: if self.updates.is_some() { Update::Local } else { Update::Flush },
            weights: None,
            sequences: Vec::new(),
            order: Vec::new(),
            span: 0..0,
            library: false,
        }
    }
}
