//! A model to compress, unit by unit.

use crate::{Result, error::refuse};
use std::path::Path;
use trainyard_autograd::{ParamId, Store};
use trainyard_data::Tokenizer;
use trainyard_engine::session::files;
use trainyard_engine::trained::{Selection, Trained, open_description, open_trained_on};
use trainyard_model::weights::WeightReader;
use trainyard_model::{Model, ModelSpec};
use trainyard_tensor::{DType, Device, Purpose};

/// An open model. Of a Hugging Face folder or a GGUF file only what is asked for is read; the
/// parameters of a run are in memory from the start.
pub struct Source {
    model: Model,
    spec: ModelSpec,
    tokenizer: Tokenizer,
    weights: Weights,
}

enum Weights {
    Files(WeightReader),
    Run(Box<Trained>),
}

impl Source {
    /// Opens a run at the checkpoint and with the weights of `selection`, a Hugging Face folder or
    /// a GGUF file. A run's adapters are merged into its weights.
    ///
    /// # Errors
    /// As [`open_trained_on`]; a model whose blocks have matrices that are not products [out, in].
    pub fn open(
        path: &Path,
        selection: impl Into<Selection>,
        device: &Device,
        mut note: impl FnMut(&str),
    ) -> Result<Source> {
        let selection = selection.into();
        if path.join(files::MODEL).is_file() || selection != Selection::default() {
            let trained = open_trained_on(device, path, selection, Some(DType::F32), note)?;
            let (spec, tokenizer) = (trained.spec.clone(), trained.tokenizer(path)?.clone());
            let model = Model::new(spec.clone())?;
            return Source { model, spec, tokenizer, weights: Weights::Run(Box::new(trained)) }.checked();
        }
        let (spec, tokenizer) = open_description(path, &mut note)?;
        let model = Model::new(spec.clone())?;
        let reader = WeightReader::open(path, &model)?;
        reader.notes().iter().for_each(|line| note(line));
        Source { model, spec, tokenizer, weights: Weights::Files(reader) }.checked()
    }

    fn checked(self) -> Result<Source> {
        if self.spec.experts.is_some() {
            return refuse("it is a mixture of experts, which cannot be compressed yet");
        }
        if self.spec.value_residual {
            return refuse(
                "its blocks hand on the values of the first (model.value_residual), which cannot be compressed yet",
            );
        }
        if self.spec.encoder.is_some() {
            return refuse("it has an encoder beside its decoder, and only decoders can be compressed yet");
        }
        Ok(self)
    }

    /// Its units.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Its description.
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// Its tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The run that trained it, as far as it is one.
    pub fn trained(&self) -> Option<&Trained> {
        match &self.weights {
            Weights::Run(trained) => Some(trained),
            Weights::Files(_) => None,
        }
    }

    /// The values of a unit, laid out for one shard.
    ///
    /// # Errors
    /// Files that cannot be read.
    pub fn unit(&self, unit: usize) -> Result<Vec<f32>> {
        let mut flat = vec![0.0; self.model.layout(unit, 1).elements()];
        match &self.weights {
            Weights::Files(reader) => reader.read_unit(&self.model, unit, &mut flat)?,
            Weights::Run(trained) => trained.merged_unit(unit, &mut flat)?,
        }
        Ok(flat)
    }
}

/// The parameters of unit `unit` of `model` with the values `flat`, and those that it borrows,
/// whose units `other` gives.
///
/// # Errors
/// No memory; errors of `other`.
pub fn store(
    device: &Device,
    model: &Model,
    unit: usize,
    flat: &[f32],
    other: impl Fn(usize) -> Result<Vec<f32>>,
) -> Result<Store> {
    let mut store = Store::new();
    let mut insert = |id: ParamId, flat: &[f32]| -> Result<()> {
        let Some(spec) = model.find(id) else { return Ok(()) };
        let range = model.layout(id.unit as usize, 1).range(id.index as usize);
        store.insert(id, device.tensor(&spec.shape, &flat[range], Purpose::Params)?);
        Ok(())
    };
    for index in 0..model.units()[unit].parameters().len() {
        insert(ParamId::new(unit as u32, index as u32), flat)?;
    }
    for id in model.units()[unit].borrowed() {
        insert(*id, &other(id.unit as usize)?)?;
    }
    Ok(store)
}
