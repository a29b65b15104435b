//! GPUs through the CUDA driver, which is loaded when a bundle needs it: the program starts without one.
//!
//! [`Cuda`] finds out what there is, says in one sentence what is missing, and gives each rank a device. Transfers go through NCCL between GPUs, and
//! through the GPU's own memory between ranks that share one.

mod device;
mod driver;
mod local;
mod nccl;

use crate::device::cuda::device::{Functions, OnGpu, Peers};
use crate::device::cuda::driver::{Driver, EventHandle, Gpu};
use crate::device::cuda::local::Board;
use crate::device::cuda::nccl::{Nccl, UniqueId};
use crate::device::pipeline::Machine;
use crate::device::{Device, Fault, Room};
use crate::error::RunError;
use artifact::bundle::Bundle;
use artifact::ids::RankId;
use artifact::program::Manifest;
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
    deadline: Duration,
}

/// How the ranks' transfers go.
enum Transport {
    /// There is one rank.
    None,
    /// All ranks are on one GPU.
    Local(Arc<Board<EventHandle>>),
    Nccl(Arc<Nccl>, UniqueId),
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
}

fn missing(what: impl Into<String>) -> RunError {
    RunError::Device(what.into())
}

impl<'b> Cuda<'b> {
    /// Finds a GPU for every rank of a bundle.
    ///
    /// # Errors
    /// One sentence: no driver, no GPU, too few, one that can't run the code, no NCCL where it is needed.
    pub fn new(bundle: &'b Bundle, deadline: Duration) -> Result<Cuda<'b>, RunError> {
        let target = &bundle.manifest.cpu;
        let chip = Chip::parse(target).ok_or_else(|| missing(format!("the bundle's target `{target}` is no GPU")))?;
        let driver = Driver::load()
            .map_err(|e| missing(format!("the NVIDIA driver of this machine does not start: {e}")))?
            .ok_or_else(|| {
                missing(format!(
                    "the bundle was compiled for `{target}`, and this machine has no NVIDIA driver (libcuda.so was not found)"
                ))
            })?;
        let (ranks, gpus) = (bundle.manifest.memory.len() as u32, driver.count());
        let ordinals = place(ranks, gpus).map_err(missing)?;
        let transport = match (ranks, gpus) {
            (1, _) => Transport::None,
            (_, 1) => Transport::Local(Arc::new(Board::new())),
            _ => {
                let nccl = Nccl::load().map_err(missing)?;
                let id = nccl.unique_id().map_err(missing)?;
                Transport::Nccl(Arc::new(nccl), id)
            }
        };
        Ok(Cuda { bundle, driver, chip, ordinals, transport, deadline })
    }

    /// Whether a rank's GPU runs the code and has room for the arenas of all ranks on it.
    fn suits(&self, gpu: &Gpu, rank: RankId) -> Result<(), String> {
        let capability = gpu.capability()?;
        if !self.chip.runs_on(capability) {
            let ((major, minor), target, ordinal) = (capability, &self.bundle.manifest.cpu, gpu.ordinal);
            return Err(format!(
                "the bundle was compiled for `{target}`, and GPU {ordinal} ({}) has compute capability {major}.{minor}; \
                 compile it with `--target cuda:sm_{major}{minor}`",
                gpu.name()
            ));
        }
        let (needed, (free, total)) = (self.bundle.manifest.memory[rank.index()].total, gpu.memory()?);
        if needed > free {
            return Err(format!(
                "rank {rank} needs {needed} bytes on GPU {} ({}), which has {free} of {total} free",
                gpu.ordinal,
                gpu.name()
            ));
        }
        Ok(())
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

impl Machine for Cuda<'_> {
    fn describe(&self) -> Result<Vec<String>, RunError> {
        let one = |(rank, &ordinal): (usize, &Ordinal)| -> Result<String, String> {
            let gpu = self.driver.gpu(ordinal)?;
            self.suits(&gpu, RankId(rank as u32))?;
            let (major, minor) = gpu.capability()?;
            Ok(format!("rank {rank} on GPU {ordinal}: {}, compute capability {major}.{minor}", gpu.name()))
        };
        let mut lines: Vec<String> =
            self.ordinals.iter().enumerate().map(|of| one(of).map_err(missing)).collect::<Result<_, _>>()?;
        lines.push(match &self.transport {
            Transport::None => "one rank, no transfers".into(),
            Transport::Local(_) => {
                "all ranks on one GPU: transfers are copies inside its memory, without graphs".into()
            }
            Transport::Nccl(nccl, _) => format!("transfers through NCCL {}", nccl.version()),
        });
        Ok(lines)
    }

    fn device(&self, manifest: &Manifest, rank: RankId, room: Room) -> Result<Box<dyn Device>, RunError> {
        let failed = |what: String| missing(format!("rank {rank} can't use its GPU: {what}"));
        let gpu = self.driver.gpu(self.ordinals[rank.index()]).map_err(failed)?;
        self.suits(&gpu, rank).map_err(missing)?;
        let functions = Functions::load(&gpu, self.bundle, rank).map_err(failed)?;
        let peers = match &self.transport {
            Transport::None => Peers::None,
            Transport::Local(board) => Peers::Local(board.clone()),
            Transport::Nccl(nccl, id) => Peers::Waiting(nccl.clone(), *id),
        };
        let mut device = OnGpu::new(gpu, functions, manifest, rank, room, peers, self.deadline).map_err(failed)?;
        device.join(manifest).map_err(|fault| match fault {
            Fault::Device(what) | Fault::Peer(_, what) => failed(what),
            Fault::Killed => failed("it was killed".into()),
        })?;
        Ok(Box::new(device))
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
        assert_eq!((Chip::parse("x86-64-v3"), Chip::parse("cuda:sm_x")), (None, None));
    }

    #[test]
    fn ranks_get_a_gpu_each_or_share_the_only_one() {
        assert_eq!(place(4, 8), Ok(vec![0, 1, 2, 3]));
        assert_eq!(place(4, 1), Ok(vec![0; 4]));
        assert!(place(1, 0).unwrap_err().contains("no GPU"));
        assert!(place(4, 2).unwrap_err().contains("4 ranks and this machine 2 GPUs"));
    }
}
