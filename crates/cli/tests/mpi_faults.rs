//! Ranks that are MPI processes and fail. Each is named on every other rank within the deadline,
//! nothing wrong is written, and the supervised run ends with the bits of an undisturbed one.
//!
//! Faults are drawn from seeds; processes are also killed and stopped from outside. Ignored unless
//! the program is built with the feature `mpi`.
//! `TRAINYARD_FAULT_SEEDS=0..60 cargo test -p trainyard --features mpi --test mpi_faults` draws
//! other faults.

mod common;
mod mpirun;

use common::{Folder, checkpoints};
use mpirun::Mpirun;
use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use trainyard_comm::fault::{Action, Fault};
use trainyard_engine::faults::seeded;
use trainyard_program::Program;

const STEPS: u64 = 6;
const DEADLINE_S: f64 = 4.0;
/// Number of concurrent runs; they mostly wait for deadlines.
const AT_ONCE: usize = 3;
/// Time limit between a failure and a rank's report, on a machine with more processes than cores.
const REPORT_S: f64 = 2.0;

/// Layouts with their number of ranks.
const LAYOUTS: [(usize, &[&str]); 3] = [
    (2, &["parallel.zero_stage=3"]),
    (2, &["parallel.zero_stage=1", "parallel.reduce_schedule='micro_batch'"]),
    (4, &["parallel.zero_stage=3", "parallel.data_parallel_replicate_degree=2"]),
];

/// The disturbance of a run.
#[derive(Debug)]
enum Blow {
    /// A fault in the program, at its own position.
    Fault(Fault),
    /// A signal to the process of a rank, after a number of steps.
    Signal { name: &'static str, rank: u32, steps: usize },
}

impl Blow {
    fn drawn(seed: u64, programs: &[Program]) -> Blow {
        let ranks = programs.len() as u64;
        match seed % 6 {
            4 => Blow::Signal { name: "KILL", rank: (seed / 6 % ranks) as u32, steps: 1 + (seed / 3 % 4) as usize },
            5 => Blow::Signal { name: "STOP", rank: (seed / 6 % ranks) as u32, steps: 1 + (seed / 3 % 4) as usize },
            _ => {
                let late = if (seed / 6).is_multiple_of(3) { 0.005 } else { 1.5 };
                Blow::Fault(seeded(seed, programs, STEPS, Duration::from_secs_f64(DEADLINE_S * late)))
            }
        }
    }

    fn victim(&self) -> u32 {
        match self {
            Blow::Fault(fault) => fault.rank,
            Blow::Signal { rank, .. } => *rank,
        }
    }

    /// True if the run must continue undisturbed.
    fn is_harmless(&self) -> bool {
        matches!(self, Blow::Fault(Fault { action: Action::Delay(delay), .. }) if delay.as_secs_f64() < DEADLINE_S / 2.0)
    }

    /// True if the failed rank's process writes a report itself.
    fn reports(&self) -> bool {
        !matches!(self, Blow::Signal { .. } | Blow::Fault(Fault { action: Action::Kill, .. }))
    }
}

/// `train tiny.toml` as the run `name` on a layout.
fn train(name: &str, layout: usize) -> Vec<String> {
    let name = format!("run.name='{name}'");
    let (steps, deadline) = (format!("training.steps={STEPS}"), format!("parallel.deadline_seconds={DEADLINE_S}"));
    let common = ["training.micro_batch_size=1", "training.accumulation_steps=2", "parallel.verify=true"];
    let checkpoints = ["checkpoint.interval_steps=2", "checkpoint.keep_last=100", "data.validation_fraction=0.0"];
    let own: [&str; 3] = [&name, &steps, &deadline];
    let sets = [&own, &common[..], &checkpoints, LAYOUTS[layout].1].concat();
    let sets = sets.iter().flat_map(|set| ["--set".to_owned(), (*set).to_owned()]);
    ["train".to_owned(), "tiny.toml".to_owned()].into_iter().chain(sets).collect()
}

/// Each layout's undisturbed run, and its ranks' programs. Data-parallel ranks have the same
/// instructions.
fn prepare(folder: &Folder) -> Vec<Vec<Program>> {
    let whole = |(layout, (ranks, _)): (usize, &(usize, &[&str]))| {
        let name = format!("whole-{layout}");
        let arguments = [train(&name, layout), vec!["--set".into(), format!("parallel.ranks={ranks}")]].concat();
        folder.run(&arguments.iter().map(String::as_str).collect::<Vec<_>>()).ok();
        let plan = fs::read(folder.join(&format!("runs/{name}/plan.json"))).expect("the run's plan");
        let plan: serde_json::Value = serde_json::from_slice(&plan).expect("JSON");
        let program: Program = serde_json::from_value(plan["program"].clone()).expect("a program");
        vec![program; *ranks]
    };
    LAYOUTS.iter().enumerate().map(whole).collect()
}

/// Starts the run under the supervisor. A script starts every rank and records its process id and
/// its first exit code.
fn start(folder: &Folder, name: &str, layout: usize, blow: &Blow) -> Child {
    let ranks = LAYOUTS[layout].0;
    let supervise = ["supervise", "--max-restarts", "1", "--"].map(str::to_owned).to_vec();
    let rank = [
        "sh".to_owned(),
        "rank.sh".to_owned(),
        format!("processes-{name}"),
        env!("CARGO_BIN_EXE_trainyard").to_owned(),
    ];
    let arguments = [supervise, Mpirun::launcher(folder, ranks), rank.to_vec(), train(name, layout)].concat();
    fs::create_dir(folder.join(&format!("processes-{name}"))).expect("a temporary folder can be written");
    let mut command = folder.command(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
    if let Blow::Fault(fault) = blow {
        command.env("TRAINYARD_FAULTS", fault.to_string());
    }
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts")
}

/// The record of `rank.sh` about a rank: the id of its first process (`pid`) or its exit code
/// (`exit`).
fn first(folder: &Folder, name: &str, rank: usize, what: &str) -> Option<u32> {
    let text = fs::read_to_string(folder.join(&format!("processes-{name}/{rank}.{what}"))).ok()?;
    text.lines().next()?.parse().ok()
}

/// Sends the signal when the run has made its steps.
fn signal(folder: &Folder, name: &str, signal: &str, rank: u32, steps: usize) -> Result<(), String> {
    let metrics = folder.join(&format!("runs/{name}/metrics.jsonl"));
    let began = Instant::now();
    while fs::read_to_string(&metrics).map_or(0, |text| text.lines().count()) < steps {
        if began.elapsed() > Duration::from_secs(100) {
            return Err(format!("the run does not come to step {steps}"));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    let pid = first(folder, name, rank as usize, "pid").ok_or("no process is known")?;
    let sent = std::process::Command::new("kill").args([format!("-{signal}"), pid.to_string()]).status();
    if sent.is_ok_and(|status| status.success()) { Ok(()) } else { Err("the process was gone already".to_owned()) }
}

/// Runs with the disturbance `blow`. Returns a description of the first wrong behaviour, if any.
fn trouble(folder: &Folder, name: &str, layout: usize, blow: &Blow) -> Option<String> {
    let child = start(folder, name, layout, blow);
    let sent = match blow {
        Blow::Signal { name: sent, rank, steps } => signal(folder, name, sent, *rank, *steps),
        Blow::Fault(_) => Ok(()),
    };
    let output = child.wait_with_output().expect("a child");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    if let Err(why) = sent {
        return Some(why);
    }
    if !output.status.success() {
        return Some(format!("the run does not go on: {}\n{said}", output.status));
    }
    let run = folder.join(&format!("runs/{name}"));
    let restarted = said.contains("restart 1 of 1");
    if restarted == blow.is_harmless() {
        return Some(format!("restarted: {restarted}\n{said}"));
    }
    if restarted && let Some(what) = (0..LAYOUTS[layout].0).find_map(|rank| misnamed(folder, name, rank, blow)) {
        return Some(format!("{what}\n{said}"));
    }
    let whole = checkpoints(&folder.join(&format!("runs/whole-{layout}")));
    let own = checkpoints(&run);
    let wrong = own.iter().find(|(step, tensors)| whole.get(*step) != Some(tensors));
    match wrong {
        Some((step, _)) => Some(format!("{step} is wrong")),
        None => (own.last_key_value() != whole.last_key_value()).then(|| "the run ends too early".to_owned()),
    }
}

/// Checks the report and the exit of a rank in the first attempt. Returns a description of the
/// first error, if any.
fn misnamed(folder: &Folder, name: &str, rank: usize, blow: &Blow) -> Option<String> {
    let is_victim = rank == blow.victim() as usize;
    if is_victim && !blow.reports() {
        return None;
    }
    match first(folder, name, rank, "exit") {
        Some(70) => {}
        code => return Some(format!("rank {rank} ended with {code:?}")),
    }
    let Some(report) = report(&folder.join(&format!("runs/{name}/faults")), rank) else {
        return Some(format!("no report of rank {rank}"));
    };
    let lanes = report["lanes"].as_array().into_iter().flatten();
    let waited = lanes.filter_map(|lane| lane["for_s"].as_f64()).fold(0.0, f64::max);
    // The process of a hanging rank is ended later, when the others have ended.
    if !is_victim && waited > DEADLINE_S + REPORT_S {
        return Some(format!("rank {rank} was told after {waited:.1} s"));
    }
    // The failed rank itself knows the cause.
    if is_victim && report["failure"].is_null() {
        return None;
    }
    let culprits = report["failure"]["culprits"].as_array().into_iter().flatten();
    let culprits: Vec<Option<u64>> = culprits.map(|culprit| culprit["rank"].as_u64()).collect();
    (culprits != [Some(blow.victim().into())]).then(|| format!("rank {rank} names {culprits:?}"))
}

/// The only report of a rank.
fn report(faults: &Path, rank: usize) -> Option<serde_json::Value> {
    let files = fs::read_dir(faults).ok()?.map(|entry| entry.expect("listed").path());
    let file = files.into_iter().find(|path| path.to_string_lossy().ends_with(&format!("-rank-{rank}.json")))?;
    serde_json::from_slice(&fs::read(file).ok()?).ok()
}

/// The requested seeds. By default six, which draw every kind of disturbance, or sixty if all tests
/// are requested.
fn seeds() -> Range<u64> {
    let Ok(text) = std::env::var("TRAINYARD_FAULT_SEEDS") else {
        return match trainyard_testing::cases("seeded faults", 6, 60) {
            60 => 0..60,
            few => 36..36 + few,
        };
    };
    let (first, end) = text.split_once("..").expect("TRAINYARD_FAULT_SEEDS is FIRST..END");
    first.parse().expect("a number")..end.parse().expect("a number")
}

#[test]
#[cfg_attr(not(feature = "mpi"), ignore = "needs the feature mpi")]
fn faults_of_processes_are_named_and_survived() {
    let folder = Folder::new();
    folder.write(
        "rank.sh",
        "folder=$1; shift\n\"$@\" &\necho $! >> $folder/$OMPI_COMM_WORLD_RANK.pid\nwait $!\ncode=$?\n\
         echo $code >> $folder/$OMPI_COMM_WORLD_RANK.exit\nexit $code\n",
    );
    let programs = prepare(&folder);
    let (seeds, next) = (seeds(), AtomicUsize::new(0));
    let (complaints, drawn) = (Mutex::new(Vec::new()), Mutex::new(BTreeMap::new()));
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some(seed) = seeds.clone().nth(next.fetch_add(1, Ordering::Relaxed)) {
                    // Six seeds per layout, so that each meets every kind of disturbance.
                    let layout = (seed / 2 % LAYOUTS.len() as u64) as usize;
                    let blow = Blow::drawn(seed, &programs[layout]);
                    let kind = match &blow {
                        Blow::Fault(fault) => fault.to_string().split(' ').next().unwrap_or_default().to_owned(),
                        Blow::Signal { name, .. } => (*name).to_owned(),
                    };
                    *drawn.lock().unwrap().entry(kind).or_insert(0) += 1;
                    if let Some(trouble) = trouble(&folder, &format!("seed-{seed}"), layout, &blow) {
                        complaints.lock().unwrap().push(format!("seed {seed}, layout {layout}, {blow:?}: {trouble}"));
                    }
                }
            });
        }
    });
    println!("drawn: {:?}", drawn.into_inner().unwrap());
    let complaints = complaints.into_inner().unwrap();
    assert!(complaints.is_empty(), "{} of {}:\n{}", complaints.len(), seeds.count(), complaints.join("\n"));
}
