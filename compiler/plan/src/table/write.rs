//! Streams to tables.

use super::{Action, Verb};
use artifact::ids::RankId;
use artifact::stream::{Op, Program};
use std::collections::HashSet;

/// What a written table holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Compute actions, each in the column of the step in which it can run when every action takes one; blank cells
    /// before.
    ComputeOnly,
    /// Sends and receives too, in the order of PyTorch's own lowering; no blank cells.
    ComputeComms,
}

/// The text of a table (lines end with CR LF, as PyTorch writes them) for `updates` updates. Whether updates are in the
/// table: not for a flush, whose update PyTorch makes after the table.
///
/// `program` must be verified.
pub fn write(program: &Program, content: Content, updates: u64) -> String {
    let rows = computed(program, if is_flush(program) { 1 } else { updates });
    let rows = match content {
        Content::ComputeOnly => in_steps(&rows),
        Content::ComputeComms => lowered(program, &rows),
    };
    let mut writer = csv::WriterBuilder::new().flexible(true).terminator(csv::Terminator::CRLF).from_writer(Vec::new());
    for row in &rows {
        let cells = row.iter().map(|cell| cell.map(|action| action.to_string()).unwrap_or_default());
        writer.write_record(cells).expect("a vector takes every record");
    }
    String::from_utf8(writer.into_inner().expect("a vector is always flushed")).expect("cells are text")
}

/// Whether the program is one update after all micro-batches, as PyTorch's tables are.
pub fn is_flush(program: &Program) -> bool {
    program.streams.iter().all(|stream| {
        let computed = stream.period.iter().rev().skip_while(|instr| instr.op == Op::U);
        stream.prologue.is_empty() && stream.updates == 1 && computed.into_iter().all(|instr| instr.op != Op::U)
    })
}

/// By rank: what it computes in a run.
fn computed(program: &Program, updates: u64) -> Vec<Vec<Action>> {
    let flush = is_flush(program);
    let verb = |op| match op {
        Op::F => Some(Verb::F),
        Op::B(_) => Some(Verb::B),
        Op::I => Some(Verb::I),
        Op::W(_) => Some(Verb::W),
        Op::U => Some(Verb::U).filter(|_| !flush),
        Op::SendF | Op::RecvF | Op::SendB | Op::RecvB | Op::SendG | Op::RecvG => None,
        Op::N | Op::T | Op::SendN | Op::RecvN | Op::SendT | Op::RecvT => None,
    };
    let row = |stream: &artifact::stream::Stream| {
        let actions = stream.segment(updates);
        actions
            .filter_map(|(op, stage, mb)| Some(Action { stage: stage.0, verb: verb(op)?, number: mb as u32 }))
            .collect()
    };
    program.streams.iter().map(row).collect()
}

/// What of another stage must have run before the action.
fn needs(action: Action, stages: u32) -> Option<Action> {
    match action.verb {
        Verb::F => Some(Action { stage: action.stage.checked_sub(1)?, ..action }),
        Verb::B | Verb::I if action.stage + 1 < stages => Some(Action { stage: action.stage + 1, ..action }),
        _ => None,
    }
}

/// Whether `done` holds the action; a gradient may have been made by B or I.
fn holds(done: &HashSet<Action>, action: Action) -> bool {
    let as_verb = |verb| done.contains(&Action { verb, ..action });
    if action.verb == Verb::F { as_verb(Verb::F) } else { as_verb(Verb::B) || as_verb(Verb::I) }
}

/// Each action in the first step after those that it needs.
fn in_steps(rows: &[Vec<Action>]) -> Vec<Vec<Option<Action>>> {
    let stages = rows.iter().flatten().map(|a| a.stage + 1).max().unwrap_or(0);
    let mut table = vec![Vec::new(); rows.len()];
    let mut next = vec![0; rows.len()];
    let mut done = HashSet::new();
    while next.iter().zip(rows).any(|(next, row)| *next < row.len()) {
        let ready: Vec<Option<Action>> = next
            .iter()
            .zip(rows)
            .map(|(next, row)| {
                row.get(*next).copied().filter(|a| needs(*a, stages).is_none_or(|other| holds(&done, other)))
            })
            .collect();
        assert!(ready.iter().any(Option::is_some), "a verified program has no cycle of waits");
        for (rank, action) in ready.into_iter().enumerate() {
            if next[rank] == rows[rank].len() {
                continue;
            }
            table[rank].push(action);
            next[rank] += usize::from(action.is_some());
            done.extend(action);
        }
    }
    table
}

/// PyTorch's lowering: ranks in ascending order perform at most one compute action each, again and again; an action is
/// followed by its send, and the receive goes to the end of the other rank's row at once. So both sides are in one order.
fn lowered(program: &Program, rows: &[Vec<Action>]) -> Vec<Vec<Option<Action>>> {
    let stages = program.rank_of_stage.len() as u32;
    let home = |stage: u32| program.rank_of_stage.get(stage as usize).copied();
    let mut table: Vec<Vec<Option<Action>>> = vec![Vec::new(); rows.len()];
    let mut next = vec![0; rows.len()];
    let mut there = HashSet::new();
    while next.iter().zip(rows).any(|(next, row)| *next < row.len()) {
        let before = next.clone();
        for rank in 0..rows.len() {
            let Some(action) = rows[rank].get(next[rank]).copied() else { continue };
            if needs(action, stages).is_some_and(|other| !holds(&there, other)) {
                continue;
            }
            next[rank] += 1;
            table[rank].push(Some(action));
            there.insert(action);
            let Some((send, receive)) = transfer(action, stages) else { continue };
            let (Some(from), Some(to)) = (home(send.stage), home(receive.stage)) else { continue };
            if from != to {
                debug_assert_eq!(from, RankId(rank as u32));
                table[rank].push(Some(send));
                table[to.index()].push(Some(receive));
            }
        }
        assert!(next != before, "a verified program has no cycle of waits");
    }
    table
}

/// The send of what an action makes, and its receive.
fn transfer(action: Action, stages: u32) -> Option<(Action, Action)> {
    let Action { stage, verb, number } = action;
    let (verbs, to) = match verb {
        Verb::F => ((Verb::SendF, Verb::RecvF), Some(stage + 1).filter(|to| *to < stages)),
        Verb::B | Verb::I => ((Verb::SendB, Verb::RecvB), stage.checked_sub(1)),
        _ => return None,
    };
    to.map(|to| (Action { stage, verb: verbs.0, number }, Action { stage: to, verb: verbs.1, number }))
}
