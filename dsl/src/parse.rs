//! Tokens to syntax tree.
//!
//! Values and expressions are nom parsers over the token slice (`value`, `schedule`); they fail at the first fault.
//! Blocks recover: a fault is reported, the rest of the entry is skipped, and reading goes on at the next one.

mod block;
mod schedule;
mod value;

use crate::ast;
use crate::diag::{Diagnostic, Span};
use crate::lex::{Kind, Token, lex};
use nom::error::{ErrorKind, ParseError};

/// Words that start an item at the top level.
pub(crate) const ITEMS: [&str; 7] = ["model", "machine", "pipeline", "staleness", "optimizer", "require", "schedule"];

/// Reads a file. Always gives a tree: what could not be read is left out and reported.
pub fn parse(text: &str) -> (ast::File, Vec<Diagnostic>) {
    let (tokens, found) = lex(text);
    let mut reader = Reader::new(&tokens, found);
    let mut file = ast::File { len: text.len(), ..Default::default() };
    // What lies beyond a cut at the depth limit may hold anything.
    file.broken = reader.cut;
    reader.file(&mut file);
    (file, reader.found)
}

/// Reads one value, e.g. from the command line. Every span in it is `at`.
pub(crate) fn parse_value(text: &str, at: &Span) -> Result<ast::Value, String> {
    let (mut tokens, found) = lex(text);
    for token in &mut tokens {
        token.span = at.clone();
        token.starts_line = token.kind == Kind::End;
    }
    let mut reader = Reader::new(&tokens, found);
    let value = reader.value();
    let left = reader.peek();
    match (value, reader.found.into_iter().next()) {
        (_, Some(first)) => Err(first.message),
        (Some(value), None) if left.kind == Kind::End => Ok(value),
        _ => Err(format!("{} is left over", describe(left))),
    }
}

pub(crate) type Input<'t> = &'t [Token<'t>];
pub(crate) type Parsed<'t, T> = nom::IResult<Input<'t>, T, Fault>;

/// Why a parser gave up: the token that it met and what could have stood there.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Fault {
    /// Tokens left: fewer is further.
    left: usize,
    span: Span,
    found: String,
    expected: Vec<&'static str>,
    /// A message of its own, with its code.
    special: Option<(&'static str, String)>,
}

impl Fault {
    fn at(input: Input<'_>, expected: &'static str) -> Self {
        let (span, found) = match input.first() {
            Some(token) => (token.span.clone(), describe(token)),
            None => (0..0, "the end".into()),
        };
        let expected = if expected.is_empty() { vec![] } else { vec![expected] };
        Self { left: input.len(), span, found, expected, special: None }
    }

    fn special(input: Input<'_>, code: &'static str, message: String) -> Self {
        Self { special: Some((code, message)), ..Self::at(input, "") }
    }

    fn message(&self) -> String {
        match (&self.special, &self.expected[..]) {
            (Some((_, message)), _) => message.clone(),
            (None, []) => format!("{} can't stand here", self.found),
            (None, expected) => format!("expected {}, found {}", either_of(expected), self.found),
        }
    }

    fn diagnostic(self) -> Diagnostic {
        let code = self.special.as_ref().map_or("P0101", |(code, _)| code);
        let help = self.help();
        Diagnostic::error(code, self.span.clone(), self.message()).help(help)
    }

    fn help(&self) -> String {
        match (self.special.as_ref().map(|(code, _)| *code), self.expected.first().copied()) {
            (Some("P0103"), _) => "add the closing bracket".into(),
            (Some("P0105"), _) => "write a smaller number, if need be in a larger unit".into(),
            (Some("P0106"), _) => "write it shorter".into(),
            (Some("P0107"), _) => "separate entries by commas, or write each on its own line".into(),
            (_, Some("a value")) => {
                "a value is a number (`4`, `128 MiB`), a name (`balanced`), a list (`[…]`) or a call (`cosine(…)`)"
                    .into()
            }
            (_, Some("a key" | "`=`, `<=` or `{`")) => "an entry is `key = value`, a bound `key <= value`".into(),
            (_, Some("`{` or `=`")) => "a block is `NAME { … }`".into(),
            (_, Some(_)) => format!("write {} here", either_of(&self.expected)),
            (_, None) => "remove it".into(),
        }
    }
}

impl<'t> ParseError<Input<'t>> for Fault {
    fn from_error_kind(input: Input<'t>, _: ErrorKind) -> Self {
        Self::at(input, "")
    }

    fn append(_: Input<'t>, _: ErrorKind, other: Self) -> Self {
        other
    }

    /// The one that got further; alternatives at the same token are listed together.
    fn or(mut self, other: Self) -> Self {
        match self.left.cmp(&other.left) {
            std::cmp::Ordering::Less => self,
            std::cmp::Ordering::Greater => other,
            std::cmp::Ordering::Equal => {
                for name in other.expected {
                    if !self.expected.contains(&name) {
                        self.expected.push(name);
                    }
                }
                self.special = self.special.or(other.special);
                self
            }
        }
    }
}

/// `a, b or c`
fn either_of(names: &[&str]) -> String {
    match names {
        [] => String::new(),
        [only] => (*only).into(),
        [head @ .., last] => format!("{} or {last}", head.join(", ")),
    }
}

/// A token as messages show it.
fn describe(token: &Token<'_>) -> String {
    match token.kind {
        Kind::End => "the end of the text".into(),
        Kind::Unknown => "a foreign character".into(),
        _ => format!("`{}`", token.text),
    }
}

/// The token of this kind.
fn kind<'t>(kind: Kind, name: &'static str) -> impl Fn(Input<'t>) -> Parsed<'t, &'t Token<'t>> {
    move |input: Input<'t>| match input.split_first() {
        Some((token, rest)) if token.kind == kind => Ok((rest, token)),
        _ => Err(nom::Err::Error(Fault::at(input, name))),
    }
}

/// The token with this text.
fn symbol<'t>(text: &'static str, name: &'static str) -> impl Fn(Input<'t>) -> Parsed<'t, &'t Token<'t>> {
    move |input: Input<'t>| match input.split_first() {
        Some((token, rest)) if token.text == text => Ok((rest, token)),
        _ => Err(nom::Err::Error(Fault::at(input, name))),
    }
}

/// Any word.
fn name(input: Input<'_>) -> Parsed<'_, ast::Name> {
    let (rest, token) = kind(Kind::Word, "a name")(input)?;
    Ok((rest, name_of(token)))
}

fn name_of(token: &Token<'_>) -> ast::Name {
    ast::Name { text: token.text.into(), span: token.span.clone() }
}

/// Place in the token list, with the diagnostics so far. What recovers is a method of this.
struct Reader<'t> {
    rest: Input<'t>,
    /// Place of the last token that was taken.
    last: Span,
    found: Vec<Diagnostic>,
    /// Where foreign characters start, which the lexer reported; ascending.
    foreign: Vec<usize>,
    /// The lexer stopped at the depth limit.
    cut: bool,
}

impl<'t> Reader<'t> {
    /// `found`: what the lexer reported.
    fn new(tokens: Input<'t>, found: Vec<Diagnostic>) -> Self {
        let foreign = tokens.iter().filter(|t| t.kind == Kind::Unknown).map(|t| t.span.start).collect();
        let cut = found.iter().any(|d| d.code == "P0106");
        Self { rest: tokens, last: 0..0, found, foreign, cut }
    }

    fn peek(&self) -> &'t Token<'t> {
        self.peek_at(0)
    }

    /// The token `n` after the next; the last one stands for all beyond.
    fn peek_at(&self, n: usize) -> &'t Token<'t> {
        let rest = self.rest;
        rest.get(n).or(rest.last()).expect("the token list ends with End, which is never taken")
    }

    fn at(&self, text: &str) -> bool {
        self.peek().text == text
    }

    fn at_end(&self) -> bool {
        self.peek().kind == Kind::End
    }

    /// Takes a token; End stays.
    fn bump(&mut self) -> &'t Token<'t> {
        let token = self.peek();
        if token.kind != Kind::End {
            self.last = token.span.clone();
            self.rest = &self.rest[1..];
        }
        token
    }

    /// Runs a nom parser here. A fault is reported and nothing is taken.
    fn take<T>(&mut self, parser: impl FnOnce(Input<'t>) -> Parsed<'t, T>) -> Option<T> {
        match parser(self.rest) {
            Ok((rest, value)) => {
                let taken = self.rest.len() - rest.len();
                if taken > 0 {
                    self.last = self.rest[taken - 1].span.clone();
                }
                self.rest = rest;
                Some(value)
            }
            Err(nom::Err::Error(fault) | nom::Err::Failure(fault)) => {
                self.fault(fault);
                None
            }
            Err(nom::Err::Incomplete(_)) => None,
        }
    }

    /// Reports a fault, unless it is known from the lexer: a foreign character, the end at the depth limit.
    fn fault(&mut self, fault: Fault) {
        let foreign = self.foreign.binary_search(&fault.span.start).is_ok();
        let ends = fault.left <= 1;
        if !(foreign || ends && self.cut) {
            self.found.push(fault.diagnostic());
        }
    }

    /// Skips what a bracket encloses, from the bracket on; less when it seems never closed.
    fn skip_group(&mut self) {
        let mut open = Vec::new();
        loop {
            let token = self.peek();
            let in_list = open.last() == Some(&"[");
            let stop = token.kind == Kind::End || self.item_starts() || (in_list && value::next_entry(self.rest));
            if stop || (token.text == "}" && open.last() != Some(&"{")) {
                return;
            }
            match token.kind {
                Kind::Open => open.push(token.text),
                Kind::Close => drop(open.pop()),
                _ => {}
            }
            self.bump();
            if open.is_empty() {
                return;
            }
        }
    }

    /// Skips to the end of the entry: a separator, a new line or a closing bracket, outside brackets opened on the way.
    /// Takes at least one token when `force` is set, except a closing brace.
    fn skip_entry(&mut self, force: bool) {
        let mut first = force;
        loop {
            let token = self.peek();
            match token.kind {
                Kind::End => return,
                Kind::Close if token.text == "}" => return,
                Kind::Comma | Kind::Semicolon if !first => return,
                _ if token.starts_line && !first => return,
                Kind::Open => self.skip_group(),
                _ => {
                    self.bump();
                }
            }
            first = false;
        }
    }

    /// Whether the next token closes the entry before it.
    fn entry_ends(&self) -> bool {
        let token = self.peek();
        token.starts_line || matches!(token.kind, Kind::Comma | Kind::End) || token.text == "}"
    }

    /// Whether a top-level item starts here: then a block before it was not closed.
    fn item_starts(&self) -> bool {
        let token = self.peek();
        let (second, third) = (self.peek_at(1).text, self.peek_at(2).text);
        token.starts_line
            && ITEMS.contains(&token.text)
            && match token.text {
                "optimizer" => second == "=",
                "schedule" | "model" => third == "{",
                _ => second == "{",
            }
    }
}
