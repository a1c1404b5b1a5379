//! The first magnitudes of adapters that have some (DoRA, Liu et al. 2024): the norms of the rows
//! of their weights, in the compute dtype and by the arithmetic of forward, so that at first
//! nothing is scaled.

use super::{Rank, exchanges};
use crate::Result;
use crate::state::lock;
use std::collections::BTreeMap;
use std::ops::Range;
use trainyard_autograd::functions::{norms_of_squares, row_norms, row_squares};
use trainyard_autograd::{ParamId, Parameters};
use trainyard_model::tuning;
use trainyard_program::{Change, Collective};
use trainyard_tensor::Tensor;

impl Rank {
    /// As [`Rank::set_parameters`]; the magnitudes of adapters become those of their weights. All
    /// ranks call this together.
    pub(crate) fn set_parameters_anew(
        &mut self,
        mut set: impl FnMut(ParamId, Range<usize>, &mut Tensor) -> Result<()>,
    ) -> Result<()> {
        self.set_parameters(&mut set)?;
        let magnitudes = self.magnitudes()?;
        if magnitudes.is_empty() {
            return Ok(());
        }
        self.set_masters(|id, range, values| match magnitudes.get(&id) {
            Some(of_rows) => Ok(values.overwrite(|values: &mut [f32]| values.copy_from_slice(&of_rows[range]))?),
            None => set(id, range, values),
        })
    }

    /// The norms of the rows that adapters with magnitudes add to, by the magnitudes' parameter.
    fn magnitudes(&self) -> Result<BTreeMap<ParamId, Vec<f32>>> {
        let links = lock(&self.compute_links);
        let mut all = BTreeMap::new();
        if self.device.is_meta() {
            return Ok(all);
        }
        for unit in (0..self.model.units().len()).filter(|unit| self.parameters.holds(*unit)) {
            let of_unit: Vec<_> = self.model.adapters().iter().filter(|(id, _)| id.unit as usize == unit).collect();
            if of_unit.iter().all(|(_, adapter)| adapter.magnitude.is_none()) {
                continue;
            }
            self.bring_whole(unit, &links.shard)?;
            let parameters = self.model.units()[unit].parameters();
            for (weight, adapter) in of_unit {
                let value = |id| self.parameters.parameter(id).map(|parameter| parameter.value);
                let Some(id) = adapter.magnitude else { continue };
                let (w, a, b) = (value(*weight)?, value(adapter.a)?, value(adapter.b)?);
                let norms = match tuning::has_parts_of_rows(&parameters[weight.index as usize]) {
                    true => {
                        let sum = Some(Change::By(Collective::AllReduce));
                        let squares = exchanges::change(&row_squares(&w, &a, &b, adapter)?, sum, &links.tensor)?;
                        norms_of_squares(&squares, w.dtype())?
                    }
                    false => row_norms(&w, &a, &b, adapter)?,
                };
                let norms = norms.to_f32_vec()?;
                let (mut first, mut of_rows) = (0, Vec::new());
                for outputs in adapter.outputs.iter() {
                    if outputs.from.is_some() {
                        of_rows.extend_from_slice(&norms[first..first + outputs.count]);
                    }
                    first += outputs.count;
                }
                all.insert(id, of_rows);
            }
            self.let_go(unit)?;
        }
        Ok(all)
    }
}
