//! A rank's handling of offloaded state: the host lane's fetches and evictions, the memory that the
//! compute lane allocates and frees for them, and access to all state outside of steps.

use super::ledger::chunks_at_once;
use super::step::RunningStep;
use super::{Rank, cannot};
use crate::Result;
use crate::links::Link;
use crate::state::{lock, overlap};
use crate::tier::Stored;
use std::ops::Range;
use trainyard_autograd::ParamId;
use trainyard_program::{Action, Axis, Instruction, State};
use trainyard_tensor::{Device, Tensor, Usage};

/// The parameters that are set.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Setting {
    /// The masters.
    Masters,
    /// The masters, and frozen parameters.
    All,
}

impl Rank {
    /// True if some of the state that a checkpoint holds lies in a tier. Such a checkpoint must be
    /// written before the next step changes the state.
    pub fn keeps_state_in_a_tier(&self) -> bool {
        self.optimizer.store().is_some() || self.parameters.is_on_disk()
    }

    /// The host beside a GPU, if some of the state lies there.
    pub fn host(&self) -> Option<&Device> {
        self.tiers.host()
    }

    /// The host memory that this rank uses beside a GPU, now and at its peak.
    pub fn host_memory(&self) -> Usage {
        self.tiers.host_memory()
    }

    /// True if its tiers' files are read and written past the page cache.
    pub fn tiers_are_direct(&self) -> bool {
        self.tiers.stores().all(|store| store.is_direct())
    }

    /// Sets the masters of every parameter, then their compute copies. `set` is called once for
    /// each part that the rank holds, with the parameter, the range of its elements, and the tensor
    /// to write their values to. All ranks call this together.
    pub fn set_masters(&mut self, set: impl FnMut(ParamId, Range<usize>, &mut Tensor) -> Result<()>) -> Result<()> {
        self.set_own_masters(set, Setting::Masters)?;
        self.begin_outer()
    }

    /// As [`Rank::set_masters`], and sets frozen parameters too, for which `set` may be called
    /// several times.
    pub fn set_parameters(&mut self, set: impl FnMut(ParamId, Range<usize>, &mut Tensor) -> Result<()>) -> Result<()> {
        self.set_own_masters(set, Setting::All)?;
        self.begin_outer()
    }

    fn begin_outer(&self) -> Result<()> {
        match &self.outer {
            Some(outer) => lock(outer).begin_from(&self.parameters),
            None => Ok(()),
        }
    }

    /// As [`Rank::set_masters`], of this replica alone: the parameters of the last outer step stay.
    pub(crate) fn set_own_masters(
        &mut self,
        mut set: impl FnMut(ParamId, Range<usize>, &mut Tensor) -> Result<()>,
        what: Setting,
    ) -> Result<()> {
        let links = lock(&self.compute_links);
        for number in (0..self.model.units().len()).filter(|unit| self.parameters.holds(*unit)) {
            let unit = self.parameters.unit(number);
            if what == Setting::Masters && unit.is_frozen() {
                continue;
            }
            if self.parameters.is_offloaded() {
                match what {
                    Setting::Masters if unit.has_frozen() => {
                        self.parameters.take_to_read(number)?;
                        self.parameters.fetch(number)?;
                    }
                    _ => self.parameters.take(number)?,
                }
            }
            let mut of_unit = |index: usize, range: Range<usize>, values: &mut Tensor| {
                set(ParamId { unit: number as u32, index: index as u32 }, range, values)
            };
            if what == Setting::All {
                unit.set_frozen(&mut of_unit)?;
            }
            if self.optimizer.has_masters() {
                self.optimizer.set_masters(number, |range, masters| {
                    unit.set(range.clone(), masters, &mut of_unit)?;
                    unit.write_copy(range, masters)
                })?;
            } else {
                unit.set_here(&mut of_unit)?;
            }
            if !unit.is_frozen() {
                self.parameters.complete_copy(number, &links.shard)?;
            }
            if self.parameters.is_offloaded() {
                self.parameters.write(number)?;
                self.parameters.give_back(number);
            }
        }
        Ok(self.device.synchronize()?)
    }

    /// The f32 masters of a parameter's elements that this rank holds, read from wherever they lie.
    pub fn read_masters(&self, id: ParamId) -> Result<Vec<f32>> {
        let mut values = Vec::new();
        for (part, elements) in self.masters(id)? {
            match part {
                Stored::Here(tensor) => values.extend(tensor.to_f32_vec()?),
                Stored::Away(store, offset) => {
                    let mut bytes = vec![0; 4 * elements];
                    store.read_anywhere(offset, &mut bytes)?;
                    values.extend(bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)));
                }
            }
        }
        Ok(values)
    }

    /// The places, in order, of the masters of a parameter's elements that this rank holds, each
    /// with its number of elements.
    pub(crate) fn masters(&self, id: ParamId) -> Result<Vec<(Stored, usize)>> {
        let unit = self.parameters.unit(id.unit as usize);
        let range = overlap(&unit.layout().range(id.index as usize), &unit.held_masters());
        if range.is_empty() {
            return Ok(Vec::new());
        }
        if self.optimizer.has_masters() {
            return self.optimizer.masters_in_tier(id.unit as usize, &range);
        }
        let in_tier = match self.parameters.is_apart() {
            true => None,
            false => self.parameters.in_tier(id.unit as usize, &range)?,
        };
        let part = in_tier.map_or_else(|| unit.master_range(range.clone()).map(Stored::Here), Ok)?;
        Ok(vec![(part, range.len())])
    }

    /// Gathers a unit's parameters outside of steps: fetches this rank's part from its tier if it
    /// is offloaded, then gathers the other ranks' parts.
    pub(super) fn bring_whole(&self, unit: usize, shard: &Link) -> Result<()> {
        if self.parameters.is_offloaded() {
            self.parameters.take_to_read(unit)?;
            self.parameters.fetch(unit)?;
        }
        if self.parameters.is_sharded() {
            self.parameters.gather(unit, self.parameters.holding().shards, shard)?;
        }
        Ok(())
    }

    /// Frees the memory that [`Rank::bring_whole`] allocated.
    pub(super) fn let_go(&self, unit: usize) -> Result<()> {
        if self.parameters.is_sharded() {
            self.parameters.release(unit, self.parameters.holding().shards)?;
        }
        if self.parameters.is_offloaded() {
            self.parameters.give_back(unit);
        }
        Ok(())
    }

    /// Ends a step after every lane has finished: frees all device memory of offloaded state.
    pub(super) fn end_step(&self, step: &RunningStep<'_>) {
        self.optimizer.give_back_staging();
        self.gradients.leave_all();
        if self.parameters.is_offloaded() {
            (0..step.program().units.len()).for_each(|unit| self.parameters.give_back(unit));
        }
    }

    /// Runs an instruction of the host lane that moves state.
    pub(super) fn move_state(&self, action: Action, step: &RunningStep<'_>) -> Result<()> {
        match action {
            Action::Fetch { unit, state: State::Parameters } => self.parameters.fetch(unit as usize),
            Action::Evict { unit, state: State::Parameters, write: true } => self.parameters.write(unit as usize),
            Action::Evict { state: State::Parameters, write: false, .. } => Ok(()),
            Action::Fetch { unit, state: State::Optimizer { chunk } } => {
                self.optimizer.fetch(unit as usize, chunk, &self.gradients)
            }
            Action::Evict { unit, state: State::Optimizer { chunk }, .. } => {
                self.optimizer.evict(unit as usize, chunk, &self.parameters)
            }
            Action::Fetch { unit, state: State::Activations { micro_batch } } => {
                step.offloaded_activations().read(&self.tiers, (unit, micro_batch))
            }
            Action::Evict { unit, state: State::Activations { micro_batch }, .. } => {
                step.offloaded_activations().write(&self.tiers, (unit, micro_batch))
            }
            Action::Fetch { unit, state: State::Gradients } => self.gradients.fetch(unit as usize),
            Action::Evict { unit, state: State::Gradients, .. } => self.gradients.evict(unit as usize),
            other => Err(cannot(other)),
        }
    }

    /// Allocates memory for the gathers, fetches and reductions with these numbers.
    pub(super) fn take_for(&self, numbers: &[u32], step: &RunningStep<'_>) -> Result<()> {
        for number in numbers {
            match step.action(*number) {
                Action::Gather { unit, .. } => self.parameters.take_whole(unit as usize)?,
                Action::Fetch { unit, state: State::Parameters } => self.parameters.take_to_read(unit as usize)?,
                Action::Fetch { state: State::Optimizer { .. }, .. } => {
                    self.optimizer.take_staging(chunks_at_once(step.program()))?;
                }
                Action::Fetch { unit, state: State::Activations { micro_batch } } => {
                    step.offloaded_activations().take(&self.device, (unit, micro_batch))?;
                }
                Action::Fetch { unit, state: State::Gradients } | Action::Reduce { unit, .. } => {
                    self.gradients.take(unit as usize)?;
                }
                // Passes take the memory for the rows of experts.
                Action::Exchange { axis: Axis::Expert, .. } => {}
                action @ Action::Exchange { .. } => step.exchanges().take(action, self.inner_link(action).size())?,
                Action::Recv { .. } => step.take_message(&self.device, *number, self.parameters.compute())?,
                other => return Err(cannot(other)),
            }
        }
        Ok(())
    }

    /// Frees the memory of the releases and evictions with these numbers.
    fn give_back(&self, numbers: &[u32], step: &RunningStep<'_>) -> Result<()> {
        for number in numbers {
            match step.action(*number) {
                Action::Release { unit, keep } => self.parameters.release(unit as usize, keep as usize)?,
                Action::Evict { unit, state: State::Parameters, .. } => self.parameters.give_back(unit as usize),
                Action::Evict { unit, state: State::Activations { micro_batch }, .. } => {
                    step.offloaded_activations().give_back((unit, micro_batch));
                }
                Action::Evict { unit, state: State::Gradients, .. } => self.gradients.leave(unit as usize),
                Action::Exchange { axis: Axis::Expert, .. } => {}
                action @ Action::Exchange { .. } => step.exchanges().forget(action),
                Action::Send { unit, micro_batch, phase, .. } => step.messages().forget((phase, unit, micro_batch)),
                _ => {}
            }
        }
        Ok(())
    }

    /// Frees memory that is due before an instruction of the compute lane. Its dependencies have
    /// finished.
    pub(super) fn before(&self, step: &RunningStep<'_>, instruction: &Instruction) -> Result<()> {
        let due = lock(step.ledger()).begin(&instruction.after);
        self.give_back(&due, step)
    }

    /// Frees and allocates memory that is due after an instruction of the compute lane.
    pub(super) fn after(&self, step: &RunningStep<'_>, number: usize) -> Result<()> {
        let (due, takes) = lock(step.ledger()).end(number as u32);
        self.give_back(&due, step)?;
        self.take_for(&takes, step)
    }
}
