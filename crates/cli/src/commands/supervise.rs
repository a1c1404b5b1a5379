//! `trainyard supervise`: a training command, started again from its newest checkpoint when a rank fails.
//!
//! A failed run leaves its process: threads that hang cannot be ended in any other way, and memory that a fault has touched is not trusted. So a restart is a new process (or a new
//! `mpirun` with all of its processes), whichever way the ranks are started. The supervisor learns the run's folder from rank 0 through a small file.

use super::train;
use crate::output::note;
use anyhow::{Context, Result};
use signal_hook::consts::{SIGINT, SIGTERM};
use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use trainyard_engine::faults::VARIABLE;

/// The exit code of a run that ended because a rank failed.
pub const EXIT_FAULT: u8 = 70;
/// The exit code of a panic outside of a rank.
const EXIT_PANIC: i32 = 101;
/// Exit codes from here on are 128 and the signal that ended a process.
const EXIT_SIGNAL: i32 = 128;

/// Run a training command, and start it again from its newest checkpoint when a rank fails.
#[derive(clap::Args)]
pub struct Args {
    /// How often it is started again.
    #[arg(long, value_name = "N", default_value_t = 3)]
    max_restarts: u32,
    /// What starts the training, ending in a `trainyard train` with its arguments: `mpirun -np 4 trainyard train c.toml`.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<ExitCode> {
    supervise(&args.command, args.max_restarts)
}

/// Runs `command` and restarts it up to `max_restarts` times; its last exit code.
pub fn supervise(command: &[OsString], max_restarts: u32) -> Result<ExitCode> {
    let signals = Signals::new()?;
    let run = RunFile::new();
    for restart in 0.. {
        let mut process = Command::new(&command[0]);
        process.args(&command[1..]);
        match run.folder() {
            Some(folder) => process.arg(train::RESTART).arg(folder),
            None => process.arg(train::RUN_FILE).arg(&run.0),
        };
        if restart > 0 {
            // Faults on purpose are for the first attempt.
            process.env_remove(VARIABLE);
        }
        let began = Instant::now();
        let child = process.spawn().with_context(|| format!("cannot start {}", command[0].display()))?;
        let status = signals.wait(child)?;
        if status.success() || signals.asked_to_stop() || !is_fault(status) {
            return Ok(exit_code(status));
        }
        let what = format!("supervisor: {status} after {:.1} s", began.elapsed().as_secs_f64());
        if restart == max_restarts {
            note(&format!("{what}; restarted {max_restarts} times already, which is all that --max-restarts allows"));
            return Ok(exit_code(status));
        }
        let from = match run.folder() {
            Some(folder) => format!("{} goes on from its newest checkpoint", folder.display()),
            None => "the run starts anew, because it had not begun".to_owned(),
        };
        note(&format!("{what}; restart {} of {max_restarts}: {from}", restart + 1));
    }
    unreachable!("restarts end")
}

/// Whether an ended command is worth another try: a rank failed, or a process was ended by a signal that nobody sends on purpose.
fn is_fault(status: ExitStatus) -> bool {
    match status.code() {
        Some(code) if code > EXIT_SIGNAL => ![SIGINT, SIGTERM].contains(&(code - EXIT_SIGNAL)),
        Some(code) => code == i32::from(EXIT_FAULT) || code == EXIT_PANIC,
        None => true,
    }
}

fn exit_code(status: ExitStatus) -> ExitCode {
    let code = status.code().unwrap_or_else(|| EXIT_SIGNAL + status.signal().unwrap_or(0));
    // The operating system's codes have eight bits.
    ExitCode::from(u8::try_from(code).unwrap_or(EXIT_FAULT))
}

/// Where rank 0 writes the run's folder. In the working folder, which the hosts of a run share as they share the run's folder.
struct RunFile(PathBuf);

impl RunFile {
    fn new() -> RunFile {
        RunFile(PathBuf::from(format!(".trainyard-run-{}", std::process::id())))
    }

    fn folder(&self) -> Option<PathBuf> {
        let text = std::fs::read_to_string(&self.0).ok()?;
        text.strip_suffix('\n').map(PathBuf::from)
    }
}

impl Drop for RunFile {
    fn drop(&mut self) {
        // It may never have been written.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Writes what [`RunFile`] reads.
pub fn write_run_file(file: &Path, folder: &Path) -> std::io::Result<()> {
    std::fs::write(file, format!("{}\n", folder.display()))
}

/// Asks to stop: SIGINT reaches the command too, as it comes from the terminal; SIGTERM is passed on.
struct Signals {
    interrupted: Arc<AtomicBool>,
    terminated: Arc<AtomicBool>,
}

impl Signals {
    fn new() -> Result<Signals> {
        let signals = Signals { interrupted: Arc::default(), terminated: Arc::default() };
        for (signal, flag) in [(SIGINT, &signals.interrupted), (SIGTERM, &signals.terminated)] {
            signal_hook::flag::register(signal, Arc::clone(flag)).context("signal handling")?;
        }
        Ok(signals)
    }

    fn asked_to_stop(&self) -> bool {
        self.interrupted.load(Ordering::Relaxed) || self.terminated.load(Ordering::Relaxed)
    }

    fn wait(&self, mut child: Child) -> Result<ExitStatus> {
        let mut passed_on = false;
        loop {
            if let Some(status) = child.try_wait().context("waiting for the training")? {
                return Ok(status);
            }
            if self.terminated.load(Ordering::Relaxed) && !passed_on {
                // The child has not been waited for, so its number is still its own.
                let kill = Command::new("kill").args(["-TERM", &child.id().to_string()]).status();
                kill.context("passing SIGTERM on")?;
                passed_on = true;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_told_from_errors() {
        let exited = |code: i32| ExitStatus::from_raw(code << 8);
        for code in [70, 101, 134, 137, 139] {
            assert!(is_fault(exited(code)), "{code}");
        }
        for code in [1, 2, 130, 143] {
            assert!(!is_fault(exited(code)), "{code}");
        }
        assert!(is_fault(ExitStatus::from_raw(libc::SIGKILL)));
    }
}
