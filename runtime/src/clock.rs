//! CPU time of the calling thread: what a kernel costs, whoever else wants the core.

use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds of CPU time that this thread has used.
pub fn thread_ns() -> u64 {
    let t = clock_gettime(ClockId::ThreadCPUTime);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// Durations of one kind of kernel body; a fixed amount of memory however many are added.
#[derive(Clone, Debug)]
pub struct Samples {
    recent_ns: Box<[u64]>,
    count: u64,
}

/// Durations that [`Samples`] remembers.
const REMEMBERED: usize = 256;

impl Default for Samples {
    fn default() -> Self {
        Samples { recent_ns: vec![0; REMEMBERED].into(), count: 0 }
    }
}

impl Samples {
    pub fn add(&mut self, ns: u64) {
        self.recent_ns[self.count as usize % REMEMBERED] = ns;
        self.count += 1;
    }

    /// Median of the last [`REMEMBERED`] durations, 0 when there are none.
    pub fn median_ns(&self) -> u64 {
        let mut known = self.recent_ns[..REMEMBERED.min(self.count as usize)].to_vec();
        known.sort_unstable();
        known.get(known.len() / 2).copied().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_of_the_recent_ones() {
        let mut s = Samples::default();
        assert_eq!(s.median_ns(), 0);
        s.add(10);
        s.add(30);
        s.add(20);
        assert_eq!(s.median_ns(), 20);
        (0..REMEMBERED).for_each(|_| s.add(7));
        assert_eq!(s.median_ns(), 7);
    }
}
