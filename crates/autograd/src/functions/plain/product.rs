//! Matrix products of two values. Products with weights have a form of their own, [`Tape::linear`].

use super::prelude::*;
use trainyard_tensor::cpu::gemm::Transpose::{self, No, Yes};

/// `op(a) op(b)` of the last two dimensions.
#[derive(Clone, Debug)]
pub struct Matmul {
    a: Transpose,
    b: Transpose,
}

impl Tape<'_> {
    /// `a b` of the last two dimensions, the dimensions before them broadcast together: [.., m, k]
    /// and [.., k, n].
    pub fn matmul(&mut self, a: &Var, b: &Var) -> Result<Var> {
        self.matmul_transposed(a, No, b, No)
    }

    /// [`Tape::matmul`] of operands that lie transposed, without moving them: `(q, No, k, Yes)` is
    /// `q kᵀ`.
    pub fn matmul_transposed(
        &mut self,
        a: &Var,
        transpose_a: Transpose,
        b: &Var,
        transpose_b: Transpose,
    ) -> Result<Var> {
        let y = plain::matmul(a.tensor(), transpose_a, b.tensor(), transpose_b)?;
        let function = Matmul { a: transpose_a, b: transpose_b };
        self.record_one(function, &[a.into(), b.into()], y, |tape| vec![tape.save(a), tape.save(b)])
    }
}

impl Differentiable for Matmul {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = cx.output_gradient(0) else { return Ok(()) };
        let (a, b) = (cx.saved(0)?, cx.saved(1)?);
        if cx.wants(0)? {
            // da = dy op(b)ᵀ, or its transpose op(b) dyᵀ where a lies transposed.
            let da = match self.a {
                No => plain::matmul(&dy, No, &b, flipped(self.b))?,
                Yes => plain::matmul(&b, self.b, &dy, Yes)?,
            };
            cx.add_gradient(0, plain::sum_to(da, a.shape())?)?;
        }
        if cx.wants(1)? {
            let (left, right) = if b.shape().len() == 2 && self.a == No { (rows(&a)?, rows(&dy)?) } else { (a, dy) };
            let db = match self.b {
                No => plain::matmul(&left, flipped(self.a), &right, No)?,
                Yes => plain::matmul(&right, Yes, &left, self.a)?,
            };
            cx.add_gradient(1, plain::sum_to(db, b.shape())?)?;
        }
        Ok(())
    }
}

/// Batches of rows as one matrix: with one matrix on the right, the sum over the batch is part of
/// the product.
fn rows(x: &Tensor) -> Result<Tensor> {
    Ok(x.reshape([x.rows(), x.last_dim()])?)
}

fn flipped(transpose: Transpose) -> Transpose {
    if transpose == No { Yes } else { No }
}
