//! Attention of a part of a sequence over the keys and values of all of it, as a rank of a
//! context-parallel group computes it.

use super::prelude::*;
use trainyard_tensor::cpu::attention::AttentionSpec;
use trainyard_tensor::ops::{ContextSegments, plain};

/// Flash attention (Dao 2023) of queries over gathered keys and values; its inputs are q and kv.
#[derive(Clone, Debug)]
pub struct ContextAttention {
    spec: AttentionSpec,
    segments: ContextSegments,
}

/// The columns of a matrix in two parts; its input is the matrix.
#[derive(Clone, Debug)]
pub struct SplitColumns {
    /// Columns of the first part and of the second.
    columns: [usize; 2],
}

impl Tape<'_> {
    /// Attention of queries q [n, h c] over the keys and values kv [m, 2 h_kv c] of a whole batch,
    /// in the order in which they were gathered: [n, h c].
    pub fn context_attention(
        &mut self,
        q: &Var,
        kv: &Var,
        spec: AttentionSpec,
        segments: &ContextSegments,
    ) -> Result<Var> {
        let (out, lse) = ops::context_attention(q.tensor(), kv.tensor(), &spec, segments)?;
        let function = ContextAttention { spec, segments: segments.clone() };
        let kept = out.clone();
        self.record_one(function, &[q.into(), kv.into()], out, |tape| {
            vec![tape.save(q), tape.save(kv), Saved::Tensor(kept), Saved::Tensor(lse)]
        })
    }

    /// The first `at` columns of x [m, n], and the others.
    pub fn split_columns(&mut self, x: &Var, at: usize) -> Result<[Var; 2]> {
        let columns = [at, x.tensor().last_dim().saturating_sub(at)];
        let first = plain::narrow(x.tensor(), -1, 0, columns[0])?;
        let second = plain::narrow(x.tensor(), -1, at, columns[1])?;
        let mut parts = self.record(SplitColumns { columns }, &[x.into()], vec![first, second], |_| Vec::new())?;
        let second = parts.remove(1);
        Ok([parts.remove(0), second])
    }
}

impl Differentiable for ContextAttention {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(dout) = cx.output_gradient(0) else { return Ok(()) };
        let (q, kv, out, lse) = (cx.saved(0)?, cx.saved(1)?, cx.saved(2)?, cx.saved(3)?);
        let (dq, dkv) = ops::context_attention_backward(&dout, &q, &kv, &out, &lse, &self.spec, &self.segments)?;
        cx.add_gradient(0, dq)?;
        cx.add_gradient(1, dkv)
    }
}

impl Differentiable for SplitColumns {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let parts = [cx.output_gradient(0), cx.output_gradient(1)];
        let Some(known) = parts.iter().flatten().next() else { return Ok(()) };
        let (rows, dtype, device, purpose) = (known.rows(), known.dtype(), known.device().clone(), known.purpose());
        let part = |(part, columns): (Option<Tensor>, usize)| match part {
            Some(part) => Ok(part),
            None => device.zeros([rows, columns], dtype, purpose),
        };
        let parts = parts.into_iter().zip(self.columns).map(part).collect::<Result<Vec<_>, _>>()?;
        cx.add_gradient(0, plain::concat(&parts.iter().collect::<Vec<_>>(), -1)?)
    }
}
