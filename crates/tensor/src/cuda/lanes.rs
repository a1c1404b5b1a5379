//! Lanes as streams, and marks between them.

use super::{Cuda, lock};
use crate::device::Device;
use crate::error::Result;
use std::cell::Cell;
use std::sync::Arc;
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

/// A point in the work of a lane, for which others can wait. On devices whose work is done when a call returns it is nothing.
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

    /// Lets this thread's lane wait for all that `other` has launched so far.
    pub(super) fn wait_for_lane(&self, other: usize) -> Result<()> {
        let event = self.with_event()?;
        self.driver.record(event, self.stream_of(other)?)?;
        self.driver.wait(self.stream()?, event)?;
        lock(&self.events).push(event);
        Ok(())
    }
}

impl Device {
    /// Marks the end of what this thread's lane has launched so far.
    pub fn mark(&self) -> Result<Mark> {
        let Some(cuda) = self.as_cuda() else { return Ok(Mark::default()) };
        let event = cuda.with_event()?;
        let recorded = Recorded { cuda: Arc::clone(cuda), event };
        cuda.driver.record(event, cuda.stream()?)?;
        Ok(Mark(Some(Arc::new(recorded))))
    }

    /// What this thread's lane launches from now on comes after the mark.
    pub fn wait_for(&self, mark: &Mark) -> Result<()> {
        match &mark.0 {
            Some(recorded) => Ok(recorded.cuda.driver.wait(recorded.cuda.stream()?, recorded.event)?),
            None => Ok(()),
        }
    }

    /// Waits on the host for everything that any lane has launched.
    pub fn synchronize_lanes(&self) -> Result<()> {
        let Some(cuda) = self.as_cuda() else { return Ok(()) };
        let used = cuda.streams.iter().filter_map(|stream| stream.get());
        for stream in used {
            cuda.driver.synchronize(*stream)?;
        }
        Ok(())
    }

    /// Waits on the host for everything that this thread's lane has launched.
    pub fn synchronize(&self) -> Result<()> {
        self.as_cuda().map_or(Ok(()), |cuda| cuda.synchronize())
    }
}

impl Mark {
    /// Seconds from this mark to a later one that has passed; 0 where marks are nothing.
    pub fn seconds_to(&self, later: &Mark) -> Result<f64> {
        match (&self.0, &later.0) {
            (Some(first), Some(last)) => Ok(first.cuda.driver.seconds_between(first.event, last.event)?),
            _ => Ok(0.0),
        }
    }
}
