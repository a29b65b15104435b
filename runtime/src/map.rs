//! Machine code of the stages: images mapped read-execute, and calls into them.

use crate::error::RunError;
use artifact::bundle::Bundle;
use memmap2::{Mmap, MmapMut};

/// A kernel. Gets a pointer to its arguments' addresses. Compiled kernels never unwind; kernels linked in by a test may.
pub type KernelFn = unsafe extern "C-unwind" fn(*const *mut u8);

/// The kernels of every stage, by stage and by index into the manifest's list; and the maps that they live in.
pub struct Kernels {
    table: Vec<Vec<Option<KernelFn>>>,
    _maps: Vec<Mmap>,
}

impl Kernels {
    /// Maps a checked bundle's images. Whether this CPU can run them must have been checked too.
    ///
    /// # Errors
    /// When the system refuses executable memory.
    pub fn map(bundle: &Bundle) -> Result<Kernels, RunError> {
        let count = bundle.manifest.kernels.len();
        let mut table = vec![vec![None; count]; bundle.images.len()];
        let mut maps = Vec::with_capacity(bundle.images.len());
        for image in &bundle.images {
            let map = executable(&image.code).map_err(|source| RunError::Map { stage: image.stage, source })?;
            for &(kernel, offset) in &image.exports {
                let start = map.as_ptr().wrapping_add(offset as usize);
                // SAFETY: the checked export table says that a kernel starts here; the map lives as long as the table.
                let function = unsafe { std::mem::transmute::<*const u8, KernelFn>(start) };
                table[image.stage.index()][kernel as usize] = Some(function);
            }
            maps.push(map);
        }
        Ok(Kernels { table, _maps: maps })
    }

    /// Kernels that are part of this program instead of an image, by stage and kernel.
    ///
    /// # Safety
    /// Each one must stay within its arguments' places and follow the manifest's sizes.
    pub unsafe fn linked(table: Vec<Vec<Option<KernelFn>>>) -> Kernels {
        Kernels { table, _maps: Vec::new() }
    }

    /// Runs a kernel of a stage.
    pub fn call(&self, stage: usize, kernel: u32, args: &[*mut u8]) {
        let function = self.table[stage][kernel as usize].expect("a checked bundle has the kernels that it calls");
        // SAFETY: the arguments are addresses of checked places, as many as the kernel takes.
        unsafe { function(args.as_ptr()) }
    }
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
        let kernels = Kernels { table: vec![vec![None, Some(function)]], _maps: vec![map] };
        let mut word = 0u32;
        kernels.call(0, 1, &[(&raw mut word).cast()]);
        assert_eq!(word, 42);
    }
}
