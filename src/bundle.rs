//! An analysed spec made into a bundle: the manifest from what is proved and planned, the images from code generation.

use crate::cli::SpecArgs;
use crate::driver::{self, Analysed};
use crate::failure::Failure;
use crate::render::Source;
use artifact::bundle::Bundle;
use artifact::program::{DataShape, Group, Image, LearningRate, Manifest, Proved};
use codegen::CodegenError;
use codegen::cuda::{Assembler, DeviceCode, Generator};
use dsl::spec::{At, Optimizer, Spec};
use indicatif::{ProgressBar, ProgressStyle};
use model::kernel::Kernel;
use model::target::{Chip, Target};
use std::path::Path;

/// Compiles all kernels and assembles the bundle of a [`manifest`]. PTX is also made into machine code where there is a `ptxas`.
pub fn make(manifest: Manifest, analysed: &Analysed, ptxas: Option<&Path>) -> Result<Bundle, Failure> {
    let build = analysed.build.as_ref().expect("the caller checked that there is a model");
    let bar = ProgressBar::new(build.kernels.len() as u64).with_style(
        ProgressStyle::with_template("compiling kernels {wide_bar} {pos}/{len}").expect("a valid template"),
    );
    let progress = |done, _| bar.set_position(done as u64);
    let mut manifest = manifest;
    let device = |codes: Vec<DeviceCode>| {
        for (entry, code) in manifest.kernels.iter_mut().zip(&codes) {
            entry.launches.clone_from(&code.launches);
        }
        codegen::cuda::images(&codes, &build.stages)
    };
    let images = match analysed.target {
        Target::Cpu(cpu) => codegen::compile(&build.kernels, &build.stages, cpu, &progress),
        Target::Cuda(chip) => device_code(&build.kernels, chip, &progress).and_then(device),
        Target::Emulated => codegen::cuda::compile_emulated(&build.kernels, &progress).and_then(device),
    };
    bar.finish_and_clear();
    let mut bundle = Bundle { manifest, images: images.map_err(|e| Failure::Outside(e.to_string()))? };
    if let Target::Cuda(chip) = analysed.target
        && let Some(assembler) = crate::ptxas::find(ptxas)?
    {
        add_cubins(&mut bundle, &assembler, chip, ptxas.is_some())?;
    }
    bundle.check().map_err(|e| {
        Failure::Outside(format!("internal error, please report: the bundle just made is not sound: {e}"))
    })?;
    Ok(bundle)
}

/// Assembles every stage's PTX. An assembler that nobody asked for may fail: then the bundle has PTX only.
fn add_cubins(bundle: &mut Bundle, assembler: &Assembler, chip: Chip, asked: bool) -> Result<(), Failure> {
    let one = |image: &Image| assembler.assemble(&format!("stage {}", image.stage), &image.code, chip.name());
    match bundle.images.iter().map(one).collect::<Result<Vec<_>, _>>() {
        Ok(cubins) => bundle.images.iter_mut().zip(cubins).for_each(|(image, cubin)| image.cubin = Some(cubin)),
        Err(error) if asked => return Err(Failure::Outside(error.to_string())),
        Err(error) => crate::output::say(&format!("note: the bundle has PTX and no cubin: {error}")),
    }
    Ok(())
}

/// PTX of kernels, from children of this process that run this program.
pub fn device_code(
    kernels: &[Kernel],
    chip: Chip,
    progress: &dyn Fn(usize, usize),
) -> Result<Vec<DeviceCode>, CodegenError> {
    let program =
        std::env::current_exe().map_err(|e| CodegenError::new("this program", "device code", e.to_string()))?;
    let generator = Generator { program, arguments: vec!["device-code".to_owned()] };
    codegen::cuda::compile_kernels(kernels, chip, &generator, progress)
}

/// What is proved and planned, as the bundle holds it. The spec has a model.
pub fn manifest(source: &Source, args: &SpecArgs, analysed: &Analysed) -> Manifest {
    let spec = &analysed.spec;
    let build = analysed.build.as_ref().expect("the caller checked that there is a model");
    let model = spec.model.as_ref().expect("a build has a model");
    let facts = &analysed.facts;
    Manifest {
        source_name: source.name.clone(),
        source: dsl::with_sets(&source.text, &driver::sets(args)),
        cpu: analysed.target.name(),
        llvm: codegen::llvm_version(),
        data: DataShape {
            microbatch: spec.pipeline.microbatch.value,
            context: model.context.value,
            vocab: model.vocab.value,
        },
        groups: groups(spec),
        correction: driver::correction(spec, &facts.stages),
        boundary: spec.pipeline.boundary.as_ref().map(|b| b.value),
        program: analysed.program.clone(),
        stages: build.stages.clone(),
        memory: build.memory.clone(),
        kernels: build.entries.clone(),
        proved: Proved {
            drift_max: facts.stages.iter().map(|s| s.drift.max).collect(),
            delay_max: facts.stages.iter().map(|s| s.delay.max).collect(),
            bubble: facts.ranks.iter().map(|r| r.bubble).collect(),
        },
        tuning: None,
    }
}

/// In the order of the model's rules: the spec's groups, then the rest.
fn groups(spec: &Spec) -> Vec<Group> {
    let own = spec.groups.iter().map(|g| (&g.optimizer, &g.learning_rate));
    let group = |(o, lr): (&At<Optimizer>, &At<dsl::spec::LearningRate>)| Group {
        optimizer: model::rules::optimizer(o.value),
        learning_rate: learning_rate(lr.value),
    };
    own.chain([(&spec.optimizer, &spec.learning_rate)]).map(group).collect()
}

fn learning_rate(lr: dsl::spec::LearningRate) -> LearningRate {
    use dsl::spec::LearningRate as Spec;
    match lr {
        Spec::Constant { lr } => LearningRate::Constant { lr },
        Spec::Cosine { peak, warmup, total, floor } => LearningRate::Cosine { peak, warmup, total, floor },
        Spec::Linear { peak, warmup, total, floor } => LearningRate::Linear { peak, warmup, total, floor },
        Spec::Wsd { peak, warmup, total, decay, floor } => LearningRate::Wsd { peak, warmup, total, decay, floor },
    }
}
