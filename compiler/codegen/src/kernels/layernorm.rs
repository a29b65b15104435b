//! LayerNorm and its input gradient, a block of rows at a time.

use super::rows::{Block, Kind, blocks, column};
use super::text::Func;
use super::{KernelSource, math, rows};
use model::kernel::{Kernel, KernelOp};
use model::target::CpuClass;

pub fn source(kernel: &Kernel, cpu: CpuClass) -> KernelSource {
    match kernel.op {
        KernelOp::LayerNorm { rows, width } => forward(&kernel.name, rows.into(), width.into(), cpu),
        KernelOp::LayerNormGrad { rows, width, residual } => {
            backward(&kernel.name, rows.into(), width.into(), residual, cpu)
        }
        _ => unreachable!("dispatched on the operation"),
    }
}

/// y = (x - mean) * rstd * gain + bias; the variance is the mean of the squares of x - mean.
fn forward(name: &str, rows: u64, width: u64, cpu: CpuClass) -> KernelSource {
    let mut func = Func::new(name);
    func.input("x", &[rows, width], "f32");
    func.input("gain", &[width], "f32");
    func.input("bias", &[width], "f32");
    func.output("y", &[rows, width], "f32");
    func.output("mean", &[rows], "f32");
    func.output("rstd", &[rows], "f32");
    func.push(&constants(width));
    let outputs = [("y", Kind::Wide), ("mean", Kind::PerRow), ("rstd", Kind::PerRow)];
    let done = blocks(&mut func, rows, width, &outputs, normalise);
    for (output, value) in outputs.iter().zip(done) {
        func.result(output.0, &value);
    }
    KernelSource { linalg: func.finish(), strategy: rows::strategy(width, cpu) }
}

fn normalise(b: &mut Block) {
    let (x, gain, bias) = (b.slice("x", Kind::Wide, "f32"), column("gain"), column("bias"));
    let y_rows = b.slice("y", Kind::Wide, "f32");
    let (mean_rows, rstd_rows) = (b.slice("mean", Kind::PerRow, "f32"), b.slice("rstd", Kind::PerRow, "f32"));
    let sum = b.sum("sum", &[&x], "%x_el", "");
    let mean = b.map("mu", &[&sum], &mean_rows, "%v", "%v = arith.mulf %sum_el, %inverse_width : f32\n");
    let squares = b.sum(
        "squares",
        &[&x, &mean],
        "%term",
        "%centred = arith.subf %x_el, %mu_el : f32\n\
         %term = arith.mulf %centred, %centred : f32\n",
    );
    let rstd = b.map(
        "scale",
        &[&squares],
        &rstd_rows,
        "%v",
        "%variance = arith.mulf %squares_el, %inverse_width : f32\n\
         %safe = arith.addf %variance, %epsilon : f32\n\
         %deviation = math.sqrt %safe : f32\n\
         %v = arith.divf %one, %deviation : f32\n",
    );
    let y = b.map(
        "normal",
        &[&x, &mean, &rstd, &gain, &bias],
        &y_rows,
        "%v",
        "%centred = arith.subf %x_el, %mu_el : f32\n\
         %unit = arith.mulf %centred, %scale_el : f32\n\
         %scaled = arith.mulf %unit, %gain_el : f32\n\
         %v = arith.addf %scaled, %bias_el : f32\n",
    );
    b.store("y", &y);
    b.store("mean", &mean);
    b.store("rstd", &rstd);
}

/// With g = dy * gain and n = (x - mean) * rstd: dx = rstd * (g - mean(g) - n * mean(g n)) (+ residual).
fn backward(name: &str, rows: u64, width: u64, residual: bool, cpu: CpuClass) -> KernelSource {
    let mut func = Func::new(name);
    func.input("dy", &[rows, width], "f32");
    func.input("x", &[rows, width], "f32");
    func.input("mean", &[rows], "f32");
    func.input("rstd", &[rows], "f32");
    func.input("gain", &[width], "f32");
    if residual {
        func.input("residual", &[rows, width], "f32");
    }
    func.output("dx", &[rows, width], "f32");
    func.push(&constants(width));
    let done = blocks(&mut func, rows, width, &[("dx", Kind::Wide)], |b| gradient(b, residual));
    func.result("dx", &done[0]);
    KernelSource { linalg: func.finish(), strategy: rows::strategy(width, cpu) }
}

fn gradient(b: &mut Block, residual: bool) {
    let (dy, x, gain) = (b.slice("dy", Kind::Wide, "f32"), b.slice("x", Kind::Wide, "f32"), column("gain"));
    let (mean, rstd) = (b.slice("mean", Kind::PerRow, "f32"), b.slice("rstd", Kind::PerRow, "f32"));
    let dx_rows = b.slice("dx", Kind::Wide, "f32");
    let sum = b.sum("sum", &[&dy, &gain], "%term", "%term = arith.mulf %dy_el, %gain_el : f32\n");
    let product = b.sum(
        "product",
        &[&dy, &gain, &x, &mean, &rstd],
        "%term",
        "%centred = arith.subf %x_el, %mean_el : f32\n\
         %unit = arith.mulf %centred, %rstd_el : f32\n\
         %g = arith.mulf %dy_el, %gain_el : f32\n\
         %term = arith.mulf %g, %unit : f32\n",
    );
    let mut operands = vec![&dy, &gain, &x, &mean, &rstd, &sum, &product];
    let mut body = String::from(
        "%centred = arith.subf %x_el, %mean_el : f32\n\
         %unit = arith.mulf %centred, %rstd_el : f32\n\
         %g = arith.mulf %dy_el, %gain_el : f32\n\
         %g_mean = arith.mulf %sum_el, %inverse_width : f32\n\
         %along = arith.mulf %product_el, %inverse_width : f32\n\
         %shifted = arith.subf %g, %g_mean : f32\n\
         %shadow = arith.mulf %unit, %along : f32\n\
         %across = arith.subf %shifted, %shadow : f32\n",
    );
    let passed_on = residual.then(|| b.slice("residual", Kind::Wide, "f32"));
    if let Some(passed_on) = &passed_on {
        operands.push(passed_on);
        body += "%own = arith.mulf %across, %rstd_el : f32\n%v = arith.addf %own, %residual_el : f32\n";
    } else {
        body += "%v = arith.mulf %across, %rstd_el : f32\n";
    }
    let dx = b.map("gradient", &operands, &dx_rows, "%v", &body);
    b.store("dx", &dx);
}

fn constants(width: u64) -> String {
    format!(
        "%zero = arith.constant 0.0 : f32\n\
         %one = arith.constant 1.0 : f32\n\
         %epsilon = arith.constant 1.0e-5 : f32\n\
         %inverse_width = arith.constant {} : f32",
        math::float(1.0 / width as f32)
    )
}
