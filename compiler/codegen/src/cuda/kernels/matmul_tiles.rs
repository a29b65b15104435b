//! A block of threads makes a tile of C: operands staged through shared memory, sums in registers.
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

use super::matmul::group;
use crate::cuda::code::{Buffer, Code, WIDE};
use model::kernel::{Form, MatMul, Tiles};

/// What is done with the sums over k.
pub trait Sums {
    /// What the sums of the blocks of k are added to, for `count` neighbours from `at`.
    fn start(&self, code: &mut Code, at: [&str; 2], count: usize) -> Vec<String>;
    /// Takes whole sums.
    fn finish(&self, code: &mut Code, at: [&str; 2], sums: &[String]);
}

/// The block's tile and its thread's part.
pub struct Block {
    m: u64,
    n: u64,
    k: u64,
    form: Form,
    pub rows: u64,
    pub columns: u64,
    /// Of a thread.
    thread_rows: u64,
    thread_columns: u64,
    /// Steps of k that are staged at a time.
    steps: u64,
    /// k that is summed from zero.
    summed: u64,
}

/// Floats that a row of staged memory is longer than the tile: keeps 16-byte alignment, and moves rows to other banks.
const PADDING: u64 = 4;

/// How a thread stages one operand.
struct Stage<'b> {
    from: &'b Buffer,
    half: Buffer,
    /// Whether neighbours in memory are neighbours in k.
    along_k: bool,
    /// First row or column of the block's tile, in the operand, and how many there are.
    first: String,
    extent: u64,
    /// The thread's first element in the tile: row or column, and step of k.
    place: (String, String),
    /// Four neighbours are one access.
    wide: bool,
}

/// Where a thread is.
struct Thread {
    /// First row and column of the block.
    block: [String; 2],
    /// Its first row and column within each spread group.
    own: [String; 2],
    number: String,
}

impl Block {
    pub fn new(matmul: &MatMul, tiles: &Tiles) -> Self {
        let [m, n, k] = [matmul.m, matmul.n, matmul.k].map(u64::from);
        let [rows, columns, thread_rows, thread_columns, steps, summed] =
            [tiles.mc, tiles.nc, tiles.mr, tiles.nr, tiles.kr, tiles.kc].map(u64::from);
        let block = Self { m, n, k, form: matmul.form, rows, columns, thread_rows, thread_columns, steps, summed };
        let staged = WIDE as u64 * u64::from(block.threads());
        assert_eq!((rows * steps, columns * steps), (staged, staged), "each thread stages four elements of A and of B");
        block
    }

    pub fn threads(&self) -> u32 {
        let threads = self.rows / self.thread_rows * (self.columns / self.thread_columns);
        u32::try_from(threads).expect("a block has at most 1024 threads")
    }

    /// The whole kernel after its operands.
    pub fn product(&self, code: &mut Code, [a, b]: [&Buffer; 2], end: &dyn Sums) {
        let thread = self.thread(code);
        let stages = [
            self.stage(code, &thread, a, 0, self.form != Form::TN),
            self.stage(code, &thread, b, 1, self.form == Form::NT),
        ];
        if self.summed >= self.k {
            let (zero, last) = (code.index(0), code.index(self.k));
            let parity = zero.clone();
            let (sums, _) = self.sum(code, &stages, &thread, (&zero, &last), &parity);
            return self.each_group(code, &thread, |code, at, first, count| {
                let start = end.start(code, at, count);
                let sums: Vec<_> = start.iter().zip(&sums[first..]).map(|(s, part)| code.add(s, part)).collect();
                end.finish(code, at, &sums);
            });
        }
        let totals = self.totals(code, &stages, &thread, end);
        self.each_group(code, &thread, |code, at, first, count| end.finish(code, at, &totals[first..first + count]));
    }

    /// The sums of all blocks of k, one after the other added to what they start from.
    fn totals(&self, code: &mut Code, stages: &[Stage; 2], thread: &Thread, end: &dyn Sums) -> Vec<String> {
        let (zero, last, step) = (code.index(0), code.index(self.k), code.index(self.summed));
        let mut carried = Vec::new();
        let count = group(self.n);
        for [row, column] in self.places(code, thread) {
            for first in (0..WIDE).step_by(count) {
                let column = code.plus_const(&column, first as u64);
                carried.extend(self.start(code, [&row, &column], count, end));
            }
        }
        let mut carried: Vec<_> = carried.into_iter().map(|value| (value, "f32")).collect();
        carried.push((zero.clone(), "index"));
        let mut totals = code.repeat((&zero, &last, &step), &carried, |code, first, so_far| {
            let (totals, parity) = so_far.split_at(so_far.len() - 1);
            let after = code.plus(first, &step);
            let after = code.min(&after, &last);
            let (parts, parity) = self.sum(code, stages, thread, (first, &after), &parity[0]);
            let mut next: Vec<_> = totals.iter().zip(&parts).map(|(total, part)| code.add(total, part)).collect();
            next.push(parity);
            next
        });
        totals.pop();
        totals
    }

    /// The start of `count` neighbours, zeros outside of C.
    fn start(&self, code: &mut Code, [row, column]: [&str; 2], count: usize, end: &dyn Sums) -> Vec<String> {
        let exists = self.exists(code, [row, column]);
        let zero = code.constant(0.0);
        let types = vec!["f32"; count].join(", ");
        let result = code.values(count, &format!("scf.if {exists} -> ({types}) {{"));
        let values = end.start(code, [row, column], count).join(", ");
        let zeros = vec![zero; count].join(", ");
        code.line(&format!("scf.yield {values} : {types}\n}} else {{\nscf.yield {zeros} : {types}\n}}"));
        (0..count).map(|i| format!("{result}#{i}")).collect()
    }

    fn thread(&self, code: &mut Code) -> Thread {
        let number = code.thread();
        let (row, column) = code.split(&number, self.columns / self.thread_columns);
        let own = [code.times(&row, WIDE as u64), code.times(&column, WIDE as u64)];
        let blocks = [code.block("y"), code.block("x")];
        let block = [code.times(&blocks[0], self.rows), code.times(&blocks[1], self.columns)];
        Thread { block, own, number }
    }

    /// `side` 0 stages A, whose tile has the block's rows; 1 B, columns.
    fn stage<'b>(&self, code: &mut Code, thread: &Thread, from: &'b Buffer, side: usize, along_k: bool) -> Stage<'b> {
        let (tile, extent) = [(self.rows, self.m), (self.columns, self.n)][side];
        let (wide, place) = if along_k {
            let (row, step) = code.split(&thread.number, self.steps / WIDE as u64);
            let whole = self.k.is_multiple_of(WIDE as u64) && self.summed.is_multiple_of(WIDE as u64);
            (whole, (row, code.times(&step, WIDE as u64)))
        } else {
            let (step, row) = code.split(&thread.number, tile / WIDE as u64);
            (extent.is_multiple_of(WIDE as u64), (code.times(&row, WIDE as u64), step))
        };
        let half = code.shared(&[2, self.steps, tile + PADDING]);
        Stage { from, half, along_k, first: thread.block[side].clone(), extent, place, wide }
    }

    /// The thread's sums over k in `from .. to`, from zero, and the half that comes next.
    fn sum(
        &self,
        code: &mut Code,
        stages: &[Stage; 2],
        thread: &Thread,
        (from, to): (&str, &str),
        parity: &str,
    ) -> (Vec<String>, String) {
        let step = code.index(self.steps);
        let mut carried: Vec<_> = stages.iter().map(|s| (s.load(code, from, to), "vector<4xf32>")).collect();
        carried.push((parity.into(), "index"));
        let zero = code.constant(0.0);
        carried.extend(vec![(zero, "f32"); (self.thread_rows * self.thread_columns) as usize]);
        let mut sums = code.repeat((from, to, &step), &carried, |code, at, so_far| {
            let half = &so_far[2];
            for (stage, carried) in stages.iter().zip(so_far) {
                stage.store(code, carried, half);
            }
            code.barrier();
            let next = code.plus(at, &step);
            let mut carried: Vec<_> = stages.iter().map(|stage| stage.load(code, &next, to)).collect();
            let one = code.index(1);
            carried.push(code.index_op("arith.subi", &one, half));
            let left = code.index_op("arith.subi", to, at);
            let count = code.min(&left, &step);
            carried.extend(self.multiply(code, stages, thread, (half, &count), &so_far[3..]));
            carried
        });
        let sums_only = sums.split_off(3);
        (sums_only, sums.remove(2))
    }

    /// Adds the products of the first `count` steps of a half.
    fn multiply(
        &self,
        code: &mut Code,
        stages: &[Stage; 2],
        thread: &Thread,
        (half, count): (&str, &str),
        sums: &[String],
    ) -> Vec<String> {
        let (zero, one) = (code.index(0), code.index(1));
        let carried: Vec<_> = sums.iter().map(|sum| (sum.clone(), "f32")).collect();
        code.repeat((&zero, count, &one), &carried, |code, step, sums| {
            let a = self.fragment(code, &stages[0], (half, step), &thread.own[0], (self.rows, self.thread_rows));
            let b = self.fragment(code, &stages[1], (half, step), &thread.own[1], (self.columns, self.thread_columns));
            let products = a.iter().flat_map(|a| b.iter().map(move |b| (a, b)));
            sums.iter().zip(products).map(|(sum, (a, b))| code.fma(a, b, sum)).collect()
        })
    }

    /// A thread's elements of one staged step.
    fn fragment(
        &self,
        code: &mut Code,
        stage: &Stage,
        (half, step): (&str, &str),
        own: &str,
        (tile, count): (u64, u64),
    ) -> Vec<String> {
        let groups = count / WIDE as u64;
        (0..groups)
            .flat_map(|g| {
                let at = code.plus_const(own, g * tile / groups);
                let vector = code.load_wide(&stage.half, &[half, step, &at]);
                code.elements(&vector)
            })
            .collect()
    }

    /// Row and first column of each four neighbours of the thread, in the order of its sums.
    fn places(&self, code: &mut Code, thread: &Thread) -> Vec<[String; 2]> {
        let spread = |count: u64, tile: u64| {
            (0..count).map(move |i| i / WIDE as u64 * (tile / (count / WIDE as u64)) + i % WIDE as u64)
        };
        let first: Vec<_> = (0..2).map(|side| code.plus(&thread.block[side], &thread.own[side])).collect();
        let mut places = Vec::new();
        for row in spread(self.thread_rows, self.rows) {
            let row = code.plus_const(&first[0], row);
            for column in spread(self.thread_columns, self.columns).step_by(WIDE) {
                places.push([row.clone(), code.plus_const(&first[1], column)]);
            }
        }
        places
    }

    /// Whether the neighbours from here are in C: a group never sticks out in part.
    fn exists(&self, code: &mut Code, [row, column]: [&str; 2]) -> String {
        if self.m.is_multiple_of(self.rows) && self.n.is_multiple_of(self.columns) {
            return code.always();
        }
        let (row, column) = (code.below_const(row, self.m), code.below_const(column, self.n));
        code.both(&row, &column)
    }

    /// Calls `body` with the place of each group that is written at once, the index of its first sum, and its size.
    fn each_group(&self, code: &mut Code, thread: &Thread, body: impl Fn(&mut Code, [&str; 2], usize, usize)) {
        let count = group(self.n);
        for (i, [row, column]) in self.places(code, thread).into_iter().enumerate() {
            for first in (0..WIDE).step_by(count) {
                let column = code.plus_const(&column, first as u64);
                let exists = self.exists(code, [&row, &column]);
                code.when(&exists, |code| body(code, [&row, &column], i * WIDE + first, count));
            }
        }
    }
}

impl Stage<'_> {
    /// The thread's four elements of the steps from `at`, zeros outside.
    fn load(&self, code: &mut Code, at: &str, end: &str) -> String {
        let (row, step) = (code.plus(&self.first, &self.place.0), code.plus(at, &self.place.1));
        if self.wide {
            let (inside, at) = self.position(code, &row, &step, end);
            let zeros = code.op("arith.constant dense<0.0> : vector<4xf32>");
            return code
                .when_or(&inside, (&zeros, "vector<4xf32>"), |code| code.load_wide(self.from, &[&at[0], &at[1]]));
        }
        let zero = code.constant(0.0);
        let elements: Vec<_> = (0..WIDE as u64)
            .map(|i| {
                let (row, step) = if self.along_k {
                    (row.clone(), code.plus_const(&step, i))
                } else {
                    (code.plus_const(&row, i), step.clone())
                };
                let (inside, at) = self.position(code, &row, &step, end);
                code.when_or(&inside, (&zero, "f32"), |code| code.load(self.from, &[&at[0], &at[1]]))
            })
            .collect();
        code.vector(&elements)
    }

    /// Whether an element exists, and its indices in the operand.
    fn position(&self, code: &mut Code, row: &str, step: &str, end: &str) -> (String, [String; 2]) {
        let (exists, summed) = (code.below_const(row, self.extent), code.below(step, end));
        let inside = code.both(&exists, &summed);
        let (row, step) = (row.to_string(), step.to_string());
        (inside, if self.along_k { [row, step] } else { [step, row] })
    }

    fn store(&self, code: &mut Code, vector: &str, half: &str) {
        let (row, step) = &self.place;
        if !self.along_k {
            return code.store_wide(vector, &self.half, &[half, step, row]);
        }
        for (i, element) in code.elements(vector).into_iter().enumerate() {
            let step = code.plus_const(step, i as u64);
            code.store(&element, &self.half, &[half, &step, row]);
        }
    }
}
