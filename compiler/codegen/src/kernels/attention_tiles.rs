//! What attention and its gradient share: packing, products of register tiles, the strategy.

use super::math::Region;
use super::nest::{Nest, Tensor};
use super::strategy;
use model::target::CpuClass;
use model::workspace::AttentionTiles;

/// Rows of a tile of elementwise work: four vectors, so that the long polynomials overlap and still fit the registers.
pub const ELEMENTWISE_ROWS: u64 = 2;

/// Steps of a product that are unrolled.
const DEPTH: u64 = 8;

/// The sizes of a kernel.
pub struct Shape {
    pub sequences: u64,
    pub context: u64,
    pub width: u64,
    pub heads: u64,
    /// Elements of a head.
    pub head: u64,
    pub lanes: u64,
    pub tiles: AttentionTiles,
}

impl Shape {
    pub fn new(sequences: u32, context: u32, width: u32, heads: u32, cpu: CpuClass) -> Self {
        Self {
            sequences: sequences.into(),
            context: context.into(),
            width: width.into(),
            heads: heads.into(),
            head: (width / heads).into(),
            lanes: cpu.lanes().into(),
            tiles: AttentionTiles::new(context, width, heads, cpu),
        }
    }

    /// What scores are multiplied by.
    pub fn scale(&self) -> f32 {
        (1.0 / (self.head as f64).sqrt()) as f32
    }

    fn is_padded(&self) -> bool {
        self.tiles.context != self.context || self.tiles.head != self.head
    }
}

/// Index values of one head: its sequence, its number, its first row and its first column.
pub struct Head {
    pub sequence: String,
    pub number: String,
    pub row: String,
    pub column: String,
}

/// Loops over sequences and heads, carrying tensors.
pub fn each_head(
    n: &mut Nest,
    s: &Shape,
    carried: &[&Tensor],
    body: impl FnOnce(&mut Nest, &Head, Vec<Tensor>) -> Vec<Tensor>,
) -> Vec<Tensor> {
    let (zero, sequences, heads) = (n.index(0), n.index(s.sequences), n.index(s.heads));
    let (context, size) = (n.index(s.context), n.index(s.head));
    n.repeat((&zero, &sequences, 1), carried, |n, sequence, carried| {
        let row = n.op("row", &format!("arith.muli {sequence}, {context} : index"));
        let carried: Vec<_> = carried.iter().collect();
        n.repeat((&zero, &heads, 1), &carried, |n, number, carried| {
            let column = n.op("column", &format!("arith.muli {number}, {size} : index"));
            let head = Head { sequence: sequence.into(), number: number.into(), row, column };
            body(n, &head, carried)
        })
    })
}

/// A tensor full of `value`. `mark`: `tile` for one that fits the registers, `fill` for one in memory.
pub fn filled(n: &mut Nest, shape: &[u64], value: f32, mark: &str) -> Tensor {
    let empty = if mark == "tile" { n.empty(shape) } else { n.memory(shape) };
    let (iterators, map) = if shape.len() == 1 { ("p", "i") } else { ("pp", "ij") };
    n.generic(mark, iterators, &[], (&empty, map), |r, _| r.constant(value))
}

/// Scratch for a packed operand; zeros where it may not be covered.
fn scratch(n: &mut Nest, s: &Shape, shape: &[u64]) -> Tensor {
    if s.is_padded() { filled(n, shape, 0.0, "fill") } else { n.memory(shape) }
}

/// The head's columns of `from` that start at `offset`.
fn head_part(n: &mut Nest, s: &Shape, from: &Tensor, head: &Head, offset: u64) -> Tensor {
    let offset = n.index(offset);
    let column = n.op("column", &format!("arith.addi {}, {offset} : index", head.column));
    n.cut(from, &[&head.row, &column], &[s.context, s.head], 2)
}

/// [context, head], padded, times `scale`.
pub fn pack(n: &mut Nest, s: &Shape, from: &Tensor, head: &Head, offset: u64, scale: Option<f32>) -> Tensor {
    let into = scratch(n, s, &[s.tiles.context, s.tiles.head]);
    let part = head_part(n, s, from, head, offset);
    let sizes = [s.context, s.head];
    let place = n.cut(&into, &["0", "0"], &sizes, 2);
    let packed = n.generic("pack", "pp", &[(&part, "ij")], (&place, "ij"), |r, e| times(r, &e[0], scale));
    n.put(&packed, &into, &["0", "0"], &sizes)
}

/// [head, context], padded, times `scale`.
pub fn pack_transposed(n: &mut Nest, s: &Shape, from: &Tensor, head: &Head, offset: u64, scale: Option<f32>) -> Tensor {
    let into = scratch(n, s, &[s.tiles.head, s.tiles.context]);
    let part = head_part(n, s, from, head, offset);
    let sizes = [s.head, s.context];
    let place = n.cut(&into, &["0", "0"], &sizes, 2);
    let packed = n.generic("transpose", "pp", &[(&part, "ji")], (&place, "ij"), |r, e| times(r, &e[0], scale));
    n.put(&packed, &into, &["0", "0"], &sizes)
}

/// x times `scale`. A plain copy adds zero: one that computes nothing would be folded into a copy of memory, which calls a library.
pub fn times(r: &mut Region, x: &str, scale: Option<f32>) -> String {
    match scale {
        Some(scale) => {
            let scale = r.constant(scale);
            r.mul(x, &scale)
        }
        None => {
            let zero = r.constant(0.0);
            r.add(x, &zero)
        }
    }
}

/// Loops over the register tiles of `out`.
pub fn each_tile(
    n: &mut Nest,
    (out, rows, columns): (&Tensor, u64, u64),
    body: impl FnOnce(&mut Nest, &str, &str, &Tensor) -> Tensor,
) -> Tensor {
    let (zero, height, width) = (n.index(0), n.index(out.shape[0]), n.index(out.shape[1]));
    let mut done = n.repeat((&zero, &height, rows), &[out], |n, i, c| {
        n.repeat((&zero, &width, columns), &[&c[0]], |n, j, c| vec![body(n, i, j, &c[0])])
    });
    done.remove(0)
}

/// A register tile of A^T B over all of the first dimension: A is [depth, m], B [depth, n]; the tile is rows from A's column on, columns
/// from B's.
pub fn product(n: &mut Nest, depth: u64, a: (&Tensor, &str, u64), b: (&Tensor, &str, u64)) -> Tensor {
    let end = n.index(depth);
    product_over(n, &end, a, b)
}

/// As [`product`], over the first dimension up to `end`, a multiple of 8.
pub fn product_over(n: &mut Nest, end: &str, a: (&Tensor, &str, u64), b: (&Tensor, &str, u64)) -> Tensor {
    let start = filled(n, &[a.2, b.2], 0.0, "tile");
    accumulate(n, end, a, b, start)
}

/// Adds A^T B, as in [`product_over`], to a register tile.
pub fn accumulate(
    n: &mut Nest,
    end: &str,
    (a, i, rows): (&Tensor, &str, u64),
    (b, j, columns): (&Tensor, &str, u64),
    start: Tensor,
) -> Tensor {
    steps(n, end, start, |n, k| {
        let a = n.cut(a, &[k, i], &[DEPTH, rows], 2);
        ("(k, m)", a, n.cut(b, &[k, j], &[DEPTH, columns], 2))
    })
}

/// A register tile of A B over the columns of A up to `end`: A is [m, depth], B [depth, n].
pub fn product_of_rows(n: &mut Nest, end: &str, a: (&Tensor, &str, u64), b: (&Tensor, &str, u64)) -> Tensor {
    let start = filled(n, &[a.2, b.2], 0.0, "tile");
    steps(n, end, start, |n, k| {
        let tile = n.cut(a.0, &[a.1, k], &[a.2, DEPTH], 2);
        ("(m, k)", tile, n.cut(b.0, &[k, b.1], &[DEPTH, b.2], 2))
    })
}

fn steps(
    n: &mut Nest,
    end: &str,
    start: Tensor,
    operands: impl FnOnce(&mut Nest, &str) -> (&'static str, Tensor, Tensor),
) -> Tensor {
    let zero = n.index(0);
    let mut done = n.repeat((&zero, end, DEPTH), &[&start], |n, k, c| {
        let (map, a, b) = operands(n, k);
        vec![contract(n, map, &a, &b, &c[0])]
    });
    done.remove(0)
}

/// One step of a product: `a` is [rows, depth] or [depth, rows], as `a_map` says.
fn contract(n: &mut Nest, a_map: &str, a: &Tensor, b: &Tensor, sum: &Tensor) -> Tensor {
    let map = |to: &str| format!("affine_map<(m, n, k) -> {to}>");
    let text = format!(
        "linalg.matmul indexing_maps = [{}, {}, {}] ins({}, {} : {}, {}) outs({} : {ty}) -> {ty}",
        map(a_map),
        map("(k, n)"),
        map("(m, n)"),
        a.name,
        b.name,
        a.ty(),
        b.ty(),
        sum.name,
        ty = sum.ty(),
    );
    Tensor::new(n.op("sum", &text), &sum.shape)
}

/// How many of the rows of the block at `at` exist.
pub fn rows_left(n: &mut Nest, s: &Shape, at: &str) -> String {
    let (context, block) = (n.index(s.context), n.index(s.tiles.block));
    let left = n.op("left", &format!("arith.subi {context}, {at} : index"));
    n.op("count", &format!("arith.minui {left}, {block} : index"))
}

/// Writes one row of a head, [head], to `into` at a row and column, times `scale`.
pub fn copy_row(n: &mut Nest, from: &Tensor, into: &Tensor, place: [&str; 2], scale: Option<f32>) -> Tensor {
    let sizes = [1, from.shape[0]];
    let old = n.cut(into, &place, &sizes, 1);
    let row = n.generic("row", "p", &[(from, "i")], (&old, "i"), |r, e| times(r, &e[0], scale));
    n.put(&row, into, &place, &sizes)
}

/// Tiles what goes through memory; register tiles are vectorised as they are.
pub fn strategy(s: &Shape) -> String {
    let lanes = s.lanes;
    let mut text = String::from(
        "transform.named_sequence @__transform_main(%m: !transform.any_op) {\n  \
         %f = transform.structured.match ops{[\"func.func\"]} in %m : (!transform.any_op) -> !transform.any_op\n",
    );
    let row_by_row = format!(
        "  %tile, %loops:2 = transform.structured.tile_using_for %one tile_sizes [1, {lanes}] : (!transform.any_op) -> (!transform.any_op, !transform.any_op, !transform.any_op)\n"
    );
    text += &each_marked("fills", "fill", &row_by_row);
    text += &each_marked("rows", "row", &strategy::vectors("%one", &[], s.head, lanes));
    text += &each_marked("lists", "list", &strategy::vectors("%one", &[], s.context, lanes));
    text += &each_marked("packs", "pack", &strategy::vectors("%one", &[s.context], s.head, lanes));
    text += &each_marked("transposes", "transpose", &strategy::blocks("%one", 0, s.head, lanes, 2));
    text += strategy::CLEAN;
    text += &each_marked("transpose_parts", "transpose", &strategy::blocks("%one", 1, s.context, lanes, 2));
    text += strategy::CLEAN;
    text += "  %products = transform.structured.match ops{[\"linalg.matmul\"]} in %f : (!transform.any_op) -> !transform.any_op\n  \
             transform.structured.vectorize %products {create_named_contraction} : !transform.any_op\n";
    text += strategy::VECTORISE_ALL;
    text += "  transform.apply_patterns to %f {\n    \
             transform.apply_patterns.vector.reduction_to_contract\n    \
             transform.apply_patterns.canonicalization } : !transform.any_op\n  transform.yield\n}\n";
    text + &strategy::lower_columns(lanes)
}

/// Does `body` to every `linalg.generic` with a mark, as `%one`.
fn each_marked(handle: &str, mark: &str, body: &str) -> String {
    if body.is_empty() {
        return String::new();
    }
    format!(
        "  %{handle} = transform.structured.match ops{{[\"linalg.generic\"]}} attributes {{{mark}}} in %f : (!transform.any_op) -> !transform.any_op\n  \
         transform.foreach %{handle} : !transform.any_op {{\n  ^bb0(%one: !transform.any_op):\n{body}  }}\n"
    )
}
