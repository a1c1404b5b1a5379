//! Programs of split units: every division of ranks passes the checker, and mutants of the kinds of
//! faults that tensor-parallel trainers have had are refused, each for its reason.

mod split;

use trainyard_program::{
    Keep, Mesh, Offload, PipelineSchedule, Program, ReduceSchedule, Strategy, Tier, check_ranks, lower, lower_all,
};

/// All (dp_replicate, dp_shard, tp, pp) with `ranks` ranks.
fn factorisations(ranks: u32) -> Vec<Mesh> {
    let divisors = |of: u32| (1..=of).filter(move |divisor| of.is_multiple_of(*divisor));
    let mut meshes = Vec::new();
    for pp in divisors(ranks) {
        for tp in divisors(ranks / pp) {
            for dp_shard in divisors(ranks / pp / tp) {
                let dp_replicate = ranks / pp / tp / dp_shard;
                meshes.push(Mesh { pp, tp, dp_shard, dp_replicate, ..Mesh::default() });
            }
        }
    }
    meshes
}

fn programs(mesh: &Mesh, strategy: &Strategy, sequence_parallel: bool, tied: bool) -> Vec<Program> {
    let shapes = split::group(strategy.keep.len() - 2, mesh.tp, sequence_parallel, tied);
    lower_all(|tp| &shapes[tp as usize], mesh, strategy).unwrap()
}

#[test]
fn split_units_on_every_factorisation_of_4_and_8_ranks() {
    let mut checked = 0;
    for (mesh, at) in [4, 8].into_iter().flat_map(factorisations).zip(0..) {
        let mut variant: u32 = at;
        for sequence_parallel in [false, true] {
            for zero_stage in 0..4 {
                for tied in [false, true] {
                    variant += 1;
                    let keep = [Keep::Everything, Keep::Selective, Keep::InputOnly][variant as usize % 3];
                    let pipeline = match variant % 4 {
                        0 => PipelineSchedule::GPipe,
                        1 => PipelineSchedule::ZeroBubble,
                        2 if mesh.pp == 2 => PipelineSchedule::Interleaved { chunks: 2 },
                        _ => PipelineSchedule::OneForwardOneBackward,
                    };
                    let per_step = variant % 5 != 0;
                    let tier = [None, Some(Tier::Host), None, Some(Tier::Disk)][variant as usize / 3 % 4];
                    let of = |shift: u32| tier.filter(|_| variant >> shift & 1 == 1);
                    let offload = Offload { activations: of(2), optimizer: of(3), parameters: of(4), gradients: None };
                    let strategy = Strategy {
                        zero_stage,
                        keep: vec![keep; 8],
                        accumulation_steps: if variant.is_multiple_of(2) { 2 } else { 4 },
                        pipeline: trainyard_program::Schedule::Known(pipeline),
                        reduce_schedule: if per_step { ReduceSchedule::PerStep } else { ReduceSchedule::PerMicroBatch },
                        offload,
                        prefetch: variant % 3,
                        elastic: per_step && mesh.data_parallel().is_power_of_two() && variant.is_multiple_of(7),
                        ..Strategy::new(8)
                    };
                    let programs = if mesh.tp == 1 {
                        let mut model = split::llama(6, 1, 0, sequence_parallel, tied);
                        model.units.iter_mut().for_each(|unit| unit.split = None);
                        lower(&model, &mesh, &strategy).unwrap()
                    } else {
                        programs(&mesh, &strategy, sequence_parallel, tied)
                    };
                    if let Err(error) = check_ranks(&programs) {
                        panic!("{error}: {mesh:?} {strategy:?}\n{}", programs[0]);
                    }
                    checked += 1;
                }
            }
        }
    }
    assert!(checked >= 16 * (10 + 20), "{checked}");
}
