//! What a compiled stage does when its rank meets an instruction: kernel calls over places in the rank's arena.

use crate::ids::{RankId, StageId};
pub use crate::optimizer::{Correction, HYPER_LEN, Optimizer, UpdateRule};
use crate::product::Product;
use crate::stream::{Program, RingSizes};
use crate::tuning::Tuning;
use serde::{Deserialize, Serialize};

/// Which slot of a ring an instruction means. What F of a micro-batch read is kept beside its stash.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Selector {
    /// That of its micro-batch.
    #[default]
    Microbatch,
    /// That of the version of the weights that its micro-batch reads, by the program's policy.
    Seen,
    /// That of the newest version of the weights: what an update reads.
    Newest,
    /// That of the version after it: what an update makes.
    Next,
    /// Slot 0: the weights beside a prediction of them.
    Here,
    /// Slot 1: the prediction; slot 0, the weights themselves, in an evaluation.
    Ahead,
}

impl Selector {
    /// As the levels of the lowering print it.
    pub fn name(self) -> &'static str {
        match self {
            Selector::Microbatch => "microbatch",
            Selector::Seen => "seen",
            Selector::Newest => "newest",
            Selector::Next => "next",
            Selector::Here => "here",
            Selector::Ahead => "ahead",
        }
    }

    /// Whether it is [`Selector::Microbatch`].
    pub fn is_microbatch(&self) -> bool {
        *self == Selector::Microbatch
    }
}

/// A buffer in the rank's arena, or one slot of a ring of equal buffers: slot `i` is at byte
/// `offset + (i mod slots) * stride`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Place {
    /// Bytes from the arena's start; a multiple of 64.
    pub offset: u64,
    /// Bytes of one slot's content.
    pub bytes: u64,
    /// Bytes from one slot to the next; a multiple of 64 (0 when there is one slot).
    pub stride: u64,
    /// At least 1.
    pub slots: u32,
    #[serde(default, skip_serializing_if = "Selector::is_microbatch")]
    pub by: Selector,
}

impl Place {
    /// Byte offset of the slot of micro-batch (or version) `index`.
    pub fn at(&self, index: u64) -> u64 {
        self.offset + (index % u64::from(self.slots)) * self.stride
    }

    /// The same buffer, its slot selected in another way.
    pub fn selected(self, by: Selector) -> Place {
        Place { by, ..self }
    }
}

/// One kernel call. The kernel gets a pointer to an array of pointers, one per argument, in order:
/// `extern "C" fn(*const *mut u8)`. The last argument is the scratch buffer when the kernel has one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    /// Index into [`Manifest::kernels`].
    pub kernel: u32,
    pub args: Vec<Place>,
}

/// The kernel calls of each instruction of a stage. The variants of B and W are indexed by [`variant`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bodies {
    pub f: Vec<Call>,
    pub b: [Vec<Call>; 4],
    pub i: Vec<Call>,
    pub w: [Vec<Call>; 4],
    /// What no weight-gradient kernel could take in.
    pub u: Vec<Call>,
    /// What a global norm sums up.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub n: Vec<Call>,
}

impl Bodies {
    /// Every kernel call.
    pub fn calls(&self) -> impl Iterator<Item = &Call> {
        self.f
            .iter()
            .chain(self.b.iter().flatten())
            .chain(&self.i)
            .chain(self.w.iter().flatten())
            .chain(&self.u)
            .chain(&self.n)
    }
}

/// Index of an accumulation's variant in [`Bodies`].
pub fn variant(a: crate::stream::Accumulation) -> usize {
    usize::from(a.first) + 2 * usize::from(a.last)
}

/// How a parameter starts. Random values are drawn by (seed, parameter name, element).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Init {
    Zeros,
    Ones,
    Normal { std: f64 },
}

/// A parameter of a stage. Row-major.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Param {
    /// Independent of the partition, e.g. `block.3.mlp.up.weight`.
    pub name: String,
    pub shape: Vec<u64>,
    pub init: Init,
    /// Index into [`Manifest::groups`].
    pub group: u32,
    /// Whether weight decay applies (parameters of two or more dimensions).
    pub decay: bool,
    /// f32. Ring `weights`, by version; where the rule predicts two slots, the weights and the prediction. There once where
    /// there is a copy, which then has the versions.
    pub weight: Place,
    /// The weight in bf16, rounded to nearest even: what matrix products read where they read bf16.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy: Option<Place>,
    /// Optimizer state, see [`UpdateRule::buffers`]; zero at the start, but for what the backward pass reads.
    pub state: Vec<Place>,
    /// Gradient accumulator; none when accumulate = 1 and the update is fused. An update that isn't may change it.
    pub gradient: Option<Place>,
    /// Of a tied table with two ends: the other end's gradient, which the update adds to `gradient`. Its accumulator where that end is on
    /// this rank, else where it is received: see [`crate::stream`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub other_end: Option<Place>,
    /// Why the update is not made by the kernel of the last weight gradient; none if it is. For people.
    pub unfused: Option<String>,
}

/// Buffers of a stage that the runtime itself reads or writes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageIo {
    /// First stage: u32 token ids `[microbatch, context]`, written before F. Ring `recv_f`.
    pub tokens: Option<Place>,
    /// Last stage: u32 target ids `[microbatch, context]`, written before F.
    pub targets: Option<Place>,
    /// Last stage: f64, the micro-batch's summed cross-entropy (nats), after F.
    pub loss: Option<Place>,
    /// Activations `[microbatch, context, width]`; absent at the ends.
    pub recv_f: Option<Place>,
    pub send_f: Option<Place>,
    pub recv_b: Option<Place>,
    pub send_b: Option<Place>,
    /// f64, of a global norm: the sum of the squares of this stage's gradients and of those before, received, added to and sent here. That of
    /// the stage before where it hands over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub norm: Option<Place>,
    /// f64: the sum of all stages. On the last stage that is `norm`; that of the next stage where this one hands over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total: Option<Place>,
    /// For each group two vectors of [`HYPER_LEN`] f32: for parameters with decay, then without. Written before the first kernel that updates.
    pub hyper: Place,
    /// u64 in ring `weights`: the version that lies in the slot, written by U.
    pub version: Place,
    /// u64 in ring `stash`: the version that F read. F stores it; B/I reads it and compares what it finds.
    pub version_seen: Place,
}

/// Learning-rate schedule, by 0-based update.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LearningRate {
    Constant {
        lr: f64,
    },
    /// Linear from `peak/warmup` to `peak` over `warmup` updates (update u: `peak*(u+1)/warmup`), then
    /// `floor + (peak-floor)*(1+cos(pi*(u-warmup)/(total-warmup)))/2`; `floor` after `total`.
    Cosine {
        peak: f64,
        warmup: u64,
        total: u64,
        floor: f64,
    },
    /// The same rise, then a straight fall to `floor` at update `total`.
    Linear {
        peak: f64,
        warmup: u64,
        total: u64,
        floor: f64,
    },
    /// Warm-up, stable, decay: the same rise, `peak`, and a straight fall over the last `decay` updates to `floor` at `total`.
    Wsd {
        peak: f64,
        warmup: u64,
        total: u64,
        decay: u64,
        floor: f64,
    },
}

impl LearningRate {
    /// Updates that the schedule is made for, if it ends.
    pub fn total(&self) -> Option<u64> {
        match *self {
            LearningRate::Constant { .. } => None,
            LearningRate::Cosine { total, .. }
            | LearningRate::Linear { total, .. }
            | LearningRate::Wsd { total, .. } => Some(total),
        }
    }
}

/// One compiled stage.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Stage {
    pub stage: StageId,
    pub rank: RankId,
    pub rings: RingSizes,
    pub params: Vec<Param>,
    pub io: StageIo,
    pub bodies: Bodies,
}

impl Stage {
    /// Its parameters, but for the copy of a tied table, which the first stage has too.
    pub fn own_params(&self) -> impl Iterator<Item = &Param> {
        let copy = |p: &Param| self.stage.0 > 0 && p.other_end.is_some();
        self.params.iter().filter(move |p| !copy(p))
    }
}

/// Bytes of a rank's arena by purpose; `total` is what the runtime allocates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    pub total: u64,
    pub weights: u64,
    pub optimizer: u64,
    pub gradients: u64,
    pub stash: u64,
    pub activations: u64,
    pub communication: u64,
    pub workspace: u64,
}

/// Element type of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Elem {
    F32,
    /// The upper half of an f32.
    Bf16,
    U32,
    F64,
}

impl Elem {
    pub fn bytes(self) -> u64 {
        match self {
            Elem::Bf16 => 2,
            Elem::F32 | Elem::U32 => 4,
            Elem::F64 => 8,
        }
    }
}

/// A kernel in the images: its name is its exported symbol.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelEntry {
    pub name: String,
    /// Bytes of scratch it may use; its last argument.
    pub scratch_bytes: u64,
    /// Number of arguments, scratch included.
    pub args: u32,
    /// On a GPU: what a call launches, in order. On a CPU a call is one function, and this is empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub launches: Vec<Launch>,
    /// On a GPU: what it computes, where that is a matrix product and nothing else.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub product: Option<Product>,
    /// On a GPU: elements of each argument but scratch.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub elements: Vec<Elem>,
    /// On a GPU: whether its products are those of tensor cores.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub tensor_cores: bool,
}

/// A function of a device image over a grid of blocks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Launch {
    pub entry: String,
    /// Blocks along x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block, along x: whole warps.
    pub threads: u32,
}

/// Shape of the data that a run reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataShape {
    /// Sequences per micro-batch.
    pub microbatch: u32,
    /// Tokens per sequence.
    pub context: u32,
    pub vocab: u32,
}

/// An optimizer and the parameters' share of it: see [`Param::group`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Group {
    pub optimizer: Optimizer,
    pub learning_rate: LearningRate,
}

/// Facts that the compiler proved, for the run's closing comparison.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Proved {
    /// By stage: largest drift and delay, in updates.
    pub drift_max: Vec<u64>,
    pub delay_max: Vec<u64>,
    /// By rank: bubble in steady state under the cost model, 0..1.
    pub bubble: Vec<f64>,
}

/// Everything but the machine code: the manifest of a bundle.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Spec file name and its text, as compiled (after --set).
    pub source_name: String,
    pub source: String,
    /// What the images are for: a CPU class such as `x86-64-v4`, or a GPU's chip such as `cuda:sm_90`.
    pub cpu: String,
    /// LLVM version that made the images.
    pub llvm: String,
    pub data: DataShape,
    /// How parameters are updated, by group; at least one.
    pub groups: Vec<Group>,
    /// How updates are corrected for their delay, if at all.
    pub correction: Option<Correction>,
    /// Drain and refill every this many updates (`pipeline.boundary`); none: only at the end.
    pub boundary: Option<u64>,
    pub program: Program,
    pub stages: Vec<Stage>,
    /// By rank.
    pub memory: Vec<Memory>,
    pub kernels: Vec<KernelEntry>,
    pub proved: Proved,
    /// Which kernels a library computes instead, where that was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tuning: Option<Tuning>,
}

impl Manifest {
    /// The rule of a group's updates on a stage; where they write depends on its versions.
    pub fn rule(&self, group: &Group, stage: StageId) -> UpdateRule {
        let kind = group.optimizer.kind();
        let correction = self.correction.as_ref().and_then(|c| c.kind(kind));
        let drift = self.correction.as_ref().is_some_and(|c| c.acts_on(stage.index()));
        UpdateRule { correction, ..UpdateRule::plain(kind) }.where_it_acts(drift)
    }

    /// Updates that the learning rates are made for, if one ends: the longest.
    pub fn updates_planned(&self) -> Option<u64> {
        self.groups.iter().filter_map(|g| g.learning_rate.total()).max()
    }
}

/// Code of one stage and where its kernels start: position-independent machine code, or one PTX module as text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    pub stage: StageId,
    /// Machine code is mapped read-execute as one block; 64-byte aligned sections.
    pub code: Vec<u8>,
    /// (index into [`Manifest::kernels`], byte offset in `code`), ascending.
    pub exports: Vec<(u32, u64)>,
    /// The same PTX as machine code of the bundle's chip, where an assembler was found.
    pub cubin: Option<Cubin>,
}

/// An ELF file for one GPU architecture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cubin {
    /// What assembled it, e.g. `ptxas 13.0.88`.
    pub assembler: String,
    pub code: Vec<u8>,
}
