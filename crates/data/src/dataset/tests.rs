//! Tests of packing and sampling: the content of rows, the coverage of epochs, the sensitivity of
//! fingerprints.

use super::*;
use crate::indexed::{IndexedWriter, TokenType};
use proptest::prelude::*;

/// Token files whose token at position p is p, so that a sample shows where it was taken from.
fn counting(folder: &Path, name: &str, documents: &[usize]) -> PathBuf {
    let prefix = folder.join(name);
    let mut writer = IndexedWriter::create(&prefix, TokenType::I32).unwrap();
    let mut next = 0u32;
    for &length in documents {
        let tokens: Vec<u32> = (next..next + length as u32).collect();
        writer.push_document(&tokens).unwrap();
        next += length as u32;
    }
    writer.finish().unwrap();
    prefix
}

fn spec(prefixes: &[PathBuf], sequence_length: usize, sampling: Sampling) -> DatasetSpec {
    DatasetSpec {
        sources: prefixes.iter().map(|p| Source { prefix: p.clone(), weight: 1.0 }).collect(),
        sequence_length,
        vocab_size: 1 << 20,
        respect_document_boundaries: true,
        sampling,
        seed: 5,
        transforms: Transforms::default(),
    }
}

#[test]
fn boundaries_restart_positions_and_hide_targets() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = counting(folder.path(), "a", &[3, 1, 5]);
    let corpus = IndexedTokens::open(&prefix).unwrap();
    let row = |start: u64, length: u64, respect: bool| {
        let mut batch = MicroBatch::with_capacity(1, 8);
        let mut tokens = Vec::new();
        corpus.read_into(start..start + length + 1, 100, &mut tokens).unwrap();
        batch.push_row(&tokens, start, &corpus, respect);
        batch
    };
    let batch = row(0, 8, true);
    assert_eq!(batch.tokens, [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(batch.targets, [1, 2, IGNORE, IGNORE, 5, 6, 7, 8]);
    assert_eq!(batch.positions, [0, 1, 2, 0, 0, 1, 2, 3]);
    assert_eq!(batch.cu_seqlens, [0, 3, 4, 8]);
    assert_eq!((batch.targets_counted(), batch.segment_max()), (6, 4));
    let batch = row(0, 8, false);
    assert_eq!(batch.targets, [1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(batch.positions, [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(batch.cu_seqlens, [0, 8]);
    // A row that ends with a document has no last target. A short row is padded without targets.
    let batch = row(1, 2, true);
    assert_eq!(batch.tokens, [1, 2, 0, 0, 0, 0, 0, 0]);
    assert_eq!(batch.targets, [2, IGNORE, IGNORE, IGNORE, IGNORE, IGNORE, IGNORE, IGNORE]);
    assert_eq!(batch.cu_seqlens, [0, 8]);
}

#[test]
fn random_offsets_reach_both_ends() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = counting(folder.path(), "a", &[20]);
    let dataset = Dataset::open(spec(&[prefix], 15, Sampling::Random)).unwrap();
    let starts: std::collections::BTreeSet<u64> = (0..200).map(|i| dataset.locate(i).1[0].start).collect();
    assert_eq!(starts.into_iter().collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
}

#[test]
fn another_seed_length_or_corpus_has_another_fingerprint() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (counting(folder.path(), "a", &[50, 50]), counting(folder.path(), "b", &[51, 49]));
    let base = spec(std::slice::from_ref(&a), 8, Sampling::Packed);
    let mut prints = vec![Dataset::open(base.clone()).unwrap().fingerprint()];
    assert_eq!(Dataset::open(base.clone()).unwrap().fingerprint(), prints[0]);
    let others = [
        DatasetSpec { seed: 6, ..base.clone() },
        DatasetSpec { sequence_length: 9, ..base.clone() },
        DatasetSpec { sampling: Sampling::Random, ..base.clone() },
        DatasetSpec { sampling: Sampling::InOrder, ..base.clone() },
        DatasetSpec { respect_document_boundaries: false, ..base },
        spec(&[b], 8, Sampling::Packed),
    ];
    prints.extend(others.map(|spec| Dataset::open(spec).unwrap().fingerprint()));
    prints.sort();
    prints.dedup();
    assert_eq!(prints.len(), 7);
}

#[test]
fn a_mixture_deals_each_corpus_in_its_own_order() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (counting(folder.path(), "a", &[1001]), counting(folder.path(), "b", &[101]));
    let mut both = spec(&[a.clone(), b], 10, Sampling::Packed);
    both.sources[0].weight = 3.0;
    let mixed = Dataset::open(both).unwrap();
    let alone = Dataset::open(spec(&[a], 10, Sampling::Packed)).unwrap();
    let of_a: Vec<_> = (0..400).map(|i| mixed.locate(i)).filter(|l| l.0 == 0).map(|l| l.1).collect();
    assert_eq!(of_a.len(), 300);
    assert!(of_a.iter().enumerate().all(|(nth, range)| *range == alone.locate(nth as u64).1));
    assert_eq!(mixed.epochs(0, Position { samples: 400 }), 3.0);
    assert_eq!(mixed.epochs(1, Position { samples: 400 }), 10.0);
}

#[test]
fn samples_in_order_are_the_text_from_its_beginning() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (counting(folder.path(), "a", &[30, 13]), counting(folder.path(), "b", &[22]));
    let dataset = Dataset::open(spec(std::slice::from_ref(&a), 10, Sampling::InOrder)).unwrap();
    let starts = |samples: Range<u64>| samples.map(|i| dataset.locate(i).1[0].start).collect::<Vec<_>>();
    assert_eq!(starts(0..4), [0, 10, 20, 30], "42 inputs are 4 rows and 2 tokens more");
    assert_eq!(starts(4..8), [2, 12, 22, 32], "the second pass ends at the last token");
    assert_eq!(starts(8..12), starts(0..4));
    // In a mixture each corpus goes on where it was.
    let mixed = Dataset::open(spec(&[a, b], 10, Sampling::InOrder)).unwrap();
    let places: Vec<_> = (0..6).map(|i| (mixed.locate(i).0, mixed.locate(i).1[0].start)).collect();
    assert_eq!(places, [(0, 0), (1, 0), (0, 10), (1, 10), (0, 20), (1, 1)]);
}

proptest! {
    /// An epoch covers every token except the slack once as an input, whatever the documents.
    #[test]
    fn an_epoch_packs_every_token_once(documents in proptest::collection::vec(1usize..40, 1..12), length in 1usize..20, epoch in 0u64..3, shuffled: bool) {
        let total: usize = documents.iter().sum();
        prop_assume!(total > length);
        let folder = tempfile::tempdir().unwrap();
        let prefix = counting(folder.path(), "a", &documents);
        let sampling = if shuffled { Sampling::Packed } else { Sampling::InOrder };
        let dataset = Dataset::open(spec(&[prefix], length, sampling)).unwrap();
        let rows = dataset.samples_per_epoch();
        let batch = dataset.micro_batch(epoch * rows, rows as usize).unwrap();
        let mut inputs = batch.tokens.clone();
        inputs.sort_unstable();
        let first = inputs[0];
        prop_assert!((first as usize) <= (total - 1) % length);
        let expected: Vec<i32> = (first..first + (rows as i32) * length as i32).collect();
        prop_assert_eq!(inputs, expected);

        // Segments cover the batch and never cross a row or a document. Targets exist exactly
        // inside documents.
        let mut starts = vec![0i32];
        documents.iter().for_each(|d| starts.push(starts[starts.len() - 1] + *d as i32));
        let is_start = |token: i32| starts.contains(&token);
        prop_assert_eq!(batch.cu_seqlens[0], 0);
        prop_assert_eq!(*batch.cu_seqlens.last().unwrap() as usize, batch.tokens.len());
        for segment in batch.cu_seqlens.windows(2) {
            let (begin, end) = (segment[0] as usize, segment[1] as usize);
            prop_assert!(begin < end);
            prop_assert_eq!(begin / length, (end - 1) / length);
            for at in begin..end {
                prop_assert_eq!(batch.positions[at] as usize, at - begin);
                let next = batch.tokens[at] + 1;
                prop_assert_eq!(batch.targets[at], if is_start(next) { IGNORE } else { next });
                if at > begin {
                    prop_assert!(!is_start(batch.tokens[at]));
                }
            }
            prop_assert!(begin % length == 0 || is_start(batch.tokens[begin]));
        }
    }
}
