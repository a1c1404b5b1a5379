//! Tests of ranks that exchange by NCCL, each on its own GPU, without real GPUs. Fake devices share
//! a fake network, which moves the bytes and checks that the ranks' calls match. Kernels are
//! emulated, so a small model really trains.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use trainyard_comm::{Communicator, local};
use trainyard_engine::EngineError;
use trainyard_engine::collectives::Way;
use trainyard_engine::config::{Config, Inputs, Resolved};
use trainyard_engine::links::Links;
use trainyard_engine::predict::predict;
use trainyard_engine::rank::{Rank, RankSettings, StepOutcome, StepSettings};
use trainyard_engine::shape;
use trainyard_engine::state::Holding;
use trainyard_engine::world::run;
use trainyard_model::{Batch, BatchShape, Model};
use trainyard_tensor::cuda::Cuda;
use trainyard_tensor::cuda::fake::{Fake, Fault, FaultKind, Kernels, Network, Options};
use trainyard_tensor::cuda::tested;
use trainyard_tensor::{Computes, Device, Purpose};

const LENGTH: usize = 8;
const STEPS: u64 = 3;

const FIXED: Way = Way::Nccl { fixed_order: true };
const FREE: Way = Way::Nccl { fixed_order: false };

fn resolved(sets: &[&str]) -> Resolved {
    let text = trainyard_testing::tiny_llama(2)
        + "[training]\nsteps = 10\nsequence_length = 8\nmicro_batch_size = 1\n[compute]\nthreads = 1\n\
                [optimizer]\nlearning_rate = 0.003\n";
    let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
    let inputs = Inputs { batches_supplied: true, ..Inputs::of_this_machine() };
    Config::parse("test.toml".as_ref(), &text, &sets).unwrap().resolve(&inputs).unwrap()
}

fn batch(device: &Device, model: &Model, step: u64, row: usize) -> Batch {
    let vocab = model.vocab_size() as i32;
    let mut token = (step as i32 * 31 + row as i32 * 7 + 3) % vocab;
    let mut text = vec![token];
    for place in 0..LENGTH as i32 {
        token = (token * 5 + 11 + place % 2 * (step as i32 + row as i32)) % vocab;
        text.push(token);
    }
    model.rows(device, LENGTH, &text[..LENGTH], Some(&text[1..])).unwrap()
}

/// The emulated kernels. Without a C++ compiler, the tests fail with a message.
fn emulated() -> Option<Box<dyn Kernels>> {
    let kernels = tested::kernels(&Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulated"));
    Some(Box::new(kernels.unwrap_or_else(|problem| panic!("{problem}"))))
}

/// The result of a rank: its steps, and its own masters.
type End = (Vec<StepOutcome>, Vec<f32>);

fn train_rank(resolved: &Resolved, world: &Communicator, fake: &Arc<Fake>, way: Way) -> Result<End, EngineError> {
    let device = Device::cuda(Arc::new(Cuda::new(fake.clone(), 1)), None);
    let (spec, own) = (shape::model_spec(resolved)?, world.rank() as u32);
    let model = shape::model_of(resolved, spec.clone(), own)?;
    let shape = BatchShape::uniform(resolved.batch.micro, LENGTH);
    let model_shape = shape::model_shape(&model, &shape, shape::compute_dtype(resolved))?;
    let strategy = shape::strategy(resolved, model.units().len()).unwrap();
    let [program, _] = shape::programs(&model_shape, &shape::mesh(resolved), &strategy, own)?;
    let settings = RankSettings { way, computes: Computes::Cuda, ..shape::rank_settings(resolved) };
    let predicted = predict(shape::model_of(resolved, spec, own)?, &program, &shape, &settings)?.memory;
    let links = Links::by(way, world, &program, &device)?;
    let mut rank = Rank::new(&device, model, Holding::of(&program), links, &settings)?;
    device.pool().reset_peaks();
    let first = program.mesh.data_rank(own) as usize * resolved.batch.accumulation;
    let mut outcomes = Vec::new();
    for step in 0..STEPS {
        let settings = StepSettings { step, rate_factor: 1.0, clip_norm: Some(0.5) };
        let mut next = first;
        let load = |device: &Device, model: &Model| {
            next += 1;
            Ok(batch(device, model, step, next - 1))
        };
        outcomes.push(rank.execute(&program, settings, load, |_, _| Ok(()))?);
    }
    assert_eq!(fake.problems(), [""; 0]);
    for purpose in Purpose::ALL {
        let measured = device.pool().usage().peak(purpose);
        assert_eq!(measured, predicted.peak(purpose), "{purpose} by {way:?}");
    }
    let held = rank.model().parameters().map(|(id, _)| id).filter(|id| rank.parameters.holds(id.unit as usize));
    let ids: Vec<_> = held.collect();
    let masters: Result<Vec<_>, _> = ids.into_iter().map(|id| rank.read_masters(id)).collect();
    Ok((outcomes, masters?.concat()))
}

/// Trains on the number of devices in `sets`. Returns the result or error of each rank.
fn train(sets: &[&str], way: Way, faults: &[Fault], kernels: bool) -> Vec<Result<End, EngineError>> {
    let resolved = &resolved(sets);
    let ranks = resolved.parallel.ranks;
    let network = Arc::new(Network::new(faults));
    let fake = |seed| {
        let kernels = if kernels { emulated() } else { None };
        Arc::new(Fake::new(Options { seed, kernels, network: Some(network.clone()), ..Options::default() }))
    };
    // Devices are opened in order, because faults name them by number.
    let fakes: Vec<Arc<Fake>> = (0..ranks as u64).map(fake).collect();
    let ends = std::thread::scope(|scope| {
        let ranks = local::World::new(ranks).into_iter().zip(fakes).map(|(world, fake)| {
            world.set_deadline(Duration::from_secs(if faults.is_empty() { 300 } else { 2 }));
            scope.spawn(move || run(world, |world| train_rank(resolved, &world, &fake, way)))
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    assert_eq!(network.problems(), [""; 0]);
    ends
}

fn succeed(ends: Vec<Result<End, EngineError>>) -> Vec<End> {
    ends.into_iter().map(|end| end.unwrap_or_else(|error| panic!("{error}"))).collect()
}

fn losses(ends: &[End]) -> Vec<f64> {
    for (outcomes, _) in ends {
        for (own, first) in outcomes.iter().zip(&ends[0].0) {
            assert_eq!((own.loss, own.gradient_norm), (first.loss, first.gradient_norm), "ranks differ");
        }
    }
    ends[0].0.iter().map(|outcome| outcome.loss).collect()
}

/// NCCL in the fixed order gives the bits of exchange through the host. In its own order it is
/// within `tolerance` of them. Returns the losses.
fn agrees(sets: &[&str], tolerance: f64) -> Vec<f64> {
    let [host, fixed, free] = [Way::Host, FIXED, FREE].map(|way| succeed(train(sets, way, &[], true)));
    let [expected, in_order, own_order] = [&host, &fixed, &free].map(|ends| losses(ends));
    assert_eq!(in_order, expected, "{sets:?}");
    for ((_, weights), (_, expected)) in fixed.iter().zip(&host) {
        assert!(weights == expected, "some weight differs from that of the host: {sets:?}");
    }
    for (loss, expected) in own_order.iter().zip(&expected) {
        assert!((loss - expected).abs() <= tolerance * expected.abs(), "{loss} and {expected} by the host: {sets:?}");
    }
    expected
}

fn agrees_and_learns(sets: &[&str], tolerance: f64) {
    let losses = agrees(sets, tolerance);
    assert!(losses[2] < losses[0], "{sets:?}: {losses:?}");
}

#[test]
fn two_devices_train_by_nccl_like_through_the_host() {
    let f32 = "precision.compute=f32";
    agrees_and_learns(&["parallel.ranks=2", "parallel.zero_stage=0", f32], 1e-5);
    agrees_and_learns(&["parallel.ranks=2", "parallel.zero_stage=3", "parallel.reduce_dtype=bf16", f32], 1e-2);
}

#[test]
fn four_devices_train_by_nccl_like_through_the_host() {
    let bf16 = "precision.compute=bf16";
    agrees_and_learns(&["parallel.ranks=4", "parallel.zero_stage=3", "parallel.reshard_after_forward=2", bf16], 1e-2);
    // Every form of a sum: replicas of shards, and sums that are rounded on their way.
    let hybrid = "parallel.data_parallel_replicate_degree=2";
    agrees_and_learns(&["parallel.ranks=4", "parallel.zero_stage=2", hybrid, "parallel.reduce_dtype=bf16", bf16], 1e-2);
    agrees_and_learns(&["parallel.ranks=4", "parallel.zero_stage=0", "parallel.reduce_dtype=bf16", bf16], 1e-2);
}

#[test]
fn stages_and_parts_train_by_nccl_like_through_the_host() {
    let f32 = "precision.compute=f32";
    let (stages, steps) = ("parallel.pipeline_parallel_degree=2", "training.accumulation_steps=2");
    let parts = "parallel.tensor_parallel_degree=2";
    agrees(&[stages, steps, "parallel.pipeline_schedule=zero_bubble", "model.tie_embeddings=true", f32], 1e-5);
    agrees(&[parts, "activation_checkpointing.mode=full", f32], 1e-5);
    // Shared gradients of unequal parts, in shards.
    let unequal =
        ["model.heads=3", "model.head_dim=8", "model.kv_heads=1", "parallel.ranks=4", "parallel.zero_stage=1"];
    agrees(&[&[parts, f32], &unequal[..]].concat(), 1e-5);
    agrees(&[parts, stages, steps, "precision.compute=f16", "precision.loss_scale_initial=1024"], 1e-2);
}

#[test]
fn a_device_that_hangs_fails_or_is_lost_in_a_step_ends_every_rank_with_one_failure() {
    for (kind, words) in [
        (FaultKind::Hang, "although every rank has come to it"),
        (FaultKind::Fail, "unhandled system error"),
        (FaultKind::Lose, "remote process exited"),
    ] {
        // Kernels do not compute here: only the order of exchanges matters.
        let fault = Fault { device: 1, call: 5, kind };
        let ends =
            train(&["parallel.ranks=2", "parallel.zero_stage=3", "precision.compute=f32"], FREE, &[fault], false);
        let failures: Vec<EngineError> = ends.into_iter().map(|end| end.expect_err("no rank gets through")).collect();
        for error in &failures {
            let failure = error.failure().unwrap_or_else(|| panic!("{kind:?}: {error}"));
            assert!(failure.to_string().contains(words), "{kind:?}: {error}");
            assert_eq!(failure.to_string(), failures[0].failure().unwrap().to_string());
        }
    }
}
