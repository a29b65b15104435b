//! A table of actions in the place of a spec's schedule.

use crate::cli::Dialect;
use crate::driver::{self, Analysed};
use crate::failure::Failure;
use crate::render::{self, Source};
use artifact::stream::{Policy, Program};
use artifact::verify::Proved;
use dsl::diag::{Diagnostic, Span};
use dsl::spec::Spec;
use model::target::Target;
use plan::Shape;
use plan::table::{self, Table};
use std::path::Path;

/// A table that is sound.
pub struct Imported {
    /// Of the file, for the report.
    name: String,
    table: Table,
    program: Program,
    proved: Proved,
}

/// Reads and plans a table. It is there unless a diagnostic is an error; all places are in the table.
pub fn read(file: &Path, dialect: Option<Dialect>) -> Result<(Source, Option<Imported>, Vec<Diagnostic>), Failure> {
    let source = driver::read_text(file, ".csv")?;
    let dialect = dialect.map(|dialect| match dialect {
        Dialect::New => table::Dialect::New,
        Dialect::Old => table::Dialect::Old,
    });
    let (table, mut found) = table::read(&source.text, dialect);
    let name = file.file_stem().map_or_else(|| "table".into(), |n| n.to_string_lossy().into_owned());
    let imported = table.and_then(|table| {
        let (program, proved) = table.proved(&Shape::new(1, 1)).map_err(|wrong| found.extend(wrong)).ok()?;
        Some(Imported { name, table, program, proved })
    });
    Ok((source, imported, found))
}

/// Reads a table, prints what is said about it, and goes on only when it is sound.
pub fn accepted(file: &Path, dialect: Option<Dialect>) -> Result<Imported, Failure> {
    let (source, imported, found) = read(file, dialect)?;
    render::print(&source, &found);
    imported.ok_or(Failure::Refused)
}

impl Imported {
    /// With model, costs and bounds of `spec`, whose schedule is not used; `profile` is the text of the one that it names.
    pub fn analyse(
        self,
        mut spec: Spec,
        profile: Option<&str>,
        target: Target,
        found: &mut Vec<Diagnostic>,
    ) -> Option<Analysed> {
        if !self.fits(&spec, found) {
            return None;
        }
        spec.schedule = self.table.schedule(&self.name);
        if let Some(fault) = dsl::recompute_of_split(&spec.schedule, &spec.pipeline.recompute) {
            found.push(fault);
            return None;
        }
        let shape = Shape::of(&spec);
        let exchanges = shape.tied || shape.global_norm;
        let read = if exchanges { self.table.proved(&shape) } else { Ok((self.program, self.proved)) };
        let kept = read.and_then(|(program, proved)| match shape.policy {
            Policy::Current => Ok((program, proved)),
            _ => plan::keep_proved(&spec.schedule, shape, program),
        });
        let kept = kept.map_err(|wrong| found.extend(wrong)).ok();
        let analysed = kept.and_then(|kept| driver::analyse_program(spec, shape, profile, kept, target, found));
        found.iter_mut().for_each(solve_in_table);
        analysed
    }

    /// Without a model, at equal costs.
    pub fn analyse_alone(self, target: Target, found: &mut Vec<Diagnostic>) -> Option<Analysed> {
        // Any schedule and size that load; the table's own take their place.
        let text = "machine { ranks = 1 }\npipeline { schedule = gpipe, accumulate = 1 }\n";
        let mut spec = dsl::load(text, &[]).0.expect("the text above is a spec");
        spec.machine.ranks.value = self.table.rows.len() as u32;
        spec.pipeline.accumulate.value = self.table.accumulate();
        self.analyse(spec, None, target, found)
    }

    /// Whether the spec is about as many ranks and micro-batches as the table.
    fn fits(&self, spec: &Spec, found: &mut Vec<Diagnostic>) -> bool {
        let before = found.len();
        let mut compare = |what: &str, key: &str, in_spec: u32, in_table: u32, span: &Span| {
            if in_spec != in_table {
                let message = format!("the table has {in_table} {what}, the spec {in_spec}");
                let fault = Diagnostic::error("P0611", span.clone(), message);
                found.push(fault.help(format!("write `{key} = {in_table}`, or `--set` it")));
            }
        };
        let (ranks, accumulate) = (&spec.machine.ranks, &spec.pipeline.accumulate);
        compare("ranks", "ranks", ranks.value, self.table.rows.len() as u32, &ranks.span);
        let in_table = self.table.accumulate();
        compare("micro-batches an update", "accumulate", accumulate.value, in_table, &accumulate.span);
        found.len() == before
    }
}

/// A bound that fails is solved for `accumulate` where a schedule is a program; a table is what it is.
fn solve_in_table(diagnostic: &mut Diagnostic) {
    if matches!(diagnostic.code, "P0311" | "P0312" | "P0313") {
        diagnostic.help = Some("change the order in the table, or the bound".into());
    }
}
