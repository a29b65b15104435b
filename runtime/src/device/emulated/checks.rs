//! Who touched a transfer's slot, and whether an event orders it against who touches it now.
//!
//! Every stream of every rank counts its commands. A clock holds, for each of them, how far what it stands for is known to come after it.

use artifact::program::Manifest;
use std::collections::BTreeMap;

/// By stream of all ranks: commands known to have happened before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Clock(Vec<u64>);

impl Clock {
    pub fn new(streams: usize) -> Clock {
        Clock(vec![0; streams])
    }

    /// Another command of a stream.
    pub fn tick(&mut self, stream: usize) {
        self.0[stream] += 1;
    }

    /// What is known here and there.
    pub fn join(&mut self, other: &Clock) {
        for (mine, theirs) in self.0.iter_mut().zip(&other.0) {
            *mine = (*mine).max(*theirs);
        }
    }

    pub fn of(&self, stream: usize) -> u64 {
        self.0[stream]
    }
}

/// Who touches a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    Computation,
    Transfer,
}

/// The last touches of a slot, as counts of their streams.
#[derive(Clone, Copy, Debug, Default)]
struct Touched {
    end: u64,
    computation: u64,
    transfer: u64,
}

/// The slots of a rank's transfers, by their first byte.
#[derive(Clone, Debug, Default)]
pub struct Touches(BTreeMap<u64, Touched>);

impl Touches {
    pub fn new(manifest: &Manifest, rank: usize) -> Touches {
        let mut slots = BTreeMap::new();
        for stage in manifest.stages.iter().filter(|s| s.rank.index() == rank) {
            let io = &stage.io;
            let exchanges = manifest.program.partner(stage.stage.index()).is_some();
            let table = stage.params.iter().filter(|p| exchanges && p.other_end.is_some());
            let table = table.flat_map(|p| [p.gradient, p.other_end]);
            let sums = [io.norm, io.total];
            for place in [io.recv_f, io.send_f, io.recv_b, io.send_b].into_iter().chain(sums).chain(table).flatten() {
                for slot in 0..u64::from(place.slots) {
                    let end = place.at(slot) + place.bytes;
                    slots.insert(place.at(slot), Touched { end, ..Touched::default() });
                }
            }
        }
        Touches(slots)
    }

    /// A command whose clock is `clock` touches bytes of the arena. `streams` are the rank's: of computations, of transfers.
    ///
    /// # Errors
    /// When a touch by the other stream is not known to come before.
    pub fn touch(
        &mut self,
        by: By,
        bytes: std::ops::Range<u64>,
        clock: &Clock,
        streams: [usize; 2],
    ) -> Result<(), String> {
        for (start, slot) in self.0.range_mut(..bytes.end) {
            if slot.end <= bytes.start {
                continue;
            }
            let (other, mine, known) = match by {
                By::Computation => (slot.transfer, &mut slot.computation, clock.of(streams[1])),
                By::Transfer => (slot.computation, &mut slot.transfer, clock.of(streams[0])),
            };
            if other > known {
                let (first, second) = match by {
                    By::Computation => ("transfer", "computation"),
                    By::Transfer => ("computation", "transfer"),
                };
                return Err(format!("no event puts the {first} before the {second} of the slot at byte {start}"));
            }
            *mine = clock.of(streams[by as usize]);
        }
        Ok(())
    }
}
