//! `trainyard program`: prints the instructions of a training step, or draws them.

use super::config::{ConfigArgs, plan};
use crate::forecast;
use crate::output::print;
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use trainyard_calibrate::layout;
use trainyard_engine::config::Resolved;
use trainyard_engine::predict::StepNeeds;
use trainyard_plan::picture::{StepPicture, TimeBasis, svg};
use trainyard_program::Program;
use trainyard_sim::host::{HostStage, host_step};
use trainyard_sim::machine::Machine;
use trainyard_sim::{Span, equal_times};

/// Print the step program of a configuration: every instruction with its lane, dependencies and
/// bytes.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    config: ConfigArgs,
    /// Print the program of a step that ends in a checkpoint.
    #[arg(long)]
    snapshot: bool,
    /// Print the program of this rank: from 0 to `parallel.ranks` - 1.
    #[arg(long, default_value_t = 0)]
    rank: u32,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Draw the step as an SVG file instead: a row per lane, and in a pipeline per stage. Times are
    /// those of this machine's profile if it has one (`trainyard calibrate`), else equal units; the
    /// picture says which.
    #[arg(long, value_name = "FILE", conflicts_with = "json")]
    picture: Option<PathBuf>,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let resolved = args.config.resolve()?;
    let ranks = resolved.parallel.ranks;
    if args.rank as usize >= ranks {
        bail!("--rank {} does not exist: there are {ranks} ranks, from 0", args.rank);
    }
    let planned = |rank| {
        let words = "the vocabulary is that of the text's characters: set model.vocab_size to see the program";
        let (_, [plain, last], needs) = plan(&resolved, rank)?.context(words)?;
        anyhow::Ok((if args.snapshot { last } else { plain }, needs))
    };
    let (program, needs) = planned(args.rank)?;
    if let Some(path) = &args.picture {
        let stage_ranks = program.mesh.stage_ranks();
        let stages = match program.mesh.pp {
            1 => vec![(program, needs)],
            // The ranks of the same place in every stage.
            pp => (0..pp).map(|stage| planned(stage * stage_ranks + args.rank % stage_ranks)).collect::<Result<_>>()?,
        };
        return draw(path, stages, &resolved);
    }
    let program = &program;
    if args.json {
        return print(format_args!("{}\n", serde_json::to_string(&program.report())?));
    }
    print(program)
}

/// Draws the step of `stages`, one program per pipeline stage, into an SVG file.
fn draw(path: &Path, stages: Vec<(Program, StepNeeds)>, resolved: &Resolved) -> Result<()> {
    let predicted = predicted(&stages, resolved);
    let (programs, _): (Vec<Program>, Vec<StepNeeds>) = stages.into_iter().unzip();
    let programs = &programs[..];
    let (spans, basis) = match &predicted {
        Ok((spans, source)) => (spans.clone(), TimeBasis::Predicted(source)),
        Err(_) => (equal_times(programs)?, TimeBasis::EqualUnits),
    };
    let mesh = &programs[0].mesh;
    let who = match programs {
        [program] => format!("rank {} of {}", program.rank, mesh.ranks()),
        _ => format!("{} stages of {} ranks", mesh.pp, mesh.stage_ranks()),
    };
    let title = format!("A step of {who}, micro-batches: {}", programs[0].micro_batches);
    let drawn = svg(&StepPicture { title: &title, programs, spans: &spans, basis });
    std::fs::write(path, drawn).with_context(|| format!("cannot write {}", path.display()))?;
    let why = predicted.as_ref().err().map_or_else(String::new, |why| format!(" ({why})"));
    let times = if basis == TimeBasis::EqualUnits { "equal units of time" } else { "predicted times" };
    print(format_args!("{}: {who}, {times}{why}\n", path.display()))
}

/// The predicted intervals of the instructions of every stage's program on this machine, and their
/// source; or the reason why there are none.
fn predicted(stages: &[(Program, StepNeeds)], resolved: &Resolved) -> Result<(Vec<Vec<Span>>, String), String> {
    let here = Machine::here();
    let profile = forecast::profile(forecast::profile_kind(&resolved.config), &here)?;
    let stages = stages.iter().map(|(program, needs)| HostStage { program, calls: &needs.calls });
    let stages: Vec<HostStage<'_>> = stages.collect();
    let step = host_step(&stages, &profile, layout(resolved, &here), &profile.speeds);
    let spans = step.simulated.ranks.into_iter().map(|rank| rank.spans).collect();
    Ok((spans, format!("this machine's profile, calibrated {}", profile.measured)))
}
