//! The tensor graph.
//!
//! # Meaning
//!
//! A graph is a list of nodes in an order in which they can run, over *values*. A value is defined once: by a node, or from outside
//! (a parameter, token ids, an activation that another stage computed). A node has an operation, input values and one
//! or more result values; it has no effect but to define its results. All values are row-major tensors: activations and their gradients of
//! the graph's element type, token and target ids u32, the loss f64, everything else f32.
//!
//! `rows` is the number of tokens of a micro-batch, sequences x context, sequence by sequence; every activation is a matrix `[rows, columns]`.
//!
//! A graph describes one stage and one micro-batch. The same type holds the forward pass and its derivative (see
//! [`crate::derivative`]): the derivative's graph starts with the forward pass's values under the same ids and defines more.
//!
//! [`Graph::push`] is the only way to add a node. It infers the results' shapes and refuses operands that do not fit, so a graph that
//! exists is well-shaped.

use crate::kernel::{Form, Table};
use dsl::spec::Dtype;
use std::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub u32);

        impl $name {
            pub fn index(self) -> usize {
                self.0 as usize
            }
        }
    };
}

id!(
    /// A value of a [`Graph`].
    ValueId
);
id!(
    /// A parameter of a stage, in the order of the parameter list.
    ParamId
);

/// Dimensions, outermost first.
pub type Shape = Vec<u64>;

pub use artifact::program::Elem;

/// Elements of a model's activations.
pub fn elem(dtype: Dtype) -> Elem {
    match dtype {
        Dtype::F32 => Elem::F32,
        Dtype::Bf16 => Elem::Bf16,
    }
}

/// Where a value comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Result of a node.
    Node,
    Param(ParamId),
    /// Token ids of the micro-batch, u32 `[rows]`.
    Tokens,
    /// Target ids of the micro-batch, u32 `[rows]`.
    Targets,
    /// What the previous stage sent, `[rows, width]`.
    Input,
    /// Gradient of the stage's output, which the next stage sent, `[rows, width]`.
    OutputGradient,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Value {
    pub shape: Shape,
    pub elem: Elem,
    pub source: Source,
}

impl Value {
    pub fn bytes(&self) -> u64 {
        self.shape.iter().product::<u64>() * self.elem.bytes()
    }
}

/// An operation: inputs -> results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// tokens, token table, position table -> x
    Embed,
    /// x, gain, bias -> y, mean, rstd
    LayerNorm,
    /// a, b -> c
    MatMul(Form),
    /// x `[m, n]`, bias `[n]` -> y
    AddBias,
    /// x -> y
    Gelu,
    /// qkv -> o, lse
    Attention { heads: u32 },
    /// a, b -> c
    Add,
    /// targets, logits -> gradient of the logits (times `scale`, as bits of an f32), loss. The gradient is in place of the logits.
    CrossEntropy { scale_bits: u32 },
    /// dy, x, mean, rstd, gain -> dx
    LayerNormGrad,
    /// dy, x, mean, rstd -> gradient of the gain
    GainGrad,
    /// dy -> sum over the rows
    ColumnSum,
    /// dy, x (Gelu's input) -> dx
    GeluGrad,
    /// qkv, o, lse, do -> dqkv
    AttentionGrad { heads: u32 },
    /// `Token`: tokens, dx -> gradient of the table; `Position`: dx -> gradient. `entries`: rows of the table.
    EmbedGrad { table: Table, entries: u32 },
}

/// Which part of a micro-batch's work a node belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    Forward,
    /// Input gradients: what the previous stage waits for.
    Input,
    /// Weight gradients.
    Weight,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    pub op: Op,
    pub part: Part,
    pub inputs: Vec<ValueId>,
    pub results: Vec<ValueId>,
}

/// See the module's text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Graph {
    pub sequences: u32,
    pub context: u32,
    /// Of activations and their gradients.
    pub dtype: Dtype,
    pub values: Vec<Value>,
    pub nodes: Vec<Node>,
}

/// Operands that an operation cannot take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShapeError {
    pub op: Op,
    pub shapes: Vec<Shape>,
}

impl fmt::Display for ShapeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} cannot take operands of shapes {:?}", self.op, self.shapes)
    }
}

impl std::error::Error for ShapeError {}

impl Graph {
    pub fn new(sequences: u32, context: u32) -> Graph {
        Graph { sequences, context, dtype: Dtype::F32, values: Vec::new(), nodes: Vec::new() }
    }

    /// The same, with activations of `dtype`.
    pub fn storing(self, dtype: Dtype) -> Graph {
        Graph { dtype, ..self }
    }

    /// A graph with this one's values and no nodes: what a derivative starts from.
    pub fn with_same_values(&self) -> Graph {
        Graph { nodes: Vec::new(), ..self.clone() }
    }

    pub fn rows(&self) -> u64 {
        u64::from(self.sequences) * u64::from(self.context)
    }

    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.index()]
    }

    /// Adds a value that no node defines.
    pub fn external(&mut self, source: Source, elem: Elem, shape: Shape) -> ValueId {
        self.define(Value { shape, elem, source })
    }

    /// Adds a node; returns its results.
    pub fn push(&mut self, part: Part, op: Op, inputs: &[ValueId]) -> Result<Vec<ValueId>, ShapeError> {
        let shapes: Vec<&[u64]> = inputs.iter().map(|&i| self.value(i).shape.as_slice()).collect();
        // Gradients of parameters are summed in f32.
        let elem = if part == Part::Weight { Elem::F32 } else { elem(self.dtype) };
        let Some(found) = infer(op, &shapes, elem, self.sequences.into(), self.context.into()) else {
            return Err(ShapeError { op, shapes: shapes.into_iter().map(<[u64]>::to_vec).collect() });
        };
        let results: Vec<ValueId> =
            found.into_iter().map(|(elem, shape)| self.define(Value { shape, elem, source: Source::Node })).collect();
        self.nodes.push(Node { op, part, inputs: inputs.to_vec(), results: results.clone() });
        Ok(results)
    }

    /// [`Graph::push`] for an operation with one result.
    pub fn push_one(&mut self, part: Part, op: Op, inputs: &[ValueId]) -> Result<ValueId, ShapeError> {
        self.push(part, op, inputs).map(|results| results[0])
    }

    fn define(&mut self, value: Value) -> ValueId {
        let id =
            ValueId(u32::try_from(self.values.len()).expect("fewer than 2^32 values: the model's sizes are bounded"));
        self.values.push(value);
        id
    }
}

type Results = Vec<(Elem, Shape)>;

/// Element types and shapes of an operation's results, activations of `elem`; none if the operands do not fit.
fn infer(op: Op, inputs: &[&[u64]], elem: Elem, sequences: u64, context: u64) -> Option<Results> {
    let rows = sequences * context;
    let one = |shape: &[u64]| vec![(elem, shape.to_vec())];
    Some(match (op, inputs) {
        (Op::Embed, &[&[r], &[_, w], &[c, w2]]) if r == rows && c == context && w == w2 => one(&[rows, w]),
        (Op::LayerNorm, &[&[r, w], &[g], &[b]]) if g == w && b == w => {
            vec![(elem, vec![r, w]), (Elem::F32, vec![r]), (Elem::F32, vec![r])]
        }
        (Op::MatMul(form), &[a, b]) => one(&matmul(form, a, b)?),
        (Op::AddBias, &[x @ &[_, n], &[b]]) if b == n => one(x),
        (Op::Gelu, &[x]) => one(x),
        (Op::Attention { heads }, &[&[r, w3]]) if r == rows && w3 % (3 * u64::from(heads)) == 0 => {
            vec![(elem, vec![r, w3 / 3]), (Elem::F32, vec![sequences, heads.into(), context])]
        }
        (Op::Add, &[a, b]) if a == b => one(a),
        (Op::CrossEntropy { .. }, &[&[t], logits @ &[r, _]]) if t == r => {
            vec![(elem, logits.to_vec()), (Elem::F64, vec![1])]
        }
        (Op::LayerNormGrad, &[dy @ &[r, w], x, &[m], &[s], &[g]]) if dy == x && m == r && s == r && g == w => one(x),
        (Op::GainGrad, &[dy @ &[r, w], x, &[m], &[s]]) if dy == x && m == r && s == r => one(&[w]),
        (Op::ColumnSum, &[&[_, n]]) => one(&[n]),
        (Op::GeluGrad, &[dy, x]) if dy == x => one(x),
        (Op::AttentionGrad { heads }, &[qkv @ &[r, w3], o, &[s, h, c], d])
            if o == [r, w3 / 3] && d == o && [s, h, c] == [sequences, heads.into(), context] && r == rows =>
        {
            one(qkv)
        }
        (Op::EmbedGrad { table: Table::Token, entries }, &[&[t], &[r, w]]) if t == r => one(&[entries.into(), w]),
        (Op::EmbedGrad { table: Table::Position, entries }, &[&[r, w]])
            if r == rows && u64::from(entries) == context =>
        {
            one(&[entries.into(), w])
        }
        _ => return None,
    })
}

fn matmul(form: Form, a: &[u64], b: &[u64]) -> Option<Shape> {
    let (&[a0, a1], &[b0, b1]) = (a, b) else { return None };
    let (m, k) = if form == Form::TN { (a1, a0) } else { (a0, a1) };
    let (n, k2) = if form == Form::NT { (b0, b1) } else { (b1, b0) };
    (k == k2).then(|| vec![m, n])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operands_that_do_not_fit_are_refused() {
        let mut graph = Graph::new(1, 4);
        let x = graph.external(Source::Input, Elem::F32, vec![4, 6]);
        let w = graph.external(Source::Param(ParamId(0)), Elem::F32, vec![5, 3]);
        let error = graph.push(Part::Forward, Op::MatMul(Form::NN), &[x, w]).unwrap_err();
        assert_eq!(error.shapes, [vec![4, 6], vec![5, 3]]);
        assert!(graph.nodes.is_empty());
    }

    #[test]
    fn matmul_forms() {
        assert_eq!(matmul(Form::NN, &[2, 3], &[3, 5]), Some(vec![2, 5]));
        assert_eq!(matmul(Form::NT, &[2, 3], &[5, 3]), Some(vec![2, 5]));
        assert_eq!(matmul(Form::TN, &[3, 2], &[3, 5]), Some(vec![2, 5]));
        assert_eq!(matmul(Form::TN, &[2, 3], &[3, 5]), None);
    }
}
