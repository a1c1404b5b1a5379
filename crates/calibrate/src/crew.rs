//! Ranks that train side by side on random tokens, step by step.

use std::path::Path;
use trainyard_comm::{Communicator, local};
use trainyard_engine::bench::{Stepper, Timed};
use trainyard_engine::config::{Config, Inputs, Resolved};
use trainyard_engine::{EngineError, Result};

/// The configuration that `sets` describe, on random tokens.
///
/// # Errors
///
/// Keys that do not exist or do not fit together.
pub fn resolve(sets: &[String]) -> Result<Resolved> {
    let inputs = Inputs { batches_supplied: true, ..Inputs::of_this_machine() };
    Ok(Config::parse(Path::new("probe"), "", sets)?.resolve(&inputs)?)
}

/// Ranks of this process, each with its own threads.
pub struct Crew {
    ranks: Vec<Stepper>,
    /// What they talk through, to wake the others when one fails.
    worlds: Vec<Communicator>,
}

impl Crew {
    /// The ranks of one run of `resolved`.
    ///
    /// # Errors
    ///
    /// A model that does not fit.
    pub fn together(resolved: &Resolved) -> Result<Crew> {
        let worlds: Vec<Communicator> = local::World::new(resolved.parallel.ranks).into_iter().collect();
        let ranks = at_once(worlds.iter(), |world| Stepper::new(resolved, Some(world)))?;
        Ok(Crew { ranks, worlds })
    }

    /// `ranks` runs of one rank each that know nothing of each other.
    ///
    /// # Errors
    ///
    /// As [`Crew::together`].
    pub fn apart(resolved: &Resolved, ranks: u32) -> Result<Crew> {
        let ranks = at_once(0..ranks, |_| Stepper::new(resolved, None))?;
        Ok(Crew { ranks, worlds: Vec::new() })
    }

    /// The ranks.
    pub fn ranks(&self) -> &[Stepper] {
        &self.ranks
    }

    /// One step on every rank at once.
    ///
    /// # Errors
    ///
    /// The first rank's that fails; the others are told.
    pub fn step(&mut self) -> Result<Vec<Timed>> {
        let worlds = self.worlds.iter().map(Some).chain(std::iter::repeat(None));
        at_once(self.ranks.iter_mut().zip(worlds), |(rank, world)| {
            let result = rank.step();
            if let (Err(error), Some(world)) = (&result, world) {
                world.abort(error.to_string());
            }
            result
        })
    }
}

/// Runs `body` on every item, each on a thread of its own.
fn at_once<I: Send, T: Send>(items: impl Iterator<Item = I>, body: impl Fn(I) -> Result<T> + Sync) -> Result<Vec<T>> {
    let body = &body;
    std::thread::scope(|scope| {
        let threads: Vec<_> = items.map(|item| scope.spawn(move || body(item))).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, Result<T>>| {
            let panicked = |_| EngineError::Panicked { rank: 0, message: "a probe".to_owned() };
            thread.join().map_err(panicked)?
        };
        let results: Vec<Result<T>> = threads.into_iter().map(join).collect();
        results.into_iter().collect()
    })
}
