//! The devices' streams, and one step at a time.

mod device;

pub use device::Emulated;

use crate::arena::Arena;
use crate::device::emulated::checks::{By, Clock, Touches};
use crate::device::emulated::{Accident, Emulation, Injected, Played, TICK, run};
use crate::device::library::{self, Library};
use crate::device::pipeline::Machine;
use crate::device::{Command, Device, Fault, Move, Room, Stream};
use crate::draw::splitmix;
use crate::error::RunError;
use crate::map::Kernels;
use artifact::ids::RankId;
use artifact::program::{Manifest, Place};
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Clocks of an event's records that are kept: more than waits can lag behind.
const CLOCKS_KEPT: usize = 16;

/// All devices of a run.
pub struct World {
    shared: Arc<Shared>,
    library: Option<Played>,
}

struct Shared {
    kernels: Arc<Kernels>,
    emulation: Emulation,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    devices: Vec<Simulated>,
    draws: u64,
    now: Duration,
    aborted: bool,
}

/// What a host is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Host {
    /// Nothing of this run.
    Away,
    Busy,
    /// Looks again when something has moved.
    Waiting,
}

/// A rank's device.
struct Simulated {
    rank: usize,
    /// By stream.
    clocks: [Clock; 2],
    arena: Option<Arc<Arena>>,
    staging: Option<Arc<Arena>>,
    library: Option<Played>,
    marks: Vec<u32>,
    events: Vec<Event>,
    graphs: Vec<Vec<Command>>,
    streams: [Queue; 2],
    /// The graph that the computations' stream is in.
    running: Option<[Queue; 2]>,
    touches: Touches,
    exchanges: u64,
    host: Host,
    dead: bool,
    stalled: bool,
    fault: Option<String>,
}

#[derive(Default)]
struct Queue {
    items: VecDeque<Item>,
    /// Its head is being executed.
    busy: bool,
    /// Transfers of the head exchange that are done.
    moved: Vec<bool>,
}

/// Records of an event that were enqueued, and that happened; clocks of the last ones.
#[derive(Clone, Default)]
struct Event {
    enqueued: u64,
    happened: u64,
    clocks: VecDeque<(u64, Clock)>,
}

#[derive(Clone, Debug)]
enum Item {
    Command(Command),
    /// Until an event has happened so many times.
    Until(usize, u64),
    /// The event's record of this number.
    Happens(usize, u64),
    Graph(usize),
}

/// A queue: of a rank, whose stream, inside its running graph or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct At {
    rank: usize,
    stream: usize,
    graph: bool,
}

/// What a step does.
#[derive(Clone, Copy, Debug)]
enum Choice {
    Head(At),
    /// A transfer of two head exchanges: the sender's queue and number, the receiver's.
    Transfer((At, usize), (At, usize)),
}

impl World {
    pub fn new(manifest: &Manifest, kernels: Arc<Kernels>, emulation: Emulation) -> World {
        let ranks = manifest.memory.len();
        let devices = (0..ranks).map(|rank| Simulated::new(manifest, rank)).collect();
        let state = State { devices, draws: 0, now: Duration::ZERO, aborted: false };
        let shared = Shared { kernels, emulation, state: Mutex::new(state), changed: Condvar::new() };
        World { shared: Arc::new(shared), library: Some(Played::default()) }
    }

    /// With another library of matrix products, or none.
    pub fn with_library(self, library: Option<Played>) -> World {
        World { library, ..self }
    }
}

impl Simulated {
    fn new(manifest: &Manifest, rank: usize) -> Simulated {
        let clock = || Clock::new(2 * manifest.memory.len());
        Simulated {
            rank,
            clocks: [clock(), clock()],
            arena: None,
            staging: None,
            library: None,
            marks: Vec::new(),
            events: Vec::new(),
            graphs: Vec::new(),
            streams: [Queue::default(), Queue::default()],
            running: None,
            touches: Touches::new(manifest, rank),
            exchanges: 0,
            host: Host::Away,
            dead: false,
            stalled: false,
            fault: None,
        }
    }

    fn queue(&mut self, at: At) -> &mut Queue {
        match &mut self.running {
            Some(queues) if at.graph => &mut queues[at.stream],
            _ => &mut self.streams[at.stream],
        }
    }
}

impl Machine for World {
    fn device(&self, manifest: &Manifest, rank: RankId, room: Room) -> Result<Box<dyn Device>, RunError> {
        let bytes = manifest.memory[rank.index()].total;
        let library = self.library.clone().ok_or_else(|| "there is no library of matrix products".to_owned());
        let found = library.as_ref().map_err(Clone::clone).and_then(Library::identity);
        library::check(manifest, &found).map_err(RunError::Device)?;
        let memory = |bytes| Arena::new(bytes).map(Arc::new).ok_or(RunError::Memory { rank, bytes });
        let (arena, staging) = (memory(bytes)?, memory(room.staging_bytes.max(1) as u64)?);
        let mut state = self.shared.lock();
        let device = &mut state.devices[rank.index()];
        (device.arena, device.staging) = (Some(arena.clone()), Some(staging.clone()));
        device.library = self.library.clone();
        device.marks = vec![0; room.marks];
        device.events = vec![Event::default(); room.events];
        let (shared, graphs) = (self.shared.clone(), self.shared.emulation.graphs);
        Ok(Box::new(Emulated { shared, rank: rank.index(), arena, staging, graphs, library }))
    }

    fn describe(&self) -> Result<Vec<String>, RunError> {
        Ok(vec![format!("{} emulated devices", self.shared.lock().devices.len())])
    }
}

impl State {
    /// A rank's device, if its process lives.
    fn alive(&mut self, rank: usize) -> Result<&mut Simulated, Fault> {
        let device = &mut self.devices[rank];
        if device.dead { Err(Fault::Killed) } else { Ok(device) }
    }

    /// A dead rank that a rank's exchange at the head waits for.
    fn lost_peer(&self, rank: usize) -> Option<usize> {
        let device = &self.devices[rank];
        let queues = [Some(&device.streams[1]), device.running.as_ref().map(|q| &q[1])];
        queues.into_iter().flatten().find_map(|queue| {
            let Some(Item::Command(Command::Exchange(moves))) = queue.items.front() else { return None };
            let open = moves.iter().enumerate().filter(|(i, _)| !queue.moved.get(*i).copied().unwrap_or(false));
            open.map(|(_, m)| m.peer.index()).find(|&peer| self.devices[peer].dead)
        })
    }

    /// All that could happen next.
    fn choices(&self) -> Vec<Choice> {
        let mut choices = Vec::new();
        let mut sends = HashMap::new();
        let mut receives = HashMap::new();
        for (rank, device) in self.devices.iter().enumerate().filter(|(_, d)| d.moves()) {
            for at in device.queues(rank) {
                let queue = device.queue_at(at);
                if queue.busy {
                    continue;
                }
                match queue.items.front() {
                    None => {}
                    Some(Item::Command(Command::Exchange(moves))) => {
                        if queue.moved.is_empty() {
                            choices.push(Choice::Head(at));
                            continue;
                        }
                        for (i, m) in moves.iter().enumerate().filter(|(i, _)| !queue.moved[*i]) {
                            let ends = if m.sends { &mut sends } else { &mut receives };
                            ends.entry(m.channel).or_insert((at, i));
                        }
                    }
                    Some(Item::Until(event, count)) => {
                        if device.events[*event].happened >= *count {
                            choices.push(Choice::Head(at));
                        }
                    }
                    Some(_) => choices.push(Choice::Head(at)),
                }
            }
        }
        let matched = sends.iter().filter_map(|(channel, &from)| Some(Choice::Transfer(from, *receives.get(channel)?)));
        choices.extend(matched);
        choices.sort_by_key(Choice::key);
        choices
    }

    fn draw(&mut self, seed: u64, n: usize) -> usize {
        self.draws += 1;
        (splitmix(seed ^ splitmix(self.draws)) % n as u64) as usize
    }

    fn busy(&self) -> bool {
        let busy = |d: &Simulated| d.streams.iter().chain(d.running.iter().flatten()).any(|q| q.busy);
        self.devices.iter().any(busy)
    }
}

impl Simulated {
    fn moves(&self) -> bool {
        !self.dead && !self.stalled && self.fault.is_none()
    }

    /// The queues whose heads may run: those of the streams, and of the graph that the first is in instead of that one.
    fn queues(&self, rank: usize) -> Vec<At> {
        let at = |stream, graph| At { rank, stream, graph };
        match &self.running {
            None => vec![at(0, false), at(1, false)],
            Some(_) => vec![at(0, true), at(1, true), at(1, false)],
        }
    }

    fn queue_at(&self, at: At) -> &Queue {
        match &self.running {
            Some(queues) if at.graph => &queues[at.stream],
            _ => &self.streams[at.stream],
        }
    }
}

impl Choice {
    /// An order that does not depend on a map's.
    fn key(&self) -> (usize, usize, bool, usize) {
        let (at, i) = match *self {
            Choice::Head(at) => (at, usize::MAX),
            Choice::Transfer((at, i), _) => (at, i),
        };
        (at.rank, at.stream, at.graph, i)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets one thing happen, or time pass when nothing can; or waits for another host to do something.
    fn step(&self, rank: usize) {
        let mut state = self.lock();
        loop {
            if state.aborted || state.devices[rank].dead {
                return;
            }
            if !state.devices[rank].stalled {
                let choices = state.choices();
                if !choices.is_empty() {
                    state.devices[rank].host = Host::Busy;
                    let chosen = choices[state.draw(self.emulation.seed, choices.len())];
                    return self.execute(state, chosen);
                }
                state.devices[rank].host = Host::Waiting;
                let idle = |d: &Simulated| d.host != Host::Busy || d.stalled;
                if !state.busy() && state.devices.iter().all(idle) {
                    state.now += TICK;
                    state.devices.iter_mut().filter(|d| d.host == Host::Waiting).for_each(|d| d.host = Host::Busy);
                    self.changed.notify_all();
                    return;
                }
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            if state.devices[rank].host != Host::Waiting && !state.devices[rank].stalled {
                return;
            }
        }
    }

    /// Executes a choice. A kernel runs without the lock: its queue is marked busy meanwhile.
    fn execute<'s>(&'s self, mut state: MutexGuard<'s, State>, chosen: Choice) {
        let done = match chosen {
            Choice::Transfer(from, to) => state.transfer(from, to).map_err(|what| (from.0.rank, what)),
            Choice::Head(at) => match state.devices[at.rank].queue(at).items.front().cloned() {
                Some(Item::Command(command @ (Command::Launch { .. } | Command::Product { .. }))) => {
                    let device = &mut state.devices[at.rank];
                    let touched = device.touched(at, command.operands());
                    device.queue(at).busy = true;
                    let arena = device.arena.clone().expect("a device that works has memory");
                    let library = device.library.clone();
                    drop(state);
                    let ran = touched.and_then(|()| run(&self.kernels, library.as_ref(), &arena, &command));
                    state = self.lock();
                    state.devices[at.rank].queue(at).busy = false;
                    state.devices[at.rank].pop(at);
                    ran.map_err(|what| (at.rank, what))
                }
                Some(item) => {
                    state.devices[at.rank].head(at, item, self.emulation.injected).map_err(|what| (at.rank, what))
                }
                None => Ok(()),
            },
        };
        if let Err((rank, what)) = done {
            state.devices[rank].fault.get_or_insert(what);
        }
        self.changed.notify_all();
    }
}

impl Simulated {
    /// The numbers of the rank's streams among all.
    fn numbers(&self) -> [usize; 2] {
        [2 * self.rank, 2 * self.rank + 1]
    }

    /// A command of a stream touches these places.
    fn touched(&mut self, at: At, args: &[(u64, Place)]) -> Result<(), String> {
        let numbers = self.numbers();
        self.clocks[at.stream].tick(numbers[at.stream]);
        let clock = &self.clocks[at.stream];
        args.iter().try_for_each(|(start, place)| {
            self.touches.touch(By::Computation, *start..start + place.bytes, clock, numbers)
        })
    }

    /// The head of a queue is done.
    fn pop(&mut self, at: At) {
        let queue = self.queue(at);
        queue.items.pop_front();
        queue.moved.clear();
        if self.running.as_ref().is_some_and(|queues| queues.iter().all(|q| q.items.is_empty())) {
            self.running = None;
            self.streams[0].items.pop_front();
        }
    }

    /// Begins or does what is at the head of a queue and is no kernel.
    fn head(&mut self, at: At, item: Item, injected: Option<Injected>) -> Result<(), String> {
        let numbers = self.numbers();
        self.clocks[at.stream].tick(numbers[at.stream]);
        match item {
            Item::Graph(graph) => {
                self.begin(graph);
                return Ok(());
            }
            Item::Happens(event, number) => {
                let event = &mut self.events[event];
                event.happened = number;
                event.clocks.push_back((number, self.clocks[at.stream].clone()));
                if event.clocks.len() > CLOCKS_KEPT {
                    event.clocks.pop_front();
                }
            }
            Item::Until(event, number) => {
                let known = self.events[event].clocks.iter().find(|(n, _)| *n == number);
                if let Some((_, clock)) = known {
                    self.clocks[at.stream].join(clock);
                }
            }
            Item::Command(Command::Exchange(moves)) => return self.arrive(at, &moves, injected),
            Item::Command(Command::CopyIn { from, to, bytes }) => {
                let place = Place { offset: to, bytes: bytes as u64, stride: 0, slots: 1, by: Default::default() };
                self.touched(at, &[(to, place)])?;
                let (arena, staging) = (self.arena.as_ref(), self.staging.as_ref());
                let mut data = vec![0; bytes];
                staging.expect("it has memory").get(from as u64, &mut data);
                arena.expect("it has memory").put(to, &data);
            }
            Item::Command(Command::CopyOut { from, to, bytes }) => {
                let (arena, staging) = (self.arena.as_ref(), self.staging.as_ref());
                let mut data = vec![0; bytes];
                arena.expect("it has memory").get(from, &mut data);
                staging.expect("it has memory").put(to as u64, &data);
            }
            Item::Command(Command::Mark { word, value, .. }) => self.marks[word] = value,
            Item::Command(other) => return Err(format!("{other:?} is no command of a queue")),
        }
        self.pop(at);
        Ok(())
    }

    /// The first stream comes to a graph: its commands form queues of their own.
    fn begin(&mut self, graph: usize) {
        let mut queues = [Queue::default(), Queue::default()];
        for command in self.graphs[graph].clone() {
            let (stream, item) = self.item(&command);
            queues[stream as usize].items.push_back(item);
        }
        self.running = Some(queues);
    }

    /// A command as it stands in a queue.
    fn item(&mut self, command: &Command) -> (Stream, Item) {
        match *command {
            Command::Record(stream, event) => {
                let of = &mut self.events[event];
                of.enqueued += 1;
                (stream, Item::Happens(event, of.enqueued))
            }
            Command::Wait(stream, event) => (stream, Item::Until(event, self.events[event].enqueued)),
            ref other => (other.stream(), Item::Command(other.clone())),
        }
    }

    /// An exchange comes to the head of its stream.
    fn arrive(&mut self, at: At, moves: &[Move], injected: Option<Injected>) -> Result<(), String> {
        if let Some(injected) = injected.filter(|i| i.rank.index() == self.rank && i.exchanges == self.exchanges) {
            match injected.what {
                Accident::Death => self.dead = true,
                Accident::Stall => self.stalled = true,
            }
            return Ok(());
        }
        self.exchanges += 1;
        let (numbers, clock) = (self.numbers(), &self.clocks[at.stream]);
        for m in moves {
            self.touches.touch(By::Transfer, m.offset..m.offset + m.bytes, clock, numbers)?;
        }
        self.queue(at).moved = vec![false; moves.len()];
        Ok(())
    }

    /// A transfer of a queue's head.
    fn transfer(&self, (at, i): (At, usize)) -> Move {
        match self.queue_at(at).items.front() {
            Some(Item::Command(Command::Exchange(moves))) => moves[i].clone(),
            _ => unreachable!("a choice of a transfer is one of a head exchange"),
        }
    }

    /// A transfer of a queue's head is done.
    fn transferred(&mut self, (at, i): (At, usize)) {
        let queue = self.queue(at);
        queue.moved[i] = true;
        if queue.moved.iter().all(|&moved| moved) {
            self.pop(at);
        }
    }
}

impl State {
    /// Moves what both ends of a transfer are ready for.
    fn transfer(&mut self, from: (At, usize), to: (At, usize)) -> Result<(), String> {
        let (sender, receiver) = (from.0.rank, to.0.rank);
        let (sent, received) = (self.devices[sender].transfer(from), self.devices[receiver].transfer(to));
        if sent.bytes != received.bytes || sent.peer.index() != receiver || received.peer.index() != sender {
            return Err(format!(
                "rank {sender} sends {} bytes to rank {} where rank {receiver} expects {} bytes from rank {}",
                sent.bytes, sent.peer, received.bytes, received.peer
            ));
        }
        let mut data = vec![0; sent.bytes as usize];
        let memory = |d: &Simulated| d.arena.clone().expect("a device that works has memory");
        memory(&self.devices[sender]).get(sent.offset, &mut data);
        memory(&self.devices[receiver]).put(received.offset, &data);
        let clock = self.devices[sender].clocks[1].clone();
        self.devices[receiver].clocks[1].join(&clock);
        let clock = self.devices[receiver].clocks[1].clone();
        self.devices[sender].clocks[1].join(&clock);
        self.devices[sender].transferred(from);
        self.devices[receiver].transferred(to);
        Ok(())
    }
}
