//! An independent interpreter of streams, written from the meaning of `artifact::stream` alone: slots with contents,
//! a clock, ranks that take some time for each instruction, transfers that are made once both sides are there.
//!
//! It is slow and knows no formula: every figure is counted while a run goes on.

use crate::norms::{Norms, Way};
pub use crate::observed::Observed;
pub use crate::random::Random;
use crate::ring::{Ring, Slot, waits};
use artifact::stream::{Op, Policy, Program, RingSizes};
use std::collections::{BTreeMap, HashSet, VecDeque};

/// How long an instruction takes, and a transfer from the moment when both sides are there; whether it is one of a tied table's
/// gradient.
pub struct Durations<'a> {
    pub compute: &'a mut dyn FnMut(Op, usize) -> u64,
    pub hop: &'a mut dyn FnMut(bool) -> u64,
}

#[derive(Clone, Debug)]
struct Stage {
    stash: Ring,
    recv_f: Ring,
    send_f: Ring,
    recv_b: Ring,
    send_b: Ring,
    /// By update, where a tied table's gradient is exchanged: the accumulator, and the other end's sum.
    table: Ring,
    recv_g: Ring,
    /// By micro-batch: the versions that F and its backward pass read.
    versions: Vec<[u64; 2]>,
    /// Updates made.
    version: u64,
    /// The versions of the weights that are kept, by slot; none while one is written.
    weights: Vec<Option<u64>>,
    /// By micro-batch: the version that F read, how many updates its backward pass came later, its gradient's delay.
    read: Vec<Option<u64>>,
    crossed: Vec<Option<u64>>,
    delay: Vec<Option<u64>>,
    /// Weight gradients since the last update.
    gradients: Vec<u64>,
    weighted: HashSet<u64>,
    /// By update: when it was made.
    updated: Vec<u64>,
}

impl Stage {
    fn new(rings: &RingSizes, microbatches: usize) -> Stage {
        Stage {
            stash: Ring::new(rings.stash),
            recv_f: Ring::new(rings.recv_f),
            send_f: Ring::new(rings.send_f),
            recv_b: Ring::new(rings.recv_b),
            send_b: Ring::new(rings.send_b),
            table: Ring::new(1),
            recv_g: Ring::new(1),
            versions: vec![[0; 2]; microbatches],
            version: 0,
            weights: std::iter::once(Some(0)).chain(vec![None; (rings.weights - 1) as usize]).collect(),
            read: vec![None; microbatches],
            crossed: vec![None; microbatches],
            delay: vec![None; microbatches],
            gradients: Vec::new(),
            weighted: HashSet::new(),
            updated: Vec::new(),
        }
    }

    fn used(&self) -> RingSizes {
        let [stash, recv_f, send_f, recv_b, send_b] =
            [&self.stash, &self.recv_f, &self.send_f, &self.recv_b, &self.send_b].map(|ring| ring.most);
        RingSizes { weights: self.weights.len() as u32, stash, recv_f, send_f, recv_b, send_b }
    }

    fn reads(&self, version: u64, what: &str, mb: u64) -> Checked {
        let there = self.weights[version as usize % self.weights.len()];
        if there == Some(version) { Ok(()) } else { Err(format!("{what} {mb} finds weights {there:?} for {version}")) }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Direction {
    Forward,
    Backward,
    /// Between the ends of a tied table.
    Across,
    /// Sums of squares.
    Norm(Way),
}

/// Stage that sends, direction, micro-batch (update, of a tied table).
type Message = (usize, Direction, u64);

/// From one rank to another: what is offered and what is posted. Nothing but its order tells messages apart.
#[derive(Clone, Debug, Default)]
struct Wire {
    offers: VecDeque<Message>,
    posts: VecDeque<Message>,
}

struct World<'a> {
    program: &'a Program,
    stages: Vec<Stage>,
    /// By sending and receiving rank.
    wires: BTreeMap<(usize, usize), Wire>,
    norms: Norms,
    /// Contents on their way: when they arrive.
    moving: Vec<(u64, Message)>,
    now: u64,
}

type Checked = Result<(), String>;

impl World<'_> {
    fn new(program: &Program, microbatches: usize) -> World<'_> {
        let stages = program.rings.iter().map(|rings| Stage::new(rings, microbatches)).collect();
        let homes: Vec<usize> = program.rank_of_stage.iter().map(|rank| rank.index()).collect();
        let norms = Norms::new(&homes);
        World { program, stages, norms, wires: BTreeMap::new(), moving: Vec::new(), now: 0 }
    }

    /// Whether it is the first stage of a copy of the model, and whether the last.
    fn ends(&self, s: usize) -> (bool, bool) {
        let stages = self.stages.len() / self.program.copies as usize;
        (s % stages == 0, s % stages == stages - 1)
    }

    /// Whether a stage and the next are on one rank: the slot of the reader is then written in place.
    fn together(&self, s: usize) -> bool {
        !self.ends(s).1 && self.program.rank_of_stage[s] == self.program.rank_of_stage[s + 1]
    }

    fn wire(&mut self, from: usize, to: usize) -> &mut Wire {
        let rank = |s: usize| self.program.rank_of_stage[s].index();
        let pair = (rank(from), rank(to));
        self.wires.entry(pair).or_default()
    }

    /// The two stages with the ends of a tied table.
    fn table(&self) -> Option<[usize; 2]> {
        let last = self.stages.len() - 1;
        (self.program.tied && self.program.copies == 1 && last > 0).then_some([0, last])
    }

    /// The other end of a tied table, on another rank.
    fn across(&self, s: usize) -> Option<usize> {
        let ends = self.table().filter(|ends| ends.contains(&s))?;
        let [first, last] = ends.map(|s| self.program.rank_of_stage[s]);
        (first != last).then_some(ends[0] + ends[1] - s)
    }

    /// Ends on one rank share the table: whoever reads it finds both updates made, or none.
    fn whole(&self, s: usize) -> Checked {
        let Some(ends) = self.table().filter(|ends| ends.contains(&s)) else { return Ok(()) };
        let [first, last] = ends.map(|s| self.stages[s].version);
        if self.across(s).is_some() || first == last { Ok(()) } else { Err("between two updates of a table".into()) }
    }

    fn begin_update(&mut self, s: usize, u: u64) -> Result<bool, String> {
        if self.program.global_norm && self.program.copies == 1 {
            self.norms.known(s, u)?;
            if self.norms.sending(s) {
                return Ok(false);
            }
        }
        self.both_sums(s, u)
    }

    /// The squares of a stage's gradients are added: all are made, and the sum of the stages before is there.
    fn begin_norm(&mut self, s: usize, u: u64) -> Result<bool, String> {
        if !self.program.global_norm || self.program.copies > 1 {
            return Err("nothing needs a norm".into());
        }
        self.made(s, u)?;
        let here = s == 0 && self.across(s).is_none();
        if let Some([_, last]) = self.table().filter(|_| here) {
            self.made(last, u)?;
        }
        let versions: Vec<u64> = self.stages.iter().map(|stage| stage.version).collect();
        Ok(self.norms.begin(s, u, &versions)? && (s > 0 || self.both_sums(s, u)?))
    }

    /// All gradients of an update are made, and no other.
    fn made(&self, s: usize, u: u64) -> Checked {
        let (k, gradients) = (u64::from(self.program.accumulate), &self.stages[s].gradients);
        if gradients.len() as u64 != k || gradients.iter().any(|m| m / k != u) {
            return Err(format!("{gradients:?} is used for update {u}"));
        }
        Ok(())
    }

    /// Of a tied table: its own sum is taken, the other one there.
    fn both_sums(&mut self, s: usize, u: u64) -> Result<bool, String> {
        if self.across(s).is_none() {
            return Ok(true);
        }
        let stage = &mut self.stages[s];
        match (*stage.table.at(u)?, *stage.recv_g.at(u)?) {
            (Slot::Free, Slot::Ready(m)) if m == u => Ok(true),
            (Slot::Free | Slot::Ready(_), Slot::Claimed(m) | Slot::Ready(m)) if m == u => Ok(false),
            other => Err(format!("update {u} waits for what nothing will bring: {other:?}")),
        }
    }

    /// Starts an instruction: claims what it writes. False: it has to wait.
    fn begin(&mut self, op: Op, s: usize, mb: u64) -> Result<bool, String> {
        match op {
            Op::F => self.begin_forward(s, mb),
            Op::B(_) | Op::I => self.begin_backward(s, mb),
            Op::W(_) if self.stages[s].crossed[mb as usize].is_none() => Err(format!("W {mb} before I")),
            Op::U => self.begin_update(s, mb),
            Op::N => self.begin_norm(s, mb),
            Op::T => self.norms.total(s, mb),
            _ => Ok(true),
        }
    }

    fn begin_forward(&mut self, s: usize, mb: u64) -> Result<bool, String> {
        self.whole(s)?;
        let (from, to) = (s > 0 && self.together(s - 1), self.together(s));
        let (first, last) = self.ends(s);
        let stage = &mut self.stages[s];
        if !first && *stage.recv_f.at(mb)? != Slot::Ready(mb) {
            return waits(*stage.recv_f.at(mb)?, mb, from);
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
        let version = match self.program.policy {
            Policy::DoubleBuffer => (mb / u64::from(self.program.accumulate)).saturating_sub(1),
            _ => stage.version,
        };
        stage.reads(version, "F", mb)?;
        stage.versions[mb as usize][0] = version;
        if stage.read[mb as usize].replace(version).is_some() {
            return Err(format!("F {mb} twice"));
        }
        if to {
            self.stages[s + 1].recv_f.claim(mb, "output")?;
        }
        Ok(true)
    }

    fn begin_backward(&mut self, s: usize, mb: u64) -> Result<bool, String> {
        self.whole(s)?;
        let (from, to) = (s > 0 && self.together(s - 1), self.together(s));
        let (first, last) = self.ends(s);
        let stage = &mut self.stages[s];
        if !last && *stage.recv_b.at(mb)? != Slot::Ready(mb) {
            return waits(*stage.recv_b.at(mb)?, mb, to);
        }
        if !first && !from && *stage.send_b.at(mb)? != Slot::Free {
            return Ok(false);
        }
        let read = stage.read[mb as usize].ok_or_else(|| format!("backward of {mb} before F"))?;
        let version = match self.program.policy {
            Policy::Stash | Policy::DoubleBuffer => read,
            Policy::Current | Policy::Recomputed | Policy::Predicted => stage.version,
        };
        stage.reads(version, "backward", mb)?;
        stage.versions[mb as usize][1] = version;
        let activations = if self.program.policy == Policy::Recomputed { version } else { read };
        if stage.crossed[mb as usize].replace(version - activations).is_some() {
            return Err(format!("backward of {mb} twice"));
        }
        if !first && !from {
            stage.send_b.claim(mb, "send_b")?;
        }
        if from {
            self.stages[s - 1].recv_b.claim(mb, "input gradient")?;
        }
        Ok(true)
    }

    /// Ends an instruction: hands over, sends, releases.
    fn end(&mut self, op: Op, s: usize, mb: u64) -> Checked {
        match op {
            Op::F if self.together(s) => self.stages[s + 1].recv_f.ready(mb, "output"),
            Op::F => Ok(()),
            Op::B(_) | Op::I => {
                if s > 0 && self.together(s - 1) {
                    self.stages[s - 1].recv_b.ready(mb, "input gradient")?;
                }
                if let Op::B(a) = op { self.weight(s, mb, a.first, a.last) } else { Ok(()) }
            }
            Op::W(a) => self.weight(s, mb, a.first, a.last),
            Op::U => self.update(s, mb),
            Op::SendF => {
                self.stages[s].send_f.ready(mb, "SEND_F")?;
                self.wire(s, s + 1).offers.push_back((s, Direction::Forward, mb));
                Ok(())
            }
            Op::SendB => {
                self.stages[s].send_b.ready(mb, "SEND_B")?;
                self.wire(s, s - 1).offers.push_back((s, Direction::Backward, mb));
                Ok(())
            }
            Op::RecvF => {
                self.stages[s].recv_f.claim(mb, "RECV_F")?;
                self.wire(s - 1, s).posts.push_back((s - 1, Direction::Forward, mb));
                Ok(())
            }
            Op::RecvB => {
                self.stages[s].recv_b.claim(mb, "RECV_B")?;
                self.wire(s + 1, s).posts.push_back((s + 1, Direction::Backward, mb));
                Ok(())
            }
            Op::SendG => {
                let partner = self.across(s).ok_or("there is no other end")?;
                self.made(s, mb)?;
                self.stages[s].table.ready(mb, "SEND_G")?;
                self.wire(s, partner).offers.push_back((s, Direction::Across, mb));
                Ok(())
            }
            Op::RecvG => {
                let partner = self.across(s).ok_or("there is no other end")?;
                self.stages[s].recv_g.claim(mb, "RECV_G")?;
                self.wire(partner, s).posts.push_back((partner, Direction::Across, mb));
                Ok(())
            }
            Op::N => {
                self.norms.add(s, mb);
                Ok(())
            }
            Op::T => {
                self.norms.find(s, mb);
                Ok(())
            }
            Op::SendN => self.offer_norm(s, s + 1, Way::Up, mb),
            Op::SendT => self.offer_norm(s, s - 1, Way::Down, mb),
            Op::RecvN => self.post_norm(s - 1, s, Way::Up, mb),
            Op::RecvT => self.post_norm(s + 1, s, Way::Down, mb),
        }
    }

    fn offer_norm(&mut self, s: usize, to: usize, way: Way, u: u64) -> Checked {
        if self.stages[s].version != u {
            return Err(format!("{way:?} {u} is sent after the update"));
        }
        self.norms.offer(s, way, u)?;
        self.wire(s, to).offers.push_back((s, Direction::Norm(way), u));
        Ok(())
    }

    fn post_norm(&mut self, from: usize, s: usize, way: Way, u: u64) -> Checked {
        let versions: Vec<u64> = self.stages.iter().map(|stage| stage.version).collect();
        self.norms.post(s, way, u, &versions)?;
        self.wire(from, s).posts.push_back((from, Direction::Norm(way), u));
        Ok(())
    }

    fn weight(&mut self, s: usize, mb: u64, first: bool, last: bool) -> Checked {
        let k = u64::from(self.program.accumulate);
        let (has_next, exchanges) = (!self.ends(s).1, self.across(s).is_some());
        self.whole(s)?;
        let stage = &mut self.stages[s];
        if exchanges && first {
            stage.table.claim(mb / k, "the accumulator")?;
        }
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
        if last {
            // The update is fused into it: it overwrites the oldest version.
            let slot = (stage.version + 1) as usize % stage.weights.len();
            stage.weights[slot] = None;
        }
        stage.stash.release(mb, "stash")?;
        stage.recv_f.release(mb, "recv_f")?;
        if has_next { stage.recv_b.release(mb, "recv_b") } else { Ok(()) }
    }

    fn update(&mut self, s: usize, u: u64) -> Checked {
        let k = u64::from(self.program.accumulate);
        let exchanges = self.across(s).is_some();
        let stage = &mut self.stages[s];
        if exchanges {
            stage.recv_g.release(u, "U")?;
        }
        if stage.gradients.len() as u64 != k || stage.gradients.iter().any(|m| m / k != u) || stage.version != u {
            return Err(format!("update {u} of version {} with {:?}", stage.version, stage.gradients));
        }
        for m in std::mem::take(&mut stage.gradients) {
            stage.delay[m as usize] = stage.read[m as usize].map(|read| u - read);
        }
        stage.version += 1;
        let slot = stage.version as usize % stage.weights.len();
        if stage.weights[slot].replace(stage.version).is_some() {
            return Err(format!("version {} was not begun", stage.version));
        }
        stage.updated.push(self.now);
        Ok(())
    }

    /// Makes every transfer whose sides are there: the send slot is free from now on.
    fn transfer(&mut self, hop: &mut dyn FnMut(bool) -> u64) -> Result<bool, String> {
        let mut made = Vec::new();
        for wire in self.wires.values_mut() {
            while let (Some(offered), Some(wanted)) = (wire.offers.front(), wire.posts.front()) {
                if offered != wanted {
                    return Err(format!("{offered:?} is sent where {wanted:?} is received"));
                }
                made.extend(wire.offers.pop_front());
                wire.posts.pop_front();
            }
        }
        for message in &made {
            let (s, direction, mb) = *message;
            match direction {
                Direction::Forward => self.stages[s].send_f.release(mb, "send_f")?,
                Direction::Backward => self.stages[s].send_b.release(mb, "send_b")?,
                Direction::Across => self.stages[s].table.release(mb, "the accumulator")?,
                Direction::Norm(way) => self.norms.taken(s, way),
            }
            self.moving.push((self.now + hop(direction == Direction::Across), *message));
        }
        Ok(!made.is_empty())
    }

    /// Delivers what has arrived.
    fn arrive(&mut self) -> Result<bool, String> {
        let now = self.now;
        if self.moving.iter().all(|(at, _)| *at > now) {
            return Ok(false);
        }
        let (arrived, moving): (Vec<_>, Vec<_>) = self.moving.drain(..).partition(|(at, _)| *at <= now);
        self.moving = moving;
        for (_, (s, direction, mb)) in &arrived {
            match direction {
                Direction::Forward => self.stages[s + 1].recv_f.ready(*mb, "arrival")?,
                Direction::Backward => self.stages[s - 1].recv_b.ready(*mb, "arrival")?,
                Direction::Across => {
                    let partner = self.across(*s).ok_or("there is no other end")?;
                    self.stages[partner].recv_g.ready(*mb, "arrival")?;
                }
                Direction::Norm(Way::Up) => self.norms.arrive(s + 1, Way::Up, *mb)?,
                Direction::Norm(Way::Down) => self.norms.arrive(s - 1, Way::Down, *mb)?,
            }
        }
        Ok(!arrived.is_empty())
    }
}

/// A rank on its way through its list.
struct Worker {
    list: Vec<(Op, usize, u64)>,
    next: usize,
    /// When the running instruction ends.
    until: Option<u64>,
    in_flight: u32,
    most: u32,
    busy: u64,
    span: Option<(u64, u64)>,
}

impl Worker {
    /// Whether anything was begun or ended now.
    fn step(&mut self, world: &mut World, durations: &mut Durations) -> Result<bool, String> {
        let Some(&(op, s, mb)) = self.list.get(self.next) else { return Ok(false) };
        let at = |e: String| format!("stage {s}, {op:?} {mb}: {e}");
        let now = world.now;
        match self.until {
            None => {
                if !world.begin(op, s, mb).map_err(at)? {
                    return Ok(false);
                }
                let transfer = !matches!(op, Op::F | Op::B(_) | Op::I | Op::W(_) | Op::N | Op::T | Op::U);
                let takes = if transfer { 0 } else { (durations.compute)(op, s) };
                self.until = Some(now + takes);
                self.busy += takes;
                if !transfer {
                    let (first, _) = self.span.unwrap_or((now, now));
                    self.span = Some((first, now + takes));
                }
                self.in_flight += u32::from(op == Op::F);
                self.most = self.most.max(self.in_flight);
            }
            Some(until) if until <= now => {
                world.end(op, s, mb).map_err(at)?;
                if matches!(op, Op::B(_) | Op::W(_)) {
                    self.in_flight -= 1;
                }
                (self.until, self.next) = (None, self.next + 1);
            }
            Some(_) => return Ok(false),
        }
        Ok(true)
    }
}

/// Runs a segment of `updates` updates.
///
/// # Errors
/// What went wrong; "stuck" when nothing can proceed.
pub fn simulate(program: &Program, updates: u64, mut durations: Durations) -> Result<Observed, String> {
    let microbatches = (updates * u64::from(program.accumulate)) as usize;
    let mut world = World::new(program, microbatches);
    let worker = |stream: &artifact::stream::Stream| Worker {
        list: stream.segment(updates).map(|(op, stage, mb)| (op, stage.index(), mb)).collect(),
        next: 0,
        until: None,
        in_flight: 0,
        most: 0,
        busy: 0,
        span: None,
    };
    let mut workers: Vec<Worker> = program.streams.iter().map(worker).collect();
    loop {
        let mut moved = world.arrive()?;
        for worker in &mut workers {
            while worker.step(&mut world, &mut durations)? {
                moved = true;
            }
        }
        moved |= world.transfer(durations.hop)?;
        if moved {
            continue;
        }
        let ends = workers.iter().filter_map(|worker| worker.until);
        match ends.chain(world.moving.iter().map(|(at, _)| *at)).min() {
            Some(next) => world.now = next,
            None => break,
        }
    }
    if workers.iter().any(|worker| worker.next < worker.list.len()) {
        return Err("stuck".into());
    }
    finished(world, &workers, updates)
}

/// [`simulate`] with random durations.
///
/// # Errors
/// As there.
pub fn interpret(program: &Program, updates: u64, random: &mut Random) -> Result<Observed, String> {
    let (fast, far) = (random.below(12) + 1, random.below(8) + 1);
    let seed = random.next();
    let (mut one, mut other) = (Random(seed), Random(!seed));
    let mut compute = |_, _| one.below(fast);
    let mut hop = |_| other.below(far);
    simulate(program, updates, Durations { compute: &mut compute, hop: &mut hop })
}

fn finished(world: World, workers: &[Worker], updates: u64) -> Result<Observed, String> {
    let all =
        |list: Vec<Option<u64>>| list.into_iter().collect::<Option<Vec<u64>>>().ok_or("a micro-batch was left out");
    let mut observed = Observed {
        drift: Vec::new(),
        delay: Vec::new(),
        used: world.stages.iter().map(Stage::used).collect(),
        in_flight: workers.iter().map(|w| w.most).collect(),
        busy: workers.iter().map(|w| w.busy).collect(),
        span: workers.iter().map(|w| w.span.unwrap_or_default()).collect(),
        updated: world.stages.iter().map(|stage| stage.updated.clone()).collect(),
    };
    if let Some([first, last]) = world.table()
        && world.stages[first].versions != world.stages[last].versions
    {
        return Err("a micro-batch met two versions of a tied table".into());
    }
    if !world.norms.ended() {
        return Err("a norm is left at the end".into());
    }
    for stage in world.stages {
        let rings =
            [&stage.stash, &stage.recv_f, &stage.send_f, &stage.recv_b, &stage.send_b, &stage.table, &stage.recv_g];
        if rings.iter().any(|ring| ring.taken > 0) || stage.version != updates {
            return Err("something is left at the end".into());
        }
        observed.drift.push(all(stage.crossed)?);
        observed.delay.push(all(stage.delay)?);
    }
    Ok(observed)
}
