//! What the ranks of a run share besides transfers: where the segment ends, and whether one of them failed.

use crate::error::RunError;
use crate::transport::local::Links;
use artifact::ids::RankId;
use artifact::stream::Op;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Asks a run to end at the next update. Clones ask the same run.
#[derive(Clone, Debug, Default)]
pub struct StopFlag(Arc<AtomicBool>);

impl StopFlag {
    pub fn request(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    pub fn requested(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }

    /// A flag that the first Ctrl-C raises; the second one ends the process with status 130.
    ///
    /// # Errors
    /// When the process has a handler already.
    pub fn on_ctrl_c() -> Result<StopFlag, ctrlc::Error> {
        let flag = StopFlag::default();
        let raised = flag.clone();
        ctrlc::set_handler(move || {
            if raised.requested() {
                std::process::exit(130);
            }
            raised.request();
        })?;
        Ok(flag)
    }
}

/// The first failure of a segment.
#[derive(Clone, Debug)]
pub struct Failure {
    pub rank: RankId,
    pub action: String,
    pub cause: String,
}

/// A rank was told to give up because the run failed.
#[derive(Clone, Copy, Debug)]
pub struct GivenUp;

/// Shared by the ranks of one segment.
///
/// The segment ends at micro-batch `limit`; all that is at or past it is skipped. The rank of the first stage may lower the
/// limit, before a forward pass, to the next border between updates that it has not passed. Everything
/// else that belongs to a micro-batch comes after that forward pass, so no rank has computed anything past the new limit:
/// at most it has posted receives, which are withdrawn, or waits in one, which ends. Each rank then drains as if the
/// segment had been that short from the start.
pub struct Control<'a> {
    limit: AtomicU64,
    /// Micro-batches per border where the segment may end early.
    step: u64,
    stop: &'a StopFlag,
    failure: Mutex<Option<Failure>>,
    /// What ranks waited for in vain, as sentences.
    waits: Mutex<Vec<(RankId, String)>>,
    failed: AtomicBool,
    /// Micro-batches that a rank on a device has begun, over all ranks: the limit doesn't go below.
    begun: Mutex<u64>,
    links: &'a Links,
}

impl<'a> Control<'a> {
    /// A segment of `limit` micro-batches that may end at each multiple of `step`.
    pub fn new(limit: u64, step: u64, stop: &'a StopFlag, links: &'a Links) -> Self {
        let (failure, failed) = (Mutex::new(None), AtomicBool::new(false));
        let (limit, begun, waits) = (AtomicU64::new(limit), Mutex::new(0), Mutex::default());
        Control { limit, step, stop, failure, waits, failed, begun, links }
    }

    /// Micro-batches of the segment.
    pub fn limit(&self) -> u64 {
        self.limit.load(Ordering::Acquire)
    }

    /// Whether an instruction is past the end.
    pub fn skips(&self, op: Op, at: u64) -> bool {
        if op.by_update() { at >= self.limit() / self.step } else { at >= self.limit() }
    }

    /// Called by the rank of the first stage before it begins the forward pass of `mb`, the first one that it has not begun.
    pub fn before_first_forward(&self, mb: u64) {
        let border = mb.next_multiple_of(self.step);
        if self.stop.requested() && border < self.limit() {
            self.limit.store(border, Ordering::Release);
            self.wake();
        }
    }

    /// Called by a rank that runs ahead of its device before it takes an instruction: whether the segment has it. No rank has taken anything past
    /// what all have begun, so a stop may end the segment there.
    pub fn begins(&self, op: Op, at: u64) -> bool {
        if matches!(op, Op::U | Op::N | Op::T) {
            return !self.skips(op, at);
        }
        // A receive for an update is begun like the first of its micro-batches.
        let at = if op.by_update() { at * self.step } else { at };
        let mut begun = self.begun.lock().unwrap_or_else(PoisonError::into_inner);
        if at < *begun {
            return at < self.limit();
        }
        let border = begun.next_multiple_of(self.step);
        if self.stop.requested() && border < self.limit() {
            self.limit.store(border, Ordering::Release);
        }
        let has = at < self.limit();
        if has {
            *begun = at + 1;
        }
        has
    }

    /// Records what a rank waited for in vain, and ends every wait.
    pub fn waited(&self, rank: RankId, sentence: String) {
        self.waits.lock().unwrap_or_else(PoisonError::into_inner).push((rank, sentence));
        self.failed.store(true, Ordering::Release);
        self.wake();
    }

    /// Records a failure (the first one counts) and ends every wait.
    pub fn fail(&self, failure: Failure) {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(failure);
        self.failed.store(true, Ordering::Release);
        self.wake();
    }

    pub fn failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// Why the run failed, if it did.
    pub fn into_error(self) -> Option<RunError> {
        let failure = self.failure.into_inner().unwrap_or_else(PoisonError::into_inner);
        if let Some(Failure { rank, action, cause }) = failure {
            return Some(RunError::Rank { rank, action, cause });
        }
        let waits = self.waits.into_inner().unwrap_or_else(PoisonError::into_inner);
        let sentences: Vec<String> = waits.into_iter().map(|(_, sentence)| sentence).collect();
        (!sentences.is_empty()).then(|| RunError::Waited(sentences.join("; ")))
    }

    fn wake(&self) {
        self.links.all().for_each(|c| c.wake());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stop_ends_the_segment_at_the_next_border_that_is_not_begun() {
        let (stop, links) = (StopFlag::default(), Links::default());
        let limit = |next: u64, requested: bool| {
            let control = Control::new(12, 3, &stop, &links);
            if requested {
                stop.request();
            }
            control.before_first_forward(next);
            control.limit()
        };
        assert_eq!(limit(4, false), 12);
        // Micro-batch 3 was begun: its update is completed. Micro-batch 6 was not.
        assert_eq!((limit(4, true), limit(6, true), limit(11, true), limit(0, true)), (6, 6, 12, 0));
    }

    #[test]
    fn instructions_past_the_end_are_skipped_updates_by_their_own_count() {
        let (stop, links) = (StopFlag::default(), Links::default());
        let control = Control::new(12, 3, &stop, &links);
        assert_eq!([11, 12].map(|at| control.skips(Op::F, at)), [false, true]);
        assert_eq!([3, 4].map(|at| control.skips(Op::U, at)), [false, true]);
    }
}
