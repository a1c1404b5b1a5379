//! Resolves `[model]` and `[optimizer]`, the two sections whose keys depend most on each other.

use super::presets::activation;
use super::resolve::{Inputs, ModelSource, OptimizerSettings, Resolver, Rope};
use super::resolve_images::ImageSettings;
use super::sections::*;
use super::sections_experts::*;
use super::{Config, ConfigError, DeviceKind, Origin, Parallel, Section};
use serde::Serialize;
use trainyard_model::families::{self, HeadsKind, MlpKind, Positions, Sizes};
use trainyard_model::{ExpertsSpec, Family, Gate, ImageSpec, ModelSpec};

/// Keys of `[model]` that may be given beside a Hugging Face folder.
const BESIDE_PATH: [&str; 4] = ["preset", "path", "load_weights", "dropout"];

/// Keys of `[experts]` that may be given beside a Hugging Face folder.
const BALANCE: [&str; 4] = ["auxiliary_loss", "z_loss", "bias_update_rate", "capacity_factor"];

/// Upper limit for the rows of the embedding: more than any tokenizer has tokens.
const VOCABULARY_MAX: u64 = 1 << 24;

/// A model's shape. It is complete except for the vocabulary, which is unknown until there is a
/// tokenizer.
#[derive(Clone, PartialEq, Debug, Serialize)]
#[allow(missing_docs, reason = "each field is a key of [model] and documented there")]
pub struct ModelShape {
    pub family: Family,
    pub dim: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub ffn_dim: usize,
    pub vocab_size: Option<usize>,
    pub max_sequence_length: usize,
    pub norm_eps: f64,
    /// `None` for learned positions.
    pub rope: Option<Rope>,
    pub tie_embeddings: bool,
    pub qkv_bias: bool,
    pub output_bias: bool,
    pub mlp_bias: bool,
    pub qk_norm: bool,
    pub value_residual: bool,
    pub sliding_window: Option<usize>,
    pub activation: Activation,
    pub dropout: f64,
    pub init_std: f64,
    pub mup_base_dim: Option<usize>,
    pub experts: Option<ExpertsSpec>,
    /// Blocks of the encoder; `None` for families without one.
    pub encoder_layers: Option<usize>,
    pub image: Option<ImageSpec>,
}

impl OptimizerName {
    /// True if the rule looks at whole matrices, which then must lie whole on a rank.
    pub fn looks_at_matrices(self) -> bool {
        matches!(self, OptimizerName::Muon | OptimizerName::Adafactor | OptimizerName::Lamb)
    }
}

impl Resolver {
    pub(super) fn model(&mut self, inputs: &Inputs) -> ModelSource {
        let section = self.config.model.clone();
        if section.dropout < 0.0 || section.dropout >= 1.0 {
            let message =
                format!("model.dropout = {} is out of range: it must be at least 0 and below 1", section.dropout);
            self.problem("model.dropout", message);
        }
        match section.path.clone() {
            Some(path) => {
                if section.preset.is_some() {
                    self.problem(
                        "model.preset",
                        "model.preset and model.path are both given: keep the one that is meant",
                    );
                } else {
                    for key in section.keys().iter().map(|key| key.name).filter(|key| !BESIDE_PATH.contains(key)) {
                        if section.get(key).is_some() {
                            let message = format!(
                                "model.{key} is given beside model.path, whose config.json decides the shape: remove it"
                            );
                            self.problem(&format!("model.{key}"), message);
                        }
                    }
                    let experts = self.config.experts.clone();
                    for key in experts.keys().iter().map(|key| key.name).filter(|key| !BALANCE.contains(key)) {
                        if experts.get(key).is_some() {
                            let message = format!(
                                "experts.{key} is given beside model.path, whose config.json decides the shape: remove it"
                            );
                            self.problem(&format!("experts.{key}"), message);
                        }
                    }
                }
                if let (Some(pretrained), Some(classes)) = (&inputs.pretrained, &inputs.classes)
                    && classes.len() != pretrained.vocab_size
                {
                    let message = format!(
                        "the model in model.path has {} classes, and the images have {}: a head for other classes is not \
                         made; begin with load_weights = false from a shape of your own",
                        pretrained.vocab_size,
                        classes.len()
                    );
                    self.problem("model.path", message);
                }
                if let (Some(pretrained), Some(vocabulary)) = (&inputs.pretrained, inputs.tokenizer_vocabulary)
                    && vocabulary > pretrained.vocab_size
                {
                    let rows = pretrained.vocab_size;
                    let message =
                        format!("the tokenizer has {vocabulary} tokens, but the model in model.path has only {rows}");
                    self.problem("model.path", message);
                }
                let because = "model.path is given";
                let load_weights = self.settle("model.load_weights", &section.load_weights, true, because);
                ModelSource::HuggingFace { path, load_weights }
            }
            None => {
                self.unused("model.load_weights", &section.load_weights, "without model.path there is nothing to load");
                ModelSource::Shape(Box::new(self.shape(&section, inputs)))
            }
        }
    }

    /// The value of a shape's key that has no default; a problem if it is missing.
    fn needed(&mut self, key: &str, given: Option<usize>, max: u64) -> usize {
        if given.is_none() {
            let message = format!(
                "{key} is not set: give model.preset, or model.path, or model.dim, model.layers and model.heads"
            );
            self.problem(key, message);
        }
        self.count(key, given.map(|n| n as u64), 1, max);
        given.map_or(1, |n| n.clamp(1, max as usize))
    }

    fn shape(&mut self, m: &ModelSection, inputs: &Inputs) -> ModelShape {
        let known = self.config.model.dim.is_some() || self.config.model.layers.is_some() || m.heads.is_some();
        let (dim, layers, heads) = if known || m.preset.is_some() {
            (
                self.needed("model.dim", m.dim, 1 << 20),
                self.needed("model.layers", m.layers, 1 << 14),
                self.needed("model.heads", m.heads, 1 << 14),
            )
        } else {
            (self.needed("model.dim", None, 1), 1, 1)
        };
        // A missing `dim` is already a problem; a harmless value avoids reporting it twice.
        let dim = if m.dim.is_some() { dim } else { heads.saturating_mul(2) };
        let family = self.settle("model.family", &m.family, families::LLAMA, "the usual today");
        let form = family.form();
        let plain_heads = form.heads == HeadsKind::Plain;
        let sizes = Sizes { vocab_size: m.vocab_size.unwrap_or(1), dim, layers, heads, max_positions: 1 };
        let usual = family.usual(&sizes);
        let because = format!("as {} has it", family.title());
        let as_usual = because.as_str();

        let because = match usual.kv_heads == heads {
            true => format!("as many as heads, {heads}"),
            false => because.clone(),
        };
        let kv_heads = self.settle("model.kv_heads", &m.kv_heads, usual.kv_heads, because);
        self.count("model.kv_heads", Some(kv_heads as u64), 1, 1 << 14);
        if plain_heads && kv_heads != heads {
            let message =
                format!("model.kv_heads = {kv_heads}: {family} has no grouped-query attention, so it must be {heads}");
            self.problem("model.kv_heads", message);
        } else if kv_heads > 0 && !heads.is_multiple_of(kv_heads) {
            let message = format!("model.kv_heads = {kv_heads} does not divide model.heads = {heads}");
            self.problem("model.kv_heads", message);
        }
        if m.head_dim.is_none() && !dim.is_multiple_of(heads) {
            let message =
                format!("model.heads = {heads} does not divide model.dim = {dim}; change one, or set model.head_dim");
            self.problem("model.heads", message);
        }
        let because = format!("dim {dim} / heads {heads}");
        let head_dim = self.settle("model.head_dim", &m.head_dim, (dim / heads).max(1), because);
        self.count("model.head_dim", Some(head_dim as u64), 1, 1 << 14);
        if plain_heads && head_dim.saturating_mul(heads) != dim {
            let message =
                format!("model.head_dim = {head_dim}: {family} wants heads {heads} x head_dim to be dim {dim}");
            self.problem("model.head_dim", message);
        } else if form.positions == Positions::Rotary && !head_dim.is_multiple_of(2) {
            let message =
                format!("a head_dim of {head_dim} is odd, and rotary positions turn pairs: make model.head_dim even");
            self.problem("model.head_dim", message);
        }
        let (ffn, because) = family.usual_ffn_dim(dim);
        let ffn_dim = self.settle("model.ffn_dim", &m.ffn_dim, ffn, because);
        self.count("model.ffn_dim", Some(ffn_dim as u64), 1, 1 << 24);

        let key = "model.max_sequence_length";
        let sequence_length = self.config.training.sequence_length;
        let positions = self.images.as_ref().map(ImageSettings::positions);
        let max_sequence_length = match (positions, m.max_sequence_length, sequence_length) {
            (Some(positions), given, _) => self.of_patches(key, given, positions),
            (None, Some(given), _) => given,
            (None, None, Some(length)) => self.settle(key, &None, length, "training.sequence_length"),
            // The missing training.sequence_length is reported elsewhere, once.
            (None, None, None) => 1,
        };
        self.count(key, Some(max_sequence_length as u64), 1, 1 << 24);
        let norm_eps = self.settle("model.norm_eps", &m.norm_eps, usual.norm_eps, as_usual);
        self.within("model.norm_eps", norm_eps, f64::MIN_POSITIVE, 0.1);
        let init_std = self.settle("model.init_std", &m.init_std, usual.init_std, "the usual");
        self.positive("model.init_std", Some(init_std));
        self.count("model.sliding_window", m.sliding_window.map(|n| n as u64), 1, 1 << 24);
        if plain_heads {
            let because = format!("{family} attends to everything before");
            self.unused("model.sliding_window", &m.sliding_window, &because);
        }
        if family.validate(&ModelSpec { qk_norm: true, ..usual.clone() }).is_err() {
            let because = format!("{family} has no query/key normalisation");
            self.unused("model.qk_norm", &m.qk_norm.filter(|norm| *norm), &because);
        }
        let mut flag = |key: &str, given: &Option<bool>, usual: bool| self.settle(key, given, usual, as_usual);
        let tie_embeddings = flag("model.tie_embeddings", &m.tie_embeddings, usual.tie_embeddings);
        let qkv_bias = flag("model.qkv_bias", &m.qkv_bias, usual.qkv_bias);
        let output_bias = flag("model.output_bias", &m.output_bias, usual.o_bias);
        let mlp_bias = flag("model.mlp_bias", &m.mlp_bias, usual.mlp_bias);
        self.mup(m, tie_embeddings);
        let activation = activation(usual.activation);
        let gated = form.mlp == MlpKind::Gated;
        if let Some(other) = m.activation.filter(|other| gated && *other != activation) {
            let message = format!("model.activation = {other}: the {family} family gates with {activation}");
            self.problem("model.activation", message);
        }
        ModelShape {
            family,
            dim,
            layers,
            heads,
            kv_heads,
            head_dim,
            ffn_dim,
            vocab_size: self.vocabulary(m, inputs),
            max_sequence_length,
            norm_eps,
            rope: self.rope(m, family, usual.rope.as_ref().map(|rope| rope.theta)),
            tie_embeddings,
            qkv_bias,
            output_bias,
            mlp_bias,
            qk_norm: m.qk_norm.unwrap_or(usual.qk_norm),
            value_residual: self.value_residual(m.value_residual, family, layers),
            sliding_window: m.sliding_window.or(usual.sliding_window),
            activation: self.settle("model.activation", &m.activation, activation, as_usual),
            dropout: m.dropout,
            init_std,
            mup_base_dim: m.mup_base_dim,
            experts: self.experts(family, &family.usual(&sizes), ffn_dim),
            encoder_layers: self.encoder_layers(family, layers),
            image: self.images.as_ref().map(|images| images.form.clone()),
        }
    }

    /// True if blocks mix their values with those of the first.
    fn value_residual(&mut self, given: Option<bool>, family: Family, layers: usize) -> bool {
        let asked = given == Some(true);
        if let Some(why) = ModelSpec::without_value_residual(family, layers).filter(|_| asked) {
            self.problem("model.value_residual", format!("model.value_residual = true: {why}"));
        }
        asked
    }

    /// Rejects ranks that would divide values which blocks hand on.
    pub(super) fn value_residual_divisions(&mut self, parallel: &Parallel) {
        for (key, degree) in [
            ("parallel.tensor_parallel_degree", parallel.tensor),
            ("parallel.context_parallel_degree", parallel.context),
        ] {
            if degree > 1 {
                let message = format!(
                    "{key} = {degree}: a model with model.value_residual is not divided so; use data ranks, \
                     parallel.zero_stage, parallel.pipeline_parallel_degree or parallel.expert_parallel_degree"
                );
                self.problem(key, message);
            }
        }
    }

    /// Checks the width that settings are scaled from.
    fn mup(&mut self, m: &ModelSection, tie_embeddings: bool) {
        let key = "model.mup_base_dim";
        self.count(key, m.mup_base_dim.map(|dim| dim as u64), 1, 1 << 20);
        if tie_embeddings && m.mup_base_dim.is_some() {
            let message = format!("{key} needs an embedding and a head of their own: set model.tie_embeddings = false");
            self.problem(key, message);
        }
        let optimizer = self.config.optimizer.name;
        if m.mup_base_dim.is_some() && !matches!(optimizer, OptimizerName::AdamW | OptimizerName::Lion) {
            let message = format!(
                "{key} scales learning rates as AdamW and Lion need it, and optimizer.name is \"{optimizer}\": leave one of them out"
            );
            self.problem(key, message);
        }
    }

    /// The experts of a shape whose MLPs are `ffn_dim` wide; `usual` has the family's.
    fn experts(&mut self, family: Family, usual: &ModelSpec, ffn_dim: usize) -> Option<ExpertsSpec> {
        let e = self.config.experts.clone();
        let Some(usual_experts) = &usual.experts else {
            let because = format!("family {family} has no experts; mixtral, qwen3_moe and dots1 have them");
            for key in e.keys().iter().map(|key| key.name) {
                self.unused(&format!("experts.{key}"), &e.get(key), &because);
            }
            return None;
        };
        let because = format!("as {} has it", family.title());
        let usual_of = |gate| if gate == Gate::Sigmoid { RouterGate::Sigmoid } else { RouterGate::Softmax };
        let mut size = |key: &str, given: &Option<usize>, usual: usize, least: u64| {
            let key = format!("experts.{key}");
            let value = self.settle(&key, given, usual, &because);
            self.count(&key, Some(value as u64), least, 1 << 24);
            value
        };
        let experts = size("count", &e.count, usual_experts.experts, 1);
        let top_k = size("top_k", &e.top_k, usual_experts.top_k.min(experts), 1);
        let parts = usual.ffn_dim.div_ceil(usual_experts.ffn_dim);
        let ffn_dim = size("ffn_dim", &e.ffn_dim, (ffn_dim / parts).max(1), 1);
        let shared = if usual_experts.shared_ffn_dim > 0 { ffn_dim } else { 0 };
        let shared_ffn_dim = size("shared_ffn_dim", &e.shared_ffn_dim, shared, 0);
        let dense_layers = size("dense_layers", &e.dense_layers, 0, 0);
        if top_k > experts {
            let message = format!("experts.top_k = {top_k}: there are only {experts} experts");
            self.problem("experts.top_k", message);
        }
        if dense_layers > usual.layers {
            let message = format!("experts.dense_layers = {dense_layers}: there are only {} layers", usual.layers);
            self.problem("experts.dense_layers", message);
        }
        let gate = self.settle("experts.gate", &e.gate, usual_of(usual_experts.gate), &because);
        let normalise = self.settle("experts.normalise", &e.normalise, usual_experts.normalise, &because);
        let mut factor = |key: &str, given: &Option<f64>, usual: f64, least: f64| {
            let key = format!("experts.{key}");
            let value = self.settle(&key, given, usual, &because);
            self.within(&key, value, least, 1e6);
            value
        };
        let scale = factor("scale", &e.scale, usual_experts.scale, f64::MIN_POSITIVE);
        let auxiliary_loss = factor("auxiliary_loss", &e.auxiliary_loss, usual_experts.auxiliary_loss, 0.0);
        let z_loss = factor("z_loss", &e.z_loss, usual_experts.z_loss, 0.0);
        let rate = factor("bias_update_rate", &e.bias_update_rate, usual_experts.bias_update_rate, 0.0);
        if let Some(factor) = e.capacity_factor {
            self.within("experts.capacity_factor", factor, f64::MIN_POSITIVE, 1e6);
        }
        Some(ExpertsSpec {
            experts,
            top_k,
            ffn_dim,
            shared_ffn_dim,
            gate: if gate == RouterGate::Sigmoid { Gate::Sigmoid } else { Gate::Softmax },
            normalise,
            scale,
            selection_bias: usual_experts.selection_bias || rate > 0.0,
            dense_layers: (0..dense_layers.min(usual.layers)).collect(),
            auxiliary_loss,
            z_loss,
            bias_update_rate: rate,
            capacity_factor: e.capacity_factor,
        })
    }

    fn vocabulary(&mut self, m: &ModelSection, inputs: &Inputs) -> Option<usize> {
        if self.images.is_some() {
            self.unused("model.vocab_multiple", &m.vocab_multiple, "the images say how many classes there are");
            return self.classes(m.vocab_size, inputs);
        }
        let key = "model.vocab_size";
        let from_preset = matches!(self.origin(key), Origin::Preset(_));
        let tokenizer = &self.config.tokenizer;
        let trained = tokenizer.path.is_none() && matches!(tokenizer.kind, None | Some(TokenizerKind::Bpe));
        let known = inputs.tokenizer_vocabulary.map(|n| (n, "the tokenizer's"));
        let known = known.or_else(|| {
            let asked = tokenizer.vocab_size.filter(|_| trained);
            asked.map(|n| (n, "tokenizer.vocab_size"))
        });
        self.count("model.vocab_multiple", m.vocab_multiple.map(|n| n as u64), 1, 1 << 16);
        self.count(key, m.vocab_size.map(|n| n as u64), 1, VOCABULARY_MAX);
        match (m.vocab_size, known) {
            (Some(given), Some((tokens, _))) if !from_preset => {
                if given < tokens {
                    let message =
                        format!("model.vocab_size = {given} has no row for some of the tokenizer's {tokens} tokens");
                    self.problem(key, message);
                }
                self.unused("model.vocab_multiple", &m.vocab_multiple, "model.vocab_size is given");
                Some(given)
            }
            (Some(given), None) => {
                if !from_preset {
                    self.unused("model.vocab_multiple", &m.vocab_multiple, "model.vocab_size is given");
                }
                Some(given)
            }
            (_, Some((tokens, whose))) => {
                let sentinels = self.spans.filter(|_| inputs.sentinels == 0).map_or(0, |spans| spans.lengths.spans);
                let because = "so that products with the embedding fill their tiles";
                let multiple = self.settle("model.vocab_multiple", &m.vocab_multiple, 64, because).max(1);
                let size = (tokens.max(1) + sentinels).checked_next_multiple_of(multiple).unwrap_or(usize::MAX);
                let instead = m.vocab_size.map(|n| format!(", instead of the preset's {n}")).unwrap_or_default();
                let more = if sentinels > 0 { format!(" and {sentinels} for spans") } else { String::new() };
                let because = format!("{whose} {tokens}{more}, rounded up to a multiple of {multiple}{instead}");
                self.fill(key, &size, because);
                self.count(key, Some(size as u64), 1, VOCABULARY_MAX);
                Some(size)
            }
            (None, None) => None,
        }
    }

    fn rope(&mut self, m: &ModelSection, family: Family, usual_theta: Option<f64>) -> Option<Rope> {
        let scaling = m.rope_scaling.unwrap_or(RopeScaling::None);
        let stretched = scaling != RopeScaling::None;
        let (llama3, yarn) = (scaling == RopeScaling::Llama3, scaling == RopeScaling::Yarn);
        if usual_theta.is_none() {
            let learned = format!("{family} has learned positions");
            self.unused("model.rope_theta", &m.rope_theta, &learned);
            self.unused("model.rope_scaling", &m.rope_scaling, &learned);
        }
        let none = format!("model.rope_scaling is {scaling}");
        if !stretched || usual_theta.is_none() {
            self.unused("model.rope_factor", &m.rope_factor, &none);
        }
        if !(llama3 || yarn) {
            self.unused("model.rope_original_length", &m.rope_original_length, &none);
        }
        if !llama3 {
            self.unused("model.rope_low_freq_factor", &m.rope_low_freq_factor, &none);
            self.unused("model.rope_high_freq_factor", &m.rope_high_freq_factor, &none);
        }
        if !yarn {
            self.unused("model.rope_beta_fast", &m.rope_beta_fast, &none);
            self.unused("model.rope_beta_slow", &m.rope_beta_slow, &none);
        }
        let theta = self.settle("model.rope_theta", &m.rope_theta, usual_theta?, "the usual");
        if theta <= 1.0 {
            self.problem("model.rope_theta", format!("model.rope_theta = {theta} must be greater than 1"));
        }
        if stretched && m.rope_factor.is_none() {
            let message = format!("model.rope_scaling = {scaling} needs model.rope_factor");
            self.problem("model.rope_scaling", message);
        }
        if let Some(factor) = m.rope_factor.filter(|factor| *factor < 1.0) {
            self.problem("model.rope_factor", format!("model.rope_factor = {factor} must be at least 1"));
        }
        self.count("model.rope_original_length", m.rope_original_length.map(|n| n as u64), 1, 1 << 24);
        if (llama3 || yarn) && m.rope_original_length.is_none() {
            let message = format!("model.rope_scaling = {scaling} needs model.rope_original_length");
            self.problem("model.rope_scaling", message);
        }
        let (mut low, mut high, mut fast, mut slow) = (1.0, 4.0, 32.0, 1.0);
        if llama3 {
            low = self.settle("model.rope_low_freq_factor", &m.rope_low_freq_factor, low, "Llama 3.1's");
            high = self.settle("model.rope_high_freq_factor", &m.rope_high_freq_factor, high, "Llama 3.1's");
            if low <= 0.0 || high <= low {
                let message = format!(
                    "model.rope_high_freq_factor = {high} must be above model.rope_low_freq_factor = {low}, and that above 0"
                );
                self.problem("model.rope_high_freq_factor", message);
            }
        }
        if yarn {
            fast = self.settle("model.rope_beta_fast", &m.rope_beta_fast, fast, "the paper's");
            slow = self.settle("model.rope_beta_slow", &m.rope_beta_slow, slow, "the paper's");
            if slow <= 0.0 || fast <= slow {
                let message = format!(
                    "model.rope_beta_fast = {fast} must be above model.rope_beta_slow = {slow}, and that above 0"
                );
                self.problem("model.rope_beta_fast", message);
            }
        }
        Some(Rope {
            theta,
            scaling,
            factor: m.rope_factor.unwrap_or(1.0),
            original_length: m.rope_original_length.unwrap_or(0),
            low_freq_factor: low,
            high_freq_factor: high,
            beta_fast: fast,
            beta_slow: slow,
        })
    }

    pub(super) fn optimizer(&mut self) -> OptimizerSettings {
        use OptimizerName::{Adafactor, AdamW, Lamb, Lion, Muon, Sgd};
        let o = self.config.optimizer.clone();
        let name = o.name;
        let usual = format!("the usual for {name}");
        let foreign = format!("{name} does not use it");
        let rate = match name {
            AdamW | Muon => 3e-4,
            Lion => 1e-4,
            Sgd => 0.1,
            Adafactor => 1e-3,
            Lamb => 2e-3,
        };
        let learning_rate = self.settle("optimizer.learning_rate", &o.learning_rate, rate, usual.as_str());
        self.positive("optimizer.learning_rate", Some(learning_rate));

        // Resolves one number of the update rule, with its default and its range. Reports a problem
        // if the rule has no such number.
        let mut number = |key: &str, given: &Option<f64>, rules: &[(OptimizerName, f64)], low: f64, high: f64| {
            let Some((_, default)) = rules.iter().find(|(rule, _)| *rule == name) else {
                self.unused(key, given, &foreign);
                return rules[0].1;
            };
            let value = self.settle(key, given, *default, usual.as_str());
            self.within(key, value, low, high);
            value
        };
        // The largest number below one: decays are in [0, 1).
        let below_one = 1.0 - f64::EPSILON / 2.0;
        let beta1 =
            number("optimizer.beta1", &o.beta1, &[(AdamW, 0.9), (Lion, 0.9), (Muon, 0.9), (Lamb, 0.9)], 0.0, below_one);
        let beta2 = number(
            "optimizer.beta2",
            &o.beta2,
            &[(AdamW, 0.95), (Lion, 0.99), (Muon, 0.95), (Lamb, 0.999)],
            0.0,
            below_one,
        );
        let eps = number("optimizer.eps", &o.eps, &[(AdamW, 1e-8), (Muon, 1e-8), (Lamb, 1e-6)], f64::MIN_POSITIVE, 1.0);
        let momentum = number("optimizer.momentum", &o.momentum, &[(Sgd, 0.9), (Muon, 0.95)], 0.0, below_one);
        let factored = number("optimizer.factored_decay", &o.factored_decay, &[(Adafactor, -0.8)], -1.0, -0.01);
        let update_clip = number("optimizer.update_clip", &o.update_clip, &[(Adafactor, 1.0)], 1e-6, 1e6);

        let variance_steps = o.freeze_variance_after;
        if !matches!(name, AdamW | Lamb) {
            self.unused("optimizer.freeze_variance_after", &variance_steps, &foreign);
        }
        self.count("optimizer.freeze_variance_after", variance_steps, 1, u64::MAX);

        self.state_bits(name, o.state_bits);
        if name == Lamb && matches!(self.config.compute.device, DeviceKind::Cuda(_)) {
            let message = "optimizer.name = \"lamb\" has no kernel for GPUs: take adamw, or compute.device = \"cpu\"";
            self.problem("optimizer.name", message);
        }
        let nesterov = match name {
            Sgd | Muon => self.settle("optimizer.nesterov", &o.nesterov, name == Muon, usual.as_str()),
            _ => {
                self.unused("optimizer.nesterov", &o.nesterov, &foreign);
                false
            }
        };
        if nesterov && momentum == 0.0 {
            self.problem("optimizer.nesterov", "optimizer.nesterov needs a momentum above 0");
        }
        let mut relative_step = false;
        if name == Adafactor {
            relative_step = self.settle("optimizer.relative_step", &o.relative_step, false, usual.as_str());
        } else {
            self.unused("optimizer.relative_step", &o.relative_step, &foreign);
        }
        let (mut matrix_learning_rate, mut muon_scale, mut iterations) = (learning_rate, MuonScale::Original, 5);
        if name == Muon {
            muon_scale = self.settle("optimizer.muon_scale", &o.muon_scale, muon_scale, usual.as_str());
            iterations =
                self.settle("optimizer.newton_schulz_steps", &o.newton_schulz_steps, iterations, usual.as_str());
            self.count("optimizer.newton_schulz_steps", Some(iterations as u64), 1, 20);
            let key = "optimizer.matrix_learning_rate";
            matrix_learning_rate = match muon_scale {
                MuonScale::Original => self.settle(key, &o.matrix_learning_rate, 0.02, usual.as_str()),
                MuonScale::MatchRmsAdamw => {
                    let because = "learning_rate, which muon_scale = match_rms_adamw makes fit";
                    self.settle(key, &o.matrix_learning_rate, learning_rate, because)
                }
            };
            self.positive(key, Some(matrix_learning_rate));
        } else {
            self.unused("optimizer.muon_scale", &o.muon_scale, &foreign);
            self.unused("optimizer.newton_schulz_steps", &o.newton_schulz_steps, &foreign);
            self.unused("optimizer.matrix_learning_rate", &o.matrix_learning_rate, &foreign);
        }
        if o.weight_decay < 0.0 {
            let message = format!("optimizer.weight_decay = {} must not be negative", o.weight_decay);
            self.problem("optimizer.weight_decay", message);
        } else if o.weight_decay * learning_rate.max(matrix_learning_rate) >= 1.0 {
            let message = format!(
                "optimizer.weight_decay = {} times the learning rate is at least 1, which would flip the sign of the weights",
                o.weight_decay
            );
            self.problem("optimizer.weight_decay", message);
        }
        if o.clip_norm < 0.0 {
            let message = format!("optimizer.clip_norm = {} must not be negative; 0 turns clipping off", o.clip_norm);
            self.problem("optimizer.clip_norm", message);
        }
        OptimizerSettings {
            name,
            learning_rate,
            matrix_learning_rate,
            beta1,
            beta2,
            eps,
            state_bits: o.state_bits,
            variance_steps: variance_steps.filter(|_| name == AdamW),
            weight_decay: o.weight_decay,
            momentum,
            nesterov,
            clip_norm: (o.clip_norm > 0.0).then_some(o.clip_norm),
            muon_scale,
            newton_schulz_steps: iterations,
            factored_decay: factored,
            update_clip,
            relative_step,
            averaging: self.averaging(),
            consolidation: self.consolidation(),
        }
    }

    /// Refuses numbers of bits that moments cannot have, and rules and devices without them.
    fn state_bits(&mut self, name: OptimizerName, bits: usize) {
        const KEY: &str = "optimizer.state_bits";
        match (bits, name) {
            (32, _) => {}
            (8, OptimizerName::AdamW) => {
                if matches!(self.config.compute.device, DeviceKind::Cuda(_)) {
                    let message =
                        format!("{KEY} = 8 has no kernel for GPUs: set it to 32, or compute.device = \"cpu\"");
                    self.problem(KEY, message);
                }
            }
            (8, _) => {
                let message = format!(
                    "{KEY} = 8 is for adamw: {name} keeps its state in 32 bits; set optimizer.name = \"adamw\", or {KEY} = 32"
                );
                self.problem(KEY, message);
            }
            _ => self.problem(KEY, format!("{KEY} = {bits}: moments have 32 bits or 8")),
        }
    }
}

impl Config {
    /// As [`Config::resolve`], for `[optimizer]` alone.
    ///
    /// # Errors
    ///
    /// Every problem of the update rule.
    pub fn resolve_optimizer(&self) -> Result<OptimizerSettings, ConfigError> {
        let mut r = Resolver::new(self.clone());
        let optimizer = r.optimizer();
        r.problems.into_result(optimizer)
    }
}
