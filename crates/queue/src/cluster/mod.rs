//! Runs on clusters: batch scripts for Slurm, manifests for Kubernetes (JobSet and Kueue), tasks
//! for SkyPilot.
//!
//! Each is a pure function from a [`Submission`] to text. The text carries the configuration, so
//! nothing that is edited after the submission changes a run. All follow one rule: a run whose
//! folder exists is resumed, any other one is begun. A cluster that starts the same thing again,
//! after a time limit, a preemption or a fault, therefore goes on with the run.

mod kubernetes;
mod skypilot;
mod slurm;
mod yaml;

pub use kubernetes::{Options as Kubernetes, manifest};
pub use skypilot::{Options as SkyPilot, task};
pub use slurm::{ELEMENT, Options as Slurm, script};
pub use yaml::emit;

use crate::QueueError;
use std::fmt::Write as _;

/// A run for a cluster.
#[derive(Clone, PartialEq, Debug)]
pub struct Submission {
    /// The name of the run and of its job.
    pub name: String,
    /// The folder of runs (`run.directory`), on a file system that the hosts share.
    pub directory: String,
    /// The configuration's text.
    pub config: String,
    /// Settings over it.
    pub sets: Vec<String>,
    /// The program on the hosts.
    pub program: String,
    /// Commands before the training, such as `module load`.
    pub setup: Vec<String>,
    /// Hosts.
    pub nodes: u32,
    /// Ranks on each host: processes.
    pub ranks_per_node: u32,
    /// Cores of each rank.
    pub cpus_per_rank: u32,
    /// GPUs of each host; 0 for none.
    pub gpus_per_node: u32,
    /// The name of the GPUs, where a cluster has several kinds.
    pub gpu: Option<String>,
    /// Memory of each host, such as `64G`.
    pub memory: Option<String>,
    /// Restarts after a fault of a rank.
    pub restarts: u32,
    /// Seconds before its end at which the job is told to stop: enough for a step and a checkpoint.
    pub margin_s: u64,
}

/// Lines of shell that give the ranks of a job a secret that nobody else knows, unless they have
/// one.
const SECRET_LINES: &str = "[ -n \"${TRAINYARD_JOB_SECRET:-}\" ] || \
    TRAINYARD_JOB_SECRET=$(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \\n')\n\
    export TRAINYARD_JOB_SECRET\n";
/// The delimiter of the configuration in a script.
const DELIMITER: &str = "TRAINYARD_CONFIG";
/// The longest name of an object of Kubernetes. JobSet refuses a set whose pods' names would be
/// longer than 63 characters, and adds `-workers`, `-0`, `-` with the number of the host (at most
/// five digits), and `-` with five random characters.
const NAME_MAX: usize = 63 - 8 - 2 - 6 - 6;

impl Submission {
    /// Refuses what no script can carry.
    ///
    /// # Errors
    ///
    /// Names the value and what is allowed.
    pub fn check(&self) -> Result<(), QueueError> {
        let refuse = |text: String| Err(QueueError::Refused(text));
        if self.config.lines().any(|line| line == DELIMITER) {
            return refuse(format!("the configuration has a line {DELIMITER}, which ends it in the script: remove it"));
        }
        let texts = [&self.name, &self.directory, &self.program].into_iter().chain(&self.sets).chain(&self.memory);
        if let Some(text) = texts.into_iter().find(|text| text.contains(['\n', '\r', '\0'])) {
            return refuse(format!("{text:?} is of several lines"));
        }
        if self.nodes == 0 || self.ranks_per_node == 0 || self.cpus_per_rank == 0 {
            return refuse("hosts, ranks and cores are counted from 1".to_owned());
        }
        Ok(())
    }

    /// Ranks in all.
    pub fn ranks(&self) -> u32 {
        self.nodes * self.ranks_per_node
    }

    /// Settings of a new run whose name is the shell's `name`.
    fn settings(&self, name: &str) -> String {
        let device = (self.gpus_per_node > 0 && !self.sets.iter().any(|set| set.starts_with("compute.device=")))
            .then(|| "compute.device=cuda".to_owned());
        let mut text = String::new();
        for set in self.sets.iter().cloned().chain(device) {
            // Writing to a String cannot fail.
            let _ = write!(text, " --set {}", quoted(&set));
        }
        text + &format!(" --set run.name={name}")
    }

    /// Lines of shell that write the configuration to `$config` and set the positional parameters
    /// to the arguments of `train`. `$run` is the run's folder, and `name` its name in the shell.
    fn arguments(&self, name: &str) -> String {
        let end = if self.config.ends_with('\n') { "" } else { "\n" };
        format!(
            "if [ -f \"$run/config.toml\" ]; then\n    \
             set -- --resume \"$run\"\n\
             else\n    \
             mkdir -p {directory}\n    \
             cat > \"$config\" <<'{DELIMITER}'\n\
             {config}{end}\
             {DELIMITER}\n    \
             set -- \"$config\"{settings}\n\
             fi\n",
            directory = quoted(&self.directory),
            config = self.config,
            settings = self.settings(name),
        )
    }
}

/// A word for a POSIX shell.
pub fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-./=:,+@%".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
    }
}

/// A name for objects of Kubernetes: lower-case letters, digits and dashes, with a letter in front
/// (RFC 1035).
///
/// # Errors
///
/// Nothing of the name can be kept.
pub fn object_name(name: &str) -> Result<String, QueueError> {
    let letters =
        name.to_lowercase().chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect::<String>();
    let letters = letters.trim_start_matches(|c: char| !c.is_ascii_alphabetic());
    let short: String = letters.chars().take(NAME_MAX).collect();
    let short = short.trim_end_matches('-');
    if short.is_empty() {
        return Err(QueueError::Refused(format!(
            "{name:?} leaves no name for an object of Kubernetes, which is of letters, digits and dashes: give another one by --set run.name=NAME"
        )));
    }
    Ok(short.to_owned())
}

/// The margin before a time limit: the longest step twice, because the signal may come at its
/// begin, a checkpoint three times, because others write then too, and a few seconds for starting
/// to stop.
pub fn margin_s(step_s: f64, checkpoint_s: f64) -> u64 {
    (2.0 * step_s + 3.0 * checkpoint_s + 10.0).ceil().clamp(10.0, 86_400.0) as u64
}

#[cfg(test)]
pub(crate) mod testing {
    use super::Submission;

    /// A run on two hosts with two ranks each.
    pub(crate) fn submission() -> Submission {
        Submission {
            name: "my-run".to_owned(),
            directory: "runs".to_owned(),
            config: "[training]\nsteps = 9\n".to_owned(),
            sets: vec!["optimizer.name='adamw'".to_owned()],
            program: "trainyard".to_owned(),
            setup: Vec::new(),
            nodes: 2,
            ranks_per_node: 2,
            cpus_per_rank: 4,
            gpus_per_node: 0,
            gpu: None,
            memory: None,
            restarts: 3,
            margin_s: 75,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::testing::submission;
    use super::*;

    #[test]
    fn words_survive_a_shell() {
        for word in ["a b", "it's", "$HOME", "a;b", "", "runs/a-b_1.toml", "`x`", "{i}", "é"] {
            let echo = format!("printf %s {}", quoted(word));
            let ran = std::process::Command::new("sh").args(["-c", &echo]).output().unwrap();
            assert_eq!(String::from_utf8(ran.stdout).unwrap(), word);
        }
    }

    #[test]
    fn names_of_objects() {
        assert_eq!(object_name("My run_2.0").unwrap(), "my-run-2-0");
        assert_eq!(object_name("7b-llama").unwrap(), "b-llama");
        assert_eq!(object_name(&"x-".repeat(60)).unwrap(), "x-".repeat(21).trim_end_matches('-'));
        assert_eq!(format!("{}-workers-0-65535-abcde", "x".repeat(NAME_MAX)).len(), 63);
        assert!(object_name("123").unwrap_err().to_string().contains("leaves no name"));
    }

    #[test]
    fn bad_submissions_are_refused() {
        submission().check().unwrap();
        for (bad, says) in [
            (
                Submission { config: "a = 1\nTRAINYARD_CONFIG\n".to_owned(), ..submission() },
                "has a line TRAINYARD_CONFIG",
            ),
            (Submission { name: "a\nb".to_owned(), ..submission() }, "\"a\\nb\" is of several lines"),
            (Submission { nodes: 0, ..submission() }, "counted from 1"),
        ] {
            let error = bad.check().unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }

    #[test]
    fn a_margin_holds_a_step_and_a_checkpoint() {
        assert_eq!([margin_s(0.0, 0.0), margin_s(10.0, 15.0), margin_s(1e9, 0.0)], [10, 75, 86_400]);
    }
}
