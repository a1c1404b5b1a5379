//! Vision Transformers: the functions of transformers (`scripts/golden/make_vit.py`), files in and
//! out, costs, and bad input.

mod common;

use common::{KEY, cpu, cuda, golden, loss_and_gradients, read_config, relative_error};
use safetensors::SafeTensors;
use std::collections::BTreeMap;
use trainyard_autograd::{ParamId, Parameters, Policy, Store, Tape};
use trainyard_model::costs::unit_costs;
use trainyard_model::units::Hits;
use trainyard_model::weights::{ExportOptions, WeightReader, export};
use trainyard_model::{
    Batch, BatchSlices, Forward, IGNORED, ImageSlices, MixedSlices, Model, ModelSpec, Output, TensorSplit, hf, preset,
};
use trainyard_tensor::cpu::Isa;
use trainyard_tensor::ops::cast;
use trainyard_tensor::{DType, Device, Purpose};

const TOLERANCE: f64 = 1e-4;

/// The input of the golden model, and what transformers makes of it.
struct Golden {
    patches: Vec<f32>,
    classes: Vec<i32>,
    second: Vec<i32>,
    weight: Vec<f32>,
    floats: BTreeMap<String, Vec<f32>>,
}

fn read_golden() -> Golden {
    let bytes = std::fs::read(golden("vit").join("golden.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let ints = |name: &str| {
        let data = file.tensor(name).unwrap().data();
        data.chunks_exact(4).map(|b| i32::from_le_bytes(b.try_into().unwrap())).collect()
    };
    let mut floats = BTreeMap::new();
    for (name, view) in file.iter().filter(|(_, view)| view.dtype() == safetensors::Dtype::F32) {
        let values: Vec<f32> = view.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        floats.insert(name.to_owned(), values);
    }
    let [patches, weight] = ["patches", "weight"].map(|name| floats.remove(name).unwrap());
    Golden { patches, classes: ints("labels"), second: ints("second"), weight, floats }
}

fn load(device: &Device) -> (Model, Store) {
    let folder = golden("vit");
    let model = Model::new(read_config(&folder, "config.json")).unwrap();
    let store = WeightReader::open(&folder, &model).unwrap().read_store(&model, device).unwrap();
    (model, store)
}

/// Images of `model` as a batch. `mixed` gives second classes and weights.
fn batch(
    model: &Model,
    device: &Device,
    patches: &[f32],
    classes: &[i32],
    mixed: Option<MixedSlices<'_>>,
) -> trainyard_model::Result<Batch> {
    let image = model.spec().unwrap().image.clone().unwrap();
    let length = image.positions();
    let m = classes.len() * length;
    let positions: Vec<i32> = (0..m).map(|i| (i % length) as i32).collect();
    let targets: Vec<i32> = (0..m).map(|i| if i % length == 0 { classes[i / length] } else { IGNORED }).collect();
    let cu_seqlens: Vec<i32> = (0..=classes.len()).map(|image| (image * length) as i32).collect();
    let images = Some(ImageSlices { patches, patch_len: image.patch_len(), mixed });
    let tokens = vec![0; m];
    let text = BatchSlices::of_text(&tokens, Some(&targets), &positions, &cu_seqlens);
    model.batch(device, &BatchSlices { images, ..text })
}

/// Compares every gradient in the fused form: a bias of the keys shifts all scores of a query
/// alike, so the gradient of it alone is nothing but rounding.
fn compare(golden: &Golden, prefix: &str, model: &Model, gradients: &BTreeMap<ParamId, Vec<f32>>, tolerance: f64) {
    for (id, parameter) in model.parameters() {
        let expected: Vec<f32> = parameter
            .sources
            .iter()
            .flat_map(|source| golden.floats[&format!("{prefix}grad.{}", source.hf_name)].clone())
            .collect();
        let error = relative_error(&gradients[&id], &expected);
        assert!(error <= tolerance, "{prefix}{}: differs by {error:e}", model.parameter_name(id).unwrap());
    }
}

fn logits(model: &Model, store: &Store, device: &Device, batch: &Batch) -> Vec<f32> {
    let mut tape = Tape::new(device, store, Policy::Nothing, KEY);
    let y = model.forward(&mut tape, &mut Forward::evaluation(batch, Output::Logits)).unwrap();
    y.tensor().to_f32_vec().unwrap()
}

#[test]
fn logits_and_every_gradient_agree_with_transformers() {
    let golden = read_golden();
    for (device, policy) in
        Isa::available().map(|isa| (Device::cpu(isa, 2, None), Policy::Everything)).chain([(cpu(), Policy::Selective)])
    {
        check(&golden, &device, policy);
    }
}

/// Compares logits and every gradient with those of transformers.
fn check(golden: &Golden, device: &Device, policy: Policy) {
    let (model, mut store) = load(device);
    let plain = batch(&model, device, &golden.patches, &golden.classes, None).unwrap();
    let error = relative_error(&logits(&model, &store, device, &plain), &golden.floats["logits"]);
    assert!(error <= TOLERANCE, "{device:?}: logits differ by {error:e}");
    for eager in [true, false] {
        let (loss, gradients) = loss_and_gradients(&model, &mut store, device, &plain, policy, eager);
        assert!(relative_error(&[loss], &golden.floats["loss"]) <= TOLERANCE, "{loss}");
        compare(golden, "", &model, &gradients, TOLERANCE);
        store = load(device).1;
    }
}

/// The same of mixed images.
fn check_mixed(golden: &Golden, device: &Device) {
    let (model, mut store) = load(device);
    let mixed = MixedSlices { second: &golden.second, weight: &golden.weight };
    let mixed = batch(&model, device, &golden.patches, &golden.classes, Some(mixed)).unwrap();
    let (loss, gradients) = loss_and_gradients(&model, &mut store, device, &mixed, Policy::Everything, true);
    assert!(relative_error(&[loss], &golden.floats["mixed_loss"]) <= TOLERANCE, "{loss}");
    assert!(relative_error(&[loss], &golden.floats["loss"]) > 0.01, "the second classes count");
    compare(golden, "mixed_", &model, &gradients, TOLERANCE);
}

#[test]
fn the_loss_of_mixed_images_is_that_of_both_classes_by_their_weights() {
    check_mixed(&read_golden(), &cpu());
}

#[test]
fn a_gpu_agrees_with_transformers() {
    let (golden, (tested, device)) = (read_golden(), cuda());
    check(&golden, &device, Policy::Everything);
    check(&golden, &device, Policy::Selective);
    check_mixed(&golden, &device);
    assert_eq!(tested.problems(), [""; 0]);
}

#[test]
fn half_precision_stays_near() {
    let (golden, device) = (read_golden(), cpu());
    for (dtype, tolerance) in [(DType::BF16, 0.03), (DType::F16, 0.004)] {
        let (model, mut store) = load(&device);
        for (id, _) in model.parameters() {
            let value = store.parameter(id).unwrap().value;
            store.insert(id, cast(&value, dtype).unwrap());
        }
        let plain = batch(&model, &device, &golden.patches, &golden.classes, None).unwrap();
        let error = relative_error(&logits(&model, &store, &device, &plain), &golden.floats["logits"]);
        assert!(error <= tolerance && error > tolerance / 1000.0, "{dtype}: logits differ by {error:e}");
        let (_, gradients) = loss_and_gradients(&model, &mut store, &device, &plain, Policy::Everything, true);
        compare(&golden, "", &model, &gradients, 2.0 * tolerance);
    }
}

#[test]
fn an_image_does_not_see_the_other_images_of_its_batch() {
    let (golden, device) = (read_golden(), cpu());
    let (model, store) = load(&device);
    let one = golden.patches.len() / golden.classes.len();
    for image in 0..golden.classes.len() {
        let alone = &golden.patches[image * one..(image + 1) * one];
        let alone = batch(&model, &device, alone, &golden.classes[image..=image], None).unwrap();
        let error = relative_error(
            &logits(&model, &store, &device, &alone),
            &golden.floats["logits"][image * model.vocab_size()..(image + 1) * model.vocab_size()],
        );
        assert!(error <= TOLERANCE, "image {image}: {error:e}");
    }
}

#[test]
fn an_export_is_the_model_again_with_its_names_and_its_preprocessing() {
    let device = cpu();
    let (model, store) = load(&device);
    let mut spec = model.spec().unwrap().clone();
    let text = std::fs::read_to_string(golden("vit").join("preprocessor_config.json")).unwrap();
    let image = spec.image.as_mut().unwrap();
    assert_eq!(hf::read_preprocessor(&text, image).unwrap(), [""; 0]);
    assert_eq!((image.mean.as_slice(), image.std.as_slice()), (&[0.5, 0.4, 0.3][..], &[0.2, 0.25, 0.3][..]));
    assert_eq!(image.labels, ["cat", "dog", "newt", "owl", "yak"]);
    let model = Model::new(spec.clone()).unwrap();

    let folder = tempfile::tempdir().unwrap();
    let options = ExportOptions { dtype: DType::F32, ..ExportOptions::default() };
    export::<trainyard_autograd::AutogradError>(folder.path(), &model, options, |unit, out| {
        let layout = model.layout(unit, 1);
        for index in 0..model.units()[unit].parameters().len() {
            let value = store.parameter(ParamId::new(unit as u32, index as u32))?.value;
            out[layout.range(index)].copy_from_slice(&value.to_f32_vec()?);
        }
        Ok(())
    })
    .unwrap();
    // The same tensors of the same shapes and bytes as transformers wrote.
    let [ours, theirs] = [folder.path().to_owned(), golden("vit")]
        .map(|folder| std::fs::read(folder.join("model.safetensors")).unwrap());
    let [ours, theirs] = [&ours, &theirs].map(|bytes| SafeTensors::deserialize(bytes).unwrap());
    assert_eq!(ours.len(), theirs.len());
    for (name, view) in theirs.iter() {
        let own = ours.tensor(name).unwrap();
        assert_eq!((own.shape(), own.data() == view.data()), (view.shape(), true), "{name}");
    }
    let mut again = read_config(folder.path(), "config.json");
    let text = std::fs::read_to_string(folder.path().join("preprocessor_config.json")).unwrap();
    assert_eq!(hf::read_preprocessor(&text, again.image.as_mut().unwrap()).unwrap(), [""; 0]);
    assert_eq!(again, spec);
    assert!(!folder.path().join("generation_config.json").exists(), "it generates nothing");
}

#[test]
fn flops_are_those_that_the_units_state() {
    let spec = preset("vit-tiny").unwrap();
    // As published for ViT-Ti/16: 1.25 billion multiply-adds forward (Touvron et al. 2021 say 1.3).
    let forward = spec.flops_per_token(197).causal * 197.0 / 6.0;
    assert!((1.2e9..1.3e9).contains(&forward), "{forward}");
    assert_eq!(spec.flops_per_token(197).causal, spec.flops_per_token(197).convention, "every position sees all");
    let small = ModelSpec { layers: 2, vocab_size: 10, ..spec };
    let model = Model::new(small.clone()).unwrap();
    let shape = model.batch_shape(2, 197);
    let costs = unit_costs(&model, &shape, DType::F32, Policy::Everything).unwrap();
    let flops: usize = costs.iter().map(|cost| (cost.forward.flops + cost.backward.flops) as usize).sum();
    let per_token = flops as f64 / shape.tokens() as f64;
    // Patches have no gradient, which the convention counts.
    let expected = small.flops_per_token(197).causal - 2.0 * (768 * 192) as f64;
    assert!((0.98..1.04).contains(&(per_token / expected)), "{per_token} and {expected}");
}

#[test]
fn hits_count_the_rank_of_the_class_among_the_scores() {
    let device = cpu();
    let rows: [[f32; 7]; 4] = [
        [7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0],
        [7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0],
        [1.0; 7],
        [f32::NAN, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0],
    ];
    let scores = device.tensor([4, 7], rows.as_flattened(), Purpose::Activations).unwrap();
    let count = |classes: [i32; 4]| {
        let mut hits = Hits::default();
        hits.add(&scores, &device.tensor([4], &classes, Purpose::Data).unwrap()).unwrap();
        hits
    };
    assert_eq!(count([0, 0, 0, 1]), Hits { counted: 4, top1: 3, top5: 4 }, "NaN is above the fourth's class");
    assert_eq!(count([4, 5, 4, 0]), Hits { counted: 4, top1: 0, top5: 2 }, "equals: the lower class comes first");
    assert_eq!(count([IGNORED, 1, 6, 6]), Hits { counted: 3, top1: 0, top5: 1 });
}

#[test]
fn bad_descriptions_and_batches_are_refused_with_the_reason() {
    let good = read_config(&golden("vit"), "config.json");
    let says = |spec: ModelSpec, expect: &str| {
        let error = Model::new(spec).unwrap_err().to_string();
        assert!(error.contains(expect), "{error:?} does not say {expect:?}");
    };
    let image = good.image.clone().unwrap();
    let with = |change: &dyn Fn(&mut trainyard_model::ImageSpec)| {
        let mut image = image.clone();
        change(&mut image);
        ModelSpec { image: Some(image), ..good.clone() }
    };
    says(with(&|image| image.patch = 5), "do not divide images of 12 pixels");
    says(with(&|image| image.mean = vec![0.5]), "1 means");
    says(with(&|image| image.std[1] = 0.0), "deviations positive");
    says(with(&|image| image.labels.truncate(2)), "2 names for 5 classes");
    says(with(&|image| image.patch = 2), "10 and not 37");
    says(ModelSpec { image: None, ..good.clone() }, "needs the sizes of images");
    says(ModelSpec { image: good.image.clone(), ..ModelSpec::gpt2(97, 32, 2, 4, 16) }, "one of text");
    says(ModelSpec { tie_embeddings: true, ..good.clone() }, "no token table");
    says(ModelSpec { o_bias: false, ..good.clone() }, "biases");
    let split = TensorSplit { rank: 0, ranks: 2, sequence: false };
    let error = Model::split(good.clone(), split).unwrap_err().to_string();
    assert!(error.contains("data or pipeline parallelism"), "{error}");

    let (device, model) = (cpu(), Model::new(good).unwrap());
    let patches = vec![0.0; 9 * 48];
    let fails = |result: trainyard_model::Result<Batch>, expect: &str| {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(expect), "{error:?} does not say {expect:?}");
    };
    fails(batch(&model, &device, &patches[1..], &[0], None), "431 numbers of patches");
    fails(batch(&model, &device, &patches, &[5], None), "target 5");
    let mixed = |second: &'static [i32], weight: &'static [f32]| Some(MixedSlices { second, weight });
    fails(batch(&model, &device, &patches, &[0], mixed(&[5], &[0.5])), "class 5");
    fails(batch(&model, &device, &patches, &[0], mixed(&[1], &[1.5])), "the weight 1.5");
    fails(batch(&model, &device, &patches, &[0], mixed(&[1, 2], &[0.5])), "2 second classes");
    let text = model.rows(&device, 10, &[0; 10], None).unwrap();
    let store = model.initial_store(&device, 1).unwrap();
    let mut tape = Tape::new(&device, &store, Policy::Nothing, KEY);
    let error = model.forward(&mut tape, &mut Forward::evaluation(&text, Output::Logits)).unwrap_err().to_string();
    assert!(error.contains("takes patches"), "{error}");
}

#[test]
fn preprocessing_that_is_not_done_here_is_refused_or_noted() {
    let image = || read_config(&golden("vit"), "config.json").image.unwrap();
    let refused = |text: &str, expect: &str| {
        let error = hf::read_preprocessor(text, &mut image()).unwrap_err().to_string();
        assert!(error.contains(expect), "{error:?} does not say {expect:?}");
    };
    refused("[]", "preprocessor_config.json");
    refused(r#"{"rescale_factor": 0.5}"#, "rescale_factor");
    refused(r#"{"do_rescale": false}"#, "do_rescale");
    refused(r#"{"size": {"height": 384, "width": 384}}"#, "384 pixels");
    refused(r#"{"image_mean": [0.5, 0.5]}"#, "image_mean");
    let mut own = image();
    let notes = hf::read_preprocessor(r#"{"resample": 3, "do_normalize": false, "size": 12}"#, &mut own).unwrap();
    assert!(notes[0].contains("squeezed") && notes[1].contains("bilinear"), "{notes:?}");
    assert_eq!((own.mean, own.std), (vec![0.0; 3], vec![1.0; 3]));
}
