//! Why a run did not succeed.

use artifact::ids::{RankId, StageId};
use std::io;
use std::path::PathBuf;

/// Each message is one sentence: what failed, where, and what to do where that is not plain.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The request makes no sense.
    #[error("{0}")]
    Usage(String),
    #[error(transparent)]
    Bundle(#[from] artifact::bundle::BundleError),
    #[error("the bundle was compiled for `{wanted}`, which {lacks}; {}", compile_for(.here))]
    Cpu { wanted: String, lacks: String, here: Option<&'static str> },
    /// A driver, a GPU, NCCL, or memory that is missing.
    #[error("{0}")]
    Device(String),
    #[error("the emulator can't load the kernel `{kernel}`: {what}")]
    Emulator { kernel: String, what: String },
    #[error("rank {rank} needs {bytes} bytes of memory at once, and the system doesn't give them")]
    Memory { rank: RankId, bytes: u64 },
    #[error("can't map the code of stage {stage} as executable ({source})")]
    Map { stage: StageId, source: io::Error },
    /// Training or evaluation data.
    #[error("{}: {what}", .path.display())]
    Data { path: PathBuf, what: String },
    /// Too little data, over all files.
    #[error("{0}")]
    DataLength(String),
    /// A file of weights.
    #[error("weights {}: {what}", .path.display())]
    Weights { path: PathBuf, what: String },
    #[error("rank {rank} failed in {action}, and the others were stopped: {cause}")]
    Rank { rank: RankId, action: String, cause: String },
    /// Sentences: what each rank waited for.
    #[error("{0}; the run was stopped")]
    Waited(String),
    #[error(
        "the loss of update {update} is {loss}: training diverged; a lower learning rate or a longer warm-up may help"
    )]
    Diverged { update: u64, loss: f64 },
    /// The observer couldn't take a record, e.g. a full disk under the metrics.
    #[error("can't record {what} ({source})")]
    Observer { what: &'static str, source: io::Error },
}

fn compile_for(here: &Option<&'static str>) -> String {
    match here {
        Some(name) => format!("compile it with `--cpu {name}` for this machine"),
        None => "this machine belongs to no class that code is made for".into(),
    }
}

impl RunError {
    /// The process's exit status: 2 for a wrong request, 3 when something outside failed.
    pub fn exit_status(&self) -> u8 {
        if matches!(self, RunError::Usage(_)) { 2 } else { 3 }
    }
}
