//! Models to lower, and random combinations of model, mesh and strategy.
#![allow(dead_code)]

use proptest::prelude::*;
use trainyard_program::{
    BackwardPart, BlockCodec, ExpertRanks, Keep, Mesh, MicroBatches, ModelShape, Offload, Phase, PipelineSchedule,
    ReduceSchedule, Reshard, ScheduleTable, StateBytes, Strategy as How, StretchMap, Tier, Turn, UnitShape,
};

/// An embedding, blocks and a head tied to the embedding.
pub fn model(units: usize) -> ModelShape {
    let unit = |i: usize| UnitShape {
        name: match i {
            0 => "embedding".to_owned(),
            i if i + 1 == units => "head".to_owned(),
            i => format!("block.{}", i - 1),
        },
        flat_elements: 100_000,
        borrows: if i + 1 == units && i > 0 { vec![0] } else { Vec::new() },
        saved_bytes: [300 + i as u64, 200, 10],
        output_bytes: 10,
        ..UnitShape::default()
    };
    ModelShape { units: (0..units).map(unit).collect(), batch_bytes: 64 }
}

/// A model, a mesh and a strategy that fit together.
#[derive(Clone, Debug)]
pub struct Case {
    pub model: ModelShape,
    pub mesh: Mesh,
    pub strategy: How,
}

/// Models of up to `units` units on data-parallel meshes, which the engine can run.
pub fn data_parallel_cases(units: usize) -> impl Strategy<Value = Case> {
    (models(units), 1u32..4, 1u32..5, 1u32..5).prop_flat_map(|(model, replicate, shard, accumulation)| {
        let mesh = Mesh::data(replicate, shard);
        strategies(model.units.len(), mesh, accumulation).prop_map(move |strategy| Case {
            model: model.clone(),
            mesh,
            strategy,
        })
    })
}

/// The same on pipelines of up to four stages, by any schedule.
pub fn pipeline_cases(units: usize) -> impl Strategy<Value = Case> {
    (2u32..5, 1u32..3, 1u32..3).prop_flat_map(move |(pp, dp_replicate, dp_shard)| {
        pipelines(units, Mesh { pp, dp_replicate, dp_shard, ..Mesh::default() })
    })
}

/// The same on meshes with every axis, of up to sixteen ranks.
pub fn cases(units: usize) -> impl Strategy<Value = Case> {
    let experts = prop::sample::select(vec![None, Some(ExpertRanks::Shards), Some(ExpertRanks::Replicas)]);
    let degrees = (1u32..5, 1u32..3, 1u32..3, 1u32..3, 1u32..3, experts);
    degrees.prop_flat_map(move |(pp, dp_replicate, dp_shard, cp, tp, experts)| {
        let ep = match experts {
            None => 1,
            Some(ExpertRanks::Shards) => dp_shard * cp,
            Some(ExpertRanks::Replicas) => dp_replicate,
        };
        let mesh = Mesh { pp, dp_replicate, dp_shard, cp, tp, ep, expert_ranks: experts.unwrap_or_default() };
        pipelines(units, mesh)
    })
}

/// Models, schedules and strategies for a mesh, whose pipeline is shortened if the model has too
/// few units.
fn pipelines(units: usize, mesh: Mesh) -> impl Strategy<Value = Case> {
    let schedule = prop::sample::select(PipelineSchedule::ALL.to_vec());
    (models(units), 1u32..5, schedule, 1u32..4).prop_flat_map(move |(model, rounds, schedule, chunks)| {
        let count = model.units.len() as u32;
        let mesh = Mesh { pp: mesh.pp.min(count), ..mesh };
        let chunks = chunks.min(count / mesh.pp).max(1);
        let schedule = match schedule {
            _ if mesh.pp == 1 => PipelineSchedule::OneForwardOneBackward,
            PipelineSchedule::Interleaved { .. } => PipelineSchedule::Interleaved { chunks },
            other if other.facts().chunks * mesh.pp > count => PipelineSchedule::ZeroBubble,
            other => other,
        };
        let accumulation = match schedule.facts().micro_batches {
            MicroBatches::Any => rounds,
            MicroBatches::MultipleOfStages => rounds * mesh.pp,
            MicroBatches::PerStage(each) => each * mesh.pp + rounds - 1,
        };
        // Two stretches of one rank add to a tied unit's gradient by turns.
        let by_turns = schedule.facts().map == StretchMap::V && !model.units[count as usize - 1].borrows.is_empty();
        strategies(model.units.len(), mesh, accumulation).prop_map(move |strategy| {
            let mut strategy = How { pipeline: schedule.into(), sequence_parallel: mesh.ep > 1, ..strategy };
            if by_turns {
                (strategy.elastic, strategy.reduce_schedule) = (false, ReduceSchedule::PerStep);
            }
            Case { model: model.clone(), mesh, strategy }
        })
    })
}

fn models(units: usize) -> impl Strategy<Value = ModelShape> {
    let unit = (1u64..60_000, prop::array::uniform3(0u64..5000), 1u64..100, 0u32..3);
    (prop::collection::vec(unit, 1..=units), any::<bool>(), 0u64..100).prop_map(|(units, tied, batch_bytes)| {
        let last = units.len() - 1;
        let shape = |(i, (flat_elements, saved_bytes, output_bytes, tensor_collectives))| UnitShape {
            name: format!("unit.{i}"),
            flat_elements,
            // Some rest in this step, some are frozen, and some in part.
            rests: i < last && flat_elements % 11 == 3,
            frozen_elements: match flat_elements % 5 {
                0 if i < last => flat_elements,
                1 => flat_elements / 2,
                _ => 0,
            },
            encodable: match flat_elements % 5 {
                0 | 1 if i > 0 && i < last => vec![flat_elements / 3, flat_elements / 8],
                _ => Vec::new(),
            },
            borrows: if tied && i == last && i > 0 { vec![0] } else { Vec::new() },
            saved_bytes,
            output_bytes,
            tensor_collectives,
            work: 0,
            kv_bytes: if i % 2 == 1 { 2 * output_bytes } else { 0 },
            expert_elements: if i % 2 == 1 { flat_elements / 2 } else { 0 },
            expert_bytes: if i % 2 == 1 { output_bytes } else { 0 },
            split: None,
            matrices: vec![[1, flat_elements]],
        };
        ModelShape { units: units.into_iter().enumerate().map(shape).collect(), batch_bytes }
    })
}

/// Strategies for `units` units on `mesh`.
pub fn strategies(units: usize, mesh: Mesh, accumulation: u32) -> impl Strategy<Value = How> {
    let shards = mesh.shard_degree();
    let keep = prop::sample::select(vec![Keep::Everything, Keep::Selective, Keep::InputOnly]);
    let parts: Vec<Reshard> = (1..=shards).filter(|part| shards.is_multiple_of(*part)).map(Reshard::To).collect();
    let reshard = prop::sample::select([vec![Reshard::Always, Reshard::Never], parts].concat());
    let tier = || prop::sample::select(vec![None, None, Some(Tier::Host), Some(Tier::Disk)]);
    let chunk = prop::sample::select(vec![None, Some(4096), Some(3 * 4096)]);
    let encoded = Some(Tier::Encoded(BlockCodec::Nf4));
    let of_parameters = prop::sample::select(vec![None, None, encoded, Some(Tier::Host), Some(Tier::Disk)]);
    let offload = (tier(), of_parameters, tier(), chunk);
    let switches = (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>());
    (prop::collection::vec(keep, units), 0u8..4, reshard, 0u32..4, offload, switches).prop_map(
        move |(keep, zero_stage, reshard_after_forward, prefetch, offload, switches)| {
            let (optimizer, parameters, activations, update_chunk) = offload;
            let (snapshot, per_micro_batch, elastic, mixed, sums) = switches;
            let gradients = optimizer.filter(|_| sums && mesh.pp == 1);
            let even = accumulation.is_power_of_two() && mesh.data_parallel().is_power_of_two();
            How {
                accumulation_steps: accumulation,
                keep,
                snapshot,
                zero_stage,
                reshard_after_forward,
                prefetch,
                reduce_schedule: if per_micro_batch { ReduceSchedule::PerMicroBatch } else { ReduceSchedule::PerStep },
                elastic: elastic && even && !per_micro_batch,
                offload: Offload { optimizer, parameters, activations, gradients },
                update_chunk,
                bytes: if mixed { StateBytes::MIXED } else { StateBytes::F32 },
                ..How::new(units)
            }
        },
    )
}

/// A random table: turns run in a random order that their inputs allow, on random stages.
pub fn random_table(
    pp: u32,
    stretches: u32,
    micro_batches: u32,
    mut dice: impl FnMut(usize) -> usize,
) -> ScheduleTable {
    let stage_of: Vec<u32> =
        (0..stretches).map(|stretch| if stretch < pp { stretch } else { dice(pp as usize) as u32 }).collect();
    let mut turns = vec![Vec::new(); pp as usize];
    let turn = |phase, part, stretch, micro_batch| Turn { phase, part, stretch, micro_batch };
    let forward = |stretch, micro_batch| turn(Phase::Forward, BackwardPart::Whole, stretch, micro_batch);
    let mut ready: Vec<Turn> = (0..micro_batches).map(|micro_batch| forward(0, micro_batch)).collect();
    while !ready.is_empty() {
        let next = ready.swap_remove(dice(ready.len()));
        turns[stage_of[next.stretch as usize] as usize].push(next);
        let backward = match next {
            Turn { phase: Phase::Forward, stretch, micro_batch, .. } if stretch + 1 < stretches => {
                ready.push(forward(stretch + 1, micro_batch));
                continue;
            }
            Turn { part: BackwardPart::Weights, .. } => continue,
            Turn { phase: Phase::Forward, .. } => Some(next.stretch),
            Turn { part: BackwardPart::Input, stretch, micro_batch, .. } => {
                ready.push(turn(Phase::Backward, BackwardPart::Weights, stretch, micro_batch));
                stretch.checked_sub(1)
            }
            Turn { stretch, .. } => stretch.checked_sub(1),
        };
        let part = if dice(2) == 0 { BackwardPart::Whole } else { BackwardPart::Input };
        ready.extend(backward.map(|stretch| turn(Phase::Backward, part, stretch, next.micro_batch)));
    }
    ScheduleTable::new(turns).expect("an order in which all turns can run")
}

/// A seeded sequence of numbers below a limit.
pub struct Dice(pub u64);

impl Dice {
    pub fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % limit
    }
}
