//! Programs of split units: every division of ranks passes the checker, exchanges are where they
//! hide behind compute, and shapes that do not fit are refused.

mod common;
mod split;

use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use trainyard_program::{
    Action, Axis, BackwardPart, Border, Collective, Keep, Lane, Mesh, ModelShape, Offload, Phase, PipelineSchedule,
    Program, ReduceSchedule, Strategy as How, Tier, check_ranks, lower, lower_all, lower_rank,
};

/// All (dp_replicate, dp_shard, cp, tp, pp) with `ranks` ranks.
fn factorisations(ranks: u32) -> Vec<Mesh> {
    let divisors = |of: u32| (1..=of).filter(move |divisor| of.is_multiple_of(*divisor));
    let mut meshes = Vec::new();
    for pp in divisors(ranks) {
        for (tp, cp) in divisors(ranks / pp).flat_map(|tp| divisors(ranks / pp / tp).map(move |cp| (tp, cp))) {
            for dp_shard in divisors(ranks / pp / tp / cp) {
                let dp_replicate = ranks / pp / tp / cp / dp_shard;
                meshes.push(Mesh { pp, tp, cp, dp_shard, dp_replicate, ..Mesh::default() });
            }
        }
    }
    meshes
}

fn programs(mesh: &Mesh, strategy: &How, sequence_parallel: bool, tied: bool) -> Vec<Program> {
    let shapes = split::group(strategy.keep.len() - 2, mesh.tp, mesh.cp, sequence_parallel, tied);
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
                    let per_step = !variant.is_multiple_of(5);
                    let tier = [None, Some(Tier::Host), None, Some(Tier::Disk)][variant as usize / 3 % 4];
                    let of = |shift: u32| tier.filter(|_| variant >> shift & 1 == 1);
                    let offload = Offload { activations: of(2), optimizer: of(3), parameters: of(4), gradients: None };
                    let strategy = How {
                        zero_stage,
                        keep: vec![keep; 8],
                        accumulation_steps: if variant.is_multiple_of(2) { 2 } else { 4 },
                        pipeline: trainyard_program::Schedule::Known(pipeline),
                        reduce_schedule: if per_step { ReduceSchedule::PerStep } else { ReduceSchedule::PerMicroBatch },
                        offload,
                        prefetch: variant % 3,
                        elastic: per_step && mesh.data_parallel().is_power_of_two() && variant.is_multiple_of(7),
                        ..How::new(8)
                    };
                    let programs = if mesh.tp * mesh.cp == 1 {
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
    assert!(checked >= 16 * (15 + 35), "{checked}");
}

/// Random strategies, with everything that can be combined with split units.
#[test]
fn random_lowerings_of_split_units_pass_the_checker() {
    let cases = u32::try_from(trainyard_testing::cases("split lowerings", 400, 4_000)).unwrap();
    let config = Config { cases, failure_persistence: None, max_shrink_iters: 2000, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &[13; 32]));
    let degrees = (1u32..4, 1u32..3, 1u32..3, 1u32..3, 1u32..4).prop_filter("nothing is split", |d| d.3 * d.4 > 1);
    let meshes = degrees.prop_map(|(pp, dp_replicate, dp_shard, cp, tp)| Mesh {
        pp,
        dp_replicate,
        dp_shard,
        cp,
        tp,
        ..Mesh::default()
    });
    let all = (meshes, 1u32..4, 0..4, any::<bool>(), any::<bool>()).prop_flat_map(
        |(mesh, rounds, pipeline, sequence_parallel, tied)| {
            let pipeline = match pipeline {
                0 => PipelineSchedule::GPipe,
                1 => PipelineSchedule::ZeroBubble,
                2 if mesh.pp > 1 => PipelineSchedule::Interleaved { chunks: 2 },
                _ => PipelineSchedule::OneForwardOneBackward,
            };
            let interleaved = matches!(pipeline, PipelineSchedule::Interleaved { .. });
            let micro_batches = if interleaved { rounds * mesh.pp } else { rounds };
            common::strategies(6, mesh, micro_batches).prop_map(move |strategy| {
                (mesh, How { pipeline: pipeline.into(), ..strategy }, sequence_parallel, tied)
            })
        },
    );
    let checked = runner.run(&all, |(mesh, strategy, sequence_parallel, tied)| {
        let shapes = split::group(4, mesh.tp, mesh.cp, sequence_parallel, tied);
        let refused = sequence_parallel && mesh.tp > 1 && strategy.offload.gradients.is_some();
        match lower_all(|tp| &shapes[tp as usize], &mesh, &strategy) {
            Err(error) => prop_assert!(refused, "{error}"),
            Ok(programs) => {
                prop_assert!(!refused);
                if let Err(error) = check_ranks(&programs) {
                    return Err(TestCaseError::fail(format!("{error}\n{}", programs[0])));
                }
            }
        }
        Ok(())
    });
    checked.unwrap();
}

fn sequence_parallel_block() -> Program {
    let strategy = How { keep: vec![Keep::Everything, Keep::InputOnly, Keep::Everything], ..How::new(3) };
    programs(&Mesh { tp: 2, ..Mesh::default() }, &strategy, true, true).remove(0)
}

#[test]
fn the_program_of_split_units() {
    insta::assert_snapshot!(sequence_parallel_block().to_string());
}

#[test]
fn a_program_of_split_units_survives_json() {
    let program = sequence_parallel_block();
    let json = serde_json::to_string(&program).unwrap();
    assert_eq!(serde_json::from_str::<Program>(&json).unwrap(), program);
}

/// The gradients of weights are computed while the exchange of the input's gradient is under way:
/// the half for weights comes between the exchange and the instruction that waits for it.
#[test]
fn exchanges_of_gradients_hide_behind_the_gradients_of_weights() {
    let strategy = How::new(3);
    let program = programs(&Mesh { tp: 2, ..Mesh::default() }, &strategy, true, false).remove(0);
    let exchange = |number: &usize| {
        matches!(
            program.instructions[*number].action,
            Action::Exchange { phase: trainyard_program::Phase::Backward, .. }
        )
    };
    let exchanges: Vec<usize> = program.on_lane(Lane::Inner).filter(exchange).collect();
    assert_eq!(exchanges.len(), 1 + 4 + 1);
    for number in exchanges {
        let input = program.instructions[number].after[0] as usize;
        let (
            Action::Backward { unit, segment, part: BackwardPart::Input, .. },
            Action::Backward { unit: of, segment: at, part, .. },
        ) = (program.instructions[input].action, program.instructions[number + 1].action)
        else {
            panic!("{number} is not between two halves:\n{program}");
        };
        assert_eq!((unit, segment, BackwardPart::Weights), (of, at, part));
        assert!(!program.instructions[number + 1].after.contains(&(number as u32)));
        let waits = program.instructions.iter().position(|i| i.after.contains(&(number as u32))).unwrap();
        assert!(waits > number + 1);
    }
}

/// A message across a cut is the part of the residual stream that the rank holds.
#[test]
fn stages_send_the_parts_that_ranks_hold() {
    for (sequence_parallel, bytes) in [(true, split::RESIDUAL / 2), (false, split::RESIDUAL)] {
        let mesh = Mesh { tp: 2, pp: 2, ..Mesh::default() };
        let programs = programs(&mesh, &How::new(4), sequence_parallel, false);
        let sent: Vec<u64> =
            programs.iter().flat_map(|p| p.on_lane(Lane::Send).map(|n| p.instructions[n].bytes)).collect();
        assert_eq!(sent, [bytes; 4]);
    }
}

/// A gradient of keys and values is summed over the ranks that share the sequence, once for every
/// block, and reaches the projection while nothing else waits.
#[test]
fn keys_and_values_are_gathered_and_their_gradients_summed_back() {
    for (mesh, sequence_parallel) in [
        (Mesh { cp: 2, ..Mesh::default() }, false),
        (Mesh { cp: 2, tp: 2, ..Mesh::default() }, true),
        (Mesh { cp: 4, tp: 2, ..Mesh::default() }, false),
    ] {
        let program = programs(&mesh, &How::new(4), sequence_parallel, false).remove(0);
        let over_context = |instruction: &trainyard_program::Instruction| match instruction.action {
            Action::Exchange { axis: Axis::Context, collective, unit, phase, .. } => Some((collective, unit, phase)),
            _ => None,
        };
        let found: Vec<_> = program.instructions.iter().filter_map(over_context).collect();
        let forward = |unit| (Collective::AllGather, unit, Phase::Forward);
        let backward = |unit| (Collective::ReduceScatter, unit, Phase::Backward);
        assert_eq!(found, [forward(1), forward(2), backward(2), backward(1)], "{program}");
        let bytes = program.instructions.iter().filter(|i| over_context(i).is_some()).map(|i| i.bytes);
        assert!(
            bytes.into_iter().all(|bytes| bytes == split::RESIDUAL),
            "messages are of what is gathered:\n{program}"
        );
    }
}

/// Parts of 257 rows over two ranks differ by one row, and the programs still meet.
#[test]
fn ranks_of_a_group_may_hold_parts_of_different_sizes() {
    let [first, second] = [0, 1].map(|index| split::llama(1, 2, index, true, false).units[0].flat_elements);
    assert_eq!(first - second, 64);
    let programs = programs(&Mesh { tp: 2, dp_shard: 2, ..Mesh::default() }, &How::new(3), true, false);
    assert_eq!(check_ranks(&programs), Ok(()));
    assert_eq!([programs[0].rank, programs[1].rank, programs[3].rank], [0, 1, 3]);
}

#[test]
fn split_shapes_that_do_not_fit_say_why() {
    let tensor = Mesh { tp: 2, ..Mesh::default() };
    let says = |mesh: Mesh, strategy: &How, change: &dyn Fn(&mut ModelShape), expected: &str| {
        let mut model = split::llama(1, 2, 0, true, false);
        change(&mut model);
        let error = lower(&model, &mesh, strategy).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    let (plain, inside) = (How::new(3), |model: &mut ModelShape| model.units[1].split.take().unwrap());
    says(tensor, &plain, &|model| model.units[1].split = None, "2 of 3 units are split");
    says(Mesh::default(), &plain, &|_| (), "over 1 tensor- and context-parallel ranks");
    says(Mesh { cp: 2, ..tensor }, &plain, &|_| (), "no context parallelism");
    let offload = Offload { optimizer: Some(Tier::Host), gradients: Some(Tier::Host), ..Offload::default() };
    says(
        tensor,
        &How { offload, ..plain.clone() },
        &|_| (),
        "unit block.0 has gradients that its tensor-parallel group",
    );
    let edited = |edit: fn(&mut trainyard_program::SplitShape)| {
        move |model: &mut ModelShape| {
            let mut split = inside(model);
            edit(&mut split);
            model.units[1].split = Some(split);
        }
    };
    says(tensor, &plain, &edited(|s| s.segments[1].takes[0] = 99), "value 99 does not exist");
    says(tensor, &plain, &edited(|s| s.segments[1].gives.clear()), "value a has 0 origins");
    says(tensor, &plain, &edited(|s| s.segments[0].gives.push(3)), "value a has 2 origins");
    says(tensor, &plain, &edited(|s| s.segments[0].gives.retain(|value| *value != 0)), "does not pass on x");
    says(tensor, &plain, &edited(|s| s.segments.swap(0, 1)), "taken before it is there");
    says(tensor, &plain, &edited(|s| s.segments[1].takes.push(1)), "value h changes its layout, and is used as it was");
    says(tensor, &plain, &edited(|s| s.segments[1].differentiable = false), "keeps activations, but has no backward");
    says(tensor, &plain, &edited(|s| s.borders.push(Border { from: 4, to: 8 })), "value a' changes its layout");
    let rank = lower_rank(&split::llama(1, 2, 1, true, false), &tensor, &plain, 1).unwrap();
    assert_eq!(rank.splits.len(), 3);
}

/// Context, tensor and pipeline ranks work on the same micro-batches.
#[test]
fn data_ranks_are_those_with_different_micro_batches() {
    let mesh = Mesh { pp: 2, dp_replicate: 2, dp_shard: 3, cp: 2, tp: 2, ..Mesh::default() };
    let mut ranks_of = vec![Vec::new(); mesh.data_parallel() as usize];
    for rank in 0..mesh.ranks() {
        ranks_of[mesh.data_rank(rank) as usize].push(rank);
    }
    assert!(ranks_of.iter().all(|ranks| ranks.len() == 8), "{ranks_of:?}");
    assert_eq!(ranks_of[1], [4, 5, 6, 7, 28, 29, 30, 31]);
    assert_eq!(mesh.group(6, Axis::Data).index, 3);
}
