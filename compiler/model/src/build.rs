//! From a specification and its instruction streams to stage programs: kernels, calls and memory.

use crate::arena::one;
use crate::dims::Dims;
use crate::fuse::{Step, with_sink};
use crate::graph::{Part, ValueId};
use crate::kernel::{Kernel, KernelOp, Sink, UpdateRule, Writes};
use crate::kernel_plan::plan_kernel;
use crate::layout::{RankLayout, StageInput, StageLayout, layout};
use crate::operands::operands;
use crate::stage::{Home, StagePlan};
use crate::target::CpuClass;
use artifact::ids::{RankId, StageId};
use artifact::program::{Bodies, Call, KernelEntry, Memory, Param, Place, Selector, Stage, variant};
use artifact::stream::{Accumulation, Op, Program};
use dsl::spec::Layer;
use std::collections::HashMap;

/// What is built from. `dims` come from [`crate::dims::check_sizes`], `partition` come from
/// [`crate::partition::partition`] and have the program's stages.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a> {
    pub dims: Dims,
    pub partition: &'a [Vec<Layer>],
    /// The update runs inside the last weight gradients.
    pub fuse: bool,
    pub rule: UpdateRule,
    pub program: &'a Program,
    pub cpu: CpuClass,
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
    let plans: Vec<StagePlan> = input.partition.iter().zip(&usages).map(|(l, u)| plan_stage(input, l, u)).collect();
    let ranks = input.program.streams.len();
    let mut kernels = Kernels { cpu: input.cpu, list: Vec::new(), index: HashMap::new() };
    let mut stages: Vec<Option<Stage>> = vec![None; plans.len()];
    let mut memory = Vec::with_capacity(ranks);
    for rank in 0..ranks {
        let rank = RankId(rank as u32);
        let ids: Vec<usize> = (0..plans.len()).filter(|&s| input.program.rank_of_stage[s] == rank).collect();
        let inputs: Vec<StageInput> = ids.iter().map(|&s| stage_input(input, &ids, s, &plans[s], &usages[s])).collect();
        let rank_layout = layout(&inputs);
        let mut scratch_bytes = 0;
        for (&s, stage_layout) in ids.iter().zip(&rank_layout.stages) {
            let mut lower = Lower {
                input,
                stage: s,
                plan: &plans[s],
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
                params: stage_layout.params.clone(),
                io: stage_layout.io.clone(),
                bodies,
            });
        }
        memory.push(rank_layout.memory(scratch_bytes));
    }
    let stages = stages.into_iter().map(|s| s.expect("every stage is on a rank")).collect();
    Build { entries: kernels.list.iter().map(entry).collect(), kernels: kernels.list, stages, memory }
}

fn entry(kernel: &Kernel) -> KernelEntry {
    let args = operands(&kernel.op).len() + usize::from(kernel.scratch_bytes > 0);
    KernelEntry { name: kernel.name.clone(), scratch_bytes: kernel.scratch_bytes, args: args as u32 }
}

fn plan_stage(input: &Input, layers: &[Layer], usage: &Usage) -> StagePlan {
    let tokens = u64::from(input.program.accumulate) * u64::from(input.dims.rows());
    let loss_scale = (1.0 / tokens as f64) as f32;
    StagePlan::new(&input.dims, layers, loss_scale, usage.split)
        .expect("checked sizes give a well-shaped graph with a kernel for every node")
}

/// `ids` are the stages of the rank.
fn stage_input<'a>(input: &Input, ids: &[usize], s: usize, plan: &'a StagePlan, usage: &Usage) -> StageInput<'a> {
    let whole = Accumulation { first: true, last: true };
    StageInput {
        plan,
        rings: input.program.rings[s],
        states: input.rule.states().len(),
        accumulators: !input.fuse || usage.backward.iter().chain(&usage.weight).any(|&a| a != whole),
        before: ids.iter().position(|&other| other + 1 == s),
        after: ids.iter().position(|&other| other == s + 1),
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
    cpu: CpuClass,
    list: Vec<Kernel>,
    index: HashMap<KernelOp, u32>,
}

impl Kernels {
    fn id(&mut self, op: KernelOp) -> u32 {
        if let Some(&id) = self.index.get(&op) {
            return id;
        }
        let id = self.list.len() as u32;
        self.index.insert(op.clone(), id);
        self.list.push(plan_kernel(op, self.cpu));
        id
    }
}

/// Turns steps into calls.
struct Lower<'a> {
    input: &'a Input<'a>,
    stage: usize,
    plan: &'a StagePlan,
    layout: &'a StageLayout,
    rank: &'a RankLayout,
    kernels: &'a mut Kernels,
    /// Largest scratch so far.
    scratch_bytes: u64,
}

impl Lower<'_> {
    fn bodies(&mut self, usage: &Usage) -> Bodies {
        let plan = self.plan;
        let mut bodies = Bodies { f: self.body(&plan.forward, Part::Forward, None), ..Bodies::default() };
        for &a in &usage.backward {
            let sink = self.sink(a);
            bodies.b[variant(a)] = plan.backward.iter().map(|s| self.step(s, sink)).collect();
        }
        if usage.split {
            bodies.i = self.body(&plan.backward, Part::Input, None);
        }
        for &a in &usage.weight {
            bodies.w[variant(a)] = self.body(&plan.backward, Part::Weight, Some(self.sink(a)));
        }
        if !self.input.fuse {
            bodies.u = self.updates();
        }
        bodies
    }

    fn body(&mut self, steps: &[Step], part: Part, sink: Option<Sink>) -> Vec<Call> {
        let sink = sink.unwrap_or(Sink::Store);
        steps.iter().filter(|s| s.part == part).map(|s| self.step(s, sink)).collect()
    }

    /// The rule of the stage's updates: where several versions are kept, they leave the newest as it is.
    fn rule(&self) -> UpdateRule {
        let writes = if self.versions() > 1 { Writes::Next } else { Writes::InPlace };
        UpdateRule { writes, ..self.input.rule }
    }

    fn versions(&self) -> u32 {
        self.input.program.rings[self.stage].weights
    }

    /// The weights as operands of an update.
    fn updated(&self, param: &Param) -> Vec<Place> {
        match self.rule().writes {
            Writes::InPlace => vec![param.weight],
            Writes::Next => vec![param.weight.selected(Selector::Newest), param.weight.selected(Selector::Next)],
        }
    }

    /// Where gradients go at this place in the update.
    fn sink(&self, a: Accumulation) -> Sink {
        match a {
            Accumulation { first, last: true } if self.input.fuse => {
                Sink::Update { rule: self.rule(), accumulated: !first }
            }
            Accumulation { first: true, .. } => Sink::Store,
            Accumulation { .. } => Sink::Add,
        }
    }

    fn step(&mut self, step: &Step, sink: Sink) -> Call {
        let mut args: Vec<Place> = step.operands().map(|v| self.operand(v)).collect();
        if step.part == Part::Weight {
            self.sink_operands(step, sink, &mut args);
            return self.call(with_sink(&step.op, sink), args);
        }
        self.call(step.op.clone(), args)
    }

    /// Where a value is; of the weights the version that the micro-batch reads.
    fn operand(&self, value: ValueId) -> Place {
        let place = self.layout.place(self.plan, value);
        match self.plan.homes[&value] {
            Home::Param(_) if self.versions() > 1 => place.selected(Selector::Seen),
            _ => place,
        }
    }

    fn sink_operands(&self, step: &Step, sink: Sink, args: &mut Vec<Place>) {
        let param = &self.layout.params[self.plan.derivative.gradients[&step.outputs[0]].index()];
        let accumulator = || param.gradient.expect("a gradient that is not used up at once has an accumulator");
        match sink {
            Sink::Store | Sink::Add => args.push(accumulator()),
            Sink::Update { accumulated, .. } => {
                args.extend(accumulated.then(accumulator));
                args.push(self.layout.hyper(param));
                args.extend(self.updated(param));
                args.extend(&param.state);
            }
        }
    }

    /// The unfused update, in parameter order.
    fn updates(&mut self) -> Vec<Call> {
        let layout = self.layout;
        let update = |param: &Param| {
            let op = KernelOp::Update { len: param.shape.iter().product(), rule: self.rule() };
            let mut args = vec![param.gradient.expect("an unfused update has accumulators")];
            args.extend(self.updated(param));
            args.extend(&param.state);
            args.push(layout.hyper(param));
            self.call(op, args)
        };
        layout.params.iter().map(update).collect()
    }

    fn call(&mut self, op: KernelOp, mut args: Vec<Place>) -> Call {
        let kernel = self.kernels.id(op);
        let bytes = self.kernels.list[kernel as usize].scratch_bytes;
        if bytes > 0 {
            args.push(one(self.rank.scratch_offset, bytes));
        }
        self.scratch_bytes = self.scratch_bytes.max(bytes);
        Call { kernel, args }
    }
}
