//! Gradients of biases and LayerNorm gains: a thread per column sums over the rows, ascending, from zero.

use super::sink::SinkBuffers;
use crate::cuda::DeviceKernel;
use crate::cuda::code::{Code, Operands};
use model::kernel::{Kernel, KernelOp, Sink};

const THREADS: u32 = 64;

pub fn write(kernel: &Kernel) -> DeviceKernel {
    match kernel.op {
        KernelOp::BiasGrad { rows, width, sink } => column_sums(kernel, rows.into(), width.into(), sink, false),
        KernelOp::GainGrad { rows, width, sink } => column_sums(kernel, rows.into(), width.into(), sink, true),
        _ => unreachable!("dispatched on the operation"),
    }
}

/// Sums dy [rows, width], or dy * (x - mean) * rstd when `normalised`.
pub fn column_sums(kernel: &Kernel, rows: u64, width: u64, sink: Sink, normalised: bool) -> DeviceKernel {
    let mut operands = Operands::of(kernel);
    let dy = operands.activation("dy", &[rows, width]);
    let normal = normalised.then(|| {
        let x = operands.activation("x", &[rows, width]);
        [x, operands.f32("mean", &[rows]), operands.f32("rstd", &[rows])]
    });
    let sink = SinkBuffers::new(&mut operands, sink, &[width], false);
    let mut device = DeviceKernel::new(kernel);
    device.launch([width.div_ceil(THREADS.into()), 1, 1], THREADS, &operands, |code| {
        sink.prepare(code);
        let column = code.global_thread(THREADS);
        let exists = code.below_const(&column, width);
        code.when(&exists, |code| {
            let sum = over_rows(code, rows, |code, row| {
                let dy = code.load(&dy, &[row, &column]);
                let Some([x, mean, rstd]) = &normal else { return dy };
                let (x, mean) = (code.load(x, &[row, &column]), code.load(mean, &[row]));
                let centred = code.sub(&x, &mean);
                let rstd = code.load(rstd, &[row]);
                let unit = code.mul(&centred, &rstd);
                code.mul(&dy, &unit)
            });
            sink.take(code, &[&column], &[sum]);
        });
    });
    device
}

fn over_rows(code: &mut Code, rows: u64, term: impl FnOnce(&mut Code, &str) -> String) -> String {
    let (zero, end, one) = (code.index(0), code.index(rows), code.index(1));
    let start = code.constant(0.0);
    code.repeat((&zero, &end, &one), &[(start, "f32")], |code, row, so_far| {
        let term = term(code, row);
        vec![code.add(&so_far[0], &term)]
    })
    .remove(0)
}
