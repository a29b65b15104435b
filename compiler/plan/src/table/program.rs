//! A checked table to instruction streams.
//!
//! Without sends and receives in the table they are placed by the rules of [`crate::expand`], for any order of
//! micro-batches: a send follows what it sends; receives are posted in the order of the sends, each as early as its slot
//! is free. Rings get the fewest slots with which each micro-batch finds its own free.

use super::{Action, Table, Verb};
use crate::Shape;
use crate::deadlock::sentence;
use artifact::ids::{RankId, StageId};
use artifact::stream::{Accumulation, Instr, Op, Program, RingSizes, Stream};
use artifact::verify::execute::{Stuck, Waiting};
use artifact::verify::index::Kind;
use artifact::verify::{Violation, verify};
use dsl::diag::{Diagnostic, Label};

/// A receive and the index in the row's instructions before which it is posted.
type Posts = Vec<(u32, usize)>;

/// One stage's place in time: by micro-batch, indices into the row's instructions.
struct Stage {
    stage: u32,
    /// Compute instructions, and what the table says about transfers.
    items: Vec<(Op, u32)>,
    forward: Vec<usize>,
    input_gradient: Vec<usize>,
    weight_gradient: Vec<usize>,
}

impl Table {
    /// The streams, proved ([`artifact::verify`]). One update of all micro-batches, or those of the table's `U` cells.
    ///
    /// # Errors
    /// Ranks that wait for each other, with the cells that wait.
    pub fn program(&self) -> Result<Program, Vec<Diagnostic>> {
        let stages: Vec<Stage> = (0..self.row_of_stage.len() as u32).map(|stage| self.stage(stage)).collect();
        let shape = Shape::new(self.rows.len() as u32, self.accumulate());
        let mut rings = vec![RingSizes::default(); stages.len()];
        let mut streams: Vec<Option<Stream>> = vec![None; self.rows.len()];
        for (s, stage) in stages.iter().enumerate() {
            let before = s.checked_sub(1).map(|s| &stages[s]);
            let (sizes, period) = if self.comms {
                stage.as_written(before.is_some(), stages.get(s + 1).is_some())
            } else {
                stage.placed(before, stages.get(s + 1), &shape)
            };
            rings[s] = sizes;
            let (microbatches, updates) = (self.microbatches, self.updates.unwrap_or(1));
            streams[self.row_of_stage[s]] = Some(Stream { prologue: Vec::new(), period, microbatches, updates });
        }
        let program = Program {
            streams: streams.into_iter().map(|s| s.expect("every row has a stage")).collect(),
            rank_of_stage: self.row_of_stage.iter().map(|row| RankId(*row as u32)).collect(),
            rings,
            accumulate: self.accumulate(),
        };
        match verify(&program) {
            Ok(()) => Ok(program),
            Err(violations) => Err(violations.iter().map(|v| self.refused(&program, v)).collect()),
        }
    }

    fn stage(&self, stage: u32) -> Stage {
        let (m, k) = (self.microbatches as usize, self.accumulate());
        let row = &self.rows[self.row_of_stage[stage as usize]];
        // B beside I and W on one stage is run as its halves.
        let split = row.iter().any(|cell| cell.action.verb == Verb::I);
        let mut left = vec![k; m / k.max(1) as usize];
        let mut accumulation = |mb: u32| {
            let left = &mut left[(mb / k) as usize];
            *left -= 1;
            Accumulation { first: *left + 1 == k, last: *left == 0 }
        };
        let mut items = Vec::with_capacity(row.len() + 1);
        for Action { verb, number, .. } in row.iter().map(|cell| cell.action) {
            match verb {
                Verb::F => items.push((Op::F, number)),
                Verb::I => items.push((Op::I, number)),
                Verb::W => items.push((Op::W(accumulation(number)), number)),
                Verb::B if split => items.extend([(Op::I, number), (Op::W(accumulation(number)), number)]),
                Verb::B => items.push((Op::B(accumulation(number)), number)),
                Verb::U => items.push((Op::U, number)),
                Verb::SendF => items.push((Op::SendF, number)),
                Verb::RecvF => items.push((Op::RecvF, number)),
                Verb::SendB => items.push((Op::SendB, number)),
                Verb::RecvB => items.push((Op::RecvB, number)),
                Verb::Unshard | Verb::Reshard | Verb::ReduceGrad => {}
            }
        }
        if self.updates.is_none() {
            items.push((Op::U, 0));
        }
        let mut made =
            Stage { stage, forward: vec![0; m], input_gradient: vec![0; m], weight_gradient: vec![0; m], items };
        for (at, (op, mb)) in made.items.iter().enumerate() {
            let mb = *mb as usize;
            match op {
                Op::F => made.forward[mb] = at,
                Op::I => made.input_gradient[mb] = at,
                Op::W(_) => made.weight_gradient[mb] = at,
                Op::B(_) => (made.input_gradient[mb], made.weight_gradient[mb]) = (at, at),
                _ => {}
            }
        }
        made
    }

    /// The diagnostic for a broken invariant: a deadlock is the table's fault, anything else is ours.
    fn refused(&self, program: &Program, violation: &Violation) -> Diagnostic {
        let internal = |note: String| {
            Diagnostic::error("P0399", 0..0, "the table's streams do not verify")
                .note(note)
                .help("this is an error in paceline itself: please report it with the table")
        };
        let Violation::Deadlock(stuck) = violation else { return internal(violation.to_string()) };
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

    fn waiting_spot(&self, waiting: &Waiting) -> Option<&super::Spot> {
        let verbs: &[Verb] = match Kind::of(waiting.op) {
            Kind::F => &[Verb::F],
            _ => &[Verb::I, Verb::B],
        };
        let mb = u32::try_from(waiting.mb % u64::from(self.microbatches)).ok()?;
        verbs.iter().find_map(|verb| self.spot(waiting.stage.0, *verb, mb))
    }
}

impl Stage {
    fn instr(&self, (op, mb): (Op, u32)) -> Instr {
        Instr { op, stage: StageId(self.stage), mb }
    }

    /// Where each transfer of one kind stands, by micro-batch.
    fn places(&self, kind: Op) -> Vec<usize> {
        let mut places = vec![0; self.forward.len()];
        for (at, (op, mb)) in self.items.iter().enumerate().filter(|(_, item)| item.0 == kind) {
            debug_assert_eq!(*op, kind);
            places[*mb as usize] = at;
        }
        places
    }

    /// The instructions of a table that places transfers; whether there are stages before and after.
    fn as_written(&self, has_before: bool, has_after: bool) -> (RingSizes, Vec<Instr>) {
        let when = |there: bool, claim: &[usize], release: &[usize]| if there { slots(claim, release) } else { 0 };
        let (f, b, w) = (&self.forward, &self.input_gradient, &self.weight_gradient);
        let stash = slots(f, w);
        let rings = RingSizes {
            stash,
            recv_f: if has_before { slots(&self.places(Op::RecvF), w) } else { stash },
            send_f: when(has_after, f, &self.places(Op::SendF)),
            recv_b: when(has_after, &self.places(Op::RecvB), w),
            send_b: when(has_before, b, &self.places(Op::SendB)),
        };
        (rings, self.items.iter().map(|item| self.instr(*item)).collect())
    }

    /// The instructions with transfers placed.
    fn placed(&self, before: Option<&Stage>, after: Option<&Stage>, shape: &Shape) -> (RingSizes, Vec<Instr>) {
        let stash = slots(&self.forward, &self.weight_gradient);
        let inputs = before.map(|s| self.posts(&s.forward, &self.forward, shape));
        let gradients = after.map(|s| self.posts(&s.input_gradient, &self.input_gradient, shape));
        let rings = RingSizes {
            stash,
            recv_f: inputs.as_ref().map_or(stash, |(slots, _)| *slots),
            send_f: after.map_or(0, |_| shape.send_slots.max(slots(&self.forward, &self.forward))),
            recv_b: gradients.as_ref().map_or(0, |(slots, _)| *slots),
            send_b: before.map_or(0, |_| shape.send_slots.max(slots(&self.input_gradient, &self.input_gradient))),
        };
        let mut posts: Vec<(Op, Posts)> = [(Op::RecvF, inputs), (Op::RecvB, gradients)]
            .into_iter()
            .filter_map(|(op, posts)| Some((op, posts?.1)))
            .collect();
        posts.iter_mut().for_each(|(_, posts)| posts.reverse());
        let mut placed = Vec::with_capacity(self.items.len() * 3);
        for (at, (op, mb)) in self.items.iter().enumerate() {
            for (receive, posts) in &mut posts {
                while let Some((mb, _)) = posts.pop_if(|(_, place)| *place <= at) {
                    placed.push(self.instr((*receive, mb)));
                }
            }
            placed.push(self.instr((*op, *mb)));
            if *op == Op::F && after.is_some() {
                placed.push(self.instr((Op::SendF, *mb)));
            }
            if matches!(op, Op::B(_) | Op::I) && before.is_some() {
                placed.push(self.instr((Op::SendB, *mb)));
            }
        }
        (rings, placed)
    }

    /// Slots of a receive ring, and its posts: `sent` says when the other side sends, `used` when this one first needs it.
    fn posts(&self, sent: &[usize], used: &[usize], shape: &Shape) -> (u32, Posts) {
        let count = sent.len();
        let mut order: Vec<u32> = (0..count as u32).collect();
        order.sort_by_key(|mb| sent[*mb as usize]);
        let try_slots = |slots: usize| {
            let mut latest = 0;
            let mut posts = Vec::with_capacity(count);
            for mb in &order {
                let holder = (*mb as usize).checked_sub(slots);
                latest = latest.max(holder.map_or(0, |mb| self.weight_gradient[mb] + 1));
                if latest > used[*mb as usize] {
                    return None;
                }
                posts.push((*mb, latest));
            }
            Some(posts)
        };
        let least = (1..=count).find(|slots| try_slots(*slots).is_some()).unwrap_or(count);
        // With a slot for each micro-batch every receive can be posted at the start.
        let wanted = least.saturating_add(shape.receive_extra as usize).min(count);
        (wanted..=count)
            .find_map(|slots| Some((slots as u32, try_slots(slots)?)))
            .expect("a slot for each micro-batch is always free")
    }
}

/// The fewest slots of a ring in which micro-batch m finds that m - slots was released before it claims.
fn slots(claim: &[usize], release: &[usize]) -> u32 {
    let free = |slots: &usize| (*slots..claim.len()).all(|mb| release[mb - slots] < claim[mb]);
    (1..=claim.len()).find(free).unwrap_or(1) as u32
}
