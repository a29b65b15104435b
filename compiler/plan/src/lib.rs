//! Schedules expanded to instruction streams, and what is proved about them. Pure: no I/O, no LLVM.

pub mod facts;
