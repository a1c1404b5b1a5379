//! `trainyard top`: a run in the terminal.

use anyhow::{Context, Result, bail};
use std::io::IsTerminal;
use std::path::PathBuf;
use trainyard_dashboard::run::{files, split};
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
    let found = split(&args.run).with_context(|| format!("there is no folder {}", args.run.display()))?;
    let (around, name) = found.with_context(|| format!("{} is no run", args.run.display()))?;
    let store = Store::open(&around).with_context(|| format!("cannot read {}", around.display()))?;
    let Some(run) = store.run(&name)? else {
        bail!("there is no run in {}: it has neither config.toml nor metrics.jsonl", args.run.display())
    };
    if !std::io::stdout().is_terminal() {
        bail!(
            "top needs a terminal: for other programs there are `trainyard runs --json` and {}",
            args.run.join(files::METRICS).display()
        );
    }
    Ok(top::show(&store, &run)?)
}
