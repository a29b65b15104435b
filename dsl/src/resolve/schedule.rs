//! `schedule NAME { … }` to [`Schedule`].

use super::CHUNKS_MAX;
use super::{Context, not_yet, twice};
use crate::ast::{self, Clause, ClauseKind, ExprKind};
use crate::diag::{Diagnostic, Span};
use crate::schedule::{
    Action, Backward, BinaryOp, Chunks, Cond, Expr, Phase, PhaseKind, Place, Schedule, Sequence, Step, Update, Var,
};
use crate::suggest::{either, nearest};

const CLAUSES: [&str; 7] = ["place", "backward", "flush", "update", "weights", "sequence", "order"];
const CLAUSES_LATER: [&str; 5] = ["prefer", "table", "chunks", "boundary", "overlap"];
const FLUSH: &str = "flush every accumulate";
const LOCAL: &str = "update local every accumulate";

/// What an expression may speak of where it stands.
#[derive(Clone, Copy)]
struct Scope {
    update: Option<Update>,
    rounds: bool,
}

/// None if a part is missing or wrong; that is reported.
pub(crate) fn lower(cx: &mut Context, written: &ast::Schedule, library: bool) -> Option<Schedule> {
    let before = cx.found.len();
    let mut clauses = Clauses { all: Vec::new(), missing_known: written.broken };
    for clause in &written.clauses {
        clauses.add(cx, clause);
    }
    let place = place(cx, &clauses, written);
    let backward = backward(cx, &clauses, written);
    let update = update(cx, &clauses, written);
    let weights = clauses.find("weights").and_then(|clause| super::weights::clause(cx, clause));
    let sequences = sequences(cx, &clauses, backward, update);
    let order =
        match clauses.need(cx, "order", "order { warmup P - 1 - s { F }  repeat { F; B }  drain { B } }", written) {
            Some(clause) => order(cx, clause, backward, update).map(|phases| (clause, phases)),
            None => None,
        };
    if cx.found.len() > before {
        return None;
    }
    let (clause, order) = order?;
    let (place, backward, update) = (place?, backward?, update?);
    let (name, span) = (written.name.text.clone(), written.span.clone());
    let schedule = Schedule { name, place, backward, update, weights, sequences: sequences?, order, span, library };
    super::chunks::check(cx, &schedule, &clause.key.span);
    (cx.found.len() == before).then_some(schedule)
}

struct Clauses<'a> {
    all: Vec<&'a Clause>,
    /// Something could not be read: what is missing may be there.
    missing_known: bool,
}

impl<'a> Clauses<'a> {
    fn add(&mut self, cx: &mut Context, clause: &'a Clause) {
        let (key, span) = (clause.key.text.as_str(), &clause.key.span);
        if let Some(first) = self.find(key).filter(|_| key != "sequence") {
            return twice(cx, key, span, &first.key.span);
        }
        if CLAUSES.contains(&key) {
            return self.all.push(clause);
        }
        if CLAUSES_LATER.contains(&key) {
            return not_yet(cx, span, &format!("`{key}` in a schedule"), "");
        }
        self.missing_known = true;
        let found = Diagnostic::error("P0202", span.clone(), format!("a schedule has no `{key}`"));
        cx.report(match nearest(key, CLAUSES) {
            Some(meant) => found.help(format!("did you mean `{meant}`?")),
            None => found.help(format!("it has {}", either(&CLAUSES).replace(" or ", " and "))),
        });
    }

    fn find(&self, key: &str) -> Option<&'a Clause> {
        self.all.iter().find(|c| c.key.text == key).copied()
    }

    fn need(&self, cx: &mut Context, key: &str, example: &str, schedule: &ast::Schedule) -> Option<&'a Clause> {
        let found = self.find(key);
        if found.is_none() && !self.missing_known {
            let message = format!("schedule `{}` has no `{key}`", schedule.name.text);
            let found = Diagnostic::error("P0204", schedule.name.span.clone(), message);
            cx.report(found.help(format!("add `{example}`")));
        }
        found
    }
}

/// The words of a clause as one text; none if it is not only words (reported).
pub(super) fn words(cx: &mut Context, clause: &Clause, form: &str) -> Option<String> {
    match &clause.kind {
        ClauseKind::Words(words, None) => Some(words.iter().map(|w| w.text.as_str()).collect::<Vec<_>>().join(" ")),
        ClauseKind::Words(_, Some(_)) | ClauseKind::Call(..) | ClauseKind::Sequence(_) | ClauseKind::Order(_) => {
            wrong_form(cx, clause, form);
            None
        }
        ClauseKind::Invalid => None,
    }
}

pub(super) fn wrong_form(cx: &mut Context, clause: &Clause, form: &str) {
    let message = format!("`{}` has another form", clause.key.text);
    cx.report(Diagnostic::error("P0212", clause.span.clone(), message).help(format!("write `{form}`")));
}

fn place(cx: &mut Context, clauses: &Clauses<'_>, written: &ast::Schedule) -> Option<Place> {
    let clause = clauses.need(cx, "place", "place linear", written)?;
    if let ClauseKind::Words(words, _) = &clause.kind
        && let Some(word) = words.first()
        && word.text == "table"
    {
        let instead = "use `place linear`, `loop(v)`, `wave` or `bidirectional`";
        not_yet(cx, &clause.span, &format!("`place {}`", word.text), instead);
        return None;
    }
    const FORM: &str = "place linear`, `place loop(v)`, `place wave` or `place bidirectional";
    if let ClauseKind::Call(name, size) = &clause.kind
        && name.text == "loop"
    {
        return chunks(cx, size).map(Place::Loop);
    }
    match words(cx, clause, FORM)?.as_str() {
        "linear" => Some(Place::Linear),
        "wave" => Some(Place::Wave),
        "bidirectional" => Some(Place::Bidirectional),
        _ => {
            wrong_form(cx, clause, FORM);
            None
        }
    }
}

/// `v` or a number.
fn chunks(cx: &mut Context, size: &ast::Expr) -> Option<Chunks> {
    match &size.kind {
        ExprKind::Name(name) if name == "v" => Some(Chunks::Given),
        ExprKind::Number(number) if (1..=i64::from(CHUNKS_MAX)).contains(number) => {
            Some(Chunks::Fixed(u32::try_from(*number).unwrap_or(1)))
        }
        _ => {
            let message = format!("a rank has `v` stages, or a number from 1 to {CHUNKS_MAX}");
            let found = Diagnostic::error("P0212", size.span.clone(), message);
            cx.report(found.help("write `place loop(v)`, and `chunks = 2` in `pipeline`; or `place loop(2)`"));
            None
        }
    }
}

/// `sequence F = groups(P) chunks ascending`, each action's at most once.
fn sequences(
    cx: &mut Context,
    clauses: &Clauses<'_>,
    backward: Option<Backward>,
    update: Option<Update>,
) -> Option<Vec<Sequence>> {
    let mut found: Vec<Sequence> = Vec::new();
    for clause in clauses.all.iter().filter(|c| c.key.text == "sequence") {
        let ClauseKind::Sequence(written) = &clause.kind else { return None };
        let descending = match (written.by.text.as_str(), written.what.text.as_str(), written.direction.text.as_str()) {
            ("groups", "chunks", "ascending") => false,
            ("groups", "chunks", "descending") => true,
            _ => {
                wrong_form(cx, clause, "sequence F = groups(P) chunks ascending` or `… descending");
                return None;
            }
        };
        let (action, chunk) = action(cx, &written.action)?;
        if chunk.is_some() {
            wrong_form(cx, clause, "sequence F = groups(P) chunks ascending");
            return None;
        }
        fits(cx, &written.action, action, backward);
        let groups = expr(cx, &written.size, Scope { update, rounds: false })?;
        if let Some(first) = found.iter().find(|s| s.action == action) {
            twice(cx, &format!("sequence {}", written.action.text), &clause.span, &first.span);
        }
        found.push(Sequence { action, groups, descending, span: clause.span.clone() });
    }
    Some(found)
}

fn backward(cx: &mut Context, clauses: &Clauses<'_>, written: &ast::Schedule) -> Option<Backward> {
    let clause = clauses.need(cx, "backward", "backward whole", written)?;
    match words(cx, clause, "backward whole")?.as_str() {
        "whole" => Some(Backward::Whole),
        "split" => Some(Backward::Split),
        _ => {
            wrong_form(cx, clause, "backward whole` or `backward split");
            None
        }
    }
}

fn update(cx: &mut Context, clauses: &Clauses<'_>, written: &ast::Schedule) -> Option<Update> {
    let (clause, form, found) = match (clauses.find("flush"), clauses.find("update")) {
        (Some(flush), Some(update)) => {
            let found = Diagnostic::error("P0203", update.key.span.clone(), "the schedule says twice when to update");
            cx.report(found.and_at(flush.key.span.clone(), "first here").help("keep one of them"));
            return None;
        }
        (Some(flush), None) => (flush, FLUSH, Update::Flush),
        (None, Some(update)) => (update, LOCAL, Update::Local),
        (None, None) => {
            clauses.need(cx, "flush", &format!("{FLUSH}` or `{LOCAL}"), written);
            return None;
        }
    };
    if words(cx, clause, form)? != form.split_once(' ')?.1 {
        wrong_form(cx, clause, form);
        return None;
    }
    Some(found)
}

fn order(cx: &mut Context, clause: &Clause, backward: Option<Backward>, update: Option<Update>) -> Option<Vec<Phase>> {
    let ClauseKind::Order(written) = &clause.kind else { return None };
    let before = cx.found.len();
    let phases: Vec<Option<Phase>> = written.iter().map(|p| phase(cx, p, backward, update)).collect();
    if cx.found.len() > before || written.iter().any(|p| p.broken) {
        return None;
    }
    let phases: Vec<Phase> = phases.into_iter().collect::<Option<_>>()?;
    let needed: &[(Action, &str)] = match backward? {
        Backward::Whole => &[(Action::F, "F"), (Action::B, "B")],
        Backward::Split => &[(Action::F, "F"), (Action::I, "I"), (Action::W, "W")],
    };
    for (action, name) in needed {
        if !phases.iter().flat_map(|p| &p.body).any(|step| step.action == *action) {
            let found = Diagnostic::error("P0231", clause.key.span.clone(), format!("the order never does `{name}`"));
            cx.report(found.help(format!("add a step `{name}`")));
        }
    }
    Some(phases)
}

fn phase(cx: &mut Context, written: &ast::Phase, backward: Option<Backward>, update: Option<Update>) -> Option<Phase> {
    if written.broken && written.steps.is_empty() {
        return None;
    }
    let keyword = &written.keyword;
    let kind = match (keyword.text.as_str(), &written.count) {
        ("warmup", Some(count)) => expr(cx, count, Scope { update, rounds: false }).map(PhaseKind::Warmup),
        ("repeat", None) => Some(PhaseKind::Repeat),
        ("repeat", Some(count)) => expr(cx, count, Scope { update, rounds: false }).map(PhaseKind::Counted),
        ("drain", None) => Some(PhaseKind::Drain),
        ("block", Some(interval)) => expr(cx, interval, Scope { update, rounds: false }).map(PhaseKind::Block),
        ("block", None) => {
            let found = Diagnostic::error("P0212", keyword.span.clone(), "`block` says at what interval");
            cx.report(found.help("write e.g. `block every 6 { F0 at s; … }`"));
            None
        }
        ("warmup", None) => {
            let found = Diagnostic::error("P0212", keyword.span.clone(), "`warmup` says how often");
            cx.report(found.help("write e.g. `warmup P - 1 - s { F }`"));
            None
        }
        ("drain", Some(count)) => {
            let message = "`drain` has no count: it runs until its micro-batches are used up";
            let found = Diagnostic::error("P0212", count.span.clone(), message);
            cx.report(found.help("write `drain { … }`, or `repeat COUNT { … }` for a counted phase"));
            None
        }
        (name, _) => {
            let found = Diagnostic::error("P0202", keyword.span.clone(), format!("an order has no `{name}`"));
            let names = ["warmup", "repeat", "drain", "block"];
            cx.report(match nearest(name, names) {
                Some(meant) => found.help(format!("did you mean `{meant}`?")),
                None => {
                    found.help("it has `warmup COUNT { … }`, `repeat { … }`, `repeat COUNT { … }`, `drain { … }` and `block every INTERVAL { … }`")
                }
            });
            None
        }
    };
    let block = keyword.text == "block";
    let body: Vec<Option<Step>> = written.steps.iter().map(|s| step(cx, s, backward, update, block)).collect();
    if kind == Some(PhaseKind::Repeat) && !written.broken && written.steps.iter().all(|s| s.when.is_some()) {
        let found = Diagnostic::error("P0234", keyword.span.clone(), "this `repeat` never runs");
        let found = found.note("it ends when no step without a `when` has a micro-batch left, and it has no such step");
        cx.report(found.help("add a step without `when`"));
    } else if kind.is_some() && !written.broken && written.steps.is_empty() {
        let found = Diagnostic::error("P0234", keyword.span.clone(), format!("this `{}` does nothing", keyword.text));
        cx.report(found.help("give it steps, e.g. `{ F; B }`, or remove it"));
    }
    Some(Phase { kind: kind?, body: body.into_iter().collect::<Option<_>>()?, span: written.span.clone() })
}

fn step(
    cx: &mut Context,
    written: &ast::Step,
    backward: Option<Backward>,
    update: Option<Update>,
    block: bool,
) -> Option<Step> {
    let action = action(cx, &written.action);
    let scope = Scope { update, rounds: true };
    let when = written.when.as_ref().map(|cond| {
        let (left, right) = (expr(cx, &cond.left, scope), expr(cx, &cond.right, scope));
        Some(Cond { left: left?, op: cond.op, right: right? })
    });
    let at = written.at.as_ref().map(|time| expr(cx, time, Scope { update, rounds: false }));
    let (action, chunk) = action?;
    let (message, help) = match (block, written.at.is_some(), written.when.is_some()) {
        (false, true, _) => {
            ("only the steps of a `block` say when they are", "use `when` for a condition on the round")
        }
        (true, _, true) => ("a block has no rounds, so its steps have no `when`", "say when with `at`"),
        (true, false, _) if action == Action::F => {
            ("a forward pass in a block says when it is", "write e.g. `F0 at s`")
        }
        _ => ("", ""),
    };
    if !message.is_empty() {
        cx.report(Diagnostic::error("P0212", written.span.clone(), message).help(help));
        return None;
    }
    fits(cx, &written.action, action, backward);
    Some(Step {
        action,
        chunk,
        when: super::model::given(when)?,
        at: super::model::given(at)?,
        span: written.span.clone(),
    })
}

/// The backward pass has I and W, or B.
fn fits(cx: &mut Context, written: &ast::Name, action: Action, backward: Option<Backward>) {
    match (backward, action) {
        (Some(Backward::Whole), Action::I | Action::W) => {
            misfit(cx, written, "backward whole", "use `B`, or say `backward split`");
        }
        (Some(Backward::Split), Action::B) => {
            misfit(cx, written, "backward split", "use `I` and `W`, or say `backward whole`");
        }
        _ => {}
    }
}

fn misfit(cx: &mut Context, action: &ast::Name, backward: &str, help: &str) {
    let message = format!("`{}` does not go with `{backward}`", action.text);
    cx.report(Diagnostic::error("P0231", action.span.clone(), message).help(help));
}

/// An action, and the chunk that it names: `F`, `F1`.
fn action(cx: &mut Context, name: &ast::Name) -> Option<(Action, Option<u32>)> {
    let (first, rest) = name.text.split_at(1);
    let kind = match first {
        "F" => Some(Action::F),
        "B" => Some(Action::B),
        "I" => Some(Action::I),
        "W" => Some(Action::W),
        _ => None,
    };
    match (kind, rest.parse::<u32>()) {
        (Some(kind), _) if rest.is_empty() => return Some((kind, None)),
        (Some(kind), Ok(chunk)) if rest.bytes().all(|b| b.is_ascii_digit()) => return Some((kind, Some(chunk))),
        _ => {}
    }
    let found = Diagnostic::error("P0210", name.span.clone(), format!("there is no action `{}`", name.text));
    cx.report(match name.text.to_uppercase().as_str() {
        "U" | "UPDATE" => found.help(format!("updates follow from `{FLUSH}` or `{LOCAL}`")),
        text if text.starts_with("SEND") || text.starts_with("RECV") => {
            found.help("sends and receives are placed by the compiler")
        }
        upper @ ("F" | "B" | "I" | "W") => found.help(format!("did you mean `{upper}`?")),
        _ => found.help("actions are `F`, `B`, and with `backward split` `I` and `W`"),
    });
    None
}

fn expr(cx: &mut Context, written: &ast::Expr, scope: Scope) -> Option<Expr> {
    match &written.kind {
        ExprKind::Number(number) => Some(Expr::Number(*number)),
        ExprKind::Name(name) => variable(cx, name, &written.span, scope).map(Expr::Var),
        ExprKind::Binary(op, left, right) => {
            if *op == BinaryOp::Div && right.kind == ExprKind::Number(0) {
                let found = Diagnostic::error("P0233", written.span.clone(), "division by zero");
                cx.report(found.help("divide by something else"));
                return None;
            }
            let (left, right) = (expr(cx, left, scope), expr(cx, right, scope));
            Some(Expr::Binary(*op, Box::new(left?), Box::new(right?)))
        }
        ExprKind::Call(name, arguments) => {
            let op = match (name.text.as_str(), arguments.len()) {
                ("min", 2) => BinaryOp::Min,
                ("max", 2) => BinaryOp::Max,
                ("min" | "max", n) => {
                    let message = format!("`{}` takes 2 arguments, not {n}", name.text);
                    let found = Diagnostic::error("P0213", written.span.clone(), message);
                    cx.report(found.help(format!("write `{}(a, b)`", name.text)));
                    return None;
                }
                (other, _) => {
                    let found =
                        Diagnostic::error("P0210", name.span.clone(), format!("there is no function `{other}`"));
                    cx.report(found.help("functions are `min(a, b)` and `max(a, b)`"));
                    return None;
                }
            };
            let (left, right) = (expr(cx, &arguments[0], scope), expr(cx, &arguments[1], scope));
            Some(Expr::Binary(op, Box::new(left?), Box::new(right?)))
        }
    }
}

fn variable(cx: &mut Context, name: &str, span: &Span, scope: Scope) -> Option<Var> {
    let fault = |message: String| Diagnostic::error("P0232", span.clone(), message);
    let found = match name {
        "P" => return Some(Var::P),
        "s" => return Some(Var::S),
        "K" => return Some(Var::K),
        "v" => return Some(Var::V),
        "M" if scope.update == Some(Update::Local) => fault("`M` is not known under `update local`".into())
            .note("each stage updates on its own while the run goes on: there is no last micro-batch to count to")
            .help("use `K` (accumulate), or `flush every accumulate`"),
        "M" => return Some(Var::M),
        "n" if !scope.rounds => {
            fault("`n` counts the rounds of a phase, and this is decided before them".into()).help("use it in `when`")
        }
        "n" => return Some(Var::N),
        _ => {
            let help = match name {
                "p" => "did you mean `P`, the number of ranks?",
                "S" => "did you mean `s`, this rank?",
                "m" => "did you mean `M`, the number of micro-batches?",
                "k" => "did you mean `K`, accumulate?",
                "N" => "did you mean `n`, the round?",
                "V" => "did you mean `v`, the stages of a rank?",
                _ => {
                    "variables are `P` (ranks), `s` (this rank), `v` (stages a rank), `M` (micro-batches), `K` (accumulate), `n` (the round)"
                }
            };
            fault(format!("there is no variable `{name}`")).help(help)
        }
    };
    cx.report(found);
    None
}
