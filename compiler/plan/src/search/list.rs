//! Orders made by rules: each rank does the most wanted of what it can do, over a grid of rules.
//!
//! A rank that is free does, in this order: what `prefer` puts first of the F and I that are there; a W, where more than `lag` wait or memory is
//! full; an F that is there and within `lead`; a W, where the next known arrival leaves time for it; else it waits.

use super::problem::{KINDS, Kind, Order, Problem, Token};

/// What a rank may do ahead, and what it does first.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rules {
    /// Most forward passes of stage s of S before their I: `lead.0 * (S - 1 - s) + lead.1`, in tenths.
    pub lead: [usize; 2],
    /// Most I of rank s before their W, in tenths: `lag.0 * s + lag.1`, and of the last `tail` micro-batches `lag.2` more.
    pub lag: [usize; 3],
    pub tail: usize,
    /// How much of a W may overlap the next arrival, in tenths: on the first rank, and on the last.
    pub late: [usize; 2],
    /// By kind (F, I) and whether the stage is the rank's last: what comes first of what is there.
    pub prefer: [[u8; 2]; 2],
    /// Micro-batches kept less than may be, where F is not of the rank's last stage.
    pub room: usize,
    /// What a hop counts for while the order is made, in tenths: more of it leaves slack.
    pub hop: u64,
}

struct List<'a> {
    problem: &'a Problem,
    rules: &'a [Rules],
    ends_ns: Vec<u64>,
    /// By stage.
    done: Vec<[usize; 3]>,
    /// By rank.
    free_ns: Vec<u64>,
    /// By rank: when it can do something, as far as is known.
    soonest_ns: Vec<u64>,
    order: Order,
}

const NEVER: u64 = u64::MAX;

/// An action that could be next, and when its input is there.
#[derive(Clone, Copy)]
struct Choice {
    token: Token,
    ready_ns: u64,
}

/// The order that the rules make. None when they come to a stop.
pub fn list(problem: &Problem, rules: &[Rules]) -> Option<Order> {
    let mut list = List {
        problem,
        rules,
        ends_ns: vec![NEVER; problem.size()],
        done: vec![[0; 3]; problem.stages()],
        free_ns: vec![0; problem.ranks],
        soonest_ns: vec![NEVER; problem.ranks],
        order: vec![Vec::with_capacity(problem.size() / problem.ranks); problem.ranks],
    };
    (0..problem.ranks).for_each(|rank| list.renew(rank));
    let mut left = problem.size();
    while left > 0 {
        let (now, rank) = (0..problem.ranks).map(|r| (list.soonest_ns[r], r)).min()?;
        if now == NEVER {
            return None;
        }
        left -= usize::from(list.act(rank, now));
    }
    Some(list.order)
}

impl List<'_> {
    /// Those of the rank's part of its work.
    fn rules(&self, rank: usize) -> &Rules {
        let all = self.problem.size() / self.problem.ranks;
        &self.rules[(self.order[rank].len() * self.rules.len() / all).min(self.rules.len() - 1)]
    }

    fn kept(&self, rank: usize) -> usize {
        self.ahead(rank, Kind::F, Kind::W)
    }

    /// How many more of one kind than of another the rank has done.
    fn ahead(&self, rank: usize, kind: Kind, than: Kind) -> usize {
        let of = |chunk| {
            let done = self.done[self.problem.stage(rank, chunk)];
            done[kind as usize] - done[than as usize]
        };
        (0..self.problem.chunks).map(of).sum()
    }

    /// What the rank can do at some time, as far as it is known. Forward passes beyond what may be kept are left out.
    fn choices(&self, rank: usize, mut see: impl FnMut(Choice)) {
        let p = self.problem;
        let kept = self.kept(rank);
        let rules = self.rules(rank);
        let hop_ns = p.hop_ns * rules.hop / 10;
        for chunk in (0..p.chunks).rev() {
            let stage = p.stage(rank, chunk);
            let lead = (rules.lead[0] * (p.stages() - 1 - stage) + rules.lead[1]) / 10;
            let done = self.done[stage];
            for kind in KINDS {
                let mb = done[kind as usize];
                let possible = match kind {
                    // Later stages must find room, or nothing is ever done with what is kept.
                    Kind::F => {
                        mb < p.microbatches
                            && mb - done[Kind::I as usize] < lead.max(1)
                            && kept + (p.chunks - 1 - chunk) * rules.room.max(1) < p.caps[rank]
                    }
                    Kind::I => mb < done[Kind::F as usize],
                    Kind::W => mb < done[Kind::I as usize],
                };
                if !possible {
                    continue;
                }
                let ready_ns = match p.before(stage, kind) {
                    None => 0,
                    Some((other, hop)) => match self.ends_ns[p.at(other, kind, mb)] {
                        NEVER => continue,
                        end if hop == 0 => end,
                        end => end + hop_ns,
                    },
                };
                see(Choice { token: Token { kind, chunk: chunk as u8 }, ready_ns });
            }
        }
    }

    fn renew(&mut self, rank: usize) {
        let mut soonest = NEVER;
        self.choices(rank, |c| soonest = soonest.min(c.ready_ns));
        self.soonest_ns[rank] = if soonest == NEVER { NEVER } else { soonest.max(self.free_ns[rank]) };
    }

    /// Does one thing or waits. Whether something was done.
    fn act(&mut self, rank: usize, now: u64) -> bool {
        let last = self.problem.chunks as u8 - 1;
        let (mut pass, mut weights, mut next) = (None::<(u8, Token)>, None::<Token>, NEVER);
        let rules = *self.rules(rank);
        let prefer = rules.prefer;
        self.choices(rank, |c| match c.token.kind {
            _ if c.ready_ns > now => next = next.min(c.ready_ns),
            Kind::W => weights = weights.or(Some(c.token)),
            kind => {
                let wanted = prefer[kind as usize][usize::from(c.token.chunk == last)];
                if pass.is_none_or(|(most, _)| wanted > most) {
                    pass = Some((wanted, c.token));
                }
            }
        });
        let p = self.problem;
        let tail = self.done[p.stage(rank, p.chunks - 1)][Kind::I as usize] + rules.tail >= p.microbatches;
        let lag = rules.lag[0] * rank + rules.lag[1] + if tail { rules.lag[2] } else { 0 };
        let due = self.ahead(rank, Kind::I, Kind::W) * 10 > lag || self.kept(rank) >= self.problem.caps[rank];
        let urgent = pass.filter(|(wanted, _)| *wanted >= 4 || !due).map(|(_, token)| token);
        let [first, end] = rules.late;
        let late = (first * (p.ranks - 1 - rank) + end * rank) / (p.ranks - 1).max(1);
        let fits = |token: &Token| {
            let w = self.problem.times_ns[self.problem.stage(rank, usize::from(token.chunk))][Kind::W as usize];
            next == NEVER || next >= now + w - w * late.min(10) as u64 / 10
        };
        let chosen = urgent.or(weights.filter(|_| due)).or(pass.map(|(_, token)| token)).or(weights.filter(fits));
        match chosen {
            Some(token) => {
                self.perform(rank, token, now);
                true
            }
            None => {
                self.soonest_ns[rank] = if next == NEVER { now + 1 } else { next };
                self.free_ns[rank] = self.soonest_ns[rank];
                false
            }
        }
    }

    fn perform(&mut self, rank: usize, token: Token, now: u64) {
        let p = self.problem;
        let stage = p.stage(rank, usize::from(token.chunk));
        let kind = token.kind as usize;
        let end = now + p.times_ns[stage][kind];
        self.ends_ns[p.at(stage, token.kind, self.done[stage][kind])] = end;
        self.done[stage][kind] += 1;
        self.free_ns[rank] = end;
        self.order[rank].push(token);
        self.renew(rank);
        let other = match token.kind {
            Kind::F => Some(stage + 1).filter(|s| *s < p.stages()),
            Kind::I => stage.checked_sub(1),
            Kind::W => None,
        };
        if let Some(other) = other.map(|s| p.rank_of(s).0).filter(|r| *r != rank) {
            self.renew(other);
        }
    }
}
