//! `paceline check FILE`.

use crate::cli::{Check, Format};
use crate::driver;
use crate::failure::Failure;
use crate::{latency, output, render, report};

pub fn run(args: &Check) -> Result<(), Failure> {
    let source = driver::read(&args.spec)?;
    let (analysed, diagnostics) = driver::analyse(&source, &args.spec)?;
    let latency = match &analysed {
        Some(analysed) => latency::compare(&source, &args.spec, analysed)?,
        None => None,
    };
    match args.format {
        Format::Json => {
            output::write(&(report::json(&source, &diagnostics, analysed.as_ref(), latency) + "\n"))?;
        }
        Format::Text => {
            render::print(&source, &diagnostics);
            if let Some(analysed) = &analysed {
                output::write(&report::text(&source, analysed))?;
            }
            if let Some(latency) = latency {
                output::write(&format!("\n{}", latency.text()))?;
            }
        }
    }
    driver::refuse_on_error(&diagnostics)
}
