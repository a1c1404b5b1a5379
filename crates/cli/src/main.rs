//! The trainyard program: plans, runs and explains the training of large models.
//!
//! This crate parses arguments, calls the engine and prints; it decides nothing about training.
//! Results go to standard output, messages to standard error. Exit codes: 0 success, 1 an error
//! (printed once, as a chain from the attempted action to the root cause), 2 wrong usage, 3 and 4 a
//! verdict of `doctor` that is a warning or critical, 70 a rank failed while training
//! (docs/clusters.md), 130 stopped by a signal with a checkpoint to resume from.

mod choose;
mod commands;
mod forecast;
mod habits;
mod output;

use clap::{CommandFactory, Parser, Subcommand};
use commands::{
    advise, bench, calibrate, completions, config, consolidate, dash, data, distill, doctor, eval, export, generate,
    launch, merge, plan, program, prune, quantize, queue, report, runs, submit, supervise, tokenizer, top, trace,
    train, tune, verify,
};
use std::ffi::OsString;
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
    Train(train::Args),
    Distill(Box<distill::Args>),
    Launch(launch::Args),
    Supervise(supervise::Args),
    Eval(eval::Args),
    Generate(generate::Args),
    Export(export::Args),
    Consolidate(consolidate::Args),
    Prune(prune::Args),
    Quantize(quantize::Args),
    Merge(merge::Args),
    #[command(subcommand)]
    Tokenizer(tokenizer::Command),
    #[command(subcommand)]
    Data(data::Command),
    #[command(subcommand)]
    Config(config::Command),
    Doctor(doctor::Args),
    Trace(trace::Args),
    Verify(verify::Args),
    Calibrate(calibrate::Args),
    Plan(Box<plan::Args>),
    Advise(advise::Args),
    Tune(Box<tune::Args>),
    Program(program::Args),
    Dash(dash::Args),
    Top(top::Args),
    Report(report::Args),
    Runs(runs::Args),
    #[command(subcommand)]
    Queue(queue::Command),
    Submit(Box<submit::Args>),
    #[command(subcommand)]
    Bench(bench::Command),
    Completions(completions::Args),
    Man(completions::ManArgs),
}

/// Parses the command line. Wrong usage and requests for help end the process.
fn parse(arguments: &[OsString]) -> Command {
    match Cli::try_parse_from(arguments) {
        Ok(cli) => cli.command,
        Err(error) => {
            if let Some(answer) = habits::answer(&Cli::command(), arguments, &error) {
                eprintln!("error: {answer}");
                std::process::exit(EXIT_USAGE);
            }
            error.exit()
        }
    }
}

/// Exit code of clap for wrong usage.
const EXIT_USAGE: i32 = 2;

fn main() -> ExitCode {
    let process_start = Instant::now();
    output::show_events();
    let arguments: Vec<OsString> = std::env::args_os().collect();
    let result = match parse(&arguments) {
        Command::Train(args) => train::run(&args, process_start),
        Command::Distill(args) => distill::run(*args, process_start),
        Command::Launch(args) => launch::run(&args, |arguments| {
            parse(arguments);
        }),
        Command::Supervise(args) => supervise::run(&args),
        Command::Eval(args) => eval::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Generate(args) => generate::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Export(args) => export::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Consolidate(args) => consolidate::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Prune(args) => prune::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Quantize(args) => quantize::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Merge(args) => merge::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Tokenizer(command) => tokenizer::run(&command).map(|()| ExitCode::SUCCESS),
        Command::Data(command) => data::run(&command).map(|()| ExitCode::SUCCESS),
        Command::Config(command) => config::run(&command).map(|()| ExitCode::SUCCESS),
        Command::Doctor(args) => doctor::run(&args),
        Command::Trace(args) => trace::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Calibrate(args) => calibrate::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Plan(args) => plan::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Advise(args) => advise::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Tune(args) => tune::run(&args),
        Command::Program(args) => program::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Dash(args) => dash::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Verify(args) => verify::run(&args),
        Command::Top(args) => top::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Report(args) => report::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Runs(args) => runs::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Queue(command) => queue::run(&command),
        Command::Submit(args) => submit::run(&args),
        Command::Bench(command) => bench::run(&command, process_start).map(|()| ExitCode::SUCCESS),
        Command::Completions(args) => completions::run(&args, Cli::command()).map(|()| ExitCode::SUCCESS),
        Command::Man(args) => completions::man(&args, Cli::command()).map(|()| ExitCode::SUCCESS),
    };
    match result {
        Ok(code) => code,
        Err(error) if output::reader_left(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", output::chain(&error));
            if output::is_fault(&error) { ExitCode::from(supervise::EXIT_FAULT) } else { ExitCode::FAILURE }
        }
    }
}
