//! A schedule for several stages a rank says of every action which chunk it is for.

use super::{Context, not_yet};
use crate::diag::{Diagnostic, Span};
use crate::schedule::{Action, Backward, Chunks, Place, Schedule, Step, Update};

/// Checks that each action either names its chunk in every step, all chunks there are, or has a sequence; with one stage
/// a rank neither is needed. `order` is where to point at what is missing.
pub(super) fn check(cx: &mut Context, schedule: &Schedule, order: &Span) {
    // None: as `pipeline.chunks` says.
    let count = match schedule.place {
        Place::Linear => Some(1),
        Place::Wave | Place::Bidirectional => Some(2),
        Place::Loop(Chunks::Fixed(count)) => Some(count),
        Place::Loop(Chunks::Given) => None,
    };
    if count != Some(1) && schedule.update == Update::Local {
        not_yet(cx, &schedule.span, "`update local` with several stages a rank", "use `flush every accumulate`");
        return;
    }
    let kinds: &[(Action, &str)] = match schedule.backward {
        Backward::Whole => &[(Action::F, "F"), (Action::B, "B")],
        Backward::Split => &[(Action::F, "F"), (Action::I, "I"), (Action::W, "W")],
    };
    for (action, name) in kinds {
        let steps: Vec<&Step> =
            schedule.order.iter().flat_map(|p| &p.body).filter(|step| step.action == *action).collect();
        if let Some(found) = wrong(schedule, count, &steps, *action, name, order) {
            cx.report(found);
        }
    }
}

fn wrong(
    schedule: &Schedule,
    count: Option<u32>,
    steps: &[&Step],
    action: Action,
    name: &str,
    order: &Span,
) -> Option<Diagnostic> {
    let fault = |span: &Span, message: String| Diagnostic::error("P0235", span.clone(), message);
    let sequence = schedule.sequences.iter().find(|s| s.action == action);
    let named = steps.iter().find_map(|step| step.chunk.map(|chunk| (step, chunk)));
    let plain = steps.iter().find(|step| step.chunk.is_none());
    let example = format!("sequence {name} = groups(P) chunks ascending");
    Some(match (named, plain, sequence, count) {
        (Some((step, chunk)), _, Some(sequence), _) => {
            fault(&step.span, format!("`{name}{chunk}` names a chunk, and so does the sequence of `{name}`"))
                .and_at(sequence.span.clone(), "the sequence")
                .help(format!("write `{name}`, or remove the sequence"))
        }
        (Some((step, chunk)), _, None, None) => {
            fault(&step.span, format!("`{name}{chunk}` names a chunk, and how many there are is left open"))
                .help(format!("write `place loop(2)`, or `{name}` and `{example}`"))
        }
        (Some((step, _)), Some(plain), None, Some(_)) => {
            fault(&plain.span, format!("this `{name}` names no chunk, others do"))
                .and_at(step.span.clone(), "for example this")
                .help(format!("write `{name}0`, or name none and give `{example}`"))
        }
        (Some(_), None, None, Some(count)) => {
            let beyond = steps.iter().find(|step| step.chunk.is_some_and(|chunk| chunk >= count));
            let missing = (0..count).find(|chunk| steps.iter().all(|step| step.chunk != Some(*chunk)));
            match (beyond, missing) {
                (Some(step), _) => {
                    let chunk = step.chunk.unwrap_or(count);
                    fault(&step.span, format!("there is no chunk {chunk}: a rank has {count}")).help(match count {
                        1 => format!("write `{name}`, or `place loop(2)`"),
                        _ => format!("chunks are counted from 0: `{name}0` to `{name}{}`", count - 1),
                    })
                }
                (None, Some(chunk)) => fault(order, format!("the order never does `{name}{chunk}`"))
                    .help(format!("add a step `{name}{chunk}`: a rank has {count} chunks")),
                (None, None) => return None,
            }
        }
        (None, Some(plain), None, None | Some(2..)) => {
            fault(&plain.span, format!("which chunk this `{name}` is for is not said"))
                .note("a rank has several stages, its chunks")
                .help(format!("add `{example}` to the schedule, or name the chunk: `{name}0`"))
        }
        _ => return None,
    })
}
