//! `trainyard supervise`: runs a training command and restarts it from its newest checkpoint when a
//! rank fails.
//!
//! A restart is always a new process (or a new `mpirun` or `launch` with all of its processes),
//! however the ranks are started. The reason is that hanging threads can only be ended with their
//! process, and that memory touched by a fault is not trusted. The supervisor learns the run's
//! folder from rank 0 through a small file. If a rank has reported a failure and the command does
//! not end, because one of its processes is frozen, the supervisor ends it.

use super::train;
use crate::output::note;
use anyhow::{Context, Result};
use signal_hook::consts::{SIGINT, SIGTERM};
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use trainyard_comm::{Signal, end_with_parent};
use trainyard_engine::{faults::VARIABLE, watch};

/// The exit code of a run that ended because a rank failed.
pub const EXIT_FAULT: u8 = 70;
/// The exit code of a run that was asked to stop.
pub const EXIT_INTERRUPTED: u8 = 130;
/// The exit code of a panic outside of a rank.
pub const EXIT_PANIC: i32 = 101;
/// Exit codes above this one are 128 plus the signal that ended a process.
const EXIT_SIGNAL: i32 = 128;
/// Time limit for a command to end after the first report of a failure. Ranks end their own stuck
/// threads after half of it.
const ENDING: Duration = Duration::from_secs(10);
/// Time between SIGTERM and SIGKILL.
const KILLING: Duration = Duration::from_secs(10);
/// Interval at which the supervisor looks for reports.
const LOOK: Duration = Duration::from_millis(500);

/// Run a training command, and restart it from its newest checkpoint when a rank fails.
#[derive(clap::Args)]
pub struct Args {
    /// Restart at most this many times.
    #[arg(long, value_name = "N", default_value_t = 3)]
    max_restarts: u32,
    /// The command that starts the training. It ends in a `trainyard train` with its arguments:
    /// `mpirun -np 4 trainyard train c.toml`.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<ExitCode> {
    let (command, max_restarts) = (&args.command[..], args.max_restarts);
    supervise(Supervised { command, max_restarts, run: RunFile::own(), is_honest: false })
}

/// A supervised command.
pub struct Supervised<'a> {
    /// The command, ending in a `trainyard train` with its arguments.
    pub command: &'a [OsString],
    /// Upper limit for the restarts.
    pub max_restarts: u32,
    /// The file in which rank 0 names the run's folder.
    pub run: RunFile,
    /// True if the command's exit code tells how the ranks ended, so that rank 0's record is not
    /// needed.
    pub is_honest: bool,
}

/// Runs the command and restarts it. Returns its last exit code.
pub fn supervise(supervised: Supervised<'_>) -> Result<ExitCode> {
    let Supervised { command, max_restarts, run, is_honest } = supervised;
    let signals = Signals::new()?;
    for restart in 0.. {
        let mut process = Command::new(&command[0]);
        process.args(&command[1..]);
        // Before the first restart, a file of that name belongs to another run.
        if let Some(folder) = run.folder().filter(|_| restart > 0) {
            process.arg(train::RESTART).arg(folder);
        }
        process.arg(train::RUN_FILE).arg(&run.path);
        run.begin_attempt(restart)?;
        if restart > 0 {
            // Injected faults are for the first attempt.
            process.env_remove(VARIABLE);
        }
        // The command must end with this process. Otherwise a rank could train on, and its lock
        // would prevent a new start of the run. This program's own processes are killed. A launcher
        // gets SIGTERM, because only it can end its processes on other hosts.
        end_with_parent(&mut process, if is_honest { Signal::KILL } else { Signal::TERM });
        let began = Instant::now();
        let child = process.spawn().with_context(|| format!("cannot start {}", command[0].display()))?;
        let (mut status, was_ended) = signals.wait(child, &run)?;
        // Launchers have exit codes of their own. Open MPI with recovery, which lets ranks report,
        // always ends with 0, or with 1 after a signal. So the code that rank 0 recorded counts,
        // unless rank 0 was killed.
        match run.exit_code() {
            _ if is_honest => {}
            Some(code) if status.success() || signals.asked_to_stop() => {
                status = ExitStatus::from_raw(i32::from(code) << 8)
            }
            None if status.success() => status = ExitStatus::from_raw(i32::from(EXIT_FAULT) << 8),
            _ => {}
        }
        if status.success() || signals.asked_to_stop() || !(was_ended || is_fault(status)) {
            return Ok(exit_code(status));
        }
        let what = format!("supervisor: {status} after {:.1} s", began.elapsed().as_secs_f64());
        if restart == max_restarts {
            note(&format!("{what}; restarted {max_restarts} times already, which is all that --max-restarts allows"));
            return Ok(exit_code(status));
        }
        let from = match run.folder() {
            Some(folder) => format!("{} goes on from its newest checkpoint", folder.display()),
            None => "the run starts again from the beginning, because it had not begun".to_owned(),
        };
        note(&format!("{what}; restart {} of {max_restarts}: {from}", restart + 1));
    }
    unreachable!("restarts end")
}

/// True if a restart may help: a rank failed, or a process was ended by a signal that nobody sends
/// on purpose.
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

/// The file in which rank 0 writes the run's folder and, later, its exit code. It lies in the
/// working folder, which the hosts of a run share.
pub struct RunFile {
    path: PathBuf,
    /// True if this supervisor writes and removes the file; the run's other supervisors only read
    /// it.
    is_ours: bool,
}

impl RunFile {
    /// The file of a single supervisor.
    pub fn own() -> RunFile {
        RunFile { path: PathBuf::from(format!(".trainyard-run-{}", std::process::id())), is_ours: true }
    }

    /// The file shared by the supervisors of a run on several hosts, all of which know `name`.
    pub fn shared(name: &str, is_ours: bool) -> RunFile {
        let name = name.replace(|c: char| !c.is_ascii_alphanumeric() && c != '.' && c != '-', "_");
        RunFile { path: PathBuf::from(format!(".trainyard-run-{name}")), is_ours }
    }

    /// The run's folder: the first line, once it is complete.
    pub fn folder(&self) -> Option<PathBuf> {
        let text = std::fs::read_to_string(&self.path).ok()?;
        text.split_once('\n').map(|(folder, _)| PathBuf::from(folder)).filter(|folder| !folder.as_os_str().is_empty())
    }

    /// The exit code of rank 0 in this attempt: the second line.
    fn exit_code(&self) -> Option<u8> {
        std::fs::read_to_string(&self.path).ok()?.lines().nth(1)?.parse().ok()
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the exit code of the last attempt; before the first attempt, removes the file.
    pub fn begin_attempt(&self, restart: u32) -> Result<()> {
        match self.folder().filter(|_| restart > 0) {
            _ if !self.is_ours => Ok(()),
            Some(folder) => {
                write_run_file(&self.path, &folder).with_context(|| format!("cannot write {}", self.path.display()))
            }
            None => {
                // There may be no file.
                let _ = std::fs::remove_file(&self.path);
                Ok(())
            }
        }
    }
}

impl Drop for RunFile {
    fn drop(&mut self) {
        if self.is_ours {
            // The file may never have been written.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Writes the run's folder for the supervisor.
pub fn write_run_file(file: &Path, folder: &Path) -> std::io::Result<()> {
    std::fs::write(file, format!("{}\n", folder.display()))
}

/// Writes rank 0's exit code for the supervisor, below the run's folder, or below an empty line if
/// there is no run yet.
pub fn write_exit_code(file: &Path, code: u8) -> std::io::Result<()> {
    let before = std::fs::read_to_string(file).unwrap_or_default();
    let folder = before.lines().next().unwrap_or_default();
    std::fs::write(file, format!("{folder}\n{code}\n"))
}

/// Signals that ask to stop. SIGINT comes from the terminal and reaches the command too; SIGTERM is
/// passed on.
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

    /// Waits until the command ends. Ends it if a failure was reported and it does not end by
    /// itself; returns true in that case.
    fn wait(&self, mut child: Child, run: &RunFile) -> Result<(ExitStatus, bool)> {
        let mut passed_on = false;
        let mut reports = Reports::default();
        let mut looked = Instant::now();
        let mut ended: Option<Instant> = None;
        loop {
            if let Some(status) = child.try_wait().context("waiting for the training")? {
                return Ok((status, ended.is_some()));
            }
            if self.terminated.load(Ordering::Relaxed) && !passed_on {
                send(&child, "TERM").context("passing SIGTERM on")?;
                passed_on = true;
            }
            if looked.elapsed() >= LOOK {
                looked = Instant::now();
                let overdue = reports.first_new(run).is_some_and(|since| since.elapsed() > ENDING);
                match ended {
                    None if overdue => {
                        note(&format!(
                            "supervisor: the command does not end {} s after a failure was reported, so it is ended",
                            ENDING.as_secs()
                        ));
                        send(&child, "TERM").context("ending the command")?;
                        ended = Some(Instant::now());
                    }
                    Some(since) if since.elapsed() > KILLING => child.kill().context("killing the command")?,
                    _ => {}
                }
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Sends a signal, e.g. `TERM`. The child has not been waited for, so its process id is still
/// valid.
pub fn send(child: &Child, signal: &str) -> std::io::Result<()> {
    Command::new("kill").args([format!("-{signal}"), child.id().to_string()]).status().map(drop)
}

/// Reports of failures that an attempt has made.
#[derive(Default)]
struct Reports {
    /// Reports that existed when the run's folder became known, which is before the training.
    before: Option<BTreeSet<OsString>>,
    first_new: Option<Instant>,
}

impl Reports {
    /// The time at which the first new report was seen.
    fn first_new(&mut self, run: &RunFile) -> Option<Instant> {
        let folder = run.folder()?.join(watch::FOLDER);
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let now: BTreeSet<OsString> = entries.map(|entry| entry.file_name()).collect();
        if !now.is_subset(self.before.get_or_insert_with(|| now.clone())) {
            self.first_new.get_or_insert_with(Instant::now);
        }
        self.first_new
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

    #[test]
    fn reports_of_earlier_attempts_are_none_of_this_one() {
        let folder = tempfile::tempdir().unwrap();
        let run = RunFile { path: folder.path().join("file"), is_ours: true };
        let report = |name: &str| std::fs::write(folder.path().join(watch::FOLDER).join(name), "").unwrap();
        let mut reports = Reports::default();
        assert!(reports.first_new(&run).is_none(), "no run yet");
        std::fs::create_dir(folder.path().join(watch::FOLDER)).unwrap();
        report("1-rank-0.json");
        write_run_file(&run.path, folder.path()).unwrap();
        assert!(reports.first_new(&run).is_none());
        report("2-rank-1.json");
        let seen = reports.first_new(&run);
        assert!(seen.is_some() && reports.first_new(&run) == seen);
    }

    #[test]
    fn rank_0_says_how_it_ended() {
        let folder = tempfile::tempdir().unwrap();
        let run = RunFile { path: folder.path().join("file"), is_ours: true };
        assert_eq!((run.folder(), run.exit_code()), (None, None));
        write_exit_code(&run.path, 1).unwrap();
        assert_eq!((run.folder(), run.exit_code()), (None, Some(1)));
        run.begin_attempt(1).unwrap();
        assert_eq!((run.folder(), run.exit_code()), (None, None));
        write_run_file(&run.path, Path::new("runs/a b")).unwrap();
        assert_eq!((run.folder(), run.exit_code()), (Some("runs/a b".into()), None));
        write_exit_code(&run.path, 70).unwrap();
        assert_eq!((run.folder(), run.exit_code()), (Some("runs/a b".into()), Some(70)));
        let others = RunFile { path: run.path.clone(), is_ours: false };
        others.begin_attempt(1).unwrap();
        drop(others);
        assert_eq!((run.folder(), run.exit_code()), (Some("runs/a b".into()), Some(70)));
        run.begin_attempt(1).unwrap();
        assert_eq!((run.folder(), run.exit_code()), (Some("runs/a b".into()), None));
        run.begin_attempt(0).unwrap();
        assert_eq!(run.folder(), None, "of another run");
        assert_eq!(RunFile::shared("::1-29400", false).path, Path::new(".trainyard-run-__1-29400"));
    }
}
