//! Text to tokens. Never fails: what is not in the language becomes a token of its own, reported here.

use crate::diag::{Diagnostic, Span};
use nom::branch::alt;
use nom::bytes::complete::{tag, take_while, take_while1};
use nom::character::complete::{digit1, multispace1, not_line_ending, one_of, satisfy};
use nom::combinator::{map, opt, recognize, value};
use nom::multi::many0_count;
use nom::{IResult, Parser};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Word,
    Number,
    /// `{`, `(`, `[`
    Open,
    /// `}`, `)`, `]`
    Close,
    Comma,
    Semicolon,
    /// `=`
    Assign,
    /// `<`, `<=`, `==`, `>=`, `>`
    Compare,
    /// `+`, `-`, `*`, `/`
    Operator,
    Percent,
    /// `..`
    Dots,
    /// `"…"`, only where `profile(` or `group` stands before it.
    Text,
    Unknown,
    End,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Token<'t> {
    pub kind: Kind,
    pub text: &'t str,
    pub span: Span,
    /// First of its line.
    pub starts_line: bool,
}

/// Brackets may stand this deep in each other.
const DEPTH_MAX: usize = 32;

/// The tokens of `text`, always closed by one [`Kind::End`].
pub fn lex(text: &str) -> (Vec<Token<'_>>, Vec<Diagnostic>) {
    let mut tokens = Vec::new();
    let mut found = Vec::new();
    let mut depth = 0_usize;
    let mut rest = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut starts_line = true;
    loop {
        let after = trivia(rest);
        starts_line |= rest[..rest.len() - after.len()].contains('\n');
        let start = text.len() - after.len();
        let Ok((next, mut kind)) = token(after) else {
            tokens.push(Token { kind: Kind::End, text: "", span: start..start, starts_line: true });
            return (tokens, found);
        };
        let span = start..text.len() - next.len();
        if kind == Kind::Unknown && is_text(&tokens, &text[span.clone()]) {
            kind = Kind::Text;
        }
        let token = Token { kind, text: &text[span.clone()], span, starts_line };
        match kind {
            Kind::Open => depth += 1,
            Kind::Close => depth = depth.saturating_sub(1),
            Kind::Unknown => found.push(unknown(&token)),
            _ => {}
        }
        if depth > DEPTH_MAX {
            found.push(too_deep(&token));
            tokens.push(Token { kind: Kind::End, text: "", span: token.span, starts_line: true });
            return (tokens, found);
        }
        tokens.push(token);
        starts_line = false;
        rest = next;
    }
}

/// Whether this is the name of a file, or a pattern of parameters: everything else is written without quotes.
fn is_text(before: &[Token<'_>], text: &str) -> bool {
    let quoted = text.len() >= 2 && text.starts_with('"') && text.ends_with('"');
    let path = matches!(before, [.., call, open] if call.text == "profile" && open.text == "(");
    // `group "a"`, `group [a, "b"`
    let items = before.iter().rev().take_while(|t| matches!(t.kind, Kind::Word | Kind::Text | Kind::Comma)).count();
    let group = match before {
        [.., group] if group.text == "group" => true,
        _ => matches!(&before[..before.len() - items], [.., group, open] if group.text == "group" && open.text == "["),
    };
    quoted && (path || group)
}

fn unknown(token: &Token<'_>) -> Diagnostic {
    let shown: String = token.text.chars().take(24).flat_map(printable).collect();
    let found = Diagnostic::error("P0102", token.span.clone(), format!("`{shown}` is not part of the language"));
    let inside = token.text.trim_matches(['"', '\'', '“', '”']);
    match token.text.chars().next() {
        Some('"' | '\'' | '“' | '”') if word(inside).is_ok_and(|(rest, _)| rest.is_empty()) => {
            found.help(format!("names are written without quotes: `{inside}`"))
        }
        Some('"' | '\'' | '“' | '”') => found.help("names are written without quotes"),
        Some('#') => found.help("comments start with `//`"),
        _ => found.help("remove it; text that is not meant for the compiler goes into a comment: `// …`"),
    }
}

/// The character, or its code where it could not be seen.
fn printable(c: char) -> impl Iterator<Item = char> {
    let hidden = c.is_control() || c.is_whitespace() || ('\u{200b}'..='\u{200f}').contains(&c) || c == '\u{feff}';
    let code = hidden.then(|| c.escape_unicode());
    code.into_iter().flatten().chain((!hidden).then_some(c))
}

fn too_deep(token: &Token<'_>) -> Diagnostic {
    Diagnostic::error("P0106", token.span.clone(), format!("more than {DEPTH_MAX} brackets inside each other"))
        .here("the rest of the file is not read")
        .help("close brackets that are left open, or flatten the value")
}

/// `text` without the white space and comments that it starts with.
fn trivia(text: &str) -> &str {
    let blanks: IResult<&str, usize> =
        many0_count(alt((multispace1, recognize((tag("//"), not_line_ending))))).parse(text);
    blanks.map_or(text, |(rest, _)| rest)
}

/// One token; an error only at the end of the text.
fn token(text: &str) -> IResult<&str, Kind> {
    let unknown = alt((quoted, recognize(take_while1(is_foreign)), recognize(satisfy(|_| true))));
    alt((
        value(Kind::Word, rate),
        value(Kind::Word, word),
        value(Kind::Number, number),
        symbol,
        map(unknown, |_| Kind::Unknown),
    ))
    .parse(text)
}

/// `TFLOP/s`, `GB/s`: units with a stroke, as one word. `P/s` stays a quotient.
fn rate(text: &str) -> IResult<&str, &str> {
    let prefix = opt(one_of("KMGTP"));
    let (rest, found) = recognize((prefix, opt(tag("i")), alt((tag("FLOP/s"), tag("B/s"))))).parse(text)?;
    let goes_on = rest.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_');
    let bare = found == "B/s";
    if goes_on || bare {
        Err(nom::Err::Error(nom::error::Error::new(text, nom::error::ErrorKind::Tag)))
    } else {
        Ok((rest, found))
    }
}

fn word(text: &str) -> IResult<&str, &str> {
    let first = satisfy(|c| c.is_ascii_alphabetic() || c == '_');
    recognize((first, take_while(|c: char| c.is_ascii_alphanumeric() || c == '_'))).parse(text)
}

/// `12`, `1_000`, `0.5`, `1e-3`; in `0..2` only the `0`.
fn number(text: &str) -> IResult<&str, &str> {
    let exponent = (one_of("eE"), opt(one_of("+-")), digit1);
    recognize((digits, opt((tag("."), digits)), opt(exponent))).parse(text)
}

fn digits(text: &str) -> IResult<&str, &str> {
    recognize((digit1, take_while(|c: char| c.is_ascii_digit() || c == '_'))).parse(text)
}

fn symbol(text: &str) -> IResult<&str, Kind> {
    alt((
        value(Kind::Compare, alt((tag("<="), tag(">="), tag("=="), tag("<"), tag(">")))),
        value(Kind::Assign, tag("=")),
        value(Kind::Dots, tag("..")),
        value(Kind::Open, recognize(one_of("{(["))),
        value(Kind::Close, recognize(one_of("})]"))),
        value(Kind::Comma, tag(",")),
        value(Kind::Semicolon, tag(";")),
        value(Kind::Percent, tag("%")),
        value(Kind::Operator, recognize(one_of("+-*/"))),
    ))
    .parse(text)
}

/// A quoted text on one line, taken as one foreign token.
fn quoted(text: &str) -> IResult<&str, &str> {
    recognize((tag("\""), take_while(|c| c != '"' && c != '\n'), opt(tag("\"")))).parse(text)
}

/// Characters that no token contains.
fn is_foreign(c: char) -> bool {
    !c.is_ascii() || (c.is_ascii_control() && !c.is_ascii_whitespace()) || "!#$&'?@\\^`|~:".contains(c)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kinds(text: &str) -> Vec<(Kind, &str)> {
        lex(text).0.iter().map(|t| (t.kind, t.text)).collect()
    }

    #[test]
    fn ranges_units_and_exponents() {
        use Kind::*;
        let expected = [(Number, "0"), (Dots, ".."), (Number, "2"), (Number, "1e-3"), (Number, "128"), (Word, "MiB")];
        assert_eq!(kinds("0..2 1e-3 128MiB")[..6], expected);
        assert_eq!(kinds("5%<=x//c")[..4], [(Number, "5"), (Percent, "%"), (Compare, "<="), (Word, "x")]);
        assert_eq!(kinds("400 TFLOP/s, GiB/s")[1..4], [(Word, "TFLOP/s"), (Comma, ","), (Word, "GiB/s")]);
        assert_eq!(kinds("P/s B/s GB/sec")[..3], [(Word, "P"), (Operator, "/"), (Word, "s")]);
        assert_eq!(kinds("GB/sec")[..2], [(Word, "GB"), (Operator, "/")]);
        assert_eq!(kinds("1.5.2")[..2], [(Number, "1.5"), (Unknown, ".")]);
    }

    #[test]
    fn spans_cover_characters() {
        let (tokens, found) = lex("\u{feff}a = “b”\r\nc");
        assert_eq!(found.len(), 2);
        assert_eq!(found[0].labels[0].span, 7..10);
        let c = &tokens[tokens.len() - 2];
        assert!(c.starts_line && c.text == "c");
    }
}
