//! Codecs: the forms in which gradients and parameter changes travel between ranks. This file holds
//! their formats and sizes; `trainyard-comm` holds the kernels.
//!
//! A codec encodes each block of a flat buffer by itself, and a message is the concatenation of its
//! blocks. So a buffer may be cut between any two blocks without changing a bit.

use crate::Axis;
use serde::{Deserialize, Serialize};
use std::fmt;

/// A lossy form of a flat f32 buffer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Codec {
    /// Each element rounded to bf16.
    Bf16,
    /// 8-bit integers with a scale per block.
    Int8,
    /// 4-bit integers with a scale per block.
    Int4,
    /// Signs, with the mean magnitude per block (Seide et al. 2014; Tang et al. 2021).
    OneBit,
    /// The largest elements of each block in bf16, and their places (Lin et al. 2018).
    TopK {
        /// Number of elements that a block keeps.
        kept: u16,
    },
}

impl Codec {
    /// Elements of a block.
    pub const fn block_elements(self) -> usize {
        match self {
            Codec::Bf16 | Codec::Int8 | Codec::Int4 | Codec::OneBit => 256,
            Codec::TopK { .. } => 4096,
        }
    }

    /// Bytes of an encoded block. A scale is a bf16. A kept element is a 16-bit place and a bf16.
    pub const fn block_bytes(self) -> usize {
        match self {
            Codec::Bf16 => 2 * 256,
            Codec::Int8 => 2 + 256,
            Codec::Int4 => 2 + 128,
            Codec::OneBit => 2 + 32,
            Codec::TopK { kept } => 4 * kept as usize,
        }
    }

    /// Bytes of `elements` elements when they are encoded. The last block is padded.
    pub const fn bytes(self, elements: u64) -> u64 {
        elements.div_ceil(self.block_elements() as u64) * self.block_bytes() as u64
    }

    /// True if the codec drops so much that it needs [error feedback](Encoding::feedback).
    pub const fn needs_feedback(self) -> bool {
        matches!(self, Codec::Int4 | Codec::OneBit | Codec::TopK { .. })
    }

    /// The name in configurations.
    pub const fn name(self) -> &'static str {
        match self {
            Codec::Bf16 => "bf16",
            Codec::Int8 => "int8",
            Codec::Int4 => "int4",
            Codec::OneBit => "one_bit",
            Codec::TopK { .. } => "top_k",
        }
    }
}

/// The name; for `top_k` with the share of elements that it keeps.
impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Codec::TopK { kept } => {
                write!(f, "top_k {:.1} %", 100.0 * f64::from(*kept) / self.block_elements() as f64)
            }
            _ => f.write_str(self.name()),
        }
    }
}

/// The encoding of the messages of a sum over ranks. Each rank encodes its contribution;
/// contributions are decoded and added in f32. A sum that is then sent to the other replicas is
/// encoded once more.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Encoding {
    /// The form of the messages.
    pub codec: Codec,
    /// [`Axis::Data`]: both in the shard group and across replicas. [`Axis::Replicate`]: across
    /// replicas only.
    pub over: Axis,
    /// True if a rank keeps what its messages left out and adds it to the next (error feedback).
    pub feedback: bool,
}

impl Encoding {
    /// True if messages between the ranks of `axis` are encoded.
    pub const fn is_over(&self, axis: Axis) -> bool {
        matches!((self.over, axis), (Axis::Data, Axis::Shard | Axis::Replicate) | (Axis::Replicate, Axis::Replicate))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_per_element_are_those_of_the_formats() {
        let bits = |codec: Codec| 8.0 * codec.bytes(1 << 20) as f64 / f64::from(1 << 20);
        let codecs = [Codec::Bf16, Codec::Int8, Codec::Int4, Codec::OneBit, Codec::TopK { kept: 41 }];
        assert_eq!(codecs.map(bits), [16.0, 8.0625, 4.0625, 1.0625, 0.3203125]);
        assert_eq!(Codec::Int8.bytes(1), 258, "a part of a block is sent as a block");
    }
}
