//! The comparison with transformers, on any device.

use super::*;
use safetensors::SafeTensors;
use trainyard_model::{ParameterKind, ParameterSpec};

/// The bar of the project.
const TOLERANCE: f64 = 1e-4;

struct Golden {
    input_ids: Vec<i32>,
    labels: Vec<i32>,
    floats: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
}

fn read_golden(name: &str) -> Golden {
    let bytes = std::fs::read(golden(name).join("golden.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let ints = |name: &str| {
        let data = file.tensor(name).unwrap().data();
        data.chunks_exact(4).map(|b| i32::from_le_bytes(b.try_into().unwrap())).collect()
    };
    let mut floats = BTreeMap::new();
    for (name, view) in file.iter().filter(|(_, view)| view.dtype() == safetensors::Dtype::F32) {
        let values = view.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        floats.insert(name.to_string(), (view.shape().to_vec(), values));
    }
    Golden { input_ids: ints("input_ids"), labels: ints("labels"), floats }
}

/// The gradient of a parameter, split into the tensors that files have.
fn by_hf_name(model: &Model, gradients: &BTreeMap<ParamId, Vec<f32>>) -> BTreeMap<String, Vec<f32>> {
    let mut named = BTreeMap::new();
    // What balances experts has no gradient.
    let differentiable = |parameter: &&ParameterSpec| parameter.kind != ParameterKind::Balance;
    for (id, parameter) in model.parameters().filter(|(_, parameter)| differentiable(parameter)) {
        let width = parameter.row_elements();
        for source in &parameter.sources {
            let values = &gradients[&id][source.rows.start * width..source.rows.end * width];
            let values = if source.transposed {
                (0..width).flat_map(|column| values[column..].iter().step_by(width).copied()).collect()
            } else {
                values.to_vec()
            };
            named.insert(source.hf_name.clone(), values);
        }
    }
    named
}

/// Logits, loss and every gradient of a golden model in f32.
pub fn check(name: &str, device: &Device, policy: Policy, eager: bool) {
    let golden = read_golden(name);
    let (model, mut store) = load(name, device);
    let batch = batch(&model, device, 2, &golden.input_ids, Some(&golden.labels));
    let error = relative_error(&logits(&model, &store, device, &batch), &golden.floats["logits"].1);
    assert!(error <= TOLERANCE, "{name} on {device:?}: logits differ by {error:e}");

    let (loss, gradients) = loss_and_gradients(&model, &mut store, device, &batch, policy, eager);
    let error = relative_error(&[loss], &golden.floats["loss"].1);
    assert!(error <= TOLERANCE, "{name} on {device:?}: the loss is {loss}, off by {error:e}");
    let ours = by_hf_name(&model, &gradients);
    let theirs = golden.floats.iter().filter_map(|(name, (_, g))| Some((name.strip_prefix("grad.")?, g)));
    let (mut compared, mut worst) = (0, error);
    for (parameter, expected) in theirs {
        let got = ours.get(parameter).unwrap_or_else(|| panic!("{name}: no gradient for {parameter}"));
        let error = relative_error(got, expected);
        assert!(
            error <= TOLERANCE,
            "{name} on {device:?}, {policy:?}: the gradient of {parameter} differs by {error:e}"
        );
        (compared, worst) = (compared + 1, worst.max(error));
    }
    assert_eq!(compared, ours.len(), "{name}: every gradient has its golden");
    println!("{name} on {device:?}, {policy:?}: relative errors up to {worst:.1e}");
}

/// The same with weights and activations in a dtype of 16 bits, to a tolerance that f32 would stay
/// far below.
pub fn check_in(name: &str, device: &Device, dtype: DType, tolerance: f64) {
    let golden = read_golden(name);
    let (model, mut store) = load(name, device);
    for (id, _) in model.parameters() {
        let value = store.parameter(id).unwrap().value;
        store.insert(id, cast(&value, dtype).unwrap());
    }
    let batch = batch(&model, device, 2, &golden.input_ids, Some(&golden.labels));
    let error = relative_error(&logits(&model, &store, device, &batch), &golden.floats["logits"].1);
    assert!(error <= tolerance, "{name} in {dtype}: logits differ by {error:e}");
    assert!(error > tolerance / 1000.0, "{name} in {dtype}: computed in f32?");
    let (_, gradients) = loss_and_gradients(&model, &mut store, device, &batch, Policy::Everything, true);
    let ours = by_hf_name(&model, &gradients);
    // Compared in the fused form. A bias of the keys shifts all scores of a query nearly alike, so
    // its gradient alone is the small difference of large numbers.
    for (_, parameter) in model.parameters() {
        let names: Vec<&str> = parameter.sources.iter().map(|source| source.hf_name.as_str()).collect();
        let got = names.iter().flat_map(|name| ours[*name].clone()).collect::<Vec<_>>();
        let expected = names.iter().flat_map(|name| golden.floats[&format!("grad.{name}")].1.clone());
        let error = relative_error(&got, &expected.collect::<Vec<_>>());
        assert!(error <= 2.0 * tolerance, "{name} in {dtype}: the gradient of {names:?} differs by {error:e}");
    }
}
