//! `trainyard trace`: writes recorded steps of a run for Perfetto.

use crate::output::note;
use anyhow::{Context, Result, bail};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::ops::RangeInclusive;
use std::path::PathBuf;
use trainyard_observe::measured::measured_in;
use trainyard_observe::perfetto;
use trainyard_observe::run::Run;

/// Write recorded steps of a run as a trace for Perfetto (<https://ui.perfetto.dev>): all ranks on
/// one clock, the prediction beside the measurement, arrows between sends and receives.
#[derive(clap::Args)]
pub struct Args {
    /// The folder of a run.
    run: PathBuf,
    /// The steps: one number, or FIRST..LAST, both included. Unset: the last three that were
    /// recorded.
    #[arg(long, value_name = "FIRST..LAST", value_parser = steps)]
    steps: Option<RangeInclusive<u64>>,
    /// The file. Unset: trace/steps.json in the run's folder.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

fn steps(text: &str) -> Result<RangeInclusive<u64>, String> {
    let number = |text: &str| text.trim().parse::<u64>().map_err(|_| format!("`{text}` is no step: write 100..103"));
    let (first, last) = match text.split_once("..") {
        Some((first, last)) => (number(first)?, number(last.trim_start_matches('='))?),
        None => (number(text)?, number(text)?),
    };
    if first > last { Err(format!("{first} is after {last}")) } else { Ok(first..=last) }
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let run = Run::open(&args.run).with_context(|| format!("cannot explain {}", args.run.display()))?;
    let recorded: Vec<u64> =
        run.ranks.first().map_or(&[][..], |rank| &rank.steps).iter().map(|step| step.step).collect();
    let (Some(first), Some(last)) = (recorded.first(), recorded.last()) else {
        bail!("{} has no recorded steps: train with metrics.record=true", run.name())
    };
    let range = args.steps.clone().unwrap_or_else(|| recorded[recorded.len().saturating_sub(3)]..=*last);
    let steps = measured_in(&run, &range);
    if steps.is_empty() {
        bail!(
            "no step of {} to {} is recorded: the record has {} steps from {first} to {last}",
            range.start(),
            range.end(),
            recorded.len()
        );
    }
    let path = args.out.clone().unwrap_or_else(|| trainyard_record::trace_folder(&args.run).join("steps.json"));
    let writing = || format!("cannot write {}", path.display());
    let mut out = BufWriter::new(File::create(&path).with_context(writing)?);
    let written = perfetto::write(&mut out, &run, &steps, range).with_context(writing)?;
    out.flush().with_context(writing)?;
    note(&format!("{} steps, {} events: {}", written.steps, written.events, path.display()));
    Ok(())
}
