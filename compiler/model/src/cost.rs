//! Work in floating-point operations, and times estimated from it.
//!
//! Multiplications and additions of matrix products count, attention's causal half only; so do the additions of the
//! embedding. Elementwise work is left out: it follows memory bandwidth, and it is small beside the products.

use crate::dims::Dims;
use crate::gpt::stage_graph;
use crate::graph::{Part, elem};
use crate::kernel::{KernelOp, MatMul, Table, Writes};
use crate::rules::Rules;
use crate::stage::{StageError, StagePlan};
use crate::update::UpdatePlan;
use dsl::spec::{Costs, Layer, Recompute};

/// Operations per micro-batch of some layers, by part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    pub forward: u64,
    pub input: u64,
    pub weight: u64,
}

impl Work {
    pub fn total(&self) -> u64 {
        self.forward.saturating_add(self.input).saturating_add(self.weight)
    }
}

/// Rate that turns operations into time where no `cost` is given: one rank's share of a current machine in f32. Bubbles depend
/// on the ratios of the times only, so the rate itself matters only beside the hop.
pub const NOMINAL_FLOPS_PER_S: u64 = 100_000_000_000;

/// Rate of a transfer between two ranks.
pub const NOMINAL_LINK_BYTES_PER_S: u64 = 10_000_000_000;

/// Time of an empty transfer.
pub const NOMINAL_HOP_LATENCY_NS: u64 = 2_000;

/// Operations of one kernel call. Weight gradients count the sum, not the update.
pub fn flops(op: &KernelOp) -> u64 {
    let product = |dims: &[u32]| dims.iter().map(|&d| u64::from(d)).product::<u64>();
    // Products of a causal attention: each query sees half of the keys, and its own.
    let attention = |products: u64, sequences: u32, context: u32, width: u32| {
        products * product(&[sequences, context, width]) * (u64::from(context) + 1)
    };
    match *op {
        KernelOp::MatMul(MatMul { m, n, k, .. }) => 2 * product(&[m, n, k]),
        KernelOp::Attention { sequences, context, width, .. } => attention(2, sequences, context, width),
        KernelOp::AttentionGrad { sequences, context, width, .. } => attention(5, sequences, context, width),
        KernelOp::Embed { sequences, context, width, .. }
        | KernelOp::EmbedGrad { table: Table::Token | Table::Position, sequences, context, width, .. } => {
            product(&[sequences, context, width])
        }
        KernelOp::LayerNorm { .. }
        | KernelOp::LayerNormGrad { .. }
        | KernelOp::GainGrad { .. }
        | KernelOp::BiasGrad { .. }
        | KernelOp::CrossEntropy { .. }
        | KernelOp::Update { .. }
        | KernelOp::Part(_) => 0,
    }
}

/// Operations of a stage that holds `layers`.
pub fn work(dims: &Dims, layers: &[Layer], recompute: Recompute) -> Result<Work, StageError> {
    let plan = StagePlan::new(dims, layers, 1.0, false, recompute)?;
    let mut work = Work::default();
    for step in plan.forward.iter().chain(&plan.backward) {
        let part = match step.part {
            Part::Forward => &mut work.forward,
            Part::Input => &mut work.input,
            Part::Weight => &mut work.weight,
        };
        *part = part.saturating_add(flops(&step.op));
    }
    Ok(work)
}

/// Operations of each layer taken as a stage of its own, by kind: all blocks are equal.
#[derive(Clone, Copy, Debug)]
pub struct LayerWork {
    embed: Work,
    block: Work,
    head: Work,
}

impl LayerWork {
    /// With what the backward pass computes again: of a layer whose forward pass is run again ([`Recompute::Full`]) all of it, also what the
    /// last layer of a stage leaves out.
    pub fn new(dims: &Dims, recompute: Recompute) -> LayerWork {
        let full = recompute == Recompute::Full;
        let of = |layer| {
            let of_parts = if full { Recompute::None } else { recompute };
            let work = work(dims, &[layer], of_parts);
            let work = work.expect("checked sizes give a well-shaped graph with a kernel for every node");
            Work { input: work.input.saturating_add(if full { work.forward } else { 0 }), ..work }
        };
        LayerWork { embed: of(Layer::Embed), block: of(Layer::Block(0)), head: of(Layer::Head) }
    }

    pub fn of(&self, layer: Layer) -> Work {
        match layer {
            Layer::Embed => self.embed,
            Layer::Block(_) => self.block,
            Layer::Head => self.head,
        }
    }

    /// Operations of several layers.
    pub fn sum(&self, layers: &[Layer]) -> Work {
        layers.iter().map(|&l| self.of(l)).fold(Work::default(), |a, b| Work {
            forward: a.forward.saturating_add(b.forward),
            input: a.input.saturating_add(b.input),
            weight: a.weight.saturating_add(b.weight),
        })
    }
}

/// Operations of a stage's updates beside the weight gradients that they are fused into: products of whole matrices.
pub fn update_work(dims: &Dims, layers: &[Layer], rules: &Rules) -> u64 {
    if !rules.multiply() {
        return 0;
    }
    let graph = stage_graph(dims, layers, 1.0).expect("checked sizes give a well-shaped graph");
    let plan = UpdatePlan::new(&graph.params, rules, true, Writes::InPlace, false, None);
    plan.steps.iter().map(|step| flops(&step.op)).fold(0, u64::saturating_add)
}

/// Estimated times of each stage at the nominal rates, for a spec without `cost`. No time but an update's is 0.
pub fn costs(dims: &Dims, partition: &[Vec<Layer>], recompute: Recompute, rules: &Rules) -> Costs {
    let layers = LayerWork::new(dims, recompute);
    let work: Vec<Work> = partition.iter().map(|stage| layers.sum(stage)).collect();
    let times = |part: fn(&Work) -> u64| work.iter().map(|w| time_ns(part(w), NOMINAL_FLOPS_PER_S)).collect();
    let bytes = elem(dims.dtype).bytes() * u64::from(dims.rows()) * u64::from(dims.width);
    Costs {
        f_ns: times(|w| w.forward),
        i_ns: times(|w| w.input),
        w_ns: times(|w| w.weight),
        hop_ns: NOMINAL_HOP_LATENCY_NS + time_ns(bytes, NOMINAL_LINK_BYTES_PER_S),
        u_ns: partition.iter().map(|layers| update_ns(update_work(dims, layers, rules))).collect(),
    }
}

/// Elementwise updates count nothing.
fn update_ns(work: u64) -> u64 {
    if work == 0 { 0 } else { time_ns(work, NOMINAL_FLOPS_PER_S) }
}

fn time_ns(amount: u64, per_s: u64) -> u64 {
    let ns = u128::from(amount) * 1_000_000_000 / u128::from(per_s);
    u64::try_from(ns).unwrap_or(u64::MAX).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use dsl::spec::Dtype;

    #[test]
    fn a_block_by_hand() {
        let dims = Dims {
            layers: 8,
            width: 256,
            heads: 8,
            context: 128,
            vocab: 256,
            microbatch: 4,
            dtype: Dtype::F32,
            tied: false,
        };
        let rows = 512;
        let linear = 24 * 256 * 256 * rows;
        let attention = 2 * 256 * 129 * rows;
        let block = work(&dims, &[Layer::Block(0)], Recompute::None).unwrap();
        assert_eq!(block, Work { forward: linear + attention, input: linear + attention * 5 / 2, weight: linear });
        let head = 2 * 256 * 256 * rows;
        assert_eq!(
            work(&dims, &[Layer::Head], Recompute::None).unwrap(),
            Work { forward: head, input: head, weight: head }
        );
        let both = work(&dims, &[Layer::Block(0), Layer::Head], Recompute::None).unwrap();
        assert_eq!(both.total(), block.total() + 3 * head);
    }
}
