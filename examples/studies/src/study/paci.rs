//! (a) PACI against flush on eight ranks: the same loss, sooner?

use super::{ADAMW_RATES, SEEDS, Study, baseline, best_rate, cell, chosen_rate, closing, gap, heldout, scan, unique};
use crate::plot::{Across, Figure, Panel, Series, Shape};
use crate::rows::Rows;
use crate::setting::{Policy, Setting};
use crate::stats::{Estimate, last, share_to, smoothed};
use std::fmt::Write;

const ACCUMULATES: [u32; 4] = [2, 4, 8, 16];

/// Sequences per update fixed, K micro-batches of fewer sequences each.
#[derive(Debug)]
pub struct Paci {
    pub updates: u64,
}

impl Paci {
    /// The rate chosen on the synchronous baseline.
    fn rate(&self, rows: &Rows) -> Option<f64> {
        best_rate(rows, baseline(self.updates), &ADAMW_RATES)
    }

    /// PACI at the rate that is best for it.
    fn own(&self, rows: &Rows, accumulate: u32) -> Option<Setting> {
        let setting = self.setting(ADAMW_RATES[0], Policy::Paci, accumulate);
        Some(setting.with_rate(best_rate(rows, setting, &ADAMW_RATES)?))
    }

    fn setting(&self, rate: f64, policy: Policy, accumulate: u32) -> Setting {
        Setting { policy, accumulate, rate, ..baseline(self.updates) }
    }

    /// The flush whose losses stand for all K: they are sums of the same terms in another order.
    fn flush(&self, rate: f64) -> Setting {
        baseline(self.updates).with_rate(rate)
    }
}

impl Study for Paci {
    fn name(&self) -> &'static str {
        "paci"
    }

    fn wanted(&self, rows: &Rows) -> Vec<Setting> {
        let mut runs: Vec<_> = scan(baseline(self.updates), &ADAMW_RATES).collect();
        let Some(best) = self.rate(rows) else { return runs };
        runs.extend(ACCUMULATES.map(|k| self.setting(best, Policy::Flush, k)));
        for rate in ADAMW_RATES {
            for seed in SEEDS {
                runs.push(self.flush(rate).with_seed(seed));
                runs.extend(ACCUMULATES.map(|k| self.setting(rate, Policy::Paci, k).with_seed(seed)));
            }
        }
        unique(runs)
    }

    fn figure(&self, rows: &Rows) -> Figure {
        let title = "PACI against flush: eight stages, 16 sequences per update".to_owned();
        let Some(rate) = self.rate(rows) else { return Figure { title, panels: Vec::new() } };
        let panels = vec![self.losses(rows, rate), self.curves(rows, rate)];
        Figure { title, panels }
    }

    fn page(&self, rows: &Rows) -> String {
        let mut text = format!(
            "Eight stages, 16 sequences (1024 tokens) per update in K micro-batches, {} updates of AdamW. The rate is the best \
             of three on the synchronous baseline. PACI is `async_1f1b` with `weights = current`, flush is `one_f_one_b`.\n",
            self.updates
        );
        let Some(rate) = self.rate(rows) else { return text + &closing(self, rows) };
        for run in scan(baseline(self.updates), &ADAMW_RATES) {
            let estimate = rows.trained(&run).and_then(|row| Estimate::of(&[row.heldout_loss?]));
            let chosen = if run.rate == rate { ", chosen" } else { "" };
            let _ = write!(text, "\n* rate {:e}: held-out loss {}{chosen}", run.rate, cell(rows, run, estimate, false));
        }
        let flush = self.flush(rate);
        let _ = writeln!(
            text,
            "\n\nHeld-out loss of flush, K = 8: {}. In other K its losses are sums of the same terms in another order; seed 1 \
             gives {}.",
            cell(rows, flush, heldout(rows, flush), false),
            self.flush_losses(rows, rate)
        );
        text += "\n| K | drift | mean delay | held-out loss | less flush | training loss less flush | ms/update, flush | PACI | ratio | ceiling | same loss |\n\
                 |---|---|---|---|---|---|---|---|---|---|---|\n";
        ACCUMULATES.iter().for_each(|&k| text += &self.line(rows, rate, k));
        text += "\nLosses are nats a token with 95 % intervals over three seeds; \"less flush\" is the mean of differences between runs \
                 with the same seed, which share initial weights and data. *ms/update* are the compiled schedules' times in steady \
                 state, with a core for every rank, from the model's arithmetic work; *ratio* is theirs, *ceiling* is \
                 (K + P - 1)/K, and the difference between them is the imbalance of the stages: the last one holds the head. \
                 *same loss* is flush's time over PACI's, above 1 where PACI is sooner, until the running mean of the training loss (over a \
                 tenth of the run) reaches the higher of the two final values.\n";
        text += &self.by_rate(rows, rate);
        text += &self.against_paper(rows, rate);
        text + &closing(self, rows)
    }
}

impl Paci {
    fn line(&self, rows: &Rows, rate: f64, k: u32) -> String {
        let (paci, flush) = (self.setting(rate, Policy::Paci, k), self.setting(rate, Policy::Flush, k));
        let losses = [
            cell(rows, paci, heldout(rows, paci), false),
            cell(rows, paci, gap(rows, paci, self.flush(rate)), true),
            cell(rows, paci, training_gap(rows, paci, self.flush(rate)), true),
        ];
        let ceiling = f64::from(k + paci.ranks - 1) / f64::from(k);
        let (Some(a), Some(s)) = (rows.trained(&paci), rows.trained(&flush)) else {
            return format!("| {k} | | | {} | | | {ceiling:.2} | |\n", losses.join(" | "));
        };
        let same = text(self.speedup(rows, paci, flush), 2, false);
        format!(
            "| {k} | {} | {:.2} | {} | {:.2} | {:.2} | {:.2} | {ceiling:.2} | {same} |\n",
            a.drift_max,
            a.delay_mean,
            losses.join(" | "),
            s.steady_us / 1e3,
            a.steady_us / 1e3,
            s.steady_us / a.steady_us
        )
    }

    fn flush_losses(&self, rows: &Rows, rate: f64) -> String {
        let losses = ACCUMULATES.map(|k| {
            let row = rows.trained(&self.setting(rate, Policy::Flush, k));
            let loss = row.and_then(|row| row.heldout_loss).map_or_else(|| "-".to_owned(), |loss| format!("{loss:.4}"));
            format!("{loss} (K = {k})")
        });
        losses.join(", ")
    }

    /// Each rate by itself, then PACI at its own best.
    fn by_rate(&self, rows: &Rows, best: f64) -> String {
        let mut page = "\nHeld-out loss by rate, PACI less flush at the same rate:\n\n| rate | flush |".to_owned();
        ACCUMULATES.iter().for_each(|k| page += &format!(" PACI, K = {k} |"));
        page += "\n|---|---|---|---|---|---|\n";
        for rate in ADAMW_RATES {
            let flush = self.flush(rate);
            let gaps = ACCUMULATES.map(|k| {
                let paci = self.setting(rate, Policy::Paci, k);
                cell(rows, paci, gap(rows, paci, flush), true)
            });
            let loss = cell(rows, flush, heldout(rows, flush), false);
            let _ = writeln!(page, "| {rate:e} | {loss} | {} |", gaps.join(" | "));
        }
        page += "\nPACI at the rate that is best for it (by seed 1), against flush at the one that is best for flush:\n\n\
                 | K | rate | held-out loss | less flush | training loss less flush | same loss |\n|---|---|---|---|---|---|\n";
        for k in ACCUMULATES {
            let Some(paci) = self.own(rows, k) else { continue };
            let _ = writeln!(
                page,
                "| {k} | {} | {} | {} | {} | {} |",
                chosen_rate(paci.rate, &ADAMW_RATES),
                cell(rows, paci, heldout(rows, paci), false),
                cell(rows, paci, gap(rows, paci, self.flush(best)), true),
                cell(rows, paci, training_gap(rows, paci, self.flush(best)), true),
                text(self.speedup(rows, paci, self.setting(best, Policy::Flush, k)), 2, false),
            );
        }
        page
    }

    /// Time of flush over that of PACI to the same training loss. Flush's losses are those of `K = 8` at its rate.
    fn speedup(&self, rows: &Rows, paci: Setting, flush: Setting) -> Option<Estimate> {
        let flush_us = rows.trained(&flush)?.steady_us;
        let ratios = SEEDS.into_iter().filter_map(|seed| {
            let paci = rows.trained(&paci.with_seed(seed))?;
            let (ours, theirs) = (paci.segments(), rows.trained(&self.flush(flush.rate).with_seed(seed))?.segments());
            let target = last(&ours)?.max(last(&theirs)?);
            let updates = self.updates as f64;
            // The first update also fills the pipeline.
            let ours_us = share_to(&ours, target)? * updates * paci.steady_us + paci.alone_us - paci.steady_us;
            Some(share_to(&theirs, target)? * updates * flush_us / ours_us)
        });
        Estimate::of(&ratios.collect::<Vec<_>>())
    }

    fn against_paper(&self, rows: &Rows, rate: f64) -> String {
        let paci = |k| self.setting(rate, Policy::Paci, k);
        let gap_at = |k| text(training_gap(rows, paci(k), self.flush(rate)), 4, true);
        let speed = |k| text(self.speedup(rows, paci(k), self.setting(rate, Policy::Flush, 16)), 2, false);
        format!(
            "\nBeside the paper (GPT-2 Medium, 8 stages, batch 128, flush with 16 micro-batches):\n\n\
             | | paper | here |\n|---|---|---|\n\
             | final training loss less flush, K = 4 | +0.008 | {} |\n\
             | final training loss less flush, K = 8 | -0.001 | {} |\n\
             | time to the same loss: flush with 16 micro-batches over PACI with 8 | 1.69 | {} |\n\
             | the same, PACI with 16 | | {} |\n\
             | ceiling (M + P - 1)/M, M = 16 | 1.44 | 1.44 |\n",
            gap_at(4),
            gap_at(8),
            speed(8),
            speed(16),
        )
    }

    fn losses(&self, rows: &Rows, rate: f64) -> Panel {
        let flush = heldout(rows, self.flush(rate));
        let place = |n: usize| n as f64;
        let of = |estimate: &dyn Fn(u32) -> Option<Estimate>| {
            ACCUMULATES.iter().enumerate().filter_map(|(n, &k)| Some((place(n), estimate(k)?))).collect()
        };
        let paci = of(&|k| heldout(rows, self.setting(rate, Policy::Paci, k)));
        Panel {
            title: "Final held-out loss at equal tokens".to_owned(),
            x: Across::Names("micro-batches per update, K".to_owned(), ACCUMULATES.map(|k| k.to_string()).to_vec()),
            y: "held-out loss, nats a token".to_owned(),
            y_limit: None,
            series: vec![
                Series { name: "flush, K = 8".to_owned(), points: of(&|_| flush), shape: Shape::DotsAndLine },
                Series { name: "PACI".to_owned(), points: paci, shape: Shape::DotsAndLine },
            ],
        }
    }

    fn curves(&self, rows: &Rows, rate: f64) -> Panel {
        let series = [(Policy::Flush, 8), (Policy::Flush, 16), (Policy::Paci, 8), (Policy::Paci, 16)];
        Panel {
            title: "Training loss over time, a core for every rank".to_owned(),
            x: Across::Linear("planned time, s".to_owned()),
            y: "training loss, nats a token (running mean)".to_owned(),
            y_limit: None,
            series: series.map(|(policy, k)| self.curve(rows, rate, policy, k)).to_vec(),
        }
    }

    /// Training loss over planned time from a fifth of the run on, over seeds.
    fn curve(&self, rows: &Rows, rate: f64, policy: Policy, k: u32) -> Series {
        let timed = self.setting(rate, policy, k);
        let setting = if policy == Policy::Flush { self.flush(rate) } else { timed };
        let curves: Vec<Vec<f64>> =
            SEEDS.iter().filter_map(|&seed| rows.trained(&setting.with_seed(seed))).map(|row| row.segments()).collect();
        let name = format!("{}, K = {k}", if policy == Policy::Flush { "flush" } else { "PACI" });
        let mut points = Vec::new();
        if let Some((row, first)) = rows.trained(&timed).zip(curves.first()) {
            let parts = first.len() as f64;
            let smooth: Vec<_> = curves.iter().map(|curve| smoothed(curve)).collect();
            for n in 0..smooth[0].len() {
                let (done, _) = smooth[0][n];
                let values: Vec<f64> = smooth.iter().filter_map(|curve| Some(curve.get(n)?.1)).collect();
                let seconds = done / parts * self.updates as f64 * row.steady_us / 1e6;
                points.extend(Estimate::of(&values).filter(|_| done / parts >= 0.2).map(|e| (seconds, e)));
            }
        }
        Series { name, points, shape: Shape::Band }
    }
}

/// Mean training loss of the last tenth, less that of another setting with the same seed.
fn training_gap(rows: &Rows, setting: Setting, from: Setting) -> Option<Estimate> {
    let gaps = SEEDS.into_iter().filter_map(|seed| {
        let row = rows.trained(&setting.with_seed(seed))?;
        Some(row.train_loss? - rows.trained(&from.with_seed(seed))?.train_loss?)
    });
    Estimate::of(&gaps.collect::<Vec<_>>())
}

fn text(estimate: Option<Estimate>, digits: usize, signed: bool) -> String {
    estimate.map_or_else(|| "-".to_owned(), |e| e.text(digits, signed))
}
