//! `paceline gpu-check DIR`: what a pack of `make gpu-pack` says about this machine's GPU; and `paceline gpu-expect`, which makes a part of it.
//!
//! A pack has bundles on one rank, `kernels-NAME-CHIP/`, with what the emulator says that their kernels do, `expected-NAME`; and for each training a bundle
//! `train-NAME-CHIP/` with the CPU's metrics, `losses-NAME.jsonl`; `text` is the data.

use super::gpu_products;
use crate::cli::{GpuCheck, GpuExpect};
use crate::failure::Failure;
use crate::output;
use artifact::bundle::Bundle;
use runtime::device::pipeline::{DeviceOptions, Machine};
use runtime::device::probe::{Probe, probe};
use runtime::device::{bands, expected};
use runtime::observe::UpdateRecord;
use runtime::{Inputs, Observer, RunError, RunOptions};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Kernels that are listed with how far they are apart.
const LISTED_MAX: usize = 20;

/// Writes what the emulator says that the kernels of a bundle do.
pub fn expect(args: &GpuExpect) -> Result<(), Failure> {
    let bundle = super::read_bundle(&args.bundle)?;
    let machine = devices(&bundle, DeviceOptions::default().deadline).map_err(outside)?;
    let probes = probe(&bundle.manifest, &*machine, DeviceOptions::default().deadline).map_err(outside)?;
    expected::write(&args.output, &probes).map_err(|e| Failure::file("write", &args.output, e))?;
    output::write(&format!("{}: {} kernels\n", args.output.display(), probes.len()))
}

pub fn run(args: &GpuCheck) -> Result<(), Failure> {
    let deadline = Duration::from_secs(args.deadline_s);
    let (kernels, trainings) = (named(&args.pack, "kernels-")?, named(&args.pack, "train-")?);
    // By chip: whether this machine has it. A chip's bundles are alike.
    let (mut chips, mut refused) = (BTreeMap::new(), None);
    for (_, chip, dir) in &kernels {
        if chips.contains_key(chip) {
            continue;
        }
        let bundle = super::read_bundle(dir)?;
        match devices(&bundle, deadline).and_then(|machine| machine.describe()) {
            Ok(lines) => {
                output::write(&(lines.join("\n") + "\n"))?;
                chips.insert(chip, true);
            }
            Err(error) => {
                chips.insert(chip, false);
                refused = Some(error);
            }
        }
    }
    if let (false, Some(error)) = (chips.values().any(|here| *here), refused) {
        return Err(outside(error));
    }
    let mut wrong = 0;
    for (name, chip, dir) in kernels.iter().filter(|(_, chip, _)| chips[chip]) {
        wrong += check_kernels((name, chip), dir, &args.pack, deadline)?;
    }
    for (name, chip, dir) in trainings.iter().filter(|(_, chip, _)| chips.get(chip) == Some(&true)) {
        wrong += check_training((name, chip), dir, &args.pack, deadline)?;
    }
    if wrong > 0 {
        output::write(&format!("gpu-check: {wrong} wrong\n"))?;
        return Err(Failure::Refused);
    }
    output::write("gpu-check: all as expected\n")
}

/// The devices of a bundle for some: a GPU's chip, or the emulator.
fn devices(bundle: &Bundle, deadline: Duration) -> Result<Box<dyn Machine + '_>, RunError> {
    let options = RunOptions { device: DeviceOptions { deadline }, ..RunOptions::default() };
    let none = || RunError::Usage(format!("`{}` is no target with devices", bundle.manifest.cpu));
    runtime::machine(bundle, &options)?.ok_or_else(none)
}

fn outside(error: RunError) -> Failure {
    Failure::Outside(error.to_string())
}

/// Folders of the pack whose names begin so: the name, the chip, the folder.
fn named(pack: &Path, start: &str) -> Result<Vec<(String, String, PathBuf)>, Failure> {
    let entries = std::fs::read_dir(pack).map_err(|e| Failure::file("read", pack, e))?;
    let paths = entries.filter_map(|entry| entry.ok().map(|e| e.path())).filter(|path| path.is_dir());
    let parts = |path: PathBuf| {
        let (name, chip) = path.file_name()?.to_str()?.strip_prefix(start)?.rsplit_once('-')?;
        Some((name.to_owned(), chip.to_owned(), path.clone()))
    };
    let mut found: Vec<_> = paths.filter_map(parts).collect();
    found.sort();
    if found.is_empty() {
        let text = format!("{}: no {start}… in it; is this a folder that `make gpu-pack` made?", pack.display());
        return Err(Failure::Outside(text));
    }
    Ok(found)
}

/// Compares every kernel; the number of those that are too far apart.
fn check_kernels(of: (&str, &str), dir: &Path, pack: &Path, deadline: Duration) -> Result<usize, Failure> {
    let (name, chip) = of;
    let file = pack.join(format!("expected-{name}"));
    let known = expected::read(&file).map_err(|e| Failure::file("read", &file, e))?;
    let bundle = super::read_bundle(dir)?;
    let machine = devices(&bundle, deadline).map_err(outside)?;
    let found = match probe(&bundle.manifest, &*machine, deadline) {
        Ok(found) => found,
        Err(error) => {
            output::write(&format!("WRONG  kernels {name} for {chip}: {error}\n"))?;
            return Ok(1);
        }
    };
    let (mut equal, mut lines, mut wrong) = (0, Vec::new(), 0);
    for probe in &found {
        let wanted = known.get(&probe.kernel);
        if wanted.map_or(&BTreeMap::new(), |p| &p.changed) == &probe.changed {
            equal += 1;
            continue;
        }
        let (apart, most) = apart(&bundle, probe, wanted);
        let judged = if apart > most { "WRONG" } else { "close" };
        wrong += usize::from(apart > most);
        lines.push(format!("  {judged}  {}: {apart:.1e} apart", probe.kernel));
    }
    lines.sort();
    lines.truncate(LISTED_MAX);
    let bits = format!("{equal} of {} have the emulator's bits, {wrong} are wrong", found.len());
    let first = format!("kernels {name} for {chip}: {bits}");
    output::write(&([vec![first], lines].concat().join("\n") + "\n"))?;
    Ok(wrong)
}

/// How far what a kernel changed is from what it should have changed; and how far it may be.
fn apart(bundle: &Bundle, found: &Probe, wanted: Option<&Probe>) -> (f64, f64) {
    let kernel = bundle.manifest.kernels.iter().find(|kernel| kernel.name == found.kernel);
    let kernel = kernel.expect("the probes are of this bundle's kernels");
    let none = Vec::new();
    let content = |probe: Option<&Probe>, i| probe.and_then(|p| p.changed.get(&i)).unwrap_or(&none).clone();
    let one = |(i, &elem)| bands::distance(&content(Some(found), i), &content(wanted, i), elem);
    (kernel.elements.iter().enumerate().map(one).fold(0.0, f64::max), bands::of_kernel(kernel))
}

/// Takes the losses of a run.
#[derive(Default)]
struct Losses(Vec<f64>);

impl Observer for Losses {
    fn update(&mut self, record: &UpdateRecord) -> std::io::Result<()> {
        self.0.push(record.loss);
        Ok(())
    }
}

/// Trains, with the bundle's own kernels and with the products of the library that there may be; the number of what is wrong.
fn check_training(of: (&str, &str), dir: &Path, pack: &Path, deadline: Duration) -> Result<usize, Failure> {
    let (name, chip) = of;
    let bundle = super::read_bundle(dir)?;
    let wrong = train(name, chip, &bundle, pack, deadline)?;
    if wrong > 0 {
        return Ok(wrong);
    }
    let (tuned, wrong) = gpu_products::tuned(&format!("training {name} for {chip}"), &bundle, deadline)?;
    let Some(bundle) = tuned else { return Ok(wrong) };
    Ok(wrong + train(name, &format!("{chip}, by the library"), &bundle, pack, deadline)?)
}

/// Trains and compares the losses with the CPU's; 1 when they are too far apart.
fn train(name: &str, chip: &str, bundle: &Bundle, pack: &Path, deadline: Duration) -> Result<usize, Failure> {
    let file = pack.join(format!("losses-{name}.jsonl"));
    let text = std::fs::read_to_string(&file).map_err(|e| Failure::file("read", &file, e))?;
    let known = text.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok()?["loss"].as_f64());
    let known: Vec<f64> = known.collect();
    let mut options =
        RunOptions { updates: known.len() as u64, seed: 1, data: vec![pack.join("text")], ..RunOptions::default() };
    options.device.deadline = deadline;
    let inputs = Inputs::read(&bundle.manifest, &options).map_err(outside)?;
    let mut losses = Losses::default();
    let summary = match runtime::run(bundle, &inputs, &options, &mut losses) {
        Ok(summary) => summary,
        Err(error) => {
            output::write(&format!("WRONG  training {name} for {chip}: {error}\n"))?;
            return Ok(1);
        }
    };
    let apart = losses.0.iter().zip(&known).map(|(f, k)| (f - k).abs() / k).fold(0.0, f64::max);
    let wrong = apart > bands::of_losses(&bundle.manifest) || losses.0.len() != known.len();
    let usage = summary.devices.unwrap_or_default();
    output::write(&format!(
        "{}  training {name} for {chip}: {} ranks, {} updates, losses {apart:.1e} from the CPU's, {:.0} tokens/s, {} graphs\n",
        if wrong { "WRONG" } else { "fine " },
        bundle.manifest.memory.len(),
        known.len(),
        summary.tokens_per_s,
        usage.graphs,
    ))?;
    Ok(usize::from(wrong))
}
