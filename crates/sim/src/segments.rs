//! The price of one segment of a unit that is split over a tensor-parallel group: a share of the
//! unit's price.
//!
//! The unit's own price comes from its kernels ([`crate::kernel`]), which know no segments. The
//! shares come from running the segments on the `meta` device where the model is known
//! ([`own_shares`]). Otherwise each segment takes the part of the unit's time that it has in the
//! activations that the unit keeps.

use crate::profile::Device;
use crate::transformer::Workload;
use trainyard_autograd::Policy;
use trainyard_model::costs::{SegmentCost, SegmentedCost, segment_costs};
use trainyard_model::{BatchShape, Model, ModelError, ModelSpec, TensorSplit};
use trainyard_program::SplitShape;
use trainyard_tensor::{Cost, DType};

/// The share of one segment in its unit's seconds and launches.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SegmentShare {
    /// Of the forward.
    pub forward: f64,
    /// Of the half of backward for the gradients of values.
    pub backward_input: f64,
    /// Of the half of backward for the gradients of parameters.
    pub backward_weights: f64,
}

impl SegmentShare {
    /// The share of a unit that runs as a whole.
    pub const WHOLE: SegmentShare = SegmentShare { forward: 1.0, backward_input: 1.0, backward_weights: 1.0 };
}

/// Shares in proportion to `weights`; equal ones if all weights are zero.
fn in_proportion(weights: &[f64]) -> Vec<f64> {
    let total: f64 = weights.iter().sum();
    let share = |weight: &f64| if total > 0.0 { weight / total } else { 1.0 / weights.len() as f64 };
    weights.iter().map(share).collect()
}

/// The shares of segments whose forwards and halves of backward have these weights.
fn shares(forward: &[f64], backward_input: &[f64], backward_weights: &[f64]) -> Vec<SegmentShare> {
    let [forward, input, weights] = [forward, backward_input, backward_weights].map(in_proportion);
    let halves = input.into_iter().zip(weights);
    let share =
        |(forward, (backward_input, backward_weights))| SegmentShare { forward, backward_input, backward_weights };
    forward.into_iter().zip(halves).map(share).collect()
}

/// Shares by the activations that the segments of a unit keep. Only differentiable segments have a
/// backward.
pub fn shares_by_activations(split: &SplitShape) -> Vec<SegmentShare> {
    let kept = |segment: &trainyard_program::SegmentShape| segment.saved_bytes[0] as f64;
    let weights: Vec<f64> = split.segments.iter().map(kept).collect();
    let weights = in_proportion(&weights);
    let backward: Vec<f64> =
        weights.iter().zip(&split.segments).map(|(w, s)| if s.differentiable { *w } else { 0.0 }).collect();
    shares(&weights, &backward, &backward)
}

/// Shares by the kernels that the segments of a unit launch. Each counts the longer of its
/// arithmetic and its traffic on `device`.
pub fn shares_by_kernels(cost: &SegmentedCost, device: &Device) -> Vec<SegmentShare> {
    let (flops, bytes) = (1e12 * device.product_tflops, 1e9 * device.memory_gb_s);
    let seconds = |of: &dyn Fn(&SegmentCost) -> Cost| -> Vec<f64> {
        let costs = cost.costs.iter().map(of);
        costs.map(|cost| (cost.flops as f64 / flops).max(cost.bytes as f64 / bytes)).collect()
    };
    shares(
        &seconds(&|cost| cost.forward),
        &seconds(&|cost| cost.backward_input),
        &seconds(&|cost| cost.backward_parameters),
    )
}

/// The shares of the segments of `spec`'s embedding, block and head, split over `work.tensor`
/// ranks.
///
/// # Errors
///
/// A model that the ranks cannot divide among them.
pub fn own_shares(
    spec: &ModelSpec,
    work: &Workload,
    sequence: bool,
    device: &Device,
    dtype: DType,
) -> Result<Vec<Vec<SegmentShare>>, ModelError> {
    let one = ModelSpec { layers: 1, sliding_layers: None, ..spec.clone() };
    let model = Model::split(one, TensorSplit { rank: 0, ranks: work.tensor as usize, sequence })?;
    let shape = BatchShape::uniform(work.micro_batch as usize, work.sequence as usize);
    let costs = segment_costs(&model, &shape, dtype, Policy::Everything)?;
    Ok(costs.iter().map(|cost| shares_by_kernels(cost, device)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transformer::Architecture;
    use crate::{Cluster, Constants, Costs, Format, Profiles, Stack, simulate};
    use trainyard_program::{
        Action, Border, Keep, Layout, Mesh, ModelShape, Program, SegmentShape, Strategy, UnitShape, ValueShape,
        lower_rank,
    };

    fn segment(name: &str, takes: &[u32], gives: &[u32], differentiable: bool, kept: u64) -> SegmentShape {
        let (takes, gives) = (takes.to_vec(), gives.to_vec());
        SegmentShape { name: name.to_owned(), takes, gives, differentiable, saved_bytes: [kept, kept / 2, 0] }
    }

    fn unit(
        name: &str,
        values: &[Layout],
        input: Option<u32>,
        borders: &[(u32, u32)],
        segments: Vec<SegmentShape>,
    ) -> UnitShape {
        let value = |layout: &Layout| ValueShape { name: "v".to_owned(), layout: *layout, bytes: 4096 };
        let split = SplitShape {
            values: values.iter().map(value).collect(),
            input,
            borders: borders.iter().map(|(from, to)| Border { from: *from, to: *to }).collect(),
            segments,
            shared_gradient_elements: 0,
        };
        let kept = |keep: usize| split.segments.iter().map(|segment| segment.saved_bytes[keep]).sum();
        let saved_bytes = [kept(0), kept(1), kept(2)];
        UnitShape {
            name: name.to_owned(),
            flat_elements: 1 << 20,
            saved_bytes,
            split: Some(split),
            ..UnitShape::default()
        }
    }

    /// A model of three units on two ranks, whose residual stream is whole on both.
    fn program(keep: Keep) -> Program {
        use Layout::{Invariant, Partial, Replicated, Split};
        let embedding = vec![segment("lookup", &[], &[0], true, 64), segment("positions", &[1], &[2], true, 8)];
        let block = vec![
            segment("norm", &[0], &[0, 1], true, 100),
            segment("mlp", &[2], &[3], true, 700),
            segment("output", &[0, 4], &[5], true, 0),
        ];
        let head = vec![
            segment("norm", &[0], &[1], true, 100),
            segment("statistics", &[2], &[3], false, 0),
            segment("loss", &[2, 4], &[5], true, 400),
        ];
        let units = vec![
            unit("embedding", &[Partial, Invariant, Invariant], None, &[(0, 1)], embedding),
            unit(
                "block.0",
                &[Invariant, Invariant, Replicated, Partial, Invariant, Invariant],
                Some(0),
                &[(1, 2), (3, 4)],
                block,
            ),
            unit(
                "head",
                &[Invariant, Invariant, Replicated, Split, Invariant, Invariant],
                Some(0),
                &[(1, 2), (3, 4)],
                head,
            ),
        ];
        let mut strategy = Strategy::new(3);
        strategy.keep[1] = keep;
        strategy.accumulation_steps = 2;
        lower_rank(&ModelShape { units, batch_bytes: 12 }, &Mesh { tp: 2, ..Mesh::default() }, &strategy, 0).unwrap()
    }

    fn costs(tensor: u32) -> Costs {
        let stack = Stack::named("trainyard").unwrap();
        let cluster = Cluster::parse("1x8xH100", &Profiles::builtin()).unwrap();
        let spec = ModelSpec { layers: 1, ..trainyard_model::preset("llama-1b").unwrap() };
        let work = Workload { sequence: 512, micro_batch: 2, tensor, context: 1, expert: 1, operand_bytes: 2.0 };
        let units = Architecture::from(&spec).units(&work, &stack);
        let costs = Costs::new(&units, &work, &cluster, &stack, &Constants::builtin(), Format::Bf16);
        let shares = own_shares(&spec, &work, false, &cluster.device, DType::BF16).unwrap();
        assert_eq!(shares.len(), costs.kinds.len());
        costs
    }

    /// Regression: every segment was priced like its whole unit.
    #[test]
    fn the_segments_of_a_unit_cost_together_what_the_unit_costs() {
        let costs = costs(2);
        for (keep, repeats, again) in [
            (Keep::Everything, 1.0, 0.0),
            (Keep::Selective, 1.0, costs.unit(1).selective_s),
            // The forward is repeated by instructions of its own.
            (Keep::InputOnly, 2.0, 0.0),
        ] {
            let program = program(keep);
            let simulated = simulate(std::slice::from_ref(&program), &costs).unwrap();
            let spent = |is: &dyn Fn(&Action) -> bool| -> f64 {
                let spans = program.instructions.iter().zip(&simulated.ranks[0].spans);
                spans.filter(|(one, _)| is(&one.action)).map(|(_, span)| span.end_s - span.start_s).sum()
            };
            let unit = costs.unit(1);
            let forward = spent(&|action| matches!(action, Action::Forward { unit: 1, .. }));
            let backward = spent(&|action| matches!(action, Action::Backward { unit: 1, .. }));
            let whole = unit.backward_input_s + unit.backward_weights_s + unit.accumulate_s + again;
            // Two micro-batches. The host may be late, which only adds.
            assert!(forward >= 0.999 * 2.0 * repeats * unit.forward_s, "{keep:?}: {forward:.3e}");
            assert!(forward <= 1.3 * 2.0 * repeats * unit.forward_s, "{keep:?}: {forward:.3e}");
            assert!((0.999..1.3).contains(&(backward / 2.0 / whole)), "{keep:?}: {backward:.3e} of {whole:.3e}");
        }
    }

    #[test]
    fn products_take_most_of_a_blocks_time() {
        let spec = trainyard_model::preset("llama-1b").unwrap();
        let work = Workload { sequence: 512, micro_batch: 2, tensor: 2, context: 1, expert: 1, operand_bytes: 2.0 };
        let device = Cluster::parse("1x8xH100", &Profiles::builtin()).unwrap().device;
        for sequence in [false, true] {
            let shares = own_shares(&spec, &work, sequence, &device, DType::BF16).unwrap();
            for unit in &shares {
                let sum = |of: &dyn Fn(&SegmentShare) -> f64| unit.iter().map(of).sum::<f64>();
                let sums = [sum(&|s| s.forward), sum(&|s| s.backward_input), sum(&|s| s.backward_weights)];
                assert!(sums.iter().all(|sum| (sum - 1.0).abs() < 1e-9), "{unit:?}");
            }
            let most = shares[1].iter().map(|share| share.forward).fold(0.0, f64::max);
            assert!((0.4..0.95).contains(&most), "{:?}", shares[1]);
        }
    }
}
