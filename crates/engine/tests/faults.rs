//! Tests of ranks that fail. Each failed rank is named on every other rank, no wrong checkpoint is
//! written, and the resumed run ends with the bits of an undisturbed one.
//!
//! Faults are drawn from seeds. Only the first seeds are tried unless all sweeps are requested.
//! `TRAINYARD_FAULT_SEED=17 cargo test -p trainyard-engine --test faults` repeats one seed.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use trainyard_comm::fault::{Action, At, Fault};
use trainyard_comm::{Communicator, local};
use trainyard_engine::config::Config;
use trainyard_engine::faults::{Faults, Hang, seeded};
use trainyard_engine::metrics::progress::Quiet;
use trainyard_engine::resume::GoingOn;
use trainyard_engine::session::Session;
use trainyard_engine::trainer::{Control, train};
use trainyard_engine::{EngineError, Result, world};
use trainyard_program::Program;

const STEPS: u64 = 6;
/// The deadline. Long enough for a busy machine: no rank without a fault works this long on one
/// instruction.
const DEADLINE: Duration = Duration::from_secs(3);
/// Number of concurrent runs. They spend most of their time waiting for deadlines.
const AT_ONCE: usize = 6;

const LAYOUTS: [&[&str]; 7] = [
    &["parallel.ranks=2"],
    &["parallel.ranks=2", "parallel.zero_stage=3"],
    &["parallel.ranks=4", "parallel.data_parallel_shard_degree=2", "parallel.zero_stage=3"],
    &["parallel.ranks=2", "parallel.zero_stage=1", "parallel.reduce_schedule='micro_batch'"],
    &[
        "parallel.ranks=4",
        "parallel.pipeline_parallel_degree=2",
        "parallel.pipeline_schedule='zero_bubble'",
        "parallel.tensor_parallel_degree=2",
        "model.tie_embeddings=true",
    ],
    &[
        "parallel.ranks=4",
        "parallel.pipeline_parallel_degree=2",
        "parallel.pipeline_schedule='interleaved'",
        "parallel.zero_stage=3",
    ],
    &[
        "parallel.ranks=4",
        "model.family='mixtral'",
        "experts.count=4",
        "parallel.expert_parallel_degree=2",
        "activation_checkpointing.mode='full'",
    ],
];
/// The layout with stages and parts of every product.
const SPLIT: usize = 4;

fn config(folder: &Path, name: &str, layout: usize) -> Config {
    let text = format!(
        "[run]\ndirectory = '{folder}'\nname = '{name}'\n[model]\nfamily = 'llama'\ndim = 16\nlayers = 2\nheads = 2\nmax_sequence_length = 16\n\
         [tokenizer]\nkind = 'bytes'\n[data]\ntrain = ['{folder}/text.txt']\nvalidation_fraction = 0.0\n[training]\nsteps = {STEPS}\n\
         global_batch_size = 8\nmicro_batch_size = 1\nsequence_length = 16\n[precision]\ncompute = 'f32'\n[compute]\nthreads = 1\n\
         [checkpoint]\ninterval_steps = 2\nkeep_last = 100\n[parallel]\ndeadline_seconds = {deadline}\nverify = true\n",
        folder = folder.display(),
        deadline = DEADLINE.as_secs_f64()
    );
    let sets: Vec<String> = LAYOUTS[layout].iter().map(|set| (*set).to_owned()).collect();
    Config::parse("test.toml".as_ref(), &text, &sets).unwrap()
}

/// The result of each rank, and its program if it got that far.
type Ends = Vec<Result<Program>>;

/// Trains on all ranks: a new run, or the one in `resume`.
fn run(config: &Config, resume: Option<&Path>, faults: Option<&Arc<Faults>>) -> Ends {
    let worlds = local::World::new(config.parallel.ranks.unwrap());
    let rank = |world: Communicator| {
        world::prepare(&world, config, faults.map(Arc::as_ref));
        let mut session = match resume {
            Some(folder) => Session::resume(&GoingOn::new(folder, &[]), world, |_| ())?,
            None => Session::create(config, world, |_| ())?,
        };
        faults.iter().for_each(|faults| session.rank.inject(Arc::clone(faults)));
        let stop = AtomicBool::new(false);
        let on_stuck = |what: &str| panic!("nothing here hangs for ever: {what}");
        train(&mut session, &mut Quiet, Control { stop: &stop, process_start: Instant::now(), on_stuck })?;
        Ok(session.programs[0].clone())
    };
    std::thread::scope(|scope| {
        let ranks = worlds.into_iter().map(|world| scope.spawn(|| world::run(world, rank)));
        ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// The tensors of every checkpoint of a run, by step.
fn checkpoints(run: &Path) -> BTreeMap<String, BTreeMap<String, Vec<u8>>> {
    let Ok(entries) = std::fs::read_dir(run.join("checkpoints")) else { return BTreeMap::new() };
    let name = |path: &Path| path.file_name().unwrap().to_string_lossy().into_owned();
    let steps = entries.map(|entry| entry.unwrap().path()).filter(|path| name(path).starts_with("step-"));
    let tensors = |step: &Path| {
        let files = std::fs::read_dir(step).unwrap().map(|entry| entry.unwrap().path());
        let tensors = files.filter(|path| path.extension().is_some_and(|extension| extension == "safetensors"));
        tensors.map(|path| (name(&path), std::fs::read(&path).unwrap())).collect()
    };
    steps.map(|step| (name(&step), tensors(&step))).collect()
}

/// Describes a wrong reaction of a run to the fault; None if the reaction is right.
fn trouble(folder: &Path, name: &str, layout: usize, fault: &Fault) -> Option<String> {
    let faults = Arc::new(Faults::new([fault.clone()], Hang::UntilNoticed));
    let config = config(folder, name, layout);
    let ends = run(&config, None, Some(&faults));
    let harmless = matches!(fault.action, Action::Delay(delay) if delay < DEADLINE / 2);
    for (rank, end) in ends.iter().enumerate() {
        match end {
            Ok(_) if harmless => {}
            Ok(_) => return Some(format!("rank {rank} noticed nothing")),
            Err(error) if harmless => return Some(format!("rank {rank}: {error}")),
            // The failed rank has the original error.
            Err(error) if rank == fault.rank as usize && error.failure().is_none() && error.is_fault() => {}
            Err(error) => {
                let named = error.failure().map(|failure| failure.culprits.iter().map(|peer| peer.rank).collect());
                if named != Some(vec![fault.rank]) {
                    return Some(format!("rank {rank} names {named:?}: {error}"));
                }
            }
        }
    }
    let run_folder = folder.join(name);
    let whole = checkpoints(&folder.join(format!("whole-{layout}")));
    for (step, tensors) in checkpoints(&run_folder) {
        if whole[&step] != tensors {
            return Some(format!("{step} is wrong"));
        }
    }
    if harmless {
        return None;
    }
    let reports = std::fs::read_dir(run_folder.join("faults")).map_or(0, Iterator::count);
    if reports != ends.len() {
        return Some(format!("{reports} reports of {} ranks", ends.len()));
    }
    if let Some(error) = run(&config, Some(&run_folder), None).into_iter().find_map(Result::err) {
        return Some(format!("the run does not go on: {error}"));
    }
    let last = |checkpoints: BTreeMap<_, _>| checkpoints.into_iter().next_back();
    (last(checkpoints(&run_folder)) != last(whole)).then(|| "the run that went on ends with other bits".to_owned())
}

/// Makes a folder with a text and, for each layout, an undisturbed run. Returns the programs of
/// these runs too.
fn prepared() -> (tempfile::TempDir, Vec<Vec<Program>>) {
    let folder = tempfile::tempdir().unwrap();
    let line = |i: usize| format!("The {} shard of {} is gathered {} times.\n", i % 7, i * i % 31, i * 5 % 11);
    std::fs::write(folder.path().join("text.txt"), (0..200).map(line).collect::<String>()).unwrap();
    let whole = |layout| {
        let ends = run(&config(folder.path(), &format!("whole-{layout}"), layout), None, None);
        ends.into_iter().map(|end| end.unwrap()).collect()
    };
    let programs = (0..LAYOUTS.len()).map(whole).collect();
    (folder, programs)
}

#[test]
fn a_hundred_faults_are_named_and_survived() {
    let (folder, programs) = prepared();
    let seeds = match std::env::var("TRAINYARD_FAULT_SEED") {
        Ok(seed) => vec![seed.parse().unwrap()],
        Err(_) => (0..trainyard_testing::cases("seeded faults", 20, 100)).collect::<Vec<u64>>(),
    };
    let next = AtomicU64::new(0);
    let complaints = Mutex::new(Vec::new());
    let drawn = Mutex::new(BTreeMap::new());
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some(&seed) = seeds.get(next.fetch_add(1, Ordering::Relaxed) as usize) {
                    let layout = seed as usize % LAYOUTS.len();
                    let delay = if seed / 5 % 2 == 0 { Duration::from_millis(20) } else { DEADLINE + DEADLINE / 2 };
                    let fault = seeded(seed, &programs[layout], STEPS, delay);
                    let action = fault.to_string().split(' ').next().unwrap().to_owned();
                    *drawn.lock().unwrap().entry(action).or_insert(0) += 1;
                    if let Some(trouble) = trouble(folder.path(), &format!("seed-{seed}"), layout, &fault) {
                        complaints.lock().unwrap().push(format!("seed {seed}, layout {layout}, `{fault}`: {trouble}"));
                    }
                }
            });
        }
    });
    println!("drawn: {:?}", drawn.into_inner().unwrap());
    let complaints = complaints.into_inner().unwrap();
    assert!(complaints.is_empty(), "{} of {}:\n{}", complaints.len(), seeds.len(), complaints.join("\n"));
}

#[test]
fn the_report_says_where_every_lane_was() {
    let (folder, programs) = prepared();
    let forward = programs[1][1].instructions.iter().position(|i| i.action.name() == "forward").unwrap() as u32;
    let fault = Fault { rank: 1, at: At::Position { step: 3, instruction: forward }, action: Action::Refuse };
    let faults = Arc::new(Faults::new([fault], Hang::UntilNoticed));
    let ends = run(&config(folder.path(), "refused", 1), None, Some(&faults));
    let errors: Vec<EngineError> = ends.into_iter().map(|end| end.err().unwrap()).collect();
    let (told, knows) = (errors[0].to_string(), errors[1].to_string());
    assert!(knows.contains("rank 1 was refused memory on purpose at step 3"), "{knows}");
    assert!(told.contains("rank 1") && told.contains("refused memory on purpose"), "{told}");
    assert!(told.contains("where the ranks were") && told.contains("\n  rank 0 on "), "{told}");
    let reports = std::fs::read_dir(folder.path().join("refused/faults")).unwrap();
    let path = reports.map(|entry| entry.unwrap().path()).find(|path| path.ends_with_rank(1)).unwrap();
    let report: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let lanes = report["lanes"].as_array().unwrap();
    let compute = lanes.iter().find(|lane| lane["lane"] == "compute").unwrap();
    assert_eq!((&compute["step"], &compute["instruction"]), (&3.into(), &forward.into()), "{report:#}");
    assert!(compute["what"].as_str().unwrap().starts_with("forward"), "{compute}");
    assert_eq!(report["failure"]["culprits"][0]["rank"], 1, "{report:#}");
}

/// A fault in each kind of instruction of stages and parts is named on all ranks. The report has
/// the instruction and its unit, and the run goes on from its last checkpoint.
#[test]
fn faults_in_exchanges_of_stages_and_parts_are_named() {
    let (folder, programs) = prepared();
    let programs = &programs[SPLIT];
    let names = ["forward", "backward", "exchange", "send", "recv", "tie"];
    let actions = [Action::Kill, Action::Hang, Action::Refuse];
    let all = names.len() as u64 * actions.len() as u64;
    let each = trainyard_testing::cases("faults in instructions", names.len() as u64, all) as usize / names.len();
    let complaints = Mutex::new(Vec::new());
    let of = |number: usize, action: Action| {
        let name = names[number];
        // Another rank for each instruction: the last that has it in its program.
        let places = (0u32..).zip(programs).filter_map(|(rank, program)| {
            let last = program.instructions.iter().rposition(|instruction| instruction.action.name() == name);
            Some((rank, last? as u32))
        });
        let places: Vec<(u32, u32)> = places.collect();
        let (rank, instruction) = places[number % places.len()];
        let fault = Fault { rank, at: At::Position { step: 3, instruction }, action };
        let run_name = format!("{name}-{}", fault.to_string().split(' ').next().unwrap());
        if let Some(trouble) = trouble(folder.path(), &run_name, SPLIT, &fault) {
            complaints.lock().unwrap().push(format!("{name}, `{fault}`: {trouble}"));
        }
        let unit = &programs[rank as usize].units
            [programs[rank as usize].instructions[instruction as usize].action.unit().unwrap() as usize];
        let reports = std::fs::read_dir(folder.path().join(&run_name).join("faults")).unwrap();
        let own = reports.map(|entry| entry.unwrap().path()).find(|path| path.ends_with_rank(rank as usize)).unwrap();
        let report: serde_json::Value = serde_json::from_slice(&std::fs::read(own).unwrap()).unwrap();
        let lane = programs[rank as usize].instructions[instruction as usize].action.lane().name();
        let lanes = report["lanes"].as_array().unwrap();
        let at = lanes.iter().find(|at| at["lane"] == lane).unwrap_or_else(|| panic!("no lane {lane}: {report:#}"));
        assert_eq!((&at["step"], &at["instruction"]), (&3.into(), &instruction.into()), "{report:#}");
        assert_eq!(at["what"], format!("{name} {unit}"), "{report:#}");
    };
    std::thread::scope(|scope| {
        for number in 0..names.len() {
            let of = &of;
            scope.spawn(move || (number..number + each).for_each(|action| of(number, actions[action % actions.len()])));
        }
    });
    let complaints = complaints.into_inner().unwrap();
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
}

trait Report {
    fn ends_with_rank(&self, rank: usize) -> bool;
}

impl Report for Path {
    fn ends_with_rank(&self, rank: usize) -> bool {
        self.to_string_lossy().ends_with(&format!("-rank-{rank}.json"))
    }
}
