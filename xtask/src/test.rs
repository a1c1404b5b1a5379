//! `cargo xtask test`: everything that must hold, in one command.
//!
//! The order is by cost: a forgotten module essay is said in a second and not after the tests. A
//! failed check does not stop the later ones, so that one run shows everything. The commands of the
//! documentation are among the tests (`crates/cli/tests/docs.rs`).
//!
//! Output streams through while the `test result:` lines are read from it; their sums stand alone
//! on the last line. A run in which no test ran has failed, whatever cargo said: that is how a
//! broken test setup looks.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result};

use trainyard_cuda::stand_in::StandIn;

use crate::{gpu, tidy};

/// What the `test result:` lines said, summed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    passed: usize,
    failed: usize,
}

impl Counts {
    /// Adds what `line` says, if it is a result line:
    /// `test result: ok. 3 passed; 1 failed; 0 ignored; ...`
    fn read(&mut self, line: &str) {
        let Some((_, figures)) = line.split_once("test result:") else { return };
        for part in figures.split([';', '.']) {
            if let Some((count, what)) = part.trim().split_once(' ')
                && let Ok(count) = count.parse::<usize>()
            {
                match what {
                    "passed" => self.passed += count,
                    "failed" => self.failed += count,
                    _ => {}
                }
            }
        }
    }
}

/// Runs every check; whether all of them passed.
pub fn run(root: &Path) -> Result<bool> {
    let mut failures: Vec<&str> = Vec::new();
    let mut checked = |name: &'static str, check: &mut dyn FnMut() -> Result<bool>| -> Result<()> {
        println!("\n== {name}");
        let start = Instant::now();
        if !check()? {
            failures.push(name);
        }
        println!("== {name}: {:.0} s", start.elapsed().as_secs_f64());
        Ok(())
    };

    checked("tidy", &mut || tidy::run(root))?;
    checked("rustfmt", &mut || optional(root, "fmt", &["--all", "--check"]))?;
    checked("clippy", &mut || {
        optional(root, "clippy", &["--workspace", "--all-targets", "--locked", "--quiet", "--", "-D", "warnings"])
    })?;
    checked("fuzz targets", &mut || fuzz_targets_compile(root))?;
    checked("kernels of GPUs", &mut || gpu::compiles(root))?;
    install_cpp_compiler();
    let mut counts = Counts::default();
    checked("tests", &mut || {
        let (success, read) = count_tests(
            &mut cargo(root, "test", &["--workspace", "--locked", "--no-fail-fast"]),
            &mut std::io::stdout(),
        )?;
        counts = read;
        if counts.passed + counts.failed == 0 {
            println!("no test ran");
        }
        Ok(success && counts.failed == 0 && counts.passed > 0)
    })?;

    checked("kernels of GPUs, as NVIDIA's driver runs them", &mut || {
        let folder = root.join("target/stand-in");
        let stand_in = StandIn::new(&folder).map_err(anyhow::Error::msg)?;
        let mut tests = cargo(root, "test", &["--workspace", "--locked", "--no-fail-fast", "--test", "kernels"]);
        tests.envs(stand_in.variables(&folder)).env("TRAINYARD_TEST_DEVICE", "cuda");
        let (success, read) = count_tests(&mut tests, &mut std::io::stdout())?;
        counts.passed += read.passed;
        counts.failed += read.failed;
        Ok(success && read.failed == 0 && read.passed > 0)
    })?;

    checked("mpi", &mut || {
        let Some(missing) = missing_for_mpi() else {
            let own = ["--package", "trainyard-comm", "--features", "mpi"];
            // Of the program, what runs under mpirun.
            let program = ["--package", "trainyard", "--features", "mpi", "--test", "mpi", "--test", "mpi_faults"];
            let mut passed = true;
            for tests in [&own[..], &program] {
                let arguments = [tests, &["--locked", "--no-fail-fast"]].concat();
                let (success, read) = count_tests(&mut cargo(root, "test", &arguments), &mut std::io::stdout())?;
                counts.passed += read.passed;
                counts.failed += read.failed;
                passed &= success && read.failed == 0 && read.passed > 0;
            }
            return Ok(passed);
        };
        println!("skipped: no MPI, as {missing} (on Debian: apt-get install libopenmpi-dev openmpi-bin libclang-dev)");
        Ok(true)
    })?;

    println!();
    if !failures.is_empty() {
        println!("failed: {}", failures.join(", "));
    }
    println!("{} passed, {} failed", counts.passed, counts.failed);
    Ok(failures.is_empty())
}

/// The fuzz targets are a workspace of their own, which nothing else compiles; stable Rust checks
/// them, and only running them needs nightly.
fn fuzz_targets_compile(root: &Path) -> Result<bool> {
    let manifest = ["--manifest-path", "fuzz/Cargo.toml", "--target-dir", "target", "--locked", "--quiet"];
    let status = cargo(root, "check", &manifest).status().context("cannot run cargo check")?;
    Ok(status.success())
}

/// Whether installing what tests need is ours to do: as root in continuous integration.
fn may_install() -> bool {
    std::env::var_os("CI").is_some() && runs("id", &["-u"]).as_deref() == Some("0")
}

/// The kernels of GPUs are tested by the host's C++ compiler; where there is none and this fails,
/// their tests say so.
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

/// What keeps the feature `mpi` from being tested here, after an attempt to install it where that
/// is ours to do.
fn missing_for_mpi() -> Option<&'static str> {
    if lacks_for_mpi().is_some() && may_install() {
        let packages = ["install", "-y", "-q", "libopenmpi-dev", "openmpi-bin", "libclang-dev"];
        // Where this fails, what is missing says so.
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

/// What a program says, if it exists and succeeds.
fn runs(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn cargo(root: &Path, subcommand: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.arg(subcommand).args(arguments).current_dir(root);
    command
}

/// Runs a cargo subcommand that not every installation has; says so and passes where it is missing.
fn optional(root: &Path, subcommand: &str, arguments: &[&str]) -> Result<bool> {
    let probe = cargo(root, subcommand, &["--version"]).stdout(Stdio::null()).stderr(Stdio::null()).status();
    if !probe.is_ok_and(|status| status.success()) {
        println!("skipped: `cargo {subcommand}` is not installed (rustup component add rustfmt clippy)");
        return Ok(true);
    }
    let status =
        cargo(root, subcommand, arguments).status().with_context(|| format!("cannot run cargo {subcommand}"))?;
    Ok(status.success())
}

/// Runs `command` with its output passed to `out`; whether it succeeded, and the sums of its result
/// lines.
fn count_tests(command: &mut Command, out: &mut dyn Write) -> Result<(bool, Counts)> {
    let mut child = command.stdout(Stdio::piped()).spawn().context("cannot run cargo test")?;
    let mut counts = Counts::default();
    let mut reader = BufReader::new(child.stdout.take().expect("piped above"));
    let mut line = Vec::new();
    // Bytes rather than `lines()`: a test may print what is not UTF-8, and its results still count.
    while reader.read_until(b'\n', &mut line)? > 0 {
        out.write_all(&line)?;
        out.flush()?;
        counts.read(&String::from_utf8_lossy(&line));
        line.clear();
    }
    Ok((child.wait()?.success(), counts))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn result_lines_are_summed() {
        let mut counts = Counts::default();
        for line in [
            "running 4 tests",
            "test a ... ok",
            "test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 7 filtered out; finished in 0.52s",
            "\u{1b}[1mtest result: \u{1b}[31mFAILED\u{1b}[0m. 12 passed; 2 failed; 0 ignored; 0 measured",
            "I said: 5 passed; 5 failed",
        ] {
            counts.read(line);
        }
        assert_eq!(counts, Counts { passed: 15, failed: 2 });
    }

    #[test]
    fn output_that_is_not_utf8_does_not_hide_results() {
        let script = r"printf 'a\377b\ntest result: ok. 2 passed; 0 failed;\n'; exit 1";
        let mut out = Vec::new();
        let (success, counts) = count_tests(Command::new("sh").args(["-c", script]), &mut out).unwrap();
        assert!(out.starts_with(b"a\xffb\n"), "passed through as it is");
        assert_eq!((success, counts), (false, Counts { passed: 2, failed: 0 }));
    }
}
