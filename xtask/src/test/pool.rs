//! Tests run side by side, each in a process of its own.
//!
//! As many run at once as there are processors, the longest first, by the times of earlier runs.
//! A process for each test gives its time, its whole output and its lines about what it left out,
//! and keeps tests of different programs from waiting for each other. A test that hangs is ended
//! and has failed.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use trainyard_testing::{IN_PART, REDUCED, SKIPPED};

use super::programs::Program;

/// Begins the reason for which a test is ignored that is a part of others, which start it.
const PART_OF_OTHERS: &str = "started by";
/// The seconds that are assumed of a test that never ran.
const UNKNOWN_S: f64 = 1.0;

/// One test to run.
#[derive(Clone, Debug)]
pub struct Test<'a> {
    pub program: &'a Program,
    pub name: String,
    /// The words that tell this run of a test from its plain one.
    pub variant: Option<&'a str>,
    /// More of the environment.
    pub variables: &'a [(String, OsString)],
}

impl Test<'_> {
    /// The options and the name with which `cargo test` runs it alone.
    pub fn id(&self) -> String {
        let variant = self.variant.map(|words| format!(" ({words})"));
        format!("{} {}{}", self.program.name, self.name, variant.unwrap_or_default())
    }
}

/// Result of a test.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    Passed,
    /// With its reason.
    Skipped(String),
    /// With what is wrong besides what its output says.
    Failed(String),
    /// It is no test, but a part that tests start.
    PartOfOthers,
}

/// Record of a test that ran.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub id: String,
    pub end: End,
    pub seconds: f64,
    /// Parts that the test left out, by the lines it printed.
    pub in_part: Vec<String>,
    /// Sweeps that ran only a part of their cases, by the lines it printed.
    pub reduced: Vec<String>,
}

/// Runs `tests` with their output in files below `folder`. Failed ones are printed at once, as a
/// whole, and the others' number now and then. `seconds` are the times of earlier runs.
pub fn run(
    mut tests: Vec<Test<'_>>,
    folder: &Path,
    seconds: &BTreeMap<String, f64>,
    limit: Duration,
) -> Result<Vec<Outcome>> {
    // What earlier runs left is nobody's; it may not be there.
    let _ = fs::remove_dir_all(folder);
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let earlier = |test: &Test<'_>| seconds.get(&test.id()).copied().unwrap_or(UNKNOWN_S);
    tests.sort_by(|a, b| earlier(b).total_cmp(&earlier(a)));
    let (next, start) = (AtomicUsize::new(0), Instant::now());
    let outcomes: Mutex<Vec<Outcome>> = Mutex::new(Vec::with_capacity(tests.len()));
    let work = || -> Result<()> {
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let Some(test) = tests.get(number) else { return Ok(()) };
            let (outcome, output) = run_one(test, &folder.join(number.to_string()), limit)?;
            let mut outcomes = outcomes.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            if let End::Failed(why) = &outcome.end {
                println!("\n---- failed: {} ({why})\n{}\n----", outcome.id, output.trim());
            }
            outcomes.push(outcome);
            if outcomes.len() * 10 / tests.len() > (outcomes.len() - 1) * 10 / tests.len() {
                println!("{} of {} tests, {:.0} s", outcomes.len(), tests.len(), start.elapsed().as_secs_f64());
            }
        }
    };
    let slots = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let slots: Vec<_> = (0..slots).map(|_| scope.spawn(work)).collect();
        slots.into_iter().try_for_each(|slot| slot.join().expect("a slot does not panic"))
    })?;
    Ok(outcomes.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()))
}

/// Runs a test to its end or its limit; with what it printed, which goes through a file, because
/// processes that it leaves behind may hold a pipe open.
fn run_one(test: &Test<'_>, file: &Path, limit: Duration) -> Result<(Outcome, String)> {
    let out = File::create(file).with_context(|| format!("cannot write {}", file.display()))?;
    let mut command = Command::new(&test.program.path);
    command.args([&test.name, "--exact", "--nocapture"]).current_dir(&test.program.folder);
    command.env("CARGO_MANIFEST_DIR", &test.program.folder).stdin(Stdio::null());
    command.envs(test.variables.iter().map(|(name, value)| (name, value)));
    command.stderr(out.try_clone()?).stdout(out);
    // A group of its own, so that what a test has started ends with it.
    command.process_group(0);
    let start = Instant::now();
    let child = command.spawn().with_context(|| format!("cannot run {}", test.program.path.display()))?;
    let status = wait(child, start + limit)?;
    let seconds = start.elapsed().as_secs_f64();
    let bytes = fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
    // What passed is not looked at again.
    fs::remove_file(file).with_context(|| format!("cannot remove {}", file.display()))?;
    let output = String::from_utf8_lossy(&bytes).into_owned();
    let lines = |marker: &str| output.lines().filter_map(|line| line.strip_prefix(marker)).map(str::to_owned).collect();
    let end = match status {
        None => End::Failed(format!("not done after {:.0} s", limit.as_secs_f64())),
        Some(status) => end(status, &output),
    };
    Ok((Outcome { id: test.id(), end, seconds, in_part: lines(IN_PART), reduced: lines(REDUCED) }, output))
}

/// The exit status; None for a process that had to be ended.
fn wait(mut child: std::process::Child, until: Instant) -> Result<Option<ExitStatus>> {
    let mut pause = Duration::from_millis(1);
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= until {
            let group = format!("-{}", child.id());
            let _ = Command::new("kill").args(["-KILL", "--", &group]).status();
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(16));
    }
}

/// Result of a test, from its exit status and output. A test that ends its process early has not
/// passed, whatever the exit status, because its output has no result line.
fn end(status: ExitStatus, output: &str) -> End {
    if !status.success() {
        return End::Failed(status.to_string());
    }
    // Another program's results may stand in the output of a test; its own are last.
    let Some((_, figures)) = output.rsplit_once("test result: ok. ") else {
        return End::Failed("it ended without a result".to_owned());
    };
    let ignored = output.lines().find_map(|line| line.rsplit_once(" ... ignored").map(|(_, reason)| reason));
    if figures.starts_with("0 passed") {
        let reason = ignored.map(|reason| reason.trim_start_matches([',', ' ']));
        return match reason {
            None => End::Failed("there is no such test".to_owned()),
            Some(reason) if reason.starts_with(PART_OF_OTHERS) => End::PartOfOthers,
            Some("") => End::Skipped("ignored, without a reason".to_owned()),
            Some(reason) => End::Skipped(reason.to_owned()),
        };
    }
    match output.lines().find_map(|line| line.strip_prefix(SKIPPED)) {
        Some(reason) => End::Skipped(reason.to_owned()),
        None => End::Passed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;

    /// A program that prints `text` and exits with `code`, whatever its arguments.
    fn program(folder: &Path, name: &str, text: &str, code: i32) -> Program {
        use std::os::unix::fs::PermissionsExt;
        let path = folder.join(name);
        fs::write(&path, format!("#!/bin/sh\ncat <<'END'\n{text}\nEND\nexit {code}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        Program { name: name.to_owned(), path, folder: folder.to_owned() }
    }

    fn ended(output: &str) -> End {
        end(ExitStatus::from_raw(0), output)
    }

    #[test]
    fn a_test_that_tested_nothing_is_skipped_and_not_passed() {
        let passed = "running 1 test\ntest a ... ok\n\ntest result: ok. 1 passed; 0 failed; 0 ignored\n";
        assert_eq!(ended(passed), End::Passed);
        assert_eq!(ended(&format!("test skipped: no GPU\n{passed}")), End::Skipped("no GPU".into()));
        let ignored = "test a ... ignored, needs the feature mpi\n\ntest result: ok. 0 passed; 0 failed; 1 ignored\n";
        assert_eq!(ended(ignored), End::Skipped("needs the feature mpi".into()));
        assert_eq!(ended(&ignored.replace("needs the feature mpi", "started by other tests")), End::PartOfOthers);
    }

    #[test]
    fn a_test_that_ends_its_process_or_does_not_exist_has_failed() {
        assert!(matches!(ended("running 1 test\n"), End::Failed(_)));
        assert!(matches!(ended("test result: ok. 0 passed; 0 failed; 0 ignored; 7 filtered out"), End::Failed(_)));
        let killed = end(ExitStatus::from_raw(9), "test result: ok. 1 passed; 0 failed; 0 ignored");
        assert!(matches!(&killed, End::Failed(why) if why.contains("signal")), "{killed:?}");
    }

    #[test]
    fn every_test_runs_once_and_tells_what_it_left_out() {
        let folder = tempfile::tempdir().unwrap();
        let ok = "test result: ok. 1 passed; 0 failed; 0 ignored";
        let said = format!("{REDUCED}2 of 9 seeds\n{IN_PART}no ::1\n{ok}");
        let programs = [program(folder.path(), "a", &said, 0), program(folder.path(), "b", ok, 101)];
        let test = |program| Test { program, name: "t".to_owned(), variant: None, variables: &[] };
        let tests = programs.iter().map(test).collect();
        let seconds = BTreeMap::from([("b t".to_owned(), 9.0)]);
        let mut outcomes = run(tests, &folder.path().join("out"), &seconds, Duration::from_secs(60)).unwrap();
        outcomes.sort_by(|a, b| a.id.cmp(&b.id));
        let [a, b] = &outcomes[..] else { panic!("{outcomes:?}") };
        assert_eq!(
            (&a.end, &a.reduced[..], &a.in_part[..]),
            (&End::Passed, &["2 of 9 seeds".into()][..], &["no ::1".into()][..])
        );
        assert!(matches!(b.end, End::Failed(_)) && b.id == "b t");
    }

    #[test]
    fn a_test_that_hangs_is_ended_and_has_failed() {
        let folder = tempfile::tempdir().unwrap();
        let fifo = folder.path().join("t");
        assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        let child = Command::new("cat").arg(&fifo).spawn().unwrap();
        assert_eq!(wait(child, Instant::now()).unwrap(), None);
    }
}
