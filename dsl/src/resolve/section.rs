//! The entries of a block by key: unknown, repeated and missing keys, and the sign between key and value.

use super::{Context, not_yet, twice};
use crate::ast::{Body, Entry, Relation, Value, ValueKind};
use crate::diag::{Diagnostic, Span};
use crate::schedule::CmpOp;
use crate::suggest::{either, nearest};

/// Keys that a block may have, and keys of the design that are not built.
pub(crate) struct Keys {
    pub block: &'static str,
    pub known: &'static [&'static str],
    pub later: &'static [&'static str],
}

/// A block whose keys were checked.
pub(crate) struct Section<'a> {
    name: &'a str,
    /// Place of the block's keyword.
    pub head: Span,
    /// Where defaults are reported: an empty span at the block's start.
    pub start: Span,
    entries: Vec<&'a Entry>,
    broken: bool,
}

impl<'a> Section<'a> {
    /// Looks at every key of `body`. `name` is the block's name in messages.
    pub fn new(cx: &mut Context, name: &'a str, head: &Span, body: &'a Body, keys: &Keys) -> Self {
        let start = head.start..head.start;
        let mut section = Self { name, head: head.clone(), start, entries: Vec::new(), broken: body.broken };
        for entry in &body.entries {
            let (key, span) = (entry.key.text.as_str(), &entry.key.span);
            if keys.known.contains(&key) {
                match section.find(key) {
                    Some(first) => twice(cx, key, span, &first.key.span),
                    None => section.entries.push(entry),
                }
            } else if keys.later.contains(&key) {
                not_yet(cx, span, &format!("`{key}` in `{name}`"), "");
            } else {
                // It may be what a missing key was meant to be.
                section.broken = true;
                let found = Diagnostic::error("P0202", span.clone(), format!("`{name}` has no key `{key}`"));
                cx.report(match nearest(key, keys.known.iter().copied()) {
                    Some(meant) => found.help(format!("did you mean `{meant}`?")),
                    None => found.help(format!("its keys are {}", either(keys.known).replace(" or ", " and "))),
                });
            }
        }
        section
    }

    pub fn find(&self, key: &str) -> Option<&'a Entry> {
        self.entries.iter().find(|e| e.key.text == key).copied()
    }

    /// The value of `key = value`, if the key is there.
    pub fn value(&self, cx: &mut Context, key: &str) -> Option<&'a Value> {
        assigned(cx, self.find(key)?)
    }

    /// Place of a key that is there, with its value.
    pub fn span_of(&self, key: &str, value: &Value) -> Span {
        self.find(key).map_or(value.span.start, |entry| entry.key.span.start)..value.span.end
    }

    /// The value of `key = value`; a missing key is an error.
    pub fn need(&self, cx: &mut Context, key: &str, example: &str) -> Option<&'a Value> {
        if self.find(key).is_none() {
            self.missing(cx, key, example);
        }
        self.value(cx, key)
    }

    pub fn missing(&self, cx: &mut Context, key: &str, example: &str) {
        if !self.broken {
            let message = format!("`{}` has no `{key}`", self.name);
            cx.report(Diagnostic::error("P0204", self.head.clone(), message).help(format!("add `{example}`")));
        }
    }

    /// The value of `key <= value`, if the key is there.
    pub fn bound(&self, cx: &mut Context, key: &str) -> Option<&'a Value> {
        let entry = self.find(key)?;
        match entry.relation {
            _ if entry.value.kind == ValueKind::Invalid => None,
            Relation::Compare(CmpOp::Le) => Some(&entry.value),
            relation => {
                let span = entry.key.span.start..entry.value.span.end.max(entry.key.span.end);
                let found = Diagnostic::error("P0212", span, format!("`{key}` is a bound"));
                cx.report(found.help(bound_help(key, relation, &entry.value)));
                None
            }
        }
    }
}

fn bound_help(key: &str, relation: Relation, value: &Value) -> String {
    match (&value.kind, relation) {
        (ValueKind::Number(number), Relation::Compare(CmpOp::Lt))
            if number.unit.is_none() && number.whole.is_some_and(|n| n > 0) =>
        {
            format!("write `{key} <= {}`", number.value - 1.0)
        }
        (ValueKind::Number(number), Relation::Assign) => {
            let unit = number.unit.as_ref().map_or(String::new(), |u| format!(" {}", u.text));
            format!("write `{key} <= {}{unit}`", number.value)
        }
        _ => format!("write `{key} <= …`"),
    }
}

/// The value of an entry written with `=`.
pub(super) fn assigned<'a>(cx: &mut Context, entry: &'a Entry) -> Option<&'a Value> {
    if entry.value.kind == ValueKind::Invalid || entry.relation == Relation::Assign {
        return Some(&entry.value);
    }
    let key = &entry.key.text;
    let span = entry.key.span.start..entry.value.span.end.max(entry.key.span.end);
    let found = Diagnostic::error("P0212", span, format!("`{key}` is given with `=`"));
    cx.report(found.help(format!("write `{key} = …`")));
    None
}
