//! Processes of jobs: starting one, knowing whether it is alive, and asking it to stop.
//!
//! A job's log is locked (`flock`) by the file that its process has as standard output. The kernel
//! frees the lock when the last process that has the file ends, however it ends. So whoever can
//! lock the log knows that nothing of the job is alive, without process numbers, which are used
//! again, and without being its parent.

use crate::QueueError;
use crate::job::Process;
use procfs::process::Stat;
use rustix::process::{Pid, Signal, kill_process};
use std::fs::{File, OpenOptions, TryLockError};
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// The files of one job in the queue's folder.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Files {
    /// The folder that holds them.
    pub folder: PathBuf,
    /// The configuration, as it was when the job was added.
    pub config: PathBuf,
    /// Output of the job's processes, one after the other.
    pub log: PathBuf,
    /// The file of `train --run-file`: the run's folder, then the exit code.
    pub run_file: PathBuf,
}

impl Files {
    /// The files of job `id` in the queue's `folder`.
    pub fn new(folder: &Path, id: i64) -> Files {
        let folder = folder.join("jobs").join(id.to_string());
        Files { config: folder.join("config.toml"), log: folder.join("log"), run_file: folder.join("run"), folder }
    }
}

fn file_error(what: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> QueueError {
    let path = path.to_owned();
    move |source| QueueError::File { what, path, source }
}

/// True if a process of the job whose log this is may be alive.
///
/// # Errors
///
/// The log is there and cannot be opened.
pub fn is_alive(log: &Path) -> Result<bool, QueueError> {
    let file = match File::open(log) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(file_error("open", log)(error)),
    };
    match file.try_lock() {
        Ok(()) => Ok(false),
        Err(TryLockError::WouldBlock) => Ok(true),
        Err(TryLockError::Error(error)) => Err(file_error("lock", log)(error)),
    }
}

/// Starts `command` with the locked log as its output, in a process group of its own, so that
/// signals of a terminal do not reach it. None if another process holds the log. `line` is written
/// to the log first.
///
/// # Errors
///
/// The log cannot be written, or the program cannot be started.
pub fn start(mut command: Command, log: &Path, line: &str) -> Result<Option<(Child, Process)>, QueueError> {
    let mut file = OpenOptions::new().create(true).append(true).open(log).map_err(file_error("open", log))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Ok(None),
        Err(TryLockError::Error(error)) => return Err(file_error("lock", log)(error)),
    }
    writeln!(file, "{line}").map_err(file_error("write", log))?;
    let errors = file.try_clone().map_err(file_error("open", log))?;
    let program = command.get_program().to_owned();
    command.stdin(Stdio::null()).stdout(file).stderr(errors).process_group(0);
    let child =
        command.spawn().map_err(|error| QueueError::Start(format!("{}: {error}", Path::new(&program).display())))?;
    let pid = child.id();
    // The child is not waited for yet, so its number is its own.
    let started = stat(pid).map_or(0, |stat| stat.starttime);
    Ok(Some((child, Process { pid, started })))
}

fn stat(pid: u32) -> Option<Stat> {
    procfs::process::Process::new(i32::try_from(pid).ok()?).ok()?.stat().ok()
}

/// Finds the process that was started with `run_file` among its arguments.
pub fn find(run_file: &Path) -> Option<Process> {
    let wanted = run_file.as_os_str().as_encoded_bytes();
    let entries = std::fs::read_dir("/proc").ok()?.flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let is_it = |pid: &u32| {
        let arguments = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        arguments.split(|byte| *byte == 0).any(|argument| argument == wanted)
    };
    let process = |pid: u32| Some(Process { pid, started: stat(pid)?.starttime });
    // The one with the lowest number was there first.
    numbers.filter(is_it).filter_map(process).min_by_key(|process| (process.started, process.pid))
}

/// Asks a process to stop, by SIGTERM. False if there is no such process any more.
///
/// # Errors
///
/// The process is another user's.
pub fn interrupt(process: Process) -> Result<bool, QueueError> {
    let is_same = stat(process.pid).is_some_and(|stat| stat.starttime == process.started && stat.state != 'Z');
    let Some(pid) = i32::try_from(process.pid).ok().and_then(Pid::from_raw).filter(|_| is_same) else {
        return Ok(false);
    };
    match kill_process(pid, Signal::TERM) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::SRCH) => Ok(false),
        Err(error) => Err(QueueError::Refused(format!("cannot signal process {}: {error}", process.pid))),
    }
}

/// Ticks of processor time that the processes of these groups have used.
pub fn ticks_of(groups: &[u32]) -> u64 {
    let processes = procfs::process::all_processes().into_iter().flatten().flatten();
    let stats = processes.filter_map(|process| process.stat().ok());
    let ours = stats.filter(|stat| u32::try_from(stat.pgrp).is_ok_and(|group| groups.contains(&group)));
    // The last two are those of children that were waited for.
    ours.map(|stat| stat.utime + stat.stime + (stat.cutime + stat.cstime).max(0) as u64).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    /// The lock tells of the process, also where nobody has waited for it and where its child lives
    /// on.
    #[test]
    fn a_locked_log_is_a_living_process() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        assert!(!is_alive(&log).unwrap());
        let (mut child, process) = start(shell("echo begun; exec sleep 600"), &log, "--- start").unwrap().unwrap();
        assert!(is_alive(&log).unwrap());
        assert!(start(shell("true"), &log, "--- twice").unwrap().is_none(), "a second one is not started");
        assert!(!interrupt(Process { started: process.started + 1, ..process }).unwrap(), "another process");
        assert!(interrupt(process).unwrap());
        while is_alive(&log).unwrap() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        // It is a zombie until it is waited for, and no process to be asked.
        assert!(!interrupt(process).unwrap());
        assert!(!child.wait().unwrap().success());
        let text = std::fs::read_to_string(&log).unwrap();
        assert!(text.starts_with("--- start\n") && !text.contains("twice"), "{text}");
    }

    #[test]
    fn a_process_is_found_by_its_argument() {
        let folder = tempfile::tempdir().unwrap();
        let (log, file) = (folder.path().join("log"), folder.path().join("run"));
        assert_eq!(find(&file), None);
        let mut command = shell("while :; do sleep 1; done");
        command.arg(&file);
        let (mut child, process) = start(command, &log, "").unwrap().unwrap();
        // Between fork and exec it has the arguments of this test.
        while find(&file).is_none() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        assert_eq!(find(&file), Some(process));
        assert!(ticks_of(&[process.pid]) < 100);
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_program_that_is_not_there_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let error = start(Command::new("/gone/trainyard"), &folder.path().join("log"), "").unwrap_err().to_string();
        assert!(error.contains("cannot start /gone/trainyard: "), "{error}");
    }
}
