//! Attention with a bias by distance, and attention of a decoder over what an encoder made.

use super::prelude::*;
use trainyard_tensor::cpu::attention::AttentionSpec;
use trainyard_tensor::ops::{CrossSegments, Segments};

/// Flash attention (Dao 2023) with a bias by distance; its inputs are qkv and the bias.
#[derive(Clone, Debug)]
pub struct BiasedAttention {
    spec: AttentionSpec,
    segments: Segments,
}

/// Flash attention of one packed batch over another; its inputs are q and kv.
#[derive(Clone, Debug)]
pub struct CrossAttention {
    spec: AttentionSpec,
    segments: CrossSegments,
}

impl Tape<'_> {
    /// Attention of qkv [m, (h + 2 h_kv) c], each query within its segment, with the number in row
    /// h and column `reach - 1 + p - k` of `bias`, f32 [h, 2 reach - 1], added to the score of head
    /// h, query position p and key position k: [m, h c].
    pub fn biased_attention(&mut self, qkv: &Var, bias: &Var, spec: AttentionSpec, segments: &Segments) -> Result<Var> {
        let (out, lse) = ops::biased_attention(qkv.tensor(), bias.tensor(), &spec, segments)?;
        let function = BiasedAttention { spec, segments: segments.clone() };
        let kept = out.clone();
        self.record_one(function, &[qkv.into(), bias.into()], out, |tape| {
            vec![tape.save(qkv), tape.save(bias), Saved::Tensor(kept), Saved::Tensor(lse)]
        })
    }

    /// Attention of queries q [n, h c] over keys and values kv [m, 2 h_kv c], each query over all
    /// keys of its segment: [n, h c].
    pub fn cross_attention(&mut self, q: &Var, kv: &Var, spec: AttentionSpec, segments: &CrossSegments) -> Result<Var> {
        let (out, lse) = ops::cross_attention(q.tensor(), kv.tensor(), &spec, segments)?;
        let function = CrossAttention { spec, segments: segments.clone() };
        let kept = out.clone();
        self.record_one(function, &[q.into(), kv.into()], out, |tape| {
            vec![tape.save(q), tape.save(kv), Saved::Tensor(kept), Saved::Tensor(lse)]
        })
    }
}

impl Differentiable for BiasedAttention {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(dout) = cx.output_gradient(0) else { return Ok(()) };
        let (qkv, bias, out, lse) = (cx.saved(0)?, cx.saved(1)?, cx.saved(2)?, cx.saved(3)?);
        let (spec, segments) = (&self.spec, &self.segments);
        let (dqkv, dbias) = ops::biased_attention_backward(&dout, &qkv, &bias, &out, &lse, spec, segments)?;
        cx.add_gradient(0, dqkv)?;
        cx.add_gradient(1, dbias)
    }
}

impl Differentiable for CrossAttention {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(dout) = cx.output_gradient(0) else { return Ok(()) };
        let (q, kv, out, lse) = (cx.saved(0)?, cx.saved(1)?, cx.saved(2)?, cx.saved(3)?);
        let (dq, dkv) = ops::cross_attention_backward(&dout, &q, &kv, &out, &lse, &self.spec, &self.segments)?;
        cx.add_gradient(0, dq)?;
        cx.add_gradient(1, dkv)
    }
}
