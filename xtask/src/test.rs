//! `cargo xtask test`: checks everything that must hold, in one command.
//!
//! Cheap checks come first: a missing module essay is reported in a second and not after the tests.
//! A failed check does not stop the later ones, so that one run shows everything. The commands of
//! the documentation are among the tests (`crates/cli/tests/docs.rs`).
//!
//! Cargo builds every test once; then each runs in a process of its own ([`pool`]). Of long sweeps
//! over random cases a part runs, unless `--all` is given. What was left out, because of that or
//! because the machine lacks something, is named and counted ([`report`]). A run in which no test
//! ran has failed: that is how a broken test setup looks.

mod pool;
mod programs;
mod report;

use std::ffi::OsString;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use trainyard_cuda::stand_in::StandIn;

use crate::{gpu, pictures, tidy};
use pool::Test;
use report::Report;

/// Time limit of one test, without and with `--all`.
const LIMITS: [Duration; 2] = [Duration::from_secs(1200), Duration::from_secs(7200)];
/// The features of the build where there is an MPI. Without the feature the same tests compile for
/// clippy.
const MPI: [&str; 2] = ["trainyard/mpi", "trainyard-comm/mpi"];

/// Options of `cargo xtask test`.
#[derive(clap::Args)]
pub struct Options {
    /// Run long sweeps over random cases, faults and kills in full, and not a part of each.
    #[arg(long)]
    all: bool,
}

/// Result of a check.
pub enum Check {
    Passed,
    Failed,
    /// With the reason.
    Skipped(String),
}

impl From<bool> for Check {
    fn from(passed: bool) -> Check {
        if passed { Check::Passed } else { Check::Failed }
    }
}

/// Runs every check; true when all of them passed.
pub fn run(root: &Path, options: &Options) -> Result<bool> {
    let mut report = Report::default();
    check(&mut report, "tidy", |_| Ok(tidy::run(root)?.into()))?;
    check(&mut report, "rustfmt", |_| optional(root, "fmt", &["--all", "--check"]))?;
    check(&mut report, "clippy", |_| {
        optional(root, "clippy", &["--workspace", "--all-targets", "--locked", "--quiet", "--", "-D", "warnings"])
    })?;
    check(&mut report, "pictures", |_| Ok(pictures::run(root, &pictures::Options { check: true })?.into()))?;
    check(&mut report, "fuzz targets", |_| fuzz_targets_compile(root))?;
    check(&mut report, "kernels of GPUs", |_| gpu::compiles(root, options.all))?;
    install_cpp_compiler();
    let mpi = missing_for_mpi();
    if let Some(missing) = mpi {
        let packages = "on Debian: apt-get install libopenmpi-dev openmpi-bin libclang-dev";
        report.skipped.push(("tests under mpirun".to_owned(), format!("no MPI, as {missing} ({packages})")));
    }
    let features: &[&str] = if mpi.is_none() { &MPI } else { &[] };
    let mut programs = None;
    check(&mut report, "build of the tests", |_| {
        programs = programs::build(&mut cargo(root, "test", &[]), features)?;
        Ok(programs.is_some().into())
    })?;
    if let Some(programs) = &programs {
        check(&mut report, "tests", |report| run_tests(root, programs, options.all, report))?;
    }
    check(&mut report, "tests of the documentation", |report| documentation(root, features, report))?;
    println!("\n{}", report.text());
    Ok(report.failures.is_empty())
}

/// Runs one check, with its name and its time around it, and notes in `report` how it ended.
fn check(report: &mut Report, name: &str, run: impl FnOnce(&mut Report) -> Result<Check>) -> Result<()> {
    println!("\n== {name}");
    let start = Instant::now();
    let outcome = run(report).unwrap_or_else(|error| {
        println!("error: {error:#}");
        Check::Failed
    });
    match outcome {
        Check::Passed => {}
        Check::Failed => report.failures.push(name.to_owned()),
        Check::Skipped(reason) => {
            println!("skipped: {reason}");
            report.skipped.push((name.to_owned(), reason));
        }
    }
    println!("== {name}: {:.0} s", start.elapsed().as_secs_f64());
    Ok(())
}

/// Runs every test of `programs`, and those of the kernels once more as NVIDIA's driver runs them,
/// over a stand-in for it.
fn run_tests(root: &Path, programs: &[programs::Program], all: bool, report: &mut Report) -> Result<Check> {
    let folder = root.join("target/stand-in");
    let stand_in = StandIn::new(&folder).map_err(anyhow::Error::msg)?;
    let mut as_driver: Vec<(String, OsString)> =
        stand_in.variables(&folder).into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    as_driver.push((trainyard_cuda::tested::VARIABLE.to_owned(), "cuda".into()));
    let mut full = Vec::new();
    if all {
        full.push((trainyard_testing::ALL.to_owned(), "1".into()));
    }
    as_driver.extend(full.clone());
    let mut tests = Vec::new();
    for program in programs {
        for name in program.tests()? {
            if program.name.ends_with("--test kernels") {
                let (name, variant) = (name.clone(), "as NVIDIA's driver runs them");
                tests.push(Test { program, name, variant: Some(variant), variables: &as_driver });
            }
            tests.push(Test { program, name, variant: None, variables: &full });
        }
    }
    let records = root.join("target/test");
    let durations = records.join("durations.json");
    let limit = LIMITS[usize::from(all)];
    let outcomes = pool::run(tests, &records.join("output"), &report::durations(&durations), limit)?;
    report::record(&durations, &outcomes)?;
    report.outcomes = outcomes;
    let [passed, failed, _] = report.counts();
    if passed + failed == 0 {
        println!("no test ran");
    }
    Ok((failed == 0 && passed > 0).into())
}

/// The examples in the documentation of the crates.
fn documentation(root: &Path, features: &[&str], report: &mut Report) -> Result<Check> {
    let mut command = cargo(root, "test", &["--workspace", "--locked", "--doc", "--no-fail-fast", "--quiet"]);
    if !features.is_empty() {
        command.arg("--features").arg(features.join(","));
    }
    let output = command.output().context("cannot run cargo test --doc")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    report.documentation = sums(&text);
    if !output.status.success() {
        println!("{text}\n{}", String::from_utf8_lossy(&output.stderr));
    }
    Ok((output.status.success() && report.documentation[1] == 0).into())
}

/// Numbers of passed and failed tests, from the result lines in `output`:
/// `test result: ok. 3 passed; 1 failed; 0 ignored; ...`
fn sums(output: &str) -> [usize; 2] {
    let figures = output.lines().filter_map(|line| line.split_once("test result:")).map(|(_, figures)| figures);
    let mut sums = [0; 2];
    for (count, word) in figures.flat_map(|line| line.split([';', '.'])).filter_map(|part| part.trim().split_once(' '))
    {
        let place = ["passed", "failed"].iter().position(|name| *name == word);
        if let (Some(place), Ok(count)) = (place, count.parse::<usize>()) {
            sums[place] += count;
        }
    }
    sums
}

/// The fuzz targets are a workspace of their own, which nothing else compiles; stable Rust checks
/// them, and only running them needs nightly.
fn fuzz_targets_compile(root: &Path) -> Result<Check> {
    let manifest = ["--manifest-path", "fuzz/Cargo.toml", "--target-dir", "target", "--locked", "--quiet"];
    let status = cargo(root, "check", &manifest).status().context("cannot run cargo check")?;
    Ok(status.success().into())
}

/// True if this command may install what tests need: as root in continuous integration.
fn may_install() -> bool {
    std::env::var_os("CI").is_some() && runs("id", &["-u"]).as_deref() == Some("0")
}

/// Installs a C++ compiler, which the tests of GPU kernels use. If this fails, those tests report
/// it.
fn install_cpp_compiler() {
    let given = std::env::var("CXX").ok();
    let none = given
        .iter()
        .map(String::as_str)
        .chain(["c++", "g++", "clang++"])
        .all(|name| runs(name, &["--version"]).is_none());
    if none && may_install() {
        let _ = runs("apt-get", &["update", "-q"]).and_then(|_| runs("apt-get", &["install", "-y", "-q", "g++"]));
    }
}

/// The obstacle to testing the feature `mpi` here, after an attempt to install it if that is
/// allowed.
fn missing_for_mpi() -> Option<&'static str> {
    if lacks_for_mpi().is_some() && may_install() {
        let packages = ["install", "-y", "-q", "libopenmpi-dev", "openmpi-bin", "libclang-dev"];
        // If this fails, the check below reports what is missing.
        let _ = runs("apt-get", &["update", "-q"]).and_then(|_| runs("apt-get", &packages));
    }
    lacks_for_mpi()
}

fn lacks_for_mpi() -> Option<&'static str> {
    let libclang = || {
        let folders = ["/usr/lib", "/usr/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu"];
        let versioned = (10..30).map(|version| format!("/usr/lib/llvm-{version}/lib"));
        let given = std::env::var("LIBCLANG_PATH").ok();
        folders.map(str::to_owned).into_iter().chain(versioned).chain(given).any(|folder| {
            let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
            entries.into_iter().any(|entry| entry.file_name().to_string_lossy().starts_with("libclang"))
        })
    };
    if runs("mpicc", &["--version"]).is_none() {
        return Some("there is no mpicc");
    }
    // The tests start themselves with flags of Open MPI.
    if !runs("mpirun", &["--version"]).is_some_and(|said| said.contains("Open MPI")) {
        return Some("there is no mpirun of Open MPI");
    }
    if libclang() { None } else { Some("there is no libclang") }
}

/// The output of a program, if it exists and succeeds.
fn runs(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn cargo(root: &Path, subcommand: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.arg(subcommand).args(arguments).current_dir(root);
    command
}

/// Runs a cargo subcommand that not every installation has.
fn optional(root: &Path, subcommand: &str, arguments: &[&str]) -> Result<Check> {
    let probe = cargo(root, subcommand, &["--version"]).stdout(Stdio::null()).stderr(Stdio::null()).status();
    if !probe.is_ok_and(|status| status.success()) {
        let reason = format!("`cargo {subcommand}` is not installed (rustup component add rustfmt clippy)");
        return Ok(Check::Skipped(reason));
    }
    let status =
        cargo(root, subcommand, arguments).status().with_context(|| format!("cannot run cargo {subcommand}"))?;
    Ok(status.success().into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn result_lines_are_summed() {
        let output = "running 4 tests\ntest a ... ok\n\
             test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 7 filtered out; finished in 0.52s\n\
             \u{1b}[1mtest result: \u{1b}[31mFAILED\u{1b}[0m. 12 passed; 2 failed; 0 ignored; 0 measured\n\
             I said: 5 passed; 5 failed\n";
        assert_eq!(sums(output), [15, 2]);
    }

    #[test]
    fn a_check_that_cannot_run_is_skipped_and_one_that_fails_is_named() {
        let mut report = Report::default();
        check(&mut report, "a", |_| Ok(Check::Skipped("no NVRTC".to_owned()))).unwrap();
        check(&mut report, "b", |_| Ok(false.into())).unwrap();
        check(&mut report, "c", |_| Ok(true.into())).unwrap();
        assert_eq!(report.skipped, [("a".to_owned(), "no NVRTC".to_owned())]);
        assert_eq!(report.failures, ["b"]);
        assert!(report.text().ends_with("failed: b\n0 passed, 0 failed, 1 skipped"), "{}", report.text());
    }

    /// Every package of a build with its features.
    fn packages(arguments: &[&str]) -> BTreeSet<String> {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut command = Command::new(cargo);
        command.args(["tree", "--offline", "--locked", "--prefix", "none", "--format", "{p} {f}"]).args(arguments);
        let output = command.current_dir(crate::workspace_root()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8(output.stdout).unwrap();
        text.lines().map(|line| line.trim_end_matches(" (*)").to_owned()).collect()
    }

    /// `cargo xtask test` builds itself, then the tests. Where a package has other features in the
    /// second build, it and all that uses it are compiled twice, which takes minutes.
    #[test]
    fn what_xtask_and_the_tests_both_need_is_compiled_once() {
        let own = packages(&["--package", "xtask", "--edges", "normal,build"]);
        let features = MPI.join(",");
        let tests = packages(&["--workspace", "--features", &features, "--edges", "normal,build,dev"]);
        let other: Vec<&String> = own.difference(&tests).collect();
        assert!(other.is_empty(), "give them the features of the tests' build in xtask/Cargo.toml: {other:?}");
        assert!(own.len() > 50, "{}", own.len());
    }
}
