//! Rounding to eight bits by looking at every number there is.

use trainyard_cuda::fp8::Fp8;

/// The number of `format` nearest to `x`; of two that are as near the one with the even code;
/// beyond the largest that one. NaN stays NaN.
pub fn nearest(format: Fp8, x: f64) -> f64 {
    if x.is_nan() {
        return x;
    }
    let off = |code: &u8| (f64::from(format.decode(*code)) - x.abs()).abs();
    let finite = (0..0x80).filter(|code| format.decode(*code).is_finite());
    let code = finite.min_by(|a, b| off(a).total_cmp(&off(b)).then((a % 2).cmp(&(b % 2)))).expect("zero is finite");
    f64::from(format.decode(code)).copysign(x)
}

/// The largest magnitude of `x`, NaN where one is.
pub fn amax(x: &[f64]) -> f64 {
    x.iter().fold(0.0, |most: f64, x| if most.is_nan() || x.is_nan() { f64::NAN } else { most.max(x.abs()) })
}
