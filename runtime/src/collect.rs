//! Puts the stages' reports together: an update's record is complete when every stage has made it.

use crate::executor::Report;
use crate::observe::UpdateRecord;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Updates over which the rate is taken.
const RATE_UPDATES: usize = 32;

#[derive(Clone, Copy, Debug)]
struct Pending {
    stages: usize,
    loss: f64,
    drift_max: u64,
    at: Instant,
}

/// See the module's text.
#[derive(Debug)]
pub struct Collector {
    stages: usize,
    tokens_per_update: u64,
    start: Instant,
    /// Time spent on evaluations so far.
    paused: Duration,
    /// Updates that are complete.
    pub done: u64,
    pending: VecDeque<Pending>,
    drift_max: u64,
    /// Training time at the end of recent updates, the oldest first.
    recent: VecDeque<Duration>,
    pub last_loss: Option<f64>,
}

impl Collector {
    pub fn new(stages: usize, tokens_per_update: u64) -> Self {
        let mut recent = VecDeque::with_capacity(RATE_UPDATES + 1);
        recent.push_back(Duration::ZERO);
        Collector {
            stages,
            tokens_per_update,
            start: Instant::now(),
            paused: Duration::ZERO,
            done: 0,
            pending: VecDeque::with_capacity(64),
            drift_max: 0,
            recent,
            last_loss: None,
        }
    }

    /// Takes time out of the rates.
    pub fn pause(&mut self, time: Duration) {
        self.paused += time;
    }

    pub fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    /// Time spent on training so far.
    pub fn training(&self) -> Duration {
        self.elapsed().saturating_sub(self.paused)
    }

    /// Adds a stage's report. Stages report each update once, in order, so an update is complete before the next one.
    pub fn take(&mut self, report: Report) -> Option<UpdateRecord> {
        let i = (report.update - self.done) as usize;
        while self.pending.len() <= i {
            self.pending.push_back(Pending { stages: 0, loss: 0.0, drift_max: 0, at: report.at });
        }
        let p = &mut self.pending[i];
        p.stages += 1;
        p.loss = report.loss.unwrap_or(p.loss);
        p.drift_max = p.drift_max.max(report.drift_max);
        p.at = p.at.max(report.at);
        if self.pending.front()?.stages < self.stages {
            return None;
        }
        let complete = self.pending.pop_front()?;
        Some(self.record(complete))
    }

    fn record(&mut self, p: Pending) -> UpdateRecord {
        let elapsed = p.at.saturating_duration_since(self.start);
        let training = elapsed.saturating_sub(self.paused);
        self.recent.push_back(training);
        let span = training.saturating_sub(self.recent[0]).as_secs_f64();
        let updates = (self.recent.len() - 1) as u64;
        if self.recent.len() > RATE_UPDATES {
            self.recent.pop_front();
        }
        self.drift_max = self.drift_max.max(p.drift_max);
        let loss = p.loss / self.tokens_per_update as f64;
        self.last_loss = Some(loss);
        let update = self.done;
        self.done += 1;
        UpdateRecord {
            update,
            loss,
            tokens: self.done * self.tokens_per_update,
            elapsed_s: elapsed.as_secs_f64(),
            tokens_per_s: (updates * self.tokens_per_update) as f64 / span.max(1e-9),
            drift_max_seen: self.drift_max,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_update_is_complete_when_every_stage_has_made_it() {
        let mut c = Collector::new(2, 10);
        let report =
            |update, loss, drift_max| Report { update, of_segment: update, loss, drift_max, at: Instant::now() };
        assert!(c.take(report(0, None, 2)).is_none());
        assert!(c.take(report(1, None, 3)).is_none());
        let first = c.take(report(0, Some(25.0), 0)).unwrap();
        assert_eq!((first.update, first.loss, first.tokens, first.drift_max_seen), (0, 2.5, 10, 2));
        let second = c.take(report(1, Some(5.0), 0)).unwrap();
        assert_eq!((second.update, second.loss, second.tokens, second.drift_max_seen), (1, 0.5, 20, 3));
    }
}
