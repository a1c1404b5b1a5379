//! Linear layers whose three products have operands of eight bits (Micikevicius et al. 2022): E4M3
//! for inputs and weights, E5M2 for gradients.
//!
//! An operand is `round(x scale)`, with one scale a tensor that was chosen before ("delayed
//! scaling"), and its largest magnitude is noted as it is rounded, for the choice of later scales.
//! On a GPU the codes are multiplied by cuBLASLt, which wants both operands to lie along what is
//! summed over: so they are rounded transposed too where backward sums over rows. A processor has
//! no such products: it multiplies the rounded numbers in the operands' own dtype, where they are
//! exact because scales are powers of two. Sums, results, biases and gradients of biases are as
//! those of [`super::linear`].

use super::linear::{checked, forward_form, product_cost};
use super::{
    GradientSlot, check_slot, given, linear, linear_input_gradient, linear_weight_gradient, product_scratch, same_dtype,
};
use crate::cpu::gemm::Activation;
use crate::error::Result;
use crate::{Computes, Cost, DType, Device, On, Purpose, Tensor, by_float, cpu, cuda, ensure_shape};
use std::sync::Arc;
pub use trainyard_cuda::fp8::Fp8;

/// The sizes of a product of eight bits (rows, inputs and outputs of a linear layer) are multiples
/// of this.
pub const MULTIPLE: usize = cuda::driver::Product::FP8_MULTIPLE;

/// One tensor's part of the state of scaling, each a single element on the device.
#[derive(Clone, Debug)]
pub struct Slot {
    /// f32: what the tensor is multiplied by before it is rounded, a power of two.
    pub scale: Tensor,
    /// f32: one over that.
    pub inverse: Tensor,
    /// u32: the bits of an f32, the largest magnitude since this was last set to 0; above those of
    /// infinity where there was a NaN.
    pub amax: Tensor,
}

/// The tensors of a linear layer.
#[derive(Clone, Debug)]
pub struct Slots {
    /// Its input.
    pub input: Slot,
    /// Its weight.
    pub weight: Slot,
    /// The gradient of its output.
    pub gradient: Slot,
}

/// The scaling of a linear layer.
#[derive(Clone, Debug)]
pub struct Scaling {
    /// The state of its tensors.
    pub slots: Arc<Slots>,
    /// True if magnitudes are only noted, and products are those of [`super::linear`], because
    /// there is nothing to choose scales by yet.
    pub measures: bool,
}

/// An operand: on a GPU codes, as they lie and transposed where that is wanted; on a processor the
/// numbers themselves.
struct Rounded<'s> {
    format: Fp8,
    slot: &'s Slot,
    rows: Option<Tensor>,
    columns: Option<Tensor>,
}

impl Rounded<'_> {
    fn rows(&self) -> &Tensor {
        self.rows.as_ref().expect("asked for")
    }

    fn columns(&self) -> &Tensor {
        self.columns.as_ref().expect("asked for")
    }
}

/// The orientations in which a GPU needs an operand.
#[derive(Clone, Copy)]
struct Lies {
    rows: bool,
    columns: bool,
}

const ROWS: Lies = Lies { rows: true, columns: false };
const COLUMNS: Lies = Lies { rows: false, columns: true };
const BOTH: Lies = Lies { rows: true, columns: true };

fn round<'s>(x: &Tensor, format: Fp8, slot: &'s Slot, lies: Lies) -> Result<Rounded<'s>> {
    const OP: &str = "fp8_round";
    let device = x.device();
    let (m, k) = (x.rows(), x.last_dim());
    let on_cuda = device.computes() == Computes::Cuda;
    let codes = |shape: [usize; 2]| device.empty(shape, DType::U8, Purpose::Workspace);
    let (mut rows, columns) = if on_cuda {
        (lies.rows.then(|| codes([m, k])).transpose()?, lies.columns.then(|| codes([k, m])).transpose()?)
    } else {
        (Some(device.empty(*x.shape(), x.dtype(), Purpose::Workspace)?), None)
    };
    let moved = x.bytes() + [&rows, &columns].into_iter().flatten().map(Tensor::bytes).sum::<usize>();
    let work = Cost::new(0, moved).on(x.dtype(), [m, k]).variant(match (on_cuda, lies.rows, lies.columns) {
        (true, true, true) => "both",
        (true, false, true) => "transposed",
        _ => "",
    });
    by_float!(OP, x.dtype(), T => device.launch_on(OP, work, |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::fp8::round(gpu, x, format, slot, rows.as_ref(), columns.as_ref()),
        };
        let scales = [slot.scale.get::<f32>()[0], slot.inverse.get::<f32>()[0]];
        let y = rows.as_mut().expect("a processor has rows");
        let most = cpu::fp8::round(cpu, format, scales, x.get::<T>(), y.get_mut::<T>());
        raise(slot, most);
        Ok(())
    })?);
    Ok(Rounded { format, slot, rows, columns })
}

/// Notes the largest magnitude of `x`, and nothing else.
fn note(x: &Tensor, slot: &Slot) -> Result<()> {
    const OP: &str = "fp8_amax";
    let work = Cost::streaming(0, &[x]).on(x.dtype(), [x.elements()]);
    by_float!(OP, x.dtype(), T => x.device().launch_on(OP, work, |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::fp8::amax(gpu, x, slot),
        };
        raise(slot, cpu::fp8::amax(cpu, x.get::<T>()));
        Ok(())
    })?);
    Ok(())
}

/// On a processor, whose lane of computing alone uses the slots.
fn raise(slot: &Slot, most: f32) {
    let mut amax = slot.amax.clone();
    let amax = &mut amax.get_mut::<u32>()[0];
    *amax = (*amax).max(most.to_bits());
}

fn check(op: &'static str, sizes: [usize; 3]) -> Result<()> {
    ensure_shape!(
        sizes.iter().all(|size| size.is_multiple_of(MULTIPLE)),
        op,
        "rows, outputs and inputs {sizes:?}, which for products of eight bits must be multiples of {MULTIPLE}"
    );
    Ok(())
}

/// [`super::linear`] with x and w rounded to E4M3.
///
/// # Errors
/// Sizes that are no multiples of [`MULTIPLE`]; as there.
pub fn linear_fp8(
    x: &Tensor,
    w: &Tensor,
    bias: Option<&Tensor>,
    activation: Activation,
    residual: Option<&Tensor>,
    keep_pre: bool,
    scaling: &Scaling,
) -> Result<(Tensor, Option<Tensor>)> {
    const OP: &str = "linear_fp8";
    let slots = &*scaling.slots;
    if scaling.measures {
        note(x, &slots.input)?;
        note(w, &slots.weight)?;
        return linear(x, w, bias, activation, residual, keep_pre);
    }
    let ([m, n, k], shape) = checked(OP, x, w, bias, residual)?;
    check(OP, [m, n, k])?;
    let (a, b) = (round(x, Fp8::E4M3, &slots.input, ROWS)?, round(w, Fp8::E4M3, &slots.weight, ROWS)?);
    if x.device().computes() == Computes::Cpu {
        return linear(a.rows(), b.rows(), bias, activation, residual, keep_pre);
    }
    let y = x.empty_like(shape, x.dtype())?;
    let pre = keep_pre.then(|| x.empty_like(shape, x.dtype())).transpose()?;
    let scratch = product_scratch(x.device())?;
    let work = product_cost(m, n, k, &[a.rows(), b.rows(), &y]).on(x.dtype(), [m, n, k]);
    launch(x.device(), OP, work.variant(forward_form(activation, residual)), |gpu| {
        cuda::fp8::linear(gpu, operand(&a), operand(&b), bias, activation, residual, pre.as_ref(), &y, given(&scratch))
    })?;
    Ok((y, pre))
}

/// The gradients of [`linear_fp8`]: `dy w`, when w is given, with dy rounded to E5M2 and w to E4M3;
/// `dw (+)= dyᵀ x` likewise, when x is given; and `db (+)= Σ dy` of dy itself.
///
/// # Errors
/// As [`linear_fp8`].
pub fn linear_fp8_backward(
    dy: &Tensor,
    x: Option<(&Tensor, GradientSlot<'_>)>,
    w: Option<&Tensor>,
    db: Option<GradientSlot<'_>>,
    scaling: &Scaling,
) -> Result<Option<Tensor>> {
    const OP: &str = "linear_fp8_backward";
    let slots = &*scaling.slots;
    if db.is_some() {
        linear_weight_gradient(dy, dy, None, db)?;
    }
    if scaling.measures {
        note(dy, &slots.gradient)?;
        if let Some((x, dw)) = x {
            linear_weight_gradient(dy, x, Some(dw), None)?;
        }
        return w.map(|w| linear_input_gradient(dy, w)).transpose();
    }
    let lies = Lies { rows: w.is_some(), columns: x.is_some() };
    if !lies.rows && !lies.columns {
        return Ok(None);
    }
    let (m, n) = (dy.rows(), dy.last_dim());
    let on_cuda = dy.device().computes() == Computes::Cuda;
    let gradient = round(dy, Fp8::E5M2, &slots.gradient, if lies.rows && lies.columns { BOTH } else { lies })?;
    if let Some((x, dw)) = x {
        let (k, dw) = (x.last_dim(), Some(dw));
        same_dtype(OP, dy, x)?;
        ensure_shape!(x.rows() == m, OP, "gradient {} and input {}", dy.shape(), x.shape());
        check_slot(OP, &dw, n * k)?;
        check(OP, [m, n, k])?;
        let x = round(x, Fp8::E4M3, &slots.input, COLUMNS)?;
        match dw {
            Some((dw, overwrite)) if on_cuda => {
                let (left, right) = (gradient.columns(), x.columns());
                let work = product_cost(m, n, k, &[left, right, dw]).on(dy.dtype(), [m, n, k]);
                let work = work.variant(if overwrite { "" } else { "adding" });
                let scratch = product_scratch(dy.device())?;
                launch(dy.device(), "linear_fp8_weight_gradient", work, |gpu| {
                    let operands = [(left, gradient.format, gradient.slot), (right, x.format, x.slot)];
                    cuda::fp8::weight_gradient(gpu, operands, dw, overwrite, given(&scratch))
                })?;
            }
            dw => linear_weight_gradient(gradient.rows(), x.rows(), dw, None)?,
        }
    }
    let Some(w) = w else { return Ok(None) };
    let k = w.last_dim();
    ensure_shape!(w.rows() == n, OP, "gradient {} and weight {}", dy.shape(), w.shape());
    check(OP, [m, n, k])?;
    let w = round(w, Fp8::E4M3, &slots.weight, COLUMNS)?;
    if !on_cuda {
        return Ok(Some(linear_input_gradient(gradient.rows(), w.rows())?));
    }
    let right = w.columns();
    let dx = dy.empty_like(dy.shape().with_last(k), dy.dtype())?;
    let work = product_cost(m, n, k, &[gradient.rows(), right, &dx]).on(dy.dtype(), [m, n, k]);
    let scratch = product_scratch(dy.device())?;
    launch(dy.device(), "linear_fp8_input_gradient", work, |gpu| {
        cuda::fp8::input_gradient(gpu, [operand(&gradient), (right, w.format, w.slot)], &dx, given(&scratch))
    })?;
    Ok(Some(dx))
}

fn operand<'r>(rounded: &'r Rounded<'_>) -> cuda::fp8::Operand<'r> {
    (rounded.rows(), rounded.format, rounded.slot)
}

/// Launches what a GPU, or meta in its place, has.
fn launch(
    device: &Device,
    op: &'static str,
    work: crate::Work,
    run: impl FnOnce(&Arc<cuda::Cuda>) -> Result<()>,
) -> Result<()> {
    device.launch_on(op, work, |on| match on {
        On::Cuda(gpu) => run(gpu),
        On::Cpu(_) => unreachable!("a processor computes `linear` on rounded operands"),
    })
}
