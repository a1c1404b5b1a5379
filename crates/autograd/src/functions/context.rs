//! Attention of a part of a sequence over the keys and values of all of it, as a rank of a
//! context-parallel group computes it.

use super::prelude::*;
use trainyard_tensor::cpu::attention::AttentionSpec;
use trainyard_tensor::ops::ContextSegments;

/// Flash attention (Dao 2023) of queries over gathered keys and values; its inputs are q and kv.
#[derive(Clone, Debug)]
pub struct ContextAttention {
    spec: AttentionSpec,
    segments: ContextSegments,
}

/// Flash attention of queries over the keys and values of their own rows, a part of the whole; its
/// inputs are q and kv.
#[derive(Clone, Debug)]
pub struct ContextAttentionPart {
    spec: AttentionSpec,
    segments: ContextSegments,
}

/// The rest of it, joined with that part; its inputs are q, kv, and the part with its log-sum-exp.
#[derive(Clone, Debug)]
pub struct ContextAttentionRest {
    spec: AttentionSpec,
    segments: ContextSegments,
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

    /// A part of the attention of queries q [n, h c]: over the keys and values kv [n, 2 h_kv c] of
    /// their own rows. Gives [n, h c] and the log-sum-exp of each query's scores, f32 [n, h].
    pub fn context_attention_part(
        &mut self,
        q: &Var,
        kv: &Var,
        spec: AttentionSpec,
        segments: &ContextSegments,
    ) -> Result<[Var; 2]> {
        let (out, lse) = ops::context_attention_part(q.tensor(), kv.tensor(), &spec, segments)?;
        let function = ContextAttentionPart { spec, segments: segments.clone() };
        let kept = [out.clone(), lse.clone()];
        let mut outputs = self.record(function, &[q.into(), kv.into()], vec![out, lse], |tape| {
            let [out, lse] = kept;
            vec![tape.save(q), tape.save(kv), Saved::Tensor(out), Saved::Tensor(lse)]
        })?;
        let lse = outputs.remove(1);
        Ok([outputs.remove(0), lse])
    }

    /// The whole attention, of which `own` is the part of [`Tape::context_attention_part`], over
    /// all other gathered keys and values kv [m, 2 h_kv c]: [n, h c].
    pub fn context_attention_rest(
        &mut self,
        q: &Var,
        kv: &Var,
        [own, own_lse]: [&Var; 2],
        spec: AttentionSpec,
        segments: &ContextSegments,
    ) -> Result<Var> {
        let part = [own.tensor(), own_lse.tensor()];
        let (out, lse) = ops::context_attention_rest(q.tensor(), kv.tensor(), part, &spec, segments)?;
        let function = ContextAttentionRest { spec, segments: segments.clone() };
        let kept = out.clone();
        self.record_one(function, &[q.into(), kv.into(), own.into(), own_lse.into()], out, |tape| {
            let inputs = [q, kv, own, own_lse].map(|input| tape.save(input));
            inputs.into_iter().chain([Saved::Tensor(kept), Saved::Tensor(lse)]).collect()
        })
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

impl Differentiable for ContextAttentionPart {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let (q, kv, out, lse) = (cx.saved(0)?, cx.saved(1)?, cx.saved(2)?, cx.saved(3)?);
        let gradients = [cx.output_gradient(0), cx.output_gradient(1)];
        if gradients.iter().all(Option::is_none) {
            return Ok(());
        }
        // What nothing was made of has a gradient of zero.
        let of = |gradient: Option<Tensor>, like: &Tensor| match gradient {
            Some(gradient) => Ok(gradient),
            None => like.device().zeros(*like.shape(), like.dtype(), like.purpose()),
        };
        let [dout, dlse] = gradients;
        let (dout, dlse) = (of(dout, &out)?, of(dlse, &lse)?);
        let (spec, segments) = (&self.spec, &self.segments);
        let (dq, dkv) = ops::context_attention_part_backward([&dout, &dlse], &q, &kv, &out, &lse, spec, segments)?;
        cx.add_gradient(0, dq)?;
        cx.add_gradient(1, dkv)
    }
}

impl Differentiable for ContextAttentionRest {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(dout) = cx.output_gradient(0) else { return Ok(()) };
        let (q, kv, own, own_lse) = (cx.saved(0)?, cx.saved(1)?, cx.saved(2)?, cx.saved(3)?);
        let (out, lse) = (cx.saved(4)?, cx.saved(5)?);
        let (part, whole) = ([&own, &own_lse], [&out, &lse]);
        let gradients = ops::context_attention_rest_backward(&dout, &q, &kv, part, whole, &self.spec, &self.segments)?;
        (0..).zip(gradients).try_for_each(|(input, gradient)| cx.add_gradient(input, gradient))
    }
}
