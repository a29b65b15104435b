//! Makes a study's runs, one after another, until there are no more or time is up.

use crate::paceline::{Corpus, Ended, Paceline};
use crate::rows::{Outcome, Row, Rows};
use crate::setting::Setting;
use crate::study::Study;
use std::time::{Duration, Instant};

/// Why there are no more runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The study is complete.
    Complete,
    /// The next run would not end within the budget.
    Budget,
    /// A run was interrupted.
    Interrupted,
}

/// Makes the runs that `study` wants and `rows` lack; `say` gets a line for each. Runs that another study made are copied.
///
/// # Errors
/// When a run fails in a way that is no result, or the rows can't be written. What was done before is kept.
pub fn work(
    study: &dyn Study,
    rows: &mut Rows,
    paceline: &mut Paceline,
    corpus: &Corpus,
    budget: Option<Duration>,
    say: &mut dyn FnMut(&str),
) -> Result<Stop, String> {
    let start = Instant::now();
    let mut longest = Duration::ZERO;
    loop {
        let wanted = study.wanted(rows);
        let Some(next) = wanted.iter().find(|run| rows.get(run).is_none()) else { return Ok(Stop::Complete) };
        if let Some(row) = rows.elsewhere(next) {
            rows.push(row.clone())?;
            continue;
        }
        if budget.is_some_and(|budget| start.elapsed() + longest > budget) {
            return Ok(Stop::Budget);
        }
        let begun = Instant::now();
        let row = match paceline.run(next, corpus)? {
            Ended::Stopped => return Ok(Stop::Interrupted),
            Ended::Row(row) => *row,
        };
        longest = longest.max(begun.elapsed());
        let done = wanted.iter().filter(|run| rows.get(run).is_some()).count() + 1;
        say(&format!("{done}/{} {}", wanted.len(), line(next, &row)));
        rows.push(row)?;
    }
}

fn line(run: &Setting, row: &Row) -> String {
    match row.outcome {
        Outcome::Trained => {
            let loss = row.heldout_loss.unwrap_or(f64::NAN);
            let speed = row.tokens as f64 / row.elapsed_s;
            format!("{run}: held-out loss {loss:.4}, {:.0} s, {speed:.0} tokens/s", row.elapsed_s)
        }
        Outcome::Diverged => format!("{run}: {}", row.reason),
        Outcome::Unavailable => format!("{run}: not available: {}", row.reason),
    }
}
