//! A rank's memory: one allocation, of exactly the size that the memory plan says, zeroed, aligned to 64 bytes.
//!
//! # Why the views are sound
//!
//! A rank's own thread reads and writes its arena; a peer's thread writes a receive slot or reads a send slot while a transfer
//! is under way. The stream's rules (claimed and released slots, see `artifact::stream`) keep the two apart, and
//! `artifact::verify` proves that a bundle's streams follow them. So no view is taken of a slot while it is
//! offered or posted, and all access from other threads goes through [`Slot`].

use artifact::program::Place;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

const ALIGN: usize = 64;

/// See the module's text.
#[derive(Debug)]
pub struct Arena {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the arena owns its memory; what threads do to it is ordered as the module's text says.
unsafe impl Send for Arena {}
unsafe impl Sync for Arena {}

impl Arena {
    /// An arena of `bytes` zero bytes; none when the machine doesn't have them.
    pub fn new(bytes: u64) -> Option<Arena> {
        let layout = Layout::from_size_align(usize::try_from(bytes).ok()?, ALIGN).ok()?;
        if layout.size() == 0 {
            return None;
        }
        // SAFETY: the layout's size is not zero.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Arena { start, layout })
    }

    pub fn bytes(&self) -> u64 {
        self.layout.size() as u64
    }

    /// Address of micro-batch `mb`'s slot of a place.
    pub fn address(&self, place: &Place, mb: u64) -> *mut u8 {
        let at = place.at(mb);
        assert!(at + place.bytes <= self.bytes(), "a checked place lies inside the arena");
        // SAFETY: in bounds, by the line above.
        unsafe { self.start.as_ptr().add(at as usize) }
    }

    /// The same slot, for a transfer.
    pub fn slot(&self, place: &Place, mb: u64) -> Slot {
        Slot { start: self.address(place, mb), bytes: place.bytes as usize }
    }

    /// Copies bytes to an offset. As a transfer does: the caller knows that nobody else touches them now.
    pub fn put(&self, offset: u64, bytes: &[u8]) {
        assert!(offset + bytes.len() as u64 <= self.bytes());
        // SAFETY: in bounds by the line above; not touched otherwise, as the caller knows.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.start.as_ptr().add(offset as usize), bytes.len()) }
    }

    /// Copies bytes from an offset; as [`Arena::put`].
    pub fn get(&self, offset: u64, out: &mut [u8]) {
        assert!(offset + out.len() as u64 <= self.bytes());
        // SAFETY: as in `put`.
        unsafe { std::ptr::copy_nonoverlapping(self.start.as_ptr().add(offset as usize), out.as_mut_ptr(), out.len()) }
    }

    /// The slot's content as numbers. Must not be in a transfer.
    pub fn view<T: bytemuck::Pod>(&self, place: &Place, mb: u64) -> &[T] {
        let start = self.address(place, mb).cast::<T>();
        assert!(start.is_aligned());
        // SAFETY: in bounds and aligned by the checks above, any bytes are a T, and not being written (module's text).
        unsafe { std::slice::from_raw_parts(start, place.bytes as usize / size_of::<T>()) }
    }

    /// The slot's content as numbers, to write. Must not be in a transfer.
    pub fn view_mut<T: bytemuck::Pod>(&mut self, place: &Place, mb: u64) -> &mut [T] {
        let start = self.address(place, mb).cast::<T>();
        assert!(start.is_aligned());
        // SAFETY: as in `view`; `&mut self` keeps the rank's own thread from having a second view.
        unsafe { std::slice::from_raw_parts_mut(start, place.bytes as usize / size_of::<T>()) }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}

/// One end of a transfer: a slot that its rank won't touch until the transfer is done.
#[derive(Clone, Copy, Debug)]
pub struct Slot {
    start: *mut u8,
    bytes: usize,
}

// SAFETY: only the transport reads or writes through a slot, and only between claim and completion.
unsafe impl Send for Slot {}

impl Slot {
    /// Copies this slot's content over another's, of the same size, elsewhere.
    pub fn copy_to(self, target: Slot) {
        assert_eq!(self.bytes, target.bytes, "the ends of a transfer are equally large");
        // SAFETY: both are slots of live arenas (ranks outlive the transport), different places, owned by the transfer.
        unsafe { std::ptr::copy_nonoverlapping(self.start, target.start, self.bytes) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_zeroed_aligned_and_of_the_asked_size() {
        let mut arena = Arena::new(320).unwrap();
        assert_eq!(arena.bytes(), 320);
        let ring = Place { offset: 64, bytes: 12, stride: 64, slots: 4, by: Default::default() };
        assert!(arena.view::<f32>(&ring, 3).iter().all(|&x| x == 0.0));
        arena.view_mut::<f32>(&ring, 5).copy_from_slice(&[1.0, 2.0, 3.0]);
        assert_eq!(arena.view::<f32>(&ring, 1), [1.0, 2.0, 3.0]);
        assert_eq!(arena.address(&ring, 0) as usize % 64, 0);
        arena.slot(&ring, 1).copy_to(arena.slot(&ring, 2));
        assert_eq!(arena.view::<f32>(&ring, 2), [1.0, 2.0, 3.0]);
    }

    #[test]
    fn refuses_what_no_machine_has() {
        assert!(Arena::new(u64::MAX).is_none() && Arena::new(0).is_none());
    }
}
