//! What `compare` finds out about schedules and prints: a table for people, JSON for programs (docs/compare.md).

use crate::driver::Analysed;
use crate::report::{bytes, microbatches, percent};
use dsl::diag::Diagnostic;
use dsl::spec::Spec;
use serde::Serialize;
use std::fmt::Write;

/// How a schedule stands to the spec's bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// Within all of them.
    Fits,
    /// Sound, but a bound is exceeded.
    Exceeds,
    /// Not possible on this spec: no figures.
    Refused,
}

/// The worst of all ranks and stages under one schedule.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Figures {
    /// 1 - work/period in steady state, 0..1.
    pub bubble: f64,
    /// Without a model no memory is counted.
    pub memory_bytes: Option<u64>,
    pub in_flight_max: u32,
    pub drift_max: u64,
    pub delay_max: u64,
    /// In steady state.
    pub us_per_microbatch: f64,
}

impl Figures {
    /// None without a sound plan.
    pub fn new(analysed: &Analysed) -> Option<Figures> {
        let facts = &analysed.facts;
        let step = microbatches(analysed).max(1);
        Some(Figures {
            bubble: facts.ranks.iter().map(|r| r.bubble).max_by(f64::total_cmp)?,
            memory_bytes: analysed.memory().and_then(|memory| memory.iter().map(|m| m.total).max()),
            in_flight_max: facts.ranks.iter().map(|r| r.in_flight_max).max()?,
            drift_max: facts.stages.iter().map(|s| s.drift.max).max()?,
            delay_max: facts.stages.iter().map(|s| s.delay.max).max()?,
            us_per_microbatch: facts.period_ns as f64 / 1000.0 / f64::from(step),
        })
    }
}

/// One schedule on the spec.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    schedule: String,
    /// Whether it is the one that the file names.
    given: bool,
    verdict: Verdict,
    #[serde(flatten)]
    figures: Option<Figures>,
    /// Code and sentence of the first error.
    code: Option<&'static str>,
    reason: Option<String>,
}

impl Row {
    pub fn new(schedule: &str, given: bool, analysed: Option<&Analysed>, found: &[Diagnostic]) -> Row {
        let figures = analysed.and_then(Figures::new);
        let error = found.iter().find(|d| d.is_error());
        let verdict = match (&figures, error) {
            (Some(_), None) => Verdict::Fits,
            (Some(_), Some(_)) => Verdict::Exceeds,
            (None, _) => Verdict::Refused,
        };
        let (code, reason) = error.map(|d| (d.code, d.message.clone())).unzip();
        Row { schedule: schedule.to_owned(), given, verdict, figures, code, reason }
    }

    pub fn fits(&self) -> bool {
        self.verdict == Verdict::Fits
    }

    /// Bubbles that print alike count as equal, so that memory decides between them.
    fn rank(&self) -> (Verdict, u64, u64, u32) {
        self.figures.as_ref().map_or((self.verdict, 0, 0, 0), |f| {
            (self.verdict, (f.bubble * 1e4).round() as u64, f.memory_bytes.unwrap_or(0), f.in_flight_max)
        })
    }
}

/// Those within the bounds first, then by bubble, memory (micro-batches in flight where no memory is counted), and the
/// library's order.
pub fn sort(rows: &mut [Row]) {
    rows.sort_by_key(Row::rank);
}

/// The table for people.
pub fn text(name: &str, spec: &Spec, rows: &[Row]) -> String {
    let mut out = String::new();
    let (ranks, accumulate) = (spec.machine.ranks.value, spec.pipeline.accumulate.value);
    let _ = writeln!(out, "{name}: {} schedules on {ranks} ranks, {accumulate} micro-batches an update", rows.len());
    let width = rows.iter().map(|r| r.schedule.len()).max().unwrap_or(0).max("schedule".len()) + 2;
    for (verdict, title) in [
        (Verdict::Fits, "within the bounds"),
        (Verdict::Exceeds, "beyond a bound"),
        (Verdict::Refused, "not possible here"),
    ] {
        let mut of = rows.iter().filter(|r| r.verdict == verdict).peekable();
        if of.peek().is_none() {
            continue;
        }
        let _ = writeln!(out, "\n{title}:");
        if verdict != Verdict::Refused {
            let _ = writeln!(
                out,
                "  {:width$}   bubble      memory  in flight  drift  delay  time/micro-batch",
                "schedule"
            );
        }
        of.for_each(|row| line(&mut out, row, width));
    }
    if rows.iter().any(|r| r.given) {
        out.push_str("\n* the file's schedule; bubble, memory, drift and delay are those of the worst rank or stage\n");
    }
    out
}

fn line(out: &mut String, row: &Row, width: usize) {
    let name = format!("{}{}", row.schedule, if row.given { " *" } else { "" });
    match &row.figures {
        Some(f) => {
            let _ = writeln!(
                out,
                "  {name:width$}  {:>7}  {:>10}  {:>9}  {:>5}  {:>5}  {:>16}",
                percent(f.bubble),
                f.memory_bytes.map_or_else(|| "-".to_owned(), bytes),
                f.in_flight_max,
                f.drift_max,
                f.delay_max,
                format!("{:.1} us", f.us_per_microbatch),
            );
        }
        None => _ = writeln!(out, "  {name}"),
    }
    if let (Some(code), Some(reason)) = (row.code, &row.reason) {
        let _ = writeln!(out, "      {code}: {reason}");
    }
}

#[derive(Serialize)]
struct Json<'a> {
    file: &'a str,
    ranks: u32,
    accumulate: u32,
    schedules: &'a [Row],
}

/// The same for programs.
pub fn json(name: &str, spec: &Spec, rows: &[Row]) -> String {
    let (ranks, accumulate) = (spec.machine.ranks.value, spec.pipeline.accumulate.value);
    let json = Json { file: name, ranks, accumulate, schedules: rows };
    serde_json::to_string_pretty(&json).expect("the comparison has string keys and finite numbers")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(schedule: &str, verdict: Verdict, bubble: f64, memory: u64) -> Row {
        let figures = Figures {
            bubble,
            memory_bytes: Some(memory),
            in_flight_max: 1,
            drift_max: 0,
            delay_max: 0,
            us_per_microbatch: 1.0,
        };
        let figures = (verdict != Verdict::Refused).then_some(figures);
        Row { schedule: schedule.into(), given: false, verdict, figures, code: None, reason: None }
    }

    #[test]
    fn fitting_schedules_come_first_then_by_bubble_then_by_memory() {
        let mut rows = vec![
            row("none", Verdict::Refused, 0.0, 0),
            row("beyond", Verdict::Exceeds, 0.0, 1),
            row("wide", Verdict::Fits, 0.1, 2),
            row("large", Verdict::Fits, 0.05, 9),
            row("small", Verdict::Fits, 0.05 + 1e-9, 8),
        ];
        sort(&mut rows);
        let names: Vec<&str> = rows.iter().map(|r| r.schedule.as_str()).collect();
        assert_eq!(names, ["small", "large", "wide", "beyond", "none"]);
    }
}
