//! Reductions over dimensions, and functions of rows. Dimensions are `..` (all), `-1`, `[0, 2]`, or
//! `Dims::from(-1).keep()`.

use super::prelude::*;
use plain::Dims;

/// A sum, or with a factor of `1 / n` a mean.
#[derive(Clone, Debug)]
pub struct Sum {
    shape: Shape,
    /// The result's shape with reduced dimensions kept.
    kept: Shape,
    factor: f32,
}

/// The largest over dimensions; equals share the gradient.
#[derive(Clone, Debug)]
pub struct Amax {
    dims: Dims,
}

/// The variance over dimensions.
#[derive(Clone, Debug)]
pub struct Variance {
    dims: Dims,
    correction: usize,
}

/// Softmax or its logarithm over the last dimension.
#[derive(Clone, Debug)]
pub enum Softmax {
    /// `e^x / sum e^x`
    Plain,
    /// `x - log sum e^x`
    Log,
}

/// Sums of the elements up to each.
#[derive(Clone, Debug)]
pub struct CumulativeSum {
    dim: i32,
}

/// The position of the largest: no derivative.
#[derive(Clone, Debug)]
pub struct Argmax;

/// The largest of each row, and their positions, which have no derivative.
#[derive(Clone, Debug)]
pub struct TopK {
    shape: Shape,
}

impl Tape<'_> {
    /// The sum over `dims`.
    pub fn sum(&mut self, x: &Var, dims: impl Into<Dims>) -> Result<Var> {
        let dims = dims.into();
        let y = plain::sum(x.tensor(), &dims)?;
        self.record_sum(x, y, &dims, "sum")
    }

    /// The mean over `dims`.
    pub fn mean(&mut self, x: &Var, dims: impl Into<Dims>) -> Result<Var> {
        let dims = dims.into();
        let y = plain::mean(x.tensor(), &dims)?;
        self.record_sum(x, y, &dims, "mean")
    }

    fn record_sum(&mut self, x: &Var, y: Tensor, dims: &Dims, name: &'static str) -> Result<Var> {
        let shape = *x.tensor().shape();
        let (_, kept) = dims.shapes(name, &shape)?;
        let factor = if name == "mean" { y.elements() as f32 / shape.elements() as f32 } else { 1.0 };
        self.record_one(Sum { shape, kept, factor }, &[x.into()], y, |_| Vec::new())
    }

    /// The largest over `dims`.
    pub fn amax(&mut self, x: &Var, dims: impl Into<Dims>) -> Result<Var> {
        let dims = dims.into();
        let y = plain::amax(x.tensor(), &dims)?;
        let result = y.clone();
        self.record_one(Amax { dims }, &[x.into()], y, |tape| vec![tape.save(x), Saved::Tensor(result)])
    }

    /// `sum((x - mean)²) / (n - correction)` over `dims` of n elements; PyTorch's default
    /// correction is 1.
    pub fn var(&mut self, x: &Var, dims: impl Into<Dims>, correction: usize) -> Result<Var> {
        let dims = dims.into();
        let (y, mean) = plain::variance(x.tensor(), &dims, correction)?;
        self.record_one(Variance { dims, correction }, &[x.into()], y, |tape| vec![tape.save(x), Saved::Tensor(mean)])
    }

    /// `e^x / sum e^x` over the last dimension.
    pub fn softmax(&mut self, x: &Var) -> Result<Var> {
        let y = plain::softmax(x.tensor())?;
        let result = y.clone();
        self.record_one(Softmax::Plain, &[x.into()], y, |_| vec![Saved::Tensor(result)])
    }

    /// `x - log sum e^x` over the last dimension.
    pub fn log_softmax(&mut self, x: &Var) -> Result<Var> {
        let y = plain::log_softmax(x.tensor())?;
        let result = y.clone();
        self.record_one(Softmax::Log, &[x.into()], y, |_| vec![Saved::Tensor(result)])
    }

    /// The sum of the elements up to each, along `dim`.
    pub fn cumsum(&mut self, x: &Var, dim: i32) -> Result<Var> {
        let y = plain::cumulative_sum(x.tensor(), dim)?;
        self.record_one(CumulativeSum { dim }, &[x.into()], y, |_| Vec::new())
    }

    /// The position of the largest along `dim`, the first of equals, u32. No gradient.
    pub fn argmax(&mut self, x: &Var, dim: i32) -> Result<Var> {
        let y = plain::argmax(x.tensor(), dim)?;
        self.record_one(Argmax, &[x.into()], y, |_| Vec::new())
    }

    /// The `k` largest over the last dimension, largest first, and their positions (u32, no
    /// gradient).
    pub fn topk(&mut self, x: &Var, k: usize) -> Result<(Var, Var)> {
        let (values, indices) = plain::top_k(x.tensor(), k)?;
        let saved = indices.clone();
        let function = TopK { shape: *x.tensor().shape() };
        let mut outputs =
            self.record(function, &[x.into()], vec![values, indices], |_| vec![Saved::Tensor(saved)])?.into_iter();
        match (outputs.next(), outputs.next()) {
            (Some(values), Some(indices)) => Ok((values, indices)),
            _ => unreachable!("two outputs were recorded"),
        }
    }
}

impl Differentiable for Sum {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(mut dy) = cx.output_gradient(0) else { return Ok(()) };
        if self.factor != 1.0 {
            dy = plain::with_number(trainyard_tensor::cpu::elementwise::Binary::Mul, &dy, self.factor)?;
        }
        let dx = plain::expand(&dy.reshape(self.kept)?, &self.shape)?;
        cx.add_gradient(0, dx)
    }
}

impl Differentiable for Amax {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = cx.output_gradient(0) else { return Ok(()) };
        let dx = plain::amax_backward(&dy, &cx.saved(0)?, &cx.saved(1)?, &self.dims)?;
        cx.add_gradient(0, dx)
    }
}

impl Differentiable for Variance {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = cx.output_gradient(0) else { return Ok(()) };
        let dx = plain::variance_backward(&dy, &cx.saved(0)?, &cx.saved(1)?, &self.dims, self.correction)?;
        cx.add_gradient(0, dx)
    }
}

impl Differentiable for Softmax {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = cx.output_gradient(0) else { return Ok(()) };
        let y = cx.saved(0)?;
        let dx = match self {
            Softmax::Plain => plain::softmax_backward(&dy, &y)?,
            Softmax::Log => plain::log_softmax_backward(&dy, &y)?,
        };
        cx.add_gradient(0, dx)
    }
}

impl Differentiable for CumulativeSum {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = cx.output_gradient(0) else { return Ok(()) };
        let dx = plain::cumulative_sum_backward(&dy, self.dim)?;
        cx.add_gradient(0, dx)
    }
}

impl Differentiable for Argmax {
    fn backward(&self, _: &mut Backward<'_>) -> Result<()> {
        Err(AutogradError::NotDifferentiable("argmax"))
    }
}

impl Differentiable for TopK {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        if cx.output_gradient(1).is_some() {
            return Err(AutogradError::NotDifferentiable("the indices of topk"));
        }
        let Some(dy) = cx.output_gradient(0) else { return Ok(()) };
        let dx = plain::scatter_add(&dy, &self.shape, &cx.saved(0)?)?;
        cx.add_gradient(0, dx)
    }
}
