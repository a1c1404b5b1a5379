//! `cargo xtask overlap`: measures how much of the communication over a slow link hides behind
//! computing.
//!
//! A virtual cable (veth) joins two network namespaces. Each holds one rank, a process of its own;
//! MPI runs over TCP between them. At first the cable is as fast as the kernel allows, which gives
//! a step's compute time and its bytes. Then `tc … tbf` limits the rate so that those bytes take
//! `--share` of that time, and the run is measured again. The hidden share is
//! `1 - comm_exposed_s / comm_s`, both of rank 0 and summed over all steps but the first two.
//! `comm_s` also includes the time for which a reduction waits for the slower rank, so it is more
//! than the time on the cable, which is printed beside it.
//!
//! It needs root on Linux, the programs `ip` and `tc` (iproute2), `unshare`, and Open MPI with its
//! headers. Nothing else should run meanwhile.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::cable::{Cable, NETWORK, address, namespace, run_command};

/// GPT-2's blocks on bytes. With a vocabulary of 50,304 the last reduction of a step would be a
/// third of the communication, which no schedule can hide.
const CONFIG: &str = "\
[run]
name = 'overlap'
[model]
family = 'gpt2'
dim = 768
layers = 12
heads = 12
max_sequence_length = 512
[tokenizer]
kind = 'bytes'
[data]
train = ['text.txt']
validation_fraction = 0.0
[training]
micro_batch_size = 4
sequence_length = 512
[checkpoint]
interval_steps = 1000000
[precision]
compute = 'bf16'
[compute]
threads = 1
";
const STRATEGIES: [(&str, &str); 2] = [("DDP", "parallel.zero_stage=0"), ("ZeRO-3", "parallel.zero_stage=3")];
/// Number of steps in which caches and connections settle.
const WARMUP: usize = 2;
/// The share of communication that must be hidden.
const BAR: f64 = 0.8;

/// Arguments of `cargo xtask overlap`.
#[derive(clap::Args)]
pub struct Options {
    /// Time of a step's bytes on the cable, as a share of the step's computing.
    #[arg(long, default_value_t = 0.5)]
    share: f64,
    /// Steps of a run, of which the first two do not count.
    #[arg(long, default_value_t = 8)]
    steps: usize,
    /// Measure this program, built with the feature `mpi`, instead of building one.
    #[arg(long)]
    binary: Option<PathBuf>,
}

/// Measures both strategies. Returns true if both reach the bar.
pub fn run(root: &Path, options: &Options) -> Result<bool> {
    if options.steps <= WARMUP || !(0.01..=10.0).contains(&options.share) {
        bail!("--steps has to be more than {WARMUP}, --share from 0.01 to 10");
    }
    // Checks before minutes of compiling that namespaces are permitted.
    drop(Cable::new(None)?);
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), |folder| root.join(folder));
    let binary = match &options.binary {
        Some(path) => std::path::absolute(path)?,
        None => build(root, &target)?,
    };
    let folder = target.join("bench").join("overlap");
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    fs::write(folder.join("overlap.toml"), CONFIG)?;
    fs::write(folder.join("text.txt"), include_str!("overlap.rs").repeat(20))?;
    fs::write(folder.join(AGENT), agent_script())?;
    run_command(Command::new("chmod").arg("+x").arg(folder.join(AGENT)))?;

    println!("strategy   compute s   cable s    comm s  exposed s    hidden");
    let mut records = Vec::new();
    let mut passed = true;
    for (name, stage) in STRATEGIES {
        let free = measure(&folder, &binary, stage, options.steps, None)?;
        let bits_per_s = 8.0 * free.bytes / (options.share * free.compute_s());
        let slow = measure(&folder, &binary, stage, options.steps, Some(bits_per_s as u64))?;
        let (cable_s, hidden) = (8.0 * slow.bytes / bits_per_s, 1.0 - slow.exposed_s / slow.comm_s);
        println!(
            "{name:<10} {:>9.3} {cable_s:>9.3} {:>9.3} {:>10.3} {:>7.1} %",
            slow.compute_s(),
            slow.comm_s,
            slow.exposed_s,
            100.0 * hidden
        );
        passed &= hidden >= BAR;
        let link = json!({"gbit_per_s": bits_per_s / 1e9, "cable_s": cable_s, "bytes_per_step": slow.bytes});
        records.push(
            json!({"strategy": name, "unlimited": free.json(), "limited": slow.json(), "link": link, "hidden": hidden}),
        );
    }
    let file = target.join("bench/overlap.json");
    fs::write(&file, format!("{:#}\n", json!({"share": options.share, "bar": BAR, "strategies": records})))
        .with_context(|| format!("cannot write {}", file.display()))?;
    fs::remove_dir_all(folder.join("runs")).ok();
    println!("{}: at least {:.0} % hidden", if passed { "reached" } else { "MISSED" }, 100.0 * BAR);
    Ok(passed)
}

/// Means over the steps that count.
struct Step {
    step_s: f64,
    comm_s: f64,
    exposed_s: f64,
    /// Bytes that rank 0 sends in a step.
    bytes: f64,
}

impl Step {
    fn compute_s(&self) -> f64 {
        self.step_s - self.exposed_s
    }

    fn json(&self) -> Value {
        json!({"step_s": self.step_s, "comm_s": self.comm_s, "comm_exposed_s": self.exposed_s})
    }
}

/// Trains over a cable with the given rate.
fn measure(folder: &Path, binary: &Path, stage: &str, steps: usize, bits_per_s: Option<u64>) -> Result<Step> {
    let runs = folder.join("runs");
    if runs.exists() {
        fs::remove_dir_all(&runs).with_context(|| format!("cannot empty {}", runs.display()))?;
    }
    let cable = Cable::new(bits_per_s)?;
    let before = cable.bytes_sent()?;
    let mut command = Command::new("ip");
    command.args(["netns", "exec", &namespace(0), "unshare", "--uts", "sh", "-c"]);
    command.args([&format!("hostname {}; exec \"$@\"", namespace(0)), "sh", "mpirun"]);
    // The second namespace looks like another host, which the agent reaches.
    command.args(["--allow-run-as-root", "--bind-to", "none", "--timeout", "600", "-np", "2"]);
    command.args(["-H", &format!("{}:1,{}:1", address(0), address(1))]);
    let network = format!("{NETWORK}.0/24");
    let agent = folder.join(AGENT).display().to_string();
    for (key, value) in [
        ("plm_rsh_agent", agent.as_str()),
        ("plm_rsh_no_tree_spawn", "1"),
        ("pml", "ob1"),
        ("btl", "tcp,self"),
        ("btl_tcp_if_include", &network),
        ("oob_tcp_if_include", &network),
    ] {
        command.args(["--mca", key, value]);
    }
    command.arg(binary).args(["train", "overlap.toml", "--set", stage, "--set", &format!("training.steps={steps}")]);
    run_command(command.current_dir(folder))?;
    let bytes = (cable.bytes_sent()? - before) as f64 / steps as f64;
    let metrics = fs::read_to_string(runs.join("overlap/metrics.jsonl")).context("the run left no metrics")?;
    let counted = metrics.lines().skip(WARMUP).map(serde_json::from_str).collect::<Result<Vec<Value>, _>>()?;
    let mean = |key: &str| -> Result<f64> {
        let values = counted.iter().map(|line| line[key].as_f64());
        let sum: Option<f64> = values.sum();
        Ok(sum.with_context(|| format!("metrics without {key}"))? / counted.len() as f64)
    };
    Ok(Step { step_s: mean("step_s")?, comm_s: mean("comm_s")?, exposed_s: mean("comm_exposed_s")?, bytes })
}

const AGENT: &str = "agent.sh";

/// The script that mpirun calls instead of ssh: `agent.sh HOST COMMAND...`. The host's name differs
/// too, so that nothing is shared through memory.
fn agent_script() -> String {
    format!(
        "#!/bin/sh\nwhile [ \"${{1#-}}\" != \"$1\" ]; do shift; done\nshift\n\
         exec ip netns exec {0} unshare --uts sh -c \"hostname {0}; $*\"\n",
        namespace(1)
    )
}

/// Builds the release binary with MPI and returns its path.
fn build(root: &Path, target: &Path) -> Result<PathBuf> {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(["build", "--release", "--locked", "--package", "trainyard", "--features", "mpi"]).current_dir(root);
    if !command.status().context("cannot run cargo build")?.success() {
        bail!("the release build with MPI failed");
    }
    Ok(target.join("release/trainyard"))
}
