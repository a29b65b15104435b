//! The `paceline` command. Each subcommand is one file in `commands/`.

#[cfg(feature = "codegen")]
mod bundle;
mod cli;
mod commands;
mod comparison;
mod driver;
mod failure;
mod latency;
mod output;
mod picture;
mod render;
mod report;
mod search;
mod table;

use clap::Parser;
use std::process::ExitCode;

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
