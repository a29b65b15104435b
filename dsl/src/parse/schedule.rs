//! `schedule NAME { … }`: clauses, phases, steps and their integer expressions.

use super::value::{comparison, extent, to_failure};
use super::{Fault, Input, Parsed, Reader, kind, name_of, symbol};
use crate::ast::{Clause, ClauseKind, Cond, Expr, ExprKind, Name, Phase, Schedule, Sequence, Step};
use crate::diag::Span;
use crate::lex::Kind;
use crate::schedule::BinaryOp;
use nom::Parser;
use nom::branch::alt;
use nom::combinator::opt;
use nom::sequence::delimited;

/// Longest expression, in tokens. It bounds the depth of the tree.
const EXPR_TOKENS_MAX: usize = 200;

impl<'t> Reader<'t> {
    /// The body of a schedule; its keyword and name were taken.
    pub(super) fn schedule(&mut self, keyword: Name, name: Name) -> Option<Schedule> {
        if !self.at("{") {
            self.fault(Fault::at(self.rest, "`{`"));
            return None;
        }
        let open = self.bump().span.clone();
        let mut schedule = Schedule { name, clauses: Vec::new(), span: keyword.span, broken: false };
        loop {
            while matches!(self.peek().kind, Kind::Comma | Kind::Semicolon) {
                self.bump();
            }
            if self.closes(&open) {
                schedule.span.end = self.last.end;
                return Some(schedule);
            }
            if self.peek().kind != Kind::Word {
                schedule.broken = true;
                self.fault(Fault::at(self.rest, "`place`, `backward`, `flush`, `update`, `sequence` or `order`"));
                self.skip_entry(true);
                continue;
            }
            schedule.clauses.push(self.clause());
        }
    }

    fn clause(&mut self) -> Clause {
        let key = name_of(self.bump());
        let kind = match key.text.as_str() {
            "order" => self.order(&key.span),
            "sequence" => self.form(|input| sequence(input).map(|(rest, s)| (rest, ClauseKind::Sequence(s)))),
            "place" if self.peek_at(1).text == "(" && !self.peek().starts_line => {
                self.form(|input| placement(input).map(|(rest, (name, size))| (rest, ClauseKind::Call(name, size))))
            }
            _ => self.words(),
        };
        let span = key.span.start..self.last.end;
        Clause { key, kind, span }
    }

    /// What `parser` reads, up to the clause's end.
    fn form(&mut self, parser: fn(Input<'t>) -> Parsed<'t, ClauseKind>) -> ClauseKind {
        let found = self.take(parser);
        if found.is_some() && !self.entry_ends() && self.peek().kind != Kind::Semicolon {
            self.fault(Fault::at(self.rest, "a new line or `}`"));
            self.skip_entry(true);
            return ClauseKind::Invalid;
        }
        found.unwrap_or_else(|| {
            self.skip_entry(false);
            ClauseKind::Invalid
        })
    }

    /// The words up to the clause's end.
    fn words(&mut self) -> ClauseKind {
        let mut words = Vec::new();
        while self.peek().kind == Kind::Word && !self.peek().starts_line {
            words.push(name_of(self.bump()));
        }
        if self.entry_ends() || self.peek().kind == Kind::Semicolon {
            return ClauseKind::Words(words, None);
        }
        let start = self.peek().span.start;
        self.skip_entry(true);
        ClauseKind::Words(words, Some(start..self.last.end))
    }

    /// `{ phases }`
    fn order(&mut self, key: &Span) -> ClauseKind {
        if !self.at("{") {
            self.fault(Fault::at(self.rest, "`{`"));
            self.skip_entry(false);
            return ClauseKind::Invalid;
        }
        let open = self.bump().span.clone();
        let mut phases = Vec::new();
        loop {
            while matches!(self.peek().kind, Kind::Comma | Kind::Semicolon) {
                self.bump();
            }
            if self.closes(&open) {
                return ClauseKind::Order(phases);
            }
            if self.peek().kind != Kind::Word {
                self.fault(Fault::at(self.rest, "`warmup`, `repeat`, `drain` or `block`"));
                self.skip_entry(true);
                phases.push(Phase::broken(key));
                continue;
            }
            let phase = self.phase();
            phases.push(phase);
        }
    }

    /// `warmup COUNT { steps }`, `repeat { steps }`, `drain { steps }`, `block every INTERVAL { steps }`
    fn phase(&mut self) -> Phase {
        let keyword = name_of(self.bump());
        let mut phase = Phase { span: keyword.span.clone(), keyword, count: None, steps: Vec::new(), broken: false };
        if phase.keyword.text == "block" && self.at("every") {
            self.bump();
        }
        if !self.at("{") {
            phase.count = self.take(expr);
            phase.broken = phase.count.is_none();
        }
        if !self.at("{") {
            if !phase.broken {
                self.fault(Fault::at(self.rest, "an operator or `{`"));
            }
            phase.broken = true;
            self.skip_entry(false);
            return phase;
        }
        let open = self.bump().span.clone();
        while !self.closes(&open) {
            if matches!(self.peek().kind, Kind::Comma | Kind::Semicolon) {
                self.bump();
                continue;
            }
            match self.take(step) {
                Some(step) => phase.steps.push(step),
                None => {
                    phase.broken = true;
                    self.skip_entry(true);
                    continue;
                }
            }
            if !self.entry_ends() && self.peek().kind != Kind::Semicolon {
                phase.broken = true;
                self.fault(Fault::at(self.rest, "`;`, a new line or `}`"));
                self.skip_entry(true);
            }
        }
        phase.span.end = self.last.end;
        phase
    }
}

impl Phase {
    fn broken(at: &Span) -> Self {
        let keyword = Name { text: "repeat".into(), span: at.clone() };
        Self { keyword, count: None, steps: Vec::new(), span: at.clone(), broken: true }
    }
}

/// `loop(v)`
fn placement(input: Input<'_>) -> Parsed<'_, (Name, Expr)> {
    let (rest, word) = kind(Kind::Word, "a placement")(input)?;
    let (rest, size) = delimited(symbol("(", "`(`"), expr, symbol(")", "`)`")).parse(rest)?;
    Ok((rest, (name_of(word), size)))
}

/// `F = groups(P) chunks ascending`
fn sequence(input: Input<'_>) -> Parsed<'_, Sequence> {
    let (rest, action) = kind(Kind::Word, "an action: F, B, I or W")(input)?;
    let (rest, _) = kind(Kind::Assign, "`=`")(rest)?;
    let (rest, by) = kind(Kind::Word, "`groups`")(rest)?;
    let (rest, size) = delimited(symbol("(", "`(`"), expr, symbol(")", "`)`")).parse(rest)?;
    let (rest, what) = kind(Kind::Word, "`chunks`")(rest)?;
    let (rest, direction) = kind(Kind::Word, "`ascending` or `descending`")(rest)?;
    let [action, by, what, direction] = [action, by, what, direction].map(name_of);
    Ok((rest, Sequence { action, by, size, what, direction }))
}

/// `W when n >= 3`, `F0 at s`
fn step(input: Input<'_>) -> Parsed<'_, Step> {
    let (mut rest, action) = kind(Kind::Word, "an action: F, B, I or W")(input)?;
    let (mut when, mut at) = (None, None);
    if let [word, ..] = rest
        && word.text == "at"
    {
        let (after, time) = expr(&rest[1..])?;
        rest = after;
        at = Some(time);
    }
    if let [word, ..] = rest
        && word.text == "when"
    {
        let (after, condition) = cond(&rest[1..])?;
        rest = after;
        when = Some(condition);
    }
    let taken = &input[..input.len() - rest.len()];
    Ok((rest, Step { action: name_of(action), when, at, span: extent(taken) }))
}

fn cond(input: Input<'_>) -> Parsed<'_, Cond> {
    let (rest, (left, op, right)) = (expr, kind(Kind::Compare, "`<`, `<=`, `==`, `>=` or `>`"), expr).parse(input)?;
    Ok((rest, Cond { left, op: comparison(op.text), right }))
}

/// Sums of products, left to right.
pub(super) fn expr(input: Input<'_>) -> Parsed<'_, Expr> {
    let (rest, found) = sum(input)?;
    if input.len() - rest.len() > EXPR_TOKENS_MAX {
        let message = format!("an expression of more than {EXPR_TOKENS_MAX} tokens");
        return Err(nom::Err::Failure(Fault::special(input, "P0106", message)));
    }
    Ok((rest, found))
}

fn sum(input: Input<'_>) -> Parsed<'_, Expr> {
    let sign =
        alt((symbol("+", "an operator").map(|_| BinaryOp::Add), symbol("-", "an operator").map(|_| BinaryOp::Sub)));
    chain(product, sign, input)
}

fn product(input: Input<'_>) -> Parsed<'_, Expr> {
    let sign =
        alt((symbol("*", "an operator").map(|_| BinaryOp::Mul), symbol("/", "an operator").map(|_| BinaryOp::Div)));
    chain(atom, sign, input)
}

/// `operand (operator operand)*`, grouped to the left. Stops early at the length limit, which [`expr`] then reports.
fn chain<'t>(
    operand: fn(Input<'t>) -> Parsed<'t, Expr>,
    mut operator: impl Parser<Input<'t>, Output = BinaryOp, Error = Fault>,
    input: Input<'t>,
) -> Parsed<'t, Expr> {
    let (mut rest, mut left) = operand(input)?;
    while input.len() - rest.len() <= EXPR_TOKENS_MAX {
        let Ok((after, op)) = operator.parse(rest) else { break };
        let (after, right) = operand(after)?;
        let span = left.span.start..right.span.end;
        left = Expr { kind: ExprKind::Binary(op, Box::new(left), Box::new(right)), span };
        rest = after;
    }
    Ok((rest, left))
}

fn atom(input: Input<'_>) -> Parsed<'_, Expr> {
    alt((literal, call, variable, delimited(symbol("(", "`(`"), expr, symbol(")", "`)`")))).parse(input)
}

fn literal(input: Input<'_>) -> Parsed<'_, Expr> {
    let (rest, minus) = opt(symbol("-", "")).parse(input)?;
    let (rest, token) = kind(Kind::Number, "a number")(rest)?;
    let taken = &input[..input.len() - rest.len()];
    let number = token.text.replace('_', "").parse::<i32>().map_err(|_| {
        let message = format!("`{}` is not a whole number below 2^31", token.text);
        nom::Err::Failure(Fault::special(taken, "P0105", message))
    })?;
    let number = i64::from(number) * if minus.is_some() { -1 } else { 1 };
    Ok((rest, Expr { kind: ExprKind::Number(number), span: extent(taken) }))
}

fn variable(input: Input<'_>) -> Parsed<'_, Expr> {
    let (rest, token) = kind(Kind::Word, "a variable")(input)?;
    Ok((rest, Expr { kind: ExprKind::Name(token.text.into()), span: token.span.clone() }))
}

/// `min(a, b)`
fn call(input: Input<'_>) -> Parsed<'_, Expr> {
    let (rest, name) = kind(Kind::Word, "a variable")(input)?;
    let name = name_of(name);
    let (mut rest, _) = symbol("(", "`(`")(rest)?;
    let mut arguments = Vec::new();
    loop {
        let (after, argument) = expr(rest).map_err(to_failure)?;
        arguments.push(argument);
        match after.first() {
            Some(token) if token.text == "," => rest = &after[1..],
            _ => {
                let (after, _) = symbol(")", "`,` or `)`")(after).map_err(to_failure)?;
                let taken = &input[..input.len() - after.len()];
                return Ok((after, Expr { kind: ExprKind::Call(name, arguments), span: extent(taken) }));
            }
        }
    }
}
