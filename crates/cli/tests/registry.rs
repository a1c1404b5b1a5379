//! The registry of runs with many writers that are killed.

mod common;

use common::Folder;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

const WRITERS: usize = 10;
const KILLS: usize = 10;

fn make_run(runs: &Path, name: &str, dim: usize) {
    let folder = runs.join(name);
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("config.toml"), format!("[model]\ndim = {dim}\n[training]\nsteps = 1\n")).unwrap();
    fs::write(folder.join("metrics.jsonl"), format!("{{\"step\":1,\"loss\":2.5,\"tps\":{dim}}}\n")).unwrap();
}

/// Each writer is killed ten times, at a moment that its number decides.
#[test]
fn ten_writers_killed_a_hundred_times_lose_no_run() {
    let folder = Folder::new();
    let runs = folder.join("runs");
    std::thread::scope(|scope| {
        for writer in 0..WRITERS {
            let runs = &runs;
            scope.spawn(move || {
                for kill in 0..KILLS {
                    make_run(runs, &format!("run-{writer}-{kill}"), 100 * writer + kill);
                    let mut command = Command::new(env!("CARGO_BIN_EXE_trainyard"));
                    let mut child = command
                        .args(["runs", "--csv"])
                        .arg(runs)
                        .stdout(Stdio::null())
                        .stderr(Stdio::null())
                        .spawn()
                        .unwrap();
                    // The moment of the kill is the point of the test: before, within or after
                    // the write.
                    std::thread::sleep(Duration::from_millis((7 * writer + 13 * kill) as u64 % 97));
                    child.kill().unwrap();
                    child.wait().unwrap();
                }
            });
        }
    });
    let listed = folder.run(&["runs", "--json"]).ok();
    assert_eq!(listed.stderr, "", "nothing was damaged");
    let listed: serde_json::Value = serde_json::from_str(&listed.stdout).unwrap();
    let listed = listed.as_array().unwrap();
    assert_eq!(listed.len(), WRITERS * KILLS);
    for run in listed {
        assert_eq!((&run["tps"].as_f64(), &run["loss"]), (&run["config"]["model.dim"].as_f64(), &2.5.into()), "{run}");
    }
    let check = folder.run(&["runs", "--sql", "PRAGMA integrity_check"]).ok().stdout;
    assert!(check.contains("ok"), "{check}");
    let sorted = folder.run(&["runs", "--where", "dim>=901", "--sort", "tps", "--csv"]).ok().stdout;
    let names: Vec<&str> = sorted.lines().skip(1).map(|line| line.split(',').next().unwrap()).collect();
    assert_eq!((names.len(), names[0], names[8]), (9, "run-9-9", "run-9-1"));
    let unknown = folder.run(&["runs", "--where", "dimm=3"]);
    assert!(unknown.code == Some(1) && unknown.stderr.contains("no run has `dimm`"), "{}", unknown.stderr);
}
