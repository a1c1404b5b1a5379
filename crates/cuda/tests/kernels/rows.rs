//! Reductions, softmax and other functions of rows; reading and adding by indices.

use super::device::{Buffer, ULP, both_orders, close, dtypes, float, launch, roundoff, values, wide};
use super::norm::sum_partials;
use trainyard_cuda::kernels::{self, Argument, Float, row_blocks};
use trainyard_tensor::reference::loss as oracle;

fn int(n: usize) -> Argument {
    Argument::I32(n as i32)
}

fn long(n: usize) -> Argument {
    Argument::I64(n as i64)
}

const SHAPES: [[usize; 2]; 5] = [[0, 3], [1, 1], [5, 17], [19, 129], [3, 5000]];

dtypes! {
    fn columns_and_whole_buffers_are_summed<T>() {
        for [rows, columns] in SHAPES {
            let len = rows * columns;
            let (x, other) = (values::<T>(1, len), values::<T>(2, len));
            let (chunk, blocks) = (700, row_blocks(rows));
            let (by_columns, sums, squares, errors, total, mean) = both_orders(|| {
                let (x, other) = (Buffer::new(&x), Buffer::new(&other));
                let partials = Buffer::<f32>::empty(blocks * columns);
                let arguments = [x.at(), partials.at(), int(1), int(rows), int(columns)];
                launch(&kernels::COLUMN_SUMS, float::<T>(), [1, rows, columns], &arguments);
                let start = vec![0.5; columns];
                let by_columns = if rows == 0 { start } else { sum_partials(&partials, blocks, &start) };
                let each = |kernel| {
                    let sums = Buffer::<f64>::empty(len.div_ceil(chunk));
                    launch(kernel, float::<T>(), [len, chunk, 1], &[x.at(), sums.at(), long(len), long(chunk)]);
                    sums
                };
                let (sums, squares) = (each(&kernels::CHUNK_SUMS), each(&kernels::CHUNK_SQUARES));
                let (errors, total) = (Buffer::<f64>::empty(len.div_ceil(chunk)), Buffer::<f64>::empty(1));
                let arguments = [x.at(), other.at(), errors.at(), long(len), long(chunk)];
                launch(&kernels::SQUARED_ERROR, float::<T>(), [len, chunk, 1], &arguments);
                launch(&kernels::SUM_F64, Float::F32, [1, 1, 1], &[squares.at(), total.at(), long(len.div_ceil(chunk))]);
                let mean = Buffer::<f32>::empty(1);
                let arguments = [errors.at(), mean.at(), long(len.div_ceil(chunk)), long(len.max(1))];
                launch(&kernels::MEAN_F64, Float::F32, [1, 1, 1], &arguments);
                (by_columns, sums.get(), squares.get(), errors.get(), total.get(), mean.get())
            });
            close("mean", &mean, &[errors.iter().sum::<f64>() / len.max(1) as f64], ULP);
            let (xw, ow) = (wide(&x), wide(&other));
            for column in 0..columns {
                let want = 0.5 + (0..rows).map(|row| xw[row * columns + column]).sum::<f64>();
                // At most rows + 1 additions of sums no larger than rows.
                close("column", &by_columns[column..=column], &[want], (rows * rows + 1) as f64 * ULP);
            }
            // Sums in f64 differ from these in their last places only; a squared difference is
            // rounded once in f32 before.
            let same = |what: &str, got: &[f64], each: &dyn Fn(usize) -> f64, error: f64| {
                for (index, got) in got.iter().enumerate() {
                    let range = index * chunk..((index + 1) * chunk).min(len);
                    let want: f64 = range.clone().map(each).sum();
                    let magnitude: f64 = range.map(|i| each(i).abs()).sum();
                    assert!((got - want).abs() <= (error + 1e-13) * magnitude, "{what} {index}: {got}, not {want}");
                }
            };
            same("sum", &sums, &|i| xw[i], 0.0);
            same("squares", &squares, &|i| xw[i] * xw[i], 0.0);
            same("errors", &errors, &|i| (xw[i] - ow[i]).powi(2), 4.0 * ULP);
            assert!((total[0] - squares.iter().sum::<f64>()).abs() <= 1e-13 * total[0]);
        }
    }
}

dtypes! {
    fn middle_dimensions_are_summed<T>() {
        let [outer, rows, columns] = [3, 37, 270];
        let x = values::<T>(1, outer * rows * columns);
        let blocks = row_blocks(rows);
        let sums = both_orders(|| {
            let (x, partials) = (Buffer::new(&x), Buffer::<f32>::empty(outer * blocks * columns));
            let arguments = [x.at(), partials.at(), int(outer), int(rows), int(columns)];
            launch(&kernels::COLUMN_SUMS, float::<T>(), [outer, rows, columns], &arguments);
            let sums = Buffer::<f32>::empty(outer * columns);
            let last = [Argument::F32(0.25), int(0)];
            let arguments = [&[partials.at(), sums.at(), int(blocks), long(columns), long(outer)][..], &last].concat();
            launch(&kernels::SUM_PARTIALS, Float::F32, [outer * columns, 1, 1], &arguments);
            sums.get()
        });
        let x = wide(&x);
        let want: Vec<f64> = (0..outer * columns)
            .map(|at| (0..rows).map(|row| x[(at / columns * rows + row) * columns + at % columns]).sum::<f64>() / 4.0)
            .collect();
        close("sums", &sums, &want, (rows * rows) as f64 * ULP);
    }
}

#[test]
fn numbers_that_are_not_finite_are_counted_and_break_sums_of_squares() {
    let count = |x: &[f32]| {
        let (x, n) = (Buffer::new(x), Buffer::new(&[0u32]));
        launch(&kernels::NONFINITE, Float::F32, [x.get().len(), 1, 1], &[x.at(), n.at(), long(x.get().len())]);
        let sums = Buffer::<f64>::empty(1);
        let len = x.get().len();
        launch(&kernels::CHUNK_SQUARES, Float::F32, [len, len, 1], &[x.at(), sums.at(), long(len), long(len)]);
        (n.get()[0], sums.get()[0].is_finite())
    };
    let mut x = values::<f32>(1, 3001);
    assert_eq!(count(&x), (0, true));
    x[5] = 3e38;
    assert_eq!(count(&x), (0, true));
    x[3000] = f32::NAN;
    x[7] = f32::NEG_INFINITY;
    assert_eq!(count(&x), (2, false));
}

dtypes! {
    fn rows_become_one_number<T>() {
        for [rows, columns] in SHAPES {
            let (x, dy) = (values::<T>(1, rows * columns), values::<T>(2, rows));
            let (shape, sizes, divisor) = ([int(rows), int(columns)], [rows, columns, 1], columns as f32 - 0.5);
            let (sums, largest, places, variance, mean, dvariance, dlargest) = both_orders(|| {
                let (x, dy) = (Buffer::new(&x), Buffer::new(&dy));
                let t = float::<T>();
                let each = |how, factor| {
                    let y = Buffer::<T>::empty(rows);
                    let arguments = [x.at(), y.at(), shape[0], shape[1], int(how), Argument::F32(factor)];
                    launch(&kernels::REDUCE_ROWS, t, sizes, &arguments);
                    y
                };
                let (sums, largest) = (each(0, 0.5), each(1, 1.0));
                let places = Buffer::<u32>::empty(rows);
                launch(&kernels::ARGMAX_ROWS, t, sizes, &[x.at(), places.at(), shape[0], shape[1]]);
                let (variance, mean) = (Buffer::<T>::empty(rows), Buffer::<f32>::empty(rows));
                let last = [shape[0], shape[1], Argument::F32(divisor)];
                launch(&kernels::VARIANCE, t, sizes, &[&[x.at(), variance.at(), mean.at()][..], &last].concat());
                let (dvariance, dlargest) = (Buffer::<T>::empty(rows * columns), Buffer::<T>::empty(rows * columns));
                let arguments = [&[dy.at(), x.at(), mean.at(), dvariance.at()][..], &last].concat();
                launch(&kernels::VARIANCE_BACKWARD, t, sizes, &arguments);
                let arguments = [dy.at(), x.at(), largest.at(), dlargest.at(), shape[0], shape[1]];
                launch(&kernels::MAX_BACKWARD, t, sizes, &arguments);
                (sums.get(), largest.get(), places.get(), variance.get(), mean.get(), dvariance.get(), dlargest.get())
            });
            let n = columns as f64;
            for row in 0..rows {
                let (span, d) = (row * columns..(row + 1) * columns, f64::from(dy[row].to_f32()));
                let x = wide(&x[span.clone()]);
                let sum: f64 = x.iter().sum();
                // Chains of n / 256 and eight halves, of partial sums no larger than n.
                close("sum", &sums[row..=row], &[0.5 * sum], (n / 8.0 + 10.0) * n * ULP);
                let top = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                close("largest", &largest[row..=row], &[top], 0.0);
                assert_eq!(places[row] as usize, x.iter().position(|x| *x == top).unwrap());
                let centre = sum / n;
                let want = x.iter().map(|x| (x - centre).powi(2)).sum::<f64>() / f64::from(divisor);
                close("mean", &mean[row..=row], &[centre], (n / 8.0 + 10.0) * ULP);
                close("variance", &variance[row..=row], &[want], 8.0 * (n / 8.0 + 10.0) * ULP);
                let want: Vec<f64> = x.iter().map(|x| 2.0 * d * (x - centre) / f64::from(divisor)).collect();
                close("dvariance", &dvariance[span.clone()], &want, 4.0 * (n / 8.0 + 10.0) * ULP);
                let count = x.iter().filter(|x| **x == top).count() as f64;
                let want: Vec<f64> = x.iter().map(|x| if *x == top { d / count } else { 0.0 }).collect();
                close("dlargest", &dlargest[span], &want, ULP);
            }
        }
    }
}

dtypes! {
    fn softmax_and_its_logarithm<T>() {
        for [rows, columns] in SHAPES {
            let len = rows * columns;
            let (x, dy) = (values::<T>(1, len).iter().map(|x| T::from_f32(x.to_f32() * 8.0)).collect::<Vec<T>>(), values::<T>(2, len));
            for logarithm in [0, 1] {
                let (y, dx) = both_orders(|| {
                    let (x, dy) = (Buffer::new(&x), Buffer::new(&dy));
                    let (y, dx) = (Buffer::<T>::empty(len), Buffer::<T>::empty(len));
                    let shape = [int(rows), int(columns), int(logarithm)];
                    launch(&kernels::SOFTMAX, float::<T>(), [rows, columns, 1], &[&[x.at(), y.at()][..], &shape].concat());
                    let arguments = [&[dy.at(), y.at(), dx.at()][..], &shape].concat();
                    launch(&kernels::SOFTMAX_BACKWARD, float::<T>(), [rows, columns, 1], &arguments);
                    (y.get(), dx.get())
                });
                for row in 0..rows {
                    let span = row * columns..(row + 1) * columns;
                    let (x, dy, z) = (wide(&x[span.clone()]), wide(&dy[span.clone()]), wide(&y[span.clone()]));
                    let lse = oracle::lse(&x);
                    // lse is some 16 at most, off by 40 ULP; its error is relative in the softmax.
                    let want: Vec<f64> = x.iter().map(|x| if logarithm == 1 { x - lse } else { (x - lse).exp() }).collect();
                    close("softmax", &y[span.clone()], &want, 100.0 * ULP);
                    let sum: f64 = if logarithm == 1 { dy.iter().sum() } else { dy.iter().zip(&z).map(|(d, z)| d * z).sum() };
                    let want: Vec<f64> = dy.iter().zip(&z)
                        .map(|(d, z)| if logarithm == 1 { d - z.exp() * sum } else { z * (d - sum) })
                        .collect();
                    // Sums of n terms below 1; of a rounded softmax's as of any numbers, but for
                    // the size of the largest.
                    let n = columns as f64;
                    let slack = if logarithm == 1 { (n / 8.0 + 20.0) * n.min(80.0) * ULP } else { (n / 8.0 + 20.0) * 2.0 * ULP };
                    close("gradient", &dx[span], &want, slack);
                }
            }
        }
    }
}

dtypes! {
    fn cumulative_sums_run_both_ways<T>() {
        for [rows, columns] in SHAPES {
            let x = values::<T>(1, rows * columns);
            for backward in [0, 1] {
                let y = both_orders(|| {
                    let (x, y) = (Buffer::new(&x), Buffer::<T>::empty(rows * columns));
                    let arguments = [x.at(), y.at(), int(rows), int(columns), int(backward)];
                    launch(&kernels::CUMULATIVE_SUM, float::<T>(), [rows, columns, 1], &arguments);
                    y.get()
                });
                for (row, x) in wide(&x).chunks(columns).enumerate() {
                    for at in [0, columns / 3, columns / 2, columns - 1] {
                        let want: f64 = if backward == 1 { x[at..].iter().sum() } else { x[..=at].iter().sum() };
                        let n = columns as f64;
                        close("sum", &y[row * columns + at..][..1], &[want], (n / 32.0 + 8.0) * n.sqrt() * 4.0 * ULP);
                    }
                }
            }
        }
    }
}

dtypes! {
    fn the_largest_of_rows_in_their_order<T>() {
        for ([rows, columns], k) in [([1, 1], 1), ([5, 17], 17), ([7, 300], 5)] {
            // Few different numbers, so that equals occur, and a NaN in each row.
            let mut x: Vec<T> = values::<f32>(1, rows * columns).iter().map(|x| T::from_f32((x * 40.0).round())).collect();
            (0..rows).filter(|_| columns > 1).for_each(|row| x[row * columns + row % columns] = T::from_f32(f32::NAN));
            let (found, places) = both_orders(|| {
                let (x, found, places) = (Buffer::new(&x), Buffer::<T>::empty(rows * k), Buffer::<u32>::empty(rows * k));
                let arguments = [x.at(), found.at(), places.at(), int(rows), int(columns), int(k)];
                launch(&kernels::TOP_K, float::<T>(), [rows, columns, 1], &arguments);
                (found.get().iter().map(|x| x.to_f32().to_bits()).collect::<Vec<_>>(), places.get())
            });
            for row in 0..rows {
                let rank = |i: usize| {
                    let x = x[row * columns + i].to_f32();
                    if x.is_nan() { f32::NEG_INFINITY } else { x }
                };
                let mut order: Vec<usize> = (0..columns).collect();
                order.sort_by(|a, b| rank(*b).partial_cmp(&rank(*a)).unwrap().then(a.cmp(b)));
                for j in 0..k {
                    assert_eq!(places[row * k + j] as usize, order[j], "row {row}, place {j}");
                    let value = f32::from_bits(found[row * k + j]);
                    assert!(value == rank(order[j]) || value.is_nan());
                }
            }
        }
    }
}

dtypes! {
    fn differences_are_scaled<T>() {
        for len in [1, 17, 3001] {
            let (a, b) = (values::<T>(1, len), values::<T>(2, len));
            let y = both_orders(|| {
                let (a, b, dy, y) = (Buffer::new(&a), Buffer::new(&b), Buffer::new(&[0.5f32]), Buffer::<T>::empty(len));
                let arguments = [a.at(), b.at(), dy.at(), y.at(), long(len), Argument::F32(0.25)];
                launch(&kernels::SCALED_DIFFERENCE, float::<T>(), [len, 1, 1], &arguments);
                y.get()
            });
            let want: Vec<f64> = wide(&a).iter().zip(wide(&b)).map(|(a, b)| 0.125 * (a - b)).collect();
            close("difference", &y, &want, ULP * 0.25);
        }
    }
}

fn indices(seed: u64, len: usize, limit: usize) -> Vec<i32> {
    values::<f32>(seed, len).iter().map(|x| ((x + 1.0) / 2.0 * limit as f32) as i32 % limit as i32).collect()
}

dtypes! {
    fn reading_and_adding_by_indices<T>() {
        for [outer, n, inner, k] in [[3, 7, 5, 11], [1, 40, 300, 90], [20, 9, 1, 300]] {
            let (x, chosen, dy) = (values::<T>(1, outer * n * inner), indices(2, k, n), values::<T>(3, outer * k * inner));
            let (y, sums) = both_orders(|| {
                let (x, list, dy) = (Buffer::new(&x), Buffer::new(&chosen), Buffer::new(&dy));
                let y = Buffer::<T>::empty(outer * k * inner);
                let arguments = [x.at(), list.at(), y.at(), long(outer), int(n), int(k), int(inner)];
                launch(&kernels::INDEX_SELECT, float::<T>(), [outer * k * inner, 1, 1], &arguments);
                let (first, sums) = (Buffer::new(&vec![i32::MAX; n]), Buffer::new(&vec![0.5f32; outer * n * inner]));
                launch(&kernels::FIRST_USE, float::<T>(), [k, 1, 1], &[list.at(), first.at(), int(k), int(0), int(n)]);
                let pointers = [dy.at(), list.at(), first.at(), sums.at()];
                let arguments = [&pointers[..], &[outer, 0, n, k, inner].map(int)].concat();
                launch(&kernels::INDEX_ADD, float::<T>(), [outer, k, inner], &arguments);
                (y.get(), sums.get())
            });
            let place = |at: usize| (at / inner / k * n + chosen[at / inner % k] as usize) * inner + at % inner;
            let mut want = vec![0.5f32; x.len()];
            for at in 0..dy.len() {
                assert!(y[at] == x[place(at)], "element {at}");
                want[place(at)] += dy[at].to_f32();
            }
            assert!(sums == want, "positions are not added in order");
        }
        for [rows, n, k] in [[1, 1, 1], [3, 17, 5], [50, 33, 64]] {
            let (x, chosen, dy) = (values::<T>(1, rows * n), indices(2, rows * k, n), values::<T>(3, rows * k));
            let (y, sums, hot) = both_orders(|| {
                let (x, list, dy) = (Buffer::new(&x), Buffer::new(&chosen), Buffer::new(&dy));
                let (y, sums, hot) = (Buffer::<T>::empty(rows * k), Buffer::new(&vec![0.0f32; rows * n]), Buffer::<T>::empty(rows * k * n));
                let arguments = [x.at(), list.at(), y.at(), long(rows), int(n), int(k)];
                launch(&kernels::GATHER, float::<T>(), [rows * k, 1, 1], &arguments);
                let arguments = [dy.at(), list.at(), sums.at(), int(rows), int(n), int(k)];
                launch(&kernels::SCATTER_ADD, float::<T>(), [rows, n, 1], &arguments);
                let arguments = [list.at(), hot.at(), long(rows * k), int(n)];
                launch(&kernels::ONE_HOT, float::<T>(), [rows * k * n, 1, 1], &arguments);
                (y.get(), sums.get(), hot.get())
            });
            let mut want = vec![0.0f32; rows * n];
            for at in 0..rows * k {
                let place = at / k * n + chosen[at] as usize;
                assert!(y[at] == x[place]);
                want[place] += dy[at].to_f32();
                assert!((0..n).all(|c| hot[at * n + c].to_f32() == f32::from(u8::from(c == chosen[at] as usize))));
            }
            assert!(sums == want, "entries are not added in order");
        }
    }
}

dtypes! {
    fn integers_become_floats<T>() {
        let x = [0, 1, -1, 7, 100_000, i32::MIN, i32::MAX, -123_457];
        for signed in [0, 1] {
            let (input, y) = (Buffer::new(&x), Buffer::<T>::empty(x.len()));
            let arguments = [input.at(), y.at(), long(x.len()), int(signed)];
            launch(&kernels::TO_FLOAT, float::<T>(), [x.len(), 1, 1], &arguments);
            for (x, y) in x.iter().zip(y.get()) {
                let want = if signed == 1 { *x as f32 } else { *x as u32 as f32 };
                assert!(y == T::from_f32(want), "{x}: {y:?} (unit {})", roundoff(T::DTYPE));
            }
        }
    }
}
