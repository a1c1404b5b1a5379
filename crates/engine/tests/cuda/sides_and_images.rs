//! Tests of models with an encoder and of models of images.

use super::*;
use trainyard_model::{IGNORED, ImageSlices, MixedSlices};

const T5: &str = "[model]\nfamily = 't5'\ndim = 32\nlayers = 4\nheads = 4\nffn_dim = 64\nvocab_size = 61\n\
                  activation = 'relu'\n";
const GATED: &str = "[model]\nfamily = 't5'\ndim = 32\nlayers = 4\nheads = 4\nffn_dim = 64\nvocab_size = 61\n\
                     activation = 'gelu_tanh'\n";
const VIT: &str = "[images]\nsize = 12\npatch_size = 4\n[model]\nfamily = 'vit'\ndim = 32\nlayers = 2\nheads = 4\n\
                   ffn_dim = 64\nvocab_size = 5\n";
/// A position for each patch of an image, and one for the class token.
const OF_IMAGE: &str = "training.sequence_length=10";
const MIXED: &str = "augmentation.mixup=0.2";

/// A micro-batch of pairs in which each token is a function of the one before, or of images whose
/// light tells their class.
pub fn batch(trial: &Trial, device: &Device, model: &Model, number: usize) -> Batch {
    let shape = &trial.shape;
    let positions: Vec<i32> = shape.sequences.iter().flat_map(|length| 0..*length as i32).collect();
    let ends = shape.sequences.iter().scan(0, |end, length| {
        *end += *length as i32;
        Some(*end)
    });
    let cu_seqlens: Vec<i32> = std::iter::once(0).chain(ends).collect();
    let Some(patch_len) = shape.patch_len else {
        let vocab = trial.spec.vocab_size as i32;
        let (mut tokens, mut targets) = (Vec::new(), Vec::new());
        for (sequence, length) in shape.sequences.iter().enumerate() {
            let mut token = (number * 31 + sequence * 7 + 3) as i32 % vocab;
            for _ in 0..*length {
                tokens.push(token);
                token = (token * 5 + 11) % vocab;
                targets.push(if sequence % 2 == 0 { IGNORED } else { token });
            }
        }
        return model.batch(device, &BatchSlices::of_text(&tokens, Some(&targets), &positions, &cu_seqlens)).unwrap();
    };
    let classes = trial.spec.vocab_size;
    let class_of = |image: usize| (number + 2 * image) % classes;
    let mut targets = vec![IGNORED; positions.len()];
    let mut patches = Vec::new();
    for (image, length) in shape.sequences.iter().enumerate() {
        targets[cu_seqlens[image] as usize] = class_of(image) as i32;
        let light = class_of(image) as f32 / classes as f32 - 0.4;
        patches.extend((0..(length - 1) * patch_len).map(|i| light + (i * 37 % 11) as f32 / 50.0));
    }
    let second: Vec<i32> = (0..shape.sequences.len()).map(|image| class_of(image + 1) as i32).collect();
    let weight = vec![0.75; second.len()];
    let mixed = shape.mixed.then_some(MixedSlices { second: &second, weight: &weight });
    let images = Some(ImageSlices { patches: &patches, patch_len, mixed });
    let tokens = vec![0; positions.len()];
    let text = BatchSlices::of_text(&tokens, Some(&targets), &positions, &cu_seqlens);
    model.batch(device, &BatchSlices { images, ..text }).unwrap()
}

#[test]
fn emulated_kernels_train_models_with_an_encoder_and_of_images_like_the_cpu() {
    let trials = [
        (T5, &["precision.compute=f32", "model.dropout=0.1"][..], 1e-4),
        (VIT, &["precision.compute=bf16", OF_IMAGE, MIXED, "activation_checkpointing.mode=full"], 2e-2),
        (GATED, &["precision.compute=bf16", "training.accumulation_steps=2"], 2e-2),
        (VIT, &["precision.compute=f32", OF_IMAGE, "model.dropout=0.1", "training.accumulation_steps=2"], 1e-4),
        (GATED, &["precision.compute=f32", "activation_checkpointing.mode=selective"], 1e-4),
        (T5, &["precision.compute=bf16", "activation_checkpointing.mode=full"], 2e-2),
    ];
    let taken = trainyard_testing::cases("settings of kernels", 4, trials.len() as u64) as usize;
    for (model, sets, tolerance) in trials.into_iter().take(taken) {
        let trial = Trial::new(model, sets);
        for outcomes in train_like_the_cpu(&trial, sets, tolerance) {
            assert!(outcomes[3].loss != outcomes[0].loss, "{sets:?}: nothing was learnt");
        }
    }
}

#[test]
fn their_memory_is_what_meta_predicts_and_no_graph_is_made_of_them() {
    for (model, sets) in [
        (T5, &["precision.compute=f32", "activation_checkpointing.mode=full"][..]),
        (GATED, &["precision.compute=bf16", "training.accumulation_steps=2", "model.dropout=0.1"]),
        (VIT, &["precision.compute=bf16", OF_IMAGE, MIXED, "training.accumulation_steps=2"]),
        (VIT, &["precision.compute=f32", OF_IMAGE, "activation_checkpointing.mode=selective"]),
    ] {
        let trial = Trial::new(model, sets);
        // The host reads what the check of images' classes has found, so kernels are emulated.
        let (tested, device) = device(0);
        let mut rank = trial.rank(&device);
        device.pool().reset_peaks();
        for step in 0..3 {
            trial.step(&mut rank, step);
            assert_eq!(tested.problems(), [""; 0], "{sets:?}");
        }
        let settings = RankSettings { computes: Computes::Cuda, ..trial.settings };
        let predicted = predict(trial.model(), &trial.program, &trial.shape, &settings).unwrap().memory;
        let measured = device.pool().usage();
        for purpose in Purpose::ALL {
            assert_eq!(measured.peak(purpose), predicted.peak(purpose), "{purpose} of {sets:?}");
        }
        assert_eq!(measured.peak_total(), predicted.peak_total(), "{sets:?}");

        let why = stretch(&trial.program, &trial.model()).unwrap_err();
        let expected = if model == VIT { "check of the classes" } else { "distances of its batch's sequences" };
        assert!(why.contains(expected), "{why}");
    }
}
