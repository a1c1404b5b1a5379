//! The conformance suite and the failures over MPI. Each test starts this very program under `mpirun`, where `worker` plays one rank.
//!
//! Flags of `mpirun` are Open MPI's; other launchers are not started here.
#![cfg(feature = "mpi")]

mod conformance;

use conformance::{Case, KINDS, check_as, everything};
use half::bf16;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use trainyard_comm::fault::{Fault, FaultPlan};
use trainyard_comm::{CommError, Communicator, Environment, Position};

const CASE: &str = "TRAINYARD_TEST_CASE";
const DEADLINE: Duration = Duration::from_millis(1500);

/// Starts `ranks` workers and waits for them.
fn mpirun(ranks: usize, case: &str) -> Output {
    let exe = std::env::current_exe().unwrap();
    let mut command = Command::new("mpirun");
    command.args(["--allow-run-as-root", "--oversubscribe", "--tag-output", "--timeout", "120"]);
    // Without it the launcher would end the survivors before they report.
    command.args(["--mca", "orte_enable_recovery", "1", "--mca", "orte_abort_on_non_zero_status", "0"]);
    command.args(["-np", &ranks.to_string()]).arg(exe).args(["worker", "--exact", "--nocapture", "--test-threads=1"]);
    command.env(CASE, case).stdin(Stdio::null()).output().expect("mpirun can be started")
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// Runs a case that succeeds on every rank.
fn succeeds(ranks: usize, case: &str) {
    let output = mpirun(ranks, case);
    let said = text(&output);
    assert!(output.status.success(), "{said}");
    assert_eq!(said.matches("worker done").count(), ranks, "{said}");
}

#[test]
fn the_suite_holds_over_mpi() {
    for ranks in 1..=4 {
        succeeds(ranks, "suite");
    }
}

#[test]
fn any_sequence_over_mpi() {
    succeeds(3, "sequences");
}

#[test]
fn hierarchies_hold_over_mpi() {
    succeeds(4, "hierarchy");
}

/// What each rank reported, by rank.
fn reports(ranks: usize, case: &str) -> Vec<Option<String>> {
    let said = text(&mpirun(ranks, case));
    let report = |rank| {
        let mark = format!("rank {rank} reports: ");
        said.lines().find_map(|line| line.split_once(&mark).map(|(_, report)| report.to_owned()))
    };
    (0..ranks).map(report).collect()
}

#[test]
fn failures_over_mpi_name_their_culprit() {
    // Fault, and what survivors say of rank 1. Who is dead or stopped cannot be asked: it was last heard of one operation earlier.
    for (fault, said, survivors) in [
        ("kill rank=1 step=2 instruction=7", "died: its process no longer exists", 2),
        ("hang rank=1 step=2 instruction=7", "no arrival within 1.5 s", 3),
        ("corrupt rank=1 step=2 instruction=7", "arrived with a wrong checksum", 3),
        ("refuse rank=1 step=2 instruction=7", "refused by an injected fault", 3),
        ("freeze rank=1 step=2 instruction=7", "its process answers nothing", 2),
        ("disagree rank=1 step=2 instruction=7", "ranks disagree", 3),
    ] {
        for elements in [10, 300_000] {
            let reports = reports(3, &format!("fault/{elements}/{fault}"));
            assert_eq!(reports.iter().flatten().count(), survivors, "{fault}: {reports:?}");
            for report in reports.into_iter().flatten() {
                assert!(report.contains(said), "{fault}: {report}");
                assert!(report.contains("rank 1 (host"), "{fault}: {report}");
                let silent = fault.starts_with("kill") || fault.starts_with("freeze");
                let last =
                    if silent { "step 2, instruction 6 (Gather head)" } else { "step 2, instruction 7 (Reduce head)" };
                assert!(fault.starts_with("disagree") || report.contains(last), "{fault}: {report}");
            }
        }
    }
}

/// A rank's part; does nothing unless started by the tests above.
#[test]
fn worker() {
    let Ok(case) = std::env::var(CASE) else { return };
    let environment = Environment::detect().unwrap();
    let world = match environment.connect().unwrap() {
        Some(world) => world,
        None => trainyard_comm::mpi::init().unwrap(),
    };
    assert_eq!((world.rank() as u32, world.size() as u32), (environment.rank, environment.world));
    assert_eq!(world.backend(), "mpi");
    match case.split('/').collect::<Vec<_>>()[..] {
        ["suite"] => everything(&world),
        ["sequences"] => sequences(&world),
        ["hierarchy"] => hierarchy(&world),
        ["fault", elements, fault] => return strike(&world, elements.parse().unwrap(), fault),
        _ => panic!("no case {case}"),
    }
    println!("worker done");
}

/// Sequences of operations drawn from seeds, on the world and on groups of random splits.
fn sequences(world: &Communicator) {
    let mut state = 7u64;
    let mut draw = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    for _ in 0..25 {
        let colors: Vec<(u32, u32)> = (0..world.size()).map(|_| (draw(3) as u32, draw(5) as u32)).collect();
        let (color, key) = colors[world.rank()];
        let part = world.split(color, key, "part").unwrap();
        for _ in 0..8 {
            let elements = match draw(3) {
                0 => draw(40),
                1 => draw(5000),
                _ => draw(400_000),
            };
            let operation = KINDS[draw(KINDS.len() as u64) as usize];
            let case = Case { operation, elements: elements as usize, root: draw(16) as usize, seed: draw(1 << 30) };
            let comm = if draw(2) == 0 { &part } else { world };
            comm.set_verify(draw(4) == 0);
            check_as::<f32>(comm, &case);
            check_as::<bf16>(comm, &case);
        }
    }
}

fn hierarchy(world: &Communicator) {
    let hierarchy = world.hierarchy().unwrap();
    assert_eq!(hierarchy.inside().size(), world.size(), "one host");
    let mut flat = conformance::data::<bf16>(5, world.rank(), 5003);
    let mut nested = flat.clone();
    world.all_reduce(&mut flat).unwrap();
    hierarchy.all_reduce(&mut nested).unwrap();
    assert_eq!(flat, nested);
}

/// Steps until a fault strikes, then says what this rank was told.
fn strike(world: &Communicator, elements: usize, fault: &str) {
    world.set_deadline(DEADLINE);
    world.set_verify(true);
    let rank = world.rank();
    let is_victim = rank == 1;
    match fault.parse::<Fault>() {
        Ok(fault) => world.inject(Arc::new(FaultPlan::new([fault]))),
        Err(_) => assert!(fault.starts_with("freeze") || fault.starts_with("disagree")),
    }
    let lane = world.duplicate("lane").unwrap();
    let start = Instant::now();
    let run = || -> Result<(), CommError> {
        for step in 0..5 {
            for (instruction, what) in [(6, "Gather head"), (7, "Reduce head")] {
                lane.post(Position { step, instruction, what: what.to_owned() });
                if is_victim && (step, instruction) == (2, 7) {
                    if fault.starts_with("freeze") {
                        // A stopped process neither computes nor answers.
                        let stop =
                            Command::new("sh").args(["-c", "kill -STOP $PPID; sleep 8; kill -KILL $PPID"]).status();
                        assert!(stop.is_ok());
                    } else if fault.starts_with("disagree") {
                        lane.barrier()?;
                    }
                }
                let mut sum = vec![1f32; elements];
                lane.all_reduce(&mut sum)?;
                assert!(sum.iter().all(|&value| value == world.size() as f32));
            }
        }
        Ok(())
    };
    let error = run().unwrap_err();
    assert!(start.elapsed() < 4 * DEADLINE);
    println!("rank {rank} reports: {error}");
    assert_eq!(error.culprits.len(), 1);
}
