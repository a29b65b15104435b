//! `paceline compare FILE`: every library schedule on one spec, the best that fits first.

use crate::cli::{Compare, Format};
use crate::comparison::{self, Row};
use crate::driver;
use crate::failure::Failure;
use crate::{output, render};

pub fn run(args: &Compare) -> Result<(), Failure> {
    let source = driver::read(&args.spec)?;
    let cpu = driver::cpu_class(args.spec.cpu.as_deref())?;
    let (spec, found) = dsl::load(&source.text, &driver::sets(&args.spec));
    render::print(&source, &found);
    let Some(spec) = spec else { return Err(Failure::Refused) };
    // A schedule that the file defines stands beside the library's.
    let own = (!spec.schedule.library).then(|| spec.schedule.clone());
    let library = dsl::library::names().into_iter().filter_map(dsl::library::schedule);
    let mut rows: Vec<Row> = own
        .into_iter()
        .chain(library)
        .map(|schedule| {
            let given = schedule.name == spec.schedule.name && schedule.library == spec.schedule.library;
            let name = schedule.name.clone();
            let (analysed, found) = driver::analyse_with(&spec, schedule, cpu);
            Row::new(name, given, analysed.as_ref(), &found)
        })
        .collect();
    comparison::sort(&mut rows);
    match args.format {
        Format::Text => output::write(&comparison::text(&source.name, &spec, &rows))?,
        Format::Json => output::write(&(comparison::json(&source.name, &spec, &rows) + "\n"))?,
    }
    if rows.iter().any(Row::fits) { Ok(()) } else { Err(Failure::Refused) }
}
