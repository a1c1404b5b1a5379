//! Lanes as streams, and marks between them.

use super::{Cuda, lock};
use crate::device::Device;
use crate::error::Result;
use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use trainyard_cuda::driver::Event;

/// Lanes that a device can tell apart.
pub(crate) const LANES: usize = 16;

thread_local! {
    static LANE: Cell<usize> = const { Cell::new(0) };
}

/// This thread works for a lane from now on.
pub(crate) fn enter_lane(lane: usize) {
    LANE.set(lane % LANES);
}

/// The lane that this thread works for.
pub(crate) fn lane() -> usize {
    LANE.get()
}

/// A point in the work of a lane, for which others can wait. On devices whose work is done when a
/// call returns it is nothing.
#[derive(Clone, Debug, Default)]
pub struct Mark(Option<Arc<Recorded>>);

struct Recorded {
    cuda: Arc<Cuda>,
    event: Event,
}

impl Drop for Recorded {
    fn drop(&mut self) {
        lock(&self.cuda.events).push(self.event);
    }
}

impl std::fmt::Debug for Recorded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.event)
    }
}

impl Cuda {
    /// An event from those that were given back, or a new one.
    pub(super) fn with_event(&self) -> Result<Event> {
        let free = lock(&self.events).pop();
        Ok(free.map_or_else(|| self.driver.event(), Ok)?)
    }

    /// Number of marks that a lane has made: its position in its work.
    pub(super) fn position(&self, lane: usize) -> u64 {
        lock(&self.histories[lane]).made
    }

    /// True if everything that a lane launched at `position` is known to be done.
    pub(super) fn is_done(&self, lane: usize, position: u64) -> bool {
        position < lock(&self.histories[lane]).done
    }

    /// Lets this thread's lane wait for what `other` launched at `position`: for the mark after it,
    /// if there is one, so that what `other` does later is not waited for; else for all that it has
    /// launched so far.
    pub(super) fn wait_for_lane(&self, other: usize, position: u64) -> Result<()> {
        let mark = {
            let history = lock(&self.histories[other]);
            if position < history.done {
                return Ok(());
            }
            history.after(position)
        };
        if let Some(mark) = mark {
            return Ok(self.driver.wait(self.stream()?, mark.event)?);
        }
        let event = self.with_event()?;
        self.driver.record(event, self.stream_of(other)?)?;
        self.driver.wait(self.stream()?, event)?;
        lock(&self.events).push(event);
        Ok(())
    }
}

/// A lane's marks.
pub(super) struct History {
    /// Number of marks made.
    made: u64,
    /// Everything launched before this number of marks is done.
    done: u64,
    /// The last ones.
    last: VecDeque<Weak<Recorded>>,
}

/// Marks that are remembered; what comes before them is waited for with the first of them.
const REMEMBERED: usize = 1 << 12;

impl History {
    /// Of a lane that has made none.
    pub const NEW: History = History { made: 0, done: 0, last: VecDeque::new() };

    fn add(&mut self, mark: &Arc<Recorded>) {
        if self.last.len() == REMEMBERED {
            self.last.pop_front();
        }
        self.last.push_back(Arc::downgrade(mark));
        self.made += 1;
    }

    /// The first mark that somebody still holds of those made after `position`.
    fn after(&self, position: u64) -> Option<Arc<Recorded>> {
        let first = self.made - self.last.len() as u64;
        let skip = position.saturating_sub(first) as usize;
        self.last.iter().skip(skip).find_map(Weak::upgrade)
    }
}

impl Cuda {
    /// Waits on the host for everything that any lane has launched.
    pub(crate) fn synchronize_all(&self) -> Result<()> {
        for (stream, history) in self.streams.iter().zip(&self.histories) {
            let Some(stream) = stream.get() else { continue };
            let made = lock(history).made;
            self.driver.synchronize(*stream)?;
            let mut history = lock(history);
            let old = made.saturating_sub(history.made - history.last.len() as u64);
            history.last.drain(..old as usize);
            history.done = history.done.max(made);
        }
        Ok(())
    }
}

impl Device {
    /// Marks the end of what this thread's lane has launched so far. In a capture, a place in the
    /// graph, which passes at each launch and orders nothing.
    pub fn mark(&self) -> Result<Mark> {
        let Some(cuda) = self.as_cuda() else { return Ok(Mark::default()) };
        let event = cuda.with_event()?;
        let recorded = Arc::new(Recorded { cuda: Arc::clone(cuda), event });
        if cuda.capturing.is_here() {
            // Nobody can wait for it before the graph is launched, so it is no place in the lane's
            // work.
            cuda.driver.record_in_graph(event, cuda.stream()?)?;
            return Ok(Mark(Some(recorded)));
        }
        cuda.driver.record(event, cuda.stream()?)?;
        lock(&cuda.histories[lane()]).add(&recorded);
        Ok(Mark(Some(recorded)))
    }

    /// Orders everything that this thread's lane launches from now on after the mark.
    pub fn wait_for(&self, mark: &Mark) -> Result<()> {
        match &mark.0 {
            Some(recorded) => Ok(recorded.cuda.driver.wait(recorded.cuda.stream()?, recorded.event)?),
            None => Ok(()),
        }
    }

    /// Waits on the host for everything that any lane has launched.
    pub fn synchronize_lanes(&self) -> Result<()> {
        self.as_cuda().map_or(Ok(()), |cuda| cuda.synchronize_all())
    }

    /// Waits on the host for everything that this thread's lane has launched.
    pub fn synchronize(&self) -> Result<()> {
        self.as_cuda().map_or(Ok(()), |cuda| cuda.synchronize())
    }
}

impl Mark {
    /// Waits on the host until it has passed.
    pub fn wait(&self) -> Result<()> {
        match &self.0 {
            Some(recorded) => Ok(recorded.cuda.driver.wait_on_host(recorded.event)?),
            None => Ok(()),
        }
    }

    /// Seconds from this mark to a later one that has passed; 0 where marks are nothing.
    pub fn seconds_to(&self, later: &Mark) -> Result<f64> {
        match (&self.0, &later.0) {
            (Some(first), Some(last)) => Ok(first.cuda.driver.seconds_between(first.event, last.event)?),
            _ => Ok(0.0),
        }
    }
}
