//! `cover_latency = none | partial(50 %) | full`

use super::Context;
use super::section::Section;
use crate::ast::{Value, ValueKind};
use crate::diag::Diagnostic;
use crate::schedule::Schedule;
use crate::spec::{At, Cover};

const FORM: &str = "write `cover_latency = none`, `partial(50 %)` or `full`";

/// None if the value is wrong; that is reported.
pub(super) fn cover_latency(cx: &mut Context, section: &Section<'_>, schedule: Option<&Schedule>) -> Option<At<Cover>> {
    let Some(value) = section.value(cx, "cover_latency") else {
        return Some(At { value: Cover::default(), span: section.start.clone() });
    };
    let share = share(cx, value)?;
    if let Some(schedule) = schedule.filter(|s| share > 0 && s.latency_warmup().is_none()) {
        let key = section.find("cover_latency").map_or(value.span.clone(), |entry| entry.key.span.clone());
        let (why, help) = match schedule.order.is_empty() {
            true => ("a search covers latency as far as its limits leave".into(), "remove it"),
            false => {
                let why = format!("`{}` does not run on while micro-batches travel", schedule.name);
                (why, "use it with `async_1f1b`, or remove it")
            }
        };
        let found = Diagnostic::lint("P0240", key, format!("`cover_latency` has no effect: {why}"))
            .note("latency is covered by more forward passes in the warm-up of a schedule with `update local`");
        cx.report(found.help(help));
    }
    Some(At { value: Cover { share }, span: value.span.clone() })
}

/// In hundredths of a percent.
fn share(cx: &mut Context, value: &Value) -> Option<u32> {
    let ValueKind::Call(name, arguments) = &value.kind else {
        return match cx.word(value, "cover_latency", &["none", "partial(50 %)", "full"], &[])? {
            "full" => Some(Cover::FULL),
            _ => Some(0),
        };
    };
    if name.text != "partial" {
        let found =
            Diagnostic::error("P0210", name.span.clone(), format!("`cover_latency` can't be `{}(…)`", name.text));
        cx.report(found.help(FORM));
        return None;
    }
    match arguments.as_slice() {
        [only] if only.name.is_none() => {
            let share = cx.share(&only.value, "partial")?;
            Some((share.value * f64::from(Cover::FULL)).round() as u32)
        }
        _ => {
            let found = Diagnostic::error("P0213", name.span.clone(), "`partial` needs one share, and nothing else");
            cx.report(found.help(FORM));
            None
        }
    }
}
