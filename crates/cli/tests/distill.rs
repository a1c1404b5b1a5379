//! A student learns from a teacher, from the command line.

mod common;

use common::{Folder, Ran};
use serde_json::Value;
use std::fs;

/// Settings of a student that is smaller than the tiny model, its teacher.
const STUDENT: [&str; 4] = ["--set", "model.layers=1", "--set", "model.dim=16"];

/// A folder with a teacher: the run `tiny`.
fn with_teacher() -> Folder {
    let folder = Folder::new();
    folder.run(&["train", "tiny.toml", "--quiet"]).ok();
    folder
}

fn distill(folder: &Folder, name: &str, more: &[&str]) -> Ran {
    let name = format!("run.name={name}");
    let base = ["distill", "tiny.toml", "--teacher", "runs/tiny", "--set", &name];
    folder.run(&[&base[..], &STUDENT, more].concat())
}

/// One number of every step of a run.
fn of_steps(folder: &Folder, name: &str, key: &str) -> Vec<f64> {
    let text = fs::read_to_string(folder.join(&format!("runs/{name}/metrics.jsonl"))).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.map(|line| line[key].as_f64().unwrap_or_else(|| panic!("{key} in {line}"))).collect()
}

fn json(folder: &Folder, file: &str) -> Value {
    serde_json::from_slice(&fs::read(folder.join(file)).unwrap()).unwrap()
}

#[test]
fn hidden_states_of_an_equally_wide_teacher_come_nearer() {
    let folder = with_teacher();
    let shallow = ["--set", "model.layers=1", "--set", "training.steps=40", "--teacher", "runs/tiny"];
    let distill = |name: &str, more: &[&str]| {
        let name = format!("run.name={name}");
        folder.run(&[&["distill", "tiny.toml", "--set", &name][..], &shallow, more].concat())
    };
    distill("plain", &[]).ok();
    distill("hidden", &["--set", "distillation.hidden_weight=1"]).ok();
    let [plain, hidden] = ["plain", "hidden"].map(|name| of_steps(&folder, name, "loss"));
    // The distance is a part of the loss, and falls.
    let added = |step: usize| hidden[step] - plain[step];
    assert!(added(0) > 0.5 && added(39) < 0.7 * added(0), "{} then {}", added(0), added(39));
    let plan = json(&folder, "runs/hidden/plan.json");
    assert_eq!(plan["predicted"]["mem_peak_bytes"], plan["measured"]["mem_peak_bytes"]);
    let narrow = distill("narrow", &["--set", "model.dim=16", "--set", "distillation.hidden_weight=1"]);
    assert!(narrow.stderr.contains("its hidden states have 32 columns and the student's 16"), "{narrow:?}");
    assert!(!folder.join("runs/narrow").exists(), "nothing has begun");
}

#[test]
fn a_student_learns_from_a_run_and_its_memory_is_predicted() {
    let folder = with_teacher();
    let ran = distill(&folder, "student", &[]).ok();
    assert!(ran.stderr.contains("teacher: the run runs/tiny at step 12,"), "{}", ran.stderr);
    folder.run(&[&["train", "tiny.toml", "--quiet", "--set", "run.name=alone"], &STUDENT[..]].concat()).ok();
    let [student, alone] = ["student", "alone"].map(|name| of_steps(&folder, name, "loss"));
    assert_eq!(student.len(), alone.len());
    // Before the first step the student knows nothing, and its teacher differs from the data.
    assert!(student[0] != alone[0] && student.iter().all(|loss| loss.is_finite()), "{student:?} {alone:?}");
    // Validation is plain cross-entropy, so `eval` gives the run's own number again.
    let lines = fs::read_to_string(folder.join("runs/student/evaluations.jsonl")).unwrap();
    let last: Value = serde_json::from_str(lines.lines().last().unwrap()).unwrap();
    assert!(last["loss"].as_f64().unwrap() > 0.0);
    // The teacher's weights are in the prediction, to the byte.
    let [taught, plain] = ["student", "alone"].map(|name| json(&folder, &format!("runs/{name}/plan.json")));
    let peak = |plan: &Value, of: &str| plan[of]["mem_peak"]["params"].as_u64();
    assert!(peak(&taught, "predicted") > peak(&plain, "predicted"), "{taught}");
    assert_eq!(taught["predicted"]["mem_peak_bytes"], taught["measured"]["mem_peak_bytes"]);
    // A teacher in bf16 takes two bytes a parameter: it has no f32 masters.
    let bf16 = ["--set", "precision.compute=bf16"];
    let ran = distill(&folder, "bf16", &bf16).ok();
    let alone = ["train", "tiny.toml", "--quiet", "--set", "run.name=alone-bf16"];
    folder.run(&[&alone[..], &STUDENT, &bf16].concat()).ok();
    let line = ran.stderr.lines().find(|line| line.starts_with("teacher: ")).unwrap();
    let parameters: u64 = line.split_whitespace().rev().nth(1).unwrap().parse().unwrap();
    let [with, without] = ["bf16", "alone-bf16"]
        .map(|name| peak(&json(&folder, &format!("runs/{name}/plan.json")), "predicted").unwrap());
    assert!(
        (2 * parameters..2 * parameters + parameters / 4).contains(&(with - without)),
        "{parameters}: {with} {without}"
    );
    // The student's checkpoints and exports are its own alone.
    folder.run(&["export", "runs/student", "--out", "hf"]).ok();
    assert_eq!(json(&folder, "hf/config.json")["num_hidden_layers"], 1);
    // The configuration names its teacher, so `train` distils too.
    let again = ["train", "runs/student/config.toml", "--quiet", "--set", "run.name=again"];
    folder.run(&again).ok();
    assert_eq!(of_steps(&folder, "again", "loss"), student);
}

/// A student with its teacher's weights has nothing to learn from it.
#[test]
fn the_divergence_from_oneself_is_zero() {
    let folder = with_teacher();
    folder.run(&["export", "runs/tiny", "--out", "hf"]).ok();
    let config = common::TINY.split_once("[data]").unwrap().1;
    folder.write(
        "same.toml",
        format!("[model]\npath = 'hf'\n[data]\n{config}[distillation]\nteacher = 'hf'\nweight = 1\n"),
    );
    for divergence in ["forward_kl", "reverse_kl", "jensen_shannon"] {
        let name = format!("run.name={divergence}");
        let kind = format!("distillation.divergence={divergence}");
        folder.run(&["distill", "same.toml", "--quiet", "--set", &name, "--set", &kind]).ok();
        let losses = of_steps(&folder, divergence, "loss");
        assert!(losses[0].abs() < 1e-6, "{divergence}: {losses:?}");
    }
}

#[test]
fn layouts_and_resumption_do_not_change_a_students_bits() {
    let folder = with_teacher();
    let (two, accumulated) = (["--set", "parallel.ranks=2"], ["--set", "training.accumulation_steps=2"]);
    let runs: [(&str, &[&str]); 6] = [
        ("ddp", &two),
        ("zero3", &["--set", "parallel.ranks=2", "--set", "parallel.zero_stage=3"]),
        ("recomputed", &["--set", "parallel.ranks=2", "--set", "activation_checkpointing.mode=full"]),
        ("one", &accumulated),
        ("stages", &["--set", "training.accumulation_steps=2", "--set", "parallel.pipeline_parallel_degree=2"]),
        ("paused", &["--set", "parallel.ranks=2", "--until", "5"]),
    ];
    for (name, sets) in runs {
        let both = ["--quiet", "--set", "model.layers=2"];
        distill(&folder, name, &[&both[..], sets].concat()).ok();
    }
    folder.run(&["distill", "--resume", "runs/paused", "--quiet", "--set", "parallel.zero_stage=3"]).ok();
    for key in ["loss", "grad_norm"] {
        let of = |name| of_steps(&folder, name, key);
        for other in ["zero3", "recomputed", "paused"] {
            assert_eq!(of("ddp"), of(other), "{key} of {other}");
        }
        assert_eq!(of("one"), of("stages"), "{key}");
    }
}

/// The kept states of a teacher change no bit, in whatever layout and by whichever student they are
/// read. Those that are there are not computed and kept again.
#[test]
fn kept_states_of_a_teacher_change_no_bit() {
    let folder = with_teacher();
    let more =
        |name: &str, more: &[&str]| distill(&folder, name, &[&["--set", "precision.compute=bf16"], more].concat());
    let files = || -> Vec<u64> {
        let of_teacher = fs::read_dir(folder.join("kept")).unwrap().next().unwrap().unwrap().path();
        let mut sizes: Vec<u64> =
            fs::read_dir(of_teacher).unwrap().map(|file| file.unwrap().metadata().unwrap().len()).collect();
        sizes.sort_unstable();
        sizes
    };
    more("plain", &[]).ok();
    let cold = more("cold", &["--cache-logits", "kept"]).ok();
    assert!(cold.stderr.contains(": 0 sequences, 0.0 MiB so far"), "{}", cold.stderr);
    let kept = files();
    let warm = more("warm", &["--cache-logits", "kept", "--set", "activation_checkpointing.mode=full"]).ok();
    assert!(!warm.stderr.contains(": 0 sequences"), "{}", warm.stderr);
    assert_eq!(files(), kept, "nothing new");
    for other in ["cold", "warm"] {
        assert_eq!(of_steps(&folder, "plain", "loss"), of_steps(&folder, other, "loss"), "{other}");
    }
    // Two ranks divide the same batches, and each reads what the other run has kept.
    let two = ["--set", "parallel.ranks=2", "--set", "training.micro_batch_size=2"];
    more("plain-two", &two).ok();
    more("two", &[&two[..], &["--cache-logits", "kept"]].concat()).ok();
    assert_eq!(of_steps(&folder, "plain-two", "loss"), of_steps(&folder, "two", "loss"));
    assert_eq!(files(), kept, "nothing new");
    // Another teacher has a folder of its own.
    folder.run(&["train", "--resume", "runs/tiny", "--quiet", "--set", "training.steps=14"]).ok();
    let other = more("other", &["--cache-logits", "kept"]).ok();
    assert!(other.stderr.contains(": 0 sequences"), "{}", other.stderr);
    let error = folder.run(&["train", "tiny.toml", "--set", "distillation.cache=kept"]);
    assert!(error.code == Some(1) && error.stderr.contains("distillation.teacher is unset"), "{}", error.stderr);
}

#[test]
fn adapters_learn_from_a_teacher() {
    let folder = with_teacher();
    folder.run(&["export", "runs/tiny", "--out", "hf"]).ok();
    let config = common::TINY.split_once("[data]").unwrap().1;
    let sections = "[distillation]\nteacher = 'runs/tiny'\n[fine_tuning]\nadapter = 'lora'\nrank = 4\n";
    folder.write("lora.toml", format!("[run]\nname = 'lora'\n[model]\npath = 'hf'\n[data]\n{config}{sections}"));
    folder.run(&["distill", "lora.toml", "--quiet"]).ok();
    assert!(of_steps(&folder, "lora", "loss").iter().all(|loss| loss.is_finite()));
    // An adapted run can teach.
    let student =
        [&["distill", "tiny.toml", "--quiet", "--teacher", "runs/lora", "--set", "run.name=pupil"], &STUDENT[..]];
    folder.run(&student.concat()).ok();
}

#[test]
fn a_teacher_that_cannot_teach_is_refused_before_the_run() {
    let folder = with_teacher();
    let refused = |ran: Ran, words: &[&str]| {
        assert_eq!(ran.code, Some(1), "{}", ran.stderr);
        for word in words {
            assert!(ran.stderr.contains(word), "{word}: {}", ran.stderr);
        }
    };
    refused(folder.run(&["distill", "tiny.toml"]), &["no teacher: give --teacher MODEL"]);
    refused(
        folder.run(&["distill", "tiny.toml", "--teacher", "runs/none"]),
        &["distillation.teacher names runs/none, which does not exist"],
    );
    refused(
        folder.run(&["train", "tiny.toml", "--set", "distillation.weight=0.5"]),
        &["distillation.weight has no effect: distillation.teacher is unset"],
    );
    let other = distill(&folder, "other", &["--set", "model.vocab_size=300"]);
    refused(other, &["distillation.teacher = runs/tiny: it has a vocabulary of 320", "set model.vocab_size = 320"]);
    let longer = ["--set", "training.sequence_length=64", "--set", "model.max_sequence_length=64"];
    refused(distill(&folder, "longer", &longer), &["it takes 32 tokens: set training.sequence_length = 32 or less"]);
    let words = ["--set", "tokenizer.kind=bpe", "--set", "tokenizer.vocab_size=257"];
    refused(distill(&folder, "words", &words), &["its tokenizer is another one"]);
    let parts = ["--set", "parallel.tensor_parallel_degree=2"];
    refused(distill(&folder, "parts", &parts), &["a teacher needs whole rows of logits"]);
    refused(distill(&folder, "cuda", &["--set", "compute.device=cuda"]), &["the loss of a student has no kernel"]);
    for (set, says) in [
        ("distillation.weight=1.5", "above 0 and at most 1"),
        ("distillation.temperature=0", "from 0.01 to 100"),
        ("distillation.beta=0.5", "distillation.beta has no effect"),
        ("distillation.divergence=l2", "forward_kl"),
    ] {
        refused(distill(&folder, "wrong", &["--set", set]), &[says]);
    }
    let js = ["--set", "distillation.divergence=jensen_shannon", "--set", "distillation.beta=1"];
    refused(distill(&folder, "wrong", &js), &["from 0.000001 to 0.999999"]);
    // Nothing is left behind.
    let entries = fs::read_dir(folder.join("runs")).unwrap().map(|entry| entry.unwrap().file_name());
    let mut left: Vec<_> = entries.collect();
    left.sort();
    assert_eq!(left, ["data-cache", "tiny"]);
}
