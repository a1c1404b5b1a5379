//! The samples of a step depend on the seed and the step alone: not on ranks, workers, or the place
//! where a loader starts.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use proptest::prelude::*;
use trainyard_data::indexed::TokenType;
use trainyard_data::{
    Dataset, DatasetSpec, FillInTheMiddle, IGNORE, IndexedWriter, LengthCurriculum, Loader, LoaderConfig, MicroBatch,
    Position, RoundSteps, Rounds, Sampling, Source, Transforms,
};
use xxhash_rust::xxh3::Xxh3;

const VOCABULARY: u32 = 1000;
const LENGTH: usize = 32;
const EOS: u32 = 900;
const PREFIX: u32 = 901;
const MIDDLE: u32 = 902;
const SUFFIX: u32 = 903;

fn tokens(folder: &Path, name: &str, lengths: impl Iterator<Item = u32>) -> PathBuf {
    let prefix = folder.join(name);
    let mut writer = IndexedWriter::create(&prefix, TokenType::U16).unwrap();
    for (document, length) in lengths.enumerate() {
        let mut tokens: Vec<u32> = (0..length).map(|i| (document as u32 * 37 + i) % 900).collect();
        tokens.push(EOS);
        writer.push_document(&tokens).unwrap();
    }
    writer.finish().unwrap();
    prefix
}

fn transforms() -> Transforms {
    Transforms {
        fill_in_the_middle: Some(FillInTheMiddle {
            rate: 0.5,
            spm_rate: 0.5,
            prefix: PREFIX,
            middle: MIDDLE,
            suffix: SUFFIX,
            eos: Some(EOS),
        }),
        noise_rate: 0.05,
        curriculum: Some(LengthCurriculum { start: 8, samples: 300 }),
        span_corruption: None,
    }
}

fn spec(prefixes: &[PathBuf], sampling: Sampling, transforms: Transforms) -> DatasetSpec {
    DatasetSpec {
        sources: prefixes.iter().map(|prefix| Source { prefix: prefix.clone(), weight: 1.0 }).collect(),
        sequence_length: LENGTH,
        vocab_size: VOCABULARY,
        respect_document_boundaries: true,
        sampling,
        seed: 3,
        transforms,
    }
}

const SAMPLINGS: [Sampling; 4] = [Sampling::Packed, Sampling::InOrder, Sampling::Random, Sampling::BestFit];

/// The hash of the rows of each step, from step `first` on.
fn hashes(dataset: &Arc<Dataset>, world: usize, workers: usize, first: u64, steps: usize) -> Vec<u64> {
    const GLOBAL: usize = 24;
    let mut rows = vec![Xxh3::new(); steps];
    for rank in 0..world {
        let accumulation_steps = GLOBAL / world;
        let config = LoaderConfig { workers, rank, world, accumulation_steps, ..LoaderConfig::new(1) };
        let start = Position { samples: first * GLOBAL as u64 };
        let mut loader = Loader::new(Arc::clone(dataset), config, start).unwrap();
        for step in &mut rows {
            for _ in 0..accumulation_steps {
                let MicroBatch { tokens, targets, positions, cu_seqlens, .. } = loader.next().unwrap();
                for numbers in [tokens, targets, positions, cu_seqlens] {
                    numbers.iter().for_each(|number| step.update(&number.to_le_bytes()));
                }
            }
        }
    }
    rows.iter().map(Xxh3::digest).collect()
}

#[test]
fn ranks_and_workers_see_the_same_samples() {
    let folder = tempfile::tempdir().unwrap();
    let prefixes = [
        tokens(folder.path(), "a", (0..60).map(|i| 5 + i * 7 % 90)),
        tokens(folder.path(), "b", (0..40).map(|i| 20 + i % 30)),
    ];
    for sampling in SAMPLINGS {
        let dataset = Arc::new(Dataset::open(spec(&prefixes, sampling, transforms())).unwrap());
        let expected = hashes(&dataset, 1, 1, 0, 12);
        for world in [1, 2, 3, 8] {
            for workers in [1, 4] {
                assert!(hashes(&dataset, world, workers, 0, 12) == expected, "{sampling:?} {world} {workers}");
            }
        }
        // Ending after any step and going on with another number of ranks changes nothing.
        for step in [1, 7] {
            assert!(hashes(&dataset, 3, 4, step, 5) == expected[step as usize..][..5], "{sampling:?}");
        }
        let far = hashes(&dataset, 1, 1, 10_000_000, 2);
        assert!(hashes(&dataset, 8, 4, 10_000_000, 2) == far && far[0] != expected[0], "{sampling:?}");
    }
}

/// The rows of a micro-batch, whose length in tokens is [`LENGTH`].
fn rows_of(batch: &MicroBatch) -> Vec<[Vec<i32>; 2]> {
    let pairs = batch.tokens.chunks(LENGTH).zip(batch.targets.chunks(LENGTH));
    pairs.map(|(tokens, targets)| [tokens.to_vec(), targets.to_vec()]).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// Whatever the numbers of the replicas, the steps of rounds take the samples one after the
    /// other, each once, in the order of ranks. Loaders that begin at any step go on with the same.
    #[test]
    fn rounds_of_different_numbers_deal_each_sample_once_and_in_order(
        numbers in prop::collection::vec(1u64..6, 1..5),
        shards in 1usize..3,
        micro in 1usize..3,
        accumulation_steps in 1usize..3,
        workers in 0usize..3,
        sampling in prop::sample::select(SAMPLINGS.to_vec()),
        stop in 0u64..12,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let prefix = tokens(folder.path(), "a", (0..60).map(|i| 5 + i * 7 % 90));
        let dataset = Arc::new(Dataset::open(spec(&[prefix], sampling, transforms())).unwrap());
        let steps = RoundSteps(numbers);
        let world = shards * steps.replicas();
        let config = LoaderConfig { workers, world, accumulation_steps, ..LoaderConfig::new(micro) };
        let begin = |done: u64, position: Position| -> Vec<Loader> {
            let loader = |rank| {
                let rounds = Rounds { steps: steps.clone(), done };
                Loader::in_rounds(Arc::clone(&dataset), LoaderConfig { rank, ..config }, rounds, position).unwrap()
            };
            (0..world).map(loader).collect()
        };
        let start = Position { samples: 5 };
        let (mut loaders, mut rows, mut position) = (begin(0, start), Vec::new(), start);
        for step in 0..3 * steps.longest() {
            let in_round = step % steps.longest();
            if step == stop {
                loaders = begin(in_round, position);
            }
            for rank in (0..world).filter(|rank| steps.takes_part(rank / shards, in_round)) {
                prop_assert_eq!(loaders[rank].position(), position);
                for _ in 0..accumulation_steps {
                    rows.extend(rows_of(&loaders[rank].next().unwrap()));
                }
            }
            position.samples += (micro * accumulation_steps * shards * steps.taking_part(in_round)) as u64;
        }
        prop_assert_eq!(position.samples - start.samples, rows.len() as u64);
        prop_assert_eq!(rows.len() as u64, 3 * steps.parts() * (micro * accumulation_steps * shards) as u64);
        let one = LoaderConfig { workers: 0, ..LoaderConfig::new(rows.len()) };
        let all = Loader::new(Arc::clone(&dataset), one, start).unwrap().next().unwrap();
        prop_assert_eq!(rows, rows_of(&all));
    }
}

#[test]
fn rounds_that_do_not_fit_the_ranks_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = tokens(folder.path(), "a", 5..20);
    let dataset = Arc::new(Dataset::open(spec(&[prefix], Sampling::Packed, Transforms::default())).unwrap());
    for (numbers, world) in [(vec![], 1), (vec![2, 1], 3), (vec![2, 0], 2)] {
        let config = LoaderConfig { world, ..LoaderConfig::new(1) };
        let rounds = Rounds { steps: RoundSteps(numbers), done: 0 };
        let error = Loader::in_rounds(Arc::clone(&dataset), config, rounds, Position::default()).unwrap_err();
        assert!(error.to_string().contains("at least 1"), "{error}");
    }
}

#[test]
fn best_fit_gives_each_prediction_once_an_epoch() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = tokens(folder.path(), "a", (0..80).map(|i| 1 + i * 11 % 100));
    let dataset = Dataset::open(spec(&[prefix], Sampling::BestFit, Transforms::default())).unwrap();
    let corpus = &dataset.corpora()[0];
    let mut predicted: Vec<i32> = Vec::new();
    for epoch in 0..2 {
        let rows = dataset.samples_per_epoch();
        for sample in epoch * rows..(epoch + 1) * rows {
            let batch = dataset.micro_batch(sample, 1).unwrap();
            let targets = batch.targets.iter().filter(|target| **target != IGNORE);
            predicted.extend(targets);
            // Every segment but the padding is a piece of a document from its own beginning.
            let segments = batch.cu_seqlens.windows(2).map(|pair| pair[0] as usize..pair[1] as usize);
            for segment in segments {
                assert!(batch.positions[segment.clone()].iter().copied().eq(0..segment.len() as i32));
            }
        }
        let mut expected = Vec::new();
        for document in 0..corpus.documents() {
            let range = corpus.document(document);
            corpus.read_into(range.start + 1..range.end, VOCABULARY, &mut expected).unwrap();
        }
        predicted.sort_unstable();
        expected.sort_unstable();
        assert!(predicted == expected, "epoch {epoch}");
        predicted.clear();
    }
}

#[test]
fn a_middle_is_filled_in_at_the_rate_that_is_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = tokens(folder.path(), "a", std::iter::repeat_n(31, 2000));
    let only_fill = Transforms { noise_rate: 0.0, curriculum: None, ..transforms() };
    let plain = Dataset::open(spec(std::slice::from_ref(&prefix), Sampling::BestFit, Transforms::default())).unwrap();
    let filled = Dataset::open(spec(&[prefix], Sampling::BestFit, only_fill)).unwrap();
    let (mut changed, mut suffix_first) = (0, 0);
    for sample in 0..2000 {
        let (before, after) = (plain.micro_batch(sample, 1).unwrap(), filled.micro_batch(sample, 1).unwrap());
        if before == after {
            continue;
        }
        changed += 1;
        // A row holds one document of 31 tokens and its end; the tokens with the last target.
        let row = |batch: &MicroBatch| [&batch.tokens[..1], &batch.targets[..31]].concat();
        let (before, after) = (row(&before), row(&after));
        assert_eq!(after[31], EOS as i32, "the end stays at the end");
        let place = |token: u32| after.iter().position(|found| *found == token as i32);
        // A middle of fewer than three tokens leaves less than all three marks.
        let (Some(0), Some(suffix), Some(middle)) = (place(PREFIX), place(SUFFIX), place(MIDDLE)) else { continue };
        let after = &after[..31];
        let (prefix_part, middle_part, suffix_part) = match suffix {
            1 if middle > 1 && after[middle + 1..].first() == before.first() => {
                suffix_first += 1;
                // Prefix and middle follow each other in both orders.
                (&after[middle + 1..], &[][..], &after[2..middle])
            }
            _ => (&after[1..suffix], &after[middle + 1..], &after[suffix + 1..middle]),
        };
        let together = [prefix_part, middle_part].concat();
        assert_eq!(together, before[..together.len()]);
        assert_eq!(suffix_part, &before[31 - suffix_part.len()..31]);
    }
    // 2,000 draws at 0.5: four standard deviations are 90.
    assert!((900..1100).contains(&changed), "{changed}");
    assert!((330..600).contains(&suffix_first), "{suffix_first}");
}

#[test]
fn a_curriculum_divides_segments_and_changes_no_token() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = tokens(folder.path(), "a", (0..60).map(|i| 5 + i * 7 % 90));
    let growing = Transforms { curriculum: Some(LengthCurriculum { start: 8, samples: 100 }), ..Transforms::default() };
    let plain = Dataset::open(spec(std::slice::from_ref(&prefix), Sampling::Packed, Transforms::default())).unwrap();
    let growing = Dataset::open(spec(&[prefix], Sampling::Packed, growing)).unwrap();
    for (sample, longest) in [(0, 8), (50, 16), (99, 24), (100, 32)] {
        let (before, after) = (plain.micro_batch(sample, 3).unwrap(), growing.micro_batch(sample, 1).unwrap());
        assert_eq!((&after.tokens[..], &after.targets[..]), (&before.tokens[..LENGTH], &before.targets[..LENGTH]));
        assert!(after.segment_max() <= longest, "{sample}");
        assert_eq!(*after.cu_seqlens.last().unwrap(), LENGTH as i32);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]
    #[test]
    fn noise_changes_inputs_alone_at_its_rate(sample in 0u64..1_000_000) {
        let folder = tempfile::tempdir().unwrap();
        let prefix = tokens(folder.path(), "a", (0..60).map(|i| 5 + i * 7 % 90));
        let noisy = Transforms { noise_rate: 0.3, ..Transforms::default() };
        let plain = Dataset::open(spec(std::slice::from_ref(&prefix), Sampling::Packed, Transforms::default())).unwrap();
        let noisy = Dataset::open(spec(&[prefix], Sampling::Packed, noisy)).unwrap();
        let (before, after) = (plain.micro_batch(sample, 40).unwrap(), noisy.micro_batch(sample, 40).unwrap());
        prop_assert_eq!(&before.targets, &after.targets);
        let changed = before.tokens.iter().zip(&after.tokens).filter(|(a, b)| a != b).count();
        // 1,280 draws at 0.3: five standard deviations are 82.
        prop_assert!((300..470).contains(&changed), "{}", changed);
    }
}
