//! `cargo xtask dashboard`: the dashboard in a real browser, on a live run, and its bars.
//!
//! Makes a run of ten million steps with a hundred planted spikes, a thousand runs of a thousand
//! metrics, and a run that trains meanwhile. A headless Chromium then clicks through every page
//! (`scripts/dashboard.mjs`). Needs Node.js, and Chromium at the path that is given; installs
//! playwright-core from npm into a temporary folder. It takes minutes, so it is no part of `test`.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, BufWriter, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::bench::program;

/// The browser and the sizes.
#[derive(clap::Args)]
pub struct Options {
    /// The browser.
    #[arg(long, default_value = "/usr/bin/chromium")]
    chromium: PathBuf,
    /// The program to test. Unset: the release binary, built first.
    #[arg(long)]
    binary: Option<PathBuf>,
    /// The folder for pictures.
    #[arg(long, default_value = "target/dashboard")]
    pictures: PathBuf,
    /// Steps of the long run.
    #[arg(long, default_value_t = 10_000_000)]
    records: u64,
    /// Watchers of the live run.
    #[arg(long, default_value_t = 200)]
    watchers: usize,
}

const SPIKES: u64 = 100;
const SPIKE: f64 = 100.0;
/// A shorter run would end before its last spike.
const RECORDS_MIN: u64 = 200_000;
const RUNS: usize = 1_000;
const METRICS: usize = 1_000;

/// The bars.
const FIRST_PAINT_MS: f64 = 200.0;
const ZOOM_MS: f64 = 50.0;
const LIST_MS: f64 = 1_000.0;

/// A program that ends when this value is dropped.
pub struct Started(Child);

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs the chore. True if every bar is held.
pub fn run(root: &Path, options: &Options) -> Result<bool> {
    let binary = program(root, options.binary.as_deref())?;
    ensure!(options.records >= RECORDS_MIN, "--records is at least {RECORDS_MIN}, so that all spikes lie in the run");
    let folder = std::env::temp_dir().join(format!("trainyard-dashboard-{}", std::process::id()));
    fs::create_dir_all(folder.join("runs"))?;
    let result = measure(root, options, &binary, &folder);
    // An error of the measurement says more than one of the removal.
    let removed = fs::remove_dir_all(&folder);
    let is_held = result?;
    removed.with_context(|| format!("cannot remove {}", folder.display()))?;
    Ok(is_held)
}

fn measure(root: &Path, options: &Options, binary: &Path, folder: &Path) -> Result<bool> {
    let npm = Command::new("npm").args(["install", "--silent", "--prefix"]).arg(folder).arg("playwright-core").status();
    ensure!(npm.context("npm is needed")?.success(), "npm cannot install playwright-core");
    let pictures = root.join(&options.pictures);
    fs::create_dir_all(&pictures)?;
    let steps = long_run(&folder.join("runs/long"), options.records)?;
    let _training = train(binary, folder)?;
    let (_server, url) = serve(binary, &folder.join("runs"))?;
    let planted = json!({"steps": steps, "value": SPIKE, "records": options.records});
    let output = Command::new("node")
        .arg(root.join("scripts/dashboard.mjs"))
        .arg(folder.join("node_modules/playwright-core"))
        .arg(&options.chromium)
        .args([url.trim_end_matches('/'), "long", "live"])
        .arg(&pictures)
        .arg(planted.to_string())
        .stderr(Stdio::inherit())
        .output()?;
    ensure!(output.status.success(), "the browser's script failed: {}", String::from_utf8_lossy(&output.stdout));
    let seen: Value = serde_json::from_slice(&output.stdout)?;
    println!("{seen:#}");
    // A number that the script leaves out holds no bar.
    let number = |key: &str| seen[key].as_f64().unwrap_or(f64::INFINITY);
    let unseen = seen["spikes_visible"].as_f64().map_or(f64::INFINITY, |visible| SPIKES as f64 - visible);
    let errors = seen["errors"].as_array().map_or(f64::INFINITY, |errors| errors.len() as f64);
    let mut bars = vec![
        ("first paint", number("first_paint_ms"), FIRST_PAINT_MS),
        ("first paint, cold", number("first_paint_cold_ms"), FIRST_PAINT_MS),
        ("zoom, median", number("zoom_median_ms"), ZOOM_MS),
        ("spikes that are not visible", unseen, 0.0),
        ("errors in the browser", errors, 0.0),
    ];
    let many = folder.join("many");
    many_runs(&many)?;
    let (_many, url) = serve(binary, &many)?;
    for name in ["1,000 runs listed, cold", "1,000 runs listed, warm"] {
        let start = Instant::now();
        let answer = get(&url, "/api/runs")?;
        ensure!(answer.matches("\"config_hash\"").count() == RUNS, "a run is missing in the list");
        bars.push((name, 1e3 * start.elapsed().as_secs_f64(), LIST_MS));
    }
    bars.push(("watchers that hear nothing", watchers_without_news(binary, folder, options.watchers)? as f64, 0.0));
    let mut held = true;
    for (name, measured, bar) in bars {
        let is_held = measured <= bar;
        held &= is_held;
        println!("{name:<28} {measured:>10.1}   bar {bar:>7.1}   {}", if is_held { "held" } else { "missed" });
    }
    Ok(held)
}

/// Writes a run of one curve with planted spikes. Returns their steps.
fn long_run(folder: &Path, records: u64) -> Result<Vec<u64>> {
    fs::create_dir_all(folder)?;
    fs::write(folder.join("config.toml"), format!("[training]\nsteps = {records}\n"))?;
    // Spread over the run, at places that are no round numbers.
    let spikes: Vec<u64> = (0..SPIKES).map(|n| (n * 2 + 1) * records / (2 * SPIKES) + n * 7).collect();
    let mut file = BufWriter::new(File::create(folder.join("metrics.jsonl"))?);
    let mut next = spikes.iter().peekable();
    for step in 1..=records {
        let loss = match next.next_if(|spike| **spike == step) {
            Some(_) => SPIKE,
            None => 10.0 / (1.0 + step as f64 / records as f64) + ((step * 7919) % 1000) as f64 / 1000.0,
        };
        writeln!(file, "{{\"step\":{step},\"loss\":{loss:.4}}}")?;
    }
    file.flush()?;
    Ok(spikes)
}

/// Writes runs with many metrics.
fn many_runs(folder: &Path) -> Result<()> {
    for run in 0..RUNS {
        let path = folder.join(format!("run-{run:04}"));
        fs::create_dir_all(&path)?;
        fs::write(path.join("config.toml"), format!("[model]\ndim = {run}\n[training]\nsteps = 3\n"))?;
        let mut file = BufWriter::new(File::create(path.join("metrics.jsonl"))?);
        for step in 1..=3 {
            let metrics: String =
                (0..METRICS).map(|metric| format!(",\"layer.{metric}.norm\":{}.5", metric * step)).collect();
            writeln!(file, "{{\"step\":{step},\"loss\":2.5{metrics}}}")?;
        }
        file.flush()?;
    }
    Ok(())
}

/// Starts a small training that lasts.
fn train(binary: &Path, folder: &Path) -> Result<Started> {
    let words = "a step of the rank gathers what it needs and reduces what it has. ";
    fs::write(folder.join("text.txt"), words.repeat(4_000))?;
    let config = "[run]\nname = 'live'\n[model]\npreset = 'quickstart'\ndim = 64\nlayers = 2\nheads = 4\n[tokenizer]\n\
                  kind = 'bytes'\n[data]\ntrain = ['text.txt']\n[training]\nsteps = 1000000\nsequence_length = 64\n\
                  [evaluation]\ninterval_steps = 100\n[compute]\nthreads = 1\n[metrics]\nprofile = true\nprofile_steps = 6\n";
    fs::write(folder.join("live.toml"), config)?;
    let mut command = Command::new(binary);
    command.args(["train", "live.toml", "--quiet"]).current_dir(folder).stdout(Stdio::null());
    let mut started = Started(command.spawn()?);
    let start = Instant::now();
    while !folder.join("runs/live/metrics.jsonl").exists() {
        if let Some(status) = started.0.try_wait()? {
            bail!("the training ends before its first step: {status}");
        }
        ensure!(start.elapsed() < Duration::from_secs(120), "the training does not begin");
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(started)
}

/// Starts the dashboard and returns its address.
pub fn serve(binary: &Path, runs: &Path) -> Result<(Started, String)> {
    let mut started = Started(Command::new(binary).arg("dash").arg(runs).stdout(Stdio::piped()).spawn()?);
    let mut line = String::new();
    BufReader::new(started.0.stdout.take().context("standard output")?).read_line(&mut line)?;
    let url = line.rsplit(": ").next().unwrap_or_default().trim().to_owned();
    ensure!(url.starts_with("http"), "the dashboard does not start: {line}");
    Ok((started, url))
}

/// Sends a request with further `headers`, each ended by a line break.
fn connect(url: &str, path: &str, headers: &str) -> Result<TcpStream> {
    let address = url.trim_start_matches("http://").trim_end_matches('/');
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(Duration::from_secs(30)))?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n")?;
    Ok(stream)
}

fn get(url: &str, path: &str) -> Result<String> {
    let mut text = String::new();
    connect(url, path, "Connection: close\r\n")?.read_to_string(&mut text)?;
    Ok(text)
}

/// Connections of `watchers` that receive every event. They are read by threads until they close.
pub fn watch(url: &str, watchers: usize) -> Result<Vec<JoinHandle<u64>>> {
    let listen = |mut stream: TcpStream| {
        std::thread::spawn(move || std::io::copy(&mut stream, &mut std::io::sink()).unwrap_or(0))
    };
    (0..watchers).map(|_| connect(url, "/events", "").map(listen)).collect()
}

/// Watches the live run many times. Returns the number of watchers that hear of no record.
fn watchers_without_news(binary: &Path, folder: &Path, watchers: usize) -> Result<usize> {
    let (_server, url) = serve(binary, &folder.join("runs"))?;
    let streams = (0..watchers).map(|_| connect(&url, "/events", "")).collect::<Result<Vec<_>>>()?;
    let hears = |stream: &TcpStream| {
        let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
        lines.any(|line| line.contains("\"run\":\"live\"") && line.contains("\"values\""))
    };
    Ok(streams.iter().filter(|stream| !hears(stream)).count())
}
