//! Value residuals: the functions of PyTorch (`scripts/golden/make_value_residual.py`), the model
//! without them, costs and bad input.

mod common;

use common::{KEY, cpu, cuda, initialised, logits, loss_and_gradients, relative_error, tokens};
use serde_json::Value;
use std::collections::BTreeMap;
use trainyard_autograd::{ParamId, Policy, Store, Tape};
use trainyard_model::costs::{unit_costs, unit_costs_on};
use trainyard_model::families::{FAMILIES, Sizes};
use trainyard_model::{
    Batch, BatchShape, BatchSlices, ContextExchange, ContextSplit, ExpertSplit, Forward, Model, ModelSpec, Output,
    TensorSplit, hf,
};
use trainyard_tensor::cpu::Isa;
use trainyard_tensor::{DType, Device, Purpose};

const TOLERANCE: f64 = 1e-4;
const TOKENS: [i32; 13] = [3, 9, 1, 30, 3, 12, 7, 5, 5, 22, 0, 17, 2];
const TARGETS: [i32; 13] = [9, 1, 30, 3, 12, 7, 4, 5, 22, 0, 17, 2, 8];

/// The two models of the script. The values of the second fill six rows of the stream and a half.
fn models() -> [(&'static str, ModelSpec); 2] {
    let gpt2 = ModelSpec {
        ffn_dim: 40,
        norm_bias: false,
        qkv_bias: false,
        o_bias: false,
        mlp_bias: false,
        value_residual: true,
        ..ModelSpec::gpt2(31, 24, 3, 4, 16)
    };
    let llama = ModelSpec { kv_heads: 2, value_residual: true, ..ModelSpec::llama(31, 24, 3, 4, 40, 16) };
    [("gpt2", ModelSpec { norm_eps: 1e-5, ..gpt2 }), ("llama", ModelSpec { norm_eps: 1e-5, ..llama })]
}

/// The script's formula.
fn wave(count: usize, phase: f64) -> Vec<f64> {
    (1..=count).map(|i| (0.37 * (i * i) as f64 + phase).sin()).collect()
}

/// The model with the script's parameters.
fn model(spec: ModelSpec, device: &Device) -> (Model, Store) {
    let model = Model::new(spec).unwrap();
    let mut store = Store::new();
    for (index, (id, parameter)) in model.parameters().enumerate() {
        let (centre, width) = match parameter.name.as_str() {
            name if name.contains("norm") => (1.0, 0.1),
            name if name.contains("value_residual") => (0.5, 0.2),
            _ => (0.0, 0.3),
        };
        let values = wave(parameter.elements(), index as f64).into_iter();
        let values: Vec<f32> = values.map(|value| (centre + width * value) as f32).collect();
        store.insert(id, device.tensor(&parameter.shape, &values, Purpose::Params).unwrap());
    }
    (model, store)
}

fn batch(model: &Model, device: &Device) -> Batch {
    let positions: Vec<i32> = (0..7).chain(0..6).collect();
    model.batch(device, &BatchSlices::of_text(&TOKENS, Some(&TARGETS), &positions, &[0, 7, 13])).unwrap()
}

fn check(device: &Device, policy: Policy) {
    let file = std::fs::read_to_string(common::golden("value_residual.json")).unwrap();
    let golden: Value = serde_json::from_str(&file).unwrap();
    for (name, spec) in models() {
        let (model, mut store) = model(spec, device);
        let (loss, gradients) = loss_and_gradients(&model, &mut store, device, &batch(&model, device), policy, true);
        let want = golden[name]["loss"].as_f64().unwrap();
        assert!((f64::from(loss) / want - 1.0).abs() <= TOLERANCE, "{name} on {device:?}: {loss} and {want}");
        let wanted = golden[name]["gradients"].as_object().unwrap();
        assert_eq!(wanted.len(), gradients.len());
        for (index, (id, gradient)) in gradients.iter().enumerate() {
            let parameter = model.parameter_name(*id).unwrap();
            let want = &wanted[&parameter];
            let [norm, product] = [0, 1].map(|i| want[i].as_f64().unwrap());
            let ours: Vec<f64> = gradient.iter().map(|x| f64::from(*x)).collect();
            let our_norm = ours.iter().map(|x| x * x).sum::<f64>().sqrt();
            let our_product: f64 = ours.iter().zip(wave(ours.len(), index as f64 + 0.5)).map(|(a, b)| a * b).sum();
            for (ours, want) in [(our_norm, norm), (our_product, product)] {
                let error = (ours - want).abs() / norm;
                assert!(error <= TOLERANCE, "{name} on {device:?}: {parameter}: {ours} and {want}");
            }
        }
    }
}

#[test]
fn losses_and_every_gradient_agree_with_pytorch() {
    let devices = Isa::available().map(|isa| (Device::cpu(isa, 2, None), Policy::Everything));
    for (device, policy) in devices.chain([(cpu(), Policy::Selective)]) {
        check(&device, policy);
    }
}

#[test]
fn a_gpu_agrees_with_pytorch_and_its_memory_is_predicted() {
    let (tested, device) = cuda();
    check(&device, Policy::Everything);
    assert_eq!(tested.problems(), [""; 0]);
}

/// With a = 1 and b = 0 values are a block's own.
#[test]
fn weights_of_one_and_zero_give_the_model_without() {
    let device = cpu();
    for (name, spec) in models() {
        let (plain, plain_store) =
            initialised(ModelSpec { value_residual: false, ..spec.clone() }, &device, DType::F32);
        let (model, mut store) = initialised(spec, &device, DType::F32);
        let half = logits(&model, &store, &device, &batch(&model, &device));
        for (id, parameter) in model.parameters().filter(|(_, parameter)| parameter.name.contains("value_residual")) {
            assert!(parameter.sources.is_empty() && !parameter.kind.decays(), "{parameter:?}");
            store.insert(id, device.tensor([2], &[1.0f32, 0.0], Purpose::Params).unwrap());
        }
        let want = logits(&plain, &plain_store, &device, &batch(&plain, &device));
        assert_eq!(logits(&model, &store, &device, &batch(&model, &device)), want, "{name}");
        assert!(relative_error(&half, &want) > 1e-3, "{name}: halves change nothing");
    }
}

/// The last rows of the stream carry V_1: between the first and the last block.
#[test]
fn values_travel_from_the_first_block_to_the_last_and_cost_what_meta_says() {
    for (name, spec) in models() {
        let (model, dtype) = (Model::new(spec.clone()).unwrap(), DType::F32);
        let shape = BatchShape::uniform(1, 13);
        for policy in [Policy::Everything, Policy::Selective, Policy::Nothing] {
            let meta = unit_costs(&model, &shape, dtype, policy).unwrap();
            assert_eq!(meta, unit_costs_on(&cpu(), &model, &shape, dtype, policy).unwrap(), "{name} {policy:?}");
            let rows: Vec<usize> = meta.iter().map(|cost| cost.output_bytes / (24 * 4)).collect();
            let below = (13 * spec.kv_heads * spec.head_dim).div_ceil(24);
            assert_eq!(rows[..4], [13, 13 + below, 13 + below, 13], "{name}");
        }
    }
}

/// Memory and results of a forward do not depend on what stays on the tape.
#[test]
fn a_forward_that_records_nothing_keeps_nothing() {
    let device = cpu();
    let (model, store) = model(models()[1].1.clone(), &device);
    let batch = batch(&model, &device);
    let before = device.pool().usage().live_total();
    let mut tape = Tape::new(&device, &store, Policy::Nothing, KEY);
    let y = model.forward(&mut tape, &mut Forward::evaluation(&batch, Output::Logits)).unwrap();
    drop((tape, y));
    assert_eq!(device.pool().usage().live_total(), before);
}

#[test]
fn models_and_splits_that_have_none_say_so() {
    let sizes = Sizes { vocab_size: 53, dim: 24, layers: 2, heads: 4, max_positions: 64 };
    for family in FAMILIES {
        let spec = ModelSpec { value_residual: true, ..family.usual(&sizes) };
        match family.name() {
            "t5" | "vit" => {
                let error = spec.validate().unwrap_err().to_string();
                assert!(error.contains("value_residual") && error.contains("models of one decoder"), "{error}");
            }
            _ => {
                let (model, store) = initialised(spec.clone(), &cpu(), DType::F32);
                let batch = model.rows(&cpu(), 6, &tokens(12, 53), None).unwrap();
                assert_eq!(logits(&model, &store, &cpu(), &batch).len(), 12 * 53, "{family}");
                let error = hf::config_json(&spec, DType::F32).unwrap_err().to_string();
                assert!(error.contains("value residuals"), "{error}");
            }
        }
    }
    let [(_, gpt2), (_, llama)] = models();
    let error = ModelSpec { layers: 1, ..gpt2.clone() }.validate().unwrap_err().to_string();
    assert!(error.contains("one block"), "{error}");
    let split = TensorSplit { rank: 0, ranks: 2, sequence: false };
    let context = ContextSplit { rank: 0, ranks: 2, length: 8, exchange: ContextExchange::Heads };
    for (split, context) in [(split, ContextSplit::WHOLE), (TensorSplit::WHOLE, context)] {
        let error = Model::split_over(llama.clone(), split, context, ExpertSplit::WHOLE).unwrap_err().to_string();
        assert!(error.contains("model.value_residual"), "{error}");
    }
    let names: BTreeMap<ParamId, String> = Model::new(llama)
        .map(|model| model.parameters().map(|(id, parameter)| (id, parameter.name.clone())).collect())
        .unwrap();
    assert_eq!(names.values().filter(|name| *name == "attn.value_residual").count(), 2);
}
