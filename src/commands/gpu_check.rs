//! `paceline gpu-check DIR`: what a pack of `make gpu-pack` says about this machine's GPU; and `paceline gpu-expect`, which makes a part of it.
//!
//! A pack has `kernels-CHIP/` (a bundle on one rank), `expected` (what the emulator says that its kernels do), and for each training `train-NAME-CHIP/`
//! (a bundle) with `losses-NAME.jsonl` (the CPU's metrics); `text` is the data.

use super::gpu_products;
use crate::cli::{GpuCheck, GpuExpect};
use crate::failure::Failure;
use crate::output;
use artifact::bundle::Bundle;
use runtime::device::expected;
use runtime::device::pipeline::{DeviceOptions, Machine};
use runtime::device::probe::{distance, probe};
use runtime::observe::UpdateRecord;
use runtime::{Inputs, Observer, RunError, RunOptions};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Of a kernel's numbers, relative to their largest: several roundings more than the emulator's.
const KERNEL_APART_MAX: f64 = 1e-5;
/// Of a loss, relative.
const LOSS_APART_MAX: f64 = 1e-3;
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
    let kernels = named(&args.pack, "kernels-")?;
    let mut refused = None;
    let mut runs = BTreeMap::new();
    for (chip, dir) in kernels {
        let bundle = super::read_bundle(&dir)?;
        match devices(&bundle, deadline).and_then(|machine| machine.describe()) {
            Ok(lines) => {
                output::write(&(lines.join("\n") + "\n"))?;
                runs.insert(chip, bundle);
            }
            Err(error) => refused = Some(error),
        }
    }
    if let (true, Some(error)) = (runs.is_empty(), refused) {
        return Err(outside(error));
    }
    let mut wrong = 0;
    for (chip, bundle) in &runs {
        wrong += check_kernels(chip, bundle, &args.pack.join("expected"), deadline)?;
        for (name, dir) in named(&args.pack, "train-")? {
            if let Some(name) = name.strip_suffix(&format!("-{chip}")) {
                wrong += check_training(name, chip, &dir, &args.pack, deadline)?;
            }
        }
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

/// Folders of the pack whose names begin so, by the rest of the name.
fn named(pack: &Path, start: &str) -> Result<Vec<(String, PathBuf)>, Failure> {
    let entries = std::fs::read_dir(pack).map_err(|e| Failure::file("read", pack, e))?;
    let paths = entries.filter_map(|entry| entry.ok().map(|e| e.path())).filter(|path| path.is_dir());
    let rest = |path: &PathBuf| Some(path.file_name()?.to_str()?.strip_prefix(start)?.to_owned());
    let mut found: Vec<_> = paths.filter_map(|path| Some((rest(&path)?, path))).collect();
    found.sort();
    if found.is_empty() {
        let text = format!("{}: no {start}… in it; is this a folder that `make gpu-pack` made?", pack.display());
        return Err(Failure::Outside(text));
    }
    Ok(found)
}

/// Compares every kernel; the number of those that are too far apart.
fn check_kernels(chip: &str, bundle: &Bundle, expected: &Path, deadline: Duration) -> Result<usize, Failure> {
    let known = expected::read(expected).map_err(|e| Failure::file("read", expected, e))?;
    let machine = devices(bundle, deadline).map_err(outside)?;
    let found = match probe(&bundle.manifest, &*machine, deadline) {
        Ok(found) => found,
        Err(error) => {
            output::write(&format!("WRONG  kernels for {chip}: {error}\n"))?;
            return Ok(1);
        }
    };
    let (mut equal, mut lines, mut wrong) = (0, Vec::new(), 0);
    for probe in &found {
        let empty = BTreeMap::new();
        let wanted = known.get(&probe.kernel).map_or(&empty, |p| &p.changed);
        let operands = probe.changed.keys().chain(wanted.keys());
        let one = |i| {
            distance(probe.changed.get(i).map_or(&[][..], Vec::as_slice), wanted.get(i).map_or(&[][..], Vec::as_slice))
        };
        let apart = operands.map(one).fold(0.0, f64::max);
        if apart == 0.0 {
            equal += 1;
            continue;
        }
        let judged = if apart > KERNEL_APART_MAX { "WRONG" } else { "close" };
        wrong += usize::from(apart > KERNEL_APART_MAX);
        lines.push(format!("  {judged}  {}: {apart:.1e} apart", probe.kernel));
    }
    lines.sort();
    lines.truncate(LISTED_MAX);
    let first = format!("kernels for {chip}: {equal} of {} have the emulator's bits, {wrong} are wrong", found.len());
    output::write(&([vec![first], lines].concat().join("\n") + "\n"))?;
    Ok(wrong)
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
fn check_training(name: &str, chip: &str, dir: &Path, pack: &Path, deadline: Duration) -> Result<usize, Failure> {
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
    let wrong = apart > LOSS_APART_MAX || losses.0.len() != known.len();
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
