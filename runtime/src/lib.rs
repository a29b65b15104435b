//! Runs compiled pipelines on this machine's CPU cores or devices: a thread per rank, one allocation per rank, one loop over the
//! instructions.
//!
//! [`run()`] takes a [`artifact::bundle::Bundle`], [`RunOptions`] and the [`Inputs`] read for them, tells an [`Observer`] what happens, and gives a [`Summary`].
//! Neither the compiler nor LLVM is needed here.

mod arena;
pub mod bundle_dir;
mod clock;
mod collect;
mod control;
pub mod cpu;
pub mod data;
pub mod device;
pub mod draw;
mod error;
mod executor;
pub mod hyper;
mod init;
mod map;
pub mod member;
pub mod metrics;
pub mod observe;
pub mod progress;
mod rank;
pub mod replay;
mod reports;
mod run;
mod segment;
pub mod store;
mod threads;
mod transport;
mod versions;
mod weights;

pub use control::StopFlag;
pub use error::RunError;
pub use map::{KernelFn, Kernels};
pub use observe::{Observer, Summary};
pub use run::{Inputs, On, RunOptions, machine, machine_to_tune, run, run_on};
