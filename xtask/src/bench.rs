//! `cargo xtask bench`: compares the release build with its bars and its peers.
//!
//! A benchmark is a row of the table in [`table`]: the command of this side, the command of the
//! peer, the conversion of the JSON line that each prints into figures, and the bar of each figure.
//! This module builds the program, finds the peer's Python and its allocator, and picks the fastest
//! of the peer's variants. It then runs both sides in turn, because a machine's speed drifts by a
//! third from hour to hour and only neighbouring runs compare. Medians are compared with the bars,
//! everything is printed as one table, and all measurements go to `target/bench/NAME.json`.
//!
//! It does not judge noise: on a busy machine the figures mean nothing.

pub mod measure;
mod peers;
mod table;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use measure::{Measured, Row};
use peers::Peers;
pub use peers::{PYTHON_VARIABLE, environment};
use table::{BENCHMARKS, Benchmark, Ours, Peer};

/// Arguments of `cargo xtask bench`.
#[derive(clap::Args)]
pub struct Options {
    /// Benchmarks to run; all of them when none is named.
    names: Vec<String>,
    /// Number of pairs of runs, ours and PyTorch's in turn; medians are compared.
    #[arg(long, default_value_t = 3)]
    pairs: usize,
    /// The text of the character-level recipe (tiny Shakespeare, 1.1 MB); without it those
    /// benchmarks are skipped.
    #[arg(long, default_value = "data/shakespeare.txt")]
    text: PathBuf,
    /// Run our side alone; bars that are ratios are not judged then.
    #[arg(long)]
    without_peers: bool,
    /// Measure this program instead of building `target/release/trainyard`.
    #[arg(long)]
    binary: Option<PathBuf>,
    /// List the benchmarks and stop.
    #[arg(long)]
    list: bool,
}

/// Runs the benchmarks that were asked for. Returns true if every bar was reached.
pub fn run(root: &Path, options: &Options) -> Result<bool> {
    if options.list {
        for benchmark in BENCHMARKS {
            println!("{:12} {}", benchmark.name, benchmark.about);
        }
        return Ok(true);
    }
    let chosen = choose(&options.names)?;
    if options.pairs == 0 {
        bail!("--pairs 0 measures nothing");
    }
    let target = target_folder(root);
    let folder = target.join("bench");
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let bench = Bench {
        binary: match &options.binary {
            Some(path) => absolute(path)?,
            None => build(root, &target)?,
        },
        peers: if options.without_peers { None } else { Some(Peers::find(root, &target)?) },
        text: absolute(&options.text)?,
        pairs: options.pairs,
        folder,
    };

    let mut rows: Vec<(&str, Row)> = Vec::new();
    let mut complete = true;
    for benchmark in chosen {
        println!("\n== {}: {}", benchmark.name, benchmark.about);
        if benchmark.needs_text() && !bench.text.is_file() {
            println!("skipped: no text at {}; give one with --text", bench.text.display());
            continue;
        }
        if benchmark.needs_images() && !bench.have_images()? {
            println!("skipped: its images are made by the peer's Python, and --without-peers was given");
            continue;
        }
        match bench.run(benchmark) {
            Ok(found) => rows.extend(found.into_iter().map(|row| (benchmark.name, row))),
            Err(error) => {
                println!("failed: {error:#}");
                complete = false;
            }
        }
    }
    let lines: Vec<(&str, &Row)> = rows.iter().map(|(name, row)| (*name, row)).collect();
    println!("\n{}", measure::print(&lines));
    Ok(complete && rows.iter().all(|(_, row)| row.passed() != Some(false)))
}

fn choose(names: &[String]) -> Result<Vec<&'static Benchmark>> {
    if names.is_empty() {
        return Ok(BENCHMARKS.iter().collect());
    }
    let find = |name: &String| {
        BENCHMARKS.iter().find(|b| b.name == name).with_context(|| {
            let known: Vec<&str> = BENCHMARKS.iter().map(|b| b.name).collect();
            format!("no benchmark `{name}`; there are {}", known.join(", "))
        })
    };
    names.iter().map(find).collect()
}

/// The settings that all benchmarks of one call share.
struct Bench {
    binary: PathBuf,
    peers: Option<Peers>,
    text: PathBuf,
    pairs: usize,
    folder: PathBuf,
}

impl Bench {
    fn run(&self, benchmark: &Benchmark) -> Result<Vec<Row>> {
        // The first run of our side is not counted. It warms the page cache, and its output tells
        // the peer which cases to run.
        let first = self.ours(benchmark)?;
        let ours_file = self.folder.join(format!("{}.ours.json", benchmark.name));
        fs::write(&ours_file, first.to_string()).with_context(|| format!("cannot write {}", ours_file.display()))?;
        let peer = self.fastest_peer(benchmark, &ours_file)?;

        let mut measured = Measured { ours: Vec::new(), theirs: Vec::new() };
        for pair in 1..=self.pairs {
            measured.ours.push(self.ours(benchmark)?);
            if let Some((peers, peer)) = peer {
                measured.theirs.push(self.theirs(peers, peer, benchmark, &ours_file)?);
            }
            println!("  pair {pair} of {}", self.pairs);
        }
        let rows = (benchmark.rows)(&measured)?;
        let record = json!({
            "benchmark": benchmark.name,
            "about": benchmark.about,
            "unix_time_s": SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs(),
            "machine": machine(),
            "peer": peer.map(|(_, peer)| peer.label),
            "peer_allocator": self.peers.as_ref().map(Peers::allocator),
            "rows": rows,
            "ours": measured.ours,
            "theirs": measured.theirs,
        });
        let file = self.folder.join(format!("{}.json", benchmark.name));
        fs::write(&file, format!("{record:#}\n")).with_context(|| format!("cannot write {}", file.display()))?;
        fs::remove_file(&ours_file).ok();
        Ok(rows)
    }

    /// The folder of images.
    fn images(&self) -> PathBuf {
        self.folder.join("images")
    }

    /// Makes the images if they are missing. False if there is no Python to make them.
    fn have_images(&self) -> Result<bool> {
        let folder = self.images();
        if folder.is_dir() {
            return Ok(true);
        }
        let Some(peers) = &self.peers else { return Ok(false) };
        let unfinished = folder.with_extension("unfinished");
        let arguments = ["make".to_owned(), unfinished.to_string_lossy().into_owned()];
        measure::output(&mut peers.command("torch_images.py", &arguments), &self.folder.join("images.log"))?;
        fs::rename(&unfinished, &folder).with_context(|| format!("cannot make {}", folder.display()))?;
        Ok(true)
    }

    /// An argument with the paths for which it has names.
    fn filled(&self, argument: &str) -> String {
        let (text, images) = (self.text.to_string_lossy(), self.images());
        argument.replace("{text}", &text).replace("{images}", &images.to_string_lossy())
    }

    fn ours(&self, benchmark: &Benchmark) -> Result<Value> {
        let scratch = self.scratch(benchmark)?;
        let mut command = Command::new(&self.binary);
        command.args(benchmark.ours.arguments().iter().map(|argument| self.filled(argument)));
        command.current_dir(&scratch);
        let log = self.log(benchmark, "ours");
        match benchmark.ours {
            Ours::Prints(_) => measure::last_json_line(&mut command, &log),
            Ours::Trains { run, .. } => {
                measure::output(&mut command, &log)?;
                measure::training_run(&scratch.join("runs").join(run).join("metrics.jsonl"))
            }
        }
    }

    fn theirs(&self, peers: &Peers, peer: &Peer, benchmark: &Benchmark, ours: &Path) -> Result<Value> {
        let fill = |argument: &&str| self.filled(argument).replace("{ours}", &ours.to_string_lossy());
        let arguments: Vec<String> = peer.arguments.iter().map(fill).collect();
        let mut command = peers.command(peer.script, &arguments);
        command.current_dir(self.scratch(benchmark)?);
        measure::last_json_line(&mut command, &self.log(benchmark, "peer"))
    }

    /// Runs each variant of the peer once (which also fills the compiler's caches) and takes the
    /// one with the best figure.
    fn fastest_peer<'a>(&'a self, benchmark: &'a Benchmark, ours: &Path) -> Result<Option<(&'a Peers, &'a Peer)>> {
        let Some(peers) = &self.peers else { return Ok(None) };
        let mut best: Option<(f64, &Peer)> = None;
        if let [only] = benchmark.peers {
            return Ok(Some((peers, only)));
        }
        for peer in benchmark.peers {
            let value = self.theirs(peers, peer, benchmark, ours)?;
            let speed = measure::figure(&value, benchmark.peer_speed)?;
            println!("  {}: {} {}", peer.label, measure::digits(speed), benchmark.peer_speed.trim_start_matches('/'));
            if best.is_none_or(|(fastest, _)| speed > fastest) {
                best = Some((speed, peer));
            }
        }
        if let Some((_, peer)) = best {
            println!("  compared with {}", peer.label);
        }
        Ok(best.map(|(_, peer)| (peers, peer)))
    }

    /// An empty folder to run in, so that no benchmark finds the files of another.
    fn scratch(&self, benchmark: &Benchmark) -> Result<PathBuf> {
        let scratch = self.folder.join("scratch").join(benchmark.name);
        if scratch.exists() {
            fs::remove_dir_all(&scratch).with_context(|| format!("cannot empty {}", scratch.display()))?;
        }
        fs::create_dir_all(&scratch).with_context(|| format!("cannot create {}", scratch.display()))?;
        for (name, contents) in benchmark.files {
            fs::write(scratch.join(name), contents).with_context(|| format!("cannot write {name}"))?;
        }
        Ok(scratch)
    }

    fn log(&self, benchmark: &Benchmark, side: &str) -> PathBuf {
        self.folder.join(format!("{}.{side}.log", benchmark.name))
    }
}

/// The program that was given, else the release binary, built first.
pub fn program(root: &Path, given: Option<&Path>) -> Result<PathBuf> {
    given.map_or_else(|| build(root, &target_folder(root)), absolute)
}

/// Builds the release binary and returns its path.
fn build(root: &Path, target: &Path) -> Result<PathBuf> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(["build", "--release", "--locked", "--package", "trainyard"]).current_dir(root);
    if !command.status().context("cannot run cargo build")?.success() {
        bail!("the release build failed");
    }
    Ok(target.join("release/trainyard"))
}

/// The folder of cargo's builds: `CARGO_TARGET_DIR`, else `target`.
pub fn target_folder(root: &Path) -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), |folder| root.join(folder))
}

/// Resolves a path against the folder in which the command was called, because benchmarks run in
/// another one.
fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).with_context(|| format!("cannot resolve {}", path.display()))
}

/// The properties of the machine that figures depend on: the processor, the number of usable
/// threads, and its matrix instructions.
fn machine() -> Value {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        let line = info.lines().find(|line| line.starts_with(name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let flags = field("flags").unwrap_or_default();
    let matrix = ["amx_bf16", "avx512_bf16", "avx512f", "avx2"].into_iter().find(|f| flags.split(' ').any(|g| g == *f));
    json!({
        "processor": field("model name"),
        "threads": std::thread::available_parallelism().map(usize::from).ok(),
        "instructions": matrix,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn benchmarks_are_found_by_name() {
        assert_eq!(choose(&[]).unwrap().len(), BENCHMARKS.len());
        assert_eq!(choose(&["kernels".into()]).unwrap()[0].name, "kernels");
        let error = choose(&["kernel".into()]).err().unwrap().to_string();
        assert!(error.contains("no benchmark `kernel`; there are kernels"), "{error}");
    }

    /// A stand-in for the binary prints what the real one would, without a peer.
    #[test]
    fn a_benchmark_runs_and_leaves_its_record() {
        let folder = tempfile::tempdir().unwrap();
        let bench = Bench {
            binary: "sh".into(),
            peers: None,
            text: folder.path().join("text"),
            pairs: 2,
            folder: folder.path().to_owned(),
        };
        const FAKE: Benchmark = Benchmark {
            name: "fake",
            about: "a made-up benchmark",
            files: &[("input", "41.5")],
            ours: Ours::Prints(&["-c", "echo noise; echo \"{\\\"speed\\\": $(cat input)}\""]),
            peers: &[],
            peer_speed: "",
            rows: |m| Ok(vec![Row::new("speed", "1/s", m.ours("/speed")?).at_least(42.0)]),
        };
        let rows = bench.run(&FAKE).unwrap();
        assert_eq!(rows[0].passed(), Some(false));
        let record: Value = serde_json::from_slice(&fs::read(folder.path().join("fake.json")).unwrap()).unwrap();
        assert_eq!(record["ours"], json!([{"speed": 41.5}, {"speed": 41.5}]));
        assert_eq!(record["rows"][0]["passed"], json!(false));
    }
}
