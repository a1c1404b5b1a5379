//! Attention and rotary positions on a fused qkv matrix: columns of h query heads, h_kv key heads,
//! h_kv value heads.

use super::{given, same_form, scratch_on_cuda};
use crate::cpu::attention::{self as kernels, AttentionSpec, DistanceBias, Rows, RowsMut};
use crate::cpu::norm::HeadColumns;
use crate::cpu::rope::{self as ropes, RopeTable, Rotation};
use crate::cuda::OnDevice;
use crate::error::{Result, TensorError};
use crate::{Computes, Cost, DType, Device, On, Purpose, Tensor, by_float, cuda, ensure_shape};
use std::sync::Arc;

/// The number of heads in a fused qkv matrix, and their width.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HeadLayout {
    /// Query heads.
    pub heads: usize,
    /// Key heads, and as many value heads.
    pub kv_heads: usize,
    /// Columns of one head.
    pub head_dim: usize,
}

impl HeadLayout {
    /// Columns of the whole matrix.
    pub fn columns(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    pub(super) fn check(&self, op: &'static str, qkv: &Tensor) -> Result<()> {
        ensure_shape!(qkv.last_dim() == self.columns(), op, "{} for {self:?}, {} columns", qkv.shape(), self.columns());
        Ok(())
    }

    fn part(&self, first_head: usize, heads: usize) -> HeadColumns {
        let first = first_head * self.head_dim;
        HeadColumns { row_stride: self.columns(), first, heads, head_dim: self.head_dim }
    }

    /// Where the query heads lie.
    pub fn query_columns(&self) -> HeadColumns {
        self.part(0, self.heads)
    }

    /// Where the key heads lie.
    pub fn key_columns(&self) -> HeadColumns {
        self.part(self.heads, self.kv_heads)
    }

    /// Where the value heads lie.
    pub fn value_columns(&self) -> HeadColumns {
        self.part(self.heads + self.kv_heads, self.kv_heads)
    }
}

impl From<&AttentionSpec> for HeadLayout {
    fn from(spec: &AttentionSpec) -> HeadLayout {
        HeadLayout { heads: spec.heads, kv_heads: spec.kv_heads, head_dim: spec.head_dim }
    }
}

/// The bounds of packed sequences, first 0, last the number of tokens. Known to the host on every
/// device, because costs and launches depend on them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Segments(Arc<Bounds>);

#[derive(PartialEq, Eq, Debug)]
struct Bounds {
    bounds: Vec<i32>,
    /// For each row, the first of its segment and the end of it; on a GPU that has used them.
    rows: OnDevice,
}

impl Segments {
    /// Checks that the bounds start at 0 and do not fall.
    pub fn new(bounds: &[i32]) -> Result<Segments> {
        ensure_shape!(
            bounds.first() == Some(&0) && bounds.is_sorted(),
            "segments",
            "bounds must start at 0 and not fall: {bounds:?}"
        );
        Ok(Segments::of(bounds.to_vec()))
    }

    /// `rows` sequences of `length` tokens.
    pub fn uniform(rows: usize, length: usize) -> Segments {
        Segments::of((0..=rows).map(|row| (row * length) as i32).collect())
    }

    fn of(bounds: Vec<i32>) -> Segments {
        Segments(Arc::new(Bounds { bounds, rows: OnDevice::default() }))
    }

    /// The bounds of each row's segment, [2, m], where kernels read those; None where they read
    /// [`Segments::bounds`].
    pub(super) fn on_cuda(&self, device: &Device) -> Result<Option<Tensor>> {
        let rows = || cuda::rows_of_segments(self.bounds(), self.bounds());
        let make = || device.tensor([2, self.tokens()], &rows(), Purpose::Data);
        (device.computes() == Computes::Cuda).then(|| self.0.rows.get(device, make)).transpose()
    }

    /// Brings to `device` what its kernels read of these bounds, if they read any; they would
    /// otherwise when they first need it.
    pub fn bring_to(&self, device: &Device) -> Result<()> {
        self.on_cuda(device).map(drop)
    }

    /// Lets kernels on `device` that read these bounds read those of `other` from now on, for as
    /// many tokens: what a graph is launched with.
    pub fn overwrite_on(&self, device: &Device, other: &Segments) -> Result<()> {
        ensure_shape!(self.tokens() == other.tokens(), "segments", "{} tokens for {}", other.tokens(), self.tokens());
        match self.on_cuda(device)? {
            Some(mut rows) if !device.is_meta() => rows.write(&cuda::rows_of_segments(other.bounds(), other.bounds())),
            _ => Ok(()),
        }
    }

    /// The bounds.
    pub fn bounds(&self) -> &[i32] {
        &self.0.bounds
    }

    /// The number of tokens.
    pub fn tokens(&self) -> usize {
        self.bounds()[self.bounds().len() - 1] as usize
    }

    /// The length of the longest sequence.
    pub fn longest(&self) -> usize {
        self.bounds().windows(2).map(|pair| (pair[1] - pair[0]) as usize).max().unwrap_or(0)
    }
}

pub(super) fn columns<'a, T>(
    data: &'a [T],
    rows: usize,
    spec: &AttentionSpec,
) -> Result<[Rows<'a, T>; 3], TensorError> {
    let (q, kv) = (spec.q_cols(), spec.kv_cols());
    let all = Rows::dense(data, rows, q + 2 * kv)?;
    Ok([all.columns(0..q), all.columns(q..q + kv), all.columns(q + kv..q + 2 * kv)])
}

/// Tokens, keys that a query sees on average, query heads, key heads, width of a head; of attention
/// whose forward multiplies `products` times.
pub(super) fn dims(spec: &AttentionSpec, tokens: usize, products: u64) -> [usize; 5] {
    let seen = products as usize / (tokens * spec.q_cols()).max(1);
    [tokens, seen, spec.heads, spec.kv_heads, spec.head_dim]
}

/// Attention of qkv within each segment: out [m, h c] and the log-sum-exp of each query's scores,
/// f32 [h, m].
pub fn attention(qkv: &Tensor, spec: &AttentionSpec, segments: &Segments) -> Result<(Tensor, Tensor)> {
    const OP: &str = "attention";
    HeadLayout::from(spec).check(OP, qkv)?;
    let m = qkv.rows();
    ensure_shape!(segments.tokens() == m, OP, "segments of {} tokens for {} rows", segments.tokens(), m);
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
            On::Cuda(gpu) => return cuda::attention(gpu, qkv, spec, given(&bounds), &out, &lse),
        };
        let [q, k, v] = columns(qkv.get::<T>(), m, spec)?;
        let out = RowsMut::dense(out.get_mut::<T>(), m, spec.q_cols())?;
        Ok(kernels::forward(cpu, spec, q, k, v, segments.bounds(), out, lse.get_mut::<f32>())?)
    })?);
    Ok((out, lse))
}

/// The gradient of qkv.
pub fn attention_backward(
    dout: &Tensor,
    qkv: &Tensor,
    out: &Tensor,
    lse: &Tensor,
    spec: &AttentionSpec,
    segments: &Segments,
) -> Result<Tensor> {
    const OP: &str = "attention_backward";
    same_form(OP, dout, out)?;
    HeadLayout::from(spec).check(OP, qkv)?;
    let m = qkv.rows();
    let mut dqkv = qkv.empty_like(*qkv.shape(), qkv.dtype())?;
    let cost = Cost {
        flops: kernels::flops_backward(spec, segments.bounds()),
        bytes: kernels::bytes_backward(spec, m, qkv.dtype()),
    };
    let work = cost.on(qkv.dtype(), dims(spec, m, cost.flops / 10));
    let bounds = segments.on_cuda(qkv.device())?;
    let delta = scratch_on_cuda(qkv.device(), spec.heads * m)?;
    by_float!(OP, qkv.dtype(), T => qkv.device().launch_on(OP, work, |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => {
                let read = [dout, qkv, out, lse];
                return cuda::attention_backward(gpu, read, spec, given(&bounds), given(&delta), &dqkv);
            }
        };
        let [q, k, v] = columns(qkv.get::<T>(), m, spec)?;
        let out = Rows::dense(out.get::<T>(), m, spec.q_cols())?;
        let dout = Rows::dense(dout.get::<T>(), m, spec.q_cols())?;
        let all = RowsMut::dense(dqkv.get_mut::<T>(), m, spec.q_cols() + 2 * spec.kv_cols())?;
        let (dq, rest) = all.split_columns(spec.q_cols());
        let (dk, dv) = rest.split_columns(spec.kv_cols());
        Ok(kernels::backward(cpu, spec, q, k, v, out, lse.get::<f32>(), dout, segments.bounds(), dq, dk, dv)?)
    })?);
    Ok(dqkv)
}

/// Attention of new tokens over a cache: qkv [n, ..] holds their queries, `keys` and `values`
/// [capacity, h_kv c] the cache, into which the new tokens' keys and values are written from row
/// `start` on. Returns [n, h c].
pub fn attention_decode(
    qkv: &Tensor,
    spec: &AttentionSpec,
    keys: &mut Tensor,
    values: &mut Tensor,
    start: usize,
) -> Result<Tensor> {
    decode("attention_decode", qkv, None, spec, keys, values, start)
}

fn decode(
    op: &'static str,
    qkv: &Tensor,
    bias: Option<&Tensor>,
    spec: &AttentionSpec,
    keys: &mut Tensor,
    values: &mut Tensor,
    start: usize,
) -> Result<Tensor> {
    HeadLayout::from(spec).check(op, qkv)?;
    same_form(op, keys, values)?;
    let (n, kv) = (qkv.rows(), spec.kv_cols());
    let capacity = keys.rows();
    ensure_shape!(
        keys.dtype() == qkv.dtype() && keys.last_dim() == kv && start + n <= capacity,
        op,
        "{n} tokens from {start} on in a cache {keys:?}"
    );
    let reach = bias.map(|bias| super::relative::reach(op, spec, bias)).transpose()?;
    if let Some(reach) = reach {
        let tokens = start + n;
        ensure_shape!(tokens <= reach, op, "a sequence of {tokens} tokens, and the bias reaches {reach}");
    }
    let bias = bias.zip(reach);
    let mut out = qkv.empty_like([n, spec.q_cols()], qkv.dtype())?;
    let cost = Cost::new(4 * spec.q_cols() * n * (start + n), (start + n) * kv * 2 * qkv.dtype().size());
    by_float!(op, qkv.dtype(), T => qkv.device().launch_on(op, cost, |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => {
                let bias = bias.map(|(table, reach)| cuda::Distances { table, reach });
                return cuda::attention_decode(gpu, qkv, bias, spec, [keys, values], start, &out);
            }
        };
        let [q, k, v] = columns(qkv.get::<T>(), n, spec)?;
        let (key_cache, value_cache) = (keys.get_mut::<T>(), values.get_mut::<T>());
        for row in 0..n {
            let place = (start + row) * kv..(start + row + 1) * kv;
            key_cache[place.clone()].copy_from_slice(k.row(row));
            value_cache[place].copy_from_slice(v.row(row));
        }
        let (k, v) = (Rows::dense(key_cache, capacity, kv)?, Rows::dense(value_cache, capacity, kv)?);
        let out = RowsMut::dense(out.get_mut::<T>(), n, spec.q_cols())?;
        match bias {
            None => kernels::decode(cpu, spec, q, k, v, start, out)?,
            Some((bias, reach)) => {
                let bias = DistanceBias::new(spec, bias.get::<f32>(), reach)?;
                kernels::decode_biased(cpu, spec, q, k, v, start, bias, out)?;
            }
        }
        Ok(())
    })?);
    Ok(out)
}

/// [`attention_decode`] with `bias`, f32 [h, 2 reach - 1], added to scores by distance
/// ([`biased_attention`](super::biased_attention)).
pub fn attention_decode_biased(
    qkv: &Tensor,
    bias: &Tensor,
    spec: &AttentionSpec,
    keys: &mut Tensor,
    values: &mut Tensor,
    start: usize,
) -> Result<Tensor> {
    const OP: &str = "attention_decode_biased";
    decode(OP, qkv, Some(bias), spec, keys, values, start)
}

/// Rotates the query and key columns of qkv by their positions (i32 [m]), or back; in place when
/// nobody else holds qkv.
pub fn rope(
    qkv: Tensor,
    layout: HeadLayout,
    table: &RopeTable,
    positions: &Tensor,
    rotation: Rotation,
) -> Result<Tensor> {
    const OP: &str = "rope";
    layout.check(OP, &qkv)?;
    ensure_shape!(positions.elements() == qkv.rows(), OP, "{} positions for {}", positions.elements(), qkv.shape());
    let heads = layout.heads + layout.kv_heads;
    let cost = Cost::new(3 * qkv.rows() * heads * layout.head_dim, 2 * qkv.bytes());
    let mut qkv = super::pointwise::into_unique(qkv)?;
    let work = cost.on(qkv.dtype(), [qkv.rows(), qkv.last_dim()]);
    let device = qkv.device().clone();
    let on_cuda = || table.on_device.get(&device, || cuda::rope_table(&device, table));
    let on_cuda = (device.computes() == Computes::Cuda).then(on_cuda).transpose()?;
    by_float!(OP, qkv.dtype(), T => device.launch_on(OP, work, |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::rope(gpu, &qkv, layout, table, given(&on_cuda), positions, rotation),
        };
        let positions = positions.get::<i32>();
        Ok(ropes::rope(cpu, rotation, layout.part(0, heads), table, positions, qkv.get_mut::<T>())?)
    })?);
    Ok(qkv)
}
