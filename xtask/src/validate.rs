//! `cargo xtask validate`: compares the simulator with published measurements.
//!
//! For every source it prints the number of rows, median and 90th percentile of the errors of speed
//! and memory, and wrong verdicts; with `--rows` the error of every row, worst first. Sources that
//! the constants were fitted on are marked. The bars apply to dense models in 16 bits of grades A
//! and B.

use clap::Args;
use trainyard_sim::validate::{Outcome, compare, fit, quantiles};
use trainyard_sim::{Constants, Profiles, measurement};

/// Arguments of `cargo xtask validate`.
#[derive(Args)]
pub struct Options {
    /// Also print every row.
    #[arg(long)]
    rows: bool,
    /// Only rows whose id begins so, e.g. `bloom`.
    #[arg(long, default_value = "")]
    only: String,
    /// First fit the constants on the sources that data/constants.toml names, this many rounds, and
    /// print them.
    #[arg(long, value_name = "ROUNDS")]
    fit: Option<u32>,
}

/// The bars: median and 90th percentile of speed, median of memory, share of right verdicts.
const BARS: (f64, f64, f64, f64) = (0.10, 0.25, 0.08, 0.95);

/// Prints the comparison; false if a bar is missed.
pub fn run(options: &Options) -> anyhow::Result<bool> {
    let rows: Vec<_> = measurement::rows()?.into_iter().filter(|row| row.id.starts_with(&options.only)).collect();
    let profiles = Profiles::builtin();
    let mut constants = Constants::builtin();
    if let Some(rounds) = options.fit {
        let found = fit(&rows, &profiles, &constants, rounds);
        println!(
            "fitted on {} rows of {}: loss {:.4} -> {:.4}",
            found.rows,
            constants.fitted_on.join(", "),
            found.loss[0],
            found.loss[1]
        );
        constants = found.constants;
        for (name, value) in constants.fitted_mut() {
            println!("{name} = {value:.4}");
        }
    }
    let outcomes = compare(&rows, &profiles, &constants);
    println!(
        "source    fitted  rows |  speed: n  median    90th    bias | memory: n  median    90th    bias | wrong verdicts"
    );
    for source in measurement::sources() {
        let of: Vec<&Outcome> = outcomes.iter().filter(|outcome| outcome.row.source() == source.prefix).collect();
        if of.is_empty() {
            continue;
        }
        let fitted = if constants.fitted_on.contains(&source.prefix) { "yes" } else { "no" };
        for (kind, judged) in [("", true), (" *", false)] {
            let part: Vec<&Outcome> = of.iter().copied().filter(|outcome| outcome.row.judged == judged).collect();
            if !part.is_empty() {
                println!("{:9} {fitted:6} {:5} | {}", format!("{}{kind}", source.prefix), part.len(), figures(&part));
            }
        }
    }
    println!("* mixtures of experts, and products in 8 or 4 bits: shown, not judged");
    if options.rows {
        print_rows(&outcomes);
    }
    Ok(judge(&outcomes))
}

fn figures(outcomes: &[&Outcome]) -> String {
    let speed: Vec<f64> = outcomes.iter().filter_map(|outcome| outcome.speed_error()).collect();
    let memory: Vec<f64> = outcomes.iter().filter_map(|outcome| outcome.memory_error()).collect();
    let wrong = outcomes.iter().filter(|outcome| !outcome.verdict_right()).count();
    format!("{} | {} | {wrong:3} of {}", column(speed), column(memory), outcomes.len())
}

fn column(mut errors: Vec<f64>) -> String {
    errors.sort_by(f64::total_cmp);
    match quantiles(errors.iter().copied()) {
        None => format!("{:>9}  {:>6}  {:>6}  {:>6}", 0, "-", "-", "-"),
        Some((median, most)) => {
            let bias = errors[errors.len() / 2];
            format!("{:>9}  {:5.1} %  {:4.0} %  {:+5.1} %", errors.len(), 100.0 * median, 100.0 * most, 100.0 * bias)
        }
    }
}

fn print_rows(outcomes: &[Outcome]) {
    println!("\nrow          tokens/s measured  predicted    error | GB measured  predicted    error | verdict   why");
    let mut sorted: Vec<&Outcome> = outcomes.iter().collect();
    let size = |outcome: &Outcome| outcome.speed_error().map_or(0.0, f64::abs);
    sorted.sort_by(|a, b| a.row.source().cmp(b.row.source()).then(size(b).total_cmp(&size(a))));
    for outcome in sorted {
        let row = &outcome.row;
        let pair = |measured: Option<f64>, predicted: f64, error: Option<f64>| match (measured, error) {
            (Some(measured), Some(error)) => format!("{measured:12.1} {predicted:10.1} {:+7.1} %", 100.0 * error),
            _ => format!("{:>12} {:>10} {:>9}", "-", "-", "-"),
        };
        let verdict = if outcome.verdict_right() { "right" } else { "WRONG" };
        println!(
            "{:12} {} | {} | {verdict:7} {}",
            row.id,
            pair(row.tokens_per_s, outcome.tokens_per_s, outcome.speed_error()),
            pair(row.memory_gb, outcome.memory_gb, outcome.memory_error()),
            outcome.failed.as_deref().unwrap_or(&row.remark),
        );
    }
}

fn judge(outcomes: &[Outcome]) -> bool {
    let judged: Vec<&Outcome> = outcomes.iter().filter(|outcome| outcome.row.judged).collect();
    let speed = quantiles(judged.iter().filter_map(|outcome| outcome.speed_error()));
    let memory = quantiles(judged.iter().filter_map(|outcome| outcome.memory_error()));
    let right = judged.iter().filter(|outcome| outcome.verdict_right()).count() as f64 / judged.len().max(1) as f64;
    let mut met = true;
    let mut bar = |name: &str, value: f64, bar: f64, at_most: bool| {
        let holds = if at_most { value <= bar } else { value >= bar };
        met &= holds;
        let relation = if at_most { "at most" } else { "at least" };
        println!(
            "{name:34} {:6.1} %, bar {relation} {:.0} %: {}",
            100.0 * value,
            100.0 * bar,
            if holds { "met" } else { "MISSED" }
        );
    };
    println!("\nall judged rows: {}", judged.len());
    if let Some((median, most)) = speed {
        bar("speed, median error", median, BARS.0, true);
        bar("speed, 90th percentile", most, BARS.1, true);
    }
    if let Some((median, _)) = memory {
        bar("memory, median error", median, BARS.2, true);
    }
    bar("verdicts right", right, BARS.3, false);
    met
}
