//! One segment of a run: a thread per rank from a filled arena to a drained pipeline, and the reports that come meanwhile.

use crate::control::{Control, Failure, GivenUp, StopFlag};
use crate::data::Batches;
use crate::device::pipeline::{Devices, Usage};
use crate::error::RunError;
use crate::executor::{Doing, Engine, Report, Shared, Worker};
use crate::map::Kernels;
use crate::rank::Rank;
use crate::reports::Reports;
use crate::threads::Threads;
use crate::transport::local::Links;
use artifact::ids::RankId;
use artifact::program::Manifest;
use artifact::stream::Op;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

/// Looks at a transfer before a rank blocks, when every rank has a core: about 20 us.
const SPINS: u32 = 2000;

/// The pipeline between segments.
pub struct Pipeline<'a> {
    pub manifest: &'a Manifest,
    pub ranks: Vec<Rank>,
    place: Place<'a>,
    links: Links,
    stop: &'a StopFlag,
    spins: u32,
}

/// Where the kernels run.
pub enum Place<'a> {
    /// On the ranks' threads.
    Threads(&'a Kernels),
    /// On devices, which have the ranks' weights.
    Devices(Devices),
}

impl<'a> Pipeline<'a> {
    pub fn new(manifest: &'a Manifest, place: Place<'a>, ranks: Vec<Rank>, stop: &'a StopFlag) -> Self {
        let links = Links::new(&manifest.program);
        let spins = if ranks.len() <= cores() { SPINS } else { 0 };
        Pipeline { manifest, ranks, place, links, stop, spins }
    }

    /// Makes the ranks' arenas hold the newest weights.
    ///
    /// # Errors
    /// When a device does not give them.
    pub fn fetch(&mut self) -> Result<(), RunError> {
        match &mut self.place {
            Place::Devices(devices) => devices.fetch(self.manifest, &mut self.ranks),
            Place::Threads(_) => Ok(()),
        }
    }

    /// Bytes of the arena of the rank at a position among those here, as allocated.
    pub fn allocated(&self, position: usize) -> u64 {
        match &self.place {
            Place::Devices(devices) => devices.allocated(position),
            Place::Threads(_) => self.ranks[position].arena.bytes(),
        }
    }

    /// Graphs and parts so far; none without devices.
    pub fn usage(&self) -> Option<Usage> {
        match &self.place {
            Place::Devices(devices) => Some(devices.usage()),
            Place::Threads(_) => None,
        }
    }

    /// Trains for `updates` updates, or fewer when the run is asked to stop; gives the number made. `take` gets the
    /// reports in the order in which they come.
    ///
    /// # Errors
    /// A rank's failure, or the first error of `take`.
    pub fn train(
        &mut self,
        batches: Batches<'_>,
        updates_before: u64,
        updates: u64,
        mut take: impl FnMut(Report) -> Result<(), RunError>,
    ) -> Result<u64, RunError> {
        let k = u64::from(self.manifest.program.accumulate);
        let control = Control::new(updates * k, k, self.stop, &self.links);
        let (manifest, links, spins) = (self.manifest, &self.links, self.spins);
        let (shared, running) = (Shared { manifest, control: &control, batches }, &control);
        let reports = &Reports::new(self.ranks.len());
        let mut refused = None;
        let mut collect = || {
            while let Some(report) = reports.next() {
                if refused.is_none()
                    && let Err(error) = take(report)
                {
                    running.fail(Failure { rank: RankId(0), action: String::new(), cause: error.to_string() });
                    refused = Some(error);
                }
            }
        };
        match &mut self.place {
            Place::Devices(devices) => devices.train(shared, &mut self.ranks, updates_before, reports, collect),
            &mut Place::Threads(kernels) => thread::scope(|scope| {
                for rank in &mut self.ranks {
                    scope.spawn(move || {
                        // A failure is recorded in the control.
                        let engine = || Threads::new(manifest, kernels, links, running, Some(reports), spins);
                        let _ = guarded(shared, rank, engine, updates_before, |w| w.train(updates));
                        reports.close();
                    });
                }
                collect();
            }),
        }
        let made = control.limit() / k;
        self.end(refused, control.into_error())?;
        Ok(made)
    }

    /// Mean loss a token over the first `count` micro-batches; none when the run is asked to stop meanwhile.
    ///
    /// # Errors
    /// A rank's failure.
    pub fn evaluate(&mut self, batches: Batches<'_>, count: u64) -> Result<Option<f64>, RunError> {
        let control = Control::new(count, 1, self.stop, &self.links);
        let (manifest, links, spins) = (self.manifest, &self.links, self.spins);
        let (shared, running) = (Shared { manifest, control: &control, batches }, &control);
        let loss: f64 = match &mut self.place {
            Place::Devices(devices) => devices.evaluate(shared, &mut self.ranks),
            &mut Place::Threads(kernels) => thread::scope(|scope| {
                let engine = move || Threads::new(manifest, kernels, links, running, None, spins);
                let evaluate = |rank| scope.spawn(move || guarded(shared, rank, engine, 0, move |w| w.evaluate(count)));
                let threads: Vec<_> = self.ranks.iter_mut().map(evaluate).collect();
                let losses = threads.into_iter().map(|t| t.join().expect("a rank's thread catches its panics"));
                losses.map(|l| l.unwrap_or(0.0)).sum()
            }),
        };
        let whole = control.limit() == count;
        self.end(None, control.into_error())?;
        let d = self.manifest.data;
        let tokens = count * u64::from(d.microbatch) * u64::from(d.context);
        Ok(whole.then(|| loss / tokens as f64))
    }

    /// After the ranks' threads are gone.
    fn end(&mut self, refused: Option<RunError>, failure: Option<RunError>) -> Result<(), RunError> {
        let clean = self.links.reset();
        if let Some(error) = refused.or(failure) {
            return Err(error);
        }
        assert!(clean, "a drained pipeline has sent nothing that was not received");
        Ok(())
    }
}

/// Cores that this process may use.
pub fn cores() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// Runs a rank's thread; should it panic, the run fails with its cause instead of hanging the other ranks.
pub fn guarded<T, E: Engine>(
    shared: Shared<'_>,
    rank: &mut Rank,
    engine: impl FnOnce() -> E,
    updates_before: u64,
    work: impl FnOnce(&mut Worker<'_, E>) -> Result<T, GivenUp>,
) -> Result<T, GivenUp> {
    let (id, doing) = (rank.id, Cell::new(None));
    let run = || work(&mut Worker::new(shared, rank, engine(), updates_before, &doing));
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let cause = text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("unknown").to_string();
        let action = doing.get().map_or("its start".into(), describe);
        shared.control.fail(Failure { rank: id, action, cause });
        Err(GivenUp)
    })
}

fn describe(Doing { op, stage, at }: Doing) -> String {
    let name = match op {
        Op::F => "the forward pass",
        Op::B(_) => "the backward pass",
        Op::I => "the input gradient",
        Op::W(_) => "the weight gradient",
        Op::U => return format!("update {at} of stage {stage}"),
        Op::SendF | Op::SendB => "sending",
        Op::RecvF | Op::RecvB => "receiving",
        Op::N => return format!("the squares of the gradients of update {at} on stage {stage}"),
        Op::T | Op::SendN | Op::RecvN | Op::SendT | Op::RecvT => {
            return format!("the exchange of the norm of update {at} on stage {stage}");
        }
        Op::SendG | Op::RecvG => {
            return format!("the exchange of the tied table's gradient of update {at} on stage {stage}");
        }
    };
    format!("{name} of micro-batch {at} on stage {stage}")
}
