//! Opens trained models for evaluation, generation and export: a run at one of its checkpoints, or
//! a Hugging Face folder.
//!
//! A run's configuration is not resolved here. Its data, its GPUs or its pretrained model may be
//! missing on this machine, and a trained model needs none of them. `model.json` describes the
//! model. Three keys of `config.toml` are used: the sequence length, the precision, and the
//! pretrained model's path.

use crate::checkpoint::{self, Choice, Found};
use crate::config::{Config, DeviceKind, Inputs, PAIRED_LENGTH, hub_model, usual_sequence_length};
use crate::pretrained;
use crate::rank::Rank;
use crate::session::files;
use crate::shape::{base_codec, dtype_of, tuning};
use crate::snapshot;
use crate::state::{does_not_fit, initial_values};
use crate::warning::warning;
use crate::{EngineError, Result};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use trainyard_autograd::functions::NORM_MIN;
use trainyard_autograd::{Adapter, ParamId, Parameters};
use trainyard_data::{Tokenizer, place_of};
use trainyard_model::weights::{PackedFormat, WeightReader};
use trainyard_model::{Model, ModelSpec, ParameterSpec, Tuning, UnitLayout, gguf, hf};
use trainyard_tensor::cpu::Isa;
use trainyard_tensor::cuda::Cuda;
use trainyard_tensor::{DType, Device, Tensor};

/// A trained model for evaluation, generation and export, without optimizer and gradients.
pub struct Trained {
    /// The model with its parameters.
    pub rank: Rank,
    /// Its tokenizer; None for a model of images.
    pub tokenizer: Option<Tokenizer>,
    /// Its description.
    pub spec: ModelSpec,
    /// The run that trained it; None for a Hugging Face folder.
    pub run: Option<TrainedRun>,
}

/// The part of a run that a trained model is opened with.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Selection {
    /// The checkpoint.
    pub checkpoint: Choice,
    /// The weights in it.
    pub weights: Weights,
}

/// The weights of a checkpoint.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Weights {
    /// Those of its step.
    #[default]
    Last,
    /// Their average over the steps before ([`crate::averaging`]).
    Averaged,
}

impl From<Choice> for Selection {
    fn from(checkpoint: Choice) -> Selection {
        Selection { checkpoint, weights: Weights::Last }
    }
}

/// The run that trained a model.
pub struct TrainedRun {
    /// Its configuration, unresolved.
    pub config: Config,
    /// Sequence length in training, in tokens.
    pub sequence_length: usize,
    /// The step of the checkpoint.
    pub step: u64,
    /// The weights of that checkpoint.
    pub weights: Weights,
}

/// Settings for running a trained model.
#[derive(Clone, Debug)]
pub struct Runtime {
    /// The kernels.
    pub isa: Isa,
    /// Number of threads.
    pub threads: usize,
    /// Dtype of forward. None: the run's, or f32 for a Hugging Face folder.
    pub dtype: Option<DType>,
    /// The CPU, or a GPU: number 0 if none is named.
    pub device: DeviceKind,
}

impl Runtime {
    /// The best CPU kernels and all cores of this machine.
    pub fn of_this_machine() -> Runtime {
        let (isa, threads) = (Isa::detect(), Inputs::of_this_machine().cores);
        Runtime { isa, threads, dtype: None, device: DeviceKind::Cpu }
    }
}

/// Opens a run at the checkpoint and with the weights of `selection`, or a Hugging Face folder, for
/// which that must be the default.
///
/// # Errors
/// If the folder is neither; if the checkpoint is missing, is damaged, or holds other tensors than
/// the model; if it has no average of the weights and that is selected; if the configuration cannot
/// be read.
pub fn open_trained(
    folder: &Path,
    selection: impl Into<Selection>,
    runtime: &Runtime,
    mut note: impl FnMut(&str),
) -> Result<Trained> {
    let device = device_of(runtime, &mut note)?;
    open_trained_on(&device, folder, selection, runtime.dtype, note)
}

/// Opens the device of `runtime`.
pub(crate) fn device_of(runtime: &Runtime, note: &mut impl FnMut(&str)) -> Result<Device> {
    Ok(match runtime.device {
        DeviceKind::Cpu => Device::cpu(runtime.isa, runtime.threads, None),
        DeviceKind::Cuda(ordinal) => {
            let cuda = Cuda::open(ordinal.unwrap_or(0), runtime.threads)?;
            if let Some(doubt) = crate::device::untried(&cuda, 1) {
                note(&warning(doubt));
            }
            Device::cuda(Arc::new(cuda), None)
        }
    })
}

/// Like [`open_trained`], on an open device. `dtype` is that of forward. None: the run's, or f32
/// for a Hugging Face folder.
///
/// # Errors
/// As [`open_trained`].
pub fn open_trained_on(
    device: &Device,
    folder: &Path,
    selection: impl Into<Selection>,
    dtype: Option<DType>,
    mut note: impl FnMut(&str),
) -> Result<Trained> {
    let Selection { checkpoint: choice, weights } = selection.into();
    if !folder.join(files::MODEL).is_file() {
        if weights == Weights::Averaged {
            return Err(does_not_fit(format!(
                "{} is not the folder of a run (it has no {}), so it has no average of the weights: leave out --averaged",
                folder.display(),
                files::MODEL
            )));
        }
        if choice != Choice::Latest {
            return Err(does_not_fit(format!(
                "{} is not the folder of a run (it has no {}), so it has no checkpoint to choose: leave out --checkpoint {choice}",
                folder.display(),
                files::MODEL
            )));
        }
        return open_hugging_face(folder, device, dtype, &mut note);
    }
    let mut spec = read_spec(folder)?;
    let of_text = spec.image.is_none();
    let tokenizer = of_text.then(|| Tokenizer::load(&folder.join(files::TOKENIZER))).transpose()?;
    let config = Config::load(Some(&folder.join(files::CONFIG)), &[])?;
    let longest = spec.max_positions;
    let usual = || match (of_text, spec.encoder.is_some()) {
        (true, false) => usual_sequence_length(longest),
        (true, true) => longest.min(PAIRED_LENGTH),
        (false, _) => longest,
    };
    let sequence_length = config.training.sequence_length.unwrap_or_else(usual);
    if !(1..=longest).contains(&sequence_length) {
        return Err(does_not_fit(format!(
            "{}: training.sequence_length = {sequence_length}, and the model takes 1 to {longest} tokens",
            folder.join(files::CONFIG).display()
        )));
    }
    let unknown = |eos: &u32| config.model.path.is_none() && !spec.eos_tokens.contains(eos);
    if let Some(tokenizer) = &tokenizer
        && let Some(eos) = tokenizer.eos().filter(unknown)
    {
        // A model shape has no end token, or that of the model it is named after. Users of an
        // export need this run's end token to stop at.
        (spec.bos_token, spec.eos_tokens) = (tokenizer.bos().or(Some(eos)), vec![eos]);
    }
    let found = find_checkpoint(folder, choice, &mut note)?.ok_or_else(|| {
        does_not_fit(format!("{} has no checkpoint yet: train on, or wait for the first one", folder.display()))
    })?;
    let dtype = dtype.unwrap_or_else(|| dtype_of(config.precision.compute));
    let tuning = tuning(&config);
    let mut rank = Rank::for_inference(device, Model::new(spec.clone())?.tuned(&tuning)?, dtype)?;
    if rank.model().has_frozen() {
        load_frozen(&mut rank, &config, &mut note)?;
    }
    match weights {
        Weights::Last => snapshot::load_parameters(&mut rank, &found.checkpoint)?,
        Weights::Averaged => snapshot::load_averages(&mut rank, &found.checkpoint)?,
    }
    let run = TrainedRun { config, sequence_length, step: found.step, weights };
    Ok(Trained { rank, tokenizer, spec, run: Some(run) })
}

/// Reads the description of the model of the run in `folder`.
pub(crate) fn read_spec(folder: &Path) -> Result<ModelSpec> {
    let path = folder.join(files::MODEL);
    let text = std::fs::read_to_string(&path).map_err(|source| EngineError::File {
        what: "cannot read",
        path: path.display().to_string(),
        source,
    })?;
    serde_json::from_str(&text).map_err(|error| does_not_fit(format!("{} is damaged: {error}", path.display())))
}

/// The text of `model.json`, which [`read_spec`] reads.
pub(crate) fn spec_text(spec: &ModelSpec) -> String {
    serde_json::to_string_pretty(spec).expect("plain data is JSON")
}

/// Finds the checkpoint `choice` of the run in `folder` and verifies every checksum. None if there
/// is no checkpoint. Notes which newer ones were skipped, and why.
pub(crate) fn find_checkpoint(folder: &Path, choice: Choice, note: &mut impl FnMut(&str)) -> Result<Option<Found>> {
    let found = checkpoint::find(folder, choice)?;
    for skipped in found.iter().flat_map(|found| &found.skipped) {
        note(&warning(format_args!("passed over a checkpoint that is not whole: {skipped}")));
    }
    Ok(found)
}

/// The model, without weights, of what [`open_trained`] opens.
///
/// # Errors
/// As [`open_trained`], less those of weights and checkpoints.
pub(crate) fn open_model(folder: &Path) -> Result<Model> {
    if folder.join(files::MODEL).is_file() {
        let config = Config::load(Some(&folder.join(files::CONFIG)), &[])?;
        return Ok(Model::new(read_spec(folder)?)?.tuned(&tuning(&config))?);
    }
    Ok(Model::new(read_description(folder, |_| ())?.spec)?)
}

/// The tokenizer of what [`open_trained`] opens.
///
/// # Errors
/// There is none, or it is damaged.
pub(crate) fn open_tokenizer(folder: &Path) -> Result<Tokenizer> {
    match folder.join(files::MODEL).is_file() {
        true => Ok(Tokenizer::load(&folder.join(files::TOKENIZER))?),
        false => pretrained::tokenizer(folder),
    }
}

fn open_hugging_face(
    folder: &Path,
    device: &Device,
    dtype: Option<DType>,
    note: &mut impl FnMut(&str),
) -> Result<Trained> {
    let (base, tuning) = match pretrained::adapted(folder)? {
        None => (folder.to_owned(), Tuning::default()),
        Some((base, adapter)) => {
            note(&format!("{}: an adapter of the model {}", folder.display(), base.display()));
            (base, Tuning { adapter: Some(adapter), ..Tuning::default() })
        }
    };
    let own_tokenizer = folder.join(files::TOKENIZER).is_file();
    let of_tokenizer = if own_tokenizer { folder } else { &base };
    let adapter = tuning.adapter.is_some().then_some(folder);
    open_tuned(&base, of_tokenizer, &tuning, adapter, device, dtype, note)
}

/// Opens the Hugging Face folder `base` as `tuning` changes it, with the adapters of the folder
/// `adapter` or new ones, and with the tokenizer that lies in `of_tokenizer`.
pub(crate) fn open_tuned(
    base: &Path,
    of_tokenizer: &Path,
    tuning: &Tuning,
    adapter: Option<&Path>,
    device: &Device,
    dtype: Option<DType>,
    note: &mut impl FnMut(&str),
) -> Result<Trained> {
    let Described { spec, packed } = read_description(base, &mut *note)?;
    let tokenizer = spec.image.is_none().then(|| pretrained::tokenizer(of_tokenizer)).transpose()?;
    let model = Model::new(spec.clone())?.tuned(tuning)?;
    let mut rank = Rank::for_inference(device, model, dtype.unwrap_or(DType::F32))?;
    if packed.is_some_and(|format| format.codes_inputs) {
        if device.as_cpu().is_none() {
            return Err(does_not_fit(
                "this model rounds the inputs of layers to 8 bits, which has kernels for processors only: use --device cpu",
            ));
        }
        rank.round_inputs();
    }
    for line in load_weights(&mut rank, base, adapter)? {
        note(&line);
    }
    Ok(Trained { rank, tokenizer, spec, run: None })
}

/// The description and the tokenizer of a Hugging Face folder or a GGUF file, whose weights are not
/// read.
///
/// # Errors
/// `folder` is neither, its configuration is not supported, or it has no tokenizer.
pub fn open_description(folder: &Path, note: impl FnMut(&str)) -> Result<(ModelSpec, Tokenizer)> {
    let spec = read_description(folder, note)?.spec;
    if spec.image.is_some() {
        return Err(has_no_tokenizer(folder));
    }
    Ok((spec, pretrained::tokenizer(folder)?))
}

/// The description of a model in files.
struct Described {
    spec: ModelSpec,
    /// The form of matrices of few bits.
    packed: Option<PackedFormat>,
}

fn read_description(folder: &Path, mut note: impl FnMut(&str)) -> Result<Described> {
    let unreadable = |error: std::io::Error| {
        let absent = if folder.exists() { String::new() } else { place_of(folder, &error) };
        let hub = folder.to_str().filter(|_| !folder.exists()).and_then(|name| hub_model(name, "DIR"));
        does_not_fit(format!(
            "{}{absent} is neither the folder of a run (no {}) nor of a Hugging Face model (no config.json){}",
            folder.display(),
            files::MODEL,
            hub.map_or(String::new(), |hint| format!("; {hint}"))
        ))
    };
    if !gguf::is_gguf(folder) {
        std::fs::metadata(folder.join("config.json")).map_err(unreadable)?;
    }
    let hf::Imported { spec, notes, packed } = pretrained::description(folder)?;
    notes.iter().for_each(|line| note(line));
    Ok(Described { spec, packed })
}

/// Sets all parameters to those that the run of `config` began with. Its checkpoints do not have
/// those that it does not train.
fn load_frozen(rank: &mut Rank, config: &Config, note: &mut impl FnMut(&str)) -> Result<()> {
    let Some(path) = config.model.path.as_ref().filter(|_| config.model.load_weights != Some(false)) else {
        rank.initialise_by(config.training.seed)?;
        return round_base(rank, config);
    };
    if !path.exists() {
        return Err(does_not_fit(format!(
            "{} does not exist: the run began with its weights, and has not trained all of them; put it back, or give its \
             place as model.path in the run's {}",
            path.display(),
            files::CONFIG
        )));
    }
    for line in load_weights(rank, path, None)? {
        note(&line);
    }
    round_base(rank, config)
}

/// Rounds frozen matrices to what the run kept of them in memory.
fn round_base(rank: &Rank, config: &Config) -> Result<()> {
    match base_codec(config) {
        Some(codec) => rank.parameters.round_frozen(rank.model(), codec, dtype_of(config.precision.compute)),
        None => Ok(()),
    }
}

/// Loads the weights of a Hugging Face folder into `rank`, which reads only the parts that it
/// holds. Adapters are those of the folder `adapter`, or begin anew. Returns notes on tensors of
/// the folder that were not used.
pub(crate) fn load_weights(rank: &mut Rank, folder: &Path, adapter: Option<&Path>) -> Result<Vec<String>> {
    // Files of weights have no adapters.
    let base = match rank.model().spec() {
        Some(spec) => &Model::new(spec.clone())?,
        None => rank.model(),
    };
    let open_adapter = |folder: &Path| WeightReader::open_adapter(folder, rank.model());
    let adapter = adapter.map(open_adapter).transpose().map_err(trainyard_model::ModelError::from)?;
    let reader = WeightReader::open(folder, base).map_err(trainyard_model::ModelError::from)?;
    let specs: BTreeMap<_, _> = rank.model().parameters().map(|(id, spec)| (id, spec.clone())).collect();
    let seed = rank.seed();
    let set = |id: ParamId, range: Range<usize>, values: &mut Tensor| {
        let spec = &specs[&id];
        let reader = match (spec.is_adapter(), &adapter) {
            (true, None) => return initial_values(values, id, spec, range, seed),
            (true, Some(adapter)) => adapter,
            (false, _) => &reader,
        };
        let read = |values: &mut [f32]| reader.read_part(spec, range, values);
        Ok(values.overwrite(read)?.map_err(trainyard_model::ModelError::from)?)
    };
    match adapter {
        Some(_) => rank.set_parameters(set)?,
        None => rank.set_parameters_anew(set)?,
    }
    Ok(reader.notes().to_vec())
}

impl TrainedRun {
    /// The step and the weights in words: `step 40`, `step 40, averaged weights`.
    pub fn weights_in_words(&self) -> String {
        let averaged = if self.weights == Weights::Averaged { ", averaged weights" } else { "" };
        format!("step {}{averaged}", self.step)
    }
}

/// The error of a use of a model of images that needs tokens.
fn has_no_tokenizer(model: &Path) -> EngineError {
    does_not_fit(format!(
        "{} is a model of images: it has no tokenizer, and makes and reads no text; `trainyard eval` and `trainyard export` \
         take it",
        model.display()
    ))
}

impl Trained {
    /// Its tokenizer.
    ///
    /// # Errors
    /// A model of images has none.
    pub fn tokenizer(&self, model: &Path) -> Result<&Tokenizer> {
        self.tokenizer.as_ref().ok_or_else(|| has_no_tokenizer(model))
    }

    /// The f32 values of a parameter. Those of a frozen one are rounded to the dtype of forward.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn values(&self, id: ParamId) -> Result<Vec<f32>> {
        match self.rank.model().find(id) {
            Some(spec) if !spec.trained => Ok(self.rank.parameters.parameter(id)?.value.to_f32_vec()?),
            _ => self.rank.read_masters(id),
        }
    }

    /// Fills `out` with the parameters of a unit as if it had no adapters: their products are added
    /// to the weights. `out` is laid out as [`Model::layout`] of the model without adapters says.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn merged_unit(&self, unit: usize, out: &mut [f32]) -> Result<()> {
        let model = self.rank.model();
        let specs = model.units()[unit].parameters().iter().filter(|spec| !spec.is_adapter());
        let whole: Vec<ParameterSpec> = specs.map(|spec| ParameterSpec { trained: true, ..spec.clone() }).collect();
        let layout = UnitLayout::new(&whole, 1);
        for (index, spec) in whole.iter().enumerate() {
            let id = ParamId::new(unit as u32, index as u32);
            let weight = &mut out[layout.range(index)];
            weight.copy_from_slice(&self.values(id)?);
            if let Some(adapter) = model.adapters().get(&id) {
                let [down, up] = [self.values(adapter.a)?, self.values(adapter.b)?];
                merge(weight, spec.row_elements(), adapter, &down, &up);
                if let Some(magnitude) = adapter.magnitude {
                    scale_rows(weight, spec.row_elements(), adapter, &self.values(magnitude)?);
                }
            }
        }
        Ok(())
    }
}

/// Gives the rows of `width` elements that an adapter adds to its magnitudes as their norms.
fn scale_rows(weight: &mut [f32], width: usize, adapter: &Adapter, magnitudes: &[f32]) {
    let mut rows = weight.chunks_exact_mut(width);
    for outputs in adapter.outputs.iter() {
        for (number, row) in rows.by_ref().take(outputs.count).enumerate() {
            let Some((_, first)) = outputs.from else { continue };
            let norm = row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt() as f32;
            let factor = magnitudes[first + number] / norm.max(NORM_MIN);
            row.iter_mut().for_each(|x| *x *= factor);
        }
    }
}

/// Adds the product of an adapter's matrices to rows of `width` elements.
fn merge(weight: &mut [f32], width: usize, adapter: &Adapter, down: &[f32], up: &[f32]) {
    let rank = adapter.rank;
    let mut rows = weight.chunks_exact_mut(width);
    for outputs in adapter.outputs.iter() {
        let Some((member, first)) = outputs.from else {
            rows.by_ref().take(outputs.count).for_each(drop);
            continue;
        };
        for (number, row) in rows.by_ref().take(outputs.count).enumerate() {
            for (of_rank, factor) in up[(first + number) * rank..][..rank].iter().enumerate() {
                let factor = adapter.scale * factor;
                let added = &down[(member * rank + of_rank) * width..][..width];
                row.iter_mut().zip(added).for_each(|(x, a)| *x += factor * a);
            }
        }
    }
}
