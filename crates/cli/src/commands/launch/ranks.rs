//! The rank processes of a host: start, output, signals and end.
//!
//! - **Output.** Rank 0 writes to the terminal directly, so its progress is readable. Lines of
//!   other ranks go to standard error, each after `[rank R]`.
//! - **Signals.** Ranks are in process groups of their own, so that a key on the terminal reaches
//!   only this process. It passes each SIGINT and SIGTERM on once.
//! - **Parent.** Ranks end with this process, however it ends. An orphaned run would hold the lock
//!   and block its successor.
//! - **Ends.** Ranks tell each other of failures and end by themselves. A rank that has not ended
//!   [`GRACE`] after the first bad end is stopped or stuck, and is killed.

use crate::commands::supervise::{EXIT_FAULT, EXIT_INTERRUPTED, EXIT_PANIC, send};
use crate::output::note;
use anyhow::{Context, Result};
use signal_hook::consts::{SIGINT, SIGTERM};
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read, Write};
use std::ops::Range;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use trainyard_comm::{Environment, Signal, end_with_parent};

/// Time limit for ranks to end after one has ended badly. They end their own stuck threads after 5
/// s, and write reports.
const GRACE: Duration = Duration::from_secs(8);
/// Interval of the checks for ended ranks and signals.
const LOOK: Duration = Duration::from_millis(20);

/// SIGINT and SIGTERM, counted.
pub struct Signals(signal_hook::iterator::Signals);

impl Signals {
    /// Handles the signals from now on.
    pub fn new() -> Result<Signals> {
        signal_hook::iterator::Signals::new([SIGINT, SIGTERM]).map(Signals).context("signal handling")
    }

    /// Those that have come since the last call.
    pub fn pending(&mut self) -> impl Iterator<Item = i32> {
        self.0.pending()
    }
}

struct Rank {
    number: u32,
    child: Child,
    /// Threads that relay the rank's output.
    relays: Vec<JoinHandle<()>>,
    status: Option<ExitStatus>,
    /// True if this process killed the rank.
    was_killed: bool,
}

/// Ranks of this host. Dropping it kills running ranks.
pub struct Ranks {
    ranks: Vec<Rank>,
    /// When the first of them ended badly.
    failed: Option<Instant>,
}

/// A request to start ranks.
pub struct Start<'a> {
    pub program: &'a Path,
    pub arguments: &'a [OsString],
    /// The ranks of this host.
    pub numbers: Range<u32>,
    /// The environment variables of each.
    pub variables: &'a dyn Fn(u32) -> Vec<(&'static str, String)>,
    /// A variable of this process that they do not inherit.
    pub without: Option<&'static str>,
}

impl Ranks {
    /// Starts the ranks.
    pub fn start(start: Start<'_>) -> Result<Ranks> {
        let Start { program, arguments, numbers, variables, without } = start;
        let mut ranks = Ranks { ranks: Vec::new(), failed: None };
        for number in numbers {
            let mut command = Command::new(program);
            command.args(arguments).stdin(Stdio::null()).process_group(0);
            // This process's own place in a Slurm step does not apply to its ranks.
            for name in without.into_iter().chain(Environment::variables()) {
                command.env_remove(name);
            }
            command.envs(variables(number));
            if number > 0 {
                command.stdout(Stdio::piped()).stderr(Stdio::piped());
            }
            end_with_parent(&mut command, Signal::KILL);
            let mut child = command.spawn().with_context(|| format!("cannot start rank {number}"))?;
            let relays =
                [child.stdout.take().map(|out| relay(number, out)), child.stderr.take().map(|err| relay(number, err))];
            let relays = relays.into_iter().flatten().collect();
            ranks.ranks.push(Rank { number, child, relays, status: None, was_killed: false });
        }
        Ok(ranks)
    }

    /// Waits until all ranks have ended. Returns their common exit code.
    pub fn wait(mut self, mut signals: Signals) -> Result<ExitCode> {
        loop {
            for signal in signals.pending() {
                self.signal(signal)?;
            }
            if let Some(code) = self.poll()? {
                return Ok(ExitCode::from(code));
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Looks after the ranks once. Returns their common exit code if all of them have ended.
    pub fn poll(&mut self) -> Result<Option<u8>> {
        for (number, pid, status) in self.newly_ended()? {
            // A rank, on this host or another one, may have received a signal itself.
            let is_asked_for = status.code() == Some(EXIT_INTERRUPTED.into());
            if self.failed.is_none() && !status.success() && !is_asked_for {
                self.failed = Some(Instant::now());
                note(&format!("launch: rank {number} (process {pid}) ended with {status}"));
            }
        }
        if self.running().next().is_some() {
            let left: Vec<String> =
                self.running().filter(|rank| !rank.was_killed).map(|rank| rank.number.to_string()).collect();
            if !left.is_empty() && self.failed.is_some_and(|since| since.elapsed() > GRACE) {
                note(&format!(
                    "launch: still running {} s after that, and killed: rank {}",
                    GRACE.as_secs(),
                    left.join(", ")
                ));
                self.kill()?;
            }
            return Ok(None);
        }
        for rank in &mut self.ranks {
            // A relay that panicked has printed its own message.
            rank.relays.drain(..).for_each(|relay| drop(relay.join()));
        }
        let ended = self.ranks.iter().filter_map(|rank| Some((rank.number, rank.status?, rank.was_killed)));
        let ended: Vec<_> = ended.collect();
        if self.failed.is_some() {
            note(&format!("launch: {}", summary(&ended)));
        }
        let own: Vec<ExitStatus> = ended.iter().filter(|(.., killed)| !killed).map(|(_, status, _)| *status).collect();
        Ok(Some(exit_code(&own)))
    }

    fn running(&self) -> impl Iterator<Item = &Rank> {
        self.ranks.iter().filter(|rank| rank.status.is_none())
    }

    /// The ranks that have ended since the last check. Ranks ended by a signal come first, as they
    /// are the cause of the others' ends.
    fn newly_ended(&mut self) -> Result<Vec<(u32, u32, ExitStatus)>> {
        let mut ended = Vec::new();
        for rank in self.ranks.iter_mut().filter(|rank| rank.status.is_none()) {
            rank.status = rank.child.try_wait().context("waiting for the ranks")?;
            ended.extend(rank.status.map(|status| (rank.number, rank.child.id(), status)));
        }
        ended.sort_by_key(|(_, _, status)| status.code().is_some());
        Ok(ended)
    }

    /// Passes a signal on. After a failure it kills the ranks that are left, because they have
    /// nothing to save.
    pub fn signal(&mut self, signal: i32) -> Result<()> {
        if self.failed.is_some() {
            return self.kill();
        }
        let name = if signal == SIGINT { "INT" } else { "TERM" };
        self.running().try_for_each(|rank| send(&rank.child, name)).context("passing a signal on")
    }

    /// Kills the ranks that run.
    pub fn kill(&mut self) -> Result<()> {
        // What is killed on purpose is no failure to report.
        self.failed.get_or_insert_with(Instant::now);
        for rank in self.ranks.iter_mut().filter(|rank| rank.status.is_none()) {
            rank.was_killed = true;
            rank.child.kill().with_context(|| format!("killing rank {}", rank.number))?;
        }
        Ok(())
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        // Ranks still run only after an error in between; killing ended ranks does nothing.
        let _ = self.kill();
    }
}

/// Relays the lines of a rank.
fn relay(number: u32, output: impl Read + Send + 'static) -> JoinHandle<()> {
    std::thread::spawn(move || {
        let mut output = BufReader::new(output);
        let mut line = Vec::new();
        while output.read_until(b'\n', &mut line).is_ok_and(|bytes| bytes > 0) {
            let text = String::from_utf8_lossy(&line);
            // Each line is a single write, so that lines of ranks do not mix. A closed standard
            // error is no reason to stop the rank.
            let _ = std::io::stderr().write_all(format!("[rank {number}] {}\n", text.trim_end()).as_bytes());
            line.clear();
        }
    })
}

/// `rank 1: signal: 9 (SIGKILL); ranks 0, 2: exit status: 70`
fn summary(ended: &[(u32, ExitStatus, bool)]) -> String {
    let mut groups: Vec<(String, Vec<String>)> = Vec::new();
    for (number, status, was_killed) in ended {
        let how = if *was_killed { "killed by launch".to_owned() } else { status.to_string() };
        match groups.iter_mut().find(|(known, _)| *known == how) {
            Some((_, numbers)) => numbers.push(number.to_string()),
            None => groups.push((how, vec![number.to_string()])),
        }
    }
    let words = groups.iter().map(|(how, numbers)| {
        format!("rank{} {}: {how}", if numbers.len() == 1 { "" } else { "s" }, numbers.join(", "))
    });
    words.collect::<Vec<_>>().join("; ")
}

/// The common exit code of all ranks, in order of precedence: an error that would come again (which
/// keeps its code), a failed rank, a requested stop, success.
fn exit_code(ended: &[ExitStatus]) -> u8 {
    let codes: Vec<Option<i32>> = ended.iter().map(|status| status.code()).collect();
    let others = [0, i32::from(EXIT_FAULT), i32::from(EXIT_INTERRUPTED), EXIT_PANIC];
    let error = codes.iter().flatten().find(|code| !others.contains(code));
    let is_failed = |code: &Option<i32>| matches!(code, None | Some(EXIT_PANIC)) || *code == Some(EXIT_FAULT.into());
    match error {
        // The operating system's codes have eight bits.
        Some(&code) => u8::try_from(code).unwrap_or(EXIT_FAULT),
        None if codes.iter().any(is_failed) || codes.is_empty() => EXIT_FAULT,
        None if codes.contains(&Some(EXIT_INTERRUPTED.into())) => EXIT_INTERRUPTED,
        None => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;

    fn exited(code: i32) -> ExitStatus {
        ExitStatus::from_raw(code << 8)
    }

    #[test]
    fn ranks_together_end_as_their_worst() {
        let killed = ExitStatus::from_raw(9);
        for (ended, code) in [
            (vec![exited(0), exited(0)], 0),
            (vec![exited(70), killed, exited(70)], 70),
            (vec![exited(101), exited(70)], 70),
            (vec![exited(70), exited(1)], 1),
            (vec![exited(2), exited(2)], 2),
            (vec![exited(130), exited(130)], 130),
            (vec![exited(130), exited(70)], 70),
            (vec![], 70),
        ] {
            assert_eq!(exit_code(&ended), code, "{ended:?}");
        }
    }

    #[test]
    fn the_summary_names_every_rank_once() {
        let ended = [
            (0, exited(70), false),
            (1, ExitStatus::from_raw(9), false),
            (2, exited(70), false),
            (3, ExitStatus::from_raw(9), true),
        ];
        assert_eq!(
            summary(&ended),
            "ranks 0, 2: exit status: 70; rank 1: signal: 9 (SIGKILL); rank 3: killed by launch"
        );
    }
}
