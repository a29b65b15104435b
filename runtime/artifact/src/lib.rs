//! The compiled form of a training pipeline: instruction streams, stage programs, memory map, machine code.
//! Pure data: no file, clock or environment is touched here. The runtime reads and writes the files.

pub mod bf16;
pub mod bundle;
pub mod channel;
pub mod cpu;
pub mod ids;
mod launches;
pub mod optimizer;
pub mod product;
pub mod program;
pub mod stream;
pub mod structure;
pub mod tuning;
pub mod verify;
pub mod work;
