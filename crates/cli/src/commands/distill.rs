//! `trainyard distill`: training with a teacher.

use super::config::load;
use super::train;
use anyhow::{Result, bail};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;
use trainyard_engine::session::files;

/// Train a student to give a teacher's distribution of the next token: `train` with a teacher,
/// which --teacher or distillation.teacher names.
#[derive(clap::Args)]
#[group(id = "distill")]
pub struct Args {
    /// The teacher: the folder of a run, whose newest checkpoint is used, a Hugging Face folder or
    /// a GGUF file. Default: distillation.teacher of the configuration.
    #[arg(long, value_name = "MODEL")]
    teacher: Option<PathBuf>,
    /// Keep what the teacher's logits follow from in this folder, so that sequences which are there
    /// need no forward of the teacher: in later epochs, and for other students. It takes as many
    /// bytes per token as the teacher's hidden state. Default: distillation.cache of the
    /// configuration.
    #[arg(long, value_name = "DIR")]
    cache_logits: Option<PathBuf>,
    #[command(flatten)]
    train: train::Args,
}

/// Runs the command.
pub fn run(args: Args, process_start: Instant) -> Result<ExitCode> {
    let Args { teacher, cache_logits, mut train } = args;
    for (option, key, path) in [("--teacher", "teacher", teacher), ("--cache-logits", "cache", cache_logits)] {
        if let Some(path) = path {
            let Some(text) = path.to_str() else { bail!("{option} {}: the path is not UTF-8", path.display()) };
            train.sets.push(format!("distillation.{key}={}", toml::Value::from(text)));
        }
    }
    // A run that goes on has its teacher in its own configuration.
    let own = train.resume.as_ref().or(train.restart.as_ref()).map(|run| run.join(files::CONFIG));
    let config = own.or(train.config.clone());
    if load(config.as_deref(), &train.sets)?.distillation.teacher.is_none() {
        bail!("no teacher: give --teacher MODEL, or set distillation.teacher in the configuration");
    }
    train::run(&train, process_start)
}
