//! Softmax cross-entropy: the loss, and its gradient over the logits in their place.

use super::rows::{self, Block, Kind, blocks};
use super::text::{Func, tensor};
use super::{KernelSource, math};
use model::kernel::{Dtype, Kernel, KernelOp};
use model::target::CpuClass;

pub fn source(kernel: &Kernel, cpu: CpuClass) -> KernelSource {
    let KernelOp::CrossEntropy { rows, vocab, scale_bits } = kernel.op else {
        unreachable!("dispatched on the operation")
    };
    let (rows, vocab) = (u64::from(rows), u64::from(vocab));
    let mut func = Func::new(&kernel.name);
    func.input("targets", &[rows], "i32");
    func.output("logits", &[rows, vocab], "f32");
    func.output("loss", &[1], "f64");
    func.push(&format!(
        "%zero = arith.constant 0.0 : f32\n\
         %lowest = arith.constant 0xFF800000 : f32\n\
         %scale = arith.constant {} : f32",
        math::float(f32::from_bits(scale_bits))
    ));
    func.push(&target_logits(rows, vocab));
    let outputs = [("logits", Kind::Wide), ("row_loss", Kind::PerRow)];
    let twice = kernel.dtype == Dtype::Bf16;
    let done = blocks(&mut func, rows, vocab, &outputs, |b| softmax(b, twice));
    func.push(&total(rows, &done[1]));
    func.result("logits", &done[0]);
    func.result("loss", "%loss_new");
    KernelSource { linalg: func.finish(), strategy: rows::strategy(vocab, cpu) }
}

/// `%row_loss`: each row's logit at its target, read before the logits are overwritten. The blocks make losses of them.
fn target_logits(rows: u64, vocab: u64) -> String {
    let (per_row, wide) = (tensor(&[rows], "f32"), tensor(&[rows, vocab], "f32"));
    let targets = tensor(&[rows], "i32");
    format!(
        "%target_first = arith.constant 0 : index\n\
         %target_end = arith.constant {rows} : index\n\
         %target_step = arith.constant 1 : index\n\
         %target_empty = tensor.empty() : {per_row}\n\
         %row_loss = scf.for %at = %target_first to %target_end step %target_step iter_args(%so_far = %target_empty) -> ({per_row}) {{\n\
         %target = tensor.extract %targets[%at] : {targets}\n\
         %target_column = arith.index_castui %target : i32 to index\n\
         %target_logit = tensor.extract %logits[%at, %target_column] : {wide}\n\
         %with = tensor.insert %target_logit into %so_far[%at] : {per_row}\n\
         scf.yield %with : {per_row}\n}}\n"
    )
}

/// logits <- (softmax - onehot) * scale; row_loss <- log(sum exp(logit - peak)) + peak - (the target's logit). The exponentials lie where
/// the logits were, or are computed `twice` where they would be rounded there.
fn softmax(b: &mut Block, twice: bool) {
    let (logits, picked) = (b.slice("logits", Kind::Wide, "f32"), b.slice("row_loss", Kind::PerRow, "f32"));
    let targets = b.slice("targets", Kind::PerRow, "i32");
    let peak = b.reduce("peak", ("arith.maximumf", "%lowest"), &[&logits], "%logits_el", "");
    let exp = |logit: &str| {
        let mut region = math::Region::new("e");
        let below = region.sub(logit, "%peak_el");
        let e = math::exp(&mut region, &below);
        (e, region.finish())
    };
    let (e, text) = exp("%out_el");
    let (sum, into, operands, e, text) = if twice {
        let (term, sum_text) = exp("%logits_el");
        let sum = b.sum("sum", &[&logits, &peak], &term, &sum_text);
        (sum, logits, vec![&peak], e, text)
    } else {
        let exps = b.map("exps", &[&peak], &logits, &e, &text);
        (b.sum("sum", &[&exps], "%exps_el", ""), exps, Vec::new(), "%out_el".into(), String::new())
    };
    let operands: Vec<_> = operands.into_iter().chain([&sum, &targets]).collect();
    let gradient = b.map(
        "gradient",
        &operands,
        &into,
        "%v",
        &format!(
            "{text}\
         %factor = arith.divf %scale, %sum_el : f32\n\
         %p = arith.mulf {e}, %factor : f32\n\
         %column = linalg.index 1 : index\n\
         %column_int = arith.index_cast %column : index to i32\n\
         %hit = arith.cmpi eq, %column_int, %targets_el : i32\n\
         %one_hot = arith.select %hit, %scale, %zero : f32\n\
         %v = arith.subf %p, %one_hot : f32\n"
        ),
    );
    let mut region = math::Region::new("l");
    let log = math::log(&mut region, "%sum_el");
    let log_sum = region.add(&log, "%peak_el");
    let loss = region.sub(&log_sum, "%out_el");
    let loss = b.map("surprise", &[&sum, &peak], &picked, &loss, &region.finish());
    b.store("logits", &gradient);
    b.store("row_loss", &loss);
}

/// `%loss_new`: the rows' losses summed in f64, ascending.
fn total(rows: u64, row_loss: &str) -> String {
    let per_row = tensor(&[rows], "f32");
    format!(
        "%total_zero = arith.constant 0.0 : f64\n\
         %total = scf.for %at = %target_first to %target_end step %target_step iter_args(%so_far = %total_zero) -> (f64) {{\n\
         %row_el = tensor.extract {row_loss}[%at] : {per_row}\n\
         %row_wide = arith.extf %row_el : f32 to f64\n\
         %next = arith.addf %so_far, %row_wide : f64\n\
         scf.yield %next : f64\n}}\n\
         %loss_new = tensor.insert %total into %loss[%target_first] : tensor<1xf64>\n"
    )
}
