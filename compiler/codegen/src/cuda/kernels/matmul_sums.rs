//! What matrix products on ordinary and on tensor cores share: blocks of k one after the other, each summed from zero, and the
//! places in C where a thread's sums go.

use crate::cuda::code::Code;
use model::kernel::{MatMul, Tiles};

/// What is done with the sums over k.
pub trait Sums {
    /// What the sums of the blocks of k are added to, for `count` neighbours from `at`.
    fn start(&self, code: &mut Code, at: [&str; 2], count: usize) -> Vec<String>;
    /// Takes whole sums.
    fn finish(&self, code: &mut Code, at: [&str; 2], sums: &[String]);
}

/// Sizes of a product and of the part of C that a block of threads makes.
#[derive(Clone, Copy)]
pub struct Shape {
    pub m: u64,
    pub n: u64,
    pub k: u64,
    pub rows: u64,
    pub columns: u64,
    /// Steps of k that are staged at a time.
    pub steps: u64,
    /// k that is summed from zero.
    pub summed: u64,
}

impl Shape {
    pub fn new(matmul: &MatMul, tiles: &Tiles) -> Self {
        let [m, n, k] = [matmul.m, matmul.n, matmul.k].map(u64::from);
        let [rows, columns, steps, summed] = [tiles.mc, tiles.nc, tiles.kr, tiles.kc].map(u64::from);
        Self { m, n, k, rows, columns, steps, summed }
    }
}

/// A block's threads at work on their part of C.
pub trait Tile {
    fn shape(&self) -> &Shape;

    /// Neighbours in a row of C whose sums a thread has.
    fn neighbours(&self) -> usize;

    /// Row and first column of each such group, in the order of the thread's sums.
    fn places(&self, code: &mut Code) -> Vec<[String; 2]>;

    /// The thread's sums over k in `from .. to`, from zero, and the half of staged memory that comes next after `half`.
    fn sum(&self, code: &mut Code, range: (&str, &str), half: &str) -> (Vec<String>, String);
}

/// Elements of C that are written at once, of so many neighbours.
fn group(n: u64, neighbours: usize) -> usize {
    if n.is_multiple_of(neighbours as u64) { neighbours } else { 1 }
}

/// The whole kernel after its operands.
pub fn product(code: &mut Code, tile: &dyn Tile, end: &dyn Sums) {
    let shape = tile.shape();
    if shape.summed >= shape.k {
        let (zero, last) = (code.index(0), code.index(shape.k));
        let half = zero.clone();
        let (sums, _) = tile.sum(code, (&zero, &last), &half);
        return each_group(code, tile, |code, at, first, count| {
            let start = end.start(code, at, count);
            let sums: Vec<_> = start.iter().zip(&sums[first..]).map(|(s, part)| code.add(s, part)).collect();
            end.finish(code, at, &sums);
        });
    }
    let totals = totals(code, tile, end);
    each_group(code, tile, |code, at, first, count| end.finish(code, at, &totals[first..first + count]));
}

/// The sums of all blocks of k, one after the other added to what they start from.
fn totals(code: &mut Code, tile: &dyn Tile, end: &dyn Sums) -> Vec<String> {
    let shape = tile.shape();
    let (zero, last, step) = (code.index(0), code.index(shape.k), code.index(shape.summed));
    let mut carried = Vec::new();
    let count = group(shape.n, tile.neighbours());
    for [row, column] in tile.places(code) {
        for first in (0..tile.neighbours()).step_by(count) {
            let column = code.plus_const(&column, first as u64);
            carried.extend(start(code, shape, [&row, &column], count, end));
        }
    }
    let mut carried: Vec<_> = carried.into_iter().map(|value| (value, "f32")).collect();
    carried.push((zero.clone(), "index"));
    let mut totals = code.repeat((&zero, &last, &step), &carried, |code, first, so_far| {
        let (totals, half) = so_far.split_at(so_far.len() - 1);
        let after = code.plus(first, &step);
        let after = code.min(&after, &last);
        let (parts, half) = tile.sum(code, (first, &after), &half[0]);
        let mut next: Vec<_> = totals.iter().zip(&parts).map(|(total, part)| code.add(total, part)).collect();
        next.push(half);
        next
    });
    totals.pop();
    totals
}

/// The start of `count` neighbours, zeros outside of C.
fn start(code: &mut Code, shape: &Shape, [row, column]: [&str; 2], count: usize, end: &dyn Sums) -> Vec<String> {
    let exists = exists(code, shape, [row, column]);
    let zero = code.constant(0.0);
    let types = vec!["f32"; count].join(", ");
    let result = code.values(count, &format!("scf.if {exists} -> ({types}) {{"));
    let values = end.start(code, [row, column], count).join(", ");
    let zeros = vec![zero; count].join(", ");
    code.line(&format!("scf.yield {values} : {types}\n}} else {{\nscf.yield {zeros} : {types}\n}}"));
    (0..count).map(|i| format!("{result}#{i}")).collect()
}

/// Whether the neighbours from here are in C: a group never sticks out in part.
fn exists(code: &mut Code, shape: &Shape, [row, column]: [&str; 2]) -> String {
    if shape.m.is_multiple_of(shape.rows) && shape.n.is_multiple_of(shape.columns) {
        return code.always();
    }
    let (row, column) = (code.below_const(row, shape.m), code.below_const(column, shape.n));
    code.both(&row, &column)
}

/// Calls `body` with the place of each group that is written at once, the index of its first sum, and its size.
fn each_group(code: &mut Code, tile: &dyn Tile, body: impl Fn(&mut Code, [&str; 2], usize, usize)) {
    let (shape, neighbours) = (tile.shape(), tile.neighbours());
    let count = group(shape.n, neighbours);
    for (i, [row, column]) in tile.places(code).into_iter().enumerate() {
        for first in (0..neighbours).step_by(count) {
            let column = code.plus_const(&column, first as u64);
            let exists = exists(code, shape, [&row, &column]);
            code.when(&exists, |code| body(code, [&row, &column], i * neighbours + first, count));
        }
    }
}

/// First row and column of the block, and the thread's number.
pub struct Thread {
    pub block: [String; 2],
    pub number: String,
}

impl Thread {
    pub fn new(code: &mut Code, shape: &Shape) -> Self {
        let number = code.thread();
        let blocks = [code.block("y"), code.block("x")];
        let block = [code.times(&blocks[0], shape.rows), code.times(&blocks[1], shape.columns)];
        Self { block, number }
    }
}
