//! The state of a rank as a checkpoint, and back.
//!
//! A checkpoint holds the f32 masters under our parameter names (`block.3.attn.qkv.weight`) in part `model`, the optimizer's state per parameter in part
//! `optimizer`, and the rest (updates, loss scale, position of the data) as JSON. Names and shapes are of whole parameters, so what reads them needs
//! to know nothing of how the writer's buffers lay.

use crate::checkpoint::{Bytes, Checkpoint, Part, Region, Snapshot};
use crate::precision::LossScaler;
use crate::rank::Rank;
use crate::state::does_not_fit;
use crate::{EngineError, Result};
use serde::{Deserialize, Serialize};
use trainyard_tensor::{DType, Tensor};

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

/// Copies the state of `rank`; training may go on while the copy is written.
pub fn take(rank: &Rank, state: &RunState) -> Result<Snapshot<'static>> {
    let mut model = Vec::new();
    for (id, spec) in rank.model().parameters() {
        let name = rank.model().parameter_name(id).expect("a parameter of the model has a name");
        model.push(region(name, &rank.parameters.master(id, &spec.shape)?)?);
    }
    let mut optimizer = Vec::new();
    for (name, tensor) in optimizer_tensors(rank)? {
        optimizer.push(region(name, &tensor)?);
    }
    let parts = [(MODEL, model), (OPTIMIZER, optimizer)];
    Ok(Snapshot {
        step: state.step,
        parts: parts.into_iter().map(|(name, regions)| Part { name: name.into(), regions }).collect(),
        state: serde_json::to_value(state).expect("plain data is JSON"),
        attachments: Vec::new(),
    })
}

/// Puts a checkpoint's state into `rank`, bit for bit.
pub fn restore(rank: &mut Rank, checkpoint: &Checkpoint) -> Result<RunState> {
    let state = read_state(checkpoint)?;
    load_parameters(rank, checkpoint)?;
    for (name, mut tensor) in optimizer_tensors(rank)? {
        fill(checkpoint, OPTIMIZER, &name, &mut tensor)?;
    }
    rank.updates = state.updates;
    rank.scaler = state.scaler;
    Ok(state)
}

/// The parameters alone, for evaluation, generation and export.
pub fn load_parameters(rank: &mut Rank, checkpoint: &Checkpoint) -> Result<()> {
    let specs: Vec<_> = rank.model().parameters().map(|(id, spec)| (id, spec.shape.clone())).collect();
    for (id, shape) in specs {
        let name = rank.model().parameter_name(id).expect("a parameter of the model has a name");
        let mut master = rank.parameters.master(id, &shape)?;
        fill(checkpoint, MODEL, &name, &mut master)?;
    }
    rank.parameters.refresh_copies()
}

/// The state's JSON.
pub fn read_state(checkpoint: &Checkpoint) -> Result<RunState> {
    serde_json::from_value(checkpoint.state().clone()).map_err(|error| {
        does_not_fit(format!("the state in {} is not that of a run: {error}", checkpoint.path().display()))
    })
}

fn optimizer_tensors(rank: &Rank) -> Result<Vec<(String, Tensor)>> {
    let tensors = rank.optimizer.state()?.into_iter().map(|(unit, index, state, tensor)| {
        let unit = &rank.model().units()[unit];
        (format!("{}.{}.{state}", unit.name(), unit.parameters()[index].name), tensor)
    });
    Ok(tensors.collect())
}

fn region(name: String, tensor: &Tensor) -> Result<Region<'static>> {
    let bytes = Bytes::from(tensor.as_bytes()?.to_vec());
    Ok(Region { name, dtype: tensor.dtype(), shape: tensor.shape().to_vec(), bytes })
}

fn fill(checkpoint: &Checkpoint, part: &str, name: &str, target: &mut Tensor) -> Result<(), EngineError> {
    let stored = checkpoint.tensor(part, name)?;
    if stored.dtype != DType::F32 || stored.shape != target.shape().to_vec() {
        return Err(does_not_fit(format!(
            "{}: `{name}` is {} {:?}, and this run needs f32 {}",
            checkpoint.path().display(),
            stored.dtype,
            stored.shape,
            target.shape()
        )));
    }
    target.as_bytes_mut()?.copy_from_slice(stored.bytes);
    Ok(())
}
