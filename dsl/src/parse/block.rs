//! Items and blocks, with recovery at the end of an entry.

use super::value::{relation, unseparated, value};
use super::{Fault, Reader, name_of};
use crate::ast::{Block, Body, Entry, File, Item, Name, Relation, Value, ValueKind};
use crate::diag::{Diagnostic, Span};
use crate::lex::Kind;

impl Reader<'_> {
    /// Everything up to the end of the text.
    pub(super) fn file(&mut self, file: &mut File) {
        while !self.at_end() {
            let token = self.peek();
            match token.kind {
                Kind::Word => match self.item() {
                    Some(item) => file.items.push(item),
                    None => {
                        file.broken = true;
                        self.skip_item();
                    }
                },
                Kind::Comma => {
                    self.bump();
                }
                Kind::Close => {
                    self.stray(&token.span.clone(), token.text);
                    self.bump();
                }
                _ => {
                    file.broken = true;
                    self.fault(Fault::at(self.rest, "a block, such as `machine { … }`"));
                    self.skip_item();
                }
            }
        }
    }

    fn stray(&mut self, span: &Span, text: &str) {
        let message = format!("this `{text}` closes nothing");
        self.found.push(Diagnostic::error("P0104", span.clone(), message).help("remove it, or open its block before"));
    }

    /// Skips to the next line that starts an item.
    fn skip_item(&mut self) {
        let mut first = true;
        while !self.at_end() {
            let token = self.peek();
            if !first && token.starts_line && (token.kind == Kind::Word || token.kind == Kind::Close) {
                return;
            }
            first = false;
            match token.kind {
                Kind::Open => self.skip_group(),
                _ => {
                    self.bump();
                }
            }
        }
    }

    /// One block, schedule or entry. None: reported, and the place is left where the fault is.
    fn item(&mut self) -> Option<Item> {
        let keyword = name_of(self.bump());
        let (second, third) = (self.peek(), self.peek_at(1));
        if keyword.text == "schedule" && second.kind == Kind::Word {
            let name = name_of(self.bump());
            return self.schedule(keyword, name).map(Item::Schedule);
        }
        if second.text == "{" {
            let body = self.body();
            return Some(Item::Block(Block { keyword, name: None, body }));
        }
        if second.kind == Kind::Word && !second.starts_line && third.text == "{" {
            let name = Some(name_of(self.bump()));
            let body = self.body();
            return Some(Item::Block(Block { keyword, name, body }));
        }
        if matches!(second.kind, Kind::Assign | Kind::Compare) {
            let entry = self.entry_rest(keyword);
            if !self.entry_ends() {
                self.fault(unseparated(self.rest));
                self.skip_item();
            }
            return Some(Item::Entry(entry));
        }
        self.fault(Fault::at(self.rest, "`{` or `=`"));
        None
    }

    /// `{ entries }`; the next token is the brace.
    pub(super) fn body(&mut self) -> Body {
        let open = self.bump().span.clone();
        let mut body = Body { entries: Vec::new(), span: open.clone(), broken: false };
        loop {
            while self.peek().kind == Kind::Comma {
                self.bump();
            }
            if self.closes(&open) {
                body.span.end = self.last.end;
                return body;
            }
            let token = self.peek();
            if token.kind != Kind::Word {
                body.broken = true;
                self.fault(Fault::at(self.rest, "a key"));
                self.skip_entry(true);
                continue;
            }
            self.bump();
            let entry = self.entry_rest(name_of(token));
            body.entries.push(entry);
            if !self.entry_ends() {
                self.fault(unseparated(self.rest));
                // A word is taken for the next entry's key.
                if self.peek().kind != Kind::Word {
                    self.skip_entry(true);
                }
            }
        }
    }

    /// Whether the block opened at `open` ends here; takes its brace. A brace that is missing is reported.
    pub(super) fn closes(&mut self, open: &Span) -> bool {
        if self.at("}") {
            self.bump();
            return true;
        }
        if !self.at_end() && !self.item_starts() {
            return false;
        }
        // A cut at the depth limit is not the writer's missing brace.
        if !(self.at_end() && self.cut) {
            let mut found = Diagnostic::error("P0103", open.clone(), "`{` is never closed");
            if !self.at_end() {
                found = found.and_at(self.peek().span.clone(), "this starts a new block");
            }
            self.found.push(found.help("add the missing `}`"));
        }
        true
    }

    /// What follows a key. A fault is reported, and the entry ends where it can.
    fn entry_rest(&mut self, key: Name) -> Entry {
        let selector = self.selector(&key);
        let Some(relation) = self.take(relation) else {
            if !self.entry_ends() {
                self.skip_entry(true);
            }
            let value = Value { kind: ValueKind::Invalid, span: key.span.clone() };
            return Entry { key, selector, relation: Relation::Assign, value };
        };
        let value = self.value().unwrap_or_else(|| {
            let span = self.peek().span.clone();
            if !self.entry_ends() {
                self.skip_entry(true);
            }
            Value { kind: ValueKind::Invalid, span }
        });
        Entry { key, selector, relation, value }
    }

    /// `embedding` in `group embedding = adamw { … }`.
    fn selector(&mut self, key: &Name) -> Option<Value> {
        let next = self.peek();
        let starts = matches!(next.kind, Kind::Word | Kind::Text) || next.text == "[";
        (key.text == "group" && starts && !next.starts_line).then(|| self.take(value)).flatten()
    }

    /// A value, or a record, in which reading recovers. None: reported, and nothing is taken.
    pub(super) fn value(&mut self) -> Option<Value> {
        let (first, second) = (self.peek(), self.peek_at(1));
        let start = first.span.start;
        let name = match first.kind {
            Kind::Word if second.text == "{" && !second.starts_line => Some(name_of(self.bump())),
            _ if first.text == "{" => None,
            _ => return self.take(value),
        };
        let body = self.body();
        let span = start..body.span.end;
        Some(Value { kind: ValueKind::Record(name, body), span })
    }
}
