//! Instructions to commands.
//!
//! Commands are gathered into a part, and the part is enqueued as a whole. While it runs, the host gathers the next one; before a third it
//! waits for the first. All waiting of the host is in [`Enqueuer::await_oldest`]: there it sees progress by the marks that each computation
//! and each exchange writes, and when there is none for as long as the deadline, it says what the rank waits for.

use crate::control::{Control, Failure, GivenUp};
use crate::device::order::Side;
use crate::device::{Command, Device, Fault, GRAPHS_MAX, Move, PARTS_MAX, Room, Stream, library};
use crate::executor::{Engine, Report, Ring, Transfer};
use crate::member::Member;
use crate::rank::Rank;
use crate::reports::Reports;
use crate::versions::Slots;
use artifact::channel::{Channel, channels, side};
use artifact::ids::{RankId, StageId};
use artifact::program::{Call, HYPER_LEN, Manifest, Place};
use std::collections::{HashMap, VecDeque};
use std::time::Duration;

/// Staging memory is given out in multiples of this.
const STAGING_ALIGN: usize = 64;

/// Events that belong to no slot: of the streams' forks and joins in graphs, and of each part's end on either stream (what is left of one part
/// must not write its marks into the next's).
const FORK: usize = 0;
const JOIN: usize = 1;
const ENDS: usize = 2;
const SLOT_EVENTS: usize = ENDS + 2 * PARTS_MAX;

/// How a rank's events are numbered, and what a device needs room for.
#[derive(Clone, Debug)]
pub struct Layout {
    /// By stage of the rank and ring: the number of the first slot's events.
    first: Vec<[usize; Ring::ALL.len()]>,
    pub room: Room,
}

impl Layout {
    pub fn new(manifest: &Manifest, rank: RankId) -> Layout {
        let stages: Vec<_> = manifest.stages.iter().filter(|s| s.rank == rank).collect();
        let (mut first, mut next) = (Vec::new(), SLOT_EVENTS);
        for stage in &stages {
            first.push(Ring::ALL.map(|ring| {
                let start = next;
                next += 2 * ring.place(stage).map_or(0, |p| p.slots as usize);
                start
            }));
        }
        let data = manifest.data;
        let tokens = 2 * (data.microbatch as usize * data.context as usize * 4 + STAGING_ALIGN);
        let hyper = manifest.groups.len() * 2 * HYPER_LEN * 4 + STAGING_ALIGN;
        let stream = &manifest.program.streams[rank.index()];
        // An evaluation has a forward pass of every stage in a part.
        let instructions = stream.prologue.len().max(stream.period.len()).max(stages.len());
        let part = instructions * (tokens + hyper + STAGING_ALIGN);
        let room = Room { staging_bytes: PARTS_MAX * part, events: next, marks: 2 * PARTS_MAX };
        Layout { first, room }
    }

    /// The events of a slot: ready, done.
    fn events(&self, local: usize, ring: Ring, slot: u64) -> (usize, usize) {
        let ready = self.first[local][ring as usize] + 2 * slot as usize;
        (ready, ready + 1)
    }
}

/// Something that comes back when a part has ended, in order.
#[derive(Clone, Debug)]
enum Entry {
    /// A micro-batch's loss lies at a byte of the staging memory.
    Loss {
        local: usize,
        mb: u64,
        at: usize,
    },
    Report {
        local: usize,
        report: Report,
    },
}

/// Transfers that were enqueued together.
#[derive(Clone, Debug)]
struct Exchange {
    /// For people.
    what: String,
    /// Computations of the part that come before its slots are ready.
    after: u32,
}

/// Commands that are gathered, or enqueued and not known to have ended.
#[derive(Clone, Debug, Default)]
struct Part {
    number: usize,
    commands: Vec<Command>,
    staging_used: usize,
    exchanges: Vec<Exchange>,
    /// For people.
    computations: Vec<String>,
    /// By event of a slot that is ready: computations of the part before.
    ready: HashMap<usize, u32>,
    log: Vec<Entry>,
}

/// A rank's device with what is known of it over a whole run.
pub struct Attached {
    pub device: Box<dyn Device>,
    pub layout: Layout,
    graphs: HashMap<Vec<Command>, usize>,
    /// Parts that were launched as a graph, and those that were not.
    pub launched: u64,
    pub enqueued: u64,
}

impl Attached {
    pub fn new(device: Box<dyn Device>, layout: Layout) -> Attached {
        Attached { device, layout, graphs: HashMap::new(), launched: 0, enqueued: 0 }
    }

    /// Graphs captured so far.
    pub fn graphs(&self) -> usize {
        self.graphs.len()
    }
}

/// The engine of a rank on a device, during a segment.
pub struct Enqueuer<'a> {
    manifest: &'a Manifest,
    id: RankId,
    attached: &'a mut Attached,
    control: &'a Control<'a>,
    reports: Option<&'a Reports>,
    deadline: Duration,
    /// Who tells that another process has failed.
    member: Option<&'a Member>,
    channels: Vec<Channel>,
    part: Part,
    flight: VecDeque<Part>,
    /// By event: the part that recorded it last.
    recorded: Vec<Option<usize>>,
    /// By stage of the rank: losses of micro-batches whose update is not reported, by micro-batch modulo the length.
    losses: Vec<Vec<f64>>,
    /// Of an evaluation.
    loss_sum: f64,
    /// Time that the host waited.
    pub wait_ns: u64,
}

impl<'a> Enqueuer<'a> {
    pub fn new(
        manifest: &'a Manifest,
        id: RankId,
        attached: &'a mut Attached,
        control: &'a Control<'a>,
        reports: Option<&'a Reports>,
        deadline: Duration,
        member: Option<&'a Member>,
    ) -> Self {
        attached.device.working(true);
        let stages = manifest.stages.iter().filter(|s| s.rank == id);
        let kept = |s: &artifact::program::Stage| (manifest.program.accumulate + s.rings.stash) as usize;
        Enqueuer {
            manifest,
            id,
            control,
            reports,
            deadline,
            member,
            channels: channels(&manifest.program),
            part: Part::default(),
            flight: VecDeque::new(),
            recorded: vec![None; attached.layout.room.events],
            losses: stages.map(|s| vec![0.0; kept(s)]).collect(),
            loss_sum: 0.0,
            wait_ns: 0,
            attached,
        }
    }

    /// Enqueues transfers whose slots are ready.
    ///
    /// # Errors
    /// [`GivenUp`] when the run has failed.
    pub fn exchange(&mut self, rank: &Rank, sides: &[Side]) -> Result<(), GivenUp> {
        let mut moves = Vec::with_capacity(sides.len());
        let mut whats = Vec::with_capacity(sides.len());
        let mut after = 0;
        let mut done = Vec::with_capacity(sides.len());
        for side in sides {
            let local = rank.stages.iter().position(|s| s.index == side.stage.index());
            let local = local.expect("an exchange of the rank's own stages");
            let place = side.ring.place(&self.manifest.stages[side.stage.index()]);
            let place = place.expect("a verified stream has transfers only where there are slots");
            let events = self.attached.layout.events(local, side.ring, side.mb % u64::from(place.slots));
            self.wait_for(Stream::Transfers, events.0);
            after = after.max(self.part.ready.get(&events.0).copied().unwrap_or(0));
            done.push(events.1);
            let (peer, channel) = self.other_end(side.stage, side.ring);
            moves.push(Move { sends: side.ring.sends(), peer, channel, offset: place.at(side.mb), bytes: place.bytes });
            let number = if side.ring.by_update() { "update" } else { "micro-batch" };
            whats.push(format!("rank {peer}: {} of {number} {}", side.ring.name(), side.mb));
        }
        self.part.commands.push(Command::Exchange(moves));
        done.into_iter().for_each(|event| self.record(Stream::Transfers, event));
        self.part.exchanges.push(Exchange { what: whats.join(", or for "), after });
        self.mark(Stream::Transfers, self.part.exchanges.len());
        Ok(())
    }

    /// The rank at a ring's other end, and the number of the channel.
    fn other_end(&self, stage: StageId, ring: Ring) -> (RankId, usize) {
        let program = &self.manifest.program;
        let (number, sends) = side(program, ring.op(), stage.index()).expect("a ring is one of a channel");
        let Channel { from, to, .. } = self.channels[number];
        (program.rank_of_stage[if sends { to } else { from }], number)
    }

    /// Enqueues the part that was gathered, and makes room for the next one.
    ///
    /// # Errors
    /// [`GivenUp`] when the run has failed.
    pub fn submit(&mut self) -> Result<(), GivenUp> {
        if self.control.failed() {
            return Err(self.give_up());
        }
        if self.part.commands.is_empty() {
            return Ok(());
        }
        let ends = ends(self.part.number);
        let fork = self.part.commands.iter().any(|c| matches!(c, Command::Exchange(_)));
        if self.attached.device.captures() && fork {
            let start = [Command::Record(Stream::Compute, FORK), Command::Wait(Stream::Transfers, FORK)];
            self.part.commands.splice(0..0, start);
            self.part.commands.push(Command::Record(Stream::Transfers, JOIN));
            self.part.commands.push(Command::Wait(Stream::Compute, JOIN));
        }
        for stream in [0, 1] {
            self.attached.device.set_mark(self.word(stream), 0);
        }
        if let Err(fault) = self.enqueue(ends) {
            // What was gathered is what the rank is at.
            self.flight.push_back(std::mem::take(&mut self.part));
            return Err(self.fail(fault));
        }
        let number = self.part.number + 1;
        self.flight.push_back(std::mem::replace(&mut self.part, Part { number, ..Part::default() }));
        while self.flight.len() >= PARTS_MAX {
            self.await_oldest()?;
        }
        Ok(())
    }

    /// Hands the part's commands to the device, as a graph where that works.
    fn enqueue(&mut self, ends: [usize; 2]) -> Result<(), Fault> {
        let attached = &mut *self.attached;
        let known = attached.graphs.get(&self.part.commands).copied();
        let graph = match known {
            None if attached.device.captures() && attached.graphs.len() < GRAPHS_MAX => {
                let graph = attached.device.capture(&self.part.commands)?;
                attached.graphs.insert(self.part.commands.clone(), graph);
                Some(graph)
            }
            known => known,
        };
        match graph {
            Some(graph) => attached.device.launch(graph)?,
            None => attached.device.enqueue(&self.part.commands)?,
        }
        (attached.launched, attached.enqueued) = match graph {
            Some(_) => (attached.launched + 1, attached.enqueued),
            None => (attached.launched, attached.enqueued + 1),
        };
        let [computed, moved] = ends;
        attached
            .device
            .enqueue(&[Command::Record(Stream::Compute, computed), Command::Record(Stream::Transfers, moved)])
    }

    /// Enqueues what is left and waits for all of it. The sum of an evaluation's losses.
    ///
    /// # Errors
    /// [`GivenUp`] when the run has failed.
    pub fn finish(&mut self) -> Result<f64, GivenUp> {
        // The last sends are not waited for by any computation.
        for event in SLOT_EVENTS..self.recorded.len() {
            if (event - SLOT_EVENTS) % 2 == 1 && self.recorded[event].is_some() {
                self.wait_for(Stream::Compute, event);
            }
        }
        self.submit()?;
        while !self.flight.is_empty() {
            self.await_oldest()?;
        }
        Ok(self.loss_sum)
    }

    /// Waits until the oldest part that was enqueued has ended, and takes what it brings.
    fn await_oldest(&mut self) -> Result<(), GivenUp> {
        let number = self.flight.front().expect("the caller saw one").number;
        let mut seen = (0, 0);
        let start = self.attached.device.now();
        let mut moved = start;
        loop {
            match self.ended(number) {
                Ok(true) => break,
                Ok(false) => {}
                Err(fault) => return Err(self.fail(fault)),
            }
            if self.control.failed() {
                return Err(self.give_up());
            }
            if let Some(what) = self.member.and_then(|member| member.store.failure()) {
                return Err(self.fail(Fault::Peer(self.id, what)));
            }
            let (marks, now) = (self.marks(number), self.attached.device.now());
            if marks != seen {
                (seen, moved) = (marks, now);
            } else if now.saturating_sub(moved) >= self.deadline {
                return Err(self.time_out());
            }
            self.attached.device.pause();
        }
        self.wait_ns += self.attached.device.now().saturating_sub(start).as_nanos() as u64;
        let part = self.flight.pop_front().expect("seen above");
        self.take(&part);
        Ok(())
    }

    fn ended(&mut self, number: usize) -> Result<bool, Fault> {
        let [computed, moved] = ends(number);
        Ok(self.attached.device.happened(computed)? && self.attached.device.happened(moved)?)
    }

    /// Puts losses into the reports that wait for them, and sends those.
    fn take(&mut self, part: &Part) {
        for entry in &part.log {
            match *entry {
                Entry::Loss { local, mb, at } => {
                    let mut bytes = [0; 8];
                    self.attached.device.staged(at, &mut bytes);
                    let loss = f64::from_le_bytes(bytes);
                    let kept = &mut self.losses[local];
                    let slot = mb as usize % kept.len();
                    kept[slot] = loss;
                    self.loss_sum += loss;
                }
                Entry::Report { local, mut report } => {
                    if report.loss.is_some() {
                        let (kept, k) = (&self.losses[local], u64::from(self.manifest.program.accumulate));
                        let mbs = report.of_segment * k..(report.of_segment + 1) * k;
                        report.loss = Some(mbs.map(|mb| kept[mb as usize % kept.len()]).sum());
                    }
                    if let Some(reports) = self.reports {
                        reports.send(report);
                    }
                }
            }
        }
    }

    /// Numbers of the words that a part's marks are in: of computations, of exchanges.
    fn word(&self, stream: usize) -> usize {
        2 * (self.part.number % PARTS_MAX) + stream
    }

    /// Computations and exchanges of a part that have ended.
    fn marks(&self, number: usize) -> (u32, u32) {
        let word = 2 * (number % PARTS_MAX);
        (self.attached.device.mark(word), self.attached.device.mark(word + 1))
    }

    fn mark(&mut self, stream: Stream, value: usize) {
        let word = self.word(stream as usize);
        self.part.commands.push(Command::Mark { stream, word, value: value as u32 });
    }

    fn record(&mut self, stream: Stream, event: usize) {
        self.recorded[event] = Some(self.part.number);
        self.part.commands.push(Command::Record(stream, event));
    }

    /// A wait for what an event was recorded for, if it was. A graph waits for nothing from before it: that has ended when it begins.
    fn wait_for(&mut self, stream: Stream, event: usize) {
        let Some(number) = self.recorded[event] else { return };
        if number == self.part.number || !self.attached.device.captures() {
            self.part.commands.push(Command::Wait(stream, event));
        }
    }

    /// A stretch of the part's staging memory.
    fn stage(&mut self, bytes: usize) -> usize {
        let share = self.attached.layout.room.staging_bytes / PARTS_MAX;
        let start = self.part.staging_used;
        self.part.staging_used = (start + bytes).next_multiple_of(STAGING_ALIGN);
        assert!(self.part.staging_used <= share, "the layout counted what a part stages");
        self.part.number % PARTS_MAX * share + start
    }

    /// What keeps the parts in flight from going on.
    fn waiting(&self) -> Waiting {
        for part in &self.flight {
            let (computed, exchanged) = self.marks(part.number);
            match (part.exchanges.get(exchanged as usize), part.computations.get(computed as usize)) {
                (Some(exchange), _) if exchange.after <= computed => return Waiting::Peer(exchange.what.clone()),
                (_, Some(computation)) => return Waiting::Itself(computation.clone()),
                _ => {}
            }
        }
        Waiting::Nothing
    }

    fn time_out(&mut self) -> GivenUp {
        let (id, s) = (self.id, self.deadline.as_secs_f64());
        let sentence = match self.waiting() {
            Waiting::Peer(what) => format!("rank {id} waited {s} s for {what}"),
            Waiting::Itself(what) => format!("{what} on rank {id} didn't end within {s} s"),
            Waiting::Nothing => format!("rank {id}'s device did nothing for {s} s"),
        };
        self.control.waited(id, sentence);
        self.attached.device.abort();
        GivenUp
    }

    /// The run failed elsewhere: tells what this rank waited for, if it did.
    fn give_up(&mut self) -> GivenUp {
        if let Waiting::Peer(what) = self.waiting() {
            self.control.waited(self.id, format!("rank {} was waiting for {what}", self.id));
        }
        self.attached.device.abort();
        GivenUp
    }

    fn fail(&mut self, fault: Fault) -> GivenUp {
        match fault {
            // A rank that is no more says nothing, and nobody tells the others.
            Fault::Killed => return GivenUp,
            Fault::Device(cause) => {
                let action = match self.waiting() {
                    Waiting::Itself(what) => what,
                    _ => "its work on the device".into(),
                };
                self.control.fail(Failure { rank: self.id, action, cause });
            }
            Fault::Peer(peer, cause) => {
                let waited = match self.waiting() {
                    Waiting::Peer(what) => format!("; it waited for {what}"),
                    // News from outside of the transfers.
                    _ if peer == self.id => String::new(),
                    _ => format!("; it waited for rank {peer}"),
                };
                self.control.waited(self.id, format!("rank {} can't go on, {cause}{waited}", self.id));
            }
        }
        self.attached.device.abort();
        GivenUp
    }
}

impl Drop for Enqueuer<'_> {
    fn drop(&mut self) {
        if self.control.failed() {
            self.attached.device.abort();
        }
        self.attached.device.working(false);
    }
}

/// The events of a part's end, by stream.
fn ends(number: usize) -> [usize; 2] {
    let first = ENDS + 2 * (number % PARTS_MAX);
    [first, first + 1]
}

enum Waiting {
    /// A transfer, whose other end is not there.
    Peer(String),
    /// A computation of its own.
    Itself(String),
    Nothing,
}

impl Engine for Enqueuer<'_> {
    fn transfer(&mut self, _: &mut Rank, transfer: Transfer) -> Result<(), GivenUp> {
        let Transfer { local, ring, mb } = transfer;
        let slots = self.slots(local, ring);
        let (ready, _) = self.attached.layout.events(local, ring, mb % slots);
        self.record(Stream::Compute, ready);
        self.part.ready.insert(ready, self.part.computations.len() as u32);
        Ok(())
    }

    fn wait(&mut self, _: &mut Rank, transfer: Transfer) -> Result<bool, GivenUp> {
        let Transfer { local, ring, mb } = transfer;
        let slots = self.slots(local, ring);
        if slots > 0 {
            let (_, done) = self.attached.layout.events(local, ring, mb % slots);
            self.wait_for(Stream::Compute, done);
        }
        Ok(true)
    }

    fn written(&mut self, rank: &Rank, place: &Place, index: u64) -> Result<(), GivenUp> {
        let bytes: &[u8] = rank.arena.view(place, index);
        let from = self.stage(bytes.len());
        self.attached.device.stage(from, bytes);
        self.part.commands.push(Command::CopyIn { from, to: place.at(index), bytes: bytes.len() });
        Ok(())
    }

    fn call(&mut self, rank: &Rank, local: usize, calls: &[Call], slots: Slots) -> Result<u64, GivenUp> {
        let stage = rank.stages[local].index;
        for call in calls {
            let at = |place: &Place| (place.at(slots.index(place.by)), *place);
            let args = call.args.iter().map(at).collect();
            self.part.commands.push(library::command(self.manifest, stage, call.kernel, args));
        }
        let mb = slots.microbatch;
        self.part.computations.push(format!("the work of micro-batch (or update) {mb} on stage {stage}"));
        self.mark(Stream::Compute, self.part.computations.len());
        Ok(0)
    }

    fn loss(&mut self, _: &Rank, local: usize, mb: u64, place: &Place) -> Result<Option<f64>, GivenUp> {
        let to = self.stage(8);
        self.part.commands.push(Command::CopyOut { from: place.at(mb), to, bytes: 8 });
        self.part.log.push(Entry::Loss { local, mb, at: to });
        Ok(None)
    }

    fn report(&mut self, local: usize, report: Report) {
        self.part.log.push(Entry::Report { local, report });
    }
}

impl Enqueuer<'_> {
    /// Slots of a ring of one of the rank's stages.
    fn slots(&self, local: usize, ring: Ring) -> u64 {
        let mut stages = self.manifest.stages.iter().filter(|s| s.rank == self.id);
        let stage = stages.nth(local).expect("a stage of this rank");
        ring.place(stage).map_or(0, |p| u64::from(p.slots))
    }
}
