//! Writes a rank's state to a checkpoint ([`take`]) and restores it ([`restore`]).
//!
//! A checkpoint has three parts:
//!
//! - `model`: the f32 masters under our parameter names (`block.3.attn.qkv.weight`);
//! - `optimizer`: the optimizer's state per parameter;
//! - JSON: the rest (updates, loss scale, position in the data).
//!
//! Names and shapes are those of whole parameters, and each rank writes the elements that it holds.
//! So a reader need not know the layout of the writers' buffers.

use crate::checkpoint::{Bytes, Checkpoint, CheckpointError, Region, Snapshot, SnapshotPart};
use crate::early_stopping::EarlyStopping;
use crate::fp8::AmaxHistory;
use crate::optimizer::StatePart;
use crate::precision::LossScaler;
use crate::rank::Rank;
use crate::state::{does_not_fit, overlap};
use crate::tier::Stored;
use crate::{EngineError, Result};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use trainyard_autograd::ParamId;
use trainyard_model::ParameterSpec;
use trainyard_tensor::{DType, Tensor};

/// The state of a run besides tensors: everything else that an exact resumption needs.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct RunState {
    /// Steps done, skipped ones included.
    pub step: u64,
    /// Updates made.
    pub updates: u64,
    /// Number of steps skipped in a row up to now.
    pub skipped_in_a_row: u64,
    /// Number of steps skipped in total.
    pub skipped: u64,
    /// Samples consumed.
    pub samples: u64,
    /// Tokens consumed.
    pub tokens: u64,
    /// Seconds of training so far, over all sittings.
    pub seconds: f64,
    /// Length of the schedule in steps, once known.
    pub schedule_steps: Option<u64>,
    /// The limit in seconds from which `schedule_steps` was computed, if it was.
    #[serde(default)]
    pub schedule_seconds: Option<f64>,
    /// The planned learning rate of the next step when the state was written. Old checkpoints do
    /// not have it.
    #[serde(default)]
    pub learning_rate_next: Option<f64>,
    /// The loss scale.
    pub scaler: LossScaler,
    /// The largest magnitudes of earlier steps, for 8-bit products. Set only in a checkpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub amax_history: Option<AmaxHistory>,
    /// Results of evaluations for early stopping. A checkpoint is written before its own step's
    /// evaluation, which is therefore in the next checkpoint.
    #[serde(default)]
    pub early_stopping: EarlyStopping,
    /// Hash of the data's specification.
    pub dataset: String,
    /// Hash of the tokenizer.
    pub tokenizer: String,
}

/// Names of the parts of a checkpoint.
const MODEL: &str = "model";
const OPTIMIZER: &str = "optimizer";

/// The part of the state that `rank` writes. Replicas divide the state that they share, so every
/// element is written once.
///
/// If `copies` is true, training may go on while the copy is written. Otherwise the snapshot must
/// be written before the next step. State in a tier is never copied
/// ([`Rank::keeps_state_in_a_tier`]) and must be written before the next step too.
pub fn take(rank: &Rank, state: &RunState, copies: bool) -> Result<Snapshot<'static>> {
    if !copies {
        // The writer reads the results of all lanes.
        rank.device().synchronize_lanes()?;
    }
    Ok(Snapshot {
        step: state.step,
        parts: parts(rank, copies)?,
        state: serde_json::to_value(RunState { amax_history: rank.amax_history(), ..state.clone() })
            .expect("plain data is JSON"),
        attachments: Vec::new(),
    })
}

fn parts(rank: &Rank, copies: bool) -> Result<Vec<SnapshotPart<'static>>> {
    let (replica, replicas) = rank.replica();
    let share = |range: &Range<usize>| {
        let cut = |part: usize| range.len() * part / replicas;
        cut(replica)..cut(replica + 1)
    };
    let mut model = Vec::new();
    for (id, spec) in rank.model().parameters().filter(|(id, _)| rank.parameters.holds(id.unit as usize)) {
        let name = rank.model().parameter_name(id).expect("a parameter of the model has a name");
        let range = rank.parameters.master_part_range(id);
        let share = share(&range);
        let bytes = bytes(rank.masters(id)?, &share, copies)?;
        model.extend(region(name, &spec.shape, share, range, bytes));
    }
    let mut optimizer = Vec::new();
    for (name, elements, range, parts) in optimizer_tensors(rank)? {
        let share = share(&range);
        let bytes = bytes(parts, &share, copies)?;
        optimizer.extend(region(name, &[elements], share, range, bytes));
    }
    let parts = [(MODEL, model), (OPTIMIZER, optimizer)];
    Ok(parts.into_iter().map(|(name, regions)| SnapshotPart { name: name.into(), regions }).collect())
}

/// Bytes of the copy that [`take`] makes.
pub(crate) fn bytes_copied(rank: &Rank) -> Result<usize> {
    let parts = parts(rank, false)?;
    let regions = parts.iter().flat_map(|part| &part.regions);
    Ok(regions.filter(|region| matches!(region.bytes, Bytes::Live(_))).map(|region| region.bytes.len()).sum())
}

/// Bytes of the tensors of a checkpoint that this rank holds.
pub(crate) fn bytes_held(rank: &Rank) -> Result<u64> {
    let held = rank.model().parameters().filter(|(id, _)| rank.parameters.holds(id.unit as usize));
    let masters: usize = held.map(|(id, _)| rank.parameters.master_part_range(id).len()).sum();
    let state: usize = rank.optimizer.state()?.iter().map(|(part, _)| part.range.len()).sum();
    Ok(4 * (masters + state) as u64)
}

/// The region of the elements `share` of the part `range` of a tensor of `shape`.
fn region(
    name: String,
    shape: &[usize],
    share: Range<usize>,
    range: Range<usize>,
    bytes: Bytes<'static>,
) -> Option<Region<'static>> {
    let range = range.start + share.start..range.start + share.end;
    (!range.is_empty()).then(|| Region { name, dtype: DType::F32, shape: shape.to_vec(), range, bytes })
}

/// The bytes of the elements `share` of the concatenation of `parts`.
fn bytes(parts: Vec<(Stored, usize)>, share: &Range<usize>, copies: bool) -> Result<Bytes<'static>> {
    let (mut start, mut live, mut stored) = (0, Vec::new(), Vec::new());
    for (part, elements) in parts {
        let held = overlap(share, &(start..start + elements));
        match part {
            Stored::Here(values) if !held.is_empty() => {
                live.push(values.view(held.start - start, [held.len()])?);
            }
            Stored::Here(_) => {}
            Stored::Away(store, offset) if !held.is_empty() => {
                stored.push((store, offset + 4 * (held.start - start) as u64, 4 * held.len()));
            }
            Stored::Away(..) => {}
        }
        start += elements;
    }
    // All parts are in memory, or all are in files.
    if !stored.is_empty() {
        return Ok(Bytes::Stored(stored));
    }
    if !copies {
        return Ok(Bytes::Live(live));
    }
    let mut copy = Vec::with_capacity(live.iter().map(Tensor::bytes).sum());
    for values in live {
        values.with_bytes(|bytes| copy.extend_from_slice(bytes))?;
    }
    Ok(Bytes::from(copy))
}

/// Restores a checkpoint's state in `rank`, bit for bit. Any number of ranks may have written it.
/// All ranks call this together.
///
/// # Errors
/// If a tensor is missing, has another shape, or is not part of this run's state.
pub fn restore(rank: &mut Rank, checkpoint: &Checkpoint) -> Result<RunState> {
    let mut state = read_state(checkpoint)?;
    if let Some(history) = state.amax_history.take() {
        rank.restore_amax_history(history)?;
    }
    check_all_read(rank, checkpoint)?;
    load_parameters(rank, checkpoint)?;
    rank.optimizer.set_state(|part, values| {
        check_columns(checkpoint, &state_name(rank, part), part)?;
        fill(checkpoint, OPTIMIZER, &state_name(rank, part), &[part.elements], part.range.clone(), values)
            .map_err(of_another_optimizer)
    })?;
    state.scaler = state.scaler.continued(rank.scaler());
    rank.core(|core| (core.updates, core.scaler) = (state.updates, state.scaler));
    Ok(state)
}

/// Rejects Adafactor column moments of an earlier version, in which fused matrices (queries, keys
/// and values; gate and up) shared one.
fn check_columns(checkpoint: &Checkpoint, name: &str, part: &StatePart) -> Result<()> {
    match checkpoint.entry(OPTIMIZER, name) {
        Ok(stored)
            if part.name == "exp_avg_sq_col"
                && part.range.len() < part.elements
                && stored.shape == [part.range.len()] =>
        {
            Err(does_not_fit(format!(
                "{}: `{name}` is of an earlier version, whose Adafactor took fused matrices for one; now each has moments of its own: go on with that \
                 version, or begin a new run with model.path = an export of this one",
                checkpoint.path().display()
            )))
        }
        // `fill` reports all other errors.
        _ => Ok(()),
    }
}

/// Checks that every tensor of the checkpoint belongs to the model or the optimizer's state. A
/// tensor that no rank reads would be missing from the next checkpoint.
fn check_all_read(rank: &Rank, checkpoint: &Checkpoint) -> Result<()> {
    for part in checkpoint.manifest().parts.keys() {
        let names = match part.as_str() {
            // load_parameters checks it.
            MODEL => continue,
            OPTIMIZER => all_state_names(rank),
            _ => BTreeSet::new(),
        };
        checkpoint
            .check_all_read(part, |name| names.contains(name))
            .map_err(|error| of_another_optimizer(error.into()))?;
    }
    Ok(())
}

/// Turns the error of a missing or unread state tensor into one that names the cause: another
/// optimizer.
fn of_another_optimizer(error: EngineError) -> EngineError {
    let (path, what) = match &error {
        EngineError::Checkpoint(CheckpointError::NoTensor { path, name, .. }) => (path, format!("has no `{name}`")),
        EngineError::Checkpoint(CheckpointError::Unread { path, part, tensors }) if part == OPTIMIZER => {
            (path, format!("has a `{}`, which would be lost", tensors[0]))
        }
        _ => return error,
    };
    does_not_fit(format!(
        "{} was written under another optimizer.name or momentum: it {what}; set those that the run has used, or begin a new run with model.path = an \
         export of this one",
        path.display()
    ))
}

/// Loads the parameters alone, for evaluation, generation and export.
///
/// # Errors
/// If a tensor of the model is missing or has another shape, or the checkpoint has others.
pub fn load_parameters(rank: &mut Rank, checkpoint: &Checkpoint) -> Result<()> {
    let name = |(id, spec): (ParamId, &ParameterSpec)| {
        let name = rank.model().parameter_name(id).expect("a parameter of the model has a name");
        (id, (name, spec.shape.clone()))
    };
    let specs: BTreeMap<_, _> = rank.model().parameters().map(name).collect();
    let names: BTreeSet<&str> = specs.values().map(|(name, _)| name.as_str()).collect();
    checkpoint.check_all_read(MODEL, |name| names.contains(name))?;
    rank.set_masters(|id, range, values| {
        let (name, shape) = &specs[&id];
        fill(checkpoint, MODEL, name, shape, range, values)
    })
}

/// Reads the JSON part of a checkpoint.
pub fn read_state(checkpoint: &Checkpoint) -> Result<RunState> {
    serde_json::from_value(checkpoint.state().clone()).map_err(|error| {
        does_not_fit(format!("the state in {} is not that of a run: {error}", checkpoint.path().display()))
    })
}

/// A state tensor: its name, its number of elements, the range that the rank holds, and the places
/// of that range.
type StateTensor = (String, usize, Range<usize>, Vec<(Stored, usize)>);

fn optimizer_tensors(rank: &Rank) -> Result<Vec<StateTensor>> {
    let mut all: BTreeMap<String, StateTensor> = BTreeMap::new();
    for (part, stored) in rank.optimizer.state()? {
        let StatePart { elements, range, .. } = &part;
        let name = state_name(rank, &part);
        let begin = || (name.clone(), *elements, range.start..range.start, Vec::new());
        let (_, _, held, parts) = all.entry(name.clone()).or_insert_with(begin);
        // Chunks come in order.
        held.end = range.end;
        parts.push((stored, range.len()));
    }
    Ok(all.into_values().collect())
}

/// The names of all state tensors of the model, those that other ranks hold included.
fn all_state_names(rank: &Rank) -> BTreeSet<String> {
    let units = rank.model().units().iter();
    let parameters = units.flat_map(|unit| unit.parameters().iter().map(move |spec| (unit.name(), spec)));
    let names = |(unit, spec): (&str, &ParameterSpec)| {
        let tensors = rank.optimizer.state_names(spec).iter();
        tensors.map(|tensor| tensor_name(unit, spec, tensor)).collect::<Vec<_>>()
    };
    parameters.flat_map(names).collect()
}

fn state_name(rank: &Rank, part: &StatePart) -> String {
    let unit = &rank.model().units()[part.unit];
    tensor_name(unit.name(), &unit.parameters()[part.index], part.name)
}

/// `block.3.attn.qkv.weight.exp_avg`
fn tensor_name(unit: &str, parameter: &ParameterSpec, tensor: &str) -> String {
    format!("{unit}.{}.{tensor}", parameter.name)
}

/// Reads the elements `range` of a tensor of `shape` into `target`.
fn fill(
    checkpoint: &Checkpoint,
    part: &str,
    name: &str,
    shape: &[usize],
    range: Range<usize>,
    target: &mut Tensor,
) -> Result<(), EngineError> {
    let stored = checkpoint.entry(part, name)?;
    if stored.dtype != "F32" || stored.shape != shape {
        return Err(does_not_fit(format!(
            "{}: `{name}` is {} {:?}, and this run needs F32 {shape:?}",
            checkpoint.path().display(),
            stored.dtype,
            stored.shape,
        )));
    }
    Ok(target.overwrite_bytes(|bytes| checkpoint.read(part, name, range, bytes))??)
}
