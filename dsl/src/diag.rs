//! Diagnostics: what every analysis returns beside its facts. Rendering is the command line's business.

use std::ops::Range;

/// Byte range in the source file.
pub type Span = Range<usize>;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// The spec is refused.
    Error,
    /// The spec is accepted, but probably not what was meant.
    Lint,
}

/// A remark at a place in the source, or in a library schedule's source when `library` names one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Label {
    pub span: Span,
    pub text: String,
    /// Name of the library schedule whose source `span` points into; none: the user's file.
    pub library: Option<String>,
}

/// One finding. `code` (e.g. `P0301`) names its page in docs/diagnostics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnostic {
    pub code: &'static str,
    pub severity: Severity,
    /// One sentence without a final stop: what is wrong.
    pub message: String,
    /// First the place of the fault, then what it conflicts with.
    pub labels: Vec<Label>,
    /// Facts that explain it (a counterexample, a cycle).
    pub notes: Vec<String>,
    /// What to do, with the solved value where there is one.
    pub help: Option<String>,
}

impl Diagnostic {
    pub fn error(code: &'static str, span: Span, message: impl Into<String>) -> Self {
        Self::new(code, Severity::Error, span, message)
    }

    pub fn lint(code: &'static str, span: Span, message: impl Into<String>) -> Self {
        Self::new(code, Severity::Lint, span, message)
    }

    fn new(code: &'static str, severity: Severity, span: Span, message: impl Into<String>) -> Self {
        let label = Label { span, text: String::new(), library: None };
        Self { code, severity, message: message.into(), labels: vec![label], notes: Vec::new(), help: None }
    }

    /// Text beside the first label.
    pub fn here(mut self, text: impl Into<String>) -> Self {
        self.labels[0].text = text.into();
        self
    }

    /// A second place.
    pub fn and_at(mut self, span: Span, text: impl Into<String>) -> Self {
        self.labels.push(Label { span, text: text.into(), library: None });
        self
    }

    pub fn note(mut self, text: impl Into<String>) -> Self {
        self.notes.push(text.into());
        self
    }

    pub fn help(mut self, text: impl Into<String>) -> Self {
        self.help = Some(text.into());
        self
    }

    pub fn is_error(&self) -> bool {
        self.severity == Severity::Error
    }
}
