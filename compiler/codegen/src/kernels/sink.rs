//! Where a parameter's gradient goes, shared by every kernel that makes one: stored, added, or used up by a fused update.

use super::part;
use super::text::{Func, identity_map, parallel, tensor};
use super::update::update_body;
use model::kernel::{Sink, UpdateRule, Writes};

/// The weights as they are, and as the forward pass read them.
const STALE: [&str; 2] = ["w", "seen"];
/// `%whole_el`: the gradient `%raw_el` at weights `%seen_el`, moved on to those at `%w_el`.
pub const COMPENSATED: &str = "\
%w_way = arith.subf %w_el, %seen_el : f32
%raw_squared = arith.mulf %raw_el, %raw_el : f32
%raw_scaled = arith.mulf %raw_squared, %h12 : f32
%raw_more = arith.mulf %raw_scaled, %w_way : f32
%whole_el = arith.addf %raw_el, %raw_more : f32
";

/// Name of the hyper-parameter operand.
pub const HYPER: &str = "hyper";

/// The sink's operands in a function.
pub struct SinkOperands {
    sink: Sink,
    shape: Vec<u64>,
    /// Tensors that the sink only reads: `acc` and `w`, if any.
    pub inputs: Vec<&'static str>,
    /// Tensors that the sink writes, by operand name, in operand order: `acc`, or `w` (`w_out` where `w` is only read), its prediction, the
    /// states and `copy`.
    pub outputs: Vec<&'static str>,
}

impl SinkOperands {
    /// Declares the sink's operands (in the contract's order, after the kernel's own) for a gradient of `shape`, and loads
    /// the hyper-parameters `%h0` …. Tensors are `%acc`, or `%w`, `%m`, …. `copied`: an update writes a bf16 copy of the weights.
    pub fn declare(func: &mut Func, sink: Sink, shape: &[u64], copied: bool) -> Self {
        let mut inputs = Vec::new();
        let outputs = match sink {
            Sink::Store | Sink::Add => vec!["acc"],
            Sink::Compensated { .. } => {
                func.buffer(HYPER, &[artifact::program::HYPER_LEN as u64], "f32");
                load_hyper(func, COMPENSATED);
                STALE.iter().for_each(|name| _ = func.input(name, shape, "f32"));
                inputs.extend(STALE);
                vec!["acc"]
            }
            Sink::Update { rule, accumulated } => {
                if accumulated {
                    func.input("acc", shape, "f32");
                    inputs.push("acc");
                }
                func.buffer(HYPER, &[artifact::program::HYPER_LEN as u64], "f32");
                load_hyper(func, &body(sink, &[String::new()]));
                let (read, written) = updated(rule, copied);
                read.iter().for_each(|name| _ = func.input(name, shape, "f32"));
                inputs.extend(read);
                written
            }
        };
        for name in &outputs {
            func.output(name, shape, "f32");
        }
        Self { sink, shape: shape.to_vec(), inputs, outputs }
    }

    /// Adds the elementwise `linalg.generic` that takes the gradient tensor `gradient` (already summed) to the sink, and writes the
    /// results (`%sunk`) back.
    pub fn apply(&self, func: &mut Func, gradient: &str) {
        let t = tensor(&self.shape, "f32");
        let rank = self.shape.len();
        let mut ins = vec![gradient.to_string()];
        let mut args = vec!["%part_el: f32".to_string()];
        for name in &self.inputs {
            ins.push(format!("%{name}"));
            args.push(format!("%{name}_el: f32"));
        }
        // An accumulator that is updated in place has the same name as one that is only read.
        args.extend(self.outputs.iter().map(|o| format!("%{o}_el: f32")));
        let n = self.outputs.len();
        let list = |form: &dyn Fn(&str) -> String| self.outputs.iter().map(|o| form(o)).collect::<Vec<_>>().join(", ");
        let maps = vec![identity_map(rank); ins.len() + n].join(", ");
        let in_types = vec![t.clone(); ins.len()].join(", ");
        let out_types = vec![t; n].join(", ");
        func.push("%sink_zero = arith.constant 0.0 : f32");
        func.push(&format!(
            "%sunk:{n} = linalg.generic {{indexing_maps = [{maps}], iterator_types = {iterators}}} ins({ins} : {in_types}) outs({outs} : {out_types}) {{\n\
             ^bb0({args}):\n{body}linalg.yield {yields} : {elements}\n}} -> ({out_types})",
            iterators = parallel(rank),
            ins = ins.join(", "),
            outs = list(&|o| format!("%{o}")),
            args = args.join(", "),
            body = body(self.sink, &["%part_el".into()]),
            yields = list(&new_value),
            elements = vec!["f32"; n].join(", "),
        ));
        for (i, name) in self.outputs.iter().enumerate() {
            func.result(name, &format!("%sunk#{i}"));
        }
    }
}

/// Operands of an update beside the gradient and the hyper-parameters, in order: those that are only read, and those that it writes,
/// the copy too if there is one.
pub fn updated(rule: UpdateRule, copied: bool) -> (Vec<&'static str>, Vec<&'static str>) {
    let (read, weights) = match rule.writes {
        Writes::InPlace => (vec![], "w"),
        Writes::Next if rule.compensates() => (STALE.to_vec(), "w_out"),
        Writes::Next => (vec!["w"], "w_out"),
    };
    let predicted = rule.predicts().then_some("predicted");
    let written = std::iter::once(weights).chain(predicted).chain(rule.states());
    (read, written.chain(copied.then_some("copy")).collect())
}

/// The element that an output gets, as [`body`] names it: the weights are `%w_new`, wherever they go.
pub fn new_value(output: &str) -> String {
    format!("%{}_new", if ["w_out", "copy"].contains(&output) { "w" } else { output })
}

/// The region text of a sink. Reads `parts` (the gradient's new parts, at least one), `%acc_el` where there is an accumulator,
/// `%w_el` …; defines `%acc_new` or `%w_new` …. The parts are added to the accumulator or to zero (`%sink_zero`) one after the other,
/// fused or not: the bits are then the same, the sign of a zero too. A gradient that is compensated is first summed by itself, from zero.
pub fn body(sink: Sink, parts: &[String]) -> String {
    let (start, sum) = match sink {
        Sink::Store | Sink::Compensated { add: false } => ("%sink_zero", "%acc_new"),
        Sink::Add | Sink::Compensated { add: true } => ("%acc_el", "%acc_new"),
        Sink::Update { accumulated: true, .. } => ("%acc_el", "%g_el"),
        Sink::Update { accumulated: false, .. } => ("%sink_zero", "%g_el"),
    };
    let mut text = if compensates(sink) {
        let raw = summed("%sink_zero", parts, "%raw_el");
        raw + COMPENSATED + &summed(start, &["%whole_el".into()], sum)
    } else {
        summed(start, parts, sum)
    };
    if let Sink::Update { rule, .. } = sink {
        text += &update_body(rule);
    }
    text
}

/// Whether gradients are corrected by the weights' way since the forward pass.
pub fn compensates(sink: Sink) -> bool {
    match sink {
        Sink::Compensated { .. } => true,
        Sink::Update { rule, .. } => rule.compensates(),
        Sink::Store | Sink::Add => false,
    }
}

/// Lines that add the parts to `start` in order; the last sum is `sum`.
fn summed(start: &str, parts: &[String], sum: &str) -> String {
    let mut text = String::new();
    let mut so_far = start.to_string();
    for (i, part) in parts.iter().enumerate() {
        let next = if i + 1 == parts.len() { sum.to_string() } else { format!("%sum{i}_el") };
        text += &format!("{next} = arith.addf {so_far}, {part} : f32\n");
        so_far = next;
    }
    text
}

/// Loads the hyper-parameters `%h0` … that the formulas use from the operand [`HYPER`].
pub fn load_hyper(func: &mut Func, formulas: &str) {
    let len = artifact::optimizer::HYPER_LEN;
    let used: Vec<usize> = (0..len).filter(|i| formulas.contains(&format!("%h{i} "))).collect();
    part::load_hyper(func, &used);
}
