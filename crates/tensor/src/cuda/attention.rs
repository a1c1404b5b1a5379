//! Attention and rotary positions.

use super::Cuda;
use super::launch::{Arg, args};
use crate::cpu::attention::AttentionSpec;
use crate::cpu::rope::{RopeTable, Rotation};
use crate::error::Result;
use crate::ops::HeadLayout;
use crate::{DType, Device, Purpose, Tensor, bf16, ensure_shape, f16};
use std::sync::Arc;
use trainyard_cuda::kernels::{self as k, AttentionForm, AttentionKernels, BiasTile, HEAD_DIM_MAX};

/// Tensor cores read 16 bytes at a time.
const ALIGNMENT: u64 = 16;

/// The form of attention on tensor cores for heads that they take, and the reason for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttentionChoice {
    /// The form.
    pub form: AttentionForm,
    /// Why it was chosen, in words that follow its name.
    pub because: String,
}

/// Bounds of segments, heads and key heads of the problems that forms are compared on: rows with
/// one, two and three of the largest tiles, so that every buffer of a kernel is filled again.
const COMPARED: (&[i32], usize, usize) = (&[0, 77, 340], 2, 1);
/// Columns of their heads: each form has kernels for up to 64 and for up to 128.
const HEADS_COMPARED: [usize; 2] = [64, 128];

impl Cuda {
    /// True if the device has the instructions of a form.
    pub fn has_attention(&self, form: AttentionForm) -> bool {
        form != AttentionForm::Warpgroups || self.properties().architecture() == "sm_90a"
    }

    /// The choice of [`Cuda::choose_attention`].
    pub fn attention(&self) -> Option<&AttentionChoice> {
        self.attention.get()
    }

    /// Chooses how attention multiplies in `dtype`, where tensor cores take its heads: as is asked
    /// for, else by `wgmma` where the device has it and gives what `mma.sync` gives on small
    /// problems, in memory of their own. The first choice stays; without one a device takes
    /// `mma.sync`, and for f32 there is none.
    ///
    /// # Errors
    /// Of the driver.
    ///
    /// # Panics
    /// If the device lacks the form that is asked for.
    pub fn choose_attention(self: &Arc<Cuda>, dtype: DType, asked: Option<AttentionForm>) -> Result<()> {
        let [warps, warpgroups] = [AttentionForm::Warps, AttentionForm::Warpgroups];
        assert!(asked.is_none_or(|form| self.has_attention(form)), "{self:?} has no {asked:?}");
        let choice = |form, because: String| AttentionChoice { form, because };
        // Both round probabilities and results to the dtype, after sums in f32 that have different
        // orders.
        let apart = match dtype {
            DType::BF16 => f64::from(bf16::EPSILON),
            DType::F16 => f64::from(f16::EPSILON),
            _ => return Ok(()),
        };
        let chosen = match asked {
            Some(form) => choice(form, "asked for".to_owned()),
            None if !self.has_attention(warpgroups) => choice(warps, "wgmma is Hopper's alone".to_owned()),
            None => {
                let mut most = 0.0f64;
                for head_dim in HEADS_COMPARED {
                    let [wanted, got] = [warps, warpgroups].map(|form| self.results(form, dtype, head_dim));
                    most = wanted?.iter().zip(&got?).map(|(a, b)| distance(a, b)).fold(most, f64::max);
                }
                match most <= apart {
                    true => choice(warpgroups, format!("tried, within {most:.0e} of mma.sync")),
                    false => choice(
                        warps,
                        format!("wgmma was tried and is {most:.0e} off: please report it with the GPU's name"),
                    ),
                }
            }
        };
        self.attention.get_or_init(|| chosen);
        Ok(())
    }

    /// The results of a form on a small problem: log-sum-exps, results and gradients.
    fn results(self: &Arc<Cuda>, form: AttentionForm, dtype: DType, head_dim: usize) -> Result<[Vec<f32>; 3]> {
        let device = Device::cuda(Arc::clone(self), None);
        let (segments, heads, kv_heads) = COMPARED;
        let spec = AttentionSpec::causal(heads, kv_heads, head_dim);
        let m = segments[segments.len() - 1] as usize;
        let (width, out_width) = ((heads + 2 * kv_heads) * head_dim, heads * head_dim);
        let qkv = super::peak::random(&device, &[m, width], dtype, 1)?;
        let dout = super::peak::random(&device, &[m, out_width], dtype, 2)?;
        let bounds = device.tensor([2, m], &rows_of_segments(segments, segments), Purpose::Workspace)?;
        let [out, dqkv] = [out_width, width].map(|width| device.zeros([m, width], dtype, Purpose::Workspace));
        let [lse, delta] = [(); 2].map(|()| device.zeros([heads, m], DType::F32, Purpose::Workspace));
        let (out, dqkv, lse, delta) = (out?, dqkv?, lse?, delta?);
        let (kv, dkv) = (keys_of(&qkv, &spec)?, keys_of(&dqkv, &spec)?);
        forward_by(form, self, fused(&qkv, &kv), &spec, None, &bounds, [&out, &lse])?;
        delta_of(self, [&dout, &out], None, &spec, &delta)?;
        let seen = Seen { by_queries: &bounds, of_keys: &bounds };
        backward_by(form, self, fused(&qkv, &kv), [&dout, &lse, &delta], &spec, None, seen, fused(&dqkv, &dkv))?;
        Ok([lse.to_f32_vec()?, out.to_f32_vec()?, dqkv.to_f32_vec()?])
    }

    /// The form for these heads: that which was chosen for tensor cores, where they take them, else
    /// multiply-adds.
    fn form(&self, op: &'static str, q: &Tensor, spec: &AttentionSpec) -> Result<AttentionForm> {
        let float = super::float(op, q.dtype())?;
        let aligned = q.region(false).address.is_multiple_of(ALIGNMENT);
        let chosen = self.attention.get().map_or(AttentionForm::Warps, |choice| choice.form);
        let takes = |form: &AttentionForm| form.takes(float, spec.head_dim, spec.scale, aligned);
        let found = [chosen, AttentionForm::MultiplyAdds].into_iter().find(takes);
        ensure_shape!(found.is_some(), op, "heads of {} columns; on cuda the most is {HEAD_DIM_MAX}", spec.head_dim);
        Ok(found.expect("just checked"))
    }
}

/// |a - b| / |a|; infinite where something is no number.
fn distance(a: &[f32], b: &[f32]) -> f64 {
    let squares = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    let apart = squares(&mut a.iter().zip(b).map(|(a, b)| f64::from(a - b)));
    let distance = apart / squares(&mut a.iter().map(|a| f64::from(*a))).max(f64::MIN_POSITIVE);
    if distance.is_nan() { f64::INFINITY } else { distance }
}

fn causal(spec: &AttentionSpec) -> (i32, usize) {
    (i32::from(spec.causal), spec.window.unwrap_or(0))
}

/// Queries, keys and values as kernels read them, or their gradients.
#[derive(Clone, Copy)]
pub(crate) struct Heads<'a> {
    /// Query heads, in the first columns.
    pub q: &'a Tensor,
    /// Key heads, then value heads, in the first columns from here on.
    pub kv: &'a Tensor,
    /// Rows, and elements from one row to the next.
    pub queries: [usize; 2],
    pub keys: [usize; 2],
}

/// The pairs of queries and keys: for each row the first and the end, [2, rows]. With a mask, the
/// bounds of its segment.
#[derive(Clone, Copy)]
pub(crate) struct Seen<'a> {
    /// The keys that each query sees.
    pub by_queries: &'a Tensor,
    /// The queries that see each key.
    pub of_keys: &'a Tensor,
}

/// Numbers of each head that are added to scores, by the query's row less the key's, both of one
/// fused matrix: f32 [h, 2 reach - 1]. No segment is longer than `reach`.
#[derive(Clone, Copy)]
pub(crate) struct Distances<'a> {
    pub table: &'a Tensor,
    pub reach: usize,
}

impl<'a> Distances<'a> {
    /// The last arguments of kernels that add them.
    fn args(self) -> [Arg<'a>; 2] {
        [Arg::from(self.table), Arg::from(self.reach)]
    }
}

/// The kernels of a form, with numbers by distance or without.
fn kernels_of(form: AttentionForm, spec: &AttentionSpec, bias: Option<Distances<'_>>) -> AttentionKernels {
    match bias {
        None => form.kernels(spec.head_dim),
        Some(_) => form.biased_kernels(spec.head_dim).attention,
    }
}

/// The columns of a fused matrix from its first key head on.
fn keys_of(qkv: &Tensor, spec: &AttentionSpec) -> Result<Tensor> {
    let first = spec.q_cols().min(qkv.elements());
    qkv.view(first, [qkv.elements() - first])
}

/// The parts of a fused matrix, of which `kv` are those from its first key head on.
fn fused<'a>(qkv: &'a Tensor, kv: &'a Tensor) -> Heads<'a> {
    let size = [qkv.rows(), qkv.last_dim()];
    Heads { q: qkv, kv, queries: size, keys: size }
}

/// `bounds`: for each row the first row of its segment; then for each row the end of it, [2, m].
pub(crate) fn attention(
    gpu: &Arc<Cuda>,
    qkv: &Tensor,
    spec: &AttentionSpec,
    bounds: &Tensor,
    out: &Tensor,
    lse: &Tensor,
) -> Result<()> {
    let kv = keys_of(qkv, spec)?;
    attention_over(gpu, fused(qkv, &kv), spec, bounds, out, lse)
}

/// [`attention`] with `bias` added to scores.
pub(crate) fn biased_attention(
    gpu: &Arc<Cuda>,
    qkv: &Tensor,
    bias: Distances<'_>,
    spec: &AttentionSpec,
    bounds: &Tensor,
    results: [&Tensor; 2],
) -> Result<()> {
    let kv = keys_of(qkv, spec)?;
    let form = gpu.form("biased_attention", qkv, spec)?;
    forward_by(form, gpu, fused(qkv, &kv), spec, Some(bias), bounds, results)
}

/// Attention of queries over keys and values; `bounds` are what [`Seen::by_queries`] has.
pub(crate) fn attention_over(
    gpu: &Arc<Cuda>,
    read: Heads<'_>,
    spec: &AttentionSpec,
    bounds: &Tensor,
    out: &Tensor,
    lse: &Tensor,
) -> Result<()> {
    forward_by(gpu.form("attention", read.q, spec)?, gpu, read, spec, None, bounds, [out, lse])
}

fn forward_by(
    form: AttentionForm,
    gpu: &Arc<Cuda>,
    Heads { q, kv, queries: [rows, q_stride], keys: [_, kv_stride] }: Heads<'_>,
    spec: &AttentionSpec,
    bias: Option<Distances<'_>>,
    bounds: &Tensor,
    [out, lse]: [&Tensor; 2],
) -> Result<()> {
    let AttentionSpec { heads, kv_heads, head_dim, scale, .. } = *spec;
    let (starts, ends) = (bounds.narrow(0..1)?, bounds.narrow(1..2)?);
    let (causal, window) = causal(spec);
    let mut args = args![
        q, kv, out, lse, &starts, &ends, rows, q_stride, kv_stride, heads, kv_heads, head_dim, scale, causal, window
    ]
    .to_vec();
    args.extend(bias.into_iter().flat_map(Distances::args));
    gpu.launch(kernels_of(form, spec, bias).forward, q.dtype(), [rows, heads, head_dim], &args)
}

/// `bounds` as in [`attention`]; `delta`: scratch [h, m].
pub(crate) fn attention_backward(
    gpu: &Arc<Cuda>,
    [dout, qkv, out, lse]: [&Tensor; 4],
    spec: &AttentionSpec,
    bounds: &Tensor,
    delta: &Tensor,
    dqkv: &Tensor,
) -> Result<()> {
    let (kv, dkv) = (keys_of(qkv, spec)?, keys_of(dqkv, spec)?);
    let seen = Seen { by_queries: bounds, of_keys: bounds };
    delta_of(gpu, [dout, out], None, spec, delta)?;
    attention_over_backward(gpu, fused(qkv, &kv), [dout, lse, delta], spec, seen, fused(dqkv, &dkv))
}

/// Floats of the scratch that the gradient of `bias` needs, whatever the form.
pub(crate) fn bias_scratch(spec: &AttentionSpec, rows: usize, reach: usize) -> usize {
    let of = |tile: BiasTile| tile.partials(spec.heads, rows, reach);
    of(BiasTile::SMALL).max(of(BiasTile::LARGE))
}

/// The gradients of [`biased_attention`]; `delta` is scratch [h, m], `partials` that of
/// [`bias_scratch`].
pub(crate) fn biased_attention_backward(
    gpu: &Arc<Cuda>,
    [dout, qkv, out, lse]: [&Tensor; 4],
    bias: Distances<'_>,
    spec: &AttentionSpec,
    bounds: &Tensor,
    [delta, partials]: [&Tensor; 2],
    [dqkv, dbias]: [&Tensor; 2],
) -> Result<()> {
    let AttentionSpec { heads, kv_heads, head_dim, scale, .. } = *spec;
    let form = gpu.form("biased_attention_backward", qkv, spec)?;
    let (kv, dkv) = (keys_of(qkv, spec)?, keys_of(dqkv, spec)?);
    let seen = Seen { by_queries: bounds, of_keys: bounds };
    delta_of(gpu, [dout, out], None, spec, delta)?;
    backward_by(form, gpu, fused(qkv, &kv), [dout, lse, delta], spec, Some(bias), seen, fused(dqkv, &dkv))?;

    let (kernel, tile) = form.biased_kernels(head_dim).gradient;
    let (rows, stride, parts) = (qkv.rows(), qkv.last_dim(), BiasTile::parts(qkv.rows()));
    let (starts, ends) = (bounds.narrow(0..1)?, bounds.narrow(1..2)?);
    let (causal, window) = causal(spec);
    let args = args![
        qkv, &kv, dout, lse, delta, &starts, &ends, partials, rows, stride, stride, heads, kv_heads, head_dim, scale,
        causal, window, bias.table, bias.reach, parts
    ];
    gpu.launch(kernel, qkv.dtype(), [parts * tile.shifts(bias.reach), heads, head_dim], args)?;
    let args = args![partials, dbias, heads, bias.reach, parts, tile.rows, tile.columns];
    gpu.launch(&k::ATTENTION_BIAS_SUM, qkv.dtype(), [dbias.elements(), 1, 1], args)
}

/// delta [h, n] = the sum of dout out over the columns of each head, less the gradient `dlse`
/// [n, h] of the log-sum-exp, if it has one.
pub(crate) fn delta_of(
    gpu: &Arc<Cuda>,
    [dout, out]: [&Tensor; 2],
    dlse: Option<&Tensor>,
    spec: &AttentionSpec,
    delta: &Tensor,
) -> Result<()> {
    let AttentionSpec { heads, head_dim, .. } = *spec;
    let rows = out.rows();
    let args = args![dout, out, dlse, delta, rows, heads, head_dim];
    gpu.launch(&k::ATTENTION_DELTA, out.dtype(), [rows * heads, 1, 1], args)
}

/// Makes `out` and `lse`, of attention over some keys, those over these and the keys of `own`.
pub(crate) fn join(
    gpu: &Arc<Cuda>,
    [own, own_lse]: [&Tensor; 2],
    [out, lse]: [&Tensor; 2],
    spec: &AttentionSpec,
) -> Result<()> {
    let units = lse.elements();
    let args = args![own, own_lse, out, lse, units, spec.head_dim];
    gpu.launch(&k::ATTENTION_JOIN, out.dtype(), [units, 1, 1], args)
}

/// The gradients of `own` and its log-sum-exp, of what [`join`] gave.
pub(crate) fn join_backward(
    gpu: &Arc<Cuda>,
    dout: &Tensor,
    [out, lse]: [&Tensor; 2],
    [own, own_lse]: [&Tensor; 2],
    spec: &AttentionSpec,
    [down, dlse]: [&Tensor; 2],
) -> Result<()> {
    let units = lse.elements();
    let args = args![dout, out, lse, own, own_lse, down, dlse, units, spec.head_dim];
    gpu.launch(&k::ATTENTION_JOIN_BACKWARD, out.dtype(), [units, 1, 1], args)
}

/// The gradients of queries, keys and values; `delta` is that of [`delta_of`].
pub(crate) fn attention_over_backward(
    gpu: &Arc<Cuda>,
    read: Heads<'_>,
    given: [&Tensor; 3],
    spec: &AttentionSpec,
    seen: Seen<'_>,
    gradients: Heads<'_>,
) -> Result<()> {
    let form = gpu.form("attention_backward", read.q, spec)?;
    backward_by(form, gpu, read, given, spec, None, seen, gradients)
}

fn backward_by(
    form: AttentionForm,
    gpu: &Arc<Cuda>,
    Heads { q, kv, queries: [queries, q_stride], keys: [keys, kv_stride] }: Heads<'_>,
    [dout, lse, delta]: [&Tensor; 3],
    spec: &AttentionSpec,
    bias: Option<Distances<'_>>,
    seen: Seen<'_>,
    Heads { q: dq, kv: dkv, .. }: Heads<'_>,
) -> Result<()> {
    let AttentionSpec { heads, kv_heads, head_dim, scale, .. } = *spec;
    let (causal, window) = causal(spec);
    let (dtype, kernels) = (q.dtype(), kernels_of(form, spec, bias));
    let added = || bias.into_iter().flat_map(Distances::args);
    let (starts, ends) = (seen.by_queries.narrow(0..1)?, seen.by_queries.narrow(1..2)?);
    let mut args = args![
        q, kv, dout, lse, delta, &starts, &ends, dq, queries, q_stride, kv_stride, heads, kv_heads, head_dim, scale,
        causal, window
    ]
    .to_vec();
    args.extend(added());
    gpu.launch(kernels.backward_queries, dtype, [queries, heads, head_dim], &args)?;
    let (starts, ends) = (seen.of_keys.narrow(0..1)?, seen.of_keys.narrow(1..2)?);
    let mut args = args![
        q, kv, dout, lse, delta, &starts, &ends, dkv, keys, queries, q_stride, kv_stride, heads, kv_heads, head_dim,
        scale, causal, window
    ]
    .to_vec();
    args.extend(added());
    gpu.launch(kernels.backward_keys, dtype, [keys, kv_heads, head_dim], &args)
}

pub(crate) fn attention_decode(
    gpu: &Arc<Cuda>,
    qkv: &Tensor,
    bias: Option<Distances<'_>>,
    spec: &AttentionSpec,
    [keys, values]: [&Tensor; 2],
    start: usize,
    out: &Tensor,
) -> Result<()> {
    let AttentionSpec { heads, kv_heads, head_dim, scale, .. } = *spec;
    let n = qkv.rows();
    let (causal, window) = causal(spec);
    let append = args![qkv, keys, values, n, start, heads, kv_heads, head_dim];
    gpu.launch(&k::CACHE_APPEND, qkv.dtype(), [n * kv_heads * head_dim, 1, 1], append)?;
    let mut args = args![qkv, keys, values, out, n, start, heads, kv_heads, head_dim, scale, causal, window].to_vec();
    args.extend(bias.into_iter().flat_map(Distances::args));
    let kernel = if bias.is_some() { &k::ATTENTION_DECODE_BIASED } else { &k::ATTENTION_DECODE };
    gpu.launch(kernel, qkv.dtype(), [n, heads, head_dim], &args)
}

/// `on_device`: the table's cosines, then its sines, [2, positions, dim / 2].
pub(crate) fn rope(
    gpu: &Arc<Cuda>,
    qkv: &Tensor,
    layout: HeadLayout,
    table: &RopeTable,
    on_device: &Tensor,
    positions: &Tensor,
    rotation: Rotation,
) -> Result<()> {
    let (rows, heads) = (qkv.rows(), layout.heads + layout.kv_heads);
    let (cos, sin) = (on_device.narrow(0..1)?, on_device.narrow(1..2)?);
    let sign = match rotation {
        Rotation::Forward => 1.0f32,
        Rotation::Backward => -1.0,
    };
    let args =
        args![qkv, positions, &cos, &sin, rows, layout.columns(), 0usize, heads, layout.head_dim, table.dim, sign];
    gpu.launch(&k::ROPE, qkv.dtype(), [rows * heads * (table.dim / 2), 1, 1], args)
}

/// A table as [`rope`] reads it.
pub(crate) fn rope_table(device: &crate::Device, table: &RopeTable) -> Result<Tensor> {
    let values = [table.cos.as_slice(), table.sin.as_slice()].concat();
    device.tensor([2, table.positions, table.dim / 2], &values, crate::Purpose::Workspace)
}

/// For each row of the segments that `bounds` has, the bounds of the segment of `seen` with the
/// same number, as kernels read them: the first rows, then the ends, [2, m].
pub(crate) fn rows_of_segments(bounds: &[i32], seen: &[i32]) -> Vec<i32> {
    let m = bounds[bounds.len() - 1] as usize;
    let mut values = vec![0; 2 * m];
    for (rows, seen) in bounds.windows(2).zip(seen.windows(2)) {
        let rows = rows[0] as usize..rows[1] as usize;
        values[rows.clone()].fill(seen[0]);
        values[m + rows.start..m + rows.end].fill(seen[1]);
    }
    values
}
