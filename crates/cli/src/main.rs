//! The trainyard program: plans, runs and explains the training of large models.

mod commands;

use clap::{Parser, Subcommand};
use std::process::ExitCode;
use std::time::Instant;

/// Plans, runs and explains the training of large models.
#[derive(Parser)]
#[command(version, about, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Train(commands::train::Args),
}

fn main() -> ExitCode {
    let process_start = Instant::now();
    let result = match Cli::parse().command {
        Command::Train(args) => commands::train::run(&args, process_start),
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
