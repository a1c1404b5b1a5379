//! The copy that forward reads, after an update: with zeros that stay, on a grid, or cast anew.

use super::{Chunk, Optimizer, Staged};
use crate::Result;
use crate::constraints::{Sparsity, Zeros};
use crate::state::{ParameterState, lock};

impl Optimizer {
    /// The weights of a chunk that are zero after update `update`, as its masters say before; None
    /// if no weight is kept at zero.
    pub(super) fn zeros(
        &self,
        unit: usize,
        chunk: &Chunk,
        staged: &Staged,
        parameters: &ParameterState,
        update: u64,
    ) -> Result<Option<Zeros>> {
        let Some(pruned) = self.pruned.get(unit).filter(|_| !chunk.range.is_empty()) else { return Ok(None) };
        let masters = self.masters_of(unit, chunk, staged, parameters)?;
        pruned.zeros(update, &chunk.range, &masters).map(Some)
    }

    /// Applies the constraints to the masters of a chunk and to the copy that forward reads, after
    /// their update.
    pub(super) fn constrain(
        &self,
        unit: usize,
        chunk: &Chunk,
        staged: &Staged,
        parameters: &ParameterState,
        zeros: Option<Zeros>,
    ) -> Result<Sparsity> {
        let held = parameters.unit(unit);
        if zeros.is_none() && !held.is_on_grid() {
            return Ok(Sparsity::default());
        }
        let masters = self.masters_of(unit, chunk, staged, parameters)?;
        let sparsity = match zeros {
            Some(zeros) => {
                // The grid writes the copy anew, with zeros for zeros.
                let copy = if held.is_on_grid() { None } else { held.copy_range(chunk.range.clone())? };
                zeros.clear(&chunk.range, &masters, copy.as_ref())?
            }
            None => Sparsity::default(),
        };
        held.round_copy(chunk.range.clone(), &masters)?;
        Ok(sparsity)
    }

    /// Casts a chunk's masters into its compute copy again. Needed when an update is skipped and
    /// the copy was not kept.
    pub fn refresh_copy(&self, unit: usize, chunk: u32, parameters: &ParameterState) -> Result<()> {
        let chunk = &self.units[unit][chunk as usize];
        let staged = lock(&chunk.here).clone();
        let masters = match staged.and_then(|staged| staged.masters) {
            Some(masters) => masters.view(0, [chunk.range.len()])?,
            None => parameters.unit(unit).master_range(chunk.range.clone())?,
        };
        if let Some(visit) = &*lock(&chunk.visit) {
            return visit.refresh_copy(&masters);
        }
        parameters.unit(unit).write_copy(chunk.range.clone(), &masters)
    }
}
