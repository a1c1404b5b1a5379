//! Searches over settings, from the command line.

mod common;

use common::Folder;
use serde_json::Value;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// A search over the learning rate of the tiny model.
const SEARCH: [&str; 6] =
    ["tune", "tiny.toml", "--set", "evaluation.tokens_max=256", "--space", "optimizer.learning_rate=log:1e-4..1e-1"];

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// The decisions and results of a study, without times.
fn found(report: &Value) -> Vec<(Vec<String>, Value)> {
    let trials = report["trials"].as_array().unwrap().iter();
    trials
        .map(|trial| {
            let sets = trial["sets"].as_array().unwrap().iter().map(|set| set.as_str().unwrap().to_owned());
            (sets.collect(), trial["losses"].clone())
        })
        .collect()
}

#[test]
fn a_search_finds_settings_and_every_trial_is_a_run() {
    let folder = Folder::new();
    let ran = folder.run(&[&SEARCH[..], &["--trials", "3", "--study", "s"]].concat()).ok();
    assert!(ran.stderr.contains("trial 2 ") && ran.stdout.contains("as much training as 3.00 whole ones"), "{ran:?}");
    let best = ran.stdout.lines().find_map(|line| line.strip_prefix("best: trainyard ")).unwrap();
    assert!(best.starts_with("train tiny.toml --set evaluation.tokens_max=256 --set optimizer.learning_rate="));
    let words: Vec<&str> = best.split_whitespace().collect();
    folder.run(&[&words[..], &["--quiet", "--set", "run.name=again"]].concat()).ok();
    let runs = folder.run(&["runs", "--json"]).ok();
    let runs = json(&runs.stdout);
    let names: Vec<&str> = runs.as_array().unwrap().iter().map(|run| run["name"].as_str().unwrap()).collect();
    assert!(names.len() == 4 && ["again", "s-000", "s-001", "s-002"].iter().all(|name| names.contains(name)));
    // The run that is made again has the loss of the best trial.
    let again = runs.as_array().unwrap().iter().find(|run| run["name"] == "again").unwrap();
    let least = runs.as_array().unwrap().iter().filter_map(|run| run["validation_loss"].as_f64()).fold(9.9, f64::min);
    assert_eq!(again["validation_loss"].as_f64(), Some(least));
    // So has one with the configuration that was written.
    assert!(ran.stdout.contains("its configuration: runs/s/best.toml"), "{}", ran.stdout);
    folder.run(&["train", "runs/s/best.toml", "--quiet", "--set", "run.name=written"]).ok();
    let lines = std::fs::read_to_string(folder.join("runs/written/evaluations.jsonl")).unwrap();
    assert_eq!(json(lines.lines().last().unwrap())["loss"].as_f64(), Some(least));
}

#[test]
fn without_a_space_the_learning_rate_and_the_weight_decay_are_searched() {
    let folder = Folder::new();
    let arguments = ["tune", "tiny.toml", "--search", "random", "--trials", "2", "--jobs", "2", "--json"];
    let ran = folder.run(&arguments).ok();
    let says = "searching optimizer.learning_rate=log:1e-3..1e-1 and optimizer.weight_decay=0.0..0.3";
    assert!(ran.stderr.contains(says), "{}", ran.stderr);
    for (sets, _) in found(&json(&ran.stdout)) {
        let number = |at: usize| sets[at].split('=').next_back().unwrap().parse::<f64>().unwrap();
        assert!(sets.len() == 2 && (1e-3..=1e-1).contains(&number(0)) && (0.0..=0.3).contains(&number(1)), "{sets:?}");
    }
}

#[test]
fn halving_goes_on_from_checkpoints_and_trains_like_whole_runs() {
    let folder = Folder::new();
    let halving = ["--search", "asha", "--trials", "5", "--levels", "2", "--json", "--study", "h"];
    let report = json(&folder.run(&[&SEARCH[..], &halving].concat()).ok().stdout);
    let trials = report["trials"].as_array().unwrap();
    let whole: Vec<&Value> = trials.iter().filter(|trial| trial["state"] == "complete").collect();
    assert!(trials.len() == 5 && (1..5).contains(&whole.len()), "{report}");
    assert!(report["spent_trainings"].as_f64().unwrap() < 5.0 / 3.0 + 2.0);
    // A trial that paused after a third of its steps ends with the loss of a run that did not.
    let sets: Vec<&str> = whole[0]["sets"].as_array().unwrap().iter().map(|set| set.as_str().unwrap()).collect();
    let plain = ["train", "tiny.toml", "--quiet", "--set", "run.name=plain", "--set", "evaluation.tokens_max=256"];
    folder.run(&[&plain[..], &["--set", sets[0]]].concat()).ok();
    let lines = std::fs::read_to_string(folder.join("runs/plain/evaluations.jsonl")).unwrap();
    assert_eq!(json(lines.lines().last().unwrap())["loss"], whole[0]["loss"]);
}

#[test]
fn a_population_replaces_its_worst_members() {
    let folder = Folder::new();
    let population = ["--search", "population", "--trials", "4", "--levels", "3", "--json"];
    let report = json(&folder.run(&[&SEARCH[..], &population].concat()).ok().stdout);
    let trials = report["trials"].as_array().unwrap();
    let of = |state: &str| trials.iter().filter(|trial| trial["state"] == state).count();
    // One of four in each of two selections.
    assert_eq!((trials.len(), of("complete"), of("replaced")), (6, 4, 2), "{report}");
    assert_eq!(trials.iter().filter(|trial| trial["parent"].is_u64()).count(), 2);
}

/// A search that is killed while a trial trains, and resumed, makes the trials of one that was not.
#[test]
fn a_killed_search_goes_on_with_the_same_trials() {
    let folder = Folder::new();
    let search = [&SEARCH[..], &["--set", "training.steps=60", "--trials", "4", "--halving", "--json"]].concat();
    let whole = json(&folder.run(&[&search[..], &["--study", "whole"]].concat()).ok().stdout);
    let mut child = folder.command(&[&search[..], &["--study", "killed"]].concat()).spawn().unwrap();
    let began = Instant::now();
    // Killed once the second trial has begun.
    while !folder.join("runs/killed-001/config.toml").is_file() {
        assert!(began.elapsed() < Duration::from_secs(120), "no second trial");
        std::thread::sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let again = json(&folder.run(&["tune", "--resume", "runs/killed", "--json"]).ok().stdout);
    assert_eq!(found(&again), found(&whole));
    // More trials of the same study.
    let more = folder.run(&["tune", "--resume", "runs/killed", "--trials", "5", "--json"]).ok();
    assert_eq!(found(&json(&more.stdout)).len(), 5);
}

#[test]
fn trials_that_would_not_fit_are_refused_before_they_start() {
    let folder = Folder::new();
    let sets = ["--set", "memory.limit=3MiB", "--space", "training.micro_batch_size=4|400", "--json", "--study", "m"];
    let report = json(&folder.run(&[&SEARCH[..4], &sets].concat()).ok().stdout);
    let trials = report["trials"].as_array().unwrap();
    let refused: Vec<&Value> = trials.iter().filter(|trial| trial["state"] == "refused").collect();
    assert!(refused.len() == 1 && refused[0]["why"].as_str().unwrap().contains("over memory.limit"), "{report}");
    let run = refused[0]["run"].as_str().unwrap();
    assert!(!folder.join("runs").join(run).exists(), "nothing was started");
}

#[test]
fn a_search_that_is_stopped_stops_its_trials_with_checkpoints() {
    let folder = Folder::new();
    let long = [&SEARCH[..], &["--set", "training.steps=1000000", "--jobs", "2", "--study", "b"]].concat();
    let child = folder.command(&long).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let began = Instant::now();
    let runs = ["b-000", "b-001"].map(|run| folder.join("runs").join(run));
    let has_begun = |run: &PathBuf| run.join("metrics.jsonl").metadata().is_ok_and(|file| file.len() > 0);
    while !runs.iter().all(has_begun) {
        assert!(began.elapsed() < Duration::from_secs(120), "two trials at a time");
        std::thread::sleep(Duration::from_millis(5));
    }
    Command::new("kill").arg(child.id().to_string()).status().unwrap();
    let ran = common::Ran::new(child.wait_with_output().unwrap());
    assert!(ran.code == Some(1) && ran.stderr.contains("no trial has a result"), "{ran:?}");
    assert!(runs.iter().all(|run| run.join("checkpoints").read_dir().is_ok_and(|mut all| all.next().is_some())));
    let over = folder.run(&["tune", "--resume", "runs/b", "--budget", "0s"]);
    assert!(over.code == Some(1) && over.stderr.contains("study runs/b"), "{over:?}");
}

#[test]
fn wrong_searches_are_refused_before_anything_runs() {
    let folder = Folder::new();
    folder.write("space.toml", "[optimizer]\nlearning_rate = 3\n");
    folder.write("endless.toml", common::TINY.replace("steps = 12", "seconds = 5"));
    let space = "optimizer.learning_rate=log:1e-4..1e-1";
    let transfer = |more: &[&'static str]| [&["tune", "transfer", "tiny.toml"], more].concat();
    for (arguments, says) in [
        (transfer(&["--widths", "32"]), "at least two different widths"),
        (transfer(&["--widths", "32,33"]), "--widths 33: model.heads is"),
        (transfer(&["--widths", "32,0"]), "--widths 0"),
        (transfer(&["--widths", "32,64", "--rates", "0,1e-3"]), "0 is no positive number"),
        (transfer(&["--widths", "32,64", "--set", "model.dim=64"]), "model.dim is both --set and given by --widths"),
        (transfer(&["--widths", "32,64", "--set", "optimizer.name=muon"]), "scales learning rates as AdamW and Lion"),
        (transfer(&["--widths", "32,64", "--set", "model.tie_embeddings=true"]), "set model.tie_embeddings = false"),
        (transfer(&["--widths", "32,64", "--set", "data.validation_fraction=0"]), "there is no validation data"),
        (transfer(&["--widths", "32,64", "--study", "a/b"]), "a name has letters"),
        (vec!["tune", "transfer", "--resume", "gone"], "gone is no study of tune transfer"),
    ] {
        let ran = folder.run(&arguments);
        assert_eq!(ran.code, Some(1), "{arguments:?}: {}", ran.stderr);
        assert!(ran.stderr.contains(says), "{arguments:?}: {}", ran.stderr);
    }
    for (arguments, code, says) in [
        (
            &["tune", "tiny.toml", "--set", "optimizer.learning_rate=1", "--set", "optimizer.weight_decay=0"][..],
            1,
            "name others with --space",
        ),
        (&["tune", "tiny.toml", "--space", "optimizer.lr=log:1e-4..1e-2"], 1, "optimizer.learning_rate"),
        (&["tune", "tiny.toml", "--space", "optimizer.learning_rate=log:0..1"], 1, "begins above 0"),
        (&["tune", "tiny.toml", "--space", "optimizer.learning_rate=log:-1..-0.1"], 1, "begins above 0"),
        (&["tune", "tiny.toml", "--space", "optimizer.learning_rate=1e-2..1e-4"], 1, "is empty"),
        (&["tune", "tiny.toml", "--space", "learning_rate=0..1"], 1, "SECTION.KEY"),
        (&["tune", "tiny.toml", "--space", "model.layers=1.5..2.5"], 1, "model.layers"),
        (&["tune", "tiny.toml", "--space", "schedule.kind=cosine|cosines"], 1, "schedule.kind"),
        (&["tune", "tiny.toml", "--space-file", "space.toml"], 1, "is one value"),
        (&["tune", "tiny.toml", "--space-file", "gone.toml"], 1, "cannot read gone.toml"),
        (&["tune", "tiny.toml", "--space", space, "--set", "optimizer.learning_rate=1"], 1, "both --set and searched"),
        (&["tune", "tiny.toml", "--space", "run.name=a|b"], 1, "does not change what is trained"),
        (&["tune", "tiny.toml", "--space", space, "--trials", "0"], 2, "0"),
        (&["tune", "tiny.toml", "--space", space, "--budget", "soon"], 2, "no duration"),
        (&["tune", "tiny.toml", "--space", space, "--search", "grid"], 2, "possible values"),
        (&["tune", "tiny.toml", "--space", space, "--levels", "3"], 1, "no effect without --halving"),
        (&["tune", "tiny.toml", "--space", space, "--search", "population", "--halving"], 1, "selects by itself"),
        (&["tune", "tiny.toml", "--space", space, "--search", "population", "--trials", "3"], 1, "at least 4 members"),
        (&["tune", "tiny.toml", "--space", "model.layers=int:1..2", "--search", "population"], 1, "while a run trains"),
        (&["tune", "tiny.toml", "--space", space, "--study", "../x"], 1, "a name has letters"),
        (&["tune", "tiny.toml", "--space", space, "--set", "data.validation_fraction=0"], 1, "validation"),
        (&["tune", "endless.toml", "--space", space], 1, "give training.steps"),
        (&["tune", "--resume", "runs/gone"], 1, "not the folder of a study"),
        (&["tune", "--resume", "runs/x", "--seed", "1"], 2, "cannot be used with"),
        (&["train", "tiny.toml", "--until", "0"], 2, "0"),
        (&["tune", "batch", "gone.toml"], 1, "cannot read gone.toml"),
        (&["tune", "batch", "tiny.toml", "--samples", "1"], 2, "4..=4096"),
        (&["tune", "batch", "--run", "runs/gone"], 1, "not the folder of a run"),
        (&["tune", "batch", "tiny.toml", "--run", "runs/gone"], 2, "cannot be used with"),
        (&["tune", "batch", "tiny.toml", "--memory-only", "--steps", "3"], 2, "cannot be used with"),
        (&["tune", "batch", "tiny.toml", "--set", "training.elastic_bits=true"], 1, "--memory-only"),
    ] {
        let ran = folder.run(arguments);
        assert_eq!(ran.code, Some(code), "{arguments:?}: {}{}", ran.stdout, ran.stderr);
        assert!(ran.stderr.contains(says), "{arguments:?}: {}", ran.stderr);
        assert!(!ran.stderr.contains("panicked"), "{}", ran.stderr);
    }
    assert!(!folder.join("runs").exists(), "nothing was made");
}

/// The noise scale of the tiny model, and the sizes that fit in a limit.
#[test]
fn a_batch_is_advised_by_memory_and_noise() {
    let folder = Folder::new();
    let limit = ["tune", "batch", "tiny.toml", "--set", "memory.limit=3MiB", "--json"];
    let fits = json(&folder.run(&[&limit[..], &["--memory-only"]].concat()).ok().stdout);
    let rows = fits["fits"]["micro_batch_size"].as_u64().unwrap();
    assert!(fits["noise"].is_null() && fits["fits"]["next_mem_predicted_bytes"].as_u64().unwrap() > 3 << 20, "{fits}");
    assert!(!folder.join("runs").exists(), "nothing was tried");
    // That many sequences train within the limit, and one more does not.
    let train = |rows: u64| {
        let micro = format!("training.micro_batch_size={rows}");
        let sets = ["training.steps=1", "memory.limit=3MiB", "run.name=auto", &micro];
        let sets = sets.iter().flat_map(|set| ["--set", set]);
        folder.run(&["train", "tiny.toml", "--quiet"].into_iter().chain(sets).collect::<Vec<_>>())
    };
    train(rows).ok();
    assert!(train(rows + 1).stderr.contains("over memory.limit"));

    let ran = folder.run(&[&limit[..5], &["--steps", "10"]].concat()).ok();
    assert!(ran.stdout.contains("predicted; nothing was tried") && ran.stdout.contains("answer  "), "{ran:?}");
    let again = json(&folder.run(&["tune", "batch", "--run", "runs/batch-001", "--json"]).ok().stdout);
    let noise = &again["noise"];
    let number = |key: &str| noise[key].as_f64().unwrap();
    assert!(
        noise["step"] == 10 && number("low") < number("sequences") && number("sequences") < number("high"),
        "{again}"
    );
    assert!(
        ran.stdout.contains(&format!("noise   {:.1} sequences", number("sequences"))),
        "the same run, the same noise"
    );
    // Branches with several batches on the same sequences; the answer is theirs.
    let branch = ["tune", "batch", "--run", "runs/batch-001", "--samples", "4", "--branch", "--json"];
    let branched = json(&folder.run(&branch).ok().stdout);
    let batches = branched["branches"]["batches"].as_array().unwrap();
    assert!(batches.len() >= 5, "{branched}");
    let half = branched["branches"]["loss_of_half"].as_f64().unwrap();
    assert!(batches[0]["loss"].as_f64().unwrap() < half && half < 6.0, "{branched}");
    assert_eq!(branched["noise"]["step"], 10, "{branched}");
    let unheld = ["tune", "batch", "tiny.toml", "--branch", "--set", "data.validation_fraction=0"];
    assert!(folder.run(&unheld).stderr.contains("set data.validation"));
    // The run is as it was, and goes on.
    folder.run(&["train", "--quiet", "--resume", "runs/batch-001"]).ok();
    let runs = std::fs::read_dir(folder.join("runs")).unwrap().map(|entry| entry.unwrap().file_name());
    let left: Vec<_> = runs.filter(|name| name.to_string_lossy().starts_with("batch")).collect();
    assert_eq!(left, ["batch-001"], "no copies and no messages stay");
}

/// Rates over widths: every cell is a run, and a study that was cut short goes on.
#[test]
fn a_learning_rate_is_compared_over_widths() {
    let folder = Folder::new();
    let transfer = ["tune", "transfer", "tiny.toml", "--widths", "16,32", "--rates", "1e-3,1e-2", "--study", "w"];
    let ran = folder.run(&[&transfer[..], &["--json", "--jobs", "2"]].concat()).ok();
    let found = json(&ran.stdout);
    let trials = found["trials"].as_array().unwrap();
    assert_eq!(trials.len(), 4, "{found}");
    // A cell is the run with its keys, and its loss is that of the run.
    let trial = trials.iter().find(|trial| trial["run"] == "w-32-1").unwrap();
    let config = std::fs::read_to_string(folder.join("runs/w-32-1/config.toml")).unwrap();
    for set in ["dim = 32", "mup_base_dim = 16", "learning_rate = 0.01"] {
        assert!(config.contains(set), "{set}: {config}");
    }
    let evaluations =
        |run: &str| std::fs::read_to_string(folder.join(&format!("runs/{run}/evaluations.jsonl"))).unwrap();
    assert_eq!(json(evaluations("w-32-1").lines().last().unwrap())["loss"], trial["loss"]);
    // What is lost is trained again, with the same result; what is there is not.
    let before = evaluations("w-16-0");
    std::fs::remove_dir_all(folder.join("runs/w-32-1")).unwrap();
    let again = folder.run(&["tune", "transfer", "--resume", "runs/w", "--json"]).ok();
    assert_eq!(json(&again.stdout), found);
    assert!(
        again.stderr.contains("trial 4/4  dim 32  rate 1e-2") && !again.stderr.contains("trial 3/4"),
        "{}",
        again.stderr
    );
    assert_eq!(evaluations("w-16-0"), before);
    let words = folder.run(&["tune", "transfer", "--resume", "runs/w"]).ok().stdout;
    assert!(words.contains("growth when the width doubles") && words.contains("answer  "), "{words}");
}

/// The coordinate check (Yang et al. 2022, appendix D.1): after some steps outputs do not grow with
/// the width, and without muP they do.
#[test]
fn outputs_of_every_family_keep_their_size_over_widths_with_mup() {
    let folder = Folder::new();
    let transfer =
        ["tune", "transfer", "tiny.toml", "--widths", "32,64,128", "--rates", "1e-2", "--json", "--jobs", "2"];
    let steps = ["--set", "schedule.warmup_steps=0", "--set", "model.tie_embeddings=false"];
    for family in ["llama", "gpt2", "gemma3", "olmo2", "phi3"] {
        let family_set = format!("model.family={family}");
        let growth = |more: &[&str]| -> Vec<f64> {
            let ran = folder.run(&[&transfer[..], &steps, &["--set", &family_set], more].concat()).ok();
            let outputs = json(&ran.stdout)["outputs"].as_array().unwrap().clone();
            outputs.iter().map(|output| output["growth"].as_f64().unwrap()).collect()
        };
        let (scaled, standard) = (growth(&[]), growth(&["--standard"]));
        assert!(scaled.len() == 4 && scaled.iter().all(|growth| *growth < 1.15), "{family}: {scaled:?}");
        assert!(standard[3] > 1.25 && standard[3] > scaled[3], "{family}: {standard:?}, {scaled:?}");
    }
}
