//! A small run on its own text, and the tensors that it ends with. Beside this file a test includes
//! `runs.rs` and `tensors.rs`.
#![allow(dead_code, reason = "each test file uses a part of it")]

use crate::runs::run_to_the_end;
use crate::tensors::tensors;
use std::collections::BTreeMap;
use std::path::Path;
use trainyard_comm::Communicator;
use trainyard_engine::Result;
use trainyard_engine::checkpoint::find_latest;
use trainyard_engine::config::Config;
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
