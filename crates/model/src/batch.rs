//! The input of a unit: the tokens of a micro-batch on the device.
//!
//! Sequences are packed one after another into one row of m tokens. `cu_seqlens` holds the start of
//! each, `[0, …, m]`, and attention stays within them. There is no padding and no mask, so unequal
//! lengths cost nothing.
//!
//! For a model with an encoder and a decoder, sequences come in pairs: what the encoder reads, then
//! what the decoder does. On the device the rows of all encoders' sequences come first ([`Sides`]).
//!
//! An image is a sequence too: the position of its class token, then its patches. Its target is its
//! class, at the position of the class token.

use crate::split::{ContextExchange, ContextSplit};
use crate::units::PatchEmbedding;
use crate::{ModelError, Result};
use std::ops::Range;
use trainyard_tensor::ops::{ContextSegments, CrossSegments, Segments};
use trainyard_tensor::{DType, Device, Purpose, Tensor};

/// The target of a token that does not count in the loss.
pub const IGNORED: i32 = -100;

/// A micro-batch on the host, as the loader gives it.
#[derive(Clone, Copy, Debug)]
pub struct BatchSlices<'a> {
    /// Token ids, [m].
    pub tokens: &'a [i32],
    /// The token to predict at each position, or [`IGNORED`], [m]; absent in generation.
    pub targets: Option<&'a [i32]>,
    /// The position of each token in its sequence, [m].
    pub positions: &'a [i32],
    /// The starts of sequences, and finally m.
    pub cu_seqlens: &'a [i32],
    /// The images, each a sequence; None for text.
    pub images: Option<ImageSlices<'a>>,
}

/// The images of a micro-batch. Their tokens have no meaning.
#[derive(Clone, Copy, Debug)]
pub struct ImageSlices<'a> {
    /// The patches of all images, [images x patches, patch_len].
    pub patches: &'a [f32],
    /// Numbers of a patch: channels x rows x columns.
    pub patch_len: usize,
    /// The second class of each image, if images are mixed.
    pub mixed: Option<MixedSlices<'a>>,
}

/// The second classes of mixed images.
#[derive(Clone, Copy, Debug)]
pub struct MixedSlices<'a> {
    /// The other class of each image.
    pub second: &'a [i32],
    /// The weight of each image's own class, from 0 to 1; the other class has the rest.
    pub weight: &'a [f32],
}

impl<'a> BatchSlices<'a> {
    /// A micro-batch of text.
    pub fn of_text(
        tokens: &'a [i32],
        targets: Option<&'a [i32]>,
        positions: &'a [i32],
        cu_seqlens: &'a [i32],
    ) -> BatchSlices<'a> {
        BatchSlices { tokens, targets, positions, cu_seqlens, images: None }
    }
}

/// A micro-batch on the device, or this rank's part of one; its memory counts as [`Purpose::Data`].
#[derive(Clone, Debug)]
pub struct Batch {
    /// i32 [m], or as many as this rank has of them; of images, the kind of each row
    /// ([`PatchEmbedding::CLASS`], [`PatchEmbedding::PATCH`]).
    pub tokens: Tensor,
    /// i32 [m]; of images, None: see [`ImageBatch::classes`].
    pub targets: Option<Tensor>,
    /// i32 [m].
    pub positions: Tensor,
    /// The starts of sequences in the whole micro-batch, on the host.
    pub segments: Segments,
    /// The number of targets that count.
    pub counted: usize,
    /// One more than the largest position.
    pub positions_end: usize,
    /// The part of the micro-batch that is here, if ranks of a context-parallel group divide it.
    pub part: Option<BatchPart>,
    /// The images, each a sequence; None for text.
    pub images: Option<ImageBatch>,
    /// The rows of encoders and of decoders, for a model that has both.
    pub sides: Option<Sides>,
}

/// The sequences of a micro-batch that an encoder and a decoder read. The rows of all encoders'
/// sequences come before those of all decoders'.
#[derive(Clone, Debug)]
pub struct Sides {
    /// The number of rows of the encoder.
    pub encoder_rows: usize,
    /// The bounds of its sequences.
    pub encoder: Segments,
    /// The bounds of the decoder's sequences, from its first row on.
    pub decoder: Segments,
    /// For each sequence of the decoder, the one of the encoder that it reads.
    pub cross: CrossSegments,
}

impl Sides {
    /// Of sequences that are bounded by `cu_seqlens`: an encoder's, then its decoder's, and so on;
    /// or one of a decoder alone, whose encoder has run.
    fn new(cu_seqlens: &[i32]) -> Result<Sides> {
        let lengths: Vec<i32> = cu_seqlens.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let bounds = |lengths: &mut dyn Iterator<Item = i32>| {
            let mut bounds = vec![0];
            for length in lengths {
                bounds.push(bounds[bounds.len() - 1] + length);
            }
            Segments::new(&bounds)
        };
        if let [one] = lengths[..] {
            let (none, decoder) = (Segments::new(&[0, 0])?, Segments::new(&[0, one])?);
            let cross = CrossSegments::new(decoder.clone(), none.clone())?;
            return Ok(Sides { encoder_rows: 0, encoder: none, decoder, cross });
        }
        if !lengths.len().is_multiple_of(2) {
            return Err(ModelError::Batch(format!(
                "{} sequences for a model with an encoder and a decoder, which takes pairs of them",
                lengths.len()
            )));
        }
        let encoder = bounds(&mut lengths.iter().step_by(2).copied())?;
        let decoder = bounds(&mut lengths.iter().skip(1).step_by(2).copied())?;
        let cross = CrossSegments::new(decoder.clone(), encoder.clone())?;
        Ok(Sides { encoder_rows: encoder.tokens(), encoder, decoder, cross })
    }

    /// The decoder's one sequence over `rows` rows that its encoder has made before.
    pub(crate) fn over(&self, rows: usize) -> Result<CrossSegments> {
        Ok(CrossSegments::new(self.decoder.clone(), Segments::new(&[0, rows as i32])?)?)
    }

    /// The stretches of the rows of `cu_seqlens` in the order of sides.
    fn order(cu_seqlens: &[i32]) -> Vec<Range<usize>> {
        let rows = |pair: &[i32]| pair[0] as usize..pair[1] as usize;
        let all: Vec<Range<usize>> = cu_seqlens.windows(2).map(rows).collect();
        all.iter().step_by(2).chain(all.iter().skip(1).step_by(2)).cloned().collect()
    }
}

/// The images of a micro-batch on the device.
#[derive(Clone, Debug)]
pub struct ImageBatch {
    /// Patches as rows, and zeros in the rows of class tokens: f32 [m, patch_len].
    pub patches: Tensor,
    /// The row of each image's class token, i32 [images].
    pub rows: Tensor,
    /// The class of each image, i32 [images], or [`IGNORED`].
    pub classes: Option<Tensor>,
    /// The classes of mixed images with their weights.
    pub mixed: Option<MixedBatch>,
}

/// The classes of mixed images.
#[derive(Clone, Debug)]
pub struct MixedBatch {
    /// The two classes of each image, i32 [images, 2].
    pub pairs: Tensor,
    /// Their weights, which sum to 1: f32 [images, 2].
    pub weights: Tensor,
}

impl ImageBatch {
    fn new(
        device: &Device,
        slices: &BatchSlices<'_>,
        images: &ImageSlices<'_>,
        vocab_size: usize,
    ) -> Result<ImageBatch> {
        let fail = |problem: String| Err(ModelError::Batch(problem));
        let (m, starts) = (slices.tokens.len(), &slices.cu_seqlens[..slices.cu_seqlens.len() - 1]);
        let (count, width) = (starts.len(), images.patch_len);
        if width == 0 || images.patches.len() != (m - count) * width {
            return fail(format!(
                "{} numbers of patches of {width} for {count} images of {m} positions, class tokens included",
                images.patches.len()
            ));
        }
        let patches = device.empty([m, width], DType::F32, Purpose::Data)?;
        let mut from = images.patches;
        for bounds in slices.cu_seqlens.windows(2).filter(|_| !device.is_meta()) {
            let (start, end) = (bounds[0] as usize, bounds[1] as usize);
            let (own, rest) = from.split_at((end - start - 1) * width);
            patches.view(start * width, [width])?.fill_zero()?;
            patches.view((start + 1) * width, [own.len()])?.write(own)?;
            from = rest;
        }
        let put = |data: &[i32]| device.tensor([count], data, Purpose::Data);
        let classes: Option<Vec<i32>> =
            slices.targets.map(|targets| starts.iter().map(|start| targets[*start as usize]).collect());
        let mixed = match (&images.mixed, &classes) {
            (Some(mixed), Some(classes)) => Some(MixedBatch::new(device, mixed, classes, vocab_size)?),
            (Some(_), None) => return fail("mixed images without classes".into()),
            (None, _) => None,
        };
        Ok(ImageBatch { patches, rows: put(starts)?, classes: classes.as_deref().map(put).transpose()?, mixed })
    }

    fn overwrite(&mut self, other: &ImageBatch) -> Result<()> {
        self.patches.copy_from(&other.patches)?;
        self.rows.copy_from(&other.rows)?;
        if let (Some(classes), Some(other)) = (&mut self.classes, &other.classes) {
            classes.copy_from(other)?;
        }
        match (&mut self.mixed, &other.mixed) {
            (Some(mixed), Some(other)) => {
                mixed.pairs.copy_from(&other.pairs)?;
                mixed.weights.copy_from(&other.weights)?;
            }
            (None, None) => {}
            _ => return Err(ModelError::Batch("one batch has mixed images, and one has none".into())),
        }
        Ok(())
    }
}

impl MixedBatch {
    fn new(device: &Device, mixed: &MixedSlices<'_>, classes: &[i32], vocab_size: usize) -> Result<MixedBatch> {
        let (count, MixedSlices { second, weight }) = (classes.len(), *mixed);
        let fail = |problem: String| Err(ModelError::Batch(problem));
        if second.len() != count || weight.len() != count {
            let found = format!("{} second classes and {} weights", second.len(), weight.len());
            return fail(format!("{found} for {count} mixed images"));
        }
        let outside = |class: &&i32| **class < 0 || **class as usize >= vocab_size;
        if let Some(class) = classes.iter().chain(second).find(outside) {
            return fail(format!("class {class} of a mixed image in a model of {vocab_size} classes"));
        }
        if let Some(weight) = weight.iter().find(|weight| !(0.0..=1.0).contains(*weight)) {
            return fail(format!("the weight {weight} of a mixed image's class is not between 0 and 1"));
        }
        let pairs: Vec<i32> = classes.iter().zip(second).flat_map(|(first, second)| [*first, *second]).collect();
        let weights: Vec<f32> = weight.iter().flat_map(|weight| [*weight, 1.0 - weight]).collect();
        Ok(MixedBatch {
            pairs: device.tensor([count, 2], &pairs, Purpose::Data)?,
            weights: device.tensor([count, 2], &weights, Purpose::Data)?,
        })
    }
}

/// A rank's part of a micro-batch that the ranks of a context-parallel group divide.
#[derive(Clone, Debug)]
pub struct BatchPart {
    /// Its rows of the micro-batch, in the order of the batch's tensors.
    pub rows: Vec<Range<usize>>,
    /// The keys that its queries see; None where ranks exchange rows for heads, and each sees all
    /// rows of its heads.
    pub keys: Option<ContextSegments>,
    /// The same in two parts, its own keys and all others, where ranks overlap.
    pub apart: Option<[ContextSegments; 2]>,
}

impl Batch {
    /// Checks a batch and copies it to the device. `vocab_size` bounds tokens and targets,
    /// `positions_max` positions.
    pub fn new(
        device: &Device,
        slices: &BatchSlices<'_>,
        vocab_size: usize,
        positions_max: Option<usize>,
    ) -> Result<Batch> {
        Batch::of_part(device, slices, vocab_size, positions_max, ContextSplit::WHOLE)
    }

    /// As [`Batch::new`], and copies the part of one rank of a context-parallel group. `slices` is
    /// the whole micro-batch.
    ///
    /// # Errors
    /// As [`Batch::new`], and rows that cannot be divided.
    pub fn of_part(
        device: &Device,
        slices: &BatchSlices<'_>,
        vocab_size: usize,
        positions_max: Option<usize>,
        context: ContextSplit,
    ) -> Result<Batch> {
        let BatchSlices { tokens, targets, positions, cu_seqlens, images } = *slices;
        let m = tokens.len();
        let fail = |problem: String| Err(ModelError::Batch(problem));
        if m == 0 {
            return fail("no tokens".into());
        }
        if positions.len() != m || targets.is_some_and(|targets| targets.len() != m) {
            let targets = targets.map_or(String::new(), |t| format!(" and {} targets", t.len()));
            return fail(format!("{m} tokens with {} positions{targets}", positions.len()));
        }
        let bounded = cu_seqlens.first() == Some(&0) && cu_seqlens.last().is_some_and(|last| *last as usize == m);
        if !bounded || cu_seqlens.windows(2).any(|pair| pair[0] >= pair[1]) {
            return fail(format!("cu_seqlens must rise from 0 to the number of tokens, {m}; it is {cu_seqlens:?}"));
        }
        let outside = |id: i32| id < 0 || id as usize >= vocab_size;
        if let Some(at) = tokens.iter().position(|id| outside(*id)).filter(|_| images.is_none()) {
            return fail(format!("token {} at {at} is outside of the vocabulary of {vocab_size}", tokens[at]));
        }
        let mut counted = 0;
        for (at, target) in targets.unwrap_or_default().iter().enumerate() {
            if *target == IGNORED {
                continue;
            }
            if outside(*target) {
                return fail(format!("target {target} at {at} is outside of the vocabulary of {vocab_size}"));
            }
            if images.is_some() && positions[at] != 0 {
                return fail(format!(
                    "target {target} at {at}, which is a patch: an image's class is its class token's"
                ));
            }
            counted += 1;
        }
        let last = positions.iter().copied().max().unwrap_or(0);
        if let Some(negative) = positions.iter().find(|position| **position < 0) {
            return fail(format!("position {negative}"));
        }
        if let Some(limit) = positions_max.filter(|limit| last as usize >= *limit) {
            return fail(format!("position {last} in a model with {limit} positions: use shorter sequences"));
        }
        let segments = Segments::new(cu_seqlens)?;
        let put = |data: &[i32]| device.tensor([data.len()], data, Purpose::Data);
        let positions_end = last as usize + 1;
        if let Some(images) = &images {
            if context.ranks > 1 {
                return fail("images are not divided over context-parallel ranks".into());
            }
            let kind = |position: &i32| if *position == 0 { PatchEmbedding::CLASS } else { PatchEmbedding::PATCH };
            let kinds: Vec<i32> = positions.iter().map(kind).collect();
            return Ok(Batch {
                tokens: put(&kinds)?,
                targets: None,
                positions: put(positions)?,
                segments,
                counted,
                positions_end,
                part: None,
                images: Some(ImageBatch::new(device, slices, images, vocab_size)?),
                sides: None,
            });
        }
        if context.ranks > 1 {
            let rows = context.rows_of(context.rank, m)?;
            let keys = match context.exchange {
                ContextExchange::Keys(_) | ContextExchange::Overlapped(_) => {
                    Some(ContextSegments::new(cu_seqlens, &rows, context.gathered(m)?)?)
                }
                ContextExchange::Heads => None,
            };
            let apart = match context.exchange {
                ContextExchange::Overlapped(_) => {
                    Some(ContextSegments::apart(cu_seqlens, &rows, context.gathered(m)?)?)
                }
                _ => None,
            };
            let put = |data: &[i32]| {
                let own: Vec<i32> = rows.iter().flat_map(|rows| &data[rows.clone()]).copied().collect();
                device.tensor([own.len()], &own, Purpose::Data)
            };
            let own = |of: &[i32]| rows.iter().flat_map(|rows| &of[rows.clone()]).filter(|id| **id != IGNORED).count();
            return Ok(Batch {
                tokens: put(tokens)?,
                targets: targets.map(put).transpose()?,
                positions: put(positions)?,
                segments,
                counted: targets.map_or(0, own),
                positions_end,
                part: Some(BatchPart { rows, keys, apart }),
                images: None,
                sides: None,
            });
        }
        Ok(Batch {
            tokens: put(tokens)?,
            targets: targets.map(put).transpose()?,
            positions: put(positions)?,
            segments,
            counted,
            positions_end,
            part: None,
            images: None,
            sides: None,
        })
    }

    /// As [`Batch::new`], for a model with an encoder and a decoder: the sequences of `slices` are
    /// an encoder's, then its decoder's, and so on.
    ///
    /// # Errors
    /// As [`Batch::new`], and sequences that are no pairs.
    pub fn of_pairs(
        device: &Device,
        slices: &BatchSlices<'_>,
        vocab_size: usize,
        positions_max: Option<usize>,
    ) -> Result<Batch> {
        // The checks, without a second copy.
        Batch::new(&Device::meta(), slices, vocab_size, positions_max)?;
        let sides = Sides::new(slices.cu_seqlens)?;
        let order = Sides::order(slices.cu_seqlens);
        let sorted =
            |data: &[i32]| -> Vec<i32> { order.iter().flat_map(|rows| &data[rows.clone()]).copied().collect() };
        let mut cu_seqlens = vec![0];
        for rows in &order {
            cu_seqlens.push(cu_seqlens[cu_seqlens.len() - 1] + rows.len() as i32);
        }
        let (tokens, positions) = (sorted(slices.tokens), sorted(slices.positions));
        let targets = slices.targets.map(sorted);
        let of_encoder = |targets: &Vec<i32>| targets[..sides.encoder_rows].iter().any(|id| *id != IGNORED);
        if targets.as_ref().is_some_and(of_encoder) {
            return Err(ModelError::Batch("a target at a token of the encoder, which predicts none".into()));
        }
        let sorted = BatchSlices::of_text(&tokens, targets.as_deref(), &positions, &cu_seqlens);
        let batch = Batch::new(device, &sorted, vocab_size, positions_max)?;
        Ok(Batch { sides: Some(sides), ..batch })
    }

    /// The rows of its encoders and decoders.
    ///
    /// # Errors
    /// A batch that was not made of pairs of sequences.
    pub fn sides(&self) -> Result<&Sides> {
        let missing = || ModelError::Batch("a model with an encoder takes pairs of sequences".into());
        self.sides.as_ref().ok_or_else(missing)
    }

    /// The rows of the micro-batch that rows `here` of this batch's tensors are.
    pub fn rows_of(&self, here: &Range<usize>) -> Vec<Range<usize>> {
        let Some(part) = &self.part else { return std::iter::once(here.clone()).collect() };
        let mut at = 0;
        let within = |rows: &Range<usize>| {
            let [start, end] = [here.start, here.end].map(|row| row.clamp(at, at + rows.len()) - at);
            at += rows.len();
            (start < end).then(|| rows.start + start..rows.start + end)
        };
        part.rows.iter().filter_map(within).collect()
    }

    /// Overwrites the device tensors of this batch, in place, with those of `other`, which has as
    /// many tokens. Work that was captured with this batch then runs on the new values. The host's
    /// view of this batch stays as it is. `shown` holds the segments that the kernels have read so
    /// far, and is updated.
    pub fn overwrite(&mut self, other: &Batch, shown: &mut Segments) -> Result<()> {
        self.tokens.copy_from(&other.tokens)?;
        self.positions.copy_from(&other.positions)?;
        match (&mut self.targets, &other.targets) {
            (Some(targets), Some(other)) => targets.copy_from(other)?,
            (None, None) => {}
            _ => return Err(ModelError::Batch("one batch has targets, and one has none".into())),
        }
        match (&mut self.images, &other.images) {
            (Some(images), Some(other)) => images.overwrite(other)?,
            (None, None) => {}
            _ => return Err(ModelError::Batch("one batch has images, and one has text".into())),
        }
        if *shown != other.segments {
            self.segments.overwrite_on(self.tokens.device(), &other.segments)?;
            *shown = other.segments.clone();
        }
        Ok(())
    }

    /// The number of tokens that are here.
    pub fn len(&self) -> usize {
        self.tokens.elements()
    }

    /// True if there are no tokens, which no batch allows.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The shape of a batch without its contents. The cost of a step depends on nothing else.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BatchShape {
    /// The length of each sequence.
    pub sequences: Vec<usize>,
    /// Numbers of a patch, if sequences are images; None for text.
    pub patch_len: Option<usize>,
    /// True if images are mixed, so that each has two classes.
    pub mixed: bool,
    /// True if sequences are pairs: an encoder's, then its decoder's.
    pub paired: bool,
}

impl BatchShape {
    /// `count` sequences of `length` tokens.
    pub fn uniform(count: usize, length: usize) -> BatchShape {
        BatchShape { sequences: vec![length; count], patch_len: None, mixed: false, paired: false }
    }

    /// `count` pairs of sequences, of `encoder` tokens and of `decoder` tokens.
    pub fn pairs(count: usize, encoder: usize, decoder: usize) -> BatchShape {
        let sequences = (0..count).flat_map(|_| [encoder, decoder]).collect();
        BatchShape { sequences, patch_len: None, mixed: false, paired: true }
    }

    /// Tokens in all.
    pub fn tokens(&self) -> usize {
        self.sequences.iter().sum()
    }

    /// Bytes of its tensors.
    pub fn bytes(&self) -> u64 {
        let (tokens, count) = (self.tokens() as u64, self.sequences.len() as u64);
        match self.patch_len {
            // Tokens, targets and positions, i32.
            None => 12 * tokens,
            // Kinds and positions of rows, patches; of images the row and the class, two classes
            // with weights if they are mixed.
            Some(patch_len) => tokens * (8 + 4 * patch_len as u64) + count * if self.mixed { 24 } else { 8 },
        }
    }

    /// A batch of this shape in which every token is 0, with targets.
    pub fn batch(&self, device: &Device) -> Result<Batch> {
        self.batch_of(device, ContextSplit::WHOLE)
    }

    /// The part of such a batch that one rank of a context-parallel group has.
    ///
    /// # Errors
    /// Rows that cannot be divided.
    pub fn batch_of(&self, device: &Device, context: ContextSplit) -> Result<Batch> {
        let tokens = vec![0; self.tokens()];
        let positions: Vec<i32> = self.sequences.iter().flat_map(|length| 0..*length as i32).collect();
        let mut cu_seqlens = vec![0];
        let mut end = 0;
        for length in &self.sequences {
            end += *length as i32;
            cu_seqlens.push(end);
        }
        if self.paired {
            if context.ranks > 1 {
                return Err(ModelError::Batch("pairs of sequences are not divided over context-parallel ranks".into()));
            }
            let side = |(at, length): (usize, &usize)| vec![if at % 2 == 0 { IGNORED } else { 0 }; *length];
            let targets: Vec<i32> = self.sequences.iter().enumerate().flat_map(side).collect();
            let slices = BatchSlices::of_text(&tokens, Some(&targets), &positions, &cu_seqlens);
            return Batch::of_pairs(device, &slices, 1, None);
        }
        let Some(patch_len) = self.patch_len else {
            let slices = BatchSlices::of_text(&tokens, Some(&tokens), &positions, &cu_seqlens);
            return Batch::of_part(device, &slices, 1, None, context);
        };
        let count = self.sequences.len();
        let targets: Vec<i32> = positions.iter().map(|position| if *position == 0 { 0 } else { IGNORED }).collect();
        let patches = vec![0.0; (tokens.len() - count) * patch_len];
        let (second, weight) = (vec![0; count], vec![1.0; count]);
        let mixed = self.mixed.then_some(MixedSlices { second: &second, weight: &weight });
        let images = Some(ImageSlices { patches: &patches, patch_len, mixed });
        let text = BatchSlices::of_text(&tokens, Some(&targets), &positions, &cu_seqlens);
        Batch::of_part(device, &BatchSlices { images, ..text }, 1, None, context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_batches_are_refused_with_the_reason() {
        let device = Device::meta();
        let check = |tokens: &[i32], targets: &[i32], positions: &[i32], cu_seqlens: &[i32], expect: &str| {
            let slices = BatchSlices::of_text(tokens, Some(targets), positions, cu_seqlens);
            let error = Batch::new(&device, &slices, 10, Some(4)).unwrap_err().to_string();
            assert!(error.contains(expect), "{error:?} does not say {expect:?}");
        };
        check(&[], &[], &[], &[0], "no tokens");
        check(&[1, 2], &[1], &[0, 1], &[0, 2], "1 targets");
        check(&[1, 2], &[1, 2], &[0], &[0, 2], "1 positions");
        check(&[1, 2], &[1, 2], &[0, 1], &[0, 1], "cu_seqlens");
        check(&[1, 2], &[1, 2], &[0, 1], &[0, 0, 2], "cu_seqlens");
        check(&[1, 10], &[1, 2], &[0, 1], &[0, 2], "token 10 at 1");
        check(&[1, -1], &[1, 2], &[0, 1], &[0, 2], "token -1 at 1");
        check(&[1, 2], &[-5, 2], &[0, 1], &[0, 2], "target -5 at 0");
        check(&[1, 2], &[1, 2], &[0, -1], &[0, 2], "position -1");
        check(&[1, 2], &[1, 2], &[3, 4], &[0, 2], "position 4 in a model with 4");
        let slices = BatchSlices::of_text(&[1, 2], Some(&[IGNORED, 3]), &[0, 0], &[0, 1, 2]);
        let batch = Batch::new(&device, &slices, 10, Some(4)).unwrap();
        assert_eq!((batch.len(), batch.counted, batch.positions_end), (2, 1, 1));
    }
}
