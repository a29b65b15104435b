//! The model as a tensor graph, its derivative, kernels and memory. Pure: no I/O, no LLVM.
//!
//! The way from a specification to stage programs, one module a level:
//!
//! | module | gives |
//! |---|---|
//! | [`dims`] | the model's sizes, checked |
//! | [`partition`] | the layers of each stage; [`cost`]: their work; [`profile`]: their times from a file |
//! | [`gpt`] | a stage's forward pass as a [`graph`] |
//! | [`derivative`] | its backward pass, input and weight gradients apart |
//! | [`fuse`] | nodes -> kernel calls on values |
//! | [`stage`] | which values are saved, held, or temporary |
//! | [`rules`], [`update`] | how each parameter is updated, and the kernel calls where no weight gradient takes that in |
//! | [`layout`] | a rank's arena, by [`arena`] |
//! | [`kernel_plan`], [`blocking`], [`workspace`] | a kernel's name, tiles and scratch |
//! | [`build`] | all of it: kernels, stage programs, memory |
//! | [`estimate`] | models and hardware that are not run: memory and times by formula |
//! | [`device`] | what a target lacks for a spec |
//! | [`limits`] | memory compared with the spec's bounds |
//! | [`verify`] | the invariants of the result, checked |

pub mod arena;
pub mod blocking;
pub mod build;
pub mod cost;
pub mod derivative;
pub mod device;
pub mod dims;
pub mod estimate;
pub mod fuse;
pub mod gpt;
pub mod graph;
pub mod kernel;
pub mod kernel_plan;
pub mod layout;
pub mod limits;
pub mod operands;
pub mod part;
pub mod partition;
mod product;
pub mod profile;
pub mod rules;
pub mod stage;
pub mod target;
pub mod update;
pub mod verify;
pub mod workspace;
