//! Curves through measurements: seconds of a kernel by its shape, and of a collective by its size.
//!
//! The seconds of a kernel are divided into four terms: arithmetic at the speed of a product at
//! that moment, traffic at the speed of a copy, a start, and work on every element between products
//! (exponentials of scores, epilogues of results):
//!
//! ```text
//! t = r(shape) (a flops / product + b bytes / copy + c + d elements),   a, b, c, d >= 0
//! ```
//!
//! The coefficients a to d minimise the squared relative error over all measured shapes of the
//! kernel. The factor r is interpolated between the measured shapes. It reproduces each measurement
//! exactly, and between them near shapes count most (inverse distance in logarithms of the
//! dimensions, Shepard 1968). The terms say how a time changes with the machine's speeds and beyond
//! the measured shapes. The factor r holds the rest: tiles, caches, epilogues.

use super::Speeds;
use serde::{Deserialize, Serialize};

/// One measured call.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(from = "Row", into = "Row")]
pub struct Point {
    /// Its shape, in the order of the kernel's operation.
    pub dims: Vec<f64>,
    /// Number of operations.
    pub flops: f64,
    /// Number of bytes that must move.
    pub bytes: f64,
    /// Median seconds.
    pub seconds: f64,
    /// The speed of products at that time, as in [`Speeds`].
    pub product_flops: f64,
    /// The speed of copies at that time.
    pub copy_bytes_per_s: f64,
}

/// A point in a file: `[[dims], flops, bytes, seconds, product_flops, copy_bytes_per_s]`.
type Row = (Vec<f64>, f64, f64, f64, f64, f64);

impl From<Row> for Point {
    fn from((dims, flops, bytes, seconds, product_flops, copy_bytes_per_s): Row) -> Point {
        Point { dims, flops, bytes, seconds, product_flops, copy_bytes_per_s }
    }
}

impl From<Point> for Row {
    fn from(p: Point) -> Row {
        (p.dims, p.flops, p.bytes, p.seconds, p.product_flops, p.copy_bytes_per_s)
    }
}

/// The seconds of one kernel, on ranks that all run it at once.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelCurve {
    /// The operation, and the part of its form that changes its time.
    pub kernel: String,
    /// The dtype of its operands.
    pub dtype: String,
    /// Number of ranks that ran it at once.
    pub ranks: u32,
    /// Number of threads of each.
    pub threads: u32,
    /// `[[dims], flops, bytes, seconds, product_flops, copy_bytes_per_s]` for each shape.
    pub points: Vec<Point>,
}

/// A [`KernelCurve`], fitted.
#[derive(Clone, PartialEq, Debug)]
pub struct Fitted {
    kernel: String,
    dtype: String,
    terms: Parts,
    /// Logarithms of the dimensions, and measured over fitted seconds.
    ratios: Vec<(Vec<f64>, f64)>,
}

/// Seconds of arithmetic at the speed of products, of traffic at the speed of a copy, of one start,
/// and of 1e9 elements.
type Parts = [f64; TERMS];
const TERMS: usize = 4;

/// Number of points that an interpolation uses.
const NEIGHBOURS: usize = 6;

impl KernelCurve {
    pub(super) fn check(&self) -> Result<(), String> {
        let name = || format!("kernel {} in {}", self.kernel, self.dtype);
        let dims =
            self.points.first().map(|point| point.dims.len()).ok_or_else(|| format!("{} has no points", name()))?;
        for point in &self.points {
            let Point { seconds, product_flops, copy_bytes_per_s, .. } = point;
            if [seconds, product_flops, copy_bytes_per_s].iter().any(|value| !(**value > 0.0 && value.is_finite())) {
                return Err(format!("{}: seconds and speeds must be positive: {point:?}", name()));
            }
            if point.dims.len() != dims {
                return Err(format!("{}: shapes of {dims} and of {} dimensions", name(), point.dims.len()));
            }
        }
        Ok(())
    }

    /// Fits the terms and the factors that are left.
    pub fn fit(&self) -> Fitted {
        let row = |p: &Point| (parts(&self.kernel, &p.dims, p.flops, p.bytes, &speeds_of(p)), p.seconds);
        let rows: Vec<(Parts, f64)> = self.points.iter().map(row).collect();
        let terms = non_negative(&rows);
        let ratio = |(point, (parts, seconds)): (&Point, &(Parts, f64))| {
            (logarithms(&point.dims), seconds / dot(&terms, parts).max(1e-12))
        };
        Fitted {
            kernel: self.kernel.clone(),
            dtype: self.dtype.clone(),
            terms,
            ratios: self.points.iter().zip(&rows).map(ratio).collect(),
        }
    }
}

/// The speeds of products and copies at a point.
fn speeds_of(point: &Point) -> [f64; 2] {
    [point.product_flops, point.copy_bytes_per_s]
}

fn parts(kernel: &str, dims: &[f64], flops: f64, bytes: f64, [product, copy]: &[f64; 2]) -> Parts {
    let elements = match kernel.split(' ').next() {
        // Elements of the result, which has a bias, activation and residual.
        Some("linear" | "linear_fp8" | "linear_int8") => dims.iter().take(2).product(),
        // Scores: tokens x keys that each sees x heads.
        Some("attention" | "attention_backward") => dims.iter().take(3).product(),
        _ => 0.0,
    };
    [flops / product, bytes / copy, 1.0, 1e-9 * elements]
}

fn dot(a: &Parts, b: &Parts) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn logarithms(dims: &[f64]) -> Vec<f64> {
    dims.iter().map(|dim| dim.max(1.0).log2()).collect()
}

impl Fitted {
    /// Seconds of a call of this shape at these speeds.
    pub fn seconds(&self, dims: &[f64], flops: f64, bytes: f64, speeds: &Speeds) -> f64 {
        let at = [speeds.flops(&self.dtype), speeds.copy_bytes_per_s];
        self.ratio(&logarithms(dims)) * dot(&self.terms, &parts(&self.kernel, dims, flops, bytes, &at))
    }

    /// The ratio of measured to fitted seconds, interpolated between the measured shapes.
    fn ratio(&self, place: &[f64]) -> f64 {
        let distance = |other: &[f64]| place.iter().zip(other).map(|(a, b)| (a - b).powi(2)).sum::<f64>();
        let mut near: Vec<(f64, f64)> = self.ratios.iter().map(|(at, ratio)| (distance(at), *ratio)).collect();
        near.sort_by(|a, b| a.0.total_cmp(&b.0));
        near.truncate(NEIGHBOURS);
        // The square of the squared distance: weights fall with the fourth power, and a measured
        // shape gives its own ratio.
        let weight = |squared: f64| 1.0 / (squared * squared + 1e-9);
        let (sum, weights) = near.iter().fold((0.0, 0.0), |(sum, weights), (squared, ratio)| {
            (sum + weight(*squared) * ratio.ln(), weights + weight(*squared))
        });
        if weights > 0.0 { (sum / weights).exp() } else { 1.0 }
    }

    /// The part of a call's seconds that scales only with the number of calls.
    pub fn start_s(&self) -> f64 {
        self.terms[2]
    }
}

/// The non-negative coefficients that minimise the squared relative error. Every set of positive
/// terms is tried, and the best is taken.
fn non_negative(rows: &[(Parts, f64)]) -> Parts {
    let relative: Vec<Parts> = rows.iter().map(|(parts, t)| parts.map(|part| part / t)).collect();
    let error = |terms: &Parts| relative.iter().map(|parts| (dot(terms, parts) - 1.0).powi(2)).sum::<f64>();
    let mut best = ([0.0; TERMS], f64::INFINITY);
    for set in 1..1u32 << TERMS {
        let used: Vec<usize> = (0..TERMS).filter(|term| set & (1 << term) != 0).collect();
        let Some(terms) = solve(&relative, &used) else { continue };
        if terms.iter().all(|term| *term >= 0.0) && error(&terms) < best.1 {
            best = (terms, error(&terms));
        }
    }
    best.0
}

/// Least squares of `sum terms part = 1` over the `used` terms, by normal equations; None if they
/// are singular.
fn solve(relative: &[Parts], used: &[usize]) -> Option<Parts> {
    // Columns are scaled to one, because they differ by many orders of magnitude.
    let scale = |term: usize| relative.iter().map(|parts| parts[term].abs()).fold(0.0, f64::max);
    let scales: Vec<f64> = used.iter().map(|term| scale(*term)).collect();
    if scales.contains(&0.0) {
        return None;
    }
    let column = |row: &Parts, i: usize| row[used[i]] / scales[i];
    let n = used.len();
    let mut matrix = vec![vec![0.0; n + 1]; n];
    for row in relative {
        for i in 0..n {
            for j in 0..n {
                matrix[i][j] += column(row, i) * column(row, j);
            }
            matrix[i][n] += column(row, i);
        }
    }
    for i in 0..n {
        let pivot = (i..n).max_by(|a, b| matrix[*a][i].abs().total_cmp(&matrix[*b][i].abs()))?;
        matrix.swap(i, pivot);
        if matrix[i][i].abs() < 1e-9 * relative.len() as f64 {
            return None;
        }
        for row in i + 1..n {
            let factor = matrix[row][i] / matrix[i][i];
            for column in i..=n {
                matrix[row][column] -= factor * matrix[i][column];
            }
        }
    }
    let mut terms = [0.0; TERMS];
    let mut found = vec![0.0; n];
    for i in (0..n).rev() {
        let rest: f64 = (i + 1..n).map(|j| matrix[i][j] * found[j]).sum();
        found[i] = (matrix[i][n] - rest) / matrix[i][i];
        terms[used[i]] = found[i] / scales[i];
    }
    Some(terms)
}

/// The seconds of one collective between a number of ranks.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CollectiveCurve {
    /// `all_reduce`, `reduce_scatter` ...
    pub operation: String,
    /// Number of ranks of the group. Every rank of the machine was in one such group.
    pub ranks: u32,
    /// Number of hosts of the group, in equal parts.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub hosts: u32,
    /// Seconds of an empty message, by a straight line through all points.
    pub alpha_s: f64,
    /// Seconds per byte, by the same line.
    pub beta_s_per_byte: f64,
    /// `[bytes of the whole buffer, median seconds]`, ascending.
    pub points: Vec<[f64; 2]>,
}

fn one() -> u32 {
    1
}

fn is_one(hosts: &u32) -> bool {
    *hosts == 1
}

impl CollectiveCurve {
    pub(super) fn check(&self) -> Result<(), String> {
        let rising = self.points.windows(2).all(|pair| pair[0][0] < pair[1][0]);
        let positive = self.points.iter().flatten().all(|value| *value > 0.0 && value.is_finite());
        if self.points.is_empty() || !rising || !positive {
            return Err(format!("collective {}: points must be positive and their sizes rise", self.operation));
        }
        if self.hosts == 0 || self.ranks < self.hosts {
            return Err(format!("collective {}: {} ranks on {} hosts", self.operation, self.ranks, self.hosts));
        }
        Ok(())
    }

    /// Seconds of a message of `bytes`: between measured sizes along a straight line in logarithms,
    /// below them as the smallest one, above them in proportion to the bytes.
    pub fn seconds(&self, bytes: f64) -> f64 {
        let (first, last) = (self.points[0], self.points[self.points.len() - 1]);
        if bytes <= first[0] {
            return first[1];
        }
        if bytes >= last[0] {
            return last[1] * bytes / last[0];
        }
        let above = self.points.iter().position(|point| point[0] >= bytes).unwrap_or(self.points.len() - 1);
        let (low, high) = (self.points[above - 1], self.points[above]);
        let share = (bytes / low[0]).ln() / (high[0] / low[0]).ln();
        (low[1].ln() + share * (high[1] / low[1]).ln()).exp()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPEEDS: Speeds = Speeds { f32_flops: 2e11, bf16_flops: 4e12, copy_bytes_per_s: 3e10 };

    /// Products with a known time of three terms.
    fn product(m: f64, n: f64, k: f64, speeds: &Speeds) -> Point {
        let (flops, bytes) = (2.0 * m * n * k, 2.0 * (m * n + m * k + n * k));
        let seconds = 1.5 * flops / speeds.bf16_flops + 0.7 * bytes / speeds.copy_bytes_per_s + 4e-6;
        Point {
            dims: vec![m, n, k],
            flops,
            bytes,
            seconds,
            product_flops: speeds.bf16_flops,
            copy_bytes_per_s: speeds.copy_bytes_per_s,
        }
    }

    /// The same with tiles that are lost at small n, which no term describes.
    fn tiled(m: f64, n: f64, k: f64) -> Point {
        let point = product(m, n, k, &SPEEDS);
        Point { seconds: (1.0 + 32.0 / n) * point.seconds, ..point }
    }

    fn products(product: impl Fn(f64, f64, f64) -> Point) -> KernelCurve {
        let sizes = [64.0, 256.0, 1024.0];
        let all = sizes.iter().flat_map(|m| sizes.iter().flat_map(move |n| sizes.map(|k| (*m, *n, k))));
        let points = all.map(|(m, n, k)| product(m, n, k)).collect();
        KernelCurve { kernel: "linear".into(), dtype: "bf16".into(), ranks: 1, threads: 2, points }
    }

    fn error(fitted: &Fitted, point: &Point, speeds: &Speeds) -> f64 {
        (fitted.seconds(&point.dims, point.flops, point.bytes, speeds) / point.seconds - 1.0).abs()
    }

    #[test]
    fn measured_shapes_come_out_as_measured_and_others_near() {
        let curve = products(tiled);
        let fitted = curve.fit();
        for point in &curve.points {
            assert!(error(&fitted, point, &SPEEDS) < 1e-3, "{point:?}");
        }
        for (m, n, k) in [(512.0, 512.0, 512.0), (100.0, 768.0, 192.0), (900.0, 100.0, 300.0), (4096.0, 3072.0, 768.0)]
        {
            let point = tiled(m, n, k);
            assert!(error(&fitted, &point, &SPEEDS) < 0.12, "{point:?}: {}", error(&fitted, &point, &SPEEDS));
        }
    }

    #[test]
    fn a_machine_whose_tiles_are_slow_for_a_while_is_slow_where_they_decide() {
        let slow = Speeds { bf16_flops: 1e12, ..SPEEDS };
        let fitted = products(|m, n, k| product(m, n, k, &SPEEDS)).fit();
        for (m, n, k) in [(1024.0, 1024.0, 1024.0), (64.0, 64.0, 64.0)] {
            let point = product(m, n, k, &slow);
            assert!(error(&fitted, &point, &slow) < 0.02, "{point:?}: {}", error(&fitted, &point, &slow));
        }
    }

    #[test]
    fn no_term_is_negative_and_one_point_is_enough() {
        let one = KernelCurve { points: vec![tiled(64.0, 64.0, 64.0)], ..products(tiled) };
        let fitted = one.fit();
        assert!(error(&fitted, &one.points[0], &SPEEDS) < 1e-6);
        let large = product(2048.0, 2048.0, 2048.0, &SPEEDS);
        assert!(fitted.seconds(&large.dims, large.flops, large.bytes, &SPEEDS) > 0.0);
        assert!(fitted.terms.iter().all(|term| *term >= 0.0));
    }

    #[test]
    fn collectives_pass_through_their_points_and_grow_beyond_them() {
        let curve = super::super::tests::small().collectives.remove(0);
        let close = |bytes: f64, seconds: f64| (curve.seconds(bytes) / seconds - 1.0).abs() < 1e-9;
        assert!(close(8.0, 1e-5) && close(1e3, 1e-5) && close(1e6, 2e-4) && close(1e7, 2e-3));
        let middle = curve.seconds(3e4);
        assert!(1e-5 < middle && middle < 2e-4);
    }
}
