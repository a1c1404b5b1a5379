//! Adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

use super::file::TensorFile;
use super::write::put;
use super::{WeightReader, WeightsError};
use crate::tuning::{AdapterSpec, Tuning};
use crate::{Model, ModelError, ModelSpec};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use trainyard_autograd::ParamId;

/// The name of the configuration.
pub const ADAPTER_CONFIG: &str = "adapter_config.json";
/// The name of the weights.
pub const ADAPTER_WEIGHTS: &str = "adapter_model.safetensors";

/// Reads the configuration of the adapter in `folder`.
///
/// # Errors
/// A file that cannot be read; kinds of adapters that are not LoRA on linear layers.
pub fn read_adapter_config(folder: &Path) -> Result<AdapterSpec, WeightsError> {
    let (path, config) = read_config(folder)?;
    let fail = |problem: String| WeightsError::Index { path: path.clone(), problem };
    if config["peft_type"] != "LORA" {
        return Err(fail(format!("peft_type is {}, and only \"LORA\" can be read", config["peft_type"])));
    }
    let is_empty = |value: &Value| match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        Value::String(text) => text == "none",
        _ => false,
    };
    let unread = [
        "bias",
        "lora_bias",
        "rank_pattern",
        "alpha_pattern",
        "modules_to_save",
        "layers_to_transform",
        "exclude_modules",
        "layer_replication",
        "target_parameters",
        "trainable_token_indices",
        "alora_invocation_tokens",
        "arrow_config",
        "kasa_config",
        "monteclora_config",
        "use_bdlora",
        "use_qalora",
        "velora_config",
    ];
    if let Some(key) = unread.into_iter().find(|key| !is_empty(&config[*key])) {
        return Err(fail(format!("{key} = {} cannot be read: it is no plain LoRA", config[key])));
    }
    let number = |key: &str| config[key].as_f64().filter(|number| *number > 0.0);
    let (Some(rank), Some(alpha)) = (number("r"), number("lora_alpha")) else {
        return Err(fail("it has no positive r and lora_alpha".to_owned()));
    };
    let targets = match &config["target_modules"] {
        Value::String(all) if all == "all-linear" => Vec::new(),
        Value::Array(list) if list.iter().all(Value::is_string) => {
            list.iter().filter_map(Value::as_str).map(str::to_owned).collect()
        }
        other => return Err(fail(format!("target_modules = {other} is no list of names"))),
    };
    Ok(AdapterSpec {
        rank: rank as usize,
        alpha,
        rank_stabilised: config["use_rslora"] == true,
        magnitudes: config["use_dora"] == true,
        targets,
    })
}

/// The model that the adapter in `folder` was made for, as its configuration names it: a path, or a
/// name on a hub.
///
/// # Errors
/// A file that cannot be read, or that names no model.
pub fn read_adapter_base(folder: &Path) -> Result<String, WeightsError> {
    let (path, config) = read_config(folder)?;
    let problem = "it has no base_model_name_or_path".to_owned();
    config["base_model_name_or_path"].as_str().map(str::to_owned).ok_or(WeightsError::Index { path, problem })
}

fn read_config(folder: &Path) -> Result<(PathBuf, Value), WeightsError> {
    let path = folder.join(ADAPTER_CONFIG);
    let text = fs::read_to_string(&path).map_err(WeightsError::io("reading", &path))?;
    match serde_json::from_str(&text) {
        Ok(config) => Ok((path, config)),
        Err(error) => Err(WeightsError::Index { path, problem: format!("it is no JSON: {error}") }),
    }
}

/// The names of the linear layers that have adapters, sorted.
fn targets(model: &Model) -> Vec<String> {
    let mut names: Vec<String> = adapter_sources(model)
        .map(|(_, name)| {
            let layer = name.split(".lora_").next().unwrap_or_default();
            layer.rsplit('.').next().unwrap_or_default().to_owned()
        })
        .collect();
    names.sort();
    names.dedup();
    names
}

/// The tensors of all adapters: the parameter that each is a part of, and its name.
fn adapter_sources(model: &Model) -> impl Iterator<Item = (ParamId, &String)> {
    let adapters = model.parameters().filter(|(_, spec)| spec.is_adapter());
    adapters.flat_map(|(id, spec)| spec.sources.iter().map(move |source| (id, &source.hf_name)))
}

impl WeightReader {
    /// Opens the adapter in `folder` and checks that it is the model's: the same layers, rank and
    /// scale. Reads headers only.
    ///
    /// # Errors
    /// Files that cannot be read or do not fit the model.
    pub fn open_adapter(folder: &Path, model: &Model) -> Result<WeightReader, WeightsError> {
        let stored = read_adapter_config(folder)?;
        let path = folder.join(ADAPTER_WEIGHTS);
        let file = TensorFile::open(&path)?;
        let places: BTreeMap<_, _> =
            file.tensors().iter().map(|(name, tensor)| (name.clone(), (0, tensor.clone()))).collect();
        let mut problems = Vec::new();
        if let Some(own) = &model.tuning().adapter {
            let scales = [&stored, own].map(AdapterSpec::scale);
            if stored.magnitudes != own.magnitudes {
                let kind = |magnitudes| if magnitudes { "dora" } else { "lora" };
                problems.push(format!(
                    "it is an adapter of kind \"{}\", and fine_tuning.adapter is \"{}\"",
                    kind(stored.magnitudes),
                    kind(own.magnitudes)
                ));
            } else if stored.rank != own.rank {
                problems.push(format!("it has rank {}, and {} is asked for", stored.rank, own.rank));
            } else if (scales[0] - scales[1]).abs() > 1e-9 * scales[0].abs() {
                problems.push(format!(
                    "it is multiplied by {}, and alpha and rank_stabilised ask for {}",
                    scales[0], scales[1]
                ));
            }
        }
        for (id, spec) in model.parameters().filter(|(_, spec)| spec.is_adapter()) {
            for source in &spec.sources {
                let shape = source.shape(spec.whole_shape());
                match places.get(&source.hf_name) {
                    None => problems.push(format!("`{}` is missing, which {id} needs", source.hf_name)),
                    Some((_, stored)) if stored.shape != shape => {
                        problems.push(format!("`{}` is {:?} and should be {shape:?}", source.hf_name, stored.shape));
                    }
                    Some((_, stored)) if stored.encoding().is_none() => {
                        problems.push(format!("`{}` has dtype {}", source.hf_name, stored.dtype));
                    }
                    Some(_) => {}
                }
            }
        }
        let wanted: Vec<&String> = adapter_sources(model).map(|(_, name)| name).collect();
        for name in places.keys().filter(|name| !wanted.contains(name)) {
            problems.push(format!("`{name}` adapts a layer that is no target here"));
        }
        if !problems.is_empty() {
            return Err(WeightsError::Mismatch { path: folder.into(), problems });
        }
        Ok(WeightReader::of_files(vec![file], places, model))
    }
}

/// The tensors of an adapter by their names in files: elements of a row, and values row by row.
pub type AdapterTensors = BTreeMap<String, (usize, Vec<f32>)>;

/// Reads the adapter `spec` in `folder` of the model that `base` describes.
///
/// # Errors
/// Files that cannot be read or do not fit the model.
pub fn read_adapter(folder: &Path, base: &ModelSpec, spec: &AdapterSpec) -> Result<AdapterTensors, ModelError> {
    let tuning = Tuning { adapter: Some(spec.clone()), ..Tuning::default() };
    let model = Model::new(base.clone())?.tuned(&tuning)?;
    let reader = WeightReader::open_adapter(folder, &model)?;
    let mut tensors = AdapterTensors::new();
    for (_, parameter) in model.parameters().filter(|(_, parameter)| parameter.is_adapter()) {
        let mut values = vec![0.0; parameter.elements()];
        reader.read_part(parameter, 0..values.len(), &mut values)?;
        let width = parameter.row_elements();
        for source in &parameter.sources {
            let own = values[source.rows.start * width..source.rows.end * width].to_vec();
            tensors.insert(source.hf_name.clone(), (width, own));
        }
    }
    Ok(tensors)
}

/// Writes the adapters of `model` into `folder`, which is created if missing, in f32. `base` names
/// the model that they belong to. `values` gives the values of a parameter. Returns the files.
///
/// # Errors
/// A model without adapters, or with other trained parameters; failures of writing.
pub fn export_adapter<E>(
    folder: &Path,
    model: &Model,
    base: &str,
    mut values: impl FnMut(ParamId) -> Result<Vec<f32>, E>,
) -> Result<Vec<PathBuf>, ModelError>
where
    E: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let not = |why: String| Err(WeightsError::NotExportable(why).into());
    let Some(spec) = &model.tuning().adapter else {
        return not("it has no adapters".to_owned());
    };
    if let Some((id, _)) = model.parameters().find(|(_, spec)| spec.trained && !spec.is_adapter()) {
        let name = model.parameter_name(id).unwrap_or_default();
        return not(format!(
            "beside adapters `{name}` was trained, which an adapter has no place for: export it merged"
        ));
    }
    let mut tensors: BTreeMap<&str, (Vec<usize>, Vec<f32>)> = BTreeMap::new();
    for (id, parameter) in model.parameters().filter(|(_, spec)| spec.is_adapter()) {
        let all =
            values(id).map_err(|error| WeightsError::Values { unit: parameter.name.clone(), source: error.into() })?;
        for source in &parameter.sources {
            let width = parameter.row_elements();
            let own = all[source.rows.start * width..source.rows.end * width].to_vec();
            tensors.insert(&source.hf_name, (source.shape(parameter.whole_shape()).to_vec(), own));
        }
    }
    let mut header = serde_json::Map::new();
    header.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut end = 0;
    for (name, (shape, values)) in &tensors {
        let bytes = 4 * values.len();
        header.insert((*name).into(), json!({"dtype": "F32", "shape": shape, "data_offsets": [end, end + bytes]}));
        end += bytes;
    }
    let mut text = Value::Object(header).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend(text);
    tensors.values().for_each(|(_, values)| bytes.extend(values.iter().flat_map(|value| value.to_le_bytes())));

    let alpha = if spec.alpha.fract() == 0.0 { json!(spec.alpha as i64) } else { json!(spec.alpha) };
    let config = json!({
        "alpha_pattern": {},
        "auto_mapping": null,
        "base_model_name_or_path": base,
        "bias": "none",
        // True where files hold matrices as [in, out].
        "fan_in_fan_out": model.spec().is_some_and(|spec| spec.family.parameters().iter().any(|row| row.transposed)),
        "inference_mode": true,
        "init_lora_weights": true,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "modules_to_save": null,
        "peft_type": "LORA",
        "r": spec.rank,
        "rank_pattern": {},
        "target_modules": targets(model),
        "task_type": "CAUSAL_LM",
        "use_dora": spec.magnitudes,
        "use_rslora": spec.rank_stabilised,
    });
    fs::create_dir_all(folder).map_err(WeightsError::io("creating", folder))?;
    let weights = put(folder, ADAPTER_WEIGHTS, &bytes)?;
    Ok(vec![weights, put(folder, ADAPTER_CONFIG, format!("{config:#}\n").as_bytes())?])
}
