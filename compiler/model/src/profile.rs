//! Times read from a profile: CSV text with a row for each stage or layer.
//!
//! # Format
//!
//! The first line names the columns, in any order; `#` starts a line that is a comment.
//!
//! | column | holds |
//! |---|---|
//! | `stage` | a stage, from 0; or instead |
//! | `layer` | `embed`, `block 3` (or `block`: all of them), `head` |
//! | `f_us`, `i_us`, `w_us` | microseconds of forward pass, input gradient and weight gradient, on one micro-batch |
//! | `hop_us` | microseconds of one transfer; may be left out or empty, and has one value |
//!
//! Every stage, or every layer, has exactly one row.

use dsl::diag::{Diagnostic, Span};
use dsl::spec::{Costs, LayerCosts, Times};
use std::collections::BTreeMap;

/// What a profile says.
#[derive(Clone, Debug, PartialEq)]
pub enum Profile {
    Stages(Costs),
    Layers(LayerCosts),
}

/// What is wrong with a profile, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProfileError {
    /// Line, from 1.
    pub row: u64,
    /// Name of the column, or its number where the names are wrong.
    pub column: String,
    pub message: String,
    pub help: String,
}

impl ProfileError {
    /// `P0421`, at the place in the spec that names the profile `file`.
    pub fn diagnostic(&self, file: &str, span: &Span) -> Diagnostic {
        let message = format!("{file}, row {}, column {}: {}", self.row, self.column, self.message);
        Diagnostic::error("P0421", span.clone(), message).help(self.help.clone())
    }
}

/// Largest time, microseconds: as in the language.
const TIME_US_MAX: f64 = 1e9;
const TIMES: [&str; 3] = ["f_us", "i_us", "w_us"];
const COLUMNS: &str = "the columns are `stage` or `layer`, `f_us`, `i_us`, `w_us`, and perhaps `hop_us`";

/// What a row is about; `AllBlocks` sorts before each block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Key {
    Stage(u64),
    Embed,
    AllBlocks,
    Block(u64),
    Head,
}

/// Positions of the columns.
struct Header {
    by_layer: bool,
    key: usize,
    times: [usize; 3],
    hop: Option<usize>,
    count: usize,
}

/// Reads a profile for `stages` stages of a model with `blocks` blocks (none without a model).
///
/// # Errors
/// The first fault, with its row and column.
pub fn parse(text: &str, stages: usize, blocks: Option<u32>) -> Result<Profile, Box<ProfileError>> {
    let mut header = None;
    let mut rows: BTreeMap<Key, Times> = BTreeMap::new();
    let mut hop: Option<u64> = None;
    let mut last = 1;
    for (at, line) in text.strip_prefix('\u{feff}').unwrap_or(text).lines().enumerate() {
        if line.trim().is_empty() || line.trim_start().starts_with('#') {
            continue;
        }
        let row = at as u64 + 1;
        last = row;
        let record = cells(line, row)?;
        let Some(header) = &header else {
            header = Some(columns(&record, row)?);
            continue;
        };
        let (key, times) = times_of(&record, row, header, stages, blocks)?;
        if rows.insert(key, times).is_some() {
            let message = format!("`{}` has a row already", &record[header.key]);
            return Err(fault(row, header.key_name(), message, "give each one row"));
        }
        let Some(given) = header.hop.filter(|&at| !record[at].is_empty()) else { continue };
        let ns = time_ns(&record[given], row, "hop_us", 0)?;
        if *hop.get_or_insert(ns) != ns {
            let message = format!(
                "a hop takes {} us in a row before, and {} here",
                hop.unwrap_or(0) as f64 / 1e3,
                &record[given]
            );
            return Err(fault(row, "hop_us", message, "all hops take the same time: give it once, e.g. the largest"));
        }
    }
    let header = header.ok_or_else(|| fault(1, "1", "the file has no columns".into(), COLUMNS))?;
    complete(&rows, &header, last, stages, blocks.unwrap_or(0))?;
    Ok(profile(&rows, &header, hop.unwrap_or(0)))
}

/// The values of one line; a value does not go over several.
fn cells(line: &str, row: u64) -> Result<csv::StringRecord, Box<ProfileError>> {
    let mut reader = csv::ReaderBuilder::new().has_headers(false).trim(csv::Trim::All).from_reader(line.as_bytes());
    let record = reader.records().next().unwrap_or_else(|| Ok(csv::StringRecord::new()));
    record.map_err(|e| fault(row, "1", e.to_string(), "write values with commas between them"))
}

fn fault(row: u64, column: &str, message: String, help: &str) -> Box<ProfileError> {
    Box::new(ProfileError { row, column: column.to_owned(), message, help: help.to_owned() })
}

impl Header {
    fn key_name(&self) -> &'static str {
        if self.by_layer { "layer" } else { "stage" }
    }
}

fn columns(record: &csv::StringRecord, row: u64) -> Result<Header, Box<ProfileError>> {
    for (at, name) in record.iter().enumerate() {
        let column = (at + 1).to_string();
        if !["stage", "layer", "hop_us"].iter().chain(&TIMES).any(|known| *known == name) {
            return Err(fault(row, &column, format!("there is no column `{name}`"), COLUMNS));
        }
        if record.iter().take(at).any(|before| before == name) {
            return Err(fault(row, &column, format!("a second column `{name}`"), "keep one of them"));
        }
    }
    let at = |name: &str| record.iter().position(|n| n == name);
    let need = |name: &str| at(name).ok_or_else(|| fault(row, name, "the column is missing".into(), COLUMNS));
    let (stage, layer) = (at("stage"), at("layer"));
    if let (Some(_), Some(layer)) = (stage, layer) {
        let message = "a profile is by stage or by layer, not both".into();
        return Err(fault(row, &(layer + 1).to_string(), message, "remove one of the two columns"));
    }
    let key = layer.map_or_else(|| need("stage"), Ok)?;
    let times = [need(TIMES[0])?, need(TIMES[1])?, need(TIMES[2])?];
    Ok(Header { by_layer: layer.is_some(), key, times, hop: at("hop_us"), count: record.len() })
}

fn times_of(
    record: &csv::StringRecord,
    row: u64,
    header: &Header,
    stages: usize,
    blocks: Option<u32>,
) -> Result<(Key, Times), Box<ProfileError>> {
    if record.len() != header.count {
        let message = format!("the row has {} values for {} columns", record.len(), header.count);
        let column = (record.len().min(header.count) + 1).to_string();
        return Err(fault(row, &column, message, "give each column a value; `hop_us` may be empty"));
    }
    let key = match (header.by_layer, blocks) {
        (false, _) => stage(&record[header.key], row, stages)?,
        (true, Some(blocks)) => layer(&record[header.key], row, blocks)?,
        (true, None) => {
            let message = "the spec has no model whose layers could take these times".into();
            return Err(fault(row, "layer", message, "add a `model` block, or give a row for each `stage`"));
        }
    };
    // A stage's forward pass takes some time; a layer may have no gradients of its own.
    let least = u64::from(!header.by_layer);
    let time = |part: usize| time_ns(&record[header.times[part]], row, TIMES[part], least);
    Ok((key, Times { f_ns: time(0)?, i_ns: time(1)?, w_ns: time(2)? }))
}

fn stage(text: &str, row: u64, stages: usize) -> Result<Key, Box<ProfileError>> {
    let found = text.parse::<u64>().ok().filter(|&stage| stage < stages as u64);
    found.map(Key::Stage).ok_or_else(|| {
        let help = format!("stages are 0 to {}", stages.saturating_sub(1));
        fault(row, "stage", format!("there is no stage `{text}`"), &help)
    })
}

fn layer(text: &str, row: u64, blocks: u32) -> Result<Key, Box<ProfileError>> {
    let number = text.strip_prefix("block ").and_then(|n| n.trim().parse::<u64>().ok());
    match (text, number) {
        ("embed", _) => Ok(Key::Embed),
        ("block", _) => Ok(Key::AllBlocks),
        ("head", _) => Ok(Key::Head),
        (_, Some(n)) if n < u64::from(blocks) => Ok(Key::Block(n)),
        _ => {
            let help = format!("layers are `embed`, `block 0` to `block {}` (or `block` for all), `head`", blocks - 1);
            Err(fault(row, "layer", format!("there is no layer `{text}`"), &help))
        }
    }
}

fn time_ns(text: &str, row: u64, column: &str, least: u64) -> Result<u64, Box<ProfileError>> {
    let range = format!("give microseconds as a number from {} to {TIME_US_MAX:.0}", least as f64 / 1e3);
    let us = text.parse::<f64>().ok().filter(|us| (0.0..=TIME_US_MAX).contains(us));
    let ns = us.map(|us| (us * 1e3).round() as u64).filter(|&ns| ns >= least);
    ns.ok_or_else(|| fault(row, column, format!("`{text}` is no time"), &range))
}

/// Every stage or layer has a row, and blocks are given together or one by one.
fn complete(
    rows: &BTreeMap<Key, Times>,
    header: &Header,
    last: u64,
    stages: usize,
    blocks: u32,
) -> Result<(), Box<ProfileError>> {
    let together = rows.contains_key(&Key::AllBlocks);
    if together && rows.keys().any(|key| matches!(key, Key::Block(_))) {
        let message = "`block` stands for all blocks, and some have rows of their own".into();
        return Err(fault(last, "layer", message, "give `block`, or a row for each block"));
    }
    let each = (0..u64::from(blocks)).map(Key::Block);
    let needed: Vec<Key> = match (header.by_layer, together) {
        (false, _) => (0..stages as u64).map(Key::Stage).collect(),
        (true, true) => vec![Key::Embed, Key::AllBlocks, Key::Head],
        (true, false) => std::iter::once(Key::Embed).chain(each).chain([Key::Head]).collect(),
    };
    let Some(missing) = needed.into_iter().find(|key| !rows.contains_key(key)) else { return Ok(()) };
    let name = match missing {
        Key::Stage(n) => format!("stage {n}"),
        Key::Embed => "embed".into(),
        Key::AllBlocks => "block".into(),
        Key::Block(n) => format!("block {n}"),
        Key::Head => "head".into(),
    };
    Err(fault(last, header.key_name(), format!("the file ends without a row for `{name}`"), "add the row"))
}

fn profile(rows: &BTreeMap<Key, Times>, header: &Header, hop_ns: u64) -> Profile {
    if header.by_layer {
        let of = |key| rows.get(&key).copied().unwrap_or_default();
        let is_block = |key: &Key| matches!(key, Key::AllBlocks | Key::Block(_));
        let blocks = rows.iter().filter(|(key, _)| is_block(key)).map(|(_, times)| *times).collect();
        return Profile::Layers(LayerCosts {
            embed: of(Key::Embed),
            blocks,
            head: of(Key::Head),
            hop_ns,
            u_ns: Vec::new(),
        });
    }
    let list = |part: fn(&Times) -> u64| rows.values().map(part).collect();
    Profile::Stages(Costs {
        f_ns: list(|t| t.f_ns),
        i_ns: list(|t| t.i_ns),
        w_ns: list(|t| t.w_ns),
        hop_ns,
        u_ns: Vec::new(),
    })
}
