//! Ranks that train side by side on random tokens, step by step.
//!
//! Each rank keeps one thread for its whole life, because kernels keep their buffers per thread.

use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use trainyard_comm::{Communicator, local};
use trainyard_engine::bench::{Stepper, Timed};
use trainyard_engine::config::{Config, Inputs, Resolved};
use trainyard_engine::rank::Pace;
use trainyard_engine::{EngineError, Result};
use trainyard_program::Program;
use trainyard_tensor::Device;

/// Resolves the configuration with the keys `sets` on random tokens. `inputs` describes where its
/// ranks run.
///
/// # Errors
///
/// Keys that do not exist or contradict each other.
pub fn resolve(sets: &[String], inputs: Inputs) -> Result<Resolved> {
    let inputs = Inputs { batches_supplied: true, ..inputs };
    Ok(Config::parse(Path::new("probe"), "", sets)?.resolve(&inputs)?)
}

/// The ranks of this process, each with its own threads.
pub struct Ranks {
    ranks: Vec<Member>,
}

/// One rank, seen from outside its thread.
pub struct Member {
    /// The device of its kernels.
    pub device: Device,
    /// The program of its step.
    pub program: Program,
    /// Each message starts a step. The thread ends when the sender is dropped.
    go: Option<Sender<()>>,
    made: Receiver<Result<Timed>>,
    thread: Option<JoinHandle<()>>,
}

impl Ranks {
    /// Starts the ranks of one run of `resolved`.
    ///
    /// # Errors
    ///
    /// A model that does not fit.
    pub fn together(resolved: &Resolved) -> Result<Ranks> {
        let worlds = local::World::new(resolved.parallel.ranks).into_iter().map(Some);
        Ranks::of(resolved, worlds.collect(), None)
    }

    /// As [`Ranks::together`], with passes held to a pace.
    ///
    /// # Errors
    ///
    /// As [`Ranks::together`].
    pub fn paced(resolved: &Resolved, pace: &Pace) -> Result<Ranks> {
        let worlds = local::World::new(resolved.parallel.ranks).into_iter().map(Some);
        Ranks::of(resolved, worlds.collect(), Some(pace))
    }

    /// Starts the one rank of a run of `resolved` that is in this process. The other ranks are in
    /// the other processes of `world`.
    ///
    /// # Errors
    ///
    /// As [`Ranks::together`].
    pub(crate) fn one_of(resolved: &Resolved, world: Communicator) -> Result<Ranks> {
        Ranks::of(resolved, vec![Some(world)], None)
    }

    /// Starts `ranks` independent runs of one rank each.
    ///
    /// # Errors
    ///
    /// As [`Ranks::together`].
    pub fn apart(resolved: &Resolved, ranks: u32) -> Result<Ranks> {
        Ranks::of(resolved, (0..ranks).map(|_| None).collect(), None)
    }

    fn of(resolved: &Resolved, worlds: Vec<Option<Communicator>>, pace: Option<&Pace>) -> Result<Ranks> {
        let begun: Vec<_> = worlds.into_iter().map(|world| begin(resolved.clone(), world, pace.cloned())).collect();
        let ranks = begun.into_iter().map(Begun::wait).collect::<Vec<_>>();
        Ok(Ranks { ranks: ranks.into_iter().collect::<Result<_>>()? })
    }

    /// The ranks.
    pub fn members(&self) -> &[Member] {
        &self.ranks
    }

    /// Runs one step on every rank at once.
    ///
    /// # Errors
    ///
    /// The error of the first rank that fails. The others are told.
    pub fn step(&mut self) -> Result<Vec<Timed>> {
        for rank in &self.ranks {
            // If a rank has ended, its error is reported below.
            let _ = rank.go.as_ref().map(|go| go.send(()));
        }
        let made: Vec<Result<Timed>> =
            self.ranks.iter().map(|rank| rank.made.recv().unwrap_or_else(|_| Err(gone()))).collect();
        made.into_iter().collect()
    }
}

/// A rank that is being started.
struct Begun {
    made: Receiver<Result<(Device, Program)>>,
    go: Sender<()>,
    steps: Receiver<Result<Timed>>,
    thread: JoinHandle<()>,
}

/// Starts a rank's thread. All ranks of a world start together.
fn begin(resolved: Resolved, world: Option<Communicator>, pace: Option<Pace>) -> Begun {
    let (tell, made) = channel();
    let (go, words) = channel();
    let (done, steps) = channel();
    let work = move || {
        let mut stepper = match Stepper::new(&resolved, world.as_ref()) {
            Ok(stepper) => stepper,
            Err(error) => {
                tell_others(world.as_ref(), &error);
                // The receiver is gone only if the caller has failed.
                let _ = tell.send(Err(error));
                return;
            }
        };
        if let Some(pace) = pace {
            stepper.pace(pace);
        }
        let _ = tell.send(Ok((stepper.device().clone(), stepper.program().clone())));
        while words.recv().is_ok() {
            let step = stepper.step();
            if let Err(error) = &step {
                tell_others(world.as_ref(), error);
            }
            if done.send(step).is_err() {
                return;
            }
        }
    };
    let thread = std::thread::Builder::new().name("probe".to_owned()).spawn(work);
    Begun { made, go, steps, thread: thread.expect("the operating system starts a thread") }
}

fn tell_others(world: Option<&Communicator>, error: &EngineError) {
    // If several ranks failed, the first failure of the world counts.
    if let Some(world) = world {
        world.abort(error.to_string());
    }
}

fn gone() -> EngineError {
    EngineError::Panicked { rank: 0, message: "a probe's rank has ended".to_owned() }
}

impl Begun {
    fn wait(self) -> Result<Member> {
        let (device, program) = self.made.recv().unwrap_or_else(|_| Err(gone()))?;
        Ok(Member { device, program, go: Some(self.go), made: self.steps, thread: Some(self.thread) })
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        // All threads are told before any is joined, because ranks end together.
        self.ranks.iter_mut().for_each(|rank| rank.go = None);
        for rank in &mut self.ranks {
            if let Some(thread) = rank.thread.take() {
                // The step that a panic ended has reported it.
                let _ = thread.join();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_that_train_together_have_one_loss_and_a_model_that_does_not_fit_is_an_error() {
        let sets = |vocab: usize| {
            [
                "model.family='llama'".to_owned(),
                "model.dim=32".to_owned(),
                "model.layers=1".to_owned(),
                "model.heads=2".to_owned(),
                "model.max_sequence_length=8".to_owned(),
                format!("model.vocab_size={vocab}"),
                "training.steps=1".to_owned(),
                "training.micro_batch_size=2".to_owned(),
                "parallel.ranks=2".to_owned(),
                "memory.limit='8MiB'".to_owned(),
            ]
        };
        let mut ranks = Ranks::together(&resolve(&sets(64), Inputs::of_this_machine()).unwrap()).unwrap();
        for _ in 0..2 {
            let made = ranks.step().unwrap();
            assert_eq!(made.len(), 2);
            assert_eq!(made[0].loss, made[1].loss);
            assert_eq!(made[0].spans.len(), ranks.members()[0].program.instructions.len());
        }
        assert!(Ranks::together(&resolve(&sets(1 << 20), Inputs::of_this_machine()).unwrap()).is_err());
    }
}
