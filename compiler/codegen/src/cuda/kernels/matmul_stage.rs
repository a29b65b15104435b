//! Operands' tiles on their way through shared memory, for all threads of a block.
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

use super::matmul_sums::{Shape, Thread};
use crate::cuda::code::{Buffer, Code};

/// How the tile of an operand stands in shared memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// [step of k, row or column], whichever way it stands in memory.
    BySteps,
    /// As in memory, so that 16 bytes stay together.
    AsItIs,
}

/// What a thread stages of one operand: pieces of 16 bytes.
pub struct Stage<'b> {
    from: &'b Buffer,
    pub half: Buffer,
    /// Whether neighbours in memory are neighbours in k.
    pub along_k: bool,
    /// First row or column of the block's tile, in the operand, and how many there are.
    first: String,
    extent: u64,
    /// The first element of each of the thread's pieces in the tile: row or column, and step of k.
    places: Vec<(String, String)>,
    /// A piece is one access.
    wide: bool,
    standing: Standing,
    /// Rounded to tf32 on the way.
    rounded: bool,
}

/// Elements that a row of staged memory is longer than the tile: keeps 16-byte alignment, and moves rows to other banks.
/// Rows that are read eight at a time with 16 bytes each meet each bank once when they have 16 bytes more than 64, or than a multiple of
/// 128. Steps of tf32 are read by words, four rows with eight neighbours each: with 32 bytes more.
const PADDING_BYTES: u64 = 16;
const PADDING_OF_STEPS_BYTES: u64 = 32;

impl<'b> Stage<'b> {
    /// `side` 0 stages A, whose tile has the block's rows; 1 B, columns. Of `threads` each takes as many pieces.
    pub fn new(
        code: &mut Code,
        (shape, threads): (&Shape, u64),
        thread: &Thread,
        (from, side, along_k): (&'b Buffer, usize, bool),
        (standing, rounded): (Standing, bool),
    ) -> Self {
        let (tile, extent) = [(shape.rows, shape.m), (shape.columns, shape.n)][side];
        let piece = from.piece();
        let pieces = tile * shape.steps / piece / threads;
        assert_eq!(pieces * piece * threads, tile * shape.steps, "each thread stages as many whole pieces");
        let place = |code: &mut Code, i: u64| {
            let number = code.plus_const(&thread.number, i * threads);
            if along_k {
                let (row, step) = code.split(&number, shape.steps / piece);
                (row, code.times(&step, piece))
            } else {
                let (step, row) = code.split(&number, tile / piece);
                (code.times(&row, piece), step)
            }
        };
        let places = (0..pieces).map(|i| place(code, i)).collect();
        let wide = match along_k {
            true => shape.k.is_multiple_of(piece) && shape.summed.is_multiple_of(piece),
            false => extent.is_multiple_of(piece),
        };
        let padding = |bytes: u64| bytes * piece / 16;
        let kept = standing == Standing::AsItIs;
        let half = match (kept, along_k) {
            (true, true) => [2, tile, shape.steps + padding(PADDING_BYTES)],
            (true, false) => {
                let bytes = if from.is_bf16() { PADDING_BYTES } else { PADDING_OF_STEPS_BYTES };
                [2, shape.steps, tile + padding(bytes)]
            }
            (false, _) => [2, shape.steps, tile + padding(PADDING_BYTES)],
        };
        let half = code.shared_of(&half, from.element());
        Self { from, half, along_k, first: thread.block[side].clone(), extent, places, wide, standing, rounded }
    }

    /// The type of a piece.
    pub fn piece_type(&self) -> &'static str {
        self.from.piece_type()
    }

    /// The thread's pieces of the steps from `at`, zeros outside.
    pub fn load(&self, code: &mut Code, at: &str, end: &str) -> Vec<String> {
        self.places.iter().map(|place| self.load_piece(code, place, at, end)).collect()
    }

    fn load_piece(&self, code: &mut Code, place: &(String, String), at: &str, end: &str) -> String {
        let (row, step) = (code.plus(&self.first, &place.0), code.plus(at, &place.1));
        if self.wide {
            let (inside, at) = self.position(code, &row, &step, end);
            let zeros = code.op(&format!("arith.constant dense<0.0> : {}", self.piece_type()));
            return code
                .when_or(&inside, (&zeros, self.piece_type()), |code| code.load_wide(self.from, &[&at[0], &at[1]]));
        }
        let element = self.from.element();
        let zero = code.op(&format!("arith.constant 0.0 : {element}"));
        let elements: Vec<_> = (0..self.from.piece())
            .map(|i| {
                let (row, step) = if self.along_k {
                    (row.clone(), code.plus_const(&step, i))
                } else {
                    (code.plus_const(&row, i), step.clone())
                };
                let (inside, at) = self.position(code, &row, &step, end);
                code.when_or(&inside, (&zero, element), |code| code.load_raw(self.from, &[&at[0], &at[1]]))
            })
            .collect();
        code.op(&format!("vector.from_elements {} : {}", elements.join(", "), self.piece_type()))
    }

    /// Whether an element exists, and its indices in the operand.
    fn position(&self, code: &mut Code, row: &str, step: &str, end: &str) -> (String, [String; 2]) {
        let (exists, summed) = (code.below_const(row, self.extent), code.below(step, end));
        let inside = code.both(&exists, &summed);
        let (row, step) = (row.to_string(), step.to_string());
        (inside, if self.along_k { [row, step] } else { [step, row] })
    }

    /// Writes the pieces to a half.
    pub fn store(&self, code: &mut Code, pieces: &[String], half: &str) {
        for ((row, step), piece) in self.places.iter().zip(pieces) {
            let piece = if self.rounded { code.rounded_to_tf32(piece) } else { piece.clone() };
            match (self.standing, self.along_k) {
                (Standing::AsItIs, true) => code.store_wide(&piece, &self.half, &[half, row, step]),
                (_, false) => code.store_wide(&piece, &self.half, &[half, step, row]),
                (Standing::BySteps, true) => {
                    for (i, element) in code.elements(&piece).into_iter().enumerate() {
                        let step = code.plus_const(step, i as u64);
                        code.store(&element, &self.half, &[half, &step, row]);
                    }
                }
            }
        }
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
