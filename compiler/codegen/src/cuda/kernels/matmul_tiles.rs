//! A block of threads makes a tile of C on ordinary cores: operands staged through shared memory, sums in registers.
//!
//! A thread's rows are groups of four neighbours, so that it reads shared memory 16 bytes at a time; the groups are spread over the
//! tile, so that a warp's reads meet no bank twice. Outside of the operands zeros are staged, and steps of k beyond the end are left out.

use super::matmul_stage::{Stage, Standing, staged_sum};
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
