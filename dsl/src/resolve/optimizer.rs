//! `optimizer = adamw { lr = cosine(1e-3, warmup = 20, total = 400), betas = (0.9, 0.95), decay = 0.1 }`

use super::section::{Keys, Section, assigned};
use super::{Context, not_yet};
use crate::ast::{Argument, Body, Entry, Name, Value, ValueKind};
use crate::diag::{Diagnostic, Span};
use crate::spec::{At, LearningRate, Optimizer};
use crate::suggest::{either, nearest};

pub(super) const ADAMW: Keys = Keys {
    block: "adamw",
    known: &["lr", "betas", "eps", "decay"],
    later: &["clip", "error_feedback", "correction", "amsgrad", "dtype"],
};
pub(super) const SGD: Keys = Keys {
    block: "sgd",
    known: &["lr", "momentum", "decay"],
    later: &["clip", "error_feedback", "correction", "nesterov", "dtype"],
};
const LATER: [&str; 6] = ["muon", "adam", "lion", "adafactor", "lamb", "soap"];

const ADAMW_DEFAULT: Optimizer = Optimizer::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, decay: 0.1 };
const RATE_DEFAULT: LearningRate = LearningRate::Constant { lr: 1e-3 };

type Found = (At<Optimizer>, At<LearningRate>);

/// Without an entry: AdamW with its defaults.
pub(super) fn optimizer(cx: &mut Context, entry: Option<&Entry>) -> Option<Found> {
    let Some(entry) = entry else {
        return Some((At { value: ADAMW_DEFAULT, span: 0..0 }, At { value: RATE_DEFAULT, span: 0..0 }));
    };
    let value = assigned(cx, entry)?;
    let empty = Body { entries: Vec::new(), span: value.span.clone(), broken: false };
    let (name, body) = match &value.kind {
        ValueKind::Word(word) => (Name { text: word.clone(), span: value.span.clone() }, &empty),
        ValueKind::Record(Some(name), body) => (name.clone(), body),
        ValueKind::Invalid => return None,
        other => {
            let message = format!("`optimizer` is `adamw {{ … }}` or `sgd {{ … }}`, not {}", other.describe());
            let found = Diagnostic::error("P0207", value.span.clone(), message);
            cx.report(found.help("write e.g. `optimizer = adamw { lr = 1e-3 }`"));
            return None;
        }
    };
    match name.text.as_str() {
        "adamw" => adamw(cx, &name, body, &value.span),
        "sgd" => sgd(cx, &name, body, &value.span),
        other if LATER.contains(&other) => {
            not_yet(cx, &name.span, &format!("the optimizer `{other}`"), "use `adamw` or `sgd`");
            None
        }
        other => {
            let found = Diagnostic::error("P0210", name.span.clone(), format!("there is no optimizer `{other}`"));
            cx.report(match nearest(other, ["adamw", "sgd"]) {
                Some(meant) => found.help(format!("did you mean `{meant}`?")),
                None => found.help("use `adamw` or `sgd`"),
            });
            None
        }
    }
}

fn adamw(cx: &mut Context, name: &Name, body: &Body, span: &Span) -> Option<Found> {
    let section = Section::new(cx, "adamw", &name.span, body, &ADAMW);
    let rate = match section.find("lr") {
        Some(entry) => assigned(cx, entry).and_then(|v| learning_rate(cx, v)),
        None => Some(At { value: RATE_DEFAULT, span: section.start.clone() }),
    };
    let betas = section.value(cx, "betas").map_or(Some((0.9, 0.95)), |v| betas(cx, v));
    let eps = section
        .value(cx, "eps")
        .map_or(Some(1e-8), |v| cx.real(v, "eps", "above 0, up to 1", |x| x > 0.0 && x <= 1.0).map(|at| at.value));
    let decay = unit_share(cx, &section, "decay", 0.1);
    let (beta1, beta2) = betas?;
    let value = Optimizer::AdamW { beta1, beta2, eps: eps?, decay: decay? };
    Some((At { value, span: span.clone() }, rate?))
}

fn sgd(cx: &mut Context, name: &Name, body: &Body, span: &Span) -> Option<Found> {
    let section = Section::new(cx, "sgd", &name.span, body, &SGD);
    let rate = section.need(cx, "lr", "lr = 0.1").and_then(|v| learning_rate(cx, v));
    let momentum = unit_share(cx, &section, "momentum", 0.0);
    let decay = unit_share(cx, &section, "decay", 0.0);
    Some((At { value: Optimizer::Sgd { momentum: momentum?, decay: decay? }, span: span.clone() }, rate?))
}

/// A number from 0 to below 1.
fn unit_share(cx: &mut Context, section: &Section<'_>, key: &str, default: f64) -> Option<f64> {
    let Some(value) = section.value(cx, key) else { return Some(default) };
    cx.real(value, key, "from 0 to below 1", |x| (0.0..1.0).contains(&x)).map(|at| at.value)
}

fn betas(cx: &mut Context, value: &Value) -> Option<(f64, f64)> {
    match &value.kind {
        ValueKind::Tuple(items) if items.len() == 2 => {
            let mut beta = |v| cx.real(v, "betas", "from 0 to below 1", |x| (0.0..1.0).contains(&x)).map(|at| at.value);
            let (first, second) = (beta(&items[0]), beta(&items[1]));
            Some((first?, second?))
        }
        ValueKind::Invalid => None,
        other => {
            let message = match other {
                ValueKind::Tuple(items) => format!("`betas` is a pair, not {} numbers", items.len()),
                other => format!("`betas` is a pair, not {}", other.describe()),
            };
            let found = Diagnostic::error("P0207", value.span.clone(), message);
            cx.report(found.help("write `betas = (0.9, 0.95)`"));
            None
        }
    }
}

/// A number, `constant(lr)` or `cosine(peak, warmup = …, total = …, floor = …)`.
fn learning_rate(cx: &mut Context, value: &Value) -> Option<At<LearningRate>> {
    let at = |value, span: &Span| At { value, span: span.clone() };
    match &value.kind {
        ValueKind::Number(_) => Some(at(LearningRate::Constant { lr: rate(cx, value, "lr")? }, &value.span)),
        ValueKind::Invalid => None,
        ValueKind::Call(name, arguments) => match name.text.as_str() {
            "constant" => {
                let [lr] = bind(cx, name, arguments, ["lr"], &["lr"])?;
                Some(at(LearningRate::Constant { lr: rate(cx, lr?, "lr")? }, &value.span))
            }
            "cosine" => Some(at(cosine(cx, name, arguments)?, &value.span)),
            other if ["linear", "step", "wsd", "inverse_sqrt", "exponential"].contains(&other) => {
                not_yet(cx, &name.span, &format!("`lr = {other}(…)`"), "use a number, `constant(…)` or `cosine(…)`");
                None
            }
            other => {
                let found = Diagnostic::error("P0210", name.span.clone(), format!("there is no rate `{other}`"));
                cx.report(match nearest(other, ["constant", "cosine"]) {
                    Some(meant) => found.help(format!("did you mean `{meant}`?")),
                    None => found.help("`lr` is a number, `constant(…)` or `cosine(…)`"),
                });
                None
            }
        },
        other => {
            let message = format!("`lr` is a learning rate, not {}", other.describe());
            let found = Diagnostic::error("P0207", value.span.clone(), message);
            cx.report(found.help("write `lr = 1e-3` or `lr = cosine(1e-3, warmup = 20, total = 400)`"));
            None
        }
    }
}

fn rate(cx: &mut Context, value: &Value, what: &str) -> Option<f64> {
    cx.real(value, what, "above 0, up to 1000", |x| x > 0.0 && x <= 1000.0).map(|at| at.value)
}

fn cosine(cx: &mut Context, name: &Name, arguments: &[Argument]) -> Option<LearningRate> {
    let [peak, warmup, total, floor] =
        bind(cx, name, arguments, ["peak", "warmup", "total", "floor"], &["peak", "total"])?;
    let updates = u64::from(u32::MAX);
    let peak = peak.and_then(|v| rate(cx, v, "peak"));
    let start = warmup.map_or(Some(0), |v| cx.count(v, "warmup", 0..=updates).map(|at| at.value));
    let end = total.and_then(|v| cx.count(v, "total", 1..=updates));
    let floor = match (floor, peak) {
        (Some(v), Some(peak)) => {
            let found = cx.real(v, "floor", "at least 0", |x| x >= 0.0)?;
            if found.value > peak {
                let message = format!("the floor {} is above the peak {peak}", found.value);
                cx.report(Diagnostic::error("P0224", found.span, message).help(format!("at most {peak}")));
                return None;
            }
            Some(found.value)
        }
        (_, peak) => peak.map(|p| 0.1 * p),
    };
    let (peak, warmup, total, floor) = (peak?, start?, end?, floor?);
    if warmup >= total.value {
        let message = format!("the warm-up of {warmup} updates leaves nothing of {} for the cosine", total.value);
        let found = Diagnostic::error("P0224", total.span, message);
        cx.report(found.help(format!("`total` counts the warm-up too: at least {}", warmup + 1)));
        return None;
    }
    Some(LearningRate::Cosine { peak, warmup, total: total.value, floor })
}

/// Arguments by parameter: those without a name first, in order.
fn bind<'a, const N: usize>(
    cx: &mut Context,
    call: &Name,
    arguments: &'a [Argument],
    parameters: [&'static str; N],
    needed: &[&str],
) -> Option<[Option<&'a Value>; N]> {
    let mut bound = [None; N];
    let before = cx.found.len();
    // An unknown name may be meant for a parameter that lacks.
    let mut unknown = false;
    let mut fault = |span: &Span, message: String, help: String| {
        cx.report(Diagnostic::error("P0213", span.clone(), message).help(help));
    };
    for (n, argument) in arguments.iter().enumerate() {
        let at = match &argument.name {
            None => Some(n).filter(|n| *n < N),
            Some(name) => parameters.iter().position(|p| *p == name.text),
        };
        let span = argument.name.as_ref().map_or(&argument.value.span, |name| &name.span);
        let Some(at) = at else {
            let message = match &argument.name {
                Some(name) => format!("`{}` has no argument `{}`", call.text, name.text),
                None => format!("`{}` has at most {N} arguments", call.text),
            };
            let meant = argument.name.as_ref().and_then(|name| nearest(&name.text, parameters));
            let help = meant.map(|m| format!("did you mean `{m}`?"));
            fault(span, message, help.unwrap_or(format!("its arguments are {}", either(&parameters))));
            unknown |= argument.name.is_some();
            continue;
        };
        if bound[at].replace(&argument.value).is_some() {
            let message = format!("`{}` of `{}` is given twice", parameters[at], call.text);
            fault(span, message, "keep one of them".into());
        }
    }
    for (n, parameter) in parameters.iter().enumerate() {
        if bound[n].is_none() && needed.contains(parameter) && !unknown {
            let message = format!("`{}` needs `{parameter}`", call.text);
            let example = match *parameter {
                "total" => "total = 400",
                _ => "1e-3",
            };
            fault(&call.span, message, format!("add it, e.g. `{example}`"));
        }
    }
    (cx.found.len() == before).then_some(bound)
}
