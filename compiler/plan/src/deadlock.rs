//! What a deadlock looks like in the schedule: the cycle of waiting ranks.

use crate::Shape;
use crate::expand::origin;
use crate::order::fault;
use artifact::stream::{Op, Program};
use artifact::verify::execute::{Cause, Stuck, Waiting};
use artifact::verify::index::Kind;
use dsl::diag::{Diagnostic, Label};
use dsl::schedule::{Action, Schedule};

/// The diagnostic for ranks that wait for each other.
pub(crate) fn explain(schedule: &Schedule, shape: &Shape, program: &Program, stuck: &Stuck) -> Diagnostic {
    let Stuck::Cycle(cycle) = stuck else {
        return fault(schedule, "P0310", &schedule.span, "this is not proved free of deadlocks")
            .note("the proof runs the streams until they repeat, and gave up after its bound of work")
            .help("use a shorter warm-up or a smaller accumulate");
    };
    let mut diagnostic = fault(schedule, "P0310", &schedule.span, "ranks wait for each other for ever")
        .here(format!("with {} ranks and accumulate = {}", shape.ranks, shape.accumulate));
    let library = schedule.library.then(|| schedule.name.clone());
    for (number, waiting) in cycle.iter().enumerate() {
        diagnostic.notes.push(sentence(waiting));
        let action = action(waiting.op);
        if let Some(span) = action.and_then(|a| origin(schedule, shape, waiting.stage.0, a, waiting.mb)) {
            let label = Label { span, text: format!("rank {} is here", waiting.rank), library: library.clone() };
            if number == 0 {
                diagnostic.labels.insert(0, label);
            } else if !diagnostic.labels.iter().any(|l| l.span == label.span) {
                diagnostic.labels.push(label);
            }
        }
    }
    diagnostic.notes.push(crate::grid::stuck(program, cycle));
    diagnostic.help("let every rank run the forward passes that the ranks after it need before it waits for their gradients: for example `warmup P - 1 - s { F }`")
}

/// What a rank waits for.
pub(crate) fn sentence(waiting: &Waiting) -> String {
    let op = Kind::of(waiting.op).name();
    let Waiting { rank, mb, .. } = waiting;
    match waiting.cause {
        Cause::Transfer { rank: sender } => {
            let what = if waiting.op == Op::F { "the activations" } else { "the gradient" };
            format!("rank {rank}, before {op} {mb}, waits for {what} of micro-batch {mb} from rank {sender}")
        }
        Cause::Slot { rank: receiver, holder } => format!(
            "rank {rank}, before {op} {mb}, waits for rank {receiver} to receive micro-batch {holder}, which holds the send slot"
        ),
    }
}

fn action(op: Op) -> Option<Action> {
    match op {
        Op::F => Some(Action::F),
        Op::B(_) => Some(Action::B),
        Op::I => Some(Action::I),
        Op::W(_) => Some(Action::W),
        _ => None,
    }
}
