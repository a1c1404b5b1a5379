//! Lowerings: from a model and a strategy to programs.

use crate::instruction::{Action, Effect, Instruction, Keep, MemoryKind, Program};
use serde::{Deserialize, Serialize};

/// What a lowering knows of a unit.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct UnitShape {
    /// Its name, for prints and reports.
    pub name: String,
    /// Elements of its own parameters.
    pub parameters: u64,
    /// Units whose parameters it reads besides its own (tied embeddings).
    pub borrows: Vec<u32>,
    /// Bytes that a forward keeps, by [`Keep`]: everything, selective, input only.
    pub saved_bytes: [u64; 3],
}

/// What a lowering knows of a model: its units in order of execution. The last one computes the loss.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ModelShape {
    /// First to last.
    pub units: Vec<UnitShape>,
}

/// How a step is to be run.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Strategy {
    /// Micro-batches summed before an update.
    pub accumulation_steps: u32,
    /// Per unit, what forward keeps; the last unit's is always everything, since its backward follows at once.
    pub keep: Vec<Keep>,
    /// Whether the state is handed to the checkpoint writer after the update.
    pub snapshot: bool,
}

/// A strategy that does not fit the model.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum StrategyError {
    /// A step of nothing.
    #[error("a step needs at least one micro-batch: accumulation_steps is 0")]
    NoMicroBatch,
    /// No units.
    #[error("a model needs at least one unit")]
    NoUnits,
    /// The lengths disagree.
    #[error("what to keep is given for {given} units, but the model has {units}")]
    KeepLength {
        /// Entries given.
        given: usize,
        /// Units of the model.
        units: usize,
    },
}

/// The programs of every rank; today of one.
pub fn lower(model: &ModelShape, strategy: &Strategy) -> Result<Vec<Program>, StrategyError> {
    if strategy.accumulation_steps == 0 {
        return Err(StrategyError::NoMicroBatch);
    }
    if model.units.is_empty() {
        return Err(StrategyError::NoUnits);
    }
    if strategy.keep.len() != model.units.len() {
        return Err(StrategyError::KeepLength { given: strategy.keep.len(), units: model.units.len() });
    }
    let mut builder = Builder { instructions: Vec::new() };
    let units = model.units.len() as u32;
    let last = units - 1;
    let keep_of = |unit: u32| if unit == last { Keep::Everything } else { strategy.keep[unit as usize] };

    // All micro-batches are loaded first: the loss is a mean over the targets of the whole step, so their number must be
    // known before the first backward. A batch is a few kilobytes.
    let loads: Vec<u32> =
        (0..strategy.accumulation_steps).map(|m| builder.push(Action::Load { micro_batch: m }, &[], &[])).collect();

    for micro_batch in 0..strategy.accumulation_steps {
        for unit in 0..units {
            let keep = keep_of(unit);
            let after: &[u32] = if micro_batch == 0 && unit == 0 { &loads } else { &[] };
            let saved = model.units[unit as usize].saved_bytes[keep as usize] as i64;
            let effect = Effect { kind: MemoryKind::Activations, bytes: saved };
            builder.push(Action::Forward { unit, micro_batch, keep }, after, &[effect]);
        }
        for unit in (0..units).rev() {
            let saved = model.units[unit as usize].saved_bytes[keep_of(unit) as usize] as i64;
            let effect = Effect { kind: MemoryKind::Activations, bytes: -saved };
            builder.push(Action::Backward { unit, micro_batch }, &[], &[effect]);
        }
    }
    builder.push(Action::Clip, &[], &[]);
    let mut update = 0;
    for unit in 0..units {
        update = builder.push(Action::Update { unit }, &[], &[]);
    }
    if strategy.snapshot {
        builder.push(Action::Snapshot, &[update], &[]);
    }
    Ok(vec![Program {
        rank: 0,
        units: model.units.iter().map(|unit| unit.name.clone()).collect(),
        micro_batches: strategy.accumulation_steps,
        instructions: builder.instructions,
    }])
}

struct Builder {
    instructions: Vec<Instruction>,
}

impl Builder {
    fn push(&mut self, action: Action, after: &[u32], effects: &[Effect]) -> u32 {
        let effects = effects.iter().copied().filter(|effect| effect.bytes != 0).collect();
        self.instructions.push(Instruction { action, after: after.to_vec(), effects });
        self.instructions.len() as u32 - 1
    }
}
