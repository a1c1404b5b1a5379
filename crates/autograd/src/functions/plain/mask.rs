//! Masks: comparisons and logic make them, selection and filling use them. A mask is u32, 0 or 1,
//! and has no gradient.

use super::prelude::*;
use trainyard_tensor::cpu::elementwise::Compare;
use trainyard_tensor::cpu::plain::mask::{Logic, Side};

/// A function to masks, by name; it has no derivative.
#[derive(Clone, Debug)]
pub struct Mask(&'static str);

/// `a` where the mask is set, else `b`; inputs are a and b.
#[derive(Clone, Debug)]
pub struct Where {
    shapes: [Shape; 2],
}

/// A number where the mask is set, else `x`.
#[derive(Clone, Debug)]
pub struct MaskedFill;

macro_rules! comparisons {
    ($($(#[$doc:meta])* $name:ident($a:ident, $b:ident) = $how:ident($left:ident, $right:ident);)*) => {
        impl Tape<'_> {
            $($(#[$doc])* pub fn $name(&mut self, $a: &Var, $b: &Var) -> Result<Var> {
                let y = plain::compare(Compare::$how, $left.tensor(), $right.tensor())?;
                self.record_one(Mask(stringify!($name)), &[$a.into(), $b.into()], y, |_| Vec::new())
            })*
        }
    };
}

comparisons! {
    /// The mask `a > b`.
    gt(a, b) = Greater(a, b);
    /// The mask `a >= b`.
    ge(a, b) = GreaterEqual(a, b);
    /// The mask `a < b`.
    lt(a, b) = Greater(b, a);
    /// The mask `a <= b`.
    le(a, b) = GreaterEqual(b, a);
    /// The mask `a == b`.
    eq(a, b) = Equal(a, b);
}

impl Tape<'_> {
    fn logic(&mut self, name: &'static str, f: Logic, a: &Var, b: &Var) -> Result<Var> {
        let y = plain::logic(f, a.tensor(), b.tensor())?;
        self.record_one(Mask(name), &[a.into(), b.into()], y, |_| Vec::new())
    }

    /// Set in both masks.
    pub fn logical_and(&mut self, a: &Var, b: &Var) -> Result<Var> {
        self.logic("logical_and", Logic::And, a, b)
    }

    /// Set in either mask.
    pub fn logical_or(&mut self, a: &Var, b: &Var) -> Result<Var> {
        self.logic("logical_or", Logic::Or, a, b)
    }

    /// Set in one mask alone.
    pub fn logical_xor(&mut self, a: &Var, b: &Var) -> Result<Var> {
        self.logic("logical_xor", Logic::Xor, a, b)
    }

    /// Set where the mask is not.
    pub fn logical_not(&mut self, mask: &Var) -> Result<Var> {
        let y = plain::logical_not(mask.tensor())?;
        self.record_one(Mask("logical_not"), &[mask.into()], y, |_| Vec::new())
    }

    /// A mask [queries, keys] that is set where a query may attend to a key: the key is no later,
    /// the last query being at the last key.
    pub fn causal_mask(&mut self, queries: usize, keys: usize) -> Result<Var> {
        let y = plain::causal_mask(self.device(), queries, keys)?;
        Ok(self.constant(y))
    }

    /// `a` where the mask is set, else `b`; all three broadcast together. (`where` is a word of the
    /// language.)
    pub fn where_(&mut self, mask: &Var, a: &Var, b: &Var) -> Result<Var> {
        let y = plain::select(mask.tensor(), a.tensor(), b.tensor())?;
        let function = Where { shapes: [*a.tensor().shape(), *b.tensor().shape()] };
        self.record_one(function, &[a.into(), b.into()], y, |tape| vec![tape.save(mask)])
    }

    /// `x` with `value` where the mask, which broadcasts to the shape of `x`, is set.
    pub fn masked_fill(&mut self, x: &Var, mask: &Var, value: f32) -> Result<Var> {
        let y = plain::masked_fill(x.tensor(), mask.tensor(), value)?;
        self.record_one(MaskedFill, &[x.into()], y, |tape| vec![tape.save(mask)])
    }
}

impl Differentiable for Mask {
    fn backward(&self, _: &mut Backward<'_>) -> Result<()> {
        Err(AutogradError::NotDifferentiable(self.0))
    }
}

impl Differentiable for Where {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = cx.output_gradient(0) else { return Ok(()) };
        let mask = cx.saved(0)?;
        for (index, side) in [Side::Set, Side::Unset].into_iter().enumerate() {
            if cx.wants(index)? {
                let gradient = plain::keep(&dy, &mask, side)?;
                cx.add_gradient(index, plain::sum_to(gradient, &self.shapes[index])?)?;
            }
        }
        Ok(())
    }
}

impl Differentiable for MaskedFill {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = cx.output_gradient(0) else { return Ok(()) };
        let dx = plain::keep(&dy, &cx.saved(0)?, Side::Unset)?;
        cx.add_gradient(0, dx)
    }
}
