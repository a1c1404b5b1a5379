//! Failures in and around a run lose nothing: diverged weights, damaged checkpoints, signals at any
//! time, files named by mistake.

mod common;

use common::{Folder, Ran};
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

fn steps(folder: &Folder, run: &str) -> Vec<String> {
    let names = fs::read_dir(folder.join(run).join("checkpoints")).unwrap();
    let mut names: Vec<String> = names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.retain(|name| name.contains("step-"));
    names.sort();
    names
}

fn kill(child: u32, signal: &str) {
    assert!(Command::new("kill").args([format!("-{signal}"), child.to_string()]).status().unwrap().success());
}

#[test]
fn a_run_that_diverges_keeps_the_checkpoint_from_before_and_goes_on_from_it() {
    let folder = Folder::new();
    let start = ["train", "tiny.toml", "--set", "data.validation_fraction=0", "--set", "optimizer.weight_decay=0"];
    folder.run(&[&start[..], &["--set", "training.steps=20"]].concat()).ok();
    assert_eq!(steps(&folder, "runs/tiny"), ["step-00000015", "step-00000020"]);
    let go_on = |sets: &[&str]| {
        let sets = sets.iter().flat_map(|set| ["--set", *set]);
        folder.run(&["train", "--resume", "runs/tiny"].into_iter().chain(sets).collect::<Vec<_>>())
    };
    // The first update ruins the weights; a checkpoint is due right after it, and several times
    // while steps are skipped.
    let ruined = go_on(&[
        "training.steps=60",
        "optimizer.learning_rate=1e25",
        "checkpoint.interval_steps=1",
        "schedule.kind=constant",
    ]);
    assert_eq!(ruined.code, Some(1), "{}", ruined.stderr);
    for says in [
        "10 steps in a row",
        "The checkpoint of step 20 is from before",
        "step 21 has the weights that led here",
        "diverged-step-00000021",
    ] {
        assert!(ruined.stderr.contains(says), "no `{says}` in {}", ruined.stderr);
    }
    assert_eq!(steps(&folder, "runs/tiny"), ["diverged-step-00000021", "step-00000020"]);
    let again = go_on(&["optimizer.learning_rate=1e-3", "training.steps=40"]).ok();
    assert!(again.stderr.contains("resumed at step 20"), "{}", again.stderr);
    assert!(!again.stdout.contains("was not finite"), "{}", again.stdout);
}

#[test]
fn a_best_checkpoint_that_is_damaged_is_best_no_more() {
    let folder = Folder::new();
    let sets = ["--set", "evaluation.interval_steps=10", "--set", "schedule.kind=constant"];
    folder.run(&[&["train", "tiny.toml", "--set", "training.steps=40"], &sets[..]].concat()).ok();
    let best = || fs::read_to_string(folder.join("runs/tiny/checkpoints/best.json")).unwrap();
    assert!(best().contains("\"step\": 40"), "{}", best());
    let weights = folder.join("runs/tiny/checkpoints/step-00000040/model.safetensors");
    fs::OpenOptions::new().write(true).open(weights).unwrap().set_len(50).unwrap();
    let worse =
        ["--set", "training.steps=45", "--set", "evaluation.interval_steps=11", "--set", "optimizer.learning_rate=0.3"];
    let resumed = folder.run(&[&["train", "--resume", "runs/tiny"], &worse[..]].concat()).ok();
    assert!(resumed.stderr.contains("step 40, lies behind and is forgotten"), "{}", resumed.stderr);
    assert!(!best().contains("\"step\": 40"), "{}", best());
}

#[test]
fn an_evaluation_stops_at_the_first_signal() {
    let folder = Folder::new();
    let text = fs::read_to_string(folder.join("text.txt")).unwrap();
    folder.write("long.txt", text.repeat(400));
    let mut command = folder.command(&["train", "tiny.toml", "--set", "data.validation=['long.txt']"]);
    command.args(["--set", "data.validation_fraction=auto", "--set", "evaluation.tokens_max=auto"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let metrics = folder.join("runs/tiny/metrics.jsonl");
    let began = Instant::now();
    while fs::read_to_string(&metrics).map_or(0, |text| text.lines().count()) < 12 {
        assert!(child.try_wait().unwrap().is_none() && began.elapsed() < Duration::from_secs(60), "no steps");
        std::thread::sleep(Duration::from_millis(2));
    }
    kill(child.id(), "INT");
    let ran = child.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&ran.stderr);
    assert_eq!(ran.status.code(), Some(130), "{stderr}");
    assert!(stderr.contains("the evaluation was left off"), "{stderr}");
    assert_eq!(steps(&folder, "runs/tiny").last().unwrap(), "step-00000012");
    // Nothing is lost: the missed evaluation is made on resuming.
    let quick = ["--set", "evaluation.tokens_max=256"];
    let again = folder.run(&[&["train", "--resume", "runs/tiny"], &quick[..]].concat()).ok();
    assert!(again.stdout.contains("validation   loss"), "{}", again.stdout);
}

#[test]
fn a_signal_while_nothing_is_trained_yet_ends_the_program() {
    let folder = Folder::new();
    let text = fs::read_to_string(folder.join("text.txt")).unwrap();
    folder.write("long.txt", text.repeat(4000));
    let mut command =
        folder.command(&["train", "tiny.toml", "--set", "data.train=['long.txt']", "--set", "tokenizer.kind=bpe"]);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    while !line.starts_with("training a byte-level BPE tokenizer") {
        line.clear();
        assert!(said.read_line(&mut line).unwrap() > 0, "it ends before it trains its tokenizer");
    }
    kill(child.id(), "TERM");
    let mut rest = String::new();
    said.read_to_string(&mut rest).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{rest}");
    // The work after the tokenizer was not begun.
    assert!(!rest.contains("tokenized"), "{rest}");
}

#[test]
fn copies_of_a_document_leave_something_to_validate_on() {
    let folder = Folder::new();
    fs::copy(folder.join("text.txt"), folder.join("copy.txt")).unwrap();
    let ran = folder.run(&["train", "tiny.toml", "--set", "data.train=['text.txt', 'copy.txt']"]).ok();
    assert!(ran.stdout.contains("validation   loss"), "{}", ran.stdout);
    folder.write("empty.txt", "a");
    let refused = folder.run(&[
        "train",
        "tiny.toml",
        "--set",
        "run.name=b",
        "--set",
        "data.validation=['empty.txt']",
        "--set",
        "data.validation_fraction=auto",
        "--set",
        "tokenizer.kind=characters",
    ]);
    assert_eq!(refused.code, Some(1), "{}", refused.stderr);
    assert!(
        refused.stderr.contains("a loss takes 2") && !folder.join("runs/b/metrics.jsonl").exists(),
        "{}",
        refused.stderr
    );
}

#[test]
fn what_is_written_replaces_no_input_and_no_device() {
    let folder = Folder::new();
    let text = fs::read(folder.join("text.txt")).unwrap();
    let refused = folder.run(&["tokenizer", "train", "--vocab-size", "300", "--out", "text.txt", "text.txt"]);
    assert!(refused.code == Some(1) && refused.stderr.contains("would be replaced"), "{}", refused.stderr);
    assert_eq!(fs::read(folder.join("text.txt")).unwrap(), text);
    // A pipe stands for devices: only regular files are replaced.
    assert!(Command::new("mkfifo").arg(folder.join("pipe")).status().unwrap().success());
    let refused = folder.run(&["tokenizer", "train", "--vocab-size", "300", "--out", "pipe", "text.txt"]);
    assert!(refused.code == Some(1) && refused.stderr.contains("is no regular file"), "{}", refused.stderr);
    // A link is followed.
    folder.write("there.json", "{}");
    std::os::unix::fs::symlink(folder.join("there.json"), folder.join("link.json")).unwrap();
    folder.run(&["tokenizer", "train", "--vocab-size", "300", "--out", "link.json", "text.txt"]).ok();
    assert!(fs::symlink_metadata(folder.join("link.json")).unwrap().is_symlink());
    assert!(fs::metadata(folder.join("there.json")).unwrap().len() > 100);
}

#[test]
fn exports_replace_no_source_and_leave_no_stale_parts() {
    let folder = Folder::new();
    folder.run(&["train", "tiny.toml"]).ok();
    let parts = |out: &str| {
        let names =
            fs::read_dir(folder.join(out)).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.ends_with(".safetensors")).count()
    };
    folder.run(&["export", "runs/tiny", "--out", "hf", "--max-shard-size", "20KB"]).ok();
    assert!(parts("hf") > 2, "{}", parts("hf"));
    folder.run(&["export", "runs/tiny", "--out", "hf"]).ok();
    assert_eq!(parts("hf"), 1);
    let refused = folder.run(&["export", "hf", "--out", "hf"]);
    assert!(refused.code == Some(1) && refused.stderr.contains("is the model itself"), "{}", refused.stderr);
    // Unused keys of a model's configuration are reported.
    let config = fs::read_to_string(folder.join("hf/config.json")).unwrap();
    fs::write(folder.join("hf/config.json"), config.replacen('{', "{\"frobnicate\": 3,", 1)).unwrap();
    let evaluated = folder.run(&["eval", "hf", "--data", "text.txt", "--tokens-max", "256"]).ok();
    assert!(evaluated.stderr.contains("frobnicate"), "{}", evaluated.stderr);
    // Weights that are NaN are refused.
    let weights = folder.join("hf/model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let start = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    bytes[start..].fill(0xff);
    fs::write(&weights, bytes).unwrap();
    for arguments in
        [&["eval", "hf", "--data", "text.txt", "--tokens-max", "256"][..], &["generate", "hf", "--prompt", "a"]]
    {
        let refused = folder.run(arguments);
        assert!(refused.code == Some(1) && refused.stderr.contains("weights hold NaN"), "{}", refused.stderr);
    }
}

#[test]
fn folders_with_odd_names_and_links_are_read() {
    use std::os::unix::ffi::OsStrExt;
    let folder = Folder::new();
    fs::create_dir(folder.join("t")).unwrap();
    fs::copy(folder.join("text.txt"), folder.join("t/a.txt")).unwrap();
    fs::copy(folder.join("text.txt"), folder.path().join("t").join(std::ffi::OsStr::from_bytes(b"b\xe9.txt"))).unwrap();
    std::os::unix::fs::symlink("nowhere", folder.join("t/dangling.txt")).unwrap();
    folder.run(&["train", "tiny.toml", "--set", "data.train=['t']"]).ok();
    std::os::unix::fs::symlink(".", folder.join("t/self")).unwrap();
    let refused = folder.run(&["train", "tiny.toml", "--set", "run.name=b", "--set", "data.train=['t']"]);
    assert!(
        refused.code == Some(1) && refused.stderr.contains("is a link to a folder that it lies in"),
        "{}",
        refused.stderr
    );
}

#[test]
fn the_quick_start_takes_few_steps() {
    let folder = Folder::new();
    let sets = [
        "--set",
        "training.steps=3",
        "--set",
        "training.seconds=auto",
        "--set",
        "compute.threads=1",
        "--set",
        "model.dim=32",
        "--set",
        "model.ffn_dim=64",
    ];
    folder.run(&[&["train", "--data", "text.txt"], &sets[..]].concat()).ok();
}

/// A corpus in its order, with capital letters that no step before has seen: those of step 60.
fn with_a_bad_stretch(folder: &Folder) -> [String; 12] {
    let mut text = fs::read(folder.join("text.txt")).unwrap();
    for (n, byte) in text[59 * 128 + 30..60 * 128 - 10].iter_mut().enumerate() {
        *byte = b'A' + (n * n * 7 % 26) as u8;
    }
    folder.write("text.txt", text);
    let sets = [
        "data.shuffle=false",
        "health.on_spike=roll_back",
        "health.spike_deviations=4",
        "training.steps=80",
        "checkpoint.interval_steps=25",
        "schedule.kind=constant",
    ];
    let mut arguments = [(); 12].map(|()| "--set".to_owned());
    sets.iter().enumerate().for_each(|(n, set)| arguments[2 * n + 1] = (*set).to_owned());
    arguments
}

#[test]
fn after_a_spike_a_run_goes_back_and_passes_over_the_samples() {
    let folder = Folder::new();
    let sets = with_a_bad_stretch(&folder);
    let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
    let ran = folder.run(&[&["train", "tiny.toml"], &sets[..]].concat()).ok();
    assert!(ran.stderr.contains("went back from step 60 to step 50; the next sample is 240"), "{}", ran.stderr);
    let event = fs::read_to_string(folder.join("runs/tiny/health.jsonl")).unwrap();
    let event: serde_json::Value = serde_json::from_str(event.lines().next().unwrap()).unwrap();
    assert_eq!((event["step"].as_u64(), event["samples"].as_array().unwrap()[0].as_u64()), (Some(60), Some(236)));
    assert!(event["reaction"].as_str().unwrap().contains("goes back to its last checkpoint if it has one"), "{event}");
    // Each step is recorded once, and the capital letters were never learned from.
    let metrics = fs::read_to_string(folder.join("runs/tiny/metrics.jsonl")).unwrap();
    let of_steps = metrics.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let numbers: Vec<u64> = of_steps.filter_map(|line| line["step"].as_u64()).collect();
    assert!(numbers.windows(2).all(|pair| pair[0] < pair[1]) && numbers.contains(&80), "{numbers:?}");
    // A run that is stopped after the return and goes on ends with the same weights.
    let weights = |run: &str| fs::read(folder.join(run).join("checkpoints/step-00000080/model.safetensors")).unwrap();
    let whole = weights("runs/tiny");
    let half = ["--set", "training.steps=70", "--set", "run.name=halves"];
    folder.run(&[&["train", "tiny.toml"], &sets[..], &half].concat()).ok();
    folder.run(&["train", "--resume", "runs/halves", "--set", "training.steps=80"]).ok();
    assert!(weights("runs/halves") == whole);
}

#[test]
fn a_spike_after_every_return_ends_the_run() {
    let folder = Folder::new();
    let sets = ["health.on_spike=roll_back", "health.spike_deviations=0.001", "training.steps=80"];
    let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", *set]).collect();
    let ran = folder.run(&[&["train", "tiny.toml", "--set", "checkpoint.interval_steps=30"], &sets[..]].concat());
    assert!(ran.stderr.contains("a spike came again after each of 3 returns to step"), "{}", ran.stderr);
    assert_eq!(ran.stderr.matches("went back from step").count(), 3, "{}", ran.stderr);
    // It ends as a run that was asked to stop, with a checkpoint to go on from.
    assert_eq!(ran.code, Some(130), "{}", ran.stderr);
    folder.run(&["train", "--resume", "runs/tiny", "--set", "health.on_spike=warn"]).ok();
}

#[test]
fn the_end_of_the_fourth_pass_is_said_once() {
    let folder = Folder::new();
    let text = fs::read(folder.join("text.txt")).unwrap();
    folder.write("text.txt", &text[..4000]);
    let ran = folder.run(&["train", "tiny.toml", "--set", "training.steps=150"]).ok();
    assert_eq!(ran.stderr.matches("data.train has been passed over 4 times").count(), 1, "{}", ran.stderr);
    let line = fs::read_to_string(folder.join("runs/tiny/health.jsonl")).unwrap();
    let event: serde_json::Value = serde_json::from_str(line.lines().next().unwrap()).unwrap();
    let metrics = fs::read_to_string(folder.join("runs/tiny/metrics.jsonl")).unwrap();
    let metrics = metrics.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let over = metrics.filter(|line| line["epoch"].as_f64() >= Some(4.0)).map(|line| line["step"].clone()).next();
    assert_eq!((event["symptom"].as_str(), over), (Some("repeated_data"), Some(event["step"].clone())));
}

#[test]
fn a_bit_that_flips_in_the_memory_of_a_rank_ends_the_run_with_its_name() {
    let folder = Folder::new();
    let train = |faults: &str, name: &str, more: &[&str]| {
        let name = format!("run.name={name}");
        let sets = [
            "parallel.ranks=4",
            "training.global_batch_size=4",
            "training.micro_batch_size=1",
            "training.steps=20",
            "checkpoint.interval_steps=2",
            "checkpoint.keep_last=10",
            "health.compare_interval_steps=4",
            &name,
        ];
        let sets = sets.into_iter().chain(more.iter().copied()).flat_map(|set| ["--set", set]);
        let mut command = folder.command(&["train", "tiny.toml"].into_iter().chain(sets).collect::<Vec<_>>());
        Ran::new(command.env("TRAINYARD_FAULTS", faults).output().unwrap())
    };
    // The copies that forward reads are compared too, where optimizer states are sharded.
    // There each update makes them anew, so only an error since the last one shows.
    let sharded = &["parallel.zero_stage=2", "precision.compute=bf16"];
    for (name, flip, more) in [("ddp", "flip rank=2 step=7", &[][..]), ("sharded", "flip rank=2 step=8", sharded)] {
        train("", &format!("whole-{name}"), more).ok();
        let ended = train(flip, name, more);
        assert_eq!(ended.code, Some(70), "{}", ended.stderr);
        for says in [
            "after step 8",
            "rank 2 has other bits of `",
            "than ranks 0, 1, 3",
            "The checkpoint of step 4 is from before",
        ] {
            assert!(ended.stderr.contains(says), "no `{says}` in {}", ended.stderr);
        }
        let run = format!("runs/{name}");
        assert!(steps(&folder, &run).contains(&"diverged-step-00000006".to_owned()), "{:?}", steps(&folder, &run));
        let verdicts = folder.run(&["doctor", &run]);
        assert!(verdicts.stdout.contains("rank 2 has other bits of"), "{}\n{}", verdicts.stdout, verdicts.stderr);
        let resumed = folder.run(&["train", "--resume", &run]).ok();
        assert!(resumed.stderr.contains("resumed at step 4"), "{}", resumed.stderr);
        let [last, whole] = [run, format!("runs/whole-{name}")].map(|run| common::tensors(&folder.join(&run)));
        assert!(last == whole, "{name}: other weights than those of a run without the flip");
    }
}

#[test]
fn steps_that_are_trained_again_have_the_same_bits_and_a_changed_checkpoint_has_not() {
    let folder = Folder::new();
    folder.run(&["train", "tiny.toml"]).ok();
    assert_eq!(steps(&folder, "runs/tiny"), ["step-00000010", "step-00000012"]);
    let same = folder.run(&["verify", "runs/tiny"]).ok();
    let lines: Vec<&str> = same.stdout.lines().collect();
    assert_eq!(
        lines[..2],
        ["replayed     steps 11 to 12 of runs/tiny", "losses       2 losses and gradient norms are the same bits"]
    );
    assert!(
        lines.len() == 3 && lines[2].ends_with("tensors of parameters and optimizer state are the same bits"),
        "{lines:?}"
    );
    // Other settings stand for another result: the replay differs, and says where.
    let other = folder.run(&["verify", "runs/tiny", "--set", "optimizer.learning_rate=1e-3", "--json"]);
    assert_eq!(other.code, Some(3), "{}", other.stderr);
    let found: serde_json::Value = serde_json::from_str(&other.stdout).unwrap();
    // The first loss is that of the same weights; the next step's is not.
    assert_eq!((&found["same"], found["steps"]["compared"].as_u64()), (&false.into(), Some(2)));
    assert!(found["steps"]["different"][0].as_str().unwrap().starts_with("step 12: "), "{found}");
    assert!(found["tensors"]["different"].as_array().unwrap().len() > 10, "{found}");
    // Nothing of a replay stays, and the run is as before.
    let left: Vec<_> = fs::read_dir(folder.join("runs")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.iter().all(|name| !name.to_string_lossy().starts_with(".verify")), "{left:?}");
    folder.run(&["verify", "runs/tiny", "--from", "10", "--to", "12"]).ok();
    for (arguments, says) in [
        (&["verify", "gone"][..], "is no run"),
        (&["verify", "runs/tiny", "--to", "11"], "checkpoints of steps 10, 12"),
        (&["verify", "runs/tiny", "--to", "10"], "no checkpoint before step 10"),
        (&["verify", "runs/tiny", "--from", "12"], "--from 12 is not before --to 12"),
    ] {
        let refused = folder.run(arguments);
        assert_eq!(refused.code, Some(1));
        assert!(refused.stderr.contains(says), "no `{says}` in {}", refused.stderr);
    }
}

#[test]
fn a_model_with_dead_units_says_so() {
    let folder = Folder::new();
    folder.run(&["train", "tiny.toml"]).ok();
    folder.run(&["export", "runs/tiny", "--out", "model"]).ok();
    // A third of a block's units get nothing through their rows, so no gradient passes them.
    let path = folder.join("model/model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let tensors: serde_json::Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    for matrix in ["gate_proj", "up_proj"] {
        let offsets = &tensors[format!("model.layers.1.mlp.{matrix}.weight")]["data_offsets"];
        let [begin, end] = [0, 1].map(|at| 8 + header + offsets[at].as_u64().unwrap() as usize);
        bytes[begin..begin + (end - begin) / 4].fill(0);
    }
    fs::write(&path, bytes).unwrap();
    let sets = ["training.steps=140", "optimizer.learning_rate=1e-3", "health.dead_units_interval_steps=70"];
    let sets = sets.into_iter().flat_map(|set| ["--set", set]);
    let config = common::TINY.split("[data]").nth(1).unwrap();
    folder.write("tune.toml", format!("[run]\nname = 'dead'\n[model]\npath = 'model'\n[data]{config}"));
    let ran = folder.run(&["train", "tune.toml"].into_iter().chain(sets).collect::<Vec<_>>()).ok();
    assert!(ran.stderr.contains("12.5 % of the units of feed-forward layers"), "{}", ran.stderr);
    assert!(ran.stderr.contains("most in `block.1`: 25.0 %"), "{}", ran.stderr);
    let events = fs::read_to_string(folder.join("runs/dead/health.jsonl")).unwrap();
    assert!(events.contains("\"dead_units\"") && events.contains("0.125"), "{events}");
}
