//! Options that users of other programs type out of habit. The error names the equivalent here.
//!
//! Configuration keys list their names in other programs, so most answers come from there
//! ([`Config::keys_of_option`]). [`ANSWERS`] has the options that correspond to no key.

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Command, Error};
use std::ffi::OsString;
use std::path::Path;
use trainyard_engine::config::{Config, PRESETS, hub_model};
use trainyard_model::gguf;

/// Names of an option and what to do instead; `{}` stands for the value that was given.
const ANSWERS: &[(&[&str], &str)] = &[
    (&["bf16"], "use --set precision.compute=bf16, which is the default"),
    (&["fp16", "half"], "use --set precision.compute=f16"),
    (&["fp32", "f32", "no_mixed_precision"], "use --set precision.compute=f32"),
    (&["fp8"], "use --set precision.fp8=hybrid"),
    (
        &["batch_size", "bs", "train_batch_size", "micro_batch"],
        "use --set training.global_batch_size={} for the sequences of a step over all ranks, or --set training.micro_batch_size={} for those of one \
         pass on one rank",
    ),
    (
        &["config", "config_file", "config_path", "cfg"],
        "use the configuration's file without an option: `trainyard train {}`",
    ),
    (
        &["gpus", "devices", "num_gpus", "n_gpus", "ngpus", "num_processes", "nproc_per_node", "world_size"],
        "use --set parallel.ranks={} for ranks that are threads of one process, or `trainyard launch --nproc-per-node {} train ...` for processes",
    ),
    (&["nnodes", "num_nodes", "node_rank", "master_addr", "master_port"], "use `trainyard launch`, whose option it is"),
    (&["deepspeed", "fsdp", "zero"], "use --set parallel.zero_stage=1, 2 or 3, with --set parallel.ranks=N"),
    (
        &["gradient_checkpointing", "activation_checkpointing", "recompute"],
        "use --set activation_checkpointing.mode=full, or selective",
    ),
    (&["resume_from_checkpoint", "resume_from", "load", "ckpt", "ckpt_path"], "use --resume RUN, the run's folder"),
    (&["dataset_name", "data_dir"], "use --set data.train={}"),
    (&["warmup_ratio", "warmup_fraction"], "use --set schedule.warmup_steps=N"),
    (&["logging_steps", "log_interval", "log_every"], "leave it out: every step is in the run's metrics.jsonl"),
    (
        &["compile", "torch_compile", "do_train", "overwrite_output_dir", "trust_remote_code"],
        "leave it out: it is not needed here",
    ),
    (
        &["wandb", "wandb_project", "use_wandb"],
        "leave it out: the run's folder has TensorBoard events and metrics.jsonl",
    ),
];

/// Options that name a model.
const MODELS: [&str; 5] = ["model", "model_name", "model_id", "model_name_or_path", "pretrained_model_name_or_path"];

/// A message that replaces `error`, if the error is about an option of another program and the
/// command in `arguments` takes settings.
pub fn answer(program: &Command, arguments: &[OsString], error: &Error) -> Option<String> {
    let unknown = match (error.kind(), error.get(ContextKind::InvalidArg)) {
        (ErrorKind::UnknownArgument, Some(ContextValue::String(unknown))) => unknown,
        _ => return None,
    };
    let option = unknown.split('=').next().unwrap_or(unknown);
    let words: Vec<&str> = arguments.iter().skip(1).filter_map(|word| word.to_str()).collect();
    let (command, path) = command_of(program, &words);
    if !command.get_arguments().any(|argument| argument.get_long() == Some("set")) {
        return None;
    }
    let value = words.iter().enumerate().find_map(|(at, word)| {
        let rest = word.strip_prefix(option)?;
        match rest.strip_prefix('=') {
            Some(value) => Some(value),
            None if rest.is_empty() => words.get(at + 1).copied().filter(|next| !next.starts_with("--")),
            None => None,
        }
    });
    let instead = instead(&option.trim_start_matches('-').replace('-', "_"), value)?;
    Some(format!("`trainyard {path}` has no option {option}: {instead}\n\nFor more information, try '--help'."))
}

/// The subcommand that `words` name, and its name as typed.
fn command_of<'a>(program: &'a Command, words: &[&str]) -> (&'a Command, String) {
    let (mut command, mut path) = (program, Vec::new());
    for word in words {
        let Some(next) = command.find_subcommand(word) else { break };
        command = next;
        path.push(*word);
    }
    (command, path.join(" "))
}

/// The equivalent of the option `name` with `value`.
fn instead(name: &str, value: Option<&str>) -> Option<String> {
    let shown = value.unwrap_or("VALUE");
    if MODELS.contains(&name) {
        return Some(format!("use {}", model(shown)));
    }
    if let Some((_, answer)) = ANSWERS.iter().find(|(names, _)| names.contains(&name)) {
        return Some(answer.replace("{}", shown));
    }
    let keys = Config::keys_of_option(name);
    let settings = keys.iter().map(|(key, expected)| {
        let value = value.unwrap_or(if expected.as_str() == "true or false" { "true" } else { shown });
        format!("--set {key}={value}")
    });
    (!keys.is_empty()).then(|| format!("use {}", settings.collect::<Vec<_>>().join(", or ")))
}

fn model(name: &str) -> String {
    if PRESETS.contains(&name) {
        return format!("--set model.preset={name}");
    }
    if Path::new(name).is_dir() || gguf::is_gguf(Path::new(name)) {
        return format!("--set model.path={name}");
    }
    let hint = hub_model(name, "--set model.path=DIR").map_or(String::new(), |hint| format!("; {hint}"));
    format!(
        "--set model.preset=NAME for a shape (`trainyard config presets` lists them), or --set model.path=DIR for the weights of a Hugging Face \
         folder{hint}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn habits_are_answered_with_keys_of_ours() {
        for (name, value, want) in [
            ("lr", Some("3e-4"), "--set optimizer.learning_rate=3e-4"),
            ("learning_rate", Some("3e-4"), "--set optimizer.learning_rate=3e-4"),
            ("max_steps", Some("100"), "--set training.steps=100"),
            ("steps", Some("100"), "--set training.steps=100"),
            ("output_dir", Some("o"), "--set run.directory=o"),
            ("seed", None, "--set training.seed=VALUE"),
            ("tie_word_embeddings", None, "--set model.tie_embeddings=true"),
            ("train_file", Some("a.txt"), "--set data.train=a.txt"),
            ("bf16", None, "--set precision.compute=bf16, which is the default"),
            ("model", Some("gpt2-124m"), "--set model.preset=gpt2-124m"),
            (
                "interval_steps",
                Some("9"),
                "--set averaging.interval_steps=9, or --set pruning.interval_steps=9, or --set checkpoint.interval_steps=9, \
                 or --set evaluation.interval_steps=9, or --set metrics.interval_steps=9",
            ),
        ] {
            assert_eq!(instead(name, value), Some(format!("use {want}")), "{name}");
        }
        assert!(instead("batch_size", Some("32")).unwrap().starts_with("use --set training.global_batch_size=32 "));
        assert!(instead("model", Some("gpt2")).unwrap().contains("hf download gpt2 --local-dir DIR"));
        assert_eq!(instead("rezume", None), None);
    }

    /// Every `--set` of an answer is a setting that can be made.
    #[test]
    fn answers_name_keys_that_exist() {
        for (names, answer) in ANSWERS {
            for setting in answer.split("--set ").skip(1) {
                let key = setting.split('=').next().unwrap();
                let (section, key) = key.rsplit_once('.').unwrap();
                let config = Config::default();
                let keys = config.section(section).unwrap_or_else(|| panic!("{names:?}: no section {section}")).keys();
                assert!(keys.iter().any(|known| known.name == key), "{names:?}: no key {section}.{key}");
            }
        }
    }
}
