//! Wrong input to the program: the message names the problem and its place, the exit code is right,
//! nothing panics, nothing is lost.

mod common;

use common::Folder;

/// A command, its exit code, and parts of its message.
struct Case {
    arguments: &'static [&'static str],
    code: i32,
    says: &'static [&'static str],
}

const fn case(arguments: &'static [&'static str], code: i32, says: &'static [&'static str]) -> Case {
    Case { arguments, code, says }
}

const CASES: &[Case] = &[
    // Usage.
    case(&["trian"], 2, &["unrecognized subcommand", "train"]),
    case(&["train", "--rezume", "x"], 2, &["--rezume", "--resume"]),
    case(&["train", "tiny.toml", "--resume", "runs/x"], 2, &["cannot be used with"]),
    case(&["eval", "runs/x"], 2, &["--data"]),
    case(&["eval", "runs/x", "--data", "t.jsonl", "--chat", "--text-field", "a"], 2, &["cannot be used with"]),
    case(
        &["data", "prepare", "t.jsonl", "--tokenizer", "bytes", "--out", "o", "--chat", "--text-field", "a"],
        2,
        &["cannot be used with"],
    ),
    case(&["generate", "runs/x", "--prompt", "x", "--device", "gpu"], 2, &["cuda:N", "gpu"]),
    case(&["tokenizer", "train", "--out", "t.json"], 2, &["<TEXT>"]),
    case(&["export", "runs/x", "--out", "o", "--max-shard-size", "big"], 2, &["a size such as"]),
    case(&["export", "runs/x", "--out", "o", "--dtype", "int8"], 2, &["int8", "bf16"]),
    case(&["bench", "train", "--rows", "-1"], 2, &["-1"]),
    // Options of other programs.
    case(&["train", "--lr", "3e-4"], 2, &["has no option --lr: use --set optimizer.learning_rate=3e-4"]),
    case(&["train", "tiny.toml", "--learning-rate=3e-4"], 2, &["use --set optimizer.learning_rate=3e-4"]),
    case(&["train", "--batch-size", "32"], 2, &["--set training.global_batch_size=32", "training.micro_batch_size=32"]),
    case(&["train", "--max_steps", "100"], 2, &["use --set training.steps=100"]),
    case(&["train", "--steps", "100"], 2, &["use --set training.steps=100"]),
    case(&["train", "--output_dir", "o"], 2, &["use --set run.directory=o"]),
    case(&["train", "--bf16"], 2, &["use --set precision.compute=bf16"]),
    case(&["train", "--model", "gpt2-124m"], 2, &["use --set model.preset=gpt2-124m"]),
    case(&["train", "--model", "gpt2"], 2, &["hf download gpt2 --local-dir DIR", "model.path"]),
    case(&["train", "--config", "c.toml"], 2, &["without an option: `trainyard train c.toml`"]),
    case(&["config", "check", "--seed", "1"], 2, &["`trainyard config check` has no option --seed", "training.seed=1"]),
    case(&["launch", "--nproc-per-node", "2", "train", "--lr", "1"], 2, &["use --set optimizer.learning_rate=1"]),
    // In place of a configuration.
    case(&["train", "."], 1, &[". is a folder", "`trainyard train --data .`"]),
    case(&["train", "liar"], 1, &["folder of a Hugging Face model", "model.path = \"liar\""]),
    case(&["train", "text.txt"], 1, &["text.txt is no configuration", "`trainyard train --data text.txt`"]),
    case(&["train", "c.yaml"], 1, &["c.yaml is YAML, and a configuration is TOML"]),
    case(&["train", "meta-llama/Llama-3.2-1B"], 1, &["hf download meta-llama/Llama-3.2-1B --local-dir DIR"]),
    case(&["train", "gpt2"], 1, &["hf download gpt2 --local-dir DIR", "model.path = \"DIR\""]),
    case(&["config", "check", "gpt2-124m"], 1, &["--set model.preset=gpt2-124m"]),
    case(&["generate", "Qwen/Qwen2.5-0.5B", "--prompt", "x"], 1, &["hf download Qwen/Qwen2.5-0.5B --local-dir DIR"]),
    case(&["train", "tiny.toml", "--set", "model.path=Qwen/Qwen3-0.6B"], 1, &["hf download Qwen/Qwen3-0.6B "]),
    case(&["train", "tiny.toml", "--data", "HuggingFaceFW/fineweb"], 1, &["--repo-type dataset"]),
    // Paths: the message says where they were looked for.
    case(
        &["train", "gone.toml"],
        1,
        &["cannot read gone.toml (looked for at /", "/gone.toml): ", "`trainyard config print`"],
    ),
    case(
        &["train", "tiny.toml", "--data", "sub/gone.txt"],
        1,
        &["/sub/gone.txt was looked for", "where the command runs"],
    ),
    case(&["train", "sub/c.toml"], 1, &["data.train names beside.txt", "give data.train = \"sub/beside.txt\""]),
    case(
        &["data", "prepare", "--tokenizer", "gone.json", "--out", "d", "text.txt"],
        1,
        &["(looked for at /", "/gone.json)"],
    ),
    case(&["eval", "gone", "--data", "text.txt"], 1, &["gone (looked for at /", "neither"]),
    case(&["train", "--resume", "gone"], 1, &["not the folder of a run: there is no /", "/gone/config.toml"]),
    // Configurations.
    case(&["train", "broken.toml"], 1, &["broken.toml", "2"]),
    case(
        &["train", "ds_config.json"],
        1,
        &[
            "ds_config.json:1: this is JSON, of DeepSpeed: a configuration is TOML",
            "\n    training.micro_batch_size = 4\n",
            "\n    parallel.zero_stage = 2\n",
            "\n    memory.offload.optimizer = \"host\"\n",
            "\n    precision.compute = \"bf16\"\n",
            "not taken over: steps_per_print",
        ],
    ),
    case(&["config", "check", "ds_config.json"], 1, &["this is JSON, of DeepSpeed"]),
    case(&["config", "check", "liar/config.json"], 1, &["this is JSON, of a Hugging Face model", "model.path"]),
    case(&["config", "check", "broken.json"], 1, &["broken.json:1: this begins like JSON (EOF"]),
    case(&["train", "tiny.toml", "--set", "optimizer.lr=1"], 1, &["optimizer.lr", "optimizer.learning_rate"]),
    case(&["train", "tiny.toml", "--set", "optimiser.learning_rate=1"], 1, &["optimizer.learning_rate"]),
    case(&["train", "tiny.toml", "--set", "training.steps=many"], 1, &["training.steps"]),
    case(&["train", "tiny.toml", "--set", "training"], 1, &["training"]),
    case(&["train", "tiny.toml", "--set", "model.heads=5"], 1, &["heads"]),
    case(&["train", "tiny.toml", "--set", "model.preset='gpt2-124n'"], 1, &["gpt2-124m"]),
    case(&["train", "tiny.toml", "--set", "training.sequence_length=64"], 1, &["sequence_length"]),
    case(&["train", "tiny.toml", "--set", "compute.isa='mmx'"], 1, &["mmx"]),
    case(&["train", "tiny.toml", "--set", "memory.limit='1MiB'"], 1, &["over memory.limit"]),
    case(&["config", "check", "tiny.toml", "--set", "memory.limit='1MiB'"], 1, &["over memory.limit"]),
    case(
        &[
            "train",
            "tiny.toml",
            "--set",
            "model.dim=4096",
            "--set",
            "model.heads=32",
            "--set",
            "training.micro_batch_size=100000",
        ],
        1,
        &["over this machine's memory", "it fits with", "training.micro_batch_size = "],
    ),
    // A batch of 256 GB was once allocated to predict its memory, and a program of a billion
    // micro-batches was lowered.
    case(
        &["train", "tiny.toml", "--set", "training.micro_batch_size=100000000"],
        1,
        &["3200000000 tokens", "16777216"],
    ),
    case(
        &["plan", "tiny.toml", "--set", "training.global_batch_size=1000000000"],
        1,
        &["250000000 micro-batches", "16384"],
    ),
    case(
        &["config", "check", "tiny.toml", "--set", "training.accumulation_steps=16385"],
        1,
        &["training.accumulation_steps", "a larger training.micro_batch_size"],
    ),
    case(&["train", "tiny.toml", "--set", "device=gpu"], 1, &["compute.device", "cuda:N"]),
    // There is no driver here, or there are fewer GPUs.
    case(&["train", "tiny.toml", "--set", "device=cuda:99"], 1, &["GPU"]),
    case(&["config", "check", "gone.toml"], 1, &["gone.toml"]),
    case(&["config", "check", "tiny.toml", "--set", "tokenizer.path='gone.json'"], 1, &["gone.json"]),
    case(&["bench", "train", "--preset", "gpt3"], 1, &["gpt3"]),
    case(&["bench", "train", "--set", "memory.limit='1MiB'"], 1, &["over memory.limit"]),
    case(&["bench", "train", "--steps", "0"], 1, &["0 steps measure nothing"]),
    // Text and tokenizers.
    case(&["train"], 1, &["no Rust sources", "--data"]),
    case(&["train", "tiny.toml", "--data", "gone.txt"], 1, &["gone.txt"]),
    case(&["train", "tiny.toml", "--data", "empty.txt"], 1, &["empty.txt"]),
    case(&["train", "tiny.toml", "--data", "latin.txt"], 1, &["latin.txt", "UTF-8"]),
    case(&["train", "tiny.toml", "--data", "short.txt"], 1, &["tokens"]),
    case(&["data", "prepare", "--tokenizer", "gone.json", "--out", "d", "text.txt"], 1, &["gone.json"]),
    case(&["data", "prepare", "--tokenizer", "broken.json", "--out", "d", "text.txt"], 1, &["broken.json", "JSON"]),
    case(&["data", "prepare", "--tokenizer", "bytes", "--out", "text.txt/d", "text.txt"], 1, &["text.txt/d"]),
    case(&["data", "prepare", "--tokenizer", "bytes", "--out", "d", "bad.jsonl"], 1, &["bad.jsonl", "2"]),
    case(
        &["data", "prepare", "--tokenizer", "bytes", "--validation-fraction", "-1", "--out", "d", "text.txt"],
        1,
        &["validation_fraction"],
    ),
    case(&["tokenizer", "train", "--vocab-size", "5", "--out", "t.json", "text.txt"], 1, &["257"]),
    // Models.
    case(&["train", "--resume", "runs/gone"], 1, &["runs/gone", "not the folder of a run"]),
    case(&["eval", "gone", "--data", "text.txt"], 1, &["gone", "neither"]),
    case(&["generate", "gone", "--prompt", "x", "--temperature", "-1"], 1, &["temperature"]),
    case(&["generate", "gone", "--prompt", "x", "--top-k", "0"], 1, &["top-k 0"]),
    case(&["generate", "liar", "--prompt", "x"], 1, &["liar"]),
    case(&["export", "gone", "--out", "o"], 1, &["gone"]),
];

#[test]
fn wrong_input_is_said_clearly() {
    let folder = Folder::new();
    folder.write("broken.toml", "[model]\ndim = = 3\n");
    folder.write("broken.json", "{\"model\":");
    folder.write(
        "ds_config.json",
        r#"{"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "steps_per_print": 100, "bf16": {"enabled": true},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}"#,
    );
    folder.write("empty.txt", "");
    folder.write("short.txt", "ab");
    folder.write("latin.txt", b"caf\xe9 au lait");
    folder.write("bad.jsonl", "{\"text\": \"fine\"}\n{\"texd\": \"no\"}\n");
    std::fs::create_dir(folder.join("liar")).unwrap();
    std::fs::create_dir(folder.join("sub")).unwrap();
    folder.write("sub/beside.txt", "text");
    folder.write("sub/c.toml", common::TINY.replace("text.txt", "beside.txt"));
    folder.write("c.yaml", "model:\n  dim: 3\n");
    folder.write("liar/config.json", "{\"model_type\": \"llama\", \"hidden_size\": -4}");
    let mut wrong = Vec::new();
    for Case { arguments, code, says } in CASES {
        let ran = folder.run(arguments);
        let mut complain =
            |what: String| wrong.push(format!("trainyard {}\n  {what}\n{}", arguments.join(" "), ran.stderr));
        if ran.code != Some(*code) {
            complain(format!("ended with {:?}, not {code}", ran.code));
        }
        if ran.stderr.contains("panicked") {
            complain("panicked".to_owned());
        }
        if ran.stderr.matches("error: ").count() != 1 {
            complain("does not say its error once".to_owned());
        }
        for part in says.iter().filter(|part| !ran.stderr.contains(**part)) {
            complain(format!("does not say {part:?}"));
        }
    }
    let runs = || std::fs::read_dir(folder.join("runs")).into_iter().flatten().flatten().map(|entry| entry.path());
    let left: Vec<_> = runs().filter(|run| !run.ends_with("data-cache") && !run.join("config.toml").exists()).collect();
    assert!(left.is_empty(), "runs that never began left {left:?}");
    assert!(wrong.is_empty(), "{} complaints\n\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn a_run_is_never_overwritten() {
    let folder = Folder::new();
    folder.run(&["train", "tiny.toml"]).ok();
    let before = common::tensors(&folder.join("runs/tiny"));
    let again = folder.run(&["train", "tiny.toml"]);
    assert_eq!(again.code, Some(1));
    assert!(again.stderr.contains("train --resume"), "{}", again.stderr);
    let export = folder.run(&["export", "runs/tiny", "--out", "runs/tiny"]);
    assert_eq!(export.code, Some(1));
    assert!(export.stderr.contains("is the folder of a run"), "{}", export.stderr);
    assert_eq!(before, common::tensors(&folder.join("runs/tiny")));
}

#[test]
fn a_reader_that_leaves_is_no_error() {
    let folder = Folder::new();
    let mut child = folder
        .command(&["config", "docs"])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let ran = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&ran.stderr), "");
    assert!(ran.status.success());
}
