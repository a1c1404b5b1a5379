//! The normal distribution, which the standard library lacks.

use std::f64::consts::{FRAC_1_SQRT_2, PI};

/// The density of the standard normal distribution.
pub fn density(x: f64) -> f64 {
    (-0.5 * x * x).exp() / (2.0 * PI).sqrt()
}

/// The logarithm of [`density`].
pub fn log_density(x: f64) -> f64 {
    -0.5 * x * x - 0.5 * (2.0 * PI).ln()
}

/// The cumulative distribution function.
pub fn cdf(x: f64) -> f64 {
    0.5 * erfc(-x * FRAC_1_SQRT_2)
}

/// The complementary error function. Relative error below 1e-13 where the result is above 1e-300.
pub fn erfc(x: f64) -> f64 {
    if x < 0.0 {
        return 2.0 - erfc(-x);
    }
    if x < 2.0 {
        // erf(x) = 2 / sqrt(pi) exp(-x^2) sum of 2^n x^(2n+1) / (2n+1)!!  (Abramowitz & Stegun
        // 7.1.6)
        let (mut term, mut sum, mut n) = (x, x, 0.0);
        while term > 1e-17 * sum {
            n += 1.0;
            term *= 2.0 * x * x / (2.0 * n + 1.0);
            sum += term;
        }
        return 1.0 - 2.0 / PI.sqrt() * (-x * x).exp() * sum;
    }
    // erfc(x) = exp(-x^2) / sqrt(pi) / (x + (1/2) / (x + 1 / (x + (3/2) / (x + ...))))  (7.1.14)
    let mut tail = x;
    for n in (1..=80).rev() {
        tail = x + 0.5 * f64::from(n) / tail;
    }
    (-x * x).exp() / PI.sqrt() / tail
}

/// As [`cdf`] with a relative error below 2e-7, several times as fast: `erfcc` of Press et al.,
/// "Numerical Recipes", section 6.2.
pub fn quick_cdf(x: f64) -> f64 {
    const TERMS: [f64; 10] = [
        0.170_872_77,
        -0.822_152_23,
        1.488_515_87,
        -1.135_203_98,
        0.278_868_07,
        -0.186_288_06,
        0.096_784_18,
        0.374_091_96,
        1.000_023_68,
        -1.265_512_23,
    ];
    let z = (x * FRAC_1_SQRT_2).abs();
    let t = 1.0 / (1.0 + 0.5 * z);
    let polynomial = TERMS.iter().fold(0.0, |sum, term| sum * t + term);
    let tail = 0.5 * t * (polynomial - z * z).exp();
    if x > 0.0 { 1.0 - tail } else { tail }
}

/// The quantile of `p`: the x with `cdf(x) = p`. Infinite at 0 and 1.
pub fn quantile(p: f64) -> f64 {
    if p <= 0.0 {
        return f64::NEG_INFINITY;
    }
    if p >= 1.0 {
        return f64::INFINITY;
    }
    if p > 0.5 {
        return -quantile(1.0 - p);
    }
    // A start with an error of 4.5e-4 (Abramowitz & Stegun 26.2.23), then Halley's method.
    let t = (-2.0 * p.ln()).sqrt();
    let over = 2.515_517 + t * (0.802_853 + t * 0.010_328);
    let under = 1.0 + t * (1.432_788 + t * (0.189_269 + t * 0.001_308));
    let mut x = over / under - t;
    for _ in 0..3 {
        let step = (cdf(x) - p) / density(x);
        x -= step / (1.0 + 0.5 * x * step);
    }
    x
}

/// The logarithm of the expected improvement `density(z) + z cdf(z)` of a standard normal value
/// over `-z`, exact where the value itself is zero in f64 (Ament et al. 2023, section 4).
pub fn log_improvement(z: f64) -> f64 {
    if z > -6.0 {
        return (density(z) + z * cdf(z)).ln();
    }
    // density(z) / z^2 (1 - 3 / z^2 + 15 / z^4 - 105 / z^6), from Mills' ratio.
    let s = 1.0 / (z * z);
    log_density(z) + s.ln() + (-3.0 * s + 15.0 * s * s - 105.0 * s * s * s).ln_1p()
}

/// The derivative of [`log_improvement`]: `cdf(z) / (density(z) + z cdf(z))`.
pub fn improvement_slope(z: f64) -> f64 {
    if z > -6.0 {
        return cdf(z) / (density(z) + z * cdf(z));
    }
    // Both series of Mills' ratio, divided by density(z) / z^2.
    let s = 1.0 / (z * z);
    -z * (1.0 - s + 3.0 * s * s - 15.0 * s * s * s) / (1.0 - 3.0 * s + 15.0 * s * s - 105.0 * s * s * s)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of mpmath 1.3 with 30 digits.
    #[test]
    fn the_error_function_is_that_of_tables() {
        for (x, want) in [
            (0.0, 1.0),
            (0.5, 0.479_500_122_186_953_5),
            (1.9, 0.007_209_570_764_742_524),
            (2.1, 0.002_979_466_656_333_449),
            (5.0, 1.537_459_794_428_035e-12),
            (-1.0, 1.842_700_792_949_715),
        ] {
            let got = erfc(x);
            assert!((got / want - 1.0).abs() < 1e-12, "{x}: {got} against {want}");
        }
    }

    #[test]
    fn the_quick_distribution_is_the_exact_one_to_seven_digits() {
        for i in -3000..=3000 {
            let x = f64::from(i) / 100.0;
            let (quick, exact) = (quick_cdf(x), cdf(x));
            assert!((quick / exact - 1.0).abs() < 2e-7, "{x}: {quick} against {exact}");
        }
    }

    #[test]
    fn quantiles_invert_the_distribution() {
        for p in [1e-300, 1e-15, 1e-4, 0.1, 0.5, 0.8, 0.999] {
            let back = cdf(quantile(p));
            assert!((back / p - 1.0).abs() < 1e-9, "{p}: {back}");
        }
        assert!((quantile(0.975) - 1.959_963_984_540_054).abs() < 1e-12);
        assert_eq!((quantile(0.0), quantile(1.0)), (f64::NEG_INFINITY, f64::INFINITY));
    }

    #[test]
    fn improvements_are_the_integral_and_meet_where_formulas_change() {
        for z in [-5.0, -1.0, 0.0, 2.0] {
            // The expectation of max(z + e, 0) over a normal e, by the midpoint rule.
            let n = 400_000;
            let e = |i: i32| -12.0 + 24.0 * (f64::from(i) + 0.5) / f64::from(n);
            let sum: f64 = (0..n).map(|i| (z + e(i)).max(0.0) * density(e(i))).sum();
            let want = (sum * 24.0 / f64::from(n)).ln();
            assert!((log_improvement(z) - want).abs() < 1e-4, "{z}: {} against {want}", log_improvement(z));
        }
        let jump = log_improvement(-6.0 - 1e-9) - log_improvement(-6.0 + 1e-9);
        assert!(jump.abs() < 1e-3, "{jump}");
        assert!(log_improvement(-1e3).is_finite());
        for z in [-1e3, -20.0, -7.0, -5.0, -1.0, 0.0, 2.0] {
            let want = (log_improvement(z + 1e-4) - log_improvement(z - 1e-4)) / 2e-4;
            let slope = improvement_slope(z);
            assert!((slope / want - 1.0).abs() < 1e-3, "{z}: {slope} against {want}");
        }
    }
}
