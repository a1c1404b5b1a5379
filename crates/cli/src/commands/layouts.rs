//! `trainyard bench layouts`: the same step on random tokens under several layouts, in turn.
//!
//! All layouts stand ready in one process and make one step each, again and again. A machine whose
//! speed drifts then slows all of them alike, and the median of the ratios within a turn is steady
//! where times are not.

use super::bench::{TrainArgs, configuration};
use crate::output::{count, note, print};
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use trainyard_base::median;
use trainyard_calibrate::Ranks;
use trainyard_engine::config::Resolved;

/// The layouts that are measured if none is given.
const DEFAULT: [&str; 3] = [
    "parallel.ranks=1",
    "parallel.ranks=2 parallel.tensor_parallel_degree=2",
    "parallel.ranks=2 parallel.pipeline_parallel_degree=2 parallel.pipeline_schedule='zero_bubble'",
];

/// A step under several layouts, in turn: ratios to the first layout.
#[derive(clap::Args)]
pub struct LayoutsArgs {
    #[command(flatten)]
    step: TrainArgs,
    /// A layout: settings, separated by spaces. The first is what others are compared with.
    /// Default: one rank, tensor parallelism of 2, and a pipeline of 2 with ZB-H1.
    #[arg(long = "layout", value_name = "SETTINGS")]
    layouts: Vec<String>,
}

/// A layout that stands ready.
struct Layout {
    settings: String,
    ranks: Ranks,
    resolved: Resolved,
    /// Seconds of each step.
    steps: Vec<f64>,
    loss: f64,
}

impl Layout {
    fn new(settings: &str, args: &TrainArgs) -> Result<Layout> {
        note(settings);
        let sets: Vec<String> = settings.split_whitespace().map(str::to_owned).collect();
        let resolved = configuration(args, &sets).with_context(|| format!("--layout \"{settings}\""))?;
        let ranks = Ranks::together(&resolved)?;
        Ok(Layout { settings: settings.to_owned(), ranks, resolved, steps: Vec::new(), loss: f64::NAN })
    }

    fn step(&mut self) -> Result<f64> {
        let made = self.ranks.step()?;
        self.loss = made.first().map_or(f64::NAN, |rank| rank.loss);
        Ok(made.iter().map(|rank| rank.seconds).fold(0.0, f64::max))
    }

    fn step_s(&self) -> f64 {
        median(self.steps.iter().copied()).unwrap_or(f64::NAN)
    }

    /// The speed as a share of that of `first`: the median over turns.
    fn against(&self, first: &Layout) -> f64 {
        median(first.steps.iter().zip(&self.steps).map(|(first, own)| first / own)).unwrap_or(f64::NAN)
    }

    fn json(&self, first: &Layout) -> Value {
        let tokens = self.resolved.tokens_per_step();
        json!({
            "name": self.settings,
            "ranks": self.resolved.parallel.ranks,
            "threads": self.resolved.threads,
            "step_s": self.step_s(),
            "step_s_all": self.steps,
            "tokens_per_s": tokens as f64 / self.step_s(),
            "speed_ratio": self.against(first),
            "loss": self.loss,
        })
    }
}

/// Runs the command.
pub fn run(args: &LayoutsArgs) -> Result<()> {
    if args.step.steps == 0 {
        bail!("--steps 0 measures nothing");
    }
    let settings = match args.layouts.is_empty() {
        true => DEFAULT.map(str::to_owned).to_vec(),
        false => args.layouts.clone(),
    };
    let layouts = settings.iter().map(|settings| Layout::new(settings, &args.step));
    let mut layouts = layouts.collect::<Result<Vec<Layout>>>()?;
    let tokens: Vec<u64> = layouts.iter().map(|layout| layout.resolved.tokens_per_step()).collect();
    if tokens.iter().any(|of_one| *of_one != tokens[0]) {
        bail!("layouts train {tokens:?} tokens in a step; they are compared on equal steps");
    }
    // The first steps allocate.
    layouts.iter_mut().try_for_each(|layout| layout.step().map(drop))?;
    for turn in 1..=args.step.steps {
        for layout in &mut layouts {
            let seconds = layout.step()?;
            layout.steps.push(seconds);
        }
        note(&format!("turn {turn} of {}", args.step.steps));
    }
    let first = &layouts[0];
    // The same tokens and initial values give the same loss, up to the order of sums.
    if let Some(other) = layouts.iter().find(|other| (other.loss / first.loss - 1.0).abs() > 1e-2) {
        bail!("{}: the loss is {}, and {} under {}", other.settings, other.loss, first.loss, first.settings);
    }
    if args.step.json {
        let cases: Vec<Value> = layouts.iter().map(|layout| layout.json(first)).collect();
        return print(format_args!("{}\n", json!({"cases": cases})));
    }
    print(format_args!(
        "{} tokens a step, medians of {} turns\n\n  step s   tokens/s   speed  ranks x threads  layout\n",
        count(tokens[0]),
        args.step.steps
    ))?;
    for layout in &layouts {
        print(format_args!(
            "{:>8.3} {:>10.1} {:>7.3} {:>9} x {:<5}  {}\n",
            layout.step_s(),
            tokens[0] as f64 / layout.step_s(),
            layout.against(first),
            layout.resolved.parallel.ranks,
            layout.resolved.threads,
            layout.settings
        ))?;
    }
    Ok(())
}
