//! `cargo xtask slow-links`: training over a slow cable, by every way of sending less.
//!
//! Two hosts (network namespaces, see [`crate::cable`]) of one or two ranks train one model over
//! TCP.
//! Measured are the seconds and the bytes of a step: gradients as they are, added up inside a host
//! first, encoded by each codec, stages of a pipeline, and replicas that meet once in many steps.
//! `--peer` names a Python
//! that has torch, and then PyTorch's own ways run over the same cable by gloo: plain DDP, its
//! PowerSGD
//! hook, and a plain DiLoCo loop.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::bench::program;
use crate::cable::{Cable, address, namespace};

/// A Llama of 25 M parameters on bytes: what it computes in a step is small against what it sends.
const CONFIG: &str = "\
[run]
name = 'slow'
[model]
preset = 'quickstart'
dim = 512
layers = 8
heads = 8
[tokenizer]
kind = 'bytes'
[data]
train = ['text.txt']
validation_fraction = 0.0
[training]
micro_batch_size = 1
sequence_length = 64
[checkpoint]
interval_steps = 1000000
[compute]
threads = 1
";
/// Micro-batches of a step of a pipeline.
const PIPELINED: usize = 8;
/// A way of training: its name, ranks on each host, settings, and the steps of a round.
const WAYS: [(&str, usize, &[&str], usize); 20] = [
    ("2 x 2 ranks, one exchange", 2, &["parallel.hierarchical_sums=false"], 1),
    ("2 x 2 ranks, hosts first", 2, &[], 1),
    ("2 x 1 rank, f32", 1, &[], 1),
    ("bf16", 1, &["compression.gradients=bf16"], 1),
    ("int8", 1, &["compression.gradients=int8"], 1),
    ("int4", 1, &["compression.gradients=int4"], 1),
    ("one_bit", 1, &["compression.gradients=one_bit"], 1),
    ("top_k", 1, &["compression.gradients=top_k"], 1),
    ("power_sgd, rank 4", 1, &["compression.gradients=power_sgd"], 1),
    ("ZeRO-3", 1, &["parallel.data_parallel_shard_degree=2"], 1),
    ("ZeRO-3, int8 parameters", 1, &["parallel.data_parallel_shard_degree=2", "compression.parameters=int8"], 1),
    (
        "ZeRO-3, int8 both",
        1,
        &["parallel.data_parallel_shard_degree=2", "compression.parameters=int8", "compression.gradients=int8"],
        1,
    ),
    ("pipeline", 1, &["parallel.pipeline_parallel_degree=2"], 1),
    ("pipeline, int8", 1, &["parallel.pipeline_parallel_degree=2", "compression.activations=int8"], 1),
    (
        "pipeline, int4, int8 back",
        1,
        &[
            "parallel.pipeline_parallel_degree=2",
            "compression.activations=int4",
            "compression.activation_gradients=int8",
        ],
        1,
    ),
    ("diloco, every 20", 1, &["update.rule=diloco", "update.every=20"], 20),
    ("diloco, every 20, int8", 1, &["update.rule=diloco", "update.every=20", "compression.outer=int8"], 20),
    ("diloco, every 100", 1, &["update.rule=diloco", "update.every=100"], 100),
    (
        "streaming, every 20",
        1,
        &["update.rule=diloco", "update.every=20", "update.fragments=10", "update.overlap=true"],
        20,
    ),
    (
        "streaming, every 20, int8",
        1,
        &[
            "update.rule=diloco",
            "update.every=20",
            "update.fragments=10",
            "update.overlap=true",
            "compression.outer=int8",
        ],
        20,
    ),
];
/// The ways of PyTorch: the argument of the script, and the name.
const PEERS: [(&str, &str); 3] =
    [("ddp", "PyTorch DDP"), ("power_sgd", "PyTorch PowerSGD"), ("diloco", "PyTorch DiLoCo, every 100")];
/// Bars: encoded sums and DiLoCo against plain sums, and hosts first against one exchange.
const ENCODED: f64 = 3.0;
const APART: f64 = 20.0;
const HOSTS_FIRST: f64 = 1.7;

/// Arguments of `cargo xtask slow-links`.
#[derive(clap::Args)]
pub struct Options {
    /// Bits per second of the cable, in each direction.
    #[arg(long, default_value_t = 1_000_000_000)]
    rate: u64,
    /// Timed steps of a run whose ranks meet in every step.
    #[arg(long, default_value_t = 6)]
    steps: usize,
    /// Measure this program instead of the release build.
    #[arg(long)]
    binary: Option<PathBuf>,
    /// A Python with torch, to measure PyTorch over the same cable.
    #[arg(long)]
    peer: Option<PathBuf>,
    /// Measure only the ways whose names contain this.
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
}

/// What a step took.
struct Measured {
    name: String,
    step_s: f64,
    /// Bytes that the first host sent.
    bytes: f64,
    /// The last loss, with all its digits.
    loss: f64,
}

/// Measures every way. Returns true if the bars are held.
pub fn run(root: &Path, options: &Options) -> Result<bool> {
    drop(Cable::new(None)?);
    let binary = program(root, options.binary.as_deref())?;
    let folder = root.join("target/bench/slow-links");
    fs::create_dir_all(&folder)?;
    fs::write(folder.join("slow.toml"), CONFIG)?;
    fs::write(folder.join("text.txt"), include_str!("slow_links.rs").repeat(40))?;
    println!("{:<28} {:>10} {:>14} {:>9}", "way", "ms a step", "MB a step sent", "speed-up");
    let mut all: Vec<Measured> = Vec::new();
    let mut plain: Option<f64> = None;
    let is_wanted = |name: &str| options.only.as_ref().is_none_or(|only| name.contains(only));
    for (name, ranks, sets, round) in WAYS.into_iter().filter(|(name, ..)| is_wanted(name)) {
        let measured = measure(&binary, &folder, options, name, ranks, sets, round)?;
        if name.ends_with("f32") {
            plain = Some(measured.step_s);
        }
        show(&measured, plain.filter(|_| ranks == 1));
        all.push(measured);
    }
    if let Some(python) = &options.peer {
        for (way, name) in PEERS {
            let measured = peer(root, python, &folder, options, way, name)?;
            show(&measured, plain);
            all.push(measured);
        }
    }
    if options.only.is_some() {
        return Ok(true);
    }
    let of = |name: &str| all.iter().find(|measured| measured.name.starts_with(name)).expect("it was measured");
    let (flat, hosts_first) = (of("2 x 2 ranks, one"), of("2 x 2 ranks, hosts"));
    ensure!(flat.loss == hosts_first.loss, "sums by hosts changed the loss: {} and {}", flat.loss, hosts_first.loss);
    let plain = of("2 x 1 rank, f32").step_s;
    let mut held = true;
    for (what, value, bar) in [
        ("hosts first, against one exchange (same bits)", flat.step_s / hosts_first.step_s, HOSTS_FIRST),
        ("int4 gradients, against f32", plain / of("int4").step_s, ENCODED),
        ("diloco every 100, against f32 in every step", plain / of("diloco, every 100").step_s, APART),
    ] {
        held &= value >= bar;
        println!("{what}: {value:.2} x, bar {bar} x: {}", if value >= bar { "met" } else { "MISSED" });
    }
    let records: Vec<Value> = all
        .iter()
        .map(|way| json!({"way": way.name, "step_s": way.step_s, "bytes_per_step": way.bytes, "loss": way.loss}))
        .collect();
    fs::write(
        root.join("target/bench/slow-links.json"),
        format!("{:#}\n", json!({"rate": options.rate, "ways": records})),
    )?;
    Ok(held)
}

fn show(measured: &Measured, plain: Option<f64>) {
    let faster = plain.map_or("-".to_owned(), |plain| format!("{:.2} x", plain / measured.step_s));
    let Measured { name, step_s, bytes, .. } = measured;
    println!("{name:<28} {:>10.1} {:>14.2} {faster:>9}", 1e3 * step_s, bytes / 1e6);
}

/// Trains on both hosts. Whole rounds are timed, and the first one does not count.
fn measure(
    binary: &Path,
    folder: &Path,
    options: &Options,
    name: &str,
    ranks: usize,
    sets: &[&str],
    round: usize,
) -> Result<Measured> {
    let runs = folder.join("runs");
    if runs.exists() {
        fs::remove_dir_all(&runs)?;
    }
    let warm = round.max(2);
    // The last step of streaming averages the whole model at once. It does not count.
    let last = usize::from(sets.iter().any(|set| set.starts_with("update.fragments=")));
    let steps = warm + options.steps.max(round) + last;
    let cable = Cable::new(Some(options.rate))?;
    let before = cable.bytes_sent()?;
    let host = |node: usize| -> Result<Child> {
        let mut command = on_host(node);
        command.arg(binary).args(["launch", "--nnodes", "2", "--node-rank", &node.to_string()]);
        command.args(["--nproc-per-node", &ranks.to_string(), "--master-addr", &address(0), "--master-port", "29400"]);
        command.args(["train", "slow.toml", "--set", &format!("training.steps={steps}")]);
        for set in sets {
            command.args(["--set", set]);
        }
        let is_set = |key: &str| sets.iter().any(|set| set.starts_with(key));
        let is_pipelined = is_set("parallel.pipeline_parallel_degree=");
        let is_divided = is_pipelined || is_set("parallel.data_parallel_shard_degree=");
        let replicas = if is_divided { 1 } else { 2 * ranks };
        command.args(["--set", &format!("parallel.data_parallel_replicate_degree={replicas}")]);
        let sequences = if is_pipelined { PIPELINED } else { 2 * ranks };
        command.args(["--set", &format!("training.global_batch_size={sequences}")]);
        Ok(command.current_dir(folder).spawn()?)
    };
    finish([host(0)?, host(1)?], name)?;
    let bytes = (cable.bytes_sent()? - before) as f64 / steps as f64;
    let metrics = fs::read_to_string(runs.join("slow/metrics.jsonl")).context("the run left no metrics")?;
    let records = metrics.lines().map(serde_json::from_str).collect::<Result<Vec<Value>, _>>()?;
    ensure!(records.len() == steps, "{name}: {} records of {steps} steps", records.len());
    let seconds: Option<f64> = records[warm..steps - last].iter().map(|record| record["step_s"].as_f64()).sum();
    let loss = records.last().and_then(|record| record["loss"].as_f64()).context("no loss")?;
    let step_s = seconds.context("no step_s")? / (steps - last - warm) as f64;
    Ok(Measured { name: name.to_owned(), step_s, bytes, loss })
}

fn peer(root: &Path, python: &Path, folder: &Path, options: &Options, way: &str, name: &str) -> Result<Measured> {
    let cable = Cable::new(Some(options.rate))?;
    let before = cable.bytes_sent()?;
    let steps = if way == "diloco" { 100 } else { options.steps };
    let host = |node: usize| -> Result<Child> {
        let mut command = on_host(node);
        command.arg(python).arg(root.join("scripts/peers/torch_slow_links.py"));
        command.args(["--way", way, "--steps", &steps.to_string(), "--rank", &node.to_string()]);
        command.args(["--master", &address(0)]).env("GLOO_SOCKET_IFNAME", "cable").current_dir(folder);
        Ok(command.stdout(if node == 0 { Stdio::piped() } else { Stdio::null() }).spawn()?)
    };
    let (first, second) = (host(0)?, host(1)?);
    let output = first.wait_with_output()?;
    finish([second], name)?;
    ensure!(output.status.success(), "{name} failed");
    let said: Value = serde_json::from_slice(&output.stdout).context("the script prints one line of JSON")?;
    let number = |key: &str| said[key].as_f64().with_context(|| format!("the script says no {key}"));
    let bytes = (cable.bytes_sent()? - before) as f64 / number("steps")?;
    Ok(Measured { name: name.to_owned(), step_s: number("step_s")?, bytes, loss: number("loss")? })
}

/// A command in a namespace, on a host with a name of its own.
fn on_host(node: usize) -> Command {
    let mut command = Command::new("ip");
    command.args(["netns", "exec", &namespace(node), "unshare", "--uts", "sh", "-c"]);
    command.args([&format!("hostname {}; exec \"$@\"", namespace(node)), "sh"]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::inherit());
    command
}

fn finish<const N: usize>(hosts: [Child; N], name: &str) -> Result<()> {
    for mut host in hosts {
        ensure!(host.wait()?.success(), "{name}: a host failed");
    }
    Ok(())
}
