//! Linear layers in the three forms of training.

use super::{GradientSlot, accumulate_mode, check_slot, form, given, product_scratch, same_dtype, scratch_on_cuda};
use crate::cpu::gemm::{self, Activation, Epilogue, GradientEpilogue, MatMut, MatRef, Weight};
use crate::error::Result;
use crate::{Cost, On, Shape, Tensor, by_float, cuda, ensure_shape};

pub(super) fn product_cost(m: usize, n: usize, k: usize, operands: &[&Tensor]) -> Cost {
    Cost::new(2 * m * n * k, operands.iter().map(|t| t.bytes()).sum())
}

/// The sizes of a forward, rows, outputs and inputs, and the shape of its result, once its operands
/// are seen to fit together.
pub(super) fn checked(
    op: &'static str,
    x: &Tensor,
    w: &Tensor,
    bias: Option<&Tensor>,
    residual: Option<&Tensor>,
) -> Result<([usize; 3], Shape)> {
    same_dtype(op, x, w)?;
    let (m, k) = (x.rows(), x.last_dim());
    let n = w.rows();
    ensure_shape!(w.shape().len() == 2 && w.last_dim() == k, op, "input {} and weight {}", x.shape(), w.shape());
    let shape = x.shape().with_last(n);
    if let Some(bias) = bias {
        same_dtype(op, x, bias)?;
        ensure_shape!(bias.elements() == n, op, "bias {} for {n} outputs", bias.shape());
    }
    if let Some(residual) = residual {
        same_dtype(op, x, residual)?;
        ensure_shape!(*residual.shape() == shape, op, "residual {} for a result of {shape}", residual.shape());
    }
    Ok(([m, n, k], shape))
}

/// The name of a forward's epilogue in records of calls.
pub(super) fn forward_form(activation: Activation, residual: Option<&Tensor>) -> &'static str {
    match (activation, residual) {
        (Activation::None, None) => "",
        (Activation::None, Some(_)) => "residual",
        (activation, _) => form(activation),
    }
}

/// `act(x wᵀ + bias) + residual`, and the argument of the activation if `keep_pre`: x [m, k], w
/// [n, k], bias [n], result [m, n].
pub fn linear(
    x: &Tensor,
    w: &Tensor,
    bias: Option<&Tensor>,
    activation: Activation,
    residual: Option<&Tensor>,
    keep_pre: bool,
) -> Result<(Tensor, Option<Tensor>)> {
    const OP: &str = "linear";
    let ([m, n, k], shape) = checked(OP, x, w, bias, residual)?;
    let mut y = x.empty_like(shape, x.dtype())?;
    let mut pre = keep_pre.then(|| x.empty_like(shape, x.dtype())).transpose()?;
    let work = product_cost(m, n, k, &[x, w, &y]).on(x.dtype(), [m, n, k]).variant(forward_form(activation, residual));
    let scratch = product_scratch(x.device())?;
    by_float!(OP, x.dtype(), T => x.device().launch_on(OP, work, |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => {
                return cuda::linear(gpu, x, w, bias, activation, residual, pre.as_ref(), &y, given(&scratch));
            }
        };
        let epilogue = Epilogue {
            bias: bias.map(|b| b.get::<T>()),
            activation,
            pre_activation: pre.as_mut().map(|p| MatMut::new(p.get_mut::<T>(), m, n)),
            residual: residual.map(|r| MatRef::new(r.get::<T>(), m, n)),
        };
        let weight = Weight::from(MatRef::new(w.get::<T>(), n, k));
        gemm::forward(cpu, MatRef::new(x.get::<T>(), m, k), weight, epilogue, MatMut::new(y.get_mut::<T>(), m, n));
        Ok(())
    })?);
    Ok((y, pre))
}

/// `dy w`: dy [m, n], w [n, k], result [m, k].
pub fn linear_input_gradient(dy: &Tensor, w: &Tensor) -> Result<Tensor> {
    const OP: &str = "linear_input_gradient";
    same_dtype(OP, dy, w)?;
    let (m, n, k) = (dy.rows(), dy.last_dim(), w.last_dim());
    ensure_shape!(w.rows() == n, OP, "gradient {} and weight {}", dy.shape(), w.shape());
    let mut dx = dy.empty_like(dy.shape().with_last(k), dy.dtype())?;
    let work = product_cost(m, n, k, &[dy, w, &dx]).on(dy.dtype(), [m, n, k]);
    let scratch = product_scratch(dy.device())?;
    by_float!(OP, dy.dtype(), T => dy.device().launch_on(OP, work, |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::linear_input_gradient(gpu, dy, w, &dx, given(&scratch)),
        };
        let weight = Weight::from(MatRef::new(w.get::<T>(), n, k));
        let dy = MatRef::new(dy.get::<T>(), m, n);
        gemm::input_gradient(cpu, dy, weight, GradientEpilogue::default(), MatMut::new(dx.get_mut::<T>(), m, k));
        Ok(())
    })?);
    Ok(dx)
}

/// `dw (+)= dyᵀ x` and `db (+)= Σ dy` in f32: dy [m, n], x [m, k], dw [n, k], db [n].
pub fn linear_weight_gradient(
    dy: &Tensor,
    x: &Tensor,
    mut dw: Option<GradientSlot<'_>>,
    mut db: Option<GradientSlot<'_>>,
) -> Result<()> {
    const OP: &str = "linear_weight_gradient";
    same_dtype(OP, dy, x)?;
    let (m, n, k) = (dy.rows(), dy.last_dim(), x.last_dim());
    ensure_shape!(x.rows() == m, OP, "gradient {} and input {}", dy.shape(), x.shape());
    check_slot(OP, &dw, n * k)?;
    check_slot(OP, &db, n)?;
    let flops = if dw.is_some() { 2 * m * n * k } else { 0 };
    let moved = dw.as_ref().map_or(0, |(t, _)| t.bytes());
    let adds = dw.as_ref().is_some_and(|(_, overwrite)| !overwrite);
    let form = match (db.is_some(), adds) {
        (false, false) => "",
        (false, true) => "adding",
        (true, false) => "bias",
        (true, true) => "bias adding",
    };
    let work = Cost::new(flops, dy.bytes() + x.bytes() + moved).on(dy.dtype(), [m, n, k]).variant(form);
    let scratch = product_scratch(dy.device())?;
    let partials = scratch_on_cuda(dy.device(), if db.is_some() { cuda::row_blocks(m) * n } else { 0 })?;
    by_float!(OP, dy.dtype(), T => dy.device().launch_on(OP, work, |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => {
                let scratch = [given(&scratch), given(&partials)];
                return cuda::linear_weight_gradient(gpu, dy, x, &mut dw, &mut db, scratch);
            }
        };
        let (dy, x) = (MatRef::new(dy.get::<T>(), m, n), MatRef::new(x.get::<T>(), m, k));
        if let Some((tensor, overwrite)) = &mut db {
            gemm::column_sums(cpu, dy, accumulate_mode(*overwrite), tensor.get_mut::<f32>());
        }
        if let Some((tensor, overwrite)) = &mut dw {
            gemm::weight_gradient(cpu, dy, x, tensor.get_mut::<f32>(), accumulate_mode(*overwrite), None);
        }
        Ok(())
    })?);
    Ok(())
}
