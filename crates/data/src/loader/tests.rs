//! Tests: the batches do not depend on workers, world or restarts; errors come in their place;
//! threads end.

use super::*;
use crate::dataset::{DatasetSpec, Sampling, Source, Transforms};
use crate::indexed::{IndexedWriter, TokenType};

fn dataset(folder: &std::path::Path, last_token: u32) -> Arc<Dataset> {
    let prefix = folder.join("tokens");
    let mut writer = IndexedWriter::create(&prefix, TokenType::U16).unwrap();
    for document in 0..40u32 {
        let tokens: Vec<u32> = (0..25).map(|i| (document * 25 + i) % 1000).collect();
        writer.push_document(&tokens).unwrap();
    }
    writer.push_document(&[last_token]).unwrap();
    writer.finish().unwrap();
    let spec = DatasetSpec {
        sources: vec![Source { prefix, weight: 1.0 }],
        sequence_length: 10,
        vocab_size: 1000,
        respect_document_boundaries: true,
        sampling: Sampling::Packed,
        seed: 11,
        transforms: Transforms::default(),
    };
    Arc::new(Dataset::open(spec).unwrap())
}

fn batches(dataset: &Arc<Dataset>, config: LoaderConfig, position: Position, n: usize) -> Vec<MicroBatch> {
    let mut loader = Loader::new(Arc::clone(dataset), config, position).unwrap();
    (0..n).map(|_| loader.next().unwrap()).collect()
}

#[test]
fn workers_and_prefetch_change_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let dataset = dataset(folder.path(), 0);
    let base = LoaderConfig::new(3);
    let expected = batches(&dataset, LoaderConfig { workers: 0, ..base }, Position::default(), 50);
    for (workers, prefetch) in [(1, 0), (1, 4), (2, 3), (5, 1)] {
        let config = LoaderConfig { workers, prefetch, ..base };
        assert_eq!(batches(&dataset, config, Position::default(), 50), expected);
    }
}

/// A worker ends by itself when its queue takes all batches up to the first that cannot be made.
#[test]
fn prefetch_decides_how_many_batches_are_made_ahead() {
    let folder = tempfile::tempdir().unwrap();
    let (base, last) = (dataset(folder.path(), 9999), LoaderConfig::new(10));
    // 100 rows in order, ten a batch; the last row has a token that no model has.
    let spec = DatasetSpec { sampling: Sampling::InOrder, ..base.spec().clone() };
    let dataset = Arc::new(Dataset::open(spec).unwrap());
    let loader = |prefetch| Loader::new(Arc::clone(&dataset), LoaderConfig { prefetch, ..last }, Position::default());
    let enough = loader(10).unwrap();
    let began = Instant::now();
    while !enough.workers[0].is_finished() {
        assert!(began.elapsed() < Duration::from_secs(60), "ten batches are not made ahead");
        thread::yield_now();
    }
    let too_few = loader(9).unwrap();
    thread::yield_now();
    assert!(!too_few.workers[0].is_finished(), "there is no room for the tenth");
}

#[test]
fn any_world_deals_the_same_samples_in_a_step() {
    let folder = tempfile::tempdir().unwrap();
    let dataset = dataset(folder.path(), 0);
    // Several divisions of a step of 12 rows into world x accumulation x micro-batch.
    let step_rows = |world: usize, micro_batch_size: usize| -> Vec<Vec<i32>> {
        let accumulation_steps = 12 / world / micro_batch_size;
        let mut rows = Vec::new();
        for rank in 0..world {
            let config = LoaderConfig { rank, world, accumulation_steps, ..LoaderConfig::new(micro_batch_size) };
            let position = Position { samples: 24 };
            // The second of two steps.
            for batch in batches(&dataset, config, position, 2 * accumulation_steps).split_off(accumulation_steps) {
                rows.extend(batch.tokens.chunks(10).map(<[i32]>::to_vec));
            }
        }
        rows
    };
    let expected = step_rows(1, 12);
    for (world, micro_batch_size) in [(1, 3), (2, 3), (3, 2), (4, 3), (12, 1)] {
        // In the same order too: a rank's micro-batches follow those of the previous ranks.
        assert_eq!(step_rows(world, micro_batch_size), expected, "{world} ranks of {micro_batch_size}");
    }
}

#[test]
fn resuming_equals_never_having_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let dataset = dataset(folder.path(), 0);
    for rank in 0..2 {
        let config = LoaderConfig { rank, world: 2, workers: 2, ..LoaderConfig::new(4) };
        let whole = batches(&dataset, config, Position::default(), 60);
        for stop in [1, 7, 31] {
            let mut loader = Loader::new(Arc::clone(&dataset), config, Position::default()).unwrap();
            (0..stop).for_each(|_| drop(loader.next().unwrap()));
            let position: Position = serde_json::from_str(&serde_json::to_string(&loader.position()).unwrap()).unwrap();
            assert_eq!(batches(&dataset, config, position, 60 - stop), whole[stop..]);
        }
    }
}

#[test]
fn an_error_comes_once_and_in_order() {
    let folder = tempfile::tempdir().unwrap();
    // The last token, outside the vocabulary, lies in the last of the 100 rows as its final target.
    let dataset = dataset(folder.path(), 5000);
    let bad = (0..100).find(|&i| dataset.micro_batch(i, 1).is_err()).unwrap();
    for workers in [0, 1, 3] {
        let config = LoaderConfig { workers, ..LoaderConfig::new(1) };
        let mut loader = Loader::new(Arc::clone(&dataset), config, Position::default()).unwrap();
        for _ in 0..bad {
            loader.next().unwrap();
        }
        let error = loader.next().unwrap_err();
        assert!(matches!(error, DataError::Vocabulary { .. }), "{error}");
        assert!(error.to_string().contains("5000"), "{error}");
        assert!(matches!(loader.next(), Err(DataError::Stopped)));
        assert_eq!(loader.position().samples, bad);
    }
}

#[test]
fn dropping_a_full_loader_ends_its_threads() {
    let folder = tempfile::tempdir().unwrap();
    let dataset = dataset(folder.path(), 0);
    for _ in 0..20 {
        let config = LoaderConfig { workers: 3, prefetch: 2, ..LoaderConfig::new(2) };
        drop(Loader::new(Arc::clone(&dataset), config, Position::default()).unwrap());
    }
    assert_eq!(Arc::strong_count(&dataset), 1, "a thread still holds the dataset");
}
