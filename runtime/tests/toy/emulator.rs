//! What a run must compute, from the definitions alone: micro-batches one after the other, on weights of the versions that
//! the staleness formulas give. No streams, threads or transfers.

use super::{CONTEXT, DECAY, LAYERS, MICROBATCH, MOMENTUM, ROWS, Schedule, TEXT, Toy, VOCAB, WIDTH};
use runtime::draw::Draws;

/// Losses by update, final weights by layer, and largest drift by stage.
#[derive(Debug, PartialEq)]
pub struct Outcome {
    pub losses: Vec<f64>,
    pub weights: Vec<Vec<f32>>,
    pub drift_max: Vec<u64>,
}

type X = [f32; ROWS * WIDTH];

pub fn initial_weights(seed: u64) -> Vec<Vec<f32>> {
    let layer = |l: usize| {
        let draws = Draws::new(seed, &format!("layer.{l}.w"));
        (0..WIDTH).map(|e| (draws.normal(e as u64) * 0.3) as f32).collect()
    };
    (0..LAYERS).map(layer).collect()
}

pub fn train(toy: Toy, updates: u64, seed: u64) -> Outcome {
    let k = u64::from(toy.accumulate);
    let mut versions = vec![initial_weights(seed)];
    let mut momentum = vec![vec![0.0f32; WIDTH]; LAYERS];
    let mut outcome = Outcome { losses: Vec::new(), weights: Vec::new(), drift_max: vec![0; toy.ranks] };
    for u in 0..updates {
        let (mut loss, mut sums) = (0.0, Vec::new());
        for m in u * k..(u + 1) * k {
            let stage = |l: usize| l / (LAYERS / toy.ranks);
            for s in 0..toy.ranks {
                let drift = u - version_at_forward(toy, s, m);
                outcome.drift_max[s] = outcome.drift_max[s].max(drift);
            }
            let forward = |l: usize| &versions[version_at_forward(toy, stage(l), m) as usize][l];
            let (xs, mut dy, mb_loss) = forward_pass(forward, sampled(seed, m));
            loss += mb_loss;
            let mut gradients = vec![Vec::new(); LAYERS];
            for l in (0..LAYERS).rev() {
                gradients[l] = (0..WIDTH).map(|j| column(&dy, &xs[l], j)).collect();
                let w = &versions[u as usize][l];
                dy = std::array::from_fn(|i| dy[i] + dy[i] * w[i % WIDTH]);
            }
            sums = if sums.is_empty() { gradients } else { add(sums, gradients) };
        }
        outcome.losses.push(loss / (k as f64 * ROWS as f64));
        versions.push(update(&versions[u as usize], learning_rate(u), &mut momentum, &sums));
    }
    outcome.weights = versions.pop().unwrap();
    outcome
}

/// By definition floor(max(0, m - w_s) / K), not before the last drain; under a flush as at the backward pass.
fn version_at_forward(toy: Toy, s: usize, m: u64) -> u64 {
    let k = u64::from(toy.accumulate);
    if toy.schedule == Schedule::Gpipe {
        return m / k;
    }
    let drained = toy.boundary.map_or(0, |n| m / (n * k) * n);
    (m.saturating_sub((toy.ranks - 1 - s) as u64) / k).max(drained)
}

fn sampled(seed: u64, m: u64) -> [usize; MICROBATCH] {
    let draws = Draws::new(seed, "data");
    std::array::from_fn(|row| {
        let q = m * MICROBATCH as u64 + row as u64;
        (draws.at(q) % (TEXT.len() - CONTEXT) as u64) as usize
    })
}

/// Inputs of the layers, the loss's gradient, and the loss, for sequences that start at these bytes of the text.
pub fn forward_pass<'a>(w: impl Fn(usize) -> &'a Vec<f32>, starts: [usize; MICROBATCH]) -> (Vec<X>, X, f64) {
    let id = |row: usize, shift: usize| {
        f32::from(TEXT.as_bytes()[starts[row / CONTEXT] + row % CONTEXT + shift]) / VOCAB as f32
    };
    let mut x: X = std::array::from_fn(|i| id(i / WIDTH, 0) + (i % WIDTH) as f32 / 8.0);
    let mut xs = Vec::new();
    for l in 0..LAYERS {
        xs.push(x);
        x = std::array::from_fn(|i| x[i] + x[i] * w(l)[i % WIDTH]);
    }
    let difference: X = std::array::from_fn(|i| x[i] - id(i / WIDTH, 1));
    let loss = difference.iter().fold(0.0, |sum, &d| sum + f64::from(d) * f64::from(d) / 2.0);
    (xs, difference.map(|d| d / (ROWS * WIDTH) as f32), loss)
}

fn column(dy: &X, x: &X, j: usize) -> f32 {
    (0..ROWS).fold(0.0, |g, r| g + dy[r * WIDTH + j] * x[r * WIDTH + j])
}

fn add(a: Vec<Vec<f32>>, b: Vec<Vec<f32>>) -> Vec<Vec<f32>> {
    let row = |(a, b): (Vec<f32>, Vec<f32>)| a.into_iter().zip(b).map(|(a, b)| a + b).collect();
    a.into_iter().zip(b).map(row).collect()
}

fn update(weights: &[Vec<f32>], lr: f64, momentum: &mut [Vec<f32>], sums: &[Vec<f32>]) -> Vec<Vec<f32>> {
    let mut next = weights.to_vec();
    for l in 0..LAYERS {
        // Layers with an even number have decay.
        let keep = if l.is_multiple_of(2) { (1.0 - lr * DECAY) as f32 } else { 1.0 };
        for j in 0..WIDTH {
            momentum[l][j] = MOMENTUM as f32 * momentum[l][j] + sums[l][j];
            next[l][j] = keep * next[l][j] - lr as f32 * momentum[l][j];
        }
    }
    next
}

/// The toy's RATE, written out.
fn learning_rate(update: u64) -> f64 {
    match update {
        0..3 => 0.05 * (update + 1) as f64 / 3.0,
        3..8 => 0.01 + (0.05 - 0.01) * (1.0 + libm::cos(std::f64::consts::PI * ((update - 3) as f64 / 5.0))) / 2.0,
        _ => 0.01,
    }
}
