//! Runs device kernels on the CPU, and watches every step.
//!
//! The compiler gives the LLVM IR that a kernel's PTX is made from as machine code of this CPU (`codegen::cuda::emulated_object`). Here
//! each thread of a block is a fiber; it runs until it waits for others at a barrier or in an exchange of its warp, or ends.
//! Blocks run one after the other. So the arithmetic (but for the order in which a tensor core sums), the memory accesses and their order within a thread are the device's;
//! the time is not.
//!
//! # What is found
//!
//! | fault | where |
//! |---|---|
//! | threads of a block wait at different barriers, or some have ended | barrier |
//! | lanes of a warp are not all at the same exchange, vote, product, or load of matrices | exchange |
//! | an access outside of every operand and shared array, or not at a multiple of its size | every access |
//! | shared memory that no thread of the block has written, or an output that no thread has | read |
//! | shared memory that another thread wrote or read since the last barrier | write, read |
//! | an operand's element that two threads of a launch write, or that another block of the launch wrote | write, read |
//!
//! Every fault ends the launch with a sentence. What a kernel may get wrong without one: timing, occupancy, and what ptxas does.

mod block;
mod checks;
mod ffi;
mod map;
mod object;
mod tensor;

pub use block::launch;
pub use checks::{Memory, Operand};
pub use map::Module;

use std::fmt;

/// Threads of a warp.
pub const WARP: usize = 32;

/// One function over a grid.
#[derive(Clone, Debug)]
pub struct Launch<'a> {
    pub entry: &'a str,
    pub grid: [u32; 3],
    /// Threads of a block, whole warps.
    pub threads: u32,
}

/// The order in which threads that could run do, and blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    Ascending,
    /// A new one at each step, from this seed.
    Random(u64),
}

/// What a kernel did wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    pub entry: String,
    pub block: [u32; 3],
    /// None: the block as a whole.
    pub thread: Option<usize>,
    pub what: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { entry, block, thread, what } = self;
        write!(f, "{entry}, block {block:?}")?;
        if let Some(thread) = thread {
            write!(f, ", thread {thread}")?;
        }
        write!(f, ": {what}")
    }
}

impl std::error::Error for Fault {}
