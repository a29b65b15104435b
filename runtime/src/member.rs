//! A run of several processes, a rank in each: what one of them needs of the others beside transfers.
//!
//! The process with the last stage knows the losses, so it is the one that reports, compares and saves. The others give it what they counted, and
//! their weights if they are to be saved; nobody ends before all have.

use crate::error::RunError;
use crate::observe::{RankSummary, StageSummary};
use crate::rank::Rank;
use crate::store::Store;
use crate::weights;
use artifact::ids::RankId;
use artifact::program::Manifest;
use serde::{Deserialize, Serialize};

/// This process's part in the run.
#[derive(Debug)]
pub struct Member {
    pub rank: RankId,
    /// Its number among the processes of this machine.
    pub local: u32,
    pub store: Store,
}

/// What a rank counted.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Counted {
    pub rank: RankSummary,
    /// By index into the manifest's stages.
    pub stages: Vec<(usize, StageSummary)>,
}

fn lost(what: String) -> RunError {
    RunError::Waited(what)
}

impl Member {
    /// Gives the reporting process what this one counted, and its newest weights if they are wanted.
    ///
    /// # Errors
    /// When the run has failed elsewhere.
    pub fn give(&self, manifest: &Manifest, counted: &Counted, rank: &Rank, save: bool) -> Result<(), RunError> {
        if save {
            for state in &rank.stages {
                let stage = &manifest.stages[state.index];
                for param in &stage.params {
                    let bytes: &[u8] = rank.arena.view(&param.weight, weights::slot(stage, state.version));
                    self.store.put(&weight(&param.name), bytes).map_err(lost)?;
                }
            }
        }
        let text = serde_json::to_vec(counted).expect("numbers and lists only");
        self.store.put(&counts(self.rank), &text).map_err(lost)
    }

    /// What another rank counted.
    ///
    /// # Errors
    /// As above.
    pub fn take(&self, rank: RankId) -> Result<Counted, RunError> {
        let text = self.store.get(&counts(rank)).map_err(lost)?;
        serde_json::from_slice(&text).map_err(|e| lost(format!("what rank {rank} counted can't be read ({e})")))
    }

    /// Another rank with its newest weights, after so many updates; the rest of it is empty.
    ///
    /// # Errors
    /// As above, or when there is no memory.
    pub fn take_weights(&self, manifest: &Manifest, id: RankId, updates: u64) -> Result<Rank, RunError> {
        let mut rank = Rank::new(manifest, id)?;
        for state in &mut rank.stages {
            state.version = updates;
            let stage = &manifest.stages[state.index];
            for param in &stage.params {
                let bytes = self.store.get(&weight(&param.name)).map_err(lost)?;
                let out: &mut [u8] = rank.arena.view_mut(&param.weight, weights::slot(stage, updates));
                if bytes.len() != out.len() {
                    return Err(lost(format!("rank {id} has another bundle: `{}` has another size", param.name)));
                }
                out.copy_from_slice(&bytes);
            }
        }
        Ok(rank)
    }

    /// Waits until all ranks have come here.
    ///
    /// # Errors
    /// As above.
    pub fn meet(&self, place: &str, ranks: u32) -> Result<(), RunError> {
        self.store.put(&format!("{place}/{}", self.rank), &[]).map_err(lost)?;
        (0..ranks).try_for_each(|rank| self.store.get(&format!("{place}/{rank}")).map(|_| ()).map_err(lost))
    }
}

fn counts(rank: RankId) -> String {
    format!("counted/{rank}")
}

fn weight(name: &str) -> String {
    format!("weight/{name}")
}
