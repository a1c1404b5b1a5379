//! The same on GPUs.
//!
//! Their kernels read for each query the interval of keys that it sees, and for each key that of
//! the queries which see it. They are intervals once queries and keys lie in the order of the whole
//! batch, whatever chunks of sequences a rank has. So rows are brought into that order, one launch
//! computes all of them, and the results are brought back.

use super::{ContextSegments, Inside, Statistics};
use crate::cpu::attention::AttentionSpec;
use crate::cuda::{self, Heads, Seen};
use crate::error::Result;
use crate::ops::{experts, plain};
use crate::{DType, Device, On, Purpose, Tensor};
use std::ops::Range;

impl Inside {
    /// The numbers that kernels read, one list after the other; see [`Places`].
    fn numbers(&self, window: Option<usize>) -> Vec<i32> {
        let all = self.bounds[self.bounds.len() - 1] as usize;
        let (queries_before, keys_before) = (before(&self.rows, all), before(&self.keys, all));
        let window = window.unwrap_or(all);
        let segment_of = |row: usize| {
            let end = self.bounds.partition_point(|bound| *bound as usize <= row);
            self.bounds[end - 1] as usize..self.bounds[end] as usize
        };
        let rows: Vec<usize> = self.rows.iter().cloned().flatten().collect();
        let mut order: Vec<usize> = (0..rows.len()).collect();
        order.sort_by_key(|row| rows[*row]);
        // A query sees keys of its segment up to itself.
        let seen = order.iter().map(|query| rows[*query]).map(|row| {
            let first = segment_of(row).start.max((row + 1).saturating_sub(window));
            keys_before[first]..keys_before[row + 1]
        });
        let seeing = self.keys.iter().cloned().flatten().map(|row| {
            let last = segment_of(row).end.min(row.saturating_add(window));
            queries_before[row]..queries_before[last]
        });
        let mut numbers = Vec::new();
        let two_lists = |numbers: &mut Vec<i32>, ranges: Vec<Range<usize>>| {
            numbers.extend(ranges.iter().map(|range| range.start as i32));
            numbers.extend(ranges.iter().map(|range| range.end as i32));
        };
        two_lists(&mut numbers, seen.collect());
        two_lists(&mut numbers, seeing.collect());
        numbers.extend(order.iter().map(|row| *row as i32));
        numbers.extend(rows.iter().map(|row| queries_before[*row] as i32));
        let mut of_keys = vec![0; self.read];
        let mut places = Vec::with_capacity(self.given);
        for (count, place) in &self.gathered {
            for row in 0..*count {
                if let Some(place) = place {
                    of_keys[place + row] = places.len() as i32;
                }
                places.push(place.map_or(experts::DROPPED, |place| (place + row) as i32));
            }
        }
        numbers.extend(of_keys);
        numbers.extend(places);
        numbers
    }

    /// True if the rows of queries lie in the order of the batch.
    fn has_queries_in_order(&self) -> bool {
        self.rows.windows(2).all(|pair| pair[0].end <= pair[1].start)
    }

    /// True if all rows of keys and values are read, in the order in which they are given.
    fn has_keys_in_order(&self) -> bool {
        let starts = self.gathered.iter().map(|(_, place)| *place);
        self.read == self.given && starts.is_sorted()
    }
}

/// For each row of the batch, and its end, how many rows of some stretches come before it.
fn before(stretches: &[Range<usize>], all: usize) -> Vec<usize> {
    let mut is_there = vec![0; all + 1];
    for row in stretches.iter().cloned().flatten() {
        is_there[row + 1] = 1;
    }
    is_there
        .iter()
        .scan(0, |count, here| {
            Some({
                *count += here;
                *count
            })
        })
        .collect()
}

/// Where rows lie and what they are paired with, on a device.
struct Places<'a> {
    inside: &'a Inside,
    /// The keys that each query sees, and the queries that see each key: the first ones, then the
    /// ends, [2, rows].
    seen: Tensor,
    seeing: Tensor,
    /// The rows of the queries in the order of the batch, and where each row lies in that order.
    queries: [Tensor; 2],
    /// The same of the keys that are read; -1 for rows that are not.
    keys: [Tensor; 2],
}

impl Places<'_> {
    fn of<'a>(segments: &'a ContextSegments, device: &Device, window: Option<usize>) -> Result<Places<'a>> {
        let inside = &*segments.0;
        let Inside { queries, read, given, .. } = *inside;
        let make = || {
            let numbers = inside.numbers(window);
            device.tensor([numbers.len()], &numbers, Purpose::Data)
        };
        let numbers = inside.on_device.get_of(window.unwrap_or(0), device, make)?;
        let mut at = 0;
        let mut next = |count: usize| {
            at += count;
            numbers.view(at - count, [count])
        };
        let (seen, seeing) = (next(2 * queries)?.reshape([2, queries])?, next(2 * read)?.reshape([2, read])?);
        let of_queries = [next(queries)?, next(queries)?];
        Ok(Places { inside, seen, seeing, queries: of_queries, keys: [next(read)?, next(given)?] })
    }

    /// Values of queries in the order of the batch.
    fn queries_in_order(&self, x: &Tensor) -> Result<Tensor> {
        if self.inside.has_queries_in_order() { Ok(x.clone()) } else { experts::gather_rows(x, &self.queries[0]) }
    }

    /// Values of queries as rows lie.
    fn queries_back(&self, x: Tensor) -> Result<Tensor> {
        if self.inside.has_queries_in_order() { Ok(x) } else { experts::gather_rows(&x, &self.queries[1]) }
    }

    /// Values of the keys that are read, in the order of the batch.
    fn keys_in_order(&self, x: &Tensor) -> Result<Tensor> {
        if self.inside.has_keys_in_order() { Ok(x.clone()) } else { experts::gather_rows(x, &self.keys[0]) }
    }

    /// Values of keys as they were given, zeros where nothing was read.
    fn keys_back(&self, x: Tensor) -> Result<Tensor> {
        if self.inside.has_keys_in_order() { Ok(x) } else { experts::gather_rows(&x, &self.keys[1]) }
    }

    /// Queries, and keys with values, as kernels read them.
    fn heads<'t>(&self, spec: &AttentionSpec, q: &'t Tensor, kv: &'t Tensor) -> Heads<'t> {
        let Inside { queries, read, .. } = *self.inside;
        Heads { q, kv, queries: [queries, spec.q_cols()], keys: [read, 2 * spec.kv_cols()] }
    }
}

/// The attention of kernels to which bounds say everything.
fn without_mask(spec: &AttentionSpec) -> AttentionSpec {
    AttentionSpec { causal: false, window: None, ..*spec }
}

fn gpu<'a>(on: &'a On<'a>) -> &'a std::sync::Arc<cuda::Cuda> {
    match on {
        On::Cuda(gpu) => gpu,
        On::Cpu(_) => unreachable!("the device computes on cuda"),
    }
}

/// Attention, and the log-sum-exp of scores in f32: [h, n] in the order of the batch, or where
/// `by_row` of each row, [n, h].
pub(super) fn forward(
    op: &'static str,
    [q, kv]: [&Tensor; 2],
    spec: &AttentionSpec,
    segments: &ContextSegments,
    by_row: bool,
) -> Result<(Tensor, Tensor)> {
    let work = super::work(spec, segments, q.dtype(), 2, 1);
    let places = Places::of(segments, q.device(), spec.window)?;
    let (q, kv) = (places.queries_in_order(q)?, places.keys_in_order(kv)?);
    let out = q.empty_like(*q.shape(), q.dtype())?;
    let lse = q.empty_like([spec.heads, q.rows()], DType::F32)?;
    q.device().launch_on(op, work, |on| {
        let read = places.heads(spec, &q, &kv);
        cuda::attention_over(gpu(&on), read, &without_mask(spec), &places.seen, &out, &lse)
    })?;
    drop((q, kv));
    let out = places.queries_back(out)?;
    Ok((out, if by_row { places.queries_back(plain::permute(&lse, &[1, 0])?)? } else { lse }))
}

/// The gradients of q and kv.
pub(super) fn backward(
    op: &'static str,
    [dout, q, kv, out]: [&Tensor; 4],
    statistics: Statistics<'_>,
    spec: &AttentionSpec,
    segments: &ContextSegments,
) -> Result<(Tensor, Tensor)> {
    let work = super::work(spec, segments, q.dtype(), 5, 2);
    let places = Places::of(segments, q.device(), spec.window)?;
    let (lse, dlse) = match statistics {
        Statistics::ByPart(lse) => (lse.clone(), None),
        Statistics::ByRow { lse, dlse } => {
            let lse = plain::permute(&places.queries_in_order(lse)?, &[1, 0])?;
            (lse, dlse.map(|dlse| places.queries_in_order(dlse)).transpose()?)
        }
    };
    let (dout, q, out) = (places.queries_in_order(dout)?, places.queries_in_order(q)?, places.queries_in_order(out)?);
    let kv = places.keys_in_order(kv)?;
    let dq = q.empty_like(*q.shape(), q.dtype())?;
    let dkv = kv.empty_like(*kv.shape(), kv.dtype())?;
    let delta = q.device().empty([spec.heads, q.rows()], DType::F32, Purpose::Workspace)?;
    q.device().launch_on(op, work, |on| {
        let (gpu, plain) = (gpu(&on), without_mask(spec));
        cuda::delta_of(gpu, [&dout, &out], dlse.as_ref(), &plain, &delta)?;
        let seen = Seen { by_queries: &places.seen, of_keys: &places.seeing };
        let (read, gradients) = (places.heads(spec, &q, &kv), places.heads(spec, &dq, &dkv));
        cuda::attention_over_backward(gpu, read, [&dout, &lse, &delta], &plain, seen, gradients)
    })?;
    drop((dout, q, out, kv, delta));
    Ok((places.queries_back(dq)?, places.keys_back(dkv)?))
}
