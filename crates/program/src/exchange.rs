//! Adds the collectives of units that run as a whole, so that the planner can price them.
//!
//! The planner describes the units of a cluster's model by formulas, without segments. A pass of
//! such a unit is one instruction, and its collectives are instructions next to it. (In a split
//! unit they are [between its segments](crate::segments).) The collectives of tensor and expert
//! parallelism come after the pass, because matrix products wait for them and they for products.
//! A run of whole units exchanges the rows of experts inside the pass, on the compute lane, so this
//! instruction is only their price there.
//!
//! The ring of context parallelism runs in parallel with the pass: the next keys and values are
//! sent while the present ones are used.

use crate::lower::Lowering;
use crate::passes::Pass;
use crate::{Action, Axis, Collective, Instruction, Keep, Phase};

impl Lowering<'_> {
    /// Emits the collectives of pass `at` and returns the last one. Instructions that use the
    /// pass's result wait for it.
    pub(crate) fn exchange(&mut self, at: usize) -> Option<u32> {
        let Pass { phase, unit, micro_batch, .. } = self.passes[at];
        if self.sizes.split(unit).is_some() {
            return self.ran[at].exchange;
        }
        let shape = &self.sizes.model.units[unit as usize];
        let cp = u64::from(self.sizes.mesh.cp);
        // A backward that runs the forward again repeats the forward's collectives.
        let recomputed = phase == Phase::Backward && self.sizes.keep(unit) == Keep::InputOnly;
        let again = if recomputed { 2 } else { 1 };
        let tensor = match self.strategy.sequence_parallel {
            true => Collective::GatherScatter,
            false => Collective::AllReduce,
        };
        let kv = shape.kv_bytes / u64::from(self.sizes.mesh.tp);
        let exchanges = [
            (Collective::Ring, Axis::Context, kv, 1),
            (Collective::AllToAll, Axis::Expert, shape.expert_bytes / cp, 2),
            (tensor, Axis::Tensor, self.sizes.output_bytes(unit), shape.tensor_collectives),
        ];
        let mut last = None;
        for (collective, axis, bytes, times) in exchanges {
            // The first unit's input needs no gradient.
            let needless = phase == Phase::Backward && unit == 0 && axis == Axis::Tensor;
            if self.sizes.mesh.degree(axis) == 1 || bytes == 0 || times == 0 || needless {
                continue;
            }
            let times = times * again;
            let action = Action::Exchange { collective, axis, unit, micro_batch, phase, border: 0, times };
            let needs = if collective == Collective::Ring { self.inputs(at) } else { vec![self.ran[at].last] };
            last = Some(self.builder.push(Instruction::new(action).moving(bytes), needs));
        }
        last
    }
}
