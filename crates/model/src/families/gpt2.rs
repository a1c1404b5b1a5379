//! GPT-2 (Radford et al. 2019): LayerNorm, learned positions, an MLP of two products. Files hold
//! its matrices transposed.

use super::{
    AttentionKind, Class, Definition, EmbeddingScale, Form, GPT2, Gains, HeadsKind, Input, MlpKind, NormKind,
    NormPlaces, Positions, QkNormKind, ResidualInit, Row, Sizes, refuse, row, transposed,
};
use crate::Result;
use crate::gguf::{self, Layout};
use crate::hf::{ConfigError, Keys, Written, activation_name};
use crate::spec::{Activation, ModelSpec};
use crate::split::Cut;
use serde_json::{Value, json};

/// The definition of the family.
pub(super) struct Gpt2;

const CLASS: Class = Class { model_type: "gpt2", architecture: "GPT2LMHeadModel" };

const PARAMETERS: &[Row] = &[
    row("tokens.weight", Cut::VocabularyRows, &["transformer.wte.weight"]),
    row("positions.weight", Cut::Residual, &["transformer.wpe.weight"]),
    row("norm1.weight", Cut::Residual, &["transformer.h.{}.ln_1.weight"]),
    row("norm1.bias", Cut::Residual, &["transformer.h.{}.ln_1.bias"]),
    transposed("attn.qkv.weight", Cut::HeadRows, &["transformer.h.{}.attn.c_attn.weight"]),
    row("attn.qkv.bias", Cut::HeadRows, &["transformer.h.{}.attn.c_attn.bias"]),
    // Files of transformers have none.
    row("attn.q_norm.weight", Cut::EachHead, &[]),
    row("attn.k_norm.weight", Cut::EachHead, &[]),
    transposed("attn.out.weight", Cut::HeadColumns, &["transformer.h.{}.attn.c_proj.weight"]),
    row("attn.out.bias", Cut::Residual, &["transformer.h.{}.attn.c_proj.bias"]),
    row("norm2.weight", Cut::Residual, &["transformer.h.{}.ln_2.weight"]),
    row("norm2.bias", Cut::Residual, &["transformer.h.{}.ln_2.bias"]),
    transposed("mlp.up.weight", Cut::FfnRows, &["transformer.h.{}.mlp.c_fc.weight"]),
    row("mlp.up.bias", Cut::FfnRows, &["transformer.h.{}.mlp.c_fc.bias"]),
    transposed("mlp.down.weight", Cut::FfnColumns, &["transformer.h.{}.mlp.c_proj.weight"]),
    row("mlp.down.bias", Cut::Residual, &["transformer.h.{}.mlp.c_proj.bias"]),
    row("norm.weight", Cut::Residual, &["transformer.ln_f.weight"]),
    row("norm.bias", Cut::Residual, &["transformer.ln_f.bias"]),
    row("lm.weight", Cut::VocabularyRows, &["lm_head.weight"]),
];

const GGUF: &[gguf::Form] = &[gguf::Form {
    architecture: "gpt2",
    model_type: "gpt2",
    keys: &[
        ("context_length", "n_positions"),
        ("block_count", "n_layer"),
        ("embedding_length", "n_embd"),
        ("feed_forward_length", "n_inner"),
        ("attention.head_count", "n_head"),
        ("attention.layer_norm_epsilon", "layer_norm_epsilon"),
    ],
    tensors: &[
        ("token_embd", "transformer.wte"),
        ("position_embd", "transformer.wpe"),
        ("output_norm", "transformer.ln_f"),
        ("output", "lm_head"),
        ("blk.{}.attn_norm", "transformer.h.{}.ln_1"),
        ("blk.{}.attn_qkv", "transformer.h.{}.attn.c_attn"),
        ("blk.{}.attn_output", "transformer.h.{}.attn.c_proj"),
        ("blk.{}.ffn_norm", "transformer.h.{}.ln_2"),
        ("blk.{}.ffn_up", "transformer.h.{}.mlp.c_fc"),
        ("blk.{}.ffn_down", "transformer.h.{}.mlp.c_proj"),
    ],
    // The class always has them.
    biases: &[],
    layout: Layout::Upright,
    // Files do not have the probability with which the class drops attention's.
    complete: |config| drop(config.insert("attn_pdrop".into(), json!(0.0))),
}];

impl Definition for Gpt2 {
    fn name(&self) -> &'static str {
        "gpt2"
    }

    fn title(&self) -> &'static str {
        "GPT-2"
    }

    fn about(&self) -> &'static str {
        "LayerNorm, learned positions, GELU: GPT-2."
    }

    fn classes(&self) -> &'static [Class] {
        &[CLASS]
    }

    fn prefix(&self) -> &'static str {
        "transformer."
    }

    fn parameters(&self) -> &'static [Row] {
        PARAMETERS
    }

    fn buffers(&self) -> &'static [&'static str] {
        &[".attn.bias", ".attn.masked_bias"]
    }

    fn form(&self) -> Form {
        Form {
            input: Input::Tokens,
            attention: AttentionKind::Causal,
            norm: NormKind::Layer,
            gains: Gains::Weight,
            norms: NormPlaces::Before,
            qk_norm: QkNormKind::EachHead,
            embedding: EmbeddingScale::One,
            positions: Positions::Learned,
            mlp: MlpKind::Plain,
            heads: HeadsKind::Plain,
            residual_init: ResidualInit::Depth,
        }
    }

    fn gguf(&self) -> &'static [gguf::Form] {
        GGUF
    }

    fn usual(&self, sizes: &Sizes) -> ModelSpec {
        let Sizes { vocab_size, dim, layers, heads, max_positions } = *sizes;
        ModelSpec {
            family: GPT2,
            vocab_size,
            dim,
            layers,
            heads,
            kv_heads: heads,
            head_dim: dim / heads.max(1),
            ffn_dim: 4 * dim,
            max_positions,
            activation: Activation::GeluTanh,
            norm_eps: 1e-5,
            norm_bias: true,
            qkv_bias: true,
            o_bias: true,
            mlp_bias: true,
            qk_norm: false,
            value_residual: false,
            tie_embeddings: true,
            experts: None,
            rope: None,
            local_rope: None,
            attention_scalar: None,
            sliding_window: None,
            sliding_layers: None,
            encoder: None,
            image: None,
            dropout: 0.0,
            init_std: 0.02,
            mup_base_dim: None,
            bos_token: None,
            eos_tokens: Vec::new(),
            pad_token: None,
            model_type: None,
        }
    }

    fn usual_ffn_dim(&self, dim: usize) -> (usize, String) {
        (4 * dim, format!("4 x dim {dim}"))
    }

    fn validate(&self, spec: &ModelSpec) -> Result<()> {
        if spec.rope.is_some() {
            return refuse("rope", "family gpt2 learns its positions; remove [model.rope] or use family llama");
        }
        Ok(())
    }

    fn read_config(&self, keys: &mut Keys, _model_type: &str) -> std::result::Result<ModelSpec, ConfigError> {
        let dim = keys.size("n_embd", Some(768))?;
        let heads = keys.size("n_head", Some(12))?;
        let layers = keys.size("n_layer", Some(12))?;
        let max_positions = keys.size("n_positions", Some(1024))?;
        // Old files repeat the number of positions under this name.
        keys.refuse("n_ctx", &[Value::from(max_positions)], "it must equal n_positions")?;
        keys.refuse("scale_attn_weights", &[Value::Bool(true)], "scores are always divided by sqrt(head_dim)")?;
        keys.refuse("scale_attn_by_inverse_layer_idx", &[Value::Bool(false)], "scores are not scaled by layer")?;
        // This changes the rounding of transformers' own f16 path, not the function; softmax is
        // always f32 here.
        keys.take("reorder_and_upcast_attn");
        let vocab_size = keys.size("vocab_size", Some(50_257))?;
        let mut spec = self.usual(&Sizes { vocab_size, dim, layers, heads, max_positions });
        if heads == 0 || !dim.is_multiple_of(heads) {
            return Err(ConfigError::Value {
                key: "n_head".into(),
                expected: "a divisor of n_embd",
                found: format!("{heads} with n_embd {dim}"),
            });
        }
        if let Some(inner) = keys.optional_size("n_inner")? {
            spec.ffn_dim = inner;
        }
        spec.activation = keys.activation("activation_function", "gelu_new")?;
        spec.norm_eps = keys.number("layer_norm_epsilon")?.unwrap_or(1e-5);
        spec.init_std = keys.number("initializer_range")?.unwrap_or(0.02);
        spec.tie_embeddings = keys.flag("tie_word_embeddings")?.unwrap_or(true);
        spec.dropout = keys.dropout("resid_pdrop", "embd_pdrop", 0.1)?;
        keys.attention_dropout("attn_pdrop", 0.1)?;
        Ok(spec)
    }

    fn able(&self, spec: &ModelSpec) -> std::result::Result<Vec<Class>, ConfigError> {
        let no = |what: &str| Err(ConfigError::NoEquivalent(what.into()));
        if spec.kv_heads != spec.heads || spec.heads * spec.head_dim != spec.dim {
            return no("GPT-2 blocks with heads other than dim / heads wide, or grouped");
        }
        if spec.sliding_window.is_some() {
            return no("GPT-2 blocks with a sliding window");
        }
        if spec.qk_norm {
            return no("GPT-2 blocks with query/key norms");
        }
        Ok(vec![CLASS])
    }

    fn write_config(&self, spec: &ModelSpec, _class: Class, keys: &mut Written) {
        keys.set("n_embd", json!(spec.dim));
        keys.set("n_layer", json!(spec.layers));
        keys.set("n_head", json!(spec.heads));
        keys.set("n_positions", json!(spec.max_positions));
        keys.set("n_inner", if spec.ffn_dim == 4 * spec.dim { Value::Null } else { json!(spec.ffn_dim) });
        keys.set("activation_function", json!(activation_name(spec.activation)));
        keys.set("layer_norm_epsilon", json!(spec.norm_eps));
        keys.set("resid_pdrop", json!(spec.dropout));
        keys.set("embd_pdrop", json!(spec.dropout));
        keys.set("attn_pdrop", json!(0.0));
    }

    fn implied_zeros(&self, spec: &ModelSpec, _class: Class) -> Vec<(String, Vec<usize>)> {
        let mut zeros = Vec::new();
        let mut bias = |present: bool, name: String, size: usize| {
            if !present {
                zeros.push((format!("transformer.{name}.bias"), vec![size]));
            }
        };
        for layer in 0..spec.layers {
            bias(spec.norm_bias, format!("h.{layer}.ln_1"), spec.dim);
            bias(spec.norm_bias, format!("h.{layer}.ln_2"), spec.dim);
            bias(spec.qkv_bias, format!("h.{layer}.attn.c_attn"), spec.qkv_dim());
            bias(spec.o_bias, format!("h.{layer}.attn.c_proj"), spec.dim);
            bias(spec.mlp_bias, format!("h.{layer}.mlp.c_fc"), spec.ffn_dim);
            bias(spec.mlp_bias, format!("h.{layer}.mlp.c_proj"), spec.dim);
        }
        bias(spec.norm_bias, "ln_f".into(), spec.dim);
        zeros
    }
}
