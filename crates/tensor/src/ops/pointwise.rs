//! Elementwise operations that model families use.

use super::{form, plain, same_dtype, same_form};
use crate::cpu::activation::{self, Activation as Curve};
use crate::cpu::gemm::Activation;
use crate::cpu::philox::RandomKey;
use crate::cpu::{cast as casts, dropout as dropouts, elementwise};
use crate::error::{Result, TensorError};
use crate::{Cost, DType, On, Tensor, Work, by_float, cuda, ensure_shape};
use std::ops::Range;

/// A kernel that goes over the elements of `x` and moves `tensors` once.
fn elements_of(x: &Tensor, flops_per_element: usize, tensors: &[&Tensor]) -> Work {
    Cost::streaming(flops_per_element, tensors).on(x.dtype(), [x.elements()])
}

/// The same tensor if nobody else holds it, else a copy.
pub(super) fn into_unique(x: Tensor) -> Result<Tensor> {
    if x.is_unique() { Ok(x) } else { copy(&x) }
}

fn copy(x: &Tensor) -> Result<Tensor> {
    let mut y = x.empty_like(*x.shape(), x.dtype())?;
    x.device().launch_on("copy", elements_of(x, 0, &[x, x]), |_| y.copy_from(x))?;
    Ok(y)
}

/// `a + b`, broadcast together.
pub fn add(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    const OP: &str = "add";
    if a.shape() != b.shape() {
        return plain::binary(elementwise::Binary::Add, a, b);
    }
    same_form(OP, a, b)?;
    let mut y = a.empty_like(*a.shape(), a.dtype())?;
    let shape = [1, a.elements()];
    by_float!(OP, a.dtype(), T => a.device().launch_on(OP, elements_of(a, 1, &[a, b, a]), |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::add(gpu, a, b, &y),
        };
        let (a, b) = (elementwise::Operand::Full(a.get::<T>()), elementwise::Operand::Full(b.get::<T>()));
        elementwise::binary(cpu, elementwise::Binary::Add, shape, a, b, y.get_mut::<T>());
        Ok(())
    })?);
    Ok(y)
}

/// `a + b`, written over `a` when nobody else holds it.
pub fn add_into(mut a: Tensor, b: &Tensor) -> Result<Tensor> {
    const OP: &str = "add_into";
    same_form(OP, &a, b)?;
    if !a.is_unique() {
        return add(&a, b);
    }
    let work = elements_of(b, 1, &[&a, b, b]);
    by_float!(OP, a.dtype(), T => b.device().launch_on(OP, work, |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::add(gpu, &a, b, &a),
        };
        elementwise::accumulate(cpu, b.get::<T>(), a.get_mut::<T>());
        Ok(())
    })?);
    Ok(a)
}

/// `target (+)= x`, widening to the target's f32.
pub fn accumulate(x: &Tensor, target: &mut Tensor, overwrite: bool) -> Result<()> {
    const OP: &str = "accumulate";
    ensure_shape!(
        target.dtype() == DType::F32 && target.elements() == x.elements(),
        OP,
        "{} into {} {}",
        x.shape(),
        target.dtype(),
        target.shape()
    );
    let work = elements_of(x, 1, &[target, x]).variant(if overwrite { "overwriting" } else { "" });
    by_float!(OP, x.dtype(), T => x.device().launch_on(OP, work, |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::accumulate(gpu, x, target, overwrite),
        };
        if overwrite {
            casts::cast(cpu, x.get::<T>(), target.get_mut::<f32>());
        } else {
            elementwise::accumulate(cpu, x.get::<T>(), target.get_mut::<f32>());
        }
        Ok(())
    })?);
    Ok(())
}

/// `x` in another float dtype, for activations.
pub fn cast(x: &Tensor, dtype: DType) -> Result<Tensor> {
    let mut y = x.empty_like(*x.shape(), dtype)?;
    cast_into(x, &mut y)?;
    Ok(y)
}

/// `x` rounded or widened into `y`.
pub fn cast_into(x: &Tensor, y: &mut Tensor) -> Result<()> {
    const OP: &str = "cast";
    ensure_shape!(x.elements() == y.elements(), OP, "{} into {}", x.shape(), y.shape());
    let work = elements_of(x, 0, &[x, y]).variant(y.dtype().name());
    let device = x.device().clone();
    by_float!(OP, x.dtype(), A => by_float!(OP, y.dtype(), B => device.launch_on(OP, work, |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::cast(gpu, x, y),
        };
        casts::cast(cpu, x.get::<A>(), y.get_mut::<B>());
        Ok(())
    })?));
    Ok(())
}

fn curve(activation: Activation) -> Option<Curve> {
    match activation {
        Activation::None => None,
        Activation::Relu => Some(Curve::Relu),
        Activation::ReluSquared => Some(Curve::ReluSquared),
        Activation::Silu => Some(Curve::Silu),
        Activation::GeluExact => Some(Curve::GeluExact),
        Activation::GeluTanh => Some(Curve::GeluTanh),
    }
}

/// The activation of each element.
pub fn activate(activation: Activation, x: &Tensor) -> Result<Tensor> {
    const OP: &str = "activate";
    let Some(curve) = curve(activation) else { return Ok(x.clone()) };
    let mut y = x.empty_like(*x.shape(), x.dtype())?;
    by_float!(OP, x.dtype(), T => x.device().launch_on(OP, elements_of(x, 8, &[x, x]).variant(form(activation)), |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::activate(gpu, activation, x, &y),
        };
        activation::activation(cpu, curve, x.get::<T>(), y.get_mut::<T>());
        Ok(())
    })?);
    Ok(y)
}

/// `dy * act'(x)`, given the activation's argument.
pub fn activation_backward(activation: Activation, x: &Tensor, dy: Tensor) -> Result<Tensor> {
    const OP: &str = "activation_backward";
    same_form(OP, x, &dy)?;
    let Some(curve) = curve(activation) else { return Ok(dy) };
    let mut dx = x.empty_like(*x.shape(), x.dtype())?;
    by_float!(OP, x.dtype(), T => x.device().launch_on(OP, elements_of(x, 10, &[x, &dy, x]).variant(form(activation)), |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::activation_backward(gpu, activation, &dy, x, &dx),
        };
        activation::activation_backward(cpu, curve, dy.get::<T>(), x.get::<T>(), dx.get_mut::<T>());
        Ok(())
    })?);
    Ok(dx)
}

/// `silu(gate) * up` of a fused [.., 2 f], gate first: [.., f].
pub fn swiglu(gate_up: &Tensor) -> Result<Tensor> {
    const OP: &str = "swiglu";
    ensure_shape!(gate_up.last_dim().is_multiple_of(2), OP, "{} has no two halves", gate_up.shape());
    let width = gate_up.last_dim() / 2;
    let mut y = gate_up.empty_like(gate_up.shape().with_last(width), gate_up.dtype())?;
    let work = Cost::new(6 * y.elements(), gate_up.bytes() + y.bytes()).on(y.dtype(), [y.elements()]);
    by_float!(OP, gate_up.dtype(), T => gate_up.device().launch_on(OP, work, |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::swiglu(gpu, gate_up, &y),
        };
        activation::glu(cpu, Curve::Silu, width, gate_up.get::<T>(), y.get_mut::<T>());
        Ok(())
    })?);
    Ok(y)
}

/// The gradient of gate and up.
pub fn swiglu_backward(gate_up: &Tensor, dy: &Tensor) -> Result<Tensor> {
    const OP: &str = "swiglu_backward";
    same_dtype(OP, gate_up, dy)?;
    let width = dy.last_dim();
    ensure_shape!(*gate_up.shape() == dy.shape().with_last(2 * width), OP, "{} and {}", gate_up.shape(), dy.shape());
    let mut dx = gate_up.empty_like(*gate_up.shape(), gate_up.dtype())?;
    let work = Cost::new(10 * dy.elements(), 2 * gate_up.bytes() + dy.bytes()).on(dy.dtype(), [dy.elements()]);
    by_float!(OP, dy.dtype(), T => dy.device().launch_on(OP, work, |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::swiglu_backward(gpu, dy, gate_up, &dx),
        };
        activation::glu_backward(cpu, Curve::Silu, width, dy.get::<T>(), gate_up.get::<T>(), dx.get_mut::<T>());
        Ok(())
    })?);
    Ok(dx)
}

/// `act(gate) * up` of a fused [.., 2 f], gate first: [.., f]. Of SiLU it is [`swiglu`].
pub fn glu(activation: Activation, gate_up: &Tensor) -> Result<Tensor> {
    const OP: &str = "glu";
    let curve = gate_curve(OP, activation)?;
    ensure_shape!(gate_up.last_dim().is_multiple_of(2), OP, "{} has no two halves", gate_up.shape());
    let width = gate_up.last_dim() / 2;
    let mut y = gate_up.empty_like(gate_up.shape().with_last(width), gate_up.dtype())?;
    let cost = Cost::new(9 * y.elements(), gate_up.bytes() + y.bytes());
    let work = cost.on(y.dtype(), [y.elements()]).variant(form(activation));
    by_float!(OP, gate_up.dtype(), T => gate_up.device().launch_on(OP, work, |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::glu(gpu, activation, gate_up, &y),
        };
        activation::glu(cpu, curve, width, gate_up.get::<T>(), y.get_mut::<T>());
        Ok(())
    })?);
    Ok(y)
}

/// The gradient of gate and up.
pub fn glu_backward(activation: Activation, gate_up: &Tensor, dy: &Tensor) -> Result<Tensor> {
    const OP: &str = "glu_backward";
    let curve = gate_curve(OP, activation)?;
    same_dtype(OP, gate_up, dy)?;
    let width = dy.last_dim();
    ensure_shape!(*gate_up.shape() == dy.shape().with_last(2 * width), OP, "{} and {}", gate_up.shape(), dy.shape());
    let mut dx = gate_up.empty_like(*gate_up.shape(), gate_up.dtype())?;
    let cost = Cost::new(13 * dy.elements(), 2 * gate_up.bytes() + dy.bytes());
    let work = cost.on(dy.dtype(), [dy.elements()]).variant(form(activation));
    by_float!(OP, dy.dtype(), T => dy.device().launch_on(OP, work, |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::glu_backward(gpu, activation, dy, gate_up, &dx),
        };
        activation::glu_backward(cpu, curve, width, dy.get::<T>(), gate_up.get::<T>(), dx.get_mut::<T>());
        Ok(())
    })?);
    Ok(dx)
}

fn gate_curve(op: &'static str, activation: Activation) -> Result<Curve> {
    let what = || format!("{activation:?} gates nothing");
    curve(activation).ok_or_else(|| TensorError::Shape { op, what: what() })
}

/// Each element zero with `probability`, else divided by the rest; the mask is a function of the
/// key and the element. Its own backward.
pub fn dropout(x: &Tensor, probability: f32, key: RandomKey) -> Result<Tensor> {
    dropout_from(x, probability, key, 0)
}

/// As [`dropout`], of a part of a tensor: `x` holds its elements `first ..`, and gets their masks.
pub fn dropout_from(x: &Tensor, probability: f32, key: RandomKey, first: usize) -> Result<Tensor> {
    dropout_of(x, probability, key, std::slice::from_ref(&(first..first + x.elements())))
}

/// As [`dropout`], of parts of a tensor: `x` holds its elements `parts`, one range after the other,
/// and gets their masks.
pub fn dropout_of(x: &Tensor, probability: f32, key: RandomKey, parts: &[Range<usize>]) -> Result<Tensor> {
    const OP: &str = "dropout";
    let elements: usize = parts.iter().map(Range::len).sum();
    ensure_shape!(elements == x.elements(), OP, "parts of {elements} elements for {}", x.shape());
    let rate = dropouts::DropRate::new(probability)?;
    let mut y = x.empty_like(*x.shape(), x.dtype())?;
    by_float!(OP, x.dtype(), T => x.device().launch_on(OP, elements_of(x, 1, &[x, x]), |on| {
        let mut at = 0;
        for part in parts {
            let here = at..at + part.len();
            at = here.end;
            match on {
                On::Cpu(cpu) => {
                    let (x, y) = (&x.get::<T>()[here.clone()], &mut y.get_mut::<T>()[here]);
                    dropouts::dropout(cpu, key, part.start as u64, rate, x, y);
                }
                On::Cuda(gpu) => {
                    let [x, y] = [x, &y].map(|all| all.view(here.start, [here.len()]));
                    cuda::dropout(gpu, key, part.start, rate, &x?, None, &y?)?;
                }
            }
        }
        Ok(())
    })?);
    Ok(y)
}
