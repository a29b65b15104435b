//! The queue from the ranks to the observer. It allocates once, so that a run's memory doesn't depend on its length.

use crate::executor::Report;
use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Reports that may wait for the observer before ranks wait for it.
const WAITING_MAX: usize = 256;

/// See the module's text.
#[derive(Debug)]
pub struct Reports {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    waiting: VecDeque<Report>,
    /// Ranks that may still send.
    senders: usize,
}

impl Reports {
    pub fn new(senders: usize) -> Self {
        let state = State { waiting: VecDeque::with_capacity(WAITING_MAX), senders };
        Reports { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Adds a report; waits while the queue is full.
    pub fn send(&self, report: Report) {
        let mut state = self.until(|s| s.waiting.len() < WAITING_MAX);
        state.waiting.push_back(report);
        self.changed.notify_all();
    }

    /// A rank sends no more.
    pub fn close(&self) {
        self.until(|_| true).senders -= 1;
        self.changed.notify_all();
    }

    /// The next report; none when every rank has closed.
    pub fn next(&self) -> Option<Report> {
        let mut state = self.until(|s| !s.waiting.is_empty() || s.senders == 0);
        self.changed.notify_all();
        state.waiting.pop_front()
    }

    /// The state, once it is as wanted.
    fn until(&self, wanted: impl Fn(&State) -> bool) -> MutexGuard<'_, State> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        self.changed.wait_while(state, |s| !wanted(s)).unwrap_or_else(PoisonError::into_inner)
    }
}
