//! T5: the functions of transformers (`scripts/golden/make_t5.py`), files in and out, costs,
//! generation and bad input.

mod common;

use common::{KEY, cpu, golden, logits, loss_and_gradients, read_config, relative_error};
use safetensors::SafeTensors;
use std::collections::BTreeMap;
use trainyard_autograd::{Policy, Store, Tape};
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
fn compare(golden: &Golden, name: &str, model: &Model, gradients: &BTreeMap<trainyard_autograd::ParamId, Vec<f32>>) {
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

#[test]
fn logits_and_every_gradient_agree_with_transformers() {
    let devices = Isa::available().map(|isa| (Device::cpu(isa, 2, None), Policy::Everything));
    for (device, policy) in devices.chain([(cpu(), Policy::Selective)]) {
        for name in NAMES {
            let golden = read_golden(name);
            let (model, mut store) = load(name, &device);
            let targets = Some(golden.ints["targets"].as_slice());
            let batch = pairs(&model, &device, &golden.ints["tokens"], targets, &BOUNDS);
            assert_eq!(batch.counted, 21);
            let error = relative_error(&logits(&model, &store, &device, &batch), &golden.floats["logits"]);
            assert!(error <= TOLERANCE, "{name} on {device:?}: logits differ by {error:e}");
            for eager in [true, false] {
                let (loss, gradients) = loss_and_gradients(&model, &mut store, &device, &batch, policy, eager);
                assert!(relative_error(&[loss], &golden.floats["loss"]) <= TOLERANCE, "{name}: {loss}");
                compare(&golden, name, &model, &gradients);
                store = load(name, &device).1;
            }
        }
    }
}
