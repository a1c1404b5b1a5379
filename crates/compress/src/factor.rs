//! The Cholesky factor of an inverse, which GPTQ and SparseGPT take their steps from.

use crate::{CompressError, Result};
use std::thread;

/// The share of the mean of the diagonal that is added to it (Frantar et al. 2023, section 3.3).
pub const DAMPING: f64 = 0.01;

/// The upper triangular R, [k, k] row-major, with `RᵀR = (H + λ I)⁻¹`. H are the `products` of
/// a layer's inputs, and λ is [`DAMPING`] times the mean of its diagonal. An input that is always
/// 0 counts as 1 by itself.
///
/// With U upper triangular and `U Uᵀ = H`, R is the inverse of U: one factorisation from the last
/// column to the first, and one inversion of a triangle, k³/3 multiplications in f64.
///
/// # Errors
/// Products that are not positive definite, for example because they are not finite.
pub fn inverse_factor(layer: &str, products: &[f32], columns: usize, threads: usize) -> Result<Vec<f32>> {
    let k = columns;
    let mut u: Vec<f64> = products.iter().map(|x| f64::from(*x)).collect();
    let mean = (0..k).map(|i| u[i * k + i]).sum::<f64>() / k as f64;
    for i in 0..k {
        let pivot = &mut u[i * k + i];
        if *pivot == 0.0 {
            *pivot = 1.0;
        }
        *pivot += DAMPING * mean;
    }
    factor(layer, &mut u, k)?;
    let mut inverse = vec![0.0; k * k];
    // Column j of the inverse takes about j² steps: columns are dealt out in turn.
    let mut shares: Vec<Vec<(usize, &mut [f64])>> = (0..threads.max(1)).map(|_| Vec::new()).collect();
    for (j, column) in inverse.chunks_exact_mut(k).enumerate() {
        let hand = j % shares.len();
        shares[hand].push((j, column));
    }
    thread::scope(|scope| {
        for share in shares {
            let u = &u;
            scope.spawn(move || share.into_iter().for_each(|(j, column)| invert_column(u, k, j, column)));
        }
    });
    let mut rows = vec![0.0; k * k];
    for (j, column) in inverse.chunks_exact(k).enumerate() {
        (0..=j).for_each(|i| rows[i * k + j] = column[i] as f32);
    }
    Ok(rows)
}

/// Replaces the upper triangle of H by U.
fn factor(layer: &str, h: &mut [f64], k: usize) -> Result<()> {
    for j in (0..k).rev() {
        let (above, from) = h.split_at_mut(j * k);
        let row = &mut from[..k];
        let value = row[j] - dot(&row[j + 1..], &row[j + 1..]);
        if !(value > 0.0 && value.is_finite()) {
            let fix = "give more calibration text, or look for weights that are not finite";
            return Err(CompressError::NotPositive { layer: layer.into(), pivot: j, value, fix });
        }
        let pivot = value.sqrt();
        row[j] = pivot;
        for other in above.chunks_exact_mut(k) {
            other[j] = (other[j] - dot(&other[j + 1..], &row[j + 1..])) / pivot;
        }
    }
    Ok(())
}

/// Column `j` of the inverse of U.
fn invert_column(u: &[f64], k: usize, j: usize, column: &mut [f64]) {
    column[j] = 1.0 / u[j * k + j];
    for i in (0..j).rev() {
        let row = &u[i * k..][..k];
        column[i] = -dot(&row[i + 1..=j], &column[i + 1..=j]) / row[i];
    }
}

/// A scalar product in eight chains.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut sums = [0.0; 8];
    let (a, b) = (a.chunks_exact(8), b.chunks_exact(8));
    let rest: f64 = a.remainder().iter().zip(b.remainder()).map(|(x, y)| x * y).sum();
    for (x, y) in a.zip(b) {
        (0..8).for_each(|lane| sums[lane] += x[lane] * y[lane]);
    }
    sums.iter().sum::<f64>() + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    /// X^T X of numbers without a pattern.
    fn products(k: usize) -> Vec<f32> {
        let x: Vec<f32> = (0..3 * k * k).map(|i| ((i * i * 31 + i * 7) % 101) as f32 / 50.0 - 1.0).collect();
        let at = |i: usize, j: usize| x.chunks_exact(k).map(|row| row[i] * row[j]).sum();
        (0..k * k).map(|place| at(place / k, place % k)).collect()
    }

    #[test]
    fn the_factor_times_itself_is_the_inverse() {
        for k in [1, 2, 9, 33] {
            let h = products(k);
            let mean = (0..k).map(|i| f64::from(h[i * k + i])).sum::<f64>() / k as f64;
            let r = inverse_factor("x", &h, k, 2).unwrap();
            assert_eq!(r, inverse_factor("x", &h, k, 5).unwrap());
            for i in 0..k {
                assert!(r[i * k..i * k + i].iter().all(|x| *x == 0.0));
                for j in 0..k {
                    // (RᵀR) (H + λI) is the identity.
                    let inverse = |p: usize| (0..k).map(|q| f64::from(r[q * k + i]) * f64::from(r[q * k + p])).sum();
                    let sum: f64 = (0..k)
                        .map(|p| {
                            let inverse: f64 = inverse(p);
                            inverse * (f64::from(h[p * k + j]) + if p == j { DAMPING * mean } else { 0.0 })
                        })
                        .sum();
                    assert!((sum - f64::from(u8::from(i == j))).abs() < 1e-4, "{k}: {i} {j} {sum}");
                }
            }
        }
    }

    #[test]
    fn products_that_are_none_are_refused() {
        let error = inverse_factor("block.0.up", &[f32::NAN, 0.0, 0.0, 1.0], 2, 1).unwrap_err().to_string();
        assert!(error.contains("block.0.up") && error.contains("calibration"), "{error}");
        inverse_factor("x", &[0.0, 0.0, 0.0, 1.0], 2, 1).unwrap();
    }
}
