//! Shared parts of the program's tests: a folder with a small text and configuration, and a way to
//! run the program in it.

#![allow(dead_code, reason = "every test binary uses a part of it")]

pub mod images;

use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Time limit for anything that a test waits for.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A model that makes a step in milliseconds.
pub const TINY: &str = "\
[run]
name = 'tiny'

[model]
family = 'llama'
dim = 32
layers = 2
heads = 2
max_sequence_length = 32

[tokenizer]
kind = 'bytes'

[data]
train = ['text.txt']
validation_fraction = 0.05

[training]
steps = 12
micro_batch_size = 4
sequence_length = 32

[optimizer]
learning_rate = 1e-2

[precision]
compute = 'f32'

[compute]
threads = 1

[checkpoint]
interval_steps = 5

[evaluation]
tokens_max = 512
";

/// A temporary folder with `text.txt` and `tiny.toml`.
pub struct Folder(tempfile::TempDir);

/// The exit code and output of a command.
#[derive(Debug)]
pub struct Ran {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Ran {
    pub fn new(output: Output) -> Ran {
        let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
        Ran { code: output.status.code(), stdout: text(&output.stdout), stderr: text(&output.stderr) }
    }

    /// Fails the test unless the command succeeded.
    pub fn ok(self) -> Ran {
        assert_eq!(self.code, Some(0), "{}\n{}", self.stdout, self.stderr);
        self
    }
}

impl Folder {
    pub fn new() -> Folder {
        let folder = Folder(tempfile::tempdir().expect("a temporary folder"));
        let words = ["rank", "shard", "gather", "reduce", "the", "a", "of", "step", "loss", "batch"];
        let line = |i: usize| {
            let word = |j: usize| words[(i * 7 + j * j * 3 + i * j) % words.len()];
            (0..9).map(word).collect::<Vec<_>>().join(" ") + ".\n"
        };
        folder.write("text.txt", (0..400).map(line).collect::<String>());
        folder.write("tiny.toml", TINY);
        folder
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    pub fn join(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    pub fn write(&self, name: &str, text: impl AsRef<[u8]>) {
        fs::write(self.join(name), text).expect("a temporary folder can be written");
    }

    /// The program with `arguments`, in this folder.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_trainyard"));
        self.prepare(command.args(arguments));
        command
    }

    /// Lets `command` run in this folder, in an environment that is the same everywhere.
    pub fn prepare(&self, command: &mut Command) {
        command.current_dir(self.path()).stdin(Stdio::null()).env("NO_COLOR", "1");
        // The environment of a machine without cargo's registry and without profiles.
        command.env("CARGO_HOME", self.join("no-cargo")).env("XDG_CACHE_HOME", self.join("cache"));
        command.env_remove("OMP_NUM_THREADS");
        for profile in ["", "PROCESSES_", "GPU_", "GPU_PROCESSES_"] {
            command.env_remove(format!("TRAINYARD_{profile}PROFILE"));
        }
    }

    /// Trains the run `name` of the configuration `config`.
    pub fn train(&self, config: &str, name: &str, sets: &[&str]) -> Ran {
        let name = format!("run.name={name}");
        let mut arguments = vec!["train", config, "--set", &name];
        sets.iter().for_each(|set| arguments.extend(["--set", set]));
        self.run(&arguments)
    }

    pub fn run(&self, arguments: &[&str]) -> Ran {
        Ran::new(self.command(arguments).output().expect("the program starts"))
    }
}

/// Contents of tensor files by name.
pub type Tensors = BTreeMap<String, Vec<u8>>;

/// The tensor files of every checkpoint of a run, by the step's folder.
pub fn checkpoints(run: &Path) -> BTreeMap<String, Tensors> {
    let name = |path: &Path| path.file_name().expect("a name").to_string_lossy().into_owned();
    let list = |folder: &Path| {
        let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        entries.map(|entry| entry.expect("listed").path()).collect::<Vec<_>>()
    };
    let tensors = |step: &Path| -> Tensors {
        let files = list(step).into_iter().filter(|path| path.extension().is_some_and(|end| end == "safetensors"));
        files.map(|path| (name(&path), fs::read(&path).expect("a file"))).collect()
    };
    let steps = list(&run.join("checkpoints")).into_iter().filter(|path| name(path).starts_with("step-"));
    steps.map(|step| (name(&step), tensors(&step))).collect()
}

/// The step's folder and the tensor files of the newest checkpoint of a run.
pub fn tensors(run: &Path) -> (String, Tensors) {
    let (step, tensors) = checkpoints(run).pop_last().expect("a checkpoint");
    assert!(!tensors.is_empty(), "no tensors in {step}");
    (step, tensors)
}

/// A port at which nobody listens.
pub fn free_port() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string()
}

/// The steps that a run has recorded.
pub fn metrics(folder: &Folder, name: &str) -> usize {
    let metrics = folder.join(&format!("runs/{name}/metrics.jsonl"));
    fs::read_to_string(&metrics).map_or(0, |text| text.lines().count())
}

/// Waits until the run has made `steps` steps.
pub fn wait_for_steps(folder: &Folder, name: &str, steps: usize) {
    let began = Instant::now();
    while metrics(folder, name) < steps {
        assert!(began.elapsed() < PATIENCE, "{name} does not come to step {steps}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub fn send(signal: &str, process: &str) {
    assert!(Command::new("kill").args([signal, process]).status().expect("kill runs").success());
}

/// The lines of a record of a run.
pub fn record(folder: &Folder, run: &str, file: &str) -> Vec<Value> {
    let text = fs::read_to_string(folder.join("runs").join(run).join(file)).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The losses of a run's steps, as they are written.
pub fn losses(folder: &Folder, run: &str) -> Vec<String> {
    record(folder, run, "metrics.jsonl").iter().map(|step| step["loss"].to_string()).collect()
}
