//! The reference GPT: the forward graph of the layers of one stage, and its parameters.
//!
//! A block is `x2 = x + out(attention(qkv(ln1(x))))`, `y = x2 + down(gelu(up(ln2(x2))))`; linear layers are `x W + b` with W `[in, out]`.
//! The head is a LayerNorm, a projection without bias and the cross-entropy. A tied head multiplies by the token embedding's table, whose
//! rows are the logits' columns.

use crate::dims::Dims;
use crate::graph::{Elem, Graph, Op, ParamId, Part, ShapeError, Source, ValueId, elem};
use crate::kernel::Form;
use artifact::program::Init;
use dsl::spec::{Dtype, Layer};

/// A parameter, without its place in memory.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamDecl {
    pub name: String,
    pub shape: Vec<u64>,
    pub init: Init,
    /// Its value in the graph.
    pub value: ValueId,
    /// Whether matrix products read a bf16 copy of it.
    pub copied: bool,
}

impl ParamDecl {
    /// Elements.
    pub fn len(&self) -> u64 {
        self.shape.iter().product()
    }
}

/// Forward pass of one stage.
#[derive(Clone, Debug, PartialEq)]
pub struct StageGraph {
    pub graph: Graph,
    /// In the order in which they are listed everywhere.
    pub params: Vec<ParamDecl>,
    /// What the previous stage sends; none on the first stage.
    pub input: Option<ValueId>,
    /// What the next stage gets; none on the last stage.
    pub output: Option<ValueId>,
    /// Gradient of the logits; on the last stage only.
    pub logits_gradient: Option<ValueId>,
    /// The tied table that the stage has an end of, or both.
    pub table: Option<ParamId>,
}

/// The graph of a stage's layers. `loss_scale` multiplies the loss's gradient.
pub fn stage_graph(dims: &Dims, layers: &[Layer], loss_scale: f32) -> Result<StageGraph, ShapeError> {
    let graph = Graph::new(dims.microbatch, dims.context).storing(dims.dtype);
    let mut builder = Builder { dims: *dims, graph, params: Vec::new(), table: None };
    let rows = builder.graph.rows();
    let first = layers.first() == Some(&Layer::Embed);
    let input =
        (!first).then(|| builder.graph.external(Source::Input, elem(dims.dtype), vec![rows, dims.width.into()]));
    let mut current = input;
    let mut logits_gradient = None;
    for &layer in layers {
        current = match (layer, current) {
            (Layer::Embed, _) => Some(builder.embed()?),
            (Layer::Block(l), Some(x)) => Some(builder.block(l, x)?),
            (Layer::Head, Some(x)) => {
                logits_gradient = Some(builder.head(x, loss_scale)?);
                None
            }
            (_, None) => unreachable!("layers are in forward order: partition checked it"),
        };
    }
    builder.mark_copied();
    let Builder { graph, params, table, .. } = builder;
    Ok(StageGraph { graph, params, input, output: current, logits_gradient, table: table.filter(|_| dims.tied) })
}

struct Builder {
    dims: Dims,
    graph: Graph,
    params: Vec<ParamDecl>,
    /// The token embedding's.
    table: Option<ParamId>,
}

impl Builder {
    fn param(&mut self, name: String, shape: &[u32], init: Init) -> ValueId {
        let id = ParamId(self.params.len() as u32);
        let shape: Vec<u64> = shape.iter().map(|&d| d.into()).collect();
        let value = self.graph.external(Source::Param(id), Elem::F32, shape.clone());
        self.params.push(ParamDecl { name, shape, init, value, copied: false });
        value
    }

    /// Products read bf16 where activations are bf16.
    fn mark_copied(&mut self) {
        let products = || self.graph.nodes.iter().filter(|node| matches!(node.op, Op::MatMul(_)));
        for param in self.params.iter_mut().filter(|_| self.dims.dtype == Dtype::Bf16) {
            param.copied = products().any(|node| node.inputs[1] == param.value);
        }
    }

    fn push(&mut self, op: Op, inputs: &[ValueId]) -> Result<ValueId, ShapeError> {
        self.graph.push_one(Part::Forward, op, inputs)
    }

    fn embed(&mut self) -> Result<ValueId, ShapeError> {
        let Dims { width, context, .. } = self.dims;
        let rows = self.graph.rows();
        let tokens = self.graph.external(Source::Tokens, Elem::U32, vec![rows]);
        let token_table = self.token_table();
        let position_table = self.param("embed.pos".into(), &[context, width], Init::Normal { std: STD });
        self.push(Op::Embed, &[tokens, token_table, position_table])
    }

    fn token_table(&mut self) -> ValueId {
        let Dims { width, vocab, .. } = self.dims;
        if let Some(id) = self.table {
            return self.params[id.index()].value;
        }
        self.table = Some(ParamId(self.params.len() as u32));
        self.param("embed.tok".into(), &[vocab, width], Init::Normal { std: STD })
    }

    fn block(&mut self, l: u32, x: ValueId) -> Result<ValueId, ShapeError> {
        let Dims { width, heads, .. } = self.dims;
        let hidden = self.dims.hidden();
        let residual = STD / f64::from(2 * self.dims.layers).sqrt();
        let y1 = self.layer_norm(&format!("block.{l}.ln1"), x)?;
        let qkv = self.linear(&format!("block.{l}.attn.qkv"), y1, width, 3 * width, STD)?;
        let o = self.push(Op::Attention { heads }, &[qkv])?;
        let projected = self.linear(&format!("block.{l}.attn.out"), o, width, width, residual)?;
        let x2 = self.push(Op::Add, &[projected, x])?;
        let y2 = self.layer_norm(&format!("block.{l}.ln2"), x2)?;
        let up = self.linear(&format!("block.{l}.mlp.up"), y2, width, hidden, STD)?;
        let act = self.push(Op::Gelu, &[up])?;
        let down = self.linear(&format!("block.{l}.mlp.down"), act, hidden, width, residual)?;
        self.push(Op::Add, &[down, x2])
    }

    /// Returns the gradient of the logits.
    fn head(&mut self, x: ValueId, loss_scale: f32) -> Result<ValueId, ShapeError> {
        let Dims { width, vocab, .. } = self.dims;
        let y = self.layer_norm("final.ln", x)?;
        let (weight, form) = if self.dims.tied {
            (self.token_table(), Form::NT)
        } else {
            (self.param("head.weight".into(), &[width, vocab], Init::Normal { std: STD }), Form::NN)
        };
        let logits = self.push(Op::MatMul(form), &[y, weight])?;
        let rows = self.graph.rows();
        let targets = self.graph.external(Source::Targets, Elem::U32, vec![rows]);
        self.push(Op::CrossEntropy { scale_bits: loss_scale.to_bits() }, &[targets, logits])
    }

    fn layer_norm(&mut self, name: &str, x: ValueId) -> Result<ValueId, ShapeError> {
        let width = self.dims.width;
        let gain = self.param(format!("{name}.gain"), &[width], Init::Ones);
        let bias = self.param(format!("{name}.bias"), &[width], Init::Zeros);
        self.push(Op::LayerNorm, &[x, gain, bias])
    }

    fn linear(&mut self, name: &str, x: ValueId, from: u32, to: u32, std: f64) -> Result<ValueId, ShapeError> {
        let weight = self.param(format!("{name}.weight"), &[from, to], Init::Normal { std });
        let bias = self.param(format!("{name}.bias"), &[to], Init::Zeros);
        let product = self.push(Op::MatMul(Form::NN), &[x, weight])?;
        self.push(Op::AddBias, &[product, bias])
    }
}

/// Standard deviation of the initial weights.
const STD: f64 = 0.02;
