//! `launch --nnodes MIN:MAX`: hosts that come, die and leave change no bit of a run whose sums do
//! not depend on the number of ranks. So no sample is lost or trained twice.

mod common;

use common::{Folder, PATIENCE, Ran, free_port, metrics, send, tensors, wait_for_steps};
use std::fs;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// More steps than a test makes.
const ENDLESS: &str = "training.steps=1000000";

/// A run on hosts that come and go, all of which are this one.
struct Hosts<'a> {
    folder: &'a Folder,
    port: String,
    hosts: &'a str,
    sets: &'a [&'a str],
}

impl Hosts<'_> {
    fn command(&self, options: &[&str], ranks: usize) -> Command {
        let ranks = ranks.to_string();
        let own = ["launch", "--nnodes", self.hosts, "--master-addr", "127.0.0.1", "--master-port", &self.port];
        let words = [&own, &["--nproc-per-node", &ranks][..], options, &["train", "tiny.toml"]].concat();
        let mut command = self.folder.command(&words);
        command.args(self.sets.iter().flat_map(|set| ["--set", set]));
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn start(&self, options: &[&str], ranks: usize) -> Child {
        self.command(options, ranks).spawn().expect("the program starts")
    }
}

fn ended(child: Child) -> Ran {
    Ran::new(child.wait_with_output().expect("a child"))
}

/// Waits until the newest step of the run was made by `ranks` ranks and a few more have been made.
fn wait_for_ranks(folder: &Folder, name: &str, ranks: u64) {
    let began = Instant::now();
    let environment = folder.join(&format!("runs/{name}/environment.json"));
    loop {
        let text = fs::read_to_string(&environment).unwrap_or_default();
        let value = serde_json::from_str::<serde_json::Value>(&text).unwrap_or_default();
        if value["ranks"] == ranks {
            return wait_for_steps(folder, name, metrics(folder, name) + 5);
        }
        assert!(began.elapsed() < PATIENCE, "{name} is not trained by {ranks} ranks: {text}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn hosts_that_come_die_and_leave_change_no_bit() {
    let folder = Folder::new();
    let sets = [
        "run.name='churn'",
        ENDLESS,
        "training.micro_batch_size=1",
        "training.global_batch_size=4",
        "training.elastic_bits=true",
        "checkpoint.interval_steps=10",
        "compute.threads=1",
    ];
    let hosts = Hosts { folder: &folder, port: free_port(), hosts: "1:3", sets: &sets };
    let keeper = hosts.start(&["--node-rank", "0"], 1);
    wait_for_ranks(&folder, "churn", 1);
    let second = hosts.start(&[], 1);
    wait_for_ranks(&folder, "churn", 2);
    let mut third = hosts.start(&[], 2);
    wait_for_ranks(&folder, "churn", 4);
    third.kill().expect("it runs");
    third.wait().expect("a child");
    wait_for_ranks(&folder, "churn", 2);
    send("-TERM", &second.id().to_string());
    let second = ended(second);
    assert_eq!(second.code, Some(130), "{}", second.stderr);
    wait_for_ranks(&folder, "churn", 1);
    // The keeper's host ends the run for all.
    send("-INT", &keeper.id().to_string());
    let keeper = ended(keeper);
    assert_eq!(keeper.code, Some(130), "{}", keeper.stderr);
    for said in [
        "launch: this host keeps the roster, at 127.0.0.1",
        "launch: the run begins with 1 ranks on 1 hosts",
        "launch: hosts have come: the ranks stop with a checkpoint",
        "launch: the run goes on with 4 ranks on 3 hosts",
        "is lost: the ranks end, and go on from the newest checkpoint",
        "leaves: the ranks stop with a checkpoint",
    ] {
        assert!(keeper.stderr.contains(said), "{said}: {}", keeper.stderr);
    }
    let step = metrics(&folder, "churn");
    let until = step.to_string();
    let mut undisturbed = folder.command(&["train", "tiny.toml", "--until", &until]);
    undisturbed.args(sets.iter().chain(&["run.name='undisturbed'"]).flat_map(|set| ["--set", set]));
    Ran::new(undisturbed.output().expect("the program starts")).ok();
    let of = |name: &str| tensors(&folder.join(&format!("runs/{name}")));
    assert!(of("churn") == of("undisturbed"), "churn changed the tensors after {step} steps");
}

/// Replicas that train apart go on from the parameters of the last outer step, and a new keeper
/// learns the run from the hosts that are left.
#[test]
fn a_run_goes_on_when_its_keeper_dies_and_comes_back() {
    let folder = Folder::new();
    let sets = ["run.name='kept'", ENDLESS, "update.rule='diloco'", "update.every=5", "compute.threads=1"];
    let sets = [&sets[..], &["parallel.data_parallel_shard_degree=1", "checkpoint.interval_steps=10"]].concat();
    let hosts = Hosts { folder: &folder, port: free_port(), hosts: "2:2", sets: &sets };
    let mut keeper = hosts.start(&["--node-rank", "0"], 1);
    let other = hosts.start(&["--node-rank", "1"], 1);
    wait_for_steps(&folder, "kept", 12);
    keeper.kill().expect("it runs");
    keeper.wait().expect("a child");
    let steps = metrics(&folder, "kept");
    let keeper = hosts.start(&["--node-rank", "0"], 1);
    wait_for_steps(&folder, "kept", steps + 12);
    send("-TERM", &keeper.id().to_string());
    let (keeper, other) = (ended(keeper), ended(other));
    assert_eq!((keeper.code, other.code), (Some(130), Some(130)), "{}\n{}", keeper.stderr, other.stderr);
    assert!(keeper.stderr.contains("launch: the run goes on with 2 ranks on 2 hosts"), "{}", keeper.stderr);
    assert!(other.stderr.contains("the keeper of the roster is lost"), "{}", other.stderr);
}

/// Replicas that make steps by their speed come and go. Their numbers begin anew with each change.
#[test]
fn replicas_of_unequal_speed_come_and_go() {
    let folder = Folder::new();
    let sets = ["run.name='uneven'", ENDLESS, "update.rule='diloco'", "update.every=5", "compute.threads=1"];
    let more = ["update.inner_steps='by_speed'", "parallel.data_parallel_shard_degree=1"];
    let batch = ["training.micro_batch_size=1", "training.global_batch_size=6", "checkpoint.interval_steps=3"];
    let sets = [&sets[..], &more, &batch].concat();
    let hosts = Hosts { folder: &folder, port: free_port(), hosts: "2:3", sets: &sets };
    let keeper = hosts.start(&["--node-rank", "0"], 1);
    // Without a number it would keep the roster itself if it came first.
    let second = hosts.start(&["--node-rank", "1"], 1);
    wait_for_ranks(&folder, "uneven", 2);
    let mut third = hosts.start(&[], 1);
    wait_for_ranks(&folder, "uneven", 3);
    wait_for_steps(&folder, "uneven", metrics(&folder, "uneven") + 12);
    third.kill().expect("it runs");
    third.wait().expect("a child");
    wait_for_ranks(&folder, "uneven", 2);
    send("-INT", &keeper.id().to_string());
    let (keeper, second) = (ended(keeper), ended(second));
    assert_eq!((keeper.code, second.code), (Some(130), Some(130)), "{}\n{}", keeper.stderr, second.stderr);
    let text = fs::read_to_string(folder.join("runs/uneven/metrics.jsonl")).expect("the run's records");
    let numbers = |line: &str| -> Option<Vec<u64>> {
        let record: serde_json::Value = serde_json::from_str(line).expect("a record");
        serde_json::from_value(record.get("inner_steps")?.clone()).expect("numbers")
    };
    let rounds: Vec<Vec<u64>> = text.lines().filter_map(numbers).collect();
    assert!([2, 3].iter().all(|replicas| rounds.iter().any(|round| round.len() == *replicas)), "{rounds:?}");
    assert!(rounds.iter().flatten().all(|steps| (1..=5).contains(steps)), "{rounds:?}");
}

#[test]
fn hosts_that_do_not_come_are_named_in_numbers() {
    let folder = Folder::new();
    let sets = ["run.name='alone'", ENDLESS];
    let hosts = Hosts { folder: &folder, port: free_port(), hosts: "2:3", sets: &sets };
    let alone = hosts.command(&["--node-rank", "0"], 1).env("TRAINYARD_RENDEZVOUS_SECONDS", "0.3").output();
    let alone = Ran::new(alone.expect("the program starts"));
    assert_eq!(alone.code, Some(70), "{}", alone.stderr);
    assert!(alone.stderr.contains("1 of at least 2 hosts are there after"), "{}", alone.stderr);
    let stray = hosts.command(&["--node-rank", "1"], 1).env("TRAINYARD_RENDEZVOUS_SECONDS", "0.3").output();
    let stray = Ran::new(stray.expect("the program starts"));
    assert_eq!(stray.code, Some(1), "{}", stray.stderr);
    assert!(stray.stderr.contains("no roster is kept at 127.0.0.1 port"), "{}", stray.stderr);
}
