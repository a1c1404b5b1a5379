//! `trainyard doctor`: says where the time of a run's steps went, why, and what a cure would save.

use crate::output::{note, print};
use anyhow::{Context, Result, bail};
use serde_json::json;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use trainyard_base::median;
use trainyard_observe::account::{accounts, mean};
use trainyard_observe::causes::Findings;
use trainyard_observe::compare::compare;
use trainyard_observe::diagnose::diagnose;
use trainyard_observe::run::Run;
use trainyard_observe::traces::{self, kineto};
use trainyard_observe::verdict::format_seconds;

/// Explain training steps: where their time went, what bounds them, what to change, and what that
/// would save. Reads the folder of a run, two of them to compare, or traces of PyTorch's profiler.
///
/// Exit code: 0 if nothing grave was found, 3 if something costs 5 % of a step, 4 if something
/// costs 20 % or numbers are wrong.
#[derive(clap::Args)]
pub struct Args {
    /// The folder of a run, e.g. runs/NAME; two of them, to see what changed from the first to the
    /// second; or trace files, JSON or gzip, as torch.profiler's export_chrome_trace writes them,
    /// one per rank.
    #[arg(required = true, value_name = "RUN|TRACE")]
    paths: Vec<PathBuf>,
    /// Print everything as JSON.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<ExitCode> {
    match args.paths.as_slice() {
        [one] if one.is_dir() => explain(&open(one)?, args.json),
        [one, other] if one.is_dir() && other.is_dir() => {
            let runs = [open(one)?, open(other)?];
            let Some(comparison) = compare([&runs[0], &runs[1]]) else {
                bail!("one of the runs has no recorded steps: train it with metrics.record=true")
            };
            match args.json {
                true => print(format_args!("{}\n", serde_json::to_string(&comparison)?))?,
                false => print(comparison.to_text())?,
            }
            Ok(ExitCode::SUCCESS)
        }
        paths => {
            if let Some(folder) = paths.iter().find(|path| path.is_dir()) {
                bail!("{} is a folder: name one run, two runs, or trace files", folder.display())
            }
            explain_traces(paths, args.json)
        }
    }
}

/// Explains traces of PyTorch's profiler, one per rank.
fn explain_traces(paths: &[PathBuf], as_json: bool) -> Result<ExitCode> {
    let mut examined = Vec::new();
    for (place, path) in paths.iter().enumerate() {
        // One trace at a time is in memory.
        let trace = kineto::read_file(path).with_context(|| {
            let missing = ", neither the folder of a run nor a trace file: give runs/NAME of a run (`trainyard runs` \
                           names them), or a trace of PyTorch's profiler";
            let what = if path.exists() { "" } else { missing };
            format!("cannot explain {}{what}", path.display())
        })?;
        if paths.len() > 1 {
            note(&format!("read {}: {} events", path.display(), trace.events));
        }
        examined.push(traces::diagnose::examine(&trace, place as u32));
    }
    let report = traces::diagnose::diagnose(examined);
    match as_json {
        true => print(format_args!("{}\n", serde_json::to_string_pretty(&report)?))?,
        false => print(report.to_text())?,
    }
    Ok(ExitCode::from(report.diagnosis.exit_code()))
}

fn open(path: &Path) -> Result<Run> {
    Run::open(path).with_context(|| format!("cannot explain {}", path.display()))
}

fn explain(run: &Run, as_json: bool) -> Result<ExitCode> {
    let findings = Findings::of(run);
    let diagnosis = diagnose(&findings);
    let steps = &findings.steps;
    let account = mean(&accounts(steps));
    if as_json {
        let report = json!({
            "run": run.name(),
            "steps": steps.len(),
            "ranks": run.ranks.len(),
            "account": account,
            "predicted_step_s": run.predicted.as_ref().map(|predicted| predicted.step_s),
            "verdicts": diagnosis.verdicts,
        });
        print(format_args!("{report}\n"))?;
        return Ok(ExitCode::from(diagnosis.exit_code()));
    }
    let mut text = String::new();
    if let (Some(account), Some(step_s)) = (&account, median(steps.iter().map(|step| step.seconds))) {
        let predicted = run.predicted.as_ref().map_or_else(String::new, |predicted| {
            let over = 100.0 * (step_s / predicted.step_s - 1.0);
            format!(", {} predicted ({over:+.1} %)", format_seconds(predicted.step_s))
        });
        let (first, last) = (&steps[0], &steps[steps.len() - 1]);
        let _ = writeln!(
            text,
            "{}: {} steps of {}, {} to {}; {} a step (median){predicted}",
            run.name(),
            steps.len(),
            if run.ranks.len() == 1 { "1 rank".to_owned() } else { format!("{} ranks", run.ranks.len()) },
            first.step,
            last.step,
            format_seconds(step_s)
        );
        for (name, seconds) in account.parts() {
            let share = 100.0 * seconds / account.step_s;
            if share >= 0.05 {
                let _ = writeln!(text, "    {share:>5.1} %  {:>9}  {name}", format_seconds(seconds));
            }
        }
        let _ = writeln!(
            text,
            "    {:.1} % of the step has a name; the engine between instructions takes {}\n",
            100.0 * account.explained(),
            format_seconds(account.engine_s)
        );
    }
    print(text + &diagnosis.to_text())?;
    Ok(ExitCode::from(diagnosis.exit_code()))
}
