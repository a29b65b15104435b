//! All kernels of a program as PTX, in parallel, and the stages' images.

use super::child::Generator;
use super::{DeviceKernel, device_kernel, emulated_object, features};
use crate::context::CodegenContext;
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
    /// PTX, or an object for the emulator.
    pub code: Vec<u8>,
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
    in_parallel(
        kernels,
        progress,
        || generator.start(),
        |running, device| {
            Ok(running.assembly(&device.name, &device.module(), (chip.name(), &features(chip)))?.into_bytes())
        },
    )
}

/// The chip whose LLVM IR is emulated; kernels use nothing of later ones.
const EMULATED_CHIP: Chip = Chip::Sm80;

/// As [`compile_kernels`], to objects for the emulator.
pub fn compile_emulated(kernels: &[Kernel], progress: &dyn Fn(usize, usize)) -> Result<Vec<DeviceCode>, CodegenError> {
    in_parallel(kernels, progress, CodegenContext::new, |context, device| {
        emulated_object(context, &device.name, &device.module(), EMULATED_CHIP)
    })
}

/// Compiles kernels on the available cores, each with a worker of its own.
fn in_parallel<W>(
    kernels: &[Kernel],
    progress: &dyn Fn(usize, usize),
    start: impl Fn() -> Result<W, CodegenError> + Sync,
    compile: impl Fn(&mut W, &DeviceKernel) -> Result<Vec<u8>, CodegenError> + Sync,
) -> Result<Vec<DeviceCode>, CodegenError> {
    let devices = kernels.iter().map(device_kernel).collect::<Result<Vec<_>, _>>()?;
    let workers = thread::available_parallelism().map_or(1, |n| n.get()).min(devices.len());
    let next = AtomicUsize::new(0);
    let (sender, receiver) = channel();
    let mut results = vec![None; devices.len()];
    thread::scope(|scope| {
        for _ in 0..workers {
            let (sender, next, devices) = (sender.clone(), &next, &devices);
            let (start, compile) = (&start, &compile);
            scope.spawn(move || {
                let mut worker = start();
                while let Some((index, device)) = take(next, devices) {
                    let result = match &mut worker {
                        Ok(worker) => compile(worker, device),
                        Err(error) => Err(error.clone()),
                    };
                    let (kernel, launches) = (device.name.clone(), device.launches.clone());
                    let result = result.map(|code| DeviceCode { kernel, launches, code });
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

/// The images of all stages: each one PTX module with the functions of its kernels, in the order of their index; or their
/// objects for the emulator, one after the other.
pub fn images(codes: &[DeviceCode], stages: &[Stage]) -> Result<Vec<Image>, CodegenError> {
    let one = |stage: &Stage| {
        let mut made = Image { stage: stage.stage, code: Vec::new(), exports: Vec::new(), cubin: None };
        for index in image::used(stage) {
            let code = codes.get(index as usize).ok_or_else(|| {
                CodegenError::new(
                    format!("image of stage {}", stage.stage),
                    "image",
                    format!("there is no kernel {index}"),
                )
            })?;
            let (head, rest) = code.split();
            if made.code.is_empty() {
                made.code.extend_from_slice(head);
            }
            made.exports.push((index, made.code.len() as u64));
            made.code.extend_from_slice(rest);
        }
        Ok(made)
    };
    stages.iter().map(one).collect()
}

impl DeviceCode {
    /// PTX as text; none of an object.
    pub fn ptx(&self) -> Option<&str> {
        std::str::from_utf8(&self.code).ok().filter(|text| text.contains(".address_size"))
    }

    /// What stands once in a module of PTX, and the functions. An object has no such part.
    fn split(&self) -> (&[u8], &[u8]) {
        let head = self.ptx().map_or(0, |text| {
            let directive = text.find(".address_size").unwrap_or(0);
            text[directive..].find('\n').map_or(0, |line| directive + line + 1)
        });
        self.code.split_at(head)
    }
}
