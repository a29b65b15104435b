//! Causal attention and its gradient in the flash form: no matrix of scores outside of a block.
//!
//! # The work of a block
//!
//! A block has `tile` rows of one head in shared memory (queries, or keys for their gradients) and streams tiles of as many columns
//! past them. Four neighbouring threads share a row: each makes every fourth of the row's scores and owns every fourth element of
//! the row's outputs, in registers. Scores pass through shared memory to the products with the second operand.
//!
//! # The gradient
//!
//! With P the softmax (made again from the saved log of its sums), D the sums over a row of do * o: dP = do v^T, dS = P (dP - D),
//! dq = scale dS k, dk = scale dS^T q, dv = P^T do. Three launches: D; dk and dv, a block per tile of keys; dq, a block per tile of
//! queries. Each makes the scores it needs, so that nothing is added from two blocks.

use super::scratch;
use crate::cuda::code::{Buffer, Code, Operands, WIDE};
use crate::cuda::{DeviceKernel, SHARED_BYTES_MAX};
use crate::kernels::math;
use model::kernel::{Kernel, KernelOp};

/// Threads that share a row.
const QUAD: u64 = 4;
const THREADS_OF_SUMS: u32 = 128;

/// Sizes of a kernel; `tile` rows and columns at a time.
#[derive(Clone, Copy)]
struct Shape {
    sequences: u64,
    context: u64,
    width: u64,
    heads: u64,
    /// Elements of a head, and that in whole fours.
    size: u64,
    padded: u64,
    tile: u64,
}

/// Writes the kernel, or says why its heads are too large.
pub fn write(kernel: &Kernel) -> Result<DeviceKernel, String> {
    match kernel.op {
        KernelOp::Attention { sequences, context, width, heads } => {
            let shape = Shape::new([sequences, context, width, heads], (3, 1))?;
            Ok(forward(kernel, &shape))
        }
        KernelOp::AttentionGrad { sequences, context, width, heads } => {
            let shape = Shape::new([sequences, context, width, heads], (4, 2))?;
            Ok(backward(kernel, &shape))
        }
        _ => unreachable!("dispatched on the operation"),
    }
}

impl Shape {
    /// The largest tile of which `matrices` [tile, size] and `scores` [tile, tile] fit in shared memory.
    fn new(sizes: [u32; 4], (matrices, scores): (u64, u64)) -> Result<Self, String> {
        let [sequences, context, width, heads] = sizes.map(u64::from);
        let size = width / heads;
        let padded = size.next_multiple_of(WIDE as u64);
        let bytes = |tile: u64| 4 * tile * (matrices * (padded + 1) + scores * (tile + 1));
        let tile = [32, 16, 8].into_iter().find(|tile| bytes(*tile) <= SHARED_BYTES_MAX);
        let tile = tile.ok_or_else(|| {
            format!("a head of {size} elements does not fit in {SHARED_BYTES_MAX} bytes of shared memory")
        })?;
        Ok(Self { sequences, context, width, heads, size, padded, tile })
    }

    fn threads(&self) -> u32 {
        (QUAD * self.tile) as u32
    }

    fn grid(&self) -> [u64; 3] {
        [self.context.div_ceil(self.tile), self.heads, self.sequences]
    }

    fn scale(&self) -> f32 {
        (1.0 / (self.size as f64).sqrt()) as f32
    }

    /// A thread's scores in a tile, and its elements of an output row.
    fn scores(&self) -> u64 {
        self.tile / QUAD
    }

    fn elements(&self) -> u64 {
        self.padded / QUAD
    }

    fn matrix(&self, code: &mut Code) -> Buffer {
        code.shared(&[self.tile, self.padded + 1])
    }

    fn score_matrix(&self, code: &mut Code) -> Buffer {
        code.shared(&[self.tile, self.tile + 1])
    }
}

/// Where a thread is: its block's head and first row, its row in the tile, and its place among the row's four threads.
struct Place {
    sequence: String,
    head: String,
    /// First element of the head in a row of one of q, k and v.
    column: String,
    first: String,
    row: String,
    quarter: String,
    thread: String,
}

impl Place {
    fn new(code: &mut Code, s: &Shape) -> Self {
        let (block, head, sequence) = (code.block("x"), code.block("y"), code.block("z"));
        let thread = code.thread();
        let (row, quarter) = code.split(&thread, QUAD);
        let (first, column) = (code.times(&block, s.tile), code.times(&head, s.size));
        Self { sequence, head, column, first, row, quarter, thread }
    }

    /// The thread's `i`-th column of a tile, or element of a row.
    fn fourth(&self, code: &mut Code, i: u64) -> String {
        code.plus_const(&self.quarter, i * QUAD)
    }

    /// The row of `token` in [rows, …].
    fn token(&self, code: &mut Code, s: &Shape, token: &str) -> String {
        code.times_plus(&self.sequence, s.context, token)
    }
}

/// Fills a matrix with the tile of rows from token `first`, zeros outside: `from`'s columns from `offset` on, times `scale`.
fn stage(
    code: &mut Code,
    (s, place): (&Shape, &Place),
    (from, offset, scale): (&Buffer, u64, Option<f32>),
    first: &str,
    to: &Buffer,
) {
    let (end, step) = (code.index(s.tile * s.padded), code.index(s.threads().into()));
    let column = code.plus_const(&place.column, offset);
    code.repeat((&place.thread, &end, &step), &[], |code, at, _| {
        let (row, element) = code.split(at, s.padded);
        let token = code.plus(first, &row);
        let (exists, within) = (code.below_const(&token, s.context), code.below_const(&element, s.size));
        let inside = code.both(&exists, &within);
        let zero = code.constant(0.0);
        let value = code.when_or(&inside, (&zero, "f32"), |code| {
            let token = place.token(code, s, &token);
            let at = code.plus(&column, &element);
            let value = code.load(from, &[&token, &at]);
            let Some(scale) = scale else { return value };
            let scale = code.constant(scale);
            code.mul(&value, &scale)
        });
        code.store(&value, to, &[&row, &element]);
        Vec::new()
    });
}

/// The thread's scores: for each pair of matrices (rows, columns), the products of its row with its columns of the tile.
fn scores(code: &mut Code, s: &Shape, place: &Place, pairs: &[[&Buffer; 2]]) -> Vec<Vec<String>> {
    let count = s.scores() as usize;
    let (zero, end, one) = (code.index(0), code.index(s.size), code.index(1));
    let start = code.constant(0.0);
    let columns: Vec<_> = (0..s.scores()).map(|i| place.fourth(code, i)).collect();
    let sums = code.repeat((&zero, &end, &one), &vec![(start, "f32"); count * pairs.len()], |code, element, so_far| {
        let mut next = Vec::new();
        for ([rows, tile], so_far) in pairs.iter().zip(so_far.chunks(count)) {
            let row = code.load(rows, &[&place.row, element]);
            for (column, sum) in columns.iter().zip(so_far) {
                let column = code.load(tile, &[column, element]);
                next.push(code.fma(&row, &column, sum));
            }
        }
        next
    });
    sums.chunks(count).map(<[String]>::to_vec).collect()
}

/// Adds to the thread's elements of each output row: for each pair, the row's scores times the columns' matrix.
fn accumulate(code: &mut Code, s: &Shape, place: &Place, pairs: &[[&Buffer; 2]], start: &[String]) -> Vec<String> {
    let count = s.elements() as usize;
    let (zero, end, one) = (code.index(0), code.index(s.tile), code.index(1));
    let elements: Vec<_> = (0..s.elements()).map(|i| place.fourth(code, i)).collect();
    let carried: Vec<_> = start.iter().map(|value| (value.clone(), "f32")).collect();
    code.repeat((&zero, &end, &one), &carried, |code, column, so_far| {
        let mut next = Vec::new();
        for ([scores, matrix], so_far) in pairs.iter().zip(so_far.chunks(count)) {
            let score = code.load(scores, &[&place.row, column]);
            for (element, sum) in elements.iter().zip(so_far) {
                let value = code.load(matrix, &[column, element]);
                next.push(code.fma(&score, &value, sum));
            }
        }
        next
    })
}

/// Writes the thread's elements of its row, if the row exists, to `to`'s columns from `offset` on.
fn write_row(
    code: &mut Code,
    (s, place): (&Shape, &Place),
    token: &str,
    values: &[String],
    (to, offset): (&Buffer, u64),
) {
    let exists = code.below_const(token, s.context);
    let row = place.token(code, s, token);
    let column = code.plus_const(&place.column, offset);
    for (i, value) in values.iter().enumerate() {
        let element = place.fourth(code, i as u64);
        let within = code.below_const(&element, s.size);
        let inside = code.both(&exists, &within);
        code.when(&inside, |code| {
            let at = code.plus(&column, &element);
            code.store(value, to, &[&row, &at]);
        });
    }
}

/// A condition on two indices: `ule`.
fn compare(code: &mut Code, a: &str, predicate: &str, b: &str) -> String {
    code.op(&format!("arith.cmpi {predicate}, {a}, {b} : index"))
}

/// `combine` over the four threads of a row.
fn over_row(code: &mut Code, value: &str, combine: &str) -> String {
    code.over_warp(value, 2, combine)
}

fn forward(kernel: &Kernel, s: &Shape) -> DeviceKernel {
    let rows = s.sequences * s.context;
    let mut operands = Operands::of(kernel);
    let qkv = operands.activation("qkv", &[rows, 3 * s.width]);
    let o = operands.activation("o", &[rows, s.width]);
    let lse = operands.f32("lse", &[s.sequences, s.heads, s.context]);
    let mut device = DeviceKernel::new(kernel);
    device.launch(s.grid(), s.threads(), &operands, |code| {
        let place = Place::new(code, s);
        let [q, k, v] = [(); 3].map(|()| s.matrix(code));
        let weights = s.score_matrix(code);
        stage(code, (s, &place), (&qkv, 0, Some(s.scale())), &place.first, &q);
        let query = code.plus(&place.first, &place.row);
        let last = code.index(s.context - 1);
        // Rows that don't exist see what the last one does, so that they have a largest score too.
        let seen = code.min(&query, &last);
        let (lowest, nothing) = (code.constant(f32::NEG_INFINITY), code.constant(0.0));
        let (zero, step) = (code.index(0), code.index(s.tile));
        let (context, end) = (code.index(s.context), code.plus(&place.first, &step));
        let end = code.min(&end, &context);
        let mut carried = vec![(lowest, "f32"), (nothing.clone(), "f32")];
        carried.extend(vec![(nothing, "f32"); s.elements() as usize]);
        let done = code.repeat((&zero, &end, &step), &carried, |code, at, so_far| {
            code.barrier();
            stage(code, (s, &place), (&qkv, s.width, None), at, &k);
            stage(code, (s, &place), (&qkv, 2 * s.width, None), at, &v);
            code.barrier();
            let scores = scores(code, s, &place, &[[&q, &k]]).remove(0);
            let (mut next, shrink) = softmax(code, s, &place, (at, &seen), scores, so_far, &weights);
            code.barrier();
            let shrunk: Vec<_> = so_far[2..].iter().map(|value| code.mul(value, &shrink)).collect();
            next.extend(accumulate(code, s, &place, &[[&weights, &v]], &shrunk));
            next
        });
        let one = code.constant(1.0);
        let inverse = code.div(&one, &done[1]);
        let values: Vec<_> = done[2..].iter().map(|value| code.mul(value, &inverse)).collect();
        write_row(code, (s, &place), &query, &values, (&o, 0));
        let (exists, first) = (code.below_const(&query, s.context), code.below_const(&place.quarter, 1));
        let writes = code.both(&exists, &first);
        code.when(&writes, |code| {
            let log = math::log(code, &done[1]);
            let value = code.add(&log, &done[0]);
            code.store(&value, &lse, &[&place.sequence, &place.head, &query]);
        });
    });
    device
}

/// Takes a tile's scores into the row's maximum and sum: gives both, and the factor for what was summed before. The weights go
/// to shared memory.
fn softmax(
    code: &mut Code,
    s: &Shape,
    place: &Place,
    (at, seen): (&str, &str),
    scores: Vec<String>,
    so_far: &[String],
    weights: &Buffer,
) -> (Vec<String>, String) {
    let lowest = code.constant(f32::NEG_INFINITY);
    let columns: Vec<_> = (0..s.scores()).map(|i| place.fourth(code, i)).collect();
    let mut masked = Vec::new();
    let mut highest = lowest.clone();
    for (column, score) in columns.iter().zip(&scores) {
        let key = code.plus(at, column);
        let allowed = compare(code, &key, "ule", seen);
        let score = code.choose(&allowed, score, &lowest);
        highest = code.binary("arith.maximumf", &highest, &score);
        masked.push(score);
    }
    let highest = over_row(code, &highest, "arith.maximumf");
    let peak = code.binary("arith.maximumf", &so_far[0], &highest);
    let mut sum = code.constant(0.0);
    for (column, score) in columns.iter().zip(&masked) {
        let below = code.sub(score, &peak);
        let weight = math::exp(code, &below);
        code.store(&weight, weights, &[&place.row, column]);
        sum = code.add(&sum, &weight);
    }
    let sum = over_row(code, &sum, "arith.addf");
    let below = code.sub(&so_far[0], &peak);
    let shrink = math::exp(code, &below);
    let total = code.fma(&so_far[1], &shrink, &sum);
    (vec![peak, total], shrink)
}

/// The operands of the gradient, beside what it writes.
struct Saved {
    qkv: Buffer,
    o: Buffer,
    lse: Buffer,
    d_o: Buffer,
    /// D, [sequences, heads, context]
    along: Buffer,
}

fn backward(kernel: &Kernel, s: &Shape) -> DeviceKernel {
    let rows = s.sequences * s.context;
    let mut operands = Operands::of(kernel);
    let qkv = operands.activation("qkv", &[rows, 3 * s.width]);
    let o = operands.activation("o", &[rows, s.width]);
    let lse = operands.f32("lse", &[s.sequences, s.heads, s.context]);
    let d_o = operands.activation("do", &[rows, s.width]);
    let dqkv = operands.activation("dqkv", &[rows, 3 * s.width]);
    let along = scratch(&mut operands, kernel);
    let saved = Saved { qkv, o, lse, d_o, along };
    let mut device = DeviceKernel::new(kernel);
    let all = s.sequences * s.heads * s.context;
    device.launch([all.div_ceil(THREADS_OF_SUMS.into()), 1, 1], THREADS_OF_SUMS, &operands, |code| {
        sums_along(code, s, &saved);
    });
    device.launch(s.grid(), s.threads(), &operands, |code| key_gradients(code, s, &saved, &dqkv));
    device.launch(s.grid(), s.threads(), &operands, |code| query_gradients(code, s, &saved, &dqkv));
    device
}

/// D: a thread per query and head.
fn sums_along(code: &mut Code, s: &Shape, saved: &Saved) {
    let at = code.global_thread(THREADS_OF_SUMS);
    let exists = code.below_const(&at, s.sequences * s.heads * s.context);
    code.when(&exists, |code| {
        let (list, token) = code.split(&at, s.context);
        let (sequence, head) = code.split(&list, s.heads);
        let row = code.times_plus(&sequence, s.context, &token);
        let (zero, end, one) = (code.index(0), code.index(s.size), code.index(1));
        let start = code.constant(0.0);
        let sum = code.repeat((&zero, &end, &one), &[(start, "f32")], |code, element, so_far| {
            let column = code.times_plus(&head, s.size, element);
            let (o, d_o) = (code.load(&saved.o, &[&row, &column]), code.load(&saved.d_o, &[&row, &column]));
            vec![code.fma(&o, &d_o, &so_far[0])]
        });
        code.store(&sum[0], &saved.along, &[&at]);
    });
}

/// Log of sums and D of a query that may not exist; then those of the last one.
fn of_query(code: &mut Code, s: &Shape, place: &Place, saved: &Saved, query: &str) -> [String; 2] {
    let last = code.index(s.context - 1);
    let query = code.min(query, &last);
    let lse = code.load(&saved.lse, &[&place.sequence, &place.head, &query]);
    let list = code.times_plus(&place.sequence, s.heads, &place.head);
    let at = code.times_plus(&list, s.context, &query);
    [lse, code.load(&saved.along, &[&at])]
}

/// P and dS of one score.
fn weight(
    code: &mut Code,
    s: &Shape,
    (key, query): (&str, &str),
    (score, d_weight): (&str, &str),
    [lse, along]: &[String; 2],
) -> [String; 2] {
    let (seen, exists) = (compare(code, key, "ule", query), code.below_const(query, s.context));
    let allowed = code.both(&seen, &exists);
    let below = code.sub(score, lse);
    let p = math::exp(code, &below);
    let zero = code.constant(0.0);
    let p = code.choose(&allowed, &p, &zero);
    let change = code.sub(d_weight, along);
    let d_score = code.mul(&p, &change);
    [p, d_score]
}

/// dk and dv of a tile of keys, from the queries at or after them.
fn key_gradients(code: &mut Code, s: &Shape, saved: &Saved, dqkv: &Buffer) {
    let place = Place::new(code, s);
    let [k, v, q, d_o] = [(); 4].map(|()| s.matrix(code));
    let [weights, d_scores] = [(); 2].map(|()| s.score_matrix(code));
    stage(code, (s, &place), (&saved.qkv, s.width, None), &place.first, &k);
    stage(code, (s, &place), (&saved.qkv, 2 * s.width, None), &place.first, &v);
    let key = code.plus(&place.first, &place.row);
    let (context, step) = (code.index(s.context), code.index(s.tile));
    let zero = code.constant(0.0);
    let carried = vec![(zero, "f32"); 2 * s.elements() as usize];
    let done = code.repeat((&place.first, &context, &step), &carried, |code, at, so_far| {
        code.barrier();
        stage(code, (s, &place), (&saved.qkv, 0, Some(s.scale())), at, &q);
        stage(code, (s, &place), (&saved.d_o, 0, None), at, &d_o);
        code.barrier();
        let both = scores(code, s, &place, &[[&k, &q], [&v, &d_o]]);
        for i in 0..s.scores() {
            let column = place.fourth(code, i);
            let query = code.plus(at, &column);
            let sums = of_query(code, s, &place, saved, &query);
            let given = (both[0][i as usize].as_str(), both[1][i as usize].as_str());
            let [p, d_score] = weight(code, s, (&key, &query), given, &sums);
            code.store(&p, &weights, &[&place.row, &column]);
            code.store(&d_score, &d_scores, &[&place.row, &column]);
        }
        code.barrier();
        accumulate(code, s, &place, &[[&d_scores, &q], [&weights, &d_o]], so_far)
    });
    let (dk, dv) = done.split_at(s.elements() as usize);
    write_row(code, (s, &place), &key, dk, (dqkv, s.width));
    write_row(code, (s, &place), &key, dv, (dqkv, 2 * s.width));
}

/// dq of a tile of queries, from the keys up to them.
fn query_gradients(code: &mut Code, s: &Shape, saved: &Saved, dqkv: &Buffer) {
    let place = Place::new(code, s);
    let [q, d_o, k, v] = [(); 4].map(|()| s.matrix(code));
    let d_scores = s.score_matrix(code);
    stage(code, (s, &place), (&saved.qkv, 0, Some(s.scale())), &place.first, &q);
    stage(code, (s, &place), (&saved.d_o, 0, None), &place.first, &d_o);
    let query = code.plus(&place.first, &place.row);
    let sums = of_query(code, s, &place, saved, &query);
    let (start, context, step) = (code.index(0), code.index(s.context), code.index(s.tile));
    let end = code.plus(&place.first, &step);
    let end = code.min(&end, &context);
    let zero = code.constant(0.0);
    let carried = vec![(zero, "f32"); s.elements() as usize];
    let done = code.repeat((&start, &end, &step), &carried, |code, at, so_far| {
        code.barrier();
        stage(code, (s, &place), (&saved.qkv, s.width, None), at, &k);
        stage(code, (s, &place), (&saved.qkv, 2 * s.width, None), at, &v);
        code.barrier();
        let both = scores(code, s, &place, &[[&q, &k], [&d_o, &v]]);
        for i in 0..s.scores() {
            let column = place.fourth(code, i);
            let key = code.plus(at, &column);
            let given = (both[0][i as usize].as_str(), both[1][i as usize].as_str());
            let [_, d_score] = weight(code, s, (&key, &query), given, &sums);
            code.store(&d_score, &d_scores, &[&place.row, &column]);
        }
        code.barrier();
        accumulate(code, s, &place, &[[&d_scores, &k]], so_far)
    });
    let scale = code.constant(s.scale());
    let dq: Vec<_> = done.iter().map(|value| code.mul(value, &scale)).collect();
    write_row(code, (s, &place), &query, &dq, (dqkv, 0));
}
