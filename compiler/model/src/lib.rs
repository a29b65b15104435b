//! The model as a tensor graph, its derivative, kernels and memory. Pure: no I/O, no LLVM.

pub mod kernel;
pub mod target;
