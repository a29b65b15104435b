//! Runs a build's instruction streams in one thread: ranks take turns, a transfer is a copy. What the runtime does, with the
//! interpreter in place of compiled kernels.

use crate::interpreter::{Arena, execute};
use artifact::ids::{RankId, StageId};
use artifact::program::{Call, HYPER_LEN, Optimizer, Place, Selector, variant};
use artifact::stream::{Op, Policy, Program};
use model::build::Build;
use std::collections::{HashMap, VecDeque};

/// Random numbers, 64 bits each.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Between -1 and 1.
    pub fn uniform(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }
}

/// What a run reads from outside.
#[derive(Clone, Copy)]
pub struct Setting<'a> {
    /// Token ids by micro-batch: inputs and targets.
    pub data: &'a dyn Fn(u64) -> (Vec<f64>, Vec<f64>),
    /// Initial value by parameter name and element.
    pub weight: &'a dyn Fn(&str, u64) -> f64,
    pub optimizer: Optimizer,
    /// Learning rate by 0-based update.
    pub learning_rate: &'a dyn Fn(u64) -> f64,
}

impl Setting<'_> {
    /// The hyper-parameters of an update, with and without decay: see [`HYPER_LEN`].
    fn hyper(&self, update: u64) -> [[f64; HYPER_LEN]; 2] {
        let (lr, step) = ((self.learning_rate)(update), update as i32 + 1);
        let corrected = |beta: f64| 1.0 - beta.powi(step);
        let mut h = [0.0; HYPER_LEN];
        let mut averages = |at: usize, beta: f64| (h[at], h[at + 1]) = (beta, 1.0 - beta);
        let decay = match self.optimizer {
            Optimizer::AdamW { beta1, beta2, eps, decay }
            | Optimizer::NAdam { beta1, beta2, eps, decay, .. }
            | Optimizer::Mars { beta1, beta2, eps, decay, .. } => {
                averages(0, beta1);
                averages(2, beta2);
                (h[4], h[5], h[6]) = (1.0 / corrected(beta2), eps, lr / corrected(beta1));
                // What the tests of fusion ask of NAdam and MARS is only that it depends on the gradient.
                h[8] = lr;
                decay
            }
            Optimizer::Sgd { momentum, decay }
            | Optimizer::Signum { momentum, decay }
            | Optimizer::Muon { momentum, decay } => {
                averages(0, momentum);
                h[6] = lr;
                decay
            }
            Optimizer::Lion { beta1, beta2, decay } | Optimizer::NorMuon { momentum: beta1, beta2, decay } => {
                averages(0, beta1);
                averages(2, beta2);
                h[6] = lr;
                decay
            }
            Optimizer::Soap { .. } => panic!("no interpreted model has SOAP"),
            Optimizer::Adan { beta1, beta2, beta3, eps, decay } => {
                averages(0, beta1);
                averages(2, beta2);
                averages(9, beta3);
                (h[4], h[5], h[6]) = (1.0 / corrected(beta3), eps, lr / corrected(beta1));
                (h[8], h[11]) = (lr * beta2 / corrected(beta2), f64::from(step > 1));
                decay
            }
        };
        let with = |kept: f64| {
            let mut vector = h;
            vector[7] = kept;
            vector
        };
        match self.optimizer {
            Optimizer::Adan { .. } => [with(1.0 / (1.0 + lr * decay)), with(1.0)],
            _ => [with(1.0 - lr * decay), with(1.0)],
        }
    }
}

/// A micro-batch and what was sent of it.
type Sent = (u64, Vec<f64>);

/// A pipeline in one thread.
pub struct Machine<'a> {
    pub build: &'a Build,
    program: &'a Program,
    setting: Setting<'a>,
    /// By rank.
    pub arenas: Vec<Arena>,
    /// What is under way, by sending stage and direction (true: forward).
    transfers: HashMap<(StageId, bool), VecDeque<Sent>>,
    /// Sums of the tied table's gradient under way, by sending stage.
    exchanged: HashMap<StageId, Vec<f64>>,
    /// Sums of squares under way, by sending stage and direction (true: up).
    sums: HashMap<(StageId, bool), f64>,
    /// Summed cross-entropy by micro-batch.
    pub losses: HashMap<u64, f64>,
    /// By stage: most updates between F and B (or I), counted by the version words.
    pub drift_max: Vec<u64>,
    /// By stage: updates made.
    made: Vec<u64>,
}

impl<'a> Machine<'a> {
    /// A pipeline at its start.
    pub fn new(build: &'a Build, program: &'a Program, setting: Setting<'a>) -> Machine<'a> {
        let mut arenas: Vec<Arena> = build.memory.iter().map(|m| Arena::new(m.total)).collect();
        for stage in &build.stages {
            let arena = &mut arenas[stage.rank.index()];
            for param in &stage.params {
                let cells = cells(&param.weight, 0);
                let weight = |i| (setting.weight)(&param.name, i);
                let elements = arena.cells[cells].iter_mut().step_by(2);
                (0..).zip(elements).for_each(|(i, cell)| *cell = weight(i));
                if let Some(copy) = &param.copy {
                    let cells = self::cells(copy, 0);
                    (0..).zip(&mut arena.cells[cells]).for_each(|(i, cell)| *cell = weight(i));
                }
                param.state.iter().for_each(|s| arena.cells[self::cells(s, 0)].fill(0.0));
            }
            arena.cells[cells(&stage.io.version, 0)].fill(0.0);
        }
        let drift_max = vec![0; build.stages.len()];
        let (transfers, exchanged, sums) = (HashMap::new(), HashMap::new(), HashMap::new());
        let (losses, made) = (HashMap::new(), drift_max.clone());
        Machine { build, program, setting, arenas, transfers, exchanged, sums, losses, drift_max, made }
    }

    /// Runs a segment of `updates` updates.
    pub fn run(&mut self, updates: u64) {
        let program = self.program;
        let mut streams: Vec<_> = program.streams.iter().map(|s| s.segment(updates).peekable()).collect();
        loop {
            let mut moved = false;
            for stream in &mut streams {
                while let Some(&(op, stage, mb)) = stream.peek() {
                    if !self.ready(op, stage, mb) {
                        break;
                    }
                    self.instruction(op, stage, mb);
                    stream.next();
                    moved = true;
                }
            }
            if streams.iter_mut().all(|s| s.peek().is_none()) {
                return;
            }
            assert!(moved, "the streams are stuck");
        }
    }

    fn ready(&self, op: Op, stage: StageId, mb: u64) -> bool {
        let io = &self.build.stages[stage.index()].io;
        let arrived = |from: StageId, forward: bool| {
            let front = self.transfers.get(&(from, forward)).and_then(VecDeque::front);
            front.is_some_and(|(sent, _)| *sent == mb)
        };
        match op {
            Op::F if io.recv_f.is_some() && self.apart(StageId(stage.0 - 1)) => arrived(StageId(stage.0 - 1), true),
            Op::B(_) | Op::I if io.recv_b.is_some() && self.apart(stage) => arrived(StageId(stage.0 + 1), false),
            // The first end's N has taken it where there is one.
            Op::U if stage.0 == 0 && self.program.norms() => true,
            Op::U => self.partner(stage).is_none_or(|other| self.exchanged.contains_key(&other)),
            Op::N if stage.0 == 0 => self.partner(stage).is_none_or(|other| self.exchanged.contains_key(&other)),
            Op::N => !self.apart(StageId(stage.0 - 1)) || self.sums.contains_key(&(StageId(stage.0 - 1), true)),
            Op::T => !self.apart(stage) || self.sums.contains_key(&(StageId(stage.0 + 1), false)),
            _ => true,
        }
    }

    fn partner(&self, stage: StageId) -> Option<StageId> {
        self.program.partner(stage.index()).map(|other| StageId(other as u32))
    }

    /// Where the tied table's gradient is, and where the other end's goes.
    fn table(&self, stage: StageId) -> [Place; 2] {
        let table = self.build.stages[stage.index()].params.iter().find(|p| p.other_end.is_some());
        let table = table.expect("a stage that exchanges has an end");
        [table.gradient, table.other_end].map(|place| place.expect("it has both buffers"))
    }

    /// Whether the stage and the next are on different ranks; else they hand over, and nothing is sent.
    fn apart(&self, stage: StageId) -> bool {
        let rank = |s: usize| self.build.stages[s].rank;
        rank(stage.index()) != rank(stage.index() + 1)
    }

    fn instruction(&mut self, op: Op, id: StageId, mb: u64) {
        let build = self.build;
        let stage = &build.stages[id.index()];
        let (io, bodies) = (&stage.io, &stage.bodies);
        match op {
            Op::F => {
                self.receive(id, io.recv_f, StageId(id.0.wrapping_sub(1)), true, mb);
                let (tokens, targets) = (self.setting.data)(mb);
                self.fill(id, io.tokens, mb, &tokens);
                self.fill(id, io.targets, mb, &targets);
                let wanted = match self.program.policy {
                    Policy::DoubleBuffer => (mb / u64::from(self.program.accumulate)).saturating_sub(1),
                    _ => self.made[id.index()],
                };
                let version = self.word(id, &io.version, wanted);
                assert_eq!(version, wanted as f64, "F of {mb} on stage {id} reads what is not there");
                self.fill(id, Some(io.version_seen), mb, &[version, f64::NAN]);
                self.body(id, &bodies.f, mb);
                if let Some(loss) = io.loss {
                    self.losses.insert(mb, self.word(id, &loss, mb));
                }
            }
            Op::B(a) => {
                self.receive(id, io.recv_b, StageId(id.0 + 1), false, mb);
                self.count_drift(id, mb);
                self.hyper(id);
                self.body(id, &bodies.b[variant(a)], mb);
            }
            Op::I => {
                self.receive(id, io.recv_b, StageId(id.0 + 1), false, mb);
                self.count_drift(id, mb);
                self.body(id, &bodies.i, mb);
            }
            Op::W(a) => {
                self.hyper(id);
                self.body(id, &bodies.w[variant(a)], mb);
            }
            Op::U => {
                self.take_table(id);
                self.hyper(id);
                self.body(id, &bodies.u, 0);
                self.made[id.index()] += 1;
                let version = self.made[id.index()];
                self.fill(id, Some(io.version), version, &[version as f64, f64::NAN]);
            }
            Op::SendF => self.send(id, io.send_f, true, mb),
            Op::SendB => self.send(id, io.send_b, false, mb),
            Op::SendG => {
                let [place, _] = self.table(id);
                let content = self.arena(id).cells[cells(&place, 0)].to_vec();
                assert!(self.exchanged.insert(id, content).is_none(), "the sum before was not taken");
            }
            Op::N => {
                if id.0 == 0 {
                    self.take_table(id);
                } else if self.apart(StageId(id.0 - 1)) {
                    let sum = self.sums.remove(&(StageId(id.0 - 1), true)).expect("ready");
                    self.set_sum(id, io.norm, sum);
                }
                self.body(id, &bodies.n, 0);
            }
            Op::T if self.apart(id) => {
                let total = self.sums.remove(&(StageId(id.0 + 1), false)).expect("ready");
                self.set_sum(id, io.total, total);
            }
            Op::SendN | Op::SendT => {
                let place = if op == Op::SendN { io.norm } else { io.total };
                let sum = self.word(id, &place.expect("a stage with a norm has both"), 0);
                assert!(self.sums.insert((id, op == Op::SendN), sum).is_none(), "the sum before was not taken");
            }
            Op::T | Op::RecvF | Op::RecvB | Op::RecvG | Op::RecvN | Op::RecvT => {}
        }
    }

    /// Puts the gradient of the tied table's other end where the update adds it, if it is on another rank and not there yet.
    fn take_table(&mut self, id: StageId) {
        let Some(other) = self.partner(id) else { return };
        if let Some(content) = self.exchanged.remove(&other) {
            let [_, place] = self.table(id);
            self.arena(id).cells[cells(&place, 0)].copy_from_slice(&content);
        }
    }

    fn set_sum(&mut self, id: StageId, place: Option<Place>, sum: f64) {
        let place = place.expect("a stage with a norm has both");
        self.arena(id).cells[cells(&place, 0)][0] = sum;
    }

    fn arena(&mut self, stage: StageId) -> &mut Arena {
        &mut self.arenas[self.build.stages[stage.index()].rank.index()]
    }

    fn word(&self, stage: StageId, place: &Place, mb: u64) -> f64 {
        self.arenas[self.build.stages[stage.index()].rank.index()].cells[cells(place, mb)][0]
    }

    /// Sets the 4-byte elements of a place.
    fn fill(&mut self, stage: StageId, place: Option<Place>, mb: u64, content: &[f64]) {
        if let Some(place) = place {
            let cells = &mut self.arena(stage).cells[cells(&place, mb)];
            assert_eq!(cells.len(), 2 * content.len());
            cells.iter_mut().step_by(2).zip(content).for_each(|(cell, value)| *cell = *value);
        }
    }

    fn send(&mut self, stage: StageId, place: Option<Place>, forward: bool, mb: u64) {
        let place = place.expect("a stage that sends has a slot");
        let content = self.arena(stage).cells[cells(&place, mb)].to_vec();
        self.transfers.entry((stage, forward)).or_default().push_back((mb, content));
    }

    fn receive(&mut self, stage: StageId, place: Option<Place>, from: StageId, forward: bool, mb: u64) {
        if let Some(place) = place.filter(|_| self.apart(StageId(stage.0.min(from.0)))) {
            let (sent, content) =
                self.transfers.get_mut(&(from, forward)).and_then(VecDeque::pop_front).expect("ready");
            assert_eq!(sent, mb);
            self.arena(stage).cells[cells(&place, mb)].copy_from_slice(&content);
        }
    }

    fn count_drift(&mut self, stage: StageId, mb: u64) {
        let io = &self.build.stages[stage.index()].io;
        let seen = self.word(stage, &io.version_seen, mb);
        let reads = match self.program.policy {
            Policy::Stash | Policy::DoubleBuffer => seen as u64,
            Policy::Current | Policy::Recomputed | Policy::Predicted => self.made[stage.index()],
        };
        let now = self.word(stage, &io.version, reads);
        let seen = if self.program.policy == Policy::Recomputed { now } else { seen };
        let most = &mut self.drift_max[stage.index()];
        *most = (*most).max((now - seen) as u64);
    }

    fn hyper(&mut self, stage: StageId) {
        let io = &self.build.stages[stage.index()].io;
        let both = self.setting.hyper(self.made[stage.index()]).concat();
        self.fill(stage, Some(io.hyper), 0, &both);
    }

    fn body(&mut self, stage: StageId, calls: &[Call], mb: u64) {
        let build = self.build;
        let (newest, io) = (self.made[stage.index()], &build.stages[stage.index()].io);
        // Beyond the run there is no version seen: only what reads weights asks for it.
        let seen = self.word(stage, &io.version_seen, mb) as u64;
        let index = |p: &Place| match p.by {
            Selector::Microbatch => mb,
            Selector::Seen => seen,
            Selector::Newest => newest,
            Selector::Next => newest + 1,
            Selector::Here | Selector::Ahead => unreachable!("no policy of these tests predicts"),
        };
        let arena = self.arena(stage);
        for call in calls {
            let args: Vec<_> = call.args.iter().map(|p| cells(p, index(p))).collect();
            execute(&build.kernels[call.kernel as usize], arena, &args);
        }
    }

    /// Every parameter's gradient accumulator, by name.
    pub fn gradients(&self) -> HashMap<String, Vec<f64>> {
        self.collect(|p| p.gradient)
    }

    /// Whether the copies of a tied table are equal.
    pub fn copies_agree(&self) -> bool {
        let of =
            |rank: usize, place: Place| self.arenas[rank].cells[cells(&place, 0)].iter().step_by(2).collect::<Vec<_>>();
        let stages = self.build.stages.iter();
        let tables = stages.flat_map(|s| s.params.iter().filter(|p| p.other_end.is_some()).map(move |p| (s, p)));
        let tables: Vec<_> = tables.map(|(s, p)| of(s.rank.index(), p.weight)).collect();
        tables.windows(2).all(|pair| pair[0] == pair[1])
    }

    /// Every parameter's weight, by name.
    pub fn weights(&self) -> HashMap<String, Vec<f64>> {
        self.collect(|p| Some(p.weight))
    }

    fn collect(&self, which: impl Fn(&artifact::program::Param) -> Option<Place>) -> HashMap<String, Vec<f64>> {
        let stages = self.build.stages.iter();
        let params = stages.flat_map(|s| s.params.iter().map(move |p| (s.rank, p)));
        let found = params.filter_map(|(rank, p)| which(p).map(|place| (rank, p.name.clone(), place)));
        let values = |rank: RankId, place| {
            let cells = &self.arenas[rank.index()].cells[cells(&place, 0)];
            cells.iter().step_by(2).copied().collect()
        };
        found.map(|(rank, name, place)| (name, values(rank, place))).collect()
    }
}

fn cells(place: &Place, mb: u64) -> std::ops::Range<usize> {
    Arena::range(place.at(mb), place.bytes)
}
