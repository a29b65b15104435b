//! The loop over a rank's instructions.
//!
//! It knows no schedule: it takes the stream's instructions one by one, waits for the transfers that an instruction needs,
//! and calls the kernels of its body. Versions are counted here, from words beside the weights, not from the plan.
//! Where kernels run and what a wait is, the [`Engine`] knows: at once, on the rank's own thread ([`crate::threads`]), or
//! enqueued for a device ([`crate::device`]).

use crate::control::{Control, GivenUp};
use crate::data::Batches;
use crate::device::engine::Enqueuer;
use crate::device::order::Side;
use crate::hyper::{self, Terms};
use crate::rank::{Kind, Rank};
use crate::versions::{self, Slots};
use artifact::ids::StageId;
use artifact::optimizer::Correction;
use artifact::program::{Call, HYPER_LEN, Manifest, Place, Stage, variant};
use artifact::stream::{Accumulation, Op, Policy};
use std::cell::Cell;
use std::time::Instant;

/// A stage finished an update.
#[derive(Clone, Copy, Debug)]
pub struct Report {
    /// Counted from the run's start.
    pub update: u64,
    /// Counted from the segment's start.
    pub of_segment: u64,
    /// The last stage: sum of the losses of the update's micro-batches, in their order.
    pub loss: Option<f64>,
    /// Largest drift that the stage has seen so far.
    pub drift_max: u64,
    pub at: Instant,
}

/// What a rank is doing, for the message when it fails.
#[derive(Clone, Copy, Debug)]
pub struct Doing {
    pub op: Op,
    pub stage: StageId,
    pub at: u64,
}

/// What the ranks of a segment have in common.
#[derive(Clone, Copy)]
pub struct Shared<'a> {
    pub manifest: &'a Manifest,
    pub control: &'a Control<'a>,
    pub batches: Batches<'a>,
}

/// Which transfers of a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ring {
    RecvF,
    SendF,
    RecvB,
    SendB,
    RecvG,
    SendG,
    RecvN,
    SendN,
    RecvT,
    SendT,
}

impl Ring {
    /// In the order of their numbers.
    pub const ALL: [Ring; 10] = [
        Ring::RecvF,
        Ring::SendF,
        Ring::RecvB,
        Ring::SendB,
        Ring::RecvG,
        Ring::SendG,
        Ring::RecvN,
        Ring::SendN,
        Ring::RecvT,
        Ring::SendT,
    ];

    /// The instruction that hands a slot of it over.
    pub fn op(self) -> Op {
        match self {
            Ring::RecvF => Op::RecvF,
            Ring::SendF => Op::SendF,
            Ring::RecvB => Op::RecvB,
            Ring::SendB => Op::SendB,
            Ring::RecvG => Op::RecvG,
            Ring::SendG => Op::SendG,
            Ring::RecvN => Op::RecvN,
            Ring::SendN => Op::SendN,
            Ring::RecvT => Op::RecvT,
            Ring::SendT => Op::SendT,
        }
    }

    /// The ring that an instruction hands a slot of over; none for computations.
    pub fn of(op: Op) -> Option<Ring> {
        Ring::ALL.into_iter().find(|ring| ring.op() == op)
    }

    /// The stage's slots of such transfers.
    pub fn place(self, stage: &Stage) -> Option<Place> {
        let io = &stage.io;
        let table = || stage.params.iter().find(|p| p.other_end.is_some());
        match self {
            Ring::RecvF => io.recv_f,
            Ring::SendF => io.send_f,
            Ring::RecvB => io.recv_b,
            Ring::SendB => io.send_b,
            Ring::RecvG => table()?.other_end,
            Ring::SendG => table()?.gradient,
            Ring::RecvN | Ring::SendN => io.norm,
            Ring::RecvT | Ring::SendT => io.total,
        }
    }

    /// Whether it is one of an update, not of a micro-batch.
    pub fn by_update(self) -> bool {
        self.op().by_update()
    }

    pub fn sends(self) -> bool {
        matches!(self, Ring::SendF | Ring::SendB | Ring::SendG | Ring::SendN | Ring::SendT)
    }

    /// As the plan prints the instruction.
    pub fn name(self) -> &'static str {
        artifact::verify::index::Kind::of(self.op()).name()
    }
}

/// A slot that is handed to the transport, by one of its two ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// Where the stage is among the rank's stages.
    pub local: usize,
    pub ring: Ring,
    /// The update, where gradients of a tied table are exchanged.
    pub mb: u64,
}

/// Where a rank's kernels run. The rank's arena is the memory itself, or what the host knows of a device's.
pub trait Engine {
    /// Hands a slot over: it is full and to be sent, or empty and to be filled.
    fn transfer(&mut self, rank: &mut Rank, transfer: Transfer) -> Result<(), GivenUp>;

    /// The kernels called from here on find the slot's last transfer done. False: the segment now ends before its micro-batch.
    fn wait(&mut self, rank: &mut Rank, transfer: Transfer) -> Result<bool, GivenUp>;

    /// The host wrote into a slot of the arena what the kernels called from here on read.
    fn written(&mut self, rank: &Rank, place: &Place, index: u64) -> Result<(), GivenUp>;

    /// Calls kernels of a stage. CPU time that they took on this thread, nanoseconds.
    fn call(&mut self, rank: &Rank, local: usize, calls: &[Call], slots: Slots) -> Result<u64, GivenUp>;

    /// The loss of a micro-batch, whose forward pass was called last; none when it is not known yet.
    fn loss(&mut self, rank: &Rank, local: usize, mb: u64, place: &Place) -> Result<Option<f64>, GivenUp>;

    /// Takes the report of a stage. Where losses are not known yet, the engine puts them in.
    fn report(&mut self, local: usize, report: Report);
}

/// A rank's thread during a segment.
pub struct Worker<'a, E> {
    shared: Shared<'a>,
    rank: &'a mut Rank,
    pub engine: E,
    /// Updates made before this segment.
    updates_before: u64,
    doing: &'a Cell<Option<Doing>>,
}

impl<'a, E: Engine> Worker<'a, E> {
    pub fn new(
        shared: Shared<'a>,
        rank: &'a mut Rank,
        engine: E,
        updates_before: u64,
        doing: &'a Cell<Option<Doing>>,
    ) -> Self {
        rank.reset();
        Worker { shared, rank, engine, updates_before, doing }
    }

    /// Runs a segment of at most `updates` updates.
    ///
    /// # Errors
    /// [`GivenUp`] when the run has failed, here or on another rank.
    pub fn train(&mut self, updates: u64) -> Result<(), GivenUp> {
        let (manifest, control) = (self.shared.manifest, self.shared.control);
        for (op, stage, at) in manifest.program.streams[self.rank.id.index()].segment(updates) {
            if op == Op::F && stage.index() == 0 {
                control.before_first_forward(at);
            }
            if control.skips(op, at) {
                continue;
            }
            if control.failed() {
                return Err(GivenUp);
            }
            self.instruction(op, stage, at)?;
        }
        self.doing.set(None);
        Ok(())
    }

    /// Executes one instruction of training.
    ///
    /// # Errors
    /// As above.
    pub fn instruction(&mut self, op: Op, stage: StageId, at: u64) -> Result<(), GivenUp> {
        self.doing.set(Some(Doing { op, stage, at }));
        let local = self.local(stage);
        if let Some(ring) = Ring::of(op) {
            return self.transfer(local, ring, at);
        }
        match op {
            Op::F => self.forward(local, at),
            Op::B(a) => self.backward(local, a, at),
            Op::I => self.input_gradient(local, at),
            Op::W(a) => self.weight_gradient(local, a, at),
            Op::N => self.add_norm(local, at),
            Op::T => self.wait(local, Ring::RecvT, at).map(|_| ()),
            Op::U => self.update(local, at),
            _ => unreachable!("{op:?} hands over a slot of a ring"),
        }
    }

    /// Executes one instruction of an evaluation on a device, whose losses come later.
    ///
    /// # Errors
    /// As above.
    pub fn evaluation(&mut self, op: Op, stage: StageId, mb: u64) -> Result<(), GivenUp> {
        if op != Op::F {
            return self.instruction(op, stage, mb);
        }
        self.doing.set(Some(Doing { op, stage, at: mb }));
        let local = self.local(stage);
        if self.evaluate_forward(local, mb)? {
            self.loss(local, mb)?;
        }
        Ok(())
    }

    /// Runs the forward passes of `count` micro-batches and nothing else. The pipeline must be drained.
    /// The sum of the losses on the last stage's rank, 0 elsewhere.
    ///
    /// # Errors
    /// [`GivenUp`] when the run has failed.
    pub fn evaluate(&mut self, count: u64) -> Result<f64, GivenUp> {
        let mut loss = 0.0;
        for mb in 0..count {
            for local in 0..self.rank.stages.len() {
                let stage = self.stage(local);
                if stage.stage.index() == 0 {
                    self.shared.control.before_first_forward(mb);
                }
                if self.shared.control.skips(Op::F, mb) {
                    return Ok(loss);
                }
                self.doing.set(Some(Doing { op: Op::F, stage: stage.stage, at: mb }));
                if self.shared.manifest.program.border_before(stage.stage.index()).is_some() {
                    self.transfer(local, Ring::RecvF, mb)?;
                }
                if !self.evaluate_forward(local, mb)? {
                    return Ok(loss);
                }
                if stage.io.send_f.is_some() {
                    self.transfer(local, Ring::SendF, mb)?;
                }
                loss += self.loss(local, mb)?.unwrap_or(0.0);
            }
        }
        self.doing.set(None);
        Ok(loss)
    }

    /// The forward pass of held-out data: reads the newest weights, whatever training does. False: the segment ends before it.
    fn evaluate_forward(&mut self, local: usize, mb: u64) -> Result<bool, GivenUp> {
        let begun = self.begin_forward(local, mb, mb)?;
        if begun {
            let newest = self.rank.stages[local].version;
            let slots = Slots { microbatch: mb, seen: newest, newest, evaluates: true };
            self.engine.call(self.rank, local, &self.stage(local).bodies.f, slots)?;
        }
        Ok(begun)
    }

    fn forward(&mut self, local: usize, mb: u64) -> Result<(), GivenUp> {
        let stage = self.stage(local);
        let run_mb = self.updates_before * u64::from(self.shared.manifest.program.accumulate) + mb;
        if !self.begin_forward(local, mb, run_mb)? {
            return Ok(());
        }
        let newest = self.rank.stages[local].version;
        let wanted =
            versions::forward(self.policy(), run_mb / u64::from(self.shared.manifest.program.accumulate), newest);
        let seen = self.word(&stage.io.version, wanted);
        self.set_word(&stage.io.version_seen, mb, seen);
        self.run(local, Kind::F, &stage.bodies.f, Slots { microbatch: mb, seen, newest, evaluates: false })?;
        if let Some(loss) = self.loss(local, mb)? {
            let losses = &mut self.rank.stages[local].losses;
            let slot = mb as usize % losses.len();
            losses[slot] = loss;
        }
        Ok(())
    }

    /// Waits for a forward pass's input and for its output slot, and writes token ids (of `data_mb`). False: the segment ends before it.
    fn begin_forward(&mut self, local: usize, mb: u64, data_mb: u64) -> Result<bool, GivenUp> {
        if !self.wait(local, Ring::RecvF, mb)? {
            return Ok(false);
        }
        self.wait(local, Ring::SendF, mb)?;
        let io = &self.stage(local).io;
        for (place, shift) in [(io.tokens, 0), (io.targets, 1)] {
            if let Some(place) = place {
                self.shared.batches.fill(data_mb, shift, self.rank.arena.view_mut(&place, mb));
                self.engine.written(self.rank, &place, mb)?;
            }
        }
        Ok(true)
    }

    fn backward(&mut self, local: usize, a: Accumulation, mb: u64) -> Result<(), GivenUp> {
        self.wait(local, Ring::RecvB, mb)?;
        self.wait(local, Ring::SendB, mb)?;
        let slots = self.count_drift(local, mb);
        self.prepare_gradient(local, a, mb)?;
        let kind = if a.last { Kind::BLast } else { Kind::B };
        self.run(local, kind, &self.stage(local).bodies.b[variant(a)], slots)
    }

    fn input_gradient(&mut self, local: usize, mb: u64) -> Result<(), GivenUp> {
        self.wait(local, Ring::RecvB, mb)?;
        self.wait(local, Ring::SendB, mb)?;
        let slots = self.count_drift(local, mb);
        self.run(local, Kind::I, &self.stage(local).bodies.i, slots)
    }

    fn weight_gradient(&mut self, local: usize, a: Accumulation, mb: u64) -> Result<(), GivenUp> {
        self.prepare_gradient(local, a, mb)?;
        let kind = if a.last { Kind::WLast } else { Kind::W };
        let slots = Slots { microbatch: mb, newest: self.rank.stages[local].version, ..Slots::default() };
        self.run(local, kind, &self.stage(local).bodies.w[variant(a)], slots)
    }

    /// Compares the version that F of this micro-batch read with the one that the input gradient finds in the slot that it reads.
    fn count_drift(&mut self, local: usize, mb: u64) -> Slots {
        let io = &self.stage(local).io;
        let (seen, newest) = (self.word(&io.version_seen, mb), self.rank.stages[local].version);
        let reads = versions::backward(self.policy(), seen, newest);
        let drift = self.word(&io.version, reads) - versions::activations(self.policy(), seen, reads);
        let state = &mut self.rank.stages[local];
        state.drift_max = state.drift_max.max(drift);
        Slots { microbatch: mb, seen: reads, newest, evaluates: false }
    }

    fn policy(&self) -> Policy {
        self.shared.manifest.program.policy
    }

    /// Before a weight gradient: notes its version, and writes what the update in its kernels reads.
    fn prepare_gradient(&mut self, local: usize, a: Accumulation, mb: u64) -> Result<(), GivenUp> {
        let seen = self.word(&self.stage(local).io.version_seen, mb);
        self.rank.stages[local].contribute(seen);
        // What compensates each gradient reads a factor of it.
        let manifest = self.shared.manifest;
        if a.last || matches!(manifest.correction, Some(Correction::DelayCompensation { .. })) {
            return self.write_hyper(local, mb / u64::from(manifest.program.accumulate));
        }
        Ok(())
    }

    /// Adds the stage's gradients to the sum of squares; the first end of a tied table adds both ends' gradients before.
    fn add_norm(&mut self, local: usize, update: u64) -> Result<(), GivenUp> {
        self.wait(local, Ring::RecvN, update)?;
        if self.rank.stages[local].index == 0 {
            self.wait(local, Ring::RecvG, update)?;
            self.wait(local, Ring::SendG, update)?;
        }
        let slots = Slots { microbatch: update, newest: self.rank.stages[local].version, ..Slots::default() };
        self.run(local, Kind::N, &self.stage(local).bodies.n, slots)
    }

    fn update(&mut self, local: usize, update: u64) -> Result<(), GivenUp> {
        for ring in [Ring::RecvG, Ring::SendG, Ring::SendN, Ring::SendT] {
            self.wait(local, ring, update)?;
        }
        let stage = self.stage(local);
        self.write_hyper(local, update)?;
        let version = self.rank.stages[local].version;
        self.run(local, Kind::U, &stage.bodies.u, Slots { microbatch: update, newest: version, ..Slots::default() })?;
        self.set_word(&stage.io.version, version + 1, version + 1);
        let state = &mut self.rank.stages[local];
        state.version = version + 1;
        if let Some(oldest) = state.oldest.take() {
            state.delay_max = state.delay_max.max(version - oldest);
        }
        let report = Report {
            update: self.updates_before + update,
            of_segment: update,
            loss: stage.io.loss.map(|_| self.update_loss(local, update)),
            drift_max: self.rank.stages[local].drift_max,
            at: Instant::now(),
        };
        self.engine.report(local, report);
        Ok(())
    }

    /// Sum of an update's losses, in the order of its micro-batches.
    fn update_loss(&self, local: usize, update: u64) -> f64 {
        self.rank.stages[local].update_loss(update, self.shared.manifest.program.accumulate)
    }

    /// The loss that F left behind, on the last stage; none also when it is not known yet.
    fn loss(&mut self, local: usize, mb: u64) -> Result<Option<f64>, GivenUp> {
        match &self.stage(local).io.loss {
            Some(place) => self.engine.loss(self.rank, local, mb, place),
            None => Ok(None),
        }
    }

    fn write_hyper(&mut self, local: usize, update: u64) -> Result<(), GivenUp> {
        let m = self.shared.manifest;
        let stage = self.stage(local).stage.index();
        let of_run = self.updates_before + update;
        // A drain changes nothing that a double buffer reads.
        let since_empty = if self.policy() == Policy::DoubleBuffer { of_run } else { update };
        let terms = m.correction.as_ref().map_or(Terms::NONE, |c| Terms::of(c, stage, since_empty, of_run));
        let place = self.stage(local).io.hyper;
        let out = self.rank.arena.view_mut::<f32>(&place, 0);
        for (group, out) in m.groups.iter().zip(out.chunks_exact_mut(2 * HYPER_LEN)) {
            let vectors = hyper::vectors(&group.optimizer, &group.learning_rate, of_run, &terms);
            out[..HYPER_LEN].copy_from_slice(&vectors[0]);
            out[HYPER_LEN..].copy_from_slice(&vectors[1]);
        }
        self.engine.written(self.rank, &place, 0)
    }

    /// Runs a body and counts its time.
    fn run(&mut self, local: usize, kind: Kind, calls: &[Call], slots: Slots) -> Result<(), GivenUp> {
        let ns = self.engine.call(self.rank, local, calls, slots)?;
        self.rank.busy_ns += ns;
        self.rank.stages[local].times[kind as usize].add(ns);
        Ok(())
    }

    fn wait(&mut self, local: usize, ring: Ring, mb: u64) -> Result<bool, GivenUp> {
        self.engine.wait(self.rank, Transfer { local, ring, mb })
    }

    fn transfer(&mut self, local: usize, ring: Ring, mb: u64) -> Result<(), GivenUp> {
        self.engine.transfer(self.rank, Transfer { local, ring, mb })
    }

    /// Where a stage of this rank is among the rank's stages.
    fn local(&self, stage: StageId) -> usize {
        let found = self.rank.stages.iter().position(|s| s.index == stage.index());
        found.expect("a checked stream names only stages of its rank")
    }

    fn stage(&self, local: usize) -> &'a Stage {
        &self.shared.manifest.stages[self.rank.stages[local].index]
    }

    fn word(&self, place: &Place, index: u64) -> u64 {
        self.rank.arena.view::<u64>(place, index)[0]
    }

    fn set_word(&mut self, place: &Place, index: u64, value: u64) {
        self.rank.arena.view_mut::<u64>(place, index)[0] = value;
    }
}

impl Worker<'_, Enqueuer<'_>> {
    /// Enqueues transfers whose slots were handed over.
    ///
    /// # Errors
    /// [`GivenUp`] when the run has failed.
    pub fn exchange(&mut self, sides: &[Side]) -> Result<(), GivenUp> {
        self.engine.exchange(self.rank, sides)
    }

    /// Waits for the device. The sum of an evaluation's losses.
    ///
    /// # Errors
    /// As above.
    pub fn end_of_segment(&mut self) -> Result<f64, GivenUp> {
        let sum = self.engine.finish();
        self.rank.wait_ns += self.engine.wait_ns;
        sum
    }
}
