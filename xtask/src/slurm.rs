//! `cargo xtask slurm`: runs what `trainyard submit --to slurm` writes on a real Slurm.
//!
//! One controller and two nodes of one core each run on this machine, with a key of their own for
//! munge, below `target/slurm`. A run is submitted with a time limit that is too short for it: it
//! is told of the limit, writes a checkpoint, queues its own job again, and ends with the weights
//! of a run that nothing disturbed, every step recorded once. Slurm counts limits in minutes and
//! waits two between a requeue and the next start, so this takes some ten minutes. It needs root,
//! and Debian's packages `slurm-wlm` and `munge`.

use crate::bench::target_folder;
use anyhow::{Context, Result, bail, ensure};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Arguments of `cargo xtask slurm`.
#[derive(clap::Args)]
pub struct Options {
    /// The program. Default: the debug build, made first.
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
    /// Seconds of training that the run is to take: more than the time limit of a minute or two.
    #[arg(long, default_value_t = 150.0)]
    seconds: f64,
}

/// The time limit of the run that is disturbed, in minutes.
const LIMIT_MIN: u64 = 2;
/// Seconds before the limit at which it is told. Slurm may be early by a minute.
const MARGIN_S: u64 = 30;
/// Steps of the run that finds how long a step takes.
const TRIAL_STEPS: u64 = 300;
/// Time limit for the whole of a submission.
const PATIENCE: Duration = Duration::from_secs(1500);
/// The programs of Slurm and munge that the chore runs.
const PROGRAMS: [&str; 6] = ["munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol"];

/// Runs all of it; false if the run does not end as it should.
pub fn run(root: &Path, options: &Options) -> Result<bool> {
    let missing: Vec<&str> = PROGRAMS.into_iter().filter(|name| find(name).is_none()).collect();
    ensure!(missing.is_empty(), "there is no {}: `apt-get install slurm-wlm munge` has them", missing.join(", "));
    let program = program(root, options.program.as_deref())?;
    let folder = target_folder(root).join("slurm");
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    fs::create_dir_all(folder.join("work")).with_context(|| format!("cannot create {}", folder.display()))?;
    let slurm = Slurm::start(&folder)?;
    let work = folder.join("work");
    fs::write(work.join("text.txt"), "to be or not to be, that is the question. ".repeat(200))?;
    let submit = |name: &str, steps: u64, limit: &str| -> Result<(String, f64)> {
        fs::write(work.join("c.toml"), config(name, steps))?;
        let mut command = slurm.command(&program);
        command.current_dir(&work).args(["submit", "c.toml", "--to", "slurm", "--nodes", "2", "--cpus-per-rank", "1"]);
        command.args(["--time", limit, "--margin", &MARGIN_S.to_string(), "--setup", "export MASTER_ADDR=127.0.0.1"]);
        command.arg("--program").arg(&program);
        let began = Instant::now();
        let submitted = command.output().context("cannot run the program")?;
        let said = String::from_utf8_lossy(&submitted.stdout).into_owned();
        ensure!(submitted.status.success(), "submit: {said}{}", String::from_utf8_lossy(&submitted.stderr));
        let job = said.split_whitespace().nth(1).context("no number of a job")?.to_owned();
        println!("job {job} ({name}): {steps} steps, at most {limit} each time");
        let fields = slurm.wait(&job)?;
        ensure!(
            fields.get("JobState").is_some_and(|state| state == "COMPLETED"),
            "job {job} ended as {:?}: see {}",
            fields.get("JobState"),
            work.join("runs").display()
        );
        Ok((fields.get("Restarts").cloned().unwrap_or_default(), began.elapsed().as_secs_f64()))
    };
    submit("trial", TRIAL_STEPS, "10")?;
    let mut times: Vec<f64> = steps_of(&work, "trial")?.iter().map(|(_, seconds)| *seconds).collect();
    times.sort_by(f64::total_cmp);
    let step_s = times[times.len() / 2];
    let steps = (options.seconds / step_s) as u64;
    println!("{:.2} ms a step on two nodes", 1e3 * step_s);
    let (none, whole_s) = submit("whole", steps, "30")?;
    let (restarts, cut_s) = submit("cut", steps, &LIMIT_MIN.to_string())?;
    let recorded: Vec<u64> = steps_of(&work, "cut")?.iter().map(|(step, _)| *step).collect();
    let in_order = recorded == (1..=steps).collect::<Vec<_>>();
    let same = tensors(&work, "cut")? == tensors(&work, "whole")?;
    println!("undisturbed: {whole_s:.0} s, {none} restarts");
    println!(
        "limit of {LIMIT_MIN} min: {cut_s:.0} s, {restarts} restarts, steps 1 to {steps} each once: {in_order}, same weights: {same}"
    );
    let met = restarts.parse::<u64>().is_ok_and(|restarts| restarts > 0) && none == "0" && in_order && same;
    println!(
        "bar: submitted, on 2 nodes, time limit reached, requeued, the bits of an undisturbed run: {}",
        if met { "met" } else { "MISSED" }
    );
    Ok(met)
}

/// The program that was given, or the debug build.
pub fn program(root: &Path, given: Option<&Path>) -> Result<PathBuf> {
    if let Some(program) = given {
        return std::path::absolute(program).with_context(|| format!("cannot use {}", program.display()));
    }
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let built = Command::new(cargo).args(["build", "--locked", "--package", "trainyard"]).current_dir(root).status();
    ensure!(built.context("cannot run cargo build")?.success(), "the program does not build");
    Ok(target_folder(root).join("debug/trainyard"))
}

/// A configuration of a small model.
pub fn config(name: &str, steps: u64) -> String {
    format!(
        "[run]\nname = '{name}'\n[model]\nfamily = 'llama'\ndim = 64\nlayers = 2\nheads = 2\n[tokenizer]\nkind = 'bytes'\n\
         [data]\ntrain = 'text.txt'\nvalidation_fraction = 0\n[training]\nsteps = {steps}\nsequence_length = 64\n\
         micro_batch_size = 2\n[compute]\nthreads = 1\n[checkpoint]\ninterval_steps = 500\n[precision]\ncompute = 'f32'\n"
    )
}

/// The path of a program. Folders of daemons are searched too, which are not always on the path.
fn find(name: &str) -> Option<PathBuf> {
    let path = std::env::var("PATH").unwrap_or_default();
    let folders = path.split(':').chain(["/usr/sbin", "/sbin"]);
    folders.map(|folder| Path::new(folder).join(name)).find(|file| file.is_file())
}

/// A controller, two nodes and munge.
struct Slurm {
    conf: PathBuf,
    /// In the order in which they were started.
    daemons: Vec<Child>,
}

impl Slurm {
    fn start(folder: &Path) -> Result<Slurm> {
        let host = Command::new("hostname").arg("-s").output().context("cannot run hostname")?;
        let host = String::from_utf8_lossy(&host.stdout).trim().to_owned();
        let known = Command::new("getent").args(["hosts", &host]).output().context("cannot run getent")?;
        ensure!(known.status.success(), "the name {host} means no address here: add it to /etc/hosts");
        let place = |name: &str| folder.join(name).display().to_string();
        let mut key = vec![0u8; 128];
        std::io::Read::read_exact(&mut File::open("/dev/urandom")?, &mut key)?;
        fs::write(folder.join("munge.key"), key)?;
        let private = <fs::Permissions as std::os::unix::fs::PermissionsExt>::from_mode(0o400);
        fs::set_permissions(folder.join("munge.key"), private)?;
        fs::create_dir_all(folder.join("state"))?;
        let conf = folder.join("slurm.conf");
        let text = format!(
            "ClusterName=trainyard\nSlurmctldHost={host}\nSlurmUser=root\nAuthType=auth/munge\nAuthInfo=socket={munge}\n\
             CredType=cred/munge\nProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nStateSaveLocation={state}\n\
             SlurmdSpoolDir={folder}/spool.%n\nSlurmctldPidFile={folder}/slurmctld.pid\nSlurmdPidFile={folder}/slurmd.%n.pid\n\
             SlurmctldLogFile={folder}/slurmctld.log\nSlurmdLogFile={folder}/slurmd.%n.log\nSlurmctldPort=16817\n\
             ReturnToService=2\nSelectType=select/cons_tres\nSchedulerType=sched/backfill\nKillWait=10\nMpiDefault=none\n\
             NodeName=n[1-2] NodeHostname={host} Port=[17001-17002] CPUs=1 RealMemory=500 State=UNKNOWN\n\
             PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n",
            munge = place("munge.socket"),
            state = place("state"),
            folder = folder.display(),
        );
        fs::write(&conf, text)?;
        let mut slurm = Slurm { conf, daemons: Vec::new() };
        let files = ["key-file", "socket", "pid-file", "log-file", "seed-file"];
        let names = ["munge.key", "munge.socket", "munge.pid", "munge.log", "munge.seed"];
        let options = files.iter().zip(names).map(|(option, name)| format!("--{option}={}", place(name)));
        let options: Vec<String> = options.collect();
        slurm.daemon(folder, "munged", &[&["--foreground".to_owned(), "--force".to_owned()], &options[..]].concat())?;
        let start = Instant::now();
        while !folder.join("munge.socket").exists() {
            ensure!(start.elapsed() < Duration::from_secs(20), "munged does not come up: see {}", folder.display());
            std::thread::sleep(Duration::from_millis(100));
        }
        slurm.daemon(folder, "slurmctld", &["-D".to_owned()])?;
        for node in ["n1", "n2"] {
            slurm.daemon(folder, "slurmd", &["-D".to_owned(), "-N".to_owned(), node.to_owned()])?;
        }
        let start = Instant::now();
        loop {
            let shown = slurm.command(Path::new("sinfo")).args(["--noheader", "--format=%D %t"]).output()?;
            if String::from_utf8_lossy(&shown.stdout).trim() == "2 idle" {
                return Ok(slurm);
            }
            ensure!(start.elapsed() < Duration::from_secs(60), "the nodes do not come up: see {}", folder.display());
            std::thread::sleep(Duration::from_millis(500));
        }
    }

    fn daemon(&mut self, folder: &Path, name: &str, arguments: &[String]) -> Result<()> {
        let program = find(name).with_context(|| format!("there is no {name}"))?;
        let said = File::create(folder.join(format!("{name}-{}.out", self.daemons.len())))?;
        let mut command = self.command(&program);
        command.args(arguments).stdin(Stdio::null()).stdout(said.try_clone()?).stderr(said);
        self.daemons.push(command.spawn().with_context(|| format!("cannot start {name}"))?);
        Ok(())
    }

    /// A program that uses this Slurm.
    fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command.env("SLURM_CONF", &self.conf);
        command
    }

    /// The fields of the job, once it is over.
    fn wait(&self, job: &str) -> Result<BTreeMap<String, String>> {
        let start = Instant::now();
        let mut before = String::new();
        loop {
            let shown = self.command(Path::new("scontrol")).args(["--oneliner", "show", "job", job]).output()?;
            let text = String::from_utf8_lossy(&shown.stdout).into_owned();
            let fields = text.split_whitespace().filter_map(|field| field.split_once('='));
            let fields: BTreeMap<String, String> =
                fields.map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
            let state = fields.get("JobState").cloned().unwrap_or_default();
            if state != before {
                println!("  {:>5.0} s  {state}", start.elapsed().as_secs_f64());
                before.clone_from(&state);
            }
            if !["PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED"].contains(&state.as_str()) {
                return Ok(fields);
            }
            if start.elapsed() > PATIENCE {
                bail!("job {job} does not end: {text}");
            }
            std::thread::sleep(Duration::from_millis(500));
        }
    }
}

impl Drop for Slurm {
    fn drop(&mut self) {
        // Jobs first, so that none is left without its daemon; a daemon that has ended cannot be
        // killed.
        let _ = self.command(Path::new("scancel")).args(["--user=root"]).stderr(Stdio::null()).status();
        std::thread::sleep(Duration::from_secs(2));
        for daemon in self.daemons.iter_mut().rev() {
            let _ = Command::new("kill").args(["-TERM", &daemon.id().to_string()]).status();
            let _ = daemon.wait();
        }
    }
}

/// The recorded steps of a run, each with its seconds.
fn steps_of(work: &Path, run: &str) -> Result<Vec<(u64, f64)>> {
    let path = work.join("runs").join(run).join("metrics.jsonl");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let step = |line: &str| -> Result<(u64, f64)> {
        let value: serde_json::Value = serde_json::from_str(line)?;
        let step = value["step"].as_u64().context("a record without a step")?;
        Ok((step, value["step_s"].as_f64().context("a record without step_s")?))
    };
    text.lines().map(step).collect()
}

/// The tensor files of a run's newest checkpoint.
fn tensors(work: &Path, run: &str) -> Result<BTreeMap<String, Vec<u8>>> {
    let folder = work.join("runs").join(run).join("checkpoints");
    let steps = fs::read_dir(&folder).with_context(|| format!("cannot list {}", folder.display()))?;
    let steps = steps.flatten().map(|entry| entry.path());
    let is_step = |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("step-"));
    let newest = steps.filter(is_step).max().with_context(|| format!("no checkpoint in {}", folder.display()))?;
    let mut tensors = BTreeMap::new();
    for entry in fs::read_dir(&newest)?.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.ends_with(".safetensors") {
            tensors.insert(name, fs::read(entry.path())?);
        }
    }
    ensure!(!tensors.is_empty(), "no tensors in {}", newest.display());
    Ok(tensors)
}
