//! Lanes: the instructions of a program on threads that wait for each other's results.
//!
//! Each lane runs its instructions in program order. Before one runs, every instruction it depends on must have finished; the time
//! the lane stood waiting is recorded with the instruction, which is how exposed loading and exposed communication become
//! numbers. The compute lane runs on the calling thread. The first error stops every lane.

use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};
use trainyard_program::{Instruction, Lane, Program};

/// When an instruction waited, started and ended, counted from the start of the step.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Span {
    /// Time the lane stood waiting before it.
    pub waited: Duration,
    /// Start.
    pub start: Duration,
    /// End.
    pub end: Duration,
}

/// Runs the instructions of one lane.
pub type Handler<'a, E> = Box<dyn FnMut(usize, &Instruction) -> Result<(), E> + Send + 'a>;

struct Progress {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    finished: Vec<bool>,
    stopped: bool,
}

/// Runs `program`. `handlers` has an entry for every lane the program uses but compute, which runs `compute` on this thread.
///
/// # Panics
/// When a lane that the program uses has no handler.
pub fn run<E: Send>(
    program: &Program,
    handlers: Vec<(Lane, Handler<'_, E>)>,
    mut compute: impl FnMut(usize, &Instruction) -> Result<(), E>,
) -> Result<Vec<Span>, E> {
    for lane in program.lanes().filter(|lane| *lane != Lane::Compute) {
        assert!(handlers.iter().any(|(l, _)| *l == lane), "lane {} has no handler", lane.name());
    }
    let count = program.instructions.len();
    let progress =
        Progress { state: Mutex::new(State { finished: vec![false; count], stopped: false }), changed: Condvar::new() };
    let spans = Mutex::new(vec![Span::default(); count]);
    let began = Instant::now();
    let failure = Mutex::new(None);
    let lane_of = |lane: Lane, body: &mut dyn FnMut(usize, &Instruction) -> Result<(), E>| {
        for number in program.on_lane(lane) {
            let instruction = &program.instructions[number];
            let ready = began.elapsed();
            if !progress.wait_for(&instruction.after) {
                return;
            }
            let start = began.elapsed();
            if let Err(error) = body(number, instruction) {
                failure.lock().expect("not poisoned").get_or_insert(error);
                progress.stop();
                return;
            }
            let span = Span { waited: start - ready, start, end: began.elapsed() };
            spans.lock().expect("not poisoned")[number] = span;
            progress.finish(number);
        }
    };
    std::thread::scope(|scope| {
        for (lane, mut handler) in handlers {
            if program.on_lane(lane).next().is_some() {
                let (lane_of, progress) = (&lane_of, &progress);
                scope.spawn(move || {
                    let guard = StopOnPanic(progress);
                    lane_of(lane, &mut handler);
                    std::mem::forget(guard);
                });
            }
        }
        let guard = StopOnPanic(&progress);
        lane_of(Lane::Compute, &mut compute);
        std::mem::forget(guard);
    });
    match failure.into_inner().expect("not poisoned") {
        Some(error) => Err(error),
        None => Ok(spans.into_inner().expect("not poisoned")),
    }
}

/// A lane that panics must not leave the others waiting for ever.
struct StopOnPanic<'a>(&'a Progress);

impl Drop for StopOnPanic<'_> {
    fn drop(&mut self) {
        self.0.stop();
    }
}

impl Progress {
    /// Returns once all are finished; false when the step was stopped.
    fn wait_for(&self, after: &[u32]) -> bool {
        let mut state = self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        loop {
            if state.stopped {
                return false;
            }
            if after.iter().all(|number| state.finished[*number as usize]) {
                return true;
            }
            state = self.changed.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
    }

    fn finish(&self, number: usize) {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).finished[number] = true;
        self.changed.notify_all();
    }

    fn stop(&self) {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).stopped = true;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use trainyard_program::{Mesh, ModelShape, Strategy, UnitShape, lower_rank};

    fn program() -> Program {
        let unit = |name: &str| UnitShape { name: name.into(), flat_elements: 1, ..UnitShape::default() };
        let model = ModelShape { units: vec![unit("embedding"), unit("head")], batch_bytes: 1 };
        let strategy = Strategy { accumulation_steps: 2, snapshot: true, ..Strategy::new(2) };
        lower_rank(&model, &Mesh::default(), &strategy, 0).unwrap()
    }

    #[test]
    fn instructions_wait_for_what_they_depend_on() {
        let program = program();
        let order = Mutex::new(Vec::new());
        let slow: Handler<'_, ()> = Box::new(|number, _| {
            std::thread::sleep(Duration::from_millis(5));
            order.lock().unwrap().push(number);
            Ok(())
        });
        let quick = || -> Handler<'_, ()> {
            Box::new(|number, _| {
                order.lock().unwrap().push(number);
                Ok(())
            })
        };
        let handlers = vec![(Lane::Input, slow), (Lane::Reduce, quick()), (Lane::HostIo, quick())];
        let spans = run(&program, handlers, |number, _| {
            order.lock().unwrap().push(number);
            Ok(())
        })
        .unwrap();
        assert_eq!(order.into_inner().unwrap(), (0..program.instructions.len()).collect::<Vec<_>>());
        // The first forward waited, through the count, for two loads of five milliseconds.
        assert!(spans[3].waited >= Duration::from_millis(9), "{:?}", spans[3]);
    }

    #[test]
    fn the_first_error_stops_every_lane() {
        let program = program();
        let fail: Handler<'_, &str> = Box::new(|number, _| if number == 1 { Err("no data") } else { Ok(()) });
        let quick = || -> Handler<'_, &str> { Box::new(|_, _| Ok(())) };
        let mut ran = 0;
        let handlers = vec![(Lane::Input, fail), (Lane::Reduce, quick()), (Lane::HostIo, quick())];
        let result = run(&program, handlers, |_, _| {
            ran += 1;
            Ok(())
        });
        assert_eq!((result.unwrap_err(), ran), ("no data", 0));
    }

    #[test]
    #[should_panic(expected = "in a lane")]
    fn a_panic_in_compute_does_not_hang_the_others() {
        let program = program();
        let quick = || -> Handler<'_, ()> { Box::new(|_, _| Ok(())) };
        let handlers = [Lane::Input, Lane::Reduce, Lane::HostIo].map(|lane| (lane, quick()));
        let _ = run(&program, handlers.into(), |_, _| panic!("in a lane"));
    }
}
