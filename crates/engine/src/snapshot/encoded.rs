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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use trainyard_tensor::cpu::Isa;
    use trainyard_tensor::{DType, Device, Purpose};

    proptest! {
        /// Places of any parts of a moment are the same numbers, copied or not, passed on in pieces
        /// of any size.
        #[test]
        fn places_are_decoded(
            lengths in proptest::collection::vec(1_usize..200, 1..4),
            cuts in proptest::collection::vec(0_usize..600, 2..8),
            size in 1_usize..2000,
            copies: bool,
        ) {
            let (device, isa) = (Device::cpu(Isa::detect(), 1, None), Isa::detect());
            let (mut parts, mut decoded) = (Vec::new(), Vec::new());
            for elements in lengths {
                let number = |i: usize| ((i * 7919 + elements) % 1001) as f32 - 500.0;
                let values: Vec<f32> = (0..elements).map(number).collect();
                let mut words = vec![0.0; moments8::words(elements)];
                moments8::encode(isa, Moment::First, &values, &mut words);
                let mut back = vec![0.0; elements];
                moments8::decode(isa, Moment::First, &words, &mut back);
                decoded.extend(back);
                let mut tensor = device.zeros([words.len()], DType::F32, Purpose::Optimizer).unwrap();
                tensor.overwrite_bytes(|bytes| bytes.copy_from_slice(bytemuck::cast_slice(&words))).unwrap();
                parts.push((Stored::Here(tensor), elements));
            }
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(decoded.len())).collect();
            cuts.sort_unstable();
            let places: Vec<_> = cuts.chunks_exact(2).map(|cut| cut[0]..cut[1]).collect();
            let want: Vec<f32> = places.iter().flat_map(|place| decoded[place.clone()].to_vec()).collect();
            let bytes = bytes_of(Moment::First, &parts, places.into_iter(), copies).unwrap();
            let mut got = Vec::new();
            bytes.chunks(size, |bytes| {
                got.extend_from_slice(bytes);
                Ok(())
            }).unwrap();
            prop_assert_eq!(got.len(), bytes.len());
            prop_assert!(got == bytemuck::cast_slice::<f32, u8>(&want));
            prop_assert_eq!(bytes.live_len() == 0, copies || want.is_empty());
        }
    }
}
