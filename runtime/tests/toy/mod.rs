//! A toy pipeline that needs no compiler: kernels written in Rust, a manifest laid out by hand, streams of three schedules.
//!
//! The model: x[r][j] = token/VOCAB + j/8; LAYERS times y = x + x*w (w a vector of WIDTH); loss = sum of (y - target/VOCAB)^2 / 2.
//! Optimizer: SGD with momentum.

pub mod emulator;
mod kernels;
mod layout;
mod streams;

pub use kernels::table;
pub use layout::manifest;

use artifact::program::{LearningRate, Manifest};
use runtime::observe::{EvaluationRecord, UpdateRecord};
use runtime::{Kernels, Observer, On, RunError, RunOptions, Summary};
use std::io;
use std::path::{Path, PathBuf};

pub const LAYERS: usize = 4;
pub const WIDTH: usize = 5;
pub const MICROBATCH: usize = 2;
pub const CONTEXT: usize = 3;
pub const ROWS: usize = MICROBATCH * CONTEXT;
pub const VOCAB: u32 = 128;
/// Learning rate of the first updates: a cosine from `peak` after a linear warm-up.
pub const RATE: LearningRate = LearningRate::Cosine { peak: 0.05, warmup: 3, total: 8, floor: 0.01 };
pub const MOMENTUM: f64 = 0.9;
pub const DECAY: f64 = 0.01;

/// Order of a rank's instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schedule {
    Gpipe,
    Async,
    /// As `Async`, with the backward pass in two instructions.
    AsyncSplit,
}

/// What a toy pipeline is made from.
#[derive(Clone, Copy, Debug)]
pub struct Toy {
    pub schedule: Schedule,
    /// Divides [`LAYERS`].
    pub ranks: usize,
    pub accumulate: u32,
    pub boundary: Option<u64>,
}

pub fn toy(schedule: Schedule, ranks: usize, accumulate: u32) -> Toy {
    Toy { schedule, ranks, accumulate, boundary: None }
}

/// Records of a run.
#[derive(Clone, Debug, Default)]
pub struct Log {
    pub updates: Vec<UpdateRecord>,
    pub evaluations: Vec<EvaluationRecord>,
}

impl Observer for Log {
    fn update(&mut self, r: &UpdateRecord) -> io::Result<()> {
        self.updates.push(*r);
        Ok(())
    }
    fn evaluation(&mut self, r: &EvaluationRecord) -> io::Result<()> {
        self.evaluations.push(*r);
        Ok(())
    }
}

impl Log {
    pub fn losses(&self) -> Vec<f64> {
        self.updates.iter().map(|r| r.loss).collect()
    }
}

/// A directory with a text to train on.
pub struct Place {
    pub dir: tempfile::TempDir,
}

pub const TEXT: &str =
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness.";

impl Place {
    pub fn new() -> Place {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("text"), TEXT).unwrap();
        Place { dir }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn options(&self, updates: u64) -> RunOptions {
        RunOptions { updates, seed: 7, data: vec![self.path("text")], ..RunOptions::default() }
    }
}

pub fn kernels(manifest: &Manifest) -> Kernels {
    // SAFETY: the kernels follow the sizes that `layout` gives them.
    unsafe { Kernels::linked(vec![kernels::table(); manifest.stages.len()]) }
}

/// Kernels of which those that compute weight gradients on `stage` panic.
pub fn failing_kernels(manifest: &Manifest, stage: usize) -> Kernels {
    let mut tables = vec![kernels::table(); manifest.stages.len()];
    for kernel in kernels::GRADIENTS {
        tables[stage][kernel] = Some(kernels::fails);
    }
    // SAFETY: as above.
    unsafe { Kernels::linked(tables) }
}

pub fn try_run(toy: Toy, options: &RunOptions, observer: &mut dyn Observer) -> Result<Summary, RunError> {
    let manifest = manifest(toy);
    runtime::run_on(&manifest, On::Threads(&kernels(&manifest)), options, observer)
}

pub fn run(toy: Toy, options: &RunOptions) -> (Summary, Log) {
    let mut log = Log::default();
    let summary = try_run(toy, options, &mut log).unwrap();
    (summary, log)
}

/// The layers' weights in a saved file.
pub fn saved(path: &Path) -> Vec<Vec<f32>> {
    let bytes = std::fs::read(path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let layer = |l: usize| {
        let data = file.tensor(&format!("layer.{l}.w")).unwrap();
        data.data().as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect()
    };
    (0..LAYERS).map(layer).collect()
}
