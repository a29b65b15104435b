//! Integration tests of the plan crate.

mod bounds;
mod faults;
mod grids;
mod interpreter;
mod make;
mod properties;
mod tables;
