//! `trainyard bench bubbles`: the step of every pipeline schedule, beside that of its program in
//! the simulator and the bubble of its paper.
//!
//! The model is tiny and every pass of a block is held to a duration, asleep. A few cores can then
//! run eight ranks, and the measured step is that of the schedule and of the engine's lanes and
//! messages. The simulator plays the same programs with the same durations, and gives everything
//! else no time. So the ratio of the two is the engine's own overhead.

use crate::output::{note, print};
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::path::Path;
use trainyard_base::median;
use trainyard_calibrate::Ranks;
use trainyard_engine::config::{Config, Inputs, Resolved};
use trainyard_engine::rank::Pace;
use trainyard_program::{PipelineSchedule, Program, TurnTimes};
use trainyard_sim::paced_times;

/// The schedules with their names in configurations.
const SCHEDULES: [(&str, PipelineSchedule); 6] = [
    ("gpipe", PipelineSchedule::GPipe),
    ("1f1b", PipelineSchedule::OneForwardOneBackward),
    ("interleaved", PipelineSchedule::Interleaved { chunks: 2 }),
    ("zero_bubble", PipelineSchedule::ZeroBubble),
    ("zero_bubble_v", PipelineSchedule::ZeroBubbleV),
    ("dual_pipe_v", PipelineSchedule::DualPipeV),
];

/// Blocks of a stage: one for each of the two stretches that some schedules give a stage.
const BLOCKS: u32 = 2;

/// Bubbles of the pipeline schedules: paced steps of the engine against the simulator.
#[derive(clap::Args)]
pub struct BubblesArgs {
    /// The schedules. Default: all.
    #[arg(long, value_delimiter = ',', value_name = "NAME", value_parser = schedule)]
    schedules: Vec<(&'static str, PipelineSchedule)>,
    /// Numbers of stages.
    #[arg(long, value_delimiter = ',', default_value = "2,4,8")]
    stages: Vec<u32>,
    /// Numbers of micro-batches. Those that a schedule does not accept are left out.
    #[arg(long, value_delimiter = ',', default_value = "4,8,16,32")]
    micro_batches: Vec<u32>,
    /// Milliseconds of a stage's forward and of each half of its backward.
    #[arg(long, default_value_t = 12.0)]
    milliseconds: f64,
    /// Timed steps of each case.
    #[arg(long, default_value_t = 3)]
    steps: usize,
    /// Print one JSON line.
    #[arg(long)]
    json: bool,
}

fn schedule(text: &str) -> Result<(&'static str, PipelineSchedule), String> {
    let names = || SCHEDULES.map(|(name, _)| name).join(", ");
    SCHEDULES.into_iter().find(|(name, _)| *name == text).ok_or_else(|| format!("is none of {}", names()))
}

/// A measured case. Times are in seconds.
struct Case {
    name: &'static str,
    schedule: PipelineSchedule,
    stages: u32,
    micro_batches: u32,
    measured: f64,
    simulated: f64,
    /// The step without a bubble.
    busy: f64,
}

impl Case {
    fn ratio(&self) -> f64 {
        self.measured / self.simulated
    }

    /// The time in which a stage is idle, as a share of that in which it is busy.
    fn bubble(&self, step: f64) -> f64 {
        step / self.busy - 1.0
    }

    /// The bubble in the paper, for passes that take equally long; None for fewer micro-batches
    /// than papers consider.
    fn paper(&self) -> Option<f64> {
        let parts = match self.schedule {
            PipelineSchedule::ZeroBubble => 3,
            PipelineSchedule::ZeroBubbleV | PipelineSchedule::DualPipeV => 6,
            other => other.facts().chunks,
        };
        let bubble = f64::from(self.stages - 1) / f64::from(parts * self.micro_batches);
        (self.micro_batches >= 2 * self.stages).then_some(bubble)
    }

    fn json(&self) -> Value {
        json!({
            "name": format!("{} p={} m={}", self.name, self.stages, self.micro_batches),
            "kind": "bubble",
            "schedule": self.name,
            "stages": self.stages,
            "micro_batches": self.micro_batches,
            "measured_s": self.measured,
            "simulated_s": self.simulated,
            "error": self.ratio() - 1.0,
            "bubble": self.bubble(self.measured),
            "paper": self.paper(),
        })
    }
}

/// Runs the command.
pub fn run(args: &BubblesArgs) -> Result<()> {
    if !(0.1..=1000.0).contains(&args.milliseconds) {
        bail!("--milliseconds {} must be from 0.1 to 1000", args.milliseconds);
    }
    if args.steps == 0 {
        bail!("--steps 0 measures nothing");
    }
    if args.stages.iter().any(|stages| !(2..=64).contains(stages)) {
        bail!("--stages must be from 2 to 64");
    }
    if args.micro_batches.iter().any(|micro_batches| !(1..=1024).contains(micro_batches)) {
        bail!("--micro-batches must be from 1 to 1024");
    }
    let schedules = if args.schedules.is_empty() { SCHEDULES.to_vec() } else { args.schedules.clone() };
    if !args.json {
        print("schedule        stages  micro-batches  measured ms  simulated ms   ratio   bubble    paper\n")?;
    }
    let mut cases = Vec::new();
    for (name, schedule) in schedules {
        for &stages in &args.stages {
            let accepted = |m: &&u32| schedule.facts().micro_batches.accept(stages, **m);
            for &micro_batches in args.micro_batches.iter().filter(accepted) {
                note(&format!("{name}, {stages} stages, {micro_batches} micro-batches"));
                let case = measure(name, schedule, stages, micro_batches, args)?;
                if !args.json {
                    line(&case)?;
                }
                cases.push(case);
            }
        }
    }
    if cases.is_empty() {
        bail!("no schedule accepts these numbers of stages and micro-batches");
    }
    if args.json {
        let cases: Vec<Value> = cases.iter().map(Case::json).collect();
        return print(format_args!("{}\n", json!({"cases": cases})));
    }
    let worst = cases.iter().map(Case::ratio).max_by(|a, b| (a - 1.0).abs().total_cmp(&(b - 1.0).abs()));
    print(format_args!("\nfarthest from the simulator: {:+.1} %\n", 100.0 * (worst.unwrap_or(1.0) - 1.0)))
}

fn line(case: &Case) -> Result<()> {
    let paper = case.paper().map_or_else(String::new, |paper| format!("{:.1} %", 100.0 * paper));
    print(format_args!(
        "{:<15} {:>6} {:>14} {:>12.2} {:>13.2} {:>7.3} {:>6.1} % {paper:>8}\n",
        case.name,
        case.stages,
        case.micro_batches,
        1e3 * case.measured,
        1e3 * case.simulated,
        case.ratio(),
        100.0 * case.bubble(case.measured),
    ))
}

fn measure(
    name: &'static str,
    schedule: PipelineSchedule,
    stages: u32,
    micro_batches: u32,
    args: &BubblesArgs,
) -> Result<Case> {
    let blocks = BLOCKS * stages;
    let resolved = tiny(name, stages, micro_batches, blocks)?;
    let of_a_block = (1e6 * args.milliseconds / f64::from(BLOCKS)) as u64;
    let times = TurnTimes { forward: of_a_block, input: of_a_block, weights: of_a_block };
    // The embedding and the head have no pace, so every stage has the same work.
    let mut paces = vec![times; blocks as usize + 2];
    (paces[0], paces[blocks as usize + 1]) = (TurnTimes::default(), TurnTimes::default());
    let pace = Pace::new(paces);
    let mut ranks = Ranks::paced(&resolved, &pace)?;
    ranks.step()?;
    let mut steps = Vec::new();
    for _ in 0..args.steps {
        steps.push(ranks.step()?.iter().map(|rank| rank.seconds).fold(0.0, f64::max));
    }
    let programs: Vec<Program> = ranks.members().iter().map(|rank| rank.program.clone()).collect();
    let spans = paced_times(&programs, pace.nanoseconds())?;
    let end = spans.iter().flatten().map(|span| span.end_s).fold(0.0, f64::max);
    Ok(Case {
        name,
        schedule,
        stages,
        micro_batches,
        measured: median(steps).context("no steps")?,
        simulated: 1e-9 * end,
        busy: 1e-9 * f64::from(micro_batches * BLOCKS) * (3 * of_a_block) as f64,
    })
}

/// A model of `blocks` blocks whose real work is small beside the pace.
fn tiny(schedule: &str, stages: u32, micro_batches: u32, blocks: u32) -> Result<Resolved> {
    let sets = [
        "model.family='llama'".to_owned(),
        "model.dim=16".to_owned(),
        format!("model.layers={blocks}"),
        "model.heads=2".to_owned(),
        "model.ffn_dim=32".to_owned(),
        "model.vocab_size=64".to_owned(),
        "model.max_sequence_length=8".to_owned(),
        "model.tie_embeddings=false".to_owned(),
        "training.steps=1".to_owned(),
        "training.sequence_length=8".to_owned(),
        "training.micro_batch_size=1".to_owned(),
        format!("training.accumulation_steps={micro_batches}"),
        "compute.threads=1".to_owned(),
        format!("parallel.ranks={stages}"),
        format!("parallel.pipeline_parallel_degree={stages}"),
        format!("parallel.pipeline_schedule='{schedule}'"),
    ];
    let inputs = Inputs { batches_supplied: true, ..Inputs::of_this_machine() };
    Ok(Config::parse(Path::new("bubbles"), "", &sets)?.resolve(&inputs)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn papers_give_the_bubble_of_the_simulator() {
        for (name, schedule) in SCHEDULES {
            let (stages, micro_batches) = (4, 8);
            let table = schedule.table(stages, micro_batches);
            let end = table.play(TurnTimes::EQUAL).iter().flatten().map(|span| span.end).max().unwrap();
            let busy = f64::from(3 * micro_batches * schedule.facts().chunks);
            let case = Case { name, schedule, stages, micro_batches, measured: 0.0, simulated: end as f64, busy };
            let [paper, simulated] = [case.paper().unwrap(), case.bubble(case.simulated)];
            assert!((paper - simulated).abs() < 1e-9, "{name}: {paper} against {simulated}");
        }
    }
}
