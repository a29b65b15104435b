//! `--set pipeline.accumulate=8`: overrides from the command line, applied to the syntax tree.
//!
//! A value that replaces one in the file takes its place (its spans are those of the replaced value); a key that the
//! file lacks stands at the closing brace of its block. So every span lies in the file, and diagnostics get a note that
//! says where the value came from.

use super::section::Keys;
use super::{Context, model, pipeline};
use crate::ast::{Block, Body, Entry, File, Item, Name, Relation, Value, ValueKind};
use crate::diag::{Diagnostic, Span};
use crate::schedule::CmpOp;
use crate::suggest::{either, nearest};

/// An override as typed, e.g. `pipeline.accumulate=8` or `staleness.drift<=2`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Set(pub String);

/// Where the value of an override stands, and its text.
pub(super) struct Origin {
    span: Span,
    text: String,
}

const BLOCKS: [&Keys; 5] =
    [&model::MODEL, &model::MACHINE, &pipeline::PIPELINE, &pipeline::STALENESS, &pipeline::REQUIRE];

/// An override, taken apart.
struct Parts<'a> {
    path: Vec<&'a str>,
    relation: Option<Relation>,
    value: &'a str,
}

impl Parts<'_> {
    /// The sign that was typed for a bound, else the one that the key has.
    fn relation(&self) -> Relation {
        match self.path[..] {
            _ if self.relation.is_some() => self.relation.unwrap_or(Relation::Assign),
            ["staleness", "drift" | "delay"] | ["require", _] => Relation::Compare(CmpOp::Le),
            _ => Relation::Assign,
        }
    }
}

/// Applies `sets` in order. What is wrong with one is reported, and the others are applied.
pub(super) fn apply(file: &mut File, sets: &[Set], cx: &mut Context) -> Vec<Origin> {
    let mut origins = Vec::new();
    for Set(text) in sets {
        match take_apart(text).and_then(|parts| apply_one(file, &parts)) {
            Ok(span) => origins.push(Origin { span, text: text.clone() }),
            Err(Fault { code, message, help }) => {
                cx.report(Diagnostic::error(code, 0..0, format!("`--set {}`: {message}", shown(text))).help(help));
            }
        }
    }
    origins
}

/// The text of a file that means the same as `text` with `sets`. Overrides that are wrong are left out.
pub fn with_sets(text: &str, sets: &[Set]) -> String {
    let mut text = text.to_owned();
    for Set(set) in sets {
        let (before, _) = crate::parse(&text);
        let mut after = before.clone();
        if let Ok(parts) = take_apart(set)
            && let Ok(at) = apply_one(&mut after, &parts)
        {
            let written = written(&before, &parts, &at);
            text.replace_range(at, &written);
        }
    }
    text
}

/// What goes to `at`: the value where it replaces one, else the entry, with the blocks around it that `file` lacks.
fn written(file: &File, parts: &Parts<'_>, at: &Span) -> String {
    let value = parts.value.trim();
    if !at.is_empty() {
        // What stood without a sign gets one: `cost { … }` becomes `cost = profile(…)`.
        return if stands_beside(file, at) { format!("= {value}") } else { value.to_owned() };
    }
    let has = |word: &str| {
        file.items.iter().any(|item| match item {
            Item::Block(block) => block.keyword.text == word,
            Item::Entry(entry) => entry.key.text == word,
            Item::Schedule(_) => false,
        })
    };
    let sign = if parts.relation() == Relation::Assign { "=" } else { "<=" };
    let entry = |key: &str| format!("{key} {sign} {value}");
    match parts.path[..] {
        ["optimizer", key] if !has("optimizer") => format!("\noptimizer = adamw {{ {} }}\n", entry(key)),
        ["optimizer", key] if optimizer_is_word(file) => format!(" {{ {} }}", entry(key)),
        [key] => format!("\n{}\n", entry(key)),
        ["machine", "cost", key] if !has("machine") => format!("\nmachine {{ cost {{ {} }} }}\n", entry(key)),
        ["machine", "cost", key] if !has_cost(file) => format!(", cost {{ {} }} ", entry(key)),
        ["model", key] if !has("model") => format!("\nmodel gpt {{ {} }}\n", entry(key)),
        [keyword, key] if !has(keyword) => format!("\n{keyword} {{ {} }}\n", entry(key)),
        [.., key] => format!(", {} ", entry(key)),
        [] => String::new(),
    }
}

/// Whether the value at `at` follows its key without a sign.
fn stands_beside(file: &File, at: &Span) -> bool {
    let beside = |e: &Entry| e.relation == Relation::Beside && e.value.span == *at;
    file.items.iter().any(|item| matches!(item, Item::Block(b) if b.body.entries.iter().any(beside)))
}

fn optimizer_is_word(file: &File) -> bool {
    let word = |e: &Entry| e.key.text == "optimizer" && matches!(e.value.kind, ValueKind::Word(_));
    file.items.iter().any(|item| matches!(item, Item::Entry(e) if word(e)))
}

fn has_cost(file: &File) -> bool {
    let cost = |b: &Block| b.keyword.text == "machine" && b.body.entries.iter().any(|e| e.key.text == "cost");
    file.items.iter().any(|item| matches!(item, Item::Block(b) if cost(b)))
}

/// Adds to each diagnostic on a value from an override where the value came from.
pub(super) fn note_origins(found: &mut [Diagnostic], origins: &[Origin]) {
    // What is missing has no value.
    for diagnostic in found.iter_mut().filter(|d| d.code != "P0204") {
        for label in &diagnostic.labels {
            for origin in origins.iter().filter(|o| o.span == label.span) {
                let note = format!("the value is from the command line: `--set {}`", shown(&origin.text));
                if !diagnostic.notes.contains(&note) {
                    diagnostic.notes.push(note);
                }
            }
        }
    }
}

/// Printable and not too long.
fn shown(text: &str) -> String {
    text.chars().take(80).map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c }).collect()
}

struct Fault {
    code: &'static str,
    message: String,
    help: String,
}

fn unreadable(message: String) -> Fault {
    Fault { code: "P0250", message, help: "write it as in `--set pipeline.accumulate=8`".into() }
}

fn take_apart(text: &str) -> Result<Parts<'_>, Fault> {
    let Some(sign) = text.find(['=', '<']) else { return Err(unreadable("there is no `=` in it".into())) };
    let (path, rest) = text.split_at(sign);
    let (relation, value) = match rest.strip_prefix("<=") {
        Some(value) => (Some(Relation::Compare(CmpOp::Le)), value),
        None => match rest.strip_prefix('=') {
            Some(value) => (None, value),
            None => return Err(unreadable("a bound is written `<=`".into())),
        },
    };
    let path: Vec<&str> = path.split('.').map(str::trim).collect();
    if path.iter().any(|part| part.is_empty()) {
        return Err(unreadable("the key is not a name or names joined by dots".into()));
    }
    Ok(Parts { path, relation, value })
}

/// Gives the place of the new value.
fn apply_one(file: &mut File, parts: &Parts<'_>) -> Result<Span, Fault> {
    match parts.path[..] {
        ["optimizer"] => {
            let at = optimizer_entry(file).value.span.clone();
            optimizer_entry(file).value = read(parts, &at)?;
            Ok(at)
        }
        ["optimizer", key] => {
            let body = optimizer_body(optimizer_entry(file))?;
            put(body, key, parts)
        }
        ["machine", "cost", key] => {
            known(key, &super::cost::COST, "machine.cost.")?;
            let body = block(file, "machine");
            if !body.entries.iter().any(|e| e.key.text == "cost") {
                let (span, entries) = (end_of(body), Vec::new());
                let record = Body { entries, span: span.clone(), broken: false };
                body.entries.push(Entry {
                    key: Name { text: "cost".into(), span: span.clone() },
                    selector: None,
                    relation: Relation::Beside,
                    value: Value { kind: ValueKind::Record(None, record), span },
                });
            }
            let cost = body.entries.iter_mut().find(|e| e.key.text == "cost").map(|e| &mut e.value.kind);
            match cost {
                Some(ValueKind::Record(None, body)) => put(body, key, parts),
                _ => Err(unreadable("`cost` in the file is not a block".into())),
            }
        }
        [keyword, key] => {
            let Some(keys) = BLOCKS.iter().find(|k| k.block == keyword) else { return Err(no_block(keyword)) };
            known(key, keys, &format!("{keyword}."))?;
            put(block(file, keyword), key, parts)
        }
        [key] => match BLOCKS.iter().find(|k| k.known.contains(&key)) {
            Some(keys) => Err(unknown(key, format!("did you mean `{}.{key}`?", keys.block))),
            None => Err(no_block(key)),
        },
        _ => Err(unknown(&parts.path.join("."), "keys are `BLOCK.KEY`, `optimizer.KEY` and `machine.cost.KEY`".into())),
    }
}

fn unknown(key: &str, help: String) -> Fault {
    Fault { code: "P0251", message: format!("there is no key `{}`", shown(key)), help }
}

fn no_block(word: &str) -> Fault {
    let names: Vec<&str> = BLOCKS.iter().map(|k| k.block).chain(["optimizer"]).collect();
    match nearest(word, names.iter().copied()) {
        Some(meant) => unknown(word, format!("did you mean `{meant}`?")),
        None => unknown(word, format!("a key starts with {}", either(&names))),
    }
}

/// A key that is not built yet passes: the resolver says so.
fn known(key: &str, keys: &Keys, prefix: &str) -> Result<(), Fault> {
    if keys.known.contains(&key) || keys.later.contains(&key) {
        return Ok(());
    }
    Err(match nearest(key, keys.known.iter().copied()) {
        Some(meant) => unknown(&format!("{prefix}{key}"), format!("did you mean `{prefix}{meant}`?")),
        None => unknown(&format!("{prefix}{key}"), format!("`{}` has {}", keys.block, either(keys.known))),
    })
}

fn read(parts: &Parts<'_>, at: &Span) -> Result<Value, Fault> {
    crate::parse::parse_value(parts.value, at).map_err(|message| Fault {
        code: "P0250",
        message: format!("the value can't be read: {message}"),
        help: "a value is written as in the file, e.g. `128 MiB` (quote it for the shell)".into(),
    })
}

/// Gives `key` the value, in place of the one that is there or at the end of the block.
fn put(body: &mut Body, key: &str, parts: &Parts<'_>) -> Result<Span, Fault> {
    if let Some(entry) = body.entries.iter_mut().find(|e| e.key.text == key) {
        let at = entry.value.span.clone();
        entry.value = read(parts, &at)?;
        entry.relation = parts.relation();
        return Ok(at);
    }
    let at = end_of(body);
    let value = read(parts, &at)?;
    let key = Name { text: key.into(), span: at.clone() };
    body.entries.push(Entry { key, selector: None, relation: parts.relation(), value });
    Ok(at)
}

/// An empty span at the closing brace.
fn end_of(body: &Body) -> Span {
    let end = body.span.end.saturating_sub(1).max(body.span.start);
    end..end
}

/// The body of a block, added at the end of the file if it is not there.
fn block<'f>(file: &'f mut File, keyword: &str) -> &'f mut Body {
    let is = |item: &Item| matches!(item, Item::Block(block) if block.keyword.text == keyword);
    let at = file.items.iter().position(is).unwrap_or_else(|| {
        let end = file.len..file.len;
        let name = |text: &str| Name { text: text.into(), span: end.clone() };
        file.items.push(Item::Block(Block {
            keyword: name(keyword),
            name: (keyword == "model").then(|| name("gpt")),
            body: Body { entries: Vec::new(), span: end.clone(), broken: false },
        }));
        file.items.len() - 1
    });
    match &mut file.items[at] {
        Item::Block(block) => &mut block.body,
        _ => unreachable!("found or added as a block"),
    }
}

/// The `optimizer` entry, added at the end of the file if it is not there.
fn optimizer_entry(file: &mut File) -> &mut Entry {
    let is = |item: &Item| matches!(item, Item::Entry(entry) if entry.key.text == "optimizer");
    let at = file.items.iter().position(is).unwrap_or_else(|| {
        let end = file.len..file.len;
        let value = Value { kind: ValueKind::Word("adamw".into()), span: end.clone() };
        let key = Name { text: "optimizer".into(), span: end };
        file.items.push(Item::Entry(Entry { key, selector: None, relation: Relation::Assign, value }));
        file.items.len() - 1
    });
    match &mut file.items[at] {
        Item::Entry(entry) => entry,
        _ => unreachable!("found or added as an entry"),
    }
}

/// The optimizer's braces; `adamw` becomes `adamw { }`.
fn optimizer_body(entry: &mut Entry) -> Result<&mut Body, Fault> {
    if let ValueKind::Word(word) = &entry.value.kind {
        let name = Name { text: word.clone(), span: entry.value.span.clone() };
        let end = entry.value.span.end;
        let body = Body { entries: Vec::new(), span: end..end, broken: false };
        entry.value.kind = ValueKind::Record(Some(name), body);
    }
    match &mut entry.value.kind {
        ValueKind::Record(Some(_), body) => Ok(body),
        _ => Err(unreadable("the file's `optimizer` can't be read".into())),
    }
}
