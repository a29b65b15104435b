//! How a subcommand ends when it does not succeed, and the exit status that says so.

use crate::output;
use std::fmt::Display;
use std::path::Path;
use std::process::ExitCode;

/// Exit status 1, 2 or 3; 0 is success.
#[derive(Debug)]
pub enum Failure {
    /// The spec is refused; the diagnostics are already printed. Status 1.
    Refused,
    /// The command line makes no sense. Status 2.
    Usage(String),
    /// Something outside the spec failed: a file, a device, a peer. Status 3.
    Outside(String),
}

impl Failure {
    /// A file that can't be read or written.
    pub fn file(verb: &str, path: &Path, error: impl Display) -> Self {
        Failure::Outside(format!("cannot {verb} {}: {error}", path.display()))
    }

    /// One line on standard error (nothing for [`Failure::Refused`]).
    pub fn print(&self) {
        match self {
            Failure::Refused => {}
            Failure::Usage(text) | Failure::Outside(text) => output::say(&format!("error: {text}")),
        }
    }

    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            Failure::Refused => 1,
            Failure::Usage(_) => 2,
            Failure::Outside(_) => 3,
        })
    }
}
