//! Which version of the weights each pass reads, and that it is there: for runs of any length.
//!
//! # Meaning
//!
//! Version `v + 1` is *begun* in the last weight gradient of update `v`, and *made* by its `U`. In a ring of `n` slots it takes the slot of
//! version `v + 1 - n`. So at a place where `made` updates are made and `begun` are begun, exactly the versions
//! `begun - n < v <= made` can be read. A last weight gradient that is itself an input gradient (`B`) reads its version before
//! it overwrites that, parameter by parameter: kernels see to that, so what it begins itself does not count.
//!
//! Versions are counted from the start of a segment. A version below 0 is of the segment before, whose updates are all made: it is
//! there like any other.

use super::index::{Count, Kind};
use super::{StageIndex, Violation};
use crate::stream::{Op, Policy, Program};
use crate::work;

/// The versions of one stage.
pub struct Versions<'a> {
    index: StageIndex<'a>,
    policy: Policy,
    accumulate: u64,
    begun: Count,
    made: Count,
}

/// A pass of a micro-batch reads a version that is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Missing {
    pub op: Kind,
    pub mb: u64,
    /// In segments, see the module's text.
    pub version: i64,
    /// Versions made by then.
    pub made: u64,
    /// Versions begun by then.
    pub begun: u64,
}

impl<'a> Versions<'a> {
    /// By stage.
    pub fn of(program: &Program, stages: &[StageIndex<'a>]) -> Vec<Versions<'a>> {
        let versions = |(index, begun): (&StageIndex<'a>, Count)| {
            let (prologue, period) = index.update.positions();
            let made = Count { prologue, period };
            Versions { index: *index, policy: program.policy, accumulate: program.accumulate.into(), begun, made }
        };
        stages.iter().zip(begun(program)).map(versions).collect()
    }

    /// Version that F of a micro-batch reads.
    pub fn forward(&self, mb: u64) -> i64 {
        match self.policy {
            Policy::DoubleBuffer => (mb / self.accumulate) as i64 - 1,
            Policy::Current | Policy::Recomputed | Policy::Stash | Policy::Predicted => {
                self.made.before(self.index.f.at(mb)) as i64
            }
        }
    }

    /// Version that B (I) of a micro-batch reads.
    pub fn backward(&self, mb: u64) -> i64 {
        match self.policy {
            Policy::Stash | Policy::DoubleBuffer => self.forward(mb),
            Policy::Current | Policy::Recomputed | Policy::Predicted => {
                self.made.before(self.index.input_gradient.at(mb)) as i64
            }
        }
    }

    /// Version of the forward pass whose activations B (I) reads: that of F, or of its own when it runs that again.
    pub fn activations(&self, mb: u64) -> i64 {
        if self.policy == Policy::Recomputed { self.backward(mb) } else { self.forward(mb) }
    }

    /// Slots with which no version is overwritten that is still to be read.
    pub fn slots(&self) -> u64 {
        let needed = |pass: &Missing| (pass.begun as i64 - pass.version + 1).max(1) as u64;
        self.passes().map(|pass| needed(&pass)).max().unwrap_or(1)
    }

    /// The first pass that reads what is not there, in a ring of `slots`.
    pub fn missing(&self, slots: u32) -> Option<Missing> {
        self.passes().find(|p| p.version > p.made as i64 || p.version + i64::from(slots) <= p.begun as i64)
    }

    /// The first pass whose micro-batch reads another version on `other`: what it is, the micro-batch, and both versions.
    pub(super) fn apart(&self, other: &Versions) -> Option<(Kind, u64, [i64; 2])> {
        let passes = [self, other].map(|v| [v.index.f, v.index.input_gradient]);
        let step = self.index.f.step();
        (0..step as usize).find_map(|residue| {
            let turns = passes.iter().flatten().map(|index| index.turns(residue)).max().unwrap_or(0);
            work::visit(4 * (turns as usize + 1));
            (0..=turns).find_map(|turn| {
                let mb = residue as u64 + turn * step;
                let forward = [self.forward(mb), other.forward(mb)];
                let backward = [self.backward(mb), other.backward(mb)];
                let apart = |kind, versions: [i64; 2]| (versions[0] != versions[1]).then_some((kind, mb, versions));
                apart(Kind::F, forward).or_else(|| apart(self.index.backward(), backward))
            })
        })
    }

    /// F and B (I) of the micro-batches that stand for all: beyond the leads of both, a micro-batch one repetition later reads a version
    /// that many updates later, and as many more are begun and made.
    fn passes(&self) -> impl Iterator<Item = Missing> + '_ {
        let StageIndex { f, input_gradient, .. } = self.index;
        let (kind, step) = (self.index.backward(), f.step());
        (0..step as usize).flat_map(move |residue| {
            let turns = f.turns(residue).max(input_gradient.turns(residue));
            work::visit(2 * (turns as usize + 1));
            (0..=turns).flat_map(move |turn| {
                let mb = residue as u64 + turn * step;
                let pass = |op, at, older: Option<i64>| {
                    let (made, begun) = (self.made.before(at), self.begun.before(at));
                    Missing { op, mb, version: older.unwrap_or(made as i64), made, begun }
                };
                let [forward, backward] = self.older(mb);
                [
                    pass(Kind::F, f.place(residue, turn), forward),
                    pass(kind, input_gradient.place(residue, turn), backward),
                ]
            })
        })
    }

    /// Versions that F and B (I) of a micro-batch read where that is not the newest.
    fn older(&self, mb: u64) -> [Option<i64>; 2] {
        match self.policy {
            Policy::Current | Policy::Recomputed | Policy::Predicted => [None; 2],
            Policy::Stash => [None, Some(self.forward(mb))],
            Policy::DoubleBuffer => [Some(self.forward(mb)); 2],
        }
    }
}

/// By stage: the last weight gradients of updates.
fn begun(program: &Program) -> Vec<Count> {
    let mut counts = vec![Count::default(); program.rank_of_stage.len()];
    work::visit(program.instructions());
    for stream in &program.streams {
        let sections = [(&stream.prologue, false), (&stream.period, true)];
        for (section, in_period) in sections {
            for (position, i) in (0..).zip(section) {
                if matches!(i.op, Op::B(a) | Op::W(a) if a.last) {
                    let count = &mut counts[i.stage.index()];
                    if in_period { &mut count.period } else { &mut count.prologue }.push(position);
                }
            }
        }
    }
    counts
}

/// The invariant of the module's text.
pub(super) fn check(program: &Program, stages: &[Versions]) -> Vec<Violation> {
    let of = |versions: &Versions| {
        let stage = versions.index.stage;
        let (policy, slots) = (program.policy, program.rings[stage.index()].weights);
        if slots == 0 || slots > 1 && !matches!(policy, Policy::Stash | Policy::DoubleBuffer) {
            let what = format!("stage {stage} has {slots} versions of the weights under {policy:?}");
            return Some(Violation::Shape(what));
        }
        versions.missing(slots).map(|missing| Violation::Version { stage, slots, missing })
    };
    stages.iter().filter_map(of).collect()
}
