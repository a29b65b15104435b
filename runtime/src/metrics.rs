//! Metrics as JSON lines: an object per update, one per evaluation, and at the end `{"summary": …}`.

use crate::observe::{EvaluationRecord, Observer, Summary, UpdateRecord};
use serde::Serialize;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

/// Writes each record when it comes, a whole line at a time, so that the file can be followed.
#[derive(Debug)]
pub struct Metrics<W: Write> {
    out: W,
}

impl Metrics<BufWriter<File>> {
    /// Metrics into a new file (an old one of that name is replaced).
    ///
    /// # Errors
    /// When the file can't be made.
    pub fn create(path: &Path) -> io::Result<Self> {
        Ok(Metrics::new(BufWriter::new(File::create(path)?)))
    }
}

impl<W: Write> Metrics<W> {
    pub fn new(out: W) -> Self {
        Metrics { out }
    }

    fn line(&mut self, record: &impl Serialize) -> io::Result<()> {
        serde_json::to_writer(&mut self.out, record)?;
        self.out.write_all(b"\n")?;
        self.out.flush()
    }
}

#[derive(Serialize)]
struct LastLine<'a> {
    summary: &'a Summary,
}

impl<W: Write> Observer for Metrics<W> {
    fn update(&mut self, record: &UpdateRecord) -> io::Result<()> {
        self.line(record)
    }

    fn evaluation(&mut self, record: &EvaluationRecord) -> io::Result<()> {
        self.line(record)
    }

    fn finished(&mut self, summary: &Summary) -> io::Result<()> {
        self.line(&LastLine { summary })
    }
}
