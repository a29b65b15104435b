//! What a rank keeps over a whole run: its arena, and for each of its stages the counters, measured times and the tickets
//! of the slots in transfer.

use crate::arena::Arena;
use crate::clock::Samples;
use crate::error::RunError;
use crate::executor::Ring;
use crate::transport::local::Ticket;
use artifact::channel::performs;
use artifact::ids::RankId;
use artifact::program::{Manifest, Stage};
use artifact::stream::Program;

/// See the module's text.
#[derive(Debug)]
pub struct Rank {
    pub id: RankId,
    pub arena: Arena,
    /// The stages that live here, in stage order.
    pub stages: Vec<StageState>,
    /// CPU time in kernels during training.
    pub busy_ns: u64,
    /// Time blocked in waits for other ranks during training.
    pub wait_ns: u64,
}

/// Kinds of kernel bodies whose durations are kept apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    F,
    B,
    /// The backward pass with the fused update.
    BLast,
    I,
    W,
    WLast,
    U,
    N,
}

impl Kind {
    pub const COUNT: usize = 8;
}

/// See the module's text.
#[derive(Debug)]
pub struct StageState {
    /// Index into the manifest's stages.
    pub index: usize,
    /// Updates made: the newest version of the weights.
    pub version: u64,
    /// Largest version at B or I minus version at F.
    pub drift_max: u64,
    /// Largest version at U minus version at F.
    pub delay_max: u64,
    /// Oldest version that the update in progress has gradients from.
    pub oldest: Option<u64>,
    /// Losses of the micro-batches whose update is not made yet, by micro-batch modulo the length.
    pub losses: Vec<f64>,
    /// By [`Kind`].
    pub times: [Samples; Kind::COUNT],
    pub tickets: Tickets,
}

/// By ring, for each slot the ticket of its last transfer: the slot is free (or filled) when that is done. 0: none yet.
#[derive(Clone, Debug)]
pub struct Tickets([Vec<Ticket>; Ring::ALL.len()]);

impl Tickets {
    pub fn of(&mut self, ring: Ring) -> &mut Vec<Ticket> {
        &mut self.0[ring as usize]
    }

    fn new(index: usize, stage: &Stage, program: &Program) -> Self {
        Tickets(Ring::ALL.map(|ring| {
            let place = ring.place(stage).filter(|_| performs(program, ring.op(), index));
            vec![0; place.map_or(0, |p| p.slots as usize)]
        }))
    }

    fn reset(&mut self) {
        self.0.iter_mut().for_each(|ring| ring.fill(0));
    }
}

impl Rank {
    /// A rank with its arena, all zero.
    ///
    /// # Errors
    /// When the system doesn't have the memory.
    pub fn new(manifest: &Manifest, id: RankId) -> Result<Rank, RunError> {
        let bytes = manifest.memory[id.index()].total;
        let arena = Arena::new(bytes).ok_or(RunError::Memory { rank: id, bytes })?;
        let stages = manifest.stages.iter().enumerate().filter(|(_, s)| s.rank == id);
        let stages = stages.map(|(index, s)| StageState::new(index, s, &manifest.program)).collect();
        Ok(Rank { id, arena, stages, busy_ns: 0, wait_ns: 0 })
    }

    /// Before a segment: nothing is in transfer.
    pub fn reset(&mut self) {
        self.stages.iter_mut().for_each(|s| s.tickets.reset());
    }
}

impl StageState {
    fn new(index: usize, stage: &Stage, program: &Program) -> Self {
        // A micro-batch's loss is kept from F to U: those of one update, and those in flight beyond it.
        let losses = if stage.io.loss.is_some() { program.accumulate as usize + stage.rings.stash as usize } else { 0 };
        StageState {
            index,
            version: 0,
            drift_max: 0,
            delay_max: 0,
            oldest: None,
            losses: vec![0.0; losses],
            times: Default::default(),
            tickets: Tickets::new(index, stage, program),
        }
    }

    /// Sum of an update's losses, in the order of its micro-batches.
    pub fn update_loss(&self, update: u64, accumulate: u32) -> f64 {
        let k = u64::from(accumulate);
        (update * k..(update + 1) * k).map(|mb| self.losses[mb as usize % self.losses.len()]).sum()
    }

    /// A gradient from weights of version `seen` goes into the update in progress.
    pub fn contribute(&mut self, seen: u64) {
        self.oldest = Some(self.oldest.map_or(seen, |o| o.min(seen)));
    }
}
