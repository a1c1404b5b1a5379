//! `trainyard program`: the instructions of a training step.

use super::config::{ConfigArgs, plan};
use crate::output::print;
use anyhow::{Context, Result};

/// Print the step program of a configuration: what runs on which lane, after what, moving how many bytes.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    config: ConfigArgs,
    /// The step that ends in a checkpoint.
    #[arg(long)]
    snapshot: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let resolved = args.config.resolve()?;
    let (_, programs, _) = plan(&resolved)?
        .context("the vocabulary is that of the text's characters: set model.vocab_size to see the program")?;
    let program = &programs[usize::from(args.snapshot)];
    if args.json {
        return print(format_args!("{}\n", serde_json::to_string(program)?));
    }
    print(program)
}
