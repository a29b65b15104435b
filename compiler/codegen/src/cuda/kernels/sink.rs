//! Where a parameter's gradient goes: stored, added, or used up by a fused update, in the same operations as on the CPU.

use super::part;
use crate::cuda::code::{Buffer, Code, Operands};
use crate::kernels::sink::{COMPENSATED, HYPER, compensates, updated};
use crate::kernels::update::update_body;
use artifact::optimizer::HYPER_LEN;
use model::kernel::{Sink, UpdateRule};

/// The sink's operands.
pub struct SinkBuffers {
    sink: Sink,
    /// The accumulator, where it is read or written.
    acc: Option<Buffer>,
    update: Option<UpdateBuffers>,
    /// Of a gradient that is compensated: the hyper-parameters, the weights, and those that the forward pass read.
    stale: Option<[Buffer; 3]>,
}

/// What an update reads and writes.
pub struct UpdateBuffers {
    rule: UpdateRule,
    hyper: Buffer,
    /// The weights, their prediction, then the states.
    cells: Vec<Cell>,
    copy: Option<Buffer>,
    /// The weights that the forward pass read, where the gradient is compensated.
    seen: Option<Buffer>,
}

/// A value of a parameter's element: its name in the formulas, where it is (nowhere yet, if they don't read it), and where the new one goes.
struct Cell {
    name: &'static str,
    from: Option<Buffer>,
    to: Buffer,
}

/// How an update's operands stand.
struct Order {
    hyper_first: bool,
    /// There is a copy of the weights in bf16, the last of what is written.
    copied: bool,
}

impl UpdateBuffers {
    fn new(operands: &mut Operands, rule: UpdateRule, shape: &[u64], order: Order) -> Self {
        let hyper = |operands: &mut Operands| operands.f32(HYPER, &[HYPER_LEN as u64]);
        let before = order.hyper_first.then(|| hyper(operands));
        let (read, written) = updated(rule, false);
        let [weights, seen] = [0, 1].map(|i| read.get(i).map(|name| operands.f32(name, shape)));
        let cell = |(i, name): (usize, &'static str)| {
            let to = operands.f32(name, shape);
            let from = weights.clone().filter(|_| i == 0).unwrap_or_else(|| to.clone());
            Cell { name: if i == 0 { "w" } else { name }, from: (name != "predicted").then_some(from), to }
        };
        let cells = written.into_iter().enumerate().map(cell).collect();
        let copy = order.copied.then(|| operands.bf16("copy", shape));
        if rule.compensates() {
            operands.share(&["seen", "w_out"]);
        }
        Self { rule, cells, copy, seen, hyper: before.unwrap_or_else(|| hyper(operands)) }
    }

    /// The operands of an update on its own: the hyper-parameters come last.
    pub fn unfused(operands: &mut Operands, rule: UpdateRule, shape: &[u64], copied: bool) -> Self {
        Self::new(operands, rule, shape, Order { hyper_first: false, copied })
    }

    /// Loads the hyper-parameters `%h0` … that the rule uses. Once in a function, before [`UpdateBuffers::apply`].
    pub fn load_hyper(&self, code: &mut Code) {
        load_hyper(code, &self.hyper, &update_body(self.rule));
    }

    /// Updates the elements at `at` and its neighbours with their gradients.
    pub fn apply(&self, code: &mut Code, at: &[&str], gradients: &[String]) {
        let load = |cell: &Cell| Some((cell.name, code.load_group(cell.from.as_ref()?, at, gradients.len())));
        let before: Vec<_> = self.cells.iter().filter_map(load).collect();
        let mut after = vec![Vec::new(); self.cells.len()];
        for (i, gradient) in gradients.iter().enumerate() {
            let cells: Vec<_> = before.iter().map(|(name, values)| (*name, values[i].as_str())).collect();
            let new = self.one(code, gradient, &cells);
            after.iter_mut().zip(new).for_each(|(values, value)| values.push(value));
        }
        for (cell, values) in self.cells.iter().zip(&after) {
            code.store_group(values, &cell.to, at);
        }
        if let (Some(copy), Some(weights)) = (&self.copy, after.first()) {
            code.store_group(weights, copy, at);
        }
    }

    /// The formulas for one element.
    fn one(&self, code: &mut Code, gradient: &str, cells: &[(&str, &str)]) -> Vec<String> {
        let names: Vec<_> = self.cells.iter().map(|c| c.name).collect();
        let given = cells.iter().copied().chain([("g", gradient)]);
        formulas(code, given, &update_body(self.rule), &names)
    }
}

/// Lines that read `%<name>_el` of what is given and define `%<name>_new` of the results, in a region so that their names end with it.
pub fn formulas<'a>(
    code: &mut Code,
    given: impl IntoIterator<Item = (&'a str, &'a str)>,
    body: &str,
    results: &[&str],
) -> Vec<String> {
    let types = vec!["f32"; results.len()].join(", ");
    let result = code.values(results.len(), &format!("scf.execute_region -> ({types}) {{"));
    for (name, value) in given {
        call(code, &format!("{name}_el"), value);
    }
    code.line(body);
    let new: Vec<_> = results.iter().map(|name| format!("%{name}_new")).collect();
    code.line(&format!("scf.yield {} : {types}\n}}", new.join(", ")));
    (0..results.len()).map(|i| format!("{result}#{i}")).collect()
}

/// Gives a value the name by which the formulas know it.
pub fn call(code: &mut Code, name: &str, value: &str) {
    code.line(&format!("%{name} = arith.bitcast {value} : f32 to f32"));
}

/// Loads the hyper-parameters `%h0` … that the formulas use.
fn load_hyper(code: &mut Code, hyper: &Buffer, formulas: &str) {
    let used: Vec<u64> = (0..HYPER_LEN as u64).filter(|i| formulas.contains(&format!("%h{i} "))).collect();
    part::load_hyper(code, hyper, &used);
}

impl SinkBuffers {
    /// Declares the sink's operands for a gradient of `shape`. `copied`: an update writes a copy of the weights in bf16.
    pub fn new(operands: &mut Operands, sink: Sink, shape: &[u64], copied: bool) -> Self {
        let reads = matches!(sink, Sink::Store | Sink::Add | Sink::Update { accumulated: true, .. });
        let acc = reads.then(|| operands.f32("acc", shape));
        if let Sink::Compensated { .. } = sink {
            let hyper = operands.f32(HYPER, &[HYPER_LEN as u64]);
            let [w, seen, acc] = ["w", "seen", "acc"].map(|name| operands.f32(name, shape));
            return Self { sink, acc: Some(acc), update: None, stale: Some([hyper, w, seen]) };
        }
        let update = match sink {
            Sink::Update { rule, .. } => {
                let order = Order { hyper_first: true, copied };
                Some(UpdateBuffers::new(operands, rule, shape, order))
            }
            _ => None,
        };
        let stale = update
            .as_ref()
            .filter(|_| compensates(sink))
            .and_then(|update| Some([update.hyper.clone(), update.cells[0].from.clone()?, update.seen.clone()?]));
        Self { sink, acc, update, stale }
    }

    /// Loads what every element needs. Once in a function.
    pub fn prepare(&self, code: &mut Code) {
        if let Some(update) = &self.update {
            update.load_hyper(code);
        }
        if let Some([hyper, ..]) = &self.stale {
            load_hyper(code, hyper, COMPENSATED);
        }
    }

    /// What the sums of a gradient start from: the accumulator's elements, or zeros. A gradient that is compensated is summed by itself.
    pub fn start(&self, code: &mut Code, at: &[&str], count: usize) -> Vec<String> {
        if self.stale.is_some() { vec![code.constant(0.0); count] } else { self.accumulated(code, at, count) }
    }

    fn accumulated(&self, code: &mut Code, at: &[&str], count: usize) -> Vec<String> {
        match (&self.acc, self.sink) {
            (Some(acc), Sink::Add | Sink::Update { .. } | Sink::Compensated { add: true }) => {
                code.load_group(acc, at, count)
            }
            _ => vec![code.constant(0.0); count],
        }
    }

    /// Takes whole gradients: the parts summed onto [`SinkBuffers::start`].
    pub fn finish(&self, code: &mut Code, at: &[&str], gradients: &[String]) {
        let Some([_, w, seen]) = &self.stale else { return self.end(code, at, gradients) };
        let count = gradients.len();
        let [w, seen] = [w, seen].map(|buffer| code.load_group(buffer, at, count));
        let start = self.accumulated(code, at, count);
        let mut sums = Vec::new();
        for (i, raw) in gradients.iter().enumerate() {
            let given = [("w", w[i].as_str()), ("seen", &seen[i]), ("raw", raw)];
            let body = format!("{COMPENSATED}%g_new = arith.addf %start_el, %whole_el : f32\n");
            let given = given.into_iter().chain([("start", start[i].as_str())]);
            sums.extend(formulas(code, given, &body, &["g"]));
        }
        self.end(code, at, &sums);
    }

    fn end(&self, code: &mut Code, at: &[&str], gradients: &[String]) {
        match (&self.update, &self.acc) {
            (Some(update), _) => update.apply(code, at, gradients),
            (None, Some(acc)) => code.store_group(gradients, acc, at),
            (None, None) => unreachable!("a sink that stores has an accumulator"),
        }
    }

    /// Adds one part to the start and finishes.
    pub fn take(&self, code: &mut Code, at: &[&str], parts: &[String]) {
        let start = self.start(code, at, parts.len());
        let sums: Vec<_> = start.iter().zip(parts).map(|(s, p)| code.add(s, p)).collect();
        self.finish(code, at, &sums);
    }
}
