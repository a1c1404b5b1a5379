//! Attention with a number for each head and distance added to scores, and attention of one packed
//! batch over another: what an encoder and a decoder need beside plain attention.

use super::attention::{columns, dims};
use super::context::halves;
use super::{HeadLayout, Segments, not_on_cuda, same_form};
use crate::cpu::attention::{self as kernels, AttentionSpec, DistanceBias, Rows, RowsMut};
use crate::dtype::Element;
use crate::error::Result;
use crate::{Cost, DType, On, Tensor, by_float, ensure_shape};

/// One more than the largest distance of `bias`, f32 [h, 2 reach - 1].
pub(super) fn reach(op: &'static str, spec: &AttentionSpec, bias: &Tensor) -> Result<usize> {
    let columns = bias.last_dim();
    ensure_shape!(
        bias.dtype() == DType::F32 && bias.rows() == spec.heads && columns % 2 == 1,
        op,
        "a bias {bias:?} for {} heads: it is f32 [heads, 2 reach - 1]",
        spec.heads
    );
    Ok(columns.div_ceil(2))
}

fn check_biased(
    op: &'static str,
    qkv: &Tensor,
    bias: &Tensor,
    spec: &AttentionSpec,
    segments: &Segments,
) -> Result<usize> {
    HeadLayout::from(spec).check(op, qkv)?;
    let (m, reach) = (qkv.rows(), reach(op, spec, bias)?);
    ensure_shape!(segments.tokens() == m, op, "segments of {} tokens for {m} rows", segments.tokens());
    let longest = segments.longest();
    ensure_shape!(longest <= reach, op, "a segment of {longest} tokens, and the bias reaches {reach}");
    Ok(reach)
}

/// Attention of qkv within each segment, the number of `bias` in row `h` and column
/// `reach - 1 + p - k` added to the score of head h, query position p and key position k (Raffel et
/// al. 2020, section 2.1). `bias` is f32 [h, 2 reach - 1]. Gives out [m, h c] and the log-sum-exp
/// of each query's scores, f32 [h, m].
pub fn biased_attention(
    qkv: &Tensor,
    bias: &Tensor,
    spec: &AttentionSpec,
    segments: &Segments,
) -> Result<(Tensor, Tensor)> {
    const OP: &str = "biased_attention";
    let reach = check_biased(OP, qkv, bias, spec, segments)?;
    let m = qkv.rows();
    let mut out = qkv.empty_like([m, spec.q_cols()], qkv.dtype())?;
    let mut lse = qkv.empty_like([spec.heads, m], DType::F32)?;
    let cost = Cost {
        flops: kernels::flops_forward(spec, segments.bounds()),
        bytes: kernels::bytes_forward(spec, m, qkv.dtype()),
    };
    let work = cost.on(qkv.dtype(), dims(spec, m, cost.flops / 4));
    by_float!(OP, qkv.dtype(), T => qkv.device().launch_on(OP, work, |on| {
        let On::Cpu(cpu) = on else { return Err(not_on_cuda(OP)) };
        let [q, k, v] = columns(qkv.get::<T>(), m, spec)?;
        let bias = DistanceBias::new(spec, bias.get::<f32>(), reach)?;
        let out = RowsMut::dense(out.get_mut::<T>(), m, spec.q_cols())?;
        Ok(kernels::forward_biased(cpu, spec, q, k, v, segments.bounds(), bias, out, lse.get_mut::<f32>())?)
    })?);
    Ok((out, lse))
}

/// The gradients of qkv and of the bias.
pub fn biased_attention_backward(
    dout: &Tensor,
    qkv: &Tensor,
    bias: &Tensor,
    out: &Tensor,
    lse: &Tensor,
    spec: &AttentionSpec,
    segments: &Segments,
) -> Result<(Tensor, Tensor)> {
    const OP: &str = "biased_attention_backward";
    same_form(OP, dout, out)?;
    let reach = check_biased(OP, qkv, bias, spec, segments)?;
    let m = qkv.rows();
    let mut dqkv = qkv.empty_like(*qkv.shape(), qkv.dtype())?;
    let mut dbias = qkv.empty_like(*bias.shape(), DType::F32)?;
    let cost = Cost {
        flops: kernels::flops_backward(spec, segments.bounds()),
        bytes: kernels::bytes_backward(spec, m, qkv.dtype()),
    };
    let work = cost.on(qkv.dtype(), dims(spec, m, cost.flops / 10));
    by_float!(OP, qkv.dtype(), T => qkv.device().launch_on(OP, work, |on| {
        let On::Cpu(cpu) = on else { return Err(not_on_cuda(OP)) };
        let [q, k, v] = columns(qkv.get::<T>(), m, spec)?;
        let (bias, cu) = (DistanceBias::new(spec, bias.get::<f32>(), reach)?, segments.bounds());
        let dense = |data| Rows::dense(data, m, spec.q_cols());
        let (out, dout, lse) = (dense(out.get::<T>())?, dense(dout.get::<T>())?, lse.get::<f32>());
        let all = RowsMut::dense(dqkv.get_mut::<T>(), m, spec.q_cols() + 2 * spec.kv_cols())?;
        let (dq, rest) = all.split_columns(spec.q_cols());
        let (dk, dv) = rest.split_columns(spec.kv_cols());
        let dbias = dbias.get_mut::<f32>();
        Ok(kernels::backward_biased(cpu, spec, q, k, v, out, lse, dout, cu, bias, dq, dk, dv, dbias)?)
    })?);
    Ok((dqkv, dbias))
}

/// The segments of queries and those of the keys that they see, pair by pair.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CrossSegments {
    queries: Segments,
    keys: Segments,
}

impl CrossSegments {
    /// Queries of segment `i` see all keys of segment `i`.
    ///
    /// # Errors
    /// Other numbers of segments.
    pub fn new(queries: Segments, keys: Segments) -> Result<CrossSegments> {
        let counts = [&queries, &keys].map(|segments| segments.bounds().len() - 1);
        let [of_queries, of_keys] = counts;
        ensure_shape!(of_queries == of_keys, "cross_segments", "{of_queries} of queries and {of_keys} of keys");
        Ok(CrossSegments { queries, keys })
    }

    fn pairs(&self, spec: &AttentionSpec) -> u64 {
        kernels::unmasked_pairs_cross(spec, self.queries.bounds(), self.keys.bounds())
    }

    fn check(&self, op: &'static str, q: &Tensor, kv: &Tensor, spec: &AttentionSpec) -> Result<()> {
        super::same_dtype(op, q, kv)?;
        ensure_shape!(
            !spec.causal && q.rows() == self.queries.tokens() && q.last_dim() == spec.q_cols(),
            op,
            "queries {} for {} of {} columns, each of which sees all keys",
            q.shape(),
            self.queries.tokens(),
            spec.q_cols()
        );
        ensure_shape!(
            kv.rows() == self.keys.tokens() && kv.last_dim() == 2 * spec.kv_cols(),
            op,
            "keys and values {} for {} of {} columns",
            kv.shape(),
            self.keys.tokens(),
            2 * spec.kv_cols()
        );
        Ok(())
    }

    /// `products` of 2 c FLOPs for each pair and head; operands moved `times`.
    fn cost(&self, spec: &AttentionSpec, dtype: DType, products: u64, times: usize) -> Cost {
        let rows = self.queries.tokens() * (2 * spec.q_cols() * dtype.size() + 4 * spec.heads);
        let keys = self.keys.tokens() * 2 * spec.kv_cols() * dtype.size();
        let flops = products * 2 * (spec.heads * spec.head_dim) as u64 * self.pairs(spec);
        Cost { flops, bytes: (times * (rows + keys)) as u64 }
    }

    /// [keys, queries, query heads, key heads, width of a head], for records of calls.
    fn dims(&self, spec: &AttentionSpec) -> [usize; 5] {
        [self.keys.tokens(), self.queries.tokens(), spec.heads, spec.kv_heads, spec.head_dim]
    }
}

/// Attention of queries `q` [n, h c] over keys and values `kv` [m, 2 h_kv c], each query over all
/// keys of its segment: out [n, h c] and the log-sum-exp of each query's scores, f32 [h, n].
pub fn cross_attention(
    q: &Tensor,
    kv: &Tensor,
    spec: &AttentionSpec,
    segments: &CrossSegments,
) -> Result<(Tensor, Tensor)> {
    const OP: &str = "cross_attention";
    segments.check(OP, q, kv, spec)?;
    let mut out = q.empty_like(*q.shape(), q.dtype())?;
    let mut lse = q.empty_like([spec.heads, q.rows()], DType::F32)?;
    let work = segments.cost(spec, q.dtype(), 2, 1).on(q.dtype(), segments.dims(spec));
    by_float!(OP, q.dtype(), T => q.device().launch_on(OP, work, |on| {
        let On::Cpu(cpu) = on else { return Err(not_on_cuda(OP)) };
        let [k, v] = halves(kv.get::<T>(), kv.rows(), spec)?;
        let (cu_q, cu_k) = (segments.queries.bounds(), segments.keys.bounds());
        let (rows, columns) = (q.rows(), spec.q_cols());
        let q = Rows::dense(q.get::<T>(), rows, columns)?;
        let out = RowsMut::dense(out.get_mut::<T>(), rows, columns)?;
        Ok(kernels::forward_cross(cpu, spec, q, k, v, cu_q, cu_k, out, lse.get_mut::<f32>())?)
    })?);
    Ok((out, lse))
}

/// The gradients of q and of kv.
pub fn cross_attention_backward(
    dout: &Tensor,
    q: &Tensor,
    kv: &Tensor,
    out: &Tensor,
    lse: &Tensor,
    spec: &AttentionSpec,
    segments: &CrossSegments,
) -> Result<(Tensor, Tensor)> {
    const OP: &str = "cross_attention_backward";
    same_form(OP, dout, out)?;
    segments.check(OP, q, kv, spec)?;
    let mut dq = q.empty_like(*q.shape(), q.dtype())?;
    let mut dkv = kv.empty_like(*kv.shape(), kv.dtype())?;
    let work = segments.cost(spec, q.dtype(), 5, 2).on(q.dtype(), segments.dims(spec));
    by_float!(OP, q.dtype(), T => q.device().launch_on(OP, work, |on| {
        let On::Cpu(cpu) = on else { return Err(not_on_cuda(OP)) };
        let [k, v] = halves(kv.get::<T>(), kv.rows(), spec)?;
        let (cu_q, cu_k) = (segments.queries.bounds(), segments.keys.bounds());
        let (rows, columns) = (q.rows(), spec.q_cols());
        let dense = |data| Rows::dense(data, rows, columns);
        let (q, out, dout) = (dense(q.get::<T>())?, dense(out.get::<T>())?, dense(dout.get::<T>())?);
        let lse = lse.get::<f32>();
        let dq = RowsMut::dense(dq.get_mut::<T>(), rows, columns)?;
        let dkv = dkv.get_mut::<T>();
        // Keys without queries are passed over.
        dkv.fill(T::from_f32(0.0));
        let (dk, dv) = RowsMut::dense(dkv, k.rows(), 2 * spec.kv_cols())?.split_columns(spec.kv_cols());
        Ok(kernels::backward_cross(cpu, spec, q, k, v, out, lse, dout, cu_q, cu_k, dq, dk, dv)?)
    })?);
    Ok((dq, dkv))
}
