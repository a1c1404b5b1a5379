//! Functions that move elements without computing. There are no strided views: what changes the
//! order moves data.

use super::prelude::*;
use trainyard_tensor::TensorError;

/// A rearrangement of one tensor; its backward is the reverse one.
#[derive(Clone, Debug)]
pub struct Rearrange {
    how: How,
    /// The shape of the input.
    shape: Shape,
}

#[derive(Clone, Debug)]
enum How {
    Reshape,
    /// The order that undoes the permutation.
    Permute(Vec<i32>),
    Narrow {
        dim: i32,
        start: usize,
    },
    Expand,
    Repeat(Vec<usize>),
}

/// Tensors one after another along a dimension.
#[derive(Clone, Debug)]
pub struct Concat {
    dim: i32,
    lens: Vec<usize>,
}

/// A tensor in two parts along a dimension, whose gradients come back at once.
#[derive(Clone, Debug)]
pub struct SplitAt {
    dim: i32,
    shapes: [Shape; 2],
}

impl Tape<'_> {
    fn rearrange(&mut self, x: &Var, how: How, y: Tensor) -> Result<Var> {
        let shape = *x.tensor().shape();
        self.record_one(Rearrange { how, shape }, &[x.into()], y, |_| Vec::new())
    }

    /// The same elements in another shape; shares memory.
    pub fn reshape(&mut self, x: &Var, shape: &[usize]) -> Result<Var> {
        let y = x.tensor().reshape(plain::checked_shape("reshape", shape)?)?;
        self.rearrange(x, How::Reshape, y)
    }

    /// A dimension of size 1 before dimension `dim`; -1 puts it last.
    pub fn unsqueeze(&mut self, x: &Var, dim: i32) -> Result<Var> {
        let mut dims = x.tensor().shape().to_vec();
        dims.push(1);
        let at = plain::dimension("unsqueeze", &plain::checked_shape("unsqueeze", &dims)?, dim)?;
        dims.pop();
        dims.insert(at, 1);
        self.reshape(x, &dims)
    }

    /// Without dimension `dim`, which has size 1.
    pub fn squeeze(&mut self, x: &Var, dim: i32) -> Result<Var> {
        let mut dims = x.tensor().shape().to_vec();
        let at = plain::dimension("squeeze", x.tensor().shape(), dim)?;
        dims.remove(at);
        self.reshape(x, &dims)
    }

    /// Dimension `i` of the result is dimension `order[i]` of `x`.
    pub fn permute(&mut self, x: &Var, order: &[i32]) -> Result<Var> {
        let y = plain::permute(x.tensor(), order)?;
        let mut back = vec![0; order.len()];
        for (i, dim) in order.iter().enumerate() {
            back[plain::dimension("permute", x.tensor().shape(), *dim)?] = i as i32;
        }
        self.rearrange(x, How::Permute(back), y)
    }

    /// Dimensions `a` and `b` exchanged.
    pub fn transpose(&mut self, x: &Var, a: i32, b: i32) -> Result<Var> {
        let shape = x.tensor().shape();
        let (a, b) = (plain::dimension("transpose", shape, a)?, plain::dimension("transpose", shape, b)?);
        let mut order: Vec<i32> = (0..shape.len() as i32).collect();
        order.swap(a, b);
        self.permute(x, &order)
    }

    /// Positions `start .. start + len` of dimension `dim`; shares memory when they are one run.
    pub fn narrow(&mut self, x: &Var, dim: i32, start: usize, len: usize) -> Result<Var> {
        let y = plain::narrow(x.tensor(), dim, start, len)?;
        self.rearrange(x, How::Narrow { dim, start }, y)
    }

    /// Dimension `dim` in pieces of these lengths.
    pub fn split(&mut self, x: &Var, lens: &[usize], dim: i32) -> Result<Vec<Var>> {
        let at = plain::dimension("split", x.tensor().shape(), dim)?;
        let (total, n) = (lens.iter().sum::<usize>(), x.tensor().shape()[at]);
        if total != n {
            let what = format!("{lens:?} are {total} positions of {n}");
            return Err(TensorError::Shape { op: "split", what }.into());
        }
        let mut start = 0;
        let mut piece = |len: &usize| {
            let piece = self.narrow(x, dim, start, *len);
            start += len;
            piece
        };
        lens.iter().map(&mut piece).collect()
    }

    /// Dimension `dim` up to position `at`, and the rest. Unlike [`Tape::split`] its gradient is
    /// made in one pass.
    pub fn split_at(&mut self, x: &Var, dim: i32, at: usize) -> Result<[Var; 2]> {
        let n = x.tensor().shape()[plain::dimension("split_at", x.tensor().shape(), dim)?];
        let first = plain::narrow(x.tensor(), dim, 0, at)?;
        let second = plain::narrow(x.tensor(), dim, at, n.saturating_sub(at))?;
        let shapes = [*first.shape(), *second.shape()];
        let mut parts = self.record(SplitAt { dim, shapes }, &[x.into()], vec![first, second], |_| Vec::new())?;
        let second = parts.remove(1);
        Ok([parts.remove(0), second])
    }

    /// `x` repeated along dimensions where it has size 1 or none.
    pub fn expand(&mut self, x: &Var, shape: &[usize]) -> Result<Var> {
        let y = plain::expand(x.tensor(), shape)?;
        self.rearrange(x, How::Expand, y)
    }

    /// `x` laid `times[i]` times one after another along each dimension.
    pub fn repeat(&mut self, x: &Var, times: &[usize]) -> Result<Var> {
        let y = plain::repeat(x.tensor(), times)?;
        self.rearrange(x, How::Repeat(times.to_vec()), y)
    }

    /// The values one after another along dimension `dim`.
    pub fn cat(&mut self, parts: &[&Var], dim: i32) -> Result<Var> {
        let tensors: Vec<&Tensor> = parts.iter().map(|part| part.tensor()).collect();
        let y = plain::concat(&tensors, dim)?;
        let at = plain::dimension("cat", y.shape(), dim)?;
        let lens = tensors.iter().map(|part| part.shape()[at]).collect();
        let inputs: Vec<Operand> = parts.iter().map(|part| Operand::from(*part)).collect();
        self.record_one(Concat { dim, lens }, &inputs, y, |_| Vec::new())
    }

    /// The values, of one shape, along a new dimension `dim`.
    pub fn stack(&mut self, parts: &[&Var], dim: i32) -> Result<Var> {
        let parts = parts.iter().map(|part| self.unsqueeze(part, dim)).collect::<Result<Vec<Var>>>()?;
        self.cat(&parts.iter().collect::<Vec<_>>(), dim)
    }
}

impl Differentiable for Rearrange {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = cx.output_gradient(0) else { return Ok(()) };
        let dx = match &self.how {
            How::Reshape => dy.reshape(self.shape)?,
            How::Permute(back) => plain::permute(&dy, back)?,
            How::Narrow { dim, start } => {
                let base = cx.take_gradient(0);
                plain::narrow_backward(&dy, &self.shape, *dim, *start, base)?
            }
            How::Expand => plain::sum_to(dy, &self.shape)?,
            How::Repeat(times) => plain::repeat_backward(&dy, &self.shape, times)?,
        };
        cx.add_gradient(0, dx)
    }
}

impl Differentiable for Concat {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = cx.output_gradient(0) else { return Ok(()) };
        let mut start = 0;
        for (index, len) in self.lens.iter().enumerate() {
            if cx.wants(index)? {
                cx.add_gradient(index, plain::narrow(&dy, self.dim, start, *len)?)?;
            }
            start += len;
        }
        Ok(())
    }
}

impl Differentiable for SplitAt {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let parts = [cx.output_gradient(0), cx.output_gradient(1)];
        let Some(known) = parts.iter().flatten().next() else { return Ok(()) };
        let (dtype, device, purpose) = (known.dtype(), known.device().clone(), known.purpose());
        let part = |(part, shape): (Option<Tensor>, Shape)| match part {
            Some(part) => Ok(part),
            None => device.zeros(shape, dtype, purpose),
        };
        let parts = parts.into_iter().zip(self.shapes).map(part).collect::<Result<Vec<_>, _>>()?;
        cx.add_gradient(0, plain::concat(&parts.iter().collect::<Vec<_>>(), self.dim)?)
    }
}
