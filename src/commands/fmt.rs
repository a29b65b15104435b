//! `paceline fmt FILE…`.

use crate::cli::Fmt;
use crate::failure::Failure;
use crate::render::Source;
use crate::{driver, output, render};
use std::io::Write;
use std::path::Path;

pub fn run(args: &Fmt) -> Result<(), Failure> {
    let mut refused = false;
    for file in &args.files {
        let source = driver::read_file(file)?;
        match dsl::fmt(&source.text) {
            Err(found) => {
                render::print(&source, &found);
                refused = true;
            }
            Ok(text) if text == source.text => {}
            Ok(_) if args.check => {
                output::write(&format!("{} is not in the canonical layout\n", source.name))?;
                refused = true;
            }
            Ok(text) => replace(file, &source, &text)?,
        }
    }
    if refused { Err(Failure::Refused) } else { Ok(()) }
}

/// Writes the text beside the file and renames it, so that the file is whole at any moment.
fn replace(file: &Path, source: &Source, text: &str) -> Result<(), Failure> {
    let failed = |e| Failure::file("write", file, e);
    // A link stays a link: what it points to is replaced.
    let file = file.canonicalize().map_err(failed)?;
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    let beside = file.with_file_name(format!(".{name}.{}.tmp", std::process::id()));
    let write = || {
        let mut out = std::fs::File::create_new(&beside)?;
        out.write_all(text.as_bytes())?;
        out.set_permissions(std::fs::metadata(&file)?.permissions())?;
        out.sync_all()?;
        std::fs::rename(&beside, &file)
    };
    write().map_err(|e| {
        // What is left of the attempt; the file itself is as it was.
        let _ = std::fs::remove_file(&beside);
        Failure::file("write", Path::new(&source.name), e)
    })
}
