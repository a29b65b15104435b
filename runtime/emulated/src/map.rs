//! A loaded object: its code executable, its shared memory writable.

use crate::ffi;
use crate::object::{Layout, PAGE_BYTES, layout};
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};
use std::ffi::c_void;
use std::ops::Range;
use std::ptr::null_mut;

/// A kernel's functions. Its shared memory is part of it, so one module runs one block at a time.
pub struct Module {
    start: *mut c_void,
    layout: Layout,
}

// SAFETY: the mapping is the module's own; whoever has the module may run it, on any thread.
unsafe impl Send for Module {}

impl Module {
    /// Loads an object of the compiler.
    ///
    /// # Errors
    ///
    /// A sentence, when the object needs what the emulator does not have, or memory is refused.
    pub fn load(object: &[u8]) -> Result<Self, String> {
        let layout = layout(object, ffi::address)?;
        let len = layout.bytes.len();
        debug_assert_eq!((len % PAGE_BYTES, layout.shared_start % PAGE_BYTES), (0, 0), "whole pages");
        // SAFETY: new memory, written within its length before its code may be executed.
        let start = unsafe {
            let start = mmap_anonymous(null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
                .map_err(|e| format!("no memory for a kernel: {e}"))?;
            std::ptr::copy_nonoverlapping(layout.bytes.as_ptr(), start.cast(), len);
            start
        };
        let module = Self { start, layout };
        // SAFETY: whole pages of our own mapping.
        unsafe { mprotect(start, module.layout.shared_start, MprotectFlags::READ | MprotectFlags::EXEC) }
            .map_err(|e| format!("memory may not be made executable: {e}"))?;
        Ok(module)
    }

    /// Where a kernel's function starts.
    pub(crate) fn entry(&self, name: &str) -> Option<usize> {
        self.layout.entries.get(name).map(|offset| self.start as usize + offset)
    }

    /// The addresses of constants, and of each shared array.
    pub(crate) fn constants(&self) -> Range<usize> {
        self.start as usize..self.start as usize + self.layout.shared_start
    }

    pub(crate) fn shared(&self) -> Vec<Range<usize>> {
        let start = self.start as usize;
        self.layout.shared.iter().map(|r| start + r.start..start + r.end).collect()
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: our own mapping, which nothing uses any more.
        let _ = unsafe { munmap(self.start, self.layout.bytes.len()) };
    }
}
