//! The invariants of single stages, and of neighbours that hand over: [`super`]'s order, updates, accumulation and rings.

use super::Violation;
use super::index::{Index, Kind, Places};
use crate::ids::StageId;
use crate::stream::{Instr, Op, Program};
use crate::work;
use std::collections::HashSet;

/// Where each operation of a stage is performed.
#[derive(Clone, Copy, Debug)]
pub struct StageIndex<'a> {
    pub stage: StageId,
    pub f: Index<'a>,
    /// Where the input gradient is made: B, or I when split.
    pub input_gradient: Index<'a>,
    /// Where the weight gradient is made: B, or W when split.
    pub weight_gradient: Index<'a>,
    pub update: Index<'a>,
    split: bool,
    recv_f: Option<Index<'a>>,
    send_f: Option<Index<'a>>,
    recv_b: Option<Index<'a>>,
    send_b: Option<Index<'a>>,
    places: &'a Places,
}

impl<'a> StageIndex<'a> {
    /// Stage `s` of the program that the places are of.
    pub fn new(program: &Program, places: &'a Places, s: usize) -> Self {
        let split = places.splits(s);
        let index = |kind| places.of(s, kind);
        let (before, after) = (program.border_before(s), program.border_after(s));
        StageIndex {
            stage: StageId(s as u32),
            f: index(Kind::F),
            input_gradient: index(if split { Kind::I } else { Kind::B }),
            weight_gradient: index(if split { Kind::W } else { Kind::B }),
            update: index(Kind::U),
            split,
            recv_f: before.map(|_| index(Kind::RecvF)),
            send_f: after.map(|_| index(Kind::SendF)),
            recv_b: after.map(|_| index(Kind::RecvB)),
            send_b: before.map(|_| index(Kind::SendB)),
            places,
        }
    }

    /// Where what it performs once an update is performed; none where it does not.
    pub(super) fn once(&self, kind: Kind) -> Option<Index<'a>> {
        let index = self.places.of(self.stage.index(), kind);
        (index.step() > 0).then_some(index)
    }

    /// The first update of which `then` comes before one of its weight gradients.
    pub(super) fn first_before_gradients(&self, then: &Index, accumulate: u32) -> Option<u64> {
        let gradient = &self.weight_gradient;
        (0..gradient.step() as usize).find_map(|residue| {
            let of = residue / accumulate as usize;
            let last = gradient.turns(residue).max(then.turns(of));
            work::visit(last as usize + 1);
            let turn = (0..=last).find(|turn| gradient.place(residue, *turn) >= then.place(of, *turn))?;
            Some(of as u64 + turn * then.step())
        })
    }

    /// What makes the input gradient.
    pub(super) fn backward(&self) -> Kind {
        if self.split { Kind::I } else { Kind::B }
    }

    pub(super) fn order(&self) -> Option<Violation> {
        let f = Some((Kind::F, self.f));
        let b = Some((self.backward(), self.input_gradient));
        let w = self.split.then_some((Kind::W, self.weight_gradient));
        let of = |kind, index: Option<Index<'a>>| index.map(|i| (kind, i));
        let pairs = [
            (f, b),
            (b, w),
            (of(Kind::RecvF, self.recv_f), f),
            (f, of(Kind::SendF, self.send_f)),
            (of(Kind::RecvB, self.recv_b), b),
            (b, of(Kind::SendB, self.send_b)),
        ];
        let mut pairs = pairs.into_iter().filter_map(|(first, then)| first.zip(then));
        pairs.find_map(|(first, then)| self.not_before(first, then))
    }

    fn not_before(&self, (first, before): (Kind, Index), (then, after): (Kind, Index)) -> Option<Violation> {
        let mb = before.first_not_before(&after, 0)?;
        Some(Violation::Order { stage: self.stage, first, mb, then, later_mb: mb })
    }

    pub(super) fn updates(&self, accumulate: u32) -> Option<Violation> {
        let k = accumulate as usize;
        let (w, u, step) = (&self.weight_gradient, &self.update, self.weight_gradient.step() as usize);
        // An update that the prologue makes has its weight gradients there too, or the first of them that has not is
        // found wrong: the leads of U cost no more turns than those of W.
        (0..step).find_map(|residue| {
            let (next, more) = if residue + k >= step { (residue + k - step, 1) } else { (residue + k, 0) };
            let last = w.turns(residue).max(w.turns(next)).max(u.turns(residue / k));
            work::visit(last as usize + 1);
            let wrong = |turn: &u64| {
                let update = u.place(residue / k, *turn);
                w.place(residue, *turn) >= update || update >= w.place(next, turn + more)
            };
            let turn = (0..=last).find(wrong)?;
            let mb = residue as u64 + turn * step as u64;
            Some(Violation::Update { stage: self.stage, mb, update: mb / k as u64 })
        })
    }
}

/// Order between neighbouring stages that hand over: both are in one stream.
pub(super) fn handover(program: &Program, lower: &StageIndex, upper: &StageIndex) -> Option<Violation> {
    if !program.hands_over(lower.stage.index()) {
        return None;
    }
    let forward = lower.not_before((Kind::F, lower.f), (Kind::F, upper.f));
    let gradient = (lower.backward(), lower.input_gradient);
    forward.or_else(|| upper.not_before((upper.backward(), upper.input_gradient), gradient))
}

pub(super) fn rings(program: &Program, stages: &[StageIndex], s: usize) -> Option<Violation> {
    let (rings, stage) = (&program.rings[s], &stages[s]);
    let (f, b, w) = (&stage.f, &stage.input_gradient, &stage.weight_gradient);
    // What is handed over is claimed by the instruction that writes it.
    let input = program.before(s).filter(|_| stage.recv_f.is_none()).map_or(f, |before| &stages[before].f);
    let output_gradient = program.hands_over(s).then(|| &stages[s + 1].input_gradient);
    let checks = [
        ("stash", rings.stash, Some((f, w))),
        ("recv_f", rings.recv_f, Some((stage.recv_f.as_ref().unwrap_or(input), w))),
        ("send_f", rings.send_f, stage.send_f.as_ref().map(|send| (f, send))),
        ("recv_b", rings.recv_b, stage.recv_b.as_ref().or(output_gradient).map(|claim| (claim, w))),
        ("send_b", rings.send_b, stage.send_b.as_ref().map(|send| (b, send))),
    ];
    checks.into_iter().find_map(|(ring, slots, users)| {
        let (claim, release) = users?;
        let distance = u64::from(slots);
        let mb = if slots == 0 { Some(0) } else { release.first_not_before(claim, distance) };
        mb.map(|m| Violation::Ring { stage: stage.stage, ring, slots, mb: m + distance })
    })
}

/// Neighbouring weight gradients and updates of a stage, seen along its stream.
#[derive(Clone, Copy)]
struct Marks {
    /// Whether an update, or the start, came last.
    fresh: bool,
    /// The weight gradient that came last, if no update did: whether it is marked `last`, and which it is.
    before: Option<(bool, u32)>,
    wrong: Option<u32>,
}

impl Marks {
    fn see(&mut self, i: &Instr) {
        let mark = match i.op {
            Op::U => None,
            Op::B(mark) | Op::W(mark) => Some(mark),
            _ => return,
        };
        let update = mark.is_none();
        if let Some((last, mb)) = self.before.take()
            && last != update
        {
            self.wrong.get_or_insert(mb);
        }
        if let Some(mark) = mark {
            if mark.first != self.fresh {
                self.wrong.get_or_insert(i.mb);
            }
            self.before = Some((mark.last, i.mb));
        }
        self.fresh = update;
    }
}

/// Of every stage's weight gradients, `first` stands exactly after an update (or at the start), `last` exactly before one:
/// in the prologue, in a repetition, and from its end to the next one's begin.
pub(super) fn accumulation(program: &Program) -> Vec<Violation> {
    let mut marks = vec![Marks { fresh: true, before: None, wrong: None }; program.rank_of_stage.len()];
    for (rank, stream) in program.streams.iter().enumerate() {
        stream.prologue.iter().chain(&stream.period).for_each(|i| marks[i.stage.index()].see(i));
        work::visit(stream.prologue.len() + stream.period.len());
        let mut stages = program.rank_of_stage.iter().filter(|home| home.index() == rank).count();
        let mut begun = HashSet::new();
        for i in stream.period.iter().filter(|i| matches!(i.op, Op::B(_) | Op::W(_) | Op::U)) {
            work::visit(1);
            if stages == 0 {
                break;
            }
            if begun.insert(i.stage) {
                marks[i.stage.index()].see(i);
                stages -= 1;
            }
        }
    }
    let violation = |(s, marks): (u32, &Marks)| marks.wrong.map(|mb| Violation::Accumulation { stage: StageId(s), mb });
    (0..).zip(&marks).filter_map(violation).collect()
}
