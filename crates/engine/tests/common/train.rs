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
use trainyard_engine::config::{Config, ConfigError, Inputs, OffloadTier, Resolved};
use trainyard_engine::faults::{Faults, Hang};
use trainyard_engine::fp8::AmaxHistory;
use trainyard_engine::links::Links;
use trainyard_engine::periods;
use trainyard_engine::rank::{Pace, Rank, StepOutcome, StepSettings};
use trainyard_engine::rounds::Round;
use trainyard_engine::shape;
use trainyard_engine::state::Holding;
use trainyard_engine::tier::Tiers;
use trainyard_engine::world::run;
use trainyard_model::{Batch, BatchSlices, IGNORED, Model};
use trainyard_program::{MemoryKind, Program};
use trainyard_tensor::cpu::Isa;
use trainyard_tensor::{Device, Purpose, Usage};

pub const LENGTH: usize = 8;

/// Moves all disk tiers to the host beside the device, which is the CPU here too, with a pool of
/// its own. No configuration can ask for that.
pub const ON_THE_HOST: &str = "on the host";

pub fn resolved(sets: &[&str]) -> Resolved {
    let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
    resolve(&sets).unwrap()
}

/// The error of settings that are refused.
pub fn refused(sets: &[&str]) -> String {
    let owned: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
    resolve(&owned).err().unwrap_or_else(|| panic!("{sets:?} is accepted")).to_string()
}

pub fn resolve(sets: &[String]) -> Result<Resolved, ConfigError> {
    let tiny = trainyard_testing::tiny_llama(2)
        + "[training]\nsteps = 100\nsequence_length = 8\nglobal_batch_size = 8\n\
                [compute]\nthreads = 1\n[optimizer]\nlearning_rate = 0.003\n";
    let (on_host, sets): (Vec<String>, _) = sets.iter().cloned().partition(|set| set == ON_THE_HOST);
    let inputs = Inputs { batches_supplied: true, ..Inputs::of_this_machine() };
    let mut resolved = Config::parse("test.toml".as_ref(), &tiny, &sets)?.resolve(&inputs)?;
    let offload = &mut resolved.config.offload;
    let tiers = [&mut offload.optimizer, &mut offload.parameters, &mut offload.activations, &mut offload.gradients];
    let on_disk = tiers.into_iter().filter(|tier| **tier == OffloadTier::Disk);
    on_disk.filter(|_| !on_host.is_empty()).for_each(|tier| *tier = OffloadTier::Host);
    Ok(resolved)
}

/// Values that a rank holds of every parameter: runs of the whole parameter's elements, each with
/// the place of its first.
pub type Parts = BTreeMap<ParamId, Vec<(usize, Vec<f32>)>>;

/// The result of one rank.
pub struct End {
    /// The result of every step.
    pub outcomes: Vec<StepOutcome>,
    /// The f32 masters after the last step.
    pub parts: Parts,
    /// The gradients of the first step, before clipping, in the same parts.
    pub gradients: Parts,
    pub memory: Usage,
    pub predicted: Usage,
    /// Memory of the host beside the device: measured and predicted.
    pub host: [Usage; 2],
    pub program: Program,
    pub amax: Option<AmaxHistory>,
}

/// A batch of rows `first .. first + rows` of a step's global batch: device, model, step, first,
/// rows.
pub type Rows = fn(&Device, &Model, u64, usize, usize) -> Batch;

/// A well mixed number.
fn mixed(number: u64) -> u64 {
    number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33
}

/// The tokens of a row and the one that follows. Every other token is random, so that the loss has
/// a floor.
fn tokens(vocab: u64, step: u64, row: usize) -> Vec<i32> {
    let mut token = (step * 31 + row as u64 * 7 + 3) % vocab;
    let next = |place: u64| {
        token = (token * 5 + 11) % vocab;
        if place.is_multiple_of(2) {
            token = mixed(step * 1_000_003 + row as u64 * 10_007 + place) % vocab;
        }
        token as i32
    };
    (0..=LENGTH as u64).map(next).collect()
}

/// Tokens of a row that an encoder reads; the decoder has the others. It is what span corruption
/// makes of rows of [`LENGTH`].
const READ: usize = 5;

/// Rows of an encoder's sequence and its decoder's; a quarter of the decoder's tokens have no
/// target.
fn pairs(device: &Device, model: &Model, step: u64, first: usize, rows: usize) -> Batch {
    let (mut all, mut targets, mut positions, mut cu_seqlens) = (Vec::new(), Vec::new(), Vec::new(), vec![0]);
    for row in first..first + rows {
        let text = tokens(model.vocab_size() as u64, step, row);
        let number = step * 4_099 + row as u64;
        let is_masked = |place: usize| mixed(number * LENGTH as u64 + place as u64).is_multiple_of(4);
        let is_target = |place: usize| place + 1 == LENGTH || place >= READ && !is_masked(place);
        all.extend_from_slice(&text[..LENGTH]);
        targets.extend((0..LENGTH).map(|place| if is_target(place) { text[place + 1] } else { IGNORED }));
        positions.extend((0..READ as i32).chain(0..(LENGTH - READ) as i32));
        cu_seqlens.extend([READ, LENGTH].map(|end| (all.len() - LENGTH + end) as i32));
    }
    let slices = BatchSlices::of_text(&all, Some(&targets), &positions, &cu_seqlens);
    model.batch(device, &slices).unwrap()
}

/// Rows of one document each; every token has a target. Of a model with an encoder, [`pairs`].
pub fn batch(device: &Device, model: &Model, step: u64, first: usize, rows: usize) -> Batch {
    if model.is_paired() {
        return pairs(device, model, step, first, rows);
    }
    let texts: Vec<Vec<i32>> = (first..first + rows).map(|row| tokens(model.vocab_size() as u64, step, row)).collect();
    let tokens: Vec<i32> = texts.iter().flat_map(|t| t[..LENGTH].to_vec()).collect();
    let targets: Vec<i32> = texts.iter().flat_map(|t| t[1..].to_vec()).collect();
    let positions: Vec<i32> = (0..rows).flat_map(|_| 0..LENGTH as i32).collect();
    let cu_seqlens: Vec<i32> = (0..=rows).map(|r| (r * LENGTH) as i32).collect();
    let slices = BatchSlices::of_text(&tokens, Some(&targets), &positions, &cu_seqlens);
    model.batch(device, &slices).unwrap()
}

/// Rows of one to three documents of uneven lengths. The last token of a document, a quarter of the
/// others, and in every third step all of row 5 have no target.
pub fn documents(device: &Device, model: &Model, step: u64, first: usize, rows: usize) -> Batch {
    if model.is_paired() {
        return pairs(device, model, step, first, rows);
    }
    let (mut all, mut targets, mut positions, mut cu_seqlens) = (Vec::new(), Vec::new(), Vec::new(), vec![0]);
    for row in first..first + rows {
        let text = tokens(model.vocab_size() as u64, step, row);
        let number = step * 4_099 + row as u64;
        let cuts = [1 + mixed(number) as usize % LENGTH, 1 + mixed(number + 7_919) as usize % LENGTH, LENGTH];
        let mut position = 0;
        for place in 0..LENGTH {
            let is_last = cuts.contains(&(place + 1));
            let is_masked = mixed(number * LENGTH as u64 + place as u64).is_multiple_of(4);
            let is_target = !(is_last || is_masked || row == 5 && step.is_multiple_of(3));
            all.push(text[place]);
            targets.push(if is_target { text[place + 1] } else { IGNORED });
            positions.push(position);
            position = if is_last { 0 } else { position + 1 };
            if is_last {
                cu_seqlens.push(all.len() as i32);
            }
        }
    }
    let slices = BatchSlices::of_text(&all, Some(&targets), &positions, &cu_seqlens);
    model.batch(device, &slices).unwrap()
}

/// Trains on all ranks of `sets` and returns the result of each.
pub fn train(sets: &[&str], steps: u64) -> Vec<End> {
    train_on(batch, sets, steps)
}

/// Like [`train`], on other rows.
pub fn train_on(rows: Rows, sets: &[&str], steps: u64) -> Vec<End> {
    let resolved = resolved(sets);
    let worlds = local::World::new(resolved.parallel.ranks);
    std::thread::scope(|scope| {
        let ranks = worlds.into_iter().map(|world| {
            let resolved = &resolved;
            scope.spawn(move || run(world, |world| train_rank(resolved, world, steps, rows)).unwrap())
        });
        ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

pub fn train_rank(resolved: &Resolved, world: Communicator, steps: u64, rows: Rows) -> Result<End, EngineError> {
    let load = |device: &Device, model: &Model, step, first, count| Ok(rows(device, model, step, first, count));
    train_rank_with(resolved, world, steps, load, |_| Faults::new([], Hang::ForEver))
}

/// Trains one rank on the batches that `load` gives, as [`Rows`] does; `faults` are injected.
pub fn train_rank_with(
    resolved: &Resolved,
    world: Communicator,
    steps: u64,
    load: impl Fn(&Device, &Model, u64, usize, usize) -> Result<Batch, EngineError> + Sync,
    faults: impl Fn(&Program) -> Faults,
) -> Result<End, EngineError> {
    let inject = |rank: &mut Rank, program: &Program| rank.inject(Arc::new(faults(program)));
    train_rank_as(resolved, world, steps, load, inject)
}

/// Like [`train`], with passes held to a pace.
pub fn train_paced(sets: &[&str], steps: u64, pace: &Pace) -> Vec<End> {
    let resolved = resolved(sets);
    let worlds = local::World::new(resolved.parallel.ranks);
    std::thread::scope(|scope| {
        let ranks = worlds.into_iter().map(|world| {
            let resolved = &resolved;
            let set = |rank: &mut Rank, _: &Program| rank.pace(pace.clone());
            let load =
                |device: &Device, model: &Model, step, first, count| Ok(batch(device, model, step, first, count));
            scope.spawn(move || run(world, |world| train_rank_as(resolved, world, steps, load, set)).unwrap())
        });
        ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Like [`train_rank_with`]; `set` changes the rank before it trains.
pub fn train_rank_as(
    resolved: &Resolved,
    world: Communicator,
    steps: u64,
    load: impl Fn(&Device, &Model, u64, usize, usize) -> Result<Batch, EngineError> + Sync,
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
    let shape = shape::batch_shape(resolved, &model);
    let strategy = shape::strategy(resolved, model.units().len())?;
    let lowered = periods::lower(resolved, &spec, &model, &strategy, own)?;
    let program = lowered.whole().clone();
    let outer = shape::outer_strategies(resolved, &strategy)
        .iter()
        .map(|outer| shape::programs(&lowered.shape, &shape::mesh(resolved), outer, own))
        .collect::<Result<Vec<_>, _>>()?;
    let settings = shape::rank_settings(resolved);
    let prediction = lowered.predict(shape::model_of(resolved, spec, own)?, &shape, &settings)?;
    let links = Links::new(&world, &program)?;
    let folder = tempfile::tempdir().unwrap();
    let tiers = Tiers::create(&program, &device, folder.path())?;
    let mut rank = Rank::with_tiers(&device, model, Holding::of(&program), tiers, links, &settings)?;
    set(&mut rank, &program);
    let data_rank = program.mesh.data_rank(program.rank) as usize;
    let first = data_rank * resolved.batch.accumulation * rows;
    let (mut outcomes, mut gradients) = (Vec::new(), Parts::new());
    for step in 0..steps {
        let clip_norm = resolved.optimizer.clip_norm.map(|_| 0.5);
        let settings = StepSettings { step, rate_factor: 1.0, clip_norm };
        let mut next = first;
        let next_batch = |device: &Device, model: &Model| {
            next += rows;
            load(device, model, step, next - rows, rows)
        };
        let (every, is_last) = (resolved.round_steps(), step + 1 == steps);
        let (replica, replicas) = rank.replica();
        let round = Round::first(step / every * every, &resolved.config.update.inner_steps, every, replicas);
        let tokens = resolved.tokens_per_step() / replicas as u64;
        rank.set_participation(round.map(|round| round.participation(replica, step, tokens)));
        let at_the_end = ((step + 1).is_multiple_of(every) || is_last).then_some(0);
        let number = resolved.apart.map_or(at_the_end, |apart| apart.outer_step(step + 1, is_last));
        let of_period = &lowered.programs[periods::at(&lowered.periods, step)];
        let [program, _] = number.and_then(|number| outer.get(number)).unwrap_or(of_period);
        outcomes.push(rank.execute(program, settings, next_batch, |_, _| Ok(()))?);
        if step == 0 && program.offload.gradients.is_none() {
            let read = |id| rank.read_gradient(id).and_then(|(range, values)| Ok((range, values.to_f32_vec()?)));
            gradients = parts_of(&rank, read)?;
        }
    }
    let parts = parts_of(&rank, |id| Ok((rank.parameters.master_part_range(id), rank.read_masters(id)?)))?;
    let amax = rank.amax_history();
    let host = [rank.host_memory(), prediction.host_memory];
    let (memory, predicted) = (device.pool().usage(), prediction.memory);
    Ok(End { outcomes, parts, gradients, memory, predicted, host, program, amax })
}

/// The values that `read` gives of every parameter that the rank holds.
fn parts_of(
    rank: &Rank,
    read: impl Fn(ParamId) -> Result<(Range<usize>, Vec<f32>), EngineError>,
) -> Result<Parts, EngineError> {
    let trained = rank.model().parameters().filter(|(_, spec)| spec.trained);
    let held = trained.filter(|(id, _)| rank.parameters.holds(id.unit as usize));
    let parts = held.map(|(id, spec)| {
        let (range, values) = read(id)?;
        let runs = spec.whole_runs(range.clone()).into_iter();
        let run = |(local, first): (Range<usize>, usize)| {
            (first, values[local.start - range.start..local.end - range.start].to_vec())
        };
        Ok((id, runs.map(run).collect()))
    });
    parts.collect()
}

/// Every parameter's bits after the last step.
pub fn weights(ends: &[End]) -> Vec<Vec<u32>> {
    whole(ends.iter().map(|end| &end.parts))
}

/// Every gradient's bits in the first step.
pub fn gradients(ends: &[End]) -> Vec<Vec<u32>> {
    whole(ends.iter().map(|end| &end.gradients))
}

/// The bits of whole parameters, assembled from the ranks' parts. Ranks that hold the same part
/// must agree.
fn whole<'e>(of_ranks: impl Iterator<Item = &'e Parts>) -> Vec<Vec<u32>> {
    let mut parameters: BTreeMap<ParamId, Vec<Option<u32>>> = BTreeMap::new();
    for parts in of_ranks {
        for (id, (first, values)) in parts.iter().flat_map(|(id, runs)| runs.iter().map(move |run| (id, run))) {
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
    check_state(end, sets);
    for purpose in Purpose::ALL {
        let (predicted, measured) = (end.predicted.peak(purpose), end.memory.peak(purpose));
        assert_eq!(predicted, measured, "{sets:?} {purpose}");
        let [measured, predicted] = end.host.each_ref().map(|usage| usage.peak(purpose));
        assert_eq!(predicted, measured, "{sets:?} {purpose} on the host");
    }
}

/// The same of a rank's state: parameters, gradients, optimizer and buffers of exchanges.
pub fn check_state(end: &End, sets: &[&str]) {
    let resident = |kinds: &[MemoryKind]| -> f64 {
        let effects = end.program.resident.iter().filter(|effect| kinds.contains(&effect.kind));
        effects.map(|effect| effect.bytes as f64).sum()
    };
    for (purpose, kinds) in [
        (Purpose::Params, &[MemoryKind::Parameters, MemoryKind::Masters][..]),
        (Purpose::Optimizer, &[MemoryKind::Optimizer]),
    ] {
        let (measured, formula) = (end.memory.live(purpose) as f64, resident(kinds));
        assert!((measured - formula).abs() <= 0.02 * formula, "{sets:?} {purpose}: {measured} against {formula}");
    }
    for purpose in [Purpose::Params, Purpose::Grads, Purpose::Optimizer, Purpose::Comm] {
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
            let load = |device: &Device, model: &Model, step, first, rows| Ok(batch(device, model, step, first, rows));
            scope.spawn(move || run(world, |world| train_rank_with(resolved, world, steps, load, late)).unwrap())
        });
        ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}
