//! Integration tests of the model crate: one binary.

mod builds;
mod devices;
mod estimates;
mod gradients;
mod interpreter;
mod machine;
mod partitions;
mod products;
mod profiles;
mod programs;
mod schedules;
mod temporaries;
