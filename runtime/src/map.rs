//! Code of the stages: images mapped read-execute, and calls into them; or device kernels for the emulator.

use crate::cpu::EMULATED;
use crate::error::RunError;
use artifact::bundle::Bundle;
use artifact::program::{Image, Launch, Place};
use emulated::{Memory, Module, Operand, Order};
use memmap2::{Mmap, MmapMut};
use std::cell::Cell;
use std::sync::Mutex;

/// A kernel. Gets a pointer to its arguments' addresses. Compiled kernels never unwind; kernels linked in by a test may.
pub type KernelFn = unsafe extern "C-unwind" fn(*const *mut u8);

/// The kernels of every stage, by stage and by index into the manifest's list; and the maps that they live in.
pub struct Kernels {
    table: Vec<Vec<Option<Function>>>,
    _maps: Vec<Mmap>,
}

/// A kernel as it is called.
enum Function {
    Native(KernelFn),
    Emulated(Box<DeviceKernel>),
}

/// A device kernel. A module runs one block at a time; the lock is never waited for, since a stage's kernels are called by its rank.
struct DeviceKernel {
    module: Mutex<Module>,
    launches: Vec<Launch>,
    /// Its last argument is scratch, which holds nothing at a call.
    scratch: bool,
}

impl Kernels {
    /// Maps a checked bundle's images. Whether this CPU can run them must have been checked too.
    ///
    /// # Errors
    /// When the system refuses executable memory.
    pub fn map(bundle: &Bundle) -> Result<Kernels, RunError> {
        if bundle.manifest.cpu == EMULATED {
            return Kernels::emulated(bundle);
        }
        let mut table = empty(bundle);
        let mut maps = Vec::with_capacity(bundle.images.len());
        for image in &bundle.images {
            let map = executable(&image.code).map_err(|source| RunError::Map { stage: image.stage, source })?;
            for &(kernel, offset) in &image.exports {
                let start = map.as_ptr().wrapping_add(offset as usize);
                // SAFETY: the checked export table says that a kernel starts here; the map lives as long as the table.
                let function = unsafe { std::mem::transmute::<*const u8, KernelFn>(start) };
                table[image.stage.index()][kernel as usize] = Some(Function::Native(function));
            }
            maps.push(map);
        }
        Ok(Kernels { table, _maps: maps })
    }

    /// Loads the objects of device kernels.
    fn emulated(bundle: &Bundle) -> Result<Kernels, RunError> {
        let mut table = empty(bundle);
        for image in &bundle.images {
            for (i, &(kernel, _)) in image.exports.iter().enumerate() {
                let entry = &bundle.manifest.kernels[kernel as usize];
                let module = Module::load(part(image, i))
                    .map_err(|what| RunError::Emulator { kernel: entry.name.clone(), what })?;
                let launches = entry.launches.clone();
                let kernel_of = DeviceKernel { module: Mutex::new(module), launches, scratch: entry.scratch_bytes > 0 };
                table[image.stage.index()][kernel as usize] = Some(Function::Emulated(Box::new(kernel_of)));
            }
        }
        Ok(Kernels { table, _maps: Vec::new() })
    }

    /// Kernels that are part of this program instead of an image, by stage and kernel.
    ///
    /// # Safety
    /// Each one must stay within its arguments' places and follow the manifest's sizes.
    pub unsafe fn linked(table: Vec<Vec<Option<KernelFn>>>) -> Kernels {
        let native = |row: Vec<Option<KernelFn>>| row.into_iter().map(|f| f.map(Function::Native)).collect();
        Kernels { table: table.into_iter().map(native).collect(), _maps: Vec::new() }
    }

    /// Runs a kernel of a stage. `places` are those that the arguments are addresses of.
    ///
    /// # Panics
    /// When the emulator finds that a device kernel does wrong.
    pub fn call(&self, stage: usize, kernel: u32, args: &[*mut u8], places: &[Place]) {
        let function = self.table[stage][kernel as usize].as_ref();
        match function.expect("a checked bundle has the kernels that it calls") {
            // SAFETY: the arguments are addresses of checked places, as many as the kernel takes.
            Function::Native(function) => unsafe { function(args.as_ptr()) },
            Function::Emulated(kernel) => kernel.run(args, places),
        }
    }
}

impl DeviceKernel {
    fn run(&self, args: &[*mut u8], places: &[Place]) {
        let operand = |(i, (start, place)): (usize, (&*mut u8, &Place))| {
            // SAFETY: the argument is the address of a checked place of that size, which only this rank's thread touches now.
            let bytes = unsafe { std::slice::from_raw_parts(start.cast::<Cell<u8>>(), place.bytes as usize) };
            Operand { bytes, initialised: !(self.scratch && i + 1 == args.len()) }
        };
        let mut memory = Memory::new(args.iter().zip(places).enumerate().map(operand).collect());
        let module = self.module.lock().expect("a launch that panicked ended the run");
        for launch in &self.launches {
            let launch = emulated::Launch { entry: &launch.entry, grid: launch.grid, threads: launch.threads };
            let done = emulated::launch(&module, &launch, &mut memory, Order::Ascending);
            done.unwrap_or_else(|fault| panic!("{fault}"));
        }
    }
}

/// A table of no kernels.
fn empty(bundle: &Bundle) -> Vec<Vec<Option<Function>>> {
    let row = || bundle.manifest.kernels.iter().map(|_| None).collect();
    bundle.images.iter().map(|_| row()).collect()
}

/// The bytes of an image's `i`-th kernel: up to the next one.
fn part(image: &Image, i: usize) -> &[u8] {
    let start = image.exports[i].1 as usize;
    let end = image.exports.get(i + 1).map_or(image.code.len(), |next| next.1 as usize);
    image.code.get(start..end).unwrap_or_default()
}

/// A read-execute copy of the code, at the start of a page.
fn executable(code: &[u8]) -> std::io::Result<Mmap> {
    let mut map = MmapMut::map_anon(code.len().max(1))?;
    map[..code.len()].copy_from_slice(code);
    map.make_exec()
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    #[test]
    fn mapped_code_runs() {
        // mov rax, [rdi]; mov dword ptr [rax], 42; ret
        let code = [0x48, 0x8b, 0x07, 0xc7, 0x00, 42, 0, 0, 0, 0xc3];
        let map = executable(&code).unwrap();
        // SAFETY: the bytes above are a kernel.
        let function = unsafe { std::mem::transmute::<*const u8, KernelFn>(map.as_ptr()) };
        let kernels = Kernels { table: vec![vec![None, Some(Function::Native(function))]], _maps: vec![map] };
        let mut word = 0u32;
        let place = Place { offset: 0, bytes: 4, stride: 0, slots: 1, by: artifact::program::Selector::Microbatch };
        kernels.call(0, 1, &[(&raw mut word).cast()], &[place]);
        assert_eq!(word, 42);
    }
}
