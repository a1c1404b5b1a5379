//! Trains small models on ranks that are threads, and compares what the ranks end with.
#![allow(dead_code, reason = "each test file uses a part of it")]

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use trainyard_autograd::ParamId;
use trainyard_comm::fault::{self, Fault};
use trainyard_comm::{Communicator, local};
use trainyard_engine::EngineError;
use trainyard_engine::config::{Config, Inputs, Resolved};
use trainyard_engine::faults::{Faults, Hang};
use trainyard_engine::fp8::AmaxHistory;
use trainyard_engine::links::Links;
use trainyard_engine::predict::predict;
use trainyard_engine::rank::{Pace, Rank, StepOutcome, StepSettings};
use trainyard_engine::shape;
use trainyard_engine::state::Holding;
use trainyard_engine::world::run;
use trainyard_model::{Batch, BatchShape, BatchSlices, Model};
use trainyard_program::{MemoryKind, Program};
use trainyard_tensor::cpu::Isa;
use trainyard_tensor::{Device, Purpose, Usage};

pub const LENGTH: usize = 8;

pub fn resolved(sets: &[&str]) -> Resolved {
    let tiny = trainyard_testing::tiny_llama(2)
        + "[training]\nsteps = 100\nsequence_length = 8\nglobal_batch_size = 8\n\
                [compute]\nthreads = 1\n[optimizer]\nlearning_rate = 0.003\n";
    let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
    let inputs = Inputs { batches_supplied: true, ..Inputs::of_this_machine() };
    Config::parse("test.toml".as_ref(), &tiny, &sets).unwrap().resolve(&inputs).unwrap()
}

/// The result of one rank: f32 masters of the parameters that it holds, in runs of the whole
/// parameter's elements.
pub struct End {
    pub outcomes: Vec<StepOutcome>,
    pub parts: BTreeMap<ParamId, Vec<(usize, Vec<f32>)>>,
    pub memory: Usage,
    pub predicted: Usage,
    pub program: Program,
    pub amax: Option<AmaxHistory>,
}

/// Rows `first ..` of a step's global batch. Every other token is random, so that the loss has a
/// floor.
pub fn batch(device: &Device, model: &Model, step: u64, first: usize, rows: usize) -> Batch {
    let vocab = model.vocab_size() as u64;
    let row = |row: usize| -> Vec<i32> {
        let mut token = (step * 31 + row as u64 * 7 + 3) % vocab;
        (0..=LENGTH as u64)
            .map(|place| {
                token = (token * 5 + 11) % vocab;
                if place % 2 == 0 {
                    let mixed = (step * 1_000_003 + row as u64 * 10_007 + place).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                    token = (mixed >> 33) % vocab;
                }
                token as i32
            })
            .collect()
    };
    let texts: Vec<Vec<i32>> = (first..first + rows).map(row).collect();
    let tokens: Vec<i32> = texts.iter().flat_map(|t| t[..LENGTH].to_vec()).collect();
    let targets: Vec<i32> = texts.iter().flat_map(|t| t[1..].to_vec()).collect();
    let positions: Vec<i32> = (0..rows).flat_map(|_| 0..LENGTH as i32).collect();
    let cu_seqlens: Vec<i32> = (0..=rows).map(|r| (r * LENGTH) as i32).collect();
    let slices =
        BatchSlices { tokens: &tokens, targets: Some(&targets), positions: &positions, cu_seqlens: &cu_seqlens };
    model.batch(device, &slices).unwrap()
}

/// Trains on all ranks of `sets` and returns the result of each.
pub fn train(sets: &[&str], steps: u64) -> Vec<End> {
    let resolved = resolved(sets);
    let worlds = local::World::new(resolved.parallel.ranks);
    std::thread::scope(|scope| {
        let ranks = worlds.into_iter().map(|world| {
            let resolved = &resolved;
            scope.spawn(move || run(world, |world| train_rank(resolved, world, steps)).unwrap())
        });
        ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

pub fn train_rank(resolved: &Resolved, world: Communicator, steps: u64) -> Result<End, EngineError> {
    train_rank_with(resolved, world, steps, |_| None, |_| Faults::new([], Hang::ForEver))
}

/// Like [`train`], but `instead` may replace the batch of a step, and `faults` are injected.
pub fn train_rank_with(
    resolved: &Resolved,
    world: Communicator,
    steps: u64,
    instead: impl Fn(u64) -> Option<Result<Batch, EngineError>> + Sync,
    faults: impl Fn(&Program) -> Faults,
) -> Result<End, EngineError> {
    let inject = |rank: &mut Rank, program: &Program| rank.inject(Arc::new(faults(program)));
    train_rank_as(resolved, world, steps, instead, inject)
}

/// Like [`train`], with passes held to a pace.
pub fn train_paced(sets: &[&str], steps: u64, pace: &Pace) -> Vec<End> {
    let resolved = resolved(sets);
    let worlds = local::World::new(resolved.parallel.ranks);
    std::thread::scope(|scope| {
        let ranks = worlds.into_iter().map(|world| {
            let resolved = &resolved;
            let set = |rank: &mut Rank, _: &Program| rank.pace(pace.clone());
            scope.spawn(move || run(world, |world| train_rank_as(resolved, world, steps, |_| None, set)).unwrap())
        });
        ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Like [`train_rank_with`]; `set` changes the rank before it trains.
fn train_rank_as(
    resolved: &Resolved,
    world: Communicator,
    steps: u64,
    instead: impl Fn(u64) -> Option<Result<Batch, EngineError>> + Sync,
    set: impl Fn(&mut Rank, &Program),
) -> Result<End, EngineError> {
    let device = match world.common().filter(|_| resolved.config.parallel.lend_threads) {
        Some(lent) => Device::cpu_lending_threads(Isa::detect(), resolved.threads, None, &lent),
        None => Device::cpu(Isa::detect(), resolved.threads, None),
    };
    let spec = shape::model_spec(resolved)?;
    let own = world.rank() as u32;
    let model = shape::model_of(resolved, spec.clone(), own)?;
    let rows = resolved.batch.micro;
    let shape = BatchShape::uniform(rows, LENGTH);
    let model_shape = shape::model_shape(&model, &shape, shape::compute_dtype(resolved))?;
    let strategy = shape::strategy(resolved, model.units().len())?;
    let [program, _] = shape::programs(&model_shape, &shape::mesh(resolved), &strategy, world.rank() as u32)?;
    let settings = shape::rank_settings(resolved);
    let predicted = predict(shape::model_of(resolved, spec, own)?, &program, &shape, &settings)?.memory;
    let links = Links::new(&world, &program)?;
    let mut rank = Rank::new(&device, model, Holding::of(&program), links, &settings)?;
    set(&mut rank, &program);
    let data_rank = program.mesh.data_rank(program.rank) as usize;
    let first = data_rank * resolved.batch.accumulation * rows;
    let mut outcomes = Vec::new();
    for step in 0..steps {
        let settings = StepSettings { step, rate_factor: 1.0, clip_norm: Some(0.5) };
        let mut next = first;
        let load = |device: &Device, model: &Model| {
            next += rows;
            instead(step).unwrap_or_else(|| Ok(batch(device, model, step, next - rows, rows)))
        };
        outcomes.push(rank.execute(&program, settings, load, |_, _| Ok(()))?);
    }
    let held = rank.model().parameters().filter(|(id, _)| rank.parameters.holds(id.unit as usize));
    let parts = held.map(|(id, spec)| {
        let (range, values) = rank.parameters.master_part(id)?;
        let values = values.to_f32_vec()?;
        let runs = spec.whole_runs(range.clone()).into_iter();
        let run = |(local, first): (Range<usize>, usize)| {
            (first, values[local.start - range.start..local.end - range.start].to_vec())
        };
        Ok((id, runs.map(run).collect()))
    });
    let parts = parts.collect::<Result<_, EngineError>>()?;
    let amax = rank.amax_history();
    Ok(End { outcomes, parts, memory: device.pool().usage(), predicted, program, amax })
}

/// Every parameter's bits, assembled from the ranks' parts. Ranks that hold the same part must
/// agree.
pub fn weights(ends: &[End]) -> Vec<Vec<u32>> {
    let mut parameters: BTreeMap<ParamId, Vec<Option<u32>>> = BTreeMap::new();
    for end in ends {
        for (id, (first, values)) in end.parts.iter().flat_map(|(id, runs)| runs.iter().map(move |run| (id, run))) {
            let whole = parameters.entry(*id).or_default();
            whole.resize(whole.len().max(first + values.len()), None);
            for (place, value) in (*first..).zip(values) {
                let bits = value.to_bits();
                assert_eq!(*whole[place].get_or_insert(bits), bits, "replicas of parameter {id} differ");
            }
        }
    }
    let whole = |bits: Vec<Option<u32>>| bits.into_iter().map(|bits| bits.expect("some rank holds every element"));
    parameters.into_values().map(|bits| whole(bits).collect()).collect()
}

pub fn losses(ends: &[End]) -> Vec<f64> {
    for end in ends {
        for (a, b) in end.outcomes.iter().zip(&ends[0].outcomes) {
            assert_eq!((a.loss, a.gradient_norm, a.tokens), (b.loss, b.gradient_norm, b.tokens), "ranks differ");
        }
    }
    ends[0].outcomes.iter().map(|outcome| outcome.loss).collect()
}

/// Checks that a rank's memory is that of its program, up to the pool's rounding, and that meta
/// predicts every purpose's peak to the byte.
pub fn check_memory(end: &End, sets: &[&str]) {
    let resident = |kinds: &[MemoryKind]| -> f64 {
        let effects = end.program.resident.iter().filter(|effect| kinds.contains(&effect.kind));
        effects.map(|effect| effect.bytes as f64).sum()
    };
    for (purpose, kinds) in [
        (Purpose::Params, &[MemoryKind::Parameters, MemoryKind::Masters][..]),
        (Purpose::Optimizer, &[MemoryKind::Optimizer]),
    ] {
        let (measured, formula) = (end.memory.live(purpose) as f64, resident(kinds));
        assert!((measured / formula - 1.0).abs() <= 0.02, "{sets:?} {purpose}: {measured} against {formula}");
    }
    for purpose in Purpose::ALL {
        let (predicted, measured) = (end.predicted.peak(purpose), end.memory.peak(purpose));
        assert_eq!(predicted, measured, "{sets:?} {purpose}");
    }
}

/// Like [`train`], with delays at a quarter of the instructions, drawn from `seed`; none for 0.
pub fn train_late(sets: &[&str], steps: u64, seed: u64) -> Vec<End> {
    let resolved = resolved(sets);
    let delays = |rank: u32, instructions: u32| {
        let places = (0..steps).flat_map(|step| (0..instructions).map(move |instruction| (step, instruction)));
        let late = places.filter_map(|(step, instruction)| {
            let place = u64::from(rank) << 40 | step << 32 | u64::from(instruction);
            let mut mixed = (place ^ seed << 50).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 40;
            let delay = Duration::from_millis(1 + mixed / 4 % 8);
            let action = fault::Action::Delay(delay);
            (mixed.is_multiple_of(4) && seed > 0).then_some(Fault {
                rank,
                at: fault::At::Position { step, instruction },
                action,
            })
        });
        late.collect::<Vec<Fault>>()
    };
    let worlds = local::World::new(resolved.parallel.ranks);
    std::thread::scope(|scope| {
        let ranks = worlds.into_iter().map(|world| {
            let (resolved, delays) = (&resolved, &delays);
            let late =
                |program: &Program| Faults::new(delays(program.rank, program.instructions.len() as u32), Hang::ForEver);
            scope.spawn(move || run(world, |world| train_rank_with(resolved, world, steps, |_| None, late)).unwrap())
        });
        ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}
