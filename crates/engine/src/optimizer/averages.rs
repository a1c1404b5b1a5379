//! The average of the weights over steps: an element for each of a chunk's masters, behind the
//! chunk's state. The gaps between parameters are averaged too: they are zero and stay zero.

use super::{Behind, Chunk, Optimizer, Staged};
use crate::Result;
use crate::averaging::Averaging;
use crate::state::{ParameterState, lock, overlap};
use crate::tier::Stored;
use std::ops::Range;
use std::sync::Arc;
use trainyard_tensor::ops::optim;
use trainyard_tensor::{DType, Purpose, Tensor};

/// Elements that are exchanged with the average at a time.
const AT_ONCE: usize = 1 << 18;

impl Optimizer {
    /// The rule of the average; None if there is no average.
    pub fn averaging(&self) -> Option<Averaging> {
        self.settings.as_ref().and_then(|settings| settings.averaging)
    }

    /// Takes the masters of a chunk into its average, of which they are a `share` then.
    pub(super) fn average(
        &self,
        unit: usize,
        chunk: &Chunk,
        staged: &Staged,
        parameters: &ParameterState,
        share: f32,
    ) -> Result<()> {
        let Some(mut average) = chunk.behind(staged.state.as_ref(), Behind::Average)? else { return Ok(()) };
        Ok(optim::average(share, &self.masters_of(unit, chunk, staged, parameters)?, &mut average)?)
    }

    /// The places of the average of elements `range` of a unit, by chunk, each with its number of
    /// elements.
    pub fn averages(&self, unit: usize, range: &Range<usize>) -> Result<Vec<(Stored, usize)>> {
        let part = |chunk: &Chunk| {
            let held = overlap(range, &chunk.range);
            let (start, within) = (chunk.average?, held.start - chunk.range.start);
            let stored = match (self.store(), lock(&chunk.here).as_ref()) {
                (Some(store), _) => {
                    let offset = chunk.offset + self.masters_bytes(chunk) + 4 * (start + within) as u64;
                    Ok(Stored::Away(Arc::clone(store), offset))
                }
                (None, Some(Staged { state: Some(state), .. })) => {
                    state.view(start + within, [held.len()]).map(Stored::Here).map_err(Into::into)
                }
                (None, _) => unreachable!("an average lies in a state that is here"),
            };
            Some(stored.map(|stored| (stored, held.len())))
        };
        self.units[unit].iter().filter(|chunk| !overlap(range, &chunk.range).is_empty()).filter_map(part).collect()
    }

    /// Exchanges the masters of a unit with their average, and writes this rank's part of the
    /// compute copy, which must be on the device. A second call restores every bit.
    pub fn swap_averages(&self, unit: usize, parameters: &ParameterState) -> Result<()> {
        for chunk in &self.units[unit] {
            let staged = self.bring(chunk)?;
            let Some(average) = chunk.behind(staged.state.as_ref(), Behind::Average)? else { continue };
            let masters = self.masters_of(unit, chunk, &staged, parameters)?;
            swap(&masters, &average)?;
            parameters.unit(unit).write_copy(chunk.range.clone(), &masters)?;
            self.take_back(chunk, &staged)?;
        }
        Ok(())
    }
}

/// Exchanges the values of two tensors.
pub(crate) fn swap(a: &Tensor, b: &Tensor) -> Result<()> {
    let elements = a.elements();
    let spare = a.device().empty([AT_ONCE.min(elements)], DType::F32, Purpose::Workspace)?;
    for start in (0..elements).step_by(AT_ONCE) {
        let n = AT_ONCE.min(elements - start);
        let (mut a, mut b, mut spare) = (a.view(start, [n])?, b.view(start, [n])?, spare.view(0, [n])?);
        spare.copy_from(&a)?;
        a.copy_from(&b)?;
        b.copy_from(&spare)?;
    }
    Ok(())
}
