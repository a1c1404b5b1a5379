//! Products in the three forms of training.

use super::{Result, Sizes, Timing, near, places, time, tolerance};
use crate::cpu::gemm::Activation;
use crate::cuda::peak::{Peaks, random, random_value};
use crate::{DType, Device, Purpose, Tensor, bf16, f16, ops};

/// Seeds of the operands.
pub(super) const X: u64 = 1;
pub(super) const W: u64 = 2;
pub(super) const DY: u64 = 3;
/// Elements of a result that are checked.
const CHECKED: usize = 48;

/// Times the three products of every layer in `dtype`, each for about `seconds`.
///
/// # Errors
/// A product that is wrong, and those of the device.
pub fn products(device: &Device, peaks: &Peaks, sizes: &Sizes, dtype: DType, seconds: f64) -> Result<Vec<Timing>> {
    let mut timings = Vec::new();
    for &[tokens, inputs, outputs] in &sizes.layers {
        let x = random(device, &[tokens, inputs], dtype, X)?;
        let w = random(device, &[outputs, inputs], dtype, W)?;
        let dy = random(device, &[tokens, outputs], dtype, DY)?;
        let mut dw = device.zeros([outputs, inputs], DType::F32, Purpose::Workspace)?;
        let layer = [tokens, inputs, outputs];
        let timed = |form: &'static str, seconds: f64| Timing {
            name: format!("{tokens} x {inputs} to {outputs}, {form}, {}", dtype.name()),
            kind: "product",
            form,
            dtype,
            sizes: vec![("tokens", tokens), ("inputs", inputs), ("outputs", outputs)],
            flops: 2.0 * (tokens * inputs * outputs) as f64,
            bytes: (dtype.size() * (tokens * (inputs + outputs) + inputs * outputs)) as f64,
            seconds,
            peak_share: 0.0,
        };

        let (y, _) = ops::linear(&x, &w, None, Activation::None, None, false)?;
        check(&y, dtype, "forward", layer, |row, column, k| (X, row * inputs + k, W, column * inputs + k), inputs)?;
        let forward = time(device, seconds, || ops::linear(&x, &w, None, Activation::None, None, false).map(drop))?;
        drop(y);
        timings.push(timed("forward", forward).of_products(peaks));

        let dx = ops::linear_input_gradient(&dy, &w)?;
        check(
            &dx,
            dtype,
            "input-gradient",
            layer,
            |row, column, k| (DY, row * outputs + k, W, k * inputs + column),
            outputs,
        )?;
        let input = time(device, seconds, || ops::linear_input_gradient(&dy, &w).map(drop))?;
        drop(dx);
        timings.push(timed("input-gradient", input).of_products(peaks));

        let mut gradient = || ops::linear_weight_gradient(&dy, &x, Some((&mut dw, true)), None);
        gradient()?;
        let weight = time(device, seconds, &mut gradient)?;
        check(
            &dw,
            dtype,
            "weight-gradient",
            layer,
            |row, column, k| (DY, k * outputs + row, X, k * inputs + column),
            tokens,
        )?;
        timings.push(timed("weight-gradient", weight).of_products(peaks));
    }
    Ok(timings)
}

/// Compares sampled elements with sums in f64; `factors` says which numbers of which seeds are
/// multiplied for element (row, column) at k.
fn check(
    result: &Tensor,
    dtype: DType,
    form: &str,
    layer: [usize; 3],
    factors: impl Fn(usize, usize, usize) -> (u64, usize, u64, usize),
    depth: usize,
) -> Result<()> {
    let term = |row, column, k| {
        let (a, i, b, j) = factors(row, column, k);
        rounded(dtype, a, i) * rounded(dtype, b, j)
    };
    check_elements(result, &format!("the {form} product of {layer:?} in {dtype}"), tolerance(dtype), depth, term)
}

/// Element `at` of the random numbers of `seed`, as a tensor of `dtype` has it.
pub(super) fn rounded(dtype: DType, seed: u64, at: usize) -> f64 {
    let value = random_value(seed, at);
    f64::from(match dtype {
        DType::BF16 => bf16::from_f32(value).to_f32(),
        DType::F16 => f16::from_f32(value).to_f32(),
        _ => value,
    })
}

/// Compares sampled elements with sums in f64; `term` is what element (row, column) adds at k,
/// below `depth`.
pub(super) fn check_elements(
    result: &Tensor,
    what: &str,
    tolerance: f64,
    depth: usize,
    term: impl Fn(usize, usize, usize) -> f64,
) -> Result<()> {
    let (columns, found) = (result.last_dim(), result.to_f32_vec()?);
    let checked = places(found.len(), CHECKED);
    let wanted = checked.iter().map(|at| (0..depth).map(|k| term(at / columns, at % columns, k)).sum::<f64>());
    let (wanted, found): (Vec<f64>, Vec<f64>) =
        (wanted.collect(), checked.iter().map(|at| f64::from(found[*at])).collect());
    near(|| what.to_owned(), &found, &wanted, tolerance)
}
