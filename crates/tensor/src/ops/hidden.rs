//! The distance of a student's hidden states from a teacher's.

use super::{not_on_cuda, same_form};
use crate::cpu::threads::Shares;
use crate::dtype::Element;
use crate::error::Result;
use crate::{Cost, DType, On, Purpose, Tensor, by_float, ensure_shape};

/// Rows that one task compares.
const ROWS_OF_TASK: usize = 64;

fn check_hidden(op: &'static str, x: &Tensor, taught: &Tensor, targets: &Tensor) -> Result<()> {
    same_form(op, x, taught)?;
    ensure_shape!(targets.elements() == x.rows(), op, "{} targets for {}", targets.elements(), x.shape());
    Ok(())
}

/// `scale` times the sum over rows of the mean of `(x - taught)²`: a scalar in f32. x and the
/// teacher's hidden states `taught` are [m, d]; targets i32 [m], negative for rows that do not
/// count.
pub fn hidden_distance(x: &Tensor, taught: &Tensor, targets: &Tensor, scale: f32) -> Result<Tensor> {
    const OP: &str = "hidden_distance";
    check_hidden(OP, x, taught, targets)?;
    let mut loss = x.empty_like([], DType::F32)?;
    let (rows, width) = (x.rows(), x.last_dim());
    let mut of_rows = x.device().empty([rows], DType::F32, Purpose::Workspace)?;
    let cost = Cost::streaming(3, &[x, taught]);
    by_float!(OP, x.dtype(), T => x.device().launch_on(OP, cost, |on| {
        let On::Cpu(cpu) = on else { return Err(not_on_cuda(OP)) };
        let (x, taught, targets) = (x.get::<T>(), taught.get::<T>(), targets.get::<i32>());
        let sums = Shares::new(of_rows.get_mut::<f32>());
        cpu.threads.for_each(rows.div_ceil(ROWS_OF_TASK), |task| {
            let rows = task * ROWS_OF_TASK..rows.min((task + 1) * ROWS_OF_TASK);
            // SAFETY: a task has rows of its own.
            let sums = unsafe { sums.part(rows.clone()) };
            for (row, sum) in rows.zip(sums) {
                let of_row = row * width..(row + 1) * width;
                let pairs = x[of_row.clone()].iter().zip(&taught[of_row]);
                let squares = pairs.map(|(x, taught)| (x.to_f32() - taught.to_f32()).powi(2));
                *sum = if targets[row] < 0 { 0.0 } else { squares.sum::<f32>() / width as f32 };
            }
        });
        let sum: f64 = of_rows.get::<f32>().iter().map(|row| f64::from(*row)).sum();
        loss.get_mut::<f32>()[0] = (f64::from(scale) * sum) as f32;
        Ok(())
    })?);
    Ok(loss)
}

/// The gradient of x of [`hidden_distance`], for the gradient `dy` of its result.
pub fn hidden_distance_backward(
    dy: &Tensor,
    x: &Tensor,
    taught: &Tensor,
    targets: &Tensor,
    scale: f32,
) -> Result<Tensor> {
    const OP: &str = "hidden_distance_backward";
    check_hidden(OP, x, taught, targets)?;
    let mut dx = x.empty_like(*x.shape(), x.dtype())?;
    let (rows, width) = (x.rows(), x.last_dim());
    let cost = Cost::streaming(2, &[x, taught, &dx]);
    by_float!(OP, x.dtype(), T => x.device().launch_on(OP, cost, |on| {
        let On::Cpu(cpu) = on else { return Err(not_on_cuda(OP)) };
        let factor = 2.0 * scale * dy.get::<f32>()[0] / width as f32;
        let (x, taught, targets) = (x.get::<T>(), taught.get::<T>(), targets.get::<i32>());
        let all = Shares::new(dx.get_mut::<T>());
        cpu.threads.for_each(rows.div_ceil(ROWS_OF_TASK), |task| {
            let rows = task * ROWS_OF_TASK..rows.min((task + 1) * ROWS_OF_TASK);
            // SAFETY: a task has rows of its own.
            let dx = unsafe { all.part(rows.start * width..rows.end * width) };
            for (row, dx) in rows.zip(dx.chunks_exact_mut(width)) {
                let factor = if targets[row] < 0 { 0.0 } else { factor };
                let of_row = row * width..(row + 1) * width;
                for ((dx, x), taught) in dx.iter_mut().zip(&x[of_row.clone()]).zip(&taught[of_row]) {
                    *dx = T::from_f32(factor * (x.to_f32() - taught.to_f32()));
                }
            }
        });
        Ok(())
    })?);
    Ok(dx)
}
