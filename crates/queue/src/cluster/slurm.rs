//! Batch scripts for Slurm.
//!
//! Slurm signals the script (`--signal=B:USR1@SECONDS`) before the time limit. The script has Slurm
//! send SIGTERM to the ranks, which finish their step and write a checkpoint, and then requeues its
//! own job: the element of an array, not the array. The signal must not go to srun, which kills its
//! tasks on SIGTERM. The supervisor gets SIGINT, which it does not pass on, so it knows why the
//! ranks end. When a job is cancelled or preempted, Slurm signals its ranks by itself, and the
//! script only waits for them.

use super::{SECRET_LINES, Submission, quoted};
use crate::QueueError;
use std::fmt::Write as _;

/// Options that only Slurm has.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Options {
    /// The time limit, as Slurm writes it: `24:00:00`.
    pub time: Option<String>,
    /// The partition.
    pub partition: Option<String>,
    /// The account.
    pub account: Option<String>,
    /// Elements of an array, as Slurm writes them: `0-3`, `1,5,7%2`. In settings `{array}` stands
    /// for the number of the element.
    pub array: Option<String>,
    /// Further options of sbatch.
    pub more: Vec<String>,
}

/// The words for the number of an array's element, in settings.
pub const ELEMENT: &str = "{array}";

/// The script.
///
/// # Errors
///
/// A value that a line of `#SBATCH` cannot carry.
pub fn script(submission: &Submission, options: &Options) -> Result<String, QueueError> {
    let Submission { name, directory, nodes, ranks_per_node, cpus_per_rank, gpus_per_node, .. } = submission;
    let mut text = String::from(
        "#!/bin/bash\n# Made by `trainyard submit`. It trains until the run is done, over as many jobs as that takes.\n",
    );
    let log = if options.array.is_some() { "%A_%a" } else { "%j" };
    let gpus = submission.gpu.as_ref().map_or(format!("{gpus_per_node}"), |gpu| format!("{gpu}:{gpus_per_node}"));
    let directives = [
        Some(format!("job-name={name}")),
        Some(format!("nodes={nodes}")),
        Some(format!("ntasks-per-node={ranks_per_node}")),
        Some(format!("cpus-per-task={cpus_per_rank}")),
        (*gpus_per_node > 0).then(|| format!("gpus-per-node={gpus}")),
        submission.memory.as_ref().map(|memory| format!("mem={memory}")),
        options.time.as_ref().map(|time| format!("time={time}")),
        options.partition.as_ref().map(|partition| format!("partition={partition}")),
        options.account.as_ref().map(|account| format!("account={account}")),
        options.array.as_ref().map(|array| format!("array={array}")),
        Some(format!("signal=B:USR1@{}", submission.margin_s)),
        Some("requeue".to_owned()),
        Some("open-mode=append".to_owned()),
        Some(format!("output={directory}/{name}-{log}.log")),
    ];
    check(submission, options)?;
    for directive in
        directives.into_iter().flatten().chain(options.more.iter().map(|more| more.trim_start_matches('-').to_owned()))
    {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "#SBATCH --{directive}");
    }
    let (job, own_name) = match options.array {
        Some(_) => {
            ("${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}", format!("{}-\"$SLURM_ARRAY_TASK_ID\"", quoted(name)))
        }
        None => ("$SLURM_JOB_ID", quoted(name)),
    };
    let folder = quoted(directory);
    let setup: String = submission.setup.iter().map(|line| format!("{line}\n")).collect();
    let mut arguments = submission.arguments("\"$name\"");
    if options.array.is_some() {
        let number = |line: &str| match line.trim_start().starts_with("set -- \"$config\"") {
            // Inside quotes of a setting: end them, give the number, begin again.
            true => line.replace(ELEMENT, "'\"$SLURM_ARRAY_TASK_ID\"'") + "\n",
            false => format!("{line}\n"),
        };
        arguments = arguments.lines().map(number).collect();
    }
    let secret = if submission.ranks() > 1 { SECRET_LINES } else { "" };
    let _ = write!(
        text,
        r#"
set -u
{setup}{secret}name={own_name}
run={folder}/"$name"
config="$run.toml"
job="{job}"
{arguments}
asked=
training=
stop() {{
    asked=yes
    echo "told of the time limit: stopping at the next step"
    [ -z "$training" ] || kill -INT "$training"
    scancel --signal=TERM "$SLURM_JOB_ID"
}}
trap stop USR1
trap : TERM

{program} supervise --max-restarts {restarts} -- \
    srun --kill-on-bad-exit=1 --cpu-bind=none {program} train "$@" &
training=$!
wait "$training"
code=$?
# A signal interrupts the waiting.
while kill -0 "$training" 2>/dev/null; do
    wait "$training"
    code=$?
done
# 1 and 2 are errors that would come again.
if [ -n "$asked" ] && [ "$code" -gt 2 ]; then
    echo "stopped with exit code $code; job $job is queued again"
    scontrol requeue "$job" && exit 0
fi
exit "$code"
"#,
        program = quoted(&submission.program),
        restarts = submission.restarts,
    );
    Ok(text)
}

/// Refuses what sbatch would read otherwise: it splits lines of `#SBATCH` at white space, and
/// replaces `%` in names of files.
fn check(submission: &Submission, options: &Options) -> Result<(), QueueError> {
    let refuse = |what: &str, text: &str, bad: &str| {
        let text = format!("{what} {text:?} cannot stand in a batch script: leave out {bad}");
        Err(QueueError::Refused(text))
    };
    let splits = |c: char| c.is_whitespace() || c.is_control() || "\"'\\#".contains(c);
    for (what, text) in [("run.name", &submission.name), ("run.directory", &submission.directory)] {
        if text.contains(|c: char| splits(c) || c == '%') {
            return refuse(what, text, "white space, quotes, backslashes, # and %");
        }
    }
    let values = [
        ("--gpu", &submission.gpu),
        ("--memory", &submission.memory),
        ("--time", &options.time),
        ("--partition", &options.partition),
        ("--account", &options.account),
        ("--array", &options.array),
    ];
    for (what, text) in values.into_iter().filter_map(|(what, text)| Some((what, text.as_ref()?))) {
        if text.contains(splits) {
            return refuse(what, text, "white space, quotes, backslashes and #");
        }
    }
    match options.more.iter().find(|more| more.contains(['\n', '\r'])) {
        Some(more) => refuse("--sbatch", more, "line ends"),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::submission;
    use super::*;

    #[test]
    fn a_script_is_as_agreed() {
        let options = Options { time: Some("01:00:00".to_owned()), ..Options::default() };
        let expected = r#"#!/bin/bash
# Made by `trainyard submit`. It trains until the run is done, over as many jobs as that takes.
#SBATCH --job-name=my-run
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=4
#SBATCH --time=01:00:00
#SBATCH --signal=B:USR1@75
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=runs/my-run-%j.log

set -u
[ -n "${TRAINYARD_JOB_SECRET:-}" ] || TRAINYARD_JOB_SECRET=$(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \n')
export TRAINYARD_JOB_SECRET
name=my-run
run=runs/"$name"
config="$run.toml"
job="$SLURM_JOB_ID"
if [ -f "$run/config.toml" ]; then
    set -- --resume "$run"
else
    mkdir -p runs
    cat > "$config" <<'TRAINYARD_CONFIG'
[training]
steps = 9
TRAINYARD_CONFIG
    set -- "$config" --set 'optimizer.name='\''adamw'\''' --set run.name="$name"
fi

asked=
training=
stop() {
    asked=yes
    echo "told of the time limit: stopping at the next step"
    [ -z "$training" ] || kill -INT "$training"
    scancel --signal=TERM "$SLURM_JOB_ID"
}
trap stop USR1
trap : TERM

trainyard supervise --max-restarts 3 -- \
    srun --kill-on-bad-exit=1 --cpu-bind=none trainyard train "$@" &
training=$!
wait "$training"
code=$?
# A signal interrupts the waiting.
while kill -0 "$training" 2>/dev/null; do
    wait "$training"
    code=$?
done
# 1 and 2 are errors that would come again.
if [ -n "$asked" ] && [ "$code" -gt 2 ]; then
    echo "stopped with exit code $code; job $job is queued again"
    scontrol requeue "$job" && exit 0
fi
exit "$code"
"#;
        assert_eq!(script(&submission(), &options).unwrap(), expected);
    }

    #[test]
    fn what_sbatch_would_read_otherwise_is_refused() {
        let plain = Options::default();
        let part = Options { partition: Some("a b".to_owned()), ..Options::default() };
        let more = Options { more: vec!["--qos=a\n#SBATCH --nodes=9".to_owned()], ..Options::default() };
        for (submission, options, says) in [
            (Submission { name: "my run".to_owned(), ..submission() }, &plain, "run.name \"my run\" cannot stand"),
            (Submission { directory: "runs/%j".to_owned(), ..submission() }, &plain, "run.directory \"runs/%j\""),
            (Submission { memory: Some("1G\n".to_owned()), ..submission() }, &plain, "--memory \"1G\\n\""),
            (submission(), &part, "--partition \"a b\""),
            (submission(), &more, "leave out line ends"),
        ] {
            let error = script(&submission, options).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }

    #[test]
    fn an_array_names_runs_and_requeues_by_element() {
        let array = Submission {
            sets: vec!["training.seed={array}".to_owned()],
            gpus_per_node: 4,
            gpu: Some("h100".to_owned()),
            memory: Some("64G".to_owned()),
            setup: vec!["module load cuda".to_owned()],
            ..submission()
        };
        let options = Options {
            array: Some("0-3%2".to_owned()),
            partition: Some("gpu".to_owned()),
            account: Some("lab".to_owned()),
            more: vec!["--qos=high".to_owned()],
            time: None,
        };
        let text = script(&array, &options).unwrap();
        for line in [
            "#SBATCH --array=0-3%2\n",
            "#SBATCH --gpus-per-node=h100:4\n",
            "#SBATCH --mem=64G\n",
            "#SBATCH --partition=gpu\n#SBATCH --account=lab\n",
            "#SBATCH --output=runs/my-run-%A_%a.log\n#SBATCH --qos=high\n",
            "\nset -u\nmodule load cuda\n[ -n ",
            "\nexport TRAINYARD_JOB_SECRET\nname=my-run-\"$SLURM_ARRAY_TASK_ID\"\n",
            "job=\"${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}\"\n",
            " --set 'training.seed='\"$SLURM_ARRAY_TASK_ID\"'' --set compute.device=cuda --set run.name=\"$name\"\n",
        ] {
            assert!(text.contains(line), "no {line:?} in\n{text}");
        }
        assert!(!text.contains("--time"), "{text}");
    }

    /// The script as a shell runs it, with stand-ins for the programs of Slurm: it stops, requeues
    /// its own element, and goes on where the run's folder is.
    #[test]
    fn a_script_stops_requeues_and_resumes() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            let all = <std::fs::Permissions as std::os::unix::fs::PermissionsExt>::from_mode(0o755);
            std::fs::set_permissions(&path, all).unwrap();
        };
        std::fs::create_dir(folder.path().join("bin")).unwrap();
        // The ranks obey SIGTERM, after the first step of a new run.
        write(
            "bin/trainyard",
            "#!/bin/sh\necho \"$@\" >> calls\ncase \"$*\" in *--resume*) exit 0;; esac\n\
             mkdir -p runs/my-run-2 && touch runs/my-run-2/config.toml\n\
             trap 'exit 130' TERM\necho $$ > pid\nkill -USR1 \"$PPID\"\nwhile :; do sleep 0.01; done\n",
        );
        write("bin/scancel", "#!/bin/sh\necho \"scancel $*\" >> calls\nkill -TERM $(cat pid)\n");
        write("bin/scontrol", "#!/bin/sh\necho \"scontrol $*\" >> calls\n");
        let options = Options { array: Some("2".to_owned()), ..Options::default() };
        let array = Submission { sets: vec!["training.seed={array}".to_owned()], ..submission() };
        write("job.sh", &script(&array, &options).unwrap());
        let run = || {
            let path = format!("{}:{}", folder.path().join("bin").display(), std::env::var("PATH").unwrap());
            let mut command = std::process::Command::new("bash");
            command.arg("job.sh").current_dir(folder.path()).env("PATH", path);
            command.envs([("SLURM_JOB_ID", "8"), ("SLURM_ARRAY_JOB_ID", "7"), ("SLURM_ARRAY_TASK_ID", "2")]);
            command.output().unwrap()
        };
        let first = run();
        let said = String::from_utf8_lossy(&first.stdout);
        assert!(first.status.success() && said.contains("job 7_2 is queued again"), "{first:?}");
        assert!(run().status.success());
        let calls = std::fs::read_to_string(folder.path().join("calls")).unwrap();
        let begin = "supervise --max-restarts 3 -- srun --kill-on-bad-exit=1 --cpu-bind=none trainyard train";
        let expected = format!(
            "{begin} runs/my-run-2.toml --set training.seed=2 --set run.name=my-run-2\n\
             scancel --signal=TERM 8\n\
             scontrol requeue 7_2\n\
             {begin} --resume runs/my-run-2\n"
        );
        assert_eq!(calls, expected);
        let config = std::fs::read_to_string(folder.path().join("runs/my-run-2.toml")).unwrap();
        assert_eq!(config, "[training]\nsteps = 9\n");
    }
}
