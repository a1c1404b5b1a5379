//! Products of the experts of a mixture, each on its own group of rows, beside dense products of as
//! many operations.

use super::products::{DY, W, X, check_elements, rounded};
use super::{Result, Sizes, Timing, time, tolerance};
use crate::cpu::gemm::Activation;
use crate::cuda::peak::{Peaks, random};
use crate::ops::experts::{Groups, ragged_input_gradient, ragged_linear, ragged_weight_gradient};
use crate::{DType, Device, Purpose, ops};

/// The first row of each of `experts` groups of `rows` rows, and the end of the last: loads from
/// 0.4 to 1.6 times the mean.
fn bounds(rows: usize, experts: usize) -> Vec<i32> {
    let load = |expert: usize| 0.4 + 1.2 * ((expert * 7919) % experts) as f64 / (experts - 1).max(1) as f64;
    let all: f64 = (0..experts).map(load).sum();
    let mut sum = 0.0;
    let mut bounds = vec![0];
    for expert in 0..experts {
        sum += load(expert);
        bounds.push((rows as f64 * sum / all).round() as i32);
    }
    bounds
}

/// Times the three products of the experts of every mixture in `dtype`, and the dense ones beside
/// them, each for about `seconds`.
///
/// # Errors
/// A product that is wrong, and those of the device.
pub fn experts(device: &Device, peaks: &Peaks, sizes: &Sizes, dtype: DType, seconds: f64) -> Result<Vec<Timing>> {
    let mut timings = Vec::new();
    for &[rows, experts, inputs, outputs] in &sizes.experts {
        let x = random(device, &[rows, inputs], dtype, X)?;
        let w = random(device, &[experts * outputs, inputs], dtype, W)?;
        let dy = random(device, &[rows, outputs], dtype, DY)?;
        let mut dw = device.zeros([experts * outputs, inputs], DType::F32, Purpose::Workspace)?;
        let bounds = bounds(rows, experts);
        let of_row: Vec<usize> =
            (0..rows).map(|row| bounds[1..].iter().take_while(|end| **end <= row as i32).count()).collect();
        let groups = Groups::of_one_source(&device.tensor([experts + 1], &bounds, Purpose::Data)?);
        let mut timed = |form: &'static str, experts: usize, seconds: f64| {
            let timing = Timing {
                name: format!("{rows} x {inputs} to {outputs}, {experts} experts, {form}, {}", dtype.name()),
                kind: "experts",
                form,
                dtype,
                sizes: vec![("rows", rows), ("experts", experts), ("inputs", inputs), ("outputs", outputs)],
                flops: 2.0 * (rows * inputs * outputs) as f64,
                bytes: (dtype.size() * (rows * (inputs + outputs) + experts * inputs * outputs)) as f64,
                seconds,
                peak_share: 0.0,
            };
            timings.push(timing.of_products(peaks));
        };
        let (at, off) = (|seed, place| rounded(dtype, seed, place), tolerance(dtype));
        let what = |form: &str| format!("the {form} of {experts} experts, {rows} x {inputs} to {outputs} in {dtype}");

        let y = ragged_linear(&x, &w, &groups)?;
        check_elements(&y, &what("forward"), off, inputs, |row, column, k| {
            at(X, row * inputs + k) * at(W, (of_row[row] * outputs + column) * inputs + k)
        })?;
        drop(y);
        timed("forward", experts, time(device, seconds, || ragged_linear(&x, &w, &groups).map(drop))?);
        // The first expert's weights for all rows.
        let one = w.narrow(0..outputs)?;
        let dense = || ops::linear(&x, &one, None, Activation::None, None, false).map(drop);
        timed("forward", 1, time(device, seconds, dense)?);

        let dx = ragged_input_gradient(&dy, &w, &groups)?;
        check_elements(&dx, &what("input gradient"), off, outputs, |row, column, k| {
            at(DY, row * outputs + k) * at(W, (of_row[row] * outputs + k) * inputs + column)
        })?;
        drop(dx);
        timed("input-gradient", experts, time(device, seconds, || ragged_input_gradient(&dy, &w, &groups).map(drop))?);
        let dense = || ops::linear_input_gradient(&dy, &one).map(drop);
        timed("input-gradient", 1, time(device, seconds, dense)?);

        ragged_weight_gradient(&dy, &x, &groups, (&mut dw, true))?;
        check_elements(&dw, &what("weight gradient"), off, rows, |row, column, k| match of_row[k] == row / outputs {
            true => at(DY, k * outputs + row % outputs) * at(X, k * inputs + column),
            false => 0.0,
        })?;
        let took = time(device, seconds, || ragged_weight_gradient(&dy, &x, &groups, (&mut dw, true)))?;
        timed("weight-gradient", experts, took);
        let mut one = dw.narrow(0..outputs)?;
        let dense = || ops::linear_weight_gradient(&dy, &x, Some((&mut one, true)), None);
        timed("weight-gradient", 1, time(device, seconds, dense)?);
    }
    Ok(timings)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loads_differ_and_all_rows_have_an_expert() {
        for (rows, experts) in [(16, 1), (1000, 8), (4096, 128)] {
            let bounds = bounds(rows, experts);
            assert!(bounds.len() == experts + 1 && bounds[experts] == rows as i32 && bounds.is_sorted());
            let loads: Vec<i32> = bounds.windows(2).map(|pair| pair[1] - pair[0]).collect();
            let (least, most) = (loads.iter().min().unwrap(), loads.iter().max().unwrap());
            assert!(experts == 1 || most > &(3 * least), "{loads:?}");
        }
    }
}
