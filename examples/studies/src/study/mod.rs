//! The studies: which runs each wants, and what it makes of their results.

mod delay;
mod paci;
mod staleness;

use crate::plot::Figure;
use crate::rows::{Outcome, Rows};
use crate::setting::{ADAMW, Policy, Setting};
use crate::stats::Estimate;

pub use delay::Delay;
pub use paci::Paci;
pub use staleness::Staleness;

/// Initial weights and data orders that every comparison is made with.
pub const SEEDS: [u64; 3] = [1, 2, 3];

/// A question, the runs that answer it, and the answer.
pub trait Study {
    /// Of its files: `NAME.csv`, `NAME.svg`, `NAME.md`.
    fn name(&self) -> &'static str;

    /// All runs that the results so far ask for, each once, in the order to make them. It grows while rates are still to be chosen,
    /// and is complete when it has no run without a row.
    fn wanted(&self, rows: &Rows) -> Vec<Setting>;

    fn figure(&self, rows: &Rows) -> Figure;

    /// The page in Markdown, without its picture.
    fn page(&self, rows: &Rows) -> String;
}

/// Learning rates of AdamW that the studies of schedules choose from.
const ADAMW_RATES: [f64; 3] = [1e-3, 3e-3, 1e-2];

/// Synchronous training on eight ranks, which staleness is compared with.
fn baseline(updates: u64) -> Setting {
    Setting {
        policy: Policy::Flush,
        optimizer: ADAMW,
        rate: ADAMW_RATES[0],
        ranks: 8,
        accumulate: 8,
        updates,
        seed: SEEDS[0],
    }
}

/// Without those that came before.
fn unique(runs: Vec<Setting>) -> Vec<Setting> {
    let mut once: Vec<Setting> = Vec::with_capacity(runs.len());
    for run in runs {
        if !once.contains(&run) {
            once.push(run);
        }
    }
    once
}

/// The runs of a setting at several rates, with the first seed.
fn scan<'a>(setting: Setting, rates: &'a [f64]) -> impl Iterator<Item = Setting> + 'a {
    rates.iter().map(move |&rate| setting.with_rate(rate).with_seed(SEEDS[0]))
}

/// The rate with the lowest held-out loss, once all were tried; none if none trained.
fn best_rate(rows: &Rows, setting: Setting, rates: &[f64]) -> Option<f64> {
    let tried: Vec<_> = scan(setting, rates).map(|run| Some((run.rate, rows.get(&run)?))).collect::<Option<_>>()?;
    let losses = tried.iter().filter_map(|(rate, row)| Some((*rate, row.heldout_loss?)));
    losses.min_by(|a, b| a.1.total_cmp(&b.1)).map(|(rate, _)| rate)
}

/// The chosen rate in text, with a word where a better one may lie beyond those that were tried.
fn chosen_rate(rate: f64, rates: &[f64]) -> String {
    let edge = rates.first() == Some(&rate) || rates.last() == Some(&rate);
    format!("{rate:e}{}", if edge { ", the last one tried" } else { "" })
}

/// Held-out loss over the seeds that trained.
fn heldout(rows: &Rows, setting: Setting) -> Option<Estimate> {
    let losses: Vec<f64> = each_seed(rows, setting).map(|(_, loss)| loss).collect();
    Estimate::of(&losses)
}

/// Held-out loss less that of another setting with the same seed, over the seeds that trained both: they share initial
/// weights and data, so the difference is known better than either.
fn gap(rows: &Rows, setting: Setting, from: Setting) -> Option<Estimate> {
    let pairs = each_seed(rows, setting).filter_map(|(seed, loss)| {
        let other = rows.trained(&from.with_seed(seed))?.heldout_loss?;
        Some(loss - other)
    });
    Estimate::of(&pairs.collect::<Vec<_>>())
}

fn each_seed(rows: &Rows, setting: Setting) -> impl Iterator<Item = (u64, f64)> {
    SEEDS.into_iter().filter_map(move |seed| Some((seed, rows.trained(&setting.with_seed(seed))?.heldout_loss?)))
}

/// A cell of a table: an estimate, or why there is none.
fn cell(rows: &Rows, setting: Setting, estimate: Option<Estimate>, signed: bool) -> String {
    let outcomes: Vec<_> = SEEDS.iter().filter_map(|&seed| rows.get(&setting.with_seed(seed))).collect();
    let diverged = outcomes.iter().filter(|row| row.outcome == Outcome::Diverged).count();
    let lost = match diverged {
        0 => String::new(),
        n => format!(" ({n} of {} diverged)", outcomes.len()),
    };
    if let Some(estimate) = estimate {
        return estimate.text(4, signed) + &lost;
    }
    if diverged > 0 {
        return "diverged".to_owned();
    }
    match outcomes.first() {
        Some(row) if row.outcome == Outcome::Unavailable => "not available".to_owned(),
        _ => "not run".to_owned(),
    }
}

/// What of the wanted was refused, and how much was trained: the end of every page.
fn closing(study: &dyn Study, rows: &Rows) -> String {
    let wanted = study.wanted(rows);
    let done = wanted.iter().filter(|run| rows.get(run).is_some()).count();
    let (tokens, seconds) = rows.totals();
    let mut text = format!(
        "\n{done} of {} runs, {:.1} million tokens, {:.0} minutes of training. Corpus {}. All runs: [{name}.csv]({name}.csv).\n",
        wanted.len(),
        tokens as f64 / 1e6,
        seconds / 60.0,
        rows.corpus(),
        name = study.name(),
    );
    let mut refused: Vec<String> = Vec::new();
    for row in wanted.iter().filter_map(|run| rows.get(run)).filter(|row| row.outcome == Outcome::Unavailable) {
        let line = format!("* `{}` with `{}`: {}\n", row.policy, row.optimizer, row.reason);
        if !refused.contains(&line) {
            refused.push(line);
        }
    }
    if !refused.is_empty() {
        text += &format!("\nNot available in this version:\n\n{}", refused.concat());
    }
    text
}
