//! Tests of whole runs with state on disk: stopped and resumed with other tiers and on other ranks;
//! under a memory limit; and rejected with a message that says what would fit.

#[path = "common/tensors.rs"]
mod tensors;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::time::Instant;
use tensors::tensors;
use trainyard_engine::Result;
use trainyard_engine::checkpoint::find_latest;
use trainyard_engine::config::Config;
use trainyard_engine::metrics::Quiet;
use trainyard_engine::resume::GoingOn;
use trainyard_engine::session::Session;
use trainyard_engine::snapshot::take;
use trainyard_engine::trainer::{Control, Summary, train};
use trainyard_engine::world;
use trainyard_tensor::Purpose;

const IN_MEMORY: &[&str] = &["memory.offload.optimizer=none", "memory.offload.parameters=none"];
const ON_DISK: &[&str] = &[
    "memory.offload.optimizer=disk",
    "memory.offload.parameters=disk",
    "memory.offload.activations=disk",
    "memory.offload.chunk_elements=4096",
];
const GRADIENTS: &[&str] = &["memory.offload.optimizer=disk", "memory.offload.gradients=disk"];
const OPTIMIZER: &[&str] = &["memory.offload.optimizer=disk", "memory.offload.chunk_elements=8192"];
const PARAMETERS: &[&str] = &["memory.offload.parameters=disk"];
const ONE: &[&str] = &["parallel.ranks=1"];
const REPLICAS: &[&str] = &["parallel.ranks=2"];
const STAGE_1: &[&str] = &["parallel.ranks=2", "parallel.zero_stage=1"];
const STAGE_3: &[&str] = &["parallel.ranks=2", "parallel.zero_stage=3"];

fn config(folder: &Path, name: &str, sets: &[&str]) -> Config {
    let text = folder.join("text.txt");
    if !text.exists() {
        std::fs::write(&text, trainyard_testing::text(3000)).unwrap();
    }
    let toml = format!(
        "[run]\nname = '{name}'\ndirectory = '{0}'\n[model]\ndim = 32\nlayers = 3\nheads = 4\n[tokenizer]\nkind = 'bytes'\n\
         [data]\ntrain = '{0}/text.txt'\nvalidation_fraction = 0.1\n[training]\nsequence_length = 16\nmicro_batch_size = 1\n\
         global_batch_size = 4\n[schedule]\nkind = 'constant'\nwarmup_steps = 0\n[compute]\nthreads = 1\n[evaluation]\ntokens_max = 48\n\
         [metrics]\ntensorboard = false\n",
        folder.display()
    );
    let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
    Config::parse("c.toml".as_ref(), &toml, &sets).unwrap()
}

/// Runs all ranks from `open` to the end.
fn run(ranks: &Config, open: impl Fn(trainyard_comm::Communicator) -> Result<Session> + Sync) -> Result<Summary> {
    let (stop, process_start) = (AtomicBool::new(false), Instant::now());
    world::on_threads(world::ranks(ranks).unwrap(), |world| {
        let mut session = open(world)?;
        let on_stuck = |what: &str| panic!("nothing here hangs for ever: {what}");
        train(&mut session, &mut Quiet, Control { stop: &stop, process_start, on_stuck })
    })
}

fn start(folder: &Path, name: &str, sets: &[&[&str]]) -> Result<Summary> {
    let config = config(folder, name, &sets.concat());
    run(&config, |world| Session::create(&config, world, |_| ()))
}

fn go_on(folder: &Path, name: &str, sets: &[&[&str]]) -> Result<Summary> {
    let auto = ["ranks", "zero_stage", "data_parallel_replicate_degree", "data_parallel_shard_degree"];
    let mut all: Vec<String> = auto.iter().map(|key| format!("parallel.{key}=auto")).collect();
    all.extend(["activations", "gradients"].map(|what| format!("memory.offload.{what}=none")));
    all.extend(sets.concat().iter().map(|set| (*set).to_owned()));
    let run_folder = folder.join(name);
    let going_on = GoingOn::new(&run_folder, &all);
    let config = Session::configuration(&going_on)?;
    run(&config, |world| Session::resume(&going_on, world, |_| ()))
}

/// The last checkpoint's tensors.
fn last(folder: &Path, name: &str) -> BTreeMap<String, Vec<u8>> {
    tensors(&find_latest(&folder.join(name)).unwrap().unwrap().checkpoint)
}

#[test]
fn a_run_goes_on_with_the_same_bits_whatever_is_on_disk() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    for dtype in ["precision.compute=bf16", "precision.compute=f32"] {
        let dtype = &[dtype][..];
        for (ranks, others) in [(ONE, [ONE, ONE]), (REPLICAS, [STAGE_3, STAGE_1])] {
            let name = |what: &str| format!("{}-{}-{what}", dtype[0].len(), ranks[0]);
            let whole = name("whole");
            start(folder, &whole, &[dtype, ranks, &["training.steps=6"]]).unwrap();
            let whole = last(folder, &whole);
            let cases: [[&[&str]; 4]; 5] = [
                [ranks, IN_MEMORY, others[0], ON_DISK],
                [others[0], ON_DISK, ranks, IN_MEMORY],
                [others[1], OPTIMIZER, others[0], PARAMETERS],
                [others[0], ON_DISK, others[1], ON_DISK],
                [ranks, GRADIENTS, others[1], GRADIENTS],
            ];
            for (number, [first_ranks, first, second_ranks, second]) in cases.into_iter().enumerate() {
                let name = name(&number.to_string());
                // A checkpoint in mid-run is streamed from disk while the run waits.
                let often = &["training.steps=3", "checkpoint.interval_steps=2"][..];
                start(folder, &name, &[dtype, first_ranks, first, often]).unwrap();
                go_on(folder, &name, &[second_ranks, second, &["training.steps=6"]]).unwrap();
                assert!(
                    last(folder, &name) == whole,
                    "{dtype:?} {first_ranks:?} {first:?}, then {second_ranks:?} {second:?}"
                );
                let left = std::fs::read_dir(folder.join(&name).join("offload")).map_or(0, Iterator::count);
                assert_eq!(left, 0, "files stay behind");
            }
        }
    }
}

/// A run under a limit below the size of its training state never uses more memory than the limit.
#[test]
fn a_model_of_four_and_sixteen_times_the_limit_trains_within_it() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let model = &["model.dim=128", "model.layers=80", "model.heads=4", "precision.compute=bf16", "training.steps=2"];
    let small = &["activation_checkpointing.mode=full", "memory.offload.chunk_elements=16384"];
    let in_memory = config(folder, "memory", model);
    let count =
        |world| Session::create(&in_memory, world, |_| ()).map(|session| session.rank.model().parameter_count());
    let parameters = world::on_threads(1, count).unwrap();
    std::fs::remove_dir_all(folder.join("memory")).unwrap();
    // bf16 copy, f32 master, f32 gradient, two f32 moments.
    let state = 18 * parameters;
    let offload =
        &["memory.offload.optimizer=disk", "memory.offload.parameters=disk", "memory.offload.activations=disk"];
    start(folder, "memory", &[&model[..]]).unwrap();
    for (part, gradients) in [(4, "memory.offload.gradients=none"), (16, "memory.offload.gradients=disk")] {
        let (name, limit) = (format!("part-{part}"), format!("memory.limit={}", state / part));
        let summary = start(folder, &name, &[&model[..], small, offload, &[gradients, &limit]]).unwrap();
        let (measured, predicted) = summary.memory_total;
        assert!(measured <= state / part, "{measured} of {}", state / part);
        assert_eq!(measured, predicted);
        assert!(last(folder, &name) == last(folder, "memory"), "a part of {part}");
    }
}

#[test]
fn a_step_that_does_not_fit_is_refused_with_what_would() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let model = &["model.dim=64", "model.layers=8", "training.steps=1", "training.micro_batch_size=4"][..];
    for (limit, ranks) in [("5MiB", ONE), ("4MiB", ONE), ("4MiB", REPLICAS)] {
        let ranks = [ranks, if ranks == ONE { &[] } else { &["training.micro_batch_size=2"] }].concat();
        let set = format!("memory.limit={limit}");
        let error = start(folder, "refused", &[model, &ranks, &[&set]]).map(drop).expect_err(limit).to_string();
        for part in ["a step needs", "over memory.limit", "params", "optimizer", "it fits with"] {
            assert!(error.contains(part), "no `{part}` in: {error}");
        }
        // The settings that the message suggests do fit.
        let (_, fits) = error.split_once("it fits with ").unwrap();
        for (number, advice) in fits.split("; or ").enumerate() {
            let settings = advice.rsplit_once(" (").unwrap().0.split(", ");
            let settings: Vec<String> = settings.map(|set| set.replace(" = ", "=")).collect();
            let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
            let name = format!("{limit}-{}-{number}", ranks.len());
            start(folder, &name, &[model, &ranks, &[&set], &settings])
                .unwrap_or_else(|error| panic!("{advice}: {error}"));
        }
    }
    let error = start(folder, "never", &[model, &["memory.limit=1MiB"]]).err().unwrap().to_string();
    assert!(error.contains("none of") && error.contains("the least"), "{error}");
}

/// A copy of the state is as large as masters and moments. If it does not fit beside the step,
/// nothing is copied, and training waits for each checkpoint.
#[test]
fn a_checkpoint_is_written_from_the_state_itself_where_no_copy_fits() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    for (number, ranks) in [ONE, REPLICAS, STAGE_3].into_iter().enumerate() {
        let sets = [ranks, &["training.steps=4", "checkpoint.interval_steps=1", "precision.compute=bf16"]].concat();
        let asked = config(folder, "asked", &sets);
        let needs = |world| {
            let session = Session::create(&asked, world, |_| ())?;
            let (memory, copy) = (session.prediction.memory, session.prediction.copy);
            let taken = take(&session.rank, &session.state, false)?;
            let regions = taken.parts.iter().flat_map(|part| &part.regions);
            assert_eq!(copy, regions.map(|region| region.bytes.len()).sum::<usize>(), "rank {}", session.world.rank());
            Ok(memory.peak_total() + memory.peak(Purpose::Comm) + copy)
        };
        let needed = world::on_threads(world::ranks(&asked).unwrap(), needs).unwrap();
        std::fs::remove_dir_all(folder.join("asked")).unwrap();
        let mut ends = Vec::new();
        for (what, limit) in [("copied", needed), ("in-place", needed - 1)] {
            let name = format!("{what}-{number}");
            let limit = format!("memory.limit={limit}");
            let config = config(folder, &name, &[&sets[..], &[&limit]].concat());
            let said = Mutex::new(Vec::new());
            run(&config, |world| {
                let session = Session::create(&config, world, |line| said.lock().unwrap().push(line.to_owned()))?;
                assert_eq!(session.copies_state, what == "copied");
                Ok(session)
            })
            .unwrap();
            let said =
                said.into_inner().unwrap().iter().any(|line| line.starts_with("training waits while a checkpoint"));
            assert_eq!(said, what != "copied");
            ends.push(last(folder, &name));
        }
        assert!(ends[0] == ends[1], "{ranks:?}");
    }
}

#[test]
fn a_folder_that_cannot_be_used_ends_the_run_before_it_begins() {
    let folder = tempfile::tempdir().unwrap();
    let directory = format!("memory.offload.directory='{}/text.txt/in'", folder.path().display());
    let sets = &["memory.offload.optimizer=disk", "training.steps=1", directory.as_str()];
    let error = start(folder.path(), "run", &[sets]).err().unwrap().to_string();
    assert!(error.contains("memory.offload.directory") && error.contains("optimizer"), "{error}");
}
