//! Kernels of the codecs in which gradients and parameter changes travel.
//!
//! A buffer is a number of whole blocks, and each block is encoded by itself, so callers may cut
//! buffers between blocks for threads and ranks. Formats, little-endian:
//!
//! | codec | a block |
//! |---|---|
//! | `bf16` | 256 x bf16 |
//! | `int8` | bf16 scale, 256 x i8 |
//! | `int4` | bf16 scale, 128 bytes: byte `i` has element `i` low and `i + 128` high |
//! | `nf4` | bf16 scales of 4 x 64 elements, 128 bytes of places in [`NF4`], as in `int4` |
//! | `one_bit` | bf16 magnitude, 32 bytes: bit `k` of byte `j` is the sign of element `j + 32 k` |
//! | `top_k` | places as u16, ascending, then values as bf16 |
//!
//! A scale is rounded up to a bf16, so a code times its scale is exact in f32. The difference
//! between a value and what is sent of it is then exact too, except with `one_bit`, where values
//! far smaller than the block's magnitude lose bits below `2^-24` of it, and with `nf4`, whose
//! difference is rounded to f32. `nf4` always rounds to the nearest code.
//!
//! A block with a value that is not finite is sent as a block of NaN, so every rank sees it. Its
//! residual stays as it was.

#[macro_use]
mod blocks;
pub mod low_rank;
pub mod momentum;
pub mod oracle;

use crate::number::left_span;
use bytemuck::cast_slice;
use half::bf16;
use trainyard_base::philox4x32;
use trainyard_program::BlockCodec;

/// The codes of NF4: means of quantiles of a normal distribution, so that each is as frequent as
/// the others among weights (Dettmers et al. 2023, appendix E).
#[rustfmt::skip]
pub const NF4: [f32; 16] = [
    -1.0, -0.696_192_8, -0.525_073_05, -0.394_917_5, -0.284_441_38, -0.184_773_43, -0.091_050_036, 0.0,
    0.079_580_3, 0.160_930_2, 0.246_112_3, 0.337_915_24, 0.440_709_83, 0.562_617, 0.722_956_84, 1.0,
];

/// Elements that have one scale in `nf4`.
const NF4_GROUP: usize = 64;

/// The middles between the codes of NF4.
const fn nf4_middles() -> [f32; 15] {
    let mut middles = [0.0; 15];
    let mut i = 0;
    while i < 15 {
        middles[i] = 0.5 * (NF4[i] + NF4[i + 1]);
        i += 1;
    }
    middles
}

/// The way in which values between two codes are rounded.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Rounding {
    /// To the nearest code.
    #[default]
    Nearest,
    /// Up or down by chance, so that the expected value is the value. Random numbers are a function
    /// of the key and of the element's place, `first` being the place of a buffer's first element.
    Stochastic {
        /// Key: seed, step and the like.
        key: [u32; 2],
        /// Place of the first element.
        first: u64,
    },
}

/// Bytes of `elements` elements in encoded form.
///
/// # Panics
/// If they are not whole blocks.
pub fn encoded_bytes(codec: BlockCodec, elements: usize) -> usize {
    blocks_of(codec, elements) * codec.block_bytes()
}

fn blocks_of(codec: BlockCodec, elements: usize) -> usize {
    let each = codec.block_elements();
    assert!(elements.is_multiple_of(each), "{elements} elements are no whole blocks of {each}");
    elements / each
}

/// Encodes `values`, plus `residual` if there is one; the residual becomes what the message leaves
/// out.
///
/// # Panics
/// If the buffers are not whole blocks or differ in length.
pub fn encode(codec: BlockCodec, values: &[f32], residual: Option<&mut [f32]>, rounding: Rounding, message: &mut [u8]) {
    let blocks = blocks_of(codec, values.len());
    assert_eq!(message.len(), blocks * codec.block_bytes(), "bytes of the message");
    if let Some(residual) = &residual {
        assert_eq!(residual.len(), values.len(), "elements of the residual");
    }
    blocks::encode(codec, values, residual, rounding, message);
}

/// Decodes a message.
///
/// # Panics
/// If the lengths do not fit each other.
pub fn decode(codec: BlockCodec, message: &[u8], values: &mut [f32]) {
    assert_eq!(message.len(), encoded_bytes(codec, values.len()), "bytes of the message");
    blocks::decode(codec, message, values);
}

/// Decodes the `messages` of all ranks, in their order, and adds them along the tree of
/// [`number`](crate::number).
///
/// # Panics
/// If there is no message, or the lengths do not fit each other.
pub fn decode_sum(codec: BlockCodec, messages: &[&[u8]], sum: &mut [f32]) {
    let bytes = encoded_bytes(codec, sum.len());
    assert!(messages.iter().all(|message| message.len() == bytes), "bytes of the messages");
    let (block, each) = (codec.block_elements(), codec.block_bytes());
    let mut scratch = vec![0.0f32; block * (messages.len().next_power_of_two().trailing_zeros() as usize + 1)];
    for (number, sum) in sum.chunks_mut(block).enumerate() {
        let part = number * each..(number + 1) * each;
        tree(codec, messages, &part, sum, &mut scratch);
    }
}

/// Sums the blocks at `part` of `messages` into `sum`. `scratch` has a block for each level below.
fn tree(codec: BlockCodec, messages: &[&[u8]], part: &std::ops::Range<usize>, sum: &mut [f32], scratch: &mut [f32]) {
    match messages {
        [] => panic!("a sum has at least one contribution"),
        [message] => blocks::decode(codec, &message[part.clone()], sum),
        _ => {
            let (left, right) = messages.split_at(left_span(messages.len()));
            let (other, rest) = scratch.split_at_mut(sum.len());
            tree(codec, left, part, sum, rest);
            tree(codec, right, part, other, rest);
            sum.iter_mut().zip(other).for_each(|(sum, other)| *sum += *other);
        }
    }
}

/// Four random numbers in [0, 1) for elements `4 * quad ..`.
fn uniforms(key: [u32; 2], quad: u64) -> [f32; 4] {
    let words = philox4x32([quad as u32, (quad >> 32) as u32, 0, 0], key);
    words.map(|word| (word >> 8) as f32 * (1.0 / (1 << 24) as f32))
}

fn scale_of(message: &[u8]) -> f32 {
    bf16::from_le_bytes([message[0], message[1]]).to_f32()
}

/// The smallest bf16 that is at least `value`, which is finite and not negative.
fn round_up(value: f32) -> f32 {
    f32::from_bits(value.to_bits().saturating_add(0xffff) & 0xffff_0000)
}

/// The codes of a message in `int8`.
fn signed(codes: &[u8]) -> &[i8] {
    cast_slice(codes)
}

#[cfg(test)]
mod tests;
