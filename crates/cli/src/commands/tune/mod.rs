//! `trainyard tune`: searches for good settings, and the size of a batch. Every trial is a run.

mod batch;
mod branches;
mod copies;
mod search;
mod transfer;
mod trials;

use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// Search for good settings: every trial is a run of the registry, priced in memory before it
/// starts.
#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    search: search::SearchArgs,
}

#[derive(clap::Subcommand)]
enum Command {
    Batch(batch::BatchArgs),
    Transfer(transfer::TransferArgs),
}

/// Runs the command.
pub fn run(args: &Args) -> Result<ExitCode> {
    match &args.command {
        Some(Command::Batch(args)) => batch::run(args),
        Some(Command::Transfer(args)) => transfer::run(args),
        None => search::run(&args.search),
    }
}

/// Parses a duration: `90`, `90s`, `30m`, `2h`, `1h30m`.
fn duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("`{text}` is no duration: write 90s, 30m, 2h or 1h30m");
    if let Ok(seconds) = text.parse::<u64>() {
        return Ok(Duration::from_secs(seconds));
    }
    let (mut total, mut rest) = (0u64, text);
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).ok_or_else(wrong)?;
        let number: u64 = rest[..digits].parse().map_err(|_| wrong())?;
        let unit = match rest[digits..].chars().next() {
            Some('s') => 1,
            Some('m') => 60,
            Some('h') => 3600,
            Some('d') => 86400,
            _ => return Err(wrong()),
        };
        total = number.checked_mul(unit).and_then(|part| total.checked_add(part)).ok_or_else(wrong)?;
        rest = &rest[digits + 1..];
    }
    if text.is_empty() { Err(wrong()) } else { Ok(Duration::from_secs(total)) }
}

/// The folder of a new study in `runs`: `name`, or the first of `KIND-001`, `KIND-002`, … that does
/// not exist yet.
///
/// # Errors
/// A name that is a path or hidden.
fn study_folder(runs: &Path, name: Option<&str>, kind: &str) -> Result<PathBuf> {
    let Some(name) = name else { return new_folder(runs, kind) };
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if name.is_empty() || name.starts_with('.') || !name.chars().all(is_plain) {
        bail!("--study {name}: a name has letters, digits, `-`, `_` and `.` only");
    }
    Ok(runs.join(name))
}

/// The first of `KIND-001`, `KIND-002`, … in `runs` that does not exist yet.
fn new_folder(runs: &Path, kind: &str) -> Result<PathBuf> {
    (1..)
        .map(|number| runs.join(format!("{kind}-{number:03}")))
        .find(|folder| !folder.exists())
        .context("numbers do not end")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_units() {
        for (text, seconds) in [("90", 90), ("90s", 90), ("30m", 1800), ("2h", 7200), ("1h30m", 5400), ("1d", 86400)] {
            assert_eq!(duration(text), Ok(Duration::from_secs(seconds)), "{text}");
        }
        for text in ["", "h", "1x", "1h3", "-1s", "99999999999999999999h", "9999999999999999h"] {
            assert!(duration(text).unwrap_err().contains("no duration"), "{text}");
        }
    }
}
