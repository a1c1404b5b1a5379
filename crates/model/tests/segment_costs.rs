//! The costs of segments are those of the whole unit where it has one, and parts of it where it has
//! several.

use trainyard_autograd::Policy;
use trainyard_model::costs::{SegmentCost, SegmentedCost, segment_costs, segment_costs_on, unit_costs};
use trainyard_model::{BatchShape, Model, ModelSpec, TensorSplit};
use trainyard_tensor::cpu::Isa;
use trainyard_tensor::{Cost, DType, Device};

const SHAPE: fn() -> BatchShape = || BatchShape { sequences: vec![40, 24], ..BatchShape::uniform(0, 0) };

fn llama() -> ModelSpec {
    ModelSpec { kv_heads: 2, ..ModelSpec::llama(1024, 48, 2, 4, 64, 64) }
}

fn costs(split: TensorSplit, policy: Policy) -> Vec<SegmentedCost> {
    segment_costs(&Model::split(llama(), split).unwrap(), &SHAPE(), DType::BF16, policy).unwrap()
}

fn named<'c>(unit: &'c SegmentedCost, name: &str) -> &'c SegmentCost {
    unit.costs.iter().find(|segment| segment.name == name).unwrap()
}

fn flops(cost: Cost) -> usize {
    cost.flops as usize
}

#[test]
fn a_whole_unit_is_one_segment_with_the_costs_of_the_unit() {
    let gpt2 = ModelSpec { dropout: 0.1, ..ModelSpec::gpt2(1024, 48, 2, 4, 64) };
    for spec in [llama(), gpt2] {
        let model = Model::new(spec).unwrap();
        for policy in [Policy::Everything, Policy::Selective] {
            let units = unit_costs(&model, &SHAPE(), DType::BF16, policy).unwrap();
            let segmented = segment_costs(&model, &SHAPE(), DType::BF16, policy).unwrap();
            assert_eq!(units.len(), segmented.len());
            for (unit, segmented) in units.iter().zip(&segmented) {
                let [segment] = &segmented.costs[..] else { panic!("{segmented:?}") };
                assert_eq!((&unit.name, unit.parameters), (&segmented.name, segmented.parameters));
                assert_eq!((unit.forward, unit.backward), (segment.forward, segment.backward), "{}", unit.name);
                assert_eq!(unit.saved_bytes, segment.saved_bytes, "{} {policy:?}", unit.name);
                assert_eq!(unit.output_bytes, segmented.value_bytes[segmented.value_bytes.len() - 1]);
                assert_eq!(unit.forward_peak_bytes, segment.forward_peak_bytes, "{}", unit.name);
                assert_eq!(unit.workspace_bytes, segment.workspace_bytes, "{}", unit.name);
            }
        }
    }
}

/// The costs that meta predicts are the launches and allocations of the CPU.
#[test]
fn costs_on_meta_are_the_counters_of_the_cpu() {
    let cpu = Device::cpu(Isa::detect(), 2, None);
    let gpt2 = ModelSpec { dropout: 0.1, ..ModelSpec::gpt2(257, 48, 1, 4, 64) };
    let llama = ModelSpec { layers: 1, qk_norm: true, tie_embeddings: true, ..llama() };
    for spec in [llama, gpt2] {
        for sequence in [false, true] {
            let model = Model::split(spec.clone(), TensorSplit { rank: 1, ranks: 4, sequence }).unwrap();
            for policy in [Policy::Nothing, Policy::Selective, Policy::Everything] {
                for dtype in [DType::F32, DType::BF16] {
                    let predicted = segment_costs(&model, &SHAPE(), dtype, policy).unwrap();
                    let measured = segment_costs_on(&cpu, &model, &SHAPE(), dtype, policy).unwrap();
                    assert_eq!(predicted, measured, "sequence: {sequence}, {policy:?}, {dtype}");
                }
            }
        }
    }
}

#[test]
fn halves_have_the_products_of_the_whole_backward() {
    for unit in costs(TensorSplit { rank: 1, ranks: 2, sequence: true }, Policy::Everything) {
        for segment in &unit.costs {
            let halves = flops(segment.backward_input) + flops(segment.backward_parameters);
            // The second half of a norm goes over its rows once more; nothing else is done twice.
            let again = if ["norm", "rejoin"].contains(&segment.name) { 8 * 32 * 48 } else { 0 };
            assert_eq!(halves, flops(segment.backward) + again, "{} {}", unit.name, segment.name);
        }
    }
}

#[test]
fn ranks_share_products_and_rows() {
    let (rows, dim) = (64, 48);
    let whole = costs(TensorSplit::WHOLE, Policy::Everything);
    for sequence in [false, true] {
        let of = |rank| costs(TensorSplit { rank, ranks: 2, sequence }, Policy::Everything);
        let ranks = [of(0), of(1)];
        assert!(ranks[0].iter().zip(&whole).all(|(part, whole)| part.parameters < whole.parameters));
        let block = &ranks[0][1];
        let [q, kv, ffn] = [2 * 12, 12, 32];
        let (attention, mlp) = (named(block, "attention"), named(block, "mlp"));
        assert!(flops(attention.forward) >= 2 * rows * dim * (2 * q + 2 * kv));
        assert_eq!(flops(mlp.forward), 2 * rows * dim * 3 * ffn + 6 * rows * ffn);
        let both: usize = ranks.iter().map(|rank| flops(named(&rank[1], "mlp").forward)).sum();
        assert_eq!(both, 2 * rows * dim * 3 * 64 + 6 * rows * 64);

        // Rows of the residual stream are divided with `sequence`; between, every rank has all.
        let residual = 2 * dim * if sequence { rows / 2 } else { rows };
        let bytes = |unit: &SegmentedCost, name: &str| {
            let at = unit.segments.values.iter().position(|value| value.name == name).unwrap();
            unit.value_bytes[at]
        };
        for name in ["x", "h", "a'", "x2", "h2", "b'", "y"] {
            assert_eq!(bytes(block, name), residual, "{name}");
        }
        for name in ["h'", "a", "h2'", "b"] {
            assert_eq!(bytes(block, name), 2 * rows * dim, "{name}");
        }
        let head = &ranks[0][3];
        assert_eq!(
            [bytes(head, "s"), bytes(head, "s'")],
            [64 * 12, 2 * 64 * 12].map(|n: usize| n.next_multiple_of(64))
        );

        // The attention keeps h' and its own tensors; without exchange h' is h, which is kept once.
        let saved: Vec<usize> = block.costs.iter().map(|segment| segment.saved_bytes).collect();
        let floats = |count: usize| (4 * count).next_multiple_of(64);
        let statistics = floats(residual / 2 / dim);
        assert_eq!(saved[0], residual + statistics);
        assert_eq!(saved[1], 2 * rows * (dim + q + 2 * kv + q) + floats(rows * 2));
        assert_eq!(saved[2], residual + statistics);
        assert_eq!(saved[3], 2 * rows * (dim + 2 * ffn + ffn));
        assert_eq!(saved[4], 0);
        assert!(block.costs.iter().all(|segment| segment.deferred_bytes <= segment.saved_bytes + 6 * rows * dim));
    }
    let kept = costs(TensorSplit { rank: 0, ranks: 2, sequence: false }, Policy::Nothing);
    assert!(kept.iter().flat_map(|unit| &unit.costs).all(|segment| segment.saved_bytes == 0));
    let everything = costs(TensorSplit { rank: 0, ranks: 2, sequence: false }, Policy::Everything);
    assert_eq!(named(&kept[1], "attention").backward, named(&everything[1], "attention").backward);
}
