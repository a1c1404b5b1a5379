//! Writing a Hugging Face folder.

use super::file::StoredDType;
use super::packed::{PackedFormat, PackedMatrix, is_packed};
use super::{INDEX, PREPROCESSOR, SINGLE, WeightsError};
use crate::hf::{config_json, generation_config_json, implied_zeros, preprocessor_config_json};
use crate::parameter::{ParameterSpec, Source};
use crate::{Model, ModelError};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use trainyard_autograd::ParamId;
use trainyard_tensor::DType;

/// Options of writing weights.
#[derive(Clone, Debug)]
pub struct ExportOptions {
    /// The dtype of the files: f32, bf16 or f16.
    pub dtype: DType,
    /// Maximum bytes of one file. A larger tensor gets a file of its own.
    pub max_shard_bytes: u64,
    /// The text of the `generation_config.json` that the model came with; None: one with its
    /// special tokens.
    pub generation: Option<String>,
}

impl Default for ExportOptions {
    /// bf16, files of up to 5 GB.
    fn default() -> ExportOptions {
        ExportOptions { dtype: DType::BF16, max_shard_bytes: 5_000_000_000, generation: None }
    }
}

/// The result of an export.
#[derive(Clone, Debug)]
pub struct Exported {
    /// The files, in the order in which they appeared.
    pub files: Vec<PathBuf>,
    /// Bytes of weights.
    pub bytes: u64,
}

/// The place of a tensor in the folder.
struct Place {
    file: usize,
    start: u64,
}

/// The files to write, and the position of every tensor.
struct Plan {
    dtype: StoredDType,
    names: Vec<String>,
    headers: Vec<Vec<u8>>,
    sizes: Vec<u64>,
    places: BTreeMap<String, Place>,
    elements: u64,
    bytes: u64,
}

/// A tensor that is to be written.
struct Planned {
    dtype: &'static str,
    shape: Vec<usize>,
    bytes: u64,
}

impl Planned {
    fn new(dtype: &'static str, element_bytes: usize, shape: Vec<usize>) -> Planned {
        let bytes = (shape.iter().product::<usize>() * element_bytes) as u64;
        Planned { dtype, shape, bytes }
    }
}

/// Writes `config.json`, `generation_config.json` (of a model of images,
/// `preprocessor_config.json`) and the weights of `model` into `folder`, which is created if
/// missing.
///
/// `values(unit, out)` fills the flat buffer of a unit (laid out for one shard). It is called once
/// for each unit, so that at most one unit is in memory. Files appear under their names when they
/// are complete, the weights before the files that refer to them.
pub fn export<E>(
    folder: &Path,
    model: &Model,
    options: ExportOptions,
    mut values: impl FnMut(usize, &mut [f32]) -> Result<(), E>,
) -> Result<Exported, ModelError>
where
    E: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    write_folder(folder, model, options, None, |unit, out| values(unit, out).map(|()| BTreeMap::new()))
}

/// As [`export`], with the matrices of blocks in few bits, as compressed-tensors packs them.
///
/// `values(unit, out)` gives the codes of the unit's matrices by their index ([`is_packed`]), and
/// fills `out` with the other parameters; what it fills in for the matrices is not read.
///
/// # Errors
/// As [`export`]; a family whose files hold transposed matrices, which the format does not know; a
/// matrix without codes, or with too few.
///
/// [`is_packed`]: super::is_packed
pub fn export_packed<E>(
    folder: &Path,
    model: &Model,
    options: ExportOptions,
    format: PackedFormat,
    values: impl FnMut(usize, &mut [f32]) -> Result<BTreeMap<usize, PackedMatrix>, E>,
) -> Result<Exported, ModelError>
where
    E: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    if model.spec().is_some_and(|spec| spec.image.is_some()) {
        let why = "models of images are not written in few bits: export them as f32, bf16 or f16";
        return Err(WeightsError::NotExportable(why.into()).into());
    }
    let transposed = |(_, spec): &(ParamId, &ParameterSpec)| spec.sources.iter().any(|source| source.transposed);
    if model.parameters().any(|parameter| transposed(&parameter)) {
        let why = "its files hold transposed matrices, and compressed-tensors packs those of linear layers only";
        return Err(WeightsError::NotExportable(why.into()).into());
    }
    write_folder(folder, model, options, Some(format), values)
}

fn write_folder<E>(
    folder: &Path,
    model: &Model,
    options: ExportOptions,
    format: Option<PackedFormat>,
    mut values: impl FnMut(usize, &mut [f32]) -> Result<BTreeMap<usize, PackedMatrix>, E>,
) -> Result<Exported, ModelError>
where
    E: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let spec = model.spec().ok_or_else(|| {
        WeightsError::NotExportable("it is built of units of one's own, for which there is no config.json".into())
    })?;
    let mut config = config_json(spec, options.dtype)?;
    if let Some(format) = format {
        let mut keys: Map<String, Value> = serde_json::from_str(&config).expect("it was written as an object");
        keys.insert("quantization_config".into(), format.config());
        config = format!("{:#}\n", Value::Object(keys));
    }
    let plan = Plan::new(model, implied_zeros(spec), &options, format)?;
    fs::create_dir_all(folder).map_err(WeightsError::io("creating", folder))?;
    let partials = Partials(plan.names.iter().map(|name| partial(&folder.join(name))).collect());
    let mut files = plan.create(folder)?;
    for (index, unit) in model.units().iter().enumerate() {
        let layout = model.layout(index, 1);
        let mut flat = vec![0.0; layout.elements()];
        let packed = values(index, &mut flat)
            .map_err(|error| WeightsError::Values { unit: unit.name().into(), source: error.into() })?;
        for (number, parameter) in unit.parameters().iter().enumerate() {
            let is_packed = is_packed(model, ParamId::new(index as u32, number as u32));
            for source in &parameter.sources {
                match format.filter(|_| is_packed) {
                    None => plan.write(&mut files, folder, parameter, source, &flat[layout.range(number)])?,
                    Some(format) => {
                        plan.write_packed(&mut files, folder, parameter, source, format, packed.get(&number))?;
                    }
                }
            }
        }
    }
    let mut written = Vec::new();
    for (file, name) in files.iter().zip(&plan.names) {
        let path = folder.join(name);
        file.sync_all().map_err(WeightsError::io("writing", &path))?;
        fs::rename(partial(&path), &path).map_err(WeightsError::io("renaming", &path))?;
        written.push(path);
    }
    drop(partials);
    if plan.names.len() > 1 {
        written.push(put(folder, INDEX, plan.index().as_bytes())?);
    }
    match preprocessor_config_json(spec) {
        Some(preprocessor) => written.push(put(folder, PREPROCESSOR, preprocessor.as_bytes())?),
        None => {
            let generation = options.generation.unwrap_or_else(|| generation_config_json(spec));
            written.push(put(folder, "generation_config.json", generation.as_bytes())?);
        }
    }
    written.push(put(folder, "config.json", config.as_bytes())?);
    // Files of an earlier export would shadow this one, or be taken for a part of it.
    for stale in stale(folder, &plan.names) {
        fs::remove_file(&stale).map_err(WeightsError::io("removing", &stale))?;
    }
    Ok(Exported { files: written, bytes: plan.bytes })
}

/// Weight files in `folder` that are not among `names`: a single file, or parts with their index.
fn stale(folder: &Path, names: &[String]) -> Vec<PathBuf> {
    let is_part = |name: &str| {
        let middle = name.strip_prefix("model-").and_then(|rest| rest.strip_suffix(".safetensors"));
        let numbers = middle.and_then(|middle| middle.split_once("-of-"));
        numbers
            .is_some_and(|(a, b)| [a, b].iter().all(|n| n.len() == 5 && n.bytes().all(|digit| digit.is_ascii_digit())))
    };
    let is_stale = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let of_weights = name == SINGLE || is_part(name) || name == INDEX && names.len() == 1;
        of_weights && !names.iter().any(|written| written == name)
    };
    // A folder that cannot be listed was written to a moment ago.
    fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).filter(is_stale).collect()
}

impl Plan {
    fn new(
        model: &Model,
        zeros: Vec<(String, Vec<usize>)>,
        options: &ExportOptions,
        format: Option<PackedFormat>,
    ) -> Result<Plan, WeightsError> {
        let dtype = match options.dtype {
            DType::F32 => StoredDType::F32,
            DType::BF16 => StoredDType::BF16,
            DType::F16 => StoredDType::F16,
            other => return Err(WeightsError::NotExportable(format!("weights as {other}; choose f32, bf16 or f16"))),
        };
        let floats = |shape: Vec<usize>| Planned::new(dtype.name(), dtype.size(), shape);
        let mut elements = zeros.iter().map(|(_, shape)| shape.iter().product::<usize>() as u64).sum();
        // By name, as transformers orders files.
        let mut tensors: BTreeMap<String, Planned> =
            zeros.into_iter().map(|(name, shape)| (name, floats(shape))).collect();
        for (id, parameter) in model.parameters() {
            if parameter.sources.is_empty() {
                let name = model.parameter_name(id).unwrap_or_default();
                return Err(WeightsError::NotExportable(format!("parameter {name} has no name in files")));
            }
            for source in &parameter.sources {
                let (name, shape) = (source.hf_name.clone(), source.shape(&parameter.shape));
                elements += shape.iter().product::<usize>() as u64;
                match format.filter(|_| is_packed(model, id)) {
                    None => {
                        tensors.insert(name, floats(shape));
                    }
                    Some(format) => {
                        let (rows, columns) = (shape[0], shape[1]);
                        tensors.insert(format!("{name}_scale"), floats(vec![rows, format.groups(columns)]));
                        if format.codes_inputs {
                            tensors.insert(name, Planned::new("I8", 1, vec![rows, columns]));
                        } else {
                            let words = vec![rows, format.row_bytes(columns) / 4];
                            tensors.insert(format!("{name}_packed"), Planned::new("I32", 4, words));
                            tensors.insert(format!("{name}_shape"), Planned::new("I64", 8, vec![2]));
                        }
                    }
                }
            }
        }
        let mut shards: Vec<Vec<(String, Planned)>> = vec![Vec::new()];
        let (mut shard_bytes, mut bytes) = (0, 0);
        for (name, tensor) in tensors {
            if shard_bytes > 0 && shard_bytes + tensor.bytes > options.max_shard_bytes {
                shards.push(Vec::new());
                shard_bytes = 0;
            }
            shard_bytes += tensor.bytes;
            bytes += tensor.bytes;
            shards.last_mut().expect("there is always one").push((name, tensor));
        }
        let mut plan = Plan {
            dtype,
            names: Vec::new(),
            headers: Vec::new(),
            sizes: Vec::new(),
            places: BTreeMap::new(),
            elements,
            bytes,
        };
        for (file, shard) in shards.iter().enumerate() {
            plan.names.push(match shards.len() {
                1 => SINGLE.into(),
                count => format!("model-{:05}-of-{count:05}.safetensors", file + 1),
            });
            plan.add_shard(file, shard);
        }
        Ok(plan)
    }

    fn add_shard(&mut self, file: usize, shard: &[(String, Planned)]) {
        let mut header = Map::new();
        header.insert("__metadata__".into(), json!({"format": "pt"}));
        let mut end = 0;
        for (name, Planned { dtype, shape, bytes }) in shard {
            let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [end, end + bytes]});
            header.insert(name.clone(), entry);
            self.places.insert(name.clone(), Place { file, start: end });
            end += bytes;
        }
        let mut text = Value::Object(header).to_string().into_bytes();
        // Spaces align the data for readers that map the file.
        text.resize(text.len().next_multiple_of(8), b' ');
        let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
        bytes.extend(text);
        for place in self.places.values_mut().filter(|place| place.file == file) {
            place.start += bytes.len() as u64;
        }
        self.sizes.push(bytes.len() as u64 + end);
        self.headers.push(bytes);
    }

    /// Creates the files under temporary names in full length. Parts that are not written stay
    /// zero.
    fn create(&self, folder: &Path) -> Result<Vec<File>, WeightsError> {
        let create = |((name, header), size): ((&String, &Vec<u8>), &u64)| {
            let path = partial(&folder.join(name));
            let make = || -> std::io::Result<File> {
                let mut file = File::create(&path)?;
                file.set_len(*size)?;
                file.write_all(header)?;
                Ok(file)
            };
            make().map_err(WeightsError::io("creating", &path))
        };
        self.names.iter().zip(&self.headers).zip(&self.sizes).map(create).collect()
    }

    fn write(
        &self,
        files: &mut [File],
        folder: &Path,
        parameter: &ParameterSpec,
        source: &Source,
        values: &[f32],
    ) -> Result<(), WeightsError> {
        let width = parameter.row_elements();
        let values = &values[source.rows.start * width..source.rows.end * width];
        let transposed: Vec<f32>;
        let values = if source.transposed {
            transposed = (0..width).flat_map(|column| values[column..].iter().step_by(width).copied()).collect();
            &transposed
        } else {
            values
        };
        self.put_floats(files, folder, &source.hf_name, values)
    }

    /// Writes the two or three tensors of a matrix of few bits.
    fn write_packed(
        &self,
        files: &mut [File],
        folder: &Path,
        parameter: &ParameterSpec,
        source: &Source,
        format: PackedFormat,
        packed: Option<&PackedMatrix>,
    ) -> Result<(), WeightsError> {
        let (name, columns) = (&source.hf_name, parameter.row_elements());
        let groups = format.groups(columns);
        let whole = |packed: &&PackedMatrix| {
            packed.codes.len() == parameter.elements() && packed.scales.len() == parameter.shape[0] * groups
        };
        let Some(packed) = packed.filter(whole) else {
            return Err(WeightsError::NotExportable(format!("`{name}` has no codes, or too few of them")));
        };
        let rows = &source.rows;
        let codes = &packed.codes[rows.start * columns..rows.end * columns];
        let scales = &packed.scales[rows.start * groups..rows.end * groups];
        self.put_floats(files, folder, &format!("{name}_scale"), scales)?;
        let codes = format.pack_rows(codes, columns);
        if format.codes_inputs {
            return self.put(files, folder, name, &[&codes]);
        }
        self.put(files, folder, &format!("{name}_packed"), &[&codes])?;
        let shape = [rows.len(), columns].map(|side| (side as i64).to_le_bytes());
        self.put(files, folder, &format!("{name}_shape"), &[&shape[0], &shape[1]])
    }

    fn put_floats(&self, files: &mut [File], folder: &Path, name: &str, values: &[f32]) -> Result<(), WeightsError> {
        let mut file = self.at(files, folder, name)?;
        let mut bytes = Vec::new();
        for part in values.chunks(1 << 20) {
            self.dtype.encode(part, &mut bytes);
            file.put(&bytes)?;
        }
        Ok(())
    }

    fn put(&self, files: &mut [File], folder: &Path, name: &str, parts: &[&[u8]]) -> Result<(), WeightsError> {
        let mut file = self.at(files, folder, name)?;
        parts.iter().try_for_each(|part| file.put(part))
    }

    /// The place of a tensor, for writing.
    fn at<'f>(&self, files: &'f mut [File], folder: &Path, name: &str) -> Result<AtTensor<'f>, WeightsError> {
        let place = &self.places[name];
        let path = folder.join(&self.names[place.file]);
        let file = &mut files[place.file];
        file.seek(SeekFrom::Start(place.start)).map_err(WeightsError::io("writing", &path))?;
        Ok(AtTensor { file, path })
    }

    fn index(&self) -> String {
        let map = self.places.iter().map(|(name, place)| (name.clone(), json!(self.names[place.file])));
        let index = json!({
            "metadata": {"total_parameters": self.elements, "total_size": self.bytes},
            "weight_map": Value::Object(map.collect()),
        });
        format!("{index:#}\n")
    }
}

/// A file at the place of a tensor.
struct AtTensor<'f> {
    file: &'f mut File,
    path: PathBuf,
}

impl AtTensor<'_> {
    fn put(&mut self, bytes: &[u8]) -> Result<(), WeightsError> {
        self.file.write_all(bytes).map_err(WeightsError::io("writing", &self.path))
    }
}

/// The name of a file until it is complete.
pub(crate) fn partial(path: &Path) -> PathBuf {
    path.with_extension("partial")
}

/// Files under temporary names. Those that are left are removed on drop.
pub(crate) struct Partials(pub Vec<PathBuf>);

impl Drop for Partials {
    fn drop(&mut self) {
        for path in &self.0 {
            // The file already has its final name, or was never created. After a failure, the first
            // error is the one worth reporting.
            let _ = fs::remove_file(path);
        }
    }
}

/// Writes a small file whole or not at all.
pub(super) fn put(folder: &Path, name: &str, bytes: &[u8]) -> Result<PathBuf, WeightsError> {
    let path = folder.join(name);
    let _partials = Partials(vec![partial(&path)]);
    let write = || -> std::io::Result<()> {
        let mut file = File::create(partial(&path))?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(partial(&path), &path)
    };
    write().map_err(WeightsError::io("writing", &path))?;
    Ok(path)
}
