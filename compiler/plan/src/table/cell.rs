//! The text of a cell.

use super::Dialect;
use std::fmt;

/// What an action does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Verb {
    F,
    I,
    W,
    B,
    /// Optimizer update: an extension.
    U,
    SendF,
    RecvF,
    SendB,
    RecvB,
    Unshard,
    Reshard,
    ReduceGrad,
}

const NAMES: [(&str, Verb); 12] = [
    ("F", Verb::F),
    ("I", Verb::I),
    ("W", Verb::W),
    ("B", Verb::B),
    ("U", Verb::U),
    ("SEND_F", Verb::SendF),
    ("RECV_F", Verb::RecvF),
    ("SEND_B", Verb::SendB),
    ("RECV_B", Verb::RecvB),
    ("UNSHARD", Verb::Unshard),
    ("RESHARD", Verb::Reshard),
    ("REDUCE_GRAD", Verb::ReduceGrad),
];

impl Verb {
    /// As tables write it (in the new dialect).
    pub fn name(self) -> &'static str {
        NAMES.iter().find(|(_, verb)| *verb == self).map_or("", |(name, _)| name)
    }

    pub fn is_transfer(self) -> bool {
        matches!(self, Verb::SendF | Verb::RecvF | Verb::SendB | Verb::RecvB)
    }

    /// About sharded data parallelism: carries no micro-batch.
    pub fn is_sharding(self) -> bool {
        matches!(self, Verb::Unshard | Verb::Reshard | Verb::ReduceGrad)
    }
}

/// One action of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Action {
    pub stage: u32,
    pub verb: Verb,
    /// Micro-batch; for [`Verb::U`] the update; 0 where there is none.
    pub number: u32,
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.stage, self.verb.name())?;
        if self.verb.is_sharding() { Ok(()) } else { write!(f, "{}", self.number) }
    }
}

/// A cell as written: the letters are not yet interpreted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    pub stage: u32,
    pub letters: Letters,
    pub number: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Letters {
    Verb(Verb),
    /// Whole backward pass of the old dialect.
    Bw,
}

impl Written {
    /// The action in `dialect`; none where that has no such letters.
    pub fn action(&self, dialect: Dialect) -> Option<Action> {
        let verb = match (self.letters, dialect) {
            (Letters::Bw, Dialect::Old) => Verb::B,
            (Letters::Verb(Verb::B), Dialect::Old) => Verb::I,
            (Letters::Bw, Dialect::New) | (Letters::Verb(Verb::I), Dialect::Old) => return None,
            (Letters::Verb(verb), _) => verb,
        };
        Some(Action { stage: self.stage, verb, number: self.number })
    }
}

/// Why a cell is not understood, and what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    pub what: String,
    pub help: &'static str,
}

fn fault<T>(what: impl Into<String>, help: &'static str) -> Result<T, Fault> {
    Err(Fault { what: what.into(), help })
}

/// The actions of a cell that is not blank: one, or two for an overlapped pair.
///
/// # Errors
/// What is not understood: nothing in a cell is passed over.
pub fn parse(text: &str) -> Result<Vec<Written>, Fault> {
    let text = text.trim();
    let Some(inner) = text.strip_prefix('(') else { return Ok(vec![one(text)?]) };
    let help = "write a pair as `(0F7;1B3)OVERLAP_F_B`";
    let Some((pair, name)) = inner.split_once(')') else { return fault("`(` is never closed", help) };
    if name != "OVERLAP_F_B" {
        return fault(format!("`{}` does not name a pair of actions", shown(name)), help);
    }
    let parts: Vec<Written> = pair.split(';').map(|part| one(part.trim())).collect::<Result<_, _>>()?;
    let forward = |w: &Written| w.letters == Letters::Verb(Verb::F);
    let backward = |w: &Written| matches!(w.letters, Letters::Bw | Letters::Verb(Verb::B | Verb::I));
    match &parts[..] {
        [a, b] if (forward(a) && backward(b)) || (backward(a) && forward(b)) => Ok(parts),
        _ => fault("an overlapped pair is one forward and one backward pass", help),
    }
}

fn one(text: &str) -> Result<Written, Fault> {
    const FORM: &str = "a cell is a stage, an action and a micro-batch, as in `1F0`; a blank cell is an idle step";
    let (stage, rest) = digits(text)?;
    let Some(stage) = stage else { return fault(format!("`{}` does not begin with a stage", shown(text)), FORM) };
    let end = rest.find(|c: char| !(c.is_ascii_uppercase() || c == '_')).unwrap_or(rest.len());
    let (name, rest) = rest.split_at(end);
    let letters = match NAMES.iter().find(|(known, _)| *known == name) {
        Some((_, verb)) => Letters::Verb(*verb),
        None if name == "BW" => Letters::Bw,
        None if name.is_empty() => return fault(format!("`{}` names no action", shown(text)), FORM),
        None => {
            let help = "actions are F, B, I, W, U, SEND_F, RECV_F, SEND_B, RECV_B, UNSHARD, RESHARD and REDUCE_GRAD";
            return fault(format!("there is no action `{}`", shown(name)), help);
        }
    };
    let (number, rest) = digits(rest)?;
    if !rest.is_empty() {
        return fault(format!("`{}` is left over after the action", shown(rest)), "separate cells by commas");
    }
    match (letters, number) {
        (Letters::Verb(verb), Some(_)) if verb.is_sharding() => {
            fault(format!("{name} carries no micro-batch"), "leave the number out")
        }
        (Letters::Verb(verb), None) if verb.is_sharding() => Ok(Written { stage, letters, number: 0 }),
        (_, None) => fault(format!("`{}` names no micro-batch", shown(text)), FORM),
        (_, Some(number)) => Ok(Written { stage, letters, number }),
    }
}

/// The number that `text` begins with, and what follows it.
fn digits(text: &str) -> Result<(Option<u32>, &str), Fault> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, rest) = text.split_at(end);
    match digits.parse() {
        _ if digits.is_empty() => Ok((None, rest)),
        Ok(number) => Ok((Some(number), rest)),
        Err(_) => fault(format!("the number {} is too large", shown(digits)), "stages and micro-batches count from 0"),
    }
}

/// The beginning of a text, without what could not be seen.
fn shown(text: &str) -> String {
    text.chars().take(24).map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}
