//! The plain operations, element by element with multi-indices: broadcasting, rearranging,
//! reducing, products, derivatives.

use crate::cpu::elementwise::{Binary, Unary};

/// The coordinates of element `index` of a row-major array of `shape`.
pub fn coordinates(shape: &[usize], mut index: usize) -> Vec<usize> {
    let mut at = vec![0; shape.len()];
    for (at, len) in at.iter_mut().zip(shape).rev() {
        *at = index % len;
        index /= len;
    }
    at
}

/// The element of an array of `shape` that broadcasting puts at coordinates `at`: counted from the
/// last dimension, 0 where it has size 1.
pub fn element(shape: &[usize], at: &[usize]) -> usize {
    let at = &at[at.len() - shape.len()..];
    shape.iter().zip(at).fold(0, |element, (len, at)| element * len + if *len == 1 { 0 } else { *at })
}

/// NumPy's broadcasting of two shapes that fit.
pub fn broadcast(a: &[usize], b: &[usize]) -> Vec<usize> {
    let rank = a.len().max(b.len());
    let dim = |shape: &[usize], i: usize| if i + shape.len() < rank { 1 } else { shape[i + shape.len() - rank] };
    (0..rank).map(|i| if dim(a, i) == 1 { dim(b, i) } else { dim(a, i) }).collect()
}

/// `f` of two arrays, broadcast together.
pub fn zip(f: impl Fn(f64, f64) -> f64, (a, sa): (&[f64], &[usize]), (b, sb): (&[f64], &[usize])) -> Vec<f64> {
    let shape = broadcast(sa, sb);
    let one = |index| {
        let at = coordinates(&shape, index);
        f(a[element(sa, &at)], b[element(sb, &at)])
    };
    (0..shape.iter().product()).map(one).collect()
}

/// The elements of each reduced group, in row-major order of what stays, put through `f`.
pub fn reduce(x: &[f64], shape: &[usize], reduced: &[bool], f: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    let kept: Vec<usize> = shape.iter().zip(reduced).map(|(len, reduced)| if *reduced { 1 } else { *len }).collect();
    let mut groups = vec![Vec::new(); kept.iter().product()];
    for (index, x) in x.iter().enumerate() {
        groups[element(&kept, &coordinates(shape, index))].push(*x);
    }
    groups.iter().map(|group| f(group)).collect()
}

/// Dimension `i` of the result is dimension `order[i]` of `x`.
pub fn permute(x: &[f64], shape: &[usize], order: &[usize]) -> Vec<f64> {
    let dims: Vec<usize> = order.iter().map(|dim| shape[*dim]).collect();
    let one = |index| {
        let mut at = vec![0; shape.len()];
        for (place, dim) in coordinates(&dims, index).into_iter().zip(order) {
            at[*dim] = place;
        }
        x[element(shape, &at)]
    };
    (0..x.len()).map(one).collect()
}

/// The product of the last two dimensions of arrays that broadcast over the others.
pub fn matmul((a, sa): (&[f64], &[usize]), (b, sb): (&[f64], &[usize])) -> Vec<f64> {
    let (batch_a, [m, k]) = split(sa);
    let (batch_b, [_, n]) = split(sb);
    let batch = broadcast(batch_a, batch_b);
    let mut y = Vec::new();
    for index in 0..batch.iter().product() {
        let at = coordinates(&batch, index);
        let (a, b) = (&a[element(batch_a, &at) * m * k..], &b[element(batch_b, &at) * k * n..]);
        for row in 0..m {
            y.extend((0..n).map(|column| (0..k).map(|i| a[row * k + i] * b[i * n + column]).sum::<f64>()));
        }
    }
    y
}

fn split(shape: &[usize]) -> (&[usize], [usize; 2]) {
    let (batch, matrix) = shape.split_at(shape.len() - 2);
    (batch, [matrix[0], matrix[1]])
}

/// The derivative of `f` at `x`.
pub fn slope(f: Unary, x: f64) -> f64 {
    match f {
        Unary::Neg => -1.0,
        Unary::Abs if x == 0.0 => 0.0,
        Unary::Abs => x.signum(),
        Unary::Exp => x.exp(),
        Unary::Ln => 1.0 / x,
        Unary::Sqrt => 0.5 / x.sqrt(),
        Unary::Rsqrt => -0.5 * x.powf(-1.5),
        Unary::Square => 2.0 * x,
        Unary::Reciprocal => -1.0 / (x * x),
        Unary::Tanh => 1.0 - x.tanh() * x.tanh(),
        Unary::Sigmoid => (-x).exp() / (1.0 + (-x).exp()).powi(2),
        Unary::Erf => std::f64::consts::FRAC_2_SQRT_PI * (-x * x).exp(),
        Unary::Sign => 0.0,
    }
}

/// The derivatives of `f` by its first and its second number.
pub fn slopes(f: Binary, a: f64, b: f64) -> [f64; 2] {
    let chosen = |first: bool| match (a == b, first) {
        (true, _) => [0.5, 0.5],
        (false, true) => [1.0, 0.0],
        (false, false) => [0.0, 1.0],
    };
    match f {
        Binary::Add => [1.0, 1.0],
        Binary::Sub => [1.0, -1.0],
        Binary::Mul => [b, a],
        Binary::Div => [1.0 / b, -a / (b * b)],
        Binary::Max => chosen(a > b),
        Binary::Min => chosen(a < b),
        Binary::Pow => [b * a.powf(b - 1.0), a.powf(b) * a.ln()],
    }
}
