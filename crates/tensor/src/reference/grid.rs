//! Rounding to the grid of quantised weights by looking at every code there is.

use half::{bf16, f16};

/// `x` rounded to the storage with so many bits: 32, or 16 with `wide` exponents (bf16) or without.
fn stored(bits: u32, wide: bool, x: f32) -> f32 {
    match (bits, wide) {
        (16, true) => bf16::from_f32(x).to_f32(),
        (16, false) => f16::from_f32(x).to_f32(),
        _ => x,
    }
}

/// The values of one group of weights. The quotient of a weight and the scale is rounded to f32, as
/// the published programs compute it; of two codes that are as near, the even one is taken.
/// `storage`: bits, and true for bf16, of scales and values.
pub fn group(bits: u32, (storage, wide): (u32, bool), weights: &[f32]) -> Vec<f32> {
    let most = weights.iter().map(|w| w.abs()).max_by(f32::total_cmp).unwrap_or(0.0);
    let codes = -(1i32 << (bits - 1))..(1 << (bits - 1));
    let scale = stored(storage, wide, most / ((codes.len() - 1) as f32 / 2.0));
    let value = |w: &f32| {
        let off = |code: &i32| (f64::from(w / scale) - f64::from(*code)).abs();
        let parity = |code: &i32| code.rem_euclid(2);
        let nearest = codes.clone().min_by(|a, b| off(a).total_cmp(&off(b)).then(parity(a).cmp(&parity(b))));
        let code = if scale == 0.0 { 0 } else { nearest.expect("there are codes") };
        stored(storage, wide, code as f32 * scale)
    };
    weights.iter().map(value).collect()
}
