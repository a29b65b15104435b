//! Moving activations and gradients between stages.

pub mod local;
