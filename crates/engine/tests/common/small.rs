//! A small run on its own text, and the tensors that it ends with. Beside this file a test includes
//! `runs.rs` and `tensors.rs`.
#![allow(dead_code, reason = "each test file uses a part of it")]

use crate::runs::{copy, run_to_the_end};
use crate::tensors::tensors;
use std::collections::BTreeMap;
use std::path::Path;
use trainyard_comm::Communicator;
use trainyard_engine::Result;
use trainyard_engine::checkpoint::{Choice, find_latest};
use trainyard_engine::config::Config;
use trainyard_engine::resume::GoingOn;
use trainyard_engine::session::Session;
use trainyard_engine::trainer::Ending;

/// The configuration of the run `name` in `folder`.
pub fn config(folder: &Path, name: &str, sets: &[&str]) -> Config {
    let text = folder.join("text.txt");
    if !text.exists() {
        std::fs::write(&text, trainyard_testing::text(3000)).unwrap();
    }
    let toml = format!(
        "[run]\nname = '{name}'\ndirectory = '{0}'\n[model]\ndim = 32\nlayers = 2\nheads = 4\n[tokenizer]\nkind = 'bytes'\n\
         [data]\ntrain = '{0}/text.txt'\nvalidation_fraction = 0\n[training]\nsequence_length = 16\nmicro_batch_size = 1\n\
         [schedule]\nkind = 'constant'\nwarmup_steps = 0\n[compute]\nthreads = 1\n[metrics]\ntensorboard = false\n",
        folder.display()
    );
    let mut all = vec!["training.global_batch_size=4".to_owned()];
    all.extend(sets.iter().map(|set| (*set).to_owned()));
    Config::parse("c.toml".as_ref(), &toml, &all).unwrap()
}

/// Runs all ranks from `open` to the end, and returns the final checkpoint's tensors.
pub fn run(
    folder: &Path,
    ranks: &Config,
    open: impl Fn(Communicator) -> Result<Session> + Sync,
) -> BTreeMap<String, Vec<u8>> {
    assert_eq!(run_to_the_end(ranks, open).unwrap(), Ending::Complete);
    tensors(&find_latest(folder).unwrap().unwrap().checkpoint)
}

/// Runs `name` from its beginning to the end.
pub fn start(folder: &Path, name: &str, sets: &[&str]) -> BTreeMap<String, Vec<u8>> {
    let config = config(folder, name, sets);
    run(&folder.join(name), &config, |world| Session::create(&config, world, |_| ()))
}

/// Resumes the copy `name` of the run `from` at `step`, on ranks that `sets` divide, to the end.
pub fn go_on(folder: &Path, from: &str, name: &str, step: u64, sets: &[&str]) -> BTreeMap<String, Vec<u8>> {
    copy(&folder.join(from), &folder.join(name));
    let auto = ["ranks", "zero_stage", "data_parallel_replicate_degree", "data_parallel_shard_degree"]
        .map(|key| format!("parallel.{key}=auto"));
    let all: Vec<String> = auto.into_iter().chain(sets.iter().map(|set| (*set).to_owned())).collect();
    let run_folder = folder.join(name);
    let going_on = GoingOn { checkpoint: Choice::Step(step), ..GoingOn::new(&run_folder, &all) };
    let config = Session::configuration(&going_on).unwrap();
    run(&run_folder, &config, |world| Session::resume(&going_on, world, |_| ()))
}
