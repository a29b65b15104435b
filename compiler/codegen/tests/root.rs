//! The crate's one test binary: linking MLIR is heavy.

mod call;
mod harness;
mod infrastructure;
mod matmul;
mod sinks;
mod update;
