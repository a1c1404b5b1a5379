//! `trainyard queue`: a queue of training jobs for one machine.

mod add;
mod run;
mod show;

use crate::output::{note, print};
use anyhow::{Context, Result};
use std::path::PathBuf;
use std::process::{Command as Process, ExitCode};
use std::time::{SystemTime, UNIX_EPOCH};
use trainyard_engine::config::Inputs;
use trainyard_queue::daemon::{Daemon, Event, Start, running};
use trainyard_queue::job::Job;
use trainyard_queue::store::{Store, local_offset};

/// Queue training jobs on this machine: run them when it is idle, in cheap or clean hours, by
/// priority and deadline, on as many ranks as pay.
#[derive(clap::Subcommand)]
pub enum Command {
    Add(Box<add::Args>),
    List(show::ListArgs),
    Show(show::ShowArgs),
    Pause(PauseArgs),
    Resume(ResumeArgs),
    Cancel(CancelArgs),
    Run(run::Args),
}

/// The option that names a queue.
#[derive(clap::Args)]
pub struct Place {
    /// The queue's folder. Unset: $TRAINYARD_QUEUE, else trainyard/queue below $XDG_STATE_HOME or
    /// ~/.local/state.
    #[arg(long, value_name = "FOLDER")]
    queue: Option<PathBuf>,
}

impl Place {
    /// The queue's folder.
    fn folder(&self) -> Result<PathBuf> {
        let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let named = self.queue.clone().or_else(|| set("TRAINYARD_QUEUE"));
        let state = || set("XDG_STATE_HOME").or_else(|| Some(set("HOME")?.join(".local/state")));
        let folder = named.or_else(|| Some(state()?.join("trainyard/queue")));
        let folder = folder.context("there is no place for the queue: name one with --queue FOLDER")?;
        std::path::absolute(&folder).with_context(|| format!("cannot use {}", folder.display()))
    }

    fn store(&self) -> Result<Store> {
        Ok(Store::open(&self.folder()?)?)
    }
}

/// Hold jobs back. One that runs stops at its next step, with a checkpoint to go on from.
#[derive(clap::Args)]
pub struct PauseArgs {
    /// Numbers of jobs, or names of their runs.
    #[arg(required = true, value_name = "JOB")]
    jobs: Vec<String>,
    #[command(flatten)]
    place: Place,
}

/// Let paused jobs go on, and give jobs that failed another chance.
#[derive(clap::Args)]
pub struct ResumeArgs {
    /// Numbers of jobs, or names of their runs.
    #[arg(required = true, value_name = "JOB")]
    jobs: Vec<String>,
    #[command(flatten)]
    place: Place,
}

/// Give jobs up. One that runs ends at its next step; its run and checkpoints stay.
#[derive(clap::Args)]
pub struct CancelArgs {
    /// Numbers of jobs, or names of their runs.
    #[arg(required = true, value_name = "JOB")]
    jobs: Vec<String>,
    #[command(flatten)]
    place: Place,
}

/// Runs the command.
pub fn run(command: &Command) -> Result<ExitCode> {
    match command {
        Command::Add(args) => add::run(args),
        Command::List(args) => show::list(args),
        Command::Show(args) => show::show(args),
        Command::Pause(PauseArgs { jobs, place }) => change(place, jobs, |store, id| {
            store.pause(id, true, now())?;
            Ok(store.job(id)?)
        }),
        Command::Resume(ResumeArgs { jobs, place }) => change(place, jobs, |store, id| {
            store.pause(id, false, now())?;
            Ok(store.job(id)?)
        }),
        Command::Cancel(CancelArgs { jobs, place }) => change(place, jobs, |store, id| Ok(store.cancel(id, now())?)),
        Command::Run(args) => return run::run(args),
    }?;
    Ok(ExitCode::SUCCESS)
}

/// Changes jobs, and stops those that are not to run any more. A daemon would do it at its next
/// look; without one it is done here.
fn change(place: &Place, jobs: &[String], change: impl Fn(&mut Store, i64) -> Result<Job>) -> Result<()> {
    let mut store = place.store()?;
    let ids = jobs.iter().map(|job| store.find(job)).collect::<Result<Vec<_>, _>>()?;
    for id in ids {
        let job = change(&mut store, id)?;
        let is_held = job.is_paused || job.is_cancelled;
        let words = match (job.is_cancelled, job.is_paused) {
            (true, _) => "cancelled",
            (false, true) => "paused",
            (false, false) => "waiting",
        };
        let more = if is_held && job.state.may_run() { "; it stops at its next step" } else { "" };
        print(format_args!("job {id} ({}): {words}{more}\n", job.request.name))?;
        if is_held
            && job.state.may_run()
            && let Some(mut daemon) = Daemon::open(&place.folder()?, cores(), &command)?
        {
            say(&daemon.release(id, now())?);
        }
    }
    if running(&place.folder()?).is_none() && store.jobs()?.iter().any(|job| !job.state.is_over() && !job.is_paused) {
        note("nothing runs the queue: `trainyard queue run` does, and `trainyard queue run --once` from cron");
    }
    Ok(())
}

/// Prints events to standard error.
fn say(events: &[Event]) {
    events.iter().for_each(|event| note(&format!("job {} ({}): {}", event.job, event.name, event.what)));
}

/// The cores that jobs may use.
fn cores() -> u32 {
    Inputs::of_this_machine().cores as u32
}

/// Seconds since 1970-01-01 00:00 UTC.
fn now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() as i64)
}

/// A time in local words.
fn at(time: i64) -> String {
    trainyard_queue::time::format(time, &local_offset)
}

/// The path of a running program's file. Linux marks it where the file was replaced, as an update
/// does while the daemon runs; the new file has the path without the mark.
fn unmarked(program: PathBuf) -> PathBuf {
    match program.to_str().and_then(|text| text.strip_suffix(" (deleted)")) {
        Some(path) if !program.exists() => path.into(),
        _ => program,
    }
}

/// The command that trains a job, or goes on with it.
fn command(start: Start<'_>) -> Process {
    let request = &start.job.request;
    let program = std::env::current_exe().unwrap_or_else(|_| "trainyard".into());
    let mut process = Process::new(unmarked(program));
    process.current_dir(&request.folder).arg("train");
    let mut sets = start.shape.sets.clone();
    if start.has_begun {
        // What is set when a run begins is in its configuration.
        process.arg("--resume").arg(&request.run);
    } else {
        process.arg(&start.files.config);
        let name = toml::Value::String(request.name.clone());
        sets = [&request.sets[..], &sets[..], &[format!("run.name={name}")]].concat();
    }
    sets.iter().for_each(|set| {
        process.args(["--set", set]);
    });
    process.arg(super::train::RUN_FILE).arg(&start.files.run_file);
    process
}
