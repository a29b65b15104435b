//! What is searched: an order of F, I and W on every rank, and how long it takes.
//!
//! # Meaning
//!
//! A rank performs its *tokens* in order. A token is an action of one of the rank's stages; its micro-batch follows from how many
//! tokens like it come before: every action takes micro-batches in ascending order, so what is found runs in rings and sums gradients
//! in one order. F waits for F of the stage before, I for I of the stage after, one hop later where that is another rank; W waits for nothing but its
//! rank. A rank keeps a micro-batch of a stage from its F to its W, at most `caps` of them at once.

use crate::Shape;
use crate::time::Costs;
use dsl::schedule::Place;

/// An action of one of a rank's stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Token {
    pub kind: Kind,
    pub chunk: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    F,
    I,
    W,
}

pub const KINDS: [Kind; 3] = [Kind::F, Kind::I, Kind::W];

/// By rank.
pub type Order = Vec<Vec<Token>>;

/// One flush on stages that are placed.
#[derive(Clone, Debug)]
pub struct Problem {
    pub ranks: usize,
    pub chunks: usize,
    pub microbatches: usize,
    pub place: Place,
    /// By stage: nanoseconds of F, I and W.
    pub times_ns: Vec<[u64; 3]>,
    pub hop_ns: u64,
    /// By rank: most micro-batches of its stages that are kept.
    pub caps: Vec<usize>,
    /// By stage: its rank, and which of the rank's stages it is.
    homes: Vec<(usize, usize)>,
    /// By stage and kind: see [`Problem::before`].
    befores: Vec<Option<(usize, u64)>>,
}

/// How long an order takes when every action runs as soon as it can.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Length {
    /// Of the rank whose own first to last action takes longest.
    pub span_ns: u64,
    /// Of all ranks.
    pub spans_ns: u64,
}

impl Length {
    /// What is made small: the longest span, and the others a little.
    pub fn cost_ns(&self, problem: &Problem) -> u64 {
        self.span_ns + self.spans_ns / (4 * problem.ranks as u64)
    }
}

impl Problem {
    /// `caps`: by rank, most micro-batches of its stages that are kept.
    pub fn new(place: Place, shape: &Shape, costs: &Costs, caps: Vec<usize>) -> Problem {
        let (ranks, chunks) = (shape.ranks, place.chunks(shape.chunks));
        let home = |stage| {
            let (rank, chunk) = place.home(stage, ranks);
            (rank as usize, chunk as usize)
        };
        let homes: Vec<(usize, usize)> = (0..ranks * chunks).map(home).collect();
        let befores = (0..homes.len()).flat_map(|stage| KINDS.map(|kind| before(&homes, stage, kind, costs.hop_ns)));
        Problem {
            ranks: ranks as usize,
            chunks: chunks as usize,
            microbatches: shape.accumulate as usize,
            place,
            // An action that took no time could not be told from one that has not run.
            times_ns: costs.stages.iter().map(|s| [s.f_ns.max(1), s.i_ns.max(1), s.w_ns.max(1)]).collect(),
            hop_ns: costs.hop_ns,
            caps,
            befores: befores.collect(),
            homes,
        }
    }

    /// Each micro-batch after the other, on every rank: the least is kept.
    pub fn one_by_one(&self) -> Order {
        let of = |rank: usize| {
            let mut chunks: Vec<u8> = (0..self.chunks as u8).collect();
            chunks.sort_by_key(|chunk| self.stage(rank, usize::from(*chunk)));
            let token = |kind| move |chunk: &u8| Token { kind, chunk: *chunk };
            let backward = chunks.iter().rev().flat_map(|chunk| [Kind::I, Kind::W].map(|kind| token(kind)(chunk)));
            let one: Vec<Token> = chunks.iter().map(token(Kind::F)).chain(backward).collect();
            one.repeat(self.microbatches)
        };
        (0..self.ranks).map(of).collect()
    }

    pub fn stage(&self, rank: usize, chunk: usize) -> usize {
        self.place.stage(chunk as u32, rank as u32, self.ranks as u32) as usize
    }

    pub fn rank_of(&self, stage: usize) -> (usize, usize) {
        self.homes[stage]
    }

    pub fn stages(&self) -> usize {
        self.ranks * self.chunks
    }

    /// Actions of all ranks.
    pub fn size(&self) -> usize {
        self.stages() * self.microbatches * KINDS.len()
    }

    /// Work of a rank.
    pub fn work_ns(&self, rank: usize) -> u64 {
        let of = |chunk| self.times_ns[self.stage(rank, chunk)].iter().sum::<u64>();
        (0..self.chunks).map(of).sum::<u64>() * self.microbatches as u64
    }

    /// What all ranks' spans add to a [`Length::cost_ns`] at least.
    pub fn least_ns(&self) -> u64 {
        (0..self.ranks).map(|rank| self.work_ns(rank)).sum::<u64>() / (4 * self.ranks as u64)
    }

    /// Where a stage's action stands in lists of all.
    pub fn at(&self, stage: usize, kind: Kind, mb: usize) -> usize {
        (stage * KINDS.len() + kind as usize) * self.microbatches + mb
    }

    /// The stage whose action of the same kind must come before, and the time of the way from there.
    pub fn before(&self, stage: usize, kind: Kind) -> Option<(usize, u64)> {
        self.befores[stage * KINDS.len() + kind as usize]
    }

    /// Most micro-batches that each rank keeps.
    pub fn kept(&self, order: &Order) -> Vec<usize> {
        let most = |tokens: &Vec<Token>| {
            let (mut now, mut most) = (0usize, 0);
            for token in tokens {
                match token.kind {
                    Kind::F => now += 1,
                    Kind::I => {}
                    Kind::W => now -= 1,
                }
                most = most.max(now);
            }
            most
        };
        order.iter().map(most).collect()
    }

    /// No order ends its longest span sooner: by each rank's work alone, and by what must happen between a rank's first
    /// and last action elsewhere.
    pub fn bound_ns(&self) -> u64 {
        (0..self.ranks).map(|rank| self.work_ns(rank).max(self.chain_ns(rank))).max().unwrap_or(0)
    }

    /// The rank that forwards micro-batch 0 first waits for all passes of the last stage: a path through them from its first action to its
    /// last. The last stage's rank makes room for the last forward pass by weight gradients.
    fn chain_ns(&self, rank: usize) -> u64 {
        let last = self.stages() - 1;
        let own = self.stage(rank, 0);
        if self.chunks > 1 || own == last {
            return 0;
        }
        let [f, i, w] = self.times_ns[last];
        let m = self.microbatches as u64;
        let there: u64 = (own..last).map(|s| self.times_ns[s][0] + self.hop_ns).sum();
        let back: u64 = (own..last).map(|s| self.times_ns[s][1] + self.hop_ns).sum();
        let room = m.saturating_sub(self.caps[last] as u64);
        there + m * (f + i) + room * w + back + self.times_ns[own][2]
    }
}

fn before(homes: &[(usize, usize)], stage: usize, kind: Kind, hop_ns: u64) -> Option<(usize, u64)> {
    let other = match kind {
        Kind::F => stage.checked_sub(1)?,
        Kind::I => Some(stage + 1).filter(|s| *s < homes.len())?,
        Kind::W => return None,
    };
    Some((other, if homes[other].0 == homes[stage].0 { 0 } else { hop_ns }))
}

/// Times orders. Holds the lists that it needs, so that an order costs no allocation.
pub struct Timer<'a> {
    problem: &'a Problem,
    /// By action: when it has ended; 0 is not yet.
    ends_ns: Vec<u64>,
    next: Vec<usize>,
    done: Vec<[usize; 3]>,
    free_ns: Vec<u64>,
    starts_ns: Vec<u64>,
    busy_ns: Vec<u64>,
    /// By rank: all its work.
    work_ns: Vec<u64>,
    /// By stage and kind: what [`Problem::before`] says, as a list index of micro-batch 0.
    before: Vec<Option<(usize, u64)>>,
    /// Actions timed so far, in all orders: the measure of work.
    pub work: u64,
}

impl<'a> Timer<'a> {
    pub fn new(problem: &'a Problem) -> Timer<'a> {
        let stages = problem.stages();
        let before = (0..stages)
            .flat_map(|s| KINDS.map(|k| problem.before(s, k).map(|(other, hop)| (problem.at(other, k, 0), hop))))
            .collect();
        Timer {
            problem,
            ends_ns: vec![0; problem.size()],
            next: vec![0; problem.ranks],
            done: vec![[0; 3]; stages],
            free_ns: vec![0; problem.ranks],
            starts_ns: vec![0; problem.ranks],
            busy_ns: vec![0; problem.ranks],
            work_ns: (0..problem.ranks).map(|rank| problem.work_ns(rank)).collect(),
            before,
            work: 0,
        }
    }

    /// None when ranks wait for each other, or when it is certain that a span is longer than `most_ns`.
    pub fn length(&mut self, order: &Order, most_ns: u64) -> Option<Length> {
        self.ends_ns.fill(0);
        self.next.fill(0);
        self.done.fill([0; 3]);
        self.free_ns.fill(0);
        self.starts_ns.fill(0);
        self.busy_ns.fill(0);
        let size = self.problem.size();
        let mut left = size;
        while left > 0 {
            let begun = left;
            for rank in (0..order.len()).chain((0..order.len()).rev()) {
                left -= self.advance(rank, &order[rank]);
                let idle = self.free_ns[rank] - self.starts_ns[rank] - self.busy_ns[rank];
                if idle + self.work_ns[rank] > most_ns {
                    self.work += (size - left) as u64;
                    return None;
                }
            }
            if left == begun {
                return None;
            }
        }
        self.work += size as u64;
        let spans = self.free_ns.iter().zip(&self.starts_ns).map(|(end, start)| end - start);
        Some(Length { span_ns: spans.clone().max().unwrap_or(0), spans_ns: spans.sum() })
    }

    /// By rank of the order timed last: the tokens that the rank waits for.
    pub fn gaps(&self, order: &Order) -> Vec<Vec<usize>> {
        let of = |(rank, tokens): (usize, &Vec<Token>)| {
            let mut done = vec![[0; 3]; self.problem.chunks];
            let mut free = self.starts_ns[rank];
            let waits = |(at, token): (usize, &Token)| {
                let (chunk, kind) = (usize::from(token.chunk), token.kind as usize);
                let stage = self.problem.stage(rank, chunk);
                let end = self.ends_ns[(stage * 3 + kind) * self.problem.microbatches + done[chunk][kind]];
                done[chunk][kind] += 1;
                let waited = end - self.problem.times_ns[stage][kind] > free;
                free = end;
                waited.then_some(at)
            };
            tokens.iter().enumerate().filter_map(waits).collect()
        };
        order.iter().enumerate().map(of).collect()
    }

    /// Performs what the rank can.
    fn advance(&mut self, rank: usize, tokens: &[Token]) -> usize {
        let m = self.problem.microbatches;
        let begun = self.next[rank];
        while let Some(token) = tokens.get(self.next[rank]) {
            let stage = self.problem.stage(rank, usize::from(token.chunk));
            let kind = token.kind as usize;
            let mb = self.done[stage][kind];
            let mut start = self.free_ns[rank];
            if let Some((other, hop)) = self.before[stage * 3 + kind] {
                let end = self.ends_ns[other + mb];
                if end == 0 {
                    break;
                }
                start = start.max(end + hop);
            }
            if self.next[rank] == 0 {
                self.starts_ns[rank] = start;
            }
            let end = start + self.problem.times_ns[stage][kind];
            self.ends_ns[(stage * 3 + kind) * m + mb] = end;
            self.free_ns[rank] = end;
            self.busy_ns[rank] += self.problem.times_ns[stage][kind];
            self.done[stage][kind] += 1;
            self.next[rank] += 1;
        }
        self.next[rank] - begun
    }
}
