//! The canonical layout of a file.
//!
//! # Rules
//!
//! Tokens and comments stay; only white space and separators change. So the formatter needs no knowledge of keys, and
//! follows the language as it grows.
//!
//! * Two spaces of indentation; lines end with a line feed; at most one blank line in a row.
//! * A block on one line stays on one line while it fits [`layout::WIDTH_MAX`]; otherwise every entry has a line, without
//!   separators. So does a list or a call that was begun with a line break.
//! * In a block over several lines the signs (`=`, `<=`) of its entries end in one column; in a schedule the first words
//!   are padded to one width.
//! * Comments after code start at column [`layout::COMMENT_COLUMN`] or two columns after the longest of the lines
//!   around them. A comment inside an entry moves above it.
//! * A block over several lines at the top level has blank lines around it.

mod layout;
mod tree;

use crate::ast::{File, Item};
use crate::diag::Diagnostic;
use crate::lex::{Kind, Token};

/// A line that is broken for its length may change the columns of its neighbours, which the next pass sees.
const PASSES_MAX: usize = 8;

/// `text` in the canonical layout. Formatting again changes nothing, and the result means what `text` means.
///
/// # Errors
/// The faults of a text that does not parse, or whose brackets do not match.
pub fn fmt(text: &str) -> Result<String, Vec<Diagnostic>> {
    let (file, found) = crate::parse(text);
    if found.iter().any(Diagnostic::is_error) {
        return Err(found);
    }
    balanced(&crate::lex::lex(text).0).map_err(|fault| vec![*fault])?;
    let pass = |text: &str| layout::layout(&tree::read(text, &crate::lex::lex(text).0));
    let mut out = pass(text);
    for _ in 1..PASSES_MAX {
        let next = pass(&out);
        if next == out {
            break;
        }
        out = next;
    }
    // A key like `model` that begins a line is read as the start of a block, and what the parser skipped behind a clause that it
    // doesn't know as one more clause: such a text stays as it is.
    let (read, found) = crate::parse(&out);
    let same = !found.iter().any(Diagnostic::is_error) && clauses(&read) == clauses(&file);
    Ok(if same { out } else { text.to_owned() })
}

/// By schedule: the keys of its clauses.
fn clauses(file: &File) -> Vec<Vec<&str>> {
    let schedules = file.items.iter().filter_map(|item| match item {
        Item::Schedule(schedule) => Some(schedule),
        _ => None,
    });
    schedules.map(|schedule| schedule.clauses.iter().map(|clause| clause.key.text.as_str()).collect()).collect()
}

/// A clause that can't be understood may hold brackets that don't match: the parser skips them, the layout can't.
fn balanced(tokens: &[Token<'_>]) -> Result<(), Box<Diagnostic>> {
    let mut open: Vec<&Token<'_>> = Vec::new();
    for token in tokens {
        match token.kind {
            Kind::Open => open.push(token),
            Kind::Close => {
                let opened = open.pop().map(|open| open.text);
                if !matches!((opened, token.text), (Some("{"), "}") | (Some("["), "]") | (Some("("), ")")) {
                    let message = format!("this `{}` closes nothing", token.text);
                    let found = Diagnostic::error("P0104", token.span.clone(), message);
                    return Err(Box::new(found.help("remove it, or open its bracket before")));
                }
            }
            _ => {}
        }
    }
    match open.pop() {
        None => Ok(()),
        Some(token) => {
            let found = Diagnostic::error("P0103", token.span.clone(), format!("`{}` is never closed", token.text));
            Err(Box::new(found.help("add the closing bracket")))
        }
    }
}
