//! CSV text to cells.

use super::cell::{Letters, Verb, Written, parse};
use super::{Cell, Dialect, Spot, Table, check};
use crate::order::ACTIONS_MAX;
use dsl::diag::{Diagnostic, Span};
use std::collections::HashMap;

/// A cell that was understood, letters not yet interpreted.
struct Read {
    written: Written,
    spot: Spot,
}

/// What the rows hold beside actions.
#[derive(Default)]
struct Rows {
    rows: Vec<Vec<Read>>,
    blanks: Vec<Spot>,
    overlaps: Vec<Spot>,
}

/// Reads a table. It is there unless a diagnostic is an error; diagnostics are in the order of the text.
///
/// Without a `dialect` the new one is meant, and a table that could be in the old one is refused.
pub fn read(text: &str, dialect: Option<Dialect>) -> (Option<Table>, Vec<Diagnostic>) {
    let mut found = Vec::new();
    let table = cells(text, &mut found)
        .and_then(|rows| interpret(rows, dialect, &mut found))
        .and_then(|rows| check::check(rows, &mut found));
    found.sort_by_key(|d: &Diagnostic| d.labels[0].span.start);
    (table.filter(|_| !found.iter().any(Diagnostic::is_error)), found)
}

fn cells(text: &str, found: &mut Vec<Diagnostic>) -> Option<Rows> {
    let mut rows = Rows::default();
    empty_lines(text, found);
    let mut reader = csv::ReaderBuilder::new().has_headers(false).flexible(true).from_reader(text.as_bytes());
    let mut count = 0;
    for (row, record) in reader.records().enumerate() {
        // Rows may differ in length, and text is UTF-8 already: nothing is left that can fail.
        let Ok(record) = record else { continue };
        let start = record.position().map_or(0, |p| p.byte() as usize);
        let start =
            start + text.get(start..).map_or(0, |t| t.len() - t.trim_start_matches(['\r', '\n', '\u{feff}']).len());
        let mut actions = Vec::new();
        for (column, field) in record.iter().enumerate() {
            count += 1;
            if count > ACTIONS_MAX {
                found.push(too_large(start..start));
                return None;
            }
            let spot = Spot { row, column, span: place(text, start, &record, column) };
            if field.trim().is_empty() {
                rows.blanks.push(spot);
                continue;
            }
            match parse(field) {
                Ok(written) => {
                    if written.len() > 1 {
                        rows.overlaps.push(spot.clone());
                    }
                    actions.extend(written.into_iter().map(|written| Read { written, spot: spot.clone() }));
                }
                Err(fault) => {
                    let message = format!("{spot}: {}", fault.what);
                    found.push(Diagnostic::error("P0601", spot.span, message).help(fault.help));
                }
            }
        }
        rows.rows.push(actions);
    }
    if rows.rows.is_empty() {
        found.push(Diagnostic::error("P0601", 0..0, "the table is empty").help("write a row for each rank"));
    }
    (!found.iter().any(Diagnostic::is_error)).then_some(rows)
}

/// The CSV reader passes over empty lines, which would move the ranks after them.
fn empty_lines(text: &str, found: &mut Vec<Diagnostic>) {
    let mut at = 0;
    let mut lines = text.split_inclusive('\n').enumerate().peekable();
    while let Some((number, line)) = lines.next() {
        if line.trim().is_empty() {
            let message = format!("row {} is empty", number + 1);
            let fault = Diagnostic::error("P0601", at..at, message);
            found.push(fault.help("each row is a rank: remove the line, or write what the rank does"));
        }
        at += line.len();
    }
}

fn too_large(span: Span) -> Diagnostic {
    Diagnostic::error("P0601", span, format!("the table has more than {ACTIONS_MAX} cells"))
        .help("export one update; a table is checked action by action")
}

/// Where a cell stands: exactly when the row has no quotes, else somewhere in its row.
fn place(text: &str, start: usize, record: &csv::StringRecord, column: usize) -> Span {
    let range = record.range(column).unwrap_or(0..0);
    let (from, to) = (start + range.start + column, start + range.end + column);
    match text.get(from..to) {
        Some(field) if Some(field) == record.get(column) => {
            let before = field.len() - field.trim_start().len();
            from + before..from + before + field.trim().len()
        }
        _ => start..start,
    }
}

/// Gives the letters their meaning.
fn interpret(rows: Rows, dialect: Option<Dialect>, found: &mut Vec<Diagnostic>) -> Option<Vec<Vec<Cell>>> {
    let dialect = match dialect {
        Some(dialect) => dialect,
        None => match ambiguous(&rows.rows) {
            Some(fault) => {
                found.push(fault);
                return None;
            }
            None => Dialect::New,
        },
    };
    let before = found.len();
    let mut table = Vec::with_capacity(rows.rows.len());
    for row in rows.rows {
        let mut cells = Vec::with_capacity(row.len());
        for Read { written, spot } in row {
            match written.action(dialect) {
                Some(action) => cells.push(Cell { action, spot }),
                None => found.push(unknown_letters(&written, &spot)),
            }
        }
        table.push(cells);
    }
    if found.len() > before {
        return None;
    }
    blanks(&table, &rows.blanks, found);
    if let Some(first) = rows.overlaps.first() {
        let message = format!("{first}: overlapped passes run one after the other");
        let lint = Diagnostic::lint("P0620", first.span.clone(), message);
        let count = rows.overlaps.len();
        let note = format!("the table has {count} such pair{}", if count == 1 { "" } else { "s" });
        found.push(lint.note(note).help("times and bubbles are those of the serial order, as written in the pair"));
    }
    Some(table)
}

fn unknown_letters(written: &Written, spot: &Spot) -> Diagnostic {
    match written.letters {
        Letters::Bw => Diagnostic::error("P0602", spot.span.clone(), format!("{spot}: `BW` is of the old dialect"))
            .help("read the table with `--dialect old`, or write `B` for the whole backward pass"),
        Letters::Verb(_) => Diagnostic::error("P0602", spot.span.clone(), format!("{spot}: `I` is of the new dialect"))
            .help("read the table with `--dialect new`; in the old one `B` is the input gradient"),
    }
}

/// The fault of a table whose `B` may be either the whole backward pass or the input gradient.
fn ambiguous(rows: &[Vec<Read>]) -> Option<Diagnostic> {
    let help = "say which it is: `--dialect old` (B is the input gradient, BW the whole backward pass) or `--dialect new` (I is the input gradient, B the whole)";
    let cells = || rows.iter().flatten();
    if let Some(cell) = cells().find(|cell| cell.written.letters == Letters::Bw) {
        let message = format!("{}: with `BW` the table looks like PyTorch's old dialect", cell.spot);
        return Some(Diagnostic::error("P0602", cell.spot.span.clone(), message).help(help));
    }
    let of = |verb: Verb| cells().filter(move |cell| cell.written.letters == Letters::Verb(verb));
    let key = |cell: &Read| (cell.written.stage, cell.written.number);
    let weights: HashMap<_, &Read> = of(Verb::W).map(|cell| (key(cell), cell)).collect();
    let (b, w) = of(Verb::B).find_map(|b| weights.get(&key(b)).map(|w| (b, *w)))?;
    let (stage, mb) = key(b);
    let message = format!("{}: stage {stage} has both B and W of micro-batch {mb}", b.spot);
    let fault = Diagnostic::error("P0602", b.spot.span.clone(), message);
    Some(fault.and_at(w.spot.span.clone(), format!("W is at {}", w.spot)).help(help))
}

/// A table with sends and receives is a list of instructions: it has no idle steps.
fn blanks(table: &[Vec<Cell>], blanks: &[Spot], found: &mut Vec<Diagnostic>) {
    let lists = |cell: &&Cell| cell.action.verb.is_transfer() || cell.action.verb.is_sharding();
    let (Some(cell), Some(blank)) = (table.iter().flatten().find(lists), blanks.first()) else { return };
    let message = format!("{blank}: a blank cell in a table with {}", cell.action.verb.name());
    let fault = Diagnostic::error("P0608", blank.span.clone(), message);
    found.push(
        fault
            .and_at(cell.spot.span.clone(), format!("{} is at {}", cell.action, cell.spot))
            .help("remove the blank cells: PyTorch refuses them in its compute_comms format"),
    );
}
