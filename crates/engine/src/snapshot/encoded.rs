//! Moments in codes of eight bits in a checkpoint: they are written in f32, under the names and in
//! the order of f32 moments. A run that goes on encodes them again, which gives the same codes.

use super::{bytes, joined};
use crate::Result;
use crate::checkpoint::{Bytes, Encoded};
use crate::state::overlap;
use crate::tier::Stored;
use std::ops::Range;
use trainyard_tensor::ops::optim::{Moment, moments8};

/// As [`bytes`], of a moment in codes of eight bits, each of whose `parts` begins with a block.
pub(super) fn bytes_of(
    moment: Moment,
    parts: &[(Stored, usize)],
    places: impl Iterator<Item = Range<usize>>,
    copies: bool,
) -> Result<Bytes<'static>> {
    let (mut blocks, mut elements, mut taken) = (Vec::new(), Vec::new(), 0);
    for place in joined(places) {
        let (mut start, mut first_block) = (0, 0);
        for (_, count) in parts {
            let held = overlap(&place, &(start..start + count));
            if !held.is_empty() {
                let held = held.start - start..held.end - start;
                let whole = held.start / moments8::BLOCK..held.end.div_ceil(moments8::BLOCK);
                // From the elements of the part to those of the blocks that are taken.
                let shift = |element: usize| taken + element - whole.start * moments8::BLOCK;
                elements.push(shift(held.start)..shift(held.end));
                taken += whole.len() * moments8::BLOCK;
                let words = |block: usize| block * moments8::BLOCK_WORDS;
                blocks.push(words(first_block + whole.start)..words(first_block + whole.end));
            }
            start += count;
            first_block += count.div_ceil(moments8::BLOCK);
        }
    }
    let words = |(stored, elements): &(Stored, usize)| (stored.clone(), moments8::words(*elements));
    let parts: Vec<_> = parts.iter().map(words).collect();
    let blocks = Box::new(bytes(&parts, blocks.into_iter(), copies)?);
    Ok(Bytes::Encoded(Encoded { moment, blocks, elements }))
}
