//! `paceline import x.csv`: the report of `check` for a table of actions.

use crate::cli::{Dialect, Format, Import};
use crate::driver::{self, Analysed};
use crate::failure::Failure;
use crate::render::Source;
use crate::{output, render, report};
use dsl::diag::{Diagnostic, Span};
use dsl::spec::Spec;
use plan::table::{self, Table};

pub fn run(args: &Import) -> Result<(), Failure> {
    let source = driver::read_text(&args.table, ".csv")?;
    let cpu = driver::cpu_class(args.cpu.as_deref())?;
    let dialect = args.dialect.map(|dialect| match dialect {
        Dialect::New => table::Dialect::New,
        Dialect::Old => table::Dialect::Old,
    });
    let (table, mut found) = table::read(&source.text, dialect);
    let program = table.as_ref().and_then(|t| t.program().map_err(|wrong| found.extend(wrong)).ok());
    let (Some(table), Some(program)) = (table, program) else {
        return report(args, &source, &found, None);
    };
    let name = args.table.file_stem().map_or_else(|| "table".into(), |n| n.to_string_lossy().into_owned());
    let Some(file) = &args.spec else {
        let spec = bare_spec(&table, &name);
        let analysed = driver::analyse_program(spec, None, program, cpu, &mut found);
        return report(args, &source, &found, analysed.as_ref());
    };
    let spec_source = driver::read_file(file)?;
    let sets: Vec<dsl::Set> = args.sets.iter().cloned().map(dsl::Set).collect();
    let (spec, mut spec_found) = dsl::load(&spec_source.text, &sets);
    let spec = spec.filter(|spec| fits(spec, &table, &mut spec_found));
    let profile = match &spec {
        Some(spec) => driver::profile(spec, file)?,
        None => None,
    };
    let analysed = spec.and_then(|mut spec| {
        spec.schedule = table.schedule(&name);
        driver::analyse_program(spec, profile.as_deref(), program, cpu, &mut spec_found)
    });
    spec_found.iter_mut().for_each(solve_in_table);
    // What is said about the table has its places in the table: the report's are in the spec.
    render::print(&source, &found);
    report(args, &spec_source, &spec_found, analysed.as_ref())
}

/// Prints what was found in `source`, and the facts.
fn report(args: &Import, source: &Source, found: &[Diagnostic], analysed: Option<&Analysed>) -> Result<(), Failure> {
    match args.format {
        Format::Json => output::write(&(report::json(source, found, analysed) + "\n"))?,
        Format::Text => {
            render::print(source, found);
            if let Some(analysed) = analysed {
                output::write(&report::text(source, analysed))?;
            }
        }
    }
    driver::refuse_on_error(found)
}

/// A spec without model, costs and bounds for the table.
fn bare_spec(table: &Table, name: &str) -> Spec {
    // Any schedule and size that load; the table's own take their place.
    let text = "machine { ranks = 1 }\npipeline { schedule = gpipe, accumulate = 1 }\n";
    let mut spec = dsl::load(text, &[]).0.expect("the text above is a spec");
    spec.machine.ranks.value = table.rows.len() as u32;
    spec.pipeline.accumulate.value = table.accumulate();
    spec.schedule = table.schedule(name);
    spec
}

/// Whether the spec is about as many ranks and micro-batches as the table.
fn fits(spec: &Spec, table: &Table, found: &mut Vec<Diagnostic>) -> bool {
    let before = found.len();
    let mut compare = |what: &str, key: &str, in_spec: u32, in_table: u32, span: &Span| {
        if in_spec != in_table {
            let message = format!("the table has {in_table} {what}, the spec {in_spec}");
            let fault = Diagnostic::error("P0611", span.clone(), message);
            found.push(fault.help(format!("write `{key} = {in_table}`, or `--set` it")));
        }
    };
    let (ranks, accumulate) = (&spec.machine.ranks, &spec.pipeline.accumulate);
    compare("ranks", "ranks", ranks.value, table.rows.len() as u32, &ranks.span);
    compare("micro-batches an update", "accumulate", accumulate.value, table.accumulate(), &accumulate.span);
    found.len() == before
}

/// A bound that fails is solved for `accumulate` where a schedule is a program; a table is what it is.
fn solve_in_table(diagnostic: &mut Diagnostic) {
    if matches!(diagnostic.code, "P0311" | "P0312" | "P0313") {
        diagnostic.help = Some("change the order in the table, or the bound".into());
    }
}
