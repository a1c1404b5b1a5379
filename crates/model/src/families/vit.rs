//! Vision Transformers (Dosovitskiy et al. 2020): an image is a class token and its patches, every
//! position attends to all, and the class token's row gives the class.

use super::{
    AttentionKind, Class, Definition, EmbeddingScale, Form, Gains, HeadsKind, Input, MlpKind, NormKind, NormPlaces,
    Positions, QkNormKind, ResidualInit, Row, Sizes, VIT, refuse, row,
};
use crate::Result;
use crate::hf::{ConfigError, Keys, Written, activation_name};
use crate::spec::{Activation, ImageSpec, ModelSpec};
use crate::split::Cut;
use serde_json::{Map, Value, json};

/// The definition of the family.
pub(super) struct Vit;

const CLASS: Class = Class { model_type: "vit", architecture: "ViTForImageClassification" };

const CLASS_TOKEN: &str = "vit.embeddings.cls_token";
const BIAS: &str = "vit.embeddings.patch_embeddings.projection.bias";
const POSITIONS: &str = "vit.embeddings.position_embeddings";
const PROJECTION: &str = "vit.embeddings.patch_embeddings.projection.weight";

const PARAMETERS: &[Row] = &[
    row("patches.weight", Cut::Residual, &[PROJECTION]),
    row("class_and_bias.weight", Cut::Residual, &[CLASS_TOKEN, BIAS]),
    row("positions.weight", Cut::Residual, &[POSITIONS]),
    row("norm1.weight", Cut::Residual, &["vit.encoder.layer.{}.layernorm_before.weight"]),
    row("norm1.bias", Cut::Residual, &["vit.encoder.layer.{}.layernorm_before.bias"]),
    row(
        "attn.qkv.weight",
        Cut::HeadRows,
        &[
            "vit.encoder.layer.{}.attention.attention.query.weight",
            "vit.encoder.layer.{}.attention.attention.key.weight",
            "vit.encoder.layer.{}.attention.attention.value.weight",
        ],
    ),
    row(
        "attn.qkv.bias",
        Cut::HeadRows,
        &[
            "vit.encoder.layer.{}.attention.attention.query.bias",
            "vit.encoder.layer.{}.attention.attention.key.bias",
            "vit.encoder.layer.{}.attention.attention.value.bias",
        ],
    ),
    row("attn.out.weight", Cut::HeadColumns, &["vit.encoder.layer.{}.attention.output.dense.weight"]),
    row("attn.out.bias", Cut::Residual, &["vit.encoder.layer.{}.attention.output.dense.bias"]),
    row("norm2.weight", Cut::Residual, &["vit.encoder.layer.{}.layernorm_after.weight"]),
    row("norm2.bias", Cut::Residual, &["vit.encoder.layer.{}.layernorm_after.bias"]),
    row("mlp.up.weight", Cut::FfnRows, &["vit.encoder.layer.{}.intermediate.dense.weight"]),
    row("mlp.up.bias", Cut::FfnRows, &["vit.encoder.layer.{}.intermediate.dense.bias"]),
    row("mlp.down.weight", Cut::FfnColumns, &["vit.encoder.layer.{}.output.dense.weight"]),
    row("mlp.down.bias", Cut::Residual, &["vit.encoder.layer.{}.output.dense.bias"]),
    row("norm.weight", Cut::Residual, &["vit.layernorm.weight"]),
    row("norm.bias", Cut::Residual, &["vit.layernorm.bias"]),
    row("class.weight", Cut::Residual, &["classifier.weight"]),
    row("class.bias", Cut::Residual, &["classifier.bias"]),
];

/// The sizes of images that presets and `config.json` have where nothing is said.
const IMAGE: (usize, usize, usize) = (224, 16, 3);

impl Definition for Vit {
    fn name(&self) -> &'static str {
        "vit"
    }

    fn title(&self) -> &'static str {
        "Vision Transformer"
    }

    fn about(&self) -> &'static str {
        "Patches, a class token, attention to all positions: ViT."
    }

    fn classes(&self) -> &'static [Class] {
        &[CLASS]
    }

    fn prefix(&self) -> &'static str {
        "vit."
    }

    fn parameters(&self) -> &'static [Row] {
        PARAMETERS
    }

    fn file_shape(&self, spec: &ModelSpec, file: &str) -> Option<Vec<usize>> {
        let image = spec.image.as_ref()?;
        match file {
            CLASS_TOKEN => Some(vec![1, 1, spec.dim]),
            POSITIONS => Some(vec![1, spec.max_positions, spec.dim]),
            // One of two rows of a table, and a vector in files.
            BIAS => Some(vec![spec.dim]),
            PROJECTION => Some(vec![spec.dim, image.channels, image.patch, image.patch]),
            _ => None,
        }
    }

    fn form(&self) -> Form {
        Form {
            input: Input::Patches,
            attention: AttentionKind::Full,
            norm: NormKind::Layer,
            gains: Gains::Weight,
            norms: NormPlaces::Before,
            qk_norm: QkNormKind::EachHead,
            embedding: EmbeddingScale::One,
            positions: Positions::Learned,
            mlp: MlpKind::Plain,
            heads: HeadsKind::Plain,
            residual_init: ResidualInit::Same,
        }
    }

    fn usual(&self, sizes: &Sizes) -> ModelSpec {
        let (size, patch, channels) = IMAGE;
        // As the published models were trained: values from -1 to 1.
        let halves = vec![0.5; channels];
        let (mean, std) = (halves.clone(), halves);
        let image = ImageSpec { size, resize: size, patch, channels, mean, std, labels: Vec::new() };
        ModelSpec {
            family: VIT,
            max_positions: image.positions(),
            activation: Activation::Gelu,
            norm_eps: 1e-12,
            tie_embeddings: false,
            image: Some(image),
            ..super::GPT2.usual(sizes)
        }
    }

    fn usual_ffn_dim(&self, dim: usize) -> (usize, String) {
        (4 * dim, format!("4 x dim {dim}"))
    }

    fn validate(&self, spec: &ModelSpec) -> Result<()> {
        if spec.rope.is_some() {
            return refuse("rope", "family vit learns its positions; remove [model.rope]");
        }
        if spec.qk_norm {
            return refuse("qk_norm", "family vit has none");
        }
        if spec.sliding_window.is_some() {
            return refuse("sliding_window", "family vit attends to all positions of an image");
        }
        if spec.tie_embeddings {
            return refuse("tie_embeddings", "family vit has no token table: set it to false");
        }
        if !(spec.norm_bias && spec.o_bias && spec.mlp_bias) {
            return refuse("output_bias", "family vit has biases on norms, attention's output and the MLP");
        }
        if spec.kv_heads != spec.heads || spec.heads * spec.head_dim != spec.dim {
            return refuse("heads", "family vit has heads of dim / heads, with keys and values for each");
        }
        let positions = spec.image.as_ref().map_or(0, ImageSpec::positions);
        if spec.max_positions != positions {
            return refuse(
                "max_positions",
                format!("{} and not {positions}, one more than an image has patches", spec.max_positions),
            );
        }
        Ok(())
    }

    fn read_config(&self, keys: &mut Keys, _model_type: &str) -> std::result::Result<ModelSpec, ConfigError> {
        let (size, patch, channels) = IMAGE;
        let dim = keys.size("hidden_size", Some(768))?;
        let heads = keys.size("num_attention_heads", Some(12))?;
        let layers = keys.size("num_hidden_layers", Some(12))?;
        keys.head_dim_divides(dim, heads)?;
        let labels = labels(keys)?;
        // transformers writes id2label unless there are two classes with the usual names.
        let vocab_size = if labels.is_empty() { 2 } else { labels.len() };
        let mut spec = self.usual(&Sizes { vocab_size, dim, layers, heads, max_positions: 0 });
        let image = ImageSpec {
            size: keys.size("image_size", Some(size))?,
            patch: keys.size("patch_size", Some(patch))?,
            channels: keys.size("num_channels", Some(channels))?,
            labels: if labels.iter().enumerate().all(|(id, label)| *label == format!("LABEL_{id}")) {
                Vec::new()
            } else {
                labels
            },
            ..spec.image.take().expect("the usual model has images")
        };
        let halves = vec![0.5; image.channels];
        spec.max_positions = image.positions();
        spec.image = Some(ImageSpec { resize: image.size, mean: halves.clone(), std: halves, ..image });
        spec.ffn_dim = keys.size("intermediate_size", Some(3072))?;
        spec.activation = keys.activation("hidden_act", "gelu")?;
        spec.norm_eps = keys.number("layer_norm_eps")?.unwrap_or(1e-12);
        spec.init_std = keys.number("initializer_range")?.unwrap_or(0.02);
        spec.qkv_bias = keys.flag("qkv_bias")?.unwrap_or(true);
        spec.dropout = keys.number("hidden_dropout_prob")?.unwrap_or(0.0);
        keys.attention_dropout("attention_probs_dropout_prob", 0.0)?;
        // Of masked image modelling and of the pooler, which classification has not.
        for key in ["encoder_stride", "pooler_act", "pooler_output_size"] {
            keys.take(key);
        }
        Ok(spec)
    }

    fn able(&self, _spec: &ModelSpec) -> std::result::Result<Vec<Class>, ConfigError> {
        Ok(vec![CLASS])
    }

    fn write_config(&self, spec: &ModelSpec, _class: Class, keys: &mut Written) {
        keys.set("hidden_size", json!(spec.dim));
        keys.set("num_hidden_layers", json!(spec.layers));
        keys.set("num_attention_heads", json!(spec.heads));
        keys.set("intermediate_size", json!(spec.ffn_dim));
        keys.set("hidden_act", json!(activation_name(spec.activation)));
        keys.set("layer_norm_eps", json!(spec.norm_eps));
        keys.set("qkv_bias", json!(spec.qkv_bias));
        keys.set("hidden_dropout_prob", json!(spec.dropout));
        keys.set("attention_probs_dropout_prob", json!(0.0));
        let Some(image) = &spec.image else { return };
        keys.set("image_size", json!(image.size));
        keys.set("patch_size", json!(image.patch));
        keys.set("num_channels", json!(image.channels));
        let label = |id: usize| image.labels.get(id).cloned().unwrap_or_else(|| format!("LABEL_{id}"));
        let names = (0..spec.vocab_size).map(|id| (id.to_string(), json!(label(id)))).collect::<Map<_, _>>();
        let numbers = (0..spec.vocab_size).map(|id| (label(id), json!(id))).collect::<Map<_, _>>();
        keys.set("id2label", Value::Object(names));
        keys.set("label2id", Value::Object(numbers));
    }
}

/// The names of the classes by number; empty if the file does not say.
fn labels(keys: &mut Keys) -> std::result::Result<Vec<String>, ConfigError> {
    keys.take("label2id");
    let count = keys.optional_size("num_labels")?;
    let Some(value) = keys.take("id2label").filter(|value| !value.is_null()) else {
        return Ok((0..count.unwrap_or(0)).map(|id| format!("LABEL_{id}")).collect());
    };
    let wrong = |found: String| ConfigError::Value {
        key: "id2label".into(),
        expected: "an object with the names of classes 0, 1, … without a gap",
        found,
    };
    let map = value.as_object().ok_or_else(|| wrong(value.to_string()))?;
    let name = |id: usize| {
        let name = map.get(&id.to_string()).and_then(Value::as_str);
        name.map(str::to_owned).ok_or_else(|| wrong(format!("{} entries, without class {id}", map.len())))
    };
    (0..map.len()).map(name).collect()
}
