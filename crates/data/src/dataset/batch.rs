//! The batches that a model trains on.

use std::ops::Range;

use crate::images::Pixels;
use crate::indexed::IndexedTokens;

/// The target of a position without one, as cross-entropy losses expect it.
pub const IGNORE: i32 = -100;

/// Some rows of equal length, flattened row by row.
#[derive(Debug, Clone, PartialEq)]
pub struct MicroBatch {
    /// Inputs, `[rows * sequence_length]`.
    pub tokens: Vec<i32>,
    /// The token after each input, or [`IGNORE`], `[rows * sequence_length]`.
    pub targets: Vec<i32>,
    /// Position of each input in its segment, from 0, `[rows * sequence_length]`.
    pub positions: Vec<i32>,
    /// The start of each segment in the flattened batch, and finally the batch's length. No segment
    /// crosses a row, nor, if boundaries are respected, a document.
    pub cu_seqlens: Vec<i32>,
    /// Number of rows.
    pub rows: usize,
    /// Number of tokens of a row.
    pub sequence_length: usize,
    /// The patches, if the rows are images.
    pub pixels: Option<Pixels>,
}

impl MicroBatch {
    /// Creates a batch without rows, with memory for `rows`.
    pub(crate) fn with_capacity(rows: usize, sequence_length: usize) -> Self {
        let capacity = rows * sequence_length;
        let mut cu_seqlens = Vec::with_capacity(rows + 1);
        cu_seqlens.push(0);
        Self {
            tokens: Vec::with_capacity(capacity),
            targets: Vec::with_capacity(capacity),
            positions: Vec::with_capacity(capacity),
            cu_seqlens,
            rows: 0,
            sequence_length,
            pixels: None,
        }
    }

    /// Number of targets that count.
    pub fn targets_counted(&self) -> usize {
        self.targets.iter().filter(|&&t| t != IGNORE).count()
    }

    /// Length of the longest segment, by which attention kernels size their work.
    pub fn segment_max(&self) -> usize {
        self.cu_seqlens.windows(2).map(|w| (w[1] - w[0]) as usize).max().unwrap_or(0)
    }

    /// Bytes of its vectors.
    pub fn bytes(&self) -> usize {
        let elements = [&self.tokens, &self.targets, &self.positions, &self.cu_seqlens].map(|v| v.capacity());
        let pixels = self.pixels.as_ref().map_or(0, Pixels::elements);
        (elements.iter().sum::<usize>() + pixels) * size_of::<i32>()
    }

    /// Adds a row. `tokens` are its inputs and one more, from position `start` of `corpus`.
    ///
    /// If there are fewer than `sequence_length` + 1 tokens (at least 2), the rest of the row is
    /// padding. It has no targets and belongs to the last segment.
    pub(crate) fn push_row(&mut self, tokens: &[i32], start: u64, corpus: &IndexedTokens, respect_boundaries: bool) {
        let inputs = tokens.len() - 1;
        let base = self.tokens.len();
        let padding = self.sequence_length - inputs;
        self.tokens.extend_from_slice(&tokens[..inputs]);
        self.tokens.extend(std::iter::repeat_n(0, padding));
        self.targets.extend_from_slice(&tokens[1..]);
        corpus.mask_targets(start + 1, &mut self.targets[base..]);
        self.targets.extend(std::iter::repeat_n(IGNORE, padding));
        // The beginning of the segment whose positions are not written yet.
        let mut begin = 0;
        if respect_boundaries {
            let mut document = corpus.document_of(start) + 1;
            let mut last = start;
            while document < corpus.documents() {
                let boundary = corpus.document_start(document);
                document += 1;
                if boundary <= last {
                    continue; // an empty document
                }
                let at = (boundary - start) as usize;
                // The first token of a document is never predicted from another document.
                if at <= inputs {
                    self.targets[base + at - 1] = IGNORE;
                }
                if at >= inputs {
                    break;
                }
                self.cu_seqlens.push((base + at) as i32);
                self.positions.extend(0..(at - begin) as i32);
                begin = at;
                last = boundary;
            }
        }
        self.positions.extend(0..(self.sequence_length - begin) as i32);
        self.rows += 1;
        self.cu_seqlens.push((base + self.sequence_length) as i32);
    }

    /// Adds a row of whole pieces. Each section of `tokens` holds the inputs of a piece and one
    /// token more, its last target; it is the range of `corpus` in the same place of `ranges`. The
    /// rest of the row is padding. If boundaries are respected, each piece and the padding is a
    /// segment, otherwise the row is.
    pub(crate) fn push_pieces(
        &mut self,
        tokens: &[i32],
        sections: &[Range<usize>],
        ranges: &[Range<u64>],
        corpus: &IndexedTokens,
        respect_boundaries: bool,
    ) {
        let end = self.tokens.len() + self.sequence_length;
        for (section, range) in sections.iter().zip(ranges) {
            let piece = &tokens[section.clone()];
            let inputs = piece.len() - 1;
            self.tokens.extend_from_slice(&piece[..inputs]);
            let base = self.targets.len();
            self.targets.extend_from_slice(&piece[1..]);
            corpus.mask_targets(range.start + 1, &mut self.targets[base..]);
            if respect_boundaries {
                self.end_segment();
            }
        }
        self.tokens.resize(end, 0);
        self.targets.resize(end, IGNORE);
        if self.positions.len() < end {
            self.end_segment();
        }
        self.rows += 1;
    }

    /// Ends a segment behind the last input. It begins at the first input without a position.
    fn end_segment(&mut self) {
        let end = self.tokens.len();
        self.positions.extend(0..(end - self.positions.len()) as i32);
        self.cu_seqlens.push(end as i32);
    }

    /// Divides the segments of the last row that are longer than `longest`.
    pub(crate) fn divide_last_row(&mut self, longest: usize) {
        let base = (self.rows - 1) * self.sequence_length;
        let kept = self.cu_seqlens.iter().rposition(|start| *start as usize == base).unwrap_or(0);
        let ends = self.cu_seqlens.split_off(kept + 1);
        let mut begin = base;
        for end in ends {
            while begin < end as usize {
                let part = (end as usize).min(begin + longest);
                self.positions[begin..part].iter_mut().zip(0..).for_each(|(slot, position)| *slot = position);
                self.cu_seqlens.push(part as i32);
                begin = part;
            }
        }
    }
}
