//! Every kernel of a bundle once, alone, on given operands: what it changes can be compared between devices.
//!
//! A kernel's operands are those of its first call in the bundle. They hold numbers drawn by the kernel's name, positive and below 1 (states and
//! row sums have roots and logarithms taken), token ids where the call reads tokens, and an optimizer's real vector of numbers.

use crate::device::pipeline::Machine;
use crate::device::{Command, Device, Fault, Room, Stream};
use crate::draw::Draws;
use crate::error::RunError;
use crate::hyper::{self, Terms};
use artifact::ids::RankId;
use artifact::program::{Call, HYPER_LEN, KernelEntry, Manifest, Place, Stage};
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
    let count = place.bytes / 4;
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
    (0..count).flat_map(|n| ((LEAST + (1.0 - LEAST) * draws.uniform(n)) as f32).to_le_bytes()).collect()
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

/// How far two contents of an operand are apart: the largest difference by the largest number, both read as f32 (as f64 where
/// there are eight bytes). 0 is equal bits; infinite where the sizes differ or a number is none.
pub fn distance(found: &[u8], expected: &[u8]) -> f64 {
    if found == expected {
        return 0.0;
    }
    if found.len() != expected.len() {
        return f64::INFINITY;
    }
    let numbers = |bytes: &[u8]| -> Vec<f64> {
        if bytes.len() == 8 {
            return bytes.as_chunks().0.iter().map(|&b| f64::from_le_bytes(b)).collect();
        }
        bytes.as_chunks().0.iter().map(|&b| f64::from(f32::from_le_bytes(b))).collect()
    };
    let (found, expected) = (numbers(found), numbers(expected));
    let largest = expected.iter().filter(|x| x.is_finite()).fold(0.0f64, |most, x| most.max(x.abs()));
    let apart = found.iter().zip(&expected).map(|(f, e)| if f == e { 0.0 } else { (f - e).abs() });
    let most = apart.fold(0.0, |most: f64, d| if d.is_nan() { f64::INFINITY } else { most.max(d) });
    if most == 0.0 || most.is_infinite() { most } else { most / largest }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_are_relative_to_the_largest_number() {
        let bytes = |numbers: &[f32]| -> Vec<u8> { numbers.iter().flat_map(|x| x.to_le_bytes()).collect() };
        let expected = bytes(&[1.0, -4.0, 0.0]);
        assert_eq!(distance(&expected, &expected), 0.0);
        assert_eq!(distance(&bytes(&[1.0, -4.0, 0.5]), &expected), 0.125);
        assert_eq!(distance(&bytes(&[1.0, f32::NAN, 0.0]), &expected), f64::INFINITY);
        assert_eq!(distance(&bytes(&[1.0]), &expected), f64::INFINITY);
        let infinite = bytes(&[f32::INFINITY, 2.0, 1.0]);
        assert_eq!(distance(&bytes(&[f32::INFINITY, 2.0, 2.0]), &infinite), 0.5);
        assert_eq!(distance(&bytes(&[1.0, 2.0, 1.0]), &infinite), f64::INFINITY);
        assert_eq!(distance(&3.0f64.to_le_bytes(), &2.0f64.to_le_bytes()), 0.5);
    }
}
