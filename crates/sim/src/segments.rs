//! The price of one segment of a unit that is split over a tensor-parallel group: a share of the
//! unit's price.
//!
//! The price of the whole unit comes from its kernels ([`crate::kernel`]), which are not divided
//! into segments. A segment gets a share of the unit's time: the share that it has in the
//! activations that the unit keeps.

use trainyard_program::{Program, SegmentShape};

/// The share of one segment in its unit's seconds and launches.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct SegmentShare {
    /// Of the forward.
    pub forward: f64,
    /// Of each half of backward, in which only differentiable segments have a part.
    pub backward: f64,
}

impl SegmentShare {
    /// The share of `segment` in `unit`. A unit that runs as a whole is one segment.
    pub fn of(program: &Program, unit: u32, segment: u32) -> SegmentShare {
        let Some(split) = program.split_of(unit) else { return SegmentShare { forward: 1.0, backward: 1.0 } };
        let segment = &split.segments[segment as usize];
        let among = |counts: &dyn Fn(&SegmentShape) -> bool| {
            let all: Vec<f64> = split.segments.iter().filter(|one| counts(one)).map(kept).collect();
            let total: f64 = all.iter().sum();
            match counts(segment) {
                true if total > 0.0 => kept(segment) / total,
                true => 1.0 / all.len() as f64,
                false => 0.0,
            }
        };
        SegmentShare { forward: among(&|_| true), backward: among(&|one| one.differentiable) }
    }
}

/// Bytes of activations that a segment keeps, if it keeps all.
fn kept(segment: &SegmentShape) -> f64 {
    segment.saved_bytes[0] as f64
}

#[cfg(test)]
mod tests {
    use crate::transformer::{Architecture, Workload};
    use crate::{Cluster, Constants, Costs, Format, Profiles, Stack, simulate};
    use trainyard_model::ModelSpec;
    use trainyard_program::{
        Action, Border, Keep, Layout, Mesh, ModelShape, Program, SegmentShape, SplitShape, Strategy, UnitShape,
        ValueShape, lower_rank,
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
        let value = |layout: &Layout| ValueShape {
            name: "v".to_owned(),
            layout: *layout,
            bytes: 4096,
            ..ValueShape::default()
        };
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
        Costs::new(&units, &work, &cluster, &stack, &Constants::builtin(), Format::Bf16)
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
}
