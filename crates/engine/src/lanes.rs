//! Runs the lanes of a program: one thread per lane, waiting for the results of other lanes.
//!
//! Each lane runs its instructions in program order. Before an instruction runs, every instruction
//! it depends on must have finished. The time that the lane waited is recorded with the
//! instruction; this measures exposed loading and exposed communication. The compute lane runs on
//! the calling thread. The first error stops every lane.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use trainyard_program::{Instruction, Lane, Program};

/// Times of one instruction, counted from the start of the step.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Span {
    /// Time that the lane waited before the instruction.
    pub waited: Duration,
    /// The last dependency to finish, if the lane waited.
    pub waited_for: Option<u32>,
    /// Start.
    pub start: Duration,
    /// End.
    pub end: Duration,
}

/// Work to do while waiting. Each call does one short piece, and returns false if there was nothing
/// to do.
pub type Meanwhile<'a> = &'a dyn Fn() -> bool;

/// The first pause after a lane found nothing to do while waiting. Pauses double up to
/// [`PAUSE_MAX`].
const PAUSE_MIN: Duration = Duration::from_micros(50);
/// The longest pause.
const PAUSE_MAX: Duration = Duration::from_millis(1);

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

/// Runs `program`. `handlers` has an entry for every lane of the program except compute, which runs
/// `compute` on this thread. `alarm` is called at the first failure, while other lanes may still
/// run, with the error, or None for a panic. While the compute lane waits, it calls `meanwhile`.
///
/// # Panics
/// A lane of the program has no handler.
pub fn run<E: Send>(
    program: &Program,
    handlers: Vec<(Lane, Handler<'_, E>)>,
    mut compute: impl FnMut(usize, &Instruction) -> Result<(), E>,
    meanwhile: Option<Meanwhile<'_>>,
    alarm: &(dyn Fn(Option<&E>) + Sync),
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
    type Body<'b, E> = &'b mut dyn FnMut(usize, &Instruction) -> Result<(), E>;
    let lane_of = |lane: Lane, meanwhile: Option<Meanwhile<'_>>, body: Body<'_, E>| {
        for number in program.on_lane(lane) {
            let instruction = &program.instructions[number];
            let ready = began.elapsed();
            let Some(missing) = progress.wait_for(&instruction.after, meanwhile) else { return };
            let start = began.elapsed();
            if let Err(error) = body(number, instruction) {
                if progress.stop() {
                    alarm(Some(&error));
                }
                failure.lock().expect("not poisoned").get_or_insert(error);
                return;
            }
            let span = Span { waited: start - ready, waited_for: missing, start, end: began.elapsed() };
            spans.lock().expect("not poisoned")[number] = span;
            progress.finish(number);
        }
    };
    let in_panic = || {
        if progress.stop() {
            alarm(None);
        }
    };
    std::thread::scope(|scope| {
        for (lane, mut handler) in handlers {
            if program.on_lane(lane).next().is_some() {
                let (lane_of, in_panic) = (&lane_of, &in_panic);
                scope.spawn(move || {
                    let guard = OnPanic(in_panic);
                    lane_of(lane, None, &mut handler);
                    std::mem::forget(guard);
                });
            }
        }
        let guard = OnPanic(&in_panic);
        lane_of(Lane::Compute, meanwhile, &mut compute);
        std::mem::forget(guard);
    });
    match failure.into_inner().expect("not poisoned") {
        Some(error) => Err(error),
        None => Ok(spans.into_inner().expect("not poisoned")),
    }
}

/// Runs `program` in its order on this thread. Predictions run so, because no lane gets ahead of
/// another.
///
/// # Errors
/// Errors of the handlers.
///
/// # Panics
/// A lane of the program has no handler.
pub fn run_in_order<E>(
    program: &Program,
    mut handlers: Vec<(Lane, Handler<'_, E>)>,
    mut compute: impl FnMut(usize, &Instruction) -> Result<(), E>,
) -> Result<(), E> {
    for (number, instruction) in program.instructions.iter().enumerate() {
        let lane = instruction.action.lane();
        if lane == Lane::Compute {
            compute(number, instruction)?;
        } else {
            let handler = handlers.iter_mut().find(|(l, _)| *l == lane);
            let (_, handler) = handler.unwrap_or_else(|| panic!("lane {} has no handler", lane.name()));
            handler(number, instruction)?;
        }
    }
    Ok(())
}

/// Calls its function if the lane panics, so that the others do not wait for ever.
struct OnPanic<'a>(&'a (dyn Fn() + Sync));

impl Drop for OnPanic<'_> {
    fn drop(&mut self) {
        (self.0)();
    }
}

impl Progress {
    /// Waits until all of `after` have finished, calling `meanwhile` until then. Returns the last
    /// one to finish, if there was a wait; None if the step was stopped.
    fn wait_for(&self, after: &[u32], meanwhile: Option<Meanwhile<'_>>) -> Option<Option<u32>> {
        let mut last = None;
        let (mut nothing_to_do, mut pause) = (false, PAUSE_MIN);
        let mut state = self.lock();
        loop {
            if state.stopped {
                return None;
            }
            let Some(missing) = after.iter().find(|number| !state.finished[**number as usize]) else {
                return Some(last);
            };
            last = Some(*missing);
            state = match meanwhile {
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(_) if nothing_to_do => {
                    let (state, _) = self.changed.wait_timeout(state, pause).unwrap_or_else(PoisonError::into_inner);
                    (nothing_to_do, pause) = (false, PAUSE_MAX.min(2 * pause));
                    state
                }
                Some(work) => {
                    drop(state);
                    nothing_to_do = !work();
                    if !nothing_to_do {
                        pause = PAUSE_MIN;
                    }
                    self.lock()
                }
            };
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn finish(&self, number: usize) {
        self.lock().finished[number] = true;
        self.changed.notify_all();
    }

    /// Stops every lane. Returns true if this was the first call.
    fn stop(&self) -> bool {
        let mut state = self.lock();
        self.changed.notify_all();
        !std::mem::replace(&mut state.stopped, true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use trainyard_program::{Mesh, ModelShape, Strategy, UnitShape, lower_rank};

    fn program() -> Program {
        let unit = |name: &str| UnitShape { name: name.into(), flat_elements: 1, ..UnitShape::default() };
        let model = ModelShape { units: vec![unit("embedding"), unit("head")], ..ModelShape::default() };
        let strategy = Strategy { accumulation_steps: 2, snapshot: true, ..Strategy::new(2) };
        lower_rank(&model, &Mesh::default(), &strategy, 0).unwrap()
    }

    /// An event that lanes wait for.
    #[derive(Default)]
    struct Signal(Mutex<bool>, Condvar);

    impl Signal {
        fn set(&self) {
            *self.0.lock().unwrap() = true;
            self.1.notify_all();
        }

        fn wait(&self) {
            drop(self.1.wait_while(self.0.lock().unwrap(), |set| !*set).unwrap());
        }
    }

    /// Runs a program whose input, reduce and host lanes do the same. Also returns the number of
    /// reported failures.
    fn run_all<'a, E: Send>(
        others: impl Fn(usize, &Instruction) -> Result<(), E> + Copy + Send + 'a,
        compute: impl FnMut(usize, &Instruction) -> Result<(), E>,
        meanwhile: Option<Meanwhile<'_>>,
    ) -> (Result<Vec<Span>, E>, usize) {
        let handlers = [Lane::Input, Lane::Reduce, Lane::HostIo].map(|lane| (lane, Box::new(others) as Handler<'a, E>));
        let told = Mutex::new(0);
        let result = run(&program(), handlers.into(), compute, meanwhile, &|_| *told.lock().unwrap() += 1);
        (result, told.into_inner().unwrap())
    }

    #[test]
    fn instructions_wait_for_what_they_depend_on() {
        let (order, waits) = (Mutex::new(Vec::new()), Signal::default());
        let note = |number, instruction: &Instruction| {
            // The input lane loads once the compute lane waits for it.
            if instruction.action.lane() == Lane::Input {
                waits.wait();
            }
            order.lock().unwrap().push(number);
            Ok::<(), ()>(())
        };
        let nothing = || {
            waits.set();
            false
        };
        let (spans, told) = run_all(note, note, Some(&nothing));
        let spans = spans.unwrap();
        assert_eq!((order.into_inner().unwrap(), told), ((0..program().instructions.len()).collect::<Vec<_>>(), 0));
        // The first forward waited for the count of two loads.
        assert!(spans[3].waited >= spans[1].end - spans[1].start && spans[3].waited_for == Some(2));
        // The count may begin after the loads have ended, and then waits for nothing.
        assert!(spans[2].waited_for.is_none_or(|load| load == 1) && spans[4].waited_for.is_none());
    }

    #[test]
    fn the_first_error_stops_every_lane() {
        let mut ran = 0;
        let (result, told) = run_all(
            |number, _| if number == 1 { Err("no data") } else { Ok(()) },
            |_, _| {
                ran += 1;
                Ok(())
            },
            None,
        );
        assert_eq!((result.unwrap_err(), ran, told), ("no data", 0, 1));
    }

    #[test]
    #[should_panic(expected = "in a lane")]
    fn a_panic_in_compute_does_not_hang_the_others() {
        let _ = run_all(|_, _| Ok::<(), ()>(()), |_, _| panic!("in a lane"), None);
    }

    #[test]
    fn a_lane_that_waits_does_something_else_meanwhile() {
        let enough = Signal::default();
        let others = |_: usize, instruction: &Instruction| {
            if instruction.action.lane() == Lane::Input {
                enough.wait();
            }
            Ok::<(), ()>(())
        };
        let (asked, computed) = (Cell::new(0), Cell::new(0));
        // Every third call has nothing to do, and the lane asks again.
        let meanwhile = || {
            asked.set(asked.get() + 1);
            if asked.get() == 7 {
                enough.set();
            }
            asked.get() % 3 > 0
        };
        let compute = |_: usize, _: &Instruction| {
            computed.set(computed.get() + 1);
            Ok(())
        };
        let (spans, told) = run_all(others, compute, Some(&meanwhile));
        assert!(spans.is_ok() && told == 0);
        assert!(asked.get() >= 7 && computed.get() == program().on_lane(Lane::Compute).count());
    }

    #[test]
    fn in_order_is_the_order_of_the_program() {
        let order = Mutex::new(Vec::new());
        let note = |number: usize, _: &Instruction| {
            order.lock().unwrap().push(number);
            Ok::<(), ()>(())
        };
        let handlers = [Lane::Input, Lane::Reduce, Lane::HostIo].map(|lane| (lane, Box::new(note) as Handler<'_, ()>));
        run_in_order(&program(), handlers.into(), note).unwrap();
        assert_eq!(order.into_inner().unwrap(), (0..program().instructions.len()).collect::<Vec<_>>());
    }
}
