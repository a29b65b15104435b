//! A resolved specification: names looked up, units converted, defaults filled in. Spans point to where a value was
//! written (an empty span at the block's start where it is a default).

use crate::diag::Span;
use crate::schedule::Schedule;

/// A value and where it was written.
#[derive(Clone, Debug, PartialEq)]
pub struct At<T> {
    pub value: T,
    pub span: Span,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Spec {
    /// None: analysed in units of micro-batches with the costs of `machine`.
    pub model: Option<Model>,
    pub machine: Machine,
    pub pipeline: Pipeline,
    pub staleness: Staleness,
    pub optimizer: At<Optimizer>,
    pub learning_rate: At<LearningRate>,
    /// Parameters with an optimizer of their own: each takes what it selects and no group before it took. The rest is `optimizer`'s.
    pub groups: Vec<Group>,
    /// Bound on the norm of gradients.
    pub clip: Option<At<Clip>>,
    pub require: Require,
    /// The schedule that `pipeline.schedule` names.
    pub schedule: Schedule,
}

impl Spec {
    /// Number of stages of the model (S): with `place linear` one for each rank.
    pub fn stages(&self) -> u32 {
        let place = self.schedule.place;
        self.machine.ranks.value * place.chunks(self.pipeline.chunks.value) / place.copies()
    }

    /// The keys with which this spec can be analysed only, with their places; empty for what can be compiled.
    pub fn analysis_only(&self) -> Vec<At<&'static str>> {
        let device = self.machine.device.as_ref().map(|device| At { value: "device", span: device.span.clone() });
        let copies = (self.schedule.place.copies() > 1)
            .then(|| At { value: "schedule", span: self.pipeline.schedule.span.clone() });
        self.model.iter().flat_map(|model| model.analysis_only.iter().cloned()).chain(device).chain(copies).collect()
    }
}

/// `model gpt { … }`: the reference GPT in f32 or bf16, or a variant of it that is analysed and not run.
#[derive(Clone, Debug, PartialEq)]
pub struct Model {
    pub layers: At<u32>,
    pub width: At<u32>,
    pub heads: At<u32>,
    pub context: At<u32>,
    pub vocab: At<u32>,
    pub variant: Variant,
    /// Where its element type stands; the whole model where nothing says it.
    pub dtype_span: Span,
    /// The keys that make it differ from the reference GPT in more than its element type, in the order of [`Variant`].
    pub analysis_only: Vec<At<&'static str>>,
    pub span: Span,
}

impl Model {
    /// The reference GPT of the given layers, width, heads, context and vocabulary.
    pub fn reference([layers, width, heads, context, vocab]: [At<u32>; 5], span: Span) -> Model {
        let variant = Variant::reference(width.value, heads.value);
        let dtype_span = span.clone();
        Model { layers, width, heads, context, vocab, variant, dtype_span, analysis_only: Vec::new(), span }
    }
}

pub use variant::{Attention, Device, Dtype, Mlp, Norm, Position, Products, Recompute, Variant};

mod variant;

/// Bounds in bytes on each rank's memory: one for all ranks, or one for each; never none.
#[derive(Clone, Debug, PartialEq)]
pub struct Limits(Vec<At<u64>>);

impl Limits {
    /// None if the list is empty.
    pub fn new(bytes: Vec<At<u64>>) -> Option<Limits> {
        (!bytes.is_empty()).then_some(Limits(bytes))
    }

    /// The bound on a rank.
    pub fn of(&self, rank: usize) -> &At<u64> {
        self.0.get(rank).unwrap_or_else(|| self.0.last().expect("there is one"))
    }

    /// Whether ranks have bounds of their own.
    pub fn by_rank(&self) -> bool {
        self.0.len() > 1
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Machine {
    /// P.
    pub ranks: At<u32>,
    /// Hardware that is not here; none: this machine's CPU.
    pub device: Option<Device>,
    /// Memory of one rank, bytes.
    pub memory: Option<Limits>,
    pub cost: Option<At<Cost>>,
    /// Times by stage are those of all stages of a rank together: each takes its part.
    pub cost_of_ranks: bool,
}

/// Where the times of F, I and W come from.
#[derive(Clone, Debug, PartialEq)]
pub enum Cost {
    Stages(Costs),
    Layers(LayerCosts),
    /// Path of a CSV file, from the folder of the spec.
    Profile(String),
}

/// Times of one layer on one micro-batch, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    pub f_ns: u64,
    pub i_ns: u64,
    pub w_ns: u64,
}

impl Times {
    pub fn total_ns(&self) -> u64 {
        self.f_ns.saturating_add(self.i_ns).saturating_add(self.w_ns)
    }
}

/// Times by layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerCosts {
    pub embed: Times,
    /// One for all blocks, or one for each.
    pub blocks: Vec<Times>,
    pub head: Times,
    pub hop_ns: u64,
    /// Of updates, by stage: see [`Costs::u_ns`].
    pub u_ns: Vec<u64>,
}

impl LayerCosts {
    pub fn of(&self, layer: Layer) -> Times {
        match layer {
            Layer::Embed => self.embed,
            Layer::Head => self.head,
            Layer::Block(i) => self.blocks.get(i as usize).or(self.blocks.last()).copied().unwrap_or_default(),
        }
    }

    /// The times of stages that hold these layers; none is 0.
    pub fn stages(&self, layers: &[Vec<Layer>]) -> Costs {
        let sum = |part: fn(Times) -> u64| {
            let stage =
                |stage: &Vec<Layer>| stage.iter().map(|&l| part(self.of(l))).fold(0, u64::saturating_add).max(1);
            layers.iter().map(stage).collect()
        };
        let (hop_ns, u_ns) = (self.hop_ns, self.u_ns.clone());
        Costs { f_ns: sum(|t| t.f_ns), i_ns: sum(|t| t.i_ns), w_ns: sum(|t| t.w_ns), hop_ns, u_ns }
    }
}

/// Costs in nanoseconds; each list has one entry (uniform) or one per stage.
#[derive(Clone, Debug, PartialEq)]
pub struct Costs {
    pub f_ns: Vec<u64>,
    pub i_ns: Vec<u64>,
    pub w_ns: Vec<u64>,
    pub hop_ns: u64,
    /// What an update takes beside the weight gradients that it is fused into; none: nothing.
    pub u_ns: Vec<u64>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Pipeline {
    pub partition: At<Partition>,
    /// Name of the schedule.
    pub schedule: At<String>,
    /// Sequences per micro-batch.
    pub microbatch: At<u32>,
    /// Micro-batches per optimizer update (K).
    pub accumulate: At<u32>,
    /// Stages a rank (v), where the schedule leaves it open.
    pub chunks: At<u32>,
    /// Drain and refill every this many updates.
    pub boundary: Option<At<u64>>,
    /// `fuse = off` keeps the update out of the weight-gradient kernels (default: fused).
    pub fuse: At<bool>,
    pub cover_latency: At<Cover>,
    /// What the backward pass computes again instead of keeping it from the forward pass.
    pub recompute: At<Recompute>,
    /// What matrix products of f32 round their operands to, where the device has it.
    pub products: At<Products>,
    /// Limits within which the schedule is searched; `schedule` then only stands for the one that is found.
    pub search: Option<Search>,
}

/// `schedule = search(memory <= 2x, drift <= 1)`
#[derive(Clone, Debug, PartialEq)]
pub struct Search {
    /// Most that a rank keeps, in thousandths of what 1F1B's first rank does: of P micro-batches.
    pub times_milli: Option<At<u64>>,
    /// Most micro-batches that a rank keeps.
    pub in_flight: Option<At<u32>>,
    /// Bytes a rank.
    pub memory: Option<Limits>,
    pub drift: Option<At<u64>>,
    pub delay: Option<At<u64>>,
    /// Where stages lie; none: as is best.
    pub place: Option<At<crate::schedule::Place>>,
    pub span: Span,
}

/// How much of the latency between ranks an asynchronous schedule covers with more micro-batches in flight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cover {
    /// Of what covers it all, in hundredths of a percent: 0 (`none`) to [`Cover::FULL`].
    pub share: u32,
}

impl Cover {
    pub const FULL: u32 = 10_000;
}

#[derive(Clone, Debug, PartialEq)]
pub enum Partition {
    Balanced,
    /// By stage.
    Explicit(Vec<Vec<Layer>>),
}

/// A cut unit of the model, in forward order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Layer {
    Embed,
    Block(u32),
    /// Final LayerNorm, output projection, loss.
    Head,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Staleness {
    /// The span is empty where the schedule says it, or nobody.
    pub weights: At<Weights>,
    /// `drift <= n`.
    pub drift: Option<At<u64>>,
    /// `delay <= n`.
    pub delay: Option<At<u64>>,
    /// `correction = error_feedback { … }` or another one.
    pub correction: Option<At<Correction>>,
}

/// Momentum of `nesterov` by default, and with `by_stage` that of the first stage in the limit of many.
pub const MOMENTUM_MOST: f64 = 0.99;

/// How updates are corrected for their delay.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Correction {
    /// By lambda times their delay times their change.
    ErrorFeedback {
        lambda: f64,
        /// The delay to correct for, in updates; none: the proved one.
        tau: Option<f64>,
    },
    /// By weights that look ahead along their last change.
    Nesterov {
        /// With `by_stage` the last stage's; those before it have more, up to 0.99.
        momentum: f64,
        by_stage: bool,
    },
    /// By an estimate of what their gradients have missed, from the way of the weights.
    DelayCompensation { lambda: f64 },
    /// By what is given of two.
    PipeMare {
        /// Learning rates that fall with the delay, in full at first and no more after so many updates.
        anneal: Option<u64>,
        /// Backward passes with weights moved back along their mean change, over the drift; of an update this share is left in
        /// that mean when as many have passed.
        discrepancy: Option<f64>,
    },
}

/// Which weights the passes of a micro-batch read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Weights {
    /// Backward reads the weights as they are; no copies.
    Current,
    /// Backward reads the version that forward read, which is kept until then (PipeDream).
    Stash,
    /// Both read the version before the one that their update is applied to; two versions are kept (PipeDream-2BW).
    DoubleBuffer,
    /// Forward reads a copy that is moved on along the last update, over the drift; backward reads the weights as they are (SpecTrain).
    Predict {
        /// Updates that the copy is ahead, on stages with drift; none: the proved mean drift.
        tau: Option<f64>,
    },
}

/// `group [embedding, head] = adamw { … }`
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    /// Any of these.
    pub selectors: Vec<At<Selector>>,
    pub optimizer: At<Optimizer>,
    pub learning_rate: At<LearningRate>,
    /// The optimizer leaves these to another one by itself: the file does not say it, and there may be none.
    pub implied: bool,
}

/// Which parameters are meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selector {
    Kind(ParamKind),
    /// Names, `*` standing for any characters: `block.*.attn.*`.
    Pattern(String),
}

/// What a parameter is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParamKind {
    /// Tables of tokens and positions.
    Embedding,
    /// The output projection.
    Head,
    /// Other parameters of two dimensions.
    Matrix,
    /// One dimension: biases and gains.
    Vector,
}

/// A gradient whose norm is above the bound is scaled down to it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Clip {
    /// Each parameter by itself.
    PerTensor { max: f64 },
    /// All parameters of a stage together.
    PerStage { max: f64 },
    /// All parameters of the model together.
    Global { max: f64 },
}

pub use artifact_types::{LearningRate, MuonScale, Optimizer};

/// Same shapes as the bundle's; `dsl` depends on no other crate of ours.
mod artifact_types {
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub enum LearningRate {
        Constant { lr: f64 },
        Cosine { peak: f64, warmup: u64, total: u64, floor: f64 },
        Linear { peak: f64, warmup: u64, total: u64, floor: f64 },
        Wsd { peak: f64, warmup: u64, total: u64, decay: u64, floor: f64 },
    }

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum MuonScale {
        MatchAdamW,
        Original,
    }

    #[derive(Clone, Copy, Debug, PartialEq)]
    pub enum Optimizer {
        AdamW { beta1: f64, beta2: f64, eps: f64, decay: f64 },
        Sgd { momentum: f64, decay: f64 },
        Lion { beta1: f64, beta2: f64, decay: f64 },
        Signum { momentum: f64, decay: f64 },
        NAdam { beta1: f64, beta2: f64, eps: f64, momentum_decay: f64, decay: f64 },
        Adan { beta1: f64, beta2: f64, beta3: f64, eps: f64, decay: f64 },
        Muon { momentum: f64, scale: MuonScale, decay: f64 },
        NorMuon { momentum: f64, beta2: f64, decay: f64 },
        Mars { beta1: f64, beta2: f64, eps: f64, gamma: f64, decay: f64 },
        Soap { beta1: f64, beta2: f64, eps: f64, frequency: u64, max_dim: u32, decay: f64 },
    }
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Require {
    /// Bytes a rank.
    pub memory: Option<Limits>,
    /// Fraction, 0..1.
    pub bubble: Option<At<f64>>,
}
