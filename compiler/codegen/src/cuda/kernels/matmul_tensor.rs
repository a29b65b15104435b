//! A block of threads makes a tile of C on tensor cores: each warp a part of it, in products of 16x8 of C.
//!
//! Operands come through shared memory as on ordinary cores (see [`super::matmul_stage`]), but stand there as they do in memory. What a
//! lane has of a 16x8 product is fixed (PTX ISA, `mma.sync`): with `g` = lane div 4 and `t` = lane mod 4
//!
//! | operand | registers |
//! |---|---|
//! | A, 16 rows of 32 bytes of k | rows g and g + 8 at word t, then both at word t + 4 |
//! | B, 8 columns of 32 bytes of k | column g at words t and t + 4 |
//! | C | row g at columns 2t and 2t + 1, then row g + 8 |
//!
//! A word is one tf32, or two bf16. Operands that stand along k are loaded by `ldmatrix`: four matrices of eight rows of 16 bytes, of which
//! lane 8j + r gives the address of row r of matrix j. Others in bf16 are loaded so that rows and columns change places; in tf32 word by
//! word, for lack of such a load of 32-bit elements.

use super::matmul_stage::{Stage, Standing, staged_sum};
use super::matmul_sums::{Shape, Thread, Tile};
use crate::cuda::code::{Buffer, Code, WARP};
use model::kernel::{Form, MatMul, Tiles};

/// Rows and columns of C in one product, and words of k.
const ROWS: u64 = 16;
const COLUMNS: u64 = 8;
const WORDS: u64 = 8;
/// Neighbours in C that a lane has.
const NEIGHBOURS: usize = 2;

/// The block at work.
pub struct Block<'b> {
    shape: Shape,
    /// Rows and columns of a warp.
    warp: [u64; 2],
    thread: Thread,
    /// The warp's first row and column in the block's tile.
    first: [String; 2],
    lane: Lane,
    stages: [Stage<'b>; 2],
    /// Of bf16, two to a word; else of tf32.
    bf16: bool,
}

/// A lane's numbers.
struct Lane {
    /// Div 4 and mod 4.
    g: String,
    t: String,
    /// Row within a matrix of `ldmatrix`, and the matrix's number: its low and its high bit.
    row: String,
    matrix: [String; 2],
}

/// Threads of a block.
pub fn threads(tiles: &Tiles) -> u32 {
    tiles.mc / tiles.mr * (tiles.nc / tiles.nr) * WARP
}

impl<'b> Block<'b> {
    pub fn new(code: &mut Code, matmul: &MatMul, tiles: &Tiles, [a, b]: [&'b Buffer; 2]) -> Self {
        let shape = Shape::new(matmul, tiles);
        let warp = [tiles.mr, tiles.nr].map(u64::from);
        let thread = Thread::new(code, &shape);
        let (number, lane) = code.split(&thread.number, WARP.into());
        let (row, column) = code.split(&number, shape.columns / warp[1]);
        let first = [code.times(&row, warp[0]), code.times(&column, warp[1])];
        let lane = Lane::new(code, &lane);
        let mut stage = |operand| {
            let sizes = (&shape, u64::from(threads(tiles)));
            Stage::new(code, sizes, &thread, operand, (Standing::AsItIs, !a.is_bf16()))
        };
        let stages = [stage((a, 0, matmul.form != Form::TN)), stage((b, 1, matmul.form == Form::NT))];
        Self { shape, warp, thread, first, lane, stages, bf16: a.is_bf16() }
    }

    /// Elements of a word.
    fn per_word(&self) -> u64 {
        if self.bf16 { 2 } else { 1 }
    }

    fn by_matrices(&self, side: usize) -> bool {
        self.bf16 || self.stages[side].along_k
    }

    /// Adds the products of a half. What lies beyond the end of k is staged as zeros.
    fn multiply(&self, code: &mut Code, half: &str, sums: &[String]) -> Vec<String> {
        let mut sums = sums.to_vec();
        for word in (0..self.shape.steps / self.per_word()).step_by(WORDS as usize) {
            let a: Vec<_> = (0..self.warp[0]).step_by(ROWS as usize).map(|i| self.a(code, half, i, word)).collect();
            let pairs = (0..self.warp[1]).step_by(2 * COLUMNS as usize);
            let b: Vec<_> = pairs.flat_map(|j| self.b(code, half, j, word)).collect();
            let products = a.iter().flat_map(|a| b.iter().map(move |b| (a, b)));
            for ((a, b), c) in products.zip(sums.chunks_exact_mut(4)) {
                let d = code.mma(self.bf16, [a, b, c]);
                c.clone_from_slice(&d);
            }
        }
        sums
    }

    /// The four registers of A for the 16 rows from `row` of the warp.
    fn a(&self, code: &mut Code, half: &str, row: u64, word: u64) -> Vec<String> {
        if self.by_matrices(0) {
            return self.matrices(code, 0, half, (row, 0), (word, 1));
        }
        let places = [(0, 0), (8, 0), (0, 4), (8, 4)];
        places.iter().map(|(r, w)| self.word(code, 0, half, row + r, word + w)).collect()
    }

    /// The two registers of B for each of the eight columns from `column` of the warp and the eight after them.
    fn b(&self, code: &mut Code, half: &str, column: u64, word: u64) -> [Vec<String>; 2] {
        if self.by_matrices(1) {
            let mut first = self.matrices(code, 1, half, (column, 1), (word, 0));
            let second = first.split_off(2);
            return [first, second];
        }
        [0, 8].map(|more| [0, 4].iter().map(|w| self.word(code, 1, half, column + more, word + w)).collect())
    }

    /// A word of tf32 that stands by steps of k.
    fn word(&self, code: &mut Code, side: usize, half: &str, row: u64, word: u64) -> String {
        let own = code.plus(&self.first[side], &self.lane.g);
        let (row, step) = (code.plus_const(&own, row), code.plus_const(&self.lane.t, word));
        let value = code.load(&self.stages[side].half, &[half, &step, &row]);
        code.op(&format!("arith.bitcast {value} : f32 to i32"))
    }

    /// Four matrices of eight rows of four words: `row` and `word` are the first ones, each with the bit of a matrix's number that tells
    /// the first eight rows, or four words, from the second.
    fn matrices(
        &self,
        code: &mut Code,
        side: usize,
        half: &str,
        (row, row_bit): (u64, usize),
        (word, word_bit): (u64, usize),
    ) -> Vec<String> {
        let stage = &self.stages[side];
        let (row_of_matrix, step_of_matrix) =
            (code.times(&self.lane.matrix[row_bit], 8), code.times(&self.lane.matrix[word_bit], 4 * self.per_word()));
        let row_of_matrix = code.plus(&self.first[side], &row_of_matrix);
        let row = code.plus_const(&row_of_matrix, row);
        let step = code.plus_const(&step_of_matrix, word * self.per_word());
        if stage.along_k {
            let row = code.plus(&row, &self.lane.row);
            return code.ldmatrix(&stage.half, &[half, &row, &step], false);
        }
        let step = code.plus(&step, &self.lane.row);
        code.ldmatrix(&stage.half, &[half, &step, &row], true)
    }
}

impl Lane {
    fn new(code: &mut Code, lane: &str) -> Self {
        let (g, t) = code.split(lane, 4);
        let (matrix, row) = code.split(lane, 8);
        let (high, low) = code.split(&matrix, 2);
        Self { g, t, row, matrix: [low, high] }
    }
}

impl Tile for Block<'_> {
    fn shape(&self) -> &Shape {
        &self.shape
    }

    fn neighbours(&self) -> usize {
        NEIGHBOURS
    }

    fn places(&self, code: &mut Code) -> Vec<[String; 2]> {
        let first: Vec<_> = (0..2).map(|side| code.plus(&self.thread.block[side], &self.first[side])).collect();
        let row = code.plus(&first[0], &self.lane.g);
        let column = code.times_plus(&self.lane.t, NEIGHBOURS as u64, &first[1]);
        let mut places = Vec::new();
        for i in (0..self.warp[0]).step_by(ROWS as usize) {
            for j in (0..self.warp[1]).step_by(COLUMNS as usize) {
                for half in [0, ROWS / 2] {
                    places.push([code.plus_const(&row, i + half), code.plus_const(&column, j)]);
                }
            }
        }
        places
    }

    fn sum(&self, code: &mut Code, (from, to): (&str, &str), half: &str) -> (Vec<String>, String) {
        let zero = code.constant(0.0);
        let count = self.warp[0] * self.warp[1] / u64::from(WARP);
        let start = (half, vec![zero; count as usize]);
        staged_sum(code, &self.stages, (from, to, self.shape.steps), start, |code, half, _, sums| {
            self.multiply(code, half, sums)
        })
    }
}
