//! Norms. Inputs are in `[-1, 1)`; statistics are sums of `n` terms in 16 to 64 chains, whose error
//! relative to the sum of magnitudes is at most about `(n / 8 + 10) 2^-24`, so results are off by
//! that times their size, at most `inv_rms |weight|`, some 3 here (rows of one element reach
//! `1 / sqrt(eps)` and are left to RMS norm, which is exact there).

use super::{ULP, close, dot, dtypes, is_gradient, on_every_cpu, values, wide};
use crate::cpu::Isa;
use crate::cpu::norm::{
    AddTo, HeadColumns, add_layer_norm, add_rms_norm, backward_workspace, layer_norm, layer_norm_backward, rms_norm,
    rms_norm_backward, rms_norm_heads, rms_norm_heads_backward,
};
use crate::dtype::Element;
use crate::reference::norm as oracle;

const EPS: f32 = 1e-5;
const SHAPES: [(usize, usize); 6] = [(0, 7), (1, 2), (3, 17), (5, 64), (301, 129), (77, 768)];

fn slack(n: usize) -> f64 {
    8.0 * (n as f64 / 8.0 + 10.0) * ULP
}

/// Sums of gradients over rows: every term is off by `slack`, and the sum adds its own roundings of
/// `rows` terms of about 3.
fn sum_slack(rows: usize, dim: usize) -> f64 {
    rows as f64 * (slack(dim) + 4.0 * ULP)
}

dtypes! {
    fn rms_norm_forward_and_fused_addition<T>() {
        for (rows, dim) in SHAPES {
            let (x, r, w) = (values::<T>(1, rows * dim), values::<T>(2, rows * dim), values::<T>(3, dim));
            on_every_cpu(
                |cpu| {
                    let (mut y, mut inv) = (vec![T::default(); rows * dim], vec![0.0; rows]);
                    rms_norm(cpu, &x, &w, EPS, &mut y, &mut inv);
                    let (mut sum, mut z, mut inv_z) = (y.clone(), y.clone(), inv.clone());
                    add_rms_norm(cpu, &x, &r, &w, EPS, &mut sum, &mut z, &mut inv_z);
                    (y, inv, sum, z, inv_z)
                },
                |isa, (y, inv, sum, z, inv_z)| {
                    let added: Vec<f64> = wide(&x).iter().zip(wide(&r)).map(|(x, r)| x + r).collect();
                    close(isa, "sum", sum, &added, 2.0 * ULP);
                    check_rms(isa, dim, &wide(&x), &wide(&w), y, inv);
                    check_rms(isa, dim, &wide(sum), &wide(&w), z, inv_z);
                },
            );
        }
    }
}

fn check_rms<T: Element>(isa: Isa, dim: usize, x: &[f64], w: &[f64], y: &[T], inv: &[f32]) {
    for (row, x) in x.chunks(dim).enumerate() {
        let (want, want_inv) = oracle::rms_norm(x, w, f64::from(EPS));
        close(isa, "rms y", &y[row * dim..(row + 1) * dim], &want, slack(dim));
        close(isa, "inv_rms", &inv[row..=row], &[want_inv], slack(dim) * want_inv);
    }
}

dtypes! {
    fn layer_norm_forward_and_fused_addition<T>() {
        for (rows, dim) in SHAPES {
            let (x, r) = (values::<T>(1, rows * dim), values::<T>(2, rows * dim));
            let (w, b) = (values::<T>(3, dim), values::<T>(4, dim));
            on_every_cpu(
                |cpu| {
                    let (mut y, mut mean, mut inv) = (vec![T::default(); rows * dim], vec![0.0; rows], vec![0.0; rows]);
                    layer_norm(cpu, &x, &w, &b, EPS, &mut y, &mut mean, &mut inv);
                    let (mut sum, mut z, mut mean_z, mut inv_z) = (y.clone(), y.clone(), mean.clone(), inv.clone());
                    add_layer_norm(cpu, &x, &r, &w, &b, EPS, &mut sum, &mut z, &mut mean_z, &mut inv_z);
                    (y, mean, inv, sum, z, mean_z, inv_z)
                },
                |isa, (y, mean, inv, sum, z, mean_z, inv_z)| {
                    for (x, y, mean, inv) in [(&x, y, mean, inv), (sum, z, mean_z, inv_z)] {
                        for (row, x) in wide(x).chunks(dim).enumerate() {
                            let (want, want_mean, want_inv) = oracle::layer_norm(x, &wide(&w), &wide(&b), f64::from(EPS));
                            // The mean's error is magnified by inv_std, which two close numbers can
                            // make large.
                            let slack = slack(dim) * want_inv.max(1.0);
                            close(isa, "layer y", &y[row * dim..(row + 1) * dim], &want, slack);
                            close(isa, "mean", &mean[row..=row], &[want_mean], slack);
                            close(isa, "inv_std", &inv[row..=row], &[want_inv], slack * want_inv);
                        }
                    }
                },
            );
        }
    }
}

dtypes! {
    fn rms_norm_backward_in_its_three_ways_to_add<T>() {
        for (rows, dim) in SHAPES {
            let (x, dy, r, w) =
                (values::<T>(1, rows * dim), values::<T>(2, rows * dim), values::<T>(3, rows * dim), values::<T>(4, dim));
            let (mut y, mut inv) = (x.clone(), vec![0.0; rows]);
            rms_norm(&crate::cpu::Cpu::new(Isa::Portable, 1), &x, &w, EPS, &mut y, &mut inv);
            on_every_cpu(
                |cpu| {
                    let mut space = vec![f32::NAN; backward_workspace(rows, dim)];
                    let (mut plain, mut added, mut onto) = (x.clone(), x.clone(), r.clone());
                    let mut dw = vec![1.0; dim];
                    rms_norm_backward(cpu, &dy, &x, &w, &inv, AddTo::Nothing, &mut plain, Some(&mut dw), &mut space);
                    rms_norm_backward(cpu, &dy, &x, &w, &inv, AddTo::Gradient(&r), &mut added, None, &mut []);
                    rms_norm_backward(cpu, &dy, &x, &w, &inv, AddTo::Output, &mut onto, None, &mut []);
                    assert!(added == onto, "adding to another buffer and to the output differ");
                    (plain, added, dw)
                },
                |isa, (plain, added, dw)| {
                    let mut want_dw = vec![1.0; dim];
                    for row in 0..rows {
                        let span = row * dim..(row + 1) * dim;
                        let (x, dy) = (wide(&x[span.clone()]), wide(&dy[span.clone()]));
                        let (dx, weight) = oracle::rms_norm_backward(&dy, &x, &wide(&w), f64::from(EPS));
                        let slack = 4.0 * slack(dim) * f64::from(inv[row]);
                        close(isa, "dx", &plain[span.clone()], &dx, slack);
                        let sum: Vec<f64> = dx.iter().zip(wide(&r[span.clone()])).map(|(dx, r)| dx + r).collect();
                        close(isa, "dx + r", &added[span], &sum, slack);
                        want_dw.iter_mut().zip(weight).for_each(|(total, w)| *total += w);
                    }
                    close(isa, "dweight", dw, &want_dw, sum_slack(rows, dim));
                },
            );
        }
    }
}

dtypes! {
    fn layer_norm_backward_in_its_three_ways_to_add<T>() {
        for (rows, dim) in SHAPES {
            let (x, dy, r, w) =
                (values::<T>(1, rows * dim), values::<T>(2, rows * dim), values::<T>(3, rows * dim), values::<T>(4, dim));
            let (mut y, mut mean, mut inv) = (x.clone(), vec![0.0; rows], vec![0.0; rows]);
            layer_norm(&crate::cpu::Cpu::new(Isa::Portable, 1), &x, &w, &w, EPS, &mut y, &mut mean, &mut inv);
            on_every_cpu(
                |cpu| {
                    let mut space = vec![f32::NAN; 2 * backward_workspace(rows, dim)];
                    let (mut plain, mut added, mut onto) = (x.clone(), x.clone(), r.clone());
                    let (mut dw, mut db, mut db_alone) = (vec![1.0; dim], vec![-1.0; dim], vec![-1.0; dim]);
                    let mut go = |base, dx: &mut [T], dw: Option<&mut [f32]>, db: Option<&mut [f32]>| {
                        layer_norm_backward(cpu, &dy, &x, &w, &mean, &inv, base, dx, dw, db, &mut space);
                    };
                    go(AddTo::Nothing, &mut plain, Some(&mut dw), Some(&mut db));
                    go(AddTo::Gradient(&r), &mut added, None, Some(&mut db_alone));
                    go(AddTo::Output, &mut onto, None, None);
                    assert!(added == onto, "adding to another buffer and to the output differ");
                    assert!(db == db_alone, "dbias with and without dweight differ");
                    (plain, added, dw, db)
                },
                |isa, (plain, added, dw, db)| {
                    let (mut want_dw, mut want_db) = (vec![1.0; dim], vec![-1.0; dim]);
                    let mut worst = 1.0f64;
                    for row in 0..rows {
                        let span = row * dim..(row + 1) * dim;
                        let (x, dy) = (wide(&x[span.clone()]), wide(&dy[span.clone()]));
                        let (dx, weight, bias) = oracle::layer_norm_backward(&dy, &x, &wide(&w), f64::from(EPS));
                        worst = worst.max(f64::from(inv[row]));
                        let slack = 4.0 * slack(dim) * f64::from(inv[row]) * f64::from(inv[row]).max(1.0);
                        close(isa, "dx", &plain[span.clone()], &dx, slack);
                        let sum: Vec<f64> = dx.iter().zip(wide(&r[span.clone()])).map(|(dx, r)| dx + r).collect();
                        close(isa, "dx + r", &added[span], &sum, slack);
                        want_dw.iter_mut().zip(weight).for_each(|(total, w)| *total += w);
                        want_db.iter_mut().zip(bias).for_each(|(total, b)| *total += b);
                    }
                    close(isa, "dweight", dw, &want_dw, sum_slack(rows, dim) * worst);
                    close(isa, "dbias", db, &want_db, sum_slack(rows, dim));
                },
            );
        }
    }
}

dtypes! {
    fn heads_are_normalised_where_they_lie<T>() {
        for (rows, columns) in [
            (0, HeadColumns { row_stride: 10, first: 0, heads: 2, head_dim: 5 }),
            (7, HeadColumns { row_stride: 61, first: 3, heads: 3, head_dim: 17 }),
            (150, HeadColumns { row_stride: 512, first: 128, heads: 2, head_dim: 64 }),
        ] {
            let (dim, heads) = (columns.head_dim, columns.heads);
            let len = rows * columns.row_stride;
            let (x, dy, w) = (values::<T>(1, len), values::<T>(2, len), values::<T>(3, dim));
            on_every_cpu(
                |cpu| {
                    let (mut y, mut inv) = (vec![T::from_f32(9.0); len], vec![0.0; rows * heads]);
                    rms_norm_heads(cpu, columns, &x, &w, EPS, &mut y, &mut inv);
                    let (mut gradient, mut dw) = (dy.clone(), vec![0.0; dim]);
                    let mut space = vec![f32::NAN; backward_workspace(rows, dim)];
                    rms_norm_heads_backward(cpu, columns, &x, &w, &inv, &mut gradient, Some(&mut dw), &mut space);
                    (y, inv, gradient, dw)
                },
                |isa, (y, inv, gradient, dw)| {
                    let (mut want_y, mut want_gradient, mut want_dw) = (vec![9.0; len], wide(&dy), vec![0.0; dim]);
                    let mut most = 1.0f64;
                    for row in 0..rows {
                        for head in 0..heads {
                            let at = row * columns.row_stride + columns.first + head * dim;
                            let (x, dy) = (wide(&x[at..at + dim]), wide(&dy[at..at + dim]));
                            let (out, scale) = oracle::rms_norm(&x, &wide(&w), f64::from(EPS));
                            close(isa, "inv", &inv[row * heads + head..][..1], &[scale], slack(dim) * scale);
                            most = most.max(scale);
                            want_y[at..at + dim].copy_from_slice(&out);
                            let (dx, weight) = oracle::rms_norm_backward(&dy, &x, &wide(&w), f64::from(EPS));
                            want_gradient[at..at + dim].copy_from_slice(&dx);
                            want_dw.iter_mut().zip(weight).for_each(|(total, w)| *total += w);
                        }
                    }
                    close(isa, "y", y, &want_y, slack(dim));
                    close(isa, "gradient", gradient, &want_gradient, 4.0 * slack(dim) * most);
                    close(isa, "dweight", dw, &want_dw, sum_slack(rows * heads, dim));
                },
            );
        }
    }
}

#[test]
fn oracles_are_gradients() {
    let (x, w, b, dy) = (
        wide(&values::<f32>(1, 9)),
        wide(&values::<f32>(2, 9)),
        wide(&values::<f32>(3, 9)),
        wide(&values::<f32>(4, 9)),
    );
    let eps = f64::from(EPS);
    let (dx, dw) = oracle::rms_norm_backward(&dy, &x, &w, eps);
    is_gradient("rms dx", &x, &dx, |x| dot(&oracle::rms_norm(x, &w, eps).0, &dy));
    is_gradient("rms dw", &w, &dw, |w| dot(&oracle::rms_norm(&x, w, eps).0, &dy));
    let (dx, dw, db) = oracle::layer_norm_backward(&dy, &x, &w, eps);
    is_gradient("layer dx", &x, &dx, |x| dot(&oracle::layer_norm(x, &w, &b, eps).0, &dy));
    is_gradient("layer dw", &w, &dw, |w| dot(&oracle::layer_norm(&x, w, &b, eps).0, &dy));
    is_gradient("layer db", &b, &db, |b| dot(&oracle::layer_norm(&x, &w, b, eps).0, &dy));
}
