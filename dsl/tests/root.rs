//! Tests of the language from the outside: text in, specification and diagnostics out.

mod examples;
mod faults;
mod fmt;
mod fuzz;
mod pages;
mod render;
mod specs;
mod updates;
