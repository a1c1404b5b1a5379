//! The LM head fused with softmax cross-entropy.
//!
//! Logits [m, v] are the largest matrix of a language model and nobody wants them: they are made a chunk of rows at a time in
//! workspace, turned into losses and, in training, in place into their gradients, from which the two backward products are taken
//! while the chunk is warm. The chunk is large, because each one reads and writes the whole f32 weight gradient.

use super::{GradientSlot, accumulate_mode, check_slot, same_dtype};
use crate::cpu::Cpu;
use crate::cpu::gemm::{self, Epilogue, GradientEpilogue, MatMut, MatRef, Weight};
use crate::cpu::loss::{self as kernels, RowLosses};
use crate::dtype::Element;
use crate::error::Result;
use crate::{Cost, DType, Purpose, Tensor, by_float, ensure_shape};

/// Bytes of logits that are alive at once, unless a single block of rows needs more.
const CHUNK_BYTES: usize = 104 << 20;

/// Rows of a chunk are a multiple of this, so that products keep whole register tiles.
const ROW_BLOCK: usize = 64;

/// Cross-entropy of each row.
#[derive(Debug)]
pub struct TokenLosses {
    /// `-log softmax(x wᵀ)[target]`, f32 [m]; 0 where there is no target.
    pub losses: Tensor,
    /// u32 [m]: 1 where no logit is above the target's.
    pub hits: Tensor,
}

struct Shape {
    m: usize,
    d: usize,
    v: usize,
    chunk: usize,
}

fn check(op: &'static str, x: &Tensor, w: &Tensor, targets: &Tensor) -> Result<Shape> {
    same_dtype(op, x, w)?;
    let (m, d, v) = (x.rows(), x.last_dim(), w.rows());
    ensure_shape!(w.last_dim() == d, op, "input {} and weight {}", x.shape(), w.shape());
    ensure_shape!(
        targets.dtype() == DType::I32 && targets.elements() == m,
        op,
        "{} {} targets for {m} rows",
        targets.shape(),
        targets.dtype()
    );
    let fitting = CHUNK_BYTES / (v * x.dtype().size()).max(1) / ROW_BLOCK * ROW_BLOCK;
    Ok(Shape { m, d, v, chunk: fitting.max(ROW_BLOCK).min(m.max(1)) })
}

/// `scale` times the sum over rows of `-log softmax(x wᵀ)[target]`: x [m, d], w [v, d], targets i32 [m] with -100 where a row does not
/// count. A scalar, f32.
pub fn linear_cross_entropy(x: &Tensor, w: &Tensor, targets: &Tensor, scale: f32) -> Result<Tensor> {
    let losses = token_losses(x, w, targets)?.losses;
    sum_scaled(&losses, scale)
}

/// The cross-entropy of each row on its own, for evaluation.
pub fn token_losses(x: &Tensor, w: &Tensor, targets: &Tensor) -> Result<TokenLosses> {
    const OP: &str = "linear_cross_entropy";
    let Shape { m, d, v, chunk } = check(OP, x, w, targets)?;
    let device = x.device();
    let mut logits = device.empty([chunk, v], x.dtype(), Purpose::Workspace)?;
    let mut losses = device.empty([m], DType::F32, Purpose::Workspace)?;
    let mut lse = device.empty([m], DType::F32, Purpose::Workspace)?;
    let mut hits = device.empty([m], DType::U32, Purpose::Workspace)?;
    let cost = Cost::new(2 * m * v * d, x.bytes() + w.bytes() + 2 * m * v * x.dtype().size());
    by_float!(OP, x.dtype(), T => device.launch(OP, cost, |cpu| {
        let targets = targets.get::<i32>();
        for start in (0..m).step_by(chunk) {
            let rows = start..(start + chunk).min(m);
            let logits = &mut logits.get_mut::<T>()[..rows.len() * v];
            product::<T>(cpu, &x.get::<T>()[rows.start * d..rows.end * d], w.get::<T>(), d, logits);
            let out = RowLosses {
                loss: &mut losses.get_mut::<f32>()[rows.clone()],
                lse: &mut lse.get_mut::<f32>()[rows.clone()],
                hit: Some(&mut hits.get_mut::<u32>()[rows.clone()]),
            };
            kernels::cross_entropy(cpu, v, logits, &targets[rows], out)?;
        }
        Ok(())
    })?);
    Ok(TokenLosses { losses, hits })
}

/// As [`linear_cross_entropy`], with the gradient of x; `dw` sums the weight's.
pub fn linear_cross_entropy_with_gradients(
    x: &Tensor,
    w: &Tensor,
    targets: &Tensor,
    scale: f32,
    mut dw: Option<GradientSlot<'_>>,
) -> Result<(Tensor, Tensor)> {
    const OP: &str = "linear_cross_entropy_with_gradients";
    let Shape { m, d, v, chunk } = check(OP, x, w, targets)?;
    check_slot(OP, &dw, v * d)?;
    let device = x.device();
    let mut logits = device.empty([chunk, v], x.dtype(), Purpose::Workspace)?;
    let mut losses = device.empty([m], DType::F32, Purpose::Workspace)?;
    let mut lse = device.empty([chunk], DType::F32, Purpose::Workspace)?;
    let mut dx = x.empty_like(*x.shape(), x.dtype())?;
    let products = if dw.is_some() { 3 } else { 2 };
    let moved = x.bytes() + products * w.bytes() + 4 * m * v * x.dtype().size();
    let cost = Cost::new(2 * products * m * v * d, moved);
    by_float!(OP, x.dtype(), T => device.launch(OP, cost, |cpu| {
        let (targets, w) = (targets.get::<i32>(), w.get::<T>());
        for start in (0..m).step_by(chunk) {
            let rows = start..(start + chunk).min(m);
            let n = rows.len();
            let x = &x.get::<T>()[rows.start * d..rows.end * d];
            let logits = &mut logits.get_mut::<T>()[..n * v];
            product::<T>(cpu, x, w, d, logits);
            let loss = &mut losses.get_mut::<f32>()[rows.clone()];
            let out = RowLosses { loss, lse: &mut lse.get_mut::<f32>()[..n], hit: None };
            kernels::cross_entropy_in_place(cpu, v, logits, &targets[rows.clone()], scale, out)?;
            let dlogits = MatRef::new(&*logits, n, v);
            let dx = MatMut::new(&mut dx.get_mut::<T>()[rows.start * d..rows.end * d], n, d);
            gemm::input_gradient(cpu, dlogits, MatRef::new(w, v, d).into(), GradientEpilogue::default(), dx);
            if let Some((tensor, overwrite)) = &mut dw {
                let mode = accumulate_mode(std::mem::take(overwrite));
                gemm::weight_gradient(cpu, dlogits, MatRef::new(x, n, d), tensor.get_mut::<f32>(), mode, None);
            }
        }
        Ok(())
    })?);
    Ok((sum_scaled(&losses, scale)?, dx))
}

fn product<T: Element>(cpu: &Cpu, x: &[T], w: &[T], d: usize, logits: &mut [T]) {
    let (n, v) = (x.len() / d.max(1), w.len() / d.max(1));
    let weight = Weight::from(MatRef::new(w, v, d));
    gemm::forward(cpu, MatRef::new(x, n, d), weight, Epilogue::default(), MatMut::new(logits, n, v));
}

/// The sum in row order, in f64, times `scale`.
fn sum_scaled(losses: &Tensor, scale: f32) -> Result<Tensor> {
    let device = losses.device();
    let mut sum = device.empty([], DType::F32, Purpose::Activations)?;
    device.launch("sum", Cost::streaming(1, &[losses]), |_| {
        let total: f64 = losses.get::<f32>().iter().map(|loss| f64::from(*loss)).sum();
        sum.get_mut::<f32>()[0] = (total * f64::from(scale)) as f32;
        Ok(())
    })?;
    Ok(sum)
}
