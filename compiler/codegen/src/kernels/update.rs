//! The optimizer update, as elementwise text: the one place with the formulas.
//!
//! The unfused [`KernelOp::Update`] and every fused weight gradient use [`update_body`], so both run the same operations in
//! the same order: equal bits follow, since nothing may be contracted or reassociated across them.

use super::sink::{self, HYPER};
use super::text::{Func, identity_map, parallel, tensor};
use super::{KernelSource, strategy};
use model::kernel::{Kernel, KernelOp, OptimizerKind};
use model::target::CpuClass;

/// Names of the optimizer's states, in operand order.
pub fn states(optimizer: OptimizerKind) -> &'static [&'static str] {
    match optimizer {
        OptimizerKind::AdamW => &["m", "v"],
        OptimizerKind::Sgd => &["m"],
    }
}

/// The update of one element as region text. Reads `%g_el` (the whole gradient), `%w_el`, `%m_el` (, `%v_el`) and the hyper-parameters
/// `%h0` .. `%h7` (see `artifact::program::HYPER_LEN`); defines `%w_new`, `%m_new` (, `%v_new`).
pub fn update_body(optimizer: OptimizerKind) -> &'static str {
    match optimizer {
        OptimizerKind::AdamW => {
            "\
%m_kept = arith.mulf %m_el, %h0 : f32
%m_part = arith.mulf %g_el, %h1 : f32
%m_new = arith.addf %m_kept, %m_part : f32
%v_kept = arith.mulf %v_el, %h2 : f32
%g_squared = arith.mulf %g_el, %g_el : f32
%v_part = arith.mulf %g_squared, %h3 : f32
%v_new = arith.addf %v_kept, %v_part : f32
%v_hat = arith.mulf %v_new, %h4 : f32
%v_root = math.sqrt %v_hat : f32
%v_safe = arith.addf %v_root, %h5 : f32
%direction = arith.divf %m_new, %v_safe : f32
%w_step = arith.mulf %direction, %h6 : f32
%w_kept = arith.mulf %w_el, %h7 : f32
%w_new = arith.subf %w_kept, %w_step : f32
"
        }
        OptimizerKind::Sgd => {
            "\
%m_kept = arith.mulf %m_el, %h0 : f32
%m_new = arith.addf %m_kept, %g_el : f32
%w_step = arith.mulf %m_new, %h6 : f32
%w_kept = arith.mulf %w_el, %h7 : f32
%w_new = arith.subf %w_kept, %w_step : f32
"
        }
    }
}

/// `KernelOp::Update`: g, w, states…, hyper.
pub fn source(kernel: &Kernel, cpu: CpuClass) -> KernelSource {
    let KernelOp::Update { len, optimizer } = kernel.op else { unreachable!("dispatched on the operation") };
    let shape = [len];
    let t = tensor(&shape, "f32");
    let mut func = Func::new(&kernel.name);
    let gradient = func.input("g", &shape, "f32");
    let mut updated = vec!["w"];
    updated.extend(states(optimizer));
    for name in &updated {
        func.output(name, &shape, "f32");
    }
    func.buffer(HYPER, &[artifact::program::HYPER_LEN as u64], "f32");
    sink::load_hyper(&mut func);
    func.push(&elementwise(optimizer, &gradient, &updated, &t));
    for (i, name) in updated.iter().enumerate() {
        func.result(name, &format!("%updated#{i}"));
    }
    KernelSource { linalg: func.finish(), strategy: strategy::elementwise_1d(len, cpu) }
}

fn elementwise(optimizer: OptimizerKind, gradient: &str, updated: &[&str], t: &str) -> String {
    let n = updated.len();
    let list = |form: &dyn Fn(&str) -> String| updated.iter().map(|u| form(u)).collect::<Vec<_>>().join(", ");
    format!(
        "%updated:{n} = linalg.generic {{indexing_maps = [{maps}], iterator_types = {iterators}}} ins({gradient} : {t}) outs({outs} : {types}) {{\n\
         ^bb0(%g_el: f32, {args}):\n{body}linalg.yield {yields} : {elements}\n}} -> ({types})\n",
        maps = vec![identity_map(1); n + 1].join(", "),
        iterators = parallel(1),
        outs = list(&|u| format!("%{u}")),
        types = list(&|_| t.to_string()),
        args = list(&|u| format!("%{u}_el: f32")),
        body = update_body(optimizer),
        yields = list(&|u| format!("%{u}_new")),
        elements = list(&|_| "f32".into()),
    )
}
