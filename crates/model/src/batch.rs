//! The input of a unit: the tokens of a micro-batch on the device.
//!
//! Sequences are packed one after another into one row of m tokens. `cu_seqlens` holds the start of
//! each, `[0, …, m]`, and attention stays within them. There is no padding and no mask, so unequal
//! lengths cost nothing.

use crate::split::ContextSplit;
use crate::{ModelError, Result};
use std::ops::Range;
use trainyard_tensor::ops::{ContextSegments, Segments};
use trainyard_tensor::{Device, Purpose, Tensor};

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
}

/// A micro-batch on the device, or this rank's part of one; its memory counts as [`Purpose::Data`].
#[derive(Clone, Debug)]
pub struct Batch {
    /// i32 [m], or as many as this rank has of them.
    pub tokens: Tensor,
    /// i32 [m].
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
}

/// A rank's part of a micro-batch that the ranks of a context-parallel group divide.
#[derive(Clone, Debug)]
pub struct BatchPart {
    /// Its rows of the micro-batch, in the order of the batch's tensors.
    pub rows: Vec<Range<usize>>,
    /// The keys that its queries see.
    pub keys: ContextSegments,
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
        let BatchSlices { tokens, targets, positions, cu_seqlens } = *slices;
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
        if let Some(at) = tokens.iter().position(|id| outside(*id)) {
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
        if context.ranks > 1 {
            let rows = context.rows_of(context.rank, m)?;
            let keys = ContextSegments::new(cu_seqlens, &rows, context.gathered(m)?)?;
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
                positions_end: last as usize + 1,
                part: Some(BatchPart { rows, keys }),
            });
        }
        let put = |data: &[i32]| device.tensor([data.len()], data, Purpose::Data);
        Ok(Batch {
            tokens: put(tokens)?,
            targets: targets.map(put).transpose()?,
            positions: put(positions)?,
            segments,
            counted,
            positions_end: last as usize + 1,
            part: None,
        })
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
}

impl BatchShape {
    /// `count` sequences of `length` tokens.
    pub fn uniform(count: usize, length: usize) -> BatchShape {
        BatchShape { sequences: vec![length; count] }
    }

    /// Tokens in all.
    pub fn tokens(&self) -> usize {
        self.sequences.iter().sum()
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
        let slices =
            BatchSlices { tokens: &tokens, targets: Some(&tokens), positions: &positions, cu_seqlens: &cu_seqlens };
        Batch::of_part(device, &slices, 1, None, context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_batches_are_refused_with_the_reason() {
        let device = Device::meta();
        let check = |tokens: &[i32], targets: &[i32], positions: &[i32], cu_seqlens: &[i32], expect: &str| {
            let slices = BatchSlices { tokens, targets: Some(targets), positions, cu_seqlens };
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
        let slices =
            BatchSlices { tokens: &[1, 2], targets: Some(&[IGNORED, 3]), positions: &[0, 0], cu_seqlens: &[0, 1, 2] };
        let batch = Batch::new(&device, &slices, 10, Some(4)).unwrap();
        assert_eq!((batch.len(), batch.counted, batch.positions_end), (2, 1, 1));
    }
}
