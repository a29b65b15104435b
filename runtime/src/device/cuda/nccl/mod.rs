//! NCCL through the few calls that transfers need: communicators that never block the host, deadlines, errors in NCCL's own words.

mod ffi;

pub use ffi::{Comm, Nccl, UniqueId};
