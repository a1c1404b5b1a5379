//! T5: the functions of transformers (`scripts/golden/make_t5.py`), files in and out, costs,
//! generation and bad input.

mod common;

use common::{KEY, cpu, cuda, golden, logits, loss_and_gradients, read_config, relative_error};
use safetensors::SafeTensors;
use std::collections::BTreeMap;
use trainyard_autograd::{ParamId, Parameters, Policy, Store, Tape};
use trainyard_model::costs::unit_costs;
use trainyard_model::weights::{ExportOptions, WeightReader, export};
use trainyard_model::{
    Batch, BatchShape, BatchSlices, ContextSplit, Forward, IGNORED, Model, ModelSpec, TensorSplit, hf, preset,
};
use trainyard_tensor::cpu::Isa;
use trainyard_tensor::{DType, Device};

const TOLERANCE: f64 = 1e-4;
const NAMES: [&str; 2] = ["t5", "t5_gated"];
/// The tokens of the two pairs, one sequence behind the other.
const BOUNDS: [i32; 5] = [0, 37, 46, 67, 79];

struct Golden {
    ints: BTreeMap<String, Vec<i32>>,
    floats: BTreeMap<String, Vec<f32>>,
}

fn read_golden(name: &str) -> Golden {
    let bytes = std::fs::read(golden(name).join("golden.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let (mut ints, mut floats) = (BTreeMap::new(), BTreeMap::new());
    for (name, view) in file.iter() {
        let words = view.data().chunks_exact(4).map(|b| b.try_into().unwrap());
        match view.dtype() {
            safetensors::Dtype::F32 => drop(floats.insert(name.to_owned(), words.map(f32::from_le_bytes).collect())),
            _ => drop(ints.insert(name.to_owned(), words.map(i32::from_le_bytes).collect())),
        }
    }
    Golden { ints, floats }
}

fn load(name: &str, device: &Device) -> (Model, Store) {
    let folder = golden(name);
    let model = Model::new(read_config(&folder, "config.json")).unwrap();
    let store = WeightReader::open(&folder, &model).unwrap().read_store(&model, device).unwrap();
    (model, store)
}

/// Tokens and targets between `bounds` of sequences.
fn pairs(model: &Model, device: &Device, tokens: &[i32], targets: Option<&[i32]>, bounds: &[i32]) -> Batch {
    let positions: Vec<i32> = bounds.windows(2).flat_map(|pair| 0..pair[1] - pair[0]).collect();
    model.batch(device, &BatchSlices::of_text(tokens, targets, &positions, bounds)).unwrap()
}

/// The tensors of files of a parameter's gradient.
fn compare(golden: &Golden, name: &str, model: &Model, gradients: &BTreeMap<ParamId, Vec<f32>>) {
    let mut compared = 0;
    for (id, parameter) in model.parameters() {
        let width = parameter.row_elements();
        for source in &parameter.sources {
            let ours = &gradients[&id][source.rows.start * width..source.rows.end * width];
            let ours: Vec<f32> = match source.transposed {
                true => (0..width).flat_map(|column| ours[column..].iter().step_by(width).copied()).collect(),
                false => ours.to_vec(),
            };
            let error = relative_error(&ours, &golden.floats[&format!("grad.{}", source.hf_name)]);
            assert!(error <= TOLERANCE, "{name}: the gradient of {} differs by {error:e}", source.hf_name);
            compared += 1;
        }
    }
    assert_eq!(compared, golden.floats.keys().filter(|key| key.starts_with("grad.")).count());
}

/// Compares logits and every gradient with those of transformers.
fn check(name: &str, device: &Device, policy: Policy) {
    let golden = read_golden(name);
    let (model, mut store) = load(name, device);
    let targets = Some(golden.ints["targets"].as_slice());
    let batch = pairs(&model, device, &golden.ints["tokens"], targets, &BOUNDS);
    assert_eq!(batch.counted, 21);
    let error = relative_error(&logits(&model, &store, device, &batch), &golden.floats["logits"]);
    assert!(error <= TOLERANCE, "{name} on {device:?}: logits differ by {error:e}");
    for eager in [true, false] {
        let (loss, gradients) = loss_and_gradients(&model, &mut store, device, &batch, policy, eager);
        assert!(relative_error(&[loss], &golden.floats["loss"]) <= TOLERANCE, "{name}: {loss}");
        compare(&golden, name, &model, &gradients);
        store = load(name, device).1;
    }
}

#[test]
fn logits_and_every_gradient_agree_with_transformers() {
    let devices = Isa::available().map(|isa| (Device::cpu(isa, 2, None), Policy::Everything));
    for (device, policy) in devices.chain([(cpu(), Policy::Selective)]) {
        for name in NAMES {
            check(name, &device, policy);
        }
    }
}

#[test]
fn a_gpu_agrees_with_transformers_and_says_what_it_says() {
    for (name, policy) in NAMES.into_iter().zip([Policy::Everything, Policy::Selective]) {
        let (tested, device) = cuda();
        check(name, &device, policy);
        let (golden, (model, store)) = (read_golden(name), load(name, &device));
        assert_eq!(greedy(&model, &store, &device, &golden.ints["tokens"][..37], 12), golden.ints["greedy"], "{name}");
        assert_eq!(tested.problems(), [""; 0], "{name}");
    }
}

/// The first tokens that a model says after its encoder read `read`, by the most likely.
fn greedy(model: &Model, store: &Store, device: &Device, read: &[i32], count: usize) -> Vec<i32> {
    let mut cache = model.cache(device, count, DType::F32).unwrap();
    let mut said = vec![0];
    for draw in 0..count as i32 {
        let (tokens, positions, bounds) = match draw {
            0 => {
                let length = read.len() as i32;
                ([read, &[0]].concat(), (0..length).chain([0]).collect(), vec![0, length, length + 1])
            }
            _ => (vec![said[draw as usize]], vec![draw], vec![0, 1]),
        };
        let slices = BatchSlices::of_text(&tokens, None, &positions, &bounds);
        let batch = model.batch(device, &slices).unwrap();
        let mut tape = Tape::new(device, store, Policy::Nothing, KEY);
        let last = model.forward(&mut tape, &mut Forward::generation(&batch, &mut cache)).unwrap();
        let last = last.tensor().to_f32_vec().unwrap();
        said.push((0..last.len()).max_by(|a, b| last[*a].total_cmp(&last[*b])).unwrap() as i32);
    }
    said.split_off(1)
}

#[test]
fn a_decoder_that_goes_on_says_what_transformers_says() {
    let device = cpu();
    for name in NAMES {
        let golden = read_golden(name);
        let (model, store) = load(name, &device);
        let read = &golden.ints["tokens"][..37];
        assert_eq!(greedy(&model, &store, &device, read, 12), golden.ints["greedy"], "{name}");
    }
}

#[test]
fn a_decoder_without_an_encoder_that_ran_is_refused() {
    let device = cpu();
    let (model, store) = load("t5", &device);
    let batch = model.batch(&device, &BatchSlices::of_text(&[0], None, &[0], &[0, 1])).unwrap();
    let mut cache = model.cache(&device, 4, DType::F32).unwrap();
    let mut tape = Tape::new(&device, &store, Policy::Nothing, KEY);
    let error = model.forward(&mut tape, &mut Forward::generation(&batch, &mut cache)).unwrap_err();
    assert!(error.to_string().contains("before its encoder has run"), "{error}");
}

#[test]
fn an_export_is_the_model_again_with_its_names() {
    let device = cpu();
    for name in NAMES {
        let (model, store) = load(name, &device);
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
        let [ours, theirs] = [folder.path().to_owned(), golden(name)].map(|folder| {
            let bytes = std::fs::read(folder.join("model.safetensors")).unwrap();
            let file = SafeTensors::deserialize(&bytes).unwrap();
            let of = |(name, view): (&str, safetensors::tensor::TensorView<'_>)| {
                (name.to_owned(), (view.shape().to_vec(), view.data().to_vec()))
            };
            file.iter().map(of).collect::<BTreeMap<_, _>>()
        });
        assert_eq!(ours.keys().collect::<Vec<_>>(), theirs.keys().collect::<Vec<_>>(), "{name}");
        assert!(ours == theirs, "{name}: other values");
        assert_eq!(read_config(folder.path(), "config.json"), read_config(&golden(name), "config.json"));
    }
}

#[test]
fn kernels_cost_what_the_meta_device_counts_and_flops_are_those_of_its_products() {
    for name in NAMES {
        let (model, _) = load(name, &cpu());
        let shape = BatchShape::pairs(2, 24, 8);
        let costs = unit_costs(&model, &shape, DType::F32, Policy::Everything).unwrap();
        let all: u64 = costs.iter().map(|cost| cost.forward.flops + cost.backward.flops).sum();
        // The convention leaves out what is no product, and counts attention of the decoder as if
        // it saw all of its sequence: the model is tiny, so both show.
        let spec = model.spec().unwrap();
        let ours = spec.flops_per_token(32).convention * 64.0;
        assert!((0.7..1.1).contains(&(ours / all as f64)), "{name}: {ours:e} of {all:e}");
        assert_eq!(model.batch_shape(3, 626), BatchShape::pairs(3, 512, 114));
    }
}

#[test]
fn what_is_no_pair_of_sequences_is_refused() {
    let device = cpu();
    let (model, _) = load("t5", &device);
    let refuse = |targets: &[i32], bounds: &[i32], expect: &str| {
        let tokens: Vec<i32> = vec![3; targets.len()];
        let positions: Vec<i32> = bounds.windows(2).flat_map(|pair| 0..pair[1] - pair[0]).collect();
        let slices = BatchSlices::of_text(&tokens, Some(targets), &positions, bounds);
        let error = model.batch(&device, &slices).unwrap_err().to_string();
        assert!(error.contains(expect), "{error:?} does not say {expect:?}");
    };
    refuse(&[IGNORED; 6], &[0, 2, 4, 6], "takes pairs");
    refuse(&[4, IGNORED, 4, 4], &[0, 2, 4], "token of the encoder");
    refuse(&[IGNORED, IGNORED, 99, 4], &[0, 2, 4], "target 99");
    for split in [
        Model::split(model.spec().unwrap().clone(), TensorSplit { rank: 0, ranks: 2, sequence: false }),
        Model::split_over(
            model.spec().unwrap().clone(),
            TensorSplit::WHOLE,
            ContextSplit { rank: 0, ranks: 2, ..ContextSplit::WHOLE },
            trainyard_model::ExpertSplit::WHOLE,
        ),
    ] {
        let error = split.unwrap_err().to_string();
        assert!(error.contains("family t5 is not divided"), "{error}");
    }
}

#[test]
fn what_a_t5_does_not_have_is_refused() {
    let good = read_config(&golden("t5"), "config.json");
    let encoder = good.encoder.unwrap();
    for (spec, expect) in [
        (ModelSpec { encoder: None, ..good.clone() }, "family t5 needs one"),
        (ModelSpec { mlp_bias: true, ..good.clone() }, "no biases"),
        (ModelSpec { kv_heads: 2, ..good.clone() }, "keys and values for each head"),
        (ModelSpec { attention_scalar: None, ..good.clone() }, "does not divide scores"),
        (ModelSpec { mup_base_dim: Some(16), tie_embeddings: false, ..good.clone() }, "by its own rule"),
        (ModelSpec { sliding_window: Some(4), ..good.clone() }, "has none"),
        (
            ModelSpec { encoder: Some(trainyard_model::EncoderSpec { layers: 5, ..encoder }), ..good.clone() },
            "both sides need one",
        ),
        (
            ModelSpec { encoder: Some(trainyard_model::EncoderSpec { buckets: 6, ..encoder }), ..good.clone() },
            "multiple of 4",
        ),
        (
            ModelSpec { encoder: Some(trainyard_model::EncoderSpec { max_distance: 8, ..encoder }), ..good.clone() },
            "above half",
        ),
        (ModelSpec { encoder: Some(encoder), ..preset("llama-1b").unwrap() }, "use t5"),
    ] {
        let error = spec.validate().unwrap_err().to_string();
        assert!(error.contains(expect), "{error:?} does not say {expect:?}");
    }
    for (text, expect) in [
        (r#"{"model_type": "t5", "feed_forward_proj": "gated-relu"}"#, "supported are relu"),
        (r#"{"model_type": "t5", "relative_attention_num_buckets": 7}"#, "multiple of 4"),
    ] {
        let error = hf::from_config_json(text).unwrap_err().to_string();
        assert!(error.contains(expect), "{error:?} does not say {expect:?}");
    }
    // Of transformers 5, which calls every model tied.
    let new = r#"{"model_type": "t5", "scale_decoder_outputs": false, "tie_word_embeddings": true}"#;
    assert!(!hf::from_config_json(new).unwrap().spec.tie_embeddings);
}
