//! Exports a small model of every kind that Hugging Face has a class for, with the logits that this
//! crate computes from it. `scripts/golden/check_export.py` compares them with those that
//! transformers computes from the export.
//!
//!     cargo run --release -p trainyard-model --example export_samples -- FOLDER

use std::path::Path;
use trainyard_autograd::{Policy, RandomKey, Tape};
use trainyard_model::families::{self, Sizes};
use trainyard_model::weights::{ExportOptions, WeightReader, export};
use trainyard_model::{Activation, Family, Forward, Model, ModelSpec, Output, RopeScaling, RopeSpec};
use trainyard_tensor::cpu::Isa;
use trainyard_tensor::{DType, Device};

const VOCAB: usize = 61;
const LENGTH: usize = 40;

fn samples() -> Vec<(&'static str, ModelSpec)> {
    let tokens = |spec| ModelSpec { bos_token: Some(1), eos_tokens: vec![2, 3], ..spec };
    let gpt2 = tokens(ModelSpec { init_std: 0.2, ..ModelSpec::gpt2(VOCAB, 32, 2, 4, 64) });
    let llama = tokens(ModelSpec { init_std: 0.2, kv_heads: 2, ..ModelSpec::llama(VOCAB, 32, 2, 4, 48, 64) });
    let rope = |scaling| Some(RopeSpec { theta: 10_000.0, partial_factor: 1.0, scaling: Some(scaling) });
    let yarn = |truncate, attention_factor| {
        rope(RopeScaling::Yarn {
            factor: 4.0,
            original_max_positions: 16,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor,
            mscale: None,
            mscale_all_dim: None,
            truncate,
        })
    };
    let llama3 = rope(RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_positions: 16,
    });
    let qwen3 = ModelSpec { qk_norm: true, head_dim: 12, tie_embeddings: true, ..llama.clone() };
    let sizes = Sizes { vocab_size: VOCAB, dim: 32, layers: 2, heads: 4, max_positions: 64 };
    let usual = |family: Family| tokens(ModelSpec { init_std: 0.2, ..family.usual(&sizes) });
    let gemma3 = ModelSpec {
        kv_heads: 2,
        head_dim: 12,
        sliding_window: Some(6),
        sliding_layers: Some(vec![0]),
        ..usual(families::GEMMA3)
    };
    let half = Some(RopeSpec { theta: 10_000.0, partial_factor: 0.5, scaling: None });
    let biases = |on| ModelSpec { norm_bias: on, qkv_bias: on, o_bias: on, mlp_bias: on, ..gpt2.clone() };
    vec![
        ("gpt2", gpt2.clone()),
        (
            "gpt2_relu_wide_untied",
            ModelSpec { activation: Activation::Relu, ffn_dim: 72, tie_embeddings: false, ..gpt2.clone() },
        ),
        ("gpt2_exact_gelu", ModelSpec { activation: Activation::Gelu, ..gpt2.clone() }),
        ("gpt2_without_biases", biases(false)),
        ("llama", llama.clone()),
        ("llama_biases", ModelSpec { qkv_bias: true, o_bias: true, mlp_bias: true, ..llama.clone() }),
        ("llama_tied_one_kv_head", ModelSpec { kv_heads: 1, tie_embeddings: true, ..llama.clone() }),
        ("llama_linear", ModelSpec { rope: rope(RopeScaling::Linear { factor: 3.0 }), ..llama.clone() }),
        ("llama_llama3", ModelSpec { rope: llama3, ..llama.clone() }),
        ("llama_yarn", ModelSpec { rope: yarn(true, None), ..llama.clone() }),
        ("llama_yarn_untruncated", ModelSpec { rope: yarn(false, Some(1.25)), ..llama.clone() }),
        ("mistral", ModelSpec { sliding_window: Some(6), ..llama.clone() }),
        ("llama_qkv_bias", ModelSpec { qkv_bias: true, ..llama.clone() }),
        ("llama_o_bias", ModelSpec { o_bias: true, ..llama.clone() }),
        ("qwen2", ModelSpec { qkv_bias: true, model_type: Some("qwen2".into()), ..llama.clone() }),
        (
            "qwen2_windows_in_some_layers",
            ModelSpec { qkv_bias: true, sliding_window: Some(6), sliding_layers: Some(vec![1]), ..llama.clone() },
        ),
        ("qwen3", qwen3.clone()),
        ("qwen3_qkv_bias", ModelSpec { qkv_bias: true, ..qwen3.clone() }),
        ("gemma3", gemma3.clone()),
        ("gemma3_biases", ModelSpec { qkv_bias: true, o_bias: true, attention_scalar: Some(10.0), ..gemma3 }),
        ("olmo2", ModelSpec { kv_heads: 2, ..usual(families::OLMO2) }),
        ("olmo2_biases", ModelSpec { qkv_bias: true, o_bias: true, ..usual(families::OLMO2) }),
        ("phi3", ModelSpec { kv_heads: 2, ..usual(families::PHI3) }),
        ("phi3_window_part_of_a_head", ModelSpec { rope: half, sliding_window: Some(6), ..usual(families::PHI3) }),
        ("qwen3_biases_windows", ModelSpec { qkv_bias: true, o_bias: true, sliding_window: Some(6), ..qwen3 }),
    ]
}

fn write(folder: &Path, spec: ModelSpec, options: ExportOptions) -> Result<(), Box<dyn std::error::Error>> {
    let model = Model::new(spec)?;
    let device = Device::cpu(Isa::detect(), 2, None);
    let initial = model.initial_store(&device, 1)?;
    export(folder, &model, options, |unit, out| {
        let layout = model.layout(unit, 1);
        for (id, _) in model.parameters().filter(|(id, _)| id.unit as usize == unit) {
            let value = trainyard_autograd::Parameters::parameter(&initial, id)?.value;
            let values = value.data::<f32>()?;
            // Gains away from one and biases away from zero, so that a missing one shows.
            let part = &mut out[layout.range(id.index as usize)];
            for (i, (x, value)) in part.iter_mut().zip(values).enumerate() {
                *x = value + if value.fract() == 0.0 { 0.1 * ((i % 5) as f32 - 2.0) } else { 0.0 };
            }
        }
        Ok::<_, trainyard_model::ModelError>(())
    })?;
    // What is compared is what a reader of the files gets: the values rounded to their dtype.
    let reader = WeightReader::open(folder, &model)?;
    let store = reader.read_store(&model, &device)?;
    let tokens: Vec<i32> = (0..2 * LENGTH).map(|i| ((i * i * 5 + 11 * i + 4) % VOCAB) as i32).collect();
    let batch = model.rows(&device, LENGTH, &tokens, None)?;
    let mut tape = Tape::new(&device, &store, Policy::Nothing, RandomKey { seed: 0, step: 0, site: 0 });
    let logits = model.forward(&mut tape, &mut Forward::evaluation(&batch, Output::Logits))?;
    let ours = serde_json::json!({
        "length": LENGTH, "vocab_size": VOCAB, "tokens": tokens, "logits": logits.tensor().to_f32_vec()?,
    });
    std::fs::write(folder.join("ours.json"), ours.to_string())?;
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = std::env::args().nth(1).ok_or("usage: export_samples FOLDER")?;
    for (name, spec) in samples() {
        for (suffix, dtype, max_shard_bytes) in [("f32", DType::F32, u64::MAX), ("bf16_sharded", DType::BF16, 8_000)] {
            let folder = Path::new(&folder).join(format!("{name}.{suffix}"));
            write(&folder, spec.clone(), ExportOptions { dtype, max_shard_bytes, generation: None })?;
        }
    }
    Ok(())
}
