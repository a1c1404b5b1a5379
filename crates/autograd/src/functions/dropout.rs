//! Dropout (Srivastava et al. 2014). The mask is a function of (seed, step, site, element), so
//! nothing is saved.

use super::prelude::*;
use crate::RandomKey;

/// One call; its input is x.
#[derive(Clone, Debug)]
pub struct Dropout {
    probability: f32,
    key: RandomKey,
}

impl Tape<'_> {
    /// Zeroes each element with `probability` and scales the rest by `1 / (1 - probability)`. The
    /// identity at 0 and on tapes that record nothing.
    pub fn dropout(&mut self, x: &Var, probability: f32, training: bool) -> Result<Var> {
        if probability == 0.0 || !training {
            return Ok(x.clone());
        }
        let key = self.next_random();
        let y = ops::dropout(x.tensor(), probability, key)?;
        self.record_one(Dropout { probability, key }, &[x.into()], y, |_| Vec::new())
    }
}

impl Differentiable for Dropout {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = cx.output_gradient(0) else { return Ok(()) };
        let dx = ops::dropout(&dy, self.probability, self.key)?;
        cx.add_gradient(0, dx)
    }
}
