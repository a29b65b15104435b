//! The `paceline` command. Each subcommand is one file in `commands/`.

#[cfg(feature = "codegen")]
mod bundle;
mod cli;
mod commands;
mod comparison;
mod driver;
mod failure;
mod latency;
mod launch;
mod output;
mod picture;
#[cfg(feature = "codegen")]
mod ptxas;
mod render;
mod report;
mod search;
mod table;

use clap::Parser;
use std::process::ExitCode;

/// Plans of millions of instructions are vectors of many megabytes that come and go: an allocator that keeps their pages saves a fifth
/// of the time of a large check, which the system would spend on handing out zeroed ones.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let cli = cli::Cli::parse();
    match commands::run(cli.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            failure.print();
            failure.exit_code()
        }
    }
}
