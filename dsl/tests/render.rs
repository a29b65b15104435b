//! Diagnostics as plain text under the source that they are about.

use dsl::diag::{Diagnostic, Severity};

/// `line:column` of a byte, both from 1; columns count characters.
pub fn position(text: &str, at: usize) -> (usize, usize) {
    let before = &text[..at];
    let line_start = before.rfind('\n').map_or(0, |n| n + 1);
    (before.matches('\n').count() + 1, before[line_start..].chars().count() + 1)
}

/// One diagnostic: `line:column code message`, then labels, notes and help.
pub fn diagnostic(text: &str, found: &Diagnostic) -> String {
    let mut out = String::new();
    let severity = if found.severity == Severity::Lint { "lint " } else { "" };
    for (n, label) in found.labels.iter().enumerate() {
        let (line, column) = position(text, label.span.start);
        let covered = &text[label.span.clone()];
        let covered = covered.split('\n').next().unwrap_or_default();
        let beside = if label.text.is_empty() { String::new() } else { format!(": {}", label.text) };
        if n == 0 {
            out += &format!("{line}:{column} {severity}{} {}\n", found.code, found.message);
        }
        out += &format!("    at {line}:{column} `{covered}`{beside}\n");
    }
    for note in &found.notes {
        out += &format!("    note: {note}\n");
    }
    match &found.help {
        Some(help) => out + &format!("    help: {help}\n"),
        None => out,
    }
}

/// The source with line numbers, then all diagnostics.
pub fn report(text: &str, found: &[Diagnostic]) -> String {
    let source: String = text.lines().enumerate().map(|(n, line)| format!("{:>3} | {line}\n", n + 1)).collect();
    let found: String = found.iter().map(|d| diagnostic(text, d)).collect();
    format!("{source}\n{}", if found.is_empty() { "no diagnostics\n" } else { &found })
}
