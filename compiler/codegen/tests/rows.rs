//! Kernels over rows against f64: LayerNorm, column sums, cross-entropy, embedding. The bits of fused sinks: see `sinks`.

use crate::harness::{Data, assert_close, bits, random, run, targets};
use model::kernel::{KernelOp, Sink, Table};
use model::target::Target;

/// Rows and columns: whole vectors and blocks, parts of them, one row, more than a block of columns.
const SHAPES: [(u32, u32); 5] = [(1, 5), (8, 16), (3, 19), (51, 37), (6, 300)];

fn f64s(values: &[f32]) -> Vec<f64> {
    values.iter().map(|x| f64::from(*x)).collect()
}

fn ramp(values: &[f32], times: f32, offset: f32) -> Vec<f32> {
    values.iter().map(|x| x * times + offset).collect()
}

struct Normalised {
    mean: Vec<f64>,
    rstd: Vec<f64>,
    /// (x - mean) * rstd
    units: Vec<f64>,
}

fn normalise(x: &[f64], width: usize) -> Normalised {
    let mut n = Normalised { mean: vec![], rstd: vec![], units: vec![] };
    for row in x.chunks(width) {
        let mean = row.iter().sum::<f64>() / width as f64;
        let variance = row.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / width as f64;
        let rstd = 1.0 / (variance + 1e-5).sqrt();
        n.units.extend(row.iter().map(|v| (v - mean) * rstd));
        n.mean.push(mean);
        n.rstd.push(rstd);
    }
    n
}

fn column_sums(terms: &[f64], width: usize) -> Vec<f64> {
    (0..width).map(|j| terms.iter().skip(j).step_by(width).sum()).collect()
}

fn layer_norm(target: Target, rows: u32, width: u32) {
    let (r, w) = (rows as usize, width as usize);
    let (x, gain, bias) = (ramp(&random(1, r * w), 3.0, 2.0), random(2, w), random(3, w));
    let inputs = [&x, &gain, &bias].map(|v| Data::F32(v.clone()));
    let outputs = [Data::unset(r * w), Data::unset(r), Data::unset(r)];
    let after = run(KernelOp::LayerNorm { rows, width }, target, &[&inputs[..], &outputs].concat());
    let n = normalise(&f64s(&x), w);
    let y: Vec<_> = (0..r * w).map(|i| n.units[i] * f64::from(gain[i % w]) + f64::from(bias[i % w])).collect();
    assert_close(&format!("y {rows}x{width} {target:?}"), after[3].f32(), &y, 2e-6);
    assert_close("mean", after[4].f32(), &n.mean, 1e-6);
    assert_close("rstd", after[5].f32(), &n.rstd, 2e-6);
    for residual in [false, true] {
        layer_norm_gradient(target, (rows, width, residual), &x, &gain);
    }
    gain_and_bias(target, rows, width, &x);
}

fn layer_norm_gradient(target: Target, (rows, width, residual): (u32, u32, bool), x: &[f32], gain: &[f32]) {
    let (r, w) = (rows as usize, width as usize);
    let n = normalise(&f64s(x), w);
    let (mean, rstd) = (n.mean.iter().map(|v| *v as f32).collect(), n.rstd.iter().map(|v| *v as f32).collect());
    let (dy, passed_on) = (random(4, r * w), random(5, r * w));
    let mut data = [dy.clone(), x.to_vec(), mean, rstd, gain.to_vec()].map(Data::F32).to_vec();
    if residual {
        data.push(Data::F32(passed_on.clone()));
    }
    data.push(Data::unset(r * w));
    let after = run(KernelOp::LayerNormGrad { rows, width, residual }, target, &data);
    let g: Vec<_> = (0..r * w).map(|i| f64::from(dy[i]) * f64::from(gain[i % w])).collect();
    let mut dx = vec![];
    for row in 0..r {
        let at = row * w..(row + 1) * w;
        let (g, u) = (&g[at.clone()], &n.units[at.clone()]);
        let g_mean = g.iter().sum::<f64>() / w as f64;
        let along = g.iter().zip(u).map(|(g, u)| g * u).sum::<f64>() / w as f64;
        dx.extend(g.iter().zip(u).map(|(g, u)| n.rstd[row] * (g - g_mean - u * along)));
    }
    if residual {
        dx.iter_mut().zip(&passed_on).for_each(|(d, p)| *d += f64::from(*p));
    }
    let what = format!("dx {rows}x{width} residual {residual} {target:?}");
    assert_close(&what, after.last().expect("dx").f32(), &dx, 4e-6);
}

fn gain_and_bias(target: Target, rows: u32, width: u32, x: &[f32]) {
    let (r, w) = (rows as usize, width as usize);
    let n = normalise(&f64s(x), w);
    let (mean, rstd) = (n.mean.iter().map(|v| *v as f32).collect(), n.rstd.iter().map(|v| *v as f32).collect());
    let dy = random(6, r * w);
    let bias = vec![Data::F32(dy.clone())];
    let gain = [dy.clone(), x.to_vec(), mean, rstd].map(Data::F32).to_vec();
    let terms: Vec<_> = dy.iter().zip(&n.units).map(|(d, u)| f64::from(*d) * u).collect();
    let bias_op = |sink| KernelOp::BiasGrad { rows, width, sink };
    let gain_op = |sink| KernelOp::GainGrad { rows, width, sink };
    stored_and_added(target, bias_op, &bias, &column_sums(&f64s(&dy), w));
    stored_and_added(target, gain_op, &gain, &column_sums(&terms, w));
}

/// Stores a gradient over what was there, and adds it to something.
fn stored_and_added(target: Target, op: impl Fn(Sink) -> KernelOp, inputs: &[Data], gradient: &[f64]) {
    let accumulator = random(7, gradient.len());
    let what = format!("{:?} {target:?}", op(Sink::Store));
    let stored = run(op(Sink::Store), target, &[inputs, &[Data::unset(gradient.len())]].concat()).pop().expect("acc");
    assert_close(&what, stored.f32(), gradient, 1e-5);
    let added = run(op(Sink::Add), target, &[inputs, &[Data::F32(accumulator.clone())]].concat()).pop().expect("acc");
    let sums: Vec<_> = accumulator.iter().zip(stored.f32()).map(|(a, g)| a + g).collect();
    assert_eq!(bits(&added), bits(&Data::F32(sums)), "{what}: added");
}

#[test]
fn layer_norm_and_its_gradients_are_right_at_every_shape() {
    for target in targets() {
        for (rows, width) in SHAPES {
            layer_norm(target, rows, width);
        }
    }
}

#[test]
fn cross_entropy_is_right_at_every_shape() {
    for target in targets() {
        for (rows, vocab) in [(51, 67), (1, 5), (8, 16), (3, 300), (2, 1)] {
            cross_entropy(target, rows, vocab);
        }
    }
}

fn cross_entropy(target: Target, rows: u32, vocab: u32) {
    let (r, v) = (rows as usize, vocab as usize);
    let mut logits = ramp(&random(1, r * v), 5.0, 0.0);
    // Far apart: the exponentials overflow without the maximum, and vanish with it.
    logits[0] = 300.0;
    *logits.last_mut().expect("a logit") = -300.0;
    let targets: Vec<u32> = (0..rows).map(|i| (i * 7 + 3) % vocab).collect();
    let scale = 1.0f32 / 48.0;
    let op = KernelOp::CrossEntropy { rows, vocab, scale_bits: scale.to_bits() };
    let data = [Data::U32(targets.clone()), Data::F32(logits.clone()), Data::F64(vec![f64::NAN])];
    let after = run(op, target, &data);
    let (mut loss, mut gradient) = (0.0, vec![]);
    for (row, target) in f64s(&logits).chunks(v).zip(&targets) {
        let peak = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum = row.iter().map(|l| (l - peak).exp()).sum::<f64>();
        loss += sum.ln() + peak - row[*target as usize];
        let hit = |j| if j == *target as usize { 1.0 } else { 0.0 };
        gradient.extend(row.iter().enumerate().map(|(j, l)| ((l - peak).exp() / sum - hit(j)) * f64::from(scale)));
    }
    let found = after[2].f64()[0];
    assert!(
        (found - loss).abs() <= 1e-6 * loss.abs().max(1.0),
        "loss {found} instead of {loss}, {rows}x{vocab} {target:?}"
    );
    assert_close(&format!("gradient {rows}x{vocab} {target:?}"), after[1].f32(), &gradient, 2e-8);
}

#[test]
fn a_nan_among_the_logits_is_not_hidden() {
    for target in targets() {
        let mut logits = random(1, 6 * 20);
        logits[3 * 20 + 18] = f32::NAN;
        let op = KernelOp::CrossEntropy { rows: 6, vocab: 20, scale_bits: 1.0f32.to_bits() };
        let after = run(op, target, &[Data::U32(vec![2; 6]), Data::F32(logits), Data::F64(vec![0.0])]);
        assert!(after[2].f64()[0].is_nan());
    }
}

#[test]
fn embedding_and_its_gradients_are_right_at_every_shape() {
    for target in targets() {
        for sizes in [(3, 17, 37, 67), (1, 1, 5, 3), (2, 5, 16, 1), (3, 4, 130, 11)] {
            embedding(target, sizes);
        }
    }
}

fn embedding(target: Target, (sequences, context, width, vocab): (u32, u32, u32, u32)) {
    let (rows, c, w, v) = ((sequences * context) as usize, context as usize, width as usize, vocab as usize);
    // Some tokens repeat, some are never used.
    let tokens: Vec<u32> = (0..rows as u32).map(|r| (r * r + 1) % vocab / 2).collect();
    let (tok, pos, dx) = (random(1, v * w), random(2, c * w), random(3, rows * w));
    let op = KernelOp::Embed { sequences, context, width, vocab };
    let inputs = [Data::U32(tokens.clone()), Data::F32(tok.clone()), Data::F32(pos.clone())];
    let after = run(op, target, &[&inputs[..], &[Data::unset(rows * w)]].concat());
    let entry = |i: usize| tokens[i / w] as usize * w + i % w;
    let x = (0..rows * w).map(|i| tok[entry(i)] + pos[i % (c * w)]).collect();
    assert_eq!(bits(&after[3]), bits(&Data::F32(x)), "x");
    let (mut d_tok, mut d_pos) = (vec![0.0; v * w], vec![0.0; c * w]);
    for (i, d) in dx.iter().enumerate() {
        d_tok[entry(i)] += f64::from(*d);
        d_pos[i % (c * w)] += f64::from(*d);
    }
    let (tokens, dx) = (Data::U32(tokens), Data::F32(dx));
    let op = |table| move |sink| KernelOp::EmbedGrad { table, sequences, context, width, vocab, sink };
    stored_and_added(target, op(Table::Token), &[tokens, dx.clone()], &d_tok);
    stored_and_added(target, op(Table::Position), &[dx], &d_pos);
}
