//! Tests that a run's memory does not grow with its steps. The test is alone in its process because
//! it reads the allocator's statistics.

use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};
use trainyard_engine::config::Config;
use trainyard_engine::metrics::{EvaluationMetrics, Progress, Quiet, StepMetrics};
use trainyard_engine::session::Session;
use trainyard_engine::trainer::{Control, train};
use trainyard_engine::world;
use trainyard_tensor::heap;

/// Reads the allocator's statistics after every step.
struct Books(Vec<usize>);

impl Progress for Books {
    fn begin(&mut self, _: u64, _: Option<u64>) {}
    fn step(&mut self, _: &StepMetrics, _: Option<u64>, _: Option<Duration>) {
        self.0.extend(heap::live_bytes());
    }
    fn evaluation(&mut self, _: &EvaluationMetrics) {}
    fn note(&mut self, _: &str) {}
    fn end(&mut self) {}
}

const STEPS: usize = 2000;

/// Live bytes after every step of a run of `ranks` threads.
fn live_bytes(ranks: usize) -> Vec<usize> {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text.txt");
    std::fs::write(&text, "to be or not to be ".repeat(400)).unwrap();
    let toml = format!(
        "[run]\nname = 'r'\ndirectory = '{0}'\n[model]\ndim = 8\nlayers = 1\nheads = 1\n[tokenizer]\nkind = 'bytes'\n\
         [data]\ntrain = '{0}/text.txt'\nvalidation_fraction = 0\n[training]\nsteps = {STEPS}\nsequence_length = 8\n\
         micro_batch_size = 1\nglobal_batch_size = {ranks}\n[parallel]\nranks = {ranks}\n[compute]\nthreads = 1\n\
         [checkpoint]\ninterval_steps = 10000\n[metrics]\nprofile = true\nprofile_steps = 10\n",
        folder.path().display()
    );
    let config = Config::parse("c.toml".as_ref(), &toml, &[]).unwrap();
    let (stop, process_start, books) = (AtomicBool::new(false), Instant::now(), Mutex::new(Vec::with_capacity(STEPS)));
    let ended = world::on_threads(ranks, |world| {
        let is_first = world.rank() == 0;
        let mut session = Session::create(&config, world, |_| ())?;
        let on_stuck = |what: &str| panic!("nothing here hangs for ever: {what}");
        let control = Control { stop: &stop, process_start, on_stuck };
        if !is_first {
            return train(&mut session, &mut Quiet, control).map(|_| ());
        }
        let mut first = Books(Vec::with_capacity(STEPS));
        train(&mut session, &mut first, control)?;
        *books.lock().unwrap() = first.0;
        Ok(())
    });
    ended.unwrap();
    books.into_inner().unwrap()
}

/// Regression: a trainer once kept all its steps' records, 0.8 KB per step and rank.
#[test]
fn the_memory_of_a_run_does_not_grow_with_its_steps() {
    if heap::live_bytes().is_none() {
        return trainyard_testing::skip("the allocator of this system keeps no books");
    }
    for ranks in [1, 2] {
        let live = live_bytes(ranks);
        assert_eq!(live.len(), STEPS);
        // Steps differ by the memory that other lanes still hold when the statistics are read.
        let least = |steps: std::ops::Range<usize>| *live[steps].iter().min().unwrap();
        let (early, late) = (least(STEPS / 5..2 * STEPS / 5), least(4 * STEPS / 5..STEPS));
        let grown = late.saturating_sub(early);
        assert!(grown < 60_000, "{ranks} ranks: {early} bytes were live early, {late} late");
    }
}
