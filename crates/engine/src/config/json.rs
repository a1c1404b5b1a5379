//! The message for a JSON file given where TOML is wanted. It translates the keys of a DeepSpeed
//! configuration into Trainyard's.

use serde_json::{Map, Value as Json};
use std::collections::BTreeSet;
use toml::Value;

/// A key of DeepSpeed's file, our key, and the function that converts the value; it returns None
/// where nothing is to be set.
type Row = (&'static str, &'static str, fn(&Json) -> Option<Value>);

const DEEPSPEED: &[Row] = &[
    ("train_batch_size", "training.global_batch_size", whole),
    ("train_micro_batch_size_per_gpu", "training.micro_batch_size", whole),
    ("gradient_accumulation_steps", "training.accumulation_steps", whole),
    ("gradient_clipping", "optimizer.clip_norm", number),
    ("zero_optimization.stage", "parallel.zero_stage", whole),
    ("zero_optimization.offload_optimizer.device", "memory.offload.optimizer", tier),
    ("zero_optimization.offload_optimizer.nvme_path", "memory.offload.directory", text),
    ("zero_optimization.offload_param.nvme_path", "memory.offload.directory", text),
    ("zero_optimization.offload_param.device", "memory.offload.parameters", tier),
    ("bf16.enabled", "precision.compute", |on| enabled(on, "bf16")),
    ("fp16.enabled", "precision.compute", |on| enabled(on, "f16")),
    ("fp16.initial_scale_power", "precision.loss_scale_initial", power),
    ("fp16.loss_scale_window", "precision.loss_scale_window", whole),
    ("optimizer.type", "optimizer.name", rule),
    ("optimizer.params.lr", "optimizer.learning_rate", number),
    ("optimizer.params.betas.0", "optimizer.beta1", number),
    ("optimizer.params.betas.1", "optimizer.beta2", number),
    ("optimizer.params.eps", "optimizer.eps", number),
    ("optimizer.params.weight_decay", "optimizer.weight_decay", number),
    ("scheduler.params.warmup_num_steps", "schedule.warmup_steps", whole),
];

/// The message for `text`, which is not TOML, if it is JSON.
pub(super) fn problem(text: &str) -> Option<String> {
    if !text.trim_start().starts_with('{') {
        return None;
    }
    const TOML: &str = "a configuration is TOML, lines `section.key = value`; `trainyard config docs` lists the keys";
    let object: Map<String, Json> = match serde_json::from_str(text) {
        Ok(object) => object,
        Err(error) => return Some(format!("this begins like JSON ({error}): {TOML}")),
    };
    if object.contains_key("model_type") {
        return Some(format!(
            "this is JSON, of a Hugging Face model: {TOML}; model.path takes the folder of such a file"
        ));
    }
    let is_deepspeed =
        |row: &Row| row.0.split('.').next().is_some_and(|key| key != "optimizer" && object.contains_key(key));
    if !DEEPSPEED.iter().any(is_deepspeed) {
        return Some(format!("this is JSON: {TOML}"));
    }
    let mut text = format!("this is JSON, of DeepSpeed: {TOML}. What it says, as such lines:");
    let (ours, rest) = translated(&Json::Object(object));
    ours.iter().for_each(|line| text += &format!("\n    {line}"));
    if !rest.is_empty() {
        text += &format!("\n  not taken over: {}", rest.join(", "));
    }
    Some(text + "\n  and the model, the data and training.steps are to be added")
}

/// Our settings for what `file` says, one a line, and the keys of it that have no translation.
fn translated(file: &Json) -> (Vec<String>, Vec<String>) {
    let (mut ours, mut rest) = (Vec::new(), Vec::new());
    let is_f16 = file.pointer("/fp16/enabled") == Some(&Json::Bool(true));
    let mut said = BTreeSet::new();
    for (key, value) in leaves("", file) {
        let has_effect = is_f16 || !key.starts_with("fp16.");
        let row = DEEPSPEED.iter().find(|(name, ..)| has_effect && *name == key);
        let translated = row.and_then(|(_, name, translate)| Some((name, translate(value)?)));
        match translated.filter(|(name, _)| said.insert(*name)) {
            Some((name, value)) => ours.push(format!("{name} = {value}")),
            None => rest.push(key),
        }
    }
    // Without either DeepSpeed computes in f32, and this program in bf16.
    let halves = ["/bf16/enabled", "/fp16/enabled"].map(|key| file.pointer(key));
    if halves.iter().all(|on| matches!(on, None | Some(Json::Bool(false)))) {
        ours.push("precision.compute = \"f32\"".to_owned());
    }
    (ours, rest)
}

/// Every leaf value (no object), with its path.
fn leaves<'a>(path: &str, value: &'a Json) -> Vec<(String, &'a Json)> {
    let inside = |key: &str| if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
    match value {
        Json::Object(object) => object.iter().flat_map(|(key, value)| leaves(&inside(key), value)).collect(),
        Json::Array(list) => {
            list.iter().enumerate().flat_map(|(at, value)| leaves(&inside(&at.to_string()), value)).collect()
        }
        _ => vec![(path.to_owned(), value)],
    }
}

fn whole(value: &Json) -> Option<Value> {
    value.as_i64().map(Value::Integer)
}

fn number(value: &Json) -> Option<Value> {
    value.as_f64().map(Value::Float)
}

fn text(value: &Json) -> Option<Value> {
    value.as_str().filter(|text| *text != "auto").map(Value::from)
}

fn power(value: &Json) -> Option<Value> {
    value.as_u64().filter(|power| *power < 64).map(|power| Value::Float(2f64.powi(power as i32)))
}

fn enabled(on: &Json, dtype: &str) -> Option<Value> {
    (*on == Json::Bool(true)).then(|| dtype.into())
}

fn tier(device: &Json) -> Option<Value> {
    let tier = match device.as_str()? {
        "cpu" => "host",
        "nvme" => "disk",
        "none" => "none",
        _ => return None,
    };
    Some(tier.into())
}

/// DeepSpeed's Adam decouples its weight decay unless told otherwise.
fn rule(name: &Json) -> Option<Value> {
    let name = name.as_str()?.to_ascii_lowercase();
    match name.as_str() {
        "adam" | "adamw" => Some("adamw".into()),
        "sgd" | "lion" | "muon" => Some(name.into()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use std::path::Path;

    #[test]
    fn what_a_file_of_deepspeed_says_is_a_configuration() {
        let file = serde_json::json!({
            "train_batch_size": 64,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": 1,
            "steps_per_print": 10,
            "bf16": {"enabled": true},
            "fp16": {"enabled": false, "initial_scale_power": 16, "loss_scale_window": 500},
            "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/fast"},
                "offload_param": {"device": "nvme", "nvme_path": "/other"},
            },
        });
        let (ours, rest) = translated(&file);
        assert_eq!(ours.len(), 15, "{ours:?}");
        for line in
            ["training.micro_batch_size = 4", "optimizer.learning_rate = 0.0001", "precision.compute = \"bf16\""]
        {
            assert!(ours.iter().any(|ours| ours == line), "{line}: {ours:?}");
        }
        let off = ["fp16.enabled", "fp16.initial_scale_power", "fp16.loss_scale_window"];
        let second = "zero_optimization.offload_param.nvme_path";
        let left = [&off[..], &["gradient_accumulation_steps", "scheduler.type", "steps_per_print", second]].concat();
        assert_eq!(BTreeSet::from_iter(rest.iter().map(String::as_str)), BTreeSet::from_iter(left));
        Config::parse(Path::new("lines.toml"), &ours.join("\n"), &[]).unwrap();
    }

    #[test]
    fn keys_of_the_table_are_those_of_configurations() {
        let config = Config::default();
        for (theirs, ours, _) in DEEPSPEED {
            let (section, key) = ours.rsplit_once('.').unwrap();
            let known =
                config.section(section).is_some_and(|section| section.keys().iter().any(|known| known.name == key));
            assert!(known, "{ours} of {theirs}");
        }
    }

    #[test]
    fn without_a_half_precision_it_is_f32() {
        let (ours, _) = translated(&serde_json::json!({"train_batch_size": 8, "fp16": {"enabled": false}}));
        assert_eq!(ours, ["training.global_batch_size = 8", "precision.compute = \"f32\""]);
        let (ours, _) = translated(&serde_json::json!({"train_batch_size": 8, "bf16": {"enabled": "auto"}}));
        assert_eq!(ours, ["training.global_batch_size = 8"]);
        assert_eq!(problem("[model]\ndim = = 3"), None);
    }
}
