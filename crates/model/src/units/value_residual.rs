//! Value residuals (Zhou et al. 2024, "Value Residual Learning"): all blocks attend to the values
//! `a V + b V_1`, V those that they compute themselves and V_1 those of the first block.
//!
//! The units of a model are one chain, so V_1 travels below the residual stream in one matrix: the
//! rows of the stream, [m, d], then V_1, [m, h_kv c], as so many rows of width d as it fills. The
//! first block makes these rows, blocks between hand them on, and the last takes them off, so that
//! the head sees the stream alone. Pipelines, shards, checkpointing, prices and memory know of no
//! second value. The price is a copy of the stream in each block but the last.
//!
//! a and b are numbers of each block that are learned and begin as a half (the paper's learnable
//! ResFormer; the paper's constant one keeps a half).

use crate::families::{AttentionKind, Input, Parameters};
use crate::parameter::{Init, ParameterKind};
use crate::spec::ModelSpec;
use crate::{Family, Result};
use trainyard_autograd::{ParamId, Tape, Var};
use trainyard_tensor::Purpose;
use trainyard_tensor::ops::HeadLayout;

/// The part of a block in them.
#[derive(Clone, Copy, Debug)]
pub(super) struct ValueResidual {
    /// The numbers a and b; None in the first block, whose values stay.
    weights: Option<ParamId>,
    /// True in the last block, which hands nothing on.
    is_last: bool,
    heads: HeadLayout,
    dim: usize,
}

/// V_1 on its way: rows of the width of the residual stream.
pub(super) struct Carried(Var);

impl ModelSpec {
    /// The reason why a model of so many blocks has no value residuals; None if it can have them.
    pub fn without_value_residual(family: Family, layers: usize) -> Option<String> {
        let form = family.form();
        if form.input != Input::Tokens || form.attention != AttentionKind::Causal {
            return Some(format!("family {family} has none; models of one decoder have them, such as gpt2 and llama"));
        }
        let why =
            "a model of one block has no values to mix with those of the first; leave it out, or take more blocks";
        (layers < 2).then(|| why.to_owned())
    }
}

impl ValueResidual {
    /// The part of block `layer` of `spec`, None without value residuals. Its weights come after
    /// the block's other parameters, whose initial values stay those of a model without.
    pub fn new(spec: &ModelSpec, layer: usize, parameters: &mut Parameters<'_>) -> Option<ValueResidual> {
        spec.value_residual.then(|| ValueResidual {
            weights: (layer > 0).then(|| {
                let half = Init::Constant { value: 0.5 };
                parameters.add("attn.value_residual", &[2], half, ParameterKind::Norm)
            }),
            is_last: layer + 1 == spec.layers,
            heads: HeadLayout { heads: spec.heads, kv_heads: spec.kv_heads, head_dim: spec.head_dim },
            dim: spec.dim,
        })
    }

    /// The residual stream of `tokens` tokens, and what is carried below it.
    pub fn enter(&self, tape: &mut Tape<'_>, input: &Var, tokens: usize) -> Result<(Var, Option<Carried>)> {
        if self.weights.is_none() {
            return Ok((input.clone(), None));
        }
        let [x, rows] = tape.split_at(input, 0, tokens)?;
        Ok((x, Some(Carried(rows))))
    }

    /// The queries, keys and values that the block attends over, [m, (h + 2 h_kv) c], and what it
    /// carries on.
    pub fn mix(&self, tape: &mut Tape<'_>, qkv: Var, carried: Option<Carried>) -> Result<(Var, Carried)> {
        let (width, tokens) = (self.heads.kv_heads * self.heads.head_dim, qkv.tensor().rows());
        match (self.weights, carried) {
            (Some(weights), Some(carried)) => {
                let flat = tape.reshape(&carried.0, &[carried.0.tensor().elements()])?;
                let first = tape.narrow(&flat, 0, 0, tokens * width)?;
                let first = tape.reshape(&first, &[tokens, width])?;
                Ok((tape.value_residual(qkv, self.heads, &first, weights)?, carried))
            }
            _ => {
                let first = tape.narrow(&qkv, -1, qkv.tensor().last_dim() - width, width)?;
                let carried = Carried(self.as_rows(tape, &first)?);
                Ok((qkv, carried))
            }
        }
    }

    /// The output `y` of the block, with what is carried below it.
    pub fn leave(&self, tape: &mut Tape<'_>, y: Var, carried: Carried) -> Result<Var> {
        if self.is_last {
            return Ok(y);
        }
        Ok(tape.cat(&[&y, &carried.0], 0)?)
    }

    /// Values [m, h_kv c] as rows of the width of the residual stream, the last filled with zeros.
    fn as_rows(&self, tape: &mut Tape<'_>, values: &Var) -> Result<Var> {
        let elements = values.tensor().elements();
        let rows = elements.div_ceil(self.dim);
        let mut flat = tape.reshape(values, &[elements])?;
        let missing = rows * self.dim - elements;
        if missing > 0 {
            let dtype = flat.tensor().dtype();
            let zeros = tape.device().zeros([missing], dtype, Purpose::Activations)?;
            let zeros = tape.constant(zeros);
            flat = tape.cat(&[&flat, &zeros], 0)?;
        }
        Ok(tape.reshape(&flat, &[rows, self.dim])?)
    }
}
