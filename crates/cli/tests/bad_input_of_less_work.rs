//! Wrong input to the commands that make training or models smaller: searches, fine-tuning,
//! distillation, pruning, quantisation, merging, ensembles, conversations. The message names the
//! option or key and the way out, nothing panics, nothing is left.

mod common;

use common::Folder;

/// The rest of a command line, its exit code, and parts of its message: the option, key or file
/// that is wrong, and the way out.
type Case = (&'static [&'static str], i32, &'static [&'static str]);

/// Cases of one command, which begins with these arguments.
type Group = (&'static [&'static str], &'static [Case]);

const SEARCHES: &[Group] = &[
    (
        &["tune", "tiny.toml"],
        &[
            (&["--space", "optimizer.lr=log:1e-4..1e-2"], 1, &["optimizer.lr", "optimizer.learning_rate"]),
            (&["--space", "optimizer.learning_rate=log:0..1"], 1, &["optimizer.learning_rate", "begins above 0"]),
            (&["--space", "optimizer.learning_rate=1e-2..1e-4"], 1, &["optimizer.learning_rate", "is empty"]),
            (
                &["--space", "optimizer.learning_rate=3"],
                1,
                &["optimizer.learning_rate", "one value is no choice: write KEY="],
            ),
            (&["--space", "run.name=a|b"], 1, &["run.name", "does not change what is trained"]),
            (&["--space", "schedule.kind=cosine|cosines"], 1, &["schedule.kind", "cosines"]),
            (&["--space-file", "gone.toml"], 1, &["cannot read gone.toml"]),
            (&["--trials", "0"], 2, &["--trials", "0 is not in 1.."]),
            (&["--budget", "soon"], 2, &["--budget", "no duration"]),
            (&["--levels", "3"], 1, &["--levels", "no effect without --halving"]),
            (&["--search", "grid"], 2, &["--search", "possible values: "]),
            (&["--study", "../x"], 1, &["../x", "a name has letters"]),
        ],
    ),
    (
        &["tune", "batch"],
        &[
            (&["gone.toml"], 1, &["cannot read gone.toml"]),
            (&["tiny.toml", "--samples", "1"], 2, &["--samples", "4..=4096"]),
            (&["--run", "runs/gone"], 1, &["runs/gone", "not the folder of a run"]),
            (&["tiny.toml", "--memory-only", "--steps", "3"], 2, &["--memory-only", "cannot be used with"]),
            (&["tiny.toml", "--set", "training.elastic_bits=true"], 1, &["training.elastic_bits", "--memory-only"]),
        ],
    ),
    (
        &["tune", "transfer", "tiny.toml", "--widths"],
        &[
            (&["32"], 1, &["--widths", "at least two different widths"]),
            (&["32,33"], 1, &["--widths 33", "model.heads"]),
            (&["32,x"], 2, &["--widths", "x"]),
            (&["32,64", "--rates", "0,1e-3"], 1, &["--rates", "0 is no positive number"]),
            (&["32,64", "--set", "optimizer.name=muon"], 1, &["optimizer.name", "AdamW and Lion"]),
            (&["32,64", "--set", "model.tie_embeddings=true"], 1, &["set model.tie_embeddings = false"]),
        ],
    ),
];

const MODELS: &[Group] = &[
    (
        &["prune", "hf", "--out", "o"],
        &[
            (&[], 1, &["give --sparsity 0.5, --pattern 2:4, --layers N, --ffn N, --heads N or --hidden N"]),
            (&["--sparsity", "1.5"], 1, &["--sparsity", "is not between 0 and 1"]),
            (&["--pattern", "4:2"], 1, &["--pattern", "2:4 keeps 2 of each 4"]),
            (&["--pattern", "2:7", "--method", "magnitude"], 1, &["take another --pattern"]),
            (&["--sparsity", "0.5"], 1, &["--calibration FILES"]),
            (&["--sparsity", "0.5", "--calibration", "short.txt"], 1, &["give more text, or a smaller --length"]),
            (&["--layers", "2", "--calibration", "text.txt"], 1, &["--layers 2", "drop at least 1"]),
            (&["--ffn", "0"], 1, &["--ffn 0", "keep from 1 to 128"]),
            (&["--ffn", "1000"], 1, &["--ffn 1000", "keep from 1 to 128"]),
            (&["--heads", "9"], 1, &["--heads 9", "keep from 1 to 2"]),
            (&["--hidden", "64"], 1, &["--hidden 64", "keep from 1 to 32"]),
            (&["--hidden", "16"], 1, &["--hidden", "--calibration FILES"]),
            (&["--heads", "1", "--sparsity", "0.5"], 2, &["--sparsity", "--heads", "cannot be used with"]),
            (&["--ffn", "64", "--method", "wanda"], 2, &["--method", "--ffn", "cannot be used with"]),
        ],
    ),
    (
        &["quantize", "hf", "--out", "o"],
        &[
            (&["--bits", "5"], 1, &["--bits 5", "2, 3, 4 or 8 bits"]),
            (&["--method", "rtn"], 1, &["groups of 128", "--group 0 has one scale per row"]),
            (&["--method", "gptq", "--group", "32"], 1, &["--calibration FILES"]),
            (&["--method", "smoothquant", "--bits", "4"], 1, &["weights have 8 bits and a scale per row"]),
            (&["--smoothing", "0.5"], 1, &["--smoothing has no effect"]),
            (&["--activations", "4"], 2, &["--activations", "8..=8"]),
            (&["--form", "gguf"], 2, &["--form", "compressed-tensors"]),
            (&["--method", "rtn", "--activations", "8", "--form", "dense"], 1, &["write --form compressed-tensors"]),
        ],
    ),
    (
        &["merge", "--out", "o"],
        &[
            (&["hf"], 1, &["a merge takes two models or more"]),
            (&["hf", "gone"], 1, &["cannot open the model gone"]),
            (&["hf", "hf", "--weights", "1"], 1, &["--weights", "1 weights for 2 models"]),
            (&["hf", "hf", "--weights", "0,0"], 1, &["not all of them 0"]),
            (&["hf", "hf", "--method", "ties"], 1, &["--base MODEL"]),
            (&["hf", "hf", "--base", "hf"], 1, &["--base", "know no base"]),
            (&["hf", "hf", "--method", "dare", "--base", "hf", "--density", "0"], 1, &["a density of 0"]),
            (&["hf", "hf", "hf", "--method", "slerp"], 1, &["there are 3: take soup"]),
        ],
    ),
    (
        &["eval", "hf"],
        &[
            (&["hf", "--data", "text.txt"], 1, &["--ensemble mean or vote"]),
            (&["--ensemble", "mean", "--data", "text.txt"], 1, &["--ensemble", "this is one"]),
            (&["gone", "--ensemble", "mean", "--data", "text.txt"], 1, &["gone", "neither"]),
            (&["hf", "--ensemble", "median", "--data", "text.txt"], 2, &["--ensemble", "possible values: mean, vote"]),
            (&["hf", "--ensemble", "mean"], 2, &["--data <FILES>"]),
            (&["--chat", "--data", "text.txt"], 1, &["text.txt", "JSONL"]),
            (&["--loss-on", "all", "--data", "text.txt"], 2, &["--loss-on"]),
        ],
    ),
];

const KEYS: &[Group] = &[
    (
        &["distill", "tiny.toml"],
        &[
            (&[], 1, &["no teacher: give --teacher MODEL"]),
            (&["--teacher", "gone"], 1, &["distillation.teacher names gone, which does not exist"]),
            (
                &["--teacher", "hf", "--set", "run.name=o", "--set", "model.vocab_size=300"],
                1,
                &["set model.vocab_size = 320"],
            ),
            (&["--teacher", "hf", "--set", "distillation.weight=1.5"], 1, &["distillation.weight", "at most 1"]),
            (
                &["--teacher", "hf", "--set", "distillation.temperature=0"],
                1,
                &["distillation.temperature", "0.01 to 100"],
            ),
            (&["--teacher", "hf", "--set", "distillation.beta=0.5"], 1, &["distillation.beta has no effect"]),
            (
                &["--teacher", "hf", "--set", "distillation.divergence=l2"],
                1,
                &["distillation.divergence", "forward_kl"],
            ),
            (
                &["--teacher", "hf", "--set", "parallel.tensor_parallel_degree=2"],
                1,
                &["parallel.tensor_parallel_degree", "a teacher needs whole rows of logits"],
            ),
        ],
    ),
    (
        &["config", "check", "tune.toml", "--set"],
        &[
            (&["fine_tuning.adapter=qlora"], 1, &["fine_tuning.adapter", "lora"]),
            (&["fine_tuning.rank=8"], 1, &["fine_tuning.rank", "fine_tuning.adapter"]),
            (&["fine_tuning.adapter=lora", "--set", "fine_tuning.rank=0"], 1, &["fine_tuning.rank"]),
            (&["fine_tuning.adapter=lora", "--set", "fine_tuning.alpha=-1"], 1, &["fine_tuning.alpha"]),
            (
                &["fine_tuning.adapter=lora", "--set", "fine_tuning.targets=['k']"],
                1,
                &["fine_tuning.targets", "q_proj"],
            ),
            (&["fine_tuning.adapter=lora", "--set", "fine_tuning.from=gone"], 1, &["fine_tuning.from", "gone"]),
            (&["fine_tuning.base_dtype=nf4"], 1, &["fine_tuning.base_dtype", "needs something frozen"]),
            (&["fine_tuning.freeze=['blocks.*']"], 1, &["fine_tuning.freeze", "blocks.*"]),
            (&["fine_tuning.layer_rate_decay=2"], 1, &["fine_tuning.layer_rate_decay"]),
            (&["quantization.aware=5"], 1, &["quantization.aware", "2, 3, 4 or 8"]),
            (&["quantization.group=32"], 1, &["quantization.group", "quantization.aware"]),
            (&["quantization.aware=4", "--set", "quantization.group=24"], 1, &["quantization.group", "24"]),
            (
                &["quantization.aware=4", "--set", "quantization.group=0", "--set", "quantization.begin=2"],
                1,
                &["quantization.begin"],
            ),
            (&["pruning.sparsity=1.5"], 1, &["pruning.sparsity"]),
            (&["pruning.pattern='4:2'"], 1, &["pruning.pattern", "2:4"]),
            (&["pruning.sparsity=0.5", "--set", "pruning.pattern='2:4'"], 1, &["pruning.sparsity", "pruning.pattern"]),
            (&["pruning.end=0.5"], 1, &["pruning.end", "pruning.sparsity"]),
            (&["pruning.pattern='2:4'", "--set", "pruning.begin=0.9"], 1, &["pruning.begin"]),
        ],
    ),
    (
        &["train", "chat.toml", "--set"],
        &[
            (&["data.chat_template=gone.jinja"], 1, &["data.chat_template names gone.jinja, which does not exist"]),
            (&["data.format=text"], 1, &["data.chat_template has no effect"]),
            (&["data.loss_on=questions"], 1, &["data.loss_on", "answers"]),
            (&["data.train=['text.txt']"], 1, &["text.txt", "is no JSONL file"]),
            (&["data.fim_rate=0.5"], 1, &["data.fim_rate"]),
        ],
    ),
];

#[test]
fn bad_input_of_less_work() {
    let folder = Folder::new();
    folder.run(&["train", "tiny.toml", "--quiet", "--set", "training.steps=1"]).ok();
    folder.run(&["export", "runs/tiny", "--out", "hf"]).ok();
    folder.write("short.txt", "a few words");
    folder.write(
        "talks.jsonl",
        "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"assistant\", \"content\": \"b\"}]}\n",
    );
    folder.write(
        "tune.toml",
        common::TINY
            .split_once("[tokenizer]")
            .unwrap()
            .1
            .split_once("[data]")
            .map(|(_, data)| format!("[run]\nname = 'tuned'\n[model]\npath = 'hf'\n[data]\n{data}"))
            .unwrap(),
    );
    let chat = "train = ['talks.jsonl']\nformat = 'chat'\nchat_template = 'chatml'";
    folder.write("chat.toml", common::TINY.replace("train = ['text.txt']", chat).replace("'tiny'", "'talks'"));
    let mut wrong = Vec::new();
    let mut cases = 0;
    for (command, group) in [SEARCHES, MODELS, KEYS].concat() {
        for (rest, code, says) in group {
            let space: &[&str] = match command {
                ["tune", "tiny.toml"] if !rest[0].starts_with("--space") => {
                    &["--space", "optimizer.learning_rate=log:1e-4..1e-1"]
                }
                _ => &[],
            };
            let arguments = [command, *rest, space].concat();
            let ran = folder.run(&arguments);
            let mut faults = Vec::new();
            if ran.code != Some(*code) {
                faults.push(format!("ended with {:?}, not {code}", ran.code));
            }
            if ran.stderr.contains("panicked") || ran.stderr.matches("error: ").count() != 1 {
                faults.push("panicked, or does not say its error once".to_owned());
            }
            let missing = says.iter().filter(|part| !ran.stderr.contains(**part));
            faults.extend(missing.map(|part| format!("does not say {part:?}")));
            if !faults.is_empty() {
                wrong.push(format!("trainyard {}\n  {}\n{}", arguments.join(" "), faults.join("; "), ran.stderr));
            }
            cases += 1;
        }
    }
    assert!(wrong.is_empty(), "{} of {cases}\n\n{}", wrong.len(), wrong.join("\n"));
    assert!(cases >= 60, "{cases} cases");
    assert!(!folder.join("o").exists(), "a folder was left");
    let runs: Vec<_> = std::fs::read_dir(folder.join("runs")).unwrap().map(|run| run.unwrap().file_name()).collect();
    assert!(runs.iter().all(|run| run == "tiny" || run == "data-cache"), "runs were left: {runs:?}");
}
