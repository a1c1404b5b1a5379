//! The state of a rank as a checkpoint, and back.
//!
//! A checkpoint holds the f32 masters under our parameter names (`block.3.attn.qkv.weight`) in part `model`, the optimizer's state per parameter in part
//! `optimizer`, and the rest (updates, loss scale, position of the data) as JSON. Names and shapes are of whole parameters, and each rank writes the
//! elements that it holds; so what reads them needs to know nothing of how the writers' buffers lay.

use crate::checkpoint::{Bytes, Checkpoint, Part, Region, Snapshot};
use crate::optimizer::StatePart;
use crate::precision::LossScaler;
use crate::rank::Rank;
use crate::state::does_not_fit;
use crate::{EngineError, Result};
use serde::{Deserialize, Serialize};
use std::ops::Range;
use trainyard_tensor::Tensor;

/// What a run needs besides tensors to go on exactly.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct RunState {
    /// Steps done, skipped ones included.
    pub step: u64,
    /// Updates made.
    pub updates: u64,
    /// Steps skipped in a row up to now.
    pub skipped_in_a_row: u64,
    /// Steps skipped in all.
    pub skipped: u64,
    /// Samples consumed.
    pub samples: u64,
    /// Tokens consumed.
    pub tokens: u64,
    /// Seconds of training so far, over all sittings.
    pub seconds: f64,
    /// The steps that the schedule counts on, once known.
    pub schedule_steps: Option<u64>,
    /// The loss scale.
    pub scaler: LossScaler,
    /// Hash of the data's specification.
    pub dataset: String,
    /// Hash of the tokenizer.
    pub tokenizer: String,
}

/// The parts of a checkpoint.
const MODEL: &str = "model";
const OPTIMIZER: &str = "optimizer";

/// Copies what `rank` writes of the state; training may go on while the copy is written. What replicas hold alike they share, so that
/// every element is written once.
pub fn take(rank: &Rank, state: &RunState) -> Result<Snapshot<'static>> {
    let (replica, replicas) = rank.replica();
    let share = |range: &Range<usize>| {
        let cut = |part: usize| range.len() * part / replicas;
        cut(replica)..cut(replica + 1)
    };
    let mut model = Vec::new();
    for (id, spec) in rank.model().parameters() {
        let name = rank.model().parameter_name(id).expect("a parameter of the model has a name");
        let (range, values) = rank.parameters.master_part(id)?;
        model.extend(region(name, &spec.shape, share(&range), range, &values)?);
    }
    let mut optimizer = Vec::new();
    for (name, part) in optimizer_parts(rank)? {
        optimizer.extend(region(name, &[part.elements], share(&part.range), part.range, &part.values)?);
    }
    let parts = [(MODEL, model), (OPTIMIZER, optimizer)];
    Ok(Snapshot {
        step: state.step,
        parts: parts.into_iter().map(|(name, regions)| Part { name: name.into(), regions }).collect(),
        state: serde_json::to_value(state).expect("plain data is JSON"),
        attachments: Vec::new(),
    })
}

/// The elements `share` of those that are here, which are `range` of a tensor of `shape`.
fn region(
    name: String,
    shape: &[usize],
    share: Range<usize>,
    range: Range<usize>,
    values: &Tensor,
) -> Result<Option<Region<'static>>> {
    if share.is_empty() {
        return Ok(None);
    }
    let bytes = Bytes::from(values.view(share.start, [share.len()])?.as_bytes()?.to_vec());
    let range = range.start + share.start..range.start + share.end;
    Ok(Some(Region { name, dtype: values.dtype(), shape: shape.to_vec(), range, bytes }))
}

/// Puts a checkpoint's state into `rank`, bit for bit, whatever ranks wrote it. All ranks do this together.
pub fn restore(rank: &mut Rank, checkpoint: &Checkpoint) -> Result<RunState> {
    let state = read_state(checkpoint)?;
    load_parameters(rank, checkpoint)?;
    for (name, mut part) in optimizer_parts(rank)? {
        let shape = [part.elements];
        fill(checkpoint, OPTIMIZER, &name, &shape, part.range, &mut part.values)?;
    }
    rank.core(|core| (core.updates, core.scaler) = (state.updates, state.scaler));
    Ok(state)
}

/// The parameters alone, for evaluation, generation and export.
pub fn load_parameters(rank: &mut Rank, checkpoint: &Checkpoint) -> Result<()> {
    let specs: Vec<_> = rank.model().parameters().map(|(id, spec)| (id, spec.shape.clone())).collect();
    for (id, shape) in specs {
        let name = rank.model().parameter_name(id).expect("a parameter of the model has a name");
        let (range, mut values) = rank.parameters.master_part(id)?;
        fill(checkpoint, MODEL, &name, &shape, range, &mut values)?;
    }
    rank.refresh_copies()
}

/// The state's JSON.
pub fn read_state(checkpoint: &Checkpoint) -> Result<RunState> {
    serde_json::from_value(checkpoint.state().clone()).map_err(|error| {
        does_not_fit(format!("the state in {} is not that of a run: {error}", checkpoint.path().display()))
    })
}

fn optimizer_parts(rank: &Rank) -> Result<Vec<(String, StatePart)>> {
    let parts = rank.core(|core| core.optimizer.state())?.into_iter().map(|part| {
        let unit = &rank.model().units()[part.unit];
        (format!("{}.{}.{}", unit.name(), unit.parameters()[part.index].name, part.name), part)
    });
    Ok(parts.collect())
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
    Ok(checkpoint.read(part, name, range, target.as_bytes_mut()?)?)
}
