//! (c) What staleness costs as the pipeline grows.

use super::{ADAMW_RATES, SEEDS, Study, baseline, best_rate, cell, chosen_rate, closing, gap, heldout, scan, unique};
use crate::plot::{Across, Figure, Panel, Series, Shape};
use crate::rows::Rows;
use crate::setting::{Policy, Setting};
use crate::stats::Estimate;
use std::fmt::Write;

const RANKS: [u32; 3] = [2, 4, 8];

/// Policies with their micro-batches per update, K. K = 1 is where staleness grows with the ranks; 2BW needs K >= P - 1.
const KINDS: [(Policy, u32, &str); 4] = [
    (Policy::Stash, 1, "stash, K = 1"),
    (Policy::Paci, 1, "PACI, K = 1"),
    (Policy::DoubleBuffer, 8, "2BW, K = 8"),
    (Policy::Paci, 8, "PACI, K = 8"),
];

/// The same work at growing numbers of ranks.
#[derive(Debug)]
pub struct Staleness {
    pub updates: u64,
}

impl Staleness {
    fn rate(&self, rows: &Rows) -> Option<f64> {
        best_rate(rows, baseline(self.updates), &ADAMW_RATES)
    }

    fn setting(&self, rate: f64, policy: Policy, accumulate: u32, ranks: u32) -> Setting {
        Setting { policy, accumulate, ranks, rate, ..baseline(self.updates) }
    }

    fn synchronous(&self, rate: f64) -> Setting {
        baseline(self.updates).with_rate(rate)
    }
}

impl Study for Staleness {
    fn name(&self) -> &'static str {
        "staleness"
    }

    fn wanted(&self, rows: &Rows) -> Vec<Setting> {
        let mut runs: Vec<_> = scan(baseline(self.updates), &ADAMW_RATES).collect();
        let Some(rate) = self.rate(rows) else { return runs };
        for seed in SEEDS {
            runs.push(self.synchronous(rate).with_seed(seed));
            for (policy, k, _) in KINDS {
                runs.extend(RANKS.map(|ranks| self.setting(rate, policy, k, ranks).with_seed(seed)));
            }
        }
        unique(runs)
    }

    fn figure(&self, rows: &Rows) -> Figure {
        let title = "What staleness costs as the pipeline grows: 16 sequences per update".to_owned();
        let Some(rate) = self.rate(rows) else { return Figure { title, panels: Vec::new() } };
        let names = RANKS.map(|ranks| ranks.to_string()).to_vec();
        let panel = |title: &str, y: &str, estimate: &dyn Fn(Setting) -> Option<Estimate>| Panel {
            title: title.to_owned(),
            x: Across::Names("ranks, P".to_owned(), names.clone()),
            y: y.to_owned(),
            y_limit: None,
            series: KINDS.map(|kind| self.series(rate, kind, estimate)).to_vec(),
        };
        let cost = panel("Cost in held-out loss", "held-out loss less synchronous, nats a token", &|run| {
            gap(rows, run, self.synchronous(rate))
        });
        let delay = panel("Staleness", "mean gradient delay, updates", &|run| {
            rows.trained(&run).map(|row| Estimate { mean: row.delay_mean, half: None })
        });
        Figure { title, panels: vec![cost, delay] }
    }

    fn page(&self, rows: &Rows) -> String {
        let mut text = format!(
            "16 sequences (1024 tokens) per update on two, four and eight ranks, {} updates of AdamW at the best of three rates on \
             the synchronous baseline. With K = 1 gradients are P - 1 - s updates late on stage s; stash keeps the weights of each forward \
             pass for its backward pass, PACI reads the current ones. 2BW keeps two versions, and every gradient is one update late.\n",
            self.updates
        );
        let Some(rate) = self.rate(rows) else { return text + &closing(self, rows) };
        let base = self.synchronous(rate);
        let _ = writeln!(
            text,
            "\nThe rate is {}; synchronous training reaches a held-out loss of {}, on any number of ranks.\n",
            chosen_rate(rate, &ADAMW_RATES),
            cell(rows, base, heldout(rows, base), false)
        );
        text += "| P | policy | largest delay | mean delay | held-out loss | less synchronous |\n|---|---|---|---|---|---|\n";
        for ranks in RANKS {
            for (policy, k, name) in KINDS {
                let run = self.setting(rate, policy, k, ranks);
                let (max, mean) = rows
                    .trained(&run)
                    .map_or_else(Default::default, |row| (row.delay_max.to_string(), format!("{:.2}", row.delay_mean)));
                let losses = [cell(rows, run, heldout(rows, run), false), cell(rows, run, gap(rows, run, base), true)];
                let _ = writeln!(text, "| {ranks} | {name} | {max} | {mean} | {} |", losses.join(" | "));
            }
        }
        text += "\nDelays are in updates, the mean over stages of the proved mean. Losses are nats a token with 95 % intervals over three seeds; \
                 \"less synchronous\" is the mean of differences between runs with the same seed.\n";
        text + &closing(self, rows)
    }
}

impl Staleness {
    fn series(
        &self,
        rate: f64,
        (policy, k, name): (Policy, u32, &str),
        estimate: &dyn Fn(Setting) -> Option<Estimate>,
    ) -> Series {
        let points = RANKS
            .iter()
            .enumerate()
            .filter_map(|(n, &ranks)| Some((n as f64, estimate(self.setting(rate, policy, k, ranks))?)));
        Series { name: name.to_owned(), points: points.collect(), shape: Shape::DotsAndLine }
    }
}
