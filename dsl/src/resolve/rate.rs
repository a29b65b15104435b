//! `lr = cosine(1e-3, warmup = 20, total = 400)`

use super::{Context, not_yet};
use crate::ast::{Argument, Name, Relation, Value, ValueKind};
use crate::diag::{Diagnostic, Span};
use crate::spec::{At, LearningRate};
use crate::suggest::{either, nearest};

const USE: &str = "`lr` is a number, `constant(…)`, `cosine(…)`, `linear(…)` or `wsd(…)`";

/// A number, `constant(lr)`, `cosine(peak, …)`, `linear(peak, …)` or `wsd(peak, …)`.
pub(super) fn learning_rate(cx: &mut Context, value: &Value) -> Option<At<LearningRate>> {
    let at = |value, span: &Span| At { value, span: span.clone() };
    match &value.kind {
        ValueKind::Number(_) => Some(at(LearningRate::Constant { lr: rate(cx, value, "lr")? }, &value.span)),
        ValueKind::Invalid => None,
        ValueKind::Call(name, arguments) => match name.text.as_str() {
            "constant" => {
                let [lr] = bind(cx, name, arguments, ["lr"], &["lr"])?;
                Some(at(LearningRate::Constant { lr: rate(cx, lr?, "lr")? }, &value.span))
            }
            "cosine" | "linear" | "wsd" => Some(at(falling(cx, name, arguments)?, &value.span)),
            other if ["step", "inverse_sqrt", "exponential"].contains(&other) => {
                not_yet(cx, &name.span, &format!("`lr = {other}(…)`"), USE);
                None
            }
            other => {
                let found = Diagnostic::error("P0210", name.span.clone(), format!("there is no rate `{other}`"));
                cx.report(match nearest(other, ["constant", "cosine", "linear", "wsd"]) {
                    Some(meant) => found.help(format!("did you mean `{meant}`?")),
                    None => found.help(USE),
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

/// `cosine` and `linear`, which fall from the warm-up on, and `wsd`, which falls at the end.
fn falling(cx: &mut Context, name: &Name, arguments: &[Argument]) -> Option<LearningRate> {
    let (peak, warmup, total, decay, floor) = if name.text == "wsd" {
        let names = ["peak", "warmup", "total", "decay", "floor"];
        let [peak, warmup, total, decay, floor] = bind(cx, name, arguments, names, &["peak", "total"])?;
        (peak, warmup, total, decay, floor)
    } else {
        let names = ["peak", "warmup", "total", "floor"];
        let [peak, warmup, total, floor] = bind(cx, name, arguments, names, &["peak", "total"])?;
        (peak, warmup, total, None, floor)
    };
    let updates = u64::from(u32::MAX);
    let peak = peak.and_then(|v| rate(cx, v, "peak"));
    let start = warmup.map_or(Some(0), |v| cx.count(v, "warmup", 0..=updates).map(|at| at.value));
    let end = total.and_then(|v| cx.count(v, "total", 1..=updates));
    let decay = match decay {
        Some(v) => cx.real(v, "decay", "above 0, up to 1", |x| x > 0.0 && x <= 1.0).map(|at| at.value),
        None => Some(0.1),
    };
    let floor = floor_of(cx, floor, peak);
    let (peak, warmup, total, decay, floor) = (peak?, start?, end?, decay?, floor?);
    let (span, total) = (total.span, total.value);
    if name.text == "wsd" {
        let decay = ((decay * total as f64).round() as u64).max(1);
        // The stable part may be empty, the others keep their lengths.
        if warmup + decay > total {
            let message = format!("the warm-up of {warmup} updates and the decay of {decay} are longer than {total}");
            let found = Diagnostic::error("P0224", span, message);
            cx.report(found.help("raise `total`, or lower `warmup` or `decay`, a fraction of `total`"));
            return None;
        }
        return Some(LearningRate::Wsd { peak, warmup, total, decay, floor });
    }
    if warmup >= total {
        let message = format!("the warm-up of {warmup} updates leaves nothing of {total} for the {}", name.text);
        let found = Diagnostic::error("P0224", span, message);
        cx.report(found.help(format!("`total` counts the warm-up too: at least {}", warmup + 1)));
        return None;
    }
    Some(match name.text.as_str() {
        "linear" => LearningRate::Linear { peak, warmup, total, floor },
        _ => LearningRate::Cosine { peak, warmup, total, floor },
    })
}

/// The floor, by default a tenth of the peak.
fn floor_of(cx: &mut Context, floor: Option<&Value>, peak: Option<f64>) -> Option<f64> {
    let (Some(v), Some(peak)) = (floor, peak) else { return peak.map(|p| 0.1 * p) };
    let found = cx.real(v, "floor", "at least 0", |x| x >= 0.0)?;
    if found.value > peak {
        let message = format!("the floor {} is above the peak {peak}", found.value);
        cx.report(Diagnostic::error("P0224", found.span, message).help(format!("at most {peak}")));
        return None;
    }
    Some(found.value)
}

/// Arguments by parameter: those without a name first, in order.
pub(super) fn bind<'a, const N: usize>(
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
        if let Relation::Compare(_) = argument.relation {
            fault(span, format!("`{}` of `{}` is given with `=`", parameters[at], call.text), "write `=`".into());
        }
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
