//! GGUF files: a model in one file, as llama.cpp has it.
//!
//! Nothing else in the workspace knows the format. A file's metadata is translated to the text of a
//! `config.json` ([`config_json`]), which the family then reads like any other, and its tensors are
//! read under their names in Hugging Face files. [`Form`] says how a family's files are called and
//! laid out; each family has a table of them ([`Definition::gguf`](crate::families::Definition)).
//! [`export_gguf`] writes a file by the same tables.

mod header;
mod quantised;
mod tokenizer;
mod write;

pub use header::{MetaValue, Metadata, open};
pub use quantised::Quantisation;
pub use write::{GgufOptions, export_gguf};

use crate::families::FAMILIES;
use crate::spec::ModelSpec;
use crate::weights::{Change, Places, StoredTensor, TensorFile, WeightsError};
use serde_json::{Map, Value, json};
use std::path::Path;
use trainyard_tensor::cpu::rope::{RopeScaling, rope_frequencies};

/// The form of GGUF files of one architecture.
#[derive(Clone, Copy, Debug)]
pub struct Form {
    /// `general.architecture`, which is the prefix of the architecture's keys.
    pub architecture: &'static str,
    /// The `model_type` to whose keys the metadata is translated.
    pub model_type: &'static str,
    /// Keys of the metadata, and those of `config.json`.
    pub keys: &'static [(&'static str, &'static str)],
    /// Names of tensors, and those in Hugging Face files, without `.weight` and `.bias`; `{}` is
    /// the number of the layer.
    pub tensors: &'static [(&'static str, &'static str)],
    /// Tensors that are there where a key of `config.json` is true.
    pub biases: &'static [(&'static str, &'static str)],
    /// The layout of what is stored otherwise than in Hugging Face files.
    pub layout: Layout,
    /// Adds the keys of `config.json` that files do not have and the family knows.
    pub complete: fn(&mut Map<String, Value>),
}

/// The difference between files of an architecture and Hugging Face files.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Layout {
    /// None.
    Same,
    /// Rows of queries and keys are ordered for rotations of neighbours, not of halves.
    Interleaved,
    /// Norms are stored as `1 + w`.
    GainsOfNorms,
    /// Matrices are not transposed, and those of Hugging Face files are.
    Upright,
}

/// The keys that Llama and its relatives share.
pub(crate) const DECODER_KEYS: &[(&str, &str)] = &[
    ("context_length", "max_position_embeddings"),
    ("block_count", "num_hidden_layers"),
    ("embedding_length", "hidden_size"),
    ("feed_forward_length", "intermediate_size"),
    ("attention.head_count", "num_attention_heads"),
    ("attention.head_count_kv", "num_key_value_heads"),
    ("attention.key_length", "head_dim"),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
    ("attention.sliding_window", "sliding_window"),
    (THETA, "rope_theta"),
];

/// The biases that Llama and its relatives may have.
pub(crate) const DECODER_BIASES: &[(&str, &str)] =
    &[("blk.0.attn_q.bias", "attention_bias"), ("blk.0.ffn_down.bias", "mlp_bias")];

/// The key with the base of rotations. Architectures without it have none.
const THETA: &str = "rope.freq_base";

/// Adds nothing to what a file says.
pub(crate) fn complete(_config: &mut Map<String, Value>) {}

/// The keys of an architecture that are read here, or say what the tensors say too.
const OTHER_KEYS: [&str; 8] = [
    "vocab_size",
    "attention.value_length",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "rope.scale_linear",
];

/// The tensor of factors by which Llama 3.1's rule stretches wavelengths.
const ROPE_FACTORS: &str = "rope_freqs.weight";

/// True for a file with the extension of the format.
pub fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf")) && path.is_file()
}

/// The forms of all families.
fn forms() -> impl Iterator<Item = &'static Form> {
    FAMILIES.iter().flat_map(|family| family.gguf())
}

/// The text of a `config.json` with what the metadata of a file says. A key of the architecture
/// that is not known goes in under its own name, so that it is reported like any unknown key.
///
/// # Errors
/// A file that is damaged, is a part of several, or holds what is not supported.
pub fn config_json(path: &Path) -> Result<String, WeightsError> {
    let (metadata, file) = open(path)?;
    let config = translate(&metadata, &file).map_err(|problem| WeightsError::Gguf { path: path.into(), problem })?;
    Ok(serde_json::to_string_pretty(&config).expect("a JSON value of strings and numbers"))
}

/// True if a file has a tokenizer; false for a file that cannot be read.
pub fn has_tokenizer(path: &Path) -> bool {
    open(path).is_ok_and(|(metadata, _)| tokenizer::is_there(&metadata))
}

/// The text of a `tokenizer.json` of the tokenizer in a file.
///
/// # Errors
/// A file that is damaged, has no tokenizer, or one of a kind that is not known.
pub fn tokenizer_json(path: &Path) -> Result<String, WeightsError> {
    let (metadata, _) = open(path)?;
    let value = tokenizer::describe(&metadata).map_err(|problem| WeightsError::Gguf { path: path.into(), problem })?;
    Ok(value.to_string())
}

/// The form of a file.
fn form_of(metadata: &Metadata) -> Result<&'static Form, String> {
    let parts = metadata.integer("split.count").unwrap_or(1);
    if parts > 1 {
        return Err(format!("it is one of {parts} files of a model: join them with `llama-gguf-split --merge`"));
    }
    let architecture = metadata.text("general.architecture").ok_or("it does not name its general.architecture")?;
    let known = || forms().map(|form| form.architecture).collect::<Vec<_>>().join(", ");
    let form = forms().find(|form| form.architecture == architecture);
    form.ok_or_else(|| format!("its architecture `{architecture}` is not supported; supported are: {}", known()))
}

fn translate(metadata: &Metadata, file: &TensorFile) -> Result<Value, String> {
    let form = form_of(metadata)?;
    let mut config = Map::new();
    config.insert("model_type".into(), json!(form.model_type));
    let prefix = format!("{}.", form.architecture);
    for (name, value) in &metadata.0 {
        let Some(key) = name.strip_prefix(&prefix).filter(|key| !OTHER_KEYS.contains(key)) else { continue };
        let translated = form.keys.iter().find(|(from, _)| *from == key).map(|(_, to)| *to);
        config.insert(translated.unwrap_or(name).into(), plain(name, value)?);
    }
    let has = |name: &str| file.tensors().contains_key(name);
    let table = file.tensors().get("token_embd.weight").ok_or("it has no tensor `token_embd.weight`")?;
    config.insert("vocab_size".into(), json!(table.shape.first()));
    config.insert("tie_word_embeddings".into(), json!(!has("output.weight")));
    for (token, key) in [("bos", "bos_token_id"), ("eos", "eos_token_id"), ("padding", "pad_token_id")] {
        if let Some(id) = metadata.integer(&format!("tokenizer.ggml.{token}_token_id")) {
            config.insert(key.into(), json!(id));
        }
    }
    config
        .extend(form.biases.iter().filter(|(tensor, _)| has(tensor)).map(|(_, key)| ((*key).to_owned(), json!(true))));
    if form.keys.iter().any(|(key, _)| *key == THETA) {
        rotation(metadata, form, file, &mut config)?;
    }
    (form.complete)(&mut config);
    Ok(Value::Object(config))
}

/// A value of the metadata as one of `config.json`. Lists are of what differs from layer to layer,
/// which no family here has.
fn plain(name: &str, value: &MetaValue) -> Result<Value, String> {
    Ok(match value {
        MetaValue::Integer(n) => json!(*n as i64),
        // Shortest decimals of the f32 that files hold: 1e-5, and not 9.99999974e-6.
        MetaValue::Float(x) => json!((*x as f32).to_string().parse::<f64>().unwrap_or(*x)),
        MetaValue::Bool(flag) => json!(flag),
        MetaValue::Text(text) => json!(text),
        MetaValue::Array(values) => match values.first() {
            Some(first) if values.iter().all(|value| value == first) => plain(name, first)?,
            _ => return Err(format!("`{name}` is a list of {} values that differ, which is not read", values.len())),
        },
    })
}

/// Adds the keys of rotations.
fn rotation(
    metadata: &Metadata,
    form: &Form,
    file: &TensorFile,
    config: &mut Map<String, Value>,
) -> Result<(), String> {
    let own = |key: &str| format!("{}.{key}", form.architecture);
    let size = |config: &Map<String, Value>, key: &str| config.get(key).and_then(Value::as_u64);
    let (dim, heads) = (size(config, "hidden_size"), size(config, "num_attention_heads"));
    let of_heads = dim.zip(heads).map(|(dim, heads)| dim / heads.max(1));
    let Some(head_dim) = size(config, "head_dim").or(of_heads).filter(|head_dim| *head_dim > 0) else {
        return Err(format!("it has neither {} nor widths to compute it from", own("attention.key_length")));
    };
    if let Some(value) = metadata.integer(&own("attention.value_length")).filter(|value| *value != head_dim) {
        return Err(format!("its values are {value} wide and its keys {head_dim}; both must be equally wide"));
    }
    config.insert("head_dim".into(), json!(head_dim));
    if let Some(rotary) = metadata.integer(&own("rope.dimension_count")).filter(|rotary| *rotary != head_dim) {
        config.insert("partial_rotary_factor".into(), json!(rotary as f64 / head_dim as f64));
    }
    let factor = metadata.number(&own("rope.scaling.factor")).or(metadata.number(&own("rope.scale_linear")));
    let kind = metadata.text(&own("rope.scaling.type")).or(factor.map(|_| "linear")).filter(|kind| *kind != "none");
    let theta = config.get("rope_theta").and_then(Value::as_f64).unwrap_or(10_000.0);
    if let Some(tensor) = file.tensors().get(ROPE_FACTORS) {
        let factor = llama3_factor(file, tensor, theta, head_dim as usize)?;
        config.insert(
            "rope_scaling".into(),
            json!({
                "rope_type": "llama3", "factor": factor, "low_freq_factor": LOW, "high_freq_factor": HIGH,
                "original_max_position_embeddings": ORIGINAL as u64,
            }),
        );
    } else if let Some(kind) = kind {
        let mut rules = Map::new();
        rules.insert("rope_type".into(), json!(kind));
        rules.extend(factor.map(|factor| ("factor".to_owned(), json!(factor))));
        if kind == "yarn" {
            let original = metadata.integer(&own("rope.scaling.original_context_length"));
            rules.extend(original.map(|n| ("original_max_position_embeddings".to_owned(), json!(n))));
        }
        config.insert("rope_scaling".into(), Value::Object(rules));
    }
    Ok(())
}

/// The numbers of Llama 3.1's rule in all published models, but for its factor.
const LOW: f64 = 1.0;
const HIGH: f64 = 4.0;
const ORIGINAL: f64 = 8192.0;

/// The factor of Llama 3.1's rule that gives the stored factors of wavelengths.
fn llama3_factor(file: &TensorFile, tensor: &StoredTensor, theta: f64, head_dim: usize) -> Result<f64, String> {
    let unknown = || format!("its `{ROPE_FACTORS}` is not what Llama 3.1's rule gives, and no other is read");
    let count: usize = tensor.shape.iter().product();
    if tensor.dtype != "F32" || count != head_dim / 2 {
        return Err(unknown());
    }
    let mut bytes = vec![0; 4 * count];
    file.read(tensor, 0, &mut bytes).map_err(|error| error.to_string())?;
    let stored: Vec<f64> =
        bytes.chunks_exact(4).map(|b| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]]))).collect();
    let factor = stored.iter().copied().fold(1.0, f64::max);
    let rule = RopeScaling::Llama3 {
        factor,
        low_freq_factor: LOW,
        high_freq_factor: HIGH,
        original_context: ORIGINAL as usize,
    };
    let frequencies = |scaling| rope_frequencies(head_dim, theta, scaling).map(|(frequencies, _)| frequencies);
    let (plain, scaled) = match (frequencies(RopeScaling::None), frequencies(rule)) {
        (Ok(plain), Ok(scaled)) => (plain, scaled),
        (Err(error), _) | (_, Err(error)) => return Err(error.to_string()),
    };
    let expected = plain.iter().zip(&scaled).map(|(plain, scaled)| plain / scaled);
    let agree = expected.zip(&stored).all(|(expected, stored)| (expected - stored).abs() <= 1e-4 * expected);
    if agree { Ok(factor) } else { Err(unknown()) }
}

/// Opens a file's weights under their names in Hugging Face files.
pub(crate) fn open_weights(
    path: &Path,
    spec: &ModelSpec,
    notes: &mut Vec<String>,
) -> Result<(Vec<TensorFile>, Places), WeightsError> {
    let (metadata, file) = open(path)?;
    let damaged = |problem: String| WeightsError::Gguf { path: path.into(), problem };
    let form = form_of(&metadata).map_err(damaged)?;
    let mut places = Places::new();
    let mut quantised = 0;
    for (name, tensor) in file.tensors() {
        if name == ROPE_FACTORS {
            continue;
        }
        quantised += usize::from(tensor.encoding().is_some_and(|encoding| encoding.block().0 > 1));
        // A tensor without a name there is reported under its own.
        let theirs = translated(form, name).unwrap_or_else(|| name.clone());
        let change = change(form, spec, name, tensor.shape.len());
        places.insert(theirs, (0, StoredTensor { change, ..tensor.clone() }));
    }
    if quantised > 0 {
        notes.push(format!("{quantised} of {} tensors are quantised and were decoded to f32", file.tensors().len()));
    }
    Ok((vec![file], places))
}

/// The name of a tensor in Hugging Face files.
fn translated(form: &Form, name: &str) -> Option<String> {
    let (base, suffix) = name.rsplit_once('.')?;
    let (general, layer) = match base.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
        Some((layer, rest)) => (format!("blk.{{}}.{rest}"), layer),
        None => (base.to_owned(), ""),
    };
    let (_, theirs) = form.tensors.iter().find(|(ours, _)| *ours == general)?;
    Some(format!("{}.{suffix}", theirs.replace("{}", layer)))
}

/// The difference between a stored tensor of so many dimensions and that of a Hugging Face file.
fn change(form: &Form, spec: &ModelSpec, name: &str, dimensions: usize) -> Change {
    let of_layer = name.starts_with("blk.");
    match form.layout {
        Layout::Interleaved if name.contains(".attn_q.") || name.contains(".attn_k.") => {
            Change::Interleaved { head: spec.head_dim }
        }
        Layout::GainsOfNorms if name.ends_with("norm.weight") => Change::PlusOne,
        Layout::Upright if dimensions == 2 && of_layer => Change::Transposed,
        _ => Change::None,
    }
}
