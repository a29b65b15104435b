//! Runs the `paceline` command, and reads what it reports.

use crate::rows::{Outcome, Row, SEGMENTS};
use crate::setting::{Setting, TEMPLATE};
use serde_json::Value;
use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The text to train on and the text to evaluate on.
#[derive(Clone, Debug)]
pub struct Corpus {
    pub train: PathBuf,
    pub heldout: PathBuf,
    /// Of both files' bytes.
    pub hash: String,
}

impl Corpus {
    /// The folder that `scripts/corpus.sh` wrote.
    ///
    /// # Errors
    /// A file that can't be read.
    pub fn read(folder: &Path) -> Result<Corpus, String> {
        let (train, heldout) = (folder.join("train.txt"), folder.join("heldout.txt"));
        let mut hasher = blake3::Hasher::new();
        for path in [&train, &heldout] {
            let bytes = fs::read(path)
                .map_err(|e| format!("cannot read {}: {e}; scripts/corpus.sh makes the corpus", path.display()))?;
            hasher.update(&(bytes.len() as u64).to_le_bytes()).update(&bytes);
        }
        Ok(Corpus { train, heldout, hash: hasher.finalize().to_hex()[..16].to_owned() })
    }
}

/// The command, and the folder for what it writes.
#[derive(Debug)]
pub struct Paceline {
    program: PathBuf,
    scratch: PathBuf,
    /// Bundles that this process compiled; seeds share them.
    bundles: HashSet<String>,
}

/// What became of a run.
#[derive(Debug)]
pub enum Ended {
    Row(Box<Row>),
    /// Somebody stopped it before its end: it counts for nothing.
    Stopped,
}

/// What is proved and planned before a run.
#[derive(Clone, Debug, Default, PartialEq)]
struct Plan {
    drift_max: u64,
    delay_max: u64,
    delay_mean: f64,
    alone_us: f64,
    steady_us: f64,
}

impl Paceline {
    /// # Errors
    /// When `scratch` can't be written.
    pub fn new(program: PathBuf, scratch: &Path) -> Result<Paceline, String> {
        let template = scratch.join("gpt.pace");
        fs::create_dir_all(scratch)
            .and_then(|()| fs::write(&template, TEMPLATE))
            .map_err(|e| format!("cannot write {}: {e}", template.display()))?;
        Ok(Paceline { program, scratch: scratch.to_owned(), bundles: HashSet::new() })
    }

    /// Checks, compiles and trains. A refused spec and a diverged run are results.
    ///
    /// # Errors
    /// When the command fails in another way.
    pub fn run(&mut self, setting: &Setting, corpus: &Corpus) -> Result<Ended, String> {
        let plan = match self.check(setting)? {
            Ok(plan) => plan,
            Err(reason) => return Ok(unavailable(setting, corpus, reason)),
        };
        let bundle = match self.compile(setting)? {
            Ok(bundle) => bundle,
            Err(reason) => return Ok(unavailable(setting, corpus, reason)),
        };
        let metrics = self.scratch.join("metrics.jsonl");
        let mut command = self.command("run");
        command.arg(bundle).arg("--data").arg(&corpus.train).arg("--eval").arg(&corpus.heldout);
        command.arg("--metrics").arg(&metrics).args(["--seed", &setting.seed.to_string()]);
        let output = self.output(command)?;
        let mut row = Row::of(setting, &corpus.hash, Outcome::Trained, String::new());
        (row.drift_max, row.delay_max, row.delay_mean) = (plan.drift_max, plan.delay_max, plan.delay_mean);
        (row.alone_us, row.steady_us) = (plan.alone_us, plan.steady_us);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        let last = text.lines().last().unwrap_or_default();
        match output.status.code() {
            Some(0) => {
                let text = fs::read_to_string(&metrics).map_err(|e| format!("cannot read the metrics: {e}"))?;
                Ok(if measure(&mut row, &text)? { Ended::Row(Box::new(row)) } else { Ended::Stopped })
            }
            Some(3) if last.contains("training diverged") => {
                (row.outcome, row.reason) = (Outcome::Diverged, last.trim_start_matches("error: ").to_owned());
                Ok(Ended::Row(Box::new(row)))
            }
            None => Ok(Ended::Stopped),
            Some(status) => Err(format!("paceline run ended with {status}: {last}")),
        }
    }

    fn check(&self, setting: &Setting) -> Result<Result<Plan, String>, String> {
        let mut command = self.on_template("check", setting);
        command.args(["--format", "json"]);
        let output = self.output(command)?;
        let report: Value = serde_json::from_slice(&output.stdout).map_err(|e| {
            let said = String::from_utf8_lossy(&output.stderr);
            format!("paceline check reported no JSON: {e}; {}", said.lines().last().unwrap_or_default())
        })?;
        Ok(if report["ok"] == true { Ok(plan(&report, setting)?) } else { Err(reason(&report)) })
    }

    /// The folder of the setting's bundle, or why there is none.
    fn compile(&mut self, setting: &Setting) -> Result<Result<PathBuf, String>, String> {
        let name = setting.with_seed(0).key("");
        let folder = self.scratch.join(&name);
        if self.bundles.contains(&name) {
            return Ok(Ok(folder));
        }
        if folder.exists() {
            fs::remove_dir_all(&folder).map_err(|e| format!("cannot remove {}: {e}", folder.display()))?;
        }
        let mut command = self.on_template("compile", setting);
        command.arg("-o").arg(&folder);
        let output = self.output(command)?;
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        match output.status.code() {
            Some(0) => {
                self.bundles.insert(name);
                Ok(Ok(folder))
            }
            Some(1) => Ok(Err(headline(&text))),
            _ => Err(format!("paceline compile failed: {}", text.lines().last().unwrap_or_default())),
        }
    }

    fn command(&self, name: &str) -> Command {
        let mut command = Command::new(&self.program);
        command.arg(name);
        command
    }

    fn on_template(&self, name: &str, setting: &Setting) -> Command {
        let mut command = self.command(name);
        command.arg(self.scratch.join("gpt.pace"));
        setting.overrides().iter().for_each(|set| _ = command.arg("--set").arg(set));
        command
    }

    fn output(&self, mut command: Command) -> Result<Output, String> {
        command.output().map_err(|e| format!("cannot run {}: {e}", self.program.display()))
    }
}

fn unavailable(setting: &Setting, corpus: &Corpus, reason: String) -> Ended {
    Ended::Row(Box::new(Row::of(setting, &corpus.hash, Outcome::Unavailable, reason)))
}

/// The first error of a report of `check`.
fn reason(report: &Value) -> String {
    let errors = report["diagnostics"].as_array().into_iter().flatten();
    let first = errors.into_iter().find(|d| d["severity"] == "error");
    let text = |d: &Value| format!("{}: {}", d["code"].as_str().unwrap_or("?"), d["message"].as_str().unwrap_or("?"));
    first.map_or_else(|| "refused".to_owned(), text)
}

/// The same of diagnostics as text: `error[P0420]: …`.
fn headline(text: &str) -> String {
    let first = text.lines().find_map(|line| line.strip_prefix("error["));
    first.map_or_else(|| "refused".to_owned(), |line| line.replacen(']', "", 1))
}

fn plan(report: &Value, setting: &Setting) -> Result<Plan, String> {
    let number = |value: &Value, what: &str| value.as_f64().ok_or(format!("paceline check reported no {what}"));
    let period = &report["period"];
    let mut plan = Plan {
        alone_us: number(&report["makespan_us"], "makespan_us")?,
        steady_us: number(&period["us"], "period.us")? * f64::from(setting.accumulate)
            / number(&period["microbatches"], "period.microbatches")?,
        ..Plan::default()
    };
    let stages = report["stages"].as_array().map(Vec::as_slice).unwrap_or_default();
    for stage in stages {
        plan.drift_max = plan.drift_max.max(stage["drift"]["max"].as_u64().unwrap_or(0));
        plan.delay_max = plan.delay_max.max(stage["delay"]["max"].as_u64().unwrap_or(0));
        plan.delay_mean += number(&stage["delay"]["mean"], "delay.mean")? / stages.len() as f64;
    }
    Ok(plan)
}

/// Fills in what a run's metrics say; whether it reached its end.
fn measure(row: &mut Row, metrics: &str) -> Result<bool, String> {
    let mut losses = Vec::new();
    let mut summary = Value::Null;
    for line in metrics.lines() {
        let mut value: Value = serde_json::from_str(line).map_err(|e| format!("a line of metrics: {e}"))?;
        if let Some(loss) = value["loss"].as_f64() {
            losses.push(loss);
        }
        if value["summary"].is_object() {
            summary = value["summary"].take();
        }
    }
    if summary["stopped"] != false || losses.len() as u64 != row.updates {
        return Ok(false);
    }
    let round = |v: f64, digits: i32| (v * 10f64.powi(digits)).round() / 10f64.powi(digits);
    let mean = |part: &[f64]| part.iter().sum::<f64>() / part.len() as f64;
    row.tokens = summary["tokens"].as_u64().unwrap_or(0);
    row.heldout_loss = summary["eval_loss_last"].as_f64().map(|v| round(v, 6));
    row.train_loss = Some(round(mean(&losses[losses.len() - losses.len().div_ceil(10)..]), 6));
    row.curve = segments(&losses).map(|part| format!("{:.4}", mean(part))).collect::<Vec<_>>().join(" ");
    let ranks = summary["ranks"].as_array().into_iter().flatten();
    row.busy_s = round(ranks.filter_map(|rank| rank["busy_s"].as_f64()).sum(), 2);
    row.elapsed_s = round(summary["elapsed_s"].as_f64().unwrap_or(0.0), 2);
    for stage in summary["stages"].as_array().into_iter().flatten() {
        for (seen, proved) in [("drift_max_seen", "drift_max_proved"), ("delay_max_seen", "delay_max_proved")] {
            if stage[seen].as_u64() > stage[proved].as_u64() {
                return Err(format!("{seen} is {} where {} is proved", stage[seen], stage[proved]));
            }
        }
    }
    Ok(true)
}

/// At most [`SEGMENTS`] parts of equal length, but for rounding.
fn segments(losses: &[f64]) -> impl Iterator<Item = &[f64]> {
    let parts = SEGMENTS.min(losses.len());
    (0..parts).map(move |n| &losses[n * losses.len() / parts..(n + 1) * losses.len() / parts])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::setting::{ADAMW, Policy};

    const SETTING: Setting =
        Setting { policy: Policy::Paci, optimizer: ADAMW, rate: 1e-3, ranks: 2, accumulate: 8, updates: 3, seed: 1 };

    fn metrics(stopped: bool, seen: u64) -> String {
        let updates: String = (0..3).map(|u| format!("{{\"update\":{u},\"loss\":{}}}\n", 3.0 - f64::from(u))).collect();
        format!(
            "{{\"updates\":0,\"eval_loss\":5.0}}\n{updates}{{\"summary\":{{\"tokens\":3072,\"elapsed_s\":1.5,\
             \"eval_loss_last\":1.25,\"stopped\":{stopped},\"ranks\":[{{\"busy_s\":0.5}},{{\"busy_s\":0.25}}],\
             \"stages\":[{{\"drift_max_seen\":{seen},\"drift_max_proved\":1,\"delay_max_seen\":1,\"delay_max_proved\":1}}]}}}}\n"
        )
    }

    #[test]
    fn metrics_become_a_row() {
        let mut row = Row::of(&SETTING, "c", Outcome::Trained, String::new());
        assert!(measure(&mut row, &metrics(false, 1)).unwrap());
        assert_eq!((row.heldout_loss, row.train_loss, row.tokens), (Some(1.25), Some(1.0), 3072));
        assert_eq!(row.segments(), [3.0, 2.0, 1.0]);
        assert_eq!((row.busy_s, row.elapsed_s), (0.75, 1.5));
        assert!(!measure(&mut row, &metrics(true, 1)).unwrap(), "a stopped run is no result");
        assert!(measure(&mut row, &metrics(false, 2)).is_err(), "more drift than proved is no result");
    }

    #[test]
    fn a_report_becomes_a_plan() {
        let report = serde_json::json!({
            "ok": true, "makespan_us": 900.0, "period": { "microbatches": 4, "us": 200.0 },
            "stages": [
                { "drift": { "max": 1, "mean": 0.5 }, "delay": { "max": 2, "mean": 1.5 } },
                { "drift": { "max": 0, "mean": 0.0 }, "delay": { "max": 0, "mean": 0.0 } }
            ]
        });
        let expected = Plan { drift_max: 1, delay_max: 2, delay_mean: 0.75, alone_us: 900.0, steady_us: 400.0 };
        assert_eq!(plan(&report, &SETTING).unwrap(), expected);
        let refused = serde_json::json!({ "ok": false, "diagnostics": [
            { "code": "P0101", "severity": "lint", "message": "a lint" },
            { "code": "P0211", "severity": "error", "message": "not supported" }
        ] });
        assert_eq!(reason(&refused), "P0211: not supported");
        assert!(plan(&refused, &SETTING).is_err());
        assert_eq!(headline("warning\nerror[P0420]: `tied` is for analysis\n --> x"), "P0420: `tied` is for analysis");
    }

    #[test]
    fn segments_cover_everything() {
        let losses: Vec<f64> = (0..1501).map(f64::from).collect();
        let parts: Vec<_> = segments(&losses).collect();
        assert_eq!(parts.len(), SEGMENTS);
        assert_eq!(parts.concat(), losses);
    }
}
