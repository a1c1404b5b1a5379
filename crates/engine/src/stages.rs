//! Links between pipeline stages, and messages on them that are encoded.
//!
//! The stage that sends encodes a value into a buffer of its lane, the one that receives decodes
//! it into the memory of the value. Both are done by the lanes that send and receive, beside the
//! passes of other micro-batches.

use crate::Result;
use crate::encoded::{CodeRounding, decode_sum, encode_on_all_threads, rounding_key};
use crate::exchange::Link;
use crate::rank::RankSettings;
use crate::state::does_not_fit;
use std::sync::Mutex;
use trainyard_base::lock;
use trainyard_comm::codec::encoded_bytes;
use trainyard_program::{BlockCodec, Codec, Instruction, Lane, Phase, Program};
use trainyard_tensor::{DType, Device, Purpose, Tensor, ops};

/// The link of one of the two lanes between stages.
#[derive(Default)]
pub(crate) struct StageLink {
    pub(crate) link: Link,
    rank: u32,
    /// The largest encoded message of the lane.
    largest: Extent,
    buffers: Option<Buffers>,
}

/// The extent of a message.
#[derive(Clone, Copy, Default)]
struct Extent {
    /// Whole blocks of elements.
    elements: usize,
    bytes: usize,
}

impl Extent {
    fn of(instruction: &Instruction) -> Extent {
        let Some(codec) = codec_of(instruction) else { return Extent::default() };
        let elements = instruction.bytes as usize / instruction.element_bytes as usize;
        let elements = elements.next_multiple_of(codec.block_elements());
        Extent { elements, bytes: encoded_bytes(codec, elements) }
    }

    fn max(self, other: Extent) -> Extent {
        Extent { elements: self.elements.max(other.elements), bytes: self.bytes.max(other.bytes) }
    }
}

/// The codec of a message between stages; None if it travels as it is.
fn codec_of(instruction: &Instruction) -> Option<BlockCodec> {
    match instruction.encoding?.codec {
        Codec::Blocks(codec) => Some(codec),
        Codec::PowerSgd(_) => None,
    }
}

struct Buffers {
    rounding: CodeRounding,
    seed: u64,
    /// The elements in f32, and the message as 16-bit words.
    memory: Mutex<[Tensor; 2]>,
}

/// The value that a message carries, which random rounding depends on.
#[derive(Clone, Copy)]
pub(crate) struct Carried {
    pub phase: Phase,
    pub unit: u32,
    pub micro_batch: u32,
    pub step: u64,
}

impl StageLink {
    /// The link of `lane`, which exchanges what `program` says.
    pub(crate) fn new(link: Link, program: &Program, lane: Lane) -> StageLink {
        let messages = program.on_lane(lane).map(|number| &program.instructions[number]);
        let largest = messages.map(Extent::of).fold(Extent::default(), Extent::max);
        StageLink { link, rank: program.rank, largest, buffers: None }
    }

    /// Allocates the buffers for encoded messages.
    pub(crate) fn stage(&mut self, device: &Device, settings: &RankSettings) -> Result<()> {
        let Extent { elements, bytes } = self.largest;
        if elements == 0 {
            return Ok(());
        }
        if device.as_cuda().is_some() {
            return Err(does_not_fit("messages are encoded on processors only, and this rank computes on a GPU"));
        }
        let values = device.empty([elements], DType::F32, Purpose::Comm)?;
        let message = device.empty([bytes / 2], DType::BF16, Purpose::Comm)?;
        let (rounding, seed) = (settings.compression.rounding, settings.seed);
        self.buffers = Some(Buffers { rounding, seed, memory: Mutex::new([values, message]) });
        Ok(())
    }

    /// Sends a value to stage `to` in the form that `instruction` says.
    pub(crate) fn send(&self, value: &Tensor, to: usize, instruction: &Instruction, at: Carried) -> Result<()> {
        let device = value.device().clone();
        let (Some(codec), Some(buffers)) = (codec_of(instruction), &self.buffers) else {
            return self.link.send(value, to);
        };
        let Some(cpu) = device.as_cpu() else { return Ok(()) };
        let memory = lock(&buffers.memory);
        let (values, mut message) = parts(&memory, instruction)?;
        let elements = value.elements();
        ops::cast_into(&value.reshape([elements])?, &mut values.view(0, [elements])?)?;
        let padding = values.elements() - elements;
        if padding > 0 {
            values.view(elements, [padding])?.fill_zero()?;
        }
        let Carried { phase, unit, micro_batch, step } = at;
        let site = [unit, 3 | (phase as u32) << 2 | micro_batch << 3, self.rank];
        let key = rounding_key(buffers.seed, step, site);
        let rounding = |first: usize| buffers.rounding.of(key, first);
        values.with_data(|values: &[f32]| {
            message.overwrite_bytes(|message| encode_on_all_threads(cpu, codec, values, None, &rounding, message))
        })??;
        self.link.send(&message, to)
    }

    /// Receives a value from stage `from` in the form that `instruction` says.
    pub(crate) fn receive(&self, value: &mut Tensor, from: usize, instruction: &Instruction) -> Result<()> {
        let device = value.device().clone();
        let (Some(codec), Some(buffers)) = (codec_of(instruction), &self.buffers) else {
            return self.link.receive(value, from);
        };
        let Some(cpu) = device.as_cpu() else { return Ok(()) };
        let memory = lock(&buffers.memory);
        let (mut values, mut message) = parts(&memory, instruction)?;
        self.link.receive(&mut message, from)?;
        decode_sum(cpu, codec, &message, 1, &mut values)?;
        let elements = value.elements();
        Ok(ops::cast_into(&values.view(0, [elements])?, value)?)
    }
}

/// The parts of a lane's buffers that a message takes: its elements and its words.
fn parts(memory: &[Tensor; 2], instruction: &Instruction) -> Result<(Tensor, Tensor)> {
    let Extent { elements, bytes } = Extent::of(instruction);
    Ok((memory[0].view(0, [elements])?, memory[1].view(0, [bytes / 2])?))
}
