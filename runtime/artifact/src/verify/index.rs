//! Where in its rank's stream each micro-batch of one operation is performed, for a run of any length.
//!
//! # Meaning
//!
//! The period repeats with step `d` (micro-batches a repetition; updates for `U`). Its instruction for value `q` stands
//! for `q, q + d, q + 2d, …`. Every value is performed exactly once when
//!
//! * the period has exactly one instruction for each residue modulo `d`, and
//! * the prologue has exactly the values of each residue below the period's `q`: `q mod d, …, q - d`.
//!
//! `q div d` of a residue is its *lead*: so many of its values come in the prologue. From then on the place of value
//! `m + d` is that of `m`, one repetition later. A relation between places of two operations (at a fixed distance of their
//! values) is therefore the same for every value from the larger of both leads on, and checking one value of each
//! residue beyond them proves it for all. The leads of an operation sum up to its instructions in the prologue, so such
//! a proof takes time linear in the stream.

use crate::stream::{Instr, Op, Program};
use std::collections::HashMap;

/// What an instruction does, whatever its accumulation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    F,
    B,
    I,
    W,
    U,
    SendF,
    RecvF,
    SendB,
    RecvB,
}

impl Kind {
    pub fn of(op: Op) -> Self {
        match op {
            Op::F => Kind::F,
            Op::B(_) => Kind::B,
            Op::I => Kind::I,
            Op::W(_) => Kind::W,
            Op::U => Kind::U,
            Op::SendF => Kind::SendF,
            Op::RecvF => Kind::RecvF,
            Op::SendB => Kind::SendB,
            Op::RecvB => Kind::RecvB,
        }
    }

    /// As diagnostics and grids write it.
    pub fn name(self) -> &'static str {
        match self {
            Kind::F => "F",
            Kind::B => "B",
            Kind::I => "I",
            Kind::W => "W",
            Kind::U => "U",
            Kind::SendF => "SEND_F",
            Kind::RecvF => "RECV_F",
            Kind::SendB => "SEND_B",
            Kind::RecvB => "RECV_B",
        }
    }
}

/// A place in a rank's run; the order is that of execution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct At {
    /// 0 is the prologue; repetition `n` of the period is `n + 1`.
    pub section: u64,
    /// Index of the instruction in the prologue or the period.
    pub position: u32,
}

/// Where one operation of one stage is performed. See the module's text.
#[derive(Clone, Debug)]
pub struct Index {
    step: u64,
    prologue: HashMap<u32, u32>,
    /// By residue: the value in the period and its position.
    period: Vec<(u32, u32)>,
}

/// The instructions of one stage, with their positions in its rank's stream.
#[derive(Clone, Debug, Default)]
pub struct Listing {
    pub prologue: Vec<(u32, Instr)>,
    pub period: Vec<(u32, Instr)>,
}

impl Listing {
    /// By stage. Instructions of stages that do not exist are left out.
    pub fn of(program: &Program) -> Vec<Listing> {
        let mut listings = vec![Listing::default(); program.rank_of_stage.len()];
        for stream in &program.streams {
            for (position, i) in stream.prologue.iter().enumerate() {
                if let Some(listing) = listings.get_mut(i.stage.index()) {
                    listing.prologue.push((position as u32, *i));
                }
            }
            for (position, i) in stream.period.iter().enumerate() {
                if let Some(listing) = listings.get_mut(i.stage.index()) {
                    listing.period.push((position as u32, *i));
                }
            }
        }
        listings
    }

    /// The instructions in the prologue, then those of the period.
    pub fn instructions(&self) -> impl Iterator<Item = Instr> + Clone + '_ {
        self.prologue.iter().chain(&self.period).map(|(_, i)| *i)
    }
}

impl Index {
    /// Indexes the instructions of `kind`, which advance by `step` a repetition.
    ///
    /// # Errors
    /// A value that is performed not at all or twice, described.
    pub fn new(listing: &Listing, kind: Kind, step: u32) -> Result<Self, String> {
        let wanted = |(_, i): &&(u32, Instr)| Kind::of(i.op) == kind;
        let count = listing.period.iter().filter(wanted).count();
        if count != step as usize {
            return Err(format!("the period has {count} of {step}"));
        }
        let mut period = vec![None; count];
        for (position, i) in listing.period.iter().filter(wanted) {
            let residue = &mut period[(i.mb % step) as usize];
            if residue.replace((i.mb, *position)).is_some() {
                return Err(format!("{} or a repetition of it is performed twice", i.mb));
            }
        }
        let period: Vec<(u32, u32)> =
            period.into_iter().map(|p| p.expect("as many as residues, all different")).collect();
        let mut prologue = HashMap::new();
        for (position, i) in listing.prologue.iter().filter(wanted) {
            if i.mb >= period[(i.mb % step) as usize].0 || prologue.insert(i.mb, *position).is_some() {
                return Err(format!("{} is performed twice", i.mb));
            }
        }
        let due: u128 = period.iter().map(|(value, _)| u128::from(value / step)).sum();
        if due != prologue.len() as u128 {
            return Err(format!("the prologue has {} of {due}", prologue.len()));
        }
        Ok(Index { step: u64::from(step), prologue, period })
    }

    /// Values a repetition.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Where value `m` is performed.
    pub fn at(&self, m: u64) -> At {
        let (value, position) = self.period[(m % self.step) as usize];
        match m.checked_sub(u64::from(value)) {
            Some(later) => At { section: later / self.step + 1, position },
            None => At { section: 0, position: self.prologue[&(m as u32)] },
        }
    }

    /// How many values of `m`'s residue the prologue performs.
    pub fn lead(&self, m: u64) -> u64 {
        u64::from(self.period[(m % self.step) as usize].0) / self.step
    }

    /// The values that stand for all in a comparison of `self` at `m` with `other` at `m + distance`.
    pub fn witnesses<'a>(&'a self, other: &'a Index, distance: u64) -> impl Iterator<Item = u64> + 'a {
        (0..self.step).flat_map(move |residue| {
            let turns = self.lead(residue).max(other.lead(residue + distance)) + 1;
            (0..=turns).map(move |turn| residue + turn * self.step)
        })
    }
}
