//! Integration tests of the plan crate.

mod bounds;
mod cover;
mod critical;
mod csv;
mod faults;
mod field;
mod grids;
mod interpreter;
mod make;
mod mutations;
mod norms;
mod observed;
mod orders;
mod pages;
mod properties;
mod random;
mod ring;
mod search;
mod specs;
mod sweep;
mod tables;
mod weights;
mod work;
