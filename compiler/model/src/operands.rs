//! Operands of a kernel: how many bytes each has and what is done to it. The table form of the conventions in [`crate::kernel`].

use crate::kernel::{Epilogue, KernelOp, MatMul, Sink, Table, UpdateRule, Writes};

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
    pub access: Access,
}

/// Operands in order, without scratch.
pub fn operands(op: &KernelOp) -> Vec<Operand> {
    let mut list = List(Vec::new());
    match *op {
        KernelOp::Embed { sequences, context, width, vocab } => {
            let rows = words(&[sequences, context]);
            list.read(rows).read(words(&[vocab, width])).read(words(&[context, width])).write(rows * u64::from(width));
        }
        KernelOp::EmbedGrad { table, sequences, context, width, vocab, sink } => {
            let entries = match table {
                Table::Token => {
                    list.read(words(&[sequences, context]));
                    vocab
                }
                Table::Position => context,
            };
            list.read(words(&[sequences, context, width])).sink(words(&[entries, width]), sink);
        }
        KernelOp::LayerNorm { rows, width } => {
            let (x, r, w) = (words(&[rows, width]), words(&[rows]), words(&[width]));
            list.read(x).read(w).read(w).write(x).write(r).write(r);
        }
        KernelOp::LayerNormGrad { rows, width, residual } => {
            let (x, r, w) = (words(&[rows, width]), words(&[rows]), words(&[width]));
            list.read(x).read(x).read(r).read(r).read(w);
            if residual {
                list.read(x);
            }
            list.write(x);
        }
        KernelOp::GainGrad { rows, width, sink } => {
            let (x, r) = (words(&[rows, width]), words(&[rows]));
            list.read(x).read(x).read(r).read(r).sink(words(&[width]), sink);
        }
        KernelOp::BiasGrad { rows, width, sink } => {
            list.read(words(&[rows, width])).sink(words(&[width]), sink);
        }
        KernelOp::MatMul(ref matmul) => list.matmul(matmul),
        KernelOp::Attention { sequences, context, width, heads } => {
            let x = words(&[sequences, context, width]);
            list.read(3 * x).write(x).write(words(&[sequences, heads, context]));
        }
        KernelOp::AttentionGrad { sequences, context, width, heads } => {
            let x = words(&[sequences, context, width]);
            list.read(3 * x).read(x).read(words(&[sequences, heads, context])).read(x).write(3 * x);
        }
        KernelOp::CrossEntropy { rows, vocab, .. } => {
            list.read(words(&[rows])).update(words(&[rows, vocab])).write(8);
        }
        KernelOp::Update { len, rule } => {
            list.read(4 * len).updated(4 * len, rule).read(HYPER_BYTES);
        }
        KernelOp::Part(part) => part.operands(&mut list),
    }
    list.0
}

/// Bytes of one hyper-parameter vector.
pub const HYPER_BYTES: u64 = 4 * artifact::program::HYPER_LEN as u64;

/// Bytes of 4-byte elements in the given dimensions.
fn words(dims: &[u32]) -> u64 {
    4 * dims.iter().map(|&d| u64::from(d)).product::<u64>()
}

pub(crate) struct List(Vec<Operand>);

impl List {
    fn push(&mut self, bytes: u64, access: Access) -> &mut Self {
        self.0.push(Operand { bytes, access });
        self
    }

    pub(crate) fn read(&mut self, bytes: u64) -> &mut Self {
        self.push(bytes, Access::Read)
    }

    pub(crate) fn update(&mut self, bytes: u64) -> &mut Self {
        self.push(bytes, Access::Update)
    }

    pub(crate) fn write(&mut self, bytes: u64) -> &mut Self {
        self.push(bytes, Access::Write)
    }

    /// Weights and states.
    fn updated(&mut self, bytes: u64, rule: UpdateRule) -> &mut Self {
        match rule.writes {
            Writes::InPlace => self.update(bytes),
            Writes::Next => self.read(bytes).write(bytes),
        };
        for _ in 0..rule.states().len() {
            self.update(bytes);
        }
        self
    }

    fn sink(&mut self, bytes: u64, sink: Sink) {
        match sink {
            Sink::Store => _ = self.write(bytes),
            Sink::Add => _ = self.update(bytes),
            Sink::Update { rule, accumulated } => {
                if accumulated {
                    self.read(bytes);
                }
                self.read(HYPER_BYTES);
                self.updated(bytes, rule);
            }
        }
    }

    fn matmul(&mut self, matmul: &MatMul) {
        let &MatMul { m, n, k, epilogue, .. } = matmul;
        let c = words(&[m, n]);
        self.read(words(&[m, k])).read(words(&[k, n]));
        match epilogue {
            Epilogue::Store => _ = self.write(c),
            Epilogue::Bias => _ = self.read(words(&[n])).write(c),
            Epilogue::BiasResidual => _ = self.read(words(&[n])).read(c).write(c),
            Epilogue::BiasGelu => _ = self.read(words(&[n])).write(c).write(c),
            Epilogue::GeluGrad | Epilogue::Blend { .. } => _ = self.read(c).write(c),
            Epilogue::Gradient(sink) => self.sink(c, sink),
        }
    }
}
