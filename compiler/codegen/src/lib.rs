//! Code generation: kernels -> linalg -> MLIR's LLVM dialect -> machine code -> position-independent images.
//!
//! [`compile`] makes the images of a program; [`pipeline`] is the way of one kernel, top to bottom. Kernels arrive decided
//! ([`model::kernel::Kernel`]: shapes, tiles, scratch); nothing is decided here, and a kernel that would need other
//! memory than was planned is an error.

mod compile;
pub mod context;
pub mod cuda;
mod elements;
mod emit;
mod entry;
pub mod error;
mod ffi;
mod forward;
pub mod image;
mod ir;
pub mod kernels;
mod object;
pub mod pipeline;
mod prefetch;
pub mod sched;
mod scratch;

pub use compile::{compile, compile_kernels};
pub use emit::{Level, emit, emit_sched};
pub use error::CodegenError;
pub use ffi::llvm_version;
