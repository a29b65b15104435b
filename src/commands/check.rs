//! `paceline check FILE`.

use crate::cli::{Check, Format};
use crate::driver;
use crate::failure::Failure;
use crate::{output, render, report};

pub fn run(args: &Check) -> Result<(), Failure> {
    let source = driver::read(&args.spec)?;
    let (analysed, diagnostics) = driver::analyse(&source, &args.spec)?;
    match args.format {
        Format::Json => output::write(&(report::json(&source, &diagnostics, analysed.as_ref()) + "\n"))?,
        Format::Text => {
            render::print(&source, &diagnostics);
            if let Some(analysed) = &analysed {
                output::write(&report::text(&source, analysed))?;
            }
        }
    }
    driver::refuse_on_error(&diagnostics)
}
