//! Results: a CSV file for each study, a row for each run, written when the run ends.

use crate::setting::Setting;
use serde::{Deserialize, Serialize};
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It reached its last update.
    Trained,
    /// Its loss stopped being a finite number.
    Diverged,
    /// `check` refuses the spec, or doesn't know what it asks for; `reason` says why. Tried again each time.
    Unavailable,
}

/// A run and what it measured. Losses are in nats a token.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    pub policy: String,
    pub optimizer: String,
    /// Peak learning rate.
    pub rate: f64,
    pub ranks: u32,
    pub accumulate: u32,
    /// Sequences.
    pub microbatch: u32,
    pub updates: u64,
    pub seed: u64,
    pub outcome: Outcome,
    pub reason: String,
    pub tokens: u64,
    /// After the last update, over all held-out tokens.
    pub heldout_loss: Option<f64>,
    /// Mean training loss of the last tenth of the updates.
    pub train_loss: Option<f64>,
    /// Mean training losses of [`SEGMENTS`] equal parts of the run, in order, a space between them.
    pub curve: String,
    /// Largest over stages, proved and counted alike; in updates.
    pub drift_max: u64,
    pub delay_max: u64,
    /// Mean over stages of the proved mean delay, in updates.
    pub delay_mean: f64,
    /// Planned time of one update run alone, and of each further one in steady state, with a core for every rank.
    pub alone_us: f64,
    pub steady_us: f64,
    /// CPU time in kernels, all ranks together.
    pub busy_s: f64,
    pub elapsed_s: f64,
    pub overrides: String,
    /// Hash of the corpus.
    pub corpus: String,
    pub key: String,
}

/// Parts of a run in [`Row::curve`].
pub const SEGMENTS: usize = 60;

impl Row {
    /// The row of a run that measured nothing yet.
    pub fn of(setting: &Setting, corpus: &str, outcome: Outcome, reason: String) -> Row {
        Row {
            policy: setting.policy.name().to_owned(),
            optimizer: setting.optimizer.name.to_owned(),
            rate: setting.rate,
            ranks: setting.ranks,
            accumulate: setting.accumulate,
            microbatch: setting.microbatch(),
            updates: setting.updates,
            seed: setting.seed,
            outcome,
            reason,
            tokens: 0,
            heldout_loss: None,
            train_loss: None,
            curve: String::new(),
            drift_max: 0,
            delay_max: 0,
            delay_mean: 0.0,
            alone_us: 0.0,
            steady_us: 0.0,
            busy_s: 0.0,
            elapsed_s: 0.0,
            overrides: setting.overrides().join("; "),
            corpus: corpus.to_owned(),
            key: setting.key(corpus),
        }
    }

    /// Training losses by segment; empty when the run did not end.
    pub fn segments(&self) -> Vec<f64> {
        self.curve.split_whitespace().filter_map(|loss| loss.parse().ok()).collect()
    }
}

/// The rows of a study, and of others that may have made the same runs.
#[derive(Debug)]
pub struct Rows {
    file: PathBuf,
    own: Vec<Row>,
    others: Vec<Row>,
    /// Rows of runs on another text stay in the file and count for nothing.
    corpus: String,
}

impl Rows {
    /// Reads the results of the study `name` in `folder`. `corpus` is the hash of the text; without it, that of the last
    /// row is taken.
    ///
    /// # Errors
    /// A file that can't be read, or whose rows are not of this version; the text names it.
    pub fn open(folder: &Path, name: &str, corpus: Option<String>) -> Result<Rows, String> {
        let file = folder.join(format!("{name}.csv"));
        let mut own = if file.exists() { read(&file)? } else { Vec::new() };
        let corpus = corpus.or_else(|| own.last().map(|row| row.corpus.clone())).unwrap_or_default();
        own.retain(|row| row.outcome != Outcome::Unavailable);
        let mut others = Vec::new();
        for path in csv_files(folder)?.into_iter().filter(|path| *path != file) {
            others.extend(read(&path)?.into_iter().filter(|row| row.outcome != Outcome::Unavailable));
        }
        Ok(Rows { file, own, others, corpus })
    }

    pub fn corpus(&self) -> &str {
        &self.corpus
    }

    /// What is known about a run in this study.
    pub fn get(&self, setting: &Setting) -> Option<&Row> {
        let key = setting.key(&self.corpus);
        self.own.iter().find(|row| row.key == key)
    }

    /// The row of a run that reached its end.
    pub fn trained(&self, setting: &Setting) -> Option<&Row> {
        self.get(setting).filter(|row| row.outcome == Outcome::Trained)
    }

    /// The row of the same run in another study's file.
    pub fn elsewhere(&self, setting: &Setting) -> Option<&Row> {
        let key = setting.key(&self.corpus);
        self.others.iter().find(|row| row.key == key)
    }

    /// Tokens that the study's runs trained on, and the seconds that they took.
    pub fn totals(&self) -> (u64, f64) {
        let own = self.own.iter().filter(|row| row.corpus == self.corpus);
        own.fold((0, 0.0), |(tokens, seconds), row| (tokens + row.tokens, seconds + row.elapsed_s))
    }

    /// Keeps a row, in the file too.
    ///
    /// # Errors
    /// When the file can't be written.
    pub fn push(&mut self, row: Row) -> Result<(), String> {
        let failed = |e: &dyn std::fmt::Display| format!("cannot write {}: {e}", self.file.display());
        let new = fs::metadata(&self.file).map_or(true, |m| m.len() == 0);
        let mut writer = csv::WriterBuilder::new().has_headers(new).from_writer(Vec::new());
        writer.serialize(&row).map_err(|e| failed(&e))?;
        let bytes = writer.into_inner().map_err(|e| failed(&e))?;
        // One write, so that an interrupted study leaves whole rows.
        let mut file = OpenOptions::new().create(true).append(true).open(&self.file).map_err(|e| failed(&e))?;
        file.write_all(&bytes).map_err(|e| failed(&e))?;
        self.own.push(row);
        Ok(())
    }

    /// Writes the file again without the rows that are to be tried again, if it has any.
    ///
    /// # Errors
    /// When the file can't be written.
    pub fn forget_unavailable(&self) -> Result<(), String> {
        if !self.file.exists() || read(&self.file)?.len() == self.own.len() {
            return Ok(());
        }
        let failed = |e: &dyn std::fmt::Display| format!("cannot write {}: {e}", self.file.display());
        let next = self.file.with_extension("csv.new");
        let mut writer = csv::Writer::from_path(&next).map_err(|e| failed(&e))?;
        for row in &self.own {
            writer.serialize(row).map_err(|e| failed(&e))?;
        }
        writer.flush().map_err(|e| failed(&e))?;
        fs::rename(&next, &self.file).map_err(|e| failed(&e))
    }
}

fn read(file: &Path) -> Result<Vec<Row>, String> {
    let failed = |e: csv::Error| format!("cannot read {}: {e}", file.display());
    csv::Reader::from_path(file).map_err(failed)?.deserialize().collect::<Result<_, _>>().map_err(failed)
}

fn csv_files(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let failed = |e: std::io::Error| format!("cannot read {}: {e}", folder.display());
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.extension().is_some_and(|e| e == "csv") {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::setting::{ADAMW, Policy};

    fn setting(seed: u64) -> Setting {
        Setting { policy: Policy::Flush, optimizer: ADAMW, rate: 1e-3, ranks: 8, accumulate: 8, updates: 9, seed }
    }

    fn row(seed: u64, outcome: Outcome) -> Row {
        let reason = "P0211: \"x\", not supported".to_owned();
        Row { heldout_loss: Some(1.5), curve: "3.5 2.25".to_owned(), ..Row::of(&setting(seed), "c", outcome, reason) }
    }

    #[test]
    fn rows_survive_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let mut rows = Rows::open(folder.path(), "s", Some("c".to_owned())).unwrap();
        rows.push(row(1, Outcome::Trained)).unwrap();
        rows.push(row(2, Outcome::Diverged)).unwrap();
        let again = Rows::open(folder.path(), "s", None).unwrap();
        assert_eq!(again.corpus(), "c");
        assert_eq!(again.get(&setting(1)), Some(&row(1, Outcome::Trained)));
        assert_eq!(again.get(&setting(1)).unwrap().segments(), [3.5, 2.25]);
        assert!(again.get(&setting(2)).is_some() && again.trained(&setting(2)).is_none());
        assert!(again.get(&setting(3)).is_none());
        let other = Rows::open(folder.path(), "t", Some("c".to_owned())).unwrap();
        assert!(other.get(&setting(1)).is_none() && other.elsewhere(&setting(1)).is_some());
        let text = Rows::open(folder.path(), "s", Some("d".to_owned())).unwrap();
        assert!(text.get(&setting(1)).is_none(), "runs on another text are other runs");
    }

    #[test]
    fn what_was_unavailable_is_tried_again() {
        let folder = tempfile::tempdir().unwrap();
        let mut rows = Rows::open(folder.path(), "s", Some("c".to_owned())).unwrap();
        rows.push(row(1, Outcome::Unavailable)).unwrap();
        rows.push(row(2, Outcome::Trained)).unwrap();
        let again = Rows::open(folder.path(), "s", None).unwrap();
        assert!(again.get(&setting(1)).is_none());
        again.forget_unavailable().unwrap();
        assert_eq!(read(&folder.path().join("s.csv")).unwrap(), [row(2, Outcome::Trained)]);
    }
}
