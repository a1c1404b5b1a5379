//! Messages for arguments that users of other programs give in place of a configuration or a
//! folder: a name on the Hugging Face hub, a text file, YAML. Each message says what to give
//! instead.

use super::PRESETS;
use crate::session::files;
use std::path::Path;
use trainyard_model::gguf;

/// Models of the Hugging Face hub whose names have no organisation before them.
const HUB_NAMES: [&str; 9] = [
    "gpt2",
    "gpt2-medium",
    "gpt2-large",
    "gpt2-xl",
    "distilgpt2",
    "bert-base-uncased",
    "roberta-base",
    "t5-small",
    "t5-base",
];
/// First parts of a path that are local folders rather than organisations on the hub.
const FOLDERS: [&str; 8] = ["runs", "data", "models", "configs", "checkpoints", "out", "output", "outputs"];
/// Endings of files that are trained on.
const TEXTS: [&str; 7] = ["txt", "jsonl", "gz", "zst", "md", "bin", "idx"];
const YAML: [&str; 2] = ["yaml", "yml"];

/// The message for `name`, which does not exist here, if it looks like a model on the Hugging Face
/// hub. `give` is the argument to use once the model is in the folder DIR.
pub fn hub_model(name: &str, give: &str) -> Option<String> {
    (HUB_NAMES.contains(&name) || is_hub_name(name)).then(|| hub(name, "", give))
}

/// As [`hub_model`], for a data set.
pub fn hub_dataset(name: &str, give: &str) -> Option<String> {
    is_hub_name(name).then(|| hub(name, " --repo-type dataset", give))
}

fn hub(name: &str, kind: &str, give: &str) -> String {
    format!(
        "if it is a name on the Hugging Face hub, download it: `hf download {name}{kind} --local-dir DIR`, and give {give}"
    )
}

/// True for `ORGANISATION/NAME`.
fn is_hub_name(name: &str) -> bool {
    let Some((organisation, model)) = name.split_once('/') else { return false };
    let is_word = |word: &str| {
        word.starts_with(|c: char| c.is_ascii_alphanumeric())
            && word.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
    };
    let ending = Path::new(model).extension().and_then(|ending| ending.to_str()).unwrap_or_default();
    let is_file = ending == "toml" || ending == "json" || TEXTS.contains(&ending) || YAML.contains(&ending);
    let is_here = FOLDERS.contains(&organisation) || Path::new(organisation).exists();
    is_word(organisation) && is_word(model) && !is_file && !is_here
}

/// The message for `path` if it is evidently not a configuration: what it is and how to use it.
/// `None` for a path that may be a configuration.
pub(super) fn in_place_of_a_configuration(path: &Path) -> Option<String> {
    let name = path.display();
    if path.is_dir() {
        return Some(if path.join(files::CONFIG).is_file() {
            format!(
                "{name} is the folder of a run: go on with it by `trainyard train --resume {name}`, or begin another with its \
                 configuration, {name}/{}",
                files::CONFIG
            )
        } else if path.join("config.json").is_file() {
            format!(
                "{name} is the folder of a Hugging Face model: give a configuration in TOML that has model.path = \"{name}\""
            )
        } else {
            format!("{name} is a folder: text in it is trained on by `trainyard train --data {name}`")
        });
    }
    if gguf::is_gguf(path) {
        return Some(format!("{name} is a GGUF model: give a configuration in TOML that has model.path = \"{name}\""));
    }
    let ending = path.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
    if YAML.contains(&ending) {
        return Some(format!(
            "{name} is YAML, and a configuration is TOML: `trainyard config print` shows one, `trainyard config docs` every key"
        ));
    }
    if path.is_file() {
        let text = TEXTS.contains(&ending);
        return text.then(|| format!("{name} is no configuration: train on it by `trainyard train --data {name}`"));
    }
    let name = path.to_str()?;
    if PRESETS.contains(&name) {
        return Some(format!("{name} is a shape by name: give --set model.preset={name}"));
    }
    let hint = hub_model(name, "a configuration that has model.path = \"DIR\"")?;
    Some(format!("there is no file {name}: {hint}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_on_the_hub_are_told_from_paths() {
        for name in ["gpt2", "meta-llama/Llama-3.2-1B", "Qwen/Qwen2.5-0.5B", "HuggingFaceTB/SmolLM2-135M"] {
            assert!(hub_model(name, "it").is_some_and(|hint| hint.contains(&format!("hf download {name} "))), "{name}");
        }
        for path in ["gone", "runs/x", "data/my.txt", "a/b/c", "/data/model", "./model", "../x", "my/config.toml", ""] {
            assert_eq!(hub_model(path, "it"), None, "{path}");
        }
        assert_eq!((hub_dataset("gpt2", "it"), hub_dataset("HuggingFaceFW/fineweb", "it").is_some()), (None, true));
    }
}
