//! cuBLASLt through the few calls that products need: algorithms that it proposes, one of them checked and run, errors in its own words.

mod ffi;

pub use ffi::{Blas, Lt};
