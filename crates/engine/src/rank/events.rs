//! Order and timing of instructions on a GPU, which runs asynchronously.
//!
//! On a GPU each lane is a stream, and the host lane is two ([`Streams`]). An instruction that has
//! "finished" on the host has only been launched. Every instruction therefore records a [`Mark`] (a
//! CUDA event) before and after its work. An instruction on another stream waits, on the device,
//! for the end marks of its dependencies.
//!
//! The host waits for the device where it reads values, and at the end of a step. The step's times
//! come from the marks. On the CPU all functions here do nothing.

use crate::Result;
use crate::lanes::Span;
use crate::state::lock;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use trainyard_program::{Instruction, Program, Streams};
use trainyard_tensor::Device;
use trainyard_tensor::cuda::Mark;
use trainyard_tensor::device::enter_lane;

/// The marks of one step.
pub struct Events<'d> {
    /// None on the CPU: work is done when a call returns.
    device: Option<&'d Device>,
    streams: Streams<'d>,
    began: Mark,
    /// The marks of each instruction; None until it is launched.
    instructions: Vec<Mutex<Option<Ends>>>,
    /// True while instructions are captured into a graph. All their dependencies were waited for
    /// before.
    captured: AtomicBool,
}

/// The marks before and after the work of an instruction.
pub type Ends = (Mark, Mark);

impl<'d> Events<'d> {
    /// Marks for a step of `program` that begins now.
    pub fn new(device: &'d Device, program: &'d Program) -> Result<Events<'d>> {
        let is_cuda = device.as_cuda().is_some();
        let began = device.mark()?;
        let count = if is_cuda { program.instructions.len() } else { 0 };
        let instructions = (0..count).map(|_| Mutex::default()).collect();
        let (streams, captured) = (Streams::new(program), AtomicBool::new(false));
        Ok(Events { device: is_cuda.then_some(device), streams, began, instructions, captured })
    }

    /// Runs an instruction on its stream, after the instructions it depends on.
    pub fn around(&self, number: usize, instruction: &Instruction, run: impl FnOnce() -> Result<()>) -> Result<()> {
        let Some(device) = self.device else { return run() };
        enter_lane(self.streams.of(number));
        if !self.captured.load(Ordering::Relaxed) {
            self.wait_before(device, number, instruction)?;
        }
        let start = device.mark()?;
        run()?;
        *lock(&self.instructions[number]) = Some((start, device.mark()?));
        Ok(())
    }

    /// Lets the current stream wait for the instruction's dependencies.
    fn wait_before(&self, device: &Device, number: usize, instruction: &Instruction) -> Result<()> {
        if instruction.after.is_empty() {
            // Work before the step was launched on the lane that began it. Memory taken before the
            // step may have been another lane's.
            device.wait_for(&self.began)?;
        }
        for before in self.streams.waits(number) {
            let events = lock(&self.instructions[before as usize]);
            let (_, end) = events.as_ref().expect("the host runs it after what it depends on");
            device.wait_for(end)?;
        }
        Ok(())
    }

    /// Lets the lane wait for everything outside of `stretch` that its instructions depend on. All
    /// of them are on this lane.
    pub fn wait_before_all(&self, program: &Program, stretch: &Range<usize>) -> Result<()> {
        let Some(device) = self.device else { return Ok(()) };
        enter_lane(self.streams.of(stretch.start));
        stretch.clone().try_for_each(|number| self.wait_before(device, number, &program.instructions[number]))
    }

    /// Sets whether the next instructions are captured. Captured instructions wait for nothing, and
    /// their marks are nodes of the graph.
    pub fn set_captured(&self, captured: bool) {
        self.captured.store(captured, Ordering::Relaxed);
    }

    /// The marks of the instructions of `stretch`, which must have run.
    pub fn of(&self, stretch: &Range<usize>) -> Vec<Ends> {
        let ends = |number: usize| lock(&self.instructions[number]).clone().expect("it was run");
        stretch.clone().map(ends).collect()
    }

    /// Sets the marks of `stretch`, whose instructions were launched by a graph.
    pub fn set(&self, stretch: &Range<usize>, ends: &[Ends]) {
        for (number, ends) in stretch.clone().zip(ends) {
            *lock(&self.instructions[number]) = Some(ends.clone());
        }
    }

    /// Waits for the device and returns the spans in which it ran the instructions. On the CPU it
    /// returns `spans`, the times on the host.
    pub fn end(&self, spans: Vec<Span>) -> Result<Vec<Span>> {
        let Some(device) = self.device else { return Ok(spans) };
        device.synchronize_lanes()?;
        let mut spans: Vec<Span> = Vec::with_capacity(self.instructions.len());
        let mut streams: BTreeMap<usize, Duration> = BTreeMap::new();
        for (number, events) in self.instructions.iter().enumerate() {
            let events = lock(events);
            let (start, end) = events.as_ref().expect("every instruction of a step that succeeded was run");
            let since = |mark| self.began.seconds_to(mark).map(|s| Duration::from_secs_f64(s.max(0.0)));
            let (start, end) = (since(start)?, since(end)?);
            let ready = streams.insert(self.streams.of(number), end).unwrap_or_default();
            let last = self.streams.waits(number).max_by_key(|before| spans[*before as usize].end);
            let waited_for = last.filter(|before| spans[*before as usize].end > ready);
            let waited = if waited_for.is_some() { start.saturating_sub(ready) } else { Duration::ZERO };
            spans.push(Span { waited, waited_for, start, end });
        }
        Ok(spans)
    }
}
