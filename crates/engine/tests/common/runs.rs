//! Runs with a folder, on ranks that are threads.
#![allow(dead_code, reason = "each test file uses a part of it")]

use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Instant;
use trainyard_comm::Communicator;
use trainyard_engine::Result;
use trainyard_engine::config::Config;
use trainyard_engine::metrics::Quiet;
use trainyard_engine::session::Session;
use trainyard_engine::trainer::{Control, Ending, train};
use trainyard_engine::world;

/// Runs all ranks of `config` from `open` to the end.
pub fn run_to_the_end(config: &Config, open: impl Fn(Communicator) -> Result<Session> + Sync) -> Result<Ending> {
    let (stop, process_start) = (AtomicBool::new(false), Instant::now());
    world::on_threads(world::ranks(config).unwrap(), |world| {
        let mut session = open(world)?;
        let on_stuck = |what: &str| panic!("nothing here hangs for ever: {what}");
        Ok(train(&mut session, &mut Quiet, Control { stop: &stop, process_start, on_stuck })?.ending)
    })
}

/// Copies a folder with everything in it.
pub fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().map(std::result::Result::unwrap) {
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}
