//! Tasks for SkyPilot: managed jobs (`sky jobs launch`) that are recovered on other machines, or in
//! other clouds, when theirs are taken away.

use super::{Submission, emit, quoted};
use crate::QueueError;
use serde_json::{Value, json};

/// Options that only SkyPilot has.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Options {
    /// The bucket that keeps the folder of runs, such as `s3://my-runs`. The disk of a job that is
    /// recovered is empty.
    pub bucket: Option<String>,
    /// True for machines that may be taken away at any time.
    pub spot: bool,
    /// The secret that the ranks share; a note in its place is not for use.
    pub secret: String,
}

/// The task.
///
/// # Errors
///
/// GPUs without the name of their kind.
pub fn task(submission: &Submission, options: &Options) -> Result<String, QueueError> {
    let Submission { name, nodes, ranks_per_node, cpus_per_rank, gpus_per_node, .. } = submission;
    let mut resources = json!({ "cpus": format!("{}+", ranks_per_node * cpus_per_rank) });
    if let Some(memory) = &submission.memory {
        resources["memory"] = json!(format!("{}+", memory.trim_end_matches(|c: char| c.is_ascii_alphabetic())));
    }
    if *gpus_per_node > 0 {
        let Some(gpu) = &submission.gpu else {
            return Err(QueueError::Refused(
                "SkyPilot asks for GPUs by their name: give --gpu NAME, such as A100 or H100".to_owned(),
            ));
        };
        resources["accelerators"] = json!(format!("{gpu}:{gpus_per_node}"));
    }
    if options.spot {
        resources["use_spot"] = json!(true);
    }
    if submission.restarts > 0 {
        resources["job_recovery"] = json!({ "max_restarts_on_errors": submission.restarts });
    }
    let mut task = json!({ "name": name, "num_nodes": nodes, "workdir": ".", "resources": resources });
    if submission.ranks() > 1 {
        task["secrets"] = json!({ "TRAINYARD_JOB_SECRET": options.secret });
    }
    if let Some(bucket) = &options.bucket {
        let place = format!("~/sky_workdir/{}", submission.directory.trim_start_matches("./"));
        task["file_mounts"] = json!({ place: { "source": bucket, "mode": "MOUNT" } });
    }
    if !submission.setup.is_empty() {
        let setup: String = submission.setup.iter().map(|line| format!("{line}\n")).collect();
        task["setup"] = json!(setup);
    }
    task["run"] = Value::String(commands(submission));
    Ok(emit(&task))
}

fn commands(submission: &Submission) -> String {
    let Submission { name, directory, nodes, ranks_per_node, program, .. } = submission;
    let program = quoted(program);
    let start = match submission.ranks() {
        1 => format!("exec {program} train \"$@\"\n"),
        _ => format!(
            "exec {program} launch --nnodes {nodes} --node-rank \"$SKYPILOT_NODE_RANK\" --nproc-per-node {ranks_per_node} \\\n    \
             --master-addr \"$(echo \"$SKYPILOT_NODE_IPS\" | head -n 1)\" --master-port 29400 train \"$@\"\n"
        ),
    };
    // Each host writes the configuration for itself.
    format!(
        "set -eu\nrun={}/{}\nconfig=\"${{TMPDIR:-/tmp}}\"/{}.toml\n{}{start}",
        quoted(directory),
        quoted(name),
        quoted(name),
        submission.arguments(&quoted(name)),
    )
}

#[cfg(test)]
mod tests {
    use super::super::testing::submission;
    use super::*;

    #[test]
    fn a_task_is_as_agreed() {
        let options = Options { bucket: Some("s3://my-runs".to_owned()), spot: true, secret: "0123".to_owned() };
        let gpus = Submission {
            gpus_per_node: 8,
            gpu: Some("H100".to_owned()),
            memory: Some("64G".to_owned()),
            setup: vec!["cargo install trainyard".to_owned()],
            ..submission()
        };
        let expected = r#"name: my-run
num_nodes: 2
workdir: "."
resources:
  cpus: "8+"
  memory: "64+"
  accelerators: "H100:8"
  use_spot: true
  job_recovery:
    max_restarts_on_errors: 3
secrets:
  TRAINYARD_JOB_SECRET: "0123"
file_mounts:
  "~/sky_workdir/runs":
    source: "s3://my-runs"
    mode: MOUNT
setup: "cargo install trainyard\n"
run: |
  set -eu
  run=runs/my-run
  config="${TMPDIR:-/tmp}"/my-run.toml
  if [ -f "$run/config.toml" ]; then
      set -- --resume "$run"
  else
      mkdir -p runs
      cat > "$config" <<'TRAINYARD_CONFIG'
  [training]
  steps = 9
  TRAINYARD_CONFIG
      set -- "$config" --set 'optimizer.name='\''adamw'\''' --set compute.device=cuda --set run.name=my-run
  fi
  exec trainyard launch --nnodes 2 --node-rank "$SKYPILOT_NODE_RANK" --nproc-per-node 2 \
      --master-addr "$(echo "$SKYPILOT_NODE_IPS" | head -n 1)" --master-port 29400 train "$@"
"#;
        assert_eq!(task(&gpus, &options).unwrap(), expected);
        let one = Submission { nodes: 1, ranks_per_node: 1, restarts: 0, ..submission() };
        let text = task(&one, &Options::default()).unwrap();
        assert!(text.contains("exec trainyard train \"$@\"\n"), "{text}");
        assert!(!text.contains("job_recovery") && !text.contains("secrets"), "{text}");
        let error = task(&Submission { gpus_per_node: 8, ..one }, &Options::default()).unwrap_err().to_string();
        assert!(error.contains("give --gpu NAME"), "{error}");
    }
}
