//! The Paceline language: text to [`spec::Spec`], with diagnostics. Pure: no I/O.
//!
//! [`load`] does everything; [`parse`] and [`resolve`] are its two halves. Neither fails or panics, whatever the text:
//! faults are diagnostics.

pub mod ast;
pub mod diag;
mod explain;
mod fmt;
mod lex;
pub mod library;
mod parse;
mod resolve;
pub mod schedule;
pub mod spec;
mod suggest;

pub use explain::{codes, explain};
pub use fmt::fmt;
pub use parse::parse;
pub use resolve::{Set, recompute_of_split, resolve, with_sets};

/// Reads `text` with the overrides `sets`. The specification is there unless a diagnostic is an error; diagnostics are in
/// the order of the text.
pub fn load(text: &str, sets: &[Set]) -> (Option<spec::Spec>, Vec<diag::Diagnostic>) {
    let (file, mut found) = parse(text);
    let (spec, more) = resolve(&file, sets);
    found.extend(more);
    found.sort_by_key(|d| d.labels[0].span.start);
    let spec = spec.filter(|_| !found.iter().any(diag::Diagnostic::is_error));
    (spec, found)
}
