//! Operands of a kernel: how many bytes each has, of which elements, and what is done to it. The table form of the conventions in [`crate::kernel`].

use crate::graph::{Elem, elem};
use crate::kernel::{Dtype, Epilogue, Kernel, KernelOp, MatMul, Sink, Table, UpdateRule, Writes};

/// What a kernel does to an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    Read,
    /// Read, then written.
    Update,
    /// Written without being read.
    Write,
}

impl Access {
    pub fn reads(self) -> bool {
        self != Access::Write
    }

    pub fn writes(self) -> bool {
        self != Access::Read
    }
}

/// One operand of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operand {
    pub bytes: u64,
    pub elem: Elem,
    pub access: Access,
    /// Whether it may be where the kernel's other such operand is.
    pub shares: bool,
}

impl Kernel {
    /// Operands in order, without scratch.
    pub fn operands(&self) -> Vec<Operand> {
        operands_of(&self.op, self.dtype)
    }
}

/// Operands of an operation in f32, without scratch.
pub fn operands(op: &KernelOp) -> Vec<Operand> {
    operands_of(op, Dtype::F32)
}

/// Operands of an operation in order, without scratch.
pub fn operands_of(op: &KernelOp, dtype: Dtype) -> Vec<Operand> {
    let mut list = List { operands: Vec::new(), activation: elem(dtype) };
    match *op {
        KernelOp::Embed { sequences, context, width, vocab } => {
            let rows = len(&[sequences, context]);
            list.ids(rows).read(words(&[vocab, width])).read(words(&[context, width]));
            list.activation(rows * u64::from(width), Access::Write);
        }
        KernelOp::EmbedGrad { table, sequences, context, width, vocab, sink } => {
            let entries = match table {
                Table::Token => {
                    list.ids(len(&[sequences, context]));
                    vocab
                }
                Table::Position => context,
            };
            list.take(len(&[sequences, context, width])).sink(len(&[entries, width]), sink, false);
        }
        KernelOp::LayerNorm { rows, width } => {
            let (x, r, w) = (len(&[rows, width]), words(&[rows]), words(&[width]));
            list.take(x).read(w).read(w).give(x).write(r).write(r);
        }
        KernelOp::LayerNormGrad { rows, width, residual } => {
            let (x, r, w) = (len(&[rows, width]), words(&[rows]), words(&[width]));
            list.take(x).take(x).read(r).read(r).read(w);
            if residual {
                list.take(x);
            }
            list.give(x);
        }
        KernelOp::GainGrad { rows, width, sink } => {
            let (x, r) = (len(&[rows, width]), words(&[rows]));
            list.take(x).take(x).read(r).read(r).sink(len(&[width]), sink, false);
        }
        KernelOp::BiasGrad { rows, width, sink } => {
            list.take(len(&[rows, width])).sink(len(&[width]), sink, false);
        }
        KernelOp::MatMul(ref matmul) => list.matmul(matmul),
        KernelOp::Attention { sequences, context, width, heads } => {
            let x = len(&[sequences, context, width]);
            list.take(3 * x).give(x).write(words(&[sequences, heads, context]));
        }
        KernelOp::AttentionGrad { sequences, context, width, heads } => {
            let x = len(&[sequences, context, width]);
            list.take(3 * x).take(x).read(words(&[sequences, heads, context])).take(x).give(3 * x);
        }
        KernelOp::CrossEntropy { rows, vocab, .. } => {
            list.ids(len(&[rows])).activation(len(&[rows, vocab]), Access::Update).sum(Access::Write);
        }
        KernelOp::Update { len, rule } => {
            list.read(4 * len).updated(len, rule, dtype == Dtype::Bf16).read(HYPER_BYTES);
        }
        KernelOp::Part(part) => part.operands(&mut list),
    }
    list.operands
}

/// Bytes of one hyper-parameter vector.
pub const HYPER_BYTES: u64 = 4 * artifact::program::HYPER_LEN as u64;

/// Elements in the given dimensions.
fn len(dims: &[u32]) -> u64 {
    dims.iter().map(|&d| u64::from(d)).product()
}

/// Bytes of 4-byte elements in the given dimensions.
fn words(dims: &[u32]) -> u64 {
    4 * len(dims)
}

/// A list in the making. Where nothing else is said, elements are f32.
pub(crate) struct List {
    operands: Vec<Operand>,
    /// Element type of activations.
    activation: Elem,
}

impl List {
    fn push(&mut self, bytes: u64, elem: Elem, access: Access) -> &mut Self {
        self.operands.push(Operand { bytes, elem, access, shares: false });
        self
    }

    pub(crate) fn read(&mut self, bytes: u64) -> &mut Self {
        self.push(bytes, Elem::F32, Access::Read)
    }

    pub(crate) fn update(&mut self, bytes: u64) -> &mut Self {
        self.push(bytes, Elem::F32, Access::Update)
    }

    pub(crate) fn write(&mut self, bytes: u64) -> &mut Self {
        self.push(bytes, Elem::F32, Access::Write)
    }

    /// A sum in f64.
    pub(crate) fn sum(&mut self, access: Access) -> &mut Self {
        self.push(8, Elem::F64, access)
    }

    fn ids(&mut self, len: u64) -> &mut Self {
        self.push(4 * len, Elem::U32, Access::Read)
    }

    fn activation(&mut self, len: u64, access: Access) -> &mut Self {
        self.push(len * self.activation.bytes(), self.activation, access)
    }

    /// An activation that is read.
    fn take(&mut self, len: u64) -> &mut Self {
        self.activation(len, Access::Read)
    }

    /// An activation that is written.
    fn give(&mut self, len: u64) -> &mut Self {
        self.activation(len, Access::Write)
    }

    /// The last operand may be where another is.
    fn shared(&mut self) -> &mut Self {
        self.operands.iter_mut().last().expect("an operand").shares = true;
        self
    }

    /// Weights and states, and the copy if there is one.
    fn updated(&mut self, len: u64, rule: UpdateRule, copied: bool) -> &mut Self {
        match rule.writes {
            Writes::InPlace => self.update(4 * len),
            Writes::Next if rule.compensates() => self.read(4 * len).read(4 * len).shared().write(4 * len).shared(),
            Writes::Next => self.read(4 * len).write(4 * len),
        };
        if rule.predicts() {
            self.write(4 * len);
        }
        for _ in 0..rule.states().len() {
            self.update(4 * len);
        }
        if copied {
            self.push(Elem::Bf16.bytes() * len, Elem::Bf16, Access::Write);
        }
        self
    }

    /// `copied`: products read the weight, so that there is a copy if they read bf16.
    fn sink(&mut self, len: u64, sink: Sink, copied: bool) {
        match sink {
            Sink::Store => _ = self.write(4 * len),
            Sink::Add => _ = self.update(4 * len),
            Sink::Compensated { add } => {
                let access = if add { Access::Update } else { Access::Write };
                self.read(HYPER_BYTES).read(4 * len).read(4 * len).push(4 * len, Elem::F32, access);
            }
            Sink::Update { rule, accumulated } => {
                if accumulated {
                    self.read(4 * len);
                }
                self.read(HYPER_BYTES);
                self.updated(len, rule, copied && self.activation == Elem::Bf16);
            }
        }
    }

    fn matmul(&mut self, matmul: &MatMul) {
        let &MatMul { m, n, k, epilogue, .. } = matmul;
        let c = len(&[m, n]);
        self.take(len(&[m, k])).take(len(&[k, n]));
        match epilogue {
            Epilogue::Store => _ = self.give(c),
            Epilogue::Bias => _ = self.read(words(&[n])).give(c),
            Epilogue::BiasResidual => _ = self.read(words(&[n])).take(c).give(c),
            Epilogue::BiasGelu => _ = self.read(words(&[n])).give(c).give(c),
            Epilogue::GeluGrad | Epilogue::Blend { .. } => _ = self.take(c).give(c),
            Epilogue::Average => _ = self.read(HYPER_BYTES).update(4 * c),
            Epilogue::Gradient(sink) => self.sink(c, sink, true),
        }
    }
}
