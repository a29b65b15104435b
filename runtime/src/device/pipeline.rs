//! The ranks' threads, each with its device.

use crate::control::{Control, GivenUp};
use crate::device::engine::{Attached, Enqueuer, Layout};
use crate::device::order::{Order, Step};
use crate::device::{Device, Fault, Room};
use crate::error::RunError;
use crate::executor::{Shared, Worker};
use crate::member::Member;
use crate::rank::Rank;
use crate::reports::Reports;
use crate::segment::guarded;
use crate::weights;
use artifact::ids::RankId;
use artifact::program::Manifest;
use artifact::stream::{Instr, Op, Program, Stream};
use std::sync::Arc;
use std::time::Duration;

/// What a run on devices may choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceOptions {
    /// A rank without progress for so long ends the run.
    pub deadline: Duration,
}

impl Default for DeviceOptions {
    fn default() -> Self {
        DeviceOptions { deadline: Duration::from_secs(60) }
    }
}

/// Gives every rank its device.
pub trait Machine: Sync {
    /// A device with an arena of zeros for the rank, and room for what else it needs.
    ///
    /// # Errors
    /// One sentence: what is missing, and what would be enough.
    fn device(&self, manifest: &Manifest, rank: RankId, room: Room) -> Result<Box<dyn Device>, RunError>;

    /// What there is, for people; a line each.
    ///
    /// # Errors
    /// One sentence: which rank's device can't run the code or has no room for it.
    fn describe(&self) -> Result<Vec<String>, RunError>;
}

/// The devices of a run's ranks.
pub struct Devices {
    attached: Vec<Attached>,
    options: DeviceOptions,
    /// In a run of several processes: this one's part.
    member: Option<Arc<Member>>,
    /// The streams of an evaluation.
    forward: Vec<Stream>,
}

/// Graphs and parts of a run, over all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Usage {
    pub graphs: usize,
    /// Parts of segments that ran as a graph, and those enqueued command by command.
    pub launched: u64,
    pub enqueued: u64,
}

impl Devices {
    /// A device for each rank, with the weights that its arena holds.
    ///
    /// # Errors
    /// When a rank can't have one.
    pub fn new(
        manifest: &Manifest,
        machine: &dyn Machine,
        ranks: &[Rank],
        options: DeviceOptions,
        member: Option<Arc<Member>>,
    ) -> Result<Devices, RunError> {
        let attach = &|rank: &Rank| {
            let layout = Layout::new(manifest, rank.id);
            let mut device = machine.device(manifest, rank.id, layout.room)?;
            let stages = manifest.stages.iter().filter(|s| s.rank == rank.id);
            let filled = stages.flat_map(|s| s.params.iter().flat_map(|p| weights::held_at_start(manifest, s, p)));
            for (place, slot) in filled {
                let sent = device.upload(place.at(slot), rank.arena.view::<u8>(&place, slot));
                sent.map_err(|fault| failed(rank.id, "taking the weights", fault))?;
            }
            Ok(Attached::new(device, layout))
        };
        // All at once: a rank may have to meet the others before it has its device.
        let attached: Vec<Result<Attached, RunError>> = std::thread::scope(|scope| {
            let threads: Vec<_> = ranks.iter().map(|rank| scope.spawn(move || attach(rank))).collect();
            threads.into_iter().map(|t| t.join().expect("attaching a device doesn't panic")).collect()
        });
        let attached = attached.into_iter().collect::<Result<_, RunError>>()?;
        Ok(Devices { attached, options, member, forward: forward(&manifest.program) })
    }

    /// Bytes of the arena of the rank at a position among those here, as allocated.
    pub fn allocated(&self, position: usize) -> u64 {
        self.attached[position].device.allocated()
    }

    /// Runs a segment's training; returns when every rank has ended. Failures are recorded in the control.
    pub fn train(
        &mut self,
        shared: Shared<'_>,
        ranks: &mut [Rank],
        updates_before: u64,
        reports: &Reports,
        meanwhile: impl FnOnce(),
    ) {
        let (manifest, control) = (shared.manifest, shared.control);
        let engines = self.engines(shared, ranks, Some(reports));
        std::thread::scope(|scope| {
            for (rank, engine) in ranks.iter_mut().zip(engines) {
                scope.spawn(move || {
                    let (id, program) = (rank.id, &manifest.program);
                    let _ = guarded(
                        shared,
                        rank,
                        || engine,
                        updates_before,
                        |worker| {
                            follow(worker, control, program, &program.streams, id, |worker, op, stage, at| {
                                worker.instruction(op, stage, at)
                            })
                        },
                    );
                    reports.close();
                });
            }
            meanwhile();
        });
    }

    /// An engine for each rank. All are at work before the first one waits for another.
    fn engines<'a>(
        &'a mut self,
        shared: Shared<'a>,
        ranks: &[Rank],
        reports: Option<&'a Reports>,
    ) -> Vec<Enqueuer<'a>> {
        let (deadline, member) = (self.options.deadline, self.member.as_deref());
        let engine = |(rank, attached): (&Rank, &'a mut Attached)| {
            Enqueuer::new(shared.manifest, rank.id, attached, shared.control, reports, deadline, member)
        };
        ranks.iter().zip(&mut self.attached).map(engine).collect()
    }

    /// Runs forward passes; the sum of their losses.
    pub fn evaluate(&mut self, shared: Shared<'_>, ranks: &mut [Rank]) -> f64 {
        let (manifest, control) = (shared.manifest, shared.control);
        let forward = self.forward.clone();
        let engines = self.engines(shared, ranks, None);
        std::thread::scope(|scope| {
            let begin = |(rank, engine): (_, _)| {
                let (rank, forward): (&mut Rank, _) = (rank, &forward);
                scope.spawn(move || {
                    let (id, program) = (rank.id, &manifest.program);
                    guarded(
                        shared,
                        rank,
                        || engine,
                        0,
                        |worker| {
                            follow(worker, control, program, forward, id, |worker, op, stage, at| {
                                worker.evaluation(op, stage, at)
                            })
                        },
                    )
                })
            };
            let threads: Vec<_> = ranks.iter_mut().zip(engines).map(begin).collect();
            let sums = threads.into_iter().map(|t| t.join().expect("a rank's thread catches its panics"));
            sums.map(|sum| sum.unwrap_or(0.0)).sum()
        })
    }

    /// Fetches the newest weights into the ranks' arenas.
    ///
    /// # Errors
    /// When a device does not give them.
    pub fn fetch(&mut self, manifest: &Manifest, ranks: &mut [Rank]) -> Result<(), RunError> {
        for (rank, attached) in ranks.iter_mut().zip(&mut self.attached) {
            let newest: Vec<(usize, u64)> = rank.stages.iter().map(|s| (s.index, s.version)).collect();
            for (stage, version) in newest {
                let slot = weights::slot(&manifest.stages[stage], version);
                for param in &manifest.stages[stage].params {
                    let out: &mut [u8] = rank.arena.view_mut(&param.weight, slot);
                    let got = attached.device.download(param.weight.at(slot), out);
                    got.map_err(|fault| failed(rank.id, "giving the weights back", fault))?;
                }
            }
        }
        Ok(())
    }

    pub fn usage(&self) -> Usage {
        self.attached.iter().fold(Usage::default(), |sum, a| Usage {
            graphs: sum.graphs + a.graphs(),
            launched: sum.launched + a.launched,
            enqueued: sum.enqueued + a.enqueued,
        })
    }
}

impl Drop for Devices {
    /// All at once: ranks may leave a transport together only.
    fn drop(&mut self) {
        std::thread::scope(|scope| {
            self.attached.drain(..).for_each(|attached| {
                scope.spawn(move || drop(attached));
            });
        });
    }
}

fn failed(rank: RankId, action: &str, fault: Fault) -> RunError {
    let cause = match fault {
        Fault::Device(cause) | Fault::Peer(_, cause) => cause,
        Fault::Killed => "it was killed".into(),
    };
    RunError::Rank { rank, action: action.into(), cause }
}

/// The streams of an evaluation: a forward pass of each stage, again and again.
fn forward(program: &Program) -> Vec<Stream> {
    let mut streams =
        vec![Stream { prologue: Vec::new(), period: Vec::new(), microbatches: 1, updates: 0 }; program.streams.len()];
    for (stage, rank) in program.rank_of_stage.iter().enumerate() {
        let ops = [
            program.border_before(stage).map(|_| Op::RecvF),
            Some(Op::F),
            program.border_after(stage).map(|_| Op::SendF),
        ];
        let stage = artifact::ids::StageId(stage as u32);
        let instructions = ops.into_iter().flatten().map(|op| Instr { op, stage, mb: 0 });
        streams[rank.index()].period.extend(instructions);
    }
    streams
}

/// Takes a rank through its steps until all of the segment is done.
fn follow<'w, 'e>(
    worker: &mut Worker<'w, Enqueuer<'e>>,
    control: &Control<'_>,
    program: &Program,
    streams: &[Stream],
    id: RankId,
    instruction: impl Fn(&mut Worker<'w, Enqueuer<'e>>, Op, artifact::ids::StageId, u64) -> Result<(), GivenUp>,
) -> Result<f64, GivenUp> {
    let mut order = Order::new(program, streams, id.index());
    let per_repetition = u64::from(streams[id.index()].microbatches.max(1));
    // Slots that were handed over and not exchanged; and whether all instructions have come.
    let (mut open, mut over) = (0usize, false);
    while let Some(step) = order.next() {
        match step {
            Step::Instruction(op, stage, at) => {
                if !control.begins(op, at) {
                    continue;
                }
                open += usize::from(op.transfers());
                instruction(worker, op, stage, at)?;
            }
            Step::Exchange(mut sides) => {
                sides.retain(|side| !control.skips(if side.ring.by_update() { Op::U } else { Op::F }, side.mb));
                if !sides.is_empty() {
                    open -= sides.len();
                    worker.exchange(&sides)?;
                }
            }
            Step::Repetition(n) => {
                worker.engine.submit()?;
                over = n * per_repetition >= control.limit();
            }
        }
        if over && open == 0 {
            break;
        }
    }
    worker.end_of_segment()
}
