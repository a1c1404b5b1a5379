//! `trainyard doctor`: says where the time of a run's steps went, why, and what a cure would save.

use crate::output::print;
use anyhow::{Context, Result, bail};
use serde_json::json;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use trainyard_base::median;
use trainyard_observe::account::{Account, mean};
use trainyard_observe::compare::compare;
use trainyard_observe::diagnose::diagnose;
use trainyard_observe::measured::measured;
use trainyard_observe::run::Run;
use trainyard_observe::verdict::format_seconds;

/// Explain the steps of a run: where their time went, what bounds them, and what a change would
/// save. Two runs are compared.
///
/// Exit code: 0 if nothing stands out, 3 if something costs 5 % of a step, 4 if something costs 20 %
/// or numbers are wrong.
#[derive(clap::Args)]
pub struct Args {
    /// The folder of a run, e.g. runs/NAME; or two of them, to see what changed from the first to
    /// the second.
    #[arg(required = true, num_args = 1..=2, value_name = "RUN")]
    paths: Vec<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<ExitCode> {
    match args.paths.as_slice() {
        [one] => explain(&open(one)?, args.json),
        [one, other] => {
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
        _ => bail!("name one run, or two to compare"),
    }
}

fn open(path: &Path) -> Result<Run> {
    Run::open(path).with_context(|| format!("cannot explain {}", path.display()))
}

fn explain(run: &Run, as_json: bool) -> Result<ExitCode> {
    let diagnosis = diagnose(run);
    let steps = measured(run);
    let accounts: Vec<Account> = steps.iter().map(|step| Account::of(step, 0)).collect();
    let account = mean(&accounts);
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
            "{}: {} steps of {} ranks, {} to {}; {} a step (median){predicted}",
            run.name(),
            steps.len(),
            run.ranks.len(),
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
