//! `trainyard queue run`: the daemon, or one look from cron.

use super::{Place, command, cores, now, say};
use crate::output::{note, print};
use anyhow::{Context, Result, bail};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use trainyard_queue::daemon::{Daemon, running};
use trainyard_queue::job::{Job, State};

/// Run the queue: look at jobs and machine again and again, start what is to run, and stop what is
/// not. SIGINT or SIGTERM stops the jobs at their next step and ends it; a second one leaves the
/// jobs running. A daemon that is killed loses nothing: jobs go on, and the next daemon finds them.
#[derive(clap::Args)]
pub struct Args {
    /// Look once and end; jobs that run go on running. For cron, every few minutes.
    #[arg(long)]
    once: bool,
    /// End when every job is done, failed, paused or cancelled.
    #[arg(long, conflicts_with = "once")]
    until_done: bool,
    /// Seconds between two looks.
    #[arg(long, value_name = "SECONDS", default_value_t = 5.0)]
    every: f64,
    #[command(flatten)]
    place: Place,
}

/// Interval at which signals and ended processes are noticed.
const SLICE: Duration = Duration::from_millis(20);
/// The longest time between two looks, in seconds.
const EVERY_MAX: f64 = 3600.0;

/// Runs the command.
pub fn run(args: &Args) -> Result<ExitCode> {
    if !(args.every > 0.0 && args.every <= EVERY_MAX) {
        bail!("--every {}: give seconds, above 0 and at most {EVERY_MAX:.0}", args.every);
    }
    let folder = args.place.folder()?;
    // Only `queue add` makes a queue, so that a mistyped folder is found.
    drop(args.place.store()?);
    let Some(mut daemon) = Daemon::open(&folder, cores(), &command)? else {
        let pid = running(&folder).map_or(String::new(), |pid| format!(", process {pid}"));
        if args.once {
            note(&format!("a daemon runs this queue already{pid}"));
            return Ok(ExitCode::SUCCESS);
        }
        bail!("a daemon runs this queue already{pid}: end it first, or use its queue as it is");
    };
    let signals = signals()?;
    loop {
        let tick = daemon.tick(now())?;
        say(&tick.events);
        if args.once {
            print(summary(&tick.jobs))?;
            return Ok(ExitCode::SUCCESS);
        }
        let is_left = |job: &Job| !job.state.is_over() && (!job.is_paused || job.state.may_run());
        if args.until_done && !tick.jobs.iter().any(is_left) {
            print(summary(&tick.jobs))?;
            return Ok(ExitCode::SUCCESS);
        }
        let looked = Instant::now();
        while looked.elapsed().as_secs_f64() < args.every && signals.load(Ordering::Relaxed) == 0 && !daemon.has_news()
        {
            std::thread::sleep(SLICE);
        }
        if signals.load(Ordering::Relaxed) > 0 {
            return end(&mut daemon, &signals);
        }
    }
}

/// Stops the jobs, and waits until they have, or for a second signal.
fn end(daemon: &mut Daemon<'_>, signals: &AtomicUsize) -> Result<ExitCode> {
    loop {
        let (events, alive) = daemon.stop(now())?;
        say(&events);
        if alive == 0 {
            return Ok(ExitCode::SUCCESS);
        }
        if signals.load(Ordering::Relaxed) > 1 {
            note("ended; jobs that still run go on, and the next `trainyard queue run` finds them");
            return Ok(ExitCode::SUCCESS);
        }
        std::thread::sleep(SLICE);
    }
}

/// Counts SIGINT and SIGTERM.
fn signals() -> Result<Arc<AtomicUsize>> {
    let counted = Arc::new(AtomicUsize::new(0));
    let flags: Vec<Arc<AtomicBool>> = vec![Arc::default(), Arc::default()];
    for (signal, flag) in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM].into_iter().zip(&flags) {
        signal_hook::flag::register(signal, Arc::clone(flag)).context("signal handling")?;
    }
    let counts = Arc::clone(&counted);
    // The thread ends with the process.
    let watch = move || {
        loop {
            let came = flags.iter().filter(|flag| flag.swap(false, Ordering::Relaxed)).count();
            counts.fetch_add(came, Ordering::Relaxed);
            std::thread::sleep(SLICE);
        }
    };
    std::thread::Builder::new().name("signals".to_owned()).spawn(watch).context("signal handling")?;
    Ok(counted)
}

/// `2 running, 1 waiting, 4 done`
fn summary(jobs: &[Job]) -> String {
    let count = |state: &State| match jobs.iter().filter(|job| job.state == *state).count() {
        0 => None,
        count => Some(format!("{count} {}", state.name())),
    };
    let counts: Vec<String> = State::ALL.iter().filter_map(count).collect();
    if counts.is_empty() { "no jobs\n".to_owned() } else { counts.join(", ") + "\n" }
}
