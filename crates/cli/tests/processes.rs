//! Processes that a launcher starts together: calibration, plans, `--plan auto`, and the
//! predictions beside their runs.

mod common;

use common::{Folder, Ran};
use serde_json::Value;
use trainyard_sim::MachineProfile;
use trainyard_sim::machine::{Machine, Processes};

/// A folder with a tiny configuration that does not fix the number of threads.
fn folder() -> Folder {
    let folder = Folder::new();
    let free = common::TINY.replace("[compute]\nthreads = 1\n", "");
    folder.write("c.toml", free.replace("micro_batch_size = 4", "global_batch_size = 4"));
    folder
}

/// Runs `arguments`, with `processes.toml` as the profile of processes.
fn run(folder: &Folder, arguments: &[&str]) -> Ran {
    let mut command = folder.command(arguments);
    command.env("TRAINYARD_PROCESSES_PROFILE", folder.join("processes.toml"));
    Ran::new(command.output().expect("the program starts"))
}

/// As [`run`], with two processes.
fn launch(folder: &Folder, arguments: &[&str]) -> Ran {
    run(folder, &[&["launch", "--nproc-per-node", "2"], arguments].concat())
}

fn failed(ran: Ran) -> Ran {
    assert_ne!(ran.code, Some(0), "{}", ran.stdout);
    ran
}

#[test]
fn processes_are_measured_together_and_their_runs_predicted_and_picked() {
    let folder = folder();
    let measured = launch(&folder, &["calibrate", "--quick"]).ok();
    assert_eq!(measured.stdout.matches("wrote ").count(), 1, "{}", measured.stdout);
    let profile = MachineProfile::read(&folder.join("processes.toml")).unwrap();
    let two = Processes { backend: "tcp".into(), count: 2, hosts: 1 };
    assert_eq!(profile.machine, Machine { processes: Some(two), ..Machine::here() });
    let exchanges: Vec<(&str, u32, u32)> =
        profile.collectives.iter().map(|curve| (curve.operation.as_str(), curve.ranks, curve.hosts)).collect();
    assert_eq!(exchanges, [("all_gather", 2, 1), ("reduce_scatter", 2, 1), ("all_reduce", 2, 1)]);
    assert!(profile.kernels.iter().all(|curve| curve.ranks == 2) && profile.kernels.len() > 30);

    // The plans can be shown without a launcher; all have as many ranks as there are processes.
    let shown = run(&folder, &["plan", "c.toml", "--profile", "processes.toml", "--json"]).ok();
    let shown: Value = serde_json::from_str(&shown.stdout).unwrap();
    let plans = shown["plans"].as_array().unwrap();
    assert!(plans.len() > 3 && plans.iter().all(|plan| plan["layout"].as_str().unwrap().starts_with("2 ranks x")));

    let trained = launch(&folder, &["train", "c.toml", "--plan", "auto"]).ok();
    let best = plans[0]["layout"].as_str().unwrap();
    assert!(trained.stdout.contains(&format!("plan         {best}")), "{}", trained.stdout);
    let plan = std::fs::read_to_string(folder.join("runs/tiny/plan.json")).unwrap();
    let plan: Value = serde_json::from_str(&plan).unwrap();
    let predicted = plan["predicted"]["time"]["step_s"].as_f64().unwrap();
    assert!((predicted / plans[0]["step_s"].as_f64().unwrap() - 1.0).abs() < 1e-9, "{plan:#}");
    assert!(plan["measured"]["step_s"].as_f64().unwrap() > 0.0, "{plan:#}");

    let tried = failed(launch(&folder, &["train", "c.toml", "--plan", "auto", "--trial-seconds", "5"]));
    assert!(tried.stderr.contains("leave it out under a launcher"), "{}", tried.stderr);

    // The threads of each process, as torchrun sets them. The picked plan is the one that runs.
    let mut three = folder.command(&["launch", "--nproc-per-node", "2", "train", "c.toml", "--plan", "auto"]);
    let three = three.args(["--set", "run.name='three'"]).env("OMP_NUM_THREADS", "3");
    let three = three.env("TRAINYARD_PROCESSES_PROFILE", folder.join("processes.toml")).output();
    let three = Ran::new(three.expect("the program starts")).ok();
    assert!(three.stdout.contains("plan         2 ranks x 3 threads"), "{}", three.stdout);
    let config = std::fs::read_to_string(folder.join("runs/three/config.toml")).unwrap();
    assert!(config.contains("threads = 3  # OMP_NUM_THREADS"), "{config}");

    let compared = run(&folder, &["calibrate", "--out", "processes.toml", "--compare", "processes.toml"]).ok();
    assert!(compared.stdout.contains("differ by 0.0 % in the median, 0.0 % at most"), "{}", compared.stdout);
    let different = failed(run(&folder, &["calibrate", "--compare", "processes.toml"]));
    assert!(different.stderr.contains("machine.toml"), "{}", different.stderr);

    // A profile of processes does not apply to threads.
    let mut threads = folder.command(&["train", "c.toml", "--set", "run.name='threads'"]);
    let threads = threads.env("TRAINYARD_PROFILE", folder.join("processes.toml")).output();
    let threads = Ran::new(threads.expect("the program starts")).ok();
    assert!(threads.stdout.contains("was measured on another machine"), "{}", threads.stdout);
}

#[test]
fn processes_that_were_not_measured_say_how_they_are() {
    let folder = folder();
    let trained = launch(&folder, &["train", "c.toml"]).ok();
    let needed = "not predicted: no profile of processes: run `trainyard calibrate` in place of `train`";
    let none = folder
        .command(&["launch", "--nproc-per-node", "2", "train", "c.toml", "--set", "run.name='b'"])
        .env_remove("TRAINYARD_PROCESSES_PROFILE")
        .env("XDG_CACHE_HOME", folder.join("empty"))
        .output()
        .expect("the program starts");
    assert!(Ran::new(none).ok().stdout.contains(needed));
    // A missing file that is named explicitly is an error, unlike a profile that was never made.
    assert!(trained.stdout.contains("not predicted: cannot read the machine's profile"), "{}", trained.stdout);
    let picked = failed(launch(&folder, &["train", "c.toml", "--plan", "auto", "--set", "run.name='c'"]));
    // Both ranks report the error and end as for any other mistake: a restart would not help.
    assert_eq!(picked.stderr.matches("--plan auto needs to know this machine").count(), 2, "{}", picked.stderr);
    assert!(picked.code == Some(1) && picked.stderr.contains("rank 0 could not pick a plan"), "{}", picked.stderr);
}

#[test]
fn what_processes_cannot_measure_together_is_refused_in_words() {
    let folder = folder();
    for (arguments, why) in [
        (&["calibrate", "--device", "cuda"][..], "measured by one process"),
        (&["calibrate", "--compare", "other.toml"], "start it without a launcher"),
        (&["calibrate", "--check"], "`trainyard calibrate` under this launcher"),
    ] {
        let refused = failed(launch(&folder, arguments));
        assert!(refused.stderr.contains(why), "{}", refused.stderr);
    }
    let three = failed(run(&folder, &["launch", "--nproc-per-node", "3", "calibrate", "--check"]));
    assert!(three.stderr.contains("of two and of four ranks, and there are 3 processes"), "{}", three.stderr);
}
