//! Elementwise arithmetic with broadcasting.

use super::{arrange, broadcast_shape, groups};
use crate::cpu::dropout::{self, DropRate};
use crate::cpu::elementwise::{self as kernels, Binary, Operand, Unary};
use crate::cpu::philox::RandomKey;
use crate::cpu::plain::{derivative, mask};
use crate::dtype::Element;
use crate::error::Result;
use crate::ops::{same_dtype, same_form};
use crate::{Cost, DType, On, Purpose, Shape, Tensor, TensorError, by_float, cuda, ensure_shape};

/// FLOPs of one element.
const fn unary_flops(f: Unary) -> usize {
    match f {
        Unary::Neg | Unary::Abs | Unary::Sign | Unary::Square | Unary::Sqrt | Unary::Reciprocal => 1,
        Unary::Rsqrt => 2,
        Unary::Exp | Unary::Ln | Unary::Tanh | Unary::Sigmoid => 8,
        Unary::Erf => 16,
    }
}

const fn binary_flops(f: Binary) -> usize {
    if matches!(f, Binary::Pow) { 16 } else { 1 }
}

/// `f` of each element.
pub fn unary(f: Unary, x: &Tensor) -> Result<Tensor> {
    const OP: &str = "unary";
    let mut y = x.empty_like(*x.shape(), x.dtype())?;
    by_float!(OP, x.dtype(), T => x.device().launch_on(OP, Cost::streaming(unary_flops(f), &[x, x]), |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::plain::unary(gpu, f, x, &y),
        };
        kernels::unary(cpu, f, x.get::<T>(), y.get_mut::<T>());
        Ok(())
    })?);
    Ok(y)
}

/// `dy f'`; `z` is the argument, or the result where [`derivative::needs`] says so.
pub fn unary_backward(f: Unary, dy: &Tensor, z: &Tensor) -> Result<Tensor> {
    const OP: &str = "unary_backward";
    same_form(OP, dy, z)?;
    let mut dx = dy.empty_like(*dy.shape(), dy.dtype())?;
    by_float!(OP, dy.dtype(), T => dy.device().launch_on(OP, Cost::streaming(4, &[dy, z, dy]), |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::plain::unary_backward(gpu, f, dy, z, &dx),
        };
        derivative::unary_backward(cpu, f, dy.get::<T>(), z.get::<T>(), dx.get_mut::<T>());
        Ok(())
    })?);
    Ok(dx)
}

/// The form of an operand in a `[rows, columns]` result.
#[derive(Clone, Copy)]
enum Form {
    Full,
    Row,
    Column,
    Scalar,
}

impl Form {
    /// The operand as the kernels of GPUs take it.
    fn on_cuda(self, x: &Tensor) -> (Option<&Tensor>, i32) {
        let form = match self {
            Form::Full => 0,
            Form::Row => 1,
            Form::Column => 2,
            Form::Scalar => 3,
        };
        (Some(x), form)
    }

    fn operand<'a, T: Element>(self, x: &'a Tensor) -> Operand<'a, T> {
        match self {
            Form::Full => Operand::Full(x.get::<T>()),
            Form::Row => Operand::Row(x.get::<T>()),
            Form::Column => Operand::Column(x.get::<T>()),
            Form::Scalar => Operand::Scalar(x.get::<T>()[0].to_f32()),
        }
    }
}

/// Two operands brought to forms that the kernels take: as they are where the result can be seen as
/// rows and columns, expanded where broadcasting alternates more often.
struct Pair {
    shape: Shape,
    rows_columns: [usize; 2],
    tensors: [Tensor; 2],
    forms: [Form; 2],
}

fn pair(op: &'static str, a: &Tensor, b: &Tensor) -> Result<Pair> {
    same_dtype(op, a, b)?;
    let shape = broadcast_shape(op, &[a.shape(), b.shape()])?;
    let groups = groups(&shape, [a.shape(), b.shape()]);
    let form = |i: usize| match groups[..] {
        [] => Form::Full,
        [(_, has)] => {
            if has[i] {
                Form::Full
            } else {
                Form::Scalar
            }
        }
        [(_, rows), (_, columns)] => match (rows[i], columns[i]) {
            (true, true) => Form::Full,
            (false, true) => Form::Row,
            (true, false) => Form::Column,
            (false, false) => Form::Scalar,
        },
        _ if [a, b][i].elements() == 1 => Form::Scalar,
        _ => Form::Full,
    };
    let forms = [form(0), form(1)];
    let rows_columns = match groups[..] {
        [(rows, _), (columns, _)] => [rows, columns],
        _ => [1, shape.elements()],
    };
    let tensor = |x: &Tensor, form| match form {
        Form::Full => arrange::expanded(op, x, &shape, Purpose::Workspace),
        _ => Ok(x.clone()),
    };
    Ok(Pair { shape, rows_columns, tensors: [tensor(a, forms[0])?, tensor(b, forms[1])?], forms })
}

/// `f` of the two, broadcast together.
pub fn binary(f: Binary, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    const OP: &str = "binary";
    let Pair { shape, rows_columns, tensors: [a, b], forms } = pair(OP, a, b)?;
    let mut y = a.empty_like(shape, a.dtype())?;
    if shape.elements() == 0 {
        return Ok(y);
    }
    let cost = Cost::new(binary_flops(f) * y.elements(), a.bytes() + b.bytes() + y.bytes());
    by_float!(OP, a.dtype(), T => a.device().launch_on(OP, cost, |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => {
                let operands = [forms[0].on_cuda(&a), forms[1].on_cuda(&b)];
                return cuda::plain::binary(gpu, f, rows_columns, operands, 0.0, &y);
            }
        };
        let (a, b) = (forms[0].operand::<T>(&a), forms[1].operand::<T>(&b));
        kernels::binary(cpu, f, rows_columns, a, b, y.get_mut::<T>());
        Ok(())
    })?);
    Ok(y)
}

/// The gradients of a and b where wanted, each of its operand's shape: sums over what was
/// broadcast, in a fixed order.
pub fn binary_backward(
    f: Binary,
    dy: &Tensor,
    a: &Tensor,
    b: &Tensor,
    wanted: [bool; 2],
) -> Result<[Option<Tensor>; 2]> {
    const OP: &str = "binary_backward";
    let targets = [*a.shape(), *b.shape()];
    let Pair { shape, rows_columns, tensors: [a, b], forms } = pair(OP, a, b)?;
    same_dtype(OP, dy, &a)?;
    ensure_shape!(*dy.shape() == shape, OP, "a gradient {} of a result of {shape}", dy.shape());
    let mut gradients = [None, None];
    for (gradient, wanted) in gradients.iter_mut().zip(wanted) {
        *gradient = wanted.then(|| dy.empty_like(shape, dy.dtype())).transpose()?;
    }
    let [mut da, mut db] = gradients;
    let count = wanted.iter().filter(|wanted| **wanted).count();
    let cost = Cost::new(2 * binary_flops(f) * count * dy.elements(), a.bytes() + b.bytes() + (1 + count) * dy.bytes());
    if dy.elements() > 0 {
        by_float!(OP, dy.dtype(), T => dy.device().launch_on(OP, cost, |on| {
            let cpu = match on {
                On::Cpu(cpu) => cpu,
                On::Cuda(gpu) => {
                    let (operands, gradients) = ([forms[0].on_cuda(&a), forms[1].on_cuda(&b)], [da.as_ref(), db.as_ref()]);
                    return cuda::plain::binary_backward(gpu, f, rows_columns, dy, operands, gradients);
                }
            };
            let operands = [forms[0].operand::<T>(&a), forms[1].operand::<T>(&b)];
            let (da, db) = (da.as_mut().map(|t| t.get_mut::<T>()), db.as_mut().map(|t| t.get_mut::<T>()));
            derivative::binary_backward(cpu, f, rows_columns, dy.get::<T>(), operands, da, db);
            Ok(())
        })?);
    }
    let to = |gradient: Option<Tensor>, shape: &Shape| gradient.map(|g| arrange::sum_to(g, shape)).transpose();
    Ok([to(da, &targets[0])?, to(db, &targets[1])?])
}

/// `f(x, number)`, the number in f32 whatever the dtype.
pub fn with_number(f: Binary, x: &Tensor, number: f32) -> Result<Tensor> {
    const OP: &str = "with_number";
    let mut y = x.empty_like(*x.shape(), x.dtype())?;
    let shape = [1, x.elements()];
    by_float!(OP, x.dtype(), T => x.device().launch_on(OP, Cost::streaming(binary_flops(f), &[x, x]), |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::plain::binary(gpu, f, shape, [(Some(x), 0), (None, cuda::plain::NUMBER)], number, &y),
        };
        kernels::binary(cpu, f, shape, Operand::Full(x.get::<T>()), Operand::Scalar(number), y.get_mut::<T>());
        Ok(())
    })?);
    Ok(y)
}

/// `x^p`; NaN where `x` is negative and `p` no whole number.
pub fn power(x: &Tensor, p: f32) -> Result<Tensor> {
    // What models use has forms that are ten times faster than the general power.
    match p {
        2.0 => unary(Unary::Square, x),
        0.5 => unary(Unary::Sqrt, x),
        -0.5 => unary(Unary::Rsqrt, x),
        -1.0 => unary(Unary::Reciprocal, x),
        _ => with_number(Binary::Pow, x, p),
    }
}

/// `dy p x^(p - 1)`.
pub fn power_backward(p: f32, dy: &Tensor, x: &Tensor) -> Result<Tensor> {
    const OP: &str = "power_backward";
    same_form(OP, dy, x)?;
    let mut dx = dy.empty_like(*dy.shape(), dy.dtype())?;
    by_float!(OP, dy.dtype(), T => dy.device().launch_on(OP, Cost::streaming(18, &[dy, x, dy]), |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::plain::power_backward(gpu, p, dy, x, &dx),
        };
        if p == 2.0 {
            derivative::unary_backward(cpu, Unary::Square, dy.get::<T>(), x.get::<T>(), dx.get_mut::<T>());
        } else {
            derivative::power_backward(cpu, p, dy.get::<T>(), x.get::<T>(), dx.get_mut::<T>());
        }
        Ok(())
    })?);
    Ok(dx)
}

/// `min(max(x, low), high)`; infinite ends do not bound.
pub fn clamp(x: &Tensor, low: f32, high: f32) -> Result<Tensor> {
    const OP: &str = "clamp";
    let ordered = low <= high;
    ensure_shape!(ordered, OP, "to nothing: from {low} to {high}");
    let mut y = x.empty_like(*x.shape(), x.dtype())?;
    by_float!(OP, x.dtype(), T => x.device().launch_on(OP, Cost::streaming(2, &[x, x]), |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::plain::clamp(gpu, x, [low, high], &y),
        };
        kernels::clamp(cpu, x.get::<T>(), low, high, y.get_mut::<T>());
        Ok(())
    })?);
    Ok(y)
}

/// `dy` where `low <= x <= high`, else 0.
pub fn clamp_backward(low: f32, high: f32, dy: &Tensor, x: &Tensor) -> Result<Tensor> {
    const OP: &str = "clamp_backward";
    same_form(OP, dy, x)?;
    let mut dx = dy.empty_like(*dy.shape(), dy.dtype())?;
    by_float!(OP, dy.dtype(), T => dy.device().launch_on(OP, Cost::streaming(2, &[dy, x, dy]), |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::plain::clamp_backward(gpu, dy, x, [low, high], &dx),
        };
        derivative::clamp_backward(cpu, low, high, dy.get::<T>(), x.get::<T>(), dx.get_mut::<T>());
        Ok(())
    })?);
    Ok(dx)
}

/// Integers (a mask, indices) as floats, rounded to nearest.
pub fn to_float(x: &Tensor, dtype: DType) -> Result<Tensor> {
    const OP: &str = "to_float";
    if x.dtype().is_float() {
        return Err(TensorError::DType { op: OP, expected: "i32 or u32", got: x.dtype() });
    }
    let mut y = x.empty_like(*x.shape(), dtype)?;
    let cost = Cost::streaming(0, &[x, &y]);
    by_float!(OP, dtype, T => x.device().launch_on(OP, cost, |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::plain::to_float(gpu, x, &y),
        };
        if x.dtype() == DType::U32 {
            mask::widen(cpu, x.data::<u32>()?, y.get_mut::<T>(), |x| x as f32);
        } else {
            mask::widen(cpu, x.data::<i32>()?, y.get_mut::<T>(), |x| x as f32);
        }
        Ok(())
    })?);
    Ok(y)
}

/// `residual + dropout(x)` in one pass; the mask is a function of the key and the element.
pub fn dropout_add(x: &Tensor, residual: &Tensor, probability: f32, key: RandomKey) -> Result<Tensor> {
    const OP: &str = "dropout_add";
    same_form(OP, x, residual)?;
    let rate = DropRate::new(probability)?;
    let mut y = x.empty_like(*x.shape(), x.dtype())?;
    by_float!(OP, x.dtype(), T => x.device().launch_on(OP, Cost::streaming(2, &[x, residual, x]), |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::dropout(gpu, key, 0, rate, x, Some(residual), &y),
        };
        dropout::dropout_add(cpu, key, 0, rate, x.get::<T>(), residual.get::<T>(), y.get_mut::<T>());
        Ok(())
    })?);
    Ok(y)
}
