//! Values: numbers with units, words, calls, tuples, lists, ranges. Records (`adamw { … }`) recover and are read by
//! `block`.

use super::{Fault, Input, Parsed, kind, name, name_of, symbol};
use crate::ast::{Argument, Number, Relation, Value, ValueKind};
use crate::diag::Span;
use crate::lex::{Kind, Token};
use crate::schedule::CmpOp;
use nom::Parser;
use nom::branch::alt;
use nom::combinator::opt;

/// Any value.
pub fn value(input: Input<'_>) -> Parsed<'_, Value> {
    let expected = |_| Fault::at(input, "a value");
    match input.first().map(|t| (t.kind, t.text)) {
        Some((Kind::Word, "every")) => spanned(every)(input),
        Some((Kind::Word, _)) => spanned(alt((call, indexed, word)))(input),
        Some((Kind::Text, _)) => spanned(text)(input),
        Some((Kind::Open, "[")) => spanned(list)(input),
        Some((Kind::Open, "(")) => spanned(tuple)(input),
        Some((Kind::Number, _) | (Kind::Operator, "-")) => spanned(measure)(input),
        _ => Err(nom::Err::Error(expected(()))),
    }
}

/// Adds the place of what was read.
fn spanned<'t>(
    mut parser: impl Parser<Input<'t>, Output = ValueKind, Error = Fault>,
) -> impl FnMut(Input<'t>) -> Parsed<'t, Value> {
    move |input: Input<'t>| {
        let (rest, kind) = parser.parse(input)?;
        let span = extent(&input[..input.len() - rest.len()]);
        Ok((rest, Value { kind, span }))
    }
}

/// From the first to the last token.
pub fn extent(tokens: Input<'_>) -> Span {
    match tokens {
        [] => 0..0,
        [first, .., last] => first.span.start..last.span.end,
        [only] => only.span.clone(),
    }
}

/// A number that may carry a sign and a unit.
fn measure(input: Input<'_>) -> Parsed<'_, ValueKind> {
    number(input).map(|(rest, number)| (rest, ValueKind::Number(number)))
}

fn number(input: Input<'_>) -> Parsed<'_, Number> {
    let (rest, mut number) = plain_number(input)?;
    match rest {
        [unit, next, ..] if unit.kind == Kind::Word && !unit.starts_line && !starts_entry(next) => {
            number.unit = Some(name_of(unit));
            Ok((&rest[1..], number))
        }
        [unit, ..] if unit.kind == Kind::Percent => {
            number.unit = Some(name_of(unit));
            Ok((&rest[1..], number))
        }
        _ => Ok((rest, number)),
    }
}

/// Whether the word before this token is a key and no unit.
fn starts_entry(next: &Token<'_>) -> bool {
    matches!(next.kind, Kind::Assign | Kind::Compare) || (next.text == "{" && !next.starts_line)
}

/// A number that may carry a sign.
fn plain_number(input: Input<'_>) -> Parsed<'_, Number> {
    let (rest, minus) = opt(symbol("-", "`-`")).parse(input)?;
    let (rest, token) = kind(Kind::Number, "a number")(rest)?;
    let digits = token.text.replace('_', "");
    let sign = if minus.is_some() { -1.0 } else { 1.0 };
    let value = digits.parse::<f64>().unwrap_or(f64::INFINITY) * sign;
    if !value.is_finite() {
        let message = format!("the number {} is too large", token.text);
        return Err(nom::Err::Failure(Fault::special(input, "P0105", message)));
    }
    let whole = match digits.parse::<i64>() {
        Ok(exact) if minus.is_some() => Some(-exact),
        Ok(exact) => Some(exact),
        // What a float holds exactly: below 2^53.
        Err(_) if value.fract() == 0.0 && value.abs() < 9_007_199_254_740_992.0 => Some(value as i64),
        Err(_) => None,
    };
    Ok((rest, Number { value, whole, unit: None }))
}

fn word(input: Input<'_>) -> Parsed<'_, ValueKind> {
    name.map(|name| ValueKind::Word(name.text)).parse(input)
}

/// `"profile.csv"`
fn text(input: Input<'_>) -> Parsed<'_, ValueKind> {
    let (rest, token) = kind(Kind::Text, "a text in quotes")(input)?;
    Ok((rest, ValueKind::Text(token.text.trim_matches('"').to_owned())))
}

/// `every 4 updates`
pub fn every(input: Input<'_>) -> Parsed<'_, ValueKind> {
    let (rest, (_, count, what)) = (symbol("every", "`every`"), plain_number, name).parse(input)?;
    Ok((rest, ValueKind::Every(count, what)))
}

/// `block 3`, `block 0..2`
fn indexed(input: Input<'_>) -> Parsed<'_, ValueKind> {
    let (rest, name) = name(input)?;
    let (rest, from) = plain_number(rest)?;
    let (rest, dots) = opt(kind(Kind::Dots, "`..`")).parse(rest)?;
    if dots.is_none() {
        return Ok((rest, ValueKind::Indexed(name, from, None)));
    }
    let (rest, to) = plain_number(rest).map_err(to_failure)?;
    Ok((rest, ValueKind::Indexed(name, from, Some(to))))
}

/// An error that no alternative may hide.
pub fn to_failure(error: nom::Err<Fault>) -> nom::Err<Fault> {
    match error {
        nom::Err::Error(fault) => nom::Err::Failure(fault),
        other => other,
    }
}

/// `cosine(1e-3, warmup = 20)`, `search(memory <= 2x)`
fn call(input: Input<'_>) -> Parsed<'_, ValueKind> {
    let (rest, name) = name(input)?;
    let (rest, arguments) = sequence("(", ")", argument)(rest)?;
    Ok((rest, ValueKind::Call(name, arguments)))
}

fn argument(input: Input<'_>) -> Parsed<'_, Argument> {
    match input {
        [word, sign, ..] if word.kind == Kind::Word && matches!(sign.kind, Kind::Assign | Kind::Compare) => {
            let (rest, relation) = relation(&input[1..])?;
            let (rest, value) = value(rest)?;
            Ok((rest, Argument { name: Some(name_of(word)), relation, value }))
        }
        _ => value.map(|value| Argument { name: None, relation: Relation::Beside, value }).parse(input),
    }
}

fn list(input: Input<'_>) -> Parsed<'_, ValueKind> {
    sequence("[", "]", value).map(ValueKind::List).parse(input)
}

fn tuple(input: Input<'_>) -> Parsed<'_, ValueKind> {
    sequence("(", ")", value).map(ValueKind::Tuple).parse(input)
}

/// `item, item` between two brackets; a comma may follow the last. Past the opening bracket every fault is final.
fn sequence<'t, T>(
    open: &'static str,
    close: &'static str,
    item: impl Fn(Input<'t>) -> Parsed<'t, T>,
) -> impl Fn(Input<'t>) -> Parsed<'t, Vec<T>> {
    move |input: Input<'t>| {
        let (mut rest, opening) = symbol(open, if open == "(" { "`(`" } else { "`[`" })(input)?;
        let mut items = Vec::new();
        loop {
            if let Ok((after, _)) = symbol(close, "")(rest) {
                return Ok((after, items));
            }
            never_closed(rest, opening)?;
            let (after, found) = item(rest).map_err(to_failure)?;
            items.push(found);
            rest = match after.first() {
                Some(token) if token.kind == Kind::Comma => &after[1..],
                Some(token) if token.text == close => after,
                _ => {
                    never_closed(after, opening)?;
                    let expected = if close == ")" { "`,` or `)`" } else { "`,` or `]`" };
                    return Err(nom::Err::Failure(Fault::at(after, expected)));
                }
            };
        }
    }
}

/// Whether a line starts here with `key =`, as no line of a list does.
pub fn next_entry(input: Input<'_>) -> bool {
    matches!(input, [key, sign, ..] if key.starts_line && key.kind == Kind::Word && sign.kind == Kind::Assign)
}

/// A failure at the opening bracket when the text ends inside it, or the next entry starts.
fn never_closed(input: Input<'_>, opening: &Token<'_>) -> Result<(), nom::Err<Fault>> {
    if input.iter().any(|t| t.kind != Kind::End) && !(opening.text == "[" && next_entry(input)) {
        return Ok(());
    }
    let mut fault = Fault::special(input, "P0103", format!("`{}` is never closed", opening.text));
    fault.span = opening.span.clone();
    Err(nom::Err::Failure(fault))
}

/// The fault of two entries on a line with nothing between them.
pub fn unseparated(input: Input<'_>) -> Fault {
    match input.first() {
        Some(token) if token.kind == Kind::Word => {
            let message = format!("a comma or a new line is missing before `{}`", token.text);
            Fault::special(input, "P0107", message)
        }
        _ => Fault::at(input, "`,`, a new line or `}`"),
    }
}

/// The sign after a key; none before `{` and `every`.
pub fn relation(input: Input<'_>) -> Parsed<'_, Relation> {
    match input.first() {
        Some(token) if token.kind == Kind::Assign => Ok((&input[1..], Relation::Assign)),
        Some(token) if token.kind == Kind::Compare => Ok((&input[1..], Relation::Compare(comparison(token.text)))),
        Some(token) if token.text == "{" || token.text == "every" => Ok((input, Relation::Beside)),
        _ => Err(nom::Err::Error(Fault::at(input, "`=`, `<=` or `{`"))),
    }
}

/// The operator of a [`Kind::Compare`] token.
pub fn comparison(text: &str) -> CmpOp {
    match text {
        "<" => CmpOp::Lt,
        "<=" => CmpOp::Le,
        ">=" => CmpOp::Ge,
        ">" => CmpOp::Gt,
        _ => CmpOp::Eq,
    }
}
