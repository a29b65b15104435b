//! What can go wrong while code is generated. All of it is internal: a spec that passed the checks must compile.

use std::fmt;

/// A kernel (or image) that could not be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CodegenError {
    /// The kernel's name, or what was being made (`sched module`, `image of stage 3`).
    pub subject: String,
    /// The step that failed, e.g. `bufferise`.
    pub step: &'static str,
    /// MLIR's or LLVM's diagnostics, or our own sentence.
    pub message: String,
}

impl CodegenError {
    pub fn new(subject: impl Into<String>, step: &'static str, message: impl Into<String>) -> Self {
        Self { subject: subject.into(), step, message: message.into() }
    }
}

impl fmt::Display for CodegenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "code generation failed for `{}` at step `{}`: {}\nthis is a defect in Paceline, please report it with the .pace file",
            self.subject,
            self.step,
            self.message.trim_end()
        )
    }
}

impl std::error::Error for CodegenError {}
