//! `paceline inspect BUNDLE`: what a bundle holds.

use super::tune;
use crate::cli::BundleArg;
use crate::failure::Failure;
use crate::output;
use crate::report::bytes;
use artifact::bundle::Bundle;
use artifact::program::{Call, Image, Manifest, Param, Place, Stage};
use std::fmt::Write;

pub fn run(args: &BundleArg) -> Result<(), Failure> {
    let bundle = super::read_bundle(&args.bundle)?;
    let manifest = &bundle.manifest;
    let mut out = String::new();
    let _ = writeln!(
        out,
        "{}: compiled from {} for {} by LLVM {}",
        args.bundle.display(),
        manifest.source_name,
        manifest.cpu,
        manifest.llvm
    );
    let _ = writeln!(
        out,
        "data: {} sequences of {} tokens a micro-batch, {} micro-batches an update, vocabulary {}",
        manifest.data.microbatch, manifest.data.context, manifest.program.accumulate, manifest.data.vocab
    );
    stages(&mut out, &bundle);
    ranks(&mut out, manifest);
    parameters(&mut out, manifest);
    kernels(&mut out, manifest);
    products(&mut out, manifest);
    output::write(&out)
}

fn stages(out: &mut String, bundle: &Bundle) {
    let _ = writeln!(out, "\nstage  rank  parameters  drift  delay  calls of F  calls of B, last  code");
    for (index, stage) in bundle.manifest.stages.iter().enumerate() {
        let parameters: u64 = stage.params.iter().map(|p| p.shape.iter().product::<u64>()).sum();
        let last = stage.bodies.b.iter().chain(&stage.bodies.w).rfind(|body| !body.is_empty()).map_or(0, Vec::len);
        let _ = writeln!(
            out,
            "{:>5}  {:>4}  {parameters:>10}  {:>5}  {:>5}  {:>10}  {last:>16}  {}",
            stage.stage,
            stage.rank,
            bundle.manifest.proved.drift_max[index],
            bundle.manifest.proved.delay_max[index],
            stage.bodies.f.len(),
            code(&bundle.images[index]),
        );
    }
}

/// Sizes of a stage's code.
fn code(image: &Image) -> String {
    let size = bytes(image.code.len() as u64);
    match &image.cubin {
        Some(cubin) => format!("{size} of PTX, {} by {}", bytes(cubin.code.len() as u64), cubin.assembler),
        None => size,
    }
}

fn ranks(out: &mut String, manifest: &Manifest) {
    let _ = writeln!(out, "\nrank  memory (bytes)  predicted bubble  instructions a period");
    for (rank, memory) in manifest.memory.iter().enumerate() {
        let _ = writeln!(
            out,
            "{rank:>4}  {:>14}  {:>15.1}%  {:>21}",
            memory.total,
            manifest.proved.bubble[rank] * 100.0,
            manifest.program.streams[rank].period.len()
        );
    }
}

fn parameters(out: &mut String, manifest: &Manifest) {
    let all = || manifest.stages.iter().flat_map(|s| s.params.iter().map(move |p| (s, p)));
    let shape = |p: &Param| p.shape.iter().map(u64::to_string).collect::<Vec<_>>().join(" x ");
    let width = all().map(|(_, p)| p.name.len()).max().unwrap_or(0);
    let _ = writeln!(out, "\n{:<width$}  {:>14}  states  updated", "parameter", "shape");
    for (stage, param) in all() {
        let (name, shape, states) = (&param.name, shape(param), param.state.len());
        let _ = writeln!(out, "{name:<width$}  {shape:>14}  {states:>6}  {}", updated(manifest, stage, param));
    }
}

/// Which kernel updates a parameter, and why it is not that of its weight gradient.
fn updated(manifest: &Manifest, stage: &Stage, param: &Param) -> String {
    let (io, bodies) = (&stage.io, &stage.bodies);
    let hyper = |place: &Place| place.offset.wrapping_sub(io.hyper.offset) < io.hyper.bytes;
    let weight = |place: &Place| place.offset == param.weight.offset;
    let updates = |call: &&Call| call.args.iter().any(hyper) && call.args.iter().any(weight);
    let name = |call: &Call| &manifest.kernels[call.kernel as usize].name;
    if let Some(call) = bodies.u.iter().find(updates) {
        let why = param.unfused.as_ref().map_or(String::new(), |why| format!(": {why}"));
        return format!("by {}{why}", name(call));
    }
    match bodies.b.iter().chain(&bodies.w).flatten().find(updates) {
        Some(call) => format!("in its last weight gradient, {}", name(call)),
        None => "never".into(),
    }
}

fn kernels(out: &mut String, manifest: &Manifest) {
    let _ = writeln!(out, "\ncalls  scratch     kernel");
    for (index, kernel) in manifest.kernels.iter().enumerate() {
        let calls: usize = manifest.stages.iter().map(|s| calls_of(s, index as u32)).sum();
        let _ = writeln!(out, "{calls:>5}  {:>10}  {}", bytes(kernel.scratch_bytes), kernel.name);
    }
}

/// Who computes the products of a tuned bundle, and what was measured.
fn products(out: &mut String, manifest: &Manifest) {
    let Some(tuning) = &manifest.tuning else { return };
    let _ = writeln!(out, "\n{}", tune::summary(tuning));
    for (rank, workspace) in tuning.workspaces.iter().enumerate().filter(|(_, w)| w.bytes > 0) {
        let _ = writeln!(
            out,
            "rank {rank}: {} bytes of workspace for them, from byte {} of the arena",
            workspace.bytes,
            workspace.offset()
        );
    }
    let _ = writeln!(out, "\n{}", tune::HEADER);
    for choice in &tuning.choices {
        let _ = write!(out, "{}", tune::line(manifest, choice));
        match &choice.algorithm {
            Some(a) => {
                let _ = writeln!(out, ": {}; workspace {}", a.settings, bytes(a.workspace_bytes));
            }
            None => out.push('\n'),
        }
    }
}

/// Calls of a kernel in all bodies of a stage.
fn calls_of(stage: &Stage, kernel: u32) -> usize {
    stage.bodies.calls().filter(|call| call.kernel == kernel).count()
}
