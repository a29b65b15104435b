//! Which kernels of a bundle a library of matrix products computes instead: what was measured once, on one kind of GPU, and is kept from
//! then on, so that all runs of the bundle do the same.
//!
//! # The workspace
//!
//! A library's product may use memory. It is the end of the rank's arena, from the next multiple of [`ALIGN`] after all else, as large as the
//! largest that the rank's chosen algorithms ask for; nothing else ever lies there. It counts as workspace in the table of memory.

use crate::program::{Call, Manifest, Place};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Where a workspace begins: cuBLASLt asks for it.
pub const ALIGN: u64 = 256;

/// A library on a GPU: equal ones compute equal bits by equal algorithms.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// For people, e.g. `cuBLASLt`.
    pub library: String,
    /// As the library numbers it, e.g. 130002.
    pub version: u64,
    /// Its name.
    pub gpu: String,
    /// Compute capability, major and minor.
    pub capability: [u32; 2],
    pub multiprocessors: u32,
}

impl Identity {
    /// The library with its version as people write it: 130002 is 13.0.2.
    pub fn name(&self) -> String {
        let Identity { library, version: v, .. } = self;
        format!("{library} {}.{}.{}", v / 10_000, v / 100 % 100, v % 100)
    }

    /// The GPU in words.
    pub fn device(&self) -> String {
        let [major, minor] = self.capability;
        format!("{} (compute capability {major}.{minor}, {} multiprocessors)", self.gpu, self.multiprocessors)
    }
}

/// How a library computes a product: what it keeps for itself, and what of it can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Algorithm {
    /// The library's own description, which the same version understands: `cublasLtMatmulAlgo_t`.
    pub words: [u64; 8],
    pub workspace_bytes: u64,
    pub settings: Settings,
}

/// An algorithm's settings, in cuBLASLt's numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Settings {
    pub id: u32,
    pub tile: u32,
    pub stages: u32,
    pub split_k: u32,
    pub reduction: u32,
    pub swizzle: u32,
    pub custom: u32,
    pub inner_shape: u32,
    pub cluster_shape: u32,
}

impl fmt::Display for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Settings { id, tile, stages, split_k, reduction, swizzle, custom, inner_shape, cluster_shape } = self;
        write!(f, "algorithm {id}, tile {tile}, stages {stages}, split-k {split_k}, reduction {reduction}, ")?;
        write!(f, "swizzle {swizzle}, custom {custom}, inner shape {inner_shape}, cluster shape {cluster_shape}")
    }
}

/// What was measured of a kernel, and which way it is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Choice {
    /// Index into [`Manifest::kernels`].
    pub kernel: u32,
    /// Medians of one computation's time: by the kernel itself, and by the fastest of the library's algorithms whose results agree with it.
    pub own_ns: u64,
    pub library_ns: Option<u64>,
    /// Algorithms that the library offered and ran, and those of them that were refused for their results.
    pub offered: u32,
    pub refused: u32,
    /// That algorithm, where the library computes the product from now on.
    pub algorithm: Option<Algorithm>,
}

/// A rank's workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Workspace {
    /// Bytes of the arena without it.
    pub before: u64,
    pub bytes: u64,
}

impl Workspace {
    /// Where it begins.
    pub fn offset(&self) -> u64 {
        self.before.next_multiple_of(ALIGN)
    }

    /// Bytes of the arena with it; none where that is no number.
    pub fn total(&self) -> Option<u64> {
        if self.bytes == 0 {
            return Some(self.before);
        }
        self.before.checked_next_multiple_of(ALIGN)?.checked_add(self.bytes)
    }
}

/// See the module's text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tuning {
    /// What was measured, and what alone runs the bundle.
    pub on: Identity,
    /// By rank.
    pub workspaces: Vec<Workspace>,
    /// Of the kernels that were measured, ascending.
    pub choices: Vec<Choice>,
}

impl Tuning {
    /// The algorithm that computes a kernel's product in its place.
    pub fn algorithm(&self, kernel: u32) -> Option<&Algorithm> {
        let found = self.choices.binary_search_by_key(&kernel, |choice| choice.kernel).ok()?;
        self.choices[found].algorithm.as_ref()
    }
}

impl Manifest {
    /// The tuning, where a product is computed by the library: without one, a tuned bundle runs like any other.
    pub fn library(&self) -> Option<&Tuning> {
        self.tuning.as_ref().filter(|tuning| tuning.choices.iter().any(|choice| choice.algorithm.is_some()))
    }

    /// Takes a tuning away, and its workspaces.
    pub fn untune(&mut self) {
        let Some(tuning) = self.tuning.take() else { return };
        for (memory, workspace) in self.memory.iter_mut().zip(&tuning.workspaces) {
            memory.workspace -= memory.total - workspace.before;
            memory.total = workspace.before;
        }
    }

    /// Puts a tuning of these choices in, with the workspaces that they need. There is none yet.
    pub fn tune(&mut self, on: Identity, choices: Vec<Choice>) {
        let mut tuning = Tuning { on, workspaces: Vec::new(), choices };
        for rank in 0..self.memory.len() {
            let stages = self.stages.iter().filter(|s| s.rank.index() == rank);
            let used = stages.flat_map(|s| s.bodies.calls()).filter_map(|call| tuning.algorithm(call.kernel));
            let bytes = used.map(|algorithm| algorithm.workspace_bytes).max().unwrap_or(0);
            let workspace = Workspace { before: self.memory[rank].total, bytes };
            let total = workspace.total().unwrap_or(u64::MAX);
            self.memory[rank].workspace += total - workspace.before;
            self.memory[rank].total = total;
            tuning.workspaces.push(workspace);
        }
        self.tuning = Some(tuning);
    }

    /// Bytes of a rank's arena without a workspace.
    pub(crate) fn untuned_bytes(&self, rank: usize) -> u64 {
        let workspace = self.tuning.as_ref().and_then(|tuning| tuning.workspaces.get(rank));
        workspace.map_or(self.memory[rank].total, |workspace| workspace.before)
    }
}

/// Operands of a product's kernel are as large as it says.
pub(crate) fn operands(m: &Manifest, call: &Call) -> Result<(), String> {
    let Some((kernel, product)) = m.kernels.get(call.kernel as usize).and_then(|k| Some((k, k.product?))) else {
        return Ok(());
    };
    let (name, wanted) = (&kernel.name, product.operand_bytes());
    if [product.m, product.n, product.k].contains(&0) {
        return Err(format!("`{name}` is an empty product"));
    }
    if kernel.scratch_bytes > 0 || call.args.len() != wanted.len() {
        return Err(format!("`{name}` is a product of {} operands and is called with others", wanted.len()));
    }
    let small = |(place, bytes): &(&Place, &u64)| place.bytes < **bytes;
    match call.args.iter().zip(&wanted).find(small) {
        Some((place, bytes)) => {
            Err(format!("`{name}` is a product and gets {} bytes where it takes {bytes}", place.bytes))
        }
        None => Ok(()),
    }
}

/// A tuning is of products, and every workspace is where and as large as it must be.
pub(crate) fn check(m: &Manifest) -> Result<(), String> {
    let Some(tuning) = &m.tuning else { return Ok(()) };
    if !m.cpu.starts_with("cuda") {
        return Err(format!("it is tuned for a GPU, and the images are for {}", m.cpu));
    }
    if tuning.workspaces.len() != m.memory.len() {
        return Err(format!("it has {} workspaces for {} ranks", tuning.workspaces.len(), m.memory.len()));
    }
    for (rank, (workspace, memory)) in tuning.workspaces.iter().zip(&m.memory).enumerate() {
        let grown = memory.total.checked_sub(workspace.before);
        if workspace.total() != Some(memory.total) || grown.is_none_or(|grown| grown > memory.workspace) {
            return Err(format!("the workspace of rank {rank} is not the end of its arena"));
        }
    }
    if !tuning.choices.windows(2).all(|pair| pair[0].kernel < pair[1].kernel) {
        return Err("the kernels that it was tuned for are not in ascending order".into());
    }
    for choice in &tuning.choices {
        let known = m.kernels.get(choice.kernel as usize).is_some_and(|kernel| kernel.product.is_some());
        if !known {
            return Err(format!("it is tuned for kernel {}, which is no product", choice.kernel));
        }
    }
    for stage in &m.stages {
        let bytes = tuning.workspaces[stage.rank.index()].bytes;
        for call in stage.bodies.calls() {
            let needed = tuning.algorithm(call.kernel).map_or(0, |algorithm| algorithm.workspace_bytes);
            if needed > bytes {
                let (name, rank) = (&m.kernels[call.kernel as usize].name, stage.rank);
                return Err(format!("`{name}` needs a workspace of {needed} bytes, and rank {rank} has {bytes}"));
            }
        }
    }
    Ok(())
}
