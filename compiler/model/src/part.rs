//! Parts of an update that looks at more than one element of a gradient at a time: norms, momentum ahead of a matrix product, scaling
//! by what was summed. An update is a sequence of these, of matrix products and of [`KernelOp::Update`]: see [`crate::update`].
//!
//! Sums are made in f64 in an order that depends on the shape alone, so that they have the same bits on every stage and CPU class.
//!
//! [`KernelOp::Update`]: crate::kernel::KernelOp::Update

use crate::operands::{Access, HYPER_BYTES, List};

/// See the module's text. Operands are listed in order; hyper-parameters are those of [`artifact::optimizer`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum UpdatePart {
    /// x [len] -> sum f64[1], the sum of its squares; with `add` sum is updated: the new sum is added to it.
    SumSquares { len: u64, add: bool },
    /// sum f64[1], inout x [len]: x is multiplied by a factor of the norm n = sqrt(sum), made in f64 and rounded once.
    Scale { len: u64, factor: Factor },
    /// other [len], inout g [len]: g += other. What a tied table's two ends have each summed.
    Add { len: u64 },
    /// hyper, inout g [len], m [len]: m = b1 m + (1-b1) g; g becomes the look-ahead g + b1 (m - g), Nesterov's.
    Momentum { len: u64 },
    /// hyper, inout g [len], before [len]: g becomes g + h8 (g - before); before becomes the g that was. MARS.
    Correct { len: u64 },
    /// hyper, inout x [rows, width], v [width]: v = b2 v + (1-b2) (mean of the squares of x's column); the column is divided by
    /// sqrt(v) + 1e-10. NorMuon.
    Columns { rows: u32, width: u32 },
    /// hyper, g [len], inout m [len]: m = b1 m + (1-b1) g. SOAP.
    Average { len: u64 },
    /// hyper, g, m [len], inout v [len] -> x [len]: v = b2 v + (1-b2) g²; x = m / (sqrt(h4 v) + eps). SOAP.
    Precondition { len: u64 },
    /// hyper, a [dim, dim], symmetric, inout q [dim, dim], v [rows, columns] -> work [dim + 4, dim]. SOAP: see [`Side`].
    ///
    /// q is the unit matrix if h8 is 1. Then, as often as h11 says: q's columns are sorted by the diagonal of qᵀ a q, the largest first, the first
    /// of equal ones first, and v along the side in the same way; q becomes the Q of the QR decomposition of a q, by reflections.
    /// Every sum is ascending, in fused multiply-adds; the squares of a column are summed in f64. `work` holds what is in the making, and nothing if h11 is 0.
    Turn { rows: u32, columns: u32, side: Side },
}

/// The side of a matrix [rows, columns] whose basis turns; `dim` is its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    Rows,
    Columns,
}

impl Side {
    pub fn dim(self, rows: u32, columns: u32) -> u32 {
        match self {
            Side::Rows => rows,
            Side::Columns => columns,
        }
    }
}

/// What [`UpdatePart::Scale`] multiplies by; n is the norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Factor {
    /// 1 / (n + 1e-7)
    Unit,
    /// max / n if n > max, else 1. `max_bits` is an f64.
    AtMost { max_bits: u64 },
    /// target / (n + 1e-10). `target_bits` is an f64.
    To { target_bits: u64 },
}

impl UpdatePart {
    pub(crate) fn operands(self, list: &mut List) {
        match self {
            UpdatePart::SumSquares { len, add } => {
                list.read(4 * len);
                list.sum(if add { Access::Update } else { Access::Write });
            }
            UpdatePart::Scale { len, .. } => _ = list.sum(Access::Read).update(4 * len),
            UpdatePart::Add { len } => _ = list.read(4 * len).update(4 * len),
            UpdatePart::Momentum { len } | UpdatePart::Correct { len } => {
                list.read(HYPER_BYTES).update(4 * len).update(4 * len);
            }
            UpdatePart::Columns { rows, width } => {
                let (rows, width) = (u64::from(rows), u64::from(width));
                list.read(HYPER_BYTES).update(4 * rows * width).update(4 * width);
            }
            UpdatePart::Average { len } => _ = list.read(HYPER_BYTES).read(4 * len).update(4 * len),
            UpdatePart::Precondition { len } => {
                list.read(HYPER_BYTES).read(4 * len).read(4 * len).update(4 * len).write(4 * len);
            }
            UpdatePart::Turn { rows, columns, side } => {
                let dim = u64::from(side.dim(rows, columns));
                list.read(HYPER_BYTES).read(4 * dim * dim).update(4 * dim * dim);
                list.update(4 * u64::from(rows) * u64::from(columns)).write(Self::work_bytes(dim));
            }
        }
    }

    /// The exported symbol.
    pub(crate) fn name(self) -> String {
        match self {
            UpdatePart::SumSquares { len, add } => format!("sum_squares_{len}{}", if add { "_add" } else { "" }),
            UpdatePart::Scale { len, factor } => match factor {
                Factor::Unit => format!("scale_{len}_unit"),
                Factor::AtMost { max_bits } => format!("scale_{len}_at_most_{max_bits:016x}"),
                Factor::To { target_bits } => format!("scale_{len}_to_{target_bits:016x}"),
            },
            UpdatePart::Add { len } => format!("add_{len}"),
            UpdatePart::Momentum { len } => format!("momentum_{len}"),
            UpdatePart::Correct { len } => format!("correct_{len}"),
            UpdatePart::Columns { rows, width } => format!("columns_{rows}x{width}"),
            UpdatePart::Average { len } => format!("average_{len}"),
            UpdatePart::Precondition { len } => format!("precondition_{len}"),
            UpdatePart::Turn { rows, columns, side } => {
                let side = match side {
                    Side::Rows => "rows",
                    Side::Columns => "columns",
                };
                format!("turn_{rows}x{columns}_{side}")
            }
        }
    }

    /// Of [`UpdatePart::Turn`].
    pub fn work_bytes(dim: u64) -> u64 {
        4 * (dim + 4) * dim
    }
}
