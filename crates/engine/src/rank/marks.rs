//! Lanes on a device that works by itself: what an instruction has launched when it is finished on the host.
//!
//! There a lane is a stream, and "finished" means "launched". An instruction on another lane waits, on the device, for a mark at the end of what it depends on;
//! the host waits for the device where it reads values, and at the end of a step, whose times come from the marks. On the CPU all of this is nothing.

use crate::Result;
use crate::lanes::Span;
use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::time::Duration;
use trainyard_program::{Instruction, Lane, Program};
use trainyard_tensor::Device;
use trainyard_tensor::cuda::Mark;
use trainyard_tensor::device::enter_lane;

/// The marks of one step.
pub struct Marks<'d> {
    /// None: work is done when a call returns.
    device: Option<&'d Device>,
    began: Mark,
    /// Before and after what each instruction has launched.
    instructions: Vec<OnceLock<(Mark, Mark)>>,
}

impl<'d> Marks<'d> {
    /// For a step of `program` that begins now.
    pub fn new(device: &'d Device, program: &Program) -> Result<Marks<'d>> {
        let is_cuda = device.as_cuda().is_some();
        let began = device.mark()?;
        let count = if is_cuda { program.instructions.len() } else { 0 };
        let instructions = (0..count).map(|_| OnceLock::new()).collect();
        Ok(Marks { device: is_cuda.then_some(device), began, instructions })
    }

    /// Runs an instruction on its lane's stream, after those it depends on.
    pub fn around(&self, number: usize, instruction: &Instruction, run: impl FnOnce() -> Result<()>) -> Result<()> {
        let Some(device) = self.device else { return run() };
        enter_lane(instruction.action.lane() as usize);
        if instruction.after.is_empty() {
            // What was done before the step, on the lane that began it, and memory that is taken before it, maybe another lane's.
            device.wait_for(&self.began)?;
        }
        for before in &instruction.after {
            let (_, end) =
                self.instructions[*before as usize].get().expect("the host runs it after what it depends on");
            device.wait_for(end)?;
        }
        let start = device.mark()?;
        run()?;
        // An instruction runs once.
        self.instructions[number].set((start, device.mark()?)).ok();
        Ok(())
    }

    /// Waits for the device, and tells when it ran what: instead of `spans`, when the host launched it.
    pub fn end(&self, program: &Program, spans: Vec<Span>) -> Result<Vec<Span>> {
        let Some(device) = self.device else { return Ok(spans) };
        device.synchronize_lanes()?;
        let mut spans: Vec<Span> = Vec::with_capacity(self.instructions.len());
        let mut lanes: BTreeMap<Lane, Duration> = BTreeMap::new();
        for (marks, instruction) in self.instructions.iter().zip(&program.instructions) {
            let (start, end) = marks.get().expect("every instruction of a step that succeeded was run");
            let since = |mark| self.began.seconds_to(mark).map(|s| Duration::from_secs_f64(s.max(0.0)));
            let (start, end) = (since(start)?, since(end)?);
            let ready = lanes.insert(instruction.action.lane(), end).unwrap_or_default();
            let last = instruction.after.iter().copied().max_by_key(|before| spans[*before as usize].end);
            let waited_for = last.filter(|before| spans[*before as usize].end > ready);
            let waited = if waited_for.is_some() { start.saturating_sub(ready) } else { Duration::ZERO };
            spans.push(Span { waited, waited_for, start, end });
        }
        Ok(spans)
    }
}
