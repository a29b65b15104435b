//! Models and hardware that are not run here: parameters, memory and times by formula.
//!
//! What [`crate::build`] plans to the byte for the reference GPT is here computed from sizes, for its variants (narrower keys and values,
//! SwiGLU, bf16, …) and for devices that share a rank's layers. The two agree where both apply.
//!
//! # What is counted
//!
//! With R tokens a micro-batch, width D, e bytes an activation, t devices that share each layer (`tensor_parallel`), d copies (`data_parallel`):
//!
//! * **weights**: e a parameter, for each version that is kept; a t-th of every matrix and of biases that go with its columns, norms and
//!   the other biases whole. A tied head counts once where one rank holds both ends, twice otherwise.
//! * **optimizer**: f32 states (AdamW: two), and an f32 copy of the weights beside bf16 ones. With the weights and an f32 gradient
//!   that is 18 bytes a parameter in bf16, the usual figure of mixed precision (Rajbhandari et al., ZeRO, 2020, counts 16 with a gradient in
//!   half precision).
//! * **gradients**: f32; none if every gradient goes straight into a fused update.
//! * **stash**: [`saved`] for each micro-batch in flight. The tensors are those of Korthikanti et al., Reducing Activation
//!   Recomputation in Large Transformer Models, 2022: s b h (34 + 5 a s / h) bytes a block in 16 bits with dropout and stored scores, s b h
//!   (10 + 24 / t + 5 a s / (h t)) on t devices, a t-th of all with sequence parallelism; and the norms' statistics, which they leave out.
//! * **communication**: R D e for each slot of the plan's rings.
//! * **activations**: token ids; the largest block's gradients at work; what recomputation makes again; f32 logits beside bf16; one
//!   layer gathered or reduced with ZeRO 2 and 3.
//! * ZeRO divides by d: the optimizer (1), the gradients too (2), the weights too (3).
//!
//! What libraries allocate by themselves (a CUDA context, NCCL's buffers) and fragmentation are not counted, nor is the time of
//! collectives among the t or d devices.

use crate::cost::{NOMINAL_FLOPS_PER_S, NOMINAL_HOP_LATENCY_NS, NOMINAL_LINK_BYTES_PER_S};
use crate::limits::{Bounds, check, largest_microbatch, within};
use artifact::program::Memory;
use artifact::stream::{Accumulation, Op, Program};
use dsl::diag::{Diagnostic, Span};
use dsl::spec::{
    Attention, Device, Dtype, Layer, LayerCosts, Mlp, Model, Norm, Position, Recompute, Spec, Times, Variant,
};

/// Sizes of a model and of one micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    pub layers: u32,
    pub width: u32,
    pub heads: u32,
    pub context: u32,
    pub vocab: u32,
    /// Sequences of a micro-batch.
    pub microbatch: u32,
    pub variant: Variant,
}

impl Shape {
    pub fn new(model: &Model, microbatch: u32) -> Shape {
        Shape {
            layers: model.layers.value,
            width: model.width.value,
            heads: model.heads.value,
            context: model.context.value,
            vocab: model.vocab.value,
            microbatch,
            variant: model.variant,
        }
    }

    /// R.
    fn rows(&self) -> u128 {
        u128::from(self.microbatch) * u128::from(self.context)
    }

    fn width(&self) -> u128 {
        self.width.into()
    }

    fn hidden(&self) -> u128 {
        self.variant.mlp.hidden().into()
    }

    /// Columns of queries, keys and values together.
    fn qkv(&self) -> u128 {
        self.width() + 2 * self.width() * u128::from(self.variant.kv_heads) / u128::from(self.heads)
    }

    /// t.
    fn shared(&self) -> u128 {
        self.variant.tensor_parallel.into()
    }

    /// e, bytes of an activation or a weight.
    fn bytes(&self) -> u128 {
        match self.variant.dtype {
            Dtype::F32 => 4,
            Dtype::Bf16 => 2,
        }
    }

    /// Bytes of what lies between two layers, on one device.
    fn border(&self) -> u128 {
        self.whole(self.rows() * self.width() * self.bytes())
    }

    /// Of something that tensor parallelism leaves whole: cut by tokens under sequence parallelism.
    fn whole(&self, amount: u128) -> u128 {
        if self.variant.sequence_parallel { amount.div_ceil(self.shared()) } else { amount }
    }

    /// Of something that tensor parallelism cuts.
    fn cut(&self, amount: u128) -> u128 {
        amount.div_ceil(self.shared())
    }

    fn norm(&self) -> u128 {
        self.width() * if self.variant.norm == Norm::Rms { 1 } else { 2 }
    }

    /// Rows of the token table on one device; the vocabulary is padded to a multiple of the devices.
    fn vocab(&self) -> u128 {
        self.cut(self.vocab.into())
    }
}

/// Parameters of a layer on one of the devices that share it. A tied head's table is not the head's own: see [`tied`].
pub fn parameters(shape: &Shape, layer: Layer) -> u64 {
    let Shape { variant, .. } = shape;
    let (width, hidden, qkv) = (shape.width(), shape.hidden(), shape.qkv());
    let found = match layer {
        Layer::Embed => {
            let positions = if variant.position == Position::Learned { shape.context } else { 0 };
            (shape.vocab() + u128::from(positions)) * width
        }
        Layer::Head => shape.norm() + if variant.tied { 0 } else { shape.vocab() * width },
        Layer::Block(_) => {
            let (matrices, columns) = match variant.mlp {
                Mlp::Gelu { .. } => (2 * width * hidden, hidden),
                Mlp::SwiGlu { .. } => (3 * width * hidden, 2 * hidden),
            };
            let biases = if variant.bias { shape.cut(qkv + columns) + 2 * width } else { 0 };
            2 * shape.norm() + shape.cut(width * qkv + width * width + matrices) + biases
        }
    };
    saturated(found)
}

/// Parameters of the table that a tied head shares with the embedding, on one device; 0 if the head has its own.
pub fn tied(shape: &Shape) -> u64 {
    if shape.variant.tied { saturated(shape.vocab() * shape.width()) } else { 0 }
}

/// Parameters of the whole model on `tensor_parallel` = 1; a tied table counts once.
pub fn parameters_total(shape: &Shape) -> u64 {
    let alone = Shape { variant: Variant { tensor_parallel: 1, ..shape.variant }, ..*shape };
    let ends = parameters(&alone, Layer::Embed).saturating_add(parameters(&alone, Layer::Head));
    u64::from(shape.layers).saturating_mul(parameters(&alone, Layer::Block(0))).saturating_add(ends)
}

/// A tensor kept for one micro-batch, on one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tensor {
    pub name: &'static str,
    pub bytes: u128,
}

/// What forward keeps of a layer for backward. A block's input comes first: on a stage that receives it, it lies in the receive slot.
pub fn saved(shape: &Shape, layer: Layer) -> Vec<Tensor> {
    if matches!(layer, Layer::Block(_)) && shape.variant.recompute == Recompute::Full {
        return vec![Tensor { name: "input", bytes: shape.border() }];
    }
    made(shape, layer, shape.variant.recompute == Recompute::None)
}

/// [`saved`] without recomputation, scores as `scores` says.
fn made(shape: &Shape, layer: Layer, scores: bool) -> Vec<Tensor> {
    let Shape { variant, .. } = shape;
    let (e, rows) = (shape.bytes(), shape.rows());
    let row = rows * shape.width();
    let mut list = Vec::new();
    let mut keep = |name, bytes| list.push(Tensor { name, bytes });
    let mean = if variant.norm == Norm::Rms { 1 } else { 2 };
    match layer {
        Layer::Embed => {}
        Layer::Head => {
            keep("input", shape.border());
            keep("norm output", shape.whole(e * row));
            keep("statistics", shape.whole(4 * rows * mean));
            keep("gradient of the logits", e * rows * shape.vocab());
        }
        Layer::Block(_) => {
            keep("input", shape.border());
            keep("norm 1 output", shape.whole(e * row));
            keep("queries, keys, values", shape.cut(e * rows * shape.qkv()));
            attention(shape, scores, &mut keep);
            keep("attention output", shape.cut(e * row));
            keep("residual", shape.whole(e * row));
            keep("norm 2 output", shape.whole(e * row));
            keep("statistics", shape.whole(4 * rows * 2 * mean));
            let hidden = shape.cut(e * rows * shape.hidden());
            match variant.mlp {
                Mlp::Gelu { .. } => ["GELU input", "GELU output"].map(|name| keep(name, hidden)).len(),
                Mlp::SwiGlu { .. } => ["gate", "up", "product"].map(|name| keep(name, hidden)).len(),
            };
            if variant.dropout {
                keep("dropout mask after attention", shape.whole(row));
                keep("dropout mask after the MLP", shape.whole(row));
            }
        }
    }
    if layer == Layer::Embed && variant.dropout {
        keep("dropout mask", shape.whole(row));
    }
    list
}

fn attention(shape: &Shape, scores: bool, keep: &mut dyn FnMut(&'static str, u128)) {
    let pairs = u128::from(shape.heads) * u128::from(shape.context) * shape.rows();
    match shape.variant.attention {
        Attention::Flash => keep("log of the softmax sum", shape.cut(4 * shape.rows() * u128::from(shape.heads))),
        Attention::Stored if scores => {
            keep("scores", shape.cut(shape.bytes() * pairs));
            if shape.variant.dropout {
                keep("dropout mask of the scores", shape.cut(pairs));
                keep("dropped scores", shape.cut(shape.bytes() * pairs));
            }
        }
        Attention::Stored => {}
    }
}

/// What I leaves for W where the backward pass is split. The gradient of the layer's output comes first: on a stage that receives it,
/// it lies in the receive slot.
pub fn held(shape: &Shape, layer: Layer) -> Vec<Tensor> {
    let (e, rows) = (shape.bytes(), shape.rows());
    let whole = |name| Tensor { name, bytes: shape.border() };
    let cut = |name, columns| Tensor { name, bytes: shape.cut(e * rows * columns) };
    match layer {
        Layer::Embed => vec![whole("gradient of the output")],
        Layer::Head => vec![whole("gradient of the norm's output")],
        Layer::Block(_) => {
            let up = match shape.variant.mlp {
                Mlp::Gelu { .. } => shape.hidden(),
                Mlp::SwiGlu { .. } => 2 * shape.hidden(),
            };
            vec![
                whole("gradient of the output"),
                whole("gradient of the residual"),
                whole("gradient of norm 1"),
                whole("gradient of norm 2"),
                cut("gradients of queries, keys, values", shape.qkv()),
                cut("gradient before the activation", up),
            ]
        }
    }
}

fn sum(tensors: &[Tensor]) -> u128 {
    tensors.iter().map(|t| t.bytes).sum()
}

/// Operations of a layer on one micro-batch and one device: forward, input gradient, weight gradient. As [`crate::cost::work`] counts them,
/// with what recomputation repeats; a split backward pass repeats it for both parts.
pub fn work(shape: &Shape, layer: Layer, split: bool) -> [u128; 3] {
    let Shape { variant, .. } = shape;
    let (rows, width) = (shape.rows(), shape.width());
    match layer {
        Layer::Embed => {
            let tables = if variant.position == Position::Learned { 2 } else { 1 };
            [rows * width, 0, tables * rows * width]
        }
        Layer::Head => [2 * rows * width * shape.vocab(); 3],
        Layer::Block(_) => {
            let matrices = if matches!(variant.mlp, Mlp::Gelu { .. }) { 2 } else { 3 };
            let linear = shape.cut(2 * rows * (width * (shape.qkv() + width) + matrices * width * shape.hidden()));
            // A causal half of each product.
            let product = shape.cut(rows * width * (u128::from(shape.context) + 1));
            let again = variant.attention == Attention::Flash || variant.recompute != Recompute::None;
            let forward = linear + 2 * product;
            let repeated = if variant.recompute == Recompute::Full { forward } else { 0 };
            let input = linear + if again { 5 } else { 4 } * product + repeated;
            [forward, input, linear + if split { repeated } else { 0 }]
        }
    }
}

/// Times of a layer are cut off here, nanoseconds (eleven days), so that sums of them stay far from overflow.
const TIME_NS_MAX: u128 = 1_000_000_000_000_000;

/// Time of `amount` at a rate.
fn ns(amount: u128, per_s: u64) -> u64 {
    saturated((amount * 1_000_000_000 / u128::from(per_s)).min(TIME_NS_MAX))
}

/// Latency and bytes a second from one rank to another, of `device` or nominal.
fn link(device: Option<&Device>) -> (u64, u64) {
    device.map_or((NOMINAL_HOP_LATENCY_NS, NOMINAL_LINK_BYTES_PER_S), |d| (d.latency_ns, d.link_bytes_per_s))
}

/// Time of a transfer of a tied table's gradient, in f32.
pub fn exchange_ns(shape: &Shape, device: Option<&Device>) -> u64 {
    let (latency, link) = link(device);
    latency.saturating_add(ns(4 * u128::from(tied(shape)), link))
}

/// Times by layer on `device`, or at the nominal rates of [`crate::cost`].
pub fn costs(shape: &Shape, device: Option<&Device>, split: bool) -> LayerCosts {
    let flops = device.map_or(NOMINAL_FLOPS_PER_S, |device| device.flops_per_s);
    let (latency, link) = link(device);
    let times = |layer| {
        let [f_ns, i_ns, w_ns] = work(shape, layer, split).map(|work| ns(work, flops));
        Times { f_ns, i_ns, w_ns }
    };
    let hop_ns = latency.saturating_add(ns(shape.border(), link));
    LayerCosts {
        embed: times(Layer::Embed),
        blocks: vec![times(Layer::Block(0))],
        head: times(Layer::Head),
        hop_ns,
        u_ns: Vec::new(),
    }
}

/// What memory is estimated from.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a> {
    pub shape: Shape,
    /// Layers by stage.
    pub partition: &'a [Vec<Layer>],
    pub program: &'a Program,
    /// The update runs inside the last weight gradients.
    pub fuse: bool,
    /// Values that the optimizer keeps beside each weight: of the embedding, of blocks, of the head.
    pub states: [usize; 3],
    /// By stage: versions of the weights that are kept.
    pub versions: &'a [u32],
}

impl Input<'_> {
    fn states_of(&self, layer: Layer) -> u128 {
        let [embed, block, head] = self.states.map(|n| n as u128);
        match layer {
            Layer::Embed => embed,
            Layer::Block(_) => block,
            Layer::Head => head,
        }
    }
}

/// Memory of one device of each rank.
pub fn memory(input: &Input) -> Vec<Memory> {
    (0..input.program.streams.len()).map(|rank| rank_memory(input, rank)).collect()
}

/// How the streams use the stages of a rank.
#[derive(Default)]
struct Usage {
    split: bool,
    /// A gradient of more than one micro-batch is summed.
    sums: bool,
}

fn usage(program: &Program) -> Usage {
    let whole = Accumulation { first: true, last: true };
    let mut usage = Usage::default();
    for instr in program.streams.iter().flat_map(|s| s.prologue.iter().chain(&s.period)) {
        match instr.op {
            Op::B(a) | Op::W(a) => usage.sums |= a != whole,
            Op::I => usage.split = true,
            _ => {}
        }
    }
    usage
}

/// Whether any stream splits the backward pass.
pub fn splits(program: &Program) -> bool {
    usage(program).split
}

fn rank_memory(input: &Input, rank: usize) -> Memory {
    let Input { shape, program, .. } = input;
    let Variant { zero, .. } = shape.variant;
    let usage = usage(program);
    let stages: Vec<usize> = (0..input.partition.len()).filter(|&s| program.rank_of_stage[s].index() == rank).collect();
    let layers: Vec<Layer> = stages.iter().flat_map(|&s| input.partition[s].iter().copied()).collect();
    let [embed, head] = [Layer::Embed, Layer::Head].map(|end| layers.contains(&end));
    let of = |layers: &[Layer]| layers.iter().map(|&l| u128::from(parameters(shape, l))).sum::<u128>();
    let table = u128::from(tied(shape));
    let of_stage = |s: usize| {
        let own = head && !embed && input.partition[s].contains(&Layer::Head);
        of(&input.partition[s]) + if own { table } else { 0 }
    };
    let parameters: u128 = stages.iter().map(|&s| of_stage(s)).sum();
    let states: u128 = stages
        .iter()
        .map(|&s| {
            let layers = input.partition[s].iter();
            let own = of_stage(s) - of(&input.partition[s]);
            layers.map(|&l| input.states_of(l) * of(&[l])).sum::<u128>() + input.states_of(Layer::Embed) * own
        })
        .sum();
    let kept: u128 = stages.iter().map(|&s| of_stage(s) * u128::from(input.versions[s].max(1))).sum();
    let shared = |bytes: u128, from: u32| {
        if zero >= from { bytes.div_ceil(shape.variant.data_parallel.into()) } else { bytes }
    };
    let master = if shape.variant.dtype == Dtype::Bf16 { 1 } else { 0 };
    let accumulates = usage.sums || !input.fuse || shape.variant.data_parallel > 1;
    // The two ends of a tied table are summed apart, so that their order does not depend on the placement, and always.
    let ends = table * (u128::from(embed) + u128::from(head));
    let gradients = if accumulates { parameters + if embed && head { table } else { 0 } } else { ends };
    let weights = shared(shape.bytes() * kept, 3);
    let optimizer = shared(4 * (states + master * parameters), 1);
    let gradients = shared(4 * gradients, 2);
    let (stash, communication) = flight(input, &stages, usage.split);
    let activations = at_work(input, &stages, &layers, usage.split);
    total([weights, optimizer, gradients, stash, communication, activations].map(saturated))
}

fn total([weights, optimizer, gradients, stash, communication, activations]: [u64; 6]) -> Memory {
    let parts = [weights, optimizer, gradients, stash, communication, activations];
    let total = parts.into_iter().fold(0, u64::saturating_add);
    Memory { total, weights, optimizer, gradients, stash, activations, communication, workspace: 0 }
}

/// Bytes of what is kept for micro-batches in flight, and of the slots of transfers.
fn flight(input: &Input, stages: &[usize], split: bool) -> (u128, u128) {
    let Input { shape, partition, program, .. } = input;
    let border = shape.border();
    let (mut stash, mut communication) = (0, 0);
    for &s in stages {
        let (received, sent) = (program.before(s).is_some(), program.after(s).is_some());
        let rings = program.rings[s];
        let kept: u128 = partition[s].iter().map(|&l| sum(&saved(shape, l))).sum();
        let gradients: u128 = partition[s].iter().map(|&l| sum(&held(shape, l))).sum();
        let in_slots = |received: bool| if received { border } else { 0 };
        let slot =
            kept.saturating_sub(in_slots(received)) + if split { gradients.saturating_sub(in_slots(sent)) } else { 0 };
        stash += slot * u128::from(rings.stash.max(1));
        let before = if received { rings.recv_f + rings.send_b } else { 0 };
        let after = if sent { rings.send_f + rings.recv_b } else { 0 };
        communication += border * (u128::from(before) + u128::from(after));
        // The gradient of a tied table's other end.
        communication += if program.partner(s).is_some() { 4 * u128::from(tied(shape)) } else { 0 };
    }
    (stash, communication)
}

/// Bytes at work within one pass: token and target ids, and what the largest layer needs at once.
fn at_work(input: &Input, stages: &[usize], layers: &[Layer], split: bool) -> u128 {
    let Input { shape, program, .. } = input;
    let slots = |s: &usize| if program.before(*s).is_none() { u128::from(program.rings[*s].recv_f) } else { 0 };
    let ids: u128 = stages.iter().map(slots).sum::<u128>() + u128::from(layers.contains(&Layer::Head));
    let largest = layers.iter().map(|&l| working(shape, l, split)).max().unwrap_or(0);
    4 * shape.rows() * ids + largest
}

/// Most bytes of a layer's gradients and of what is made again, at once. Where the backward pass is split, most gradients are [`held`].
fn working(shape: &Shape, layer: Layer, split: bool) -> u128 {
    let Shape { variant, .. } = shape;
    let (e, rows) = (shape.bytes(), shape.rows());
    let whole = match variant.zero {
        3 => (shape.bytes() + 4) * u128::from(parameters(shape, layer)),
        2 => 4 * u128::from(parameters(shape, layer)),
        _ => 0,
    };
    let passes = match layer {
        Layer::Embed => 0,
        // bf16 logits are summed in f32.
        Layer::Head => {
            (if split { 0 } else { shape.border() })
                + if variant.dtype == Dtype::Bf16 { 4 * rows * shape.vocab() } else { 0 }
        }
        Layer::Block(_) => {
            // The gradient before the activation replaces the one after it.
            let columns = if matches!(variant.mlp, Mlp::Gelu { .. }) { 1 } else { 2 };
            let mlp = shape.cut(columns * e * rows * shape.hidden());
            let scores = match variant.attention {
                Attention::Flash => 0,
                Attention::Stored => shape.cut(2 * e * u128::from(shape.heads) * u128::from(shape.context) * rows),
            };
            let output = shape.cut(e * rows * shape.width()) + scores;
            let again = sum(&made(shape, layer, true)) - sum(&saved(shape, layer));
            if split {
                output + again
            } else {
                // The gradients that come in and go out, and those inside.
                2 * shape.border() + mlp.max(output + shape.cut(e * rows * shape.qkv())) + again
            }
        }
    };
    passes + whole
}

/// As [`crate::limits::check_memory`], of an estimate.
pub fn check_memory(input: &Input, memory: &[Memory], bounds: &Bounds, model: &Span) -> Vec<Diagnostic> {
    check(memory, bounds, model, &|limits| {
        let with = |microbatch| Input { shape: Shape { microbatch, ..input.shape }, ..*input };
        largest_microbatch(input.shape.microbatch, &|n| within(&self::memory(&with(n)), limits))
    })
}

/// `P0420`: why a spec can be checked but not compiled; none for one that can.
pub fn refusal(spec: &Spec) -> Option<Diagnostic> {
    if spec.schedule.place.copies() > 1 {
        let at = &spec.pipeline.schedule;
        let message = format!("`{}` keeps two copies of every stage: it can be checked, not compiled", at.value);
        let error = Diagnostic::error("P0422", at.span.clone(), message);
        let error = error
            .note("before an update the gradients of both copies must be exchanged, which no instruction does yet");
        return Some(error.help("use dualpipe_v or zb_v, which have two stages a rank and one copy of each"));
    }
    let keys = spec.analysis_only();
    let (first, others) = keys.split_first()?;
    let mut names: Vec<String> = keys.iter().map(|key| format!("`{}`", key.value)).collect();
    names.dedup();
    let (verb, them) = if names.len() == 1 { ("is", "it") } else { ("are", "them") };
    let message = format!("this spec can be checked, not compiled: {} {verb} for analysis only", names.join(", "));
    let error = Diagnostic::error("P0420", first.span.clone(), message);
    let error = others.iter().fold(error, |error, key| error.and_at(key.span.clone(), "and this"));
    Some(error.help(format!("remove {them} to compile the reference GPT")))
}

fn saturated(n: u128) -> u64 {
    u64::try_from(n).unwrap_or(u64::MAX)
}
