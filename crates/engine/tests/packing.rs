//! Documents that share a row by best fit have the loss of documents that stand alone.

use trainyard_autograd::{Policy, RandomKey, Tape};
use trainyard_data::indexed::TokenType;
use trainyard_data::{Dataset, DatasetSpec, IndexedWriter, Sampling, Source, Transforms};
use trainyard_model::{BatchSlices, Forward, Model, ModelSpec};
use trainyard_tensor::Device;
use trainyard_tensor::cpu::Isa;

const VOCABULARY: usize = 53;
const LENGTH: usize = 64;

#[test]
fn packed_documents_have_the_loss_of_documents_alone() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = folder.path().join("tokens");
    let mut writer = IndexedWriter::create(&prefix, TokenType::U16).unwrap();
    let documents: Vec<Vec<u32>> =
        (0..30u32).map(|d| (0..2 + d * 17 % 60).map(|i| (d * 13 + i * i * 7) % VOCABULARY as u32).collect()).collect();
    documents.iter().for_each(|document| writer.push_document(document).unwrap());
    writer.finish().unwrap();
    let dataset = Dataset::open(DatasetSpec {
        sources: vec![Source { prefix, weight: 1.0 }],
        sequence_length: LENGTH,
        vocab_size: VOCABULARY as u32,
        respect_document_boundaries: true,
        sampling: Sampling::BestFit,
        seed: 1,
        transforms: Transforms::default(),
    })
    .unwrap();
    let device = Device::cpu(Isa::detect(), 1, None);
    for spec in [ModelSpec::llama(VOCABULARY, 24, 2, 4, 40, LENGTH), ModelSpec::gpt2(VOCABULARY, 24, 2, 4, LENGTH)] {
        let model = Model::new(spec).unwrap();
        let store = model.initial_store(&device, 1).unwrap();
        // The sum of the losses of all targets that count.
        let loss = |slices: &BatchSlices<'_>| {
            let batch = model.batch(&device, slices).unwrap();
            let key = RandomKey { seed: 1, step: 0, site: 0 };
            let mut tape = Tape::new(&device, &store, Policy::Nothing, key);
            let loss = model.forward(&mut tape, &mut Forward::training(&batch, 1.0)).unwrap();
            (f64::from(loss.tensor().to_scalar().unwrap()), batch.counted)
        };
        let rows = dataset.samples_per_epoch() as usize;
        let packed = dataset.micro_batch(0, rows).unwrap();
        assert!(
            3 * rows < 2 * documents.len() && packed.targets_counted() < rows * LENGTH,
            "rows are shared and padded"
        );
        let (together, counted) =
            loss(&BatchSlices::of_text(&packed.tokens, Some(&packed.targets), &packed.positions, &packed.cu_seqlens));
        let (mut alone, mut counted_alone) = (0.0, 0);
        for document in &documents {
            let tokens: Vec<i32> = document.iter().map(|token| *token as i32).collect();
            let inputs = tokens.len() - 1;
            let (loss, counted) = loss(&BatchSlices::of_text(
                &tokens[..inputs],
                Some(&tokens[1..]),
                &(0..inputs as i32).collect::<Vec<_>>(),
                &[0, inputs as i32],
            ));
            (alone, counted_alone) = (alone + loss, counted_alone + counted);
        }
        assert_eq!(counted, counted_alone);
        let error = (together - alone).abs() / alone;
        assert!(error < 1e-6, "{together} packed, {alone} alone: {error:e}");
    }
}
