//! `trainyard top`: a run in the terminal.

use super::dash::split;
use anyhow::{Context, Result, bail};
use std::io::IsTerminal;
use std::path::PathBuf;
use trainyard_dashboard::store::Store;
use trainyard_dashboard::top;

/// Watch a run in the terminal: its curves, speed, memory and alerts.
#[derive(clap::Args)]
pub struct Args {
    /// The run's folder.
    run: PathBuf,
}

/// Runs the command until the user ends it.
pub fn run(args: &Args) -> Result<()> {
    let (around, name) = split(&args.run)?;
    let store = Store::open(&around).with_context(|| format!("cannot read {}", around.display()))?;
    let Some(run) = store.run(&name)? else {
        bail!("there is no run in {}: it has neither config.toml nor metrics.jsonl", args.run.display())
    };
    if !std::io::stdout().is_terminal() {
        bail!(
            "top needs a terminal: for other programs there are `trainyard runs --json` and {}",
            args.run.join("metrics.jsonl").display()
        );
    }
    Ok(top::show(&store, &run)?)
}
