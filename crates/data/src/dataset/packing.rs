//! Best-fit packing: documents are put whole into rows, each into the fullest row that has room.
//!
//! Only a document that is longer than a row is cut. Longer pieces are placed first (best-fit
//! decreasing; Ding et al. 2024, "Fewer truncations improve language modeling"). The plan is made
//! when a corpus is opened, from the lengths of its documents alone.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::Serialize;

/// The pieces of documents that each row holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Packing {
    /// The first piece of each row, and finally the number of pieces.
    rows: Vec<u32>,
    pieces: Vec<Piece>,
    report: PackingReport,
}

/// Consecutive tokens of a document: so many inputs, and one token more as the last target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Piece {
    start: u64,
    inputs: u32,
}

/// Counts of a way to make rows of documents.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct PackingReport {
    /// Number of rows in an epoch.
    pub rows: u64,
    /// Positions of the rows that hold tokens.
    pub tokens: u64,
    /// Positions of the rows that hold none.
    pub padded: u64,
    /// Number of documents.
    pub documents: u64,
    /// Documents that lie in more than one row.
    pub documents_cut: u64,
    /// Documents of fewer than two tokens, which predict nothing.
    pub documents_dropped: u64,
    /// Tokens that no row holds, not even as a target.
    pub tokens_dropped: u64,
}

impl PackingReport {
    /// The share of positions that hold no tokens.
    pub fn padding(&self) -> f64 {
        self.padded as f64 / (self.tokens + self.padded).max(1) as f64
    }
}

impl std::ops::AddAssign for PackingReport {
    fn add_assign(&mut self, other: Self) {
        self.rows += other.rows;
        self.tokens += other.tokens;
        self.padded += other.padded;
        self.documents += other.documents;
        self.documents_cut += other.documents_cut;
        self.documents_dropped += other.documents_dropped;
        self.tokens_dropped += other.tokens_dropped;
    }
}

impl Packing {
    /// Packs documents, given as ranges of the corpus, into rows of `length` inputs.
    pub(super) fn best_fit(documents: impl Iterator<Item = Range<u64>>, length: usize) -> Self {
        let mut report = PackingReport::default();
        let mut pieces = Vec::new();
        for Range { start, end } in documents {
            report.documents += 1;
            if end - start < 2 {
                report.documents_dropped += 1;
                report.tokens_dropped += end - start;
                continue;
            }
            // n tokens make n - 1 predictions; a piece shares its last target with the next piece.
            let (mut at, last) = (start, end - 1);
            report.documents_cut += u64::from(last - start > length as u64);
            while at < last {
                let inputs = (last - at).min(length as u64) as u32;
                pieces.push(Piece { start: at, inputs });
                at += u64::from(inputs);
            }
        }
        // Stable, so that pieces of the same length stay in the order of the text.
        pieces.sort_by_key(|piece| std::cmp::Reverse(piece.inputs));
        // Rows by the room that is left in them.
        let mut open: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        let mut rows = 0u32;
        let mut places = Vec::with_capacity(pieces.len());
        for piece in &pieces {
            let fullest = open.range(piece.inputs..).next().map(|(room, _)| *room);
            let (row, room) = match fullest.and_then(|room| Some((open.get_mut(&room)?, room))) {
                Some((found, room)) => {
                    let row = found.pop().unwrap_or(0);
                    if found.is_empty() {
                        open.remove(&room);
                    }
                    (row, room)
                }
                None => {
                    rows += 1;
                    (rows - 1, length as u32)
                }
            };
            if room > piece.inputs {
                open.entry(room - piece.inputs).or_default().push(row);
            }
            places.push(row);
            report.tokens += u64::from(piece.inputs);
        }
        report.rows = u64::from(rows);
        report.padded = report.rows * length as u64 - report.tokens;
        // Pieces by row; within a row in the order in which they were placed.
        let mut order: Vec<u32> = (0..pieces.len() as u32).collect();
        order.sort_by_key(|piece| places[*piece as usize]);
        let mut starts = vec![0u32; rows as usize + 1];
        places.iter().for_each(|row| starts[*row as usize + 1] += 1);
        for row in 0..rows as usize {
            starts[row + 1] += starts[row];
        }
        let pieces = order.iter().map(|piece| pieces[*piece as usize]).collect();
        Self { rows: starts, pieces, report }
    }

    pub(super) fn report(&self) -> PackingReport {
        self.report
    }

    /// The tokens of each piece of a row: its inputs and its last target.
    pub(super) fn row(&self, row: u64) -> impl Iterator<Item = Range<u64>> + '_ {
        let held = self.rows[row as usize] as usize..self.rows[row as usize + 1] as usize;
        self.pieces[held].iter().map(|piece| piece.start..piece.start + u64::from(piece.inputs) + 1)
    }
}

/// Counts of rows that are cut from the text as it lies, from its first token on.
pub(super) fn back_to_back(documents: impl Iterator<Item = Range<u64>>, length: usize) -> PackingReport {
    let mut report = PackingReport::default();
    let mut end = 0;
    for document in documents {
        report.documents += 1;
        end = document.end;
        if document.end - document.start > 1 {
            let row = |token: u64| token / length as u64;
            report.documents_cut += u64::from(row(document.start) != row(document.end - 2));
        }
    }
    report.rows = super::rows_of(end, length);
    report.tokens = report.rows * length as u64;
    report.tokens_dropped = end.saturating_sub(report.tokens + 1);
    report
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn documents(lengths: &[u64]) -> Vec<Range<u64>> {
        let mut at = 0;
        let of = |length: &u64| {
            at += length;
            at - length..at
        };
        lengths.iter().map(of).collect()
    }

    #[test]
    fn pieces_go_where_they_fit_best() {
        // Predictions: 10 in two pieces of 8 and 2, then 5, 3, 2, none.
        let packing = Packing::best_fit(documents(&[11, 6, 4, 3, 1]).into_iter(), 8);
        let rows: Vec<Vec<Range<u64>>> = (0..packing.report().rows).map(|row| packing.row(row).collect()).collect();
        let alone = 0..9;
        assert_eq!(rows, [vec![alone], vec![11..17, 17..21], vec![8..11, 21..24]]);
        let expected = PackingReport {
            rows: 3,
            tokens: 20,
            padded: 4,
            documents: 5,
            documents_cut: 1,
            documents_dropped: 1,
            tokens_dropped: 1,
        };
        assert_eq!(packing.report(), expected);
    }

    proptest! {
        #[test]
        fn every_prediction_is_in_one_row(lengths in proptest::collection::vec(0u64..60, 0..60), length in 1usize..40) {
            let documents = documents(&lengths);
            let packing = Packing::best_fit(documents.iter().cloned(), length);
            let mut seen: Vec<u64> = Vec::new();
            for row in 0..packing.report().rows {
                let inputs: Vec<u64> = packing.row(row).flat_map(|piece| piece.start..piece.end - 1).collect();
                prop_assert!(!inputs.is_empty() && inputs.len() <= length);
                seen.extend(inputs);
            }
            seen.sort_unstable();
            let expected: Vec<u64> = documents.iter().flat_map(|d| d.start..d.end.saturating_sub(1).max(d.start)).collect();
            prop_assert_eq!(seen, expected);
            let report = packing.report();
            prop_assert_eq!(report.tokens + report.padded, report.rows * length as u64);
        }
    }
}
