//! Every kernel, as its definition says, in f64: naive loops, no tiles, no scratch.
//!
//! # Meaning
//!
//! Memory is an [`Arena`] of *cells*, one f64 for every 2 bytes of the real arena: an element at byte b is in cell b/2, and those behind it up to
//! the next element are not used. So offsets mean what they mean at run time, and values keep f64's precision, bf16 ones too.

use model::kernel::{
    CorrectionKind, Dtype, Epilogue, Factor, Form, Kernel, KernelOp, MatMul, OptimizerKind, Sink, Table, UpdatePart,
    UpdateRule, Writes,
};
use std::ops::Range;

/// See the module's text.
#[derive(Clone, Debug, PartialEq)]
pub struct Arena {
    pub cells: Vec<f64>,
}

impl Arena {
    /// An arena of `bytes`. Cells start as NaN: what is read before it is written shows.
    pub fn new(bytes: u64) -> Arena {
        Arena { cells: vec![f64::NAN; (bytes / 2) as usize] }
    }

    /// Cells of `bytes` bytes at `offset`.
    pub fn range(offset: u64, bytes: u64) -> Range<usize> {
        (offset / 2) as usize..((offset + bytes) / 2) as usize
    }
}

/// Elements in the arena.
#[derive(Clone, Debug)]
struct Cells {
    first: usize,
    step: usize,
    len: usize,
}

impl Cells {
    /// The cell of an element.
    fn at(&self, i: usize) -> usize {
        assert!(i < self.len);
        self.first + i * self.step
    }

    fn all(&self) -> std::iter::StepBy<Range<usize>> {
        (self.first..self.first + self.len * self.step).step_by(self.step)
    }
}

/// Runs one kernel. `args`: the cells of each argument in the kernel's order; a scratch argument is ignored.
pub fn execute(kernel: &Kernel, arena: &mut Arena, args: &[Range<usize>]) {
    let op = &kernel.op;
    let cells = kernel.operands().into_iter().zip(args).map(|(operand, range)| {
        let step = operand.elem.bytes() as usize / 2;
        Cells { first: range.start, step, len: range.len() / step }
    });
    let mut call = Call { operands: cells.collect::<Vec<_>>().into_iter(), copied: false, arena };
    let bf16 = kernel.dtype == Dtype::Bf16;
    call.copied = bf16 && matches!(op, KernelOp::MatMul(_) | KernelOp::Update { .. });
    match *op {
        KernelOp::Embed { context, width, .. } => embed(&mut call, context as usize, width as usize),
        KernelOp::EmbedGrad { table, context, width, vocab, sink, .. } => {
            embed_grad(&mut call, table, context as usize, width as usize, vocab as usize, sink)
        }
        KernelOp::LayerNorm { width, .. } => layer_norm(&mut call, width as usize),
        KernelOp::LayerNormGrad { width, residual, .. } => layer_norm_grad(&mut call, width as usize, residual),
        KernelOp::GainGrad { width, sink, .. } => gain_grad(&mut call, width as usize, sink),
        KernelOp::BiasGrad { width, sink, .. } => bias_grad(&mut call, width as usize, sink),
        KernelOp::MatMul(ref matmul) => mat_mul(&mut call, matmul),
        KernelOp::Attention { sequences, context, width, heads } => {
            attention(&mut call, Heads::new(sequences, context, width, heads))
        }
        KernelOp::AttentionGrad { sequences, context, width, heads } => {
            attention_grad(&mut call, Heads::new(sequences, context, width, heads))
        }
        KernelOp::CrossEntropy { vocab, scale_bits, .. } => {
            cross_entropy(&mut call, vocab as usize, f32::from_bits(scale_bits).into())
        }
        KernelOp::Update { rule, .. } => {
            let gradient = call.read();
            let (states, copy) = call.updated(rule);
            let hyper = call.read();
            update(call.arena, rule, &gradient, &hyper, (&states, copy));
        }
        KernelOp::Part(part) => update_part(&mut call, part),
    }
    assert!(call.operands.next().is_none(), "{op:?} has operands that were not used");
}

struct Call<'a> {
    operands: std::vec::IntoIter<Cells>,
    /// Whether an update writes a bf16 copy of the weight.
    copied: bool,
    arena: &'a mut Arena,
}

impl Call<'_> {
    fn next(&mut self) -> Cells {
        self.operands.next().expect("a kernel has the operands that its operation lists")
    }

    /// The next operand's content.
    fn read(&mut self) -> Vec<f64> {
        let cells = self.next();
        cells.all().map(|at| self.arena.cells[at]).collect()
    }

    /// The next operand's new content.
    fn write(&mut self, content: Vec<f64>) {
        let cells = self.next();
        assert_eq!(cells.len, content.len());
        cells.all().zip(content).for_each(|(at, value)| self.arena.cells[at] = value);
    }

    /// The weight, then its states; a weight that stays as it is is copied first. The bf16 copy if there is one.
    fn updated(&mut self, rule: UpdateRule) -> (Vec<Cells>, Option<Cells>) {
        if rule.writes == Writes::Next {
            let weight = self.next();
            let next = self.operands.as_slice()[0].clone();
            weight.all().zip(next.all()).for_each(|(from, to)| self.arena.cells[to] = self.arena.cells[from]);
        }
        let states = (0..=rule.states().len()).map(|_| self.next()).collect();
        (states, self.copied.then(|| self.next()))
    }

    fn sink(&mut self, sink: Sink, gradient: Vec<f64>) {
        match sink {
            Sink::Store => self.write(gradient),
            Sink::Add => {
                let cells = self.next();
                cells.all().zip(gradient).for_each(|(at, g)| self.arena.cells[at] += g);
            }
            Sink::Compensated { .. } => unreachable!("no rule of these tests compensates"),
            Sink::Update { rule, accumulated } => {
                let mut whole = gradient;
                if accumulated {
                    let so_far = self.read();
                    whole.iter_mut().zip(so_far).for_each(|(g, acc)| *g += acc);
                }
                let hyper = self.read();
                let (places, copy) = self.updated(rule);
                update(self.arena, rule, &whole, &hyper, (&places, copy));
            }
        }
    }
}

fn update_part(call: &mut Call, part: UpdatePart) {
    let squares = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>();
    match part {
        UpdatePart::SumSquares { add, .. } => {
            let sum = squares(&call.read());
            let place = call.next();
            let cell = &mut call.arena.cells[place.first];
            *cell = if add { *cell + sum } else { sum };
        }
        UpdatePart::Scale { factor, .. } => {
            let norm = call.read()[0].sqrt();
            let by = match factor {
                Factor::Unit => 1.0 / (norm + 1e-7),
                Factor::AtMost { max_bits } if norm > f64::from_bits(max_bits) => f64::from_bits(max_bits) / norm,
                Factor::AtMost { .. } => 1.0,
                Factor::To { target_bits } => f64::from_bits(target_bits) / (norm + 1e-10),
            };
            let place = call.next();
            place.all().for_each(|at| call.arena.cells[at] *= by);
        }
        UpdatePart::Add { .. } => {
            let (other, g) = (call.read(), call.next());
            g.all().zip(other).for_each(|(at, x)| call.arena.cells[at] += x);
        }
        UpdatePart::Momentum { .. } | UpdatePart::Correct { .. } => {
            let h = call.read();
            let (g, state) = (call.next(), call.next());
            for (g, state) in g.all().zip(state.all()) {
                let cells = &mut call.arena.cells;
                let (old, before) = (cells[g], cells[state]);
                (cells[g], cells[state]) = match part {
                    UpdatePart::Momentum { .. } => {
                        let m = h[0] * before + h[1] * old;
                        (old + h[0] * (m - old), m)
                    }
                    _ => (old + h[8] * (old - before), old),
                };
            }
        }
        UpdatePart::Average { .. } | UpdatePart::Precondition { .. } | UpdatePart::Turn { .. } => {
            panic!("no interpreted model has SOAP")
        }
        UpdatePart::Columns { rows, width } => {
            let h = call.read();
            let (x, v) = (call.next(), call.next());
            for j in 0..width as usize {
                let column: Vec<usize> = x.all().skip(j).step_by(width as usize).collect();
                let mean = column.iter().map(|&i| call.arena.cells[i].powi(2)).sum::<f64>() / f64::from(rows);
                let moment = &mut call.arena.cells[v.at(j)];
                *moment = h[2] * *moment + h[3] * mean;
                let by = moment.sqrt() + 1e-10;
                column.into_iter().for_each(|i| call.arena.cells[i] /= by);
            }
        }
    }
}

/// `places`: the weight, then its states.
fn update(
    arena: &mut Arena,
    rule: UpdateRule,
    gradient: &[f64],
    hyper: &[f64],
    (places, copy): (&[Cells], Option<Cells>),
) {
    for (i, &g) in gradient.iter().enumerate() {
        let mut values: Vec<f64> = places.iter().map(|p| arena.cells[p.at(i)]).collect();
        updated(rule, hyper, g, &mut values);
        if let Some(copy) = &copy {
            arena.cells[copy.at(i)] = values[0];
        }
        places.iter().zip(values).for_each(|(p, value)| arena.cells[p.at(i)] = value);
    }
}

/// One element: the weight, then its states.
fn updated(rule: UpdateRule, h: &[f64], g: f64, values: &mut [f64]) {
    let sign = |x: f64| if x == 0.0 { 0.0 } else { x.signum() };
    let (w, states) = values.split_first_mut().expect("a weight");
    let (states, more) = states.split_at_mut(rule.kind.states().len());
    let step = match (rule.kind, states) {
        (OptimizerKind::AdamW, [m, v]) => {
            (*m, *v) = (*m * h[0] + g * h[1], *v * h[2] + g * g * h[3]);
            *m / ((*v * h[4]).sqrt() + h[5]) * h[6]
        }
        (OptimizerKind::Muon, []) => g * h[6],
        (OptimizerKind::Sgd, [m]) => {
            *m = *m * h[0] + g;
            *m * h[6]
        }
        (OptimizerKind::Lion, [m]) => {
            let ahead = *m * h[0] + g * h[1];
            *m = *m * h[2] + g * h[3];
            sign(ahead) * h[6]
        }
        (OptimizerKind::Signum, [m]) => {
            *m = *m * h[0] + g * h[1];
            sign(*m) * h[6]
        }
        (OptimizerKind::NAdam, [m, v]) => {
            (*m, *v) = (*m * h[0] + g * h[1], *v * h[2] + g * g * h[3]);
            (*m * h[6] + g * h[8]) / ((*v * h[4]).sqrt() + h[5])
        }
        (OptimizerKind::Adan, [m, diff, v, back]) => {
            let change = (g + *back) * h[11];
            (*m, *diff, *back) = (*m * h[0] + g * h[1], *diff * h[2] + change * h[3], -g);
            *v = *v * h[9] + (g + change * h[2]).powi(2) * h[10];
            (*m * h[6] + *diff * h[8]) / ((*v * h[4]).sqrt() + h[5])
        }
        (other, _) => panic!("{other:?} has other states"),
    };
    let taken = match (rule.correction, &mut *more) {
        (None, []) | (Some(CorrectionKind::Discrepancy), _) => step,
        (Some(CorrectionKind::ErrorFeedback), [last]) => step + h[12] * (step - std::mem::replace(last, step)),
        (Some(CorrectionKind::Nesterov), [ahead]) => {
            *ahead = *ahead * h[12] + step * h[13];
            step * h[13] + *ahead * h[12]
        }
        (other, _) => panic!("{other:?} has other states"),
    };
    let before = *w;
    *w = if rule.kind == OptimizerKind::Adan { (*w - taken) * h[7] } else { *w * h[7] - taken };
    if let (Some(CorrectionKind::Discrepancy), [delta, behind]) = (rule.correction, more) {
        *delta = *delta * h[12] + (*w - before) * h[13];
        *behind = *w - *delta * h[14];
    }
}

fn embed(call: &mut Call, context: usize, width: usize) {
    let (tokens, table, positions) = (call.read(), call.read(), call.read());
    let element = |r: usize, j: usize| table[tokens[r] as usize * width + j] + positions[(r % context) * width + j];
    let x = (0..tokens.len() * width).map(|i| element(i / width, i % width)).collect();
    call.write(x);
}

fn embed_grad(call: &mut Call, table: Table, context: usize, width: usize, vocab: usize, sink: Sink) {
    let tokens = if table == Table::Token { call.read() } else { Vec::new() };
    let dx = call.read();
    let entries = if table == Table::Token { vocab } else { context };
    let mut gradient = vec![0.0; entries * width];
    for (i, d) in dx.iter().enumerate() {
        let row = i / width;
        let entry = if table == Table::Token { tokens[row] as usize } else { row % context };
        gradient[entry * width + i % width] += d;
    }
    call.sink(sink, gradient);
}

fn layer_norm(call: &mut Call, width: usize) {
    let (x, gain, bias) = (call.read(), call.read(), call.read());
    let (mut y, mut means, mut rstds) = (Vec::new(), Vec::new(), Vec::new());
    for row in x.chunks(width) {
        let mean = row.iter().sum::<f64>() / width as f64;
        let variance = row.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / width as f64;
        let rstd = 1.0 / (variance + 1e-5).sqrt();
        y.extend((0..width).map(|j| (row[j] - mean) * rstd * gain[j] + bias[j]));
        means.push(mean);
        rstds.push(rstd);
    }
    call.write(y);
    call.write(means);
    call.write(rstds);
}

fn layer_norm_grad(call: &mut Call, width: usize, residual: bool) {
    let (dy, x, means, rstds, gain) = (call.read(), call.read(), call.read(), call.read(), call.read());
    let residual = if residual { call.read() } else { vec![0.0; x.len()] };
    let mut dx = Vec::new();
    for (r, (dy, x)) in dy.chunks(width).zip(x.chunks(width)).enumerate() {
        let normal: Vec<f64> = x.iter().map(|v| (v - means[r]) * rstds[r]).collect();
        let d: Vec<f64> = (0..width).map(|j| dy[j] * gain[j]).collect();
        let mean_d = d.iter().sum::<f64>() / width as f64;
        let mean_dn = (0..width).map(|j| d[j] * normal[j]).sum::<f64>() / width as f64;
        dx.extend((0..width).map(|j| rstds[r] * (d[j] - mean_d - normal[j] * mean_dn) + residual[r * width + j]));
    }
    call.write(dx);
}

fn gain_grad(call: &mut Call, width: usize, sink: Sink) {
    let (dy, x, means, rstds) = (call.read(), call.read(), call.read(), call.read());
    let mut gradient = vec![0.0; width];
    for i in 0..dy.len() {
        gradient[i % width] += dy[i] * (x[i] - means[i / width]) * rstds[i / width];
    }
    call.sink(sink, gradient);
}

fn bias_grad(call: &mut Call, width: usize, sink: Sink) {
    let dy = call.read();
    let mut gradient = vec![0.0; width];
    dy.iter().enumerate().for_each(|(i, d)| gradient[i % width] += d);
    call.sink(sink, gradient);
}

fn mat_mul(call: &mut Call, matmul: &MatMul) {
    let [m, n, k] = [matmul.m, matmul.n, matmul.k].map(|d| d as usize);
    let (a, b) = (call.read(), call.read());
    // Cells from one row, and from one column, to the next.
    let (a_row, a_column) = if matmul.form == Form::TN { (1, m) } else { (k, 1) };
    let (b_row, b_column) = if matmul.form == Form::NT { (1, k) } else { (n, 1) };
    let mut c = vec![0.0; m * n];
    for (i, row) in c.chunks_mut(n).enumerate() {
        for p in 0..k {
            let a = a[i * a_row + p * a_column];
            row.iter_mut().enumerate().for_each(|(j, c)| *c += a * b[p * b_row + j * b_column]);
        }
    }
    let add_bias = |c: &mut [f64], bias: Vec<f64>| c.iter_mut().enumerate().for_each(|(e, c)| *c += bias[e % n]);
    match matmul.epilogue {
        Epilogue::Store => {}
        Epilogue::Bias => add_bias(&mut c, call.read()),
        Epilogue::BiasResidual => {
            add_bias(&mut c, call.read());
            c.iter_mut().zip(call.read()).for_each(|(c, r)| *c += r);
        }
        Epilogue::BiasGelu => {
            add_bias(&mut c, call.read());
            call.write(c.clone());
            c.iter_mut().for_each(|c| *c = gelu(*c).0);
        }
        Epilogue::GeluGrad => c.iter_mut().zip(call.read()).for_each(|(c, pre)| *c *= gelu(pre).1),
        Epilogue::Blend { product_bits, other_bits } => {
            let [product, other] = [product_bits, other_bits].map(|bits| f64::from(f32::from_bits(bits)));
            c.iter_mut().zip(call.read()).for_each(|(c, r)| *c = product * *c + other * r);
        }
        Epilogue::Average => panic!("no interpreted model has SOAP"),
        Epilogue::Gradient(sink) => return call.sink(sink, c),
    }
    call.write(c);
}

/// GELU by tanh, and its derivative.
fn gelu(x: f64) -> (f64, f64) {
    let slope = (2.0 / std::f64::consts::PI).sqrt();
    let t = (slope * (x + 0.044715 * x.powi(3))).tanh();
    let inner = slope * (1.0 + 3.0 * 0.044715 * x * x);
    (0.5 * x * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner)
}

/// Index arithmetic of attention: element `d` of head `h` at token `t` of sequence `s`.
#[derive(Clone, Copy)]
struct Heads {
    sequences: usize,
    context: usize,
    width: usize,
    heads: usize,
}

impl Heads {
    fn new(sequences: u32, context: u32, width: u32, heads: u32) -> Heads {
        let [sequences, context, width, heads] = [sequences, context, width, heads].map(|d| d as usize);
        Heads { sequences, context, width, heads }
    }

    fn depth(&self) -> usize {
        self.width / self.heads
    }

    fn scale(&self) -> f64 {
        1.0 / (self.depth() as f64).sqrt()
    }

    /// `part`: 0 q, 1 k, 2 v.
    fn qkv(&self, s: usize, t: usize, part: usize, h: usize) -> usize {
        (s * self.context + t) * 3 * self.width + part * self.width + h * self.depth()
    }

    fn o(&self, s: usize, t: usize, h: usize) -> usize {
        (s * self.context + t) * self.width + h * self.depth()
    }

    fn lse(&self, s: usize, h: usize, t: usize) -> usize {
        (s * self.heads + h) * self.context + t
    }

    /// Every (sequence, head, query).
    fn queries(self) -> impl Iterator<Item = (usize, usize, usize)> {
        let Heads { sequences, heads, context, .. } = self;
        (0..sequences).flat_map(move |s| (0..heads).flat_map(move |h| (0..context).map(move |t| (s, h, t))))
    }

    fn score(&self, qkv: &[f64], s: usize, h: usize, query: usize, key: usize) -> f64 {
        let (q, k) = (self.qkv(s, query, 0, h), self.qkv(s, key, 1, h));
        (0..self.depth()).map(|d| qkv[q + d] * qkv[k + d]).sum::<f64>() * self.scale()
    }
}

fn attention(call: &mut Call, heads: Heads) {
    let qkv = call.read();
    let mut o = vec![0.0; heads.sequences * heads.context * heads.width];
    let mut lse = vec![0.0; heads.sequences * heads.heads * heads.context];
    for (s, h, t) in heads.queries() {
        let scores: Vec<f64> = (0..=t).map(|key| heads.score(&qkv, s, h, t, key)).collect();
        let log_sum = log_sum_exp(&scores);
        lse[heads.lse(s, h, t)] = log_sum;
        for (key, score) in scores.iter().enumerate() {
            let v = heads.qkv(s, key, 2, h);
            (0..heads.depth()).for_each(|d| o[heads.o(s, t, h) + d] += (score - log_sum).exp() * qkv[v + d]);
        }
    }
    call.write(o);
    call.write(lse);
}

fn attention_grad(call: &mut Call, heads: Heads) {
    let (qkv, o, lse, d_o) = (call.read(), call.read(), call.read(), call.read());
    let mut d_qkv = vec![0.0; qkv.len()];
    for (s, h, t) in heads.queries() {
        let at = heads.o(s, t, h);
        let d_row: f64 = (0..heads.depth()).map(|d| d_o[at + d] * o[at + d]).sum();
        for key in 0..=t {
            let (q, k, v) = (heads.qkv(s, t, 0, h), heads.qkv(s, key, 1, h), heads.qkv(s, key, 2, h));
            let p = (heads.score(&qkv, s, h, t, key) - lse[heads.lse(s, h, t)]).exp();
            let d_p: f64 = (0..heads.depth()).map(|d| d_o[at + d] * qkv[v + d]).sum();
            let d_score = p * (d_p - d_row) * heads.scale();
            for d in 0..heads.depth() {
                d_qkv[v + d] += p * d_o[at + d];
                d_qkv[q + d] += d_score * qkv[k + d];
                d_qkv[k + d] += d_score * qkv[q + d];
            }
        }
    }
    call.write(d_qkv);
}

fn cross_entropy(call: &mut Call, vocab: usize, scale: f64) {
    let targets = call.read();
    let logits = call.next();
    let mut loss = 0.0;
    for (row, target) in targets.into_iter().enumerate() {
        let cells: Vec<usize> = (row * vocab..(row + 1) * vocab).map(|i| logits.at(i)).collect();
        let values: Vec<f64> = cells.iter().map(|&at| call.arena.cells[at]).collect();
        let log_sum = log_sum_exp(&values);
        loss += log_sum - values[target as usize];
        for (j, &at) in cells.iter().enumerate() {
            let hit = if j == target as usize { 1.0 } else { 0.0 };
            call.arena.cells[at] = ((values[j] - log_sum).exp() - hit) * scale;
        }
    }
    call.write(vec![loss]);
}

fn log_sum_exp(scores: &[f64]) -> f64 {
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    max + scores.iter().map(|s| (s - max).exp()).sum::<f64>().ln()
}
