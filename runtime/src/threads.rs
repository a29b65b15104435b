//! The engine that calls kernels at once, on the rank's own thread, and waits for other ranks by blocking it.

use crate::clock::thread_ns;
use crate::control::{Control, GivenUp};
use crate::executor::{Engine, Report, Transfer};
use crate::map::Kernels;
use crate::rank::Rank;
use crate::reports::Reports;
use crate::transport::local::{Channel, End, Links};
use crate::versions::Slots;
use artifact::channel::side;
use artifact::program::{Call, Manifest, Place};
use std::time::Instant;

/// See the module's text.
pub struct Threads<'a> {
    manifest: &'a Manifest,
    kernels: &'a Kernels,
    links: &'a Links,
    control: &'a Control<'a>,
    /// None where nothing is updated.
    reports: Option<&'a Reports>,
    /// How often a wait looks again before it blocks.
    spins: u32,
    /// The addresses that a kernel call gets.
    args: Vec<*mut u8>,
}

impl<'a> Threads<'a> {
    pub fn new(
        manifest: &'a Manifest,
        kernels: &'a Kernels,
        links: &'a Links,
        control: &'a Control<'a>,
        reports: Option<&'a Reports>,
        spins: u32,
    ) -> Self {
        let args_max = manifest.kernels.iter().map(|k| k.args as usize).max().unwrap_or(0);
        Threads { manifest, kernels, links, control, reports, spins, args: vec![std::ptr::null_mut(); args_max] }
    }

    /// The channel that a ring of a stage is an end of.
    fn channel(&self, rank: &Rank, transfer: Transfer) -> Option<&'a Channel> {
        let (number, _) = side(&self.manifest.program, transfer.ring.op(), rank.stages[transfer.local].index)?;
        self.links.0.get(number)
    }
}

impl Engine for Threads<'_> {
    fn transfer(&mut self, rank: &mut Rank, transfer: Transfer) -> Result<(), GivenUp> {
        let Transfer { local, ring, mb } = transfer;
        let place = ring.place(&self.manifest.stages[rank.stages[local].index]);
        let place = place.expect("a verified stream has transfers only where there are slots");
        let channel = self.channel(rank, transfer).expect("a slot for transfers has a stage at the other end");
        let end = End { mb, slot: rank.arena.slot(&place, mb) };
        let act = if ring.sends() { Channel::offer } else { Channel::post };
        let ticket = act(channel, end).unwrap_or_else(|mismatch| panic!("{mismatch}"));
        let tickets = rank.stages[local].tickets.of(ring);
        let slot = mb as usize % tickets.len();
        tickets[slot] = ticket;
        if self.control.failed() { Err(GivenUp) } else { Ok(()) }
    }

    /// Waits until a slot's transfer is done.
    fn wait(&mut self, rank: &mut Rank, transfer: Transfer) -> Result<bool, GivenUp> {
        let Transfer { local, ring, mb } = transfer;
        let tickets = rank.stages[local].tickets.of(ring);
        let Some(&ticket) = tickets.get(mb as usize % tickets.len().max(1)) else { return Ok(true) };
        let Some(channel) = self.channel(rank, transfer) else { return Ok(true) };
        if channel.is_done(ticket) {
            return Ok(true);
        }
        let (control, start) = (self.control, Instant::now());
        // What an update exchanges was made of its last micro-batch: a segment ends before or after both.
        let ended = || !ring.by_update() && control.limit() <= mb;
        let done = channel.wait(ticket, self.spins, || control.failed() || ended());
        rank.wait_ns += start.elapsed().as_nanos() as u64;
        if control.failed() { Err(GivenUp) } else { Ok(done) }
    }

    fn written(&mut self, _: &Rank, _: &Place, _: u64) -> Result<(), GivenUp> {
        Ok(())
    }

    fn call(&mut self, rank: &Rank, local: usize, calls: &[Call], slots: Slots) -> Result<u64, GivenUp> {
        let (start_ns, index) = (thread_ns(), rank.stages[local].index);
        for call in calls {
            for (address, place) in self.args.iter_mut().zip(&call.args) {
                *address = rank.arena.address(place, slots.index(place.by));
            }
            self.kernels.call(index, call.kernel, &self.args[..call.args.len()], &call.args);
        }
        Ok(thread_ns() - start_ns)
    }

    fn loss(&mut self, rank: &Rank, _: usize, mb: u64, place: &Place) -> Result<Option<f64>, GivenUp> {
        Ok(Some(rank.arena.view::<f64>(place, mb)[0]))
    }

    fn report(&mut self, _: usize, report: Report) {
        if let Some(reports) = self.reports {
            reports.send(report);
        }
    }
}
