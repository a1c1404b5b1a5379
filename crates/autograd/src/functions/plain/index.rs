//! Reading by indices, whose backward adds by them. Indices are tensors (i32 or u32), not values of
//! the graph.

use super::prelude::*;
use trainyard_tensor::DType;
use trainyard_tensor::ops::plain::Indices;

/// Reading by indices.
#[derive(Clone, Debug)]
pub struct Gather {
    indices: Read,
    shape: Shape,
}

/// The elements that are read.
#[derive(Clone, Debug)]
enum Read {
    /// Whole slices of a dimension.
    Slices(i32, Indices),
    /// Single elements of rows.
    Elements(Tensor),
}

/// Adding slices by indices; inputs are the base and what is added.
#[derive(Clone, Debug)]
pub struct IndexAdd {
    dim: i32,
    indices: Tensor,
}

impl Tape<'_> {
    /// Positions `indices` [k] of dimension `dim`, in that order.
    pub fn index_select(&mut self, x: &Var, dim: i32, indices: impl Into<Indices>) -> Result<Var> {
        let indices = indices.into();
        let y = plain::index_select(x.tensor(), dim, &indices)?;
        let function = Gather { indices: Read::Slices(dim, indices), shape: *x.tensor().shape() };
        self.record_one(function, &[x.into()], y, |_| Vec::new())
    }

    /// `y[.., j] = x[.., indices[.., j]]`: x [.., n], indices and y [.., k].
    pub fn gather(&mut self, x: &Var, indices: &Tensor) -> Result<Var> {
        let y = plain::gather(x.tensor(), indices)?;
        let function = Gather { indices: Read::Elements(indices.clone()), shape: *x.tensor().shape() };
        self.record_one(function, &[x.into()], y, |_| Vec::new())
    }

    /// `base` with slice `i` of `source` added at position `indices[i]` of `dim`, in the order of
    /// `i`.
    pub fn index_add(&mut self, base: &Var, dim: i32, indices: &Tensor, source: &Var) -> Result<Var> {
        let added = plain::index_add(source.tensor(), base.tensor().shape(), dim, indices)?;
        let y = ops::add_into(added, base.tensor())?;
        let function = IndexAdd { dim, indices: indices.clone() };
        self.record_one(function, &[base.into(), source.into()], y, |_| Vec::new())
    }

    /// 1 at each index, else 0: [.., classes], a constant.
    pub fn one_hot(&mut self, indices: &Tensor, classes: usize, dtype: DType) -> Result<Var> {
        let y = plain::one_hot(self.device(), indices, classes, dtype)?;
        Ok(self.constant(y))
    }
}

impl Differentiable for Gather {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = cx.output_gradient(0) else { return Ok(()) };
        let dx = match &self.indices {
            Read::Slices(dim, indices) => plain::index_add(&dy, &self.shape, *dim, indices)?,
            Read::Elements(indices) => plain::scatter_add(&dy, &self.shape, indices)?,
        };
        cx.add_gradient(0, dx)
    }
}

impl Differentiable for IndexAdd {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = cx.output_gradient(0) else { return Ok(()) };
        if cx.wants(1)? {
            cx.add_gradient(1, plain::index_select(&dy, self.dim, &self.indices)?)?;
        }
        cx.add_gradient(0, dy)
    }
}
