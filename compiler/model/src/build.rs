//! From a specification and its instruction streams to stage programs: kernels, calls and memory.

use crate::arena::one;
use crate::dims::Dims;
use crate::fuse::{Step, with_sink};
use crate::graph::{Part, ValueId};
use crate::kernel::{Dtype, Kernel, KernelOp, Products, Sink, UpdateRule, Writes};
use crate::kernel_plan::plan_kernel_with;
use crate::layout::{RankLayout, StageInput, StageLayout, Table, layout};
use crate::product::product;
use crate::rules::Rules;
use crate::stage::{Home, StagePlan};
use crate::target::Target;
use crate::update::{Arg, TiedTable, UpdatePlan, UpdateStep};
use artifact::ids::{RankId, StageId};
use artifact::program::{Bodies, Call, KernelEntry, Memory, Param, Place, Selector, Stage, variant};
use artifact::stream::{Accumulation, Op, Program, RingSizes};
use dsl::spec::{Layer, Recompute};
use std::collections::HashMap;

/// What is built from. `dims` come from [`crate::dims::check_sizes`], `partition` come from
/// [`crate::partition::partition`] and have the program's stages.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a> {
    pub dims: Dims,
    pub partition: &'a [Vec<Layer>],
    /// Updates run inside the last weight gradients where their rules allow it.
    pub fuse: bool,
    pub rules: &'a Rules,
    pub recompute: Recompute,
    pub products: Products,
    pub program: &'a Program,
    pub target: Target,
}

/// Everything that code generation, the bundle and the report need.
#[derive(Clone, Debug, PartialEq)]
pub struct Build {
    /// No two are equal; in the order of first use.
    pub kernels: Vec<Kernel>,
    /// By stage.
    pub stages: Vec<Stage>,
    /// By rank.
    pub memory: Vec<Memory>,
    /// By kernel.
    pub entries: Vec<KernelEntry>,
}

/// Builds all stages.
pub fn build(input: &Input) -> Build {
    let usages: Vec<Usage> = usages(input.program, input.partition.len());
    let mut plans: Vec<StagePlan> = input.partition.iter().zip(&usages).map(|(l, u)| plan_stage(input, l, u)).collect();
    let tables: Vec<Option<Table>> = (0..plans.len()).map(|s| table(input, &plans, s)).collect();
    lend_copies(&mut plans, &tables);
    let rules: Vec<Rules> = (0..plans.len()).map(|s| input.rules.on_stage(s)).collect();
    let plan_update = |(s, ((p, rings), rules)): (usize, ((&StagePlan, &RingSizes), &Rules))| {
        let writes = if rings.weights > 1 { Writes::Next } else { Writes::InPlace };
        let updated = !matches!(tables[s], Some(Table::Borrowed(_)));
        let table = p.forward_graph.table.map(|id| TiedTable { param: id.index(), updated });
        UpdatePlan::new(&p.forward_graph.params, rules, input.fuse, writes, s == 0, table)
    };
    let updates: Vec<UpdatePlan> =
        plans.iter().zip(&input.program.rings).zip(&rules).enumerate().map(plan_update).collect();
    let ranks = input.program.streams.len();
    let mut kernels =
        Kernels { target: input.target, products: input.products, list: Vec::new(), index: HashMap::new() };
    let mut stages: Vec<Option<Stage>> = vec![None; plans.len()];
    let mut memory = Vec::with_capacity(ranks);
    for rank in 0..ranks {
        let rank = RankId(rank as u32);
        let ids: Vec<usize> = (0..plans.len()).filter(|&s| input.program.rank_of_stage[s] == rank).collect();
        let of = |&s: &usize| {
            let stage = stage_input(input, &ids, s, (&plans[s], &updates[s], &rules[s]), &usages[s]);
            StageInput { table: tables[s], ..stage }
        };
        let inputs: Vec<StageInput> = ids.iter().map(of).collect();
        let rank_layout = layout(&inputs);
        let mut scratch_bytes = 0;
        for (&s, stage_layout) in ids.iter().zip(&rank_layout.stages) {
            let mut lower = Lower {
                input,
                stage: s,
                plan: &plans[s],
                update: &updates[s],
                rules: &rules[s],
                layout: stage_layout,
                rank: &rank_layout,
                kernels: &mut kernels,
                scratch_bytes,
            };
            let bodies = lower.bodies(&usages[s]);
            scratch_bytes = lower.scratch_bytes;
            stages[s] = Some(Stage {
                stage: StageId(s as u32),
                rank,
                rings: input.program.rings[s],
                params: stage_layout.own_params(),
                io: stage_layout.io.clone(),
                bodies,
            });
        }
        memory.push(rank_layout.memory(scratch_bytes));
    }
    let stages = stages.into_iter().map(|s| s.expect("every stage is on a rank")).collect();
    Build {
        entries: kernels.list.iter().map(|kernel| entry(kernel, input.target)).collect(),
        kernels: kernels.list,
        stages,
        memory,
    }
}

/// A kernel in the manifest; code generation adds what it launches.
fn entry(kernel: &Kernel, target: Target) -> KernelEntry {
    let operands = kernel.operands();
    let on_device = !matches!(target, Target::Cpu(_));
    KernelEntry {
        name: kernel.name.clone(),
        scratch_bytes: kernel.scratch_bytes,
        args: (operands.len() + usize::from(kernel.scratch_bytes > 0)) as u32,
        launches: Vec::new(),
        product: on_device.then(|| product(kernel)).flatten(),
        elements: operands.iter().filter(|_| on_device).map(|operand| operand.elem).collect(),
        tensor_cores: on_device && kernel.on_tensor_cores(),
    }
}

fn plan_stage(input: &Input, layers: &[Layer], usage: &Usage) -> StagePlan {
    let tokens = u64::from(input.program.accumulate) * u64::from(input.dims.rows());
    let loss_scale = (1.0 / tokens as f64) as f32;
    StagePlan::new(&input.dims, layers, loss_scale, usage.split, input.recompute)
        .expect("checked sizes give a well-shaped graph with a kernel for every node")
}

/// `ids` are the stages of the rank.
fn stage_input<'a>(
    input: &Input,
    ids: &[usize],
    s: usize,
    (plan, update, rules): (&'a StagePlan, &'a UpdatePlan, &'a Rules),
    usage: &Usage,
) -> StageInput<'a> {
    let whole = Accumulation { first: true, last: true };
    StageInput {
        plan,
        rings: input.program.rings[s],
        rules,
        update,
        sums: usage.backward.iter().chain(&usage.weight).any(|&a| a != whole),
        before: ids.iter().position(|&other| other + 1 == s),
        after: ids.iter().position(|&other| other == s + 1),
        table: None,
    }
}

/// Where the ends of the tied table are, of a stage that has one.
fn table(input: &Input, plans: &[StagePlan], s: usize) -> Option<Table> {
    plans[s].forward_graph.table?;
    let [embed, head] = [Layer::Embed, Layer::Head].map(|end| input.partition[s].contains(&end));
    if embed && head {
        return Some(Table::Whole);
    }
    let (Some(ends), None) = (input.program.tied_ends(), input.program.partner(s)) else { return Some(Table::Apart) };
    let home = |s: usize| input.program.rank_of_stage[s];
    let index = |of: usize| (0..of).filter(|other| home(*other) == home(of)).count();
    Some(if embed { Table::Lent(index(ends[1])) } else { Table::Borrowed(index(ends[0])) })
}

/// What a borrower's products read as a copy has one where it is owned.
fn lend_copies(plans: &mut [StagePlan], tables: &[Option<Table>]) {
    let copied =
        |plan: &StagePlan| plan.forward_graph.table.is_some_and(|id| plan.forward_graph.params[id.index()].copied);
    let wanted =
        plans.iter().zip(tables).any(|(plan, table)| matches!(table, Some(Table::Borrowed(_))) && copied(plan));
    for (plan, table) in plans.iter_mut().zip(tables) {
        if let (true, Some(Table::Lent(_)), Some(id)) = (wanted, table, plan.forward_graph.table) {
            plan.forward_graph.params[id.index()].copied = true;
        }
    }
}

/// Which bodies the streams run on a stage.
#[derive(Clone, Debug, Default)]
struct Usage {
    /// Forms of B, ascending.
    backward: Vec<Accumulation>,
    /// Forms of W, ascending.
    weight: Vec<Accumulation>,
    /// Whether I occurs.
    split: bool,
}

fn usages(program: &Program, stages: usize) -> Vec<Usage> {
    let mut usages = vec![Usage::default(); stages];
    for instr in program.streams.iter().flat_map(|s| s.prologue.iter().chain(&s.period)) {
        let usage = &mut usages[instr.stage.index()];
        match instr.op {
            Op::B(a) => usage.backward.push(a),
            Op::W(a) => usage.weight.push(a),
            Op::I => usage.split = true,
            _ => {}
        }
    }
    for usage in &mut usages {
        for forms in [&mut usage.backward, &mut usage.weight] {
            forms.sort_unstable();
            forms.dedup();
        }
    }
    usages
}

/// Kernels found so far.
struct Kernels {
    target: Target,
    products: Products,
    list: Vec<Kernel>,
    index: HashMap<(KernelOp, Dtype), u32>,
}

impl Kernels {
    fn id(&mut self, op: KernelOp, dtype: Dtype) -> u32 {
        let next = self.list.len() as u32;
        let id = *self.index.entry((op.clone(), dtype)).or_insert(next);
        if id == next {
            self.list.push(plan_kernel_with(op, dtype, self.products, self.target));
        }
        id
    }
}

/// For steps that are no weight gradients.
const WITHOUT: Accumulation = Accumulation { first: true, last: false };

/// Turns steps into calls.
struct Lower<'a> {
    input: &'a Input<'a>,
    stage: usize,
    plan: &'a StagePlan,
    update: &'a UpdatePlan,
    rules: &'a Rules,
    layout: &'a StageLayout,
    rank: &'a RankLayout,
    kernels: &'a mut Kernels,
    /// Largest scratch so far.
    scratch_bytes: u64,
}

impl Lower<'_> {
    fn bodies(&mut self, usage: &Usage) -> Bodies {
        let plan = self.plan;
        let mut bodies = Bodies { f: self.body(&plan.forward, Part::Forward, WITHOUT), ..Bodies::default() };
        for &a in &usage.backward {
            bodies.b[variant(a)] = plan.backward.iter().map(|s| self.step(s, a)).collect();
        }
        if usage.split {
            bodies.i = self.body(&plan.backward, Part::Input, WITHOUT);
        }
        for &a in &usage.weight {
            bodies.w[variant(a)] = self.body(&plan.backward, Part::Weight, a);
        }
        bodies.n = self.updates(&self.update.norm);
        bodies.u = self.updates(&self.update.steps);
        bodies
    }

    fn body(&mut self, steps: &[Step], part: Part, a: Accumulation) -> Vec<Call> {
        steps.iter().filter(|s| s.part == part).map(|s| self.step(s, a)).collect()
    }

    /// The rule of a parameter's updates: where several versions are kept, they leave the newest as it is.
    fn rule(&self, param: &Param) -> UpdateRule {
        let writes = self.update.writes(param.copy.is_some());
        UpdateRule { writes, ..self.rules.of(&param.name, &param.shape).rule }
    }

    fn versions(&self) -> u32 {
        self.input.program.rings[self.stage].weights
    }

    /// The weights as operands of an update.
    fn updated(&self, param: &Param) -> Vec<Place> {
        match self.rule(param).writes {
            Writes::InPlace if self.rule(param).predicts() => {
                vec![param.weight, param.weight.selected(Selector::Ahead)]
            }
            Writes::InPlace => vec![param.weight],
            Writes::Next => vec![param.weight.selected(Selector::Newest), param.weight.selected(Selector::Next)],
        }
    }

    /// The copy as an operand of an update, for parameters that have one.
    fn copy(&self, param: &Param) -> Option<Place> {
        let next = self.versions() > 1;
        param.copy.map(|copy| if next { copy.selected(Selector::Next) } else { copy })
    }

    /// Where a parameter's gradient goes at this place in the update.
    fn sink(&self, param: usize, a: Accumulation) -> Sink {
        let rule = self.rule(&self.layout.params[param]);
        match a {
            Accumulation { first, last: true } if self.update.unfused[param].is_none() => {
                Sink::Update { rule, accumulated: !first }
            }
            Accumulation { first, .. } if rule.compensates() => Sink::Compensated { add: !first },
            Accumulation { first: true, .. } => Sink::Store,
            Accumulation { .. } => Sink::Add,
        }
    }

    /// `a` matters to weight gradients only.
    fn step(&mut self, step: &Step, a: Accumulation) -> Call {
        let product = matches!(step.op, KernelOp::MatMul(_));
        let mut args: Vec<Place> = step.operands().map(|v| self.operand(step.part, v, product)).collect();
        let dtype = self.input.dims.dtype;
        if step.part == Part::Weight {
            let param = self.plan.derivative.gradients[&step.outputs[0]].index();
            let sink = self.sink(param, a);
            let other_end = self.plan.derivative.head_gradient == Some(step.outputs[0]);
            self.sink_operands(param, sink, other_end, &mut args);
            return self.call(with_sink(&step.op, sink), dtype, args);
        }
        self.call(step.op.clone(), dtype, args)
    }

    /// Where a value is; of a weight what a pass of this part reads: the version of its micro-batch, a prediction, or the copy of a correction.
    /// Products read the bf16 copy where there is one.
    fn operand(&self, part: Part, value: ValueId, product: bool) -> Place {
        let mut place = self.layout.place(self.plan, value);
        if let Home::Param(id) = self.plan.homes[&value] {
            place = self.layout.params[id.index()].copy.filter(|_| product).unwrap_or(place);
        }
        match self.plan.homes[&value] {
            Home::Param(id) if part != Part::Forward && self.rule(&self.layout.params[id.index()]).reads_behind() => {
                *self.layout.params[id.index()].state.last().expect("the rule has states")
            }
            Home::Param(id) if part == Part::Forward && self.rule(&self.layout.params[id.index()]).predicts() => {
                place.selected(Selector::Ahead)
            }
            Home::Param(_) if self.versions() > 1 => place.selected(Selector::Seen),
            _ => place,
        }
    }

    /// `other_end`: the gradient is that of a tied table's head; beside the embedding it has an accumulator of its own.
    fn sink_operands(&self, param: usize, sink: Sink, other_end: bool, args: &mut Vec<Place>) {
        let param = &self.layout.params[param];
        let beside = other_end && self.plan.forward_graph.input.is_none();
        let accumulator = || {
            param
                .other_end
                .filter(|_| beside)
                .or(param.gradient)
                .expect("a gradient that is not used up at once has an accumulator")
        };
        match sink {
            Sink::Store | Sink::Add => args.push(accumulator()),
            Sink::Compensated { .. } => {
                args.push(self.layout.hyper(param));
                args.extend([Selector::Newest, Selector::Seen].map(|by| param.weight.selected(by)));
                args.push(accumulator());
            }
            Sink::Update { rule, accumulated } => {
                args.extend(accumulated.then(accumulator));
                args.push(self.layout.hyper(param));
                let mut weights = self.updated(param);
                if rule.compensates() {
                    weights.insert(1, param.weight.selected(Selector::Seen));
                }
                args.extend(weights);
                args.extend(&param.state);
                args.extend(self.copy(param));
            }
        }
    }

    /// Steps of unfused updates.
    fn updates(&mut self, steps: &[UpdateStep]) -> Vec<Call> {
        let call = |step: &UpdateStep| {
            let param = &self.layout.params[step.param];
            let args = step.args.iter().flat_map(|arg| self.update_operands(param, arg)).collect();
            self.call(step.op.clone(), step.dtype, args)
        };
        steps.iter().map(call).collect()
    }

    fn update_operands(&self, param: &Param, arg: &Arg) -> Vec<Place> {
        match *arg {
            Arg::Weight => self.updated(param),
            Arg::Gradient => vec![param.gradient.expect("an unfused update has accumulators")],
            Arg::OtherEnd => vec![param.other_end.expect("a tied table that is updated here has another end")],
            Arg::State(i) => vec![param.state[i]],
            Arg::Copy => self.copy(param).into_iter().collect(),
            Arg::Hyper => vec![self.layout.hyper(param)],
            Arg::Norm => vec![self.layout.io.norm.expect("a global norm has a sum on each stage")],
            Arg::Total => vec![self.layout.io.total.expect("a global norm has a total on each stage")],
            Arg::Temporary(i) => vec![self.layout.update_temporaries[i]],
        }
    }

    fn call(&mut self, op: KernelOp, dtype: Dtype, mut args: Vec<Place>) -> Call {
        let kernel = self.kernels.id(op, dtype);
        let bytes = self.kernels.list[kernel as usize].scratch_bytes;
        if bytes > 0 {
            args.push(one(self.rank.scratch_offset, bytes));
        }
        self.scratch_bytes = self.scratch_bytes.max(bytes);
        Call { kernel, args }
    }
}
