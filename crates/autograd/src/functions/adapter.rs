//! The low-rank addition of an adapter to a product (LoRA, Hu et al. 2021), and the magnitudes of
//! the sum (DoRA, Liu et al. 2024).
//!
//! Its result is the residual that the product's epilogue adds, so the sum costs no pass over
//! memory. In backward it adds to the gradient of x that the product has computed.

use super::linear::LinearOptions;
use super::prelude::*;
use crate::{Adapter, AdapterOutputs};
use trainyard_tensor::cpu::elementwise::{Binary, Unary};
use trainyard_tensor::cpu::gemm::Activation;
use trainyard_tensor::ops::plain::{self, Dims};
use trainyard_tensor::{DType, Purpose};

/// `scale (x aᵀ) bᵀ + residual`; inputs are x, a, b and, where present, the residual.
#[derive(Clone, Debug)]
pub struct LowRank {
    adapter: Adapter,
    residual: bool,
}

impl Tape<'_> {
    /// `act(x wᵀ + b + scale (x aᵀ) bᵀ) + residual`.
    pub(super) fn adapted_linear(
        &mut self,
        x: &Var,
        w: ParamId,
        options: LinearOptions<'_>,
        adapter: Adapter,
    ) -> Result<Var> {
        let LinearOptions { bias, activation, residual } = options;
        let has_magnitudes = adapter.magnitude.is_some();
        if activation == Activation::None && !has_magnitudes {
            let sum = self.low_rank(x, residual, adapter)?;
            return self.own_linear(x, w, LinearOptions { bias, activation, residual: Some(&sum) });
        }
        let sum = self.low_rank(x, None, adapter.clone())?;
        // Magnitudes scale what comes before the bias.
        let [inside, after] = if has_magnitudes { [None, bias] } else { [bias, None] };
        let inner = LinearOptions { bias: inside, activation: Activation::None, residual: Some(&sum) };
        let mut y = self.own_linear(x, w, inner)?;
        if has_magnitudes {
            let value = |id| self.parameter(id).map(|parameter| parameter.value);
            let norms = match self.summed_row_squares(w) {
                Some(squares) => norms_of_squares(squares, value(w)?.dtype())?,
                None => row_norms(&value(w)?, &value(adapter.a)?, &value(adapter.b)?, &adapter)?,
            };
            y = self.magnitude(&y, norms, adapter)?;
        }
        if let Some(bias) = after {
            y = self.add_bias(&y, bias)?;
        }
        if activation != Activation::None {
            y = self.activate(&y, activation)?;
        }
        residual.map_or(Ok(y.clone()), |residual| self.add(&y, residual))
    }

    /// `scale (x aᵀ) bᵀ + residual`: x [m, k], residual and result [m, n]. [`Tape::linear`] calls
    /// it for weights that have an adapter.
    pub fn low_rank(&mut self, x: &Var, residual: Option<&Var>, adapter: Adapter) -> Result<Var> {
        let (down, up) = (self.parameter(adapter.a)?.value, self.parameter(adapter.b)?.value);
        let (narrow, _) = ops::linear(x.tensor(), &down, None, Activation::None, None, false)?;
        let wide = scaled(&up, &adapter)?;
        let (y, _) = ops::linear(&narrow, &wide, None, Activation::None, residual.map(Var::tensor), false)?;
        let mut inputs = vec![Operand::from(x), adapter.a.into(), adapter.b.into()];
        inputs.extend(residual.map(Operand::from));
        let function = LowRank { adapter, residual: residual.is_some() };
        self.record_one(function, &inputs, y, |tape| vec![tape.save(x), Saved::Tensor(narrow)])
    }

    /// The squares of the norms of the rows of `w + scale b a`, [n] in f32, through which no
    /// gradient flows. Where ranks divide the columns of `w`, the sum over ranks is for
    /// [`Tape::set_row_squares`].
    pub fn row_squares(&mut self, w: ParamId, adapter: &Adapter) -> Result<Var> {
        let value = |id| self.parameter(id).map(|parameter| parameter.value);
        let squares = row_squares(&value(w)?, &value(adapter.a)?, &value(adapter.b)?, adapter)?;
        Ok(self.constant(squares))
    }

    /// `z ⊙ m / norms`: z [rows, n], and m the magnitudes of `adapter` (Liu et al. 2024,
    /// equation 5). No gradient goes through the norms [n], which are those of the rows that z was
    /// multiplied by (section 4.3). [`Tape::linear`] calls it for weights whose adapter has
    /// magnitudes.
    pub fn magnitude(&mut self, z: &Var, norms: Tensor, adapter: Adapter) -> Result<Var> {
        let of = adapter.magnitude.expect("the adapter has magnitudes");
        let gains = gains(&self.parameter(of)?.value, &norms, &adapter)?;
        let y = plain::binary(Binary::Mul, z.tensor(), &gains)?;
        let inputs = [Operand::from(z), of.into()];
        self.record_one(Magnitude { adapter }, &inputs, y, |tape| vec![tape.save(z), Saved::Tensor(norms)])
    }
}

/// `z ⊙ m / norms`; inputs are z and m.
#[derive(Clone, Debug)]
pub struct Magnitude {
    adapter: Adapter,
}

/// The least norm of a row. Rows of zeros, as pruning leaves them, would be divided by zero.
pub const NORM_MIN: f32 = 1e-7;

/// The norms of the rows of `w + scale b a`, [n], but at least [`NORM_MIN`]: the magnitudes of a
/// weight as it is, if `b` is zero.
///
/// # Errors
/// Shapes and dtypes that do not fit each other.
pub fn row_norms(w: &Tensor, down: &Tensor, up: &Tensor, adapter: &Adapter) -> Result<Tensor> {
    let squares = squares(w, down, up, adapter)?;
    Ok(plain::clamp(&plain::unary(Unary::Sqrt, &squares)?, NORM_MIN, f32::INFINITY)?)
}

/// The squares of these norms over the columns of `w`, [n] in f32, so that they can be summed over
/// ranks that divide the columns.
///
/// # Errors
/// As [`row_norms`].
pub fn row_squares(w: &Tensor, down: &Tensor, up: &Tensor, adapter: &Adapter) -> Result<Tensor> {
    Ok(ops::cast(&squares(w, down, up, adapter)?, DType::F32)?)
}

/// The norms in `dtype` of rows of which `squares` has the sums of squares; as [`row_norms`].
///
/// # Errors
/// Squares that are not in f32.
pub fn norms_of_squares(squares: &Tensor, dtype: DType) -> Result<Tensor> {
    let norms = plain::clamp(&plain::unary(Unary::Sqrt, squares)?, NORM_MIN, f32::INFINITY)?;
    Ok(ops::cast(&norms, dtype)?)
}

fn squares(w: &Tensor, down: &Tensor, up: &Tensor, adapter: &Adapter) -> Result<Tensor> {
    let down = plain::transpose(down, 0, 1)?;
    let (sum, _) = ops::linear(&scaled(up, adapter)?, &down, None, Activation::None, Some(w), false)?;
    Ok(plain::sum(&plain::unary(Unary::Square, &sum)?, &Dims::from(1))?)
}

/// The factors of all outputs: `m / norms`, and 1 where no pair adds anything.
fn gains(magnitudes: &Tensor, norms: &Tensor, adapter: &Adapter) -> Result<Tensor> {
    let mut parts = Vec::with_capacity(adapter.outputs.len());
    let mut first = 0;
    for AdapterOutputs { count, from } in adapter.outputs.iter() {
        let own = norms.narrow(first..first + count)?;
        first += count;
        let of_rows = match *from {
            Some((_, row)) => magnitudes.narrow(row..row + count)?,
            None => own.clone(),
        };
        parts.push(plain::binary(Binary::Div, &of_rows, &own)?);
    }
    Ok(plain::concat(&parts.iter().collect::<Vec<_>>(), 0)?)
}

impl Differentiable for Magnitude {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = cx.output_gradient(0) else { return Ok(()) };
        let (adapter, norms) = (&self.adapter, cx.saved(1)?);
        if let Some(target) = cx.gradient_target(1)? {
            let products = plain::binary(Binary::Mul, &dy, &cx.saved(0)?)?;
            let of_gains = plain::binary(Binary::Div, &plain::sum(&products, &Dims::from(0))?, &norms)?;
            let mut first = 0;
            for AdapterOutputs { count, from } in adapter.outputs.iter() {
                let own = of_gains.narrow(first..first + count)?;
                first += count;
                let Some((_, row)) = *from else { continue };
                ops::accumulate(&own, &mut target.tensor.narrow(row..row + count)?, target.overwrite)?;
            }
        }
        if cx.wants(0)? {
            let gains = gains(&cx.parameter(1)?.value, &norms, adapter)?;
            cx.add_gradient(0, plain::binary(Binary::Mul, &dy, &gains)?)?;
        }
        Ok(())
    }
}

/// The up projections as one matrix [n, members rank], times the scale: a row has its own values in
/// the columns of its pair, and zeros elsewhere.
fn scaled(up: &Tensor, adapter: &Adapter) -> Result<Tensor> {
    let scaled = match adapter.scale {
        1.0 => up.clone(),
        scale => plain::with_number(Binary::Mul, up, scale)?,
    };
    if let [AdapterOutputs { from: Some(_), .. }] = &*adapter.outputs {
        return Ok(scaled);
    }
    let mut stretches = Vec::with_capacity(adapter.outputs.len());
    for AdapterOutputs { count, from } in adapter.outputs.iter() {
        let zeros = |members: usize| {
            let shape = [*count, members * adapter.rank];
            up.device().zeros(shape, up.dtype(), Purpose::Activations)
        };
        let Some((member, row)) = *from else {
            stretches.push(zeros(adapter.members)?);
            continue;
        };
        let mut parts = Vec::new();
        if member > 0 {
            parts.push(zeros(member)?);
        }
        parts.push(scaled.narrow(row..row + count)?);
        if member + 1 < adapter.members {
            parts.push(zeros(adapter.members - member - 1)?);
        }
        stretches.push(plain::concat(&parts.iter().collect::<Vec<_>>(), 1)?);
    }
    Ok(plain::concat(&stretches.iter().collect::<Vec<_>>(), 0)?)
}

impl Differentiable for LowRank {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = cx.output_gradient(0) else { return Ok(()) };
        if self.residual {
            cx.add_gradient(3, dy.clone())?;
        }
        let adapter = &self.adapter;
        let (down, up) = (cx.parameter(1)?.value, cx.parameter(2)?.value);
        let wide = scaled(&up, adapter)?;
        if let Some(target) = cx.gradient_target(2)? {
            let narrow = cx.saved(1)?;
            let mut of_wide = dy.device().empty(*wide.shape(), DType::F32, Purpose::Activations)?;
            ops::linear_weight_gradient(&dy, &narrow, Some((&mut of_wide, true)), None)?;
            let mut first = 0;
            for AdapterOutputs { count, from } in adapter.outputs.iter() {
                let outputs = first..first + count;
                first = outputs.end;
                let Some((member, row)) = *from else { continue };
                let own = of_wide.narrow(outputs)?;
                let own = match adapter.members {
                    1 => own,
                    _ => plain::narrow(&own, 1, member * adapter.rank, adapter.rank)?,
                };
                let own = plain::with_number(Binary::Mul, &own, adapter.scale)?;
                ops::accumulate(&own, &mut target.tensor.narrow(row..row + count)?, target.overwrite)?;
            }
        }
        let narrow_gradient = ops::linear_input_gradient(&dy, &wide)?;
        if let Some(mut target) = cx.gradient_target(1)? {
            let x = cx.saved(0)?;
            ops::linear_weight_gradient(&narrow_gradient, &x, Some((&mut target.tensor, target.overwrite)), None)?;
        }
        if cx.wants(0)? {
            let before = cx.take_gradient(0);
            let down = plain::transpose(&down, 0, 1)?;
            let (dx, _) = ops::linear(&narrow_gradient, &down, None, Activation::None, before.as_ref(), false)?;
            cx.add_gradient(0, dx)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use trainyard_tensor::Device;
    use trainyard_tensor::cpu::Isa;

    #[test]
    fn rows_of_zeros_have_a_norm_to_divide_by() {
        let device = Device::cpu(Isa::detect(), 1, None);
        let id = |index| ParamId { unit: 0, index };
        let outputs = [AdapterOutputs { count: 2, from: Some((0, 0)) }].into();
        let (a, b, magnitude) = (id(1), id(2), Some(id(3)));
        let adapter = Adapter { a, b, magnitude, rank: 1, members: 1, outputs, scale: 2.0 };
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let matrix = |shape: [usize; 2], values: &[f32]| {
                let plain = device.tensor(shape, values, Purpose::Params).unwrap();
                let mut cast = device.empty(shape, dtype, Purpose::Params).unwrap();
                ops::cast_into(&plain, &mut cast).unwrap();
                cast
            };
            let (w, down) = (matrix([2, 2], &[0.0, 0.0, 3.0, 4.0]), matrix([1, 2], &[1.0, 1.0]));
            let norms = row_norms(&w, &down, &matrix([2, 1], &[0.0; 2]), &adapter).unwrap();
            let [zero, five] = norms.to_f32_vec().unwrap()[..] else { panic!("two rows") };
            assert!(zero > 0.0 && zero < 1e-6 && five == 5.0, "{dtype}: {zero} {five}");
            let gains = gains(&norms, &norms, &adapter).unwrap();
            assert_eq!(gains.to_f32_vec().unwrap(), [1.0, 1.0], "{dtype}");
            // With b the row is that of 2 b a.
            let norms = row_norms(&w, &down, &matrix([2, 1], &[1.0, 0.0]), &adapter).unwrap().to_f32_vec().unwrap();
            assert!((norms[0] - 8f32.sqrt()).abs() < 0.02, "{dtype}: {norms:?}");
            // Squares of two columns, one on each of two ranks, add up.
            let [left, right] = [([0.0, 3.0], 1.0), ([0.0, 4.0], 1.0)].map(|(column, down)| {
                let (w, down) = (matrix([2, 1], &column), matrix([1, 1], &[down]));
                row_squares(&w, &down, &matrix([2, 1], &[1.0, 0.0]), &adapter).unwrap()
            });
            let sum = plain::binary(Binary::Add, &left, &right).unwrap();
            let summed = norms_of_squares(&sum, dtype).unwrap();
            assert!(summed.dtype() == dtype && summed.to_f32_vec().unwrap() == norms, "{dtype}: {norms:?}");
        }
    }
}
