//! Diagnostics drawn under their source lines.

use crate::output;
use annotate_snippets::{AnnotationKind, Group, Level, Renderer, Snippet};
use dsl::diag::{Diagnostic, Label, Severity};
use std::io::IsTerminal;

/// A source file: the name to show and its text.
#[derive(Clone, Debug)]
pub struct Source {
    pub name: String,
    pub text: String,
}

/// Most diagnostics that are printed; what follows so many is noise.
const SHOWN_MAX: usize = 12;

/// Prints diagnostics on standard error, in colour on a terminal.
pub fn print(source: &Source, diagnostics: &[Diagnostic]) {
    let styled = std::io::stderr().is_terminal();
    for diagnostic in diagnostics.iter().take(SHOWN_MAX) {
        output::say(&format!("{}\n", render(source, diagnostic, styled)));
    }
    if diagnostics.len() > SHOWN_MAX {
        output::say(&format!("… and {} more", diagnostics.len() - SHOWN_MAX));
    }
}

/// One diagnostic as text.
pub fn render(source: &Source, diagnostic: &Diagnostic, styled: bool) -> String {
    let level = match diagnostic.severity {
        Severity::Error => Level::ERROR,
        Severity::Lint => Level::WARNING.with_name("lint"),
    };
    let mut group = Group::with_title(level.primary_title(diagnostic.message.as_str()).id(diagnostic.code));
    for (index, label) in diagnostic.labels.iter().enumerate().filter(|_| !on_command_line(diagnostic)) {
        group = group.element(snippet(source, label, index == 0));
    }
    for note in &diagnostic.notes {
        group = group.element(Level::NOTE.message(note.as_str()));
    }
    let help = diagnostic.help.clone().unwrap_or_else(|| format!("`paceline explain {}` says more", diagnostic.code));
    group = group.element(Level::HELP.message(help));
    let renderer = if styled { Renderer::styled() } else { Renderer::plain() };
    renderer.render(&[group]).to_string()
}

/// Faults of a `--set` have no place in the file.
fn on_command_line(diagnostic: &Diagnostic) -> bool {
    matches!(diagnostic.code, "P0250" | "P0251")
}

fn snippet<'a>(source: &'a Source, label: &'a Label, primary: bool) -> Snippet<'a, annotate_snippets::Annotation<'a>> {
    let (path, text) = match &label.library {
        Some(name) => (format!("library schedule {name}"), dsl::library::source(name).unwrap_or_default()),
        None => (source.name.clone(), source.text.as_str()),
    };
    let kind = if primary { AnnotationKind::Primary } else { AnnotationKind::Context };
    let end = label.span.end.min(text.len());
    let span = label.span.start.min(end)..end;
    let annotation = kind.span(span);
    let annotation = if label.text.is_empty() { annotation } else { annotation.label(label.text.as_str()) };
    Snippet::source(text).path(path).annotation(annotation)
}

/// 1-based line and column (in characters) of a byte offset.
pub fn line_column(text: &str, offset: usize) -> (usize, usize) {
    let before = &text[..offset.min(text.len())];
    let line_start = before.rfind('\n').map_or(0, |at| at + 1);
    (before.matches('\n').count() + 1, before[line_start..].chars().count() + 1)
}
