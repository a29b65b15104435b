//! An independent interpreter of streams, written from the meaning of `artifact::stream` alone: slots with contents,
//! transfers that complete some time after both sides are there, ranks that proceed in random order.

use artifact::stream::{Op, Program};
use std::collections::{HashSet, VecDeque};

/// splitmix64.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Slot {
    Free,
    /// Posted, or computed and not yet offered.
    Claimed(u64),
    /// Received and not yet released; for send rings: offered.
    Ready(u64),
}

#[derive(Clone, Debug)]
struct Ring(Vec<Slot>);

impl Ring {
    fn new(slots: u32) -> Self {
        Ring(vec![Slot::Free; slots as usize])
    }

    fn at(&mut self, mb: u64) -> Result<&mut Slot, String> {
        let n = self.0.len() as u64;
        if n == 0 { Err("a ring without slots".into()) } else { Ok(&mut self.0[(mb % n) as usize]) }
    }

    fn claim(&mut self, mb: u64, what: &str) -> Result<(), String> {
        let slot = self.at(mb)?;
        if *slot != Slot::Free {
            return Err(format!("{what} of {mb} finds {slot:?}"));
        }
        *slot = Slot::Claimed(mb);
        Ok(())
    }

    fn release(&mut self, mb: u64, what: &str) -> Result<(), String> {
        let slot = self.at(mb)?;
        match *slot {
            Slot::Claimed(m) | Slot::Ready(m) if m == mb => *slot = Slot::Free,
            other => return Err(format!("{what} of {mb} releases {other:?}")),
        }
        Ok(())
    }
}

#[derive(Clone, Debug)]
struct Stage {
    stash: Ring,
    recv_f: Ring,
    send_f: Ring,
    recv_b: Ring,
    send_b: Ring,
    version: u64,
    read: Vec<Option<u64>>,
    crossed: Vec<Option<u64>>,
    delay: Vec<Option<u64>>,
    gradients: Vec<u64>,
    weighted: HashSet<u64>,
}

/// What a run showed, by stage and micro-batch.
#[derive(Debug)]
pub struct Observed {
    pub drift: Vec<Vec<u64>>,
    pub delay: Vec<Vec<u64>>,
}

struct World<'a> {
    program: &'a Program,
    stages: Vec<Stage>,
    /// By sending and receiving rank: what is offered, what is posted. Nothing but its order tells messages apart.
    offers: Vec<VecDeque<Message>>,
    posts: Vec<VecDeque<Message>>,
}

/// Lower stage, direction (0: forward), micro-batch.
type Message = (usize, usize, u64);

/// Whether the instruction was performed; if not, it waits.
type Done = Result<bool, String>;

impl World<'_> {
    fn new(program: &Program, microbatches: usize) -> World<'_> {
        let stage = |r: &artifact::stream::RingSizes| Stage {
            stash: Ring::new(r.stash),
            recv_f: Ring::new(r.recv_f),
            send_f: Ring::new(r.send_f),
            recv_b: Ring::new(r.recv_b),
            send_b: Ring::new(r.send_b),
            version: 0,
            read: vec![None; microbatches],
            crossed: vec![None; microbatches],
            delay: vec![None; microbatches],
            gradients: Vec::new(),
            weighted: HashSet::new(),
        };
        let stages: Vec<Stage> = program.rings.iter().map(stage).collect();
        let empty = || vec![VecDeque::new(); program.streams.len().pow(2)];
        World { program, stages, offers: empty(), posts: empty() }
    }

    fn perform(&mut self, op: Op, s: usize, mb: u64) -> Done {
        let (first, last) = (s == 0, s + 1 == self.stages.len());
        // Neighbours on one rank hand over: the slot of the reader is written in place.
        let (from, to) = (!first && self.together(s - 1), !last && self.together(s));
        let stage = &mut self.stages[s];
        match op {
            Op::F => {
                if !first && *stage.recv_f.at(mb)? != Slot::Ready(mb) {
                    let slot = *stage.recv_f.at(mb)?;
                    return if from { Err(format!("F {mb} has no input: {slot:?}")) } else { waits(slot, mb) };
                }
                if !last && !to && *stage.send_f.at(mb)? != Slot::Free {
                    return Ok(false);
                }
                stage.stash.claim(mb, "stash")?;
                if first {
                    stage.recv_f.claim(mb, "tokens")?;
                }
                if !last && !to {
                    stage.send_f.claim(mb, "send_f")?;
                }
                if stage.read[mb as usize].replace(stage.version).is_some() {
                    return Err(format!("F {mb} twice"));
                }
                if to {
                    let next = &mut self.stages[s + 1].recv_f;
                    next.claim(mb, "output")?;
                    *next.at(mb)? = Slot::Ready(mb);
                }
            }
            Op::B(_) | Op::I => {
                if !last && *stage.recv_b.at(mb)? != Slot::Ready(mb) {
                    let slot = *stage.recv_b.at(mb)?;
                    return if to { Err(format!("{mb} has no gradient: {slot:?}")) } else { waits(slot, mb) };
                }
                if !first && !from && *stage.send_b.at(mb)? != Slot::Free {
                    return Ok(false);
                }
                let read = stage.read[mb as usize].ok_or_else(|| format!("backward of {mb} before F"))?;
                if stage.crossed[mb as usize].replace(stage.version - read).is_some() {
                    return Err(format!("backward of {mb} twice"));
                }
                if !first && !from {
                    stage.send_b.claim(mb, "send_b")?;
                }
                if from {
                    let before = &mut self.stages[s - 1].recv_b;
                    before.claim(mb, "input gradient")?;
                    *before.at(mb)? = Slot::Ready(mb);
                }
                if let Op::B(a) = op {
                    self.weight(s, mb, a.first, a.last)?;
                }
            }
            Op::W(a) => {
                if stage.crossed[mb as usize].is_none() {
                    return Err(format!("W {mb} before I"));
                }
                self.weight(s, mb, a.first, a.last)?;
            }
            Op::U => self.update(s, mb)?,
            Op::SendF => self.offer(s, 0, mb)?,
            Op::SendB => self.offer(s, 1, mb)?,
            Op::RecvF => {
                stage.recv_f.claim(mb, "RECV_F")?;
                let pair = self.pair(s - 1, s);
                self.posts[pair].push_back((s - 1, 0, mb));
            }
            Op::RecvB => {
                stage.recv_b.claim(mb, "RECV_B")?;
                let pair = self.pair(s + 1, s);
                self.posts[pair].push_back((s, 1, mb));
            }
        }
        Ok(true)
    }

    /// Whether a stage and the next are on one rank.
    fn together(&self, s: usize) -> bool {
        self.program.rank_of_stage[s] == self.program.rank_of_stage[s + 1]
    }

    fn weight(&mut self, s: usize, mb: u64, first: bool, last: bool) -> Result<(), String> {
        let k = u64::from(self.program.accumulate);
        let has_next = s + 1 < self.stages.len();
        let stage = &mut self.stages[s];
        if first != stage.gradients.is_empty() {
            return Err(format!("the gradient of {mb} is marked first: {first}, after {:?}", stage.gradients));
        }
        if !stage.weighted.insert(mb) {
            return Err(format!("the gradient of {mb} twice"));
        }
        stage.gradients.push(mb);
        let of_update = stage.gradients.iter().all(|m| m / k == mb / k);
        if !of_update || last != (stage.gradients.len() as u64 == k) {
            return Err(format!("the gradient of {mb} is marked last: {last}, with {:?}", stage.gradients));
        }
        stage.stash.release(mb, "stash")?;
        stage.recv_f.release(mb, "recv_f")?;
        if has_next {
            stage.recv_b.release(mb, "recv_b")?;
        }
        Ok(())
    }

    fn update(&mut self, s: usize, u: u64) -> Result<(), String> {
        let k = u64::from(self.program.accumulate);
        let stage = &mut self.stages[s];
        if stage.gradients.len() as u64 != k || stage.gradients.iter().any(|m| m / k != u) || stage.version != u {
            return Err(format!("update {u} of version {} with {:?}", stage.version, stage.gradients));
        }
        for m in std::mem::take(&mut stage.gradients) {
            stage.delay[m as usize] = stage.read[m as usize].map(|read| u - read);
        }
        stage.version += 1;
        Ok(())
    }

    fn offer(&mut self, s: usize, direction: usize, mb: u64) -> Result<(), String> {
        let stage = &mut self.stages[s];
        let slot = if direction == 0 { stage.send_f.at(mb)? } else { stage.send_b.at(mb)? };
        if *slot != Slot::Claimed(mb) {
            return Err(format!("{mb} is offered from {slot:?}"));
        }
        *slot = Slot::Ready(mb);
        let (to, channel) = if direction == 0 { (s + 1, s) } else { (s - 1, s - 1) };
        let pair = self.pair(s, to);
        self.offers[pair].push_back((channel, direction, mb));
        Ok(())
    }

    fn pair(&self, from: usize, to: usize) -> usize {
        let rank = |s: usize| self.program.rank_of_stage[s].index();
        rank(from) * self.program.streams.len() + rank(to)
    }

    fn transfer(&mut self, pair: usize) -> Done {
        let (offers, posts) = (&mut self.offers[pair], &mut self.posts[pair]);
        let (Some(offered), Some(wanted)) = (offers.front().copied(), posts.front().copied()) else { return Ok(false) };
        if offered != wanted {
            return Err(format!("{offered:?} is sent where {wanted:?} is received"));
        }
        offers.pop_front();
        posts.pop_front();
        let (channel, direction, sent) = offered;
        let (from, to) = if direction == 0 { (channel, channel + 1) } else { (channel + 1, channel) };
        if direction == 0 {
            self.stages[from].send_f.release(sent, "send_f")?;
            *self.stages[to].recv_f.at(sent)? = Slot::Ready(sent);
        } else {
            self.stages[from].send_b.release(sent, "send_b")?;
            *self.stages[to].recv_b.at(sent)? = Slot::Ready(sent);
        }
        Ok(true)
    }
}

fn waits(slot: Slot, mb: u64) -> Done {
    if slot == Slot::Claimed(mb) { Ok(false) } else { Err(format!("waits for {mb}, its receive slot is {slot:?}")) }
}

/// Runs a segment of `updates` updates.
///
/// # Errors
/// What went wrong; "stuck" when nothing can proceed.
pub fn interpret(program: &Program, updates: u64, random: &mut Random) -> Result<Observed, String> {
    let microbatches = (updates * u64::from(program.accumulate)) as usize;
    let lists: Vec<Vec<_>> = program.streams.iter().map(|s| s.segment(updates).collect()).collect();
    let mut world = World::new(program, microbatches);
    let mut next = vec![0; lists.len()];
    let pairs = world.offers.len();
    loop {
        let mut tries: Vec<usize> = (0..lists.len() + pairs).collect();
        for i in (1..tries.len()).rev() {
            tries.swap(i, random.below(i as u64 + 1) as usize);
        }
        let mut moved = false;
        for chosen in tries {
            if let Some(pair) = chosen.checked_sub(lists.len()) {
                moved |= world.transfer(pair)?;
            } else {
                // A rank performs a random number of instructions before others get their turn.
                for _ in 0..random.below(4) + 1 {
                    let Some((op, stage, mb)) = lists[chosen].get(next[chosen]).copied() else { break };
                    let done = world.perform(op, stage.index(), mb).map_err(|e| format!("stage {stage}: {e}"))?;
                    if !done {
                        break;
                    }
                    next[chosen] += 1;
                    moved = true;
                }
            }
        }
        if !moved {
            break;
        }
    }
    if next.iter().zip(&lists).any(|(n, list)| *n < list.len()) {
        return Err("stuck".into());
    }
    finished(world, updates)
}

fn finished(world: World, updates: u64) -> Result<Observed, String> {
    let all =
        |list: Vec<Option<u64>>| list.into_iter().collect::<Option<Vec<u64>>>().ok_or("a micro-batch was left out");
    let mut observed = Observed { drift: Vec::new(), delay: Vec::new() };
    for stage in world.stages {
        let rings = [&stage.stash, &stage.recv_f, &stage.send_f, &stage.recv_b, &stage.send_b];
        if rings.iter().any(|ring| ring.0.iter().any(|slot| *slot != Slot::Free)) || stage.version != updates {
            return Err("something is left at the end".into());
        }
        observed.drift.push(all(stage.crossed)?);
        observed.delay.push(all(stage.delay)?);
    }
    Ok(observed)
}
