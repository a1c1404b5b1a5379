//! Codecs: the forms in which gradients and parameter changes travel between ranks. This file holds
//! their formats and sizes; `trainyard-comm` holds the kernels.
//!
//! A [`BlockCodec`] encodes each block of a flat buffer by itself, and a message is the
//! concatenation of its blocks. So a buffer may be cut between any two blocks without changing a
//! bit. [`PowerSgd`] sends factors of whole matrices, so its bytes depend on their shapes.

use crate::Axis;
use serde::{Deserialize, Serialize};
use std::fmt;

/// A lossy form of a flat f32 buffer, block by block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum BlockCodec {
    /// Each element rounded to bf16.
    Bf16,
    /// 8-bit integers with a scale per block.
    Int8,
    /// 4-bit integers with a scale per block.
    Int4,
    /// 4-bit codes of the quantiles of a normal distribution, with a scale per 64 elements (NF4,
    /// Dettmers et al. 2023). For weights at rest: what it leaves out is not exact in f32.
    Nf4,
    /// Signs, with the mean magnitude per block (Seide et al. 2014; Tang et al. 2021).
    OneBit,
    /// The largest elements of each block in bf16, and their places (Lin et al. 2018).
    TopK {
        /// Number of elements that a block keeps.
        kept: u16,
    },
}

impl BlockCodec {
    /// Elements of a block.
    pub const fn block_elements(self) -> usize {
        match self {
            BlockCodec::Bf16 | BlockCodec::Int8 | BlockCodec::Int4 | BlockCodec::Nf4 | BlockCodec::OneBit => 256,
            BlockCodec::TopK { .. } => 4096,
        }
    }

    /// Bytes of an encoded block. A scale is a bf16. A kept element is a 16-bit place and a bf16.
    pub const fn block_bytes(self) -> usize {
        match self {
            BlockCodec::Bf16 => 2 * 256,
            BlockCodec::Int8 => 2 + 256,
            BlockCodec::Int4 => 2 + 128,
            BlockCodec::Nf4 => 4 * 2 + 128,
            BlockCodec::OneBit => 2 + 32,
            BlockCodec::TopK { kept } => 4 * kept as usize,
        }
    }

    /// Bytes of `elements` elements when they are encoded. The last block is padded.
    pub const fn bytes(self, elements: u64) -> u64 {
        elements.div_ceil(self.block_elements() as u64) * self.block_bytes() as u64
    }

    /// True if the codec drops so much that it needs [error feedback](Encoding::feedback).
    pub const fn needs_feedback(self) -> bool {
        matches!(self, BlockCodec::Int4 | BlockCodec::Nf4 | BlockCodec::OneBit | BlockCodec::TopK { .. })
    }

    /// The name in configurations.
    pub const fn name(self) -> &'static str {
        match self {
            BlockCodec::Bf16 => "bf16",
            BlockCodec::Int8 => "int8",
            BlockCodec::Int4 => "int4",
            BlockCodec::Nf4 => "nf4",
            BlockCodec::OneBit => "one_bit",
            BlockCodec::TopK { .. } => "top_k",
        }
    }
}

/// The name; for `top_k` with the share of elements that it keeps.
impl fmt::Display for BlockCodec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BlockCodec::TopK { kept } => {
                write!(f, "top_k {:.1} %", 100.0 * f64::from(*kept) / self.block_elements() as f64)
            }
            _ => f.write_str(self.name()),
        }
    }
}

/// Low-rank gradient compression (Vogels et al. 2019). Ranks sum `P = M Q`, make its columns
/// orthonormal, and sum `Q = Mᵀ P`; the sum of the matrices M is taken to be `P Qᵀ`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(tag = "kind", rename = "power_sgd")]
pub struct PowerSgd {
    /// Columns of the factors.
    pub rank: u32,
}

/// The elements that [`PowerSgd`] sends of a unit.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
pub struct Factors {
    /// Elements of the factors P.
    pub p: u64,
    /// Elements of the factors Q.
    pub q: u64,
    /// Elements of what is sent as it is: vectors, and matrices whose factors are no smaller.
    pub plain: u64,
    /// Elements of the matrices that have factors.
    pub matrices: u64,
}

impl PowerSgd {
    /// True if a matrix [rows, columns] is sent as factors. A vector is a matrix of one row.
    pub const fn factors(self, [rows, columns]: [u64; 2]) -> bool {
        (self.rank as u64).saturating_mul(rows + columns) < rows * columns
    }

    /// The elements that are sent of matrices [rows, columns].
    pub fn factors_of(self, matrices: &[[u64; 2]]) -> Factors {
        let rank = u64::from(self.rank);
        matrices.iter().fold(Factors::default(), |sum, &[rows, columns]| match self.factors([rows, columns]) {
            true => Factors {
                p: sum.p + rank * rows,
                q: sum.q + rank * columns,
                matrices: sum.matrices + rows * columns,
                ..sum
            },
            false => Factors { plain: sum.plain + rows * columns, ..sum },
        })
    }
}

impl Factors {
    /// Bytes of the two sums over ranks: of P and what is sent as it is, and of Q.
    pub const fn messages(&self) -> [u64; 2] {
        [4 * (self.p + self.plain), 4 * self.q]
    }
}

/// A lossy form of messages.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Codec {
    /// Blocks of a flat buffer.
    Blocks(BlockCodec),
    /// Factors of matrices.
    PowerSgd(PowerSgd),
}

impl Codec {
    /// True if the codec drops so much that it needs [error feedback](Encoding::feedback).
    pub const fn needs_feedback(self) -> bool {
        match self {
            Codec::Blocks(codec) => codec.needs_feedback(),
            Codec::PowerSgd(_) => true,
        }
    }

    /// The name in configurations.
    pub const fn name(self) -> &'static str {
        match self {
            Codec::Blocks(codec) => codec.name(),
            Codec::PowerSgd(_) => "power_sgd",
        }
    }
}

/// The name, with the share or the rank that it keeps.
impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Codec::Blocks(codec) => codec.fmt(f),
            Codec::PowerSgd(PowerSgd { rank }) => write!(f, "power_sgd rank {rank}"),
        }
    }
}

/// The encoding of the messages of a sum over ranks, of a gather, or between pipeline stages. Each
/// rank encodes its contribution to a sum; contributions are decoded and added in f32. A sum that
/// is then sent to the other replicas is encoded once more. Gathered shards are decoded on every
/// rank, their owner included. The stage that receives a message decodes it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Encoding {
    /// The form of the messages.
    pub codec: Codec,
    /// [`Axis::Data`]: both in the shard group and across replicas. [`Axis::Replicate`]: across
    /// replicas only. [`Axis::Shard`]: in the shard group only. [`Axis::Pipeline`]: between stages.
    pub over: Axis,
    /// True if a rank keeps what its messages left out and adds it to the next (error feedback).
    pub feedback: bool,
    /// True if a rank sends the velocities of its gradients, which it keeps beside what its
    /// messages left out (momentum correction of `top_k`, Lin et al. 2018).
    #[serde(default)]
    pub momentum: bool,
}

impl Encoding {
    /// Messages in the form of `codec` over all ranks of `over`, with feedback if it is asked for.
    pub const fn new(codec: Codec, over: Axis, feedback: bool) -> Encoding {
        Encoding { codec, over, feedback, momentum: false }
    }
}

impl Encoding {
    /// True if messages between the ranks of `axis` are encoded.
    pub const fn is_over(&self, axis: Axis) -> bool {
        matches!(
            (self.over, axis),
            (Axis::Data, Axis::Shard | Axis::Replicate)
                | (Axis::Replicate, Axis::Replicate)
                | (Axis::Shard, Axis::Shard)
                | (Axis::Pipeline, Axis::Pipeline)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_per_element_are_those_of_the_formats() {
        let bits = |codec: BlockCodec| 8.0 * codec.bytes(1 << 20) as f64 / f64::from(1 << 20);
        let codecs =
            [BlockCodec::Bf16, BlockCodec::Int8, BlockCodec::Int4, BlockCodec::OneBit, BlockCodec::TopK { kept: 41 }];
        assert_eq!(codecs.map(bits), [16.0, 8.0625, 4.0625, 1.0625, 0.3203125]);
        assert_eq!(BlockCodec::Int8.bytes(1), 258, "a part of a block is sent as a block");
    }

    #[test]
    fn small_matrices_and_vectors_are_sent_as_they_are() {
        let codec = PowerSgd { rank: 4 };
        let factors = codec.factors_of(&[[1, 64], [8, 8], [256, 64]]);
        assert_eq!(factors, Factors { p: 1024, q: 256, plain: 128, matrices: 256 * 64 });
        assert_eq!(factors.messages(), [4608, 1024]);
        let text = serde_json::to_string(&Codec::PowerSgd(codec)).unwrap();
        assert_eq!(serde_json::from_str::<Codec>(&text).unwrap(), Codec::PowerSgd(codec), "{text}");
        let text = serde_json::to_string(&Codec::Blocks(BlockCodec::Int8)).unwrap();
        assert_eq!(serde_json::from_str::<Codec>(&text).unwrap(), Codec::Blocks(BlockCodec::Int8), "{text}");
    }
}
