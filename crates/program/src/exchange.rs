//! Adds the collectives of units that run as a whole, so that the planner can price them.
//!
//! The planner describes the units of a cluster's model by formulas, without segments. A pass of
//! such a unit is one instruction, and its collectives are instructions next to it. (In a split
//! unit they are [between its segments](crate::segments).) The collectives of tensor and expert
//! parallelism come after the pass, because matrix products wait for them and they for products.
//! A run exchanges the rows of experts inside the pass, on the compute lane, so this instruction is
//! only their price there. It follows split units too: no border of theirs has these rows.
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
        let is_split = self.sizes.split(unit).is_some();
        let shape = &self.sizes.model.units[unit as usize];
        let cp = if is_split { 1 } else { u64::from(self.sizes.mesh.cp) };
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
        let mut last = self.ran[at].exchange;
        for (collective, axis, bytes, times) in exchanges {
            // The first unit's input needs no gradient.
            let needless = phase == Phase::Backward && unit == 0 && axis == Axis::Tensor;
            let inside = is_split && axis != Axis::Expert;
            if self.sizes.mesh.degree(axis) == 1 || bytes == 0 || times == 0 || needless || inside {
                continue;
            }
            let times = times * again;
            let action = Action::Exchange { collective, axis, unit, micro_batch, phase, border: 0, times };
            let needs = match collective {
                Collective::Ring => self.inputs(at),
                _ => [self.ran[at].last].into_iter().chain(self.ran[at].exchange).collect(),
            };
            last = Some(self.builder.push(Instruction::new(action).moving(bytes), needs));
        }
        last
    }
}
