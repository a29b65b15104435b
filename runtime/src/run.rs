//! A training run from start to end.

use crate::collect::Collector;
use crate::control::StopFlag;
use crate::data::{Batches, Data};
use crate::device::cuda::Cuda;
use crate::device::emulated::{Emulation, World};
use crate::device::pipeline::{DeviceOptions, Devices, Machine};
use crate::error::RunError;
use crate::map::Kernels;
use crate::member::{Counted, Member};
use crate::observe::{EvaluationRecord, Observer, RankSummary, StageSummary, StageTimes, Started, Summary};
use crate::rank::{Kind, Rank};
use crate::replay;
use crate::segment::{Pipeline, Place, cores};
use crate::weights::{self, Weights};
use crate::{cpu, init};
use artifact::bf16;
use artifact::bundle::{Bundle, check_manifest};
use artifact::ids::RankId;
use artifact::program::{Manifest, Stage};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// Keeps all counts of micro-batches and tokens within 64 bits.
const UPDATES_MAX: u64 = 1 << 30;

/// What to run, beside the bundle.
#[derive(Clone, Debug, Default)]
pub struct RunOptions {
    pub updates: u64,
    /// Of the initial weights and of the sampling.
    pub seed: u64,
    /// Files to train on. See [`crate::data`].
    pub data: Vec<PathBuf>,
    /// Files to evaluate on; or `holdout`, the fraction of `data` that is kept for it.
    pub eval: Vec<PathBuf>,
    pub holdout: Option<f64>,
    /// Evaluate on at most so many sequences (rounded down to micro-batches, at least one).
    pub eval_sequences_max: Option<u64>,
    /// Weights to start from, instead of fresh ones.
    pub load: Option<PathBuf>,
    /// Where to save the weights at the end.
    pub save: Option<PathBuf>,
    /// Raised by Ctrl-C, say.
    pub stop: StopFlag,
    /// Where the kernels run on devices.
    pub device: DeviceOptions,
    /// Where the run has several processes, each with one rank on a device: this one's part. Such a run is not stopped early but by its end.
    pub member: Option<Arc<Member>>,
}

/// What a run reads before it begins: everything about a request that can be wrong without the machine code.
pub struct Inputs {
    data: Data,
    /// Weights to start from.
    start: Option<Weights>,
}

impl Inputs {
    /// Reads data and weights, and asks whether there is a place for those to save.
    ///
    /// # Errors
    /// A number of updates that no run makes; a file that can't be read, or whose content doesn't fit the model.
    pub fn read(manifest: &Manifest, options: &RunOptions) -> Result<Inputs, RunError> {
        if !(1..=UPDATES_MAX).contains(&options.updates) {
            return Err(RunError::Usage(format!("a run makes 1 to {UPDATES_MAX} updates, not {}", options.updates)));
        }
        options.save.as_deref().map_or(Ok(()), weights::check_place)?;
        let data = Data::read(&options.data, &options.eval, options.holdout, manifest.data)?;
        let start = options.load.as_deref().map(|path| Weights::read(path, manifest)).transpose()?;
        Ok(Inputs { data, start })
    }
}

/// Trains a bundle's model on this machine. `inputs` were read for its manifest and the same options.
///
/// # Errors
/// See [`RunError`]; its `exit_status` is the process's.
pub fn run(
    bundle: &Bundle,
    inputs: &Inputs,
    options: &RunOptions,
    observer: &mut dyn Observer,
) -> Result<Summary, RunError> {
    bundle.check()?;
    if let Some(machine) = telling(options, machine(bundle, options))? {
        return execute(&bundle.manifest, On::Devices(&*machine), inputs, options, observer);
    }
    cpu::check(&bundle.manifest.cpu)?;
    let kernels = Kernels::map(bundle)?;
    execute(&bundle.manifest, On::Threads(&kernels), inputs, options, observer)
}

/// The devices that a checked bundle's kernels run on; none when that is this CPU.
///
/// # Errors
/// What of them is missing.
pub fn machine<'b>(bundle: &'b Bundle, options: &RunOptions) -> Result<Option<Box<dyn Machine + 'b>>, RunError> {
    if cpu::is_gpu(&bundle.manifest.cpu) {
        return Ok(Some(Box::new(Cuda::new(bundle, options.device.deadline, options.member.clone())?)));
    }
    if bundle.manifest.cpu != cpu::EMULATED {
        return Ok(None);
    }
    cpu::check(&bundle.manifest.cpu)?;
    let emulation = Emulation { seed: options.seed, ..Emulation::default() };
    Ok(Some(Box::new(World::new(&bundle.manifest, Arc::new(Kernels::map(bundle)?), emulation))))
}

/// The devices on which a checked bundle that is not tuned can be measured; none when its kernels run on a CPU.
///
/// # Errors
/// What of them is missing.
pub fn machine_to_tune<'b>(bundle: &'b Bundle, deadline: Duration) -> Result<Option<Box<dyn Machine + 'b>>, RunError> {
    if cpu::is_gpu(&bundle.manifest.cpu) {
        return Ok(Some(Box::new(Cuda::to_tune(bundle, deadline)?)));
    }
    machine(bundle, &RunOptions::default())
}

/// Where the kernels run.
#[derive(Clone, Copy)]
pub enum On<'a> {
    /// On the ranks' own threads.
    Threads(&'a Kernels),
    Devices(&'a dyn Machine),
}

/// As [`run`], where the caller says, and with inputs as the options say.
///
/// # Errors
/// See [`RunError`].
pub fn run_on(
    manifest: &Manifest,
    on: On<'_>,
    options: &RunOptions,
    observer: &mut dyn Observer,
) -> Result<Summary, RunError> {
    check_manifest(manifest)?;
    execute(manifest, on, &Inputs::read(manifest, options)?, options, observer)
}

fn execute(
    manifest: &Manifest,
    on: On<'_>,
    inputs: &Inputs,
    options: &RunOptions,
    observer: &mut dyn Observer,
) -> Result<Summary, RunError> {
    telling(options, execute_here(manifest, on, inputs, options, observer))
}

/// Tells the other processes why this one fails, if it does.
fn telling<T>(options: &RunOptions, done: Result<T, RunError>) -> Result<T, RunError> {
    if let (Err(error), Some(member)) = (&done, &options.member) {
        member.store.fail(&format!("rank {}: {error}", member.rank));
    }
    done
}

fn execute_here(
    manifest: &Manifest,
    on: On<'_>,
    inputs: &Inputs,
    options: &RunOptions,
    observer: &mut dyn Observer,
) -> Result<Summary, RunError> {
    let ids: Vec<RankId> = match &options.member {
        Some(member) => vec![member.rank],
        None => (0..manifest.memory.len() as u32).map(RankId).collect(),
    };
    let ranks = ranks(manifest, &ids, options.seed, inputs.start.as_ref())?;
    let place = match on {
        On::Threads(kernels) => Place::Threads(kernels),
        On::Devices(machine) => {
            Place::Devices(Devices::new(manifest, machine, &ranks, options.device, options.member.clone())?)
        }
    };
    let pipeline = Pipeline::new(manifest, place, ranks, &options.stop);
    let mut training = Training::new(pipeline, &inputs.data, options, observer);
    training.run()?;
    let mut summary = training.summary();
    let steps = inputs.start.as_ref().map_or(0, |w| w.step) + summary.updates;
    if options.save.is_some() {
        training.pipeline.fetch()?;
    }
    let others = match &options.member {
        Some(member) => training.gather(member, &mut summary)?,
        None => Vec::new(),
    };
    if let Some(path) = options.save.as_ref().filter(|_| training.reports) {
        let mut all: Vec<&Rank> = training.pipeline.ranks.iter().chain(&others).collect();
        all.sort_by_key(|rank| rank.id);
        weights::save(path, manifest, &all, steps)?;
    }
    if training.reports {
        training.observer.finished(&summary).map_err(recording("the summary"))?;
    }
    if let Some(member) = &options.member {
        let ranks = manifest.memory.len() as u32;
        member.meet("end", ranks)?;
        member.store.leave(ranks);
    }
    Ok(summary)
}

/// Ranks with their weights; each one's memory is touched first by a thread of its own.
fn ranks(manifest: &Manifest, ids: &[RankId], seed: u64, start: Option<&Weights>) -> Result<Vec<Rank>, RunError> {
    thread::scope(|scope| {
        let begin = |&id: &RankId| scope.spawn(move || rank(manifest, id, seed, start));
        let threads: Vec<_> = ids.iter().map(begin).collect();
        threads.into_iter().map(|t| t.join().expect("initialisation doesn't panic")).collect()
    })
}

fn rank(manifest: &Manifest, id: RankId, seed: u64, start: Option<&Weights>) -> Result<Rank, RunError> {
    let mut rank = Rank::new(manifest, id)?;
    for stage in manifest.stages.iter().filter(|s| s.rank == id) {
        for param in &stage.params {
            for (place, slot) in weights::filled_at_start(manifest, stage, param) {
                let out = rank.arena.view_mut::<f32>(&place, slot);
                match start {
                    Some(weights) => weights.copy(&param.name, out),
                    None => init::fill(seed, &param.name, param.init, out),
                }
            }
            if let Some(copy) = &param.copy {
                let rounded: Vec<u16> =
                    rank.arena.view::<f32>(&param.weight, 0).iter().map(|&w| bf16::round(w)).collect();
                rank.arena.view_mut::<u16>(copy, 0).copy_from_slice(&rounded);
            }
        }
    }
    Ok(rank)
}

fn recording(what: &'static str) -> impl Fn(std::io::Error) -> RunError {
    move |source| RunError::Observer { what, source }
}

/// A run in progress.
struct Training<'a> {
    pipeline: Pipeline<'a>,
    options: &'a RunOptions,
    observer: &'a mut dyn Observer,
    /// Whether the last stage is here, whose losses are the run's.
    reports: bool,
    train: Batches<'a>,
    /// Held-out data with the number of micro-batches to use.
    eval: Option<(Batches<'a>, u64)>,
    collector: Collector,
    started: Started,
    eval_losses: Vec<f64>,
}

impl<'a> Training<'a> {
    fn new(pipeline: Pipeline<'a>, data: &'a Data, options: &'a RunOptions, observer: &'a mut dyn Observer) -> Self {
        let manifest = pipeline.manifest;
        let shape = manifest.data;
        let train = Batches::sampled(&data.train, shape, options.seed);
        let eval = data.eval.as_ref().map(|tokens| {
            let batches = Batches::in_order(tokens, shape);
            let most = options.eval_sequences_max.map_or(u64::MAX, |s| (s / u64::from(shape.microbatch)).max(1));
            (batches, batches.count().min(most))
        });
        let tokens_per_microbatch = u64::from(shape.microbatch) * u64::from(shape.context);
        let weights = manifest.stages.iter().flat_map(Stage::own_params);
        let started = Started {
            updates: options.updates,
            tokens_per_update: tokens_per_microbatch * u64::from(manifest.program.accumulate),
            train_tokens: data.train.len(),
            eval_tokens: eval.map_or(0, |(_, count)| count * tokens_per_microbatch),
            ranks: manifest.memory.len(),
            parameters: weights.map(|p| p.weight.bytes / 4).sum(),
        };
        let here = || pipeline.ranks.iter().flat_map(|r| &r.stages);
        let reports = here().any(|state| state.index + 1 == manifest.stages.len());
        let collector = Collector::new(here().count(), started.tokens_per_update);
        Training { pipeline, options, observer, reports, train, eval, collector, started, eval_losses: Vec::new() }
    }

    /// Segments with evaluations between them, until all updates are made or the run is asked to stop.
    fn run(&mut self) -> Result<(), RunError> {
        if self.reports {
            self.observer.started(&self.started).map_err(recording("the start"))?;
        }
        self.evaluate()?;
        let segment = self.pipeline.manifest.boundary.unwrap_or(self.options.updates);
        while self.collector.done < self.options.updates && !self.options.stop.requested() {
            let before = self.collector.done;
            let updates = segment.min(self.options.updates - before);
            let (collector, observer, reports) = (&mut self.collector, &mut *self.observer, self.reports);
            let made = self.pipeline.train(self.train, before, updates, |report| {
                let Some(record) = collector.take(report).filter(|_| reports) else { return Ok(()) };
                observer.update(&record).map_err(recording("an update"))?;
                if record.loss.is_finite() {
                    Ok(())
                } else {
                    Err(RunError::Diverged { update: record.update, loss: record.loss })
                }
            })?;
            assert_eq!(self.collector.done - before, made, "every stage reports every update");
            self.evaluate()?;
        }
        Ok(())
    }

    /// A pass over the held-out data, if there is any and the run goes on.
    fn evaluate(&mut self) -> Result<(), RunError> {
        let Some((batches, count)) = self.eval else { return Ok(()) };
        let start = Instant::now();
        let loss = self.pipeline.evaluate(batches, count)?;
        let time = start.elapsed();
        self.collector.pause(time);
        let Some(eval_loss) = loss.filter(|_| self.reports) else { return Ok(()) };
        self.eval_losses.push(eval_loss);
        let (updates, eval_tokens) = (self.collector.done, self.started.eval_tokens);
        let record = EvaluationRecord { updates, eval_loss, eval_tokens, eval_s: time.as_secs_f64() };
        self.observer.evaluation(&record).map_err(recording("an evaluation"))
    }

    /// Puts what the other processes counted into the summary of the one that reports, and gives theirs to it. Their weights, if they are to be saved.
    fn gather(&self, member: &Member, summary: &mut Summary) -> Result<Vec<Rank>, RunError> {
        let (manifest, save) = (self.pipeline.manifest, self.options.save.is_some());
        let own = &self.pipeline.ranks[0];
        if !self.reports {
            let stages = own.stages.iter().map(|s| (s.index, summary.stages[s.index])).collect();
            member.give(manifest, &Counted { rank: summary.ranks[0], stages }, own, save)?;
            return Ok(Vec::new());
        }
        let (mut ranks, mut others) = (Vec::new(), Vec::new());
        for id in (0..manifest.memory.len() as u32).map(RankId) {
            if id == own.id {
                ranks.push(summary.ranks[0]);
                continue;
            }
            let counted = member.take(id)?;
            ranks.push(counted.rank);
            counted.stages.into_iter().for_each(|(index, stage)| summary.stages[index] = stage);
            if save {
                others.push(member.take_weights(manifest, id, self.collector.done)?);
            }
        }
        summary.ranks = ranks;
        Ok(others)
    }

    fn summary(&self) -> Summary {
        let training_s = self.collector.training().as_secs_f64();
        let tokens = self.collector.done * self.started.tokens_per_update;
        let stages = self.stages();
        let times: Option<Vec<StageTimes>> = stages.iter().map(|s| s.times).collect();
        Summary {
            updates: self.collector.done,
            tokens,
            elapsed_s: self.collector.elapsed().as_secs_f64(),
            tokens_per_s: tokens as f64 / training_s,
            loss: self.collector.last_loss,
            eval_loss_first: self.eval_losses.first().copied(),
            eval_loss_last: self.eval_losses.last().copied(),
            stopped: self.collector.done < self.options.updates,
            ranks: self.rank_summaries(times.as_deref(), training_s),
            stages,
            devices: self.pipeline.usage(),
        }
    }

    /// `times` by stage, where they were measured.
    fn rank_summaries(&self, times: Option<&[StageTimes]>, training_s: f64) -> Vec<RankSummary> {
        let manifest = self.pipeline.manifest;
        let replayed = times.map(|times| replay::bubbles(&manifest.program, times));
        let cores_suffice = self.pipeline.ranks.len() <= cores();
        let one = |(position, rank): (usize, &Rank)| {
            let i = rank.id.index();
            let busy_s = times.map(|_| rank.busy_ns as f64 * 1e-9);
            let busy = busy_s.filter(|_| cores_suffice);
            RankSummary {
                allocated_bytes: self.pipeline.allocated(position),
                computed_bytes: manifest.memory[i].total,
                busy_s,
                wait_s: rank.wait_ns as f64 * 1e-9,
                bubble_replayed: replayed.as_ref().map(|replayed| replayed[i]),
                bubble_measured: busy.map(|busy_s| (1.0 - busy_s / training_s).max(0.0)),
                bubble_predicted: manifest.proved.bubble[i],
            }
        };
        self.pipeline.ranks.iter().enumerate().map(one).collect()
    }

    fn stages(&self) -> Vec<StageSummary> {
        let proved = &self.pipeline.manifest.proved;
        let timed = self.pipeline.usage().is_none();
        let mut stages = vec![StageSummary::default(); self.pipeline.manifest.stages.len()];
        for state in self.pipeline.ranks.iter().flat_map(|r| &r.stages) {
            let ns = |kind: Kind| state.times[kind as usize].median_ns();
            stages[state.index] = StageSummary {
                drift_max_seen: state.drift_max,
                drift_max_proved: proved.drift_max[state.index],
                delay_max_seen: state.delay_max,
                delay_max_proved: proved.delay_max[state.index],
                times: timed.then(|| StageTimes {
                    f_ns: ns(Kind::F),
                    b_ns: ns(Kind::B),
                    b_last_ns: ns(Kind::BLast),
                    i_ns: ns(Kind::I),
                    w_ns: ns(Kind::W),
                    w_last_ns: ns(Kind::WLast),
                    u_ns: ns(Kind::U),
                    n_ns: ns(Kind::N),
                }),
            };
        }
        stages
    }
}
