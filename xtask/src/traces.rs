//! `cargo xtask traces FOLDER`: compares `trainyard doctor` with the Python package
//! HolisticTraceAnalysis on traces of PyTorch's profiler.
//!
//! Both read every file of a folder. Figures of the breakdown and the overlap have to agree within
//! 1 % wherever the package gives one. Time and memory are those of whole processes; the package's
//! time is without importing it. If the folder holds `resnet50-workers0` and `resnet50-workers4`
//! (the profiler's own samples), the first has to be input bound with a saving within 25 % of what
//! the second gained, and the second must not be input bound.
//!
//! Nothing else should run meanwhile.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::bench::environment;
use crate::bench::measure::{figure, last_json_line};

const PYTHON_VARIABLE: &str = "TRAINYARD_TRACES_PYTHON";
const PACKAGES: [&str; 1] = ["HolisticTraceAnalysis==0.5.0"];

/// Largest relative difference of a figure.
const DIFFERENCE_MAX: f64 = 0.01;
/// Factors by which it has to be faster, and to need less memory.
const SPEED_MIN: f64 = 10.0;
const MEMORY_MIN: f64 = 5.0;
/// Largest relative difference of the predicted saving from the measured one.
const SAVING_DIFFERENCE_MAX: f64 = 0.25;

/// Runs of which the fastest counts.
const REPEATS: usize = 3;

/// Arguments of `cargo xtask traces`.
#[derive(clap::Args)]
pub struct Options {
    /// A folder of traces, `.json` or `.json.gz`.
    folder: PathBuf,
    /// Measure this program instead of building one.
    #[arg(long)]
    binary: Option<PathBuf>,
}

/// Compares all traces of the folder. Returns true if every bar is reached.
pub fn run(root: &Path, options: &Options) -> Result<bool> {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), |folder| root.join(folder));
    let python = match std::env::var_os(PYTHON_VARIABLE) {
        Some(python) => PathBuf::from(python),
        None => environment(&target.join("traces-venv"), &PACKAGES, PYTHON_VARIABLE)?,
    };
    let binary = match &options.binary {
        Some(path) => std::path::absolute(path)?,
        None => build(root, &target)?,
    };
    std::fs::create_dir_all(target.join("bench"))?;
    let tools = Tools { python, binary, scripts: root.join("scripts/peers"), log: target.join("bench/traces.log") };
    let mut files: Vec<PathBuf> = std::fs::read_dir(&options.folder)
        .with_context(|| format!("cannot read {}", options.folder.display()))?
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<std::io::Result<_>>()?;
    files.retain(|path| [".json", ".json.gz"].iter().any(|end| path.to_string_lossy().ends_with(end)));
    files.sort();
    if files.is_empty() {
        bail!("{} holds no .json and no .json.gz", options.folder.display());
    }
    println!("{:<32} {:>9} {:>11} {:>9}   largest difference", "file", "seconds", "memory", "verdict");
    let mut passed = true;
    for file in &files {
        passed &= tools.compare(file)?;
    }
    passed &= tools.samples(&options.folder)?;
    Ok(passed)
}

fn build(root: &Path, target: &Path) -> Result<PathBuf> {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    let status = command.current_dir(root).args(["build", "--release", "--locked", "-p", "trainyard"]).status()?;
    if !status.success() {
        bail!("the program does not build");
    }
    Ok(target.join("release/trainyard"))
}

/// The programs that are compared.
struct Tools {
    python: PathBuf,
    binary: PathBuf,
    scripts: PathBuf,
    log: PathBuf,
}

impl Tools {
    fn script(&self, name: &str) -> Command {
        let mut command = Command::new(&self.python);
        command.arg(self.scripts.join(name));
        command
    }

    /// Wall time and peak memory of a command.
    fn usage(&self, command: &[&std::ffi::OsStr]) -> Result<Value> {
        last_json_line(self.script("usage.py").args(command), &self.log)
    }

    /// The report of `doctor --json` about a file. Its exit code tells how grave that is.
    fn report(&self, file: &Path) -> Result<Value> {
        let answer = Command::new(&self.binary).arg("doctor").arg(file).arg("--json").output()?;
        serde_json::from_slice(&answer.stdout)
            .with_context(|| format!("doctor {}: {}", file.display(), String::from_utf8_lossy(&answer.stderr)))
    }

    fn compare(&self, file: &Path) -> Result<bool> {
        let report = self.report(file)?;
        let theirs = last_json_line(self.script("hta_figures.py").arg(file), &self.log)?;
        let (mut largest, mut compared) = ((0.0, "-"), 0);
        for (name, pointer, scale) in [
            ("total", "/ranks/0/breakdown/total_seconds", 1e6),
            ("compute", "/ranks/0/breakdown/compute_seconds", 1e6),
            ("non_compute", "/ranks/0/breakdown/non_compute_seconds", 1e6),
            ("idle", "/ranks/0/breakdown/idle_seconds", 1e6),
            ("overlap", "/ranks/0/communication/overlapped", 1.0),
        ] {
            let Some(theirs) = theirs[name].as_f64() else { continue };
            let ours = scale * figure(&report, pointer)?;
            compared += 1;
            // The package rounds shares to hundredths of a percent.
            let rounding = if name == "overlap" { 5e-5 } else { 0.0 };
            let difference = ((ours - theirs).abs() - rounding).max(0.0) / theirs.abs().max(1e-9);
            if difference > largest.0 {
                largest = (difference, name);
            }
        }
        let idle: f64 = report["ranks"][0]["idle_by_stream"]
            .as_array()
            .map_or(0.0, |streams| streams.iter().filter_map(|stream| stream["host_wait_seconds"].as_f64()).sum());
        let host_wait = theirs["host_wait"].as_f64().map_or(String::new(), |theirs| {
            format!("; host wait of streams {:.2} ms, theirs {:.2}", 1e3 * idle, theirs / 1e3)
        });
        let fastest = |command: &[&std::ffi::OsStr]| -> Result<(f64, f64)> {
            let mut least = (f64::INFINITY, f64::INFINITY);
            for _ in 0..REPEATS {
                let usage = self.usage(command)?;
                least = (least.0.min(figure(&usage, "/seconds")?), least.1.min(figure(&usage, "/bytes")?));
            }
            Ok(least)
        };
        let ours = fastest(&[self.binary.as_os_str(), "doctor".as_ref(), file.as_os_str(), "--json".as_ref()])?;
        let script = self.scripts.join("hta_figures.py");
        let memory = fastest(&[self.python.as_os_str(), script.as_os_str(), file.as_os_str()])?.1;
        let mut seconds = figure(&theirs, "/seconds")?;
        for _ in 1..REPEATS {
            let again = last_json_line(self.script("hta_figures.py").arg(file), &self.log)?;
            seconds = seconds.min(figure(&again, "/seconds")?);
        }
        let (speed, memory) = (seconds / ours.0, memory / ours.1);
        let verdict = report["diagnosis"]["verdicts"][0]["cause"].as_str().unwrap_or("none");
        // Where the package fails, there is nothing to be faster than.
        let passed = compared == 0 || (largest.0 <= DIFFERENCE_MAX && speed >= SPEED_MIN && memory >= MEMORY_MIN);
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        let difference = if compared == 0 {
            "the package fails".to_owned()
        } else {
            format!("{:.3} % ({}){host_wait}", 100.0 * largest.0, largest.1)
        };
        println!(
            "{name:<32} {:>6.3} s {:>7.1} MB  {verdict}; {speed:.0} x faster, {memory:.0} x less memory; {difference}{}",
            ours.0,
            ours.1 / 1e6,
            if passed { "" } else { "  MISSED" }
        );
        Ok(passed)
    }

    /// The two samples of the profiler, of which the second cured the first.
    fn samples(&self, folder: &Path) -> Result<bool> {
        let path = |workers: u32| folder.join(format!("resnet50-workers{workers}.json.gz"));
        if !path(0).exists() || !path(4).exists() {
            return Ok(true);
        }
        let (bound, cured) = (self.report(&path(0))?, self.report(&path(4))?);
        let first = bound["diagnosis"]["verdicts"][0]["cause"].as_str().unwrap_or_default();
        let verdicts = cured["diagnosis"]["verdicts"].as_array().context("no verdicts")?;
        let still = verdicts.iter().any(|verdict| verdict["cause"] == "input_bound");
        let predicted = figure(&bound, "/diagnosis/verdicts/0/saving/seconds")?;
        let measured = median_step(&bound)? - median_step(&cured)?;
        let passed = first == "input_bound" && !still && (predicted / measured - 1.0).abs() <= SAVING_DIFFERENCE_MAX;
        println!(
            "resnet50: {first}, predicted to save {:.1} ms a step; four loader processes saved {:.1} ms ({:+.0} %); then {}input bound: {}",
            1e3 * predicted,
            1e3 * measured,
            100.0 * (predicted / measured - 1.0),
            if still { "" } else { "not " },
            if passed { "reached" } else { "MISSED" }
        );
        Ok(passed)
    }
}

/// The median length of the steps of a report's first rank.
fn median_step(report: &Value) -> Result<f64> {
    let steps = report["ranks"][0]["steps"].as_array().context("no steps")?;
    trainyard_base::median(steps.iter().filter_map(|step| step["seconds"].as_f64())).context("no steps")
}
