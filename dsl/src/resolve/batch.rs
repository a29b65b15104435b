//! `microbatch`, `accumulate` and `batch`: how the sequences of an update are divided.

use super::section::Section;
use super::{ACCUMULATE_MAX, Context};
use crate::ast::{Number, Value, ValueKind};
use crate::diag::Diagnostic;
use crate::spec::At;

/// Largest number of sequences in a micro-batch.
const MICROBATCH_MAX: u64 = 65_536;

/// The default of `microbatch` where there is no model.
static ONE: Value =
    Value { kind: ValueKind::Number(Number { value: 1.0, whole: Some(1), unit: None }), span: usize::MAX..usize::MAX };

/// Sequences of a micro-batch, micro-batches of an update. With `batch`, the sequences of an update, one of them may be
/// left out; nothing is rounded.
pub(super) fn sizes(cx: &mut Context, section: &Section<'_>, has_model: bool) -> (Option<At<u32>>, Option<At<u32>>) {
    let written = |key: &str| section.find(key).is_some();
    let batch = section.value(cx, "batch").map(|v| cx.count32(v, "batch", 1..=MICROBATCH_MAX * ACCUMULATE_MAX));
    let derived = if written("batch") { (!written("microbatch"), !written("accumulate")) } else { (false, false) };
    let microbatch = match (derived, has_model) {
        ((true, false), _) => None,
        // Without a model a micro-batch is the unit of work.
        (_, false) => section.value(cx, "microbatch").or(Some(&ONE)),
        (_, true) => section.need(cx, "microbatch", "microbatch = 4"),
    };
    let accumulate = match derived {
        (false, true) => None,
        _ => section.need(cx, "accumulate", "accumulate = 8"),
    };
    let microbatch = microbatch.and_then(|v| cx.count32(v, "microbatch", 1..=MICROBATCH_MAX));
    let accumulate = accumulate.and_then(|v| cx.count32(v, "accumulate", 1..=ACCUMULATE_MAX));
    let (microbatch, accumulate) = match (batch.flatten(), microbatch, accumulate) {
        (Some(batch), Some(microbatch), None) if derived.1 => {
            let accumulate =
                divided(cx, &batch, &microbatch, &format!("micro-batches of {}", microbatch.value), ACCUMULATE_MAX);
            (Some(microbatch), accumulate)
        }
        (Some(batch), None, Some(accumulate)) if derived.0 => {
            let microbatch =
                divided(cx, &batch, &accumulate, &format!("{} micro-batches", accumulate.value), MICROBATCH_MAX);
            (microbatch, Some(accumulate))
        }
        (Some(batch), Some(microbatch), Some(accumulate)) => {
            agree(cx, &batch, &microbatch, &accumulate);
            (Some(microbatch), Some(accumulate))
        }
        (_, microbatch, accumulate) => (microbatch, accumulate),
    };
    let placed = |at: At<u32>| if at.span == ONE.span { At { span: section.start.clone(), ..at } } else { at };
    (microbatch.map(placed), accumulate)
}

/// `batch / by`, which must be whole.
fn divided(cx: &mut Context, batch: &At<u32>, by: &At<u32>, what: &str, most: u64) -> Option<At<u32>> {
    let (all, by_value) = (batch.value, by.value);
    if all % by_value == 0 && u64::from(all / by_value) <= most {
        return Some(At { value: all / by_value, span: batch.span.clone() });
    }
    let message = format!("a batch of {all} sequences does not divide into {what}");
    let found = Diagnostic::error("P0229", batch.span.clone(), message).and_at(by.span.clone(), "by this");
    let (below, above) = (all / by_value * by_value, (all / by_value + 1).saturating_mul(by_value));
    cx.report(match below {
        _ if all % by_value == 0 => {
            found.help(format!("this would be {}; at most {most} are possible", all / by_value))
        }
        0 => found.help(format!("the next batch that does is {above}")),
        _ => found.help(format!("the nearest batches that do are {below} and {above}")),
    });
    None
}

fn agree(cx: &mut Context, batch: &At<u32>, microbatch: &At<u32>, accumulate: &At<u32>) {
    let product = u64::from(microbatch.value) * u64::from(accumulate.value);
    if product == u64::from(batch.value) {
        return;
    }
    let (sequences, count) = (microbatch.value, accumulate.value);
    let message = match batch.value % count {
        0 => format!("a batch of {} is not {count} micro-batches of {sequences}: these are {product}", batch.value),
        _ => format!("a batch of {} sequences does not divide into {count} micro-batches", batch.value),
    };
    let found = Diagnostic::error("P0229", batch.span.clone(), message)
        .and_at(microbatch.span.clone(), "sequences of a micro-batch")
        .and_at(accumulate.span.clone(), "micro-batches of an update");
    cx.report(found.help(format!("batch is microbatch times accumulate: write `batch = {product}`, or leave it out")));
}
