//! A run that was stopped, or that failed, on one layout goes on with any other: with the same bits
//! where both sum in the same order, else with the losses of the run that nothing disturbed.

use crate::layouts::{Layout, of_four};
use crate::runs::{copy, run_to_the_end};
use crate::tensors::tensors;
use crate::{LOSS_MAX, record};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use trainyard_comm::fault::At;
use trainyard_engine::checkpoint::find_latest;
use trainyard_engine::config::Config;
use trainyard_engine::faults::{Faults, Hang, seeded};
use trainyard_engine::resume::GoingOn;
use trainyard_engine::session::Session;
use trainyard_engine::trainer::Ending;
use trainyard_engine::world;
use trainyard_program::Program;

const STEPS: u64 = 6;
/// Longer than any rank without a fault works on one instruction.
const DEADLINE: Duration = Duration::from_secs(3);

fn config(folder: &Path, name: &str, layout: &Layout, steps: u64) -> Config {
    let text = folder.join("text.txt");
    if !text.exists() {
        std::fs::write(&text, trainyard_testing::text(3000)).unwrap();
    }
    let toml = format!(
        "[run]\nname = '{name}'\ndirectory = '{0}'\n[model]\ndim = 48\nlayers = 4\nheads = 6\nkv_heads = 2\n\
         tie_embeddings = false\n[tokenizer]\nkind = 'bytes'\n[data]\ntrain = '{0}/text.txt'\nvalidation_fraction = 0\n\
         [training]\nsteps = {steps}\nsequence_length = 16\nmicro_batch_size = 1\nglobal_batch_size = 8\n\
         [schedule]\nkind = 'constant'\nwarmup_steps = 0\n[precision]\ncompute = 'f32'\n[compute]\nthreads = 1\n\
         [metrics]\ntensorboard = false\n[checkpoint]\ninterval_steps = 2\n[parallel]\ndeadline_seconds = {1}\nverify = true\n",
        folder.display(),
        DEADLINE.as_secs_f64(),
    );
    Config::parse("c.toml".as_ref(), &toml, &layout.sets()).unwrap()
}

/// A run's losses by step, and the tensors of its last checkpoint.
struct Ended {
    losses: BTreeMap<u64, f64>,
    tensors: BTreeMap<String, Vec<u8>>,
}

impl Ended {
    fn read(run: &Path) -> Ended {
        let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
        let lines = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        let losses = lines.map(|line| (line["step"].as_u64().unwrap(), line["loss"].as_f64().unwrap())).collect();
        Ended { losses, tensors: tensors(&find_latest(run).unwrap().unwrap().checkpoint) }
    }
}

/// Trains a run to its end.
fn start(folder: &Path, name: &str, layout: &Layout, steps: u64) -> Ended {
    let config = config(folder, name, layout, steps);
    let ending = run_to_the_end(&config, |world| Session::create(&config, world, |_| ()));
    assert_eq!(ending.unwrap(), Ending::Complete);
    Ended::read(&folder.join(name))
}

/// Resumes a run with another layout, to the end.
fn go_on(run: &Path, layout: &Layout) -> Ended {
    // Settings of the layout before that this one does not have.
    let unset = ["sequence_parallel", "pipeline_schedule"].map(|key| format!("parallel.{key}=auto"));
    let sets: Vec<String> = unset.into_iter().chain(layout.sets()).chain([format!("training.steps={STEPS}")]).collect();
    let going_on = GoingOn::new(run, &sets);
    let config = Session::configuration(&going_on).unwrap();
    let ending = run_to_the_end(&config, |world| Session::resume(&going_on, world, |_| ()));
    assert_eq!(ending.unwrap(), Ending::Complete);
    Ended::read(run)
}

/// The comparison of a run that went on with one that nothing disturbed.
#[derive(Default, serde::Serialize)]
struct Comparison {
    /// Number of pairs of layouts.
    pairs: usize,
    /// Number of pairs that sum in the same order and have the same bits.
    same: usize,
    /// The largest relative difference of a loss of the others.
    losses: f64,
    #[serde(skip)]
    failures: Vec<String>,
}

impl Comparison {
    fn add(&mut self, what: &str, shares_bits: bool, on: &Ended, whole: &Ended) {
        self.pairs += 1;
        if [on, whole].iter().any(|run| run.losses.keys().copied().ne(1..=STEPS)) {
            self.failures.push(format!("{what}: steps {:?}", on.losses.keys()));
            return;
        }
        if shares_bits {
            let same = on.losses == whole.losses && on.tensors == whole.tensors;
            self.same += usize::from(same);
            if !same {
                self.failures.push(format!("{what}: bits differ"));
            }
            return;
        }
        let differences = on.losses.values().zip(whole.losses.values()).map(|(a, b)| (a / b - 1.0).abs());
        let most = differences.max_by(f64::total_cmp).unwrap();
        self.losses = self.losses.max(most);
        if most.is_nan() || most > LOSS_MAX {
            self.failures.push(format!("{what}: losses differ by {most:e}"));
        }
        if on.tensors.keys().ne(whole.tensors.keys()) {
            self.failures.push(format!("{what}: other tensors"));
        }
    }

    fn end(self, name: &str) {
        record(name, &self);
        assert!(self.failures.is_empty(), "{} failures:\n{}", self.failures.len(), self.failures.join("\n"));
    }
}

/// All layouts of four ranks, and one rank.
fn layouts() -> Vec<Layout> {
    of_four().into_iter().chain([Layout::ONE]).collect()
}

#[test]
fn a_run_goes_on_with_any_other_layout() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let layouts = layouts();
    let all = layouts.len() * (layouts.len() - 1);
    let mut made: BTreeMap<Layout, (String, Ended)> = BTreeMap::new();
    let mut comparison = Comparison::default();
    for pair in 0..trainyard_testing::cases("pairs of layouts", 8, all as u64) as usize {
        // A step of 7 comes to each of 15 layouts, and first to distant ones.
        let (from, distance) = (pair % layouts.len(), 1 + pair / layouts.len());
        let (first, second) = (layouts[from], layouts[(from + 7 * distance) % layouts.len()]);
        let (half, whole) = made.entry(first).or_insert_with(|| {
            let half = format!("half-{from}");
            start(folder, &half, &first, STEPS / 2);
            (half, start(folder, &format!("whole-{from}"), &first, STEPS))
        });
        let run = folder.join(format!("pair-{pair}"));
        copy(&folder.join(half), &run);
        let on = go_on(&run, &second);
        comparison.add(&format!("{first}, then {second}"), first.shares_bits_with(&second), &on, whole);
        std::fs::remove_dir_all(&run).unwrap();
    }
    comparison.end("resume");
}

#[test]
fn a_run_that_failed_at_any_moment_goes_on_with_another_layout() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let layouts = layouts();
    let mut comparison = Comparison::default();
    // As in `faults.rs`, TRAINYARD_FAULT_SEED repeats one seed.
    let seeds = match std::env::var("TRAINYARD_FAULT_SEED") {
        Ok(seed) => vec![seed.parse().unwrap()],
        Err(_) => (0..trainyard_testing::cases("seeded faults", 3, 20)).collect::<Vec<u64>>(),
    };
    for seed in seeds {
        // All but one rank, which no other would notice the fault of.
        let from = (seed * 5) as usize % (layouts.len() - 1);
        let (first, second) = (layouts[from], layouts[(from + 4) % layouts.len()]);
        let programs = Mutex::new(BTreeMap::<usize, Program>::new());
        let whole_config = config(folder, &format!("whole-{seed}"), &first, STEPS);
        let ending = run_to_the_end(&whole_config, |world| {
            let rank = world.rank();
            let session = Session::create(&whole_config, world, |_| ())?;
            programs.lock().unwrap().insert(rank, session.programs[0].clone());
            Ok(session)
        });
        assert_eq!(ending.unwrap(), Ending::Complete);
        let programs: Vec<Program> = programs.into_inner().unwrap().into_values().collect();
        // The first checkpoint exists; a run without one has nothing to go on from.
        let mut fault = seeded(seed, &programs, STEPS - 4, DEADLINE * 2);
        let mut struck = String::new();
        if let At::Position { step, instruction } = &mut fault.at {
            *step += 4;
            struck = format!("{:?}", programs[fault.rank as usize].instructions[*instruction as usize]);
        }
        let name = format!("failed-{seed}");
        let failed = config(folder, &name, &first, STEPS);
        let faults = Arc::new(Faults::new([fault.clone()], Hang::UntilNoticed));
        let ending = run_to_the_end(&failed, |world| {
            world::prepare(&world, &failed, Some(&faults));
            let mut session = Session::create(&failed, world, |_| ())?;
            session.rank.inject(Arc::clone(&faults));
            Ok(session)
        });
        let what = format!("seed {seed}: {first}, `{fault}`, then {second}");
        assert!(ending.is_err(), "{what}: nobody noticed what happened at {struck}");
        let (run, whole) = (folder.join(&name), folder.join(format!("whole-{seed}")));
        let on = go_on(&run, &second);
        comparison.add(&what, first.shares_bits_with(&second), &on, &Ended::read(&whole));
    }
    comparison.end("faults");
}
