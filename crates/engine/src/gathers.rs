//! Gathers of sharded parameters whose messages are encoded (qwZ of ZeRO++, Wang et al. 2023).
//!
//! Each rank of a shard group encodes its shard. Every rank decodes all of them, its own too, so
//! all compute with the same parameters. Masters stay as they are, and no error adds up. Shards are
//! whole blocks, so the bits do not depend on their number.

use crate::Result;
use crate::encoded::{decode_sum, encode_on_all_threads};
use crate::exchange::Link;
use std::sync::Mutex;
use trainyard_base::lock;
use trainyard_comm::codec::{Rounding, encoded_bytes};
use trainyard_program::BlockCodec;
use trainyard_tensor::{DType, Device, Purpose, Tensor, ops};

/// The buffers of encoded gathers. One lane at a time gathers.
pub(crate) struct EncodedGathers {
    codec: BlockCodec,
    buffers: Mutex<Buffers>,
}

struct Buffers {
    /// One shard in f32.
    values: Tensor,
    /// The message of this rank, and those of all, as 16-bit words.
    sent: Tensor,
    received: Tensor,
}

impl EncodedGathers {
    /// Allocates buffers for gathers of at most `elements` from each of `shards` ranks.
    pub fn new(device: &Device, codec: BlockCodec, elements: usize, shards: usize) -> Result<EncodedGathers> {
        let bytes = encoded_bytes(codec, elements);
        let message = |words: usize| device.empty([words], DType::BF16, Purpose::Comm);
        let buffers = Buffers {
            values: device.empty([elements], DType::F32, Purpose::Comm)?,
            sent: message(bytes / 2)?,
            received: message(shards * bytes / 2)?,
        };
        Ok(EncodedGathers { codec, buffers: Mutex::new(buffers) })
    }

    /// Gathers `whole` from the shards `part` of the ranks of `link`.
    pub fn gather(&self, part: &Tensor, whole: &Tensor, link: &Link) -> Result<()> {
        let device = part.device().clone();
        let Some(cpu) = device.as_cpu().filter(|_| part.elements() > 0) else { return Ok(()) };
        let (codec, elements, ranks) = (self.codec, part.elements(), link.size());
        let bytes = encoded_bytes(codec, elements);
        let buffers = lock(&self.buffers);
        let mut values = buffers.values.view(0, [elements])?;
        let mut sent = buffers.sent.view(0, [bytes / 2])?;
        let mut received = buffers.received.view(0, [ranks * bytes / 2])?;
        ops::cast_into(part, &mut values)?;
        let encode = |values: &[f32]| {
            sent.overwrite_bytes(|message| {
                encode_on_all_threads(cpu, codec, values, None, &|_| Rounding::Nearest, message);
            })
        };
        values.with_data(encode)??;
        link.all_gather(&sent, &mut received)?;
        for rank in 0..ranks {
            let message = received.view(rank * bytes / 2, [bytes / 2])?;
            decode_sum(cpu, codec, &message, 1, &mut values)?;
            ops::cast_into(&values, &mut whole.view(rank * elements, [elements])?)?;
        }
        Ok(())
    }
}
