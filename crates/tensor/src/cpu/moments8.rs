//! AdamW with its moments in eight bits: a code an element and an f32 scale for each block of 32
//! elements (blockwise quantisation, Dettmers et al. 2021, section 2).
//!
//! A code is a small float relative to the largest element of its block, `scale 2^e (1 + f / 8)`
//! with three bits of fraction. It decodes by a shift. The largest element of a block is the scale
//! itself, so decoded moments encode to the same codes again.
//!
//! | moment | bits of sign, exponent, fraction | smallest above 0 | rounding |
//! |--------|----------------------------------|------------------|----------|
//! | first  | 1, 4, 3                          | 1.25 * 2^-16     | nearest  |
//! | second | 0, 5, 3                          | 1.25 * 2^-32     | nearest, but up from below the smallest |
//!
//! The second moment divides the first by its root. It is rounded up from below the smallest code,
//! because an update by a moment that vanished would be divided by `eps` alone. The paper's codes
//! move the border between exponent and fraction, which takes a search or a table; these take a
//! shift.
//!
//! 72 bytes hold both moments of 32 elements, 2.25 a parameter, which take 8 in f32. A step moves
//! 18.5 bytes a parameter with a 16-bit copy, where AdamW in f32 moves 30.

use super::optim::{AdamW, adamw_range};
use super::rows::{ELEMENTS_ALIGN, for_elements};
use super::threads::Shares;
use crate::cpu::{Cpu, Isa};
use crate::dtype::Element;
use crate::simd_fn;
use std::ops::Range;

/// Elements of a block.
pub const BLOCK: usize = 32;
/// `f32` words of a block: its scale, then its codes, four a word.
pub const BLOCK_WORDS: usize = 1 + BLOCK / 4;
// Threads begin with whole blocks.
const _: () = assert!(ELEMENTS_ALIGN.is_multiple_of(BLOCK));
/// Elements that are decoded at a time: their moments stay in the first cache.
const SPAN: usize = 16 * BLOCK;
/// Bits of a float's fraction that a code leaves out.
const SHIFT: u32 = 23 - 3;

/// A moment of AdamW.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Moment {
    /// The average of gradients, which has a sign.
    First,
    /// The average of their squares.
    Second,
}

impl Moment {
    /// The code of 1.
    const fn largest(self) -> u32 {
        match self {
            Moment::First => 127,
            Moment::Second => 255,
        }
    }

    /// A code and this are the bits of its float, without those that the code leaves out.
    const fn base(self) -> u32 {
        (1.0f32.to_bits() >> SHIFT) - self.largest()
    }

    /// The smallest scale. Products with codes are then normal numbers, and exact up to rounding.
    const fn scale_min(self) -> u32 {
        // 2^-90
        (127 - 90) << 23
    }
}

/// `f32` words of a moment of `elements` elements.
pub const fn words(elements: usize) -> usize {
    elements.div_ceil(BLOCK) * BLOCK_WORDS
}

/// Decodes the first `values.len()` elements of `blocks`.
///
/// # Panics
/// When the lengths disagree, here and below.
pub fn decode(isa: Isa, moment: Moment, blocks: &[f32], values: &mut [f32]) {
    assert_eq!(blocks.len(), words(values.len()), "words of {} elements", values.len());
    decode_range(isa, moment, blocks, values);
}

/// Encodes `values`; elements of the last block behind their end become 0.
pub fn encode(isa: Isa, moment: Moment, values: &[f32], blocks: &mut [f32]) {
    assert_eq!(blocks.len(), words(values.len()), "words of {} elements", values.len());
    encode_range(isa, moment, values, blocks);
}

/// The words of a range of elements that begins with a block.
fn words_of(range: &Range<usize>) -> Range<usize> {
    words(range.start)..words(range.end)
}

/// As [`adamw`](super::optim::adamw), with moments of [`words`] words. The update is made of the
/// moments before they are rounded.
pub fn adamw8<T: Element>(
    cpu: &Cpu,
    hyper: AdamW,
    step: u64,
    gradient_scale: f32,
    params: &mut [f32],
    gradients: &[f32],
    first: &mut [f32],
    second: &mut [f32],
    copy: Option<&mut [T]>,
) {
    let len = params.len();
    assert_eq!(gradients.len(), len, "length of the gradients");
    assert_eq!((first.len(), second.len()), (words(len), words(len)), "words of the moments of {len} elements");
    assert_eq!(copy.as_ref().map_or(len, |copy| copy.len()), len, "length of the compute copy");
    let (step_size, root) = hyper.corrected(step);
    let hyper = AdamW { beta2: hyper.second_decay(step), ..hyper };
    let bytes = 12 + 16 * BLOCK_WORDS / BLOCK + copy.as_ref().map_or(0, |_| size_of::<T>());
    let (params, first, second) = (Shares::new(params), Shares::new(first), Shares::new(second));
    let copy = copy.map(Shares::new);
    for_elements(cpu, len, bytes, |range| {
        for start in range.clone().step_by(SPAN) {
            let span = start..range.end.min(start + SPAN);
            let (mut m, mut v) = ([0.0; SPAN], [0.0; SPAN]);
            let (m, v) = (&mut m[..span.len()], &mut v[..span.len()]);
            // SAFETY: spans begin at whole blocks and do not overlap.
            let (first, second) = unsafe { (first.part(words_of(&span)), second.part(words_of(&span))) };
            // SAFETY: as above.
            let params = unsafe { params.part(span.clone()) };
            // SAFETY: as above.
            let copy = copy.as_ref().map(|copy| unsafe { copy.part(span.clone()) });
            decode_range(cpu.isa, Moment::First, first, m);
            decode_range(cpu.isa, Moment::Second, second, v);
            let g = &gradients[span];
            adamw_range(cpu.isa, hyper, gradient_scale, step_size, root, g, params, m, v, copy);
            encode_range(cpu.isa, Moment::First, m, first);
            encode_range(cpu.isa, Moment::Second, v, second);
        }
    });
}

simd_fn! {
    fn decode_range(_s: S, moment: Moment, blocks: &[f32], values: &mut [f32]) {
        for (block, values) in blocks.chunks_exact(BLOCK_WORDS).zip(values.chunks_mut(BLOCK)) {
            let (scale, codes) = (block[0], codes_of(&block[1..]));
            let mut decoded = [0.0; BLOCK];
            for (value, code) in decoded.iter_mut().zip(codes) {
                *value = of_code(moment, *code) * scale;
            }
            values.copy_from_slice(&decoded[..values.len()]);
        }
    }
}

simd_fn! {
    fn encode_range(_s: S, moment: Moment, values: &[f32], blocks: &mut [f32]) {
        for (values, block) in values.chunks(BLOCK).zip(blocks.chunks_exact_mut(BLOCK_WORDS)) {
            let mut whole = [0.0f32; BLOCK];
            whole[..values.len()].copy_from_slice(values);
            // Magnitudes compare like their bits. A value that is not finite makes the scale so,
            // and with it the whole block.
            let largest = whole.iter().fold(moment.scale_min(), |most, value| most.max(value.abs().to_bits()));
            let scale = f32::from_bits(largest);
            let (head, codes) = block.split_at_mut(1);
            head[0] = scale;
            let codes: &mut [u8] = bytemuck::cast_slice_mut(codes);
            for (code, value) in codes.iter_mut().zip(whole) {
                *code = code_of(moment, value, scale);
            }
        }
    }
}

fn codes_of(words: &[f32]) -> &[u8; BLOCK] {
    bytemuck::cast_slice(words).try_into().expect("a block has as many codes as elements")
}

/// The number of a code, relative to its block's scale.
#[inline(always)]
fn of_code(moment: Moment, code: u8) -> f32 {
    let code = u32::from(code);
    let (sign, magnitude) = match moment {
        Moment::First => ((code & 128) << 24, code & 127),
        Moment::Second => (0, code),
    };
    let bits = (magnitude + moment.base()) << SHIFT;
    f32::from_bits(sign | if magnitude == 0 { 0 } else { bits })
}

/// The code of a value, whose magnitude is at most `scale`.
#[inline(always)]
fn code_of(moment: Moment, value: f32, scale: f32) -> u8 {
    let ratio = value.abs() / scale;
    // Adding half a step before the shift rounds to nearest.
    let rounded = ratio.to_bits().wrapping_add(1 << (SHIFT - 1)) >> SHIFT;
    let code = rounded as i32 - moment.base() as i32;
    match moment {
        Moment::First => {
            let half = f32::from_bits((moment.base() + 1) << SHIFT) / 2.0;
            let code = code.max(i32::from(ratio >= half)).min(127) as u8;
            code | (value.to_bits() >> 24) as u8 & 128
        }
        Moment::Second => code.max(i32::from(value != 0.0)).min(255) as u8,
    }
}
