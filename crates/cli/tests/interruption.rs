//! Interrupted runs: they obey signals, and survive SIGKILL.

mod common;

use common::{Folder, tensors};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

/// Time limit for anything that a test waits for.
const PATIENCE: Duration = Duration::from_secs(60);

fn start(folder: &Folder, arguments: &[&str]) -> Child {
    folder.command(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts")
}

/// Waits until `done`, or the child has ended.
fn wait_until(child: &mut Child, mut done: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    while !done() {
        if child.try_wait().expect("a child").is_some() {
            return false;
        }
        assert!(start.elapsed() < PATIENCE, "it does not come about");
        std::thread::sleep(Duration::from_millis(1));
    }
    true
}

fn kill(child: &Child, signal: i32) {
    // Sends the signal by the command `kill`.
    let sent = std::process::Command::new("kill").args([format!("-{signal}"), child.id().to_string()]).status();
    assert!(sent.expect("kill runs").success());
}

fn lines(folder: &Folder, file: &str) -> usize {
    std::fs::read_to_string(folder.join(file)).map_or(0, |text| text.lines().count())
}

#[test]
fn an_interrupted_run_writes_a_checkpoint_and_goes_on() {
    const INT: i32 = 2;
    let folder = Folder::new();
    let endless =
        ["train", "tiny.toml", "--set", "training.steps=1000000", "--set", "checkpoint.interval_steps=500000"];
    let mut child = start(&folder, &endless);
    assert!(wait_until(&mut child, || lines(&folder, "runs/tiny/metrics.jsonl") >= 5));
    kill(&child, INT);
    let ran = child.wait_with_output().unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert_eq!(ran.status.code(), Some(130), "{stdout}\n{stderr}");
    assert!(stdout.contains("go on        trainyard train --resume runs/tiny"), "{stdout}");
    let steps = lines(&folder, "runs/tiny/metrics.jsonl");
    let resumed = folder.run(&["train", "--resume", "runs/tiny", "--set", &format!("training.steps={}", steps + 3)]);
    let resumed = resumed.ok();
    assert!(resumed.stderr.contains(&format!("resumed at step {steps}")), "{}", resumed.stderr);
    assert_eq!(lines(&folder, "runs/tiny/metrics.jsonl"), steps + 3);
}

#[test]
fn what_was_set_when_a_run_was_resumed_is_kept() {
    let folder = Folder::new();
    folder.run(&["train", "tiny.toml"]).ok();
    let resume = |sets: &[&str]| {
        let sets = sets.iter().flat_map(|set| ["--set", *set]);
        folder.run(&["train", "--resume", "runs/tiny"].into_iter().chain(sets).collect::<Vec<_>>())
    };
    let asked = ["training.steps=16", "optimizer.learning_rate=0.5", "parallel.ranks=2"];
    let resumed = resume(&asked).ok();
    assert!(resumed.stderr.contains("config.toml now has training.steps=16, "), "{}", resumed.stderr);
    let config = std::fs::read_to_string(folder.join("runs/tiny/config.toml")).unwrap();
    for line in ["steps = 16", "learning_rate = 0.5", "ranks = 2", "kind = \"bytes\""] {
        assert!(config.lines().any(|found| found == line), "{line} is not in\n{config}");
    }
    // Without flags the run keeps the settings given last.
    let again = resume(&[]).ok();
    assert!(again.stderr.contains("nothing is left to train: 16 steps are done"), "{}", again.stderr);
    assert_eq!(config, std::fs::read_to_string(folder.join("runs/tiny/config.toml")).unwrap());

    // Settings that a resumed run cannot follow are refused, and not stored.
    for (set, says) in [
        ("run.name=other", "run.name has no effect on a run that goes on"),
        ("tokenizer.kind=bpe", "it keeps its tokenizer"),
        ("optimizer.name=lion", "was written under another optimizer.name"),
    ] {
        let refused = resume(&[set, "training.steps=99"]);
        assert_eq!(refused.code, Some(1), "{}", refused.stderr);
        assert!(refused.stderr.contains(says), "{}", refused.stderr);
    }
    assert_eq!(config, std::fs::read_to_string(folder.join("runs/tiny/config.toml")).unwrap());
}

/// Runs `begin`, and after each of `wanted` kills at a random moment `--resume` with the settings
/// that `more` gives for the next start, of the run `killed`. Returns the number of kills before
/// the run was over.
fn kill_again_and_again(folder: &Folder, begin: &[&str], wanted: u64, more: impl Fn(u64) -> Vec<String>) -> u64 {
    let mut random = 0x2545_f491_4f6c_dd1d_u64;
    let mut kills = 0;
    while kills < wanted {
        // A run has begun when its configuration is written.
        let begun = folder.join("runs/killed/config.toml").is_file();
        let more = more(kills);
        let sets = more.iter().flat_map(|set| ["--set", set.as_str()]);
        let resume: Vec<&str> = ["train", "--resume", "runs/killed"].into_iter().chain(sets).collect();
        let arguments: &[&str] = if begun { &resume } else { begin };
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let mut child = start(folder, arguments);
        // One in four kills comes during the start, the others after some steps, so that the run
        // makes progress.
        let progress = (random >> 33) % 40;
        let before = lines(folder, "runs/killed/metrics.jsonl") as u64;
        let moment = Duration::from_micros((random >> 40) % 30_000);
        if !random.is_multiple_of(4) {
            let file = "runs/killed/metrics.jsonl";
            // A resumed run first drops the lines after its checkpoint.
            let target = before.saturating_sub(10) + progress;
            wait_until(&mut child, || lines(folder, file) as u64 >= target);
        }
        std::thread::sleep(moment);
        if child.try_wait().expect("a child").is_some() {
            break;
        }
        child.kill().expect("a child that runs can be killed");
        child.wait().expect("a child");
        kills += 1;
    }
    kills
}

/// Acceptance bar: after kills at 20 random moments (6 unless all tests are requested), the final
/// weights equal those of an undisturbed run, byte for byte.
#[test]
fn a_killed_run_ends_with_the_same_bytes() {
    let kills_wanted = trainyard_testing::cases("kills", 6, 20);
    let folder = Folder::new();
    let sets = ["--set", "training.steps=900", "--set", "checkpoint.interval_steps=10", "--set", "model.dropout=0.1"];
    let train = |name: &str, more: &[&str]| {
        let name = format!("run.name='{name}'");
        let arguments = [&["train", "tiny.toml", "--set", &name], &sets[..], more].concat();
        arguments.iter().map(|s| (*s).to_owned()).collect::<Vec<String>>()
    };
    let strings = |arguments: &[String]| -> Vec<String> { arguments.to_vec() };
    let whole = strings(&train("whole", &[]));
    folder.run(&whole.iter().map(String::as_str).collect::<Vec<_>>()).ok();

    let killed = strings(&train("killed", &[]));
    let killed: Vec<&str> = killed.iter().map(String::as_str).collect();
    let kills = kill_again_and_again(&folder, &killed, kills_wanted, |_| Vec::new());
    assert!(kills >= kills_wanted / 2, "the run was over after {kills} kills");
    folder.run(&["train", "--resume", "runs/killed"]).ok();
    assert_eq!(lines(&folder, "runs/killed/metrics.jsonl"), 900);
    assert!(
        tensors(&folder.join("runs/whole")) == tensors(&folder.join("runs/killed")),
        "the tensors differ after {kills} kills"
    );
}

/// Pipelines of every length, and divisions of the data among the same number of ranks, sum in one
/// order. A run that is killed and goes on with another of them each time ends with the bits of one
/// that nothing disturbed.
#[test]
fn runs_killed_at_random_moments_go_on_with_other_layouts() {
    let wanted = trainyard_testing::cases("kills", 4, 20);
    let folder = Folder::new();
    let layout = |pipeline: u64, schedule: &str, shards: u64, zero_stage: u64| -> Vec<String> {
        let ranks = 2 * pipeline;
        let schedule = if pipeline > 1 { format!("'{schedule}'") } else { "auto".to_owned() };
        vec![
            format!("parallel.ranks={ranks}"),
            format!("parallel.pipeline_parallel_degree={pipeline}"),
            format!("parallel.pipeline_schedule={schedule}"),
            format!("parallel.data_parallel_shard_degree={shards}"),
            format!("parallel.data_parallel_replicate_degree={}", 2 / shards),
            format!("parallel.zero_stage={zero_stage}"),
        ]
    };
    let layouts = [
        layout(1, "", 2, 3),
        layout(2, "zero_bubble", 1, 0),
        layout(2, "1f1b", 2, 2),
        layout(1, "", 1, 0),
        layout(2, "interleaved", 2, 3),
        layout(1, "", 2, 1),
    ];
    let sets = [
        "training.steps=300",
        "checkpoint.interval_steps=10",
        "model.dropout=0.1",
        "model.tie_embeddings=false",
        "training.global_batch_size=8",
        "training.micro_batch_size=1",
    ];
    let train = |name: &str| -> Vec<String> {
        let sets = sets.iter().map(|set| (*set).to_owned()).chain([format!("run.name='{name}'")]);
        let sets = sets.chain(layouts[0].clone()).flat_map(|set| ["--set".to_owned(), set]);
        ["train", "tiny.toml"].map(str::to_owned).into_iter().chain(sets).collect()
    };
    let run = |arguments: &[String]| folder.run(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
    run(&train("whole")).ok();
    let begin = train("killed");
    let begin: Vec<&str> = begin.iter().map(String::as_str).collect();
    let of = |kills: u64| layouts[(kills + 1) as usize % layouts.len()].clone();
    let kills = kill_again_and_again(&folder, &begin, wanted, of);
    assert!(kills >= wanted / 2, "the run was over after {kills} kills");
    let sets = of(kills).into_iter().flat_map(|set| ["--set".to_owned(), set]);
    let resume = ["train", "--resume", "runs/killed"].map(str::to_owned);
    run(&resume.into_iter().chain(sets).collect::<Vec<_>>()).ok();
    assert_eq!(lines(&folder, "runs/killed/metrics.jsonl"), 300);
    assert!(
        tensors(&folder.join("runs/whole")) == tensors(&folder.join("runs/killed")),
        "the tensors differ after {kills} kills"
    );
}
