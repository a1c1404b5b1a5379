//! Ranks that fail under the program: exit code 70, reports in the run's folder, restarts that end
//! with the bits of an undisturbed run.

mod common;

use common::{Folder, Ran, tensors};

const RANKS: [&str; 4] = ["--set", "parallel.ranks=2", "--set", "parallel.zero_stage=3"];

/// `trainyard train` of a run called `name` with `more` arguments, while `faults` strike.
fn train(folder: &Folder, name: &str, more: &[&str], faults: &str) -> Ran {
    let name = format!("run.name='{name}'");
    let arguments = [&["train", "tiny.toml", "--set", &name], &RANKS[..], more].concat();
    Ran::new(folder.command(&arguments).env("TRAINYARD_FAULTS", faults).output().expect("the program starts"))
}

/// The ranks whose reports are in a run's folder, in order.
fn reports(folder: &Folder, name: &str) -> Vec<String> {
    let entries = std::fs::read_dir(folder.join(&format!("runs/{name}/faults"))).expect("reports");
    let files = entries.map(|entry| entry.expect("listed").file_name().to_string_lossy().into_owned());
    let mut ranks: Vec<String> = files.filter_map(|file| Some(file.split_once("-rank-")?.1.to_owned())).collect();
    ranks.sort();
    ranks
}

#[test]
fn a_killed_rank_is_named_and_the_exit_code_says_so() {
    let folder = Folder::new();
    let ran = train(&folder, "killed", &[], "kill rank=1 step=7 instruction=4");
    assert_eq!(ran.code, Some(70), "{}\n{}", ran.stdout, ran.stderr);
    assert!(ran.stderr.contains("this run is going to fail on purpose: kill rank=1"), "{}", ran.stderr);
    for said in ["rank 1", "step 7, instruction 4", "where the ranks were"] {
        let error = ran.stderr.split("error: ").last().unwrap();
        assert!(error.contains(said), "{said}: {error}");
    }
    assert_eq!(reports(&folder, "killed"), ["0.json", "1.json"]);
}

#[test]
fn faults_that_make_no_sense_are_refused() {
    let folder = Folder::new();
    let ran = train(&folder, "odd", &[], "explode rank=1 step=7 instruction=4");
    assert_eq!(ran.code, Some(1));
    assert!(ran.stderr.contains("TRAINYARD_FAULTS: `explode"), "{}", ran.stderr);
}

/// A fault that never struck once looked like one that was survived.
#[test]
fn faults_that_do_not_strike_are_named() {
    let folder = Folder::new();
    let ran = train(&folder, "nobody", &[], "delay:1 rank=0 step=1 instruction=4; kill rank=2 step=7 instruction=4");
    assert_eq!(ran.code, Some(1), "{}", ran.stderr);
    let says = "`kill rank=2 step=7 instruction=4` can never strike: this run has ranks 0 to 1";
    assert!(ran.stderr.contains(says), "{}", ran.stderr);
    assert!(!folder.join("runs/nobody").exists());

    // The last of 12 steps is 11.
    let vain = [
        "kill rank=1 step=12 instruction=4",
        "refuse rank=0 step=3 instruction=900",
        "corrupt rank=1 step=3 instruction=900",
        "refuse rank=1 operation=3 group=none",
    ];
    let faults = ["delay:1 rank=1 step=11 instruction=4", &vain.join("; ")].join("; ");
    let processes = ["launch", "--nproc-per-node", "2", "train", "tiny.toml", "--set", "run.name='processes'"];
    let processes = folder.command(&processes).env("TRAINYARD_FAULTS", &faults).output().expect("the program starts");
    for ran in [train(&folder, "vain", &[], &faults), Ran::new(processes)].map(Ran::ok) {
        for fault in vain {
            assert_eq!(ran.stderr.matches(&format!("`{fault}` did not strike")).count(), 1, "{fault}: {}", ran.stderr);
        }
        assert!(!ran.stderr.contains("`delay"), "{}", ran.stderr);
    }
}

#[test]
fn restarts_end_with_the_same_bits() {
    let folder = Folder::new();
    train(&folder, "whole", &[], "").ok();
    let whole = tensors(&folder.join("runs/whole"));
    let deadline = ["--set", "parallel.deadline_seconds=2", "--set", "parallel.verify=true", "--max-restarts", "2"];
    // A hanging thread never returns, so its process is ended. After a failure before the first
    // checkpoint, the run begins anew.
    for (name, fault) in [
        ("killed", "kill rank=1 step=7 instruction=4"),
        ("early", "refuse rank=0 step=1 instruction=2"),
        ("hung", "hang rank=1 step=6 instruction=5"),
    ] {
        let ran = train(&folder, name, &deadline, fault).ok();
        assert!(ran.stderr.contains("supervisor: exit status: 70"), "{}", ran.stderr);
        assert!(ran.stderr.contains(&format!("restart 1 of 2: runs/{name} goes on")), "{}", ran.stderr);
        assert!(tensors(&folder.join(&format!("runs/{name}"))) == whole, "{name}: the tensors differ");
        assert_eq!(reports(&folder, name), ["0.json", "1.json"], "{name}");
    }
}

#[test]
fn a_rank_alone_that_hangs_is_ended_too() {
    let folder = Folder::new();
    let arguments = ["train", "tiny.toml", "--set", "parallel.deadline_seconds=1"];
    let ran = folder.command(&arguments).env("TRAINYARD_FAULTS", "hang rank=0 step=3 instruction=0").output();
    let ran = Ran::new(ran.expect("the program starts"));
    assert_eq!(ran.code, Some(70), "{}\n{}", ran.stdout, ran.stderr);
    assert!(ran.stderr.contains("no progress within the deadline") && ran.stderr.contains("step 3"), "{}", ran.stderr);
    assert_eq!(reports(&folder, "tiny"), ["0.json"]);
}

#[test]
fn only_faults_are_worth_a_restart() {
    let folder = Folder::new();
    let ran = folder.run(&["train", "tiny.toml", "--max-restarts", "3", "--set", "data.train=['gone.txt']"]);
    assert_eq!(ran.code, Some(1), "{}", ran.stderr);
    assert!(!ran.stderr.contains("restart 1"), "{}", ran.stderr);
}
