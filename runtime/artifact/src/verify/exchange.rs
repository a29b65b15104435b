//! The two ends of a tied table: that they read the same versions of it, and that each update takes both ends' gradients.
//!
//! # Meaning
//!
//! On different ranks, `SEND_G` of update `u` comes after the weight gradients of all its micro-batches and before `U`: it offers
//! the whole sum, and the next update's first weight gradient, which overwrites it, comes after `U`, which waits until it was
//! taken. `RECV_G` comes after `U` of the update before, which is done with the buffer, and before `U`, which reads it. So both
//! `U`s of an update add the same two sums.
//!
//! On one rank nothing is sent. Between both ends' `U`s comes no other instruction of the two stages: whichever makes the update, both
//! sums are whole, neither is begun anew, and no pass reads the table in between.

use super::index::Kind;
use super::versions::Versions;
use super::{StageIndex, Violation};
use crate::ids::StageId;
use crate::stream::{Instr, Op, Program};
use crate::work;

/// The invariant of the module's text.
pub(super) fn check(program: &Program, stages: &[StageIndex], versions: &[Versions]) -> Option<Violation> {
    let ends = program.tied_ends()?;
    if let Some((op, mb, read)) = versions[ends[0]].apart(&versions[ends[1]]) {
        return Some(Violation::Apart { stages: ends.map(|s| StageId(s as u32)), op, mb, versions: read });
    }
    if program.partner(ends[0]).is_none() {
        return together(program, ends);
    }
    ends.iter().find_map(|s| order(&stages[*s], program.accumulate))
}

/// The exchange of one end stands where it has to.
fn order(stage: &StageIndex, accumulate: u32) -> Option<Violation> {
    let (send, receive) = stage.once(Kind::SendG).zip(stage.once(Kind::RecvG))?;
    let wrong = |op, what| move |update| Violation::Exchange { stage: stage.stage, op, update, what };
    let gradients = stage.first_before_gradients(&send, accumulate);
    gradients
        .map(wrong(Kind::SendG, "does not come after its last weight gradient"))
        .or_else(|| Some(wrong(Kind::SendG, "does not come before U")(send.first_not_before(&stage.update, 0)?)))
        .or_else(|| Some(wrong(Kind::RecvG, "does not come before U")(receive.first_not_before(&stage.update, 0)?)))
        .or_else(|| {
            let before = stage.update.first_not_before(&receive, 1)?;
            Some(wrong(Kind::RecvG, "comes before the update before is done with the buffer")(before + 1))
        })
}

/// Nothing of either stage comes between their updates.
fn together(program: &Program, ends: [usize; 2]) -> Option<Violation> {
    let stream = &program.streams[program.rank_of_stage[ends[0]].index()];
    work::visit(stream.prologue.len() + stream.period.len());
    [&stream.prologue, &stream.period].into_iter().find_map(|section| {
        let mut open: Option<&Instr> = None;
        for i in section.iter().filter(|i| ends.contains(&i.stage.index())) {
            match open {
                Some(first) if i.op == Op::U && i.stage != first.stage && i.mb == first.mb => open = None,
                Some(first) => return Some(alone(first)),
                None => open = (i.op == Op::U).then_some(i),
            }
        }
        open.map(alone)
    })
}

fn alone(update: &Instr) -> Violation {
    let what = "is not followed by that of the table's other end";
    Violation::Exchange { stage: update.stage, op: Kind::U, update: update.mb.into(), what }
}
