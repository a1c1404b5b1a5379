//! Tests of offloaded state, on disk or on the host beside the device: the bits are those of
//! training in memory, memory is as predicted, and errors say what to do.
//!
//! The host beside the device is the CPU here too, with its own pool. No configuration can ask for
//! that.

use std::path::Path;
use trainyard_comm::{Communicator, local};
use trainyard_engine::EngineError;
use trainyard_engine::config::{Config, Inputs, OffloadTier, Resolved};
use trainyard_engine::links::Links;
use trainyard_engine::predict::predict;
use trainyard_engine::rank::{Rank, StepSettings};
use trainyard_engine::shape;
use trainyard_engine::state::Holding;
use trainyard_engine::tier::Tiers;
use trainyard_engine::world::run;
use trainyard_model::{Batch, BatchShape, BatchSlices, Model};
use trainyard_program::{MemoryKind, Program};
use trainyard_tensor::cpu::Isa;
use trainyard_tensor::{Device, Purpose, Usage};

const LENGTH: usize = 8;

/// Moves all disk tiers to the host.
const ON_THE_HOST: &str = "on the host";

fn resolved(sets: &[&str]) -> Resolved {
    let tiny = trainyard_testing::tiny_llama(3)
        + "[training]\nsteps = 100\nsequence_length = 8\nglobal_batch_size = 8\n\
                [compute]\nthreads = 1\n[optimizer]\nlearning_rate = 0.003\n";
    let on_host = sets.contains(&ON_THE_HOST);
    let sets: Vec<String> = sets.iter().filter(|set| **set != ON_THE_HOST).map(|set| (*set).to_owned()).collect();
    let inputs = Inputs { batches_supplied: true, ..Inputs::of_this_machine() };
    let mut resolved = Config::parse("test.toml".as_ref(), &tiny, &sets).unwrap().resolve(&inputs).unwrap();
    let offload = &mut resolved.config.offload;
    let tiers = [&mut offload.optimizer, &mut offload.parameters, &mut offload.activations, &mut offload.gradients];
    for tier in tiers {
        if on_host && *tier == OffloadTier::Disk {
            *tier = OffloadTier::Host;
        }
    }
    resolved
}

/// The result of one rank.
struct End {
    losses: Vec<f64>,
    skipped: u64,
    /// f32 masters by parameter, with the elements that are the rank's own.
    parts: Vec<(std::ops::Range<usize>, Vec<f32>)>,
    memory: Usage,
    predicted: Usage,
    /// Memory of the host beside the device: measured and predicted.
    host: [Usage; 2],
    program: Program,
}

/// Rows `first ..` of a step's global batch.
fn batch(device: &Device, model: &Model, step: u64, first: usize, rows: usize) -> Batch {
    let vocab = model.vocab_size() as u64;
    let token = |row: usize, place: usize| {
        let mixed = (step * 1_000_003 + row as u64 * 10_007 + place as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        ((mixed >> 33) % vocab) as i32
    };
    let at = |shift: usize| -> Vec<i32> {
        (first..first + rows).flat_map(|row| (0..LENGTH).map(move |place| token(row, place + shift))).collect()
    };
    let (tokens, targets) = (at(0), at(1));
    let positions: Vec<i32> = (0..rows).flat_map(|_| 0..LENGTH as i32).collect();
    let cu_seqlens: Vec<i32> = (0..=rows).map(|row| (row * LENGTH) as i32).collect();
    let slices = BatchSlices::of_text(&tokens, Some(&targets), &positions, &cu_seqlens);
    model.batch(device, &slices).unwrap()
}

/// Trains on all ranks of `sets`, with files in `folder`.
fn train(folder: &Path, sets: &[&str], steps: u64) -> Vec<End> {
    let resolved = resolved(sets);
    let worlds = local::World::new(resolved.parallel.ranks);
    std::thread::scope(|scope| {
        let ranks = worlds.into_iter().map(|world| {
            let resolved = &resolved;
            scope.spawn(move || run(world, |world| train_rank(resolved, world, folder, steps)).unwrap())
        });
        ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn train_rank(resolved: &Resolved, world: Communicator, folder: &Path, steps: u64) -> Result<End, EngineError> {
    let spec = shape::model_spec(resolved)?;
    let model = Model::new(spec.clone())?;
    let rows = resolved.batch.micro;
    let batch_shape = BatchShape::uniform(rows, LENGTH);
    let model_shape = shape::model_shape(&model, &batch_shape, shape::compute_dtype(resolved))?;
    let strategy = shape::strategy(resolved, model.units().len()).unwrap();
    let [program, _] = shape::programs(&model_shape, &shape::mesh(resolved), &strategy, world.rank() as u32)?;
    let settings = shape::rank_settings(resolved);
    let prediction = predict(Model::new(spec)?, &program, &batch_shape, &settings)?;
    let predicted = prediction.memory;
    // No step may need more than was predicted.
    let device = Device::cpu(Isa::detect(), resolved.threads, Some(predicted.peak_total()));
    let links = Links::new(&world, &program)?;
    let tiers = Tiers::create(&program, &device, folder)?;
    let mut rank = Rank::with_tiers(&device, model, Holding::of(&program), tiers, links, &settings)?;
    let first = world.rank() * resolved.batch.accumulation * rows;
    let (mut losses, mut skipped) = (Vec::new(), 0);
    for step in 0..steps {
        let rate_factor = 1.0;
        let settings = StepSettings { step, rate_factor, clip_norm: Some(0.5) };
        let mut next = first;
        let load = |device: &Device, model: &Model| {
            next += rows;
            Ok(batch(device, model, step, next - rows, rows))
        };
        let outcome = rank.execute(&program, settings, load, |_, _| Ok(()))?;
        losses.push(outcome.loss);
        skipped += u64::from(outcome.skipped);
    }
    let parameters = rank.model().parameters();
    let parts = parameters.map(|(id, _)| Ok((rank.parameters.master_part_range(id), rank.read_masters(id)?)));
    let parts = parts.collect::<Result<_, EngineError>>()?;
    let host = [rank.host_memory(), prediction.host_memory];
    Ok(End { losses, skipped, parts, memory: device.pool().usage(), predicted, host, program })
}

/// Every parameter's bits, assembled from the ranks' parts.
fn weights(ends: &[End]) -> Vec<Vec<u32>> {
    (0..ends[0].parts.len())
        .map(|index| {
            let length = ends.iter().map(|end| end.parts[index].0.end).max().unwrap();
            let mut whole: Vec<Option<u32>> = vec![None; length];
            for (range, values) in ends.iter().map(|end| &end.parts[index]) {
                assert_eq!(range.len(), values.len());
                for (place, value) in range.clone().zip(values) {
                    assert_eq!(*whole[place].get_or_insert(value.to_bits()), value.to_bits(), "parameter {index}");
                }
            }
            whole.into_iter().map(|bits| bits.expect("some rank holds every element")).collect()
        })
        .collect()
}

const LLAMA: &[&str] = &["precision.compute='bf16'"];
const GPT2: &[&str] = &["model.family='gpt2'", "model.kv_heads=4", "model.dropout=0.1", "precision.compute='f32'"];

/// Settings that offload each kind of state, alone and together, with several chunks and other
/// prefetch depths.
const WAYS: &[&[&str]] = &[
    &["memory.offload.optimizer='disk'"],
    &["memory.offload.optimizer='disk'", "memory.offload.chunk_elements=4096"],
    &["memory.offload.parameters='disk'"],
    &["memory.offload.activations='disk'"],
    &["memory.offload.activations='disk'", "memory.offload.parameters='disk'", "parallel.prefetch=2"],
    &[
        "memory.offload.optimizer='disk'",
        "memory.offload.parameters='disk'",
        "memory.offload.activations='disk'",
        "memory.offload.chunk_elements=8192",
    ],
    &["memory.offload.optimizer='disk'", "memory.offload.parameters='disk'", "parallel.prefetch=0"],
    &["memory.offload.optimizer='disk'", "memory.offload.gradients='disk'"],
    &[
        "memory.offload.optimizer='disk'",
        "memory.offload.gradients='disk'",
        "memory.offload.chunk_elements=4096",
        "parallel.prefetch=2",
    ],
    &[
        "memory.offload.optimizer='disk'",
        "memory.offload.gradients='disk'",
        "memory.offload.parameters='disk'",
        "memory.offload.activations='disk'",
        "memory.offload.chunk_elements=8192",
        "parallel.prefetch=0",
    ],
];

/// All of these settings, on disk and on the host.
fn everywhere() -> impl Iterator<Item = (&'static [&'static str], &'static [&'static str])> {
    let places: [&[&str]; 2] = [&[], &[ON_THE_HOST]];
    WAYS.iter().flat_map(move |way| places.map(|place| (*way, place)))
}

fn all_ways_agree(base: &[&str], ranks: &[&str], steps: u64) {
    let folder = tempfile::tempdir().unwrap();
    let in_memory = train(folder.path(), &[base, ranks].concat(), steps);
    let reference = (in_memory[0].losses.clone(), weights(&in_memory));
    for (way, place) in everywhere() {
        let sets = [base, ranks, way, place].concat();
        let ends = train(folder.path(), &sets, steps);
        assert_eq!(ends[0].losses, reference.0, "{sets:?}");
        assert!(weights(&ends) == reference.1, "{sets:?}: some weight differs");
        ends.iter().for_each(|end| check_memory(end, &sets));
    }
    assert!(std::fs::read_dir(folder.path()).unwrap().next().is_none(), "files stay behind");
}

/// Checks that meta predicts every purpose's peak and the total to the byte, and that the state
/// left on the device is that of the program.
fn check_memory(end: &End, sets: &[&str]) {
    for purpose in Purpose::ALL {
        assert_eq!(end.predicted.peak(purpose), end.memory.peak(purpose), "{sets:?} {purpose}");
    }
    assert_eq!(end.predicted.peak_total(), end.memory.peak_total(), "{sets:?}");
    let [used, predicted] = &end.host;
    for purpose in Purpose::ALL {
        assert_eq!(used.peak(purpose), predicted.peak(purpose), "{sets:?} {purpose} on the host");
    }
    assert_eq!(used.peak_total() > 0, sets.contains(&ON_THE_HOST), "{sets:?}");
    let resident = |kinds: &[MemoryKind]| -> i64 {
        let effects = end.program.resident.iter().filter(|effect| kinds.contains(&effect.kind));
        effects.map(|effect| effect.bytes).sum()
    };
    let kinds: [(Purpose, &[MemoryKind]); 4] = [
        (Purpose::Params, &[MemoryKind::Parameters, MemoryKind::Masters]),
        (Purpose::Optimizer, &[MemoryKind::Optimizer]),
        (Purpose::Activations, &[]),
        (Purpose::Grads, &[MemoryKind::Gradients]),
    ];
    for (purpose, kinds) in kinds {
        let (measured, formula) = (end.memory.live(purpose) as f64, resident(kinds) as f64);
        assert!((measured - formula).abs() <= 0.02 * formula, "{sets:?} {purpose}: {measured} against {formula}");
    }
}

/// Number of steps of a comparison; twelve if all sweeps are requested.
fn steps() -> u64 {
    trainyard_testing::cases("steps", 5, 12)
}

#[test]
fn one_rank_trains_the_same_bits_from_disk_and_host() {
    all_ways_agree(LLAMA, &["training.accumulation_steps=2"], steps());
    all_ways_agree(GPT2, &["training.accumulation_steps=2"], steps());
    all_ways_agree(GPT2, &["precision.compute='bf16'", "activation_checkpointing.mode='selective'"], steps());
    all_ways_agree(LLAMA, &["precision.compute='f32'", "activation_checkpointing.mode='full'"], steps());
}

#[test]
fn two_ranks_train_the_same_bits_from_disk_and_host() {
    let accumulation = "training.accumulation_steps=2";
    for stage in ["parallel.zero_stage=0", "parallel.zero_stage=1", "parallel.zero_stage=3"] {
        all_ways_agree(LLAMA, &["parallel.ranks=2", accumulation, stage], steps());
        all_ways_agree(GPT2, &["parallel.ranks=2", accumulation, stage], steps());
    }
    let full = "activation_checkpointing.mode='full'";
    all_ways_agree(
        LLAMA,
        &["parallel.ranks=2", "parallel.zero_stage=2", "parallel.reduce_schedule='micro_batch'", full],
        steps(),
    );
    for stage in ["parallel.zero_stage=0", "parallel.zero_stage=2"] {
        let each = "parallel.reduce_schedule='micro_batch'";
        all_ways_agree(GPT2, &["parallel.ranks=2", "training.micro_batch_size=1", stage, each], 6);
        let elastic = "training.elastic_bits=true";
        all_ways_agree(GPT2, &["parallel.ranks=2", "training.micro_batch_size=1", stage, elastic], 6);
    }
}

#[test]
fn rules_that_look_at_whole_matrices_have_their_state_on_disk_and_host_too() {
    for name in ["sgd", "lion", "muon", "adafactor", "lamb"] {
        let set = format!("optimizer.name='{name}'");
        let sets = [LLAMA, &[set.as_str()]].concat();
        let folder = tempfile::tempdir().unwrap();
        let reference = weights(&train(folder.path(), &sets, 6));
        for (way, place) in [1, 5, 9].iter().flat_map(|way| [(WAYS[*way], &[][..]), (WAYS[*way], &[ON_THE_HOST])]) {
            let ends = train(folder.path(), &[&sets, way, place].concat(), 6);
            assert!(weights(&ends) == reference, "{name} {way:?} {place:?}");
        }
    }
}

#[test]
fn a_step_that_is_skipped_leaves_what_lies_elsewhere_as_it_was() {
    let sets = &["precision.compute='f16'", "precision.loss_scale_initial=16777216", "training.micro_batch_size=8"];
    let folder = tempfile::tempdir().unwrap();
    let reference = train(folder.path(), sets, 14);
    assert!((1..14).contains(&reference[0].skipped), "{} of 14 steps skipped", reference[0].skipped);
    for (way, place) in everywhere() {
        let ends = train(folder.path(), &[sets, way, place].concat(), 14);
        assert_eq!((ends[0].skipped, weights(&ends)), (reference[0].skipped, weights(&reference)), "{way:?} {place:?}");
    }
}

#[test]
fn chunks_bound_what_an_update_holds() {
    let folder = tempfile::tempdir().unwrap();
    let on_disk = &["memory.offload.optimizer='disk'", "memory.offload.chunk_elements=4096"];
    let end = &train(folder.path(), &[LLAMA, on_disk].concat(), 2)[0];
    // Two buffers of a chunk's two moments, each tensor padded to 32 elements.
    let peak = end.memory.peak(Purpose::Optimizer);
    assert!((2 * 8 * 4096..2 * 8 * 4096 + 2048).contains(&peak), "{peak}");
    let whole = &train(folder.path(), LLAMA, 2)[0];
    assert!(whole.memory.peak(Purpose::Optimizer) > 4 * peak);
}

/// The table of `docs/parallelism.md`: the bytes of model state on each of four ranks in each ZeRO
/// stage, and the bytes that stage 3 gathers at once, as the pool counts them.
#[test]
fn four_ranks_keep_what_the_formula_says() {
    let folder = tempfile::tempdir().unwrap();
    // Units are many times 4 x 4,096 elements, so that padding is small.
    let model =
        &["model.dim=128", "model.layers=4", "model.ffn_dim=512", "model.vocab_size=1000", "precision.compute='bf16'"];
    let spec = shape::model_spec(&resolved(model)).unwrap();
    let units = Model::new(spec.clone()).unwrap();
    let count = units.units().len();
    // Padded to whole chunks on each rank.
    let elements = |unit: usize, shards: usize| units.layout(unit, shards).elements() as f64;
    let all = |shards: usize| (0..count).map(|unit| elements(unit, shards)).sum::<f64>();
    let (p, m, g, o, ranks) = (2.0, 4.0, 4.0, 8.0, 4.0);
    let state = |memory: &Usage| [Purpose::Params, Purpose::Optimizer, Purpose::Grads].map(|p| memory.live(p) as f64);
    let one = state(&train(folder.path(), model, 2)[0].memory).iter().sum::<f64>();
    assert!((one / (all(1) * (p + m + g + o)) - 1.0).abs() < 0.02, "{one}");
    let (whole, n) = (all(1), all(4));
    let formulas = [
        [whole * (p + m), whole * o, whole * g],
        [n * p + n * m / ranks, n * o / ranks, n * g],
        [n * p + n * m / ranks, n * o / ranks, n * g / ranks],
        [n * (p + m) / ranks, n * o / ranks, n * g / ranks],
    ];
    for (stage, formula) in formulas.into_iter().enumerate() {
        let stage_set = format!("parallel.zero_stage={stage}");
        let ends = train(folder.path(), &[&model[..], &["parallel.ranks=4", &stage_set]].concat(), 2);
        for end in &ends {
            for (measured, formula) in state(&end.memory).into_iter().zip(formula) {
                assert!((measured / formula - 1.0).abs() < 0.02, "stage {stage}: {measured} against {formula}");
            }
            // Two neighbours and, while the head or the embedding is one of them, the embedding
            // that the head borrows.
            let sizes: Vec<f64> = (0..count).map(|unit| elements(unit, 4)).collect();
            let window = sizes.windows(2).map(|pair| pair[0] + pair[1]).fold(0.0, f64::max) + sizes[0];
            let gathered = end.memory.peak(Purpose::Gathered) as f64;
            assert!(gathered <= 1.02 * p * window, "stage {stage}: {gathered} gathered");
            if stage == 3 {
                let held = state(&end.memory).iter().sum::<f64>() + gathered;
                assert!(held <= 1.1 / ranks * one + gathered, "{held} of {one}");
            }
        }
    }
}
