//! Gradients of biases and LayerNorm gains: column sums over the rows, ascending, from zero.

use super::sink::SinkOperands;
use super::text::{Func, tensor};
use super::{KernelSource, strategy};
use model::kernel::{Kernel, KernelOp, Sink};
use model::target::CpuClass;

/// Vectors of columns that are summed at once: enough additions in flight to hide their latency.
const VECTORS: u64 = 8;

pub fn source(kernel: &Kernel, cpu: CpuClass) -> KernelSource {
    match kernel.op {
        KernelOp::BiasGrad { rows, width, sink } => {
            column_sums(&kernel.name, rows.into(), width.into(), sink, false, cpu)
        }
        KernelOp::GainGrad { rows, width, sink } => {
            column_sums(&kernel.name, rows.into(), width.into(), sink, true, cpu)
        }
        _ => unreachable!("dispatched on the operation"),
    }
}

/// Sums dy [rows, width], or dy * (x - mean) * rstd when `normalised`, over the rows.
pub fn column_sums(name: &str, rows: u64, width: u64, sink: Sink, normalised: bool, cpu: CpuClass) -> KernelSource {
    let mut func = Func::new(name);
    let mut inputs = vec![(func.input("dy", &[rows, width], "f32"), true)];
    if normalised {
        inputs.push((func.input("x", &[rows, width], "f32"), true));
        inputs.push((func.input("mean", &[rows], "f32"), false));
        inputs.push((func.input("rstd", &[rows], "f32"), false));
    }
    let operands = SinkOperands::declare(&mut func, sink, &[width], false);
    func.push(&sums(rows, width, &inputs));
    operands.apply(&mut func, "%gradient");
    KernelSource { linalg: func.finish(), strategy: column_strategy(rows, width, cpu) }
}

/// The linalg of `%gradient`; an input is [rows, width] or [rows].
fn sums(rows: u64, width: u64, inputs: &[(String, bool)]) -> String {
    let (whole, column) = (tensor(&[rows, width], "f32"), tensor(&[width], "f32"));
    let per_row = tensor(&[rows], "f32");
    let type_of = |wide: bool| if wide { whole.clone() } else { per_row.clone() };
    let map_of = |wide: bool| format!("affine_map<(i, j) -> ({})>", if wide { "i, j" } else { "i" });
    let maps: Vec<_> = inputs.iter().map(|i| map_of(i.1)).collect();
    let names: Vec<_> = inputs.iter().map(|i| i.0.clone()).collect();
    let types: Vec<_> = inputs.iter().map(|i| type_of(i.1)).collect();
    let body = if inputs.len() == 1 {
        "^bb0(%dy_el: f32, %sum: f32):\n\
         %sum_next = arith.addf %sum, %dy_el : f32\n"
    } else {
        "^bb0(%dy_el: f32, %x_el: f32, %mean_el: f32, %rstd_el: f32, %sum: f32):\n\
         %centred = arith.subf %x_el, %mean_el : f32\n\
         %normal = arith.mulf %centred, %rstd_el : f32\n\
         %term = arith.mulf %dy_el, %normal : f32\n\
         %sum_next = arith.addf %sum, %term : f32\n"
    };
    format!(
        "%zero = arith.constant 0.0 : f32\n\
         %empty = tensor.empty() : {column}\n\
         %zeros = linalg.fill ins(%zero : f32) outs(%empty : {column}) -> {column}\n\
         %gradient = linalg.generic {{indexing_maps = [{maps}, affine_map<(i, j) -> (j)>], \
         iterator_types = [\"reduction\", \"parallel\"]}} ins({names} : {types}) outs(%zeros : {column}) {{\n\
         {body}linalg.yield %sum_next : f32\n}} -> {column}\n",
        maps = maps.join(", "),
        names = names.join(", "),
        types = types.join(", "),
    )
}

/// Blocks of [`VECTORS`] vectors of columns, each summed over all rows in registers; what is left is one smaller block. The sums
/// go through a row of scratch to the sink, vector by vector.
fn column_strategy(rows: u64, width: u64, cpu: CpuClass) -> String {
    let lanes = u64::from(cpu.lanes());
    let mut text = String::from(
        "transform.named_sequence @__transform_main(%m: !transform.any_op) {\n  \
         %f = transform.structured.match ops{[\"func.func\"]} in %m : (!transform.any_op) -> !transform.any_op\n  \
         %fill = transform.structured.match ops{[\"linalg.fill\"]} in %f : (!transform.any_op) -> !transform.any_op\n  \
         %generics = transform.structured.match ops{[\"linalg.generic\"]} in %f : (!transform.any_op) -> !transform.any_op\n  \
         %sums, %sink = transform.split_handle %generics : (!transform.any_op) -> (!transform.any_op, !transform.any_op)\n",
    );
    text += &strategy::blocks("%fill", 0, width, lanes, 1);
    text += &strategy::blocks("%sums", 1, width, VECTORS * lanes, 2);
    text += &strategy::blocks("%sink", 0, width, lanes, 1);
    if rows > 1 {
        text += strategy::CLEAN;
        text += "  %reductions = transform.structured.match ops{[\"linalg.generic\"]} attributes {iterator_types = \
                 [#linalg.iterator_type<reduction>, #linalg.iterator_type<parallel>]} in %f : (!transform.any_op) -> !transform.any_op\n  \
                 transform.foreach %reductions : !transform.any_op {\n  ^bb0(%one: !transform.any_op):\n    \
                 %row, %over = transform.structured.tile_using_for %one tile_sizes [1, 0] : (!transform.any_op) -> (!transform.any_op, !transform.any_op)\n  }\n";
    }
    text += strategy::CLEAN;
    text += strategy::VECTORISE_ALL;
    text += "  transform.yield\n}\n";
    text + strategy::lower()
}
