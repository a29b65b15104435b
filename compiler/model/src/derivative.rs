//! Reverse-mode differentiation of a stage's forward graph.
//!
//! # What it gives
//!
//! A graph that starts with the forward pass's values under the same ids and defines the gradients. Its nodes read parameters as they are
//! when the node runs, and activations as the forward pass left them: a forward value that a backward node reads must be kept from F to
//! B.
//!
//! # Recomputation
//!
//! Unless it is computed again: then the graph has a copy of the forward node that defines it, of [`Part::Input`], right before the
//! first node that reads it. [`Recompute::Full`] copies every forward node up to that one, so that only what comes from outside the stage is
//! kept: its input, token and target ids. The copies read the parameters as they are, so the gradients are those of the forward pass
//! at the backward pass's version of the weights. [`Recompute::Attention`] copies attention only, from the saved queries, keys and values.
//! What comes after the last value that the backward pass reads is not computed again.
//!
//! Every node is marked [`Part::Input`] (the chain of input gradients, which ends in [`Derivative::input_gradient`]) or
//! [`Part::Weight`] (the gradient of one parameter; nothing else reads it). No input node reads a weight node's result, so the two
//! parts can run apart, the input part first.
//!
//! # Order
//!
//! Forward nodes are differentiated from last to first; for each, the input gradient comes before the weight gradients. Hence in
//! this order no node reads a parameter after the node that makes that parameter's gradient: the gradient's consumer
//! may update the parameter at once.

use crate::gpt::StageGraph;
use crate::graph::{Graph, Node, Op, ParamId, Part, ShapeError, Source, ValueId, elem};
use crate::kernel::{Form, Table};
use dsl::spec::Recompute;
use std::collections::HashMap;

/// See the module's text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Derivative {
    pub graph: Graph,
    /// Gradient of the stage's output; none on the last stage.
    pub output_gradient: Option<ValueId>,
    /// Gradient of the stage's input; none on the first stage.
    pub input_gradient: Option<ValueId>,
    /// The parameter of each gradient; every parameter has one, a tied table one for each end.
    pub gradients: HashMap<ValueId, ParamId>,
    /// A tied table's gradient by the head.
    pub head_gradient: Option<ValueId>,
}

/// Differentiates a stage.
pub fn derivative(stage: &StageGraph, recompute: Recompute) -> Result<Derivative, ShapeError> {
    let definers = stage.graph.nodes.iter().enumerate();
    let definers = definers.flat_map(|(i, node)| node.results.iter().map(move |&v| (v, i))).collect();
    let mut reverse = Reverse {
        forward: &stage.graph,
        recompute,
        definers,
        copies: HashMap::new(),
        copied: 0,
        graph: stage.graph.with_same_values(),
        cotangents: HashMap::new(),
        gradients: HashMap::new(),
        head_gradient: None,
    };
    let output_gradient = stage.output.map(|output| {
        let shape = stage.graph.value(output).shape.clone();
        let gradient = reverse.graph.external(Source::OutputGradient, elem(stage.graph.dtype), shape);
        reverse.cotangents.insert(output, gradient);
        gradient
    });
    for node in stage.graph.nodes.iter().rev() {
        reverse.node(node)?;
    }
    Ok(Derivative {
        output_gradient,
        input_gradient: stage.input.map(|input| reverse.cotangents[&input]),
        gradients: reverse.gradients,
        head_gradient: reverse.head_gradient,
        graph: reverse.graph,
    })
}

struct Reverse<'a> {
    forward: &'a Graph,
    recompute: Recompute,
    /// Forward node that defines each value.
    definers: HashMap<ValueId, usize>,
    /// Copies of values that are computed again.
    copies: HashMap<ValueId, ValueId>,
    /// With [`Recompute::Full`]: forward nodes that were copied, from the first on.
    copied: usize,
    graph: Graph,
    /// Gradient of each forward value, summed so far.
    cotangents: HashMap<ValueId, ValueId>,
    gradients: HashMap<ValueId, ParamId>,
    head_gradient: Option<ValueId>,
}

impl Reverse<'_> {
    fn node(&mut self, node: &Node) -> Result<(), ShapeError> {
        let (inputs, results) = (&node.inputs, &node.results);
        if let Op::CrossEntropy { .. } = node.op {
            // The forward pass made the gradient already.
            let gradient = self.activation(results[0])?;
            self.cotangents.insert(inputs[1], gradient);
            return Ok(());
        }
        let dy = *self.cotangents.get(&results[0]).expect("every node's first result reaches the loss");
        match node.op {
            Op::Embed => {
                let (tokens, token_table, position_table) = (inputs[0], inputs[1], inputs[2]);
                self.embedding(Table::Token, token_table, &[tokens, dy])?;
                self.embedding(Table::Position, position_table, &[dy])?;
            }
            Op::LayerNorm => {
                let (x, gain, bias) = (inputs[0], inputs[1], inputs[2]);
                let (mean, rstd) = (results[1], results[2]);
                self.input(x, Op::LayerNormGrad, &[dy, x, mean, rstd, gain])?;
                self.weight(gain, Op::GainGrad, &[dy, x, mean, rstd])?;
                self.weight(bias, Op::ColumnSum, &[dy])?;
            }
            Op::MatMul(form) => {
                let (x, weight) = (inputs[0], inputs[1]);
                // A tied head: its weight is stored transposed.
                let transposed = form == Form::NT;
                // Before both gradients: the first is fused with what reads Gelu's input.
                self.activation(x)?;
                let back = if transposed { Form::NN } else { Form::NT };
                self.input(x, Op::MatMul(back), &[dy, weight])?;
                let operands = if transposed { [dy, x] } else { [x, dy] };
                let gradient = self.weight(weight, Op::MatMul(Form::TN), &operands)?;
                self.head_gradient = self.head_gradient.or(transposed.then_some(gradient));
            }
            Op::AddBias => {
                self.accumulate(inputs[0], dy)?;
                self.weight(inputs[1], Op::ColumnSum, &[dy])?;
            }
            Op::Gelu => self.input(inputs[0], Op::GeluGrad, &[dy, inputs[0]])?,
            Op::Attention { heads } => {
                let (qkv, o, lse) = (inputs[0], results[0], results[1]);
                self.input(qkv, Op::AttentionGrad { heads }, &[qkv, o, lse, dy])?;
            }
            Op::Add => {
                self.accumulate(inputs[0], dy)?;
                self.accumulate(inputs[1], dy)?;
            }
            _ => unreachable!("a forward graph holds forward operations only"),
        }
        Ok(())
    }

    /// A forward value as the backward pass reads it: kept, or computed again.
    fn activation(&mut self, value: ValueId) -> Result<ValueId, ShapeError> {
        let Some(&definer) = self.definers.get(&value) else { return Ok(value) };
        match self.recompute {
            Recompute::Full => {
                for i in self.copied..=definer {
                    self.copy(i)?;
                }
                self.copied = self.copied.max(definer + 1);
            }
            Recompute::Attention if matches!(self.forward.nodes[definer].op, Op::Attention { .. }) => {
                if !self.copies.contains_key(&value) {
                    self.copy(definer)?;
                }
            }
            Recompute::Attention | Recompute::None => return Ok(value),
        }
        Ok(self.copies[&value])
    }

    /// Adds a copy of a forward node; values that have copies are read there.
    fn copy(&mut self, node: usize) -> Result<(), ShapeError> {
        let Node { op, inputs, results, .. } = &self.forward.nodes[node];
        let inputs: Vec<ValueId> = inputs.iter().map(|v| self.copies.get(v).copied().unwrap_or(*v)).collect();
        let copies = self.graph.push(Part::Input, *op, &inputs)?;
        self.copies.extend(results.iter().copied().zip(copies));
        Ok(())
    }

    fn activations(&mut self, operands: &[ValueId]) -> Result<Vec<ValueId>, ShapeError> {
        operands.iter().map(|&v| self.activation(v)).collect()
    }

    /// Adds a node for the gradient that flows to `to`.
    fn input(&mut self, to: ValueId, op: Op, operands: &[ValueId]) -> Result<(), ShapeError> {
        let operands = self.activations(operands)?;
        let gradient = self.graph.push_one(Part::Input, op, &operands)?;
        self.accumulate(to, gradient)
    }

    fn accumulate(&mut self, to: ValueId, gradient: ValueId) -> Result<(), ShapeError> {
        let sum = match self.cotangents.get(&to) {
            None => gradient,
            Some(&so_far) => self.graph.push_one(Part::Input, Op::Add, &[gradient, so_far])?,
        };
        self.cotangents.insert(to, sum);
        Ok(())
    }

    /// Adds a node for the gradient of a parameter.
    fn weight(&mut self, param: ValueId, op: Op, operands: &[ValueId]) -> Result<ValueId, ShapeError> {
        let Source::Param(id) = self.forward.value(param).source else {
            unreachable!("the second operand of a linear operation is a parameter")
        };
        let operands = self.activations(operands)?;
        let gradient = self.graph.push_one(Part::Weight, op, &operands)?;
        self.gradients.insert(gradient, id);
        Ok(gradient)
    }

    fn embedding(&mut self, table: Table, param: ValueId, operands: &[ValueId]) -> Result<(), ShapeError> {
        let entries = self.forward.value(param).shape[0] as u32;
        self.weight(param, Op::EmbedGrad { table, entries }, operands).map(|_| ())
    }
}
