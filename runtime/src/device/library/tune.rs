//! Measures which of a bundle's products a library computes faster than the bundle's own kernels.
//!
//! Each kernel that is a product runs alone, over operands of its first call: numbers between -1 and 1 drawn by the kernel's name. Every algorithm that
//! the library offers must give the kernel's numbers, but for a band that the rounding of its elements allows, and the same bits twice; else
//! it is refused. Then the kernel and the algorithms run in turn, several rounds, each a few times in a row; what counts is the median
//! of a round's time. The library gets the product where it is faster by [`Settings::faster_by`] at least.

use crate::device::bands::distance;
use crate::device::library::Library;
use crate::device::pipeline::Machine;
use crate::device::probe::first_calls;
use crate::device::{Command, Device, Fault, Room, Stream};
use crate::draw::Draws;
use crate::error::RunError;
use artifact::bf16;
use artifact::ids::RankId;
use artifact::product::{Elements, Product};
use artifact::program::{Call, Elem, Manifest, Place};
use artifact::tuning::{Algorithm, Choice, Identity, Workspace};
use std::time::Duration;

/// Part of the kernel's time that is worth another order of summation, and more than times vary.
pub const FASTER_BY: f64 = 0.03;
/// Algorithms that are asked for.
const OFFERED_MAX: usize = 8;
/// Rounds of measuring, and computations of each in a round; one more round before them is not counted.
const ROUNDS: usize = 7;
const TIMES: u32 = 10;

/// What a tuning may use.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    pub workspace_bytes: u64,
    /// Part of the kernel's time that the library must save; below 0 it may also take longer.
    pub faster_by: f64,
    /// The longest that one computation may take.
    pub deadline: Duration,
}

/// Measures the products of an untuned bundle and tunes its manifest. `told` hears each kernel's choice.
///
/// # Errors
/// What the machine lacks, which kernel failed how, or that there is no product.
pub fn tune(
    manifest: &Manifest,
    machine: &dyn Machine,
    settings: &Settings,
    told: &mut dyn FnMut(&Choice),
) -> Result<Manifest, RunError> {
    let mut trial = manifest.clone();
    let workspaces: Vec<Workspace> =
        manifest.memory.iter().map(|m| Workspace { before: m.total, bytes: settings.workspace_bytes }).collect();
    for (memory, workspace) in trial.memory.iter_mut().zip(&workspaces) {
        memory.total = workspace.total().ok_or_else(|| RunError::Usage("no GPU has such a workspace".into()))?;
    }
    let (mut choices, mut on): (Vec<Choice>, Option<Identity>) = (Vec::new(), None);
    for (rank, workspace) in workspaces.iter().enumerate() {
        let rank = RankId(rank as u32);
        let products: Vec<Subject> = first_calls(manifest, rank)
            .into_iter()
            .filter_map(|(stage, call)| Subject::new(manifest, stage, call, workspace.offset()))
            .collect();
        if products.is_empty() {
            continue;
        }
        let mut device = machine.device(&trial, rank, Room { staging_bytes: 1, events: 1, marks: 1 })?;
        device.working(true);
        let identity = device.library().and_then(|library| library.identity()).map_err(RunError::Device)?;
        on.get_or_insert(identity);
        for subject in products {
            let choice = subject.choose(&mut *device, settings).map_err(|fault| {
                device.abort();
                let (Fault::Device(cause) | Fault::Peer(_, cause)) = fault else {
                    return RunError::Device(format!("the kernel `{}` was killed", subject.name));
                };
                RunError::Device(format!("measuring the kernel `{}` failed: {cause}", subject.name))
            })?;
            told(&choice);
            choices.push(choice);
        }
        device.working(false);
    }
    let on = on.ok_or_else(|| RunError::Usage("the bundle has no product that a library could compute".into()))?;
    choices.sort_by_key(|choice| choice.kernel);
    let mut tuned = manifest.clone();
    tuned.tune(on, choices);
    Ok(tuned)
}

/// A kernel that is a product, in its first call.
struct Subject<'a> {
    name: &'a str,
    kernel: u32,
    product: Product,
    stage: usize,
    args: Vec<(u64, Place)>,
    /// Where the workspace begins.
    workspace: u64,
}

impl<'a> Subject<'a> {
    fn new(manifest: &'a Manifest, stage: usize, call: &Call, workspace: u64) -> Option<Self> {
        let entry = &manifest.kernels[call.kernel as usize];
        let args = call.args.iter().map(|place| (place.at(0), *place)).collect();
        let product = entry.product?;
        Some(Subject { name: &entry.name, kernel: call.kernel, product, stage, args, workspace })
    }

    fn choose(&self, device: &mut dyn Device, settings: &Settings) -> Result<Choice, Fault> {
        let own = Command::Launch { stage: self.stage, kernel: self.kernel, args: self.args.clone() };
        let expected = self.result(device, &own, settings)?;
        let library: &mut dyn Library = device.library().map_err(Fault::Device)?;
        let proposed =
            library.candidates(&self.product, settings.workspace_bytes, OFFERED_MAX).map_err(Fault::Device)?;
        let (mut offered, mut sound) = (0, Vec::new());
        for algorithm in proposed.iter().filter(|a| a.workspace_bytes <= settings.workspace_bytes) {
            let (product, args, workspace) = (self.product, self.args.clone(), self.workspace);
            let command = Command::Product { product, algorithm: *algorithm, args, workspace };
            // One that the library itself refuses to run is none.
            let Some(found) = self.tried(device, &command, settings)? else { continue };
            offered += 1;
            let steady = self.result(device, &command, settings)? == found;
            if steady && self.apart(&found, &expected) <= band(&self.product) {
                sound.push((*algorithm, command));
            }
        }
        let commands: Vec<&Command> = [&own].into_iter().chain(sound.iter().map(|(_, command)| command)).collect();
        let times = self.medians(device, &commands)?;
        let fastest = times[1..].iter().zip(&sound).min_by_key(|(ns, _)| **ns);
        let keeps = |ns: u64| (ns as f64) < times[0] as f64 * (1.0 - settings.faster_by);
        let algorithm: Option<Algorithm> = fastest.filter(|(ns, _)| keeps(**ns)).map(|(_, (algorithm, _))| *algorithm);
        Ok(Choice {
            kernel: self.kernel,
            own_ns: times[0],
            library_ns: fastest.map(|(ns, _)| *ns),
            offered,
            refused: offered - sound.len() as u32,
            algorithm,
        })
    }

    /// What a computation makes of the operands; none when it can't be enqueued.
    fn tried(&self, device: &mut dyn Device, command: &Command, settings: &Settings) -> Result<Option<Vec<u8>>, Fault> {
        let bytes = self.product.operand_bytes();
        for (i, (at, _)) in self.args.iter().enumerate() {
            device.upload(*at, &self.operand(i, bytes[i]))?;
        }
        let enqueued = device.enqueue(std::slice::from_ref(command)).is_ok();
        // What broke the device itself fails again here, and ends the tuning.
        device.enqueue(&[Command::Record(Stream::Compute, 0)])?;
        let begun = device.now();
        while !device.happened(0)? {
            if device.now().saturating_sub(begun) >= settings.deadline {
                return Err(Fault::Device(format!("it didn't end within {} s", settings.deadline.as_secs())));
            }
            device.pause();
        }
        if !enqueued {
            return Ok(None);
        }
        let last = self.args.len() - 1;
        let mut result = vec![0; bytes[last] as usize];
        device.download(self.args[last].0, &mut result)?;
        Ok(Some(result))
    }

    fn result(&self, device: &mut dyn Device, command: &Command, settings: &Settings) -> Result<Vec<u8>, Fault> {
        let result = self.tried(device, command, settings)?;
        result.ok_or_else(|| Fault::Device("it can't be launched".into()))
    }

    /// An operand's content: numbers between -1 and 1.
    fn operand(&self, i: usize, bytes: u64) -> Vec<u8> {
        let draws = Draws::new(1, &format!("{}/{i}", self.name));
        let number = |e: u64| (2.0 * draws.uniform(e) - 1.0) as f32;
        let last = i + 1 == self.args.len();
        let half = if last { self.product.rounded } else { i < 2 && self.product.elements == Elements::Bf16 };
        if half {
            return (0..bytes / 2).flat_map(|e| bf16::round(number(e)).to_le_bytes()).collect();
        }
        (0..bytes / 4).flat_map(|e| number(e).to_le_bytes()).collect()
    }

    /// How far two results are apart.
    fn apart(&self, found: &[u8], expected: &[u8]) -> f64 {
        distance(found, expected, if self.product.rounded { Elem::Bf16 } else { Elem::F32 })
    }

    /// The median time of a computation by each command, ns.
    fn medians(&self, device: &mut dyn Device, commands: &[&Command]) -> Result<Vec<u64>, Fault> {
        let mut rounds = vec![Vec::new(); commands.len()];
        for round in 0..=ROUNDS {
            for (command, times) in commands.iter().zip(&mut rounds) {
                let time = device.time(&self.product, command, TIMES)?;
                if round > 0 {
                    times.push((time.as_nanos() / u128::from(TIMES)) as u64);
                }
            }
        }
        let median = |mut times: Vec<u64>| {
            times.sort_unstable();
            times[times.len() / 2]
        };
        Ok(rounds.into_iter().map(median).collect())
    }
}

/// How far a right result may be from the kernel's (see [`distance`]), relative to its largest number: several times what sums in another order and the rounding of
/// elements make of numbers between -1 and 1. A product of other elements, or of the same in another order, is as far off as its numbers are large.
fn band(product: &Product) -> f64 {
    let unit = f64::from(f32::EPSILON) / 2.0;
    match product.elements {
        Elements::F32 => 4.0 * unit * f64::from(product.k).sqrt().max(4.0),
        Elements::Tf32 => (-8f64).exp2(),
        Elements::Bf16 => (-12f64).exp2(),
    }
}
