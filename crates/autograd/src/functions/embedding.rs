//! Token embedding, with learned positions where the family has them.

use super::prelude::*;
use trainyard_tensor::ops::TablePart;

/// One call; inputs are the token table and, where present, the position table.
#[derive(Clone, Debug)]
pub struct Embedding {
    tokens: Tensor,
    positions: Option<Tensor>,
    /// The rows of the token table that are here, if not all.
    part: Option<TablePart>,
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
        let positions = positions.map(|(p, _)| p.clone());
        let function = Embedding { tokens: tokens.clone(), positions, part: None };
        self.record_one(function, &inputs, y, |_| Vec::new())
    }

    /// Row `tokens[i]` of a table of which only `part` is here, zeros for rows that are elsewhere:
    /// [m, d]. The sum over all parts is the whole table's result.
    pub fn embedding_part(&mut self, tokens: &Tensor, table: ParamId, part: TablePart) -> Result<Var> {
        let weight = self.parameter(table)?;
        let y = ops::embedding_part(tokens, &weight.value, part)?;
        let function = Embedding { tokens: tokens.clone(), positions: None, part: Some(part) };
        self.record_one(function, &[table.into()], y, |_| Vec::new())
    }
}

impl Differentiable for Embedding {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = cx.output_gradient(0) else { return Ok(()) };
        let tables = [(Some(&self.tokens), self.part), (self.positions.as_ref(), None)];
        for (index, (rows, part)) in tables.into_iter().enumerate() {
            let Some(rows) = rows else { continue };
            if let Some(mut target) = cx.gradient_target(index)? {
                let part = part.unwrap_or(TablePart::all(target.tensor.rows()));
                ops::embedding_part_backward(&dy, rows, part, &mut target.tensor, target.overwrite)?;
            }
        }
        Ok(())
    }
}
