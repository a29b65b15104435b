//! The crate's one test binary: linking MLIR is heavy.

mod attention;
mod call;
mod corrections;
mod device;
mod device_bf16;
mod elements;
mod emulator;
mod harness;
mod infrastructure;
mod math;
mod matmul;
mod narrow;
mod optimizers;
mod parts;
mod rows;
mod sinks;
mod tensor;
mod tensor_layout;
mod turn;
mod update;
mod updates;
