//! Integration tests of the plan crate.

mod grids;
mod make;
