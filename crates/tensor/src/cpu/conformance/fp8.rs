//! Rounding to eight bits: every result is exact, so the oracle's bits are wanted.

use super::{dtypes, on_every_cpu, values, wide};
use crate::cpu::fp8::{Fp8, amax, round};
use crate::reference::fp8 as oracle;

dtypes! {
    fn rounding_to_eight_bits_is_the_oracles<T>() {
        // Scales at which the numbers fill the format, fall below its normal numbers, vanish, and
        // saturate.
        for (format, scale) in [(Fp8::E4M3, 256.0), (Fp8::E4M3, 0.01f32.log2().floor().exp2()), (Fp8::E4M3, 2f32.powi(-12)),
            (Fp8::E4M3, 4096.0), (Fp8::E5M2, 32768.0), (Fp8::E5M2, 2f32.powi(-14)), (Fp8::E5M2, 2f32.powi(20))] {
            for len in [0, 1, 7, 16, 33, 257, 70_001] {
                let mut x = values::<T>(len as u64, len);
                for (at, value) in [0.0, -0.0, 1e-8, -1e-8].into_iter().enumerate().filter(|(at, _)| *at < len) {
                    x[at] = T::from_f32(value);
                }
                let s = f64::from(scale);
                let want: Vec<T> = wide(&x).iter().map(|x| T::from_f32((oracle::nearest(format, x * s) / s) as f32)).collect();
                let most = oracle::amax(&wide(&x));
                on_every_cpu(
                    |cpu| {
                        let mut y = vec![T::from_f32(f32::NAN); len];
                        let found = round(cpu, format, [scale, 1.0 / scale], &x, &mut y);
                        assert_eq!(found.to_bits(), amax(cpu, &x).to_bits());
                        (y, found)
                    },
                    |isa, (y, found)| {
                        assert_eq!(f64::from(*found), most, "{isa}");
                        for (i, (got, want)) in y.iter().zip(&want).enumerate() {
                            let same = got.to_f32().to_bits() == want.to_f32().to_bits();
                            assert!(same, "{isa} {format:?} scale {scale} [{i}] of {:?}: {got:?}, not {want:?}", x[i]);
                        }
                    },
                );
            }
        }
    }
}

dtypes! {
    fn what_is_not_finite_is_noted_and_stays<T>() {
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = values::<T>(3, 1000);
            x[777] = T::from_f32(bad);
            on_every_cpu(
                |cpu| {
                    let mut y = vec![T::default(); x.len()];
                    let found = round(cpu, Fp8::E4M3, [256.0, 1.0 / 256.0], &x, &mut y);
                    let right = if bad.is_nan() {
                        found.is_nan() && y[777].to_f32().is_nan()
                    } else {
                        found == f32::INFINITY && y[777].to_f32() == 1.75f32.copysign(bad)
                    };
                    (right, y.iter().filter(|y| y.to_f32().is_nan()).count())
                },
                |isa, got| assert_eq!(*got, (true, usize::from(bad.is_nan())), "{isa} {bad}"),
            );
        }
    }
}
