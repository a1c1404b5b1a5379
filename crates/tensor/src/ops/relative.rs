//! Attention with a number for each head and distance added to scores, and attention of one packed
//! batch over another: what an encoder and a decoder need beside plain attention.

use super::attention::{columns, dims};
use super::context::halves;
use super::{HeadLayout, Segments, given, same_form, scratch_on_cuda};
use crate::cpu::attention::{self as kernels, AttentionSpec, DistanceBias, Rows, RowsMut};
use crate::cuda::{self, Distances, Heads, OnDevice, Seen};
use crate::dtype::Element;
use crate::error::Result;
use crate::{Computes, Cost, DType, Device, On, Purpose, Tensor, by_float, ensure_shape};
use std::sync::Arc;

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
    let bounds = segments.on_cuda(qkv.device())?;
    by_float!(OP, qkv.dtype(), T => qkv.device().launch_on(OP, work, |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => {
                let bias = Distances { table: bias, reach };
                return cuda::biased_attention(gpu, qkv, bias, spec, given(&bounds), [&out, &lse]);
            }
        };
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
    let bounds = segments.on_cuda(qkv.device())?;
    let delta = scratch_on_cuda(qkv.device(), spec.heads * m)?;
    let partials = scratch_on_cuda(qkv.device(), cuda::bias_scratch(spec, m, reach))?;
    by_float!(OP, qkv.dtype(), T => qkv.device().launch_on(OP, work, |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => {
                let (read, bias) = ([dout, qkv, out, lse], Distances { table: bias, reach });
                let (scratch, gradients) = ([given(&delta), given(&partials)], [&dqkv, &dbias]);
                return cuda::biased_attention_backward(gpu, read, bias, spec, given(&bounds), scratch, gradients);
            }
        };
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
    /// The keys that each query sees, and the queries that see each key; on a GPU that has used
    /// them.
    seen: Arc<OnDevice>,
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
        Ok(CrossSegments { queries, keys, seen: Arc::default() })
    }

    /// The intervals that kernels of GPUs read: the keys of each query, [2, n], and the queries of
    /// each key, [2, m]. None elsewhere.
    fn on_cuda(&self, device: &Device) -> Result<Option<[Tensor; 2]>> {
        if device.computes() != Computes::Cuda {
            return Ok(None);
        }
        let ([queries, keys], [n, m]) = ([&self.queries, &self.keys], [self.queries.tokens(), self.keys.tokens()]);
        let both = self.seen.get(device, || {
            let rows = |of: &Segments, seen: &Segments| cuda::rows_of_segments(of.bounds(), seen.bounds());
            device.tensor([2 * (n + m)], &[rows(queries, keys), rows(keys, queries)].concat(), Purpose::Data)
        })?;
        Ok(Some([both.view(0, [2, n])?, both.view(2 * n, [2, m])?]))
    }

    /// Queries, and keys with values, as kernels of GPUs read them.
    fn heads<'a>(&self, spec: &AttentionSpec, q: &'a Tensor, kv: &'a Tensor) -> Heads<'a> {
        let [queries, keys] = [&self.queries, &self.keys].map(Segments::tokens);
        Heads { q, kv, queries: [queries, spec.q_cols()], keys: [keys, 2 * spec.kv_cols()] }
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

/// Attention in which bounds alone say what a query sees; a window is for masks.
fn without_window(spec: &AttentionSpec) -> AttentionSpec {
    AttentionSpec { window: None, ..*spec }
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
    let seen = segments.on_cuda(q.device())?;
    by_float!(OP, q.dtype(), T => q.device().launch_on(OP, work, |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => {
                let [by_queries, _] = seen.as_ref().expect("a device that computes on cuda has them");
                let read = segments.heads(spec, q, kv);
                return cuda::attention_over(gpu, read, &without_window(spec), by_queries, &out, &lse);
            }
        };
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
    let seen = segments.on_cuda(q.device())?;
    let delta = scratch_on_cuda(q.device(), spec.heads * q.rows())?;
    by_float!(OP, q.dtype(), T => q.device().launch_on(OP, work, |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => {
                let [by_queries, of_keys] = seen.as_ref().expect("a device that computes on cuda has them");
                let (spec, delta) = (&without_window(spec), given(&delta));
                let (read, gradients) = (segments.heads(spec, q, kv), segments.heads(spec, &dq, &dkv));
                cuda::delta_of(gpu, [dout, out], None, spec, delta)?;
                let seen = Seen { by_queries, of_keys };
                return cuda::attention_over_backward(gpu, read, [dout, lse, delta], spec, seen, gradients);
            }
        };
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
