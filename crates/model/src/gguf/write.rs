//! Writing a model as one GGUF file.
//!
//! The families' tables of keys and names ([`Form`]) are read backwards: the `config.json` that the
//! model would be exported with gives the metadata, and the tensors of Hugging Face files their
//! names. Before the first weight is written the file's own metadata are read again, and must give
//! the model; so what the format cannot say is refused and not lost.

use super::header::{MetaValue, Metadata, Writer};
use super::{Form, ROPE_FACTORS, THETA, change, config_json, forms, tokenizer};
use crate::parameter::{ParameterSpec, Source};
use crate::spec::{ModelSpec, RopeScaling};
use crate::weights::{Change, Encoding, Exported, Partials, StoredDType, WeightsError, partial};
use crate::{Model, ModelError, hf};
use serde_json::{Map, Value};
use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;
use trainyard_tensor::DType;
use trainyard_tensor::cpu::rope::{RopeScaling as Rule, rope_frequencies};

/// Options of writing a file.
#[derive(Clone, Debug)]
pub struct GgufOptions<'a> {
    /// The encoding of matrices. Vectors and learned positions are f32.
    pub encoding: Encoding,
    /// `general.name`.
    pub name: &'a str,
    /// The text of a `tokenizer.json`; None writes no tokenizer.
    pub tokenizer: Option<&'a str>,
}

/// Numbers of `general.file_type`.
fn file_type(encoding: Encoding) -> u32 {
    use super::Quantisation::*;
    match encoding {
        Encoding::Float(StoredDType::F32) => 0,
        Encoding::Float(StoredDType::F16) => 1,
        Encoding::Float(StoredDType::BF16) => 32,
        Encoding::Blocks(kind) => match kind {
            Q4_0 => 2,
            Q4_1 => 3,
            Q8_0 => 7,
            Q5_0 => 8,
            Q5_1 => 9,
            Q4K => 15,
            Q5K => 17,
            Q6K => 18,
        },
    }
}

/// A tensor that is to be written.
struct Planned<'m> {
    name: String,
    encoding: Encoding,
    parameter: &'m ParameterSpec,
    source: &'m Source,
    change: Change,
    shape: Vec<usize>,
}

/// Writes `model` to the file `path`, which replaces one that is there once it is complete.
///
/// `values(unit, out)` fills the flat buffer of a unit (laid out for one shard); at most one unit
/// is in memory. Rows of matrices that do not divide into blocks are written as f16, and said in
/// the second part of the result.
///
/// # Errors
/// A family, a shape or a tokenizer that the format cannot say; an encoding that is read only;
/// refusals of the operating system.
pub fn export_gguf<E>(
    path: &Path,
    model: &Model,
    options: &GgufOptions<'_>,
    mut values: impl FnMut(usize, &mut [f32]) -> Result<(), E>,
) -> Result<(Exported, Option<String>), ModelError>
where
    E: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let refuse = |why: String| ModelError::from(WeightsError::NotExportable(why));
    let spec =
        model.spec().ok_or_else(|| refuse("it is built of units of one's own, which GGUF has no form for".into()))?;
    if let Encoding::Blocks(kind) = options.encoding
        && !kind.is_encoded()
    {
        return Err(refuse(format!("{} is read and not written", kind.name())));
    }
    let config: Map<String, Value> =
        serde_json::from_str(&hf::config_json(spec, DType::F32)?).expect("it was written as an object");
    let model_type = config.get("model_type").and_then(Value::as_str).unwrap_or_default();
    let form = forms().find(|form| form.model_type == model_type).ok_or_else(|| {
        let known: Vec<&str> = forms().map(|form| form.model_type).collect();
        refuse(format!("GGUF files of `{model_type}` are not written; written are {}", known.join(", ")))
    })?;
    let factors = rope_factors(spec).map_err(refuse)?;
    let mut metadata = described(form, spec, &config, options);
    match options.tokenizer {
        Some(text) => tokenizer::write(text, spec, &mut metadata).map_err(refuse)?,
        None => metadata.set("tokenizer.ggml.model", MetaValue::Text("no_vocab".into())),
    }
    let (tensors, odd) = planned(form, model, spec, options.encoding)?;
    let mut writer = Writer::default();
    if let Some(factors) = &factors {
        writer.tensor(ROPE_FACTORS, Encoding::Float(StoredDType::F32), &[factors.len()]);
    }
    tensors.iter().for_each(|tensor| writer.tensor(&tensor.name, tensor.encoding, &tensor.shape));
    let (header, places, size) = writer.finish(&metadata);

    let half = partial(path);
    let partials = Partials(vec![half.clone()]);
    let failed = |source| WeightsError::io("writing", &half)(source);
    let mut file = File::create(&half).map_err(WeightsError::io("creating", &half))?;
    let mut put = |at: u64, bytes: &[u8]| -> Result<(), WeightsError> {
        file.seek(SeekFrom::Start(at)).and_then(|_| file.write_all(bytes)).map_err(failed)
    };
    put(0, &header)?;
    if let Some(factors) = &factors {
        let mut bytes = Vec::new();
        StoredDType::F32.encode(factors, &mut bytes);
        put(places[0], &bytes)?;
    }
    let places = &places[usize::from(factors.is_some())..];
    file_of(&half, size)?;
    compare(&half, spec).map_err(refuse)?;

    let mut written = 0;
    let mut next = tensors.iter().zip(places).peekable();
    for (index, unit) in model.units().iter().enumerate() {
        let layout = model.layout(index, 1);
        let mut flat = vec![0.0; layout.elements()];
        values(index, &mut flat)
            .map_err(|error| WeightsError::Values { unit: unit.name().into(), source: error.into() })?;
        for (number, parameter) in unit.parameters().iter().enumerate() {
            for _ in &parameter.sources {
                let Some((tensor, at)) = next.next() else { break };
                let bytes = tensor.bytes(&flat[layout.range(number)]);
                put(*at, &bytes)?;
                written += bytes.len() as u64;
            }
        }
    }
    file.sync_all().map_err(failed)?;
    fs::rename(&half, path).map_err(WeightsError::io("renaming", path))?;
    drop(partials);
    let note = (odd > 0).then(|| format!("{odd} matrices have rows that do not divide into blocks: they are f16"));
    Ok((Exported { files: vec![path.to_owned()], bytes: written }, note))
}

/// Gives a file its whole length.
fn file_of(path: &Path, size: u64) -> Result<(), WeightsError> {
    let file = File::options().write(true).open(path);
    file.and_then(|file| file.set_len(size)).map_err(WeightsError::io("writing", path))
}

/// The metadata of a model, without its tokenizer.
fn described(form: &Form, spec: &ModelSpec, config: &Map<String, Value>, options: &GgufOptions<'_>) -> Metadata {
    let mut metadata = Metadata::default();
    let mut set = |key: &str, value: MetaValue| metadata.set(key, value);
    let whole = |n: usize| MetaValue::Integer(n as i128);
    set("general.architecture", MetaValue::Text(form.architecture.into()));
    set("general.type", MetaValue::Text("model".into()));
    set("general.name", MetaValue::Text(options.name.into()));
    set("general.file_type", MetaValue::Integer(file_type(options.encoding).into()));
    if let Encoding::Blocks(_) = options.encoding {
        set("general.quantization_version", MetaValue::Integer(2));
    }
    let own = |key: &str| format!("{}.{key}", form.architecture);
    for (key, theirs) in form.keys {
        let value = match *key {
            // Keys that config.json may leave out, or has in a table of its own.
            "feed_forward_length" => Some(whole(spec.ffn_dim)),
            "attention.head_count_kv" => Some(whole(spec.kv_heads)),
            "attention.key_length" => Some(whole(spec.head_dim)),
            "attention.sliding_window" => spec.sliding_window.map(whole),
            THETA => spec.rope.as_ref().map(|rope| MetaValue::Float(rope.theta)),
            "rope.freq_base_swa" => spec.local_rope.as_ref().map(|rope| MetaValue::Float(rope.theta)),
            _ => config.get(*theirs).and_then(plain),
        };
        if let Some(value) = value {
            set(&own(key), value);
        }
    }
    set(&own("vocab_size"), whole(spec.vocab_size));
    if let Some(rope) = &spec.rope {
        set(&own("attention.value_length"), whole(spec.head_dim));
        let rotated = (spec.head_dim as f64 * rope.partial_factor).round() as usize;
        set(&own("rope.dimension_count"), whole(rotated));
        match &rope.scaling {
            // The first is the absence of a rule; the second is in a tensor of factors.
            None | Some(RopeScaling::Llama3 { .. }) => {}
            Some(RopeScaling::Linear { factor }) => {
                set(&own("rope.scaling.type"), MetaValue::Text("linear".into()));
                set(&own("rope.scaling.factor"), MetaValue::Float(*factor));
            }
            Some(RopeScaling::Yarn { factor, original_max_positions, .. }) => {
                set(&own("rope.scaling.type"), MetaValue::Text("yarn".into()));
                set(&own("rope.scaling.factor"), MetaValue::Float(*factor));
                set(&own("rope.scaling.original_context_length"), whole(*original_max_positions));
            }
        }
    }
    for (token, id) in [("bos", spec.bos_token), ("eos", spec.eos_tokens.first().copied()), ("padding", spec.pad_token)]
    {
        if let Some(id) = id {
            set(&format!("tokenizer.ggml.{token}_token_id"), MetaValue::Integer(id.into()));
        }
    }
    metadata
}

/// A value of `config.json` as one of the metadata; None for lists and tables, which the reader's
/// tables do not name.
fn plain(value: &Value) -> Option<MetaValue> {
    match value {
        Value::Bool(flag) => Some(MetaValue::Bool(*flag)),
        Value::String(text) => Some(MetaValue::Text(text.clone())),
        Value::Number(number) => {
            number.as_i64().map(|n| MetaValue::Integer(n.into())).or_else(|| number.as_f64().map(MetaValue::Float))
        }
        _ => None,
    }
}

/// The factors by which Llama 3.1's rule stretches wavelengths; None for other rules.
fn rope_factors(spec: &ModelSpec) -> Result<Option<Vec<f32>>, String> {
    let Some(rope) = &spec.rope else { return Ok(None) };
    let Some(RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_positions }) = rope.scaling
    else {
        return Ok(None);
    };
    let rule = Rule::Llama3 { factor, low_freq_factor, high_freq_factor, original_context: original_max_positions };
    let frequencies = |rule| rope_frequencies(spec.head_dim, rope.theta, rule).map_err(|error| error.to_string());
    let (plain, scaled) = (frequencies(Rule::None)?.0, frequencies(rule)?.0);
    Ok(Some(plain.iter().zip(&scaled).map(|(plain, scaled)| (plain / scaled) as f32).collect()))
}

/// The tensors in the order of the model's parameters, and how many matrices the encoding does not
/// fit.
fn planned<'m>(
    form: &Form,
    model: &'m Model,
    spec: &ModelSpec,
    encoding: Encoding,
) -> Result<(Vec<Planned<'m>>, usize), WeightsError> {
    let (mut tensors, mut odd) = (Vec::new(), 0);
    for (_, parameter) in model.parameters() {
        for source in &parameter.sources {
            let name = name_in_gguf(form, &source.hf_name).ok_or_else(|| {
                WeightsError::NotExportable(format!(
                    "GGUF files of {} have no tensor for `{}`",
                    form.architecture, source.hf_name
                ))
            })?;
            let of_file = source.shape(&parameter.shape);
            let change = change(form, spec, &name, of_file.len());
            let shape = match change {
                Change::Transposed => of_file.iter().rev().copied().collect(),
                _ => of_file,
            };
            let is_matrix = shape.len() == 2 && !name.starts_with("position_embd");
            let fits = shape.last().is_some_and(|row| row.is_multiple_of(encoding.block().0));
            let encoding = match (is_matrix, fits) {
                (false, _) => Encoding::Float(StoredDType::F32),
                (true, true) => encoding,
                (true, false) => {
                    odd += 1;
                    Encoding::Float(StoredDType::F16)
                }
            };
            tensors.push(Planned { name, encoding, parameter, source, change, shape });
        }
    }
    Ok((tensors, odd))
}

/// The name of a tensor of Hugging Face files; the inverse of [`super::translated`].
fn name_in_gguf(form: &Form, theirs: &str) -> Option<String> {
    let (base, suffix) = theirs.rsplit_once('.')?;
    form.tensors.iter().find_map(|(ours, theirs)| {
        let layer = match theirs.split_once("{}") {
            None => (base == *theirs).then_some("")?,
            Some((before, after)) => {
                let layer = base.strip_prefix(before)?.strip_suffix(after)?;
                layer.bytes().all(|digit| digit.is_ascii_digit()).then_some(layer)?
            }
        };
        Some(format!("{}.{suffix}", ours.replace("{}", layer)))
    })
}

impl Planned<'_> {
    /// The bytes of the tensor, of the values of its parameter.
    fn bytes(&self, values: &[f32]) -> Vec<u8> {
        let width = self.parameter.row_elements();
        let own = &values[self.source.rows.start * width..self.source.rows.end * width];
        let changed: Vec<f32>;
        // A source that files hold transposed lies upright in the model.
        let own = match (self.source.transposed, self.change) {
            (true, Change::Transposed) | (false, Change::None) => own,
            (true, _) => {
                changed = (0..width).flat_map(|column| own[column..].iter().step_by(width).copied()).collect();
                &changed
            }
            (false, Change::Transposed) => {
                let rows = own.len() / width;
                changed = (0..width).flat_map(|column| (0..rows).map(move |row| own[row * width + column])).collect();
                &changed
            }
            (false, Change::PlusOne) => {
                changed = own.iter().map(|value| value + 1.0).collect();
                &changed
            }
            (false, Change::Interleaved { head }) => {
                let row_of = |stored: usize| {
                    let (start, inside) = (stored / head * head, stored % head);
                    start + inside % 2 * (head / 2) + inside / 2
                };
                let rows = 0..own.len() / width;
                changed = rows.flat_map(|row| &own[row_of(row) * width..][..width]).copied().collect();
                &changed
            }
        };
        let mut bytes = Vec::new();
        match self.encoding {
            Encoding::Float(dtype) => dtype.encode(own, &mut bytes),
            Encoding::Blocks(kind) => kind.encode(own, &mut bytes),
        }
        bytes
    }
}

/// Checks that what was written of the metadata gives the model again.
fn compare(path: &Path, spec: &ModelSpec) -> Result<(), String> {
    let text = config_json(path).map_err(|error| error.to_string())?;
    let read = hf::from_config_json(&text).map_err(|error| error.to_string())?.spec;
    // Nothing of these is in the format.
    let of_file = |spec: &ModelSpec| {
        let mut kept = spec.clone();
        (kept.dropout, kept.init_std, kept.mup_base_dim) = (0.0, 0.0, None);
        kept.eos_tokens.truncate(1);
        kept.model_type = None;
        kept.norm_eps = f64::from(kept.norm_eps as f32);
        for rope in [&mut kept.rope, &mut kept.local_rope].into_iter().flatten() {
            rope.theta = f64::from(rope.theta as f32);
        }
        kept
    };
    let fields = |spec: &ModelSpec| serde_json::to_value(of_file(spec)).unwrap_or_default();
    let (wanted, found) = (fields(spec), fields(&read));
    if wanted == found {
        return Ok(());
    }
    let keys = wanted.as_object().into_iter().chain(found.as_object()).flat_map(Map::keys);
    let lost = keys.into_iter().find(|key| wanted.get(*key) != found.get(*key));
    let lost = lost.map_or("its shape", String::as_str);
    Err(format!(
        "a GGUF file of this architecture would lose {lost}: it would say {} where the model has {}",
        found.get(lost).unwrap_or(&Value::Null),
        wanted.get(lost).unwrap_or(&Value::Null)
    ))
}
