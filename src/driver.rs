//! From a `.pace` file to facts, programs and code: the compiler's passes in order.

use crate::cli::SpecArgs;
use crate::failure::Failure;
use crate::render::{self, Source};
use crate::search;
use crate::table;
use artifact::optimizer::Correction;
use artifact::program::Memory;
use artifact::stream::{Policy, Program};
use artifact::verify::Proved;
use dsl::Set;
use dsl::diag::Diagnostic;
use dsl::spec::{At, Cost, Device, Layer, LayerCosts, Limits, Spec, Weights};
use model::build::{Build, Input};
use model::dims::Dims;
use model::estimate;
use model::limits::Bounds;
use model::profile::Profile;
use model::rules::Rules;
use model::target::{Chip, CpuClass, Target};
use plan::Shape;
use plan::Subject;
use plan::facts::{Facts, StageFacts};
use plan::time::Costs;
use std::path::Path;

/// A spec with everything that is known about it before code is generated.
#[derive(Debug)]
pub struct Analysed {
    pub spec: Spec,
    /// By stage; absent without a model.
    pub layers: Option<Vec<Vec<Layer>>>,
    pub costs: Costs,
    pub program: Program,
    pub facts: Facts,
    /// Absent without a model, and for what is analysed only.
    pub build: Option<Build>,
    /// By rank; for a model or a device that is analysed only.
    pub estimate: Option<Vec<Memory>>,
    pub target: Target,
    /// What the spec's search found.
    pub search: Option<plan::search::Found>,
}

impl Analysed {
    /// By rank: planned to the byte, or estimated. Absent without a model.
    pub fn memory(&self) -> Option<&[Memory]> {
        self.build.as_ref().map(|b| &b.memory).or(self.estimate.as_ref()).map(Vec::as_slice)
    }

    /// The stages on a rank, ascending.
    pub fn stages_of(&self, rank: usize) -> Vec<usize> {
        let ranks = &self.program.rank_of_stage;
        (0..ranks.len()).filter(|&stage| ranks[stage].index() == rank).collect()
    }
}

/// Reads the spec's file.
pub fn read(args: &SpecArgs) -> Result<Source, Failure> {
    read_file(&args.file)
}

/// Reads a .pace file.
pub fn read_file(file: &Path) -> Result<Source, Failure> {
    read_text(file, ".pace")
}

/// Reads a text file of some kind.
pub fn read_text(file: &Path, kind: &str) -> Result<Source, Failure> {
    let bytes = std::fs::read(file).map_err(|e| Failure::file("read", file, e))?;
    let text = String::from_utf8(bytes).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        Failure::Outside(format!("{} is not UTF-8 text (byte {at}): is it a {kind} file?", file.display()))
    })?;
    Ok(Source { name: file.display().to_string(), text })
}

/// Parses, expands, proves, plans memory. What was found wrong comes beside what could be made; the facts are there as soon as the
/// plan exists, even if a bound is missed.
pub fn analyse(source: &Source, args: &SpecArgs) -> Result<(Option<Analysed>, Vec<Diagnostic>), Failure> {
    let target = target(args)?;
    let sets = sets(args);
    let (mut spec, mut found) = dsl::load(&source.text, &sets);
    if let Some(spec) = &mut spec {
        spec.machine.cost_of_ranks |= args.cost_of_ranks;
    }
    let profile = match &spec {
        Some(spec) => profile(spec, &args.file)?,
        None => None,
    };
    let profile = profile.as_deref();
    let analysed = match &args.table {
        None => spec.and_then(|spec| passes(spec, profile, target, &mut found)),
        Some(file) => {
            let imported = table::accepted(file, args.dialect)?;
            spec.and_then(|spec| imported.analyse(spec, profile, target, &mut found))
        }
    };
    Ok((analysed, found))
}

/// The text of the profile that the spec names, from the folder of the spec's file.
pub fn profile(spec: &Spec, file: &Path) -> Result<Option<String>, Failure> {
    let Some(Cost::Profile(name)) = spec.machine.cost.as_ref().map(|at| &at.value) else { return Ok(None) };
    let path = file.parent().unwrap_or(Path::new("")).join(name);
    std::fs::read_to_string(&path).map(Some).map_err(|e| Failure::file("read", &path, e))
}

/// The overrides of the command line.
pub fn sets(args: &SpecArgs) -> Vec<Set> {
    args.sets.iter().cloned().map(Set).collect()
}

fn passes(mut spec: Spec, profile: Option<&str>, target: Target, found: &mut Vec<Diagnostic>) -> Option<Analysed> {
    if let Some(search) = spec.pipeline.search.clone() {
        return search::analyse(spec, &search, profile, target, found);
    }
    let mut shape = Shape::of(&spec);
    let mut sound =
        plan::expand_proved(&spec.schedule, shape).map_err(|wrong| found.extend(at_clip(&spec, wrong))).ok()?;
    // What a faulty spec lacks for this is reported below.
    let known = costs_of(&spec, profile, &sound.0, &mut Vec::new());
    let cover = spec.pipeline.cover_latency.value;
    let covered = known.and_then(|(costs, _)| plan::cover::cover(&spec.schedule, shape, cover, &costs));
    if let Some((schedule, wider)) = covered {
        (spec.schedule, shape) = (schedule, wider);
        sound = plan::expand_proved(&spec.schedule, shape).map_err(|wrong| found.extend(wrong)).ok()?;
    }
    analyse_program(spec, shape, profile, sound, target, found)
}

/// What the clip asks of a schedule is shown at the clip, not in a schedule of the library.
fn at_clip(spec: &Spec, mut found: Vec<Diagnostic>) -> Vec<Diagnostic> {
    for fault in found.iter_mut().filter(|fault| fault.code == "P0345") {
        let Some(clip) = &spec.clip else { continue };
        fault.labels = Diagnostic::error(fault.code, clip.span.clone(), "").labels;
    }
    found
}

/// The costs of the program's stages, and their layers where there is a model.
pub fn costs_of(
    spec: &Spec,
    profile: Option<&str>,
    program: &Program,
    found: &mut Vec<Diagnostic>,
) -> Option<(Costs, Option<Vec<Vec<Layer>>>)> {
    let times = times(spec, profile, program).map_err(|wrong| found.push(*wrong)).ok()?;
    let layers = match &spec.model {
        Some(model) => Some(partition(spec, model, times.by_layer(), program, found)?),
        None => None,
    };
    let copies = program.copies as usize;
    let mut costs = costs(spec, &times, layers.as_deref(), program.stages_of_copy());
    if let (Some(model), None) = (&spec.model, &spec.machine.cost) {
        let shape = estimate::Shape::new(model, spec.pipeline.microbatch.value);
        costs.exchange_ns = estimate::exchange_ns(&shape, spec.machine.device.as_ref());
    }
    costs.stages = costs.stages.repeat(copies);
    Some((costs, layers.map(|layers| vec![layers; copies].concat())))
}

/// What a correction goes by, of a sound program; nothing where there is none.
fn corrected(spec: &Spec, program: &Program) -> Vec<StageFacts> {
    if spec.staleness.correction.is_none() && !matches!(spec.staleness.weights.value, Weights::Predict { .. }) {
        return Vec::new();
    }
    let boundary = spec.pipeline.boundary.as_ref().map(|b| b.value);
    let of = |v: plan::versions::StageVersions| StageFacts {
        drift: v.drift.staleness,
        delay: v.delay.staleness,
        delay_uniform: v.delay_uniform,
        versions_live: 1,
    };
    plan::versions::versions(program, boundary).map_or_else(|_| Vec::new(), |all| all.into_iter().map(of).collect())
}

/// Bytes of each rank under a sound program; none without a model that can be cut so.
pub fn memory_of(spec: &Spec, profile: Option<&str>, program: &Program, target: Target) -> Option<Vec<u64>> {
    let layers = costs_of(spec, profile, program, &mut Vec::new())?.1?;
    let model = spec.model.as_ref()?;
    let memory = match estimated(spec) {
        Some(shape) => {
            let predicted =
                corrected(spec, program).into_iter().map(|s| s.drift.max > 0).chain(std::iter::repeat(false));
            let predicted = predicted.map(|drifts| u32::from(drifts && program.policy == Policy::Predicted));
            let copies: Vec<u32> =
                program.rings.iter().zip(predicted).map(|(rings, more)| rings.weights + more).collect();
            estimate_memory(spec, model, shape, &layers, program, &copies, &mut Vec::new())?
        }
        None => build(spec, model, &layers, program, &corrected(spec, program), target, &mut Vec::new()).memory,
    };
    Some(memory.iter().map(|m| m.total).collect())
}

/// The passes after the schedule was expanded and proved, for `shape`: the program has the ranks and `accumulate` of `spec`;
/// `profile` is the text of the one that `spec` names.
pub fn analyse_program(
    spec: Spec,
    shape: Shape,
    profile: Option<&str>,
    (program, proved): (Program, Proved),
    target: Target,
    found: &mut Vec<Diagnostic>,
) -> Option<Analysed> {
    let (costs, layers) = costs_of(&spec, profile, &program, found)?;
    let (facts, more) = plan::analyse_proved(&program, &proved, &Subject { shape, ..Subject::of(&spec) }, &costs);
    found.extend(more);
    let (mut planned, mut estimate) = (None, None);
    if let (Some(model), Some(layers)) = (&spec.model, &layers) {
        match estimated(&spec) {
            Some(shape) => {
                let copies: Vec<u32> = facts.stages.iter().map(|s| s.versions_live).collect();
                estimate = estimate_memory(&spec, model, shape, layers, &program, &copies, found);
            }
            None => planned = Some(build(&spec, model, layers, &program, &facts.stages, target, found)),
        }
    }
    Some(Analysed { layers, costs, program, facts, build: planned, estimate, target, search: None, spec })
}

/// The spec's times, its profile read.
enum SpecTimes {
    Stages(dsl::spec::Costs),
    Layers(LayerCosts),
    None,
}

impl SpecTimes {
    fn by_layer(&self) -> Option<&LayerCosts> {
        match self {
            SpecTimes::Layers(costs) => Some(costs),
            _ => None,
        }
    }
}

/// The model's sizes where the spec is analysed only.
fn estimated(spec: &Spec) -> Option<estimate::Shape> {
    let model = spec.model.as_ref().filter(|_| !spec.analysis_only().is_empty())?;
    Some(estimate::Shape::new(model, spec.pipeline.microbatch.value))
}

fn estimated_costs(spec: &Spec, shape: &estimate::Shape, program: &Program) -> LayerCosts {
    estimate::costs(shape, spec.machine.device.as_ref(), estimate::splits(program))
}

fn times(spec: &Spec, profile: Option<&str>, program: &Program) -> Result<SpecTimes, Box<Diagnostic>> {
    let Some(cost) = &spec.machine.cost else {
        return Ok(match estimated(spec) {
            Some(shape) => SpecTimes::Layers(estimated_costs(spec, &shape, program)),
            None => SpecTimes::None,
        });
    };
    Ok(match &cost.value {
        Cost::Stages(costs) => SpecTimes::Stages(costs.clone()),
        Cost::Layers(costs) => SpecTimes::Layers(costs.clone()),
        Cost::Profile(name) => {
            let blocks = spec.model.as_ref().map(|m| m.layers.value);
            let read = model::profile::parse(profile.unwrap_or_default(), timed_stages(spec, program), blocks);
            match read.map_err(|e| Box::new(e.diagnostic(name, &cost.span)))? {
                Profile::Stages(costs) => SpecTimes::Stages(costs),
                Profile::Layers(costs) => SpecTimes::Layers(costs),
            }
        }
    })
}

/// Stages that times are given for.
fn timed_stages(spec: &Spec, program: &Program) -> usize {
    if spec.machine.cost_of_ranks { spec.machine.ranks.value as usize } else { program.stages_of_copy() }
}

fn partition(
    spec: &Spec,
    model: &dsl::spec::Model,
    times: Option<&LayerCosts>,
    program: &Program,
    found: &mut Vec<Diagnostic>,
) -> Option<Vec<Vec<Layer>>> {
    let estimated = estimated(spec).map(|shape| estimated_costs(spec, &shape, program));
    if estimated.is_none() {
        let wrong = model::dims::check_sizes(model, &spec.pipeline.microbatch);
        if !wrong.is_empty() {
            found.extend(wrong);
            return None;
        }
    }
    let dims = Dims::new(model, spec.pipeline.microbatch.value);
    let stages = program.stages_of_copy() as u32;
    let cut = match times.or(estimated.as_ref()) {
        Some(costs) => {
            let weight = |layer| costs.of(layer).total_ns();
            model::partition::partition_by(dims.layers, &spec.pipeline.partition, stages, &weight)
        }
        None => model::partition::partition(&dims, &spec.pipeline.partition, stages),
    };
    cut.map_err(|d| found.push(*d)).ok()
}

/// The spec's own costs, or estimates from the model's work, or one microsecond for F, I and W each.
fn costs(spec: &Spec, times: &SpecTimes, layers: Option<&[Vec<Layer>]>, stages: usize) -> Costs {
    match (times, &spec.model, layers) {
        (SpecTimes::Stages(costs), _, _) if spec.machine.cost_of_ranks => {
            Costs::of_spec(costs, spec.machine.ranks.value as usize).shared_out(stages)
        }
        (SpecTimes::Stages(costs), _, _) => Costs::of_spec(costs, stages),
        (SpecTimes::Layers(costs), _, Some(layers)) => Costs::of_spec(&costs.stages(layers), stages),
        (SpecTimes::None, Some(model), Some(layers)) => {
            let dims = Dims::new(model, spec.pipeline.microbatch.value);
            let rules = rules(spec, &[]);
            Costs::of_spec(&model::cost::costs(&dims, layers, spec.pipeline.recompute.value, &rules), stages)
        }
        _ => Costs::uniform(stages, 1000, 1000, 1000, 0),
    }
}

fn build(
    spec: &Spec,
    model: &dsl::spec::Model,
    layers: &[Vec<Layer>],
    program: &Program,
    stages: &[StageFacts],
    target: Target,
    found: &mut Vec<Diagnostic>,
) -> Build {
    let dims = Dims::new(model, spec.pipeline.microbatch.value);
    let rules = rules(spec, stages);
    found.extend(model::rules::check(spec, &rules, &model::rules::parameters(&dims)));
    let (fuse, recompute) = (spec.pipeline.fuse.value, spec.pipeline.recompute.value);
    let products = spec.pipeline.products.value;
    found.extend(model::device::check(spec, target));
    let input = Input { dims, partition: layers, fuse, rules: &rules, recompute, products, program, target };
    let build = model::build::build(&input);
    found.extend(model::limits::check_memory(&input, &build, &bounds(spec), &model.span));
    build
}

/// None if the plan is not sound: nothing is known about it then.
fn estimate_memory(
    spec: &Spec,
    model: &dsl::spec::Model,
    shape: estimate::Shape,
    layers: &[Vec<Layer>],
    program: &Program,
    versions: &[u32],
    found: &mut Vec<Diagnostic>,
) -> Option<Vec<Memory>> {
    let states = rules(spec, &[]).states(model.width.value.into());
    let fuse = spec.pipeline.fuse.value;
    let input = estimate::Input { shape, partition: layers, program, fuse, states, versions };
    let memory = (versions.len() == layers.len()).then(|| estimate::memory(&input))?;
    found.extend(estimate::check_memory(&input, &memory, &bounds(spec), &model.span));
    Some(memory)
}

/// The memory of a machine that is not here is its device's, unless the spec leaves less of it.
pub fn bounds(spec: &Spec) -> Bounds {
    let device = |device: &Device| Limits::new(vec![At { value: device.memory_bytes, span: device.span.clone() }]);
    let machine = spec.machine.memory.clone();
    Bounds {
        machine: machine.or_else(|| spec.machine.device.as_ref().and_then(device)),
        require: spec.require.memory.clone(),
    }
}

/// What `--target` and `--cpu` name.
fn target(args: &SpecArgs) -> Result<Target, Failure> {
    let class = || cpu_class(args.cpu.as_deref()).map(Target::Cpu);
    let Some(name) = args.target.as_deref().filter(|name| *name != "cpu") else { return class() };
    let found = Target::from_name(name).filter(|target| !matches!(target, Target::Cpu(_)));
    let found = found.ok_or_else(|| {
        let chips = Chip::ALL.map(|chip| Target::Cuda(chip).name()).join(", ");
        Failure::Usage(format!("--target {name}: no such target; there are cpu, {chips}, {}", Target::Emulated.name()))
    })?;
    if args.cpu.is_some() {
        return Err(Failure::Usage(format!("--cpu names a class for --target cpu, and the target is {name}")));
    }
    Ok(found)
}

/// The class named by `--cpu`, else this machine's.
pub fn cpu_class(name: Option<&str>) -> Result<CpuClass, Failure> {
    let known = || CpuClass::ALL.map(CpuClass::name).join(", ");
    match name {
        Some(name) => CpuClass::from_name(name)
            .ok_or_else(|| Failure::Usage(format!("--cpu {name}: no such CPU class; there are {}", known()))),
        None => Ok(runtime::cpu::this_machine().and_then(CpuClass::from_name).unwrap_or(CpuClass::X86V3)),
    }
}

/// Ends a subcommand whose spec has errors (already printed).
pub fn refuse_on_error(found: &[Diagnostic]) -> Result<(), Failure> {
    if found.iter().any(Diagnostic::is_error) { Err(Failure::Refused) } else { Ok(()) }
}

/// Reads and analyses, prints diagnostics, and goes on only with an accepted spec.
pub fn accepted(args: &SpecArgs) -> Result<(Source, Analysed), Failure> {
    let source = read(args)?;
    let (analysed, found) = analyse(&source, args)?;
    render::print(&source, &found);
    refuse_on_error(&found)?;
    let analysed = analysed.expect("a spec without errors is analysed");
    Ok((source, analysed))
}

/// The rules of the spec's updates, for stages of which these facts are known.
pub fn rules(spec: &Spec, stages: &[StageFacts]) -> Rules {
    Rules::of_spec(spec, correction(spec, stages).as_ref())
}

/// The correction as a bundle has it, for stages of which these facts are known; a prediction of weights is one. Refused plans have none
/// that it needs.
pub fn correction(spec: &Spec, stages: &[StageFacts]) -> Option<Correction> {
    use dsl::spec::Correction as Asked;
    if let Weights::Predict { tau } = spec.staleness.weights.value {
        let ahead = |s: &StageFacts| if s.drift.max > 0 { tau.unwrap_or(s.drift.mean) } else { 0.0 };
        return Some(Correction::Prediction { ahead: stages.iter().map(ahead).collect() });
    }
    Some(match spec.staleness.correction.as_ref()?.value {
        Asked::ErrorFeedback { lambda, tau } => {
            // A plan with mixed delays is refused.
            let proved = |s: &StageFacts| s.delay_uniform.unwrap_or(s.delay.max) as f64;
            Correction::ErrorFeedback {
                lambda,
                delay: stages.iter().map(|s| tau.unwrap_or_else(|| proved(s))).collect(),
            }
        }
        Asked::Nesterov { momentum, by_stage } => {
            let late = stages.iter().any(|s| s.delay.max > 0);
            let more = if by_stage && late { dsl::spec::MOMENTUM_MOST - momentum } else { 0.0 };
            let of = |s: usize| momentum + (stages.len() - 1 - s) as f64 * more / stages.len() as f64;
            Correction::Nesterov { momentum: (0..stages.len()).map(of).collect() }
        }
        Asked::DelayCompensation { lambda } => {
            let of = |s: &StageFacts| if s.delay.max > 0 { lambda } else { 0.0 };
            Correction::DelayCompensation { lambda: stages.iter().map(of).collect() }
        }
        Asked::PipeMare { anneal, discrepancy } => Correction::PipeMare {
            anneal,
            delay: stages.iter().map(|s| s.delay.mean).collect(),
            discrepancy,
            drift: stages.iter().map(|s| s.drift.mean).collect(),
        },
    })
}

/// As [`accepted`], for a spec that can become code.
pub fn compilable(args: &SpecArgs) -> Result<(Source, Analysed), Failure> {
    let (source, analysed) = accepted(args)?;
    if let Some(refusal) = estimate::refusal(&analysed.spec) {
        render::print(&source, &[refusal]);
        return Err(Failure::Refused);
    }
    if analysed.build.is_none() {
        return Err(Failure::Usage(format!(
            "{} has no `model` block: it can be checked, planned and drawn, but there is nothing to compile",
            args.file.display()
        )));
    }
    Ok((source, analysed))
}
