//! LayerNorm and its input gradient: a block per row.

use super::row_threads;
use crate::cuda::DeviceKernel;
use crate::cuda::code::{Code, Operands};
use model::kernel::{Kernel, KernelOp};

const EPSILON: f32 = 1e-5;

pub fn write(kernel: &Kernel) -> DeviceKernel {
    match kernel.op {
        KernelOp::LayerNorm { rows, width } => forward(kernel, rows.into(), width.into()),
        KernelOp::LayerNormGrad { rows, width, residual } => backward(kernel, rows.into(), width.into(), residual),
        _ => unreachable!("dispatched on the operation"),
    }
}

/// A row's block: its row, and a loop over the columns of each thread.
struct Row {
    row: String,
    thread: String,
    threads: u32,
    width: u64,
}

impl Row {
    fn new(code: &mut Code, threads: u32, width: u64) -> Self {
        Self { row: code.block("x"), thread: code.thread(), threads, width }
    }

    fn each(&self, code: &mut Code, body: impl FnOnce(&mut Code, &str)) {
        let (end, step) = (code.index(self.width), code.index(self.threads.into()));
        code.repeat((&self.thread, &end, &step), &[], |code, column, _| {
            body(code, column);
            Vec::new()
        });
    }

    /// Sums of some terms of each column over the row.
    fn sums<const N: usize>(&self, code: &mut Code, terms: impl FnOnce(&mut Code, &str) -> [String; N]) -> [String; N] {
        let (end, step) = (code.index(self.width), code.index(self.threads.into()));
        let zero = code.constant(0.0);
        let start = vec![(zero, "f32"); N];
        let own = code.repeat((&self.thread, &end, &step), &start, |code, column, so_far| {
            let terms = terms(code, column);
            terms.iter().zip(so_far).map(|(term, sum)| code.add(sum, term)).collect()
        });
        let sums: Vec<_> = own.iter().map(|sum| code.over_block(sum, self.threads, "arith.addf")).collect();
        sums.try_into().expect("as many sums as terms")
    }

    /// Lets one thread of the block do something.
    fn once(&self, code: &mut Code, body: impl FnOnce(&mut Code)) {
        let first = code.below_const(&self.thread, 1);
        code.when(&first, body);
    }
}

/// y = (x - mean) * rstd * gain + bias; the variance is the mean of the squares of x - mean.
fn forward(kernel: &Kernel, rows: u64, width: u64) -> DeviceKernel {
    let mut operands = Operands::of(kernel);
    let x = operands.activation("x", &[rows, width]);
    let (gain, bias) = (operands.f32("gain", &[width]), operands.f32("bias", &[width]));
    let y = operands.activation("y", &[rows, width]);
    let (mean, rstd) = (operands.f32("mean", &[rows]), operands.f32("rstd", &[rows]));
    let threads = row_threads(width);
    let mut device = DeviceKernel::new(kernel);
    device.launch([rows, 1, 1], threads, &operands, |code| {
        let row = Row::new(code, threads, width);
        let inverse = code.constant(1.0 / width as f32);
        let [sum] = row.sums(code, |code, column| [code.load(&x, &[&row.row, column])]);
        let mu = code.mul(&sum, &inverse);
        let [squares] = row.sums(code, |code, column| {
            let x = code.load(&x, &[&row.row, column]);
            let centred = code.sub(&x, &mu);
            [code.mul(&centred, &centred)]
        });
        let variance = code.mul(&squares, &inverse);
        let (epsilon, one) = (code.constant(EPSILON), code.constant(1.0));
        let safe = code.add(&variance, &epsilon);
        let deviation = code.op(&format!("math.sqrt {safe} : f32"));
        let scale = code.div(&one, &deviation);
        row.each(code, |code, column| {
            let x = code.load(&x, &[&row.row, column]);
            let centred = code.sub(&x, &mu);
            let unit = code.mul(&centred, &scale);
            let gain = code.load(&gain, &[column]);
            let scaled = code.mul(&unit, &gain);
            let bias = code.load(&bias, &[column]);
            let value = code.add(&scaled, &bias);
            code.store(&value, &y, &[&row.row, column]);
        });
        row.once(code, |code| {
            code.store(&mu, &mean, &[&row.row]);
            code.store(&scale, &rstd, &[&row.row]);
        });
    });
    device
}

/// With g = dy * gain and n = (x - mean) * rstd: dx = rstd * (g - mean(g) - n * mean(g n)) (+ residual).
fn backward(kernel: &Kernel, rows: u64, width: u64, residual: bool) -> DeviceKernel {
    let mut operands = Operands::of(kernel);
    let (dy, x) = (operands.activation("dy", &[rows, width]), operands.activation("x", &[rows, width]));
    let (mean, rstd) = (operands.f32("mean", &[rows]), operands.f32("rstd", &[rows]));
    let gain = operands.f32("gain", &[width]);
    let passed_on = residual.then(|| operands.activation("residual", &[rows, width]));
    let dx = operands.activation("dx", &[rows, width]);
    let threads = row_threads(width);
    let mut device = DeviceKernel::new(kernel);
    device.launch([rows, 1, 1], threads, &operands, |code| {
        let row = Row::new(code, threads, width);
        let (mu, scale) = (code.load(&mean, &[&row.row]), code.load(&rstd, &[&row.row]));
        let inverse = code.constant(1.0 / width as f32);
        let parts = |code: &mut Code, column: &str| {
            let x = code.load(&x, &[&row.row, column]);
            let centred = code.sub(&x, &mu);
            let unit = code.mul(&centred, &scale);
            let (dy, gain) = (code.load(&dy, &[&row.row, column]), code.load(&gain, &[column]));
            (code.mul(&dy, &gain), unit)
        };
        let [sum, product] = row.sums(code, |code, column| {
            let (g, unit) = parts(code, column);
            let term = code.mul(&g, &unit);
            [g, term]
        });
        let (g_mean, along) = (code.mul(&sum, &inverse), code.mul(&product, &inverse));
        row.each(code, |code, column| {
            let (g, unit) = parts(code, column);
            let shifted = code.sub(&g, &g_mean);
            let shadow = code.mul(&unit, &along);
            let across = code.sub(&shifted, &shadow);
            let mut value = code.mul(&across, &scale);
            if let Some(passed_on) = &passed_on {
                let passed_on = code.load(passed_on, &[&row.row, column]);
                value = code.add(&value, &passed_on);
            }
            code.store(&value, &dx, &[&row.row, column]);
        });
    });
    device
}
