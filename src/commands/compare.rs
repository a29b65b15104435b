//! `paceline compare FILE`: every library schedule on one spec, the best that fits first.

use crate::cli::{Compare, Format};
use crate::comparison::{self, Row};
use crate::driver;
use crate::failure::Failure;
use crate::{output, render, search};

pub fn run(args: &Compare) -> Result<(), Failure> {
    let source = driver::read(&args.spec)?;
    let (spec, found) = dsl::load(&source.text, &driver::sets(&args.spec));
    render::print(&source, &found);
    let Some(spec) = spec else { return Err(Failure::Refused) };
    let given = spec.schedule.name.as_str();
    // A schedule that the file defines stands beside the library's.
    let library = dsl::library::names();
    let own = (!library.contains(&given)).then_some(given);
    let searched = spec.pipeline.search.as_ref();
    let mut rows = Vec::new();
    for name in own.into_iter().chain(library) {
        // As `check` with this override: what a schedule asks of a spec is checked for each.
        let mut with = args.spec.with_schedule(name, &spec);
        with.cost_of_ranks = searched.is_some();
        let as_given = searched.is_some() && own == Some(name);
        let (analysed, mut found) = driver::analyse(&source, if as_given { &args.spec } else { &with })?;
        let limited = searched.filter(|_| !as_given).zip(analysed.as_ref());
        found.extend(limited.and_then(|(search, analysed)| search::exceeded(&spec, search, analysed)));
        rows.push(Row::new(name, name == given, analysed.as_ref(), &found));
    }
    comparison::sort(&mut rows);
    match args.format {
        Format::Text => output::write(&comparison::text(&source.name, &spec, &rows))?,
        Format::Json => output::write(&(comparison::json(&source.name, &spec, &rows) + "\n"))?,
    }
    if rows.iter().any(Row::fits) { Ok(()) } else { Err(Failure::Refused) }
}
