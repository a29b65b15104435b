//! Where one flush posts its receives.
//!
//! # Meaning
//!
//! What a rank receives from one other rank comes in the order in which that rank sends it (there are no tags), whatever
//! stages it is for. So receives are posted in that order, each as early as that and its slot allow: after the
//! instruction that releases the slot's user before it, or at the stream's start. With one stage a rank the senders' order
//! is the receiver's. With several, a receive may have to be posted before one that is needed sooner: then its ring
//! gets as many more slots as let it be posted in time.

use crate::line::{Item, Line, forward, input_gradient, weight_gradient};
use artifact::ids::StageId;
use artifact::stream::{Instr, Op, Program, RingSizes};
use std::collections::HashMap;

/// What is sent to a rank: the receive, by its stage.
#[derive(Clone, Copy, Debug)]
struct Message {
    /// `RecvF` or `RecvB`.
    op: Op,
    stage: u32,
    mb: u64,
}

/// By rank and position: the receives before the first instruction of the line, and after each.
pub(crate) type Posts = Vec<Vec<Vec<Instr>>>;

/// Places the receives of every rank's line. Enlarges the program's receive rings where the order of a pair of ranks needs it.
pub(crate) fn place(program: &mut Program, lines: &[Line]) -> Posts {
    let mut sent: Vec<Vec<Vec<Message>>> = vec![vec![Vec::new(); lines.len()]; lines.len()];
    for (sender, line) in lines.iter().enumerate() {
        for item in &line.period {
            for message in messages(program, item) {
                let receiver = program.rank_of_stage[message.stage as usize].index();
                sent[receiver][sender].push(message);
            }
        }
    }
    let mut posts = Posts::with_capacity(lines.len());
    for (line, sources) in lines.iter().zip(&sent) {
        let places = Places::new(line);
        let mut rank_posts = vec![Vec::new(); line.period.len() + 1];
        for messages in sources.iter().filter(|messages| !messages.is_empty()) {
            for (message, position) in messages.iter().zip(positions(program, &places, messages)) {
                let Message { op, stage, mb } = *message;
                rank_posts[position].push(Instr { op, stage: StageId(stage), mb: mb as u32 });
            }
        }
        posts.push(rank_posts);
    }
    posts
}

/// What an instruction's stage sends when it has run.
fn messages(program: &Program, item: &Item) -> impl Iterator<Item = Message> {
    let s = item.stage as usize;
    let to_next = (forward(item.op) && program.border_after(s).is_some()).then_some((Op::RecvF, item.stage + 1));
    let to_before =
        (input_gradient(item.op) && program.border_before(s).is_some()).then(|| (Op::RecvB, item.stage - 1));
    let mb = item.mb;
    to_next.into_iter().chain(to_before).map(move |(op, stage)| Message { op, stage, mb })
}

/// Positions in a line, counted from 1: 0 is its start.
struct Places {
    /// By stage and micro-batch: where F, where B (I), where B (W).
    forward: HashMap<(u32, u64), usize>,
    backward: HashMap<(u32, u64), usize>,
    release: HashMap<(u32, u64), usize>,
}

impl Places {
    fn new(line: &Line) -> Self {
        let of = |wanted: fn(Op) -> bool| {
            let numbered = line.period.iter().zip(1..).filter(|(i, _)| wanted(i.op));
            numbered.map(|(i, position)| ((i.stage, i.mb), position)).collect()
        };
        Places { forward: of(forward), backward: of(input_gradient), release: of(weight_gradient) }
    }

    /// The last position at which the message may be posted.
    fn latest(&self, message: &Message) -> usize {
        let uses = if message.op == Op::RecvF { &self.forward } else { &self.backward };
        uses[&(message.stage, message.mb)] - 1
    }

    /// The first position at which its slot is free, in a ring of so many.
    fn free(&self, message: &Message, slots: u32) -> usize {
        let before = message.mb.checked_sub(u64::from(slots));
        before.map_or(0, |mb| self.release[&(message.stage, mb)])
    }
}

fn slots(rings: &mut RingSizes, op: Op) -> &mut u32 {
    if op == Op::RecvF { &mut rings.recv_f } else { &mut rings.recv_b }
}

/// Where each of one sender's messages is posted.
fn positions(program: &mut Program, places: &Places, messages: &[Message]) -> Vec<usize> {
    let mut found = Vec::with_capacity(messages.len());
    // The message that holds the later ones up, and from where.
    let mut held: (usize, usize) = (0, 0);
    while found.len() < messages.len() {
        let at = found.len();
        let message = &messages[at];
        let free = places.free(message, *slots(&mut program.rings[message.stage as usize], message.op));
        if free > held.0 {
            held = (free, at);
        }
        let latest = places.latest(message);
        if held.0 <= latest {
            found.push(held.0);
            continue;
        }
        let holder = &messages[held.1];
        let ring = slots(&mut program.rings[holder.stage as usize], holder.op);
        while places.free(holder, *ring) > latest {
            *ring += 1;
        }
        found.clear();
        held = (0, 0);
    }
    found
}
