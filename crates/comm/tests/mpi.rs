//! The conformance suite and the failures over MPI. Each test starts this very program under
//! `mpirun`, where `worker` plays one rank.
//!
//! Flags of `mpirun` are Open MPI's; other launchers are not started here.
#![cfg(feature = "mpi")]

mod conformance;
mod processes;

use processes::{CASE, FAULTS, check_reports, report};
use std::process::{Command, Output, Stdio};

/// Starts `ranks` workers and waits for them.
fn mpirun(ranks: usize, case: &str) -> Output {
    let exe = std::env::current_exe().unwrap();
    // Launchers at the same time make and remove a folder that they share; each has its own here.
    let own = tempfile::tempdir().unwrap();
    let mut command = Command::new("mpirun");
    command.args(["--allow-run-as-root", "--oversubscribe", "--tag-output", "--timeout", "120"]);
    // Without it the launcher would end the survivors before they report.
    command.args(["--mca", "orte_enable_recovery", "1", "--mca", "orte_abort_on_non_zero_status", "0"]);
    command.args(["--mca", "orte_tmpdir_base"]).arg(own.path());
    command.args(["-np", &ranks.to_string()]).arg(exe).args([
        "worker",
        "--exact",
        "--ignored",
        "--nocapture",
        "--test-threads=1",
    ]);
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

#[test]
fn failures_over_mpi_name_their_culprit() {
    for (fault, what, survivors) in FAULTS {
        for elements in [10, 300_000] {
            let said = text(&mpirun(3, &format!("fault/{elements}/{fault}")));
            let reports: Vec<_> = (0..3).map(|rank| report(&said, rank)).collect();
            check_reports(fault, what, survivors, &reports);
        }
    }
}

/// A rank's part, which the tests above start.
#[test]
#[ignore = "started by other tests"]
fn worker() {
    processes::worker("mpi", || trainyard_comm::mpi::init().unwrap());
}
