//! GPUs through the CUDA driver, which is loaded when a bundle needs it: the program starts without one.
//!
//! [`Cuda`] finds out what there is, says in one sentence what is missing, and gives each rank a device. Transfers go through NCCL between GPUs, and
//! through the GPU's own memory between ranks that share one.

mod blas;
mod device;
mod driver;
mod local;
mod nccl;
mod patience;

use crate::device::cuda::blas::{Blas, Lt};
use crate::device::cuda::device::{Functions, OnGpu, Peers};
use crate::device::cuda::driver::{Driver, EventHandle, Gpu};
use crate::device::cuda::local::Board;
use crate::device::cuda::nccl::{Nccl, UniqueId};
use crate::device::cuda::patience::Patience;
use crate::device::pipeline::Machine;
use crate::device::{Device, Fault, Room, library};
use crate::error::RunError;
use crate::member::Member;
use artifact::bundle::Bundle;
use artifact::ids::RankId;
use artifact::program::Manifest;
use artifact::tuning::Identity;
use std::sync::Arc;
use std::time::Duration;

/// The number of a GPU among those that the process may use.
pub type Ordinal = u32;

/// The ranks' GPUs.
pub struct Cuda<'b> {
    bundle: &'b Bundle,
    driver: Driver,
    chip: Chip,
    /// By rank.
    ordinals: Vec<Ordinal>,
    transport: Transport,
    /// cuBLASLt, for a bundle that is tuned, or to be.
    library: Option<Arc<Lt>>,
    /// Knows this process's part in a run of several.
    patience: Patience,
}

/// How the ranks' transfers go.
enum Transport {
    /// There is one rank.
    None,
    /// All ranks are on one GPU.
    Local(Arc<Board<EventHandle>>),
    Nccl(Arc<Nccl>, UniqueId),
}

impl Transport {
    /// NCCL with a new communicator; its id goes from rank 0 to the other processes.
    fn nccl(member: Option<&Arc<Member>>) -> Result<Transport, String> {
        let nccl = Nccl::load()?;
        let id = match member {
            Some(member) if member.rank.0 > 0 => {
                let id = member.store.get("nccl")?;
                id.try_into().map_err(|_| "rank 0 runs another version of this program".to_owned())?
            }
            _ => nccl.unique_id()?,
        };
        if let Some(member) = member.filter(|member| member.rank.0 == 0) {
            member.store.put("nccl", &id)?;
        }
        Ok(Transport::Nccl(Arc::new(nccl), id))
    }
}

/// What a bundle's code is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Chip {
    major: u32,
    minor: u32,
    /// Features of this very chip are used: later ones don't run it.
    exact: bool,
}

impl Chip {
    /// `cuda:sm_90a`.
    fn parse(target: &str) -> Option<Chip> {
        let digits = target.strip_prefix("cuda:sm_")?;
        let (digits, exact) = digits.strip_suffix('a').map_or((digits, false), |digits| (digits, true));
        let number: u32 = digits.parse().ok()?;
        Some(Chip { major: number / 10, minor: number % 10, exact })
    }

    /// Whether a GPU of this compute capability runs the code (PTX is compiled for it when it is loaded).
    fn runs_on(self, capability: (u32, u32)) -> bool {
        let wanted = (self.major, self.minor);
        if self.exact { capability == wanted } else { capability >= wanted }
    }

    /// Whether it runs machine code for the chip: of the same generation only.
    fn assembled_for(self, capability: (u32, u32)) -> bool {
        self.runs_on(capability) && capability.0 == self.major
    }
}

fn missing(what: impl Into<String>) -> RunError {
    RunError::Device(what.into())
}

/// What the bundle is for, and the driver.
fn opened(bundle: &Bundle) -> Result<(Chip, Driver), RunError> {
    let target = &bundle.manifest.cpu;
    let chip = Chip::parse(target).ok_or_else(|| missing(format!("the bundle's target `{target}` is no GPU")))?;
    let driver = Driver::load()
        .map_err(|e| missing(format!("the NVIDIA driver of this machine does not start: {e}")))?
        .ok_or_else(|| {
            missing(format!(
                "the bundle was compiled for `{target}`, and this machine has no NVIDIA driver (libcuda.so was not found)"
            ))
        })?;
    Ok((chip, driver))
}

/// The library that a bundle was tuned with.
fn tuned_with(manifest: &Manifest) -> Result<Arc<Lt>, String> {
    let version = manifest.library().map(|tuning| tuning.on.version);
    Lt::load(version).map(Arc::new).or_else(|missing| {
        library::check(manifest, &Err(missing.clone()))?;
        Err(missing)
    })
}

/// The library on a GPU.
fn identity(lt: &Lt, gpu: &Gpu) -> Result<Identity, String> {
    let (major, minor) = gpu.capability()?;
    let (library, version) = ("cuBLASLt".into(), lt.version());
    let multiprocessors = gpu.multiprocessors()?;
    Ok(Identity { library, version, gpu: gpu.name(), capability: [major, minor], multiprocessors })
}

impl<'b> Cuda<'b> {
    /// Finds a GPU for every rank of a bundle.
    ///
    /// # Errors
    /// One sentence: no driver, no GPU, too few, one that can't run the code, no NCCL where it is needed.
    pub fn new(bundle: &'b Bundle, deadline: Duration, member: Option<Arc<Member>>) -> Result<Cuda<'b>, RunError> {
        let (chip, driver) = opened(bundle)?;
        let (ranks, gpus) = (bundle.manifest.memory.len() as u32, driver.count());
        let (ordinals, transport) = match &member {
            Some(member) => {
                let own = place_member(member.local, gpus).map_err(missing)?;
                (vec![own; ranks as usize], Transport::nccl(Some(member)).map_err(missing)?)
            }
            None => {
                let transport = match (ranks, gpus) {
                    (1, _) => Transport::None,
                    (_, 1) => Transport::Local(Arc::new(Board::new())),
                    _ => Transport::nccl(None).map_err(missing)?,
                };
                (place(ranks, gpus).map_err(missing)?, transport)
            }
        };
        let library = match bundle.manifest.library() {
            Some(_) => Some(tuned_with(&bundle.manifest).map_err(missing)?),
            None => None,
        };
        let patience = Patience::new(deadline, member);
        let cuda = Cuda { bundle, driver, chip, ordinals, transport, library, patience };
        cuda.has_room().map_err(missing)?;
        Ok(cuda)
    }

    /// The first GPU for each rank alone, with cuBLASLt, to measure the kernels of a bundle that is not tuned.
    ///
    /// # Errors
    /// One sentence: no driver, no GPU, one that can't run the code, no cuBLASLt.
    pub fn to_tune(bundle: &'b Bundle, deadline: Duration) -> Result<Cuda<'b>, RunError> {
        let (chip, driver) = opened(bundle)?;
        place(1, driver.count().min(1)).map_err(missing)?;
        let library = Lt::load(None).map_err(|what| missing(format!("{what}; install that of CUDA 12 or 13")))?;
        let library = Some(Arc::new(library));
        let (ordinals, transport) = (vec![0; bundle.manifest.memory.len()], Transport::None);
        Ok(Cuda { bundle, driver, chip, ordinals, transport, library, patience: Patience::new(deadline, None) })
    }

    /// Whether a GPU runs the code.
    fn suits(&self, gpu: &Gpu) -> Result<(), String> {
        let capability = gpu.capability()?;
        if !self.chip.runs_on(capability) {
            let ((major, minor), target, ordinal) = (capability, &self.bundle.manifest.cpu, gpu.ordinal);
            return Err(format!(
                "the bundle was compiled for `{target}`, and GPU {ordinal} ({}) has compute capability {major}.{minor}; \
                 compile it with `--target cuda:sm_{major}{minor}`",
                gpu.name()
            ));
        }
        Ok(())
    }

    /// Whether every GPU has room for the arenas of its ranks here.
    fn has_room(&self) -> Result<(), String> {
        for (rank, &ordinal) in self.ordinals.iter().enumerate().filter(|(rank, _)| self.is_here(*rank)) {
            let memory = &self.bundle.manifest.memory;
            let on_it = (0..memory.len()).filter(|&r| self.ordinals[r] == ordinal && self.is_here(r));
            let ranks: Vec<usize> = on_it.collect();
            if ranks[0] < rank {
                continue;
            }
            let gpu = self.driver.gpu(ordinal)?;
            let (needed, (free, total)) = (ranks.iter().map(|&r| memory[r].total).sum::<u64>(), gpu.memory()?);
            if needed > free {
                let whose =
                    if ranks.len() == 1 { format!("rank {rank} needs") } else { format!("{} ranks need", ranks.len()) };
                return Err(format!(
                    "{whose} {needed} bytes on GPU {ordinal} ({}), which has {free} of {total} free",
                    gpu.name()
                ));
            }
        }
        Ok(())
    }

    /// Whether a rank is of this process.
    fn is_here(&self, rank: usize) -> bool {
        self.patience.member.as_ref().is_none_or(|member| member.rank.index() == rank)
    }

    /// See [`Machine::device`].
    fn attach(&self, manifest: &Manifest, rank: RankId, room: Room) -> Result<OnGpu, RunError> {
        let failed = |what: String| missing(format!("rank {rank} can't use its GPU: {what}"));
        let gpu = self.driver.gpu(self.ordinals[rank.index()]).map_err(failed)?;
        self.suits(&gpu).map_err(missing)?;
        let blas = match &self.library {
            Some(lt) => {
                let identity = identity(lt, &gpu).map_err(failed)?;
                library::check(manifest, &Ok(identity.clone())).map_err(missing)?;
                let own = self.driver.gpu(gpu.ordinal).map_err(failed)?;
                Some(Blas::new(lt.clone(), own, identity).map_err(failed)?)
            }
            None => None,
        };
        let cubins = self.chip.assembled_for(gpu.capability().map_err(failed)?);
        let functions = Functions::load(&gpu, self.bundle, rank, cubins).map_err(failed)?;
        let peers = match &self.transport {
            Transport::None => Peers::None,
            Transport::Local(board) => Peers::Local(board.clone()),
            Transport::Nccl(nccl, id) => Peers::Waiting(nccl.clone(), *id),
        };
        let mut device =
            OnGpu::new(gpu, functions, manifest, rank, room, peers, self.patience.clone()).map_err(failed)?;
        if let Some(blas) = blas {
            device.use_library(blas, manifest).map_err(failed)?;
        }
        device.join(manifest).map_err(|fault| match fault {
            Fault::Device(what) => failed(what),
            Fault::Peer(_, what) => RunError::Waited(format!("rank {rank} can't go on, {what}")),
            Fault::Killed => failed("it was killed".into()),
        })?;
        Ok(device)
    }
}

/// By rank, its GPU.
fn place(ranks: u32, gpus: u32) -> Result<Vec<Ordinal>, String> {
    match gpus {
        0 => Err("the NVIDIA driver finds no GPU on this machine".into()),
        1 => Ok(vec![0; ranks as usize]),
        _ if gpus >= ranks => Ok((0..ranks).collect()),
        _ => Err(format!(
            "the bundle has {ranks} ranks and this machine {gpus} GPUs; all ranks run on one GPU when the process sees only one \
             (CUDA_VISIBLE_DEVICES=0)"
        )),
    }
}

/// The GPU of a process that is one of several on its machine. A launcher may show each process its own GPU only.
fn place_member(local: u32, gpus: u32) -> Result<Ordinal, String> {
    match gpus {
        0 => Err("the NVIDIA driver finds no GPU on this machine".into()),
        1 => Ok(0),
        _ if local < gpus => Ok(local),
        _ => Err(format!(
            "this is process {local} (counted from 0) of this machine, which has {gpus} GPUs: start one process for each GPU"
        )),
    }
}

impl Machine for Cuda<'_> {
    fn describe(&self) -> Result<Vec<String>, RunError> {
        let one = |(rank, &ordinal): (usize, &Ordinal)| -> Result<String, String> {
            let gpu = self.driver.gpu(ordinal)?;
            self.suits(&gpu)?;
            let (major, minor) = gpu.capability()?;
            Ok(format!("rank {rank} on GPU {ordinal}: {}, compute capability {major}.{minor}", gpu.name()))
        };
        let here = self.ordinals.iter().enumerate().filter(|(rank, _)| self.is_here(*rank));
        let mut lines: Vec<String> = here.map(|of| one(of).map_err(missing)).collect::<Result<_, _>>()?;
        lines.push(match &self.transport {
            Transport::None => "one rank, no transfers".into(),
            Transport::Local(_) => {
                "all ranks on one GPU: transfers are copies inside its memory, without graphs".into()
            }
            Transport::Nccl(nccl, _) => format!("transfers through NCCL {}", nccl.version()),
        });
        if let Some(tuning) = self.bundle.manifest.library() {
            lines.push(format!("products through {}, as tuned on {}", tuning.on.name(), tuning.on.device()));
        }
        Ok(lines)
    }

    fn device(&self, manifest: &Manifest, rank: RankId, room: Room) -> Result<Box<dyn Device>, RunError> {
        match self.attach(manifest, rank, room) {
            Ok(device) => Ok(Box::new(device)),
            Err(error) => {
                self.patience.fail(rank, error.to_string());
                Err(error)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_runs_on_its_chip_and_later_ones_unless_it_is_for_one_only() {
        let runs = |target: &str, capability| Chip::parse(target).unwrap().runs_on(capability);
        assert!(runs("cuda:sm_80", (8, 0)) && runs("cuda:sm_80", (9, 0)) && runs("cuda:sm_90", (12, 0)));
        assert!(!runs("cuda:sm_90", (8, 9)) && !runs("cuda:sm_120", (10, 0)));
        assert!(runs("cuda:sm_90a", (9, 0)) && !runs("cuda:sm_90a", (10, 0)));
        let assembled = |target: &str, capability| Chip::parse(target).unwrap().assembled_for(capability);
        assert!(
            assembled("cuda:sm_80", (8, 6)) && !assembled("cuda:sm_80", (9, 0)) && !assembled("cuda:sm_86", (8, 0))
        );
        assert_eq!((Chip::parse("x86-64-v3"), Chip::parse("cuda:sm_x")), (None, None));
    }

    #[test]
    fn ranks_get_a_gpu_each_or_share_the_only_one() {
        assert_eq!(place(4, 8), Ok(vec![0, 1, 2, 3]));
        assert_eq!(place(4, 1), Ok(vec![0; 4]));
        assert!(place(1, 0).unwrap_err().contains("no GPU"));
        assert_eq!((place_member(3, 8), place_member(3, 1)), (Ok(3), Ok(0)));
        assert!(place_member(2, 2).unwrap_err().contains("start one process for each GPU"));
        assert!(place(4, 2).unwrap_err().contains("4 ranks and this machine 2 GPUs"));
    }
}
