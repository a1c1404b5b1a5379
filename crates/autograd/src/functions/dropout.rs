//! Dropout (Srivastava et al. 2014). The mask is a function of (seed, step, site, element), so
//! nothing is saved.

use super::prelude::*;
use crate::RandomKey;

/// One call; its input is x.
#[derive(Clone, Debug)]
pub struct Dropout {
    probability: f32,
    /// The element of the whole tensor that is the first of x.
    first: usize,
    key: RandomKey,
}

impl Tape<'_> {
    /// Zeroes each element with `probability` and scales the rest by `1 / (1 - probability)`. The
    /// identity at 0 and on tapes that record nothing.
    pub fn dropout(&mut self, x: &Var, probability: f32, training: bool) -> Result<Var> {
        self.dropout_from(x, probability, training, 0)
    }

    /// As [`Tape::dropout`], of a part of a tensor: x holds its elements `first ..` and gets the
    /// masks that they have in the whole.
    pub fn dropout_from(&mut self, x: &Var, probability: f32, training: bool, first: usize) -> Result<Var> {
        if probability == 0.0 || !training {
            return Ok(x.clone());
        }
        let key = self.next_random();
        let y = ops::dropout_from(x.tensor(), probability, key, first)?;
        self.record_one(Dropout { probability, first, key }, &[x.into()], y, |_| Vec::new())
    }
}

impl Differentiable for Dropout {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = cx.output_gradient(0) else { return Ok(()) };
        let dx = ops::dropout_from(&dy, self.probability, self.key, self.first)?;
        cx.add_gradient(0, dx)
    }
}
