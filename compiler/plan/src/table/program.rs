//! A checked table to instruction streams.
//!
//! Without sends and receives in the table they are placed by the rules of [`crate::expand`], for any order of
//! micro-batches. Rings get the fewest slots with which each micro-batch finds its own free, and those that the rules add.

use super::{Action, Table, Verb};
use crate::Shape;
use crate::deadlock::sentence;
use crate::exchange;
use crate::expand::flushes;
use crate::line::{Item, Line};
use crate::norm;
use artifact::ids::{RankId, StageId};
use artifact::stream::{Accumulation, Instr, Op, Policy, Program, RingSizes, Stream};
use artifact::verify::execute::{Stuck, Waiting};
use artifact::verify::index::Kind;
use artifact::verify::versions::Missing;
use artifact::verify::{Proved, Violation, prove};
use dsl::diag::{Diagnostic, Label};
use std::collections::{HashMap, HashSet};

/// By micro-batch of one stage: where its row performs each action, if it does.
#[derive(Clone, Debug, Default)]
struct Places {
    forward: Vec<usize>,
    input_gradient: Vec<usize>,
    weight_gradient: Vec<usize>,
    recv_f: Vec<usize>,
    send_f: Vec<usize>,
    recv_b: Vec<usize>,
    send_b: Vec<usize>,
}

impl Table {
    /// The streams, proved ([`artifact::verify`]). One update of all micro-batches, or those of the table's `U` cells.
    ///
    /// # Errors
    /// Ranks that wait for each other, with the cells that wait.
    pub fn program(&self) -> Result<Program, Vec<Diagnostic>> {
        self.proved(&Shape::new(1, 1)).map(|(program, _)| program)
    }

    /// [`Table::program`] with what `asked` exchanges before updates (the rest of it is the table's own), and what the proof found out.
    ///
    /// # Errors
    /// As [`Table::program`]; an exchange that the order leaves no place for.
    pub fn proved(&self, asked: &Shape) -> Result<(Program, Proved), Vec<Diagnostic>> {
        let (microbatches, updates) = (self.microbatches, self.updates.unwrap_or(1));
        let mut lines: Vec<Line> = (0..self.rows.len())
            .map(|row| Line {
                prologue: Vec::new(),
                period: self.items(row),
                microbatches: u64::from(microbatches),
                updates: u64::from(updates),
                flush: true,
            })
            .collect();
        let shape = Shape::new(self.rows.len() as u32, self.accumulate());
        let rank_of_stage = self.row_of_stage.iter().map(|row| RankId(*row as u32)).collect();
        let (accumulate, policy) = (self.accumulate(), Policy::Current);
        let mut program = Program {
            streams: Vec::new(),
            rank_of_stage,
            rings: Vec::new(),
            accumulate,
            policy,
            copies: 1,
            tied: asked.tied,
            global_norm: asked.global_norm,
        };
        let unplaced = [exchange::unplaced, norm::unplaced];
        let has = (self.comms, self.updates.is_some());
        if let Some(refused) = unplaced.iter().find_map(|refused| refused(&program, has.0, has.1)) {
            return Err(vec![refused]);
        }
        exchange::place(&program, &mut lines);
        norm::place(&program, &mut lines);
        let places = places(&lines, self.row_of_stage.len(), microbatches as usize);
        program.rings = (0..places.len()).map(|s| self.rings(&program, &places, s, &shape)).collect();
        program.streams =
            if self.comms { lines.iter().map(as_written).collect() } else { flushes(&mut program, &lines) };
        match prove(&program) {
            Ok(proved) => Ok((program, proved)),
            Err(violations) => Err(violations.iter().map(|v| self.refused(&program, v)).collect()),
        }
    }

    /// What a row performs, transfers included where the table has them.
    fn items(&self, row: usize) -> Vec<Item> {
        let k = self.accumulate();
        let cells = &self.rows[row];
        // B beside I and W on one stage is run as its halves.
        let split: HashSet<u32> =
            cells.iter().filter(|cell| cell.action.verb == Verb::I).map(|cell| cell.action.stage).collect();
        let mut made: HashMap<(u32, u32), u32> = HashMap::new();
        let mut accumulation = |stage: u32, mb: u32| {
            let made = made.entry((stage, mb / k)).or_default();
            *made += 1;
            Accumulation { first: *made == 1, last: *made == k }
        };
        let mut items = Vec::with_capacity(cells.len() + 1);
        for Action { stage, verb, number } in cells.iter().map(|cell| cell.action) {
            let mut push = |op| items.push(Item { op, stage, mb: u64::from(number) });
            match verb {
                Verb::F => push(Op::F),
                Verb::I => push(Op::I),
                Verb::W => push(Op::W(accumulation(stage, number))),
                Verb::B if split.contains(&stage) => {
                    push(Op::I);
                    push(Op::W(accumulation(stage, number)));
                }
                Verb::B => push(Op::B(accumulation(stage, number))),
                Verb::U => push(Op::U),
                Verb::SendF => push(Op::SendF),
                Verb::RecvF => push(Op::RecvF),
                Verb::SendB => push(Op::SendB),
                Verb::RecvB => push(Op::RecvB),
                Verb::Unshard | Verb::Reshard | Verb::ReduceGrad => {}
            }
        }
        if self.updates.is_none() {
            let here = (0..).zip(&self.row_of_stage).filter(|(_, home)| **home == row);
            items.extend(here.map(|(stage, _)| Item { op: Op::U, stage, mb: 0 }));
        }
        items
    }

    fn rings(&self, program: &Program, places: &[Places], s: usize, shape: &Shape) -> RingSizes {
        let here = &places[s];
        let (before, after) = (program.border_before(s), program.border_after(s));
        let stash = slots(&here.forward, &here.weight_gradient);
        let gradients = slots(&here.input_gradient, &here.weight_gradient);
        // Where the table has the transfers they say when a slot is taken, else the compiler posts ahead.
        let receive = |needed: u32, claims: &[usize]| match self.comms {
            true => slots(claims, &here.weight_gradient),
            false => needed.saturating_add(shape.receive_extra).min(self.microbatches),
        };
        let send = |claims: &[usize], offers: &[usize]| match self.comms {
            true => slots(claims, offers),
            false => slots(claims, claims).max(shape.send_slots),
        };
        RingSizes {
            weights: 1,
            stash,
            recv_f: match s.checked_sub(1) {
                None => stash,
                Some(_) if before.is_some() => receive(stash, &here.recv_f),
                Some(lower) => slots(&places[lower].forward, &here.weight_gradient),
            },
            send_f: after.map_or(0, |_| send(&here.forward, &here.send_f)),
            recv_b: match after {
                Some(_) => receive(gradients, &here.recv_b),
                None if program.hands_over(s) => slots(&places[s + 1].input_gradient, &here.weight_gradient),
                None => 0,
            },
            send_b: before.map_or(0, |_| send(&here.input_gradient, &here.send_b)),
        }
    }

    /// The diagnostic for a broken invariant: a deadlock is the table's fault, anything else is ours.
    fn refused(&self, program: &Program, violation: &Violation) -> Diagnostic {
        let internal = |note: String| {
            Diagnostic::error("P0399", 0..0, "the table's streams do not verify")
                .note(note)
                .help("this is an error in paceline itself: please report it with the table")
        };
        let stuck = match violation {
            Violation::Deadlock(stuck) => stuck,
            Violation::Version { stage, missing, .. } => return self.during_update(stage.0, missing),
            Violation::Apart { stages, op, mb, versions } => return exchange::apart(*stages, *op, *mb, *versions),
            Violation::Exchange { op: Kind::U, .. } => return exchange::between(&violation.to_string()),
            other => return internal(other.to_string()),
        };
        let Stuck::Cycle(cycle) = stuck else {
            return Diagnostic::error("P0310", 0..0, "this is not proved free of deadlocks")
                .help("use fewer micro-batches: the proof gave up after its bound of work");
        };
        let mut labels = Vec::new();
        for waiting in cycle {
            let Some(spot) = self.waiting_spot(waiting) else { continue };
            let text = format!("rank {} is here ({spot})", waiting.rank);
            labels.push(Label { span: spot.span.clone(), text, library: None });
        }
        let mut found = Diagnostic::error("P0310", 0..0, "ranks wait for each other for ever");
        if !labels.is_empty() {
            found.labels = labels;
        }
        found.notes = cycle.iter().map(sentence).collect();
        found.notes.push(crate::grid::stuck(program, cycle));
        found.help("move the forward passes that the other ranks need before the backward passes that wait")
    }

    /// A pass that reads weights which an update has begun to write.
    fn during_update(&self, stage: u32, missing: &Missing) -> Diagnostic {
        let (op, mb, update) = (missing.op.name(), missing.mb, missing.made);
        let message = format!("{op} of micro-batch {mb} on stage {stage} runs while update {update} is under way");
        let mut found = Diagnostic::error("P0609", 0..0, message);
        if let Some(spot) = self.pass_spot(missing.op, stage, mb) {
            found.labels = vec![Label { span: spot.span.clone(), text: format!("{spot}"), library: None }];
        }
        found
            .note("the update is fused into the last weight gradient before its U: weights change from there to U")
            .help(format!("move {stage}U{update} to right after the last weight gradient before it"))
    }

    fn waiting_spot(&self, waiting: &Waiting) -> Option<&super::Spot> {
        self.pass_spot(Kind::of(waiting.op), waiting.stage.0, waiting.mb)
    }

    /// Where F or B (I) of a micro-batch is written.
    fn pass_spot(&self, op: Kind, stage: u32, mb: u64) -> Option<&super::Spot> {
        let verbs: &[Verb] = match op {
            Kind::F => &[Verb::F],
            _ => &[Verb::I, Verb::B],
        };
        let mb = u32::try_from(mb % u64::from(self.microbatches)).ok()?;
        verbs.iter().find_map(|verb| self.spot(stage, *verb, mb))
    }
}

/// By stage.
fn places(lines: &[Line], stages: usize, microbatches: usize) -> Vec<Places> {
    let mut all = vec![Places::default(); stages];
    for line in lines {
        for (at, item) in line.period.iter().enumerate() {
            let places = &mut all[item.stage as usize];
            let note = |list: &mut Vec<usize>| {
                list.resize(microbatches, 0);
                list[item.mb as usize] = at;
            };
            match item.op {
                Op::F => note(&mut places.forward),
                Op::I => note(&mut places.input_gradient),
                Op::W(_) => note(&mut places.weight_gradient),
                Op::B(_) => {
                    note(&mut places.input_gradient);
                    note(&mut places.weight_gradient);
                }
                Op::RecvF => note(&mut places.recv_f),
                Op::SendF => note(&mut places.send_f),
                Op::RecvB => note(&mut places.recv_b),
                Op::SendB => note(&mut places.send_b),
                Op::U | Op::SendG | Op::RecvG => {}
                Op::N | Op::T | Op::SendN | Op::RecvN | Op::SendT | Op::RecvT => {}
            }
        }
    }
    all
}

/// The stream of a row that places its transfers itself.
fn as_written(line: &Line) -> Stream {
    let instr = |item: &Item| Instr { op: item.op, stage: StageId(item.stage), mb: item.mb as u32 };
    Stream {
        prologue: Vec::new(),
        period: line.period.iter().map(instr).collect(),
        microbatches: line.microbatches as u32,
        updates: line.updates as u32,
    }
}

/// The fewest slots of a ring in which micro-batch m finds that m - slots was released before it claims.
fn slots(claim: &[usize], release: &[usize]) -> u32 {
    let free = |slots: &usize| (*slots..claim.len()).all(|mb| release[mb - slots] < claim[mb]);
    (1..=claim.len()).find(free).unwrap_or(1) as u32
}
