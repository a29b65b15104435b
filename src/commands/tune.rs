//! `paceline tune BUNDLE -o DIR`: measures on this machine's GPU which products cuBLASLt computes faster, and freezes that in a bundle.

use crate::cli::Tune;
use crate::driver;
use crate::failure::Failure;
use crate::output;
use crate::report::bytes;
use artifact::program::Manifest;
use artifact::tuning::{Choice, Tuning};
use model::limits::Bounds;
use runtime::RunError;
use runtime::device::library::tune::{FASTER_BY, Settings, tune};
use std::time::Duration;

pub fn run(args: &Tune) -> Result<(), Failure> {
    let mut bundle = super::read_bundle(&args.bundle)?;
    bundle.manifest.untune();
    // What would be in vain is told before anything is measured.
    let unwritable = |e| Failure::file("write", &args.output, e);
    runtime::bundle_dir::check_free(&args.output).map_err(unwritable)?;
    let bounds = bounds(&bundle.manifest)?;
    let deadline = Duration::from_secs(args.deadline_s);
    let machine = runtime::machine_to_tune(&bundle, deadline).map_err(failure)?.ok_or_else(|| {
        let target = &bundle.manifest.cpu;
        Failure::Usage(format!(
            "`{target}` is no GPU: its products are the bundle's own (`compile --target cuda:CHIP`)"
        ))
    })?;
    let settings = Settings { workspace_bytes: args.workspace_mib << 20, faster_by: FASTER_BY, deadline };
    let mut said = output::write(&format!("{HEADER}\n"));
    let mut told = |choice: &Choice| {
        if said.is_ok() {
            said = output::write(&(line(&bundle.manifest, choice) + "\n"));
        }
    };
    let tuned = tune(&bundle.manifest, &*machine, &settings, &mut told);
    said?;
    let tuned = tuned.map_err(failure)?;
    drop(machine);
    bundle.manifest = tuned;
    within(bounds, &bundle.manifest)?;
    bundle.check().map_err(|e| {
        Failure::Outside(format!("internal error, please report: the bundle just tuned is not sound: {e}"))
    })?;
    runtime::bundle_dir::write(&args.output, &bundle).map_err(unwritable)?;
    let tuning = bundle.manifest.tuning.as_ref().expect("just tuned");
    output::write(&format!("{}: {}\n", args.output.display(), summary(tuning)))
}

fn failure(error: RunError) -> Failure {
    match error.exit_status() {
        2 => Failure::Usage(error.to_string()),
        _ => Failure::Outside(error.to_string()),
    }
}

/// The bounds of the spec that a bundle was compiled from.
fn bounds(manifest: &Manifest) -> Result<Bounds, Failure> {
    let (Some(spec), _) = dsl::load(&manifest.source, &[]) else {
        let text = "the bundle's spec does not load, and with it the bounds of its memory; compile the bundle again with \
                    this program";
        return Err(Failure::Outside(text.into()));
    };
    Ok(driver::bounds(&spec))
}

/// Whether the arenas with their workspaces are within bounds.
fn within(bounds: Bounds, manifest: &Manifest) -> Result<(), Failure> {
    for limits in [bounds.require, bounds.machine].into_iter().flatten() {
        for (rank, memory) in manifest.memory.iter().enumerate() {
            let bound = limits.of(rank).value;
            if memory.total > bound {
                return Err(Failure::Outside(format!(
                    "rank {rank} would need {} bytes with the workspace of its products, and the spec's bound is {bound}: \
                     give --workspace less",
                    memory.total
                )));
            }
        }
    }
    Ok(())
}

/// Above lines of choices.
pub const HEADER: &str = "      kernel       library     runs  product";

/// A kernel with its times, and who computes it from now on.
pub fn line(manifest: &Manifest, choice: &Choice) -> String {
    let us = |ns: u64| format!("{:.1} us", ns as f64 / 1e3);
    let name = &manifest.kernels[choice.kernel as usize].name;
    let library = match choice.library_ns {
        Some(ns) => us(ns),
        None => format!("none of {}", choice.offered),
    };
    let runs = if choice.algorithm.is_some() { "library" } else { "kernel" };
    format!("{:>12}  {library:>12}  {runs:>7}  {name}", us(choice.own_ns))
}

/// How many products the library computes, on what, and with how much memory.
pub fn summary(tuning: &Tuning) -> String {
    let chosen = tuning.choices.iter().filter(|choice| choice.algorithm.is_some()).count();
    let most = tuning.workspaces.iter().map(|workspace| workspace.bytes).max().unwrap_or(0);
    format!(
        "{chosen} of {} products by {} on {}, with a workspace of at most {} a rank",
        tuning.choices.len(),
        tuning.on.name(),
        tuning.on.device(),
        bytes(most)
    )
}
