//! Elastic weight consolidation: going on with new text without forgetting the old.
//!
//! [`estimate`] finds how much the loss on the old text depends on each weight, and keeps that and
//! the weights beside the run. A run that goes on from them adds a penalty to its loss
//! (Kirkpatrick et al. 2017, equation 3):
//!
//! `weight / 2 sum over i of F_i (w_i - a_i)^2`
//!
//! `a` are the weights of the old run and `F` is the diagonal of the Fisher information, the
//! *empirical* one: of the targets that the text has, not of those that the model would draw
//! (Kunstner et al. 2019, section 2). The gradients of tokens hardly correlate, so the squared
//! gradient of the mean over `n` targets, times `n`, estimates the `F` of one token. It then does
//! not depend on the length of sequences, and the loss of `N` new tokens with the weight `M / N`
//! is the logarithm of the posterior after `M` old ones (the paper's equation 2, by Laplace).
//!
//! A run that was consolidated itself hands on what it held: `F` becomes `decay F_old + F`, and `a`
//! the newest weights (the online form: Schwarz et al. 2018, section 4, equation 9).
//!
//! `F` and `a` lie behind the optimizer's state of each chunk ([`crate::optimizer`]), like an
//! average of the weights. So they are sharded, offloaded and predicted like it. No checkpoint has
//! them: a resumed run reads them again.

use crate::checkpoint::{Bytes, Checkpoint, CheckpointStore, Choice, Region, Retention, Runs, Snapshot, SnapshotPart};
use crate::checkpoint::{find, steps_of};
use crate::config::ConsolidationSection;
use crate::evaluate::{EvaluationSettings, slices};
use crate::rank::Rank;
use crate::snapshot::load_consolidation;
use crate::state::does_not_fit;
use crate::trained::Trained;
use crate::{EngineError, Result};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use trainyard_autograd::{GradientTarget, Gradients, ParamId, Policy, RandomKey, Tape};
use trainyard_data::{IndexedTokens, MicroBatch, eval_batches};
use trainyard_model::{Forward, Output};
use trainyard_tensor::{DType, Device, Purpose, Tensor};

/// The folder in a run's folder that has what the run hands on.
pub const FOLDER: &str = "consolidation";
/// The part of the files with the Fisher information.
pub(crate) const FISHER: &str = "fisher";
/// The part with the weights.
pub(crate) const WEIGHTS: &str = "weights";

/// The penalty of a run.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Consolidation {
    /// Its factor.
    pub weight: f64,
}

/// Settings of an estimate.
#[derive(Clone, Copy, Debug)]
pub struct EstimateSettings {
    /// Number of batches.
    pub batches: usize,
    /// The factor of the Fisher information that the run was consolidated with itself.
    pub decay: f64,
    /// The division of the text into batches.
    pub division: EvaluationSettings,
}

/// The extent and the size of an estimate.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Estimate {
    /// The step of the run.
    pub step: u64,
    /// Number of batches.
    pub batches: usize,
    /// Number of targets in them.
    pub targets: u64,
    /// The mean loss of a target.
    pub loss: f64,
    /// Number of weights.
    pub weights: u64,
    /// The mean of the Fisher information of a weight.
    pub mean: f64,
    /// The largest.
    pub largest: f64,
    /// The factor of the Fisher information that was handed on; None if there was none.
    pub decay: Option<f64>,
}

/// The gradients of one batch.
struct BatchGradients<'r> {
    rank: &'r Rank,
    sums: BTreeMap<ParamId, Tensor>,
    written: BTreeSet<ParamId>,
}

impl Gradients for BatchGradients<'_> {
    fn target(&mut self, id: ParamId) -> trainyard_autograd::Result<Option<GradientTarget>> {
        let Some(spec) = self.rank.model().find(id).filter(|spec| spec.trained) else { return Ok(None) };
        if !self.sums.contains_key(&id) {
            self.sums.insert(id, self.rank.device().empty(&spec.shape, DType::F32, Purpose::Grads)?);
        }
        Ok(Some(GradientTarget { tensor: self.sums[&id].clone(), overwrite: self.written.insert(id) }))
    }
}

/// The diagonal of the empirical Fisher information of a rank's weights.
pub struct Fisher {
    /// By parameter. What got no gradient is not there.
    pub diagonal: BTreeMap<ParamId, Vec<f32>>,
    /// Number of targets.
    pub targets: u64,
    /// The sum of their losses.
    pub loss_sum: f64,
}

/// Estimates the Fisher information on `count` batches, without dropout. `rank` has the whole
/// model.
///
/// # Errors
/// Errors of the device and of the data; a loss that is not finite.
pub fn fisher(
    rank: &Rank,
    batches: impl Iterator<Item = Result<MicroBatch>>,
    count: usize,
    mut done: impl FnMut(u64),
) -> Result<Fisher> {
    let mut found = Fisher { diagonal: BTreeMap::new(), targets: 0, loss_sum: 0.0 };
    let mut gradients = BatchGradients { rank, sums: BTreeMap::new(), written: BTreeSet::new() };
    for batch in batches {
        let batch = batch?;
        let targets = batch.targets_counted();
        if targets == 0 {
            continue;
        }
        gradients.written.clear();
        let loss = backward(rank, &batch, 1.0 / targets as f32, &mut gradients)?;
        if !loss.is_finite() {
            return Err(does_not_fit(format!(
                "the loss is not finite ({loss}): the weights hold NaN or infinities, or are close to it"
            )));
        }
        found.targets += targets as u64;
        found.loss_sum += loss * targets as f64;
        let share = targets as f32 / count as f32;
        for id in &gradients.written {
            let gradient = &gradients.sums[id];
            let sum = found.diagonal.entry(*id).or_insert_with(|| vec![0.0; gradient.elements()]);
            gradient.with_data(|gradient: &[f32]| {
                sum.iter_mut().zip(gradient).for_each(|(sum, g)| *sum += share * g * g);
            })?;
        }
        done(found.targets);
    }
    Ok(found)
}

/// Computes the loss of a batch times its targets times `scale`, and its gradients.
fn backward(rank: &Rank, batch: &MicroBatch, scale: f32, gradients: &mut BatchGradients<'_>) -> Result<f64> {
    let device: &Device = rank.device();
    let batch = rank.inference_model().batch(device, &slices(batch))?;
    let mut tape = Tape::new(device, &rank.parameters, Policy::Everything, RandomKey::default());
    let loss = rank.forward(&mut tape, &mut Forward::evaluation(&batch, Output::Loss { scale }))?;
    let Some(loss) = loss else { return Err(does_not_fit("the rank does not have the whole model")) };
    let recording = tape.finish();
    let one = device.tensor(*loss.tensor().shape(), &[1.0f32], Purpose::Activations)?;
    recording.backward(&[(&loss, one)], &[], &rank.parameters, gradients)?;
    Ok(f64::from(loss.tensor().to_scalar()?))
}

/// Estimates the Fisher information of `trained`, the run in `folder`, on batches that are spread
/// evenly over `texts`, and keeps it with the weights in [`FOLDER`] of the run. `done` receives
/// the number of targets done so far.
///
/// # Errors
/// Too little text; an estimate of a later step; errors of the device and of files.
pub fn estimate(
    folder: &Path,
    trained: &Trained,
    texts: &[IndexedTokens],
    settings: EstimateSettings,
    done: impl FnMut(u64),
) -> Result<(Estimate, PathBuf)> {
    let Some(run) = &trained.run else {
        return Err(does_not_fit(format!(
            "{} is not the folder of a run: what is consolidated is kept beside the checkpoints of one",
            folder.display()
        )));
    };
    let place = folder.join(FOLDER);
    if let Some(later) = steps_of(&place)?.into_iter().find(|step| *step > run.step) {
        return Err(does_not_fit(format!(
            "{} has an estimate of step {later}, after step {}: remove that folder first",
            place.display(),
            run.step
        )));
    }
    let rank = &trained.rank;
    let options = settings.division.options(rank.model().vocab_size(), u64::MAX);
    let opened = texts.iter().map(|text| eval_batches(text, options)).collect::<std::result::Result<Vec<_>, _>>()?;
    let there = opened.iter().map(|batches| batches.batches() as usize).sum::<usize>();
    if there < settings.batches {
        return Err(does_not_fit(format!(
            "the text has {there} batches of {} tokens: ask for at most so many, or give more text",
            settings.division.sequence_length * settings.division.rows
        )));
    }
    let mut numbers = (0..settings.batches).map(|batch| batch * there / settings.batches).peekable();
    let mut end = 0;
    let chosen = opened.into_iter().flat_map(|mut text| {
        let mut next = end;
        end += text.batches() as usize;
        let own: Vec<usize> = std::iter::from_fn(|| numbers.next_if(|number| *number < end)).collect();
        own.into_iter().filter_map(move |number| text.nth(number - std::mem::replace(&mut next, number + 1)))
    });
    let batches = chosen.map(|batch| batch.map_err(EngineError::from));
    let Fisher { mut diagonal, targets, loss_sum } = fisher(rank, batches, settings.batches, done)?;
    let earlier = run.config.consolidation.from.as_deref().map(opened_at).transpose()?;
    let (mut fishers, mut weights) = (Vec::new(), Vec::new());
    let mut found = Estimate {
        step: run.step,
        batches: settings.batches,
        targets,
        loss: loss_sum / targets.max(1) as f64,
        weights: 0,
        mean: 0.0,
        largest: 0.0,
        decay: earlier.as_ref().map(|_| settings.decay),
    };
    for (id, spec) in rank.model().parameters().filter(|(_, spec)| spec.trained) {
        let name = rank.model().parameter_name(id).expect("a parameter of the model has a name");
        let mut own = diagonal.remove(&id).unwrap_or_else(|| vec![0.0; spec.elements()]);
        if let Some(earlier) = &earlier {
            add(earlier, &name, settings.decay as f32, &mut own)?;
        }
        found.weights += own.len() as u64;
        found.mean += own.iter().map(|x| f64::from(*x)).sum::<f64>();
        found.largest = own.iter().fold(found.largest, |most, x| most.max(f64::from(*x)));
        fishers.push(region(&name, &spec.shape, &own));
        weights.push(region(&name, &spec.shape, &trained.values(id)?));
    }
    found.mean /= found.weights.max(1) as f64;
    let part = |name: &str, regions| SnapshotPart { name: name.into(), regions, required: BTreeSet::new() };
    let snapshot = Snapshot {
        step: run.step,
        parts: vec![part(FISHER, fishers), part(WEIGHTS, weights)],
        state: serde_json::to_value(&found).expect("plain data is JSON"),
        attachments: Vec::new(),
    };
    let (mut store, _) = CheckpointStore::open(&place, Retention { keep_last: 1, keep_best: false })?;
    let written = store.write(&snapshot)?;
    Ok((found, written.path))
}

/// Adds a tensor of an earlier estimate, times `decay`.
fn add(earlier: &Checkpoint, name: &str, decay: f32, own: &mut [f32]) -> Result<()> {
    let entry = earlier.entry(FISHER, name)?;
    if entry.elements() != own.len() || entry.dtype != "F32" {
        return Err(does_not_fit(format!("{}: `{name}` has another shape here", earlier.path().display())));
    }
    let mut bytes = vec![0; 4 * own.len()];
    earlier.read(FISHER, name, 0..own.len(), &mut bytes)?;
    let values = bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
    own.iter_mut().zip(values).for_each(|(own, earlier)| *own += decay * earlier);
    Ok(())
}

fn region(name: &str, shape: &[usize], values: &[f32]) -> Region<'static> {
    let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    Region {
        name: name.to_owned(),
        dtype: DType::F32,
        shape: shape.to_vec(),
        runs: vec![Runs::from(0..values.len())],
        bytes: Bytes::from(bytes),
    }
}

/// Opens the estimate of the run in `folder`.
fn opened_at(folder: &Path) -> Result<Checkpoint> {
    let found = find(&folder.join(FOLDER), Choice::Latest)?;
    let found = found.ok_or_else(|| {
        does_not_fit(format!(
            "consolidation.from = {0}: it has no estimate of the Fisher information: run `trainyard consolidate {0}` first",
            folder.display()
        ))
    })?;
    Ok(found.checkpoint)
}

/// Loads the Fisher information and the weights that a run is held to, where its configuration
/// names them.
///
/// # Errors
/// There is no estimate, or it is damaged or of another model.
pub(crate) fn load(rank: &mut Rank, section: &ConsolidationSection, note: &mut impl FnMut(&str)) -> Result<()> {
    let Some(folder) = &section.from else { return Ok(()) };
    let checkpoint = opened_at(folder)?;
    load_consolidation(rank, &checkpoint).map_err(|error| {
        does_not_fit(format!(
            "consolidation.from = {}: {error}; the model, and what of it is trained, must be that of the other run",
            folder.display()
        ))
    })?;
    let step = checkpoint.step();
    let of: Option<Estimate> = serde_json::from_value(checkpoint.state().clone()).ok();
    let of = of.map_or(String::new(), |of| format!(", from {} targets", of.targets));
    note(&format!("consolidation: held to {} at step {step}{of}", folder.display()));
    Ok(())
}
