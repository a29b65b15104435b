//! Causal attention: per head, a block of queries at a time against the keys up to it.
//!
//! A head's q, k and v are packed into padded scratch, so that every tile is whole: k and q lie with the sequence along the vectors.
//! Scores are kept transposed, [keys, queries of the block]: the softmax then reduces between vectors and never inside
//! one, and its result has the form that the product with v reads.

use super::nest::{Nest, Tensor};
use super::text::{Func, tensor};
use super::{KernelSource, attention_grad, attention_tiles as tiles, math};
use model::kernel::{Kernel, KernelOp};
use model::target::CpuClass;

pub fn source(kernel: &Kernel, cpu: CpuClass) -> KernelSource {
    match kernel.op {
        KernelOp::Attention { sequences, context, width, heads } => {
            let shape = tiles::Shape::new(sequences, context, width, heads, cpu);
            KernelSource { linalg: forward(&kernel.name, &shape), strategy: tiles::strategy(&shape) }
        }
        KernelOp::AttentionGrad { sequences, context, width, heads } => {
            let shape = tiles::Shape::new(sequences, context, width, heads, cpu);
            KernelSource { linalg: attention_grad::linalg(&kernel.name, &shape), strategy: tiles::strategy(&shape) }
        }
        _ => unreachable!("dispatched on the operation"),
    }
}

fn forward(name: &str, s: &tiles::Shape) -> String {
    let rows = s.sequences * s.context;
    let lse_shape = [s.sequences, s.heads, s.context];
    let mut func = Func::new(name);
    let qkv = Tensor::new(func.input("qkv", &[rows, 3 * s.width], "f32"), &[rows, 3 * s.width]);
    let o = Tensor::new(func.output("o", &[rows, s.width], "f32"), &[rows, s.width]);
    let lse = Tensor::new(func.output("lse", &lse_shape, "f32"), &lse_shape);
    let mut n = Nest::default();
    let done = tiles::each_head(&mut n, s, &[&o, &lse], |n, head, carried| {
        let key = tiles::pack_transposed(n, s, &qkv, head, s.width, None);
        let query = tiles::pack_transposed(n, s, &qkv, head, 0, Some(s.scale()));
        let value = tiles::pack(n, s, &qkv, head, 2 * s.width, None);
        let zero = n.index(0);
        let end = n.index(s.tiles.context);
        let carried: Vec<_> = carried.iter().collect();
        n.repeat((&zero, &end, s.tiles.block), &carried, |n, at, carried| {
            query_block(n, s, head, at, [&key, &query, &value], carried)
        })
    });
    func.push(&n.finish());
    func.result("o", &done[0].name);
    func.result("lse", &done[1].name);
    func.finish()
}

/// The block of queries that starts at `at`: carries o and lse.
fn query_block(
    n: &mut Nest,
    s: &tiles::Shape,
    head: &tiles::Head,
    at: &str,
    [key, query, value]: [&Tensor; 3],
    carried: Vec<Tensor>,
) -> Vec<Tensor> {
    let (zero, block) = (n.index(0), n.index(s.tiles.block));
    let scores = n.memory(&[s.tiles.context, s.tiles.block]);
    let peak = tiles::filled(n, &[s.tiles.block], f32::NEG_INFINITY, "tile");
    // Keys before the block are all seen; those of the block up to the query.
    let before = n.repeat((&zero, at, s.tiles.rows), &[&scores, &peak], |n, k, c| {
        score_tile(n, s, [key, query], (k, at, None), c)
    });
    let before: Vec<_> = before.iter().collect();
    let all = n.repeat((&zero, &block, s.tiles.rows), &before, |n, inside, c| {
        let k = n.op("key", &format!("arith.addi {at}, {inside} : index"));
        score_tile(n, s, [key, query], (&k, at, Some(inside)), c)
    });
    let end = n.op("end", &format!("arith.addi {at}, {block} : index"));
    let (weights, sum) = softmax(n, s, &end, &all[0], &all[1]);
    let rows = n.empty_like(&sum);
    let inverse = n.generic("tile", "p", &[(&sum, "i")], (&rows, "i"), |r, e| {
        let one = r.constant(1.0);
        r.div(&one, &e[0])
    });
    let lse_block = n.generic("tile", "p", &[(&sum, "i"), (&all[1], "i")], (&rows, "i"), |r, e| {
        let log = math::log(r, &e[0]);
        r.add(&log, &e[1])
    });
    let outputs = weighted_values(n, s, &end, [&weights, value, &inverse]);
    write_rows(n, s, head, at, [&outputs, &lse_block], carried)
}

/// Scores of `rows` keys from `k` against the queries from `at`, and the running maximum; `inside` is k's distance from `at` where the
/// mask cuts through.
fn score_tile(
    n: &mut Nest,
    s: &tiles::Shape,
    [key, query]: [&Tensor; 2],
    (k, at, inside): (&str, &str, Option<&str>),
    carried: Vec<Tensor>,
) -> Vec<Tensor> {
    let (rows, block) = (s.tiles.rows, s.tiles.block);
    let mut tile = tiles::product(n, s.tiles.head, (key, k, rows), (query, at, block));
    if let Some(inside) = inside {
        tile = n.generic("tile", "pp", &[], (&tile, "ij"), |r, e| {
            let lowest = r.constant(f32::NEG_INFINITY);
            let (i, j) = (r.op("linalg.index 0 : index"), r.op("linalg.index 1 : index"));
            let key = r.op(&format!("arith.addi {i}, {inside} : index"));
            let seen = r.op(&format!("arith.cmpi ule, {key}, {j} : index"));
            r.op(&format!("arith.select {seen}, {}, {lowest} : f32", e[0]))
        });
    }
    let peak =
        n.generic("tile", "rp", &[(&tile, "ij")], (&carried[1], "j"), |r, e| r.binary("arith.maximumf", &e[1], &e[0]));
    let scores = n.put(&tile, &carried[0], &[k, "0"], &[rows, block]);
    vec![scores, peak]
}

/// exp(score - peak) in place of the scores, and the sums over keys.
fn softmax(n: &mut Nest, s: &tiles::Shape, end: &str, scores: &Tensor, peak: &Tensor) -> (Tensor, Tensor) {
    let zero = n.index(0);
    let sum = tiles::filled(n, &[s.tiles.block], 0.0, "tile");
    let sizes = [tiles::ELEMENTWISE_ROWS, s.tiles.block];
    let mut done = n.repeat((&zero, end, sizes[0]), &[scores, &sum], |n, k, c| {
        let tile = n.cut(&c[0], &[k, "0"], &sizes, 2);
        let weights = n.generic("tile", "pp", &[(peak, "j")], (&tile, "ij"), |r, e| {
            let below = r.sub(&e[1], &e[0]);
            math::exp(r, &below)
        });
        let sum = n.generic("tile", "rp", &[(&weights, "ij")], (&c[1], "j"), |r, e| r.add(&e[1], &e[0]));
        vec![n.put(&weights, &c[0], &[k, "0"], &sizes), sum]
    });
    let sum = done.pop().expect("two are carried");
    (done.pop().expect("two are carried"), sum)
}

/// [queries, head]: the weights times v, over the keys before `end`, divided by the weights' sum.
fn weighted_values(n: &mut Nest, s: &tiles::Shape, end: &str, [weights, value, inverse]: [&Tensor; 3]) -> Tensor {
    let (rows, columns) = (s.tiles.rows, s.tiles.columns);
    let out = n.memory(&[s.tiles.block, s.tiles.head]);
    tiles::each_tile(n, (&out, rows, columns), |n, q, d, out| {
        let tile = tiles::product_over(n, end, (weights, q, rows), (value, d, columns));
        let factor = n.cut(inverse, &[q], &[rows], 1);
        let scaled = n.generic("tile", "pp", &[(&factor, "i")], (&tile, "ij"), |r, e| r.mul(&e[1], &e[0]));
        n.put(&scaled, out, &[q, d], &[rows, columns])
    })
}

/// The queries that exist, into o and lse.
fn write_rows(
    n: &mut Nest,
    s: &tiles::Shape,
    head: &tiles::Head,
    at: &str,
    [outputs, lse_block]: [&Tensor; 2],
    carried: Vec<Tensor>,
) -> Vec<Tensor> {
    let zero = n.index(0);
    let count = tiles::rows_left(n, s, at);
    let carried: Vec<_> = carried.iter().collect();
    n.repeat((&zero, &count, 1), &carried, |n, r, c| {
        let query = n.op("query", &format!("arith.addi {at}, {r} : index"));
        let row = n.op("row", &format!("arith.addi {}, {query} : index", head.row));
        let from = n.cut(outputs, &[r, "0"], &[1, s.head], 1);
        let o = tiles::copy_row(n, &from, &c[0], [&row, &head.column], None);
        let (block, lse) = (tensor(&lse_block.shape, "f32"), c[1].ty());
        let value = n.op("value", &format!("tensor.extract {}[{r}] : {block}", lse_block.name));
        let (sequence, number) = (&head.sequence, &head.number);
        let text = format!("tensor.insert {value} into {}[{sequence}, {number}, {query}] : {lse}", c[1].name);
        vec![o, Tensor::new(n.op("lse", &text), &c[1].shape)]
    })
}
