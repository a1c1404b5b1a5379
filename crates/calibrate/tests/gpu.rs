//! The profile of a GPU, emulated or real (`TRAINYARD_TEST_DEVICE`): it is valid, can be read
//! again, and suffices to price a run.

use std::path::Path;
use std::sync::Arc;
use trainyard_calibrate::check::summary;
use trainyard_calibrate::gpu::{Sizes, calibrate, calibrate_together, check};
use trainyard_calibrate::probe_group::inputs;
use trainyard_calibrate::{forecast, layout};
use trainyard_comm::local;
use trainyard_engine::config::{Config, Inputs};
use trainyard_sim::MachineProfile;
use trainyard_sim::machine::Processes;
use trainyard_tensor::cuda::Cuda;
use trainyard_tensor::cuda::driver::Product;
use trainyard_tensor::cuda::fake::{Fake, Kernels, Network, Options};
use trainyard_tensor::cuda::tested::{self, Tested};

#[test]
fn a_gpus_profile_is_read_again_and_prices_every_kernel_of_a_run() {
    let kernels = Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulated");
    let tested = Tested::new(&kernels, 0).unwrap_or_else(|problem| panic!("{problem}"));
    let cuda = Arc::new(Cuda::new(tested.driver.clone(), 1));
    let folder = tempfile::tempdir().unwrap();
    let mut said = Vec::new();
    let mut progress = |share: f64, what: &str| said.push((share, what.to_owned()));
    let profile = calibrate(&[Arc::clone(&cuda)], &Sizes::tiny(), folder.path(), &mut progress).unwrap();
    assert!(said.is_sorted_by(|a, b| a.0 <= b.0) && said.len() >= 4, "{said:?}");
    assert_eq!(tested.problems(), [""; 0]);

    let path = folder.path().join("gpu.toml");
    profile.save(&path).unwrap();
    let read = MachineProfile::load(&path, &profile.machine).unwrap();
    assert_eq!(read, profile);
    assert!(profile.collectives.is_empty() && profile.method.contains("there is one GPU"), "{}", profile.method);
    assert!(
        profile.transfers.is_some_and(|transfers| transfers.host_update_bytes_per_s > 1e6)
            && profile.interference.compute >= 1.0,
        "{profile:?}"
    );
    let text = profile.to_toml();
    assert!(!text.contains("nan") && !text.contains("inf\n"), "{text}");

    // A model whose width and length were not measured, on one rank and on four, and in eight bits
    // if the GPU has them.
    let has_fp8 = tested.driver.properties().capability >= Product::FP8_CAPABILITY;
    for (ranks, fp8) in [(1, "off"), (4, "off"), (1, "hybrid")] {
        if fp8 != "off" && !has_fp8 {
            continue;
        }
        let sets: Vec<String> = [
            "model.family='llama'",
            "model.dim=48",
            "model.layers=2",
            "model.heads=2",
            "model.vocab_size=90",
            "model.max_sequence_length=12",
            "training.micro_batch_size=4",
            "training.steps=1",
            "precision.compute='bf16'",
            "compute.device='cuda'",
        ]
        .iter()
        .map(|set| (*set).to_owned())
        .chain([
            format!("precision.fp8='{fp8}'"),
            format!("parallel.ranks={ranks}"),
            format!("parallel.data_parallel_shard_degree={ranks}"),
            format!("parallel.zero_stage={}", if ranks == 1 { 0 } else { 2 }),
        ])
        .collect();
        let inputs = Inputs { batches_supplied: true, ..Inputs::of_this_machine() };
        let resolved = Config::parse(Path::new("test"), "", &sets).unwrap().resolve(&inputs).unwrap();
        assert_eq!(layout(&resolved, &read.machine).threads, 1);
        let step = forecast(&resolved, &read.machine).unwrap().step(&read, &read.speeds);
        assert!(step.simulated.step_s > 0.0 && step.simulated.step_s.is_finite());
        // Sums over ranks appear only with several ranks, and are measured too.
        assert_eq!(step.unpriced.into_keys().collect::<Vec<_>>(), [""; 0], "on {ranks} ranks, fp8 {fp8}");
    }
}

/// Devices that reach each other over `network`.
fn fakes_on(network: &Arc<Network>, count: u64) -> Vec<Arc<Fake>> {
    let fake = |seed| {
        let kernels = tested::kernels(&Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulated"));
        let kernels: Box<dyn Kernels> = Box::new(kernels.unwrap_or_else(|problem| panic!("{problem}")));
        let (kernels, network) = (Some(kernels), Some(Arc::clone(network)));
        Arc::new(Fake::new(Options { seed, kernels, network, ..Options::default() }))
    };
    (0..count).map(fake).collect()
}

/// Four processes on two hosts: neighbours share a host, all ranks lie on both, and so do ranks
/// with the same index.
#[test]
fn gpus_of_several_hosts_are_measured_together_and_price_exchanges_between_hosts() {
    let network = Arc::new(Network::new(&[]));
    let fakes = fakes_on(&network, 4);
    let folder = tempfile::tempdir().unwrap();
    let processes = Processes { backend: "tcp".into(), count: 4, hosts: 2 };
    let profiles: Vec<MachineProfile> = std::thread::scope(|scope| {
        let ranks = local::World::new(4).into_iter().zip(&fakes).map(|(world, fake)| {
            let (processes, folder, cuda) = (&processes, folder.path(), Arc::new(Cuda::new(fake.clone(), 1)));
            scope.spawn(move || {
                calibrate_together(&world, processes, &cuda, &Sizes::tiny(), folder, &mut |_, _| {}).unwrap()
            })
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    assert_eq!(network.problems(), [""; 0]);
    fakes.iter().for_each(|fake| assert_eq!(fake.problems(), [""; 0]));

    let profile = &profiles[0];
    let curves: Vec<_> = profile.collectives.iter().map(|c| (c.operation.as_str(), c.ranks, c.hosts)).collect();
    let operations = ["all_gather", "reduce_scatter", "all_reduce"];
    let groups = [(2, 1), (4, 2), (2, 2)];
    assert_eq!(curves, groups.map(|(ranks, hosts)| operations.map(|name| (name, ranks, hosts))).concat());
    // Every process knows the slowest times, and the disk that rank 0 measured.
    assert!(profiles.iter().all(|other| other.collectives == profile.collectives && other.disk == profile.disk));
    assert_eq!(profile.machine.to_string(), "4 x fake, sm_90a, on 2 hosts");
    let path = folder.path().join("gpu-processes.toml");
    profile.save(&path).unwrap();
    let read = MachineProfile::read(&path).unwrap();
    assert_eq!(&read, profile);

    // Replicas with the same index on both hosts, shards within one: as if crossing hosts took a
    // second per reduction.
    let mut slow = read.clone();
    for curve in slow.collectives.iter_mut().filter(|curve| (curve.ranks, curve.hosts) == (2, 2)) {
        curve.points.iter_mut().for_each(|point| point[1] += 1.0);
    }
    let step_s = |profile: &MachineProfile, replicas: usize| {
        let sets: Vec<String> = [
            "model.family='gpt2'",
            "model.dim=32",
            "model.layers=1",
            "model.heads=2",
            "model.vocab_size=64",
            "model.max_sequence_length=8",
            "training.micro_batch_size=2",
            "training.steps=1",
            "compute.device='cuda'",
            "parallel.zero_stage=2",
        ]
        .iter()
        .map(|set| (*set).to_owned())
        .chain([format!("parallel.data_parallel_replicate_degree={replicas}")])
        .collect();
        let inputs = Inputs { batches_supplied: true, ..inputs(profile) };
        let resolved = Config::parse(Path::new("test"), "", &sets).unwrap().resolve(&inputs).unwrap();
        assert_eq!((resolved.parallel.ranks, layout(&resolved, &profile.machine).ranks), (4, 2));
        forecast(&resolved, &profile.machine).unwrap().step(profile, &profile.speeds).simulated.step_s
    };
    assert!(step_s(&slow, 2) > step_s(&read, 2) + 1.0, "replicas are on two hosts");
    assert_eq!(step_s(&slow, 1), step_s(&read, 1), "all four share what all four were measured with");
}

#[test]
fn gpus_that_exchange_have_curves_for_every_number_of_them() {
    let network = Arc::new(Network::new(&[]));
    let fakes = fakes_on(&network, 3);
    let gpus: Vec<Arc<Cuda>> = fakes.iter().map(|fake| Arc::new(Cuda::new(fake.clone(), 1))).collect();
    let folder = tempfile::tempdir().unwrap();
    let profile = calibrate(&gpus, &Sizes::tiny(), folder.path(), &mut |_, _| {}).unwrap();
    assert_eq!(network.problems(), [""; 0]);
    fakes.iter().for_each(|fake| assert_eq!(fake.problems(), [""; 0]));

    assert_eq!(profile.machine.gpu.as_ref().map(|gpu| gpu.count), Some(3));
    let curves: Vec<_> = profile.collectives.iter().map(|curve| (curve.operation.as_str(), curve.ranks)).collect();
    let operations = ["all_gather", "reduce_scatter", "all_reduce"];
    assert_eq!(curves, [2, 3].map(|ranks| operations.map(|operation| (operation, ranks))).concat());
    for curve in &profile.collectives {
        assert!(curve.points.iter().all(|[bytes, seconds]| *bytes >= 1024.0 && *seconds > 0.0), "{curve:?}");
        assert!(curve.points.is_sorted_by(|a, b| a[0] < b[0]), "{curve:?}");
    }
    let path = folder.path().join("gpu.toml");
    profile.save(&path).unwrap();
    assert_eq!(MachineProfile::load(&path, &profile.machine).unwrap(), profile);
    assert!(profile.method.contains("NCCL's"), "{}", profile.method);
}

#[test]
fn predictions_are_compared_with_steps_of_models_that_no_probe_was() {
    let kernels = Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulated");
    let tested = Tested::new(&kernels, 0).unwrap_or_else(|problem| panic!("{problem}"));
    let cuda = Arc::new(Cuda::new(tested.driver.clone(), 1));
    let folder = tempfile::tempdir().unwrap();
    let profile = calibrate(&[Arc::clone(&cuda)], &Sizes::tiny(), folder.path(), &mut |_, _| {}).unwrap();
    let rows = check(&cuda, &profile, &Sizes::tiny(), &mut |_, _| {}).unwrap();
    assert_eq!(rows.len(), 3);
    for row in &rows {
        // Emulated steps are measured in the host's time and predicted by the fake's clock, so the
        // two cannot be compared.
        assert!(row.step_s.measured > 0.0 && row.step_s.predicted > 0.0, "{row:?}");
        assert_eq!(row.unpriced, [""; 0], "{}", row.name);
    }
    // Memory does not depend on emulation.
    let (purpose, total) = summary(&rows).unwrap().memory;
    assert!(purpose <= 0.02 && total <= 0.02, "{rows:?}");
    assert_eq!(tested.problems(), [""; 0]);
}
