//! Attention of a part of a packed batch over the keys and values of all of it: what one rank of a
//! context-parallel group computes once the keys and values of all ranks are gathered.
//!
//! It can be computed in two parts ([`ContextSegments::apart`]): over the keys that the rank has
//! itself, while the others are on their way, and over those. The second joins the results by their
//! log-sum-exps in f32, as flash attention joins blocks of keys (Dao et al. 2022; Liu et al. 2023,
//! "Ring attention").

mod on_cuda;

use super::not_on_cuda;
use crate::cpu::Cpu;
use crate::cpu::attention::{self as kernels, AttentionSpec, Rows, RowsMut};
use crate::cpu::threads::Shares;
use crate::cuda::{self, OnDevice};
use crate::dtype::Element;
use crate::error::Result;
use crate::{Computes, Cost, DType, Device, On, Purpose, Tensor, Work, by_float, ensure_shape};
use std::ops::Range;
use std::sync::Arc;

/// Queries that are a part of a packed batch, and the keys that they see, or some of these.
///
/// Each query sees keys of its own segment (document) only, up to its own position in the whole
/// batch. Rows of keys and values lie in the order in which they were gathered.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ContextSegments(Arc<Inside>);

#[derive(PartialEq, Eq, Debug)]
struct Inside {
    queries: usize,
    /// Rows of keys and values that are given.
    given: usize,
    /// Those of them that are read.
    read: usize,
    parts: Vec<Part>,
    /// For each stretch of given rows, in their order, its place among those that are read, in the
    /// order of the whole batch; None if it is not.
    gathered: Vec<(usize, Option<usize>)>,
    /// False if each query sees all keys of its segment: they all come before it.
    causal: bool,
    /// The bounds of the whole batch's segments.
    bounds: Vec<i32>,
    /// The rows of the whole batch that the queries are, and those whose keys are read, ascending.
    rows: Vec<Range<usize>>,
    keys: Vec<Range<usize>>,
    /// The numbers that kernels of GPUs read, for a sliding window or none.
    on_device: OnDevice,
}

/// The keys of some attention.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Which {
    All,
    /// Those of the rows that are here.
    Own,
    /// All but those.
    Others,
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
        ContextSegments::of(Which::All, bounds, queries, gathered)
    }

    /// The same in two parts: over the keys of the rows that are here, whose keys and values are
    /// given in the order of `queries`; and over all others, given in the order of `gathered`.
    pub fn apart(
        bounds: &[i32],
        queries: &[Range<usize>],
        gathered: Vec<Range<usize>>,
    ) -> Result<[ContextSegments; 2]> {
        let of = |which| ContextSegments::of(which, bounds, queries, gathered.clone());
        Ok([of(Which::Own)?, of(Which::Others)?])
    }

    fn of(
        which: Which,
        bounds: &[i32],
        queries: &[Range<usize>],
        gathered: Vec<Range<usize>>,
    ) -> Result<ContextSegments> {
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
        // The rows whose keys are read, ascending, and the number of them before a row.
        let is_own = |rows: &Range<usize>| queries.iter().any(|own| own.start <= rows.start && rows.end <= own.end);
        let mut read: Vec<Range<usize>> = match which {
            Which::All => gathered.clone(),
            Which::Own => queries.to_vec(),
            Which::Others => gathered.iter().filter(|rows| !is_own(rows)).cloned().collect(),
        };
        read.sort_by_key(|rows| rows.start);
        let before =
            |row: usize| -> usize { read.iter().map(|rows| row.clamp(rows.start, rows.end) - rows.start).sum() };
        let keys = before(keys);
        let given = if which == Which::Own { queries.to_vec() } else { gathered };
        let mut parts: Vec<Part> = Vec::new();
        let mut at = 0;
        for (queries, keys_of) in seen(bounds, &joined(queries)) {
            let keys_of = before(keys_of.start)..before(keys_of.end);
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
        let place = |rows: &Range<usize>| {
            let is_read = which != Which::Others || !is_own(rows);
            (rows.len(), is_read.then(|| before(rows.start)))
        };
        let inside = Inside {
            queries: at,
            given: given.iter().map(Range::len).sum(),
            read: keys,
            parts,
            gathered: given.iter().map(place).collect(),
            causal: which != Which::Others,
            bounds: bounds.to_vec(),
            rows: queries.to_vec(),
            keys: read,
            on_device: OnDevice::default(),
        };
        Ok(ContextSegments(Arc::new(inside)))
    }

    /// The number of queries that are here.
    pub fn queries(&self) -> usize {
        self.0.queries
    }

    /// The number of tokens whose keys and values are given: those of the whole batch, or those
    /// that are here.
    pub fn given(&self) -> usize {
        self.0.given
    }

    /// The attention of a call: that of `spec`, without a mask where it hides nothing.
    fn masked(&self, spec: &AttentionSpec) -> AttentionSpec {
        AttentionSpec { causal: self.0.causal, ..*spec }
    }

    /// The exact number of (query, key) pairs of one head that are not masked.
    pub fn pairs(&self, spec: &AttentionSpec) -> u64 {
        let spec = &self.masked(spec);
        self.0.parts.iter().map(|part| kernels::unmasked_pairs_cross(spec, &part.cu_q, &part.cu_k)).sum()
    }

    /// Copies the rows that are read from the order in which they are given to that of the batch.
    fn order<T: Copy>(&self, given: &[T], columns: usize, read: &mut [T]) {
        for (here, place) in self.places(columns) {
            if let Some(place) = place {
                read[place].copy_from_slice(&given[here]);
            }
        }
    }

    /// Statistics of queries, [h, n] part by part, as [n, h].
    fn by_row(&self, heads: usize, by_part: &[f32], by_row: &mut [f32]) {
        for Part { rows, .. } in &self.0.parts {
            for (head, part) in by_part[rows.start * heads..rows.end * heads].chunks_exact(rows.len()).enumerate() {
                for (row, value) in rows.clone().zip(part) {
                    by_row[row * heads + head] = *value;
                }
            }
        }
    }

    /// Statistics of queries, [n, h], as [h, n] part by part.
    fn by_part(&self, heads: usize, by_row: &[f32], by_part: &mut [f32]) {
        for Part { rows, .. } in &self.0.parts {
            let parts = by_part[rows.start * heads..rows.end * heads].chunks_exact_mut(rows.len());
            for (head, part) in parts.enumerate() {
                for (row, value) in rows.clone().zip(part) {
                    *value = by_row[row * heads + head];
                }
            }
        }
    }

    /// The elements of each stretch of rows as given, and those of it among the rows that are read.
    fn places(&self, columns: usize) -> impl Iterator<Item = (Range<usize>, Option<Range<usize>>)> {
        let mut at = 0;
        self.0.gathered.iter().map(move |(rows, place)| {
            let here = at..at + rows * columns;
            at = here.end;
            (here, place.map(|place| place * columns..(place + rows) * columns))
        })
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
    let (queries, keys) = (segments.queries(), segments.given());
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

fn work(spec: &AttentionSpec, segments: &ContextSegments, dtype: DType, products: u64, times: usize) -> Work {
    let pairs = segments.pairs(spec);
    let rows = segments.queries() * (2 * spec.q_cols() * dtype.size() + 4 * spec.heads);
    let keys = segments.given() * 2 * spec.kv_cols() * dtype.size();
    let flops = products * 2 * (spec.heads * spec.head_dim) as u64 * pairs;
    Cost { flops, bytes: (times * (rows + keys)) as u64 }.on(dtype, dims(spec, segments))
}

/// [tokens, queries, query heads, key heads, width of a head], for records of calls.
fn dims(spec: &AttentionSpec, segments: &ContextSegments) -> [usize; 5] {
    [segments.given(), segments.queries(), spec.heads, spec.kv_heads, spec.head_dim]
}

/// Keys and values in the order of the batch need memory of their own.
fn scratch(device: &Device, kv: &Tensor, segments: &ContextSegments) -> Result<Tensor> {
    device.empty([segments.0.read.max(1), kv.last_dim()], kv.dtype(), Purpose::Workspace)
}

/// The keys and the values of rows of both.
pub(super) fn halves<'a, T>(kv: &'a [T], rows: usize, spec: &AttentionSpec) -> Result<[Rows<'a, T>; 2]> {
    let columns = spec.kv_cols();
    let all = Rows::dense(kv, rows, 2 * columns)?;
    Ok([all.columns(0..columns), all.columns(columns..2 * columns)])
}

/// Attention of queries `q` [n, h c] over gathered keys and values `kv` [m, 2 h_kv c]: out [n, h c]
/// and the log-sum-exp of each query's scores, f32 [h, n], in the order that the backward reads.
pub fn context_attention(
    q: &Tensor,
    kv: &Tensor,
    spec: &AttentionSpec,
    segments: &ContextSegments,
) -> Result<(Tensor, Tensor)> {
    const OP: &str = "context_attention";
    check(OP, q, kv, spec, segments)?;
    if q.device().computes() == Computes::Cuda {
        return on_cuda::forward(OP, [q, kv], spec, segments, false);
    }
    let mut out = q.empty_like(*q.shape(), q.dtype())?;
    let mut lse = q.empty_like([spec.heads, segments.queries()], DType::F32)?;
    let mut ordered = scratch(q.device(), kv, segments)?;
    let work = work(spec, segments, q.dtype(), 2, 1);
    by_float!(OP, q.dtype(), T => q.device().launch_on(OP, work, |on| {
        let On::Cpu(cpu) = on else { return Err(not_on_cuda(OP)) };
        forward::<T>(cpu, q, kv, &mut ordered, spec, segments, out.get_mut::<T>(), lse.get_mut::<f32>())
    })?);
    Ok((out, lse))
}

/// The forward of every part of the queries.
fn forward<T: Element>(
    cpu: &Cpu,
    q: &Tensor,
    kv: &Tensor,
    ordered: &mut Tensor,
    spec: &AttentionSpec,
    segments: &ContextSegments,
    out: &mut [T],
    lse: &mut [f32],
) -> Result<()> {
    segments.order(kv.get::<T>(), kv.last_dim(), ordered.get_mut::<T>());
    let [k, v] = halves(ordered.get::<T>(), segments.0.read, spec)?;
    let (columns, masked, q) = (spec.q_cols(), segments.masked(spec), q.get::<T>());
    for Part { rows, cu_q, cu_k } in &segments.0.parts {
        let here = rows.start * columns..rows.end * columns;
        let lse = &mut lse[rows.start * spec.heads..rows.end * spec.heads];
        let q = Rows::dense(&q[here.clone()], rows.len(), columns)?;
        let out = RowsMut::dense(&mut out[here], rows.len(), columns)?;
        kernels::forward_cross(cpu, &masked, q, k, v, cu_q, cu_k, out, lse)?;
    }
    Ok(())
}

/// A part of the attention of [`context_attention_rest`]: over the keys of the rows that are here.
/// Gives out [n, h c] and the log-sum-exp of each query's scores, f32 [n, h].
pub fn context_attention_part(
    q: &Tensor,
    kv: &Tensor,
    spec: &AttentionSpec,
    segments: &ContextSegments,
) -> Result<(Tensor, Tensor)> {
    const OP: &str = "context_attention_part";
    check(OP, q, kv, spec, segments)?;
    if q.device().computes() == Computes::Cuda {
        return on_cuda::forward(OP, [q, kv], spec, segments, true);
    }
    let rows = segments.queries();
    let mut out = q.empty_like(*q.shape(), q.dtype())?;
    let mut lse = q.empty_like([rows, spec.heads], DType::F32)?;
    let mut by_part = q.device().empty([spec.heads, rows], DType::F32, Purpose::Workspace)?;
    let mut ordered = scratch(q.device(), kv, segments)?;
    let work = work(spec, segments, q.dtype(), 2, 1);
    by_float!(OP, q.dtype(), T => q.device().launch_on(OP, work, |on| {
        let On::Cpu(cpu) = on else { return Err(not_on_cuda(OP)) };
        let by_part = by_part.get_mut::<f32>();
        forward::<T>(cpu, q, kv, &mut ordered, spec, segments, out.get_mut::<T>(), by_part)?;
        segments.by_row(spec.heads, by_part, lse.get_mut::<f32>());
        Ok(())
    })?);
    Ok((out, lse))
}

/// The gradients of q and kv of [`context_attention_part`]; `dlse` is that of the log-sum-exp.
pub fn context_attention_part_backward(
    [dout, dlse]: [&Tensor; 2],
    q: &Tensor,
    kv: &Tensor,
    out: &Tensor,
    lse: &Tensor,
    spec: &AttentionSpec,
    segments: &ContextSegments,
) -> Result<(Tensor, Tensor)> {
    const OP: &str = "context_attention_part_backward";
    super::same_form(OP, dout, out)?;
    super::same_form(OP, dlse, lse)?;
    let statistics = Statistics::ByRow { lse, dlse: Some(dlse) };
    backward(OP, dout, q, kv, out, statistics, spec, segments)
}

/// Attention over all keys, of which `own` and `own_lse` have the part of
/// [`context_attention_part`] and `kv` the others: out [n, h c] and the log-sum-exp of each query's
/// scores over all keys, f32 [n, h].
pub fn context_attention_rest(
    q: &Tensor,
    kv: &Tensor,
    [own, own_lse]: [&Tensor; 2],
    spec: &AttentionSpec,
    segments: &ContextSegments,
) -> Result<(Tensor, Tensor)> {
    const OP: &str = "context_attention_rest";
    check(OP, q, kv, spec, segments)?;
    super::same_form(OP, own, q)?;
    if q.device().computes() == Computes::Cuda {
        let (out, lse) = on_cuda::forward(OP, [q, kv], spec, segments, true)?;
        let cost = Cost::new(3 * own.elements(), 3 * own.bytes());
        q.device().launch_on("context_attention_join", cost, |on| match on {
            On::Cuda(gpu) => cuda::join(gpu, [own, own_lse], [&out, &lse], spec),
            On::Cpu(_) => Err(not_on_cuda(OP)),
        })?;
        return Ok((out, lse));
    }
    let (rows, heads) = (segments.queries(), spec.heads);
    let mut out = q.empty_like(*q.shape(), q.dtype())?;
    let mut lse = q.empty_like([rows, heads], DType::F32)?;
    let mut by_part = q.device().empty([heads, rows], DType::F32, Purpose::Workspace)?;
    let mut ordered = scratch(q.device(), kv, segments)?;
    let work = work(spec, segments, q.dtype(), 2, 1);
    by_float!(OP, q.dtype(), T => q.device().launch_on(OP, work, |on| {
        let On::Cpu(cpu) = on else { return Err(not_on_cuda(OP)) };
        let by_part = by_part.get_mut::<f32>();
        forward::<T>(cpu, q, kv, &mut ordered, spec, segments, out.get_mut::<T>(), by_part)?;
        let lse = lse.get_mut::<f32>();
        segments.by_row(heads, by_part, lse);
        let (own, own_lse) = (own.get::<T>(), own_lse.get::<f32>());
        let (outs, lses) = (Shares::new(out.get_mut::<T>()), Shares::new(lse));
        let (width, columns) = (spec.head_dim, spec.q_cols());
        let tasks = rows.div_ceil(ROWS_OF_TASK);
        cpu.threads.for_each(tasks, |task| {
            let rows = task * ROWS_OF_TASK..rows.min((task + 1) * ROWS_OF_TASK);
            let heads = rows.start * heads..rows.end * heads;
            // SAFETY: a task has rows of its own.
            let (out, lse) =
                unsafe { (outs.part(rows.start * columns..rows.end * columns), lses.part(heads.clone())) };
            let own = own[rows.start * columns..rows.end * columns].chunks_exact(width);
            for (((out, lse), own), own_lse) in out.chunks_exact_mut(width).zip(lse).zip(own).zip(&own_lse[heads]) {
                let max = own_lse.max(*lse);
                let [of_own, of_rest] = [*own_lse, *lse].map(|lse| (lse - max).exp());
                let sum = of_own + of_rest;
                let [of_own, of_rest] = [of_own / sum, of_rest / sum];
                *lse = max + sum.ln();
                for (out, own) in out.iter_mut().zip(own) {
                    *out = T::from_f32(of_own * own.to_f32() + of_rest * out.to_f32());
                }
            }
        });
        Ok(())
    })?);
    Ok((out, lse))
}

/// Rows that one task joins.
const ROWS_OF_TASK: usize = 64;

/// The gradients of q and kv of [`context_attention_rest`], and of the part that it was given and
/// its log-sum-exp.
pub fn context_attention_rest_backward(
    dout: &Tensor,
    q: &Tensor,
    kv: &Tensor,
    [own, own_lse]: [&Tensor; 2],
    [out, lse]: [&Tensor; 2],
    spec: &AttentionSpec,
    segments: &ContextSegments,
) -> Result<[Tensor; 4]> {
    const OP: &str = "context_attention_rest_backward";
    super::same_form(OP, dout, out)?;
    let (dq, dkv) = backward(OP, dout, q, kv, out, Statistics::ByRow { lse, dlse: None }, spec, segments)?;
    let mut down = own.empty_like(*own.shape(), own.dtype())?;
    let mut dlse = own_lse.empty_like(*own_lse.shape(), DType::F32)?;
    let cost = Cost::new(6 * own.elements(), 4 * own.bytes());
    by_float!(OP, q.dtype(), T => q.device().launch_on("context_attention_join_backward", cost, |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::join_backward(gpu, dout, [out, lse], [own, own_lse], spec, [&down, &dlse]),
        };
        let (rows, heads, width, columns) = (own.rows(), spec.heads, spec.head_dim, spec.q_cols());
        let (dout, out, own) = (dout.get::<T>(), out.get::<T>(), own.get::<T>());
        let (lse, own_lse) = (lse.get::<f32>(), own_lse.get::<f32>());
        let (downs, dlses) = (Shares::new(down.get_mut::<T>()), Shares::new(dlse.get_mut::<f32>()));
        cpu.threads.for_each(rows.div_ceil(ROWS_OF_TASK), |task| {
            let rows = task * ROWS_OF_TASK..rows.min((task + 1) * ROWS_OF_TASK);
            let all = rows.start * columns..rows.end * columns;
            let heads = rows.start * heads..rows.end * heads;
            // SAFETY: a task has rows of its own.
            let (down, dlse) = unsafe { (downs.part(all.clone()), dlses.part(heads.clone())) };
            let [dout, out, own] = [dout, out, own].map(|x| x[all.clone()].chunks_exact(width));
            let weights = own_lse[heads.clone()].iter().zip(&lse[heads]).map(|(own, all)| (own - all).exp());
            let outer = down.chunks_exact_mut(width).zip(dlse).zip(weights);
            for (((down, dlse), weight), ((dout, out), own)) in outer.zip(dout.zip(out).zip(own)) {
                let mut sum = 0.0;
                for (((down, dout), out), own) in down.iter_mut().zip(dout).zip(out).zip(own) {
                    let dout = dout.to_f32();
                    *down = T::from_f32(weight * dout);
                    sum += dout * (own.to_f32() - out.to_f32());
                }
                *dlse = weight * sum;
            }
        });
        Ok(())
    })?);
    Ok([dq, dkv, down, dlse])
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
    backward(OP, dout, q, kv, out, Statistics::ByPart(lse), spec, segments)
}

/// The log-sum-exps of a backward.
#[derive(Clone, Copy)]
enum Statistics<'a> {
    /// [h, n], part by part, or on GPUs in the order of the batch.
    ByPart(&'a Tensor),
    /// [n, h], with their gradient if they have one.
    ByRow { lse: &'a Tensor, dlse: Option<&'a Tensor> },
}

/// The backward of every part of the queries.
fn backward(
    op: &'static str,
    dout: &Tensor,
    q: &Tensor,
    kv: &Tensor,
    out: &Tensor,
    statistics: Statistics<'_>,
    spec: &AttentionSpec,
    segments: &ContextSegments,
) -> Result<(Tensor, Tensor)> {
    check(op, q, kv, spec, segments)?;
    if q.device().computes() == Computes::Cuda {
        return on_cuda::backward(op, [dout, q, kv, out], statistics, spec, segments);
    }
    let mut dq = q.empty_like(*q.shape(), q.dtype())?;
    let mut dkv = kv.empty_like(*kv.shape(), kv.dtype())?;
    let scratch = || scratch(q.device(), kv, segments);
    let (mut ordered, mut of_part, mut sums) = (scratch()?, scratch()?, scratch()?);
    let rows = segments.queries();
    let (lse, dlse, is_by_row) = match statistics {
        Statistics::ByPart(lse) => (lse, None, false),
        Statistics::ByRow { lse, dlse } => (lse, dlse, true),
    };
    let by_part = |is_there: bool| {
        let make = || q.device().empty([spec.heads, rows], DType::F32, Purpose::Workspace);
        is_there.then(make).transpose()
    };
    let (mut lse_by_part, mut dlse_by_part) = (by_part(is_by_row)?, by_part(dlse.is_some())?);
    let work = work(spec, segments, q.dtype(), 5, 2);
    by_float!(op, q.dtype(), T => q.device().launch_on(op, work, |on| {
        let On::Cpu(cpu) = on else { return Err(not_on_cuda(op)) };
        let (columns, both, masked) = (spec.q_cols(), kv.last_dim(), segments.masked(spec));
        segments.order(kv.get::<T>(), both, ordered.get_mut::<T>());
        let [k, v] = halves(ordered.get::<T>(), segments.0.read, spec)?;
        let lse = match &mut lse_by_part {
            None => lse.get::<f32>(),
            Some(by_part) => {
                segments.by_part(spec.heads, lse.get::<f32>(), by_part.get_mut::<f32>());
                by_part.get::<f32>()
            }
        };
        if let (Some(dlse), Some(by_part)) = (dlse, &mut dlse_by_part) {
            segments.by_part(spec.heads, dlse.get::<f32>(), by_part.get_mut::<f32>());
        }
        let dlse = dlse_by_part.as_ref().map(|dlse| dlse.get::<f32>());
        let (q, out, dout) = (q.get::<T>(), out.get::<T>(), dout.get::<T>());
        let (dq, sums) = (dq.get_mut::<T>(), sums.get_mut::<T>());
        sums.fill(T::from_f32(0.0));
        for (number, Part { rows, cu_q, cu_k }) in segments.0.parts.iter().enumerate() {
            let here = rows.start * columns..rows.end * columns;
            let dense = |data| Rows::dense(data, rows.len(), columns);
            let (q, out, dout) = (dense(&q[here.clone()])?, dense(&out[here.clone()])?, dense(&dout[here.clone()])?);
            let statistics = rows.start * spec.heads..rows.end * spec.heads;
            let lse = &lse[statistics.clone()];
            let of_part = of_part.get_mut::<T>();
            of_part.fill(T::from_f32(0.0));
            let dq = RowsMut::dense(&mut dq[here], rows.len(), columns)?;
            let (dk, dv) = RowsMut::dense(&mut *of_part, k.rows(), both)?.split_columns(spec.kv_cols());
            match dlse {
                None => kernels::backward_cross(cpu, &masked, q, k, v, out, lse, dout, cu_q, cu_k, dq, dk, dv)?,
                Some(dlse) => {
                    let dlse = &dlse[statistics];
                    kernels::backward_part(cpu, &masked, q, k, v, out, lse, dout, dlse, cu_q, cu_k, dq, dk, dv)?;
                }
            }
            for (to, from) in sums.iter_mut().zip(&*of_part) {
                *to = if number == 0 { *from } else { T::from_f32(to.to_f32() + from.to_f32()) };
            }
        }
        let dkv = dkv.get_mut::<T>();
        for (here, place) in segments.places(both) {
            match place {
                Some(place) => dkv[here].copy_from_slice(&sums[place]),
                None => dkv[here].fill(T::from_f32(0.0)),
            }
        }
        Ok(())
    })?);
    Ok((dq, dkv))
}

#[cfg(test)]
mod tests {
    //! The two parts give what the whole gives, with documents that end anywhere.
    use super::*;
    use crate::cpu::Isa;

    /// Numbers without a pattern in (-1, 1).
    fn values(seed: usize, count: usize) -> Vec<f32> {
        (0..count).map(|i| (((i + 17 * seed) * 7919 + 13) % 101) as f32 / 50.5 - 1.0).collect()
    }

    fn close(what: &str, a: &Tensor, b: &Tensor, bound: f32) {
        let [a, b] = [a, b].map(|x| x.to_f32_vec().unwrap());
        let size = b.iter().map(|x| x * x).sum::<f32>().sqrt();
        let distance = a.iter().zip(&b).map(|(a, b)| (a - b).powi(2)).sum::<f32>().sqrt();
        assert!(distance <= bound * size, "{what}: {distance} of {size}");
    }

    #[test]
    fn two_parts_are_the_whole_on_every_rung() {
        // Two sequences of 24 rows, three ranks with an early and a late chunk of 4 rows of each.
        let chunks = |rank: usize| [rank, 5 - rank].into_iter().flat_map(|c| [0, 24].map(|s| s + 4 * c..s + 4 * c + 4));
        let gathered: Vec<Range<usize>> = (0..3).flat_map(chunks).collect();
        let spec = AttentionSpec::causal(4, 2, 16);
        for (isa, dtype, bound) in Isa::available().flat_map(|isa| [(isa, DType::F32, 2e-6), (isa, DType::BF16, 0.02)])
        {
            let device = Device::cpu(isa, 2, None);
            let tensor = |seed, rows: usize, columns: usize| {
                let x = device.tensor([rows, columns], &values(seed, rows * columns), Purpose::Activations).unwrap();
                crate::ops::cast(&x, dtype).unwrap()
            };
            for (rank, bounds) in (0..3).flat_map(|rank| {
                [&[0, 24, 48][..], &[0, 3, 9, 24, 25, 40, 48], &[0, 1, 24, 47, 48]].map(move |bounds| (rank, bounds))
            }) {
                let rows: Vec<Range<usize>> = chunks(rank).collect();
                let all = ContextSegments::new(bounds, &rows, gathered.clone()).unwrap();
                let [own, rest] = ContextSegments::apart(bounds, &rows, gathered.clone()).unwrap();
                assert_eq!(own.pairs(&spec) + rest.pairs(&spec), all.pairs(&spec), "{bounds:?}");
                let (q, kv, dout) = (tensor(1, 16, 64), tensor(2, 48, 64), tensor(3, 16, 64));
                let own_kv = kv.narrow(rank * 16..rank * 16 + 16).unwrap();
                let (whole, lse) = context_attention(&q, &kv, &spec, &all).unwrap();
                let (part, part_lse) = context_attention_part(&q, &own_kv, &spec, &own).unwrap();
                let parts = [&part, &part_lse];
                let (out, out_lse) = context_attention_rest(&q, &kv, parts, &spec, &rest).unwrap();
                close("out", &out, &whole, bound);
                let (dq, dkv) = context_attention_backward(&dout, &q, &kv, &whole, &lse, &spec, &all).unwrap();
                let [dq_rest, dkv_rest, down, dlse] =
                    context_attention_rest_backward(&dout, &q, &kv, parts, [&out, &out_lse], &spec, &rest).unwrap();
                let (dq_own, dkv_own) =
                    context_attention_part_backward([&down, &dlse], &q, &own_kv, &part, &part_lse, &spec, &own)
                        .unwrap();
                close("dq", &crate::ops::add(&dq_own, &dq_rest).unwrap(), &dq, bound);
                let before = dkv_rest.narrow(rank * 16..rank * 16 + 16).unwrap();
                assert!(before.to_f32_vec().unwrap().iter().all(|x| *x == 0.0), "own keys are no others");
                let mut sum = dkv_rest.to_f32_vec().unwrap();
                let own = dkv_own.to_f32_vec().unwrap();
                sum[rank * 16 * 64..(rank * 16 + 16) * 64].copy_from_slice(&own);
                let sum = device.tensor([48, 64], &sum, Purpose::Activations).unwrap();
                close("dkv", &sum, &dkv, bound);
            }
        }
    }
}
