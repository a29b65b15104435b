//! `correction = error_feedback { tau = 0.5 }` in `staleness`: how updates are corrected for the delay of their gradients.

use super::Context;
use super::model::given;
use super::section::{Keys, Section};
use crate::ast::{Body, Value, ValueKind};
use crate::diag::Diagnostic;
use crate::schedule::{Schedule, Update};
use crate::spec::{At, Correction, Dtype, MOMENTUM_MOST, Model, Optimizer, Staleness, Weights};
use crate::suggest::{either, nearest};

/// A correction's keys, and how its braces are read.
struct Known {
    keys: Keys,
    read: fn(&mut Context, &Section<'_>) -> Option<Correction>,
}

const KNOWN: [Known; 4] = [
    Known { keys: Keys { block: "error_feedback", known: &["lambda", "tau"], later: &[] }, read: error_feedback },
    Known { keys: Keys { block: "nesterov", known: &["momentum", "by_stage"], later: &[] }, read: nesterov },
    Known { keys: Keys { block: "pipemare", known: &["anneal", "discrepancy"], later: &[] }, read: pipemare },
    Known { keys: Keys { block: "dc_asgd", known: &["lambda"], later: &[] }, read: dc_asgd },
];

/// The value of `correction`.
pub(super) fn correction(cx: &mut Context, value: &Value) -> Option<At<Correction>> {
    let empty = Body { entries: Vec::new(), span: value.span.clone(), broken: false };
    let (name, head, body) = match &value.kind {
        ValueKind::Word(word) => (word, &value.span, &empty),
        ValueKind::Record(Some(name), body) => (&name.text, &name.span, body),
        ValueKind::Invalid => return None,
        other => {
            let message =
                format!("`correction` is `error_feedback {{ … }}` or another correction, not {}", other.describe());
            let found = Diagnostic::error("P0207", value.span.clone(), message);
            cx.report(found.help("write `correction = error_feedback`"));
            return None;
        }
    };
    let names = KNOWN.map(|k| k.keys.block);
    let Some(known) = KNOWN.iter().find(|k| k.keys.block == name) else {
        let help = format!("use {}", either(&names));
        let found = Diagnostic::error("P0210", head.clone(), format!("there is no correction `{name}`"));
        let meant = nearest(name, names).map(|meant| format!("did you mean `{meant}`?"));
        cx.report(found.help(meant.unwrap_or(help)));
        return None;
    };
    let section = Section::new(cx, known.keys.block, head, body, &known.keys);
    let read = (known.read)(cx, &section)?;
    Some(At { value: read, span: value.span.clone() })
}

fn error_feedback(cx: &mut Context, section: &Section<'_>) -> Option<Correction> {
    let lambda = number(cx, section, "lambda", "above 0, up to 10", |x| x > 0.0 && x <= 10.0);
    let tau = number(cx, section, "tau", "above 0, up to 1000", |x| x > 0.0 && x <= 1000.0);
    let (lambda, tau) = (given(lambda)?.unwrap_or(1.0), given(tau)?);
    Some(Correction::ErrorFeedback { lambda, tau })
}

fn nesterov(cx: &mut Context, section: &Section<'_>) -> Option<Correction> {
    let by_stage = section.value(cx, "by_stage").map(|v| cx.switch(v, "by_stage"));
    let by_stage = given(by_stage)?.is_some_and(|at| at.value);
    let momentum = if by_stage {
        number(cx, section, "momentum", "above 0, up to 0.99: with `by_stage` it is the last stage's", |x| {
            x > 0.0 && x <= MOMENTUM_MOST
        })
    } else {
        number(cx, section, "momentum", "above 0, below 1", |x| x > 0.0 && x < 1.0)
    };
    let default = if by_stage { 0.9 } else { MOMENTUM_MOST };
    Some(Correction::Nesterov { momentum: given(momentum)?.unwrap_or(default), by_stage })
}

fn pipemare(cx: &mut Context, section: &Section<'_>) -> Option<Correction> {
    let anneal = section.value(cx, "anneal").map(|v| cx.count(v, "anneal", 1..=u64::from(u32::MAX)));
    let discrepancy = number(cx, section, "discrepancy", "above 0, below 1", |x| x > 0.0 && x < 1.0);
    let (anneal, discrepancy) = (given(anneal)?.map(|at| at.value), given(discrepancy)?);
    if anneal.is_none() && discrepancy.is_none() {
        section.missing(cx, "anneal", "anneal = 1000` or `discrepancy = 0.135");
        return None;
    }
    Some(Correction::PipeMare { anneal, discrepancy })
}

fn dc_asgd(cx: &mut Context, section: &Section<'_>) -> Option<Correction> {
    let lambda = number(cx, section, "lambda", "above 0, up to 1e9", |x| x > 0.0 && x <= 1e9);
    Some(Correction::DelayCompensation { lambda: given(lambda)?.unwrap_or(0.04) })
}

type Fits = fn(f64) -> bool;

fn number(cx: &mut Context, section: &Section<'_>, key: &str, range: &str, fits: Fits) -> Option<Option<f64>> {
    section.value(cx, key).map(|v| cx.real(v, key, range, fits).map(|at| at.value))
}

/// Refuses a correction that one of the optimizers or the policy of the weights leaves no place for.
pub(super) fn fits<'a>(
    cx: &mut Context,
    staleness: &Staleness,
    schedule: Option<&Schedule>,
    optimizers: impl Iterator<Item = &'a At<Optimizer>>,
) {
    let Some(correction) = &staleness.correction else { return };
    if let Weights::Predict { .. } = staleness.weights.value {
        return corrected_twice(cx, correction, &staleness.weights);
    }
    match correction.value {
        Correction::Nesterov { .. } => optimizers.for_each(|optimizer| one_momentum(cx, correction, optimizer)),
        Correction::PipeMare { discrepancy: Some(_), .. } => one_version(cx, correction, &staleness.weights),
        Correction::DelayCompensation { .. } => stale_weights(cx, correction, &staleness.weights, schedule),
        _ => {}
    }
}

/// Weights that are moved back or on are made in f32 from the weights, of which older versions are kept in bf16 only; products of bf16 would need
/// a copy of them too.
pub(super) fn fits_elements(cx: &mut Context, staleness: &Staleness, model: &Model) {
    if model.variant.dtype != Dtype::Bf16 {
        return;
    }
    let (span, name) = match (&staleness.correction, staleness.weights.value) {
        (_, Weights::Predict { .. }) => (&staleness.weights.span, "predict"),
        (Some(At { value: Correction::PipeMare { discrepancy: Some(_), .. }, span }), _) => (span, "discrepancy"),
        (Some(At { value: Correction::DelayCompensation { .. }, span }), _) => (span, "dc_asgd"),
        _ => return,
    };
    let found = Diagnostic::error("P0237", span.clone(), format!("`{name}` needs `dtype = f32`"));
    let found = found.here(match name {
        "predict" => "weights moved on, in f32",
        "dc_asgd" => "older weights, in f32",
        _ => "weights moved back, in f32",
    });
    let found = found.and_at(model.dtype_span.clone(), "products read bf16");
    cx.report(found.help(format!("leave `{name}` out, or write `dtype = f32`")));
}

/// A prediction is itself a correction for staleness.
fn corrected_twice(cx: &mut Context, correction: &At<Correction>, weights: &At<Weights>) {
    let (name, why) = match correction.value {
        Correction::ErrorFeedback { .. } => (
            "error_feedback",
            "its step goes on along the last change for the delay that the prediction has gone ahead for",
        ),
        Correction::DelayCompensation { .. } => {
            ("dc_asgd", "and the weights that a gradient was made with are not kept, but a prediction")
        }
        Correction::Nesterov { .. } => {
            ("nesterov", "its weights look ahead along their last change, as the prediction does")
        }
        Correction::PipeMare { discrepancy: Some(_), .. } => (
            "discrepancy",
            "it moves backward passes back to the weights that the prediction moves forward passes away from",
        ),
        Correction::PipeMare { .. } => {
            ("anneal", "it slows updates down for a delay that the prediction has gone ahead for")
        }
    };
    let message = format!("`weights = predict` and `{name}` correct for the same updates twice");
    let found = Diagnostic::error("P0225", correction.span.clone(), message).note(why);
    let found = found.and_at(weights.span.clone(), "this predicts them");
    cx.report(found.help("keep one of them"));
}

/// `dc_asgd` compares the newest weights with those that the forward pass read, so there must be both.
fn stale_weights(cx: &mut Context, correction: &At<Correction>, weights: &At<Weights>, schedule: Option<&Schedule>) {
    let (message, note) = if weights.value == Weights::Current {
        let note =
            "a backward pass finds the weights as they are: those that its forward pass read are gone".to_owned();
        (
            "`dc_asgd` needs the weights that a gradient was made with, which `weights = current` does not keep".into(),
            note,
        )
    } else if let Some(schedule) = schedule.filter(|s| !s.order.is_empty() && s.update == Update::Flush) {
        let note = "no update lies between a forward pass and the update that its gradient goes into".to_owned();
        (
            format!("under `{}`, which flushes, no gradient is late: `dc_asgd` has nothing to correct", schedule.name),
            note,
        )
    } else {
        return;
    };
    let found = Diagnostic::error("P0225", correction.span.clone(), message).note(note);
    cx.report(
        found.help("use `weights = stash` or `double_buffer` under a schedule with `update local`, such as async_1f1b"),
    );
}

/// `discrepancy` is for backward passes that read other weights than their forward passes.
fn one_version(cx: &mut Context, correction: &At<Correction>, weights: &At<Weights>) {
    if weights.value == Weights::Current {
        return;
    }
    let name = weights.value.name();
    let message = format!("under `weights = {name}` no backward pass reads other weights than its forward pass did");
    let found = Diagnostic::error("P0225", correction.span.clone(), message).here("`discrepancy` corrects for that");
    cx.report(found.help("leave `discrepancy` out, or write `weights = current`"));
}

/// Looking ahead is a momentum, and there should be one.
fn one_momentum(cx: &mut Context, correction: &At<Correction>, optimizer: &At<Optimizer>) {
    let (name, reason, help) = match optimizer.value {
        Optimizer::Sgd { momentum: 0.0, .. } | Optimizer::AdamW { beta1: 0.0, .. } | Optimizer::NAdam { .. } => return,
        Optimizer::Sgd { .. } => {
            ("sgd", "a momentum of its own", "set `momentum = 0` in `sgd`: `nesterov` has the momentum")
        }
        Optimizer::AdamW { beta2, .. } => {
            let help = format!("set `betas = (0, {beta2})` in `adamw`: `nesterov` has the momentum; or use `nadam`");
            return refuse(cx, correction, optimizer, "adamw", "a momentum of its own", &help);
        }
        Optimizer::Adan { .. } => {
            ("adan", "a momentum and a look-ahead of its own", "use `nadam`, or leave `correction` out")
        }
        Optimizer::Lion { .. } => {
            ("lion", "a momentum of its own and only its sign", "use `nadam`, or leave `correction` out")
        }
        Optimizer::Signum { .. } => {
            ("signum", "a momentum of its own and only its sign", "use `nadam`, or leave `correction` out")
        }
        Optimizer::Muon { .. } => ("muon", "an orthogonal one of its own", "use `nadam`, or leave `correction` out"),
        Optimizer::NorMuon { .. } => {
            ("normuon", "an orthogonal one of its own", "use `nadam`, or leave `correction` out")
        }
        Optimizer::Mars { .. } => ("mars", "a momentum of its own", "use `nadam`, or leave `correction` out"),
        Optimizer::Soap { .. } => ("soap", "a momentum of its own", "use `nadam`, or leave `correction` out"),
    };
    refuse(cx, correction, optimizer, name, reason, help);
}

fn refuse(
    cx: &mut Context,
    correction: &At<Correction>,
    optimizer: &At<Optimizer>,
    name: &str,
    reason: &str,
    help: &str,
) {
    let message = format!("`nesterov` looks ahead along a momentum, and `{name}` steps along {reason}");
    let found = Diagnostic::error("P0225", correction.span.clone(), message).help(help);
    cx.report(if optimizer.span.is_empty() { found } else { found.and_at(optimizer.span.clone(), "this one") });
}
