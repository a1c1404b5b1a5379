//! Flash attention: softmax(scale Q K^T + mask) V and its gradients, without the matrix of scores
//! in memory.
//!
//! The algorithm is that of Dao et al. 2022 ("FlashAttention") and Dao 2023 ("FlashAttention-2").
//! Keys are walked in blocks. Of the softmax, only the running maximum and sum of each query are
//! kept; what was accumulated is rescaled when the maximum rises (Milakov and Gimelshein 2018).
//! Backward recomputes the probabilities from the saved log-sum-exp.
//!
//! Sequences are packed: `cu_seqlens` holds the bounds of segments (documents), `[0, …, tokens]`,
//! and a query sees keys of its own segment only. Masks are causal, causal with a sliding window,
//! or none. Grouped-query attention: `heads / kv_heads` consecutive query heads share one key/value
//! head.
//!
//! The vector form and the tiled form's backward compute the *transposed* scores, with keys down
//! and queries along the vector lanes. The softmax of sixteen queries is then elementwise (no
//! horizontal reductions), and the causal mask of a key is one lane mask. The tiled form's forward
//! has queries down, which avoids transposes: see `tiled::forward`.
//!
//! There are two forms:
//!
//! - `vector`, on portable, AVX2 and AVX-512, and on Intel's CPUs with AVX-512 BF16: operands are
//!   widened to f32, and products use broadcasts and fused multiply-adds.
//! - `tiled`, for bf16 operands on AMX bf16, and on AMD's CPUs with AVX-512 BF16: all products take
//!   bf16 operands with f32 sums, by `tdpbf16ps` or `vdpbf16ps`. P and dS are rounded to bf16.
//!
//! Softmax statistics are f32 everywhere. f32 and f16 operands use the vector form on every rung.
//! Intel's `vdpbf16ps` is not used. It does two multiply-adds per lane, but measured on Emerald
//! Rapids it issues once in two cycles or slower, against two f32 multiply-adds a cycle: half the
//! arithmetic per second. On Zen 4 it is the other way round.
//!
//! Numbers by the distance of query and key can be added to scores ([`DistanceBias`]); that takes
//! the vector form on every rung. This module does not offer dropout on the probabilities, other
//! additive biases, sinks, or matrices of scores returned to the caller.

mod backward;
mod distance;
mod forward;
mod plan;
mod rows;
mod scratch;
#[cfg(target_arch = "x86_64")]
mod tiled;
#[cfg(target_arch = "x86_64")]
mod transpose;
mod vector;

#[cfg(test)]
mod tests;

pub use distance::DistanceBias;
pub use rows::{Rows, RowsMut};

#[cfg(target_arch = "x86_64")]
use super::amx::Tiles;
use super::isa::pairs_are_fast;
use super::{Cpu, Isa};
use crate::cpu::threads::Shares;
use crate::dtype::{DType, Element};
use distance::Padded;

/// The shape of one attention function.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionSpec {
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; divides `heads`. Query head `h` reads key/value head
    /// `h / (heads / kv_heads)`.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Factor of scores before the softmax, usually `head_dim^-1/2`.
    pub scale: f32,
    /// True if a query sees no key after its own position.
    pub causal: bool,
    /// Sliding window (Mistral): a query at position `p` sees the keys in `(p - window, p]`. Needs
    /// `causal`.
    pub window: Option<usize>,
}

/// Why attention cannot be computed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum AttentionError {
    /// Heads that do not form groups, or none.
    #[error(
        "{heads} query heads over {kv_heads} key/value heads: both must be positive and the latter divide the former"
    )]
    Heads {
        /// Query heads.
        heads: usize,
        /// Key/value heads.
        kv_heads: usize,
    },
    /// Heads without elements.
    #[error("head_dim is 0: a head needs at least one element")]
    HeadDim,
    /// A window that hides everything or has no direction.
    #[error(
        "sliding window of {window} with causal = {causal}: a window holds at least one key and needs a causal mask"
    )]
    Window {
        /// The window asked for.
        window: usize,
        /// True if the mask is causal.
        causal: bool,
    },
    /// A view that does not fit its data.
    #[error("a view of {rows} rows of {cols} columns, {stride} apart, does not fit {len} elements")]
    View {
        /// Rows asked for.
        rows: usize,
        /// Columns asked for.
        cols: usize,
        /// Elements from row to row.
        stride: usize,
        /// Elements that there are.
        len: usize,
    },
    /// An operand of the wrong shape.
    #[error("`{operand}` is [{rows}, {cols}], but the spec and the other operands make it [{want_rows}, {want_cols}]")]
    Shape {
        /// Name of the operand.
        operand: &'static str,
        /// Its rows.
        rows: usize,
        /// Its columns.
        cols: usize,
        /// The rows it should have.
        want_rows: usize,
        /// The columns it should have.
        want_cols: usize,
    },
    /// Segment bounds that are not `0 ≤ … ≤ rows`.
    #[error("`{name}` must rise from 0 to {rows} (the rows of its operand), but entry {index} is {value}")]
    Segments {
        /// Name of the bounds.
        name: &'static str,
        /// The first wrong entry.
        index: usize,
        /// Its value.
        value: i64,
        /// Required value of the last entry.
        rows: usize,
    },
    /// A segment with distances that a bias has no numbers for.
    #[error("a segment of {longest} tokens, and the bias reaches {reach}")]
    Distance {
        /// Tokens of the longest segment.
        longest: usize,
        /// The tokens that the bias reaches.
        reach: usize,
    },
    /// Segment bounds of queries and of keys that do not pair up.
    #[error("{queries} query segments but {keys} key segments: each query segment needs its key segment")]
    SegmentCount {
        /// Segments of the queries.
        queries: usize,
        /// Segments of the keys.
        keys: usize,
    },
}

impl AttentionSpec {
    /// Causal attention with the usual scale `head_dim^-1/2`.
    pub fn causal(heads: usize, kv_heads: usize, head_dim: usize) -> Self {
        let scale = (head_dim as f64).sqrt().recip() as f32;
        AttentionSpec { heads, kv_heads, head_dim, scale, causal: true, window: None }
    }

    /// Query heads per key/value head.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Elements of a row of queries: `heads * head_dim`.
    pub fn q_cols(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Elements of a row of keys or of values: `kv_heads * head_dim`.
    pub fn kv_cols(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Checks what the type cannot.
    pub fn check(&self) -> Result<(), AttentionError> {
        let (heads, kv_heads) = (self.heads, self.kv_heads);
        if kv_heads == 0 || heads == 0 || heads % kv_heads != 0 {
            return Err(AttentionError::Heads { heads, kv_heads });
        }
        if self.head_dim == 0 {
            return Err(AttentionError::HeadDim);
        }
        match self.window {
            Some(window) if window == 0 || !self.causal => Err(AttentionError::Window { window, causal: self.causal }),
            _ => Ok(()),
        }
    }
}

/// The exact number of (query, key) pairs of one head that are not masked, over all segments.
pub fn unmasked_pairs(spec: &AttentionSpec, cu_seqlens: &[i32]) -> u64 {
    plan::segments(cu_seqlens, cu_seqlens).map(|segment| segment.pairs(spec)).sum()
}

/// As [`unmasked_pairs`], of [`forward_cross`].
pub fn unmasked_pairs_cross(spec: &AttentionSpec, cu_q: &[i32], cu_k: &[i32]) -> u64 {
    plan::segments(cu_q, cu_k).map(|segment| segment.pairs(spec)).sum()
}

/// Floating-point operations of [`forward`]: two products of `2 head_dim` per unmasked pair and
/// query head.
pub fn flops_forward(spec: &AttentionSpec, cu_seqlens: &[i32]) -> u64 {
    4 * (spec.heads * spec.head_dim) as u64 * unmasked_pairs(spec, cu_seqlens)
}

/// Floating-point operations of [`backward`]: five products per unmasked pair, of which one
/// recomputes the scores.
pub fn flops_backward(spec: &AttentionSpec, cu_seqlens: &[i32]) -> u64 {
    10 * (spec.heads * spec.head_dim) as u64 * unmasked_pairs(spec, cu_seqlens)
}

/// Bytes that [`forward`] must move: Q, K, V read, the output and the log-sum-exp written, each
/// once.
pub fn bytes_forward(spec: &AttentionSpec, tokens: usize, dtype: DType) -> u64 {
    (tokens * ((2 * spec.q_cols() + 2 * spec.kv_cols()) * dtype.size() + 4 * spec.heads)) as u64
}

/// Bytes that [`backward`] must move: Q, K, V, the output, its gradient and the log-sum-exp read;
/// dQ, dK, dV written.
pub fn bytes_backward(spec: &AttentionSpec, tokens: usize, dtype: DType) -> u64 {
    (tokens * ((4 * spec.q_cols() + 4 * spec.kv_cols()) * dtype.size() + 4 * spec.heads)) as u64
}

/// The form in which attention is computed; see the list above.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Form {
    Vector,
    /// Tiled, by `vdpbf16ps`.
    Pairs,
    /// Tiled, by `tdpbf16ps`.
    Tiles,
}

impl Form {
    /// That of operands of `dtype` on the rung `isa`.
    fn of(isa: Isa, dtype: DType) -> Form {
        match (isa, dtype) {
            _ if cfg!(not(target_arch = "x86_64")) => Form::Vector,
            (Isa::AmxBf16, DType::BF16) => Form::Tiles,
            (Isa::Avx512Bf16, DType::BF16) if pairs_are_fast() => Form::Pairs,
            _ => Form::Vector,
        }
    }
}

/// Bytes of workspace that each thread keeps for [`forward`] with segments of up to `segment_max`
/// tokens. Bounded: it does not grow with the length beyond a few hundred rows.
pub fn workspace_forward(isa: Isa, dtype: DType, spec: &AttentionSpec, segment_max: usize) -> usize {
    let _ = segment_max;
    #[cfg(target_arch = "x86_64")]
    if Form::of(isa, dtype) != Form::Vector {
        return 4 * tiled::forward_floats(spec);
    }
    let _ = (isa, dtype);
    4 * forward::floats(spec)
}

/// Bytes of workspace that each thread keeps for [`backward`] with segments of up to `segment_max`
/// tokens: linear in it, for the f32 sums of dK and dV of one head.
pub fn workspace_backward(isa: Isa, dtype: DType, spec: &AttentionSpec, segment_max: usize) -> usize {
    #[cfg(target_arch = "x86_64")]
    if Form::of(isa, dtype) != Form::Vector {
        return 4 * tiled::backward_floats(spec, segment_max);
    }
    let _ = (isa, dtype);
    4 * backward::floats(spec, segment_max)
}

fn check_shape(
    operand: &'static str,
    (rows, cols): (usize, usize),
    (want_rows, want_cols): (usize, usize),
) -> Result<(), AttentionError> {
    if (rows, cols) == (want_rows, want_cols) {
        return Ok(());
    }
    Err(AttentionError::Shape { operand, rows, cols, want_rows, want_cols })
}

fn check_segments(name: &'static str, cu: &[i32], rows: usize) -> Result<(), AttentionError> {
    let wrong = |index: usize| AttentionError::Segments { name, index, value: cu[index] as i64, rows };
    match cu {
        [] => Err(AttentionError::Segments { name, index: 0, value: -1, rows }),
        [first, ..] if *first != 0 => Err(wrong(0)),
        _ => match cu.windows(2).position(|pair| pair[1] < pair[0]) {
            Some(index) => Err(wrong(index + 1)),
            None if cu[cu.len() - 1] as usize != rows => Err(wrong(cu.len() - 1)),
            None => Ok(()),
        },
    }
}

/// The operands and results that every task of a forward call uses.
struct Forward<'a, T> {
    isa: Isa,
    spec: &'a AttentionSpec,
    q: Rows<'a, T>,
    k: Rows<'a, T>,
    v: Rows<'a, T>,
    out: RowsMut<'a, T>,
    lse: Shares<'a, f32>,
    bias: Option<&'a Padded>,
}

/// The operands and results that every task of a backward call uses.
struct Backward<'a, T> {
    isa: Isa,
    spec: &'a AttentionSpec,
    q: Rows<'a, T>,
    k: Rows<'a, T>,
    v: Rows<'a, T>,
    out: Rows<'a, T>,
    lse: &'a [f32],
    dout: Rows<'a, T>,
    dq: RowsMut<'a, T>,
    dk: RowsMut<'a, T>,
    dv: RowsMut<'a, T>,
    bias: Option<BiasSums<'a>>,
    /// Gradients of the log-sum-exp, [heads, queries]; None where nothing but the output has one.
    dlse: Option<&'a [f32]>,
}

/// The bias of a backward call and the sums of its gradient.
struct BiasSums<'a> {
    bias: &'a Padded,
    sums: Shares<'a, f32>,
    /// The bounds of the segments.
    cu: &'a [i32],
}

impl BiasSums<'_> {
    /// The sums of `segment` and query head `head`.
    ///
    /// # Safety
    /// As for [`Padded::sums_of`].
    #[allow(clippy::mut_from_ref)]
    unsafe fn of(&self, segment: &plan::Segment, head: usize) -> &mut [f32] {
        // The last bound at the segment's first row: before it lie segments without rows.
        let number = self.cu.partition_point(|bound| *bound as usize <= segment.queries.start) - 1;
        // SAFETY: the caller's contract.
        unsafe { self.bias.sums_of(&self.sums, number, head) }
    }
}

/// Attention of packed sequences over themselves.
///
/// Shapes: `q`, `out` `[tokens, heads * head_dim]`; `k`, `v` `[tokens, kv_heads * head_dim]`;
/// `cu_seqlens` rises from 0 to `tokens`; `lse` `[heads, tokens]` receives the natural log-sum-exp
/// of each query's scaled scores, which [`backward`] needs. Tasks are (segment, key/value head,
/// chunk of queries).
pub fn forward<T: Element>(
    cpu: &Cpu,
    spec: &AttentionSpec,
    q: Rows<'_, T>,
    k: Rows<'_, T>,
    v: Rows<'_, T>,
    cu_seqlens: &[i32],
    out: RowsMut<'_, T>,
    lse: &mut [f32],
) -> Result<(), AttentionError> {
    forward_with(cpu, spec, q, k, v, cu_seqlens, cu_seqlens, None, out, lse)
}

/// [`forward`] with `bias` added to the scores.
pub fn forward_biased<T: Element>(
    cpu: &Cpu,
    spec: &AttentionSpec,
    q: Rows<'_, T>,
    k: Rows<'_, T>,
    v: Rows<'_, T>,
    cu_seqlens: &[i32],
    bias: DistanceBias<'_>,
    out: RowsMut<'_, T>,
    lse: &mut [f32],
) -> Result<(), AttentionError> {
    forward_with(cpu, spec, q, k, v, cu_seqlens, cu_seqlens, Some(bias), out, lse)
}

/// [`forward`] with as many or fewer queries than keys in a segment: query `i` of `n` sits level
/// with key `len - n + i`.
///
/// `cu_q` bounds the segments' queries, `cu_k` their keys. A query that sees no key (causal, more
/// queries than keys) gives zeros and a log-sum-exp of minus infinity.
pub fn forward_cross<T: Element>(
    cpu: &Cpu,
    spec: &AttentionSpec,
    q: Rows<'_, T>,
    k: Rows<'_, T>,
    v: Rows<'_, T>,
    cu_q: &[i32],
    cu_k: &[i32],
    out: RowsMut<'_, T>,
    lse: &mut [f32],
) -> Result<(), AttentionError> {
    forward_with(cpu, spec, q, k, v, cu_q, cu_k, None, out, lse)
}

/// [`forward_cross`], with or without a bias, for which no segment may have more queries than keys.
fn forward_with<T: Element>(
    cpu: &Cpu,
    spec: &AttentionSpec,
    q: Rows<'_, T>,
    k: Rows<'_, T>,
    v: Rows<'_, T>,
    cu_q: &[i32],
    cu_k: &[i32],
    bias: Option<DistanceBias<'_>>,
    out: RowsMut<'_, T>,
    lse: &mut [f32],
) -> Result<(), AttentionError> {
    spec.check()?;
    let (queries, keys) = (q.rows(), k.rows());
    check_shape("q", (queries, q.cols()), (queries, spec.q_cols()))?;
    check_shape("k", (keys, k.cols()), (keys, spec.kv_cols()))?;
    check_shape("v", (v.rows(), v.cols()), (keys, spec.kv_cols()))?;
    check_shape("out", (out.rows(), out.cols()), (queries, spec.q_cols()))?;
    check_shape("lse", (1, lse.len()), (1, spec.heads * queries))?;
    check_segments("cu_q", cu_q, queries)?;
    check_segments("cu_k", cu_k, keys)?;
    if cu_q.len() != cu_k.len() {
        return Err(AttentionError::SegmentCount { queries: cu_q.len() - 1, keys: cu_k.len() - 1 });
    }
    let padded = match bias {
        Some(bias) => bias.check(cu_k).map(|()| Some(bias.padded()))?,
        None => None,
    };
    let job = Forward { isa: cpu.isa, spec, q, k, v, out, lse: Shares::new(lse), bias: padded.as_ref() };
    #[cfg(target_arch = "x86_64")]
    if let (None, form @ (Form::Pairs | Form::Tiles)) = (&padded, Form::of(cpu.isa, T::DTYPE)) {
        let tasks = plan::tasks(spec, cu_q, cu_k, tiled::CHUNK, tiled::UNIT);
        cpu.threads.for_each(tasks.len(), |task| {
            let (task, next) = (&tasks[task], tasks.get(task + cpu.threads.count()));
            match form {
                Form::Pairs => tiled::forward::<T, tiled::Vectors>(&job, task, next),
                _ => tiled::forward::<T, Tiles>(&job, task, next),
            }
        });
        return Ok(());
    }
    let tasks = plan::tasks(spec, cu_q, cu_k, forward::CHUNK, vector::QUERIES);
    cpu.threads.for_each(tasks.len(), |task| forward::task(&job, &tasks[task]));
    Ok(())
}

/// Gradients of [`forward`] with respect to `q`, `k` and `v`.
///
/// `out` and `lse` are what forward gave, `dout` the gradient of the loss with respect to `out`;
/// `dq`, `dk`, `dv` are overwritten. With `delta = rowsum(dout * out)`:
/// `dS = P * (dout V^T - delta)`, `dQ = scale dS K`, `dK = scale dS^T Q`, `dV = P^T dout` (Dao
/// 2023, algorithm 2). One task per (segment, key/value head) owns its rows of all three, and adds
/// the query heads of a group in rising order, so nothing depends on the number of threads.
pub fn backward<T: Element>(
    cpu: &Cpu,
    spec: &AttentionSpec,
    q: Rows<'_, T>,
    k: Rows<'_, T>,
    v: Rows<'_, T>,
    out: Rows<'_, T>,
    lse: &[f32],
    dout: Rows<'_, T>,
    cu_seqlens: &[i32],
    dq: RowsMut<'_, T>,
    dk: RowsMut<'_, T>,
    dv: RowsMut<'_, T>,
) -> Result<(), AttentionError> {
    backward_cross(cpu, spec, q, k, v, out, lse, dout, cu_seqlens, cu_seqlens, dq, dk, dv)
}

/// Gradients of [`forward_biased`]; that of the bias, [heads, 2 reach - 1], goes to `dbias`.
pub fn backward_biased<T: Element>(
    cpu: &Cpu,
    spec: &AttentionSpec,
    q: Rows<'_, T>,
    k: Rows<'_, T>,
    v: Rows<'_, T>,
    out: Rows<'_, T>,
    lse: &[f32],
    dout: Rows<'_, T>,
    cu_seqlens: &[i32],
    bias: DistanceBias<'_>,
    dq: RowsMut<'_, T>,
    dk: RowsMut<'_, T>,
    dv: RowsMut<'_, T>,
    dbias: &mut [f32],
) -> Result<(), AttentionError> {
    let cu = cu_seqlens;
    DistanceBias::new(spec, dbias, bias.reach())?;
    bias.check(cu)?;
    let padded = bias.padded();
    let mut sums = padded.sums(cu.len().saturating_sub(1));
    let of_bias = BiasSums { bias: &padded, sums: Shares::new(&mut sums), cu };
    backward_with(cpu, spec, q, k, v, out, lse, dout, None, cu, cu, Some(of_bias), dq, dk, dv)?;
    padded.total(&sums, dbias);
    Ok(())
}

/// Gradients of [`forward_cross`], as [`backward`] gives those of [`forward`]. The rows of `dk` and
/// `dv` of a segment without queries are left as they are.
pub fn backward_cross<T: Element>(
    cpu: &Cpu,
    spec: &AttentionSpec,
    q: Rows<'_, T>,
    k: Rows<'_, T>,
    v: Rows<'_, T>,
    out: Rows<'_, T>,
    lse: &[f32],
    dout: Rows<'_, T>,
    cu_q: &[i32],
    cu_k: &[i32],
    dq: RowsMut<'_, T>,
    dk: RowsMut<'_, T>,
    dv: RowsMut<'_, T>,
) -> Result<(), AttentionError> {
    backward_with(cpu, spec, q, k, v, out, lse, dout, None, cu_q, cu_k, None, dq, dk, dv)
}

/// [`backward_cross`] where the log-sum-exp has a gradient too, `dlse` [heads, queries]: a part of
/// an attention, whose weight in the whole depends on it. Of a score it is the probability, so it
/// is taken from `delta`.
pub fn backward_part<T: Element>(
    cpu: &Cpu,
    spec: &AttentionSpec,
    q: Rows<'_, T>,
    k: Rows<'_, T>,
    v: Rows<'_, T>,
    out: Rows<'_, T>,
    lse: &[f32],
    dout: Rows<'_, T>,
    dlse: &[f32],
    cu_q: &[i32],
    cu_k: &[i32],
    dq: RowsMut<'_, T>,
    dk: RowsMut<'_, T>,
    dv: RowsMut<'_, T>,
) -> Result<(), AttentionError> {
    check_shape("dlse", (1, dlse.len()), (1, lse.len()))?;
    backward_with(cpu, spec, q, k, v, out, lse, dout, Some(dlse), cu_q, cu_k, None, dq, dk, dv)
}

fn backward_with<T: Element>(
    cpu: &Cpu,
    spec: &AttentionSpec,
    q: Rows<'_, T>,
    k: Rows<'_, T>,
    v: Rows<'_, T>,
    out: Rows<'_, T>,
    lse: &[f32],
    dout: Rows<'_, T>,
    dlse: Option<&[f32]>,
    cu_q: &[i32],
    cu_k: &[i32],
    bias: Option<BiasSums<'_>>,
    dq: RowsMut<'_, T>,
    dk: RowsMut<'_, T>,
    dv: RowsMut<'_, T>,
) -> Result<(), AttentionError> {
    spec.check()?;
    let (queries, keys) = (q.rows(), k.rows());
    for (operand, shape) in [
        ("q", (queries, q.cols())),
        ("out", (out.rows(), out.cols())),
        ("dout", (dout.rows(), dout.cols())),
        ("dq", (dq.rows(), dq.cols())),
    ] {
        check_shape(operand, shape, (queries, spec.q_cols()))?;
    }
    for (operand, shape) in [
        ("k", (k.rows(), k.cols())),
        ("v", (v.rows(), v.cols())),
        ("dk", (dk.rows(), dk.cols())),
        ("dv", (dv.rows(), dv.cols())),
    ] {
        check_shape(operand, shape, (keys, spec.kv_cols()))?;
    }
    check_shape("lse", (1, lse.len()), (1, spec.heads * queries))?;
    check_segments("cu_q", cu_q, queries)?;
    check_segments("cu_k", cu_k, keys)?;
    if cu_q.len() != cu_k.len() {
        return Err(AttentionError::SegmentCount { queries: cu_q.len() - 1, keys: cu_k.len() - 1 });
    }
    let is_biased = bias.is_some();
    let job = Backward { isa: cpu.isa, spec, q, k, v, out, lse, dout, dq, dk, dv, bias, dlse };
    let tasks = plan::tasks(spec, cu_q, cu_k, usize::MAX / 2, 1);
    #[cfg(target_arch = "x86_64")]
    if let (false, form @ (Form::Pairs | Form::Tiles)) = (is_biased, Form::of(cpu.isa, T::DTYPE)) {
        cpu.threads.for_each(tasks.len(), |task| {
            let (task, next) = (&tasks[task], tasks.get(task + cpu.threads.count()));
            match form {
                Form::Pairs => tiled::backward::<T, tiled::Vectors>(&job, task, next),
                _ => tiled::backward::<T, Tiles>(&job, task, next),
            }
        });
        return Ok(());
    }
    cpu.threads.for_each(tasks.len(), |task| backward::task(&job, &tasks[task]));
    Ok(())
}

/// Attention of new tokens over a key/value cache, for generation.
///
/// Shapes: `q`, `out` `[new, heads * head_dim]`; `k_cache`, `v_cache`
/// `[capacity, kv_heads * head_dim]` of which the first `start + new` rows are filled, the new
/// tokens' own keys and values included. Query `i` sits at position `start + i`.
pub fn decode<T: Element>(
    cpu: &Cpu,
    spec: &AttentionSpec,
    q: Rows<'_, T>,
    k_cache: Rows<'_, T>,
    v_cache: Rows<'_, T>,
    start: usize,
    out: RowsMut<'_, T>,
) -> Result<(), AttentionError> {
    spec.check()?;
    let (new, len) = (q.rows(), start + q.rows());
    check_shape("k_cache", (k_cache.rows().min(len), k_cache.cols()), (len, spec.kv_cols()))?;
    check_shape("v_cache", (v_cache.rows().min(len), v_cache.cols()), (len, spec.kv_cols()))?;
    let (k, v) = (k_cache.first_rows(len), v_cache.first_rows(len));
    let (cu_q, cu_k) = ([0, new as i32], [0, len as i32]);
    let mut lse = vec![0.0; spec.heads * new];
    if new >= DECODE_ROWS {
        return forward_cross(cpu, spec, q, k, v, &cu_q, &cu_k, out, &mut lse);
    }
    check_shape("q", (new, q.cols()), (new, spec.q_cols()))?;
    check_shape("out", (out.rows(), out.cols()), (new, spec.q_cols()))?;
    let job = Forward { isa: cpu.isa, spec, q, k, v, out, lse: Shares::new(&mut lse), bias: None };
    let segment = plan::Segment { queries: 0..new, keys: 0..len };
    cpu.threads.for_each(new * spec.kv_heads, |task| {
        forward::one_query(&job, &segment, task / spec.kv_heads, task % spec.kv_heads);
    });
    Ok(())
}

/// [`decode`] with `bias` added to the scores.
pub fn decode_biased<T: Element>(
    cpu: &Cpu,
    spec: &AttentionSpec,
    q: Rows<'_, T>,
    k_cache: Rows<'_, T>,
    v_cache: Rows<'_, T>,
    start: usize,
    bias: DistanceBias<'_>,
    out: RowsMut<'_, T>,
) -> Result<(), AttentionError> {
    spec.check()?;
    let (new, len) = (q.rows(), start + q.rows());
    check_shape("k_cache", (k_cache.rows().min(len), k_cache.cols()), (len, spec.kv_cols()))?;
    check_shape("v_cache", (v_cache.rows().min(len), v_cache.cols()), (len, spec.kv_cols()))?;
    let (k, v) = (k_cache.first_rows(len), v_cache.first_rows(len));
    let mut lse = vec![0.0; spec.heads * new];
    forward_with(cpu, spec, q, k, v, &[0, new as i32], &[0, len as i32], Some(bias), out, &mut lse)
}

/// From this many new tokens on, [`decode`] fills enough of a block of queries for the blocked
/// forward to win.
const DECODE_ROWS: usize = 8;
