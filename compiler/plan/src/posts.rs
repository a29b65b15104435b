//! Where one flush posts its receives.
//!
//! # Meaning
//!
//! What a rank receives from one other rank comes in the order in which that rank sends it (there are no tags), whatever
//! stages it is for. So receives are posted in that order, each as early as that and its slot allow: after the
//! instruction that releases the slot's user before it, or at the stream's start. With one stage a rank the senders' order
//! is the receiver's. With several, a receive may have to be posted before one that is needed sooner: then its ring
//! gets as many more slots as let it be posted in time.

use crate::expand;
use crate::line::{Item, Line, forward, input_gradient, weight_gradient};
use artifact::channel::{Channel, channels, side};
use artifact::ids::StageId;
use artifact::stream::{Instr, Op, Program, RingSizes};
use artifact::work;

/// The receives that a rank posts for what one other rank sends, in that order.
#[derive(Clone, Debug, Default)]
pub(crate) struct Source {
    receives: Vec<Instr>,
    /// By receive: after so many of the line's instructions. Ascending.
    positions: Vec<u32>,
    /// How many are written out.
    next: usize,
}

impl Source {
    /// The next receives, up to those after `position` instructions.
    pub fn until(&mut self, position: usize) -> &[Instr] {
        let begin = self.next;
        while self.positions.get(self.next).is_some_and(|at| *at as usize <= position) {
            self.next += 1;
        }
        &self.receives[begin..self.next]
    }
}

/// By receiving rank, its sources by sending rank: places the receives of every line. Enlarges the program's receive rings
/// where the order of a pair of ranks needs it.
pub(crate) fn place(program: &mut Program, lines: &[Line]) -> Vec<Vec<Source>> {
    let mut sources = sent(program, lines);
    let places = Places::new(program.rank_of_stage.len(), lines);
    for source in sources.iter_mut().flatten() {
        source.positions = positions(program, &places, &source.receives);
    }
    sources
}

/// What every rank is sent, not yet placed.
fn sent(program: &Program, lines: &[Line]) -> Vec<Vec<Source>> {
    let mut senders = vec![Vec::new(); lines.len()];
    for border in 0..program.rank_of_stage.len().saturating_sub(1) {
        let (lower, upper) = (program.rank_of_stage[border].index(), program.rank_of_stage[border + 1].index());
        senders[upper].push(lower);
        senders[lower].push(upper);
    }
    if let Some([first, last]) = program.tied_ends().filter(|ends| program.partner(ends[0]).is_some()) {
        let [first, last] = [first, last].map(|s| program.rank_of_stage[s].index());
        senders[first].push(last);
        senders[last].push(first);
    }
    for list in &mut senders {
        list.sort_unstable();
        list.dedup();
    }
    let mut sources: Vec<Vec<Source>> = senders.iter().map(|list| vec![Source::default(); list.len()]).collect();
    let channels = channels(program);
    for (sender, line) in lines.iter().enumerate() {
        // By stage: where the rank's receivers keep what it sends.
        let at = |receiver: usize| senders[receiver].binary_search(&sender).expect("a border lies between them");
        work::visit(line.period.len());
        for item in &line.period {
            for receive in messages(program, &channels, item) {
                let receiver = program.rank_of_stage[receive.stage.index()].index();
                sources[receiver][at(receiver)].receives.push(receive);
            }
        }
    }
    sources
}

/// The receives of what an instruction's stage sends when it has run.
fn messages<'a>(program: &'a Program, channels: &'a [Channel], item: &'a Item) -> impl Iterator<Item = Instr> + 'a {
    expand::sends(program, item).filter_map(|op| {
        let (channel, _) = side(program, op, item.stage as usize)?;
        let Channel { to, freight, .. } = channels[channel];
        Some(Instr { op: freight.receive(), stage: StageId(to as u32), mb: item.mb as u32 })
    })
}

/// Positions in the lines, counted from 1 (0 is a line's start), by stage and micro-batch.
struct Places {
    microbatches: usize,
    forward: Vec<u32>,
    backward: Vec<u32>,
    release: Vec<u32>,
    norm: Vec<u32>,
    total: Vec<u32>,
    update: Vec<u32>,
}

impl Places {
    fn new(stages: usize, lines: &[Line]) -> Self {
        let microbatches = lines.iter().map(|line| line.microbatches as usize).max().unwrap_or(0);
        let empty = || vec![0; stages * microbatches];
        let mut places = Places {
            microbatches,
            forward: empty(),
            backward: empty(),
            release: empty(),
            norm: empty(),
            total: empty(),
            update: empty(),
        };
        for line in lines {
            work::visit(line.period.len());
            for (position, item) in (1..).zip(&line.period) {
                let at = item.stage as usize * microbatches + item.mb as usize;
                for (of, list) in [
                    (forward(item.op), &mut places.forward),
                    (input_gradient(item.op), &mut places.backward),
                    (weight_gradient(item.op), &mut places.release),
                    (item.op == Op::N, &mut places.norm),
                    (item.op == Op::T, &mut places.total),
                    (item.op == Op::U, &mut places.update),
                ] {
                    if of {
                        list[at] = position;
                    }
                }
            }
        }
        places
    }

    fn at(&self, list: &[u32], stage: StageId, mb: u32) -> u32 {
        list[stage.index() * self.microbatches + mb as usize]
    }

    /// The last position at which the receive may be posted.
    fn latest(&self, receive: &Instr) -> u32 {
        let uses = match receive.op {
            Op::RecvF => &self.forward,
            // The first end's N needs it, if there is one.
            Op::RecvG if self.at(&self.norm, receive.stage, receive.mb) > 0 => &self.norm,
            Op::RecvG => &self.update,
            Op::RecvN => &self.norm,
            Op::RecvT => &self.total,
            _ => &self.backward,
        };
        self.at(uses, receive.stage, receive.mb) - 1
    }

    /// The first position at which its slot is free, in a ring of so many. What comes once an update has one buffer, free from a
    /// flush's start on: its one update is the flush's last.
    fn free(&self, receive: &Instr, slots: u32) -> u32 {
        if receive.op.by_update() {
            return 0;
        }
        receive.mb.checked_sub(slots).map_or(0, |mb| self.at(&self.release, receive.stage, mb))
    }
}

fn slots(rings: &mut RingSizes, op: Op) -> &mut u32 {
    if op == Op::RecvF { &mut rings.recv_f } else { &mut rings.recv_b }
}

/// Where each of one sender's messages is posted.
fn positions(program: &mut Program, places: &Places, receives: &[Instr]) -> Vec<u32> {
    let mut found = Vec::with_capacity(receives.len());
    // The receive that holds the later ones up, and from where.
    let mut held: (u32, usize) = (0, 0);
    while found.len() < receives.len() {
        let at = found.len();
        work::visit(1);
        let receive = &receives[at];
        let ring =
            if receive.op.by_update() { 1 } else { *slots(&mut program.rings[receive.stage.index()], receive.op) };
        let free = places.free(receive, ring);
        if free > held.0 {
            held = (free, at);
        }
        let latest = places.latest(receive);
        if held.0 <= latest {
            found.push(held.0);
            continue;
        }
        let holder = &receives[held.1];
        let ring = slots(&mut program.rings[holder.stage.index()], holder.op);
        while places.free(holder, *ring) > latest {
            *ring += 1;
        }
        found.clear();
        held = (0, 0);
    }
    found
}
