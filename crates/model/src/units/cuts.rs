//! The splits of the families' parameters over a tensor-parallel group: for each parameter how it
//! lies on the axis. [`Division`](crate::split::Division) turns a row into shapes and places.

use crate::spec::Family;

/// The way in which a parameter lies on the tensor axis.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cut {
    /// Rows are tokens of the vocabulary, divided.
    VocabularyRows,
    /// Rows are those of query, key and value heads, divided by heads.
    HeadRows,
    /// Columns are those of query heads, divided by heads.
    HeadColumns,
    /// Rows are columns of the MLP, divided.
    FfnRows,
    /// Rows are columns of the MLP for the gate, then as many for the product, each divided.
    GateUpRows,
    /// Columns are columns of the MLP, divided.
    FfnColumns,
    /// Whole, for compute on the residual stream.
    Residual,
    /// Whole, for compute on each head.
    EachHead,
}

const GPT2: &[(&str, Cut)] = &[
    ("tokens.weight", Cut::VocabularyRows),
    ("positions.weight", Cut::Residual),
    ("norm1.weight", Cut::Residual),
    ("norm1.bias", Cut::Residual),
    ("attn.qkv.weight", Cut::HeadRows),
    ("attn.qkv.bias", Cut::HeadRows),
    ("attn.out.weight", Cut::HeadColumns),
    ("attn.out.bias", Cut::Residual),
    ("norm2.weight", Cut::Residual),
    ("norm2.bias", Cut::Residual),
    ("mlp.up.weight", Cut::FfnRows),
    ("mlp.up.bias", Cut::FfnRows),
    ("mlp.down.weight", Cut::FfnColumns),
    ("mlp.down.bias", Cut::Residual),
    ("norm.weight", Cut::Residual),
    ("norm.bias", Cut::Residual),
    ("lm.weight", Cut::VocabularyRows),
];

const LLAMA: &[(&str, Cut)] = &[
    ("tokens.weight", Cut::VocabularyRows),
    ("norm1.weight", Cut::Residual),
    ("attn.qkv.weight", Cut::HeadRows),
    ("attn.qkv.bias", Cut::HeadRows),
    ("attn.q_norm.weight", Cut::EachHead),
    ("attn.k_norm.weight", Cut::EachHead),
    ("attn.out.weight", Cut::HeadColumns),
    ("attn.out.bias", Cut::Residual),
    ("norm2.weight", Cut::Residual),
    ("mlp.up.weight", Cut::GateUpRows),
    ("mlp.up.bias", Cut::GateUpRows),
    ("mlp.down.weight", Cut::FfnColumns),
    ("mlp.down.bias", Cut::Residual),
    ("norm.weight", Cut::Residual),
    ("lm.weight", Cut::VocabularyRows),
];

/// The table of a family.
pub fn table(family: Family) -> &'static [(&'static str, Cut)] {
    match family {
        Family::Gpt2 => GPT2,
        Family::Llama => LLAMA,
    }
}
