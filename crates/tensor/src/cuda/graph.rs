//! The work of a lane as a graph: captured once, launched again with one call.
//!
//! A graph works on the memory that it was captured with, which therefore is the graph's while it
//! lives: what the captured work takes and gives back comes from an [`Arena`](crate::pool::Arena),
//! and what it only refers to (weights, gradients, tables, batches) is held by handles. What
//! differs from launch to launch lies in memory that kernels read, [`Varying`]; whoever replays a
//! graph writes new batches over those that it was captured with.

use super::{Cuda, lane, lock};
use crate::Tensor;
use crate::device::Device;
use crate::error::{Result, TensorError};
use crate::pool::{Buffer, Purpose};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use trainyard_cuda::driver;

/// The values that differ from launch to launch of a graph, beside the contents of its tensors.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Varying {
    /// The step that keys random numbers.
    pub step: u32,
    /// Factor of losses.
    pub scale: f32,
}

impl Varying {
    fn words(self) -> [u32; 2] {
        [self.step, self.scale.to_bits()]
    }
}

/// The capture that a device is in.
#[derive(Default)]
pub(crate) struct Capturing {
    /// True during a capture. It is read at every launch.
    now: AtomicBool,
    state: Mutex<Option<State>>,
}

struct State {
    lane: usize,
    values: Varying,
    /// u32 [2]: the step, and the bits of the scale.
    varying: Tensor,
    held: BTreeMap<usize, Arc<Buffer>>,
}

impl Capturing {
    /// True if launches of this thread's lane are captured.
    pub fn is_here(&self) -> bool {
        self.now.load(Ordering::Relaxed) && lock(&self.state).as_ref().is_some_and(|state| state.lane == lane())
    }

    /// The captured work refers to a buffer, which must live as long as the graph.
    pub fn refers_to(&self, buffer: &Arc<Buffer>) {
        // Those of an arena are kept by it, and to hold them would keep them from serving the work
        // again.
        if self.is_here()
            && !buffer.is_of_arena()
            && let Some(state) = &mut *lock(&self.state)
        {
            state.held.entry(Arc::as_ptr(buffer) as usize).or_insert_with(|| Arc::clone(buffer));
        }
    }
}

impl Cuda {
    pub(crate) fn capturing(&self) -> &Capturing {
        &self.capturing
    }

    /// Where the captured work finds a word of what varies; None when this lane is not captured.
    /// `expected` is the value that it was given instead.
    fn varying(&self, word: usize, what: &str, expected: u32) -> Result<Option<Tensor>> {
        if !self.capturing.is_here() {
            return Ok(None);
        }
        let (varying, values) = match &*lock(&self.capturing.state) {
            Some(state) => (state.varying.clone(), state.values.words()),
            None => return Ok(None),
        };
        if values[word] != expected {
            return Err(TensorError::Uncapturable(format!("{what} that is not the step's")));
        }
        Ok(Some(varying.view(word, [1])?))
    }

    /// Where a captured kernel reads the step instead of taking `step`.
    pub(super) fn varying_step(&self, step: u32) -> Result<Option<Tensor>> {
        self.varying(0, "a random number of a step", step)
    }

    /// Where a captured kernel reads the scale of losses instead of taking `scale`.
    pub(super) fn varying_scale(&self, scale: f32) -> Result<Option<Tensor>> {
        self.varying(1, "a loss with a scale", scale.to_bits())
    }
}

/// A capture that goes on; ended without a graph when it is dropped.
pub struct Capture {
    cuda: Arc<Cuda>,
    stream: driver::Stream,
    ended: bool,
}

/// Captured work of a lane.
pub struct Graph {
    cuda: Arc<Cuda>,
    graph: driver::Graph,
    varying: Tensor,
    /// Buffers outside of its arena that must live as long.
    _held: Vec<Arc<Buffer>>,
}

impl Device {
    /// Captures what this thread's lane launches from now on, instead of doing it. `values` are
    /// those of this step, which the captured work is given. The host waits for all lanes first, so
    /// that nothing in the graph has to wait for what is outside of it.
    ///
    /// # Errors
    /// Devices other than GPUs; a lane that is captured already.
    pub fn begin_capture(&self, values: Varying) -> Result<Capture> {
        let Some(cuda) = self.as_cuda() else {
            return Err(TensorError::NotImplemented { device: self.name(), op: "capture" });
        };
        let varying = self.tensor([2], &values.words(), Purpose::Data)?;
        cuda.synchronize_all()?;
        let stream = cuda.stream()?;
        cuda.driver.begin_capture(stream)?;
        *lock(&cuda.capturing.state) = Some(State { lane: lane(), values, varying, held: BTreeMap::new() });
        cuda.capturing.now.store(true, Ordering::Relaxed);
        Ok(Capture { cuda: Arc::clone(cuda), stream, ended: false })
    }
}

impl Capture {
    /// Ends it. Nothing of what was captured has been done.
    ///
    /// # Errors
    /// The action that a capture forbids.
    pub fn end(mut self) -> Result<Graph> {
        let (graph, state) = self.stop();
        let (graph, state) = (graph?, state.expect("a capture has a state until it is ended"));
        let held = state.held.into_values().collect();
        Ok(Graph { cuda: Arc::clone(&self.cuda), graph, varying: state.varying, _held: held })
    }

    fn stop(&mut self) -> (Result<driver::Graph>, Option<State>) {
        self.ended = true;
        self.cuda.capturing.now.store(false, Ordering::Relaxed);
        let state = lock(&self.cuda.capturing.state).take();
        (self.cuda.driver.end_capture(self.stream).map_err(TensorError::from), state)
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        if !self.ended
            && let (Ok(graph), _) = self.stop()
        {
            self.cuda.driver.destroy_graph(graph);
        }
    }
}

impl Graph {
    /// Puts the captured work on this thread's lane, with these values.
    pub fn launch(&self, values: Varying) -> Result<()> {
        self.varying.clone().write(&values.words())?;
        Ok(self.cuda.driver.launch_graph(self.cuda.stream()?, self.graph)?)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // A launch may not be done; where waiting fails, so did the work, and the graph is better
        // kept.
        if self.cuda.synchronize_all().is_ok() {
            self.cuda.driver.destroy_graph(self.graph);
        }
    }
}
