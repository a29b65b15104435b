//! All kernels of a program as PTX, in parallel, and the stages' images.

use super::child::{Generator, Running};
use super::{DeviceKernel, device_kernel, features};
use crate::error::CodegenError;
use crate::image;
use artifact::program::{Image, Launch, Stage};
use model::kernel::Kernel;
use model::target::Chip;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::thread;

/// Device code of one kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceCode {
    pub kernel: String,
    pub launches: Vec<Launch>,
    pub ptx: String,
}

/// Compiles kernels in children of this process; results come in the order of `kernels`. `progress` as for
/// [`crate::compile`].
///
/// # Errors
///
/// The error of the first kernel (by index) that failed.
pub fn compile_kernels(
    kernels: &[Kernel],
    chip: Chip,
    generator: &Generator,
    progress: &dyn Fn(usize, usize),
) -> Result<Vec<DeviceCode>, CodegenError> {
    let devices = kernels.iter().map(device_kernel).collect::<Result<Vec<_>, _>>()?;
    let workers = thread::available_parallelism().map_or(1, |n| n.get()).min(devices.len());
    let next = AtomicUsize::new(0);
    let (sender, receiver) = channel();
    let mut results = vec![None; devices.len()];
    thread::scope(|scope| {
        for _ in 0..workers {
            let (sender, next, devices) = (sender.clone(), &next, &devices);
            scope.spawn(move || {
                let mut child = generator.start();
                while let Some((index, device)) = take(next, devices) {
                    let result = match &mut child {
                        Ok(running) => one(running, device, chip),
                        Err(error) => Err(error.clone()),
                    };
                    if result.is_err() {
                        // The others finish what they have begun.
                        next.store(devices.len(), Ordering::Relaxed);
                    }
                    // The receiver lives until all workers are done.
                    let _ = sender.send((index, result));
                }
            });
        }
        drop(sender);
        for (done, (index, result)) in receiver.iter().enumerate() {
            results[index] = Some(result);
            progress(done + 1, devices.len());
        }
    });
    results.into_iter().flatten().collect()
}

fn take<'d>(next: &AtomicUsize, devices: &'d [DeviceKernel]) -> Option<(usize, &'d DeviceKernel)> {
    let index = next.fetch_add(1, Ordering::Relaxed);
    devices.get(index).map(|device| (index, device))
}

fn one(running: &mut Running, device: &DeviceKernel, chip: Chip) -> Result<DeviceCode, CodegenError> {
    let ptx = running.assembly(&device.name, &device.module(), (chip.name(), &features(chip)))?;
    Ok(DeviceCode { kernel: device.name.clone(), launches: device.launches.clone(), ptx })
}

/// The images of all stages: each one PTX module with the functions of its kernels, in the order of their index.
pub fn images(codes: &[DeviceCode], stages: &[Stage]) -> Result<Vec<Image>, CodegenError> {
    let one = |stage: &Stage| {
        let mut made = Image { stage: stage.stage, code: Vec::new(), exports: Vec::new() };
        for index in image::used(stage) {
            let code = codes.get(index as usize).ok_or_else(|| {
                CodegenError::new(
                    format!("image of stage {}", stage.stage),
                    "image",
                    format!("there is no kernel {index}"),
                )
            })?;
            let (head, functions) = split(&code.ptx)
                .ok_or_else(|| CodegenError::new(&code.kernel, "image", "its PTX has no .address_size"))?;
            if made.code.is_empty() {
                made.code.extend_from_slice(head.as_bytes());
            }
            made.exports.push((index, made.code.len() as u64));
            made.code.extend_from_slice(functions.as_bytes());
        }
        Ok(made)
    };
    stages.iter().map(one).collect()
}

/// What stands once in a module, and the functions.
fn split(ptx: &str) -> Option<(&str, &str)> {
    let directive = ptx.find(".address_size")?;
    let end = directive + ptx[directive..].find('\n')? + 1;
    Some(ptx.split_at(end))
}
