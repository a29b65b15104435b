//! Offsets in an arena.
//!
//! # Invariants
//!
//! 1. Every buffer starts at a multiple of [`ALIGN`].
//! 2. Two buffers that are live at the same step do not overlap.
//! 3. The size returned is the end of the highest buffer, rounded up to [`ALIGN`].

use artifact::program::{Place, Selector};

/// Alignment of every buffer, bytes: a cache line, and the widest vector.
pub const ALIGN: u64 = 64;

/// Rounds up to [`ALIGN`].
pub fn align(bytes: u64) -> u64 {
    bytes.next_multiple_of(ALIGN)
}

/// Hands out buffers one after the other.
#[derive(Clone, Copy, Debug, Default)]
pub struct Bump {
    /// Offset of the next buffer, aligned.
    pub at: u64,
}

impl Bump {
    /// One buffer.
    pub fn place(&mut self, bytes: u64) -> Place {
        self.ring(bytes, 1)
    }

    /// A ring of `slots` equal buffers (at least one).
    pub fn ring(&mut self, bytes: u64, slots: u32) -> Place {
        let slots = slots.max(1);
        let (offset, size) = (self.at, align(bytes));
        self.at = offset.saturating_add(size.saturating_mul(slots.into()));
        Place { offset, bytes, stride: if slots > 1 { size } else { 0 }, slots, by: Selector::Microbatch }
    }
}

/// A buffer that is there once.
pub fn one(offset: u64, bytes: u64) -> Place {
    Place { offset, bytes, stride: 0, slots: 1, by: Selector::Microbatch }
}

/// A temporary: written at step `first`, last read at step `last`, both inclusive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interval {
    pub first: usize,
    pub last: usize,
    pub bytes: u64,
}

/// Offsets for temporaries, and the bytes they take together: largest first, each at the lowest offset that is free for
/// its whole life. Work grows with the number of temporaries times the steps they live.
pub fn first_fit(intervals: &[Interval]) -> (Vec<u64>, u64) {
    let steps = intervals.iter().map(|i| i.last + 1).max().unwrap_or(0);
    // Buffers placed so far that are live at each step: (offset, end).
    let mut live: Vec<Vec<(u64, u64)>> = vec![Vec::new(); steps];
    let mut offsets = vec![0; intervals.len()];
    let mut total = 0;
    let mut order: Vec<usize> = (0..intervals.len()).collect();
    order.sort_by_key(|&i| (std::cmp::Reverse(intervals[i].bytes), intervals[i].first, i));
    for i in order {
        let Interval { first, last, bytes } = intervals[i];
        let mut taken: Vec<(u64, u64)> = live[first..=last].iter().flatten().copied().collect();
        taken.sort_unstable();
        let size = align(bytes);
        let mut offset = 0;
        for (from, to) in taken {
            if offset + size <= from {
                break;
            }
            offset = offset.max(to);
        }
        offsets[i] = offset;
        total = total.max(offset + size);
        live[first..=last].iter_mut().for_each(|at| at.push((offset, offset + size)));
    }
    (offsets, total)
}
