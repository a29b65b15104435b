//! Ranks on devices that run what is enqueued for them: GPUs, or the emulator's.
//!
//! A rank's own thread (the host) goes through its instructions as on the CPU, but every effect becomes a [`Command`], enqueued on one of the
//! device's two streams. The commands between two borders of the order's repetitions are a *segment part* that is enqueued as a whole; where the
//! transport allows, it is captured as a graph the first time and launched again whenever equal commands come.
//!
//! | | |
//! |---|---|
//! | [`order`] | in which order commands are enqueued, so that transfers that block each other can't deadlock |
//! | [`engine`] | instructions to commands; events between the streams; parts in flight, deadlines, losses that come back |
//! | [`pipeline`] | the ranks' threads |
//! | [`cuda`] | GPUs |
//! | [`library`] | matrix products by a library, in the place of kernels |
//! | [`emulated`] | devices that run commands in any order that the streams and events allow, and find what is missing |
//!
//! # Events
//!
//! Every slot of a ring of transfers has two. *Ready*: recorded among the computations where the instruction hands the slot over; the
//! exchange waits for it. *Done*: recorded after the exchange; the computation that uses the slot next waits for it.
//!
//! # Graphs
//!
//! A ring's slot is an address, and a captured graph holds addresses. Repetitions whose micro-batches fall into the same slots are therefore
//! one graph, found by their commands: as many graphs are captured as the rings' lengths have common phases, at most
//! [`GRAPHS_MAX`]; further parts are enqueued one by one. A graph ends when both of its streams have, so an event from before a
//! graph needs no wait inside. That can't deadlock either: parts are stretches of the one order of all transfers.

pub mod bands;
pub mod cuda;
pub mod emulated;
pub mod engine;
pub mod expected;
pub mod library;
pub mod order;
pub mod pipeline;
pub mod probe;

use crate::device::library::Library;
use artifact::ids::RankId;
use artifact::product::Product;
use artifact::program::Place;
use artifact::tuning::Algorithm;
use std::time::Duration;

/// Graphs that a rank keeps.
pub const GRAPHS_MAX: usize = 64;

/// Parts that may be enqueued and not finished; each has its own staging memory.
pub const PARTS_MAX: usize = 2;

/// A queue of a device: its commands run in order, and beside those of the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stream {
    Compute,
    Transfers,
}

/// One end of a transfer, as a device gets it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Move {
    pub sends: bool,
    pub peer: RankId,
    /// Numbers the channel among all of the run, the same at both ends.
    pub channel: usize,
    /// Byte of the arena.
    pub offset: u64,
    pub bytes: u64,
}

/// What a device does, in the order of its stream.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Command {
    /// Staging memory to arena; offsets in both.
    CopyIn { from: usize, to: u64, bytes: usize },
    /// Arena to staging memory.
    CopyOut { from: u64, to: usize, bytes: usize },
    /// A kernel of a stage over places of the arena, each with the byte where its slot begins.
    Launch { stage: usize, kernel: u32, args: Vec<(u64, Place)> },
    /// A product by the library, over places as above; its workspace begins at a byte of the arena.
    Product { product: Product, algorithm: Algorithm, args: Vec<(u64, Place)>, workspace: u64 },
    /// The event is what the stream has come to.
    Record(Stream, usize),
    /// The stream goes on when the event's last record (of those enqueued before this) has happened.
    Wait(Stream, usize),
    /// Transfers that begin together; the stream goes on when all are done.
    Exchange(Vec<Move>),
    /// Writes a number into a word that the host reads: see [`Device::mark`].
    Mark { stream: Stream, word: usize, value: u32 },
}

impl Command {
    /// The stream that it is for.
    pub fn stream(&self) -> Stream {
        match self {
            Command::Record(stream, _) | Command::Wait(stream, _) | Command::Mark { stream, .. } => *stream,
            Command::Exchange(_) => Stream::Transfers,
            Command::CopyIn { .. } | Command::CopyOut { .. } | Command::Launch { .. } | Command::Product { .. } => {
                Stream::Compute
            }
        }
    }

    /// The places that a kernel or a product is over, each with the byte where its slot begins.
    pub fn operands(&self) -> &[(u64, Place)] {
        match self {
            Command::Launch { args, .. } | Command::Product { args, .. } => args,
            _ => &[],
        }
    }
}

/// Why a device did not do what it was asked to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It, or a kernel, did wrong.
    Device(String),
    /// Transfers with this rank no longer work, in the words of the transport.
    Peer(RankId, String),
    /// This rank is to end without a word: a test killed it.
    Killed,
}

/// A device of one rank with its arena, staging memory that the host shares with it, and its streams. Used by one thread at a time.
pub trait Device: Send {
    /// Whether [`Device::capture`] works with this device's transport.
    fn captures(&self) -> bool;

    /// Bytes of the arena as allocated.
    fn allocated(&self) -> u64;

    /// Copies between the host and the arena, at once; nothing may be enqueued.
    fn upload(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Fault>;
    fn download(&mut self, offset: u64, bytes: &mut [u8]) -> Result<(), Fault>;

    /// Writes and reads staging memory, which no command in flight touches there.
    fn stage(&mut self, at: usize, bytes: &[u8]);
    fn staged(&self, at: usize, out: &mut [u8]);

    /// Enqueues commands.
    fn enqueue(&mut self, commands: &[Command]) -> Result<(), Fault>;

    /// Makes a graph of commands that begin on the computations' stream and end there.
    fn capture(&mut self, commands: &[Command]) -> Result<usize, Fault>;

    /// Enqueues a graph on the computations' stream.
    fn launch(&mut self, graph: usize) -> Result<(), Fault>;

    /// Whether an event's last record has happened (true when there was none).
    fn happened(&mut self, event: usize) -> Result<bool, Fault>;

    /// A word that [`Command::Mark`] writes.
    fn mark(&self, word: usize) -> u32;
    /// Sets it, when no command that would is enqueued.
    fn set_mark(&mut self, word: usize, value: u32);

    /// Time, of the clock that deadlines are measured with.
    fn now(&self) -> Duration;

    /// Lets time pass while the host has nothing to do but to ask again.
    fn pause(&mut self);

    /// The rank begins (or has ended) a stretch of work; none of it is left on the device.
    fn working(&mut self, working: bool);

    /// Ends transfers, here and with the peers: the run has failed.
    fn abort(&mut self);

    /// The library of matrix products beside the device, of a run that uses one.
    ///
    /// # Errors
    /// One sentence: it is not there.
    fn library(&mut self) -> Result<&mut dyn Library, String>;

    /// How long a command takes that computes a product, when it runs so many times, one after the other; nothing else is enqueued.
    fn time(&mut self, product: &Product, command: &Command, times: u32) -> Result<Duration, Fault>;
}

/// What a device has room for, beside its arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    pub staging_bytes: usize,
    pub events: usize,
    pub marks: usize,
}
