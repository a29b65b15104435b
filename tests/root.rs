//! Integration tests of the command line: one binary, a module per topic.

mod bf16;
mod commands;
#[cfg(feature = "codegen")]
mod cuda;
mod devices;
mod exchange;
mod field;
mod golden;
mod harness;
mod identity;
mod memory;
mod pictures;
mod tidy;
mod tuning;
