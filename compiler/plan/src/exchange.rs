//! The exchange of a tied table's gradients between its ends on different ranks: REDUCE_GRAD in the plan.
//!
//! # Meaning
//!
//! Each end offers its accumulator (`SEND_G`) right after the update's last weight gradient; the receive is posted as early as the
//! buffer is free, like every receive ([`crate::posts`]), and `U` waits for both. See [`artifact::stream`].
//!
//! Both updates are the same then: their rule is the parameter's, their rate the update's. What a correction takes from a stage's
//! delay is the same too, as a flush has none. Only a clip by the norm of a stage differs, and is refused.
//!
//! Only a flush has it: there every pass of an update's micro-batches reads the same version at both ends. A run without end updates
//! its ends at different times relative to what they read, so their copies would be used at different versions.

use crate::facts::Proof;
use crate::line::{Item, Line, weight_gradient};
use crate::order::fault;
use crate::{Shape, Subject};
use artifact::ids::StageId;
use artifact::stream::{Op, Policy, Program};
use artifact::verify::index::Kind;
use artifact::work;
use dsl::diag::Diagnostic;
use dsl::schedule::Schedule;
use dsl::spec::Clip;

/// Adds the sends to the lines of both ends, where they lie on different ranks.
pub(crate) fn place(program: &Program, lines: &mut [Line]) {
    let ends = program.tied_ends().into_iter().flatten().filter(|s| program.partner(*s).is_some());
    for stage in ends {
        let line = &mut lines[program.rank_of_stage[stage].index()];
        work::visit(line.period.len());
        let here = |item: &Item| item.stage as usize == stage && weight_gradient(item.op);
        // A flush has one update.
        if let Some(last) = line.period.iter().rposition(here) {
            line.period.insert(last + 1, Item { op: Op::SendG, stage: stage as u32, mb: 0 });
        }
    }
}

/// What makes the copies of a tied table stay equal.
pub(crate) fn proof(program: &Program) -> Option<Proof> {
    let [first, last] = program.tied_ends()?;
    let by = match program.partner(first) {
        Some(_) => format!(
            "stages {first} and {last} start with the same values, exchange their accumulators after the last weight gradient of each update, and add the same two sums before it; their passes read the same version for one micro-batch of each residue beyond the prologue"
        ),
        None => {
            format!("stages {first} and {last} are on one rank and share it: between both updates comes nothing else")
        }
    };
    Some(Proof { claim: "both ends of the tied table are equal whenever they are read".into(), holds: true, by })
}

/// `P0344`: both copies of a tied table would be clipped by norms of their own stages.
pub(crate) fn clipped(subject: &Subject, program: &Program) -> Option<Diagnostic> {
    let [first, last] = program.tied_ends().filter(|ends| program.partner(ends[0]).is_some())?;
    let clip = subject.clip.as_ref().filter(|clip| matches!(clip.value, Clip::PerStage { .. }))?;
    let message = "`clip = per_stage` would make the copies of the tied table drift apart";
    Some(
        Diagnostic::error("P0344", clip.span.clone(), message)
            .note(format!(
                "stages {first} and {last} each hold a copy and have other gradients beside it, so each would scale the table's gradient by another norm"
            ))
            .help("use `clip = per_tensor(…)`, whose norm is that of the table's own gradient at both ends, or `clip = global(…)`, one norm for all"),
    )
}

/// `P0343`: a run without end over several ranks.
pub(crate) fn unbounded(schedule: &Schedule, shape: &Shape) -> Diagnostic {
    let (reason, why) = match shape.policy {
        Policy::DoubleBuffer => (
            "the last stage's updates would wait for the first stage's gradients",
            "both ends would read the same version, but the exchange would come in the midst of the last stage's micro-batches: that is not proved",
        ),
        _ => (
            "the copies of the table would be read at different versions",
            "the first and the last stage update at different times relative to what they read: a micro-batch would meet one version where it is embedded, another in the head",
        ),
    };
    let message = format!("`tied = on` needs a flush: under `{}` {reason}", schedule.name);
    fault(schedule, "P0343", &schedule.span, message)
        .note(why)
        .help("use a schedule with `flush every accumulate`, or `tied = off`; one rank holds one table and may do both")
}

/// `P0343`: passes of a micro-batch that read different versions of the table.
pub(crate) fn apart(ends: [StageId; 2], op: Kind, mb: u64, versions: [i64; 2]) -> Diagnostic {
    let [first, last] = ends;
    Diagnostic::error("P0343", 0..0, "`tied = on` needs both ends of the table to read the same versions of it")
        .note(format!(
            "{} of micro-batch {mb} reads version {} on stage {first}, and version {} on stage {last}",
            op.name(),
            versions[0],
            versions[1]
        ))
        .help("make every stage's update after all passes of its micro-batches, or use `tied = off`")
}

/// `P0343`: updates of a table on one rank that do not come together.
pub(crate) fn between(what: &str) -> Diagnostic {
    Diagnostic::error("P0343", 0..0, "`tied = on` needs the updates of the first and the last stage to come together")
        .note(what)
        .note("both stages share the table: no pass of either may come between their updates")
        .help("move one `U` right after the other, or use `tied = off`")
}

/// `P0343`: a table of a schedule that has no place for the exchange. None where none is needed.
pub(crate) fn unplaced(program: &Program, transfers: bool, updates: bool) -> Option<Diagnostic> {
    let [first, last] = program.tied_ends()?;
    let what = match (transfers, updates) {
        (true, _) => "its own transfers",
        (_, true) => "its own updates",
        _ => return None,
    };
    program.partner(first)?;
    let message = format!("`tied = on` needs an exchange of gradients that a table with {what} leaves no place for");
    Some(
        Diagnostic::error("P0343", 0..0, message)
            .note(format!("stages {first} and {last} hold the ends of the tied table, on different ranks"))
            .help("leave sends, receives and updates out of the table: they are placed; or use `tied = off`"),
    )
}
