//! `weights = stash` or `weights = predict(tau = 0.5)` in `staleness`, `weights stash` in a schedule: which weights the passes of a micro-batch read.

use super::Context;
use super::rate::bind;
use super::schedule::words;
use crate::ast::{Clause, Value, ValueKind};
use crate::diag::{Diagnostic, Span};
use crate::schedule::{Schedule, Update};
use crate::spec::{At, Weights};

/// The policies by name that are for a schedule to say, too.
const NAMES: [(&str, Weights); 3] =
    [("current", Weights::Current), ("stash", Weights::Stash), ("double_buffer", Weights::DoubleBuffer)];

impl Weights {
    /// As a spec writes it.
    pub fn name(self) -> &'static str {
        NAMES.iter().find(|(_, weights)| *weights == self).map_or("predict", |(name, _)| name)
    }
}

/// The value of `weights` in `staleness`.
pub(super) fn value(cx: &mut Context, value: &Value) -> Option<At<Weights>> {
    let at = |weights| At { value: weights, span: value.span.clone() };
    if let ValueKind::Call(name, arguments) = &value.kind
        && name.text == "predict"
    {
        let [tau] = bind(cx, name, arguments, ["tau"], &["tau"])?;
        let tau = cx.real(tau?, "tau", "above 0, up to 1000", |x| x > 0.0 && x <= 1000.0)?;
        return Some(at(Weights::Predict { tau: Some(tau.value) }));
    }
    let word = cx.word(value, "weights", &["current", "stash", "double_buffer", "predict"], &[])?;
    let named = NAMES.iter().find(|(name, _)| *name == word);
    Some(at(named.map_or(Weights::Predict { tau: None }, |(_, weights)| *weights)))
}

/// The clause `weights` of a schedule.
pub(super) fn clause(cx: &mut Context, clause: &Clause) -> Option<Weights> {
    const FORM: &str = "weights stash` or `weights double_buffer";
    let word = words(cx, clause, FORM)?;
    let found = NAMES.iter().find(|(name, _)| *name == word).map(|(_, weights)| *weights);
    if found.is_none() {
        super::schedule::wrong_form(cx, clause, FORM);
    }
    found
}

/// What a spec gives together with what its schedule is made for; `start` is where a default is reported.
pub(super) fn policy(
    cx: &mut Context,
    given: Option<At<Weights>>,
    schedule: Option<&Schedule>,
    start: Span,
) -> At<Weights> {
    let own = schedule.and_then(|s| s.weights);
    let policy = match given {
        Some(given) => given,
        None => At { value: own.unwrap_or(Weights::Current), span: start },
    };
    // A search finds what fits.
    if let Some(schedule) = schedule.filter(|s| !s.order.is_empty()) {
        fits(cx, &policy, schedule);
    }
    policy
}

fn fits(cx: &mut Context, policy: &At<Weights>, schedule: &Schedule) {
    let (name, weights) = (&schedule.name, policy.value.name());
    let error = |message: String| Diagnostic::error("P0219", policy.span.clone(), message);
    if let Some(own) = schedule.weights.filter(|own| *own != policy.value) {
        let own = own.name();
        let found = error(format!("the schedule `{name}` is made for `weights = {own}`, not `{weights}`"));
        let found = found.note("its name stands for its order and for the weights that its passes read");
        cx.report(found.help(format!(
            "leave `weights` out, or write `schedule = async_1f1b`, the same kind of order under any policy"
        )));
    } else if matches!(policy.value, Weights::Predict { .. }) && schedule.update == Update::Flush {
        let found = error(format!("under `{name}`, which flushes, there is nothing to predict"));
        let found =
            found.note("no update lies between a forward pass and its backward pass: both read the same weights");
        cx.report(found.help("leave `weights` out, or use a schedule with `update local`, such as async_1f1b"));
    } else if policy.value == Weights::DoubleBuffer && schedule.update == Update::Flush {
        let found =
            error(format!("`weights = double_buffer` under `{name}`, which flushes, makes gradients late for nothing"));
        let found = found.note(
            "after a flush every forward pass can read the newest weights; two versions would make it read the ones before",
        );
        cx.report(found.help("leave `weights` out, or use a schedule with `update local`, such as pipedream_2bw"));
    } else if policy.value == Weights::Stash && schedule.update == Update::Flush {
        let message = format!("`weights = stash` changes nothing under `{name}`, which flushes");
        let found = Diagnostic::lint("P0240", policy.span.clone(), message);
        let found = found.note("no update lies between a forward pass and its backward pass, so there is one version");
        cx.report(found.help("remove it, or use a schedule with `update local`, such as pipedream"));
    }
}
