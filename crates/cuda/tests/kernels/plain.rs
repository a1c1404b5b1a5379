//! The plain elementwise operations, their derivatives, masks and strided walks.

use super::device::{Buffer, NULL, ULP, both_orders, close, dtypes, float, launch, roundoff, values, wide};
use trainyard_cuda::kernels::{self, Argument, Axes, Float};
use trainyard_tensor::Element;
use trainyard_tensor::cpu::elementwise::{Binary, Unary};
use trainyard_tensor::cpu::plain::derivative::{Needs, needs};
use trainyard_tensor::reference::activation::erf;
use trainyard_tensor::reference::plain as oracle;

fn int(n: usize) -> Argument {
    Argument::I32(n as i32)
}

fn long(n: usize) -> Argument {
    Argument::I64(n as i64)
}

fn exact(f: Unary, x: f64) -> f64 {
    match f {
        Unary::Neg => -x,
        Unary::Abs => x.abs(),
        Unary::Exp => x.exp(),
        Unary::Ln => x.ln(),
        Unary::Sqrt => x.sqrt(),
        Unary::Rsqrt => 1.0 / x.sqrt(),
        Unary::Square => x * x,
        Unary::Reciprocal => 1.0 / x,
        Unary::Tanh => x.tanh(),
        Unary::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        Unary::Erf => erf(x),
        Unary::Sign => {
            if x == 0.0 {
                0.0
            } else {
                x.signum()
            }
        }
    }
}

fn unary<T: Element>(index: usize, x: &[T]) -> Vec<T> {
    both_orders(|| {
        let (x, y) = (Buffer::new(x), Buffer::<T>::empty(x.len()));
        let len = y.get().len();
        launch(&kernels::UNARY, float::<T>(), [len, 1, 1], &[x.at(), y.at(), long(len), int(index)]);
        y.get()
    })
}

dtypes! {
    fn functions_of_one_number_and_their_slopes<T>() {
        for len in [0, 1, 17, 3001] {
            for (index, f) in Unary::ALL.into_iter().enumerate() {
                // Positive for logarithm and roots, away from zero for the reciprocal.
                let positive = matches!(f, Unary::Ln | Unary::Sqrt | Unary::Rsqrt | Unary::Reciprocal);
                let x: Vec<T> = values::<T>(1, len).iter().map(|x| {
                    let x = x.to_f32() * 4.0;
                    T::from_f32(if positive { x.abs() + 0.01 } else { x })
                }).collect();
                let want: Vec<f64> = wide(&x).into_iter().map(|x| exact(f, x)).collect();
                // As in the CPU's suite.
                let slack = match f {
                    Unary::Exp => 55.0 * 4e-7,
                    Unary::Rsqrt => 2e-6,
                    Unary::Ln | Unary::Tanh | Unary::Sigmoid | Unary::Erf => 4e-7,
                    _ => 0.0,
                };
                close(&format!("{f:?}"), &unary(index, &x), &want, slack);

                let x: Vec<T> = values::<T>(1, len).iter().map(|x| T::from_f32(x.to_f32().abs() + 0.25)).collect();
                let dy = values::<T>(2, len);
                let z = if needs(f) == Needs::Result { unary(index, &x) } else { x.clone() };
                let dx = both_orders(|| {
                    let (dy, z, dx) = (Buffer::new(&dy), Buffer::new(&z), Buffer::<T>::empty(len));
                    let arguments = [dy.at(), z.at(), dx.at(), long(len), int(index)];
                    launch(&kernels::UNARY_BACKWARD, float::<T>(), [len, 1, 1], &arguments);
                    dx.get()
                });
                let want: Vec<f64> = wide(&x).iter().zip(wide(&dy)).map(|(x, dy)| dy * oracle::slope(f, *x)).collect();
                let stored = if needs(f) == Needs::Result { roundoff(T::DTYPE) * 3.0 } else { 0.0 };
                close(&format!("{f:?} backward"), &dx, &want, 16.0 * (8.0 * ULP + stored));
            }
        }
    }
}

dtypes! {
    fn functions_of_two_numbers_with_every_broadcast<T>() {
        for [rows, columns] in [[0, 3], [1, 1], [3, 17], [41, 129]] {
            let len = rows * columns;
            let positive = |seed, len| -> Vec<T> {
                values::<T>(seed, len).iter().map(|x| T::from_f32(x.to_f32().abs() + 0.25)).collect()
            };
            let operands = [positive(1, len), positive(2, columns), positive(3, rows), positive(4, 1), vec![]];
            let (full, dy) = (positive(5, len), values::<T>(6, len));
            let at = |form: usize, i: usize| match form {
                0 => f64::from(operands[0][i].to_f32()),
                1 => f64::from(operands[1][i % columns].to_f32()),
                2 => f64::from(operands[2][i / columns].to_f32()),
                3 => f64::from(operands[3][0].to_f32()),
                _ => 0.75,
            };
            for (index, f) in Binary::ALL.into_iter().enumerate() {
                let exact = |a: f64, b: f64| match f {
                    Binary::Add => a + b,
                    Binary::Sub => a - b,
                    Binary::Mul => a * b,
                    Binary::Div => a / b,
                    Binary::Max => a.max(b),
                    Binary::Min => a.min(b),
                    Binary::Pow => a.powf(b),
                };
                for form in 0..5 {
                    let last = [long(rows), long(columns), int(index), int(0), int(form), Argument::F32(0.75)];
                    let turned = [long(rows), long(columns), int(index), int(form), int(0), Argument::F32(0.75)];
                    let (y, back, da, db, alone) = both_orders(|| {
                        let (a, b, dy) = (Buffer::new(&full), Buffer::new(&operands[form]), Buffer::new(&dy));
                        let [y, back, da, db, alone] = std::array::from_fn(|_| Buffer::<T>::empty(len));
                        let b = if form == 4 { NULL } else { b.at() };
                        let sizes = [len, 1, 1];
                        launch(&kernels::BINARY, float::<T>(), sizes, &[&[a.at(), b, y.at()][..], &last].concat());
                        launch(&kernels::BINARY, float::<T>(), sizes, &[&[b, a.at(), back.at()][..], &turned].concat());
                        let backward = |da, db| {
                            let arguments = [&[dy.at(), a.at(), b, da, db][..], &last].concat();
                            launch(&kernels::BINARY_BACKWARD, float::<T>(), sizes, &arguments);
                        };
                        backward(da.at(), db.at());
                        backward(NULL, alone.at());
                        (y.get(), back.get(), da.get(), db.get(), alone.get())
                    });
                    assert!(alone == db);
                    let (a, dy) = (wide(&full), wide(&dy));
                    // One rounding in f32 before the final one, of numbers up to 5.
                    close(&format!("{f:?} {form}"), &y, &(0..len).map(|i| exact(a[i], at(form, i))).collect::<Vec<_>>(), 5.0 * ULP);
                    close(&format!("{f:?} {form} turned"), &back, &(0..len).map(|i| exact(at(form, i), a[i])).collect::<Vec<_>>(), 5.0 * ULP);
                    let slopes = |which: usize| -> Vec<f64> {
                        (0..len).map(|i| dy[i] * oracle::slopes(f, a[i], at(form, i))[which]).collect()
                    };
                    close(&format!("{f:?} {form} da"), &da, &slopes(0), 20.0 * 8.0 * ULP);
                    close(&format!("{f:?} {form} db"), &db, &slopes(1), 20.0 * 8.0 * ULP);
                }
            }
        }
    }
}

#[test]
fn what_is_not_finite_and_slopes_where_there_is_none() {
    let nan = f32::NAN;
    let binary = |f: usize, a: f32, b: f32| {
        let (a, b, y) = (Buffer::new(&[a]), Buffer::new(&[b]), Buffer::<f32>::empty(1));
        let last = [long(1), long(1), int(f), int(0), int(0), Argument::F32(0.0)];
        launch(&kernels::BINARY, Float::F32, [1, 1, 1], &[&[a.at(), b.at(), y.at()][..], &last].concat());
        let (dy, da, db) = (Buffer::new(&[1.0f32]), Buffer::<f32>::empty(1), Buffer::<f32>::empty(1));
        let arguments = [&[dy.at(), a.at(), b.at(), da.at(), db.at()][..], &last].concat();
        launch(&kernels::BINARY_BACKWARD, Float::F32, [1, 1, 1], &arguments);
        (y.get()[0], da.get()[0], db.get()[0])
    };
    assert!(binary(4, 1.0, nan).0.is_nan() && binary(5, 1.0, nan).0.is_nan());
    assert_eq!(binary(4, 2.0, 2.0), (2.0, 0.5, 0.5));
    assert_eq!(binary(5, 1.0, 2.0), (1.0, 1.0, 0.0));
    assert_eq!(binary(6, 0.0, 0.0), (1.0, 0.0, 0.0));
    assert_eq!(binary(6, 0.0, 2.0), (0.0, 0.0, 0.0));
    assert_eq!(unary(11, &[f32::INFINITY, -3.0, 0.0]), [1.0, -1.0, 0.0]);
    let pair = |kernel, x: &[f32], last: &[f32]| {
        let (dy, input, dx) = (Buffer::new(&vec![3.0f32; x.len()]), Buffer::new(x), Buffer::<f32>::empty(x.len()));
        let last: Vec<Argument> = last.iter().map(|x| Argument::F32(*x)).collect();
        launch(
            kernel,
            Float::F32,
            [x.len(), 1, 1],
            &[&[dy.at(), input.at(), dx.at(), long(x.len())][..], &last].concat(),
        );
        dx.get()
    };
    assert_eq!(pair(&kernels::CLAMP_BACKWARD, &[-1.0, 1.0, 1.001], &[-1.0, 1.0]), [3.0, 3.0, 0.0]);
    assert_eq!(pair(&kernels::POWER_BACKWARD, &[-2.0, 0.0, 1.0], &[3.0]), [36.0, 0.0, 9.0]);
}

dtypes! {
    fn clamps_comparisons_selections_and_masks<T>() {
        for len in [0, 1, 17, 3001] {
            let (a, b) = (values::<T>(1, len), values::<T>(2, len));
            let masks = [2, 3].map(|m| (0..len as u32).map(|i| i * 7 % 11 % m).collect::<Vec<u32>>());
            let (sizes, n, t) = ([len, 1, 1], long(len), float::<T>());
            let (clamped, compared, chosen, filled, logic) = both_orders(|| {
                let (a, b, m, o) = (Buffer::new(&a), Buffer::new(&b), Buffer::new(&masks[0]), Buffer::new(&masks[1]));
                let [clamped, chosen] = std::array::from_fn(|_| Buffer::<T>::empty(len));
                let arguments = [a.at(), clamped.at(), n, Argument::F32(-0.5), Argument::F32(0.25)];
                launch(&kernels::CLAMP, t, sizes, &arguments);
                let compared = [0, 1, 2].map(|how| {
                    let y = Buffer::<u32>::empty(len);
                    launch(&kernels::COMPARE, t, sizes, &[a.at(), b.at(), y.at(), n, int(how)]);
                    y.get()
                });
                launch(&kernels::SELECT, t, sizes, &[o.at(), a.at(), b.at(), chosen.at(), n]);
                let filled = [0, 1].map(|set| {
                    let y = Buffer::<T>::empty(len);
                    launch(&kernels::MASKED_FILL, t, sizes, &[a.at(), o.at(), y.at(), n, int(set), Argument::F32(-2.5)]);
                    y.get()
                });
                let logic = [0, 1, 2, 3].map(|f| {
                    let y = Buffer::<u32>::empty(len);
                    let other = if f == 3 { NULL } else { o.at() };
                    launch(&kernels::LOGIC, t, sizes, &[m.at(), other, y.at(), n, int(f)]);
                    y.get()
                });
                (clamped.get(), compared, chosen.get(), filled, logic)
            });
            for i in 0..len {
                let (x, y, m, o) = (a[i].to_f32(), b[i].to_f32(), masks[0][i] != 0, masks[1][i] != 0);
                assert!(clamped[i] == T::from_f32(x.clamp(-0.5, 0.25)));
                assert_eq!([0, 1, 2].map(|how: usize| compared[how][i] != 0), [x > y, x >= y, x == y]);
                assert!(chosen[i] == if o { a[i] } else { b[i] });
                for set in [0, 1] {
                    assert!(filled[set][i] == if o == (set == 1) { T::from_f32(-2.5) } else { a[i] });
                }
                let want = [m && o, m || o, m != o, !m];
                assert!((0..4).all(|f| logic[f][i] == u32::from(want[f])), "{i}");
            }
        }
    }
}

#[test]
fn causal_masks() {
    for (queries, keys) in [(1, 1), (3, 5), (40, 67)] {
        let y = Buffer::<u32>::empty(queries * keys);
        launch(&kernels::CAUSAL_MASK, Float::F32, [queries * keys, 1, 1], &[y.at(), long(queries), long(keys)]);
        for (at, y) in y.get().into_iter().enumerate() {
            assert_eq!(y, u32::from(at % keys <= keys - queries + at / keys));
        }
    }
}

dtypes! {
    fn strided_walks_copy_and_add<T>() {
        // A permutation with a repeated axis, into rows with a gap.
        for (lens, source, target) in [
            (vec![5, 3, 70], vec![3, 1, 15], vec![300, 100, 1]),
            (vec![4, 6, 9], vec![0, 9, 1], vec![54, 9, 1]),
            (vec![1], vec![1], vec![1]),
            (vec![2, 2, 2, 2, 3, 5], vec![60, 1, 30, 15, 2, 6], vec![120, 60, 30, 15, 5, 1]),
        ] {
            let n: usize = lens.iter().product();
            let reach = |strides: &[usize]| lens.iter().zip(strides).map(|(len, stride)| (len - 1) * stride).sum::<usize>() + 1;
            let (x, start) = (values::<T>(1, reach(&source)), values::<T>(2, reach(&target)));
            let mut axes = Axes { count: lens.len() as i64, ..Axes::default() };
            for i in 0..lens.len() {
                (axes.len[i], axes.source[i], axes.target[i]) = (lens[i] as i64, source[i] as i64, target[i] as i64);
            }
            let walked = |add: usize| {
                both_orders(|| {
                    let (x, y) = (Buffer::new(&x), Buffer::new(&start));
                    let arguments = [x.at(), y.at(), Argument::Axes(axes), long(n), int(add)];
                    launch(&kernels::STRIDED, float::<T>(), [n, 1, 1], &arguments);
                    y.get()
                })
            };
            let (mut copied, mut added) = (start.clone(), start.clone());
            for index in 0..n {
                let at = oracle::coordinates(&lens, index);
                let place = |strides: &[usize]| at.iter().zip(strides).map(|(at, stride)| at * stride).sum::<usize>();
                copied[place(&target)] = x[place(&source)];
                added[place(&target)] = T::from_f32(added[place(&target)].to_f32() + x[place(&source)].to_f32());
            }
            assert!(walked(0) == copied && walked(1) == added, "{lens:?}");
        }
    }
}
