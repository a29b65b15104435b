//! Cross-entropy: a block per row makes the gradient and the row's loss; then one thread sums the losses in f64, ascending.

use super::{row_threads, scratch};
use crate::cuda::DeviceKernel;
use crate::cuda::code::{Buffer, Code, Operands, WARP};
use crate::kernels::math;
use model::kernel::{Kernel, KernelOp};

pub fn write(kernel: &Kernel) -> DeviceKernel {
    let KernelOp::CrossEntropy { rows, vocab, scale_bits } = kernel.op else {
        unreachable!("dispatched on the operation")
    };
    let (rows, vocab) = (u64::from(rows), u64::from(vocab));
    let mut operands = Operands::of(kernel);
    let targets = operands.add("targets", &[rows], "i32");
    let logits = operands.activation("logits", &[rows, vocab]);
    let loss = operands.add("loss", &[1], "f64");
    let losses = scratch(&mut operands, kernel);
    let threads = row_threads(vocab);
    let mut device = DeviceKernel::new(kernel);
    device.launch([rows, 1, 1], threads, &operands, |code| {
        let row = code.block("x");
        let scale = f32::from_bits(scale_bits);
        row_gradient(code, &row, (threads, vocab, scale), [&targets, &logits, &losses]);
    });
    device.launch([1, 1, 1], WARP, &operands, |code| total(code, rows, &losses, &loss));
    device
}

/// logits <- (softmax - onehot) * scale; the row's loss is log(sum exp(logit - peak)) + peak - (the target's logit).
fn row_gradient(
    code: &mut Code,
    row: &str,
    (threads, vocab, scale): (u32, u64, f32),
    [targets, logits, losses]: [&Buffer; 3],
) {
    let thread = code.thread();
    let (end, step) = (code.index(vocab), code.index(threads.into()));
    let target = code.load_index(targets, &[row]);
    // Before any thread overwrites it: the sums below have barriers.
    let picked = code.load(logits, &[row, &target]);
    let lowest = code.constant(f32::NEG_INFINITY);
    let highest = code.repeat((&thread, &end, &step), &[(lowest, "f32")], |code, column, so_far| {
        let logit = code.load(logits, &[row, column]);
        vec![code.binary("arith.maximumf", &so_far[0], &logit)]
    });
    let peak = code.over_block(&highest[0], threads, "arith.maximumf");
    let weight = |code: &mut Code, column: &str| {
        let logit = code.load(logits, &[row, column]);
        let below = code.sub(&logit, &peak);
        math::exp(code, &below)
    };
    let zero = code.constant(0.0);
    let sum = code.repeat((&thread, &end, &step), &[(zero.clone(), "f32")], |code, column, so_far| {
        let weight = weight(code, column);
        vec![code.add(&so_far[0], &weight)]
    });
    let sum = code.over_block(&sum[0], threads, "arith.addf");
    let scale = code.constant(scale);
    let factor = code.div(&scale, &sum);
    code.repeat((&thread, &end, &step), &[], |code, column, _| {
        let weight = weight(code, column);
        let p = code.mul(&weight, &factor);
        let hit = code.op(&format!("arith.cmpi eq, {column}, {target} : index"));
        let one_hot = code.choose(&hit, &scale, &zero);
        let value = code.sub(&p, &one_hot);
        code.store(&value, logits, &[row, column]);
        Vec::new()
    });
    let first = code.below_const(&thread, 1);
    code.when(&first, |code| {
        let log = math::log(code, &sum);
        let log_sum = code.add(&log, &peak);
        let loss = code.sub(&log_sum, &picked);
        code.store(&loss, losses, &[row]);
    });
}

fn total(code: &mut Code, rows: u64, losses: &Buffer, loss: &Buffer) {
    let thread = code.thread();
    let first = code.below_const(&thread, 1);
    code.when(&first, |code| {
        let (zero, end, one) = (code.index(0), code.index(rows), code.index(1));
        let start = code.op("arith.constant 0.0 : f64");
        let sum = code.repeat((&zero, &end, &one), &[(start, "f64")], |code, row, so_far| {
            let one_row = code.load(losses, &[row]);
            let wide = code.op(&format!("arith.extf {one_row} : f32 to f64"));
            vec![code.op(&format!("arith.addf {}, {wide} : f64", so_far[0]))]
        });
        code.store(&sum[0], loss, &[&zero]);
    });
}
