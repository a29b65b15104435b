//! Every kernel of a bundle once, alone, on given operands: what it changes can be compared between devices.
//!
//! A kernel's operands are those of its first call in the bundle. They hold numbers drawn by the kernel's name, each as the operand's elements, positive
//! and below 1 (states and row sums have roots and logarithms taken), token ids where the call reads tokens, and an optimizer's real vector of numbers.

use crate::device::pipeline::Machine;
use crate::device::{Command, Device, Fault, Room, Stream};
use crate::draw::Draws;
use crate::error::RunError;
use crate::hyper::{self, Terms};
use artifact::bf16;
use artifact::ids::RankId;
use artifact::program::{Call, Elem, HYPER_LEN, KernelEntry, Manifest, Place, Stage};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The smallest number drawn.
const LEAST: f64 = 0.05;
/// The update whose learning rate and step count the operands have.
const UPDATE: u64 = 3;

/// What a kernel changed.
#[derive(Clone, Debug, PartialEq)]
pub struct Probe {
    pub kernel: String,
    /// By operand: its content afterwards; those that are as before are left out.
    pub changed: BTreeMap<usize, Vec<u8>>,
    /// From the launch to its end, with all that lies between.
    pub time: Duration,
}

/// Runs every kernel that the bundle calls, on its stage's rank, each for at most so long.
///
/// # Errors
/// What the machine lacks, or which kernel failed how.
pub fn probe(manifest: &Manifest, machine: &dyn Machine, deadline: Duration) -> Result<Vec<Probe>, RunError> {
    let mut probes = Vec::new();
    // Ranks that share a transport would wait for each other: each is on its own.
    for rank in 0..manifest.memory.len() as u32 {
        let calls: Vec<(usize, &Call)> = first_calls(manifest, RankId(rank));
        if calls.is_empty() {
            continue;
        }
        let room = Room { staging_bytes: 1, events: 1, marks: 1 };
        let mut device = machine.device(manifest, RankId(rank), room)?;
        device.working(true);
        for (stage, call) in calls {
            let kernel = &manifest.kernels[call.kernel as usize];
            let done = one(&mut *device, manifest, stage, call, deadline).map_err(|fault| {
                device.abort();
                let (Fault::Device(cause) | Fault::Peer(_, cause)) = fault else {
                    return RunError::Device(format!("the kernel `{}` was killed", kernel.name));
                };
                RunError::Device(format!("the kernel `{}` failed: {cause}", kernel.name))
            })?;
            probes.push(done);
        }
        device.working(false);
    }
    Ok(probes)
}

/// The first call of each kernel that no lower rank calls, on a rank.
pub(crate) fn first_calls(manifest: &Manifest, rank: RankId) -> Vec<(usize, &Call)> {
    let mut seen = vec![false; manifest.kernels.len()];
    let mut found = Vec::new();
    for (index, stage) in manifest.stages.iter().enumerate() {
        for call in stage.bodies.calls() {
            let first = !std::mem::replace(&mut seen[call.kernel as usize], true);
            if first && stage.rank == rank {
                found.push((index, call));
            }
        }
    }
    found
}

fn one(
    device: &mut dyn Device,
    manifest: &Manifest,
    stage: usize,
    call: &Call,
    deadline: Duration,
) -> Result<Probe, Fault> {
    let kernel = &manifest.kernels[call.kernel as usize];
    let operands: Vec<Vec<u8>> = (0..call.args.len()).map(|i| operand(manifest, stage, kernel, call, i)).collect();
    for (place, bytes) in call.args.iter().zip(&operands) {
        device.upload(place.at(0), bytes)?;
    }
    let args = call.args.iter().map(|place| (place.at(0), *place)).collect();
    let start = Instant::now();
    let launch = Command::Launch { stage, kernel: call.kernel, args };
    device.enqueue(&[launch, Command::Record(Stream::Compute, 0)])?;
    let begun = device.now();
    while !device.happened(0)? {
        if device.now().saturating_sub(begun) >= deadline {
            return Err(Fault::Device(format!("it didn't end within {} s", deadline.as_secs())));
        }
        device.pause();
    }
    let time = start.elapsed();
    let mut changed = BTreeMap::new();
    // Scratch holds nothing that anyone reads.
    let outputs = call.args.len() - usize::from(kernel.scratch_bytes > 0);
    for (i, place) in call.args[..outputs].iter().enumerate() {
        let mut after = vec![0; place.bytes as usize];
        device.download(place.at(0), &mut after)?;
        if after != operands[first_of(call, i)] {
            changed.insert(i, after);
        }
    }
    Ok(Probe { kernel: kernel.name.clone(), changed, time })
}

/// The last operand in the same place, whose content is the one that was uploaded last.
fn first_of(call: &Call, i: usize) -> usize {
    call.args.iter().rposition(|place| place.offset == call.args[i].offset).unwrap_or(i)
}

/// What an operand holds before the call.
fn operand(manifest: &Manifest, stage: usize, kernel: &KernelEntry, call: &Call, i: usize) -> Vec<u8> {
    let (place, of) = (&call.args[i], &manifest.stages[stage]);
    let draws = Draws::new(1, &format!("{}/{i}", kernel.name));
    // Scratch is of f32.
    let elem = kernel.elements.get(i).copied().unwrap_or(Elem::F32);
    let count = place.bytes / elem.bytes();
    if is(place, of.io.tokens) || is(place, of.io.targets) {
        let id = |n| (draws.at(n) % u64::from(manifest.data.vocab)) as u32;
        return (0..count).flat_map(|n| id(n).to_le_bytes()).collect();
    }
    if is(place, of.io.loss) {
        return vec![0; place.bytes as usize];
    }
    if place.offset.wrapping_sub(of.io.hyper.offset) < of.io.hyper.bytes {
        return vectors(manifest, of, place);
    }
    let number = |n| LEAST + (1.0 - LEAST) * draws.uniform(n);
    match elem {
        Elem::Bf16 => (0..count).flat_map(|n| bf16::round(number(n) as f32).to_le_bytes()).collect(),
        Elem::F64 => (0..count).flat_map(|n| number(n).to_le_bytes()).collect(),
        Elem::F32 | Elem::U32 => (0..count).flat_map(|n| (number(n) as f32).to_le_bytes()).collect(),
    }
}

fn is(place: &Place, io: Option<Place>) -> bool {
    io.is_some_and(|io| io.offset == place.offset)
}

/// The stretch of a stage's optimizer vectors that lies in a place.
fn vectors(manifest: &Manifest, stage: &Stage, place: &Place) -> Vec<u8> {
    let mut all: Vec<f32> = Vec::new();
    for group in &manifest.groups {
        let vectors = hyper::vectors(&group.optimizer, &group.learning_rate, UPDATE, &Terms::NONE);
        vectors.iter().for_each(|vector| all.extend_from_slice(vector));
    }
    debug_assert_eq!(all.len(), manifest.groups.len() * 2 * HYPER_LEN);
    let bytes: Vec<u8> = all.iter().flat_map(|x| x.to_le_bytes()).collect();
    let start = (place.offset - stage.io.hyper.offset) as usize;
    bytes[start..start + place.bytes as usize].to_vec()
}
