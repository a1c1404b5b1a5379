//! `cargo xtask validate`: compares the simulator with published measurements.
//!
//! Every row is predicted with constants that were fitted on the other sources, and every source
//! counts alike. The table shows dense models in 16 bits, mixtures of experts, 8 and 4 bits, and
//! long sequences apart; per source errors of speed and memory; verdicts on memory by recall and
//! false alarms; the loss by choosing the configuration that is predicted fastest; and how many
//! measurements lie in their intervals. `--rows` prints every row, `--fit` fits the constants.

use clap::Args;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use trainyard_sim::validate::{
    Class, Disturbed, Outcome, add_intervals, choices, class_errors, compare, fit, weighted_quantile,
};
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
    /// Predict every row with the constants fitted on all sources, its own included.
    #[arg(long)]
    seen: bool,
    /// Write crates/sim/data/errors.toml.
    #[arg(long)]
    errors: bool,
    /// First fit the constants in this many rounds, on all sources and on all but each, and write
    /// crates/sim/data/constants.toml,
    /// left_out.toml and errors.toml.
    #[arg(long, value_name = "ROUNDS")]
    fit: Option<u32>,
}

/// Prints the comparison; false if a bar is missed.
pub fn run(options: &Options) -> anyhow::Result<bool> {
    let rows: Vec<_> = measurement::rows()?.into_iter().filter(|row| row.id.starts_with(&options.only)).collect();
    let profiles = Profiles::builtin();
    let mut constants = Constants::builtin();
    let mut without: BTreeMap<String, Constants> = BTreeMap::new();
    if let Some(rounds) = options.fit {
        let found = fit(&rows, &profiles, &constants, rounds);
        constants = found.constants.clone();
        for (source, values) in &found.left_out {
            let mut left_out = constants.clone();
            left_out.fitted_mut().into_iter().zip(values).for_each(|((_, to), from)| *to = *from);
            without.insert(source.clone(), left_out);
        }
        write_fit(&found)?;
    } else {
        for source in measurement::sources() {
            without.insert(source.prefix.clone(), constants.without(&source.prefix));
        }
    }
    let mut outcomes = compare(&rows, &profiles, |source| match without.get(source) {
        Some(without) if !options.seen => without,
        _ => &constants,
    });
    add_intervals(&mut outcomes, &profiles);
    if options.fit.is_some() || options.errors {
        write_errors(&outcomes)?;
    }
    print_sources(&outcomes);
    if options.rows {
        print_rows(&outcomes);
        for (picked, loss) in choices(&outcomes, Disturbed::Counted) {
            println!("choice of {picked}: {:5.1} % lost", 100.0 * loss);
        }
    }
    Ok(judge(&outcomes))
}

fn write_fit(found: &trainyard_sim::validate::Fit) -> anyhow::Result<()> {
    let mut constants = found.constants.clone();
    let names = constants.fitted_mut().map(|(name, value)| (name, *value));
    println!("fitted on {} rows; the spread is the standard deviation of the logarithm", found.rows);
    let mut text = String::from("\n[fitted]\n");
    for ((name, value), (spread, alone)) in names.iter().zip(&found.certainty) {
        let alone = alone.as_ref().map_or(String::new(), |source| format!("; only {source} says so"));
        println!("  {name:22} {value:9.4}  +- {:4.1} %{alone}", 100.0 * spread);
        writeln!(text, "{name} = {value:.4}")?;
    }
    let root = data();
    let file = std::fs::read_to_string(root.join("constants.toml"))?;
    let (before, rest) = file.split_once("\n[fitted]\n").expect("the file has the table");
    let (_, after) = rest.split_once("\n#").expect("the priors follow");
    std::fs::write(root.join("constants.toml"), format!("{before}{text}\n#{after}"))?;
    let mut text =
        String::from("# The fitted constants without each source. Written by `cargo xtask validate --fit`.\n");
    for (source, values) in &found.left_out {
        writeln!(text, "\n[{source}]")?;
        for ((name, _), value) in names.iter().zip(values) {
            writeln!(text, "{name} = {value:.4}")?;
        }
    }
    Ok(std::fs::write(root.join("left_out.toml"), text)?)
}

fn write_errors(outcomes: &[Outcome]) -> anyhow::Result<()> {
    let mut text = String::from(
        "# Errors of predictions of published runs by constants fitted on the other sources, each source\n# counting alike.\n\
         # Written by `cargo xtask validate --fit`.\n",
    );
    for (name, dense) in [("dense", true), ("other", false)] {
        let of: Vec<&Outcome> = outcomes.iter().filter(|o| (o.row.class() == Class::Dense) == dense).collect();
        let Some(errors) = class_errors(&of) else { anyhow::bail!("too few rows for the errors of {name} models") };
        writeln!(text, "\n[{name}]")?;
        for (name, spread) in [("speed", errors.speed), ("memory", errors.memory)] {
            let trainyard_sim::errors::Spread { low, high, waiting } = spread;
            writeln!(text, "{name} = {{ low = {low:.4}, high = {high:.4}, waiting = {waiting:.1} }}")?;
        }
        for (name, value) in
            [("between", errors.between), ("within", errors.within), ("usual", errors.usual), ("large", errors.large)]
        {
            writeln!(text, "{name} = {value:.4}")?;
        }
    }
    Ok(std::fs::write(data().join("errors.toml"), text)?)
}

fn data() -> std::path::PathBuf {
    std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/sim/data")
}

/// Median and 90th percentile of the sizes of errors, and the median error, with their number.
struct Figures {
    count: usize,
    median: f64,
    most: f64,
    bias: f64,
}

impl Figures {
    /// Of errors with weights; None if there are none.
    fn of(errors: &[(f64, f64)]) -> Option<Figures> {
        let sizes: Vec<(f64, f64)> = errors.iter().map(|(error, weight)| (error.abs(), *weight)).collect();
        Some(Figures {
            count: errors.len(),
            median: weighted_quantile(&sizes, 0.5)?,
            most: weighted_quantile(&sizes, 0.9)?,
            bias: weighted_quantile(errors, 0.5)?,
        })
    }

    fn column(errors: &[(f64, f64)]) -> String {
        match Figures::of(errors) {
            None => format!("{:>4}  {:>6}  {:>6}  {:>7}", 0, "-", "-", "-"),
            Some(Figures { count, median, most, bias }) => {
                format!("{count:>4}  {:4.1} %  {:4.0} %  {:+5.1} %", 100.0 * median, 100.0 * most, 100.0 * bias)
            }
        }
    }
}

/// The errors of `outcomes`, weighted so that every source has the weight 1.
fn weighted(outcomes: &[&Outcome], error: impl Fn(&Outcome) -> Option<f64>) -> Vec<(f64, f64)> {
    let mut counts: BTreeMap<&str, f64> = BTreeMap::new();
    let measured: Vec<(&str, f64)> =
        outcomes.iter().filter_map(|outcome| Some((outcome.row.source(), error(outcome)?))).collect();
    measured.iter().for_each(|(source, _)| *counts.entry(source).or_default() += 1.0);
    measured.iter().map(|(source, error)| (*error, 1.0 / counts[source])).collect()
}

fn line(name: &str, outcomes: &[&Outcome]) {
    let speed = weighted(outcomes, Outcome::speed_error);
    let memory = weighted(outcomes, Outcome::memory_error);
    let held = |in_interval: fn(&Outcome) -> Option<bool>| {
        let held: Vec<bool> = outcomes.iter().filter_map(|outcome| in_interval(outcome)).collect();
        let share = held.iter().filter(|held| **held).count() as f64 / held.len() as f64;
        if held.is_empty() { "   -".to_owned() } else { format!("{:4.0}", 100.0 * share) }
    };
    let ran = outcomes.iter().filter(|outcome| !outcome.row.out_of_memory);
    let (alarms, ran) = (ran.clone().filter(|outcome| !outcome.fits).count(), ran.count());
    let full = outcomes.iter().filter(|outcome| outcome.row.out_of_memory);
    let (found, full) = (full.clone().filter(|outcome| !outcome.fits).count(), full.count());
    println!(
        "{name:14} {:4} | {} {} | {} {} | {:>7} | {:>8}",
        outcomes.len(),
        Figures::column(&speed),
        held(Outcome::speed_held),
        Figures::column(&memory),
        held(Outcome::memory_held),
        if full > 0 { format!("{found} of {full}") } else { "-".to_owned() },
        format!("{alarms} of {ran}"),
    );
}

fn print_sources(outcomes: &[Outcome]) {
    println!(
        "every source predicted with constants fitted on the others; in: % of measurements in their 80 % interval"
    );
    println!(
        "               rows | speed: n  median  90th    bias   in | memory: n median 90th    bias   in | not fit | false"
    );
    for class in Class::ALL {
        println!("{}", class.words());
        let of = |source: &str| -> Vec<&Outcome> {
            outcomes.iter().filter(|o| o.row.class() == class && o.row.source() == source).collect()
        };
        for source in measurement::sources() {
            let part = of(&source.prefix);
            if !part.is_empty() {
                line(&format!("  {}", source.prefix), &part);
            }
        }
        let all: Vec<&Outcome> = outcomes.iter().filter(|outcome| outcome.row.class() == class).collect();
        line("  all", &all);
    }
}

fn print_rows(outcomes: &[Outcome]) {
    println!(
        "\nrow          tokens/s measured  predicted    error | GB measured  predicted    error | full verdict   why"
    );
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
            "{:12} {} | {} | {:4.0} % {verdict:7} {}",
            row.id,
            pair(row.tokens_per_s, outcome.tokens_per_s, outcome.speed_error()),
            pair(row.memory_gb, outcome.memory_gb, outcome.memory_error()),
            100.0 * outcome.filled,
            outcome.failed.as_deref().unwrap_or(&row.remark),
        );
    }
}

/// Compares with the bars.
fn judge(outcomes: &[Outcome]) -> bool {
    let mut met = true;
    let mut bar = |name: &str, value: f64, bar: f64, at_most: bool| {
        let holds = if at_most { value <= bar } else { value >= bar };
        met &= holds;
        let relation = if at_most { "at most" } else { "at least" };
        let said = if holds { "met" } else { "MISSED" };
        println!("{name:52} {:6.1} %, bar {relation} {:.0} %: {said}", 100.0 * value, 100.0 * bar);
    };
    println!();
    let dense: Vec<&Outcome> = outcomes.iter().filter(|outcome| outcome.row.class() == Class::Dense).collect();
    let narrow = |outcome: &&Outcome| matches!(outcome.row.class(), Class::Mixture | Class::Narrow);
    let others: Vec<&Outcome> = outcomes.iter().filter(narrow).collect();
    if let Some(figures) = Figures::of(&weighted(&dense, Outcome::speed_error)) {
        bar("dense in 16 bits, speed: median", figures.median, 0.07, true);
        bar("dense in 16 bits, speed: 90th percentile", figures.most, 0.20, true);
        bar("dense in 16 bits, speed: bias", figures.bias.abs(), 0.04, true);
    }
    if let Some(figures) = Figures::of(&weighted(&dense, Outcome::memory_error)) {
        bar("dense in 16 bits, memory: median", figures.median, 0.06, true);
        bar("dense in 16 bits, memory: 90th percentile", figures.most, 0.20, true);
    }
    if let Some(figures) = Figures::of(&weighted(&others, Outcome::speed_error)) {
        bar("mixtures and 8 bits, speed: median", figures.median, 0.12, true);
        bar("mixtures and 8 bits, speed: 90th percentile", figures.most, 0.30, true);
    }
    let share = |part: usize, whole: usize| part as f64 / whole.max(1) as f64;
    let full: Vec<&Outcome> = outcomes.iter().filter(|outcome| outcome.row.out_of_memory).collect();
    bar("out of memory, recall", share(full.iter().filter(|o| !o.fits).count(), full.len()), 0.90, false);
    let ran: Vec<&Outcome> = outcomes.iter().filter(|outcome| !outcome.row.out_of_memory).collect();
    bar("out of memory, false alarms", share(ran.iter().filter(|o| !o.fits).count(), ran.len()), 0.03, true);
    for (disturbed, which) in [(Disturbed::Left, "undisturbed runs"), (Disturbed::Counted, "all runs")] {
        let losses: Vec<f64> = choices(outcomes, disturbed).into_iter().map(|(_, loss)| loss).collect();
        println!("choice among {which}: {} groups of three configurations and more", losses.len());
        let plain: Vec<(f64, f64)> = losses.iter().map(|loss| (*loss, 1.0)).collect();
        let mean = losses.iter().sum::<f64>() / losses.len().max(1) as f64;
        bar(&format!("choice among {which}, mean loss"), mean, 0.04, true);
        let most = weighted_quantile(&plain, 0.9).unwrap_or(0.0);
        bar(&format!("choice among {which}, 90th percentile"), most, 0.15, true);
    }
    intervals(outcomes, &mut bar);
    met
}

fn intervals(outcomes: &[Outcome], bar: &mut impl FnMut(&str, f64, f64, bool)) {
    let all: Vec<&Outcome> = outcomes.iter().collect();
    let held = weighted(&all, |outcome| outcome.speed_held().map(f64::from));
    if held.is_empty() {
        return;
    }
    let share = |held: &[(f64, f64)]| {
        held.iter().map(|(held, weight)| held * weight).sum::<f64>()
            / held.iter().map(|(_, weight)| weight).sum::<f64>()
    };
    bar("intervals of speed, share held, sources alike", share(&held), 0.75, false);
    bar("intervals of speed, share held, sources alike", share(&held), 0.88, true);
    let plain: Vec<(f64, f64)> = held.iter().map(|(held, _)| (*held, 1.0)).collect();
    bar("intervals of speed, share held, rows alike", share(&plain), 0.75, false);
    let mut worst = (1.0, String::new());
    for source in measurement::sources() {
        let of: Vec<&Outcome> = outcomes.iter().filter(|outcome| outcome.row.source() == source.prefix).collect();
        let held: Vec<(f64, f64)> =
            of.iter().filter_map(|outcome| Some((f64::from(outcome.speed_held()?), 1.0))).collect();
        if !held.is_empty() && share(&held) < worst.0 {
            worst = (share(&held), source.prefix.clone());
        }
    }
    bar(&format!("intervals of speed, worst source ({})", worst.1), worst.0, 0.60, false);
    let widths: Vec<(f64, f64)> =
        weighted(&all, |outcome| outcome.speed_held().map(|_| outcome.speed_interval.width()));
    bar("intervals of speed, median width", weighted_quantile(&widths, 0.5).unwrap_or(0.0), 0.25, true);
}
