//! Cuts a call into tasks, by shape alone, so that the number of threads changes no bit.

use super::AttentionSpec;
use std::ops::Range;

/// One packed sequence: its rows among the queries and among the keys.
///
/// Query `i` of a segment sits at position `i + keys - queries`: the last query is level with the
/// last key, which is both training (equal lengths) and generation with a cache (fewer queries than
/// keys).
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Segment {
    pub queries: Range<usize>,
    pub keys: Range<usize>,
}

impl Segment {
    /// The position of local query `i` on the axis of the segment's keys; negative when there are
    /// more queries than keys.
    #[inline(always)]
    pub fn position(&self, i: usize) -> isize {
        i as isize + self.keys.len() as isize - self.queries.len() as isize
    }

    /// The local keys that local query `i` sees.
    #[inline(always)]
    pub fn visible(&self, spec: &AttentionSpec, i: usize) -> Range<usize> {
        if !spec.causal {
            return 0..self.keys.len();
        }
        let end = (self.position(i) + 1).max(0) as usize;
        end.saturating_sub(spec.window.unwrap_or(usize::MAX))..end
    }

    /// The local keys that any of the local queries `queries` sees; both bounds of `visible` rise
    /// with the query.
    #[inline(always)]
    pub fn visible_to_any(&self, spec: &AttentionSpec, queries: &Range<usize>) -> Range<usize> {
        self.visible(spec, queries.start).start..self.visible(spec, queries.end - 1).end
    }

    /// True if every one of the local queries `queries` sees every one of the local keys `keys`.
    #[inline(always)]
    pub fn all_visible(&self, spec: &AttentionSpec, queries: &Range<usize>, keys: &Range<usize>) -> bool {
        self.visible(spec, queries.end - 1).start <= keys.start && keys.end <= self.visible(spec, queries.start).end
    }

    /// The exact number of (query, key) pairs that are not masked.
    pub fn pairs(&self, spec: &AttentionSpec) -> u64 {
        let (queries, keys) = (self.queries.len() as u64, self.keys.len() as u64);
        if !spec.causal {
            return queries * keys;
        }
        let window = spec.window.map_or(u64::MAX, |window| window as u64);
        // The pairs of the queries at positions 0..n: the ramp 1, 2, … up to the window, then
        // level.
        let below = |n: u64| {
            let ramp = n.min(window);
            ramp * (ramp + 1) / 2 + (n - ramp) * window.min(n)
        };
        below(keys) - below(keys.saturating_sub(queries))
    }
}

/// The segments of a call whose bounds were checked.
pub(super) fn segments(cu_q: &[i32], cu_k: &[i32]) -> impl Iterator<Item = Segment> {
    cu_q.windows(2)
        .zip(cu_k.windows(2))
        .map(|(q, k)| Segment { queries: q[0] as usize..q[1] as usize, keys: k[0] as usize..k[1] as usize })
}

/// The unit of a thread's work: the query heads of one kv head over the local queries `chunk` of a
/// segment.
#[derive(Clone, Debug)]
pub(super) struct Task {
    pub segment: Segment,
    pub kv_head: usize,
    pub chunk: Range<usize>,
    /// Pairs, for the order in which tasks are dealt.
    cost: u64,
}

/// Queries of a task that may have `rows` query rows, counted over the heads of a group: whole
/// multiples of `grid`.
pub(super) fn chunk(spec: &AttentionSpec, rows: usize, grid: usize) -> usize {
    (rows / spec.group()).div_ceil(grid).max(1).saturating_mul(grid)
}

/// The tasks of a call, the costly ones first so that the last ones to finish are short. `rows` is
/// how many query rows, one task may have: see [`chunk`].
pub(super) fn tasks(spec: &AttentionSpec, cu_q: &[i32], cu_k: &[i32], rows: usize, grid: usize) -> Vec<Task> {
    let chunk = chunk(spec, rows, grid);
    let mut tasks = Vec::with_capacity((cu_q.len() - 1) * spec.kv_heads);
    let mut uniform = true;
    for segment in segments(cu_q, cu_k) {
        let queries = segment.queries.len();
        for start in (0..queries).step_by(chunk) {
            let chunk = start..queries.min(start.saturating_add(chunk));
            let cost = segment.visible_to_any(spec, &chunk).len() as u64 * chunk.len() as u64;
            for kv_head in 0..spec.kv_heads {
                uniform &= tasks.last().is_none_or(|last: &Task| last.cost == cost);
                tasks.push(Task { segment: segment.clone(), kv_head, chunk: chunk.clone(), cost });
            }
        }
    }
    if !uniform {
        tasks.sort_by_key(|task| std::cmp::Reverse(task.cost));
    }
    tasks
}
