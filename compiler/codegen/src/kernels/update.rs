//! The optimizer update, as elementwise text: the one place with the formulas.
//!
//! The unfused [`KernelOp::Update`] and every fused weight gradient use [`update_body`], so both run the same operations in
//! the same order: equal bits follow, since nothing may be contracted or reassociated across them.

use super::sink::{self, HYPER};
use super::text::{Func, identity_map, parallel, tensor};
use super::{KernelSource, strategy};
use model::kernel::{CorrectionKind, Dtype, Kernel, KernelOp, OptimizerKind, UpdateRule};
use model::target::CpuClass;

/// The update of one element as region text. Reads `%g_el` (the whole gradient), `%w_el`, the states `%m_el` … and the
/// hyper-parameters `%h0` …; defines `%w_new`, `%m_new` …. Formulas and indices: [`artifact::optimizer`].
pub fn update_body(rule: UpdateRule) -> String {
    let mut step = match rule.kind {
        OptimizerKind::AdamW | OptimizerKind::Mars => [AVERAGE, SQUARE, ROOT, ADAMW].concat(),
        OptimizerKind::Sgd => SGD.into(),
        OptimizerKind::Lion => lion(),
        OptimizerKind::Signum => AVERAGE.to_owned() + &sign("m_new"),
        OptimizerKind::NAdam => [AVERAGE, SQUARE, ROOT, NADAM].concat(),
        OptimizerKind::Adan => [AVERAGE, ADAN_MOMENTS, ROOT, ADAN].concat(),
        OptimizerKind::Muon | OptimizerKind::NorMuon | OptimizerKind::Soap { .. } => ALONG.into(),
    };
    match rule.correction {
        Some(CorrectionKind::ErrorFeedback) => step = step.replace("%w_step", "%last_new") + FEEDBACK,
        Some(CorrectionKind::Nesterov) => step = step.replace("%w_step", "%own_step") + AHEAD,
        // These change what is written beside, or the gradient before.
        Some(CorrectionKind::Discrepancy | CorrectionKind::Prediction | CorrectionKind::DelayCompensation) | None => {}
    }
    step += match rule.kind {
        OptimizerKind::Adan => KEPT_AFTER,
        _ => KEPT,
    };
    if rule.reads_behind() {
        step += BEHIND;
    }
    if rule.predicts() {
        step += PREDICTED;
    }
    step
}

/// m, a running average of the gradient.
pub const AVERAGE: &str = "\
%m_kept = arith.mulf %m_el, %h0 : f32
%m_part = arith.mulf %g_el, %h1 : f32
%m_new = arith.addf %m_kept, %m_part : f32
";
/// v, a running average of its square.
pub const SQUARE: &str = "\
%v_kept = arith.mulf %v_el, %h2 : f32
%g_squared = arith.mulf %g_el, %g_el : f32
%v_part = arith.mulf %g_squared, %h3 : f32
%v_new = arith.addf %v_kept, %v_part : f32
";
/// What a step is divided by.
pub const ROOT: &str = "\
%v_hat = arith.mulf %v_new, %h4 : f32
%v_root = math.sqrt %v_hat : f32
%v_safe = arith.addf %v_root, %h5 : f32
";
/// What is along a direction that was prepared.
const ALONG: &str = "%w_step = arith.mulf %g_el, %h6 : f32\n";
const ADAMW: &str = "\
%direction = arith.divf %m_new, %v_safe : f32
%w_step = arith.mulf %direction, %h6 : f32
";
const SGD: &str = "\
%m_kept = arith.mulf %m_el, %h0 : f32
%m_new = arith.addf %m_kept, %g_el : f32
%w_step = arith.mulf %m_new, %h6 : f32
";
const NADAM: &str = "\
%along_m = arith.mulf %m_new, %h6 : f32
%along_g = arith.mulf %g_el, %h8 : f32
%along = arith.addf %along_m, %along_g : f32
%w_step = arith.divf %along, %v_safe : f32
";
const ADAN_MOMENTS: &str = "\
%g_change = arith.addf %before_el, %g_el : f32
%g_diff = arith.mulf %g_change, %h11 : f32
%before_new = arith.negf %g_el : f32
%diff_kept = arith.mulf %diff_el, %h2 : f32
%diff_part = arith.mulf %g_diff, %h3 : f32
%diff_new = arith.addf %diff_kept, %diff_part : f32
%g_carried = arith.mulf %g_diff, %h2 : f32
%g_ahead = arith.addf %g_el, %g_carried : f32
%g_squared = arith.mulf %g_ahead, %g_ahead : f32
%v_kept = arith.mulf %v_el, %h9 : f32
%v_part = arith.mulf %g_squared, %h10 : f32
%v_new = arith.addf %v_kept, %v_part : f32
";
const ADAN: &str = "\
%along_m = arith.mulf %m_new, %h6 : f32
%along_diff = arith.mulf %diff_new, %h8 : f32
%along = arith.addf %along_m, %along_diff : f32
%w_step = arith.divf %along, %v_safe : f32
";
/// The step, corrected by its difference to the one before.
const FEEDBACK: &str = "\
%step_change = arith.subf %last_new, %last_el : f32
%step_more = arith.mulf %step_change, %h12 : f32
%w_step = arith.addf %last_new, %step_more : f32
";
/// The step of weights that look ahead along their last change.
const AHEAD: &str = "\
%ahead_kept = arith.mulf %ahead_el, %h12 : f32
%ahead_part = arith.mulf %own_step, %h13 : f32
%ahead_new = arith.addf %ahead_kept, %ahead_part : f32
%ahead_more = arith.mulf %ahead_new, %h12 : f32
%w_step = arith.addf %ahead_part, %ahead_more : f32
";
/// The running average of the weight's change, and the weight moved back along it.
const BEHIND: &str = "\
%w_change = arith.subf %w_new, %w_el : f32
%delta_kept = arith.mulf %delta_el, %h12 : f32
%delta_part = arith.mulf %w_change, %h13 : f32
%delta_new = arith.addf %delta_kept, %delta_part : f32
%way_back = arith.mulf %delta_new, %h14 : f32
%behind_new = arith.subf %w_new, %way_back : f32
";
/// The weight moved on along its step.
const PREDICTED: &str = "\
%way_on = arith.mulf %w_step, %h14 : f32
%predicted_new = arith.subf %w_new, %way_on : f32
";
/// The step leaves a weight that has decayed.
const KEPT: &str = "\
%w_kept = arith.mulf %w_el, %h7 : f32
%w_new = arith.subf %w_kept, %w_step : f32
";
/// The weight decays after the step.
const KEPT_AFTER: &str = "\
%w_moved = arith.subf %w_el, %w_step : f32
%w_new = arith.mulf %w_moved, %h7 : f32
";

fn lion() -> String {
    let ahead = "\
%ahead_m = arith.mulf %m_el, %h0 : f32
%ahead_g = arith.mulf %g_el, %h1 : f32
%ahead = arith.addf %ahead_m, %ahead_g : f32
";
    let average = "\
%m_kept = arith.mulf %m_el, %h2 : f32
%m_part = arith.mulf %g_el, %h3 : f32
%m_new = arith.addf %m_kept, %m_part : f32
";
    [ahead, &sign("ahead"), average].concat()
}

/// `%w_step`, the rate times the sign of `%value`: 1, -1, or the value itself where it is a zero or NaN.
fn sign(value: &str) -> String {
    format!(
        "\
%sign_zero = arith.constant 0.0 : f32
%sign_one = arith.constant 1.0 : f32
%sign_minus = arith.constant -1.0 : f32
%is_over = arith.cmpf ogt, %{value}, %sign_zero : f32
%is_under = arith.cmpf olt, %{value}, %sign_zero : f32
%sign_low = arith.select %is_under, %sign_minus, %{value} : f32
%sign = arith.select %is_over, %sign_one, %sign_low : f32
%w_step = arith.mulf %sign, %h6 : f32
"
    )
}

/// `KernelOp::Update`: g, w (or w, next) (, predicted), states… (, copy), hyper.
pub fn source(kernel: &Kernel, cpu: CpuClass) -> KernelSource {
    let copied = kernel.dtype == Dtype::Bf16;
    let KernelOp::Update { len, rule } = kernel.op else { unreachable!("dispatched on the operation") };
    let shape = [len];
    let t = tensor(&shape, "f32");
    let mut func = Func::new(&kernel.name);
    let mut inputs = vec!["g"];
    let (read, updated) = sink::updated(rule, copied);
    inputs.extend(read);
    inputs.iter().for_each(|name| _ = func.input(name, &shape, "f32"));
    for name in &updated {
        func.output(name, &shape, "f32");
    }
    func.buffer(HYPER, &[artifact::program::HYPER_LEN as u64], "f32");
    sink::load_hyper(&mut func, &update_body(rule));
    func.push(&elementwise(rule, &inputs, &updated, &t));
    for (i, name) in updated.iter().enumerate() {
        func.result(name, &format!("%updated#{i}"));
    }
    KernelSource { linalg: func.finish(), strategy: strategy::elementwise_1d(len, cpu) }
}

fn elementwise(rule: UpdateRule, inputs: &[&str], updated: &[&str], t: &str) -> String {
    let n = updated.len();
    let join =
        |names: &[&str], form: &dyn Fn(&str) -> String| names.iter().map(|u| form(u)).collect::<Vec<_>>().join(", ");
    let list = |form: &dyn Fn(&str) -> String| join(updated, form);
    format!(
        "%updated:{n} = linalg.generic {{indexing_maps = [{maps}], iterator_types = {iterators}}} ins({ins} : {in_types}) outs({outs} : {types}) {{\n\
         ^bb0({in_args}, {args}):\n{body}linalg.yield {yields} : {elements}\n}} -> ({types})\n",
        maps = vec![identity_map(1); n + inputs.len()].join(", "),
        ins = join(inputs, &|u| format!("%{u}")),
        in_types = join(inputs, &|_| t.to_string()),
        in_args = join(inputs, &|u| format!("%{u}_el: f32")),
        iterators = parallel(1),
        outs = list(&|u| format!("%{u}")),
        types = list(&|_| t.to_string()),
        args = list(&|u| format!("%{u}_el: f32")),
        body = update_body(rule),
        yields = list(&sink::new_value),
        elements = list(&|_| "f32".into()),
    )
}
