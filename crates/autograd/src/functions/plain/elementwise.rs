//! Arithmetic with broadcasting, and functions of one number.

use super::prelude::*;
use crate::RandomKey;
use trainyard_tensor::DType;
use trainyard_tensor::cpu::elementwise::{Binary as TwoOf, Unary as OneOf};
use trainyard_tensor::cpu::gemm::Activation;
use trainyard_tensor::cpu::plain::derivative::{Needs, needs};

/// A function of one number; saves whichever of argument and result its derivative is made from.
#[derive(Clone, Debug)]
pub struct Unary {
    function: OneOf,
}

/// A function of two numbers, broadcast together.
#[derive(Clone, Debug)]
pub struct Binary {
    function: TwoOf,
}

/// A function of a number and constants.
#[derive(Clone, Debug)]
pub enum WithNumber {
    /// `x + c`
    Add(f32),
    /// `c x`
    Scale(f32),
    /// `x^c`
    Power(f32),
    /// `min(max(x, low), high)`
    Clamp(f32, f32),
}

/// A change of dtype.
#[derive(Clone, Debug)]
pub struct Cast {
    /// The dtype of the gradient of a float; None for an integer, whose gradient is in the
    /// result's.
    from: Option<DType>,
}

/// `residual + dropout(x)`, the mask regenerated in backward; inputs are x and residual.
#[derive(Clone, Debug)]
pub struct DropoutAdd {
    probability: f32,
    key: RandomKey,
}

macro_rules! unary_methods {
    ($($(#[$doc:meta])* $name:ident = $function:ident;)*) => {
        impl Tape<'_> {
            $($(#[$doc])* pub fn $name(&mut self, x: &Var) -> Result<Var> { self.unary(OneOf::$function, x) })*
        }
    };
}

unary_methods! {
    /// `-x`
    neg = Neg;
    /// `|x|`; derivative 0 at 0.
    abs = Abs;
    /// `e^x`
    exp = Exp;
    /// `ln x`
    log = Ln;
    /// `√x`
    sqrt = Sqrt;
    /// `1 / √x`
    rsqrt = Rsqrt;
    /// `x²`
    square = Square;
    /// `1 / x`
    reciprocal = Reciprocal;
    /// `tanh x`
    tanh = Tanh;
    /// `1 / (1 + e^-x)`
    sigmoid = Sigmoid;
    /// The error function.
    erf = Erf;
    /// -1, 0 or 1; derivative 0.
    sign = Sign;
}

macro_rules! binary_methods {
    ($($(#[$doc:meta])* $name:ident = $function:ident;)*) => {
        impl Tape<'_> {
            $($(#[$doc])* pub fn $name(&mut self, a: &Var, b: &Var) -> Result<Var> {
                self.binary(TwoOf::$function, a, b)
            })*
        }
    };
}

binary_methods! {
    /// `a - b`
    sub = Sub;
    /// `a b`
    mul = Mul;
    /// `a / b`
    div = Div;
    /// The larger; equals share the gradient.
    maximum = Max;
    /// The smaller; equals share the gradient.
    minimum = Min;
    /// `a^b`
    pow = Pow;
}

impl Tape<'_> {
    fn unary(&mut self, function: OneOf, x: &Var) -> Result<Var> {
        let y = plain::unary(function, x.tensor())?;
        let result = y.clone();
        self.record_one(Unary { function }, &[x.into()], y, |tape| match needs(function) {
            Needs::Nothing => Vec::new(),
            Needs::Argument => vec![tape.save(x)],
            Needs::Result => vec![Saved::Tensor(result)],
        })
    }

    fn binary(&mut self, function: TwoOf, a: &Var, b: &Var) -> Result<Var> {
        let y = plain::binary(function, a.tensor(), b.tensor())?;
        self.record_one(Binary { function }, &[a.into(), b.into()], y, |tape| vec![tape.save(a), tape.save(b)])
    }

    fn with_number(&mut self, function: WithNumber, x: &Var) -> Result<Var> {
        let t = x.tensor();
        let (y, saves) = match function {
            WithNumber::Power(p) => (plain::power(t, p)?, true),
            WithNumber::Clamp(low, high) => (plain::clamp(t, low, high)?, true),
            WithNumber::Scale(factor) => (plain::with_number(TwoOf::Mul, t, factor)?, false),
            WithNumber::Add(number) => (plain::with_number(TwoOf::Add, t, number)?, false),
        };
        self.record_one(function, &[x.into()], y, |tape| if saves { vec![tape.save(x)] } else { Vec::new() })
    }

    /// `x + number`
    pub fn add_scalar(&mut self, x: &Var, number: f32) -> Result<Var> {
        self.with_number(WithNumber::Add(number), x)
    }

    /// `factor x`
    pub fn scale(&mut self, x: &Var, factor: f32) -> Result<Var> {
        self.with_number(WithNumber::Scale(factor), x)
    }

    /// `x^p` for a constant p.
    pub fn pow_scalar(&mut self, x: &Var, p: f32) -> Result<Var> {
        self.with_number(WithNumber::Power(p), x)
    }

    /// `min(max(x, low), high)`; infinite ends do not bound. The gradient passes from low to high
    /// inclusive.
    pub fn clamp(&mut self, x: &Var, low: f32, high: f32) -> Result<Var> {
        self.with_number(WithNumber::Clamp(low, high), x)
    }

    /// `max(x, 0)`
    pub fn relu(&mut self, x: &Var) -> Result<Var> {
        self.activate(x, Activation::Relu)
    }

    /// `x sigmoid(x)`
    pub fn silu(&mut self, x: &Var) -> Result<Var> {
        self.activate(x, Activation::Silu)
    }

    /// `x Φ(x)`, exactly; the approximation by tanh is [`Tape::activate`]'s.
    pub fn gelu(&mut self, x: &Var) -> Result<Var> {
        self.activate(x, Activation::GeluExact)
    }

    /// `x` in another float dtype; masks and indices become floats too, but pass no gradient on:
    /// stop it first.
    pub fn cast(&mut self, x: &Var, dtype: DType) -> Result<Var> {
        let from = x.tensor().dtype();
        if from == dtype {
            return Ok(x.clone());
        }
        let (y, from) = if from.is_float() {
            (ops::cast(x.tensor(), dtype)?, Some(from))
        } else {
            (plain::to_float(x.tensor(), dtype)?, None)
        };
        self.record_one(Cast { from }, &[x.into()], y, |_| Vec::new())
    }

    /// `residual + dropout(x)` in one pass; `residual + x` at probability 0 and when not training.
    pub fn dropout_add(&mut self, x: &Var, residual: &Var, probability: f32, training: bool) -> Result<Var> {
        if probability == 0.0 || !training {
            return self.add(residual, x);
        }
        let key = self.next_random();
        let y = plain::dropout_add(x.tensor(), residual.tensor(), probability, key)?;
        self.record_one(DropoutAdd { probability, key }, &[x.into(), residual.into()], y, |_| Vec::new())
    }
}

impl Differentiable for Unary {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = cx.output_gradient(0) else { return Ok(()) };
        let z = if needs(self.function) == Needs::Nothing { dy.clone() } else { cx.saved(0)? };
        let dx = plain::unary_backward(self.function, &dy, &z)?;
        cx.add_gradient(0, dx)
    }
}

impl Differentiable for Binary {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = cx.output_gradient(0) else { return Ok(()) };
        let (a, b) = (cx.saved(0)?, cx.saved(1)?);
        let wanted = [cx.wants(0)?, cx.wants(1)?];
        let gradients = plain::binary_backward(self.function, &dy, &a, &b, wanted)?;
        for (index, gradient) in gradients.into_iter().enumerate() {
            if let Some(gradient) = gradient {
                cx.add_gradient(index, gradient)?;
            }
        }
        Ok(())
    }
}

impl Differentiable for WithNumber {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = cx.output_gradient(0) else { return Ok(()) };
        let dx = match *self {
            WithNumber::Add(_) => dy,
            WithNumber::Scale(factor) => plain::with_number(TwoOf::Mul, &dy, factor)?,
            WithNumber::Power(p) => plain::power_backward(p, &dy, &cx.saved(0)?)?,
            WithNumber::Clamp(low, high) => plain::clamp_backward(low, high, &dy, &cx.saved(0)?)?,
        };
        cx.add_gradient(0, dx)
    }
}

impl Differentiable for Cast {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = cx.output_gradient(0) else { return Ok(()) };
        let dx = match self.from {
            Some(dtype) => ops::cast(&dy, dtype)?,
            None => dy,
        };
        cx.add_gradient(0, dx)
    }
}

impl Differentiable for DropoutAdd {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = cx.output_gradient(0) else { return Ok(()) };
        if cx.wants(0)? {
            let dx = ops::dropout(&dy, self.probability, self.key)?;
            cx.add_gradient(0, dx)?;
        }
        cx.add_gradient(1, dy)
    }
}
