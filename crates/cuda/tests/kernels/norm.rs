//! Norms. Statistics are sums of n terms in chains of 8 n / threads and then halves, whose error
//! relative to the sum of magnitudes is below `(n / 8 + 10) 2^-24`. Results are off by that times
//! their size, at most `inv_rms |weight|`, about 3 here.

use super::device::{Buffer, NULL, ULP, both_orders, close, dtypes, float, launch, values, wide};
use trainyard_cuda::kernels::{self, Argument, Float, row_blocks};
use trainyard_tensor::reference::norm as oracle;

const EPS: f32 = 1e-5;
/// Rows that a warp takes, and the last that a block takes.
const SHAPES: [(usize, usize); 7] = [(0, 7), (1, 2), (3, 17), (5, 64), (37, 129), (19, 768), (19, 1100)];

fn slack(n: usize) -> f64 {
    8.0 * (n as f64 / 8.0 + 10.0) * ULP
}

fn sum_slack(rows: usize, dim: usize) -> f64 {
    rows as f64 * (slack(dim) + 4.0 * ULP)
}

/// `sums[j] += sum over blocks of partials`.
pub fn sum_partials(partials: &Buffer<f32>, blocks: usize, start: &[f32]) -> Vec<f32> {
    let sums = Buffer::new(start);
    let n = start.len();
    let arguments = [
        partials.at(),
        sums.at(),
        Argument::I32(blocks as i32),
        Argument::I64(n as i64),
        Argument::I64(1),
        Argument::F32(1.0),
        Argument::I32(1),
    ];
    launch(&kernels::SUM_PARTIALS, Float::F32, [n, 1, 1], &arguments);
    sums.get()
}

dtypes! {
    fn rms_norm_and_its_gradient<T>() {
        for (rows, dim) in SHAPES {
            for shift in [0, 1] {
                let (x, dy, r, w) =
                    (values::<T>(1, rows * dim), values::<T>(2, rows * dim), values::<T>(3, rows * dim), values::<T>(4, dim));
                let (sizes, shape) = ([rows, dim, 1], [Argument::I32(rows as i32), Argument::I32(dim as i32)]);
                let blocks = row_blocks(rows);
                let (y, inv, plain, added, onto, dw) = both_orders(|| {
                    let (x, dy, r, w) = (Buffer::shifted(&x, shift), Buffer::new(&dy), Buffer::new(&r), Buffer::new(&w));
                    let (y, inv) = (Buffer::<T>::empty(rows * dim), Buffer::<f32>::empty(rows));
                    let arguments = [x.at(), w.at(), y.at(), inv.at(), shape[0], shape[1], Argument::F32(EPS)];
                    launch(&kernels::RMS_NORM, float::<T>(), sizes, &arguments);
                    let (plain, added, partials) =
                        (Buffer::<T>::empty(rows * dim), Buffer::<T>::empty(rows * dim), Buffer::<f32>::empty(blocks * dim));
                    let back = |base, dx: &Buffer<T>, partials| {
                        let arguments = [dy.at(), x.at(), w.at(), inv.at(), base, dx.at(), partials, shape[0], shape[1]];
                        launch(&kernels::RMS_NORM_BACKWARD, float::<T>(), sizes, &arguments);
                    };
                    back(NULL, &plain, partials.at());
                    back(r.at(), &added, NULL);
                    back(r.at(), &r, NULL);
                    let dw = if rows == 0 { vec![1.0; dim] } else { sum_partials(&partials, blocks, &vec![1.0; dim]) };
                    (y.get(), inv.get(), plain.get(), added.get(), r.get(), dw)
                });
                assert!(added == onto, "adding to another buffer and to the output differ");
                let mut want_dw = vec![1.0; dim];
                for row in 0..rows {
                    let span = row * dim..(row + 1) * dim;
                    let (x, dy, w) = (wide(&x[span.clone()]), wide(&dy[span.clone()]), wide(&w));
                    let (want, want_inv) = oracle::rms_norm(&x, &w, f64::from(EPS));
                    close("rms y", &y[span.clone()], &want, slack(dim));
                    close("inv_rms", &inv[row..=row], &[want_inv], slack(dim) * want_inv);
                    let (dx, weight) = oracle::rms_norm_backward(&dy, &x, &w, f64::from(EPS));
                    let slack = 4.0 * slack(dim) * want_inv;
                    close("dx", &plain[span.clone()], &dx, slack);
                    let sum: Vec<f64> = dx.iter().zip(wide(&r[span.clone()])).map(|(dx, r)| dx + r).collect();
                    close("dx + r", &added[span], &sum, slack);
                    want_dw.iter_mut().zip(weight).for_each(|(total, w)| *total += w);
                }
                close("dweight", &dw, &want_dw, sum_slack(rows, dim));
            }
        }
    }
}

dtypes! {
    fn layer_norm_and_its_gradient<T>() {
        for (rows, dim) in SHAPES {
            for with_bias in [true, false] {
                let (x, dy, r) = (values::<T>(1, rows * dim), values::<T>(2, rows * dim), values::<T>(3, rows * dim));
                let (w, b) = (values::<T>(4, dim), values::<T>(5, dim));
                let (sizes, shape) = ([rows, dim, 1], [Argument::I32(rows as i32), Argument::I32(dim as i32)]);
                let blocks = row_blocks(rows);
                let (y, mean, inv, plain, added, dw, db) = both_orders(|| {
                    let (x, dy, r) = (Buffer::new(&x), Buffer::new(&dy), Buffer::new(&r));
                    let (w, b) = (Buffer::new(&w), Buffer::new(&b));
                    let (y, mean, inv) = (Buffer::<T>::empty(rows * dim), Buffer::<f32>::empty(rows), Buffer::<f32>::empty(rows));
                    let bias = if with_bias { b.at() } else { NULL };
                    let arguments =
                        [x.at(), w.at(), bias, y.at(), mean.at(), inv.at(), shape[0], shape[1], Argument::F32(EPS)];
                    launch(&kernels::LAYER_NORM, float::<T>(), sizes, &arguments);
                    let (plain, added) = (Buffer::<T>::empty(rows * dim), Buffer::<T>::empty(rows * dim));
                    let (pw, pb) = (Buffer::<f32>::empty(blocks * dim), Buffer::<f32>::empty(blocks * dim));
                    let back = |base, dx: &Buffer<T>, pw, pb| {
                        let arguments =
                            [dy.at(), x.at(), w.at(), mean.at(), inv.at(), base, dx.at(), pw, pb, shape[0], shape[1]];
                        launch(&kernels::LAYER_NORM_BACKWARD, float::<T>(), sizes, &arguments);
                    };
                    back(NULL, &plain, pw.at(), pb.at());
                    back(r.at(), &added, NULL, NULL);
                    let start = vec![0.0; dim];
                    let sums = |p| if rows == 0 { start.clone() } else { sum_partials(p, blocks, &start) };
                    (y.get(), mean.get(), inv.get(), plain.get(), added.get(), sums(&pw), sums(&pb))
                });
                let (mut want_dw, mut want_db, mut worst) = (vec![0.0; dim], vec![0.0; dim], 1.0f64);
                let bias = if with_bias { wide(&b) } else { vec![0.0; dim] };
                for row in 0..rows {
                    let span = row * dim..(row + 1) * dim;
                    let (x, dy, w) = (wide(&x[span.clone()]), wide(&dy[span.clone()]), wide(&w));
                    let (want, want_mean, want_inv) = oracle::layer_norm(&x, &w, &bias, f64::from(EPS));
                    // The mean's error is magnified by inv_std, which two close numbers can make
                    // large.
                    let near = slack(dim) * want_inv.max(1.0);
                    close("layer y", &y[span.clone()], &want, near);
                    close("mean", &mean[row..=row], &[want_mean], near);
                    close("inv_std", &inv[row..=row], &[want_inv], near * want_inv);
                    let (dx, weight, bias) = oracle::layer_norm_backward(&dy, &x, &w, f64::from(EPS));
                    worst = worst.max(want_inv);
                    let slack = 4.0 * slack(dim) * want_inv * want_inv.max(1.0);
                    close("dx", &plain[span.clone()], &dx, slack);
                    let sum: Vec<f64> = dx.iter().zip(wide(&r[span.clone()])).map(|(dx, r)| dx + r).collect();
                    close("dx + r", &added[span], &sum, slack);
                    want_dw.iter_mut().zip(weight).for_each(|(total, w)| *total += w);
                    want_db.iter_mut().zip(bias).for_each(|(total, b)| *total += b);
                }
                close("dweight", &dw, &want_dw, sum_slack(rows, dim) * worst);
                close("dbias", &db, &want_db, sum_slack(rows, dim));
            }
        }
    }
}

dtypes! {
    fn query_and_key_heads_are_normalised_where_they_lie<T>() {
        for (rows, heads, kv_heads, dim) in [(0, 1, 1, 4), (7, 3, 1, 17), (40, 4, 2, 64)] {
            let (normed, all) = (heads + kv_heads, heads + 2 * kv_heads);
            let len = rows * all * dim;
            let (x, dy, wq, wk) = (values::<T>(1, len), values::<T>(2, len), values::<T>(3, dim), values::<T>(4, dim));
            let shape = [rows, heads, kv_heads, dim].map(|n| Argument::I32(n as i32));
            let blocks = row_blocks(rows);
            let (y, inv, dx, dwq, dwk) = both_orders(|| {
                let (x, wq, wk) = (Buffer::new(&x), Buffer::new(&wq), Buffer::new(&wk));
                let (y, inv) = (Buffer::<T>::empty(len), Buffer::<f32>::empty(rows * normed));
                let pointers = [x.at(), wq.at(), wk.at(), y.at(), inv.at()];
                let arguments = [&pointers[..], &shape, &[Argument::F32(EPS)]].concat();
                launch(&kernels::QK_NORM, float::<T>(), [rows * all, 1, 1], &arguments);
                let gradient = Buffer::new(&dy);
                let (pq, pk) = (Buffer::<f32>::empty(blocks * dim), Buffer::<f32>::empty(blocks * dim));
                let pointers = [gradient.at(), x.at(), wq.at(), wk.at(), inv.at(), pq.at(), pk.at()];
                let arguments = [&pointers[..], &shape].concat();
                launch(&kernels::QK_NORM_BACKWARD, float::<T>(), [rows, 8 * dim, 1], &arguments);
                let start = vec![0.0; dim];
                let sums = |p| if rows == 0 { start.clone() } else { sum_partials(p, blocks, &start) };
                (y.get(), inv.get(), gradient.get(), sums(&pq), sums(&pk))
            });
            let (mut want_q, mut want_k) = (vec![0.0; dim], vec![0.0; dim]);
            let mut most = 1.0f64;
            for row in 0..rows {
                for head in 0..all {
                    let span = (row * all + head) * dim..(row * all + head + 1) * dim;
                    if head >= normed {
                        assert!(y[span.clone()] == x[span.clone()] && dx[span.clone()] == dy[span], "values must pass");
                        continue;
                    }
                    let (is_query, weight) = (head < heads, wide(if head < heads { &wq } else { &wk }));
                    let (x, dy) = (wide(&x[span.clone()]), wide(&dy[span.clone()]));
                    let (want, want_inv) = oracle::rms_norm(&x, &weight, f64::from(EPS));
                    close("y", &y[span.clone()], &want, slack(dim));
                    let at = if is_query { row * heads + head } else { rows * heads + row * kv_heads + head - heads };
                    close("inv", &inv[at..=at], &[want_inv], slack(dim) * want_inv);
                    let (want, dw) = oracle::rms_norm_backward(&dy, &x, &weight, f64::from(EPS));
                    close("dx", &dx[span], &want, 4.0 * slack(dim) * want_inv);
                    most = most.max(want_inv);
                    let sums = if is_query { &mut want_q } else { &mut want_k };
                    sums.iter_mut().zip(dw).for_each(|(total, dw)| *total += dw);
                }
            }
            close("dwq", &dwq, &want_q, sum_slack(rows * heads, dim) * most);
            close("dwk", &dwk, &want_k, sum_slack(rows * kv_heads, dim) * most);
        }
    }
}
