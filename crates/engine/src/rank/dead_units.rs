//! Units of feed-forward layers that learn nothing any more.
//!
//! A unit whose activation is zero for every token passes no gradient to the weights before it. The
//! first moments of those weights then shrink by a constant factor a step, so a row of first
//! moments that is a millionth of its layer's median has seen no gradient for long: for 131 steps
//! at a decay of 0.9. An expert that is sent no tokens looks the same.

use super::Rank;
use crate::Result;
use crate::tier::Stored;
use std::collections::BTreeMap;
use trainyard_base::median;
use trainyard_tensor::cpu::Isa;
use trainyard_tensor::ops::optim::moments8;

/// The part of the layer's median below which a row has seen no gradient for long.
const DEAD: f64 = 1e-6;
/// Names of first moments.
const FIRST_MOMENTS: [&str; 2] = ["exp_avg", "momentum_buffer"];
/// Endings of the names of weights that lead to the activations of feed-forward layers.
const INTO_ACTIVATIONS: &str = "up.weight";

impl Rank {
    /// By unit of the model, the rows of the feed-forward layer's first weights that have seen no
    /// gradient for long, and all rows that were looked at. Rows of which the rank holds a part and
    /// rows whose state lies in a tier are left out.
    pub fn dead_rows(&self) -> Result<Vec<[u64; 2]>> {
        let mut all = vec![[0, 0]; self.model.units().len()];
        let mut largest: BTreeMap<(usize, usize), Vec<f64>> = BTreeMap::new();
        for (part, stored) in self.optimizer.state()? {
            let spec = &self.model.units()[part.unit].parameters()[part.index];
            let (Stored::Here(values), [_, width]) = (stored, &spec.shape[..]) else { continue };
            if !FIRST_MOMENTS.contains(&part.name) || !spec.name.ends_with(INTO_ACTIVATIONS) {
                continue;
            }
            let mut values = values.to_f32_vec()?;
            if let Some(moment) = part.encoding {
                let blocks = std::mem::replace(&mut values, vec![0.0; part.range.len()]);
                moments8::decode(Isa::detect(), moment, &blocks, &mut values);
            }
            // The first element of the first whole row.
            let skipped = part.range.start.next_multiple_of(*width) - part.range.start;
            let rows = values.get(skipped..).unwrap_or_default().chunks_exact(*width);
            let size = |row: &[f32]| f64::from(row.iter().fold(0.0f32, |most, value| most.max(value.abs())));
            largest.entry((part.unit, part.index)).or_default().extend(rows.map(size));
        }
        for ((unit, _), sizes) in largest {
            let Some(usual) = median(sizes.iter().copied()).filter(|usual| *usual > 0.0) else { continue };
            all[unit][0] += sizes.iter().filter(|size| **size < DEAD * usual).count() as u64;
            all[unit][1] += sizes.len() as u64;
        }
        Ok(all)
    }
}
