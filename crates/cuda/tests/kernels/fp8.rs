//! Rounding to eight bits: every code is exact, so results must equal the oracle's.

use super::device::{Buffer, NULL, both_orders, dtypes, float, launch, values, wide};
use trainyard_cuda::fp8::Fp8;
use trainyard_cuda::kernels::{self, Argument};
use trainyard_tensor::Element;
use trainyard_tensor::reference::fp8 as oracle;

fn int(n: usize) -> Argument {
    Argument::I32(n as i32)
}

/// Codes as they lie, transposed, and the bits of the largest magnitude, which was `before`.
fn round<T: Element>(
    format: Fp8,
    scale: f32,
    x: &[T],
    [rows, columns]: [usize; 2],
    shift: usize,
    before: f32,
) -> (Vec<u8>, Vec<u8>, u32) {
    both_orders(|| {
        let (x, scale, amax) = (Buffer::shifted(x, shift), Buffer::new(&[scale]), Buffer::new(&[before.to_bits()]));
        let all = vec![0xffu8; rows * columns];
        let e5m2 = int(usize::from(format == Fp8::E5M2));
        let run = |y: Argument, transposed: Argument| {
            let arguments = [x.at(), scale.at(), y, transposed, amax.at(), int(rows), int(columns), e5m2];
            launch(&kernels::FP8_ROUND, float::<T>(), [rows, columns, 1], &arguments);
        };
        // Both at once, and each alone.
        let [y, transposed, y_alone, transposed_alone] = [(); 4].map(|()| Buffer::shifted(&all, shift));
        run(y.at(), transposed.at());
        run(y_alone.at(), NULL);
        run(NULL, transposed_alone.at());
        let (y, transposed) = (y.get(), transposed.get());
        assert!(y == y_alone.get() && transposed == transposed_alone.get());
        (y, transposed, amax.get()[0])
    })
}

const SHAPES: [[usize; 2]; 8] = [[0, 3], [1, 1], [5, 17], [16, 32], [64, 64], [70, 136], [3, 200], [129, 9]];

dtypes! {
    fn codes_of_eight_bits_are_the_oracles<T>() {
        for (format, scale) in [(Fp8::E4M3, 256.0), (Fp8::E4M3, 0.0078125), (Fp8::E4M3, 4096.0), (Fp8::E5M2, 32768.0), (Fp8::E5M2, 6.1e-5)] {
            for (number, shape) in SHAPES.into_iter().enumerate() {
                let [rows, columns] = shape;
                let x = values::<T>(number as u64, rows * columns);
                let (y, transposed, amax) = round(format, scale, &x, shape, number % 2, 0.0);
                let numbers: Vec<f64> = y.iter().map(|code| f64::from(format.decode(*code))).collect();
                let want: Vec<f64> = x.iter().map(|x| oracle::nearest(format, f64::from(x.to_f32() * scale))).collect();
                assert_eq!(numbers, want, "{format:?} {scale} {shape:?}");
                for (at, code) in y.iter().enumerate() {
                    assert_eq!(transposed[at % columns * rows + at / columns], *code, "{shape:?} {at}");
                }
                assert_eq!(f64::from(f32::from_bits(amax)), oracle::amax(&wide(&x)), "{shape:?}");
            }
        }
    }
}

dtypes! {
    fn the_largest_magnitude_is_raised_and_shows_what_is_not_finite<T>() {
        let x = values::<T>(1, 5000);
        let most = oracle::amax(&wide(&x)) as f32;
        let alone = |x: &[T], before: f32| {
            // As bits, because a NaN is like nothing.
            let bits = both_orders(|| {
                let (from, amax) = (Buffer::new(x), Buffer::new(&[before.to_bits()]));
                let arguments = [from.at(), amax.at(), Argument::I64(x.len() as i64)];
                launch(&kernels::FP8_AMAX, float::<T>(), [x.len(), 1, 1], &arguments);
                amax.get()[0]
            });
            f32::from_bits(bits)
        };
        for before in [0.0, 0.25, 7.0] {
            let (.., rounded) = round(Fp8::E4M3, 1.0, &x, [50, 100], 0, before);
            assert_eq!((f32::from_bits(rounded), alone(&x, before)), (most.max(before), most.max(before)));
        }
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = x.clone();
            x[4321] = T::from_f32(bad);
            let (y, transposed, rounded) = round(Fp8::E5M2, 1.0, &x, [50, 100], 0, 0.0);
            for found in [f32::from_bits(rounded), alone(&x, 3.0)] {
                assert!(found.is_nan() == bad.is_nan() && !found.is_finite(), "{bad}: {found}");
            }
            let got = Fp8::E5M2.decode(y[4321]);
            assert!(got == 57344f32.copysign(bad) || (bad.is_nan() && got.is_nan()), "{bad}: {got}");
            assert_eq!(transposed[21 * 50 + 43], y[4321]);
        }
    }
}
