//! Runs on the GPU the suites of `cargo test` that a GPU must pass.
//!
//! A suite runs in one process. Tests that fail there, or never end because the process died, run
//! once more, each in a process of its own: a wrong kernel can spoil the GPU's context for
//! everything after it.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use serde::Serialize;
use serde_json::Value;

/// The part of the chore that a suite belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Part {
    /// Kernels, operations, training.
    Conformance,
    /// Transformers, a loss curve.
    Accuracy,
    /// Measurements, run as a suite if a GPU is emulated.
    Bars,
}

impl Part {
    /// Its name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Part::Conformance => "conformance",
            Part::Accuracy => "accuracy",
            Part::Bars => "bars",
        }
    }
}

/// A test executable and a selection of its tests.
struct Suite {
    part: Part,
    about: &'static str,
    package: &'static str,
    test: &'static str,
    /// Parts of the names of the tests to run; all if empty.
    only: &'static [&'static str],
    /// Parts of the names of the tests to skip.
    skip: &'static [&'static str],
}

const CURVE: &str = "bf16_loss_curves";
const KERNELS_ARE_TIMED: &str = "kernels_are_timed";
const STEP_IS_TIMED: &str = "a_step_is_timed";

const SUITES: &[Suite] = &[
    Suite {
        part: Part::Conformance,
        about: "every kernel against the oracles in f64",
        package: "trainyard-cuda",
        test: "kernels",
        only: &[],
        // The emulation's own tests, and those of the table of kernels.
        skip: &["emulator::", "table::"],
    },
    Suite {
        part: Part::Conformance,
        about: "every operation against the CPU",
        package: "trainyard-tensor",
        test: "cuda",
        only: &[],
        skip: &[],
    },
    Suite {
        part: Part::Conformance,
        about: "training against the CPU",
        package: "trainyard-engine",
        test: "cuda",
        only: &[],
        skip: &[CURVE],
    },
    Suite {
        part: Part::Accuracy,
        about: "logits and gradients against transformers",
        package: "trainyard-model",
        test: "cuda",
        only: &[],
        skip: &[],
    },
    Suite {
        part: Part::Accuracy,
        about: "a loss curve in bf16 against the CPU's",
        package: "trainyard-engine",
        test: "cuda",
        only: &[CURVE],
        skip: &[],
    },
    Suite {
        part: Part::Bars,
        about: "the timing of kernels, on tiny sizes",
        package: "trainyard-tensor",
        test: "cuda",
        only: &[KERNELS_ARE_TIMED],
        skip: &[],
    },
    Suite {
        part: Part::Bars,
        about: "the timing of a step, on a tiny model",
        package: "trainyard-engine",
        test: "cuda",
        only: &[STEP_IS_TIMED],
        skip: &[],
    },
];

/// The program and the test executables, by name.
pub struct Executables(BTreeMap<String, PathBuf>);

/// Name of the program among the executables.
const PROGRAM: &str = "trainyard";

fn key(package: &str, test: &str) -> String {
    format!("{package}-{test}")
}

impl Executables {
    /// Takes the executables of a folder that [`pack`] has filled, else those that cargo builds.
    /// The program is built when it is asked for.
    pub fn find(root: &Path, prebuilt: Option<&Path>) -> Result<Executables> {
        let Some(folder) = prebuilt else { return Executables::build(root) };
        let folder = std::path::absolute(folder).with_context(|| format!("cannot resolve {}", folder.display()))?;
        let names = keys().into_iter().chain([PROGRAM.to_owned()]);
        let all: BTreeMap<String, PathBuf> = names.map(|name| (name.clone(), folder.join(name))).collect();
        match all.values().find(|path| !path.is_file()) {
            Some(missing) => bail!("there is no {}: fill the folder with cargo xtask gpu --pack", missing.display()),
            None => Ok(Executables(all)),
        }
    }

    fn build(root: &Path) -> Result<Executables> {
        let mut command = Command::new(cargo());
        command.args(["test", "--locked", "--no-run", "--message-format=json-render-diagnostics"]).current_dir(root);
        let packages: BTreeSet<&str> = SUITES.iter().map(|suite| suite.package).collect();
        command.args(packages.iter().flat_map(|package| ["--package", *package]));
        command.args(["--test", "kernels", "--test", "cuda"]);
        let output = command.stderr(std::process::Stdio::inherit()).output().context("cannot run cargo")?;
        if !output.status.success() {
            bail!("the suites do not compile");
        }
        let found = artifacts(&String::from_utf8_lossy(&output.stdout));
        match keys().iter().find(|key| !found.contains_key(*key)) {
            Some(missing) => bail!("cargo built no {missing}"),
            None => Ok(Executables(found)),
        }
    }

    fn of(&self, suite: &Suite) -> &Path {
        &self.0[&key(suite.package, suite.test)]
    }

    /// The program, built in release mode if it does not exist yet.
    pub fn program(&self, root: &Path) -> Result<PathBuf> {
        self.0.get(PROGRAM).map_or_else(|| crate::bench::program(root, None), |path| Ok(path.clone()))
    }
}

fn cargo() -> OsString {
    std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

fn keys() -> Vec<String> {
    let mut keys: Vec<String> = SUITES.iter().map(|suite| key(suite.package, suite.test)).collect();
    keys.sort();
    keys.dedup();
    keys
}

/// The test executables among cargo's messages. Packages are named by the folder of their manifest:
/// `crates/tensor` is `trainyard-tensor`.
fn artifacts(messages: &str) -> BTreeMap<String, PathBuf> {
    let mut all = BTreeMap::new();
    for message in messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
        let text = |pointer: &str| message.pointer(pointer).and_then(Value::as_str);
        let (Some(executable), Some(target), Some("test"), Some(manifest)) =
            (text("/executable"), text("/target/name"), text("/target/kind/0"), text("/manifest_path"))
        else {
            continue;
        };
        let folder = Path::new(manifest).parent().and_then(Path::file_name).map(|name| name.to_string_lossy());
        if let Some(folder) = folder {
            all.insert(key(&format!("trainyard-{folder}"), target), executable.into());
        }
    }
    all
}

/// Builds everything that the chore runs into `folder`, without symbols if `strip` exists.
pub fn pack(root: &Path, folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let mut all = Executables::build(root)?.0;
    all.insert(PROGRAM.to_owned(), crate::bench::program(root, None)?);
    all.insert("xtask".to_owned(), std::env::current_exe().context("this program has no path")?);
    let mut total = 0;
    for (name, path) in &all {
        let to = folder.join(name);
        std::fs::copy(path, &to).with_context(|| format!("cannot copy {} to {}", path.display(), to.display()))?;
        // Symbols are most of a file. Without the tool the file is only larger.
        Command::new("strip").arg(&to).status().ok();
        total += std::fs::metadata(&to).map_or(0, |file| file.len());
    }
    println!("{} files, {:.1} MB, in {}", all.len(), total as f64 / 1e6, folder.display());
    println!("there, in the root of the sources: {0}/xtask gpu --prebuilt {0}", folder.display());
    Ok(())
}

/// The result of a suite.
#[derive(Debug, Serialize)]
pub struct Outcome {
    about: &'static str,
    suite: String,
    passed: usize,
    seconds: f64,
    failed: Vec<Failure>,
    /// The reason why it did not run at all.
    error: Option<String>,
}

/// A test that failed.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Failure {
    test: String,
    /// True if it failed in a process of its own too.
    alone: bool,
    /// The end of its output.
    said: String,
}

impl Outcome {
    /// True if there were tests and all passed, at least in a process of their own.
    pub fn is_right(&self) -> bool {
        self.error.is_none() && self.passed > 0 && self.failed.is_empty()
    }
}

/// Runs the suites of a part on the GPU, or emulated, and prints the result of each as it ends.
pub fn run(root: &Path, executables: &Executables, part: Part, emulated: bool) -> Vec<Outcome> {
    println!("\n== {}", part.name());
    let mut outcomes = Vec::new();
    for suite in SUITES.iter().filter(|suite| suite.part == part) {
        let start = Instant::now();
        let run = Run { root, executable: executables.of(suite), suite, emulated };
        let mut outcome =
            run.all().unwrap_or_else(|error| Outcome::of(suite, Vec::new(), Some(format!("{error:#}")), 0));
        outcome.seconds = start.elapsed().as_secs_f64();
        println!("{}", outcome.line());
        outcomes.push(outcome);
    }
    outcomes
}

impl Outcome {
    fn of(suite: &Suite, failed: Vec<Failure>, error: Option<String>, passed: usize) -> Outcome {
        let name = format!("{} --test {}", suite.package, suite.test);
        Outcome { about: suite.about, suite: name, passed, seconds: 0.0, failed, error }
    }

    fn line(&self) -> String {
        let mut text =
            format!("{}: {} passed, {} failed, {:.0} s", self.about, self.passed, self.failed.len(), self.seconds);
        if let Some(error) = &self.error {
            text += &format!("\n  not run: {error}");
        }
        for failure in &self.failed {
            text += &format!("\n  FAILED {}: {}", failure.test, failure.said.replace('\n', "\n    "));
        }
        text
    }
}

struct Run<'a> {
    root: &'a Path,
    executable: &'a Path,
    suite: &'a Suite,
    emulated: bool,
}

impl Run<'_> {
    fn command(&self) -> Command {
        let mut command = Command::new(self.executable);
        let package = self.root.join("crates").join(self.suite.package.trim_start_matches("trainyard-"));
        command.env("TRAINYARD_TEST_DEVICE", if self.emulated { "emulated" } else { "cuda" });
        command.env("CARGO_MANIFEST_DIR", &package).env("RUST_BACKTRACE", "0");
        if package.is_dir() {
            command.current_dir(&package);
        }
        command
    }

    fn chosen(&self) -> Vec<&str> {
        let skips = self.suite.skip.iter().flat_map(|name| ["--skip", *name]);
        self.suite.only.iter().copied().chain(skips).collect()
    }

    fn all(&self) -> Result<Outcome> {
        let listed = self.command().args(self.chosen()).args(["--list", "--format", "terse"]).output();
        let listed = listed.with_context(|| format!("cannot run {}", self.executable.display()))?;
        let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
        let tests: Vec<&str> = listed.lines().filter_map(|line| line.strip_suffix(": test")).collect();
        if tests.is_empty() {
            bail!("it has no such tests");
        }
        let output = self.command().args(self.chosen()).output().context("cannot run it")?;
        let said_beside = String::from_utf8_lossy(&output.stdout).into_owned();
        let verdicts = verdicts(&said_beside);
        let (mut passed, mut failed) = (0, Vec::new());
        for test in tests {
            if verdicts.get(test) == Some(&true) {
                passed += 1;
                continue;
            }
            // Once more, alone.
            let output = self.command().args(["--exact", test, "--nocapture"]).output().context("cannot run it")?;
            let alone = !output.status.success();
            let said = [output.stdout, output.stderr].concat();
            let said = if alone {
                reason(&String::from_utf8_lossy(&said))
            } else {
                format!("only beside the others: {}", reason_beside(&said_beside, test))
            };
            failed.push(Failure { test: test.to_owned(), alone, said });
        }
        Ok(Outcome::of(self.suite, failed, None, passed))
    }
}

/// Reads `test NAME ... ok` and `test NAME ... FAILED`; other lines are ignored.
fn verdicts(text: &str) -> BTreeMap<String, bool> {
    let verdict = |line: &str| {
        let (name, verdict) = line.strip_prefix("test ")?.split_once(" ... ")?;
        Some((name.to_owned(), verdict.trim() == "ok"))
    };
    text.lines().filter_map(verdict).collect()
}

/// The message of a test that failed beside others, from the end of their output.
fn reason_beside(said: &str, test: &str) -> String {
    let heading = format!("---- {test} stdout ----");
    let Some((_, own)) = said.split_once(&heading) else { return "it did not end".to_owned() };
    reason(own.split("\n---- ").next().unwrap_or_default())
}

/// The message of a failing test: at most six lines from its panic on, else the last lines.
fn reason(said: &str) -> String {
    let lines: Vec<&str> = said.lines().filter(|line| !line.trim().is_empty()).collect();
    let panic = lines.iter().position(|line| line.contains("panicked at"));
    let from = panic.unwrap_or(lines.len().saturating_sub(6));
    lines[from..].iter().take(6).copied().collect::<Vec<_>>().join("\n")
}

/// The outcomes as Markdown.
pub fn table(part: Part, outcomes: &[Outcome]) -> String {
    let mut text = format!("| {} | passed | failed |\n|---|---|---|\n", part.name());
    for outcome in outcomes {
        let mut failed: Vec<&str> = outcome.failed.iter().map(|failure| failure.test.as_str()).collect();
        failed.extend(outcome.error.as_deref());
        let failed = if failed.is_empty() { "none".to_owned() } else { failed.join(", ") };
        text += &format!("| {} | {} | {failed} |\n", outcome.about, outcome.passed);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn executables_are_found_in_cargos_messages() {
        let line = |manifest: &str, name: &str, kind: &str, executable: &str| {
            serde_json::json!({"reason": "compiler-artifact", "manifest_path": format!("/r/{manifest}/Cargo.toml"),
                "target": {"name": name, "kind": [kind]}, "executable": executable})
            .to_string()
        };
        let text = [
            line("crates/tensor", "cuda", "test", "/t/cuda-1"),
            line("crates/engine", "cuda", "test", "/t/cuda-2"),
            line("crates/engine", "trainyard_engine", "lib", "/t/no"),
            "{\"reason\":\"build-finished\",\"success\":true}".to_owned(),
        ]
        .join("\n");
        let found = artifacts(&text);
        assert_eq!(found.len(), 2);
        assert_eq!(found["trainyard-engine-cuda"], Path::new("/t/cuda-2"));
        assert_eq!(keys().len(), 4);
    }

    #[test]
    fn verdicts_and_reasons_are_read() {
        let text =
            "running 3 tests\ntest a::b ... ok\ntest c ... FAILED\ntest d - should panic ... ok\ntest result: ok.";
        let verdicts = verdicts(text);
        assert_eq!((verdicts.get("a::b"), verdicts.get("c"), verdicts.get("e")), (Some(&true), Some(&false), None));
        let said = "running 1 test\n\nthread 'c' panicked at x.rs:1:2:\nlogits differ by 3e-1\nnote: run with\n";
        assert_eq!(reason(said), "thread 'c' panicked at x.rs:1:2:\nlogits differ by 3e-1\nnote: run with");
        assert_eq!(reason("one\ntwo\n"), "one\ntwo");
        let said = "failures:\n\n---- a stdout ----\npanicked at one\n\n---- b stdout ----\npanicked at two\n";
        assert_eq!(reason_beside(said, "a"), "panicked at one");
        assert_eq!(reason_beside(said, "c"), "it did not end");
    }

    /// A stand-in for a test executable: one test passes, one always fails, one fails only beside
    /// the others, and one kills the process.
    #[cfg(unix)]
    #[test]
    fn what_fails_is_run_again_alone() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("suite");
        let script = "#!/bin/sh\ncase \"$*\" in\n*--list*) printf 'good: test\\nbad: test\\nshy: test\\nlast: test\\n';;\n\
             *'--exact bad'*) echo 'panicked at here'; exit 101;;\n*'--exact'*) exit 0;;\n\
             *) printf 'test good ... ok\\ntest bad ... FAILED\\ntest shy ... FAILED\\n'; kill -9 $$;;\nesac\n";
        std::fs::write(&path, script).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        let run = Run { root: folder.path(), executable: &path, suite: &SUITES[0], emulated: true };
        let outcome = run.all().unwrap();
        assert_eq!((outcome.passed, outcome.is_right()), (1, false));
        let failed: Vec<(&str, bool)> = outcome.failed.iter().map(|f| (f.test.as_str(), f.alone)).collect();
        assert_eq!(failed, [("bad", true), ("shy", false), ("last", false)]);
        let table = table(Part::Conformance, &[outcome]);
        assert!(table.ends_with("| every kernel against the oracles in f64 | 1 | bad, shy, last |\n"), "{table}");
        let nothing = Outcome::of(&SUITES[0], Vec::new(), None, 0);
        assert!(!nothing.is_right(), "a suite without tests has not passed");
    }
}
