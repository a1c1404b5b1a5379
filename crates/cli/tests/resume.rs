//! Resuming a run: changes that are allowed, changes that are refused before anything is written,
//! and the choice of the checkpoint.

mod common;

use common::{Folder, Ran, checkpoints, tensors};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

const RUN: &str = "runs/tiny";

fn train(folder: &Folder, sets: &[&str]) -> Ran {
    let sets = sets.iter().flat_map(|set| ["--set", *set]);
    folder.run(&["train", "tiny.toml"].into_iter().chain(sets).collect::<Vec<_>>()).ok()
}

fn resume(folder: &Folder, options: &[&str], sets: &[&str]) -> Ran {
    let sets = sets.iter().flat_map(|set| ["--set", *set]);
    let arguments = ["train", "--resume", RUN].into_iter().chain(options.iter().copied()).chain(sets);
    folder.run(&arguments.collect::<Vec<_>>())
}

/// Every file of the run, by path.
fn contents(folder: &Folder) -> BTreeMap<PathBuf, Vec<u8>> {
    fn walk(path: &Path, all: &mut BTreeMap<PathBuf, Vec<u8>>) {
        for entry in fs::read_dir(path).unwrap().map(Result::unwrap) {
            match entry.file_type().unwrap().is_dir() {
                true => walk(&entry.path(), all),
                false => drop(all.insert(entry.path(), fs::read(entry.path()).unwrap())),
            }
        }
    }
    let mut all = BTreeMap::new();
    walk(&folder.join(RUN), &mut all);
    all
}

/// Fails the test unless the command is refused with these words and leaves the run as it was.
fn refused(folder: &Folder, options: &[&str], sets: &[&str], words: &[&str]) {
    let before = contents(folder);
    let ran = resume(folder, options, sets);
    assert_eq!(ran.code, Some(1), "{options:?} {sets:?}\n{}\n{}", ran.stdout, ran.stderr);
    for word in words {
        assert!(ran.stderr.contains(word), "{options:?} {sets:?}: no {word:?} in {}", ran.stderr);
    }
    assert!(contents(folder) == before, "{options:?} {sets:?}: the run's folder changed");
}

fn lines(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn steps(path: &Path) -> Vec<u64> {
    lines(path).iter().map(|line| line["step"].as_u64().unwrap()).collect()
}

fn json(path: PathBuf) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

#[test]
fn resume_refuses_a_changed_number_of_layers() {
    let folder = Folder::new();
    train(&folder, &["model.layers=3", "model.qkv_bias=true"]);
    let shapes: [(&str, &[&str]); 9] = [
        ("model.layers=1", &["model.layers is 3", "1 is asked for"]),
        ("model.layers=4", &["model.layers is 3", "4 is asked for"]),
        ("model.dim=64", &["model.dim is 32", "64 is asked for"]),
        ("model.tie_embeddings=true", &["model.tie_embeddings is false", "true is asked for"]),
        ("model.qkv_bias=false", &["model.qkv_bias is true", "false is asked for"]),
        ("model.vocab_size=512", &["model.vocab_size is 320", "512 is asked for"]),
        ("model.family=gpt2", &["model.family is \"llama\"", "\"gpt2\" is asked for"]),
        ("model.init_std=0.5", &["model.init_std is 0.02", "0.5 is asked for"]),
        // The same matrices with another meaning.
        ("model.heads=4", &["model.heads is 2", "4 is asked for"]),
    ];
    for (set, words) in shapes {
        refused(&folder, &[], &["training.steps=14", set], words);
        refused(&folder, &["--change-model"], &["training.steps=14", set], words);
    }
    let same_shapes: [(&str, &[&str]); 4] = [
        ("model.rope_theta=500000", &["model.rope_theta is 10000.0", "500000.0 is asked for", "--change-model"]),
        ("model.sliding_window=8", &["model.sliding_window is unset", "8 is asked for", "--change-model"]),
        ("model.norm_eps=1e-3", &["model.norm_eps is 0.00001", "0.001 is asked for", "--change-model"]),
        ("model.max_sequence_length=64", &["model.max_sequence_length is 32", "64 is asked for", "--change-model"]),
    ];
    for (set, words) in same_shapes {
        refused(&folder, &[], &["training.steps=14", set], words);
    }
    // Editing the file is a request for the change as well.
    let config = folder.join(RUN).join("config.toml");
    let text = fs::read_to_string(&config).unwrap();
    fs::write(&config, text.replace("layers = 3", "layers = 1")).unwrap();
    refused(&folder, &[], &["training.steps=14"], &["model.layers is 3", "1 is asked for"]);
    fs::write(&config, text).unwrap();
    // Dropout may change: it belongs to the training.
    let ran = resume(&folder, &[], &["training.steps=13", "model.dropout=0.1"]).ok();
    assert!(ran.stderr.contains("resumed at step 12"), "{}", ran.stderr);
    assert_eq!(json(folder.join(RUN).join("model.json"))["dropout"], 0.1);
}

#[test]
fn a_model_changed_on_purpose_is_followed_and_said() {
    let folder = Folder::new();
    train(&folder, &[]);
    let eval = || {
        let ran = folder.run(&["eval", RUN, "--data", "text.txt", "--json", "--checkpoint", "12"]).ok();
        serde_json::from_str::<Value>(&ran.stdout).unwrap()["loss"].as_f64().unwrap()
    };
    let before = eval();
    let ran = resume(&folder, &["--change-model"], &["training.steps=13", "model.rope_theta=100"]).ok();
    let words = "model.rope_theta was 10000.0 and is 100.0";
    assert!(ran.stderr.contains(words), "{}", ran.stderr);
    assert_eq!(json(folder.join(RUN).join("model.json"))["rope"]["theta"], 100.0);
    assert_ne!(eval(), before, "another function of the same weights");
    // The change is part of the run from here on, and needs no flag.
    let ran = resume(&folder, &[], &["training.steps=14"]).ok();
    assert!(!ran.stderr.contains("on purpose"), "{}", ran.stderr);
}

#[test]
fn a_shorter_sequence_leaves_the_models_longest_as_it_was() {
    let folder = Folder::new();
    train(&folder, &["model.max_sequence_length=auto"]);
    resume(&folder, &[], &["training.steps=13", "training.sequence_length=16"]).ok();
    assert_eq!(json(folder.join(RUN).join("model.json"))["max_positions"], 32);
    resume(&folder, &[], &["training.steps=14"]).ok();
    let ran = resume(&folder, &[], &["training.steps=15", "training.sequence_length=64"]);
    assert!(ran.stderr.contains("model.max_sequence_length is 32"), "{}", ran.stderr);
}

#[test]
fn a_tensor_that_nobody_reads_is_an_error() {
    let folder = Folder::new();
    train(&folder, &[]);
    // With another update rule the moments would be lost in the next checkpoint.
    let sgd = ["training.steps=14", "optimizer.name=sgd", "optimizer.momentum=0"];
    refused(&folder, &[], &sgd, &["another optimizer.name", "which would be lost"]);
    // A model description that was edited in both places.
    let model = folder.join(RUN).join("model.json");
    let mut described = json(model.clone());
    described["layers"] = 1.into();
    fs::write(&model, described.to_string()).unwrap();
    refused(&folder, &[], &["training.steps=14", "model.layers=1"], &["block.1.", "would be lost"]);
    let ran = folder.run(&["eval", RUN, "--data", "text.txt"]);
    assert_eq!(ran.code, Some(1));
    assert!(ran.stderr.contains("block.1."), "{}", ran.stderr);
}

#[test]
fn keys_that_need_data_do_not_drop_a_runs_settings() {
    let folder = Folder::new();
    let sets = ["training.sequence_length=16", "precision.compute=bf16", "evaluation.interval_steps=6"];
    train(&folder, &[&sets[..], &["checkpoint.keep_best=true"]].concat());
    // A trained model needs neither its data nor the ranks that it was trained on.
    fs::rename(folder.join("text.txt"), folder.join("elsewhere.txt")).unwrap();
    let eval = |options: &[&str]| {
        let ran = folder.run(&[&["eval", RUN, "--data", "elsewhere.txt", "--json"], options].concat()).ok();
        serde_json::from_str::<Value>(&ran.stdout).unwrap()["loss"].as_f64().unwrap()
    };
    let loss = eval(&[]);
    assert_eq!(loss, eval(&["--length", "16", "--dtype", "bf16"]));
    assert_ne!(loss, eval(&["--length", "32", "--dtype", "bf16"]));
    assert_ne!(loss, eval(&["--length", "16", "--dtype", "f32"]));
    folder.run(&["export", RUN, "--out", "hf"]).ok();
    for file in ["generation_config.json", "config.json"] {
        assert_eq!(json(folder.join("hf").join(file))["eos_token_id"], 256, "{file}");
    }
    folder.run(&["generate", RUN, "--prompt", "the ", "--tokens", "2"]).ok();
    // An error in the configuration is reported, not ignored.
    let config = folder.join(RUN).join("config.toml");
    let text = fs::read_to_string(&config).unwrap();
    fs::write(&config, text.replace("sequence_length = 16", "sequence_length = 99")).unwrap();
    let ran = folder.run(&["eval", RUN, "--data", "elsewhere.txt"]);
    assert!(ran.stderr.contains("training.sequence_length = 99"), "{}", ran.stderr);
}

#[test]
fn a_resume_with_fewer_steps_than_are_done_is_refused() {
    let folder = Folder::new();
    train(&folder, &["evaluation.interval_steps=6"]);
    refused(&folder, &[], &["training.steps=5"], &["12 steps are done already", "training.steps = 5"]);
    let tokens = ["training.steps=auto", "training.tokens=640"];
    refused(&folder, &[], &tokens, &["12 steps are done already", "training.tokens = 640, which is 5 steps"]);
    // With a limit of as many steps as are done, the run ends at once and repeats no record.
    let config = fs::read(folder.join(RUN).join("config.toml")).unwrap();
    let ran = resume(&folder, &[], &["training.steps=12"]).ok();
    assert!(ran.stderr.contains("nothing is left to train"), "{}", ran.stderr);
    assert_eq!(fs::read(folder.join(RUN).join("config.toml")).unwrap(), config);
    assert_eq!(steps(&folder.join(RUN).join("evaluations.jsonl")), [6, 12]);
    assert_eq!(steps(&folder.join(RUN).join("metrics.jsonl")), (1..=12).collect::<Vec<_>>());
}

#[test]
fn going_on_says_that_the_learning_rate_rises() {
    let folder = Folder::new();
    let first = train(&folder, &[]);
    let hint = first.stdout.lines().skip_while(|line| !line.starts_with("go on ")).nth(1).unwrap().trim();
    assert!(hint.starts_with("the learning rate rises from 1.00e-3 to "), "{hint}");
    assert!(hint.contains("over 24 steps"), "{hint}");
    let more = resume(&folder, &[], &["training.steps=24"]).ok();
    assert!(more.stderr.contains(&format!("from step 12 on {hint}")), "{hint} in {}", more.stderr);
    let rate = lines(&folder.join(RUN).join("metrics.jsonl"))[12]["lr"].as_f64().unwrap();
    assert!(hint.contains(&format!("to {rate:.2e},")), "{hint}: {rate}");
    // A resumed run without changes prints no notes about them.
    let folder = Folder::new();
    train(&folder, &["schedule.kind=constant"]);
    let more = resume(&folder, &[], &["training.steps=14"]).ok();
    assert!(!more.stderr.contains("the learning rate"), "{}", more.stderr);
}

/// A checkpoint has whole experts, whatever ranks wrote them: a run goes on with its experts over
/// two replicas or on each, and ends with the same bits, evaluations included. So does one whose
/// replicas divide products.
#[test]
fn a_mixture_goes_on_with_its_experts_over_other_ranks() {
    for sets in [&["parallel.ranks=2"][..], &["parallel.ranks=4", "parallel.tensor_parallel_degree=2"]] {
        goes_on_with_other_experts(sets);
    }
}

fn goes_on_with_other_experts(sets: &[&str]) {
    let folder = Folder::new();
    // Three batches to evaluate: in the last round one rank has none.
    let mixture = [&["model.family=mixtral", "experts.count=4", "optimizer.clip_norm=0"], sets].concat();
    let evaluated = ["evaluation.interval_steps=3", "evaluation.tokens_max=300"];
    let degree = |degree: usize| format!("parallel.expert_parallel_degree={degree}");
    let evaluations = |run: &Path| -> Vec<Value> {
        lines(&run.join("evaluations.jsonl")).iter().map(|line| line["loss"].clone()).collect()
    };
    let end = |before: usize, after: usize| {
        let name = format!("from-{before}-to-{after}");
        let (run, name) = (format!("runs/{name}"), format!("run.name='{name}'"));
        train(&folder, &[&mixture[..], &evaluated[..], &[&degree(before), &name, "training.steps=6"]].concat());
        let sets = ["--set", "training.steps=12", "--set", &degree(after)];
        folder.run(&[&["train", "--resume", run.as_str()], &sets[..]].concat()).ok();
        (run.clone(), tensors(&folder.join(&run)))
    };
    let (first, whole) = end(1, 1);
    for (before, after) in [(2, 2), (2, 1), (1, 2)] {
        let (run, ours) = end(before, after);
        assert!(ours == whole, "{run}: some bit differs");
        let [ours, theirs] = [&run, &first].map(|run| evaluations(&folder.join(run)));
        assert!(ours == theirs && ours.len() >= 4, "{run}: {ours:?} and not {theirs:?}");
    }
    let spread = "runs/from-2-to-2";
    folder.run(&["export", spread, "--out", "hf", "--dtype", "f32"]).ok();
    let asked = ["--data", "text.txt", "--json"];
    let losses = [spread, "hf"].map(|model| {
        let ran = folder.run(&[&["eval", model], &asked[..]].concat()).ok();
        serde_json::from_str::<Value>(&ran.stdout).unwrap()["loss"].as_f64().unwrap()
    });
    assert!((losses[0] - losses[1]).abs() < 1e-6, "{losses:?}");
}

/// A run of 12 steps with its checkpoints of 4, 8 and 12.
fn with_three_checkpoints() -> Folder {
    let folder = Folder::new();
    let sets = ["evaluation.interval_steps=4", "checkpoint.interval_steps=4", "checkpoint.keep_last=3"];
    train(&folder, &sets);
    assert_eq!(checkpoints(&folder.join(RUN)).len(), 3);
    folder
}

#[test]
fn a_checkpoint_is_chosen_by_its_step_or_as_the_best() {
    let folder = with_three_checkpoints();
    let eval = |choice: &[&str]| {
        let ran = folder.run(&[&["eval", RUN, "--data", "text.txt", "--json"], choice].concat()).ok();
        let found: Value = serde_json::from_str(&ran.stdout).unwrap();
        (found["step"].as_u64().unwrap(), found["loss"].as_f64().unwrap())
    };
    let (latest, fourth) = (eval(&[]), eval(&["--checkpoint", "4"]));
    assert_eq!((latest.0, fourth.0), (12, 4));
    assert_ne!(latest.1, fourth.1);
    assert_eq!(eval(&["--checkpoint", "latest"]), latest);
    let best = json(folder.join(RUN).join("checkpoints/best.json"))["step"].as_u64().unwrap();
    assert_eq!(eval(&["--checkpoint", "best"]).0, best);

    let generate = |choice: &str| {
        let arguments = ["generate", RUN, "--prompt", "the ", "--tokens", "20", "--ignore-eos", "--checkpoint", choice];
        folder.run(&arguments).ok().stdout
    };
    assert_ne!(generate("4"), generate("12"));
    let exported = folder.run(&["export", RUN, "--out", "hf", "--dtype", "f32", "--checkpoint", "4"]).ok();
    assert!(exported.stdout.contains("(step 4)"), "{}", exported.stdout);
    let ran = folder.run(&["eval", "hf", "--data", "text.txt", "--length", "32", "--json"]).ok();
    let found: Value = serde_json::from_str(&ran.stdout).unwrap();
    assert!((found["loss"].as_f64().unwrap() - fourth.1).abs() < 1e-6, "{found} {fourth:?}");

    for (model, choice, words) in [
        (RUN, "7", "no checkpoint of step 7: there are those of 4, 8, 12"),
        (RUN, "newest", "it is latest, best, or a step"),
        ("hf", "best", "has no checkpoint to choose"),
    ] {
        let ran = folder.run(&["eval", model, "--data", "text.txt", "--checkpoint", choice]);
        assert!(ran.code != Some(0) && ran.stderr.contains(words), "{words}: {}", ran.stderr);
    }
    fs::remove_file(folder.join(RUN).join("checkpoints/best.json")).unwrap();
    let ran = folder.run(&["eval", RUN, "--data", "text.txt", "--checkpoint", "best"]);
    assert!(ran.stderr.contains("has no best checkpoint"), "{}", ran.stderr);
    let damaged = folder.join(RUN).join("checkpoints/step-00000008/model.safetensors");
    let mut bytes = fs::read(&damaged).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&damaged, bytes).unwrap();
    let ran = folder.run(&["eval", RUN, "--data", "text.txt", "--checkpoint", "8"]);
    assert!(ran.code == Some(1) && ran.stderr.contains("is damaged"), "{}", ran.stderr);
}

#[test]
fn going_back_to_a_checkpoint_sets_the_later_ones_aside() {
    let folder = with_three_checkpoints();
    let run = folder.join(RUN);
    let (before, whole) = (checkpoints(&run), tensors(&run));
    let evaluations = fs::read(run.join("evaluations.jsonl")).unwrap();
    let metrics = fs::read(run.join("metrics.jsonl")).unwrap();
    refused(&folder, &["--checkpoint", "7"], &[], &["there are those of 4, 8, 12"]);
    refused(&folder, &["--checkpoint", "8"], &["training.steps=5"], &["8 steps are done already"]);

    let ran = resume(&folder, &["--checkpoint", "4"], &[]).ok();
    for words in ["resumed at step 4", "goes on from step 4", "(8, 12) are now in runs/tiny/set-aside-001"] {
        assert!(ran.stderr.contains(words), "no {words:?} in {}", ran.stderr);
    }
    // The same steps give the same bits, and no record appears twice.
    assert!(tensors(&run) == whole);
    assert_eq!(steps(&run.join("metrics.jsonl")), (1..=12).collect::<Vec<_>>());
    assert_eq!(steps(&run.join("evaluations.jsonl")), [4, 8, 12]);
    // Nothing is lost, and the set-aside folder is a run.
    let aside = run.join("set-aside-001");
    let kept = checkpoints(&aside);
    assert_eq!(kept.keys().collect::<Vec<_>>(), ["step-00000008", "step-00000012"]);
    assert!(kept.iter().all(|(step, tensors)| before[step] == *tensors));
    assert_eq!(fs::read(aside.join("evaluations.jsonl")).unwrap(), evaluations);
    assert_eq!(fs::read(aside.join("metrics.jsonl")).unwrap(), metrics);
    let ran = folder.run(&["eval", "runs/tiny/set-aside-001", "--data", "text.txt"]).ok();
    assert!(ran.stdout.contains("at step 12"), "{}", ran.stdout);

    // The next time another folder is used, under supervision too. The newest checkpoint has none
    // after it to set aside.
    resume(&folder, &["--checkpoint", "8", "--max-restarts", "1"], &["optimizer.learning_rate=1e-3"]).ok();
    assert_eq!(checkpoints(&run.join("set-aside-002")).into_keys().collect::<Vec<_>>(), ["step-00000012"]);
    let ran = resume(&folder, &["--checkpoint", "latest"], &["training.steps=13"]).ok();
    assert!(ran.stderr.contains("resumed at step 12"), "{}", ran.stderr);
    assert!(!run.join("set-aside-003").exists());
}
