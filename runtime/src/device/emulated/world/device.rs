//! A rank's end of the devices' world.

use super::{Host, Item, Shared};
use crate::arena::Arena;
use crate::device::emulated::Played;
use crate::device::emulated::capture::check_capture;
use crate::device::library::Library;
use crate::device::{Command, Device, Fault, Stream};
use artifact::ids::RankId;
use artifact::product::Product;
use std::sync::Arc;
use std::time::Duration;

/// A rank's end of a [`World`].
pub struct Emulated {
    pub(super) shared: Arc<Shared>,
    pub(super) rank: usize,
    pub(super) arena: Arc<Arena>,
    pub(super) staging: Arc<Arena>,
    pub(super) graphs: bool,
    pub(super) library: Result<Played, String>,
}

impl Device for Emulated {
    fn captures(&self) -> bool {
        self.graphs
    }

    fn allocated(&self) -> u64 {
        self.arena.bytes()
    }

    fn upload(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.arena.put(offset, bytes);
        Ok(())
    }

    fn download(&mut self, offset: u64, bytes: &mut [u8]) -> Result<(), Fault> {
        self.arena.get(offset, bytes);
        Ok(())
    }

    fn stage(&mut self, at: usize, bytes: &[u8]) {
        self.staging.put(at as u64, bytes);
    }

    fn staged(&self, at: usize, out: &mut [u8]) {
        self.staging.get(at as u64, out);
    }

    fn enqueue(&mut self, commands: &[Command]) -> Result<(), Fault> {
        let mut state = self.shared.lock();
        let device = state.alive(self.rank)?;
        for command in commands {
            if let (Command::Product { algorithm, .. }, Ok(library)) = (command, &self.library)
                && let Err(refusal) = library.method(algorithm)
            {
                if library.breaks(algorithm) {
                    device.fault = Some("the device is broken".into());
                }
                return Err(Fault::Device(refusal));
            }
            let (stream, item) = device.item(command);
            device.streams[stream as usize].items.push_back(item);
        }
        self.shared.changed.notify_all();
        Ok(())
    }

    fn capture(&mut self, commands: &[Command]) -> Result<usize, Fault> {
        check_capture(commands).map_err(Fault::Device)?;
        let mut state = self.shared.lock();
        let device = state.alive(self.rank)?;
        device.graphs.push(commands.to_vec());
        Ok(device.graphs.len() - 1)
    }

    fn launch(&mut self, graph: usize) -> Result<(), Fault> {
        let mut state = self.shared.lock();
        state.alive(self.rank)?.streams[Stream::Compute as usize].items.push_back(Item::Graph(graph));
        self.shared.changed.notify_all();
        Ok(())
    }

    fn happened(&mut self, event: usize) -> Result<bool, Fault> {
        let mut state = self.shared.lock();
        let aborted = state.aborted;
        let device = state.alive(self.rank)?;
        if let Some(fault) = &device.fault {
            return Err(Fault::Device(fault.clone()));
        }
        if device.stalled && aborted {
            return Err(Fault::Killed);
        }
        let event = &device.events[event];
        let happened = event.happened >= event.enqueued;
        match state.lost_peer(self.rank).filter(|_| !happened) {
            Some(peer) => Err(Fault::Peer(RankId(peer as u32), format!("rank {peer} is gone"))),
            None => Ok(happened),
        }
    }

    fn mark(&self, word: usize) -> u32 {
        self.shared.lock().devices[self.rank].marks[word]
    }

    fn set_mark(&mut self, word: usize, value: u32) {
        self.shared.lock().devices[self.rank].marks[word] = value;
    }

    fn now(&self) -> Duration {
        let state = self.shared.lock(); // A rank that stalls sees no time pass.
        if state.devices[self.rank].stalled { Duration::ZERO } else { state.now }
    }

    fn pause(&mut self) {
        self.shared.step(self.rank);
    }

    fn working(&mut self, working: bool) {
        self.shared.lock().devices[self.rank].host = if working { Host::Busy } else { Host::Away };
        self.shared.changed.notify_all();
    }

    fn abort(&mut self) {
        self.shared.lock().aborted = true;
        self.shared.changed.notify_all();
    }
    fn library(&mut self) -> Result<&mut dyn Library, String> {
        self.library.as_mut().map(|library| library as &mut dyn Library).map_err(|missing| missing.clone())
    }

    /// By the library's rule; the computations themselves don't run.
    fn time(&mut self, product: &Product, command: &Command, times: u32) -> Result<Duration, Fault> {
        let library = self.library.as_ref().map_err(|missing| Fault::Device(missing.clone()))?;
        let algorithm = match command {
            Command::Product { algorithm, .. } => Some(algorithm),
            _ => None,
        };
        Ok((library.rule)(product, algorithm) * times)
    }
}
