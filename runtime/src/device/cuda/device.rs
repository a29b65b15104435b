//! A rank on a GPU.

mod products;

use crate::device::cuda::blas::Blas;
use crate::device::cuda::driver::{EventHandle, Function, Gpu, Loaded, Queue};
use crate::device::cuda::local::{Board, Lost, Offer};
use crate::device::cuda::nccl::{Comm, Nccl, UniqueId};
use crate::device::cuda::patience::Patience;
use crate::device::library::Library;
use crate::device::{Command, Device, Fault, Move, Room, Stream};
use artifact::bundle::Bundle;
use artifact::channel::channels;
use artifact::ids::RankId;
use artifact::product::Product;
use artifact::program::Manifest;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Pause of the host between looks.
const LOOK: Duration = Duration::from_micros(50);

/// Bytes of a transfer that opens the way to a peer.
const WARM_UP_BYTES: u64 = 64;

/// How a rank reaches the others.
pub enum Peers {
    None,
    Local(Arc<Board<EventHandle>>),
    /// A communicator that is to be joined.
    Waiting(Arc<Nccl>, UniqueId),
    Nccl(Comm),
}

/// A kernel's functions with their grids and threads.
type Launches = Vec<(Function, [u32; 3], u32)>;

/// The kernels of a rank's stages, by stage and kernel.
pub struct Functions {
    table: HashMap<(usize, u32), Launches>,
    /// What the functions are of.
    modules: Vec<Loaded>,
}

impl Functions {
    /// Loads the images of a rank's stages: the machine code, where there is some that the GPU runs, else the PTX.
    ///
    /// # Errors
    /// What the driver's assembler says, or which kernel is missing.
    pub fn load(gpu: &Gpu, bundle: &Bundle, rank: RankId, cubins: bool) -> Result<Functions, String> {
        let (mut table, mut modules) = (HashMap::new(), Vec::new());
        for image in &bundle.images {
            let stage = image.stage.index();
            if bundle.manifest.stages[stage].rank != rank {
                continue;
            }
            let code = image.cubin.as_ref().filter(|_| cubins).map_or(&image.code, |cubin| &cubin.code);
            let module = gpu.load(code).map_err(|e| format!("the code of stage {stage} does not load: {e}"))?;
            for &(kernel, _) in &image.exports {
                let launches = &bundle.manifest.kernels[kernel as usize].launches;
                let one = |l: &artifact::program::Launch| Ok((module.function(&l.entry)?, l.grid, l.threads));
                table.insert((stage, kernel), launches.iter().map(one).collect::<Result<_, String>>()?);
            }
            modules.push(module);
        }
        Ok(Functions { table, modules })
    }
}

/// See the module's text. Dropped in this order: transfers end, then the streams, then what they ran.
pub struct OnGpu {
    peers: Peers,
    queue: Queue,
    functions: Functions,
    /// Of a bundle that is tuned, or to be.
    blas: Option<Blas>,
    rank: RankId,
    ranks: u32,
    patience: Patience,
    /// The first of the events of channels, after those of slots.
    channel_events: usize,
    started: Instant,
    /// The addresses of a launch.
    addresses: Vec<u64>,
}

impl OnGpu {
    pub fn new(
        gpu: Gpu,
        functions: Functions,
        manifest: &Manifest,
        rank: RankId,
        room: Room,
        peers: Peers,
        patience: Patience,
    ) -> Result<OnGpu, String> {
        let bytes = manifest.memory[rank.index()].total;
        let (channel_events, channels) = (room.events, channels(&manifest.program).len());
        let queue = Queue::new(gpu, bytes, room.staging_bytes, channel_events + channels, room.marks)?;
        let ranks = manifest.memory.len() as u32;
        let (started, addresses) = (Instant::now(), Vec::new());
        let blas = None;
        Ok(OnGpu { peers, queue, functions, blas, rank, ranks, patience, channel_events, started, addresses })
    }

    /// Joins the communicator, and moves a few bytes to and from every rank that this one exchanges with: no connection is made later, in the
    /// middle of a captured graph.
    pub fn join(&mut self, manifest: &Manifest) -> Result<(), Fault> {
        let Peers::Waiting(nccl, id) = &self.peers else { return Ok(()) };
        self.queue.enter().map_err(Fault::Device)?;
        let comm = Comm::join(nccl.clone(), *id, self.rank.0, self.ranks, self.patience.clone())?;
        // Zeros over zeros: nothing is in the arena yet.
        let bytes = WARM_UP_BYTES.min(self.queue.bytes());
        let address = self.queue.address(0, bytes);
        let both = |peer: u32| [(true, peer, address, bytes), (false, peer, address, bytes)];
        let moves: Vec<_> = neighbours(manifest, self.rank).into_iter().flat_map(both).collect();
        let stream = self.queue.stream(Stream::Transfers as usize);
        comm.exchange(&moves, stream)?;
        self.queue.record(Stream::Transfers as usize, 0).map_err(Fault::Device)?;
        self.patience.until("the first transfers with its neighbours were not done", || {
            let happened = self.queue.happened(0)?;
            if !happened {
                comm.check()?;
            }
            Ok(happened.then_some(()))
        })?;
        self.peers = Peers::Nccl(comm);
        Ok(())
    }

    fn issue(&mut self, command: &Command) -> Result<(), Fault> {
        let done = match command {
            Command::CopyIn { from, to, bytes } => self.queue.copy_in(*from, *to, *bytes),
            Command::CopyOut { from, to, bytes } => self.queue.copy_out(*from, *to, *bytes),
            Command::Record(stream, event) => self.queue.record(*stream as usize, *event),
            Command::Wait(stream, event) => self.queue.wait(*stream as usize, *event),
            Command::Mark { stream, word, value } => self.queue.mark(*stream as usize, *word, *value),
            Command::Exchange(moves) => return self.exchange(moves),
            Command::Product { .. } => self.product(command),
            Command::Launch { stage, kernel, args } => {
                self.addresses.clear();
                self.addresses.extend(args.iter().map(|(offset, place)| self.queue.address(*offset, place.bytes)));
                let launches = self.functions.table.get(&(*stage, *kernel)).map_or(&[][..], Vec::as_slice);
                let launch = |&(function, grid, threads): &(Function, [u32; 3], u32)| {
                    self.queue.launch(function, grid, threads, &self.addresses)
                };
                launches.iter().try_for_each(launch)
            }
        };
        done.map_err(Fault::Device)
    }

    fn exchange(&mut self, moves: &[Move]) -> Result<(), Fault> {
        match &self.peers {
            Peers::Nccl(comm) => {
                let address = |m: &Move| (m.sends, m.peer.0, self.queue.address(m.offset, m.bytes), m.bytes);
                let moves: Vec<_> = moves.iter().map(address).collect();
                let stream = self.queue.stream(Stream::Transfers as usize);
                comm.exchange(&moves, stream)
            }
            Peers::Local(board) => self.exchange_here(board, moves),
            Peers::None | Peers::Waiting(..) => Err(Fault::Device("there is no way to the other ranks".into())),
        }
    }

    /// An exchange with ranks of the same GPU. Each end of a channel has one event: a sender waits until its last send was taken and the wait
    /// for the copy is enqueued, so neither is recorded anew while the other rank may still ask for it.
    fn exchange_here(&self, board: &Board<EventHandle>, moves: &[Move]) -> Result<(), Fault> {
        let transfers = Stream::Transfers as usize;
        let device = Fault::Device;
        let lost = |peer: RankId, lost: Lost| match lost {
            Lost::Gone(rank) => Fault::Peer(peer, format!("rank {rank} gave up")),
            Lost::Late => {
                Fault::Peer(peer, format!("rank {peer} did not come for {} s", self.patience.deadline.as_secs_f64()))
            }
        };
        for m in moves.iter().filter(|m| m.sends) {
            let event = self.channel_events + m.channel;
            self.queue.record(transfers, event).map_err(device)?;
            let address = self.queue.address(m.offset, m.bytes);
            board.offer(m.channel, Offer { address, bytes: m.bytes, full: self.queue.event(event) });
        }
        for m in moves.iter().filter(|m| !m.sends) {
            let offer = board.take(m.channel, self.patience.deadline).map_err(|l| lost(m.peer, l))?;
            if offer.bytes != m.bytes {
                let what = format!("rank {} sends {} bytes where {} are expected", m.peer, offer.bytes, m.bytes);
                return Err(Fault::Device(what));
            }
            self.queue.wait_for(transfers, offer.full).map_err(device)?;
            self.queue.copy_from(offer.address, m.offset, m.bytes).map_err(device)?;
            let event = self.channel_events + m.channel;
            self.queue.record(transfers, event).map_err(device)?;
            board.taken(m.channel, self.queue.event(event));
        }
        for m in moves.iter().filter(|m| m.sends) {
            let copied = board.copied(m.channel, self.patience.deadline).map_err(|l| lost(m.peer, l))?;
            self.queue.wait_for(transfers, copied).map_err(device)?;
        }
        Ok(())
    }
}

/// Ranks that a rank has transfers with.
fn neighbours(manifest: &Manifest, rank: RankId) -> BTreeSet<u32> {
    let program = &manifest.program;
    let mut found = BTreeSet::new();
    let own = (0..program.rank_of_stage.len()).filter(|&stage| program.rank_of_stage[stage] == rank);
    // The other end of a tied table.
    found.extend(own.filter_map(|stage| program.partner(stage)).map(|stage| program.rank_of_stage[stage].0));
    for border in 0..program.rank_of_stage.len().saturating_sub(1) {
        let (a, b) = (program.rank_of_stage[border], program.rank_of_stage[border + 1]);
        if a != b && (a == rank || b == rank) {
            found.insert(if a == rank { b.0 } else { a.0 });
        }
    }
    found
}

impl Drop for OnGpu {
    fn drop(&mut self) {
        if let Peers::Nccl(comm) = std::mem::replace(&mut self.peers, Peers::None) {
            comm.leave();
        }
        if self.queue.abandoned {
            // Ending and unloading them would wait for what may never end.
            std::mem::forget(self.blas.take());
            std::mem::forget(std::mem::take(&mut self.functions.modules));
        }
    }
}

impl Device for OnGpu {
    fn captures(&self) -> bool {
        // Waits between the streams of two ranks can't be part of one rank's graph.
        !matches!(self.peers, Peers::Local(_))
    }

    fn allocated(&self) -> u64 {
        self.queue.bytes()
    }

    fn upload(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.queue.upload(offset, bytes).map_err(Fault::Device)
    }

    fn download(&mut self, offset: u64, bytes: &mut [u8]) -> Result<(), Fault> {
        self.queue.download(offset, bytes).map_err(Fault::Device)
    }

    fn stage(&mut self, at: usize, bytes: &[u8]) {
        self.queue.staging.put(at, bytes);
    }

    fn staged(&self, at: usize, out: &mut [u8]) {
        self.queue.staging.get(at, out);
    }

    fn enqueue(&mut self, commands: &[Command]) -> Result<(), Fault> {
        self.queue.enter().map_err(Fault::Device)?;
        commands.iter().try_for_each(|command| self.issue(command))
    }

    fn capture(&mut self, commands: &[Command]) -> Result<usize, Fault> {
        self.queue.enter().map_err(Fault::Device)?;
        self.queue.begin_capture().map_err(Fault::Device)?;
        let issued = commands.iter().try_for_each(|command| self.issue(command));
        // Ended also after a failure: the stream would stay unusable.
        let graph = self.queue.end_capture().map_err(Fault::Device);
        issued.and(graph)
    }

    fn launch(&mut self, graph: usize) -> Result<(), Fault> {
        self.queue.launch_graph(graph).map_err(Fault::Device)
    }

    fn happened(&mut self, event: usize) -> Result<bool, Fault> {
        let happened = self.queue.happened(event).map_err(Fault::Device)?;
        if let Peers::Nccl(comm) = &self.peers
            && !happened
        {
            comm.check().map_err(Fault::Device)?;
        }
        Ok(happened)
    }

    fn mark(&self, word: usize) -> u32 {
        self.queue.marks.word(word)
    }

    fn set_mark(&mut self, word: usize, value: u32) {
        self.queue.marks.set_word(word, value);
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    fn pause(&mut self) {
        std::thread::sleep(LOOK);
    }

    fn working(&mut self, _: bool) {}

    fn abort(&mut self) {
        self.queue.abandoned = true;
        self.patience.fail(self.rank, format!("rank {} gave up", self.rank));
        match &mut self.peers {
            Peers::Nccl(comm) => comm.abort(),
            Peers::Local(board) => board.leave(self.rank),
            Peers::None | Peers::Waiting(..) => {}
        }
    }
    fn library(&mut self) -> Result<&mut dyn Library, String> {
        self.blas.as_mut().map(|blas| blas as &mut dyn Library).ok_or_else(|| "cuBLASLt is not open".into())
    }

    fn time(&mut self, _: &Product, command: &Command, times: u32) -> Result<Duration, Fault> {
        self.queue.enter().map_err(Fault::Device)?;
        let timer = self.queue.timer().map_err(Fault::Device)?;
        for _ in 0..times {
            self.issue(command)?;
        }
        self.queue.stop(&timer).map_err(Fault::Device)?;
        let deadline = self.patience.deadline.saturating_mul(times);
        // Nobody else has a part in it.
        let alone = Patience::new(deadline, None);
        alone.until("its computations were not done", || self.queue.passed(&timer))
    }
}
