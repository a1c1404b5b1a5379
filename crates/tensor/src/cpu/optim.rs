//! Optimizer steps, fused: every state is read and written once, and the compute copy of the
//! weights is written in the same pass.
//!
//! All work on flat `f32` master weights and gradients. `gradient_scale` multiplies gradients as
//! they are read: the clipping coefficient, or the inverse of the loss scale, or their product.
//! `copy` receives the new weights in the dtype that the next forward reads. Weight decay is
//! decoupled (Loshchilov & Hutter 2019) unless said otherwise: `p *= 1 - lr * weight_decay`.
//!
//! Bytes a parameter with a 16-bit copy: AdamW 30 (read weight, gradient and two moments, write
//! three and the copy), with moments of eight bits ([`moments8`](crate::cpu::moments8)) 18.5; LAMB
//! 24 + 18 in two passes; SGD with momentum and Lion 22; Adafactor 4 + 8 + 14 in three passes.
//! These kernels run at memory bandwidth. Muon is in [`muon`](crate::cpu::muon).

use crate::cpu::Cpu;
use crate::cpu::reduce::sum_of_squares;
use crate::cpu::rows::{block_rows, blocks, for_elements, for_rows, for_tasks, load_at, store_at, sum_blocks};
use crate::cpu::simd::Simd;
use crate::cpu::threads::Shares;
use crate::dtype::Element;
use crate::simd_fn;
use std::ops::Range;

/// AdamW (Loshchilov & Hutter 2019).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Learning rate of this step.
    pub lr: f32,
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the corrected second moment.
    pub eps: f32,
    /// Decoupled weight decay.
    pub weight_decay: f32,
    /// The step after which the second moment stays as it is (1-bit Adam, Tang et al. 2021); None:
    /// it never does.
    pub variance_steps: Option<u64>,
}

/// SGD with momentum (a sum, as in PyTorch: `m = momentum m + g`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgd {
    /// Learning rate of this step.
    pub lr: f32,
    /// Momentum; 0 for none.
    pub momentum: f32,
    /// True if the step looks ahead: `g + momentum m` instead of `m`.
    pub nesterov: bool,
    /// Weight decay.
    pub weight_decay: f32,
    /// Form of weight decay.
    pub decay: Decay,
}

/// Where weight decay enters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decay {
    /// `p *= 1 - lr weight_decay`
    Decoupled,
    /// `g += weight_decay p`, which momentum then averages (L2 regularisation).
    Coupled,
}

/// Lion (Chen et al. 2023).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lion {
    /// Learning rate of this step.
    pub lr: f32,
    /// Weight of the momentum in the sign's argument.
    pub beta1: f32,
    /// Decay of the momentum.
    pub beta2: f32,
    /// Decoupled weight decay.
    pub weight_decay: f32,
}

/// Adafactor without momentum (Shazeer & Stern 2018, algorithms 4 and 5).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adafactor {
    /// Learning rate of this step, or its upper bound when the step is relative.
    pub lr: f32,
    /// Exponent of `beta2 = 1 - t^beta2_decay` (-0.8).
    pub beta2_decay: f32,
    /// Added to squared gradients (1e-30).
    pub eps1: f32,
    /// Least scale of a relative step (1e-3).
    pub eps2: f32,
    /// Updates with a larger root mean square are scaled down to it (1.0).
    pub clip_threshold: f32,
    /// Decoupled weight decay.
    pub weight_decay: f32,
    /// Length of the step.
    pub step_size: StepSize,
}

/// The length of a step of [`Adafactor`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepSize {
    /// `max(eps2, rms(weights)) * min(lr, 1 / sqrt(t))`
    Relative,
    /// `lr`
    Absolute,
}

/// One slice that is read, some that are updated, and a copy that is written, cut alike into
/// parallel ranges.
fn for_state<T: Element, const N: usize>(
    cpu: &Cpu,
    gradients: &[f32],
    state: [&mut [f32]; N],
    copy: Option<&mut [T]>,
    body: impl Fn(&[f32], [&mut [f32]; N], Option<&mut [T]>) + Sync,
) {
    let len = gradients.len();
    for state in &state {
        assert_eq!(state.len(), len, "length of the weights or an optimizer state");
    }
    assert_eq!(copy.as_ref().map_or(len, |copy| copy.len()), len, "length of the compute copy");
    let bytes = 4 + 8 * N + copy.as_ref().map_or(0, |_| size_of::<T>());
    let (state, copy) = (state.map(Shares::new), copy.map(Shares::new));
    for_elements(cpu, len, bytes, |range: Range<usize>| {
        // SAFETY: the ranges of a region do not overlap.
        let state = state.each_ref().map(|state| unsafe { state.part(range.clone()) });
        // SAFETY: as above.
        let copy = copy.as_ref().map(|copy| unsafe { copy.part(range.clone()) });
        body(&gradients[range], state, copy);
    });
}

/// Stores new weights and their copy.
#[inline(always)]
fn put<S: Simd, T: Element>(s: S, p: S::F, params: &mut [f32], copy: &mut Option<&mut [T]>, i: usize) {
    store_at(s, p, params, i);
    if let Some(copy) = copy {
        store_at(s, p, copy, i);
    }
}

impl AdamW {
    /// `lr / (1 - beta1^t)` and `1 / sqrt(1 - beta2^t)` of the `step`-th step, from 1. A second
    /// moment that stays as it is keeps its correction.
    pub(crate) fn corrected(&self, step: u64) -> (f32, f32) {
        assert!(step > 0, "steps count from 1");
        let correction = |beta: f32, step: u64| 1.0 - f64::from(beta).powf(step as f64);
        let step_size = (f64::from(self.lr) / correction(self.beta1, step)) as f32;
        let taken = self.variance_steps.map_or(step, |last| step.min(last.max(1)));
        (step_size, (1.0 / correction(self.beta2, taken).sqrt()) as f32)
    }

    /// The decay of the second moment in the `step`-th step: 1 where it stays as it is.
    pub(crate) fn second_decay(&self, step: u64) -> f32 {
        let is_frozen = self.variance_steps.is_some_and(|last| step > last.max(1));
        if is_frozen { 1.0 } else { self.beta2 }
    }
}

/// One step of [`AdamW`], the `step`-th (from 1), in the form of PyTorch:
/// `m = b1 m + (1 - b1) g`, `v = b2 v + (1 - b2) g^2`,
/// `p = (1 - lr wd) p - lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)`.
///
/// # Panics
/// When the lengths disagree or `step` is 0, here and below.
pub fn adamw<T: Element>(
    cpu: &Cpu,
    hyper: AdamW,
    step: u64,
    gradient_scale: f32,
    params: &mut [f32],
    gradients: &[f32],
    first: &mut [f32],
    second: &mut [f32],
    copy: Option<&mut [T]>,
) {
    let (step_size, root) = hyper.corrected(step);
    let hyper = AdamW { beta2: hyper.second_decay(step), ..hyper };
    for_state(cpu, gradients, [params, first, second], copy, |g, [p, m, v], copy| {
        adamw_range(cpu.isa, hyper, gradient_scale, step_size, root, g, p, m, v, copy);
    });
}

simd_fn! {
    pub(super) fn adamw_range[T: Element](
        s: S, hyper: AdamW, gradient_scale: f32, step_size: f32, root: f32, gradients: &[f32], params: &mut [f32],
        first: &mut [f32], second: &mut [f32], copy: Option<&mut [T]>,
    ) {
        let mut copy = copy;
        let (b1, b2) = (s.splat(hyper.beta1), s.splat(hyper.beta2));
        let (a1, a2) = (s.splat(1.0 - hyper.beta1), s.splat(1.0 - hyper.beta2));
        let keep = s.splat(1.0 - hyper.lr * hyper.weight_decay);
        let (scale, eps) = (s.splat(gradient_scale), s.splat(hyper.eps));
        let (step_size, root) = (s.splat(-step_size), s.splat(root));
        let mut i = 0;
        while i < params.len() {
            let g = s.mul(load_at(s, gradients, i, 0.0), scale);
            let m = s.fma(load_at(s, first, i, 0.0), b1, s.mul(g, a1));
            let v = s.fma(load_at(s, second, i, 0.0), b2, s.mul(s.mul(g, g), a2));
            let update = s.div(m, s.fma(s.sqrt(v), root, eps));
            let p = s.fma(update, step_size, s.mul(load_at(s, params, i, 0.0), keep));
            store_at(s, m, first, i);
            store_at(s, v, second, i);
            put(s, p, params, &mut copy, i);
            i += S::LANES;
        }
    }
}

/// Elements of which a thread sums squares at a time; the sums are added in order.
const LAMB_BLOCK: usize = 1 << 14;

/// One step of LAMB (You et al. 2020, algorithm 2) for one tensor: the update of [`adamw`] with its
/// weight decay, `r = m^ / (sqrt(v^) + eps) + wd p`, made as long as the weights times the learning
/// rate: `p -= lr |p| / |r| r`; with factor `lr` where one of the norms is 0. It reads the weights
/// and both moments twice.
pub fn lamb<T: Element>(
    cpu: &Cpu,
    hyper: AdamW,
    step: u64,
    gradient_scale: f32,
    params: &mut [f32],
    gradients: &[f32],
    first: &mut [f32],
    second: &mut [f32],
    copy: Option<&mut [T]>,
) {
    let (correction, root) = AdamW { lr: 1.0, ..hyper }.corrected(step);
    let hyper = AdamW { beta2: hyper.second_decay(step), ..hyper };
    let len = params.len();
    assert_eq!((gradients.len(), first.len(), second.len()), (len, len, len), "lengths of a tensor and its state");
    let count = len.div_ceil(LAMB_BLOCK);
    let mut squares = vec![[0.0f64; 2]; count];
    {
        let (first, second, squares) = (Shares::new(&mut *first), Shares::new(&mut *second), Shares::new(&mut squares));
        let params = &*params;
        for_tasks(cpu, count, 24 * len, |block| {
            let range = block * LAMB_BLOCK..len.min((block + 1) * LAMB_BLOCK);
            // SAFETY: every block has its own part of all three.
            let (first, second, squares) =
                unsafe { (first.part(range.clone()), second.part(range.clone()), squares.part(block..block + 1)) };
            let (g, p) = (&gradients[range.clone()], &params[range]);
            let sums = lamb_moments(cpu.isa, hyper, gradient_scale, correction, root, g, p, first, second);
            squares[0] = sums.map(f64::from);
        });
    }
    let [weights, update] = squares.iter().fold([0.0; 2], |sum, block| [sum[0] + block[0], sum[1] + block[1]]);
    let ratio = if weights > 0.0 && update > 0.0 { (weights / update).sqrt() } else { 1.0 };
    let rate = (f64::from(hyper.lr) * ratio) as f32;
    for_state(cpu, first, [params, second], copy, |m, [p, v], copy| {
        lamb_range(cpu.isa, hyper, rate, correction, root, m, v, p, copy);
    });
}

simd_fn! {
    /// Updates the moments, and returns the sums of squares of the weights and of the update.
    fn lamb_moments(
        s: S, hyper: AdamW, gradient_scale: f32, correction: f32, root: f32, gradients: &[f32], params: &[f32],
        first: &mut [f32], second: &mut [f32],
    ) -> [f32; 2] {
        let (b1, b2) = (s.splat(hyper.beta1), s.splat(hyper.beta2));
        let (a1, a2) = (s.splat(1.0 - hyper.beta1), s.splat(1.0 - hyper.beta2));
        let (scale, eps, decay) = (s.splat(gradient_scale), s.splat(hyper.eps), s.splat(hyper.weight_decay));
        let (correction, root) = (s.splat(correction), s.splat(root));
        let mut sums = [s.splat(0.0); 2];
        let mut i = 0;
        while i < params.len() {
            let g = s.mul(load_at(s, gradients, i, 0.0), scale);
            let m = s.fma(load_at(s, first, i, 0.0), b1, s.mul(g, a1));
            let v = s.fma(load_at(s, second, i, 0.0), b2, s.mul(s.mul(g, g), a2));
            let p = load_at(s, params, i, 0.0);
            // What lies behind the end is 0, and so is its update: 0 / eps.
            let r = s.fma(p, decay, s.div(s.mul(m, correction), s.fma(s.sqrt(v), root, eps)));
            sums = [s.fma(p, p, sums[0]), s.fma(r, r, sums[1])];
            store_at(s, m, first, i);
            store_at(s, v, second, i);
            i += S::LANES;
        }
        sums.map(|sum| s.reduce_sum(sum))
    }
}

simd_fn! {
    fn lamb_range[T: Element](
        s: S, hyper: AdamW, rate: f32, correction: f32, root: f32, first: &[f32], second: &[f32], params: &mut [f32],
        copy: Option<&mut [T]>,
    ) {
        let mut copy = copy;
        let (eps, decay, rate) = (s.splat(hyper.eps), s.splat(hyper.weight_decay), s.splat(-rate));
        let (correction, root) = (s.splat(correction), s.splat(root));
        let mut i = 0;
        while i < params.len() {
            let p = load_at(s, params, i, 0.0);
            let m = s.mul(load_at(s, first, i, 0.0), correction);
            let r = s.fma(p, decay, s.div(m, s.fma(s.sqrt(load_at(s, second, i, 0.0)), root, eps)));
            put(s, s.fma(r, rate, p), params, &mut copy, i);
            i += S::LANES;
        }
    }
}

/// One step of [`Sgd`]; without momentum pass `None` and no state is needed.
pub fn sgd<T: Element>(
    cpu: &Cpu,
    hyper: Sgd,
    gradient_scale: f32,
    params: &mut [f32],
    gradients: &[f32],
    momentum: Option<&mut [f32]>,
    copy: Option<&mut [T]>,
) {
    match momentum {
        Some(momentum) => for_state(cpu, gradients, [params, momentum], copy, |g, [p, m], copy| {
            sgd_range(cpu.isa, hyper, gradient_scale, g, p, Some(m), copy);
        }),
        None => {
            assert!(hyper.momentum == 0.0, "momentum {} without a state for it", hyper.momentum);
            for_state(cpu, gradients, [params], copy, |g, [p], copy| {
                sgd_range(cpu.isa, hyper, gradient_scale, g, p, None, copy);
            });
        }
    }
}

simd_fn! {
    fn sgd_range[T: Element](
        s: S, hyper: Sgd, gradient_scale: f32, gradients: &[f32], params: &mut [f32], momentum: Option<&mut [f32]>, copy: Option<&mut [T]>,
    ) {
        let (mut momentum, mut copy) = (momentum, copy);
        let (keep, coupled) = match hyper.decay {
            Decay::Decoupled => (1.0 - hyper.lr * hyper.weight_decay, 0.0),
            Decay::Coupled => (1.0, hyper.weight_decay),
        };
        let (keep, coupled, lr) = (s.splat(keep), s.splat(coupled), s.splat(-hyper.lr));
        let (mu, scale) = (s.splat(hyper.momentum), s.splat(gradient_scale));
        let mut i = 0;
        while i < params.len() {
            let p = load_at(s, params, i, 0.0);
            let mut update = s.fma(p, coupled, s.mul(load_at(s, gradients, i, 0.0), scale));
            if let Some(momentum) = momentum.as_deref_mut() {
                let m = s.fma(load_at(s, momentum, i, 0.0), mu, update);
                store_at(s, m, momentum, i);
                update = if hyper.nesterov { s.fma(m, mu, update) } else { m };
            }
            put(s, s.fma(update, lr, s.mul(p, keep)), params, &mut copy, i);
            i += S::LANES;
        }
    }
}

/// One step of [`Lion`]: `p = (1 - lr wd) p - lr sign(b1 m + (1 - b1) g)`, `m = b2 m + (1 - b2) g`.
pub fn lion<T: Element>(
    cpu: &Cpu,
    hyper: Lion,
    gradient_scale: f32,
    params: &mut [f32],
    gradients: &[f32],
    momentum: &mut [f32],
    copy: Option<&mut [T]>,
) {
    for_state(cpu, gradients, [params, momentum], copy, |g, [p, m], copy| {
        lion_range(cpu.isa, hyper, gradient_scale, g, p, m, copy);
    });
}

simd_fn! {
    fn lion_range[T: Element](
        s: S, hyper: Lion, gradient_scale: f32, gradients: &[f32], params: &mut [f32], momentum: &mut [f32], copy: Option<&mut [T]>,
    ) {
        let mut copy = copy;
        let zero = s.splat(0.0);
        let (b1, a1) = (s.splat(hyper.beta1), s.splat(1.0 - hyper.beta1));
        let (b2, a2) = (s.splat(hyper.beta2), s.splat(1.0 - hyper.beta2));
        let (keep, lr) = (s.splat(1.0 - hyper.lr * hyper.weight_decay), s.splat(hyper.lr));
        let scale = s.splat(gradient_scale);
        let mut i = 0;
        while i < params.len() {
            let (g, m) = (s.mul(load_at(s, gradients, i, 0.0), scale), load_at(s, momentum, i, 0.0));
            let direction = s.fma(m, b1, s.mul(g, a1));
            // lr sign(direction); a NaN goes through the product.
            let step = s.select(s.gt(zero, direction), s.neg(lr), s.mul(direction, zero));
            let step = s.select(s.gt(direction, zero), lr, step);
            store_at(s, s.fma(m, b2, s.mul(g, a2)), momentum, i);
            put(s, s.sub(s.mul(load_at(s, params, i, 0.0), keep), step), params, &mut copy, i);
            i += S::LANES;
        }
    }
}

/// Moves the average of weights a `share` of the way to `weights`: `a += share (w - a)`, in
/// `[0, 1]`. With a share of 1 the average becomes the weights, bit for bit. 12 bytes a parameter:
/// weight and average are read, the average is written.
///
/// # Panics
/// When the lengths disagree.
pub fn average(cpu: &Cpu, share: f32, weights: &[f32], average: &mut [f32]) {
    for_state(cpu, weights, [average], None::<&mut [f32]>, |w, [a], _| match share {
        // Rounding w - a would lose bits of w.
        1.0 => a.copy_from_slice(w),
        _ => average_range(cpu.isa, share, w, a),
    });
}

simd_fn! {
    fn average_range(s: S, share: f32, weights: &[f32], average: &mut [f32]) {
        let share = s.splat(share);
        let mut i = 0;
        while i < weights.len() {
            let (w, a) = (load_at(s, weights, i, 0.0), load_at(s, average, i, 0.0));
            store_at(s, s.fma(s.sub(w, a), share, a), average, i);
            i += S::LANES;
        }
    }
}

/// Adds the gradient of the penalty of elastic weight consolidation (Kirkpatrick et al. 2017,
/// equation 3) to gradients: `g += weight F (p - a)`, where `F` is the Fisher information and `a`
/// are the weights that are held. `sums[c]` becomes the sum of `F (p - a)^2`
/// over the `c`-th `chunk` elements, which depends on them alone. 20 bytes a parameter.
///
/// # Panics
/// When the lengths disagree.
pub fn consolidate(
    cpu: &Cpu,
    chunk: usize,
    weight: f32,
    params: &[f32],
    fisher: &[f32],
    held: &[f32],
    gradients: &mut [f32],
    sums: &mut [f64],
) {
    let len = gradients.len();
    assert!([params, fisher, held].iter().all(|x| x.len() == len), "as many weights as gradients");
    assert_eq!(sums.len(), len.div_ceil(chunk), "one sum a chunk");
    let (gradients, sums) = (Shares::new(gradients), Shares::new(sums));
    for_rows(cpu, len.div_ceil(chunk), 20 * chunk, |range| {
        for index in range {
            let at = index * chunk..((index + 1) * chunk).min(len);
            // SAFETY: the ranges of a region do not overlap.
            let (g, sum) = unsafe { (gradients.part(at.clone()), sums.part(index..index + 1)) };
            let (p, f, a) = (&params[at.clone()], &fisher[at.clone()], &held[at]);
            sum[0] = f64::from(consolidate_block(cpu.isa, weight, p, f, a, g));
        }
    });
}

simd_fn! {
    fn consolidate_block(
        s: S, weight: f32, params: &[f32], fisher: &[f32], held: &[f32], gradients: &mut [f32],
    ) -> f32 {
        let weight = s.splat(weight);
        let mut sum = s.splat(0.0);
        let mut i = 0;
        while i < gradients.len() {
            let moved = s.sub(load_at(s, params, i, 0.0), load_at(s, held, i, 0.0));
            let force = s.mul(load_at(s, fisher, i, 0.0), moved);
            let g = s.fma(force, weight, load_at(s, gradients, i, 0.0));
            sum = s.fma(force, moved, sum);
            store_at(s, g, gradients, i);
            i += S::LANES;
        }
        s.reduce_sum(sum)
    }
}

/// `f32` numbers of workspace for [`adafactor_matrix`].
pub fn adafactor_workspace(rows: usize, columns: usize) -> usize {
    (blocks(rows) + 2) * columns
}

impl Adafactor {
    pub(crate) fn beta2(&self, step: u64) -> f32 {
        assert!(step > 0, "steps count from 1");
        (1.0 - (step as f64).powf(f64::from(self.beta2_decay))) as f32
    }

    /// The factor of the unclipped update: the step's length over the clipping divisor.
    fn length(&self, step: u64, mean_square_update: f64, mean_square_weight: f64) -> f32 {
        let clip = (mean_square_update.sqrt() / f64::from(self.clip_threshold)).max(1.0);
        let alpha = match self.step_size {
            StepSize::Absolute => f64::from(self.lr),
            StepSize::Relative => mean_square_weight.sqrt().max(f64::from(self.eps2)) * self.rate(step),
        };
        (alpha / clip) as f32
    }

    /// The bound of a relative step's rate.
    pub(crate) fn rate(&self, step: u64) -> f64 {
        f64::from(self.lr).min(1.0 / (step as f64).sqrt())
    }

    pub(crate) fn keep(&self) -> f32 {
        1.0 - self.lr * self.weight_decay
    }
}

/// One step of [`Adafactor`] for a matrix `[rows, columns]`, whose second moment is the outer
/// product of `row_moment` `[rows]` and `column_moment` `[columns]`, means over a row and over a
/// column. `workspace` needs [`adafactor_workspace`] numbers.
pub fn adafactor_matrix<T: Element>(
    cpu: &Cpu,
    hyper: Adafactor,
    step: u64,
    gradient_scale: f32,
    params: &mut [f32],
    gradients: &[f32],
    row_moment: &mut [f32],
    column_moment: &mut [f32],
    copy: Option<&mut [T]>,
    workspace: &mut [f32],
) {
    let (rows, columns) = (row_moment.len(), column_moment.len());
    assert_eq!((params.len(), gradients.len()), (rows * columns, rows * columns), "a matrix of {rows} x {columns}");
    assert_eq!(copy.as_ref().map_or(params.len(), |copy| copy.len()), params.len(), "length of the compute copy");
    assert!(workspace.len() >= adafactor_workspace(rows, columns), "{} numbers of workspace", workspace.len());
    if params.is_empty() {
        return;
    }
    let beta2 = hyper.beta2(step);
    let (count, stride) = (blocks(rows), block_rows(rows));
    let (partials, rest) = workspace.split_at_mut(count * columns);
    let (sums, rest) = rest.split_at_mut(columns);
    let inverse = &mut rest[..columns];

    // Both moments, from one pass over the gradient.
    {
        let (parts, moments) = (Shares::new(&mut *partials), Shares::new(&mut *row_moment));
        for_tasks(cpu, count, 4 * params.len(), |block| {
            let range = block * stride..((block + 1) * stride).min(rows);
            // SAFETY: every block has its own part of both.
            let (part, moment) =
                unsafe { (parts.part(block * columns..(block + 1) * columns), moments.part(range.clone())) };
            part.fill(0.0);
            let gradients = &gradients[range.start * columns..range.end * columns];
            squares_of_rows(cpu.isa, hyper.eps1, beta2, gradient_scale, gradients, moment, part);
        });
    }
    sums.fill(0.0);
    sum_blocks(cpu, partials, sums);
    for ((moment, sum), inverse) in column_moment.iter_mut().zip(sums).zip(inverse.iter_mut()) {
        *moment = beta2 * *moment + (1.0 - beta2) * (*sum / rows as f32);
        *inverse = 1.0 / moment.sqrt();
    }
    let (row_moment, inverse) = (&*row_moment, &*inverse);
    let row_mean = (row_moment.iter().map(|r| f64::from(*r)).sum::<f64>() / rows as f64) as f32;

    // u = g sqrt(mean(R) / R_i) / sqrt(C_j)
    let mut block_sums = [0.0f64; 64];
    {
        let block_sums = Shares::new(&mut block_sums[..count]);
        for_tasks(cpu, count, 4 * params.len(), |block| {
            let mut total = 0.0;
            for row in block * stride..((block + 1) * stride).min(rows) {
                let scale = gradient_scale * (row_mean / row_moment[row]).sqrt();
                let row = &gradients[row * columns..(row + 1) * columns];
                total += f64::from(scaled_squares(cpu.isa, scale, row, inverse));
            }
            // SAFETY: every block has its own element.
            unsafe { block_sums.part(block..block + 1)[0] = total };
        });
    }
    let mean_square = block_sums.iter().sum::<f64>() / params.len() as f64;
    let length = hyper.length(step, mean_square, sum_of_squares(cpu, params) / params.len() as f64);

    let (params, copy) = (Shares::new(params), copy.map(Shares::new));
    for_rows(cpu, rows, 12 * columns, |range| {
        for row in range {
            let span = row * columns..(row + 1) * columns;
            // SAFETY: every row belongs to one range.
            let params = unsafe { params.part(span.clone()) };
            // SAFETY: as above.
            let copy = copy.as_ref().map(|copy| unsafe { copy.part(span.clone()) });
            let scale = length * gradient_scale * (row_mean / row_moment[row]).sqrt();
            apply_scaled(cpu.isa, hyper.keep(), scale, &gradients[span], inverse, params, copy);
        }
    });
}

simd_fn! {
    fn squares_of_rows(
        s: S, eps: f32, beta2: f32, gradient_scale: f32, gradients: &[f32], row_moment: &mut [f32], column_sums: &mut [f32],
    ) {
        let columns = column_sums.len();
        let (scale, eps) = (s.splat(gradient_scale), s.splat(eps));
        for (gradients, moment) in gradients.chunks_exact(columns).zip(row_moment) {
            let mut acc = s.splat(0.0);
            let mut i = 0;
            while i < columns {
                let g = s.mul(load_at(s, gradients, i, 0.0), scale);
                let square = s.fma(g, g, eps);
                store_at(s, s.add(load_at(s, column_sums, i, 0.0), square), column_sums, i);
                // Lanes beyond the row hold eps, which no gradient's square notices.
                acc = s.add(acc, square);
                i += S::LANES;
            }
            *moment = beta2 * *moment + (1.0 - beta2) * (s.reduce_sum(acc) / columns as f32);
        }
    }
}

simd_fn! {
    /// The sum of `(scale g_j inverse_j)^2`.
    fn scaled_squares(s: S, scale: f32, gradients: &[f32], inverse: &[f32]) -> f32 {
        let mut acc = s.splat(0.0);
        let factor = s.splat(scale);
        let mut i = 0;
        while i < gradients.len() {
            let u = s.mul(s.mul(load_at(s, gradients, i, 0.0), factor), load_at(s, inverse, i, 0.0));
            acc = s.fma(u, u, acc);
            i += S::LANES;
        }
        s.reduce_sum(acc)
    }
}

simd_fn! {
    /// `p = keep p - scale g_j inverse_j`
    fn apply_scaled[T: Element](
        s: S, keep: f32, scale: f32, gradients: &[f32], inverse: &[f32], params: &mut [f32], copy: Option<&mut [T]>,
    ) {
        let mut copy = copy;
        let (keep, scale) = (s.splat(keep), s.splat(-scale));
        let mut i = 0;
        while i < params.len() {
            let u = s.mul(s.mul(load_at(s, gradients, i, 0.0), scale), load_at(s, inverse, i, 0.0));
            put(s, s.fma(load_at(s, params, i, 0.0), keep, u), params, &mut copy, i);
            i += S::LANES;
        }
    }
}

/// One step of [`Adafactor`] for what is no matrix: the second moment is kept whole.
pub fn adafactor_vector<T: Element>(
    cpu: &Cpu,
    hyper: Adafactor,
    step: u64,
    gradient_scale: f32,
    params: &mut [f32],
    gradients: &[f32],
    moment: &mut [f32],
    copy: Option<&mut [T]>,
) {
    let len = params.len();
    assert_eq!((gradients.len(), moment.len()), (len, len), "lengths of gradients and moment");
    if len == 0 {
        return;
    }
    let beta2 = hyper.beta2(step);
    // Vectors are biases and norms: small, so one thread makes the moment and the update's mean
    // square.
    let mean_square =
        f64::from(moment_and_squares(cpu.isa, hyper.eps1, beta2, gradient_scale, gradients, moment)) / len as f64;
    let length = hyper.length(step, mean_square, sum_of_squares(cpu, params) / len as f64);
    for_state(cpu, gradients, [params, moment], copy, |g, [p, v], copy| {
        apply_rooted(cpu.isa, hyper.keep(), length * gradient_scale, g, v, p, copy);
    });
}

simd_fn! {
    fn moment_and_squares(s: S, eps: f32, beta2: f32, gradient_scale: f32, gradients: &[f32], moment: &mut [f32]) -> f32 {
        let (scale, eps) = (s.splat(gradient_scale), s.splat(eps));
        let (b, a) = (s.splat(beta2), s.splat(1.0 - beta2));
        let mut acc = s.splat(0.0);
        let mut i = 0;
        while i < gradients.len() {
            let g = s.mul(load_at(s, gradients, i, 0.0), scale);
            let gg = s.mul(g, g);
            let v = s.fma(load_at(s, moment, i, 0.0), b, s.mul(s.add(gg, eps), a));
            store_at(s, v, moment, i);
            acc = s.add(acc, s.div(gg, v));
            i += S::LANES;
        }
        s.reduce_sum(acc)
    }
}

simd_fn! {
    /// `p = keep p - scale g / sqrt(v)`
    fn apply_rooted[T: Element](
        s: S, keep: f32, scale: f32, gradients: &[f32], moment: &[f32], params: &mut [f32], copy: Option<&mut [T]>,
    ) {
        let mut copy = copy;
        let (keep, scale) = (s.splat(keep), s.splat(-scale));
        let mut i = 0;
        while i < params.len() {
            let u = s.div(s.mul(load_at(s, gradients, i, 0.0), scale), s.sqrt(load_at(s, moment, i, 1.0)));
            put(s, s.fma(load_at(s, params, i, 0.0), keep, u), params, &mut copy, i);
            i += S::LANES;
        }
    }
}
