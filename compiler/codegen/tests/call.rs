//! Calls machine code: the one test file with `unsafe` code.

use memmap2::{Mmap, MmapOptions};

/// A guard zone on both sides of a buffer.
const GUARD_BYTES: usize = 4096;
const GUARD: u8 = 0xA5;
const ALIGN_BYTES: usize = 64;

/// An image, mapped read-execute.
pub struct Code(Mmap);

impl Code {
    pub fn map(code: &[u8]) -> Self {
        let mut map = MmapOptions::new().len(code.len().max(1)).map_anon().expect("memory for the code");
        map[..code.len()].copy_from_slice(code);
        Self(map.make_exec().expect("memory may be made executable"))
    }

    /// Calls the kernel at `offset` with the buffers.
    ///
    /// # Panics
    ///
    /// When the kernel wrote outside of a buffer.
    pub fn call(&self, offset: u64, buffers: &mut [Buffer]) {
        let mut table = buffers.iter_mut().map(|b| b.data().as_mut_ptr()).collect::<Vec<_>>();
        // SAFETY: the offset is an export of the image, whose kernels have this signature and read and write the
        // buffers that the table names, which are alive.
        unsafe {
            let kernel: extern "C" fn(*const *mut u8) = std::mem::transmute(self.0.as_ptr().add(offset as usize));
            kernel(table.as_mut_ptr());
        }
        for (i, buffer) in buffers.iter().enumerate() {
            buffer.check_guards(i);
        }
    }
}

/// A 64-byte aligned buffer between guard zones. It ends exactly at its upper guard.
pub struct Buffer {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Buffer {
    pub fn new(content: &[u8]) -> Self {
        let mut bytes = vec![GUARD; content.len() + 2 * GUARD_BYTES + ALIGN_BYTES];
        let start = GUARD_BYTES + bytes[GUARD_BYTES..].as_ptr().align_offset(ALIGN_BYTES);
        bytes[start..start + content.len()].copy_from_slice(content);
        Self { bytes, start, len: content.len() }
    }

    pub fn data(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }

    fn check_guards(&self, index: usize) {
        let (before, after) = (&self.bytes[..self.start], &self.bytes[self.start + self.len..]);
        if let Some(at) = before.iter().rposition(|b| *b != GUARD) {
            panic!("operand {index}: a write {} bytes before it", self.start - at);
        }
        if let Some(at) = after.iter().position(|b| *b != GUARD) {
            panic!("operand {index}: a write {at} bytes after its end");
        }
    }
}
