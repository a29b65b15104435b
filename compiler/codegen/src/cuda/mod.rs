//! Device code: kernels -> gpu dialect -> NVVM -> LLVM IR -> PTX.
//!
//! # A kernel on a device
//!
//! A kernel is one or more *launches*, run in order; each is a `gpu.func` over a grid of blocks of threads. Every function of a kernel
//! has the kernel's operands as arguments, in the order of [`model::kernel`], and its scratch last if it has any. What a
//! launch leaves to the next stands in operands or scratch.
//!
//! # What the text means
//!
//! [`code::Code`] writes it: loads and stores of memory, arithmetic on f32, loops, barriers. No fastmath flags: every operation
//! rounds once, so kernels whose sums have a fixed order (matmuls on ordinary cores, column sums, embeddings, updates) have the bits of the
//! CPU's kernels. A tensor core sums in an order of its own. Those that sum a row in parallel (LayerNorm, softmax) differ from the CPU in rounding only, and never
//! from run to run.
//!
//! # Rules
//!
//! 1. All threads of a block reach the same barriers and exchanges, and blocks are whole warps.
//! 2. Shared memory is written before it is read, with a barrier between threads.
//! 3. No atomics, and no two threads of a launch write one place.
//! 4. At most 48 KiB of shared memory a block, so that it can be static.
//!
//! Tests run the LLVM IR that the PTX is made from on the CPU, where 1, 2 and 4 are checked at every step.

mod assemble;
mod child;
pub(crate) mod code;
mod compile;
mod instrument;
mod kernels;
mod lower;

pub use artifact::program::Launch;
pub use assemble::Assembler;
pub use child::{Generator, Running, serve};
pub use compile::{DeviceCode, compile_emulated, compile_kernels, images};
pub use lower::{PIPELINE, assembly, emulated_object, features, llvm_text};

use crate::context::CodegenContext;
use crate::cuda::code::Operands;
use crate::error::CodegenError;
use model::kernel::Kernel;
use model::target::Chip;

/// Shared memory of a block without asking for more at the launch.
pub const SHARED_BYTES_MAX: u64 = 48 * 1024;

/// A kernel's launches and the text of their functions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceKernel {
    pub name: String,
    pub launches: Vec<Launch>,
    /// `gpu.func`s.
    pub text: String,
}

impl DeviceKernel {
    fn new(kernel: &Kernel) -> Self {
        Self { name: kernel.name.clone(), launches: Vec::new(), text: String::new() }
    }

    /// Adds a launch after those before.
    fn launch(&mut self, grid: [u64; 3], threads: u32, operands: &Operands, body: impl FnOnce(&mut code::Code)) {
        let entry = match self.launches.len() {
            0 => self.name.clone(),
            n => format!("{}_{}", self.name, n + 1),
        };
        self.text += &code::function(&entry, operands, threads, body);
        let grid = grid.map(|n| u32::try_from(n).expect("a grid of fewer than 2^32 blocks"));
        self.launches.push(Launch { entry, grid, threads });
    }

    /// The module for mlir-opt.
    pub fn module(&self) -> String {
        format!("module {{\ngpu.module @device {{\n{}}}\n}}\n", self.text)
    }
}

/// Writes a kernel that was planned for a device.
///
/// # Errors
///
/// When its shapes need more of a device than it has.
pub fn device_kernel(kernel: &Kernel) -> Result<DeviceKernel, CodegenError> {
    let fail = |message: String| CodegenError::new(&kernel.name, "device kernel", message);
    kernels::write(kernel).map_err(fail)
}

/// All kernels in the gpu dialect, each part with the pipeline that lowers it.
pub fn gpu_text(kernels: &[Kernel]) -> Result<String, CodegenError> {
    let one = |kernel| {
        let device = device_kernel(kernel)?;
        Ok(format!("// -----\n// mlir-opt-22 --pass-pipeline='{PIPELINE}'\n// {}\n{}", device.name, device.module()))
    };
    kernels.iter().map(one).collect()
}

/// The LLVM IR of all kernels.
pub fn llvm_texts(kernels: &[Kernel], chip: Chip) -> Result<String, CodegenError> {
    let context = CodegenContext::new()?;
    let one = |kernel| {
        let device = device_kernel(kernel)?;
        llvm_text(&context, &device.name, &device.module(), chip)
    };
    kernels.iter().map(one).collect()
}
