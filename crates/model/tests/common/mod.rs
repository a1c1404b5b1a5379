//! Helpers of several test files: golden folders, models with their weights, and comparisons.
#![allow(dead_code, reason = "each test file uses some of it")]

pub mod golden;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use trainyard_autograd::{ParamId, Parameters, Policy, RandomKey, Store, Tape};
use trainyard_model::weights::WeightReader;
use trainyard_model::{Batch, Forward, Model, ModelSpec, Output, hf};
use trainyard_tensor::cpu::Isa;
use trainyard_tensor::cuda::Cuda;
use trainyard_tensor::cuda::tested::Tested;
use trainyard_tensor::ops::cast;
use trainyard_tensor::{DType, Device, Purpose};

pub const KEY: RandomKey = RandomKey { seed: 11, step: 3, site: 5 };

/// Every golden model.
pub const GOLDENS: [&str; 15] = [
    "gpt2",
    "llama",
    "llama3_rope",
    "mistral",
    "qwen2",
    "qwen3",
    "smollm",
    "gemma3",
    "olmo2",
    "olmo2_all_heads",
    "phi3",
    "mixtral",
    "mixtral_balanced",
    "qwen3_moe",
    "dots1",
];

/// Those with experts. In 16 bits a token may go to another expert than in f32.
pub const MIXTURES: [&str; 4] = ["mixtral", "mixtral_balanced", "qwen3_moe", "dots1"];

/// Those without.
pub fn dense_goldens() -> impl Iterator<Item = &'static str> {
    GOLDENS.into_iter().filter(|name| !MIXTURES.contains(name))
}

pub fn golden(name: &str) -> PathBuf {
    // The folder in which cargo runs the test. The compiled sources may have moved.
    let root = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    Path::new(&root).join("tests/golden").join(name)
}

/// A GPU, or emulated kernels.
pub fn cuda() -> (Tested, Device) {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulated");
    let tested = Tested::new(&folder, 0).unwrap_or_else(|problem| panic!("{problem}"));
    let device = Device::cuda(Arc::new(Cuda::new(tested.driver.clone(), 1)), None);
    (tested, device)
}

pub fn cpu() -> Device {
    Device::cpu(Isa::detect(), 2, None)
}

pub fn read_config(folder: &Path, file: &str) -> ModelSpec {
    let text = std::fs::read_to_string(folder.join(file)).unwrap();
    let imported = hf::from_config_json(&text).unwrap_or_else(|error| panic!("{folder:?}: {error}"));
    assert_eq!(imported.notes, [] as [String; 0], "{folder:?}");
    imported.spec
}

/// A golden model with its weights, f32.
pub fn load(name: &str, device: &Device) -> (Model, Store) {
    let folder = golden(name);
    let model = Model::new(read_config(&folder, "config.json")).unwrap();
    let store = WeightReader::open(&folder, &model).unwrap().read_store(&model, device).unwrap();
    (model, store)
}

/// A model with initial weights in `dtype`, moved away from the ones and zeros that hide mistakes.
pub fn initialised(spec: ModelSpec, device: &Device, dtype: DType) -> (Model, Store) {
    let model = Model::new(spec).unwrap();
    let mut store = model.initial_store(device, 1).unwrap();
    for (id, _) in model.parameters() {
        let mut value = store.parameter(id).unwrap().value;
        for (i, x) in value.data_mut::<f32>().unwrap().iter_mut().enumerate() {
            *x += 0.01 * ((i % 7) as f32 - 3.0);
        }
        store.insert(id, cast(&value, dtype).unwrap());
    }
    (model, store)
}

/// `rows` sequences of equal length, with targets where given.
pub fn batch(model: &Model, device: &Device, rows: usize, tokens: &[i32], targets: Option<&[i32]>) -> Batch {
    model.rows(device, tokens.len() / rows, tokens, targets).unwrap()
}

/// Tokens without a pattern.
pub fn tokens(count: usize, vocab: usize) -> Vec<i32> {
    (0..count).map(|i| ((i * i * 31 + i * 7 + 3) % vocab) as i32).collect()
}

/// Logits without recording.
pub fn logits(model: &Model, store: &Store, device: &Device, batch: &Batch) -> Vec<f32> {
    let mut tape = Tape::new(device, store, Policy::Nothing, KEY);
    let y = model.forward(&mut tape, &mut Forward::evaluation(batch, Output::Logits)).unwrap();
    y.tensor().to_f32_vec().unwrap()
}

/// The loss and every parameter's gradient, on one tape.
pub fn loss_and_gradients(
    model: &Model,
    store: &mut Store,
    device: &Device,
    batch: &Batch,
    policy: Policy,
    eager: bool,
) -> (f32, BTreeMap<ParamId, Vec<f32>>) {
    let scale = 1.0 / batch.counted as f32;
    let (loss, recording) = {
        let (parameters, mut gradients) = store.split();
        let mut tape = Tape::new(device, &parameters, policy, KEY);
        if eager {
            tape = tape.with_gradients(&mut gradients);
        }
        let loss = model.forward(&mut tape, &mut Forward::training(batch, scale)).unwrap();
        (loss, tape.finish())
    };
    let value = loss.tensor().to_scalar().unwrap();
    let one = device.tensor(*loss.tensor().shape(), &[1.0f32], Purpose::Activations).unwrap();
    let (parameters, mut gradients) = store.split();
    recording.backward(&[(&loss, one)], &[], &parameters, &mut gradients).unwrap();
    let ids: Vec<ParamId> = model.parameters().map(|(id, _)| id).collect();
    let gradients = ids.into_iter().map(|id| (id, store.gradient(id).unwrap().to_f32_vec().unwrap())).collect();
    (value, gradients)
}

/// Norm of the difference over norm of what is expected.
pub fn relative_error(got: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(got.len(), expected.len());
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    let difference = norm(&mut got.iter().zip(expected).map(|(a, b)| f64::from(*a) - f64::from(*b)));
    difference / norm(&mut expected.iter().map(|b| f64::from(*b))).max(1e-30)
}
