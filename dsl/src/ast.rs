//! The syntax tree: what was written, with the place of everything. Names are not looked up yet.
//!
//! A part that could not be read is kept as far as it goes (`Invalid`, `broken`), so that later checks do not report
//! as missing what is only misspelt.

use crate::diag::Span;
use crate::schedule::{BinaryOp, CmpOp};

#[derive(Clone, Debug, Default, PartialEq)]
pub struct File {
    pub items: Vec<Item>,
    /// Some text at the top level could not be read.
    pub broken: bool,
    /// Length of the text, bytes.
    pub len: usize,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Item {
    /// `machine { … }`, `model gpt { … }`.
    Block(Block),
    /// `optimizer = …`.
    Entry(Entry),
    Schedule(Schedule),
}

/// A word and its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name {
    pub text: String,
    pub span: Span,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Block {
    pub keyword: Name,
    /// `gpt` in `model gpt { … }`.
    pub name: Option<Name>,
    pub body: Body,
}

/// What stands between braces.
#[derive(Clone, Debug, PartialEq)]
pub struct Body {
    pub entries: Vec<Entry>,
    /// From `{` to `}`, both included.
    pub span: Span,
    /// Some text between the braces could not be read.
    pub broken: bool,
}

/// `key = value`, `key <= value`, `key { … }`, `key every 4 updates`, `group SELECTOR = value`.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    pub key: Name,
    /// What stands between `group` and the sign.
    pub selector: Option<Value>,
    pub relation: Relation,
    pub value: Value,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Relation {
    /// `=`
    Assign,
    /// `<=` and its like.
    Compare(CmpOp),
    /// The value follows without a sign.
    Beside,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Value {
    pub kind: ValueKind,
    pub span: Span,
}

#[derive(Clone, Debug, PartialEq)]
pub enum ValueKind {
    Number(Number),
    Word(String),
    /// `cosine(1e-3, warmup = 20)`
    Call(Name, Vec<Argument>),
    /// `adamw { … }`; without a name: `{ … }` after a key.
    Record(Option<Name>, Body),
    /// `(a, b)`
    Tuple(Vec<Value>),
    /// `[a, b]`
    List(Vec<Value>),
    /// `block 3` or, half open, `block 0..2`.
    Indexed(Name, Number, Option<Number>),
    /// `every 4 updates`
    Every(Number, Name),
    /// `"profile.csv"`, without its quotes.
    Text(String),
    /// Could not be read; reported already.
    Invalid,
}

/// A number as written, its unit not yet applied.
#[derive(Clone, Debug, PartialEq)]
pub struct Number {
    pub value: f64,
    /// Exact, when the number is whole and fits.
    pub whole: Option<i64>,
    pub unit: Option<Name>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Argument {
    pub name: Option<Name>,
    /// [`Relation::Beside`] where there is no name.
    pub relation: Relation,
    pub value: Value,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    pub name: Name,
    pub clauses: Vec<Clause>,
    pub span: Span,
    /// Some text between the braces could not be read.
    pub broken: bool,
}

/// `place linear`, `flush every accumulate`, `order { … }`.
#[derive(Clone, Debug, PartialEq)]
pub struct Clause {
    pub key: Name,
    pub kind: ClauseKind,
    pub span: Span,
}

#[derive(Clone, Debug, PartialEq)]
pub enum ClauseKind {
    /// The words after the key, and the place of what follows them if it is not a word.
    Words(Vec<Name>, Option<Span>),
    /// `place loop(v)`
    Call(Name, Expr),
    /// `sequence F = groups(P) chunks ascending`
    Sequence(Sequence),
    Order(Vec<Phase>),
    /// Could not be read; reported already.
    Invalid,
}

/// `F = groups(P) chunks ascending`, after `sequence`.
#[derive(Clone, Debug, PartialEq)]
pub struct Sequence {
    pub action: Name,
    /// `groups`
    pub by: Name,
    pub size: Expr,
    /// `chunks`
    pub what: Name,
    /// `ascending`
    pub direction: Name,
}

/// `warmup P - 1 - s { F }`
#[derive(Clone, Debug, PartialEq)]
pub struct Phase {
    pub keyword: Name,
    pub count: Option<Expr>,
    pub steps: Vec<Step>,
    pub span: Span,
    /// Some text of it could not be read.
    pub broken: bool,
}

/// `W when n >= 3`, `F0 at s`
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    pub action: Name,
    pub when: Option<Cond>,
    pub at: Option<Expr>,
    pub span: Span,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Cond {
    pub left: Expr,
    pub op: CmpOp,
    pub right: Expr,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Expr {
    pub kind: ExprKind,
    pub span: Span,
}

#[derive(Clone, Debug, PartialEq)]
pub enum ExprKind {
    Number(i64),
    Name(String),
    Binary(BinaryOp, Box<Expr>, Box<Expr>),
    /// `min(a, b)`
    Call(Name, Vec<Expr>),
}

impl ValueKind {
    /// What it is, for messages: `a list`.
    pub fn describe(&self) -> String {
        match self {
            Self::Number(_) => "a number".into(),
            Self::Word(word) => format!("the word `{word}`"),
            Self::Call(name, _) => format!("`{}(…)`", name.text),
            Self::Record(Some(name), _) => format!("`{} {{ … }}`", name.text),
            Self::Record(None, _) => "a block".into(),
            Self::Tuple(_) => "a tuple".into(),
            Self::List(_) => "a list".into(),
            Self::Indexed(name, ..) => format!("`{} …`", name.text),
            Self::Every(..) => "`every …`".into(),
            Self::Text(text) => format!("`\"{text}\"`"),
            Self::Invalid => "something unreadable".into(),
        }
    }
}
