//! The norm of all gradients, which `clip = global` needs before every update: N and T in the plan.
//!
//! # Meaning
//!
//! After a rank's last weight gradient, each of its stages adds its squares (`N`), lowest stage first, then the total is waited for (`T`),
//! uppermost stage first; then come the updates. So ranks follow one order, up the stages and down again, and can't wait for each other
//! for ever. See [`artifact::stream`]. No rank updates before every rank has made all of its gradients: this is the barrier that the
//! bubble has in it.
//!
//! Several copies of the model are analysed without it, as without all that their copies exchange.
//!
//! Only a flush has it. Without one, each stage updates at another time: the norm would be of gradients of different updates, or the barrier
//! would be a flush.

use crate::facts::Proof;
use crate::line::{Item, Line};
use crate::order::fault;
use artifact::stream::{Op, Program};
use artifact::work;
use dsl::diag::Diagnostic;
use dsl::schedule::Schedule;

/// Adds the instructions to the lines of all ranks, where the program needs them.
pub(crate) fn place(program: &Program, lines: &mut [Line]) {
    if !program.norms() {
        return;
    }
    let last = program.rank_of_stage.len() - 1;
    for line in lines {
        work::visit(line.period.len());
        let mut stages: Vec<u32> = line.period.iter().filter(|i| i.op == Op::U).map(|i| i.stage).collect();
        stages.sort_unstable();
        // A flush has one update, at its end.
        let updates = line.period.iter().position(|i| i.op == Op::U).unwrap_or(line.period.len());
        let of = |op, stage: &u32| Item { op, stage: *stage, mb: 0 };
        let up = stages.iter().map(|stage| of(Op::N, stage));
        let down = stages.iter().rev().filter(|stage| (**stage as usize) < last).map(|stage| of(Op::T, stage));
        let placed: Vec<Item> = up.chain(down).collect();
        line.period.splice(updates..updates, placed);
    }
}

/// What makes every update's norm that of all gradients.
pub(crate) fn proof(program: &Program) -> Option<Proof> {
    program.norms().then(|| Proof {
        claim: "every update reads the norm of all stages' gradients of its micro-batches".into(),
        holds: true,
        by: "each stage adds its squares once, after its last weight gradient, to the sum of the stages before; updates come after the total, and the next sums after the updates".into(),
    })
}

/// `P0345`: a run without end.
pub(crate) fn unbounded(schedule: &Schedule) -> Diagnostic {
    let message = format!("`clip = global` needs a flush, and `{}` has none", schedule.name);
    fault(schedule, "P0345", &schedule.span, message)
        .note("the norm of all stages' gradients is known when the last stage has made its own: every rank would wait")
        .help("use `clip = per_stage(…)` or `per_tensor(…)`, or a schedule with `flush every accumulate`")
}

/// `P0345`: a table that has no place for it. None where none is needed.
pub(crate) fn unplaced(program: &Program, transfers: bool, updates: bool) -> Option<Diagnostic> {
    let what = match (transfers, updates) {
        _ if !program.norms() => return None,
        (true, _) => "its own transfers",
        (_, true) => "its own updates",
        _ => return None,
    };
    let message = format!("`clip = global` needs an exchange of norms that a table with {what} leaves no place for");
    Some(
        Diagnostic::error("P0345", 0..0, message)
            .note("between the last weight gradients and the updates, squares are summed up over all stages")
            .help("leave sends, receives and updates out of the table: they are placed; or use `clip = per_stage(…)`"),
    )
}
