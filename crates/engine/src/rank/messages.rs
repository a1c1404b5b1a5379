//! Values on their way between pipeline stages.
//!
//! The compute lane allocates and frees their memory; the send and receive lanes move bytes, and
//! encode and decode what travels in another form ([`crate::stages`]). A value that was sent is
//! kept until the compute lane knows that the send has finished.

use super::step::RunningStep;
use crate::Result;
use crate::stages::{Carried, StageLink};
use crate::state::lock;
use std::collections::BTreeMap;
use std::sync::Mutex;
use trainyard_program::{Action, Instruction, Phase, Program};
use trainyard_tensor::{DType, Device, Purpose, Tensor};

/// The output of a unit on a micro-batch (forward), or the gradient of that output (backward).
pub(super) type Message = (Phase, u32, u32);

/// The values of a step that cross between stages.
#[derive(Default)]
pub(super) struct Messages {
    leaving: Mutex<BTreeMap<Message, Tensor>>,
    arriving: Mutex<BTreeMap<Message, Tensor>>,
}

/// The value that an instruction sends or receives.
pub(super) fn message_of(action: Action) -> Option<Message> {
    match action {
        Action::Send { unit, micro_batch, phase, .. } | Action::Recv { unit, micro_batch, phase, .. } => {
            Some((phase, unit, micro_batch))
        }
        _ => None,
    }
}

impl Messages {
    /// Hands over a value to be sent.
    pub fn leave(&self, message: Message, value: Tensor) {
        lock(&self.leaving).insert(message, value);
    }

    /// Frees a value that was sent.
    pub fn forget(&self, message: Message) {
        lock(&self.leaving).remove(&message);
    }

    /// Allocates memory for what a receive instruction receives.
    pub fn take(&self, device: &Device, instruction: &Instruction, dtype: DType) -> Result<()> {
        let message = message_of(instruction.action).expect("a receive has a message");
        let elements = instruction.bytes as usize / dtype.size();
        let value = device.empty([elements], dtype, Purpose::Activations)?;
        lock(&self.arriving).insert(message, value);
        Ok(())
    }

    /// The received value, as rows of the residual stream, of which `shape` says the shape by the
    /// number of elements. None if the message does not come from another stage.
    pub fn arrived(&self, message: Message, shape: impl FnOnce(usize) -> [usize; 2]) -> Result<Option<Tensor>> {
        let Some(value) = lock(&self.arriving).remove(&message) else { return Ok(None) };
        Ok(Some(value.reshape(shape(value.elements()))?))
    }

    /// Runs a send or a receive of step `step`.
    pub fn run(&self, program: &Program, instruction: &Instruction, link: &StageLink, step: u64) -> Result<()> {
        let message = message_of(instruction.action).expect("the lanes between stages send and receive");
        let index = |rank: u32| program.mesh.coordinates(rank).pp as usize;
        match instruction.action {
            Action::Send { to, .. } => {
                let value = lock(&self.leaving)[&message].clone();
                let (phase, unit, micro_batch) = message;
                link.send(&value, index(to), instruction, Carried { phase, unit, micro_batch, step })
            }
            Action::Recv { from, .. } => {
                let mut value = lock(&self.arriving)[&message].clone();
                link.receive(&mut value, index(from), instruction)
            }
            other => Err(super::cannot(other)),
        }
    }
}

impl RunningStep<'_> {
    /// True if the program sends this value to another stage.
    pub(super) fn sends(&self, message: Message) -> bool {
        self.sent.contains(&message)
    }
}
