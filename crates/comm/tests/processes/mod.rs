//! Common to the tests of ranks that are processes: the part of a worker, and the reports that
//! survivors of a fault have to make.

#![allow(dead_code, reason = "every test binary uses a part of it")]

use crate::conformance::{self, Case, KINDS, check_as, everything};
use half::bf16;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use trainyard_comm::fault::{Fault, FaultPlan};
use trainyard_comm::{CommError, Communicator, DEADLINE_DEFAULT, Environment, Position};

/// The environment variable that makes a test program a worker, and what it says.
pub const CASE: &str = "TRAINYARD_TEST_CASE";
/// The time for which workers wait for each other when something is to go wrong.
pub const DEADLINE: Duration = Duration::from_millis(1500);

/// Faults of rank 1, what survivors say of it, and how many of three they are. Who is dead or
/// stopped cannot be asked: it was last heard of one operation earlier.
pub const FAULTS: [(&str, &str, usize); 6] = [
    ("kill rank=1 step=2 instruction=7", "died: its process no longer exists", 2),
    ("hang rank=1 step=2 instruction=7", "no arrival within 1.5 s", 3),
    ("corrupt rank=1 step=2 instruction=7", "arrived with a wrong checksum", 3),
    ("refuse rank=1 step=2 instruction=7", "refused by an injected fault", 3),
    ("freeze rank=1 step=2 instruction=7", "its process answers nothing", 2),
    ("disagree rank=1 step=2 instruction=7", "ranks disagree", 3),
];

/// Compares what the ranks reported with what they should say of a fault.
pub fn check_reports(fault: &str, said: &str, survivors: usize, reports: &[Option<String>]) {
    assert_eq!(reports.iter().flatten().count(), survivors, "{fault}: {reports:?}");
    for report in reports.iter().flatten() {
        assert!(report.contains(said), "{fault}: {report}");
        assert!(report.contains("rank 1 (host"), "{fault}: {report}");
        let silent = fault.starts_with("kill") || fault.starts_with("freeze");
        let last = if silent { "step 2, instruction 6 (Gather head)" } else { "step 2, instruction 7 (Reduce head)" };
        assert!(fault.starts_with("disagree") || report.contains(last), "{fault}: {report}");
    }
}

/// The report in a rank's output.
pub fn report(said: &str, rank: usize) -> Option<String> {
    let mark = format!("rank {rank} reports: ");
    said.lines().find_map(|line| line.split_once(&mark).map(|(_, report)| report.to_owned()))
}

/// A rank's part, of which the environment says which, in a world of this backend that it connects
/// to, or `alone`.
pub fn worker(backend: &str, alone: impl FnOnce() -> Communicator) {
    let case = std::env::var(CASE).expect("a worker is started by a test");
    let environment = Environment::detect().unwrap();
    let world = environment.connect(DEADLINE_DEFAULT, |note| println!("{note}")).unwrap().unwrap_or_else(alone);
    assert_eq!((world.rank() as u32, world.size() as u32), (environment.rank, environment.world));
    assert_eq!(world.backend(), backend);
    play(&world, &case);
}

fn play(world: &Communicator, case: &str) {
    match case.split('/').collect::<Vec<_>>()[..] {
        ["suite"] => everything(world),
        ["sequences"] => sequences(world),
        ["hierarchy"] => hierarchy(world),
        ["fault", elements, fault] => return strike(world, elements.parse().unwrap(), fault),
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
                        let mut stop = Command::new("sh");
                        stop.args(["-c", "kill -STOP $PPID; sleep 8; kill -KILL $PPID"]);
                        // The test waits for the end of this rank's output, and is not to wait for
                        // the shell's too.
                        assert!(stop.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok());
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
