//! Ranks that are processes over TCP, started by `trainyard launch`: same bits as threads, named
//! and survived faults, signals, restarts, and connections of strangers.

mod common;

use common::{Folder, PATIENCE, Ran, free_port, metrics, send, tensors, wait_for_steps};
use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// Enough steps for three checkpoints.
const SETS: [&str; 4] =
    ["training.steps=6", "training.micro_batch_size=2", "training.accumulation_steps=2", "checkpoint.interval_steps=2"];

/// `train tiny.toml` as the run `name` with `sets`.
fn train(name: &str, sets: &[&str]) -> Vec<String> {
    let name = format!("run.name='{name}'");
    let sets = [&[name.as_str()], &SETS[..], sets].concat();
    let sets = sets.iter().flat_map(|set| ["--set".to_owned(), (*set).to_owned()]);
    ["train".to_owned(), "tiny.toml".to_owned()].into_iter().chain(sets).collect()
}

/// `launch --nproc-per-node RANKS OPTIONS` in front of `command`.
fn launch(ranks: usize, options: &[&str], command: &[String]) -> Vec<String> {
    let own = ["launch".to_owned(), "--nproc-per-node".to_owned(), ranks.to_string()];
    own.into_iter().chain(options.iter().map(|option| (*option).to_owned())).chain(command.iter().cloned()).collect()
}

fn command(folder: &Folder, arguments: &[String], faults: &str) -> Command {
    let mut command = folder.command(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
    command.env("TRAINYARD_FAULTS", faults).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn run(folder: &Folder, arguments: &[String], faults: &str) -> Ran {
    Ran::new(command(folder, arguments, faults).output().expect("the program starts"))
}

fn same_tensors(folder: &Folder, one: &str, other: &str) {
    let of = |name: &str| tensors(&folder.join(&format!("runs/{name}")));
    assert!(of(one) == of(other), "the tensors of {one} and {other} differ");
}

const ZERO_3: [&str; 4] =
    ["parallel.ranks=2", "parallel.zero_stage=3", "model.family='gpt2'", "precision.compute='bf16'"];
const HYBRID: [&str; 3] = ["parallel.ranks=4", "parallel.zero_stage=3", "parallel.data_parallel_replicate_degree=2"];
/// Products divided in two, rows too, on each of two stages.
const TENSOR_PIPELINE: [&str; 5] = [
    "parallel.ranks=4",
    "parallel.tensor_parallel_degree=2",
    "parallel.pipeline_parallel_degree=2",
    "parallel.pipeline_schedule='zero_bubble_v'",
    "model.dropout=0.1",
];

/// Sequences divided in two, products too.
const CONTEXT: [&str; 4] = [
    "parallel.ranks=4",
    "parallel.context_parallel_degree=2",
    "parallel.tensor_parallel_degree=2",
    "parallel.zero_stage=1",
];

/// The losses and norms of a run's steps.
fn losses(folder: &Folder, run: &str) -> Vec<[serde_json::Value; 3]> {
    let text = fs::read_to_string(folder.join(&format!("runs/{run}/metrics.jsonl"))).expect("metrics");
    let lines = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).expect("a line of JSON"));
    lines.map(|line| ["step", "loss", "grad_norm"].map(|key| line[key].clone())).collect()
}

#[test]
fn launched_processes_train_the_bits_of_threads() {
    let folder = Folder::new();
    for (name, ranks, sets) in [
        ("zero-3", 2, &ZERO_3[..]),
        ("hybrid", 4, &HYBRID),
        ("tensor-pipeline", 4, &TENSOR_PIPELINE),
        ("context", 4, &CONTEXT),
    ] {
        let threads = format!("{name}-threads");
        run(&folder, &train(&threads, sets), "").ok();
        let ran = run(&folder, &launch(ranks, &[], &train(name, sets)), "").ok();
        same_tensors(&folder, name, &threads);
        let recorded = losses(&folder, name);
        assert_eq!((recorded.len(), &recorded), (6, &losses(&folder, &threads)), "{name}");
        // Only rank 0 prints, and its lines have no prefix.
        assert_eq!(ran.stdout.matches("done: 6 steps").count(), 1, "{}", ran.stdout);
        assert!(
            ran.stderr.contains(&format!("{ranks} processes over tcp (RANK=0, WORLD_SIZE={ranks}); met at 127.0.0.1"))
        );
        assert!(!ran.stderr.contains("[rank "), "{}", ran.stderr);
    }
    // Two launches that find each other as two hosts would.
    let port = free_port();
    let host = |node: &'static str| {
        let options = ["--nnodes", "2", "--node-rank", node, "--master-addr", "localhost", "--master-port", &port];
        command(&folder, &launch(2, &options, &train("two-hosts", &HYBRID)), "").spawn().expect("the program starts")
    };
    for host in [host("1"), host("0")] {
        Ran::new(host.wait_with_output().expect("a child")).ok();
    }
    same_tensors(&folder, "two-hosts", "hybrid");
}

/// A run begins with threads, resumes with processes and ends with threads; and the other way
/// round.
#[test]
fn runs_go_on_from_threads_to_launched_processes_and_back() {
    let folder = Folder::new();
    run(&folder, &train("whole", &ZERO_3), "").ok();
    for threads_first in [true, false] {
        let name = if threads_first { "threads" } else { "processes" };
        // Two runs end by faults after step 4, whose snapshot waits until the checkpoint of step 2
        // is written. The third ends by itself.
        let fault = |rank| format!("kill rank={rank} step=5 instruction=5");
        for (sitting, fault) in [fault(1), fault(0), String::new()].iter().enumerate() {
            let own = match sitting {
                0 => train(name, &ZERO_3),
                _ => vec!["train".to_owned(), "--resume".to_owned(), format!("runs/{name}")],
            };
            let is_launched = threads_first == (sitting == 1);
            let arguments = if is_launched { launch(2, &[], &own) } else { own };
            let ran = run(&folder, &arguments, fault);
            let expected = if fault.is_empty() { 0 } else { 70 };
            assert_eq!(ran.code, Some(expected), "{name} {sitting}: {}", ran.stderr);
            assert_eq!(ran.stdout.contains("done: 6 steps"), fault.is_empty(), "{name} {sitting}: {}", ran.stderr);
            assert!(sitting == 0 || ran.stderr.contains("resumed at step "), "{name} {sitting}: {}", ran.stderr);
        }
        same_tensors(&folder, name, "whole");
    }
}

#[test]
fn launched_ranks_that_fail_are_named_and_restarted() {
    let folder = Folder::new();
    run(&folder, &train("whole", &ZERO_3), "").ok();
    for (name, fault, ends) in [
        ("killed", "kill rank=1 step=4 instruction=5", "launch: rank 1 (process "),
        ("hung", "hang rank=0 step=3 instruction=5", "exit status: 70"),
        ("early", "refuse rank=1 step=1 instruction=2", "exit status: 70"),
    ] {
        let sets = [&ZERO_3[..], &["parallel.deadline_seconds=3"]].concat();
        let ran = run(&folder, &launch(2, &["--max-restarts", "1"], &train(name, &sets)), fault).ok();
        assert!(ran.stderr.contains(ends) && ran.stderr.contains("launch: rank"), "{name}: {}", ran.stderr);
        assert!(ran.stderr.contains(&format!("restart 1 of 1: runs/{name} goes on")), "{name}: {}", ran.stderr);
        if name == "killed" {
            assert!(ran.stderr.contains("ended with signal: 6 (SIGABRT)"), "{}", ran.stderr);
            assert!(ran.stderr.contains("died: its process no longer exists"), "{}", ran.stderr);
        }
        same_tensors(&folder, name, "whole");
    }
}

/// The trace file of one rank cannot be written. All ranks end with the same code, and none
/// restarts.
#[test]
fn a_disk_that_is_full_for_one_rank_ends_all_of_them_for_good() {
    let folder = Folder::new();
    let sets = [&ZERO_3[..], &["metrics.profile=true", "training.steps=2"]].concat();
    run(&folder, &launch(2, &[], &train("full", &sets)), "").ok();
    let trace = folder.join("runs/full/trace/rank-1.json");
    std::fs::remove_file(&trace).unwrap();
    std::os::unix::fs::symlink("/dev/full", &trace).unwrap();
    let resume = ["train", "--resume", "runs/full", "--set", "training.steps=6"].map(String::from);
    let ran = run(&folder, &launch(2, &["--max-restarts", "1"], &resume), "");
    assert_eq!(ran.code, Some(1), "{}", ran.stderr);
    for said in ["No space left on device", "ranks 0, 1: exit status: 1"] {
        assert!(ran.stderr.contains(said), "{said}: {}", ran.stderr);
    }
    assert!(!ran.stderr.contains("restart 1 of 1"), "{}", ran.stderr);
}

/// A stopped process answers nothing and obeys only SIGKILL.
#[test]
fn a_launched_rank_that_is_frozen_is_killed() {
    let folder = Folder::new();
    let sets = ["parallel.ranks=2", "parallel.deadline_seconds=2", "training.steps=1000000"];
    let child = command(&folder, &launch(2, &[], &train("frozen", &sets)), "").spawn().expect("the program starts");
    wait_for_steps(&folder, "frozen", 5);
    send("-STOP", &rank_process(child.id(), 1));
    let ran = Ran::new(child.wait_with_output().expect("a child"));
    assert_eq!(ran.code, Some(70), "{}", ran.stderr);
    for said in ["rank 1 (host", "its process answers nothing", "and killed: rank 1", "rank 1: killed by launch"] {
        assert!(ran.stderr.contains(said), "{said}: {}", ran.stderr);
    }
}

#[test]
fn signals_reach_every_launched_rank() {
    let folder = Folder::new();
    let sets = ["parallel.ranks=2", "training.steps=1000000", "checkpoint.interval_steps=500000"];
    for (name, signal) in [("interrupted", "-INT"), ("terminated", "-TERM")] {
        let child = command(&folder, &launch(2, &[], &train(name, &sets)), "").spawn().expect("the program starts");
        wait_for_steps(&folder, name, 5);
        send(signal, &child.id().to_string());
        let ran = Ran::new(child.wait_with_output().expect("a child"));
        assert_eq!(ran.code, Some(130), "{name}: {}\n{}", ran.stdout, ran.stderr);
        assert!(ran.stdout.contains(&format!("trainyard train --resume runs/{name}")), "{name}: {}", ran.stdout);
        assert!(!ran.stderr.contains("launch:"), "{name}: {}", ran.stderr);
    }
}

/// A run that does not end by itself, with frequent checkpoints.
const ENDLESS: [&str; 3] = ["parallel.ranks=2", "training.steps=1000000", "checkpoint.interval_steps=4"];

/// The signal is sent to one rank of two, or to the launcher of one host of two.
#[test]
fn a_signal_to_any_rank_or_host_stops_the_run_with_a_checkpoint() {
    let folder = Folder::new();
    let start = |name: &str, ranks, options: &[&str]| {
        command(&folder, &launch(ranks, options, &train(name, &ENDLESS)), "").spawn().expect("the program starts")
    };
    let stopped = |name: &str, child: Child| {
        let ran = Ran::new(child.wait_with_output().expect("a child"));
        assert_eq!(ran.code, Some(130), "{name}: {}\n{}", ran.stdout, ran.stderr);
        assert!(!ran.stderr.contains("launch:"), "{name}: {}", ran.stderr);
        ran
    };
    let says = |name: &str, ran: &Ran| {
        assert!(ran.stdout.contains(&format!("trainyard train --resume runs/{name}")), "{name}: {}", ran.stdout);
        assert!(ran.stderr.contains("rank 1 was asked to stop"), "{name}: {}", ran.stderr);
    };
    for signal in ["-TERM", "-INT"] {
        let name = format!("rank{signal}");
        let child = start(&name, 2, &[]);
        wait_for_steps(&folder, &name, 5);
        send(signal, &rank_process(child.id(), 1));
        says(&name, &stopped(&name, child));
    }
    let port = free_port();
    let host = |node| {
        let options = ["--nnodes", "2", "--node-rank", node, "--master-addr", "localhost", "--master-port", &port];
        start("host", 1, &options)
    };
    let (first, second) = (host("0"), host("1"));
    wait_for_steps(&folder, "host", 5);
    send("-TERM", &second.id().to_string());
    stopped("host", second);
    says("host", &stopped("host", first));
}

/// The ranks of a killed launcher or supervisor end too, so that the run can be restarted at once.
#[test]
fn ranks_end_with_their_launcher_or_supervisor() {
    // Where the tests run in the background or under `nohup`, these signals are ignored, and new
    // processes would inherit that. They do not inherit a handler.
    for signal in [signal_hook::consts::SIGHUP, signal_hook::consts::SIGQUIT] {
        signal_hook::flag::register(signal, Arc::default()).expect("a handler");
    }
    let folder = Folder::new();
    let program = env!("CARGO_BIN_EXE_trainyard").to_owned();
    let plain = |name: &str| train(name, &ENDLESS);
    let restarting = |name: &str| [plain(name), ["--max-restarts", "1"].map(String::from).to_vec()].concat();
    let supervised =
        |name: &str| [vec!["supervise".to_owned(), "--".to_owned(), program.clone()], plain(name)].concat();
    for (name, arguments, signal) in [
        ("killed", launch(2, &[], &plain("killed")), "-KILL"),
        ("hung-up", launch(2, &[], &plain("hung-up")), "-HUP"),
        ("quit", launch(2, &[], &plain("quit")), "-QUIT"),
        ("restarting", launch(2, &["--max-restarts", "1"], &plain("restarting")), "-KILL"),
        ("threads", restarting("threads"), "-KILL"),
        ("supervised", supervised("supervised"), "-KILL"),
    ] {
        let mut child = command(&folder, &arguments, "").spawn().expect("the program starts");
        wait_for_steps(&folder, name, 8);
        let ranks = descendants(child.id());
        assert!(!ranks.is_empty(), "{name}");
        send(signal, &child.id().to_string());
        child.wait().expect("a child");
        let began = Instant::now();
        while let Some(rank) = ranks.iter().find(|pid| runs(pid)) {
            assert!(began.elapsed() < Duration::from_secs(15), "{name}: process {rank} goes on");
            thread::sleep(Duration::from_millis(5));
        }
        // No remaining process holds the run's lock, so it can be resumed.
        if !["killed", "threads"].contains(&name) {
            continue;
        }
        let resume = ["train".to_owned(), "--resume".to_owned(), format!("runs/{name}")];
        let child = command(&folder, &resume, "").spawn().expect("the program starts");
        let steps = metrics(&folder, name);
        wait_for_steps(&folder, name, steps + 5);
        send("-TERM", &child.id().to_string());
        let ran = Ran::new(child.wait_with_output().expect("a child"));
        assert_eq!(ran.code, Some(130), "{name}: {}", ran.stderr);
    }
}

/// Acceptance bar: a thousand connections of strangers, before, while and after the ranks connect,
/// change nothing.
#[test]
fn a_thousand_strangers_change_no_bit_of_a_run() {
    const CONNECTIONS: usize = 1000;
    let folder = Folder::new();
    for (name, ranks, sets) in [("two", 2, &ZERO_3[..]), ("four", 4, &HYBRID)] {
        let undisturbed = format!("{name}-threads");
        run(&folder, &train(&undisturbed, sets), "").ok();
        let port = free_port();
        let start = |rank: usize| {
            let mut command = command(&folder, &train(name, sets), "");
            command.env_remove("TRAINYARD_FAULTS").envs([("MASTER_ADDR", "localhost"), ("MASTER_PORT", &port)]);
            command.env("TRAINYARD_JOB_SECRET", "the secret of this job alone");
            command.envs([("RANK", rank.to_string()), ("WORLD_SIZE", ranks.to_string())]).spawn().unwrap()
        };
        // The last rank starts after half of the strangers.
        let mut processes: Vec<Child> = (0..ranks - 1).map(start).collect();
        let ports: Vec<u16> = processes.iter().map(|process| listening_port(process.id())).collect();
        let (next, held) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    while let Some(number) = Some(next.fetch_add(1, Ordering::Relaxed)).filter(|n| *n < CONNECTIONS) {
                        held.lock().unwrap().extend(stranger(number, ports[number % ports.len()]));
                    }
                });
            }
            while next.load(Ordering::Relaxed) < CONNECTIONS / 2 {
                thread::sleep(Duration::from_millis(1));
            }
            processes.push(start(ranks - 1));
        });
        let ran: Vec<Ran> =
            processes.into_iter().map(|process| Ran::new(process.wait_with_output().unwrap()).ok()).collect();
        assert!(ran[0].stderr.contains("rank 0 turned a connection away, one from "), "{}", ran[0].stderr);
        assert!(ran[0].stderr.contains(" more connections away"), "{}", ran[0].stderr);
        assert!(!ran[0].stderr.contains('\u{7}'), "what strangers say is not shown");
        same_tensors(&folder, name, &undisturbed);
    }
}

/// Connects as a stranger: with garbage, without the secret, with another version, or slowly.
/// Returns the connection if it must stay open.
fn stranger(number: usize, port: u16) -> Option<TcpStream> {
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    // When the ranks are connected, nobody listens any more.
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(2)).ok()?;
    let random = |byte: usize| (number * 131 + byte * 29) as u8 ^ (number >> 3) as u8;
    let noise: Vec<u8> = (0..100 + number).map(random).collect();
    let greeting = [b"TYR2".as_slice(), &noise[..32]].concat();
    // A stranger may be disconnected before it has sent everything.
    let _ = match number % 5 {
        0 => stream.write_all(&noise),
        1 => stream.write_all(&[&greeting[..], &noise[..32]].concat()),
        2 => stream.write_all(b"TYR1\x30\0\0\0{\"Here\":{\"version\":\"\x07\",\"rank\":99,\"world\":1}}"),
        3 => stream.write_all(&greeting[..number % greeting.len()]),
        _ => Ok(()),
    };
    (number % 5 > 2).then_some(stream)
}

/// The port at which a process listens, once it does.
fn listening_port(pid: u32) -> u16 {
    const LISTENS: &str = "0A";
    let began = Instant::now();
    loop {
        assert!(began.elapsed() < PATIENCE, "process {pid} does not listen");
        let files = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        let files = files.filter_map(|file| std::fs::read_link(file.path()).ok());
        let sockets: BTreeSet<String> = files.map(|target| target.to_string_lossy().into_owned()).collect();
        let tables = ["tcp", "tcp6"].map(|table| std::fs::read_to_string(format!("/proc/{pid}/net/{table}")));
        let lines = tables.iter().flatten().flat_map(|table| table.lines());
        let port = lines.map(|line| line.split_whitespace().collect::<Vec<_>>()).find_map(|fields| {
            let inode = format!("socket:[{}]", fields.get(9)?);
            let listens = fields[3] == LISTENS && sockets.contains(&inode);
            listens.then(|| u16::from_str_radix(fields[1].rsplit_once(':')?.1, 16).ok()).flatten()
        });
        match port {
            Some(port) => return port,
            None => thread::sleep(Duration::from_millis(2)),
        }
    }
}

/// The processes would agree in every shape, and train different models.
#[test]
fn processes_with_different_configurations_do_not_begin() {
    let folder = Folder::new();
    let port = free_port();
    let start = |rank: &str, sets: &[&str]| {
        let mut command = command(&folder, &train("apart", sets), "");
        command.env_remove("TRAINYARD_FAULTS").envs([("RANK", rank), ("WORLD_SIZE", "2")]);
        command.envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", port.as_str())]).spawn().unwrap()
    };
    let ranks = [
        start("0", &["compute.threads=1"]),
        start("1", &["compute.threads=2", "optimizer.learning_rate=1", "training.seed=3"]),
    ];
    for ran in ranks.map(|rank| Ran::new(rank.wait_with_output().unwrap())) {
        assert_eq!(ran.code, Some(1), "{}", ran.stderr);
        let says = "rank 1 and rank 0 were given different configurations: \
                    optimizer.learning_rate is 1.0 and 0.01, training.seed is 3 and 1337; start every process";
        assert!(ran.stderr.contains(says), "{}", ran.stderr);
    }
    assert!(!folder.join("runs").exists());
}

/// Options of torchrun and deepspeed are accepted if they ask for the default behaviour. Otherwise
/// the error names the equivalent.
#[test]
fn options_of_other_launchers_are_taken_or_answered() {
    let folder = Folder::new();
    run(&folder, &launch(2, &["--standalone", "--nnodes=1"], &train("alone", &["parallel.ranks=2"])), "").ok();
    for (option, code, says) in [
        ("--rdzv-endpoint=node0:29400", 2, "say --master-addr HOST --master-port PORT"),
        ("--rdzv_backend=c10d", 2, "ranks meet at host 0: on one host leave it out"),
        ("--rdzv-id=7", 2, "different values of --master-port"),
        ("--nnodes=3:2", 2, "write the smaller one first"),
        ("--nproc-per-node=gpu", 2, "a number from 1 to 4096 is wanted"),
        ("--hostfile=hosts", 2, "launch reaches no other host: start it once on each"),
        ("--include=node0:0,1", 2, "CUDA_VISIBLE_DEVICES"),
        ("--num_gpus=8", 2, "it is called --nproc-per-node here"),
        ("--num_nodes=2", 2, "it is called --nnodes here"),
        ("--tee=3", 1, "`--tee=3` is no option of launch"),
    ] {
        let line = ["launch", option, "train", "tiny.toml"].map(str::to_owned);
        let ran = run(&folder, &line, "");
        assert_eq!(ran.code, Some(code), "{option}: {}", ran.stderr);
        assert!(ran.stderr.contains(says), "{option}: {}", ran.stderr);
    }
}

#[test]
fn what_cannot_be_launched_says_why() {
    let folder = Folder::new();
    let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    type Case<'a> = (&'a str, &'a [(&'a str, &'a str)], &'a str);
    let cases: [Case; 7] = [
        ("launch --nproc-per-node 2 train gone.toml", &[], "cannot read gone.toml"),
        ("launch --nproc-per-node 2 eval runs/a", &[], "`eval` is nothing that ranks do together"),
        ("launch train tiny.toml --max-restarts 2", &[], "write --max-restarts before `train`"),
        ("launch --nnodes 2:4 train tiny.toml", &[], "--nnodes 2:4 needs --master-addr"),
        ("launch --nnodes 2:4 --master-addr a calibrate", &[], "--nnodes 2:4 is for training"),
        ("launch train tiny.toml", &[("RANK", "1"), ("WORLD_SIZE", "4")], "this process is rank 1 of 4 already"),
        (
            "train tiny.toml --max-restarts 2",
            &[("RANK", "1"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "127.0.0.1")],
            "a rank cannot be restarted alone",
        ),
    ];
    for (line, variables, why) in cases {
        let ran =
            Ran::new(command(&folder, &words(line), "").envs(variables.iter().copied()).output().expect("it starts"));
        assert_eq!(ran.code, Some(1), "{line}: {}", ran.stderr);
        assert!(ran.stderr.contains(why), "{line}: {}", ran.stderr);
    }
    // A rank that no other rank joins.
    let mut alone = command(&folder, &words("train tiny.toml"), "");
    alone.envs([
        ("RANK", "0"),
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("TRAINYARD_RENDEZVOUS_SECONDS", "0.2"),
    ]);
    let ran = Ran::new(alone.env("MASTER_PORT", free_port()).output().expect("it starts"));
    assert_eq!(ran.code, Some(1), "{}", ran.stderr);
    assert!(ran.stderr.contains("rank 1 of a world of 2 did not come to 127.0.0.1"), "{}", ran.stderr);
}

/// The children of a process.
fn children(pid: &str) -> Vec<String> {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    children.split_whitespace().map(str::to_owned).collect()
}

/// The children of a process, their children, and so on.
fn descendants(pid: u32) -> Vec<String> {
    let mut all = children(&pid.to_string());
    let mut next = 0;
    while next < all.len() {
        all.extend(children(&all[next]));
        next += 1;
    }
    all
}

/// True if the process has not ended; a zombie has ended.
fn runs(pid: &str) -> bool {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.trim_start().chars().next());
    !matches!(state, Some('Z' | 'X') | None)
}

/// The process of a rank among the children of `launcher`.
fn rank_process(launcher: u32, rank: u32) -> String {
    let is_rank = |pid: &String| {
        let variables = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        variables.split(|&byte| byte == 0).any(|variable| variable == format!("RANK={rank}").as_bytes())
    };
    children(&launcher.to_string()).into_iter().find(is_rank).expect("a process for each rank")
}
