//! The record that a rank keeps of its run: its programs, the times of recent steps, and, once per
//! process, samples of the machine.
//!
//! A record explains a run and is not part of it. If it cannot be written, the run says so and goes
//! on without it.

use crate::Result;
use crate::rank::StepOutcome;
use crate::session::Session;
use crate::shape::compute_dtype;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use trainyard_program::Program;
use trainyard_record::RecordError;
use trainyard_record::monitor::{self, Gpus, Inside, Monitor};
use trainyard_record::programs::{Programs, Work};
use trainyard_record::steps::{Step, StepWriter, Times};
use trainyard_tensor::{Call, Purpose};

/// The open record of a rank.
pub struct Recording {
    steps: StepWriter,
    monitor: Option<Monitor>,
    /// The last finished step, for the monitor.
    step: Arc<AtomicU64>,
}

/// The moments of a step around its execution.
#[derive(Clone, Copy, Debug)]
pub struct Moments {
    /// End of the step before.
    pub last_end: Instant,
    /// Time that the ranks took to agree on this step.
    pub agreed: Duration,
    /// End of this step.
    pub end: Instant,
}

impl Recording {
    /// Begins the record of a session's rank.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn open(session: &Session) -> Result<Recording, RecordError> {
        let world = &session.world;
        let programs = Programs {
            programs: session.programs.clone(),
            priced: session.priced(),
            work: work(&session.programs[session.priced()], &session.prediction.calls),
            threads: session.resolved.threads as u32,
            peak_flops: session.peak_flops(compute_dtype(&session.resolved)),
        };
        programs.write(&session.folder)?;
        let host = world.place(world.rank()).host;
        let steps = StepWriter::create(&session.folder, &programs.programs, &host)?;
        let step = Arc::new(AtomicU64::new(session.state.step));
        // Ranks that are threads share a process, which rank 0 watches.
        let watches = world.rank() == 0 || world.backend() != "local";
        let (device, finished) = (session.rank.device().clone(), Arc::clone(&step));
        let inside = move || {
            let usage = device.pool().usage();
            let live = Purpose::ALL.into_iter().filter(|purpose| usage.live(*purpose) > 0);
            Inside {
                step: finished.load(Ordering::Relaxed),
                pool_bytes: live.map(|purpose| (purpose.name().to_owned(), usage.live(purpose) as u64)).collect(),
                pool_reserved_bytes: usage.reserved() as u64,
            }
        };
        let path = monitor::path(&session.folder, world.rank() as u32);
        let gpus = if session.rank.device().as_cuda().is_some() { Gpus::find() } else { Gpus::none() };
        let monitor = watches.then(|| Monitor::start(&path, monitor::INTERVAL, gpus, inside)).transpose()?;
        Ok(Recording { steps, monitor, step })
    }

    /// Records a step that has just ended.
    ///
    /// # Errors
    /// A file that cannot be written, by this thread or by the monitor's.
    pub fn step(
        &mut self,
        step: u64,
        program: usize,
        outcome: &StepOutcome,
        moments: Moments,
    ) -> Result<(), RecordError> {
        self.step.store(step, Ordering::Relaxed);
        if let Some(failure) = self.monitor.as_ref().and_then(Monitor::failure) {
            return Err(failure);
        }
        // A rank that computes nothing has nothing to compare with the others.
        let Some(began) = outcome.began.filter(|_| !outcome.waits_for_round()) else { return Ok(()) };
        let times = |span: &crate::lanes::Span| Times { waited: span.waited, start: span.start, end: span.end };
        self.steps.write(&Step {
            step,
            program,
            began: self.steps.since_epoch(began),
            before: began.saturating_duration_since(moments.last_end),
            length: moments.end.saturating_duration_since(began),
            agreed: moments.agreed,
            instructions: outcome.spans.iter().map(times).collect(),
        })?;
        Ok(())
    }
}

/// The work of each instruction of `program`.
fn work(program: &Program, calls: &[Call]) -> Vec<Work> {
    let mut work = vec![Work::default(); program.instructions.len()];
    for call in calls {
        if let Some(of) = work.get_mut(call.tag as usize) {
            of.flops += call.work.cost.flops as f64;
            of.bytes += call.work.cost.bytes as f64;
            of.kernels += 1;
        }
    }
    work
}
