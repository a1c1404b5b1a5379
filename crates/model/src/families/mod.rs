//! Families of models. A family is one file here: the table of its parameters with their names in
//! Hugging Face files and their splits, the form of its blocks, and its `config.json`. [`FAMILIES`]
//! lists them. Nothing else says what a family's blocks or files are like, but for tokenizers in
//! GGUF files, which differ by other rules.
//!
//! To add a family, write a file with an implementation of [`Definition`] and add a line to
//! [`FAMILIES`]. Most families differ from Llama in a few choices of [`Form`]; one with another
//! kind of block returns it from [`Definition::block`]. `docs/families.md` has the steps.

mod dots1;
mod gemma3;
mod gpt2;
mod llama;
mod mixtral;
mod olmo2;
mod phi3;
mod qwen3_moe;
mod t5;
mod vit;

use crate::gguf;
use crate::hf::{ConfigError, Keys, Written};
use crate::parameter::{Init, ParameterKind, ParameterSpec};
use crate::rope::RopeTables;
use crate::spec::ModelSpec;
use crate::split::{ContextSplit, Cut, Division, ExpertSplit};
use crate::unit::{Slots, Unit};
use crate::units::Block;
use crate::{ModelError, Result};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use trainyard_autograd::ParamId;
pub use trainyard_autograd::functions::Gains;

/// GPT-2.
pub const GPT2: Family = Family(&gpt2::Gpt2);
/// Llama, Mistral, Qwen2, Qwen3 and SmolLM.
pub const LLAMA: Family = Family(&llama::Llama);
/// Gemma 3, text only.
pub const GEMMA3: Family = Family(&gemma3::Gemma3);
/// OLMo 2.
pub const OLMO2: Family = Family(&olmo2::Olmo2);
/// Phi-3 and Phi-4.
pub const PHI3: Family = Family(&phi3::Phi3);
/// Mixtral.
pub const MIXTRAL: Family = Family(&mixtral::Mixtral);
/// Qwen3-MoE.
pub const QWEN3_MOE: Family = Family(&qwen3_moe::Qwen3Moe);
/// The experts of DeepSeek-V3 behind plain attention.
pub const DOTS1: Family = Family(&dots1::Dots1);
/// T5, with an encoder and a decoder.
pub const T5: Family = Family(&t5::T5);
/// Vision Transformers.
pub const VIT: Family = Family(&vit::Vit);

/// Every family.
pub const FAMILIES: &[Family] = &[LLAMA, GPT2, GEMMA3, OLMO2, PHI3, MIXTRAL, QWEN3_MOE, DOTS1, T5, VIT];

/// A family, by reference to its definition.
#[derive(Clone, Copy)]
pub struct Family(&'static dyn Definition);

/// A family's description of itself.
pub trait Definition: Send + Sync {
    /// Its name in configurations and checkpoints: `llama`.
    fn name(&self) -> &'static str;

    /// Its name in prose: `Llama`.
    fn title(&self) -> &'static str;

    /// Its members and its parts in one line, for the list of values of `model.family`.
    fn about(&self) -> &'static str;

    /// Its `model_type`s, each with its class of transformers; the usual one first.
    fn classes(&self) -> &'static [Class];

    /// The prefix of all names in files but those of the head.
    fn prefix(&self) -> &'static str {
        "model."
    }

    /// Every parameter that a model of the family may have.
    fn parameters(&self) -> &'static [Row];

    /// Endings of the names of tensors that old files hold beside weights: masks and tables.
    fn buffers(&self) -> &'static [&'static str] {
        &[]
    }

    /// The shape of tensor `file` in files, where it is not that of its rows and columns.
    fn file_shape(&self, _spec: &ModelSpec, _file: &str) -> Option<Vec<usize>> {
        None
    }

    /// The form of its blocks.
    fn form(&self) -> Form;

    /// The forms of its GGUF files; none if they are not read.
    fn gguf(&self) -> &'static [gguf::Form] {
        &[]
    }

    /// A model of these sizes with everything else as is usual in the family.
    fn usual(&self, sizes: &Sizes) -> ModelSpec;

    /// The width of the MLP where none is given, and the rule in words.
    fn usual_ffn_dim(&self, dim: usize) -> (usize, String) {
        let because = format!("8/3 x dim {dim}, rounded up to a multiple of 64");
        ((8 * dim).div_ceil(3).next_multiple_of(64), because)
    }

    /// Checks what only this family demands of a description.
    ///
    /// # Errors
    /// The first field that prevents a model.
    fn validate(&self, spec: &ModelSpec) -> Result<()>;

    /// Translates the keys of a `config.json` of one of its model types, all but special tokens.
    ///
    /// # Errors
    /// A key that asks for something that is not available.
    fn read_config(&self, keys: &mut Keys, model_type: &str) -> std::result::Result<ModelSpec, ConfigError>;

    /// The classes of transformers that can express a description, the usual one first.
    ///
    /// # Errors
    /// There is none, with the reason.
    fn able(&self, spec: &ModelSpec) -> std::result::Result<Vec<Class>, ConfigError>;

    /// Writes the keys of a `config.json` for `class`: all but those that every class has.
    fn write_config(&self, spec: &ModelSpec, class: Class, keys: &mut Written);

    /// A catch of the export as `class`, for a warning before training.
    fn export_catch(&self, _spec: &ModelSpec, _class: Class) -> Option<&'static str> {
        None
    }

    /// Tensors that `class` insists on although the model has none, which as zeros change nothing.
    fn implied_zeros(&self, _spec: &ModelSpec, _class: Class) -> Vec<(String, Vec<usize>)> {
        Vec::new()
    }

    /// Block `layer`, unit `layer + 1`: the part of it that one rank has. `rope` are the tables of
    /// this layer, which other layers share.
    ///
    /// # Errors
    /// A block that cannot be split.
    fn block(
        &self,
        spec: &ModelSpec,
        layer: usize,
        rope: Option<Arc<RopeTables>>,
        share: Share<'_>,
    ) -> Result<Box<dyn Unit>> {
        let mut block = Block::new(spec, layer, rope);
        if let Some(division) = share.division {
            block = block.split(division)?;
        }
        if share.experts.ranks > 1 {
            block = block.spread(share.experts);
        }
        Ok(Box::new(if share.context.ranks > 1 { block.on_rows(share.context)? } else { block }))
    }
}

/// The part of a block that one rank has.
#[derive(Clone, Copy, Debug)]
pub struct Share<'a> {
    /// The shares of a tensor-parallel group in products; None if they are whole.
    pub division: Option<&'a Division>,
    /// The part of every sequence that the rank has.
    pub context: ContextSplit,
    /// The experts that the rank has.
    pub experts: ExpertSplit,
}

/// The sizes from which [`Definition::usual`] makes a description.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the fields of ModelSpec of these names")]
pub struct Sizes {
    pub vocab_size: usize,
    pub dim: usize,
    pub layers: usize,
    pub heads: usize,
    pub max_positions: usize,
}

/// A class of transformers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Class {
    /// The value of `model_type`.
    pub model_type: &'static str,
    /// The class with a language-model head.
    pub architecture: &'static str,
}

/// The form of a family's blocks, embedding and head: the choices that its members share.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Form {
    /// The input, and with it the first and the last unit.
    pub input: Input,
    /// The positions of its sequence that a position attends to.
    pub attention: AttentionKind,
    /// The normalisation.
    pub norm: NormKind,
    /// The gains of RMS norms as a function of their weights.
    pub gains: Gains,
    /// The norms of a half of a block.
    pub norms: NormPlaces,
    /// The norm of queries and keys, where `qk_norm` says that there is one.
    pub qk_norm: QkNormKind,
    /// The factor on looked-up tokens.
    pub embedding: EmbeddingScale,
    /// The source of positions.
    pub positions: Positions,
    /// The MLP.
    pub mlp: MlpKind,
    /// The heads that a block may have.
    pub heads: HeadsKind,
    /// The initial values of the products that end on the residual stream.
    pub residual_init: ResidualInit,
}

/// An input.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Input {
    /// Tokens of text: a token table in front, logits of the next token behind.
    Tokens,
    /// Pairs of texts: a token table in front, logits of the next token of the second text behind
    /// (Raffel et al. 2020).
    Pairs,
    /// Patches of an image behind a class token: a projection of patches in front, logits of the
    /// image's class behind (Dosovitskiy et al. 2020).
    Patches,
}

/// The positions of its sequence that a position attends to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AttentionKind {
    /// Itself and those before it.
    Causal,
    /// All.
    Full,
    /// In the encoder all; in the decoder itself and those before it, and all of the encoder's.
    Sides,
}

/// A normalisation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NormKind {
    /// LayerNorm (Ba et al. 2016), with a bias where `norm_bias` says so.
    Layer,
    /// RMSNorm (Zhang & Sennrich 2019).
    Rms,
}

/// The places of the norms of a half of a block, h = attention or MLP.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NormPlaces {
    /// `x + h(norm(x))`
    Before,
    /// `x + norm(h(x))`
    After,
    /// `x + norm'(h(norm(x)))`
    Both,
}

/// The extent of the norm of queries, and of that of keys.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum QkNormKind {
    /// Each head by itself.
    EachHead,
    /// All heads of a token together.
    Whole,
}

/// The factor on looked-up tokens.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EmbeddingScale {
    /// None.
    One,
    /// `sqrt(dim)`
    SqrtDim,
}

/// The source of positions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Positions {
    /// A learned table that is added to the embedding.
    Learned,
    /// Rotations of queries and keys (Su et al. 2021).
    Rotary,
    /// Numbers for buckets of distances, added to scores (Raffel et al. 2020, section 2.1).
    Buckets,
}

/// An MLP.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MlpKind {
    /// `down act(up x)`.
    Plain,
    /// `down (act(gate x) * up x)` (Shazeer 2020).
    Gated,
    /// Plain with ReLU and its square, gated with another activation.
    ByActivation,
}

/// The heads that a block may have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HeadsKind {
    /// `dim / heads` wide, keys and values for each, no window.
    Plain,
    /// Of any width, keys and values for each, no window.
    OfOneKind,
    /// Of any even width; several may share keys and values; windows.
    Grouped,
}

/// The initial values of the products that end on the residual stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ResidualInit {
    /// As all others.
    Same,
    /// Smaller with depth, by `sqrt(2 layers)`, so that the variance of the stream does not grow
    /// with the number of blocks (Radford et al. 2019, section 2.3).
    Depth,
}

/// A parameter of a family: how it is called here and in files, and how it lies on the tensor axis.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Row {
    /// Its name in its unit: `attn.qkv.weight`.
    pub name: &'static str,
    /// How it is split over a tensor-parallel group.
    pub cut: Cut,
    /// The tensors of files that it is made of, one below the other; `{}` is the number of the
    /// layer, `{e}` that of an expert. One, or as many as the cut has parts ([`Cut::HeadRows`]:
    /// query, key, value, or key and value; [`Cut::GateUpRows`] and its relatives: gate, up); for
    /// each expert where the cut is of experts. Several of [`Cut::Residual`] are one row each. None
    /// for a parameter that no file has, so that its model is not exported.
    pub files: &'static [&'static str],
    /// True if files hold it transposed: [in, out].
    pub transposed: bool,
}

/// A row of a family's table.
pub const fn row(name: &'static str, cut: Cut, files: &'static [&'static str]) -> Row {
    Row { name, cut, files, transposed: false }
}

/// The row of a matrix that files hold transposed.
pub const fn transposed(name: &'static str, cut: Cut, files: &'static [&'static str]) -> Row {
    Row { name, cut, files, transposed: true }
}

impl Row {
    /// The name of tensor `file` in files, of block `layer`.
    pub fn file(&self, file: usize, layer: usize) -> String {
        self.files[file].replace("{}", &layer.to_string())
    }

    /// The tensors of files for a parameter of `rows` rows: their names and rows.
    fn sources(&self, spec: &ModelSpec, layer: usize, rows: usize) -> Vec<(String, usize)> {
        if self.files.is_empty() {
            return Vec::new();
        }
        let (q, kv) = (spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim);
        let experts = spec.experts.as_ref();
        let each = |parts: usize, rows: usize| -> Vec<(String, usize)> {
            let count = experts.map_or(0, |experts| experts.experts);
            let of = |e: usize, file: usize| (self.file(file, layer).replace("{e}", &e.to_string()), rows);
            (0..count).flat_map(|e| (0..parts).map(move |file| (e, file))).map(|(e, file)| of(e, file)).collect()
        };
        let parts = match self.cut {
            Cut::ExpertsUpRows => return each(2, experts.map_or(0, |experts| experts.ffn_dim)),
            Cut::ExpertsDownColumns => return each(1, spec.dim),
            Cut::SharedUpRows => vec![experts.map_or(0, |experts| experts.shared_ffn_dim); 2],
            Cut::HeadRows if self.files.len() == 3 => vec![q, kv, kv],
            Cut::HeadRows if self.files.len() == 2 => vec![kv, kv],
            Cut::GateUpRows if self.files.len() == 2 => vec![spec.ffn_dim; 2],
            Cut::Residual if self.files.len() > 1 => vec![1; self.files.len()],
            _ => vec![rows],
        };
        parts.into_iter().enumerate().map(|(file, rows)| (self.file(file, layer), rows)).collect()
    }
}

impl Family {
    /// The family called `name`.
    pub fn named(name: &str) -> Option<Family> {
        FAMILIES.iter().copied().find(|family| family.name() == name)
    }

    /// The family of a `model_type`.
    pub fn of_model_type(model_type: &str) -> Option<Family> {
        let has = |family: &&Family| family.classes().iter().any(|class| class.model_type == model_type);
        FAMILIES.iter().find(has).copied()
    }

    /// The row of the parameter called `name`.
    pub fn row(&self, name: &str) -> Option<&'static Row> {
        self.parameters().iter().find(|row| row.name == name)
    }
}

impl Deref for Family {
    type Target = dyn Definition;

    fn deref(&self) -> &Self::Target {
        self.0
    }
}

impl PartialEq for Family {
    fn eq(&self, other: &Family) -> bool {
        self.name() == other.name()
    }
}

impl Eq for Family {}

impl fmt::Debug for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Serialize for Family {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for Family {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Family, D::Error> {
        let name = String::deserialize(deserializer)?;
        let known = || FAMILIES.iter().map(|family| family.name()).collect::<Vec<_>>().join(", ");
        Family::named(&name)
            .ok_or_else(|| de::Error::custom(format!("no family is called `{name}`; there are: {}", known())))
    }
}

/// Adds parameters to a unit, with their names in files from the family's table.
#[derive(Debug)]
pub struct Parameters<'a> {
    spec: &'a ModelSpec,
    layer: usize,
    slots: Slots,
}

impl<'a> Parameters<'a> {
    /// For unit number `unit` of `spec`; `layer` is the number of the block, if it is one.
    pub fn new(spec: &'a ModelSpec, unit: u32, layer: usize) -> Parameters<'a> {
        Parameters { spec, layer, slots: Slots::new(unit) }
    }

    /// Adds a parameter. One that the family's table does not have gets no name in files: such a
    /// model can be trained, and neither exported nor split.
    pub fn add(&mut self, name: &str, shape: &[usize], init: Init, kind: ParameterKind) -> ParamId {
        let mut parameter = ParameterSpec::new(name, shape, init, kind, String::new());
        let row = self.spec.family.row(name);
        let sources = row.map(|row| row.sources(self.spec, self.layer, shape.first().copied().unwrap_or(1)));
        parameter = parameter.fused(&sources.unwrap_or_default());
        for source in &mut parameter.sources {
            source.file_shape = self.spec.family.file_shape(self.spec, &source.hf_name);
        }
        self.slots.add(if row.is_some_and(|row| row.transposed) { parameter.transposed() } else { parameter })
    }

    /// The weight of a product, [out, in], normal with the model's deviation.
    pub fn matrix(&mut self, name: &str, shape: [usize; 2]) -> ParamId {
        self.scaled(name, shape, self.spec.init_std / self.spec.width_factor().sqrt())
    }

    /// As [`Parameters::matrix`], for a product whose number of outputs does not grow with the
    /// model's width: scores of tokens or of experts.
    pub fn readout(&mut self, name: &str, shape: [usize; 2]) -> ParamId {
        self.scaled(name, shape, self.spec.init_std / self.spec.width_factor())
    }

    /// A table with `rows` rows of the residual stream's width. Where the family multiplies what is
    /// looked up by a number that grows with the width, muP takes it back from the values and from
    /// their learning rate.
    pub fn table(&mut self, name: &str, rows: usize) -> ParamId {
        let share = match self.spec.family.form().embedding {
            EmbeddingScale::One => 1.0,
            EmbeddingScale::SqrtDim => self.spec.width_factor().sqrt().recip(),
        };
        let (shape, std) = ([rows, self.spec.dim], self.spec.init_std * share);
        let id = self.add(name, &shape, normal(std), ParameterKind::Embedding);
        self.slots.set_rate(id, share);
        id
    }

    /// A matrix whose number of inputs grows with the model's width. With Adam the learning rate
    /// falls as the width grows (Yang et al. 2022, table 3).
    fn scaled(&mut self, name: &str, shape: [usize; 2], std: f64) -> ParamId {
        let id = self.add(name, &shape, normal(std), ParameterKind::Matrix);
        self.slots.set_rate(id, 1.0 / self.spec.width_factor());
        id
    }

    /// As [`Parameters::matrix`], for a product that ends on the residual stream.
    pub fn residual_matrix(&mut self, name: &str, shape: [usize; 2]) -> ParamId {
        let std = match self.spec.family.form().residual_init {
            ResidualInit::Same => self.spec.init_std,
            ResidualInit::Depth => self.spec.init_std / (2.0 * self.spec.layers as f64).sqrt(),
        };
        self.scaled(name, shape, std / self.spec.width_factor().sqrt())
    }

    /// The gains of a norm over `size` elements: ones, whatever the family writes for them.
    pub fn gain(&mut self, name: &str, size: usize) -> ParamId {
        let init = match self.spec.family.form().gains {
            Gains::Weight => Init::Ones,
            Gains::OnePlusWeight => Init::Zeros,
        };
        self.add(name, &[size], init, ParameterKind::Norm)
    }

    /// An addend, zeros, if `present`.
    pub fn bias(&mut self, present: bool, name: &str, size: usize) -> Option<ParamId> {
        present.then(|| self.add(name, &[size], Init::Zeros, ParameterKind::Bias))
    }

    /// The model.
    pub fn spec(&self) -> &'a ModelSpec {
        self.spec
    }

    /// The number of the block.
    pub fn layer(&self) -> usize {
        self.layer
    }

    /// The parameters that were added.
    pub fn finish(self) -> Vec<ParameterSpec> {
        self.slots.finish()
    }
}

/// Normal around zero with this deviation.
pub(crate) fn normal(std: f64) -> Init {
    Init::Normal { std: std as f32 }
}

/// The error of a description that a family does not allow.
pub(crate) fn refuse<T>(field: &'static str, problem: impl Into<String>) -> Result<T> {
    Err(ModelError::Spec { field, problem: problem.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_model_types_are_of_one_family_and_rows_have_as_many_files_as_parts() {
        let mut names: Vec<&str> = FAMILIES.iter().map(|family| family.name()).collect();
        names.extend(FAMILIES.iter().flat_map(|family| family.classes().iter().skip(1).map(|class| class.model_type)));
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all, "{names:?}");
        for family in FAMILIES {
            // The embedding scales the sum of tokens and positions, where it scales.
            let form = family.form();
            assert!(form.positions != Positions::Learned || form.embedding == EmbeddingScale::One, "{family}");
            for (index, row) in family.parameters().iter().enumerate() {
                let parts: &[usize] = match row.cut {
                    Cut::HeadRows => &[1, 2, 3],
                    Cut::Residual | Cut::GateUpRows => &[1, 2],
                    Cut::ExpertsUpRows | Cut::SharedUpRows => &[2],
                    _ => &[1],
                };
                assert!(row.files.is_empty() || parts.contains(&row.files.len()), "{family} {row:?}");
                assert!(family.parameters()[..index].iter().all(|other| other.name != row.name), "{family} {row:?}");
            }
        }
    }
}
