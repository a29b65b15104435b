//! A stage as kernel calls on values, and what becomes of each value: which are saved for the backward pass, which are held from I to
//! W, which are temporaries.
//!
//! # What is saved
//!
//! Whatever forward value a backward node reads. Per block and micro-batch, with R rows and width D, in 4-byte words: the block's
//! input, `y1`, `o`, `x2` and `y2`: 5 RD (a block's output is the next one's input and is stored once); `qkv` 3 RD; `pre` and `act` 4 RD
//! each; two means and two reciprocal deviations 4 R; `lse` R x heads: **16 RD + 4 R + R heads words**. A stage's received input stays in
//! ring `recv_f` instead, its output goes to `send_f`. The head saves its input and `y` (RD each), mean and deviation (2 R) and the
//! logits' gradient (R x vocab).
//!
//! With [`Recompute::Attention`] `o` and `lse` are not saved: RD + R x heads words less. With [`Recompute::Full`] nothing is: what the backward
//! pass reads it computes again, among the temporaries of its body, from the received input (or the token ids) and the target ids.
//!
//! When the backward pass is split, I leaves in the stash what W reads, per block: its output gradient, `dx2`, `dy1` and `dy2` (4 RD),
//! `dqkv` (3 RD), `dpre` (4 RD): **11 RD words** more (10 RD where the output gradient is received: it stays in `recv_b`); the
//! head adds its `dy` and the embedding its output's gradient.

use crate::derivative::{Derivative, derivative};
use crate::dims::Dims;
use crate::fuse::{NoKernel, Step, fuse};
use crate::gpt::{StageGraph, stage_graph};
use crate::graph::{Part, ShapeError, Source, ValueId};
use dsl::spec::{Layer, Recompute};
use std::collections::{HashMap, HashSet};

/// Where a value's storage is. In-place results have the home of the operand they replace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Home {
    /// From outside the stage's bodies, or fixed by the stream: see the source of the value.
    Tokens,
    Targets,
    Loss,
    Param(crate::graph::ParamId),
    RecvF,
    SendF,
    RecvB,
    SendB,
    /// A slot of ring `stash`.
    Stash,
    /// Only within one body.
    Temporary,
}

/// A stage before memory is laid out.
#[derive(Clone, Debug)]
pub struct StagePlan {
    pub forward_graph: StageGraph,
    pub derivative: Derivative,
    pub forward: Vec<Step>,
    /// Input and weight parts in one order.
    pub backward: Vec<Step>,
    /// Of every value that a step touches, except weight gradients (they go to sinks).
    pub homes: HashMap<ValueId, Home>,
    /// Values in the stash, in the order in which they are written.
    pub stash: Vec<ValueId>,
    /// In-place results and the operand each replaces.
    aliases: HashMap<ValueId, ValueId>,
}

/// Why a stage could not be planned; with sizes that [`crate::dims::check_sizes`] accepts this does not happen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StageError {
    Shape(ShapeError),
    Kernel(NoKernel),
}

impl From<ShapeError> for StageError {
    fn from(error: ShapeError) -> Self {
        StageError::Shape(error)
    }
}

impl From<NoKernel> for StageError {
    fn from(error: NoKernel) -> Self {
        StageError::Kernel(error)
    }
}

impl StagePlan {
    /// Plans a stage. `split`: I and W run apart, so what W reads of I's results is held in the stash.
    pub fn new(
        dims: &Dims,
        layers: &[Layer],
        loss_scale: f32,
        split: bool,
        recompute: Recompute,
    ) -> Result<StagePlan, StageError> {
        let forward_graph = stage_graph(dims, layers, loss_scale)?;
        let derivative = derivative(&forward_graph, recompute)?;
        let saved = saved(&forward_graph, &derivative);
        let held = if split { held(&derivative) } else { HashSet::new() };
        let keep = |set: &HashSet<ValueId>, end: Option<ValueId>| set.iter().copied().chain(end).collect();
        let forward = fuse(&forward_graph.graph, &keep(&saved, forward_graph.output))?;
        let backward = fuse(&derivative.graph, &keep(&held, derivative.input_gradient))?;
        let aliases = forward.iter().chain(&backward).filter_map(|s| s.in_place).collect();
        let (homes, stash) = (HashMap::new(), Vec::new());
        let mut plan = StagePlan { forward_graph, derivative, forward, backward, homes, stash, aliases };
        plan.find_homes(&saved, &held);
        Ok(plan)
    }

    /// The value whose storage `value` uses.
    pub fn root(&self, value: ValueId) -> ValueId {
        self.aliases.get(&value).copied().unwrap_or(value)
    }

    fn find_homes(&mut self, saved: &HashSet<ValueId>, held: &HashSet<ValueId>) {
        let in_stash: HashSet<ValueId> = saved.iter().chain(held).map(|&v| self.root(v)).collect();
        let graph = &self.derivative.graph;
        let touched = self.forward.iter().chain(&self.backward).flat_map(|s| s.operands());
        for value in touched {
            let home = match graph.value(value).source {
                Source::Tokens => Home::Tokens,
                Source::Targets => Home::Targets,
                Source::Input => Home::RecvF,
                Source::OutputGradient => Home::RecvB,
                Source::Param(id) => Home::Param(id),
                Source::Node if Some(value) == self.forward_graph.output => Home::SendF,
                Source::Node if Some(value) == self.derivative.input_gradient => Home::SendB,
                Source::Node if in_stash.contains(&self.aliases.get(&value).copied().unwrap_or(value)) => Home::Stash,
                Source::Node if graph.value(value).elem == crate::graph::Elem::F64 => Home::Loss,
                Source::Node => Home::Temporary,
            };
            let new = self.homes.insert(value, home).is_none();
            if new && home == Home::Stash && !self.aliases.contains_key(&value) {
                self.stash.push(value);
            }
        }
    }
}

/// Forward results that backward nodes read.
fn saved(forward: &StageGraph, derivative: &Derivative) -> HashSet<ValueId> {
    let forward_values = forward.graph.values.len();
    let reads = derivative.graph.nodes.iter().flat_map(|n| n.inputs.iter().copied());
    let results = reads.filter(|v| v.index() < forward_values && forward.graph.value(*v).source == Source::Node);
    results.collect()
}

/// Results of the input part that the weight part reads.
fn held(derivative: &Derivative) -> HashSet<ValueId> {
    let of = |part: Part| derivative.graph.nodes.iter().filter(move |n| n.part == part);
    let made: HashSet<ValueId> = of(Part::Input).flat_map(|n| n.results.iter().copied()).collect();
    of(Part::Weight).flat_map(|n| n.inputs.iter().copied()).filter(|v| made.contains(v)).collect()
}
