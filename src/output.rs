//! Standard output and error. A reader that goes away (`| head`) ends the program quietly; a full disk is an error.

use crate::failure::Failure;
use std::io::{ErrorKind, Write};

/// Writes text to standard output.
pub fn write(text: &str) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() != ErrorKind::BrokenPipe => {
            Err(Failure::Outside(format!("cannot write to standard output: {e}")))
        }
        _ => Ok(()),
    }
}

/// Writes a line to standard error; when nobody can read it, nobody is told.
pub fn say(line: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}
