//! Units of this project's own models, from running their code on the `meta` device.
//!
//! Memory needs no formula: the engine's pool counts what is kept and held there. The FLOPs of a
//! unit's kernels are asserted to equal those that its code launches. Equal blocks are run once: a
//! model with one block of each kind stands for all of them.

use crate::stack::Stack;
use crate::transformer::{Architecture, TunedWork, Units, Workload};
use trainyard_autograd::Policy;
use trainyard_model::costs::{UnitCost, unit_costs};
use trainyard_model::tuning::{Tuning, encodable};
use trainyard_model::{EncoderSpec, Model, ModelError, ModelSpec};
use trainyard_program::BlockCodec;
use trainyard_tensor::DType;

/// A model that this program trains, and the part of it that is trained.
#[derive(Clone, PartialEq, Debug)]
pub struct OwnModel {
    /// The model.
    pub spec: ModelSpec,
    /// The part that is trained. The default is all of it.
    pub tuning: Tuning,
    /// The form in which frozen matrices of blocks lie in memory; None: as they are computed with.
    pub base: Option<BlockCodec>,
}

impl From<ModelSpec> for OwnModel {
    fn from(spec: ModelSpec) -> OwnModel {
        OwnModel { spec, tuning: Tuning::default(), base: None }
    }
}

impl OwnModel {
    /// The model with its adapters and frozen parameters; None if it is trained as it is.
    ///
    /// # Errors
    /// A model or a tuning that is not valid.
    pub fn tuned(&self) -> Result<Option<Model>, ModelError> {
        if self.tuning.trains_all() {
            return Ok(None);
        }
        Model::new(self.spec.clone())?.tuned(&self.tuning).map(Some)
    }

    /// The units on one rank. In an unsplit model the kept and held bytes are those that the
    /// engine's own pool counts.
    ///
    /// # Errors
    /// A model or a tuning that is not valid; a sequence longer than the model's positions.
    pub fn units(&self, work: &Workload, stack: &Stack, dtype: DType) -> Result<Units, ModelError> {
        let mut units = Architecture::from(&self.spec).units(work, stack);
        let tuned = self.tuned()?;
        if let Some(model) = &tuned {
            tune(&mut units, model);
        }
        if work.tensor * work.context * work.expert > 1 {
            return Ok(units);
        }
        let counted = match tuned {
            Some(model) => model,
            None => one_of_each(&self.spec)?,
        };
        let shape = counted.batch_shape(work.micro_batch as usize, work.sequence as usize);
        let cost = |policy| unit_costs(&counted, &shape, dtype, policy);
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
}

/// Makes `units` those of a tuned model, each a kind of its own: blocks may differ in what is
/// frozen.
fn tune(units: &mut Units, model: &Model) {
    units.kinds = units.order.iter().map(|(kind, _)| units.kinds[*kind].clone()).collect();
    units.order.iter_mut().enumerate().for_each(|(index, (kind, _))| *kind = index);
    for (index, unit) in units.kinds.iter_mut().enumerate() {
        let (layout, of_model) = (model.layout(index, 1), &model.units()[index]);
        // A weight that is borrowed, as a tied table is, has a gradient here too.
        let borrowed = of_model.borrowed().iter().filter_map(|id| model.find(*id));
        let (mut all, mut trained, mut adapters, mut products) = (0.0, 0.0, 0.0, 0.0);
        for parameter in of_model.parameters().iter().chain(borrowed) {
            let elements = parameter.elements() as f64;
            if parameter.is_adapter() {
                adapters += elements;
                products += 1.0;
            } else {
                all += elements;
                trained += if parameter.trained { elements } else { 0.0 };
            }
        }
        let encodable = encodable(model, index).into_iter().map(|parameter| layout.range(parameter).len() as u64);
        unit.elements = layout.flat_elements() as f64;
        unit.tuned = Some(TunedWork {
            frozen_elements: layout.frozen_flat_elements() as u64,
            encodable: encodable.collect(),
            gradients: (trained + adapters) / f64::max(all, 1.0),
            adapters: adapters / f64::max(all, 1.0),
        });
        // An adapter's product has two gradients.
        unit.extra_launches[0] += products;
        unit.extra_launches[1] += 2.0 * products;
        if index < model.lowest_trained() {
            // No gradient flows so far down.
            for kernels in [&mut unit.backward_input, &mut unit.backward_weights, &mut unit.selective] {
                kernels.clear();
            }
            unit.extra_launches[1] = 0.0;
        }
    }
}

/// The model with one block of each kind.
fn one_of_each(spec: &ModelSpec) -> Result<Model, ModelError> {
    let encoder = spec.encoder.map(|encoder| EncoderSpec { layers: 1, ..encoder });
    let layers = match (encoder.is_some(), spec.value_residual) {
        (true, _) => 2,
        // The first block, one between, and the last.
        (_, true) => spec.layers.min(3),
        _ => 1,
    };
    Model::new(ModelSpec { layers, encoder, sliding_layers: None, ..spec.clone() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::Kernel;
    use trainyard_model::tuning::AdapterSpec;

    /// The priced kernels do the arithmetic of the models' code: at least products and attention.
    /// The rest is element-wise.
    #[test]
    fn kernels_have_the_flops_of_the_models_own_code() {
        let stack = Stack::named("trainyard").unwrap();
        let names = ["gpt2-124m", "llama-1b", "qwen2.5-0.5b", "t5-small", "t5-v1.1-small"];
        for (name, value_residual) in names.map(|name| (name, false)).into_iter().chain([("llama-1b", true)]) {
            let spec = ModelSpec { value_residual, ..trainyard_model::preset(name).unwrap() };
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
        let units = OwnModel::from(spec).units(&work, &stack, DType::BF16).unwrap();
        assert_eq!((units.kinds.len(), units.order.len()), (3, 34));
        let saved = units.kinds[1].saved;
        assert!(saved[0] > saved[1] && saved[1] > saved[2]);
        // Full checkpointing keeps a block's input: tokens x width x 2 bytes.
        assert_eq!(saved[2], 8192.0 * 4096.0 * 2.0);
    }

    /// A frozen weight has no gradient's product, an adapter's has two more, and below the first
    /// trained unit nothing runs backward.
    #[test]
    fn frozen_parameters_have_no_products_of_gradients() {
        let stack = Stack::named("trainyard").unwrap();
        let spec = ModelSpec { layers: 3, ..trainyard_model::preset("llama-1b").unwrap() };
        let work = Workload { sequence: 256, micro_batch: 1, tensor: 1, context: 1, expert: 1, operand_bytes: 2.0 };
        let whole = OwnModel::from(spec.clone());
        let adapter = AdapterSpec { rank: 8, alpha: 16.0, rank_stabilised: false, magnitudes: false, targets: vec![] };
        let lora = OwnModel { tuning: Tuning { adapter: Some(adapter), ..Tuning::default() }, ..whole.clone() };
        let freeze = vec!["embedding.*".to_owned(), "block.0.*".to_owned()];
        let frozen = OwnModel { tuning: Tuning { freeze, ..Tuning::default() }, ..whole.clone() };
        let units = |own: &OwnModel| own.units(&work, &stack, DType::BF16).unwrap();
        let (whole, lora, frozen) = (units(&whole), units(&lora), units(&frozen));
        assert_eq!((whole.kinds.len(), lora.kinds.len(), frozen.kinds.len()), (3, 5, 5));
        let tuned = |units: &Units, unit: usize| units.kinds[unit].tuned.clone().unwrap();
        assert!((0.001..0.05).contains(&tuned(&lora, 2).gradients) && tuned(&lora, 2).adapters > 0.0);
        assert_eq!((tuned(&lora, 4).gradients, tuned(&lora, 0).gradients), (0.0, 0.0));
        assert_eq!(tuned(&lora, 2).encodable.len(), 4);
        assert_eq!((tuned(&frozen, 1).gradients, tuned(&frozen, 2).gradients), (0.0, 1.0));
        assert!(frozen.kinds[1].backward_input.is_empty() && !frozen.kinds[2].backward_input.is_empty());
        // An adapter keeps its layer's input and what is between its two matrices.
        assert!(lora.kinds[2].saved[0] > whole.kinds[1].saved[0]);
        assert_eq!(frozen.kinds[1].saved[0], 0.0);
    }
}
