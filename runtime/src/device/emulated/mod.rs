//! Devices that exist in this process only, and a transport between them that blocks as NCCL's does.
//!
//! The commands that wait at the heads of all devices' streams form the choices; a step takes one of them, drawn by the seed. So a run sees an
//! interleaving that streams, events and transfers allow, and other seeds see others. What must hold in all of them:
//!
//! | fault | found |
//! |---|---|
//! | a computation touches a transfer's slot and no event puts one before the other (by vector clocks, whatever came first here) | at both |
//! | the two ends of a transfer disagree about its size | at the transfer |
//! | a graph waits for an event from outside, or ends while its second stream is not joined | at the capture |
//! | a kernel does wrong | in it |
//!
//! A bundle that is tuned gets its products from [`played`], a library that takes the place of the GPU's.
//!
//! # The transport
//!
//! Transfers of a channel match in order, without names. An exchange blocks its stream until all its transfers are done; nothing is buffered.
//!
//! # Time
//!
//! There is a clock, and it stands still while anything can happen. When every host waits and no stream can go on, it moves by [`TICK`]. So
//! deadlines pass at once, and only where they would have passed on any machine.

mod capture;
mod checks;
pub mod played;
mod world;

pub use played::Played;
pub use world::{Emulated, World};

use crate::arena::Arena;
use crate::device::Command;
use crate::map::Kernels;
use artifact::ids::RankId;
use artifact::program::Place;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

/// How far the clock moves when nothing else does.
pub const TICK: Duration = Duration::from_secs(1);

/// How the devices behave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Emulation {
    /// Of the interleaving.
    pub seed: u64,
    /// Whether parts are captured as graphs.
    pub graphs: bool,
    pub injected: Option<Injected>,
}

impl Default for Emulation {
    fn default() -> Self {
        Emulation { seed: 0, graphs: true, injected: None }
    }
}

/// Something that happens to a rank when it comes to an exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Injected {
    pub rank: RankId,
    /// Exchanges that it still makes.
    pub exchanges: u64,
    pub what: Accident,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accident {
    /// Its process ends. Its peers are told so when they wait for it.
    Death,
    /// Nothing moves any more, on its device or its host.
    Stall,
}

/// Runs a kernel, or a product of the library, over places of an arena.
fn run(kernels: &Kernels, library: Option<&Played>, arena: &Arena, command: &Command) -> Result<(), String> {
    let run = || match command {
        Command::Launch { stage, kernel, args } => {
            let places: Vec<Place> =
                args.iter().map(|&(offset, place)| Place { offset, stride: 0, slots: 1, ..place }).collect();
            let addresses: Vec<*mut u8> = places.iter().map(|place| arena.address(place, 0)).collect();
            kernels.call(*stage, *kernel, &addresses, &places);
            Ok(())
        }
        Command::Product { product, algorithm, args, workspace } => {
            library.ok_or("there is no library")?.run(arena, product, algorithm, args, *workspace)
        }
        _ => Err("this is no computation".into()),
    };
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        Err(text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("unknown").to_string())
    })
}
