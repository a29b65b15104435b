//! The Paceline language: text to [`spec::Spec`], with diagnostics. Pure: no I/O.

pub mod diag;
pub mod schedule;
pub mod spec;
