//! The average of the weights over steps, as seen by a rank.

use super::Rank;
use crate::Result;
use crate::state::{lock, overlap};
use crate::tier::Stored;
use trainyard_autograd::ParamId;

impl Rank {
    /// True if an average of the weights is kept.
    pub fn has_averages(&self) -> bool {
        self.optimizer.averaging().is_some()
    }

    /// Number of weights that the average of the weights has taken.
    pub fn averaged(&self) -> u64 {
        lock(&self.core).averaged
    }

    /// The places, in order, of the average of a parameter's elements that this rank holds, each
    /// with its number of elements.
    pub(crate) fn averages(&self, id: ParamId) -> Result<Vec<(Stored, usize)>> {
        let unit = self.parameters.unit(id.unit as usize);
        let range = overlap(&unit.layout().range(id.index as usize), &unit.held_masters());
        self.optimizer.averages(id.unit as usize, &range)
    }

    /// Exchanges the weights with their average, masters and compute copies. A second call restores
    /// every bit. No step may run and no checkpoint may be written from the state in between. All
    /// ranks call this together.
    pub fn swap_averages(&self) -> Result<()> {
        let links = lock(&self.compute_links);
        for number in (0..self.model.units().len()).filter(|unit| self.parameters.holds(*unit)) {
            if self.parameters.unit(number).is_frozen() {
                continue;
            }
            if self.parameters.is_offloaded() {
                self.parameters.take_to_read(number)?;
                self.parameters.fetch(number)?;
            }
            self.optimizer.swap_averages(number, &self.parameters)?;
            self.parameters.complete_copy(number, &links.shard)?;
            if self.parameters.is_offloaded() {
                self.parameters.write(number)?;
                self.parameters.give_back(number);
            }
        }
        Ok(self.device.synchronize()?)
    }
}
