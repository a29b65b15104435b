//! Updates that are several kernel calls, through the compiled kernels, against the formulas in f64 over 50 steps.

use crate::harness::{Data, Runnable, assert_close, random, runnable};
use artifact::optimizer::Optimizer;
use artifact::program::Init;
use model::gpt::ParamDecl;
use model::kernel::{KernelOp, UpdateRule, Writes};
use model::rules::{Clip, GroupRule, MuonScale, Rules};
use model::target::CpuClass;
use model::update::{Arg, UpdatePlan};
use std::collections::HashMap;

const STEPS: u64 = 50;
pub const RATE: f64 = 0.02;

/// A stage's parameters with what an update reads and writes beside them.
pub struct Stage {
    plan: UpdatePlan,
    kernels: HashMap<KernelOp, Runnable>,
    optimizer: Optimizer,
    /// By parameter: the weight, then its buffers.
    pub buffers: Vec<Vec<Vec<f32>>>,
}

impl Stage {
    pub fn new(optimizer: Optimizer, scale: MuonScale, clip: Option<Clip>, shapes: &[&[u64]], cpu: CpuClass) -> Self {
        let rule = UpdateRule::plain(optimizer.kind());
        let rules = Rules::new(Vec::new(), GroupRule::new(Vec::new(), rule, scale), clip);
        let mut graph = model::graph::Graph::new(1, 1);
        let source = model::graph::Source::Param(model::graph::ParamId(0));
        let value = graph.external(source, model::graph::Elem::F32, vec![1]);
        let param = |(i, shape): (usize, &&[u64])| ParamDecl {
            name: format!("p{i}"),
            shape: shape.to_vec(),
            init: Init::Zeros,
            value,
            copied: false,
        };
        let params: Vec<ParamDecl> = shapes.iter().enumerate().map(param).collect();
        let plan = UpdatePlan::new(&params, &rules, true, Writes::InPlace, true, None);
        assert!(plan.unfused.iter().all(Option::is_some), "nothing of these is fused");
        let mut kernels = HashMap::new();
        for step in plan.norm.iter().chain(&plan.steps) {
            kernels.entry(step.op.clone()).or_insert_with(|| Runnable::new(step.op.clone(), cpu));
        }
        let state = |(_, len): (&str, u64)| vec![0.0; len as usize];
        let buffers = shapes.iter().zip(1..).map(|(shape, seed)| {
            let weight = random(seed, shape.iter().product::<u64>() as usize);
            [weight].into_iter().chain(rule.buffers(shape).into_iter().map(state)).collect()
        });
        Stage { buffers: buffers.collect(), plan, kernels, optimizer }
    }

    /// One update.
    pub fn update(&mut self, step: u64, mut gradients: Vec<Vec<f32>>) {
        let hyper = Data::F32(hyper(self.optimizer, step as i32 + 1));
        // What an update finds there must not matter.
        let mut temporaries: Vec<Data> = self
            .plan
            .temporaries
            .iter()
            .map(|&bytes| match bytes {
                8 => Data::F64(vec![f64::NAN]),
                _ => Data::unset(bytes as usize / 4),
            })
            .collect();
        // This is the only stage.
        let mut norm = Data::F64(vec![f64::NAN]);
        for call in self.plan.norm.iter().chain(&self.plan.steps) {
            let p = call.param;
            let data: Vec<Data> = call
                .args
                .iter()
                .map(|arg| match *arg {
                    Arg::Weight => Data::F32(self.buffers[p][0].clone()),
                    Arg::Gradient => Data::F32(gradients[p].clone()),
                    Arg::State(i) => Data::F32(self.buffers[p][1 + i].clone()),
                    Arg::Hyper => hyper.clone(),
                    Arg::Copy | Arg::OtherEnd => unreachable!("these weights are f32 and not tied"),
                    Arg::Norm | Arg::Total => norm.clone(),
                    Arg::Temporary(i) => temporaries[i].clone(),
                })
                .collect();
            let after = self.kernels[&call.op].call(&data);
            let written = model::operands::operands(&call.op).into_iter().map(|o| o.access.writes());
            for ((arg, data), _) in call.args.iter().zip(after).zip(written).filter(|(_, writes)| *writes) {
                match *arg {
                    Arg::Weight => self.buffers[p][0] = data.f32().to_vec(),
                    Arg::Gradient => gradients[p] = data.f32().to_vec(),
                    Arg::State(i) => self.buffers[p][1 + i] = data.f32().to_vec(),
                    Arg::Norm => norm = data,
                    Arg::Hyper | Arg::Copy | Arg::OtherEnd | Arg::Total => {
                        panic!("hyper-parameters are read only, there is nothing else")
                    }
                    Arg::Temporary(i) => temporaries[i] = data,
                }
            }
        }
    }
}

/// The hyper-parameters of a step, from 1: see `artifact::optimizer::HYPER_LEN`.
fn hyper(optimizer: Optimizer, step: i32) -> Vec<f32> {
    let mut h = [0.0; artifact::optimizer::HYPER_LEN];
    let mut average = |at: usize, beta: f64| (h[at], h[at + 1]) = (beta, 1.0 - beta);
    let corrected = |beta: f64| 1.0 - beta.powi(step);
    match optimizer {
        Optimizer::Muon { momentum, .. } => {
            average(0, momentum);
            h[6] = RATE;
        }
        Optimizer::NorMuon { momentum, beta2, .. } => {
            average(0, momentum);
            average(2, beta2);
            h[6] = RATE;
        }
        Optimizer::Soap { beta2, eps, .. } if step == 1 => {
            average(9, beta2);
            (h[4], h[5], h[8], h[11]) = (1.0, eps, 1.0, artifact::optimizer::FIRST_TURNS.into());
            h[7] = 1.0;
            return h.iter().map(|&x| x as f32).collect();
        }
        Optimizer::Soap { beta1, beta2, eps, frequency, .. } => {
            let corrected = |beta: f64| 1.0 - beta.powi(step - 1);
            average(0, beta1);
            average(2, beta2);
            average(9, beta2);
            (h[4], h[5], h[6]) = (1.0 / corrected(beta2), eps, RATE / corrected(beta1));
            h[11] = f64::from((step as u64 - 1).is_multiple_of(frequency));
        }
        Optimizer::Mars { beta1, beta2, eps, .. } | Optimizer::AdamW { beta1, beta2, eps, .. } => {
            average(0, beta1);
            average(2, beta2);
            (h[4], h[5], h[6]) = (1.0 / corrected(beta2), eps, RATE / corrected(beta1));
        }
        other => panic!("{other:?} has no formula here"),
    }
    if let Optimizer::Mars { beta1, gamma, .. } = optimizer {
        h[8] = gamma * beta1 / (1.0 - beta1);
    }
    h[7] = 1.0 - RATE * decay(optimizer);
    h.iter().map(|&x| x as f32).collect()
}

/// A matrix in f64.
#[derive(Clone)]
pub struct Matrix {
    pub rows: usize,
    pub columns: usize,
    pub x: Vec<f64>,
}

impl Matrix {
    pub fn new(shape: &[u64], x: &[f32]) -> Self {
        let columns = shape.get(1).map_or(1, |&c| c as usize);
        Matrix { rows: shape[0] as usize, columns, x: x.iter().map(|x| f64::from(*x)).collect() }
    }

    pub fn zeros(&self) -> Self {
        self.map(|_| 0.0)
    }

    pub fn map(&self, f: impl Fn(f64) -> f64) -> Self {
        Matrix { x: self.x.iter().map(|&x| f(x)).collect(), ..*self }
    }

    pub fn with(&self, other: &Self, f: impl Fn(f64, f64) -> f64) -> Self {
        Matrix { x: self.x.iter().zip(&other.x).map(|(&a, &b)| f(a, b)).collect(), ..*self }
    }

    fn norm(&self) -> f64 {
        self.x.iter().map(|x| x * x).sum::<f64>().sqrt()
    }

    pub fn transposed(&self) -> Self {
        let x = (0..self.rows * self.columns).map(|i| self.x[i % self.rows * self.columns + i / self.rows]);
        Matrix { rows: self.columns, columns: self.rows, x: x.collect() }
    }

    pub fn times(&self, other: &Self) -> Self {
        let mut x = vec![0.0; self.rows * other.columns];
        for i in 0..self.rows {
            for k in 0..self.columns {
                for j in 0..other.columns {
                    x[i * other.columns + j] += self.x[i * self.columns + k] * other.x[k * other.columns + j];
                }
            }
        }
        Matrix { rows: self.rows, columns: other.columns, x }
    }

    /// As published: transposed if tall, five iterations.
    fn orthogonal(&self) -> Self {
        if self.rows > self.columns {
            return self.transposed().orthogonal().transposed();
        }
        let norm = self.norm() + 1e-7;
        let mut x = self.map(|x| x / norm);
        for _ in 0..5 {
            let a = x.times(&x.transposed());
            let b = a.with(&a.times(&a), |a, aa| -4.7750 * a + 2.0315 * aa);
            x = x.with(&b.times(&x), |x, bx| 3.4445 * x + bx);
        }
        x
    }

    /// Scaled down to a norm of at most `max`.
    fn at_most(&self, max: f64) -> Self {
        let norm = self.norm();
        if norm > max { self.map(|x| x / norm * max) } else { self.clone() }
    }
}

/// A parameter's update in f64: `states` start as zeros, `step` counts from 1; gives what is subtracted after the decay.
fn direction(optimizer: Optimizer, scale: MuonScale, step: i32, g: &Matrix, states: &mut [Matrix]) -> Matrix {
    let (rows, columns) = (g.rows as f64, g.columns as f64);
    let average = |m: &Matrix, g: &Matrix, beta: f64| m.with(g, |m, g| beta * m + (1.0 - beta) * g);
    let adam = |g: &Matrix, states: &mut [Matrix], [b1, b2, eps]: [f64; 3]| {
        let [m, v, ..] = states else { panic!("two moments") };
        (*m, *v) = (average(m, g, b1), average(v, &g.map(|g| g * g), b2));
        let (c1, c2) = (1.0 - b1.powi(step), 1.0 - b2.powi(step));
        m.with(v, |m, v| RATE * m / c1 / ((v / c2).sqrt() + eps))
    };
    match optimizer {
        Optimizer::Muon { momentum, .. } => {
            states[0] = average(&states[0], g, momentum);
            let x = g.with(&states[0], |g, m| g + momentum * (m - g)).orthogonal();
            // Weights are [in, out]; the formulas are for [out, in].
            let s = match scale {
                MuonScale::Original => (columns / rows).max(1.0).sqrt(),
                MuonScale::MatchAdamW => 0.2 * rows.max(columns).sqrt(),
            };
            x.map(|x| RATE * s * x)
        }
        Optimizer::NorMuon { momentum, beta2, .. } => {
            states[0] = average(&states[0], g, momentum);
            let x = g.with(&states[0], |g, m| g + momentum * (m - g)).orthogonal().transposed();
            for (neuron, v) in x.x.chunks(x.columns).zip(&mut states[1].x) {
                *v = beta2 * *v + (1.0 - beta2) * neuron.iter().map(|x| x * x).sum::<f64>() / rows;
            }
            let divided = x.x.iter().enumerate().map(|(i, x)| x / (states[1].x[i / g.rows].sqrt() + 1e-10)).collect();
            let y = Matrix { x: divided, ..x };
            let by = 0.2 * RATE * (rows * columns).sqrt() / y.norm();
            y.map(|y| by * y).transposed()
        }
        Optimizer::Mars { beta1, beta2, eps, gamma, .. } => {
            let by = gamma * beta1 / (1.0 - beta1);
            let c = g.with(&states[2], |g, before| g + by * (g - before)).at_most(1.0);
            states[2] = g.clone();
            adam(&c, states, [beta1, beta2, eps])
        }
        Optimizer::AdamW { beta1, beta2, eps, .. } => adam(g, states, [beta1, beta2, eps]),
        other => panic!("{other:?} has no formula here"),
    }
}

fn decay(optimizer: Optimizer) -> f64 {
    match optimizer {
        Optimizer::Muon { decay, .. }
        | Optimizer::NorMuon { decay, .. }
        | Optimizer::Mars { decay, .. }
        | Optimizer::Soap { decay, .. }
        | Optimizer::AdamW { decay, .. } => decay,
        other => panic!("{other:?} has no formula here"),
    }
}

/// Gradients of a step: different sizes, and a direction that stays for the momentum to find.
pub fn gradients(shapes: &[&[u64]], step: u64) -> Vec<Vec<f32>> {
    let of = |(i, shape): (u64, &&[u64])| {
        let len = shape.iter().product::<u64>() as usize;
        let (lasting, new) = (random(100 + i, len), random(1000 + 10 * step + i, len));
        let size = if step % 3 == 0 { 0.01 } else { 0.3 };
        lasting.iter().zip(new).map(|(l, n)| size * (0.5 * l + n)).collect()
    };
    (0..).zip(shapes).map(of).collect()
}

fn clipped(clip: Option<Clip>, gradients: Vec<Matrix>) -> Vec<Matrix> {
    match clip {
        None => gradients,
        Some(Clip::PerTensor { max }) => gradients.iter().map(|g| g.at_most(max)).collect(),
        Some(Clip::PerStage { max } | Clip::Global { max }) => {
            let norm = gradients.iter().map(|g| g.norm().powi(2)).sum::<f64>().sqrt();
            let by = if norm > max { max / norm } else { 1.0 };
            gradients.iter().map(|g| g.map(|g| by * g)).collect()
        }
    }
}

/// Trains parameters of `shapes` for [`STEPS`] steps, and compares the weights with f64's at the end.
fn check(optimizer: Optimizer, scale: MuonScale, clip: Option<Clip>, shapes: &[&[u64]], tolerance: f64) {
    for cpu in runnable() {
        let mut stage = Stage::new(optimizer, scale, clip, shapes, cpu);
        let weight = |(b, shape): (&Vec<Vec<f32>>, &&[u64])| Matrix::new(shape, &b[0]);
        let mut exact: Vec<Matrix> = stage.buffers.iter().zip(shapes).map(weight).collect();
        let mut states: Vec<Vec<Matrix>> = exact.iter().map(|w| vec![w.zeros(); 3]).collect();
        for step in 0..STEPS {
            let all = gradients(shapes, step);
            let wide = all.iter().zip(shapes).map(|(g, shape)| Matrix::new(shape, g)).collect();
            stage.update(step, all);
            for ((w, g), states) in exact.iter_mut().zip(clipped(clip, wide)).zip(&mut states) {
                let u = direction(optimizer, scale, step as i32 + 1, &g, states);
                *w = w.with(&u, |w, u| (1.0 - RATE * decay(optimizer)) * w - u);
            }
        }
        for (i, (found, exact)) in stage.buffers.iter().zip(&exact).enumerate() {
            let what = format!("{optimizer:?}, {:?} on {}", shapes[i], cpu.name());
            assert_close(&what, &found[0], &exact.x, tolerance);
        }
    }
}

/// Square, wide, tall, and narrow as a vector.
const MATRICES: [&[u64]; 5] = [&[24, 24], &[13, 37], &[37, 13], &[5, 1], &[1, 9]];

#[test]
fn muon_is_right_on_wide_and_tall_matrices() {
    for scale in [MuonScale::MatchAdamW, MuonScale::Original] {
        check(Optimizer::Muon { momentum: 0.95, decay: 0.1 }, scale, None, &MATRICES, 2e-5);
    }
}

#[test]
fn normuon_is_right_on_wide_and_tall_matrices() {
    let optimizer = Optimizer::NorMuon { momentum: 0.9, beta2: 0.95, decay: 0.1 };
    check(optimizer, MuonScale::MatchAdamW, None, &MATRICES, 2e-5);
}

#[test]
fn mars_is_right_on_matrices_and_vectors() {
    let optimizer = Optimizer::Mars { beta1: 0.95, beta2: 0.99, eps: 1e-8, gamma: 0.025, decay: 0.01 };
    check(optimizer, MuonScale::MatchAdamW, None, &[&[13, 37], &[41], &[2, 2]], 2e-5);
}

#[test]
fn gradients_are_clipped_by_tensor_or_together() {
    let adamw = Optimizer::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, decay: 0.1 };
    let muon = Optimizer::Muon { momentum: 0.95, decay: 0.1 };
    for clip in [Clip::PerTensor { max: 0.5 }, Clip::PerStage { max: 0.5 }, Clip::Global { max: 0.5 }] {
        check(adamw, MuonScale::MatchAdamW, Some(clip), &[&[13, 37], &[41], &[2, 2]], 2e-5);
        check(muon, MuonScale::MatchAdamW, Some(clip), &[&[13, 37], &[9, 4]], 2e-5);
    }
}
