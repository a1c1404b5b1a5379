//! `trainyard program`: prints the instructions of a training step.

use super::config::{ConfigArgs, plan};
use crate::output::print;
use anyhow::{Context, Result, bail};

/// Print the step program of a configuration: every instruction with its lane, dependencies and
/// bytes.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    config: ConfigArgs,
    /// Print the program of a step that ends in a checkpoint.
    #[arg(long)]
    snapshot: bool,
    /// Print the program of this rank: from 0 to `parallel.ranks` - 1.
    #[arg(long, default_value_t = 0)]
    rank: u32,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let resolved = args.config.resolve()?;
    let ranks = resolved.parallel.ranks;
    if args.rank as usize >= ranks {
        bail!("--rank {} does not exist: there are {ranks} ranks, from 0", args.rank);
    }
    let (_, programs, _) = plan(&resolved, args.rank)?
        .context("the vocabulary is that of the text's characters: set model.vocab_size to see the program")?;
    let program = &programs[usize::from(args.snapshot)];
    if args.json {
        return print(format_args!("{}\n", serde_json::to_string(&program.report())?));
    }
    print(program)
}
