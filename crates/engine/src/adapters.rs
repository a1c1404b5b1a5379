//! Several PEFT adapters on one base, which is in memory once: one of them is in use at a time.
//!
//! The model has room for all of them: the largest of their ranks, and every layer that one of them
//! adapts. What an adapter does not have is zero there. Matrices of a smaller rank are filled up
//! with zeros, and those of another scale are multiplied.

use crate::pretrained::{adapted, config_text};
use crate::session::files;
use crate::state::does_not_fit;
use crate::trained::{Runtime, Trained, device_of, open_tuned};
use crate::warning::warning;
use crate::{EngineError, Result};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use trainyard_autograd::ParamId;
use trainyard_data::Tokenizer;
use trainyard_model::weights::{AdapterTensors, read_adapter};
use trainyard_model::{AdapterSpec, ModelError, ParameterSpec, Tuning, hf};

/// A base with adapters that take turns.
pub struct Adapted {
    /// The base with the adapter in use; at first none adds anything.
    pub trained: Trained,
    adapters: Vec<(AdapterSpec, AdapterTensors)>,
    /// The adapter that the model has room for.
    room: AdapterSpec,
}

/// Opens the Hugging Face folder or GGUF file `base` with the PEFT adapters in `folders`.
///
/// # Errors
/// Folders without adapters, of another model or with another tokenizer; LoRA beside DoRA, or DoRA
/// on other layers; files that cannot be read.
pub fn open_adapted(
    base: &Path,
    folders: &[PathBuf],
    runtime: &Runtime,
    mut note: impl FnMut(&str),
) -> Result<Adapted> {
    if base.join(files::MODEL).is_file() {
        return Err(does_not_fit(format!(
            "{0} is a run, and adapters are of a Hugging Face folder: write it as one, `trainyard export {0} --out DIR`",
            base.display()
        )));
    }
    let spec = hf::from_config_json(&config_text(base)?).map_err(ModelError::from)?.spec;
    let mut adapters = Vec::with_capacity(folders.len());
    for folder in folders {
        let shown = folder.display();
        let Some((own_base, adapter)) = adapted(folder)? else {
            return Err(does_not_fit(format!(
                "{shown} is no PEFT adapter: it has no adapter_config.json; `trainyard export RUN --adapter` writes one"
            )));
        };
        let place = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
        if place(&own_base) != place(base) {
            note(&warning(format_args!("{shown} was made for {}, not for {}", own_base.display(), base.display())));
        }
        let tensors = read_adapter(folder, &spec, &adapter)?;
        adapters.push((adapter, tensors));
    }
    let room = room_for(folders, adapters.iter().map(|(adapter, _)| adapter))?;
    let tuning = Tuning { adapter: Some(room.clone()), ..Tuning::default() };
    let device = device_of(runtime, &mut note)?;
    let trained = open_tuned(base, base, &tuning, None, &device, runtime.dtype, &mut note)?;
    for folder in folders.iter().filter(|folder| folder.join(files::TOKENIZER).is_file()) {
        let words = Tokenizer::load(&folder.join(files::TOKENIZER))?;
        if trained.tokenizer.as_ref().is_some_and(|own| own.fingerprint() != words.fingerprint()) {
            return Err(does_not_fit(format!(
                "{} has another tokenizer than {}: open it by itself",
                folder.display(),
                base.display()
            )));
        }
    }
    Ok(Adapted { trained, adapters, room })
}

/// The adapter in whose matrices all of `adapters`, which lie in `folders`, have room.
fn room_for<'a>(folders: &[PathBuf], mut adapters: impl Iterator<Item = &'a AdapterSpec>) -> Result<AdapterSpec> {
    let mut room = adapters.next().cloned().ok_or_else(|| does_not_fit("there is no adapter"))?;
    let scale = room.scale();
    let sorted = |targets: &[String]| {
        let mut targets = targets.to_vec();
        targets.sort();
        targets.dedup();
        targets
    };
    for (adapter, folder) in adapters.zip(&folders[1..]) {
        let differs = sorted(&adapter.targets) != sorted(&room.targets);
        if adapter.magnitudes != room.magnitudes || room.magnitudes && differs {
            return Err(does_not_fit(format!(
                "{} and {} do not go together: DoRA goes with DoRA on the same layers; open one of them by itself",
                folders[0].display(),
                folder.display()
            )));
        }
        room.rank = room.rank.max(adapter.rank);
        // No targets stand for all layers.
        if adapter.targets.is_empty() || room.targets.is_empty() {
            room.targets.clear();
        } else {
            room.targets.extend(adapter.targets.iter().cloned());
        }
    }
    let targets = sorted(&room.targets);
    Ok(AdapterSpec { alpha: scale * room.rank as f64, rank_stabilised: false, targets, ..room })
}

impl Adapted {
    /// True if the base can be used without any adapter. With DoRA every adapter has norms.
    pub fn has_plain_base(&self) -> bool {
        !self.room.magnitudes
    }

    /// Takes adapter `number`, in the order of the folders, into use; None: no adapter, so that the
    /// base computes as it is.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn take(&mut self, number: Option<usize>) -> Result<()> {
        if number.is_none() && !self.has_plain_base() {
            return Err(does_not_fit("with DoRA every weight has the norms of some adapter: open the base by itself"));
        }
        let Adapted { trained, adapters, room } = self;
        let nothing = (room.clone(), AdapterTensors::new());
        let (adapter, tensors) = number.map_or(&nothing, |number| &adapters[number]);
        let specs = trained.rank.model().parameters().filter(|(_, spec)| spec.is_adapter());
        let specs: BTreeMap<ParamId, ParameterSpec> = specs.map(|(id, spec)| (id, spec.clone())).collect();
        let factor = (adapter.scale() / room.scale()) as f32;
        trained.rank.set_masters(|id, range, values| {
            let whole = specs.get(&id).map_or_else(Vec::new, |spec| filled(spec, tensors, factor));
            let part = whole.get(range).ok_or_else(|| does_not_fit(format!("{id} is no adapter")))?;
            values.overwrite(|values: &mut [f32]| values.copy_from_slice(part))?;
            Ok::<(), EngineError>(())
        })
    }
}

/// The values of a parameter of adapters, from tensors that have fewer rows (first matrices) or
/// shorter ones (second). Second matrices are multiplied by `factor`.
fn filled(spec: &ParameterSpec, tensors: &AdapterTensors, factor: f32) -> Vec<f32> {
    let (mut values, wide) = (vec![0.0; spec.elements()], spec.row_elements());
    for source in &spec.sources {
        let Some((width, own)) = tensors.get(&source.hf_name) else { continue };
        let rows = values[source.rows.start * wide..].chunks_mut(wide).zip(own.chunks(*width));
        let is_up = source.hf_name.ends_with(".lora_B.weight");
        for (row, own) in rows {
            row[..*width].copy_from_slice(own);
            if is_up && factor != 1.0 {
                row.iter_mut().for_each(|value| *value *= factor);
            }
        }
    }
    values
}
