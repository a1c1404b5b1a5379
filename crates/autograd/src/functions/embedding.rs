//! Token embedding, with learned positions where the family has them.

use super::prelude::*;

/// One call; inputs are the token table and, where present, the position table.
#[derive(Clone, Debug)]
pub struct Embedding {
    tokens: Tensor,
    positions: Option<Tensor>,
}

impl Tape<'_> {
    /// Row `tokens[i]` of `table` [v, d], plus row `positions[i]` of the position table: [m, d].
    pub fn embedding(&mut self, tokens: &Tensor, table: ParamId, positions: Option<(&Tensor, ParamId)>) -> Result<Var> {
        let weight = self.parameter(table)?;
        let position_weight = positions.map(|(_, id)| self.parameter(id)).transpose()?;
        let added = positions.zip(position_weight.as_ref()).map(|((p, _), w)| (p, &w.value));
        let y = ops::embedding(tokens, &weight.value, added)?;
        let mut inputs = vec![Operand::from(table)];
        inputs.extend(positions.map(|(_, id)| Operand::from(id)));
        let function = Embedding { tokens: tokens.clone(), positions: positions.map(|(p, _)| p.clone()) };
        self.record_one(function, &inputs, y, |_| Vec::new())
    }
}

impl Differentiable for Embedding {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = cx.output_gradient(0) else { return Ok(()) };
        let tables = [Some(&self.tokens), self.positions.as_ref()];
        for (index, rows) in tables.into_iter().enumerate() {
            let Some(rows) = rows else { continue };
            if let Some(mut target) = cx.gradient_target(index)? {
                ops::embedding_backward(&dy, rows, &mut target.tensor, target.overwrite)?;
            }
        }
        Ok(())
    }
}
