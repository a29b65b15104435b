//! A progress line on a terminal; plain lines, a few in all, elsewhere.

use crate::observe::{EvaluationRecord, Observer, Started, Summary, UpdateRecord};
use indicatif::{HumanDuration, ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::{self, IsTerminal, Write};
use std::time::Duration;

/// Plain lines that a run prints, about.
const LINES: u64 = 20;

/// See the module's text.
pub struct Progress<W: Write> {
    out: W,
    bar: Option<ProgressBar>,
    updates: u64,
    /// Updates between plain lines.
    every: u64,
}

impl Progress<io::Stderr> {
    /// Progress on standard error.
    pub fn stderr() -> Self {
        let bar = io::stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template("{bar:24} {pos}/{len} {msg}").expect("a constant template");
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(5));
            bar.with_style(style)
        });
        Progress { out: io::stderr(), bar, updates: 0, every: 1 }
    }
}

impl<W: Write> Progress<W> {
    /// Plain lines into `out`.
    pub fn plain(out: W) -> Self {
        Progress { out, bar: None, updates: 0, every: 1 }
    }

    fn line(&mut self, text: &str) -> io::Result<()> {
        match &self.bar {
            Some(bar) => bar.suspend(|| writeln!(self.out, "{text}")),
            None => writeln!(self.out, "{text}"),
        }
    }

    /// Time to the end at the present rate.
    fn eta(&self, r: &UpdateRecord) -> HumanDuration {
        let tokens_per_update = r.tokens as f64 / (r.update + 1) as f64;
        let left = self.updates.saturating_sub(r.update + 1) as f64;
        HumanDuration(Duration::try_from_secs_f64(left * tokens_per_update / r.tokens_per_s).unwrap_or_default())
    }
}

impl<W: Write> Observer for Progress<W> {
    fn started(&mut self, s: &Started) -> io::Result<()> {
        self.updates = s.updates;
        self.every = s.updates.div_ceil(LINES).max(1);
        if let Some(bar) = &self.bar {
            bar.set_length(s.updates);
        }
        Ok(())
    }

    fn update(&mut self, r: &UpdateRecord) -> io::Result<()> {
        let (done, loss, rate) = (r.update + 1, r.loss, r.tokens_per_s);
        if let Some(bar) = &self.bar {
            bar.set_position(done);
            bar.set_message(format!("loss {loss:.4}  {rate:.0} tokens/s  {:#} left", self.eta(r)));
            return Ok(());
        }
        if done % self.every != 0 && done != self.updates && r.update != 0 {
            return Ok(());
        }
        let eta = self.eta(r);
        let text = format!("update {done}/{}  loss {loss:.4}  {rate:.0} tokens/s  {eta:#} left", self.updates);
        self.line(&text)
    }

    fn evaluation(&mut self, r: &EvaluationRecord) -> io::Result<()> {
        let text = format!("held-out loss after {} updates: {:.4}", r.updates, r.eval_loss);
        self.line(&text)
    }

    fn finished(&mut self, s: &Summary) -> io::Result<()> {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        let end = if s.stopped { "stopped" } else { "done" };
        let text = format!(
            "{end} after {} updates: {} tokens in {:.1} s, {:.0} tokens/s",
            s.updates, s.tokens, s.elapsed_s, s.tokens_per_s
        );
        self.line(&text)
    }
}
