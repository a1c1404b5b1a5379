//! The last unit: the final norm and the product with the vocabulary, fused with the loss.

use super::norm::Norm;
use super::{Embedding, matrix};
use crate::parameter::ParameterSpec;
use crate::spec::{Family, ModelSpec};
use crate::unit::{Forward, Output, Slots, Unit, require_input};
use crate::{Result, units};
use trainyard_autograd::{ParamId, Tape, Var};

/// Final norm and LM head. Tied, it has no matrix of its own and borrows the token table.
#[derive(Debug)]
pub struct Head {
    parameters: Vec<ParameterSpec>,
    norm: Norm,
    weight: ParamId,
    borrowed: Vec<ParamId>,
}

impl Head {
    /// The head of `spec` as unit number `unit`.
    pub fn new(spec: &ModelSpec, unit: u32) -> Head {
        let mut slots = Slots::new(unit);
        let norm_name = match spec.family {
            Family::Gpt2 => "ln_f",
            Family::Llama => "norm",
        };
        let norm = Norm::new(spec, &mut slots, "norm", &format!("{}{norm_name}", units::prefix(spec)));
        let (weight, borrowed) = if spec.tie_embeddings {
            (Embedding::TOKENS, vec![Embedding::TOKENS])
        } else {
            (slots.add(matrix(spec, "lm.weight", [spec.vocab_size, spec.dim], "lm_head.weight".into())), Vec::new())
        };
        Head { parameters: slots.finish(), norm, weight, borrowed }
    }
}

impl Unit for Head {
    fn name(&self) -> &str {
        "head"
    }

    fn parameters(&self) -> &[ParameterSpec] {
        &self.parameters
    }

    fn borrowed(&self) -> &[ParamId] {
        &self.borrowed
    }

    fn forward(&self, tape: &mut Tape<'_>, cx: &mut Forward<'_>, input: Option<&Var>) -> Result<Var> {
        let x = require_input("head", input)?;
        match cx.output {
            Output::Loss { scale } => {
                let h = self.norm.forward(tape, x)?;
                Ok(tape.linear_cross_entropy(&h, self.weight, cx.targets()?, scale)?)
            }
            Output::Logits => {
                let h = self.norm.forward(tape, x)?;
                Ok(tape.linear(&h, self.weight, Default::default())?)
            }
            Output::LastLogits => {
                let rows = x.tensor().rows();
                let last = tape.constant(x.tensor().narrow(rows - 1..rows)?);
                let h = self.norm.forward(tape, &last)?;
                Ok(tape.linear(&h, self.weight, Default::default())?)
            }
        }
    }
}
