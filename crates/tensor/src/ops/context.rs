//! Attention of a part of a packed batch over the keys and values of all of it: what one rank of a
//! context-parallel group computes once the keys and values of all ranks are gathered.

use crate::cpu::attention::{self as kernels, AttentionSpec, Rows, RowsMut};
use crate::dtype::Element;
use crate::error::{Result, TensorError};
use crate::{Cost, DType, Device, On, Purpose, Tensor, by_float, ensure_shape};
use std::ops::Range;
use std::sync::Arc;

/// Queries that are a part of a packed batch, and the keys that they see.
///
/// Each query sees keys of its own segment (document) only, up to its own position in the whole
/// batch. Rows of keys and values lie in the order in which they were gathered.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ContextSegments(Arc<Inside>);

#[derive(PartialEq, Eq, Debug)]
struct Inside {
    queries: usize,
    keys: usize,
    parts: Vec<Part>,
    /// For each stretch of gathered rows, in their order, its rows in the whole batch.
    gathered: Vec<Range<usize>>,
}

/// Consecutive queries whose segments have keys that rise and do not overlap.
#[derive(PartialEq, Eq, Debug, Default)]
struct Part {
    /// Rows among the queries.
    rows: Range<usize>,
    /// Bounds of segments among these rows, and among the keys in the order of the whole batch.
    /// Keys that no query sees lie in segments without queries.
    cu_q: Vec<i32>,
    cu_k: Vec<i32>,
}

impl ContextSegments {
    /// `bounds` are those of the segments of the whole batch, as for
    /// [`Segments`](super::Segments). `queries` are the rows that are here, and `gathered` all
    /// rows in the order in which their keys and values come; both by stretches.
    pub fn new(bounds: &[i32], queries: &[Range<usize>], gathered: Vec<Range<usize>>) -> Result<ContextSegments> {
        const OP: &str = "context_segments";
        ensure_shape!(
            bounds.first() == Some(&0) && bounds.is_sorted(),
            OP,
            "bounds must start at 0 and not fall: {bounds:?}"
        );
        let keys = bounds[bounds.len() - 1] as usize;
        let mut sorted: Vec<&Range<usize>> = gathered.iter().collect();
        sorted.sort_by_key(|rows| rows.start);
        let meets = sorted.windows(2).all(|pair| pair[0].end == pair[1].start);
        let all = sorted.first().is_some_and(|rows| rows.start == 0) && sorted.last().is_some_and(|r| r.end == keys);
        ensure_shape!(meets && all, OP, "gathered rows {gathered:?} are not those of {keys} tokens");
        ensure_shape!(
            queries.iter().all(|rows| rows.start < rows.end && rows.end <= keys),
            OP,
            "queries {queries:?} of {keys} tokens"
        );
        let mut parts: Vec<Part> = Vec::new();
        let mut at = 0;
        for (queries, keys_of) in seen(bounds, &joined(queries)) {
            let fits = parts.last().is_some_and(|part| part.cu_k[part.cu_k.len() - 1] as usize <= keys_of.start);
            if !fits {
                parts.push(Part { rows: at..at, cu_q: vec![0], cu_k: vec![0] });
            }
            let part = parts.last_mut().expect("one was pushed");
            let (q, k) = (part.cu_q[part.cu_q.len() - 1], part.cu_k[part.cu_k.len() - 1]);
            if (k as usize) < keys_of.start {
                part.cu_q.push(q);
                part.cu_k.push(keys_of.start as i32);
            }
            part.cu_q.push(q + queries.len() as i32);
            part.cu_k.push(keys_of.end as i32);
            at += queries.len();
            part.rows.end = at;
        }
        for part in &mut parts {
            let (q, k) = (part.cu_q[part.cu_q.len() - 1], part.cu_k[part.cu_k.len() - 1]);
            if (k as usize) < keys {
                part.cu_q.push(q);
                part.cu_k.push(keys as i32);
            }
        }
        Ok(ContextSegments(Arc::new(Inside { queries: at, keys, parts, gathered })))
    }

    /// The number of queries that are here.
    pub fn queries(&self) -> usize {
        self.0.queries
    }

    /// The number of tokens of the whole batch.
    pub fn keys(&self) -> usize {
        self.0.keys
    }

    /// The exact number of (query, key) pairs of one head that are not masked.
    pub fn pairs(&self, spec: &AttentionSpec) -> u64 {
        self.0.parts.iter().map(|part| kernels::unmasked_pairs_cross(spec, &part.cu_q, &part.cu_k)).sum()
    }

    /// Copies rows from the gathered order to that of the batch.
    fn order<T: Copy>(&self, gathered: &[T], columns: usize, whole: &mut [T]) {
        let mut at = 0;
        for rows in &self.0.gathered {
            let here = at..at + rows.len() * columns;
            at = here.end;
            whole[rows.start * columns..rows.end * columns].copy_from_slice(&gathered[here]);
        }
    }
}

/// Stretches of rows, those that follow each other joined.
fn joined(rows: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut all: Vec<Range<usize>> = Vec::new();
    for rows in rows {
        match all.last_mut() {
            Some(last) if last.end == rows.start => last.end = rows.end,
            _ => all.push(rows.clone()),
        }
    }
    all
}

/// For each stretch of `queries` within one segment, in their order, its rows and the keys from the
/// start of the segment to the last of its queries.
fn seen(bounds: &[i32], queries: &[Range<usize>]) -> Vec<(Range<usize>, Range<usize>)> {
    let mut all = Vec::new();
    for rows in queries {
        for segment in bounds.windows(2) {
            let [start, end] = [segment[0] as usize, segment[1] as usize];
            let here = rows.start.max(start)..rows.end.min(end);
            if !here.is_empty() {
                all.push((here.clone(), start..here.end));
            }
        }
    }
    all
}

fn check(op: &'static str, q: &Tensor, kv: &Tensor, spec: &AttentionSpec, segments: &ContextSegments) -> Result<()> {
    super::same_dtype(op, q, kv)?;
    let (queries, keys) = (segments.queries(), segments.keys());
    ensure_shape!(
        spec.causal && q.rows() == queries && q.last_dim() == spec.q_cols(),
        op,
        "queries {} for {queries} of {} columns, causal",
        q.shape(),
        spec.q_cols()
    );
    ensure_shape!(
        kv.rows() == keys && kv.last_dim() == 2 * spec.kv_cols(),
        op,
        "keys and values {} for {keys} of {} columns",
        kv.shape(),
        2 * spec.kv_cols()
    );
    Ok(())
}

fn work(spec: &AttentionSpec, segments: &ContextSegments, dtype: DType, products: u64, times: usize) -> Cost {
    let pairs = segments.pairs(spec);
    let rows = segments.queries() * (2 * spec.q_cols() * dtype.size() + 4 * spec.heads);
    let keys = segments.keys() * 2 * spec.kv_cols() * dtype.size();
    Cost { flops: products * 2 * (spec.heads * spec.head_dim) as u64 * pairs, bytes: (times * (rows + keys)) as u64 }
}

/// [tokens, queries, query heads, key heads, width of a head], for records of calls.
fn dims(spec: &AttentionSpec, segments: &ContextSegments) -> [usize; 5] {
    [segments.keys(), segments.queries(), spec.heads, spec.kv_heads, spec.head_dim]
}

/// Keys and values in the order of the batch need memory of their own.
fn scratch(device: &Device, kv: &Tensor) -> Result<Tensor> {
    device.empty(*kv.shape(), kv.dtype(), Purpose::Workspace)
}

fn not_on_cuda(op: &'static str) -> TensorError {
    TensorError::Shape { op, what: "there is no kernel for it on GPUs".to_owned() }
}

/// The keys and the values of rows of both.
fn halves<'a, T>(kv: &'a [T], spec: &AttentionSpec) -> Result<[Rows<'a, T>; 2], TensorError> {
    let columns = spec.kv_cols();
    let all = Rows::dense(kv, kv.len() / (2 * columns).max(1), 2 * columns)?;
    Ok([all.columns(0..columns), all.columns(columns..2 * columns)])
}

/// Attention of queries `q` [n, h c] over gathered keys and values `kv` [m, 2 h_kv c]: out [n, h c]
/// and the log-sum-exp of each query's scores, f32 [h, n], part by part.
pub fn context_attention(
    q: &Tensor,
    kv: &Tensor,
    spec: &AttentionSpec,
    segments: &ContextSegments,
) -> Result<(Tensor, Tensor)> {
    const OP: &str = "context_attention";
    check(OP, q, kv, spec, segments)?;
    let mut out = q.empty_like(*q.shape(), q.dtype())?;
    let mut lse = q.empty_like([spec.heads, segments.queries()], DType::F32)?;
    let mut ordered = scratch(q.device(), kv)?;
    let work = work(spec, segments, q.dtype(), 2, 1).on(q.dtype(), dims(spec, segments));
    by_float!(OP, q.dtype(), T => q.device().launch_on(OP, work, |on| {
        let On::Cpu(cpu) = on else { return Err(not_on_cuda(OP)) };
        segments.order(kv.get::<T>(), kv.last_dim(), ordered.get_mut::<T>());
        let [k, v] = halves(ordered.get::<T>(), spec)?;
        let columns = spec.q_cols();
        let (q, out, lse) = (q.get::<T>(), out.get_mut::<T>(), lse.get_mut::<f32>());
        for Part { rows, cu_q, cu_k } in &segments.0.parts {
            let here = rows.start * columns..rows.end * columns;
            let lse = &mut lse[rows.start * spec.heads..rows.end * spec.heads];
            let q = Rows::dense(&q[here.clone()], rows.len(), columns)?;
            let out = RowsMut::dense(&mut out[here], rows.len(), columns)?;
            kernels::forward_cross(cpu, spec, q, k, v, cu_q, cu_k, out, lse)?;
        }
        Ok(())
    })?);
    Ok((out, lse))
}

/// The gradients of q and of kv, the latter in the gathered order. What several parts of the
/// queries give for a key is added in f32.
pub fn context_attention_backward(
    dout: &Tensor,
    q: &Tensor,
    kv: &Tensor,
    out: &Tensor,
    lse: &Tensor,
    spec: &AttentionSpec,
    segments: &ContextSegments,
) -> Result<(Tensor, Tensor)> {
    const OP: &str = "context_attention_backward";
    super::same_form(OP, dout, out)?;
    check(OP, q, kv, spec, segments)?;
    let mut dq = q.empty_like(*q.shape(), q.dtype())?;
    let mut dkv = kv.empty_like(*kv.shape(), kv.dtype())?;
    let (mut ordered, mut of_part) = (scratch(q.device(), kv)?, scratch(q.device(), kv)?);
    let work = work(spec, segments, q.dtype(), 5, 2).on(q.dtype(), dims(spec, segments));
    by_float!(OP, q.dtype(), T => q.device().launch_on(OP, work, |on| {
        let On::Cpu(cpu) = on else { return Err(not_on_cuda(OP)) };
        let (columns, both) = (spec.q_cols(), kv.last_dim());
        segments.order(kv.get::<T>(), both, ordered.get_mut::<T>());
        let [k, v] = halves(ordered.get::<T>(), spec)?;
        let (q, out, dout, lse) = (q.get::<T>(), out.get::<T>(), dout.get::<T>(), lse.get::<f32>());
        let (dq, dkv) = (dq.get_mut::<T>(), dkv.get_mut::<T>());
        dkv.fill(T::from_f32(0.0));
        for (number, Part { rows, cu_q, cu_k }) in segments.0.parts.iter().enumerate() {
            let here = rows.start * columns..rows.end * columns;
            let dense = |data| Rows::dense(data, rows.len(), columns);
            let (q, out, dout) = (dense(&q[here.clone()])?, dense(&out[here.clone()])?, dense(&dout[here.clone()])?);
            let lse = &lse[rows.start * spec.heads..rows.end * spec.heads];
            let sums = of_part.get_mut::<T>();
            sums.fill(T::from_f32(0.0));
            let dq = RowsMut::dense(&mut dq[here], rows.len(), columns)?;
            let (dk, dv) = RowsMut::dense(&mut *sums, k.rows(), both)?.split_columns(spec.kv_cols());
            kernels::backward_cross(cpu, spec, q, k, v, out, lse, dout, cu_q, cu_k, dq, dk, dv)?;
            let mut at = 0;
            for rows in &segments.0.gathered {
                let from = &sums[rows.start * both..rows.end * both];
                for (to, from) in dkv[at..at + from.len()].iter_mut().zip(from) {
                    *to = if number == 0 { *from } else { T::from_f32(to.to_f32() + from.to_f32()) };
                }
                at += from.len();
            }
        }
        Ok(())
    })?);
    Ok((dq, dkv))
}
