//! Tests of the runtime with a toy pipeline whose kernels are written in Rust: no compiler, no LLVM.

mod bundle;

mod devices;

mod files;

mod memory;

mod random;
mod replaying;

mod toy;

mod training;
mod tuning;

#[global_allocator]
static ALLOCATOR: memory::Counting = memory::Counting;
