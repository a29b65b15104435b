//! The gradient of attention: per head, a block of queries at a time against the keys up to it.
//!
//! With P the softmax (made again from the saved log of its sums), D the sums over a row of do * o: dP = do v^T, dS = P (dP - D),
//! dq = scale dS k, dk = scale dS^T q, dv = P^T do. P and dS are kept as [queries of the block, keys]; dk and dv are summed in
//! scratch over the blocks, ascending.

use super::attention_tiles::{self as tiles, Head, Shape};
use super::math;
use super::nest::{Nest, Tensor};
use super::text::Func;

/// What padded queries have instead of a log of a sum: their weights are then zero.
const NO_QUERY: f32 = 1e30;

/// A head's operands in scratch. `_t`: [head, context], else [context, head], padded; q is scaled.
struct Packed {
    q_t: Tensor,
    k_t: Tensor,
    v_t: Tensor,
    do_t: Tensor,
    o_t: Tensor,
    q: Tensor,
    k: Tensor,
    d_o: Tensor,
    /// [context], padded
    lse: Tensor,
}

pub fn linalg(name: &str, s: &Shape) -> String {
    let rows = s.sequences * s.context;
    let (wide, narrow) = ([rows, 3 * s.width], [rows, s.width]);
    let lse_shape = [s.sequences, s.heads, s.context];
    let mut func = Func::new(name);
    let qkv = Tensor::new(func.input("qkv", &wide, "f32"), &wide);
    let o = Tensor::new(func.input("o", &narrow, "f32"), &narrow);
    let lse = Tensor::new(func.input("lse", &lse_shape, "f32"), &lse_shape);
    let d_o = Tensor::new(func.input("do", &narrow, "f32"), &narrow);
    let dqkv = Tensor::new(func.output("dqkv", &wide, "f32"), &wide);
    let mut n = Nest::default();
    let done = tiles::each_head(&mut n, s, &[&dqkv], |n, head, carried| {
        let packed = pack(n, s, head, [&qkv, &o, &lse, &d_o]);
        let padded = [s.tiles.context, s.tiles.head];
        let (dk, dv) = (tiles::filled(n, &padded, 0.0, "fill"), tiles::filled(n, &padded, 0.0, "fill"));
        let (zero, end, context) = (n.index(0), n.index(s.tiles.context), n.index(s.context));
        let done = n.repeat((&zero, &end, s.tiles.block), &[&carried[0], &dk, &dv], |n, at, carried| {
            query_block(n, s, head, at, &packed, carried)
        });
        let dqkv = write_rows(n, s, (head, &zero, &context), s.width, &done[1], &done[0], None);
        vec![write_rows(n, s, (head, &zero, &context), 2 * s.width, &done[2], &dqkv, None)]
    });
    func.push(&n.finish());
    func.result("dqkv", &done[0].name);
    func.finish()
}

fn pack(n: &mut Nest, s: &Shape, head: &Head, [qkv, o, lse, d_o]: [&Tensor; 4]) -> Packed {
    let (scale, width) = (Some(s.scale()), s.width);
    let padded = tiles::filled(n, &[s.tiles.context], NO_QUERY, "list");
    let row = n.cut(lse, &[&head.sequence, &head.number, "0"], &[1, 1, s.context], 1);
    let place = n.cut(&padded, &["0"], &[s.context], 1);
    let copied = n.generic("list", "p", &[(&row, "i")], (&place, "i"), |r, e| tiles::times(r, &e[0], None));
    Packed {
        q_t: tiles::pack_transposed(n, s, qkv, head, 0, scale),
        k_t: tiles::pack_transposed(n, s, qkv, head, width, None),
        v_t: tiles::pack_transposed(n, s, qkv, head, 2 * width, None),
        do_t: tiles::pack_transposed(n, s, d_o, head, 0, None),
        o_t: tiles::pack_transposed(n, s, o, head, 0, None),
        q: tiles::pack(n, s, qkv, head, 0, scale),
        k: tiles::pack(n, s, qkv, head, width, None),
        d_o: tiles::pack(n, s, d_o, head, 0, None),
        lse: n.put(&copied, &padded, &["0"], &[s.context]),
    }
}

/// The block of queries that starts at `at`: carries dqkv, dk and dv.
fn query_block(n: &mut Nest, s: &Shape, head: &Head, at: &str, p: &Packed, carried: Vec<Tensor>) -> Vec<Tensor> {
    let block = n.index(s.tiles.block);
    let end = n.op("end", &format!("arith.addi {at}, {block} : index"));
    let (scores, d_weights) = score_tiles(n, s, at, &end, p);
    let (weights, d_scores) = softmax_gradient(n, s, at, p, scores, d_weights);
    let part = [s.tiles.block, s.tiles.head];
    let (q, d_o) = (n.cut(&p.q, &[at, "0"], &part, 2), n.cut(&p.d_o, &[at, "0"], &part, 2));
    let dk = add_to_keys(n, s, &end, &d_scores, &q, &carried[1]);
    let dv = add_to_keys(n, s, &end, &weights, &d_o, &carried[2]);
    let (rows, columns) = (s.tiles.rows, s.tiles.columns);
    let dq = n.memory(&part);
    let dq = tiles::each_tile(n, (&dq, rows, columns), |n, i, j, out| {
        let tile = tiles::product_of_rows(n, &end, (&d_scores, i, rows), (&p.k, j, columns));
        n.put(&tile, out, &[i, j], &[rows, columns])
    });
    let count = tiles::rows_left(n, s, at);
    let dqkv = write_rows(n, s, (head, at, &count), 0, &dq, &carried[0], Some(s.scale()));
    vec![dqkv, dk, dv]
}

/// q k^T and do v^T of the block, [block, context]: what lies before `end` is set.
fn score_tiles(n: &mut Nest, s: &Shape, at: &str, end: &str, p: &Packed) -> (Tensor, Tensor) {
    let (rows, block) = (s.tiles.rows, s.tiles.block);
    let (zero, height) = (n.index(0), n.index(block));
    let (scores, d_weights) = (n.memory(&[block, s.tiles.context]), n.memory(&[block, s.tiles.context]));
    let mut done = n.repeat((&zero, end, block), &[&scores, &d_weights], |n, k, c| {
        n.repeat((&zero, &height, rows), &[&c[0], &c[1]], |n, i, c| {
            let query = n.op("query", &format!("arith.addi {at}, {i} : index"));
            let tile = tiles::product(n, s.tiles.head, (&p.q_t, &query, rows), (&p.k_t, k, block));
            let scores = n.put(&tile, &c[0], &[i, k], &[rows, block]);
            let tile = tiles::product(n, s.tiles.head, (&p.do_t, &query, rows), (&p.v_t, k, block));
            vec![scores, n.put(&tile, &c[1], &[i, k], &[rows, block])]
        })
    });
    let d_weights = done.pop().expect("two are carried");
    (done.pop().expect("two are carried"), d_weights)
}

/// P in place of the scores and dS in place of dP.
fn softmax_gradient(
    n: &mut Nest,
    s: &Shape,
    at: &str,
    p: &Packed,
    scores: Tensor,
    d_weights: Tensor,
) -> (Tensor, Tensor) {
    let block = s.tiles.block;
    let along = output_products(n, s, at, p);
    let lse = n.cut(&p.lse, &[at], &[block], 1);
    let (zero, height) = (n.index(0), n.index(block));
    let tile = |n: &mut Nest, k: &str, masked: bool, c: &[Tensor]| {
        n.repeat((&zero, &height, tiles::ELEMENTWISE_ROWS), &[&c[0], &c[1]], |n, i, c| {
            softmax_tile(n, s, (k, i, masked), [&lse, &along], c)
        })
    };
    let before = n.repeat((&zero, at, block), &[&scores, &d_weights], |n, k, c| tile(n, k, false, &c));
    let mut done = tile(n, at, true, &before);
    let d_scores = done.pop().expect("two are carried");
    (done.pop().expect("two are carried"), d_scores)
}

/// D of the block's queries: the sums of do * o over the head's elements.
fn output_products(n: &mut Nest, s: &Shape, at: &str, p: &Packed) -> Tensor {
    let (zero, size) = (n.index(0), n.index(s.tiles.head));
    let sizes = [tiles::ELEMENTWISE_ROWS, s.tiles.block];
    let sum = tiles::filled(n, &[s.tiles.block], 0.0, "tile");
    let mut done = n.repeat((&zero, &size, sizes[0]), &[&sum], |n, d, c| {
        let (o, d_o) = (n.cut(&p.o_t, &[d, at], &sizes, 2), n.cut(&p.do_t, &[d, at], &sizes, 2));
        vec![n.generic("tile", "rp", &[(&o, "ij"), (&d_o, "ij")], (&c[0], "j"), |r, e| {
            let product = r.mul(&e[0], &e[1]);
            r.add(&e[2], &product)
        })]
    });
    done.remove(0)
}

/// A few queries from `i` against the keys from `k`; `masked` where those are the block's own: each query sees the keys up to itself.
fn softmax_tile(
    n: &mut Nest,
    s: &Shape,
    (k, i, masked): (&str, &str, bool),
    [lse, along]: [&Tensor; 2],
    carried: Vec<Tensor>,
) -> Vec<Tensor> {
    let sizes = [tiles::ELEMENTWISE_ROWS, s.tiles.block];
    let per_row = |n: &mut Nest, t: &Tensor| n.cut(t, &[i], &[sizes[0]], 1);
    let (lse, along) = (per_row(n, lse), per_row(n, along));
    let scores = n.cut(&carried[0], &[i, k], &sizes, 2);
    let weights = n.generic("tile", "pp", &[(&lse, "i")], (&scores, "ij"), |r, e| {
        let below = r.sub(&e[1], &e[0]);
        let weight = math::exp(r, &below);
        if !masked {
            return weight;
        }
        let zero = r.constant(0.0);
        let (row, column) = (r.op("linalg.index 0 : index"), r.op("linalg.index 1 : index"));
        let query = r.op(&format!("arith.addi {row}, {i} : index"));
        let seen = r.op(&format!("arith.cmpi ule, {column}, {query} : index"));
        r.op(&format!("arith.select {seen}, {weight}, {zero} : f32"))
    });
    let d_weights = n.cut(&carried[1], &[i, k], &sizes, 2);
    let d_scores = n.generic("tile", "pp", &[(&weights, "ij"), (&along, "i")], (&d_weights, "ij"), |r, e| {
        let rest = r.sub(&e[2], &e[1]);
        r.mul(&e[0], &rest)
    });
    vec![n.put(&weights, &carried[0], &[i, k], &sizes), n.put(&d_scores, &carried[1], &[i, k], &sizes)]
}

/// Adds the block's queries' part, factors^T rows, to a sum over queries [context, head]; factors is [block, context].
fn add_to_keys(n: &mut Nest, s: &Shape, end: &str, factors: &Tensor, rows: &Tensor, sum: &Tensor) -> Tensor {
    let (height, columns) = (s.tiles.rows, s.tiles.columns);
    let (zero, width, block) = (n.index(0), n.index(s.tiles.head), n.index(s.tiles.block));
    let mut done = n.repeat((&zero, end, height), &[sum], |n, k, c| {
        n.repeat((&zero, &width, columns), &[&c[0]], |n, d, c| {
            let start = n.cut(&c[0], &[k, d], &[height, columns], 2);
            let tile = tiles::accumulate(n, &block, (factors, k, height), (rows, d, columns), start);
            vec![n.put(&tile, &c[0], &[k, d], &[height, columns])]
        })
    });
    done.remove(0)
}

/// `count` rows of a head's gradient, into the columns of dqkv at `offset`; the head's rows from `at` on.
fn write_rows(
    n: &mut Nest,
    s: &Shape,
    (head, at, count): (&Head, &str, &str),
    offset: u64,
    from: &Tensor,
    dqkv: &Tensor,
    scale: Option<f32>,
) -> Tensor {
    let (zero, offset) = (n.index(0), n.index(offset));
    let column = n.op("column", &format!("arith.addi {}, {offset} : index", head.column));
    let first = n.op("first", &format!("arith.addi {}, {at} : index", head.row));
    let mut done = n.repeat((&zero, count, 1), &[dqkv], |n, r, c| {
        let row = n.op("row", &format!("arith.addi {first}, {r} : index"));
        let part = n.cut(from, &[r, "0"], &[1, s.head], 1);
        vec![tiles::copy_row(n, &part, &c[0], [&row, &column], scale)]
    });
    done.remove(0)
}
