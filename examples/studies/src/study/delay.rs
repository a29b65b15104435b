//! (b) Gradients exactly one update late, with and without error feedback, under seven optimizers.

use super::{SEEDS, Study, best_rate, cell, chosen_rate, closing, gap, heldout, scan, unique};
use crate::plot::{Across, Figure, Panel, Series, Shape};
use crate::rows::Rows;
use crate::setting::{ADAMW, Optimizer, Policy, Setting};
use std::fmt::Write;

/// An optimizer, the rates to choose from, and what the paper reports of it: the validation loss with delay 1, and with error
/// feedback, less that without delay.
struct Candidate {
    optimizer: Optimizer,
    rates: [f64; 3],
    paper: [&'static str; 2],
}

const fn candidate(name: &'static str, rates: [f64; 3], paper: [&'static str; 2]) -> Candidate {
    Candidate { optimizer: Optimizer { name, keys: "decay = 0.1" }, rates, paper }
}

const CANDIDATES: [Candidate; 7] = [
    Candidate { optimizer: ADAMW, rates: [1e-3, 3e-3, 1e-2], paper: ["+0.278", "+0.028"] },
    candidate("muon", [1e-3, 3e-3, 1e-2], ["+0.012", "+0.005"]),
    candidate("lion", [1e-4, 3e-4, 1e-3], ["robust", "-"]),
    candidate("adan", [1e-3, 3e-3, 1e-2], ["+0.010", "-"]),
    candidate("mars", [1e-3, 3e-3, 1e-2], ["degrades", "-"]),
    candidate("soap", [1e-3, 3e-3, 1e-2], ["+0.027", "+0.009"]),
    candidate("normuon", [1e-3, 3e-3, 1e-2], ["robust", "-"]),
];

/// Delay 1, without and with error feedback.
const LATE: [(Policy, &str); 2] =
    [(Policy::DoubleBuffer, "delay 1"), (Policy::DoubleBufferFeedback, "delay 1 + error feedback")];

/// Two ranks: the delay is one on every stage, and two cores have no more to do.
#[derive(Debug)]
pub struct Delay {
    pub updates: u64,
}

impl Delay {
    fn setting(&self, policy: Policy, candidate: &Candidate) -> Setting {
        Setting {
            policy,
            optimizer: candidate.optimizer,
            rate: candidate.rates[0],
            ranks: 2,
            accumulate: 8,
            updates: self.updates,
            seed: SEEDS[0],
        }
    }

    /// The rate chosen without delay.
    fn rate(&self, rows: &Rows, candidate: &Candidate) -> Option<f64> {
        best_rate(rows, self.setting(Policy::Flush, candidate), &candidate.rates)
    }

    /// A policy at the rate chosen without delay, and at its own best.
    fn chosen(&self, rows: &Rows, policy: Policy, candidate: &Candidate) -> [Option<Setting>; 2] {
        let setting = self.setting(policy, candidate);
        let rates = [self.rate(rows, candidate), best_rate(rows, setting, &candidate.rates)];
        rates.map(|rate| Some(setting.with_rate(rate?)))
    }
}

impl Study for Delay {
    fn name(&self) -> &'static str {
        "delay"
    }

    fn wanted(&self, rows: &Rows) -> Vec<Setting> {
        let policies = [Policy::Flush, Policy::DoubleBuffer, Policy::DoubleBufferFeedback];
        let mut runs = Vec::new();
        for candidate in &CANDIDATES {
            for policy in policies {
                runs.extend(scan(self.setting(policy, candidate), &candidate.rates));
            }
            let chosen: Vec<_> = policies.iter().flat_map(|&p| self.chosen(rows, p, candidate)).flatten().collect();
            for seed in SEEDS {
                runs.extend(chosen.iter().map(|run| run.with_seed(seed)));
            }
        }
        unique(runs)
    }

    fn figure(&self, rows: &Rows) -> Figure {
        let panels = [(0, "At the rate that is best without delay"), (1, "At each variant's own best rate")];
        Figure {
            title: "What gradients cost that are one update late".to_owned(),
            panels: panels.map(|(which, title)| self.panel(rows, which, title)).to_vec(),
        }
    }

    fn page(&self, rows: &Rows) -> String {
        let mut text = format!(
            "Two stages, 16 sequences (1024 tokens) per update, {} updates. Delay 1 is `weights = double_buffer`: forward and \
             backward passes read the weights of one update before, so every gradient is exactly one update late. Of three rates, that with the \
             lowest held-out loss is taken without delay, and each delayed variant is also given its own best (rates are compared with seed 1). \
             Differences are to the run without delay at its best rate, with the same seed.\n\n",
            self.updates
        );
        text += "| optimizer | rate | delay 0 | delay 1 | + error feedback | delay 1, own rate | + error feedback, own rate | paper: delay 1 | + error feedback |\n\
                 |---|---|---|---|---|---|---|---|---|\n";
        CANDIDATES.iter().for_each(|candidate| text += &self.line(rows, candidate));
        text += "\nLosses are held-out, in nats a token with 95 % intervals over three seeds. The paper's are validation losses of a 360M model.\n";
        text + &self.rates(rows) + &closing(self, rows)
    }
}

impl Delay {
    fn line(&self, rows: &Rows, candidate: &Candidate) -> String {
        let name = candidate.optimizer.name;
        let base = self.setting(Policy::Flush, candidate);
        let paper = candidate.paper.join(" | ");
        let Some(rate) = self.rate(rows, candidate) else {
            let why = cell(rows, base, None, false);
            return format!("| {name} | | {why} | | | | | {paper} |\n");
        };
        let base = base.with_rate(rate);
        let mut cells = vec![cell(rows, base, heldout(rows, base), false)];
        for which in [0, 1] {
            for (policy, _) in LATE {
                let run = self.chosen(rows, policy, candidate)[which];
                // Without a best rate of its own: the first one's outcome says why.
                let run_or_first = run.unwrap_or(self.setting(policy, candidate));
                let text = cell(rows, run_or_first, run.and_then(|run| gap(rows, run, base)), true);
                let own = run.filter(|run| which == 1 && run.rate != rate);
                cells.push(text + &own.map_or_else(String::new, |run| format!(" at {:e}", run.rate)));
            }
        }
        format!("| {name} | {} | {} | {paper} |\n", chosen_rate(rate, &candidate.rates), cells.join(" | "))
    }

    /// All rates that were tried, with seed 1.
    fn rates(&self, rows: &Rows) -> String {
        let mut text = "\nHeld-out loss by rate, seed 1:\n\n| optimizer | rate | delay 0 | delay 1 | + error feedback |\n|---|---|---|---|---|\n".to_owned();
        for candidate in &CANDIDATES {
            for rate in candidate.rates {
                let losses = [Policy::Flush, Policy::DoubleBuffer, Policy::DoubleBufferFeedback].map(|policy| {
                    let run = self.setting(policy, candidate).with_rate(rate);
                    let loss = rows.trained(&run).and_then(|row| row.heldout_loss);
                    loss.map_or_else(|| cell(rows, run, None, false), |loss| format!("{loss:.4}"))
                });
                let _ = writeln!(text, "| {} | {rate:e} | {} |", candidate.optimizer.name, losses.join(" | "));
            }
        }
        text
    }

    fn panel(&self, rows: &Rows, which: usize, title: &str) -> Panel {
        let series = LATE.map(|(policy, name)| {
            let points = CANDIDATES.iter().enumerate().filter_map(|(n, candidate)| {
                let base = self.setting(Policy::Flush, candidate).with_rate(self.rate(rows, candidate)?);
                Some((n as f64, gap(rows, self.chosen(rows, policy, candidate)[which]?, base)?))
            });
            Series { name: name.to_owned(), points: points.collect(), shape: Shape::Dots }
        });
        Panel {
            title: title.to_owned(),
            x: Across::Names("optimizer".to_owned(), CANDIDATES.iter().map(|c| c.optimizer.name.to_owned()).collect()),
            y: "loss less that without delay, nats a token".to_owned(),
            y_limit: Some(1.0),
            series: series.to_vec(),
        }
    }
}
