//! Dropout (Srivastava et al. 2014). The mask is a function of (seed, step, site, element), so
//! nothing is saved.

use super::prelude::*;
use crate::RandomKey;
use std::ops::Range;
use std::sync::Arc;

/// One call; its input is x.
#[derive(Clone, Debug)]
pub struct Dropout {
    probability: f32,
    /// The elements of the whole tensor that x holds, range after range.
    parts: Arc<[Range<usize>]>,
    key: RandomKey,
}

impl Tape<'_> {
    /// Zeroes each element with `probability` and scales the rest by `1 / (1 - probability)`. The
    /// identity at 0 and on tapes that record nothing.
    pub fn dropout(&mut self, x: &Var, probability: f32, training: bool) -> Result<Var> {
        self.dropout_of(x, probability, training, std::slice::from_ref(&(0..x.tensor().elements())))
    }

    /// As [`Tape::dropout`], of a part of a tensor: x holds its elements `first ..` and gets the
    /// masks that they have in the whole.
    pub fn dropout_from(&mut self, x: &Var, probability: f32, training: bool, first: usize) -> Result<Var> {
        let part = first..first + x.tensor().elements();
        self.dropout_of(x, probability, training, std::slice::from_ref(&part))
    }

    /// As [`Tape::dropout`], of parts of a tensor: x holds its elements `parts`, range after range.
    pub fn dropout_of(&mut self, x: &Var, probability: f32, training: bool, parts: &[Range<usize>]) -> Result<Var> {
        if probability == 0.0 || !training {
            return Ok(x.clone());
        }
        let key = self.next_random();
        let y = ops::dropout_of(x.tensor(), probability, key, parts)?;
        self.record_one(Dropout { probability, parts: parts.into(), key }, &[x.into()], y, |_| Vec::new())
    }
}

impl Differentiable for Dropout {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = cx.output_gradient(0) else { return Ok(()) };
        let dx = ops::dropout_of(&dy, self.probability, self.key, &self.parts)?;
        cx.add_gradient(0, dx)
    }
}
