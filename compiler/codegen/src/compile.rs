//! All kernels of a program, in parallel.

use crate::context::CodegenContext;
use crate::error::CodegenError;
use crate::image;
use crate::pipeline::{Object, compile_kernel};
use artifact::program::{Image, Stage};
use model::kernel::Kernel;
use model::target::CpuClass;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread;

/// Compiles the kernels and makes one image per stage, in the order of `stages`. `progress` is called on this thread
/// with (kernels done, kernels in all). Equal arguments give equal bytes.
///
/// # Errors
///
/// The error of the first kernel (by index) that failed.
pub fn compile(
    kernels: &[Kernel],
    stages: &[Stage],
    cpu: CpuClass,
    progress: &dyn Fn(usize, usize),
) -> Result<Vec<Image>, CodegenError> {
    let objects = compile_kernels(kernels, cpu, progress)?;
    stages.iter().map(|stage| image::of_stage(stage, &objects)).collect()
}

/// Compiles kernels on the available cores; objects come in the order of `kernels`.
pub fn compile_kernels(
    kernels: &[Kernel],
    cpu: CpuClass,
    progress: &dyn Fn(usize, usize),
) -> Result<Vec<Object>, CodegenError> {
    let workers = thread::available_parallelism().map_or(1, |n| n.get()).min(kernels.len());
    let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let (sender, receiver) = channel();
    let mut results = vec![None; kernels.len()];
    thread::scope(|scope| {
        for _ in 0..workers {
            let (sender, next, failed) = (sender.clone(), &next, &failed);
            scope.spawn(move || work(kernels, cpu, next, failed, &sender));
        }
        drop(sender);
        for (done, (index, result)) in receiver.iter().enumerate() {
            results[index] = Some(result);
            progress(done + 1, kernels.len());
        }
    });
    // Kernels without a result were skipped because another one failed, and that one's error ends the collection.
    results.into_iter().flatten().collect()
}

/// Takes kernels until there are none, or one failed.
fn work(
    kernels: &[Kernel],
    cpu: CpuClass,
    next: &AtomicUsize,
    failed: &AtomicBool,
    sender: &Sender<(usize, Result<Object, CodegenError>)>,
) {
    let context = CodegenContext::new();
    while !failed.load(Ordering::Relaxed) {
        let index = next.fetch_add(1, Ordering::Relaxed);
        let Some(kernel) = kernels.get(index) else { return };
        let result = context.as_ref().map_err(Clone::clone).and_then(|c| compile_kernel(c, kernel, cpu));
        if result.is_err() {
            failed.store(true, Ordering::Relaxed);
        }
        // The receiver lives until all workers are done.
        let _ = sender.send((index, result));
    }
}
