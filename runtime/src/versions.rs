//! Which slot of each ring an instruction means, from versions that are counted here.
//!
//! A stage counts its updates, and every slot of its weights has a word with the version that lies in it. F asks the program's policy for a
//! version, looks into that one's slot and keeps what it finds beside its stash; B and I read the slot of what F kept, or the
//! newest. Drift is what they find there less what F found. So a slot that was overwritten too early, or is not written yet, is
//! counted and does not pass unseen.

use artifact::program::Selector;
use artifact::stream::Policy;

/// Version that F of a micro-batch of an update (counted over the run, as the version is) is to read, when `newest` is the last one made.
pub fn forward(policy: Policy, update: u64, newest: u64) -> u64 {
    match policy {
        Policy::DoubleBuffer => update.saturating_sub(1),
        Policy::Current | Policy::Recomputed | Policy::Stash | Policy::Predicted => newest,
    }
}

/// Version that B or I of a micro-batch is to read, whose F found `seen`.
pub fn backward(policy: Policy, seen: u64, newest: u64) -> u64 {
    match policy {
        Policy::Stash | Policy::DoubleBuffer => seen,
        Policy::Current | Policy::Recomputed | Policy::Predicted => newest,
    }
}

/// Version of the activations that B or I of a micro-batch reads, which itself reads `reads`.
pub fn activations(policy: Policy, seen: u64, reads: u64) -> u64 {
    if policy == Policy::Recomputed { reads } else { seen }
}

/// What an instruction's selectors stand for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Slots {
    pub microbatch: u64,
    /// Version of the weights that the micro-batch reads.
    pub seen: u64,
    /// Updates made.
    pub newest: u64,
    /// Whether the weights themselves are read where training reads a prediction of them.
    pub evaluates: bool,
}

impl Slots {
    /// The micro-batch or version whose slot is meant.
    pub fn index(&self, by: Selector) -> u64 {
        match by {
            Selector::Microbatch => self.microbatch,
            Selector::Seen => self.seen,
            Selector::Newest => self.newest,
            Selector::Next => self.newest + 1,
            Selector::Here => 0,
            Selector::Ahead => u64::from(!self.evaluates),
        }
    }
}
