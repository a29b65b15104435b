//! SOAP's turn of a basis, against f64; and its whole update over 50 steps.

use crate::harness::{Data, Runnable, assert_close, bits, random, runnable, targets};
use crate::updates::{Matrix, RATE, Stage, gradients};
use artifact::optimizer::{FIRST_TURNS, HYPER_LEN, Optimizer};
use model::kernel::{KernelOp, Side, UpdatePart};
use model::rules::MuonScale;
use model::target::Target;

/// One turn in f64, by Gram and Schmidt's orthogonalisation: the order of the columns, and the basis.
fn turned(a: &Matrix, q: &Matrix) -> (Vec<usize>, Matrix) {
    let n = q.rows;
    let p = a.times(q);
    let column = |m: &Matrix, j: usize| -> Vec<f64> { (0..n).map(|i| m.x[i * n + j]).collect() };
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let diagonal: Vec<f64> = (0..n).map(|j| dot(&column(q, j), &column(&p, j))).collect();
    let mut order: Vec<usize> = (0..n).collect();
    order.sort_by(|&i, &j| diagonal[j].total_cmp(&diagonal[i]));
    let mut basis: Vec<Vec<f64>> = Vec::new();
    for &j in &order {
        let mut x = column(&p, j);
        for _ in 0..2 {
            for b in &basis {
                let along = dot(&x, b);
                x.iter_mut().zip(b).for_each(|(x, b)| *x -= along * b);
            }
        }
        let norm = dot(&x, &x).sqrt();
        basis.push(x.iter().map(|x| x / norm).collect());
    }
    let x = (0..n * n).map(|e| basis[e % n][e / n]).collect();
    (order, Matrix { x, ..q.clone() })
}

fn unit(n: usize) -> Matrix {
    Matrix { rows: n, columns: n, x: (0..n * n).map(|e| f64::from(e % n == e / n)).collect() }
}

fn square(n: usize, x: &[f32]) -> Matrix {
    Matrix::new(&[n as u64, n as u64], x)
}

/// Symmetric, its smallest eigenvalue a good part of its largest.
fn moments(seed: u64, n: usize) -> Vec<f32> {
    let b = square(n, &random(seed, n * n));
    let a = b.times(&b.transposed());
    (0..n * n).map(|e| (a.x[e] / n as f64 + if e % n == e / n { 0.1 } else { 0.0 }) as f32).collect()
}

/// Turns of a side of a matrix.
struct Turns {
    kernel: Runnable,
    dim: usize,
}

impl Turns {
    fn new(rows: usize, columns: usize, side: Side, target: Target) -> Self {
        let (rows, columns) = (rows as u32, columns as u32);
        let kernel = Runnable::new(KernelOp::Part(UpdatePart::Turn { rows, columns, side }), target);
        Self { kernel, dim: side.dim(rows, columns) as usize }
    }

    /// Q and v after so many turns; `start`: from the unit matrix.
    fn call(&self, (start, turns): (bool, u32), [a, q, v]: [&[f32]; 3]) -> [Data; 2] {
        let mut hyper = vec![0.0f32; HYPER_LEN];
        (hyper[8], hyper[11]) = (f32::from(u8::from(start)), turns as f32);
        let [hyper, a, q, v] = [&hyper[..], a, q, v].map(|x| Data::F32(x.to_vec()));
        let work = Data::unset((self.dim + 4) * self.dim);
        let mut after = self.kernel.call(&[hyper, a, q, v, work]);
        after.drain(2..4).collect::<Vec<_>>().try_into().expect("two are kept")
    }
}

/// Equal up to the sign of each column.
fn assert_same_basis(what: &str, found: &[f32], exact: &Matrix, tolerance: f64) {
    let n = exact.rows;
    let sign = |j: usize| (0..n).map(|i| f64::from(found[i * n + j]) * exact.x[i * n + j]).sum::<f64>().signum();
    let signs: Vec<f64> = (0..n).map(sign).collect();
    let aligned: Vec<f64> = exact.x.iter().enumerate().map(|(e, x)| x * signs[e % n]).collect();
    assert_close(what, found, &aligned, tolerance);
}

fn assert_orthogonal(what: &str, n: usize, q: &[f32], tolerance: f64) {
    let q = square(n, q);
    let product = q.transposed().times(&q);
    let worst = product.with(&unit(n), |a, b| (a - b).abs()).x.into_iter().fold(0.0, f64::max);
    assert!(worst < tolerance, "{what}: {worst}");
}

/// Sides shorter and longer than the vectors of any CPU; matrices that reach less and more far than the side is long.
const SIDES: [(usize, usize, Side); 7] = [
    (1, 1, Side::Rows),
    (7, 5, Side::Rows),
    (70, 9, Side::Rows),
    (9, 70, Side::Rows),
    (2, 67, Side::Columns),
    (33, 20, Side::Columns),
    (20, 33, Side::Columns),
];

#[test]
fn a_basis_turns_as_in_f64_and_alike_on_every_target() {
    for (rows, columns, side) in SIDES {
        let n = side.dim(rows as u32, columns as u32) as usize;
        let a = moments(1, n);
        // An orthogonal matrix that is not near the eigenvectors.
        let q: Vec<f32> = turned(&square(n, &moments(2, n)), &unit(n)).1.x.iter().map(|&x| x as f32).collect();
        let v = random(3, rows * columns);
        let (order, exact) = turned(&square(n, &a), &square(n, &q));
        let from = |e: usize| match side {
            Side::Rows => order[e / columns] * columns + e % columns,
            Side::Columns => e / columns * columns + order[e % columns],
        };
        let moved: Vec<f32> = (0..rows * columns).map(|e| v[from(e)]).collect();
        let mut first = None;
        for target in targets() {
            let what = format!("{rows}x{columns} {side:?} on {}", target.name());
            let turns = Turns::new(rows, columns, side, target);
            let [new_q, new_v] = turns.call((false, 1), [&a, &q, &v]);
            assert_same_basis(&what, new_q.f32(), &exact, 3e-5);
            assert_orthogonal(&what, n, new_q.f32(), 2e-6);
            assert_eq!(new_v.f32(), moved, "{what}");
            let first = first.get_or_insert_with(|| bits(&new_q));
            assert_eq!(*first, bits(&new_q), "{what}");
            let [same_q, same_v] = turns.call((false, 0), [&a, &q, &v]);
            assert_eq!((same_q.f32(), same_v.f32()), (&q[..], &v[..]), "no turn, no change");
        }
    }
}

/// Eigenvalues 1, 1/4, 1/16 … with known vectors; on the first turns from the unit matrix.
#[test]
fn turns_from_the_unit_matrix_find_eigenvectors() {
    let n = 6;
    let u = turned(&square(n, &moments(5, n)), &unit(n)).1;
    let scaled = Matrix { x: (0..n * n).map(|e| u.x[e] * 0.25f64.powi((e % n) as i32)).collect(), ..u.clone() };
    let a: Vec<f32> = scaled.times(&u.transposed()).x.iter().map(|&x| x as f32).collect();
    for cpu in runnable() {
        let turns = Turns::new(n, 1, Side::Rows, cpu.into());
        let [q, _] = turns.call((true, FIRST_TURNS), [&a, &vec![0.0; n * n], &vec![0.0; n]]);
        assert_same_basis(cpu.name(), q.f32(), &u, 1e-3);
    }
}

#[test]
fn a_basis_stays_orthogonal_where_moments_lack_rank() {
    let n = 33;
    let g: Vec<f64> = random(1, n).iter().map(|x| f64::from(*x)).collect();
    let one: Vec<f32> = (0..n * n).map(|e| (g[e / n] * g[e % n]) as f32).collect();
    let v = vec![0.0; n];
    for target in targets() {
        let turns = Turns::new(n, 1, Side::Rows, target);
        for (name, a) in [("rank 1", &one), ("nothing", &vec![0.0; n * n]), ("tiny", &vec![1e-43; n * n])] {
            let what = format!("{name} on {}", target.name());
            let [q, _] = turns.call((true, FIRST_TURNS), [a, &vec![0.0; n * n], &v]);
            assert_orthogonal(&what, n, q.f32(), 2e-6);
            let [q, _] = turns.call((false, 1), [&vec![f32::NAN; n * n], q.f32(), &v]);
            assert!(q.f32().iter().any(|x| x.is_nan()), "{what}: what is not finite is not hidden");
        }
    }
}

/// A parameter's update in f64.
struct Exact {
    w: Matrix,
    m: Matrix,
    v: Matrix,
    /// Of the rows and of the columns: moments, basis.
    sides: [Option<[Matrix; 2]>; 2],
}

impl Exact {
    fn rotated(&self, x: &Matrix, back: bool) -> Matrix {
        let mut x = x.clone();
        if let Some([_, q]) = &self.sides[0] {
            x = if back { q.times(&x) } else { q.transposed().times(&x) };
        }
        if let Some([_, q]) = &self.sides[1] {
            x = x.times(&if back { q.transposed() } else { q.clone() });
        }
        x
    }

    fn update(&mut self, g: &Matrix, step: u64, soap: Optimizer) {
        let Optimizer::Soap { beta1, beta2, eps, frequency, decay, .. } = soap else { panic!("{soap:?}") };
        let average = |m: &Matrix, g: &Matrix, beta: f64| m.with(g, |m, g| beta * m + (1.0 - beta) * g);
        if step > 0 {
            let (c1, c2) = (1.0 - beta1.powi(step as i32), 1.0 - beta2.powi(step as i32));
            self.m = average(&self.m, g, beta1);
            let rotated = self.rotated(g, false);
            self.v = average(&self.v, &rotated.map(|g| g * g), beta2);
            let x = self.rotated(&self.m, false).with(&self.v, |m, v| m / c1 / ((v / c2).sqrt() + eps));
            self.w = self.w.with(&self.rotated(&x, true), |w, x| (1.0 - RATE * decay) * w - RATE * x);
        }
        let squares = [g.times(&g.transposed()), g.transposed().times(g)];
        for (side, square) in self.sides.iter_mut().zip(squares) {
            if let Some([moments, _]) = side {
                *moments = average(moments, &square, beta2);
            }
        }
        if step > 0 && step % frequency == 0 {
            self.turn();
        }
    }

    fn turn(&mut self) {
        let columns = self.v.columns;
        for (which, side) in self.sides.iter_mut().enumerate() {
            let Some([moments, basis]) = side else { continue };
            let (order, q) = turned(moments, basis);
            *basis = q;
            let from = |e: usize| match which {
                0 => order[e / columns] * columns + e % columns,
                _ => e / columns * columns + order[e % columns],
            };
            self.v.x = (0..self.v.x.len()).map(|e| self.v.x[from(e)]).collect();
        }
    }
}

/// The first bases are the compiled kernels': where there are fewer gradients than dimensions, rounding decides some of their vectors.
fn check(max_dim: u32, shapes: &[&[u64]], tolerance: f64) {
    let soap = Optimizer::Soap { beta1: 0.9, beta2: 0.95, eps: 1e-8, frequency: 5, max_dim, decay: 0.1 };
    for cpu in runnable() {
        let mut stage = Stage::new(soap, MuonScale::MatchAdamW, None, shapes, cpu);
        let exact = |(buffers, shape): (&Vec<Vec<f32>>, &&[u64])| {
            let w = Matrix::new(shape, &buffers[0]);
            let zeros = |n: &u64| square(*n as usize, &vec![0.0; (n * n) as usize]);
            let side = |n| (n <= &u64::from(max_dim)).then(|| [zeros(n), zeros(n)]);
            Exact { m: w.zeros(), v: w.zeros(), w, sides: [side(&shape[0]), side(&shape[1])] }
        };
        let mut exact: Vec<Exact> = stage.buffers.iter().zip(shapes).map(exact).collect();
        for step in 0..50 {
            let all = gradients(shapes, step);
            let wide: Vec<Matrix> = all.iter().zip(shapes).map(|(g, shape)| Matrix::new(shape, g)).collect();
            stage.update(step, all);
            for ((exact, g), found) in exact.iter_mut().zip(&wide).zip(&stage.buffers) {
                exact.update(g, step, soap);
                if step == 0 {
                    // The weight, m and v come before.
                    for (i, [_, basis]) in exact.sides.iter_mut().flatten().enumerate() {
                        assert_orthogonal("the first basis", basis.rows, &found[4 + 2 * i], 2e-6);
                        *basis = square(basis.rows, &found[4 + 2 * i]);
                    }
                    assert_close("the first update", &found[0], &exact.w.x, 0.0);
                }
            }
        }
        for (i, (found, exact)) in stage.buffers.iter().zip(&exact).enumerate() {
            let what = format!("{:?} up to {max_dim} on {}", shapes[i], cpu.name());
            assert_close(&what, &found[0], &exact.w.x, tolerance);
        }
    }
}

#[test]
fn soap_is_right_on_wide_and_tall_matrices() {
    check(10_000, &[&[7, 5], &[33, 20], &[12, 41], &[24, 24], &[5, 1], &[1, 4]], 1e-3);
}

#[test]
fn soap_does_not_rotate_long_sides() {
    check(20, &[&[33, 20], &[13, 37], &[21, 22]], 1e-3);
}
