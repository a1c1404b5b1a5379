//! Writes a rank's state to a checkpoint ([`take`]) and restores it ([`restore`]).
//!
//! A checkpoint has these parts:
//!
//! - `model`: the f32 masters under our parameter names (`block.3.attn.qkv.weight`). Frozen
//!   parameters have none: they are those that the run began with;
//! - `optimizer`: the optimizer's state per parameter;
//! - JSON: the rest (updates, loss scale, position in the data).
//!
//! Five more exist where they have anything in them:
//!
//! - `averages`: the average of the weights over steps, under the names of the parameters;
//! - `residuals`: what encoded messages left out, per parameter and rank (`...residual.rank.3`),
//!   and the velocities of momentum correction (`...velocity.rank.3`);
//! - `low_rank`: the factors Q with which the next low-rank sums begin, per unit (those of
//!   gradients of replicas that train apart `...replica.3`);
//! - `outer`: the momentum of outer steps. The parameters in `model` are then those of the last
//!   one;
//! - `replicas`: the optimizer's state and the counts of all replicas but the first
//!   (`state.replica.3`), and inside a round the masters of all (`...replica.3`).
//!
//! Names and shapes are those of whole parameters, and each rank writes elements that it holds:
//! [`Writes`] says which. So a reader need not know the layout of the writers' buffers.

mod averages;
mod consolidation;
mod encoded;
mod low_rank;
mod residuals;

pub use averages::load_averages;
pub(crate) use consolidation::load_consolidation;

use crate::checkpoint::{Bytes, Checkpoint, CheckpointError, PlacedRuns, Region, Runs, Snapshot, SnapshotPart};
use crate::early_stopping::EarlyStopping;
use crate::fp8::AmaxHistory;
use crate::health::History;
use crate::optimizer::{Behind, StatePart};
use crate::precision::LossScaler;
use crate::rank::{LowRankStart, Rank, Setting};
use crate::rounds::{Round, TimedSteps};
use crate::state::{does_not_fit, overlap};
use crate::tier::Stored;
use crate::{EngineError, Result};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use trainyard_autograd::ParamId;
use trainyard_model::{ParameterSpec, Patch};
use trainyard_tensor::{DType, Tensor};

/// The state of a run besides tensors: everything else that an exact resumption needs.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct RunState {
    /// Steps done, skipped ones included.
    pub step: u64,
    /// Updates made.
    pub updates: u64,
    /// Number of weights that the average of the weights has taken. Old checkpoints do not have it.
    #[serde(default)]
    pub averaged: u64,
    /// Updates made in each period of a schedule of freezing; empty if there is none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub period_updates: Vec<u64>,
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
    /// Losses and norms of the last steps.
    #[serde(default)]
    pub history: History,
    /// The round of replicas that make different numbers of steps; None if all make every step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub round: Option<Round>,
    /// Hash of the data's specification.
    pub dataset: String,
    /// Hash of the tokenizer.
    pub tokenizer: String,
}

/// The numbers of a [`RunState`] that a replica that trains apart has for itself: it skips steps
/// without the others. The first replica's are those of the run's state.
#[derive(Serialize, Deserialize)]
struct ReplicaState {
    updates: u64,
    skipped_in_a_row: u64,
    skipped: u64,
    history: History,
    /// The inner steps that it has timed in the round.
    #[serde(default)]
    timed: TimedSteps,
}

/// The name of a [`ReplicaState`], as JSON, in front of that of the replica.
const REPLICA_STATE: &str = "state";

/// Names of the parts of a checkpoint.
const MODEL: &str = "model";
const OPTIMIZER: &str = "optimizer";
const RESIDUALS: &str = "residuals";
const OUTER: &str = "outer";
const REPLICAS: &str = "replicas";

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
    let mut parts = parts(rank, copies)?;
    if let Some(replicas) = parts.iter_mut().find(|part| part.name == REPLICAS) {
        replicas.regions.extend(replica_state(rank, state));
    }
    Ok(Snapshot {
        step: state.step,
        parts,
        state: serde_json::to_value(RunState { amax_history: rank.amax_history(), ..state.clone() })
            .expect("plain data is JSON"),
        attachments: Vec::new(),
    })
}

/// The place of a rank among those that hold the same state: which of it the rank writes. Together
/// the ranks write every element once.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Writes {
    /// This rank's index among those that hold the same parts of every unit, and hold them as
    /// copies of each other.
    pub replica: usize,
    /// Number of these ranks. They divide what they write.
    pub replicas: usize,
    /// The same two numbers for the parts of experts, where ranks divide them: fewer ranks hold the
    /// same.
    pub of_experts: (usize, usize),
    /// True on the first rank of a tensor-parallel group. It writes the parameters that all of the
    /// group hold whole.
    pub first_of_tensor_group: bool,
    /// The units that this rank holds and a lower pipeline stage writes: borrowed ones.
    pub of_lower_stages: BTreeSet<usize>,
}

impl Writes {
    /// Everything that the rank holds.
    pub fn all() -> Writes {
        let (of_experts, of_lower_stages) = ((0, 1), BTreeSet::new());
        Writes { replica: 0, replicas: 1, of_experts, first_of_tensor_group: true, of_lower_stages }
    }

    fn of(rank: &Rank) -> Writes {
        let (replica, replicas) = rank.replica();
        let holding = rank.parameters.holding();
        // Ranks that divide sequences and shard nothing hold copies of each other too.
        let (copy, copies) = holding.copy();
        let of = |(replica, replicas): (usize, usize)| (replica * copies + copy, replicas * copies);
        let ((replica, replicas), of_experts) = (of((replica, replicas)), of(holding.experts));
        let of_lower_stages = BTreeSet::clone(&holding.of_lower_stages);
        let first_of_tensor_group = holding.tensor == 0;
        Writes { replica, replicas, of_experts, first_of_tensor_group, of_lower_stages }
    }

    /// The pieces that the rank writes of a tensor that is divided like the parameter `spec` of
    /// `unit`, if it holds the local elements `held`. Each has the place of its elements in `held`.
    fn pieces(&self, unit: usize, spec: &ParameterSpec, held: &Range<usize>) -> Vec<PlacedRuns> {
        if self.of_lower_stages.contains(&unit) || (spec.split.is_none() && !self.first_of_tensor_group) {
            return Vec::new();
        }
        let (replica, replicas) = if spec.of_experts { self.of_experts } else { (self.replica, self.replicas) };
        let cut = |part: usize| held.start + held.len() * part / replicas;
        let owned = placed(spec, held, cut(replica)..cut(replica + 1)).into_iter();
        owned.filter(|(_, owned)| *owned).map(|(placed, _)| placed).collect()
    }
}

/// The elements of the whole parameter that the elements `local` of a rank's part are, each with
/// its place in a buffer that holds `held`, and true if this rank writes them to checkpoints.
fn placed(spec: &ParameterSpec, held: &Range<usize>, local: Range<usize>) -> Vec<(PlacedRuns, bool)> {
    let mut all: Vec<(PlacedRuns, bool)> = Vec::new();
    for patch in spec.patches(local) {
        let Patch { rows, columns, width, local, local_stride, owned } = patch;
        let at = local - held.start;
        let first = rows.start * width + columns.start..rows.start * width + columns.end;
        if rows.len() > 1 && columns.len() < width {
            let runs = Runs { first, count: rows.len(), stride: width };
            all.push((PlacedRuns { runs, at, stride: local_stride }, owned));
            continue;
        }
        // One flat range, which may continue the one before.
        let flat = first.start..first.start + rows.len() * columns.len();
        match all.last_mut() {
            Some((last, of_it))
                if *of_it == owned
                    && last.runs.count == 1
                    && last.runs.first.end == flat.start
                    && last.at + last.runs.first.len() == at =>
            {
                *last = (Runs::from(last.runs.first.start..flat.end)).placed_at(last.at);
            }
            _ => all.push((Runs::from(flat).placed_at(at), owned)),
        }
    }
    all
}

fn parts(rank: &Rank, copies: bool) -> Result<Vec<SnapshotPart<'static>>> {
    let writes = Writes::of(rank);
    let mut model = Vec::new();
    for (id, spec) in held_parameters(rank) {
        let pieces = writes.pieces(id.unit as usize, spec, &rank.parameters.master_part_range(id));
        if !pieces.is_empty() {
            let shape = spec.whole_shape().to_vec();
            model.push(region(name_of(rank, id), shape, pieces, &rank.common_parameters(id)?, copies)?);
        }
    }
    let (replica, _) = if rank.is_apart() { rank.replica() } else { (0, 1) };
    let (copy, copies_of_each) = rank.parameters.holding().copy();
    let of_own = match rank.is_apart() {
        true => Writes { replica: copy, replicas: copies_of_each, ..writes.clone() },
        false => writes.clone(),
    };
    let (mut optimizer, mut replicas) = (Vec::new(), Vec::new());
    for StateTensor { part, stored } in optimizer_tensors(rank)? {
        let (spec, elements) = divided_like(rank, &part)?;
        // Replicas that train apart have states of their own.
        let pieces = of_own.pieces(part.unit, &spec, &part.range);
        if !pieces.is_empty() {
            let name = state_name(rank, &part);
            let (to, name) = match replica {
                0 => (&mut optimizer, name),
                _ => (&mut replicas, of_replica(&name, replica)),
            };
            let places = pieces.iter().flat_map(PlacedRuns::places);
            let bytes = match part.encoding {
                None => bytes(&stored, places, copies)?,
                Some(moment) => encoded::bytes_of(moment, &stored, places, copies)?,
            };
            to.push(region_of(name, vec![elements], pieces, bytes));
        }
    }
    let mut parts = vec![(MODEL, model, all_names(rank)), (OPTIMIZER, optimizer, all_state_names(rank))];
    if rank.is_apart() {
        if rank.is_in_round() {
            for (id, spec) in held_parameters(rank) {
                let pieces = of_own.pieces(id.unit as usize, spec, &rank.parameters.master_part_range(id));
                if !pieces.is_empty() {
                    let (name, shape) = (of_replica(&name_of(rank, id), replica), spec.whole_shape().to_vec());
                    replicas.push(region(name, shape, pieces, &rank.masters(id)?, copies)?);
                }
            }
        }
        parts.push((REPLICAS, replicas, all_replica_names(rank)));
    }
    if rank.has_averages() {
        parts.push((averages::PART, averages::regions(rank, &writes, copies)?, all_names(rank)));
    }
    if rank.has_outer_momentum() {
        parts.push((OUTER, momenta(rank, &writes, copies)?, all_names(rank).iter().map(momentum_name).collect()));
    }
    let names = rank.residual_names();
    if !names.is_empty() {
        let of_all = all_names(rank)
            .into_iter()
            .flat_map(|of| names.iter().map(move |name| format!("{of}.{name}")).collect::<Vec<_>>());
        parts.push((RESIDUALS, residuals::regions(rank, copies)?, of_all.collect()));
    }
    if !rank.low_rank_starts().is_empty() {
        parts.push((low_rank::PART, low_rank::regions(rank, copies)?, low_rank::names(rank)));
    }
    let part = |(name, regions, required): (&str, _, _)| SnapshotPart { name: name.into(), regions, required };
    Ok(parts.into_iter().map(part).collect())
}

/// The numbers of `state` that the rank's replica has for itself, as a tensor of bytes. The first
/// rank of each replica but the first writes them.
fn replica_state(rank: &Rank, state: &RunState) -> Option<Region<'static>> {
    let (replica, _) = rank.replica();
    if replica == 0 || !rank.parameters.holding().is_first_of_replica() {
        return None;
    }
    let RunState { updates, skipped_in_a_row, skipped, ref history, ref round, .. } = *state;
    let timed = round.as_ref().map(|round| round.timed).unwrap_or_default();
    let own = ReplicaState { updates, skipped_in_a_row, skipped, history: history.clone(), timed };
    let text = serde_json::to_vec(&own).expect("plain data is JSON");
    Some(Region {
        name: of_replica(REPLICA_STATE, replica),
        dtype: DType::U8,
        shape: vec![text.len()],
        runs: vec![Runs::from(0..text.len())],
        bytes: Bytes::from(text),
    })
}

/// Reads what [`replica_state`] wrote.
fn read_replica_state(checkpoint: &Checkpoint, replica: usize) -> Result<ReplicaState> {
    let name = of_replica(REPLICA_STATE, replica);
    let mut text = vec![0; checkpoint.entry(REPLICAS, &name)?.elements()];
    checkpoint.read(REPLICAS, &name, 0..text.len(), &mut text)?;
    serde_json::from_slice(&text).map_err(|error| {
        does_not_fit(format!("`{name}` in {} is not the state of a replica: {error}", checkpoint.path().display()))
    })
}

/// The outer momenta that this rank writes.
fn momenta(rank: &Rank, writes: &Writes, copies: bool) -> Result<Vec<Region<'static>>> {
    let mut all = Vec::new();
    for (id, spec) in held_parameters(rank) {
        let held = rank.parameters.master_part_range(id);
        let pieces = writes.pieces(id.unit as usize, spec, &held);
        if let Some(momentum) = rank.outer_momentum(id)?.filter(|_| !pieces.is_empty()) {
            let stored = [(Stored::Here(momentum), held.len())];
            all.push(region(momentum_name(&name_of(rank, id)), spec.whole_shape().to_vec(), pieces, &stored, copies)?);
        }
    }
    Ok(all)
}

/// `block.3.attn.qkv.weight.outer_momentum`
fn momentum_name(parameter: &String) -> String {
    format!("{parameter}.outer_momentum")
}

/// `block.3.attn.qkv.weight.replica.1`
fn of_replica(name: &str, replica: usize) -> String {
    format!("{name}.replica.{replica}")
}

/// The names in the part of replicas, of all replicas.
fn all_replica_names(rank: &Rank) -> BTreeSet<String> {
    let (_, replicas) = rank.replica();
    let states = all_state_names(rank).into_iter().chain([REPLICA_STATE.to_owned()]);
    let states = states.flat_map(|name| (1..replicas).map(move |r| of_replica(&name, r)));
    let masters = if rank.is_in_round() { all_names(rank) } else { BTreeSet::new() };
    states.chain(masters.into_iter().flat_map(|name| (0..replicas).map(move |r| of_replica(&name, r)))).collect()
}

/// Number of replicas whose own state a checkpoint has.
fn replicas_in(checkpoint: &Checkpoint) -> usize {
    let index = |name: &str| name.rsplit_once(".replica.").and_then(|(_, index)| index.parse::<usize>().ok());
    checkpoint.names(REPLICAS).filter_map(index).max().map_or(1, |last| last + 1)
}

/// The state in a checkpoint with which `rank` does not go on, in words. It is not an error: a
/// codec or a rule may be changed between sittings.
pub(crate) fn left_behind(rank: &Rank, checkpoint: &Checkpoint) -> Vec<String> {
    let mut all: Vec<String> = averages::left_behind(rank, checkpoint).into_iter().collect();
    if checkpoint.names(RESIDUALS).next().is_some() && rank.residuals().is_empty() {
        all.push(
            "what earlier messages left out is dropped, because no codec with error feedback is set now".to_owned(),
        );
    }
    let is_velocity = |name: &str| name.contains(".velocity.");
    if checkpoint.names(RESIDUALS).any(is_velocity)
        && !rank.residual_names().iter().any(|name| name.starts_with("velocity."))
    {
        all.push(
            "the velocities of gradients are dropped, because compression.top_k_momentum is not set now".to_owned(),
        );
    }
    let (before, now) = (replicas_in(checkpoint), rank.replica().1);
    if !rank.is_apart() && (before > 1 || checkpoint.names(OUTER).next().is_some()) {
        all.push(
            "the run goes on from the parameters of the last outer step: update.rule is \"synchronous\" now, and the outer momentum and the \
             optimizer state of replicas other than the first are dropped"
                .to_owned(),
        );
    }
    if rank.is_apart() && before > 1 && before != now {
        all.push(format!(
            "{before} replicas had optimizer states of their own, and there are {now} now: replica r goes on with that of replica r modulo {before}"
        ));
    }
    all
}

/// Bytes of the copy that [`take`] makes.
pub(crate) fn bytes_copied(rank: &Rank) -> Result<usize> {
    let parts = parts(rank, false)?;
    let regions = parts.iter().flat_map(|part| &part.regions);
    Ok(regions.map(|region| region.bytes.live_len()).sum())
}

/// Bytes of the tensors of a checkpoint, whatever rank writes them.
pub(crate) fn bytes_of_tensors(rank: &Rank) -> u64 {
    let of = |(_, spec): (ParamId, &ParameterSpec)| {
        let elements: usize = spec.whole_shape().iter().product();
        elements + rank.optimizer.state_elements(spec)
    };
    let state = |(_, spec): (ParamId, &ParameterSpec)| rank.optimizer.state_elements(spec);
    let whole = |(_, spec): (ParamId, &ParameterSpec)| spec.whole_shape().iter().product::<usize>();
    let (states, parameters): (usize, usize) =
        (rank.model().parameters().map(state).sum(), rank.model().parameters().map(whole).sum());
    // Replicas that train apart have states of their own, and inside a round masters too.
    let replicas = if rank.is_apart() { rank.replica().1 } else { 1 };
    let apart = if rank.is_apart() { replicas * parameters + (replicas - 1) * states } else { 0 };
    let momentum = if rank.has_outer_momentum() { parameters } else { 0 };
    let residuals = rank.residual_names().len() * parameters;
    let averages = if rank.has_averages() { trained_parameters(rank).map(whole).sum() } else { 0 };
    let of_start = |start: &LowRankStart| start.q.elements() * if start.is_of_replica { replicas } else { 1 };
    let starts: usize = rank.low_rank_starts().iter().map(of_start).sum();
    4 * (rank.model().parameters().map(of).sum::<usize>() + apart + momentum + residuals + starts + averages) as u64
}

/// The region of the elements `pieces` of a tensor. `stored` are the elements that the rank holds.
fn region(
    name: String,
    shape: Vec<usize>,
    pieces: Vec<PlacedRuns>,
    stored: &[(Stored, usize)],
    copies: bool,
) -> Result<Region<'static>> {
    let bytes = bytes(stored, pieces.iter().flat_map(PlacedRuns::places), copies)?;
    Ok(region_of(name, shape, pieces, bytes))
}

fn region_of(name: String, shape: Vec<usize>, pieces: Vec<PlacedRuns>, bytes: Bytes<'static>) -> Region<'static> {
    let runs = pieces.into_iter().map(|placed| placed.runs).collect();
    Region { name, dtype: DType::F32, shape, runs, bytes }
}

/// The bytes of the elements `places` of the concatenation of `parts`.
fn bytes(
    parts: &[(Stored, usize)],
    places: impl Iterator<Item = Range<usize>>,
    copies: bool,
) -> Result<Bytes<'static>> {
    let mut ends = Vec::with_capacity(parts.len());
    parts.iter().fold(0, |start, (_, elements)| {
        ends.push(start + elements);
        start + elements
    });
    let (mut live, mut stored) = (Vec::new(), Vec::new());
    for place in joined(places) {
        let first = ends.partition_point(|end| *end <= place.start);
        for ((part, elements), end) in parts.iter().zip(&ends).skip(first) {
            let start = end - elements;
            let held = overlap(&place, &(start..*end));
            if held.is_empty() {
                break;
            }
            match part {
                Stored::Here(values) => live.push(values.view(held.start - start, [held.len()])?),
                Stored::Away(store, offset) => {
                    stored.push((Arc::clone(store), offset + 4 * (held.start - start) as u64, 4 * held.len()));
                }
            }
        }
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

/// The same places, neighbours joined.
fn joined(places: impl Iterator<Item = Range<usize>>) -> Vec<Range<usize>> {
    let mut all: Vec<Range<usize>> = Vec::new();
    for place in places {
        match all.last_mut() {
            Some(last) if last.end == place.start => last.end = place.end,
            _ => all.push(place),
        }
    }
    all
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
    // Weights are rounded to a grid from some update on.
    rank.parameters.set_updates(state.updates);
    load_parameters(rank, checkpoint)?;
    let own = if rank.is_apart() { rank.replica().0 % replicas_in(checkpoint) } else { 0 };
    rank.optimizer.set_state(|part, values| {
        check_columns(checkpoint, &state_name(rank, part), part)?;
        let (spec, elements) = divided_like(rank, part)?;
        let name = state_name(rank, part);
        let (from, name) = if own == 0 { (OPTIMIZER, name) } else { (REPLICAS, of_replica(&name, own)) };
        fill(checkpoint, from, &name, &[elements], &spec, part.range.clone(), values).map_err(of_another_optimizer)
    })?;
    state.averaged = averages::restore(rank, checkpoint, state.averaged)?;
    restore_apart(rank, checkpoint, own)?;
    residuals::restore(rank, checkpoint)?;
    low_rank::restore(rank, checkpoint)?;
    if own > 0 {
        let ReplicaState { updates, skipped_in_a_row, skipped, history, timed } = read_replica_state(checkpoint, own)?;
        let round = state.round.map(|round| Round { timed, ..round });
        state = RunState { updates, skipped_in_a_row, skipped, history, round, ..state };
    }
    state.scaler = state.scaler.continued(rank.scaler());
    let RunState { updates, averaged, scaler, .. } = state;
    rank.core(|core| {
        (core.updates, core.averaged, core.scaler) = (updates, averaged, scaler);
        core.period_updates = state.period_updates.clone();
    });
    Ok(state)
}

/// Restores outer momentum, and inside a round the masters of the replica `own`.
fn restore_apart(rank: &mut Rank, checkpoint: &Checkpoint, own: usize) -> Result<()> {
    if !rank.is_apart() {
        return Ok(());
    }
    let named = |(id, spec): (ParamId, &ParameterSpec)| (id, (name_of(rank, id), spec.clone()));
    let specs: BTreeMap<_, _> = trained_parameters(rank).map(named).collect();
    for (id, (name, spec)) in specs.iter().filter(|(id, _)| rank.parameters.holds(id.unit as usize)) {
        let name = momentum_name(name);
        if let Some(mut momentum) = rank.outer_momentum(*id)?.filter(|_| checkpoint.entry(OUTER, &name).is_ok()) {
            let held = rank.parameters.master_part_range(*id);
            fill(checkpoint, OUTER, &name, spec.whole_shape(), spec, held, &mut momentum)?;
        }
    }
    let in_round = specs.values().any(|(name, _)| checkpoint.entry(REPLICAS, &of_replica(name, own)).is_ok());
    if in_round {
        rank.set_own_masters(
            |id, range, values| {
                let (name, spec) = &specs[&id];
                fill(checkpoint, REPLICAS, &of_replica(name, own), spec.whole_shape(), spec, range, values)
            },
            Setting::Masters,
        )?;
        rank.set_in_round(true);
    }
    Ok(())
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
            // `left_behind` tells what is not read of these.
            RESIDUALS | low_rank::PART | OUTER | REPLICAS | averages::PART => continue,
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
    load_from(MODEL, rank, checkpoint)
}

/// Sets the parameters to the tensors of `part` under their names.
fn load_from(part: &str, rank: &mut Rank, checkpoint: &Checkpoint) -> Result<()> {
    let names = all_names(rank);
    checkpoint.check_all_read(part, |name| names.contains(name))?;
    let named = |(id, spec): (ParamId, &ParameterSpec)| (id, (name_of(rank, id), spec.clone()));
    let specs: BTreeMap<_, _> = rank.model().parameters().map(named).collect();
    rank.set_masters(|id, range, values| {
        let (name, spec) = &specs[&id];
        fill(checkpoint, part, name, spec.whole_shape(), spec, range, values)
    })
}

/// Loads one of the tensors behind the optimizer's state from a part of `checkpoint` that has the
/// names and shapes of the parameters.
fn load_behind(rank: &mut Rank, which: Behind, checkpoint: &Checkpoint, part: &str) -> Result<()> {
    let specs: BTreeMap<_, _> =
        trained_parameters(rank).map(|(id, spec)| (id, (name_of(rank, id), spec.clone()))).collect();
    rank.set_behind(which, |id, range, values| {
        let (name, spec) = &specs[&id];
        fill(checkpoint, part, name, spec.whole_shape(), spec, range, values)
    })
}

/// Reads the JSON part of a checkpoint.
pub fn read_state(checkpoint: &Checkpoint) -> Result<RunState> {
    serde_json::from_value(checkpoint.state().clone()).map_err(|error| {
        does_not_fit(format!("the state in {} is not that of a run: {error}", checkpoint.path().display()))
    })
}

/// The part of a state tensor that a rank holds.
struct StateTensor {
    /// All of it that the rank holds.
    part: StatePart,
    /// The places of these elements, in order, each with its number of elements.
    stored: Vec<(Stored, usize)>,
}

fn optimizer_tensors(rank: &Rank) -> Result<Vec<StateTensor>> {
    let mut all: BTreeMap<(usize, usize, &str), StateTensor> = BTreeMap::new();
    for (part, stored) in rank.optimizer.state()? {
        let (range, elements) = (part.range.clone(), part.range.len());
        let key = (part.unit, part.index, part.name);
        let tensor = all.entry(key).or_insert_with(|| StateTensor { part, stored: Vec::new() });
        // Chunks come in order.
        tensor.part.range.end = range.end;
        tensor.stored.push((stored, elements));
    }
    Ok(all.into_values().collect())
}

/// A parameter that is divided over ranks like a state tensor, and the elements of all of the
/// tensor. State with an element for each of the parameter's is divided like the parameter; other
/// state is not divided over a tensor-parallel group.
///
/// # Errors
/// If the parameter is split and its state is not of its size: moments of rows and columns.
fn divided_like(rank: &Rank, part: &StatePart) -> Result<(ParameterSpec, usize)> {
    let spec = &rank.model().units()[part.unit].parameters()[part.index];
    if part.elements == spec.elements() {
        return Ok((spec.clone(), spec.whole_shape().iter().product()));
    }
    if spec.split.is_some() {
        let name = state_name(rank, part);
        return Err(does_not_fit(format!("`{name}` belongs to whole matrices, and its parameter is split over ranks")));
    }
    Ok((ParameterSpec { shape: vec![part.elements], ..spec.clone() }, part.elements))
}

fn name_of(rank: &Rank, id: ParamId) -> String {
    rank.model().parameter_name(id).expect("a parameter of the model has a name")
}

/// The parameters that are trained, those that other ranks hold included.
fn trained_parameters(rank: &Rank) -> impl Iterator<Item = (ParamId, &ParameterSpec)> {
    rank.model().parameters().filter(|(_, spec)| spec.trained)
}

/// Those of them of which this rank may hold a part.
fn held_parameters(rank: &Rank) -> impl Iterator<Item = (ParamId, &ParameterSpec)> {
    trained_parameters(rank).filter(|(id, _)| rank.parameters.holds(id.unit as usize))
}

/// The names of all parameters that are trained, those that other ranks hold included.
fn all_names(rank: &Rank) -> BTreeSet<String> {
    trained_parameters(rank).map(|(id, _)| name_of(rank, id)).collect()
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

/// Reads into `target` the local elements `range` of a tensor of `shape`, which is divided like the
/// parameter `spec`.
fn fill(
    checkpoint: &Checkpoint,
    part: &str,
    name: &str,
    shape: &[usize],
    spec: &ParameterSpec,
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
    let wanted: Vec<_> = placed(spec, &range, range.clone()).into_iter().map(|(placed, _)| placed).collect();
    Ok(target.overwrite_bytes(|bytes| checkpoint.read_runs(part, name, &wanted, bytes))??)
}

#[cfg(test)]
mod tests;
