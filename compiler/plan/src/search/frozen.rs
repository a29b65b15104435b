//! Orders as programs, and programs as orders.

use super::problem::{KINDS, Kind, Order, Problem, Token};
use crate::Shape;
use crate::expand::assemble;
use crate::line::Line;
use crate::order::Act;
use artifact::stream::{Op, Program};
use artifact::verify::verify;
use dsl::schedule::{Action, Backward, Place, Schedule, Update};

/// The order as instruction streams, proved ([`artifact::verify`]). None when they are not sound.
pub fn program(problem: &Problem, order: &Order, shape: &Shape) -> Option<Program> {
    let line = |(rank, tokens): (usize, &Vec<Token>)| {
        let mut done = vec![[0; KINDS.len()]; problem.chunks];
        let act = |token: &Token| {
            let mb = &mut done[usize::from(token.chunk)][token.kind as usize];
            *mb += 1;
            let action = match token.kind {
                Kind::F => Action::F,
                Kind::I => Action::I,
                Kind::W => Action::W,
            };
            Act { action, chunk: u32::from(token.chunk), mb: *mb - 1, origin: (0, 0) }
        };
        let acts: Vec<Act> = tokens.iter().map(act).collect();
        let stages: Vec<u32> = (0..problem.chunks).map(|chunk| problem.stage(rank, chunk) as u32).collect();
        Line::flush(&acts, &stages, problem.microbatches as u64)
    };
    let lines: Vec<Line> = order.iter().enumerate().map(line).collect();
    let program = assemble(lines, problem.place, shape);
    verify(&program).is_ok().then_some(program)
}

/// The order of a program whose repetition is one flush. None where it has no place or takes micro-batches in another order.
pub fn order(problem: &Problem, program: &Program) -> Option<Order> {
    let mut orders = Vec::new();
    for (rank, stream) in program.streams.iter().enumerate() {
        let mut done = vec![[0; KINDS.len()]; problem.chunks];
        let mut tokens = Vec::new();
        for instr in stream.prologue.iter().chain(&stream.period) {
            let kinds: &[Kind] = match instr.op {
                Op::F => &[Kind::F],
                Op::I => &[Kind::I],
                Op::W(_) => &[Kind::W],
                Op::B(_) => &[Kind::I, Kind::W],
                _ => &[],
            };
            for kind in kinds {
                let (home, chunk) = problem.rank_of(instr.stage.index());
                let mb = &mut done.get_mut(chunk)?[*kind as usize];
                if home != rank || *mb != instr.mb {
                    return None;
                }
                *mb += 1;
                tokens.push(Token { kind: *kind, chunk: chunk as u8 });
            }
        }
        // A run without end goes on, and is none.
        if tokens.len() != problem.size() / problem.ranks {
            return None;
        }
        orders.push(tokens);
    }
    Some(orders)
}

/// A schedule that stands for an order: it has a name and properties, and no order program of its own.
pub fn schedule(place: Place) -> Schedule {
    Schedule {
        name: "search".into(),
        place,
        backward: Backward::Split,
        update: Update::Flush,
        weights: None,
        sequences: Vec::new(),
        order: Vec::new(),
        span: 0..0,
        library: false,
    }
}
