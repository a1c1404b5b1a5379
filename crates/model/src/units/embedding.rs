//! The first unit: tokens to rows of the residual stream.

use crate::parameter::{Init, ParameterKind, ParameterSpec};
use crate::spec::{Family, ModelSpec};
use crate::unit::{Forward, Slots, Unit};
use crate::{Result, units};
use trainyard_autograd::{ParamId, Tape, Var};

/// Token table, plus learned positions in GPT-2, plus dropout.
#[derive(Debug)]
pub struct Embedding {
    parameters: Vec<ParameterSpec>,
    tokens: ParamId,
    positions: Option<ParamId>,
    dropout: f32,
}

impl Embedding {
    /// The slot of the token table, which a tied head borrows.
    pub const TOKENS: ParamId = ParamId::new(0, 0);

    /// The embedding of `spec`, unit 0.
    pub fn new(spec: &ModelSpec) -> Embedding {
        let mut slots = Slots::new(0);
        let prefix = units::prefix(spec);
        let mut table = |name: &str, rows: usize, hf_name: &str| {
            let init = Init::Normal { std: spec.init_std as f32 };
            let hf_name = format!("{prefix}{hf_name}.weight");
            slots.add(ParameterSpec::new(name, &[rows, spec.dim], init, ParameterKind::Embedding, hf_name))
        };
        let (tokens, positions) = match spec.family {
            Family::Gpt2 => (
                table("tokens.weight", spec.vocab_size, "wte"),
                Some(table("positions.weight", spec.max_positions, "wpe")),
            ),
            Family::Llama => (table("tokens.weight", spec.vocab_size, "embed_tokens"), None),
        };
        debug_assert_eq!(tokens, Embedding::TOKENS);
        Embedding { parameters: slots.finish(), tokens, positions, dropout: spec.dropout as f32 }
    }
}

impl Unit for Embedding {
    fn name(&self) -> &str {
        "embedding"
    }

    fn parameters(&self) -> &[ParameterSpec] {
        &self.parameters
    }

    fn forward(&self, tape: &mut Tape<'_>, cx: &mut Forward<'_>, _input: Option<&Var>) -> Result<Var> {
        let positions = self.positions.map(|table| (&cx.batch.positions, table));
        let x = tape.embedding(&cx.batch.tokens, self.tokens, positions)?;
        Ok(tape.dropout(&x, self.dropout, cx.training)?)
    }
}
