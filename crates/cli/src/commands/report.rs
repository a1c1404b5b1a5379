//! `trainyard report`: runs in one HTML file.

use crate::output::print;
use anyhow::{Context, Result};
use std::path::PathBuf;
use trainyard_base::format_bytes;
use trainyard_dashboard::report;

/// Write runs into one HTML file that opens without a server and without a network.
#[derive(clap::Args)]
pub struct Args {
    /// The folders of the runs, which lie beside each other.
    #[arg(required = true)]
    runs: Vec<PathBuf>,
    /// The file.
    #[arg(long, value_name = "FILE", default_value = "report.html")]
    out: PathBuf,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let html = report::html(&args.runs)?;
    std::fs::write(&args.out, &html).with_context(|| format!("cannot write {}", args.out.display()))?;
    let size = format_bytes(html.len() as u64);
    print(format_args!(
        "{}: {} in {size}\n",
        args.out.display(),
        match args.runs.len() {
            1 => "one run".to_owned(),
            runs => format!("{runs} runs"),
        }
    ))
}
