//! Code generation: kernels -> linalg -> MLIR's LLVM dialect -> machine code -> position-independent images.

pub mod context;
mod entry;
pub mod error;
mod ffi;
mod forward;
pub mod image;
mod ir;
pub mod kernels;
mod object;
pub mod pipeline;
pub mod sched;
mod scratch;

pub use error::CodegenError;
pub use ffi::llvm_version;
