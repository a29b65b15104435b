//! [`UpdatePart::Turn`]: the text of both a CPU's function and a block of device threads.
//!
//! A column is worked on by itself, its sums ascending in fused multiply-adds. So it has the same bits whether it is an element of a vector or
//! a thread's, and both targets run the same operations: [`Workers`] says who takes which columns, and everything else is written once.
//!
//! [`UpdatePart::Turn`]: model::kernel::UpdatePart::Turn

use super::sink::HYPER;
use crate::cuda::code::{Buffer, Code, Operands, host_function};
use artifact::optimizer::HYPER_LEN;
use model::kernel::Side;
use model::target::CpuClass;

/// Vectors of columns that are worked on at once where there are so many.
const VECTORS: u64 = 4;
/// Hyper-parameters: whether q starts as the unit matrix, and how often it turns.
const START: u64 = 8;
const TURNS: u64 = 11;

/// Who does the work.
#[derive(Clone, Copy)]
pub enum Workers {
    /// One thread, with vectors of so many elements.
    One { lanes: u64 },
    /// The threads of one block.
    Block { threads: u32 },
}

/// A basis to turn, and its operands.
pub struct Turn {
    side: Side,
    rows: u64,
    columns: u64,
    dim: u64,
    operands: Operands,
    hyper: Buffer,
    a: Buffer,
    q: Buffer,
    v: Buffer,
    /// Rows `dim` and on: see [`Row`].
    work: Buffer,
}

/// What the last rows of `work` hold.
#[derive(Clone, Copy)]
enum Row {
    /// By column: the place that it comes to. Then the vector of the reflection at hand.
    Vector,
    /// By place: the column that comes there. Then the factors of the reflections.
    Factors,
    /// The diagonal of qᵀ a q.
    Diagonal,
    /// What q's columns are divided by to be the reflections' vectors.
    Divisors,
}

/// A function for a CPU.
pub fn host(name: &str, turn: &Turn, cpu: CpuClass) -> String {
    host_function(name, &turn.operands, |code| turn.write(code, Workers::One { lanes: cpu.lanes().into() }))
}

/// Columns that are worked on at once.
#[derive(Clone, Copy)]
struct Group {
    vectors: u64,
    lanes: u64,
}

impl Group {
    fn ty(self) -> String {
        if self.lanes == 1 { "f32".into() } else { format!("vector<{}xf32>", self.lanes) }
    }

    /// The first column of each vector.
    fn columns(self, code: &mut Code, first: &str) -> Vec<String> {
        (0..self.vectors).map(|v| code.plus_const(first, v * self.lanes)).collect()
    }

    fn load(self, code: &mut Code, from: &Buffer, row: &str, columns: &[String]) -> Vec<String> {
        columns.iter().map(|column| code.load_lanes(from, &[row, column], self.lanes)).collect()
    }

    fn store(self, code: &mut Code, values: &[String], to: &Buffer, row: &str, columns: &[String]) {
        for (value, column) in values.iter().zip(columns) {
            code.store_lanes(value, to, &[row, column], self.lanes);
        }
    }

    /// A number for all columns.
    fn spread(self, code: &mut Code, value: &str) -> String {
        match self.lanes {
            1 => value.into(),
            _ => code.op(&format!("vector.broadcast {value} : f32 to {}", self.ty())),
        }
    }

    fn fma(self, code: &mut Code, a: &str, b: &str, c: &str) -> String {
        code.op(&format!("math.fma {a}, {b}, {c} : {}", self.ty()))
    }

    /// By vector, the sum of products over `from` to `to`, ascending; `terms` gives the factors.
    fn sum(
        self,
        code: &mut Code,
        (from, to): (&str, &str),
        terms: impl FnOnce(&mut Code, &str) -> (Vec<String>, Vec<String>),
    ) -> Vec<String> {
        let nothing = code.constant(0.0);
        let (nothing, ty, one) = (self.spread(code, &nothing), self.ty(), code.index(1));
        let start = vec![(nothing, ty.as_str()); self.vectors as usize];
        code.repeat((from, to, &one), &start, |code, at, so_far| {
            let (a, b) = terms(code, at);
            so_far.iter().zip(a.iter().zip(&b)).map(|(c, (a, b))| self.fma(code, a, b, c)).collect()
        })
    }
}

impl Turn {
    pub fn new(rows: u32, columns: u32, side: Side) -> Self {
        let dim = side.dim(rows, columns).into();
        let (rows, columns) = (rows.into(), columns.into());
        let mut operands = Operands::in_f32();
        Self {
            side,
            rows,
            columns,
            dim,
            hyper: operands.f32(HYPER, &[HYPER_LEN as u64]),
            a: operands.f32("a", &[dim, dim]),
            q: operands.f32("q", &[dim, dim]),
            v: operands.f32("v", &[rows, columns]),
            work: operands.f32("work", &[dim + 4, dim]),
            operands,
        }
    }

    pub fn operands(&self) -> &Operands {
        &self.operands
    }

    /// The function's body.
    pub fn write(&self, code: &mut Code, workers: Workers) {
        let [start, turns] = [START, TURNS].map(|at| {
            let at = code.index(at);
            code.load(&self.hyper, &[&at])
        });
        let turns = number(code, &turns);
        let (zero, one, dim) = (code.index(0), code.index(1), code.index(self.dim));
        let w = Writer { turn: self, workers, zero, one: one.clone(), dim };
        w.each(code, (&w.zero, &w.dim), |code, i| {
            let old = code.load(&self.q, &[i, i]);
            let new = code.add(&old, &start);
            code.store(&new, &self.q, &[i, i]);
        });
        w.meet(code);
        code.repeat((&w.zero, &turns, &one), &[], |code, _, _| {
            w.product(code);
            w.sort(code);
            w.take_in_order(code);
            w.reflect(code);
            w.collect(code);
            Vec::new()
        });
    }
}

/// An f32 that is a whole number, as an index.
fn number(code: &mut Code, value: &str) -> String {
    let whole = code.op(&format!("arith.fptoui {value} : f32 to i64"));
    code.op(&format!("arith.index_cast {whole} : i64 to index"))
}

/// Writes the steps of a turn.
struct Writer<'a> {
    turn: &'a Turn,
    workers: Workers,
    zero: String,
    one: String,
    dim: String,
}

impl Writer<'_> {
    fn row(&self, code: &mut Code, row: Row) -> String {
        code.index(self.turn.dim + row as u64)
    }

    /// What was written is there for all from here on.
    fn meet(&self, code: &mut Code) {
        if let Workers::Block { .. } = self.workers {
            code.barrier();
        }
    }

    /// For every row up to `to`, one after the other.
    fn rows(&self, code: &mut Code, to: &str, body: impl FnOnce(&mut Code, &str)) {
        code.repeat((&self.zero, to, &self.one), &[], |code, row, _| {
            body(code, row);
            Vec::new()
        });
    }

    /// For every index of `from..to`. A thread has every so manieth, and so the same ones at every step: no other writes to its columns.
    fn each(&self, code: &mut Code, (from, to): (&str, &str), body: impl FnOnce(&mut Code, &str)) {
        let (first, step) = match self.workers {
            Workers::One { .. } => (from.to_string(), self.one.clone()),
            Workers::Block { threads } => {
                let thread = code.thread();
                let (_, past) = code.split(from, threads.into());
                let step = code.index(threads.into());
                let ahead = code.plus(&thread, &step);
                let way = code.index_op("arith.subi", &ahead, &past);
                let (_, way) = code.split(&way, threads.into());
                (code.plus(from, &way), step)
            }
        };
        code.repeat((&first, to, &step), &[], |code, at, _| {
            body(code, at);
            Vec::new()
        });
    }

    /// For every column of `from..to`, in groups.
    fn columns(&self, code: &mut Code, (from, to): (&str, &str), mut body: impl FnMut(&mut Code, &[String], Group)) {
        let lanes = match self.workers {
            Workers::Block { .. } => {
                return self.each(code, (from, to), |code, at| {
                    body(code, &[at.to_string()], Group { vectors: 1, lanes: 1 });
                });
            }
            Workers::One { lanes } => lanes,
        };
        let mut from = from.to_string();
        for group in [(VECTORS, lanes), (1, lanes), (1, 1)].map(|(vectors, lanes)| Group { vectors, lanes }) {
            let together = group.vectors * group.lanes;
            if together > self.turn.dim {
                continue;
            }
            let step = code.index(together);
            let left = code.index_op("arith.subi", to, &from);
            let whole = code.index_op("arith.divui", &left, &step);
            let whole = code.times(&whole, together);
            let end = code.plus(&from, &whole);
            code.repeat((&from, &end, &step), &[], |code, at, _| {
                let columns = group.columns(code, at);
                body(code, &columns, group);
                Vec::new()
            });
            from = end;
        }
    }

    /// By the thread that has column k.
    fn by_owner(&self, code: &mut Code, k: &str, body: impl FnOnce(&mut Code)) {
        let Workers::Block { threads } = self.workers else { return body(code) };
        let thread = code.thread();
        let (_, owner) = code.split(k, threads.into());
        let own = code.op(&format!("arith.cmpi eq, {thread}, {owner} : index"));
        code.when(&own, body);
    }

    /// work = a q, and the diagonal of qᵀ a q.
    fn product(&self, code: &mut Code) {
        let Turn { a, q, work, .. } = self.turn;
        let all = (self.zero.as_str(), self.dim.as_str());
        self.rows(code, &self.dim, |code, i| {
            self.columns(code, all, |code, columns, group| {
                let sums = group.sum(code, all, |code, k| {
                    let factor = code.load(a, &[i, k]);
                    (vec![group.spread(code, &factor); columns.len()], group.load(code, q, k, columns))
                });
                group.store(code, &sums, work, i, columns);
            });
        });
        self.meet(code);
        let diagonal = self.row(code, Row::Diagonal);
        self.columns(code, all, |code, columns, group| {
            let sums =
                group.sum(code, all, |code, i| (group.load(code, q, i, columns), group.load(code, work, i, columns)));
            group.store(code, &sums, work, &diagonal, columns);
        });
        self.meet(code);
    }

    /// The order of the columns: the place of each is how many come before it.
    fn sort(&self, code: &mut Code) {
        let work = &self.turn.work;
        let [diagonal, places, order] = [Row::Diagonal, Row::Vector, Row::Factors].map(|row| self.row(code, row));
        let all = (self.zero.as_str(), self.dim.as_str());
        let as_f32 = |code: &mut Code, at: &str| {
            let at = code.op(&format!("arith.index_cast {at} : index to i64"));
            code.op(&format!("arith.uitofp {at} : i64 to f32"))
        };
        let span = (self.zero.as_str(), self.dim.as_str(), self.one.as_str());
        self.each(code, all, |code, j| {
            let own = code.load(work, &[&diagonal, j]);
            let place = code.repeat(span, &[(self.zero.clone(), "index")], |code, k, so_far| {
                let other = code.load(work, &[&diagonal, k]);
                let larger = code.op(&format!("arith.cmpf ogt, {other}, {own} : f32"));
                let equal = code.op(&format!("arith.cmpf oeq, {other}, {own} : f32"));
                let earlier = code.below(k, j);
                let tied = code.both(&equal, &earlier);
                let before = code.op(&format!("arith.ori {larger}, {tied} : i1"));
                let more = code.plus_const(&so_far[0], 1);
                vec![code.op(&format!("arith.select {before}, {more}, {} : index", so_far[0]))]
            });
            let place = as_f32(code, &place[0]);
            code.store(&place, work, &[&places, j]);
        });
        self.meet(code);
        // If there are NaNs, some places are not taken: a column stays there.
        self.each(code, all, |code, j| {
            let own = as_f32(code, j);
            let column = code.repeat(span, &[(j.to_string(), "index")], |code, k, so_far| {
                let place = code.load(work, &[&places, k]);
                let here = code.op(&format!("arith.cmpf oeq, {place}, {own} : f32"));
                vec![code.op(&format!("arith.select {here}, {k}, {} : index", so_far[0]))]
            });
            let column = as_f32(code, &column[0]);
            code.store(&column, work, &[&order, j]);
        });
        self.meet(code);
    }

    /// The column that comes to a place.
    fn from(&self, code: &mut Code, place: &str) -> String {
        let order = self.row(code, Row::Factors);
        let column = code.load(&self.turn.work, &[&order, place]);
        number(code, &column)
    }

    /// q = work's columns in their order, and v with them.
    fn take_in_order(&self, code: &mut Code) {
        let Turn { q, work, .. } = self.turn;
        let all = (self.zero.as_str(), self.dim.as_str());
        self.rows(code, &self.dim, |code, i| {
            self.each(code, all, |code, j| {
                let from = self.from(code, j);
                let value = code.load(work, &[i, &from]);
                code.store(&value, q, &[i, j]);
            });
        });
        self.meet(code);
        match self.turn.side {
            Side::Rows => self.order_rows(code),
            Side::Columns => self.order_columns(code),
        }
    }

    /// As many of v's columns at a time as `work` has.
    fn order_rows(&self, code: &mut Code) {
        let Turn { v, work, columns, .. } = self.turn;
        let end = code.index(*columns);
        code.repeat((&self.zero, &end, &self.dim), &[], |code, first, _| {
            let left = code.index_op("arith.subi", &end, first);
            let width = code.min(&left, &self.dim);
            let part = (self.zero.as_str(), width.as_str());
            let of_v = |code: &mut Code, columns: &[String]| -> Vec<String> {
                columns.iter().map(|column| code.plus(first, column)).collect()
            };
            self.rows(code, &self.dim, |code, i| {
                self.columns(code, part, |code, columns, group| {
                    let wide = of_v(code, columns);
                    let values = group.load(code, v, i, &wide);
                    group.store(code, &values, work, i, columns);
                });
            });
            self.meet(code);
            self.rows(code, &self.dim, |code, i| {
                let from = self.from(code, i);
                self.columns(code, part, |code, columns, group| {
                    let values = group.load(code, work, &from, columns);
                    let wide = of_v(code, columns);
                    group.store(code, &values, v, i, &wide);
                });
            });
            self.meet(code);
            Vec::new()
        });
    }

    /// As many of v's rows at a time as `work` has.
    fn order_columns(&self, code: &mut Code) {
        let Turn { v, work, rows, .. } = self.turn;
        let all = (self.zero.as_str(), self.dim.as_str());
        let end = code.index(*rows);
        code.repeat((&self.zero, &end, &self.dim), &[], |code, first, _| {
            let left = code.index_op("arith.subi", &end, first);
            let height = code.min(&left, &self.dim);
            self.rows(code, &height, |code, i| {
                let of_v = code.plus(first, i);
                self.columns(code, all, |code, columns, group| {
                    let values = group.load(code, v, &of_v, columns);
                    group.store(code, &values, work, i, columns);
                });
            });
            self.meet(code);
            self.rows(code, &height, |code, i| {
                let of_v = code.plus(first, i);
                self.each(code, all, |code, j| {
                    let from = self.from(code, j);
                    let value = code.load(work, &[i, &from]);
                    code.store(&value, v, &[&of_v, j]);
                });
            });
            self.meet(code);
            Vec::new()
        });
    }

    /// The reflections that make q triangular. Their vectors, not yet divided, stay in q below the diagonal, where they are 1.
    fn reflect(&self, code: &mut Code) {
        let Turn { q, work, .. } = self.turn;
        let [factors, divisors] = [Row::Factors, Row::Divisors].map(|row| self.row(code, row));
        self.rows(code, &self.dim, |code, k| {
            let below = code.plus_const(k, 1);
            self.by_owner(code, k, |code| {
                let (factor, divisor) = self.reflection(code, k, &below);
                code.store(&factor, work, &[&factors, k]);
                code.store(&divisor, work, &[&divisors, k]);
            });
            self.meet(code);
            self.vector(code, k, &below);
            self.apply(code, q, k, &below);
        });
    }

    /// The vector of reflection k, whose elements after the first are at `below` and on.
    fn vector(&self, code: &mut Code, k: &str, below: &str) {
        let Turn { q, work, .. } = self.turn;
        let [vector, divisors] = [Row::Vector, Row::Divisors].map(|row| self.row(code, row));
        self.by_owner(code, k, |code| {
            let unit = code.constant(1.0);
            code.store(&unit, work, &[&vector, k]);
        });
        let divisor = code.load(work, &[&divisors, k]);
        self.each(code, (below, &self.dim), |code, i| {
            let element = code.load(q, &[i, k]);
            let part = code.div(&element, &divisor);
            code.store(&part, work, &[&vector, i]);
        });
        self.meet(code);
    }

    /// The factor of the reflection that takes q's column k, from row k on, to one element, and what its vector is divided by; both make
    /// no change where the column is zero. The factor is that of the divisor as rounded, so that it is a reflection, however small the column.
    fn reflection(&self, code: &mut Code, k: &str, below: &str) -> (String, String) {
        let q = &self.turn.q;
        let wide = |code: &mut Code, at: &str| {
            let element = code.load(q, &[at, k]);
            code.op(&format!("arith.extf {element} : f32 to f64"))
        };
        let [nothing, unit, two] = ["0.0", "1.0", "2.0"].map(|x| code.op(&format!("arith.constant {x} : f64")));
        let tail = code.repeat((below, &self.dim, &self.one), &[(nothing.clone(), "f64")], |code, i, so_far| {
            let x = wide(code, i);
            vec![code.op(&format!("math.fma {x}, {x}, {} : f64", so_far[0]))]
        });
        let tail = &tail[0];
        let first = wide(code, k);
        let squares = code.op(&format!("math.fma {first}, {first}, {tail} : f64"));
        let norm = code.op(&format!("math.sqrt {squares} : f64"));
        let same_sign = code.op(&format!("math.copysign {norm}, {first} : f64"));
        let sum = code.op(&format!("arith.addf {first}, {same_sign} : f64"));
        let is_zero = code.op(&format!("arith.cmpf oeq, {norm}, {nothing} : f64"));
        let divisor = code.op(&format!("arith.select {is_zero}, {unit}, {sum} : f64"));
        let divisor = code.op(&format!("arith.truncf {divisor} : f64 to f32"));
        let rounded = code.op(&format!("arith.extf {divisor} : f32 to f64"));
        let above = code.op(&format!("arith.mulf {rounded}, {rounded} : f64"));
        let length = code.op(&format!("arith.addf {above}, {tail} : f64"));
        let twice = code.op(&format!("arith.mulf {above}, {two} : f64"));
        let factor = code.op(&format!("arith.divf {twice}, {length} : f64"));
        let factor = code.op(&format!("arith.select {is_zero}, {nothing}, {factor} : f64"));
        (code.op(&format!("arith.truncf {factor} : f64 to f32")), divisor)
    }

    /// Reflects the columns of `matrix` from `first` on, at row k and below.
    fn apply(&self, code: &mut Code, matrix: &Buffer, k: &str, first: &str) {
        let work = &self.turn.work;
        let [vector, factors] = [Row::Vector, Row::Factors].map(|row| self.row(code, row));
        let factor = code.load(work, &[&factors, k]);
        let back = code.op(&format!("arith.negf {factor} : f32"));
        self.columns(code, (first, &self.dim), |code, columns, group| {
            let along = group.sum(code, (k, &self.dim), |code, i| {
                let part = code.load(work, &[&vector, i]);
                (vec![group.spread(code, &part); columns.len()], group.load(code, matrix, i, columns))
            });
            let back = group.spread(code, &back);
            let way: Vec<_> =
                along.iter().map(|x| code.op(&format!("arith.mulf {x}, {back} : {}", group.ty()))).collect();
            code.repeat((k, &self.dim, &self.one), &[], |code, i, _| {
                let part = code.load(work, &[&vector, i]);
                let part = group.spread(code, &part);
                let old = group.load(code, matrix, i, columns);
                let new: Vec<_> = old.iter().zip(&way).map(|(old, way)| group.fma(code, &part, way, old)).collect();
                group.store(code, &new, matrix, i, columns);
                Vec::new()
            });
        });
        self.meet(code);
    }

    /// q = the product of the reflections, made in `work` from the last to the first.
    fn collect(&self, code: &mut Code) {
        let Turn { q, work, .. } = self.turn;
        let all = (self.zero.as_str(), self.dim.as_str());
        self.rows(code, &self.dim, |code, i| {
            self.columns(code, all, |code, columns, group| {
                let nothing = code.constant(0.0);
                let nothing = group.spread(code, &nothing);
                group.store(code, &vec![nothing; columns.len()], work, i, columns);
            });
        });
        self.meet(code);
        self.each(code, all, |code, i| {
            let unit = code.constant(1.0);
            code.store(&unit, work, &[i, i]);
        });
        self.meet(code);
        self.rows(code, &self.dim, |code, done| {
            let left = code.index_op("arith.subi", &self.dim, done);
            let k = code.index_op("arith.subi", &left, &self.one);
            self.vector(code, &k, &left);
            self.apply(code, work, &k, &k);
        });
        self.rows(code, &self.dim, |code, i| {
            self.columns(code, all, |code, columns, group| {
                let values = group.load(code, work, i, columns);
                group.store(code, &values, q, i, columns);
            });
        });
        self.meet(code);
    }
}
