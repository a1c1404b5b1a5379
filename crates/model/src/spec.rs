//! The configuration of a model, as data.
//!
//! A [`ModelSpec`] holds every choice that changes the function computed or its initial weights.
//! All values are resolved: nothing is derived when it is read. [`presets`](crate::presets) fill it
//! in by name, and [`hf`](crate::hf) translates it from and to `config.json`.

use crate::families::{self, Family, Input, MlpKind, Positions, Sizes};
use crate::{ModelError, Result};
use serde::{Deserialize, Serialize};

/// The function inside the MLP.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// `x sigmoid(x)`; where it gates, SwiGLU.
    Silu,
    /// `x Φ(x)`
    Gelu,
    /// GELU's tanh form, which GPT-2 was trained with.
    GeluTanh,
    /// `max(x, 0)`
    Relu,
    /// `max(x, 0)²` (So et al. 2021, "Primer").
    ReluSquared,
}

/// Rotary position embedding (Su et al. 2021).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RopeSpec {
    /// Base of the wavelengths.
    pub theta: f64,
    /// The part of each head that is rotated.
    #[serde(default = "one")]
    pub partial_factor: f64,
    /// The rule that stretches wavelengths beyond the context of pre-training.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scaling: Option<RopeScaling>,
}

/// Rules of stretching rotary wavelengths; the fields are those of Hugging Face's
/// `rope_parameters`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase", deny_unknown_fields)]
pub enum RopeScaling {
    /// Every position divided by `factor` (Chen et al. 2023).
    Linear {
        /// New context over old.
        factor: f64,
    },
    /// Llama 3.1's: long wavelengths divided by `factor`, short ones kept, a blend between.
    Llama3 {
        /// New context over old.
        factor: f64,
        /// Wavelengths above `original_max_positions / low_freq_factor` are scaled fully.
        low_freq_factor: f64,
        /// Wavelengths below `original_max_positions / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// Context of pre-training.
        original_max_positions: usize,
    },
    /// YaRN (Peng et al. 2023): a blend by turns over the original context; cosines and sines are
    /// scaled too.
    Yarn {
        /// New context over old.
        factor: f64,
        /// Context of pre-training.
        original_max_positions: usize,
        /// Turns above which a wavelength is kept.
        #[serde(default = "thirty_two")]
        beta_fast: f64,
        /// Turns below which it is scaled fully.
        #[serde(default = "one")]
        beta_slow: f64,
        /// Factor on cosines and sines; when absent derived from `factor` and the two below.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        attention_factor: Option<f64>,
        /// Weight of `ln factor` in the attention factor's numerator.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        mscale: Option<f64>,
        /// The same in its denominator.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        mscale_all_dim: Option<f64>,
        /// True if the blend's ends are rounded outwards to whole dimensions.
        #[serde(default = "yes")]
        truncate: bool,
    },
}

fn one() -> f64 {
    1.0
}
fn thirty_two() -> f64 {
    32.0
}
fn yes() -> bool {
    true
}

/// The function from a router's logits to scores.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Gate {
    /// `e^l / Σ e^l` over all experts.
    Softmax,
    /// `1 / (1 + e^-l)` of each.
    Sigmoid,
}

/// A mixture of experts in the place of MLPs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpertsSpec {
    /// Experts to choose from.
    pub experts: usize,
    /// Experts that each token goes to.
    pub top_k: usize,
    /// Inner width of each expert.
    pub ffn_dim: usize,
    /// Inner width of the shared experts together, which see every token; 0: none.
    #[serde(default)]
    pub shared_ffn_dim: usize,
    /// From logits to scores.
    pub gate: Gate,
    /// True if a token's weights are its scores divided by their sum.
    pub normalise: bool,
    /// Factor of all weights.
    #[serde(default = "one")]
    pub scale: f64,
    /// True if a bias for each expert is added to scores where experts are chosen.
    #[serde(default)]
    pub selection_bias: bool,
    /// The layers with an MLP instead.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dense_layers: Vec<usize>,
    /// Factor of the auxiliary loss of each layer (Fedus et al. 2021).
    #[serde(default)]
    pub auxiliary_loss: f64,
    /// Factor of the router's z-loss of each layer (Zoph et al. 2022).
    #[serde(default)]
    pub z_loss: f64,
    /// Step by which the bias moves in each update (Wang et al. 2024).
    #[serde(default)]
    pub bias_update_rate: f64,
    /// The rows that an expert keeps of a micro-batch in training, over the mean; None keeps all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity_factor: Option<f64>,
}

impl ExpertsSpec {
    /// Experts in every layer, chosen by a softmax whose best `top_k` scores are normalised, and
    /// balanced by the auxiliary loss: Mixtral's.
    pub fn softmax(experts: usize, top_k: usize, ffn_dim: usize) -> ExpertsSpec {
        ExpertsSpec {
            experts,
            top_k,
            ffn_dim,
            shared_ffn_dim: 0,
            gate: Gate::Softmax,
            normalise: true,
            scale: 1.0,
            selection_bias: false,
            dense_layers: Vec::new(),
            auxiliary_loss: 0.001,
            z_loss: 0.0,
            bias_update_rate: 0.0,
            capacity_factor: None,
        }
    }

    fn validate(&self, layers: usize) -> Result<()> {
        let fail = |field, problem: String| Err(ModelError::Spec { field, problem });
        let ExpertsSpec { experts, top_k, ffn_dim, shared_ffn_dim, .. } = *self;
        if !(1..=1 << 14).contains(&experts) {
            return fail("experts.experts", format!("{experts} is not between 1 and {}", 1 << 14));
        }
        if !(1..=experts).contains(&top_k) {
            return fail("experts.top_k", format!("{top_k} of {experts} experts: give a number from 1 to {experts}"));
        }
        if !(1..=1 << 24).contains(&ffn_dim) || shared_ffn_dim > 1 << 24 {
            return fail(
                "experts.ffn_dim",
                format!("{ffn_dim} and shared {shared_ffn_dim}: from 1 (0) to {}", 1 << 24),
            );
        }
        if let Some(layer) = self.dense_layers.iter().find(|layer| **layer >= layers) {
            return fail("experts.dense_layers", format!("layer {layer} of a model with {layers} layers"));
        }
        for (field, value) in [
            ("experts.auxiliary_loss", self.auxiliary_loss),
            ("experts.z_loss", self.z_loss),
            ("experts.bias_update_rate", self.bias_update_rate),
        ] {
            if !(value >= 0.0 && value.is_finite()) {
                return fail(field, format!("{value} is no number from 0 on"));
            }
        }
        if self.bias_update_rate > 0.0 && !self.selection_bias {
            return fail("experts.bias_update_rate", "there is no bias to update: set selection_bias".into());
        }
        if !(self.scale > 0.0 && self.scale.is_finite()) {
            return fail("experts.scale", format!("{} is no positive number", self.scale));
        }
        if let Some(factor) = self.capacity_factor.filter(|factor| !(*factor > 0.0 && factor.is_finite())) {
            return fail("experts.capacity_factor", format!("{factor} is no positive number"));
        }
        Ok(())
    }
}

/// The images that a model classifies, and their preprocessing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageSpec {
    /// Pixels of a side of the square image.
    pub size: usize,
    /// Pixels of the shorter side to which an image is resized before its centre is cut out.
    pub resize: usize,
    /// Pixels of a side of a patch; divides `size`.
    pub patch: usize,
    /// Colour channels.
    pub channels: usize,
    /// The mean of each channel, of values from 0 to 1, which is subtracted.
    pub mean: Vec<f64>,
    /// The deviation of each channel, by which the difference is divided.
    pub std: Vec<f64>,
    /// The names of the classes; empty if they have none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub labels: Vec<String>,
}

impl ImageSpec {
    /// Patches of an image.
    pub fn patches(&self) -> usize {
        (self.size / self.patch.max(1)).pow(2)
    }

    /// Numbers of a patch.
    pub fn patch_len(&self) -> usize {
        self.channels * self.patch * self.patch
    }

    /// Positions of an image: the class token's and those of its patches.
    pub fn positions(&self) -> usize {
        1 + self.patches()
    }

    /// Checks that images can be cut into patches, for a model with so many classes.
    pub(crate) fn validate(&self, classes: usize) -> Result<()> {
        let fail = |field, problem: String| Err(ModelError::Spec { field, problem });
        let ImageSpec { size, patch, channels, .. } = *self;
        if !(1..=1 << 14).contains(&size) || patch == 0 || !size.is_multiple_of(patch) {
            return fail("image.patch", format!("patches of {patch} do not divide images of {size} pixels"));
        }
        if !(1..=1 << 14).contains(&self.resize) {
            return fail("image.resize", format!("{} is not between 1 and {}", self.resize, 1 << 14));
        }
        if !(1..=64).contains(&channels) {
            return fail("image.channels", format!("{channels} is not between 1 and 64"));
        }
        if self.mean.len() != channels || self.std.len() != channels {
            let found = format!("{} means and {} deviations", self.mean.len(), self.std.len());
            return fail("image.mean", format!("{found} for {channels} channels"));
        }
        if self.mean.iter().any(|mean| !mean.is_finite()) || self.std.iter().any(|std| !(*std > 0.0 && std.is_finite()))
        {
            return fail("image.std", "means must be finite and deviations positive".into());
        }
        if !self.labels.is_empty() && self.labels.len() != classes {
            return fail("image.labels", format!("{} names for {classes} classes", self.labels.len()));
        }
        Ok(())
    }
}

/// The encoder of a model that has one beside its decoder (Raffel et al. 2020), and the positions
/// of both.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EncoderSpec {
    /// Its blocks, the first of all; the others are the decoder's.
    pub layers: usize,
    /// The number of buckets of distances, each with a number that is added to scores.
    pub buckets: usize,
    /// The distance from which on all are in one bucket.
    pub max_distance: usize,
}

impl EncoderSpec {
    /// The encoder's part of `length` positions, where nothing else is known: that of the published
    /// pre-training, 512 of 626.
    pub fn usual_positions(length: usize) -> usize {
        (length * 512).div_ceil(626).min(length.saturating_sub(1)).max(1)
    }

    fn validate(&self, layers: usize) -> Result<()> {
        let fail = |field, problem: String| Err(ModelError::Spec { field, problem });
        if self.layers == 0 || self.layers >= layers {
            return fail("encoder.layers", format!("{} of {layers}: both sides need one", self.layers));
        }
        if self.buckets < 4 || !self.buckets.is_multiple_of(4) || self.buckets > 1 << 16 {
            return fail("encoder.buckets", format!("{} is no multiple of 4 up to {}", self.buckets, 1 << 16));
        }
        if self.max_distance <= self.buckets / 2 || self.max_distance > 1 << 24 {
            let bounds = format!("above half of the {} buckets and at most {}", self.buckets, 1 << 24);
            return fail("encoder.max_distance", format!("{} is not {bounds}", self.max_distance));
        }
        Ok(())
    }
}

/// A model, resolved. Symbols: d = `dim`, h = `heads`, h_kv = `kv_heads`, c = `head_dim`, f =
/// `ffn_dim`, v = `vocab_size`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelSpec {
    /// The family: the form of its blocks.
    pub family: Family,
    /// Rows of the token table; of a model of images, its classes.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub dim: usize,
    /// Blocks; those of an encoder, where there is one, and of the decoder together.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; divides `heads`. Fewer than `heads` is grouped-query attention (Ainslie et
    /// al. 2023).
    pub kv_heads: usize,
    /// Width of a head; `heads * head_dim` need not be `dim`.
    pub head_dim: usize,
    /// Inner width of the MLP.
    pub ffn_dim: usize,
    /// The most positions of a sequence.
    pub max_positions: usize,
    /// The function inside the MLP.
    pub activation: Activation,
    /// Added to the variance (LayerNorm) or mean square (RMSNorm).
    pub norm_eps: f64,
    /// True if norms add a bias; LayerNorm only.
    #[serde(default)]
    pub norm_bias: bool,
    /// True if the query, key and value projections have biases.
    #[serde(default)]
    pub qkv_bias: bool,
    /// True if the projection after attention has a bias.
    #[serde(default)]
    pub o_bias: bool,
    /// True if the products of the MLP have biases.
    #[serde(default)]
    pub mlp_bias: bool,
    /// RMSNorm on each query and key head before the rotation (Qwen3).
    #[serde(default)]
    pub qk_norm: bool,
    /// True if all blocks but the first mix their values with those of the first (Zhou et al.
    /// 2024).
    #[serde(default, skip_serializing_if = "is_false")]
    pub value_residual: bool,
    /// True if the head multiplies by the token table (Press & Wolf 2017).
    #[serde(default)]
    pub tie_embeddings: bool,
    /// Experts in the place of MLPs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts: Option<ExpertsSpec>,
    /// Rotary positions; absent exactly in families that learn theirs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rope: Option<RopeSpec>,
    /// Rotary positions of the layers with a window, where they are others (Gemma 3).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub local_rope: Option<RopeSpec>,
    /// The number by whose root scores are divided, where it is not `head_dim` (Gemma).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attention_scalar: Option<f64>,
    /// Maximum number of tokens that a query sees, including its own (Beltagy et al. 2020).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sliding_window: Option<usize>,
    /// The layers with a sliding window; all when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sliding_layers: Option<Vec<usize>>,
    /// The encoder; absent exactly in families that have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encoder: Option<EncoderSpec>,
    /// The images that it classifies; absent exactly in families of text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<ImageSpec>,
    /// Probability of dropping an element of the embedding's and of each residual branch's output,
    /// in training.
    #[serde(default)]
    pub dropout: f64,
    /// Standard deviation of initial weights.
    #[serde(default = "default_init_std")]
    pub init_std: f64,
    /// The width that `init_std` and the learning rate are for, if they are to be scaled from it to
    /// `dim` by the maximal update parametrisation (Yang et al. 2022).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mup_base_dim: Option<usize>,
    /// The token that begins a text, for generation and export.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bos_token: Option<u32>,
    /// The tokens that end a text.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub eos_tokens: Vec<u32>,
    /// The token that fills a batch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pad_token: Option<u32>,
    /// The `model_type` that it came as and is exported as again, where the usual one for this
    /// shape is another.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model_type: Option<String>,
}

/// The most blocks of a model.
pub(crate) const LAYERS_MAX: usize = 1 << 14;

fn is_false(flag: &bool) -> bool {
    !flag
}

fn default_init_std() -> f64 {
    0.02
}

impl ModelSpec {
    /// A GPT-2 of these sizes: heads of `dim / heads`, MLP of `4 dim`, tied, with biases, no
    /// dropout.
    pub fn gpt2(vocab_size: usize, dim: usize, layers: usize, heads: usize, max_positions: usize) -> ModelSpec {
        families::GPT2.usual(&Sizes { vocab_size, dim, layers, heads, max_positions })
    }

    /// A Llama of these sizes: as many key/value heads as query heads, heads of `dim / heads`,
    /// untied, plain rotary positions of base 10,000.
    pub fn llama(
        vocab_size: usize,
        dim: usize,
        layers: usize,
        heads: usize,
        ffn_dim: usize,
        max_positions: usize,
    ) -> ModelSpec {
        let usual = families::LLAMA.usual(&Sizes { vocab_size, dim, layers, heads, max_positions });
        ModelSpec { ffn_dim, ..usual }
    }

    /// Columns of the fused query/key/value matrix: `(h + 2 h_kv) c`.
    pub fn qkv_dim(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// `dim` over the width that the settings are for; 1 without such a width.
    pub fn width_factor(&self) -> f64 {
        self.mup_base_dim.map_or(1.0, |base| self.dim as f64 / base as f64)
    }

    /// Blocks of the decoder: all that are no encoder's.
    pub fn decoder_layers(&self) -> usize {
        self.layers - self.encoder.map_or(0, |encoder| encoder.layers)
    }

    /// True if MLPs are gated: a choice of the family, or of the activation where it has both.
    pub fn gates(&self) -> bool {
        match self.family.form().mlp {
            MlpKind::Plain => false,
            MlpKind::Gated => true,
            MlpKind::ByActivation => !matches!(self.activation, Activation::Relu | Activation::ReluSquared),
        }
    }

    /// The experts of `layer`; None if it has an MLP.
    pub fn experts_of(&self, layer: usize) -> Option<&ExpertsSpec> {
        self.experts.as_ref().filter(|experts| !experts.dense_layers.contains(&layer))
    }

    /// The window of `layer`, if it has one.
    pub fn window(&self, layer: usize) -> Option<usize> {
        self.sliding_window.filter(|_| self.sliding_layers.as_ref().is_none_or(|layers| layers.contains(&layer)))
    }

    /// Columns of a head that are rotated; 0 without rotary positions.
    pub fn rotary_dim(&self) -> usize {
        self.rope.as_ref().map_or(0, |rope| rope.columns(self.head_dim))
    }

    /// The rotary positions of `layer`.
    pub fn rope_of(&self, layer: usize) -> Option<&RopeSpec> {
        self.local_rope.as_ref().filter(|_| self.window(layer).is_some()).or(self.rope.as_ref())
    }

    /// The number of positions that have weights; None if positions are computed.
    pub fn learned_positions(&self) -> Option<usize> {
        (self.family.form().positions == Positions::Learned).then_some(self.max_positions)
    }

    /// Checks that a model can be built. The error names the first field that prevents it.
    pub fn validate(&self) -> Result<()> {
        let fail = |field, problem: String| Err(ModelError::Spec { field, problem });
        for (field, value, limit) in [
            ("vocab_size", self.vocab_size, 1 << 24),
            ("dim", self.dim, 1 << 20),
            ("layers", self.layers, LAYERS_MAX),
            ("heads", self.heads, 1 << 14),
            ("kv_heads", self.kv_heads, 1 << 14),
            ("head_dim", self.head_dim, 1 << 14),
            ("ffn_dim", self.ffn_dim, 1 << 24),
            ("max_positions", self.max_positions, 1 << 30),
        ] {
            if value == 0 || value > limit {
                return fail(field, format!("{value} is not between 1 and {limit}"));
            }
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return fail(
                "kv_heads",
                format!(
                    "{} does not divide heads = {}: each key/value head serves a whole group",
                    self.kv_heads, self.heads
                ),
            );
        }
        if !(self.norm_eps > 0.0 && self.norm_eps < 1.0) {
            return fail("norm_eps", format!("{} is not between 0 and 1", self.norm_eps));
        }
        if !(0.0..1.0).contains(&self.dropout) {
            return fail("dropout", format!("{} is no probability below 1", self.dropout));
        }
        if !(self.init_std > 0.0 && self.init_std.is_finite()) {
            return fail("init_std", format!("{} is not a positive number", self.init_std));
        }
        match self.mup_base_dim {
            Some(0) => return fail("mup_base_dim", "0 is no width".into()),
            Some(_) if self.tie_embeddings => {
                let why = "a table that is embedding and head cannot be scaled as both: set tie_embeddings = false";
                return fail("mup_base_dim", why.into());
            }
            _ => {}
        }
        if let Some(scalar) = self.attention_scalar.filter(|scalar| !(*scalar > 0.0 && scalar.is_finite())) {
            return fail("attention_scalar", format!("{scalar} is not a positive number"));
        }
        if let Some(local) = &self.local_rope {
            local.validate(self.head_dim)?;
        }
        if let Some(experts) = &self.experts {
            experts.validate(self.layers)?;
            if self.family.row("mlp.router.weight").is_none() {
                return fail("experts", format!("family {} has none; use mixtral, qwen3_moe or dots1", self.family));
            }
        }
        let of_images = self.family.form().input == Input::Patches;
        match &self.image {
            Some(image) if of_images => image.validate(self.vocab_size)?,
            None if of_images => return fail("image", format!("family {} needs the sizes of images", self.family)),
            Some(_) => return fail("image", format!("family {} is one of text; use vit", self.family)),
            None => {}
        }
        let of_pairs = self.family.form().input == Input::Pairs;
        match &self.encoder {
            Some(encoder) if of_pairs => encoder.validate(self.layers)?,
            None if of_pairs => return fail("encoder", format!("family {} needs one", self.family)),
            Some(_) => return fail("encoder", format!("family {} has none; use t5", self.family)),
            None => {}
        }
        self.family.validate(self)?;
        if let Some(why) = ModelSpec::without_value_residual(self.family, self.layers).filter(|_| self.value_residual) {
            return fail("value_residual", why);
        }
        match (self.sliding_window, &self.sliding_layers) {
            (Some(0), _) => return fail("sliding_window", "0: a token must at least see itself".into()),
            (None, Some(_)) => return fail("sliding_layers", "given without sliding_window".into()),
            (_, Some(layers)) => {
                if let Some(layer) = layers.iter().find(|layer| **layer >= self.layers) {
                    return fail("sliding_layers", format!("layer {layer} of a model with {} layers", self.layers));
                }
            }
            _ => {}
        }
        let tokens = self.bos_token.iter().chain(&self.eos_tokens).chain(&self.pad_token);
        if let Some(token) = tokens.into_iter().find(|token| **token as usize >= self.vocab_size) {
            return fail(
                "bos_token, eos_tokens, pad_token",
                format!("token {token} is outside of vocab_size = {}", self.vocab_size),
            );
        }
        Ok(())
    }
}

impl RopeSpec {
    /// Columns of a head of `head_dim` that are rotated, rounded down as the field does.
    pub fn columns(&self, head_dim: usize) -> usize {
        (head_dim as f64 * self.partial_factor) as usize
    }

    /// Checks the rotation of heads that are `head_dim` wide.
    pub(crate) fn validate(&self, head_dim: usize) -> Result<()> {
        let fail = |field, problem: String| Err(ModelError::Spec { field, problem });
        if !(self.theta > 1.0 && self.theta.is_finite()) {
            return fail("rope.theta", format!("{} is not a number above 1", self.theta));
        }
        if !(self.partial_factor > 0.0 && self.partial_factor <= 1.0) {
            return fail("rope.partial_factor", format!("{} is not in (0, 1]", self.partial_factor));
        }
        let rotary = self.columns(head_dim);
        if rotary == 0 || !rotary.is_multiple_of(2) {
            return fail(
                "head_dim",
                format!(
                    "{rotary} rotary columns (head_dim {} times rope.partial_factor {}): they rotate in pairs",
                    head_dim, self.partial_factor
                ),
            );
        }
        let numbers: &[(&str, f64)] = match &self.scaling {
            None => &[],
            Some(RopeScaling::Linear { factor }) => &[("factor", *factor)],
            Some(RopeScaling::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_positions,
            }) => {
                if low >= high {
                    return fail("rope.scaling", format!("low_freq_factor {low} is not below high_freq_factor {high}"));
                }
                &[
                    ("factor", *factor),
                    ("low_freq_factor", *low),
                    ("original_max_positions", *original_max_positions as f64),
                ]
            }
            Some(RopeScaling::Yarn {
                factor, original_max_positions, beta_fast, beta_slow, attention_factor, ..
            }) => &[
                ("factor", *factor),
                ("beta_fast", *beta_fast),
                ("beta_slow", *beta_slow),
                ("attention_factor", attention_factor.unwrap_or(1.0)),
                ("original_max_positions", *original_max_positions as f64),
            ],
        };
        match numbers.iter().find(|(_, value)| !(*value > 0.0 && value.is_finite())) {
            Some((name, value)) => fail("rope.scaling", format!("{name} = {value} is not a positive number")),
            None => Ok(()),
        }
    }
}
