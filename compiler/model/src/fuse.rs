//! Fusion: a graph's nodes become kernel calls.
//!
//! # What is fused
//!
//! | nodes | kernel |
//! |---|---|
//! | MatMul, AddBias | MatMul with `Bias` |
//! | MatMul, AddBias, Gelu | MatMul with `BiasGelu`; Gelu's input is written too, the derivative reads it |
//! | MatMul, AddBias, Add | MatMul with `BiasResidual` |
//! | MatMul, GeluGrad | MatMul with `GeluGrad` |
//! | LayerNormGrad, Add | LayerNormGrad with a residual |
//!
//! A value between fused nodes vanishes: no other node reads it, and it is not in `kept` (Gelu's input is written, and may be read). A fused kernel runs where its first
//! node stood. That keeps the order valid: its other operands were defined before that node.
//!
//! A weight-gradient step ends in a *sink*: where the gradient goes depends on the micro-batch's place in its update, so
//! the step is made with [`Sink::Store`] and [`with_sink`] gives the other forms.

use crate::graph::{Graph, Node, Op, Part, ValueId};
use crate::kernel::{Epilogue, Form, KernelOp, MatMul, Sink, Table};
use std::collections::{HashMap, HashSet};
use std::fmt;

/// One kernel call, on values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    pub op: KernelOp,
    pub part: Part,
    /// In the kernel's order.
    pub inputs: Vec<ValueId>,
    /// In the kernel's order; a weight-gradient step has one, the gradient.
    pub outputs: Vec<ValueId>,
    /// (output, input) that are one buffer: the kernel has one operand for both, at the input's position.
    pub in_place: Option<(ValueId, ValueId)>,
}

impl Step {
    /// The kernel's operands in order, without what the sink adds to a weight gradient's inputs.
    pub fn operands(&self) -> impl Iterator<Item = ValueId> + '_ {
        let aliased = self.in_place.map(|(output, _)| output);
        let outputs = if self.part == Part::Weight { &[][..] } else { &self.outputs[..] };
        self.inputs.iter().copied().chain(outputs.iter().copied().filter(move |&o| Some(o) != aliased))
    }
}

/// A node that no kernel computes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoKernel(pub Node);

impl fmt::Display for NoKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no kernel computes {:?} here", self.0.op)
    }
}

impl std::error::Error for NoKernel {}

/// The graph's nodes as kernel calls, in order. `kept` values are written even where fusion could drop them.
pub fn fuse(graph: &Graph, kept: &HashSet<ValueId>) -> Result<Vec<Step>, NoKernel> {
    let mut fuser = Fuser::new(graph, kept);
    let mut steps = Vec::new();
    for (i, node) in graph.nodes.iter().enumerate() {
        if !fuser.done[i] {
            steps.push(fuser.step(i, node)?);
        }
    }
    Ok(steps)
}

/// The same weight gradient with another sink; other operations as they are.
pub fn with_sink(op: &KernelOp, sink: Sink) -> KernelOp {
    let mut op = op.clone();
    match &mut op {
        KernelOp::EmbedGrad { sink: place, .. }
        | KernelOp::GainGrad { sink: place, .. }
        | KernelOp::BiasGrad { sink: place, .. }
        | KernelOp::MatMul(MatMul { epilogue: Epilogue::Gradient(place), .. }) => *place = sink,
        _ => {}
    }
    op
}

struct Fuser<'a> {
    graph: &'a Graph,
    kept: &'a HashSet<ValueId>,
    /// Nodes that read each value.
    readers: HashMap<ValueId, Vec<usize>>,
    /// Node that defines each value.
    definer: HashMap<ValueId, usize>,
    /// Nodes that an earlier kernel took in.
    done: Vec<bool>,
}

impl<'a> Fuser<'a> {
    fn new(graph: &'a Graph, kept: &'a HashSet<ValueId>) -> Self {
        let mut readers: HashMap<ValueId, Vec<usize>> = HashMap::new();
        let mut definer = HashMap::new();
        for (i, node) in graph.nodes.iter().enumerate() {
            node.inputs.iter().for_each(|&v| readers.entry(v).or_default().push(i));
            node.results.iter().for_each(|&v| _ = definer.insert(v, i));
        }
        Fuser { graph, kept, readers, definer, done: vec![false; graph.nodes.len()] }
    }

    fn step(&mut self, i: usize, node: &Node) -> Result<Step, NoKernel> {
        match node.op {
            Op::MatMul(form) => Ok(self.matmul(i, node, form)),
            Op::LayerNormGrad => Ok(self.layer_norm_grad(i, node)),
            _ => self.single(node),
        }
    }

    fn matmul(&mut self, i: usize, node: &Node, form: Form) -> Step {
        let c = node.results[0];
        let mut inputs = node.inputs.clone();
        let mut outputs = vec![c];
        let mut epilogue = if node.part == Part::Weight { Epilogue::Gradient(Sink::Store) } else { Epilogue::Store };
        if let Some(add_bias) = self.take(c, |op| op == Op::AddBias) {
            let sum = add_bias.results[0];
            inputs.push(add_bias.inputs[1]);
            outputs = vec![sum];
            epilogue = Epilogue::Bias;
            if let Some(gelu) = self.take_and_keep(sum, |op| op == Op::Gelu) {
                outputs.push(gelu.results[0]);
                epilogue = Epilogue::BiasGelu;
            } else if let Some((add, residual)) = self.take_add(i, sum) {
                inputs.push(residual);
                outputs = vec![add];
                epilogue = Epilogue::BiasResidual;
            }
        } else if let Some(gelu_grad) = self.take(c, |op| op == Op::GeluGrad) {
            inputs.push(gelu_grad.inputs[1]);
            outputs = vec![gelu_grad.results[0]];
            epilogue = Epilogue::GeluGrad;
        }
        let [m, n] = self.matrix(c);
        let k = self.matrix(inputs[0])[if form == Form::TN { 0 } else { 1 }];
        let op = KernelOp::MatMul(MatMul { m, n, k, form, epilogue });
        Step { op, part: node.part, inputs, outputs, in_place: None }
    }

    fn layer_norm_grad(&mut self, i: usize, node: &Node) -> Step {
        let [rows, width] = self.matrix(node.results[0]);
        let (mut inputs, mut outputs, mut residual) = (node.inputs.clone(), node.results.clone(), false);
        if let Some((sum, other)) = self.take_add(i, node.results[0]) {
            inputs.push(other);
            outputs = vec![sum];
            residual = true;
        }
        Step { op: KernelOp::LayerNormGrad { rows, width, residual }, part: node.part, inputs, outputs, in_place: None }
    }

    /// A node that is a kernel by itself.
    fn single(&self, node: &Node) -> Result<Step, NoKernel> {
        let (sequences, context) = (self.graph.sequences, self.graph.context);
        let sink = Sink::Store;
        let mut in_place = None;
        let op = match node.op {
            Op::Embed => {
                let [vocab, width] = self.matrix(node.inputs[1]);
                KernelOp::Embed { sequences, context, width, vocab }
            }
            Op::EmbedGrad { table, entries } => {
                let [_, width] = self.matrix(node.results[0]);
                let vocab = if table == Table::Token { entries } else { 0 };
                KernelOp::EmbedGrad { table, sequences, context, width, vocab, sink }
            }
            Op::LayerNorm => {
                let [rows, width] = self.matrix(node.inputs[0]);
                KernelOp::LayerNorm { rows, width }
            }
            Op::GainGrad => {
                let [rows, width] = self.matrix(node.inputs[0]);
                KernelOp::GainGrad { rows, width, sink }
            }
            Op::ColumnSum => {
                let [rows, width] = self.matrix(node.inputs[0]);
                KernelOp::BiasGrad { rows, width, sink }
            }
            Op::Attention { heads } => {
                let [_, width] = self.matrix(node.results[0]);
                KernelOp::Attention { sequences, context, width, heads }
            }
            Op::AttentionGrad { heads } => {
                let [_, width] = self.matrix(node.inputs[1]);
                KernelOp::AttentionGrad { sequences, context, width, heads }
            }
            Op::CrossEntropy { scale_bits } => {
                let [rows, vocab] = self.matrix(node.inputs[1]);
                in_place = Some((node.results[0], node.inputs[1]));
                KernelOp::CrossEntropy { rows, vocab, scale_bits }
            }
            Op::MatMul(_) | Op::LayerNormGrad | Op::AddBias | Op::Gelu | Op::Add | Op::GeluGrad => {
                return Err(NoKernel(node.clone()));
            }
        };
        Ok(Step { op, part: node.part, inputs: node.inputs.clone(), outputs: node.results.clone(), in_place })
    }

    /// Takes in the only reader of `value` as its first operand, if it is of the wanted kind and `value` can vanish.
    fn take(&mut self, value: ValueId, wanted: impl Fn(Op) -> bool) -> Option<&'a Node> {
        let alone = self.readers.get(&value)?.len() == 1 && !self.kept.contains(&value);
        if alone { self.take_and_keep(value, wanted) } else { None }
    }

    /// Takes in a reader of `value` as its first operand; the kernel writes `value` as well.
    fn take_and_keep(&mut self, value: ValueId, wanted: impl Fn(Op) -> bool) -> Option<&'a Node> {
        let nodes = &self.graph.nodes;
        let fits = |reader: &&usize| wanted(nodes[**reader].op) && nodes[**reader].inputs[0] == value;
        let reader = *self.readers.get(&value)?.iter().find(fits)?;
        self.done[reader] = true;
        Some(&nodes[reader])
    }

    /// Takes in an addition to `value` whose other operand is there before node `i`; returns the sum and that operand.
    fn take_add(&mut self, i: usize, value: ValueId) -> Option<(ValueId, ValueId)> {
        let &[reader] = self.readers.get(&value)?.as_slice() else { return None };
        let node = &self.graph.nodes[reader];
        if node.op != Op::Add || self.kept.contains(&value) {
            return None;
        }
        let other = if node.inputs[0] == value { node.inputs[1] } else { node.inputs[0] };
        let early = self.definer.get(&other).is_none_or(|&d| d < i);
        early.then(|| {
            self.done[reader] = true;
            (node.results[0], other)
        })
    }

    fn matrix(&self, value: ValueId) -> [u32; 2] {
        let shape = &self.graph.value(value).shape;
        let dim = |d: u64| u32::try_from(d).expect("the model's sizes are bounded");
        [dim(shape[0]), dim(shape[1])]
    }
}
