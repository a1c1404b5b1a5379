//! Real runs with a planted cause: trained with the program, diagnosed by it, and trained again
//! without the cause.

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// A cause in a real run.
struct Case {
    name: &'static str,
    /// The right verdict.
    cause: &'static str,
    /// Settings of both runs.
    sets: &'static [&'static str],
    /// Faults of the run with the cause.
    faults: &'static str,
    /// Settings of the run with the cause only.
    also: &'static [&'static str],
    /// Something beside the run with the cause.
    beside: Beside,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Beside {
    Nothing,
    /// Processes that spin.
    Spinning(usize),
    /// A control group with so many hundredths of a core.
    Limit(u32),
}

const fn case(name: &'static str, cause: &'static str, sets: &'static [&'static str], faults: &'static str) -> Case {
    Case { name, cause, sets, faults, also: &[], beside: Beside::Nothing }
}

const TWO: &[&str] = &["parallel.ranks=2", "training.micro_batch_size=1"];
const STAGES: &[&str] = &[
    "parallel.pipeline_parallel_degree=2",
    "training.micro_batch_size=1",
    "training.global_batch_size=16",
    "training.steps=30",
];
const DISK: &[&str] = &["memory.offload.optimizer=disk"];

const CASES: [Case; 16] = [
    case("slow loads", "input_bound", &[], "slow:15 rank=0 what=load"),
    case("late loads in one step of four", "input_bound", &[], "slow:60 rank=0 what=load every=4"),
    case("slow sums of gradients", "communication_bound", TWO, "slow:8 rank=0 what=reduce; slow:8 rank=1 what=reduce"),
    case(
        "slow gathers",
        "communication_bound",
        &["parallel.ranks=2", "training.micro_batch_size=1", "parallel.zero_stage=3"],
        "slow:8 rank=0 what=gather; slow:8 rank=1 what=gather",
    ),
    case("a slow rank", "straggler", TWO, "slow:4 rank=1 what=forward; slow:8 rank=1 what=backward"),
    case(
        "a slow rank in one step of two",
        "straggler",
        TWO,
        "slow:8 rank=1 what=forward every=2; slow:16 rank=1 what=backward every=2",
    ),
    case(
        "a stage with more work",
        "imbalance",
        STAGES,
        "slow:12 rank=1 what=forward unit=head; slow:12 rank=1 what=backward unit=head",
    ),
    case(
        "a slow disk below the optimizer",
        "offload_bound",
        DISK,
        "slow:6 rank=0 what=fetch; slow:6 rank=0 what=evict",
    ),
    case("slow checkpoints", "checkpoint_stall", &["checkpoint.interval_steps=4"], "slow:120 rank=0 what=snapshot"),
    case("a leak", "leak", &["training.steps=120"], "leak:2048 rank=0 what=load; slow:150 rank=0 what=clip"),
    Case {
        also: &["optimizer.learning_rate=1e8", "optimizer.weight_decay=0"],
        ..case("a learning rate that diverges", "wrong_numbers", &[], "")
    },
    case(
        "a flipped bit",
        "wrong_numbers",
        &["parallel.ranks=2", "training.micro_batch_size=1", "parallel.verify=true", "parallel.deadline_seconds=20"],
        "corrupt rank=1 step=20 instruction={reduce}",
    ),
    case(
        "a bit flipped in memory",
        "wrong_numbers",
        &["parallel.ranks=4", "training.micro_batch_size=1", "health.compare_interval_steps=10"],
        "flip rank=2 step=25",
    ),
    case(
        "a rank that hangs",
        "hang",
        &["parallel.ranks=2", "training.micro_batch_size=1", "parallel.deadline_seconds=4"],
        "hang rank=1 step=20 instruction={reduce}",
    ),
    Case {
        beside: Beside::Spinning(2),
        ..case("two processes that spin", "stolen_cores", &["training.steps=400"], "")
    },
    Case { beside: Beside::Limit(80), ..case("a limit of 0.8 cores", "throttled", &["training.steps=400"], "") },
];

/// The file of the configuration of all runs.
const CONFIG: &str = "c.toml";
const CONFIG_TEXT: &str = r#"
[model]
preset = "quickstart"
dim = 64
layers = 4
heads = 2
[tokenizer]
kind = "bytes"
[data]
train = ["text"]
[training]
sequence_length = 128
steps = 60
micro_batch_size = 2
global_batch_size = 4
"#;

/// Trains all cases, and returns the table.
pub fn run(root: &Path, only: &[String]) -> Result<String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let is_chosen = |case: &&Case| only.is_empty() || only.iter().any(|name| case.name.contains(name.as_str()));
    ensure!(CASES.iter().any(|case| is_chosen(&case)), "no real run is named {}", only.join(" or "));
    let built = Command::new(cargo).args(["build", "--locked", "--package", "trainyard"]).current_dir(root).status();
    ensure!(built.context("cannot run cargo build")?.success(), "the program does not build");
    let scratch = root.join("target/verdicts");
    if scratch.exists() {
        fs::remove_dir_all(&scratch).with_context(|| format!("cannot remove {}", scratch.display()))?;
    }
    fs::create_dir_all(scratch.join("text")).context("cannot make the folder of the runs")?;
    fs::write(scratch.join("text/a.txt"), "to be or not to be, that is the question. ".repeat(20_000))?;
    fs::write(scratch.join(CONFIG), CONFIG_TEXT).context("cannot write the configuration of the runs")?;
    let runs = Runs { program: root.join("target/debug/trainyard"), scratch };
    let mut table = String::from(
        "| planted | right verdict | first verdict | predicted saving | gained |\n|---|---|---|---|---|\n",
    );
    for case in CASES.iter().filter(is_chosen) {
        let row = runs.case(case)?;
        eprint!("{row}");
        table += &row;
    }
    Ok(table)
}

struct Runs {
    program: PathBuf,
    scratch: PathBuf,
}

impl Runs {
    fn case(&self, case: &Case) -> Result<String> {
        let name: String =
            case.name.chars().map(|letter| if letter.is_alphanumeric() { letter } else { '-' }).collect();
        self.train(case, &name, true)?;
        let report = self.doctor(&name)?;
        let first = report["verdicts"][0]["cause"].as_str().unwrap_or("nothing").to_owned();
        let verdicts = report["verdicts"].as_array().cloned().unwrap_or_default();
        let own = verdicts.iter().find(|verdict| verdict["cause"] == case.cause);
        let share = own.and_then(|verdict| {
            Some(verdict["saving"]["seconds"].as_f64()? / verdict["saving"]["step_seconds"].as_f64()?)
        });
        let (predicted, gained) = match share {
            None => ("-".to_owned(), "-".to_owned()),
            Some(share) => {
                self.train(case, &format!("{name}-cured"), false)?;
                let cured = self.doctor(&format!("{name}-cured"))?;
                let seconds = |report: &Value| report["account"]["step_s"].as_f64().context("a run without an account");
                let gained = 1.0 - seconds(&cured)? / seconds(&report)?;
                (format!("{:.1} %", 100.0 * share), format!("{:.1} %", 100.0 * gained))
            }
        };
        let words = |cause: &str| cause.replace('_', " ");
        Ok(format!("| {} | {} | {} | {predicted} | {gained} |\n", case.name, words(case.cause), words(&first)))
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.args(arguments).current_dir(&self.scratch).env_remove("TRAINYARD_FAULTS");
        command
    }

    /// The configuration and the settings of a run, as arguments.
    fn settings(&self, case: &Case, name: &str, planted: bool) -> Vec<String> {
        let also = if planted { case.also } else { &[] };
        let all = case.sets.iter().chain(also).map(|set| (*set).to_owned());
        let all = all.chain([format!("run.name={name}")]);
        std::iter::once(CONFIG.to_owned()).chain(all.flat_map(|set| ["--set".to_owned(), set])).collect()
    }

    fn train(&self, case: &Case, name: &str, planted: bool) -> Result<()> {
        let settings = self.settings(case, name, planted);
        let mut command = self.command(&["train", "--quiet"]);
        command.args(&settings).stdout(Stdio::null()).stderr(Stdio::piped());
        if planted && !case.faults.is_empty() {
            let faults = match case.faults.contains("{reduce}") {
                true => case.faults.replace("{reduce}", &self.reduction(case)?.to_string()),
                false => case.faults.to_owned(),
            };
            command.env("TRAINYARD_FAULTS", faults);
        }
        let beside = if planted { case.beside } else { Beside::Nothing };
        let _spinning = match beside {
            Beside::Spinning(count) => Spinning::start(count)?,
            _ => Spinning(Vec::new()),
        };
        let group = match beside {
            Beside::Limit(hundredths) => Some(ControlGroup::create(hundredths)?),
            _ => None,
        };
        let child = command.spawn().context("cannot run the program")?;
        if let Some(group) = &group {
            group.add(child.id())?;
        }
        let output = child.wait_with_output().context("cannot wait for the program")?;
        let may_fail = matches!(case.cause, "hang" | "wrong_numbers") && planted;
        ensure!(output.status.success() || may_fail, "{}: {}", case.name, String::from_utf8_lossy(&output.stderr));
        Ok(())
    }

    /// The number of the first reduction of rank 1's program.
    fn reduction(&self, case: &Case) -> Result<usize> {
        let mut command = self.command(&["program", "--json", "--rank", "1"]);
        let output = command.args(self.settings(case, "program", true)).output().context("cannot run the program")?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let report: Value = serde_json::from_slice(&output.stdout).context("the program is no JSON")?;
        let instructions = report["instructions"].as_array().context("a program has instructions")?;
        let is_reduce = |instruction: &Value| instruction.to_string().contains("\"reduce\"");
        instructions.iter().position(is_reduce).context("the program reduces nothing")
    }

    fn doctor(&self, name: &str) -> Result<Value> {
        let run = format!("runs/{name}");
        let output = self.command(&["doctor", "--json", &run]).output().context("cannot run the program")?;
        match serde_json::from_slice(&output.stdout) {
            Ok(report) => Ok(report),
            Err(_) => bail!("{name}: {}", String::from_utf8_lossy(&output.stderr)),
        }
    }
}

/// Processes that use a core each until they are dropped.
struct Spinning(Vec<Child>);

impl Spinning {
    fn start(count: usize) -> Result<Spinning> {
        let spin = || Command::new("sh").args(["-c", "while :; do :; done"]).spawn().context("cannot run sh");
        Ok(Spinning((0..count).map(|_| spin()).collect::<Result<_>>()?))
    }
}

impl Drop for Spinning {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // It may have been ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// A control group of its own that limits the cores of a process.
struct ControlGroup(PathBuf);

impl ControlGroup {
    fn create(hundredths: u32) -> Result<ControlGroup> {
        let name = format!("trainyard-verdicts-{}", std::process::id());
        let root = Path::new("/sys/fs/cgroup");
        let quota_us = 1000 * hundredths;
        let (folder, file, text) = match root.join("cpu/cpu.cfs_quota_us").is_file() {
            true => (root.join("cpu").join(name), "cpu.cfs_quota_us", quota_us.to_string()),
            false => (root.join(name), "cpu.max", format!("{quota_us} 100000")),
        };
        fs::create_dir(&folder).with_context(|| format!("cannot create the control group {}", folder.display()))?;
        let group = ControlGroup(folder);
        fs::write(group.0.join(file), text).with_context(|| format!("cannot limit {}", group.0.display()))?;
        Ok(group)
    }

    fn add(&self, process: u32) -> Result<()> {
        let path = self.0.join("cgroup.procs");
        fs::write(&path, process.to_string()).with_context(|| format!("cannot write {}", path.display()))
    }
}

impl Drop for ControlGroup {
    fn drop(&mut self) {
        // The process has ended, so the group is empty.
        let _ = fs::remove_dir(&self.0);
    }
}
