//! The loop over a rank's instructions.
//!
//! It knows no schedule: it takes the stream's instructions one by one, waits for the transfers that an instruction needs,
//! and calls the kernels of its body. Versions are counted here, from words beside the weights, not from the plan.

use crate::clock::thread_ns;
use crate::control::{Control, GivenUp};
use crate::data::Batches;
use crate::hyper::{self, Terms};
use crate::map::Kernels;
use crate::rank::{Kind, Rank};
use crate::reports::Reports;
use crate::transport::local::{Channel, End, Links, Ticket};
use crate::versions::{self, Slots};
use artifact::ids::StageId;
use artifact::program::{Call, HYPER_LEN, Manifest, Place, Stage, variant};
use artifact::stream::{Accumulation, Op, Policy};
use std::cell::Cell;
use std::time::Instant;

/// A stage finished an update.
#[derive(Clone, Copy, Debug)]
pub struct Report {
    /// Counted from the run's start.
    pub update: u64,
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
    pub kernels: &'a Kernels,
    pub links: &'a Links,
    pub control: &'a Control<'a>,
    pub batches: Batches<'a>,
    /// How often a wait looks again before it blocks.
    pub spins: u32,
}

/// Which transfers of a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ring {
    RecvF,
    SendF,
    RecvB,
    SendB,
}

/// A rank's thread during a segment.
pub struct Worker<'a> {
    shared: Shared<'a>,
    rank: &'a mut Rank,
    /// Updates made before this segment.
    updates_before: u64,
    doing: &'a Cell<Option<Doing>>,
    /// The addresses that a kernel call gets.
    args: Vec<*mut u8>,
}

impl<'a> Worker<'a> {
    pub fn new(shared: Shared<'a>, rank: &'a mut Rank, updates_before: u64, doing: &'a Cell<Option<Doing>>) -> Self {
        rank.reset();
        let args_max = shared.manifest.kernels.iter().map(|k| k.args as usize).max().unwrap_or(0);
        Worker { shared, rank, updates_before, doing, args: vec![std::ptr::null_mut(); args_max] }
    }

    /// Runs a segment of at most `updates` updates.
    ///
    /// # Errors
    /// [`GivenUp`] when the run has failed, here or on another rank.
    pub fn train(&mut self, updates: u64, reports: &Reports) -> Result<(), GivenUp> {
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
            self.doing.set(Some(Doing { op, stage, at }));
            let local = self.local(stage);
            match op {
                Op::RecvF => self.post(local, Ring::RecvF, at)?,
                Op::RecvB => self.post(local, Ring::RecvB, at)?,
                Op::SendF => self.offer(local, Ring::SendF, at)?,
                Op::SendB => self.offer(local, Ring::SendB, at)?,
                Op::F => self.forward(local, at)?,
                Op::B(a) => self.backward(local, a, at)?,
                Op::I => self.input_gradient(local, at)?,
                Op::W(a) => self.weight_gradient(local, a, at),
                Op::U => self.update(local, at, reports),
            }
        }
        self.doing.set(None);
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
                    self.post(local, Ring::RecvF, mb)?;
                }
                if !self.begin_forward(local, mb, mb)? {
                    return Ok(loss);
                }
                // Evaluation reads the newest weights, whatever training does.
                let newest = self.rank.stages[local].version;
                self.call(local, &stage.bodies.f, Slots { microbatch: mb, seen: newest, newest, ahead: false });
                if stage.io.send_f.is_some() {
                    self.offer(local, Ring::SendF, mb)?;
                }
                loss += self.loss(local, mb).unwrap_or(0.0);
            }
        }
        self.doing.set(None);
        Ok(loss)
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
        self.run(local, Kind::F, &stage.bodies.f, Slots { microbatch: mb, seen, newest, ahead: true });
        if let Some(loss) = self.loss(local, mb) {
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
            }
        }
        Ok(true)
    }

    fn backward(&mut self, local: usize, a: Accumulation, mb: u64) -> Result<(), GivenUp> {
        self.wait(local, Ring::RecvB, mb)?;
        self.wait(local, Ring::SendB, mb)?;
        let slots = self.count_drift(local, mb);
        self.prepare_gradient(local, a, mb);
        let kind = if a.last { Kind::BLast } else { Kind::B };
        self.run(local, kind, &self.stage(local).bodies.b[variant(a)], slots);
        Ok(())
    }

    fn input_gradient(&mut self, local: usize, mb: u64) -> Result<(), GivenUp> {
        self.wait(local, Ring::RecvB, mb)?;
        self.wait(local, Ring::SendB, mb)?;
        let slots = self.count_drift(local, mb);
        self.run(local, Kind::I, &self.stage(local).bodies.i, slots);
        Ok(())
    }

    fn weight_gradient(&mut self, local: usize, a: Accumulation, mb: u64) {
        self.prepare_gradient(local, a, mb);
        let kind = if a.last { Kind::WLast } else { Kind::W };
        let slots = Slots { microbatch: mb, newest: self.rank.stages[local].version, ..Slots::default() };
        self.run(local, kind, &self.stage(local).bodies.w[variant(a)], slots);
    }

    /// Compares the version that F of this micro-batch read with the one that the input gradient finds in the slot that it reads.
    fn count_drift(&mut self, local: usize, mb: u64) -> Slots {
        let io = &self.stage(local).io;
        let (seen, newest) = (self.word(&io.version_seen, mb), self.rank.stages[local].version);
        let reads = versions::backward(self.policy(), seen, newest);
        let drift = self.word(&io.version, reads) - versions::activations(self.policy(), seen, reads);
        let state = &mut self.rank.stages[local];
        state.drift_max = state.drift_max.max(drift);
        Slots { microbatch: mb, seen: reads, newest, ahead: false }
    }

    fn policy(&self) -> Policy {
        self.shared.manifest.program.policy
    }

    /// Before a weight gradient: notes its version, and writes what the update in its kernels reads.
    fn prepare_gradient(&mut self, local: usize, a: Accumulation, mb: u64) {
        let seen = self.word(&self.stage(local).io.version_seen, mb);
        self.rank.stages[local].contribute(seen);
        if a.last {
            self.write_hyper(local, mb / u64::from(self.shared.manifest.program.accumulate));
        }
    }

    fn update(&mut self, local: usize, update: u64, reports: &Reports) {
        let stage = self.stage(local);
        self.write_hyper(local, update);
        let version = self.rank.stages[local].version;
        self.run(local, Kind::U, &stage.bodies.u, Slots { microbatch: update, newest: version, ..Slots::default() });
        self.set_word(&stage.io.version, version + 1, version + 1);
        let state = &mut self.rank.stages[local];
        state.version = version + 1;
        if let Some(oldest) = state.oldest.take() {
            state.delay_max = state.delay_max.max(version - oldest);
        }
        let report = Report {
            update: self.updates_before + update,
            loss: stage.io.loss.map(|_| self.update_loss(local, update)),
            drift_max: self.rank.stages[local].drift_max,
            at: Instant::now(),
        };
        reports.send(report);
    }

    /// Sum of an update's losses, in the order of its micro-batches.
    fn update_loss(&self, local: usize, update: u64) -> f64 {
        let losses = &self.rank.stages[local].losses;
        let k = u64::from(self.shared.manifest.program.accumulate);
        (update * k..(update + 1) * k).map(|mb| losses[mb as usize % losses.len()]).sum()
    }

    /// The loss that F left behind, on the last stage.
    fn loss(&self, local: usize, mb: u64) -> Option<f64> {
        self.stage(local).io.loss.map(|place| self.rank.arena.view::<f64>(&place, mb)[0])
    }

    fn write_hyper(&mut self, local: usize, update: u64) {
        let m = self.shared.manifest;
        let stage = self.stage(local).stage.index();
        let of_run = self.updates_before + update;
        let terms = m.correction.as_ref().map_or(Terms::NONE, |c| Terms::of(c, stage, update, of_run));
        let place = self.stage(local).io.hyper;
        let out = self.rank.arena.view_mut::<f32>(&place, 0);
        for (group, out) in m.groups.iter().zip(out.chunks_exact_mut(2 * HYPER_LEN)) {
            let vectors = hyper::vectors(&group.optimizer, &group.learning_rate, of_run, &terms);
            out[..HYPER_LEN].copy_from_slice(&vectors[0]);
            out[HYPER_LEN..].copy_from_slice(&vectors[1]);
        }
    }

    /// Runs a body and counts its time.
    fn run(&mut self, local: usize, kind: Kind, calls: &[Call], slots: Slots) {
        let start_ns = thread_ns();
        self.call(local, calls, slots);
        let ns = thread_ns() - start_ns;
        self.rank.busy_ns += ns;
        self.rank.stages[local].times[kind as usize].add(ns);
    }

    fn call(&mut self, local: usize, calls: &[Call], slots: Slots) {
        let index = self.rank.stages[local].index;
        for call in calls {
            for (address, place) in self.args.iter_mut().zip(&call.args) {
                *address = self.rank.arena.address(place, slots.index(place.by));
            }
            self.shared.kernels.call(index, call.kernel, &self.args[..call.args.len()], &call.args);
        }
    }

    /// Waits until a slot's transfer is done. False: the segment now ends before this micro-batch.
    fn wait(&mut self, local: usize, ring: Ring, mb: u64) -> Result<bool, GivenUp> {
        let tickets = self.tickets(local, ring);
        let Some(&ticket) = tickets.get(mb as usize % tickets.len().max(1)) else { return Ok(true) };
        let Some(channel) = self.channel(local, ring) else { return Ok(true) };
        if channel.is_done(ticket) {
            return Ok(true);
        }
        let (control, start) = (self.shared.control, Instant::now());
        let done = channel.wait(ticket, self.shared.spins, || control.failed() || control.limit() <= mb);
        self.rank.wait_ns += start.elapsed().as_nanos() as u64;
        if control.failed() { Err(GivenUp) } else { Ok(done) }
    }

    fn post(&mut self, local: usize, ring: Ring, mb: u64) -> Result<(), GivenUp> {
        self.transfer(local, ring, mb, Channel::post)
    }

    fn offer(&mut self, local: usize, ring: Ring, mb: u64) -> Result<(), GivenUp> {
        self.transfer(local, ring, mb, Channel::offer)
    }

    fn transfer(
        &mut self,
        local: usize,
        ring: Ring,
        mb: u64,
        act: fn(&Channel, End) -> Result<Ticket, String>,
    ) -> Result<(), GivenUp> {
        let io = &self.stage(local).io;
        let place = match ring {
            Ring::RecvF => io.recv_f,
            Ring::SendF => io.send_f,
            Ring::RecvB => io.recv_b,
            Ring::SendB => io.send_b,
        };
        let place = place.expect("a verified stream has transfers only where there are slots");
        let channel = self.channel(local, ring).expect("a slot for transfers has a stage at the other end");
        let end = End { mb, slot: self.rank.arena.slot(&place, mb) };
        let ticket = act(channel, end).unwrap_or_else(|mismatch| panic!("{mismatch}"));
        let tickets = self.tickets(local, ring);
        let slot = mb as usize % tickets.len();
        tickets[slot] = ticket;
        if self.shared.control.failed() { Err(GivenUp) } else { Ok(()) }
    }

    fn tickets(&mut self, local: usize, ring: Ring) -> &mut Vec<Ticket> {
        let tickets = &mut self.rank.stages[local].tickets;
        match ring {
            Ring::RecvF => &mut tickets.recv_f,
            Ring::SendF => &mut tickets.send_f,
            Ring::RecvB => &mut tickets.recv_b,
            Ring::SendB => &mut tickets.send_b,
        }
    }

    /// The channel that a ring of a stage is an end of.
    fn channel(&self, local: usize, ring: Ring) -> Option<&'a Channel> {
        let (links, stage) = (self.shared.links, self.rank.stages[local].index);
        match ring {
            Ring::RecvF => links.forward.get(stage.checked_sub(1)?),
            Ring::SendF => links.forward.get(stage),
            Ring::RecvB => links.backward.get(stage),
            Ring::SendB => links.backward.get(stage.checked_sub(1)?),
        }
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
