//! `paceline import x.csv`: the report of `check` for a table of actions.

use crate::cli::{Format, Import};
use crate::driver::{self, Analysed};
use crate::failure::Failure;
use crate::render::Source;
use crate::{output, render, report, table};
use dsl::diag::Diagnostic;

pub fn run(args: &Import) -> Result<(), Failure> {
    let target = driver::cpu_class(args.cpu.as_deref())?.into();
    let (source, imported, mut found) = table::read(&args.table, args.dialect)?;
    let Some(imported) = imported else { return report(args, &source, &found, None) };
    let Some(file) = &args.spec else {
        let analysed = imported.analyse_alone(target, &mut found);
        return report(args, &source, &found, analysed.as_ref());
    };
    // What is said about the table has its places in the table: the report's are in the spec.
    render::print(&source, &found);
    let source = driver::read_file(file)?;
    let sets: Vec<dsl::Set> = args.sets.iter().cloned().map(dsl::Set).collect();
    let (spec, mut found) = dsl::load(&source.text, &sets);
    let profile = match &spec {
        Some(spec) => driver::profile(spec, file)?,
        None => None,
    };
    let analysed = spec.and_then(|spec| imported.analyse(spec, profile.as_deref(), target, &mut found));
    report(args, &source, &found, analysed.as_ref())
}

/// Prints what was found in `source`, and the facts.
fn report(args: &Import, source: &Source, found: &[Diagnostic], analysed: Option<&Analysed>) -> Result<(), Failure> {
    match args.format {
        Format::Json => output::write(&(report::json(source, found, analysed, None) + "\n"))?,
        Format::Text => {
            render::print(source, found);
            if let Some(analysed) = analysed {
                output::write(&report::text(source, analysed))?;
            }
        }
    }
    driver::refuse_on_error(found)
}
