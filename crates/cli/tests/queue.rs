//! The queue, end to end: jobs wait, run, stop, go on, and survive kills of the daemon and of
//! their own processes.

mod common;

use common::{Folder, Ran, tensors};
use serde_json::Value;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use trainyard_queue::progress::recorded;
use trainyard_queue::time::rfc3339;
use trainyard_sim::MachineProfile;
use trainyard_sim::machine::{Disk, FORMAT, Interference, Machine, Overheads, Speeds};

/// Time limit for anything that a test waits for.
const PATIENCE: Duration = Duration::from_secs(120);

/// `trainyard queue` on the queue `q`.
fn command(folder: &Folder, arguments: &[&str]) -> Command {
    let mut command = folder.command(&[&["queue"], arguments, &["--queue", "q"]].concat());
    command.env("TRAINYARD_PROFILE", folder.join("machine.toml"));
    command
}

fn queue(folder: &Folder, arguments: &[&str]) -> Ran {
    Ran::new(command(folder, arguments).output().expect("the program starts"))
}

/// The jobs, from `queue list --json`.
fn jobs(folder: &Folder) -> Vec<Value> {
    let listed = queue(folder, &["list", "--all", "--json"]).ok().stdout;
    serde_json::from_str::<Value>(&listed).unwrap().as_array().unwrap().clone()
}

fn wait_until(what: &str, done: impl FnMut() -> bool) {
    wait_within(PATIENCE, what, done);
}

fn wait_within(patience: Duration, what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < patience, "{what} does not come about");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The steps that a run has recorded.
fn steps(folder: &Folder, run: &str) -> Vec<u64> {
    let text = std::fs::read_to_string(folder.join(&format!("runs/{run}/metrics.jsonl"))).unwrap_or_default();
    let step = |line: &str| serde_json::from_str::<Value>(line).ok()?["step"].as_u64();
    text.lines().filter_map(step).collect()
}

fn seconds_now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() as i64
}

/// A profile of this machine without a curve, so that shapes have predicted speeds.
fn write_profile(folder: &Folder) {
    let profile = MachineProfile {
        format: FORMAT,
        measured: "2026-11-22T00:00:00Z".into(),
        method: "by hand".into(),
        machine: Machine::here(),
        speeds: Speeds { f32_flops: 2e11, bf16_flops: 4e12, copy_bytes_per_s: 3e10 },
        overheads: Overheads { launch_s: 1e-6, instruction_s: 1e-6, handover_s: 1e-5, step_s: 1e-4 },
        interference: Interference { compute: 1.0, communication: 1.0, start_s: 0.0 },
        disk: Disk { write_bytes_per_s: 1e9, read_bytes_per_s: 2e9 },
        transfers: None,
        collectives: Vec::new(),
        kernels: Vec::new(),
    };
    profile.save(&folder.join("machine.toml")).unwrap();
}

#[test]
fn jobs_are_added_run_shown_and_done() {
    let folder = Folder::new();
    let none = queue(&folder, &["list"]);
    assert!(none.code == Some(1) && none.stderr.contains("`trainyard queue add c.toml` makes it"), "{}", none.stderr);
    let added = queue(&folder, &["add", "tiny.toml", "--as-is", "--priority", "-2", "--deadline", "+6h"]).ok();
    assert!(added.stdout.contains("job 1 (tiny): 12 steps, by "), "{}", added.stdout);
    assert!(added.stderr.contains("nothing runs the queue"), "{}", added.stderr);
    queue(&folder, &["add", "tiny.toml", "--as-is", "--set", "run.name=second", "--set", "training.seconds=1"]).ok();
    let listed = queue(&folder, &["list"]).ok().stdout;
    assert!(listed.contains("tiny    waiting  0/12") && listed.contains("second  waiting"), "{listed}");
    let ran = queue(&folder, &["run", "--until-done", "--every", "0.1"]).ok();
    assert_eq!(ran.stdout, "2 done\n", "{}", ran.stderr);
    assert!(ran.stderr.contains("job 1 (tiny): starts on 1 rank x 1 thread"), "{}", ran.stderr);
    assert!(ran.stderr.contains("job 2 (second): done"), "{}", ran.stderr);
    assert_eq!(steps(&folder, "tiny"), (1..=12).collect::<Vec<_>>());
    let shown = queue(&folder, &["show", "tiny"]).ok().stdout;
    for part in ["done since", "done       12/12; started 1 times", "1 rank x 1 thread", "\ndone: 12 steps, "] {
        assert!(shown.contains(part), "no {part:?} in\n{shown}");
    }
    let json: Value = serde_json::from_str(&queue(&folder, &["show", "1", "--json"]).ok().stdout).unwrap();
    assert_eq!((json["state"].as_str(), json["starts"].as_u64()), (Some("done"), Some(1)));
    assert!(json["shapes"][0]["cores"] == 1 && json["priority"] == -2, "{json}");
}

/// The hours around now are dear and the later ones cheap.
fn write_prices(folder: &Folder) {
    let hour = seconds_now() / 3600;
    let line = |at: i64| format!("{},{}\n", rfc3339(3600 * at), if at <= hour + 1 { 90.0 } else { 3.0 });
    folder.write("prices.csv", (hour - 3..hour + 30).map(line).collect::<String>());
}

#[test]
fn a_job_waits_for_cheap_hours_unless_its_deadline_presses() {
    let folder = Folder::new();
    write_profile(&folder);
    write_prices(&folder);
    let added = queue(&folder, &["add", "tiny.toml", "--price", "prices.csv", "--deadline", "+10h"]).ok();
    assert!(added.stdout.contains(" ms a step predicted"), "{}", added.stdout);
    let looked = queue(&folder, &["run", "--once"]).ok();
    assert_eq!(looked.stdout, "1 waiting\n", "{}", looked.stderr);
    let listed = queue(&folder, &["list"]).ok().stdout;
    assert!(listed.contains("from ") && listed.contains(", ends "), "{listed}");
    let job = &jobs(&folder)[0];
    assert!(job["cost"].as_f64().unwrap() < 0.1 * job["cost_at_once"].as_f64().unwrap(), "{job}");
    let shown = queue(&folder, &["show", "tiny"]).ok().stdout;
    assert!(shown.contains("plan       ") && shown.contains("if it ran at once"), "{shown}");

    let urgent = ["add", "tiny.toml", "--price", "prices.csv", "--deadline", "+5m", "--set", "run.name=urgent"];
    queue(&folder, &urgent).ok();
    let looked = queue(&folder, &["run", "--once"]).ok();
    assert!(looked.stderr.contains("job 2 (urgent): starts on "), "{}", looked.stderr);
    // It runs on without a daemon, and the next look finds its end.
    wait_until("its end", || {
        queue(&folder, &["run", "--once"]).ok();
        jobs(&folder)[1]["state"] == "done"
    });
    assert_eq!(steps(&folder, "urgent"), (1..=12).collect::<Vec<_>>());
    // A file that is gone holds the job back.
    std::fs::remove_file(folder.join("prices.csv")).unwrap();
    let listed = queue(&folder, &["list"]).ok().stdout;
    assert!(listed.contains("it waits, because a curve cannot be used: cannot read"), "{listed}");
}

#[test]
fn an_idle_job_waits_while_others_use_the_machine() {
    let folder = Folder::new();
    let mut busy = Command::new("timeout").args(["60", "sh", "-c", "while :; do :; done"]).spawn().unwrap();
    let long = ["add", "tiny.toml", "--as-is", "--idle=1", "--set", "training.steps=1000000"];
    queue(&folder, &long).ok();
    let looked = queue(&folder, &["run", "--once"]).ok();
    assert_eq!(looked.stdout, "1 waiting\n", "{}", looked.stderr);
    // `timeout` passes it on.
    kill(busy.id(), "TERM");
    busy.wait().unwrap();
    assert_eq!(jobs(&folder)[0]["starts"], 0);
    queue(&folder, &["cancel", "tiny"]).ok();
    assert_eq!(jobs(&folder)[0]["state"], "cancelled");
}

#[test]
fn jobs_are_paused_resumed_and_cancelled_without_a_daemon() {
    let folder = Folder::new();
    queue(&folder, &["add", "tiny.toml", "--as-is", "--set", "training.steps=1000000"]).ok();
    let state = || jobs(&folder)[0]["state"].as_str().unwrap().to_owned();
    let look = || drop(queue(&folder, &["run", "--once"]).ok());
    look();
    wait_until("steps", || steps(&folder, "tiny").len() > 5);
    let paused = queue(&folder, &["pause", "tiny"]).ok();
    assert!(paused.stdout.contains("job 1 (tiny): paused; it stops at its next step"), "{}", paused.stdout);
    assert!(paused.stderr.contains("is asked to stop: it is paused"), "{}", paused.stderr);
    wait_until("its stop", || {
        look();
        state() == "waiting"
    });
    let before = steps(&folder, "tiny").len() as u64;
    assert!(queue(&folder, &["list"]).ok().stdout.contains("paused"));
    look();
    assert_eq!(state(), "waiting", "it is paused");
    queue(&folder, &["resume", "1"]).ok();
    look();
    wait_until("more steps", || steps(&folder, "tiny").len() as u64 > before + 5);
    queue(&folder, &["cancel", "1"]).ok();
    wait_until("its end", || {
        look();
        state() == "cancelled"
    });
    let all = steps(&folder, "tiny");
    assert_eq!(all, (1..=all.len() as u64).collect::<Vec<_>>());
    // Its run stays, and can be taken up by hand.
    folder.run(&["train", "--resume", "runs/tiny", "--set", &format!("training.steps={}", all.len() + 1)]).ok();
}

#[test]
fn a_daemon_that_is_stopped_stops_its_jobs_and_the_next_one_goes_on() {
    let folder = Folder::new();
    queue(&folder, &["add", "tiny.toml", "--as-is", "--set", "training.steps=1000000"]).ok();
    let mut daemon = start_daemon(&folder);
    wait_until("steps", || steps(&folder, "tiny").len() > 5);
    let second = queue(&folder, &["run"]);
    assert!(second.code == Some(1) && second.stderr.contains("a daemon runs this queue already"), "{}", second.stderr);
    kill(daemon.id(), "TERM");
    assert!(daemon.wait().unwrap().success());
    let job = &jobs(&folder)[0];
    assert_eq!((job["state"].as_str(), job["pid"].as_u64()), (Some("waiting"), None), "{job}");
    let before = steps(&folder, "tiny").len();
    let mut daemon = start_daemon(&folder);
    wait_until("more steps", || steps(&folder, "tiny").len() > before + 5);
    kill(daemon.id(), "INT");
    assert!(daemon.wait().unwrap().success());
}

#[test]
fn a_daemon_whose_program_is_replaced_starts_the_new_one() {
    let folder = Folder::new();
    let program = folder.join("installed");
    std::fs::copy(env!("CARGO_BIN_EXE_trainyard"), &program).unwrap();
    queue(&folder, &["add", "tiny.toml", "--as-is"]).ok();
    queue(&folder, &["pause", "tiny"]).ok();
    let mut daemon = Command::new(&program);
    daemon.args(["queue", "run", "--queue", "q", "--every", "0.05"]).current_dir(folder.join("."));
    let mut daemon = daemon.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    wait_until("a daemon", || queue(&folder, &["run", "--once"]).ok().stderr.contains("a daemon runs this queue"));
    std::fs::copy(&program, folder.join("new")).unwrap();
    std::fs::rename(folder.join("new"), &program).unwrap();
    queue(&folder, &["resume", "tiny"]).ok();
    wait_until("its end", || ["done", "failed"].iter().any(|end| jobs(&folder)[0]["state"] == *end));
    kill(daemon.id(), "TERM");
    daemon.wait().unwrap();
    assert_eq!(jobs(&folder)[0]["why"], "its training is complete");
}

/// A job that has all cores makes room for one of higher priority and continues on those that are
/// left. Its steps stay in order.
#[test]
fn a_job_goes_on_on_fewer_cores_when_another_needs_some() {
    let folder = Folder::new();
    write_profile(&folder);
    let cores = Machine::here().cores as u64;
    if cores < 2 {
        return trainyard_testing::skip("one core has one shape");
    }
    let free = common::TINY.replace("[compute]\nthreads = 1\n", "").replace("'tiny'", "'wide'");
    folder.write("c.toml", free.replace("micro_batch_size = 4", "global_batch_size = 8"));
    let rarely = "checkpoint.interval_steps=100";
    queue(&folder, &["add", "c.toml", "--set", "training.steps=600", "--set", rarely]).ok();
    let of_all = |job: &Value| job["shapes"].as_array().unwrap().last().unwrap()["cores"].as_u64() == Some(cores);
    let wide = jobs(&folder)[0].clone();
    assert!(of_all(&wide) && wide["shapes"].as_array().unwrap().len() > 1, "{wide}");
    let mut daemon = start_daemon(&folder);
    wait_until("steps", || steps(&folder, "wide").len() > 5);
    assert_eq!(jobs(&folder)[0]["cores"].as_u64(), Some(cores));
    let urgent = ["add", "tiny.toml", "--as-is", "--priority", "5", "--set", "training.steps=1000000"];
    queue(&folder, &[&urgent[..], &["--set", rarely]].concat()).ok();
    wait_until("fewer cores", || jobs(&folder)[0]["cores"].as_u64().is_some_and(|now| now < cores));
    assert_eq!(jobs(&folder)[1]["state"], "running");
    wait_until("its end", || jobs(&folder)[0]["state"] == "done");
    assert_eq!(steps(&folder, "wide"), (1..=600).collect::<Vec<_>>());
    kill(daemon.id(), "TERM");
    daemon.wait().unwrap();
}

/// A seeded sequence of numbers.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

/// Acceptance bar: after 1,000 kills at random moments (4 unless all tests are requested) of the
/// daemon, of jobs, or of both, no job is lost, no step is lost or repeated, and the weights are
/// those of an undisturbed run.
#[test]
fn kills_lose_no_job_and_no_step() {
    let wanted = trainyard_testing::cases("kills of a queue", 4, 1000);
    let folder = Folder::new();
    let total = 150 + 40 * wanted;
    // A run of more than 10,000 steps would record every tenth.
    let sets = [format!("training.steps={total}"), "model.dropout=0.1".into(), "metrics.interval_steps=1".into()];
    let with = |begin: &[&str], name: &str, interval: u64| -> Vec<String> {
        let own = [format!("run.name={name}"), format!("checkpoint.interval_steps={interval}")];
        let sets = sets.iter().cloned().chain(own);
        let sets = sets.flat_map(|set| ["--set".to_owned(), set]);
        begin.iter().map(|word| (*word).to_owned()).chain(sets).collect()
    };
    let whole = with(&["train", "tiny.toml"], "whole", 1000);
    folder.run(&whole.iter().map(String::as_str).collect::<Vec<_>>()).ok();
    for name in ["a", "b"] {
        let add = with(&["add", "tiny.toml", "--as-is"], name, 10);
        queue(&folder, &add.iter().map(String::as_str).collect::<Vec<_>>()).ok();
    }
    let mut random = Random(29);
    let mut daemon = start_daemon(&folder);
    let mut kills = [0u64; 3];
    while kills.iter().sum::<u64>() < wanted {
        let all = jobs(&folder);
        let alive: Vec<&Value> = all.iter().filter(|job| job["state"] != "done").collect();
        assert!(alive.iter().all(|job| job["state"] != "failed"), "{alive:?}");
        let Some(victim) = alive.get(random.below(alive.len().max(1) as u64) as usize) else { break };
        let name = victim["name"].as_str().unwrap();
        let (kind, moment) = (random.below(3) as usize, random.below(60));
        // One in four kills comes at once, while things are being started; the others after some
        // steps, so that there is progress.
        if random.below(4) > 0 {
            let run = folder.join(&format!("runs/{name}"));
            let step = || recorded(&run, 0).map_or(0, |recorded| recorded.step);
            let target = step() + random.below(25);
            let begin = Instant::now();
            while step() < target && begin.elapsed() < Duration::from_secs(3) {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        std::thread::sleep(Duration::from_millis(moment));
        let pid = jobs(&folder).iter().find(|job| job["name"] == name).and_then(|job| job["pid"].as_u64());
        if kind != 0 {
            daemon.kill().unwrap();
            daemon.wait().unwrap();
        }
        if kind != 1
            && let Some(pid) = pid
        {
            kill(pid as u32, "KILL");
        }
        kills[kind] += 1;
        if kind != 0 {
            daemon = start_daemon(&folder);
        }
    }
    let patience = PATIENCE + Duration::from_secs(wanted);
    wait_within(patience, "the end of both jobs", || jobs(&folder).iter().all(|job| job["state"] == "done"));
    kill(daemon.id(), "TERM");
    assert!(daemon.wait().unwrap().success());
    println!("kills of jobs, daemons, both: {kills:?}");
    assert!(kills.iter().sum::<u64>() >= wanted / 2, "both jobs were done after {kills:?} kills");
    let (_, expected) = tensors(&folder.join("runs/whole"));
    for name in ["a", "b"] {
        assert!(steps(&folder, name).into_iter().eq(1..=total), "{name} lost or repeated a step");
        let (_, found) = tensors(&folder.join(&format!("runs/{name}")));
        assert!(found == expected, "the tensors of {name} differ after {kills:?} kills");
    }
}

fn start_daemon(folder: &Folder) -> Child {
    let mut command = command(folder, &["run", "--every", "0.05"]);
    command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the program starts")
}

fn kill(pid: u32, signal: &str) -> bool {
    Command::new("kill").args([format!("-{signal}"), pid.to_string()]).stderr(Stdio::null()).status().unwrap().success()
}

/// A command, its exit code, and parts of its message.
type Case<'a> = (&'a [&'a str], i32, &'a [&'a str]);

const WRONG: &[Case<'static>] = &[
    (&["queue", "add", "--queue", "q"], 2, &["<CONFIG>"]),
    (&["queue", "add", "gone.toml", "--queue", "q"], 1, &["cannot read gone.toml"]),
    (&["queue", "add", "tiny.toml", "--queue", "text.txt"], 1, &["cannot create", "text.txt"]),
    (&["queue", "add", "tiny.toml", "--queue", "q", "--deadline", "tomorrow"], 1, &["--deadline", "`Fri 08:00`"]),
    (
        &["queue", "add", "tiny.toml", "--queue", "q", "--deadline", "2020-01-01 08:00"],
        1,
        &["is in the past: it was Wed"],
    ),
    (&["queue", "add", "tiny.toml", "--queue", "q", "--price", "gone.csv"], 1, &["--price: cannot read", "gone.csv"]),
    (&["queue", "add", "tiny.toml", "--queue", "q", "--price", "text.txt"], 1, &["text.txt, line 2", "is no time"]),
    (&["queue", "add", "tiny.toml", "--queue", "q", "--price", "short.csv"], 1, &["covers 2.0 hours", "at least 24"]),
    (&["queue", "add", "tiny.toml", "--queue", "q", "--carbon", "hole.csv"], 1, &["line 3: 72 hours are missing"]),
    (&["queue", "add", "tiny.toml", "--queue", "q", "--idle=150"], 1, &["--idle=150", "at most 100"]),
    (&["queue", "add", "tiny.toml", "--queue", "q", "--idle=few"], 2, &["few"]),
    (&["queue", "add", "tiny.toml", "--queue", "q", "--cores", "0"], 2, &["--cores"]),
    (&["queue", "add", "tiny.toml", "--queue", "q", "--cores", "100000"], 1, &["--cores 100000: jobs may use"]),
    (&["queue", "add", "tiny.toml", "--queue", "q", "--priority", "high"], 2, &["high"]),
    (&["queue", "add", "tiny.toml", "--queue", "q", "--set", "training.stpes=3"], 1, &["training.steps"]),
    (&["queue", "add", "tiny.toml", "--queue", "q", "--set", "run.name=a/b"], 1, &["cannot be a folder"]),
    (&["queue", "add", "tiny.toml", "--queue", "q", "--lr", "1"], 2, &["use --set optimizer.learning_rate=1"]),
    (&["queue", "list", "--queue", "none"], 1, &["there is no queue in", "`trainyard queue add c.toml` makes it"]),
    (&["queue", "list", "--queue", "text.txt"], 1, &["there is no queue in"]),
    (&["queue", "list", "--queue", "broken"], 1, &["queue.sqlite"]),
    (&["queue", "pause", "9", "--queue", "q"], 1, &["there is no job 9"]),
    (&["queue", "pause", "--queue", "q"], 2, &["<JOB>"]),
    (&["queue", "resume", "nobody", "--queue", "q"], 1, &["there is no job \"nobody\"", "queue list --all"]),
    (&["queue", "cancel", "-1", "--queue", "q"], 2, &["-1"]),
    (&["queue", "show", "x", "--queue", "q"], 1, &["there is no job \"x\""]),
    (&["queue", "run", "--every", "0", "--queue", "q"], 1, &["--every 0: give seconds"]),
    (&["queue", "run", "--once", "--until-done", "--queue", "q"], 2, &["cannot be used with"]),
    (&["queue", "run", "--queue", "none"], 1, &["there is no queue in"]),
    (&["submit", "tiny.toml"], 2, &["--to"]),
    (&["submit", "tiny.toml", "--to", "lsf"], 2, &["slurm, kubernetes, skypilot"]),
    (&["submit", "gone.toml", "--to", "slurm"], 1, &["cannot read gone.toml"]),
    (&["submit", "free.toml", "--to", "slurm", "--dry-run"], 1, &["how many cores", "--cpus-per-rank N"]),
    (&["submit", "tiny.toml", "--to", "slurm", "--image", "x"], 1, &["--image is an option of --to kubernetes"]),
    (&["submit", "tiny.toml", "--to", "kubernetes", "--time", "9"], 1, &["--time is an option of --to slurm"]),
    (&["submit", "tiny.toml", "--to", "slurm", "--spot"], 1, &["--spot is an option of --to skypilot"]),
    (&["submit", "tiny.toml", "--to", "kubernetes", "--dry-run"], 1, &["needs --image IMAGE", "--claim NAME"]),
    (
        &[
            "submit",
            "tiny.toml",
            "--to",
            "kubernetes",
            "--image",
            "i",
            "--claim",
            "c",
            "--set",
            "run.name='42'",
            "--dry-run",
        ],
        1,
        &["\"42\" leaves no name"],
    ),
    (&["submit", "tiny.toml", "--to", "slurm", "--array", "all"], 1, &["--array all", "0-99%10"]),
    (&["submit", "tiny.toml", "--to", "slurm", "--set", "training.seed={array}"], 1, &["give --array ELEMENTS"]),
    (&["submit", "tiny.toml", "--to", "slurm", "--time", "1h", "--dry-run"], 1, &["--time 1h", "HH:MM:SS"]),
    (
        &["submit", "tiny.toml", "--to", "slurm", "--time", "1", "--dry-run"],
        1,
        &["no longer than the 120 s", "--margin"],
    ),
    (&["submit", "tiny.toml", "--to", "slurm", "--margin", "0"], 2, &["--margin"]),
    (&["submit", "tiny.toml", "--to", "slurm", "--like", "runs/gone"], 1, &["--like runs/gone: nothing was measured"]),
    (&["submit", "tiny.toml", "--to", "slurm", "--nodes", "0"], 2, &["--nodes"]),
    (
        &["submit", "tiny.toml", "--to", "slurm", "--nodes", "2", "--set", "parallel.ranks=3"],
        1,
        &["parallel.ranks is 3, and 2 hosts x 1 ranks are 2"],
    ),
    (&["submit", "tiny.toml", "--to", "slurm", "--gpu", "h100"], 1, &["--gpus-per-node N"]),
    (&["submit", "tiny.toml", "--to", "skypilot", "--gpus-per-node", "8", "--dry-run"], 1, &["give --gpu NAME"]),
    (
        &["submit", "tiny.toml", "--to", "slurm", "--set", "run.name='a b'", "--dry-run"],
        1,
        &["run.name \"a b\" cannot"],
    ),
    (&["submit", "tiny.toml", "--to", "skypilot", "--follow"], 1, &["`sky jobs logs"]),
    (&["submit", "tiny.toml", "--to", "slurm", "--follow", "--dry-run"], 2, &["cannot be used with"]),
];

#[test]
fn wrong_input_to_queue_and_submit_is_said_clearly() {
    let folder = Folder::new();
    folder.write("free.toml", common::TINY.replace("threads = 1\n", ""));
    folder.write("short.csv", "2026-11-25 00:00,1\n2026-11-25 01:00,2\n");
    folder.write("hole.csv", "2026-11-25 00:00,1\n2026-11-25 01:00,2\n2026-11-28 01:00,2\n");
    std::fs::create_dir(folder.join("broken")).unwrap();
    folder.write("broken/queue.sqlite", "no database, but a text that is long enough for one".repeat(40));
    queue(&folder, &["add", "tiny.toml", "--as-is"]).ok();
    let mut wrong = Vec::new();
    for (arguments, code, says) in WRONG {
        let ran = folder.run(arguments);
        let mut complain =
            |what: String| wrong.push(format!("trainyard {}\n  {what}\n{}", arguments.join(" "), ran.stderr));
        if ran.code != Some(*code) {
            complain(format!("ended with {:?}, not {code}", ran.code));
        }
        if ran.stderr.contains("panicked") || ran.stderr.matches("error: ").count() != 1 {
            complain("does not say its error once".to_owned());
        }
        says.iter()
            .filter(|part| !ran.stderr.contains(**part))
            .for_each(|part| complain(format!("does not say {part:?}")));
    }
    assert!(wrong.is_empty(), "{} complaints\n\n{}", wrong.len(), wrong.join("\n"));
    let twice = queue(&folder, &["add", "tiny.toml", "--as-is"]);
    assert!(twice.code == Some(1) && twice.stderr.contains("give this one another name"), "{}", twice.stderr);
    assert_eq!(jobs(&folder).len(), 1, "nothing that was refused was added");
}

#[test]
fn a_run_is_submitted_with_its_configuration_and_a_measured_margin() {
    let folder = Folder::new();
    folder.run(&["train", "tiny.toml", "--set", "run.name=before"]).ok();
    let submit = ["submit", "tiny.toml", "--to", "slurm", "--nodes", "2", "--time", "2:00", "--like", "runs/before"];
    let shown = folder.run(&[&submit[..], &["--dry-run"]].concat()).ok();
    let margin = shown.stdout.lines().find_map(|line| line.strip_prefix("#SBATCH --signal=B:USR1@")).unwrap();
    assert!((10..30).contains(&margin.parse::<u64>().unwrap()), "{margin}");
    for part in [
        "#SBATCH --nodes=2\n",
        "\n[checkpoint]\ninterval_steps = 5\n",
        "--set run.name=\"$name\"",
        "#SBATCH --cpus-per-task=1\n",
    ] {
        assert!(shown.stdout.contains(part), "no {part:?} in\n{}", shown.stdout);
    }
    // Sent, it is what was shown.
    let refused = Ran::new(folder.command(&submit).env("PATH", folder.join("bin")).output().unwrap());
    assert!(refused.code == Some(1) && refused.stderr.contains("cannot run sbatch"), "{}", refused.stderr);
    std::fs::create_dir(folder.join("bin")).unwrap();
    folder.write("bin/sbatch", "#!/bin/sh\ncat > sent.sh\necho '17;here'\n");
    let all = <std::fs::Permissions as std::os::unix::fs::PermissionsExt>::from_mode(0o755);
    std::fs::set_permissions(folder.join("bin/sbatch"), all).unwrap();
    let path = format!("{}:{}", folder.join("bin").display(), std::env::var("PATH").unwrap());
    let sent = Ran::new(folder.command(&submit).env("PATH", path).output().unwrap()).ok();
    assert_eq!(sent.stdout, "job 17 is submitted: run tiny, log in runs\n");
    assert_eq!(std::fs::read_to_string(folder.join("sent.sh")).unwrap(), shown.stdout);
    // The other schedulers' texts carry the same.
    for to in [&["kubernetes", "--image", "i", "--claim", "c"][..], &["skypilot", "--bucket", "s3://runs"]] {
        let shown =
            folder.run(&[&["submit", "tiny.toml", "--nodes", "2", "--dry-run", "--to"], to].concat()).ok().stdout;
        assert!(shown.contains("interval_steps = 5\n") && shown.contains("--nnodes 2 --node-rank"), "{shown}");
    }
}
