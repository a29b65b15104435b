//! A block of threads makes a tile of C on ordinary cores: operands staged through shared memory, sums in registers.
//!
//! # The loop over k
//!
//! Both operands stand in shared memory as [step of k, row or column], twice: while one half is used, the other is filled. Each thread
//! carries the four elements of A and of B that it stages next, so that their loads are under way while it computes:
//!
//! 1. write what is carried to the half that was not used last
//! 2. barrier
//! 3. load what comes after it
//! 4. add the products of the steps in this half
//!
//! One barrier is enough: a thread that writes a half has passed the barrier that every thread reached after its use.
//!
//! A thread's rows are groups of four neighbours, so that it reads shared memory 16 bytes at a time; the groups are spread over the
//! tile, so that a warp's reads meet no bank twice. Outside of the operands zeros are staged, and steps of k beyond the end are left out.

use super::matmul_stage::{Stage, Standing};
use super::matmul_sums::{Shape, Thread, Tile};
use crate::cuda::code::{Buffer, Code, WIDE};
use model::kernel::{Form, MatMul, Tiles};

/// The block at work.
pub struct Block<'b> {
    shape: Shape,
    /// Rows and columns of a thread.
    own: [u64; 2],
    thread: Thread,
    /// A thread's first row and column within each spread group.
    first: [String; 2],
    stages: [Stage<'b>; 2],
}

/// Threads of a block.
pub fn threads(tiles: &Tiles) -> u32 {
    tiles.mc / tiles.mr * (tiles.nc / tiles.nr)
}

impl<'b> Block<'b> {
    pub fn new(code: &mut Code, matmul: &MatMul, tiles: &Tiles, [a, b]: [&'b Buffer; 2]) -> Self {
        let shape = Shape::new(matmul, tiles);
        let own = [tiles.mr, tiles.nr].map(u64::from);
        let thread = Thread::new(code, &shape);
        let (row, column) = code.split(&thread.number, shape.columns / own[1]);
        let first = [code.times(&row, WIDE as u64), code.times(&column, WIDE as u64)];
        let mut stage = |operand| {
            let sizes = (&shape, u64::from(threads(tiles)));
            Stage::new(code, sizes, &thread, operand, (Standing::BySteps, false))
        };
        let stages = [stage((a, 0, matmul.form != Form::TN)), stage((b, 1, matmul.form == Form::NT))];
        Self { shape, own, thread, first, stages }
    }

    /// Adds the products of the first `count` steps of a half.
    fn multiply(&self, code: &mut Code, (half, count): (&str, &str), sums: &[String]) -> Vec<String> {
        let (zero, one) = (code.index(0), code.index(1));
        let carried: Vec<_> = sums.iter().map(|sum| (sum.clone(), "f32")).collect();
        code.repeat((&zero, count, &one), &carried, |code, step, sums| {
            let [a, b] = [(0, self.shape.rows), (1, self.shape.columns)]
                .map(|(side, tile)| self.fragment(code, side, tile, (half, step)));
            let products = a.iter().flat_map(|a| b.iter().map(move |b| (a, b)));
            sums.iter().zip(products).map(|(sum, (a, b))| code.fma(a, b, sum)).collect()
        })
    }

    /// A thread's elements of one staged step.
    fn fragment(&self, code: &mut Code, side: usize, tile: u64, (half, step): (&str, &str)) -> Vec<String> {
        let groups = self.own[side] / WIDE as u64;
        let of_group = |g| {
            let at = code.plus_const(&self.first[side], g * tile / groups);
            let vector = code.load_wide(&self.stages[side].half, &[half, step, &at]);
            code.elements(&vector)
        };
        (0..groups).flat_map(of_group).collect()
    }
}

impl Tile for Block<'_> {
    fn shape(&self) -> &Shape {
        &self.shape
    }

    fn neighbours(&self) -> usize {
        WIDE
    }

    fn places(&self, code: &mut Code) -> Vec<[String; 2]> {
        let spread = |count: u64, tile: u64| {
            (0..count).map(move |i| i / WIDE as u64 * (tile / (count / WIDE as u64)) + i % WIDE as u64)
        };
        let first: Vec<_> = (0..2).map(|side| code.plus(&self.thread.block[side], &self.first[side])).collect();
        let mut places = Vec::new();
        for row in spread(self.own[0], self.shape.rows) {
            let row = code.plus_const(&first[0], row);
            for column in spread(self.own[1], self.shape.columns).step_by(WIDE) {
                places.push([row.clone(), code.plus_const(&first[1], column)]);
            }
        }
        places
    }

    fn sum(&self, code: &mut Code, (from, to): (&str, &str), half: &str) -> (Vec<String>, String) {
        let zero = code.constant(0.0);
        let zeros = vec![zero; (self.own[0] * self.own[1]) as usize];
        staged_sum(code, &self.stages, (from, to, self.shape.steps), (half, zeros), |code, half, at, sums| {
            let step = code.index(self.shape.steps);
            let left = code.index_op("arith.subi", to, at);
            let count = code.min(&left, &step);
            self.multiply(code, (half, &count), sums)
        })
    }
}

/// The loop over k in `from .. to` in steps of `steps`, see the module's text: from the half that comes first and the sums, gives the sums
/// and the half that comes next. `multiply` gets a filled half, its first step in k, and the sums.
pub fn staged_sum(
    code: &mut Code,
    stages: &[Stage; 2],
    (from, to, steps): (&str, &str, u64),
    (half, sums): (&str, Vec<String>),
    multiply: impl Fn(&mut Code, &str, &str, &[String]) -> Vec<String>,
) -> (Vec<String>, String) {
    let step = code.index(steps);
    let loaded = stages.each_ref().map(|stage| stage.load(code, from, to));
    let counts = loaded.each_ref().map(Vec::len);
    let types = stages.iter().zip(counts).flat_map(|(stage, count)| vec![stage.piece_type(); count]);
    let mut carried: Vec<_> = loaded.concat().into_iter().zip(types).collect();
    let pieces = carried.len();
    carried.push((half.into(), "index"));
    carried.extend(sums.into_iter().map(|sum| (sum, "f32")));
    let mut done = code.repeat((from, to, &step), &carried, |code, at, so_far| {
        let half = &so_far[pieces];
        let (first, second) = so_far[..pieces].split_at(counts[0]);
        stages[0].store(code, first, half);
        stages[1].store(code, second, half);
        code.barrier();
        let next = code.plus(at, &step);
        let mut carried = stages.each_ref().map(|stage| stage.load(code, &next, to)).concat();
        let one = code.index(1);
        carried.push(code.index_op("arith.subi", &one, half));
        carried.extend(multiply(code, half, at, &so_far[pieces + 1..]));
        carried
    });
    let sums = done.split_off(pieces + 1);
    (sums, done.remove(pieces))
}
