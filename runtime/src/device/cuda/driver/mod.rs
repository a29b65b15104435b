//! The CUDA driver's calls that a rank needs, with failures as words. Nothing here panics where there is no driver.

mod ffi;

pub use ffi::{Driver, EventHandle, Function, Gpu, Loaded, Queue};
