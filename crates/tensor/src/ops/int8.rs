//! Linear layers whose forward and input gradient multiply integers of eight bits (SwitchBack,
//! Wortsman et al. 2023): the operands are coded with a scale for each row, the weight on either
//! side by what is summed over. Gradients of weights and biases are those of [`super::linear`], of
//! operands that are not rounded.
//!
//! Codes are made anew in every call, and depend on nothing but the operand. So there is no state,
//! and a recomputed forward has the bits of the first. On the CPU only.

use super::linear::{checked, forward_form, product_cost};
use super::same_dtype;
use crate::cpu::gemm::{self, Activation, Epilogue, GradientEpilogue, MatMut, MatRef};
use crate::cpu::int8::{self, Codes, CodesMut};
use crate::error::Result;
use crate::{Cost, DType, Purpose, Tensor, by_float, ensure_shape};

/// An operand in codes: a tensor of bytes, and for each row a scale and a sum.
struct Coded {
    codes: Tensor,
    scales: Tensor,
    sums: Tensor,
}

impl Coded {
    fn view(&self) -> Codes<'_> {
        let codes = bytemuck::cast_slice(self.codes.get::<u8>());
        Codes { codes, scales: self.scales.get::<f32>(), sums: self.sums.get::<i32>() }
    }
}

/// The side of a matrix along which its codes lie.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Along {
    Rows,
    Columns,
}

fn encode(x: &Tensor, along: Along) -> Result<Coded> {
    const OP: &str = "int8_encode";
    let (device, m, k) = (x.device(), x.rows(), x.last_dim());
    let (rows, cols) = if along == Along::Rows { (m, k) } else { (k, m) };
    let mut coded = Coded {
        codes: device.empty([rows, cols], DType::U8, Purpose::Workspace)?,
        scales: device.empty([rows], DType::F32, Purpose::Workspace)?,
        sums: device.empty([rows], DType::I32, Purpose::Workspace)?,
    };
    let moved = [x, &coded.codes, &coded.scales, &coded.sums].iter().map(|tensor| tensor.bytes()).sum();
    let work = Cost::new(0, moved).on(x.dtype(), [m, k]).variant(if along == Along::Rows { "" } else { "transposed" });
    by_float!(OP, x.dtype(), T => device.launch(OP, work, |cpu| {
        let Coded { codes, scales, sums } = &mut coded;
        let codes = bytemuck::cast_slice_mut(codes.get_mut::<u8>());
        let to = CodesMut { codes, scales: scales.get_mut::<f32>(), sums: sums.get_mut::<i32>() };
        match along {
            Along::Rows => int8::encode(cpu, x.get::<T>(), m, k, to),
            Along::Columns => int8::encode_transposed(cpu, x.get::<T>(), m, k, to),
        }
        Ok(())
    })?);
    Ok(coded)
}

fn check_depth(op: &'static str, depth: usize) -> Result<()> {
    let most = gemm::INT8_DEPTH_MAX;
    ensure_shape!(depth <= most, op, "sums of {depth} products of 8-bit integers, which may be {most} long");
    Ok(())
}

/// [`super::linear`] with x and w in codes of eight bits.
///
/// # Errors
/// As there; more than 2^17 inputs; a GPU.
pub fn linear_int8(
    x: &Tensor,
    w: &Tensor,
    bias: Option<&Tensor>,
    activation: Activation,
    residual: Option<&Tensor>,
    keep_pre: bool,
) -> Result<(Tensor, Option<Tensor>)> {
    const OP: &str = "linear_int8";
    let ([m, n, k], shape) = checked(OP, x, w, bias, residual)?;
    check_depth(OP, k)?;
    let (left, right) = (encode(x, Along::Rows)?, encode(w, Along::Rows)?);
    let mut y = x.empty_like(shape, x.dtype())?;
    let mut pre = keep_pre.then(|| x.empty_like(shape, x.dtype())).transpose()?;
    let work = product_cost(m, n, k, &[&left.codes, &right.codes, &y]).on(x.dtype(), [m, n, k]);
    let work = work.variant(forward_form(activation, residual));
    by_float!(OP, x.dtype(), T => x.device().launch(OP, work, |cpu| {
        let epilogue = Epilogue {
            bias: bias.map(|b| b.get::<T>()),
            activation,
            pre_activation: pre.as_mut().map(|p| MatMut::new(p.get_mut::<T>(), m, n)),
            residual: residual.map(|r| MatRef::new(r.get::<T>(), m, n)),
        };
        let y = MatMut::new(y.get_mut::<T>(), m, n);
        gemm::forward_int8(cpu, left.view(), right.view(), epilogue, y);
        Ok(())
    })?);
    Ok((y, pre))
}

/// [`super::linear_input_gradient`] with dy and w in codes of eight bits.
///
/// # Errors
/// As there; more than 2^17 outputs; a GPU.
pub fn linear_int8_input_gradient(dy: &Tensor, w: &Tensor) -> Result<Tensor> {
    const OP: &str = "linear_int8_input_gradient";
    same_dtype(OP, dy, w)?;
    let (m, n, k) = (dy.rows(), dy.last_dim(), w.last_dim());
    ensure_shape!(w.rows() == n, OP, "gradient {} and weight {}", dy.shape(), w.shape());
    check_depth(OP, n)?;
    let (left, right) = (encode(dy, Along::Rows)?, encode(w, Along::Columns)?);
    let mut dx = dy.empty_like(dy.shape().with_last(k), dy.dtype())?;
    let work = product_cost(m, n, k, &[&left.codes, &right.codes, &dx]).on(dy.dtype(), [m, n, k]);
    by_float!(OP, dy.dtype(), T => dy.device().launch(OP, work, |cpu| {
        let dx = MatMut::new(dx.get_mut::<T>(), m, k);
        gemm::input_gradient_int8(cpu, left.view(), right.view(), GradientEpilogue::default(), dx);
        Ok(())
    })?);
    Ok(dx)
}
