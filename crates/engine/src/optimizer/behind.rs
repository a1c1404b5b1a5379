//! Tensors behind the state of each chunk, of an element for each of the chunk's masters: the
//! average of the weights, and what is held of an earlier run. Optimizers do not know of them.

use super::{Chunk, Optimizer, Staged};
use crate::Result;
use crate::state::{ParameterState, lock};
use std::ops::Range;
use trainyard_tensor::Tensor;

/// One of these tensors.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Behind {
    /// The average of the weights over steps.
    Average,
    /// The Fisher information of an earlier run.
    Fisher,
    /// The weights of that run.
    HeldWeights,
}

impl Chunk {
    /// The tensor in the chunk's state; None if there is none.
    pub(super) fn behind(&self, state: Option<&Tensor>, which: Behind) -> Result<Option<Tensor>> {
        let start = match which {
            Behind::Average => self.average,
            Behind::Fisher => self.held,
            Behind::HeldWeights => self.held.map(|start| start + self.held_stride()),
        };
        let Some((start, state)) = start.zip(state) else { return Ok(None) };
        Ok(Some(state.view(start, [self.range.len()])?))
    }
}

impl Optimizer {
    /// Sets one of the tensors of a unit. `set` is called for each chunk with the range of its
    /// elements and the tensor to write their values to.
    pub(crate) fn set_behind(
        &self,
        unit: usize,
        which: Behind,
        mut set: impl FnMut(Range<usize>, &mut Tensor) -> Result<()>,
    ) -> Result<()> {
        for chunk in &self.units[unit] {
            let staged = self.bring(chunk)?;
            if let Some(mut values) = chunk.behind(staged.state.as_ref(), which)? {
                set(chunk.range.clone(), &mut values)?;
                self.take_back(chunk, &staged)?;
            }
        }
        Ok(())
    }

    /// The masters of a chunk, which are in memory.
    pub(super) fn masters_of(
        &self,
        unit: usize,
        chunk: &Chunk,
        staged: &Staged,
        parameters: &ParameterState,
    ) -> Result<Tensor> {
        match &staged.masters {
            Some(masters) => Ok(masters.view(0, [chunk.range.len()])?),
            None => parameters.unit(unit).master_range(chunk.range.clone()),
        }
    }

    /// The buffers of a chunk, outside of steps: those in memory, or its contents in the store.
    pub(super) fn bring(&self, chunk: &Chunk) -> Result<Staged> {
        let here = lock(&chunk.here).clone();
        let Some(store) = self.store() else {
            return here.map_or_else(|| self.buffers(chunk.range.len(), chunk.state_elements), Ok);
        };
        let mut staged = self.buffers(chunk.range.len(), chunk.state_elements)?;
        self.read(store, chunk, &mut staged)?;
        Ok(staged)
    }

    /// Writes what [`Optimizer::bring`] read from a store back to it.
    pub(super) fn take_back(&self, chunk: &Chunk, staged: &Staged) -> Result<()> {
        let Some(store) = self.store() else { return Ok(()) };
        self.write_masters(store, chunk, staged)?;
        self.write_state(store, chunk, staged)
    }
}
