//! `trainyard doctor`: says what bounds a step, and what a cure would save.

use crate::output::{note, print};
use anyhow::{Context, Result};
use std::path::PathBuf;
use std::process::ExitCode;
use trainyard_observe::traces::diagnose::{diagnose, examine};
use trainyard_observe::traces::kineto;

/// Say what bounds a training step, and what a cure would save, from traces of PyTorch's profiler.
/// Exit code 3 is a warning, 4 critical.
#[derive(clap::Args)]
pub struct Args {
    /// Trace files, one per rank: JSON or gzip, as torch.profiler's export_chrome_trace writes them.
    #[arg(required = true, value_name = "TRACE")]
    traces: Vec<PathBuf>,
    /// Print everything as JSON.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<ExitCode> {
    let mut examined = Vec::new();
    for (place, path) in args.traces.iter().enumerate() {
        // One trace at a time is in memory.
        let trace = kineto::read_file(path).with_context(|| format!("cannot diagnose {}", path.display()))?;
        if args.traces.len() > 1 {
            note(&format!("read {}: {} events", path.display(), trace.events));
        }
        examined.push(examine(&trace, place as u32));
    }
    let report = diagnose(examined);
    if args.json {
        print(format!("{}\n", serde_json::to_string_pretty(&report)?))?;
    } else {
        print(report.to_text())?;
    }
    Ok(ExitCode::from(report.diagnosis.exit_code()))
}
