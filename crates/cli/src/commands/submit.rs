//! `trainyard submit`: writes a run for a cluster's scheduler and sends it.

use crate::commands::config::{load, resolve_for};
use crate::output::{chain, note, print, read};
use anyhow::{Context, Result, bail};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;
use trainyard_engine::config::{Config, Inputs};
use trainyard_queue::cluster::{
    ELEMENT, Kubernetes, SkyPilot, Slurm, Submission, manifest, margin_s, object_name, script, task,
};
use trainyard_queue::progress;

/// Submit a run to a cluster: a batch script for Slurm, a JobSet for Kubernetes, a task for
/// SkyPilot. The run goes on by itself after a time limit, a preemption or a fault, until it is
/// done.
#[derive(clap::Args)]
pub struct Args {
    /// A configuration in TOML. It travels with the job, as it is now.
    config: PathBuf,
    /// Set a key over the configuration; can be given several times. In an array {array} stands for
    /// the number of the element: --set training.seed={array}.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    sets: Vec<String>,
    /// The scheduler.
    #[arg(long, value_enum, value_name = "SCHEDULER")]
    to: Scheduler,
    /// Print the script or manifest, and send nothing.
    #[arg(long)]
    dry_run: bool,
    /// Follow the job until it ends; slurm and kubernetes.
    #[arg(long, conflicts_with = "dry_run")]
    follow: bool,
    /// Hosts.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    nodes: u32,
    /// Ranks on each host, as processes. Unset: one for each GPU, else one.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    ranks_per_node: Option<u32>,
    /// Cores of each rank. Unset: compute.threads of the configuration.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    cpus_per_rank: Option<u32>,
    /// GPUs of each host; the ranks then compute on them.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=64))]
    gpus_per_node: u32,
    /// The kind of GPU, as the scheduler calls it.
    #[arg(long, value_name = "NAME")]
    gpu: Option<String>,
    /// Memory of each host, such as 64G (Kubernetes: 64Gi).
    #[arg(long, value_name = "SIZE")]
    memory: Option<String>,
    /// Restarts after a rank has failed.
    #[arg(long, value_name = "N", default_value_t = 3)]
    max_restarts: u32,
    /// Seconds before its end at which a job is told to stop. Unset: measured from the run of
    /// --like, or of this run if it has begun: two steps and three checkpoints; else 120.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    margin: Option<u64>,
    /// A run of the same configuration on the same machines, whose steps and checkpoints were
    /// timed.
    #[arg(long, value_name = "RUN", conflicts_with = "margin")]
    like: Option<PathBuf>,
    /// A line of shell before the training, such as 'module load cuda'; can be given several times.
    #[arg(long, value_name = "LINE")]
    setup: Vec<String>,
    /// The program on the hosts.
    #[arg(long, value_name = "FILE", default_value = "trainyard")]
    program: String,
    /// Slurm: the time limit of one job, such as 24:00:00.
    #[arg(long, value_name = "TIME", help_heading = "Slurm")]
    time: Option<String>,
    /// Slurm: the partition.
    #[arg(long, value_name = "NAME", help_heading = "Slurm")]
    partition: Option<String>,
    /// Slurm: the account.
    #[arg(long, value_name = "NAME", help_heading = "Slurm")]
    account: Option<String>,
    /// Slurm: elements of an array, such as 0-3 or 1,5,7%2: a run each, NAME-ELEMENT.
    #[arg(long, value_name = "ELEMENTS", help_heading = "Slurm")]
    array: Option<String>,
    /// Slurm: a further option of sbatch, such as --sbatch=--qos=high; can be given several times.
    #[arg(long, value_name = "OPTION", help_heading = "Slurm", allow_hyphen_values = true)]
    sbatch: Vec<String>,
    /// Kubernetes: the image that holds the program.
    #[arg(long, value_name = "IMAGE", help_heading = "Kubernetes")]
    image: Option<String>,
    /// Kubernetes: the claim of the volume with data and runs, which is the working folder.
    #[arg(long, value_name = "NAME", help_heading = "Kubernetes")]
    claim: Option<String>,
    /// Kubernetes: the namespace.
    #[arg(long, value_name = "NAME", help_heading = "Kubernetes")]
    namespace: Option<String>,
    /// Kubernetes: the local queue of Kueue.
    #[arg(long, value_name = "NAME", help_heading = "Kubernetes")]
    kueue: Option<String>,
    /// SkyPilot: the bucket that keeps the runs, such as s3://my-runs.
    #[arg(long, value_name = "URL", help_heading = "SkyPilot")]
    bucket: Option<String>,
    /// SkyPilot: machines that may be taken away at any time.
    #[arg(long, help_heading = "SkyPilot")]
    spot: bool,
}

/// The values of `--to`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum Scheduler {
    /// Slurm, by sbatch.
    Slurm,
    /// Kubernetes with JobSet, by kubectl; Kueue with --kueue.
    Kubernetes,
    /// SkyPilot's managed jobs, by sky.
    Skypilot,
}

impl Scheduler {
    fn name(self) -> &'static str {
        match self {
            Scheduler::Slurm => "slurm",
            Scheduler::Kubernetes => "kubernetes",
            Scheduler::Skypilot => "skypilot",
        }
    }
}

/// The margin where nothing was measured.
const MARGIN_S: u64 = 120;
/// Interval at which a job is looked at.
const LOOK: Duration = Duration::from_secs(5);

/// Runs the command.
pub fn run(args: &Args) -> Result<ExitCode> {
    args.check_options()?;
    let config = load(Some(&args.config), &args.sets)?;
    let submission = args.submission(&config)?;
    submission.check()?;
    match args.to {
        Scheduler::Slurm => args.slurm(&config, &submission),
        Scheduler::Kubernetes => args.kubernetes(&submission),
        Scheduler::Skypilot => args.skypilot(&submission),
    }
}

impl Args {
    /// Refuses options that the scheduler does not have.
    fn check_options(&self) -> Result<()> {
        use Scheduler::{Kubernetes, Skypilot, Slurm};
        let options = [
            ("--time", self.time.is_some(), Slurm),
            ("--partition", self.partition.is_some(), Slurm),
            ("--account", self.account.is_some(), Slurm),
            ("--array", self.array.is_some(), Slurm),
            ("--sbatch", !self.sbatch.is_empty(), Slurm),
            ("--image", self.image.is_some(), Kubernetes),
            ("--claim", self.claim.is_some(), Kubernetes),
            ("--namespace", self.namespace.is_some(), Kubernetes),
            ("--kueue", self.kueue.is_some(), Kubernetes),
            ("--bucket", self.bucket.is_some(), Skypilot),
            ("--spot", self.spot, Skypilot),
        ];
        if let Some((option, _, of)) = options.iter().find(|(_, is_given, of)| *is_given && *of != self.to) {
            bail!("{option} is an option of --to {}, and this goes to {}", of.name(), self.to.name());
        }
        if self.gpu.is_some() && self.gpus_per_node == 0 {
            bail!("--gpu names a kind of GPU: say how many a host has by --gpus-per-node N");
        }
        if self.array.is_none() && self.sets.iter().any(|set| set.contains(ELEMENT)) {
            bail!("{ELEMENT} stands for the element of an array: give --array ELEMENTS");
        }
        if let Some(array) = &self.array
            && (!array.starts_with(|c: char| c.is_ascii_digit())
                || !array.chars().all(|c| c.is_ascii_digit() || ",-:%".contains(c)))
        {
            bail!("--array {array}: write elements as Slurm does: 0-3, 1,5,7, or 0-99%10 for ten at a time");
        }
        if self.follow && self.to == Scheduler::Skypilot {
            bail!("--follow: `sky jobs logs --name NAME` follows a job of SkyPilot");
        }
        Ok(())
    }

    fn submission(&self, config: &Config) -> Result<Submission> {
        let directory = &config.run.directory;
        let name = match &config.run.name {
            Some(name) => name.clone(),
            None => self.config.file_stem().map_or("run".into(), |stem| stem.to_string_lossy().into_owned()),
        };
        let run = directory.join(&name);
        if progress::has_begun(&run) {
            note(&format!(
                "{} has begun: the job goes on with it, and settings given here are not used",
                run.display()
            ));
        }
        let threads = config.compute.threads.map(|threads| threads as u32);
        let Some(cpus_per_rank) = self.cpus_per_rank.or(threads) else {
            bail!("how many cores does a rank get? give --cpus-per-rank N, or compute.threads in the configuration");
        };
        let ranks_per_node = self.ranks_per_node.unwrap_or(self.gpus_per_node.max(1));
        let submission = Submission {
            name,
            directory: directory.to_str().context("run.directory is not UTF-8")?.to_owned(),
            config: read(&self.config)?,
            // The name is given to each run by the script.
            sets: self.sets.iter().filter(|set| !set.starts_with("run.name=")).cloned().collect(),
            program: self.program.clone(),
            setup: self.setup.clone(),
            nodes: self.nodes,
            ranks_per_node,
            cpus_per_rank,
            gpus_per_node: self.gpus_per_node,
            gpu: self.gpu.clone(),
            memory: self.memory.clone(),
            restarts: self.max_restarts,
            margin_s: self.margin_s(&run)?,
        };
        self.check_ranks(&submission)?;
        Ok(submission)
    }

    /// Resolves the configuration for the ranks of the cluster. Its data may lie there only.
    fn check_ranks(&self, submission: &Submission) -> Result<()> {
        let inputs = Inputs {
            cores: (submission.cpus_per_rank * submission.ranks_per_node) as usize,
            cores_because: "cores of a host of the job".to_owned(),
            processes: Some(submission.ranks() as usize),
            sharing: submission.ranks_per_node as usize,
            ..Inputs::of_this_machine()
        };
        // Any element stands for all.
        let sets = self.sets.iter().map(|set| set.replace(ELEMENT, "0"));
        let mut sets: Vec<String> = sets.collect();
        if self.gpus_per_node > 0 {
            sets.push("compute.device=cuda".to_owned());
        }
        let config = load(Some(&self.config), &sets)?;
        if let Some(ranks) = config.parallel.ranks.filter(|ranks| *ranks != submission.ranks() as usize) {
            bail!(
                "parallel.ranks is {ranks}, and {} hosts x {} ranks are {}: give --nodes and --ranks-per-node, or leave the key out",
                submission.nodes,
                submission.ranks_per_node,
                submission.ranks()
            );
        }
        match resolve_for(&config, inputs) {
            Ok(_) => Ok(()),
            Err(error) if self.to == Scheduler::Slurm => Err(error),
            Err(error) => {
                note(&format!(
                    "the configuration is not checked against its data, which may lie elsewhere: {}",
                    chain(&error)
                ));
                Ok(())
            }
        }
    }

    /// The secret of the ranks; without one where nothing is sent.
    fn secret(&self) -> Result<String> {
        if self.dry_run { Ok("made when it is submitted".to_owned()) } else { secret() }
    }

    fn margin_s(&self, run: &Path) -> Result<u64> {
        if let Some(margin) = self.margin {
            return Ok(margin);
        }
        let measured = |run: &Path| Some((progress::longest_step_s(run)?, progress::checkpoint_write_s(run)?));
        if let Some(like) = &self.like {
            let Some((step, checkpoint)) = measured(like) else {
                bail!(
                    "--like {}: nothing was measured there: a run has a step and a checkpoint once it has trained",
                    like.display()
                );
            };
            return Ok(margin_s(step, checkpoint));
        }
        if let Some((step, checkpoint)) = measured(run) {
            return Ok(margin_s(step, checkpoint));
        }
        note(&format!(
            "a job is told to stop {MARGIN_S} s before its end, which is assumed to hold a step and a checkpoint: \
             --like RUN measures it from a run, --margin SECONDS sets it"
        ));
        Ok(MARGIN_S)
    }

    fn slurm(&self, config: &Config, submission: &Submission) -> Result<ExitCode> {
        if let Some(time) = &self.time {
            let Some(limit_s) = slurm_seconds(time) else {
                bail!("--time {time}: write a limit as Slurm does: minutes, HH:MM:SS, or D-HH:MM:SS");
            };
            if limit_s <= submission.margin_s {
                bail!(
                    "--time {time} is no longer than the {} s before its end at which the job is told to stop: give it more, or --margin SECONDS",
                    submission.margin_s
                );
            }
        }
        let options = Slurm {
            time: self.time.clone(),
            partition: self.partition.clone(),
            account: self.account.clone(),
            array: self.array.clone(),
            more: self.sbatch.clone(),
        };
        let text = script(submission, &options)?;
        if self.dry_run {
            print(text)?;
            return Ok(ExitCode::SUCCESS);
        }
        // The logs lie there.
        let directory = &config.run.directory;
        std::fs::create_dir_all(directory).with_context(|| format!("cannot create {}", directory.display()))?;
        let answer = send(Command::new("sbatch").arg("--parsable"), &text)?;
        // Of several clusters it is `JOB;CLUSTER`.
        let job = answer.trim().split(';').next().unwrap_or_default().to_owned();
        print(format_args!("job {job} is submitted: run {}, log in {}\n", submission.name, directory.display()))?;
        if self.follow { follow_slurm(&job) } else { Ok(ExitCode::SUCCESS) }
    }

    fn kubernetes(&self, submission: &Submission) -> Result<ExitCode> {
        let (Some(image), Some(claim)) = (&self.image, &self.claim) else {
            bail!(
                "--to kubernetes needs --image IMAGE, which holds the program, and --claim NAME, the volume with data and runs"
            );
        };
        let secret = self.secret()?;
        let options = Kubernetes {
            image: image.clone(),
            namespace: self.namespace.clone(),
            queue: self.kueue.clone(),
            claim: claim.clone(),
            secret,
        };
        let text = manifest(submission, &options)?;
        if self.dry_run {
            print(text)?;
            return Ok(ExitCode::SUCCESS);
        }
        print(send(Command::new("kubectl").args(["apply", "--filename", "-"]), &text)?)?;
        let name = object_name(&submission.name)?;
        if self.follow { self.follow_kubernetes(&name) } else { Ok(ExitCode::SUCCESS) }
    }

    fn follow_kubernetes(&self, name: &str) -> Result<ExitCode> {
        let mut before = String::new();
        loop {
            let mut command = Command::new("kubectl");
            command.args(["get", "jobset", name, "--output", "jsonpath={.status.terminalState} {.status.restarts}"]);
            command.args(self.namespace.iter().flat_map(|namespace| ["--namespace", namespace]));
            let now = send(&mut command, "")?;
            let (state, restarts) = now.split_once(' ').unwrap_or((&now, ""));
            if now != before {
                let restarts = if restarts.is_empty() { "0" } else { restarts };
                note(&format!("{name}: {}, {restarts} restarts", if state.is_empty() { "not ended" } else { state }));
            }
            match state {
                "Completed" => return Ok(ExitCode::SUCCESS),
                "Failed" => return Ok(ExitCode::FAILURE),
                _ => {}
            }
            before = now;
            std::thread::sleep(LOOK);
        }
    }

    fn skypilot(&self, submission: &Submission) -> Result<ExitCode> {
        if self.bucket.is_none() {
            note("without --bucket the runs lie on the machine's disk: a job that is recovered begins again");
        }
        let options = SkyPilot { bucket: self.bucket.clone(), spot: self.spot, secret: self.secret()? };
        let text = task(submission, &options)?;
        if self.dry_run {
            print(text)?;
            return Ok(ExitCode::SUCCESS);
        }
        let directory = Path::new(&submission.directory);
        std::fs::create_dir_all(directory).with_context(|| format!("cannot create {}", directory.display()))?;
        let file = directory.join(format!("{}.sky.yaml", submission.name));
        // It holds a secret.
        let mut private = std::fs::OpenOptions::new();
        private.create(true).truncate(true).write(true).mode(0o600);
        let written = private.open(&file).and_then(|mut file| file.write_all(text.as_bytes()));
        written.with_context(|| format!("cannot write {}", file.display()))?;
        let mut command = Command::new("sky");
        command.args(["jobs", "launch", "--yes", "--detach-run", "--name", &submission.name]).arg(&file);
        print(send(&mut command, "")?)?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Follows a job of Slurm, across its requeues, until it has left the queue.
fn follow_slurm(job: &str) -> Result<ExitCode> {
    let mut before = String::new();
    loop {
        let shown = Command::new("scontrol")
            .args(["--oneliner", "show", "job", job])
            .output()
            .context("cannot run scontrol")?;
        let text = String::from_utf8_lossy(&shown.stdout).into_owned();
        let all = |key: &str| -> Vec<String> {
            let fields = text.split_whitespace().filter_map(|field| field.strip_prefix(key)?.strip_prefix('='));
            fields.map(str::to_owned).collect()
        };
        let (states, restarts) = (all("JobState"), all("Restarts").join(", "));
        let now = format!("{}; restarts {restarts}", states.join(", "));
        if now != before && !states.is_empty() {
            note(&format!("job {job}: {now}"));
        }
        let is_over = |state: &String| {
            !["PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "REQUEUED"].contains(&state.as_str())
        };
        if !shown.status.success() || states.is_empty() {
            bail!("Slurm does not know job {job} any more: `sacct --jobs {job}` may");
        }
        if states.iter().all(is_over) {
            let is_done = states.iter().all(|state| state == "COMPLETED");
            return Ok(if is_done { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
        before = now;
        std::thread::sleep(LOOK);
    }
}

/// Runs a scheduler's command with `input`, and gives its output.
fn send(command: &mut Command, input: &str) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn();
    let mut child = child.with_context(|| {
        format!(
            "cannot run {name}: run this where it is installed, or print the text by --dry-run and send it from there"
        )
    })?;
    // A command that ends without reading says why by its exit code.
    let _ = child.stdin.take().map(|mut pipe| pipe.write_all(input.as_bytes()));
    let output = child.wait_with_output().with_context(|| format!("waiting for {name}"))?;
    if !output.status.success() {
        bail!("{name} refused it ({}); `--dry-run` shows what was sent", output.status);
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// A secret of 128 random bits.
fn secret() -> Result<String> {
    use std::io::Read;
    let mut bytes = [0u8; 16];
    let file = std::fs::File::open("/dev/urandom");
    file.and_then(|mut file| file.read_exact(&mut bytes)).context("cannot read /dev/urandom")?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Seconds of a time limit as Slurm writes it: minutes, `MM:SS`, `HH:MM:SS`, `D-HH`, `D-HH:MM`,
/// `D-HH:MM:SS`.
fn slurm_seconds(text: &str) -> Option<u64> {
    let number = |part: &str| part.parse::<u64>().ok().filter(|number| *number < 1_000_000);
    let (days, rest) = match text.split_once('-') {
        Some((days, rest)) => (Some(number(days)?), rest),
        None => (None, text),
    };
    let parts = rest.split(':').map(number).collect::<Option<Vec<u64>>>()?;
    let seconds = match (days, &parts[..]) {
        (None, [minutes]) => 60 * minutes,
        (None, [minutes, seconds]) => 60 * minutes + seconds,
        (Some(_), [hours]) => 3600 * hours,
        (Some(_), [hours, minutes]) => 3600 * hours + 60 * minutes,
        (_, [hours, minutes, seconds]) => 3600 * hours + 60 * minutes + seconds,
        _ => return None,
    };
    Some(86_400 * days.unwrap_or(0) + seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_limits_of_slurm() {
        for (text, seconds) in [
            ("90", Some(5400)),
            ("1:30", Some(90)),
            ("24:00:00", Some(86_400)),
            ("1-12", Some(129_600)),
            ("1-12:30", Some(131_400)),
            ("2-00:00:01", Some(172_801)),
            ("1h", None),
            ("", None),
            ("1:2:3:4", None),
            ("-5", None),
        ] {
            assert_eq!(slurm_seconds(text), seconds, "{text}");
        }
    }

    #[test]
    fn secrets_differ() {
        let (a, b) = (secret().unwrap(), secret().unwrap());
        assert!(a != b && a.len() == 32, "{a}");
    }
}
