//! Units of this project's own models, from running their code on the `meta` device.
//!
//! Memory needs no formula: the engine's pool counts what is kept and held there. The FLOPs of a
//! unit's kernels are asserted to equal those that its code launches. Equal blocks are run once: a
//! model with one block of each kind stands for all of them.

use crate::stack::Stack;
use crate::transformer::{Architecture, Units, Workload};
use trainyard_autograd::Policy;
use trainyard_model::costs::{UnitCost, unit_costs};
use trainyard_model::{EncoderSpec, Model, ModelError, ModelSpec};
use trainyard_tensor::DType;

/// The units of `spec` on one rank of an unsplit model, with the kept and held bytes that the
/// engine's own pool counts.
///
/// # Errors
///
/// A `spec` that is no valid model; a sequence longer than its positions.
pub fn own_units(spec: &ModelSpec, work: &Workload, stack: &Stack, dtype: DType) -> Result<Units, ModelError> {
    let mut units = Architecture::from(spec).units(work, stack);
    let one = one_of_each(spec)?;
    let shape = one.batch_shape(work.micro_batch as usize, work.sequence as usize);
    let cost = |policy| unit_costs(&one, &shape, dtype, policy);
    let [everything, selective, nothing] =
        [cost(Policy::Everything)?, cost(Policy::Selective)?, cost(Policy::Nothing)?];
    for (kind, unit) in units.kinds.iter_mut().enumerate() {
        let saved = |costs: &[UnitCost]| costs[kind].saved_bytes as f64;
        unit.saved = [saved(&everything), saved(&selective), saved(&nothing)];
        let cost = &everything[kind];
        // A peak includes the kept bytes, which the program counts itself.
        let beyond = |peak: usize| (peak.saturating_sub(cost.saved_bytes) + cost.workspace_bytes) as f64;
        unit.working = [beyond(cost.forward_peak_bytes), beyond(cost.backward_peak_bytes)];
        unit.output = cost.output_bytes as f64;
    }
    // A loss is one number, so nothing crosses a cut after it.
    if let Some(head) = units.kinds.last_mut() {
        head.output = 0.0;
    }
    Ok(units)
}

/// The model with one block of each kind.
fn one_of_each(spec: &ModelSpec) -> Result<Model, ModelError> {
    let encoder = spec.encoder.map(|encoder| EncoderSpec { layers: 1, ..encoder });
    let layers = if encoder.is_some() { 2 } else { 1 };
    Model::new(ModelSpec { layers, encoder, sliding_layers: None, ..spec.clone() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::Kernel;

    /// The priced kernels do the arithmetic of the models' code: at least products and attention.
    /// The rest is element-wise.
    #[test]
    fn kernels_have_the_flops_of_the_models_own_code() {
        let stack = Stack::named("trainyard").unwrap();
        for name in ["gpt2-124m", "llama-1b", "qwen2.5-0.5b", "t5-small", "t5-v1.1-small"] {
            let spec = trainyard_model::preset(name).unwrap();
            let work = Workload { sequence: 512, micro_batch: 2, tensor: 1, context: 1, expert: 1, operand_bytes: 2.0 };
            let units = Architecture::from(&spec).units(&work, &stack);
            let one = one_of_each(&spec).unwrap();
            let shape = one.batch_shape(2, 512);
            let costs = unit_costs(&one, &shape, DType::BF16, Policy::Everything).unwrap();
            let blocks = 1..units.kinds.len() - 1;
            for (block, costs) in units.kinds[blocks.clone()].iter().zip(&costs[blocks]) {
                let flops = |kernels: &[Kernel]| kernels.iter().map(Kernel::flops).sum::<f64>();
                let pairs = [
                    ("forward", flops(&block.forward), costs.forward.flops as f64),
                    (
                        "backward",
                        flops(&block.backward_input) + flops(&block.backward_weights),
                        costs.backward.flops as f64,
                    ),
                ];
                for (pass, ours, theirs) in pairs {
                    assert!((0.93..=1.01).contains(&(ours / theirs)), "{name} {pass}: {ours:.3e} of {theirs:.3e}");
                }
            }
        }
    }

    /// Regression: selective recomputation cost no time. It was taken for the scores of attention,
    /// of which fused attention keeps none.
    #[test]
    fn selective_recomputation_is_that_of_the_models_own_code() {
        let stack = Stack::named("trainyard").unwrap();
        for name in ["gpt2-124m", "llama-1b", "qwen2.5-0.5b"] {
            let spec = trainyard_model::preset(name).unwrap();
            let work = Workload { sequence: 512, micro_batch: 2, tensor: 1, context: 1, expert: 1, operand_bytes: 2.0 };
            let block = &Architecture::from(&spec).units(&work, &stack).kinds[1];
            let one = Model::new(ModelSpec { layers: 1, ..spec.clone() }).unwrap();
            let shape = one.batch_shape(2, 512);
            let cost = |policy| unit_costs(&one, &shape, DType::BF16, policy).unwrap().swap_remove(1);
            let [everything, selective] = [Policy::Everything, Policy::Selective].map(cost);
            let again: f64 = block
                .selective
                .iter()
                .map(|kernel| match kernel {
                    Kernel::Stream { bytes, .. } => *bytes,
                    other => panic!("{name}: {other:?}"),
                })
                .sum();
            let moved = (selective.backward.bytes - everything.backward.bytes) as f64;
            assert!((0.9..=1.1).contains(&(again / moved)), "{name} moves {again:.3e} of {moved:.3e}");
            let spared = (everything.saved_bytes - selective.saved_bytes) as f64;
            let said = block.saved[0] - block.saved[1];
            assert!((0.95..=1.05).contains(&(said / spared)), "{name} spares {said:.3e} of {spared:.3e}");
        }
    }

    #[test]
    fn blocks_are_run_once_however_many_there_are() {
        let stack = Stack::named("trainyard").unwrap();
        let spec = trainyard_model::preset("llama-8b").unwrap();
        let work = Workload { sequence: 8192, micro_batch: 1, tensor: 1, context: 1, expert: 1, operand_bytes: 2.0 };
        let units = own_units(&spec, &work, &stack, DType::BF16).unwrap();
        assert_eq!((units.kinds.len(), units.order.len()), (3, 34));
        let saved = units.kinds[1].saved;
        assert!(saved[0] > saved[1] && saved[1] > saved[2]);
        // Full checkpointing keeps a block's input: tokens x width x 2 bytes.
        assert_eq!(saved[2], 8192.0 * 4096.0 * 2.0);
    }
}
