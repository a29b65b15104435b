//! Code generation: kernels -> linalg -> MLIR's LLVM dialect -> machine code -> position-independent images.

pub mod error;
pub mod kernels;

pub use error::CodegenError;
