//! `cargo xtask verdicts`: how often the verdicts of `trainyard doctor` are right.
//!
//! Causes are planted in recordings on a virtual clock ([`planted`]), at three severities and from
//! several seeds; the first verdict is compared with the planted cause, and the predicted saving
//! with the true cost. Healthy recordings count false alarms. With `--real`, small real runs are
//! trained with a cause and without it. The tables go into docs/finding-bottlenecks.md.

#[path = "../../crates/observe/tests/planted/mod.rs"]
mod planted;
mod real;

use crate::equality::put;
use anyhow::{Context, Result};
use planted::{Plant, SHARES, STEPS, record};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use trainyard_base::median;
use trainyard_observe::causes::Findings;
use trainyard_observe::diagnose::diagnose;
use trainyard_observe::verdict::Severity;

/// The page with the tables.
const PAGE: &str = "docs/finding-bottlenecks.md";
/// The least share of recordings whose first verdict must be right.
const RIGHT_MIN: f64 = 0.95;

/// The recordings to make.
#[derive(clap::Args)]
pub struct Options {
    /// Seeds of each cause and severity.
    #[arg(long, default_value_t = 5)]
    seeds: u64,
    /// Healthy steps in which no alarm may be raised.
    #[arg(long, default_value_t = 10_000)]
    clean_steps: u64,
    /// Train real runs with planted causes too; takes some minutes on a machine that nobody else
    /// uses.
    #[arg(long)]
    real: bool,
    /// Only real runs with one of these words in their names; the page keeps its table of them.
    #[arg(long, value_delimiter = ',', requires = "real")]
    only: Vec<String>,
}

/// Makes all recordings; true if the bars are kept.
pub fn run(root: &Path, options: &Options) -> Result<bool> {
    let (planted, is_kept) = virtual_clock(options);
    println!("{planted}");
    let path = root.join(PAGE);
    let page = || fs::read_to_string(&path).with_context(|| format!("cannot read {PAGE}"));
    fs::write(&path, put(&page()?, "planted", &planted)?).with_context(|| format!("cannot write {PAGE}"))?;
    if options.real {
        let table = real::run(root, &options.only)?;
        println!("{table}");
        // A part of the table does not replace the whole one.
        if options.only.is_empty() {
            fs::write(&path, put(&page()?, "real", &table)?).with_context(|| format!("cannot write {PAGE}"))?;
        }
    }
    Ok(is_kept)
}

/// The table of recordings on the virtual clock, and true if the bars are kept.
fn virtual_clock(options: &Options) -> (String, bool) {
    let mut table = String::from(
        "| planted | right verdict | right | said instead | error of the saving: median, largest |\n|---|---|---|---|---|\n",
    );
    let (mut right_all, mut all) = (0, 0);
    for plant in Plant::ALL {
        let cause = plant.cause().expect("a planted cause has a verdict");
        let mut instead: BTreeMap<String, u32> = BTreeMap::new();
        let mut errors = Vec::new();
        let mut right = 0;
        for severity in 0..SHARES.len() {
            for seed in 0..options.seeds {
                let recording = record(plant, severity, seed);
                let diagnosis = diagnose(&Findings::of(&recording.run));
                match diagnosis.verdicts.first() {
                    Some(verdict) if verdict.cause == cause => right += 1,
                    other => {
                        let name = other.map_or_else(|| "nothing".to_owned(), |verdict| verdict.cause.in_words());
                        *instead.entry(name).or_default() += 1;
                    }
                }
                if let Some(saving) = diagnosis.verdict(cause).and_then(|verdict| verdict.saving)
                    && plant.has_size()
                {
                    errors.push((saving.seconds / recording.cost_s - 1.0).abs());
                }
            }
        }
        let count = SHARES.len() as u64 * options.seeds;
        (right_all, all) = (right_all + right, all + count);
        let instead: Vec<String> = instead.into_iter().map(|(name, count)| format!("{name} ({count})")).collect();
        let error = match median(errors.iter().copied()) {
            Some(middle) => {
                format!("{:.1} %, {:.1} %", 100.0 * middle, 100.0 * errors.iter().copied().fold(0.0, f64::max))
            }
            None => "no size".to_owned(),
        };
        let name = words(&format!("{plant:?}"));
        table +=
            &format!("| {name} | {} | {right} of {count} | {} | {error} |\n", cause.in_words(), instead.join(", "));
    }
    let recordings = options.clean_steps.div_ceil(STEPS);
    let alarms = (0..recordings)
        .flat_map(|seed| diagnose(&Findings::of(&record(Plant::Clean, 0, 1000 + seed).run)).verdicts)
        .filter(|verdict| verdict.severity > Severity::Info)
        .count();
    let share = right_all as f64 / all.max(1) as f64;
    table += &format!(
        "\nThe first verdict was right in {right_all} of {all} recordings ({:.1} %). In {} healthy steps there were {alarms} false alarms.\n",
        100.0 * share,
        recordings * STEPS
    );
    (table, share >= RIGHT_MIN && alarms == 0)
}

/// `SlowDisk` as `slow disk`.
fn words(name: &str) -> String {
    let mut words = String::new();
    for letter in name.chars() {
        if letter.is_uppercase() && !words.is_empty() {
            words.push(' ');
        }
        words.extend(letter.to_lowercase());
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_words() {
        assert_eq!(words("SlowDisk"), "slow disk");
    }
}
