//! What a run allocates: an arena per rank, of exactly the planned size, and nothing that grows with the run's length.

use crate::toy::{self, Place, Schedule, toy};
use runtime::Observer;
use runtime::observe::UpdateRecord;
use std::alloc::{GlobalAlloc, Layout, System};
use std::io;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

/// Counts live bytes, and how often the layout of [`ARENA_BYTES`] is asked for.
pub struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static ARENA_BYTES: AtomicUsize = AtomicUsize::new(0);
static ARENAS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: passes everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size(), SeqCst);
        if layout.align() == 64 && layout.size() == ARENA_BYTES.load(SeqCst) {
            ARENAS.fetch_add(1, SeqCst);
        }
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), SeqCst);
        unsafe { System.dealloc(start, layout) }
    }
}

/// Live bytes at some updates, kept without allocating.
struct Sampler {
    at: [(u64, usize); 2],
}

impl Observer for Sampler {
    fn update(&mut self, r: &UpdateRecord) -> io::Result<()> {
        for (update, live) in &mut self.at {
            if *update == r.update + 1 {
                *live = LIVE.load(SeqCst);
            }
        }
        Ok(())
    }
}

#[test]
#[ignore = "counts the whole process's memory; run alone by the next test"]
fn alone() {
    let toy = toy(Schedule::Gpipe, 1, 2);
    let manifest = toy::manifest(toy);
    ARENA_BYTES.store(manifest.memory[0].total as usize, SeqCst);
    let place = Place::new();
    toy::try_run(toy, &place.options(3), &mut ()).unwrap();
    assert_eq!(ARENAS.load(SeqCst), 1);
    for (schedule, ranks) in [(Schedule::Gpipe, 2), (Schedule::Async, 4)] {
        // Much longer than what may wait in a queue: at both samples every rank's thread is there. What threads take once may come late.
        let samples = [10, 900];
        let mut sampler = Sampler { at: samples.map(|update| (update, 0)) };
        let summary = toy::try_run(toy::toy(schedule, ranks, 2), &place.options(1000), &mut sampler).unwrap();
        let [(_, early), (_, late)] = sampler.at;
        let arenas: u64 = summary.ranks.iter().map(|r| r.allocated_bytes).sum();
        assert!(early as u64 > arenas);
        let updates = (samples[1] - samples[0]) as usize;
        assert!(late < early + updates, "{schedule:?}: {early} bytes, {late} after {updates} updates more");
    }
}

#[test]
fn memory_is_the_plan_and_does_not_grow() {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["memory::alone", "--exact", "--ignored", "--test-threads=1"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}
